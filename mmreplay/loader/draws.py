"""A sampler bound to a dataset, as torch's DataLoader iterates over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mmreplay.errors import SchemaError
from mmreplay.samplers.base import Draw, Sampler

if TYPE_CHECKING:
    from mmreplay.loader.dataset import ReplayDataset


class Draws:
    """Draws of one sampler, made in the main process, one a batch.

    Each is made from what the buffer holds when it is asked for, so that a buffer
    which is being written is followed; loaders ask a few batches ahead. Iterating
    again goes on with the sampler where it is.
    """

    def __init__(
        self,
        dataset: ReplayDataset,
        sampler: Sampler,
        batch_size: int,
        num_batches: int | None,
    ) -> None:
        """Bind a sampler; see `ReplayDataset.draws`."""
        for name, number in (("batch_size", batch_size), ("num_batches", num_batches)):
            if number is not None and number < 1:
                raise SchemaError(
                    f"{name}: got {number}, expected at least 1; ask for a step"
                )
        self._dataset = dataset
        self._sampler = sampler
        self._batch_size = batch_size
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[Draw]:
        """Draw num_batches times, or without end."""
        done = 0
        while self._num_batches is None or done < self._num_batches:
            yield self._sampler.draw(self._dataset.buffer.view, self._batch_size)
            done += 1

    def __len__(self) -> int:
        """Batches an iteration.

        Raises:
            TypeError: There is no end.
        """
        if self._num_batches is None:
            raise TypeError(
                "draws: got no num_batches, so they have no end, expected a number "
                "for a length; pass num_batches to dataset.draws"
            )
        return self._num_batches
