"""Several buffers as an iterable torch Dataset: every worker draws for itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mmreplay.batch import Batch
from mmreplay.concatenation import Concat
from mmreplay.loader.draws import check_counts
from mmreplay.loader.several import ConcatDataset, ConcatDraws, check_several
from mmreplay.loader.stream import DealtStream, check_dealt, check_seeded, gathered
from mmreplay.samplers.base import State


class ConcatStream(DealtStream):
    """Batches of `concat` for torch's DataLoader, drawn in its workers.

    What holds of a `ReplayStream` holds of it: over buffers that nobody writes the
    batches of a rank are the same whatever the workers, and those of all ranks are
    those of one process. It has no epochs of its own, whatever the buffers' samplers
    go by: an iteration has num_batches, or no end. Each worker follows writers at its
    own pace. Samplers that keep priorities are refused.

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
            concat: What draws, as it is, and the stream's from now on; buffers in RAM
                take num_workers=0. Spawned workers get the samplers by pickle.
            batch_size: Steps a batch, of all buffers together, at least 1.
            num_batches: Batches of this rank an iteration; without end by default.
            rank: This process's, in ``[0, num_ranks)``.
            num_ranks: Processes that share the draws, at least 1. Several need one
                seed of `concat` and of each sampler.

        Raises:
            SchemaError: It is not what `concat` gave, a sampler keeps priorities, a
                number is not legal, or there are several ranks and no seed.
        """
        check_several(concat)
        check_counts(batch_size, num_batches)
        self._samplers = [buffer.sampler for buffer in concat.buffers]
        for sampler in self._samplers:
            check_dealt(type(self).__name__, sampler, rank, num_ranks)
        check_seeded(concat, num_ranks)
        self._dataset = ConcatDataset(concat)
        self._shares = concat.shares
        self._concat: Concat | None = concat
        self._pid = os.getpid()
        self._batch_size = batch_size
        self._steps = None if num_batches is None else num_batches * num_ranks
        super().__init__(concat.state_dict(), rank, num_ranks)

    def __repr__(self) -> str:
        """Say what it is."""
        return (
            f"<ConcatStream of {self._dataset!r}, batch_size={self._batch_size}, "
            f"rank {self._rank} of {self._num_ranks}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        """What goes to a spawned worker: the folders, samplers and shares."""
        return {**self.__dict__, "_concat": None}

    def _own(self) -> Concat:
        """What draws in this process."""
        if self._concat is None or self._pid != os.getpid():
            buffers = self._dataset.opened()
            for buffer, sampler in zip(buffers, self._samplers, strict=True):
                buffer.sampler = sampler
            self._concat = Concat(buffers, self._shares, 0)
            self._pid = os.getpid()
        return self._concat

    def _begin(self, state: State) -> None:
        self._own().load_state_dict(state)

    def _gathered(self) -> Iterator[Callable[[], Batch]]:
        draws = ConcatDraws(self._own(), self._batch_size, self._steps)
        gather = self._dataset.__getitem__
        for draw in draws:
            yield partial(gathered, gather, draw, draws.another)

    def __len__(self) -> int:
        """Batches of this rank an iteration.

        Raises:
            TypeError: There is no end.
        """
        return self._dealt(len(self._dataset.draws(self._batch_size, self._steps)))
