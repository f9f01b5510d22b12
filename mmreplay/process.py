"""What a process is to the library: its boot, its forks, its locks and its threads.

A forked child has copies of its parent's memory, files and locks, but none of its
threads. `ProcessGuard` refuses what belongs to the parent, and a process that was
forked while a loader ran its threads is refused as a whole.

A `Worker` is a thread that Ctrl-C may strike at any line of its owner. Python's own
`Thread.start` waits on an `Event`, whose lock is Python code: Ctrl-C inside it may
leave the lock held, and everybody who waits for it later hangs.
"""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mmreplay.errors import ForkedError, no_thread, system_error

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

Item = TypeVar("Item")


def boot_id() -> bytes:
    """Return 16 bytes that change at each boot; live slots of another boot are void.

    Where the system has none (not Linux) they are zeros, which are never trusted. Any
    other failure is raised: a passing lack of file descriptors that counted as another
    boot would discard published rows.
    """
    path = Path("/proc/sys/kernel/random/boot_id")
    try:
        text = path.read_text("ascii")
    except (FileNotFoundError, PermissionError):
        return bytes(16)
    except OSError as error:
        raise system_error("read", path, error) from error
    return bytes.fromhex(text.strip().replace("-", ""))


num_forks = 0
"""Forks between the first process and this one. A process never changes its own, so
that hot paths compare it, an attribute, and make no system call for the pid."""

_running: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects whose threads run now."""
_forked_with_threads = False
"""Whether this process, or one before it, was forked while such threads ran."""


def _after_fork() -> None:
    global num_forks, _forked_with_threads
    num_forks += 1
    _forked_with_threads = _forked_with_threads or len(_running) > 0
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)


class ProcessGuard:
    """Remembers the process that an object was made in, and refuses forks of it.

    Attributes:
        pid: That process.
        num_forks: The module's `num_forks` there. As long as both are equal no check is
            needed; hot paths compare them and call `check` where they differ.
    """

    __slots__ = ("_made", "_way_out", "num_forks", "pid")

    def __init__(self, made: str, way_out: str) -> None:
        """Remember this process.

        Args:
            made: What happened here, such as ``"this buffer was opened for writing"``.
            way_out: What to do in a forked child instead.
        """
        self.pid, self.num_forks = os.getpid(), num_forks
        self._made, self._way_out = made, way_out

    @property
    def forked(self) -> bool:
        """Whether this is another process.

        By the pid: a host that forks without Python's hooks, such as a web server, does
        not count in `num_forks`.
        """
        return os.getpid() != self.pid

    def check(self) -> None:
        """Refuse another process.

        Raises:
            ForkedError: This process is a fork of the remembered one.
        """
        if self.forked:
            raise ForkedError(
                f"{self._made} by pid {self.pid}, and pid {os.getpid()} is a forked "
                f"child of it. {self._way_out}."
            )


def threads_started(owner: object) -> None:
    """Note that an object runs threads, which a forked child would lack."""
    _running.add(owner)


def threads_stopped(owner: object) -> None:
    """Note that an object's threads have ended."""
    _running.discard(owner)


def refuse_fork_with_threads(what: str) -> None:
    """Refuse a process that was forked while an object ran its threads.

    A thread that held a lock of an open buffer at the fork holds it in the child for
    ever.

    Args:
        what: What is about to be used, such as ``"ReplayDataset"``.

    Raises:
        ForkedError: It was.
    """
    if _forked_with_threads:
        raise ForkedError(
            f"{what}: this process was forked while a ReplayLoader ran its threads. "
            "Pass multiprocessing_context='spawn' to the DataLoader, or close the "
            "loader before the fork."
        )


def owned_by_thread(lock: threading.RLock) -> bool:
    """Whether this thread holds a lock.

    A signal's handler, or a destructor, runs in the middle of whatever its thread did.
    There it must not wait for threads that wait for a lock of this thread's.
    """
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # as Condition asks


class Worker(Generic[Item]):
    """A daemon thread with a queue of work, safe to start and stop under Ctrl-C.

    Threads: one thread at a time starts or stops it; any may put work.

    Attributes:
        failure: What `run` raised; None where it returned, or still runs.
    """

    def __init__(self, name: str, run: Callable[[Worker[Item]], None]) -> None:
        """Make a worker that does not run yet.

        Args:
            name: Of the thread.
            run: The thread's work, called with this worker: takes items by `get`, and
                returns once that gives None.
        """
        self._name, self._run = name, run
        self._items: SimpleQueue[Item | None] = SimpleQueue()
        self._started: tuple[threading.Thread, dict[str, bool]] | None = None
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start the thread, and return once it runs.

        An interrupted start leaves either a running thread, which `stop` ends, or none.

        Raises:
            RuntimeError: The system has no thread left.
        """
        # Whether the thread began, decided once: by the thread as it begins, or by an
        # owner that does not wait for it any more. `setdefault` is one step of C.
        decided: dict[str, bool] = {}
        begun: SimpleQueue[BaseException | None] = SimpleQueue()
        thread = threading.Thread(
            target=self._main, args=(decided, begun), name=self._name, daemon=True
        )
        self._started = thread, decided

        def begin() -> None:
            try:
                thread.start()
            except BaseException as error:
                begun.put(error)

        try:
            # On a thread of its own: the wait on an Event is that thread's then, and
            # Ctrl-C strikes the main thread alone.
            _thread.start_new_thread(begin, ())
            error = begun.get()
            if error is not None:
                raise error
        except BaseException:
            decided.setdefault("began", False)
            raise

    def _main(self, decided: dict[str, bool], begun: SimpleQueue[BaseException | None]) -> None:
        began = decided.setdefault("began", True)
        begun.put(None)
        if began:
            try:
                self._run(self)
            except BaseException as error:
                self.failure = error
                # Shown by `threading.excepthook`: whoever owns it may never look.
                raise

    @property
    def running(self) -> bool:
        """Whether the thread began and has not ended."""
        if self._started is None:
            return False
        thread, decided = self._started
        return decided.get("began", False) and thread.is_alive()

    def put(self, item: Item | None) -> None:
        """Give the thread an item; None ends it once it has taken the items before."""
        self._items.put(item)

    def get(self, timeout: float | None = None) -> Item | None:
        """Take the oldest item, in the thread.

        Args:
            timeout: Seconds to wait at most; None waits without an end.

        Raises:
            queue.Empty: No item came within the timeout.
        """
        return self._items.get(timeout=timeout)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the thread.

        Args:
            timeout: Seconds to wait at most; None waits without an end.

        Returns:
            Whether it has ended, or never began. In that thread itself, False at once.
        """
        if self._started is None:
            return True
        thread, decided = self._started
        if not decided.setdefault("began", False):
            return True
        # A collector of garbage may run its owner's end in any thread, also in this.
        if thread is threading.current_thread():
            return False
        thread.join(timeout)
        return not thread.is_alive()

    def stop(self) -> None:
        """End the thread after the items that it was given, and wait for it."""
        self.put(None)
        self.join()


def run_both(one: Callable[[], None], other: Callable[[], None]) -> None:
    """Run two functions at once, the first on a thread of its own.

    The thread is not a `Worker`: one that waited for work would be gone after a fork.
    Where the system has no thread left the functions run one after the other.
    """
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def run_one() -> None:
        try:
            one()
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)

    try:
        _thread.start_new_thread(run_one, ())
    except RuntimeError:
        run_one()
    try:
        other()
    finally:
        # The first fills memory of the caller's: it has to end before the caller goes.
        failure = ended.get()
    if failure is not None:
        raise failure


def thread_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """A pool of threads that runs jobs in the caller's thread when Python ends.

    At its end Python waits for the thread of an `AutoExport` that is still open. That
    thread needs others to finish its file, while pools refuse new jobs already.

    Args:
        num_threads: The most that run at a time.
        name: Begins the name of each.

    Returns:
        A pool whose `submit` raises `FailedError` where the system has no thread left.
    """
    return _thread_pool_class()(num_threads, name)


@cache
def _thread_pool_class() -> type[ThreadPoolExecutor]:
    """The class of `thread_pool`, made when the first pool is."""
    # Here, as only conversions need it: the import takes 5 ms.
    from concurrent.futures import Future, ThreadPoolExecutor

    class ThreadPool(ThreadPoolExecutor):
        closed = False

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            try:
                return super().submit(fn, *args, **kwargs)
            except RuntimeError as error:
                if "can't start new thread" in str(error):
                    raise no_thread("that converts", error) from error
                # Threads that end with Python leave a pool that says it was shut down.
                if self.closed or "cannot schedule new futures" not in str(error):
                    raise
            job: Future[Any] = Future()
            try:
                job.set_result(fn(*args, **kwargs))
            except BaseException as error:
                job.set_exception(error)
            return job

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            self.closed = True
            super().shutdown(wait, cancel_futures=cancel_futures)

    return ThreadPool
