"""Compressed images (Pillow, extra images) and videos (PyAV, extra video) as rows."""

from __future__ import annotations

import io
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import MAX_ROW_NBYTES
from mmreplay.datasets.common.rows import Array, ColumnRows
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FailedError, FormatError, undone_by
from mmreplay.ragged import ragged_of_bytes
from mmreplay.schema import Field
from mmreplay.schema.images import QUALITY, image_library

MAGIC = b"\xff\xd8\xff"
MAGICS = {"jpeg": MAGIC, "png": b"\x89PNG"}
PACKED = tuple(MAGICS.values())
"""What files of either codec begin with."""
LOSSY = "it is lossy, and what it gives is not what the agent saw, bit by bit"
Packed = Callable[[int, int], list[bytes]]
"""Bytes of images ``[first, stop)``."""
TOLERANCE_S = 1e-4
"""LeRobot's own: the time of a frame may differ from that of its row by so much."""
SEEK_S = 1.0
"""Where the next episode begins later by more, its first frame is sought."""


@dataclass(frozen=True, slots=True)
class VideoEpisodes:
    """The place of each episode's frames in the video files of a camera.

    Attributes:
        bounds: int64 ``[episodes + 1]``, first row of each episode, and all rows.
        numbers: int64 ``[episodes]``, the number of each in the dataset.
        paths: The files.
        files: int64 ``[episodes]``, index of the file of each.
        starts: float64 ``[episodes]``, seconds in the file at which each begins.
    """

    bounds: NDArray[np.int64]
    numbers: NDArray[np.int64]
    paths: Sequence[Path]
    files: NDArray[np.int64]
    starts: NDArray[np.float64]


class ImageRows:
    """Images as rows of the first one's shape; see `common.rows.Rows`."""

    dtype = "uint8"

    def __init__(self, packed: Packed, count: int, name: str) -> None:
        self.count = count
        self._packed, self._name = packed, name
        self.shape = _open(packed(0, 1)[0], None, name).shape

    def as_files(self, codec: str) -> ImageFileRows | None:
        """The same images as files; None if they are of another codec.

        Those of which the first is are taken to be; a field of images has an axis of
        channels, and 1 or 3 of them.
        """
        shape = (*self.shape, 1) if len(self.shape) == 2 else self.shape
        if shape[-1] not in (1, 3):
            return None
        quality = QUALITY if codec == "jpeg" else None
        field = Field.image(shape, codec, quality)  # type: ignore[arg-type]  # one of CODECS
        assert field.encoding is not None
        if not self._packed(0, 1)[0].startswith(MAGICS[codec]):
            return None
        return ImageFileRows(self._packed, self.count, field, self._name)

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        found = np.empty((stop - first, *self.shape), np.uint8)
        for row, data in enumerate(self._packed(first, stop)):
            found[row] = _open(data, self.shape, f"{self._name}, row {first + row}")
        return found


class ImageFileRows:
    """Images as the files that they are, which differ in length; see `ImageRows`."""

    dtype = "uint8"

    def __init__(self, packed: Packed, count: int, field: Field, name: str) -> None:
        self.shape, self.count, self.field = field.shape, count, field
        self._packed, self._name = packed, name

    def read(self, first: int, stop: int) -> Any:
        """Return `Ragged` of shape ``(stop - first,)``; see `Rows.read`.

        Raises:
            CorruptError: One is no file that an image field stores.
        """
        files = self._packed(first, stop)
        encoding = self.field.encoding
        assert encoding is not None
        for row, file in enumerate(files):
            problem = encoding.problem(file)
            if problem is None and len(file) > encoding.max_nbytes:
                problem = f"it has {len(file)} bytes"
            if problem is not None:
                raise CorruptError(
                    f"{self._name}, row {first + row}, cannot be stored as it is, as "
                    f"{problem}. Cast the field to {encoding.options}, which encodes it again."
                )
        return ragged_of_bytes(files)


_one_at_a_time = threading.Lock()


class VideoRows:
    """Frames of episodes, each at its time in a video file; see `common.rows.Rows`.

    Reading goes forward: the decoder seeks at most once where an episode begins. A
    step back seeks again.

    Attributes:
        surplus: Frames of the files opened so far that no row has.
        surplus_files: Files that have some.
    """

    dtype = "uint8"

    def __init__(self, episodes: VideoEpisodes, times: ColumnRows, name: str) -> None:
        """Read the first frame for the shape.

        Args:
            episodes: Where the frames are.
            times: Seconds of each row since its episode began, of shape ``[]``.
            name: Name for errors.
        """
        self.count = times.count
        self.surplus = self.surplus_files = 0
        self._episodes, self._times, self._name = episodes, times, name
        lengths = np.diff(episodes.bounds)
        self._rows_of_file = np.bincount(episodes.files, lengths, len(episodes.paths))
        self._opened: set[int] = set()
        self._video: _Video | None = None
        self._next = -1
        self.shape: tuple[int, ...] = ()
        try:
            self.shape = self.read(0, 1).shape[1:]
        finally:
            self.close()

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`.

        Raises:
            CorruptError: A file has no frame at the time of a row or fewer frames than
                rows, or is damaged.
        """
        found = np.empty((stop - first, *self.shape), np.uint8)
        bounds = self._episodes.bounds
        # Cameras that are read in several threads have one column of times.
        with _one_at_a_time:
            stored = self._times.read(first, stop)
        seconds = stored.astype(np.float64).reshape(-1)
        # The time of a row may be rounded to its dtype.
        tolerances = TOLERANCE_S + np.spacing(np.abs(stored.reshape(-1))).astype(float)
        row = first
        while row < stop:
            episode = int(np.searchsorted(bounds, row, "right")) - 1
            video = self._open(int(self._episodes.files[episode]))
            begin, end = int(bounds[episode]), min(stop, int(bounds[episode + 1]))
            jumps = row == begin or row != self._next
            while row < end:
                second = self._episodes.starts[episode] + seconds[row - first]
                frame = video.frame_at(second, tolerances[row - first], jumps)
                if frame is None:
                    raise CorruptError(
                        f"{video.path} has no frame at {second:.4f} s, which frame "
                        f"{row - begin} of episode {self._episodes.numbers[episode]} "
                        f"of {self._name} needs. Restore the file from a copy, or pass "
                        "video='skip'."
                    )
                if not self.shape:
                    found = np.empty((stop - first, *frame.shape), np.uint8)
                elif frame.shape != self.shape:
                    raise CorruptError(
                        f"{self._name}: frame {row} must have shape {self.shape} like "
                        f"the first, got {frame.shape}. The files are of several "
                        "cameras."
                    )
                found[row - first] = frame
                row, jumps = row + 1, False
            self._next = row
        return found

    def _open(self, number: int) -> _Video:
        path = self._episodes.paths[number]
        if self._video is None or self._video.path != path:
            self.close()
            self._video = _Video(path)
            rows = int(self._rows_of_file[number])
            if 0 < self._video.count < rows:
                raise CorruptError(
                    f"{path} has {self._video.count} frames by its header, but "
                    f"{self._name} has {rows} rows there. Restore the file from a "
                    "copy, or pass video='skip'."
                )
            more = self._video.count - rows
            if number not in self._opened and more > 0:
                self.surplus += more
                self.surplus_files += 1
            self._opened.add(number)
        return self._video

    def close(self) -> None:
        """Close the open file."""
        if self._video is not None:
            self._video.close()
        self._video, self._next = None, -1


class _Video:
    """One open file: the frames from the last one that was asked for on.

    Attributes:
        path: Path of the file.
        count: Number of its frames by its header; 0 if that does not say it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._time = -math.inf
        self._frame: Any = None
        self._array: Array | None = None
        self._av = _video_library()
        # One for all frames: a new one for each takes as long as decoding it.
        self._converter = self._av.video.reformatter.VideoReformatter()
        self._file = File.open(path, None)
        with undone_by(self._file.close), self._translated_errors():
            # By descriptor: the path may be another file by now.
            self._container = self._av.open(f"/proc/self/fd/{self._file.fd}", format="mp4")
            self._stream = self._container.streams.video[0]
            self._unit_s = float(self._stream.time_base)
            self.count = int(self._stream.frames)
            self._frames = self._container.decode(self._stream)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TypeError, IndexError, self._av.error.FFmpegError) as error:
            raise CorruptError(
                f"{self.path} cannot be decoded after {max(self._time, 0):.3f} s "
                f"({str(error)[:200]}). The file is damaged: restore it from a copy."
            ) from error

    def frame_at(self, second: float, tolerance_s: float, jumps: bool) -> Array | None:
        """Return the frame at a time, or None if there is none.

        Args:
            second: Time since the beginning of the file.
            tolerance_s: Difference of the frame's time.
            jumps: The time does not follow the last one that was asked for.
        """
        if not 0 <= second + tolerance_s < math.inf:
            return None
        with self._translated_errors():
            behind = self._time > second + tolerance_s
            if behind or (jumps and second > max(self._time, 0) + SEEK_S):
                self._seek(second)
                self._forward(second - tolerance_s)
                if self._time > second + tolerance_s:
                    # Seeking goes by the order of decoding, which may be another one.
                    self._seek(0)
            self._forward(second - tolerance_s)
            if self._frame is None or self._time > second + tolerance_s:
                return None
            if self._array is None:
                if 3 * self._frame.width * self._frame.height > MAX_ROW_NBYTES:
                    raise ValueError(f"{self._frame.width} x {self._frame.height}")
                self._array = _pixels(self._converter.reformat(self._frame, format="rgb24"))
            return self._array

    def _seek(self, second: float) -> None:
        """Go to a key frame at or before a time."""
        self._container.seek(int(second / self._unit_s), stream=self._stream)
        self._frames = self._container.decode(self._stream)
        self._frame, self._array, self._time = None, None, -math.inf

    def _forward(self, second: float) -> None:
        """Decode up to the first frame at or after a time."""
        while self._time < second:
            self._frame, self._array = next(self._frames, None), None
            if self._frame is None:
                self._time = math.inf
            elif self._frame.pts is not None:
                self._time = self._frame.pts * self._unit_s

    def close(self) -> None:
        """Close the file."""
        self._container.close()
        self._file.close()


def _pixels(frame: Any) -> Array:
    """The pixels ``[height, width, 3]`` of a frame of RGB, as a view."""
    plane, width, height = frame.planes[0], frame.width, frame.height
    lines = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
    return lines[:height, : 3 * width].reshape(height, width, 3)


def _open(data: bytes, shape: tuple[int, ...] | None, name: str) -> Array:
    """Decode one image; check the shape in its header before."""
    library = image_library().Image
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with library.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
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


def _video_library() -> Any:
    try:
        import av
        import av.video.reformatter
    except ImportError as error:
        raise FailedError(
            "PyAV, which videos need, is not installed. Run: pip install "
            '"mmreplay[video]", or pass '
            "video='skip' to leave them out."
        ) from error
    return av
