"""What does an epoch without replacement cost over a billion rows?

A simulated index of eight environments, episodes of 1,000 steps whose last step is
no legal start, as derived next observations make it. Prints, at growing numbers of
rows, the time from a new sampler to its first batch of 256, the time of a batch
after that, and the memory that both took at their peak, the index aside. torch's
RandomSampler, which writes the whole order down, is timed beside it at ten million.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from torch import Generator
from torch.utils.data import RandomSampler

from mmreplay.episodes import START, TRUNCATED, EpisodeIndex
from mmreplay.ring import Span
from mmreplay.samplers.shuffled import ShuffledSampler
from tools.bench.simulated import FixedView
from tools.bench.turns import OURS, race, rounded, run_benchmark, speedups

Ids = NDArray[np.int64]
BATCH = 256
ENVS = 8
EPISODE = 1000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        rows: Rows of each simulated buffer.
        written_down: Rows of the one that torch's sampler is timed beside.
        batches: Batches timed after the first.
        turns: Times that either sampler begins an epoch.
    """

    rows: tuple[int, ...] = (10**6, 10**7, 10**8, 10**9)
    written_down: int = 10**7
    batches: int = 2000
    turns: int = 5


FULL = Sizes()
QUICK = Sizes((10**4, 10**5), 10**4, 50, 2)


class IndexedView(FixedView):
    """A view of an index and no data; see `View`."""

    def __init__(self, rows: int) -> None:
        """Index the rows.

        Args:
            rows: How many are alive, of all environments.
        """
        each = rows // ENVS
        span = Span(np.zeros(ENVS, np.int64), np.full(ENVS, each))
        index = EpisodeIndex(ENVS, derived=True, final_follows=False)
        index.update(span, self._flags_between)
        super().__init__(span, index, index.starts)
        self.num_illegal = index.num_illegal

    def _flags_between(self, env_id: int, first: int, stop: int) -> NDArray[np.uint8]:
        flags = np.zeros(stop - first, np.uint8)
        flags[-first % EPISODE :: EPISODE] = START
        flags[(EPISODE - 1 - first) % EPISODE :: EPISODE] = TRUNCATED
        return flags

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """Legal starts by rank."""
        return self.index.start_at(ranks)

    def legal_before(self, env_ids: Ids, positions: Ids) -> Ids:
        """Legal starts before positions."""
        return self.index.legal_before(env_ids, positions)

    def legal(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """The last step of each episode is none; see `View.legal`."""
        del env_ids
        legal: NDArray[np.bool_] = positions % EPISODE != EPISODE - 1
        return legal

    def flags(self, env_ids: Ids, positions: Ids) -> NDArray[np.uint8]:
        """See `View.flags`."""
        at = positions % EPISODE
        found: NDArray[np.uint8] = (at == 0) * np.uint8(START)
        found |= (at == EPISODE - 1) * np.uint8(TRUNCATED)
        return found


def costs(rows: int, batches: int) -> dict[str, float]:
    """Seconds and bytes of an epoch's beginning and of its next batches."""
    view = IndexedView(rows)
    start = perf_counter()
    sampler = ShuffledSampler(0)
    first = sampler.draw(view, BATCH)
    middle = perf_counter()
    for _ in range(batches):
        sampler.draw(view, BATCH)
    seconds = perf_counter() - middle
    tracemalloc.start()
    measured = ShuffledSampler(0)
    for _ in range(40):
        draw = measured.draw(view, BATCH)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(zip(draw.env_ids, draw.positions, strict=True))) == BATCH
    assert len(first) == BATCH
    return {
        "first_batch_ms": rounded(1e3 * (middle - start)),
        "batch_us": rounded(1e6 * seconds / batches),
        "peak_kib": rounded(peak / 1024),
    }


def measure(sizes: Sizes) -> dict[str, object]:
    """Measure everything; see the module."""
    view = IndexedView(sizes.written_down)
    total = int(view.starts.lengths.sum()) - view.num_illegal

    def ours() -> object:
        return ShuffledSampler(0).draw(view, BATCH)

    def written_down() -> object:
        order = iter(RandomSampler(range(total), generator=Generator()))
        return [next(order) for _ in range(BATCH)]

    times = race({OURS: ours, "torch_random_sampler": written_down}, sizes.turns)
    return {
        "first_batch_speedup": speedups(times)["torch_random_sampler"],
        "first_batch_speedup_rows": sizes.written_down,
        "by_rows": {str(rows): costs(rows, sizes.batches) for rows in sizes.rows},
    }


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(__doc__, lambda folder, options: measure(QUICK if options.quick else FULL))


if __name__ == "__main__":
    main()
