"""The oldest rows are left out, by any sampler, also of a buffer that moves on."""

import json

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.episodes.starts import WindowStarts, newest, num_legal, rank_edges
from mmreplay.errors import EmptyError, FormatError, SchemaError
from tests.buffer.support import Twin
from tests.contracts.sampler import VIEWS, ListedView, steps_of
from tests.samplers.frequencies import assert_distribution
from tests.samplers.moving import MovingView

pytestmark = pytest.mark.filterwarnings(
    "ignore:windows with boundary='any' hold steps whose next observation is unknown"
)


def later_starts(view, count):
    return [p for p in view.legal_starts() if p[1] >= view.span.first[p[0]] + count]


def every(sampler, view):
    """One epoch of a shuffled sampler within."""
    found = []
    while sampler.epoch == 0 and sampler.more(view, 3):
        found += steps_of(sampler.draw(view, 3))
    return sorted(found)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("view", VIEWS[1:])
def test_what_is_left_is_what_any_sampler_draws(view, count):
    expected = later_starts(view, count)
    inner = [mr.ShuffledSampler(0), mr.UniformSampler(0), mr.StratifiedSampler(0)]
    shuffled, uniform, stratified = (mr.ignore_earliest(count, s) for s in inner)
    if not expected:
        for sampler in (shuffled, uniform, stratified):
            with pytest.raises(EmptyError, match="is a legal start"):
                sampler.draw(view, 4)
        return
    drawn = [p for _ in range(40) for p in steps_of(uniform.draw(view, 60))]
    assert_distribution(drawn, dict.fromkeys(expected, 1 / len(expected)))
    assert set(steps_of(stratified.draw(view, 2000))) == set(expected)
    assert shuffled.num_batches(view, 3) == -(-len(expected) // 3)
    assert every(shuffled, view) == expected


def test_restrictions_compose():
    view = ListedView(["sxssssssss-", "ss", "xxxsssxs"], [4, 0, 9])
    sampler = mr.ignore_earliest(2, mr.ignore_earliest(4, mr.ShuffledSampler(0)))
    assert every(sampler, view) == later_starts(view, 4)
    recent = mr.ignore_earliest(3, mr.RecentSampler(1, 1.0, seed=0))
    assert set(steps_of(recent.draw(view, 60))) == {(0, 13), (2, 16)}


@pytest.mark.parametrize("view", VIEWS)
def test_ranks_of_starts_are_found_back(view):
    env_ids = np.repeat(np.arange(len(view.rows)), 12)
    span = view.span
    positions = (span.first[:, None] + np.arange(-2, 10)).reshape(-1)
    where = list(zip(env_ids.tolist(), positions.tolist(), strict=True))
    starts = view.starts
    inside = np.clip(positions, starts.first[env_ids], starts.stop[env_ids])
    expected = [
        sum(place < (env_id, p) for place in view.legal_starts())
        for (env_id, _), p in zip(where, inside.tolist(), strict=True)
    ]
    assert view.legal_before(env_ids, positions).tolist() == expected
    edges = rank_edges(view)
    assert edges[-1] == num_legal(view) == len(view.legal_starts())
    for counts in (1, 2, 99):
        # Narrowed views count for themselves, and must find the same.
        narrow = newest(view, np.full(len(view.rows), counts), edges)
        listed = list(
            zip(*map(np.ndarray.tolist, narrow.start_at(np.arange(num_legal(narrow)))), strict=True)
        )
        found = narrow.legal_before(env_ids, positions).tolist()
        assert found == [sum(place < w for place in listed) for w in where]
        assert num_legal(narrow) == len(listed)


def test_live_rings_are_followed(tmp_path, rng):
    sampler = mr.ignore_earliest(4, mr.UniformSampler(0))
    twin = Twin(tmp_path / "b", 16, 2, sampler=sampler)
    for turn in range(30):
        kinds = rng.choice(["", "t", "u"], (int(rng.integers(1, 6)), 2))
        twin.extend(kinds.tolist(), final=turn % 3 == 0)
        if turn % 8 == 7:
            twin.buffer.clear([0])
            twin.oracle.clear([0])
        first = twin.buffer.span.first
        legal, view = list(twin.oracle.legal()), twin.buffer.view
        stops = view.starts.stop
        rows = [(e, p) for e in range(2) for p in range(first[e], stops[e] + 1)]
        ranks = view.legal_before(*np.array(rows).T).tolist()
        assert ranks == [sum(start < row for start in legal) for row in rows]
        expected = [p for p in twin.oracle.legal() if p[1] >= first[p[0]] + 4]
        if not expected:
            with pytest.raises(EmptyError):
                twin.buffer.sample(1)
            continue
        # At most 24 starts: one is missed with a probability below 24 * exp(-40).
        assert set(steps_of(twin.buffer.sample(1000))) == set(expected)
    twin.buffer.close()


WINDOWED = {
    "episode": lambda inner: mr.SequenceSampler(2, inner),
    "strided": lambda inner: mr.SequenceSampler(3, inner, stride=2, burn_in=1),
    "any": lambda inner: mr.SequenceSampler(4, inner, boundary="any"),
    "across": lambda inner: mr.SequenceSampler(3, inner, boundary="any", stride=2),
    "pad": lambda inner: mr.SequenceSampler(3, inner, boundary="pad", burn_in=1),
    "first steps": lambda inner: mr.EpisodeSampler(inner),
    "any step": lambda inner: mr.EpisodeSampler(inner, by="length"),
    "chosen": lambda inner: mr.EpisodeSampler(inner, min_length=2, running=True),
    "headless": lambda inner: mr.EpisodeSampler(inner, by="length", headless=True),
}


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.sliced(2)
def test_windows_of_a_live_ring_are_what_one_that_was_just_opened_shows(
    tmp_path, kind, rng, monkeypatch
):
    taken = []
    plain = WindowStarts._forget
    monkeypatch.setattr(WindowStarts, "_forget", lambda *args: taken.append(1) or plain(*args))
    sampler = mr.ignore_earliest(5, WINDOWED[kind](mr.UniformSampler(0)))
    twin, compared = Twin(tmp_path / "b", 24, 2), 0
    for turn in range(60):
        kinds = rng.choice(["", "t", "u"], (int(rng.integers(1, 4)), 2), p=[0.7, 0.2, 0.1])
        twin.extend(kinds.tolist(), final=turn % 3 == 0)
        if turn % 25 == 24:
            twin.buffer.clear([0])
        view = twin.buffer.view
        taken.clear()
        fresh = mr.ignore_earliest(5, WINDOWED[kind](mr.ShuffledSampler(0)))
        expected = set()
        try:
            while fresh.epoch == 0 and fresh.more(view, 9):
                expected |= shown(fresh.draw(view, 9))
        except EmptyError:
            pass
        assert len(taken) == 1
        taken.clear()
        if not expected:
            with pytest.raises(EmptyError):
                sampler.draw(view, 1)
        else:
            # At most 40 starts: one is missed with a probability below 40 * exp(-37).
            assert shown(sampler.draw(view, 1500)) == expected
            compared += 1
        # What was taken in once is followed, and not taken in again.
        assert len(taken) == (turn == 0)
    assert compared > 30


def shown(draw):
    """Windows as they are drawn, whole."""
    windows = draw.windows
    rows = np.column_stack([draw.env_ids, draw.positions])
    lasts = np.where(windows.mask, windows.positions, -1)
    first = np.where(windows.mask, windows.positions, 1 << 62).min(1)
    return set(map(tuple, np.column_stack([rows, first, lasts.max(1)]).tolist()))


def test_exactly_as_many_rows_as_are_ignored():
    view = ListedView(["ssss"])
    with pytest.raises(EmptyError, match="is a legal start"):
        mr.ignore_earliest(4).draw(view, 1)
    assert steps_of(mr.ignore_earliest(3).draw(view, 2)) == [(0, 3)] * 2
    for count in (0, 2.5, "a"):
        with pytest.raises(SchemaError, match=f"count must be .*, got {count!r}"):
            mr.ignore_earliest(count)


@pytest.mark.parametrize("stopped", range(6))
def test_a_run_stopped_after_any_batch_goes_on(stopped):
    view = MovingView(2)
    view.add(0, "s" * 15)
    view.add(1, "sxs" * 5)
    whole = mr.ignore_earliest(2, mr.ShuffledSampler(1))
    other = mr.ignore_earliest(2, mr.ShuffledSampler(2))
    for number in range(8):
        if number == stopped:
            other.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        expected = steps_of(whole.draw(view, 4))
        if number >= stopped:
            assert steps_of(other.draw(view, 4)) == expected
        view.add(0, "sx")
        view.give_up(0, number)


def test_a_state_of_another_restriction_is_refused():
    sampler = mr.ignore_earliest(2, mr.UniformSampler(0))
    before = sampler.state_dict()
    for damage, message in (
        ({"kind": "x"}, "kind must be 'RestrictedSampler', got 'x'"),
        ({"restriction": 3}, "kind must be 'ignore_earliest', got 'int'"),
        ({"restriction": {"kind": "Part"}}, "kind must be.*got 'Part'"),
        (
            {"restriction": {"kind": "ignore_earliest", "count": 3}},
            "count must be 2 as in this sampler, got 3",
        ),
        ({"parts": []}, "parts must be a list of 1, got 0"),
    ):
        with pytest.raises(FormatError, match=f"sampler state: {message}"):
            sampler.load_state_dict(before | damage)
    assert sampler.state_dict() == before


class NotedUpdates(mr.UniformSampler):
    def update_priorities(self, view, env_ids, positions, values, mask=None):
        self.view = view
        return 2


def test_priorities_go_through_with_the_view_that_is_drawn_from():
    view, inner = ListedView(["s" * 9]), NotedUpdates(0)
    sampler = mr.ignore_earliest(5, inner)
    draw = sampler.draw(view, 3)
    given = (draw.env_ids, draw.positions, np.ones(3))
    assert sampler.update_priorities(view, *given) == 2
    assert inner.view.starts.first.tolist() == [5]
    assert sampler.keeps_priorities
    plain = mr.ignore_earliest(5)
    assert plain.epoch is None
    with pytest.raises(SchemaError, match="update_priorities needs a sampler with"):
        plain.update_priorities(view, *given)
    with pytest.raises(TypeError, match="with epochs, got UniformSampler"):
        plain.num_batches(view, 3)
    assert plain.more(view, 3)


@pytest.mark.parametrize("by", ["episode", "length"])
def test_an_episode_of_which_steps_are_ignored_is_not_whole(tmp_path, by):
    twin = Twin(tmp_path / "b", 100, 1)
    for _ in range(2):
        twin.extend([[""]] * 9 + [["t"]])
    draw = mr.ignore_earliest(3, mr.EpisodeSampler(by=by)).draw
    assert set(draw(twin.buffer.view, 20).windows.positions[:, 0].tolist()) == {10}
    twin.buffer.dequeue(10)
    with pytest.raises(EmptyError, match="begins one"):
        draw(twin.buffer.view, 20)
    twin.buffer.close()


@pytest.mark.parametrize(
    ("inside", "what"),
    [
        (mr.EpisodeSampler, "cannot draw 2 episodes: none of 6 published rows begins"),
        (lambda: mr.SequenceSampler(4), "cannot draw 2 windows of 4 steps"),
        (mr.UniformSampler, "cannot draw 2 steps: none of 6 published rows is a legal"),
    ],
)
def test_where_all_rows_are_left_out_the_message_says_what_leaves_them_out(inside, what):
    schema = mr.Schema({"reward": mr.Field((), "float32")})
    sampler = mr.ignore_earliest(9, inside())
    buffer = mr.ReplayBuffer.create(None, schema, 20, engine="memory", sampler=sampler)
    buffer.extend(reward=np.arange(6.0))
    buffer.end_episodes()
    told = rf"^{what}.* within ignore_earliest\(9\)\. Add steps first, or draw from more"
    with pytest.raises(EmptyError, match=told):
        buffer.sample(2)
