"""Priorities of whole sequences, in a field of the ring that may be written again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.adapters.pytorchrl_data import ENDED, PRIORITY, TOLD_ZERO, Columns
from mmreplay.adapters.pytorchrl_sequences import Ids, SequenceStorage
from mmreplay.errors import EmptyError, SchemaError
from mmreplay.samplers.checks import MOST
from mmreplay.samplers.laws import MAX_ALPHA
from mmreplay.samplers.prioritized import PrioritizedSampler

LIMITS = {
    "alpha": (0.0, MAX_ALPHA),
    "beta": (0.0, 1.0),
    "epsilon": (0.0, MOST),
    "default_error": (1e-30, MOST),
}
"""The least and the greatest value of what priorities are made with."""
HIGHEST = 0.9
"""Of a sequence's error, the share of its highest step's; the rest is their mean's."""


@dataclass
class Powers:
    """Alpha and beta as they are now.

    A sampler looks at these and not at the storage, which would then not go as long as
    its ring is open.
    """

    alpha: float
    beta: float

    def alpha_at(self, step: int) -> float:
        """Alpha, whatever the step."""
        return self.alpha

    def beta_at(self, step: int) -> float:
        """Beta, whatever the step."""
        return self.beta


class SequencePriorities(SequenceStorage):
    """Draws sequences of a recurrent actor by their errors.

    A sequence has one error, kept at its first row with epsilon added; one that none
    was told of yet has the default error, or the highest there is.

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

    def _kept(self, first: int, stop: int) -> Columns:
        if not self.recurrent_actor:
            return {}
        assert self._ring is not None
        envs, rows = np.arange(self._ring.num_envs), np.arange(first, stop)[:, None]
        return {PRIORITY: self._ring.get_field(PRIORITY, envs, rows)}

    def _chosen(self, starts: Ids, count: int) -> tuple[Ids, Ids, dict[str, Any]]:
        assert self._ring is not None
        if self.alpha == 0:
            env_ids, chosen, _ = super()._chosen(starts, count)
            weights: Any = 1.0
        else:
            envs = np.arange(self._ring.num_envs)[:, None]
            errors = self._ring.get_field(PRIORITY, envs, starts).astype(np.float64)
            errors[errors == 0] = max(float(self.error), float(errors.max()))
            errors[errors == TOLD_ZERO] = 0
            shares = errors.reshape(-1) ** self.alpha
            if not shares.any():
                raise EmptyError(
                    f"cannot draw {count} sequences: got an error of 0 of all "
                    f"{len(shares)}, expected one above it; give an epsilon, or "
                    "insert transitions"
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
        places = np.stack([env_ids, chosen], axis=1)
        return env_ids, chosen, {"per_weights": weights, "idxs": places}

    def _learned(self, places: Ids, errors: NDArray[np.floating[Any]]) -> None:
        """Give sequences ``[S, 2]`` the errors of their rows, or of the last ones.

        Raises:
            SchemaError: They are of another number, negative, or not finite.
        """
        assert self._ring is not None
        lengths = (self.sequence_length, self.non_overlap_length)
        counts = [len(places) * length for length in lengths]
        with np.errstate(over="ignore"):
            narrow = errors.astype(np.float32)
        if len(narrow) not in counts or not ((narrow >= 0) & (narrow < np.inf)).all():
            ends = f"from {narrow.min():g} to {narrow.max():g}, " if len(narrow) else ""
            raise SchemaError(
                f"errors: got {len(narrow)} for {len(places)} sequences, "
                f"{ends}expected {lengths[0]} or {lengths[1]} for each, finite and of "
                "at least 0; give absolute errors"
            )
        told = errors.reshape(len(places), -1)
        mixed = HIGHEST * told.max(1) + (1 - HIGHEST) * told.mean(1)
        # What was overwritten meanwhile is let go.
        there = places[:, 1] >= self._ring.span.first[places[:, 0]]
        env_ids, positions = places[there].T
        kept = mixed[there].astype(np.float32)
        kept[kept == 0] = TOLD_ZERO
        self._ring.set(PRIORITY, env_ids, positions, kept)


def priorities_of(
    sampler: PrioritizedSampler, first: int, stop: int
) -> list[NDArray[np.float32]]:
    """Priorities of positions ``[first, stop)`` as of the last look, by environment."""
    known = sampler.state_dict(priorities=True)
    begins = np.cumsum(known["seen"] - known["first"]) - known["seen"]
    return [known["priorities"][begin + first : begin + stop] for begin in begins]
