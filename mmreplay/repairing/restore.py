"""Which rows of one environment are kept, and what their flags become at the seams.

The rows that stay, piece by piece: where they lie, and where they are to go.

Repair of a compressed buffer: its rows are unpacked, and packed anew.

Repair: what is proven of a damaged buffer, beside it, and what was cut.
"""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer import opening
from mmreplay.buffer.new_generation import NewGeneration, new_folder
from mmreplay.buffer.statistics import left_behind, read_statistics, write_statistics
from mmreplay.disk import files
from mmreplay.disk.lock import WriterLock, holder, locked
from mmreplay.episodes import ALL_FLAGS, BREAK, CUT, FINAL, START
from mmreplay.errors import OR_REPAIR, FormatError, LockedError, called
from mmreplay.repairing.scan import (
    Evidence,
    ShortStore,
    gather,
    open_store,
    refuse_oversized,
    row_sizes,
)
from mmreplay.ring import Ring, Run, runs
from mmreplay.storage.layout import FLAGS, SUMS
from mmreplay.storage.store import CheckedStore
from mmreplay.storage.zarr.engine import ZarrStore
from mmreplay.verify.boundaries import alone_problem, pair_problem
from mmreplay.verify.rows import unreadable as torn

Array = NDArray[np.int64]
Flags = NDArray[np.uint8]
CHUNK_ROWS = 1 << 20


@dataclass(slots=True)
class SurvivingRows:
    """Rows of one environment that stay, in stretches, oldest first.

    Attributes:
        firsts: First position of each stretch.
        counts: Rows of each.
        marks: Flags by position, of the rows whose flags change.
        torn: Rows that begin an episode now, whose first steps are cut.
    """

    firsts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    marks: dict[int, int] = field(default_factory=dict)
    torn: int = 0

    @property
    def total(self) -> int:
        """Rows that stay."""
        return sum(self.counts)

    def keep(self, positions: Array) -> None:
        """Keep rows, growing, above all kept before."""
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        for part in np.split(positions, breaks):
            if (
                len(part)
                and self.counts
                and self.firsts[-1] + self.counts[-1] == part[0]
            ):
                self.counts[-1] += len(part)
            elif len(part):
                self.firsts.append(int(part[0]))
                self.counts.append(len(part))

    def sources(self, head: int, positions: Array) -> Array:
        """Where the rows of new positions come from; the newest one stays where it is.

        Args:
            head: The environment's.
            positions: int64 ``[N]``, new positions in ``[head - total, head)``.
        """
        stops = head - self.total + np.cumsum(self.counts)
        which = np.searchsorted(stops, positions, side="right")
        begins = stops - np.array(self.counts)
        found: Array = np.array(self.firsts)[which] + positions - begins[which]
        return found


class Sorter:
    """Goes through the rows of one environment, and keeps those that make sense."""

    def __init__(self, final_follows: bool) -> None:
        self.alone = np.array([not alone_problem(flags) for flags in range(256)])
        known = range(ALL_FLAGS + 1)
        pairs = [[not pair_problem(b, a, final_follows) for a in known] for b in known]
        self.pairs = np.array(pairs)

    def sort(
        self,
        stretches: list[tuple[int, int]],
        read: Callable[[int, int], Flags],
    ) -> SurvivingRows:
        """Keep the rows of stretches whose flags are possible.

        Args:
            stretches: ``(first, stop)`` of the rows not known to be bad.
            read: Flags of positions ``[first, stop)``.
        """
        kept = SurvivingRows()
        last: tuple[int, int] | None = None
        for first, stop in stretches:
            for at in range(first, stop, CHUNK_ROWS):
                flags = read(at, min(at + CHUNK_ROWS, stop))
                last = self._chunk(at, flags, kept, last)
        return kept

    def _chunk(
        self,
        first: int,
        flags: Flags,
        kept: SurvivingRows,
        last: tuple[int, int] | None,
    ) -> tuple[int, int] | None:
        """Keep rows of a chunk; last is the position and flags of the row before."""
        chosen = np.flatnonzero(self.alone[flags])
        positions, found = first + chosen, flags[chosen].copy()
        while len(positions):
            seams, bad = self._problems(positions, found, last)
            orphans = (seams | bad) & (found == FINAL)
            if not orphans.any():
                break
            # What they ended is gone: nobody can be told what they followed.
            positions, found = positions[~orphans], found[~orphans]
        if not len(positions):
            return last
        for index in np.flatnonzero(seams | bad).tolist():
            # Of the step before a seam nothing is known any more, its cut neither.
            own = int(found[index]) & ~(CUT if seams[index] else 0)
            kept.torn += not own & START
            found[index] = own | START | BREAK
            kept.marks[int(positions[index])] = int(found[index])
        kept.keep(positions)
        return int(positions[-1]), int(found[-1])

    def _problems(
        self, positions: Array, flags: Flags, last: tuple[int, int] | None
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Rows that follow a gap, and rows that cannot follow the one before."""
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
class Piece:
    """Rows of one environment that are copied at once.

    Attributes:
        sources: int64 ``[N]``, their positions in the damaged buffer, growing.
        rows: int64 ``[N]``, where they lie in it.
        to: Where they go.
        marks: Flags by position, of the rows whose flags change.
    """

    sources: Array
    rows: Array
    to: list[Run]
    marks: dict[int, int]

    def mark(self, flags: Flags) -> None:
        """Put the flags of seams among those that were read, uint8 ``[N]``."""
        first, last = int(self.sources[0]), int(self.sources[-1])
        for position, value in self.marks.items():
            if first <= position <= last:
                flags[np.searchsorted(self.sources, position)] = value


def pieces(
    evidence: Evidence,
    kept: list[SurvivingRows],
    tails: Array,
    size: int,
    progress: Progress | None,
) -> Iterator[Piece]:
    """Go through all that stays, environment by environment, oldest first.

    Args:
        evidence: Of the damaged buffer.
        kept: What stays, by environment.
        tails: int64 ``[E]``, the oldest position of the new buffer.
        size: Rows of a piece, at most.
        progress: Called when a piece is done.
    """
    ring = evidence.metadata.ring
    done, total = 0, int((evidence.heads - tails).sum())
    for env_id, each in enumerate(kept):
        tail, head = int(tails[env_id]), int(evidence.heads[env_id])
        for first in range(tail, head, size):
            positions = np.arange(first, min(first + size, head))
            sources = each.sources(head, positions)
            ids = np.full(len(positions), env_id)
            rows, to = ring.rows(ids, sources), runs(ring.rows(ids, positions))
            yield Piece(sources, rows, to, each.marks)
            done += len(positions)
            if progress is not None:
                called("progress", progress, done, total)


Stretch = tuple[int, int]
UNPACKED_ROWS = 1024
LOOK_ROWS = 1 << 16


@contextmanager
def opened(evidence: Evidence) -> Iterator[ShortStore]:
    """The rows of the damaged buffer, through its shards."""
    folder = evidence.path / evidence.metadata.folder
    store = open_store(folder, evidence.metadata)
    try:
        yield store
    finally:
        store.close()


def unreadable(evidence: Evidence, store: ShortStore, env_id: int) -> list[Stretch]:
    """Stretches in reach that are not there, or unreadable and without a checksum."""
    size = evidence.metadata.ring.block_rows
    first, head = int(evidence.firsts[env_id]), int(evidence.heads[env_id])
    begin = min(max(first, int(evidence.unsummed[env_id])), head)
    end = max(begin, min(int(evidence.summed[env_id]) // size * size, head))
    found: list[Stretch] = []
    for inside in evidence.alive(env_id)[0]:
        if store.held < store.ring.num_rows:
            found += _stretches(store.ring, env_id, inside, store.absent)
        for low, high in ((first, -(-begin // size) * size), (end, head)):
            span = range(max(low, inside.start), min(high, inside.stop))
            found += _unplaced(evidence, env_id, span)
            for at, stop, _ in torn(store, env_id, span.start, span.stop):
                found.append((at, stop))
    return found


def _unplaced(evidence: Evidence, env_id: int, span: range) -> Iterator[Stretch]:
    """Stretches of rows that may be elsewhere, where no checksum would tell."""
    ring, placed = evidence.metadata.ring, evidence.placed()
    if placed < ring.num_rows:
        yield from _stretches(ring, env_id, span, lambda rows: rows >= placed)


def _stretches(
    ring: Ring, env_id: int, span: range, gone: Callable[[Array], NDArray[np.bool_]]
) -> Iterator[Stretch]:
    """Stretches of those positions of a span whose rows are gone."""
    for low in range(span.start, span.stop, LOOK_ROWS):
        positions = np.arange(low, min(low + LOOK_ROWS, span.stop))
        lost = gone(ring.rows(np.full(len(positions), env_id), positions))
        edges = np.flatnonzero(np.diff(lost, prepend=False, append=False)) + low
        yield from map(tuple, edges.reshape(-1, 2).tolist())


def copied(
    evidence: Evidence,
    kept: list[SurvivingRows],
    store: ZarrStore,
    tails: Array,
    progress: Progress | None,
) -> None:
    """Copy the rows that stay to their new positions; places that are full are sealed.

    Args:
        evidence: Of the damaged buffer.
        kept: What stays, by environment.
        store: The new buffer's.
        tails: int64 ``[E]``, the oldest position of the new buffer.
        progress: Called with (rows written, rows to write).
    """
    paths = store.schema.paths
    with opened(evidence) as source:
        for piece in pieces(evidence, kept, tails, UNPACKED_ROWS, progress):
            flags = source.flags(piece.rows).copy()
            piece.mark(flags)
            source.prefetch(piece.rows, paths)
            store.write(piece.to, source.gather(piece.rows, paths), flags)


CHUNK_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class DroppedRows:
    """Rows that were alive and are not in the repaired buffer.

    Attributes:
        env_id: Their environment.
        first: The first position, in the damaged buffer.
        stop: The position after the last one.
        why: ``"checksum"`` (the data does not fit it), ``"unproven"`` (the checksum
            itself is lost), ``"missing"`` (the file ends before, or cannot be read),
            ``"flags"`` (no episode has them so).

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
    """What `repair` made.

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
        """Rows that were cut."""
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
    buffer has a uuid of its own, and samplers' states of the old one do not fit it.
    What is left of an episode behind a cut passes for a whole one; `restored` says of
    how many.

    A file that is missing, empty or cut costs the rows that only it held. Without a
    whole record in COMMIT the heads are found from the checksums. One bit
    of metadata.json is turned back; more takes another copy. The damaged buffer is not
    changed. Memory: a few MiB, and 1 byte a row of the ring's flags.

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
    if locked(source):
        raise LockedError(
            f"{source} is being written by {holder(source)}, expected no writer; wait "
            "until it closes, or take a snapshot"
        )
    with ExitStack() as stack:
        stack.enter_context(_without_advice())
        evidence = gather(source, None if like is None else opening.absolute(like))
        stack.callback(evidence.close)
        refuse_oversized(evidence)
        opening.refuse_inside(where, source)
        kept, cuts = _choose(evidence, keep_unproven)
        stack.enter_context(new_folder(where, False))
        if in_place:
            # Who came to write meanwhile would go on in what is moved away.
            stack.callback(WriterLock(source).release)
        rows = _build(evidence, kept, where, progress)
        if in_place:
            files.exchange(source, where)
            source, where = where, source
    return RepairReport(source, where, rows, tuple(cuts), tuple(evidence.restored))


@contextmanager
def _without_advice() -> Iterator[None]:
    """Whoever repairs already is not told to."""
    try:
        yield
    except FormatError as error:
        if OR_REPAIR not in str(error):
            raise
        raise type(error)(str(error).replace(OR_REPAIR, "")) from error


def _choose(
    evidence: Evidence, keep_unproven: bool
) -> tuple[list[SurvivingRows], list[DroppedRows]]:
    """What stays of each environment, and what does not."""
    ring = evidence.metadata.ring
    bad: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for env_id, block, why in evidence.bad_blocks():
        if why != "unproven" or not keep_unproven:
            first = block * ring.block_rows
            bad[env_id].append((first, first + ring.block_rows, why))
    for env_id, first, stop in _missing(evidence):
        bad[env_id].append((first, stop, "missing"))
    sorter = Sorter(evidence.metadata.autoreset == "next_step")
    kept, cuts = [], []
    for env_id in range(ring.num_envs):
        first, head = int(evidence.firsts[env_id]), int(evidence.heads[env_id])
        lost = sorted(bad.pop(env_id, ()))
        good, gone = _rest(first, head, lost)
        found = sorter.sort(good, _reader(evidence, env_id))
        gone += _flagged(good, found)
        kept.append(found)
        cuts += [DroppedRows(env_id, a, b, why) for a, b, why in _joined(sorted(gone))]
    torn = sum(each.torn for each in kept)
    if torn:
        evidence.restored.append(
            f"episodes that lost their first steps: {torn}; each begins behind rows "
            "that are cut, and passes for a whole one to frame stacks and episode "
            "samplers"
        )
    return kept, cuts


def _joined(gone: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Stretches of which one ends where the next begins, for one reason, as one."""
    joined: list[tuple[int, int, str]] = []
    for first, stop, why in gone:
        if joined and joined[-1][1:] == (first, why):
            first = joined.pop()[0]
        joined.append((first, stop, why))
    return joined


def _missing(evidence: Evidence) -> Iterator[tuple[int, int, int]]:
    """(environment, first, stop) of rows that no file holds, or that are unreadable."""
    num_envs = evidence.metadata.ring.num_envs
    for env_id in range(num_envs):
        for beyond in evidence.alive(env_id)[1]:
            yield env_id, beyond.start, beyond.stop
    if evidence.metadata.engine == "zarr":
        with opened(evidence) as store:
            for env_id in range(num_envs):
                for first, stop in unreadable(evidence, store, env_id):
                    yield env_id, first, stop


def _rest(
    first: int, head: int, lost: list[tuple[int, int, str]]
) -> tuple[list[tuple[int, int]], list[tuple[int, int, str]]]:
    """Divide ``[first, head)`` into what is not lost, and what is and why."""
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


def _flagged(
    good: list[tuple[int, int]], found: SurvivingRows
) -> list[tuple[int, int, str]]:
    """Rows of good stretches that were not kept all the same."""
    gone = []
    kept = list(zip(found.firsts, found.counts, strict=True))
    for first, stop in good:
        inside = [(a, a + n, "flags") for a, n in kept if a < stop and a + n > first]
        gone += [(a, b, "flags") for a, b in _rest(first, stop, inside)[0]]
    return gone


def _reader(evidence: Evidence, env_id: int) -> Callable[[int, int], Flags]:
    ring, file = evidence.metadata.ring, evidence.opened[FLAGS]

    def read(first: int, stop: int) -> Flags:
        parts = []
        for row, step, count in ring.stretch(env_id, first, stop):
            data = file.pread((count - 1) * step + 1, row)
            parts.append(np.frombuffer(data, np.uint8)[::step])
        return np.concatenate(parts)

    return read


def _build(
    evidence: Evidence,
    kept: list[SurvivingRows],
    target: Path,
    progress: Progress | None,
) -> int:
    """Fill the target's folder; metadata.json is the last file to appear in it."""
    old = evidence.metadata
    metadata = replace(old, uuid=secrets.token_bytes(16), generation=1)
    totals = np.array([each.total for each in kept])
    tails = evidence.heads - totals
    # Forged metadata may claim a ring of any size, with sparse files.
    existing_nbytes = sum(file.disk_nbytes()[1] for file in evidence.opened.values())
    with NewGeneration(target, metadata, max_sums_nbytes=existing_nbytes) as new:
        write_surviving_rows(evidence, kept, new.store, tails, progress)
        new.sum_blocks(tails, evidence.heads)
        new.finish(evidence.heads, tails)
    _copy_statistics(evidence, target)
    evidence.restored += left_behind(evidence.path)
    new.publish()
    return int(totals.sum())


def write_surviving_rows(
    evidence: Evidence,
    kept: list[SurvivingRows],
    store: CheckedStore,
    tails: Array,
    progress: Progress | None,
) -> None:
    """Write the rows that survive to their new positions.

    Args:
        evidence: Of the damaged buffer.
        kept: What stays, by environment.
        store: The new buffer's.
        tails: int64 ``[E]``, the oldest position of the new buffer.
        progress: Called with (rows written, rows to write).
    """
    if isinstance(store, ZarrStore):
        copied(evidence, kept, store, tails, progress)
    else:
        _write(evidence, kept, store, tails, progress)


def _copy_statistics(evidence: Evidence, target: Path) -> None:
    """Take the statistics along; that they are damaged and left out is told."""
    try:
        found = read_statistics(evidence.path)
    except FormatError as error:
        evidence.restored.append(f"statistics are left out: {error}")
        return
    if found:
        write_statistics(target, found)


def _write(
    evidence: Evidence,
    kept: list[SurvivingRows],
    store: CheckedStore,
    tails: Array,
    progress: Progress | None,
) -> None:
    """Copy the rows that stay to their new positions, environment by environment."""
    nbytes = row_sizes(evidence.metadata)
    size = max(1, CHUNK_NBYTES // sum(nbytes.values()))
    # An empty file cannot be mapped, and none of its rows is kept.
    maps = {
        name: np.frombuffer(file.map_readonly() if file.nbytes else b"", np.uint8)
        for name, file in evidence.opened.items()
        if name in nbytes
    }
    for piece in pieces(evidence, kept, tails, size, progress):
        for file in store.files:
            if file.path.name != SUMS:
                width = nbytes[file.path.name]
                every = maps[file.path.name]
                table = every[: len(every) // width * width].reshape(-1, width)
                data = table[piece.rows]
                if file.path.name == FLAGS:
                    piece.mark(data)
                for row, begin, end in piece.to:
                    part = data[begin:end].reshape(-1)
                    file.pwrite(part.data, row * width)
