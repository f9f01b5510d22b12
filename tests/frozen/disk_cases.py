"""Calls that a disk put in the place of the real one sees during fixed operations.

Torture tests count, fail and cut at these calls: an operation that no longer makes them
through the one door to the disk is not tested by them, and nothing else would say so.
"""

from __future__ import annotations

import numpy as np

import mmreplay as mr
from mmreplay.testing.disks import WatchedDisk, using
from tests.frozen.bytes_cases import fixed
from tests.frozen.frozen_worlds import NUM_ENVS, buffer, step, write_together


def _block(first, count):
    steps = [step(number, range(NUM_ENVS)) for number in range(first, first + count)]
    return {path: np.stack([each[path] for each in steps]) for path in steps[0]}


def _prioritized(made, folder):
    made.sampler = mr.PrioritizedSampler(seed=0)
    batch = made.sample(8)
    made.update_priorities(batch, np.ones(8))


# Done one after another over one open buffer.
OPERATIONS = {
    "add": lambda made, folder: write_together(made, 20, 40),
    "extend": lambda made, folder: made.extend(_block(40, 40)),
    "commit": lambda made, folder: made.commit(),
    "add over the wrap": lambda made, folder: write_together(made, 80, 120),
    "update priorities": _prioritized,
    "statistics": lambda made, folder: made.set_statistics({"mean": 1}),
    "clear": lambda made, folder: made.clear([1]),
    "snapshot": lambda made, folder: made.snapshot(folder / "copy"),
    "resize": lambda made, folder: made.resize(80),
    "add a field": lambda made, folder: made.add_field("extra", mr.Field((), "int8"), 7),
    "close": lambda made, folder: made.close(),
}


def counted(folder):
    """How often each operation called each primitive of the disk."""
    found = {}

    def count(name, operation, *args):
        with using(WatchedDisk()) as disk:
            result = operation(*args)
        found[name] = dict(sorted(disk.calls.items()))
        return result

    with fixed():
        made = count("create", lambda: buffer(folder / "a", "memmap", num_steps=0))
        # Which route an append takes is decided at the opening: with a disk that is
        # replaced by then, as torture tests do.
        made.close()
        with using(WatchedDisk()):
            made = mr.ReplayBuffer.open(folder / "a", "r+", commit_every=None)
            write_together(made, 0, 20)
        for name, operation in OPERATIONS.items():
            count(name, operation, made, folder)
        reader = count("open to read", mr.ReplayBuffer.open, folder / "a")
        reader.close()
        again = {"mode": "r+", "commit_every": None}
        writer = count("open to write", lambda: mr.ReplayBuffer.open(folder / "a", **again))
        writer.close()
        count("export", mr.export, folder / "a", folder / "out.npz")
        count("load", mr.load, folder / "out.npz", folder / "loaded")
        count("compact", mr.compact, folder / "a", folder / "packed")
    return found
