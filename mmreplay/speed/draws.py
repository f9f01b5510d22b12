"""Uniform draws of one buffer, timed: warm ones, and such as the disk is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from time import perf_counter, sleep

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.drawing import Drawn
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.speed.disk import PATIENCE, STAYS, WAIT_S
from mmreplay.speed.report import Rate
from mmreplay.storage.pages import Pages
from mmreplay.storage.policy import Advise

KEPT = 8
"""Draws that are gathered again and again for warm figures."""


def warm_rate(
    buffer: ReplayBuffer, batch_size: int, seconds: float, count: int = KEPT
) -> Rate:
    """Gather the same draws again and again, once before the time counts.

    Raises:
        EmptyError: There is nothing to draw.
    """
    sampler, drawing = UniformSampler(seed=1), buffer.reading.drawing
    kept = [drawing.ahead(sampler, batch_size) for _ in range(count)]

    def draws() -> Iterator[Drawn]:
        while True:
            yield from kept

    _timed(buffer, draws(), 0.0, len(kept))
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
    # Mapped pages cannot be dropped; the disk is as fast to who reads.
    with ReplayBuffer.open(path, read_mode="pread", advise=advise) as buffer:
        drop = _dropper(buffer)

        def draws() -> Iterator[Drawn]:
            while True:
                drawn = buffer.reading.drawing.ahead(sampler, batch_size)
                seen.append(drop(drawn))
                yield drawn

        rate = _timed(buffer, draws(), seconds, 3)
    # Pages that another process has mapped, or that a disk in RAM is made of, stay.
    return rate if np.mean(seen) < STAYS else None


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
