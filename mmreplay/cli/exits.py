"""From an error to one line on stderr and an exit code: the only such table."""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from mmreplay import errors
from mmreplay.cli.show import printable
from mmreplay.disk.files import disk
from mmreplay.format.metadata import FILE_NAME
from mmreplay.kernels import KernelsWarning

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
    (ModuleNotFoundError, FAILED),
    (OSError, FAILED),
    (MemoryError, FAILED),
)
# typer carries its own copy of click in some versions, so that click's class is
# not the one to catch.
CLICK_ERROR = typer.BadParameter.__mro__[2]


class InterruptedRun(Exception):
    """Ctrl-C, of a command that says itself what is kept."""


@contextmanager
def copying_to(target: Path) -> Iterator[None]:
    """Turn Ctrl-C into a line that says whether a copy of a buffer is there."""
    try:
        yield
    except KeyboardInterrupt:
        if (target / FILE_NAME).exists():
            raise InterruptedRun(f"interrupted; {target} is whole already") from None
        raise InterruptedRun(
            f"interrupted; {target} is no buffer yet, and what was copied from is as "
            "it was; start the same command again, it begins anew"
        ) from None


def code_of(error: BaseException) -> int | None:
    """Exit code of an error that a user can cause; None for a bug of ours."""
    for kind, code in CODES:
        if isinstance(error, kind):
            return code
    return None


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        # A file opened next would get the number of a stream that was closed, and what
        # a C library prints would go into it.
        while (fd := disk.open(Path(os.devnull), os.O_RDWR)) <= 2:
            pass
        os.close(fd)
        sys.stdin, sys.stderr = sys.stdin or io.StringIO(), sys.stderr or io.StringIO()
    if sys.stdout is None:
        say("stdout is closed, expected it open to print to; >/dev/null discards it")
        return FAILED
    from mmreplay.cli.app import build

    words = list(sys.argv[1:] if args is None else args)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    elif words == ["version"]:
        words = ["--version"]
    try:
        with _warning_in_a_line():
            code = build()(args=words, standalone_mode=False, prog_name="mmreplay")
        sys.stdout.flush()
    except typer.Abort:
        say("nothing was changed")
        return FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except InterruptedRun as told:
        say(str(told))
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has seen enough; the interpreter must not flush again.
        os.dup2(disk.open(Path(os.devnull), os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return _told(error)
    if code == INTERRUPTED:
        say("interrupted; what was written before is kept")
    return int(code or WELL)


@contextmanager
def _warning_in_a_line() -> Iterator[None]:
    """Print our own warnings once, without the line of code that Python adds."""
    said = set()
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(
            message: Any, category: type[Warning], *rest: Any, **more: Any
        ) -> None:
            ours = (
                errors.AutoresetWarning,
                errors.DurabilityWarning,
                errors.FullWarning,
                KernelsWarning,
            )
            if not issubclass(category, ours):
                others(message, category, *rest, **more)
            elif str(message) not in said:
                said.add(str(message))
                say(str(message))

        warnings.showwarning = show
        yield


def _told(error: Exception) -> int:
    if isinstance(error, CLICK_ERROR):
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "mmreplay"
        text = str(getattr(error, "format_message", error.__str__)())
        if text:
            say(f"{text.rstrip('.')}; see {where} --help")
        return int(getattr(error, "exit_code", USAGE))
    code = code_of(error)
    if code is None:
        raise error
    say(message_of(error))
    return code


def message_of(error: Exception) -> str:
    """An error's text in one line."""
    if isinstance(error, OSError) and not isinstance(error, errors.ReplayError):
        if error.errno == errno.ENOENT:
            return f"{error.filename} does not exist; check the path"
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror or error}; check the path and its permissions"
    text = " ".join(str(error).split()) or type(error).__name__
    return "; ".join([text, *getattr(error, "__notes__", ())])


def say(message: str) -> None:
    """Print one line to stderr."""
    print(f"mmreplay: {printable(message)}", file=sys.stderr)
