"""Buffers to damage, and what the check says of them."""

import numpy as np

import mmreplay as mr
from mmreplay.verify import verify_buffer

DATA = "data-000001"


def schema():
    return mr.Schema(
        {
            "observation": mr.Field((3,), "float32"),
            "pixels": mr.Field((64, 64), "uint8"),
            "action": mr.Field((), "int64"),
            "reward": mr.Field((), "float32"),
            "advantage": mr.Field((), "float32", mutable=True),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )


def steps(rng, count, num_envs):
    return {
        "observation": rng.random((count, num_envs, 3), np.float32),
        "pixels": rng.integers(0, 256, (count, num_envs, 64, 64), np.uint8),
        "action": rng.integers(0, 9, (count, num_envs)),
        "reward": rng.random((count, num_envs), np.float32),
        "advantage": np.zeros((count, num_envs), np.float32),
        "terminated": rng.random((count, num_envs)) < 0.1,
        "truncated": rng.random((count, num_envs)) < 0.1,
    }


def make(path, rng, count=64, *, capacity=64, num_envs=2, **options):
    """A closed buffer of whole blocks."""
    options = {"commit_every": None, "autoreset": "disabled", **options}
    with mr.ReplayBuffer.create(path, schema(), capacity, num_envs, **options) as buf:
        for _ in range(count // 16):
            buf.extend(steps(rng, 16, num_envs))
            buf.commit()
    return path


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0] ^ (1 << bit % 8)
        file.seek(bit // 8)
        file.write(bytes([byte]))


def put(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def kinds(path):
    return [finding.kind for finding in verify_buffer(path).findings]


def messages(path, kind):
    found = [f.message for f in verify_buffer(path).findings if f.kind == kind]
    assert found
    return "\n".join(found)
