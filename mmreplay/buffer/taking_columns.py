"""The samplers' columns of a buffer, taken along with its rows.

What a column has seen is read before the heads are, and its numbers before the limit
is looked at again: the number of a row that is taken is that row's own.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay import boot, files
from mmreplay.errors import CorruptError, FormatError
from mmreplay.files import File
from mmreplay.format.metadata import Metadata
from mmreplay.samplers import seen as states
from mmreplay.samplers.columns import COLUMN, NAME, STATE
from mmreplay.samplers.seen import Record
from mmreplay.storage.lock import locked

Array = NDArray[np.int64]
FOLDER = "samplers"


class Columns:
    """The columns of a source that fit its ring, and their copies.

    Those that are damaged, or of another ring, are left: their samplers begin anew.

    Attributes:
        pairs: The file of numbers of each, and its copy.
    """

    def __init__(self, source: Path, target: Path, metadata: Metadata) -> None:
        self._metadata = metadata
        self._target = target / FOLDER
        self._seen: list[Array] = []
        self.pairs: list[tuple[File, File]] = []
        try:
            for place in _folders(source / FOLDER):
                self._add(place)
        except BaseException:
            self.close()
            raise

    def _add(self, place: Path) -> None:
        metadata = self._metadata
        uuid, num_envs = metadata.uuid, metadata.ring.num_envs
        nbytes = states.NUM_SLOTS * states.slot_nbytes(num_envs)
        with suppress(CorruptError, FormatError):
            state = File.open(place / STATE, nbytes)
            try:
                data, known = state.pread(nbytes, 0), state.identity()
            finally:
                state.close()
            record = states.trusted(
                data, uuid, num_envs, boot.boot_id(), known, lambda: locked(place)
            )
            if record is None:
                return
            numbers = File.open(place / COLUMN, 4 * metadata.ring.num_rows)
            try:
                copy = self._made(place.name, numbers.nbytes)
            except BaseException:
                numbers.close()
                raise
            self._seen.append(record.seen)
            self.pairs.append((numbers, copy))

    def _made(self, name: str, nbytes: int) -> File:
        files.make_folder(self._target, exist_ok=True)
        files.make_folder(self._target / name)
        return File.create(self._target / name / COLUMN, nbytes)

    def finish(self, heads: Array) -> None:
        """Say what the copies have seen, durably.

        Args:
            heads: int64 ``[E]``, those of the copied buffer.
        """
        metadata = self._metadata
        size = states.slot_nbytes(metadata.ring.num_envs)
        for (_, copy), seen in zip(self.pairs, self._seen, strict=True):
            copy.sync()
            folder = copy.path.parent
            state = File.create(folder / STATE, states.NUM_SLOTS * size)
            try:
                device, inode, birth = state.identity()
                record = Record(
                    1, metadata.generation, states.CLEAN, boot.boot_id(),
                    metadata.uuid, device, inode, np.minimum(seen, heads), birth=birth,
                )  # fmt: skip
                state.pwrite(record.encode(), 0)
                state.sync()
            finally:
                state.close()
            files.sync_folder(folder)

    def close(self) -> None:
        """Give the files back."""
        for pair in self.pairs:
            for file in pair:
                file.close()


def _folders(root: Path) -> list[Path]:
    if not root.is_dir() or root.is_symlink():
        return []
    return [
        root / name
        for name in files.names(root)
        if NAME.fullmatch(name)
        and (root / name).is_dir()
        and not (root / name).is_symlink()
    ]
