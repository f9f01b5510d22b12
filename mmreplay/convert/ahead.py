"""Work done ahead by threads, whose results come in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from mmreplay.errors import no_thread

THREADS = min(4, os.cpu_count() or 1)
END = object()
REFUSED = "cannot schedule new futures"
"""Says a pool that takes no job, because it or Python was shut down."""
NONE_LEFT = "can't start new thread"
"""Says one that gets no thread."""
Item = TypeVar("Item")
Result = TypeVar("Result")
Given = ParamSpec("Given")


class Threads(ThreadPoolExecutor):
    """Threads for jobs; when Python ends, who submits a job does it at once.

    The thread of an `AutoExport` that nobody closed is waited for then, and still needs
    others to end its file, while new jobs are refused.
    """

    _closed = False

    def submit(
        self, fn: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Future[Result]:
        """See `ThreadPoolExecutor.submit`.

        Raises:
            FailedError: The system has no thread left.
        """
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if NONE_LEFT in str(error):
                raise no_thread("that converts", error) from error
            # Threads that end with Python leave a pool that says it was shut down.
            if self._closed or REFUSED not in str(error):
                raise
        job: Future[Result] = Future()
        try:
            job.set_result(fn(*args, **kwargs))
        except BaseException as error:
            job.set_exception(error)
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `ThreadPoolExecutor.shutdown`."""
        self._closed = True
        super().shutdown(wait, cancel_futures=cancel_futures)


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], ahead: int = THREADS
) -> Iterator[Result]:
    """What work makes of each item, one after another.

    Args:
        work: Called in threads, on several items at a time.
        items: Asked for in the caller's thread, as results are.
        ahead: Items that are worked on, or done, before their result is asked for.
    """
    making: deque[Future[Result]] = deque()
    pool = Threads(min(THREADS, max(1, ahead)), "mmreplay-convert")
    try:
        for item in items:
            making.append(pool.submit(work, item))
            if len(making) > ahead:
                yield making.popleft().result()
        while making:
            yield making.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def beside(items: Iterator[Item]) -> Iterator[Item]:
    """The items of a generator, of which one is made while the one before is used."""
    pool = Threads(1, "mmreplay-convert")
    try:
        making = pool.submit(next, items, END)
        while (item := making.result()) is not END:
            making = pool.submit(next, items, END)
            yield item  # type: ignore[misc]  # what is not END is an item
    finally:
        pool.shutdown()
