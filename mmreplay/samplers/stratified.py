"""The same mass for every environment, however many steps it has; alf's way."""

from __future__ import annotations

import numpy as np

from mmreplay.episodes.starts import nothing_to_draw, rank_edges
from mmreplay.samplers.base import Draw, Sampler, State, View, call_repr
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.states import check_kind, stored_integer


class StratifiedSampler(Sampler):
    """Draws as many steps of every environment, spread over its legal starts.

    The scheme of alf's ReplayBuffer: a batch takes the environments in turn, and
    what is left over goes to as many, chosen without replacement. Stratified, the
    n draws of an environment come one from each n-th of its legal starts, oldest
    first; so they are often, but not always, different steps. Environments without a
    legal start are left out. With P a step's probability, ``1 / (environments *
    legal starts of its own)``.

    Example:
        >>> sampler = mr.StratifiedSampler(seed=0)
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
        >>> np.bincount(buffer.sample(32).env_ids)
        array([4, 4, 4, 4, 4, 4, 4, 4])
    """

    _random: StepGenerator

    def __init__(self, seed: int | None = None, *, stratified: bool = True) -> None:
        """Make a sampler.

        Args:
            seed: Seed of its own generator; None takes one from the system.
            stratified: False draws independently within each environment.
        """
        self._random = StepGenerator(seed)
        self._stratified = stratified
        self._step = 0

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(self, seed=self._random.given_seed, stratified=self._stratified)

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch; see `Sampler.draw`.

        Raises:
            EmptyError: There is no legal start.
        """
        starts, edges = view.starts, rank_edges(view)
        counts = np.diff(edges)
        some = np.flatnonzero(counts)
        if len(some) == 0:
            raise nothing_to_draw(view, batch_size)
        rng = self._random.at(self._step)
        each, more = divmod(batch_size, len(some))
        extra = rng.permutation(len(some))[:more]
        env_ids = some[np.concatenate([np.tile(np.arange(len(some)), each), extra])]
        parts = rng.random(batch_size)
        if self._stratified:
            quotas = np.full(len(counts), each)
            quotas[some[extra]] += 1
            turns = np.arange(batch_size) // len(some)
            parts = (turns + parts) / quotas[env_ids]
        # The product of a number below 1 can round up to the count.
        offsets = (parts * counts[env_ids]).astype(np.int64)
        offsets = np.minimum(offsets, counts[env_ids] - 1)
        if view.num_illegal:
            _, positions = view.start_at(edges[env_ids] + offsets)
        else:
            positions = starts.first[env_ids] + offsets
        key = self._random.key(self._step)
        self._step += 1
        probabilities = 1.0 / (len(some) * counts[env_ids])
        weights = np.ones(batch_size, np.float32)
        return Draw(env_ids, positions, probabilities, weights, key)

    def state_dict(self) -> State:
        """Seed and step."""
        return {"kind": "StratifiedSampler", "seed": self._random.seed, "step": self._step}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Sampler.load_state_dict`."""
        check_kind(state, "StratifiedSampler")
        seed, step = stored_integer(state, "seed"), stored_integer(state, "step")
        self._random, self._step = StepGenerator(seed), step
