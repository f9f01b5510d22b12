"""How fast a buffer can be drawn from on this machine, and what would be faster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.drawing import Drawn
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import FailedError, SchemaError
from mmreplay.files import File
from mmreplay.mounts import NETWORK, file_system
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.storage.pages import Pages
from mmreplay.storage.policy import Advise
from mmreplay.storage.residency import Memory
from mmreplay.storage.zarr_source import source_of

KEPT = 8
"""Draws that are gathered again and again for warm figures."""
LARGER = 16
"""Times as many steps in the batches that are tried beside those asked for."""
BLOCK_NBYTES = 1 << 20
DROPPED_NBYTES = 64 * BLOCK_NBYTES
PATIENCE = 10
"""Times that pages are dropped once more, a little later, in all."""
WAIT_S = 0.02
"""How much later."""
STAYS = 0.1
"""Share of rows that are still in memory from which on nothing was dropped."""
WHOLE = 0.95
"""Share of the files in memory from which on they are all there."""
WORTH_IT = 1.3
"""Times as fast from which on something is worth a word."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast batches were gathered.

    Attributes:
        rows_per_s: Steps a second.
        mb_per_s: Megabytes (10**6) of stored rows a second.
    """

    rows_per_s: float
    mb_per_s: float


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """What was measured.

    Attributes:
        batch_size: Steps a batch.
        warm: Batches whose rows are in memory.
        larger: The same, of 16 times as many steps.
        cold: Batches of which nothing is in memory, the disk being asked for all rows
            at once; None where pages cannot be dropped.
        unasked: The same, each missing row being waited for by itself.
        disk_mb_per_s: The disk, read from beginning to end; None likewise.
        memory: What of the files is in memory.
        nbytes: Bytes of the files on disk.
        file_system: What they are on.
        advice: What would be faster, a sentence each.
    """

    batch_size: int
    warm: Rate
    larger: Rate
    cold: Rate | None
    unasked: Rate | None
    disk_mb_per_s: float | None
    memory: Memory
    nbytes: int
    file_system: str
    advice: tuple[str, ...]

    @property
    def larger_size(self) -> int:
        """Steps of a larger batch."""
        return LARGER * self.batch_size


def measure_speed(
    path: str | os.PathLike[str], batch_size: int = 256, seconds: float = 1.0
) -> SpeedReport:
    """Measure uniform draws of a buffer, which it only reads.

    For cold figures the pages of the rows just drawn are dropped from the page cache,
    and no others unless they hang together with those: then all of the buffer's.

    Args:
        path: The buffer's folder.
        batch_size: Steps a batch, at least 1.
        seconds: For each figure, above 0.

    Raises:
        SchemaError: A number is not legal.
        FailedError: The path is a Zarr group, whose pages are not looked at.
        EmptyError: There is nothing to draw.
    """
    source = source_of(path)
    if source is not None:
        raise FailedError(
            f"{source} is a Zarr group, expected a buffer's folder, whose files' pages "
            "are dropped and looked at; make one with mmreplay convert"
        )
    if batch_size < 1 or not seconds > 0:
        raise SchemaError(
            f"batch_size, seconds: got {batch_size} and {seconds}, expected at least 1 "
            "and above 0; ask for a step and some time"
        )
    asked, kept = _cold(path, batch_size, seconds, "always")
    unasked, _ = _cold(path, batch_size, seconds, "never")
    with ReplayBuffer.open(path) as buffer:
        warm = _again(buffer, kept, seconds)
        drawing = buffer.reading.drawing
        more = drawing.ahead(UniformSampler(seed=1), LARGER * batch_size)
        larger = _again(buffer, [more], seconds)
        disk = None if asked is None else _sequential(buffer, seconds)
        memory, nbytes = buffer.memory(), buffer.nbytes[1]
    kind = file_system(Path(path))
    report = SpeedReport(
        batch_size, warm, larger, asked, unasked, disk, memory, nbytes, kind, ()
    )
    return replace(report, advice=tuple(_advice(report)))


def _timed(
    buffer: ReplayBuffer, draws: Iterator[Drawn], seconds: float, least: int = 1
) -> Rate:
    """Gather draws until the time is up."""
    sampler, took, rows, nbytes = UniformSampler(seed=0), 0.0, 0, 0
    for number, drawn in enumerate(draws):
        start = perf_counter()
        buffer.reading.drawing.finish(sampler, drawn)
        took += perf_counter() - start
        rows += len(drawn.draw)
        nbytes += buffer.reading.ahead.nbytes(drawn.draw)
        if took >= seconds and number + 1 >= least:
            break
    return Rate(rows / took, nbytes / took / 1e6)


def _again(buffer: ReplayBuffer, kept: list[Drawn], seconds: float) -> Rate:
    """The same draws again and again, once before the time counts."""

    def draws() -> Iterator[Drawn]:
        while True:
            yield from kept

    _timed(buffer, draws(), 0.0, len(kept))
    return _timed(buffer, draws(), seconds)


def _cold(
    path: str | os.PathLike[str], batch_size: int, seconds: float, advise: Advise
) -> tuple[Rate | None, list[Drawn]]:
    """Draws of which no page is in memory, and the first few of them."""
    kept: list[Drawn] = []
    seen = []
    sampler = UniformSampler(seed=3 if advise == "always" else 5)
    # Mapped pages cannot be dropped; the disk is as fast to who reads.
    with ReplayBuffer.open(path, read_mode="pread", advise=advise) as buffer:
        drop = _dropper(buffer)

        def draws() -> Iterator[Drawn]:
            while True:
                drawn = buffer.reading.drawing.ahead(sampler, batch_size)
                if len(kept) < KEPT:
                    kept.append(drawn)
                seen.append(drop(drawn))
                yield drawn

        rate = _timed(buffer, draws(), seconds, 3)
    # Pages that another process has mapped, or that a disk in RAM is made of, stay.
    return (rate if np.mean(seen) < STAYS else None), kept


def _dropper(buffer: ReplayBuffer) -> Callable[[Drawn], float]:
    """What drops the pages of a draw, and tells the share of rows that stay."""
    ring = buffer.metadata.ring
    files = [f for f in buffer.reading.files if f.nbytes > ring.num_rows]
    sizes = [file.nbytes // ring.num_rows for file in files]
    pages = [Pages(f, size, "always") for f, size in zip(files, sizes, strict=True)]
    most = pages[int(np.argmax(sizes))]

    patience = PATIENCE

    def drop(drawn: Drawn) -> float:
        nonlocal patience
        draw = drawn.draw
        for offset in (0, 1):
            rows = ring.rows(draw.env_ids, draw.positions + offset)
            for each in pages:
                each.drop(rows)
        stays = stay(rows, 0)
        tries = 0
        while stays > STAYS and patience > 0:
            # Of a file that was written or scanned a moment ago, pages hang together
            # in pieces of up to some MiB, which go as a whole or not at all; and not
            # while a busy system still has them on their way.
            if tries:
                patience -= 1
                sleep(WAIT_S)
            for file in files:
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            tries += 1
            stays = stay(rows, tries)
        return stays

    def stay(rows: NDArray[np.int64], first: int) -> float:
        # To look at a page that is not there has it read: no row is looked at twice.
        return float(
            np.mean(most.cached(rows[first % len(rows) :: max(2, len(rows) // 16)]))
        )

    return drop


def _sequential(buffer: ReplayBuffer, seconds: float) -> float:
    """Megabytes a second of the largest file, from its beginning."""
    file: File = max(buffer.reading.files, key=lambda f: f.disk_nbytes()[1])
    total = min(file.nbytes, max(BLOCK_NBYTES, file.disk_nbytes()[1]))
    room = memoryview(bytearray(BLOCK_NBYTES))
    done, start = 0, perf_counter()
    while done < total and perf_counter() - start < seconds:
        if done % DROPPED_NBYTES == 0:
            # No more than is read: others may be drawing.
            os.posix_fadvise(file.fd, done, DROPPED_NBYTES, os.POSIX_FADV_DONTNEED)
        piece = room[: min(BLOCK_NBYTES, total - done)]
        file.pread_into(piece, done)
        done += len(piece)
    return done / (perf_counter() - start) / 1e6


def _advice(report: SpeedReport) -> Iterator[str]:
    """What would be faster, as far as the figures tell."""
    warm, cold, unasked = report.warm, report.cold, report.unasked
    if cold is None:
        yield (
            "pages of this file system cannot be dropped, so nothing was measured cold"
        )
    elif unasked is not None:
        gain = cold.rows_per_s / unasked.rows_per_s
        if gain > WORTH_IT:
            yield (
                f"a batch's rows asked for at once come {gain:.1f} times as fast as "
                "one after another: leave advise='auto'"
            )
        elif gain < 1 / WORTH_IT:
            yield (
                f"waiting for each row by itself is {1 / gain:.1f} times as fast here: "
                "try advise='never'"
            )
        lag = warm.rows_per_s / cold.rows_per_s
        inside = (report.memory.page_cache or 0) / max(1, report.nbytes)
        if lag > WORTH_IT and inside < WHOLE:
            yield (
                f"rows in memory come {lag:.1f} times as fast, and {inside:.0%} of the "
                "files are there: more RAM or less capacity moves draws that way; a "
                "ReplayLoader reads ahead while the learner works"
            )
    gain = report.larger.rows_per_s / warm.rows_per_s
    if gain > WORTH_IT:
        yield (
            f"batches of {LARGER * report.batch_size:,} steps come at {gain:.1f} times "
            "as many steps a second: draw larger ones and split them"
        )
    if report.file_system in NETWORK:
        yield (
            f"the files are on {report.file_system}: a copy on a local disk spares "
            "every draw the network"
        )
