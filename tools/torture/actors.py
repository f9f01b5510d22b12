"""Do eight writers and one learner get along while writers are killed at random?

Each actor writes a buffer of its own and notes in shared memory what was published;
a learner draws from all of them through `concat`, with priorities, and gives new ones.
Meanwhile a random actor is killed and another takes its place. Held against the notes:
nothing published is lost, no row drawn mixes two writes or is another buffer's, the
lock dies with its owner, and a second writer is told who holds it.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import mmreplay as mr
from mmreplay.errors import EmptyError, LockedError
from tools.torture.powerloss import Report
from tools.torture.rows import Array, Geometry, content, mixtures

NUM_ACTORS = 8
GEOMETRY = Geometry("actor", 300, 2, "env_major", large=False)
BATCH = 128
BLOCK = 5
LIVES = 1000
"""Lineages of one actor's writers; the number of the actor stands above."""
MOST_S = 0.03
OPENING_S = 30.0
PAUSE_S = 0.0005
FAILED = 3


class Actor:
    """One buffer and the process that writes it.

    Args:
        number: Of the actor.
        path: Of its buffer, which is made.
    """

    def __init__(self, number: int, path: Path) -> None:
        self.number = number
        self.path = path
        self.life = 0
        self.pid = 0
        shared = mmap.mmap(-1, 8 * (1 + GEOMETRY.num_envs))
        self.began = np.frombuffer(shared, np.int64, 1)
        self.acked = np.frombuffer(shared, np.int64, GEOMETRY.num_envs, 8)
        mr.ReplayBuffer.create(
            path,
            GEOMETRY.schema,
            GEOMETRY.capacity,
            GEOMETRY.num_envs,
            layout=GEOMETRY.layout,
            autoreset="same_step",
        ).close()

    def start(self) -> None:
        """Let a new process write, and wait until it has begun."""
        self.life += 1
        self.pid = os.fork()
        if self.pid == 0:
            self._write()
        deadline = time.monotonic() + OPENING_S
        while self.began[0] != self.life and time.monotonic() < deadline:
            time.sleep(PAUSE_S)

    def _write(self) -> None:
        """Open and write until killed; never returns."""
        try:
            lineage = LIVES * self.number + self.life
            env_ids = np.tile(np.arange(GEOMETRY.num_envs), BLOCK)
            lineages = np.full(len(env_ids), lineage)
            lead = (BLOCK, GEOMETRY.num_envs)
            with mr.ReplayBuffer.open(self.path, "r+", commit_every=0.01) as buffer:
                while True:
                    steps = buffer.heads + np.arange(BLOCK)[:, None]
                    made = content(GEOMETRY, env_ids, steps.ravel(), lineages)
                    buffer.extend({p: c.reshape(*lead, *c.shape[1:]) for p, c in made.items()})
                    self.acked[:] = buffer.heads
                    self.began[0] = self.life
                    time.sleep(PAUSE_S)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(FAILED)

    def refuses(self) -> list[str]:
        """Ask to write beside it, which must be refused with its number."""
        try:
            mr.ReplayBuffer.open(self.path, "r+").close()
        except LockedError as error:
            named = f"pid {self.pid} on" in str(error)
            return [] if named else [f"holder: {error}"]
        return ["lock: a second writer was let in"]

    def kill(self) -> list[str]:
        """End the process as it stands, and say what it lost."""
        os.kill(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        faults = [] if code == -signal.SIGKILL else [f"writer failed: ended with {code}"]
        with mr.ReplayBuffer.open(self.path) as buffer:
            if (buffer.heads < self.acked).any():
                faults.append(f"lost: heads {buffer.heads} of {self.acked}")
            if buffer.recovery.how != "killed":
                faults.append(f"recovery: {buffer.recovery.how}")
        return faults


def learn(both: mr.Concat, report: Report) -> list[str]:
    """Draw a batch, check it, and give its rows priorities."""
    try:
        batch = both.sample(BATCH)
    except EmptyError:
        return []
    faults = mixtures(batch.fields, batch.env_ids, batch.positions, GEOMETRY)
    origins: Array = batch.fields["origin"].astype(np.int64)
    assert batch.buffer_ids is not None
    if (origins[:, 2] // LIVES != batch.buffer_ids).any():
        faults.append("other buffer: a row says that it is of another one")
    values = 0.1 + batch.fields["reward"] % 7
    report.seen["rows"] += BATCH
    report.seen["priorities too late"] += both.update_priorities(batch, values)
    return faults


def attack(kills: int, seed: int) -> Report:
    """Let actors write and be killed while a learner draws.

    Args:
        kills: Of actors, in all.
        seed: Decides who is killed and how long is waited, not what strikes where.
    """
    rng, report = np.random.default_rng(seed), Report()
    root = Path(tempfile.mkdtemp(prefix="torture-"))
    actors = [Actor(number, root / f"actor-{number}") for number in range(NUM_ACTORS)]
    try:
        with ExitStack() as stack:
            both = _learner(actors, stack)
            for actor in actors:
                actor.start()
            for number in range(kills):
                where = f"kill {number}"
                stop = time.monotonic() + MOST_S * float(rng.random())
                while True:
                    report.add(learn(both, report), where)
                    if time.monotonic() > stop:
                        break
                victim = actors[int(rng.integers(NUM_ACTORS))]
                report.add(victim.refuses(), where)
                report.add(victim.kill(), where)
                victim.start()
                report.states += 1
    finally:
        for actor in actors:
            if actor.pid:
                report.add(actor.kill(), "end")
        report.seen["laps"] = _laps(actors)
        report.add(_damage(actors), "end")
        shutil.rmtree(root, ignore_errors=True)
    return report


def _learner(actors: list[Actor], stack: ExitStack) -> mr.Concat:
    sources = [
        mr.ReplayBuffer.open(actor.path, sampler=mr.PrioritizedSampler(seed=0, name="learner"))
        for actor in actors
    ]
    for source in sources:
        stack.enter_context(source)
    return mr.concat(sources, seed=0)


def _laps(actors: list[Actor]) -> int:
    return int(sum(actor.acked.min() // GEOMETRY.capacity for actor in actors))


def _damage(actors: list[Actor]) -> list[str]:
    reports = [mr.verify_buffer(actor.path) for actor in actors]
    return [f"damage: {report.findings}" for report in reports if not report.ok]
