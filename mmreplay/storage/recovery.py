"""Decides at open, from COMMIT alone, which rows are alive; there is no repair step.

Within the boot that wrote them live slots are the truth: the page cache outlived the
process, so everything published is there. Otherwise the newest durable slot is, and
everything above its heads is discarded. Nothing else is stored that could disagree.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from mmap import PAGESIZE
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmreplay import process
from mmreplay.disk import files
from mmreplay.disk.files import COPY_ON_WRITE, File, file_system
from mmreplay.disk.lock import FILE_NAME as LOCK
from mmreplay.disk.lock import Owner
from mmreplay.errors import FormatError, RemovedError, ReplayError
from mmreplay.format import commit
from mmreplay.format.commit import Identity, Record, Slots
from mmreplay.format.metadata import FILE_NAME, Metadata, load
from mmreplay.ring import Ring
from mmreplay.storage import commit_state
from mmreplay.storage.commit_state import (
    LATEST_NS,
    CommitReader,
    CommitWriter,
    create_commit,
    no_durable,
    open_commit,
)
from mmreplay.storage.layout import FLAGS

How = Literal["new", "clean", "live", "killed", "power_cut", "failed"]
MEANINGS: dict[How, str] = {
    "new": "new",
    "clean": "closed in order",
    "live": "a writer is at work",
    "killed": "the writer was killed; no published row is lost",
    "failed": "a sync failed: rows above the last commit are discarded",
    "power_cut": "as after a power cut (or a copy): rows above the last commit are discarded",
}
DISCARDING = ("power_cut", "failed")
LOOK_EVERY_S = 0.01
GENERATION = re.compile("data-([0-9]{6})")
HALF = "tmp-snapshot"
"""Marks a folder that a snapshot or a repair fills, and owns, until it is whole."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What opening found.

    Attributes:
        how: ``"new"``; ``"clean"`` (closed in order); ``"live"`` (a writer holds
            it); ``"killed"`` (the writer died, nothing published is lost);
            ``"power_cut"`` (the machine stopped, or the folder is a copy: rows
            above the last commit are cut); ``"failed"`` (a sync failed: they are cut
            likewise, as it is not known which of them reached the disk).
        heads: int64 ``[E]``, where each environment goes on.
        committed: int64 ``[E]``, heads that a power cut would leave.
        cut_rows: Rows known to have been published and cut; a lower bound.
        given_up_rows: Rows that were committed and overwritten since.
        removed: Left-over temporary files that the writer swept.
        last_cut_rows: Like cut_rows, of the last opening that cut any in this
            generation, which may be long ago.
    """

    how: How
    heads: NDArray[np.int64]
    committed: NDArray[np.int64]
    cut_rows: int = 0
    given_up_rows: int = 0
    removed: tuple[str, ...] = ()
    last_cut_rows: int = 0

    @property
    def meaning(self) -> str:
        """What `how` means for the rows, in words."""
        return MEANINGS[self.how]


def identify(
    file: File, metadata: Metadata, lock_held: Callable[[], bool] = commit.not_held
) -> Identity:
    """Say what a trusted record of this COMMIT file must name.

    Args:
        file: COMMIT.
        metadata: Its generation's.
        lock_held: See `Identity`; by default no other process holds the lock.
    """
    return Identity(
        metadata.uuid, metadata.generation, process.boot_id(), *file.identity(), lock_held
    )


def create(
    folder: Path,
    metadata: Metadata,
    heads: NDArray[np.int64] | None = None,
    tails: NDArray[np.int64] | None = None,
    heap_heads: NDArray[np.int64] | None = None,
    heap_tails: NDArray[np.int64] | None = None,
) -> None:
    """Create the COMMIT file of a new generation.

    Args:
        folder: The generation's folder.
        metadata: What it will be.
        heads: int64 ``[E]``, positions to go on from; 0 for a new buffer.
        tails: int64 ``[E]``, oldest positions alive.
        heap_heads: int64 ``[E]``, heap positions to go on from, by default 0, where a
            field varies.
        heap_tails: int64 ``[E]``, where values begin, by default 0; likewise.
    """
    zeros = np.zeros(metadata.ring.num_envs, np.int64)
    heads = zeros if heads is None else heads
    tails = zeros if tails is None else tails
    heap: tuple[NDArray[np.int64] | None, ...] = (None, None)
    if metadata.heap_nbytes:
        heap = (
            zeros if heap_heads is None else heap_heads,
            zeros if heap_tails is None else heap_tails,
        )

    def first(file: File) -> Record:
        known = identify(file, metadata)
        # What it is made with is committed with it.
        time_ns = min(time.time_ns(), LATEST_NS) if heads.any() else 0
        return Record(
            1,
            1,
            commit.CLEAN,
            known.boot_id,
            known.uuid,
            known.generation,
            known.device,
            known.inode,
            time_ns,
            heads,
            heads,
            tails,
            zeros,
            birth=known.birth,
            heap_heads=heap[0],
            heap_tails=heap[1],
        )

    if heads.any():
        _reserve_next(folder / FLAGS, metadata.ring, heads)
    create_commit(folder, metadata.ring.num_envs, metadata.heap_nbytes, first)


def _reserve_next(path: Path, ring: Ring, heads: NDArray[np.int64]) -> None:
    """Reserve the flags behind the newest rows, which are looked at with these.

    They were never written, and to read a hole is a SIGBUS where tmpfs is full.
    """
    file = File.open(path, ring.num_rows, writable=True)
    try:
        rows = ring.rows(np.arange(ring.num_envs), heads)
        for page in np.unique(rows // PAGESIZE).tolist():
            first = page * PAGESIZE
            file.allocate(first, min(PAGESIZE, file.nbytes - first))
    finally:
        file.close()


def settle(
    slots: Slots, identity: Identity, metadata: Metadata, folder: Path
) -> tuple[Record, Record, Recovery]:
    """Choose what is published and what is durable.

    Returns:
        The live record, the durable one, and what was found.

    Raises:
        CorruptError: No durable slot is whole.
    """
    # Live and durable slots answer two questions. What readers may see is the newest
    # live record, if its page cache still exists. What the next power cut would leave
    # is the newest durable record, in any case.
    durable = commit.newest_durable(slots)
    if durable is None:
        raise no_durable(folder)
    live = commit.newest_live(slots, identity)
    limits = commit.highest_limit(slots)
    # Rows below these limits may have been overwritten, by any writer.
    lost = limits - metadata.ring.slots
    how = _how(live, durable)
    interrupted = live is not None and _interrupted(live, durable)
    best = durable if live is None else live
    chosen = _lift(best, limits, lost)
    discarded, overwritten = 0, 0
    if how in DISCARDING:
        # Records of the last writer say how far it got, as far as they reached the
        # disk: a lower bound. Those of earlier epochs speak of rows that were dropped.
        seen = [r.heads for r in slots if r is not None and r.epoch == durable.epoch]
        discarded = int((np.max(seen, axis=0) - best.heads).clip(0).sum())
        discarded = max(discarded, best.cut_rows) if interrupted else discarded
        before = np.maximum(best.tails, best.heads - metadata.ring.capacity)
        overwritten = int(np.minimum(lost - before, best.heads - before).clip(0).sum())
    last = discarded if how in DISCARDING else best.cut_rows
    report = Recovery(how, chosen.heads, durable.heads, discarded, overwritten, last_cut_rows=last)
    return chosen, _lift(durable, limits, lost), report


def _how(live: Record | None, durable: Record) -> How:
    if durable.flags & commit.CLEAN and (live is None or _same(live, durable)):
        return "clean"
    if live is not None and not _interrupted(live, durable):
        return "killed"
    return "failed" if durable.flags & commit.POISONED else "power_cut"


def _interrupted(live: Record, durable: Record) -> bool:
    """Whether an open that discarded rows was killed before it reported them."""
    return live.cut_epoch == live.epoch > durable.epoch


def _same(live: Record, durable: Record) -> bool:
    return bool((live.heads == durable.heads).all())


def _lift(record: Record, limits: NDArray[np.int64], lost: NDArray[np.int64]) -> Record:
    """Give up what may have been overwritten; positions never restart."""
    # A head below its tail is raised to it: where the ring overwrote all rows of the
    # last commit the buffer is empty, and goes on at the limit. To restart lower would
    # give two rows one position, and priorities to the wrong one.
    tails = np.maximum(record.tails, lost)
    heads = np.maximum(record.heads, tails)
    return replace(record, heads=heads, tails=tails, limits=np.maximum(limits, heads))


def open_reader(folder: Path, metadata: Metadata) -> tuple[CommitReader, Recovery]:
    """Open the COMMIT file of a generation for reading; changes nothing."""
    num_envs, heap_nbytes = metadata.ring.num_envs, metadata.heap_nbytes
    file, data = open_commit(folder, num_envs, heap_nbytes, writable=False)
    try:
        identity = identify(file, metadata, lambda: Owner(folder.parent).alive)
        slots = _read_whole(file, data, metadata)
        live, _, report = settle(slots, identity, metadata, folder)
        # Records stored from now on in the open file are its own. Those that it held
        # before, and that are not trusted, have no higher sequence number.
        numbers = [r.sequence for r in map(slots.__getitem__, commit.LIVE_SLOTS) if r]
        start = replace(live, sequence=max([live.sequence, *numbers]))
        identity = replace(identity, lock_held=lambda: True)
        return CommitReader(file, identity, start, heap_nbytes), report
    except BaseException:
        file.close()
        raise


def _read_whole(file: File, data: bytes, metadata: Metadata) -> Slots:
    """Read again while a live writer keeps both live slots torn under our eyes.

    The durable slot would do, but it is older than what was published, and would
    be reported as a power cut. Torn slots that do not change are not being stored.
    """
    deadline = time.monotonic() + commit_state.PATIENCE_S
    while True:
        slots = _split(data, metadata)
        if any(slots[slot] is not None for slot in commit.LIVE_SLOTS):
            return slots
        before, data = data, file.pread(len(data), 0)
        if data == before:
            return slots
        if time.monotonic() > deadline:
            raise commit_state.starved(file.path)


def open_writer(folder: Path, metadata: Metadata) -> tuple[CommitWriter, Recovery]:
    """Open the COMMIT file for writing and put all four slots in one epoch.

    Idempotent under a crash at any point of itself: each slot rewritten says what
    the next opening would decide anyway, and the newest is never the first to go.
    """
    num_envs, heap_nbytes = metadata.ring.num_envs, metadata.heap_nbytes
    file, data = open_commit(folder, num_envs, heap_nbytes, writable=True)
    try:
        # Where a store goes to new blocks, no space can be reserved for it, and on a
        # full disk it is a SIGBUS: there live slots are written.
        if file_system(folder) not in COPY_ON_WRITE:
            file.map_writable()
        identity = identify(file, metadata)
        slots = _split(data, metadata)
        live, durable, report = settle(slots, identity, metadata, folder)
        # Above every record that is valid, trusted or not: a slot that an earlier
        # writer left can then never outrank one of this writer's.
        epoch = 1 + max(record.epoch for record in slots if record is not None)
        number = 1 + max(record.sequence for record in slots if record is not None)
        fresh = replace(
            live,
            epoch=epoch,
            flags=0,
            boot_id=identity.boot_id,
            device=identity.device,
            inode=identity.inode,
            birth=identity.birth,
        )
        if report.how in DISCARDING:
            fresh = _record_discard(fresh, live, report)
        # Live first: a durable slot of the new epoch alone would hide what was
        # published and not yet committed. Written, not stored: a copy may share its
        # blocks with the original, and only a write can say that the disk is full.
        size = commit.record_nbytes(num_envs, heap_nbytes)
        for slot in _oldest_first(slots, commit.LIVE_SLOTS):
            fresh = replace(fresh, sequence=number)
            file.pwrite(fresh.encode(), size * slot)
            number += 1
        # A kill before this leaves live slots of the new epoch, which say what was
        # decided above, and the durable ones as they were: the next open decides the
        # same. So it does after each of the writes below.
        order = _oldest_first(slots, commit.DURABLE_SLOTS)
        _sync_inherited(file, data, size, order[-1])
        written = durable
        # Its own tails, not the live ones: a power cut would leave these, and what they
        # let be read may not be overwritten before a later record says so.
        for slot in order:
            written = replace(
                fresh,
                heads=durable.heads,
                tails=durable.tails,
                sequence=number,
                limits=durable.limits,
                time_ns=durable.time_ns,
                heap_heads=durable.heap_heads,
                heap_tails=durable.heap_tails,
            )
            file.pwrite(written.encode(), size * slot)
            # After each, not once: a power cut may tear every slot that was written and
            # not synced, and with both torn the buffer cannot be opened at all.
            file.sync()
            number += 1
        writer = CommitWriter(file, identity, fresh, written, order[0], heap_nbytes)
        return writer, report
    except BaseException:
        file.close()
        raise


def _record_discard(fresh: Record, live: Record, report: Recovery) -> Record:
    """Say in a record that its epoch began by cutting, for readers of earlier ones."""
    # Readers of an earlier epoch compare what they know with the lowest of the cuts of
    # this boot: two openings may have dropped rows since they looked.
    low = fresh.heads
    if live.cut_epoch and live.boot_id == fresh.boot_id:
        low = np.minimum(low, live.cuts)
    epoch = fresh.epoch
    return replace(fresh, cuts=low, cut_epoch=epoch, cut_rows=report.cut_rows)


def _sync_inherited(file: File, data: bytes, size: int, newest: int) -> None:
    """Make durable what a killed writer may have written and not synced.

    Its last durable slot is the newest here and overwritten last, but what a power cut
    would leave of it may be torn, or older than the slot that goes first. It is
    written again, as it is: after a sync that failed the kernel owes it no more.
    """
    file.pwrite(data[size * newest : size * (newest + 1)], size * newest)
    file.sync()


def _split(data: bytes, metadata: Metadata) -> Slots:
    num_envs, heap_nbytes = metadata.ring.num_envs, metadata.heap_nbytes
    return commit.split(data, metadata.uuid, metadata.generation, num_envs, heap_nbytes)


def _oldest_first(slots: Slots, which: tuple[int, int]) -> list[int]:
    """Order two slots so that the newest whole one is overwritten last."""
    ages = {}
    for slot in which:
        record = slots[slot]
        ages[slot] = (0, 0) if record is None else (record.epoch, record.sequence)
    return sorted(which, key=lambda slot: ages[slot])


class FolderWatch:
    """Where an open buffer was opened, to see that it is still there.

    A folder that was renamed, without another one at its path, is still the same.

    Attributes:
        identity: Of the open files; a copy of the folder has another one.
    """

    __slots__ = (
        "_commit",
        "_due_s",
        "_file",
        "_metadata",
        "_number",
        "_opened",
        "_root",
        "identity",
    )

    def __init__(self, root: Path, metadata: Metadata, file: File) -> None:
        """Remember a folder that was opened.

        Args:
            root: The buffer's folder; links to it are resolved now.
            metadata: The generation that was opened.
            file: Its COMMIT, which keeps its number while it is open.
        """
        self._opened, self._root = root, Path(os.path.realpath(root))
        # To join a path takes longer than to look it up.
        self._commit = str(self._root / metadata.folder / file.path.name)
        self._metadata, self._file = metadata, file
        # No other file gets it while this one is open.
        device, number, birth = file.identity()
        self._number = device, number
        # Without the device, whose number may change with a boot.
        self.identity = f"{metadata.uuid.hex()}-{number:x}-{birth.hex()}"
        self._due_s = 0.0

    def look(self) -> bool:
        """Check as `refuse_removed` does, for readers, before each draw.

        A deleted folder is noticed at once. What the path leads to takes longer to
        look up, and is looked at again after `LOOK_EVERY_S`.
        """
        # One fstat a draw, and the whole path once in 10 ms: a small batch takes 20 us,
        # beside which the look-up of every folder of a path counts.
        now = time.monotonic()
        try:
            if now < self._due_s and os.fstat(self._file.fd).st_nlink:
                return False
        except OSError:
            # Another thread has just closed it: what the path leads to tells.
            pass
        newer = self.refuse_removed()
        self._due_s = now + LOOK_EVERY_S
        return newer

    def refuse_removed(self) -> bool:
        """Refuse to go on in a folder that was deleted, or that another one replaced.

        Returns:
            Whether the path leads to a later generation, which readers follow.

        Raises:
            RemovedError: The folder is not to be found by its path any more.
        """
        hidden = False
        try:
            status = os.stat(self._commit)
            if (status.st_dev, status.st_ino) == self._number:
                return False
        except OSError as error:
            # A folder that may not be passed through may still be the same.
            hidden = error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
        try:
            opened = os.fstat(self._file.fd)
        except OSError:
            opened = None
        if opened is None or (opened.st_dev, opened.st_ino) != self._number:
            # Another thread has just closed it: nothing is known.
            return False
        if hidden and opened.st_nlink:
            return False
        return self._explain(opened.st_nlink)

    def in_place(self) -> bool:
        """Whether the path that it was opened by leads to the open files.

        Stricter than `refuse_removed`: a folder that was renamed is not in place.
        """
        name = os.path.basename(self._commit)
        try:
            status = os.stat(self._opened / self._metadata.folder / name)
        except OSError as error:
            # A folder that may not be passed through may still be the same.
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
        return (status.st_dev, status.st_ino) == self._number

    def folder_now(self) -> Path:
        """Return where the folder is now, which may have been renamed.

        Where that is not known, it is the path that it was opened by.
        """
        if not os.path.lexists(self._opened):
            with suppress(OSError, IndexError):
                there = Path(os.readlink(f"/proc/self/fd/{self._file.fd}")).parents[1]
                if there.is_dir():
                    return there
        return self._opened

    def refuse_elsewhere(self) -> None:
        """Refuse to use the path where it leads to another folder.

        `refuse_removed` ignores a link that was changed: open files are still the same.
        New files at the path would be made in the other folder.

        Raises:
            RemovedError: The path leads to another folder, or the folder was deleted.
        """
        if self.refuse_removed() or not os.path.lexists(self._opened):
            return
        if Path(os.path.realpath(self._opened)) != self._root:
            raise RemovedError(
                f"{self._opened} leads to another folder now, but {self._root} is "
                "still open. Close this buffer, and open that path.",
                errno_=errno.ESTALE,
            )

    def _explain(self, num_links: int) -> bool:
        """Tell what became of COMMIT, which is not where it was."""
        root, metadata = self._root, self._metadata
        if not os.path.exists(root):
            if num_links:
                return False
        else:
            with suppress(FormatError):
                there = load(root)
                newer = there.generation > metadata.generation
                if there.uuid == metadata.uuid and newer:
                    return True
        if num_links:
            raise RemovedError(
                f"{root} leads to another folder now: the open one was moved, with all "
                "its rows. Close this buffer, and open it by its new path.",
                errno_=errno.ESTALE,
            )
        raise RemovedError(
            f"{root} was deleted while it was open; its rows are lost once no process "
            "has it open. Save them from its writer with mmreplay.export.",
            errno_=errno.ENOENT,
        )


def mark_half(folder: Path) -> None:
    """Mark a new folder as one that is being filled."""
    # On the disk before the first file: after a power cut a folder without the mark is
    # the user's own, and is never emptied.
    File.create(folder / HALF, 0).close()
    files.sync_folder(folder)


def clear_half(folder: Path) -> None:
    """Empty a folder that was being filled when its process was stopped.

    Called with the folder's lock held, which stays.
    """
    if not (folder / HALF).exists():
        return
    # The mark goes last, after a sync: a kill in between leaves a marked folder, which
    # is emptied again. Without the sync a power cut could keep files and lose the mark.
    for name in files.names(folder):
        if name not in (LOCK, HALF):
            files.remove_tree(folder / name)
    files.sync_folder(folder)
    files.remove_tree(folder / HALF)


def withdraw(folder: Path, data: str, there: bool, error: BaseException) -> None:
    """Give back what a creation that failed had made, but for what was there before.

    Called with the folder's lock held. What Ctrl-C interrupted is left for the next
    creation, which continues from there.
    """
    # The error says why the creation failed, not which file could not be removed.
    with suppress(OSError):
        if isinstance(error, Exception) and not (folder / FILE_NAME).exists():
            files.remove_tree(folder / data)
            if not there:
                files.remove_tree(folder / LOCK)
                # Others' files in it keep it.
                files.disk.rmdir(folder)


def sweep(folder: Path, metadata: Metadata) -> tuple[str, ...]:
    """Remove our temporary files and folders of earlier or unborn generations.

    Only the writer calls it, with the lock held. Other unknown names are left for
    `verify` to report.
    """
    removed = []
    for path in map(folder.joinpath, files.names(folder)):
        # Folders of data too: a writer that was killed between the rename of
        # metadata.json and this left the old one, or before it the new one. Only
        # metadata.json says which of them counts.
        generation = GENERATION.fullmatch(path.name)
        if generation and path.name != metadata.folder:
            # If this fails, readers of the old folder miss the switch, and no data.
            with suppress(ReplayError):
                _tell_moved(path, int(generation[1]), metadata)
        elif not path.name.startswith("tmp-"):
            continue
        files.remove_tree(path)
        removed.append(path.name)
    return tuple(removed)


def _tell_moved(folder: Path, generation: int, metadata: Metadata) -> None:
    """Tell readers of an earlier generation to open again, as its writer should have.

    A writer that dies between the rename of metadata.json and its last record
    leaves them with a folder that looks alive and never changes again.
    """
    if generation >= metadata.generation or folder.is_symlink():
        return
    num_envs, heap_nbytes = metadata.ring.num_envs, metadata.heap_nbytes
    file, data = open_commit(folder, num_envs, heap_nbytes, writable=True)
    try:
        slots = commit.split(data, metadata.uuid, generation, num_envs, heap_nbytes)
        # It decides nothing about rows, so st_dev and st_ino are enough.
        live = commit.newest_live(slots, identify(file, metadata, lambda: True))
        if live is not None and not live.flags & commit.MOVED:
            last = replace(live, flags=commit.MOVED, sequence=live.sequence + 1)
            older, _ = _oldest_first(slots, commit.LIVE_SLOTS)
            size = commit.record_nbytes(num_envs, heap_nbytes)
            file.pwrite(last.encode(), size * older)
    finally:
        file.close()
