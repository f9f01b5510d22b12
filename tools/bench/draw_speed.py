"""How fast a buffer can be drawn from on this machine, and what would be faster.

Draws are *warm* where their rows are in memory, and *cold* where the disk is asked for
every one of them.

What was measured of a buffer.

What would be faster, as far as the figures tell.

How fast the disk is read from beginning to end, past what memory holds of it.

Uniform draws of one buffer, timed: warm ones, and such as the disk is asked for.

What is measured of a buffer, in which order.
"""

from __future__ import annotations

import argparse
import errno
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import format_size
from mmreplay.buffer.draw import PendingDraw
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.cli import show
from mmreplay.disk.files import NETWORK, File, file_system
from mmreplay.errors import FailedError, ReplayError, SchemaError, system_failure
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.storage.memory_usage import MemoryUsage, cached_nbytes, opened, whole_nbytes
from mmreplay.storage.read_ahead import Pages
from mmreplay.storage.store import Advise
from mmreplay.zarr_groups.source import source_of

LARGER = 16
"""Times as many steps in the batches that are tried beside those asked for."""


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
            at once; None where `not_cold` says why.
        unasked: The same, each missing row being waited for by itself.
        not_cold: Why no batch was measured cold; empty where some were.
        disk_mb_per_s: The disk, files of which nothing is in memory being read from
            beginning to end; None for small buffers and where pages stay.
        memory: What of the files was in memory before anything was dropped or drawn,
            shards included.
        nbytes: Bytes of the files that were written; reserved space is none.
        machine_nbytes: Memory of the machine, or of the group that this process is in;
            0 if unknown.
        file_system: What the files are on.
        advice: What would be faster, a sentence each.
    """

    batch_size: int
    warm: Rate
    larger: Rate
    cold: Rate | None
    unasked: Rate | None
    not_cold: str
    disk_mb_per_s: float | None
    memory: MemoryUsage
    nbytes: int
    machine_nbytes: int
    file_system: str
    advice: tuple[str, ...]

    @property
    def larger_size(self) -> int:
        """Steps of a larger batch."""
        return LARGER * self.batch_size


ALL_IN_MEMORY = 0.95
"""Minimum share of the files in memory that counts as all of them."""
WORTH_IT = 1.3
"""Times as fast from which on something is worth a word."""


def advice(report: SpeedReport) -> Iterator[str]:
    """Sentences, those of the disk first; the report's own are not looked at."""
    if report.not_cold:
        yield report.not_cold
    elif report.cold is not None and report.unasked is not None:
        yield from _advice_on_reading_at_once(report.cold, report.unasked)
        yield from _of_memory(report, report.cold)
        if report.disk_mb_per_s is None:
            yield "pages stayed in memory, so the disk was not measured"
    gain = report.larger.rows_per_s / report.warm.rows_per_s
    if gain > WORTH_IT:
        yield (
            f"batches of {report.larger_size:,} steps read {gain:.1f} times as many "
            "steps a second: draw larger batches and split them"
        )
    if report.file_system in NETWORK:
        yield (f"the files are on {report.file_system}: a copy on a local disk avoids the network")


def _advice_on_reading_at_once(cold: Rate, unasked: Rate) -> Iterator[str]:
    """Whether to ask the disk for all rows of a batch at once."""
    gain = cold.rows_per_s / unasked.rows_per_s
    if gain > WORTH_IT:
        yield (
            f"reading a batch's rows at once is {gain:.1f} times as fast as one after "
            "another: leave advise='auto'"
        )
    elif gain < 1 / WORTH_IT:
        yield (
            f"reading each row by itself is {1 / gain:.1f} times as fast here: try advise='never'"
        )


def _of_memory(report: SpeedReport, cold: Rate) -> Iterator[str]:
    """What brings more of the files into memory, where that is known and of use."""
    lag = report.warm.rows_per_s / cold.rows_per_s
    cached, whole = report.memory.page_cache, report.machine_nbytes
    if cached is None or lag <= WORTH_IT:
        return
    inside = min(1.0, cached / max(1, report.nbytes))
    if inside >= ALL_IN_MEMORY:
        return
    note = f"rows in memory are read {lag:.1f} times as fast, and {inside:.0%} of the files"
    if 0 < report.nbytes <= whole:
        yield (
            f"{note} were in memory: all of them fit this machine's "
            f"{format_size(whole)}, and draws load them over time; a ReplayLoader "
            "reads ahead"
        )
    else:
        yield (
            f"{note} were in memory: more RAM or less capacity makes draws faster; a "
            "ReplayLoader reads ahead while the learner works"
        )


BLOCK_NBYTES = 1 << 20
DROPPED_NBYTES = 64 * BLOCK_NBYTES
"""No more is dropped at once where that does: others may be drawing."""
PATIENCE = 10
"""Times that pages are dropped once more, a little later, in all."""
WAIT_S = 0.02
"""How much later."""
STAYS = 0.1
"""Share that is still in memory from which on nothing was dropped."""


def written_nbytes(paths: Iterable[Path]) -> int:
    """Bytes of files that somebody wrote: neither holes nor space that is reserved."""
    return sum(stop - first for file in opened(paths) for first, stop in _written_spans(file))


def sequential(paths: Iterable[Path], seconds: float) -> float | None:
    """Read files, the largest first, each from its beginning; what stays is left out.

    Whatever of them is mapped and was looked at stays in memory.

    Args:
        paths: The files; those that are gone count for nothing.
        seconds: For how long, at most.

    Returns:
        Megabytes (10**6) a second; None where pages stay in memory, or may.
    """
    sizes = {path: written_nbytes([path]) for path in paths}
    most = STAYS * sum(sizes.values())
    dropping, done, left, took = _Dropping(), 0, 0, 0.0
    for file in opened(sorted(sizes, key=sizes.__getitem__, reverse=True)):
        for first, stop in _dropped_spans(file):
            if took >= seconds or left > most:
                break
            if dropping.drop(file, first, stop):
                nbytes, more = _read(file, first, stop, seconds - took)
                done, took = done + nbytes, took + more
            else:
                left += stop - first
    return done / took / 1e6 if took and left <= most else None


def _written_spans(file: File) -> Iterator[tuple[int, int]]:
    """Yield the first byte of each written span, in whole pages, and its end."""
    stop = 0
    while stop < file.nbytes:
        try:
            first = os.lseek(file.fd, stop, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise system_failure("look for data in", file.path, error) from error
            return  # nothing but a hole is left
        stop = os.lseek(file.fd, first, os.SEEK_HOLE)
        yield first // mmap.PAGESIZE * mmap.PAGESIZE, stop


def _dropped_spans(file: File) -> Iterator[tuple[int, int]]:
    """Return the written spans, divided into the largest that is dropped at once."""
    for start, end in _written_spans(file):
        for first in range(start, end, DROPPED_NBYTES):
            yield first, min(first + DROPPED_NBYTES, end)


class _Dropping:
    """Drops spans of files from the page cache, with a few retries in all."""

    def __init__(self) -> None:
        """Begin with all patience."""
        self._patience = PATIENCE

    def drop(self, file: File, first: int, stop: int) -> bool:
        """Drop bytes ``[first, stop)`` from memory; return whether none is left."""
        os.posix_fadvise(file.fd, first, stop - first, os.POSIX_FADV_DONTNEED)
        while not _absent(file, first, stop):
            if not self._patience:
                return False
            self._patience -= 1
            # Pages hang together across the part's ends, or are on their way still.
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if not _absent(file, first, stop):
                sleep(WAIT_S)
        return True


def _absent(file: File, first: int, stop: int) -> bool:
    """Whether next to nothing of a part is in memory; not where nobody tells."""
    cached = cached_nbytes(file, first, stop)
    return cached is not None and cached < STAYS * (stop - first)


def _read(file: File, first: int, stop: int, seconds: float) -> tuple[int, float]:
    """Read ``[first, stop)``, or as far as the time goes; bytes, and seconds taken."""
    room = memoryview(bytearray(BLOCK_NBYTES))
    at, took, start = first, 0.0, perf_counter()
    while at < stop and took < seconds:
        piece = room[: min(BLOCK_NBYTES, stop - at)]
        file.pread_into(piece, at)
        at += len(piece)
        took = perf_counter() - start
    return at - first, took


WARM_DRAWS = 8
"""Draws that are gathered repeatedly for warm figures."""


def warm_rate(
    buffer: ReplayBuffer, batch_size: int, seconds: float, count: int = WARM_DRAWS
) -> Rate:
    """Gather the same draws repeatedly, once before the time counts.

    Raises:
        EmptyError: There is nothing to draw.
    """
    sampler, reader = UniformSampler(seed=1), buffer.view
    drawn = [reader.draw(sampler, batch_size) for _ in range(count)]

    def draws() -> Iterator[PendingDraw]:
        while True:
            yield from drawn

    _timed(buffer, draws(), 0.0, len(drawn))
    return _timed(buffer, draws(), seconds)


def cold_rate(
    path: str | os.PathLike[str], batch_size: int, seconds: float, advise: Advise
) -> Rate | None:
    """Gather draws of which no page is in memory; None where pages stay there.

    Raises:
        EmptyError: There is nothing to draw.
    """
    seen = []
    sampler = UniformSampler(seed=3 if advise == "always" else 5)
    # Mapped pages cannot be dropped; reads by pread are as fast.
    with ReplayBuffer.open(path, read_mode="pread", advise=advise) as buffer:
        drop = _dropper(buffer)

        def draws() -> Iterator[PendingDraw]:
            while True:
                drawn = buffer.view.draw(sampler, batch_size)
                seen.append(drop(drawn))
                yield drawn

        rate = _timed(buffer, draws(), seconds, 3)
    # Pages that another process has mapped, or that a disk in RAM is made of, stay.
    return rate if np.mean(seen) < STAYS else None


def _timed(
    buffer: ReplayBuffer, draws: Iterator[PendingDraw], seconds: float, minimum: int = 1
) -> Rate:
    """Gather draws until the time is up."""
    took, rows, nbytes = 0.0, 0, 0
    for number, drawn in enumerate(draws):
        start = perf_counter()
        buffer.view.gather(drawn)
        took += perf_counter() - start
        rows += len(drawn.draw)
        nbytes += buffer.view.nbytes(drawn.draw)
        if took >= seconds and number + 1 >= minimum:
            break
    return Rate(rows / took, nbytes / took / 1e6)


def _dropper(buffer: ReplayBuffer) -> Callable[[PendingDraw], float]:
    """What drops the pages of a draw, and tells the share of rows that stay."""
    ring = buffer.metadata.ring
    files = [f for f in buffer.view.data_files if f.nbytes > ring.num_rows]
    sizes = [file.nbytes // ring.num_rows for file in files]
    pages = [Pages(f, size, "always") for f, size in zip(files, sizes, strict=True)]
    most = pages[int(np.argmax(sizes))]

    patience = PATIENCE

    def drop(drawn: PendingDraw) -> float:
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
        return float(np.mean(most.cached(rows[first % len(rows) :: max(2, len(rows) // 16)])))

    return drop


SMALL_NBYTES = 8 << 20
"""Files with less in them say nothing of the disk: a batch of 256 rows, each with its
page, is a MiB of them, and waiting for the first request a good part of reading all."""
SHARDS = (
    "a compressed buffer is read through mappings of its shards, whose pages cannot be "
    "dropped, so the disk was not measured"
)
STAYED = (
    "pages of the files cannot be dropped (another process maps them, or the disk is "
    "in RAM), so the disk was not measured"
)


def measure_speed(
    path: str | os.PathLike[str], batch_size: int = 256, seconds: float = 1.0
) -> SpeedReport:
    """Measure uniform draws of a buffer, which it only reads.

    For figures of the disk the pages of the rows just drawn are dropped from the page
    cache, and those that are read through; all of the buffer's where they hang
    together with those.

    Args:
        path: The buffer's folder.
        batch_size: Steps a batch, at least 1.
        seconds: For each figure, above 0.

    Raises:
        SchemaError: A number is not legal, or a batch larger than memory.
        FailedError: The path is a Zarr group, whose pages are not looked at.
        EmptyError: There is nothing to draw.
    """
    _check(path, batch_size, seconds)
    with ReplayBuffer.open(path) as buffer:
        paths, memory = buffer.view.data_paths, buffer.memory()
        compressed = buffer.zarr_path is not None
        row_nbytes = buffer.schema.row_nbytes
    larger_nbytes, ram = LARGER * batch_size * row_nbytes, whole_nbytes()
    if larger_nbytes > ram > 0:
        raise SchemaError(
            f"batch_size is too large, got {batch_size:,}: the bench also draws "
            f"{LARGER} times as many at once, {format_size(larger_nbytes)}, and this "
            f"machine has {format_size(ram)} of memory. Choose a smaller batch."
        )
    nbytes = written_nbytes(paths)
    asked = unasked = disk = None
    not_cold = _too_small(nbytes)
    if not not_cold:
        # While nothing of it is mapped here: such pages cannot be dropped.
        if not compressed:
            asked = cold_rate(path, batch_size, seconds, "always")
            unasked = cold_rate(path, batch_size, seconds, "never")
        disk = sequential(paths, seconds)
        if asked is None:
            not_cold = SHARDS if compressed and disk is not None else STAYED
    with ReplayBuffer.open(path) as buffer:
        warm = warm_rate(buffer, batch_size, seconds)
        larger = warm_rate(buffer, LARGER * batch_size, seconds, 1)
    kind = file_system(Path(path))
    report = SpeedReport(
        batch_size,
        warm,
        larger,
        asked,
        unasked,
        not_cold,
        disk,
        memory,
        nbytes,
        whole_nbytes(),
        kind,
        (),
    )
    return replace(report, advice=tuple(advice(report)))


def _check(path: str | os.PathLike[str], batch_size: int, seconds: float) -> None:
    """Refuse what cannot be measured."""
    source = source_of(path)
    if source is not None:
        raise FailedError(
            f"{source} is a Zarr group, and the bench needs a buffer's files. Make a "
            "buffer with mmreplay convert."
        )
    if batch_size < 1 or not seconds > 0:
        raise SchemaError(
            f"batch_size must be at least 1 and seconds above 0, got {batch_size} and {seconds}."
        )


def _too_small(nbytes: int) -> str:
    """Why so many bytes say nothing of the disk; empty where they do."""
    if nbytes >= SMALL_NBYTES:
        return ""
    return (
        f"the buffer is too small to measure the disk: {format_size(nbytes)}, less "
        f"than {format_size(SMALL_NBYTES)}"
    )


def print_report(name: str, report: SpeedReport) -> None:
    """Print a table of rates, and what follows from them."""
    larger = f"{report.larger_size:,}"
    kinds: list[tuple[str, str, Rate | None]] = [
        ("in memory", f"{report.batch_size:,}", report.warm),
        ("in memory", larger, report.larger),
        ("on disk, rows read at once", f"{report.batch_size:,}", report.cold),
        ("on disk, one by one", f"{report.batch_size:,}", report.unasked),
    ]
    show.print_table(
        ["rows", "batch", "steps/s", "MB/s"],
        [
            [what, size, "-", "-"]
            if rate is None
            else [what, size, show.count(rate.rows_per_s), show.number(rate.mb_per_s)]
            for what, size, rate in kinds
        ],
    )
    disk = report.disk_mb_per_s
    read = "unknown" if disk is None else f"{show.number(disk)} MB/s from end to end"
    show.print_facts(
        name,
        [
            ("disk", f"{read}, {report.file_system}"),
            ("memory", str(report.memory)),
            *(("advice", advice) for advice in report.advice),
        ],
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure one buffer, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", help="the buffer's folder")
    parser.add_argument("--batch-size", type=int, default=256, help="steps a batch")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    if not given.seconds > 0:
        parser.error(f"--seconds must be above 0, got {given.seconds}")
    report = measure_speed(given.path, given.batch_size, given.seconds)
    if given.json:
        print(json.dumps(asdict(report)))
    else:
        print_report(given.path, report)


if __name__ == "__main__":
    try:
        main()
    except ReplayError as error:
        sys.exit(f"draw_speed: {error}")
