"""Buffers of every kind of field and history, and the difference of two buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.schema import Field, Schema
from mmreplay.schema.dtypes import DTYPES

OBSERVATION = Field((2,), "float32")
ENDS = {"terminated": Field((), "bool"), "truncated": Field((), "bool")}
NAMES = ("a", "b/c", "b/d e", "x.npy", "ä/ö", "..", "__metadata", "0")
"""Names that file formats could take for something else."""
OPERATIONS = ("add", "extend", "final", "clear", "reopen", "truncate")

Array = NDArray[Any]
Resume = Literal["break", "truncate"]
Past = Mapping[str, Any]
"""What happened to a buffer, see `play`: schema, capacity, num_envs, layout, autoreset,
ops (pairs of an operation and a count) and seed."""


def bits(declared: Field, lead: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Values of any bits: NaNs with payloads, infinities and -0 among them."""
    shape = (*lead, *declared.shape)
    if declared.dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    raw = rng.bytes(int(np.prod(shape)) * declared.numpy.itemsize)
    return np.frombuffer(raw, declared.numpy).reshape(shape)


def steps(schema: Schema, lead: tuple[int, ...], rng: np.random.Generator) -> dict[str, Array]:
    """Values of steps by path, one in five with an end."""
    values = {path: bits(item, lead, rng) for path, item in schema.fields.items()}
    for role in ("terminated", "truncated"):
        path = schema.role(role)
        if path:
            values[path] = rng.random(lead) < 0.2
    return values


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A nested mapping of paths such as ``"observation/pixels"``."""
    result: dict[str, Any] = {}
    for path, value in flat.items():
        *tops, last = path.split("/")
        branch = result
        for top in tops:
            branch = branch.setdefault(top, {})
        branch[last] = value
    return result


def every(dtypes: Sequence[str] = DTYPES) -> Schema:
    """A schema with a matrix and a number of each dtype, observations and ends."""
    return Schema.from_flat(
        {f"all/{name}": Field((3, 2), name) for name in dtypes}
        | {f"single/{name}": Field((), name) for name in dtypes}
        | {"observation/o": OBSERVATION, **ENDS}
    )


def random_past(rng: np.random.Generator, dtypes: Sequence[str] = DTYPES) -> Past:
    """Choose a schema, a ring, and what happens to it."""
    flat: dict[str, Field] = {}
    for name in rng.permutation(NAMES)[: rng.integers(5)].tolist():
        shape = tuple(rng.integers(1, 5, rng.integers(5)).tolist())
        dtype = str(rng.choice(dtypes))
        flat[name] = Field(shape, dtype, mutable=bool(rng.integers(2)), exact=True)
    if rng.random() < 0.5:
        flat["observation/o"] = OBSERVATION
        if rng.random() < 0.5:
            flat["next_observation/o"] = OBSERVATION
    for name in tuple(ENDS)[: rng.integers(3)]:
        flat[name] = ENDS[name]
    if rng.random() < 0.5:
        flat["large"] = Field((5000,), "uint8")
    return {
        "schema": Schema.from_flat(flat or {"only": Field((), "int8")}),
        "capacity": int(rng.integers(1, 21)),
        "num_envs": int(rng.integers(1, 4)),
        "layout": str(rng.choice(["env_major", "time_major"])),
        "autoreset": str(rng.choice(["disabled", "same_step", "next_step"])),
        "ops": [
            (str(rng.choice(OPERATIONS)), int(rng.integers(1, 10))) for _ in range(rng.integers(13))
        ],
        "seed": int(rng.integers(2**16)),
    }


def play(path: str | Path, past: Past) -> ReplayBuffer:
    """Make the buffer of a past and return it, open for writing."""
    schema, num_envs = past["schema"], past["num_envs"]
    rng = np.random.default_rng(past["seed"])
    buffer = ReplayBuffer.create(
        path,
        schema,
        past["capacity"],
        num_envs,
        layout=past["layout"],
        autoreset=past["autoreset"],
        commit_every=None,
        user_metadata={"seed": past["seed"]},
    )
    finals = schema.role("observation") and not schema.role("next_observation")
    finals = finals and past["autoreset"] != "next_step"
    for operation, count in past["ops"]:
        if operation in ("reopen", "truncate"):
            buffer.close()
            resume: Resume = "break" if operation == "reopen" else "truncate"
            buffer = ReplayBuffer.open(path, "r+", on_resume=resume, commit_every=None)
        elif operation == "clear":
            buffer.clear([count % num_envs])
        else:
            values = steps(schema, (count, num_envs), rng)
            final = None
            if operation == "final" and finals:
                final = {"o": bits(OBSERVATION, (count, num_envs), rng)}
            buffer.extend(nested(values), final_observation=final)
    buffer.set_statistics({"mean": [0.5, sum(count for _, count in past["ops"])]})
    return buffer


def every_kind(
    path: str | Path,
    num_envs: int = 2,
    count: int = 40,
    capacity: int = 24,
    dtypes: Sequence[str] = DTYPES,
) -> ReplayBuffer:
    """Make a wrapped ring of every dtype, with both ends and final rows."""
    past = {
        "schema": every(dtypes),
        "capacity": capacity,
        "num_envs": num_envs,
        "layout": "env_major",
        "autoreset": "disabled",
        "seed": 7,
        "ops": [("final", count), ("truncate", 1), ("add", 3)],
    }
    return play(path, past)


def make_large(path: str | Path, nbytes: int, shape: tuple[int, ...]) -> None:
    """Make a closed buffer of two environments of images and small fields.

    Args:
        path: Of its folder.
        nbytes: Of all its rows.
        shape: Of a uint8 observation.
    """
    schema = Schema(
        {
            "observation": Field(shape, "uint8"),
            "small": Field((17,), "float32"),
            "terminated": Field((), "bool"),
        }
    )
    count = nbytes // schema.row_nbytes // 2
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (100, 2, *shape), np.uint8)
    with ReplayBuffer.create(
        path, schema, count, 2, commit_every=None, autoreset="disabled"
    ) as buffer:
        for first in range(0, count, 100):
            size = min(100, count - first)
            marks = images.reshape(100, 2, -1)[:, :, 0]
            marks[:] = (first + np.arange(100))[:, None] % 251
            ends = np.zeros((size, 2), bool)
            ends[-1] = True
            small = rng.random((size, 2, 17)).astype(np.float32)
            buffer.extend(observation=images[:size], small=small, terminated=ends)


def difference_of_metadata(one: ReplayBuffer, other: ReplayBuffer) -> str | None:
    """What differs of schema, sizes, statistics and user metadata; None if nothing."""
    for name, left, right in (
        ("schema", one.schema, other.schema),
        ("num_envs", one.num_envs, other.num_envs),
        ("capacity", one.capacity, other.capacity),
        ("autoreset", one.autoreset, other.autoreset),
        ("layout", one.layout, other.layout),
        ("statistics", one.statistics, other.statistics),
        ("user metadata", one.metadata.user, other.metadata.user),
    ):
        if left != right:
            return f"{name} is {right!r} instead of {left!r}"
    return None


def difference_of_rows(
    one: ReplayBuffer,
    other: ReplayBuffer,
    stored_as: Callable[[Array], Array] = np.ascontiguousarray,
) -> str | None:
    """What differs of spans, rows and flags, by a bit or more; None if nothing.

    Args:
        one: As it should be.
        other: As it is.
        stored_as: What a column becomes in a file that does not hold every bit.
    """
    for name in ("first", "stop"):
        left, right = getattr(one.span, name), getattr(other.span, name)
        if not np.array_equal(left, right):
            return f"span.{name} is {right.tolist()} instead of {left.tolist()}"
    rows, again = one.gather_all(), other.gather_all()
    if set(rows) != set(again):
        return f"fields are {sorted(again)} instead of {sorted(rows)}"
    for path in rows:
        a, b = (stored_as(np.asarray(item[path])) for item in (rows, again))
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"field {path!r} is {b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}"
        if a.tobytes() != b.tobytes():
            count = len(a)
            left, right = (
                np.frombuffer(item.tobytes(), np.uint8).reshape(count, -1) for item in (a, b)
            )
            row = int((left != right).any(1).argmax())
            element = int((left[row] != right[row]).argmax()) // a.dtype.itemsize
            expected, got = (np.ravel(item[row])[element] for item in (a, b))
            env_id, position = rows.env_ids[row], rows.positions[row]
            # With the bytes: NaNs of different payloads look alike.
            return (
                f"field {path!r} of environment {env_id}, position {position}, element "
                f"{element} is {got.item()!r} (bytes {got.tobytes().hex()}) instead of "
                f"{expected.item()!r} (bytes {expected.tobytes().hex()})"
            )
    env_ids, positions = np.asarray(rows.env_ids), np.asarray(rows.positions)
    left, right = (item.view.flags(env_ids, positions) for item in (one, other))
    if not np.array_equal(left, right):
        row = int((left != right).argmax())
        return (
            f"flags of environment {env_ids[row]}, position {positions[row]} are "
            f"{right[row]} instead of {left[row]}"
        )
    return None
