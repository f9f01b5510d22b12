"""What do a dump of TorchRL's, and a memory map beside a JSON file, survive?

The same steps are written into each: one number in every item of a row. A process that
writes is killed, the power of its file system is cut, or its disk is full; what is left
is opened in another process, and held to what the writer had been told was done. So
the figures are of the usual ways to keep a replay buffer, and of ours, by one measure.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from mmreplay import process
from tools.torture.outages import Device, Unavailable
from tools.torture.powerloss import Report

CAPACITY = 1000
WIDTH = 500
"""Numbers of the wide field, which takes about a page."""
EVERY = 50
"""Steps between what makes them last: a commit, a header, a dump."""
MOST_S = 0.03
OPENING_S = 60.0
ERROR, FAILED = 4, 3
Acked = NDArray[np.int64]
Rows = NDArray[np.int64]


class Side(Protocol):
    """One way to keep steps."""

    def write(self, path: Path, acked: Acked, num_steps: int) -> None:
        """Write steps 0, 1, … for so many steps, noting what is said to last."""

    def read(self, path: Path) -> Rows:
        """All rows that it serves, oldest first: int64 ``[N, 1 + WIDTH]``."""


class Ours:
    """A buffer, committed every `EVERY` steps; an `add` lasts a kill at once."""

    def __init__(self, power: bool) -> None:
        self._power = power

    def write(self, path: Path, acked: Acked, num_steps: int) -> None:
        """See `Side`."""
        schema = mr.Schema({"step": mr.Field((), "int64"), "wide": mr.Field((WIDTH,), "int64")})
        buffer = mr.ReplayBuffer.create(path, schema, CAPACITY, commit_every=None)
        for step in range(num_steps):
            buffer.add(step=step, wide=np.full(WIDTH, step))
            if not self._power:
                acked[0] = step + 1
            elif (step + 1) % EVERY == 0:
                buffer.commit()
                acked[0] = step + 1

    def read(self, path: Path) -> Rows:
        """See `Side`."""
        with mr.ReplayBuffer.open(path) as buffer:
            rows = buffer.gather_all()
            return np.column_stack([rows["step"], rows["wide"]])


class Naive:
    """A memory map a field, and a JSON file that says how far it is."""

    def write(self, path: Path, acked: Acked, num_steps: int) -> None:
        """See `Side`."""
        path.mkdir()
        steps, wide = self._maps(path, "w+")
        for step in range(num_steps):
            steps[step % CAPACITY] = step
            wide[step % CAPACITY] = step
            if (step + 1) % EVERY == 0:
                with (path / "state.json").open("w") as file:
                    json.dump({"written": step + 1, "capacity": CAPACITY}, file)
                acked[0] = step + 1

    def read(self, path: Path) -> Rows:
        """See `Side`."""
        written = json.loads((path / "state.json").read_text())["written"]
        steps, wide = self._maps(path, "r")
        order = np.arange(max(0, written - CAPACITY), written) % CAPACITY
        return np.column_stack([steps[order], wide[order]])

    def _maps(self, path: Path, mode: Any) -> tuple[Rows, Rows]:
        return (
            np.memmap(path / "step.bin", np.int64, mode, shape=(CAPACITY,)),
            np.memmap(path / "wide.bin", np.int64, mode, shape=(CAPACITY, WIDTH)),
        )


class TorchRL:
    """`TensorDictReplayBuffer` over `LazyMemmapStorage`, dumped into one folder."""

    def __init__(self) -> None:
        # Once, and not in each process that is forked.
        self._torch: Any = import_module("torch")
        self._torch.set_num_threads(1)
        self._data: Any = import_module("torchrl.data")
        self._dict: Any = import_module("tensordict").TensorDict
        logging.disable(logging.INFO)

    def write(self, path: Path, acked: Acked, num_steps: int) -> None:
        """See `Side`."""
        torch, buffer = self._torch, self._made()
        for first in range(0, num_steps, EVERY):
            steps = torch.arange(first, first + EVERY)
            wide = steps[:, None].expand(EVERY, WIDTH).contiguous()
            buffer.extend(self._dict({"step": steps, "wide": wide}, [EVERY]))
            buffer.dumps(path)
            acked[0] = first + EVERY

    def read(self, path: Path) -> Rows:
        """See `Side`."""
        buffer = self._made()
        buffer.loads(path)
        held = buffer[:]
        rows = np.column_stack([held["step"].numpy(), held["wide"].numpy()])
        # A ring: what follows the newest is the oldest.
        turn = int(np.argmax(rows[:, 0])) + 1 if len(rows) else 0
        return np.roll(rows, -turn, axis=0)

    def _made(self) -> Any:
        storage = self._data.LazyMemmapStorage(CAPACITY)
        return self._data.TensorDictReplayBuffer(storage=storage, batch_size=32)


SIDES: dict[str, Callable[[bool], Side]] = {
    "mmreplay": Ours,
    "naive": lambda _: Naive(),
    "torchrl": lambda _: TorchRL(),
}
ATTACKS = ("kills", "cuts", "full")


def judged(rows: Rows, acked: int) -> str:
    """What is to be said of rows that were served, of which so many were to last."""
    if not len(rows):
        return "right" if not acked else "lost rows"
    if (rows != rows[:, :1]).any():
        return "wrong rows"
    if (np.diff(rows[:, 0]) != 1).any():
        return "wrong order"
    if rows[-1, 0] + 1 < acked or len(rows) < min(acked, CAPACITY - EVERY):
        return "lost rows"
    return "right"


def _child(do: Callable[[], None]) -> int:
    """Fork, and do something there; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = FAILED
    # What is dropped here has nobody to tell.
    sys.unraisablehook = lambda _: None
    faulthandler.disable()
    try:
        do()
        code = 0
    except BaseException as error:
        # On a full disk an error is what is hoped for.
        code = ERROR if isinstance(error, (OSError, RuntimeError)) else FAILED
        if code == FAILED:
            traceback.print_exc()
    finally:
        os._exit(code)


def _looked(side: Side, path: Path, acked: int) -> str:
    """Open what is left in another process, for it may die of it."""
    shared = mmap.mmap(-1, 64)

    def look() -> None:
        try:
            told = judged(side.read(path), acked)
        except BaseException as error:
            shared[:] = f"does not open ({type(error).__name__})".encode()[:64].ljust(64)
            return
        shared[:] = told.encode().ljust(64)

    code = os.waitstatus_to_exitcode(os.waitpid(_child(look), 0)[1])
    if code < 0:
        return f"opening dies of {signal.Signals(-code).name}"
    return shared[:].decode().strip() or "does not open"


class Trial:
    """One writer, from beginning to end.

    Args:
        side: Writes and reads.
        path: Where.
    """

    def __init__(self, side: Side, path: Path) -> None:
        self.side = side
        self.path = path
        self.acked: Acked = np.frombuffer(mmap.mmap(-1, 8), np.int64)

    def start(self, num_steps: int = 1 << 40) -> int:
        """Let a process write; its pid."""
        return _child(lambda: self.side.write(self.path, self.acked, num_steps))

    def await_lap(self, rng: np.random.Generator) -> None:
        """Wait until it has written a while, a lap or so."""
        least = int(self.acked[0] + rng.integers(1, CAPACITY))
        deadline = time.monotonic() + OPENING_S
        while self.acked[0] < least and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(MOST_S * float(rng.random()))

    def end(self, pid: int) -> int:
        """Kill it, if it is alive still; how it ended."""
        os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _kill(side: Side, root: Path, rng: np.random.Generator) -> str:
    trial = Trial(side, root / "kept")
    pid = trial.start()
    trial.await_lap(rng)
    trial.end(pid)
    told = _looked(side, trial.path, int(trial.acked[0]))
    shutil.rmtree(trial.path)
    return told


def _power_cut(side: Side, device: Device, rng: np.random.Generator) -> str:
    trial = Trial(side, device.folder / "kept")
    pid = trial.start()
    trial.await_lap(rng)
    # What was made once is there: only what is written all along is at stake.
    subprocess.run(["sync", "-f", device.folder], check=True)
    trial.await_lap(rng)
    acked = int(trial.acked[0])
    device.lose_power()
    trial.end(pid)
    device.unmount()
    device.mount()
    # The page cache of this boot is not what was written before the cut.
    with mock.patch.object(process, "boot_id", return_value=rng.bytes(16)):
        told = _looked(side, trial.path, acked)
    shutil.rmtree(trial.path, ignore_errors=True)
    return told


def _full(side: Side, root: Path, pages: int) -> str:
    """Fill a disk with room for so many pages beside what a header takes."""
    with _tmpfs(root / "small", pages) as folder:
        trial = Trial(side, folder / "kept")
        pid = trial.start(3 * CAPACITY)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not code:
            return "fits"
        name = "an error" if code > 0 else f"dies of {signal.Signals(-code).name}"
        left = _looked(side, trial.path, int(trial.acked[0]))
        return f"{name}, then {'nothing acked' if not trial.acked[0] else left}"


@contextmanager
def _tmpfs(folder: Path, pages: int) -> Iterator[Path]:
    folder.mkdir()
    size = f"size={4096 * pages}"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Unavailable(f"a small disk cannot be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


def attack(name: str, how: str, points: int, seed: int) -> Report:
    """Attack one side in one way, and count what is left.

    Args:
        name: One of `SIDES`.
        how: One of `ATTACKS`: kills, real power cuts of an ext4, or full disks.
        points: How often.
        seed: Decides how long is written; when a kill strikes is up to the machine.

    Raises:
        Unavailable: The attack cannot be made here.
    """
    rng, report = np.random.default_rng(seed), Report()
    side = SIDES[name](how == "cuts")
    root = Path(tempfile.mkdtemp(prefix="torture-"))
    told: Counter[str] = Counter()
    try:
        if how == "cuts":
            device = Device("ext4", root)
            device.mount()
            try:
                told.update(_power_cut(side, device, rng) for _ in range(points))
            finally:
                device.unmount()
        elif how == "kills":
            told.update(_kill(side, root, rng) for _ in range(points))
        else:
            # A row takes a page; a ring is full at about a thousand of them.
            sizes = np.linspace(8, CAPACITY + 40, points).astype(int).tolist()
            told.update(_full(side, root, pages) for pages in sizes)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report.states, report.seen = points, told
    return report
