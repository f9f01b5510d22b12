"""Exact shares of several samplers, and what the parts are told."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.errors import EmptyError, FormatError, SchemaError
from mmreplay.samplers.combine import Shares
from tests.contracts.sampler import VIEWS, ListedView, SamplerContract, steps_of
from tests.samplers.frequencies import assert_distribution


class TestMixtureSampler(SamplerContract):
    def make(self, seed=0):
        parts = [(mr.UniformSampler(seed), 2), (mr.StratifiedSampler(seed + 50), 1)]
        return mr.MixtureSampler(parts, seed=seed)

    def test_a_draw_is_a_function_of_the_step_and_not_of_what_went_before(self):
        # Not of what was drawn; how much of each part was is what shares go by.
        one, other = self.make(), self.make()
        one.draw(VIEWS[0], 9)
        other.draw(VIEWS[4], 9)
        assert steps_of(one.draw(VIEWS[3], 64)) == steps_of(other.draw(VIEWS[3], 64))

    def test_the_frequencies_are_those_of_the_mixture(self):
        view = ListedView(["s" * 9, "ss"])
        sampler = self.make()
        drawn = [p for _ in range(500) for p in steps_of(sampler.draw(view, 10))]
        law = {
            place: 2 / 3 / 11 + 1 / 3 / 2 / (9 if place[0] == 0 else 2)
            for place in view.legal_starts()
        }
        assert_distribution(drawn, law)

    def test_a_state_of_other_parts_is_refused_and_nothing_is_loaded(self):
        sampler = self.make()
        sampler.draw(VIEWS[3], 7)
        before = sampler.state_dict()
        other = self.make(5).state_dict()
        broken = [other["parts"][0], other["parts"][0]]
        for damage, message in (
            ({"parts": broken}, "kind must be.*got 'UniformSampler'"),
            ({"parts": other["parts"][:1]}, "parts must be a list of 2, got 1"),
            ({"shares": [0.5, 0.5]}, r"shares must be.*got \[0\.5, 0\.5\]"),
            ({"drawn": [1, -1]}, r"drawn must be in \[0.*got values in \[-1, 1\]"),
            ({"drawn": [1 << 60, 1]}, r"drawn must be.*got \[1152921504606846976, 1\]"),
            ({"drawn": "x"}, "drawn must be a list of integers, got 'x'"),
        ):
            with pytest.raises(FormatError, match=f"sampler state: {message}"):
                sampler.load_state_dict(other | damage)
            assert sampler.state_dict() == before


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    st.lists(st.integers(1, 300), min_size=1, max_size=60),
)
def test_shares_stay_within_their_bound_after_any_batches(weights, sizes):
    shares = Shares([float(w) for w in weights])
    drawn = np.zeros(len(weights))
    bound = 1.0 if len(weights) == 2 else len(weights)
    for size in sizes:
        counts = shares.split(size)
        assert sum(counts) == size
        assert min(counts) >= 0
        shares.count(counts)
        drawn += counts
        off = np.abs(drawn - shares.fractions * drawn.sum())
        assert off.max() < bound + 1e-6


def test_what_a_part_missed_it_gets_later():
    shares = Shares([1, 1])
    shares.count([2, 8])
    assert shares.split(10) == [8, 2]
    shares.count([0, 100])
    assert shares.split(10) == [10, 0]


def test_one_of_a_hundred_comes_every_hundredth_draw():
    shares = Shares([99, 1])
    found = []
    for _ in range(400):
        counts = shares.split(1)
        shares.count(counts)
        found.append(counts[1])
    assert sum(found) == 4
    assert set(np.diff(np.flatnonzero(found)).tolist()) == {100}


def test_parts_stand_one_after_the_other():
    view = ListedView(["s" * 30])
    one, other = mr.UniformSampler(1), mr.UniformSampler(2)
    mixed = mr.MixtureSampler([(mr.UniformSampler(1), 3), (mr.UniformSampler(2), 1)])
    expected = steps_of(one.draw(view, 192)) + steps_of(other.draw(view, 64))
    assert steps_of(mixed.draw(view, 256)) == expected


def test_a_part_that_ends_an_epoch_makes_a_shorter_batch_and_catches_up():
    view = ListedView(["s" * 10])
    shuffled = mr.ShuffledSampler(0)
    mixed = mr.MixtureSampler([(shuffled, 1), (mr.UniformSampler(0), 1)], seed=0)
    lengths = [len(mixed.draw(view, 8)) for _ in range(6)]
    assert lengths[:3] == [8, 8, 6]
    assert sum(mixed.state_dict()["drawn"]) == sum(lengths)
    assert mixed.state_dict()["drawn"][0] >= sum(lengths) / 2 - 4


def test_a_part_that_has_nothing_leaves_the_others_where_they_were():
    view = ListedView(["s" * 10])
    late = mr.ignore_earliest(50, mr.UniformSampler(0))
    mixed = mr.MixtureSampler([(mr.ShuffledSampler(0), 1), (late, 1)], seed=0)
    before = mixed.state_dict()
    with pytest.raises(EmptyError, match="is a legal start"):
        mixed.draw(view, 4)
    assert mixed.state_dict() == before


class NotedUpdates(mr.UniformSampler):
    def __init__(self, dropped):
        super().__init__(0)
        self.dropped, self.updates = dropped, []

    def update_priorities(self, *args):
        self.updates.append(args)
        return self.dropped


def test_priorities_go_to_every_part_that_keeps_some():
    first, second = NotedUpdates(1), NotedUpdates(4)
    nested = mr.MixtureSampler([(second, 1), (mr.UniformSampler(0), 1)])
    plain = mr.MixtureSampler([(mr.UniformSampler(0), 1)])
    mixed = mr.MixtureSampler([(first, 1), (nested, 1), (plain, 1)])
    view = VIEWS[3]
    draw = mixed.draw(view, 6)
    mask = np.ones((6, 1), bool)
    dropped = mixed.update_priorities(view, draw.env_ids, draw.positions, np.ones((6, 1)), mask)
    assert dropped == 4
    for part in (first, second):
        ((seen, env_ids, _, _, received),) = part.updates
        assert seen is view
        assert env_ids is draw.env_ids
        assert received is mask
    with pytest.raises(SchemaError, match="update_priorities needs a sampler with"):
        plain.update_priorities(view, draw.env_ids, draw.positions, np.ones(6))


class Unsaid(mr.UniformSampler):
    pass


def test_windows_of_parts_are_put_together_if_they_are_alike(tmp_path):
    buffer = filled(tmp_path / "b")
    parts = [mr.SequenceSampler(3, mr.UniformSampler(k)) for k in range(2)]
    mixed = mr.MixtureSampler([(parts[0], 1), (parts[1], 1)], seed=0)
    draw = mixed.draw(buffer.view, 8)
    assert draw.windows.positions.shape == (8, 3)
    # A user's sampler that does not say what it draws.
    mixed = mr.MixtureSampler([(parts[0], 1), (Unsaid(0), 1)], seed=0)
    before = mixed.state_dict()
    with pytest.raises(SchemaError, match=r"samplers that.*got lengths \[3, None\]"):
        mixed.draw(buffer.view, 8)
    assert mixed.state_dict() == before
    buffer.close()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [mr.SequenceSampler(3), mr.SequenceSampler(4)],
            r"samplers that share.*got \['windows of 3 steps', 'windows of 4 steps'\]",
        ),
        ([mr.SequenceSampler(3), mr.EpisodeSampler()], r"samplers.*got \['windows of"),
        (
            [mr.UniformSampler(0), mr.EpisodeSampler(layout="ragged")],
            r"must not be ragged, got \['single steps', 'ragged episodes'\]",
        ),
        (["a"], "sampler must have draw, state_dict and load_state_dict, got 'a'"),
        ([mr.UniformSampler], "sampler must have draw, state_dict and.*got <class"),
    ],
)
def test_parts_that_never_fit_one_batch_are_refused(parts, message):
    with pytest.raises(SchemaError, match=message):
        mr.MixtureSampler([(part, 1) for part in parts])


def test_recent_windows_are_refused_with_the_way_out():
    for part in (mr.SequenceSampler(3), mr.EpisodeSampler(layout="ragged")):
        with pytest.raises(SchemaError, match=r"the sampler inside a.*got the"):
            mr.RecentSampler(2, 0.5, part)


def test_a_part_without_a_share_is_refused():
    with pytest.raises(SchemaError, match=r"samplers must be pairs.*got UniformSampler"):
        mr.MixtureSampler([mr.UniformSampler(0)])
    with pytest.raises(SchemaError, match=r"samplers must be a list of pairs of.*got 3"):
        mr.MixtureSampler(3)


def test_episodes_of_parts_are_padded_to_the_longest():
    buffer = mr.ReplayBuffer.create(None, FIELDS, 100, engine="memory")
    ends = np.zeros(60, bool)
    ends[[2, 8, 11, 20, 40]] = True
    buffer.extend(observation=np.arange(60), terminated=ends)
    short = mr.EpisodeSampler(mr.UniformSampler(1), max_length=4)
    every = mr.EpisodeSampler(mr.UniformSampler(2))
    buffer.sampler = mr.MixtureSampler([(short, 1), (every, 1)], seed=0)
    begins, lengths = {0: 3, 3: 6, 9: 3, 12: 9, 21: 20}, set()
    for _ in range(20):
        batch = buffer.sample(4)
        rows = batch["observation"]
        lengths.add(rows.shape[1])
        sizes = [begins[p] for p in batch.positions.tolist()]
        assert rows.shape[1] == max(sizes)
        for row, mask, first, size in zip(rows, batch.mask, batch["is_first"], sizes, strict=True):
            steps = row[0] + np.minimum(np.arange(rows.shape[1]), size - 1)
            assert row.tolist() == steps.tolist()
            assert mask.tolist() == (np.arange(rows.shape[1]) < size).tolist()
            assert first.tolist() == (np.arange(rows.shape[1]) == 0).tolist()
    assert len(lengths) > 1


FIELDS = mr.Schema({"observation": mr.Field((), "int64"), "terminated": mr.Field((), "bool")})


def filled(path):
    from tests.buffer.support import Twin

    twin = Twin(path, 40, 2)
    twin.extend([["", "t" if number == 9 else ""] for number in range(30)])
    return twin.buffer


@pytest.mark.parametrize("stopped", range(6))
def test_a_run_stopped_after_any_batch_goes_on(stopped):
    def make(seed):
        parts = [
            (mr.ShuffledSampler(seed), 5),
            (mr.RecentSampler(2, 0.5, mr.UniformSampler(seed), seed=seed), 3),
            (mr.StratifiedSampler(seed), 1),
        ]
        return mr.MixtureSampler(parts, seed=seed)

    view, whole, other = VIEWS[3], make(1), make(2)
    for _ in range(stopped):
        whole.draw(view, 5)
    other.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for _ in range(5):
        expected, again = whole.draw(view, 5), other.draw(view, 5)
        assert (steps_of(again), again.key) == (steps_of(expected), expected.key)


def test_shares_that_make_no_sense_are_refused():
    for shares in ([], [0.0], [1, -1], [float("inf")], ["a"], [None, 1]):
        parts = [(mr.UniformSampler(0), share) for share in shares]
        with pytest.raises(SchemaError, match="shares must be numbers above 0, one"):
            mr.MixtureSampler(parts)
