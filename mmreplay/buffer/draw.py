"""Drawing: a sampler's steps or windows, with their data and what is made of it.

Rows are copied first and checked afterwards, as all reading is; what a writer was
overwriting meanwhile is drawn again, the batch whole.

Which rows a draw will be read from, so that the disk is asked for them early.

What every open buffer can read: draws, given rows, everything.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.arguments import integer
from mmreplay.batch import Batch
from mmreplay.buffer.opening import OpenFiles
from mmreplay.buffer.reader import Fields, Ids, LiveView, Moment, Window
from mmreplay.disk.files import File
from mmreplay.episodes import FINAL, EpisodeIndex
from mmreplay.errors import EmptyError, SchemaError, StaleError, StarvedError, shown
from mmreplay.format.metadata import Metadata
from mmreplay.ring import Span
from mmreplay.samplers.base import BufferIdentity, Draw, Sampler, draws_once
from mmreplay.schema import Schema
from mmreplay.schema.convert import array_of, on_host
from mmreplay.storage.store import Store
from mmreplay.storage.zarr.engine import ZarrStore
from mmreplay.storage.zarr.group import shards_in
from mmreplay.transforms.base import Rows, Touched

if TYPE_CHECKING:
    from mmreplay.transforms.base import Transform

MAX_REDRAWS = 100


class BatchTransform(Window, Protocol):
    """What makes a batch of stored rows: transforms, composed."""

    @property
    def bfloat16(self) -> frozenset[str]:
        """Names of the fields whose arrays hold the bits of bfloat16 numbers."""

    @property
    def reach(self) -> dict[str, tuple[int, ...]]:
        """Rows around a step that its batch is read from, by stored field."""

    def touched(
        self, rows: Rows, env_ids: Ids, positions: Ids, key: int, length: int | None
    ) -> Iterable[Touched]:
        """Say which rows `gather` will read, some of them twice; see there."""

    def gather(
        self, rows: Rows, env_ids: Ids, positions: Ids, key: int, length: int | None
    ) -> Fields:
        """Make the fields of legal starts, ``[N, *shape]`` per name.

        Args:
            rows: The buffer.
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``, legal starts under before and after.
            key: All randomness follows from it.
            length: Steps a window, one window after another; None without windows.
        """


@dataclass(frozen=True, slots=True)
class PendingDraw:
    """A draw whose data is copied later.

    Attributes:
        draw: Steps, or windows.
        count: How many were asked for.
        moment: What was alive.
        view: Which it is a draw of.
    """

    draw: Draw
    count: int
    moment: Moment
    view: LiveView


class Drawing:
    """Draws from one open generation of a buffer, through its transforms."""

    def __init__(
        self, view: LiveView, schema: Schema, fold: BatchTransform | None
    ) -> None:
        """Make one.

        Args:
            view: The buffer, with the window of the fold.
            schema: Its fields.
            fold: What makes a batch of stored rows; None gathers steps as they are.
        """
        self._view = view
        self._fold = fold
        self._row_nbytes = schema.row_nbytes
        self._told_of_firsts = False
        self._bfloat16 = _bfloat16(schema, view) if fold is None else fold.bfloat16

    def sample(self, sampler: Sampler, batch_size: int, contiguous: bool) -> Batch:
        """Draw and gather; see `ReplayBuffer.sample`."""
        # `integer` alone takes a tenth of a microsecond more, at every draw.
        if type(batch_size) is not int or batch_size < 1:
            integer("batch_size", batch_size, 1, "Pass a number of steps, such as 256.")
        try:
            draw, fields, stale = self._draw(sampler, int(batch_size), contiguous)
            if stale is not None:
                draw, fields = self._redrawn(sampler, draw, fields, stale)
                if contiguous:
                    fields = _apart(fields)
        except MemoryError as error:
            length = getattr(sampler, "length", None)
            nbytes = int(batch_size) * self._row_nbytes * (length or 1)
            windows = "" if length is None else f" windows of {length} steps"
            raise MemoryError(
                f"batch_size: got {batch_size}{windows}, whose stored fields alone "
                f"take {nbytes:,} bytes, expected a batch that fits the memory; draw "
                "several smaller ones"
            ) from error
        return self.batch(draw, fields)

    def _draw(
        self, sampler: Sampler, count: int, contiguous: bool = False
    ) -> tuple[Draw, Fields, NDArray[np.bool_] | None]:
        """One draw, its data, and which of it was being overwritten, if any was."""
        view = self._view
        with view.lock:
            view.check_in_force()
            moment = view.moment
            draw = sampler.draw(view, count)
        fields = self.fields(draw, contiguous)
        return draw, fields, view.stale(draw.env_ids, _oldest(draw), moment)

    def ahead(self, sampler: Sampler, count: int) -> PendingDraw:
        """Draw, and copy later, by `finish`."""
        view = self._view
        with view.lock:
            view.check_in_force()
            moment = view.moment
            return PendingDraw(sampler.draw(view, count), count, moment, view)

    def finish(
        self, sampler: Sampler, drawn: PendingDraw, skip: bool = False
    ) -> Batch | None:
        """Copy the data of a draw, as whole as `sample` does.

        What was given up since is not copied at all: transforms know no such row.

        Args:
            sampler: What made the draw.
            drawn: The draw.
            skip: Where nothing is left of what is drawn once an epoch, draw nothing in
                its place, which would be what comes next, and return None.
        """
        draw, moment = drawn.draw, drawn.moment
        now, gone = self._view.moment, None
        if now[0] is not moment[0] or now[1] is not moment[1]:
            gone = self._stale(draw, moment)
        if drawn.view is not self._view:
            # Made anew, as another ring, which holds what was alive and no more.
            fallen = _oldest(draw) < self._view.span.first[draw.env_ids]
            fallen |= self._cut(drawn)
            gone = fallen if gone is None else gone | fallen
        if gone is not None and gone.any():
            places, left = left_of(draw, ~gone)
            once = draws_once(sampler)
            if once and skip and not len(places):
                return None
            if once and len(places):
                draw = left
            else:
                fresh = self.ahead(sampler, drawn.count)
                draw, moment = fresh.draw, fresh.moment
        fields = self.fields(draw)
        stale = self._stale(draw, moment)
        if stale is not None:
            lost = skip and not len(left_of(draw, ~stale)[0])
            if lost and draws_once(sampler):
                return None
            draw, fields = self._redrawn(sampler, draw, fields, stale)
        return self.batch(draw, fields)

    def _cut(self, drawn: PendingDraw) -> NDArray[np.bool_]:
        """Which steps or windows reach rows that may have been cut since the draw."""
        draw, before, stop = drawn.draw, drawn.view.home, self._view.span.stop
        kept = self._view.home.known(stop, before.generation, before.cut_epoch)
        if kept is stop:
            return np.zeros(len(draw), bool)
        newest = draw.positions
        if draw.windows is not None:
            newest = draw.windows.positions.max(axis=1)
        after = 1 if self._fold is None else max(1, self._fold.after)
        return newest + after >= kept[draw.env_ids]

    def fields(self, draw: Draw, contiguous: bool = False) -> Fields:
        """Copy the data of a draw.

        Args:
            draw: Legal starts; of windows, every step is one.
            contiguous: Small fields, too, are arrays of their own.

        Returns:
            Per path ``[B, *shape]``, or ``[B, T, *shape]`` of windows.
        """
        windows = draw.windows
        if windows is None:
            key = draw.key
            return self._gather(draw.env_ids, draw.positions, key, None, contiguous)
        shape = windows.positions.shape
        env_ids = np.repeat(draw.env_ids, shape[1])
        places = windows.positions.reshape(-1)
        found = self._gather(env_ids, places, draw.key, shape[1], contiguous)
        found = {path: a.reshape(*shape, *a.shape[1:]) for path, a in found.items()}
        for path in _under(windows.first_only, found):
            found[path] = found[path][:, 0]
            if contiguous:
                found[path] = np.ascontiguousarray(found[path])
        if windows.is_first is not None:
            if "is_first" in found and not self._told_of_firsts:
                self._told_of_firsts = True
                warnings.warn(
                    "field 'is_first': got a field of the name that a sampler of "
                    "windows gives its own marks of where episodes begin; batches hold "
                    "the field, and not the marks: rename the field to have both",
                    RuntimeWarning,
                    stacklevel=2,
                )
            found.setdefault("is_first", windows.is_first)
        return found

    def _gather(
        self, env_ids: Ids, positions: Ids, key: int, length: int | None,
        contiguous: bool,
    ) -> Fields:  # fmt: skip
        if self._fold is None:
            return self._view.gather(env_ids, positions, contiguous=contiguous)
        found = self._fold.gather(self._view, env_ids, positions, key, length)
        return _apart(found) if contiguous else found

    def _stale(self, draw: Draw, moment: Moment) -> NDArray[np.bool_] | None:
        """Which draws were being overwritten, bool ``[B]``; None for none."""
        return self._view.stale(draw.env_ids, _oldest(draw), moment)

    def _redrawn(
        self, sampler: Sampler, draw: Draw, fields: Fields, stale: NDArray[np.bool_]
    ) -> tuple[Draw, Fields]:
        """Make a batch good of which some was being overwritten.

        A whole one is drawn instead: steps of a small draw of their own would have
        the strata and the greatest weight of that one. What is drawn once an epoch
        would be lost with it, so that there the rest is kept, without what is gone.
        """
        count = len(draw) if draw.offsets is None else len(draw.offsets) - 1
        once = draws_once(sampler)
        for _ in range(MAX_REDRAWS):
            if once:
                places, left = left_of(draw, ~stale)
                if len(places):
                    return left, {path: a[places] for path, a in fields.items()}
            draw, fields, gone = self._draw(sampler, count)
            if gone is None:
                return draw, fields
            stale = gone
        raise StarvedError(
            f"{np.count_nonzero(stale)} of {len(stale)} steps were overwritten before "
            f"they could be read, {MAX_REDRAWS} times over, expected a writer slower "
            f"than that; enlarge the capacity ({self._view.home.ring.capacity}) or "
            "draw smaller batches"
        )

    def gather(self, draw: Draw) -> Batch:
        """Gather a draw that was made before, or elsewhere.

        Raises:
            StaleError: A step is not in the buffer, or cannot be drawn.
        """
        moment = self._view.moment
        env_ids, positions = draw.env_ids, draw.positions
        if draw.windows is not None:
            env_ids = np.repeat(env_ids, draw.windows.positions.shape[1])
            positions = draw.windows.positions.reshape(-1)
        self._view.check(env_ids, positions)
        self._refuse_illegal(env_ids, positions)
        fields = self.fields(draw)
        stale = self._view.stale(env_ids, positions, moment)
        if stale is not None:
            which = int(np.flatnonzero(stale)[0])
            raise StaleError(
                f"position {positions[which]} of environment {env_ids[which]} was "
                "overwritten while it was read, expected a step that stays; draw again"
            )
        return self.batch(draw, fields)

    def _refuse_illegal(self, env_ids: Ids, positions: Ids) -> None:
        with self._view.lock:
            starts = self._view.starts
            legal = starts.first[env_ids] <= positions
            legal &= positions < starts.stop[env_ids]
            legal &= self._view.legal(env_ids, positions)
        illegal = np.flatnonzero(~legal)
        if len(illegal):
            which = int(illegal[0])
            raise StaleError(
                f"position {positions[which]} of environment {env_ids[which]} cannot "
                "be drawn as a transition, expected a step whose next observation, and "
                "window where transforms need one, is known; it is a final row, one of "
                "the newest rows, or the last before a gap: read its fields with "
                "get_field"
            )

    def batch(self, draw: Draw, fields: Fields) -> Batch:
        """A draw and its data."""
        windows = draw.windows
        return Batch(
            fields, draw.env_ids, draw.positions, draw.probabilities, draw.weights,
            None if windows is None else windows.mask, self._bfloat16,
            draw.key, None if windows is None else windows.positions, draw.offsets,
            buffer=self._view.home.uuid,
        )  # fmt: skip


def _bfloat16(schema: Schema, view: LiveView) -> frozenset[str]:
    """Names of the fields of steps as they are that hold bits of bfloat16 numbers."""
    paths = [path for path, f in schema.fields.items() if f.dtype == "bfloat16"]
    return frozenset(paths) | {view.next_paths.get(path, path) for path in paths}


def _apart(fields: Fields) -> Fields:
    """Fields as arrays of their own."""
    return {path: np.ascontiguousarray(array) for path, array in fields.items()}


def _under(paths: tuple[str, ...], fields: Fields) -> list[str]:
    """Return the fields of these paths, and those nested in them.

    Raises:
        SchemaError: There is none of some path.
    """
    found = []
    for path in paths:
        below = [name for name in fields if f"{name}/".startswith(f"{path}/")]
        if not below:
            raise SchemaError(
                f"first_only: got the path {path!r}, expected one of {list(fields)}; "
                "name a field of the batch"
            )
        found += below
    return found


def _oldest(draw: Draw) -> Ids:
    """Oldest step of each draw: rows are given up oldest first, windows go on."""
    return draw.positions if draw.windows is None else draw.windows.positions[:, 0]


def left_of(draw: Draw, good: NDArray[np.bool_]) -> tuple[Ids, Draw]:
    """Return places of the good steps or windows of a draw, and a draw of those alone.

    Args:
        draw: Steps, windows or whole episodes, of which those are left that are good.
        good: bool ``[B]``.
    """
    offsets = draw.offsets
    if offsets is not None:
        # Episodes are whole, or they are not drawn.
        lengths = np.diff(offsets)
        whole = np.logical_and.reduceat(good, offsets[:-1])
        good = np.repeat(whole, lengths)
        offsets = np.append(0, np.cumsum(lengths[whole]))
    places = np.flatnonzero(good)
    return places, replace(draw.taken(places), offsets=offsets)


Reach = Mapping[str, tuple[int, ...]]
"""Rows around a step, by the stored field that is read there."""


class ReadAhead:
    """Asks the disk for the rows of draws that are gathered later."""

    def __init__(
        self,
        store: Store,
        view: LiveView,
        nexts: Mapping[str, str],
        fold: BatchTransform | None,
    ) -> None:
        """Make one.

        Args:
            store: The rows.
            view: The buffer, for what is alive.
            nexts: Paths whose next row is read as well where there is no fold.
            fold: What makes the batches; None gathers steps as they are.
        """
        self._store = store
        self._view = view
        self._fold = fold
        fields = store.schema.fields
        reach = plain_reach(store.schema, nexts) if fold is None else fold.reach
        self._step_nbytes = sum(
            len(offsets) * fields[path].nbytes for path, offsets in reach.items()
        )
        following = tuple(path for path in fields if path in nexts)
        self._plain = ((tuple(fields), 0), (following, 1))

    def nbytes(self, draw: Draw) -> int:
        """Bytes that the draw is read from, rows read twice counted twice."""
        windows = draw.windows
        count = len(draw) if windows is None else windows.positions.size
        return count * self._step_nbytes

    def ask(self, draw: Draw) -> int:
        """Start reading the draw's rows where pages are missing.

        Returns:
            Bytes asked for; 0 where all seem to be in memory.
        """
        span, packed = self._view.span, self._store.packed
        together: dict[str, list[Ids]] = {}
        asked = 0
        for paths, env_ids, positions in self._touched(draw):
            # A writer may have given some up since; others are still to be written.
            last = np.maximum(span.first, span.stop - 1)
            alive = np.clip(positions, span.first[env_ids], last[env_ids])
            rows = self._store.ring.rows(env_ids, alive)
            apart = tuple(path for path in paths if path not in packed)
            if apart:
                asked += self._store.prefetch(rows, apart)
            for path in paths:
                if path in packed:
                    # To read one of them is to read all: one stands for the others.
                    together.setdefault(next(iter(together), path), []).append(rows)
                    break
        for path, every in together.items():
            asked += self._store.prefetch(np.concatenate(every), (path,))
        return asked

    def _touched(self, draw: Draw) -> Iterable[Touched]:
        """Where the draw is read."""
        env_ids, positions = _steps(draw)
        if self._fold is None:
            return [(paths, env_ids, positions + k) for paths, k in self._plain]
        length = None if draw.windows is None else draw.windows.positions.shape[1]
        return self._fold.touched(self._view, env_ids, positions, draw.key, length)


def _steps(draw: Draw) -> tuple[Ids, Ids]:
    """Every step of a draw, those of windows one window after another."""
    if draw.windows is None:
        return draw.env_ids, draw.positions
    places = draw.windows.positions
    return np.repeat(draw.env_ids, places.shape[1]), places.reshape(-1)


def plain_reach(schema: Schema, nexts: Mapping[str, str]) -> Reach:
    """What steps as they are, with derived next observations, are read from.

    Args:
        schema: The fields.
        nexts: Paths whose next row is read as well, by path.
    """
    return {path: (0, 1) if path in nexts else (0,) for path in schema.paths}


SCAN_ROWS = 8192
MAX_INT64 = 2**63 - 1


class Reading:
    """Reads one open generation of a buffer."""

    def __init__(
        self,
        parts: OpenFiles,
        fold: BatchTransform | None = None,
        former: Reading | None = None,
    ) -> None:
        """Make one.

        Args:
            parts: The generation.
            fold: What makes a batch of stored rows.
            former: What read the generation before this one.
        """
        self._store = parts.store
        self._schema = parts.metadata.schema
        metadata = parts.metadata
        self._ring = metadata.ring
        epoch, cuts = parts.ledger.cut_epoch, parts.ledger.cuts
        home = BufferIdentity(
            metadata.ring, parts.path, metadata.uuid, metadata.generation, epoch,
            cuts if epoch else None,
        )  # fmt: skip
        self.view: LiveView = LiveView(
            parts.store, parts.ledger, self._schema, metadata.autoreset, home, fold,
            None if former is None else former.view,
        )  # fmt: skip
        self.drawing = Drawing(self.view, self._schema, fold)
        self.ahead = ReadAhead(parts.store, self.view, self.view.next_paths, fold)

    @property
    def files(self) -> list[File]:
        """Open files that hold the rows."""
        return self._store.files

    @property
    def paths(self) -> list[Path]:
        """Of the same and, in a compressed buffer, of its shards."""
        store = self._store
        shards = shards_in(store.path) if isinstance(store, ZarrStore) else []
        return [*(file.path for file in store.files), *shards]

    @property
    def span(self) -> Span:
        """What is alive."""
        return self.view.span

    @property
    def index(self) -> EpisodeIndex:
        """The episodes alive."""
        return self.view.index

    def _ids(self, env_ids: ArrayLike, positions: ArrayLike) -> tuple[Ids, Ids]:
        """Broadcast and check what a user names rows with."""
        ids, places = _integers("env_ids", env_ids), _integers("positions", positions)
        try:
            ids, places = np.broadcast_arrays(ids, places)
        except ValueError:
            raise SchemaError(
                f"env_ids and positions: got shapes {list(ids.shape)} and "
                f"{list(places.shape)}, expected shapes that broadcast; give one "
                "environment a position"
            ) from None
        self.view.check(ids.ravel(), places.ravel())
        return ids, places

    def _still(self, env_ids: Ids, positions: Ids, moment: Moment) -> None:
        """Raise StaleError if rows were given up while they were copied."""
        if self.view.stale(env_ids, positions, moment) is not None:
            self.view.check(env_ids, positions)

    def take(self, env_ids: ArrayLike, positions: ArrayLike, key: int) -> Batch:
        """Gather given steps; see `ReplayBuffer.take`."""
        ids, places = self._ids(env_ids, positions)
        return self.drawing.gather(_given(ids.ravel(), places.ravel(), key))

    def update_priorities(
        self, sampler: Sampler, batch: Batch, values: ArrayLike
    ) -> int:
        """Pass priorities on; see `ReplayBuffer.update_priorities`."""
        # To ask isinstance for the protocol takes 9 us, a tenth of a whole turn.
        update = getattr(sampler, "update_priorities", None)
        if update is None:
            raise SchemaError(
                f"update_priorities: got the sampler {type(sampler).__name__}, which "
                "keeps no priorities, expected one that does; open the buffer with "
                "sampler=mmreplay.PrioritizedSampler(...), or give those of a batch "
                "that a dataset's draws made to draws.update_priorities"
            )
        if not isinstance(batch, Batch):
            raise SchemaError(
                f"update_priorities: got {type(batch).__name__}, expected the batch "
                "that sample gave, which knows its steps; pass "
                "update_priorities(batch, values)"
            )
        uuid, several = self.view.home.uuid, batch.buffer_ids is not None
        if several or batch.buffer not in (b"", uuid):
            whose = "several buffers" if several else f"buffer {batch.buffer.hex()}"
            raise SchemaError(
                f"update_priorities: got a batch of {whose}, expected one of "
                f"{uuid.hex()} ({self.view.home.folder or 'in RAM'}); give it to what "
                "drew it"
            )
        mask = None if batch.mask is None else _array(batch.mask)
        # To make tensors of both and to look at these as arrays takes 4 us.
        env_ids = _array(batch.drawn("env_ids"))
        positions = _array(batch.drawn("positions"))
        numbers = _array(values)
        with self.view.lock:
            self.view.check_in_force()
            return int(update(self.view, env_ids, positions, numbers, mask))

    def _plain(self, fields: Fields, env_ids: Ids, positions: Ids) -> Batch:
        return self.drawing.batch(_given(env_ids, positions), fields)

    def rows(self, env_ids: Ids, positions: Ids, moment: Moment) -> Batch:
        """Stored fields of rows, and which are final."""
        fields = self.view.read(self._schema.paths, env_ids, positions)
        final = (self.view.flags(env_ids, positions) & FINAL) != 0
        self._still(env_ids, positions, moment)
        fields.setdefault("final", final)
        return self._plain(fields, env_ids, positions)

    def gather_all(self) -> Batch:
        """Every row; see `ReplayBuffer.gather_all`."""
        moment = self.view.moment
        ids, span = np.arange(self._ring.num_envs), self.span
        return self._between(ids, span.first, span.stop, moment)

    def oldest(self, count: int, env_ids: Ids | None) -> Batch:
        """The oldest rows of each environment; see `ReplayBuffer.dequeue`."""
        integer("count", count, 1, "Pass a number of rows.")
        moment = self.view.moment
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
        return self._between(ids, firsts, firsts + count, moment)

    def _between(self, ids: Ids, firsts: Ids, stops: Ids, moment: Moment) -> Batch:
        lengths = stops - firsts
        total = int(lengths.sum())
        env_ids = np.repeat(ids, lengths)
        edges = np.cumsum(lengths) - lengths
        positions = np.arange(total) - np.repeat(edges - firsts, lengths)
        out: Fields = {}
        for first in range(0, max(1, total), SCAN_ROWS):
            piece = slice(first, first + SCAN_ROWS)
            part = self.rows(env_ids[piece], positions[piece], moment).fields
            for path, array in part.items():
                if path not in out:
                    out[path] = np.empty((total, *array.shape[1:]), array.dtype)
                out[path][piece] = array
        return self._plain(out, env_ids, positions)

    def get_field(
        self, path: str, env_ids: ArrayLike, positions: ArrayLike
    ) -> NDArray[np.generic]:
        """One field; see `ReplayBuffer.get_field`."""
        return self.get_fields((path,), env_ids, positions)[path]

    def get_fields(
        self, paths: tuple[str, ...], env_ids: ArrayLike, positions: ArrayLike
    ) -> Fields:
        """Some fields of given rows; see `ReplayBuffer.get_fields`."""
        fields = [self._schema[path] for path in paths]
        moment = self.view.moment
        ids, places = self._ids(env_ids, positions)
        found = self.view.read(paths, ids.ravel(), places.ravel())
        self._still(ids.ravel(), places.ravel(), moment)
        return {
            path: np.ascontiguousarray(found[path]).reshape((*ids.shape, *field.shape))
            for path, field in zip(paths, fields, strict=True)
        }

    def flags(self, env_ids: ArrayLike, positions: ArrayLike) -> NDArray[np.uint8]:
        """Flags of rows; see `OpenBuffer.flags`."""
        moment = self.view.moment
        ids, places = self._ids(env_ids, positions)
        found = self.view.flags(ids, places)
        self._still(ids.ravel(), places.ravel(), moment)
        return found

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


def _integers(name: str, values: ArrayLike) -> Ids:
    array = array_of(values, name)
    kind = array.dtype.kind
    if array.size and kind not in "iu":
        raise SchemaError(
            f"{name}: got {array.dtype}, expected integers; cast them first"
        )
    if array.size and kind == "u" and int(array.max()) > MAX_INT64:
        raise SchemaError(
            f"{name}: got {array.max()}, expected at most {MAX_INT64}; no row has such "
            "a number, look at buffer.span"
        )
    return array.astype(np.int64)


def _given(env_ids: Ids, positions: Ids, key: int = 0) -> Draw:
    """Named steps as a draw, each as likely."""
    count = len(positions)
    probabilities = np.full(count, 1 / max(1, count))
    return Draw(env_ids, positions, probabilities, np.ones(count, np.float32), key)


def _array(values: Any) -> NDArray[Any]:
    """An array of what may be a tensor, of any device, with a gradient or without."""
    if type(values) is np.ndarray:
        return values
    if hasattr(values, "detach"):
        values = on_host(values)
    return array_of(values, "values")


def listed(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """Several transforms as one value.

    Raises:
        SchemaError: They are no list.
    """
    if not isinstance(transforms, Sequence):
        raise SchemaError(
            f"transforms: got {shown(transforms)}, expected a list of transforms; put "
            "one "
            "into a list of its own"
        )
    return tuple(transforms)


def fold_of(
    transforms: Sequence[Transform], metadata: Metadata
) -> BatchTransform | None:
    """What makes a buffer's batches, or None for steps as they are.

    Raises:
        SchemaError: The transforms do not fit the schema, the ring, or each other.
    """
    if not listed(transforms):
        return None
    from mmreplay.transforms.pipeline import Pipeline

    follows = metadata.autoreset == "next_step"
    fold = Pipeline(transforms, metadata.schema, final_follows=follows)
    rows, capacity = fold.before + 1 + fold.after, metadata.ring.capacity
    if rows > capacity:
        raise SchemaError(
            f"transforms: got windows of {rows} rows, expected at most the {capacity} "
            "that the buffer keeps of each environment; take fewer steps, or resize it"
        )
    return fold
