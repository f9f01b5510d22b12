"""Processes that share nothing but a folder, and their resident memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, TypeVar

# Spawned, not forked: each starts as a program that was never run before.
spawned = multiprocessing.get_context("spawn")

P = ParamSpec("P")
T = TypeVar("T")


def apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a fresh process, and return what it returned.

    Raises:
        SystemExit: It failed; its own message is on stderr.
    """
    ours, theirs = spawned.Pipe(duplex=False)
    call = partial(function, *args, **kwargs)
    process = spawned.Process(target=_call, args=(theirs, call))
    process.start()
    theirs.close()
    try:
        result: T = ours.recv()
    except EOFError:
        process.join()
        raise SystemExit(1) from None
    process.join()
    return result


def _call(pipe: Connection, call: Callable[[], object]) -> None:
    pipe.send(call())


def resident() -> dict[str, int]:
    """Bytes of this process in memory now: its own, and pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return {
        "own": int(values["RssAnon"].split()[0]) << 10,
        "files": int(values["RssFile"].split()[0]) << 10,
    }
