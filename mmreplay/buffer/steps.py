"""Copying steps as they are: stored fields, the two ends, and next observations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import (
    ALL_FLAGS,
    CUT,
    FINAL,
    TERMINATED,
    TRUNCATED,
    EpisodeIndex,
    judged,
)
from mmreplay.schema import Schema
from mmreplay.storage.base import Store

Fields = dict[str, NDArray[np.generic]]
Ids = NDArray[np.int64]
SERVED = {"terminated": TERMINATED, "truncated": TRUNCATED}


class StepReader:
    """Copies rows out of a store, by environment and position.

    Attributes:
        derived: Next observations are read from the following row.
        next_paths: Path of each observation to the name of its derived next one.
    """

    def __init__(self, store: Store, schema: Schema, autoreset: str) -> None:
        """Make one."""
        self._store = store
        self._ring = ring = store.ring
        self._paths = schema.paths
        self._served = {
            path: SERVED[role]
            for role in SERVED
            if (path := schema.role(role)) is not None
        }
        self._bits = [(p, np.array(k, np.uint8)) for p, k in self._served.items()]
        self.derived = (
            schema.role("observation") is not None
            and schema.role("next_observation") is None
        )
        self.next_paths = _next_paths(schema) if self.derived else {}
        together = store.packed & self.next_paths.keys()
        self._pairs = {p: n for p, n in self.next_paths.items() if p in together}
        self._apart = tuple(p for p in self.next_paths if p not in together)
        self._packed = tuple(p for p in schema.paths if p in store.packed)
        alone = store.packed | self._served.keys()
        self._single = tuple(p for p in schema.paths if p not in alone)
        self._law = judged(derived=self.derived)
        # How far on the next row of an environment lies, until its rows wrap.
        self._stride = ring.num_envs if ring.layout == "time_major" else 1
        self._wraps_at_end = ring.num_envs == self._stride

    def _rows(self, env_ids: Ids, positions: Ids) -> tuple[Ids, Ids]:
        """Rows of positions, and of those after them."""
        rows = self._ring.rows(env_ids, positions)
        if not self._wraps_at_end:
            return rows, self._ring.rows(env_ids, positions + 1)
        following = rows + self._stride
        following -= (following >= self._ring.num_rows) * self._ring.num_rows
        return rows, following

    def legal(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Tell legal starts by their flags and those after; see `EpisodeIndex.legal`.

        Cheaper than a bisection where no window is asked for.
        """
        store = self._store
        if not self.derived:
            here = store.flags(self._ring.rows(env_ids, positions))
            step: NDArray[np.bool_] = (here & FINAL) == 0
            return step
        rows, following = self._rows(env_ids, positions)
        both = store.flags(rows).astype(np.uint16)
        both <<= 6
        both |= store.flags(following) & ALL_FLAGS
        # A damaged byte may have bits that mean nothing.
        both &= len(self._law) - 1
        legal: NDArray[np.bool_] = self._law.take(both)
        return legal

    def gather(
        self, env_ids: Ids, positions: Ids, heads: Ids, index: EpisodeIndex
    ) -> Fields:
        """Copy steps with their next observations.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, alive and, where next observations are
                derived, legal starts.
            heads: int64 ``[E]``; rows below are written.
            index: The episodes.

        Returns:
            Per path ``[B, *shape]``.
        """
        if self.derived:
            return self._with_next(env_ids, positions, heads, index)
        rows = self._ring.rows(env_ids, positions)
        self._store.prefetch(rows, self._paths)
        found = self._store.gather(rows, self._paths)
        if self._served:
            here = self._store.flags(rows)
            self._serve(found, here)
            if index.num_cuts:
                self._cut(found, env_ids, positions, heads)
        return found

    def _with_next(
        self, env_ids: Ids, positions: Ids, heads: Ids, index: EpisodeIndex
    ) -> Fields:
        store = self._store
        rows, following = self._rows(env_ids, positions)
        here = store.flags(rows)
        if index.bare:
            # A terminated step without a final row has no next observation, and
            # needs none: it is drawn with its own, to be discounted by 0.
            ends = np.flatnonzero(here & TERMINATED)
            final = (store.flags(following[ends]) & FINAL) != 0
            final &= positions[ends] + 1 < heads[env_ids[ends]]
            own = ends[~final]
            following[own] = rows[own]
        found: Fields = {}
        if self._single:
            store.prefetch(rows, self._single)
            found = store.gather(rows, self._single)
        if self._apart:
            store.prefetch(following, self._apart)
            nexts = store.gather(following, self._apart)
            found |= {self.next_paths[path]: nexts[path] for path in self._apart}
        if self._pairs:
            # The row after lies beside the row: both are read in one go.
            pairs = np.empty((len(rows), 2), np.int64)
            pairs[:, 0] = rows
            pairs[:, 1] = following
            rows = pairs.reshape(-1)
        if self._packed:
            store.prefetch(rows, self._packed)
            packed = store.gather(rows, self._packed)
            for path, array in packed.items():
                found[path] = array[::2] if self._pairs else array
            found |= {name: packed[path][1::2] for path, name in self._pairs.items()}
        self._serve(found, here)
        if index.num_cuts:
            self._cut(found, env_ids, positions, heads)
        return found

    def _serve(self, found: Fields, here: NDArray[np.uint8]) -> None:
        # Half of what comparing with a Python integer costs.
        for path, bit in self._bits:
            found[path] = (here & bit).astype(bool)

    def _cut(self, found: Fields, env_ids: Ids, positions: Ids, heads: Ids) -> None:
        """Report as truncated the steps before a row that says so."""
        for path, kind in self._served.items():
            if kind == TRUNCATED:
                cut = self._before_cut(env_ids, positions, heads)
                found[path] = cut | (found[path] != 0)

    def _before_cut(
        self, env_ids: Ids, positions: Ids, heads: Ids
    ) -> NDArray[np.bool_]:
        after = self._store.flags(self._ring.rows(env_ids, positions + 1))
        found: NDArray[np.bool_] = (after & CUT) != 0
        found &= positions + 1 < heads[env_ids]
        return found

    def read(
        self, paths: tuple[str, ...], env_ids: Ids, positions: Ids, heads: Ids
    ) -> Fields:
        """Copy stored fields of rows, nothing derived but the two ends."""
        rows = self._ring.rows(env_ids, positions)
        self._store.prefetch(rows, paths)
        found = self._store.gather(rows, paths)
        for path in paths:
            kind = self._served.get(path)
            if kind is not None:
                ended = (self._store.flags(rows) & kind) != 0
                if kind == TRUNCATED:
                    ended |= self._before_cut(env_ids, positions, heads)
                found[path] = ended
        return {path: found[path] for path in paths}


def _next_paths(schema: Schema) -> dict[str, str]:
    """Path of each observation field to the name of its derived successor."""
    role = schema.role("observation")
    assert role is not None
    return {
        path: "next_observation" + path[len(role) :]
        for path in schema.role_paths("observation")
    }
