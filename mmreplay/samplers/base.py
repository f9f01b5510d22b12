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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import EpisodeIndex
from mmreplay.errors import SchemaError, shown
from mmreplay.moved import renamed
from mmreplay.ring import Ring, Span

State = dict[str, Any]
"""JSON values and arrays."""


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


@dataclass(frozen=True, slots=True)
class BufferIdentity:
    """What a view is of, for samplers that keep something beside it.

    Attributes:
        ring: Where rows lie; its slots, layout and num_envs.
        folder: The buffer's, or None for one in RAM.
        uuid: 16 bytes, the buffer's.
        generation: The data folder's number; another one has other slots.
        cut_epoch: Tells the last opening that cut rows from others; 0 if none did.
        cuts: int64 ``[E]``, rows at and above were published after it; None for 0.
    """

    ring: Ring
    folder: Path | None
    uuid: bytes
    generation: int
    cut_epoch: int = 0
    cuts: NDArray[np.int64] | None = field(default=None, compare=False)

    def known(
        self, seen: NDArray[np.int64], generation: int, cut_epoch: int
    ) -> NDArray[np.int64]:
        """What is still known of rows below positions that were seen.

        Args:
            seen: int64 ``[E]``.
            generation: Of the buffer, when they were seen.
            cut_epoch: Likewise.
        """
        if self.cuts is None or (generation, cut_epoch) >= self._age:
            return seen
        return np.minimum(seen, self.cuts)

    @property
    def _age(self) -> tuple[int, int]:
        return self.generation, self.cut_epoch


class View(Protocol):
    """A buffer as a sampler sees it: spans and boundaries of one moment, no data.

    Legal starts are what the buffer's transforms can be folded from: all that they
    read around a start is alive and, where they stop at ends, of its episode.
    """

    @property
    def home(self) -> BufferIdentity:
        """What this is a view of; never changes."""

    @property
    def index(self) -> EpisodeIndex:
        """The episodes alive."""

    def flags(
        self, env_ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        """Flags of alive rows, uint8 ``[B]``; see `episodes`."""

    @property
    def span(self) -> Span:
        """What is alive."""

    @property
    def starts(self) -> Span:
        """Where legal starts lie: the span less newest rows that cannot be drawn."""

    @property
    def num_illegal(self) -> int:
        """Rows within `starts` that are no legal start."""

    def legal(
        self, env_ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Bool ``[B]``: the positions, within `starts`, that are legal starts."""

    def start_at(
        self, ranks: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Legal starts by rank: environment by environment, oldest first.

        Args:
            ranks: int64 ``[B]``, in ``[0, number of legal starts)``.

        Returns:
            env_ids and positions, int64 ``[B]`` each.
        """


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


MOST = float(np.finfo(np.float32).max)
"""The greatest priority that can be stored."""


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


def storable(values: NDArray[Any]) -> NDArray[np.float32]:
    """Priorities as they are stored, ``[B]``.

    Raises:
        SchemaError: One is negative, NaN, or infinite as float32.
    """
    if len(values) == 0:
        return np.zeros(0, np.float32)
    if values.dtype == np.float16:
        # MOST would be cast to it, and no infinity is above that one.
        values = values.astype(np.float32)
    # NaN is in no order: it fails both.
    low, high = np.minimum.reduce(values), np.maximum.reduce(values)
    if not (low >= 0 and high <= MOST):
        which = int(np.argmin((values >= 0) & (values <= MOST)))
        raise SchemaError(
            f"priorities: got {values[which]} at {which}, expected finite float32 "
            "numbers of at least 0; take the absolute value of TD errors, and find "
            "out where NaN comes from"
        )
    return values.astype(np.float32)


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
