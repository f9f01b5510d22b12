"""Record layout: which file holds a field, and how rows are packed into records.

Fields below 4 KiB per step share records.bin, so that a batch of six small fields is
one gather and one page of disk instead of six. Larger fields, and mutable ones whatever
their size, have a file of their own. Of a field that varies the record holds the
reference, whatever the size of its values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from mmreplay import kernels
from mmreplay.episodes import TERMINATED, TRUNCATED
from mmreplay.kernels.rows import keys_of
from mmreplay.ring import Ring
from mmreplay.schema import Field, Schema
from mmreplay.schema.field import REFERENCE

if TYPE_CHECKING:
    from mmreplay.kernels.rows import Member, PackerKernel, RowsKernel

rows: RowsKernel = cast("RowsKernel", kernels.load("rows"))

RECORDS = "records.bin"
FLAGS = "flags.bin"
SUMS = "sums.bin"
HEAP = "heap.bin"
LARGE_NBYTES = 4096
ALIGNMENT = 8
SUM_DTYPE = np.dtype([("crc", "<u4"), ("lap", "<u4")])
SERVED_ROLES = ("terminated", "truncated")
"""Read from flags.bin, not stored twice."""
END_BITS = {"terminated": TERMINATED, "truncated": TRUNCATED}
PACKED_NBYTES = 16 << 10
"""Steps of several environments of so many bytes are packed when they are written."""


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where every field of a schema lives.

    Attributes:
        record: The record's dtype, its field names being paths; None where all
            fields are large.
        large: Path to file name, in schema order.
        served: See `served_ends`.
    """

    record: np.dtype[np.void] | None
    large: dict[str, str]
    served: dict[str, str]

    @property
    def stride(self) -> int:
        """Bytes of one record; 0 without records."""
        return 0 if self.record is None else self.record.itemsize

    def file_of(self, path: str) -> str:
        """Name of the file with a field that no flag serves."""
        return self.large.get(path, RECORDS)

    def file_sizes(self, ring: Ring, schema: Schema, heap_nbytes: int = 0) -> dict[str, int]:
        """Bytes of every file of a generation, by name.

        Args:
            ring: Of the rows.
            schema: The fields.
            heap_nbytes: Bytes of each environment's heap; 0 where no field varies.
        """
        sizes = {FLAGS: ring.num_rows}
        if self.record is not None:
            sizes[RECORDS] = ring.num_rows * self.stride
        for path, name in self.large.items():
            sizes[name] = ring.num_rows * schema.fields[path].nbytes
        if heap_nbytes:
            sizes[HEAP] = ring.num_envs * heap_nbytes
        sizes[SUMS] = ring.num_envs * ring.num_blocks * SUM_DTYPE.itemsize
        return sizes


def served_ends(schema: Schema) -> dict[str, str]:
    """Path to role of the ends that the flags of rows hold.

    Ends per agent are stored as any other field; the flags hold those of the step.
    """
    if schema.num_agents is not None:
        return {}
    paths = {schema.role(role): role for role in SERVED_ROLES}
    return {path: role for path, role in paths.items() if path is not None}


def record_layout(schema: Schema) -> RecordLayout:
    """Decide the file and offset of every field.

    Record members are sorted by item size, largest first, and by schema order
    within: each is then aligned without padding, and the stride, a multiple of 8,
    lets torch take strided views.
    """
    served = served_ends(schema)
    small: list[str] = []
    large: dict[str, str] = {}
    for path, field in schema.fields.items():
        if path in served:
            continue
        if field.mutable or field.nbytes >= LARGE_NBYTES:
            large[path] = f"f{len(large):03d}.bin"
        else:
            small.append(path)
    small.sort(key=lambda path: -stored(schema.fields[path])[0].itemsize)
    return RecordLayout(_record(schema, small) if small else None, large, served)


def stored(field: Field) -> tuple[np.dtype[np.generic], tuple[int, ...]]:
    """Dtype and shape of what a row holds of a field."""
    return (REFERENCE, ()) if field.varies else (field.numpy, field.shape)


def _record(schema: Schema, paths: list[str]) -> np.dtype[np.void]:
    offsets, end = [], 0
    for path in paths:
        offsets.append(end)
        end += schema.fields[path].nbytes
    return np.dtype(
        {
            "names": paths,
            "formats": [stored(schema.fields[path]) for path in paths],
            "offsets": offsets,
            # At least one byte, where all of its members are empty.
            "itemsize": -(-max(end, 1) // ALIGNMENT) * ALIGNMENT,
        }
    )


def packer(schema: Schema, layout: RecordLayout, num_envs: int) -> PackerKernel:
    """Make the kernel that checks and packs the steps and blocks of a schema."""
    fields = schema.fields
    members = tuple(_member(path, field, layout) for path, field in fields.items())
    # Longer steps go by the way of blocks, which packs them straight into their rows.
    sizes = (layout.stride, num_envs, PACKED_NBYTES - 1)
    return rows.RecordPacker(members, keys_of(tuple(fields)), *sizes, np.ndarray, np.float64)


def _member(path: str, field: Field, layout: RecordLayout) -> Member:
    offset = -1
    # An empty field has no bytes to pack: it is checked as one that lies elsewhere.
    if field.nbytes and layout.record is not None and layout.record.fields:
        packed = layout.record.fields.get(path)
        offset = -1 if packed is None else packed[1]
    kind, scalar = _scalars(field)
    mark = END_BITS.get(layout.served.get(path, ""), 0)
    # Values that vary are never packed as they come; their references are.
    dtype, shape = stored(field)
    return path, dtype, scalar, kind, dtype.itemsize, shape, offset, mark


def _scalars(field: Field) -> tuple[str, type | None]:
    """Kind of Python scalars to cast, and the scalar type to pack by its bytes.

    Only what `Field.convert` would cast alike without a question: it is asked for
    everything else.
    """
    if field.shape or field.mutable or field.dtype == "bfloat16":
        return "", None
    kind: str = field.numpy.kind
    if kind == "f" and (field.exact or field.numpy.itemsize < 4):
        kind = ""
    return kind, field.numpy.type
