"""A sampler that is shown a part of the buffer."""

from __future__ import annotations

from typing import Any, Protocol

from mmreplay.ring import Span
from mmreplay.samplers.base import Draw, Sampler, State, View
from mmreplay.samplers.checks import checked
from mmreplay.samplers.epochs import epochs_of
from mmreplay.samplers.joined import state_of
from mmreplay.samplers.states import check_kind, parts
from mmreplay.samplers.wrapping import Wrapping


class Restriction(Protocol):
    """Says which legal starts may be drawn."""

    def of(self, view: View) -> View:
        """Return the part of a view that is left; its legal starts are the view's."""

    def state_dict(self) -> State:
        """What the restriction is, as JSON values."""

    def check(self, state: State) -> None:
        """Refuse the state of another restriction.

        Raises:
            FormatError: It is another one's.
        """


class RestrictedSampler(Wrapping):
    """Draws with another sampler from the legal starts that a restriction leaves.

    Any sampler will do: epochs, priorities and sequences are those of the part. Put
    it inside of a `SequenceSampler` and windows begin in the part; outside of it and
    the sequences are drawn from the part.
    """

    def __init__(self, restriction: Restriction, sampler: Sampler) -> None:
        """Restrict a sampler; see `ignore_earliest` and `split`.

        Args:
            restriction: What may be drawn.
            sampler: Draws it.

        Raises:
            SchemaError: That is no sampler.
        """
        self._restriction = restriction
        self._parts = [checked(sampler)]
        self._last: tuple[View, Span, View] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the view, which belongs to this process's buffer."""
        return self.__dict__ | {"_last": None}

    def _shown(self, view: View) -> View:
        """Restrict a view, once for each of its moments."""
        starts = view.starts
        last = self._last
        if last is None or last[0] is not view or last[1] is not starts:
            last = self._last = (view, starts, self._restriction.of(view))
        return last[2]

    def __repr__(self) -> str:
        """Say what draws, and within what."""
        return f"<{self._parts[0]!r} within {self._restriction!r}>"

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch; see `Sampler.draw`.

        Raises:
            EmptyError: There is no legal start in the part.
        """
        return self._parts[0].draw(self._shown(view), batch_size)

    @property
    def epoch(self) -> int | None:
        """See `EpochSampler.epoch`."""
        epochs = epochs_of(self._parts[0])
        return None if epochs is None else epochs.epoch

    def more(self, view: View, batch_size: int) -> bool:
        """See `EpochSampler.more`; without epochs there always is more."""
        epochs = epochs_of(self._parts[0])
        return epochs is None or epochs.more(self._shown(view), batch_size)

    def num_batches(self, view: View, batch_size: int) -> int:
        """See `EpochSampler.num_batches`.

        Raises:
            TypeError: The sampler knows no epochs.
        """
        epochs = epochs_of(self._parts[0])
        if epochs is None:
            raise TypeError(
                f"num_batches: got {type(self._parts[0]).__name__}, which has no "
                "epochs, expected one that does; use a ShuffledSampler"
            )
        return epochs.num_batches(self._shown(view), batch_size)

    def state_dict(self, priorities: bool = False) -> State:
        """Return the restriction and the state of the sampler.

        Args:
            priorities: With those that the sampler keeps, as arrays.
        """
        return {
            "kind": "RestrictedSampler",
            "restriction": self._restriction.state_dict(),
            "parts": [state_of(self._parts[0], priorities)],
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a state; see `Sampler.load_state_dict`."""
        check_kind(state, "RestrictedSampler")
        self._restriction.check(state.get("restriction", {}))
        self._parts[0].load_state_dict(parts(state, "parts", 1)[0])
