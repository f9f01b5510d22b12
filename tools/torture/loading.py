"""Are a loader's batches those that were drawn, whatever happens to it meanwhile?

Each try makes small buffers, a sampler, transforms and a loader of its own at random,
and does to it what users do: a learner is slow or in a hurry, transforms and the device
fail, runs are stopped and go on from a state, loaders are closed, dropped or left, a
thread writes, clears and resizes, several buffers are drawn from as one, DataLoader's
workers take over. What `sample` gives of a twin is what has to come, in that order;
of a buffer that is written, whole steps of their places. Findings are a wrong batch, an
error that nobody caused, a thread that stays, and a hang, which ends the program with
the stacks of all threads. A try follows from the seed and its number alone:
``python -m tools.torture loading --seed 1 --first 7 --count 1``.
"""

from __future__ import annotations

import faulthandler
import gc
import threading
import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import mmreplay as mr
from mmreplay.errors import EmptyError, StarvedError
from tools.torture.loading_worlds import (
    KEEPING,
    SAMPLERS,
    TRANSFORMS,
    DeviceError,
    Random,
    World,
    block,
    buffers_of,
    check_steps,
    closed,
    next_batch,
    put_back,
    refuse_other,
    sampled,
    state_of,
)
from tools.torture.powerloss import Report

HANG_S = 120.0
ENDING_S = 10.0


class Pair:
    """A loader, and what is drawn from as it draws."""

    def __init__(self, rng: Random, folder: Path) -> None:
        self.rng = rng
        self.world = World.made(rng, folder, bool(rng.random() < 0.4))
        self.alone = self.world.opened()
        self.armed = [0]
        self.batches: list[tuple[Any, Any]] = []
        self.begin()

    def begin(self) -> None:
        """Open what the loader draws from, and make it."""
        self.drawn = self.world.opened()
        for buffer in buffers_of(self.drawn):
            _make_fail(buffer.view, self.armed)
        self.loader = mr.ReplayLoader(self.drawn, self.world.batch_size, **self.world.loading)

    def disturb(self) -> None:
        """Do to the loader what users do, or nothing."""
        what = self.rng.integers(20)
        if what == 0:
            self.armed[0] = 1
        elif what == 1:
            time.sleep(float(self.rng.random()) * 0.01)
        elif what == 2:
            state, other = self.loader.state_dict(), state_of(self.alone)
            for _ in range(int(self.rng.integers(0, 5))):
                next_batch(self.loader)
            self.armed[0] = 0
            self.loader.load_state_dict(state)
            put_back(self.alone, other)
        elif what == 3:
            state = self.loader.state_dict()
            self.armed[0] = 0
            self.loader.close()
            closed(self.drawn)
            self.begin()
            self.loader.load_state_dict(state)

    def step(self) -> None:
        """Compare the next batch."""
        found = next_batch(self.loader)
        expected = sampled(self.alone, self.world.batch_size)
        refuse_other(found, expected)
        if len(self.batches) < 3:
            self.batches.append((found, expected))

    def end(self) -> None:
        """End everything, in one way or another."""
        # What the learner kept is as it was.
        for found, expected in self.batches:
            refuse_other(found, expected)
        end(self.rng, self.loader)
        del self.loader
        closed(self.drawn)
        closed(self.alone)


def twin(rng: Random, folder: Path) -> str:
    """A loader over what nobody writes, against `sample`."""
    pair = Pair(rng, folder)
    for _ in range(int(rng.integers(5, 60))):
        pair.disturb()
        for _ in range(int(rng.choice([1, 1, 1, 25]))):
            pair.step()
    pair.end()
    return f"twin, {pair.world.sampler}"


def _make_fail(reader: Any, armed: list[int]) -> None:
    """Have one reader fail to copy when it is armed."""
    kind = type(reader)

    class Failing(kind):  # type: ignore[misc, valid-type]  # the kind at run time
        __slots__ = ()

        def copy_draw(self, draw: Any, *options: Any) -> Any:
            if armed[0]:
                armed[0] = 0
                raise DeviceError("a device")
            return super().copy_draw(draw, *options)

    reader.__class__ = Failing


def end(rng: Random, loader: Any) -> None:
    """End a loader in one of the ways that there are."""
    if rng.random() < 0.7:
        loader.close()
    elif rng.random() < 0.5:
        loader._finalizer()


class Actor:
    """A thread that writes, clears and resizes buffers."""

    def __init__(self, world: World) -> None:
        self.buffers = [mr.ReplayBuffer.open(path, "r+") for path in world.paths]
        self._rng = np.random.default_rng(world.seed)
        self._over = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.wait(float(self._rng.random()) * 0.004):
                self._act(self.buffers[self._rng.integers(len(self.buffers))])
        except BaseException as error:
            self._failed.append(error)

    def _act(self, buffer: mr.ReplayBuffer) -> None:
        what = self._rng.integers(50)
        if what == 0:
            buffer.clear()
        elif what == 1:
            buffer.resize(int(self._rng.integers(40, 120)))
        elif what == 2:
            buffer.commit()
        count = int(self._rng.integers(1, 30))
        first = int(buffer.heads[0])
        buffer.extend(block(first, count, buffer.num_envs))

    def stop(self) -> None:
        """End it, and raise what failed in it."""
        self._over.set()
        self._thread.join(HANG_S / 2)
        for buffer in self.buffers:
            buffer.close()
        if self._failed:
            raise self._failed[0]


def live(rng: Random, folder: Path) -> str:
    """A loader over what a thread writes, clears and resizes."""
    world = World.made(rng, folder, bool(rng.random() < 0.4))
    actor, drawn = Actor(world), world.opened(transforms=False)
    loader = mr.ReplayLoader(drawn, world.batch_size, **world.loading)
    try:
        for _ in range(int(rng.integers(20, 150))):
            _learn(rng, world, loader, actor.buffers[0].num_envs)
    finally:
        actor.stop()
        end(rng, loader)
        del loader
        closed(drawn)
    return f"live, {world.sampler}"


def _learn(rng: Random, world: World, loader: Any, num_envs: int) -> None:
    """Look at one batch, if there is one, and go on in some way."""
    try:
        batch = next(iter(loader), None)
    except (EmptyError, StarvedError):
        # Cleared, or overwritten faster than it can be read.
        return
    if batch is None:
        return
    check_steps(batch, num_envs)
    if world.sampler in KEEPING and rng.random() < 0.5:
        shape = batch.positions.shape if batch.mask is None else batch.mask.shape
        loader.update_priorities(batch, rng.random(tuple(shape)) + 0.1)
    if rng.random() < 0.05:
        loader.load_state_dict(loader.state_dict())


def workers(rng: Random, folder: Path) -> str:
    """Streams and datasets in DataLoader's workers, against one process."""
    world = World.made(rng, folder, bool(rng.random() < 0.5))
    if world.sampler in KEEPING or TRANSFORMS[world.transforms]() != []:
        world = _plain(world)
    several = len(world.paths) > 1
    size, batches = world.batch_size, int(rng.integers(1, 12))

    def stream() -> Any:
        if several:
            return mr.ConcatStream(world.opened(), size, batches)
        sampler = SAMPLERS[world.sampler](world.seed)
        return mr.ReplayStream(world.paths[0], sampler, size, batches)

    def loaded(made: Any, count: int) -> list[Any]:
        return list(DataLoader(made, batch_size=None, num_workers=count))

    alone = world.opened()
    expected = [sampled(alone, size) for _ in range(batches)]
    found = loaded(stream(), int(rng.integers(0, 3)))
    assert len(found) == batches
    for one, other in zip(found, expected, strict=True):
        refuse_other(one, other)
    half = stream()
    going = iter(DataLoader(half, batch_size=None, num_workers=int(rng.integers(0, 3))))
    done = int(rng.integers(1, batches + 1))
    for other in expected[:done]:
        refuse_other(next(going), other)
    state = half.state_after(done)
    del going
    rest = stream()
    rest.load_state_dict(state)
    found = loaded(rest, int(rng.integers(0, 3)))
    for one, other in zip(found, expected[done:], strict=True):
        refuse_other(one, other)
    closed(alone)
    return f"workers, {world.sampler}"


def _plain(world: World) -> World:
    """The same with what streams take."""
    return World(
        world.paths,
        "shuffled",
        world.seed,
        0,
        world.shares,
        world.reading,
        world.loading,
        world.batch_size,
    )


TRIES = (twin, twin, twin, live, live, workers)


def _ended(others: set[threading.Thread]) -> bool:
    """Whether all threads of loaders end but for some."""
    stop = time.monotonic() + ENDING_S
    # A collector of garbage may have closed one from its own thread.
    while set(loaders()) - others:
        if time.monotonic() > stop:
            return False
        time.sleep(0.001)
    return True


def loaders() -> list[threading.Thread]:
    """Threads that load."""
    return [t for t in threading.enumerate() if t.name == "mmreplay-load"]


def attack(
    count: int, seed: int, first: int = 0, seconds: float = 0.0, verbose: bool = False
) -> Report:
    """Make tries, and report what was found.

    Args:
        count: Tries, at least.
        seed: They follow from it and from their numbers.
        first: Number of the first.
        seconds: Go on for so long, whatever the count.
        verbose: Print each before it is made.
    """
    report, stop = Report(), time.monotonic() + seconds
    torch.set_num_threads(1)
    number = first
    while number < first + count or time.monotonic() < stop:
        if verbose:
            print(f"try {number}", flush=True)
        rng = np.random.default_rng([seed, number])
        running = set(loaders())
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            with TemporaryDirectory(prefix="loading-") as folder:
                kind = TRIES[rng.integers(len(TRIES))](rng, Path(folder))
                report.seen[kind] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            lines = traceback.format_exc().splitlines()
            told = " | ".join(line.strip() for line in lines[-8:])
            report.add([f"{type(error).__name__}: {told}"], f"try {number}")
        finally:
            faulthandler.cancel_dump_traceback_later()
        gc.collect()
        if not _ended(running):
            report.add(["a thread stays: after a try"], f"try {number}")
        report.states += 1
        number += 1
    return report
