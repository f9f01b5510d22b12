"""Rings and clients of one process, for tests of draws without a cluster."""

import numpy as np

import mmreplay as mr
from mmreplay.ray.descriptions import describe_sampler, describe_transforms

SCHEMA = mr.Schema({"n": mr.Field((), "int64")})


def ring(path, numbers, capacity=None, **options):
    """A closed ring of rows that hold these numbers."""
    capacity = max(1, len(numbers)) if capacity is None else capacity
    with mr.ReplayBuffer.create(
        path, SCHEMA, capacity, commit_every=None, **options
    ) as buffer:
        if len(numbers):
            buffer.extend(n=np.asarray(numbers))
    return path


def client_of(sampler, transforms=()):
    """What a client draws by, as it travels."""
    return {
        "sampler": describe_sampler(sampler),
        "transforms": describe_transforms(transforms),
    }


def update_of(positions, values):
    """Priorities of steps of environment 0."""
    return {
        "env_ids": np.zeros(len(positions), np.int64),
        "positions": np.asarray(positions, np.int64),
        "values": np.asarray(values, np.float32),
        "mask": None,
    }


def shares_of(shares, step=0, key=0, rows=False):
    """One batch of a request."""
    shares = {name: np.asarray(own, np.float64) for name, own in shares.items()}
    return {"step": step, "key": key, "shares": shares, "rows": rows}
