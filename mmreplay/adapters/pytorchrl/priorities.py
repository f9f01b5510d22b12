"""Priorities of whole sequences, in a field of the ring that may be written again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.adapters.pytorchrl.data import ENDED, KNOWN_ZERO, PRIORITY, Columns
from mmreplay.adapters.pytorchrl.sequences import Ids, SequenceStorage
from mmreplay.episodes.starts import newest, num_legal, rank_edges
from mmreplay.errors import EmptyError, SchemaError
from mmreplay.samplers.base import Draw, State, View
from mmreplay.samplers.combine import Wrapper, state_of
from mmreplay.samplers.prioritized import PrioritizedSampler
from mmreplay.samplers.priority_distribution import MAX_ALPHA
from mmreplay.samplers.priority_store import MAX_PRIORITY
from mmreplay.samplers.recent import newest_counts, window_size
from mmreplay.samplers.states import check_kind, parts
from mmreplay.samplers.sum_tree import to_masses
from mmreplay.samplers.uniform import UniformSampler

LIMITS = {
    "alpha": (0.0, MAX_ALPHA),
    "beta": (0.0, 1.0),
    "epsilon": (0.0, MAX_PRIORITY),
    "default_error": (1e-30, MAX_PRIORITY),
}
"""Minimum and maximum of the arguments of priorities."""
HIGHEST = 0.9
"""Share of the highest step in a sequence's error; the mean has the rest."""


@dataclass
class Exponents:
    """The current alpha and beta.

    Samplers refer to this object instead of the storage, which would otherwise stay
    alive as long as its ring is open.
    """

    alpha: float
    beta: float

    def alpha_at(self, step: int) -> float:
        """Return alpha for any step."""
        return self.alpha

    def beta_at(self, step: int) -> float:
        """Return beta for any step."""
        return self.beta


class EmphasizingSampler(Wrapper):
    """Draws from the newest steps of all environments together, in a given window.

    As pytorchrl does, it draws from all steps uniformly while there are fewer than
    `smallest`. Otherwise it draws from the window: uniformly while alpha is 0, or by
    priorities, whose weights are those within the window.

    Attributes:
        share: Of all steps, those that are in the window.
        smallest: Steps that the window has at least.
        window: Steps that the last draw was from.
        by_priority: Whether the last draw was by priorities.
        prioritized: Keeps the priorities.
    """

    def __init__(
        self, exponents: Exponents, prioritized: PrioritizedSampler, smallest: int, seed: int
    ) -> None:
        """Make a sampler.

        Args:
            exponents: Alpha decides whether priorities count.
            prioritized: Draws by priorities.
            smallest: See above.
            seed: Of uniform draws.
        """
        self.share, self.smallest = 1.0, smallest
        self.window, self.by_priority = 0, False
        self.prioritized = prioritized
        super().__init__([prioritized])
        self._powers = exponents
        self._uniform = UniformSampler(seed)
        self._counts: Ids | None = None

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch; see `Sampler.draw`.

        Raises:
            EmptyError: There is no legal start, or all have an error of 0.
        """
        total = num_legal(view)
        if total < self.smallest:
            self.window, self.by_priority = total, False
            return self._uniform.draw(view, batch_size)
        self.window = window_size(total, self.share, self.smallest)
        counts = np.diff(rank_edges(view))
        self._counts = newest_counts(counts, self.window)
        # The same number of each may be some too many: the last environments' are
        # the newest, as pytorchrl lays them out.
        surplus = int(self._counts.sum()) - self.window
        most = np.flatnonzero(self._counts == self._counts.max())
        self._counts[most[:surplus]] -= 1
        self.by_priority = self._powers.alpha != 0
        sampler = self.prioritized if self.by_priority else self._uniform
        return sampler.draw(self.shown(view), batch_size)

    def shown(self, view: View) -> View:
        """The window of the last draw, so that updates open no other rows."""
        if self._counts is None:
            return view
        return newest(view, self._counts, rank_edges(view))

    def state_dict(self, priorities: bool = False) -> State:
        """The states of both samplers."""
        mine, other = self._uniform.state_dict(), state_of(self.prioritized, priorities)
        return {"kind": "EmphasizingSampler", "parts": [mine, other]}

    def load_state_dict(self, state: State) -> None:
        """Go on from a state; see `Sampler.load_state_dict`."""
        check_kind(state, "EmphasizingSampler")
        mine, other = parts(state, "parts", 2)
        self._uniform.load_state_dict(mine)
        self.prioritized.load_state_dict(other)


class SequencePriorities(SequenceStorage):
    """Draws sequences of a recurrent actor by their errors.

    A sequence has one error, stored with epsilon at its first row. A sequence without
    an error gets the default error, or the highest one if that is higher.

    Attributes:
        error: The default.
    """

    alpha: float
    beta: float
    error: float

    def _columns(self, sample: Mapping[str, Any], lead: int = 0) -> Columns:
        found = super()._columns(sample, lead)
        if self.recurrent_actor and ENDED in found:
            found[PRIORITY] = np.zeros(found[ENDED].shape, np.float32)
        return found

    def _retained_columns(self, first: int, stop: int) -> Columns:
        if not self.recurrent_actor:
            return {}
        envs, rows = np.arange(self._made.num_envs), np.arange(first, stop)[:, None]
        return {PRIORITY: self._made.get_field(PRIORITY, envs, rows)}

    def _chosen(self, starts: Ids, count: int) -> tuple[Ids, Ids, dict[str, Any]]:
        if self.alpha == 0:
            return self._evenly(starts, count)
        envs = np.arange(self._made.num_envs)[:, None]
        shares = to_masses(self._errors(envs, starts).reshape(-1), self.alpha)
        if not shares.any():
            raise EmptyError(
                f"cannot draw {count} sequences: the errors of all {len(shares)} are "
                "0. Pass an epsilon, or insert transitions."
            )
        shares /= shares.sum()
        ranks = self._random.choice(len(shares), size=count, p=shares)
        env_ids, which = np.divmod(ranks, len(starts))
        chosen = starts[which]
        # The greatest weight is that of the rarest that can be drawn.
        found = (len(shares) * shares[ranks]) ** -self.beta
        found /= (len(shares) * shares[shares > 0].min()) ** -self.beta
        found = np.repeat(found, self.sequence_length)
        weights = torch.from_numpy(found.astype(np.float32)[:, None])
        weights = weights.to(self.device)
        sequences = np.stack([env_ids, chosen], axis=1)
        return env_ids, chosen, {"per_weights": weights, "idxs": sequences}

    def _errors(self, envs: Ids, starts: Ids) -> NDArray[np.float64]:
        """Errors of sequences, float64 ``[E, S]``."""
        errors = self._made.get_field(PRIORITY, envs, starts).astype(np.float64)
        errors[errors == 0] = max(float(self.error), float(errors.max()))
        errors[errors == KNOWN_ZERO] = 0
        return errors

    def _sequence_priorities(self, first: int, stop: int) -> NDArray[np.float64]:
        """Errors of the sequences of rows, float64 ``[T, E]``.

        A row of no whole sequence has the default error.
        """
        assert self._grid is not None
        num_envs, rows = self._made.num_envs, np.arange(first, stop)
        found = np.full((len(rows), num_envs), float(self.error))
        starts = self._grid.starts(*self._alive())
        if len(starts):
            errors = self._errors(np.arange(num_envs)[:, None], starts)
            which = np.searchsorted(starts, rows, side="right") - 1
            whole = (which >= 0) & (rows < starts[which] + self.sequence_length)
            found[whole] = errors[:, which[whole]].T
        return found

    def _evenly(self, starts: Ids, count: int) -> tuple[Ids, Ids, dict[str, Any]]:
        """Sequences drawn uniformly, whatever their errors."""
        env_ids, chosen, _ = super()._chosen(starts, count)
        sequences = np.stack([env_ids, chosen], axis=1)
        return env_ids, chosen, {"per_weights": 1.0, "idxs": sequences}

    def _learned(self, sequences: Ids, errors: NDArray[np.floating[Any]]) -> None:
        """Set the errors of sequences ``[S, 2]`` from those of their rows.

        Raises:
            SchemaError: They are of another number, negative, or not finite.
        """
        lengths = (self.sequence_length, self.non_overlap_length)
        counts = [len(sequences) * length for length in lengths]
        with np.errstate(over="ignore"):
            narrow = errors.astype(np.float32)
        if len(narrow) not in counts or not ((narrow >= 0) & (narrow < np.inf)).all():
            ends = f" from {narrow.min():g} to {narrow.max():g}" if len(narrow) else ""
            raise SchemaError(
                f"errors must be {lengths[0]} or {lengths[1]} for each of "
                f"{len(sequences)} sequences, finite and at least 0, got "
                f"{len(narrow)}{ends}. Pass absolute errors."
            )
        by_sequence = errors.reshape(len(sequences), -1)
        mixed = HIGHEST * by_sequence.max(1) + (1 - HIGHEST) * by_sequence.mean(1)
        # Overwritten sequences are skipped.
        there = sequences[:, 1] >= self._made.span.first[sequences[:, 0]]
        env_ids, positions = sequences[there].T
        kept = mixed[there].astype(np.float32)
        kept[kept == 0] = KNOWN_ZERO
        self._made.write_field(PRIORITY, env_ids, positions, kept)


def priorities_of(sampler: PrioritizedSampler, first: int, stop: int) -> list[NDArray[np.float32]]:
    """Priorities of positions ``[first, stop)`` as of the last look, by environment."""
    known = sampler.state_dict(priorities=True)
    begins = np.cumsum(known["seen"] - known["first"]) - known["seen"]
    return [known["priorities"][begin + first : begin + stop] for begin in begins]
