"""Drawn steps: which are legal, where they lie, their fields: twin of ``_steps.c``.

Functions take contiguous arrays; C reads and writes their bytes. A ring is passed as
slots, environments, and whether a step of all environments lies together (`ring.Ring`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

START, TERMINATED, TRUNCATED, FINAL, CUT, ALL_FLAGS = 1, 2, 4, 8, 32, 63

Ids = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]


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


def pick(seed: int, step: int, ends: Ids, stops: Ids, env_ids: Ids, positions: Ids, /) -> None:
    """Draw rows of some spans, one an environment, each as likely.

    Args:
        seed: See `shares`.
        step: See `shares`.
        ends: int64 ``[E]``, rows of the spans up to the end of each, 1 in all at
            least.
        stops: int64 ``[E]``, the position after each span.
        env_ids: int64 ``[N]``, written.
        positions: int64 ``[N]``, written.

    Raises:
        ValueError: Shapes do not fit each other, or there is no row.
    """
    if not len(ends) == len(stops) >= 1 or len(env_ids) != len(positions):
        raise ValueError("pick: each environment must have an end and a stop")
    if ends[-1] < 1:
        raise ValueError("pick: there must be rows to pick from")
    # 53 bits of a double: the bias over 2**40 rows is below 2**-12 of a row.
    numbers = np.empty(len(positions))
    shares(seed, step, numbers)
    numbers *= ends[-1]
    ranks = numbers.astype(np.int64)
    env_ids[:] = np.searchsorted(ends, ranks, side="right")
    positions[:] = stops[env_ids] - (ends[env_ids] - ranks)


def pick_legal(
    seed: int,
    step: int,
    ends: Ids,
    stops: Ids,
    flags: Bytes,
    slots: int,
    num_envs: int,
    time_major: bool,
    verdicts: Bools,
    heads: Ids,
    after: int,
    tries: int,
    env_ids: Ids,
    positions: Ids,
    /,
) -> int:
    """Pick rows, keep those that are legal, and stop when N are found.

    Args:
        seed: See `pick`, as the next three.
        step: See `pick`.
        ends: See `pick`.
        stops: See `pick`.
        flags: See `legal`, as the next six.
        slots: See `legal`.
        num_envs: See `legal`.
        time_major: See `legal`.
        verdicts: See `legal`.
        heads: See `legal`.
        after: See `legal`.
        tries: Rows to pick at most.
        env_ids: int64 ``[N]``, written.
        positions: int64 ``[N]``, written.

    Returns:
        How many were found, at most N.

    Raises:
        ValueError: See `pick` and `legal`.
    """
    if len(env_ids) != len(positions):
        raise ValueError("pick_legal: env_ids and positions must have one length")
    some_ids, some = np.empty((2, max(0, tries)), np.int64)
    pick(seed, step, ends, stops, some_ids, some)
    good = np.empty(len(some), bool)
    legal(flags, slots, num_envs, time_major, verdicts, heads, after, some_ids, some, good)
    chosen = np.flatnonzero(good)[: len(env_ids)]
    env_ids[: len(chosen)] = some_ids[chosen]
    positions[: len(chosen)] = some[chosen]
    return len(chosen)


def legal(
    flags: Bytes,
    slots: int,
    num_envs: int,
    time_major: bool,
    verdicts: Bools,
    heads: Ids,
    after: int,
    env_ids: Ids,
    positions: Ids,
    out: Bools,
    /,
) -> None:
    """Tell legal starts by their own flags and those of the rows after.

    A step is legal if it is no final row, and the verdicts allow it and of each row
    after it, up to where an episode begins, or nothing is written yet.

    Args:
        flags: uint8, of every row of the ring.
        slots: Of the ring.
        num_envs: Of the ring.
        time_major: Of the ring.
        verdicts: bool ``[64 * 64]``, by ``here << 6 | after``.
        heads: int64 ``[E]``; rows below are written, the flags of others count as 0.
        after: How many rows after a step to look at, in ``[0, slots)``.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``.
        out: bool ``[N]``, written.

    Raises:
        ValueError: Shapes do not fit each other, or there is no such row.
    """
    fits = len(env_ids) == len(positions) == len(out) and len(heads) == num_envs
    fits &= len(flags) == slots * num_envs and len(verdicts) == (ALL_FLAGS + 1) ** 2
    if not fits or not 0 <= after < slots + (slots == 1):
        raise ValueError("legal: flags must have every row, and arrays one length")
    rows, following = _rows(env_ids, positions, slots, num_envs, time_major)
    here = flags.take(rows).astype(np.uint16) & ALL_FLAGS
    out[:] = (here & FINAL) == 0
    active, head = np.flatnonzero(out), heads[env_ids]
    for step in range(1, after + 1):
        if not len(active):
            break
        there = positions[active] + step < head[active]
        later = np.where(there, flags.take(following[active]), 0) & ALL_FLAGS
        good = verdicts[here[active] << 6 | later]
        out[active[~good]] = False
        going = good & there & ((later & START) == 0)
        here[active] = later
        active = active[going]
        _, following = _rows(env_ids, positions + step, slots, num_envs, time_major)


def all_legal(
    flags: Bytes,
    slots: int,
    num_envs: int,
    time_major: bool,
    verdicts: Bools,
    heads: Ids,
    after: int,
    firsts: Ids,
    stops: Ids,
    env_ids: Ids,
    positions: Ids,
    /,
) -> bool:
    """Tell whether steps are legal starts, all of them.

    Args:
        flags: See `legal`, as the next six.
        slots: See `legal`.
        num_envs: See `legal`.
        time_major: See `legal`.
        verdicts: See `legal`.
        heads: See `legal`.
        after: See `legal`.
        firsts: int64 ``[E]``, the oldest possible start.
        stops: int64 ``[E]``, one past the newest.
        env_ids: int64 ``[N]``, of any values.
        positions: int64 ``[N]``, of any values.

    Raises:
        ValueError: Shapes do not fit each other.
    """
    out = np.ones(len(env_ids), bool)
    fits = len(env_ids) == len(positions) and len(firsts) == len(stops) == num_envs
    none: Ids = np.empty(0, np.int64)
    legal(flags, slots, num_envs, time_major, verdicts, heads, after, none, none, out[:0])
    if not fits:
        raise ValueError("all_legal: flags must have every row, and arrays one length")
    if not ((env_ids >= 0) & (env_ids < num_envs)).all():
        return False
    inside = (positions >= 0) & (positions < np.iinfo(np.int64).max)
    inside &= (positions >= firsts[env_ids]) & (positions < stops[env_ids])
    if not inside.all():
        return False
    legal(flags, slots, num_envs, time_major, verdicts, heads, after, env_ids, positions, out)
    return bool(out.all())


BELOW_ONE = 1.0 - 2.0**-53
"""The greatest number below 1."""


def divide(
    fractions: NDArray[np.float64],
    points: NDArray[np.float64],
    shares: NDArray[np.float64],
    counts: Ids,
    /,
) -> None:
    """Divide the points of batches between buffers; see `samplers.joint`.

    Args:
        fractions: float64 ``[R]``, share of each buffer in all mass, one above 0.
        points: float64 ``[N, B]``, in ``[0, 1)``, of each batch.
        shares: float64 ``[N * B]``, written: the points as shares of the mass of their
            buffer, in ``[0, 1)``; buffer by buffer, and of each batch by batch.
        counts: int64 ``[R, N]``, written: points of each batch that each buffer has.

    Raises:
        ValueError: Shapes do not fit each other, or there is no share.
    """
    num = len(fractions)
    num_batches = counts.size // num if num else 0
    size = points.size // num_batches if num_batches else 0
    massive = np.flatnonzero(fractions > 0)
    if (
        not len(massive)
        or not num_batches
        or counts.size != num * num_batches
        or not points.size == shares.size == size * num_batches
    ):
        raise ValueError("divide: a buffer must have a share, and each batch as many points")
    edges = np.concatenate([[0.0], np.cumsum(fractions)])
    # The end of the line by its definition: rounding would leave points without one.
    which = np.searchsorted(edges[1:-1], points.reshape(-1), side="right")
    # The edges of a buffer without a share are equal, so that no point lies between
    # them, but one may lie on them.
    which = massive[np.minimum(np.searchsorted(massive, which), len(massive) - 1)]
    own = (points.reshape(-1) - edges[which]) / fractions[which]
    own = np.minimum(np.maximum(own, 0.0), BELOW_ONE)
    shares[:] = own[np.argsort(which, kind="stable")]
    keys = which * num_batches + np.repeat(np.arange(num_batches), size)
    flat = np.bincount(keys, minlength=num * num_batches)
    counts.reshape(-1)[:] = flat


def locate_rows(
    flags: Bytes,
    env_ids: Ids,
    positions: Ids,
    heads: Ids,
    slots: int,
    num_envs: int,
    time_major: bool,
    bits: bytes,
    bare: bool,
    rows: Ids,
    ends: Bools,
    /,
) -> None:
    """Find the rows of steps, of those after if rows has two columns, and how they end.

    Args:
        flags: uint8, of every row of the ring.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``.
        heads: int64 ``[E]``; rows below are written.
        slots: Of the ring.
        num_envs: Of the ring.
        time_major: Of the ring.
        bits: Flags to look for, one a byte, K of them.
        bare: Whether the last step of an episode without a final row is its own
            successor: the next row begins an episode, or is not written.
        rows: int64 ``[N]`` or ``[N, 2]``, written.
        ends: bool ``[K, N]``, written: whether a step has each flag.

    Raises:
        ValueError: Shapes do not fit each other, or there is no such row.
    """
    count = len(env_ids)
    fits = count == len(positions) and len(heads) == num_envs
    fits &= rows.size in (count, 2 * count) and ends.size == len(bits) * count
    if not fits or len(flags) != slots * num_envs:
        raise ValueError("locate_rows: flags must have every row, and arrays one length")
    first, following = _rows(env_ids, positions, slots, num_envs, time_major)
    here = flags.take(first)
    for kind, bit in enumerate(bits):
        ends[kind] = (here & bit) != 0
    if rows.size == count and rows.ndim == 1:
        rows[:] = first
        return
    if bare:
        there = positions + 1 < heads[env_ids]
        # The flags of what is not written may be a hole in a file: not looked at.
        own = ~there | ((flags.take(np.where(there, following, first)) & START) != 0)
        following[own] = first[own]
    rows[:, 0] = first
    rows[:, 1] = following


def store(
    column: NDArray[np.float32],
    env_ids: Ids,
    positions: Ids,
    numbers: NDArray[np.float32],
    firsts: Ids,
    stops: Ids,
    slots: int,
    num_envs: int,
    time_major: bool,
    rows: Ids,
    /,
) -> bool:
    """Store a number for each of some steps, if all are alive and all are proper.

    Args:
        column: float32, of every row of the ring, written or left as it is.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``; of equal steps the last wins.
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
        raise ValueError("store: each row and each step must have a number")
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
    records: NDArray[np.generic],
    stride: int,
    flags: Bytes,
    env_ids: Ids,
    positions: Ids,
    heads: Ids,
    slots: int,
    num_envs: int,
    time_major: bool,
    bits: bytes,
    bare: bool,
    out: NDArray[np.generic],
    ends: Bools,
    waits: bool,
    /,
) -> None:
    """Find rows of steps, and copy their records, and those after if out has space.

    Args:
        records: Of every row of the ring, of any dtype.
        stride: Bytes of a record.
        flags: See `locate_rows`, as the next eight.
        env_ids: See `locate_rows`.
        positions: See `locate_rows`.
        heads: See `locate_rows`.
        slots: See `locate_rows`.
        num_envs: See `locate_rows`.
        time_major: See `locate_rows`.
        bits: See `locate_rows`.
        bare: See `locate_rows`.
        out: Room for N records, or 2 N: of each step its own and the one after.
        ends: bool ``[K, N]``, written; see `locate_rows`.
        waits: Pages may have to be waited for: C lets other threads run, as
            it does beside a long batch.

    Raises:
        ValueError: Shapes do not fit each other, or there is no such row.
    """
    count, nbytes_of_rows = len(env_ids), stride * slots * num_envs
    num_records, rest = divmod(out.nbytes, max(1, stride))
    if (
        stride < 1
        or records.nbytes != nbytes_of_rows
        or rest
        or num_records not in (count, 2 * count)
    ):
        raise ValueError("take: records must have every row, and out must hold all")
    rows = np.empty(count if num_records == count else (count, 2), np.int64)
    locate_rows(
        flags, env_ids, positions, heads, slots, num_envs, time_major, bits, bare, rows, ends
    )
    values = records.view(np.uint8).reshape(-1, stride)[rows.reshape(-1)]
    out.reshape(-1).view(np.uint8)[:] = values.reshape(-1)


def split(
    records: NDArray[np.generic], stride: int, first: int, count: int, copied: Ids, out: Bytes, /
) -> None:
    """Copy fields of records that lie one after another, each into a column.

    Args:
        records: Of every row of the ring, of any dtype.
        stride: Bytes of a record.
        first: Row of the first one.
        count: How many.
        copied: int64 ``[K, 3]``: of each field the offset in a record, its bytes, and
            where in out its column begins.
        out: Room for all columns; the bytes between them stay.

    Raises:
        ValueError: There are no such rows or fields, or a column ends outside.
    """
    num_rows = records.nbytes // stride if stride > 0 else -1
    fits = 0 <= first <= first + count <= num_rows and count >= 0 and copied.size % 3 == 0
    fields = copied.reshape(-1, 3).tolist() if fits else []
    for offset, nbytes, start in fields:
        fits &= offset >= 0 and 1 <= nbytes <= stride - offset
        fits &= 0 <= start <= out.nbytes - count * nbytes
    if not fits:
        raise ValueError("split: records must be in the ring, and out must hold all")
    raw = records.reshape(-1).view(np.uint8)[first * stride : (first + count) * stride]
    table = raw.reshape(count, stride)
    for offset, nbytes, start in fields:
        column = out[start : start + count * nbytes].reshape(count, nbytes)
        column[...] = table[:, offset : offset + nbytes]


def fold_steps(
    flags: Bytes,
    env_ids: Ids,
    positions: Ids,
    heads: Ids,
    slots: int,
    num_envs: int,
    time_major: bool,
    before: int,
    steps: int,
    columns: Ids,
    marks: Ids,
    out: Ids,
    ends: Bools,
    /,
) -> None:
    """Find how far steps are folded, and rows around them, by flags.

    A step is folded with those after it up to the first that ends its episode, `steps`
    in all at most. Row n of a column is that of the position
    ``max(min(position + ahead, cap) - back, first)``, where cap is the last step
    folded, or with `beyond` the row that holds the next observation. That row is the
    one after the last step. Where no final row follows an end, it is the last step's
    own row if that step terminated, else the row of the step drawn. The first row is
    that where the episode begins, and at most `before` rows before the step.

    Args:
        flags: uint8, of every row of the ring.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``.
        heads: int64 ``[E]``; rows below are written, the flags of others are not read.
        slots: Of the ring.
        num_envs: Of the ring.
        time_major: Of the ring.
        before: In ``[0, slots)``.
        steps: In ``[1, slots)``.
        columns: int64 ``[C, 6]``: ahead, at most `steps`; back; beyond; and where the
            rows go: ``out[start * N + n * width + at]``, counted behind the first three
            arrays.
        marks: int64 ``[S, 5]``: a column, the flag to look for in its rows, and where
            it goes, in the same way, behind the first array. TRUNCATED is also where
            the row after has CUT.
        out: int64 ``[3 + C, N]``, written: positions of the first row, of the last step
            and of the row with the next observation; then rows of the ring.
        ends: bool ``[1 + S, N]``, written: whether the last step terminated; then what
            marks look for.

    Raises:
        ValueError: Shapes do not fit each other, or there is no such row.
    """
    count, width = len(env_ids), columns.size // 6
    fits = columns.size % 6 == marks.size % 5 == 0 and count == len(positions)
    table = columns.reshape(-1, 6).tolist() if fits else []
    kinds = marks.reshape(-1, 5).tolist() if fits else []
    fits &= len(heads) == num_envs and len(flags) == slots * num_envs and 0 <= before < slots
    fits &= 1 <= steps < slots and out.size == (3 + width) * count
    fits &= ends.size == (1 + len(kinds)) * count
    for ahead, back, _, start, wide, at in table:
        fits &= 0 <= ahead <= steps and 0 <= back <= slots
        fits &= 0 <= at < wide and 0 <= start <= width - wide
    for column, bit, start, wide, at in kinds:
        fits &= 0 <= column < width and 0 <= bit <= 255
        fits &= 0 <= at < wide and 0 <= start <= len(kinds) - wide
    if not fits:
        raise ValueError(
            "fold_steps: flags must have every row, the ring the window, and out all steps"
        )
    if count and positions.max() > np.iinfo(np.int64).max - steps - 1:
        raise ValueError("fold_steps: positions must leave numbers for the steps after")
    own, _ = _rows(env_ids, positions, slots, num_envs, time_major)
    of_slot = num_envs if time_major else 1
    base = own - positions % slots * of_slot
    head = heads[env_ids]

    def look(at_positions: Ids) -> tuple[Ids, Bytes]:
        """Rows of positions of the steps, and their flags, 0 where none is."""
        rows = base + at_positions % slots * of_slot
        there = (at_positions >= 0) & (at_positions < head)
        # The flags of what is not written may be a hole in a file: not looked at.
        return rows, np.where(there, flags.take(np.where(there, rows, 0)), 0)

    began = np.full(count, before)
    for distance in range(before - 1, -1, -1):
        began[(look(positions - distance)[1] & START) != 0] = distance
    np.minimum(began, positions, out=began)
    last, here = np.zeros(count, np.int64), look(positions)[1]
    after, open_ = look(positions + 1)[1], np.ones(count, bool)
    for distance in range(1, steps):
        open_ &= ((here & (TERMINATED | TRUNCATED)) == 0) & ((after & (START | FINAL)) == 0)
        if not open_.any():
            break
        following = look(positions + distance + 1)[1]
        here, after = np.where(open_, after, here), np.where(open_, following, after)
        last[open_] = distance
    terminated = (here & TERMINATED) != 0
    bounds = out.reshape(3 + width, count)
    bounds[0] = positions - began
    bounds[1] = positions + last
    bare = (after & FINAL) == 0
    unknown = bare & ~terminated & (((here & TRUNCATED) != 0) | ((after & START) != 0))
    bounds[2] = np.where(unknown, positions, bounds[1] + ~(terminated & bare))
    flat_ends = ends.reshape(-1)
    flat_ends[:count] = terminated
    at_columns = []
    for ahead, behind, beyond, start, wide, at in table:
        at_column = np.minimum(positions + ahead, bounds[2 if beyond else 1]) - behind
        at_columns.append(np.maximum(at_column, bounds[0]))
        block = slice((3 + start) * count, (3 + start + wide) * count)
        out.reshape(-1)[block][at::wide] = base + at_columns[-1] % slots * of_slot
    for column, bit, start, wide, at in kinds:
        seen = (look(at_columns[column])[1] & bit) != 0
        if bit == TRUNCATED:
            seen |= (look(at_columns[column] + 1)[1] & CUT) != 0
        flat_ends[(1 + start) * count : (1 + start + wide) * count][at::wide] = seen


def columns(
    records: NDArray[np.generic],
    stride: int,
    rows: Ids,
    count: int,
    copied: Ids,
    out: Bytes,
    waits: bool,
    /,
) -> None:
    """Copy fields of records that lie anywhere, each into a column.

    Args:
        records: Of every row of the ring, of any dtype.
        stride: Bytes of a record.
        rows: int64 ``[C, N]``, rows of the ring.
        count: N.
        copied: int64 ``[P, 5]``: of each field the offset in a record, its bytes, the
            first of the C and how many of them it is read from, and where in out its
            column begins.
        out: Room for all columns; the bytes between them stay.
        waits: See `take`.

    Raises:
        ValueError: There are no such rows or fields, or a column ends outside.
    """
    fits = stride >= 1 and records.nbytes % max(1, stride) == 0 and count >= 0
    fits &= copied.size % 5 == 0
    rows = rows.reshape(-1)
    fields = copied.reshape(-1, 5).tolist() if fits else []
    for offset, nbytes, start, width, start_at in fields:
        fits &= offset >= 0 and 1 <= nbytes <= stride - offset
        fits &= start >= 0 and width >= 1 and (start + width) * count <= len(rows)
        fits &= 0 <= start_at <= out.nbytes - count * width * nbytes
    if not fits:
        raise ValueError("columns: fields must be in the records, and out must hold all")
    if len(rows) and not 0 <= rows.min() <= rows.max() < records.nbytes // stride:
        raise ValueError("columns: rows must be in the ring")
    table, flat = records.view(np.uint8).reshape(-1, stride), out.reshape(-1)
    for offset, nbytes, start, width, start_at in fields:
        some = rows[start * count : (start + width) * count]
        values = table[some, offset : offset + nbytes].reshape(-1)
        flat.view(np.uint8)[start_at : start_at + values.nbytes] = values


def weighted_sums(
    positions: Ids,
    last: Ids,
    powers: NDArray[np.float64],
    values: NDArray[np.generic],
    wide: int,
    out: NDArray[np.generic],
    wide_out: int,
    /,
) -> None:
    """Sum rewards of steps that are folded, one after the other, in float64.

    Args:
        positions: int64 ``[N]``.
        last: int64 ``[N]``, the last step of each; rewards after it do not count.
        powers: float64 ``[K]``, what to multiply them with.
        values: float32 or float64 ``[N, K, *shape]``, contiguous.
        wide: Bytes of a value: 4 or 8.
        out: float32 or float64 ``[N, *shape]``, written.
        wide_out: Bytes of a sum.

    Raises:
        ValueError: Shapes do not fit each other, or a last step is not among K.
    """
    count, num_steps = len(positions), len(powers)
    fits = count == len(last) and num_steps >= 1 and {wide, wide_out} <= {4, 8}
    if fits and (count or out.nbytes or values.nbytes):
        num_sums = out.nbytes // wide_out
        fits = out.nbytes % wide_out == values.nbytes % wide == 0 < count
        fits = fits and num_sums % count == 0 and values.nbytes // wide == num_sums * num_steps
    if not fits:
        raise ValueError(
            "weighted_sums: each folded step must have a number, and out must hold all"
        )
    if count and not 0 <= (last - positions).min() <= (last - positions).max() < num_steps:
        raise ValueError("weighted_sums: last steps must be among the folded ones")
    if not count:
        return
    numbers = values.reshape(-1).view(f"f{wide}").reshape(count, num_steps, -1)
    total = np.zeros((count, numbers.shape[2]))
    with np.errstate(all="ignore"):
        for step in range(num_steps):
            some = positions + step <= last
            total[some] += powers[step] * numbers[some, step].astype(np.float64)
        out.reshape(-1).view(f"f{wide_out}")[:] = total.reshape(-1)


def discounts(
    positions: Ids,
    last: Ids,
    powers: NDArray[np.float64],
    terminated: Bools,
    out: NDArray[np.float32],
    /,
) -> None:
    """What to multiply the value of what follows folded steps with.

    Args:
        positions: int64 ``[N]``.
        last: int64 ``[N]``.
        powers: float64 ``[K]``, by the number of steps folded.
        terminated: bool ``[N]``: nothing follows.
        out: float32 ``[N]``, written.

    Raises:
        ValueError: Shapes do not fit each other, or more steps are folded.
    """
    if not len(positions) == len(last) == len(terminated) == out.size:
        raise ValueError("discounts: out must hold a number for each step")
    steps = last - positions + 1
    if len(steps) and not 1 <= steps.min() <= steps.max() < len(powers):
        raise ValueError("discounts: last steps must be among the folded ones")
    out[:] = np.where(terminated, 0.0, powers[steps])


def fold_fields(
    records: NDArray[np.generic],
    stride: int,
    flags: Bytes,
    env_ids: Ids,
    positions: Ids,
    heads: Ids,
    slots: int,
    num_envs: int,
    time_major: bool,
    before: int,
    steps: int,
    columns: Ids,
    marks: Ids,
    out: Ids,
    ends: Bools,
    copied: Ids,
    summed: Ids,
    powers: NDArray[np.float64],
    discount: int,
    fields: Bytes,
    waits: bool,
    /,
) -> None:
    """Fold steps, copy fields of the rows around them, and sum their rewards.

    The result is that of `fold_steps`, `columns`, `weighted_sums` and `discounts`, one
    after the other.

    Args:
        records: Of every row of the ring, of any dtype.
        stride: Bytes of a record.
        flags: See `fold_steps`, as the next twelve.
        env_ids: See `fold_steps`.
        positions: See `fold_steps`.
        heads: See `fold_steps`.
        slots: See `fold_steps`.
        num_envs: See `fold_steps`.
        time_major: See `fold_steps`.
        before: See `fold_steps`.
        steps: See `fold_steps`.
        columns: See `fold_steps`.
        marks: See `fold_steps`.
        out: See `fold_steps`.
        ends: See `fold_steps`.
        copied: int64 ``[P, 5]``, see `columns`: the rows are those of the columns of
            `fold_steps`, which lie together, at 0, 1 and so on.
        summed: int64 ``[S, 6]``: of each field that is summed the offset in a record,
            how many numbers it holds, the bytes of each (4 or 8) and of each sum; the
            first of the `steps` columns that hold its rows, which lie together; and
            where in fields the sums begin.
        powers: float64 ``[steps + 1]``, see `weighted_sums` and `discounts`; of any
            length where neither is wanted.
        discount: Where in fields discounts begin; less than 0 for none.
        fields: Room for all; the bytes between stay.
        waits: See `take`.

    Raises:
        ValueError: Shapes do not fit each other, or there is no such row.
    """
    count, width = len(env_ids), columns.size // 6
    fits = stride >= 1 and records.nbytes == stride * slots * num_envs
    fits &= copied.size % 5 == 0 and summed.size % 6 == 0
    copies = copied.reshape(-1, 5).tolist() if fits else []
    wanted = summed.reshape(-1, 6).tolist() if fits else []
    for offset, nbytes, start, wide, start_at in copies:
        fits &= offset >= 0 and 1 <= nbytes <= stride - offset
        fits &= _together(columns, start, wide)
        fits &= 0 <= start_at <= fields.nbytes - count * wide * nbytes
    for offset, numbers, wide, wide_out, start, start_at in wanted:
        fits &= wide in (4, 8) and wide_out in (4, 8) and numbers >= 1 and offset >= 0
        fits &= numbers * wide <= stride - offset and _together(columns, start, steps)
        fits &= 0 <= start_at <= fields.nbytes - count * numbers * wide_out
    if wanted or discount >= 0:
        fits &= len(powers) == steps + 1
    if not fits or discount > fields.nbytes - 4 * count:
        raise ValueError("fold_fields: fields and out must have every row")
    fold_steps(
        flags,
        env_ids,
        positions,
        heads,
        slots,
        num_envs,
        time_major,
        before,
        steps,
        columns,
        marks,
        out,
        ends,
    )
    located = out.reshape(3 + width, count)
    table, flat = records.view(np.uint8).reshape(-1, stride), fields.reshape(-1)
    for offset, nbytes, start, wide, start_at in copies:
        rows = located[3 + start : 3 + start + wide].reshape(-1)
        values = table[rows, offset : offset + nbytes].reshape(-1)
        flat[start_at : start_at + values.nbytes] = values
    last, weights = located[1], powers[:-1]
    for offset, numbers, wide, wide_out, start, start_at in wanted:
        rows = located[3 + start : 3 + start + steps].reshape(-1)
        values = np.ascontiguousarray(table[rows, offset : offset + numbers * wide])
        total = np.empty(count * numbers * wide_out, np.uint8)
        weighted_sums(positions, last, weights, values, wide, total, wide_out)
        flat[start_at : start_at + total.nbytes] = total
    if discount >= 0:
        factors = np.empty(count, np.float32)
        terminated = ends.reshape(-1)[:count]
        discounts(positions, last, powers, terminated, factors)
        flat[discount : discount + factors.nbytes] = factors.view(np.uint8)


def take_fields(
    records: NDArray[np.generic],
    stride: int,
    flags: Bytes,
    env_ids: Ids,
    positions: Ids,
    heads: Ids,
    slots: int,
    num_envs: int,
    time_major: bool,
    bits: bytes,
    bare: bool,
    wide: int,
    copied: Ids,
    out: Bytes,
    ends: Bools,
    waits: bool,
    /,
) -> None:
    """Place steps, and copy fields of their records, and of those after, into columns.

    Args:
        records: See `take`, as the next ten.
        stride: See `take`.
        flags: See `take`.
        env_ids: See `take`.
        positions: See `take`.
        heads: See `take`.
        slots: See `take`.
        num_envs: See `take`.
        time_major: See `take`.
        bits: See `take`.
        bare: See `take`.
        wide: 1, or 2 where records after are looked at.
        copied: int64 ``[P, 5]``, see `columns`: of each field the offset, the bytes, 0
            for the step's own record or 1 for the one after, 1, and where in out it
            goes.
        out: See `columns`.
        ends: See `take`.
        waits: See `take`.

    Raises:
        ValueError: Shapes do not fit each other, or there is no such row.
    """
    fits = wide in (1, 2) and copied.size % 5 == 0
    fits &= stride >= 1 and records.nbytes == stride * slots * num_envs
    for _, _, start, width, _ in copied.reshape(-1, 5).tolist() if fits else []:
        fits &= width == 1 and start < wide
    if not fits:
        raise ValueError("take_fields: fields must have every row")
    count = len(env_ids)
    rows = np.empty(count if wide == 1 else (count, 2), np.int64)
    locate_rows(
        flags, env_ids, positions, heads, slots, num_envs, time_major, bits, bare, rows, ends
    )
    whose = np.ascontiguousarray(rows.reshape(count, wide).T)
    columns(records, stride, whose, count, copied, out, waits)


def locate(
    queues: Ids,
    firsts: Ids,
    stops: Ids,
    alive: Ids,
    seen: Ids,
    newest: Bytes,
    env_ids: Ids,
    positions: Ids,
    begin: Ids,
    end: Ids,
    /,
) -> None:
    """Find the episodes that hold steps.

    Args:
        queues: int64 ``[2, W]``: where episodes begin, growing within each environment,
            and where the steps of the episode before end.
        firsts: int64 ``[E]``, where the queue of each environment begins.
        stops: int64 ``[E]``, where it ends.
        alive: int64 ``[E]``, the oldest position alive.
        seen: int64 ``[E]``, the position after the newest row.
        newest: uint8 ``[E]``, flags of that row, which is no step if it is final.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``.
        begin: int64 ``[N]``, written: the episode's first step alive.
        end: int64 ``[N]``, written: one past its last step.

    Raises:
        ValueError: Shapes do not fit each other, or there is no such environment.
    """
    count, envs = len(env_ids), len(firsts)
    fits = envs == len(stops) == len(alive) == len(newest) == len(seen)
    fits &= queues.size % 2 == 0
    if not fits or not count == len(positions) == len(begin) == len(end):
        raise ValueError("locate: queues must have each environment")
    if count and not 0 <= env_ids.min() <= env_ids.max() < envs:
        raise ValueError("locate: environments must be known")
    starts, closed = queues.reshape(2, -1)
    for env_id in np.unique(env_ids).tolist():
        first, stop = int(firsts[env_id]), int(stops[env_id])
        if not 0 <= first <= stop <= len(starts):
            raise ValueError("locate: queues must be within their array")
        here = np.flatnonzero(env_ids == env_id)
        after = np.searchsorted(starts[first:stop], positions[here], "right") + first
        begin[here] = np.where(after > first, starts.take(after - 1, mode="clip"), alive[env_id])
        last = seen[env_id] - ((newest[env_id] & FINAL) != 0)
        end[here] = np.where(after < stop, closed.take(after, mode="clip"), last)


def known(
    flags: Bytes,
    slots: int,
    num_envs: int,
    time_major: bool,
    heads: Ids,
    env_ids: Ids,
    ends: Ids,
    /,
) -> None:
    """Leave out last steps whose next observation is not known.

    Args:
        flags: See `legal`, as the next four.
        slots: See `legal`.
        num_envs: See `legal`.
        time_major: See `legal`.
        heads: See `legal`.
        env_ids: int64 ``[N]``.
        ends: int64 ``[N]``, one past the last step of each episode; one less is written
            where no final row is there.

    Raises:
        ValueError: Shapes do not fit each other, or there is no such row.
    """
    fits = len(flags) == slots * num_envs and len(heads) == num_envs
    if not fits or len(env_ids) != len(ends):
        raise ValueError("known: flags must have every row, and arrays one length")
    rows, _ = _rows(env_ids, ends, slots, num_envs, time_major)
    ends -= (ends >= heads[env_ids]) | ((flags[rows] & FINAL) == 0)


def hindsight(
    key: int,
    stream: int,
    ratio: float,
    kind: int,
    begins: Ids,
    stops: Ids,
    starts: Ids,
    lasts: Ids,
    chosen: Bools,
    rows: Ids,
    later: Ids,
    /,
) -> None:
    """Draw which steps get another goal, and the steps that give it.

    Args:
        key: In ``[0, 2**64)``, the first half of Philox's key.
        stream: In ``[0, 2**64)``, the second.
        ratio: Chance that a step is chosen.
        kind: 0 for a step from the start on, 1 for the last one, 2 for any one.
        begins: int64 ``[N]``, first steps of the episodes.
        stops: int64 ``[N]``, one past the last steps that give goals.
        starts: int64 ``[N]``, the steps.
        lasts: int64 ``[N]``, the last steps folded into them, which must give goals.
        chosen: bool ``[N]``, written.
        rows: int64 ``[N]``, written: positions of the steps that give goals; the start
            where none is wanted.
        later: int64 ``[N]``, written: the same, from the start on.

    Raises:
        ValueError: Shapes do not fit each other, or a position is less than 0.
    """
    arrays = (begins, stops, starts, lasts, chosen, rows, later)
    if len({len(array) for array in arrays}) != 1:
        raise ValueError("hindsight: arrays must have one length")
    if len(begins) and min(array.min() for array in arrays[:3]) < 0:
        raise ValueError("hindsight: positions must be at least 0")
    philox = np.random.Philox(key=key + (stream << 64))
    chance, share = np.random.Generator(philox).random((2, len(begins)))
    chosen[:] = (chance < ratio) & (lasts < stops)
    later[:] = np.where(chosen, _share_of(starts, stops, share), starts)
    first = begins if kind == 2 else starts
    goal = _share_of(first, stops, np.ones(len(first)) if kind == 1 else share)
    rows[:] = np.where(chosen, goal, starts)


def replace(
    out: NDArray[np.generic], rows: int, which: Ids, values: NDArray[np.generic], /
) -> None:
    """Put values into some rows, over and over where a row is longer.

    Args:
        out: Contiguous, of so many rows, some of them written.
        rows: How many.
        which: int64 ``[M]``; of equal ones the last wins.
        values: Contiguous, a value for each of them, of the same dtype.

    Raises:
        ValueError: Shapes do not fit each other, or there is no such row.
    """
    count = len(which)
    fits = rows >= 0 and out.nbytes % (rows or 1) == values.nbytes % (count or 1) == 0
    fits &= (rows > 0 or not out.nbytes) and (count > 0 or not values.nbytes)
    wide, value_nbytes = out.nbytes // (rows or 1), values.nbytes // (count or 1)
    if not fits or (count and (wide % value_nbytes if value_nbytes else wide)):
        raise ValueError("replace: arrays must hold whole rows")
    if count and not 0 <= which.min() <= which.max() < rows:
        raise ValueError("replace: rows must exist")
    if count and value_nbytes:
        table = out.reshape(-1).view(np.uint8).reshape(rows, -1, value_nbytes)
        table[which] = values.reshape(-1).view(np.uint8).reshape(count, 1, value_nbytes)


def _share_of(first: Ids, stop: Ids, share: NDArray[np.float64]) -> Ids:
    """Positions in ``[first, stop)`` by share in ``[0, 1]``, 1 being the last."""
    length = np.maximum(stop - first, 1)
    steps = np.minimum((share * length).astype(np.int64), length - 1)
    positions: Ids = first + steps
    return positions


def locate_positions(
    rows: Ids,
    stops: Ids,
    slots: int,
    num_envs: int,
    time_major: bool,
    env_ids: Ids,
    positions: Ids,
    /,
) -> None:
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
        raise ValueError("locate_positions: stops must have each environment")
    if len(rows) and not 0 <= rows.min() <= rows.max() < slots * num_envs:
        raise ValueError("locate_positions: rows must be in the ring")
    slots_of, env_ids[:] = np.divmod(rows, num_envs)
    if not time_major:
        env_ids[:], slots_of = np.divmod(rows, slots)
    newest = stops[env_ids] - 1
    positions[:] = newest - (newest - slots_of) % slots


def _together(columns: Ids, start: int, width: int) -> bool:
    """Whether so many columns of `fold_steps` lie together, in order."""
    table = columns.reshape(-1)[: columns.size // 6 * 6].reshape(-1, 6).tolist()
    if not 0 <= start <= len(table) - width or width < 1:
        return False
    group = table[start : start + width]
    return all(
        (first, wide, at_row) == (start, width, at)
        for at, (_, _, _, first, wide, at_row) in enumerate(group)
    )


def _rows(
    env_ids: Ids, positions: Ids, slots: int, num_envs: int, time_major: bool
) -> tuple[Ids, Ids]:
    """Rows of positions, and of those after them."""
    strays = (env_ids < 0) | (env_ids >= num_envs) | (positions < 0)
    if strays.any():
        raise ValueError("environments must be known and positions of at least 0")
    of_env, of_slot = (1, num_envs) if time_major else (slots, 1)
    first = positions % slots
    after = first + 1
    after[after == slots] = 0
    base = env_ids * of_env
    return base + first * of_slot, base + after * of_slot
