"""How much faster are a sum tree's set and find than TorchRL's C++ float32 tree's?

Batches of 256 and 4,096 random leaves among a million and a hundred million, in
float64; beside them, among a million, our numpy twin; and how much longer a hundred
million take than a million. TorchRL is given numpy arrays of its own types, which it
takes fastest. A float32 has 24 bits, so that most of a hundred million leaves cannot
be found in its tree at all; it is timed all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import cycle
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.samplers.sum_tree import SumTree
from tools.bench import peers
from tools.bench.turns import OURS, Side, Times, medians_us, race, rounded, run_benchmark, speedups

TWIN = f"{OURS}_numpy"
TORCHRL = "torchrl"
TWIN_TURNS = 5
CHECKED_LEAVES = 100_000
FILLED_AT_ONCE = 1_000_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        leaves: Leaves of the trees.
        batches: Leaves in a batch.
        pool: Leaves in all the batches that a side goes through, again and again:
            many more than the caches hold nodes.
        turns: Bursts of each side.
        calls: Batches in a burst.
    """

    leaves: tuple[int, ...] = (1_000_000, 100_000_000)
    batches: tuple[int, ...] = (256, 4096)
    pool: int = 1_000_000
    turns: int = 60
    calls: int = 20


QUICK = Sizes(leaves=(1000, 20_000), pool=20_000, turns=3, calls=3)


class Tree(Protocol):
    """A sum tree, given arrays of the types that it takes fastest."""

    @property
    def real(self) -> type[np.floating[Any]]:
        """Type of its values."""

    def set(self, indices: NDArray[np.int64], values: NDArray[Any]) -> object:
        """Write leaves ``[B]``."""

    def find(self, sums: NDArray[Any]) -> NDArray[np.int64]:
        """Find where prefix sums ``[B]`` fall."""


class Ours:
    """Our tree, with either kernel."""

    real = np.float64

    def __init__(self, leaves: int, kernels: str) -> None:
        before = os.environ.get("MMREPLAY_KERNELS")
        os.environ["MMREPLAY_KERNELS"] = kernels
        try:
            self.tree = SumTree(leaves)
        finally:
            del os.environ["MMREPLAY_KERNELS"]
            if before is not None:
                os.environ["MMREPLAY_KERNELS"] = before
        self.set, self.find = self.tree.set, self.tree.find


class TorchRL:
    """TorchRL's SumSegmentTreeFp32, without the sampler around it."""

    real = np.float32

    def __init__(self, leaves: int) -> None:
        try:
            tree = import_module("torchrl._torchrl").SumSegmentTreeFp32(leaves)
        except ImportError as error:
            raise SystemExit(
                f"TorchRL's C++ does not load ({error}); build it with python -m "
                "tools.bench.build_torchrl"
            ) from error
        self.set, self.find = tree.__setitem__, tree.scan_lower_bound


def measure(sizes: Sizes, names: list[str]) -> dict[str, object]:
    """Run all parts and return what is printed."""
    kinds: dict[str, Callable[[int], Tree]] = {OURS: lambda leaves: Ours(leaves, "")}
    if TORCHRL in names:
        kinds[TORCHRL] = TorchRL
    # Apart: what the twin writes between would leave no cache as the others find it.
    twins = {OURS: kinds[OURS], TWIN: lambda leaves: Ours(leaves, "numpy")}
    check({name: kind(CHECKED_LEAVES) for name, kind in {**twins, **kinds}.items()})
    times_of = {leaves: _race(leaves, kinds, sizes) for leaves in sizes.leaves}
    beside = _race(min(sizes.leaves), twins, replace(sizes, turns=TWIN_TURNS))
    return {
        "speedup": _over_all(times_of, speedups),
        "times_as_long_among_most_leaves": _growth(times_of, sizes),
        "bytes_per_leaf": {
            f"{leaves:,}": SumTree(leaves).nbytes / leaves for leaves in sizes.leaves
        },
        "speedup_over_twin": {call: speedups(t)[TWIN] for call, t in beside.items()},
        "median_us": _over_all(times_of, medians_us),
    }


def check(trees: dict[str, Tree]) -> None:
    """Have all trees find the same leaves, where sums are exact in float32.

    Raises:
        AssertionError: One finds another leaf.
    """
    rng = np.random.default_rng(1)
    values = rng.integers(0, 8, CHECKED_LEAVES)
    # In the middle of a leaf: on its bound, TorchRL finds the one before.
    sums = rng.integers(values.sum(), size=4096) + 0.5
    expected = np.searchsorted(np.cumsum(values), sums, side="right")
    order = rng.permutation(CHECKED_LEAVES)
    for name, tree in trees.items():
        tree.set(order, values[order].astype(tree.real))
        times_of = tree.find(sums.astype(tree.real))
        assert np.array_equal(times_of, expected), f"{name} finds other leaves"


def _race(leaves: int, kinds: dict[str, Callable[[int], Tree]], sizes: Sizes) -> dict[str, Times]:
    """Times of each call, by call."""
    trees = {name: kind(leaves) for name, kind in kinds.items()}
    for tree in trees.values():
        _fill(tree, leaves)
    times_of = {}
    for batch in sizes.batches:
        for call, sides in (("set", _sets), ("find", _finds)):
            by_name = {n: sides(t, leaves, batch, sizes) for n, t in trees.items()}
            times_of[f"{call}_{batch}"] = race(by_name, sizes.turns, sizes.calls)
    return times_of


def _fill(tree: Tree, leaves: int) -> None:
    rng = np.random.default_rng(2)
    for first in range(0, leaves, FILLED_AT_ONCE):
        indices = np.arange(first, min(first + FILLED_AT_ONCE, leaves))
        tree.set(indices, _values(rng, len(indices)).astype(tree.real))


def _values(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """float64 ``[count]``, between 1 and 2: however they change, sums stay legal."""
    return 1 + rng.random(count)


def _sets(tree: Tree, leaves: int, batch: int, sizes: Sizes) -> Side:
    rng = np.random.default_rng(3)
    pool = cycle(
        [
            (rng.integers(leaves, size=batch), _values(rng, batch).astype(tree.real))
            for _ in range(-(-sizes.pool // batch))
        ]
    )
    return lambda: tree.set(*next(pool))


def _finds(tree: Tree, leaves: int, batch: int, sizes: Sizes) -> Side:
    rng = np.random.default_rng(4)
    pool = cycle(
        [(rng.random(batch) * leaves).astype(tree.real) for _ in range(-(-sizes.pool // batch))]
    )
    return lambda: tree.find(next(pool))


def _over_all(
    times_of: dict[int, dict[str, Times]], figures: Callable[[Times], dict[str, float]]
) -> dict[str, dict[str, dict[str, float]]]:
    return {
        f"{leaves:,}": {call: figures(times) for call, times in calls.items()}
        for leaves, calls in times_of.items()
    }


def _growth(times_of: dict[int, dict[str, Times]], sizes: Sizes) -> dict[str, float]:
    """Time of a set and a find among most leaves, over that among fewest."""
    few, many = times_of[min(sizes.leaves)], times_of[max(sizes.leaves)]
    return {str(batch): rounded(_both(many, batch) / _both(few, batch)) for batch in sizes.batches}


def _both(calls: dict[str, Times], batch: int) -> float:
    """Median seconds of our set and find together."""
    return sum(float(np.median(calls[f"{c}_{batch}"][OURS])) for c in ("set", "find"))


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(
        __doc__,
        lambda folder, options: measure(
            QUICK if options.quick else Sizes(), peers.installed(options.peers)
        ),
        one_torch_thread=True,
    )


if __name__ == "__main__":
    main()
