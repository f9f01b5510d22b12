"""Packs, flags and publishes rows of bytes: the numpy twin of ``_rows.c``.

A *record* is one row of small fields. A *slot* of COMMIT is one publication of heads,
limits and tails with its checksum (slot.py). An *append* stores and publishes by one
call (append.py). Functions take contiguous arrays; C writes into their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay.kernels import crc, exchange
from mmreplay.kernels.append import Append as Append
from mmreplay.kernels.append import AppendKernel
from mmreplay.kernels.blocks import Sources
from mmreplay.kernels.blocks import pack_values as pack_values
from mmreplay.kernels.slot import Slot as Slot
from mmreplay.kernels.slot import SlotKernel
from mmreplay.kernels.values import join_values as join_values
from mmreplay.kernels.values import measure_values as measure_values
from mmreplay.kernels.values import store_value as store_value
from mmreplay.kernels.values import sum_spans as sum_spans

START, TERMINATED, TRUNCATED, FINAL = 1, 2, 4, 8
END = TERMINATED | TRUNCATED

Array = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Member = tuple[str, Any, Any, str, int, tuple[int, ...], int, int]
"""How one field is taken: its name; the dtype of arrays; the scalar type that is taken
by its bytes, or None; the kind of Python scalars that are cast, ``"f"``, ``"i"``,
``"u"``, ``"b"``, or ``""`` for none; bytes of an item; shape; offset in the record, or
-1 for a field that is not in it; and the bit that its truth sets, or 0."""


Key = tuple[str, int, int]
"""One key of a step's mapping: its name; the number of its field, or -1 for a branch;
and how many keys a branch has, which follow it."""


def keys_of(paths: Sequence[str]) -> tuple[Key, ...]:
    """Keys of the nested mapping that holds fields of some paths, depth first.

    Args:
        paths: Of the fields, by number.
    """
    tree: dict[str, Any] = {}
    for number, path in enumerate(paths):
        *branches, last = path.split("/")
        branch = tree
        for name in branches:
            branch = branch.setdefault(name, {})
        branch[last] = number
    return tuple(_keys("", tree))


def _keys(name: str, below: Any) -> Iterator[Key]:
    if isinstance(below, int):
        yield name, below, 0
        return
    yield name, -1, len(below)
    for key, value in below.items():
        yield from _keys(key, value)


class PackerKernel(Protocol):
    """Packs records, and prepares steps that need no conversion.

    Attributes:
        rows: Records of the step prepared last, one of each environment; they change
            with every step. Empty where they are too long to be packed before they are
            written.
        ends: The TERMINATED and TRUNCATED bits of each environment of that step.
    """

    rows: bytearray
    ends: bytearray

    def prepare(self, data: Mapping[str, object], /) -> int:
        """Check one step of all environments, and pack it, if every value is plain.

        Plain is a dict of exactly the fields: nested, with a dict for each branch of
        their paths, or flat, with paths as keys. Its values are arrays of the field's
        dtype and of any strides, ``[E, *shape]``, or ``[*shape]`` where there is one
        environment. Of one environment scalars are plain as well: the field's own numpy
        scalars; finite floats and ints within the field's range; bools. Or a DLPack
        capsule (``"dltensor"``) of an array's values, on the CPU, for a field of the
        record or an end; of an end also with one axis of 1 behind it. A capsule may be
        used up by it.

        Returns:
            The bits of the fields that are true in some environment, or -1: the step is
            not plain, and `rows` and `ends` mean nothing.
        """

    def unpacked(self) -> dict[str, NDArray[Any]]:
        """Hand over values of the prepared step that `rows` does not hold, by path.

        Those are of large and mutable fields; of all fields that are stored where
        `rows` is empty.
        """

    def block(self, data: Mapping[str, object], /) -> dict[str, NDArray[Any]] | None:
        """Return a block's columns by path, if every value is plain.

        Plain is a mapping as in `prepare`, of arrays of the dtype, C-contiguous, of
        ``[T, E, *shape]``, or of ``[T, *shape]`` where there is one environment; T is
        at least 1.

        Returns:
            Its arrays as they are; None if the block is not plain.
        """

    def pack(self, out: Bytes, columns: Mapping[str, Any], first: int, stop: int, /) -> None:
        """Pack rows ``[first, stop)``; bytes of a record without a field stay.

        Args:
            out: Room for ``stop - first`` records, or more.
            columns: Arrays of whole rows, for each field of the record.
            first: First row to pack.
            stop: The row after the last one.

        Raises:
            ValueError: A field has too few rows, or out is too small.
        """

    def stream(self, out: memoryview, columns: Mapping[str, Any], first: int, stop: int, /) -> None:
        """Pack rows that nobody reads soon, past the caches; see `pack`.

        Bytes of a record without a field become zeros. All is stored when it returns,
        in the order in which others look.
        """


class RowsKernel(Protocol):
    """What both twins offer."""

    def RecordPacker(
        self,
        members: tuple[Member, ...],
        keys: tuple[Key, ...],
        nbytes: int,
        num_envs: int,
        max_nbytes: int,
        array: type,
        double: type,
        /,
    ) -> PackerKernel:
        """Make a packer of records of so many bytes; see `RecordPacker`."""

    def Slot(
        self, template: bytes, sequence: int, columns: int, num_envs: int, num_columns: int = 4, /
    ) -> SlotKernel:
        """Make a slot from a record's bytes; see `Slot`."""

    def Append(self, packer: PackerKernel, slot: SlotKernel, /) -> AppendKernel:
        """Make an append that stores steps and publishes them; see `Append`."""

    def mark(
        self,
        out: Bytes,
        before: Bytes,
        terminated: NDArray[np.bool_] | None,
        truncated: NDArray[np.bool_] | None,
        final_follows: bool,
        /,
    ) -> None:
        """Give a block its flags; see `mark`."""

    def crc32c(self, data: crc.Buffer, before: int = 0, /) -> int:
        """Sum bytes; see `crc32c`."""

    def sum_spans(
        self,
        data: NDArray[np.uint8],
        begins: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        out: NDArray[np.uint32],
        /,
    ) -> None:
        """Sum spans of bytes; see `values.sum_spans`."""

    def measure_values(
        self,
        cells: tuple[Any, ...],
        array: type,
        dtype: Any,
        inner: tuple[int, ...],
        maximum: int,
        kind: int,
        lengths: NDArray[np.int64],
        addresses: NDArray[np.int64],
        /,
    ) -> bool:
        """Count the items of plain values; see `values.measure_values`."""

    def join_values(self, cells: Sequence[Any], out: NDArray[np.uint8], /) -> None:
        """Copy values one after another; see `values.join_values`."""

    def pack_values(
        self,
        sources: Sources,
        offsets: tuple[NDArray[np.int64], ...],
        references: tuple[Any, ...],
        addresses: tuple[NDArray[np.int64] | None, ...],
        items: NDArray[np.int64],
        num_envs: int,
        first: int,
        stop: int,
        heads: NDArray[np.int64],
        free_until: NDArray[np.int64],
        size: int,
        out: NDArray[np.uint8],
        after: NDArray[np.int64],
        segments: NDArray[np.int64],
        /,
    ) -> tuple[int, int]:
        """Copy values as they will lie in heaps; see `blocks.pack_values`."""

    def store_value(
        self,
        value: Any,
        array: Any,
        dtype: Any,
        inner: tuple[int, ...],
        maximum: int,
        kind: int,
        head: int,
        size: int,
        free_until: int,
        mapping: Any,
        near: int,
        far: int,
        reference: Any,
        /,
    ) -> int:
        """Store a value into a heap's mapping; see `values.store_value`."""


crc32c = crc.crc32c


def mark(
    out: Bytes,
    before: Bytes,
    terminated: NDArray[np.bool_] | None,
    truncated: NDArray[np.bool_] | None,
    final_follows: bool,
    /,
) -> None:
    """Give T steps of each environment flags, final rows of their own not counted.

    Args:
        out: uint8 ``[T, E]``, written.
        before: uint8 ``[E]``, flags of the row before the block; FINAL for none.
        terminated: bool ``[T, E]``, without an axis that is 1 long; None for never.
            Bytes that are not 0 are true.
        truncated: Likewise.
        final_follows: The row after an end is the final row (``"next_step"``).

    Raises:
        ValueError: The shapes do not fit each other.
    """
    envs = before.size
    if envs < 1 or out.size % envs:
        raise ValueError(
            f"mark: out must hold whole steps of {envs} environments, got {out.size} rows"
        )
    flags = out.reshape(-1, envs)
    flags[...] = 0
    for ends, bit in ((terminated, TERMINATED), (truncated, TRUNCATED)):
        if ends is None:
            continue
        alone = 1 in flags.shape and ends.shape == (flags.size,)
        if ends.shape != flags.shape and not alone:
            raise ValueError(f"mark: ends must be bools {list(flags.shape)}")
        flags |= (ends.reshape(flags.shape) != 0) * np.uint8(bit)
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


def _check_member(member: Member, nbytes: int) -> None:
    """Refuse a field that does not fit a record of so many bytes."""
    path, _, _, kind, itemsize, shape, offset, mark = member
    count = int(np.prod(shape, dtype=np.int64))
    if offset >= 0 and offset > nbytes - count * itemsize:
        raise ValueError(f"RecordPacker: {path!r} ends outside the record")
    if kind and (shape or itemsize > 8):
        raise ValueError(f"RecordPacker: {path!r} takes no scalars")
    if mark and count * itemsize != 1:
        raise ValueError(f"RecordPacker: {path!r} is no bool that ends a step")


class RecordPacker:
    """Packs plain steps; see `PackerKernel`."""

    def __init__(
        self,
        members: tuple[Member, ...],
        keys: tuple[Key, ...],
        nbytes: int,
        num_envs: int,
        max_nbytes: int,
        array: type,
        double: type,
        /,
    ) -> None:
        """Begin with records of zeros.

        Args:
            members: How each field is checked and packed.
            keys: As `keys_of` makes them of the fields' paths.
            nbytes: Bytes of a record.
            num_envs: Environments.
            max_nbytes: Bytes that `rows` may have of several environments.
            array: ``numpy.ndarray``: C knows it by no other way.
            double: ``numpy.float64``.

        Raises:
            ValueError: A member does not fit, or the keys are others than the fields'.
        """
        self.stride, self.num_envs = nbytes, num_envs
        step_nbytes = num_envs * nbytes
        together = step_nbytes > 0 and (num_envs == 1 or step_nbytes <= max_nbytes)
        self.rows = bytearray(num_envs * nbytes if together else 0)
        self.ends = bytearray(max(0, num_envs))
        # Arrays over them would not keep them from being resized.
        self._exports = memoryview(self.rows), memoryview(self.ends)
        self._members, self._keys = members, keys
        self._array, self._double = array, double
        self._unpacked: dict[str, Any] = {}
        self._views: list[NDArray[Any] | None] = []
        for member in members:
            _check_member(member, nbytes)
            _, dtype, _, _, _, shape, offset, _ = member
            view = None
            if offset >= 0 and together:
                inner = np.empty(shape, dtype).strides
                strides = (nbytes, *inner)
                full_shape = num_envs, *shape
                view = np.ndarray(full_shape, dtype, self.rows, offset, strides)
            self._views.append(view)
        leaves = sorted(key[1] for key in keys if key[1] >= 0)
        if leaves != list(range(len(members))) or self._end_of(0) != len(keys):
            raise ValueError("RecordPacker: the keys are no tree of the fields")

    def _end_of(self, at: int) -> int:
        """Where the keys of a branch end; -1 where they are not all there."""
        if not 0 <= at < len(self._keys):
            return -1
        _, number, count = self._keys[at]
        at += 1
        for _ in range(count if number < 0 else 0):
            at = self._end_of(at)
        return at

    def _values(self, data: object) -> list[Any] | None:
        """Values by number of a nested mapping, or of a flat one; None where not."""
        paths = [member[0] for member in self._members]
        if not paths:
            return None
        values: list[Any] = [None] * len(paths)
        if self._find(data, 0, values) > 0:
            return values
        if type(data) is dict and len(data) == len(paths) and data.keys() == set(paths):
            return [data[path] for path in paths]
        return None

    def _find(self, branch: object, at: int, values: list[Any]) -> int:
        """Fill in the values below a branch; return where its keys end, -1 if odd."""
        _, _, count = self._keys[at]
        if type(branch) is not dict or len(branch) != count:
            return -1
        at += 1
        for _ in range(count):
            name, number, _ = self._keys[at]
            if name not in branch:
                return -1
            if number >= 0:
                values[number] = branch[name]
                at += 1
                continue
            at = self._find(branch[name], at, values)
            if at < 0:
                return -1
        return at

    def prepare(self, data: Mapping[str, object], /) -> int:
        """See `PackerKernel.prepare`."""
        values = self._values(data)
        if values is None:
            return -1
        several, marks = self.num_envs > 1, 0
        ends = np.frombuffer(self.ends, np.uint8)
        ends[...] = 0
        unpacked = {}
        for value, member, view in zip(values, self._members, self._views, strict=True):
            path, _, _, _, itemsize, shape, _, mark = member
            capsule = exchange.shown(value, bool(mark and not shape))
            if capsule is not None:
                # Long values are written from arrays alone.
                step = capsule[:1] if several else capsule
                if not ((mark or view is not None) and step.flags.c_contiguous):
                    return -1
                value = capsule
            if not (self._plain_array(value, member) if several else self._plain(value, member)):
                return -1
            if view is not None:
                view[...] = value
            if mark:
                bits = np.where(value, np.uint8(mark), np.uint8(0))
                ends |= bits.reshape(-1)
                marks |= int(np.bitwise_or.reduce(bits, None))
            elif itemsize * int(np.prod(shape, dtype=np.int64)) and view is None:
                unpacked[path] = value
        self._unpacked |= unpacked
        return marks

    def unpacked(self) -> dict[str, NDArray[Any]]:
        """See `PackerKernel.unpacked`."""
        values, self._unpacked = self._unpacked, {}
        return values

    def block(self, data: Mapping[str, object], /) -> dict[str, NDArray[Any]] | None:
        """See `PackerKernel.block`."""
        values = self._values(data)
        if values is None:
            return None
        pairs = list(zip(values, self._members, strict=True))
        steps = {self._steps(value, member) for value, member in pairs}
        if len(steps) > 1 or not min(steps):
            return None
        return {member[0]: value for value, member in pairs}

    def _plain_array(self, value: Any, member: Member) -> bool:
        """Whether a value is an array of all environments'."""
        if type(value) is not self._array:
            return False
        array = cast("NDArray[Any]", value)
        fits = array.shape == (self.num_envs, *member[5])
        return bool(fits and array.dtype == member[1])

    def _steps(self, value: Any, member: Member) -> int:
        """Steps of an array, 0 where it must be looked at."""
        if type(value) is not self._array:
            return 0
        array = cast("NDArray[Any]", value)
        shape = member[5]
        lead = array.shape[: array.ndim - len(shape)]
        fits = len(lead) in (1, 2) and array.shape == (*lead, *shape)
        envs = lead[1] if len(lead) == 2 else 1
        if not fits or envs != self.num_envs or not array.flags.c_contiguous:
            return 0
        return lead[0] if array.dtype == member[1] else 0

    def pack(self, out: Bytes, columns: Mapping[str, Any], first: int, stop: int, /) -> None:
        """See `PackerKernel.pack`."""
        flat, stride = out.reshape(-1), self.stride
        if stride < 1 or not 0 <= first <= stop or flat.size // stride < stop - first:
            raise ValueError(
                f"pack: out must hold rows {first} to {stop} of {stride} bytes, got "
                f"{flat.size} bytes"
            )
        copied = []
        for path, _, _, _, itemsize, shape, offset, _ in self._members:
            nbytes = int(np.prod(shape, dtype=np.int64)) * itemsize
            if offset < 0 or not nbytes:
                continue
            raw: Bytes = np.ascontiguousarray(columns[path]).reshape(-1).view(np.uint8)
            if raw.size // nbytes < stop:
                raise ValueError(
                    f"pack: {path!r} must have {stop} rows of {nbytes} bytes, got {raw.size} bytes"
                )
            copied.append((offset, nbytes, raw[first * nbytes : stop * nbytes]))
        records = flat[: (stop - first) * stride].reshape(-1, stride)
        for offset, nbytes, raw in copied:
            records[:, offset : offset + nbytes] = raw.reshape(-1, nbytes)

    def stream(self, out: memoryview, columns: Mapping[str, Any], first: int, stop: int, /) -> None:
        """See `PackerKernel.stream`."""
        target = np.frombuffer(out, np.uint8)
        target[: (stop - first) * self.stride] = 0
        self.pack(target, columns, first, stop)

    def _plain(self, value: Any, member: Member) -> bool:
        _, dtype, scalar, kind, itemsize, shape, _, _ = member
        if type(value) is self._array:
            array = cast("NDArray[Any]", value)
            one = array.shape == shape or array.shape == (1, *shape)
            return bool(one and array.dtype == dtype)
        if type(value) is scalar:
            return True
        if kind == "b":
            return type(value) is bool
        if kind == "f" and type(value) in (float, self._double):
            largest = float(np.finfo(dtype).max)
            return bool(-largest <= value <= largest)
        if kind in ("i", "u") and type(value) is int:
            info = np.iinfo(f"{kind}{itemsize}")
            return int(info.min) <= value <= int(info.max)
        return False
