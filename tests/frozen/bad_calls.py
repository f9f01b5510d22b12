"""Calls that a user gets wrong, and the class of the error that each one raises.

Messages improve and are not recorded; what catches them is.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mmreplay as mr

FIELDS = {
    "observation": mr.Field((2,), "float32"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
}
SCHEMA = mr.Schema(FIELDS)


def step(number: int = 0) -> dict[str, Any]:
    return {"observation": [number, 0], "reward": 1.0, "terminated": number % 9 == 8}


def in_memory(count: int = 40, **options: Any) -> mr.ReplayBuffer:
    buffer = mr.ReplayBuffer.create(
        None, SCHEMA, 20, engine="memory", autoreset="disabled", **options
    )
    for number in range(count):
        buffer.add(step(number))
    return buffer


def disk(folder: Path, **options: Any) -> Path:
    with mr.ReplayBuffer.create(
        folder / "ring", SCHEMA, 20, engine="memmap", autoreset="disabled", **options
    ) as buffer:
        for number in range(10):
            buffer.add(step(number))
    return folder / "ring"


def create(folder: Path, **options: Any) -> mr.ReplayBuffer:
    given = {"path": folder / "new", "schema": SCHEMA, "capacity": 10} | options
    return mr.ReplayBuffer.create(**given)


def _twice(folder: Path) -> None:
    path = disk(folder)
    with mr.ReplayBuffer.open(path, "r+"):
        mr.ReplayBuffer.open(path, "r+")


def _closed(folder: Path) -> None:
    buffer = mr.ReplayBuffer.open(disk(folder))
    buffer.close()
    buffer.sample(1)


def _read_only(folder: Path) -> None:
    with mr.ReplayBuffer.open(disk(folder)) as buffer:
        buffer.add(step())


def _no_json(folder: Path) -> None:
    (disk(folder) / "metadata.json").write_text("{")
    mr.ReplayBuffer.open(folder / "ring")


def _newer(folder: Path) -> None:
    file = disk(folder) / "metadata.json"
    file.write_text(file.read_text().replace("  1,\n  0", "  7,\n  0"))
    mr.ReplayBuffer.open(folder / "ring")


def _empty_commit(folder: Path) -> None:
    (disk(folder) / "data-000001" / "COMMIT").write_bytes(b"")
    mr.ReplayBuffer.open(folder / "ring")


def _garbage(folder: Path) -> None:
    (folder / "a.npz").write_bytes(b"no zip")
    mr.load(folder / "a.npz", folder / "b")


def _there(folder: Path) -> None:
    (folder / "a.npz").write_bytes(b"mine")
    mr.export(disk(folder), folder / "a.npz")


def _starved(folder: Path) -> None:
    limiter = mr.RateLimiter(1.0, 1000, 1000.0, timeout=0.0)
    with create(folder, limiter=limiter, engine="memmap") as buffer:
        for number in range(5):
            buffer.add(step(number))
        buffer.sample(2)


CALLS: dict[str, Callable[[Path], object]] = {
    "field of an unknown dtype": lambda _: mr.Field((), "floot"),
    "field of objects": lambda _: mr.Field((), "object"),
    "field of a negative shape": lambda _: mr.Field((-1,), "bool"),
    "schema of nothing": lambda _: mr.Schema({}),
    "schema of no fields": lambda _: mr.Schema({"a": 3}),
    "capacity of 0": lambda d: create(d, capacity=0),
    "capacity that is no integer": lambda d: create(d, capacity=2.5),
    "no environments": lambda d: create(d, num_envs=0),
    "unknown engine": lambda d: create(d, engine="none"),
    "unknown layout": lambda d: create(d, layout="none"),
    "unknown autoreset": lambda d: create(d, autoreset="none"),
    "create where one is": lambda d: create(d, path=disk(d)),
    "unknown option": lambda d: create(d, no_such_option=1),
    "open nothing": lambda d: mr.ReplayBuffer.open(d / "typo"),
    "open another folder": lambda d: mr.ReplayBuffer.open(d),
    "open in an unknown mode": lambda d: mr.ReplayBuffer.open(disk(d), "w"),
    "open for writing twice": _twice,
    "open a newer format": _newer,
    "open metadata that is no JSON": _no_json,
    "open a torn commit": _empty_commit,
    "use of a closed buffer": _closed,
    "add to a reader": _read_only,
    "add a step without a field": lambda _: in_memory().add({"reward": 1.0}),
    "add an unknown field": lambda _: in_memory().add(step() | {"more": 1}),
    "add a wrong shape": lambda _: in_memory().add(step() | {"observation": [1, 2, 3]}),
    "add text": lambda _: in_memory().add(step() | {"reward": "much"}),
    "extend by ragged columns": lambda _: in_memory().extend(
        {"observation": np.zeros((3, 2)), "reward": [1.0], "terminated": [False] * 3}
    ),
    "environment that is not there": lambda _: in_memory().add(step(), env_ids=[5]),
    "sample of nothing": lambda _: in_memory(0).sample(4),
    "sample of 0": lambda _: in_memory().sample(0),
    "take of a row that is gone": lambda _: in_memory().take(0, [0]),
    "take of a row to come": lambda _: in_memory().take(0, [1000]),
    "unknown field of a buffer": lambda _: in_memory().get_field("none", [0], [30]),
    "write to a field that is not mutable": lambda _: in_memory().write_field(
        "reward", 0, [30], [1.0]
    ),
    "priorities of a uniform sampler": lambda _: (
        b := in_memory(sampler=mr.UniformSampler(0))
    ).update_priorities(b.sample(2), [1.0, 2.0]),
    "priority that is negative": lambda _: (
        b := in_memory(sampler=mr.PrioritizedSampler(seed=0))
    ).update_priorities(b.sample(2), [-1.0, 2.0]),
    "alpha that is negative": lambda _: mr.PrioritizedSampler(alpha=-1.0),
    "seed that is no integer": lambda _: mr.UniformSampler("one"),
    "state of another sampler": lambda _: mr.UniformSampler(0).load_state_dict(
        mr.StratifiedSampler(0).state_dict()
    ),
    "windows longer than the buffer": lambda _: in_memory(
        sampler=mr.SequenceSampler(500, mr.UniformSampler(0))
    ).sample(2),
    "n-step of 0": lambda _: mr.NStep(0, 0.9),
    "transform of a field that is not there": lambda _: in_memory(
        transforms=[mr.Cast("float32", "none")]
    ),
    "shares that are negative": lambda _: mr.MixtureSampler([(mr.UniformSampler(0), -1.0)], seed=0),
    "limiter that never lets through": lambda _: mr.RateLimiter(-1.0, 10, 8.0),
    "limiter of a buffer in RAM": lambda _: in_memory(
        limiter=mr.RateLimiter(1.0, 1000, 1000.0, timeout=0.0)
    ),
    "limiter that waits in vain": _starved,
    "resize to 0": lambda _: in_memory().resize(0),
    "snapshot onto itself": lambda d: mr.ReplayBuffer.open(disk(d)).snapshot(d / "ring"),
    "export to an unknown format": lambda d: mr.export(disk(d), d / "a.doc"),
    "export of an unknown field": lambda d: mr.export(disk(d), d / "a.npz", fields=["none"]),
    "export onto another file": _there,
    "export with an unknown option": lambda d: mr.export(disk(d), d / "a.npz", no_such_option=1),
    "load of nothing": lambda d: mr.load(d / "typo.npz", d / "b"),
    "load of garbage": _garbage,
    "split by shares above 1": lambda _: mr.split(in_memory(), [0.9, 0.9], seed=0),
    "concat of nothing": lambda _: mr.concat([]),
    "sum tree of 0": lambda _: mr.SumTree(0),
    "leaf that is not there": lambda _: mr.SumTree(4).get(np.array([9])),
    "loader of no batch": lambda _: mr.ReplayLoader(in_memory(), 0),
    "dataset of nothing": lambda d: len(mr.ReplayDataset(d / "typo")),
    "name that is not public": lambda _: mr.NoSuchName,
}


def error_of(name: str, folder: Path) -> list[str]:
    """Public and built-in classes of what a call raises, the most special first."""
    try:
        CALLS[name](folder)
    except Exception as error:
        public = [each for each in type(error).__mro__ if _known(each)]
        return [each.__name__ for each in public if each is not object]
    raise AssertionError(f"{name}: nothing was raised")


def _known(kind: type) -> bool:
    name = kind.__name__
    return not name.startswith("_") and kind in (
        getattr(mr.errors, name, None),
        getattr(builtins, name, None),
    )
