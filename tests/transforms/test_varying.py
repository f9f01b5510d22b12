"""Transforms over fields that vary from step to step."""

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.errors import SchemaError

FIELDS = {
    "observation": {"prompt": mr.Field.text(max_bytes=40)},
    "tokens": mr.Field((None,), "int32", max_length=9),
    "number": mr.Field((), "int64"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
}


def buffer_of(transforms, sampler=None, count=12):
    """A buffer whose tokens and prompts follow from each step's number."""
    buffer = mr.ReplayBuffer.create(
        None,
        mr.Schema(FIELDS),
        40,
        engine="memory",
        heap_bytes="8 KiB",
        transforms=transforms,
        sampler=sampler or mr.UniformSampler(seed=0),
    )
    for number in range(count):
        buffer.add(
            {
                "observation": {"prompt": "ü" * (number % 3) + str(number)},
                "tokens": np.arange(number % 5, dtype=np.int32) + number,
                "number": number,
                "reward": 1.0,
                "terminated": number % 6 == 5,
            }
        )
    return buffer


def swapped(batch):
    """Return the texts under other names, some values changed, and lengths."""
    tokens = batch["tokens"]
    return {
        "number": batch["number"],
        "prompt": batch["observation/prompt"],
        "reversed": tokens[::-1],
        "tokens": mr.Ragged(tokens.values + 1, tokens.offsets, tokens.shape),
        "lengths": tokens.lengths,
    }


SAMPLERS = {
    "steps": lambda: mr.UniformSampler(seed=0),
    "windows": lambda: mr.SequenceSampler(3, mr.UniformSampler(seed=0)),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("below", [[], [mr.FrameStack(1, "tokens")]])
def test_apply_gets_values_and_may_return_them_under_any_name(sampler, below):
    buffer = buffer_of([*below, mr.Apply(swapped)], SAMPLERS[sampler]())
    batch = buffer.sample(8)
    numbers = batch["number"]
    shape = numbers.shape
    assert batch["prompt"].shape == shape
    tokens = batch["tokens"].reshape(*shape)
    for index in np.ndindex(shape):
        number = int(numbers[index])
        wanted = "ü" * (number % 3) + str(number)
        assert bytes(batch["prompt"][index]).decode() == wanted
        assert (tokens[index] == np.arange(number % 5) + number + 1).all()
        assert batch["lengths"].reshape(shape)[index] == number % 5


def test_apply_gets_stacks_of_values_and_next_observations():
    def count(batch):
        assert batch["tokens"].shape == (4, 2)
        following = batch["next_observation/prompt"].text()
        return {"count": batch["tokens"].lengths, "size": np.array(following) != ""}

    buffer = buffer_of([mr.FrameStack(2, "tokens"), mr.Apply(count)])
    assert buffer.sample(4)["count"].shape == (4, 2)


STACKED = {
    "text": (mr.Field.text(40), lambda n: "ü" * (n % 3) + str(n)),
    "bytes": (mr.Field.bytes(40), lambda n: bytes(range(n % 7))),
    "tokens": (
        mr.Field((None, 2), "int16", max_length=9),
        lambda n: np.full((n % 4, 2), n, np.int16),
    ),
}


def plain(value):
    """A value as its bytes."""
    return value.encode() if isinstance(value, str) else bytes(value)


def observed(value, number):
    """An observation of a field that varies, and one of numbers that says which."""
    return {"said": value(number), "x": [number, -number]}


@pytest.mark.parametrize("engine", ["memory", "memmap", "zarr"])
@pytest.mark.parametrize("kind", STACKED)
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("nstep", [1, 2])
@pytest.mark.parametrize("windows", [False, True])
def test_frames_of_next_observations_are_those_of_a_list(
    tmp_path, engine, kind, stored, nstep, windows
):
    """Stored next observations are values of another field than the older frames."""
    field, value = STACKED[kind]
    fields = {
        "observation": {"said": field, "x": mr.Field((2,), "float32")},
        "number": mr.Field((), "int64"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    }
    if stored:
        fields["next_observation"] = fields["observation"]
    k, length, count = 3, 7, 300
    transforms = [mr.FrameStack(k), mr.NStep(nstep, gamma=1.0)]
    # Shards of a compressed ring have 64 rows: some rows are in none.
    with mr.ReplayBuffer.create(
        None if engine == "memory" else tmp_path / "b",
        mr.Schema(fields),
        400,
        engine=engine,
        heap_bytes="64 KiB",
        transforms=transforms,
        sampler=mr.SequenceSampler(2, mr.UniformSampler(seed=0)) if windows else None,
    ) as buffer:
        for n in range(count):
            # Values of the next episode differ from those that followed the last one.
            number, ended = 2 * n + n // length, n % length == length - 1
            following = observed(value, number + 2)
            step = {"observation": observed(value, number)}
            if stored:
                step["next_observation"] = following
            buffer.add(
                step | {"number": n, "reward": 1.0, "terminated": ended},
                final_observation=following if ended and not stored else None,
            )
        batch = buffer.sample(200)
    numbers = batch["number"].reshape(-1)
    following = batch["next_observation/said"]
    frames = following.reshape(len(numbers), k)
    seen = batch["next_observation/x"].reshape(len(numbers), k, 2)
    for row, n in enumerate(numbers.tolist()):
        first = n - n % length
        last = min(n + nstep - 1, first + length - 1)
        wanted = [2 * max(p, first) + n // length for p in range(last - k + 2, last + 2)]
        assert [bytes(frame) for frame in frames[row]] == [
            plain(value(number)) for number in wanted
        ]
        assert seen[row, :, 0].tolist() == wanted


def test_a_loader_hands_out_what_apply_made():
    buffer = buffer_of([mr.Apply(swapped)])
    with mr.ReplayLoader(buffer, 4) as loader:
        batch = next(loader)
    assert len(batch["prompt"].text()) == 4
    assert isinstance(batch["reversed"], mr.Ragged)


def test_apply_may_return_tensors_that_vary():
    def tensors(batch):
        return {"tokens": batch["tokens"].tensors()}

    tokens = buffer_of([mr.Apply(tensors)]).sample(4)["tokens"]
    assert isinstance(tokens.values, np.ndarray | torch.Tensor)
    assert tokens.shape == (4,)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda b: b["tokens"][:2], "the shape of 'x' must begin with \\[4\\], got"),
        (
            lambda b: mr.Ragged(np.arange(3), np.array([0, 3, 1, 2, 3])),
            "offsets of 'x' must rise from 0 to 3",
        ),
        (
            lambda b: mr.Ragged(np.arange(3), np.array([0, 1, 1, 2, 9])),
            "offsets of 'x' must rise from 0 to 3",
        ),
    ],
)
def test_values_that_are_none_of_a_batch_are_refused(made, message):
    buffer = buffer_of([mr.Apply(lambda batch: {"x": made(batch)})])
    with pytest.raises(SchemaError, match=message):
        buffer.sample(4)


@pytest.mark.parametrize(
    "transform",
    [
        mr.ActionHistory(2, "tokens"),
        mr.Cast("int64", "tokens"),
        mr.Cast("float32", "observation"),
        mr.Delta("observation"),
        mr.DiscountedReturn(0.9, discount="tokens"),
        mr.GAE(0.9, 0.9, value="tokens"),
        mr.LambdaReturn(0.9, 0.9, value="reward", bootstrap="tokens"),
        mr.LambdaReturn(0.9, 0.9, value=len),
        mr.Normalize({"tokens": 0.0}, {"tokens": 1.0}),
        mr.NStep(2, 0.9, rewards="tokens"),
        mr.OneHot(5, "tokens"),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_transforms_that_compute_refuse_a_field_that_varies(transform):
    message = "'(tokens|observation/prompt)' must have one shape, but it varies from s"
    with pytest.raises(SchemaError, match=f"^{type(transform).__name__}: {message}"):
        buffer_of([transform])


def test_goals_that_vary_are_refused():
    goals = {
        "observation": {
            "achieved_goal": mr.Field((None,), "float32", max_length=3),
            "desired_goal": mr.Field((None,), "float32", max_length=3),
        },
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    }
    with pytest.raises(SchemaError, match=r"^HER: 'observation/achieved_goal' must h"):
        mr.ReplayBuffer.create(
            None,
            mr.Schema(goals),
            9,
            engine="memory",
            heap_bytes="8 KiB",
            transforms=[mr.HER("future", 0.5, lambda achieved, desired: 0.0)],
        )


def test_moments_are_not_fitted_to_a_field_that_varies():
    batch = buffer_of([]).sample(4)
    with pytest.raises(SchemaError, match=r"^Normalize: 'tokens' must have one shape"):
        mr.Normalize.fit([batch], ["tokens"])
