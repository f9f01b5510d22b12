"""Sequences: every window that there is and no other, by brute force."""

import itertools
import json

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, FormatError, SchemaError
from mmreplay.samplers.sequence import SequenceSampler
from mmreplay.samplers.uniform import UniformSampler
from tests.buffer.support import Twin
from tests.samplers.windows_oracle import assert_windows, windows

SHAPES = [
    {"length": 1},
    {"length": 3},
    {"length": 4, "stride": 3},
    {"length": 2, "burn_in": 2},
    {"length": 2, "burn_in": 1, "bootstrap": 1, "stride": 2},
    {"length": 9},
]
BOUNDARIES = ["episode", "any", "pad"]


def view_of(buffer):
    return buffer._reading.view


def random_turn(twin, rng, turn):
    """Add some steps to some environments; clear and reopen now and then."""
    num_envs = twin.buffer.num_envs
    steps = int(rng.integers(1, 6))
    env_ids = rng.permutation(num_envs)[: rng.integers(1, num_envs + 1)].tolist()
    ends = [0.7, 0.15, 0.15] if turn % 20 < 14 else [0.1, 0.5, 0.4]
    kinds = rng.choice(["", "t", "u"], (steps, len(env_ids)), p=ends)
    final = twin.autoreset == "disabled" and not twin.stored and turn % 3 == 0
    twin.extend(kinds.tolist(), env_ids, final)
    if turn % 11 == 10:
        twin.buffer.clear([turn % num_envs])
        twin.oracle.clear([turn % num_envs])
    if turn % 13 == 12 and twin.path is not None:
        twin.reopen(["break", "truncate", "continue"][turn % 3])


def check_shape(view, oracle, samplers, shape, boundary):
    """One sampler that has seen all, and one that has seen nothing yet, agree."""
    expected = windows(oracle, boundary=boundary, **shape)
    key = (boundary, *shape.items())
    fresh = SequenceSampler(sampler=UniformSampler(3), boundary=boundary, **shape)
    for sampler in (samplers[key], fresh):
        if expected:
            draw = sampler.draw(view, 30 * len(expected))
            assert_windows(draw, expected)
            assert (draw.probabilities == 1 / len(expected)).all()
            check_view(sampler._inner.of(view), list(expected))
        else:
            with pytest.raises(EmptyError, match="none is a legal start of one"):
                sampler.draw(view, 2)


def check_view(view, legal):
    """Everything that the view inside says of the legal starts."""
    starts = view.starts
    ranks = np.arange(len(legal))
    places = view.start_at(ranks)
    assert list(zip(*(a.tolist() for a in places), strict=True)) == legal
    rows = [
        (env_id, position)
        for env_id in range(len(starts.first))
        for position in range(starts.first[env_id], starts.stop[env_id])
    ]
    env_ids, positions = np.array(rows).T
    told = view.legal(env_ids, positions)
    assert [row for row, yes in zip(rows, told, strict=True) if yes] == legal
    assert view.num_illegal == len(rows) - len(legal)
    before = np.cumsum(told) - told
    assert (view.legal_before(env_ids, positions) == before).all()


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("autoreset", ["disabled", "next_step"])
@pytest.mark.parametrize(("capacity", "num_envs"), [(14, 1), (11, 3)])
def test_windows_are_those_found_by_looking_at_every_row(
    tmp_path, autoreset, stored, capacity, num_envs, rng
):
    twin = Twin(
        tmp_path / "ring", capacity, num_envs, autoreset=autoreset, stored=stored
    )
    cases = list(itertools.product(SHAPES, BOUNDARIES))
    samplers = {
        (boundary, *shape.items()): SequenceSampler(
            sampler=UniformSampler(2), boundary=boundary, **shape
        )
        for shape, boundary in cases
    }
    for turn in range(40):
        random_turn(twin, rng, turn)
        # Each turn looks at some of the cases, so that samplers skip moments.
        for number in rng.permutation(len(cases))[:6]:
            shape, boundary = cases[number]
            view = view_of(twin.buffer)
            check_shape(view, twin.oracle, samplers, shape, boundary)
    twin.buffer.close()
