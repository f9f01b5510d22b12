"""What a buffer would take, on disk and in RAM, before a byte of it is allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from mmreplay.arguments import integer, number
from mmreplay.buffer import opening
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.episodes.column_index import BYTES_A_ROW
from mmreplay.errors import SchemaError
from mmreplay.format import commit
from mmreplay.format.metadata import planned_heap_nbytes, planned_lengths
from mmreplay.format.sharding import Codec
from mmreplay.ragged import Ragged
from mmreplay.ring import Layout, Ring
from mmreplay.schema import Field, Schema
from mmreplay.schema.images import ImageEncoding
from mmreplay.storage.layout import FLAGS, RECORDS, SUMS, RecordLayout, record_layout
from mmreplay.storage.zarr import group, values
from mmreplay.storage.zarr.group import ShardedArray

SAMPLE_NBYTES = 4 << 20
MAX_SAMPLED = 64
INDEX_NBYTES = 16


@dataclass(frozen=True, slots=True)
class FieldPlan:
    """One field's part.

    Attributes:
        path: The field.
        kind: Dtype and shape, such as ``"uint8[84, 84]"``.
        file: Where it lies.
        row_nbytes: Bytes per row; 0 for what flags.bin holds.
        nbytes: Bytes of all rows on disk, the ring's slack included.
    """

    path: str
    kind: str
    file: str
    row_nbytes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a buffer would take.

    Attributes:
        ring: Capacity, environments, layout, reserve, block and slots.
        fields: Part by part, in schema order.
        padding_nbytes: What aligned records add to their fields.
        flags_nbytes: flags.bin, one byte a row.
        sums_nbytes: sums.bin, 8 bytes a block.
        commit_nbytes: COMMIT, four slots.
        nbytes: All files of a full ring.
        slack_nbytes: Part of nbytes that is rows beyond the capacity: the reserve,
            one block, and the rounding to whole blocks.
        row_nbytes: Bytes per row, flags and padding included; of values that vary
            their references.
        pages_nbytes: RAM in which every row alive stays cached, so that no draw
            waits for the disk. With less, draws go at the disk's speed; the kernel
            takes these pages back whenever something else needs them.
        flags_working_nbytes: RAM that every open process reads and keeps warm: the
            flags.
        heap_bytes: What to pass to `ReplayBuffer.create` where a field varies; else 0.
        heap_nbytes: heap.bin, the heaps of all environments.
        values_nbytes: Of the values of an average row that vary: by lengths, or a row's
            share of the heap.
        arrays_nbytes: Of the images of a row as arrays, which batches hold.

    Example:
        >>> schema = mr.Schema({"observation": mr.Field((84, 84), "uint8")})
        >>> plan = mr.plan_buffer(schema, capacity=1_000_000)
        >>> plan.row_nbytes  # pixels, and a byte of flags
        7057
    """

    ring: Ring
    fields: tuple[FieldPlan, ...]
    padding_nbytes: int
    flags_nbytes: int
    sums_nbytes: int
    commit_nbytes: int
    nbytes: int
    slack_nbytes: int
    row_nbytes: int
    pages_nbytes: int
    flags_working_nbytes: int
    heap_bytes: int = 0
    heap_nbytes: int = 0
    values_nbytes: int = 0
    arrays_nbytes: int = 0

    @property
    def index_nbytes(self) -> int:
        """RAM of an index by a column, as `ReplayBuffer.find` makes it, at most."""
        return BYTES_A_ROW * self.ring.capacity * self.ring.num_envs

    def batch_nbytes(self, batch_size: int) -> int:
        """RAM of one batch, next observations counted as whole rows.

        Values that vary are counted as in an average row, images as files and arrays.

        Args:
            batch_size: Steps.
        """
        return 2 * batch_size * (self.row_nbytes + self.values_nbytes + self.arrays_nbytes)


def plan_buffer(
    schema: Schema,
    capacity: int,
    num_envs: int = 1,
    layout: Layout | None = None,
    *,
    heap_bytes: int | str | None = None,
    lengths: float | Mapping[str, float] | None = None,
) -> Plan:
    """Reckon what `ReplayBuffer.create` with the same arguments would take.

    Args:
        schema: The fields of one step.
        capacity: Rows kept per environment, at least 1.
        num_envs: Environments, at least 1.
        layout: ``"env_major"`` or ``"time_major"``; None chooses by num_envs.
        heap_bytes: Of `ReplayBuffer.create`, where a field varies; None computes it of
            lengths.
        lengths: Items of the average value of each field that varies, bytes of text
            and bytes: a number for all, or by path.

    Raises:
        SchemaError: A number is not legal, or a field varies and neither heap_bytes nor
            its length is given.

    Example:
        >>> schema = mr.Schema({"observation": mr.Field((84, 84), "uint8")})
        >>> plan = mr.plan_buffer(schema, capacity=1_000_000)
        >>> plan.nbytes > 7_000_000_000
        True
        >>> schema = mr.Schema({"mission": mr.Field.text(max_bytes=4096)})
        >>> mr.plan_buffer(schema, capacity=100_000, lengths=30).heap_bytes
        3420160
    """
    # The very reckoning of `create`, so that the two cannot come apart.
    # Sizes do not depend on what the environments do after an end.
    stated = schema.autoreset if isinstance(schema, Schema) else None
    average = None
    if isinstance(schema, Schema) and schema.varying and heap_bytes is None:
        integer("capacity", capacity, 1, "Give the rows per environment.")
        typical = _lengths(schema, lengths)
        heap_bytes = planned_heap_nbytes(schema, capacity, typical)
        average = sum(
            round(length * schema.fields[path].inner_nbytes) for path, length in typical.items()
        )
    described = opening.describe(
        schema,
        capacity,
        num_envs,
        "memmap",
        layout,
        stated or "disabled",
        None,
        heap_bytes=heap_bytes,
    )
    ring, heap = described.ring, described.heap_nbytes
    placement = record_layout(schema)
    sizes = placement.file_sizes(ring, schema)
    rows = ring.num_rows
    fields = tuple(
        _field_plan(path, field, placement, rows) for path, field in schema.fields.items()
    )
    packed = sum(part.nbytes for part in fields if part.file == RECORDS)
    commit_nbytes = commit.NUM_SLOTS * commit.record_nbytes(num_envs, heap)
    data = sum(sizes.values()) - sizes[SUMS]
    alive = capacity * num_envs
    return Plan(
        ring=ring,
        fields=fields,
        padding_nbytes=sizes.get(RECORDS, 0) - packed,
        flags_nbytes=sizes[FLAGS],
        sums_nbytes=sizes[SUMS],
        commit_nbytes=commit_nbytes,
        nbytes=data + sizes[SUMS] + commit_nbytes + heap * num_envs,
        slack_nbytes=data // rows * (rows - alive),
        row_nbytes=data // rows,
        pages_nbytes=data // rows * alive + heap * num_envs,
        flags_working_nbytes=rows,
        heap_bytes=heap,
        heap_nbytes=heap * num_envs,
        values_nbytes=heap // capacity if average is None else average,
        arrays_nbytes=sum(f.encoding.nbytes for f in schema.fields.values() if f.encoding),
    )


def _lengths(schema: Schema, lengths: float | Mapping[str, float] | None) -> dict[str, float]:
    """The average length of each field that varies."""
    given = lengths if isinstance(lengths, Mapping) else {}
    for path in given:
        if path not in schema.varying:
            raise SchemaError(
                f"lengths must be of fields that vary, got {path!r}. The schema has "
                f"{list(schema.varying)}."
            )
    found, planned = dict[str, float](), planned_lengths(schema)
    for path in schema.varying:
        length = given.get(path) if isinstance(lengths, Mapping) else lengths
        length = planned.get(path) if length is None else length
        if length is None:
            raise SchemaError(
                f"lengths must say how long an average value of field {path!r} is, got "
                "none. Pass lengths, or heap_bytes."
            )
        maximum = schema[path].max_length
        assert maximum is not None
        way_out = "Give the items of an average value."
        found[path] = number(f"length of field {path!r}", length, 0, way_out, maximum=maximum)
    return found


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a buffer's rows would take in compressed shards.

    Attributes:
        codec: Of the shards.
        level: The codec's.
        nbytes: Of the rows of a full buffer, mutable fields as they are.
        ratios: Bytes of rows over bytes in shards, by field; 1 where it is mutable.
        sampled_nbytes: Bytes of rows that were packed to know.
        images: By field of images, bytes of packed arrays over those of the files.
    """

    codec: Codec
    level: int
    nbytes: int
    ratios: dict[str, float]
    sampled_nbytes: int
    images: dict[str, float] = field(default_factory=dict)


def estimate(
    path: str | os.PathLike[str],
    capacity: int,
    num_envs: int,
    codec: Codec,
    level: int | None = None,
) -> Estimate | None:
    """Pack a sample of a buffer's rows as the Zarr engine would; writes nothing.

    Chunks from all over the ring, 4 MiB or 64 of them a field.

    Args:
        path: A buffer of either engine, or a Zarr group.
        capacity: Rows per environment of the one that is planned.
        num_envs: Its environments.
        codec: Its codec.
        level: The codec's; None for its own.

    Returns:
        None where the buffer holds no rows.

    Raises:
        SchemaError: The codec is unknown, or has no such level.
    """
    with ReplayBuffer.open(path) as buffer:
        if not buffer.span.lengths.any():
            return None
        # As `compact` keeps it; chunks of other environments pack otherwise.
        layout = buffer.layout if num_envs == buffer.num_envs else None
        heap_bytes = None
        if buffer.schema.varying:
            layout, heap_bytes = None, buffer.metadata.heap_nbytes
        metadata = opening.describe(
            buffer.schema,
            capacity,
            num_envs,
            "zarr",
            layout,
            buffer.autoreset,
            None,
            codec,
            level,
            heap_bytes=heap_bytes,
        )
        assert metadata.sharding is not None
        rows, sampled, nbytes = capacity * num_envs, 0, 0.0
        ratios = {}
        arrays = group.arrays_of(metadata)
        for name, array in arrays.items():
            raw, packed, steps = _packed(buffer, array, name)
            sampled += raw
            ratios[name] = raw / packed
            nbytes += rows * packed / steps
        for name, each in buffer.schema.fields.items():
            if name not in arrays:
                ratios[name] = 1.0
                nbytes += rows * each.nbytes
        images = {
            name: _as_arrays(buffer, name, arrays[name])
            for name, each in buffer.schema.fields.items()
            if each.encoding is not None
        }
    del ratios[group.FLAGS_NAME]
    for name in buffer.schema.varying:
        del ratios[group.references_of(name)]
    sharding = metadata.sharding
    return Estimate(sharding.codec, sharding.level, int(nbytes), ratios, sampled, images)


def coding_ms(encoding: ImageEncoding) -> tuple[float, float]:
    """Milliseconds that it takes here to encode an image of noise, and to decode it.

    Raises:
        FailedError: The library is not installed.
    """
    noise = np.random.default_rng(0).integers(0, 256, encoding.shape, np.uint8)
    out, file = np.empty_like(noise), encoding.encode(noise)
    times = []
    for _ in range(3):
        begin = perf_counter()
        file = encoding.encode(noise)
        encoded = perf_counter()
        encoding.decode(file, out)
        times.append((encoded - begin, perf_counter() - encoded))
    encode_s, decode_s = np.min(times, axis=0).tolist()
    return 1e3 * encode_s, 1e3 * decode_s


def _as_arrays(buffer: ReplayBuffer, name: str, array: ShardedArray) -> float:
    """Bytes of some images as packed arrays over those of their files."""
    span, (env_id, *_) = buffer.span, np.flatnonzero(buffer.span.lengths).tolist()
    first, count = int(span.first[env_id]), int(span.lengths[env_id])
    steps = max(1, min(MAX_SAMPLED, SAMPLE_NBYTES // buffer.schema[name].drawn.nbytes))
    positions = first + np.unique(np.arange(steps) * count // steps)
    images = buffer.get_field(name, env_id, positions)
    files = buffer.view.get_lengths((name,), env_id, positions)[name].sum()
    # One by one, as far as they lie apart; chunks of neighbours pack better.
    packed = sum(memoryview(array.codec.pack(image.reshape(-1))).nbytes for image in images)
    return float(packed / max(1, files))


def _packed(buffer: ReplayBuffer, array: ShardedArray, name: str) -> tuple[int, int, int]:
    """Bytes of a sample of chunks as they are, and packed with their indices, and rows.

    Args:
        buffer: What it is of.
        array: Whose chunks.
        name: Of the array among `group.arrays_of`.
    """
    span = buffer.span
    held = np.flatnonzero(span.lengths)
    chunk_nbytes = max(1, array.chunk_rows * array.row_nbytes)
    count = max(1, min(MAX_SAMPLED, SAMPLE_NBYTES // chunk_nbytes))
    raw = packed = sampled = 0
    for sample in range(count):
        ids = np.roll(held, -sample)[: array.chunk[0]]
        steps = min(array.chunk[1], int(span.lengths[ids].min()))
        room = span.lengths[ids] - steps
        firsts = span.first[ids] + room * (2 * sample + 1) // (2 * count)
        positions = firsts[:, None] + np.arange(steps)
        if array.path == group.FLAGS_NAME:
            rows: Any = buffer.flags(ids[:, None], positions)
        elif name != array.path:
            # References, which are numbers of heap positions, lengths and checksums.
            given = np.repeat(ids, steps), positions.ravel()
            rows = buffer.view.references((array.path,), *given)[array.path]
        elif array.values is not None:
            # As they are stored: images are files there.
            given = np.repeat(ids, steps), positions.ravel()
            rows = buffer.view.read_values((array.path,), *given)[array.path]
        else:
            rows = buffer.get_field(array.path, ids[:, None], positions)
        if isinstance(rows, Ragged):
            items = np.ascontiguousarray(rows.values).reshape(-1).view(np.uint8)
            nbytes = np.diff(rows.offsets) * (len(items) // max(1, len(rows.values)))
            data = values.encode(items, np.cumsum(nbytes) - nbytes, nbytes)
        else:
            data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        raw += data.nbytes
        packed += memoryview(array.codec.pack(data)).nbytes + INDEX_NBYTES
        sampled += positions.size
    return raw, packed, sampled


def _field_plan(path: str, field: Field, placement: RecordLayout, rows: int) -> FieldPlan:
    kind = f"{field.dtype}{list(field.shape) if field.shape else ''}"
    if field.varies:
        kind = field.description
    if path in placement.served:
        return FieldPlan(path, kind, FLAGS, 0, 0)
    file = placement.file_of(path)
    return FieldPlan(path, kind, file, field.nbytes, rows * field.nbytes)
