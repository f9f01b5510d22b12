"""Buffers to be damaged, and every row that they ever held.

Made by the same writer that the kills and power cuts drive, so that they have wrapped,
been cleared, dequeued from and resized; one is closed, one was killed. Beside the last
state there is an earlier one, for damage that puts old bytes in the place of new ones.
"""

from __future__ import annotations

import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import mmreplay as mr
from mmreplay import process
from mmreplay.disk.files import BIRTH, File, Identity
from mmreplay.format import ray_files
from mmreplay.format.ray_files import FrozenEpoch, Lease, Leases
from mmreplay.ragged import Ragged
from mmreplay.storage.zarr.engine import ZarrStore
from mmreplay.testing.disks import using
from tools.torture.forged import Unsynced
from tools.torture.powerloss import abandon
from tools.torture.rows import GEOMETRIES, MUTABLE, SHARDED, Array, Geometry, flags_of
from tools.torture.scribe import Notes, Scribe

Rows = dict[tuple[int, int], bytes]
"""The bytes of a row by (environment, position), mutable fields left out."""
Contents = dict[str, bytes]
"""Contents of files by their path in the buffer's folder."""

FOLDER = "buffer"
BOOT_ID = bytes(range(1, 17))
STEPS = 60
SERVED = ("terminated", "truncated")


@dataclass(frozen=True, slots=True)
class Specimen:
    """A buffer before it is damaged.

    Attributes:
        name: What reports call it.
        files: Its files.
        older: The same, some time before.
        rows: Every row that was ever alive.
        committed: int64 ``[E]``, heads of its last commit.
    """

    name: str
    files: Contents
    older: Contents
    rows: Rows
    committed: Array


@contextmanager
def one_boot() -> Iterator[None]:
    """Let every file be the one that was written, in the boot that wrote it.

    Files that are put back have other inodes, and their live slots would be void.
    """

    def identity(file: File) -> Identity:
        number = zlib.crc32("/".join(file.path.parts[-2:]).encode())
        return 7, number, BIRTH.pack(number, 0, 1)

    with (
        mock.patch.object(process, "boot_id", return_value=BOOT_ID),
        mock.patch.object(File, "identity", identity),
        using(Unsynced()),
    ):
        yield


def alive(buffer: mr.ReplayBuffer) -> Rows:
    """The rows that a buffer shows."""
    span = buffer.span
    env_ids = np.repeat(np.arange(buffer.num_envs), span.lengths)
    starts = np.cumsum(span.lengths) - span.lengths
    positions = np.arange(len(env_ids)) - starts[env_ids] + span.first[env_ids]
    if not len(env_ids):
        return {}
    columns: dict[str, Any] = {
        path: buffer.get_field(path, env_ids, positions)
        for path in buffer.schema.paths
        if path != MUTABLE and path not in SERVED
    }
    fixed = [
        np.ascontiguousarray(column)
        for column in columns.values()
        if not isinstance(column, Ragged)
    ]
    fixed.append(flags_of(buffer, env_ids, positions))
    wide = [column.reshape(len(env_ids), -1).view(np.uint8) for column in fixed]
    places = zip(env_ids.tolist(), positions.tolist(), strict=True)
    packed = np.concatenate(wide, axis=1)
    rows = {at: row.tobytes() for at, row in zip(places, packed, strict=True)}
    for column in columns.values():
        if isinstance(column, Ragged):
            for at, value in zip(rows, column, strict=True):
                rows[at] += len(value).to_bytes(4) + value.tobytes()
    return rows


def values_of(rows: Rows, schema: mr.Schema) -> set[tuple[str, bytes]]:
    """Values that rows of `alive` have in fields that vary, by path."""
    fixed = [
        field.nbytes
        for path, field in schema.fields.items()
        if not field.varies and path != MUTABLE and path not in SERVED
    ]
    found = set()
    for row in rows.values():
        # A byte of flags follows the others.
        at = sum(fixed) + 1
        for path in schema.varying:
            length = int.from_bytes(row[at : at + 4])
            stop = at + 4 + length * schema.fields[path].inner_nbytes
            found.add((path, row[at + 4 : stop]))
            at = stop
    return found


def contents(folder: Path) -> Contents:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@cache
def specimens(geometries: tuple[Geometry, ...] = GEOMETRIES + SHARDED) -> list[Specimen]:
    """Make the specimens, once; they may be put anywhere, as `FOLDER`."""
    made = []
    with tempfile.TemporaryDirectory(prefix="torture-") as folder, one_boot():
        path = Path(folder) / FOLDER
        for number, geometry in enumerate(geometries):
            for closed in (True, False):
                rng = np.random.default_rng([number, closed])
                made.append(_specimen(path, geometry, closed, rng))
                shutil.rmtree(path)
    return made


def _specimen(path: Path, geometry: Geometry, closed: bool, rng: np.random.Generator) -> Specimen:
    # Small enough that whole blocks are most of what is alive.
    geometry = replace(geometry, capacity=max(8, geometry.capacity // 2))
    sampler = mr.PrioritizedSampler(seed=0, name="prioritized")
    buffer = mr.ReplayBuffer.create(
        path,
        geometry.schema,
        geometry.capacity,
        geometry.num_envs,
        engine=geometry.engine,
        layout=geometry.layout,
        autoreset="same_step",
        commit_every=None,
        heap_bytes=geometry.heap_bytes,
        sampler=sampler,
    )
    buffer.set_statistics({"mean": [1.5, -2.0]})
    scribe = Scribe(buffer, geometry, 1, Notes.blank(geometry.num_envs), rng)
    rows: Rows = {}
    for step in range(STEPS):
        scribe.step()
        _sealed(buffer)
        rows |= alive(buffer)
        if step == STEPS - STEPS // 4:
            scribe.commit()
            older = contents(path)
    for _ in range(3):
        scribe.extend()
        rows |= alive(buffer)
    _learn(buffer)
    _serve(path, buffer)
    scribe.commit()
    scribe.add()
    rows |= alive(buffer)
    _sealed(buffer)
    if closed:
        buffer.close()
        held = contents(path)
    else:
        held = contents(path)
        abandon(buffer)
    how = "closed" if closed else "killed"
    committed = scribe.notes.committed.copy()
    return Specimen(f"{geometry.name} {how}", held, older, rows, committed)


def _sealed(buffer: mr.ReplayBuffer) -> None:
    """Wait for what is being sealed: equal seeds make equal files."""
    store = buffer._files.store
    if isinstance(store, ZarrStore):
        store.sealing.seal_now([])


def _learn(buffer: mr.ReplayBuffer) -> None:
    """Draw and give priorities, so that there is a column on disk."""
    batch = buffer.sample(16)
    buffer.update_priorities(batch, np.linspace(0.5, 3.0, 16))


def _serve(path: Path, buffer: mr.ReplayBuffer) -> None:
    """Note what a server on Ray does: leases that hold and ended, and two epochs."""
    heads = tuple(buffer.heads.tolist())
    every, none = tuple(range(len(heads))), (0,) * len(heads)
    ended = Lease("a" * 32, every, none, heads)
    leases = ended, Lease("b" * 32, every, heads)
    ray_files.write_leases(path, Leases(leases))
    buffers = ("a" * 32, buffer.metadata.uuid.hex())
    epochs = [FrozenEpoch("learner", number, heads, heads, buffers) for number in range(2)]
    ray_files.write_epochs(path, epochs)
