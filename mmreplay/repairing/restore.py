"""Repair of a damaged buffer: its proven rows in a new buffer beside it.

The module chooses the rows of each environment that survive, sets the flags where
rows are missing, copies the rows to their new positions and reports the dropped ones.
Rows of a compressed buffer are unpacked and packed again.
"""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer import opening
from mmreplay.buffer.bulk_writer import BulkWriter
from mmreplay.buffer.new_generation import new_folder
from mmreplay.buffer.statistics import left_behind, read_statistics
from mmreplay.disk import files
from mmreplay.disk.lock import Owner, WriterLock
from mmreplay.episodes import ALL_FLAGS, BREAK, CUT, FINAL, START
from mmreplay.episodes.boundaries import alone_problem, pair_problem
from mmreplay.errors import OR_REPAIR, FormatError, LockedError, called
from mmreplay.format.heap import References, nbytes_of, offsets
from mmreplay.format.metadata import Engine
from mmreplay.ragged import Ragged
from mmreplay.repairing.scan import (
    DamageScan,
    ShortStore,
    gather,
    open_store,
    refuse_oversized,
    row_sizes,
)
from mmreplay.repairing.values import SealedValueScan, ValueScan, read_values, rows_at_once
from mmreplay.ring import Ring
from mmreplay.schema import Field
from mmreplay.storage.layout import FLAGS, HEAP, RECORDS, record_layout
from mmreplay.verify.rows import unreadable as unreadable_blocks

Array = NDArray[np.int64]
Flags = NDArray[np.uint8]
CHUNK_ROWS = 1 << 20


@dataclass(slots=True)
class SurvivingRows:
    """Rows of one environment that survive, as intervals, oldest first.

    Attributes:
        firsts: First position of each interval.
        counts: Rows of each.
        marks: Flags by position, of the rows whose flags change.
        missing_starts: Rows that begin an episode now because its first steps are lost.
    """

    firsts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    marks: dict[int, int] = field(default_factory=dict)
    missing_starts: int = 0

    @property
    def total(self) -> int:
        """Number of surviving rows."""
        return sum(self.counts)

    def keep(self, positions: Array) -> None:
        """Keep rows, growing, above all kept before."""
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        for part in np.split(positions, breaks):
            if len(part) and self.counts and self.firsts[-1] + self.counts[-1] == part[0]:
                self.counts[-1] += len(part)
            elif len(part):
                self.firsts.append(int(part[0]))
                self.counts.append(len(part))

    @property
    def intervals(self) -> list[tuple[int, int]]:
        """``(first, stop)`` of each, oldest first."""
        return [
            (first, first + count) for first, count in zip(self.firsts, self.counts, strict=True)
        ]

    def drop_oldest(self, count: int) -> list[tuple[int, int]]:
        """Drop so many of the oldest rows, and return them as intervals."""
        dropped = []
        while count:
            first, here = self.firsts[0], min(count, self.counts[0])
            dropped.append((first, first + here))
            self.firsts[0] += here
            self.counts[0] -= here
            if not self.counts[0]:
                del self.firsts[0], self.counts[0]
            count -= here
        return dropped

    def sources(self, head: int, positions: Array) -> Array:
        """Return the old positions of new positions; the newest row does not move.

        Args:
            head: The environment's.
            positions: int64 ``[N]``, new positions in ``[head - total, head)``.
        """
        stops = head - self.total + np.cumsum(self.counts)
        which = np.searchsorted(stops, positions, side="right")
        begins = stops - np.array(self.counts)
        sources: Array = np.array(self.firsts)[which] + positions - begins[which]
        return sources


class Sorter:
    """Selects the rows of one environment whose flags are possible."""

    def __init__(self, final_follows: bool) -> None:
        self.alone = np.array([not alone_problem(flags) for flags in range(256)])
        known = range(ALL_FLAGS + 1)
        pairs = [[not pair_problem(b, a, final_follows) for a in known] for b in known]
        self.pairs = np.array(pairs)

    def sort(
        self, intervals: list[tuple[int, int]], read: Callable[[int, int], Flags]
    ) -> SurvivingRows:
        """Keep the rows of stretches whose flags are possible.

        Args:
            intervals: ``(first, stop)`` of the rows not known to be bad.
            read: Flags of positions ``[first, stop)``.
        """
        surviving = SurvivingRows()
        last: tuple[int, int] | None = None
        for first, stop in intervals:
            for at in range(first, stop, CHUNK_ROWS):
                flags = read(at, min(at + CHUNK_ROWS, stop))
                last = self._chunk(at, flags, surviving, last)
        return surviving

    def _chunk(
        self, first: int, flags: Flags, surviving: SurvivingRows, last: tuple[int, int] | None
    ) -> tuple[int, int] | None:
        """Keep rows of a chunk; last is the position and flags of the row before."""
        chosen = np.flatnonzero(self.alone[flags])
        positions, found = first + chosen, flags[chosen].copy()
        while len(positions):
            seams, bad = self._problems(positions, found, last)
            orphans = (seams | bad) & (found == FINAL)
            if not orphans.any():
                break
            # The steps before them are lost, so no episode has these as its end.
            positions, found = positions[~orphans], found[~orphans]
        if not len(positions):
            return last
        for index in np.flatnonzero(seams | bad).tolist():
            # Of the step before a seam nothing is known any more, its cut neither.
            own = int(found[index]) & ~(CUT if seams[index] else 0)
            surviving.missing_starts += not own & START
            found[index] = own | START | BREAK
            surviving.marks[int(positions[index])] = int(found[index])
        surviving.keep(positions)
        return int(positions[-1]), int(found[-1])

    def _problems(
        self, positions: Array, flags: Flags, last: tuple[int, int] | None
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return rows that follow a gap, and rows that cannot follow the row before."""
        before_position, before = (positions[0] - 1, None) if last is None else last
        earlier = np.concatenate([[before_position], positions[:-1]])
        seams = earlier + 1 != positions
        head = flags[:1] if before is None else np.array([before], np.uint8)
        bad = ~self.pairs[np.concatenate([head, flags[:-1]]), flags]
        if before is None:
            bad[0] = positions[0] == 0 and not flags[0] & START
        return seams, bad


Progress = Callable[[int, int], None]
"""Called with (rows written, rows to write)."""


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Rows of one environment that are copied at once.

    Attributes:
        env_id: The environment.
        positions: int64 ``[N]``, their positions in the new buffer.
        sources: int64 ``[N]``, their positions in the damaged buffer, growing.
        rows: int64 ``[N]``, where they lie in it.
        marks: Flags by position, of the rows whose flags change.
    """

    env_id: int
    positions: Array
    sources: Array
    rows: Array
    marks: dict[int, int]

    def mark(self, flags: Flags) -> None:
        """Put the flags of seams among those that were read, uint8 ``[N]``."""
        first, last = int(self.sources[0]), int(self.sources[-1])
        for position, value in self.marks.items():
            if first <= position <= last:
                flags[np.searchsorted(self.sources, position)] = value


def copy_blocks(
    scan: DamageScan,
    surviving: list[SurvivingRows],
    tails: Array,
    size: int,
    progress: Progress | None,
) -> Iterator[CopyBlock]:
    """Yield all surviving rows, environment by environment, oldest first.

    Args:
        scan: Of the damaged buffer.
        surviving: What stays, by environment.
        tails: int64 ``[E]``, the oldest position of the new buffer.
        size: Rows of a block, at most.
        progress: Called after each block.
    """
    ring = scan.metadata.ring
    done, total = 0, int((scan.heads - tails).sum())
    for env_id, rows_of_env in enumerate(surviving):
        tail, head = int(tails[env_id]), int(scan.heads[env_id])
        for first in range(tail, head, size):
            positions = np.arange(first, min(first + size, head))
            sources = rows_of_env.sources(head, positions)
            ids = np.full(len(positions), env_id)
            rows = ring.rows(ids, sources)
            yield CopyBlock(env_id, positions, sources, rows, rows_of_env.marks)
            done += len(positions)
            if progress is not None:
                called("progress", progress, done, total)


Interval = tuple[int, int]
CHUNK_NBYTES = 4 << 20
UNPACKED_ROWS, UNPACKED_NBYTES = 1024, 64 << 20
"""Rows of a compressed buffer that are copied at once, and bytes of the longest
values of rows of either engine."""
LOOK_ROWS = 1 << 16


@contextmanager
def opened(scan: DamageScan) -> Iterator[ShortStore]:
    """Open the rows of the damaged buffer."""
    folder = scan.path / scan.metadata.folder
    store = open_store(folder, scan.metadata)
    try:
        yield store
    finally:
        store.close()


def unreadable(scan: DamageScan, store: ShortStore, env_id: int) -> list[Interval]:
    """Return the intervals that are missing, or unreadable and without checksum."""
    size = scan.metadata.ring.block_rows
    first, head = int(scan.firsts[env_id]), int(scan.heads[env_id])
    begin = min(max(first, int(scan.unsummed[env_id])), head)
    end = max(begin, min(int(scan.summed[env_id]) // size * size, head))
    intervals: list[Interval] = []
    for inside in scan.alive(env_id)[0]:
        if store.num_staged < store.ring.num_rows:
            intervals += _intervals(store.ring, env_id, inside, store.absent)
        for low, high in ((first, -(-begin // size) * size), (end, head)):
            span = range(max(low, inside.start), min(high, inside.stop))
            intervals += _misplaced(scan, env_id, span)
            for at, stop, _ in unreadable_blocks(store, env_id, span.start, span.stop):
                intervals.append((at, stop))
    return intervals


def _misplaced(scan: DamageScan, env_id: int, span: range) -> Iterator[Interval]:
    """Yield the intervals of rows that may be misplaced without a checksum to show."""
    ring, placed = scan.metadata.ring, scan.placed()
    if placed < ring.num_rows:
        yield from _intervals(ring, env_id, span, lambda rows: rows >= placed)


def _intervals(
    ring: Ring, env_id: int, span: range, is_lost: Callable[[Array], NDArray[np.bool_]]
) -> Iterator[Interval]:
    """Yield the intervals of a span whose rows are lost."""
    for low in range(span.start, span.stop, LOOK_ROWS):
        positions = np.arange(low, min(low + LOOK_ROWS, span.stop))
        lost = is_lost(ring.rows(np.full(len(positions), env_id), positions))
        edges = np.flatnonzero(np.diff(lost, prepend=False, append=False)) + low
        yield from map(tuple, edges.reshape(-1, 2).tolist())


class FileRows:
    """Rows of a damaged memory-mapped buffer that survive, read from its files.

    Attributes:
        size: Rows to read at once.
    """

    def __init__(self, scan: DamageScan) -> None:
        """Map the files."""
        metadata, nbytes = scan.metadata, row_sizes(scan.metadata)
        self._schema, self._heap_nbytes = metadata.schema, metadata.heap_nbytes
        self._layout = record_layout(metadata.schema)
        self._heap = scan.opened.get(HEAP)
        self._tables = {}
        for name, width in nbytes.items():
            file = scan.opened[name]
            # An empty file cannot be mapped, and none of its rows is kept.
            every = np.frombuffer(file.map_readonly() if file.nbytes else b"", np.uint8)
            self._tables[name] = every[: len(every) // width * width].reshape(-1, width)
        self.size = max(1, CHUNK_NBYTES // sum(nbytes.values()))
        if metadata.schema.varying:
            longest = UNPACKED_NBYTES // metadata.schema.max_heap_nbytes
            self.size = max(1, min(self.size, longest))

    def read(self, block: CopyBlock) -> tuple[dict[str, Any], Flags]:
        """Return the columns of rows, and their flags, uint8 ``[N]``."""
        columns: dict[str, Any] = {}
        record = self._layout.record
        if record is not None:
            records = self._tables[RECORDS][block.rows].view(record)[:, 0]
            for path in record.names or ():
                columns[path] = records[path]
        for path, name in self._layout.large.items():
            field = self._schema.fields[path]
            data = self._tables[name][block.rows]
            columns[path] = data.view(field.numpy).reshape(-1, *field.shape)
        for path in self._schema.varying:
            columns[path] = self._values(path, columns[path], block.env_id)
        return columns, self._tables[FLAGS][block.rows, 0]

    def _values(self, path: str, references: References, env_id: int) -> Ragged:
        """The values of rows, each of which is whole."""
        assert self._heap is not None
        field, env_ids = self._schema.fields[path], np.full(len(references), env_id)
        nbytes = nbytes_of(references, field)
        begins = offsets(references, env_ids, self._heap_nbytes)
        data = [self._heap.pread(int(nbytes[at]), int(begins[at])) for at in np.flatnonzero(nbytes)]
        return _ragged(np.frombuffer(b"".join(data), np.uint8), references, field)


class ShardRows:
    """Rows of a damaged compressed buffer that survive; see `FileRows`."""

    def __init__(self, scan: DamageScan, store: ShortStore) -> None:
        """Read through a store."""
        self._scan, self._store, schema = scan, store, scan.metadata.schema
        self._plain = [path for path in schema.paths if not schema.fields[path].varies]
        self.size = UNPACKED_ROWS
        if schema.varying:
            self.size = min(self.size, rows_at_once(store, UNPACKED_NBYTES))

    def read(self, block: CopyBlock) -> tuple[dict[str, Any], Flags]:
        """See `FileRows.read`."""
        store, schema = self._store, self._store.schema
        flags = store.flags(block.rows).copy()
        store.prefetch(block.rows, schema.paths)
        columns: dict[str, Any] = store.gather(block.rows, self._plain)
        for path in schema.varying:
            references, data, _ = read_values(self._scan, store, path, block.env_id, block.sources)
            columns[path] = _ragged(data, references, schema.fields[path])
        return columns, flags


def _ragged(data: NDArray[np.uint8], references: References, field: Field) -> Ragged:
    """Values that lie one after another."""
    ends = np.zeros(len(references) + 1, np.int64)
    np.cumsum(references["length"], out=ends[1:])
    return Ragged(data.view(field.numpy).reshape(-1, *field.inner), ends)


@dataclass(frozen=True, slots=True)
class DroppedRows:
    """Rows that were alive and are not in the repaired buffer.

    Attributes:
        env_id: Their environment.
        first: The first position, in the damaged buffer.
        stop: The position after the last one.
        why: ``"checksum"`` (the data does not fit it), ``"unproven"`` (the checksum
            itself is lost), ``"missing"`` (the file ends before, or cannot be read),
            ``"value"`` (a value that varies is not where the row says, or does not fit
            its checksum), ``"flags"`` (no episode has them so), ``"heap"`` (intact,
            but values of newer rows fill the new heap up to its reserve).

    Example:
        >>> report = mr.repair("runs/cartpole", "runs/repaired")
        >>> [cut.why for cut in report.cuts]
        []
    """

    env_id: int
    first: int
    stop: int
    why: str


@dataclass(frozen=True, slots=True)
class RepairReport:
    """Result of `repair`.

    Attributes:
        path: Where the damaged buffer is.
        target: Where the new one is.
        rows: Rows in it.
        cuts: What is not in it, by environment and position.
        restored: What was found out in another way than the plain one, or is left out,
            in sentences.

    Example:
        >>> report = mr.repair("runs/cartpole", "runs/repaired")
        >>> report.rows > 0, report.cuts
        (True, ())
    """

    path: Path
    target: Path
    rows: int
    cuts: tuple[DroppedRows, ...]
    restored: tuple[str, ...]

    @property
    def cut_rows(self) -> int:
        """Number of dropped rows."""
        return sum(cut.stop - cut.first for cut in self.cuts)


def repair(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    keep_unproven: bool = False,
    like: str | os.PathLike[str] | None = None,
    in_place: bool = False,
    progress: Progress | None = None,
) -> RepairReport:
    """Restore the newest consistent state of a damaged buffer into a new folder.

    Rows are kept if the checksum of their block fits, or if they never had one (those
    of the newest block, and after the last commit). Where rows are cut between others,
    those after begin an episode (flags START and BREAK), and those before move up to
    them: heads stay as they are, and the newest rows keep their positions. So the new
    buffer has a uuid of its own, and samplers' states of the old one do not fit it;
    their priorities and counts of uses are left out, and `restored` names them.
    What is left of an episode behind a cut passes for a whole one; `restored` says of
    how many.

    Of values that vary each has a checksum of its own: a row whose value does not fit
    it is dropped, and no other. The values go to a new heap; of a heap that was nearly
    full the oldest rows are dropped, so that a reserve is free as after a resize.

    A file that is missing, empty or cut costs the rows that only it held. Without a
    whole record in COMMIT the heads are found from the checksums. One bit
    of metadata.json is turned back; more takes another copy. The damaged buffer is not
    changed. Memory: a few MiB, 64 MiB of values that vary or those of one row, and 1
    byte a row of the ring's flags.

    Args:
        path: The damaged buffer's folder.
        target: A new or empty folder; ``<path>-repaired`` by default.
        keep_unproven: Keep rows whose checksum itself is lost: not there, zeros, or of
            another lap.
        like: A snapshot or copy whose metadata.json is to be believed.
        in_place: Let the new buffer and the damaged one change places in one step once
            it is whole: the target, ``<path>-damaged`` by default, then holds the
            damaged one, unchanged. Who has it open for reading goes on with that.
        progress: Called with (rows written, rows to write).

    Raises:
        FormatError: There is no buffer, or the target holds something.
        CorruptError: Too little is left.
        LockedError: Somebody is writing it.

    Example:
        >>> report = mr.repair("runs/cartpole", "runs/repaired")
        >>> report.cuts  # nothing was damaged
        ()
    """
    source = opening.absolute(path)
    named = "damaged" if in_place else "repaired"
    where = opening.absolute(f"{source}-{named}" if target is None else target)
    owner = Owner(source)
    if owner.alive:
        raise LockedError(
            f"{source} is being written by {owner}. Wait until it closes, or take a snapshot.",
            pid=owner.pid,
            host=owner.host,
        )
    with ExitStack() as stack:
        stack.enter_context(_without_advice())
        scan = gather(source, None if like is None else opening.absolute(like))
        stack.callback(scan.close)
        refuse_oversized(scan)
        opening.refuse_inside(where, source)
        surviving, dropped = _choose(scan, keep_unproven)
        stack.enter_context(new_folder(where, False))
        if in_place:
            # Held until the end: another writer would write to the folder moved away.
            stack.callback(WriterLock(source).release)
        rows = _build(scan, surviving, where, progress)
        if in_place:
            files.exchange(source, where)
            source, where = where, source
    return RepairReport(source, where, rows, tuple(dropped), tuple(scan.restored))


@contextmanager
def _without_advice() -> Iterator[None]:
    """Leave the advice to run repair out of errors: it runs already."""
    try:
        yield
    except FormatError as error:
        if OR_REPAIR not in str(error):
            raise
        raise type(error)(str(error).replace(OR_REPAIR, "")) from error


def _choose(scan: DamageScan, keep_unproven: bool) -> tuple[list[SurvivingRows], list[DroppedRows]]:
    """Choose the rows that survive of each environment, and those dropped."""
    ring = scan.metadata.ring
    bad: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for env_id, block, why in scan.bad_blocks():
        if why != "unproven" or not keep_unproven:
            first = block * ring.block_rows
            bad[env_id].append((first, first + ring.block_rows, why))
    for env_id, first, stop in _missing(scan):
        bad[env_id].append((first, stop, "missing"))
    sorter = Sorter(scan.metadata.autoreset == "next_step")
    surviving, dropped = [], []
    with _value_scan(scan) as values:
        for env_id in range(ring.num_envs):
            first, head = int(scan.firsts[env_id]), int(scan.heads[env_id])
            lost = sorted(bad.pop(env_id, ()))
            good, lost_intervals = _rest(first, head, lost)
            if values is not None:
                lost += [(a, b, "value") for a, b in values.damaged(env_id, good)]
                good, lost_intervals = _rest(first, head, sorted(lost))
            sorted_rows = sorter.sort(good, _reader(scan, env_id))
            lost_intervals += _flagged(good, sorted_rows)
            if values is not None:
                count = values.count_fitting(env_id, sorted_rows.intervals)
                oldest = sorted_rows.drop_oldest(sorted_rows.total - count)
                lost_intervals += [(a, b, "heap") for a, b in oldest]
            surviving.append(sorted_rows)
            dropped += [
                DroppedRows(env_id, a, b, why) for a, b, why in _joined(sorted(lost_intervals))
            ]
    missing_starts = sum(rows_of_env.missing_starts for rows_of_env in surviving)
    if missing_starts:
        scan.restored.append(
            f"episodes that lost their first steps: {missing_starts}; each begins "
            "after dropped rows, and frame stacks and episode samplers read it as a "
            "complete episode"
        )
    return surviving, dropped


@contextmanager
def _value_scan(scan: DamageScan) -> Iterator[ValueScan | SealedValueScan | None]:
    """Look at the values of the damaged buffer; None where no field varies."""
    if not scan.metadata.schema.varying:
        yield None
        return
    with REPAIRS[scan.metadata.engine].values(scan) as values:
        yield values


def _joined(intervals: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Merge adjacent intervals that were dropped for the same reason."""
    joined: list[tuple[int, int, str]] = []
    for first, stop, why in intervals:
        if joined and joined[-1][1:] == (first, why):
            first = joined.pop()[0]
        joined.append((first, stop, why))
    return joined


def _missing(scan: DamageScan) -> Iterator[tuple[int, int, int]]:
    """(environment, first, stop) of rows that no file holds, or that are unreadable."""
    num_envs = scan.metadata.ring.num_envs
    for env_id in range(num_envs):
        for beyond in scan.alive(env_id)[1]:
            yield env_id, beyond.start, beyond.stop
    yield from REPAIRS[scan.metadata.engine].unreadable(scan)


def _rest(
    first: int, head: int, lost: list[tuple[int, int, str]]
) -> tuple[list[tuple[int, int]], list[tuple[int, int, str]]]:
    """Divide ``[first, head)`` into intervals that survive and lost ones, with why."""
    good, gone = [], []
    for begin, end, why in lost:
        # A record that contradicts itself may vouch for blocks above its heads.
        begin, end = min(max(begin, first), head), min(end, head)
        if begin > first:
            good.append((first, begin))
        if end > begin:
            gone.append((begin, end, why))
        first = max(first, end)
    if head > first:
        good.append((first, head))
    return good, gone


def _flagged(good: list[tuple[int, int]], sorted_rows: SurvivingRows) -> list[tuple[int, int, str]]:
    """Return the rows of good intervals that were dropped for their flags."""
    dropped = []
    surviving = list(zip(sorted_rows.firsts, sorted_rows.counts, strict=True))
    for first, stop in good:
        inside = [(a, a + n, "flags") for a, n in surviving if a < stop and a + n > first]
        dropped += [(a, b, "flags") for a, b in _rest(first, stop, inside)[0]]
    return dropped


def _reader(scan: DamageScan, env_id: int) -> Callable[[int, int], Flags]:
    ring, file = scan.metadata.ring, scan.opened[FLAGS]

    def read(first: int, stop: int) -> Flags:
        segments = []
        for row, step, count in ring.split_at_wrap(env_id, first, stop):
            data = file.pread((count - 1) * step + 1, row)
            segments.append(np.frombuffer(data, np.uint8)[::step])
        return np.concatenate(segments)

    return read


def _build(
    scan: DamageScan, surviving: list[SurvivingRows], target: Path, progress: Progress | None
) -> int:
    """Fill the target's folder; metadata.json is the last file to appear in it."""
    metadata = replace(scan.metadata, uuid=secrets.token_bytes(16), generation=1)
    totals = np.array([rows_of_env.total for rows_of_env in surviving])
    tails = scan.heads - totals
    # Forged metadata may claim a ring of any size, with sparse files.
    existing_nbytes = sum(file.disk_nbytes()[1] for file in scan.opened.values())
    bulk = BulkWriter(target, metadata, tails, scan.heads, max_sums_nbytes=existing_nbytes)
    with closing(bulk), REPAIRS[metadata.engine].rows(scan) as rows:
        for block in copy_blocks(scan, surviving, tails, rows.size, progress):
            columns, flags = rows.read(block)
            block.mark(flags)
            env_ids = np.full(len(flags), block.env_id)
            bulk.write(columns, env_ids, block.positions, flags)
        bulk.finish()
    statistics = _statistics(scan)
    scan.restored += left_behind(scan.path)
    bulk.publish(statistics)
    return int(totals.sum())


def _statistics(scan: DamageScan) -> dict[str, Any]:
    """Read the statistics; damaged ones are left out and reported."""
    try:
        return read_statistics(scan.path)
    except FormatError as error:
        scan.restored.append(f"statistics are left out: {error}")
        return {}


@dataclass(frozen=True, slots=True)
class EngineRepair:
    """How a damaged buffer of one engine is read.

    Attributes:
        values: Looks at values that vary.
        unreadable: (environment, first, stop) of rows that no checksum covers and that
            cannot be read, where that is known of no file's end.
        rows: Reads the rows that survive.
    """

    values: Callable[[DamageScan], AbstractContextManager[ValueScan | SealedValueScan]]
    unreadable: Callable[[DamageScan], Iterable[tuple[int, int, int]]]
    rows: Callable[[DamageScan], AbstractContextManager[FileRows | ShardRows]]


@contextmanager
def _sealed_values(scan: DamageScan) -> Iterator[SealedValueScan]:
    with opened(scan) as store:
        yield SealedValueScan(scan, store)


@contextmanager
def _shard_rows(scan: DamageScan) -> Iterator[ShardRows]:
    with opened(scan) as store:
        yield ShardRows(scan, store)


def _unreadable_rows(scan: DamageScan) -> Iterator[tuple[int, int, int]]:
    with opened(scan) as store:
        for env_id in range(scan.metadata.ring.num_envs):
            for first, stop in unreadable(scan, store, env_id):
                yield env_id, first, stop


REPAIRS: Mapping[Engine, EngineRepair] = {
    "memmap": EngineRepair(
        lambda scan: nullcontext(ValueScan(scan)),
        lambda scan: (),
        lambda scan: nullcontext(FileRows(scan)),
    ),
    "zarr": EngineRepair(_sealed_values, _unreadable_rows, _shard_rows),
}
