"""Copies or reads rows and spans, and populates pages: the numpy twin of ``_copies.c``.

Rows are copied out of a mapping or read from its file. Functions take contiguous
arrays. C reads and writes their bytes, past the caches where it copies, and lets other
threads run.
"""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Array = NDArray[np.generic]

HEAP_ALIGNMENT = 8
_REFERENCE = np.dtype([("position", "<i8"), ("length", "<u4"), ("crc", "<u4")])
ASKED_NBYTES = 128 << 10
POPULATE_WRITE = 23

_madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def copy_rows(array: Array, stride: int, rows: Ids, out: Array, /) -> None:
    """Copy rows of an array.

    Args:
        array: Of any dtype.
        stride: Bytes a row.
        rows: int64 ``[N]``.
        out: Space for N rows, written.

    Raises:
        ValueError: There are no such rows, or the space does not fit.
    """
    _check("copy_rows", array.nbytes, stride, rows, out)
    nbytes = array.nbytes // stride * stride
    table = array.reshape(-1).view(np.uint8)[:nbytes].reshape(-1, stride)
    out.reshape(-1).view(np.uint8)[:] = table[rows].reshape(-1)


def copy_spans(
    source: Array, begins: Ids, nbytes: Ids, out: Array, targets: Ids | None, waits: bool, /
) -> None:
    """Copy spans of bytes from one array to another.

    Args:
        source: Of any dtype.
        begins: int64 ``[N]``, the first byte of each span in the source.
        nbytes: int64 ``[N]``, its bytes.
        out: Another array, written.
        targets: int64 ``[N]``, where each span begins in it; None for one after the
            other.
        waits: C lets other threads run meanwhile.

    Raises:
        ValueError: There are no such spans.
    """
    given, taken = (a.reshape(-1).view(np.uint8) for a in (source, out))
    if targets is None:
        targets = np.cumsum(nbytes) - nbytes
    fits = len(begins) == len(nbytes) == len(targets)
    for first, there in ((begins, given.size), (targets, taken.size)):
        # Without a sum, which might wrap around.
        fits = fits and bool(
            ((nbytes >= 0) & (first >= 0) & (first <= there)).all()
            and (nbytes <= there - first).all()
        )
    if not fits:
        raise ValueError("copy_spans: spans must lie inside of source and out")
    spans = zip(begins.tolist(), nbytes.tolist(), targets.tolist(), strict=True)
    for begin, size, target in spans:
        taken[target : target + size] = given[begin : begin + size]


def find_values(
    references: Array,
    env_ids: Ids,
    heap_tails: Ids,
    heap_heads: Ids,
    heap_nbytes: int,
    longest: int,
    item_nbytes: int,
    begins: Ids,
    nbytes: Ids,
    offsets: Ids,
    /,
) -> int:
    """Find the bytes that references name, and check that those may be read.

    docs/format.md has the rules. An illegal reference is taken for one of an empty
    value, and counted.

    Args:
        references: int64, uint32 and uint32 ``[N]``, 16 bytes each, from anywhere.
        env_ids: int64 ``[N]``.
        heap_tails: int64 ``[E]``, at least 0.
        heap_heads: int64 ``[E]``, at least the tails.
        heap_nbytes: Bytes of each environment's heap.
        longest: Items of the longest value.
        item_nbytes: Bytes of an item.
        begins: int64 ``[N]``, written: where each value begins in the whole heap.
        nbytes: int64 ``[N]``, written: its bytes.
        offsets: int64 ``[N + 1]``, written: the items before it, and those of all.

    Returns:
        The number of illegal references.

    Raises:
        ValueError: The arrays do not fit each other.
    """
    if (
        references.ndim != 1
        or references.dtype.itemsize != _REFERENCE.itemsize
        or heap_nbytes < 1
        or item_nbytes < 0
        or not 1 <= longest <= np.iinfo(np.uint32).max
        or item_nbytes * longest > np.iinfo(np.int64).max >> 1
        or len(heap_heads) != len(heap_tails)
    ):
        raise ValueError("find_values: references must be of a heap")
    count = len(references)
    if {len(env_ids), len(begins), len(nbytes), len(offsets) - 1} != {count}:
        raise ValueError("find_values: arrays must have as many numbers as there are references")
    if count and not 0 <= env_ids.min() <= env_ids.max() < len(heap_heads):
        raise ValueError("find_values: environments must exist")
    known = np.ascontiguousarray(references).view(_REFERENCE)
    positions, lengths = known["position"], known["length"].astype(np.int64)
    fits = lengths <= longest
    # No sum wraps around: a product of a length that fits does not.
    sizes = np.where(fits, lengths, 0) * item_nbytes
    inside = (heap_tails[env_ids] <= positions) & (positions >= 0)
    inside &= positions <= heap_heads[env_ids] - sizes
    whole = positions % heap_nbytes <= heap_nbytes - sizes
    there = fits & (lengths >= 1) & inside & whole & (positions % HEAP_ALIGNMENT == 0)
    legal = there | ((positions == 0) & (lengths == 0) & (known["crc"] == 0))
    nbytes[:] = np.where(legal, sizes, 0)
    begins[:] = env_ids * heap_nbytes + np.where(legal, positions, 0) % heap_nbytes
    offsets[0] = 0
    np.cumsum(np.where(legal, lengths, 0), out=offsets[1:])
    return int(np.count_nonzero(~legal))


def read_rows(fd: int, stride: int, rows: Ids, out: Array, ask: bool, /) -> bool:
    """Read rows of a file, in the order in which they lie there.

    Args:
        fd: Another thread may close it during the call.
        stride: Bytes a row.
        rows: int64 ``[N]``; those that follow each other are read by one call.
        out: Space for N rows, written as far as they could be read.
        ask: The disk is to be asked for all of them at once; C does so in a thread,
            beside what it reads.

    Returns:
        Whether all were; if not, the next read raises the reason.

    Raises:
        ValueError: There can be no such rows, or the space does not fit.
    """
    _check("read_rows", np.iinfo(np.int64).max, stride, rows, out)
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    edges = [0, *breaks.tolist(), len(rows)] if len(rows) else [0]
    firsts = rows[edges[:-1]].tolist()
    fragments = [
        (row * stride, first * stride, stop * stride)
        for row, first, stop in zip(firsts, edges[:-1], edges[1:], strict=True)
    ]
    return _read_all(fd, fragments, out, ask)


def read_spans(fd: int, begins: Ids, nbytes: Ids, out: Array, ask: bool, /) -> bool:
    """Read spans of a file one after another, in the order in which they lie there.

    Args:
        fd: Another thread may close it during the call.
        begins: int64 ``[N]``, the first byte of each span.
        nbytes: int64 ``[N]``, its bytes.
        out: Space for all of them, written as far as they could be read.
        ask: As for `read_rows`.

    Returns:
        Whether all were; if not, the next read raises the reason.

    Raises:
        ValueError: There can be no such spans, or the space does not fit.
    """
    fits = len(begins) == len(nbytes) and bool(((nbytes >= 0) & (begins >= 0)).all())
    fits = fits and bool((nbytes <= np.iinfo(np.int64).max - begins).all())
    if not fits or sum(nbytes.tolist()) > out.nbytes:
        raise ValueError("read_spans: spans must exist, and out must hold all of them")
    stops = np.cumsum(nbytes)
    spans = zip(begins.tolist(), (stops - nbytes).tolist(), stops.tolist(), strict=True)
    return _read_all(fd, [span for span in spans if span[1] < span[2]], out, ask)


def _read_all(fd: int, fragments: list[tuple[int, int, int]], out: Array, ask: bool) -> bool:
    """Read fragments of a file: of each its offset, and where it goes in `out`."""
    target = out.reshape(-1).view(np.uint8).data
    fragments.sort()
    try:
        own = os.dup(fd)
    except OSError:
        return False
    try:
        for offset, first, stop in fragments if ask else ():
            for at in range(offset, offset + stop - first, ASKED_NBYTES):
                os.posix_fadvise(own, at, ASKED_NBYTES, os.POSIX_FADV_WILLNEED)
        return all(_read(own, target[first:stop], offset) for offset, first, stop in fragments)
    finally:
        os.close(own)


def populate(address: int, nbytes: int, /) -> int:
    """Make pages of a mapping ready to be stored into, their space included.

    Args:
        address: Of the first page.
        nbytes: Bytes from there on.

    Returns:
        0, or the number of the error that a store would die of.
    """
    if _madvise is None:
        return errno.ENOSYS
    return ctypes.get_errno() if _madvise(address, nbytes, POPULATE_WRITE) else 0


def _read(fd: int, target: memoryview, offset: int) -> bool:
    done = 0
    while done < len(target):
        try:
            got = os.preadv(fd, [target[done:]], offset + done)
        except OSError:
            return False
        if got == 0:
            return False
        done += got
    return True


def _check(name: str, nbytes: int, stride: int, rows: Ids, out: Array) -> None:
    if stride < 1:
        raise ValueError(f"{name}: rows must have at least one byte")
    there = nbytes // stride
    fits = out.nbytes == len(rows) * stride
    if not fits or (len(rows) and not 0 <= rows.min() <= rows.max() < there):
        raise ValueError(f"{name}: rows must exist, and out must hold all of them")
