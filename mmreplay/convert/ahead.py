"""Work done ahead by threads, whose results come in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

THREADS = min(4, os.cpu_count() or 1)
Item = TypeVar("Item")
Result = TypeVar("Result")


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
    pool = ThreadPoolExecutor(min(THREADS, max(1, ahead)), "mmreplay-convert")
    try:
        for item in items:
            making.append(pool.submit(work, item))
            if len(making) > ahead:
                yield making.popleft().result()
        while making:
            yield making.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
