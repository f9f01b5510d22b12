"""What Stable-Baselines3's save_replay_buffer writes: a pickled buffer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay.convert.base import Notes
from mmreplay.convert.foreign import pickles
from mmreplay.convert.foreign.columns import Array, Rows
from mmreplay.convert.foreign.fields import ends_of, make_schema, scalar
from mmreplay.convert.foreign.rings import RingRows, ring_rows
from mmreplay.convert.foreign.stretches import Stretch, StretchReader
from mmreplay.errors import CorruptError, FormatError

NAMES = {"observations": "observation", "actions": "action", "rewards": "reward"}
"""What it calls a field, and what it is called here."""
NEXT, DONES, TIMEOUTS = "next_observations", "dones", "timeouts"


class Sb3Reader(StretchReader):
    """Reads each of the buffer's environments, oldest step first."""

    def __init__(self, path: Path, state: Mapping[str, Any]) -> None:
        self._path = path
        self._notes = Notes()
        self._slots, self._envs = self._sizes(state)
        full, pos = state.get("full"), state.get("pos")
        if (
            type(full) is not bool
            or type(pos) is not int
            or not (0 <= pos <= self._slots)
        ):
            raise FormatError(
                f"{path} says pos {str(pos)[:40]} and full {str(full)[:40]}, expected "
                f"a row of {self._slots} and True or False; the file is damaged"
            )
        self._first = pos if full else 0
        self._steps = self._slots if full else pos
        if not self._steps:
            raise FormatError(f"{path} holds an empty buffer, expected steps in it")
        columns = {n: self._arrays(state, own) for own, n in NAMES.items()}
        self._columns = {
            path: array for found in columns.values() for path, array in found.items()
        }
        self._ends = self._arrays(state, DONES) | self._arrays(state, TIMEOUTS)
        self._nexts = self._next_arrays(state)
        first = self._stretch(0)
        schema = make_schema(first.columns, self._notes, path)
        self._tell(state, bool(full))
        super().__init__(
            lambda: map(self._stretch, range(self._envs)), schema, self._notes,
            lambda: None, num_envs=self._envs,
        )  # fmt: skip

    def _sizes(self, state: Mapping[str, Any]) -> tuple[int, int]:
        dones = state.get(DONES)
        if not isinstance(dones, np.ndarray) or dones.ndim != 2 or not dones.size:
            raise FormatError(
                f"{self._path} holds no array {DONES!r} of steps and environments, "
                "expected a ReplayBuffer or DictReplayBuffer of Stable-Baselines3; "
                "name its format with format= (--from)"
            )
        slots, envs = dones.shape
        return int(slots), int(envs)

    def _arrays(self, state: Mapping[str, Any], name: str) -> dict[str, Array]:
        """Arrays of a part by path; of a dict by its keys."""
        value = state.get(name)
        top = NAMES.get(name, name)
        found: dict[str, Any] = {top: value}
        if isinstance(value, Mapping):
            found = {f"{top}/{key}": each for key, each in value.items()}
        for path, array in found.items():
            shape = (self._slots, self._envs)
            if not isinstance(array, np.ndarray) or array.shape[:2] != shape:
                got = getattr(array, "shape", type(array).__name__)
                raise CorruptError(
                    f"{self._path}: {path!r} is {got}, expected an array of "
                    f"{shape[0]} steps of {shape[1]} environments; the file is damaged"
                )
        return found

    def _next_arrays(self, state: Mapping[str, Any]) -> dict[str, Array]:
        if state.get("optimize_memory_usage") is True:
            return {}
        found = self._arrays(state, NEXT)
        return {
            path.replace(NEXT, "observation", 1): array for path, array in found.items()
        }

    def _tell(self, state: Mapping[str, Any], full: bool) -> None:
        note = self._notes.note
        note(
            f"episode ends were read from {DONES!r} and {TIMEOUTS!r}: done by a time "
            "limit is truncated, done otherwise terminated"
        )
        if state.get("handle_timeout_termination") is False:
            self._notes.doubt(
                "the buffer did not handle timeouts: steps that end by a time limit "
                "are terminated like all others"
            )
        if not self._nexts:
            note(
                "the buffer was saved with optimize_memory_usage: what was seen after "
                "the last step of an episode is not known"
            )
        if full:
            note("the ring was full: its oldest steps begin within an episode")

    def _stretch(self, env_id: int) -> Stretch:
        place = (env_id, 1, self._first, self._steps)
        columns: dict[str, Rows] = dict(ring_rows(self._columns, *place))
        columns["reward"] = scalar(columns["reward"])
        ends = ring_rows(self._ends, *place)
        timeouts = ends[TIMEOUTS]
        return Stretch(
            f"{self._path}, environment {env_id}", self._steps, columns,
            dict(ring_rows(self._nexts, *place)),
            ends_of(_Terminated(ends[DONES], timeouts), timeouts),
            env_id=env_id, whole=False,
        )  # fmt: skip


class _Terminated:
    """Dones that are no timeouts; see `columns.Rows`."""

    dtype, shape = "bool", ()

    def __init__(self, dones: RingRows, timeouts: RingRows) -> None:
        self.count = dones.count
        self._dones, self._timeouts = dones, timeouts

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        done, timeout = (
            each.read(first, stop).astype(bool)
            for each in (self._dones, self._timeouts)
        )
        terminated: Array = done & ~timeout
        return terminated


def recognizes(path: Path) -> bool:
    """Whether a pickle names Stable-Baselines3; it is not run."""
    return b"stable_baselines3" in pickles.head(path)


def open_reader(path: Path, *, allow_pickle: bool = False) -> Sb3Reader:
    """Open a saved replay buffer as a source; it is held whole.

    Args:
        path: The file.
        allow_pickle: Run it. A pickle is a program: allow only what you trust.
    """
    found = pickles.load(path, allow_pickle)
    state = found.state if isinstance(found, pickles.StandIn) else {}
    return Sb3Reader(path, state)
