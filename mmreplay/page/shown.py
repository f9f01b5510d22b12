"""One buffer of the page: opened to read, with its state and the results made of it.

Results are kept by key and version. The version changes with whatever a result is made
of: the generation, cut rows, heads and oldest rows. Each key has a lock of its own:
with one lock for all, a result that needs another one would wait for itself.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.disk.lock import Owner
from mmreplay.episodes.starts import StartView, num_legal
from mmreplay.errors import CorruptError, RemovedError, ReplayError
from mmreplay.page import faults
from mmreplay.page.requests import UNREADABLE, Refusal

MAX_RESULTS = 64
MAX_AGE_S = 1.0
"""A result of a growing buffer is made again after so many seconds,"""
PATIENCE = 4
"""or after so many times what it took to make."""
RETRY_S = 1.0
"""An opening that failed is tried again after so many seconds."""
DRAWING_S = 30.0
"""The view that draws are made from is dropped so long after the last of them."""
RATE_S = 6.0
"""Steps per second are a mean over so many seconds."""

PROCESS = secrets.token_hex(4)

T = TypeVar("T")


class SharedView(StartView, Protocol):
    """A view that threads draw from in turns.

    Attributes:
        lock: Held from a look at the view to the end of the draw.
    """

    lock: threading.RLock

    def refresh(self) -> None:
        """Look at what the writer published since."""


@dataclass(slots=True)
class Result(Generic[T]):
    """A result and what it was made of.

    Attributes:
        value: The result.
        version: Of the buffer that it was made of.
        made: When, by the monotonic clock.
        seconds: How long it took.
    """

    value: T
    version: str
    made: float
    seconds: float


@dataclass(slots=True)
class _ResultSlot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    result: Result[Any] | None = None


class ShownBuffer:
    """One buffer of the page.

    Attributes:
        path: Its folder, as it was given.
        name: The folder's name.
        images: Stated layout by the path of an image field.
    """

    def __init__(self, path: Path, images: Mapping[str, str] | None = None) -> None:
        """Show a buffer; it is opened when it is first needed.

        Args:
            path: Its folder.
            images: Layout by path of a field, such as ``{"observation": "HWC"}``.
        """
        self.path = path
        self.name = path.name or str(path)
        self.images = dict(images or {})
        self._lock = threading.Lock()
        self._buffer: ReplayBuffer | None = None
        self._error: Exception | None = None
        self._tried = -RETRY_S
        self._entries: OrderedDict[object, _ResultSlot] = OrderedDict()
        self._heads: deque[tuple[float, int]] = deque()
        self._was_live = False
        self._fixed: dict[object, Any] = {}
        self._faults = faults.count()
        self._files = DataFiles()
        self._drawn_from: tuple[SharedView, SharedView] | None = None
        self._drawn = 0.0
        self._indexed: SharedView | None = None
        self._num_starts: int | None = None

    def buffer(self) -> ReplayBuffer:
        """Return the open buffer.

        Raises:
            Refusal: It cannot be opened, or its folder was removed.
        """
        with self._lock:
            if self._faults != faults.count():
                # It may show zeros in the place of what could not be read.
                self._faults = faults.count()
                self._buffer, self._tried = None, -RETRY_S
                self._entries.clear()
                self._fixed.clear()
            if self._buffer is None:
                if time.monotonic() - self._tried >= RETRY_S:
                    self._open()
                if self._buffer is None:
                    assert self._error is not None
                    raise Refusal(UNREADABLE, str(self._error)) from self._error
            buffer = self._buffer
        try:
            self._files.check()
            # A look at the writer's heads; a folder that was deleted is seen here.
            _ = buffer.span
            self._files.note(buffer)
        except (ReplayError, OSError) as error:
            self._drop(buffer, error)
            raise Refusal(UNREADABLE, str(error)) from error
        return buffer

    def _open(self) -> None:
        self._tried = time.monotonic()
        try:
            self._buffer = ReplayBuffer.open(self.path)
            self._error, self._files = None, DataFiles()
            self._drawn_from = None
            # It may be another buffer than the one that was shown before.
            self._heads.clear()
            self._was_live = self._buffer.recovery.how == "live"
        except Exception as error:  # files of any content: the page shows what is wrong
            # What was removed while it was shown stays so until the path leads to a
            # buffer again: the last state is shown, not that there is no folder.
            if not isinstance(self._error, RemovedError) or self.path.exists():
                self._error = error

    def _drop(self, buffer: ReplayBuffer, error: Exception) -> None:
        """Close a buffer that cannot be read any more; it is opened again later."""
        with self._lock:
            if self._buffer is buffer:
                self._buffer, self._error = None, error
                self._tried = time.monotonic()

    def close(self) -> None:
        """Close the buffer and forget all results."""
        with self._lock:
            buffer, self._buffer = self._buffer, None
            self._drawn_from = None
            self._entries.clear()
        if buffer is not None:
            buffer.close()

    @property
    def removed(self) -> bool:
        """Whether its folder was removed while it was shown."""
        return isinstance(self._error, RemovedError)

    def version(self) -> str:
        """Return a text that changes with what the buffer holds.

        Raises:
            Refusal: The buffer cannot be read.
        """
        return version_of(self.buffer())

    def view_to_draw_from(self) -> SharedView:
        """Return a still view; see `ReplayBuffer.still_view`.

        A draw may take seconds, and holds its view's lock: everything else on the page
        goes on beside it. Refresh the view before a draw.

        Raises:
            Refusal: The buffer cannot be read.
        """
        reader = self.buffer().view
        with self._lock:
            if self._drawn_from is None or self._drawn_from[0] is not reader:
                self._drawn_from = reader, reader.still()
            self._drawn = time.monotonic()
            return self._drawn_from[1]

    def note_index(self, view: SharedView) -> None:
        """Note that episodes are indexed: from here on states say how many starts are.

        A large buffer's first index takes longer than a state may.
        """
        self._indexed, self._num_starts = view, None

    def _starts(self, view: SharedView) -> int | None:
        """Legal starts; None before `note_index`."""
        if view is not self._indexed:
            return None
        if view.lock.acquire(blocking=False):
            try:
                self._num_starts = num_legal(view)
            finally:
                view.lock.release()
        return self._num_starts

    def result(
        self, key: object, make: Callable[[ReplayBuffer], T], max_age_s: float | None = None
    ) -> Result[T]:
        """Return what was made of the buffer for a key, or make it.

        Of a buffer that grows, a result may be a second old, or four times as old as
        it took to make: a large buffer must not keep the server busy. Of one whose
        folder was removed, the last result is returned.

        Args:
            key: What the result is, hashable.
            make: Makes it. It may ask for results of other keys.
            max_age_s: How old a result may be instead.

        Raises:
            Refusal: The buffer cannot be read, and there is no result from before.
        """
        with self._lock:
            slot = self._entries.setdefault(key, _ResultSlot())
            self._entries.move_to_end(key)
            while len(self._entries) > MAX_RESULTS:
                self._entries.popitem(last=False)
        with slot.lock:
            last, before = slot.result, faults.count()
            try:
                buffer = self.buffer()
            except Refusal:
                if last is not None and self.removed:
                    return last
                raise
            version = version_of(buffer)
            now = time.monotonic()
            if last is not None:
                max_age_s = max_age_s or max(MAX_AGE_S, PATIENCE * last.seconds)
                if last.version == version or now - last.made < max_age_s:
                    return last
            value = make(buffer)
            if faults.count() != before:
                raise Refusal(UNREADABLE, faults.TEXT)
            result = Result(value, version, now, time.monotonic() - now)
            slot.result = result
            return result

    def fixed(self, key: object, make: Callable[[ReplayBuffer], T]) -> T:
        """Return what was made first for a key, whatever was added since.

        Raises:
            Refusal: The buffer cannot be read.
        """
        with self._lock:
            if key in self._fixed:
                value: T = self._fixed[key]
                return value
        before = faults.count()
        value = make(self.buffer())
        if faults.count() != before:
            raise Refusal(UNREADABLE, faults.TEXT)
        with self._lock:
            if len(self._fixed) >= MAX_RESULTS:
                self._fixed.clear()
            return cast(T, self._fixed.setdefault(key, value))

    def state(self) -> dict[str, Any]:
        """Return whether the buffer is written now, and how far, as JSON values.

        Returns:
            ``state`` is ``"live"``, ``"gone"`` (its writer ended without closing it),
            ``"closed"``, ``"removed"`` or ``"unreadable"``. ``rate`` is in rows per
            second of all environments, and ``starts`` the steps that can be drawn; None
            where they are not known yet. ``version``
            changes with rows and commits. ``moved`` is where a folder is now that was
            renamed while it was shown, and ``text`` says so; else None and empty.
        """
        try:
            buffer = self.buffer()
        except Refusal as refusal:
            return {
                "state": "removed" if self.removed else "unreadable",
                "text": refusal.text,
                "repair": shlex.join(
                    ["mmreplay", "repair", str(self.path), f"{self.path}-repaired"]
                ),
            }
        span = buffer.span
        head, rows = int(span.stop.sum()), int(span.lengths.sum())
        now = time.monotonic()
        with self._lock:
            self._heads.append((now, head))
            while now - self._heads[0][0] > RATE_S:
                self._heads.popleft()
            if now - self._drawn > DRAWING_S:
                self._drawn_from = None  # Its index takes some 50 bytes an episode.
            (begin, first) = self._heads[0]
        seconds = now - begin
        folder = buffer.folder_now()
        state, commit = self._writer(buffer, folder)
        pid = Owner(folder).pid if state == "live" and folder else None
        moved = folder is not None and folder != buffer.path
        return {
            "state": state,
            "text": f"{self.path} leads nowhere: the folder was moved to {folder}. "
            "The page still follows it."
            if moved
            else "",
            "moved": str(folder) if moved else None,
            "rows": rows,
            "starts": self._starts(buffer.view),
            "head": head,
            "rate": (head - first) / seconds if seconds > 0.3 else None,
            "pid": pid,
            "version": f"{version_of(buffer)}{stamp_of(commit)}.{state}",
        }

    def writer(self, buffer: ReplayBuffer) -> str:
        """Return ``"live"``, ``"gone"`` or ``"closed"``; see `state`."""
        return self._writer(buffer, buffer.folder_now())[0]

    def opening(self, buffer: ReplayBuffer) -> str:
        """Say whether a writer is at work, and what became of rows if it ended."""
        state, found = self.writer(buffer), buffer.recovery
        if state == "live":
            found = replace(found, how="live")
        elif state == "gone":
            found = replace(found, how="killed")
        elif self._was_live:
            found = replace(found, how="clean")
        return found.meaning

    def _writer(
        self, buffer: ReplayBuffer, folder: Path | None
    ) -> tuple[str, dict[str, Any] | None]:
        """The writer's state, and the last commit."""
        live = folder is not None and Owner(folder).alive
        self._was_live |= live
        # After the lock: a writer commits before it lets go of it.
        commit = last_commit(buffer)
        if live:
            return "live", commit
        gone = self._ended_without_closing(buffer, commit)
        return "gone" if gone else "closed", commit

    def _ended_without_closing(self, buffer: ReplayBuffer, commit: dict[str, Any] | None) -> bool:
        if not self._was_live:
            return buffer.recovery.how == "killed"
        return commit is None or not commit["clean"]


def last_commit(buffer: ReplayBuffer) -> dict[str, Any] | None:
    """Return the last commit; None where there is none, or it cannot be read now.

    Returns:
        ``time`` (Unix time in seconds), ``behind`` (rows since) and ``clean`` (the
        writer closed the buffer).
    """
    if buffer.path is None:
        return None
    try:
        commit = buffer.facts().commit()
    except (ReplayError, OSError):
        return None
    return {
        "time": commit.time_ns / 1e9,
        "behind": int(buffer.span.stop.sum()) - int(commit.heads.sum()),
        "clean": commit.clean,
    }


def stamp_of(commit: dict[str, Any] | None) -> str:
    """Return a text that changes with the last commit; to add to a version."""
    return "" if commit is None else f".{commit['time']:.6f}{commit['clean']:d}"


class DataFiles:
    """The sizes of a generation's files, which are mapped while the buffer is open.

    To read a mapped page that was cut off its file ends the process (SIGBUS). So the
    sizes are looked at before each request.
    """

    def __init__(self) -> None:
        """Know no files yet."""
        self._generation = -1
        self._sizes: dict[Path, tuple[int, int]] = {}

    def check(self) -> None:
        """Check the files that were noted.

        Raises:
            CorruptError: A file is shorter than it was.
        """
        for path, (inode, nbytes) in self._sizes.items():
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue  # A mapping outlives the name of its file.
            if status.st_ino == inode and status.st_size < nbytes:
                raise CorruptError(
                    f"{path} was cut from {nbytes:,} to {status.st_size:,} bytes while "
                    "it was shown. Restore the buffer from a copy."
                )

    def note(self, buffer: ReplayBuffer) -> None:
        """Note the files of a buffer, if another generation was noted before."""
        generation = buffer.metadata.generation
        if buffer.path is None or generation == self._generation:
            return
        self._sizes = {}
        with os.scandir(buffer.path / buffer.metadata.folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    status = entry.stat()
                    self._sizes[Path(entry.path)] = status.st_ino, status.st_size
        self._generation = generation


def rows_version(buffer: ReplayBuffer) -> str:
    """Return a text that stays while the rows alive are the same rows.

    It names the buffer and this process as well as generation and cut rows: another
    page may have this one's port later, and a browser keeps frames by their address.
    """
    home, faulted = buffer.view.home, faults.count() or ""
    uuid = home.uuid.hex()[:8]
    return f"{uuid}{PROCESS}{faulted}-{home.generation}.{home.cut_epoch}"


def version_of(buffer: ReplayBuffer) -> str:
    """Return a text that changes with buffer, cut rows, heads and oldest rows.

    Values of mutable fields change without any of these: the version of a buffer that
    has some changes every second as well.
    """
    span = buffer.view.span
    digest = hashlib.blake2s(span.stop.tobytes() + span.first.tobytes(), digest_size=8)
    version = f"{rows_version(buffer)}.{digest.hexdigest()}"
    if any(field.mutable for field in buffer.schema.drawn.fields.values()):
        version += f".{int(time.time())}"
    return version


class BackgroundReader:
    """One thread that reads what takes longer than a request may.

    Jobs of all buffers take turns: a job reads for a fraction of a second, and says
    whether there is more to read.
    """

    def __init__(self) -> None:
        """Make the reader; its thread starts with the first job."""
        self._jobs: OrderedDict[object, Callable[[], bool]] = OrderedDict()
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, key: object, job: Callable[[], bool]) -> None:
        """Run a job until it returns False; one that is running already goes on.

        Args:
            key: What the job is for.
            job: Reads some more; returns whether there is more to read.
        """
        with self._condition:
            if self._closed or key in self._jobs:
                return
            self._jobs[key] = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mmreplay-page", daemon=True)
                self._thread.start()
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._jobs and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                key = next(iter(self._jobs))
                job = self._jobs[key]
            try:
                with faults.Watch():
                    more = job()
            except Exception:  # a buffer that became unreadable: requests say so
                more = False
            with self._condition:
                if more:
                    self._jobs.move_to_end(key)
                else:
                    self._jobs.pop(key, None)

    def close(self) -> None:
        """End the thread after its current job."""
        with self._condition:
            self._closed = True
            self._condition.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=10)
