"""Codecs of Zarr arrays that others wrote, v2 and v3: unpacking one chunk's bytes.

Every length that a chunk says of itself is checked before anything is unpacked, and
nothing unpacks to more than the array's own metadata says a chunk has.
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
from mmreplay.storage import codecs

Buffer = bytes | memoryview
Unpack = Callable[[Buffer, int, int | None], Buffer]
"""Called with the bytes, how many at most they may become, and how many exactly
where that is known. Raises ValueError, RuntimeError, OSError or struct.error."""

FILTERS = ("delta", "shuffle", "fixedscaleoffset", "quantize", "bitround", "astype")
"""Codecs of numcodecs that make as many items of as many."""
NUMBERS = re.compile(r"[<>|=]?[biuf]\d{1,2}|(u?int|float)\d{1,2}|bool")
MAX_WIDER = 8
LZMA_MEMORY = 256 << 20


def _blosc(data: Buffer, most: int, exact: int | None) -> Buffer:
    # The library trusts what the header says of either length.
    nbytes, packed = codecs.BLOSC_SIZES.unpack_from(data, 4)
    if packed != len(data) or nbytes > most or nbytes != (exact or nbytes):
        raise ValueError(f"a chunk that says {nbytes} bytes in {packed}")
    return _bytes(codecs.blosc().decompress(data))


def _zstd(data: Buffer, most: int, exact: int | None) -> Buffer:
    nbytes = codecs.zstd_nbytes(memoryview(data))
    if nbytes < 0:
        # Written as a stream: the library then fills exactly what it is given.
        nbytes = -1 if exact is None else exact
    if nbytes < 0 or nbytes > most or nbytes != (exact or nbytes):
        raise ValueError(f"a frame that says {nbytes} bytes")
    out = np.empty(nbytes, np.uint8)
    codecs.library("zstd").decompress(data, out)
    return out.data


def _lz4(data: Buffer, most: int, exact: int | None) -> Buffer:
    (nbytes,) = struct.unpack_from("<i", data)
    if not 0 <= nbytes <= most or nbytes != (exact or nbytes):
        raise ValueError(f"a chunk that says {nbytes} bytes")
    return _bytes(codecs.library("lz4").decompress(data))


def _whole(unpacker: Any, data: Buffer, most: int) -> bytes:
    found: bytes = unpacker.decompress(data, most + 1)
    if len(found) > most or not unpacker.eof:
        raise ValueError(f"{len(found)} bytes and no end")
    return found


def _zlib(data: Buffer, most: int, exact: int | None) -> Buffer:
    # Headers of zlib and of gzip are told apart by the library.
    return _whole(zlib.decompressobj(47), data, most)


def _bz2(data: Buffer, most: int, exact: int | None) -> Buffer:
    return _whole(bz2.BZ2Decompressor(), data, most)


def _lzma(data: Buffer, most: int, exact: int | None) -> Buffer:
    try:
        return _whole(lzma.LZMADecompressor(memlimit=LZMA_MEMORY), data, most)
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from error


def _crc32c(data: Buffer, most: int, exact: int | None) -> Buffer:
    body, told = data[:-4], struct.unpack("<I", data[-4:])[0]
    if google_crc32c.value(bytes(body)) != told:
        raise ValueError("bytes that differ from their checksum")
    return body


UNPACKERS: Mapping[str, Unpack] = {
    "blosc": _blosc, "zstd": _zstd, "lz4": _lz4, "zlib": _zlib, "gzip": _zlib,
    "bz2": _bz2, "lzma": _lzma, "crc32c": _crc32c,
}  # fmt: skip


def _bytes(found: Any) -> Buffer:
    return found if isinstance(found, bytes) else memoryview(found).cast("B")


def _plain(dtype: str) -> bool:
    """Whether text names numbers or bools."""
    return NUMBERS.fullmatch(dtype) is not None


class Chain:
    """What one array's chunks go through, in the order of unpacking.

    Attributes:
        names: Of the codecs, in the order of packing.
    """

    def __init__(
        self, packing: Sequence[tuple[str, Mapping[str, Any]]], what: str
    ) -> None:
        """Make one.

        Args:
            packing: Name and configuration of each codec that makes bytes of bytes,
                in the order in which they packed.
            what: The array, as messages name it.

        Raises:
            FormatError: One is not known.
        """
        self.names = tuple(name for name, _ in packing)
        self._what = what
        self._steps = [
            (name, self._step(name, options)) for name, options in reversed(packing)
        ]

    def _step(self, name: str, options: Mapping[str, Any]) -> Unpack:
        if name in UNPACKERS:
            return UNPACKERS[name]
        if name not in FILTERS:
            raise FormatError(
                f"{self._what} is packed by {name!r}, expected one of "
                f"{', '.join([*UNPACKERS, *FILTERS])}; leave the array out with "
                "fields=, or copy the group with other codecs"
            )
        try:
            odd = [v for v in options.values() if isinstance(v, str) and not _plain(v)]
            if odd:
                raise ValueError(f"{odd[0]!r:.40} is no dtype of numbers")
            made = codecs.library("registry").get_codec({"id": name, **options})
        except Exception as error:
            # The library raises whatever it stumbles over, here and below.
            raise FormatError(
                f"{self._what}: codec {name!r} of {dict(options)} cannot be made "
                f"({error}), expected options that numcodecs takes; it is damaged"
            ) from error

        def decode(data: Buffer, most: int, exact: int | None) -> Buffer:
            try:
                found = _bytes(np.ascontiguousarray(made.decode(bytes(data))).data)
            except Exception as error:
                raise ValueError(f"{name}: {error}") from error
            if len(found) > most:
                raise ValueError(f"{len(found)} bytes")
            return found

        return decode

    def unpack(self, data: Buffer, nbytes: int) -> Buffer:
        """Bytes of a chunk.

        Args:
            data: As they are stored.
            nbytes: What they must become.

        Raises:
            ValueError: They are damaged.
        """
        try:
            for number, (_, step) in enumerate(self._steps):
                last = number == len(self._steps) - 1
                most = nbytes if last else MAX_WIDER * nbytes + 1024
                data = step(data, most, nbytes if last else None)
        except (RuntimeError, OSError, EOFError, TypeError, zlib.error) as error:
            raise ValueError(str(error)) from error
        except struct.error as error:
            raise ValueError(f"{len(data)} bytes ({error})") from error
        if len(data) != nbytes:
            raise ValueError(f"{len(data)} bytes")
        return data


def packed_most(nbytes: int) -> int:
    """Bytes that a chunk may take as it is stored, whatever packed it."""
    return 2 * nbytes + (64 << 10)
