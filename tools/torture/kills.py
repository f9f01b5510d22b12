"""Does every opening after a SIGKILL show what was published, bit by bit?

A child process writes at random and notes in shared memory what each call that
returned had published; the parent kills it within 30 ms, or a second where heaps are
to lap under shards, and opens what is left.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np

from mmreplay.buffer.copy_files import snapshot
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import EmptyError, ReplayError, StaleError, StarvedError
from tools.torture.groups import GroupRows
from tools.torture.powerloss import Report, abandon, rows_of_group
from tools.torture.rows import GEOMETRIES, Array, Geometry, faults, group_faults, mixtures
from tools.torture.scribe import Notes, Scribe, broken_closing, broken_promises, broken_sums

MOST_S = 0.030
# A heap whose values go to shards waits for their syncs: it laps where writers live on.
MOST_SHARDED_HEAP_S = 1.0
# How many of the children are killed only after they opened, and not on the way.
OPENED = 0.8
OPENING_S = 5.0
# Often enough that kills land in commits and durable limits too.
COMMIT_EVERY_S = 0.002
# How many of the compressed buffers opened for writing are closed in order.
CLOSED = 0.5
FAILED = 3
BATCH = 64
# Fewer rows where each costs a sync, so that laps are many there too.
SCALES = (4, 1)
HEADER = 16


class Victim:
    """One buffer whose writers are killed.

    Args:
        geometry: Of the buffer.
        path: Where to make it.
        rng: Decides everything but the moment of death.
        report: Takes what is found.
    """

    def __init__(
        self, geometry: Geometry, path: Path, rng: np.random.Generator, report: Report
    ) -> None:
        self.geometry = geometry
        self.path = path
        self.rng = rng
        self.report = report
        notes = Notes.nbytes(geometry.num_envs)
        # The lineage that began, the heads it began at, and the notes.
        self.shared = mmap.mmap(-1, HEADER + 8 * geometry.num_envs + notes)
        self.began = np.frombuffer(self.shared, np.int64, 1)
        self.heads = np.frombuffer(self.shared, np.int64, geometry.num_envs, HEADER)
        memory = memoryview(self.shared)[HEADER + 8 * geometry.num_envs :]
        self.notes = Notes.over(memory, geometry.num_envs)
        self.starts: list[tuple[int, Array]] = []
        self.lineage = 0
        self.copy = path.with_name(f"{path.name} copied")
        self.snapped = False
        in_shards = geometry.engine == "zarr" and geometry.heap_bytes is not None
        self.most_s = MOST_SHARDED_HEAP_S if in_shards else MOST_S
        # Bytes that each heap was written forward by, of all writers.
        shared = mmap.mmap(-1, 8 * geometry.num_envs)
        self.heap_written = np.frombuffer(shared, np.int64)
        ReplayBuffer.create(
            path,
            geometry.schema,
            geometry.capacity,
            geometry.num_envs,
            heap_bytes=geometry.heap_bytes,
            engine=geometry.engine,
            layout=geometry.layout,
            autoreset="same_step",
            commit_every=None,
        ).close()

    def point(self) -> None:
        """Let a child write, kill it, and check what it left."""
        self.lineage += 1
        seed = int(self.rng.integers(2**32))
        pid = os.fork()
        if pid == 0:
            self._write(seed)
        if self.rng.random() < OPENED:
            self._await_opening(pid)
        self._wait(float(self.rng.random()) * self.most_s)
        os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != -signal.SIGKILL:
            self._add([f"writer failed: it ended with {code}"])
        if self.began[0] == self.lineage:
            self.starts.append((self.lineage, self.heads.copy()))
        self._look()
        self._check_copy()

    def _await_opening(self, pid: int) -> None:
        """Let the child open the buffer, however busy the machine is."""
        deadline = time.monotonic() + OPENING_S
        while self.began[0] != self.lineage and time.monotonic() < deadline:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
            time.sleep(0.0005)

    def _wait(self, seconds: float) -> None:
        """Let the child live, watching it as a reader half of the time."""
        deadline = time.monotonic() + seconds
        draw = self.rng.random()
        if draw < 0.15:
            self._snap()
        if draw < 0.5:
            time.sleep(max(0.0, deadline - time.monotonic()))
            return
        try:
            with ReplayBuffer.open(self.path, "r") as buffer:
                while time.monotonic() < deadline:
                    self._draw(buffer)
        except (StaleError, StarvedError) as error:
            self.report.seen[f"live {type(error).__name__}"] += 1
        except (ReplayError, AssertionError, ValueError) as error:
            self._add([f"live reader failed: {type(error).__name__} {error}"])

    def _snap(self) -> None:
        """Take a snapshot from under the writer's hands, to be looked at later."""
        shutil.rmtree(self.copy, ignore_errors=True)
        try:
            made = snapshot(self.path, self.copy, pause=self.rng.random() < 0.5)
        except StarvedError as error:
            self.report.seen[f"snapshot {type(error).__name__}"] += 1
        except (ReplayError, AssertionError, ValueError) as error:
            self._add([f"snapshot failed: {type(error).__name__} {error}"])
        else:
            self.report.seen["snapshots"] += 1
            self.report.seen["snapshot rows"] += made.rows
            self.report.seen["snapshot rows cut"] += made.cut_rows
            self.snapped = True

    def _check_copy(self) -> None:
        """Every row of the last snapshot is right, and of its sums none is wrong."""
        if not self.snapped:
            return
        self.snapped = False
        with ReplayBuffer.open(self.copy, "r") as buffer:
            lines = faults(buffer, self.geometry, self.starts)
            lines += broken_sums(buffer, self.rng)
        self._add([f"snapshot: {line}" for line in lines])

    def _draw(self, buffer: ReplayBuffer) -> None:
        """Check a batch drawn from under the writer's hands."""
        try:
            batch = buffer.sample(BATCH)
        except EmptyError:
            return
        self.report.seen["live rows"] += BATCH
        self._add(mixtures(batch.fields, batch.env_ids, batch.positions, self.geometry))

    def _write(self, seed: int) -> None:
        """Open and write until killed; never returns."""
        try:
            buffer = ReplayBuffer.open(self.path, "r+", commit_every=COMMIT_EVERY_S)
            rng = np.random.default_rng(seed)
            scribe = Scribe(buffer, self.geometry, self.lineage, self.notes, rng, 0.01)
            self.heads[:] = buffer.heads
            self.began[0] = self.lineage
            heaps = buffer.view.heap_heads
            while True:
                scribe.step()
                heaps = self._note_heaps(buffer, heaps)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(FAILED)

    def _look(self) -> None:
        """Open for reading, and every third time for writing too."""
        try:
            group = rows_of_group(self.path, self.geometry, self.report)
            heads = self._opened("r")
            if group is not None:
                self._compare(group, heads)
            if self.rng.random() < 0.3:
                self._opened("r+")
                if self.geometry.engine == "zarr" and self.rng.random() < CLOSED:
                    self._close()
        except (ReplayError, AssertionError, ValueError) as error:
            self._add([f"failed: {type(error).__name__} {error}"])
            return
        self.notes.acked[:] = heads
        self.report.states += 1

    def _opened(self, mode: str) -> Array:
        if mode == "r":
            buffer = ReplayBuffer.open(self.path, "r")
        else:
            buffer = ReplayBuffer.open(self.path, "r+", commit_every=None)
        notes = self.notes
        low, high, removed = notes.acked, notes.attempted, notes.removed
        self._add(broken_promises(buffer, notes, low, high, removed))
        self._add(faults(buffer, self.geometry, self.starts))
        self._add(broken_sums(buffer, self.rng))
        self.report.seen[f"how {buffer.recovery.how}"] += 1
        self.report.seen["rows"] += int(buffer.span.lengths.sum())
        notes.tails[:] = np.maximum(notes.tails, buffer.span.first)
        heads = buffer.heads
        abandon(buffer)
        return heads

    def _note_heaps(self, buffer: ReplayBuffer, before: Array | None) -> Array | None:
        """Note how far a step wrote the heaps, which a resize begins again."""
        after = buffer.view.heap_heads
        if before is not None and after is not None:
            self.heap_written += np.maximum(after - before, 0)
        return after

    def _compare(self, group: GroupRows, heads: Array) -> None:
        """What is told was written; and nothing that was published is ever cut."""
        self._add(group_faults(group, self.geometry, self.starts, heads))
        if (group.stop > heads).any():
            self._add([f"group invented: stop {group.stop}, heads {heads}"])

    def _close(self) -> None:
        """Close in order for once, so that the group has rows to tell."""
        buffer = ReplayBuffer.open(self.path, "r+", commit_every=None)
        span, seal = buffer.span, bool(self.rng.random() < 0.5)
        buffer.close(seal)
        self.report.seen["closed"] += 1
        group = rows_of_group(self.path, self.geometry, self.report)
        self._add(broken_closing(group, span, seal))
        if group is not None:
            self._compare(group, span.stop)

    def _add(self, lines: list[str]) -> None:
        self.report.add(lines, f"{self.geometry.name}, lineage {self.lineage}")


def _smaller(geometry: Geometry, scale: int) -> Geometry:
    return replace(geometry, capacity=geometry.capacity // scale)


def attack(
    points: int, seed: int, until_found: bool = False, geometries: tuple[Geometry, ...] = GEOMETRIES
) -> Report:
    """Kill writers of every geometry in turn, and check what they leave.

    Half of the buffers lie in memory, where syncs cost nothing and laps are many,
    half on the disk of temporary files, where kills land in syncs.

    Args:
        points: Kills.
        seed: Equal seeds write alike; when a kill strikes is up to the machine.
        until_found: Stop at the first finding.
        geometries: Buffers to attack.
    """
    rng = np.random.default_rng(seed)
    report = Report()
    places = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    roots = [
        Path(tempfile.mkdtemp(prefix="torture-", dir=place)) for place in places if place.is_dir()
    ]
    try:
        victims = [
            Victim(_smaller(geometry, scale), root / geometry.name, rng, report)
            for root, scale in zip(roots, SCALES, strict=False)
            for geometry in geometries
        ]
        for point in range(points):
            victims[point % len(victims)].point()
            if until_found and report.findings:
                break
        laps = [v.notes.acked.max() // v.geometry.capacity for v in victims]
        report.seen["laps"] = int(sum(laps))
        every = [
            victim.heap_written // victim.geometry.heap_bytes
            for victim in victims
            if victim.geometry.heap_bytes is not None
        ]
        if every:
            report.seen["heap laps"] = int(np.concatenate(every).sum())
            report.seen["heap laps of the slowest"] = int(np.concatenate(every).min())
    finally:
        for root in roots:
            shutil.rmtree(root, ignore_errors=True)
    return report
