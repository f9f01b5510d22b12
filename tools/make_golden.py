"""Make the golden buffers of a format version: the same bytes at every run.

    python -m tools.make_golden VERSION [folder]

writes those of version `v1`, `v1_1`, with values that vary, or `v1_1_images`, with
images among them, again, into a folder of `tests/golden` or the given one. Uuid, times,
boot id, device and inode are fixed; LOCK, which only informs, is left out. Goldens of
a released version are never made again: a change of format takes a new folder beside
them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import google_crc32c
import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from mmreplay.disk.files import File
from mmreplay.nesting import unflatten
from mmreplay.schema.images import ImageEncoding
from mmreplay.storage.zarr.engine import ZarrStore

TARGET = Path(__file__).parent.parent / "tests" / "golden"
BOOT_ID = bytes([0x11]) * 16
IDENTITY = (2049, 77, bytes(16))  # as version 0.1 wrote it: no time of creation
CREATED = time.struct_time((2026, 1, 2, 3, 4, 5, 4, 2, 0))
TIME_NS = 1_767_323_045_000_000_000
LONGEST_HEX = 64

ALL_DTYPES = {
    f"info/{name}": mr.Field((), name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
        *("uint64", "float16", "float32", "float64", "bfloat16"),
    )
}
JPEG_SHAPE = (8, 8, 1)
# Of one gray block, and without Huffman tables, as cameras send in MJPEG.
JPEG = bytes.fromhex(
    "ffd8ffdb004300100b0c0e0c0a100e0d0e1211101318281a181616183123251d283a333d3c3933383740485c4e4044"
    "57453738506d51575f626768673e4d71797064785c656763ffc0000b080008000801011100ffda0008010100003f00"
    "c4ff008a5ffb17fe9ffecfff004d7fd6edfcbafe15ffd9"
)
ENDS = {"terminated": mr.Field((), "bool"), "truncated": mr.Field((), "bool")}


@contextmanager
def fixed(number: int) -> Iterator[None]:
    """Fix all that differs from run to run."""
    uuid = bytes([0xA0 + number]) * 16
    with ExitStack() as stack:
        for name, value in (
            ("secrets.token_bytes", uuid),
            ("time.gmtime", CREATED),
            ("time.time_ns", TIME_NS),
            ("mmreplay.process.boot_id", BOOT_ID),
        ):
            stack.enter_context(mock.patch(name, return_value=value))
        identity = mock.patch.object(File, "identity", return_value=IDENTITY)
        stack.enter_context(identity)
        yield


def value(field: mr.Field, number: int) -> NDArray[np.generic]:
    """The value of a field in the step that bears a number; NaN and -0.0 included."""
    if field.encoding is not None:
        return np.frombuffer(file(field.encoding, number), np.uint8)
    if field.max_length is not None:
        # A third of them is empty, and some are as long as they may be.
        length = min(field.max_length, max(0, number * 7919 % 61 - 20))
        items = mr.Field((length, *field.inner), field.dtype)
        made: NDArray[Any] = value(items, number)
        return made % 95 + 32 if field.kind == "text" else made
    numbers = np.arange(int(np.prod(field.shape))) * 7 + number
    wide = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    column: NDArray[np.generic]
    if field.dtype == "bool":
        column = numbers % 3 == 0
    elif field.dtype.startswith("float"):
        floats = (numbers / 8).astype(field.numpy)
        floats[numbers % 13 == 0] = np.nan
        floats[numbers % 13 == 1] = -0.0
        column = floats
    else:
        column = wide.astype(field.numpy)
    return column.reshape(field.shape)


def file(encoding: ImageEncoding, number: int) -> bytes:
    """The file of a step's image, which no library made: its bytes stay the same."""
    if encoding.codec == "jpeg":
        # One picture, and a comment that says of which step it is.
        comment = str(number).encode()
        nbytes = (len(comment) + 2).to_bytes(2, "big")
        return JPEG[:2] + b"\xff\xfe" + nbytes + comment + JPEG[2:]
    height, width, channels = encoding.shape
    pixels = np.arange(height * width * channels) * 7 + number
    rows = pixels.astype(np.uint8).reshape(height, -1)
    data = b"".join(b"\0" + row.tobytes() for row in rows)
    # A stored block of RFC 1951 in the frame of RFC 1950.
    block = b"\1" + struct.pack("<HH", len(data), len(data) ^ 0xFFFF) + data
    packed = b"\x78\1" + block + struct.pack(">I", zlib.adler32(data))
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def step(
    buffer: mr.ReplayBuffer, numbers: list[int], ends: dict[str, list[bool]]
) -> dict[str, Any]:
    """One step of some environments; the field `number` tells which."""
    flat: dict[str, Any] = {}
    for path, field in buffer.schema.fields.items():
        values = [value(field, number) for number in numbers]
        flat[path] = values if field.varies else np.stack(values)
    flat["number"] = np.array(numbers, np.int64)
    return unflatten(flat | {path: np.array(end) for path, end in ends.items()})


def env_major(folder: Path) -> mr.ReplayBuffer:
    """Two environments out of step, every dtype, final rows; killed, not closed."""
    schema = mr.Schema.from_flat(
        {
            "observation/joints": mr.Field((3,), "float32"),
            "observation/marks": mr.Field((2,), "bfloat16"),
            "number": mr.Field((), "int64"),
            **ALL_DTYPES,
            **ENDS,
            "advantage": mr.Field((2,), "float32", mutable=True),
        }
    )
    buffer = mr.ReplayBuffer.create(
        folder,
        schema,
        48,
        2,
        autoreset="same_step",
        commit_every=None,
        user_metadata={"made by": "tools/make_golden.py", "list": [1, None, "é"]},
    )
    final = {
        path.partition("/")[2]: np.stack([value(schema[path], 9000 + e) for e in (0, 1)])
        for path in schema.role_paths("observation")
    }
    for number in range(90):
        ids = [0, 1] if number % 5 else [1]
        ended = {
            "terminated": [number % 9 == 8 and e == 0 for e in ids],
            "truncated": [number % 17 == 16 for _ in ids],
        }
        last = {name: column[ids] for name, column in final.items()}
        numbers = [1000 * e + number for e in ids]
        buffer.add(step(buffer, numbers, ended), final_observation=last, env_ids=ids)
        if number in (30, 70, 87):
            buffer.commit()
    some = np.arange(3) + buffer.span.first[1]
    buffer.write_field("advantage", 1, some, np.full((3, 2), 7.5))
    return buffer


def time_major(folder: Path) -> mr.ReplayBuffer:
    """Three environments in step, `next_step`, resized, resumed with a break."""
    schema = mr.Schema.from_flat(
        {
            "observation": mr.Field((2, 2), "uint8"),
            "number": mr.Field((), "int64"),
            "reward": mr.Field((), "float32"),
            **ENDS,
        }
    )
    buffer = mr.ReplayBuffer.create(
        folder, schema, 20, 3, layout="time_major", autoreset="next_step", commit_every=None
    )
    _march(buffer, 0, 30)
    buffer.resize(32)
    _march(buffer, 30, 60)
    buffer.close()
    buffer = mr.ReplayBuffer.open(folder, "r+", commit_every=None)
    _march(buffer, 60, 81)
    buffer.close()
    return buffer


def _march(buffer: mr.ReplayBuffer, first: int, stop: int) -> None:
    """Steps of all environments at once, by add and by extend in turn."""
    for number in range(first, stop):
        ended = {
            "terminated": [(number + e) % 8 == 7 for e in range(3)],
            "truncated": [number % 13 == 12] * 3,
        }
        data = step(buffer, [1000 * e + number for e in range(3)], ended)
        if number % 2:
            buffer.add(data)
        else:
            buffer.extend({key: column[None] for key, column in data.items()})


def large(folder: Path) -> mr.ReplayBuffer:
    """One environment, two large fields, roles by other names, a cut episode."""
    schema = mr.Schema(
        {
            "pixels": mr.Field((64, 64), "uint8"),
            "number": mr.Field((), "int64"),
            "heat": mr.Field((3,), "float64", mutable=True),
            "done": mr.Field((), "bool"),
            "cut": mr.Field((), "bool"),
        },
        roles={"observation": "pixels", "terminated": "done", "truncated": "cut"},
    )
    buffer = mr.ReplayBuffer.create(folder, schema, 3, commit_every=None)
    for number in range(9):
        if number == 7:
            buffer.close()
            buffer = mr.ReplayBuffer.open(folder, "r+", on_resume="truncate", commit_every=None)
        buffer.add(step(buffer, [number], {"done": [number == 5], "cut": [False]}))
    buffer.close()
    return buffer


def shards(folder: Path) -> mr.ReplayBuffer:
    """Two environments out of step in shards as they are, with checksums; closed."""
    schema = mr.Schema.from_flat(
        {
            "observation/pix.els": mr.Field((3, 5), "uint8"),
            "number": mr.Field((), "int64"),
            "terminated": mr.Field((), "bool"),
            "advantage": mr.Field((2,), "float32", mutable=True),
        }
    )
    buffer = mr.ReplayBuffer.create(
        folder,
        schema,
        8,
        2,
        engine="zarr",
        codec="none",
        chunk_crc32c=True,
        commit_every=None,
        autoreset="disabled",
    )
    for number in range(23):
        ids = [0, 1] if number % 5 else [1]
        ends = {"terminated": [number == 18] * len(ids)}
        numbers = [1000 * e + number for e in ids]
        buffer.add(step(buffer, numbers, ends), env_ids=ids)
        _seal(buffer)
    buffer.close()
    return buffer


def packed(folder: Path) -> mr.ReplayBuffer:
    """Three environments in step in lz4's shards and a tail, over laps; killed."""
    schema = mr.Schema.from_flat(
        {
            "number": mr.Field((), "int64"),
            "marks": mr.Field((2,), "bfloat16"),
            "heat": mr.Field((), "float64"),
            **ENDS,
        }
    )
    buffer = mr.ReplayBuffer.create(
        folder,
        schema,
        32,
        3,
        layout="time_major",
        engine="zarr",
        commit_every=None,
        autoreset="disabled",
    )
    for number in range(90):
        ends = {"terminated": [number % 9 == 8] * 3, "truncated": [number == 70] * 3}
        buffer.add(step(buffer, [1000 * e + number for e in range(3)], ends))
        _seal(buffer)
    buffer.commit()
    return buffer


def _seal(buffer: mr.ReplayBuffer) -> None:
    """Have the thread done with what is due, so that each run does the same."""
    store = buffer._files.store
    assert isinstance(store, ZarrStore)
    store.sealing.seal_now([])


def texts(folder: Path) -> mr.ReplayBuffer:
    """Two environments out of step whose heaps wrap, final rows; killed, not closed."""
    schema = mr.Schema.from_flat(
        {
            "observation/text": mr.Field.text(max_bytes=40),
            "observation/points": mr.Field((None, 3), "float32", max_length=30),
            "number": mr.Field((), "int64"),
            "frame": mr.Field.bytes(max_bytes=32),
            "marks": mr.Field((None,), "bfloat16", max_length=9),
            **ENDS,
        }
    )
    buffer = mr.ReplayBuffer.create(
        folder, schema, 48, 2, heap_bytes=4096, autoreset="same_step", commit_every=None
    )
    for number in range(60):
        ids = [0, 1] if number % 5 else [1]
        ended = {
            "terminated": [number % 9 == 8 and e == 0 for e in ids],
            "truncated": [number % 17 == 16 for _ in ids],
        }
        numbers = [1000 * e + number for e in ids]
        last = {
            path.partition("/")[2]: [value(schema[path], 9000 + n) for n in numbers]
            for path in schema.role_paths("observation")
        }
        buffer.add(step(buffer, numbers, ended), final_observation=last, env_ids=ids)
        if number in (20, 40, 57):
            buffer.commit()
    return buffer


def frames(folder: Path) -> mr.ReplayBuffer:
    """Three environments in step, `next_step`, rows side by side; closed."""
    schema = mr.Schema.from_flat(
        {
            "observation": mr.Field((None,), "uint8", max_length=40),
            "number": mr.Field((), "int64"),
            **ENDS,
        }
    )
    buffer = mr.ReplayBuffer.create(
        folder,
        schema,
        20,
        3,
        heap_bytes=4096,
        layout="time_major",
        autoreset="next_step",
        commit_every=None,
    )
    for number in range(330):
        ended = {
            "terminated": [(number + e) % 8 == 7 for e in range(3)],
            "truncated": [number % 13 == 12] * 3,
        }
        buffer.add(step(buffer, [1000 * e + number for e in range(3)], ended))
    buffer.close()
    return buffer


def prompts(folder: Path) -> mr.ReplayBuffer:
    """Two environments out of step, in shards and heaps that wrap; killed."""
    schema = mr.Schema.from_flat(
        {
            "observation/text": mr.Field.text(max_bytes=40),
            "number": mr.Field((), "int64"),
            "marks": mr.Field((None, 2), "bfloat16", max_length=9),
            **ENDS,
        }
    )
    buffer = mr.ReplayBuffer.create(
        folder,
        schema,
        32,
        2,
        engine="zarr",
        codec="none",
        heap_bytes=4096,
        autoreset="same_step",
        commit_every=None,
    )
    for number in range(170):
        ids = [0, 1] if number % 5 else [1]
        ended = {
            "terminated": [number % 9 == 8 and e == 0 for e in ids],
            "truncated": [number % 17 == 16 for _ in ids],
        }
        numbers = [1000 * e + number for e in ids]
        last = {"text": [value(schema["observation/text"], 9000 + n) for n in numbers]}
        buffer.add(step(buffer, numbers, ended), final_observation=last, env_ids=ids)
        _seal(buffer)
        # So often that none of the commits which the heap asks for sums other blocks.
        if number % 15 == 0:
            buffer.commit()
    return buffer


def cameras(folder: Path) -> mr.ReplayBuffer:
    """Two environments out of step whose heaps of images wrap, final rows; killed."""
    schema = mr.Schema.from_flat(
        {
            "observation/top": mr.Field.image((4, 5, 3), "png", max_bytes=300),
            "number": mr.Field((), "int64"),
            "wrist": mr.Field.image(JPEG_SHAPE, "jpeg", 75, "444", max_bytes=300),
            **ENDS,
        }
    )
    return _filmed(
        mr.ReplayBuffer.create(
            folder, schema, 48, 2, heap_bytes=12288, autoreset="same_step", commit_every=None
        )
    )


def films(folder: Path) -> mr.ReplayBuffer:
    """The same, of gray PNG, in shards and heaps that wrap; killed."""
    schema = mr.Schema.from_flat(
        {
            "observation/top": mr.Field.image((3, 7, 1), "png", max_bytes=96),
            "number": mr.Field((), "int64"),
            "wrist": mr.Field.image(JPEG_SHAPE, "jpeg", 100, "420", max_bytes=128),
            **ENDS,
        }
    )
    return _filmed(
        mr.ReplayBuffer.create(
            folder,
            schema,
            20,
            2,
            engine="zarr",
            codec="none",
            heap_bytes=8192,
            autoreset="same_step",
            commit_every=None,
        )
    )


def _filmed(buffer: mr.ReplayBuffer) -> mr.ReplayBuffer:
    """Files of images, out of step, with final observations."""
    top = buffer.schema["observation/top"]
    for number in range(100):
        ids = [0, 1] if number % 5 else [1]
        ended = {
            "terminated": [number % 9 == 8 and e == 0 for e in ids],
            "truncated": [number % 17 == 16 for _ in ids],
        }
        numbers = [1000 * e + number for e in ids]
        last = {"top": [value(top, 9000 + n) for n in numbers]}
        buffer.add(step(buffer, numbers, ended), final_observation=last, env_ids=ids)
        if isinstance(buffer._files.store, ZarrStore):
            _seal(buffer)
        # So often that none of the commits which the heap asks for sums other blocks.
        if number % 7 == 0:
            buffer.commit()
    return buffer


MAKERS = {
    "v1": (env_major, time_major, large, shards, packed),
    "v1_1": (texts, frames, prompts),
    "v1_1_images": (cameras, films),
}


def stored(buffer: mr.ReplayBuffer, rows: mr.Batch, path: str) -> Any:
    """A field of rows that `gather_all` returned; images are files."""
    if buffer.schema[path].encoding is None:
        return rows[path]
    return buffer.view.read_values((path,), rows.env_ids, rows.positions)[path]


def describe(folder: Path) -> dict[str, Any]:
    """What a reader in another boot finds in a buffer: every row, as hex or CRC32C.

    Images are the files that they are, whatever decoders make of them.
    """
    with mr.ReplayBuffer.open(folder) as buffer:
        found = buffer.gather_all()
        where = found.env_ids, found.positions
        rows: dict[str, Any] = {
            path: [_text(row) for row in stored(buffer, found, path)]
            for path in buffer.schema.paths
        }
        return {
            "first": buffer.span.first.tolist(),
            "stop": buffer.span.stop.tolist(),
            "how": buffer.recovery.how,
            "cut_rows": buffer.recovery.cut_rows,
            "steps": len(buffer),
            "env_ids": found.env_ids.tolist(),
            "positions": found.positions.tolist(),
            "flags": buffer._reader.flags(*where).tolist(),
            "rows": rows,
        }


def _text(row: NDArray[np.generic]) -> str:
    data = np.ascontiguousarray(row).tobytes()
    if len(data) <= LONGEST_HEX:
        return data.hex()
    return f"crc32c:{google_crc32c.value(data):08x}"


def make(version: str, target: Path) -> None:
    """Write every golden buffer of a version and what is in it."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    expected = {}
    for number, maker in enumerate(MAKERS[version]):
        name = maker.__name__
        with tempfile.TemporaryDirectory() as scratch, fixed(number):
            buffer = maker(Path(scratch) / name)
            # Copied before it is closed: what a kill leaves is golden, too.
            shutil.copytree(Path(scratch) / name, target / name)
            buffer.close()
        (target / name / "LOCK").unlink()
        expected[name] = describe(target / name)
    text = json.dumps(expected, indent=1, sort_keys=True)
    (target / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", choices=MAKERS)
    parser.add_argument("folder", nargs="?", type=Path)
    arguments = parser.parse_args()
    make(arguments.version, arguments.folder or TARGET / arguments.version)
