"""``mmreplay clear`` and ``mmreplay resize``, which ask before they remove rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mmreplay.cli import show
from mmreplay.cli.options import (
    BufferPath,
    Envs,
    Json,
    Yes,
    check_env,
    confirm,
    heap_bytes_option,
    parse_count,
)

if TYPE_CHECKING:
    from pathlib import Path

    from mmreplay.buffer.replay_buffer import ReplayBuffer


def clear(path: BufferPath, env: Envs = None, yes: Yes = False, json: Json = False) -> None:
    """Remove all rows; positions continue from where they are."""
    from mmreplay.buffer.opening import writable_folder
    from mmreplay.buffer.replay_buffer import ReplayBuffer

    # A read-only source is refused before the question.
    writable_folder(path)
    ids = sorted(set(env)) if env else None
    with ReplayBuffer.open(path) as buffer:
        for env_id in ids or []:
            check_env(env_id, buffer.num_envs)
        rows = int(buffer.span.lengths[ids or slice(None)].sum())
    environments = "all environments" if ids is None else f"environments {ids}"
    confirm(f"Remove {show.plural(rows, 'row')} of {environments} in {path}?", yes)
    with ReplayBuffer.open(path, "r+") as buffer:
        num_rows = int(buffer.span.lengths[ids or slice(None)].sum())
        buffer.clear(ids)
        left = len(buffer)
    if json:
        show.print_json({"path": str(path), "rows_given_up": num_rows, "steps": left})
    else:
        show.print_line(f"removed {show.plural(num_rows, 'row')}, {show.plural(left, 'step')} left")


def resize(
    path: BufferPath,
    capacity: Annotated[
        int,
        typer.Argument(
            parser=parse_count,
            metavar="CAPACITY",
            show_default=False,
            help="Rows per environment, such as 1e6.",
        ),
    ],
    heap_bytes: Annotated[int | None, heap_bytes_option("as many as before")] = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Keep the newest rows in a ring of another capacity; safe to kill."""
    from mmreplay.buffer.opening import writable_folder
    from mmreplay.buffer.replay_buffer import ReplayBuffer

    writable_folder(path)
    with ReplayBuffer.open(path) as buffer:
        before, heap_before = buffer.capacity, buffer.metadata.heap_nbytes
        lost = _count_lost(buffer, capacity, heap_bytes)
    if lost:
        confirm(f"Remove the {show.plural(lost, 'oldest row')} of {path}?", yes)
    with _opened(path) as buffer:
        buffer.resize(capacity, heap_bytes=heap_bytes)
    # The old folder goes at the next writable opening: this one gives space back.
    with _opened(path) as buffer:
        capacity, steps = buffer.capacity, len(buffer)
        heap_bytes = buffer.metadata.heap_nbytes
    if json:
        show.print_json(
            {
                "path": str(path),
                "capacity": capacity,
                "capacity_before": before,
                "heap_bytes": heap_bytes,
                "heap_bytes_before": heap_before,
                "rows_given_up": lost,
                "steps": steps,
            }
        )
        return
    show.print_line(
        f"capacity {show.count(before)} -> {show.count(capacity)}, "
        f"{show.plural(lost, 'row')} removed, {show.plural(steps, 'step')} left"
    )
    if heap_bytes != heap_before:
        show.print_line(f"heap_bytes {show.count(heap_before)} -> {show.count(heap_bytes)}")


def _count_lost(buffer: ReplayBuffer, capacity: int, heap_bytes: int | None) -> int:
    """Rows that a resize removes, for want of capacity or heap."""
    import numpy as np

    from mmreplay.buffer.heap_values import first_fitting
    from mmreplay.buffer.opening import heap_nbytes_of

    span, schema = buffer.span, buffer.schema
    firsts = np.maximum(span.first, span.stop - capacity)
    heap_nbytes = buffer.metadata.heap_nbytes
    if heap_bytes is not None:
        heap_nbytes = heap_nbytes_of(heap_bytes, buffer.metadata.ring, schema)
    # Shards take the values of a compressed buffer from its heap.
    if heap_nbytes and buffer.metadata.sharding is None:
        firsts = first_fitting(buffer.view, schema, heap_nbytes, firsts, span.stop)
    return int((firsts - span.first).sum())


def _opened(path: Path) -> ReplayBuffer:
    """Open a buffer for writing; `resize` itself warns of a disk that is too small."""
    import warnings

    from mmreplay.buffer.replay_buffer import ReplayBuffer
    from mmreplay.errors import FullWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FullWarning)
        return ReplayBuffer.open(path, "r+")
