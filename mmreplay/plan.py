"""What a buffer would take, on disk and in RAM, before a byte of it is allocated."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from mmreplay.buffer import arguments
from mmreplay.format import commit
from mmreplay.ring import Layout, Ring
from mmreplay.schema import Field, Schema
from mmreplay.storage.memmap import file_sizes
from mmreplay.storage.placement import FLAGS, RECORDS, SUMS, Placement, place


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
        row_nbytes: Bytes per row, flags and padding included.
        pages_nbytes: RAM in which every row alive stays cached, so that no draw
            waits for the disk. With less, draws go at the disk's speed; the kernel
            takes these pages back whenever something else needs them.
        flags_working_nbytes: RAM that every open process reads and keeps warm: the
            flags.
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

    def batch_nbytes(self, batch_size: int) -> int:
        """RAM of one batch, next observations counted as whole rows.

        Args:
            batch_size: Steps.
        """
        return 2 * batch_size * self.row_nbytes


def plan_buffer(
    schema: Schema, capacity: int, num_envs: int = 1, layout: Layout | None = None
) -> Plan:
    """Reckon what `ReplayBuffer.create` with the same arguments would take.

    Args:
        schema: The fields of one step.
        capacity: Rows kept per environment, at least 1.
        num_envs: Environments, at least 1.
        layout: ``"env_major"`` or ``"time_major"``; None chooses by num_envs.

    Raises:
        SchemaError: A number is not legal.
    """
    # The very reckoning of `create`, so that the two cannot come apart.
    ring = arguments.describe(
        schema, capacity, num_envs, "memmap", layout, "disabled", None
    ).ring
    placement = place(schema)
    sizes = file_sizes(ring, schema, placement)
    rows = ring.num_rows
    fields = tuple(
        _part(path, field, placement, rows) for path, field in schema.fields.items()
    )
    packed = sum(part.nbytes for part in fields if part.file == RECORDS)
    commit_nbytes = commit.NUM_SLOTS * commit.slot_nbytes(num_envs)
    data = sum(sizes.values()) - sizes[SUMS]
    alive = capacity * num_envs
    return Plan(
        ring=ring,
        fields=fields,
        padding_nbytes=sizes.get(RECORDS, 0) - packed,
        flags_nbytes=sizes[FLAGS],
        sums_nbytes=sizes[SUMS],
        commit_nbytes=commit_nbytes,
        nbytes=data + sizes[SUMS] + commit_nbytes,
        slack_nbytes=data // rows * (rows - alive),
        row_nbytes=data // rows,
        pages_nbytes=data // rows * alive,
        flags_working_nbytes=rows,
    )


def _part(path: str, field: Field, placement: Placement, rows: int) -> FieldPlan:
    kind = f"{field.dtype}{list(field.shape) if field.shape else ''}"
    if path in placement.served:
        return FieldPlan(path, kind, FLAGS, 0, 0)
    file = placement.large.get(path, RECORDS)
    return FieldPlan(path, kind, file, field.nbytes, rows * field.nbytes)


def free_nbytes(path: str | os.PathLike[str]) -> int:
    """Bytes free to this user on the disk that holds, or would hold, path."""
    place_ = Path(os.path.abspath(path))
    while not place_.exists():
        place_ = place_.parent
    return shutil.disk_usage(place_).free
