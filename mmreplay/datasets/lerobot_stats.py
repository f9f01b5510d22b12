"""Statistics of an episode's features as LeRobot names them, in bounded memory.

Of each component: min, max, mean, std, count and the quantiles of `QUANTILES`, each a
value of the data (numpy's ``inverted_cdf``). Numbers that are NaN or infinite are left
out. Above a limit of bytes quantiles are those of a histogram. Images count in 0..1 by
channel, of frames spread over the episode, as LeRobot chooses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.datasets.common.rows import Array

Floats = NDArray[np.float64]
Statistics = Mapping[str, NDArray[Any]]
"""Arrays by name: ``min``, ``max``, ``mean``, ``std``, ``count``, ``q01`` and so on."""
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
KEYS = ("min", "max", "mean", "std", "count", *QUANTILES)
LIMIT_NBYTES = 64 << 20
"""Of the numbers of one episode that are in memory, for all its features."""
BINS = 5000
STEP_ROWS = 4096
"""Rows whose moments are computed together."""
FRAMES, MOST_FRAMES = 100, 10_000
"""So many frames of an episode count in any case, and at most."""
WIDE, WIDTH = 300, 150
"""Of images so wide every n-th pixel counts, so that about this width is left."""
MAX_COUNTS = 2 * MOST_FRAMES
"""Frames whose pixels are counted at a time: 3 KB each."""


class NumberStatistics:
    """Statistics of the numbers of one feature."""

    def __init__(self, size: int, limit_nbytes: int = LIMIT_NBYTES) -> None:
        """Begin an episode.

        Args:
            size: Numbers of a row.
            limit_nbytes: Bytes of numbers up to which quantiles are exact.
        """
        self._limit_nbytes = limit_nbytes
        self._rows = self._nbytes = 0
        self._count = np.zeros(size)
        self._mean, self._m2 = np.zeros((2, size))
        self._low, self._high = np.full(size, np.inf), np.full(size, -np.inf)
        self._stored: list[Array] = []
        self._histogram: _Histogram | None = None

    def add(self, rows: Array) -> None:
        """Count rows ``[N, size]`` of numbers or bools, which may change afterwards."""
        if not len(rows):
            return
        self._rows += len(rows)
        if self._histogram is not None:
            numbers = rows.astype(np.float64)
            self._add_moments(numbers)
            self._histogram.add(numbers, self._low, self._high)
            return
        self._stored.append(rows.copy())
        self._nbytes += rows.nbytes
        if self._nbytes > self._limit_nbytes:
            for each in self._stored:
                self._add_moments(each.astype(np.float64))
            size = rows.shape[1]
            bins = max(2, min(BINS, self._limit_nbytes // (8 * max(1, size))))
            self._histogram = _Histogram(self._low, self._high, bins)
            for each in self._stored:
                self._histogram.add(each.astype(np.float64), self._low, self._high)
            self._stored = []

    def _add_moments(self, numbers: Floats) -> None:
        """Count numbers ``[N, size]`` in all but the quantiles."""
        finite = np.isfinite(numbers)
        count = finite.sum(axis=0)
        some = np.maximum(count, 1)
        total = self._count + count
        share = count / np.maximum(total, 1)
        # Sums beyond what float64 holds are infinite: see `as_json`.
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.where(finite, numbers, 0).sum(axis=0) / some
            m2 = (np.where(finite, numbers - mean, 0) ** 2).sum(axis=0)
            # Moments of two samples together, without a difference of large sums.
            gap = mean - self._mean
            self._mean += gap * share
            self._m2 += m2 + gap * gap * self._count * share
        self._count = total
        self._low = np.minimum(self._low, np.where(finite, numbers, np.inf).min(axis=0))
        self._high = np.maximum(self._high, np.where(finite, numbers, -np.inf).max(axis=0))

    def result(self) -> Statistics:
        """Return the statistics, arrays ``[size]`` and the count ``[1]``.

        A component without a finite number has zeros. There must be a row; called once,
        at the end.
        """
        shares = np.array([*QUANTILES.values()])
        if self._histogram is None:
            # In steps of their own, so that other blocks give the same numbers.
            numbers = np.concatenate(self._stored).astype(np.float64)
            for first in range(0, len(numbers), STEP_ROWS):
                self._add_moments(numbers[first : first + STEP_ROWS])
            quantiles = _exact(numbers, shares)
        some = self._count > 0
        low, high = np.where(some, self._low, 0), np.where(some, self._high, 0)
        if self._histogram is not None:
            quantiles = self._histogram.quantiles(shares).clip(low, high)
        found: dict[str, NDArray[Any]] = {
            "min": low,
            "max": high,
            "mean": self._mean,
            "std": np.sqrt(self._m2 / np.maximum(self._count, 1)),
            "count": np.array([self._rows]),
        }
        return {**found, **dict(zip(QUANTILES, quantiles, strict=True))}


def _exact(numbers: Floats, shares: Floats) -> Floats:
    """Quantiles of the finite numbers of each column, ``[shares, size]``."""
    finite = np.isfinite(numbers)
    if finite.all():
        found: Floats = np.quantile(numbers, shares, axis=0, method="inverted_cdf")
        return found
    found = np.zeros((len(shares), numbers.shape[1]))
    for column in range(numbers.shape[1]):
        some = numbers[finite[:, column], column]
        if len(some):
            found[:, column] = np.quantile(some, shares, method="inverted_cdf")
    return found


class _Histogram:
    """Counts of the numbers of each column in bins of one width, which may grow."""

    def __init__(self, low: Floats, high: Floats, bins: int) -> None:
        self._low, self._high = low.copy(), high.copy()
        self._counts = np.zeros((len(low), bins), np.int64)

    def add(self, numbers: Floats, low: Floats, high: Floats) -> None:
        """Count numbers ``[N, size]``, all of them within new limits ``[size]``."""
        if (low < self._low).any() or (high > self._high).any():
            # Twice as wide as needed, so that limits that creep cost a few moves only.
            spread = np.where(np.isfinite(high - low), high - low, 0) / 2
            before = self._low, self._width(), self._counts
            self._low = np.where(low < self._low, low - spread, self._low)
            self._high = np.where(high > self._high, high + spread, self._high)
            self._counts = np.zeros_like(before[2])
            middles = before[0][:, None] + before[1][:, None] * (
                np.arange(before[2].shape[1]) + 0.5
            )
            self._count(middles.T, before[2].T)
        self._count(numbers, np.isfinite(numbers).astype(np.int64))

    def _width(self) -> Floats:
        with np.errstate(invalid="ignore"):
            width = (self._high - self._low) / self._counts.shape[1]
        found: Floats = np.where(np.isfinite(width) & (width > 0), width, 1)
        return found

    def _count(self, numbers: Floats, weights: NDArray[np.int64]) -> None:
        bins = self._counts.shape[1]
        with np.errstate(invalid="ignore"):
            places = np.floor((numbers - self._low) / self._width())
        places = np.where(weights > 0, places, 0).clip(0, bins - 1).astype(np.int64)
        columns = np.broadcast_to(np.arange(len(self._counts)), places.shape)
        np.add.at(self._counts, (columns, places), weights)

    def quantiles(self, shares: Floats) -> Floats:
        """The middles of the bins in which the quantiles are, ``[shares, size]``."""
        sums = np.cumsum(self._counts, axis=1)
        found = np.zeros((len(shares), len(sums)))
        width = self._width()
        for column, counts in enumerate(sums):
            if counts[-1]:
                places = np.searchsorted(counts, np.ceil(shares * counts[-1]).clip(1))
                found[:, column] = self._low[column] + width[column] * (places + 0.5)
        return found


class ImageStatistics:
    """Statistics of the frames of one camera."""

    def __init__(self) -> None:
        self._counts: list[NDArray[np.uint32]] = []
        self._frames, self._stride = 0, 1

    def add(self, frames: Array) -> None:
        """Count frames uint8 ``[N, H, W, C]``."""
        longer = max(frames.shape[1:3])
        pixels = int(longer / WIDTH) if longer >= WIDE else 1
        for frame in frames[:, ::pixels, ::pixels]:
            if self._frames % self._stride == 0:
                channels = (frame[..., channel].reshape(-1) for channel in range(frame.shape[-1]))
                counted = [np.bincount(each, minlength=256) for each in channels]
                self._counts.append(np.stack(counted).astype(np.uint32))
                if len(self._counts) == MAX_COUNTS:
                    self._counts = self._counts[::2]
                    self._stride *= 2
            self._frames += 1

    def result(self) -> Statistics:
        """Return the statistics: arrays ``[C, 1, 1]``, and the count of frames."""
        frames = chosen_frames(self._frames)
        places = np.minimum((frames + self._stride // 2) // self._stride, len(self._counts) - 1)
        counts = np.zeros(self._counts[0].shape, np.int64)
        for place in places.tolist():
            counts += self._counts[place]
        return _of_counts(counts, len(frames))


def chosen_frames(count: int) -> NDArray[np.int64]:
    """Numbers of the frames of an episode of ``count`` that count in its statistics."""
    most = max(FRAMES, min(int(count**0.75), MOST_FRAMES)) if count > FRAMES else count
    frames: NDArray[np.int64] = np.round(np.linspace(0, count - 1, most)).astype(np.int64)
    return frames


def _of_counts(counts: NDArray[np.int64], frames: int) -> Statistics:
    """Statistics of pixels, from how often each of 256 values occurs by channel."""
    values = np.arange(256) / 255
    sums = np.cumsum(counts, axis=1)
    total = sums[:, -1:]
    mean = (counts @ values)[:, None] / total
    std = np.sqrt((counts * (values - mean) ** 2).sum(axis=1, keepdims=True) / total)
    found = {
        "min": values[(counts > 0).argmax(axis=1)],
        "max": values[255 - (counts[:, ::-1] > 0).argmax(axis=1)],
        "mean": mean,
        "std": std,
    }
    for name, share in QUANTILES.items():
        found[name] = values[(sums >= np.ceil(share * total).clip(1)).argmax(axis=1)]
    shaped: dict[str, NDArray[Any]] = {name: each.reshape(-1, 1, 1) for name, each in found.items()}
    return {**shaped, "count": np.array([frames])}


def merged(one: Statistics, other: Statistics) -> Statistics:
    """Statistics of two samples together, as LeRobot merges them.

    Quantiles are means weighted by the counts, not those of all numbers.
    """
    counts = float(one["count"][0]), float(other["count"][0])
    total = sum(counts)
    share = counts[1] / total if total else 0.0

    def mean(name: str) -> Floats:
        gap = other[name].astype(np.float64) - one[name]
        found: Floats = one[name] + gap * share
        return found

    with np.errstate(over="ignore", invalid="ignore"):
        gap = other["mean"].astype(np.float64) - one["mean"]
        variance = (1 - share) * one["std"] ** 2 + share * other["std"] ** 2
        variance = variance + gap * gap * share * (1 - share)
        return {
            "min": np.minimum(one["min"], other["min"]),
            "max": np.maximum(one["max"], other["max"]),
            "mean": mean("mean"),
            "std": np.sqrt(variance),
            "count": np.array([int(total)]),
            **{name: mean(name) for name in QUANTILES},
        }


def as_json(statistics: Statistics) -> dict[str, object]:
    """Return lists by name, for stats.json; numbers beyond float64 are its limits."""
    most = np.finfo(np.float64).max
    return {
        name: np.nan_to_num(each, nan=0.0, posinf=most, neginf=-most).tolist()
        for name, each in statistics.items()
    }
