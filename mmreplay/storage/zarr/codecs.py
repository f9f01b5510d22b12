"""The codecs of chunks, from numcodecs, which is loaded with the first chunk."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import FailedError
from mmreplay.format.sharding import Sharding

Bytes = NDArray[np.uint8]
BLOSC_SIZES = struct.Struct("<I4xI")
CRC = struct.Struct("<I")
EMPTY_FRAME = b"\x28\xb5\x2f\xfd\x00\x00\x01\x00\x00"
"""A Zstandard frame of nothing, that does not say how much it holds."""


class ChunkCodec(Protocol):
    """Packs one chunk's bytes and back.

    Attributes:
        nbytes_apart: Chunks of so many bytes are unpacked sooner by two threads: of
            less, what Python does between them is most of it.
    """

    nbytes_apart: int

    def pack(self, data: Bytes) -> Any:
        """Return the packed bytes, as a buffer."""

    def unpack(self, data: memoryview, out: Bytes) -> None:
        """Fill out, uint8 ``[N]``.

        Raises:
            ValueError: The bytes are no chunk of N bytes.
            RuntimeError: The library cannot read them.
        """

    def nbytes(self, data: memoryview) -> int:
        """Return how many bytes a chunk says it holds, unpacked; `unpack` checks it.

        Raises:
            ValueError: The bytes are no chunk.
            struct.error: Likewise.
        """

    def unpack_many(self, chunks: Sequence[memoryview], out: Bytes) -> None:
        """Fill out, uint8 ``[K, N]`` and contiguous, with K chunks; see `unpack`."""
        for chunk, row in zip(chunks, out, strict=True):
            self.unpack(chunk, row)


class Uncompressed(ChunkCodec):
    """No packing; see `ChunkCodec`."""

    nbytes_apart = 1 << 20

    def pack(self, data: Bytes) -> Any:
        """See `ChunkCodec.pack`."""
        return data.data

    def unpack(self, data: memoryview, out: Bytes) -> None:
        """See `ChunkCodec.unpack`."""
        out[:] = np.frombuffer(data, np.uint8)

    def nbytes(self, data: memoryview) -> int:
        """See `ChunkCodec.nbytes`."""
        return len(data)


class Blosc(ChunkCodec):
    """Blosc with lz4; see `ChunkCodec`."""

    nbytes_apart = 1 << 18

    def __init__(self, level: int, itemsize: int) -> None:
        """Make one; the n-th bytes of all items lie together before packing."""
        self._options = (b"lz4", level, shuffle_of(itemsize), 0, itemsize)

    def pack(self, data: Bytes) -> Any:
        """See `ChunkCodec.pack`."""
        # Not by a `Blosc` object, which takes as long as a third of the packing.
        return blosc().compress(data, *self._options)

    def unpack(self, data: memoryview, out: Bytes) -> None:
        """See `ChunkCodec.unpack`."""
        # The library trusts what the header says of either length.
        nbytes, packed = BLOSC_SIZES.unpack_from(data, 4)
        if (nbytes, packed) != (len(out), len(data)):
            raise ValueError(f"its header says {nbytes} bytes in {packed}")
        blosc().decompress(data, out)

    def nbytes(self, data: memoryview) -> int:
        """See `ChunkCodec.nbytes`."""
        nbytes: int = BLOSC_SIZES.unpack_from(data, 4)[0]
        return nbytes


class Zstd(ChunkCodec):
    """Zstandard; see `ChunkCodec`."""

    nbytes_apart = 1 << 14

    def __init__(self, level: int) -> None:
        """Make one."""
        self._level = level

    def pack(self, data: Bytes) -> Any:
        """See `ChunkCodec.pack`."""
        return library("zstd").compress(data, self._level)

    def unpack(self, data: memoryview, out: Bytes) -> None:
        """See `ChunkCodec.unpack`."""
        if zstd_nbytes(data) != len(out):
            raise ValueError(f"its header says {zstd_nbytes(data)} bytes")
        library("zstd").decompress(data, out)

    def nbytes(self, data: memoryview) -> int:
        """See `ChunkCodec.nbytes`."""
        return zstd_nbytes(data)

    def unpack_many(self, chunks: Sequence[memoryview], out: Bytes) -> None:
        """See `ChunkCodec.unpack_many`: all of them in one call of the library.

        Each call makes a state of its own, and asks the processor what it is, which
        on a virtual machine takes longer than to unpack 28 KB of Atari.
        """
        if len({*map(zstd_nbytes, chunks), out.shape[1]}) > 1:
            raise ValueError("a header says another number of bytes")
        # Frames follow each other; what the first one does not say is taken from out.
        library("zstd").decompress(b"".join([EMPTY_FRAME, *chunks]), out.reshape(-1))


class Checksummed(ChunkCodec):
    """Another codec's bytes with their CRC32C behind them; see `ChunkCodec`."""

    def __init__(self, codec: ChunkCodec) -> None:
        """Make one of what packs the bytes."""
        self._codec = codec
        self.nbytes_apart = codec.nbytes_apart

    def pack(self, data: Bytes) -> Any:
        """See `ChunkCodec.pack`."""
        packed = bytes(self._codec.pack(data))
        return packed + CRC.pack(google_crc32c.value(packed))

    def unpack(self, data: memoryview, out: Bytes) -> None:
        """See `ChunkCodec.unpack`."""
        self._codec.unpack(_checked(data), out)

    def unpack_many(self, chunks: Sequence[memoryview], out: Bytes) -> None:
        """See `ChunkCodec.unpack_many`."""
        self._codec.unpack_many([_checked(chunk) for chunk in chunks], out)

    def nbytes(self, data: memoryview) -> int:
        """See `ChunkCodec.nbytes`."""
        return self._codec.nbytes(data[:-4])


def _checked(data: memoryview) -> memoryview:
    """Bytes without the checksum behind them."""
    packed, stored = data[:-4], CRC.unpack(data[-4:])[0]
    # Not of a view, which the library takes for read-write memory only.
    if google_crc32c.value(bytes(packed)) != stored:
        raise ValueError("it does not match its checksum")
    return packed


def zstd_nbytes(data: memoryview) -> int:
    """Bytes that a Zstandard frame says it holds; -1 where it does not say.

    RFC 8878, section 3.1.1.1.
    """
    if len(data) < 18:
        data = memoryview(bytes(data) + bytes(18))
    descriptor = data[4]
    single, kind = descriptor >> 5 & 1, descriptor >> 6
    size = (single, 2, 4, 8)[kind]
    at = 6 - single + (0, 1, 2, 4)[descriptor & 3]
    number = int.from_bytes(data[at : at + size], "little")
    return -1 if size == 0 else number + (256 if kind == 1 else 0)


def shuffle_of(itemsize: int) -> int:
    """Blosc's shuffle of items of so many bytes: none of single ones."""
    return 1 if itemsize > 1 else 0


def codec_of(sharding: Sharding, itemsize: int) -> ChunkCodec:
    """The codec of a field's chunks."""
    codec: ChunkCodec = Uncompressed()
    if sharding.codec == "blosc-lz4":
        codec = Blosc(sharding.level, itemsize)
    elif sharding.codec == "zstd":
        codec = Zstd(sharding.level)
    return Checksummed(codec) if sharding.chunk_crc32c else codec


def as_json(sharding: Sharding, itemsize: int, kind: str | None = None) -> list[dict[str, Any]]:
    """The inner codecs as a Zarr array's metadata names them.

    Args:
        sharding: The codec of chunks.
        itemsize: Bytes of an item.
        kind: Of a field whose values vary; None of others.
    """
    first: dict[str, Any] = {"name": "bytes"}
    if kind is not None:
        first = {"name": "vlen-utf8" if kind == "text" else "vlen-bytes"}
    elif itemsize > 1:
        first["configuration"] = {"endian": "little"}
    codecs = [first]
    if sharding.codec == "blosc-lz4":
        options = {
            "cname": "lz4",
            "clevel": sharding.level,
            "blocksize": 0,
            "shuffle": ("noshuffle", "shuffle")[shuffle_of(itemsize)],
            "typesize": itemsize,
        }
        codecs.append({"name": "blosc", "configuration": options})
    elif sharding.codec == "zstd":
        options = {"level": sharding.level, "checksum": False}
        codecs.append({"name": "zstd", "configuration": options})
    if sharding.chunk_crc32c:
        codecs.append({"name": "crc32c"})
    return codecs


@cache
def blosc() -> Any:
    """Blosc, without threads of its own."""
    module = library("blosc")
    # They are neither ours to stop nor alive after a fork.
    module.use_threads = False
    return module


@cache
def library(name: str) -> Any:
    """A module of numcodecs.

    Raises:
        FailedError: It is not installed.
    """
    try:
        return importlib.import_module(f"numcodecs.{name}")
    except ImportError as error:
        raise FailedError(
            f"cannot load numcodecs, which unpacks Zarr chunks ({error}). Run: "
            "pip install numcodecs"
        ) from error
