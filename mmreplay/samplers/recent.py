"""Newer steps more often, and samplers without the oldest rows.

"Newest" is by position, per environment, so that it means the same before and after
the ring has wrapped.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import integer, number
from mmreplay.episodes.starts import (
    LaterStarts,
    legal_among,
    newest,
    nothing_to_draw,
    num_legal,
    rank_edges,
)
from mmreplay.samplers.base import Draw, Sampler, State, View, call_repr, single
from mmreplay.samplers.combine import (
    RestrictedSampler,
    Wrapper,
    draw_joined,
    refuse_leasing,
    state_of,
)
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.states import check_kind, fraction, parts, same, stored_integer
from mmreplay.samplers.stratified import StratifiedSampler
from mmreplay.samplers.uniform import UniformSampler

Ids = NDArray[np.int64]


class RecentSampler(Wrapper):
    """Draws a share of each batch from the newest steps, the rest with another sampler.

    The scheme of alf's ReplayBuffer: the first ``ceil(batch_size * ratio)`` are from
    the newest legal starts of each environment, as `StratifiedSampler` draws; the
    rest is drawn by the sampler given, which may draw newest steps too. As long as
    those are no less than their share of an average environment (``ratio * legal
    starts <= steps``) everything is drawn by the sampler given.

    The probability of a step is that of the sampler which drew it, not of both
    together. Steps drawn as newest have weight 1; the others the weights of the sampler
    given.

    Example:
        >>> sampler = mr.RecentSampler(steps=100, ratio=0.25, seed=0)
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
        >>> batch = buffer.sample(32)  # 8 of the newest 100 steps of each environment
    """

    _random: StepGenerator

    def __init__(
        self, steps: int, ratio: float, sampler: Sampler | None = None, *, seed: int | None = None
    ) -> None:
        """Make a sampler.

        Args:
            steps: Newest legal starts of each environment, at least 1.
            ratio: Share of them in a batch, in ``(0, 1]``.
            sampler: Draws the rest; `UniformSampler` with the same seed by default. A
                `UseCounter` with a lease goes around this sampler.
            seed: Seed of the newest steps' draws; None takes one from the system.

        Raises:
            SchemaError: An argument is not legal.
        """
        self._steps = integer("steps", steps, 1, "Give the newest steps to draw from.")
        self._ratio = number(
            "ratio",
            ratio,
            above=0,
            maximum=1,
            way_out="Give the share of newest steps, such as 0.5.",
        )
        self._random = StepGenerator(seed)
        self._step = 0
        self._newest = StratifiedSampler(self._random.seed)
        other: Sampler = UniformSampler(self._random.seed)
        if sampler is not None:
            other = single(sampler, "RecentSampler")
            refuse_leasing([other], "RecentSampler")
        super().__init__([other])

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(self)

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        return {
            "steps": self._steps,
            "ratio": self._ratio,
            "sampler": self.parts[0],
            "seed": self._random.given_seed,
        }

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch, newest steps first; see `Sampler.draw`.

        Raises:
            EmptyError: There is no legal start.
        """
        edges = rank_edges(view)
        counts = np.diff(edges)
        if edges[-1] == 0:
            raise nothing_to_draw(view, batch_size)
        recent = 0
        if counts.mean() * self._ratio > self._steps:
            # 0.1 * 10 is above 1 by rounding, and 2 are not asked for.
            recent = ceil(round(batch_size * self._ratio, 9))
        asked: list[tuple[Sampler, View, int]] = []
        if recent:
            narrowed = newest(view, np.full(len(counts), self._steps), edges)
            asked.append((self._newest, narrowed, recent))
        if recent < batch_size:
            asked.append((self.parts[0], view, batch_size - recent))
        draw, _ = draw_joined(asked, self._random.key(self._step))
        self._step += 1
        return draw

    def can_draw(self, view: View, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Which legal starts a sampler of it may draw; see `Sampler.can_draw`."""
        edges = rank_edges(view)
        counts = np.diff(edges)
        if counts.mean() * self._ratio <= self._steps:
            return super().can_draw(view, env_ids, positions)
        narrowed = newest(view, np.full(len(counts), self._steps), edges)
        drawn = legal_among(narrowed, env_ids, positions)
        if self._ratio < 1:
            drawn |= super().can_draw(view, env_ids, positions)
        return drawn

    def state_dict(self, priorities: bool = False) -> State:
        """Seed, step and the states of both samplers.

        Args:
            priorities: With those that the sampler of the rest keeps, as arrays.
        """
        return {
            "kind": "RecentSampler",
            "seed": self._random.seed,
            "step": self._step,
            "steps": self._steps,
            "ratio": self._ratio,
            "parts": [self._newest.state_dict(), state_of(self.parts[0], priorities)],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Sampler.load_state_dict`."""
        check_kind(state, "RecentSampler")
        seed, step = stored_integer(state, "seed"), stored_integer(state, "step")
        same(state, "steps", self._steps)
        same(state, "ratio", self._ratio)
        mine, other = parts(state, "parts", 2)
        fresh = StratifiedSampler(0)
        fresh.load_state_dict(mine)
        self.parts[0].load_state_dict(other)
        self._newest, self._random, self._step = fresh, StepGenerator(seed), step


class EmphasizeRecentSampler(Sampler):
    """Draws uniformly from a window of newest steps that shrinks update by update.

    Emphasizing Recent Experience (Wang and Ross 2019, "Boosting Soft Actor-Critic:
    Emphasizing Recent Experience without Forgetting the Past"): of N legal starts,
    update k of K draws from the newest ``max(N * eta ** (1000 * k / K), smallest)``,
    k from 1 to K, then from 1 again. They are the newest of all environments
    together: as many of each as it takes, fewer where an environment has fewer.

    Attributes:
        eta: In ``(0, 1]``; set it to anneal, as the paper does, towards 1.

    Example:
        >>> sampler = mr.EmphasizeRecentSampler(num_updates=1000, eta=0.996, seed=0)
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
        >>> len(buffer.sample(32))
        32
    """

    _random: StepGenerator

    def __init__(
        self, num_updates: int, *, eta: float = 0.996, smallest: int = 5000, seed: int | None = None
    ) -> None:
        """Make a sampler.

        Args:
            num_updates: K, draws of one phase of updates, at least 1.
            eta: How fast the window shrinks, in ``(0, 1]``; 1 is uniform.
            smallest: Steps that the window has at least, at least 1.
            seed: Seed of its own generator; None takes one from the system.

        Raises:
            SchemaError: An argument is not legal.
        """
        self.eta = number("eta", eta, above=0, maximum=1, way_out="eta=1 draws from all steps.")
        self._smallest = integer("smallest", smallest, 1, "Give a number of steps.")
        self._random = StepGenerator(seed)
        self._sampler = UniformSampler(self._random.seed)
        self._step = 0
        self.begin(num_updates)

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(self)

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        return {
            "num_updates": self._num_updates,
            "eta": self.eta,
            "smallest": self._smallest,
            "seed": self._random.given_seed,
        }

    def begin(self, num_updates: int) -> None:
        """Begin a phase of updates with the whole buffer.

        Args:
            num_updates: K of the phase, at least 1.
        """
        way_out = "Pass the batches that are drawn until the next phase."
        self._num_updates = integer("num_updates", num_updates, 1, way_out)
        self._update = 0

    def window(self, num_starts: int) -> int:
        """How many of the newest steps the next draw is from.

        Args:
            num_starts: N, legal starts of the buffer.
        """
        power = 1000 * (self._update + 1) / self._num_updates
        size = window_size(num_starts, self.eta**power, self._smallest)
        return min(size, num_starts)

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch; see `Sampler.draw`.

        Raises:
            EmptyError: There is no legal start.
        """
        if num_legal(view) == 0:
            raise nothing_to_draw(view, batch_size)
        edges = rank_edges(view)
        counts = newest_counts(np.diff(edges), self.window(int(edges[-1])))
        draw = self._sampler.draw(newest(view, counts, edges), batch_size)
        self._update = (self._update + 1) % self._num_updates
        self._step += 1
        return draw

    def can_draw(self, view: View, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Which starts the first update of a phase draws; see `Sampler.can_draw`."""
        edges = rank_edges(view)
        total = int(edges[-1])
        share = self.eta ** (1000 / self._num_updates)
        size = min(total, window_size(total, share, self._smallest))
        counts = newest_counts(np.diff(edges), size)
        return legal_among(newest(view, counts, edges), env_ids, positions)

    def state_dict(self) -> State:
        """Seed, step, eta, and how far the phase is."""
        return {
            "kind": "EmphasizeRecentSampler",
            "seed": self._random.seed,
            "step": self._step,
            "smallest": self._smallest,
            "eta": float(self.eta),
            "num_updates": self._num_updates,
            "update": self._update,
            "parts": [self._sampler.state_dict()],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Sampler.load_state_dict`."""
        check_kind(state, "EmphasizeRecentSampler")
        seed, step = stored_integer(state, "seed"), stored_integer(state, "step")
        same(state, "smallest", self._smallest)
        num_updates = max(1, stored_integer(state, "num_updates"))
        update = stored_integer(state, "update", num_updates)
        fresh = UniformSampler(0)
        fresh.load_state_dict(parts(state, "parts", 1)[0])
        self.eta = fraction(state, "eta")
        self._sampler, self._random, self._step = fresh, StepGenerator(seed), step
        self._num_updates, self._update = num_updates, update


def window_size(num_starts: int, share: float, smallest: int) -> int:
    """How many steps a share of all is, rounded down; at least the smallest.

    Args:
        num_starts: All of them.
        share: In ``[0, 1]``.
        smallest: Steps that the window has at least.
    """
    # The last bit of a power depends on the processor: 0.98**2 of 100,000 is 96,040
    # steps, and not one less where the product is just below.
    return max(int(round(num_starts * share, 6)), smallest)


def newest_counts(counts: Ids, window: int) -> Ids:
    """How many of each environment the newest of all are.

    The same number of each, the smallest that makes at least window of them,
    less where an environment has fewer.

    Args:
        counts: int64 ``[E]``, legal starts.
        window: In ``[1, counts.sum()]``.
    """
    rounds = np.sort(counts)
    left = len(rounds) - np.arange(len(rounds))
    below = np.cumsum(rounds) - rounds
    # The first environment, shortest first, that is not through by then.
    which = int(np.argmax(below + left * rounds >= window))
    each = -(-(window - int(below[which])) // int(left[which]))
    return np.minimum(counts, each)


def ignore_earliest(count: int, sampler: Sampler | None = None) -> RestrictedSampler:
    """Draw no step among the oldest rows of an environment.

    So that whatever reads some rows back (a history, a recurrent state's burn-in)
    finds them alive.

    Args:
        count: Rows alive, final rows among them, at least 1; what is drawn lies at
            ``span.first + count`` or after.
        sampler: Draws; `UniformSampler` by default.

    Raises:
        SchemaError: The count is no integer of at least 1, or the sampler is none.

    Example:
        >>> sampler = mr.ignore_earliest(10, mr.UniformSampler(seed=0))
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
        >>> bool((buffer.sample(32).positions >= 10).all())
        True
    """
    way_out = "Leave ignore_earliest out to draw from every row."
    count = integer("count", count, 1, way_out)
    inside = UniformSampler() if sampler is None else sampler
    return RestrictedSampler(_Earliest(count), inside)


class _Earliest:
    """The restriction to all but the oldest rows."""

    described = True

    def __init__(self, count: int) -> None:
        self._count = count
        self._last: tuple[View, View] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}

    def __repr__(self) -> str:
        return f"ignore_earliest({self._count})"

    def settings(self) -> dict[str, Any]:
        return {"count": self._count}

    def of(self, view: View) -> View:
        if self._last is None or self._last[0] is not view:
            self._last = view, LaterStarts(view, self._count)
        return self._last[1]

    def state_dict(self) -> State:
        return {"kind": "ignore_earliest", "count": self._count}

    def check(self, state: State) -> None:
        check_kind(state, "ignore_earliest")
        same(state, "count", self._count)
