"""The index of episodes against a scan of all rows, under random histories."""

import numpy as np
import pytest

from mmreplay import kernels
from mmreplay.episodes import (
    BREAK,
    CUT,
    END,
    FINAL,
    START,
    TERMINATED,
    TRUNCATED,
    EpisodeIndex,
    fold_table,
)
from mmreplay.episodes.index import LONG_AGO, MAX_TURNS
from mmreplay.kernels.rows import mark
from mmreplay.ring import Span

NUM_ENVS = 3


def flags_of_steps(before, terminated, truncated, final_follows):
    """Flags of one step of each environment, as the writer gives them."""
    flags = np.empty(len(before), np.uint8)
    mark(flags, before, terminated[None], truncated[None], final_follows)
    return flags


def scan(flags, first):
    """Episodes of the rows from first on, found by looking at each row.

    Returns:
        (begin, end, headless, running) of each episode with a step alive.
    """
    groups = []
    for position in range(first, len(flags)):
        if not groups or flags[position] & START:
            groups.append([])
        groups[-1].append(position)
    found = []
    for number, rows in enumerate(groups):
        steps = [p for p in rows if not flags[p] & FINAL]
        if steps:
            ended = any(flags[p] & END for p in steps)
            cut = steps[-1] + 1 < len(flags) and flags[steps[-1] + 1] & CUT
            last = number == len(groups) - 1
            headless = not flags[rows[0]] & START
            running = last and not ended and not cut
            found.append((steps[0], steps[-1] + 1, headless, running))
    return found


def grown(flags, count, rng, final_follows):
    """Put so many rows behind the flags, by the rules of the writer."""
    while count > 0:
        before = flags[-1] if flags else FINAL
        broken = bool(flags) and rng.random() < 0.05
        if broken:
            before = FINAL
        kind = rng.choice(["", "", "", "t", "u", "tu"])
        flag = flags_of_steps(
            np.array([before], np.uint8),
            np.array(["t" in kind]),
            np.array(["u" in kind]),
            final_follows,
        )[0]
        if broken:
            running = not flags[-1] & (END | FINAL)
            flag |= BREAK | (CUT if running and rng.random() < 0.5 else 0)
        flags.append(int(flag))
        if not final_follows and flag & END and rng.random() < 0.5:
            flags.append(FINAL)
        count -= 1


def legal_rows(flags, first, derived, final_follows, before, after):
    """Which rows from first on may be drawn, each found by walking from it.

    Returns:
        By row "yes", "no", or "wait" where it may become one when more rows come.
    """
    return {
        row: legal_row(flags, row, first, derived, final_follows, before, after)
        for row in range(first, len(flags))
    }


def legal_row(flags, row, first, derived, final_follows, before, after):
    if flags[row] & FINAL or not past_known(flags, row, first, before):
        return "no"
    for step in range(row, row + after):
        known = step + 1 < len(flags)
        following = flags[step + 1] if known else 0
        if not derived and (flags[step] & END or following & CUT):
            return "yes"
        if derived and following & FINAL:
            return "yes"
        if derived and flags[step] & TERMINATED and (known or not final_follows):
            return "yes"
        if not known:
            return "wait"
        if following & START:
            return "no"
    return "yes"


def past_known(flags, row, first, before):
    for step in range(row, row - before, -1):
        if flags[step] & START:
            return True
        if step == first:
            return False
    return True


def check(index, histories, firsts, *table):
    """Everything that the index says, from the flags alone."""
    alive = [list(range(f, len(h))) for f, h in zip(firsts, histories, strict=True)]
    steps = [
        [p for p in rows if not history[p] & FINAL]
        for rows, history in zip(alive, histories, strict=True)
    ]
    assert index.sizes().tolist() == [len(some) for some in steps]
    assert index.num_steps == sum(len(some) for some in steps)
    assert index.num_finals == sum(map(len, alive)) - index.num_steps
    check_starts(index, histories, firsts, table)
    for env_id, history in enumerate(histories):
        found = index.episodes(env_id)
        expected = scan(history, firsts[env_id])
        columns = (found.begin, found.end, found.headless, found.running)
        assert list(zip(*(c.tolist() for c in columns), strict=True)) == expected
        assert found.lengths.tolist() == [end - begin for begin, end, *_ in expected]
        for position in steps[env_id]:
            begin, end = index.locate(env_id, np.array([position]))
            assert [(b, e) for b, e, *_ in expected if b <= position < e] == [(begin[0], end[0])]
    check_locate(index, steps, histories, firsts)


def check_starts(index, histories, firsts, table):
    """The legal starts: as a stretch and exceptions, by rank, and one by one."""
    starts = index.starts
    expected, illegal = [], 0
    for env_id, history in enumerate(histories):
        low, stop = int(starts.first[env_id]), int(starts.stop[env_id])
        assert firsts[env_id] <= low <= stop <= len(history)
        rows = legal_rows(history, firsts[env_id], *table)
        legal = [row for row, verdict in rows.items() if verdict == "yes"]
        assert all(low <= row < stop for row in legal)
        assert "wait" not in [rows[row] for row in range(low, stop)]
        illegal += stop - low - len(legal)
        expected += [(env_id, row) for row in legal]
        within = np.arange(low, stop)
        assert within[legal_by_flags(history, within, table)].tolist() == legal
    assert index.num_illegal == illegal
    env_ids, positions = index.start_at(np.arange(len(expected)))
    assert list(zip(env_ids.tolist(), positions.tolist(), strict=True)) == expected


def legal_by_flags(history, positions, table):
    """What draws go by: the flags of steps and of the rows after them alone."""
    derived, _, _, after = table
    # What an earlier lap left above the head says nothing.
    flags = np.full(len(history) + after + 2, START | TRUNCATED, np.uint8)
    flags[: len(history)] = history
    out, zeros = np.empty(len(positions), bool), np.zeros(len(positions), np.int64)
    verdicts, heads = fold_table(derived=derived), np.array([len(history)])
    where = (flags, len(flags), 1, False, verdicts, heads, after)
    kernels.load("steps").legal(*where, zeros, positions, out)
    return out


def check_locate(index, steps, histories, firsts):
    """Steps of all environments at once, in any order, and where they began."""
    places = [(env_id, p) for env_id, some in enumerate(steps) for p in some]
    places = places[::2] + places[1::2]
    env_ids, positions = np.array(places, np.int64).reshape(-1, 2).T
    begin, end = index.locate(env_ids, positions)
    begun = index.begun(env_ids, positions)
    for number, (env_id, position) in enumerate(places):
        episodes = scan(histories[env_id], firsts[env_id])
        (found,) = [e for e in episodes if e[0] <= position < e[1]]
        assert (begin[number], end[number]) == found[:2]
        assert begun[number] == (LONG_AGO if found[2] else found[0])


def fed(num_envs, table):
    """A new index that judges by the table."""
    derived, final_follows, before, after = table
    return EpisodeIndex(
        num_envs, derived=derived, final_follows=final_follows, before=before, after=after
    )


def update(index, histories, firsts):
    span = Span(np.array(firsts, np.int64), np.array([len(h) for h in histories], np.int64))

    def rows(env_ids, positions):
        places = zip(env_ids, positions, strict=True)
        return np.array([histories[e][p] for e, p in places], np.uint8)

    # Now and then steps of several environments are looked at one by one.
    some = rows if sum(firsts) % 4 else None
    index.update(span, lambda e, a, b: np.array(histories[e][a:b], np.uint8), some)


WINDOWS = [(0, 0), (0, 1), (0, 2), (0, 5), (1, 1), (3, 0), (2, 3), (7, 4)]


@pytest.mark.parametrize("derived", [True, False], ids=["derived", "stored"])
@pytest.mark.parametrize("final_follows", [True, False], ids=["next_step", "same_step"])
@pytest.mark.parametrize("seed", range(12))
def test_the_index_says_what_a_scan_says(seed, derived, final_follows):
    rng = np.random.default_rng(seed)
    # Many environments are searched in another way than few.
    num_envs = MAX_TURNS + 1 if seed % 4 == 3 else NUM_ENVS
    before, after = WINDOWS[int(rng.integers(len(WINDOWS)))]
    table = (derived, final_follows, before, max(after, int(derived)))
    histories = [[] for _ in range(num_envs)]
    tails = [0] * num_envs
    capacity = int(rng.choice([1, 2, 3, 7, 30]))
    index = fed(num_envs, table)
    firsts = [0] * num_envs
    for _ in range(50 if num_envs == NUM_ENVS else 15):
        for env_id, history in enumerate(histories):
            if rng.random() < 0.7:
                # Now and then more rows than the capacity come between two looks.
                most = 3 * capacity if rng.random() < 0.2 else 4
                grown(history, int(rng.integers(0, most)), rng, final_follows)
            if rng.random() < 0.1:
                tails[env_id] = len(history)
            elif rng.random() < 0.1:
                tails[env_id] = int(rng.integers(firsts[env_id], len(history) + 1))
            firsts[env_id] = max(tails[env_id], firsts[env_id], len(history) - capacity)
        update(index, histories, firsts)
        check(index, histories, firsts, *table)
    fresh = fed(num_envs, table)
    update(fresh, histories, firsts)
    check(fresh, histories, firsts, *table)


def moves(history, final_follows):
    """Every way in which a history can go on by one call of the writer."""
    last = history[-1] if history else FINAL
    waits = final_follows and last & END
    for kind in (0, TERMINATED, TRUNCATED, END):
        if waits and kind:
            continue  # a final row's ends mean nothing
        ended = np.array([bool(kind & TERMINATED)]), np.array([bool(kind & TRUNCATED)])
        before = np.array([last], np.uint8)
        flag = int(flags_of_steps(before, *ended, final_follows)[0])
        yield [flag]
        if not final_follows and kind:
            yield [flag, FINAL]
    if history:
        before = np.array([FINAL], np.uint8)
        flag = int(flags_of_steps(before, *[np.array([False])] * 2, final_follows)[0])
        yield [flag | BREAK]
        if not last & (END | FINAL):
            yield [flag | BREAK | CUT]


def histories_of(length, final_follows, history=()):
    """Every history of so many calls of the writer, as the rows of each call."""
    if length == 0:
        yield []
        return
    flat = [flag for rows in history for flag in rows]
    for rows in moves(flat, final_follows):
        for rest in histories_of(length - 1, final_follows, (*history, rows)):
            yield [rows, *rest]


def enumerate_starts(length, capacities, windows, final_follows, derived):
    """Compare the starts with the naive ones after each call of each history."""
    for calls in histories_of(length, final_follows):
        for capacity in capacities:
            for before, after in windows:
                table = (derived, final_follows, before, max(after, int(derived)))
                index, history = fed(1, table), []
                for rows in calls:
                    history += rows
                    firsts = [max(0, len(history) - capacity)]
                    update(index, [history], firsts)
                check_starts(index, [history], firsts, table)


@pytest.mark.parametrize("derived", [True, False], ids=["derived", "stored"])
@pytest.mark.parametrize("final_follows", [True, False], ids=["next_step", "same_step"])
@pytest.mark.sliced(1)
def test_every_short_history_has_the_starts_that_walking_finds(derived, final_follows):
    windows = [(0, 1), (2, 2)]
    enumerate_starts(3, [1, 2, 9], windows, final_follows, derived)


@pytest.mark.slow
@pytest.mark.parametrize("derived", [True, False], ids=["derived", "stored"])
@pytest.mark.parametrize("final_follows", [True, False], ids=["next_step", "same_step"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_history_has_the_starts_that_walking_finds(window, derived, final_follows):
    enumerate_starts(4, [1, 2, 3, 20], [window], final_follows, derived)


def test_only_new_rows_are_read():
    asked = []

    def read(env_id, first, stop):
        asked.append((env_id, first, stop))
        return np.zeros(stop - first, np.uint8)

    index = EpisodeIndex(2, derived=True, final_follows=False)
    for stop in (5, 5, 9, 30):
        first = max(0, stop - 10)
        span = Span(np.array([first, 0]), np.array([stop, 3]))
        index.update(span, read)
    assert asked == [(0, 0, 5), (1, 0, 3), (0, 5, 9), (0, 20, 30)]


def test_an_empty_index_has_no_episode():
    index = EpisodeIndex(2, derived=True, final_follows=False)
    index.update(Span(np.zeros(2, np.int64), np.zeros(2, np.int64)), None)
    assert index.num_steps == index.num_illegal == 0
    assert index.starts.lengths.tolist() == [0, 0]
    assert len(index.episodes(1).begin) == 0


STEP, NONE = 0, FINAL


@pytest.mark.parametrize(
    ("before", "kind", "final_follows", "expected"),
    [
        (NONE, "", False, START),
        (NONE, "t", False, START | TERMINATED),
        (STEP, "", False, 0),
        (STEP, "tu", False, TERMINATED | TRUNCATED),
        (TERMINATED, "u", False, START | TRUNCATED),
        (NONE, "", True, START),
        (STEP, "u", True, TRUNCATED),
        (TERMINATED, "", True, FINAL),
        (TRUNCATED, "tu", True, FINAL),
        (FINAL, "t", True, START | TERMINATED),
        (START | TERMINATED, "", True, FINAL),
    ],
)
def test_flags_after_what_stood_before(before, kind, final_follows, expected):
    flags = flags_of_steps(
        np.array([before], np.uint8),
        np.array(["t" in kind]),
        np.array(["u" in kind]),
        final_follows,
    )
    assert flags.dtype == np.uint8
    assert flags.tolist() == [expected]
