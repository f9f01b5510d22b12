"""A sampler's stored priorities, which go along with the rows of a buffer.

They are read beside whoever draws with them, without the lock: a number is one store.
Rows that have none of their own yet hold -1, which counts as new wherever it is read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay import process
from mmreplay.buffer.statistics import stored_priorities
from mmreplay.convert.base import Notes
from mmreplay.disk.files import File
from mmreplay.disk.lock import locked
from mmreplay.episodes.starts import BufferIdentity
from mmreplay.errors import FailedError, SchemaError
from mmreplay.format.metadata import Metadata
from mmreplay.samplers import priority_file
from mmreplay.samplers.priority_file import COLUMN, STATE, check_name, open_column

Ids = NDArray[np.int64]
Numbers = NDArray[np.float32]
NONE = np.float32(-1)


class StoredPriorities:
    """The column of a name that lies beside a buffer, for reading."""

    def __init__(
        self, folder: Path | None, metadata: Metadata, name: str, notes: Notes
    ) -> None:
        """Open it; nothing stays open but a mapping.

        Raises:
            SchemaError: The buffer has no column of that name.
        """
        check_name(name)
        place = None if folder is None else folder / "samplers" / name
        if place is None or not (place / COLUMN).exists():
            raise _missing(folder, name)
        self._ring = metadata.ring
        self._seen = self._read_seen(place, metadata, notes)
        file = File.open(place / COLUMN, None)
        try:
            # Of another number of slots, where the ring was resized since.
            slots = file.nbytes // (4 * self._ring.num_envs)
            self._ring = replace(self._ring, slots=max(1, slots))
            rows = slots * self._ring.num_envs
            mapping = file.map_readonly() if rows else b""
            self._values = np.frombuffer(mapping, "<f4", rows)
        finally:
            file.close()

    def _read_seen(self, place: Path, metadata: Metadata, notes: Notes) -> Ids:
        num_envs = metadata.ring.num_envs
        most = priority_file.NUM_SLOTS * priority_file.slot_nbytes(num_envs)
        file = File.open(place / STATE, None)
        try:
            data = file.pread(min(file.nbytes, most), 0)
            found = priority_file.trusted(
                data, metadata.uuid, num_envs, process.boot_id(), file.identity(),
                lambda: locked(place),
            )  # fmt: skip
        finally:
            file.close()
        if found is None:
            notes.note(
                f"the priorities in {place} were not closed before a copy or a power "
                "cut, and are not trusted: rows go without"
            )
            return np.zeros(num_envs, np.int64)
        return found.seen

    def read(self, env_ids: Ids, positions: Ids) -> Numbers:
        """Priorities of rows that are alive, float32 ``[N]``."""
        if not len(self._values):
            return np.full(len(positions), NONE)
        values = self._values[self._ring.rows(env_ids, positions)]
        seen = self._seen[env_ids]
        own = (positions < seen) & (positions >= seen - self._ring.slots)
        own &= (values >= 0) & (values < np.inf)
        return np.where(own, values, NONE)


def _missing(folder: Path | None, name: str) -> SchemaError:
    place = None if folder is None else folder / "samplers"
    if place is None or not place.is_dir():
        where = "a buffer in RAM" if folder is None else f"{folder}, which stores none"
        return SchemaError(
            f"priorities: got {name!r} of {where}, expected the name of a sampler that "
            "drew from a buffer on disk; leave it out"
        )
    known = stored_priorities(folder)
    return SchemaError(
        f"priorities: got {name!r}, expected one of {known} in {place}; name the "
        "sampler that drew, or leave it out"
    )


class PriorityWriter:
    """The column of a new buffer, which a sampler of its name draws with."""

    def __init__(self, folder: Path, metadata: Metadata, name: str) -> None:
        """Make it in the folder that is to be the buffer's.

        Raises:
            FailedError: It cannot be stored there.
        """
        self._generation = metadata.generation
        home = BufferIdentity(metadata.ring, folder, metadata.uuid, metadata.generation)
        self._column = open_column(home, name)
        self._seen = np.zeros(metadata.ring.num_envs, np.int64)
        if self._column.where != "disk":
            raise FailedError(
                f"cannot store priorities in {folder}: they would stay in "
                f"{self._column.where}, expected a local disk that can be written; "
                "load without them"
            )

    def write(self, env_ids: Ids, positions: Ids, values: NDArray[np.generic]) -> None:
        """Store the priorities of rows, float32 ``[N]``."""
        numbers = values.astype(np.float32, copy=False)
        self._column.store(self._column.ring.rows(env_ids, positions), numbers)
        own = numbers >= 0
        # The newest rows without a number are new to whoever draws.
        np.maximum.at(self._seen, env_ids[own], positions[own] + 1)

    def finish(self) -> None:
        """Make it durable."""
        self._column.see(self._seen, self._generation)
        self._column.close()

    def close(self) -> None:
        """Give it back; nothing to do after `finish`."""
        self._column.close()
