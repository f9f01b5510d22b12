"""Draws of a sampler from a dataset, as torch's DataLoader iterates over them.

Their states have tensors in place of arrays, so that torch loads them with
``weights_only=True``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from mmreplay.arguments import integer
from mmreplay.batch import Batch
from mmreplay.buffer.reader import ReplacedError
from mmreplay.errors import SchemaError
from mmreplay.samplers.base import Draw, Sampler, State, checked, traits_of
from mmreplay.samplers.holding import all_or_nothing

if TYPE_CHECKING:
    from mmreplay.loader.dataset import ReplayDataset


def as_tensors(state: Any) -> Any:
    """Return a state with a tensor, in memory of its own, in place of each array."""
    if isinstance(state, dict):
        return {name: as_tensors(value) for name, value in state.items()}
    if isinstance(state, list):
        return [as_tensors(value) for value in state]
    return torch.from_numpy(state.copy()) if isinstance(state, np.ndarray) else state


def as_arrays(state: Any) -> Any:
    """Return a state with an array in place of each tensor, on whichever device."""
    if isinstance(state, dict):
        return {name: as_arrays(value) for name, value in state.items()}
    if isinstance(state, list):
        return [as_arrays(value) for value in state]
    return state.cpu().numpy() if isinstance(state, torch.Tensor) else state


MAX_AHEAD = 1024
"""States that are remembered: a DataLoader may draw so many batches ahead."""


class Draws:
    """Draws of one sampler, made in the main process, one a batch.

    Each draw is made when the DataLoader asks for it, a few batches ahead, from the
    steps in the buffer at that time: it follows a writer. Iterating again continues
    with the sampler as it is. Where the sampler has epochs, as `ShuffledSampler` does,
    each iteration ends with the epoch, unless num_batches is given.
    """

    def __init__(
        self, dataset: ReplayDataset, sampler: Sampler, batch_size: int, num_batches: int | None
    ) -> None:
        """Make the draws of `ReplayDataset.draws`."""
        check_counts(batch_size, num_batches)
        self._dataset = dataset
        self._sampler = checked(sampler)
        dataset.buffer.view.check_sampler(sampler)
        self._batch_size = batch_size
        self._num_batches = num_batches
        self._states: deque[tuple[int, State]] = deque(maxlen=MAX_AHEAD)

    def __repr__(self) -> str:
        """Show the dataset, the sampler and the sizes."""
        numbers = f"batch_size={self._batch_size}"
        if self._num_batches is not None:
            numbers += f", num_batches={self._num_batches}"
        return f"<Draws of {self._dataset!r} by {self._sampler!r}, {numbers}>"

    def __iter__(self) -> Iterator[Any]:  # for types of batch_sampler=
        """Draw num_batches times, or until an epoch ends, or without end."""
        # Now, and not with the first draw: `state_after(0)` is asked for before it.
        self._states.clear()
        self._states.append((0, self._sampler.state_dict()))
        return self._draws()

    def _draws(self) -> Iterator[Draw]:
        sampler, done = self._sampler, 0
        epochs = traits_of(sampler).ends and self._num_batches is None
        epoch = sampler.epoch if epochs else None
        while self._num_batches is None or done < self._num_batches:
            view = self._dataset.buffer.view
            # One lock for the look and the draw: another thread may draw, too.
            with view.lock:
                if epochs and (sampler.epoch != epoch or not sampler.more(view, self._batch_size)):
                    return
                draw = self.another()
            done += 1
            self._states.append((done, sampler.state_dict()))
            yield draw

    def another(self) -> Draw:
        """Draw once more, outside the iteration; what it takes is stored."""
        view, sampler = self._dataset.buffer.view, self._sampler
        with view.lock:
            draw = all_or_nothing([sampler], sampler.draw, view, self._batch_size)
            return replace(draw, buffer=view.home.uuid)

    def state_after(self, num_batches: int) -> State:
        """Return the sampler's state after so many batches of this iteration.

        A DataLoader with workers draws ahead of the batches that it returns, and the
        sampler's own state is ahead with it. To resume after the batches seen, pass
        this state to `load_state_dict`. It has no priorities.

        Args:
            num_batches: Batches taken from the DataLoader in this iteration, at least
                0.

        Raises:
            SchemaError: So many were not drawn yet, or more than 1024 since.
        """
        for done, state in self._states:
            if done == num_batches:
                return as_tensors(state)  # type: ignore[no-any-return]  # a State too
        known = [done for done, _ in self._states]
        raise SchemaError(
            "num_batches must count batches of this iteration, whose states are from "
            f"{known[:1]} to {known[-1:]}, got {num_batches}. Ask while iterating."
        )

    def load_state_dict(self, state: State) -> None:
        """Have the sampler draw from a state on, in the next iteration.

        That iteration ends with the epoch, or after num_batches of its own.

        Args:
            state: From `state_after`, or the sampler's ``state_dict``.

        Raises:
            FormatError: It is another sampler's, or not a state at all.
        """
        with self._dataset.buffer.view.lock:
            self._sampler.load_state_dict(as_arrays(state))
        self._states.clear()

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Set the priorities of a batch's steps, or windows.

        Later draws use them; a DataLoader draws a few batches ahead.

        Args:
            batch: From the DataLoader, or the dataset.
            values: As in `ReplayBuffer.update_priorities`.

        Returns:
            Number of values dropped, because their steps have been overwritten since.

        Raises:
            SchemaError: The sampler has no priorities, or values do not fit.
            StaleError: A position was never written.
        """
        sampler = self._sampler
        if not traits_of(sampler).priorities:
            raise SchemaError(
                f"update_priorities: these are draws of a {type(sampler).__name__}, "
                "which has no priorities. Create them by "
                "dataset.draws(mmreplay.PrioritizedSampler(...), batch_size)."
            )
        while True:
            reading = self._dataset.buffer.view
            try:
                return reading.update_priorities(sampler, batch, values)
            except ReplacedError:
                # Another thread resized the buffer.
                continue

    def __len__(self) -> int:
        """Batches an iteration; of epochs, those of a whole one.

        Raises:
            TypeError: Iterations have no end.
        """
        if self._num_batches is None:
            if traits_of(self._sampler).ends:
                view = self._dataset.buffer.view
                return self._sampler.num_batches(view, self._batch_size)
            raise TypeError(
                "draws without num_batches have no length. Pass num_batches to dataset.draws."
            )
        return self._num_batches


def check_counts(batch_size: object, num_batches: object) -> None:
    """Refuse illegal numbers of steps and batches.

    Args:
        batch_size: An integer of at least 1.
        num_batches: An integer of at least 1, or None for no end.

    Raises:
        SchemaError: One is not legal.
    """
    integer("batch_size", batch_size, 1, "Pass a number of steps.")
    if num_batches is not None:
        integer("num_batches", num_batches, 1, "Pass a number of batches.")
