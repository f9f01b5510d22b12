"""Values of many steps, laid out for a heap: the twin of ``_rows_blocks.h``."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.kernels.crc import crc32c
from mmreplay.kernels.values import ALIGNMENT, bytes_of

Ids = NDArray[np.int64]
Sources = tuple[tuple[Any, ...] | NDArray[np.uint8], ...]
_REFERENCE = struct.Struct("<qII")
MAX_SEGMENTS = 2
MAX_VALUE_NBYTES = 1 << 48


def pack_values(
    sources: Sources,
    offsets: tuple[Ids, ...],
    references: tuple[Any, ...],
    addresses: tuple[Ids | None, ...],
    items: Ids,
    num_envs: int,
    first: int,
    stop: int,
    heads: Ids,
    free_until: Ids,
    size: int,
    out: NDArray[np.uint8],
    after: Ids,
    segments: Ids,
    /,
) -> tuple[int, int]:
    """Copy the values of steps one after another, as they will lie in the heaps.

    In `out` the values of an environment follow those of the one before; step by step,
    and of a step field by field, each with zeros up to the next multiple of 8. A value
    that would cross the ring's end begins behind it.

    Args:
        sources: Of each of F fields a tuple of its values, which were measured, or the
            bytes of all, one after another.
        offsets: Of each field int64 ``[T * E + 1]``: items before each value, and all.
        references: Of each field 16 bytes a value, written.
        addresses: Of each field int64 ``[T * E]``, as measured; None of bytes.
        items: int64 ``[F]``, bytes of an item.
        num_envs: E.
        first: The first step of T.
        stop: The one after the last.
        heads: int64 ``[E]``, the heap heads, multiples of 8.
        free_until: int64 ``[E]``: heap positions below may be written; at most `size`
            after the heads.
        size: Bytes of a heap.
        out: Written.
        after: int64 ``[E]``, written: the heap heads after the steps that were packed;
            where the heaps take none, those that the first step needs.
        segments: int64 ``[2 * E, 4]`` at least, written. Of each stretch of `out` that
            goes to one stretch of a heap the environment, the first byte in `out` and
            the one after its last value, and the heap position.

    Returns:
        Steps that were packed, of which `out` and the heaps of all environments have
        space for the values, and their segments. 0 steps where the heaps take none,
        and minus the bytes of the first step where `out` does not take it.

    Raises:
        ValueError: There are no such values, heaps or arrays.
    """
    fields = len(sources)
    fits = (
        fields > 0
        and num_envs > 0
        and len(items) == fields
        and len(heads) == len(free_until) == len(after) == num_envs
        and segments.size >= MAX_SEGMENTS * 4 * num_envs
        and 0 <= first <= stop
        and size >= 1
        and size % ALIGNMENT == 0
        and bool((heads >= 0).all() and (free_until - heads <= size).all())
        and not (heads % ALIGNMENT).any()
        and bool((items >= 1).all())
    )
    count = len(offsets[0]) - 1 if fits else 0
    fits = fits and count >= 0 and stop <= count // num_envs
    if fits:
        for source, begins, named, found_at, item in zip(
            sources, offsets, references, addresses, items.tolist(), strict=True
        ):
            some = begins[first * num_envs : stop * num_envs + 1]
            lengths = np.diff(some)
            longest = min(min(size, MAX_VALUE_NBYTES) // item, 0xFFFFFFFF)
            fits &= len(begins) == count + 1
            fits &= memoryview(named).nbytes == _REFERENCE.size * count
            fits &= bool((some >= 0).all() and (lengths >= 0).all())
            fits &= bool((lengths <= longest).all())
            if source.__class__ is tuple:
                fits &= found_at is not None and len(source) == len(found_at) == count
            elif fits and len(some):
                fits &= int(some[-1]) * item <= memoryview(source).nbytes  # type: ignore[arg-type]  # an array
    if not fits:
        raise ValueError("pack_values: values must exist, and arrays fit each other")
    packing = _Packing(sources, offsets, items.tolist(), num_envs, size)
    steps, used = 0, 0
    for step in range(first, stop):
        used += sum(
            -(-nbytes // ALIGNMENT) * ALIGNMENT
            for env in range(num_envs)
            for nbytes in packing.value_nbytes(step * num_envs + env)
        )
        if used > out.nbytes:
            if not steps:
                return -used, 0
            break
        steps += 1
    for env in range(num_envs):
        head = int(heads[env])
        for step in range(steps):
            head = packing.head_after((first + step) * num_envs + env, head)
            if head > free_until[env]:
                steps = step
                break
    if not steps and stop > first:
        for env in range(num_envs):
            after[env] = packing.head_after(first * num_envs + env, int(heads[env]))
        return 0, 0
    at, end, found = 0, 0, []
    views = [memoryview(named).cast("B") for named in references]
    for env in range(num_envs):
        head = position = int(heads[env])
        begin = at
        for step in range(first, first + steps):
            number = step * num_envs + env
            for field, nbytes in enumerate(packing.value_nbytes(number)):
                place = slice(16 * number, 16 * number + 16)
                if not nbytes:
                    views[field][place] = bytes(16)
                    continue
                head = packing.begin(head, nbytes)
                if head % size == 0:
                    found += [(env, begin, end, position)]
                    begin, position = at, head
                data = packing.bytes_of(field, number, nbytes)
                padding = -nbytes % ALIGNMENT
                out[at : at + nbytes] = np.frombuffer(data, np.uint8)
                out[at + nbytes : at + nbytes + padding] = 0
                length = nbytes // int(items[field])
                views[field][place] = _REFERENCE.pack(head, length, crc32c(data))
                head += nbytes + padding
                end = at + nbytes
                at += nbytes + padding
        after[env] = head
        found += [(env, begin, end, position)]
    found = [segment for segment in found if segment[1] < segment[2]]
    segments.reshape(-1)[: 4 * len(found)] = np.array(found, np.int64).reshape(-1)
    return steps, len(found)


class _Packing:
    """The values of some steps."""

    def __init__(
        self, sources: Sources, offsets: tuple[Ids, ...], items: list[int], num_envs: int, size: int
    ) -> None:
        self._sources, self._offsets, self._items = sources, offsets, items
        self._num_envs, self._size = num_envs, size

    def value_nbytes(self, number: int) -> list[int]:
        """Bytes of the values of one step of one environment."""
        return [
            int(begins[number + 1] - begins[number]) * item
            for begins, item in zip(self._offsets, self._items, strict=True)
        ]

    def begin(self, head: int, nbytes: int) -> int:
        """Where a value begins that may begin at a heap head."""
        left = self._size - head % self._size
        return head + left if nbytes > left else head

    def head_after(self, number: int, head: int) -> int:
        """The heap head after the values of one step of one environment."""
        for nbytes in self.value_nbytes(number):
            if nbytes:
                head = self.begin(head, nbytes) + nbytes + -nbytes % ALIGNMENT
        return head

    def bytes_of(self, field: int, number: int, nbytes: int) -> memoryview:
        """The bytes of one value."""
        source = self._sources[field]
        if source.__class__ is tuple:
            return bytes_of(source[number])
        begin = int(self._offsets[field][number]) * self._items[field]
        return memoryview(source).cast("B")[begin : begin + nbytes]  # type: ignore[arg-type]  # an array
