"""Arguments and options that several commands share, and how they are read."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from mmreplay.arguments import UNITS, size_in_bytes
from mmreplay.cli.show import printable
from mmreplay.errors import SchemaError
from mmreplay.format.metadata import MAX_NUM_ENVS, ON_DISK
from mmreplay.format.sharding import CODECS

MAX_COUNT = (1 << 63) - 1


def parse_count(argument: object) -> int:
    """Read a whole number of at least 1, such as ``1e6`` or ``1_000_000``."""
    # A default comes as the number that it is.
    text = str(argument)
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value != int(value):
        raise typer.BadParameter(f"must be an integer such as 1e6, got {text!r}.")
    if value < 1:
        raise typer.BadParameter(f"must be at least 1, got {text}.")
    # Through float only where it is written so: 2**53 + 1 is a legal capacity.
    plain = text.replace(",", "").replace("_", "").lstrip("+")
    number = int(plain) if plain.isdigit() else int(value)
    if number > MAX_COUNT:
        raise typer.BadParameter(f"must be at most {MAX_COUNT:,}, got {text}.")
    return number


def parse_num_envs(argument: object) -> int:
    """Read a number of environments that a buffer can have."""
    number = parse_count(argument)
    if number > MAX_NUM_ENVS:
        raise typer.BadParameter(f"must be at most {MAX_NUM_ENVS:,}, got {argument}.")
    return number


def parse_size(argument: object) -> int:
    """Read a number of bytes, such as ``1GiB``, ``1.5 GiB`` or ``1e6``."""
    text = str(argument)
    try:
        return size_in_bytes("size", text)
    except SchemaError:
        with suppress(typer.BadParameter):
            return parse_count(text)
    raise typer.BadParameter(
        f"must be a size of at least 1 byte, such as 1GiB, got {text!r}. Use the units "
        f"{', '.join(UNITS)}, or an integer of bytes."
    )


def parse_integer(argument: object) -> int:
    """Read a whole number of either sign."""
    try:
        return int(str(argument).replace(",", ""))
    except ValueError:
        raise typer.BadParameter(f"must be an integer, got {argument!r}.") from None


def parse_path(argument: object) -> Path:
    """Read a path; ``~`` is the home directory, also in ``--output=~/x``.

    Shells expand only a ``~`` that begins a word.

    Raises:
        BadParameter: It is empty, as an unset variable of a shell is.
    """
    if not str(argument):
        raise typer.BadParameter("the path is empty. Name a file or folder, such as '.'")
    return Path(os.path.expanduser(str(argument)))


def completing(*words: str) -> Callable[[str], list[str]]:
    """Return the completion of an option that takes one of some words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def usage_error(message: str) -> Exception:
    """Return typer's error of a wrong command line, without a prefix in its text."""
    # typer carries its own copy of click in some versions, so that the class is
    # not click's own.
    kind = typer.BadParameter.__mro__[1]
    error = kind(message)
    assert isinstance(error, Exception)
    return error


BufferPath = Annotated[
    Path,
    typer.Argument(
        parser=parse_path, metavar="PATH", help="The buffer's folder.", show_default=False
    ),
]
MaybePath = Annotated[
    Path | None,
    typer.Argument(
        parser=parse_path, metavar="PATH", help="The buffer's folder.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
NumEnvs = Annotated[
    int | None,
    typer.Option(
        "--num-envs", parser=parse_num_envs, metavar="N", help="Environments.", show_default=False
    ),
]
Envs = Annotated[
    list[int] | None,
    typer.Option(
        "--env",
        parser=parse_integer,
        metavar="N",
        show_default=False,
        help="Only this environment; repeat it for more.",
    ),
]


def heap_bytes_option(default: str = "") -> Any:
    """Return the option ``--heap-bytes``; the help says what holds without it."""
    return typer.Option(
        "--heap-bytes",
        parser=parse_size,
        metavar="SIZE",
        show_default=False,
        help="Bytes of each environment for values that vary, such as 1GiB"
        f"{f'; by default {default}' if default else ''}.",
    )


EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="|".join(ON_DISK),
        show_default=False,
        autocompletion=completing(*ON_DISK),
        help="Engine of a new buffer: memmap, or zarr for compressed shards.",
    ),
]
CodecName = Annotated[
    str | None,
    typer.Option(
        "--codec",
        metavar="|".join(CODECS),
        show_default=False,
        autocompletion=completing(*CODECS),
        help="Codec of the shards with --engine zarr.",
    ),
]
Level = Annotated[
    int | None,
    typer.Option(
        "--level",
        parser=parse_integer,
        metavar="N",
        show_default=False,
        help="Level of the codec; higher is smaller and slower to write.",
    ),
]


def confirm(question: str, yes: bool) -> None:
    """Ask before rows are removed.

    Raises:
        typer.Abort: The answer is no.
        UsageError: Standard input is no terminal.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise usage_error(f"{question} There is no terminal to ask on. Add --yes to confirm.")
    if not typer.confirm(printable(question), err=True):
        raise typer.Abort


def load_function(option: str, name: str) -> Callable[..., Any]:
    """Import what ``module:name`` names, from the current folder too.

    Raises:
        UsageError: There is no such module or function.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise usage_error(f"{option} must be MODULE:NAME, such as mymodule:name, got {name!r}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise usage_error(f"{option} {name!r}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise usage_error(f"{option} {name!r} is not callable")
    loaded: Callable[..., Any] = function
    return loaded


def check_choice(option: str, value: str | None, choices: Sequence[str]) -> None:
    """Refuse an option that is given, and none of some words.

    Raises:
        UsageError: It is none of them.
    """
    if value is not None and value not in choices:
        raise usage_error(f"{option} must be one of {', '.join(choices)}, got {value!r}")


def check_env(env_id: int, num_envs: int) -> None:
    """Refuse an environment that a buffer does not have.

    Raises:
        SchemaError: It has none of that number.
    """
    if not 0 <= env_id < num_envs:
        have = "environment" if num_envs == 1 else "environments"
        raise SchemaError(
            f"--env must be in [0, {num_envs}), got {env_id}. The buffer has "
            f"{num_envs:,} {have}, counted from 0."
        )
