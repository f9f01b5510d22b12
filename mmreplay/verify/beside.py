"""What lies beside the data: columns of samplers, the limiter's counts.

A buffer is whole without them, and their owners begin anew where they are damaged:
what is wrong with them is told as a note.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mmreplay import files
from mmreplay.errors import FailedError, FormatError
from mmreplay.files import File
from mmreplay.format import strict_json
from mmreplay.format.metadata import Metadata
from mmreplay.samplers import seen
from mmreplay.samplers.columns import COLUMN, LOCK, STATE
from mmreplay.verify.report import Notebook

NONE = -1
"""The number of a row that a conversion found to have none of its own."""
CHUNK_NUMBERS = 1 << 20
COUNT_NBYTES = 16
LAW_NBYTES = 4096
MASK = (1 << 64) - 1


def check_columns(
    folder: Path, metadata: Metadata, notes: Notebook, deep: bool
) -> None:
    """Check the samplers' columns; their numbers too where it is to be deep."""
    for place in _inside(folder / "samplers", notes):
        name = f"samplers/{place.name}"
        if not place.is_dir() or place.is_symlink():
            notes.note("unknown", name, None, f"{name} is not a column's folder")
            continue
        for entry in files.names(place):
            if entry not in (COLUMN, STATE, LOCK, f"tmp-{COLUMN}"):
                what = f"{name}/{entry}"
                notes.note("unknown", what, None, f"{what} is not a name of ours")
        _check_state(place / STATE, f"{name}/{STATE}", metadata, notes)
        _check_numbers(place / COLUMN, f"{name}/{COLUMN}", metadata, notes, deep)


def _inside(root: Path, notes: Notebook) -> list[Path]:
    """What is in a folder of ours; a link in its place leads nowhere."""
    if root.is_symlink():
        notes.note("unknown", root.name, None, f"{root.name} is a link, no folder")
        return []
    return [root / name for name in files.names(root)] if root.is_dir() else []


@contextmanager
def _opened(
    path: Path, name: str, nbytes: int | None, notes: Notebook
) -> Iterator[File | None]:
    file = None
    try:
        file = File.open(path, nbytes)
    except (FormatError, FailedError) as error:
        notes.fail("beside", name, error)
    try:
        yield file
    finally:
        if file is not None:
            file.close()


def _check_state(path: Path, name: str, metadata: Metadata, notes: Notebook) -> None:
    num_envs = metadata.ring.num_envs
    nbytes = seen.NUM_SLOTS * seen.slot_nbytes(num_envs)
    with _opened(path, name, nbytes, notes) as file:
        if file is None:
            return
        data = file.pread(nbytes, 0)
        if any(data) and seen.newest(data, metadata.uuid, num_envs) is None:
            notes.note(
                "beside", name, 0,
                f"{name}: got no whole record of this buffer, expected one of two; the "
                "column begins anew",
            )  # fmt: skip


def _check_numbers(
    path: Path, name: str, metadata: Metadata, notes: Notebook, deep: bool
) -> None:
    width = 4 * metadata.ring.num_envs
    with _opened(path, name, None, notes) as file:
        if file is None:
            return
        if file.nbytes % width or not file.nbytes:
            notes.note(
                "beside", name, None,
                f"{name}: got {file.nbytes} bytes, expected a multiple of {width}, a "
                "number for each row; the column begins anew",
            )  # fmt: skip
        for first in _held(file) if deep else ():
            count = min(CHUNK_NUMBERS, file.nbytes // 4 - first)
            numbers = np.frombuffer(file.pread(4 * count, 4 * first), "<f4")
            notes.read(4 * count)
            fine = (np.isfinite(numbers) & (numbers >= 0)) | (numbers == NONE)
            bad = np.flatnonzero(~fine)
            if len(bad):
                at = 4 * (first + int(bad[0]))
                notes.note(
                    "beside", name, at,
                    f"{name}: got {len(bad)} numbers such as {numbers[bad[0]]}, "
                    "expected -1 or finite ones of at least 0; they count as new",
                )  # fmt: skip


def _held(file: File) -> Iterator[int]:
    """First numbers of the pieces that hold any: holes are zeros, of any size."""
    nbytes, at = 4 * CHUNK_NUMBERS, 0
    while at < file.nbytes // 4 * 4:
        try:
            at = os.lseek(file.fd, at, os.SEEK_DATA) // nbytes * nbytes
        except OSError:
            return
        yield at // 4
        at += nbytes


def check_limiter(folder: Path, notes: Notebook) -> None:
    """Check the law and the counts of a limiter."""
    for entry in _inside(folder / "limiter", notes):
        name = f"limiter/{entry.name}"
        if entry.name == "law.json":
            try:
                strict_json.parse(files.read_bytes(entry, LAW_NBYTES), name)
            except (FormatError, FailedError) as error:
                notes.fail("beside", name, error)
        elif entry.name.startswith("learner-"):
            _check_count(entry, name, notes)
        elif entry.name != "writer" and not entry.name.startswith("tmp-"):
            notes.note("unknown", name, None, f"{name} is not a name of ours")


def _check_count(path: Path, name: str, notes: Notebook) -> None:
    with _opened(path, name, COUNT_NBYTES, notes) as file:
        if file is None:
            return
        data = file.pread(COUNT_NBYTES, 0)
        pair = [int.from_bytes(data[at : at + 8], "little") for at in (0, 8)]
        if any(pair) and pair[0] ^ pair[1] != MASK:
            notes.note(
                "beside", name, 0,
                f"{name}: got {pair[0]} and {pair[1]}, expected a count and its "
                "complement; it counts as 0",
            )  # fmt: skip
