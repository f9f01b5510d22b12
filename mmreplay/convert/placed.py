"""Rows of a buffer whose description is lost: three columns still say where they go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import Block, Columns, Notes
from mmreplay.convert.description import ENV_ID, FLAGS, POSITION, RESERVED, Description
from mmreplay.episodes import ALL_FLAGS, END, FINAL
from mmreplay.errors import SourceError
from mmreplay.format.metadata import MAX_NUM_ENVS
from mmreplay.schema import Schema

Ints = NDArray[np.int64]
NAMES = tuple(RESERVED)
SURVEYED_ROWS = 1 << 16


def find(kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> bool:
    """Whether columns of these dtypes and row shapes say where rows go.

    Raises:
        SourceError: They should, and are no whole numbers.
    """
    if not kinds.keys() >= RESERVED.keys():
        return False
    for name in NAMES:
        dtype, shape = kinds[name]
        if "int" not in dtype or shape != ():
            raise _refused(f"{name} of {dtype}{list(shape)}")
    return True


def others(
    kinds: Mapping[str, tuple[str, tuple[int, ...]]],
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The other columns, which may be fields."""
    return {name: kind for name, kind in kinds.items() if name not in NAMES}


@dataclass(slots=True)
class Places:
    """What a pass over those columns says.

    Attributes:
        first: Position of the oldest row, by environment.
        stop: The position after the newest, likewise.
        last: Flags of the newest row, likewise.
        finals: Whether there is a final row.
        bare: Whether an end is not followed by one.
    """

    first: dict[int, int] = field(default_factory=dict)
    stop: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    finals: bool = False
    bare: bool = False

    @classmethod
    def of(cls, blocks: Iterator[Columns]) -> Places:
        """Look at all rows.

        Args:
            blocks: The three columns, in the order of the file.

        Raises:
            SourceError: They contradict themselves, or rows are missing.
        """
        found, rows = cls(), 0
        for columns in blocks:
            env_ids, positions, flags = taken(columns)
            for env_id in np.unique(env_ids).tolist():
                here = np.flatnonzero(env_ids == env_id)
                found._look(env_id, positions[here], flags[here], rows + here)
            rows += len(env_ids)
        if max(found.first, default=0) >= MAX_NUM_ENVS:
            raise _refused(f"environment {max(found.first)}")
        return found

    def _look(
        self, env_id: int, positions: Ints, flags: NDArray[np.uint8], rows: Ints
    ) -> None:
        if env_id < 0 or positions[0] < 0:
            raise _refused(f"environment {env_id}, position {positions[0]}")
        self.first.setdefault(env_id, int(positions[0]))
        due = self.stop.get(env_id, int(positions[0]))
        wanted = np.arange(due, due + len(positions))
        bad = positions != wanted
        if bad.any():
            at = int(np.argmax(bad))
            raise _refused(
                f"position {positions[at]} of environment {env_id} in row {rows[at]} "
                f"where {wanted[at]} should be"
            )
        final = (flags & FINAL) != 0
        before = np.concatenate([[self.last.get(env_id, 0)], flags[:-1]])
        self.finals |= bool(final.any())
        self.bare |= bool((((before & END) != 0) & ~final).any())
        self.stop[env_id], self.last[env_id] = int(wanted[-1]) + 1, int(flags[-1])

    def describe(self, schema: Schema, notes: Notes) -> Description:
        """The description, as far as it can be known.

        Args:
            schema: The fields.
            notes: Where it is told that the rest is lost.
        """
        count = max(self.first, default=0) + 1
        first = np.array([self.first.get(env_id, 0) for env_id in range(count)])
        stop = np.array([self.stop.get(env_id, 0) for env_id in range(count)])
        known = self.finals and not self.bare
        notes.doubt(
            f"columns {', '.join(NAMES)} tell of a buffer whose description is lost: "
            f"rows go where they say; its autoreset was taken to be "
            f"{'next_step' if known else 'disabled'!r}, its capacity the rows there are"
        )
        return Description(
            schema, first, stop, max(1, int((stop - first).max())),
            "next_step" if known else "disabled",
        )  # fmt: skip


def block(columns: Columns, told: Columns) -> Block:
    """Rows where the three columns, ``told``, say that they go."""
    return Block(columns, *taken(told))


def taken(columns: Columns) -> tuple[Ints, Ints, NDArray[np.uint8]]:
    """Environments, positions and flags, ``[N]`` each.

    Raises:
        SourceError: There are no such flags.
    """
    told: list[NDArray[Any]] = [columns[name].reshape(-1) for name in NAMES]
    env_ids, positions, flags = told
    if ((flags < 0) | (flags > ALL_FLAGS)).any():
        raise _refused(f"flags {int(flags.max())}")
    return (
        env_ids.astype(np.int64), positions.astype(np.int64), flags.astype(np.uint8)
    )  # fmt: skip


def _refused(got: str) -> SourceError:
    return SourceError(
        f"columns {ENV_ID}, {POSITION} and {FLAGS} tell of a buffer whose description "
        f"is lost: got {got}, expected all of its rows in their order; bring the "
        f"description along (csv: <file>.mmreplay.json), or remove column {FLAGS!r} "
        "from the file to take every row for a step"
    )
