"""What runs on Ray cost beside TorchRL's Ray buffer, and beside Ray's bare transfers.

The questions of `bench_ray` that need a cluster, each a function that starts one on
this machine. The learner is the process that measures. TorchRL draws uniformly, from
one actor, a blocking call each, and updates no priorities; ours are drawn by priority
and updated.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from tools.bench.bench_memory import MIB, Group, limited
from tools.bench.bench_pixels import SHAPE as PIXELS
from tools.bench.bench_pixels import Preadv, block, check
from tools.bench.disk_peers import Pixels
from tools.bench.turns import OURS, Side, Times, medians_us, race, report, rounded, speedups

TORCHRL, BARE, RLLIB = "torchrl", "bare_ray", "rllib"
ALONE, SHARED = OURS, f"{OURS}_shard"
BATCH = 256
OBSERVATION, ACTION = 17, 6
NUM_ENVS = 8
EPISODE = 200
AHEAD = 2
"""Calls ahead of the learner, of ours and of bare Ray."""
STORE_NBYTES = 200_000_000
"""Of Ray's object store on each node."""
MARK = "MMREPLAY_BENCH_RAY"
"""Names the processes of one side, which Ray starts with the environment of theirs."""
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
VECTORS = mr.Schema(
    {
        "observation": mr.Field((OBSERVATION,), "float32"),
        "action": mr.Field((ACTION,), "float32"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    }
)


@dataclass(frozen=True, slots=True)
class RunSizes:
    """How much to measure.

    Attributes:
        steps: Steps in the rings of vectors.
        turns: Bursts of each side.
        calls: Calls in a burst.
        large_nbytes: Bytes in the rings of large rows.
        counted_batches: Batches whose steps are counted.
        limit_mib: Of memory, for each side of the ring beyond it.
        beyond_turns: Turns of each side there.
        seconds: Of such a turn.
    """

    steps: int = 48_000
    turns: int = 40
    calls: int = 20
    large_nbytes: int = 128 << 20
    counted_batches: int = 800
    limit_mib: int = 512
    beyond_turns: int = 12
    seconds: float = 3.0


RUN_FULL = RunSizes()
RUN_QUICK = RunSizes(
    steps=3200,
    turns=3,
    calls=4,
    large_nbytes=8 << 20,
    counted_batches=40,
    limit_mib=64,
    beyond_turns=1,
    seconds=0.2,
)


@contextmanager
def cluster(nodes: int = 0, head_cpus: int = 2) -> Iterator[list[str]]:
    """A head, where this process is, and more nodes.

    Args:
        nodes: How many more.
        head_cpus: CPUs of the head for actors and tasks.

    Yields:
        Ids of the other nodes.
    """
    folder = tempfile.mkdtemp(prefix="r-", dir="/tmp")
    os.environ.update(SETTINGS | {"RAY_TMPDIR": folder})
    ray = import_module("ray")
    head = {
        "num_cpus": head_cpus,
        "object_store_memory": STORE_NBYTES,
        "include_dashboard": False,
        "labels": {"mmreplay": "head"},
    }
    made = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=head)
    try:
        others = [
            made.add_node(
                num_cpus=2, object_store_memory=STORE_NBYTES, labels={"mmreplay": f"node-{number}"}
            )
            for number in range(nodes)
        ]
        ray.init(address=made.address, log_to_driver=False)
        yield [node.node_id for node in others]
    finally:
        with suppress(Exception):
            ray.shutdown()
        with suppress(Exception):
            made.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def on_node(node: str) -> dict[str, Any]:
    """Options of an actor or a task on a node."""
    strategies = import_module("ray.util.scheduling_strategies")
    strategy = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return {"num_cpus": 0, "scheduling_strategy": strategy}


def peers_here() -> bool:
    """Whether TorchRL is installed."""
    return find_spec("torchrl") is not None


def torchrl_buffer(
    rows: int, storage: str, where: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """TorchRL's Ray buffer.

    Args:
        rows: Its capacity.
        storage: Name of the class of its storage.
        where: Options of its actor.
        **options: Of the storage.
    """
    data = import_module("torchrl.data")
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    return data.RayReplayBuffer(
        storage=partial(getattr(data, storage), rows, **options),
        batch_size=BATCH,
        ray_init_config={"num_cpus": 1},
        remote_config=dict(where or {"num_cpus": 0}),
    )


def tensordict(fields: Mapping[str, NDArray[Any]]) -> Any:
    """Rows as TorchRL takes them; a dot in a name is a level."""
    torch = import_module("torch")
    made = import_module("tensordict").TensorDict({}, [len(next(iter(fields.values())))])
    for name, rows in fields.items():
        made[tuple(name.split("."))] = torch.from_numpy(rows)
    return made


def vectors(count: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Random steps of one environment, ``[count, ...]`` each."""
    rng = np.random.default_rng(seed)
    return {
        "observation": rng.random((count, OBSERVATION), np.float32),
        "action": rng.random((count, ACTION), np.float32),
        "reward": rng.random(count).astype(np.float32),
        "terminated": np.arange(count) % EPISODE == EPISODE - 1,
    }


def transitions(count: int) -> Any:
    """The same as TorchRL stores them."""
    rows = vectors(count)
    done = rows.pop("terminated")[:, None]
    return tensordict(
        {
            "observation": rows["observation"],
            "action": rows["action"],
            "next.observation": rows["observation"].copy(),
            "next.reward": rows["reward"][:, None],
            "next.terminated": done,
            "next.truncated": np.zeros_like(done),
        }
    )


# Adding, and drawing on the node of the ring.


def same_node(folder: Path, sizes: RunSizes, rllib: Side | None) -> dict[str, object]:
    """Add steps of 8 environments, and draw on the node of the ring.

    Args:
        folder: Of the ring.
        sizes: How much.
        rllib: Draws and updates a batch of RLlib's own buffer of as many steps.
    """
    with cluster(), ExitStack() as stack:
        writer = mr.ray.writer(
            "vectors",
            VECTORS,
            sizes.steps // NUM_ENVS,
            root=folder / "same",
            num_envs=NUM_ENVS,
            autoreset="disabled",
        )
        stack.callback(mr.ray.stop, "vectors")
        stack.enter_context(writer)
        steps = vectors(EPISODE)
        blocks = {name: np.repeat(rows[:, None], NUM_ENVS, 1) for name, rows in steps.items()}
        for _ in range(sizes.steps // NUM_ENVS // EPISODE):
            writer.extend(blocks)
        each = [{name: rows[number] for name, rows in blocks.items()} for number in range(EPISODE)]
        added = 0

        def add() -> None:
            nonlocal added
            writer.add(each[added % EPISODE])
            added += 1

        adding: dict[str, Side] = {OURS: add}
        drawing: dict[str, Side] = {}
        for name, options in (
            (ALONE, {"alone": True}),
            (SHARED, {"per_call": 8, "prefetch": AHEAD}),
        ):
            sampler = mr.PrioritizedSampler(name=name.replace("_", "-"), seed=0)
            client = mr.ray.ReplayClient("vectors", sampler, (), BATCH, **options)
            stack.enter_context(client)
            drawing[name] = _learning(client)
        if rllib is not None:
            drawing[RLLIB] = rllib
        if peers_here():
            theirs = torchrl_buffer(sizes.steps, "LazyTensorStorage")
            stack.callback(theirs.shutdown)
            for _ in range(0, sizes.steps, 800):
                theirs.extend(transitions(800))
            step = transitions(NUM_ENVS)
            adding[TORCHRL] = lambda: theirs.extend(step)
            drawing[TORCHRL] = theirs.sample
        adds = race(adding, sizes.turns, sizes.calls)
        # What a client drew while the others had their turn is taken first.
        draws = race(drawing, sizes.turns, 2 * sizes.calls, ahead=8 * AHEAD + 1)
    return {
        "add_8_steps": compared(adds),
        "alone": compared({n: t for n, t in draws.items() if n != SHARED}),
        "shard": compared({n: t for n, t in draws.items() if n != ALONE}, SHARED),
    }


def _learning(client: Any) -> Side:
    rng = np.random.default_rng(1)

    def turn() -> None:
        batch = next(client)
        client.update_priorities(batch, rng.random(BATCH).astype(np.float32))

    return turn


def compared(times: Times, over: str = OURS) -> dict[str, object]:
    """Speedups and medians."""
    return {"speedup": speedups(times, over), "median_us": medians_us(times)}


# Drawing from two other nodes.


class BareShard:
    """An actor that returns as many bytes as a shard does, made beforehand."""

    def __init__(self, nbytes: int) -> None:
        """Make some blocks, so that none is read from the processor's caches."""
        rng = np.random.default_rng(0)
        self._blocks = [rng.integers(0, 255, nbytes, np.uint8) for _ in range(4)]
        self._count = 0

    def block(self) -> NDArray[np.uint8]:
        """Return one of them."""
        self._count += 1
        return self._blocks[self._count % len(self._blocks)]


def fill(
    run: str,
    schema: mr.Schema,
    root: str,
    rows: int,
    shape: tuple[int, ...] | None,
    name: str | None = None,
) -> None:
    """Be the writer of one node: write its ring and leave it to the shard."""
    with mr.ray.writer(run, schema, rows, root=root, name=name, autoreset="disabled") as writer:
        size = min(rows, 500)
        for first in range(0, rows // size * size, size):
            if shape is None:
                writer.extend(vectors(size, first))
            else:
                writer.extend({"pixels": block(first, size, shape)})


def other_nodes(folder: Path, sizes: RunSizes) -> dict[str, object]:
    """Batches whose rows are on two other nodes: vectors, 1 MiB and 7 MB."""
    large = {"batch_of_1_mib": (4096,), "batch_of_7_mb": PIXELS}
    with cluster(2) as nodes:
        found: dict[str, object] = {
            "vectors": _from_afar("vectors", VECTORS, None, sizes.steps, 16, nodes, folder, sizes)
        }
        for run, shape in large.items():
            schema = mr.Schema({"pixels": mr.Field(shape, "uint8")})
            rows = sizes.large_nbytes // int(np.prod(shape))
            found[run] = _from_afar(run, schema, shape, rows, 1, nodes, folder, sizes)
    return found


def _from_afar(
    run: str,
    schema: mr.Schema,
    shape: tuple[int, ...] | None,
    rows: int,
    per_call: int,
    nodes: Sequence[str],
    folder: Path,
    sizes: RunSizes,
) -> dict[str, object]:
    ray = import_module("ray")
    ray.get(
        [
            ray.remote(fill)
            .options(**on_node(node))
            .remote(run, schema, str(folder / str(number)), rows // 2, shape)
            for number, node in enumerate(nodes)
        ]
    )
    with ExitStack() as stack:
        stack.callback(mr.ray.stop, run)
        client = stack.enter_context(
            mr.ray.ReplayClient(
                run, mr.PrioritizedSampler(seed=0), (), BATCH, prefetch=AHEAD, per_call=per_call
            )
        )
        batch = next(client)
        nbytes = sum(tensor.nbytes for tensor in batch.fields.values())
        assert batch.buffer_ids is not None
        assert set(batch.buffer_ids.tolist()) == {0, 1}
        sides = {OURS: _learning(client)}
        share = per_call * nbytes // len(nodes)
        actors = [ray.remote(BareShard).options(**on_node(node)).remote(share) for node in nodes]
        sides[BARE] = _bare(actors, per_call)
        if peers_here():
            theirs = torchrl_buffer(rows, "LazyTensorStorage", on_node(nodes[0]))
            stack.callback(theirs.shutdown)
            size = min(rows, 400)
            for first in range(0, rows // size * size, size):
                theirs.extend(
                    transitions(400)
                    if shape is None
                    else tensordict({"pixels": block(first, size, shape)})
                )
            sides[TORCHRL] = theirs.sample
        calls = max(sizes.calls, 2 * per_call) // per_call * per_call
        times = race(sides, sizes.turns, calls, ahead=(AHEAD + 1) * per_call)
        for actor in actors:
            ray.kill(actor)
    result = compared(times)
    over_bare = float(np.median(times[OURS] / times[BARE]))
    return {"batch_nbytes": nbytes, "time_over_bare": rounded(over_bare), **result}


def _bare(actors: Sequence[Any], per_call: int) -> Side:
    """Batches of bare transfers: calls ahead, and a copy out of Ray's store."""
    ray = import_module("ray")
    waiting = [[actor.block.remote() for actor in actors] for _ in range(AHEAD)]
    left, kept = 0, []

    def turn() -> None:
        nonlocal left, kept
        if not left:
            waiting.append([actor.block.remote() for actor in actors])
            kept = [part.copy() for part in ray.get(waiting.pop(0))]
            left = per_call
        left -= 1

    return turn


# One ring against two.


def one_against_two(folder: Path, sizes: RunSizes) -> dict[str, object]:
    """Draw the same steps and priorities from one ring and from two.

    The priority of a step is a function of the step. Once all were updated, the counts
    of the steps drawn are held to their probabilities by a chi-squared test, and the
    two samples of priorities to each other by that of Kolmogorov and Smirnov. The rate
    is that of clients with the defaults, and with 4 batches a call; and with the
    defaults for rings of vectors and of pixels.
    """
    stats, rows = import_module("scipy.stats"), 4000
    schema = mr.Schema({"number": mr.Field((), "int64")})
    found: dict[str, object] = {}
    with cluster(), ExitStack() as stack:
        sides: dict[str, Side] = {}
        several: dict[str, Side] = {}
        drawn: dict[str, NDArray[np.int64]] = {}
        for rings in (1, 2):
            run = f"rings-{rings}"
            stack.callback(mr.ray.stop, run)
            for ring in range(rings):
                with mr.ray.writer(
                    run, schema, rows // rings, root=folder / "law", name=f"ring-{ring}"
                ) as writer:
                    first = ring * rows // rings
                    writer.extend(number=np.arange(first, first + rows // rings))
            sampler = mr.PrioritizedSampler(alpha=0.6, stratified=False, seed=rings)
            client = stack.enter_context(mr.ray.ReplayClient(run, sampler, (), BATCH, per_call=4))
            side = _updating(client, counts := np.zeros(rows, np.int64))
            # Steps that were not drawn yet are as likely as others, so a few hundred
            # batches of 256 draw all 4000, and update them; but for the newest of each
            # ring, which cannot be drawn while nothing follows it.
            for _ in range(400):
                side()
            can_be_drawn = counts > 0
            assert can_be_drawn.sum() >= rows - rings, can_be_drawn.sum()
            counts[:] = 0
            for _ in range(sizes.counted_batches):
                side()
            drawn[run] = counts.copy()
            single = stack.enter_context(mr.ray.ReplayClient(run, sampler, (), BATCH))
            sides[run] = _updating(single, np.zeros(rows, np.int64))
            several[run] = side
            masses = _priority(np.flatnonzero(can_be_drawn)).astype(np.float64) ** 0.6
            expected = masses / masses.sum() * counts.sum()
            found[f"{run}_chi_squared_p"] = rounded(
                float(stats.chisquare(counts[can_be_drawn], expected).pvalue)
            )
        one, two = (np.repeat(np.arange(rows), counts) for counts in drawn.values())
        kolmogorov = stats.ks_2samp(_priority(one), _priority(two))
        found["kolmogorov_smirnov_p"] = rounded(float(kolmogorov.pvalue))
        calls, ahead = 2 * sizes.calls, 4 * AHEAD + 1
        for kind, clients in (("", sides), ("_4_a_call", several)):
            times = race(clients, sizes.turns, calls, ahead=ahead)
            one_s, two_s = times.values()
            rate = float(np.median(one_s / two_s))
            found[f"rate_of_two_over_one{kind}"] = rounded(rate)
            found[f"median_us{kind}"] = medians_us(times)
    return found | _two_of_larger_rows(folder, sizes)


def _two_of_larger_rows(folder: Path, sizes: RunSizes) -> dict[str, object]:
    """The rate of two rings over that of one for vectors, and for pixels."""
    found: dict[str, object] = {}
    pixels = mr.Schema({"pixels": mr.Field(PIXELS, "uint8")})
    for kind, schema, shape, rows, calls in (
        ("vectors", VECTORS, None, sizes.steps, 2 * sizes.calls),
        ("pixels", pixels, PIXELS, sizes.large_nbytes // int(np.prod(PIXELS)), sizes.calls),
    ):
        with cluster(), ExitStack() as stack:
            sides: dict[str, Side] = {}
            for rings in (1, 2):
                run = f"{kind}-{rings}"
                stack.callback(mr.ray.stop, run)
                for ring in range(rings):
                    root, name = str(folder / "two"), f"ring-{ring}"
                    fill(run, schema, root, rows // rings, shape, name)
                sampler = mr.PrioritizedSampler(seed=0)
                client = mr.ray.ReplayClient(run, sampler, (), BATCH)
                side = _learning(stack.enter_context(client))
                for _ in range(sizes.calls):
                    side()
                sides[f"rings-{rings}"] = side
            times = race(sides, sizes.turns, calls, ahead=AHEAD + 1)
        one_s, two_s = times.values()
        rate = float(np.median(one_s / two_s))
        found[f"rate_of_two_over_one_{kind}"] = rounded(rate)
        found[f"median_us_{kind}"] = medians_us(times)
    return found


def _priority(numbers: NDArray[np.int64]) -> NDArray[np.float32]:
    """Between 0.1 and 10, in no order."""
    values: NDArray[np.float32] = 10 ** (2 * ((numbers * 0.618) % 1) - 1)
    return values.astype(np.float32)


def _updating(client: Any, counts: NDArray[np.int64]) -> Side:
    def turn() -> None:
        batch = next(client)
        numbers = batch["number"].numpy()
        np.add.at(counts, numbers, 1)
        client.update_priorities(batch, _priority(numbers))

    return turn


# Pixels beyond memory.


class OtherProcess:
    """A side in processes of its own, which does what this one writes, by line.

    Attributes:
        side: Its name.
        peak: The most memory that its processes had, bytes; see `look`.
        error: How it ended, where it died.
    """

    def __init__(self, module: str, side: str, *arguments: str) -> None:
        """Start it, and wait until it is ready."""
        self.side, self._mark, self.peak = side, uuid.uuid4().hex, 0
        self.error: str | None = None
        self._folder = tempfile.mkdtemp(prefix="r-", dir="/tmp")
        environment = os.environ | SETTINGS
        environment |= {MARK: self._mark, "RAY_TMPDIR": self._folder}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.ask("")

    def ask(self, line: str) -> dict[str, Any]:
        """Say a line and wait for the answer; it is empty where the side died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()
        for answer in self._process.stdout:
            if answer.startswith("{"):
                return dict(json.loads(answer))
        assert self._process.stderr is not None
        last = self._process.stderr.read().strip().splitlines()[-1:]
        self.error = f"ended with {self._process.wait()}: {''.join(last)[-300:]}"
        return {}

    def join(self, group: Group) -> None:
        """Put all its processes under a limit; what they have is not counted."""
        for number in processes_of(self._mark):
            with suppress(OSError):
                (group.folder / "cgroup.procs").write_text(str(number), "ascii")

    def look(self) -> None:
        """Note the memory of all its processes, where that is the most so far.

        That is what they hold for themselves: anonymous and shared, which holds Ray's
        object store.
        """
        total = 0
        for number in processes_of(self._mark):
            with suppress(OSError):
                rollup = Path(f"/proc/{number}/smaps_rollup").read_text("ascii")
                for line in rollup.splitlines():
                    # Divided by those that share it, so that each page counts once.
                    if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                        total += int(line.split()[1]) << 10
        self.peak = max(self.peak, total)

    def close(self) -> None:
        """End it, and what is left of it."""
        with suppress(Exception):
            self._process.communicate(timeout=60)
        while left := processes_of(self._mark):
            for number in left:
                with suppress(OSError):
                    os.kill(number, signal.SIGKILL)
            sleep(0.05)
        shutil.rmtree(self._folder, ignore_errors=True)


def processes_of(mark: str) -> list[int]:
    """Pids of the processes of a side."""
    variable, found = f"{MARK}={mark}".encode(), []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                if variable in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
    return found


def beyond_memory(folder: Path, sizes: RunSizes) -> dict[str, object]:
    """Batches of 256 x 28 KB where the ring has four times the limit of memory."""
    nbytes = int(np.prod(PIXELS))
    rows = 4 * sizes.limit_mib * MIB // nbytes // 64 * 64
    names = [OURS, TORCHRL] if peers_here() else [OURS]
    found: dict[str, object] = {"limit_mib": sizes.limit_mib, "ring_over_limit": 4}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        sides = []
        for name in names:
            group = stack.enter_context(limited(sizes.limit_mib * MIB, f"-{name}"))
            if group is None:
                return {"not_measured": "no cgroup can be made here"}
            path = folder / name
            side = OtherProcess("tools.bench.ray_runs", name, name, str(path), str(rows))
            stack.callback(side.close)
            side.join(group)
            side.ask("fill\n")
            sides.append(side)
        file = next(path for path in (folder / OURS).rglob("f*.bin") if "flags" not in path.name)
        bare: list[float] = []
        with Preadv(file, BATCH) as preadv:
            rng = np.random.default_rng(0)
            for turn in range(-1, sizes.beyond_turns):
                for side in sides if turn % 2 else reversed(sides):
                    answer = {} if side.error else side.ask(f"{sizes.seconds}\n")
                    if turn >= 0 and answer:
                        seconds[side.side].append(answer["seconds"])
                start = perf_counter()
                preadv.read(rng.integers(0, rows, BATCH))
                if turn >= 0:
                    bare.append(perf_counter() - start)
        errors = {side.side: side.error for side in sides if side.error}
    whole = {n: np.array(v) for n, v in seconds.items() if len(v) == sizes.beyond_turns}
    megabytes = BATCH * nbytes / 1e6
    return {
        **found,
        **({"died": errors} if errors else {}),
        "speedup": speedups(whole) if OURS in whole else {},
        "mb_per_s": {n: rounded(megabytes / float(np.median(t))) for n, t in whole.items()},
        "preadv_mb_per_s": rounded(megabytes / float(np.median(bare))),
    }


def beyond_side(side: str, folder: Path, rows: int) -> None:
    """Be a side: warm up, fill at the first line, draw for so many seconds a line."""
    make = {OURS: _ours_beyond, TORCHRL: _torchrl_beyond}[side]
    with cluster():
        extend, draw, close = make("small", folder / "small", BATCH)
        for first in range(0, BATCH, 64):
            extend(block(first, 64))
        draw()
        close()
        extend, draw, close = make("beyond", folder, rows)
        report({"ready": True})
        sys.stdin.readline()
        for first in range(0, rows, 64):
            extend(block(first, 64))
        report({"rows": rows})
        for line in sys.stdin:
            count, drawing, begun = 0, 0.0, perf_counter()
            while not count or perf_counter() - begun < float(line):
                start = perf_counter()
                drawn = draw()
                drawing += perf_counter() - start
                if not count:
                    check(drawn, side, 64)
                count += 1
            report({"seconds": drawing / count})
        close()


Made = tuple[Callable[[Pixels], object], Callable[[], Pixels], Callable[[], None]]


def _ours_beyond(run: str, folder: Path, rows: int) -> Made:
    schema = mr.Schema({"pixels": mr.Field(PIXELS, "uint8")})
    writer = mr.ray.writer(run, schema, rows, root=folder)
    clients: list[Any] = []
    rng = np.random.default_rng(0)

    def draw() -> Pixels:
        if not clients:
            sampler = mr.PrioritizedSampler(seed=0)
            clients.append(mr.ray.ReplayClient(run, sampler, (), BATCH, prefetch=AHEAD))
        batch = next(clients[0])
        values = rng.random(BATCH).astype(np.float32)
        clients[0].update_priorities(batch, values)
        pixels: Pixels = batch["pixels"].numpy()
        return pixels

    def close() -> None:
        for client in clients:
            client.close()
        writer.close()
        mr.ray.stop(run)

    return lambda rows: writer.extend(pixels=rows), draw, close


def _torchrl_beyond(_: str, folder: Path, rows: int) -> Made:
    folder.mkdir(parents=True, exist_ok=True)
    theirs = torchrl_buffer(rows, "LazyMemmapStorage", scratch_dir=str(folder))
    return (
        lambda rows: theirs.extend(tensordict({"pixels": rows})),
        lambda: np.asarray(theirs.sample()["pixels"]),
        theirs.shutdown,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=(OURS, TORCHRL))
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=int)
    options = parser.parse_args()
    beyond_side(options.side, options.folder, options.rows)
