"""Which flags rows get, and the rows that final observations take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.buffer.validation import Columns
from mmreplay.episodes import (
    ALL_FLAGS,
    BREAK,
    END,
    FINAL,
    START,
    TERMINATED,
    TRUNCATED,
)
from mmreplay.ring import Ring
from mmreplay.schema import Schema

if TYPE_CHECKING:
    from mmreplay.kernels.rows import RowsKernel

rows: RowsKernel = cast("RowsKernel", kernels.load("rows"))

Envs = NDArray[np.int64] | slice
ONLY = tuple(np.array([flags], np.uint8) for flags in range(ALL_FLAGS + 1))
"""Flags of the last row of an only environment, made once: nobody may change them."""
for _each in ONLY:
    _each.flags.writeable = False


class EpisodeFlags:
    """Gives every row its flags, knowing what stands before it.

    Attributes:
        before: uint8 ``[E]``, flags of each environment's last row; FINAL for none,
            after which a row starts an episode whatever the autoreset rule.
        pending: uint8 ``[E]``, flags that the next row carries as well.
        num_agents: See `Schema.num_agents`.
    """

    def __init__(self, schema: Schema, num_envs: int, *, final_follows: bool) -> None:
        self._num_envs = num_envs
        self._final_follows = final_follows
        self._terminated = schema.role("terminated")
        self._truncated = schema.role("truncated")
        ends = {self._terminated, self._truncated} - {None}
        self._endless = {path: np.zeros(num_envs, bool) for path in ends if path}
        self._bools = all(schema.fields[path].dtype == "bool" for path in ends if path)
        self.num_agents = schema.num_agents
        self.before = np.full(num_envs, FINAL, np.uint8)
        self._none = self.pending = np.zeros(num_envs, np.uint8)
        self._none.flags.writeable = False
        # What was before, where it is known to have ended nowhere.
        self._calm: NDArray[np.uint8] | None = None

    def ends(self, columns: Columns) -> Columns:
        """Ends of steps by path, those of agents joined; see `Schema.num_agents`.

        Args:
            columns: Per path ``[*lead, *shape]``.

        Returns:
            The same columns, or of ends per agent bool ``[N]``, N steps in order.
        """
        agents = self.num_agents
        if agents is None:
            return columns
        named = {"terminated": self._terminated, "truncated": self._truncated}
        each = {
            role: np.asarray(columns[path], bool).reshape(-1, agents)
            for role, path in named.items()
            if path is not None
        }
        over = np.logical_or.reduce(list(each.values())).all(axis=1)
        joined: Columns = {}
        if self._terminated is not None:
            joined[self._terminated] = over & each["terminated"].all(axis=1)
        if self._truncated is not None:
            joined[self._truncated] = over & each["truncated"].any(axis=1)
        return joined

    def interrupt(self, envs: Envs, flags: NDArray[np.uint8] | np.uint8) -> None:
        """Let the next row of some environments start anew, with flags of its own."""
        self.before = self.before.copy()
        self.pending = self.pending.copy()
        self.before[envs] = FINAL
        self.pending[envs] |= flags

    def forget(self, envs: Envs, begun: NDArray[np.bool_]) -> None:
        """Let the next row start anew: the rows before it are given up.

        Where the environment's own final row follows an end, the end was given up
        and that row is still to come: it is no step, whatever stands before it.

        Args:
            envs: Which.
            begun: bool ``[N]``, whether they had a row at all.
        """
        kept = self.before[envs]
        due = self._final_follows & ((kept & END) != 0)
        self.interrupt(envs, np.where(due | ~begun, 0, START | BREAK).astype(np.uint8))
        self.before[envs] = np.where(due, kept, np.uint8(FINAL))

    def follow(self, marker: EpisodeFlags) -> None:
        """Go on where another one stopped; its schema may have had other ends."""
        self.before, self.pending = marker.before, marker.pending

    def note(self, envs: Envs, last: NDArray[np.uint8]) -> None:
        """Take in the flags of the rows just published."""
        self.before = self.before.copy()
        self.before[envs] = last
        if self.pending is not self._none:
            self.pending = self.pending.copy()
            self.pending[envs] = 0

    def note_all(self, last: NDArray[np.uint8]) -> None:
        """The same for all environments."""
        self.before = last.copy()
        self.pending = self._none

    def note_one(self, last: int) -> None:
        """The same for the only environment."""
        self.before = ONLY[last]
        self.pending = self._none

    def note_wide(self, last: NDArray[np.uint8], ends: int) -> None:
        """The same for all environments, of what `wide` gave."""
        self.before, self.pending = last, self._none
        if last is self._none or (not ends and not (last & (END | FINAL)).any()):
            self._calm = last

    def calm(self) -> bool:
        """Whether a step that ends nowhere has no flags, in any environment."""
        if self.pending is not self._none:
            return False
        if self.before is self._none:
            return True
        if self._num_envs == 1:
            return not self.before.item() & (END | FINAL)
        return self.before is self._calm

    def note_calm(self) -> None:
        """Take in that such a step was published."""
        self.before = self._calm = self._none

    def wide(self, columns: Columns, ends: int) -> NDArray[np.uint8]:
        """Flags of one step of all environments, uint8 ``[E]``; nobody may change them.

        Args:
            columns: Per path ``[E, *shape]``, looked at where the step may end.
            ends: TERMINATED and TRUNCATED, as the step may say somewhere.
        """
        if not ends and self.before is self._calm and self.pending is self._none:
            return self._none
        told = columns if ends else self._endless
        flags: NDArray[np.uint8] = self.plain(told, 1)[0]
        return flags

    def step(self, columns: Columns) -> NDArray[np.uint8]:
        """Flags of one step of all environments, uint8 ``[E]``."""
        if self._num_envs == 1:
            columns, ends = self.ends(columns), 0
            if self._terminated and columns[self._terminated]:
                ends |= TERMINATED
            if self._truncated and columns[self._truncated]:
                ends |= TRUNCATED
            return np.array([self.one(ends)], np.uint8)
        flags: NDArray[np.uint8] = self.plain(columns, 1)[0]
        return flags

    def one(self, ends: int) -> int:
        """Flags of one step of the only environment: arrays cost more than integers.

        Args:
            ends: TERMINATED and TRUNCATED, as the step says.
        """
        before: int = self.before.item()
        flags = ends
        if self.pending is not self._none:
            flags |= self.pending.item()
        start = before & FINAL
        if not self._final_follows:
            start |= before & END
        elif before & END:
            flags = FINAL
        return flags | START if start else flags

    def plain(self, columns: Columns, steps: int) -> NDArray[np.uint8]:
        """Flags of T steps of all environments, as plain arrays; see `block`.

        Args:
            columns: Per path ``[T, E, *shape]``; without an axis that is 1 long.
            steps: T.
        """
        if not self._bools or self.num_agents is not None:
            return self.block(columns, self.before, self.pending, steps)
        flags = np.empty((steps, self._num_envs), np.uint8)
        terminated, truncated = self._terminated, self._truncated
        rows.mark(
            flags,
            self.before,
            None if terminated is None else columns[terminated],  # type: ignore[arg-type]  # bools, as asked before
            None if truncated is None else columns[truncated],  # type: ignore[arg-type]
            self._final_follows,
        )
        if self.pending is not self._none:
            flags[0] |= self.pending
        return flags

    def block(
        self,
        columns: Columns,
        before: NDArray[np.uint8],
        pending: NDArray[np.uint8],
        steps: int | None = None,
    ) -> NDArray[np.uint8]:
        """Flags of T steps of N environments, uint8 ``[T, N]``.

        Args:
            columns: Per path ``[T, N, *shape]``; without the axis that is 1 long.
            before: uint8 ``[N]``.
            pending: uint8 ``[N]``.
            steps: T, where it is known.
        """
        if steps is None:
            steps = len(next(iter(columns.values())))
        columns = self.ends(columns)
        flags = np.empty((steps, len(before)), np.uint8)
        rows.mark(
            flags,
            before,
            _ends(columns, self._terminated, flags.shape),
            _ends(columns, self._truncated, flags.shape),
            self._final_follows,
        )
        if pending is not self._none:
            flags[0] |= pending
        return flags


def _ends(
    columns: Columns, path: str | None, shape: tuple[int, ...]
) -> NDArray[np.bool_] | None:
    """One kind of ends as bool ``[T, N]``, or None where the schema has none."""
    if path is None:
        return None
    ends: NDArray[np.bool_] = np.asarray(columns[path], bool)
    return ends if ends.shape == shape else ends.reshape(shape)


@dataclass(frozen=True, slots=True)
class Expansion:
    """Where the rows of a block come from, environment by environment.

    Attributes:
        source: int64 ``[N]``, index into the block flattened ``[T * E]``.
        env: int64 ``[N]``, column of the block.
        offset: int64 ``[N]``, rows after the environment's head.
        final: bool ``[N]``, the row is a final row.
        counts: int64 ``[E]``, rows of each environment.
    """

    source: NDArray[np.int64]
    env: NDArray[np.int64]
    offset: NDArray[np.int64]
    final: NDArray[np.bool_]
    counts: NDArray[np.int64]


def expand(finals: NDArray[np.bool_]) -> Expansion:
    """Lay out a block whose marked steps are followed by a final row.

    Args:
        finals: bool ``[T, E]``.
    """
    steps, envs = finals.shape
    doubled = finals.T.ravel()
    repeats = 1 + doubled.astype(np.int64)
    order = (np.arange(steps)[None, :] * envs + np.arange(envs)[:, None]).ravel()
    counts = repeats.reshape(envs, steps).sum(axis=1)
    firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    env = np.repeat(np.arange(envs), counts)
    final = np.zeros(len(env), bool)
    final[(np.cumsum(repeats) - 1)[doubled]] = True
    return Expansion(
        np.repeat(order, repeats), env, np.arange(len(env)) - firsts[env], final, counts
    )


def as_laid(ring: Ring, column: NDArray[Any]) -> NDArray[Any]:
    """A block ``[T, E, *shape]`` as ``[N, *shape]`` in the order of the ring's rows."""
    if ring.layout == "env_major" and ring.num_envs > 1:
        column = column.swapaxes(0, 1)
    count = column.shape[0] * column.shape[1]
    return np.ascontiguousarray(column).reshape(count, *column.shape[2:])


def laid_out(columns: Columns, final: Columns | None, layout: Expansion) -> Columns:
    """Columns of a block in the order of its rows, final rows put in."""
    found: Columns = {}
    for path, column in columns.items():
        steps, envs, *shape = column.shape
        flat = column.reshape(steps * envs, *shape)
        if envs > 1 or layout.final.any():
            flat = flat[layout.source]
        if final is not None and path in final and layout.final.any():
            last = final[path].reshape(steps * envs, *shape)
            flat[layout.final] = last[layout.source[layout.final]]
        found[path] = flat
    return found
