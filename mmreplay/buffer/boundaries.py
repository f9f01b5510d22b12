"""Which flags rows get, and the rows that final observations take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.intake import Columns
from mmreplay.episodes import (
    BREAK,
    END,
    FINAL,
    START,
    TERMINATED,
    TRUNCATED,
    flags_of_steps,
)
from mmreplay.schema import Schema

Envs = NDArray[np.int64] | slice


class Marker:
    """Gives every row its flags, knowing what stands before it.

    Attributes:
        before: uint8 ``[E]``, flags of each environment's last row; FINAL for none,
            after which a row starts an episode whatever the autoreset rule.
        pending: uint8 ``[E]``, flags that the next row carries as well.
    """

    def __init__(self, schema: Schema, num_envs: int, *, final_follows: bool) -> None:
        self._num_envs = num_envs
        self._final_follows = final_follows
        self._terminated = schema.role("terminated")
        self._truncated = schema.role("truncated")
        self.before = np.full(num_envs, FINAL, np.uint8)
        self.pending = np.zeros(num_envs, np.uint8)

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

    def follow(self, marker: Marker) -> None:
        """Go on where another one stopped; its schema may have had other ends."""
        self.before, self.pending = marker.before, marker.pending

    def note(self, envs: Envs, last: NDArray[np.uint8]) -> None:
        """Take in the flags of the rows just published."""
        self.before = self.before.copy()
        self.before[envs] = last
        if self.pending.any():
            self.pending = self.pending.copy()
            self.pending[envs] = 0

    def note_all(self, last: NDArray[np.uint8]) -> None:
        """The same for all environments."""
        self.before = last.copy()
        if self.pending[0] or (self._num_envs > 1 and self.pending.any()):
            self.pending = np.zeros_like(self.pending)

    def step(self, columns: Columns) -> NDArray[np.uint8]:
        """Flags of one step of all environments, uint8 ``[E]``."""
        if self._num_envs == 1:
            return self._only(columns)
        none = np.zeros(self._num_envs, bool)
        flags = flags_of_steps(
            self.before,
            np.asarray(columns[self._terminated] if self._terminated else none, bool),
            np.asarray(columns[self._truncated] if self._truncated else none, bool),
            self._final_follows,
        )
        return flags | self.pending

    def _only(self, columns: Columns) -> NDArray[np.uint8]:
        """The same for one environment, in plain integers: arrays cost more."""
        before = int(self.before[0])
        flags = int(self.pending[0])
        if self._terminated and columns[self._terminated]:
            flags |= TERMINATED
        if self._truncated and columns[self._truncated]:
            flags |= TRUNCATED
        start = before & FINAL
        if not self._final_follows:
            start |= before & END
        elif before & END:
            flags = FINAL
        return np.array([flags | START if start else flags], np.uint8)

    def block(
        self,
        columns: Columns,
        before: NDArray[np.uint8],
        pending: NDArray[np.uint8],
    ) -> NDArray[np.uint8]:
        """Flags of T steps of N environments, uint8 ``[T, N]``.

        Args:
            columns: Per path ``[T, N, *shape]``.
            before: uint8 ``[N]``.
            pending: uint8 ``[N]``.
        """
        some = next(iter(columns.values()))
        none = np.zeros(some.shape[:2], bool)
        flags = flags_of_block(
            before,
            np.asarray(columns[self._terminated] if self._terminated else none, bool),
            np.asarray(columns[self._truncated] if self._truncated else none, bool),
            self._final_follows,
        )
        flags[0] |= pending
        return flags


def flags_of_block(
    before: NDArray[np.uint8],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    final_follows: bool,
) -> NDArray[np.uint8]:
    """Flags of T steps of each environment, final rows of their own not counted.

    Args:
        before: uint8 ``[E]``, flags of the row before the block; FINAL for none.
        terminated: bool ``[T, E]``.
        truncated: bool ``[T, E]``.
        final_follows: The row after an end is the final row (``"next_step"``).

    Returns:
        uint8 ``[T, E]``.
    """
    if not (terminated.any() or truncated.any()):
        # The common block lies within one episode of each environment.
        return _within(before, np.zeros(terminated.shape, np.uint8), final_follows)
    kinds: NDArray[np.uint8] = terminated * np.uint8(TERMINATED)
    kinds |= truncated * np.uint8(TRUNCATED)
    chain = np.concatenate([before[None], kinds])
    ended = (chain & END) != 0
    if not final_follows:
        starts = ended[:-1].copy()
        starts[0] |= (before & FINAL) != 0
        kinds |= starts * np.uint8(START)
        return kinds
    # A row after an end is final and ends nothing itself, whatever it says: within
    # a run of ends every second one is real.
    index = np.arange(len(chain))[:, None]
    since = index - np.maximum.accumulate(np.where(ended, -1, index), axis=0)
    real = ended & (since % 2 == 1)
    final = np.concatenate([((before & FINAL) != 0)[None], real[:-1]])
    flags = np.where(final[1:], np.uint8(FINAL), kinds * real[1:])
    flags |= final[:-1] * np.uint8(START)
    return flags


def _within(
    before: NDArray[np.uint8], flags: NDArray[np.uint8], final_follows: bool
) -> NDArray[np.uint8]:
    """Flags of a block in which nothing ends; flags are zero, and written into."""
    if final_follows:
        final = (before & END) != 0
        flags[0] = np.where(final, np.uint8(FINAL), np.uint8(0))
        flags[0] |= ((before & FINAL) != 0) * np.uint8(START)
        if len(flags) > 1:
            flags[1] = final * np.uint8(START)
    else:
        flags[0] = ((before & (END | FINAL)) != 0) * np.uint8(START)
    return flags


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
