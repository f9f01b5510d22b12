"""Images that are stored as JPEG or PNG files: what is accepted, encoded and decoded.

JPEG needs simplejpeg, and PNG needs Pillow: the extra ``images``. Each imports when it
is first used. A file is looked at before a decoder gets it: its header must state the
shape that the field declares, and nothing may be in it that takes long to decode or
much memory, so that no small file costs more than a frame. The decoders do not hold
the interpreter's lock, and so several frames are coded at a time.

References: JPEG, ITU-T T.81 (1992); PNG, ISO/IEC 15948:2004.
"""

from __future__ import annotations

import io
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np

from mmreplay.arguments import integer, one_of
from mmreplay.errors import FailedError, SchemaError, shown
from mmreplay.process import thread_pool

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from numpy.typing import NDArray

Item = TypeVar("Item")
Result = TypeVar("Result")

Codec = Literal["jpeg", "png"]
CODECS: tuple[Codec, ...] = get_args(Codec)
SUBSAMPLINGS = ("444", "422", "420")
QUALITY, SUBSAMPLING = 90, "420"
"""Of JPEG where nothing else is said: a twelfth of the space of a camera's frame."""
MAX_SIDE = 65_500
"""The longest side of a JPEG that libjpeg-turbo makes or reads."""
SPARE_NBYTES = 64 << 10
"""Files may be larger by so much than the array, where nothing else is declared. Noise
at a quality of 95 and above may need more."""
MAX_CHUNK_NBYTES = 64 << 10
"""The most bytes of a chunk of PNG that holds no pixels."""
MAX_CHUNKS = 1 << 14
MAX_THREADS = 4
ALONE_NBYTES = 128 << 10
"""Frames of fewer bytes in all are coded in the caller's thread."""

_PNG = b"\x89PNG\r\n\x1a\n"
_COMPRESSED = {b"iCCP", b"zTXt", b"iTXt"}
"""Chunks of PNG whose size says nothing of what they become."""
_ANIMATED = {b"acTL", b"fcTL", b"fdAT"}
_PIXELS = {b"IDAT", b"IEND"}
_BASELINE = {0xC0, 0xC1}
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""Markers of JPEG that begin a frame of any process."""
_ALONE = {0x01, *range(0xD0, 0xD8)}
"""Markers without a length."""
_SCAN, _END = b"\xff\xda", b"\xff\xd9"


@dataclass(frozen=True, slots=True)
class ImageEncoding:
    """How a field stores images.

    Attributes:
        shape: ``(height, width, channels)`` of each, uint8, with 1 or 3 channels.
        codec: ``"jpeg"``, or ``"png"``, which loses nothing.
        quality: Of JPEG, from 1 to 100; None of PNG.
        subsampling: Of JPEG's colors, one of `SUBSAMPLINGS`; None of PNG.
        stated: Whether the user chose the quality; it does not count for equality.
    """

    shape: tuple[int, int, int]
    codec: Codec
    quality: int | None
    subsampling: str | None
    stated: bool = field(default=True, compare=False, repr=False)

    @classmethod
    def declared(
        cls, shape: object, codec: object, quality: object = None, subsampling: object = None
    ) -> ImageEncoding:
        """Check what a user declares.

        Args:
            shape: ``(height, width, 1)`` or ``(height, width, 3)``.
            codec: One of `CODECS`.
            quality: From 1 to 100; None for 90, or of PNG.
            subsampling: One of `SUBSAMPLINGS`; None for ``"420"``, or of PNG.

        Raises:
            SchemaError: One is not possible.
        """
        one_of("image codec", codec, CODECS, "Pass 'jpeg', or 'png', which loses nothing.")
        axes = tuple(shape) if isinstance(shape, tuple | list) else ()
        integers = [isinstance(x, int | np.integer) and type(x) is not bool for x in axes]
        legal = len(axes) == 3 and all(integers)
        if not legal or axes[2] not in (1, 3) or not all(0 < axis <= MAX_SIDE for axis in axes):
            raise SchemaError(
                f"image shape must be (height, width, 1) or (height, width, 3), with sides of at "
                f"most {MAX_SIDE}, got {shown(shape)}. Images of uint8 with other axes are a "
                "Field(shape, 'uint8'); engine='zarr' compresses them."
            )
        height, width, channels = (int(axis) for axis in axes)
        if codec == "png":
            for name, value in (("quality", quality), ("subsampling", subsampling)):
                if value is not None:
                    raise SchemaError(
                        f"image {name} must be None with codec 'png', which loses nothing, got "
                        f"{shown(value)}. Leave it out."
                    )
            return cls((height, width, channels), "png", None, None)
        stated = quality is not None
        way_out = "95 is nearly without visible loss; 'png' loses nothing."
        quality = integer("image quality", quality if stated else QUALITY, 1, way_out, maximum=100)
        subsampling = SUBSAMPLING if subsampling is None else subsampling
        one_of("image subsampling", subsampling, SUBSAMPLINGS, "'444' keeps all colors.")
        return cls((height, width, channels), "jpeg", quality, str(subsampling), stated)

    @property
    def nbytes(self) -> int:
        """Bytes of one image as an array."""
        height, width, channels = self.shape
        return height * width * channels

    @property
    def max_nbytes(self) -> int:
        """The most bytes of a file where nothing else is declared."""
        return self.nbytes + SPARE_NBYTES

    @property
    def planned_nbytes(self) -> int:
        """Bytes of a file for which room is planned where nothing else is said."""
        return self.nbytes // 4 if self.codec == "jpeg" else self.nbytes

    @property
    def options(self) -> str:
        """Codec, quality and subsampling, such as ``jpeg:90:420``, or ``png``."""
        return "png" if self.codec == "png" else f"jpeg:{self.quality}:{self.subsampling}"

    def problem(self, data: bytes | memoryview | NDArray[np.uint8]) -> str | None:
        """What is wrong with a file, by its header, its chunks and its end.

        Returns:
            Such as ``"it is a progressive JPEG"``; None where it may be decoded.
        """
        file = data if type(data) is bytes else bytes(data)
        if not file:
            return "it has no bytes"
        found = _jpeg_problem(file, self) if self.codec == "jpeg" else _png_problem(file, self)
        if found is not None and self.codec == "jpeg" and file.startswith(_PNG):
            return "it is a PNG"
        if found is not None and self.codec == "png" and file.startswith(b"\xff\xd8"):
            return "it is a JPEG"
        return found

    def is_file(self, value: object) -> bool:
        """Whether a value is the bytes of a file that is stored as it is."""
        return type(value) is bytes and self.problem(value) is None

    def encode(self, array: NDArray[np.uint8]) -> bytes:
        """The file of an image ``[height, width, channels]``.

        Raises:
            FailedError: The library is not installed.
        """
        gray = self.shape[2] == 1
        if self.codec == "png":
            packed = io.BytesIO()
            image = image_library().Image.fromarray(array[..., 0] if gray else array)
            # Higher levels take several times as long for a few percent.
            image.save(packed, "PNG", compress_level=1)
            return packed.getvalue()
        # Of rows that lie apart, it would read others.
        file: bytes = _simplejpeg().encode_jpeg(
            np.ascontiguousarray(array),
            quality=self.quality,
            colorspace="GRAY" if gray else "RGB",
            colorsubsampling="Gray" if gray else self.subsampling,
            fastdct=False,
        )
        return file

    def decode(self, data: bytes | memoryview | NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Write the image of a file into an array.

        Args:
            data: The file.
            out: ``[height, width, channels]``, C-contiguous.

        Raises:
            ValueError: It is no whole file of the codec and the shape.
            FailedError: The library is not installed.
        """
        library = _simplejpeg() if self.codec == "jpeg" else image_library()
        file = data if type(data) is bytes else bytes(data)
        problem = self.problem(file)
        if problem is not None:
            raise ValueError(problem)
        if self.codec == "jpeg":
            colors = "GRAY" if self.shape[2] == 1 else "RGB"
            library.decode_jpeg(file, colorspace=colors, buffer=out)
            return
        try:
            # `Image.open` takes more than 13,000 x 13,000 pixels for an attack.
            with library.PngImagePlugin.PngImageFile(io.BytesIO(file)) as image:
                height, width, channels = self.shape
                stated = image.height, image.width, len(image.getbands())
                if stated != self.shape:
                    raise ValueError(f"it is an image of {stated}")
                pixels = np.asarray(image).reshape(height, width, channels)
        except (OSError, SyntaxError, EOFError, zlib.error, struct.error) as error:
            # What Pillow raises of a damaged file.
            raise ValueError(str(error)) from error
        out[...] = pixels


def _jpeg_problem(file: bytes, image: ImageEncoding) -> str | None:
    """What is wrong with a JPEG; see `ImageEncoding.problem`."""
    if not file.startswith(b"\xff\xd8"):
        return "it is no JPEG"
    if not file.rstrip(b"\0").endswith(_END):
        return "it is cut off: it has no end marker"
    # Most files begin as the one before: tables of one encoder, and the same size.
    known = _headers.get(image.shape)
    if known is not None and file.startswith(known):
        return None
    try:
        marker, frame, scan = _jpeg_frame(file)
    except ValueError as error:
        return str(error)
    if marker not in _BASELINE:
        kind = "a progressive" if marker == 0xC2 else "an arithmetic or lossless"
        return f"it is {kind} JPEG"
    precision, height, width, components = struct.unpack(">BHHB", frame[:6])
    if precision != 8:
        return f"its samples have {precision} bits"
    if components not in (1, 3):
        return f"it has {components} components, as CMYK has"
    if (height, width, components) != image.shape:
        return f"it is an image of {(height, width, components)}"
    # Each scan is decoded, so that many of them would take long. One of all components
    # is the last: libjpeg refuses more.
    if file[scan] < components and (scans := 1 + file.count(_SCAN, scan)) > components:
        return f"it has {scans} scans of {components} components"
    if file[scan] == components and scan < MAX_HEADER_NBYTES:
        _headers[image.shape] = file[: scan + 1]
    return None


_headers: dict[tuple[int, int, int], bytes] = {}
"""The header of the last JPEG that was accepted, by its shape, up to its only scan's
number of components."""
MAX_HEADER_NBYTES = 4096


def _jpeg_frame(file: bytes) -> tuple[int, bytes, int]:
    """The marker and header of a JPEG's frame, and where its first scan's header is.

    Raises:
        ValueError: What is before the scan is no header.
    """
    at, marker, frame = 2, 0, b""
    while True:
        # Fill bytes may stand before a marker.
        while file[at : at + 2] == b"\xff\xff":
            at += 1
        if len(file) < at + 5 or file[at] != 0xFF:
            raise ValueError("its header is cut off or damaged")
        segment, nbytes = file[at + 1], int.from_bytes(file[at + 2 : at + 4])
        if segment in _ALONE or nbytes < 2:
            raise ValueError("its header is damaged")
        if segment == 0xDA:
            break
        if segment in _FRAMES:
            if frame:
                raise ValueError("it has two frames")
            marker, frame = segment, file[at + 4 : at + 2 + nbytes]
        at += 2 + nbytes
    if len(frame) < 6:
        raise ValueError("it has no frame")
    return marker, frame, at + 4


def _png_problem(file: bytes, image: ImageEncoding) -> str | None:
    """What is wrong with a PNG; see `ImageEncoding.problem`."""
    if not file.startswith(_PNG):
        return "it is no PNG"
    try:
        chunks = list(_png_chunks(file))
    except ValueError as error:
        return str(error)
    if not chunks or chunks[0][0] != b"IHDR" or chunks[0][2] != 13:
        return "its header is damaged"
    at = chunks[0][1]
    width, height, bits, color, *rest = struct.unpack(">IIBBBBB", file[at : at + 13])
    if (problem := _header_problem(bits, color, rest)) is not None:
        return problem
    if (height, width, 3 if color == 2 else 1) != image.shape:
        return f"it is an image of {(height, width, 3 if color == 2 else 1)}"
    for name, _, nbytes in chunks[1:]:
        if (problem := _chunk_problem(name, nbytes)) is not None:
            return problem
    return None if any(name == b"IDAT" for name, _, _ in chunks) else "it has no pixels"


def _chunk_problem(name: bytes, nbytes: int) -> str | None:
    """Why a chunk of a PNG behind its header is not accepted."""
    if name == b"IHDR":
        # Decoders obey the last one, which may state any size.
        return "it has two headers"
    if name in _ANIMATED:
        return "it is animated"
    if name in _COMPRESSED:
        return f"it has a compressed chunk {name.decode()}"
    if name not in _PIXELS and nbytes > MAX_CHUNK_NBYTES:
        return f"it has a chunk of {nbytes} bytes without pixels"
    return None


def _png_chunks(file: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, place and bytes of each chunk of a PNG, the last one included.

    Raises:
        ValueError: It ends before that, or has too many.
    """
    at, name = len(_PNG), b""
    for _ in range(MAX_CHUNKS):
        if name == b"IEND":
            return
        if len(file) < at + 12:
            break
        (nbytes,), name = struct.unpack(">I", file[at : at + 4]), file[at + 4 : at + 8]
        if len(file) < at + 12 + nbytes:
            break
        yield name, at + 8, nbytes
        at += 12 + nbytes
    else:
        raise ValueError(f"it has more than {MAX_CHUNKS} chunks")
    raise ValueError("it is cut off: it has no end")


def _header_problem(bits: int, color: int, rest: Sequence[int]) -> str | None:
    """What is wrong with the numbers of a PNG's header, but its size."""
    if color == 3:
        return "it is a PNG with a palette"
    if color in (4, 6):
        return "it has an alpha channel"
    if color not in (0, 2):
        return "its header is damaged"
    if bits != 8:
        return f"its samples have {bits} bits"
    if rest[2] == 1:
        return "it is interlaced"
    return "its header is damaged" if any(rest) else None


def in_threads(work: Callable[[Item], Result], items: Sequence[Item], nbytes: int) -> list[Result]:
    """Call a function with each item, in several threads where that pays.

    Args:
        work: Encodes or decodes one image.
        items: Images or files.
        nbytes: Of all arrays together.

    Returns:
        Its results, in order.
    """
    if len(items) < 2 or nbytes < ALONE_NBYTES or (threads := _num_threads()) < 2:
        return [work(item) for item in items]
    # As many jobs as threads: to hand one over takes as long as a small frame.
    stride = min(threads, len(items))
    shares = [items[first::stride] for first in range(stride)]
    done = list(_pool().map(_all_of, repeat(work), shares))
    results: list[Any] = [None] * len(items)
    for first, share in enumerate(done):
        results[first::stride] = share
    return results


def _all_of(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return [work(item) for item in items]


def _num_threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


_lock = threading.Lock()
_threads: ThreadPoolExecutor | None = None


def _pool() -> ThreadPoolExecutor:
    """The threads of this process, made when the first is needed."""
    global _threads
    with _lock:
        if _threads is None:
            _threads = thread_pool(_num_threads(), "mmreplay-images")
        return _threads


def _forget_pool() -> None:
    """A forked child has none of its parent's threads."""
    global _threads, _lock
    _threads, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)


def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError as error:
        raise _missing("simplejpeg", "fields of JPEG images") from error
    return simplejpeg


def image_library() -> Any:
    """Pillow, with its modules ``Image`` and ``PngImagePlugin``.

    Raises:
        FailedError: It is not installed.
    """
    try:
        import PIL.Image
        import PIL.PngImagePlugin
    except ImportError as error:
        raise _missing("Pillow", "PNG and packed images") from error
    return PIL


def _missing(library: str, what: str) -> FailedError:
    return FailedError(
        f'{library}, which {what} need, is not installed. Run: pip install "mmreplay[images]"'
    )
