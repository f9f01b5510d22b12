"""Steps whose every byte says where and when they were written.

A row's content follows from its environment, its position and the *lineage* that
wrote it: the number of the session, one more at each opening. So a row that is
torn, stale, or from a timeline that a crash undid is told from the right one
without keeping a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.episodes import FINAL, TERMINATED, TRUNCATED
from mmreplay.format.metadata import Engine
from mmreplay.ragged import Ragged
from mmreplay.ring import Layout
from mmreplay.schema import Field, Schema
from tools.torture.groups import GroupRows

Array = NDArray[np.int64]
Columns = dict[str, Any]

MUTABLE = "advantage"
VERSIONS = 4
"""Values that the mutable field of one row may take, the row's own and the next ones.

They are single bytes: a write that is cut short leaves each the old one or the new.
"""
OBSERVATION = 11
PIXELS = 4096
MAX_TOKENS, MAX_NOTE = 300, 400
"""Of values that vary: four longest rows fit into the smallest heap."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """One shape of buffer to be attacked.

    Attributes:
        name: What reports call it.
        capacity: Steps kept per environment.
        num_envs: Environments.
        layout: Of the ring.
        large: Whether there is a field with a file of its own.
        engine: Of the buffer.
        heap_bytes: Of each environment, where there are fields that vary.
    """

    name: str
    capacity: int
    num_envs: int
    layout: Layout
    large: bool
    engine: Engine = "memmap"
    heap_bytes: int | None = None

    @property
    def schema(self) -> Schema:
        """Small fields, the two ends, a mutable field, and perhaps a large one."""
        fields = {
            "observation": Field((OBSERVATION,), "uint8"),
            "origin": Field((3,), "int64"),
            "reward": Field((), "float32"),
            "terminated": Field((), "bool"),
            "truncated": Field((), "bool"),
            MUTABLE: Field((), "uint8", mutable=True),
        }
        if self.large:
            fields["pixels"] = Field((PIXELS,), "uint8")
        if self.heap_bytes is not None:
            fields["tokens"] = Field((None,), "uint16", max_length=MAX_TOKENS)
            fields["note"] = Field.text(max_bytes=MAX_NOTE)
        return Schema(fields)


GEOMETRIES = (
    Geometry("one", 64, 1, "env_major", large=False),
    Geometry("three", 16, 3, "env_major", large=True),
    Geometry("two across", 40, 2, "time_major", large=False),
    # A record of this many environments is two pages, and can tear between them.
    Geometry("many across", 16, 130, "time_major", large=False),
)

# Their rows end when the heap is needed; the first heap is the smallest that there is.
HEAPED = (
    Geometry("one in a heap", 64, 1, "env_major", large=False, heap_bytes=4096),
    Geometry("three in heaps", 16, 3, "env_major", large=True, heap_bytes=8192),
    Geometry("two across in heaps", 40, 2, "time_major", large=False, heap_bytes=12_288),
)

# Their shards are sealed, put back and retired all the time.
SHARDED = (
    Geometry("one in shards", 64, 1, "env_major", large=False, engine="zarr"),
    Geometry("three in shards", 16, 3, "env_major", large=True, engine="zarr"),
    Geometry("two across in shards", 40, 2, "time_major", large=False, engine="zarr"),
)

# Their heaps hold some of their rows; the others' values are in shards alone.
SHARDED_HEAPS = (
    Geometry(
        "one in shards and a heap",
        64,
        1,
        "env_major",
        large=False,
        engine="zarr",
        heap_bytes=16_384,
    ),
    Geometry(
        "three in shards and heaps", 40, 3, "env_major", large=True, engine="zarr", heap_bytes=8192
    ),
    # Every row is a shard of its own.
    Geometry(
        "one in shards of a row", 48, 1, "env_major", large=False, engine="zarr", heap_bytes=4096
    ),
)


def _keys(env_ids: Array, positions: Array, lineages: Array) -> NDArray[np.uint64]:
    """A hash of each (environment, position, lineage): uint64 ``[N]``."""
    keys = env_ids * 1_000_003 + positions * 7_919 + lineages * 104_729 + 1
    mixed = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


def _noise(keys: NDArray[np.uint64], width: int) -> NDArray[np.uint8]:
    """Bytes that follow from keys: uint8 ``[N, width]``."""
    steps = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(0x94D049BB133111EB)
    return ((keys[:, None] + steps) >> np.uint64(37)).astype(np.uint8)


def content(geometry: Geometry, env_ids: Array, positions: Array, lineages: Array) -> Columns:
    """What is written at positions.

    Args:
        geometry: Of the buffer.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``.
        lineages: int64 ``[N]``.

    Returns:
        Per path ``[N, *shape]``.
    """
    keys = _keys(env_ids, positions, lineages)
    columns: Columns = {
        "observation": _noise(keys, OBSERVATION),
        "origin": np.stack([env_ids, positions, lineages], 1),
        "reward": (keys >> np.uint64(41)).astype(np.float32),
        "terminated": keys % np.uint64(9) == 0,
        "truncated": keys % np.uint64(13) == 0,
        MUTABLE: (keys >> np.uint64(43)).astype(np.uint8),
    }
    if geometry.large:
        columns["pixels"] = _noise(keys, PIXELS)
    if geometry.heap_bytes is not None:
        # A third of the values is empty, and a few are as long as they may be.
        drawn = (keys >> np.uint64(33)) % np.uint64(3 * MAX_TOKENS // 2)
        lengths = np.maximum(drawn.astype(np.int64) - MAX_TOKENS // 2, 0)
        columns["tokens"] = _ragged(keys, lengths, "uint16")
        drawn = (keys >> np.uint64(35)) % np.uint64(2 * MAX_NOTE)
        lengths = np.maximum(drawn.astype(np.int64) - MAX_NOTE, 0)
        columns["note"] = _ragged(keys, lengths, "uint8")
        columns["note"].values[:] = columns["note"].values % 95 + 32
    return columns


def _ragged(keys: NDArray[np.uint64], lengths: Array, dtype: str) -> Ragged:
    """Values of some lengths that follow from keys."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    items = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    steps = (items + 1).astype(np.uint64) * np.uint64(0x94D049BB133111EB)
    values = (np.repeat(keys, lengths) + steps) >> np.uint64(31)
    return Ragged(values.astype(dtype), offsets)


def without_finals(values: Ragged, final: NDArray[np.bool_]) -> Ragged:
    """The same with no items in final rows."""
    lengths = np.where(final, 0, np.diff(values.offsets))
    kept = np.repeat(~final, np.diff(values.offsets))
    return Ragged(values.values[kept], np.concatenate([[0], np.cumsum(lengths)]))


def differing(got: Any, expected: Any) -> NDArray[np.bool_]:
    """Which rows of two columns differ, bool ``[N]``."""
    if not isinstance(expected, Ragged):
        wrong: NDArray[np.bool_] = (got != expected).reshape(len(got), -1).any(axis=1)
        return wrong
    return np.array(
        [not np.array_equal(one, other) for one, other in zip(got, expected, strict=True)], bool
    )


def faults(buffer: ReplayBuffer, geometry: Geometry, starts: list[tuple[int, Array]]) -> list[str]:
    """What is wrong with the rows that are alive.

    Args:
        buffer: An open buffer.
        geometry: Its geometry.
        starts: ``(lineage, heads)`` of each session, in order: a position belongs
            to the last session that began at or below it.

    Returns:
        One line for each kind of fault, naming the first row that has it.
    """
    span = buffer.span
    lengths = span.lengths
    if not lengths.any():
        return []
    env_ids = np.repeat(np.arange(geometry.num_envs), lengths)
    within = np.arange(len(env_ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions = span.first[env_ids] + within
    lineages = _lineages(starts, env_ids, positions)
    columns: Columns = {
        path: buffer.get_field(path, env_ids, positions) for path in geometry.schema.paths
    }
    flags = flags_of(buffer, env_ids, positions)
    return _wrong(geometry, (env_ids, positions, lineages), columns, flags)


def group_faults(
    group: GroupRows, geometry: Geometry, starts: list[tuple[int, Array]], heads: Array
) -> list[str]:
    """What is wrong with the rows that a group tells of; see `faults`.

    A group may tell of rows that a power cut has cut from its buffer, in a close that
    did not end: they are those of one of the sessions that could write them.

    Args:
        group: Read before anything wrote to the buffer again.
        geometry: Of the buffer.
        starts: ``(lineage, heads)`` of each session before.
        heads: int64 ``[E]``, of the buffer.
    """
    env_ids, positions = group.env_ids, group.positions
    if not len(positions):
        return []
    lineages = _lineages(starts, env_ids, positions)
    said = group.columns["origin"][:, 2]
    able = np.zeros(len(positions), bool)
    for lineage, began in starts:
        able |= (said == lineage) & (began[env_ids] <= positions)
    cut = (positions >= heads[env_ids]) & able
    lineages[cut] = said[cut]
    rows = (env_ids, positions, lineages)
    return [f"group's {line}" for line in _wrong(geometry, rows, group.columns, group.flags)]


def _lineages(starts: list[tuple[int, Array]], env_ids: Array, positions: Array) -> Array:
    """Who wrote positions, by what was seen of each session's beginning."""
    lineages = np.zeros_like(positions)
    for lineage, heads in starts:
        lineages[heads[env_ids] <= positions] = lineage
    return lineages


def _wrong(
    geometry: Geometry, rows: tuple[Array, Array, Array], columns: Columns, flags: NDArray[np.uint8]
) -> list[str]:
    """How columns and flags differ from what was written.

    Args:
        geometry: Of the buffer.
        rows: Environments, positions and lineages, int64 ``[N]`` each.
        columns: Per path ``[N, *shape]``.
        flags: uint8 ``[N]``.
    """
    env_ids, positions, lineages = rows
    final = (flags & FINAL) != 0
    # A final row repeats the step before it in all but the observation.
    source = content(geometry, env_ids, positions - final, lineages)
    own = content(geometry, env_ids, positions, lineages)
    expected = {**source, "observation": own["observation"]}
    for path in ("terminated", "truncated"):
        expected[path] = source[path] & ~final
    for path in geometry.schema.varying:
        expected[path] = without_finals(source[path], final)
    found = []
    for path, got in columns.items():
        wrong = differing(got, expected[path])
        if path == MUTABLE:
            wrong = ~np.isin(got - expected[path], np.arange(VERSIONS))
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            found.append(
                f"wrong row: {path} of env {env_ids[at]} position {positions[at]} "
                f"lineage {lineages[at]} (of {wrong.sum()}), says "
                f"{columns['origin'][at].tolist()}"
            )
    ends = np.where(expected["terminated"], TERMINATED, 0)
    ends |= np.where(expected["truncated"], TRUNCATED, 0)
    if ((flags & (TERMINATED | TRUNCATED)) != ends).any():
        found.append("wrong flags")
    return found


def flags_of(buffer: ReplayBuffer, env_ids: Array, positions: Array) -> NDArray[np.uint8]:
    """Flags of rows: uint8 ``[N]``."""
    return buffer._reader.flags(env_ids, positions)


def mixtures(fields: Columns, env_ids: Array, positions: Array, geometry: Geometry) -> list[str]:
    """Which steps drawn mix two writes, or are not those that were asked for.

    Args:
        fields: Per path ``[B, *shape]``, with derived next observations.
        env_ids: int64 ``[B]``.
        positions: int64 ``[B]``.
        geometry: Of the buffer.
    """
    origins = fields["origin"].astype(np.int64)
    expected = content(geometry, env_ids, positions, origins[:, 2])
    after = content(geometry, env_ids, positions + 1, origins[:, 2])
    # An end without a final row is drawn with its own observation as next.
    nexts = fields["next_observation"]
    own = (nexts == expected["observation"]).all(axis=1) & expected["terminated"]
    found = []
    for path, column in expected.items():
        wrong = differing(fields[path], column)
        if path == MUTABLE:
            wrong = ~np.isin(fields[path] - column, np.arange(VERSIONS))
        if path == "truncated":
            # A resume may report the step before it as truncated.
            wrong &= ~fields[path].astype(bool)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            found.append(
                f"mixed row: {path} of env {env_ids[at]} position {positions[at]}, "
                f"says {origins[at].tolist()}"
            )
    wrong = (nexts != after["observation"]).any(axis=1) & ~own
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        found.append(f"mixed next: env {env_ids[at]} position {positions[at]}")
    return found
