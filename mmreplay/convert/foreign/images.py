"""Images that a source keeps packed, unpacked one by one by Pillow (extra images)."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from mmreplay.convert.base import MAX_ROW_NBYTES
from mmreplay.convert.foreign.columns import Array
from mmreplay.errors import CorruptError, FailedError, FormatError

MAGIC = b"\xff\xd8\xff"
LOSSY = "it is lossy, and what it gives is not what the agent saw, bit by bit"
Packed = Callable[[int, int], list[bytes]]
"""Bytes of images ``[first, stop)``."""


class ImageRows:
    """Images as rows; see `columns.Rows`. Their shape is the first one's."""

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


def _library() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise FailedError(
            "Pillow is not installed, expected it for packed images; run: "
            'pip install "mmreplay[images]"'
        ) from error
    return Image


def _open(data: bytes, shape: tuple[int, ...] | None, name: str) -> Array:
    """One image, of a shape if given: its header is asked before it is unpacked."""
    image_library = _library()
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
        # Pillow lets through whatever its parsers stumble over.
        raise CorruptError(
            f"{name}: got {str(error)[:200]}, expected a whole JPEG or PNG image of "
            "bytes, of the shape of the others; the file is damaged: restore it from a "
            "copy"
        ) from error


def _bands(image: Any) -> tuple[int, ...]:
    bands = len(image.getbands())
    return () if bands == 1 else (bands,)
