"""How much faster is a published add than the replay libraries' adds to RAM?

Vector transitions (obs f32[17], action f32[6], reward, next_obs f32[17], two
bools) go into rings of a million rows: blocks of 1,024 once round (a first lap
takes new pages, of the disk for us, of memory for most peers), blocks over a full
ring, and single steps into a fresh and into a full ring. Ours are a step as an
environment returns it (arrays, a float, two bools), checked, written to the files
and visible to other processes when the call returns; peers get each row in the
form that they take fastest, ready made, and cpprb the environment's step as well.
`first_lap_over_bare_copy` is the time of the first lap of blocks over that of copying
as many bytes into new pages of a mapped file, without fields, flags or publication.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import ReplayBuffer
from tools.bench import cold, peers, transitions
from tools.bench.peers import Peer
from tools.bench.transitions import BLOCK, Columns
from tools.bench.turns import OURS, Side, Times, medians_us, race, rounded, run_benchmark, speedups


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        blocks: Blocks of 1,024 rows in a ring, and in its first lap.
        steady_turns: Blocks timed over the full ring.
        add_turns: Bursts of single adds.
        calls: Adds in a burst.
    """

    blocks: int = transitions.CAPACITY // BLOCK
    steady_turns: int = 400
    add_turns: int = 100
    calls: int = 100


QUICK = Sizes(blocks=40, steady_turns=40, add_turns=10, calls=20)


def measure(folder: Path, sizes: Sizes, names: list[str]) -> dict[str, object]:
    """Run all parts and return what is printed."""
    capacity = sizes.blocks * BLOCK
    cold.touch_memory(folder, (len(names) + 2) * capacity * transitions.ROW_NBYTES)
    ours = transitions.make(folder / "blocks", capacity)
    with ours:
        others = {name: peers.build(name, capacity, BLOCK) for name in names}
        sides = _extends(ours, others)
        sides["bare_copy"] = bare_copy(folder / "bare", sizes.blocks)
        first = race(sides, sizes.blocks, warm=0)
        bare = first.pop("bare_copy")
        steady = race(_extends(ours, others), sizes.steady_turns)
        _check(ours, others)
        singles = {name: peers.build(name, capacity, 1) for name in names}
        full = race(_adds(ours, others | _only(singles, SINGLE)), sizes.add_turns, sizes.calls)
    with transitions.make(folder / "steps", capacity) as fresh:
        begun = race(_adds(fresh, singles), sizes.add_turns, sizes.calls)
        _check(fresh, singles)
    return {
        "rows": capacity,
        "first_lap_over_bare_copy": rounded(_total(first[OURS]) / _total(bare)),
        "speedup": _over_rings(speedups, first, steady, begun, full),
        "median_us": _over_rings(medians_us, first, steady, begun, full),
    }


def _total(seconds: NDArray[np.float64]) -> float:
    """Seconds of a lap, but for the slowest hundredth of its calls.

    New pages come in large pieces, so that a median is of calls that took none; and
    some calls wait for the disk, or for the host of a virtual machine.
    """
    return float(np.sort(seconds)[: math.ceil(0.99 * len(seconds))].sum())


SINGLE = "stable_baselines3"
"""Its ring is shaped for as many environments as a call adds, so it needs two."""


def _only(sides: dict[str, Peer], name: str) -> dict[str, Peer]:
    return {name: sides[name]} if name in sides else {}


def _over_rings(
    what: Callable[[Times], dict[str, float]],
    first: Times,
    steady: Times,
    begun: Times,
    full: Times,
) -> dict[str, dict[str, float]]:
    return {
        "add_1_fresh_ring": what(begun),
        "add_1_full_ring": what(full),
        f"add_{BLOCK}_first_lap": what(first),
        f"add_{BLOCK}_full_ring": what(steady),
    }


def bare_copy(path: Path, blocks: int) -> Side:
    """A callable that copies the bytes of the next block into a mapped sparse file."""
    nbytes = BLOCK * transitions.ROW_NBYTES
    with path.open("wb+") as file:
        file.truncate(blocks * nbytes)
        pages = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    sources = np.random.default_rng(0).integers(0, 256, (4, nbytes), np.uint8)
    numbers = iter(range(blocks))

    def copy() -> None:
        number = next(numbers)
        first = number * nbytes
        pages[first : first + nbytes] = sources[number % 4]

    return copy


def _extends(ours: ReplayBuffer, others: dict[str, Peer]) -> dict[str, Side]:
    """Callables that each store the next of four blocks."""
    blocks = [transitions.block(k * BLOCK) for k in range(4)]
    sides: dict[str, Side] = {OURS: _fed(ours.extend, blocks)}
    for name, peer in others.items():
        sides[name] = _fed(peer.extend, [peer.prepare(rows) for rows in blocks])
    return sides


def _adds(ours: ReplayBuffer, others: dict[str, Peer]) -> dict[str, Side]:
    """Callables that each store the next of many rows."""
    rows = [transitions.block(n, 1) for n in range(BLOCK)]
    steps = [_step(row) for row in rows]
    sides: dict[str, Side] = {OURS: _fed(ours.add, steps)}
    for name, peer in others.items():
        sides[name] = _fed(peer.add, [peer.prepare(row) for row in rows])
        if name == "cpprb":
            sides["cpprb_step"] = _fed(peer.add, steps)
    return sides


def _step(row: Columns) -> dict[str, Any]:
    """One row as an environment's step returns it."""
    return {p: c[0] if c.ndim > 1 else c[0].item() for p, c in row.items()}


def _fed(store: Callable[[Any], None], rows: list[Any]) -> Side:
    values: Iterator[Any] = cycle(rows)
    return lambda: store(next(values))


def _check(ours: ReplayBuffer, others: dict[str, Peer]) -> None:
    """Every side holds the rows that it was given."""
    transitions.check(ours.sample(4 * BLOCK).fields, OURS)
    for name, peer in others.items():
        transitions.check(peer.sample(4 * BLOCK), name)


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(
        __doc__,
        lambda folder, options: measure(
            folder, QUICK if options.quick else Sizes(), peers.installed(options.peers)
        ),
        one_torch_thread=True,
        numpy_seeded=True,
    )


if __name__ == "__main__":
    main()
