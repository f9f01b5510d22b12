"""Numbers, sizes and tables as people read them, and JSON as programs do."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mmreplay.arguments import format_size as format_size
from mmreplay.arguments import printable as printable

if TYPE_CHECKING:
    from mmreplay.schema import Schema
    from mmreplay.stats import Progress

PIPED_WIDTH = 160


def count(number: float) -> str:
    """A whole number with thousands separators."""
    return f"{int(number):,}"


def number(value: float | None) -> str:
    """A measured number: whole ones whole, others to 4 digits.

    Large ones have all of theirs: of a time stamp the last digits matter.
    """
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    if 1e7 <= abs(value) < 1e15:
        return f"{value:,.15g}"
    return f"{value:,.4g}" if 1e-4 <= abs(value) < 1e6 else f"{value:.4g}"


def format_time(time_ns: int) -> str:
    """A time in UTC, or ``"never"``."""
    if time_ns <= 0:
        return "never"
    when = datetime.fromtimestamp(time_ns / 1e9, UTC)
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")


def plural(number_: int, noun: str) -> str:
    """``"1 step"``, ``"2,000 steps"``."""
    return f"{count(number_)} {noun}{'' if number_ == 1 else 's'}"


def starts(facts: Mapping[str, Any]) -> str:
    """How many legal starts there are."""
    legal, every = facts["legal_starts"], facts["legal_starts_without_next"]
    return f"{count(legal)}, or {count(every)} with the transform WithoutNext"


def print_line(text: str) -> None:
    """Print one line, however long."""
    typer.echo(printable(text))


def _print(*renderables: RenderableType) -> None:
    """Print to stdout; wide where no terminal says how wide it is."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    console = Console(highlight=False, width=width)
    with console.capture() as captured:
        console.print(*renderables, sep="\n")
    # Tables are padded with spaces, which no document and no diff wants.
    lines = [line.rstrip() for line in captured.get().rstrip().splitlines()]
    sys.stdout.write("\n".join([*lines, ""]))


def print_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values in two columns."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(_text(name), _text(value))
    _print(Text(f"\n{printable(title)}", style="bold"), grid)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print rows under column names; all but the first left ones are numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(_text(name), justify="left" if index < left else "right")
    for row in rows:
        table.add_row(*(_text(cell) for cell in row))
    _print(table)


def field_cells(schema: Schema) -> dict[str, list[str]]:
    """Path, dtype, shape and role of each field, by path."""
    found = {}
    for path, field in schema.fields.items():
        role = next((r for r, top in schema.roles.items() if f"{path}/".startswith(f"{top}/")), "")
        shape = field.rules.axes(field) if field.shape else "scalar"
        found[path] = [path, field.rules.name(field), shape, role]
    return found


def _text(cell: str) -> Text:
    return Text(printable(cell))


def fits(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether a table fits the width of the output."""
    width = PIPED_WIDTH
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    widest = [
        max(len(printable(cell)) for cell in column) for column in zip(columns, *rows, strict=True)
    ]
    return sum(widest) + 3 * len(widest) <= width


def print_json(value: Any) -> None:
    """Print one JSON object; what is no finite number becomes null."""
    print(json.dumps(_plain(value), indent=1, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def waiting(what: str) -> Iterator[Progress | None]:
    """Show a bar on stderr where it is a terminal; yield what moves it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
