"""A sampler's stored priorities, read and written with the rows of a buffer.

They are read without the lock, while a sampler may use them: each number is written by
one store. Rows without a priority have -1, which every reader treats as new.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.statistics import stored_priorities
from mmreplay.convert.base import Notes
from mmreplay.episodes.starts import BufferIdentity
from mmreplay.errors import FailedError, SchemaError
from mmreplay.format.metadata import Metadata
from mmreplay.samplers.priority_file import COLUMN, check_name, open_column, read_column

Ids = NDArray[np.int64]
Numbers = NDArray[np.float32]


class StoredPriorities:
    """Reads a named column of priorities in a buffer's folder."""

    def __init__(self, folder: Path | None, metadata: Metadata, name: str, notes: Notes) -> None:
        """Map the column; no file stays open.

        Raises:
            SchemaError: The buffer has no column of that name.
        """
        check_name(name)
        path = None if folder is None else folder / "samplers" / name
        if path is None or not (path / COLUMN).exists():
            raise _missing(folder, name)
        home = BufferIdentity(
            metadata.ring,
            folder,
            metadata.uuid,
            metadata.generation,
            heap_nbytes=metadata.heap_nbytes,
        )
        self._column = read_column(home, name)
        if not self._column.trusted:
            notes.note(
                f"the priorities in {path} were not closed before a copy or a power "
                "cut, so they are not used: rows have no priorities"
            )

    def read(self, env_ids: Ids, positions: Ids) -> Numbers:
        """Priorities of rows that are alive, float32 ``[N]``; -1 where there is none.

        Args:
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``.
        """
        return self._column.read(env_ids, positions)


def _missing(folder: Path | None, name: str) -> SchemaError:
    path = None if folder is None else folder / "samplers"
    if path is None or not path.is_dir():
        where = "a buffer in RAM" if folder is None else f"{folder}, which stores none"
        return SchemaError(
            "priorities must name a sampler that drew from a buffer on disk, got "
            f"{name!r} of {where}. Leave it out."
        )
    known = stored_priorities(folder)
    return SchemaError(
        f"priorities must be one of {known} in {path}, got {name!r}. Name the sampler "
        "that drew, or leave it out."
    )


class PriorityWriter:
    """Writes the column of a new buffer, for a sampler of that name."""

    def __init__(self, folder: Path, metadata: Metadata, name: str) -> None:
        """Make the column in the folder of the new buffer.

        Raises:
            FailedError: It cannot be stored there.
        """
        self._generation = metadata.generation
        home = BufferIdentity(
            metadata.ring,
            folder,
            metadata.uuid,
            metadata.generation,
            heap_nbytes=metadata.heap_nbytes,
        )
        self._column = open_column(home, name)
        self._seen = np.zeros(metadata.ring.num_envs, np.int64)
        if self._column.where != "disk":
            raise FailedError(
                f"cannot store priorities in {folder}, because {self._column.where} is "
                "not a writable local disk. Load without priorities."
            )

    def write(self, env_ids: Ids, positions: Ids, values: NDArray[np.generic]) -> None:
        """Store the priorities of rows, float32 ``[N]``."""
        numbers = values.astype(np.float32, copy=False)
        self._column.store(self._column.ring.rows(env_ids, positions), numbers)
        own = numbers >= 0
        # The newest rows without a number stay new for the sampler.
        np.maximum.at(self._seen, env_ids[own], positions[own] + 1)

    def finish(self) -> None:
        """Make it durable."""
        self._column.see(self._seen, self._generation)
        self._column.close()

    def close(self) -> None:
        """Close the column; after `finish` it does nothing."""
        self._column.close()
