"""What a sampler is given and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import EpisodeIndex
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
class Home:
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
    def home(self) -> Home:
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
