"""Reads the metadata of one Zarr array, version 2 or 3, with zarr-python.

zarr-python (extra ``zarr``) parses and validates the JSON. Before it sees any, the
JSON's size and depth are bounded (`hierarchy.parse`) and its codecs are looked up in
an allow-list, so that no codec of another package is loaded. Afterwards the numbers
are bounded, because a chunk is unpacked whole. This module alone imports zarr-python.
"""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import FailedError, FormatError, SchemaError
from mmreplay.schema.dtypes import canonical_name
from mmreplay.strict_json import Json
from mmreplay.zarr_groups.codecs import ALLOWED, CodecChain

MAX_AXES = 32
MAX_LENGTH = 1 << 48
MAX_CHUNK_NBYTES = 256 << 20
"""A chunk is unpacked whole."""
MAX_INNER = 1 << 20
"""Inner chunks of a shard."""
V2_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")
V3_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)")
LAYOUT_CODECS = ("transpose", "bytes", "endian", "sharding_indexed")
"""Codecs that say how items lie in a chunk, which `ChunkedReader` follows itself."""
KEYS = {2: ".zarray", 3: "zarr.json"}


@dataclass(frozen=True, slots=True)
class ForeignArray:
    """One array of a group.

    Attributes:
        name: Path of the array below the group.
        dtype: Of its items, in the byte order of its chunks.
        shape: Shape of the array.
        grid: Shape of one stored object: a chunk, or a shard.
        chunk: Shape of what is packed at once: the same, or an inner chunk of a shard.
        codecs: The codecs of the chunks.
        order: Axes of a chunk in the order in which its bytes lie.
        fill: The item where no chunk is, of no axes.
        sharded: Whether the stored objects are shards.
        index_first: Whether a shard's index is at its beginning.
        index_checked: Whether a checksum follows the index.
        key: Name of a stored object below the array, by its coordinates in the grid.
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    chunk: tuple[int, ...]
    codecs: CodecChain
    order: tuple[int, ...]
    fill: NDArray[np.generic]
    sharded: bool
    index_first: bool
    index_checked: bool
    key: Callable[[tuple[int, ...]], str]

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of an unpacked chunk."""
        return int(np.prod(self.chunk, dtype=np.int64)) * self.dtype.itemsize

    @property
    def inner(self) -> tuple[int, ...]:
        """Inner chunks of a shard along each axis."""
        return tuple(g // c for g, c in zip(self.grid, self.chunk, strict=True))

    @property
    def summary(self) -> str:
        """The shape and codecs of the chunks, in a few words."""
        kind = " in shards" if self.sharded else ""
        by = ", ".join(self.codecs.names) or "as they are"
        return f"chunks {list(self.chunk)}{kind}, {by}"

    def blob(self, coordinates: Sequence[int]) -> str:
        """Name of the stored object at coordinates of the grid."""
        return f"{self.name}/{self.key(tuple(coordinates))}"


def read_array(value: Json, version: int, name: str, what: str) -> ForeignArray:
    """Read the metadata of one array.

    Args:
        value: Content of ``.zarray`` or of the array's ``zarr.json``, as
            `hierarchy.parse` returns it.
        version: 2 or 3.
        name: Path of the array below the group.
        what: The array, as messages name it.

    Raises:
        SchemaError: Its items cannot be a field's.
        FormatError: It is damaged, or of a kind that cannot be read.
        FailedError: zarr-python is not installed.
    """
    dtype = value.get("dtype" if version == 2 else "data_type")
    dtype = dtype.get("name") if isinstance(dtype, dict) else dtype
    if version == 3 and not isinstance(dtype, str):
        _refuse(what, f"data_type {value.get('data_type')!r}", "a name")
    known = V2_DTYPE if version == 2 else V3_DTYPES
    if not isinstance(dtype, str) or not known.fullmatch(dtype):
        raise SchemaError(f"its items are {str(dtype)[:40]!r}, but a field holds numbers or bools")
    canonical_name(dtype)
    shape = value.get("shape")
    if isinstance(shape, list) and len(shape) > MAX_AXES:
        _refuse(what, f"{len(shape)} axes", f"at most {MAX_AXES}")
    metadata = _parsed(value, version, what)
    return (_from_v2 if version == 2 else _from_v3)(metadata, name, what)


def _parsed(value: Json, version: int, what: str) -> Any:
    """Let zarr-python parse the metadata of an array whose codecs are all allowed."""
    if version == 2:
        filters = value.get("filters")
        listed = [*filters] if isinstance(filters, list) else []
        named = [*listed, value.get("compressor")]
        names = [codec.get("id") for codec in named if isinstance(codec, dict)]
    else:
        names = list(_codec_names(value.get("codecs")))
    for name in names:
        short = name.removeprefix("numcodecs.") if isinstance(name, str) else name
        if short not in ALLOWED and short not in LAYOUT_CODECS:
            raise FormatError(
                f"{what} uses codec {short!r:.80}, but must use one of "
                f"{', '.join(ALLOWED)}. Leave the array out with fields=, or copy the "
                "group with other codecs."
            )
    try:
        zarr = importlib.import_module("zarr")
        storage = importlib.import_module("zarr.storage")
        buffer = importlib.import_module("zarr.buffer.cpu").Buffer
    except ImportError as error:
        raise FailedError(
            "reading Zarr groups needs zarr-python, which is not installed. Run: "
            'pip install "mmreplay[zarr]"'
        ) from error
    store = storage.MemoryStore({KEYS[version]: buffer.from_bytes(json.dumps(value).encode())})
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            # zarr-python warns of codecs that only numcodecs names.
            warnings.simplefilter("ignore")
            return zarr.open_array(store, mode="r", zarr_format=version).metadata
    except Exception as error:
        # The library raises whatever it meets in metadata that is wrong.
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise FormatError(
            f"{what}: zarr-python refuses its metadata ({text}). Leave it out with "
            "fields=, or copy it with zarr-python."
        ) from error


def _codec_names(codecs: object) -> list[object]:
    """Names of codecs of version 3, those within shards included."""
    names: list[object] = []
    waiting = [codecs]
    while waiting:
        listed = waiting.pop()
        for codec in listed if isinstance(listed, list) else ():
            if not isinstance(codec, dict):
                names.append(codec)
                continue
            names.append(codec.get("name"))
            options = codec.get("configuration")
            if isinstance(options, dict):
                waiting += [options.get("codecs"), options.get("index_codecs")]
    return names


def _from_v2(metadata: Any, name: str, what: str) -> ForeignArray:
    codecs = [*(metadata.filters or ()), metadata.compressor]
    configs = [codec.get_config() for codec in codecs if codec is not None]
    packing = [(c["id"], {k: v for k, v in c.items() if k != "id"}) for c in configs]
    axes = range(len(metadata.shape))
    order = tuple(axes if metadata.order == "C" else reversed(axes))
    return _bounded_array(
        metadata,
        name,
        what,
        metadata.chunks,
        metadata.chunks,
        metadata.dtype.to_native_dtype(),
        packing,
        order,
    )


def _from_v3(metadata: Any, name: str, what: str) -> ForeignArray:
    grid = getattr(metadata.chunk_grid, "chunk_shape", None)
    if grid is None:
        _refuse(what, f"a grid of {type(metadata.chunk_grid).__name__}", "a regular one")
    described = [codec.to_dict() for codec in metadata.codecs]
    chunk, index = grid, None
    if described[0]["name"] == "sharding_indexed":
        sharding = metadata.codecs[0]
        if len(described) > 1:
            _refuse(what, f"{len(described)} codecs", "sharding_indexed alone")
        chunk, index = sharding.chunk_shape, _index_of(sharding, what)
        described = [codec.to_dict() for codec in sharding.codecs]
    dtype = metadata.data_type.to_native_dtype().newbyteorder("<")
    order = tuple(range(len(grid)))
    packing: list[tuple[str, Mapping[str, Any]]] = []
    for codec in described:
        kind, options = codec["name"], codec.get("configuration", {})
        if kind == "transpose":
            order = tuple(order[axis] for axis in options["order"])
        elif kind == "bytes":
            if options.get("endian", "little") == "big":
                dtype = dtype.newbyteorder(">")
        elif kind == "sharding_indexed":
            _refuse(what, "shards within shards", "one level of them")
        else:
            packing.append((kind.removeprefix("numcodecs."), options))
    return _bounded_array(metadata, name, what, grid, chunk, dtype, packing, order, index)


def _index_of(sharding: Any, what: str) -> tuple[bool, bool]:
    """Whether the index of shards comes first in them, and has a checksum."""
    listed = [codec.to_dict() for codec in sharding.index_codecs]
    kinds = [codec["name"] for codec in listed]
    endian = listed[0].get("configuration", {}).get("endian", "little")
    if kinds not in (["bytes"], ["bytes", "crc32c"]) or endian != "little":
        _refuse(
            what,
            f"an index packed by {kinds}, {endian} endian",
            "bytes, little endian, and crc32c or nothing",
        )
    first = str(getattr(sharding.index_location, "value", "end")) == "start"
    return first, len(kinds) == 2


def _bounded_array(
    metadata: Any,
    name: str,
    what: str,
    grid: Sequence[int],
    chunk: Sequence[int],
    dtype: np.dtype[np.generic],
    packing: Sequence[tuple[str, Mapping[str, Any]]],
    order: tuple[int, ...],
    index: tuple[bool, bool] | None = None,
) -> ForeignArray:
    """Make the array, its numbers within bounds."""
    shape, grid, chunk = tuple(metadata.shape), tuple(grid), tuple(chunk)
    if not len(shape) == len(grid) == len(chunk) == len(order):
        _refuse(what, f"{len(shape)} axes in chunks of {len(grid)}", "as many of each")
    lengths = [*shape, *(n - 1 for n in (*grid, *chunk))]
    if not all(0 <= n <= MAX_LENGTH for n in lengths):
        _refuse(
            what,
            f"shape {list(shape)} in chunks {list(chunk)}",
            f"lengths up to {MAX_LENGTH}, and chunks of at least 1",
        )
    if any(g % c for g, c in zip(grid, chunk, strict=True)):
        _refuse(what, f"shards of {grid} in chunks of {chunk}", "whole chunks")
    exact = int(np.prod(chunk, dtype=object)) * dtype.itemsize
    inner = int(np.prod([g // c for g, c in zip(grid, chunk, strict=True)], dtype=object))
    if exact > MAX_CHUNK_NBYTES or inner > MAX_INNER:
        _refuse(
            what,
            f"chunks of {exact} bytes, {inner} in one stored object",
            f"at most {MAX_CHUNK_NBYTES} bytes, which are unpacked whole, and {MAX_INNER}",
        )
    value = 0 if metadata.fill_value is None else metadata.fill_value
    return ForeignArray(
        name,
        dtype,
        shape,
        grid,
        chunk,
        CodecChain(packing, what),
        order,
        np.asarray(value, dtype.newbyteorder("=")),
        index is not None,
        *(index or (False, False)),
        metadata.encode_chunk_key,
    )


def _refuse(what: str, got: str, expected: str) -> NoReturn:
    raise FormatError(
        f"{what}: mmreplay cannot read {got[:200]}, only {expected}. Leave it out with "
        "fields=, or copy it with zarr-python."
    )
