"""Does every opening after a power cut show what was committed, and only that?

The real buffer over `SimulatedDisk`: sessions of random calls, each cut at a random
call of the disk (recovery included), as a dying machine, a killed process or not
at all; then the folder is what the disk could hold, and the next session opens it.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import numpy as np

from mmreplay import process
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import ReplayError
from mmreplay.testing.disks import using
from tools.torture.groups import GroupRows, group_of, read_group
from tools.torture.power import PowerCut, SimulatedDisk
from tools.torture.rows import GEOMETRIES, Array, Geometry, faults, group_faults
from tools.torture.scribe import Notes, Scribe, broken_closing, broken_promises, broken_sums
from tools.torture.values import Values

SESSIONS = 12
"""Crashes of one buffer before a fresh one is taken."""
OPENING_CALLS = 30
"""About as many as an opening makes."""
SLOT_CALLS = (12, 22)
"""Those of an opening among which COMMIT's slots are written and synced."""
WEIGHTS = (0.4, 0.2, 0.35, 0.05)
CLOSINGS = (0.003, 0.003, 0.03, 0.3)
"""How likely a session closes at each of its steps; the first where no group tells."""


@dataclass(slots=True)
class Report:
    """What an attack found.

    Attributes:
        states: Openings that were checked.
        findings: How often each kind of fault was seen.
        examples: The first line of each kind.
        seen: How often each thing that is no fault happened.
    """

    states: int = 0
    findings: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def add(self, lines: list[str], where: str) -> None:
        """Count findings, each told as ``kind: details``."""
        for line in lines:
            kind = line.partition(":")[0]
            self.findings[kind] += 1
            self.examples.setdefault(kind, f"{where}: {line}")

    def join(self, other: Report) -> None:
        """Take what another one found too."""
        self.states += other.states
        self.findings += other.findings
        self.seen += other.seen
        self.examples = other.examples | self.examples


def abandon(buffer: ReplayBuffer) -> None:
    """Let go of a buffer as a dead process does: nothing is committed."""
    parts = buffer._files
    buffer._finalizer.detach()
    parts.closed = True
    parts.commit.close()
    parts.store.close()
    if parts.lock is not None:
        parts.lock.release()


def rows_of_group(path: Path, geometry: Geometry, report: Report) -> GroupRows | None:
    """What a buffer's group tells other readers; None where there is none, or no row.

    It is read beside `files.disk`: no call of a simulated one is counted.
    """
    if geometry.engine != "zarr":
        return None
    told = read_group(group_of(path))
    report.seen["group silent" if told is None else "group tells"] += 1
    report.seen["group rows"] += 0 if told is None else len(told.positions)
    return told


class Trial:
    """One buffer and its crashes.

    Args:
        geometry: Of the buffer.
        folder: An empty working folder, the simulated disk.
        rng: Decides everything.
        report: Takes what is found.
    """

    def __init__(
        self, geometry: Geometry, folder: Path, rng: np.random.Generator, report: Report
    ) -> None:
        self.geometry = geometry
        self.folder = folder
        self.path = folder / "buffer"
        self.rng = rng
        self.report = report
        self.notes = Notes.blank(geometry.num_envs)
        self.values = Values()
        self.starts: list[tuple[int, Array]] = []
        self.killed = False
        self.boot_id = rng.bytes(16)
        ReplayBuffer.create(
            self.path,
            geometry.schema,
            geometry.capacity,
            geometry.num_envs,
            heap_bytes=geometry.heap_bytes,
            engine=geometry.engine,
            layout=geometry.layout,
            autoreset="same_step",
            commit_every=None,
        ).close()
        self.disk = SimulatedDisk(folder)
        self.scribe: Scribe | None = None
        self._open_checked = False
        self.early_crashes = False

    def session(self) -> bool:
        """Open, check, write, crash; False once something is wrong."""
        self.disk.calls_left = self._calls()
        self.disk.share = float(self.rng.random())
        self.scribe = None
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(process, "boot_id", return_value=self.boot_id))
            stack.enter_context(using(self.disk))
            try:
                lines = self._live()
            except PowerCut:
                lines = []
            except (ReplayError, AssertionError, ValueError, OSError) as error:
                # Where the thread that seals met the cut, an add says so by an error.
                cut = isinstance(error.__cause__, PowerCut)
                self.report.states += not cut
                lines = [] if cut else [f"failed: {type(error).__name__} {error}"]
            self._let_go()
        self.report.add(lines, self._where())
        self._crash()
        return not lines

    def _let_go(self) -> None:
        if self.scribe is not None:
            abandon(self.scribe.buffer)

    def _where(self) -> str:
        how = "kill" if self.killed else "power"
        return f"{self.geometry.name}, lineage {len(self.starts)}, after {how}"

    def _calls(self) -> int:
        """Where the cut comes: in recovery, soon, or after laps."""
        if self.early_crashes and self.rng.random() < 0.5:
            return int(self.rng.integers(*SLOT_CALLS))
        most = (OPENING_CALLS, 60) if self.early_crashes else (OPENING_CALLS, 60, 600)
        return int(self.rng.integers(1, int(self.rng.choice(most))))

    def _live(self) -> list[str]:
        told = rows_of_group(self.path, self.geometry, self.report)
        heads = self._peek()
        buffer = ReplayBuffer.open(self.path, "r+", commit_every=None)
        scribe = Scribe(
            buffer,
            self.geometry,
            len(self.starts) + 1,
            self.notes,
            self.rng,
            commit_chance=float(self.rng.choice([0.01, 0.1, 0.3])),
            values=self.values,
        )
        self.scribe = scribe
        lines = self._checked(buffer)
        if heads is not None and (heads != buffer.heads).any():
            lines.append(f"reader disagrees: {heads}, writer {buffer.heads}")
        if told is not None:
            lines += group_faults(told, self.geometry, self.starts, buffer.heads)
        if lines:
            return lines
        self.starts.append((scribe.lineage, buffer.heads))
        self.disk.on_call = self._add_meanwhile
        try:
            return self._written(scribe)
        finally:
            self.disk.on_call = None

    def _written(self, scribe: Scribe) -> list[str]:
        """Write until it is time to close, and look at what the group tells then."""
        sharded = self.geometry.engine == "zarr"
        # What a group tells is worth a look between a close and the next one.
        chance = float(self.rng.choice(CLOSINGS)) if sharded else CLOSINGS[0]
        while self.rng.random() > chance:
            scribe.step()
        span = scribe.buffer.span
        seal = not sharded or bool(self.rng.random() < 0.5)
        scribe.close(seal)
        self.report.seen["closed"] += 1
        if not sharded:
            return []
        told = rows_of_group(self.path, self.geometry, self.report)
        lines = broken_closing(told, span, seal)
        if told is not None:
            lines += group_faults(told, self.geometry, self.starts, span.stop)
        return lines

    def _peek(self) -> Array | None:
        """Heads as a reader sees them, who opens without writing."""
        if self.rng.random() < 0.8:
            return None
        calls, self.disk.calls_left = self.disk.calls_left, None
        buffer = ReplayBuffer.open(self.path, "r")
        heads = buffer.heads
        abandon(buffer)
        self.disk.calls_left = calls
        return heads

    def _checked(self, buffer: ReplayBuffer) -> list[str]:
        notes = self.notes
        low, high = notes.committed, notes.committing
        if self.killed:
            low, high = notes.acked, notes.attempted
        gone = notes.removed if self.killed else notes.buried
        lines = broken_promises(buffer, notes, low, high, gone)
        lines += self.values.broken(buffer, self.geometry, killed=self.killed)
        lines += faults(buffer, self.geometry, self.starts)
        lines += broken_sums(buffer, self.rng)
        self._open_checked = True
        self.report.states += 1
        self.report.seen[f"how {buffer.recovery.how}"] += 1
        self.report.seen["rows"] += int(buffer.span.lengths.sum())
        notes.acked[:] = buffer.heads
        # What was given up once stays so, whatever ring comes later.
        notes.tails[:] = np.maximum(notes.tails, buffer.span.first)
        if not self.killed:
            # What was not committed is gone for good, and will not come back.
            notes.committed[:] = notes.committing[:] = buffer.heads
            notes.removed[:] = notes.buried
        return lines

    def _add_meanwhile(self, name: str) -> None:
        """Add while a commit waits for the disk, as another thread would."""
        scribe = self.scribe
        if name != "datasync" or scribe is None or not scribe.busy:
            return
        if threading.get_ident() != threading.main_thread().ident:
            return
        committer = scribe.buffer._files.committer
        assert committer is not None
        if self.rng.random() < 0.5:
            return
        count = int(self.rng.integers(1, 4))
        if scribe.commits_at_adds:
            # A row whose values find no space in the heap would wait for this commit.
            values = scribe.buffer._appender()._values
            assert values is not None
            free = values._space.free_until - values.heap_heads
            longest = self.geometry.schema.max_heap_nbytes
            # A step and its final row, and what is skipped where the ring ends.
            if (free < (2 * count + 1) * longest).any():
                return
        if committer._slot_lock.locked():
            # A row whose values find no space in the heap would wait for it, too.
            if self.geometry.heap_bytes is not None:
                return
            # With a slot being written, an add that wants one would wait for it; one
            # step and its final row may find room below the limit.
            ledger = committer._commit_state
            if (ledger.committed.limits - ledger.heads < 2).any():
                return
            count = 1
        scribe.busy = False
        for _ in range(count):
            scribe.add()
        scribe.busy = True

    def _crash(self) -> None:
        checked, self._open_checked = self._open_checked, False
        if self.rng.random() < (0.5 if self.early_crashes else 0.3):
            # A kill after a power cut that nobody has looked at since is one still.
            self.killed = self.killed or checked
            self.disk.revive()
            return
        self.killed = False
        self.disk.crash(self.folder, self.rng)
        self.disk = SimulatedDisk(self.folder)
        self.boot_id = self.rng.bytes(16)


def attacks(states: int, seed: int, jobs: int, geometries: tuple[Geometry, ...]) -> Report:
    """Share an attack among processes; see `attack`.

    Args:
        states: Openings to check, of all together.
        seed: With the number of a process, the seed of its part.
        jobs: Processes.
        geometries: Buffers to attack.
    """
    report = Report()
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        parts = [
            pool.submit(attack, states // jobs, (seed, job), geometries) for job in range(jobs)
        ]
        for share in parts:
            report.join(share.result())
    return report


def attack(
    states: int,
    seed: int | tuple[int, ...],
    geometries: tuple[Geometry, ...] = GEOMETRIES,
    until_found: bool = False,
    early_crashes: bool = False,
) -> Report:
    """Check openings after simulated power cuts and kills.

    Args:
        states: Openings to check.
        seed: Equal seeds give equal attacks, except on shards, which a thread seals.
        geometries: Buffers to attack.
        until_found: Stop at the first finding.
        early_crashes: Let cuts come mostly in recovery and soon after.
    """
    rng = np.random.default_rng(seed)
    report = Report()
    weights = WEIGHTS if geometries is GEOMETRIES else None
    shm = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="torture-", dir=shm if shm.is_dir() else None))
    try:
        while report.states < states:
            which = int(rng.choice(len(geometries), p=weights))
            folder = root / "disk"
            folder.mkdir()
            trial = Trial(geometries[which], folder, rng, report)
            trial.early_crashes = early_crashes
            for _ in range(SESSIONS):
                if report.states >= states or not trial.session():
                    break
            trial.disk.lose_power()
            shutil.rmtree(folder)
            if until_found and report.findings:
                break
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return report
