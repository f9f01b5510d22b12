"""The same mass for every environment, however many steps it has; alf's way."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes.starts import nothing_to_draw, rank_edges
from mmreplay.samplers.base import ALONE, SHARES, Draw, Sampler, State, View, call_repr
from mmreplay.samplers.joint import Mass
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
        return call_repr(self)

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        return {"seed": self._random.given_seed, "stratified": self._stratified}

    @property
    def divides(self) -> str:  # type: ignore[override]  # follows from an argument
        """Each environment is as likely as the others, of whichever buffer."""
        return SHARES if self._stratified else ALONE

    def mass(self, view: View, step: int) -> Mass:
        """Each environment with a legal start has the mass 1; see `Sampler.mass`."""
        counts = np.diff(rank_edges(view))
        some = int(np.count_nonzero(counts))
        lowest = 1.0 / int(counts.max()) if some else np.inf
        return Mass(float(some), int(counts.sum()), lowest, 0.0)

    def points(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """One point from each of as many segments; see `Sampler.points`.

        So environments get as many steps as each other, up to one.
        """
        count = numbers.shape[-1]
        points: NDArray[np.float64] = (numbers + np.arange(count)) / count
        return points

    def draw_at(self, view: View, shares: NDArray[np.float64]) -> Draw:
        """Draw the steps that shares fall on; see `Sampler.draw_at`."""
        edges = rank_edges(view)
        counts = np.diff(edges)
        some = np.flatnonzero(counts)
        if len(some) == 0:
            raise nothing_to_draw(view, len(shares))
        # The product of a number below 1 can round up to the count.
        which = np.minimum((shares * len(some)).astype(np.int64), len(some) - 1)
        env_ids = some[which]
        offsets = ((shares * len(some) - which) * counts[env_ids]).astype(np.int64)
        offsets = np.minimum(offsets, counts[env_ids] - 1)
        env_ids, positions = view.start_at(edges[env_ids] + offsets)
        probabilities = 1.0 / (len(some) * counts[env_ids])
        return Draw(env_ids, positions, probabilities, np.ones(len(shares), np.float32))

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
