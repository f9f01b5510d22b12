"""What a sampler is given and what it returns.

Checks of arguments that several samplers share.

Samplers whose draws come to an end, and begin again.

What samplers draw, single steps, windows or whole episodes, and which go together.

A sampler of windows says it as ``sampler.form``, so that parts that never fit one
batch are refused when they are put together, and not at some draw.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes.starts import BufferIdentity as BufferIdentity
from mmreplay.episodes.starts import StartView
from mmreplay.errors import SchemaError, shown
from mmreplay.moved import renamed

State = dict[str, Any]
"""JSON values and arrays."""

View = StartView
"""A buffer as a sampler sees it."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The steps of each window of a draw, T of them.

    Attributes:
        positions: int64 ``[B, T]``, a drawable step each, none before the one to its
            left; where mask is false, one that stands in for a step that is not there.
        mask: bool ``[B, T]``, true where the step belongs to the window.
        is_first: bool ``[B, T]``, true where an episode begins, false where mask is;
            None where nobody asked. Batches hold it as a field.
        first_only: Paths of the fields of which only the first step of each window is
            wanted, ``[B, *shape]``.
    """

    positions: NDArray[np.int64]
    mask: NDArray[np.bool_]
    is_first: NDArray[np.bool_] | None = None
    first_only: tuple[str, ...] = ()

    def taken(self, places: NDArray[np.int64]) -> Windows:
        """Return some of these windows, int64 ``[N]`` in ``[0, B)``."""
        firsts = self.is_first
        return Windows(
            self.positions[places],
            self.mask[places],
            None if firsts is None else firsts[places],
            self.first_only,
        )

    @staticmethod
    def joined(windows: Sequence[Windows]) -> Windows:
        """Put windows one after the other.

        Args:
            windows: At least one, all equally long. ``is_first`` is kept where all
                have it, and `first_only` is that of the first.
        """
        firsts = [w.is_first for w in windows if w.is_first is not None]
        return Windows(
            np.concatenate([w.positions for w in windows]),
            np.concatenate([w.mask for w in windows]),
            np.concatenate(firsts) if len(firsts) == len(windows) else None,
            windows[0].first_only,
        )


@dataclass(slots=True)  # frozen, each costs half a microsecond more
class Draw:
    """Steps, or windows of steps, drawn from a buffer.

    Attributes:
        env_ids: int64 ``[B]``, in ``[0, num_envs)``.
        positions: int64 ``[B]``, within the span that the sampler saw; of windows the
            first step to learn from, which burn-in may precede.
        probabilities: float64 ``[B]``, of each step under the sampler's law.
        weights: float32 ``[B]``, importance weights.
        key: In ``[0, 2**64)``, of this draw alone: what transforms draw by, so that
            a draw gathered in another process gives the same batch.
        windows: None where each draw is one step.
        offsets: int64 ``[N + 1]`` where the steps are those of N episodes one after
            another: where each begins, and B; else None.
        buffer: uuid of the buffer it is of, where a dataset's draws made it; or b"".

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> draw = mr.UniformSampler(seed=0).draw(buffer.view, 32)
        >>> draw.positions.shape
        (32,)
        >>> buffer.gather(draw)["reward"].shape
        (32,)
    """

    env_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    weights: NDArray[np.float32]
    key: int = 0
    windows: Windows | None = None
    offsets: NDArray[np.int64] | None = None
    buffer: bytes = b""

    def __len__(self) -> int:
        """Steps, or windows, drawn."""
        return len(self.positions)

    def taken(self, places: NDArray[np.int64]) -> Draw:
        """Return some steps, or windows, of this draw.

        Args:
            places: int64 ``[N]``, in ``[0, B)``.
        """
        windows = self.windows
        return Draw(
            self.env_ids[places],
            self.positions[places],
            self.probabilities[places],
            self.weights[places],
            self.key,
            None if windows is None else windows.taken(places),
            buffer=self.buffer,
        )

    def around(self, windows: Windows) -> Draw:
        """Return this draw with windows around its steps.

        Args:
            windows: Of T rows each, ``[B, T]``.
        """
        return Draw(
            self.env_ids, self.positions, self.probabilities, self.weights, self.key,
            windows, buffer=self.buffer,
        )  # fmt: skip


class Sampler(Protocol):
    """Chooses steps.

    A draw is a function of (seed, step) and of the view: the same seed over the
    same buffer gives the same draws, and `state_dict` brings them back.
    """

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch.

        Args:
            view: The buffer now.
            batch_size: Steps to draw, at least 1.

        Raises:
            EmptyError: There is no legal start.
        """

    def state_dict(self) -> State:
        """Everything needed to go on exactly here."""

    def load_state_dict(self, state: State) -> None:
        """Go on from a state.

        Raises:
            FormatError: It is another sampler's, or not a state at all.
        """


@runtime_checkable
class PrioritySampler(Sampler, Protocol):
    """A sampler that draws by priorities, or wraps one that does."""

    def update_priorities(
        self,
        view: View,
        env_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> int:
        """Set the priorities of steps, or windows, that were drawn.

        Args:
            view: The buffer now.
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, as drawn.
            values: Numbers ``[B]``, or ``[B, T]`` of the steps of windows.
            mask: bool ``[B, T]``, which of those are steps; None where all are.

        Returns:
            How many were dropped, because they have been overwritten since.

        Raises:
            SchemaError: A value is negative or NaN, or a wrapped sampler keeps no
                priorities.
            StaleError: A position was never written.
        """


def call_repr(thing: object, **arguments: object) -> str:
    """Text of the call that makes a sampler again: its `repr`.

    Args:
        thing: The sampler.
        arguments: By name; those that are the constructor's default are left out
            where they are given by keyword alone, or are None.
    """
    parameters = inspect.signature(type(thing)).parameters
    told = []
    for name, value in arguments.items():
        parameter = parameters[name]
        plain = parameter.kind is parameter.KEYWORD_ONLY or value is None
        if not (plain and value == parameter.default):
            told.append(f"{name}={value!r}")
    return f"{type(thing).__name__}({', '.join(told)})"


def checked(sampler: object) -> Sampler:
    """Return what is a sampler.

    Raises:
        SchemaError: It is none.
    """
    needed = ("draw", "state_dict", "load_state_dict")
    if isinstance(sampler, type) or not all(
        callable(getattr(sampler, name, None)) for name in needed
    ):
        raise SchemaError(
            f"sampler: got {shown(sampler)}, expected an object with draw, state_dict "
            "and load_state_dict; make one, such as mmreplay.UniformSampler(seed=0)"
        )
    return cast(Sampler, sampler)


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


PADDED = "padded episodes"
RAGGED = "ragged episodes"


def form_of(sampler: object) -> str | None:
    """What a sampler says that it draws; None where it says nothing."""
    form = getattr(sampler, "form", None)
    return form if isinstance(form, str) else None


def single(sampler: object, whose: str) -> Sampler:
    """Return a sampler that is to draw single steps.

    Args:
        sampler: Any object.
        whose: What it is a part of, for the message.

    Raises:
        SchemaError: It is no sampler, or draws windows or episodes.
    """
    own = checked(sampler)
    form = form_of(own)
    if form is not None:
        raise SchemaError(
            f"sampler: got the {type(own).__name__}, of {form}, inside of a {whose}, "
            "expected one that draws single steps; give its own sampler to the outer "
            "one, or draw with it alone"
        )
    return own


def alike(samplers: Sequence[object]) -> list[Sampler]:
    """Return samplers whose draws can be put into one batch, as far as they say.

    Raises:
        SchemaError: One is no sampler, or they cannot.
    """
    own = [checked(sampler) for sampler in samplers]
    forms = [form_of(sampler) for sampler in own]
    if RAGGED in forms and len(own) > 1:
        raise SchemaError(
            f"samplers: got {forms} to put into one batch, expected none ragged, whose "
            "steps are of a number that shares know nothing of; make the "
            "EpisodeSamplers with layout='padded'"
        )
    known = {form for form in forms if form is not None}
    if len(known) > 1:
        raise SchemaError(
            f"samplers: got {forms} to put into one batch, expected them all alike; "
            "wrap the mixture in one SequenceSampler instead"
        )
    return own


def common(samplers: Sequence[Sampler]) -> str | None:
    """The form of all of several samplers; None where one says nothing or another."""
    forms = {form_of(sampler) for sampler in samplers}
    return forms.pop() if len(forms) == 1 else None


def padded(windows: Sequence[Windows]) -> list[Windows]:
    """Windows as long as the longest, their last column standing in for the rest."""
    longest = max(each.positions.shape[1] for each in windows)
    return [_longer(each, longest) for each in windows]


def _longer(windows: Windows, length: int) -> Windows:
    count, width = windows.positions.shape
    firsts, none = windows.is_first, np.zeros((count, length - width), bool)
    return Windows(
        np.pad(windows.positions, ((0, 0), (0, length - width)), "edge"),
        np.hstack([windows.mask, none]),
        None if firsts is None else np.hstack([firsts, none]),
        windows.first_only,
    )


__getattr__ = renamed(__name__, {"Home": "BufferIdentity"})
