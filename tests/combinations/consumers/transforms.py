"""Each transform, and pairs of them: batches hold what the twin computes, or a refusal.

Whether a transform fits is known when the buffer is opened, and `Spec.refused` and
`pair_refused` say when it does not, as the documentation has it.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

import mmreplay as mr
from tests.combinations import expected as laws
from tests.combinations.build import VARYING, indices_of
from tests.combinations.compare import assert_column, assert_refusal, refused
from tests.combinations.consumers.rows import started
from tests.combinations.expected import GAMMA, LAM, Expected, as_numbers

CLASSES = 4096


@dataclass(frozen=True)
class Spec:
    """A transform with its expect.

    Attributes:
        make: Makes it, of a `Built`.
        expect: Has an `Expected` do the same, given the `Built`.
        refused: Whether it does not fit the buffer of a `Built`.
        reads_next: It needs next observations.
    """

    make: Callable
    expect: Callable
    refused: Callable = lambda built: False
    reads_next: bool = False


def rewards(achieved, desired, info):
    """Rewards of goals, float64 ``[M]``."""
    return laws.reward_of(achieved, desired)


def critic(observations):
    """Values of observations, by path, ``[M, *shape]`` each."""
    return sum(
        np.asarray(leaf, np.float64).reshape(len(leaf), -1)[:, -1]
        for path, leaf in observations.items()
        if path.startswith("observation")
    )


def one_value(observation):
    """The critic's value of one observation of the twin."""
    return sum(
        float(as_numbers(leaf).ravel()[-1])
        for path, leaf in observation.items()
        if path.startswith("observation")
    )


def twice(fields):
    """Fields of a batch, and the reward twice."""
    return {**fields, "twice": 2 * fields["reward"]}


def with_twice(index, last, values):
    """What `twice` makes of a step."""
    return values | {"twice": 2 * values["reward"]}


def kind_of(built, path):
    return built.fields.get(path)


def observed(built):
    return built.twin.observations


def no_observation(built):
    return not observed(built)


def observation_varies(built):
    return any(kind_of(built, path) in VARYING for path in observed(built))


def leaf(built):
    """The field that is changed one by one: that of the case's kind."""
    of_kind = [p for p in built.fields if p.startswith(built.case.role)]
    return [*of_kind, "reward"][0]


def leaf_varies(built):
    return kind_of(built, leaf(built)) in VARYING


def has_goals(built):
    return "observation/achieved_goal" in observed(built)


def per_agent(built):
    return built.twin.agents is not None


def no_critic(built):
    return per_agent(built) or no_observation(built) or observation_varies(built)


SPECS = {
    "NStep": Spec(lambda b: mr.NStep(2, GAMMA), lambda e, b: e.summed(2), reads_next=True),
    "NStep of 3": Spec(lambda b: mr.NStep(3, GAMMA), lambda e, b: e.summed(3), reads_next=True),
    "FrameStack": Spec(lambda b: mr.FrameStack(2), lambda e, b: e.stack(2), no_observation),
    "FrameStack of 3": Spec(lambda b: mr.FrameStack(3), lambda e, b: e.stack(3), no_observation),
    "ActionHistory": Spec(lambda b: mr.ActionHistory(2), lambda e, b: e.history(2)),
    "HER": Spec(
        lambda b: mr.HER("final", 1.0, rewards),
        lambda e, b: e.hindsight(),
        lambda b: not has_goals(b),
        reads_next=True,
    ),
    "DiscountedReturn": Spec(
        lambda b: mr.DiscountedReturn(GAMMA), lambda e, b: e.returns("default", one_value)
    ),
    "DiscountedReturn to limits": Spec(
        lambda b: mr.DiscountedReturn(GAMMA, time_limit="none"),
        lambda e, b: e.returns("none", one_value),
    ),
    "DiscountedReturn with values": Spec(
        lambda b: mr.DiscountedReturn(GAMMA, time_limit="bootstrap", value_fn=critic),
        lambda e, b: e.returns("bootstrap", one_value),
        no_critic,
        reads_next=True,
    ),
    "GAE": Spec(
        lambda b: mr.GAE(GAMMA, LAM, value="group", bootstrap="uid"),
        lambda e, b: e.estimates(("value_target", "advantage"), "group", "uid", None),
        per_agent,
        reads_next=True,
    ),
    "GAE of a critic": Spec(
        lambda b: mr.GAE(GAMMA, LAM, value=critic),
        lambda e, b: e.estimates(("value_target", "advantage"), None, None, one_value),
        no_critic,
        reads_next=True,
    ),
    "LambdaReturn": Spec(
        lambda b: mr.LambdaReturn(GAMMA, LAM, value="group"),
        lambda e, b: e.estimates(("lambda_return", None), "group", None, None),
        per_agent,
        reads_next=True,
    ),
    "LambdaReturn of a critic": Spec(
        lambda b: mr.LambdaReturn(GAMMA, LAM, value=critic, horizon=2),
        lambda e, b: e.estimates(("lambda_return", None), None, None, one_value, 2),
        no_critic,
        reads_next=True,
    ),
    "Cast": Spec(
        lambda b: mr.Cast("float64", leaf(b), scale=0.5, offset=1.0),
        lambda e, b: e.elementwise((leaf(b),), lambda v: as_numbers(v) * 0.5 + 1),
        leaf_varies,
    ),
    "Cast of rewards": Spec(
        lambda b: mr.Cast("float64", "reward", scale=2.0),
        lambda e, b: e.elementwise(("reward",), lambda v: as_numbers(v) * 2),
    ),
    "Normalize": Spec(
        lambda b: mr.Normalize({leaf(b): 1.0}, {leaf(b): 2.0}),
        lambda e, b: e.elementwise((leaf(b),), lambda v: (as_numbers(v) - 1) / 2),
        leaf_varies,
    ),
    "OneHot": Spec(
        lambda b: mr.OneHot(CLASSES),
        lambda e, b: e.elementwise(("action",), lambda v: np.arange(CLASSES) == v),
    ),
    "Delta": Spec(
        lambda b: mr.Delta(),
        lambda e, b: e.differences(observed(b)),
        lambda b: (
            no_observation(b)
            or observation_varies(b)
            or any(kind_of(b, path) == "bool" for path in observed(b))
        ),
        reads_next=True,
    ),
    "WithoutNext": Spec(lambda b: mr.WithoutNext(), lambda e, b: e.leave_next_out()),
    "Apply": Spec(lambda b: mr.Apply(twice), lambda e, b: e.at_step.append(with_twice)),
}

ESTIMATES = ("DiscountedReturn", "GAE", "LambdaReturn")
TWICE = ("WithoutNext", "Cast", "Normalize", "Apply")
"""What may follow itself."""


def base(name):
    """The transform of a spec's name."""
    return name.split()[0]


def pair_refused(built, one, other):
    """Whether a transform is refused after another one that fits."""
    first, second = base(one), base(other)
    changed = {
        "NStep": {"reward"},
        "HER": {"reward", "observation/desired_goal"},
        "FrameStack": set(observed(built)),
        "Cast": {"reward"} if one == "Cast of rewards" else {leaf(built)},
        "Normalize": {leaf(built)},
        "OneHot": {"action"},
    }.get(first, set())
    if first == "Apply":
        return second != "Apply"
    if first == second and second not in TWICE:
        return True
    if "WithoutNext" in (first, second):
        return SPECS[one].reads_next or SPECS[other].reads_next
    if other == "DiscountedReturn with values":
        return bool(changed & {"reward", *observed(built)})
    if second in ESTIMATES:
        return bool(changed & {"reward"})
    if second == "HER":
        needed = {"observation/achieved_goal", "observation/desired_goal", "reward"}
        return first in ESTIMATES or bool(changed & needed)
    if second == "Delta" and one == "Cast" and kind_of(built, leaf(built)) == "bool":
        return False
    return False


def one_transform(name):
    """A consumer that looks at one transform."""

    def look(built, rng):
        if SPECS[name].refused(built):
            assert_refused(built, [name])
        else:
            check(built, [name], rng)

    return look


def pairs(built, rng):
    """Some pairs of transforms, in either order."""
    names = list(SPECS)
    for _ in range(4):
        chosen = [names[i] for i in rng.integers(len(names), size=2)]
        if any(SPECS[name].refused(built) for name in chosen):
            refusable = True
            if base(chosen[0]) in ("Cast", "Normalize"):
                # What it makes may be what the other one needs.
                refusable = SPECS[chosen[0]].refused(built)
            if refusable:
                assert_refused(built, chosen)
        elif pair_refused(built, *chosen):
            assert_refused(built, chosen)
        else:
            check(built, chosen, rng)


def assert_refused(built, names):
    """The buffer does not open with these transforms, and the error says why."""
    try:
        built.open(transforms=[SPECS[name].make(built) for name in names])
    except mr.SchemaError as error:
        assert_refusal(error)
        return
    raise AssertionError(f"{' and '.join(names)}: was not refused")


def check(built, names, rng):
    """All that a batch after some transforms holds, of single steps and windows."""
    try:
        compare(built, names, rng)
    except Exception as error:
        words = f"{' and '.join(names)}: {type(error).__name__}: {error}"
        raise AssertionError(words) from error


def compare(built, names, rng):
    expected = Expected(built.twin)
    for name in names:
        SPECS[name].expect(expected, built)
    transforms = [SPECS[name].make(built) for name in names]
    buffer = built.open(transforms=transforms, sampler=mr.UniformSampler(seed=1))
    legal = expected.legal()
    assert started(buffer) == legal, (started(buffer), legal)
    if not legal:
        with refused(mr.EmptyError):
            buffer.sample(2)
        return
    chosen = [legal[i] for i in rng.permutation(len(legal))]
    batch = buffer.take(*np.array(chosen).T)
    assert indices_of(batch) == chosen
    steps = [expected.step(index) for index in chosen]
    assert_values(batch.fields, steps, range(len(steps)))
    batch = buffer.sample(3)
    assert_values(batch.fields, [expected.step(p) for p in indices_of(batch)], range(3))
    if not any(base(name) == "Apply" for name in names):
        windows(buffer, expected, set(legal), "pad")
        # There may be no two steps that follow each other.
        with suppress(mr.EmptyError):
            windows(buffer, expected, set(legal), "any")


def windows(buffer, expected, legal, boundary):
    """Steps of windows that the mask does not leave out are as single ones."""
    sampler = mr.SequenceSampler(2, mr.UniformSampler(seed=2), boundary=boundary)
    batch = buffer.sample_by(sampler, 3)
    env_ids = np.repeat(batch.env_ids[:, None], batch.window_positions.shape[1], 1)
    indices = list(
        zip(env_ids.ravel().tolist(), batch.window_positions.ravel().tolist(), strict=True)
    )
    mask = np.ones(len(indices), bool) if batch.mask is None else batch.mask.ravel()
    assert {index for index, inside in zip(indices, mask, strict=True) if inside} <= legal
    known = np.flatnonzero(mask).tolist()
    width = batch.window_positions.shape[1]
    steps = []
    for number in known:
        group = [
            indices[other]
            for other in known
            if other // width == number // width
            and episode_of(expected.twin, indices[other])
            == episode_of(expected.twin, indices[number])
        ]
        steps.append(expected.step(indices[number], group))
    fields = {p: a for p, a in batch.fields.items() if p != "is_first"}
    flat = {
        path: a.reshape(len(indices), *a.shape[2:]) if len(a.shape) > 1 else a
        for path, a in fields.items()
    }
    assert_values(flat, steps, known)


def episode_of(twin, index):
    """Environment and number of a step's episode."""
    return index[0], twin.row(index).episode


def assert_values(fields, steps, rows):
    """Rows of a batch's fields hold the expected steps; floats up to rounding."""
    if not steps:
        return
    rows = np.array(list(rows))
    assert set(fields) == set(steps[0]), set(fields) ^ set(steps[0])
    for path in sorted(fields):
        column, values = fields[path], [step[path] for step in steps]
        if isinstance(column, mr.Ragged):
            assert_column(path, column[rows], values)
            continue
        column, want = np.asarray(column)[rows], np.array(values)
        assert column.shape == want.shape, (path, column.shape, want.shape)
        if column.dtype.kind == "f":
            # Delta of float16 is exact only in some digits.
            rtol = 2e-3 if column.dtype == np.float16 else 1e-5
            np.testing.assert_allclose(column, want, rtol, 1e-6, err_msg=path)
        else:
            np.testing.assert_array_equal(column, want, err_msg=path)


def relabelled(built, rng):
    """A goal of HER is one that the step's episode achieved, and earns its reward."""
    twin = built.twin
    if not has_goals(built):
        return
    achieved, desired = "observation/achieved_goal", "observation/desired_goal"
    for strategy in ("future", "episode"):
        buffer = built.open(
            transforms=[mr.HER(strategy, 0.7, rewards)], sampler=mr.UniformSampler(3)
        )
        legal = twin.legal()
        if not legal:
            return
        batch = buffer.sample(40)
        for number, index in enumerate(indices_of(batch)):
            steps = twin.episode_of(index)
            some = steps[steps.index(index) :] if strategy == "future" else steps
            after = [f[achieved] for f in map(twin.next_of, some) if f is not None]
            goal, stored = batch[desired][number], twin.stored(index)
            reward = batch["reward"][number]
            kept = (goal == stored[desired]).all() and reward == stored["reward"]
            own = twin.next_of(index)[achieved]
            given = any((goal == other).all() for other in after)
            given = given and reward == np.float32(laws.reward_of(own, goal))
            assert kept or given, (strategy, index, goal, reward)
            following = batch[f"next_{desired}"][number]
            assert (following == (twin.next_of(index)[desired] if kept else goal)).all()


CONSUMERS = {
    **{name: one_transform(name) for name in SPECS},
    "pairs of transforms": pairs,
    "HER of chance": relabelled,
}
