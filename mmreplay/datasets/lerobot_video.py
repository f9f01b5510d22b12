"""Frames of a camera that become a video file (PyAV, extra video)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from mmreplay.convert.parquet import Sink
from mmreplay.datasets.common.rows import Array
from mmreplay.disk.files import File
from mmreplay.errors import FailedError, ReplayError, SchemaError, shown, undone_by

ENCODERS = {"h264": ("libx264", "libopenh264"), "av1": ("libsvtav1", "libaom-av1")}
"""Encoders of each codec, the preferred one first."""
QUALITY = {"h264": 23, "av1": 30}
"""The factor of LeRobot's own recorder, and the usual one of H.264."""
MAX_CRF, MAX_GOP = 63, 10_000
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


def find_codec(codec: object = None, crf: object = None, gop: object = None) -> Codec:
    """Check the options of videos.

    Args:
        codec: ``"h264"`` by default, or ``"av1"``.
        crf: Quality, lower is better; `QUALITY` by default.
        gop: Frames from one that is complete to the next; 2 by default, as LeRobot
            reads single frames.

    Raises:
        SchemaError: One is not legal, or this PyAV cannot encode so.
        FailedError: PyAV is not installed.
    """
    av = _library()
    name = "h264" if codec is None else codec
    available = {
        each: [encoder for encoder in encoders if _encodes(av, encoder)]
        for each, encoders in ENCODERS.items()
    }
    if not isinstance(name, str) or not available.get(name):
        able = [each for each, encoders in available.items() if encoders]
        raise SchemaError(
            f"codec must be one that PyAV encodes here, {' or '.join(able) or 'which is none'}, "
            f"got {shown(name)}. Leave it out for h264, or pass video=false."
        )
    for option, value, most in (("crf", crf, MAX_CRF), ("gop", gop, MAX_GOP)):
        low = 0 if option == "crf" else 1
        if value is not None and not (type(value) is int and low <= value <= most):
            raise SchemaError(
                f"{option} must be an integer in [{low}, {most}], got {shown(value)}. Leave it out "
                "for the usual one."
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
    """

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

    def begin_episode(self) -> None:
        """Make the next frame one that needs no other."""
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
            self._put(self._stream.encode(None))
            self._container.close()
        self.nbytes = self._file.nbytes
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()
