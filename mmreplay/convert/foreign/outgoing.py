"""Rows turned into steps with their next observations, for targets that keep those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mmreplay.convert.base import Block
from mmreplay.convert.description import Description
from mmreplay.convert.ends import Bools
from mmreplay.convert.foreign.columns import Array
from mmreplay.convert.foreign.regroup import joined, sliced
from mmreplay.episodes import CUT, END, FINAL, START, TERMINATED, TRUNCATED
from mmreplay.errors import SchemaError, SourceError


@dataclass(frozen=True, slots=True)
class Transitions:
    """Steps that follow each other.

    Attributes:
        columns: By path, all but ends and next observations ``[N, *shape]``.
        nexts: By path of an observation, what was seen after each step; its own where
            that is not known.
        terminated: bool ``[N]``.
        truncated: bool ``[N]``.
        last: bool ``[N]``, the last of their episodes.
        known: bool ``[N]``, those whose next observation is known.
    """

    columns: Mapping[str, Array]
    nexts: Mapping[str, Array]
    terminated: Bools
    truncated: Bools
    last: Bools
    known: Bools

    def __len__(self) -> int:
        return len(self.last)


class TransitionMaker:
    """Makes steps of blocks, one environment after another.

    Raises:
        SchemaError: The schema lacks what an offline dataset is made of.
    """

    def __init__(self, description: Description, target: str) -> None:
        schema = description.schema
        for role in ("observation", "action", "reward"):
            if not schema.role(role):
                raise SchemaError(
                    f"role {role!r}: got a dataset without one, expected it for "
                    f"{target}; name it in the schema's roles"
                )
        if schema.role_paths("reward") != (schema.role("reward"),):
            raise SchemaError(
                f"role 'reward': got the subtree {schema.role('reward')!r}, expected "
                f"one field for {target}; leave the others out with fields="
            )
        self.observations = schema.role_paths("observation")
        stored = schema.role("next_observation")
        top = schema.role("observation") or ""
        self._stored = {
            path: stored + path.removeprefix(top) for path in self.observations
        } if stored else {}  # fmt: skip
        left = {*self._stored.values(), schema.role("terminated")}
        left.add(schema.role("truncated"))
        self.paths = tuple(path for path in schema.paths if path not in left)
        self._target = target
        self._held: Block | None = None
        self._done: set[int] = set()

    def feed(self, block: Block) -> Transitions | None:
        """Steps that are known now: all up to the last row's, which is kept."""
        self._check_order(block)
        held, self._held = self._held, None
        rows = joined([block] if held is None else [held, block])
        last = sliced(rows, len(rows) - 1, len(rows))
        # A block's arrays last until the next one is asked for.
        self._held = Block(
            {path: column.copy() for path, column in last.columns.items()},
            last.env_ids.copy(), last.positions.copy(), last.flags.copy(),
        )  # fmt: skip
        return self._steps(rows, len(rows) - 1)

    def finish(self) -> Transitions | None:
        """The last step."""
        held, self._held = self._held, None
        return None if held is None else self._steps(held, 1)

    def _check_order(self, block: Block) -> None:
        ids = block.env_ids
        if self._held is not None:
            ids = np.concatenate([self._held.env_ids, ids])
        for env_id in ids[np.flatnonzero(np.diff(ids)) + 1].tolist():
            if env_id in self._done:
                raise SourceError(
                    f"environment {env_id}: got rows of it after those of another, "
                    f"expected one environment after another for {self._target}; "
                    "load them into a buffer first, and export that"
                )
        self._done.update(ids.tolist())

    def _steps(self, rows: Block, count: int) -> Transitions | None:
        """Steps among the first count rows."""
        flags, behind = rows.flags[:count], rows.flags[1 : count + 1]
        same = rows.env_ids[1 : count + 1] == rows.env_ids[: len(behind)]
        follows = np.zeros(count, bool)
        follows[: len(behind)] = same & ((behind & START) == 0)
        cut = np.zeros(count, bool)
        cut[: len(behind)] = same & ((behind & CUT) != 0)
        is_step = (flags & FINAL) == 0
        if not is_step.any():
            return None
        nexts = {}
        for path in self.observations:
            if self._stored:
                nexts[path] = rows.columns[self._stored[path]][:count][is_step]
                continue
            seen = rows.columns[path][:count].copy()
            seen[: len(behind)][follows[: len(behind)]] = rows.columns[path][
                1 : count + 1
            ][follows[: len(behind)]]
            nexts[path] = seen[is_step]
        return Transitions(
            {path: rows.columns[path][:count][is_step] for path in self.paths},
            nexts,
            ((flags & TERMINATED) != 0)[is_step],
            (((flags & TRUNCATED) != 0) | cut)[is_step],
            (((flags & END) != 0) | ~follows)[is_step],
            (follows | bool(self._stored))[is_step],
        )
