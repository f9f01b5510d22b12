"""Steps drawn, judged and placed: the numpy twin of ``_steps.c``.

Functions take contiguous arrays; C reads and writes their bytes. A ring is given as
slots, environments, and whether a step of all of them lies together (`ring.Ring`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TERMINATED, FINAL, ALL_FLAGS = 2, 8, 63

Ids = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]
Judge = tuple[Bytes, int, int, bool, Bools]
"""Flags of every row, slots, environments, time_major, and the law: see `legal`."""


def shares(seed: int, step: int, out: NDArray[np.float64], /) -> None:
    """Draw numbers of one step uniformly from ``[0, 1)``.

    Those of numpy's ``Generator.random`` over Philox4x64-10 (Salmon et al. 2011,
    "Parallel random numbers: as easy as 1, 2, 3").

    Args:
        seed: In ``[0, 2**64)``, the key.
        step: In ``[0, 2**64)``, the second word of the counter.
        out: float64 ``[N]``, written.
    """
    philox = np.random.Philox(key=seed, counter=[0, step, 0, 0])
    np.random.Generator(philox).random(out=out)


def pick(
    seed: int, step: int, ends: Ids, stops: Ids, env_ids: Ids, positions: Ids, /
) -> None:
    """Draw rows of some stretches, one an environment, each as likely.

    Args:
        seed: See `shares`.
        step: See `shares`.
        ends: int64 ``[E]``, rows of the stretches up to the end of each, 1 in all at
            least.
        stops: int64 ``[E]``, the position after each stretch.
        env_ids: int64 ``[N]``, written.
        positions: int64 ``[N]``, written.

    Raises:
        ValueError: Shapes do not fit each other, or there is no row.
    """
    if not len(ends) == len(stops) >= 1 or len(env_ids) != len(positions):
        raise ValueError("pick: expected an end and a stop of each environment")
    if ends[-1] < 1:
        raise ValueError("pick: expected rows to pick from")
    # 53 bits of a double: the bias over 2**40 rows is below 2**-12 of a row.
    numbers = np.empty(len(positions))
    shares(seed, step, numbers)
    numbers *= ends[-1]
    ranks = numbers.astype(np.int64)
    env_ids[:] = np.searchsorted(ends, ranks, side="right")
    positions[:] = stops[env_ids] - (ends[env_ids] - ranks)


def pick_legal(
    seed: int, step: int, ends: Ids, stops: Ids,
    flags: Bytes, slots: int, num_envs: int, time_major: bool, law: Bools,
    tries: int, env_ids: Ids, positions: Ids, /,
) -> int:  # fmt: skip
    """Pick rows, keep those that are legal, and stop where there is no more room.

    Args:
        seed: See `pick`, as the next three.
        step: See `pick`.
        ends: See `pick`.
        stops: See `pick`.
        flags: See `legal`, as the next four.
        slots: See `legal`.
        num_envs: See `legal`.
        time_major: See `legal`.
        law: See `legal`.
        tries: Rows to pick at most.
        env_ids: int64 ``[N]``, written.
        positions: int64 ``[N]``, written.

    Returns:
        How many were found, at most N.

    Raises:
        ValueError: See `pick` and `legal`.
    """
    if len(env_ids) != len(positions):
        raise ValueError("pick_legal: expected room for as many of both")
    some_ids, some = np.empty((2, max(0, tries)), np.int64)
    pick(seed, step, ends, stops, some_ids, some)
    good = np.empty(len(some), bool)
    legal(flags, slots, num_envs, time_major, law, some_ids, some, good)
    places = np.flatnonzero(good)[: len(env_ids)]
    env_ids[: len(places)] = some_ids[places]
    positions[: len(places)] = some[places]
    return len(places)


def legal(
    flags: Bytes, slots: int, num_envs: int, time_major: bool, law: Bools,
    env_ids: Ids, positions: Ids, out: Bools, /,
) -> None:  # fmt: skip
    """Judge steps by their own flags and those of the row after.

    Args:
        flags: uint8, of every row of the ring.
        slots: Of the ring.
        num_envs: Of the ring.
        time_major: Of the ring.
        law: bool ``[64 * 64]``, by ``here << 6 | after``.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``.
        out: bool ``[N]``, written.

    Raises:
        ValueError: Shapes do not fit each other, or there is no such place.
    """
    fits = len(env_ids) == len(positions) == len(out)
    if not fits or len(flags) != slots * num_envs or len(law) != (ALL_FLAGS + 1) ** 2:
        raise ValueError("legal: expected flags of every row, and arrays of one length")
    rows, following = _rows(env_ids, positions, slots, num_envs, time_major)
    both = flags.take(rows).astype(np.uint16) & ALL_FLAGS
    both <<= 6
    both |= flags.take(following) & ALL_FLAGS
    law.take(both, out=out)


def place(
    flags: Bytes, env_ids: Ids, positions: Ids, heads: Ids, slots: int, num_envs: int,
    time_major: bool, bits: bytes, bare: bool, rows: Ids, ends: Bools, /,
) -> None:  # fmt: skip
    """Find the rows of steps, of those after if there is room, and how they end.

    Args:
        flags: uint8, of every row of the ring.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``.
        heads: int64 ``[E]``; rows below are written.
        slots: Of the ring.
        num_envs: Of the ring.
        time_major: Of the ring.
        bits: Flags to look for, one a byte, K of them.
        bare: Whether a terminated step without a final row after it is its own
            successor.
        rows: int64 ``[N]`` or ``[N, 2]``, written.
        ends: bool ``[K, N]``, written: whether a step has each flag.

    Raises:
        ValueError: Shapes do not fit each other, or there is no such place.
    """
    count = len(env_ids)
    fits = count == len(positions) and len(heads) == num_envs
    fits &= rows.size in (count, 2 * count) and ends.size == len(bits) * count
    if not fits or len(flags) != slots * num_envs:
        raise ValueError("place: expected flags of every row, and arrays of one length")
    first, following = _rows(env_ids, positions, slots, num_envs, time_major)
    here = flags.take(first)
    for kind, bit in enumerate(bits):
        ends[kind] = (here & bit) != 0
    if rows.size == count and rows.ndim == 1:
        rows[:] = first
        return
    if bare:
        last = np.flatnonzero(here & TERMINATED)
        final = (flags.take(following[last]) & FINAL) != 0
        final &= positions[last] + 1 < heads[env_ids[last]]
        own = last[~final]
        following[own] = first[own]
    rows[:, 0] = first
    rows[:, 1] = following


def store(
    column: NDArray[np.float32], env_ids: Ids, positions: Ids,
    numbers: NDArray[np.float32], firsts: Ids, stops: Ids, slots: int, num_envs: int,
    time_major: bool, rows: Ids, /,
) -> bool:  # fmt: skip
    """Store a number for each of some steps, if all are alive and all are proper.

    Args:
        column: float32, of every row of the ring, written or left as it is.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``; of equal places the last wins.
        numbers: float32 ``[N]``, at least 0 and finite.
        firsts: int64 ``[E]``, the oldest position alive.
        stops: int64 ``[E]``, the next position to be written.
        slots: Of the ring.
        num_envs: Of the ring.
        time_major: Of the ring.
        rows: int64 ``[N]``, written: where the steps lie, if all are alive.

    Returns:
        Whether the numbers are stored.

    Raises:
        ValueError: Shapes do not fit each other.
    """
    fits = len(env_ids) == len(positions) == len(numbers) == len(rows)
    fits &= len(column) == slots * num_envs
    if not fits or not len(firsts) == len(stops) == num_envs:
        raise ValueError("store: expected a number of every row, and one for each step")
    known = (env_ids >= 0) & (env_ids < num_envs)
    if not known.all() or not ((numbers >= 0) & (numbers < np.inf)).all():
        return False
    alive = (positions >= np.maximum(firsts[env_ids], 0)) & (positions < stops[env_ids])
    if not alive.all():
        return False
    rows[:], _ = _rows(env_ids, positions, slots, num_envs, time_major)
    column[rows] = numbers
    return True


def take(
    records: NDArray[np.generic], stride: int,
    flags: Bytes, env_ids: Ids, positions: Ids, heads: Ids, slots: int, num_envs: int,
    time_major: bool, bits: bytes, bare: bool, out: NDArray[np.generic], ends: Bools,
    waits: bool, /,
) -> None:  # fmt: skip
    """Place steps, and copy their records, and those after if there is room.

    Args:
        records: Of every row of the ring, of any dtype.
        stride: Bytes of a record.
        flags: See `place`, as the next eight.
        env_ids: See `place`.
        positions: See `place`.
        heads: See `place`.
        slots: See `place`.
        num_envs: See `place`.
        time_major: See `place`.
        bits: See `place`.
        bare: See `place`.
        out: Room for N records, or 2 N: of each step its own and the one after.
        ends: bool ``[K, N]``, written; see `place`.
        waits: Pages may have to be waited for: C lets other threads run meanwhile, as
            it does beside a long batch.

    Raises:
        ValueError: Shapes do not fit each other, or there is no such place.
    """
    count, whole = len(env_ids), stride * slots * num_envs
    room, rest = divmod(out.nbytes, max(1, stride))
    if stride < 1 or records.nbytes != whole or rest or room not in (count, 2 * count):
        raise ValueError("take: expected whole records of every row, and room for all")
    rows = np.empty(count if room == count else (count, 2), np.int64)
    place(
        flags, env_ids, positions, heads, slots, num_envs, time_major, bits, bare,
        rows, ends,
    )  # fmt: skip
    found = records.view(np.uint8).reshape(-1, stride)[rows.reshape(-1)]
    out.reshape(-1).view(np.uint8)[:] = found.reshape(-1)


def split(
    records: NDArray[np.generic], stride: int, first: int, count: int, parts: Ids,
    out: Bytes, /,
) -> None:  # fmt: skip
    """Copy fields of records that lie one after another, each into a column.

    Args:
        records: Of every row of the ring, of any dtype.
        stride: Bytes of a record.
        first: Row of the first one.
        count: How many.
        parts: int64 ``[K, 3]``: of each field the offset in a record, its bytes, and
            where in out its column begins.
        out: Room for all columns; the bytes between them stay.

    Raises:
        ValueError: There are no such rows or fields, or a column ends outside.
    """
    whole = records.nbytes // stride if stride > 0 else -1
    fits = 0 <= first <= first + count <= whole and count >= 0 and parts.size % 3 == 0
    fields = parts.reshape(-1, 3).tolist() if fits else []
    for offset, nbytes, place in fields:
        fits &= offset >= 0 and 1 <= nbytes <= stride - offset
        fits &= 0 <= place <= out.nbytes - count * nbytes
    if not fits:
        raise ValueError("split: expected records of the ring, and room for all")
    raw = records.reshape(-1).view(np.uint8)[first * stride : (first + count) * stride]
    table = raw.reshape(count, stride)
    for offset, nbytes, place in fields:
        column = out[place : place + count * nbytes].reshape(count, nbytes)
        column[...] = table[:, offset : offset + nbytes]


def unplace(
    rows: Ids, stops: Ids, slots: int, num_envs: int, time_major: bool,
    env_ids: Ids, positions: Ids, /,
) -> None:  # fmt: skip
    """Find what lies in rows: for each the newest position below its stop.

    Args:
        rows: int64 ``[N]``.
        stops: int64 ``[E]``, the next position to be written.
        slots: Of the ring.
        num_envs: Of the ring.
        time_major: Of the ring.
        env_ids: int64 ``[N]``, written.
        positions: int64 ``[N]``, written.

    Raises:
        ValueError: Shapes do not fit each other, or there is no such row.
    """
    if len(stops) != num_envs or not len(rows) == len(env_ids) == len(positions):
        raise ValueError("unplace: expected a stop of each environment")
    if len(rows) and not 0 <= rows.min() <= rows.max() < slots * num_envs:
        raise ValueError("unplace: expected rows of the ring")
    places, env_ids[:] = np.divmod(rows, num_envs)
    if not time_major:
        env_ids[:], places = np.divmod(rows, slots)
    newest = stops[env_ids] - 1
    positions[:] = newest - (newest - places) % slots


def _rows(
    env_ids: Ids, positions: Ids, slots: int, num_envs: int, time_major: bool
) -> tuple[Ids, Ids]:
    """Rows of positions, and of those after them."""
    strays = (env_ids < 0) | (env_ids >= num_envs) | (positions < 0)
    if strays.any():
        raise ValueError("expected known environments and positions of at least 0")
    of_env, of_slot = (1, num_envs) if time_major else (slots, 1)
    first = positions % slots
    after = first + 1
    after[after == slots] = 0
    base = env_ids * of_env
    return base + first * of_slot, base + after * of_slot
