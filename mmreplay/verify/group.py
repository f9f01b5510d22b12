"""The Zarr group of a compressed buffer: names, metadata, and what it says of flags.

No checksum covers these, and the buffer reads none of them, as flags.bin has the flags:
other readers of Zarr do.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.disk.lock import Owner
from mmreplay.errors import CorruptError, FailedError, FormatError, raise_if_out_of_files
from mmreplay.format.metadata import Metadata
from mmreplay.storage.zarr import group
from mmreplay.storage.zarr.group import FLAGS_NAME, FOLDER, JSON_NAME, MEMBER, ShardedArray
from mmreplay.storage.zarr.group_json import parse
from mmreplay.storage.zarr.shards import DTYPE, FILE_NAME, ROLE_BITS, ShardReader, ShardStates
from mmreplay.verify.report import Notebook
from mmreplay.verify.slots import Claim

Json = dict[str, Any]
Ids = NDArray[np.int64]
MAX_JSON_NBYTES = 16 << 20
CHUNK_ROWS = 1 << 16
MISLED = (
    "other readers of Zarr would read wrong data, mmreplay does not: mmreplay compact "
    "makes a correct copy"
)


def check_group(folder: Path, metadata: Metadata, notes: Notebook) -> None:
    """Check the group's names and metadata, at the cost of some small files.

    Args:
        folder: The buffer's.
        metadata: Its metadata.
        notes: Where findings go.
    """
    arrays = {array.name: array for array in group.arrays_of(metadata).values()}
    live = Owner(folder).alive
    for name, below in sorted(_nodes(arrays).items()):
        where = "/".join(filter(None, (metadata.folder, FOLDER, name)))
        try:
            _check_json(folder / where, where, _wanted(metadata, arrays, name), notes)
            _check_names(folder / where, where, arrays.get(name), below, live, notes)
        except (FormatError, FailedError) as error:
            notes.fail("file", where, error)


def _nodes(arrays: Iterable[str]) -> dict[str, set[str]]:
    """Names that are right below each node; the group's own path is empty."""
    found: dict[str, set[str]] = {}
    for name in arrays:
        parent = ""
        for part in name.split("/"):
            found.setdefault(parent, set()).add(part)
            parent = f"{parent}/{part}" if parent else part
        found.setdefault(parent, set())
    return found


def _wanted(metadata: Metadata, arrays: dict[str, ShardedArray], name: str) -> Json:
    """Return the members that the metadata of a node must have."""
    if name in arrays:
        assert metadata.sharding is not None
        found = group.array_json(arrays[name], metadata.ring, metadata.sharding)
    else:
        found = group.group_json({} if name else {MEMBER: group.about(metadata)})
    # As it is read back: with lists for tuples.
    parsed: Json = json.loads(json.dumps(found))
    return parsed


def _check_json(path: Path, name: str, wanted: Json, notes: Notebook) -> None:
    """Compare the metadata of a node with those of this buffer."""
    what = f"{name}/{JSON_NAME}"
    data = files.read_bytes(path / JSON_NAME, MAX_JSON_NBYTES)
    # The user's own JSON nests deeper here than metadata.json lets it there.
    wrong = _difference(parse(data, what), wanted)
    if wrong is not None:
        key, got, expected = wrong
        notes.note(
            "file",
            what,
            None,
            f"{what}: {key} must be {json.dumps(expected):.80}, got "
            f"{json.dumps(got):.80}; {MISLED}",
        )


def _difference(actual: Json, wanted: Json) -> tuple[str, object, object] | None:
    """Return the first member that differs, at any depth, and both of its values."""
    for key, value in wanted.items():
        got = actual.get(key)
        if isinstance(got, dict) and isinstance(value, dict):
            inner = _difference(got, value)
            if inner is not None:
                return f"{key}/{inner[0]}", *inner[1:]
        elif got != value:
            return key, got, value
    return None


def _check_names(
    path: Path, name: str, array: ShardedArray | None, below: set[str], live: bool, notes: Notebook
) -> None:
    """Report foreign names, and names that a stopped writer left.

    A shard that is not a regular file is always reported, as no writer makes one.
    """
    shard = re.compile(r"c\.\d+\.\d+" + r"\.0" * len(array.shape)) if array else None
    strange = [
        each
        for each in files.names(path)
        if each not in below | {JSON_NAME} and not (shard and shard.fullmatch(each))
    ]
    for each in files.names(path):
        if shard and shard.fullmatch(each) and not _regular(path / each):
            what = f"{name}/{each}"
            notes.fail("file", what, files.irregular(path / each))
    left = [each for each in strange if each.startswith("tmp-")]
    others = [each for each in strange if each not in left]
    if left and not live:
        notes.note(
            "left_over",
            f"{name}/{left[0]}",
            None,
            f"{name} holds {_listed(left)}, left over from a writer that was stopped; "
            "the next writable open removes what is in the group's own folder",
        )
    if others:
        notes.note(
            "unknown",
            f"{name}/{others[0]}",
            None,
            f"{name} holds {_listed(others)}, which is not a file of mmreplay",
        )


def _regular(path: Path) -> bool:
    """Return whether it is a regular file, or gone: a live writer may remove it."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return True


def _listed(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


class GroupFlags:
    """Compares the flags in a group's shards with flags.bin."""

    def __init__(self, flags: File, metadata: Metadata) -> None:
        """Look at a generation, whose flags are open."""
        self._flags, self._metadata = flags, metadata
        self._ring, self._where = metadata.ring, flags.path.parent
        arrays, served = group.arrays_of(metadata), group.served(metadata)
        self._arrays = {arrays[FLAGS_NAME]: 255}
        self._arrays |= {arrays[p]: ROLE_BITS[role] for p, role in served.items()}
        wide, steps = arrays[FLAGS_NAME].shard
        self._rows_per_shard = wide * steps
        self._reader = ShardReader(
            self._where / FOLDER, metadata.ring, mapped=False, advise="never"
        )

    def run(self, claim: Claim, notes: Notebook) -> None:
        """Compare the rows alive of all sealed shard ranges.

        A writer may reopen a shard range during the check; it is then skipped.
        """
        count = self._ring.num_rows // self._rows_per_shard
        path = self._where / FILE_NAME
        file = File.open(path, count * DTYPE.itemsize)
        try:
            states = ShardStates(file, mapped=True)
            for shard_range in states.sealed().tolist():
                number = states.get(shard_range)
                for array, bits in self._arrays.items() if number & 1 else ():
                    problem = self._problem(array, bits, shard_range, number, claim, notes)
                    if problem and states.get(shard_range) == number:
                        shard = group.shard_name(array, self._ring, shard_range)
                        name = f"{self._metadata.folder}/{FOLDER}/{shard}"
                        notes.note("file", name, None, problem)
        finally:
            file.close()

    def _problem(
        self,
        array: ShardedArray,
        bits: int,
        shard_range: int,
        number: int,
        claim: Claim,
        notes: Notebook,
    ) -> str:
        """Return the message of what is wrong with a shard, or ''."""
        for first in range(0, self._rows_per_shard, CHUNK_ROWS):
            stop = min(first + CHUNK_ROWS, self._rows_per_shard)
            within = np.arange(first, stop)
            rows = within + shard_range * self._rows_per_shard
            env_ids, positions, alive = self._alive(rows, claim)
            if not alive.any():
                continue
            within = within[alive]
            out = np.empty(len(within), array.dtype)
            same = np.full(len(within), shard_range), np.full(len(within), number)
            try:
                self._reader.take(array, *same, within, out)
            except (CorruptError, FailedError) as error:
                raise_if_out_of_files(error)
                return str(error)
            notes.read(len(within))
            held = self._flags.pread(len(rows), int(rows[0]))
            wanted = np.frombuffer(held, np.uint8)[alive] & bits
            if array.path != FLAGS_NAME:
                wanted = (wanted != 0).astype(np.uint8)
            bad = np.flatnonzero(out.view(np.uint8) != wanted)
            if len(bad):
                at = np.flatnonzero(alive)[bad[0]]
                return (
                    f"environment {env_ids[at]}, position {positions[at]}: "
                    f"{array.path!r} is {out.view(np.uint8)[bad[0]]} in its shard, "
                    f"but flags.bin says {wanted[bad[0]]}, and {len(bad)} rows "
                    f"differ; {MISLED}"
                )
        return ""

    def _alive(self, rows: Ids, claim: Claim) -> tuple[Ids, Ids, NDArray[np.bool_]]:
        """Environments and positions of rows, and which of them are served."""
        ring = self._ring
        if ring.layout == "time_major":
            slots, env_ids = np.divmod(rows, ring.num_envs)
        else:
            env_ids, slots = np.divmod(rows, ring.slots)
        firsts = claim.firsts[env_ids]
        positions = firsts + (slots - firsts) % ring.slots
        return env_ids, positions, positions < claim.published[env_ids]
