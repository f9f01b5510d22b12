"""Episodes: every whole one and no other, by brute force."""

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, FormatError, SchemaError
from mmreplay.samplers.episode import EpisodeSampler, return_within
from mmreplay.samplers.shuffled import ShuffledSampler
from mmreplay.samplers.uniform import UniformSampler
from tests.buffer.support import Twin
from tests.samplers.test_sequence import random_turn, view_of
from tests.samplers.test_uniform import assert_uniform, chi_square_limit
from tests.samplers.windows_oracle import episode_begins


@dataclass
class Episode:
    """One episode of the oracle: its steps alive, and those that can be drawn."""

    env_id: int
    steps: list
    legal: list
    headless: bool
    running: bool


def episodes(oracle):
    """Every episode with a step alive, by environment, oldest first."""
    legal = set(oracle.legal())
    found = []
    for env_id, stream in enumerate(oracle.envs):
        rows = stream.rows
        alive = [p for e, p in oracle.alive() if e == env_id]
        for number in sorted({rows[p].episode for p in alive}):
            mine = [p for p in alive if rows[p].episode == number]
            steps = [p for p in mine if not rows[p].final]
            over = any(rows[p].ended() or rows[p].final for p in mine)
            newest = mine[-1] == len(rows) - 1
            if steps:
                found.append(
                    Episode(
                        env_id,
                        steps,
                        [p for p in steps if (env_id, p) in legal],
                        not episode_begins(oracle, env_id, mine[0]),
                        newest and not over,
                    )
                )
    return found


def drawn(draw):
    """The episodes of a padded draw: (env_id, positions), checking the mask."""
    w = draw.windows
    assert (np.diff(w.mask.astype(int), axis=1) <= 0).all()
    assert w.mask.any(0).all()
    found = []
    for env_id, row, mask in zip(draw.env_ids, w.positions, w.mask, strict=True):
        assert (row[~mask] == row[mask][-1]).all()
        found.append((int(env_id), tuple(row[mask].tolist())))
    return found


def ragged(draw):
    """The episodes of a ragged draw."""
    assert draw.windows is None
    pieces = itertools.pairwise(draw.offsets.tolist())
    return [
        (int(draw.env_ids[a]), tuple(draw.positions[a:b].tolist())) for a, b in pieces
    ]


CASES = [
    {},
    {"by": "length"},
    {"by": "length", "headless": True},
    {"running": True},
    {"by": "length", "headless": True, "running": True},
    {"by": "length", "running": True, "max_length": 5},
    {"min_length": 2, "max_length": 4},
    {"where": lambda rows: rows.begin % 2 == 0},
]


def wanted(oracle, case):
    """What a sampler with these arguments may draw, and how often each."""
    found = {}
    for episode in episodes(oracle):
        length = len(episode.steps)
        least, most = case.get("min_length", 1), case.get("max_length", 1 << 40)
        where = case.get("where")
        if where is not None and episode.steps[0] % 2:
            continue
        if (
            episode.legal
            and least <= length <= most
            and (not episode.headless or case.get("headless"))
            and (not episode.running or case.get("running"))
        ):
            weight = len(episode.legal) if case.get("by") == "length" else 1
            found[episode.env_id, tuple(episode.legal)] = weight
    return found


def assert_shares(names, weights):
    """Each name comes in proportion to its weight."""
    counts, total = Counter(names), sum(weights.values())
    assert set(counts) == set(weights)
    statistic = 0.0
    for name, weight in weights.items():
        mean = len(names) * weight / total
        statistic += (counts[name] - mean) ** 2 / mean
    assert statistic < chi_square_limit(max(1, len(weights) - 1))


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("autoreset", ["disabled", "next_step"])
@pytest.mark.parametrize(("capacity", "num_envs"), [(17, 1), (12, 3)])
def test_episodes_are_those_found_by_looking_at_every_row(
    tmp_path, autoreset, stored, capacity, num_envs, rng
):
    twin = Twin(
        tmp_path / "ring", capacity, num_envs, autoreset=autoreset, stored=stored
    )
    kept = [EpisodeSampler(UniformSampler(1), **case) for case in CASES]
    for turn in range(40):
        random_turn(twin, rng, turn)
        for number in rng.permutation(len(CASES))[:3]:
            case, view = CASES[number], view_of(twin.buffer)
            expected = wanted(twin.oracle, case)
            for sampler in (kept[number], EpisodeSampler(UniformSampler(2), **case)):
                if expected:
                    draw = sampler.draw(view, 30 * sum(expected.values()))
                    assert_shares(drawn(draw), expected)
                else:
                    with pytest.raises(EmptyError, match="none is a legal start"):
                        sampler.draw(view, 1)
    twin.buffer.close()
