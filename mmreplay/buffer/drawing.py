"""Drawing: a sampler's steps or windows, with their data and what is made of it.

Rows are copied first and checked afterwards, as all reading is; what a writer was
overwriting meanwhile is drawn again, the batch whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.batch import Batch
from mmreplay.buffer.steps import Fields, Ids
from mmreplay.buffer.view import LiveView, Moment, Window
from mmreplay.errors import SchemaError, StaleError, StarvedError, shown
from mmreplay.samplers.base import Draw, Sampler
from mmreplay.samplers.epochs import draws_once
from mmreplay.schema import Schema
from mmreplay.transforms.base import Rows, Touched

MAX_REDRAWS = 100


class Fold(Window, Protocol):
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
class Drawn:
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

    def __init__(self, view: LiveView, schema: Schema, fold: Fold | None) -> None:
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
        whole = isinstance(batch_size, int | np.integer) and batch_size is not True
        if not whole or batch_size < 1:
            raise SchemaError(
                f"batch_size: got {shown(batch_size)}, expected an integer of at "
                "least 1; "
                "pass a number of steps, such as 256"
            )
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

    def ahead(self, sampler: Sampler, count: int) -> Drawn:
        """Draw, and copy later, by `finish`."""
        view = self._view
        with view.lock:
            view.check_in_force()
            moment = view.moment
            return Drawn(sampler.draw(view, count), count, moment, view)

    def finish(
        self, sampler: Sampler, drawn: Drawn, skip: bool = False
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

    def _cut(self, drawn: Drawn) -> NDArray[np.bool_]:
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
