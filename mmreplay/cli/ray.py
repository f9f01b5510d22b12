"""``mmreplay ray``: shows the status of a run on a Ray cluster, or stops it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mmreplay.arguments import format_size
from mmreplay.cli import show
from mmreplay.cli.options import Json

if TYPE_CHECKING:
    from mmreplay.ray.run_status import RunStatus, ShardStatus

ray = typer.Typer(
    help="Show the status of a run on a Ray cluster, or stop it; see docs/ray.md.",
    no_args_is_help=True,
)

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)]
Address = Annotated[
    str,
    typer.Option(
        "--address", metavar="HOST:PORT", help="The cluster; by default that of this machine."
    ),
]


@ray.command("status")
def status(run: Run, json: Json = False, address: Address = "auto") -> None:
    """Say what the shards and rings of a run do now."""
    import mmreplay.ray
    from mmreplay.ray.cluster import connected

    with connected(address):
        found = mmreplay.ray.status(run)
    if json:
        show.print_json({**asdict(found), "steps": found.steps})
    else:
        print_status(found)


@ray.command("stop")
def stop(run: Run, address: Address = "auto") -> None:
    """End a run: its shards close their rings, and its folders stay."""
    import mmreplay.ray
    from mmreplay.ray.cluster import connected

    with connected(address):
        mmreplay.ray.stop(run)
    show.print_line(f"The run {run!r} was stopped. Its folders are as they were.")


def print_status(result: RunStatus) -> None:
    """Print the shards and rings of a run."""
    shards, rings = len(result.shards), sum(len(each.rings) for each in result.shards)
    show.print_line(
        f"run {result.run!r}: {show.plural(shards, 'shard')}, "
        f"{show.plural(rings, 'ring')}, {show.plural(result.steps, 'step')}"
    )
    rows = [
        [
            shard.key,
            ring.name,
            show.count(ring.steps),
            show.count(ring.rows),
            _format_heads(ring.heads),
            show.number(ring.rate),
            "-" if ring.writer is None else str(ring.writer),
            "-" if ring.free is None else format_size(ring.free),
            _format_priorities(ring.priorities),
            ring.path,
        ]
        for shard in result.shards
        for ring in shard.rings
    ]
    if rows:
        columns = [
            "node",
            "ring",
            "steps",
            "rows",
            "heads",
            "rows/s",
            "writer",
            "disk free",
            "priorities",
            "folder",
        ]
        if show.fits(columns, rows):
            show.print_table(columns, rows, left=2)
        else:
            # Folders are to be copied from here: on lines of their own they are whole.
            show.print_table(columns[:-1], [row[:-1] for row in rows], left=2)
            for row in rows:
                show.print_line(f"{row[0]}/{row[1]}: {row[-1]}")
    for shard in result.shards:
        if text := _trouble(shard):
            show.print_line(text)


def _trouble(shard: ShardStatus) -> str:
    """What keeps a shard from serving its rings, or nothing."""
    if not shard.alive:
        return f"{shard.key}: does not answer; its rings are not drawn from."
    return f"{shard.key}: {shard.error}" if shard.error else ""


def _format_heads(heads: tuple[int, ...]) -> str:
    """Rows of each environment: the least, and the most where that differs."""
    least, most = min(heads), max(heads)
    if least == most:
        return show.count(least)
    return f"{show.count(least)} to {show.count(most)}"


def _format_priorities(priorities: dict[str, float]) -> str:
    """Sums of priorities, with the sampler's name where there are several."""
    if len(priorities) == 1:
        return show.number(*priorities.values())
    sums = [f"{name} {show.number(each)}" for name, each in priorities.items()]
    return ", ".join(sums) or "-"
