"""Frames that stay in the videos of a LeRobot dataset until pixels are read.

From set to set they are copied as packets: see `StoredFrames.packets`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.datasets.common.rows import Array
from mmreplay.datasets.images import TOLERANCE_S, VideoEpisodes, VideoRows
from mmreplay.datasets.lerobot_episodes import Times
from mmreplay.datasets.lerobot_stats import ImageStatistics, Statistics, chosen_frames
from mmreplay.datasets.lerobot_video import Packets, find_packets

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Camera:
    """The videos of one camera, a column of frames that are read when needed.

    Attributes:
        rows: Decodes them.
        episodes: Where they are.
        times: When its rows are shown.
        statistics: Returns those that the dataset has, by number of the episode.
        named: Names what happened to the dataset where reading it in a block fails.
    """

    rows: VideoRows
    episodes: VideoEpisodes
    times: Times
    statistics: Callable[[], Mapping[int, Statistics]]
    named: Callable[[], AbstractContextManager[None]] = nullcontext

    dtype = "uint8"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a frame."""
        return self.rows.shape

    @property
    def count(self) -> int:
        """Rows in all."""
        return self.rows.count

    def read(self, first: int, stop: int) -> Any:
        """Return `StoredFrames` of rows ``[first, stop)``; see `ColumnRows.read`."""
        return StoredFrames(self, np.arange(first, stop))


class StoredFrames:
    """Frames of a camera: an array ``[N, *shape]`` that is decoded when it is needed.

    Like an array it has a shape and a dtype, and takes slices, masks and places.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self,
        camera: Camera,
        rows: Ids,
        shape: tuple[int, ...] | None = None,
        restore: Callable[[Array], Array] | None = None,
    ) -> None:
        """Refer to frames.

        Args:
            camera: Whose they are.
            rows: int64 ``[N]``, rows of the dataset.
            shape: Of a frame as `restore` makes it; by default the video's.
            restore: Makes values of a field of frames.
        """
        self.camera, self.rows = camera, rows
        self._shape = camera.shape if shape is None else shape
        self._restore = restore

    @property
    def shape(self) -> tuple[int, ...]:
        """As of an array."""
        return (len(self.rows), *self._shape)

    @property
    def ndim(self) -> int:
        """As of an array."""
        return 1 + len(self._shape)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> StoredFrames:
        return StoredFrames(self.camera, self.rows[key], self._shape, self._restore)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        frames: Array = np.empty((len(self.rows), *self.camera.shape), np.uint8)
        edges = np.flatnonzero(np.diff(self.rows, prepend=-2) != 1).tolist()
        for begin, end in pairwise([*edges, len(self.rows)]):
            first = int(self.rows[begin])
            with self.camera.named():
                frames[begin:end] = self.camera.rows.read(first, first + end - begin)
        if self._restore is not None:
            frames = self._restore(frames)
        return frames.astype(dtype, copy=False) if dtype is not None else frames

    def restored(self, shape: tuple[int, ...], restore: Callable[[Array], Array]) -> StoredFrames:
        """The same frames as values of a field of another shape."""
        return StoredFrames(self.camera, self.rows, shape, restore)

    @classmethod
    def concatenate(cls, several: Sequence[StoredFrames]) -> StoredFrames:
        """Frames of one camera, one after another."""
        first = several[0]
        rows = np.concatenate([each.rows for each in several])
        return cls(first.camera, rows, first._shape, first._restore)

    def precedes(self, other: StoredFrames) -> bool:
        """Return whether other frames follow these in their video."""
        return other.camera is self.camera and bool(other.rows[0] == self.rows[-1] + 1)

    def packets(self, fps: float) -> Packets | None:
        """Where the packets of these frames are, if they can be copied as they are.

        None unless the frames follow each other in one episode, each 1 / fps seconds
        after the one before, and the first one needs no other frame.
        """
        episodes = self.camera.episodes
        episode = int(np.searchsorted(episodes.bounds, self.rows[0], "right")) - 1
        first, stop = episodes.bounds[episode : episode + 2].tolist()
        if (np.diff(self.rows) != 1).any() or self.rows[-1] >= stop:
            return None
        times = self.camera.times
        # Of the whole episode: some of its rows do not tell how often it has frames.
        if not times.slowest[episode] <= fps <= times.fastest[episode]:
            return None
        begin = float(episodes.starts[episode] + times.first[episode])
        begin += (self.rows[0] - first) / fps
        path = episodes.paths[int(episodes.files[episode])]
        with self.camera.named():
            return find_packets(Path(path), begin, len(self.rows), fps, TOLERANCE_S)

    def statistics(self) -> Statistics:
        """Statistics of these frames: the dataset's own if they are an episode."""
        bounds = self.camera.episodes.bounds
        episode = int(np.searchsorted(bounds, self.rows[0], "right")) - 1
        if self.rows[0] == bounds[episode] and self.rows[-1] + 1 == bounds[episode + 1]:
            with self.camera.named():
                known = self.camera.statistics()
            found = known.get(int(self.camera.episodes.numbers[episode]))
            if found is not None:
                return found
        counted = ImageStatistics()
        for frame in chosen_frames(len(self.rows)).tolist():
            with self.camera.named():
                counted.add(self.camera.rows.read(*(int(self.rows[frame]) + n for n in (0, 1))))
        return counted.result()
