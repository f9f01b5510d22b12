"""What every open buffer can read: draws, given rows, everything."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.batch import Batch
from mmreplay.buffer.lifecycle import Parts
from mmreplay.buffer.view import Fields, LiveView
from mmreplay.episodes import FINAL, EpisodeIndex
from mmreplay.errors import EmptyError, SchemaError, StaleError, StarvedError
from mmreplay.ring import Span
from mmreplay.samplers.base import Home, Sampler

MAX_REDRAWS = 10
SCAN_ROWS = 8192

Ids = NDArray[np.int64]


class Reading:
    """Reads one open generation of a buffer."""

    def __init__(self, parts: Parts) -> None:
        self._store = parts.store
        self._schema = parts.metadata.schema
        metadata = parts.metadata
        self._ring = metadata.ring
        home = Home(metadata.ring, parts.path, metadata.uuid, metadata.generation)
        self.view = LiveView(
            parts.store, parts.ledger, self._schema, metadata.autoreset, home
        )
        self._bfloat16 = frozenset(
            path for path, f in self._schema.fields.items() if f.dtype == "bfloat16"
        )

    def refresh(self) -> None:
        """Look at what the writer published since."""
        self.view.refresh()

    @property
    def span(self) -> Span:
        """What is alive."""
        return self.view.span

    @property
    def index(self) -> EpisodeIndex:
        """The episodes alive."""
        return self.view.index

    def sample(self, sampler: Sampler, batch_size: int, contiguous: bool) -> Batch:
        """Draw and gather; see `ReplayBuffer.sample`."""
        if not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise SchemaError(
                f"batch_size: got {batch_size!r}, expected an integer of at least 1; "
                "ask for a step"
            )
        view = self.view
        with view.lock:
            before = view.limits
            draw = sampler.draw(view, batch_size)
        fields = view.gather(draw.env_ids, draw.positions)
        stale = view.stale(draw.env_ids, draw.positions, before)
        if stale is not None:
            self._redraw(sampler, draw.env_ids, draw.positions, fields, stale)
        if contiguous:
            fields = {path: np.ascontiguousarray(a) for path, a in fields.items()}
        return Batch(
            fields, draw.env_ids, draw.positions, draw.probabilities, draw.weights,
            None, self._bfloat16_of(fields),
        )  # fmt: skip

    def _bfloat16_of(self, fields: Fields) -> frozenset[str]:
        if not self._bfloat16:
            return self._bfloat16
        nexts = self.view.next_paths
        found = {nexts.get(path, path) for path in self._bfloat16} | self._bfloat16
        return frozenset(found & fields.keys())

    def _redraw(
        self, sampler: Sampler, env_ids: Ids, positions: Ids, fields: Fields,
        stale: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        """Put fresh steps in the place of those that were being overwritten."""
        bad = np.flatnonzero(stale)
        for _ in range(MAX_REDRAWS):
            with self.view.lock:
                before = self.view.limits
                draw = sampler.draw(self.view, len(bad))
            again = self.view.gather(draw.env_ids, draw.positions)
            gone = self.view.stale(draw.env_ids, draw.positions, before)
            env_ids[bad], positions[bad] = draw.env_ids, draw.positions
            for path, array in again.items():
                fields[path][bad] = array
            if gone is None:
                return
            bad = bad[gone]
        raise StarvedError(
            f"{len(bad)} steps were overwritten before they could be read, "
            f"{MAX_REDRAWS} times over, expected a writer slower than that; enlarge "
            f"the capacity ({self._ring.capacity}) or draw smaller batches"
        )

    def _ids(self, env_ids: ArrayLike, positions: ArrayLike) -> tuple[Ids, Ids]:
        """Broadcast and check what a user names rows with."""
        ids, places = np.asarray(env_ids), np.asarray(positions)
        for name, array in (("env_ids", ids), ("positions", places)):
            if array.size and array.dtype.kind not in "iu":
                raise SchemaError(
                    f"{name}: got {array.dtype}, expected integers; cast them first"
                )
        try:
            ids, places = np.broadcast_arrays(ids, places)
        except ValueError:
            raise SchemaError(
                f"env_ids and positions: got shapes {list(ids.shape)} and "
                f"{list(places.shape)}, expected shapes that broadcast; give one "
                "environment a position"
            ) from None
        ids, places = ids.astype(np.int64), places.astype(np.int64)
        self.view.check(ids.ravel(), places.ravel())
        return ids, places

    def _still(self, env_ids: Ids, positions: Ids, before: Ids) -> None:
        """Raise StaleError if rows were given up while they were copied."""
        if self.view.stale(env_ids, positions, before) is not None:
            self.view.check(env_ids, positions)

    def take(self, env_ids: ArrayLike, positions: ArrayLike) -> Batch:
        """Gather given steps; see `ReplayBuffer.take`."""
        before = self.view.limits
        ids, places = self._ids(env_ids, positions)
        ids, places = ids.ravel(), places.ravel()
        illegal = np.flatnonzero(~self.view.legal(ids, places))
        if len(illegal):
            which = int(illegal[0])
            raise StaleError(
                f"position {places[which]} of environment {ids[which]} cannot be drawn "
                "as a transition, expected a step whose next observation is known; it "
                "is a final row, the newest row, or the last before a gap: read its "
                "fields with get_field"
            )
        fields = self.view.gather(ids, places)
        self._still(ids, places, before)
        return self._plain(fields, ids, places)

    def _plain(self, fields: Fields, env_ids: Ids, positions: Ids) -> Batch:
        count = len(positions)
        probabilities = np.full(count, 1 / max(1, count))
        weights = np.ones(count, np.float32)
        return Batch(
            fields, env_ids, positions, probabilities, weights, None,
            self._bfloat16_of(fields),
        )  # fmt: skip

    def rows(self, env_ids: Ids, positions: Ids, before: Ids) -> Batch:
        """Stored fields of rows, and which are final."""
        fields = self.view.read(self._schema.paths, env_ids, positions)
        final = (self.view.flags(env_ids, positions) & FINAL) != 0
        self._still(env_ids, positions, before)
        fields.setdefault("final", final)
        return self._plain(fields, env_ids, positions)

    def gather_all(self) -> Batch:
        """Every row; see `ReplayBuffer.gather_all`."""
        before = self.view.limits
        ids, span = np.arange(self._ring.num_envs), self.span
        return self._between(ids, span.first, span.stop, before)

    def oldest(self, count: int, env_ids: Ids | None) -> Batch:
        """The oldest rows of each environment; see `ReplayBuffer.dequeue`."""
        if not isinstance(count, int | np.integer) or count < 1:
            raise SchemaError(
                f"count: got {count!r}, expected an integer of at least 1; ask for rows"
            )
        before = self.view.limits
        ids = np.arange(self._ring.num_envs) if env_ids is None else env_ids
        span = self.span
        lengths = span.lengths[ids]
        if (lengths < count).any():
            which = int(ids[np.argmin(lengths)])
            raise EmptyError(
                f"cannot dequeue {count} rows: environment {which} holds "
                f"{lengths.min()}, expected at least that many; ask for fewer, or name "
                "other environments"
            )
        firsts = span.first[ids]
        return self._between(ids, firsts, firsts + count, before)

    def _between(self, ids: Ids, firsts: Ids, stops: Ids, before: Ids) -> Batch:
        lengths = stops - firsts
        total = int(lengths.sum())
        env_ids = np.repeat(ids, lengths)
        edges = np.cumsum(lengths) - lengths
        positions = np.arange(total) - np.repeat(edges - firsts, lengths)
        out: Fields = {}
        for first in range(0, max(1, total), SCAN_ROWS):
            piece = slice(first, first + SCAN_ROWS)
            part = self.rows(env_ids[piece], positions[piece], before).fields
            for path, array in part.items():
                if path not in out:
                    out[path] = np.empty((total, *array.shape[1:]), array.dtype)
                out[path][piece] = array
        return self._plain(out, env_ids, positions)

    def get_field(
        self, path: str, env_ids: ArrayLike, positions: ArrayLike
    ) -> NDArray[np.generic]:
        """One field; see `ReplayBuffer.get_field`."""
        field = self._schema[path]
        before = self.view.limits
        ids, places = self._ids(env_ids, positions)
        found = self.view.read((path,), ids.ravel(), places.ravel())[path]
        self._still(ids.ravel(), places.ravel(), before)
        return np.ascontiguousarray(found).reshape((*ids.shape, *field.shape))

    def set(
        self, path: str, env_ids: ArrayLike, positions: ArrayLike, values: object
    ) -> None:
        """Overwrite values; see `ReplayBuffer.set`."""
        field = self._schema[path]
        if not field.mutable:
            raise SchemaError(
                f"field {path!r} is not mutable, expected one declared with "
                "Field(..., mutable=True); published rows never change otherwise"
            )
        ids, places = self._ids(env_ids, positions)
        column = field.convert(values, path, ids.shape)
        rows = self._ring.rows(ids.ravel(), places.ravel())
        if len(rows):
            self._store.set(path, rows, column.reshape(-1, *field.shape))
