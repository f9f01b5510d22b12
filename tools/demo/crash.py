"""A writer that is killed while it writes, and the comparison of what it published.

After each `add` the writer sends, over a pipe, the positions that it wrote and a
checksum of each row. All rows that it reported before the kill have to be in the files.
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

# Steps that are played before the first of them is written: they are written without a
# pause, so that the kill interrupts the writer and not the emulator.
PLAYED = 600
MESSAGE = np.dtype([("position", np.int64, NUM_ENVS), ("crc", np.uint32, NUM_ENVS)])


@dataclass(frozen=True, slots=True)
class Reported:
    """The rows that a writer reported before it was killed.

    Attributes:
        positions: int64 ``[N, E]``.
        crcs: uint32 ``[N, E]``, CRC-32 of each row.
        seconds: From the first message to the kill.
    """

    positions: NDArray[np.int64]
    crcs: NDArray[np.uint32]
    seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The buffer after the kill, compared with the reported rows.

    Attributes:
        how: How the last writer ended, as opening the buffer reports it.
        heads: The next position of each environment.
        missing: Reported rows at or above the head.
        different: Reported rows that hold other values.
        damage: Number of damages that `verify_buffer` finds.
    """

    how: str
    heads: list[int]
    missing: int
    different: int
    damage: int


def kill_a_writer(path: Path) -> Reported:
    """Start a writer, read its messages, and kill it in the middle of its work."""
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
    rows = np.frombuffer(b"".join(messages), MESSAGE)
    return Reported(rows["position"], rows["crc"], seconds)


def _rest(pipe: Connection) -> Iterator[bytes]:
    """The messages that the pipe still holds; the last one may be incomplete."""
    while True:
        try:
            yield pipe.recv_bytes()
        except (EOFError, OSError):
            return


def _write_on(pipe: Connection, path: Path) -> None:
    """Add steps and report each, without end."""
    played = _play()
    ready = [next(played) for _ in range(PLAYED)]
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        for row in ready:
            _add(buffer, row, pipe)
        for row in played:
            _add(buffer, row, pipe)


def _add(buffer: mr.ReplayBuffer, row: Row, pipe: Connection) -> None:
    buffer.add(row)
    message = np.zeros((), MESSAGE)
    message["position"] = buffer.heads - 1
    message["crc"] = _crcs(row)
    pipe.send_bytes(message.tobytes())


def _crcs(row: Row) -> list[int]:
    columns = [np.ascontiguousarray(row[name]) for name in ("observation", "action")]
    return [
        zlib.crc32(columns[1][i].tobytes(), zlib.crc32(columns[0][i].tobytes()))
        for i in range(len(columns[0]))
    ]


def _play() -> Iterator[Row]:
    """Steps of random play, without end; rows after an end are final rows."""
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


def compare(path: Path, reported: Reported) -> Comparison:
    """Open the buffer and compare it with the reported rows."""
    with mr.ReplayBuffer.open(path) as buffer:
        env_ids = np.broadcast_to(np.arange(NUM_ENVS), reported.positions.shape)
        there = reported.positions < buffer.heads
        missing = int((~there).sum())
        env_ids, positions = env_ids[there], reported.positions[there]
        row = {
            name: buffer.get_field(name, env_ids, positions) for name in ("observation", "action")
        }
        different = int((np.array(_crcs(row)) != reported.crcs[there]).sum())
        how, heads = buffer.recovery.how, buffer.heads.tolist()
    damage = sum(finding.damage for finding in mr.verify_buffer(path).findings)
    return Comparison(how, heads, missing, different, damage)
