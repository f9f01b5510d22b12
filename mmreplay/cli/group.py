"""``mmreplay info`` of a Zarr group: how its arrays are read as a buffer."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mmreplay.cli import show

if TYPE_CHECKING:
    from mmreplay.buffer.replay_buffer import ReplayBuffer
    from mmreplay.schema import Schema


def print_group(buffer: ReplayBuffer, json: bool) -> None:
    """Print what a group opened as a buffer holds, and how that was found."""
    facts = gather(buffer)
    if json:
        show.print_json(facts)
    else:
        _print(facts, buffer.schema)


def gather(buffer: ReplayBuffer) -> dict[str, Any]:
    """Everything that is known, as JSON values."""
    assert buffer.mapping is not None
    index = buffer.episodes
    episodes = sum(len(index.episodes(env).begin) for env in range(buffer.num_envs))
    return {
        **asdict(buffer.mapping),
        "num_envs": buffer.num_envs,
        "rows": int(buffer.span.lengths.sum()),
        "steps": len(buffer),
        "legal_starts": index.num_legal,
        "legal_starts_without_next": index.num_steps,
        "never_drawn_steps": len(buffer) - index.num_legal,
        "episodes": episodes,
        "schema": buffer.schema.to_json(),
        "roles": dict(buffer.schema.roles),
    }


def _print(facts: dict[str, Any], schema: Schema) -> None:
    count = show.count
    whose = "mmreplay's" if facts["ours"] else "not mmreplay's"
    envs = show.plural(facts["num_envs"], "environment")
    show.print_facts(
        facts["location"],
        [
            ("is", f"a Zarr group of version {facts['version']}, {whose}, read only"),
            ("holds", f"{show.plural(facts['rows'], 'row')} of {envs}"),
            ("episodes", count(facts["episodes"])),
            ("legal starts", show.starts(facts)),
            (
                "next unknown",
                f"{show.plural(facts['never_drawn_steps'], 'step')} (no next observation)",
            ),
        ],
    )
    rows = [
        [*cells, facts["arrays"].get(path, "derived from flags"), facts["packed"].get(path, "")]
        for path, cells in show.field_cells(schema).items()
    ]
    titles = ["field", "dtype", "shape", "role", "array", "packed"]
    show.print_table(titles, rows, left=6)
    for kind in ("notes", "doubts"):
        for text in facts[kind]:
            show.print_line(f"{kind[:-1]}: {text}")
