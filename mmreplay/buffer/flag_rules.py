"""Which flags rows get, and the rows that final observations take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.episodes import ALL_FLAGS, BREAK, CUT, END, FINAL, START, TERMINATED, TRUNCATED
from mmreplay.errors import SchemaError
from mmreplay.ring import Ring
from mmreplay.schema import Schema

if TYPE_CHECKING:
    from mmreplay.kernels.rows import RowsKernel

rows: RowsKernel = cast("RowsKernel", kernels.load("rows"))

Columns = Mapping[str, NDArray[np.generic]]
Envs = NDArray[np.int64] | slice
ONLY = tuple(np.array([flags], np.uint8) for flags in range(ALL_FLAGS + 1))
"""Flags of a row of an only environment, made once; not to be changed."""
for _flags in ONLY:
    _flags.flags.writeable = False


class EpisodeFlags:
    """Gives every row its flags, knowing the row before it.

    Attributes:
        before: uint8 ``[E]``, flags of each environment's last row; FINAL for none,
            after which a row starts an episode whatever the autoreset rule.
        pending: uint8 ``[E]``, flags that the next row carries as well.
        num_agents: See `Schema.num_agents`.
    """

    def __init__(self, schema: Schema, num_envs: int, *, final_follows: bool) -> None:
        """Begin before the first row.

        Args:
            schema: Of the rows.
            num_envs: Environments.
            final_follows: The row after an end is the final row (``"next_step"``).
        """
        self._num_envs = num_envs
        self._final_follows = final_follows
        self._terminated = schema.role("terminated")
        self._truncated = schema.role("truncated")
        self.num_agents = schema.num_agents
        self.before = np.full(num_envs, FINAL, np.uint8)
        # Most steps have no flag, and what is compared by identity costs least.
        self._none = self.pending = np.zeros(num_envs, np.uint8)
        self._none.flags.writeable = False
        # The array of flags before that is known to have no end or final row in it.
        self._no_ends: NDArray[np.uint8] | None = None

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
        joined: dict[str, NDArray[np.generic]] = {}
        if self._terminated is not None:
            joined[self._terminated] = over & each["terminated"].all(axis=1)
        if self._truncated is not None:
            joined[self._truncated] = over & each["truncated"].any(axis=1)
        return joined

    def ended(self, columns: Columns, lead: tuple[int, ...]) -> NDArray[np.bool_]:
        """Say which steps end an episode.

        Args:
            columns: Per path ``[*lead, *shape]``, or without an axis that is 1 long.
            lead: ``(E,)`` of one step, ``(T, E)`` of several.

        Returns:
            bool ``[*lead]``.
        """
        ended = np.zeros(lead, bool)
        ends = self.ends(columns)
        for path in (self._terminated, self._truncated):
            if path is not None:
                ended |= np.reshape(np.asarray(ends[path], bool), lead)
        return ended

    def refuse_final(self) -> None:
        """Refuse final observations where an episode's last one has a row of its own.

        Raises:
            SchemaError: The row after an end holds it.
        """
        if self._final_follows:
            raise SchemaError(
                "final_observation must be None in a buffer with "
                "autoreset='next_step', where the row after an end holds it. Leave it "
                "out."
            )

    def interrupt(self, envs: Envs, flags: NDArray[np.uint8] | np.uint8) -> None:
        """Start a new episode with the next row of some environments.

        Args:
            envs: Which.
            flags: uint8 ``[N]``, or of all, that those rows carry as well; whether the
                episode before them is truncated, the last call says.
        """
        # Arrays are replaced, never changed: a step may have been given them as flags.
        self.before = self.before.copy()
        self.pending = self.pending.copy()
        self.before[envs] = FINAL
        self.pending[envs] = (self.pending[envs] & ~np.uint8(CUT)) | flags

    def forget(self, envs: Envs, begun: NDArray[np.bool_]) -> None:
        """Start a new episode with the next row: the rows before it are given up.

        Where the environment's own final row follows an end, the end was given up
        and that row is still to come: it is no step, whatever stands before it.

        Args:
            envs: Which.
            begun: bool ``[N]``, whether they had a row at all.
        """
        former = self.before[envs]
        due = self._final_follows & ((former & END) != 0)
        self.interrupt(envs, np.where(due | ~begun, 0, START | BREAK).astype(np.uint8))
        self.before[envs] = np.where(due, former, np.uint8(FINAL))

    def continue_from(self, other: EpisodeFlags) -> None:
        """Take over the last rows of another one, whose schema may have other ends."""
        self.before, self.pending = other.before, other.pending

    def note(self, envs: Envs, last: NDArray[np.uint8]) -> None:
        """Take in the flags of the last rows published of some environments."""
        self.before = self.before.copy()
        self.before[envs] = last
        if self.pending is not self._none:
            self.pending = self.pending.copy()
            self.pending[envs] = 0

    def note_all(self, last: NDArray[np.uint8]) -> None:
        """The same for all environments."""
        self.before = last.copy()
        self.pending = self._none

    def note_step(self, flags: NDArray[np.uint8], ends: int) -> None:
        """The same for a step that `step` gave its flags.

        Args:
            flags: uint8 ``[E]``, as it returned them.
            ends: As it was given them.
        """
        self.before, self.pending = flags, self._none
        # `no_boundary` knows the array without flags: to look into it takes 0.8 us.
        if flags is self._none or ends or self._num_envs == 1:
            return
        if not (flags & (END | FINAL)).any():
            self._no_ends = flags

    def no_boundary(self) -> bool:
        """Whether the next step has no flag but its own ends, in any environment."""
        if self.pending is not self._none:
            return False
        if self.before is self._none:
            return True
        if self._num_envs == 1:
            return not self.before.item() & (END | FINAL)
        return self.before is self._no_ends

    def final_is_next(self) -> bool:
        """Whether the next row of some environment is a final row."""
        return self._final_follows and bool((self.before & END).any())

    def note_no_flags(self) -> None:
        """Take in that a step without any flag was published."""
        self.before = self._none

    def step(self, ends: int, env_ends: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Flags of one step of all environments, uint8 ``[E]``; not to be changed.

        Args:
            ends: TERMINATED and TRUNCATED bits that some environment has.
            env_ends: uint8 ``[E]``, the bits of each environment.
        """
        if not ends and self.no_boundary():
            return self._none
        if self._num_envs == 1:
            return ONLY[self._alone(ends)]
        flags = np.empty((1, self._num_envs), np.uint8)
        rows.mark(
            flags,
            self.before,
            env_ends & TERMINATED if ends & TERMINATED else None,  # type: ignore[arg-type]  # bytes that are not 0 are true
            env_ends & TRUNCATED if ends & TRUNCATED else None,  # type: ignore[arg-type]
            self._final_follows,
        )
        if self.pending is not self._none:
            flags |= self.pending
        found: NDArray[np.uint8] = flags[0]
        return found

    def _alone(self, ends: int) -> int:
        """Flags of a step of an only environment: integers cost less than arrays."""
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

    def steps(
        self,
        columns: Columns,
        steps: int,
        some: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None,
    ) -> NDArray[np.uint8]:
        """Flags of T steps of N environments, uint8 ``[T, N]``.

        Args:
            columns: Per path ``[T, N, *shape]``, or without an axis that is 1 long.
            steps: T.
            some: `before` and `pending` of N environments; all by default.
        """
        before, pending = some or (self.before, self.pending)
        if self.num_agents is not None:
            columns = self.ends(columns)
        flags = np.empty((steps, len(before)), np.uint8)
        rows.mark(
            flags,
            before,
            _ends(columns, self._terminated, flags.shape),
            _ends(columns, self._truncated, flags.shape),
            self._final_follows,
        )
        if pending is not self._none and steps:
            flags[0] |= pending
        return flags


def _ends(columns: Columns, path: str | None, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """One kind of ends as bool ``[T, N]``, or None where the schema has none."""
    if path is None:
        return None
    ends: NDArray[np.bool_] = columns[path]  # type: ignore[assignment]  # a schema's ends are bools
    if ends.shape == shape or (ends.ndim == 1 and 1 in shape):
        # The kernel takes ends without an axis that is 1 long as well.
        return ends
    return ends.reshape(shape)


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


def as_rows(ring: Ring, column: NDArray[Any]) -> NDArray[Any]:
    """A block ``[T, E, *shape]`` as ``[N, *shape]`` in the order of the ring's rows."""
    if ring.layout == "env_major" and ring.num_envs > 1:
        column = column.swapaxes(0, 1)
    count = column.shape[0] * column.shape[1]
    return np.ascontiguousarray(column).reshape(count, *column.shape[2:])


def with_final_rows(columns: Columns, final: Columns | None, layout: Expansion) -> Columns:
    """Columns of a block in the order of its rows, final rows put in."""
    ordered: dict[str, NDArray[np.generic]] = {}
    for path, column in columns.items():
        steps, envs, *shape = column.shape
        flat = column.reshape(steps * envs, *shape)
        if envs > 1 or layout.final.any():
            flat = flat[layout.source]
        if final is not None and path in final and layout.final.any():
            last = final[path].reshape(steps * envs, *shape)
            flat[layout.final] = last[layout.source[layout.final]]
        ordered[path] = flat
    return ordered
