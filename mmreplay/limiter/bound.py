"""One process's side of a rate limiter: its lock, its counts and its waits."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import struct
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mmreplay import strict_json
from mmreplay.buffer.limiting import Count, Counts, LeftOut
from mmreplay.disk import files
from mmreplay.disk.files import File, refuse_link
from mmreplay.disk.pause import try_lock
from mmreplay.errors import (
    FailedError,
    FormatError,
    ReplayError,
    SchemaError,
    StarvedError,
    system_error,
)
from mmreplay.process import ProcessGuard

if TYPE_CHECKING:
    from mmreplay.limiter.rate_limiter import RateLimiter

FOLDER = "limiter"
SETTINGS = "law.json"
WRITER = "writer"
LEARNERS = tuple(f"learner-{number:03d}" for number in range(256))
COUNTED = struct.Struct("<QQ")
MASK = (1 << 64) - 1
HIGHEST = 1 << 62
SHORTEST_S, LONGEST_S = 0.0005, 0.02

Side = Literal["insert", "sample"]

_bound: weakref.WeakSet[BoundLimit] = weakref.WeakSet()
_binding = threading.Lock()
# Threads that wait now, and for what: they cannot end each other's wait.
_waiting: dict[threading.Thread, tuple[Path, Side]] = {}


class BoundLimit:
    """A limiter bound to a buffer, as one process uses it; see `Limit`."""

    def __init__(
        self, limiter: RateLimiter, folder: Path, count: Count, left_out: LeftOut | None = None
    ) -> None:
        self._limiter = limiter
        self._folder = folder
        self._rows, self._left_out = count, left_out
        self._owner = ProcessGuard("this limiter was bound", "Open the buffer again in the child")
        # Never held while waiting. A signal's handler may close what it interrupts.
        self._lock = threading.RLock()
        self._closed = False
        self._writer: File | None = None
        self._learner: File | None = None
        self._drawn = 0
        # Files of counts are never replaced: each is opened once.
        self._known: dict[str, File] = {}
        self._callers: dict[Side, weakref.WeakSet[threading.Thread]]
        self._callers = {"insert": weakref.WeakSet(), "sample": weakref.WeakSet()}
        self._base = self._agree()
        # By another path it is the same folder.
        self._path = folder.resolve()
        with _binding:
            _bound.add(self)

    def _agree(self) -> int:
        """Check that all use the same settings; return the rows gone before them."""
        path = self._folder / SETTINGS
        refuse_link(self._folder)
        settings = list(self._limiter.settings)
        if not path.exists():
            self._write(path, settings)
        said, base = _parsed(path)
        if said != settings:
            raise SchemaError(
                "limiter: (samples_per_insert, min_size, error_buffer) must be "
                f"{said} as in {path}, got {settings}. Use equal settings in all "
                f"processes, or remove {self._folder} while no process uses it."
            )
        if type(base) is not int or base < 0:
            raise FormatError(
                f"{path}: base must be an integer of at least 0, got {base!r}. Remove "
                f"{self._folder} while no process uses it."
            )
        return base

    def _write(self, path: Path, settings: list[float]) -> None:
        """Write the settings, unless another process comes first, whose base counts."""
        written, alive = self._rows()
        # JSON knows no infinity.
        finite = [None if value == math.inf else value for value in settings]
        text = json.dumps({"law": finite, "base": written - alive}, allow_nan=False)
        files.make_folder(self._folder, exist_ok=True)
        own = path.with_name(f"tmp-{secrets.token_hex(8)}")
        files.replace_bytes(own, text.encode())
        try:
            files.disk.link(own, path)
        except FileExistsError:
            pass
        except OSError:
            # A file system without links.
            if not path.exists():
                files.replace_bytes(path, text.encode())
        finally:
            files.remove_tree(own)
        files.sync_folder(self._folder)

    def await_insert(self) -> None:
        """Return once a row may be written; see `Limit.await_insert`."""
        self.enter("insert")
        # Draws of a learner that is not known yet allow more rows, not fewer.
        if not self._limiter.allows_insert(*self._now(look=False)):
            self._wait("insert")

    def await_sample(self) -> None:
        """Return once an item may be drawn; see `Limit.await_sample`."""
        self.enter("sample")
        if not self._limiter.allows_sample(*self._now(look=True)):
            self._wait("sample")

    def counts(self) -> Counts:
        """Return what is counted now, by all processes; see `Limit.counts`."""
        return Counts(*self._now(look=True))

    def allows_insert(self, count: int = 1) -> bool:
        """Whether so many rows may be written now; see `Limit.allows_insert`."""
        inserts, samples, size = self._now(look=True)
        return self._limiter.allows_insert(inserts + count - 1, samples, size)

    def allows_sample(self, count: int = 1) -> bool:
        """Whether so many items may be drawn now; see `Limit.allows_sample`."""
        # A learner that asks until it may is one: a writer waits for it.
        self.enter("sample")
        inserts, samples, size = self._now(look=True)
        return self._limiter.allows_sample(inserts, samples + count - 1, size)

    def count(self, count: int) -> None:
        """Count items drawn; see `Limit.count`."""
        with self._lock:
            learner = self._seated()
            self._drawn += count
            learner.pwrite(COUNTED.pack(self._drawn, self._drawn ^ MASK), 0)

    def enter(self, side: Side) -> None:
        """Lock the side's file for the process, and note the thread.

        Others who wait see by it that the side can continue.
        """
        with self._lock:
            if side == "sample":
                self._seated()
            else:
                self._check()
                if self._writer is None:
                    self._writer = self._take(WRITER, 0)
            self._callers[side].add(threading.current_thread())

    def _check(self) -> None:
        self._owner.check()
        if self._closed:
            raise FailedError(
                f"{self._folder.parent} is closed. Close a buffer only after all "
                "threads have finished with it, and open it again."
            )

    def _take(self, name: str, nbytes: int) -> File | None:
        """Take the lock of a file, or nothing where somebody has it."""
        path = self._folder / name
        if not path.exists():
            try:
                File.create(path, nbytes).close()
            except FailedError as error:
                if error.errno != errno.EEXIST:
                    raise
        file = File.open(path, None, writable=True)
        if try_lock(file):
            return file
        file.close()
        return None

    def _seated(self) -> File:
        """Lock the first free count, and continue from its value."""
        self._check()
        if self._learner is not None:
            return self._learner
        for name in LEARNERS:
            file = self._take(name, COUNTED.size)
            if file is not None:
                # A process killed while it created the file left it too short.
                if file.nbytes != COUNTED.size:
                    file.resize(COUNTED.size)
                self._drawn, self._learner = _read(file), file
                return file
        raise FailedError(
            f"{self._folder} already has {len(LEARNERS)} learners, the most it can have. Close one."
        )

    def _learners(self) -> set[str]:
        """Return the names of the learners' counts; other files may lie beside them."""
        try:
            return set(LEARNERS).intersection(os.listdir(self._folder))
        except OSError as error:
            raise system_error("list", self._folder, error) from error

    def _now(self, look: bool) -> tuple[int, int, int]:
        """Return rows written, items drawn and rows alive; look for new learners."""
        written, alive = self._rows()
        with self._lock:
            self._check()
            if look or not self._known:
                for name in self._learners() - self._known.keys():
                    # A file that is no count stands for no draws.
                    with suppress(FormatError):
                        file = File.open(self._folder / name, COUNTED.size)
                        self._known[name] = file
            samples = sum(_read(file) for file in self._known.values())
        return written - self._base, samples, alive

    def _wait(self, side: Side) -> None:
        me = threading.current_thread()
        _waiting[me] = self._path, side
        try:
            self._wait_on(side)
        finally:
            _waiting.pop(me, None)

    def _wait_on(self, side: Side) -> None:
        limiter, began = self._limiter, time.monotonic()
        allows = getattr(limiter, f"allows_{side}")
        seen, since, pause = None, began, SHORTEST_S
        while not allows(*(now := self._now(look=True))):
            now_s = time.monotonic()
            if now != seen:
                seen, since = now, now_s
            over = limiter.timeout is not None and now_s - began >= limiter.timeout
            alone = now_s - since >= limiter.patience and not self._helped(side)
            if over or alone:
                # The other side may have gone on and ended since the counts were read.
                now = self._now(look=True)
                break
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
            self.enter(side)
        if not allows(*now) and limiter.on_timeout == "raise":
            raise self._starved(side, now, alone)

    def _starved(self, side: Side, now: tuple[int, int, int], alone: bool) -> StarvedError:
        what = "a learner to draw" if side == "insert" else "the writer to add"
        why = "none is running"
        if not alone:
            why = f"{self._limiter.timeout:g} s have passed"
        ratio, min_size, error = self._limiter.settings
        left_out = ""
        if self._left_out is not None:
            # Where the sampler cannot say, as its counts are another process's.
            draws = side == "sample" or self._learner is not None
            with suppress(ReplayError):
                left_out = f" (the sampler leaves out {self._left_out(draws)})"
        return StarvedError(
            f"{self._folder.parent}: waited for {what}, but {why}. {now[0]} rows are "
            f"written, {now[2]} of them alive{left_out}, and {now[1]} items drawn; the "
            f"limiter needs {min_size} rows alive and {ratio:g} items per row within "
            f"{error:g}. Start the other side, or change timeout, patience or "
            "on_timeout."
        )

    def _helped(self, side: Side) -> bool:
        """Return whether another thread or process could end a wait."""
        with _binding:
            ours = [limit for limit in _bound if limit._path == self._path]
        if any(limit._may_help(side) for limit in ours):
            return True
        names = {WRITER} if side == "sample" else self._learners()
        return any(
            self._is_locked_elsewhere(name)
            for name in names - {name for limit in ours for name in limit.lock_names}
        )

    def _may_help(self, side: Side) -> bool:
        """Return whether a thread of the other side lives and does not wait too."""
        callers = self._callers["insert" if side == "sample" else "sample"]
        with self._lock:
            alive = [thread for thread in callers if thread.is_alive()]
        # A thread that waits for the same side, such as this one, cannot help.
        return any(_waiting.get(thread) != (self._path, side) for thread in alive)

    def _is_locked_elsewhere(self, name: str) -> bool:
        with suppress(FormatError):
            file = File.open(self._folder / name, None)
            try:
                return not try_lock(file)
            finally:
                file.close()
        return False

    @property
    def lock_names(self) -> list[str]:
        """Names of the files whose locks are held."""
        return [file.path.name for file in (self._writer, self._learner) if file]

    def close(self) -> None:
        """Release the locks; a second call does nothing."""
        with self._lock:
            self._closed = True
            for file in (self._writer, self._learner, *self._known.values()):
                if file is not None:
                    file.close()
            self._known = {}
            self._writer = self._learner = None

    def forget(self) -> None:
        """Close in a forked child, where another thread's lock is held for good."""
        self._lock = threading.RLock()
        self.close()


def stored_settings(folder: Path) -> object:
    """Return the settings in a buffer's folder, as they stand there; None for none.

    Raises:
        FormatError: The folder is a link, or the file damaged.
    """
    own = folder / FOLDER
    refuse_link(own)
    return _parsed(own / SETTINGS)[0] if (own / SETTINGS).exists() else None


def _parsed(path: Path) -> tuple[object, object]:
    """Settings and base of a file, whatever they are; infinity is stored as null."""
    value = strict_json.parse(files.read_bytes(path, 4096), str(path))
    said = value.get("law")
    if isinstance(said, list):
        said = [math.inf if each is None else each for each in said]
    return said, value.get("base")


def _read(file: File) -> int:
    """Read a count, which its owner may be writing."""
    for _ in range(1000):
        count, check = COUNTED.unpack(file.pread(COUNTED.size, 0))
        if count ^ check == MASK:
            return int(count) if count < HIGHEST else 0
        if not count and not check:
            break
    return 0


def _forget_in_child() -> None:
    global _binding
    _binding = threading.Lock()
    _waiting.clear()
    for limit in list(_bound):
        limit.forget()


os.register_at_fork(after_in_child=_forget_in_child)
