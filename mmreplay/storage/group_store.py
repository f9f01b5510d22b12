"""A store whose rows are a Zarr group's as it is; it is read only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import FailedError
from mmreplay.files import File
from mmreplay.ring import Ring, Run
from mmreplay.schema import Schema
from mmreplay.storage.array_metadata import ForeignArray
from mmreplay.storage.base import Columns, flags_between
from mmreplay.storage.blobs import Blobs
from mmreplay.storage.chunked import ChunkedReader

Ids = NDArray[np.int64]


class GroupStore:
    """Rows of a group; see `Store` for what each method owes."""

    def __init__(
        self,
        ring: Ring,
        schema: Schema,
        arrays: Mapping[str, ForeignArray],
        flags: NDArray[np.uint8],
        blobs: Blobs,
        reader: ChunkedReader,
        *,
        by_env: bool,
    ) -> None:
        """Make one.

        Args:
            ring: Where rows lie.
            schema: The fields.
            arrays: Of each field but those that flags tell.
            flags: uint8 ``[num_rows]``.
            blobs: The group, closed with the store.
            reader: Reads it.
            by_env: Arrays are ``[E, slots, *shape]``; else ``[rows, *shape]``.
        """
        self.ring, self.schema = ring, schema
        self.packed = frozenset[str]()
        self.grain = 1
        self._arrays, self._flags = arrays, flags
        self._blobs, self._reader = blobs, reader
        self._by_env = by_env

    def gather(self, rows: Ids, paths: Sequence[str]) -> dict[str, NDArray[np.generic]]:
        """Copy rows out; see `Store.gather`.

        Raises:
            CorruptError: A chunk is damaged, or of rows that are alive and missing.
            FailedError: A remote store cannot be reached.
        """
        at = self._at(rows)
        found: dict[str, NDArray[np.generic]] = {}
        for path in paths:
            array, field = self._arrays.get(path), self.schema[path]
            if array is not None:
                found[path] = np.empty((len(rows), *field.shape), field.numpy)
                self._reader.take(array, at, found[path])
            elif not field.nbytes:
                found[path] = np.empty((len(rows), *field.shape), field.numpy)
        return found

    def _at(self, rows: Ids) -> list[Ids]:
        """Coordinates of rows in the arrays."""
        if not self._by_env:
            return [rows]
        if self.ring.layout == "env_major":
            return list(np.divmod(rows, self.ring.slots))
        slots, env_ids = np.divmod(rows, self.ring.num_envs)
        return [env_ids, slots]

    def prefetch(self, rows: Ids, paths: Sequence[str], now: bool = False) -> int:
        """Ask for nothing: chunks are fetched side by side when they are read."""
        return 0

    @property
    def all_flags(self) -> NDArray[np.uint8]:
        """Flags of every row; see `Store.all_flags`."""
        return self._flags

    def flags(self, rows: Ids, new: bool = False) -> NDArray[np.uint8]:
        """Flags of rows; see `Store.flags`."""
        return self._flags.take(rows)

    def flags_between(self, env_id: int, first: int, stop: int) -> NDArray[np.uint8]:
        """Flags of a stretch; see `Store.flags_between`."""
        return flags_between(self._flags, self.ring, env_id, first, stop)

    @property
    def files(self) -> list[File]:
        """None: files are opened while they are read."""
        return []

    def disk_nbytes(self) -> tuple[int, int]:
        """Return (bytes of the rows unpacked, 0): nobody counted the files."""
        return self.ring.num_rows * self.schema.row_nbytes, 0

    def unmap(self) -> None:
        """Do nothing: nothing is mapped."""

    def close(self) -> None:
        """Give the group back."""
        self._blobs.close()

    def _refuse(self) -> NoReturn:
        raise FailedError(
            f"{self._blobs.where} is a Zarr group, which is only read, expected a "
            "buffer of your own to write to; make one with mmreplay convert"
        )

    def write(
        self, runs: Sequence[Run], columns: Columns, flags: NDArray[np.uint8]
    ) -> None:
        """Refuse; likewise all that follows."""
        self._refuse()

    def step(self, given: Mapping[str, object]) -> int:
        """Refuse."""
        self._refuse()

    def write_step(self, row: int, given: Columns, flags: int) -> None:
        """Refuse."""
        self._refuse()

    def block(self, given: Mapping[str, object]) -> int:
        """Refuse."""
        self._refuse()

    def wide(self, given: Mapping[str, object]) -> int:
        """Refuse."""
        self._refuse()

    def write_wide(
        self, runs: Sequence[Run], given: Columns, flags: NDArray[np.uint8]
    ) -> None:
        """Refuse."""
        self._refuse()

    def allocate(self, first: Ids, stop: Ids) -> None:
        """Refuse."""
        self._refuse()

    def give_up(self, limits: Ids) -> None:
        """Refuse."""
        self._refuse()

    def set(self, path: str, rows: Ids, values: NDArray[np.generic]) -> None:
        """Refuse."""
        self._refuse()

    def sync(self) -> None:
        """Refuse."""
        self._refuse()
