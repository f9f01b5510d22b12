"""Unpacks chunks of Zarr arrays of other writers, by codecs of an allow-list.

Every length that a chunk states of itself is checked before anything is unpacked, and
nothing unpacks to more bytes than the array's own metadata gives a chunk. The codecs
themselves are those of numcodecs and the standard library.
"""

from __future__ import annotations

import bz2
import lzma
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np

from mmreplay.errors import FormatError
from mmreplay.storage.zarr import codecs

Buffer = bytes | memoryview
Unpack = Callable[[Buffer, int, int | None], Buffer]
"""Takes the packed bytes, the most bytes they may become, and the exact number where
it is known. Raises ValueError, RuntimeError, OSError or struct.error."""

FILTERS = ("delta", "shuffle", "fixedscaleoffset", "quantize", "bitround", "astype")
"""Codecs of numcodecs that turn numbers into as many numbers."""
NUMBERS = re.compile(r"[<>|=]?[biuf]\d{1,2}|(u?int|float)\d{1,2}|bool")
MAX_WIDER = 8
"""How many times as wide as the array's items a filter may make them."""
LZMA_MEMORY = 256 << 20


class CodecChain:
    """The codecs of one array's chunks.

    Attributes:
        names: Names of the codecs, in the order of packing.
    """

    def __init__(self, packing: Sequence[tuple[str, Mapping[str, Any]]], what: str) -> None:
        """Prepare the codecs.

        Args:
            packing: Name and configuration of each codec that makes bytes of bytes,
                in the order of packing.
            what: The array, as messages name it.

        Raises:
            FormatError: A codec is not on the allow-list, or its options are wrong.
        """
        self.names = tuple(name for name, _ in packing)
        self._steps = [_step(name, opts, what) for name, opts in reversed(packing)]

    def unpack(self, data: Buffer, nbytes: int) -> Buffer:
        """Return the bytes of one chunk.

        Args:
            data: The packed bytes.
            nbytes: How many bytes they must become.

        Raises:
            ValueError: The packed bytes are damaged.
        """
        try:
            for number, step in enumerate(self._steps, 1):
                last = number == len(self._steps)
                max_nbytes = nbytes if last else MAX_WIDER * nbytes + 1024
                data = step(data, max_nbytes, nbytes if last else None)
        except (RuntimeError, OSError, EOFError, TypeError, zlib.error) as error:
            raise ValueError(str(error)) from error
        except struct.error as error:
            raise ValueError(f"{len(data)} bytes ({error})") from error
        if len(data) != nbytes:
            raise ValueError(f"{len(data)} bytes")
        return data


def max_packed_nbytes(nbytes: int) -> int:
    """Return how many bytes a chunk of `nbytes` may take when packed by any codec."""
    return 2 * nbytes + (64 << 10)


def _step(name: str, options: Mapping[str, Any], what: str) -> Unpack:
    """Return the function that undoes one codec."""
    if name in UNPACKERS:
        return UNPACKERS[name]
    if name not in FILTERS:
        raise FormatError(
            f"{what} uses codec {name!r}, but must use one of {', '.join(ALLOWED)}. "
            "Leave the array out with fields=, or copy the group with other codecs."
        )
    try:
        # A dtype of objects would run pickles.
        odd = [
            value
            for value in options.values()
            if isinstance(value, str) and not NUMBERS.fullmatch(value)
        ]
        if odd:
            raise ValueError(f"{odd[0]!r:.40} is not a numeric dtype")
        codec = codecs.library("registry").get_codec({"id": name, **options})
    except Exception as error:
        # numcodecs raises whatever it meets, here and below.
        raise FormatError(
            f"{what}: numcodecs refuses {dict(options)} for codec {name!r} ({error}). "
            "The metadata is damaged: restore it from a copy."
        ) from error

    def undo(data: Buffer, max_nbytes: int, exact: int | None) -> Buffer:
        try:
            decoded = _bytes(np.ascontiguousarray(codec.decode(bytes(data))).data)
        except Exception as error:
            raise ValueError(f"{name}: {error}") from error
        if len(decoded) > max_nbytes:
            raise ValueError(f"{len(decoded)} bytes")
        return decoded

    return undo


def _blosc(data: Buffer, max_nbytes: int, exact: int | None) -> Buffer:
    # The library trusts the header about either length.
    nbytes, packed = codecs.BLOSC_SIZES.unpack_from(data, 4)
    if packed != len(data) or nbytes > max_nbytes or nbytes != (exact or nbytes):
        raise ValueError(f"its header says {nbytes} bytes in {packed}")
    return _bytes(codecs.blosc().decompress(data))


def _zstd(data: Buffer, max_nbytes: int, exact: int | None) -> Buffer:
    nbytes = codecs.zstd_nbytes(memoryview(data))
    if nbytes < 0:
        # Written as a stream, without a length: the library then fills exactly the
        # array that it is given.
        nbytes = -1 if exact is None else exact
    if nbytes < 0 or nbytes > max_nbytes or nbytes != (exact or nbytes):
        raise ValueError(f"its header says {nbytes} bytes")
    out = np.empty(nbytes, np.uint8)
    codecs.library("zstd").decompress(data, out)
    return out.data


def _lz4(data: Buffer, max_nbytes: int, exact: int | None) -> Buffer:
    (nbytes,) = struct.unpack_from("<i", data)
    if not 0 <= nbytes <= max_nbytes or nbytes != (exact or nbytes):
        raise ValueError(f"its header says {nbytes} bytes")
    return _bytes(codecs.library("lz4").decompress(data))


def _zlib(data: Buffer, max_nbytes: int, exact: int | None) -> Buffer:
    # 32 + 15 bits: the library recognizes headers of zlib and of gzip.
    return _bounded(zlib.decompressobj(47), data, max_nbytes)


def _bz2(data: Buffer, max_nbytes: int, exact: int | None) -> Buffer:
    return _bounded(bz2.BZ2Decompressor(), data, max_nbytes)


def _lzma(data: Buffer, max_nbytes: int, exact: int | None) -> Buffer:
    try:
        unpacker = lzma.LZMADecompressor(memlimit=LZMA_MEMORY)
        return _bounded(unpacker, data, max_nbytes)
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from error


def _crc32c(data: Buffer, max_nbytes: int, exact: int | None) -> Buffer:
    body, stored = data[:-4], struct.unpack("<I", data[-4:])[0]
    if google_crc32c.value(bytes(body)) != stored:
        raise ValueError("it does not match its checksum")
    return body


def _bounded(unpacker: Any, data: Buffer, max_nbytes: int) -> bytes:
    """Unpack a whole stream, and stop at the first byte too many."""
    unpacked: bytes = unpacker.decompress(data, max_nbytes + 1)
    if len(unpacked) > max_nbytes or not unpacker.eof:
        raise ValueError(f"{len(unpacked)} bytes and no end")
    return unpacked


def _bytes(data: Any) -> Buffer:
    return data if isinstance(data, bytes) else memoryview(data).cast("B")


UNPACKERS: Mapping[str, Unpack] = {
    "blosc": _blosc,
    "zstd": _zstd,
    "lz4": _lz4,
    "zlib": _zlib,
    "gzip": _zlib,
    "bz2": _bz2,
    "lzma": _lzma,
    "crc32c": _crc32c,
}
ALLOWED = (*UNPACKERS, *FILTERS)
