"""Buffers, metadata and records that the tests of the format share."""

import numpy as np

import mmreplay as mr
from mmreplay.disk import files
from mmreplay.format import commit
from mmreplay.format.commit import Record
from mmreplay.format.metadata import Metadata
from mmreplay.ring import Ring

UUID = bytes(range(16))
BOOT_ID = bytes(range(16, 32))
DEVICE, INODE = 2049, 77
BIRTH = files.BIRTH.pack(1_700_000_000, 5, 1)


def schema_of(**more):
    """A small schema of every role, and what is given on top."""
    return mr.Schema(
        {
            "observation": {
                "joints": mr.Field((3,), "float32"),
                "marks": mr.Field((2,), "bfloat16"),
            },
            "action": mr.Field((), "int64"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
            "value": mr.Field((), "float64", mutable=True),
            **more,
        }
    )


def metadata_of(**changes):
    """Metadata of a small buffer, with changes."""
    given = {
        "uuid": UUID,
        "created": "2026-01-02T03:04:05Z",
        "generation": 1,
        "engine": "memmap",
        "autoreset": "disabled",
        "ring": Ring.sized(48, 2),
        "schema": schema_of(),
        "user": {"note": "x", "nested": [1, 2.5, None, True]},
    }
    return Metadata(**(given | changes))


def record_of(heads, limits=None, tails=None, **changes):
    """A record of this uuid, boot and file, with changes."""
    heads = np.array(heads, np.int64)
    limits = heads if limits is None else np.array(limits, np.int64)
    tails = np.zeros_like(heads) if tails is None else np.array(tails, np.int64)
    given = {
        "sequence": 1,
        "epoch": 1,
        "flags": 0,
        "boot_id": BOOT_ID,
        "uuid": UUID,
        "generation": 1,
        "device": DEVICE,
        "inode": INODE,
        "time_ns": 5,
        "cuts": np.zeros_like(heads),
        "birth": BIRTH,
    }
    return Record(heads=heads, limits=limits, tails=tails, **(given | changes))


def identity_of(**changes):
    """What `record_of` names."""
    given = {
        "uuid": UUID,
        "generation": 1,
        "boot_id": BOOT_ID,
        "device": DEVICE,
        "inode": INODE,
        "birth": BIRTH,
    }
    return commit.Identity(**(given | changes))


def step_of(number, num_envs=2):
    """One step of each environment whose values all tell its number and environment."""
    ids = np.arange(num_envs)
    value = 1000 * ids + number
    return {
        "observation/joints": (value[:, None] + np.arange(3) / 4).astype(np.float32),
        "observation/marks": np.full((num_envs, 2), number % 64, np.float32),
        "action": value,
        "reward": value / 2,
        "terminated": np.full(num_envs, number % 7 == 6),
        "truncated": np.full(num_envs, number % 11 == 10),
        "value": value + 0.25,
    }


def fill(buffer, first, stop):
    """Add steps first to stop of every environment."""
    from mmreplay.nesting import unflatten

    for number in range(first, stop):
        buffer.add(unflatten(step_of(number, buffer.num_envs)))
