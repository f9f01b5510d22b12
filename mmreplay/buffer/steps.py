"""Copying steps as they are: stored fields, the two ends, and next observations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.episodes import (
    CUT,
    TERMINATED,
    TRUNCATED,
    EpisodeIndex,
    judged,
)
from mmreplay.kernels.steps import Judge
from mmreplay.schema import Schema
from mmreplay.storage.base import Store
from mmreplay.storage.placement import served_ends
from mmreplay.storage.records import Records, after

Fields = dict[str, NDArray[np.generic]]
Ids = NDArray[np.int64]
_kernel = kernels.load("steps")
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
        self._ring = store.ring
        self._paths = schema.paths
        self._served = {
            path: SERVED[role] for path, role in served_ends(schema).items()
        }
        # Ends per agent are stored; a cut is told by the flags all the same.
        agents = schema.num_agents is not None
        self._agent_ends = {
            role: path
            for role in SERVED
            if agents and (path := schema.role(role)) is not None
        }
        self._bits = bytes(self._served.values())
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
        apart = self._single or self._apart or not self._packed
        self._wide = 0 if apart else 2 if self._pairs else 1
        self._afters = {after(p): n for p, n in self._pairs.items()}

    def legal(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Tell legal starts by their flags and those after; see `EpisodeIndex.legal`.

        Cheaper than a bisection where no window is asked for.
        """
        legal = np.empty(len(positions), np.bool_)
        env_ids = np.ascontiguousarray(env_ids)
        positions = np.ascontiguousarray(positions)
        _kernel.legal(*self.law, env_ids, positions, legal)
        return legal

    @property
    def law(self) -> Judge:
        """What decides which steps are legal, as kernels take it."""
        return (self._store.all_flags, *self._ring.shape, self._law)

    def gather(
        self, env_ids: Ids, positions: Ids, heads: Ids, index: EpisodeIndex
    ) -> Fields:
        """Copy steps with their next observations.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, alive and, where next observations are
                derived, legal starts.
            heads: int64 ``[E]``; rows below are written, and the index knows them.
            index: The episodes.

        Returns:
            Per path ``[B, *shape]``.
        """
        # Records that are mapped are placed and copied in one go.
        records: Records | None = getattr(self._store, "records", None)
        if self._wide and records is not None:
            return self._at_hand(records, env_ids, positions, heads, index)
        if self.derived:
            return self._with_next(env_ids, positions, heads, index)
        rows = np.empty(len(positions), np.int64)
        ends = self._place(env_ids, positions, heads, index, rows)
        found = self._fetch(rows, self._paths)
        return self._serve(found, ends, env_ids, positions, heads, index)

    def _at_hand(
        self,
        records: Records,
        env_ids: Ids,
        positions: Ids,
        heads: Ids,
        index: EpisodeIndex,
    ) -> Fields:
        """Copy steps of which nothing lies but in mapped records."""
        packed, ends = records.take(
            self._store.all_flags, np.ascontiguousarray(env_ids),
            np.ascontiguousarray(positions), heads, self._bits, index.bare, self._wide,
        )  # fmt: skip
        found: Fields = {path: packed[path] for path in self._packed}
        for path, name in self._afters.items():
            found[name] = packed[path]
        return self._serve(found, ends, env_ids, positions, heads, index)

    def _place(
        self, env_ids: Ids, positions: Ids, heads: Ids, index: EpisodeIndex, rows: Ids
    ) -> NDArray[np.bool_]:
        """Find rows, and those after if there is room; return the ends of steps."""
        ends = np.empty((len(self._bits), len(positions)), np.bool_)
        _kernel.place(
            self._store.all_flags, np.ascontiguousarray(env_ids),
            np.ascontiguousarray(positions), heads, *self._ring.shape, self._bits,
            index.bare, rows, ends,
        )  # fmt: skip
        return ends

    def _with_next(
        self, env_ids: Ids, positions: Ids, heads: Ids, index: EpisodeIndex
    ) -> Fields:
        pairs = np.empty((len(positions), 2), np.int64)
        ends = self._place(env_ids, positions, heads, index, pairs)
        rows = pairs[:, 0]
        found: Fields = {}
        if self._single:
            found = self._fetch(rows, self._single)
        if self._apart:
            nexts = self._fetch(pairs[:, 1], self._apart)
            found |= {self.next_paths[path]: nexts[path] for path in self._apart}
        if self._packed:
            # The row after lies beside the row: both are read in one go.
            rows = pairs.reshape(-1) if self._pairs else rows
            packed = self._fetch(rows, self._packed)
            for path, array in packed.items():
                found[path] = array[::2] if self._pairs else array
            found |= {name: packed[path][1::2] for path, name in self._pairs.items()}
        return self._serve(found, ends, env_ids, positions, heads, index)

    def _fetch(self, rows: Ids, paths: tuple[str, ...]) -> Fields:
        self._store.prefetch(rows, paths, now=True)
        return self._store.gather(rows, paths)

    def _serve(
        self,
        found: Fields,
        ends: NDArray[np.bool_],
        env_ids: Ids,
        positions: Ids,
        heads: Ids,
        index: EpisodeIndex,
    ) -> Fields:
        # By number: to iterate over an array takes thrice as long.
        for kind, path in enumerate(self._served):
            found[path] = ends[kind]
        if index.num_cuts and (self._served or self._agent_ends):
            self._cut(found, env_ids, positions, heads)
        return found

    def _cut(self, found: Fields, env_ids: Ids, positions: Ids, heads: Ids) -> None:
        """Report as truncated the steps before a row that says so."""
        for path, kind in self._served.items():
            if kind == TRUNCATED:
                cut = self._before_cut(env_ids, positions, heads)
                found[path] = cut | (found[path] != 0)
        path_ = self._agent_ends.get("truncated")
        if path_ is not None and path_ in found:
            cut = self._before_cut(env_ids, positions, heads)
            found[path_] = self._agents_cut(found, path_, cut)

    def _agents_cut(
        self, found: Fields, path: str, cut: NDArray[np.bool_]
    ) -> NDArray[np.generic]:
        """Truncated of agents, bool ``[B, num_agents]``, of steps that may be cut.

        A cut truncates the agents that are neither terminated nor truncated yet.
        """
        truncated, other = found[path] != 0, self._agent_ends.get("terminated")
        ended = truncated if other is None else truncated | (found[other] != 0)
        joined: NDArray[np.bool_] = truncated | (cut[..., None] & ~ended)
        return joined

    def _before_cut(
        self, env_ids: Ids, positions: Ids, heads: Ids
    ) -> NDArray[np.bool_]:
        # Only at rows that are there: to look at a hole may be a SIGBUS.
        followed = positions + 1 < heads[env_ids]
        after = self._store.flags(self._ring.rows(env_ids, positions + followed))
        found: NDArray[np.bool_] = followed & ((after & CUT) != 0)
        return found

    def read(
        self, paths: tuple[str, ...], env_ids: Ids, positions: Ids, heads: Ids
    ) -> Fields:
        """Copy stored fields of rows, nothing derived but the two ends."""
        rows = self._ring.rows(env_ids, positions)
        found = self._fetch(rows, paths)
        for path in paths:
            kind = self._served.get(path)
            if kind is not None:
                ended = (self._store.flags(rows) & kind) != 0
                if kind == TRUNCATED:
                    ended |= self._before_cut(env_ids, positions, heads)
                found[path] = ended
        truncated = self._agent_ends.get("truncated")
        if truncated in paths:
            others = tuple(self._agent_ends[role] for role in self._agent_ends)
            told = found | self._fetch(rows, tuple(p for p in others if p not in found))
            cut = self._before_cut(env_ids, positions, heads)
            found[truncated] = self._agents_cut(told, truncated, cut)
        return {path: found[path] for path in paths}


def _next_paths(schema: Schema) -> dict[str, str]:
    """Path of each observation field to the name of its derived successor."""
    role = schema.role("observation")
    assert role is not None
    return {
        path: "next_observation" + path[len(role) :]
        for path in schema.role_paths("observation")
    }
