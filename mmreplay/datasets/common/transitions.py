"""Steps with their next observations, for targets that store those."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mmreplay.convert.base import Block, Notes, doubt_priorities
from mmreplay.convert.description import Description
from mmreplay.convert.episode_ends import Bools, NamedEnds
from mmreplay.datasets.common.fragments import joined
from mmreplay.datasets.common.rows import Array
from mmreplay.episodes import CUT, END, FINAL, START, TERMINATED, TRUNCATED
from mmreplay.errors import SchemaError, SourceError


@dataclass(frozen=True, slots=True)
class Transitions:
    """Consecutive steps.

    Attributes:
        columns: ``[N, *shape]`` by path, without ends and next observations.
        next_obs: Next observations by path of the observation; the step's own one where
            the next is not known.
        terminated: bool ``[N]``.
        truncated: bool ``[N]``.
        last: bool ``[N]``, last steps of episodes.
        disconnected: bool ``[N]``, other steps whose stored next observation differs
            from the next row in some bit.
        known: bool ``[N]``, steps whose next observation is known.
    """

    columns: Mapping[str, Array]
    next_obs: Mapping[str, Array]
    terminated: Bools
    truncated: Bools
    last: Bools
    disconnected: Bools
    known: Bools

    def __len__(self) -> int:
        return len(self.last)


class TransitionMaker:
    """Makes steps from blocks, one environment after another.

    Raises:
        SchemaError: The schema has no observation, action or reward.
    """

    def __init__(self, description: Description, target: str) -> None:
        schema = description.schema
        for role in ("observation", "action", "reward"):
            if not schema.role(role):
                raise SchemaError(
                    f"role {role!r} has no field, which {target} needs. Name it in the "
                    "schema's roles."
                )
        if schema.role_paths("reward") != (schema.role("reward"),):
            raise SchemaError(
                f"role 'reward' must be one field for {target}, got the subtree "
                f"{schema.role('reward')!r}. Leave the other fields out with fields=."
            )
        self.observations = schema.role_paths("observation")
        stored = schema.role("next_observation")
        top = schema.role("observation") or ""
        self._stored = (
            {path: stored + path.removeprefix(top) for path in self.observations} if stored else {}
        )
        left = {*self._stored.values(), schema.role("terminated")}
        left.add(schema.role("truncated"))
        self.paths = tuple(path for path in schema.paths if path not in left)
        self._description = description
        self._target = target
        self._ends = NamedEnds(description)
        self._left = description.rows
        self._pending: Block | None = None
        self._seen_envs: set[int] = set()

    def add_notes(self, notes: Notes) -> None:
        """Report what is left out or guessed, as far as known before the first row."""
        doubt_priorities(notes, self._description, self._target)
        self._ends.add_notes(notes, both=False)

    def feed(self, block: Block) -> Transitions | None:
        """Return the steps that are complete; the newest row waits for the next one.

        No row waits once all described rows are here, so that losses are reported
        before the target is finished.
        """
        self._check_order(block)
        block = self._ends.marked(block)
        pending, self._pending = self._pending, None
        rows = joined([block] if pending is None else [pending, block])
        self._left -= len(block)
        if not self._left:
            return self._steps(rows, len(rows))
        last = rows.rows(len(rows) - 1, len(rows))
        # A block's arrays are valid until the next block is read.
        self._pending = Block(
            {path: column.copy() for path, column in last.columns.items()},
            last.env_ids.copy(),
            last.positions.copy(),
            last.flags.copy(),
        )
        return self._steps(rows, len(rows) - 1)

    def _check_order(self, block: Block) -> None:
        ids = block.env_ids
        if self._pending is not None:
            ids = np.concatenate([self._pending.env_ids, ids])
        for env_id in ids[np.flatnonzero(np.diff(ids)) + 1].tolist():
            if env_id in self._seen_envs:
                raise SourceError(
                    f"environment {env_id}: its rows are interleaved with those of "
                    f"another environment, which {self._target} cannot store. Load "
                    "them into a buffer first, and export that."
                )
        self._seen_envs.update(ids.tolist())

    def _steps(self, rows: Block, count: int) -> Transitions | None:
        """Return the steps among the first ``count`` rows."""
        flags, behind = rows.flags[:count], rows.flags[1 : count + 1]
        same = rows.env_ids[1 : count + 1] == rows.env_ids[: len(behind)]
        follows = np.zeros(count, bool)
        follows[: len(behind)] = same & ((behind & START) == 0)
        cut = np.zeros(count, bool)
        cut[: len(behind)] = same & ((behind & CUT) != 0)
        is_step = (flags & FINAL) == 0
        if not is_step.any():
            return None
        next_obs = {}
        disconnected = np.zeros(count, bool)
        for path in self.observations:
            if self._stored:
                stored = rows.columns[self._stored[path]][:count]
                next_obs[path] = stored[is_step]
                following = rows.columns[path][1 : count + 1]
                disconnected[: len(behind)] |= _unlike(stored[: len(behind)], following)
                continue
            seen = rows.columns[path][:count].copy()
            seen[: len(behind)][follows[: len(behind)]] = rows.columns[path][1 : count + 1][
                follows[: len(behind)]
            ]
            next_obs[path] = seen[is_step]
        last = ((flags & END) != 0) | ~follows
        return Transitions(
            {path: rows.columns[path][:count][is_step] for path in self.paths},
            next_obs,
            ((flags & TERMINATED) != 0)[is_step],
            (((flags & TRUNCATED) != 0) | cut)[is_step],
            last[is_step],
            (disconnected & ~last)[is_step],
            (follows | bool(self._stored))[is_step],
        )


def quarters(block: Block) -> Iterator[Block]:
    """Yield a block in four parts, for writers that hold several copies of the rows."""
    size = max(1, -(-len(block) // 4))
    for first in range(0, len(block), size):
        yield block.rows(first, first + size)


def refuse_clashes(names: Mapping[str, str], target: str) -> None:
    """Refuse fields that would share a dataset, or lie within each other.

    Args:
        names: Names of the datasets, by path.
        target: Name of the target's format.

    Raises:
        SchemaError: Two fields clash.
    """
    owners: dict[str, str] = {}
    for path, name in names.items():
        if name in owners:
            raise SchemaError(
                f"fields {owners[name]!r} and {path!r} have the same name {name!r} in "
                f"{target}. Leave one out with fields=, or rename it."
            )
        owners[name] = path
    for name, path in owners.items():
        for end, slash in enumerate(name):
            above = owners.get(name[:end]) if slash == "/" else None
            if above is not None:
                raise SchemaError(
                    f"fields {above!r} and {path!r}: {target} cannot store {name!r} "
                    f"inside {name[:end]!r}. Leave one out with fields=, or rename it."
                )


def _unlike(one: Array, other: Array) -> Bools:
    """Rows that differ in some bit, bool ``[N]``; of files some byte."""
    if one.dtype == object:
        pairs = zip(one, other, strict=True)
        return np.array([not np.array_equal(*pair) for pair in pairs], bool)
    size = one.itemsize * int(np.prod(one.shape[1:]))
    left, right = (
        np.ascontiguousarray(each).view(np.uint8).reshape(len(each), size) for each in (one, other)
    )
    unlike: Bools = (left != right).any(axis=1)
    return unlike
