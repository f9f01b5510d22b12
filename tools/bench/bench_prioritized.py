"""How much faster is a prioritized draw with its update than the replay libraries'?

Vector transitions (obs f32[17], action f32[6], reward, next_obs f32[17], two
bools), a million rows, alpha 0.6, beta 0.4, stratified. A turn draws a batch with its
weights, as numpy arrays or torch tensors, and gives its steps new priorities. Ours
come from the files' mapping, and priorities go to the column on disk; peers hold
everything in RAM. Beside that: a turn with an add of one row in between, a turn by
rank, and what a hundred million rows cost a draw and an update, without data.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mmreplay import PrioritizedSampler, RankPrioritizedSampler, ReplayBuffer
from tools.bench import prioritized_peers as peers
from tools.bench import transitions
from tools.bench.prioritized_peers import ALPHA, BETA, Errors
from tools.bench.simulated import SimulatedView
from tools.bench.transitions import BLOCK
from tools.bench.turns import (
    OURS,
    Side,
    arguments,
    medians_us,
    over_each,
    race,
    rounded,
    run_benchmark,
)

TORCH, ADDING, RANK = f"{OURS}_torch", f"{OURS}_add_1_too", f"{OURS}_rank"
VARIANTS = (OURS, TORCH)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        blocks: Blocks of 1,024 rows in the ring.
        many: Rows of the larger simulated ring, a hundred times the smaller one's.
        turns: Bursts of each side.
        calls: Draws and updates in a burst.
        batches: Steps in a batch.
    """

    blocks: int = transitions.CAPACITY // BLOCK
    many: int = 100_000_000
    turns: int = 60
    calls: int = 20
    batches: tuple[int, ...] = (256, 4096)


QUICK = Sizes(blocks=20, many=1_000_000, turns=5, calls=5)


def measure(folder: Path, sizes: Sizes, names: list[str]) -> dict[str, object]:
    """Run all parts and return what is printed."""
    result: dict[str, object] = {"rows": sizes.blocks * BLOCK}
    with ExitStack() as stack:
        buffer = stack.enter_context(transitions.make(folder / "ring", sizes.blocks * BLOCK))
        transitions.fill(buffer, sizes.blocks * BLOCK)
        transitions.check(buffer.sample(4 * BLOCK).fields, OURS)
        for batch in sizes.batches:
            ours = _sides(buffer, sizes.blocks, batch)
            sides = {name: ours.pop(name) for name in VARIANTS}
            sides |= _theirs(names, sizes.blocks, batch)
            with warnings.catch_warnings():
                # What peers warn of is theirs, and costs them time.
                warnings.simplefilter("ignore")
                times = race(sides, sizes.turns, sizes.calls, warm=3)
            result[f"turn_{batch}"] = over_each(times, VARIANTS)
            also = race(ours, sizes.turns, sizes.calls, warm=3)
            result[f"also_{batch}_us"] = medians_us(also)
    result["many_rows"] = many_rows(sizes)
    return result


def _errors(batch: int) -> list[Errors]:
    rng = np.random.default_rng(0)
    return [rng.random(batch).astype(np.float32) for _ in range(16)]


def _sides(buffer: ReplayBuffer, blocks: int, batch: int) -> dict[str, Side]:
    """Ours: callables that each draw one batch and update it."""
    pool = _endless(_errors(batch))
    # Samplers of the other batch size are open too: each needs a file of its own.
    sampler = PrioritizedSampler(ALPHA, BETA, seed=0, name=f"prioritized_{batch}")
    ranks = RankPrioritizedSampler(seed=0, name=f"ranks_{batch}")
    one = iter(range(blocks * BLOCK, 1 << 60))

    def turn() -> None:
        buffer.sampler = sampler
        buffer.update_priorities(buffer.sample(batch), next(pool))

    def torch_turn() -> None:
        buffer.sampler = sampler
        drawn = buffer.sample(batch).torch()
        buffer.update_priorities(drawn, next(pool))

    def adding() -> None:
        buffer.extend(transitions.block(next(one), 1))
        turn()

    def by_rank() -> None:
        buffer.sampler = ranks
        buffer.update_priorities(buffer.sample(batch), next(pool))

    turn()
    by_rank()
    return {OURS: turn, TORCH: torch_turn, ADDING: adding, RANK: by_rank}


def _theirs(names: list[str], blocks: int, batch: int) -> dict[str, Side]:
    sides: dict[str, Side] = {}
    for name in names:
        peer = peers.build(name, blocks, batch)
        pool = _endless(_errors(batch))
        sides[name] = lambda peer=peer, pool=pool: peer.turn(next(pool))  # type: ignore[misc]  # bound early
    return sides


def _endless(pool: list[Errors]) -> Iterator[Errors]:
    while True:
        yield from pool


def many_rows(sizes: Sizes) -> dict[str, object]:
    """How many times as long a draw and an update take in a ring a hundred times it."""
    told: dict[str, object] = {}
    few = sizes.many // 100
    for make in (PrioritizedSampler, RankPrioritizedSampler):
        sides: dict[str, Side] = {}
        for rows in (few, sizes.many):
            sides[str(rows)] = _simulated(make, rows)
        times = race(sides, sizes.turns, sizes.calls, warm=3)
        told[make.__name__] = {
            "ratio": rounded(float(np.median(times[str(sizes.many)] / times[str(few)]))),
            "median_us": medians_us(times),
        }
    return told


def _simulated(make: type[PrioritizedSampler] | type[RankPrioritizedSampler], rows: int) -> Side:
    view = SimulatedView(rows, episode=1000)
    sampler = make(seed=0, name=None)
    pool = _endless(_errors(256))

    def turn() -> None:
        draw = sampler.draw(view, 256)
        sampler.update_priorities(view, draw.env_ids, draw.positions, next(pool))

    turn()
    return turn


def main() -> None:
    """Measure and print one line of JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--many", type=int, default=None, help="rows of the larger simulated ring")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    if options.many is not None:
        sizes = replace(sizes, many=options.many)
    run_benchmark(
        __doc__,
        lambda folder, _: measure(folder, sizes, peers.installed(options.peers)),
        options=options,
        one_torch_thread=True,
        numpy_seeded=True,
    )


if __name__ == "__main__":
    main()
