"""Thin writers while their shard is killed, and its ring removed or replaced.

The real shard runs in a forked process and is called over a socket; there is no
cluster. Writers add steps that say who they are. At a moment of chance the shard is
killed, or the ring is made again, replaced by an older copy, or taken away for a while.
In the end each step is in the ring once, or was counted as lost by its writer.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import mmreplay as mr
from mmreplay.errors import DurabilityWarning, ReplayError, StarvedError
from mmreplay.ray.cluster import PAUSE_S, SHARD_CALLS, SHARD_THREADS, UnansweredError
from mmreplay.ray.lanes import create_lanes
from mmreplay.ray.shard import Shard
from mmreplay.ray.thin import ThinWriter
from tools.torture.powerloss import Report

KINDS = ("kill", "again", "copy", "away", "kill and again", "kill and copy")
"""What happens to the shard and its ring."""
SCHEMA = mr.Schema(
    {
        "writer": mr.Field((), "int64"),
        "env": mr.Field((), "int64"),
        "seq": mr.Field((), "int64"),
        "sum": mr.Field((), "int64"),
        "terminated": mr.Field((), "bool"),
    }
)
NUM_ENVS, WRITERS = 2, 2
CAPACITY = 200_000
WAIT_S = 120.0
"""A machine under load is not at fault; beyond it, something hangs."""


def attack(count: int, seed: int, verbose: bool = False) -> Report:
    """Attack a shard so many times, and check the ring after each."""
    report, rng = Report(), np.random.default_rng(seed)
    # A path of a socket has at most 107 bytes.
    with TemporaryDirectory(prefix="thin-") as folder:
        world = World(Path(folder), rng)
        try:
            for number in range(count):
                kind = KINDS[int(rng.integers(len(KINDS)))]
                try:
                    lines = world.suffer(kind)
                except ReplayError as error:
                    lines = [f"stuck: {error!r} for {WAIT_S:g} s"]
                report.states += 1
                report.seen[kind] += 1
                report.add(lines, f"{kind} of attack {number}, seed {seed}")
                if verbose:
                    print(number, kind, [w.lost_rows for w in world.writers], lines)
                if lines:
                    break
            report.seen.update({"lost rows": sum(w.lost_rows for w in world.writers)})
        finally:
            world.process.kill()
    return report


class World:
    """A shard's process, its ring, and the writers.

    Attributes:
        process: The shard's.
        writers: Of the ring.
    """

    def __init__(self, folder: Path, rng: np.random.Generator) -> None:
        """Make the ring and the writers."""
        self._folder, self._rng = folder, rng
        self._ring = folder / "run" / "thin"
        self._ring.parent.mkdir()
        self._make()
        self.process = ShardProcess(folder)
        self.writers = [
            ThinWriter(
                SocketShard(self.process),
                SCHEMA,
                NUM_ENVS,
                steps=16,
                keep=("published", "committed")[number % 2],
                timeout_s=WAIT_S,
            )
            for number in range(WRITERS)
        ]
        self._num_steps = [0] * WRITERS
        self._copies: list[Path] = []
        self._number = 0

    def suffer(self, kind: str) -> list[str]:
        """Add steps while something happens, and return what is wrong then."""
        if self._rng.random() < 0.5:
            self._copies.append(self._new_name("copy"))
            shutil.copytree(self._ring, self._copies[-1])
        pause_s = float(self._rng.random() * 0.05)
        failures: list[BaseException] = []

        def happen() -> None:
            time.sleep(pause_s)
            try:
                self._happen(kind)
            except BaseException as error:
                failures.append(error)

        # Steps that come before, while it happens, and after.
        thread = threading.Thread(target=happen)
        thread.start()
        while thread.is_alive():
            self._add()
        thread.join()
        if failures:
            raise failures[0]
        self._add()
        for writer in self.writers:
            self._persist(writer.flush)
        return self._check()

    def _happen(self, kind: str) -> None:
        if kind.startswith("kill"):
            self.process.kill()
        if kind.endswith("again"):
            self._ring.rename(self._new_name("former"))
            self._copies.clear()
            self._make()
        elif kind.endswith("copy") and self._copies:
            which = int(self._rng.integers(len(self._copies)))
            # Newer ones have rows that count as lost from here on.
            del self._copies[which + 1 :]
            staged = self._new_name("staged")
            shutil.copytree(self._copies[which], staged)
            self._ring.rename(self._new_name("former"))
            staged.rename(self._ring)
        elif kind == "away":
            away = self._new_name("away")
            self._ring.rename(away)
            time.sleep(0.05)
            away.rename(self._ring)
        if kind.startswith("kill"):
            self.process.start()

    def _new_name(self, what: str) -> Path:
        self._number += 1
        return self._folder / f"{what}-{self._number}"

    def _make(self) -> None:
        # Another writer of a copy may hold environments, and is gone.
        create_lanes(
            self._ring,
            SCHEMA,
            CAPACITY,
            3 * NUM_ENVS * WRITERS,
            idle_s=2.0,
            commit_every=0.05,
            autoreset="disabled",
        )

    def _add(self) -> None:
        for number, writer in enumerate(self.writers):
            steps = int(self._rng.integers(1, 40))
            seq = np.arange(self._num_steps[number], self._num_steps[number] + steps)
            shape = (steps, NUM_ENVS)
            columns = {
                "writer": np.full(shape, number),
                "env": np.tile(np.arange(NUM_ENVS), (steps, 1)),
                "seq": np.repeat(seq[:, None], NUM_ENVS, axis=1),
                "terminated": self._rng.random(shape) < 0.05,
            }
            columns["sum"] = check_sum(columns)
            self._persist(partial(writer.extend, columns))
            self._num_steps[number] += steps

    def _persist(self, call: Callable[[], None]) -> None:
        """Call until it is done: nothing is taken by a call that raised."""
        stop = time.monotonic() + WAIT_S
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DurabilityWarning)
            while True:
                try:
                    call()
                except ReplayError:
                    # The ring is away, or half there.
                    if time.monotonic() > stop:
                        raise
                    time.sleep(0.01)
                else:
                    return

    def _check(self) -> list[str]:
        """Compare the ring with what the writers were given."""
        with mr.ReplayBuffer.open(self._ring) as ring:
            rows = ring.gather_all().fields
        lines = []
        if (rows["sum"] != check_sum(rows)).any():
            lines.append("torn: rows with another sum than their own")
        for number, writer in enumerate(self.writers):
            own = rows["writer"] == number
            steps = rows["env"][own] * (1 << 40) + rows["seq"][own]
            present = len(np.unique(steps))
            if present < len(steps):
                lines.append(f"twice: {len(steps) - present} rows of writer {number}")
            missing = NUM_ENVS * self._num_steps[number] - present
            if missing != writer.lost_rows:
                lines.append(
                    f"not counted: {missing} rows of writer {number} are missing, and "
                    f"{writer.lost_rows} counted"
                )
        return lines


def check_sum(columns: dict[str, Any]) -> Any:
    """What the columns of a row say that its sum is."""
    return 7 * columns["writer"] + 31 * columns["env"] + 1009 * columns["seq"]


class ShardProcess:
    """The shard in a process of its own, behind a socket."""

    def __init__(self, folder: Path) -> None:
        """Start it."""
        self._folder, self._starts, self._pid = folder, 0, 0
        self.start()

    @property
    def address(self) -> str:
        """Of its socket, another one after each start."""
        return str(self._folder / f"socket-{self._starts}")

    def start(self) -> None:
        """Start it, after a kill."""
        self._starts += 1
        address = self.address
        self._pid = os.fork()
        if not self._pid:
            try:
                _serve(address, self._folder)
            finally:
                os._exit(1)

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _serve(address: str, folder: Path) -> None:
    """Answer calls until the process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shard = Shard("run", str(folder), "n0")
    threads = {kind: ThreadPoolExecutor(n) for kind, n in SHARD_THREADS.items()}

    def listen(connection: Connection) -> None:
        lock = threading.Lock()

        def answer(number: int, method: str, arguments: Any) -> None:
            try:
                result = getattr(shard, method)(*arguments)
            except Exception as error:
                result = error
            with lock, suppress(OSError):
                connection.send_bytes(pickle.dumps((number, result)))

        with suppress(EOFError, OSError):
            while True:
                number, method, arguments = pickle.loads(connection.recv_bytes())
                threads[SHARD_CALLS[method]].submit(answer, number, method, arguments)

    with Listener(address, "AF_UNIX", backlog=64) as listener:
        while True:
            threading.Thread(target=listen, args=(listener.accept(),), daemon=True).start()


@dataclass(slots=True)
class _Call:
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None


class SocketShard:
    """Calls of a `ShardProcess`; see `mmreplay.ray.thin.Shard`."""

    def __init__(self, process: ShardProcess) -> None:
        """Connect with the first call."""
        self._process = process
        self._connection: Connection | None = None
        self._calls: dict[int, _Call] = {}
        self._number = 0

    def __repr__(self) -> str:
        """Name it."""
        return "the shard"

    def send(self, method: str, *arguments: object) -> _Call:
        """Begin a call."""
        call = _Call()
        try:
            if self._connection is None:
                self._connection = Client(self._process.address, "AF_UNIX")
                own: dict[int, _Call] = {}
                self._calls = own
                threading.Thread(target=_listen, args=(self._connection, own), daemon=True).start()
            self._number += 1
            self._calls[self._number] = call
            message = pickle.dumps((self._number, method, arguments))
            self._connection.send_bytes(message)
        except OSError as error:
            self._connection = None
            call.result = UnansweredError(f"not sent: {error!r}")
            call.done.set()
        return call

    def receive(self, reference: _Call, timeout_s: float) -> Any:
        """Return its answer, or raise."""
        if not reference.done.wait(timeout_s):
            raise UnansweredError("no answer in time")
        if isinstance(reference.result, UnansweredError):
            self._connection = None
        if isinstance(reference.result, Exception):
            raise reference.result
        return reference.result

    def call(self, method: str, *arguments: object, timeout_s: float = WAIT_S) -> Any:
        """Call until it is answered."""
        stop = time.monotonic() + timeout_s
        while True:
            try:
                return self.receive(self.send(method, *arguments), timeout_s)
            except UnansweredError as error:
                if time.monotonic() > stop:
                    raise StarvedError("the shard does not answer") from error
            time.sleep(PAUSE_S)

    def settle(self) -> None:
        """Do nothing: no answer is printed here."""


def _listen(connection: Connection, calls: dict[int, _Call]) -> None:
    """Take answers until the connection ends; what is open then has none."""
    with suppress(EOFError, OSError):
        while True:
            number, result = pickle.loads(connection.recv_bytes())
            call = calls.pop(number)
            call.result = result
            call.done.set()
    for call in list(calls.values()):
        call.result = UnansweredError("the shard ended")
        call.done.set()
