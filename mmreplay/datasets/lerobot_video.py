"""Frames that become a video file, encoded or copied (PyAV, extra video)."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.parquet import Sink
from mmreplay.datasets.common.rows import Array
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FailedError, ReplayError, SchemaError, shown, undone_by

ENCODERS = {"h264": ("libx264",), "av1": ("libsvtav1", "libaom-av1")}
"""Encoders of each codec, the preferred one first."""
QUALITY = {"h264": 23, "av1": 30}
"""The factor of LeRobot's own recorder, and the usual one of H.264."""
MAX_CRF = {"h264": 51, "av1": 63}
MAX_GOP = 10_000
PIXELS = "yuv420p"


@dataclass(frozen=True, slots=True)
class Codec:
    """How frames are encoded.

    Attributes:
        name: ``"h264"`` or ``"av1"``, as info.json says it.
        encoder: Of FFmpeg.
        options: Its options.
    """

    name: str
    encoder: str
    options: dict[str, str]


def check_options(codec: object = None, crf: object = None, gop: object = None) -> str:
    """Check the options of videos, whether or not there are any.

    Returns:
        The name of the codec.

    Raises:
        SchemaError: One is not legal.
    """
    name = "h264" if codec is None else codec
    if not isinstance(name, str) or name not in ENCODERS:
        raise SchemaError(
            f"codec must be {' or '.join(ENCODERS)}, got {shown(name)}. Leave it out for h264."
        )
    for option, value, low, most in (("crf", crf, 0, MAX_CRF[name]), ("gop", gop, 1, MAX_GOP)):
        if value is not None and not (type(value) is int and low <= value <= most):
            raise SchemaError(
                f"{option} must be an integer in [{low}, {most}] with codec {name}, got "
                f"{shown(value)}. Leave it out for the usual one."
            )
    return name


def find_codec(codec: object = None, crf: object = None, gop: object = None) -> Codec:
    """Check the options of videos that are to be encoded.

    Args:
        codec: ``"h264"`` by default, or ``"av1"``.
        crf: Quality, lower is better; `QUALITY` by default.
        gop: Frames from one complete frame to the next; 2 by default, as LeRobot
            reads single frames.

    Raises:
        SchemaError: One is not legal, or this PyAV cannot encode so.
        FailedError: PyAV is not installed.
    """
    name = check_options(codec, crf, gop)
    av = _library()
    available = {
        each: [encoder for encoder in encoders if _encodes(av, encoder)]
        for each, encoders in ENCODERS.items()
    }
    if not available[name]:
        able = [each for each, encoders in available.items() if encoders]
        raise SchemaError(
            f"codec must be one that PyAV encodes here, {' or '.join(able) or 'which is none'}, "
            f"got {shown(name)}. Leave it out for h264, or pass video=false."
        )
    encoder = available[name][0]
    # Without frames that refer to later ones packets can be copied in their order.
    options = {
        "g": str(2 if gop is None else gop),
        "crf": str(QUALITY[name] if crf is None else crf),
        "bf": "0",
    }
    options |= {
        "libx264": {"forced-idr": "1"},
        "libsvtav1": {"preset": "12"},
        "libaom-av1": {"cpu-used": "8"},
    }.get(encoder, {})
    return Codec(name, encoder, options)


def _encodes(av: Any, encoder: str) -> bool:
    try:
        return bool(av.codec.Codec(encoder, "w").is_encoder)
    except ValueError:
        # It is not one that PyAV knows.
        return False


def _library() -> Any:
    try:
        import av
    except ImportError as error:
        raise FailedError(
            "PyAV, which videos need, is not installed. Run: pip install "
            '"mmreplay[video]", or pass video=false (-o video=false) to store images.'
        ) from error
    return av


@dataclass(frozen=True, slots=True)
class Packets:
    """Packets of consecutive frames in a file, the first of which needs no other.

    Attributes:
        path: Of the file.
        first: When its first frame is shown, in the stream's units.
        count: Packets, as many as frames.
        parameters: What packets of one stream have in common; the codec and the format
            of pixels are the first two.
    """

    path: Path
    first: int
    count: int
    parameters: tuple[object, ...]


def find_packets(
    path: Path, begin_s: float, count: int, fps: float, tolerance_s: float
) -> Packets | None:
    """Find the packets of frames without decoding them.

    Args:
        path: Of a video file.
        begin_s: When the first frame is shown.
        count: Frames, each shown 1 / fps seconds after the one before.
        fps: Frames a second.
        tolerance_s: By how much these times may differ.

    Returns:
        None where a frame is not there, or needs one that is not among them.

    Raises:
        CorruptError: The file is missing, or no video.
    """
    try:
        modified_ns = os.stat(path).st_mtime_ns
    except FileNotFoundError as error:
        raise CorruptError(f"{path} is missing. Restore it from a copy.") from error
    times, units, keys, parameters = _index(path, modified_ns)
    if not len(times) or (np.diff(times) <= 0).any():
        # Frames are stored in another order than they are shown.
        return None
    first = int(np.searchsorted(times, begin_s - tolerance_s))
    wanted = begin_s + np.arange(count) / fps
    if first + count > len(times) or not keys[first]:
        return None
    if (np.abs(times[first : first + count] - wanted) > tolerance_s).any():
        return None
    return Packets(path, units[first], count, parameters)


@lru_cache(16)
def _index(
    path: Path, changed: int
) -> tuple[NDArray[np.float64], list[int], list[bool], tuple[object, ...]]:
    """Times of a file's packets, which are complete frames, and its parameters."""
    with _opened(path) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        times = np.array([float(packet.pts * packet.time_base) for packet in packets])
        units = [packet.pts for packet in packets]
        return times, units, [packet.is_keyframe for packet in packets], _parameters(stream)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of another dataset.

    Raises:
        CorruptError: It is no video.
    """
    av, file = _library(), File.open(path, None)
    try:
        # By descriptor: the path may be another file by now.
        with av.open(f"/proc/self/fd/{file.fd}", format="mp4") as container:
            yield container
    except (av.error.FFmpegError, IndexError, TypeError) as error:
        raise CorruptError(
            f"{path} cannot be read as video ({str(error)[:200]}). The file is damaged: restore "
            "it from a copy."
        ) from error
    finally:
        file.close()


def _parameters(stream: Any) -> tuple[object, ...]:
    coder = stream.codec_context
    known = coder.codec.canonical_name, coder.pix_fmt, coder.width, coder.height
    return (*known, bytes(coder.extradata or b""))


class SeekableSink(Sink):
    """A file for a writer that goes back to what it wrote."""

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, maybe beyond the end."""
        self._end = offset + (0, self._end, self._file.nbytes)[whence]
        return self._end

    def write(self, data: Any) -> int:
        """Write all bytes."""
        size = super().write(data)
        self._file.nbytes = max(self._file.nbytes, self._end)
        return size


class VideoFile:
    """One video file that is being written; frame k is shown at k / fps seconds.

    Attributes:
        frames: Frames so far.
        nbytes: Bytes so far, of what the encoder gave.
        parameters: Of the packets that are copied; None where frames are encoded.
    """

    parameters: tuple[object, ...] | None = None

    def __init__(self, path: Path, fps: Fraction, codec: Codec, height: int, width: int) -> None:
        """Begin a file, which must not exist.

        Raises:
            SchemaError: The encoder refuses images of these sides.
        """
        self.frames = self.nbytes = 0
        self._path, self._fps, self._starts = path, fps, False
        self._av = _library()
        self._file = File.create(path, 0)
        with undone_by(self.abandon):
            self._sink = SeekableSink(self._file)
            self._container = self._av.open(self._sink, "w", format="mp4")
            self._stream = self._container.add_stream(codec.encoder, rate=fps)
            self._stream.width, self._stream.height = width, height
            self._stream.pix_fmt = PIXELS
            self._stream.options = dict(codec.options)
            # Of the encoder: that of the stream is the muxer's to choose.
            self._stream.codec_context.time_base = 1 / fps
            try:
                self._stream.codec_context.open()
            except self._av.error.FFmpegError as error:
                raise SchemaError(
                    f"{codec.encoder} cannot encode images of {height} x {width} pixels "
                    f"({error}). Choose another codec=, or pass video=false."
                ) from error

    @classmethod
    def copying(cls, path: Path, fps: Fraction, packets: Packets) -> VideoFile:
        """Begin a file of packets that have the parameters of some."""
        video = cls.__new__(cls)
        video.frames = video.nbytes = 0
        video._path, video._fps, video._starts = path, fps, False
        video._av = _library()
        video.parameters = packets.parameters
        video._file = File.create(path, 0)
        with undone_by(video.abandon), _opened(packets.path) as source:
            video._sink = SeekableSink(video._file)
            video._container = video._av.open(video._sink, "w", format="mp4")
            # No encoder is opened: what decodes AV1 encodes nothing.
            template = source.streams.video[0]
            video._stream = video._container.add_stream_from_template(template, opaque=True)
        return video

    def copy(self, packets: Packets) -> None:
        """Add packets of other files, which have the parameters of this one."""
        with self._translated_errors(), _opened(packets.path) as source:
            stream, unit = source.streams.video[0], 1 / self._fps
            # To that frame: it needs no other.
            source.seek(packets.first, stream=stream)
            stored = (
                each for each in source.demux(stream) if each.size and each.pts >= packets.first
            )
            for packet in islice(stored, packets.count):
                packet.stream = self._stream
                packet.time_base = unit
                packet.pts = packet.dts = self.frames
                packet.duration = 1
                self.frames += 1
                self._put([packet])

    def begin_episode(self) -> None:
        """Make the next frame a complete frame."""
        self._starts = True

    def add(self, frames: Array) -> None:
        """Encode frames uint8 ``[N, H, W, 3]``."""
        with self._translated_errors():
            for pixels in frames:
                frame = self._av.VideoFrame.from_ndarray(pixels, format="rgb24")
                frame.pts, frame.time_base = self.frames, 1 / self._fps
                if self._starts:
                    frame.pict_type = self._av.video.frame.PictureType.I
                self._starts = False
                self.frames += 1
                self._put(self._stream.encode(frame))

    def _put(self, packets: Any) -> None:
        for packet in packets:
            self.nbytes += packet.size
            self._container.mux(packet)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except ReplayError:
            raise
        except (OSError, ValueError, self._av.error.FFmpegError) as error:
            raise FailedError(
                f"cannot write {self._path}: {str(error)[:200]}. Choose another codec=, or pass "
                "video=false."
            ) from error

    def close(self) -> None:
        """Write what the encoder holds back, and the index."""
        with undone_by(self.abandon), self._translated_errors():
            if self.parameters is None:
                self._put(self._stream.encode(None))
            self._container.close()
        self.nbytes = self._file.nbytes
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()
