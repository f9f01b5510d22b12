"""Does every reader of files say what is wrong with a file that was tampered with?

Small files of each format, ours and plain ones of their own libraries, are cut,
flipped, spliced and made to lie about numbers, and then loaded. Each must end as a
named error that tells of the file, or as the rows that were written; in little memory
and time, and with nothing left where the target would be. What is tried depends on the
seed and the number of a try alone, and each finding comes with the options that try
it again: ``python -m tools.torture forged --format csv --seed 1 --first 7 --count 1``.
A reader that crashes takes this process along: ``--verbose`` names the try first.
"""

from __future__ import annotations

import gzip
import io
import re
import resource
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from mmreplay.disk import files
from mmreplay.errors import FormatError, ReplayError, SchemaError, SourceError
from tools.torture import forged_values
from tools.torture.layouts import layouts
from tools.torture.powerloss import Report

Files = dict[str, bytes]
"""A source: contents by name; the first is the one that is loaded."""
Columns = Mapping[str, NDArray[np.generic]]

BOUND_NBYTES = 2 << 30
"""Address space that one try may add; a claim that is believed takes more."""
TRY_S = 60
"""Far beyond what any takes, also on a machine that is busy: 20 were not."""
LIMITS = (0, 1, -1, 2**15, 2**31 - 1, -(2**31), 2**32 - 1, 2**40, 2**63 - 1, -(2**63))
FORGED_SHARE = 0.6
"""Of the tries on files of fields that vary, those that forge values."""
NAMED = (FormatError, SourceError, SchemaError)


class Late(BaseException):
    """A try that takes too long; no reader takes it for a fault of the disk."""


class Unsynced(files.Disk):
    """A disk that is not waited for: no power is cut here."""

    def datasync(self, fd: int) -> None:
        """Say that it is done."""

    def sync_folder(self, fd: int) -> None:
        """Say that it is done."""


@dataclass(frozen=True, slots=True)
class Base:
    """A file before it is tampered with.

    Attributes:
        name: What reports call it.
        files: What is loaded, and what lies beside it.
        rows: What it holds, where the format has checksums to tell.
        varies: Its fields vary, and values are forged, too.
    """

    name: str
    files: Files
    rows: Columns | None = None
    varies: bool = False


SCHEMA = {
    "observation": mr.Field((3,), "float32"),
    "image": mr.Field((6, 5), "uint8"),
    "half": mr.Field((), "float16"),
    "count": mr.Field((), "int64"),
    "flags": mr.Field((2,), "bool"),
    "terminated": mr.Field((), "bool"),
}


def make_buffer(path: Path) -> Columns:
    """Make a ring that has wrapped, and return what it holds."""
    rng = np.random.default_rng(5)
    lead = (15, 2)
    with mr.ReplayBuffer.create(path, mr.Schema(SCHEMA), 12, 2, autoreset="disabled") as buffer:
        buffer.extend(
            observation=rng.random((*lead, 3)).astype(np.float32),
            image=rng.integers(0, 256, (*lead, 6, 5)).astype(np.uint8),
            half=rng.random(lead).astype(np.float16),
            count=rng.integers(-9, 9, lead),
            flags=rng.random((*lead, 2)) < 0.5,
            terminated=rng.random(lead) < 0.2,
        )
        return rows_of(buffer)


def rows_of(buffer: mr.ReplayBuffer) -> dict[str, NDArray[np.generic]]:
    """Fields, places and flags of all rows."""
    found = buffer.gather_all()
    rows: dict[str, NDArray[np.generic]] = {}
    for name in found:
        if isinstance(found[name], mr.Ragged):
            rows[f"{name}.values"] = found[name].values
            rows[f"{name}.offsets"] = found[name].offsets
        else:
            rows[name] = found[name]
    places = found.env_ids, found.positions
    return rows | {
        "_env_id": places[0],
        "_position": places[1],
        "_flags": buffer.view.flags(*places),
    }


def plain_columns() -> dict[str, NDArray[np.generic]]:
    """Columns as others write them."""
    rng = np.random.default_rng(6)
    ends = np.zeros(20, bool)
    ends[9::10] = True
    return {
        "observations": rng.random((20, 3)),
        "actions": rng.integers(0, 4, 20),
        "terminals": ends,
    }


def _npz_plain() -> bytes:
    sink = io.BytesIO()
    np.savez_compressed(sink, allow_pickle=False, **dict(plain_columns()))
    return sink.getvalue()


def _pt_plain() -> bytes:
    import torch

    sink = io.BytesIO()
    columns = plain_columns().items()
    torch.save({name: torch.from_numpy(each) for name, each in columns}, sink)
    return sink.getvalue()


def _safetensors_plain() -> bytes:
    from safetensors.numpy import save

    return save(dict(plain_columns()))


def _csv_plain() -> bytes:
    columns = plain_columns()
    lines = ["obs.0,obs.1,obs.2,action,name,terminated"]
    for row, action, end in zip(*columns.values(), strict=True):
        cells = [*map(repr, np.asarray(row).tolist()), str(action), '"a, b"', str(end)]
        lines.append(",".join(cells))
    return "\r\n".join(lines).encode()


def _parquet_plain() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = plain_columns()
    table = {name: pa.array(list(each)) for name, each in columns.items()}
    table["name"] = pa.array(["text", "å", "", "=1+1"] * 5)
    table["tokens"] = pa.array([list(range(n % 7)) for n in range(20)])
    table["frame"] = pa.array([bytes(n % 5) for n in range(20)])
    sink = io.BytesIO()
    pq.write_table(pa.table(table), sink, row_group_size=8)
    return sink.getvalue()


PLAIN: dict[str, Callable[[], bytes]] = {
    "npz": _npz_plain,
    "pt": _pt_plain,
    "safetensors": _safetensors_plain,
    "csv": _csv_plain,
    "parquet": _parquet_plain,
}
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "npz": ({}, {"compression": "deflate"}),
    "pt": ({},),
    "safetensors": ({},),
    "csv": ({},),
    "parquet": ({}, {"compression": "none", "vectors": "list"}),
}
FORMATS = (*PLAIN, "zarr")


def _zarr_groups() -> list[Base]:
    """Zarr groups that zarr-python wrote, the metadata of an array or a chunk first."""
    import zarr
    from zarr import codecs

    made = []
    packings: dict[str, tuple[Literal[2, 3], dict[str, Any]]] = {
        "v2": (2, {}),
        "v3": (3, {"compressors": [codecs.ZstdCodec(), codecs.Crc32cCodec()]}),
        "v3 shards": (3, {"shards": (10, 3), "compressors": codecs.BloscCodec()}),
    }
    for name, (version, options) in packings.items():
        with tempfile.TemporaryDirectory(prefix="torture-") as folder:
            group = zarr.open_group(folder, mode="w", zarr_format=version)
            for path, values in plain_columns().items():
                chunks = (5, 3)[: values.ndim]
                own = dict(options)
                if "shards" in own:
                    own["shards"] = own["shards"][: values.ndim]
                array = group.create_array(
                    path, shape=values.shape, dtype=values.dtype, chunks=chunks, **own
                )
                array[...] = values
            held = {
                f"a.zarr/{each.relative_to(folder)}": each.read_bytes()
                for each in sorted(Path(folder).rglob("*"))
                if each.is_file()
            }
            made.append(Base(f"zarr {name}", held))
    return made


def bases(format: str) -> list[Base]:
    """The files of a format that are tampered with."""
    if format == "zarr":
        return _zarr_groups()
    made = []
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        place = Path(folder)
        rows = make_buffer(place / "buffer")
        for number, options in enumerate(OPTIONS[format]):
            target = place / str(number) / f"a.{format}"
            mr.export(place / "buffer", target, **options)
            held = {each.name: each.read_bytes() for each in target.parent.iterdir()}
            whole = {target.name: held.pop(target.name), **held}
            made.append(Base(f"ours {options}", whole, rows))
        with forged_values.make_buffer(place / "varying") as buffer:
            rows = rows_of(buffer)
            for number, options in enumerate(OPTIONS[format]):
                target = place / f"varying {number}" / f"a.{format}"
                mr.export(buffer, target, **options)
                made_files = target.parent.iterdir()
                held = {each.name: each.read_bytes() for each in made_files}
                whole = {target.name: held.pop(target.name), **held}
                made.append(Base(f"varying {options}", whole, rows, varies=True))
        theirs = layouts(format, place / "buffer", place).items()
        made += [Base(name, held) for name, held in theirs]
    plain = PLAIN[format]()
    made.append(Base("plain", {f"a.{format}": plain}))
    if format == "csv":
        made.append(Base("plain gz", {"a.csv.gz": gzip.compress(plain, mtime=0)}))
    return made


Rng = np.random.Generator


def _offset(rng: Rng, size: int) -> int:
    """A byte, mostly where headers are: near either end."""
    near = min(size, 2048)
    which = rng.random()
    if which < 0.35:
        return int(rng.integers(near))
    if which < 0.7:
        return size - 1 - int(rng.integers(near))
    return int(rng.integers(size))


def _truncate(data: bytearray, rng: Rng) -> bytearray:
    return data[: _offset(rng, len(data))]


def _flip(data: bytearray, rng: Rng) -> bytearray:
    for _ in range(int(rng.choice([1, 1, 1, 2, 8]))):
        data[_offset(rng, len(data))] ^= 1 << int(rng.integers(8))
    return data


def _scrawl(data: bytearray, rng: Rng) -> bytearray:
    at, size = _offset(rng, len(data)), int(rng.integers(1, 40))
    fill = rng.choice([b"\0" * size, b"\xff" * size, rng.bytes(size)])
    data[at : at + size] = bytes(fill)[: len(data) - at]
    return data


def _splice(data: bytearray, rng: Rng) -> bytearray:
    """Put a piece of the file somewhere else, over what is there or between it."""
    at, origin = _offset(rng, len(data)), _offset(rng, len(data))
    piece = data[origin : origin + int(rng.integers(1, 200))]
    stop = at + (len(piece) if rng.random() < 0.5 else 0)
    data[at:stop] = piece
    return data


def _drop(data: bytearray, rng: Rng) -> bytearray:
    at = _offset(rng, len(data))
    del data[at : at + int(rng.integers(1, 200))]
    return data


def _grow(data: bytearray, rng: Rng) -> bytearray:
    return data + rng.bytes(int(rng.integers(1, 300)))


def _lie(data: bytearray, rng: Rng) -> bytearray:
    """Write an extreme number where a binary one may be."""
    size, code = [(2, "H"), (4, "I"), (8, "Q")][int(rng.integers(3))]
    at = min(_offset(rng, len(data)), max(0, len(data) - size))
    number = LIMITS[int(rng.integers(len(LIMITS)))] & (1 << 8 * size) - 1
    data[at : at + size] = struct.pack(f"<{code}", number)
    return data


def _lie_in_text(data: bytearray, rng: Rng) -> bytearray:
    """Write an extreme number where one stands as digits."""
    found = list(re.finditer(rb"-?\d+", bytes(data)))
    if not found:
        return _lie(data, rng)
    digits = found[int(rng.integers(len(found)))]
    number = str(LIMITS[int(rng.integers(len(LIMITS)))]).encode()
    if rng.random() < 0.5:
        # As long as before, so that all that follows stays where it is.
        number = number.rjust(len(digits[0]))[: len(digits[0])]
    data[digits.start() : digits.end()] = number
    return data


WAYS = (_truncate, _flip, _flip, _scrawl, _splice, _drop, _grow, _lie, _lie_in_text)


def tampered(base: Base, rng: Rng) -> tuple[str, Files]:
    """A file that was tampered with, and how."""
    found = dict(base.files)
    name = list(found)[int(rng.integers(len(found)))]
    data, told = bytearray(found[name]), []
    for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
        way = WAYS[int(rng.integers(len(WAYS)))]
        told.append(way.__name__.strip("_"))
        data = way(data, rng) if data else data
    found[name] = bytes(data)
    return f"{base.name}, {name}: {', '.join(told)}", found


@contextmanager
def bounded(bound_nbytes: int = BOUND_NBYTES) -> Iterator[None]:
    """Bound what the block may allocate, and how long it may take."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Late(f"more than {TRY_S} s")

    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    room = pages * resource.getpagesize() + bound_nbytes
    handler = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
    signal.setitimer(signal.ITIMER_REAL, TRY_S, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)


def attack(format: str, count: int, seed: int, first: int = 0, verbose: bool = False) -> Report:
    """Load files of a format that were tampered with.

    Args:
        format: One of `FORMATS`.
        count: Tries.
        seed: With the number of a try says what is done.
        first: Number of the first try.
        verbose: Print each try before it is made, so that a crash can be found.
    """
    report = Report()
    started = bases(format)
    with (
        mock.patch.object(files, "disk", Unsynced()),
        tempfile.TemporaryDirectory(prefix="torture-") as folder,
    ):
        for number in range(first, first + count):
            rng = np.random.default_rng([seed, FORMATS.index(format), number])
            base = started[number % len(started)]
            if base.varies and rng.random() < FORGED_SHARE:
                change, found = forged_values.forge(format, base.files, rng)
                # With sums that agree other values may well be loaded.
                base = replace(base, rows=None)
            else:
                change, found = tampered(base, rng)
            where = f"--format {format} --seed {seed} --first {number} --count 1 ({change})"
            if verbose:
                print(where, flush=True)
            report.states += 1
            report.add(_try(Path(folder), base, found, report), where)
    return report


def put(folder: Path, files: Files) -> Path:
    """Write a source, and return its path: a file, or the folder of all its files."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder / next(iter(files)).split("/")[0]


def _try(folder: Path, base: Base, files: Files, report: Report) -> list[str]:
    """Load one file, and tell what is wrong with how that ended."""
    work = folder / "try"
    work.mkdir()
    try:
        source, target = put(work, files), work / "target"
        begin = time.monotonic()
        faults = _load(source, target, base, report)
        if time.monotonic() - begin > TRY_S / 2:
            faults.append(f"slow: {time.monotonic() - begin:.0f} s")
        known = {name.split("/")[0] for name in files} | {"target"}
        left = {each.name for each in work.iterdir()} - known
        return faults + [f"left over: {name}" for name in sorted(left)]
    finally:
        shutil.rmtree(work)


def _load(source: Path, target: Path, base: Base, report: Report) -> list[str]:
    try:
        with bounded():
            loaded = mr.load(source, target)
    except NAMED as error:
        report.seen[type(error).__name__] += 1
        told = "\n".join([str(error), *getattr(error, "__notes__", ())])
        faults = [] if source.parent.name in told else [f"unnamed: {told[:200]}"]
        return faults + (["target: it is there"] if target.exists() else [])
    except ReplayError as error:
        return [f"unexpected {type(error).__name__}: {error}"]
    except (Exception, Late) as error:
        return [f"escaped {type(error).__name__}: {' '.join(str(error).split())[:200]}"]
    report.seen["doubted" if loaded.doubts else "loaded"] += 1
    # A file that lost its description is a plain one, which its doubts tell of.
    unsure = base.rows is None or loaded.doubts
    return [] if unsure else _differences(target, base.rows or {})


def _differences(target: Path, rows: Columns) -> list[str]:
    with mr.ReplayBuffer.open(target) as buffer:
        found = rows_of(buffer)
    if found.keys() != rows.keys():
        return [f"other fields: {sorted(found.keys() ^ rows.keys())}"]
    return [f"other rows: {name}" for name in rows if found[name].tobytes() != rows[name].tobytes()]
