"""What do rings on Ray cost beside TorchRL's Ray buffer, RLlib's, Ray Data, and Ray?

Runs in the environment of ``make install-ray``. Sides of TorchRL need what is in
ray_peers.txt: ``build/ray/bin/pip install --no-deps -r tools/bench/ray_peers.txt``.
Each side in turns; vector rows are obs f32[17] and action f32[6], and
`tools.bench.ray_runs` has the first four questions:

- `same_node`: adding a step of 8 environments, and drawing 256 by priority with their
  update, by a learner on the ring's node; TorchRL's actor draws uniformly.
- `other_nodes`: batches from two other nodes, beside as many bytes moved by Ray.
- `one_against_two`: the same steps in one ring and in two: how they are drawn.
- `beyond_memory`: pixels, where the ring is four times larger than the memory.
- `behind_rllib`: adding a step of 8 running episodes, and drawing 256 steps by priority
  and updating them, both through the interface that RLlib calls, against RLlib's own
  prioritized buffer. The ring is in files.
- `epoch`: a shuffled epoch of batches of 256 transitions, ours from a ring through a
  DataLoader, as `mmreplay.ray.train_loader` makes it, and Ray Data's from parquet
  files that it wrote itself, with a local shuffle buffer of a tenth of the rows. Each
  side runs in processes of its own, whose memory is added up while they run.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import mmreplay as mr
from tools.bench.ray_runs import (
    ACTION,
    BATCH,
    EPISODE,
    NUM_ENVS,
    OBSERVATION,
    RLLIB,
    RUN_FULL,
    RUN_QUICK,
    VECTORS,
    OtherProcess,
    RunSizes,
    beyond_memory,
    compared,
    one_against_two,
    other_nodes,
    same_node,
)
from tools.bench.turns import OURS, Side, arguments, race, report, rounded, run_benchmark, speedups

RAY_DATA = "ray_data"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        steps: Steps in the buffers behind RLlib's interface, of whole episodes.
        turns: Bursts of each side there.
        calls: Calls in a burst.
        rows: Transitions of an epoch.
        epochs: Epochs of each side.
    """

    steps: int = 48_000
    turns: int = 40
    calls: int = 20
    rows: int = 1_000_000
    epochs: int = 3


FULL = Sizes()
QUICK = Sizes(steps=3200, turns=4, calls=3, rows=20_000, epochs=2)


# Behind RLlib's interface.


def chunks(prefix: str, calls: int, steps: int) -> Iterator[list[Any]]:
    """Chunks of running episodes: so many calls of `add`, of a chunk an episode each.

    Args:
        prefix: Of the names of episodes.
        calls: Calls.
        steps: Steps of each chunk, of which an episode has a whole number.
    """
    episode = import_module("ray.rllib.env.single_agent_episode").SingleAgentEpisode
    rng = np.random.default_rng(0)
    for call in range(calls):
        number, first = divmod(call * steps, EPISODE)
        if first == 0:
            shape = (NUM_ENVS, EPISODE + 1, OBSERVATION)
            observations = rng.random(shape, np.float32)
        yield [
            episode(
                id_=f"{prefix}-{env}-{number}",
                observations=list(observations[env, first : first + steps + 1]),
                actions=list(rng.random((steps, ACTION), np.float32)),
                rewards=[float(first)] * steps,
                truncated=first + steps == EPISODE,
                t_started=first,
                len_lookback_buffer=0,
            ).to_numpy()
            for env in range(NUM_ENVS)
        ]


def behind_rllib(folder: Path, sizes: Sizes) -> dict[str, object]:
    """Adds, and draws with updates, through RLlib's interface."""
    ours = import_module("mmreplay.ray.rllib").PrioritizedRingEpisodeReplayBuffer
    theirs = import_module("ray.rllib.utils.replay_buffers.prioritized_episode_buffer")
    capacity = 4 * sizes.steps
    buffers = {
        OURS: ours(capacity, path=folder / "ring", num_envs=NUM_ENVS, alpha=0.6, seed=0),
        RLLIB: theirs.PrioritizedEpisodeReplayBuffer(capacity, alpha=0.6),
    }
    for together in chunks("long", sizes.steps // NUM_ENVS // 50, 50):
        for buffer in buffers.values():
            buffer.add(together)
    steps = list(chunks("short", (sizes.turns + 1) * sizes.calls, 1))
    added = {name: iter(steps) for name in buffers}

    def adding(name: str) -> Side:
        return lambda: buffers[name].add(next(added[name]))

    adds = race({name: adding(name) for name in buffers}, sizes.turns, sizes.calls)
    sizes_now = {name: buffer.get_num_timesteps() for name, buffer in buffers.items()}
    assert len(set(sizes_now.values())) == 1, sizes_now

    sides = {name: _learning(buffer) for name, buffer in buffers.items()}
    draws = race(sides, sizes.turns, sizes.calls)
    for episode in buffers[OURS].sample(
        num_items=BATCH, n_step=1, gamma=0.99, beta=0.4, sample_episodes=True
    ):
        assert episode.get_observations(1).shape == (OBSERVATION,)
    buffers[OURS].close()
    return {
        "steps": sizes.steps,
        "add_8_steps": compared(adds),
        "sample_256_and_update": compared(draws),
    }


def rllib_draws(steps: int) -> Side:
    """Draws and updates of RLlib's own prioritized buffer, of so many steps."""
    theirs = import_module("ray.rllib.utils.replay_buffers.prioritized_episode_buffer")
    buffer = theirs.PrioritizedEpisodeReplayBuffer(4 * steps, alpha=0.6)
    for together in chunks("only", steps // NUM_ENVS // 50, 50):
        buffer.add(together)
    return _learning(buffer)


def _learning(buffer: Any) -> Side:
    rng = np.random.default_rng(1)

    def turn() -> None:
        drawn = buffer.sample(num_items=BATCH, n_step=1, gamma=0.99, beta=0.4, sample_episodes=True)
        assert len(drawn) == BATCH
        buffer.update_priorities(rng.random(BATCH).astype(np.float32))

    return turn


# A shuffled epoch.

SCHEMA = mr.Schema({**VECTORS.fields, "number": mr.Field((), "int64")})


def make_ring(path: Path, rows: int) -> None:
    """A ring of so many transitions, whose numbers are those of the rows."""
    rng, block = np.random.default_rng(0), 100_000
    with mr.ReplayBuffer.create(path, SCHEMA, rows, commit_every=None) as ring:
        for first in range(0, rows, block):
            count = min(block, rows - first)
            number = np.arange(first, first + count)
            ring.extend(
                observation=rng.random((count, OBSERVATION), np.float32),
                action=rng.random((count, ACTION), np.float32),
                reward=rng.random(count).astype(np.float32),
                terminated=number % EPISODE == EPISODE - 1,
                number=number,
            )


def legal_rows(path: Path) -> int:
    """Transitions of a ring."""
    with mr.ReplayBuffer.open(path) as ring:
        view = ring.view
        return int(view.starts.lengths.sum()) - view.num_illegal


def epoch_of_ours(ring: Path) -> Callable[[], int]:
    """Sum of the numbers of an epoch of a ring."""
    loader = import_module("torch.utils.data").DataLoader
    stream = import_module("mmreplay.ray.train").ranked_stream(
        ring, mr.ShuffledSampler(seed=0), BATCH, (), 0, 1
    )

    def epoch() -> int:
        return sum(int(batch["number"].sum()) for batch in loader(stream, batch_size=None))

    return epoch


def epoch_of_ray_data(parquet: Path, rows: int) -> Callable[[], int]:
    """Sum of the numbers of an epoch of parquet files."""
    ray = _start_ray()
    dataset = ray.data.read_parquet(str(parquet))

    def epoch() -> int:
        batches = dataset.iter_torch_batches(
            batch_size=BATCH, local_shuffle_buffer_size=rows // 10, local_shuffle_seed=0
        )
        return sum(int(batch["number"].sum()) for batch in batches)

    return epoch


def _start_ray() -> Any:
    ray = import_module("ray")
    import_module("ray.data")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    return ray


def write_parquet(ring: Path, parquet: Path) -> None:
    """Have Ray Data write the transitions of a ring."""
    ray = _start_ray()
    columns = ["observation", "action", "reward", "next_observation", "terminated"]
    dataset = import_module("mmreplay.ray.data").read(ring, [*columns, "number"])
    dataset.write_parquet(str(parquet))
    ray.shutdown()


@contextmanager
def watched(sides: dict[str, OtherProcess]) -> Iterator[None]:
    """Look at the memory of each side, ten times a second."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.1):
            for side in sides.values():
                side.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _side(name: str, *arguments: str) -> OtherProcess:
    module = "tools.bench.bench_ray"
    return OtherProcess(module, name, "--side", name, *arguments)


def epochs(folder: Path, sizes: Sizes) -> dict[str, object]:
    """A shuffled epoch of each side, in turns."""
    ring, parquet = folder / "epoch", folder / "parquet"
    make_ring(ring, sizes.rows)
    rows = legal_rows(ring)
    _side("parquet", str(ring), str(parquet)).close()
    sides = {OURS: _side(OURS, str(ring)), RAY_DATA: _side(RAY_DATA, str(parquet), str(rows))}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    sums: dict[str, float] = {}
    with watched(sides):
        for turn in range(-1, sizes.epochs):
            for name, side in sides.items():
                answer = side.ask("go\n")
                sums[name] = answer["sum"]
                if turn >= 0:
                    seconds[name].append(answer["seconds"])
    for side in sides.values():
        side.close()
    assert len(set(sums.values())) == 1, sums
    times = {name: np.array(values) for name, values in seconds.items()}
    peaks = {name: side.peak / 2**20 for name, side in sides.items()}
    return {
        "rows": rows,
        "speedup": speedups(times),
        "seconds": {n: rounded(float(np.median(t))) for n, t in times.items()},
        "memory_mib": {name: rounded(mib) for name, mib in peaks.items()},
        "memory_of_ours_over_ray_data": rounded(peaks[OURS] / peaks[RAY_DATA]),
    }


def run_side(side: str, arguments: list[str]) -> None:
    """Be a side: an epoch for each line that comes in."""
    if side == "parquet":
        write_parquet(Path(arguments[0]), Path(arguments[1]))
        report({"ready": True})
        return
    if side == OURS:
        epoch = epoch_of_ours(Path(arguments[0]))
    else:
        epoch = epoch_of_ray_data(Path(arguments[0]), int(arguments[1]))
    report({"ready": True})
    for _ in sys.stdin:
        start = perf_counter()
        total = epoch()
        report({"seconds": perf_counter() - start, "sum": total})


def measure(folder: Path, sizes: Sizes, runs: RunSizes) -> dict[str, object]:
    """Measure everything; see the module."""
    return {
        "same_node": same_node(folder, runs, rllib_draws(runs.steps)),
        "other_nodes": other_nodes(folder, runs),
        "one_against_two": one_against_two(folder, runs),
        "beyond_memory": beyond_memory(folder, runs),
        "behind_rllib": behind_rllib(folder, sizes),
        "epoch": epochs(folder, sizes),
    }


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("given", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure and print one line of JSON."""
    options = _options()
    if options.side is not None:
        run_side(options.side, options.given)
        return
    run_benchmark(
        __doc__,
        lambda folder, options: (
            measure(folder, QUICK, RUN_QUICK) if options.quick else measure(folder, FULL, RUN_FULL)
        ),
        options=options,
        one_torch_thread=True,
    )


if __name__ == "__main__":
    main()
