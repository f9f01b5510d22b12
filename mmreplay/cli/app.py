"""The commands and their common options."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Annotated, Any

import typer
import typer.core
from rich.markup import escape

from mmreplay import __version__, kernels
from mmreplay.cli.change import clear, resize
from mmreplay.cli.compact import compact
from mmreplay.cli.convert import convert
from mmreplay.cli.head import head
from mmreplay.cli.info import info
from mmreplay.cli.options import usage_error
from mmreplay.cli.plan import plan
from mmreplay.cli.plot import plot
from mmreplay.cli.ray import ray
from mmreplay.cli.record import record
from mmreplay.cli.repair import repair
from mmreplay.cli.snapshot import snapshot
from mmreplay.cli.stats import stats
from mmreplay.cli.verify import verify
from mmreplay.cli.view import view

MEANT = dict.fromkeys(
    ("load", "import", "export", "save"),
    "mmreplay convert SRC DST reads and writes files of other formats",
)
"""Hints for names that are no commands."""


class Commands(typer.core.TyperGroup):
    """The commands, with hints for names that users expect."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first word names.

        Raises:
            UsageError: There is no such command.
        """
        if args[0] in MEANT and not ctx.resilient_parsing:
            raise usage_error(f"No such command {args[0]!r}: {MEANT[args[0]]}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    help="Disk-backed experience datasets for reinforcement learning.",
    epilog="Exit codes: 0 well, 1 damaged or failed, 2 usage, 3 refused input.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _without_kernels() -> str:
    """Return a note for ``--version`` if C kernels were not built."""
    # Every other command refuses an unknown choice of kernels; the version is printed.
    with suppress(ValueError):
        absent = kernels.missing()
        return f" (without C kernels, slower: {', '.join(absent)})" if absent else ""
    return ""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mmreplay {__version__}{_without_kernels()}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Disk-backed experience datasets for reinforcement learning."""
    try:
        kernels.choice()
    except ValueError as error:
        raise usage_error(str(error)) from error


for command in (
    record,
    info,
    head,
    plan,
    stats,
    plot,
    convert,
    verify,
    clear,
    resize,
    snapshot,
    repair,
    compact,
    view,
):
    app.command(command.__name__)(command)
app.add_typer(ray, name="ray")


@cache
def build() -> Any:
    """Return the command line as one click command.

    typer reads help texts as rich markup, in which ``[num_envs, ...]`` is a tag.
    """
    root = typer.main.get_command(app)
    # Older versions have no way to do without rich, and no such name.
    marked = getattr(typer.core, "HAS_RICH", True)
    commands = [root]
    # The list grows by the commands of each group.
    for command in commands:
        commands.extend(getattr(command, "commands", {}).values())
        for owner in (command, *command.params):
            for name in ("help", "epilog", "short_help"):
                text = getattr(owner, name, None)
                if marked and isinstance(text, str):
                    setattr(owner, name, escape(text))
    return root
