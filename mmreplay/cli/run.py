"""Run one command line: parse it, call the command, print errors and warnings."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from mmreplay.cli.exits import (
    CLICK_ERROR,
    FAILED,
    INTERRUPTED,
    USAGE,
    WELL,
    InterruptedRun,
    code_of,
    message_of,
    say,
)
from mmreplay.disk.files import disk

SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    _fill_closed_streams()
    if sys.stdout is None:
        say("stdout is closed. Redirect it to a file, or to /dev/null.")
        return FAILED
    # After the check: importing the commands may open files.
    from mmreplay.cli.app import build

    words = list(sys.argv[1:] if args is None else args)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    elif words == ["version"]:
        words = ["--version"]
    elif words[:1] == ["--show-completion"] and len(words) == 2:
        # The option alone means the shell that runs the command, not the one named.
        return _show_completion(words[1])
    try:
        with _warning_in_a_line():
            code = build()(args=words, standalone_mode=False, prog_name="mmreplay")
        sys.stdout.flush()
    except typer.Abort:
        say("nothing was changed")
        return FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except InterruptedRun as interrupt:
        say(str(interrupt))
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has closed it.
        _drop_output()
        return FAILED
    except Exception as error:
        try:
            sys.stdout.flush()
        except OSError:
            # Such as a full disk that it is redirected to.
            _drop_output()
        return _report(error)
    if code == INTERRUPTED:
        say("interrupted")
    return int(code or WELL)


def _drop_output() -> None:
    """Keep the interpreter from flushing again at its end, which would set its code."""
    os.dup2(disk.open(Path(os.devnull), os.O_WRONLY), sys.stdout.fileno())


def _fill_closed_streams() -> None:
    """Put something in the place of streams that are closed, but for stdout.

    A file opened next would get the number of one, and what a C library prints would go
    into it.
    """
    if None in (sys.stdin, sys.stdout, sys.stderr):
        while (fd := disk.open(Path(os.devnull), os.O_RDWR)) <= 2:
            pass
        os.close(fd)
        sys.stdin, sys.stderr = sys.stdin or io.StringIO(), sys.stderr or io.StringIO()


def _show_completion(shell: str) -> int:
    """Print the completion script of a shell, and return the exit code."""
    from typer.completion import get_completion_inspect_parameters, show_callback

    if shell not in SHELLS:
        say(f"--show-completion must be one of {', '.join(SHELLS)}, got {shell!r}")
        return USAGE
    from mmreplay.cli.app import build

    get_completion_inspect_parameters()  # which registers the shells
    command = build()
    context = typer.Context(command, info_name="mmreplay")
    try:
        show_callback(context, command.params[0], shell)
    except SystemExit:
        return WELL
    raise AssertionError("typer's callback ends the process")


@contextmanager
def _warning_in_a_line() -> Iterator[None]:
    """Print our own warnings once, without the line of code that Python adds."""
    said = set()
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Any, category: type[Warning], *rest: Any, **more: Any) -> None:
            if not category.__module__.startswith("mmreplay."):
                others(message, category, *rest, **more)
            elif str(message) not in said:
                said.add(str(message))
                say(str(message))

        warnings.showwarning = show
        yield


def _report(error: Exception) -> int:
    """Print an error and return its exit code; raise a bug of ours."""
    if isinstance(error, CLICK_ERROR):
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "mmreplay"
        text = str(getattr(error, "format_message", error.__str__)())
        if text:
            stop = "" if text.endswith("?") else "."
            say(f"{text.rstrip('.')}{stop} See {where} --help.")
        return int(getattr(error, "exit_code", USAGE))
    code = code_of(error)
    if code is None:
        raise error
    say(message_of(error))
    return code
