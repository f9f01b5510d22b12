"""Frames that a source keeps as video, unpacked by PyAV (extra video) one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay.convert.base import MAX_ROW_NBYTES
from mmreplay.convert.foreign.columns import Array
from mmreplay.errors import CorruptError, FailedError, FormatError
from mmreplay.files import File


class VideoRows:
    """Frames of files that follow each other; see `columns.Rows`.

    Reading goes forward; a step back begins at the first frame again.
    """

    dtype = "uint8"

    def __init__(self, paths: list[Path], count: int, name: str) -> None:
        """Look at the first frame.

        Args:
            paths: Of the files, in order.
            count: Frames in all.
            name: What to call them in errors.
        """
        self.count = count
        self._paths, self._name = paths, name
        self._restart()
        first = self._next()
        self.shape: tuple[int, ...] = first.shape
        self._restart()

    def _restart(self) -> None:
        self.close()
        self._frames = self._unpack()
        self._at = 0

    def _unpack(self) -> Iterator[Array]:
        av = _library()
        for path in self._paths:
            with closing(File.open(path, None)) as file:
                try:
                    # By descriptor: the path may be another file by now.
                    with av.open(f"/proc/self/fd/{file.fd}", format="mp4") as video:
                        for frame in video.decode(video=0):
                            if 3 * frame.width * frame.height > MAX_ROW_NBYTES:
                                raise FormatError(f"{frame.width} x {frame.height}")
                            yield np.asarray(frame.to_ndarray(format="rgb24"))
                except (OSError, ValueError, av.error.FFmpegError, IndexError) as error:
                    raise CorruptError(
                        f"{path}: got {str(error)[:200]} behind frame {self._at} of "
                        f"{self._name}, expected a whole video; the file is damaged: "
                        "restore it from a copy"
                    ) from error

    def _next(self) -> Array:
        frame = next(self._frames, None)
        if frame is None:
            raise CorruptError(
                f"{self._name} has {self._at} frames in {len(self._paths)} files that "
                f"end with {self._paths[-1]}, expected {self.count}; some are missing"
            )
        self._at += 1
        return frame

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        if first < self._at:
            self._restart()
        found = np.empty((stop - first, *self.shape), np.uint8)
        while self._at < first:
            self._next()
        for row in range(stop - first):
            frame = self._next()
            if frame.shape != self.shape:
                raise CorruptError(
                    f"{self._name}: frame {first + row} is {frame.shape}, expected "
                    f"{self.shape} as the first; the files are of several cameras"
                )
            found[row] = frame
        return found

    def close(self) -> None:
        """Give the open file back."""
        frames = getattr(self, "_frames", None)
        if frames is not None:
            frames.close()


def _library() -> Any:
    try:
        import av
    except ImportError as error:
        raise FailedError(
            "PyAV is not installed, expected it for videos; run: "
            "pip install \"mmreplay[video]\", or pass video='skip' to leave them out"
        ) from error
    return av
