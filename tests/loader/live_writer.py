"""Rows that tell whether they are whole, and a process that writes them without rest.

python -m tests.loader.live_writer FOLDER LEAST SECONDS
"""

import sys
import time

import numpy as np

import mmreplay as mr

CAPACITY, NUM_ENVS, LENGTH = 2000, 2, 50
MIXED = np.uint64(0x9E3779B97F4A7C15)
FIELDS = {
    "observation": {
        "number": mr.Field((), "uint64"),
        "lanes": mr.Field((6,), "uint64"),
        "wide": mr.Field((520,), "uint64"),
    },
    "action": mr.Field((3,), "uint64"),
    "check": mr.Field((), "uint64"),
    "terminated": mr.Field((), "bool"),
}
SMALL = {
    "observation": {k: v for k, v in FIELDS["observation"].items() if k != "wide"},
    **{name: FIELDS[name] for name in ("action", "check", "terminated")},
}


def mixed(numbers, count):
    """Pseudorandom lanes of numbers, uint64 ``[..., count]``."""
    lanes = numbers[..., None] * np.uint64(1024) + np.arange(count, dtype=np.uint64)
    lanes *= MIXED
    return lanes ^ (lanes >> np.uint64(29))


def rows(numbers, wide=True):
    """Rows whose every value follows from their number; `check` sums the small ones."""
    observation = {"number": numbers, "lanes": mixed(numbers, 6)}
    if wide:
        observation["wide"] = mixed(numbers ^ np.uint64(77), 520)
    action = mixed(numbers ^ np.uint64(99), 3)
    check = numbers + observation["lanes"].sum(-1) + action.sum(-1)
    ended = numbers // np.uint64(NUM_ENVS) % np.uint64(LENGTH) == LENGTH - 1
    return {"observation": observation, "action": action, "check": check, "terminated": ended}


def broken(batch):
    """How many rows of a batch of tensors are not those of their places."""
    number = batch["observation/number"].numpy().view(np.uint64)
    place = (batch.positions * NUM_ENVS + batch.env_ids).numpy()
    found = number != place.astype(np.uint64)
    lanes = batch["observation/lanes"].numpy().view(np.uint64)
    action = batch["action"].numpy().view(np.uint64)
    check = batch["check"].numpy().view(np.uint64)
    found |= check != number + lanes.sum(-1) + action.sum(-1)
    found |= (lanes != mixed(number, 6)).any(-1)
    if "observation/wide" in batch:
        wide = batch["observation/wide"].numpy().view(np.uint64)
        found |= (wide != mixed(number ^ np.uint64(77), 520)).any(-1)
    # What follows is the next row of the environment, or its own where it ends.
    after = batch["next_observation/number"].numpy().view(np.uint64)
    ended = batch["terminated"].numpy()
    found |= after != np.where(ended, number, number + np.uint64(NUM_ENVS))
    return int(found.sum())


def main(folder, min_laps, seconds):
    """Write at least so many laps, and so long; then tell how many rows there were."""
    with mr.ReplayBuffer.open(folder, "r+", on_resume="continue") as buffer:
        wide = "observation/wide" in buffer.schema.paths
        first = int(buffer.heads[0])
        stop = time.monotonic() + float(seconds)
        rng = np.random.default_rng(0)
        print("begun", flush=True)
        while first < int(min_laps) * CAPACITY or time.monotonic() < stop:
            count = int(rng.integers(1, 200))
            positions = np.arange(first, first + count, dtype=np.uint64)
            numbers = positions[:, None] * np.uint64(NUM_ENVS)
            numbers = numbers + np.arange(NUM_ENVS, dtype=np.uint64)
            buffer.extend(rows(numbers, wide))
            first += count
    print(first, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
