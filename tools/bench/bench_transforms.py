"""How much faster are n-step returns, stacks and hindsight than the libraries' own?

Steps of 17 + 6 floats of episodes of 100, warm, 256 a draw, as torch tensors: three
steps folded; those with four observations stacked, drawn by priority and updated,
through a ReplayLoader; hindsight with goals of the future, four to one; and a plain
draw whose fields lie apart. Single frames of 84 x 84 bytes are stacked by four, beside
a bare take of the same 1,024 frames out of the same file. Ours come from the files'
mapping; peers hold everything in RAM. cpprb folds steps when they are added, so that
its draw is a plain one, and is given whole stacks where it folds them; the others
fold and stack when they draw, as ours does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from tools.bench import peers, transitions
from tools.bench import transform_peers as others
from tools.bench.transform_peers import ALPHA, BETA, GAMMA, Draw, K, N
from tools.bench.transitions import BLOCK, EPISODE, Columns
from tools.bench.turns import OURS, Side, medians_us, over_each, race, rounded, run_benchmark

TAKE = "np_take"
LATER = 20
"""Draws between ours and the bare take of the same frames, which would otherwise find
them in the processor's caches."""
CHECKED = 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        rows: Steps in a ring, whole episodes of all peers' environments.
        goals: Steps in the ring with goals, which its peer is given one by one.
        frames: Frames in a ring.
        turns: Bursts of each side.
        calls: Draws in a burst.
        batch: Steps in a draw.
    """

    rows: int = 1_000_000
    goals: int = 100_000
    frames: int = 30_000
    turns: int = 60
    calls: int = 20
    batch: int = 256


QUICK = Sizes(rows=20_000, goals=2_000, frames=2_000, turns=3, calls=3)


def measure(folder: Path, sizes: Sizes, names: list[str]) -> dict[str, object]:
    """Run all parts and return what is printed."""
    return {
        "rows": sizes.rows,
        "n_step": n_steps(folder, sizes, names),
        "stacked_frames": stacks(folder, sizes, names),
        "prioritized_n_step_stacked": everything(folder, sizes, names, False),
        "prioritized_n_step_stacked_frames": everything(folder, sizes, names, True),
        "her_future": hindsight(folder, sizes, names),
        "contiguous": contiguous(folder, sizes, names),
    }


@contextmanager
def filled(
    folder: Path, rows: int, data_of: Callable[[NDArray[np.int64]], Columns], **options: Any
) -> Iterator[mr.ReplayBuffer]:
    """A buffer of whole episodes, in a new folder within a folder."""
    first = data_of(np.arange(1))
    fields = {path: mr.Field(a.shape[1:], a.dtype) for path, a in first.items()}
    schema = mr.Schema(_nested(fields))
    place = Path(tempfile.mkdtemp(dir=folder)) / "buffer"
    with mr.ReplayBuffer.create(place, schema, rows, **options) as buffer:
        for begin in range(0, rows, 10 * EPISODE):
            numbers = np.arange(begin, min(begin + 10 * EPISODE, rows))
            buffer.extend(_nested(data_of(numbers)))
        yield buffer


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in fields.items():
        *tops, leaf = path.split("/")
        inner = found
        for top in tops:
            inner = inner.setdefault(top, {})
        inner[leaf] = value
    return found


def _race(
    sides: Mapping[str, Side], sizes: Sizes, ours: tuple[str, ...] = (OURS,)
) -> dict[str, object]:
    return over_each(race(sides, sizes.turns, sizes.calls, warm=3), ours)


def _side(draw: Draw, count: int) -> Side:
    return lambda: draw(count)


def n_steps(folder: Path, sizes: Sizes, names: list[str]) -> dict[str, object]:
    """Three steps folded."""
    folds = [mr.NStep(N, GAMMA)]
    with filled(folder, sizes.rows, others.vectors, transforms=folds) as buffer:
        others.check(buffer.sample(CHECKED).fields, OURS)
        sides: dict[str, Side] = {OURS: lambda: buffer.sample(sizes.batch).torch()}
        for name in names:
            if name in others.N_STEPS:
                draw = others.N_STEPS[name](sizes.rows)
                others.check(draw(CHECKED), name)
                sides[name] = _side(draw, sizes.batch)
        return _race(sides, sizes)


def stacks(folder: Path, sizes: Sizes, names: list[str]) -> dict[str, object]:
    """Four frames stacked: beside a bare take; and with the next ones, beside peers."""
    found: dict[str, object] = {}

    def pixels(numbers: NDArray[np.int64]) -> Columns:
        # No observation role, so that a draw reads this field alone, once.
        data = others.frames(numbers)
        return {"pixels": data["observation"], "terminated": data["terminated"]}

    stack = mr.FrameStack(K, "pixels")
    with filled(folder, sizes.frames, pixels, transforms=[stack]) as buffer:
        times = race(_take(buffer, sizes), sizes.turns, warm=LATER)
        found["over_the_bare_take"] = rounded(float(np.median(times[OURS] / times[TAKE])))
        found["frames_us"] = medians_us(times)
    stack = mr.FrameStack(K)
    # A final row an episode holds the frame after the last one.
    rows = sizes.frames
    with filled(folder, rows, others.frames, transforms=[stack]) as buffer:
        others.check(buffer.sample(CHECKED).fields, OURS, 1)
        sides: dict[str, Side] = {OURS: lambda: buffer.sample(sizes.batch).torch()}
        for name in names:
            if name in others.FRAMES:
                draw = others.FRAMES[name](rows)
                others.check(draw(CHECKED), name, 1)
                sides[name] = _side(draw, sizes.batch)
        return found | {"with_next_ones": _race(sides, sizes)}


def _take(buffer: mr.ReplayBuffer, sizes: Sizes) -> dict[str, Side]:
    """Our stacks, and a take of the frames of an earlier draw from the same file."""
    assert buffer.path is not None
    (file,) = (p for p in buffer.path.rglob("f*.bin") if p.name != "flags.bin")
    rows = np.memmap(file, np.uint8, "r").reshape(-1, 84, 84)
    # The first access to a page through a mapping is a page fault, cached or not.
    for first in range(0, sizes.frames, BLOCK):
        numbers = np.arange(first, min(first + BLOCK, sizes.frames))
        buffer.get_field("pixels", 0, numbers)
        rows[first : first + BLOCK].max()
    lags, out = np.arange(K - 1, -1, -1), np.empty((K * sizes.batch, 84, 84), np.uint8)
    # The same seed draws the same steps beforehand, so that their frames are known.
    same, frames = mr.UniformSampler(0), list[NDArray[np.int64]]()
    for _ in range(sizes.turns + LATER + 1):
        positions = same.draw(buffer.view, sizes.batch).positions
        begin = positions // EPISODE * EPISODE
        frames.append(np.maximum(positions[:, None] - lags, begin[:, None]).ravel())
    buffer.sampler = mr.UniformSampler(0)
    # Each take is of another draw: of two turns in a row both might be of the same.
    takes = iter(range(len(frames)))

    def sample() -> mr.Batch:
        return buffer.sample(sizes.batch)

    def take() -> None:
        np.take(rows, frames[max(0, next(takes) - LATER)], 0, out, "clip")

    batch = sample()
    take()
    if not np.array_equal(batch["pixels"].reshape(out.shape), out):
        raise AssertionError(f"{TAKE}: other frames than mmreplay's")
    return {OURS: sample, TAKE: take}


def everything(folder: Path, sizes: Sizes, names: list[str], pixels: bool) -> dict[str, object]:
    """Drawn by priority and updated, folded and stacked, through a loader."""
    rng = np.random.default_rng(0)
    pool = [rng.random(CHECKED).astype(np.float32) for _ in range(16)]
    turn = iter(range(1 << 60))

    def errors(count: int) -> NDArray[np.float32]:
        return pool[next(turn) % 16][:count]

    def steps(numbers: NDArray[np.int64]) -> Columns:
        data = others.frames(numbers) if pixels else others.vectors(numbers)
        data.pop("next_observation", None)
        return data

    rows = sizes.frames if pixels else sizes.rows
    with ExitStack() as stack:
        folds = [mr.NStep(N, GAMMA), mr.FrameStack(K)]
        sampler = mr.PrioritizedSampler(ALPHA, BETA, seed=0)
        buffer = stack.enter_context(filled(folder, rows, steps, transforms=folds, sampler=sampler))
        others.check(buffer.sample(CHECKED).fields, OURS)
        loader = stack.enter_context(mr.ReplayLoader(buffer, batch_size=sizes.batch))

        def ours() -> None:
            batch = next(loader)
            loader.update_priorities(batch, errors(sizes.batch))

        sides: dict[str, Side] = {OURS: ours}
        for name in names:
            if name in others.ALL:
                draw = others.ALL[name](rows, pixels, errors)
                others.check(draw(CHECKED), name)
                sides[name] = _side(draw, sizes.batch)
        # Batches that the loader made before a burst are not timed, and a burst is
        # longer than what it makes ahead.
        times = race(sides, sizes.turns, sizes.calls, warm=3, ahead=4)
        return over_each(times, (OURS,))


def hindsight(folder: Path, sizes: Sizes, names: list[str]) -> dict[str, object]:
    """Goals of the future, four relabelled to one as it is."""
    her = mr.HER("future", 0.8, others.reached)
    with filled(folder, sizes.goals, others.goals, transforms=[her]) as buffer:
        others.check_goals(buffer.sample(CHECKED).fields, OURS)
        sides: dict[str, Side] = {OURS: lambda: buffer.sample(sizes.batch).torch()}
        for name in names:
            if name in others.GOALS:
                draw = others.GOALS[name](sizes.goals)
                others.check_goals(draw(CHECKED), name)
                sides[name] = _side(draw, sizes.batch)
        return _race(sides, sizes)


def contiguous(folder: Path, sizes: Sizes, names: list[str]) -> dict[str, object]:
    """A plain draw, each field an array of its own."""
    blocks = sizes.rows // BLOCK
    with transitions.make(folder / "plain", blocks * BLOCK) as buffer:
        transitions.fill(buffer, blocks * BLOCK)
        drawn = buffer.sample(CHECKED, contiguous=True).torch()
        transitions.check(drawn.fields, OURS)
        sides: dict[str, Side] = {OURS: lambda: buffer.sample(sizes.batch, contiguous=True).torch()}
        if "cpprb" in names:
            peer = peers.build("cpprb", blocks * BLOCK, BLOCK)
            for number in range(blocks):
                peer.extend(peer.prepare(transitions.block(number * BLOCK)))
            transitions.check(peer.sample(CHECKED), "cpprb")
            sides["cpprb"] = lambda: peer.sample(sizes.batch)
        return _race(sides, sizes)


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(
        __doc__,
        lambda folder, options: measure(
            folder, QUICK if options.quick else Sizes(), others.installed(options.peers)
        ),
        one_torch_thread=True,
        numpy_seeded=True,
    )


if __name__ == "__main__":
    main()
