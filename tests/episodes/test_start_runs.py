"""Runs of starts against lists of positions, as runs come and go."""

import numpy as np
import pytest

from mmreplay.episodes.starts import StartRuns, num_starts


def starts_of(begin, stop, stride):
    return [p for p in range(begin, stop) if p == begin or p % stride == 0]


@pytest.mark.parametrize("stride", [1, 3, 1 << 62])
@pytest.mark.parametrize("num_envs", [1, 5])
@pytest.mark.sliced(2)
def test_ranks_and_positions_find_what_lists_hold(num_envs, stride, rng):
    runs = StartRuns(num_envs, stride)
    # Every start ever taken in, the newest position, and the oldest one kept.
    every = [[] for _ in range(num_envs)]
    ends, kept = np.ones(num_envs, int), np.zeros(num_envs, int)
    envs = np.arange(num_envs)
    for _ in range(120):
        env_id = int(rng.integers(num_envs))
        lengths = rng.integers(0, 9, int(rng.integers(1, 6)))
        gaps = rng.integers(0, 3, len(lengths))
        stop = ends[env_id] + np.cumsum(lengths + gaps)
        begin = stop - lengths
        runs.append(env_id, begin, stop, num_starts(begin, stop, stride))
        for low, high in zip(begin.tolist(), stop.tolist(), strict=True):
            every[env_id] += starts_of(low, high, stride)
        ends[env_id] = stop[-1]
        newest = rng.integers(0, 7, num_envs)
        runs.set_newest(ends, ends + newest)
        if rng.random() < 0.4:
            kept[env_id] = rng.integers(kept[env_id], ends[env_id] + 1)
            runs.drop(env_id, int(kept[env_id]))
        for e in envs.tolist():
            now = every[e] + starts_of(ends[e], ends[e] + newest[e], stride)
            assert runs.ends[e] == len(now)
            ranks = np.array([r for r, p in enumerate(now) if p >= kept[e]], int)
            ids = np.full(len(ranks), e)
            assert runs.starts_at(ids, ranks).tolist() == [now[r] for r in ranks]
            places = np.arange(kept[e], ends[e] + newest[e] + 2)
            below = runs.below(np.full(len(places), e), places)
            assert below.tolist() == [sum(p < q for p in now) for q in places]
            assert runs.oldest[e] > kept[e]


def test_memory_is_bounded_by_the_runs_that_are_there(rng):
    runs = StartRuns(3, 1)
    for turn in range(3000):
        begin = 10 * np.arange(turn * 4, turn * 4 + 4)
        runs.append(turn % 3, begin, begin + 5, np.full(4, 5))
        runs.drop(turn % 3, 10 * 4 * (turn - 60))
    assert len(runs) < 300
    assert runs._finished.columns[0].size < 3 * 8 * 300
