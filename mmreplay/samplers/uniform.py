"""Every legal start with the same probability, one at a time or in blocks.

A block is some legal starts that follow each other by rank. Rows that lie side by side
share chunks and pages, so a batch of few blocks touches a fraction of what single rows
do; docs/samplers.md says what that costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import integer
from mmreplay.episodes.starts import nothing_to_draw
from mmreplay.errors import FormatError, SchemaError
from mmreplay.ring import Span
from mmreplay.samplers.base import SHARES, Draw, Sampler, State, View, call_repr
from mmreplay.samplers.permutation import Permutation
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.states import same

Ids = NDArray[np.int64]


def checked_block(block: object, shuffle: bool = True) -> int:
    """The argument ``block``.

    Raises:
        SchemaError: It is no integer of at least 1, or there is no shuffling.
    """
    number = integer("block", block, 1, "Leave it out to draw single steps.")
    if number > 1 and not shuffle:
        raise SchemaError(
            f"block must be None with shuffle=False, got {block!r}. Leave it out: "
            "steps that are not shuffled are consecutive."
        )
    return number


def block_ranks(random: StepGenerator, step: int, total: int, block: int, count: int) -> Ids:
    """Ranks of blocks that begin anywhere alike, and go on at 0 behind the last one.

    Args:
        random: Draws them, by the first numbers of the step.
        step: At least 0.
        total: Legal starts, at least 1.
        block: Ranks of a block; of the last one the first few, if they are enough.
        count: How many.

    Returns:
        int64 ``[count]``, in ``[0, total)``: each of them any rank alike.
    """
    # Of a longer one no more is drawn, and its ranks would fill the memory.
    block = max(1, min(block, count))
    shares = random.shares(step, -(-count // block))
    firsts = (shares * total).astype(np.int64)
    ranks: Ids = (firsts[:, None] + np.arange(block)).reshape(-1)[:count] % total
    return ranks


class BlockPermutation:
    """A bijection of ``[0, size)`` that keeps blocks together; see `Permutation`.

    Blocks begin at another rank in each epoch, and come in a shuffled order; starts
    that fill no block come last.
    """

    def __init__(self, size: int, block: int, rng: np.random.Generator) -> None:
        """Choose an order.

        Args:
            size: At least 1, below 2**62.
            block: At least 1.
            rng: Chooses it; not kept.
        """
        self._size, self._block = size, min(block, size)
        self._full = size // self._block
        self._first = int(rng.integers(size))
        self._blocks = Permutation(max(1, self._full), rng)

    def __call__(self, indices: Ids) -> Ids:
        """Values at indices.

        Args:
            indices: int64 ``[B]``, in ``[0, size)``.

        Returns:
            int64 ``[B]``, in ``[0, size)``.
        """
        which, within = np.divmod(indices, self._block)
        full = which < self._full
        which[full] = self._blocks(which[full])
        values: Ids = (which * self._block + within + self._first) % self._size
        return values


def order_of(size: int, block: int, rng: np.random.Generator) -> Permutation | BlockPermutation:
    """The order of one epoch."""
    return Permutation(size, rng) if block == 1 else BlockPermutation(size, block, rng)


MIN_LEGAL = 0.75
"""Share of rows that are legal below which they are drawn by rank."""
SPARE_SIGMAS = 4.0
"""Rows drawn beyond what is needed, in standard deviations of the illegal ones."""


class UniformSampler(Sampler):
    """Draws with replacement, exactly uniform over all legal starts.

    Rows are drawn over the whole stretch, a few more than needed, and the illegal
    ones left out, which is exact and never enumerates the buffer. Where many rows are
    illegal, legal ones are drawn by rank. Costs O(batch), by rank with the logarithm
    of the illegal rows.

    Example:
        >>> sampler = mr.UniformSampler(seed=0)
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
        >>> len(buffer.sample(32))
        32
    """

    divides = SHARES
    _random: StepGenerator

    def __init__(self, seed: int | None = None, *, block: int = 1) -> None:
        """Make a sampler.

        Args:
            seed: Seed of its own generator; None takes one from the system.
            block: Draw so many legal starts that follow each other at a time, which
                reads fewer chunks and pages and makes steps of a batch depend on each
                other; see docs/samplers.md. From several buffers as from one, each is
                drawn by itself.

        Raises:
            SchemaError: An argument is not legal.
        """
        self._block = checked_block(block)
        self._random = StepGenerator(seed)
        self._step = 0
        self._starts = _Starts(Span(np.zeros(1, np.int64), np.zeros(1, np.int64)))
        self._alike = (0, 0, (np.empty(0), np.empty(0, np.float32)))

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(self)

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        return {"seed": self._random.given_seed, "block": self._block}

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch; see `Sampler.draw`.

        Raises:
            EmptyError: There is no legal start.
        """
        span = view.starts
        if span is not self._starts.span:
            self._starts = _Starts(span)
        starts = self._starts
        num_legal = starts.total - view.num_illegal
        if num_legal < 1:
            raise nothing_to_draw(view, batch_size)
        if self._block > 1:
            ranks = block_ranks(self._random, self._step, num_legal, self._block, batch_size)
            env_ids, positions = view.start_at(ranks)
        elif num_legal == starts.total:
            env_ids, positions = self._random.pick(self._step, starts.ends, span.stop, batch_size)
        elif num_legal < MIN_LEGAL * starts.total:
            ranks = _below(num_legal, self._random.shares(self._step, batch_size))
            env_ids, positions = view.start_at(ranks)
        else:
            env_ids, positions = self._pick_legal(view, num_legal, batch_size)
        key = self._random.key(self._step)
        self._step += 1
        probabilities, weights = self._equal(batch_size, num_legal)
        return Draw(env_ids, positions, probabilities.copy(), weights.copy(), key)

    def _equal(
        self, batch_size: int, num_legal: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """Probabilities and weights, kept: to copy both takes half of filling them."""
        known = self._alike
        if known[0] != batch_size or known[1] != num_legal:
            alike = np.full(batch_size, 1.0 / num_legal), np.ones(batch_size, "f4")
            known = self._alike = (batch_size, num_legal, alike)
        return known[2]

    def _pick_legal(self, view: View, num_legal: int, count: int) -> tuple[Ids, Ids]:
        """Draw rows until so many of them are legal, in one go nearly always."""
        starts = self._starts
        illegal = count * (starts.total / num_legal - 1.0)
        spare = int(illegal + SPARE_SIGMAS * illegal**0.5) + 1
        ends, stops = starts.ends, starts.span.stop
        table = view.table
        if table is not None:
            env_ids, positions = self._random.pick_legal(
                self._step, ends, stops, table, count + spare, count
            )
        else:
            env_ids, positions = self._random.pick(self._step, ends, stops, count + spare)
            good = view.legal(env_ids, positions).nonzero()[0][:count]
            env_ids, positions = env_ids.take(good), positions.take(good)
        missing = count - len(positions)
        if missing == 0:
            return env_ids, positions
        shares = self._random.shares(self._step, count + spare + missing)
        ids, more = view.start_at(_below(num_legal, shares[-missing:]))
        return np.concatenate([env_ids, ids]), np.concatenate([positions, more])

    def bookmark(self) -> Any:
        """See `Sampler.bookmark`."""
        return self._step

    def return_to(self, bookmark: Any) -> None:
        """See `Sampler.return_to`."""
        self._step = bookmark

    def state_dict(self) -> State:
        """Seed and step."""
        state: State = {"kind": "UniformSampler", "seed": self._random.seed, "step": self._step}
        return state | ({"block": self._block} if self._block > 1 else {})

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Sampler.load_state_dict`."""
        seed, step = _checked(state)
        same({"block": 1, **state}, "block", self._block)
        self._random = StepGenerator(seed)
        self._step = step


def _checked(state: State) -> tuple[int, int]:
    """Seed and step of a state, or FormatError: a state comes from a file."""
    if not isinstance(state, Mapping) or state.get("kind") != "UniformSampler":
        kind = state.get("kind") if isinstance(state, Mapping) else type(state).__name__
        raise FormatError(
            f"sampler state: kind must be 'UniformSampler', got {kind!r}. Load it "
            "into the sampler from which it was saved."
        )
    for name in ("seed", "step"):
        value = state.get(name)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise FormatError(
                f"sampler state: {name} must be an integer in [0, 2**63), got "
                f"{value!r}. Pass what state_dict returned, unchanged."
            )
    return state["seed"], state["step"]


def _below(total: int, shares: NDArray[np.float64]) -> Ids:
    """Integers in ``[0, total)``, int64 ``[N]``, as `StepGenerator.pick` draws them."""
    shares *= total
    return shares.astype(np.int64)


class _Starts:
    """A span laid end to end, so that one number names a row of it."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.ends = np.cumsum(span.lengths)
        self.total = int(self.ends[-1])
