"""Reading: what is alive now, which steps may be drawn, and their data.

Rows are copied first and checked afterwards: a writer in another process may have
given them up meanwhile, and what it gave up is told apart exactly by its limit.

Copying steps as they are: stored fields, the two ends, and next observations.

A field of all rows alive as it lies in its file: views instead of copies.

They are for whoever wants to look at a whole field that is larger than RAM, such as
the faces of other libraries that hand their tensors out. The mapping is private: the
system shows the pages of the file, and gives whoever writes into one a copy of it, so
that a stray store neither ends the process, as on a mapping that is read-only, nor
changes a row that was published.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.episodes import CUT, TERMINATED, TRUNCATED, EpisodeIndex, folded, judged
from mmreplay.errors import FailedError, SchemaError, StaleError
from mmreplay.kernels.steps import Judge
from mmreplay.ring import Span
from mmreplay.samplers.base import BufferIdentity
from mmreplay.schema import Schema
from mmreplay.storage.commit_state import CUT_ROWS, CommitState
from mmreplay.storage.gather import SPLIT_ROWS, Layout, Records, after
from mmreplay.storage.layout import RECORDS, record_layout, served_ends
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.store import Store
from mmreplay.transforms.base import Asked, Direct, Found, Plan, Sums
from mmreplay.transforms.base_steps import Where

Fields = dict[str, NDArray[np.generic]]
Ids = NDArray[np.int64]
_kernel = kernels.load("steps")
INT64, BOOL = np.dtype(np.int64), np.dtype(np.bool_)
"""Given as what they are, they need not be looked up."""
_Read = tuple[Where, str, str | None]
"""Where a field is read, its path, and its name if batches hold it as it is."""
SERVED = {"terminated": TERMINATED, "truncated": TRUNCATED}


class Gatherer:
    """Copies rows out of a store, by environment and position.

    Attributes:
        derived: Next observations are read from the following row.
        next_paths: Path of each observation to the name of its derived next one.
    """

    def __init__(
        self, store: Store, schema: Schema, autoreset: str, reach: int | None = None
    ) -> None:
        """Make one.

        Args:
            store: The rows.
            schema: Their fields.
            autoreset: Of the environments.
            reach: Rows after a step that transforms read; None without transforms.
        """
        self._store = store
        self._ring = store.ring
        self._paths = schema.paths
        self._served = {
            path: SERVED[role] for path, role in served_ends(schema).items()
        }
        # Ends per agent are stored as fields; cuts are in the flags only.
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
        self._after = 1 if reach is None else reach
        self._law = (judged if reach is None else folded)(derived=self.derived)
        apart = self._single or self._apart or not self._packed
        self._wide = 0 if apart else 2 if self._pairs else 1
        # The same fields as columns: of the step's own record, and of the one after.
        columns = [(path, 0, None) for path in self._packed]
        columns += [(path, 1, None) for path in self._pairs]
        names = (*self._packed, *self._pairs.values())
        self._numbered = tuple((str(at), name) for at, name in enumerate(names))
        self._columns = Layout(schema, columns)
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._afters = {after(p): n for p, n in self._pairs.items()}

    def legal(self, env_ids: Ids, positions: Ids, heads: Ids) -> NDArray[np.bool_]:
        """Tell legal starts by their flags and those after; see `EpisodeIndex`.

        Cheaper than a bisection.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, among those of the index where they may lie.
            heads: int64 ``[E]``; rows below are written, and the index knows them.
        """
        legal = np.empty(len(positions), np.bool_)
        env_ids = np.ascontiguousarray(env_ids)
        positions = np.ascontiguousarray(positions)
        _kernel.legal(*self.law(heads), env_ids, positions, legal)
        return legal

    def law(self, heads: Ids) -> Judge:
        """What decides which steps are legal, as kernels take it."""
        return (
            self._store.all_flags, *self._ring.shape, self._law, heads, self._after
        )  # fmt: skip

    def gather(
        self,
        env_ids: Ids,
        positions: Ids,
        heads: Ids,
        index: EpisodeIndex,
        contiguous: bool = False,
    ) -> Fields:
        """Copy steps with their next observations.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, alive and, where next observations are
                derived, legal starts.
            heads: int64 ``[E]``; rows below are written, and the index knows them.
            index: The episodes.
            contiguous: Small fields, too, are arrays of their own.

        Returns:
            Per path ``[B, *shape]``.
        """
        # Records that are mapped are placed and copied in one go.
        records: Records | None = getattr(self._store, "records", None)
        if self._wide and records is not None:
            return self._at_hand(records, env_ids, positions, heads, index, contiguous)
        if self.derived:
            found = self._with_next(env_ids, positions, heads, index)
        else:
            rows = np.empty(len(positions), np.int64)
            ends = self._place(env_ids, positions, heads, index, rows)
            found = self._fetch(rows, self._paths)
            found = self._serve(found, ends, env_ids, positions, heads, index)
        if contiguous:
            return {path: np.ascontiguousarray(a) for path, a in found.items()}
        return found

    def _at_hand(
        self,
        records: Records,
        env_ids: Ids,
        positions: Ids,
        heads: Ids,
        index: EpisodeIndex,
        contiguous: bool,
    ) -> Fields:
        """Copy steps of which nothing lies but in mapped records."""
        steps = (
            self._store.all_flags, np.ascontiguousarray(env_ids),
            np.ascontiguousarray(positions), heads, self._bits, index.bare, self._wide,
        )  # fmt: skip
        found: Fields = {}
        if contiguous:
            packed, ends = records.take_fields(*steps, self._columns)
            for number, name in self._numbered:
                found[name] = packed[number]
        else:
            packed, ends = records.take(*steps)
            for path in self._packed:
                found[path] = packed[path]
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

    def known(self, env_ids: Ids, ends: Ids, heads: Ids) -> Ids:
        """Where what is known of episodes ends; see `transforms.base.Rows`."""
        if not self.derived:
            return ends
        found = ends.copy()
        env_ids = np.ascontiguousarray(env_ids)
        flags, shape = self._store.all_flags, self._ring.shape
        _kernel.known(flags, *shape, heads, env_ids, found)
        return found

    def plan(
        self, before: int, steps: int, direct: Direct, asked: Asked, sums: Sums | None
    ) -> ReadPlan:
        """Find out where what transforms ask for lies; see `transforms.base.Rows`."""
        return ReadPlan(
            self, self._store, self._served, before, steps, direct, asked, sums
        )

    @property
    def cut_path(self) -> str | None:
        """Path of truncated ends per agent, which a cut adds to; None without them."""
        return self._agent_ends.get("truncated")

    def read(
        self, paths: tuple[str, ...], env_ids: Ids, positions: Ids, heads: Ids
    ) -> Fields:
        """Copy stored fields of rows, nothing derived but the two ends."""
        rows = self._ring.rows(env_ids, positions)
        records: Records | None = getattr(self._store, "records", None)
        # Many that lie one after the other come as columns from `gathered`.
        apart = len(rows) < SPLIT_ROWS or rows[-1] - rows[0] != len(rows) - 1
        apart = apart and self._agent_ends.get("truncated") not in paths
        if records is not None and apart and self._store.packed.issuperset(paths):
            if (layout := self._layouts.get(paths)) is None:
                columns = [(path, 0, None) for path in paths]
                layout = Layout(self._store.schema, columns)
                self._layouts[paths] = layout
            packed = records.columns(rows, len(rows), layout)
            return {path: packed[str(at)] for at, path in enumerate(paths)}
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


class ReadPlan:
    """Where fields of rows around steps lie, in the files and in what is returned."""

    def __init__(
        self, reader: Gatherer, store: Store, served: Mapping[str, int], before: int,
        steps: int, direct: Direct, asked: Asked, sums: Sums | None,
    ) -> None:  # fmt: skip
        """Find out; see `transforms.base.Rows.plan`.

        Args:
            reader: Reads truncated ends per agent, which depend on the next row too.
            store: The rows.
            served: Paths that are read from flags, and by which of them.
            before: See there.
            steps: See there.
            direct: See there.
            asked: See there.
            sums: See there.
        """
        self._reader, self._store = reader, store
        records: Records | None = getattr(store, "records", None)
        packed = frozenset[str]() if records is None else store.packed
        self._wheres = tuple(asked)
        # Sums of packed fields are made as the fields are read, others afterwards.
        self._sums = sums
        dtypes = {} if sums is None else sums.dtypes
        added = tuple(path for path in dtypes if path in packed)
        self._added = tuple(path for path in dtypes if path not in packed)
        # What is read where, and its name, if it goes into the batch as it is.
        wanted: dict[Where, list[tuple[str, str | None]]] = {}
        for where, names in direct.items():
            wanted.setdefault(where, []).extend(names.items())
        for where, paths in asked.items():
            wanted.setdefault(where, []).extend((path, None) for path in paths)
        if sums is not None and dtypes:
            wanted.setdefault(sums.where, []).extend(
                (path, None) for path in self._added
            )
            if self._added and sums.where not in asked:
                self._wheres += (sums.where,)
        read_here = {
            where
            for where, wants in wanted.items()
            if not packed.isdisjoint(path for path, _ in wants)
            or (sums is not None and added and where is sums.where)
        }
        columns: list[tuple[int, ...]] = []
        marks: list[tuple[int, ...]] = []
        layout: list[tuple[str, int, int | None]] = []
        summed: list[tuple[str, int, np.dtype[np.generic]]] = []
        self._fields: list[tuple[str, Where, str, str | None]] = []
        self._marked: list[tuple[_Read, int, int]] = []
        self._cut: list[_Read] = []
        self._apart: list[tuple[int, int, tuple[str, ...], list[_Read]]] = []
        self._num_packed = 0
        # Rows of records first: the disk is asked for all of them at once.
        for where in sorted(wanted, key=lambda w: w not in read_here):
            start, width = len(columns), len(where.ahead)
            columns += [
                (ahead, back, where.beyond, start, width, at)
                for at, (ahead, back) in enumerate(
                    zip(where.ahead, where.back, strict=True)
                )
            ]
            if sums is not None and where is sums.where:
                summed = [(path, start, dtypes[path]) for path in added]
            if where in read_here:
                self._num_packed = len(columns)
            apart = []
            for path, name in wanted[where]:
                read = (where, path, name)
                if path == reader.cut_path:
                    self._cut.append(read)
                elif path in served:
                    first = len(marks)
                    self._marked.append((read, first, width))
                    marks += [
                        (start + at, served[path], first, width, at)
                        for at in range(width)
                    ]
                elif path in packed:
                    self._fields.append((str(len(layout)), *read))
                    alone = name is not None and width == 1
                    layout.append((path, start, None if alone else width))
                else:
                    apart.append(read)
            if apart:
                paths = tuple(dict.fromkeys(path for _, path, _ in apart))
                self._apart.append((start, width, paths, apart))
        self._fixed = (
            *store.ring.shape, before, steps, np.array(columns, np.int64).reshape(-1),
            np.array(marks, np.int64).reshape(-1),
        )  # fmt: skip
        self._rows, self._ends = 3 + len(columns), 1 + len(marks)
        self._records = records if layout or summed else None
        # The kernel that reads records makes the discount too; else it is made after.
        discount = None if sums is None else sums.discount
        here = self._records is not None and discount is not None
        self._discount = None if here else discount
        made = [*added, str(discount)] if here else [*added]
        self._made = [(str(at), name) for at, name in enumerate(made, len(layout))]
        self._powers = np.ones(steps + 1) if sums is None else sums.powers
        self._layout = Layout(store.schema, layout, summed, here)

    def find(self, env_ids: Ids, positions: Ids, heads: Ids) -> Found:
        """Look at boundaries, and read; see `transforms.base.Rows.find`.

        Args:
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``, legal starts.
            heads: int64 ``[E]``; rows below are written.
        """
        store, count = self._store, len(positions)
        places = np.empty((self._rows, count), INT64)
        ends = np.empty((self._ends, count), BOOL)
        env_ids = np.ascontiguousarray(env_ids)
        positions = np.ascontiguousarray(positions)
        fields: Fields = {}
        found: dict[Where, Fields] = {where: {} for where in self._wheres}
        if self._records is None:
            _kernel.fold(
                store.all_flags, env_ids, positions, heads, *self._fixed, places, ends
            )
        else:
            packed = self._records.fold(
                store.all_flags, env_ids, positions, heads, self._fixed,
                self._num_packed, places, ends, self._layout, self._powers,
            )  # fmt: skip
            for number, where, path, name in self._fields:
                if name is None:
                    found[where][path] = packed[number]
                else:
                    fields[name] = packed[number]
            for number, name in self._made:
                fields[name] = packed[number]
        for start, width, paths, apart in self._apart:
            rows = places[3 + start : 3 + start + width].reshape(-1)
            store.prefetch(rows, paths, now=True)
            gathered = store.gather(rows, paths)
            for where, path, name in apart:
                array = gathered[path]
                if name is None or width > 1:
                    array = array.reshape(count, width, *array.shape[1:])
                if name is None:
                    found[where][path] = array
                else:
                    fields[name] = array
        for (where, path, name), mark, width in self._marked:
            if name is None:
                told = ends[1 + mark : 1 + mark + width]
                found[where][path] = told.reshape(count, width)
            else:
                fields[name] = ends[1 + mark]
        for where, path, name in self._cut:
            ahead = positions[:, None] + np.array(where.ahead)
            cap = places[2 if where.beyond else 1]
            rows = np.minimum(ahead, cap[:, None]) - np.array(where.back)
            rows = np.maximum(rows, places[0][:, None]).reshape(-1)
            ids = np.repeat(env_ids, len(where.ahead))
            array = self._reader.read((path,), ids, rows, heads)[path]
            if name is None:
                found[where][path] = array.reshape(count, -1, *array.shape[1:])
            else:
                fields[name] = array
        if self._sums is not None and (self._added or self._discount is not None):
            self._sum(positions, places[1], ends[0], found, fields)
        return Found(places, ends[0], fields, found)

    def _sum(
        self, positions: Ids, last: Ids, terminated: NDArray[np.bool_],
        found: Mapping[Where, Fields], fields: Fields,
    ) -> None:  # fmt: skip
        """Sum fields that no records hold, and make the discount if none did."""
        sums = self._sums
        assert sums is not None
        for path in self._added:
            values = np.ascontiguousarray(found[sums.where][path])
            shape = (len(positions), *values.shape[2:])
            total = np.empty(shape, sums.dtypes[path])
            _kernel.sums(
                positions, last, sums.powers[:-1], values, values.itemsize, total,
                total.itemsize,
            )  # fmt: skip
            fields[path] = total
        if self._discount is not None:
            discount = np.empty(len(positions), np.float32)
            _kernel.discounts(positions, last, sums.powers, terminated, discount)
            fields[self._discount] = discount


def _next_paths(schema: Schema) -> dict[str, str]:
    """Path of each observation field to the name of its derived successor."""
    role = schema.role("observation")
    assert role is not None
    return {
        path: "next_observation" + path[len(role) :]
        for path in schema.role_paths("observation")
    }


class Window(Protocol):
    """How far around a step its data reaches.

    Attributes:
        before: Rows before the step, where its episode has them.
        after: Rows after it, up to the episode's end; the row of the next observation
            is one of them.
    """

    before: int
    after: int


Moment = tuple[Ids, Ids]
"""Limits and tails before rows were copied."""


class ReplacedError(FailedError):
    """Another generation took this one's place: draw from that one."""


class LiveView:
    """One open buffer as samplers and gathers see it.

    A draw looks at `starts` first and keeps to that moment. Threads: hold `lock`
    from there to the end of the draw; copying rows needs none.

    Attributes:
        lock: One for all generations of an open buffer, which samplers go through
            with it.
        replaced: Whether another generation is in force.
        num_illegal: Rows within `starts`, as last looked at, that are no legal start.
    """

    def __init__(
        self,
        store: Store,
        ledger: CommitState,
        schema: Schema,
        autoreset: str,
        home: BufferIdentity,
        window: Window | None = None,
        former: LiveView | None = None,
    ) -> None:
        self.lock: threading.RLock = threading.RLock()
        if former is not None:
            self.lock = former.lock
        self.replaced = False
        self.home = home
        self._window = window
        self._before = 0 if window is None else window.before
        self._store = store
        self._ledger = ledger
        self._ring = store.ring
        self._final_follows = autoreset == "next_step"
        after = None if window is None else window.after
        self._steps = Gatherer(store, schema, autoreset, after)
        self.next_paths = self._steps.next_paths
        self._index = self._make_index()
        self._indexed: Span | None = None
        self.num_illegal = 0
        self._span = self._make_span(ledger.heads, ledger.tails)

    def __repr__(self) -> str:
        """Say what it is."""
        buffer = self.home.folder or "a buffer in RAM"
        rows = int(self._span.lengths.sum())
        known = "replaced" if self.replaced else f"{rows:,} rows"
        return f"<View of {buffer}: {known}>"

    @property
    def span(self) -> Span:
        """What is alive now."""
        heads, tails = self._ledger.heads, self._ledger.tails
        if heads is not self._of[0] or tails is not self._of[1]:
            self._span = self._make_span(heads, tails)
        return self._span

    def _make_span(self, heads: Ids, tails: Ids) -> Span:
        span = Span(np.maximum(tails, heads - self._ring.capacity), heads)
        self._of = (heads, tails)
        return span

    def _make_index(self) -> EpisodeIndex:
        return EpisodeIndex(
            self._ring.num_envs,
            derived=self._steps.derived,
            final_follows=self._final_follows,
            before=self._before,
            after=None if self._window is None else self._window.after,
        )

    @property
    def index(self) -> EpisodeIndex:
        """The episodes alive now."""
        with self.lock:
            self._look()
            return self._index

    def _look(self) -> Span:
        """Bring the index to one moment, which a draw then keeps to."""
        span = self.span
        if span is not self._indexed:
            try:
                self._index.update(span, self._store.flags_between, self._new_flags)
            except BaseException:
                # Ctrl-C in the middle: rows half taken in would be counted twice.
                self._indexed = None
                self._index = self._make_index()
                raise
            self._indexed, self.num_illegal = span, self._index.num_illegal
        return span

    @property
    def starts(self) -> Span:
        """Where legal starts lie; see `samplers.base.View`."""
        known, ledger = self._span is self._indexed, self._ledger
        if known and self._of[0] is ledger.heads and self._of[1] is ledger.tails:
            # Nothing came or went since the last look, as between most draws.
            return self._index.starts
        with self.lock:
            self._look()
            return self._index.starts

    def legal(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Tell legal starts; see `samplers.base.View`."""
        return self._steps.legal(env_ids, positions, self._known()[0].stop)

    @property
    def law(self) -> Judge:
        """What decides which steps are legal."""
        return self._steps.law(self._known()[0].stop)

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """Legal starts by rank; see `samplers.base.View`."""
        return self._index.start_at(ranks)

    def legal_before(self, env_ids: Ids, positions: Ids) -> Ids:
        """Ranks of positions; see `samplers.ranks.legal_before`."""
        return self._index.legal_before(env_ids, positions)

    def check_in_force(self) -> None:
        """Refuse a draw that samplers would go back to a former generation for.

        Raises:
            ReplacedError: A thread put another one in force since this was asked for.
        """
        if self.replaced:
            raise ReplacedError(
                "this view is of a generation that was replaced, expected the one in "
                "force; ask the buffer for its view again"
            )

    def refresh(self) -> None:
        """Look at what the writer published since."""
        with self.lock:
            self._ledger.refresh()

    def check_uncut(self) -> None:
        """Refuse rows that were read beside a writer, after a look at its record.

        Raises:
            ReplacedError: It cut them before, and may have written others there.
        """
        ledger = self._ledger
        with self.lock:
            ledger.refresh()
        if ledger.cut:
            raise ReplacedError(CUT_ROWS)

    def check(self, env_ids: Ids, positions: Ids) -> None:
        """Refuse positions that are not alive.

        Raises:
            StaleError: A position was given up, or is not written yet.
            SchemaError: An environment is unknown.
        """
        if len(env_ids) and (env_ids.min() < 0 or env_ids.max() >= self._ring.num_envs):
            raise SchemaError(
                f"env_ids: got values in [{env_ids.min()}, {env_ids.max()}], expected "
                f"them in [0, {self._ring.num_envs}); environments are counted from 0"
            )
        span = self.span
        bad = (positions < span.first[env_ids]) | (positions >= span.stop[env_ids])
        if bad.any():
            which = int(np.flatnonzero(bad)[0])
            env_id, position = int(env_ids[which]), int(positions[which])
            raise StaleError(
                f"position {position} of environment {env_id} is not in the buffer, "
                f"expected one in [{span.first[env_id]}, {span.stop[env_id]}); it was "
                "overwritten, cleared, or is yet to be written"
            )

    @property
    def heads(self) -> Ids:
        """int64 ``[E]``: rows below are written."""
        return self._ledger.heads

    @property
    def moment(self) -> Moment:
        """What to keep before rows are copied; see `stale`."""
        return self._ledger.limits, self._ledger.tails

    def stale(
        self, env_ids: Ids, positions: Ids, moment: Moment
    ) -> NDArray[np.bool_] | None:
        """Tell which copied rows may have been overwritten while they were copied.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, alive at that moment; of steps that were folded
                the rows before them count, too.
            moment: `moment` from before the copying.

        Returns:
            bool ``[B]``, or None for none.

        Raises:
            ReplacedError: See `check_uncut`.
        """
        self.check_uncut()
        limits, tails = self._ledger.limits, self._ledger.tails
        if limits is moment[0] and (self._window is None or tails is moment[1]):
            return None
        edge = limits[env_ids] - self._ring.slots
        dead = positions - self._before < edge
        if self._window is not None and dead.any():
            # Where the episode begins later, nothing before it was read.
            with self.lock:
                begun = self.index.begun(env_ids, positions)
            dead = np.maximum(positions - self._before, begun) < edge
        if self._window is not None:
            # Folds ask the index for episodes, which knows no row that was given up.
            dead |= positions < self.span.first[env_ids]
        return dead if dead.any() else None

    def gather(self, env_ids: Ids, positions: Ids, contiguous: bool = False) -> Fields:
        """Copy steps with their next observations; see `StepReader.gather`."""
        known, index = self._known()
        return self._steps.gather(env_ids, positions, known.stop, index, contiguous)

    def _known(self) -> tuple[Span, EpisodeIndex]:
        """The rows whose flags are known, and the index of them.

        Rows that came since may be known to the ledger; of their flags nothing is.
        """
        index, known = self._index, self._indexed
        if known is None:
            # Drawn before this ring was put in another one's place.
            with self.lock:
                known, index = self._look(), self._index
        return known, index

    def plan(
        self, before: int, steps: int, direct: Direct, asked: Asked, sums: Sums | None
    ) -> Plan:
        """Find out what draws need to know; see `transforms.base.Rows`."""
        return self._steps.plan(before, steps, direct, asked, sums)

    def find(self, plan: Plan, env_ids: Ids, positions: Ids) -> Found:
        """Look around legal starts, and read; see `transforms.base.Rows`."""
        known = self._indexed
        if known is None:
            known = self._known()[0]
        return plan.find(env_ids, positions, known.stop)

    def read(self, paths: tuple[str, ...], env_ids: Ids, positions: Ids) -> Fields:
        """Copy stored fields of rows, nothing derived but the two ends."""
        return self._steps.read(paths, env_ids, positions, self._ledger.heads)

    def locate(self, env_ids: Ids, positions: Ids) -> tuple[Ids, Ids]:
        """Begin and end of episodes; see `transforms.base.Rows`."""
        with self.lock:
            self._look()
            return self._index.locate(env_ids, positions)

    def known(self, env_ids: Ids, ends: Ids) -> Ids:
        """Where what is known of episodes ends; see `transforms.base.Rows`."""
        return self._steps.known(env_ids, ends, self._known()[0].stop)

    def intact(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Whether rows read until now were whole; see `transforms.base.Rows`."""
        self.check_uncut()
        whole: NDArray[np.bool_] = (
            positions >= self._ledger.limits[env_ids] - self._ring.slots
        )
        return whole

    def _new_flags(self, env_ids: Ids, positions: Ids) -> NDArray[np.uint8]:
        """Flags of rows that the index takes in, and gathers look at from here on."""
        return self._store.flags(self._ring.rows(env_ids, positions), new=True)

    def flags(self, env_ids: Ids, positions: Ids) -> NDArray[np.uint8]:
        """Flags of rows, uint8 ``[B]``."""
        return self._store.flags(self._ring.rows(env_ids, positions))


def mapped(store: Store, span: Span, path: str) -> list[NDArray[Any]] | None:
    """Views of a field's rows; see `ReplayBuffer.mapped`."""
    field = store.schema[path]
    placement, ring = record_layout(store.schema), store.ring
    first, stop = int(span.first[0]), int(span.stop[0])
    in_step = (span.first == first).all() and (span.stop == stop).all()
    if not isinstance(store, MemmapStore) or path in placement.served or not in_step:
        return None
    name = placement.large.get(path, RECORDS)
    (file,) = [file for file in store.files if file.path.name == name]
    mapping = file.map_private()
    if name == RECORDS:
        rows = np.frombuffer(mapping, placement.record)[path]
    else:
        rows = np.frombuffer(mapping, field.numpy).reshape(-1, *field.shape)
    if ring.layout == "time_major":
        steps = rows.reshape(ring.slots, ring.num_envs, *field.shape)
    else:
        steps = rows.reshape(ring.num_envs, ring.slots, *field.shape).swapaxes(0, 1)
    begin, count = first % ring.slots, stop - first
    ahead = min(count, ring.slots - begin)
    pieces = [steps[begin : begin + ahead]]
    return pieces if ahead == count else [*pieces, steps[: count - ahead]]
