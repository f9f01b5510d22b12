"""Rows of bytes, packed, marked and published: the numpy twin of ``_rows.c``.

A *record* is one row of small fields; a *slot* one publication of heads, limits and
tails with its checksum (slot.py); a *lane* stores and publishes by one call (lane.py).
Functions take contiguous arrays; C writes into their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay.kernels import crc, exchange
from mmreplay.kernels.lane import Lane as Lane
from mmreplay.kernels.lane import LaneKernel
from mmreplay.kernels.slot import Slot as Slot
from mmreplay.kernels.slot import SlotKernel

START, TERMINATED, TRUNCATED, FINAL = 1, 2, 4, 8
END = TERMINATED | TRUNCATED

Array = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Member = tuple[str, Any, Any, str, int, tuple[int, ...], int, int]
"""How one field is taken: its name; the dtype of arrays; the scalar type that is taken
by its bytes, or None; the kind of Python scalars that are cast, ``"f"``, ``"i"``,
``"u"``, ``"b"``, or ``""`` for none; bytes of an item; shape; offset in the record, or
-1 for a field that is not in it; and the bit that its truth sets, or 0."""


class PackerKernel(Protocol):
    """Packs records, and takes steps that need no conversion.

    Attributes:
        record: The last step taken, packed; its bytes change with every step.
        rows: Likewise of all environments, one record after the other; empty where
            those are too long to be packed before they are written.
    """

    record: bytearray
    rows: bytearray

    def step(self, given: Mapping[str, object], /) -> int:
        """Take one step of the only environment, if every value is plain.

        Plain is a dict of exactly the fields: arrays of the dtype, C-contiguous, of
        the field's shape or with one axis of 1 before it; the field's own numpy
        scalars; finite floats and ints within the field's range; bools. Or a DLPack
        capsule (``"dltensor"``) of what such an array holds, on the CPU, for a field of
        the record or an end; of an end also with one axis of 1 behind it. A capsule
        may be used up by it.

        Returns:
            The bits of the fields that are true, or -1: the step is not plain, and
            the record means nothing.
        """

    def block(self, given: Mapping[str, object], /) -> int:
        """Count the steps of a block, if every value is plain.

        Plain is a dict of exactly the fields: arrays of the dtype, C-contiguous, of
        ``[T, E, *shape]``, or of ``[T, *shape]`` where there is one environment.

        Returns:
            T, at least 1, or -1: the block is not plain.
        """

    def wide(self, given: Mapping[str, object], /) -> int:
        """Take one step of all environments, if every value is plain.

        Plain is as in `block`, of ``[E, *shape]`` and of any strides. DLPack capsules
        are as in `step`, where `rows` is not empty and no end of theirs is true.

        Returns:
            As `step` does, the bits of the fields that may be true somewhere.
        """

    def pack(
        self, out: Bytes, given: Mapping[str, Any], first: int, stop: int, /
    ) -> None:
        """Pack rows ``[first, stop)``; bytes of a record without a field stay.

        Args:
            out: Room for ``stop - first`` records, or more.
            given: Arrays of whole rows, for each field of the record.
            first: First row to pack.
            stop: The row after the last one.

        Raises:
            ValueError: A field has too few rows, or out is too small.
        """

    def stream(
        self, out: memoryview, given: Mapping[str, Any], first: int, stop: int, /
    ) -> None:
        """Pack rows that nobody reads soon, past the caches; see `pack`.

        Bytes of a record without a field become zeros. All is stored when it returns,
        in the order in which others look.
        """


class RowsKernel(Protocol):
    """What both twins offer."""

    def Packer(
        self, members: tuple[Member, ...], nbytes: int, num_envs: int, most: int,
        array: type, double: type, /,
    ) -> PackerKernel:  # fmt: skip
        """Make a packer of records of so many bytes; see `Packer`."""

    def Slot(
        self, template: bytes, sequence: int, columns: int, num_envs: int, /
    ) -> SlotKernel:
        """Make a slot from a record's bytes; see `Slot`."""

    def Lane(self, packer: PackerKernel, slot: SlotKernel, /) -> LaneKernel:
        """Make what stores steps and publishes them; see `Lane`."""

    def mark(
        self, out: Bytes, before: Bytes, terminated: NDArray[np.bool_] | None,
        truncated: NDArray[np.bool_] | None, final_follows: bool, /,
    ) -> None:  # fmt: skip
        """Give a block its flags; see `mark`."""

    def crc32c(self, data: crc.Buffer, before: int = 0, /) -> int:
        """Sum bytes; see `crc32c`."""


crc32c = crc.crc32c


def mark(
    out: Bytes, before: Bytes, terminated: NDArray[np.bool_] | None,
    truncated: NDArray[np.bool_] | None, final_follows: bool, /,
) -> None:  # fmt: skip
    """Give T steps of each environment flags, final rows of their own not counted.

    Args:
        out: uint8 ``[T, E]``, written.
        before: uint8 ``[E]``, flags of the row before the block; FINAL for none.
        terminated: bool ``[T, E]``, without an axis that is 1 long; None for never.
        truncated: Likewise.
        final_follows: The row after an end is the final row (``"next_step"``).

    Raises:
        ValueError: The shapes do not fit each other.
    """
    envs = before.size
    if envs < 1 or out.size % envs:
        raise ValueError(
            f"mark: got room for {out.size} rows of {envs} environments, expected "
            "whole steps"
        )
    flags = out.reshape(-1, envs)
    flags[...] = 0
    for ends, bit in ((terminated, TERMINATED), (truncated, TRUNCATED)):
        if ends is None:
            continue
        alone = 1 in flags.shape and ends.shape == (flags.size,)
        if ends.shape != flags.shape and not alone:
            raise ValueError(f"mark: expected bools {list(flags.shape)}")
        flags |= ends.reshape(flags.shape) * np.uint8(bit)
    if len(flags):
        _bound(flags, before, final_follows)


def _bound(flags: Bytes, before: Bytes, final_follows: bool) -> None:
    """Add the starts to ends ``[T, E]``, T at least 1, and make final rows of some."""
    chain = np.concatenate([before[None], flags])
    ended = (chain & END) != 0
    if not final_follows:
        starts = ended[:-1].copy()
        starts[0] |= (before & FINAL) != 0
        flags |= starts * np.uint8(START)
        return
    # A row after an end is final and ends nothing itself, whatever it says: within
    # a run of ends every second one is real.
    index = np.arange(len(chain))[:, None]
    since = index - np.maximum.accumulate(np.where(ended, -1, index), axis=0)
    real = ended & (since % 2 == 1)
    final = np.concatenate([((before & FINAL) != 0)[None], real[:-1]])
    flags[...] = np.where(final[1:], np.uint8(FINAL), flags * ~(ended & ~real)[1:])
    flags |= final[:-1] * np.uint8(START)


class Packer:
    """Packs plain steps; see `PackerKernel`."""

    def __init__(
        self,
        members: tuple[Member, ...],
        nbytes: int,
        num_envs: int,
        most: int,
        array: type,
        double: type,
        /,
    ) -> None:
        """Begin with a record of zeros.

        Args:
            members: How each field is taken.
            nbytes: Bytes of a record.
            num_envs: Environments.
            most: Bytes that `rows` may have.
            array: ``numpy.ndarray``: C knows it by no other way.
            double: ``numpy.float64``.

        Raises:
            ValueError: A member does not fit.
        """
        self.record = bytearray(nbytes)
        together = 0 < num_envs * nbytes <= most
        self.rows = bytearray(num_envs * nbytes if together else 0)
        self._members, self.num_envs = members, num_envs
        self._array, self._double = array, double
        self._views: list[NDArray[Any] | None] = []
        self._wide: list[NDArray[Any] | None] = []
        for path, dtype, _, kind, itemsize, shape, offset, _ in members:
            count = int(np.prod(shape, dtype=np.int64))
            if offset >= 0 and offset > nbytes - count * itemsize:
                raise ValueError(f"Packer: {path!r} ends outside the record")
            if kind and (shape or itemsize > 8):
                raise ValueError(f"Packer: {path!r} takes no scalars")
            view = None
            if offset >= 0:
                view = np.frombuffer(self.record, dtype, count, offset).reshape(shape)
            self._views.append(view)
            if view is not None and together:
                each, laid = (num_envs, *shape), (nbytes, *view.strides)
                view = np.ndarray(each, dtype, self.rows, offset, laid)
            self._wide.append(view if together else None)

    def step(self, given: Mapping[str, object], /) -> int:
        """See `PackerKernel.step`."""
        if self.num_envs > 1 or not self._exact(given):
            return -1
        marks = 0
        for member, view in zip(self._members, self._views, strict=True):
            value: Any = given[member[0]]
            seen = exchange.shown(value, bool(member[-1] and not member[5]))
            if seen is not None:
                value = None if view is None and not member[-1] else seen
            if not self._plain(value, member):
                return -1
            if view is not None:
                shaped = view[None] if np.ndim(value) > view.ndim else view
                shaped[...] = value
            marks |= member[-1] if member[-1] and value else 0
        return marks

    def _exact(self, given: Mapping[str, object]) -> bool:
        if type(given) is not dict or len(given) != len(self._members):
            return False
        return bool(given) and all(member[0] in given for member in self._members)

    def block(self, given: Mapping[str, object], /) -> int:
        """See `PackerKernel.block`."""
        if not self._exact(given):
            return -1
        steps = {self._steps(given[member[0]], member) for member in self._members}
        return max(steps) if len(steps) == 1 and min(steps) else -1

    def wide(self, given: Mapping[str, object], /) -> int:
        """See `PackerKernel.wide`."""
        if not self._exact(given):
            return -1
        marks = hidden = 0
        for member, view in zip(self._members, self._wide, strict=True):
            value = cast("NDArray[Any]", given[member[0]])
            seen = exchange.shown(value, bool(member[-1] and not member[5]))
            if seen is not None:
                value = seen
                hidden |= member[-1]
                known = len(self.rows) and (view is not None or member[-1])
                if not known or not value[:1].flags.c_contiguous:
                    return -1
            if type(value) is not self._array or value.dtype != member[1]:
                return -1
            if value.shape != (self.num_envs, *member[5]):
                return -1
            if view is not None:
                view[...] = value
            # Only of single bytes is the truth looked for.
            if member[-1] and (value[0].nbytes != 1 or value.view(np.uint8).any()):
                marks |= member[-1]
        # Where the ends are is looked up in arrays.
        return -1 if marks and hidden else marks

    def _steps(self, value: Any, member: Member) -> int:
        """Steps of an array, 0 where it must be looked at."""
        if type(value) is not self._array:
            return 0
        array = cast("NDArray[Any]", value)
        shape = member[5]
        lead = array.shape[: array.ndim - len(shape)]
        whole = len(lead) in (1, 2) and array.shape == (*lead, *shape)
        envs = lead[1] if len(lead) == 2 else 1
        if not whole or envs != self.num_envs or not array.flags.c_contiguous:
            return 0
        return lead[0] if array.dtype == member[1] else 0

    def pack(
        self, out: Bytes, given: Mapping[str, Any], first: int, stop: int, /
    ) -> None:
        """See `PackerKernel.pack`."""
        flat, stride = out.reshape(-1), len(self.record)
        if stride < 1 or not 0 <= first <= stop or flat.size // stride < stop - first:
            raise ValueError(
                f"pack: got {flat.size} bytes for rows {first} to {stop} of {stride} "
                "bytes, expected room for each"
            )
        taken = []
        for path, _, _, _, itemsize, shape, offset, _ in self._members:
            nbytes = int(np.prod(shape, dtype=np.int64)) * itemsize
            if offset < 0 or not nbytes:
                continue
            raw: Bytes = np.ascontiguousarray(given[path]).reshape(-1).view(np.uint8)
            if raw.size // nbytes < stop:
                raise ValueError(
                    f"pack: got {raw.size} bytes for {stop} rows of {nbytes} bytes in "
                    f"{path!r}, expected whole rows"
                )
            taken.append((offset, nbytes, raw[first * nbytes : stop * nbytes]))
        records = flat[: (stop - first) * stride].reshape(-1, stride)
        for offset, nbytes, raw in taken:
            records[:, offset : offset + nbytes] = raw.reshape(-1, nbytes)

    def stream(
        self, out: memoryview, given: Mapping[str, Any], first: int, stop: int, /
    ) -> None:
        """See `PackerKernel.stream`."""
        target = np.frombuffer(out, np.uint8)
        target[: (stop - first) * len(self.record)] = 0
        self.pack(target, given, first, stop)

    def _plain(self, value: Any, member: Member) -> bool:
        _, dtype, scalar, kind, itemsize, shape, _, _ = member
        if type(value) is self._array:
            array = cast("NDArray[Any]", value)
            one = array.shape == shape or array.shape == (1, *shape)
            return bool(one and array.dtype == dtype and array.flags.c_contiguous)
        if type(value) is scalar:
            return True
        if kind == "b":
            return type(value) is bool
        if kind == "f" and type(value) in (float, self._double):
            most = float(np.finfo(dtype).max)
            return bool(-most <= value <= most)
        if kind in ("i", "u") and type(value) is int:
            info = np.iinfo(f"{kind}{itemsize}")
            return int(info.min) <= value <= int(info.max)
        return False
