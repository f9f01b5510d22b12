"""Steps by how many versions they are behind, against a loop over all rows."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.errors import EmptyError, FormatError, SchemaError
from mmreplay.samplers import staleness
from tests.contracts.sampler import ListedView

FIELDS = {
    "version": mr.Field((), "int32"),
    "observation": mr.Field((), "int8"),
    "terminated": mr.Field((), "bool"),
}


def ring(versions, capacity=1000, dtype="int32", **options):
    """A ring whose steps end their episodes, so that each is a legal start."""
    fields = FIELDS | {"version": mr.Field((), dtype)}
    buffer = mr.ReplayBuffer.create(
        None, mr.Schema(fields), capacity, engine="memory", autoreset="same_step", **options
    )
    extend(buffer, versions)
    return buffer


def extend(buffer, versions, ends=True):
    count = len(versions)
    buffer.extend(
        version=np.asarray(versions),
        observation=np.zeros(count, np.int8),
        terminated=np.full(count, ends),
    )


def chances(buffer, current, maximum, weight):
    """How likely each legal start is kept, by position, by a loop over all rows."""
    view = buffer.view
    count = int(view.starts.lengths.sum()) - view.num_illegal
    _, legal = view.start_at(np.arange(count))
    found = {}
    for position in legal.tolist():
        behind = current - int(buffer.get_field("version", 0, position))
        if maximum is None or behind <= maximum:
            found[position] = 1.0 if weight is None else weight(max(behind, 0))
    return {position: chance for position, chance in found.items() if chance}


@settings(deadline=None)
@given(
    versions=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    capacity=st.integers(2, 20),
    current=st.integers(0, 12),
    maximum=st.sampled_from([None, 0, 1, 3]),
    half=st.booleans(),
    ends=st.booleans(),
    seed=st.integers(0, 9),
)
def test_only_recent_steps_are_drawn_and_all_of_them(
    versions, capacity, current, maximum, half, ends, seed
):
    weight = (lambda behind: 0.5**behind) if half else None
    with ring([], capacity) as buffer:
        extend(buffer, versions, ends)
        expected = chances(buffer, current, maximum, weight)
        sampler = mr.StalenessSampler("version", current, maximum, weight, seed=seed)
        if not expected:
            with pytest.raises(EmptyError, match="cannot draw 600 steps"):
                sampler.draw(buffer.view, 600)
            assert sampler.left_out == 0
            return
        draw = sampler.draw(buffer.view, 600)
        assert len(draw) == 600
        assert set(draw.positions.tolist()) <= expected.keys()
        if not half:
            # Of 30 starts one is missed by 600 draws with 30 * exp(-20).
            assert set(draw.positions.tolist()) == expected.keys()
        num_legal = len(chances(buffer, 0, None, None))
        assert draw.probabilities.tolist() == [
            expected[position] / num_legal for position in draw.positions.tolist()
        ]


@pytest.mark.parametrize("listed", [False, True])
def test_steps_are_drawn_as_often_as_weight_says(listed, monkeypatch):
    if listed:
        monkeypatch.setattr(staleness, "MAX_CANDIDATES", 1)
    versions = np.arange(40) % 5
    draws, size = 400, 25
    with ring(versions) as buffer:
        expected = chances(buffer, 4, 3, lambda behind: 1 - behind / 4)
        sampler = mr.StalenessSampler("version", 4, 3, lambda behind: 1 - behind / 4, seed=2)
        counts = np.zeros(40)
        for _ in range(draws):
            np.add.at(counts, sampler.draw(buffer.view, size).positions, 1)
    total = sum(expected.values())
    for position in range(40):
        share = draws * size * expected.get(position, 0) / total
        # Five standard deviations of a binomial.
        assert abs(counts[position] - share) <= 5 * np.sqrt(share)


def test_what_is_left_out_is_counted_and_current_moves():
    with ring(np.arange(100)) as buffer:
        sampler = mr.StalenessSampler("version", 99, 24, seed=0)
        for _ in range(60):
            sampler.draw(buffer.view, 32)
        # Three of four are left out, of some 7,680: five standard deviations.
        assert abs(sampler.left_out - 0.75) < 5 * np.sqrt(0.75 * 0.25 / 7000)
        sampler.move_to(123)
        assert set(sampler.draw(buffer.view, 9).positions.tolist()) == {99}
        sampler.move_to(124)
        with pytest.raises(
            EmptyError,
            match=r"cannot draw 9 steps of field 'version' at most 24 versions behind "
            r"124\. Add newer steps, or raise maximum",
        ):
            sampler.draw(buffer.view, 9)
        # Steps ahead of the learner are of its version at least.
        sampler.move_to(0)
        assert len(set(sampler.draw(buffer.view, 900).positions.tolist())) == 100


def test_few_recent_steps_among_many_are_found():
    versions = np.zeros(30_000, np.int32)
    versions[[3, 29_000]] = 7
    with ring(versions, 30_000) as buffer:
        sampler = mr.StalenessSampler("version", 7, 0, seed=0)
        draw = sampler.draw(buffer.view, 64)
        assert len(draw) == 64
        assert set(draw.positions.tolist()) == {3, 29_000}


def test_unsigned_versions_beyond_int64_are_no_recent_ones():
    versions = np.array([0, 5, 2**63, 2**64 - 1], np.uint64)
    with ring(versions, dtype="uint64") as buffer:
        for maximum in (3, 9):
            sampler = mr.StalenessSampler("version", 5, maximum, seed=0)
            found = set(sampler.draw(buffer.view, 50).positions.tolist())
            assert found == ({1} if maximum == 3 else {0, 1})


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8", "uint64"])
def test_versions_at_the_ends_of_their_type_are_no_recent_ones(dtype):
    ends = np.iinfo(dtype)
    versions = np.array([ends.min, 1, 4, 5, ends.max], dtype)
    beyond = ends.max > 2**63 - 1
    with ring(versions, dtype=dtype) as buffer:
        for current in (5, 100, 2**63 - 1):
            for maximum in (0, 1, 96, 2**63 - 1, None):
                expected = {
                    position
                    for position, version in enumerate(versions.tolist())
                    if maximum is None or version >= current - maximum
                } - ({4} if beyond else set())
                sampler = mr.StalenessSampler("version", current, maximum, seed=0)
                if not expected:
                    with pytest.raises(EmptyError, match="cannot draw 90 steps"):
                        sampler.draw(buffer.view, 90)
                    continue
                found = set(sampler.draw(buffer.view, 90).positions.tolist())
                assert found == expected


def test_weight_gets_versions_behind_that_do_not_wrap():
    asked = set()

    def weight(behind):
        asked.update(behind.tolist())
        return np.ones(len(behind))

    with ring([-(2**63), -4, 2**63 - 1, 5], dtype="int64") as buffer:
        mr.StalenessSampler("version", 5, None, weight, seed=0).draw(buffer.view, 90)
    assert asked == {2**63 - 1, 9, 0}


@pytest.mark.parametrize(("listed", "wrapped"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.sliced(1)
def test_each_set_of_recent_steps_is_as_likely(listed, wrapped, weighted, monkeypatch):
    if listed:
        monkeypatch.setattr(staleness, "MAX_CANDIDATES", 1)
    versions = np.arange(12) % 3
    draws, size = 4000, 2
    inner = mr.DistinctSampler(seed=1)
    if wrapped:
        inner = mr.ignore_earliest(1, inner)
    weight = (lambda behind: np.full(len(behind), 0.5)) if weighted else None
    sampler = mr.StalenessSampler("version", 2, 0, weight, sampler=inner, seed=0)
    drawn = Counter()
    with ring(versions) as buffer:
        for _ in range(draws):
            draw = sampler.draw(buffer.view, size)
            chance = 0.5 if weighted else 1
            assert (draw.probabilities == chance * (1 / (12 - wrapped))).all()
            drawn[tuple(sorted(draw.positions.tolist()))] += 1
    sets = list(combinations([2, 5, 8, 11], size))
    assert set(drawn) == set(sets)
    # Five standard deviations of a count; six counts.
    mean = draws / len(sets)
    assert all(abs(count - mean) < 5 * mean**0.5 for count in drawn.values())
    # Of some 20,000 steps: five standard deviations.
    share = 1 - 4 * chance / (12 - wrapped)
    assert abs(sampler.left_out - share) < 5 * (0.25 / 20_000) ** 0.5


@pytest.mark.parametrize("size", [4, 5, 100])
def test_of_too_few_recent_steps_each_is_drawn_once(size):
    with ring(np.arange(4000) // 1000) as buffer:
        extend(buffer, [9, 9, 9, 9])
        for inner in (
            mr.DistinctSampler(seed=1),
            mr.ignore_earliest(1, mr.DistinctSampler(seed=1)),
        ):
            sampler = mr.StalenessSampler("version", 9, 5, sampler=inner, seed=0)
            draw = sampler.draw(buffer.view, size)
            assert sorted(draw.positions.tolist()) == [4000, 4001, 4002, 4003]
            sampler.move_to(15)
            with pytest.raises(EmptyError, match=f"cannot draw {size} steps of field"):
                sampler.draw(buffer.view, size)


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=30),
    capacity=st.integers(2, 20),
    current=st.integers(0, 8),
    maximum=st.sampled_from([None, 0, 2]),
    counts=st.booleans(),
)
def test_groups_are_drawn_whose_rows_are_all_recent(rows, capacity, current, maximum, counts):
    fields = FIELDS | {"prompt": mr.Field((), "int16")}
    groups = mr.GroupSampler("prompt", rows=2, seed=1)
    recent = mr.StalenessSampler("version", current, maximum, sampler=groups, seed=0)
    sampler = mr.UseCounter(1, recent, name=None, seed=0) if counts else recent
    with mr.ReplayBuffer.create(
        None, mr.Schema(fields), capacity, engine="memory", autoreset="same_step", sampler=sampler
    ) as buffer:
        for prompt, version in rows:
            buffer.add(prompt=prompt, version=version, observation=0, terminated=True)
        members = {}
        for at in range(max(0, len(rows) - capacity), len(rows)):
            members.setdefault(rows[at][0], []).append(at)
        expected = {
            prompt: places
            for prompt, places in members.items()
            if len(places) == 2
            and all(maximum is None or current - rows[at][1] <= maximum for at in places)
        }
        found = []
        for size in (2, 9):
            if len(found) == len(expected) if counts else not expected:
                with pytest.raises(EmptyError, match="cannot draw"):
                    buffer.sample(size)
                continue
            batch = buffer.sample(size)
            drawn = batch["prompt"][::2].tolist()
            assert len(drawn) == min(size, len(expected) - len(found))
            for prompt, places in zip(drawn, batch.positions.reshape(-1, 2), strict=True):
                assert places.tolist() == expected[prompt]
            found += drawn if counts else []
        assert len(set(found)) == len(found)
        assert len(found) == len(expected) or not counts


def test_what_is_left_out_of_groups_is_counted():
    groups = mr.GroupSampler("observation", rows=1, seed=0)
    with ring([1, 4, 5, 6]) as buffer:
        sampler = mr.StalenessSampler("version", 6, 2, sampler=groups, seed=0)
        with pytest.raises(EmptyError, match="cannot draw 1 groups"):
            sampler.draw(buffer.view, 1)
        assert sampler.left_out == 0
        sampler.move_to(20)
        with pytest.raises(
            EmptyError, match="draw 1 groups of field 'version' at most 2 versions beh"
        ):
            sampler.draw(buffer.view, 1)
    groups = mr.GroupSampler("version", rows=1, seed=0)
    with ring([1, 4, 5, 6]) as buffer:
        sampler = mr.StalenessSampler("version", 6, 2, sampler=groups, seed=0)
        assert len(sampler.draw(buffer.view, 9)) == 3
        assert sampler.left_out == 0.25


def test_priorities_of_the_inner_sampler_count():
    inner = mr.PrioritizedSampler(alpha=1.0, beta=0.0, eps=0.0, name=None, seed=0)
    sampler = mr.StalenessSampler("version", 3, 1, sampler=inner, seed=0)
    with ring([1, 2, 2, 3], sampler=sampler) as buffer:
        batch = buffer.sample(4)
        every = buffer.take(0, np.arange(4))
        buffer.update_priorities(every, [5.0, 1.0, 0.0, 3.0])
        counts = np.zeros(4)
        for _ in range(300):
            np.add.at(counts, buffer.sample(8).positions, 1)
        assert counts[0] == counts[2] == 0
        # One to three, of 2,400: five standard deviations.
        assert abs(counts[1] - 600) < 5 * np.sqrt(450)
        assert len(batch) == 4
        buffer.update_priorities(every, [5.0, 0.0, 0.0, 0.0])
        with pytest.raises(EmptyError, match="cannot draw 8 steps of field 'version'"):
            buffer.sample(8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 1), "field must be the path of an integer field, got 3"),
        (("version", -1), "current must be an integer in .*, got -1"),
        (("version", 1.5), "current must be an integer"),
        (("version", 2**63), r"current must be an integer in \[0, 9223372036854775807\]"),
        (("version", 1, 2**70), "maximum must be an integer in .*, got 11805916207174"),
        (("version", 1, -1), "maximum must be an integer in .*, got -1"),
        (("version", 1, 1, 0.5), r"weight must be a callable .*, got 0\.5"),
    ],
)
def test_arguments_that_are_no_versions_are_refused(arguments, message):
    with pytest.raises(SchemaError, match=message):
        mr.StalenessSampler(*arguments)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda behind: behind + 2.0, r"2 numbers in \[0, 1\], got 2\.0"),
        (lambda behind: behind - 1.0, r"numbers in \[0, 1\], got -1\.0"),
        (lambda behind: behind * np.nan, r"numbers in \[0, 1\], got nan"),
        (lambda behind: behind[:1], r"numbers in \[0, 1\], got int64\[1\]"),
        (lambda behind: None, r"numbers in \[0, 1\], got object\[\]"),
    ],
)
def test_weights_that_are_no_chances_are_refused(answer, message):
    with ring([1, 1]) as buffer:
        sampler = mr.StalenessSampler("version", 1, weight=answer, seed=0)
        before = sampler.state_dict()
        with pytest.raises(SchemaError, match=f"weight must return .*{message}"):
            sampler.draw(buffer.view, 2)
        assert sampler.state_dict() == before


def test_fields_and_views_without_versions_are_refused():
    with ring([1]) as buffer:
        for field, message in (
            ("terminated", "field 'terminated' must be one integer"),
            ("verison", "Did you mean 'version'"),
        ):
            with pytest.raises(SchemaError, match=message):
                mr.StalenessSampler(field, 1).draw(buffer.view, 1)
    with pytest.raises(SchemaError, match="view: ListedView shows no data"):
        mr.StalenessSampler("version", 1).draw(ListedView(["s"]), 1)
    with pytest.raises(EmptyError, match="none of 0 published rows is a legal start"):
        mr.StalenessSampler("version", 1).draw(ListedView([""]), 1)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (mr.SequenceSampler(2), "must draw single steps or groups, got the Sequence"),
        (
            mr.ShuffledSampler(),
            r"must have no epochs, got ShuffledSampler\. Use a DistinctSampler, in",
        ),
        (
            mr.MixtureSampler([(mr.ShuffledSampler(), 1), (mr.UniformSampler(), 1)]),
            "must have no epochs, got MixtureSampler",
        ),
        (mr.UseCounter(1, name=None), "must not count uses, got a UseCounter. Put the"),
        (
            mr.RecentSampler(9, 0.5, mr.UseCounter(1)),
            "must not count uses, got a RecentSampler around a UseCounter. Put the St",
        ),
        (mr.GroupSampler("version"), "weight must be None where groups are drawn, got"),
    ],
)
def test_samplers_that_cannot_be_inside_are_refused(sampler, message):
    with pytest.raises(SchemaError, match=message):
        mr.StalenessSampler("version", 1, weight=np.ones_like, sampler=sampler)


def test_draws_continue_exactly_from_a_state():
    with ring(np.arange(300)) as buffer:
        sampler = mr.StalenessSampler("version", 290, 60, seed=5)
        sampler.draw(buffer.view, 4)
        sampler.move_to(295)
        state = sampler.state_dict()
        expected = [sampler.draw(buffer.view, 9).positions.tolist() for _ in range(9)]
        again = mr.StalenessSampler("version", 0, 60, seed=0)
        again.load_state_dict(state)
        assert again.current == 295
        found = [again.draw(buffer.view, 9).positions.tolist() for _ in range(9)]
        assert found == expected
        assert again.left_out == sampler.left_out
    for change, message in (
        ({"field": "other"}, "field must be 'version'"),
        ({"maximum": None}, "maximum must be 60"),
        ({"current": -1}, "current must be an integer"),
        ({"left_out": 10**9}, "left_out must be an integer"),
        ({"parts": []}, "parts must be a list of 1"),
        ({"kind": "UniformSampler"}, "kind must be 'StalenessSampler'"),
    ):
        with pytest.raises(FormatError, match=message):
            again.load_state_dict(state | change)
    assert repr(mr.StalenessSampler("version", 3, 1, seed=5)) == (
        "StalenessSampler(field='version', current=3, maximum=1, "
        "sampler=UniformSampler(seed=5), seed=5)"
    )


def test_a_loader_and_a_sequence_sampler_draw_by_it():
    sampler = mr.StalenessSampler("version", 99, 49, seed=0)
    with (
        ring(np.arange(100), sampler=sampler) as buffer,
        mr.ReplayLoader(buffer, batch_size=16) as loader,
    ):
        for batch, _ in zip(loader, range(4), strict=False):
            assert (batch["version"] >= 50).all()
            assert len(batch) == 16
    with ring(np.arange(100)) as buffer:
        inner = mr.StalenessSampler("version", 99, 49, seed=0)
        buffer.sampler = mr.SequenceSampler(1, inner)
        assert (buffer.sample(32)["version"] >= 50).all()
