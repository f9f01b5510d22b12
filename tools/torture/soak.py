"""Does a buffer stay what it is while five processes use it for a long time?

A writer fills a ring over and over at a steady pace; three readers (single steps,
windows, recent steps) and a learner with priorities draw from it all the while. Each
row carries its place and a checksum over all its bytes, which every reader computes
again for every row drawn, and its next observation must be the next step's. Memory,
descriptors and threads of each process are taken all along and held against what they
were after the first third; how long calls take is counted in bins of a few percent.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from mmreplay.batch import Batch
from mmreplay.errors import EmptyError, StaleError, StarvedError
from tools.torture.latencies import Latencies
from tools.torture.powerloss import Report
from tools.torture.processes import GROWTH_NBYTES, Usage, disk_nbytes, usage

WORDS = 6
WINDOW = 8
EPISODE = np.uint64(97)
READY, STOP, WRITTEN, DRAWN, LEARNED = range(5)
ROLES = ("writer", "steps", "windows", "recent", "learner")
FAILED = 3
OPENING_S = 60.0
ENDING_S = 60.0
BLOCK = 1024
"""Rows of one `extend`."""
ADDS = 4
"""Calls of `add` after each `ROUND` of `extend`."""
ROUND = 8
ODD = np.uint64(0x9E3779B97F4A7C15)
PRIMES = np.array(
    [
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
        0xE7037ED1A0B428DB,
        0x8EBC6AF09C88C6E3,
        0x589965CC75374CC3,
        0x1D8E4E27C47D124F,
        0xEB44ACCAB455D165,
        0x9FB21C651E98DF25,
        0xC2B2AE3D27D4EB4F,
    ],
    np.uint64,
)

Array = NDArray[np.int64]
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Size:
    """How long, and how large.

    Attributes:
        rows: To be written, at least.
        seconds: To go on, at least.
        capacity: Steps of each environment.
        num_envs: Environments; `BLOCK` is a multiple.
        batch: Steps drawn at a time.
        draws_per_s: Of each reader and the learner, at most.
        samples: Times that memory, descriptors and threads are looked at.
    """

    rows: int
    seconds: float
    capacity: int = 16_384
    num_envs: int = 64
    batch: int = 256
    draws_per_s: float = 60.0
    samples: int = 180


def _words(env_ids: Array, positions: Array) -> Words:
    """Observations that follow from the place: uint64 ``[N, WORDS]``."""
    keys = (env_ids * 1_000_003 + positions * 7_919 + 1).astype(np.uint64) * ODD
    return (keys[:, None] ^ (keys[:, None] >> np.uint64(29))) * PRIMES[:WORDS]


def _checksums(words: Words, env_ids: Array, positions: Array, reward: Any) -> Words:
    """A checksum over the bytes of each row: uint64 ``[N]``."""
    bits = np.ascontiguousarray(reward, np.float32).view(np.uint32).astype(np.uint64)
    total = (words * PRIMES[:WORDS]).sum(axis=1, dtype=np.uint64)
    for part, prime in zip((env_ids, positions, bits), PRIMES[WORDS:], strict=True):
        total += part.astype(np.uint64) * prime
    mixed: Words = (total ^ (total >> np.uint64(31))) * ODD
    return mixed


def made(env_ids: Array, positions: Array) -> dict[str, NDArray[Any]]:
    """The rows of places.

    Args:
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``.

    Returns:
        Per path ``[N, *shape]``.
    """
    words = _words(env_ids, positions)
    reward = (words[:, 0] >> np.uint64(44)).astype(np.float32)
    return {
        "observation": words,
        "place": np.stack([env_ids, positions], 1),
        "reward": reward,
        "terminated": words[:, 1] % EPISODE == 0,
        "checksum": _checksums(words, env_ids, positions, reward),
    }


SCHEMA = mr.Schema(
    {
        "observation": mr.Field((WORDS,), "uint64"),
        "place": mr.Field((2,), "int64"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
        "checksum": mr.Field((), "uint64"),
    }
)


def wrong(batch: Batch) -> list[str]:
    """What is wrong with the rows of a batch: torn ones, and those of another place."""
    positions, env_ids = batch.positions, batch.env_ids
    fields = {path: np.asarray(column) for path, column in batch.fields.items()}
    if batch.window_positions is not None:
        assert batch.mask is not None
        held = batch.mask
        env_ids = np.broadcast_to(env_ids[:, None], held.shape)[held]
        positions = batch.window_positions[held]
        fields = {path: column[held] for path, column in fields.items()}
    words, place = fields["observation"], fields["place"]
    sums = _checksums(words, place[:, 0], place[:, 1], fields["reward"])
    after = _words(env_ids, positions + 1)
    own = fields["terminated"][:, None] & (fields["next_observation"] == words)
    checks = {
        "torn row": fields["checksum"] != sums,
        "other place": (place[:, 0] != env_ids) | (place[:, 1] != positions),
        "wrong end": fields["terminated"] != (words[:, 1] % EPISODE == 0),
        "wrong next": ((fields["next_observation"] != after) & ~own).any(axis=1),
    }
    found = []
    for kind, bad in checks.items():
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            found.append(
                f"{kind}: {int(bad.sum())} of {len(bad)}, env {env_ids[at]} position "
                f"{positions[at]}, says {place[at].tolist()}"
            )
    return found


class Soak:
    """The buffer, what the processes share, and what each of them does.

    Args:
        path: Of the buffer, which is made.
        size: How long, and how large.
        seed: Of the draws.
    """

    def __init__(self, path: Path, size: Size, seed: int) -> None:
        self.path = path
        self.size = size
        self.seed = seed
        counts = mmap.mmap(-1, 8 * len(ROLES) * (LEARNED + 1))
        self.counts = np.frombuffer(counts, np.int64).reshape(len(ROLES), -1)
        self.times = Latencies(("add", "extend", "commit", *ROLES[1:], "update_priorities"))
        mr.ReplayBuffer.create(
            path, SCHEMA, size.capacity, size.num_envs, autoreset="same_step"
        ).close()

    def start(self, role: int) -> int:
        """Fork the process of a role; its pid."""
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._write() if role == 0 else self._draw(role)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(FAILED)

    @property
    def stopped(self) -> bool:
        """Whether the parent said that it is enough."""
        return bool(self.counts[0, STOP])

    def _write(self) -> None:
        """Fill the ring at a steady pace until told to stop, then close it."""
        size, steps = self.size, BLOCK // self.size.num_envs
        envs = np.arange(size.num_envs)
        pace = size.rows / size.seconds
        with mr.ReplayBuffer.open(self.path, "r+", commit_every=1.0) as buffer:
            begin, rows, number = time.monotonic(), 0, 0
            while not self.stopped:
                rows += self._extend(buffer, envs, steps)
                number += 1
                if number % ROUND == 0:
                    for _ in range(ADDS):
                        rows += self._add(buffer, envs)
                if number % (32 * ROUND) == 0:
                    with self.times.of("commit"):
                        buffer.commit()
                self.counts[0, WRITTEN] = rows
                self.counts[0, READY] = 1
                # A tenth ahead, so that rows and seconds end alike on a busy machine.
                late = begin + rows / (1.1 * pace) - time.monotonic()
                if late > 0:
                    time.sleep(late)

    def _extend(self, buffer: mr.ReplayBuffer, envs: Array, steps: int) -> int:
        positions = buffer.heads[0] + np.repeat(np.arange(steps), len(envs))
        rows = made(np.tile(envs, steps), positions)
        lead = (steps, len(envs))
        shaped = {path: each.reshape(*lead, *each.shape[1:]) for path, each in rows.items()}
        with self.times.of("extend"):
            buffer.extend(shaped)
        return len(positions)

    def _add(self, buffer: mr.ReplayBuffer, envs: Array) -> int:
        rows = made(envs, buffer.heads)
        with self.times.of("add"):
            buffer.add(rows)
        return len(envs)

    def _draw(self, role: int) -> None:
        """Draw and check until told to stop."""
        seed, name = self.seed + role, ROLES[role]
        samplers: dict[str, Callable[[], Any]] = {
            "steps": lambda: mr.UniformSampler(seed=seed),
            "windows": lambda: mr.SequenceSampler(WINDOW, mr.UniformSampler(seed=seed)),
            "recent": lambda: mr.RecentSampler(256, 0.5, seed=seed),
            "learner": lambda: mr.PrioritizedSampler(seed=seed, name="learner"),
        }
        with mr.ReplayBuffer.open(self.path, sampler=samplers[name]()) as buffer:
            self.counts[role, READY] = 1
            while not self.stopped:
                begin = time.monotonic()
                self._one(buffer, role)
                due = begin + 1 / self.size.draws_per_s - time.monotonic()
                if due > 0:
                    time.sleep(due)

    def _one(self, buffer: mr.ReplayBuffer, role: int) -> None:
        """Draw once; a row that is wrong ends the process."""
        count = self.size.batch // (WINDOW if ROLES[role] == "windows" else 1)
        try:
            with self.times.of(ROLES[role]):
                batch = buffer.sample(count)
        except (EmptyError, StaleError, StarvedError) as error:
            if not isinstance(error, EmptyError):
                print(f"soak: {ROLES[role]}: {error}", flush=True)
            time.sleep(0.01)
            return
        found = wrong(batch)
        if found:
            raise AssertionError("; ".join(found))
        self.counts[role, DRAWN] += self.size.batch
        if ROLES[role] == "learner":
            values = 0.1 + batch.fields["reward"] % 7
            with self.times.of("update_priorities"):
                buffer.update_priorities(batch, values)
            self.counts[role, LEARNED] += 1


def attack(size: Size, seed: int, verbose: bool = False) -> Report:
    """Let five processes use one buffer, and hold them to what they promise.

    Args:
        size: How long, and how large.
        seed: Of the draws; who comes when is up to the machine.
        verbose: Print how far it is once a minute.
    """
    report = Report()
    root = Path(tempfile.mkdtemp(prefix="torture-"))
    pids: dict[int, str] = {}
    try:
        soak = Soak(root / "soak", size, seed)
        for role, name in enumerate(ROLES):
            pids[soak.start(role)] = name
            deadline = time.monotonic() + OPENING_S
            while not soak.counts[role, READY] and time.monotonic() < deadline:
                time.sleep(0.001)
        seen = _watched(soak, pids, report, verbose)
        soak.counts[0, STOP] = 1
        _ended(pids, report, ENDING_S)
        _judged(seen, report)
        _looked_at(soak, report)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(root, ignore_errors=True)
    return report


def _watched(
    soak: Soak, pids: dict[int, str], report: Report, verbose: bool
) -> dict[str, list[Usage]]:
    """Take what each process uses until rows and seconds are reached, or one ends."""
    size, seen = soak.size, defaultdict(list)
    begin = told = time.monotonic()
    while True:
        time.sleep(size.seconds / size.samples)
        _ended(pids, report, 0)
        if len(pids) < len(ROLES):
            report.add(["ended early: a process is gone"], "soak")
            break
        for pid, name in pids.items():
            seen[name].append(usage(pid))
        nbytes = disk_nbytes(soak.path)
        seen["disk"].append(Usage(nbytes, 0, 0))
        now, rows = time.monotonic(), int(soak.counts[0, WRITTEN])
        if verbose and now - told > 60:
            told = now
            print(
                f"soak: {now - begin:.0f} s, {rows:,} rows, {nbytes:,} bytes "
                f"{ {k: v[-1] for k, v in seen.items()} }",
                flush=True,
            )
        if rows >= size.rows and now - begin >= size.seconds:
            break
    report.seen["seconds"] = int(time.monotonic() - begin)
    return seen


def _ended(pids: dict[int, str], report: Report, wait_s: float) -> None:
    """Take leave of processes that ended; of all, within some seconds, if any."""
    deadline = time.monotonic() + wait_s
    while True:
        for pid, name in list(pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del pids[pid]
                code = os.waitstatus_to_exitcode(status)
                if code:
                    report.add([f"{name} failed: ended with {code}"], "soak")
        if not pids or time.monotonic() >= deadline:
            return
        time.sleep(0.01)


def _judged(seen: dict[str, list[Usage]], report: Report) -> None:
    """Hold the last third of what was used against the second."""
    for name, taken in seen.items():
        third = len(taken) // 3
        middle, last = taken[third : 2 * third], taken[2 * third :]
        if not middle:
            continue
        for what in ("nbytes", "descriptors", "threads"):
            before = max(getattr(each, what) for each in middle)
            after = max(getattr(each, what) for each in last)
            room = GROWTH_NBYTES if what == "nbytes" else 0
            report.seen[f"{name} {what}"] = after
            if after > before + room:
                report.add([f"growth: {name} {what} from {before} to {after}"], "soak")


def _looked_at(soak: Soak, report: Report) -> None:
    """Verify what is left, and count what was done."""
    done = mr.verify_buffer(soak.path)
    if not done.ok:
        report.add([f"damage: {done.findings[:3]}"], "soak")
    with mr.ReplayBuffer.open(soak.path) as buffer:
        if buffer.recovery.how != "clean":
            report.add([f"recovery: {buffer.recovery.how}"], "soak")
        report.seen["laps"] = int(buffer.heads.min()) // soak.size.capacity
    report.states = int(soak.counts[0, WRITTEN])
    for role, name in enumerate(ROLES[1:], 1):
        report.seen[f"{name} drawn"] = int(soak.counts[role, DRAWN])
    report.seen["priorities given"] = int(soak.counts[:, LEARNED].sum())
    print(soak.times.table())
