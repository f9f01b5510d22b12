"""Is no row used more often than it may, and no use lost but by a death?

A child draws with a `UseCounter` from one ring or two, in one of several ways, and
notes in shared memory each row that it was given, or that it acknowledged. Transforms
fail at random, loaders are closed with batches ahead and made again, and the parent
kills the child within 20 ms, at times while a store takes long. What the files count
then is never less than what was noted, or a row would be given twice, and no more than
that and one batch: the one that was being handed out is all that a death costs.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from mmreplay.errors import EmptyError
from mmreplay.samplers import priority_file
from tools.torture.powerloss import Report

SCHEMA = mr.Schema({"group": mr.Field((), "int64")})
ROWS = 2000
GROUP = 4
BATCH = 8
MAXIMUM = 2
MOST_S = 0.020
OPENING_S = 20.0
SLOW_S = 0.0005
FAILED = 3
USED = 0.7
"""Share of the uses that are made before rows are replaced by new ones."""

Counts = NDArray[np.int64]
HandedOut = tuple[int, NDArray[np.int64]]
"""Number of a ring, and positions in it."""


class TransformFailedError(Exception):
    """Raised by a transform, at random."""


def sample(rings: list[mr.ReplayBuffer], rng: np.random.Generator) -> Iterator[HandedOut]:
    """Batches of one ring."""
    while True:
        yield 0, rings[0].sample(BATCH).positions


def load(rings: list[mr.ReplayBuffer], rng: np.random.Generator) -> Iterator[HandedOut]:
    """Batches of loaders that are closed with batches ahead."""
    while True:
        ahead, threads = (int(rng.integers(1, 5)) for _ in range(2))
        with mr.ReplayLoader(rings[0], BATCH, prefetch=ahead, num_threads=threads) as loader:
            for _ in range(int(rng.integers(1, 10))):
                with suppress(TransformFailedError):
                    yield 0, next(iter(loader)).positions.numpy()


def sample_both(rings: list[mr.ReplayBuffer], rng: np.random.Generator) -> Iterator[HandedOut]:
    """Batches of two rings as one."""
    both = mr.concat(rings, shares=[1, 1])
    while True:
        batch = both.sample(BATCH)
        for number in range(len(rings)):
            yield number, batch.positions[batch.buffer_ids == number]


def load_both(rings: list[mr.ReplayBuffer], rng: np.random.Generator) -> Iterator[HandedOut]:
    """Batches of two rings as one, of loaders that are closed with batches ahead."""
    both = mr.concat(rings, shares=[1, 1])
    while True:
        with mr.ReplayLoader(both, BATCH, prefetch=int(rng.integers(1, 5))) as loader:
            for _ in range(int(rng.integers(1, 10))):
                with suppress(TransformFailedError):
                    batch = next(iter(loader))
                    for number in range(len(rings)):
                        mine = batch.positions[batch.buffer_ids == number]
                        yield number, mine.numpy()


def sample_groups(rings: list[mr.ReplayBuffer], rng: np.random.Generator) -> Iterator[HandedOut]:
    """Groups of two rings, now of one and now of the other."""
    while True:
        number = int(rng.integers(len(rings)))
        yield number, rings[number].sample(BATCH // GROUP).positions


def acknowledge(rings: list[mr.ReplayBuffer], rng: np.random.Generator) -> Iterator[HandedOut]:
    """Leased batches that were acknowledged, some of them out of order."""
    while True:
        batches = [rings[0].sample(BATCH) for _ in range(int(rng.integers(1, 4)))]
        for number in rng.permutation(len(batches)).tolist():
            if rng.random() < 0.7:
                rings[0].acknowledge(batches[number])
                yield 0, batches[number].positions


Way = Callable[[list[mr.ReplayBuffer], np.random.Generator], Iterator[HandedOut]]
GROUPS, ACKNOWLEDGED = "groups of two rings", "leases"
WAYS: dict[str, tuple[Way, int]] = {
    "draws": (sample, 1),
    "loader": (load, 1),
    "two rings": (sample_both, 2),
    "loader of two rings": (load_both, 2),
    GROUPS: (sample_groups, 2),
    ACKNOWLEDGED: (acknowledge, 1),
}
"""What draws, and from how many rings."""


class Learner:
    """Rings, and processes that draw from them in one way and are killed.

    Args:
        name: Of the way, of `WAYS`.
        folder: Where to make the rings.
        rng: Decides everything but the moment of death.
        report: Takes what is found.
    """

    def __init__(self, name: str, folder: Path, rng: np.random.Generator, report: Report) -> None:
        self.name, self.rng, self.report = name, rng, report
        self.way, count = WAYS[name]
        self.maximum = 1 if name == ACKNOWLEDGED else MAXIMUM
        self.paths = [folder / f"{name} {number}" for number in range(count)]
        self.shared = mmap.mmap(-1, 8 * (1 + count * ROWS))
        self.began = np.frombuffer(self.shared, np.int64, 1)
        noted = np.frombuffer(self.shared, np.int64, count * ROWS, 8)
        self.noted: Counts = noted.reshape(count, ROWS)
        self.life = 0
        for path in self.paths:
            with mr.ReplayBuffer.create(path, SCHEMA, ROWS) as ring:
                ring.extend(group=np.arange(ROWS) // GROUP)

    def kill(self) -> None:
        """Let a child draw, kill it, and check what it left."""
        self.life += 1
        seed = int(self.rng.integers(2**32))
        pid = os.fork()
        if pid == 0:
            self._draw(seed)
        deadline = time.monotonic() + OPENING_S
        while self.began[0] != self.life and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(float(self.rng.random()) * MOST_S)
        os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != -signal.SIGKILL:
            self._add([f"learner failed: it ended with {code}"])
        self._check()

    def _open(self, stack: ExitStack, transforms: list[mr.Apply]) -> list[mr.ReplayBuffer]:
        return [
            stack.enter_context(mr.ReplayBuffer.open(path, sampler=sampler, transforms=transforms))
            for path, sampler in zip(self.paths, self._samplers(), strict=True)
        ]

    def _samplers(self) -> list[mr.UseCounter]:
        inner: mr.UniformSampler | mr.GroupSampler = mr.UniformSampler()
        lease_s = 1000.0 if self.name == ACKNOWLEDGED else None
        if self.name == GROUPS:
            inner = mr.GroupSampler("group", GROUP)
        return [mr.UseCounter(self.maximum, inner, lease_s=lease_s) for _ in self.paths]

    def _draw(self, seed: int) -> None:
        """Draw until killed; never returns."""
        try:
            rng = np.random.default_rng(seed)
            if rng.random() < 0.5:
                _slow_down()

            def fail(fields: dict[str, object]) -> dict[str, object]:
                if rng.random() < 0.2:
                    raise TransformFailedError
                return fields

            with ExitStack() as stack:
                rings = self._open(stack, [mr.Apply(fail)])
                self._note(self.way(rings, rng), rings, rng)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(FAILED)

    def _note(
        self,
        handed_out: Iterator[HandedOut],
        rings: list[mr.ReplayBuffer],
        rng: np.random.Generator,
    ) -> None:
        firsts = [int(ring.span.first[0]) for ring in rings]
        while True:
            try:
                number, positions = next(handed_out)
            except TransformFailedError:
                handed_out = self.way(rings, rng)
                continue
            except EmptyError:
                self.began[0] = self.life
                time.sleep(MOST_S)
                continue
            np.add.at(self.noted[number], positions - firsts[number], 1)
            self.began[0] = self.life

    def _check(self) -> None:
        """Compare what the files count with what was noted."""
        lost = 0
        with ExitStack() as stack:
            for number, ring in enumerate(self._open(stack, [])):
                positions = int(ring.span.first[0]) + np.arange(ROWS)
                counter = ring.sampler
                assert isinstance(counter, mr.UseCounter)
                stored = counter.uses(ring.view, np.zeros(ROWS, int), positions)
                noted = self.noted[number]
                if (self.noted[number] > self.maximum).any():
                    self._add([f"used too often: {noted.max()} of {self.maximum}"])
                if (stored < noted).any():
                    self._add([f"forgotten: {(noted - stored).max()} uses of a row"])
                if (stored > self.maximum).any():
                    self._add([f"counted too often: {stored.max()}"])
                lost += int(np.maximum(0, stored - noted).sum())
                noted[:] = stored
        self.report.seen["uses that a death cost"] += lost
        if lost > BATCH:
            self._add([f"lost: {lost} uses by one death"])
        self.report.states += 1
        if self.noted.mean() > USED * self.maximum:
            self.renew()

    def renew(self) -> None:
        """Overwrite all rows by new ones, which have no use."""
        self.report.seen["uses"] += int(self.noted.sum())
        for path in self.paths:
            with mr.ReplayBuffer.open(path, "r+") as ring:
                first = int(ring.heads[0]) // GROUP
                ring.extend(group=first + np.arange(ROWS) // GROUP)
        self.noted[:] = 0

    def finish(self) -> None:
        """Draw all that is left, and see that each row is used just as often."""
        self.report.seen["uses"] += int(self.noted.sum())
        with ExitStack() as stack:
            for number, ring in enumerate(self._open(stack, [])):
                first = int(ring.span.first[0])
                with suppress(EmptyError):
                    # More batches than there are uses, where some are used up.
                    for _ in range(ROWS * MAXIMUM):
                        batch = ring.sample(100)
                        ring.acknowledge(batch)
                        np.add.at(self.noted[number], batch.positions - first, 1)
        # A group of which a death cost a use is complete no more often than that row.
        wanted = self.noted.reshape(len(self.paths), -1, GROUP)
        short = wanted.max(2) < self.maximum
        if self.name != GROUPS:
            short = self.noted != self.maximum
        if short.any() or (self.noted > self.maximum).any():
            self._add([f"left: {int(short.sum())} rows or groups could not be drawn"])

    def _add(self, lines: list[str]) -> None:
        self.report.add(lines, f"{self.name}, life {self.life}")


def _slow_down() -> None:
    """Have each store of counts take long, so that deaths come before and after it."""
    store = priority_file.PriorityFile.store

    def slow(
        self: priority_file.PriorityFile,
        rows: NDArray[np.int64],
        numbers: NDArray[Any] | np.generic,
    ) -> None:
        time.sleep(SLOW_S)
        store(self, rows, numbers)
        time.sleep(SLOW_S)

    priority_file.PriorityFile.store = slow  # type: ignore[method-assign]  # in the child


def attack(kills: int, seed: int, ways: tuple[str, ...] = tuple(WAYS)) -> Report:
    """Kill learners that count uses, in each way in turn.

    Args:
        kills: Of learners, in all.
        seed: Decides what they do; when a kill strikes is up to the machine.
        ways: Of `WAYS`.
    """
    rng, report = np.random.default_rng(seed), Report()
    root = Path(tempfile.mkdtemp(prefix="torture-"))
    try:
        learners = [Learner(name, root, rng, report) for name in ways]
        for number in range(kills):
            learners[number % len(learners)].kill()
        for learner in learners:
            learner.finish()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return report
