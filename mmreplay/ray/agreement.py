"""What all writers of a ring agree on: its schema, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmreplay.buffer.opening import describe
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.concatenation import first_difference
from mmreplay.errors import SchemaError
from mmreplay.schema import Schema


def described(schema: Schema) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a schema as it travels.

    Raises:
        SchemaError: It is none.
    """
    if not isinstance(schema, Schema):
        raise SchemaError(
            f"schema must be a Schema, got {type(schema).__name__}. Use "
            "Schema.from_env, or wrap the fields in mmreplay.Schema(...)."
        )
    return schema.to_json(), dict(schema.roles)


def check_same(
    buffer: ReplayBuffer, schema: Schema, capacity: int, num_envs: int, create: Mapping[str, Any]
) -> None:
    """Refuse arguments that are not those of a ring that was made before.

    Args:
        buffer: The ring.
        schema: Of its writer.
        capacity: Rows of each environment.
        num_envs: Environments.
        create: More arguments of `ReplayBuffer.create`.

    Raises:
        SchemaError: One differs.
    """
    way_out = "Pass what it was made with, or give the ring another name."
    if buffer.schema != schema:
        raise SchemaError(
            f"{buffer.path} has another schema: {differing(schema, buffer.schema)}. {way_out}"
        )
    made = buffer.metadata
    given = {name: value for name, value in create.items() if value is not None}
    wanted = describe(
        schema,
        capacity,
        num_envs,
        given.get("engine", made.engine),
        given.get("layout", made.ring.layout),
        given.get("autoreset", made.autoreset),
        None,
        given.get("codec"),
        given.get("level"),
        given.get("chunk_crc32c", False),
        given.get("heap_bytes", made.heap_nbytes or None),
    )
    facts: dict[str, tuple[object, object]] = {
        "capacity": (buffer.capacity, capacity),
        "num_envs": (buffer.num_envs, num_envs),
        "engine": (made.engine, wanted.engine),
        "autoreset": (made.autoreset, wanted.autoreset),
        "layout": (made.ring.layout, wanted.ring.layout),
        "heap_bytes": (made.heap_nbytes, wanted.heap_nbytes),
    }
    for name in given.keys() & {"codec", "level", "chunk_crc32c"}:
        facts[name] = getattr(made.sharding, name), getattr(wanted.sharding, name)
    for argument, (there, got) in facts.items():
        if there != got:
            raise SchemaError(
                f"{argument} must be {there!r}, as of {buffer.path}, got {got!r}. {way_out}"
            )


def differing(mine: Schema, other: Schema) -> str:
    """Say in a message how a schema differs from that of a run."""
    differ = first_difference(mine, other)
    if differ is None:
        return "roles or the order of the fields differ"
    path, here, there = differ
    return f"field {path!r} is {here} here, and {there} there"
