"""``mmreplay head``: the oldest or newest rows of one environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmreplay.cli import show
from mmreplay.cli.options import BufferPath, Json, check_env, parse_count, parse_integer
from mmreplay.errors import EmptyError

if TYPE_CHECKING:
    from mmreplay.buffer.replay_buffer import ReplayBuffer

TEXT_CHARACTERS = 60
"""The most that a table shows of a text."""


def head(
    path: BufferPath,
    rows: Annotated[
        int, typer.Option("--rows", "-n", parser=parse_count, metavar="N", help="Rows.")
    ] = 5,
    env: Annotated[
        int, typer.Option("--env", parser=parse_integer, metavar="N", help="The environment.")
    ] = 0,
    newest: Annotated[
        bool, typer.Option("--newest", help="The newest rows, not the oldest.")
    ] = False,
    json: Json = False,
) -> None:
    """Show some rows of one environment; arrays by their range and mean."""
    from mmreplay.buffer.replay_buffer import ReplayBuffer

    with ReplayBuffer.open(path) as buffer:
        found = read(buffer, env, rows, newest)
    if json:
        show.print_json({"env": env, "rows": found})
        return
    names = list(found[0])
    cells = [[_cell(row[name]) for name in names] for row in found]
    if not show.fits(names, cells):
        flipped = [[name, *(row[i] for row in cells)] for i, name in enumerate(names)]
        show.print_table(flipped[0], flipped[1:])
    else:
        show.print_table(names, cells, left=0)


def read(buffer: ReplayBuffer, env: int, count: int, newest: bool) -> list[dict[str, Any]]:
    """Rows as JSON values by path, with their positions and marks."""
    import numpy as np

    check_env(env, buffer.num_envs)
    span = buffer.span
    first, stop = int(span.first[env]), int(span.stop[env])
    if first == stop:
        raise EmptyError(
            f"environment {env} of {buffer.path} holds no rows. Record some first, or "
            "choose another with --env."
        )
    if newest:
        first = max(first, stop - count)
    positions = np.arange(first, min(stop, first + count))
    episodes = buffer.episodes.episodes(env)
    starts = set(episodes.begin[~episodes.headless].tolist())
    which = np.searchsorted(episodes.begin, positions, side="right") - 1
    columns = {path: buffer.get_field(path, env, positions) for path in buffer.schema.paths}
    found = []
    for index, position in enumerate(positions.tolist()):
        inside = which[index] >= 0 and position < episodes.end[which[index]]
        mark = "start" if position in starts else "" if inside else "final row"
        row: dict[str, Any] = {"position": position, "mark": mark}
        for path, column in columns.items():
            field = buffer.schema[path].drawn
            row[path] = field.rules.summary(field, column[index])
        found.append(row)
    return found


def _cell(value: Any) -> str:
    if isinstance(value, dict) and "bytes" in value:
        return show.plural(value["bytes"], "byte")
    if isinstance(value, str):
        return value if len(value) <= TEXT_CHARACTERS else f"{value[:TEXT_CHARACTERS]}…"
    if isinstance(value, dict):
        least, mean, most = (show.number(value[n]) for n in ("min", "mean", "max"))
        items = f"{show.plural(value['items'], 'item')}: " if "items" in value else ""
        return f"{items}{least} .. {most}, mean {mean}"
    if isinstance(value, list):
        return f"[{', '.join(_cell(item) for item in value)}]"
    if isinstance(value, bool):
        return "yes" if value else "-"
    if isinstance(value, int):
        return str(value)
    return show.number(value) if isinstance(value, float) else str(value)
