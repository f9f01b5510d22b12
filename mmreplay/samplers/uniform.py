"""Every legal start with the same probability."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import EmptyError, FormatError
from mmreplay.ring import Span
from mmreplay.samplers.base import Draw, State, View
from mmreplay.samplers.random import StepGenerator

MAX_REJECTIONS = 20


class UniformSampler:
    """Draws with replacement, exactly uniform over all legal starts.

    Starts are drawn over the whole span and illegal ones drawn again, which is
    exact and never enumerates the buffer. Where hardly any row is legal, the rest is
    drawn by rank among the legal ones. Costs O(batch).
    """

    def __init__(self, seed: int | None = None) -> None:
        """Make a sampler.

        Args:
            seed: Seed of its own generator; None takes one from the system.
        """
        self._random = StepGenerator(seed)
        self._step = 0
        self._starts = _Starts(Span(np.zeros(1, np.int64), np.zeros(1, np.int64)))

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch; see `Sampler.draw`."""
        starts = self._starts_of(view)
        num_legal = starts.total - view.num_illegal
        if num_legal < 1:
            raise EmptyError(
                f"cannot draw {batch_size} steps: got {starts.total} published rows of "
                "which none is a legal start yet, expected at least one; a step can be "
                "drawn when its next observation is known: add steps first"
            )
        rng = self._random.at(self._step)
        env_ids, positions = starts.pick(batch_size, rng)
        if num_legal < starts.total:
            self._replace_illegal(view, env_ids, positions, num_legal, rng)
        key = self._random.key(self._step)
        self._step += 1
        probabilities = np.full(batch_size, 1.0 / num_legal)
        weights = np.ones(batch_size, np.float32)
        return Draw(env_ids, positions, probabilities, weights, key)

    def _starts_of(self, view: View) -> _Starts:
        span = view.starts
        if span is not self._starts.span:
            self._starts = _Starts(span)
        return self._starts

    def _replace_illegal(
        self,
        view: View,
        env_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        num_legal: int,
        rng: np.random.Generator,
    ) -> None:
        """Draw again, in place, what is no legal start, until all are."""
        bad = np.flatnonzero(~view.legal(env_ids, positions))
        for _ in range(MAX_REJECTIONS):
            if len(bad) == 0:
                return
            envs, again = self._starts.pick(len(bad), rng)
            env_ids[bad], positions[bad] = envs, again
            bad = bad[~view.legal(envs, again)]
        ranks = rng.integers(num_legal, size=len(bad))
        env_ids[bad], positions[bad] = view.start_at(ranks)

    def state_dict(self) -> State:
        """Seed and step."""
        return {"kind": "UniformSampler", "seed": self._random.seed, "step": self._step}

    def load_state_dict(self, state: State) -> None:
        """Go on from a state; see `Sampler.load_state_dict`."""
        seed, step = _checked(state)
        self._random = StepGenerator(seed)
        self._step = step


def _checked(state: State) -> tuple[int, int]:
    """Seed and step of a state, or FormatError: a state comes from a file."""
    if not isinstance(state, Mapping) or state.get("kind") != "UniformSampler":
        kind = state.get("kind") if isinstance(state, Mapping) else type(state).__name__
        raise FormatError(
            f"sampler state: got kind {kind!r}, expected 'UniformSampler'; load it "
            "into the sampler that it was saved from"
        )
    for name in ("seed", "step"):
        value = state.get(name)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise FormatError(
                f"sampler state: got {name} {value!r}, expected an integer in "
                "[0, 2**63); pass what state_dict returned, unchanged"
            )
    return state["seed"], state["step"]


class _Starts:
    """A span laid end to end, so that one number names a row of it."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self._ends = np.cumsum(span.lengths)
        self._first = int(span.first[0])
        self.total = int(self._ends[-1])

    def pick(
        self, count: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw rows uniformly, legal or not."""
        # 53 bits of a double: the bias over 2**40 rows is below 2**-12 of a row.
        ranks = (rng.random(count) * self.total).astype(np.int64)
        if len(self._ends) == 1:
            ranks += self._first
            return np.zeros(count, np.int64), ranks
        env_ids = np.searchsorted(self._ends, ranks, side="right")
        return env_ids, self.span.stop[env_ids] - (self._ends[env_ids] - ranks)
