"""What tests of prioritized draws share."""

from collections import Counter

import numpy as np

from mmreplay.samplers.prioritized import PrioritizedSampler, RankPrioritizedSampler
from tests.contracts.sampler import ListedView, steps_of
from tests.samplers import frequencies

WAY = {"narrow": False}
"""Whether `update` gives priorities as they are stored, which goes another way."""
KINDS = [PrioritizedSampler, RankPrioritizedSampler]


def filled(priorities, firsts=None, **options):
    """A sampler that was told the priorities of a view's rows, and the view."""
    view = ListedView(["s" * len(row) for row in priorities], firsts)
    options = {"alpha": 1.0, "eps": 0.0, "seed": 0} | options
    sampler = PrioritizedSampler(**options)
    set_all(sampler, view, priorities)
    return sampler, view


def set_all(sampler, view, priorities):
    env_ids, positions = np.array(view.legal_starts(), np.int64).T
    values = np.concatenate(priorities).astype(np.float32)
    assert sampler.update_priorities(view, env_ids, positions, values) == 0


def counts(draw):
    return Counter(steps_of(draw))


def assert_masses(drawn, masses):
    """Draws follow masses, some of them 0; see `frequencies.assert_distribution`."""
    total = sum(masses.values())
    frequencies.assert_distribution(
        drawn, {place: m / total for place, m in masses.items() if m > 0}
    )


def update(buffer, pairs, values):
    env_ids, positions = np.array(pairs, np.int64).reshape(-1, 2).T
    given = np.array(values)
    fits = given.dtype == float and not (given > np.finfo(np.float32).max).any()
    if WAY["narrow"] and fits:
        given = given.astype(np.float32)
    return buffer.sampler.update_priorities(buffer.view, env_ids, positions, given)


def masses_of(buffer, count=2000):
    """Probability of every step that a draw finds."""
    draw = buffer.sampler.draw(buffer.view, count)
    return dict(zip(steps_of(draw), draw.probabilities.tolist(), strict=True))


def column_of(buffer):
    return buffer.sampler.priorities.column.values
