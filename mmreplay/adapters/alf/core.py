"""The ring of a buffer, and all operations on it, in the process of its writer.

Calls of child processes arrive here too; see `sharing`. So arguments and results are
arrays, numbers and dicts of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.adapters.alf import checkpoint
from mmreplay.adapters.alf.episodes import BEGIN, RETURN, ZERO, Log, Names, ReturnRule, last_rows
from mmreplay.adapters.alf.errors import RefusedError, UnknownError, refusing
from mmreplay.adapters.alf.nests import Columns, LeafValues
from mmreplay.adapters.alf.sampling import DrawOptions, WindowSampling
from mmreplay.adapters.alf.sharing import hung_up, serves
from mmreplay.adapters.common.location import BufferLocation
from mmreplay.batch import Batch
from mmreplay.errors import FormatError
from mmreplay.schema import Field, Schema

Ids = NDArray[np.int64]
KIND = "mmreplay.adapters.alf"
LOOK_S = 1.0
"""Interval at which a call that waits for another process checks that it is alive."""


@dataclass(frozen=True, slots=True)
class RingSpec:
    """The definition of a ring.

    Attributes:
        fields: Of the nest's leaves, by path.
        names: Leaves that mark episodes.
        num_envs: Environments.
        capacity: Rows of each.
        draw_options: How batches are drawn; None where none are.
        keep: Episodes are kept apart.
        rule: Returns are stored.
    """

    fields: dict[str, Field]
    names: Names
    num_envs: int
    capacity: int
    draw_options: DrawOptions | None = None
    keep: bool = False
    rule: ReturnRule | None = None


class Core:
    """The ring of one `RingBuffer`; every method may be called from any thread."""

    def __init__(self, spec: RingSpec, location: BufferLocation) -> None:
        """Make the ring, or open the existing one."""
        self._spec = spec
        self._log = Log(spec.names, spec.num_envs, spec.keep, spec.rule)
        fields = dict(spec.fields)
        step_type = spec.names.step_type
        if step_type is not None:
            field = fields[step_type]
            # Published rows never change, but the newest of a run that broke off.
            fields[step_type] = Field(field.shape, field.dtype, mutable=True)
        roles = {} if spec.names.reward is None else {"reward": spec.names.reward}
        self._sampling = None if spec.draw_options is None else WindowSampling(spec.draw_options)
        self._location = location
        with refusing():
            schema = Schema.from_flat(fields | self._log.fields, roles)
            self.buffer = location.ring(
                schema,
                spec.capacity,
                spec.num_envs,
                sampler=None if self._sampling is None else self._sampling.of(1),
                # A step is nearly always one of every environment: one write a file.
                layout="time_major",
                on_resume="truncate",
            )
        self._leaves = tuple(spec.fields)
        self._turn = threading.Condition(threading.RLock())
        self._stopped = False
        if location.resumed:
            self._log.resume(self.buffer)

    def where(self) -> str:
        """Return the folder, and whether it is temporary."""
        return repr(self._location)

    def close(self) -> None:
        """Commit and close the ring."""
        with self._turn:
            self.stop()
            self._location.close()

    def stop(self) -> None:
        """Let waiting calls return without effect, and new ones not wait."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    def revive(self) -> None:
        """Permit waiting again after `stop`."""
        with self._turn:
            self._stopped = False

    def bounds(self) -> tuple[Ids, Ids]:
        """Return the first position alive and one past the last, int64 ``[E]`` each."""
        span = self.buffer.span
        return span.first.copy(), span.stop.copy()

    def env_ids(self, env_ids: Ids | None) -> Ids:
        """Return environments after checks.

        Raises:
            RefusedError: There is more than one axis, or one is named twice.
            UnknownError: There is no such environment.
        """
        num_envs = self._spec.num_envs
        if env_ids is None:
            return np.arange(num_envs)
        ids = np.asarray(env_ids).astype(np.int64)
        if ids.ndim != 1 or len(np.unique(ids)) != len(ids):
            raise RefusedError(
                "env_ids must be different environments in one axis, got "
                f"{ids.tolist()}. Pass each environment once."
            )
        if len(ids) and (ids.min() < 0 or ids.max() >= num_envs):
            raise UnknownError(
                f"env_ids must be in [0, {num_envs}), got values in [{ids.min()}, "
                f"{ids.max()}]. Environments are counted from 0."
            )
        return ids

    def _wait(self, ready: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if stopped or the caller is gone."""
        # A killed child notifies no thread, so waiting threads check now and then.
        patience = LOOK_S if serves() else None
        while not (self._stopped or hung_up()):
            if ready():
                return True
            self._turn.wait(patience)
        return False

    def enqueue(self, columns: Columns, env_ids: Ids | None, blocking: bool) -> bool:
        """Add one row of each environment; return False if waiting was stopped."""
        ids = self.env_ids(env_ids)
        for path, column in columns.items():
            if column.ndim == 0 or len(column) != len(ids):
                raise RefusedError(
                    f"batch: {path!r} of shape {list(column.shape)} must have a row "
                    f"for each of {len(ids)} environments. Pass env_ids to add to some "
                    "of them."
                )
        if len(ids) == 0:
            return True
        columns = self._repeated(columns)
        with self._turn:
            full = self._spec.capacity
            if blocking and not self._wait(
                lambda: bool((self.buffer.span.lengths[ids] < full).all())
            ):
                return False
            positions = self.buffer.heads[ids]
            with refusing():
                self._log.recover_interrupted(self.buffer, ids, positions)
                whole = columns | self._log.columns(ids, positions, columns)
                self._log.end_unfinished(self.buffer, ids, whole)
                self.buffer.add(whole, env_ids=None if env_ids is None else ids)
                self._log.added(self.buffer, ids, positions, whole)
            self._turn.notify_all()
        return True

    def enqueue_plain(self, columns: LeafValues) -> bool:
        """Add one row of each within episodes; return False if `enqueue` has to."""
        with self._turn:
            whole = self._log.plain(columns, self.buffer.published)
            added = None if whole is None else self.buffer.try_add(whole)
            if added is not None:
                self._log.mark_added(added)
                self._turn.notify_all()
        return added is not None

    def extend(self, columns: Columns) -> None:
        """Add many rows of the only environment, ``[T, *shape]``; no episodes."""
        with self._turn, refusing():
            self.buffer.extend(self._repeated(columns))
            self._turn.notify_all()

    def _repeated(self, columns: Columns) -> Columns:
        """Repeat axes of length 1 to the spec's, as torch's assignment does.

        A leaf that lacks an axis is left alone, to be refused: torch would repeat it
        only where the number of environments happens to equal an axis, along the wrong
        one.
        """
        whole = dict(columns)
        for path, column in columns.items():
            shape = self._spec.fields[path].shape
            inner = column.shape[1:]
            if inner != shape and len(inner) == len(shape):
                fits = zip(inner, shape, strict=True)
                if all(length in (1, wanted) for length, wanted in fits):
                    whole[path] = np.broadcast_to(column, (len(column), *shape))
        return whole

    def dequeue(self, env_ids: Ids | None, count: int, blocking: bool) -> Columns | None:
        """Remove the oldest rows ``[B, count, *shape]``; return None if stopped."""
        ids = self.env_ids(env_ids)
        if not 1 <= count <= self._spec.capacity:
            raise RefusedError(
                f"n must be in [1, {self._spec.capacity}], got {count}. Ask for fewer rows."
            )
        with self._turn:

            def ready() -> bool:
                return bool((self.buffer.span.lengths[ids] >= count).all())

            if blocking and not self._wait(ready):
                return None
            with refusing():
                batch = self.buffer.dequeue(count, ids)
            self._turn.notify_all()
        return self._shaped(batch.fields, len(ids), count)

    def remove_up_to(self, count: int, env_ids: Ids | None) -> None:
        """Remove the oldest rows, at most as many as there are."""
        ids = self.env_ids(env_ids)
        with self._turn:
            counts = np.minimum(self.buffer.span.lengths[ids], count)
            for some in np.unique(counts[counts > 0]).tolist():
                self.buffer.dequeue(some, ids[counts == some])
            self._turn.notify_all()

    def clear(self, env_ids: Ids | None) -> None:
        """Remove all rows; positions continue."""
        ids = self.env_ids(env_ids)
        with self._turn:
            if len(ids):
                self.buffer.clear(ids)
            self._log.forget(ids)
            self._turn.notify_all()

    def _shaped(self, fields: Mapping[str, Any], *lead: int) -> Columns:
        """Return leaves with the leading axis split."""
        return {
            path: np.ascontiguousarray(fields[path]).reshape(*lead, *self._spec.fields[path].shape)
            for path in self._leaves
        }

    def gather_all(self, ignored: int) -> tuple[Columns, Ids, Ids]:
        """Return rows ``[E, T, *shape]`` without ignored ones, and their origins."""
        with self._turn:
            first, stop = self.bounds()
            if (first != first[0]).any() or (stop != stop[0]).any():
                raise RefusedError(
                    "gather_all: environments must have the same rows, got rows from "
                    f"{first.tolist()} to {stop.tolist()}. Add steps of all of them, "
                    "or read some with get_field."
                )
            length = int(stop[0] - first[0])
            if ignored and length <= ignored:
                raise RefusedError(
                    f"gather_all ignores {ignored} rows and needs more, got {length}. "
                    "Add steps first."
                )
            fields = self.buffer.gather_all().fields
        shaped = self._shaped(fields, self._spec.num_envs, length)
        shaped = {path: column[:, ignored:] for path, column in shaped.items()}
        return shaped, np.arange(self._spec.num_envs), first + ignored

    def get_field(self, paths: tuple[str, ...], env_ids: Ids, positions: Ids) -> Columns:
        """Return leaves or fields of episodes of rows, ``[*broadcast, *shape]``."""
        with self._turn, refusing():
            return {path: self.buffer.get_field(path, env_ids, positions) for path in paths}

    def begins(self, env_ids: Ids, positions: Ids) -> Ids:
        """Return the first positions of the episodes of rows."""
        return self._episode_field(BEGIN, env_ids, positions)

    def zeros(self, env_ids: Ids, positions: Ids) -> Ids:
        """Return the last row up to each that is FIRST or has discount 0."""
        return self._episode_field(ZERO, env_ids, positions)

    def _episode_field(self, path: str, env_ids: Ids, positions: Ids) -> Ids:
        if path not in self.buffer.schema:
            raise RefusedError(
                f"episodes: this buffer does not store {path!r}. Make it with "
                "keep_episodic_info=True and the leaves step_type and discount."
            )
        found = self.get_field((path,), env_ids, positions)
        return found[path].astype(np.int64)

    def left(self, env_ids: Ids, positions: Ids) -> Ids:
        """Return the number of rows after each in its episode."""
        with self._turn:
            self._episode_field(BEGIN, env_ids, positions)
            ids, rows = np.broadcast_arrays(env_ids, positions)
            found: Ids = last_rows(self.buffer, ids, rows) - rows
            return found

    def sample(self, batch_size: int, length: int) -> dict[str, Any]:
        """Draw windows ``[B, T, *shape]``, with environments, positions and weights."""
        assert self._sampling is not None
        with self._turn, refusing():
            self._sampling.check(self.buffer, length)
            self.buffer.sampler = self._sampling.of(length)
            batch = self.buffer.sample(batch_size)
            found: dict[str, Any] = {
                "data": {path: batch.fields[path] for path in self._leaves},
                "env_ids": batch.env_ids,
                "positions": batch.positions,
                "weights": self._sampling.weights(batch),
            }
            if self._spec.rule is not None:
                found["returns"] = batch.fields[RETURN][:, 0]
            return found

    def update_priority(self, env_ids: Ids, positions: Ids, values: Any) -> int:
        """Set priorities; return how many were dropped because rows are overwritten."""
        assert self._sampling is not None
        self._sampling.check_prioritized()
        nothing = np.empty(0)
        batch = Batch({}, env_ids, positions, nothing, nothing)
        with self._turn, refusing():
            try:
                return self.buffer.update_priorities(batch, values)
            except ValueError as error:
                raise RefusedError(str(error)) from error

    def initial_priority(self) -> float:
        """Return the priority of a new row."""
        assert self._sampling is not None
        with self._turn:
            return self._sampling.initial_priority(self.buffer)

    def take(self, positions: Ids) -> Columns:
        """Return the leaves of rows of the only environment."""
        return self.get_field(self._leaves, np.zeros_like(positions), positions)

    def state_dict(self) -> dict[str, Any]:
        """Commit, and return a state that identifies the buffer."""
        if self._location.temporary:
            raise FormatError(
                f"state of the buffer in the temporary folder {self._location.path}, "
                "which is removed at exit. Make the buffer with path=."
            )
        with self._turn:
            self.buffer.commit()
            sampling = None if self._sampling is None else self._sampling.state_dict()
            return {
                "kind": KIND,
                "path": str(self._location.path),
                "uuid": self.buffer.metadata.uuid.hex(),
                "heads": self.buffer.heads.tolist(),
                "drawing": sampling,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state with the samplers; the rows are in the folder.

        A state that alf wrote holds the rows, which are added.
        """
        if isinstance(state, Mapping) and checkpoint.HEADS in state:
            self._read_in(checkpoint.read(self._spec.fields, self._spec.num_envs, state))
            return
        if not isinstance(state, Mapping) or state.get("kind") != KIND:
            kind = state.get("kind") if isinstance(state, Mapping) else state
            raise FormatError(
                f"state must be of kind {KIND!r}, got kind {kind!r:.60}. Load what "
                "state_dict of this buffer returned."
            )
        own = self.buffer.metadata.uuid.hex()
        if state.get("uuid") != own:
            raise FormatError(
                f"state must be of the buffer {own} at {self._location.path}, got "
                f"{state.get('uuid')} at {state.get('path')}. Make the buffer with the "
                "state's path and resume=True, then load it."
            )
        with self._turn:
            if self._sampling is not None and state.get("drawing") is not None:
                self._sampling.load_state_dict(state["drawing"])
            self._log.break_off(self.buffer)

    def _read_in(self, state: checkpoint.Foreign) -> None:
        """Add the rows of a state that alf wrote, and their priorities."""
        with self._turn:
            if self.buffer.heads.any():
                raise FormatError(
                    "state of alf must be loaded into a new buffer, but "
                    f"{self._location.path} already has rows. Choose another path."
                )
            for columns, ids in state.steps():
                self.enqueue(columns, ids, False)
            ids, positions, values = state.priorities()
            if self._sampling is not None and self._sampling.prioritized and len(ids):
                self.update_priority(ids, positions, values)
            self._log.break_off(self.buffer)
