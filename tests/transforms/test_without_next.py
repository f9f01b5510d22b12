"""Steps without next observations, and windows that hold steps without a known one,
against an enumeration of all small rings."""

import dataclasses
import itertools
import warnings

import numpy as np
import pytest
from torch.utils.data import DataLoader

import mmreplay as mr
from mmreplay.errors import EmptyError, SchemaError, StaleError
from tests.buffer.support import FIELDS, Twin
from tests.samplers.windows_oracle import drawn, windows

pytestmark = pytest.mark.filterwarnings(
    "ignore:windows with boundary='any' hold steps whose next observation is unknown"
)

MODES = [
    ("disabled", False),
    ("disabled", True),
    ("same_step", False),
    ("same_step", True),
    ("next_step", False),
]
SHAPES = [
    {"length": 2},
    {"length": 3, "boundary": "any"},
    {"length": 3, "boundary": "pad"},
    {"length": 1, "burn_in": 1, "bootstrap": 1, "boundary": "pad"},
]


def small_rings(autoreset, final, transforms=(), longest=5):
    """A ring of four rows for each sequence of steps and ends, with its oracle."""
    for length in range(1, longest + 1):
        for kinds in itertools.product(["", "t", "u"], repeat=length):
            options = {"autoreset": autoreset, "transforms": transforms}
            twin = Twin(None, 4, 1, **options)
            twin.extend([[kind] for kind in kinds], [0], final)
            yield twin
            twin.buffer.close()


def starts(buffer):
    """Every legal start by rank."""
    view = buffer.view
    count = int(view.starts.lengths.sum()) - view.num_illegal
    steps_of = view.start_at(np.arange(count))
    return list(zip(*(each.tolist() for each in steps_of), strict=True))


def every_window(buffer, **shape):
    """All windows of a buffer, as the oracle gives them, and their batch."""
    sampler = mr.SequenceSampler(sampler=mr.ShuffledSampler(0, shuffle=False), **shape)
    draw = sampler.draw(buffer.view, 99)
    return dict(drawn(draw)), buffer.gather(draw)


@pytest.mark.parametrize(("autoreset", "final"), MODES)
@pytest.mark.slow
def test_each_step_of_each_small_ring_is_a_legal_start(autoreset, final):
    for twin in small_rings(autoreset, final, [mr.WithoutNext()]):
        buffer, oracle = twin.buffer, twin.oracle
        steps = oracle.steps()
        assert starts(buffer) == steps
        if not steps:
            continue
        batch = buffer.take(*np.array(steps).T)
        assert set(batch) == set(FIELDS)
        for row, place in enumerate(steps):
            for path, value in oracle.row(*place).items():
                np.testing.assert_array_equal(batch[path][row], value, err_msg=path)
        for shape in SHAPES:
            expected = windows(oracle, legal=steps, **shape)
            if expected:
                found, batch = every_window(buffer, **shape)
                assert found == expected
                assert not any(path.startswith("next_") for path in batch)
        episodes = mr.EpisodeSampler(
            mr.ShuffledSampler(0, shuffle=False), layout="ragged", running=True
        )
        try:
            draw = episodes.draw(buffer.view, 9)
        except EmptyError:
            continue
        assert draw.mask.all()
        held = zip(draw.env_ids.tolist(), draw.positions.tolist(), strict=True)
        assert set(held) <= set(steps)


@pytest.mark.parametrize(("autoreset", "final"), MODES)
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.sliced(1)
def test_windows_hold_steps_without_a_known_next_observation(autoreset, final, contiguous):
    unknown = 0
    for twin in small_rings(autoreset, final, longest=4):
        buffer, oracle = twin.buffer, twin.oracle
        legal = oracle.legal()
        assert starts(buffer) == sorted(legal)
        for shape in SHAPES:
            expected = windows(oracle, **shape)
            if not expected:
                continue
            sampler = mr.SequenceSampler(sampler=mr.ShuffledSampler(0, shuffle=False), **shape)
            batch = buffer.sample_by(sampler, 99, contiguous=contiguous)
            assert len(batch) == len(expected)
            for row, position in enumerate(batch.positions.tolist()):
                steps_of, mask, is_first = expected[0, position]
                assert batch.window_positions[row].tolist() == steps_of
                assert batch.mask[row].tolist() == mask
                assert batch["is_first"][row].tolist() == is_first
                for column, place in enumerate(steps_of):
                    values = oracle.row(0, place)
                    after = legal.get((0, place), values)
                    own = values["observation"]
                    values["next_observation"] = after.get("next_observation", own)
                    for path, value in values.items():
                        got = batch[path][row, column]
                        np.testing.assert_array_equal(got, value, err_msg=path)
                    unknown += (0, place) not in legal
    # In next-step mode each end has a final row, or waits for it.
    assert (unknown > 0) == (not final and autoreset != "next_step")


@pytest.mark.parametrize("engine", ["memory", "memmap", "zarr"])
@pytest.mark.parametrize("layout", ["env_major", "time_major"])
def test_whole_episodes_have_all_their_steps_on_every_engine(tmp_path, engine, layout):
    path = None if engine == "memory" else tmp_path / "ring"
    twin = Twin(path, 60, 2, engine=engine, layout=layout)
    twin.extend([["", ""], ["", "u"], ["u", ""], ["u", "u"], ["", "t"]])
    for sampler in ("padded", "ragged"):
        batch = twin.buffer.sample_by(
            mr.EpisodeSampler(mr.ShuffledSampler(0, shuffle=False), layout=sampler), 9
        )
        if sampler == "ragged":
            assert np.diff(batch.offsets).tolist() == [3, 1, 2, 2, 1]
            assert batch.mask.tolist() == [1, 1, 0, 0, 1, 0, 1, 0, 1]
            assert repr(batch).startswith("<Batch of 9 steps: ")
        else:
            assert batch.window_positions.shape == batch.mask.shape == (5, 3)
            assert batch.mask.sum(1).tolist() == [2, 0, 1, 1, 1]
            assert repr(batch).startswith("<Batch of 5 windows: ")
        real = batch["truncated"] | batch["terminated"]
        assert (batch["next_observation"] == batch["observation"]).all(-1)[real].all()
        assert (batch.torch().mask.numpy() == batch.mask).all()
    twin.buffer.close()


def test_stored_next_observations_need_no_mask_of_ragged_episodes():
    twin = Twin(None, 20, stored=True)
    twin.extend([[""], ["u"], [""], ["u"]])
    sampler = mr.EpisodeSampler(mr.UniformSampler(0), layout="ragged")
    assert twin.buffer.sample_by(sampler, 3).mask is None


def test_episodes_are_as_long_as_the_filters_count():
    twin = Twin(None, 40)
    for length in (3, 4, 5):
        twin.extend([[""]] * (length - 1) + [["u"]])
    twin.extend([[""]] * 4)  # still running: three of its steps can be drawn
    buffer = twin.buffer

    def lengths(**options):
        inner = mr.ShuffledSampler(0, shuffle=False)
        sampler = mr.EpisodeSampler(inner, layout="ragged", **options)
        return np.diff(buffer.sample_by(sampler, 9).offsets).tolist()

    assert lengths() == [3, 4, 5]
    assert lengths(min_length=4) == [4, 5]
    inner = mr.UniformSampler(0)
    running = mr.EpisodeSampler(inner, layout="ragged", running=True, min_length=4, max_length=4)
    batch = buffer.sample_by(running, 50)
    assert set(batch.positions.tolist()) == {3, 4, 5, 6}
    assert lengths(max_length=3) == [3]
    table = mr.episode_table(buffer)
    good = mr.return_within(table, float(table.returns[2]))
    batch = buffer.sample_by(
        mr.EpisodeSampler(mr.UniformSampler(0), where=good, layout="ragged"), 3
    )
    sums = np.add.reduceat(batch["reward"], batch.offsets[:-1])
    np.testing.assert_allclose(sums, table.returns[2])


@pytest.mark.parametrize("without", [False, True])
def test_a_running_episode_is_chosen_by_the_steps_that_batches_hold(without):
    twin = Twin(None, 40, transforms=[mr.WithoutNext()] if without else [])
    twin.extend([[""]] * 2 + [["u"]] + [[""]] * 4)
    returns = mr.episode_table(twin.buffer).returns
    by_return = mr.return_within(mr.episode_table(twin.buffer), float(returns[1]))

    def lengths(where):
        sampler = mr.EpisodeSampler(
            mr.UniformSampler(0), layout="ragged", running=True, where=where
        )
        return set(np.diff(twin.buffer.sample_by(sampler, 50).offsets).tolist())

    assert lengths(lambda rows: rows.lengths == (4 if without else 3)) == ({4} if without else {3})
    if without:
        assert lengths(by_return) == {4}
    else:
        with pytest.raises(EmptyError):
            lengths(by_return)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_rewards_are_summed_up_to_an_end_without_a_next_observation(n):
    twin = Twin(None, 40, transforms=[mr.NStep(n, gamma=0.5)])
    twin.extend([[""]] * 4 + [["u"]] + [[""]] * 4)
    batch = twin.buffer.sample_by(mr.EpisodeSampler(mr.UniformSampler(0), layout="ragged"), 1)
    rewards = np.arange(1, 6) / 4
    assert batch.mask.tolist() == [t + n < 5 for t in range(5)]
    for t in range(5):
        some = rewards[t : t + n]
        np.testing.assert_allclose(batch["reward"][t], some @ 0.5 ** np.arange(len(some)))
        after = t if t + n >= 5 else t + n
        np.testing.assert_array_equal(batch["next_observation"][t], [after + 1, -after - 1])
        assert batch["discount"][t] == 0.5 ** len(some)


def test_returns_of_an_episode_are_those_of_its_steps():
    twin = Twin(None, 40, transforms=[mr.DiscountedReturn(1.0, time_limit="none")])
    twin.extend([[""]] * 3 + [["u"]] + [[""]])
    batch = twin.buffer.sample_by(mr.EpisodeSampler(mr.UniformSampler(0), layout="ragged"), 1)
    assert len(batch) == 4
    sums = np.cumsum(batch["reward"][::-1])[::-1]
    np.testing.assert_allclose(batch["discounted_return"], sums)


def reached(achieved, desired, info):
    return -np.abs(achieved - desired).sum(-1)


NEEDS_NEXT = {
    "NStep": mr.NStep(2, 0.9),
    "Delta": mr.Delta("observation/achieved_goal"),
    "HER": mr.HER("future", 0.5, reached),
    "GAE": mr.GAE(0.9, value="action"),
    "LambdaReturn": mr.LambdaReturn(0.9, value="action"),
    "DiscountedReturn": mr.DiscountedReturn(
        0.9, time_limit="bootstrap", value_fn=lambda columns: columns["action"]
    ),
}
GOALS = {
    "observation": {
        "achieved_goal": mr.Field((2,), "float64"),
        "desired_goal": mr.Field((2,), "float64"),
    },
    "action": mr.Field((), "float32"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", NEEDS_NEXT)
def test_transforms_that_need_next_observations_are_refused(name, before):
    transforms = [NEEDS_NEXT[name], mr.WithoutNext()]
    message = (
        rf"^transforms: {name} needs next observations, which WithoutNext leaves out\. "
        r"Remove one of the two\.$"
    )
    with pytest.raises(SchemaError, match=message):
        mr.ReplayBuffer.create(
            None,
            mr.Schema(GOALS),
            20,
            engine="memory",
            transforms=transforms if before else transforms[::-1],
        )


def test_a_next_observation_that_was_left_out_is_no_field():
    twin = Twin(None, 20, transforms=[mr.WithoutNext()])
    twin.extend([[""]] * 5)
    batch = twin.buffer.sample(3)
    with pytest.raises(SchemaError, match=r"has no field 'next_observation'.*WithoutNext"):
        batch["next_observation"]
    assert batch.get("next_observation") is None
    windows_of = mr.SequenceSampler(2, first_only=("next_observation",))
    with pytest.raises(SchemaError, match=r"got 'next_observation'\. The transform Wi"):
        twin.buffer.sample_by(windows_of, 1)
    with pytest.raises(SchemaError, match="WithoutNext leaves next observations out"):
        mr.ReplayBuffer.create(
            None,
            twin.buffer.schema,
            9,
            engine="memory",
            transforms=[mr.WithoutNext(), mr.Cast("float32", "next_observation")],
        )


def test_stored_next_observations_are_left_out_too():
    twin = Twin(None, 20, stored=True, transforms=[mr.WithoutNext(), mr.FrameStack(2)])
    twin.extend([[""]] * 3 + [["u"]])
    batch = twin.buffer.take(0, [0, 1, 2, 3])
    assert "next_observation" not in batch
    assert batch["observation"].shape == (4, 2, 2)
    assert batch["observation"][:, 1, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("first", [False, True])
def test_histories_have_a_next_one_only_where_there_are_next_observations(first):
    transforms = [mr.ActionHistory(2), mr.WithoutNext()]
    twin = Twin(None, 20, transforms=transforms[::-1] if first else transforms)
    twin.extend([[""]] * 3)
    batch = twin.buffer.take(0, [0, 1, 2])
    assert [path for path in batch if path.startswith("next_")] == []
    assert batch["action_history"].tolist() == [[0, 0], [0, 1], [1, 2]]
    schema = mr.Schema({"action": mr.Field((), "int32")})
    with mr.ReplayBuffer.create(
        None, schema, 20, engine="memory", transforms=[mr.ActionHistory(2)]
    ) as buffer:
        buffer.extend(action=np.arange(1, 7))
        assert starts(buffer) == [(0, position) for position in range(6)]
        assert set(buffer.sample(3)) == {"action", "action_history"}


def test_a_step_that_becomes_a_legal_start_has_the_priority_it_entered_with(tmp_path):
    twin = Twin(tmp_path / "ring", 20)
    twin.extend([[""]] * 3 + [["u"]] + [[""]] * 3)
    twin.buffer.close()

    def masses(transforms):
        sampler = mr.PrioritizedSampler(1.0, 0.0, eps=0.0, seed=0)
        with mr.ReplayBuffer.open(twin.path, "r", sampler=sampler, transforms=transforms) as buffer:
            batch = buffer.sample(400)
            shares = dict(zip(batch.positions.tolist(), batch.probabilities.tolist(), strict=True))
            buffer.update_priorities(batch, np.full(400, 3.0))
        return shares

    without = [mr.WithoutNext()]
    first = masses([])
    assert set(first) == {0, 1, 2, 4, 5}
    second = masses(without)
    # Seen as rows at 1 by the first draw; those that it could draw were set to 3.
    assert second == pytest.approx({p: (3.0 if p in first else 1.0) / 17.0 for p in range(7)})
    assert masses([]) == pytest.approx(dict.fromkeys(first, 1 / 5))
    assert masses(without) == pytest.approx(dict.fromkeys(range(7), 1 / 7))


def test_masks_of_unknown_next_observations_are_warned_of_once():
    twin = Twin(None, 20)
    twin.extend([[""], ["u"], [""], [""]])
    sampler = mr.SequenceSampler(3, mr.UniformSampler(0), boundary="any")
    with pytest.warns(RuntimeWarning, match=r"batch\.mask.*WithoutNext"):
        twin.buffer.sample_by(sampler, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin.buffer.sample_by(sampler, 4)


def test_a_step_without_a_next_observation_is_gathered_in_windows_only():
    twin = Twin(None, 20)
    twin.extend([[""], ["u"], [""], [""]])
    buffer = twin.buffer
    draw = mr.SequenceSampler(2, mr.ShuffledSampler(0, shuffle=False)).draw(buffer.view, 1)
    assert draw.windows.mask.tolist() == [[True, False]]
    assert buffer.gather(draw)["truncated"].tolist() == [[False, True]]
    draw.windows.mask[...] = True
    with pytest.raises(StaleError, match="position 1 of environment 0 cannot be drawn"):
        buffer.gather(draw)
    with pytest.raises(StaleError, match="position 1 of environment 0 cannot be drawn"):
        buffer.take(0, [1])


def test_windows_without_a_transition_get_priority_zero():
    sampler = mr.SequenceSampler(
        1, mr.PrioritizedSampler(1.0, 0.0, eps=0.0, seed=0), boundary="pad"
    )
    twin = Twin(None, 20, sampler=sampler)
    twin.extend([[""], ["u"], [""], [""]])
    batch = twin.buffer.sample(99)
    assert set(batch.positions.tolist()) == {0, 1, 2}
    twin.buffer.update_priorities(batch, np.ones((99, 1)))
    assert set(twin.buffer.sample(99).positions.tolist()) == {0, 2}


def episodes_of_three(path):
    """Three episodes of three steps in two environments, truncated or running."""
    twin = Twin(path, 30, 2)
    twin.extend([["", ""], ["", ""], ["u", "u"]] * 2 + [["", ""]] * 3)
    twin.buffer.close()
    return [(env_id, position) for env_id in range(2) for position in range(9)]


def steps_of(batch):
    return list(zip(batch.env_ids.tolist(), batch.positions.tolist(), strict=True))


def a_loader(path):
    with (
        mr.ReplayBuffer.open(
            path, transforms=[mr.WithoutNext()], sampler=mr.ShuffledSampler(0)
        ) as buffer,
        mr.ReplayLoader(buffer, batch_size=6) as loader,
    ):
        return list(itertools.islice(loader, 3))


def a_dataset(path):
    dataset = mr.ReplayDataset(path, transforms=[mr.WithoutNext()])
    assert len(dataset) == 18
    draws = dataset.draws(mr.ShuffledSampler(0), batch_size=6, num_batches=3)
    return list(DataLoader(dataset, sampler=draws, batch_size=None, num_workers=1))


def a_stream(path):
    stream = mr.ReplayStream(
        path, mr.ShuffledSampler(0), batch_size=6, num_batches=3, transforms=[mr.WithoutNext()]
    )
    return list(stream)


def a_concat(path):
    with mr.ReplayBuffer.open(
        path, transforms=[mr.WithoutNext()], sampler=mr.ShuffledSampler(0)
    ) as buffer:
        both = mr.concat([buffer])
        return [both.sample(6) for _ in range(3)]


def a_split(path):
    with mr.ReplayBuffer.open(path, transforms=[mr.WithoutNext()]) as buffer:
        batches = []
        for part in mr.split(buffer, [0.5, 0.5]):
            sampler = part.sampler(mr.ShuffledSampler(0))
            while sampler.epoch == 0:
                batches.append(buffer.sample_by(sampler, 3))
        return batches


@pytest.mark.parametrize("route", [a_loader, a_dataset, a_stream, a_concat, a_split])
def test_each_step_is_drawn_once_an_epoch_on_every_route(tmp_path, route):
    expected = episodes_of_three(tmp_path / "ring")
    batches = route(tmp_path / "ring")
    assert sorted(place for batch in batches for place in steps_of(batch)) == expected
    assert not any("next_observation" in batch for batch in batches)


ESTIMATES = {
    "GAE": mr.GAE(0.9, value="value"),
    "LambdaReturn": mr.LambdaReturn(0.9, value="value"),
    "DiscountedReturn": mr.DiscountedReturn(0.9),
    "DiscountedReturn of a time limit": mr.DiscountedReturn(0.9, time_limit="none"),
}
SAMPLERS_OF_MASKS = {
    "any": lambda s: mr.SequenceSampler(3, s, boundary="any"),
    "pad": lambda s: mr.SequenceSampler(3, s, boundary="pad"),
    "episode": lambda s: mr.SequenceSampler(2, s),
    "padded": lambda s: mr.EpisodeSampler(s),
    "ragged": lambda s: mr.EpisodeSampler(s, layout="ragged"),
}


@pytest.mark.parametrize("made", SAMPLERS_OF_MASKS)
@pytest.mark.parametrize("name", ESTIMATES)
def test_a_loss_that_the_mask_weighs_has_no_nan_of_a_masked_step(name, made):
    fields = dict(FIELDS, value=mr.Field((), "float32"))
    transform = ESTIMATES[name]
    buffer = mr.ReplayBuffer.create(
        None, mr.Schema(fields), 16, engine="memory", autoreset="disabled", transforms=[transform]
    )
    last = np.isin(np.arange(12), (3, 5, 8))
    steps = {path: np.zeros((12, *f.shape), f.dtype) for path, f in fields.items()}
    steps["reward"] += 1
    steps["value"] += 2
    buffer.extend(steps | {"truncated": last})
    sampler = SAMPLERS_OF_MASKS[made](mr.ShuffledSampler(0, shuffle=False))
    buffer.sampler = sampler
    batch = buffer.sample(20)
    assert not batch.mask.all()
    values = batch[transform.name]
    masked = values[~batch.mask]
    assert not np.isnan(masked).any()
    # Only what is unknown is 0: the same batch with a default has the other values.
    other = dataclasses.replace(transform, default=7.0)
    with_default = mr.ReplayBuffer.create(
        None, mr.Schema(fields), 16, engine="memory", autoreset="disabled", transforms=[other]
    )
    rows = buffer.gather_all()
    with_default.extend({path: rows[path] for path in fields})
    with_default.sampler = SAMPLERS_OF_MASKS[made](mr.ShuffledSampler(0, shuffle=False))
    expected = with_default.sample(20)[transform.name]
    unknown = expected == 7.0
    np.testing.assert_array_equal(values[~unknown], expected[~unknown])
    assert (values[unknown & ~batch.mask] == 0).all()
    assert np.isnan(values[unknown & batch.mask]).all()
