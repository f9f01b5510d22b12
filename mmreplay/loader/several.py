"""Several buffers for torch's DataLoader: a Dataset of whole draws, and a stream.

`ConcatDataset` draws in the main process, `ConcatStream` in each worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch.utils.data import Dataset

from mmreplay.batch import Batch
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.concatenation import Concat, ConcatDraw
from mmreplay.errors import SchemaError
from mmreplay.loader.dataset import OPENED, ReplayDataset
from mmreplay.loader.draws import MAX_AHEAD, as_arrays, as_tensors, check_counts
from mmreplay.loader.stream import (
    InterleavedStream,
    check_interleaved,
    check_seeded,
    gather_or_redraw,
)
from mmreplay.process import ProcessGuard
from mmreplay.samplers.base import State


class ConcatDataset(Dataset[Any]):
    """Draws of `concat` for torch's DataLoader, with workers or without.

    Draws are made in the main process. Workers open the folders themselves, as those
    of a `ReplayDataset` do.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> both = mr.concat(["runs/cartpole", "runs/cartpole"], shares=[1, 1])
        >>> dataset = mr.ConcatDataset(both)
        >>> loader = DataLoader(dataset, sampler=dataset.draws(32), batch_size=None)
        >>> next(iter(loader))["observation"].shape
        torch.Size([32, 4])
    """

    def __init__(self, concat: Concat) -> None:
        """Make a dataset.

        Args:
            concat: From `concat`; buffers in RAM take num_workers=0.

        Raises:
            SchemaError: It is not from `concat`.
        """
        check_several(concat)
        self._concat: Concat | None = concat
        self._datasets = [ReplayDataset(buffer) for buffer in concat.buffers]

    def __repr__(self) -> str:
        """Show the datasets of the buffers."""
        return f"<ConcatDataset of {self._datasets}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a spawned worker needs: the folders."""
        return {"_datasets": self._datasets, "_concat": None}

    def __len__(self) -> int:
        """Legal starts now, of all buffers."""
        return sum(len(dataset) for dataset in self._datasets)

    def draws(self, batch_size: int, num_batches: int | None = None) -> ConcatDraws:
        """Return draws for a DataLoader's ``sampler`` or ``batch_sampler``.

        Args:
            batch_size: Steps a draw, of all buffers together, at least 1.
            num_batches: Draws an iteration; without end by default.

        Raises:
            SchemaError: A number is not legal, or this is a worker's copy.
        """
        if self._concat is None:
            raise SchemaError(
                "draws: this dataset was sent to another process, which has no "
                "sampler. Draw in the main process."
            )
        return ConcatDraws(self._concat, batch_size, num_batches)

    def __getitem__(self, index: ConcatDraw) -> Batch:
        """Gather a draw.

        Returns:
            Tensors ``[B, *shape]``, buffer by buffer, and ``batch.buffer_ids``.

        Raises:
            SchemaError: The index is no draw of `draws`.
        """
        if not isinstance(index, ConcatDraw):
            raise SchemaError(
                f"index must be a draw, got {type(index).__name__}. Pass "
                "dataset.draws(batch_size) to the DataLoader as batch_sampler, with "
                "collate_fn=mmreplay.collate."
            )
        batches = [self._datasets[one.buffer_id][one.draw] for one in index.draws]
        # By the lengths of the batches, which lack steps that were overwritten since.
        numbers = torch.tensor([one.buffer_id for one in index.draws])
        counts = torch.tensor([len(batch) for batch in batches])
        buffer_ids = torch.repeat_interleave(numbers, counts)
        return replace(Batch.join(batches), buffer_ids=buffer_ids)

    def __getitems__(self, indices: ConcatDraw) -> Batch:
        """Gather a draw, as the items of one batch of a DataLoader."""
        return self[indices]

    def opened(self) -> list[ReplayBuffer]:
        """The buffers, as this process has them open."""
        return [dataset.buffer for dataset in self._datasets]


def check_several(concat: object) -> None:
    """Refuse an object that is not from `concat`.

    Raises:
        SchemaError: It is not.
    """
    if not isinstance(concat, Concat):
        raise SchemaError(
            f"concat must be several buffers as one, got {type(concat).__name__}. "
            "Pass mr.concat([...], seed=...), or one buffer to ReplayDataset or "
            "ReplayStream."
        )


class ConcatDraws:
    """Draws of several buffers, made in the main process, one a batch."""

    def __init__(self, concat: Concat, batch_size: int, num_batches: int | None) -> None:
        """Make the draws of `ConcatDataset.draws`."""
        check_counts(batch_size, num_batches)
        self._concat = concat
        self._batch_size = batch_size
        self._num_batches = num_batches
        self._states: deque[tuple[int, State]] = deque(maxlen=MAX_AHEAD)

    def __repr__(self) -> str:
        """Show the buffers and the sizes."""
        numbers = f"batch_size={self._batch_size}"
        if self._num_batches is not None:
            numbers += f", num_batches={self._num_batches}"
        return f"<Draws of {self._concat!r}, {numbers}>"

    def __iter__(self) -> Iterator[Any]:  # for types of batch_sampler=
        """Draw num_batches times, or without end."""
        self._states.clear()
        self._states.append((0, self._concat.state_dict()))
        return self._draws()

    def _draws(self) -> Iterator[ConcatDraw]:
        done = 0
        while self._num_batches is None or done < self._num_batches:
            draw = self._concat.draw(self._batch_size)
            done += 1
            self._states.append((done, self._concat.state_dict()))
            yield draw

    def another(self) -> ConcatDraw:
        """Draw once more, outside the iteration."""
        return self._concat.draw(self._batch_size)

    def state_after(self, num_batches: int) -> State:
        """Return the state of `Concat` after so many batches; see `Draws.state_after`.

        Raises:
            SchemaError: So many were not drawn yet, or more than 1024 since.
        """
        for done, state in self._states:
            if done == num_batches:
                return as_tensors(state)  # type: ignore[no-any-return]  # a State too
        raise SchemaError(
            f"num_batches must be one of the last {MAX_AHEAD} batches of this "
            f"iteration, got {num_batches}. Ask while iterating."
        )

    def load_state_dict(self, state: State) -> None:
        """Have `Concat` draw from a state on; see `Draws.load_state_dict`.

        Raises:
            FormatError: It is of other buffers' samplers, or not a state at all.
        """
        with self._concat.lock:
            self._concat.load_state_dict(as_arrays(state))
        self._states.clear()

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Set the priorities of a batch's steps; see `Concat.update_priorities`.

        Later draws use them; a DataLoader draws a few batches ahead.
        """
        return self._concat.update_priorities(batch, values)

    def __len__(self) -> int:
        """Batches an iteration.

        Raises:
            TypeError: Iterations have no end.
        """
        if self._num_batches is None:
            raise TypeError(
                "draws without num_batches have no length. Pass num_batches to dataset.draws."
            )
        return self._num_batches


class ConcatStream(InterleavedStream):
    """Batches of `concat` for torch's DataLoader, drawn in its workers.

    As with a `ReplayStream`, on buffers without a writer the batches of a rank are
    the same with any number of workers, and the batches of all ranks are those of one
    process. There are no epochs, whatever the buffers' samplers have: an iteration has
    num_batches, or no end. Each worker follows writers at its own pace. Samplers with
    priorities are refused.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> both = mr.concat(["runs/cartpole", "runs/cartpole"], shares=[1, 1])
        >>> stream = mr.ConcatStream(both, 32, num_batches=10)
        >>> len(list(DataLoader(stream, batch_size=None)))
        10
    """

    _kind = "ConcatStream"

    def __init__(
        self,
        concat: Concat,
        batch_size: int,
        num_batches: int | None = None,
        *,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Make a stream.

        Args:
            concat: From `concat`, in any state, and used by the stream alone from now
                on; buffers in RAM take num_workers=0. Spawned workers get the samplers
                by pickle.
            batch_size: Steps a batch, of all buffers together, at least 1.
            num_batches: Batches of this rank an iteration; without end by default.
            rank: Rank of this process, in ``[0, num_ranks)``.
            num_ranks: Processes that share the draws, at least 1. Several need the
                same seeds, of `concat` and of each sampler.

        Raises:
            SchemaError: It is not from `concat`, a sampler has priorities, a number is
                not legal, or there are several ranks and no seed.
        """
        check_several(concat)
        check_counts(batch_size, num_batches)
        self._samplers = [buffer.sampler for buffer in concat.buffers]
        for sampler in self._samplers:
            check_interleaved(type(self).__name__, sampler, rank, num_ranks)
        check_seeded(concat, num_ranks)
        self._dataset = ConcatDataset(concat)
        self._shares = concat.shares
        self._concat: Concat | None = concat
        self._owner: ProcessGuard | None = ProcessGuard(*OPENED)
        self._batch_size = batch_size
        self._steps = None if num_batches is None else num_batches * num_ranks
        super().__init__(concat.state_dict(), rank, num_ranks)

    def __repr__(self) -> str:
        """Show the dataset, the size and the rank."""
        return (
            f"<ConcatStream of {self._dataset!r}, batch_size={self._batch_size}, "
            f"rank {self._rank} of {self._num_ranks}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a spawned worker needs: folders, samplers and shares."""
        return {**self.__dict__, "_concat": None, "_owner": None}

    def _own(self) -> Concat:
        """The `Concat` of this process, which opens the buffers again after a fork."""
        if self._concat is None or self._owner is None or self._owner.forked:
            buffers = self._dataset.opened()
            for buffer, sampler in zip(buffers, self._samplers, strict=True):
                buffer.sampler = sampler
            self._concat = Concat(buffers, self._shares, 0)
            self._owner = ProcessGuard(*OPENED)
        return self._concat

    def _begin(self, state: State) -> None:
        self._own().load_state_dict(state)

    def _gathered(self) -> Iterator[Callable[[], Batch]]:
        draws = ConcatDraws(self._own(), self._batch_size, self._steps)
        gather = self._dataset.__getitem__
        for draw in draws:
            yield partial(gather_or_redraw, gather, draw, draws.another)

    def __len__(self) -> int:
        """Batches of this rank an iteration.

        Raises:
            TypeError: Iterations have no end.
        """
        return self._num_own(len(self._dataset.draws(self._batch_size, self._steps)))
