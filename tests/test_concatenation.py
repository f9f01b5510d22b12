"""Several buffers as one: shares, provenance, priorities, resumption."""

import json
from collections import Counter

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, FormatError, SchemaError
from tests.buffer.support import FIELDS, step
from tests.samplers.frequencies import assert_distribution


def made(path, steps, seed=0, sampler=None, number=0, num_envs=1, **options):
    """A buffer whose steps are numbered from a number on."""
    options.setdefault("autoreset", "disabled")
    buffer = mr.ReplayBuffer.create(
        path,
        mr.Schema(options.pop("fields", FIELDS)),
        64,
        num_envs,
        commit_every=None,
        sampler=mr.UniformSampler(seed) if sampler is None else sampler,
        engine="memory" if path is None else "memmap",
        **options,
    )
    for index in range(steps):
        values = step(number + index, "t" if index % 5 == 4 else "")
        stacked = {k: np.stack([v] * num_envs) for k, v in values.items()}
        buffer.add(stacked if num_envs > 1 else values)
    return buffer


def steps_of(batch):
    columns = (batch.buffer_ids, batch.env_ids, batch.positions)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("batch_size", [1, 2, 7, 64])
def test_shares_are_exact(batch_size):
    both = mr.concat([made(None, 30), made(None, 9)], [0.5, 0.5], seed=0)
    seen = Counter()
    for number in range(1, 20):
        seen.update(both.sample(batch_size).buffer_ids.tolist())
        assert abs(seen[0] - number * batch_size / 2) <= 0.5


def test_steps_are_their_buffers_own():
    both = mr.concat([made(None, 30), made(None, 9, number=1000)], [2, 1], seed=0)
    batch = both.sample(300)
    assert Counter(batch.buffer_ids.tolist()) == {0: 200, 1: 100}
    numbers = batch["observation"][:, 0]
    np.testing.assert_array_equal(numbers, batch.positions + 1000 * batch.buffer_ids)
    assert batch.buffer_ids.dtype == np.int64
    # Among the steps of both: of 29 and 8 legal starts, of which the newest waits
    # unless it is terminated.
    legal = [both.buffers[k].sample(1).probabilities[0] for k in range(2)]
    expected = np.where(batch.buffer_ids == 0, legal[0] * 2 / 3, legal[1] / 3)
    np.testing.assert_allclose(batch.probabilities, expected)
    tensors = batch.torch()
    assert tensors.buffer_ids.tolist() == batch.buffer_ids.tolist()


def test_without_shares_they_are_one_large_buffer():
    both = mr.concat([made(None, 21), made(None, 6), made(None, 0)], seed=0)
    drawn = [place for _ in range(100) for place in steps_of(both.sample(50))]
    legal = [(0, 0, p) for p in range(20)] + [(1, 0, p) for p in range(5)]
    assert_distribution(drawn, dict.fromkeys(legal, 1 / 25))
    np.testing.assert_allclose(both.sample(9).probabilities, 1 / 25)


def episodes_of(length, sampler):
    """A buffer of 60 steps, in truncated episodes whose last next one is unknown."""
    buffer = mr.ReplayBuffer.create(
        None, mr.Schema(FIELDS), 64, engine="memory", autoreset="disabled", sampler=sampler
    )
    for number in range(60):
        buffer.add(step(number, "u" if number % length == length - 1 else ""))
    return buffer


@pytest.mark.filterwarnings("ignore:windows with boundary='any' hold steps")
@pytest.mark.parametrize(
    "make",
    [
        lambda seed: mr.SequenceSampler(3, mr.UniformSampler(seed)),
        lambda seed: mr.SequenceSampler(3, mr.UniformSampler(seed), boundary="any"),
        lambda seed: mr.SequenceSampler(3, mr.UniformSampler(seed), boundary="pad"),
        lambda seed: mr.EpisodeSampler(mr.UniformSampler(seed)),
        lambda seed: mr.ignore_earliest(7, mr.UniformSampler(seed)),
    ],
)
@pytest.mark.parametrize("lengths", [(1, 20), (2, 20), (4, 6), (1, 1)])
def test_without_shares_windows_are_those_of_one_large_buffer(lengths, make):
    """Windows and episodes hold steps that alone are no legal start."""
    buffers = [episodes_of(n, make(seed)) for seed, n in enumerate(lengths)]
    starts = []
    for number, buffer in enumerate(buffers):
        # The chance to miss a start is below 1e-9.
        draws = [make(5).draw(buffer.view, 2000)] if legal(buffer) else []
        starts += sorted({(number, 0, p) for d in draws for p in d.positions.tolist()})
    both = mr.concat(buffers, seed=3)
    if not starts:
        with pytest.raises(EmptyError, match="none of the 2 buffers has a legal start"):
            both.sample(8)
        return
    drawn = [place for _ in range(60) for place in steps_of(both.sample(50))]
    assert_distribution(drawn, dict.fromkeys(starts, 1 / len(starts)))
    np.testing.assert_allclose(both.sample(9).probabilities, 1 / len(starts))


def legal(buffer):
    """Whether the sampler of a buffer has anything to draw."""
    try:
        buffer.sampler.draw(buffer.view, 1)
    except EmptyError:
        return False
    return True


def test_batches_of_other_fields_are_refused_before_any_draw():
    plain, without = made(None, 9), made(None, 9, transforms=[mr.WithoutNext()])
    with pytest.raises(
        SchemaError,
        match=r"batches of buffer 0 have a field 'next_observation', and those of "
        r"buffer 1 have none. Give all buffers the same transforms",
    ):
        mr.concat([plain, without])
    with pytest.raises(SchemaError, match="batches of buffer 1 have a field 'next"):
        mr.concat([without, plain])


def test_leased_steps_of_several_buffers_are_refused():
    leasing = mr.UseCounter(1, mr.DistinctSampler(0), name=None, lease_s=60)
    with pytest.raises(SchemaError, match=r"must not lease their steps.*lease_s=60"):
        mr.concat([made(None, 9, sampler=leasing), made(None, 9)])


def test_paths_are_opened_for_reading_and_closed_again(tmp_path):
    made(tmp_path / "a", 9).close()
    live = made(tmp_path / "b", 9)
    with mr.concat([tmp_path / "a", live, str(tmp_path / "a")]) as several:
        assert len(several) == 27
        assert several.schema == live.schema
        assert len(several.sample(5)) == 5
        opened = several.buffers[0]
    assert opened.closed
    assert not live.closed
    live.close()


def test_what_cannot_be_opened_leaves_nothing_open(tmp_path):
    made(tmp_path / "a", 9).close()
    with pytest.raises(FormatError, match="nowhere"):
        mr.concat([tmp_path / "a", tmp_path / "nowhere"])


def test_one_buffer_is_not_a_list(tmp_path):
    with made(tmp_path / "a", 9) as buffer:
        for source in (buffer, tmp_path / "a"):
            with pytest.raises(SchemaError, match=r"must be a list of buffers.*Pass a"):
                mr.concat(source)


def test_growing_buffers_are_followed():
    online = made(None, 0)
    both = mr.concat([made(None, 9), online], seed=3)
    assert set(both.sample(50).buffer_ids.tolist()) == {0}
    for number in range(9):
        online.add(step(number))
    assert set(both.sample(200).buffer_ids.tolist()) == {0, 1}


def test_take_keeps_the_order_asked_for():
    both = mr.concat([made(None, 9, num_envs=2), made(None, 9, number=50)])
    batch = both.take([1, 0, 1, 0], [0, 1, 0, 0], [3, 5, 2, 7])
    assert batch["action"].tolist() == [53, 5, 52, 7]
    assert steps_of(batch) == [(1, 0, 3), (0, 1, 5), (1, 0, 2), (0, 0, 7)]
    assert batch.probabilities.tolist() == [0.25] * 4


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([2], r"buffer_ids must be integers \[B\] in \[0, 2\), got int64\[1\]"),
        ([-1], r"in \[0, 2\)"),
        ([0.0], r"got float64\[1\]"),
        ([], r"got float64\[0\]"),
        ([0, 1], r"must have one shape, got \[2\], \[1\] and \[1\]"),
    ],
)
def test_unknown_buffers_are_refused(ids, message):
    both = mr.concat([made(None, 9), made(None, 9)])
    with pytest.raises(SchemaError, match=message):
        both.take(ids, [0], [0])


class NotedUpdates(mr.UniformSampler):
    """Uniform, and keeps the priorities that it is given."""

    def __init__(self, seed):
        super().__init__(seed)
        self.updates = []

    def update_priorities(self, view, env_ids, positions, values, mask=None):
        rows = zip(env_ids.tolist(), positions.tolist(), values.tolist(), strict=True)
        self.updates += list(rows)
        return 1


class CountsStarts(mr.UniformSampler):
    """Has a method of its own by a name that says what it counts."""

    def num_starts(self):
        return 3


def test_a_method_of_a_class_of_others_is_not_called():
    several = mr.concat([made(None, 9, sampler=CountsStarts(k)) for k in range(2)], seed=0)
    assert len(several.sample(12)) == 12


def test_priorities_go_to_the_buffer_that_the_step_is_of():
    samplers = [NotedUpdates(0), mr.UniformSampler(1), NotedUpdates(2)]
    several = mr.concat(
        [made(None, 9, sampler=s, number=10 * k) for k, s in enumerate(samplers)], [1, 1, 1]
    )
    batch = several.sample(12)
    values = batch.positions * 10.0 + batch.buffer_ids
    assert several.update_priorities(batch.torch(), values) == 2
    for number in (0, 2):
        here = batch.buffer_ids == number
        expected = zip(
            batch.env_ids[here].tolist(),
            batch.positions[here].tolist(),
            values[here].tolist(),
            strict=True,
        )
        assert samplers[number].updates == list(expected)


def test_priorities_that_one_buffer_refuses_reach_none():
    samplers = [mr.PrioritizedSampler(name=None, seed=0) for _ in range(2)]
    both = mr.concat([made(None, 9, sampler=s) for s in samplers], [1, 1], seed=0)
    batch = both.sample(6)
    before = [s.state_dict(priorities=True)["priorities"] for s in samplers]
    values = np.full(6, 9.0)
    values[batch.buffer_ids == 1] = np.nan
    with pytest.raises(SchemaError, match=r"priorities must be finite.*got nan at 0"):
        both.update_priorities(batch, values)
    for sampler, expected in zip(samplers, before, strict=True):
        found = sampler.state_dict(priorities=True)["priorities"]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("torch", [False, True])
def test_priorities_of_another_buffers_steps_are_refused(torch):
    """Its positions are other steps here."""
    samplers = [mr.PrioritizedSampler(name=None, seed=0) for _ in range(2)]
    one, other = (made(None, 9, sampler=sampler) for sampler in samplers)
    mine = one.sample(4)
    before = samplers[0].state_dict(priorities=True)["priorities"].copy()
    whole = mr.concat([one, other]).sample(8)
    for batch, whose in ((other.sample(4), r"buffer \w{32}"), (whole, "several")):
        drawn = batch.torch() if torch else batch
        with pytest.raises(SchemaError, match=rf"must be of .* \(in RAM\), got one of {whose}"):
            one.update_priorities(drawn, np.full(len(batch), 9.0))
    found = samplers[0].state_dict(priorities=True)["priorities"]
    np.testing.assert_array_equal(found, before)
    assert one.update_priorities(mine.torch() if torch else mine, np.ones(4)) == 0


def test_priorities_that_nobody_keeps_are_refused():
    both = mr.concat([made(None, 9), made(None, 9)])
    with pytest.raises(SchemaError, match="update_priorities: the samplers"):
        both.update_priorities(both.sample(4), np.ones(4))
    kept = mr.concat([made(None, 9, sampler=NotedUpdates(0))])
    with pytest.raises(SchemaError, match="update_priorities: the batch has no"):
        kept.update_priorities(both.buffers[0].sample(4), np.ones(4))
    with pytest.raises(SchemaError, match=r"priorities must have one value.*got \[3\]"):
        kept.update_priorities(kept.sample(4), np.ones(3))


@pytest.mark.parametrize("shares", [None, [3, 1]])
@pytest.mark.parametrize("stopped", range(6))
def test_a_state_brings_the_draws_back(shares, stopped):
    sources = [made(None, 30), made(None, 9)]
    both = mr.concat(sources, shares, seed=4)
    for _ in range(stopped):
        both.sample(7)
    state = json.loads(json.dumps(both.state_dict()))
    expected = [steps_of(both.sample(7)) for _ in range(4)]
    fresh = mr.concat([made(None, 30, seed=8), made(None, 9, seed=9)], shares, seed=1)
    fresh.load_state_dict(state)
    assert [steps_of(fresh.sample(7)) for _ in range(4)] == expected


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"kind": "Other"}, "sampler state: kind must be 'Concat', got 'Other'"),
        ({"seed": None}, r"sampler state: seed must be an integer in \[0.*got None"),
        ({"exact": False}, "sampler state: exact must be True as in this.*got False"),
        ({"parts": []}, "sampler state: parts must be a list of 2, got 0"),
        ({"shares": [1.0]}, r"sampler state: shares must be \[0\.75.*got \[1\.0\]"),
        ({"drawn": [1]}, r"sampler state: drawn must be one number below.*got \[1\]"),
    ],
)
def test_a_damaged_state_is_refused_and_nothing_is_loaded(damage, message):
    both = mr.concat([made(None, 9), made(None, 9)], [3, 1], seed=0)
    both.sample(5)
    before = both.state_dict()
    with pytest.raises(FormatError, match=message):
        both.load_state_dict(before | damage)
    broken = [before["parts"][0], before["parts"][1] | {"step": "x"}]
    with pytest.raises(FormatError, match=r"sampler state: step must be an.*got 'x'"):
        both.load_state_dict(both.state_dict() | {"step": 9, "parts": broken})
    assert both.state_dict() == before


def test_other_schemas_are_refused_by_the_field():
    wide = FIELDS | {"action": mr.Field((2,), "int32")}
    more = FIELDS | {"extra": mr.Field((), "int32")}
    with pytest.raises(SchemaError, match=r"field 'action' of buffer 1 \(None\) is Field"):
        mr.concat([made(None, 0), made(None, 0, fields=wide)])
    with pytest.raises(SchemaError, match=r"'extra' of buffer 1 \(None\) is missing"):
        mr.concat([made(None, 0, fields=more), made(None, 0)])
    with pytest.raises(SchemaError, match=r"concat: field 'extra' of buffer 1 \(None\) is"):
        mr.concat([made(None, 0), made(None, 0, fields=more)])


@pytest.mark.parametrize(
    ("sources", "shares", "message"),
    [
        ([], None, r"sources must be a list of buffers or folders, got \[\]"),
        ("runs", None, "sources must be a list of buffers or folders, got 'runs'"),
        (None, [1], "one number for each of 2 buffers, got 1"),
        (None, [1, 0], r"shares must be numbers above 0, one for each.*got \[1, 0\]"),
        (None, [1, float("nan")], r"shares must be numbers above 0.*got \[1, nan\]"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(sources, shares, message):
    if sources is None:
        sources = [made(None, 3), made(None, 3)]
    with pytest.raises(SchemaError, match=message):
        mr.concat(sources, shares)


def test_a_buffer_with_a_share_and_no_steps_is_named_and_no_draw_counts():
    both = mr.concat([made(None, 9), made(None, 0)], [1, 1], seed=0)
    before = both.state_dict()
    with pytest.raises(EmptyError, match="is a legal start") as caught:
        both.sample(4)
    assert "buffer 1 of concat" in caught.value.__notes__[0]
    assert both.state_dict() == before
    with pytest.raises(EmptyError, match="none of the 1 buffers has a legal"):
        mr.concat([made(None, 0)]).sample(4)
    with pytest.raises(SchemaError, match=r"batch_size must be an integer.*got 0"):
        both.sample(0)


def test_batches_that_do_not_fit_together_are_refused():
    windows = mr.SequenceSampler(2, mr.UniformSampler(0))
    with pytest.raises(SchemaError, match=r"samplers must all draw the same, got \['s"):
        mr.concat([made(None, 9), made(None, 9, sampler=windows)], [1, 1])
    # Of a sampler that does not say what it draws.
    windows.form = None
    windows.__class__ = type("Windows", (mr.SequenceSampler,), {})
    both = mr.concat([made(None, 9), made(None, 9, sampler=windows)], [1, 1])
    with pytest.raises(
        SchemaError, match=r"concat: fields are \{'action': 'int32\[2\]', 'is_first':"
    ):
        both.sample(4)


def test_a_failed_batch_counts_for_no_buffer():
    def twice(fields):
        return {path: np.stack([a, a], 1) for path, a in fields.items()}

    other = made(None, 9, transforms=[mr.Apply(twice)])
    both = mr.concat([made(None, 9), other], [1, 1])
    before = both.state_dict()
    with pytest.raises(SchemaError, match=r"concat: fields are \{'action':"):
        both.sample(4)
    assert both.state_dict() == before


def test_episodes_are_padded_to_the_longest_of_all_buffers():
    buffers = []
    for length in (3, 5):
        sampler = mr.EpisodeSampler(mr.UniformSampler(length))
        buffers.append(made(None, 0, sampler=sampler))
        for number in range(3 * length):
            end = "t" if number % length == length - 1 else ""
            buffers[-1].add(step(number, end))
    both = mr.concat(buffers, [1, 1], seed=0)
    state = both.state_dict()
    batch = both.sample(4)
    assert batch.mask.sum(1).tolist() == [3, 3, 5, 5]
    assert batch["is_first"].sum(1).tolist() == [1, 1, 1, 1]
    rows = batch["observation"]
    assert (rows[:2, 3:] == rows[:2, 2:3]).all()
    assert batch.window_positions[:2, 2:].tolist() == [
        [p + 2] * 3 for p in batch.positions[:2].tolist()
    ]
    both.load_state_dict(state)
    again = mr.ConcatDataset(both)[both.draw(4)]
    assert again.mask.tolist() == batch.mask.tolist()
    for path in batch.fields:
        assert again[path].tolist() == batch[path].tolist()
