"""Files of Stable-Baselines3's save_replay_buffer: a pickled buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay.convert.base import Notes
from mmreplay.convert.episode_ends import Bools
from mmreplay.datasets import pickles
from mmreplay.datasets.common.fields import Ends, Flags, ends_of, make_schema
from mmreplay.datasets.common.fragments import Fragment, FragmentReader
from mmreplay.datasets.common.rows import Array, ColumnRows, ring_rows, scalar
from mmreplay.errors import CorruptError, FormatError
from mmreplay.schema.source_names import name_fields, own_names_of

NAMES = {"actions": "action", "rewards": "reward"}
"""Names of fields there, and here, beside those of observations."""
NEXT, DONES, TIMEOUTS = "next_observations", "dones", "timeouts"


class Sb3Reader(FragmentReader):
    """Reads each of the buffer's environments, oldest step first."""

    def __init__(
        self, path: Path, state: Mapping[str, Any], fields: Sequence[str] | None = None
    ) -> None:
        self._path = path
        self._notes = Notes()
        self._names = dict(NAMES)
        self._slots, self._envs = self._check_sizes(state)
        full, pos = state.get("full"), state.get("pos")
        if type(full) is not bool or type(pos) is not int or not (0 <= pos < self._slots):
            raise FormatError(
                f"{path}: pos must be in [0, {self._slots}) and full True or False, "
                f"got {str(pos)[:40]} and {str(full)[:40]}. The file is damaged."
            )
        self._shared = state.get("optimize_memory_usage") is True
        # Observations alone are kept then, and the newest step's next one lies where
        # the oldest step's was.
        lost = int(full and self._shared)
        self._first = pos + lost if full else 0
        self._steps = self._slots - lost if full else pos
        if not self._steps:
            raise FormatError(f"{path} holds an empty buffer.")
        observed: Any = state.get("observations")
        keys = self._observations(observed, fields)
        self._columns = {
            path: self._array(path, observed if key is None else observed[key])
            for path, key in keys.items()
        }
        for own, name in NAMES.items():
            self._columns[name] = self._array(name, state.get(own))
        self._ends = {end: self._array(end, state.get(end)) for end in (DONES, TIMEOUTS)}
        self._next_obs = self._next_arrays(state, keys)
        first = self._fragment(0, 0, self._next_obs)
        schema = make_schema(first.columns, self._notes, path)
        self._add_notes(state, bool(full))
        ends = {"terminated": DONES, "truncated": TIMEOUTS}
        super().__init__(
            self._fragments_of,
            schema,
            self._notes,
            lambda: None,
            num_envs=self._envs,
            own_names=own_names_of(self._names, ends),
        )

    def _check_sizes(self, state: Mapping[str, Any]) -> tuple[int, int]:
        dones = state.get(DONES)
        if not isinstance(dones, np.ndarray) or dones.ndim != 2 or not dones.size:
            raise FormatError(
                f"{self._path} holds no array {DONES!r} of steps and environments, so "
                "it is not a buffer of Stable-Baselines3. Name its format with format= "
                "(--from)."
            )
        slots, envs = dones.shape
        return int(slots), int(envs)

    def _observations(self, value: object, fields: Sequence[str] | None) -> dict[str, object]:
        """Return the key of each observation by path; None for an array of all."""
        if not isinstance(value, Mapping):
            self._names["observations"] = "observation"
            return {"observation": None}
        keys = {
            f"observations/{key}" if type(key) is str else f"observations[{key!r}]": key
            for key in value
        }
        names = name_fields(
            {own: f"observation/{key}" for own, key in keys.items()},
            self._path,
            self._notes,
            fields,
        )
        self._names |= names
        return {path: keys[own] for own, path in names.items()}

    def _array(self, path: str, value: object) -> Array:
        """Return the values of a field in each step of each environment."""
        shape = (self._slots, self._envs)
        if not isinstance(value, np.ndarray) or value.shape[:2] != shape:
            got = getattr(value, "shape", type(value).__name__)
            raise CorruptError(
                f"{self._path}: {path!r} must be an array of {shape[0]} steps of "
                f"{shape[1]} environments, got {got}. The file is damaged."
            )
        return value

    def _next_arrays(
        self, state: Mapping[str, Any], keys: Mapping[str, object]
    ) -> dict[str, Array]:
        """Return the next observations by the paths of observations, by their keys."""
        if self._shared:
            return {}
        held: list[dict[object, Any]] = [
            dict(each) if isinstance(each, Mapping) else {None: each}
            for each in (state.get("observations"), state.get(NEXT))
        ]
        seen, found = held
        if found.keys() != seen.keys():
            raise FormatError(
                f"{self._path}: {NEXT!r} must have {_named(seen)} like the "
                f"observations, got {_named(found)}. The file is damaged."
            )
        return {
            path: self._array(path.replace("observation", NEXT, 1), found[key])
            for path, key in keys.items()
        }

    def _observed(self) -> dict[str, Array]:
        return {
            path: array
            for path, array in self._columns.items()
            if path.split("/")[0] == "observation"
        }

    def _add_notes(self, state: Mapping[str, Any], full: bool) -> None:
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
        if self._shared:
            note(
                "the buffer was saved with optimize_memory_usage: what was seen after "
                "the last step of an episode is not known, but for the newest step"
            )
        if full:
            note("the ring was full: its oldest steps begin within an episode")
        if full and self._shared:
            note(
                f"the oldest step of each of {self._envs:,} environments was left out: "
                "the newest observation was written over its own"
            )

    def _fragments_of(self) -> Iterator[Fragment]:
        for env_id in range(self._envs):
            if not self._shared:
                yield self._fragment(env_id, 0, self._next_obs)
                continue
            whole = self._fragment(env_id, 0, {})
            terminated, truncated = whole.ends(0, self._steps - 1)
            over = np.flatnonzero(terminated | truncated)
            # Only the steps since the last end are known to be followed by the next.
            begin = int(over[-1]) + 1 if len(over) else 0
            if begin:
                yield self._fragment(env_id, 0, {}, begin)
            yield self._fragment(env_id, begin, self._observed(), later=1)

    def _fragment(
        self,
        env_id: int,
        first: int,
        next_obs: Mapping[str, Array],
        stop: int | None = None,
        later: int = 0,
    ) -> Fragment:
        """Steps ``[first, stop)`` of an environment, all from first on by default.

        Args:
            env_id: The environment.
            first: Of the steps.
            next_obs: By path, what was seen after each slot's step.
            stop: Of the steps.
            later: How many slots later that lies.
        """
        steps = (self._steps if stop is None else stop) - first
        begin = self._first + first
        columns: dict[str, ColumnRows] = dict(ring_rows(self._columns, env_id, 1, begin, steps))
        columns["reward"] = scalar(columns["reward"])
        name = f"{self._path}, environment {env_id}"
        dones, timeouts = (
            Flags(f"{name}: {end!r}", rows, steps)
            for end, rows in ring_rows(self._ends, env_id, 1, begin, steps).items()
        )
        return Fragment(
            name,
            steps,
            columns,
            dict(ring_rows(next_obs, env_id, 1, begin + later, steps)),
            _apart(ends_of(dones, timeouts)),
            env_id=env_id,
            is_episode=bool(later),
        )


def _named(keys: Iterable[object]) -> list[str]:
    """Return some paths of observations by their keys."""
    names = ("observation" if key is None else f"observation/{key}" for key in keys)
    return sorted(names)[:9]


def _apart(ends: Ends) -> Ends:
    """Dones and timeouts as terminations, dones that are no timeouts, and timeouts."""

    def apart(first: int, stop: int) -> tuple[Bools, Bools]:
        done, timeout = ends(first, stop)
        return done & ~timeout, timeout

    return apart


def recognizes(path: Path) -> bool:
    """Return whether a pickle names Stable-Baselines3; it is not run."""
    return b"stable_baselines3" in pickles.head(path)


def open_reader(
    path: Path, *, allow_pickle: bool = False, fields: Sequence[str] | None = None
) -> Sb3Reader:
    """Open a saved replay buffer as a source; it is held whole.

    Args:
        path: The file.
        allow_pickle: Run it. A pickle is a program: allow only what you trust.
        fields: See `name_fields`.
    """
    found = pickles.load(path, allow_pickle)
    state = found.state if isinstance(found, pickles.StandIn) else {}
    return Sb3Reader(path, state, fields)
