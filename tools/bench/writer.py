"""A process that adds transitions one at a time until it is told to stop.

``python -m tools.bench.writer FOLDER`` prints a line when the first steps are in,
and after a line on its standard input the steps it added in a second.
"""

from __future__ import annotations

import sys
import threading
from time import perf_counter

from mmreplay import ReplayBuffer
from tools.bench import transitions


def main() -> int:
    """Add until told to stop, and print the rate."""
    told = threading.Event()
    rows = [transitions.block(number, 1) for number in range(transitions.BLOCK)]
    with ReplayBuffer.open(sys.argv[1], "r+", on_resume="continue") as buffer:
        for row in rows:
            buffer.add(row)
        print("adding", flush=True)
        threading.Thread(target=_wait, args=(told,), daemon=True).start()
        start, count = perf_counter(), 0
        while not told.is_set():
            for row in rows:
                buffer.add(row)
            count += len(rows)
        print(count / (perf_counter() - start), flush=True)
    return 0


def _wait(stop: threading.Event) -> None:
    sys.stdin.readline()
    stop.set()


if __name__ == "__main__":
    sys.exit(main())
