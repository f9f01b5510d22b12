"""``mmreplay info``: what a buffer is and holds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmreplay.cli import group, installation, show
from mmreplay.cli.exits import say
from mmreplay.cli.options import Json, MaybePath, usage_error

if TYPE_CHECKING:
    from mmreplay.buffer.replay_buffer import ReplayBuffer
    from mmreplay.schema import Schema

# All rewards of a large ring would be minutes of reading: `stats` reads them.
NEWEST_EPISODES = 100
LISTED_ENVS = 16


def info(
    path: MaybePath = None,
    build: Annotated[
        bool, typer.Option("--build", help="Show the installation of mmreplay instead of a buffer.")
    ] = False,
    json: Json = False,
) -> None:
    """Say what a buffer is and holds: schema, sizes, episodes, disk, last commit."""
    if path is not None and build:
        raise usage_error("PATH and --build were both given. Pass one of them.")
    if path is not None:
        _print_buffer(path, json)
    elif build:
        installation.print_installation(json)
    else:
        raise usage_error("Missing argument 'PATH': a buffer's folder, or --build")


def _print_buffer(path: Path, json: bool) -> None:
    from mmreplay.buffer.replay_buffer import ReplayBuffer

    with ReplayBuffer.open(path) as buffer:
        if buffer.mapping is not None:
            group.print_group(buffer, json)
            return
        facts = gather(buffer)
    if json:
        show.print_json(facts)
    else:
        _print(str(path), facts, buffer.schema, buffer.recovery.meaning)
        _warn_of_small_heap(path, facts)


def _warn_of_small_heap(path: Path, facts: dict[str, Any]) -> None:
    """Warn where the heap holds the values of less than half of the capacity."""
    capacity = facts["capacity"]
    fit = facts.get("heap", {}).get("rows_that_fit")
    if fit is not None and 2 * fit < capacity:
        say(
            f"{path}: the heap holds the values of about {show.plural(fit, 'row')}, "
            f"less than half of the capacity of {show.count(capacity)}. Give it more "
            "bytes with mmreplay resize --heap-bytes, or lower the capacity"
        )


def gather(buffer: ReplayBuffer) -> dict[str, Any]:
    """Everything that `info` knows, as JSON values."""
    from mmreplay.kernels import missing
    from mmreplay.stats import episode_table

    metadata, recovery, facts = buffer.metadata, buffer.recovery, buffer.facts()
    ring, rows, heap = metadata.ring, facts.rows(), facts.heap()
    heaps: dict[str, Any] = {}
    if heap is not None:
        heaps["heap"] = {
            "heap_bytes": heap.nbytes,
            "used": heap.used.tolist(),
            "rows": heap.rows.tolist(),
            "rows_that_fit": heap.rows_that_fit,
        }
    newest = episode_table(buffer, newest=-(-NEWEST_EPISODES // buffer.num_envs))
    (apparent, allocated), commit = facts.disk(), facts.commit()
    return {
        "path": str(buffer.path),
        "uuid": metadata.uuid.hex(),
        "created": metadata.created,
        "engine": metadata.engine,
        "codec": None if metadata.sharding is None else metadata.sharding.codec,
        "compression": buffer.compression,
        "layout": ring.layout,
        "autoreset": metadata.autoreset,
        "generation": metadata.generation,
        "capacity": ring.capacity,
        "num_envs": ring.num_envs,
        "slots": ring.slots,
        "reserve": ring.reserve,
        "block_rows": ring.block_rows,
        "schema": metadata.schema.to_json(),
        "roles": dict(metadata.schema.roles),
        "user": metadata.user,
        "rows": rows.rows,
        "steps": rows.steps,
        "final_rows": rows.rows - rows.steps,
        "legal_starts": rows.legal_starts,
        "legal_starts_without_next": rows.steps,
        "never_drawn_steps": rows.never_drawn_steps,
        "tails": rows.tails.tolist(),
        "heads": rows.heads.tolist(),
        "sizes": rows.sizes.tolist(),
        "episodes": {
            "count": rows.episodes,
            "running": rows.unfinished,
            "headless": rows.missing_start,
        },
        **heaps,
        "index_nbytes": rows.index_nbytes,
        "newest_returns": summary(newest.returns),
        "newest_lengths": summary(newest.lengths),
        "disk": {"apparent": apparent, "allocated": allocated},
        "commit": {
            "time_ns": commit.time_ns,
            "exact": commit.exact,
            "heads": commit.heads.tolist(),
            "clean": commit.clean,
            "survives_kill": commit.survives_kill,
        },
        "recovery": {
            "how": recovery.how,
            "cut_rows": recovery.cut_rows,
            "given_up_rows": recovery.given_up_rows,
            "last_cut_rows": recovery.last_cut_rows,
        },
        "writer": facts.writer(),
        "kernels_not_built": missing(),
    }


def summary(values: Any) -> dict[str, float] | None:
    """Count, mean, min and max of numbers; None where there are none."""
    import numpy as np

    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    if len(known) == 0:
        return None
    # Of infinite or very large numbers, mean and std are what floats make of them.
    with np.errstate(over="ignore", invalid="ignore"):
        return {
            "count": len(known),
            "mean": float(known.mean()),
            "std": float(known.std()),
            "min": float(known.min()),
            "max": float(known.max()),
        }


def _print(name: str, facts: dict[str, Any], schema: Schema, opening: str) -> None:
    count, format_size = show.count, show.format_size
    episodes, on_disk = facts["episodes"], facts["disk"]
    ring = f"{count(facts['capacity'])} rows x {show.plural(facts['num_envs'], 'env')}"
    show.print_facts(
        name,
        [
            (
                "is",
                f"{facts['engine']}, {facts['layout']}, autoreset "
                f"{facts['autoreset']}, generation {facts['generation']}, "
                f"created {facts['created']}",
            ),
            (
                "capacity",
                f"{ring} ({count(facts['slots'])} slots: reserve "
                f"{count(facts['reserve'])}, blocks of "
                f"{count(facts['block_rows'])})",
            ),
            (
                "holds",
                f"{show.plural(facts['steps'], 'step')}, "
                f"{show.plural(facts['final_rows'], 'final row')}",
            ),
            ("legal starts", show.starts(facts)),
            (
                "next unknown",
                f"{show.plural(facts['never_drawn_steps'], 'step')} "
                "(no next observation: truncated without a final row, or "
                "before a break)",
            ),
            (
                "episodes",
                f"{count(episodes['count'])}, of them "
                f"{count(episodes['running'])} unfinished, "
                f"{count(episodes['headless'])} without their first steps",
            ),
            *_origins(facts["user"]),
            ("returns", _summary(facts["newest_returns"])),
            ("lengths", _summary(facts["newest_lengths"])),
            (
                "on disk",
                f"{format_size(on_disk['allocated'])} allocated, "
                f"{format_size(on_disk['apparent'])} apparent",
            ),
            *_compressed(facts),
            *_heap(facts),
            (
                "RAM, find",
                f"{format_size(facts['index_nbytes'])} at most where rows "
                "are looked up by a column",
            ),
            ("last commit", _committed(facts)),
            *_exposed(facts["commit"]),
            ("opening", opening + _last_opening(facts["recovery"])),
            ("writer", _holder(facts["writer"])),
            *_slow(facts),
        ],
    )
    _print_schema(schema)
    _print_envs(facts)


def _origins(user_metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """The command that made the buffer of other sources, and what it read of them."""
    if not user_metadata:
        return []
    from mmreplay.convert import provenance

    lines = provenance.lines(user_metadata)
    return [("" if n else "made by", show.printable(line)) for n, line in enumerate(lines)]


def _compressed(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """How much smaller each field's shards are than its rows."""
    ratios = [
        f"{path} {show.number(raw / packed)}x"
        for path, (packed, raw) in facts["compression"].items()
        if packed
    ]
    return [("compressed", f"{facts['codec']}: {', '.join(ratios)}")] if ratios else []


def _heap(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """How full the fullest heap and ring are, and which ends a row's life sooner."""
    if "heap" not in facts:
        return []
    heap, capacity = facts["heap"], facts["capacity"]
    used, rows = max(heap["used"]), max(heap["rows"])
    text = (
        f"{show.format_size(used)} of {show.format_size(heap['heap_bytes'])} of values "
        f"that vary ({used / heap['heap_bytes']:.0%}), {show.count(rows)} of "
        f"{show.count(capacity)} rows ({rows / capacity:.0%}), in the fullest "
        "environment"
    )
    if facts["engine"] == "zarr":
        text += "; values move on to shards, so that a full heap ends no row"
    fit = heap["rows_that_fit"]
    if fit is not None and fit >= capacity:
        text += "; all rows fit: capacity is the tighter bound"
    elif fit is not None:
        text += f"; about {show.plural(fit, 'row')} fit: heap_bytes is the tighter bound"
    return [("heap", text)]


def _slow(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a row that says that numpy runs because C was not built."""
    if not facts["kernels_not_built"]:
        return []
    absent = ", ".join(facts["kernels_not_built"])
    return [("kernels", f"numpy, slower: C was not built ({absent})")]


def _summary(values: dict[str, float] | None) -> str:
    if values is None:
        return "none: no whole episode, no reward, or rewards that are NaN"
    numbers = ", ".join(f"{n} {show.number(values[n])}" for n in ("mean", "min", "max"))
    return f"{numbers} (newest {show.plural(int(values['count']), 'whole episode')})"


def _committed(facts: dict[str, Any]) -> str:
    record = facts["commit"]
    behind = sum(facts["heads"]) - sum(record["heads"])
    when = show.format_time(record["time_ns"])
    if behind > 0 and not any(record["heads"]):
        when = "none yet"
    elif record["time_ns"] > 0:
        ago = max(0, time.time() - record["time_ns"] / 1e9)
        when += f" ({count_s(ago)} ago)" + ("" if record["exact"] else " or before")
    return f"{when}, {show.plural(max(0, behind), 'row')} published since"


def _exposed(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a row about a file system without times of creation."""
    if record["survives_kill"]:
        return []
    return [
        (
            "a kill",
            "loses rows since the last commit: the file system does not say when a "
            "file was created",
        )
    ]


def count_s(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _last_opening(opening: dict[str, Any]) -> str:
    """How many rows were discarded."""
    if opening["how"] in ("failed", "power_cut"):
        return (
            f": {show.count(opening['cut_rows'])} known rows, and "
            f"{show.count(opening['given_up_rows'])} overwritten since"
        )
    if opening["last_cut_rows"]:
        last = show.plural(opening["last_cut_rows"], "row")
        return f"; an earlier opening discarded {last}"
    return ""


def _holder(writer: dict[str, Any] | None) -> str:
    if writer is None:
        return "none"
    return f"pid {writer.get('pid', '?')} on {writer.get('host', '?')}"


def _print_schema(schema: Schema) -> None:
    rows = []
    for path, cells in show.field_cells(schema).items():
        field = schema[path]
        options = [each for each in ("mutable", "exact") if getattr(field, each)]
        if field.encoding is not None:
            options.append(field.encoding.options)
        rows.append([*cells, " ".join(options)])
    show.print_table(["field", "dtype", "shape", "role", "options"], rows, left=5)


def _print_envs(facts: dict[str, Any]) -> None:
    rows = [
        [str(env_id), *(show.count(n) for n in numbers)]
        for env_id, numbers in enumerate(
            zip(
                facts["tails"],
                facts["heads"],
                facts["sizes"],
                facts["commit"]["heads"],
                strict=True,
            )
        )
    ]
    show.print_table(["env", "first", "head", "steps", "committed"], rows[:LISTED_ENVS])
    if len(rows) > LISTED_ENVS:
        typer.echo(f"... and {len(rows) - LISTED_ENVS} more; --json lists them all")
