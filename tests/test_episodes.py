"""The index of episodes against a scan of all rows, under random histories."""

import numpy as np
import pytest

from mmreplay.episodes import (
    BREAK,
    CUT,
    END,
    FINAL,
    NEVER,
    START,
    TERMINATED,
    TRUNCATED,
    EpisodeIndex,
    drawable,
    flags_of_steps,
)
from mmreplay.ring import Span

NUM_ENVS = 3


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


def check(index, histories, firsts, derived, final_follows):
    """Everything that the index says, from the flags alone."""
    alive = [list(range(f, len(h))) for f, h in zip(firsts, histories, strict=True)]
    steps = [
        [p for p in rows if not history[p] & FINAL]
        for rows, history in zip(alive, histories, strict=True)
    ]
    assert index.sizes().tolist() == [len(some) for some in steps]
    assert index.num_steps == sum(len(some) for some in steps)
    illegal, newest = 0, []
    for rows, history in zip(alive, histories, strict=True):
        legal = legal_rows(history, rows, derived, final_follows)
        illegal += sum(not legal[p] for p in rows[:-1])
        newest.append(bool(rows) and legal[rows[-1]])
    assert index.newest_drawable().tolist() == newest
    assert index.num_undrawable == illegal
    for env_id, history in enumerate(histories):
        found = index.episodes(env_id)
        expected = scan(history, firsts[env_id])
        columns = (found.begin, found.end, found.headless, found.running)
        assert list(zip(*(c.tolist() for c in columns), strict=True)) == expected
        assert found.lengths.tolist() == [end - begin for begin, end, *_ in expected]
        if steps[env_id]:
            begin, end = index.locate(env_id, np.array(steps[env_id]))
            for position, b, e in zip(steps[env_id], begin, end, strict=True):
                assert (b, e) in [(x[0], x[1]) for x in expected]
                assert b <= position < e


def legal_rows(history, rows, derived, final_follows):
    """Which rows are legal starts, one by one, by `drawable`."""
    legal = {}
    for p in rows:
        known = p + 1 < len(history)
        after = history[p + 1] if known else 0
        legal[p] = bool(
            drawable(
                np.array([history[p]], np.uint8),
                np.array([after], np.uint8),
                np.array([known]),
                derived=derived,
                final_follows=final_follows,
            )[0]
        )
    return legal


@pytest.mark.parametrize("derived", [True, False], ids=["derived", "stored"])
@pytest.mark.parametrize("final_follows", [True, False], ids=["next_step", "same_step"])
@pytest.mark.parametrize("seed", range(12))
def test_the_index_says_what_a_scan_says(seed, derived, final_follows):
    rng = np.random.default_rng(seed)
    histories = [[] for _ in range(NUM_ENVS)]
    tails = [0] * NUM_ENVS
    capacity = int(rng.choice([1, 2, 3, 7, 30]))
    index = EpisodeIndex(NUM_ENVS, derived=derived, final_follows=final_follows)
    firsts = [0] * NUM_ENVS
    for _ in range(50):
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
        span = Span(
            np.array(firsts, np.int64), np.array([len(h) for h in histories], np.int64)
        )
        index.update(span, lambda e, a, b: np.array(histories[e][a:b], np.uint8))
        check(index, histories, firsts, derived, final_follows)
    fresh = EpisodeIndex(NUM_ENVS, derived=derived, final_follows=final_follows)
    fresh.update(span, lambda e, a, b: np.array(histories[e][a:b], np.uint8))
    check(fresh, histories, firsts, derived, final_follows)


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
    assert index.num_steps == index.num_undrawable == 0
    assert len(index.episodes(1).begin) == 0
    assert not index.newest_drawable().any()
    assert NEVER > 1 << 62


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
