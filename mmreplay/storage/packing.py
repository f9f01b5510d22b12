"""Steps and blocks of small fields, packed into the records that files hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from mmreplay import kernels
from mmreplay.episodes import TERMINATED, TRUNCATED
from mmreplay.schema import Field, Schema
from mmreplay.storage.inlet import LEAST_NBYTES
from mmreplay.storage.placement import Placement

if TYPE_CHECKING:
    from mmreplay.kernels.rows import Member, PackerKernel, RowsKernel

rows: RowsKernel = cast("RowsKernel", kernels.load("rows"))

MARKS = {"terminated": TERMINATED, "truncated": TRUNCATED}


def packer(schema: Schema, placement: Placement, num_envs: int) -> PackerKernel:
    """Make what packs records, and takes steps that need no conversion."""
    members = tuple(
        _member(path, field, placement) for path, field in schema.fields.items()
    )
    # Longer steps go by long stretches' way, which packs them where they belong.
    given = (placement.stride, num_envs, LEAST_NBYTES - 1)
    return rows.Packer(members, *given, np.ndarray, np.float64)


def _member(path: str, field: Field, placement: Placement) -> Member:
    offset = -1
    # An empty field has no bytes to pack: it is checked as one that lies elsewhere.
    if field.nbytes and placement.record is not None and placement.record.fields:
        found = placement.record.fields.get(path)
        offset = -1 if found is None else found[1]
    kind, scalar = _scalars(field)
    mark = MARKS.get(placement.served.get(path, ""), 0)
    itemsize = field.numpy.itemsize
    return path, field.numpy, scalar, kind, itemsize, field.shape, offset, mark


def _scalars(field: Field) -> tuple[str, type | None]:
    """Kind of Python scalars to cast, and the scalar type to take by its bytes.

    Only what `Field.convert` would cast alike without a question: it is asked for
    everything else.
    """
    if field.shape or field.mutable or field.dtype == "bfloat16":
        return "", None
    kind: str = field.numpy.kind
    if kind == "f" and (field.exact or field.numpy.itemsize < 4):
        kind = ""
    return kind, field.numpy.type
