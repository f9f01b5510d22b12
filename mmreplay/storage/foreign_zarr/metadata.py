"""Codecs of Zarr arrays that others wrote, v2 and v3: unpacking one chunk's bytes.

Every length that a chunk says of itself is checked before anything is unpacked, and
nothing unpacks to more than the array's own metadata says a chunk has.

What a Zarr array says of itself, v2 or v3, checked: shape, chunks, codecs, names.
"""

from __future__ import annotations

import bz2
import lzma
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import FormatError, SchemaError
from mmreplay.schema.dtypes import canonical_name
from mmreplay.storage.zarr import codecs
from mmreplay.strict_json import Json

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


MAX_AXES = 32
MAX_CHUNK_NBYTES = 256 << 20
"""A chunk is unpacked whole."""
MAX_INNER = 1 << 20
"""Inner chunks of a shard."""
MAX_LENGTH = 1 << 48
V2_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")
V3_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)")


@dataclass(frozen=True, slots=True)
class ForeignArray:
    """One array of a group.

    Attributes:
        name: Its path below the group.
        dtype: Of its items, in the byte order of its chunks.
        shape: Its own.
        grid: Shape of what one blob holds.
        chunk: Shape of what is packed at once: the same, or inner chunks of a shard.
        chain: What the chunks are packed by.
        order: Axes of a chunk in the order in which its bytes lie.
        fill: The item where no chunk is, of no axes.
        sharded: Whether blobs are shards.
        index_first: Whether a shard's index is at its beginning.
        index_checked: Whether a checksum follows the index.
        prefix: What a blob's name begins with.
        separator: Between the coordinates in it.
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    chunk: tuple[int, ...]
    chain: Chain
    order: tuple[int, ...]
    fill: NDArray[np.generic]
    sharded: bool
    index_first: bool
    index_checked: bool
    prefix: str
    separator: str

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of an unpacked chunk."""
        return int(np.prod(self.chunk, dtype=np.int64)) * self.dtype.itemsize

    @property
    def inner(self) -> tuple[int, ...]:
        """Inner chunks of a shard along each axis."""
        return tuple(g // c for g, c in zip(self.grid, self.chunk, strict=True))

    @property
    def told(self) -> str:
        """What its chunks are, in a few words."""
        kind = " in shards" if self.sharded else ""
        by = ", ".join(self.chain.names) or "as they are"
        return f"chunks {list(self.chunk)}{kind}, {by}"

    def blob(self, place: Sequence[int]) -> str:
        """Name of what holds the chunks at a place of the grid."""
        return f"{self.name}/{self.prefix}{self.separator.join(map(str, place))}"


class _Parser:
    """Reads one array's metadata; see `parse_v2` and `parse_v3`."""

    def __init__(self, value: Json, name: str, what: str) -> None:
        self.value, self.name, self.what = value, name, what

    def refuse(self, got: str, expected: str) -> NoReturn:
        raise FormatError(
            f"{self.what}: got {got[:200]}, expected {expected}; it is damaged, or of "
            "a kind that mmreplay does not read: leave it out with fields=, or copy it "
            "with zarr-python"
        )

    def lengths(self, key: str, value: object, least: int) -> tuple[int, ...]:
        """A list of numbers, one an axis."""
        good = isinstance(value, list) and len(value) <= MAX_AXES
        if not good or not all(
            type(n) is int and least <= n <= MAX_LENGTH
            for n in value  # type: ignore[attr-defined]  # a list, as just looked at
        ):
            self.refuse(
                f"{key} {value!r}", f"at most {MAX_AXES} integers of at least {least}"
            )
        assert isinstance(value, list)
        return tuple(value)

    def member(self, value: object, key: str, default: Json | None = None) -> Json:
        """An object that another holds."""
        found = value.get(key, default) if isinstance(value, dict) else None
        if not isinstance(found, dict):
            self.refuse(f"{key} {found!r}", "an object")
        return found

    def named(self, value: object) -> tuple[str, Json]:
        """Name and configuration of an extension of v3; a name alone has none."""
        if isinstance(value, str):
            return value, {}
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str):
            self.refuse(f"{value!r}", "an object with a name")
        return name, self.member(value, "configuration", {})

    def fill(self, value: object, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
        """The fill value; hexadecimal digits are a number's bits."""
        try:
            if isinstance(value, str) and value.startswith("0x"):
                bits = np.dtype(f"u{dtype.itemsize}").type(int(value, 16))
                return np.asarray(bits).view(dtype.newbyteorder("="))
            if isinstance(value, list | dict):
                raise TypeError(value)
            # A float becomes an integer whatever it is, also infinity.
            if (
                isinstance(value, float)
                and dtype.kind in "iub"
                and not (abs(value) < 1 << 64)
            ):
                raise ValueError(value)
            plain = dtype.newbyteorder("=")
            with np.errstate(over="raise", invalid="ignore"):
                return np.asarray(0 if value is None else value).astype(plain)
        except (ValueError, TypeError, ArithmeticError):
            self.refuse(f"fill_value {value!r}", f"a value of {dtype}")

    def order(self, told: object, axes: int) -> tuple[int, ...]:
        """A permutation of the axes."""
        if told in ("C", "F"):
            return tuple(range(axes))[:: 1 if told == "C" else -1]
        if (
            not isinstance(told, list)
            or not all(type(axis) is int for axis in told)
            or sorted(told) != list(range(axes))
        ):
            self.refuse(f"order {told!r}", f"a permutation of {axes} axes")
        return tuple(told)

    def make(
        self, dtype: np.dtype[np.generic], grid: tuple[int, ...],
        chunk: tuple[int, ...], chain: Chain, order: tuple[int, ...],
        key: tuple[str, str], index: tuple[bool, bool] | None = None,
    ) -> ForeignArray:  # fmt: skip
        """The array, its numbers checked against each other."""
        shape = self.lengths("shape", self.value.get("shape"), 0)
        if not len(shape) == len(grid) == len(chunk):
            self.refuse(
                f"{len(shape)} axes in chunks of {len(grid)}", "as many of each"
            )
        if any(g % c for g, c in zip(grid, chunk, strict=True)):
            self.refuse(f"shards of {grid} in chunks of {chunk}", "whole chunks")
        first, checked = index or (False, False)
        made = ForeignArray(
            self.name, dtype, shape, grid, chunk, chain, order,
            self.fill(self.value.get("fill_value"), dtype), index is not None, first,
            checked, *key,
        )  # fmt: skip
        exact = int(np.prod(chunk, dtype=object)) * dtype.itemsize
        inner = int(np.prod(made.inner, dtype=object))
        if exact > MAX_CHUNK_NBYTES or inner > MAX_INNER:
            self.refuse(
                f"chunks of {exact} bytes, {inner} in one blob",
                f"at most {MAX_CHUNK_NBYTES} bytes, which are unpacked whole, and "
                f"{MAX_INNER}",
            )
        return made


def parse_v2(value: Json, name: str, what: str) -> ForeignArray:
    """Read a ``.zarray``.

    Args:
        value: The JSON.
        name: The array's path below the group.
        what: What messages call it.

    Raises:
        SchemaError: Its items can be no field's.
        FormatError: It is damaged, or of a kind that is not read.
    """
    read = _Parser(value, name, what)
    told = value.get("dtype")
    if not isinstance(told, str) or not V2_DTYPE.fullmatch(told):
        raise SchemaError(
            f"got items of {str(told)[:40]!r}, expected numbers or bools; it can be "
            "no field"
        )
    dtype = np.dtype(told) if canonical_name(told) else None
    assert dtype is not None
    grid = read.lengths("chunks", value.get("chunks"), 1)
    packing = []
    filters = value.get("filters") or []
    if not isinstance(filters, list):
        read.refuse(f"filters {filters!r}", "a list of codecs")
    for each in [*filters, value.get("compressor")]:
        if each is None:
            continue
        if not isinstance(each, dict) or not isinstance(each.get("id"), str):
            read.refuse(f"codec {each!r}", "an object with an id")
        packing.append((each["id"], {k: v for k, v in each.items() if k != "id"}))
    separator = value.get("dimension_separator", ".")
    if separator not in (".", "/"):
        read.refuse(f"dimension_separator {separator!r}", "'.' or '/'")
    order = read.order(value.get("order", "C"), len(grid))
    return read.make(dtype, grid, grid, Chain(packing, what), order, ("", separator))


def parse_v3(value: Json, name: str, what: str) -> ForeignArray:
    """Read an array's ``zarr.json``; see `parse_v2`."""
    read = _Parser(value, name, what)
    kind, _ = read.named(value.get("data_type"))
    if not V3_DTYPES.fullmatch(kind):
        raise SchemaError(
            f"got items of {kind[:40]!r}, expected numbers or bools; it can be no field"
        )
    dtype = np.dtype(kind)
    kind, options = read.named(value.get("chunk_grid"))
    if kind != "regular" or value.get("storage_transformers"):
        read.refuse(f"a grid {kind!r} or transformers", "a regular grid alone")
    grid = read.lengths("chunk_shape", options.get("chunk_shape"), 1)
    key = _key(read, value.get("chunk_key_encoding"))
    codecs = value.get("codecs")
    if not isinstance(codecs, list) or not codecs:
        read.refuse(f"codecs {codecs!r}", "a list of some")
    first, options = read.named(codecs[0])
    if first != "sharding_indexed":
        chain, order, dtype = _codecs(read, codecs, dtype, len(grid))
        return read.make(dtype, grid, grid, chain, order, key)
    if len(codecs) > 1 or not isinstance(options.get("codecs"), list):
        read.refuse(f"codecs {codecs!r}", "sharding_indexed alone, with codecs in it")
    chunk = read.lengths("chunk_shape", options.get("chunk_shape"), 1)
    chain, order, dtype = _codecs(read, options["codecs"], dtype, len(grid))
    told = options.get("index_codecs")
    index_codecs = told if isinstance(told, list) else []
    names = [read.named(each)[0] for each in index_codecs]
    place = options.get("index_location", "end")
    if names not in (["bytes"], ["bytes", "crc32c"]) or place not in ("start", "end"):
        read.refuse(f"index {names} at {place!r}", "bytes and crc32c at start or end")
    endian = read.named(index_codecs[0])[1].get("endian", "little")
    if endian != "little":
        read.refuse(f"an index of endian {endian!r}", "'little'")
    index = (place == "start", len(names) == 2)
    return read.make(dtype, grid, chunk, chain, order, key, index)


def _key(read: _Parser, told: object) -> tuple[str, str]:
    """What a blob's name begins with, and what separates its numbers."""
    kind, options = read.named(told)
    default = {"default": "/", "v2": "."}.get(kind)
    separator = options.get("separator", default)
    if default is None or separator not in (".", "/"):
        read.refuse(f"chunk_key_encoding {told!r}", "default or v2, with '.' or '/'")
    return (f"c{separator}" if kind == "default" else ""), separator


def _codecs(
    read: _Parser, told: Sequence[object], dtype: np.dtype[np.generic], axes: int
) -> tuple[Chain, tuple[int, ...], np.dtype[np.generic]]:
    """What chunks are packed by, the order of their axes, and their byte order."""
    order = tuple(range(axes))
    packing: list[tuple[str, Mapping[str, Any]]] = []
    flat = False
    for each in told:
        name, options = read.named(each)
        if name == "transpose" and not packing and not flat:
            then = read.order(options.get("order"), axes)
            order = tuple(order[axis] for axis in then)
        elif name in ("bytes", "endian") and not flat:
            flat = True
            if options.get("endian", "little") not in ("little", "big"):
                read.refuse(f"{each!r}", "an endian of little or big")
            dtype = dtype.newbyteorder(">" if options.get("endian") == "big" else "<")
        else:
            packing.append((name.removeprefix("numcodecs."), options))
    if not flat:
        read.refuse(f"codecs {list(told)!r}", "'bytes' among them")
    return Chain(packing, read.what), order, dtype
