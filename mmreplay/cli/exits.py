"""Exit codes, and the line on stderr that an error becomes: the only such table."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from mmreplay import errors
from mmreplay.cli.show import printable
from mmreplay.format.metadata import FILE_NAME

WELL, FAILED, USAGE, REFUSED, INTERRUPTED = 0, 1, 2, 3, 130

CODES: tuple[tuple[type[BaseException], int], ...] = (
    # The first that fits decides, so leaves stand before their branches.
    (errors.CorruptError, FAILED),
    (errors.FormatError, REFUSED),
    (errors.SchemaError, REFUSED),
    (errors.SourceError, REFUSED),
    (errors.EmptyError, REFUSED),
    (errors.StaleError, REFUSED),
    # Locked, forked, full, failed and starved.
    (errors.ReplayError, FAILED),
    # An optional library is missing, or of another version.
    (ImportError, FAILED),
    (OSError, FAILED),
    (MemoryError, FAILED),
)
# typer carries its own copy of click in some versions, so that click's class is
# not the one to catch.
CLICK_ERROR = typer.BadParameter.__mro__[2]


class InterruptedRun(Exception):
    """Ctrl-C in a command that says itself what is on disk now."""


@contextmanager
def only_reading() -> Iterator[None]:
    """Turn Ctrl-C into a line that says that nothing was changed."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedRun("interrupted; buffers were only read") from None


@contextmanager
def copying_to(target: Path) -> Iterator[None]:
    """Turn Ctrl-C into a line that says whether a copy of a buffer is there."""
    try:
        yield
    except KeyboardInterrupt:
        if (target / FILE_NAME).exists():
            raise InterruptedRun(f"interrupted; {target} is already complete") from None
        raise InterruptedRun(
            f"interrupted; {target} is not a buffer yet, and the source is unchanged. "
            "Run the same command again to start from the beginning"
        ) from None


def code_of(error: BaseException) -> int | None:
    """Exit code of an error that a user can cause; None for a bug of ours."""
    for kind, code in CODES:
        if isinstance(error, kind):
            return code
    return None


def message_of(error: Exception) -> str:
    """Return an error's text in one line."""
    if isinstance(error, OSError) and not isinstance(error, errors.ReplayError):
        if error.errno == errno.ENOENT:
            return f"{error.filename} does not exist. Check the path."
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror or error}. Check the path and its permissions."
    text = " ".join(str(error).split()) or type(error).__name__
    for note in getattr(error, "__notes__", ()):
        text += f" ({note})" if text.endswith(".") else f"; {note}"
    return text


def say(message: str) -> None:
    """Print one line to stderr."""
    print(f"mmreplay: {printable(message)}", file=sys.stderr)
