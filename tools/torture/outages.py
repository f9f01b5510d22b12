"""Does every opening after a real power cut show what was committed?

A small file system on a loop mount is shut down at a random moment while a process
writes a buffer there, as a device does whose power is cut: what was not synced is
gone, the journal is replayed at the next mount. Root only, and no part of CI: where a
file system cannot be made or mounted, the reason is printed. The page cache of this
boot is not what the records speak of then, so each session has a boot of its own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import traceback
from pathlib import Path
from unittest import mock

import numpy as np

from mmreplay import process
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import ReplayError
from tools.torture.powerloss import Report, abandon
from tools.torture.rows import GEOMETRIES, Array, Geometry, faults
from tools.torture.scribe import Notes, Scribe, broken_promises, broken_sums

KINDS = ("ext4", "xfs")
SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
IMAGE_NBYTES = 320 << 20
MOST_S = 0.06
OPENING_S = 10.0
NUM_OUTAGES = 25
"""Of one buffer, before a fresh one is taken."""
FAILED = 3


class Unavailable(Exception):
    """The file system cannot be had here, for the reason given."""


def _run(*command: str | Path) -> None:
    if shutil.which(str(command[0])) is None:
        raise Unavailable(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


class Device:
    """A file system on a loop mount whose power can be cut.

    Args:
        kind: One of `KINDS`.
        root: A folder to work in.
    """

    def __init__(self, kind: str, root: Path) -> None:
        if os.geteuid() != 0:
            raise Unavailable("mounting takes root")
        self.kind = kind
        self.image = root / f"{kind}.image"
        self.folder = root / kind
        self.folder.mkdir()
        self.image.touch()
        os.truncate(self.image, IMAGE_NBYTES)
        _run(f"mkfs.{kind}", "-q", self.image)

    def mount(self) -> None:
        """Mount it, which replays its journal."""
        _run("mount", "-o", "loop", self.image, self.folder)

    def lose_power(self) -> None:
        """Cut its power: nothing more reaches the image."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def unmount(self) -> None:
        """Unmount what was cut, or is done with."""
        subprocess.run(["umount", self.folder], check=False, capture_output=True)


class Outage:
    """One buffer on a device whose power is cut again and again.

    Args:
        geometry: Of the buffer.
        device: Mounted.
        rng: Decides everything but the moment of the cut.
        report: Takes what is found.
    """

    def __init__(
        self, geometry: Geometry, device: Device, rng: np.random.Generator, report: Report
    ) -> None:
        self.geometry = geometry
        self.device = device
        self.rng = rng
        self.report = report
        self.path = device.folder / geometry.name
        heads = 8 * geometry.num_envs
        shared = mmap.mmap(-1, 8 + heads + Notes.nbytes(geometry.num_envs))
        self.began = np.frombuffer(shared, np.int64, 1)
        self.heads = np.frombuffer(shared, np.int64, geometry.num_envs, 8)
        self.notes = Notes.over(memoryview(shared)[8 + heads :], geometry.num_envs)
        self.starts: list[tuple[int, Array]] = []
        self.lineage = 0
        self.boot_id = rng.bytes(16)
        with self._patched_boot_id():
            ReplayBuffer.create(
                self.path,
                geometry.schema,
                geometry.capacity,
                geometry.num_envs,
                layout=geometry.layout,
                autoreset="same_step",
                commit_every=None,
            ).close()

    def _patched_boot_id(self) -> mock._patch[mock.MagicMock]:
        return mock.patch.object(process, "boot_id", return_value=self.boot_id)

    def point(self) -> None:
        """Let a process write, cut the power, mount again and look."""
        self.lineage += 1
        seed = int(self.rng.integers(2**32))
        pid = os.fork()
        if pid == 0:
            self._write(seed)
        deadline = time.monotonic() + OPENING_S
        while self.began[0] != self.lineage and time.monotonic() < deadline:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.0005)
        time.sleep(MOST_S * float(self.rng.random()))
        self.device.lose_power()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if self.began[0] == self.lineage:
            self.starts.append((self.lineage, self.heads.copy()))
        self.device.unmount()
        self.device.mount()
        self.boot_id = self.rng.bytes(16)
        self._look()

    def _write(self, seed: int) -> None:
        """Open and write until the disk is gone; never returns."""
        try:
            with self._patched_boot_id():
                buffer = ReplayBuffer.open(self.path, "r+", commit_every=None)
                rng = np.random.default_rng(seed)
                scribe = Scribe(buffer, self.geometry, self.lineage, self.notes, rng)
                scribe.commit_chance = float(rng.choice([0.02, 0.1, 0.3]))
                self.heads[:] = buffer.heads
                self.began[0] = self.lineage
                while True:
                    scribe.step()
        except (ReplayError, OSError):
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(FAILED)

    def _look(self) -> None:
        notes, where = self.notes, f"{self.device.kind}, {self.geometry.name}"
        try:
            with self._patched_boot_id():
                buffer = ReplayBuffer.open(self.path)
        except ReplayError as error:
            self.report.add([f"failed: {error}"], where)
            return
        low, high, gone = notes.committed, notes.committing, notes.buried
        lines = broken_promises(buffer, notes, low, high, gone)
        lines += faults(buffer, self.geometry, self.starts)
        lines += broken_sums(buffer, self.rng)
        self.report.add(lines, f"{where}, lineage {self.lineage}")
        self.report.states += 1
        self.report.seen[f"{self.device.kind}: {buffer.recovery.how}"] += 1
        self.report.seen["rows"] += int(buffer.span.lengths.sum())
        # What was not committed is gone for good, and will not come back.
        notes.acked[:] = notes.committed[:] = notes.committing[:] = buffer.heads
        notes.tails[:] = np.maximum(notes.tails, buffer.span.first)
        notes.removed[:] = notes.buried
        abandon(buffer)


def attack(kind: str, count: int, seed: int) -> Report:
    """Cut the power of a file system under a writer, and check what is left.

    Args:
        kind: One of `KINDS`.
        count: How often.
        seed: Decides what is written, not what the cut strikes.

    Raises:
        Unavailable: The file system cannot be had here.
    """
    rng, report = np.random.default_rng(seed), Report()
    root = Path(tempfile.mkdtemp(prefix="torture-"))
    try:
        device = Device(kind, root)
        device.mount()
        try:
            while report.states + report.findings.total() < count:
                number = report.states // NUM_OUTAGES
                geometry = GEOMETRIES[number % len(GEOMETRIES)]
                outage = Outage(geometry, device, rng, report)
                for _ in range(min(NUM_OUTAGES, count - report.states)):
                    outage.point()
                shutil.rmtree(outage.path)
        finally:
            device.unmount()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return report
