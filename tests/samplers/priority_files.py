"""What tests of stored priorities share."""

import numpy as np

import mmreplay as mr


def more(buffer, count):
    """Add so many steps of both environments."""
    zeros = np.zeros((count, 2))
    buffer.extend(
        observation=np.zeros((count, 2, 2), int),
        action=zeros.astype(np.int32),
        next_observation=np.zeros((count, 2, 2), int),
        reward=zeros,
        terminated=zeros > 0,
        truncated=zeros > 0,
    )


def make(**options):
    return mr.PrioritizedSampler(**({"seed": 0} | options))


def own(buffer, sampler, env_id=0):
    """Priorities of one environment by position."""
    rows = sampler.priorities
    rows.follow(buffer.view)
    first, stop = rows.span.first[env_id], rows.span.stop[env_id]
    return {
        p: float(rows.column.values[rows.column.ring.row(env_id, p)])
        for p in range(int(first), int(stop))
    }


def mark(buffer, sampler, positions, env_id=0):
    """Give rows a priority that tells their position."""
    positions = np.array(positions)
    ids = np.full(len(positions), env_id)
    return sampler.update_priorities(buffer.view, ids, positions, 1.0 + positions)


def folder(buffer, name="prioritized"):
    return buffer.path / "samplers" / name
