"""Rows turned into steps with their next observations, for targets that keep those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mmreplay.convert.base import Block, Notes
from mmreplay.convert.description import Description
from mmreplay.convert.ends import Bools
from mmreplay.convert.foreign.columns import Array
from mmreplay.convert.foreign.regroup import joined, sliced
from mmreplay.convert.losses import doubt_priorities
from mmreplay.convert.named_ends import NamedEnds
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
        parted: bool ``[N]``, those within one whose stored next observation is not
            the row behind, in some bit.
        known: bool ``[N]``, those whose next observation is known.
    """

    columns: Mapping[str, Array]
    nexts: Mapping[str, Array]
    terminated: Bools
    truncated: Bools
    last: Bools
    parted: Bools
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
        self._description = description
        self._target = target
        self._ends = NamedEnds(description)
        self._left = description.rows
        self._held: Block | None = None
        self._done: set[int] = set()

    def tell(self, notes: Notes) -> None:
        """Say what of the source is left out or guessed, as is known before any row."""
        doubt_priorities(notes, self._description, self._target)
        self._ends.tell(notes, both=False)

    def feed(self, block: Block) -> Transitions | None:
        """Steps that are known now: the newest row waits for the one behind it.

        None waits once all rows that were described are here: what is lost is to be
        told before the target is finished.
        """
        self._check_order(block)
        block = self._ends.marked(block)
        held, self._held = self._held, None
        rows = joined([block] if held is None else [held, block])
        self._left -= len(block)
        if not self._left:
            return self._steps(rows, len(rows))
        last = sliced(rows, len(rows) - 1, len(rows))
        # A block's arrays last until the next one is asked for.
        self._held = Block(
            {path: column.copy() for path, column in last.columns.items()},
            last.env_ids.copy(), last.positions.copy(), last.flags.copy(),
        )  # fmt: skip
        return self._steps(rows, len(rows) - 1)

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
        parted = np.zeros(count, bool)
        for path in self.observations:
            if self._stored:
                stored = rows.columns[self._stored[path]][:count]
                nexts[path] = stored[is_step]
                following = rows.columns[path][1 : count + 1]
                parted[: len(behind)] |= _unlike(stored[: len(behind)], following)
                continue
            seen = rows.columns[path][:count].copy()
            seen[: len(behind)][follows[: len(behind)]] = rows.columns[path][
                1 : count + 1
            ][follows[: len(behind)]]
            nexts[path] = seen[is_step]
        last = ((flags & END) != 0) | ~follows
        return Transitions(
            {path: rows.columns[path][:count][is_step] for path in self.paths},
            nexts,
            ((flags & TERMINATED) != 0)[is_step],
            (((flags & TRUNCATED) != 0) | cut)[is_step],
            last[is_step],
            (parted & ~last)[is_step],
            (follows | bool(self._stored))[is_step],
        )


def refuse_clashes(names: Mapping[str, str], target: str) -> None:
    """Refuse fields that would be one dataset, or one within another.

    Args:
        names: Of the datasets, by path.
        target: What they are written to.

    Raises:
        SchemaError: There are some.
    """
    owners: dict[str, str] = {}
    for path, name in names.items():
        if name in owners:
            raise SchemaError(
                f"fields {owners[name]!r} and {path!r}: got two that {target} calls "
                f"{name!r}, expected one; leave one out with fields=, or rename it"
            )
        owners[name] = path
    for name, path in owners.items():
        for place, slash in enumerate(name):
            above = owners.get(name[:place]) if slash == "/" else None
            if above is not None:
                raise SchemaError(
                    f"fields {above!r} and {path!r}: got {name!r} within "
                    f"{name[:place]!r} for {target}, expected no field within another; "
                    "leave one out with fields=, or rename it"
                )


def _unlike(one: Array, other: Array) -> Bools:
    """Which rows differ in some bit, bool ``[N]``."""
    size = one.itemsize * int(np.prod(one.shape[1:]))
    left, right = (
        np.ascontiguousarray(each).view(np.uint8).reshape(len(each), size)
        for each in (one, other)
    )
    unlike: Bools = (left != right).any(axis=1)
    return unlike
