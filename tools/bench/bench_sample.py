"""How much faster is a uniform batch of torch tensors than the replay libraries'?

Vector transitions (obs f32[17], action f32[6], reward, next_obs f32[17], two
bools), a million rows of 10,000 episodes. Ours are drawn from the files' mapping,
with the next observation stored and with it derived from the following row;
packed (small fields are views of one array) and contiguous (copied apart). Peers
store the next observation and hold everything in RAM. The floor is what no draw from
the files can do without: copying as many random records out of a mapping, and handing
six arrays to torch. A live reader draws while another process adds.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay import ReplayBuffer
from tools.bench import peers, transitions
from tools.bench.peers import Peer
from tools.bench.transitions import BLOCK, ROW_NBYTES
from tools.bench.turns import OURS, Side, medians_us, over_each, race, rounded, run_benchmark

DERIVED = "mmreplay_derived"
VARIANTS = (OURS, f"{OURS}_contiguous", DERIVED, f"{DERIVED}_contiguous")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        blocks: Blocks of 1,024 rows in the ring.
        turns: Bursts of draws.
        calls: Draws in a burst.
        batches: Steps in a batch.
    """

    blocks: int = transitions.CAPACITY // BLOCK
    turns: int = 60
    calls: int = 20
    batches: tuple[int, ...] = (256, 4096)


QUICK = Sizes(blocks=20, turns=5, calls=5)


def measure(folder: Path, sizes: Sizes, names: list[str]) -> dict[str, object]:
    """Run all parts and return what is printed."""
    capacity = sizes.blocks * BLOCK
    result: dict[str, object] = {"rows": capacity}
    with ExitStack() as stack:
        stored = stack.enter_context(transitions.make(folder / "stored", capacity))
        derived = stack.enter_context(transitions.make(folder / "derived", capacity, derived=True))
        transitions.fill(stored, capacity)
        transitions.fill(derived, capacity)
        others = {name: _filled(name, sizes.blocks) for name in names}
        for batch in sizes.batches:
            sides = _draws(stored, derived, others, batch)
            times = race(sides, sizes.turns, sizes.calls)
            result[f"sample_{batch}"] = over_each(times, VARIANTS)
            bare = floor(folder / "stored", batch) | {OURS: sides[OURS]}
            result[f"floor_{batch}_us"] = medians_us(race(bare, sizes.turns, sizes.calls))
    result["live_reader_us"] = live(folder / "stored", sizes)
    return result


def _filled(name: str, blocks: int) -> Peer:
    peer = peers.build(name, blocks * BLOCK, BLOCK)
    for number in range(blocks):
        peer.extend(peer.prepare(transitions.block(number * BLOCK)))
    transitions.check(peer.sample(4 * BLOCK), name)
    return peer


def _draws(
    stored: ReplayBuffer, derived: ReplayBuffer, others: dict[str, Peer], batch: int
) -> dict[str, Side]:
    """Callables that each draw one batch; our rows are checked here."""
    sides: dict[str, Side] = {}
    for name, buffer in ((OURS, stored), (DERIVED, derived)):
        for contiguous, suffix in ((False, ""), (True, "_contiguous")):
            sides[name + suffix] = _draw(buffer, batch, contiguous)
        transitions.check(buffer.sample(4 * BLOCK).torch().fields, name)
    for name, peer in others.items():
        sides[name] = _draw_of(peer, batch)
    return sides


def _draw(buffer: ReplayBuffer, batch: int, contiguous: bool) -> Side:
    return lambda: buffer.sample(batch, contiguous=contiguous).torch()


def _draw_of(peer: Peer, batch: int) -> Side:
    return lambda: peer.sample(batch)


def floor(path: Path, batch: int) -> dict[str, Side]:
    """Callables that copy random records of a buffer, and make tensors of them."""
    torch = import_module("torch")
    raw = np.dtype((np.void, ROW_NBYTES))
    records = np.memmap(next(path.rglob("records.bin")), raw, "r")
    rng, out = np.random.default_rng(0), np.empty(batch, raw)
    numbers = out.view(np.float32).reshape(batch, -1)
    ends = np.zeros((2, batch), np.bool_)
    rows = cycle([rng.integers(len(records), size=batch) for _ in range(256)])

    def take() -> None:
        records.take(next(rows), 0, out, "clip")

    def tensors() -> list[Any]:
        take()
        parts = [numbers[:, 0:17], numbers[:, 17:23], numbers[:, 23], numbers[:, 24:41]]
        return [torch.from_numpy(part) for part in (*parts, *ends)]

    return {"records": take, "records_as_tensors": tensors}


def live(path: Path, sizes: Sizes) -> dict[str, object]:
    """Median microseconds of a reader's draw, alone and while a process adds."""
    found: dict[str, object] = {}
    with ReplayBuffer.open(path) as reader:
        sides: dict[str, Side] = {
            f"sample_{batch}": _draw(reader, batch, False) for batch in sizes.batches
        }
        found["alone"] = medians_us(race(sides, sizes.turns, sizes.calls))
        with adding(path) as stop:
            found["beside_a_writer"] = medians_us(race(sides, sizes.turns, sizes.calls))
            transitions.check(reader.sample(4 * BLOCK).fields, "live reader")
            found["writer_steps_per_s"] = stop()
    return found


class adding:
    """Another process that adds to a buffer for as long as this is open."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-m", "tools.bench.writer", str(path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Callable[[], float]:
        """Wait for the first add; return what ends the adding and tells its rate."""
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self._stop

    def _stop(self) -> float:
        told, _ = self._process.communicate("stop\n", timeout=60)
        return rounded(float(told))

    def __exit__(self, *_: object) -> None:
        """Leave no process behind."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


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
