"""What a loader draws from: one buffer, or several that `concat` joins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.batch import Batch, as_numpy
from mmreplay.buffer.limiting import Limit
from mmreplay.buffer.reader import ReplacedError
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.concatenation import Concat
from mmreplay.errors import FailedError, SchemaError
from mmreplay.loader.prefetch import Drawable, PendingBatch, PendingShare
from mmreplay.process import owned_by_thread
from mmreplay.samplers.base import Sampler, State, View, traits_of
from mmreplay.samplers.combine import state_of
from mmreplay.samplers.divided import DrawAtShares
from mmreplay.schema import Schema
from mmreplay.storage.gather import BufferPool
from mmreplay.transforms.apply import Apply
from mmreplay.transforms.her import HER

NO_EPOCHS = (
    "ReplayLoader: {} draws without an end, so it has no length. Use a sampler with "
    "epochs, such as ShuffledSampler."
)
SHARED_EPOCH = (
    "ReplayLoader: another loader iterates over the epoch of this buffer's {}, and "
    "each would get only some of its batches. Close the other loader, or open the "
    "buffer again with another sampler."
)


def drawable_of(buffer: ReplayBuffer | Concat) -> Drawable:
    """Return the source of a loader over one buffer, or several.

    Raises:
        SchemaError: Nothing can be drawn from it.
    """
    if isinstance(buffer, Concat):
        return ConcatSource(buffer)
    if isinstance(buffer, ReplayBuffer):
        return BufferSource(buffer)
    raise SchemaError(
        f"buffer must be an open ReplayBuffer, got {type(buffer).__name__}. Pass "
        "ReplayBuffer.open(path, sampler=..., transforms=...), or several of them "
        "as mr.concat([...])."
    )


class BufferSource:
    """Draws from one buffer, with its sampler and transforms; see `Drawable`."""

    in_shares = False

    def __init__(self, buffer: ReplayBuffer) -> None:
        """Draw with the sampler that the buffer has now."""
        self._sampler = buffer.sampler
        self._ends = traits_of(buffer.sampler).ends
        self._buffer = buffer
        # One lock for all generations, and of a buffer that is closed as well.
        self._lock = buffer.view.lock
        self._epoch: int | None = None

    def __repr__(self) -> str:
        """Show the buffer."""
        return repr(self._buffer)

    @property
    def schema(self) -> Schema:
        """The buffer's fields."""
        return self._buffer.schema

    @property
    def calls_user_functions(self) -> bool:
        """Whether a transform of the buffer calls the user's functions."""
        return any(
            isinstance(transform, Apply | HER)
            or not type(transform).__module__.startswith("mmreplay.")
            for transform in self._buffer.transforms
        )

    def use_pool(self, pool: BufferPool) -> None:
        """Do nothing: the buffer gathers each batch by itself."""

    @property
    def limits(self) -> Sequence[Limit]:
        """The buffer's rate limit, if it has one."""
        limit = self._buffer.limit
        return () if limit is None else (limit,)

    def begin(self) -> None:
        """Take the sampler's epoch for this source, if it has epochs."""
        if not self._ends:
            return
        self._epoch = self._sampler.epoch
        if _epoch_owners.setdefault(id(self._sampler), self) is not self:
            raise FailedError(SHARED_EPOCH.format(type(self._sampler).__name__))

    def end(self) -> None:
        """Give the sampler's epoch back."""
        if _epoch_owners.get(id(self._sampler)) is self:
            _epoch_owners.pop(id(self._sampler), None)

    def owned_by_thread(self) -> bool:
        """Whether this thread holds the lock of the buffer's view."""
        return owned_by_thread(self._lock)

    def more(self, count: int) -> bool:
        """Whether the sampler's epoch has another batch."""
        reader = self._buffer.view
        with reader.lock:
            return self._epoch is None or not self._epoch_is_over(reader, count)

    def draw(self, pending: PendingBatch, count: int) -> bool:
        """Draw with the buffer's sampler from its current generation."""
        while True:
            # Before the lock: following a resize takes another lock, whose owner may
            # wait for this one.
            reader = self._buffer.view
            with reader.lock:
                if self._epoch is not None and self._epoch_is_over(reader, count):
                    self.end()
                    return False
                pending.state = self._sampler.state_dict()
                try:
                    drawn = reader.draw(self._sampler, count)
                except ReplacedError:
                    # Another thread resized the buffer.
                    continue
                pending.claims.append(drawn.claims)
                pending.shares = (PendingShare(0, 1.0, reader, drawn),)
                return True

    def draw_share(
        self, buffer_id: int, count: int, fraction: float, sampler: Sampler
    ) -> PendingShare:
        """Draw as one of several buffers, within the draw of all.

        Args:
            buffer_id: Number of this buffer.
            count: Steps of the batch that are this buffer's.
            fraction: Share of this buffer in all steps.
            sampler: Draws them: the buffer's own, or a part of a joint draw.
        """
        if not isinstance(sampler, DrawAtShares):
            pending = PendingBatch()
            self.draw(pending, count)
            pending.claims.keep()
            share: PendingShare = pending.shares[0]
            return replace(share, buffer_id=buffer_id, fraction=fraction)
        while True:
            reader = self._buffer.view
            try:
                drawn = reader.draw(sampler, count)
            except ReplacedError:
                continue
            return PendingShare(buffer_id, fraction, reader, drawn)

    def gather(self, pending: PendingBatch) -> Batch | None:
        """Copy the data of a draw; None where nothing is left of one of an epoch."""
        return self.gather_share(pending.shares[0], skip=True)

    def gather_share(self, share: PendingShare, skip: bool = False) -> Batch | None:
        """Copy the data of a draw, also where the buffer was resized meanwhile.

        Args:
            share: The draw.
            skip: Return None where nothing is left of a draw of an epoch; otherwise
                draw the next steps in its place.
        """
        reader = share.reader
        while True:
            try:
                return reader.gather(share.drawn, skip=skip)
            except FailedError:
                # Another thread followed a resize, and closed what this one read.
                former, reader = reader, self._buffer.view
                if reader is former:
                    raise

    def sample(self, pending: PendingBatch, count: int) -> Batch | None:
        """Draw and gather; None where the sampler's epoch is over."""
        while self._epoch is not None:
            # By draw and gather: overwritten steps of an epoch are not replaced by
            # steps of the next epoch.
            if not self.draw(pending, count):
                return None
            if (batch := self.gather(pending)) is not None:
                return batch
            pending.claims.release()
        while True:
            reader = self._buffer.view
            with reader.lock:
                pending.state = self._sampler.state_dict()
            try:
                return reader.sample(self._sampler, count, pending.claims)
            except FailedError:
                # Another thread followed a resize meanwhile; if not, it is an error.
                if self._buffer.view is reader:
                    raise
                pending.claims.release()
                self.load_state_dict(pending.state)

    def go_back(self, state: State) -> bool:
        """Have the sampler draw the epoch from a state on."""
        if not self._ends:
            return False
        with self._lock:
            if _epoch_owners.get(id(self._sampler), self) is not self:
                # This source has drawn its epoch, and the next one is another's.
                return False
            self._sampler.load_state_dict(state)
            self.begin()
        return True

    def nbytes(self, pending: PendingBatch) -> int:
        """Bytes that the draw is gathered from."""
        return self.share_nbytes(pending.shares[0])

    def share_nbytes(self, share: PendingShare) -> int:
        """Bytes that a draw is gathered from."""
        return self._buffer.view.nbytes(share.drawn.draw)

    def prefetch(self, pending: PendingBatch) -> int:
        """Ask the disk for the rows of the draw."""
        return self.prefetch_share(pending.shares[0])

    def prefetch_share(self, share: PendingShare) -> int:
        """Ask the disk for a draw's rows; return the bytes that were missing."""
        return self._buffer.view.prefetch(share.drawn.draw)

    def num_batches(self, count: int) -> int:
        """Batches of a whole epoch of the sampler."""
        if not self._ends:
            raise TypeError(NO_EPOCHS.format(type(self._sampler).__name__))
        view = self._buffer.view
        with view.lock:
            return self._sampler.num_batches(view, count)

    def state_dict(self, priorities: bool = False) -> State:
        """State of the buffer's sampler."""
        with self._lock:
            return state_of(self._sampler, priorities)

    def load_state_dict(self, state: State) -> None:
        """Have the sampler draw from a state on."""
        with self._lock:
            self._sampler.load_state_dict(state)

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Set the priorities of a batch's steps."""
        return self._buffer.update_priorities(batch, values)

    def count(self, batch: Batch, size: int) -> None:
        """Count the steps asked for in the buffer's limit."""
        for limit in self.limits:
            limit.count(size)

    def _epoch_is_over(self, view: View, count: int) -> bool:
        """Whether the epoch has no other batch of so many steps."""
        if not self._ends:
            return False
        sampler: Sampler = self._sampler
        return sampler.epoch != self._epoch or not sampler.more(view, count)


_epoch_owners: WeakValueDictionary[int, BufferSource] = WeakValueDictionary()
"""Sources that iterate over a sampler's epoch now, by the sampler's id."""


class ConcatSource:
    """Draws from several buffers as `Concat` does; see `Drawable`.

    There are no epochs, whatever the buffers' samplers have: see `Concat`.
    """

    in_shares = True

    def __init__(self, concat: Concat) -> None:
        """Draw from several buffers, each with its sampler and transforms."""
        self._concat = concat
        self._pool: BufferPool | None = None
        self._sources = [BufferSource(buffer) for buffer in concat.buffers]

    def __repr__(self) -> str:
        """Show the buffers."""
        return repr(self._concat)

    @property
    def schema(self) -> Schema:
        """The fields of all buffers."""
        return self._concat.schema

    @property
    def calls_user_functions(self) -> bool:
        """Whether a transform of a buffer calls the user's functions."""
        return any(source.calls_user_functions for source in self._sources)

    def use_pool(self, pool: BufferPool) -> None:
        """Join batches in the memory of a pool."""
        self._pool = pool

    @property
    def limits(self) -> Sequence[Limit]:
        """The rate limits of all buffers."""
        return tuple(limit for source in self._sources for limit in source.limits)

    def begin(self) -> None:
        """Do nothing: there are no epochs."""

    def end(self) -> None:
        """Do nothing: there are no epochs."""

    def owned_by_thread(self) -> bool:
        """Whether this thread holds the lock of `Concat`, or of a buffer's view."""
        return owned_by_thread(self._concat.lock) or any(
            source.owned_by_thread() for source in self._sources
        )

    def more(self, count: int) -> bool:
        """Always true."""
        return True

    def draw(self, pending: PendingBatch, count: int) -> bool:
        """Divide the batch between the buffers, and draw from each."""
        concat = self._concat
        with concat.lock:
            pending.state = concat.state_dict()
            pending.shares = pending.claims.call(concat.each, count, self._draw_share, tuple)
        return True

    def _draw_share(
        self, buffer_id: int, count: int, fraction: float, sampler: Sampler
    ) -> PendingShare:
        source = self._sources[buffer_id]
        return source.draw_share(buffer_id, count, fraction, sampler)

    def gather(self, pending: PendingBatch) -> Batch | None:
        """Copy the data of all draws, and join it."""
        batches = []
        for share in pending.shares:
            batch = self._sources[share.buffer_id].gather_share(share)
            assert batch is not None
            batch.buffer_ids = np.full(len(batch), share.buffer_id)
            batch.probabilities = batch.probabilities * share.fraction
            batches.append(batch)
        joined = Batch.join(batches, pad=self._concat.pads, memory=self._pool)
        sampler = pending.shares[0].drawn.sampler
        if isinstance(sampler, DrawAtShares):
            joined = self._concat.weighed(joined, sampler.weights)
        return joined

    def sample(self, pending: PendingBatch, count: int) -> Batch | None:
        """Draw and gather."""
        self.draw(pending, count)
        return self.gather(pending)

    def go_back(self, state: State) -> bool:
        """Do nothing: there are no epochs."""
        return False

    def nbytes(self, pending: PendingBatch) -> int:
        """Bytes that the draws are gathered from."""
        shares = pending.shares
        return sum(self._sources[s.buffer_id].share_nbytes(s) for s in shares)

    def prefetch(self, pending: PendingBatch) -> int:
        """Ask the disk for the rows of the draws."""
        shares = pending.shares
        return sum(self._sources[s.buffer_id].prefetch_share(s) for s in shares)

    def num_batches(self, count: int) -> int:
        """Raise TypeError: there are no epochs."""
        raise TypeError(NO_EPOCHS.format("Concat"))

    def state_dict(self, priorities: bool = False) -> State:
        """State of `Concat`, with that of each sampler."""
        with self._concat.lock:
            return self._concat.state_dict(priorities)

    def load_state_dict(self, state: State) -> None:
        """Have `Concat` draw from a state on."""
        with self._concat.lock:
            self._concat.load_state_dict(state)

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Set the priorities of a batch's steps, each in its own buffer."""
        return self._concat.update_priorities(batch, values)

    def count(self, batch: Batch, size: int) -> None:
        """Count the steps of each buffer in its limit."""
        if not self.limits:
            return
        counts = np.bincount(as_numpy(batch.buffer_ids), minlength=len(self._sources))
        for source, count in zip(self._sources, counts.tolist(), strict=True):
            source.count(batch, count)


class PowerOfTwoPool(BufferPool):
    """Memory of batches whose shares change in length from batch to batch.

    Arrays are made with a power of two of rows, and their first rows handed out: else
    there would be memory for each number of rows that ever was.
    """

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
        """Return the first rows of a larger array, whose content means nothing."""
        rows = shape[0]
        rounded = (1 << max(0, rows - 1).bit_length(), *shape[1:])
        return super().empty(rounded, dtype)[:rows]
