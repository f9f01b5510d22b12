"""A writer that is killed while it writes, and the search for what it published.

After each `add` the writer tells, over a pipe, the positions it wrote and a
checksum of each row. What was told before the kill has to be in the files.
"""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from tools.demo.play import NUM_ENVS, SEED, make_pongs
from tools.demo.processes import spawned

Row = dict[str, NDArray[np.generic]]

# Steps played before the first of them is written: so many are then written
# without a pause, and the kill falls into the writing, not into the emulator.
PLAYED = 600
TOLD = np.dtype([("position", np.int64, NUM_ENVS), ("sum", np.uint32, NUM_ENVS)])


@dataclass(frozen=True, slots=True)
class Told:
    """What a killed writer had told.

    Attributes:
        positions: int64 ``[N, E]``.
        sums: uint32 ``[N, E]``, CRC-32 of each row.
        seconds: From the first message to the kill.
    """

    positions: NDArray[np.int64]
    sums: NDArray[np.uint32]
    seconds: float


@dataclass(frozen=True, slots=True)
class Found:
    """What a reader found after the kill.

    Attributes:
        how: How the buffer had been left, as opening it found.
        heads: The next position of each environment.
        missing: Rows told that lie at or above the head.
        different: Rows told that hold something else.
        damage: What `verify_buffer` found wrong.
    """

    how: str
    heads: list[int]
    missing: int
    different: int
    damage: int


def kill_a_writer(path: Path) -> Told:
    """Start a writer, read what it tells, and kill it in the middle of its work."""
    ours, theirs = spawned.Pipe(duplex=False)
    process = spawned.Process(target=_write_on, args=(theirs, path))
    process.start()
    theirs.close()
    wanted = int(np.random.default_rng(SEED).integers(PLAYED // 3, PLAYED // 2))
    messages = [ours.recv_bytes()]
    started = perf_counter()
    while len(messages) < wanted:
        messages.append(ours.recv_bytes())
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    seconds = perf_counter() - started
    messages += _rest(ours)
    process.join()
    told = np.frombuffer(b"".join(messages), TOLD)
    return Told(told["position"], told["sum"], seconds)


def _rest(pipe: Connection) -> Iterator[bytes]:
    """What the pipe still holds; the last message may be cut short."""
    while True:
        try:
            yield pipe.recv_bytes()
        except (EOFError, OSError):
            return


def _write_on(pipe: Connection, path: Path) -> None:
    """Add steps and tell of each, without end."""
    played = _play()
    ready = [next(played) for _ in range(PLAYED)]
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        for row in ready:
            _add(buffer, row, pipe)
        for row in played:
            _add(buffer, row, pipe)


def _add(buffer: mr.ReplayBuffer, row: Row, pipe: Connection) -> None:
    buffer.add(row)
    told = np.zeros((), TOLD)
    told["position"] = buffer.heads - 1
    told["sum"] = _sums(row)
    pipe.send_bytes(told.tobytes())


def _sums(row: Row) -> list[int]:
    columns = [np.ascontiguousarray(row[name]) for name in ("observation", "action")]
    return [
        zlib.crc32(columns[1][i].tobytes(), zlib.crc32(columns[0][i].tobytes()))
        for i in range(len(columns[0]))
    ]


def _play() -> Iterator[Row]:
    """Steps of random play, for ever; rows after an end are final rows."""
    env = make_pongs()
    env.action_space.seed(SEED + 1)
    observation, _ = env.reset(seed=SEED + 1)
    while True:
        action = env.action_space.sample()
        following, reward, terminated, truncated, _ = env.step(action)
        yield {
            "observation": observation,
            "action": action,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
        }
        observation = following


def look_for(path: Path, told: Told) -> Found:
    """Open the buffer and compare it with what was told."""
    with mr.ReplayBuffer.open(path) as buffer:
        env_ids = np.broadcast_to(np.arange(NUM_ENVS), told.positions.shape)
        there = told.positions < buffer.heads
        missing = int((~there).sum())
        env_ids, positions = env_ids[there], told.positions[there]
        row = {
            name: buffer.get_field(name, env_ids, positions)
            for name in ("observation", "action")
        }
        different = int((np.array(_sums(row)) != told.sums[there]).sum())
        how, heads = buffer.recovery.how, buffer.heads.tolist()
    damage = sum(finding.damage for finding in mr.verify_buffer(path).findings)
    return Found(how, heads, missing, different, damage)
