"""Files whose values of any length lie, with checksums that agree.

Bytes that are flipped seldom come past a checksum. Here arrays, columns and cells are
read from a file of mmreplay, one is changed, and the file is written again by the
format's own library, or with the sum of what it holds now.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from mmreplay.checksums import crc32c

Rng = np.random.Generator
Files = dict[str, bytes]
Arrays = dict[str, NDArray[Any]]

SCHEMA = {
    "observation": {
        "points": mr.Field((None, 2), "float32", max_length=7),
        "speed": mr.Field((3,), "float32"),
        "mission": mr.Field.text(max_bytes=24),
    },
    "tokens": mr.Field((None,), "int16", max_length=30),
    "frame": mr.Field.bytes(max_bytes=40),
    "seen": mr.Field((None, 2, 3), "bool", max_length=4),
    "terminated": mr.Field((), "bool"),
}
TEXTS = ("", "go to the red door", '=1+1,"å"\r\n\0', "\x1b[31m<b>")
LIMITS = (0, 1, -1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
DROPPED = "mmreplay.crc32c"


def make_buffer(path: Path) -> mr.ReplayBuffer:
    """Make a ring of values that vary, which has wrapped."""
    rng = np.random.default_rng(9)
    buffer = mr.ReplayBuffer.create(
        path, mr.Schema(SCHEMA), 12, 2, autoreset="disabled", heap_bytes=8192
    )

    def values(make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in range(2)]

    for _ in range(15):
        buffer.add(
            observation={
                "points": values(lambda: rng.random((rng.integers(8), 2), np.float32)),
                "speed": rng.random((2, 3), np.float32),
                "mission": values(lambda: TEXTS[rng.integers(4)]),
            },
            tokens=values(lambda: rng.integers(-9, 9, rng.integers(31), np.int16)),
            frame=values(lambda: rng.bytes(int(rng.integers(41)))),
            seen=values(lambda: rng.random((rng.integers(5), 2, 3)) < 0.5),
            terminated=rng.random(2) < 0.2,
        )
    return buffer


def forge(format: str, files: Files, rng: Rng) -> tuple[str, Files]:
    """A file whose values lie, and how.

    Args:
        format: One of the five.
        files: Of an export of `make_buffer`, by name.
        rng: Decides what is changed.
    """
    name = next(iter(files))
    change, found = WAYS[format](dict(files), name, rng)
    return f"forged values, {name}: {change}", found


def _changed(arrays: Arrays, rng: Rng) -> tuple[str, Arrays]:
    """Change the offsets or the values of a field."""
    varying = [n.removesuffix(".offsets") for n in arrays if n.endswith(".offsets")]
    path = varying[int(rng.integers(len(varying)))]
    changes: dict[str, Callable[[], dict[str, NDArray[Any] | None]]] = {
        "an offset": lambda: {".offsets": _one(arrays[f"{path}.offsets"], rng)},
        "shifted": lambda: {".offsets": arrays[f"{path}.offsets"] + 1},
        "reversed": lambda: {".offsets": arrays[f"{path}.offsets"][::-1].copy()},
        "short": lambda: {".offsets": arrays[f"{path}.offsets"][:-1].copy()},
        "narrow": lambda: {".offsets": arrays[f"{path}.offsets"].astype(np.int32)},
        "real": lambda: {".offsets": arrays[f"{path}.offsets"].astype(np.float64)},
        "no offsets": lambda: {".offsets": None},
        "one long value": lambda: {".offsets": _long(arrays[f"{path}.offsets"])},
        "fewer values": lambda: {".values": arrays[f"{path}.values"][:-1].copy()},
        "more values": lambda: {".values": np.concatenate([arrays[f"{path}.values"]] * 2)},
        "bytes": lambda: {".values": _noise(arrays[f"{path}.values"], rng)},
        "other values": lambda: {".values": arrays[f"{path}.values"].astype(np.int64)},
        "flat": lambda: {".values": arrays[f"{path}.values"].reshape(-1)},
        "no values": lambda: {".values": None},
    }
    which = list(changes)[int(rng.integers(len(changes)))]
    made = dict(arrays)
    for ending, array in changes[which]().items():
        if array is None:
            del made[path + ending]
        else:
            made[path + ending] = array
    return f"{path}: {which}", made


def _one(array: NDArray[Any], rng: Rng) -> NDArray[Any]:
    made = array.copy()
    made[int(rng.integers(len(made)))] = LIMITS[int(rng.integers(len(LIMITS)))]
    return made


def _long(array: NDArray[Any]) -> NDArray[Any]:
    made = np.zeros_like(array)
    made[1:] = array[-1]
    return made


def _noise(array: NDArray[Any], rng: Rng) -> NDArray[Any]:
    data = np.frombuffer(rng.bytes(array.nbytes), np.uint8)
    if array.dtype == bool:
        return (data & 1).astype(bool).reshape(array.shape)
    return data.view(array.dtype).reshape(array.shape)


def _npz(files: Files, name: str, rng: Rng) -> tuple[str, Files]:
    with np.load(io.BytesIO(files[name])) as loaded:
        change, arrays = _changed(dict(loaded), rng)
    sink = io.BytesIO()
    np.savez(sink, allow_pickle=False, **arrays)
    return change, {**files, name: sink.getvalue()}


def _pt(files: Files, name: str, rng: Rng) -> tuple[str, Files]:
    import torch

    tensors = torch.load(io.BytesIO(files[name]), weights_only=True)
    arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
    change, arrays = _changed(arrays, rng)
    sink = io.BytesIO()
    made = {key: torch.from_numpy(array.copy()) for key, array in arrays.items()}
    torch.save(made, sink)
    return change, {**files, name: sink.getvalue()}


def _safetensors(files: Files, name: str, rng: Rng) -> tuple[str, Files]:
    from safetensors.numpy import load, save

    data = files[name]
    size = int.from_bytes(data[:8], "little")
    texts = json.loads(data[8 : 8 + size])["__metadata__"]
    change, arrays = _changed(load(data), rng)
    # Without sums values are read unchecked, which is a doubt.
    texts.pop(DROPPED)
    whole = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    return change, {**files, name: save(whole, metadata=texts)}


def _parquet(files: Files, name: str, rng: Rng) -> tuple[str, Files]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(io.BytesIO(files[name]))
    table = parquet.read()
    paths = ["observation/points", "observation/mission", "tokens", "frame", "seen"]
    path = paths[int(rng.integers(len(paths)))]
    at = table.schema.get_field_index(path)
    column = table.column(at).combine_chunks()
    texts = ["a" * int(rng.integers(99)) for _ in range(24)]
    lists = [[n] * int(rng.integers(99)) for n in rng.integers(99, size=24).tolist()]
    noise = pa.array([rng.bytes(int(rng.integers(20))) for _ in texts], pa.binary())
    changes: dict[str, Callable[[], Any]] = {
        "long texts": lambda: pa.array(texts),
        "bytes as text": lambda: _as_text(noise),
        "bytes": lambda: noise,
        "entries": lambda: pa.array(texts).dictionary_encode(),
        "lists": lambda: pa.array(lists, pa.list_(pa.int16())),
        "lists of lists": lambda: pa.array(
            [[each] for each in lists], pa.list_(pa.list_(pa.int16()))
        ),
        "wide lists": lambda: pa.array(lists, pa.list_(pa.float64())),
        "no value": lambda: pa.array([None, *column.to_pylist()[1:]], column.type),
        "other order": lambda: column.take(pa.array(rng.permutation(len(column)))),
    }
    which = list(changes)[int(rng.integers(len(changes)))]
    made = changes[which]()
    field = pa.field(path, made.type, nullable=which == "no value")
    table = table.set_column(at, field, made)
    dropped = (DROPPED.encode(), b"ARROW:schema")
    metadata = dict(parquet.metadata.metadata)
    metadata = {key: text for key, text in metadata.items() if key not in dropped}
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), sink, row_group_size=9)
    return f"{path}: {which}", {**files, name: sink.getvalue()}


def _as_text(noise: Any) -> Any:
    import pyarrow as pa

    return pa.Array.from_buffers(pa.string(), len(noise), noise.buffers())


CELLS = (
    "",
    "[]",
    "[[1,2],[3]]",
    "[1,2",
    "[1,,2]",
    '{"a":1}',
    "[1e999]",
    "[300000]",
    '["nan","inf"]',
    "[true,false]",
    "[]]",
    "[" * 200,
    "=1+1",
    "aGk=",
    "aGk",
    "null",
    "[[[true,true,true],[false,false,false]]]",
    "[[1.5,2.5]]",
    "[1]" * 50,
    "x" * 99,
    "[" + "1," * 60 + "1]",
    "[-1]",
    '[1,"2"]',
    "[ 1, 2 ]",
    "[9999999999999999999999]",
)


def _csv(files: Files, name: str, rng: Rng) -> tuple[str, Files]:
    import csv

    rows = list(csv.reader(io.StringIO(files[name].decode(), newline="")))
    paths = ["observation/points", "observation/mission", "tokens", "frame", "seen"]
    path = paths[int(rng.integers(len(paths)))]
    row = 1 + int(rng.integers(len(rows) - 1))
    cell = CELLS[int(rng.integers(len(CELLS)))]
    rows[row][rows[0].index(path)] = cell
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    data = text.getvalue().encode()
    if rng.random() < 0.1:
        data = data.replace("å".encode(), b"\xff\xfe", 1)
    sidecar = next(key for key in files if key != name)
    description = json.loads(files[sidecar])
    description["csv"] |= {"nbytes": len(data), "crc32c": f"{crc32c(memoryview(data)):08x}"}
    made = {**files, name: data, sidecar: json.dumps(description).encode()}
    return f"{path}: {cell[:20]!r}", made


WAYS: dict[str, Callable[[Files, str, Rng], tuple[str, Files]]] = {
    "npz": _npz,
    "pt": _pt,
    "safetensors": _safetensors,
    "csv": _csv,
    "parquet": _parquet,
}
