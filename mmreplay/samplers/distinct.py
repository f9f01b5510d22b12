"""Every set of different legal starts with the same probability."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmreplay.episodes.starts import nothing_to_draw
from mmreplay.samplers import states
from mmreplay.samplers.base import Draw, Sampler, State, View, call_repr
from mmreplay.samplers.random import StepGenerator


class DistinctSampler(Sampler):
    """Draws without replacement within a batch; batches know nothing of each other.

    Where fewer steps than asked for can be drawn, all of them are, each once. For
    each step once an epoch, see `ShuffledSampler`. Costs O(batch log rows), and
    O(rows) where a batch takes more than a fiftieth of them.

    Example:
        >>> sampler = mr.DistinctSampler(seed=0)
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
        >>> batch = buffer.sample(32)
        >>> len(set(zip(batch.env_ids, batch.positions)))
        32
    """

    distinct = True
    _random: StepGenerator

    def __init__(self, seed: int | None = None) -> None:
        """Make a sampler.

        Args:
            seed: Seed of its own generator; None takes one from the system.
        """
        self._random = StepGenerator(seed)
        self._step = 0

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(self)

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        return {"seed": self._random.given_seed}

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch, or what there is; see `Sampler.draw`.

        Raises:
            EmptyError: There is no legal start.
        """
        num_legal = int(view.starts.lengths.sum()) - view.num_illegal
        if num_legal < 1:
            raise nothing_to_draw(view, batch_size)
        count = min(batch_size, num_legal)
        ranks = self._random.at(self._step).choice(num_legal, count, replace=False)
        env_ids, positions = view.start_at(ranks)
        key = self._random.key(self._step)
        self._step += 1
        probabilities = np.full(count, 1 / num_legal)
        return Draw(env_ids, positions, probabilities, np.ones(count, np.float32), key)

    def state_dict(self) -> State:
        """Seed and step."""
        return {"kind": "DistinctSampler", "seed": self._random.seed, "step": self._step}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Sampler.load_state_dict`."""
        states.check_kind(state, "DistinctSampler")
        seed, step = (states.stored_integer(state, "seed"), states.stored_integer(state, "step"))
        self._random = StepGenerator(seed)
        self._step = step
