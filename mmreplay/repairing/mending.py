"""Repair: what is proven of a damaged buffer, beside it, and what was cut."""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay import files, recovery
from mmreplay.buffer import lifecycle, rebuild
from mmreplay.buffer.filling import filled
from mmreplay.buffer.state import left_behind, read_statistics, write_statistics
from mmreplay.errors import OR_REPAIR, FormatError, LockedError
from mmreplay.format import metadata as metadata_file
from mmreplay.repairing.evidence import Evidence, gather, refuse_oversized, row_sizes
from mmreplay.repairing.kept import Flags, Kept, Sorter
from mmreplay.repairing.pieces import Progress, pieces
from mmreplay.repairing.sealed import copied, opened, unreadable
from mmreplay.storage.engines import create_store
from mmreplay.storage.lock import WriterLock, holder, locked
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.placement import FLAGS, SUMS
from mmreplay.storage.zarr import ZarrStore

Array = NDArray[np.int64]
CHUNK_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Cut:
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
class Repaired:
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
    cuts: tuple[Cut, ...]
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
) -> Repaired:
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
    source = lifecycle.absolute(path)
    named = "damaged" if in_place else "repaired"
    where = lifecycle.absolute(f"{source}-{named}" if target is None else target)
    if locked(source):
        raise LockedError(
            f"{source} is being written by {holder(source)}, expected no writer; wait "
            "until it closes, or take a snapshot"
        )
    with ExitStack() as stack:
        stack.enter_context(_without_advice())
        evidence = gather(source, None if like is None else lifecycle.absolute(like))
        stack.callback(evidence.close)
        refuse_oversized(evidence)
        lifecycle.refuse_inside(where, source)
        kept, cuts = _choose(evidence, keep_unproven)
        stack.enter_context(filled(where, False))
        if in_place:
            # Who came to write meanwhile would go on in what is moved away.
            stack.callback(WriterLock(source).release)
        rows = _build(evidence, kept, where, progress)
        if in_place:
            files.exchange(source, where)
            source, where = where, source
    return Repaired(source, where, rows, tuple(cuts), tuple(evidence.restored))


@contextmanager
def _without_advice() -> Iterator[None]:
    """Whoever repairs already is not told to."""
    try:
        yield
    except FormatError as error:
        if OR_REPAIR not in str(error):
            raise
        raise type(error)(str(error).replace(OR_REPAIR, "")) from error


def _choose(evidence: Evidence, keep_unproven: bool) -> tuple[list[Kept], list[Cut]]:
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
        cuts += [Cut(env_id, a, b, why) for a, b, why in _joined(sorted(gone))]
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


def _flagged(good: list[tuple[int, int]], found: Kept) -> list[tuple[int, int, str]]:
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
    evidence: Evidence, kept: list[Kept], target: Path, progress: Progress | None
) -> int:
    """Fill the target's folder; metadata.json is the last file to appear in it."""
    old = evidence.metadata
    metadata = replace(old, uuid=secrets.token_bytes(16), generation=1)
    folder = target / metadata.folder
    files.make_folder(folder)
    totals = np.array([each.total for each in kept])
    tails = evidence.heads - totals
    # Forged metadata may claim a ring of any size, with sparse files.
    there = sum(file.disk_nbytes()[1] for file in evidence.opened.values())
    store = create_store(folder, metadata, there)
    try:
        if isinstance(store, ZarrStore):
            copied(evidence, kept, store, tails, progress)
        else:
            _write(evidence, kept, store, tails, progress)
        rebuild.sum_blocks(store, tails, evidence.heads)
        store.sync_sums()
        # Last: what this gives back nothing asks space for again.
        if isinstance(store, ZarrStore):
            store.settle(tails, evidence.heads)
        store.sync()
    finally:
        store.close()
        store.unmap()
    recovery.create(folder, metadata, evidence.heads, tails)
    files.sync_folder(folder)
    _copy_statistics(evidence, target)
    evidence.restored += left_behind(evidence.path)
    encoded = metadata_file.encode(metadata)
    files.replace_bytes(target / metadata_file.FILE_NAME, encoded)
    files.remove_tree(target / recovery.HALF)
    return int(totals.sum())


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
    kept: list[Kept],
    store: MemmapStore,
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
