"""Compressed images (Pillow, extra images) and videos (PyAV, extra video) as rows."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay.convert.base import MAX_ROW_NBYTES
from mmreplay.datasets.common.rows import Array
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FailedError, FormatError

MAGIC = b"\xff\xd8\xff"
LOSSY = "it is lossy, and what it gives is not what the agent saw, bit by bit"
Packed = Callable[[int, int], list[bytes]]
"""Bytes of images ``[first, stop)``."""


class ImageRows:
    """Images as rows of the first one's shape; see `common.rows.Rows`."""

    dtype = "uint8"

    def __init__(self, packed: Packed, count: int, name: str) -> None:
        self.count = count
        self._packed, self._name = packed, name
        self.shape = _open(packed(0, 1)[0], None, name).shape

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        found = np.empty((stop - first, *self.shape), np.uint8)
        for row, data in enumerate(self._packed(first, stop)):
            found[row] = _open(data, self.shape, f"{self._name}, row {first + row}")
        return found


class VideoRows:
    """Frames of consecutive files; see `common.rows.Rows`.

    Reading goes forward; a step back starts at the first frame again.
    """

    dtype = "uint8"

    def __init__(self, paths: list[Path], count: int, name: str) -> None:
        """Read the first frame for the shape.

        Args:
            paths: Paths of the files, in order.
            count: Number of frames.
            name: Name for errors.
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
        av = _video_library()
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
                        f"{path} cannot be decoded after frame {self._at} of "
                        f"{self._name} ({str(error)[:200]}). The file is damaged: "
                        "restore it from a copy."
                    ) from error

    def _next(self) -> Array:
        frame = next(self._frames, None)
        if frame is None:
            raise CorruptError(
                f"{self._name} must have {self.count} frames, got {self._at} in "
                f"{len(self._paths)} files up to {self._paths[-1]}. Some files are "
                "missing."
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
                    f"{self._name}: frame {first + row} must have shape {self.shape} "
                    f"like the first, got {frame.shape}. The files are of several "
                    "cameras."
                )
            found[row] = frame
        return found

    def close(self) -> None:
        """Close the open file."""
        frames = getattr(self, "_frames", None)
        if frames is not None:
            frames.close()


def _open(data: bytes, shape: tuple[int, ...] | None, name: str) -> Array:
    """Decode one image; check the shape in its header before."""
    image_library = _image_library()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with image_library.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
                if image.mode not in ("L", "RGB", "RGBA"):
                    raise FormatError(f"an image of mode {image.mode}")
                claimed = (image.height, image.width, *_bands(image))
                if shape is None and int(np.prod(claimed)) > MAX_ROW_NBYTES:
                    raise FormatError(f"an image of {claimed}")
                if shape is not None and claimed != shape:
                    raise FormatError(f"an image of {claimed}, not {shape}")
                return np.array(image, np.uint8)
    except Exception as error:
        # Pillow's parsers raise many kinds of errors.
        raise CorruptError(
            f"{name} is not a complete JPEG or PNG image of the shape of the others, "
            f"got {str(error)[:200]}. The file is damaged: restore it from a copy."
        ) from error


def _bands(image: Any) -> tuple[int, ...]:
    bands = len(image.getbands())
    return () if bands == 1 else (bands,)


def _image_library() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise FailedError(
            "Pillow, which packed images need, is not installed. Run: pip install "
            '"mmreplay[images]"'
        ) from error
    return Image


def _video_library() -> Any:
    try:
        import av
    except ImportError as error:
        raise FailedError(
            "PyAV, which videos need, is not installed. Run: pip install "
            '"mmreplay[video]", or pass '
            "video='skip' to leave them out."
        ) from error
    return av
