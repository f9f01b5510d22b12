"""Samplers whose draws come to an end, and begin again."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from mmreplay.samplers.base import Sampler, View


@runtime_checkable
class EpochSampler(Sampler, Protocol):
    """A sampler that goes through the buffer epoch by epoch, or wraps one.

    Draws never end of themselves: a draw after the last batch of an epoch begins
    the next one.
    """

    @property
    def epoch(self) -> int | None:
        """Epochs gone through; None where a wrapped sampler knows no epochs."""

    def more(self, view: View, batch_size: int) -> bool:
        """Whether this epoch has another batch; where not, the epoch is over.

        Raises:
            EmptyError: There is no legal start.
        """

    def num_batches(self, view: View, batch_size: int) -> int:
        """Batches of the whole of this epoch.

        Raises:
            EmptyError: There is no legal start.
        """


def epochs_of(sampler: Sampler) -> EpochSampler | None:
    """Return the sampler where it goes by epochs, and None where it does not."""
    if isinstance(sampler, EpochSampler) and sampler.epoch is not None:
        return sampler
    return None


def draws_once(sampler: Sampler) -> bool:
    """Whether some of what is drawn is drawn once an epoch: by itself or by a part.

    A sampler of parts says so itself, as ``sampler.draws_once``.
    """
    own = getattr(sampler, "draws_once", None)
    return epochs_of(sampler) is not None if own is None else bool(own)
