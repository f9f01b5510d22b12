"""What a loader draws from: one buffer, or several that `concat` put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.batch import Batch
from mmreplay.buffer.limiting import Limit
from mmreplay.buffer.reader import ReplacedError
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.concatenation import Concat, as_numpy, joined
from mmreplay.errors import FailedError, SchemaError
from mmreplay.loader.prefetch import Order, Part, Source
from mmreplay.process import owned_by_thread
from mmreplay.samplers.base import Sampler, State, View, epochs_of
from mmreplay.samplers.combine import state_of
from mmreplay.schema import Schema
from mmreplay.storage.buffer_pool import BufferPool
from mmreplay.transforms.apply import Apply
from mmreplay.transforms.her import HER

NO_EPOCHS = (
    "ReplayLoader: got {}, which draws without an end, expected a sampler that goes by "
    "epochs for a length"
)


SHARED = (
    "ReplayLoader: got a buffer through whose epoch another loader goes by the same "
    "{}, expected one at a time, or each would get a part of it; close the other one, "
    "or open the buffer again with a sampler of its own"
)


class OneBuffer:
    """A buffer with its sampler and transforms; see `Source`."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        """Draw by the sampler that the buffer has now."""
        self._sampler = buffer.sampler
        self._buffer = buffer
        # One for all generations, and of a buffer that is closed as well.
        self._lock = buffer.view.lock
        self._epoch: int | None = None

    def __repr__(self) -> str:
        """Say which buffers."""
        return repr(self._buffer)

    def begin(self) -> None:
        """See `Source.begin`."""
        epochs = epochs_of(self._sampler)
        self._epoch = None if epochs is None else epochs.epoch
        if epochs is None:
            return
        if _by_epochs.setdefault(id(self._sampler), self) is not self:
            raise FailedError(SHARED.format(type(self._sampler).__name__))

    def end(self) -> None:
        """See `Source.end`."""
        if _by_epochs.get(id(self._sampler)) is self:
            _by_epochs.pop(id(self._sampler), None)

    def held(self) -> bool:
        """See `Source.held`."""
        return owned_by_thread(self._lock)

    def more(self, count: int) -> bool:
        """See `Source.more`."""
        view = self._buffer.reading
        with view.lock:
            return self._epoch is None or not self._over(view, count)

    def draw(self, order: Order, count: int) -> bool:
        """See `Source.draw`."""
        sampler = self._sampler
        while True:
            # Before the lock: to follow a resize is to wait for who may wait for that.
            reading = self._buffer.reading
            with reading.lock:
                if self._epoch is not None and self._over(reading, count):
                    self.end()
                    return False
                order.state = sampler.state_dict()
                try:
                    drawn = reading.draw(sampler, count)
                except ReplacedError:
                    # By a thread that resized it meanwhile.
                    continue
                order.parts = (Part(0, 1.0, reading, drawn),)
                return True

    def make(self, order: Order, count: int) -> Batch | None:
        """See `Source.make`."""
        while self._epoch is not None:
            # What comes of the next epoch is not to be drawn in place of what is lost.
            if not self.draw(order, count):
                return None
            if (batch := self.finish(order)) is not None:
                return batch
        while True:
            reading = self._buffer.reading
            with reading.lock:
                order.state = self._sampler.state_dict()
            try:
                return reading.sample(self._sampler, count)
            except FailedError:
                # By a thread that followed a resize meanwhile; or it is so.
                if self._buffer.reading is reading:
                    raise
                self.load_state_dict(order.state)

    def part(self, number: int, count: int, fraction: float) -> Part:
        """Draw as one of several."""
        order = Order()
        self.draw(order, count)
        return replace(order.parts[0], number=number, fraction=fraction)

    def _over(self, view: View, count: int) -> bool:
        """Whether the epoch has no batch left."""
        epochs: Sampler | None = epochs_of(self._sampler)
        if epochs is None:
            return False
        return epochs.epoch != self._epoch or not epochs.more(view, count)

    def nbytes(self, order: Order) -> int:
        """See `Source.nbytes`."""
        return self.part_nbytes(order.parts[0])

    def part_nbytes(self, part: Part) -> int:
        """Bytes that a part is copied from."""
        return self._buffer.reading.nbytes(part.drawn.draw)

    def ask(self, order: Order) -> int:
        """See `Source.ask`."""
        return self.ask_part(order.parts[0])

    def ask_part(self, part: Part) -> int:
        """Ask the disk for the rows of a part."""
        return self._buffer.reading.prefetch(part.drawn.draw)

    def finish(self, order: Order) -> Batch | None:
        """See `Source.finish`."""
        return self.finish_part(order.parts[0], skip=True)

    def finish_part(self, part: Part, skip: bool = False) -> Batch | None:
        """The data of a draw, also where the buffer is made anew meanwhile."""
        reading = part.reader
        while True:
            try:
                return reading.gather(part.drawn, skip=skip)
            except FailedError:
                # Another thread followed a resize, and closed what this one read.
                former, reading = reading, self._buffer.reading
                if reading is former:
                    raise

    def num_batches(self, count: int) -> int:
        """See `Source.num_batches`."""
        epochs = epochs_of(self._sampler)
        if epochs is None:
            raise TypeError(NO_EPOCHS.format(type(self._sampler).__name__))
        view = self._buffer.view
        with view.lock:
            return epochs.num_batches(view, count)

    def state_dict(self, priorities: bool = False) -> State:
        """See `Source.state_dict`."""
        with self._lock:
            return state_of(self._sampler, priorities)

    def load_state_dict(self, state: State) -> None:
        """See `Source.load_state_dict`."""
        with self._lock:
            self._sampler.load_state_dict(state)

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """See `Source.update_priorities`."""
        return self._buffer.update_priorities(batch, values)

    @property
    def limits(self) -> Sequence[Limit]:
        """See `Source.limits`."""
        limit = self._buffer.limit
        return () if limit is None else (limit,)

    def count(self, batch: Batch, size: int) -> None:
        """See `Source.count`."""
        for limit in self.limits:
            limit.count(size)


_by_epochs: WeakValueDictionary[int, OneBuffer] = WeakValueDictionary()
"""Whose epochs are gone through now, by the sampler's id."""


class SeveralBuffers:
    """Buffers that `concat` put together; see `Source`."""

    def __init__(self, concat: Concat, recycler: BufferPool) -> None:
        """Draw as it does.

        Args:
            concat: The buffers, each with its sampler and transforms.
            recycler: Memory of whole batches.
        """
        self._concat = concat
        self._recycler = recycler
        self._each = [OneBuffer(buffer) for buffer in concat.buffers]

    def __repr__(self) -> str:
        """Say which buffers."""
        return repr(self._concat)

    def begin(self) -> None:
        """See `Source.begin`; there are no epochs."""

    def end(self) -> None:
        """See `Source.end`."""

    def held(self) -> bool:
        """See `Source.held`."""
        return owned_by_thread(self._concat.lock) or any(
            one.held() for one in self._each
        )

    def more(self, count: int) -> bool:
        """See `Source.more`."""
        return True

    def draw(self, order: Order, count: int) -> bool:
        """See `Source.draw`."""
        concat = self._concat
        with concat.lock:
            order.state = concat.state_dict()
            order.parts = concat.each(count, self._one, tuple)
        return True

    def make(self, order: Order, count: int) -> Batch | None:
        """See `Source.make`."""
        self.draw(order, count)
        return self.finish(order)

    def _one(self, number: int, count: int, fraction: float) -> Part:
        return self._each[number].part(number, count, fraction)

    def nbytes(self, order: Order) -> int:
        """See `Source.nbytes`."""
        return sum(self._each[p.number].part_nbytes(p) for p in order.parts)

    def ask(self, order: Order) -> int:
        """See `Source.ask`."""
        return sum(self._each[p.number].ask_part(p) for p in order.parts)

    def finish(self, order: Order) -> Batch | None:
        """See `Source.finish`."""
        found = []
        for part in order.parts:
            batch = self._each[part.number].finish_part(part)
            assert batch is not None
            batch.buffer_ids = np.full(len(batch), part.number)
            batch.probabilities = batch.probabilities * part.fraction
            found.append(batch)
        return joined(found, self._cat, pad=self._concat.pads)

    def _cat(self, arrays: Sequence[NDArray[Any]], axis: int = 0) -> NDArray[Any]:
        """Join arrays, in memory that is used again."""
        shape = list(arrays[0].shape)
        shape[axis] = sum(array.shape[axis] for array in arrays)
        out = self._recycler.empty(tuple(shape), np.result_type(*arrays))
        return np.concatenate(arrays, axis, out=out)

    def num_batches(self, count: int) -> int:
        """See `Source.num_batches`."""
        raise TypeError(NO_EPOCHS.format("Concat"))

    def state_dict(self, priorities: bool = False) -> State:
        """See `Source.state_dict`."""
        with self._concat.lock:
            return self._concat.state_dict(priorities)

    def load_state_dict(self, state: State) -> None:
        """See `Source.load_state_dict`."""
        with self._concat.lock:
            self._concat.load_state_dict(state)

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """See `Source.update_priorities`."""
        return self._concat.update_priorities(batch, values)

    @property
    def limits(self) -> Sequence[Limit]:
        """See `Source.limits`."""
        return tuple(limit for one in self._each for limit in one.limits)

    def count(self, batch: Batch, size: int) -> None:
        """See `Source.count`."""
        if not self.limits:
            return
        sizes = np.bincount(as_numpy(batch.buffer_ids), minlength=len(self._each))
        for one, count in zip(self._each, sizes.tolist(), strict=True):
            one.count(batch, count)


class Rounded(BufferPool):
    """Memory of batches whose parts are now longer, now shorter.

    Arrays have a power of two of rows, and of those as many are handed out as were
    asked for: else there would be memory for each number of rows that ever was.
    """

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[np.generic]
    ) -> NDArray[np.generic]:
        """Return the first rows of an array; see `Recycler.empty`."""
        rows = shape[0]
        whole = (1 << max(0, rows - 1).bit_length(), *shape[1:])
        return super().empty(whole, dtype)[:rows]


def source_of(buffer: ReplayBuffer | Concat, recycler: BufferPool) -> Source:
    """Wrap what is drawn from."""
    if isinstance(buffer, Concat):
        return SeveralBuffers(buffer, recycler)
    return OneBuffer(buffer)


def recycler_of(buffer: object) -> type[BufferPool]:
    """Kind of memory for the batches of what is drawn from.

    Raises:
        SchemaError: Nothing can be drawn from it.
    """
    if isinstance(buffer, Concat):
        return Rounded
    if not isinstance(buffer, ReplayBuffer):
        raise SchemaError(
            f"buffer: got {type(buffer).__name__}, expected an open ReplayBuffer; "
            "pass ReplayBuffer.open(path, sampler=..., transforms=...), or several "
            "of them as mr.concat([...])"
        )
    return BufferPool


def calls_functions(buffer: ReplayBuffer | Concat) -> bool:
    """Whether transforms call functions of the user's, which may bear no threads."""
    buffers = buffer.buffers if isinstance(buffer, Concat) else (buffer,)
    return any(
        isinstance(each, Apply | HER)
        or not type(each).__module__.startswith("mmreplay.")
        for one in buffers
        for each in one.transforms
    )


def most_alike(schema: Schema) -> int:
    """How many arrays of one shape a batch may have, next observations included."""
    alike = Counter((field.shape, field.dtype) for field in schema.fields.values())
    return 2 * max(alike.values())
