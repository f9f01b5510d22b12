"""Takes the rows of a Zarr buffer: sealed shards are linked, the tail is copied.

Nobody writes a published shard again, so a link to it stays what it is when the writer
puts its place back and removes it. Which of the two holds a place's rows is looked at
before and after, and taken again where it changed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from mmreplay import files
from mmreplay.buffer.lifecycle import Parts
from mmreplay.buffer.taking import (
    CANNOT_CLONE,
    CHUNK_NBYTES,
    Array,
    How,
    Pairs,
    Piece,
    Progress,
    Taking,
)
from mmreplay.errors import CorruptError, StarvedError, system_error
from mmreplay.files import File
from mmreplay.storage import zarr_group
from mmreplay.storage.base import CheckedStore
from mmreplay.storage.ledger import refuse_cut
from mmreplay.storage.placement import FLAGS, SUMS, place
from mmreplay.storage.places import DTYPE, FILE_NAME, Places

TRIES = 1000
CANNOT_LINK = {*CANNOT_CLONE, errno.EMLINK}


class ShardTaking(Taking):
    """See `Taking`; the sealed places' numbers are the target's own."""

    def __init__(
        self,
        parts: Parts,
        store: CheckedStore,
        columns: Pairs,
        progress: Progress | None,
    ) -> None:
        """See `Taking`."""
        super().__init__(parts, store, columns, progress)
        metadata = parts.metadata
        assert metadata.sharding is not None
        assert parts.path is not None
        ring = metadata.ring
        wide = ring.wide
        self._steps = metadata.sharding.shard_rows
        self._place_rows = self._steps * wide
        self._count = ring.num_rows // self._place_rows
        self._arrays = zarr_group.arrays_of(metadata)
        self._source = parts.path / metadata.folder
        self._target = store.files[0].path.parent
        self._raw: set[int] = set()
        self._sealed: set[int] = set()
        self._linked = False
        self._names = _tail_names(store)

    def run(self) -> How:
        """Take everything."""
        self._places = Places.open(
            self._source, self._count, writable=False, mapped=True
        )
        try:
            self._copied()
        finally:
            self._places.file.close()
        refuse_cut(self._ledger)
        self._forget_lost()
        self._publish()
        return "link" if self._linked else "copy"

    def _cuts(self, ids: Array, first: int, stop: int, size: int) -> Iterator[Piece]:
        """Pieces of one place each."""
        while first < stop:
            end = min(stop, (first // self._steps + 1) * self._steps)
            yield from super()._cuts(ids, first, end, size)
            first = end

    def _carry(self, piece: Piece, width: int) -> None:
        """Link the shards of a piece's place, or copy its rows out of the tail."""
        number = piece.row // self._place_rows
        if number not in self._sealed:
            self._settle(number, piece, width)
        self._copy_tail(piece, width, kept=True)

    def _settle(self, number: int, piece: Piece, width: int) -> None:
        for _ in range(TRIES):
            before = self._places.get(number)
            sealed = bool(before & 1)
            try:
                if sealed:
                    self._link(number)
                else:
                    self._copy_tail(piece, width, kept=False)
            except CorruptError:
                # Removed meanwhile, or damaged.
                if self._places.get(number) == before:
                    raise
            if self._places.get(number) == before:
                break
            if sealed:
                self._unlink(number)
        else:
            raise StarvedError(
                f"{self._source}: got a place that was sealed or put back {TRIES} "
                "times while it was copied, expected it to last; take the snapshot "
                "again"
            )
        if sealed and number in self._raw:
            # Rows copied before may be others' in the shards.
            self._look(self._begins, self.heads)
        (self._sealed if sealed else self._raw).add(number)

    def _copy_tail(self, piece: Piece, width: int, *, kept: bool) -> None:
        """Copy a piece of the files whose rows shards have, or of the others."""
        for source, target in self._pairs:
            name = target.path.name
            if name != SUMS and (name not in self._names) == kept:
                self._copy_rows(source, target, piece, width)

    def _link(self, number: int) -> None:
        """Have a place's shards in the target too."""
        for array in self._arrays.values():
            name = zarr_group.shard_name(array, self._ring, number)
            root, other = (
                each / zarr_group.FOLDER for each in (self._source, self._target)
            )
            self.nbytes += self._one(root / name, other / name)

    def _one(self, source: Path, target: Path) -> int:
        """Link one shard, or share its blocks, or copy it; its bytes."""
        try:
            files.disk.link(source, target)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise CorruptError(
                    f"{source} is missing, expected a shard; run mmreplay verify"
                ) from error
            if error.errno not in CANNOT_LINK:
                raise system_error("link", target, error) from error
            return self._doubled(source, target)
        # A link, a pipe or a socket in the place of a shard is linked as what it is.
        status = os.lstat(target)
        if not stat.S_ISREG(status.st_mode):
            files.remove_tree(target)
            raise files.irregular(source)
        self._linked = True
        return status.st_size

    def _doubled(self, source: Path, target: Path) -> int:
        old = File.open(source, None)
        try:
            new = File.create(target, old.nbytes)
            try:
                self._fill(old, new)
                new.sync()
            finally:
                new.close()
            return old.nbytes
        finally:
            old.close()

    def _fill(self, old: File, new: File) -> None:
        try:
            files.disk.clone(new.fd, old.fd)
        except OSError as error:
            if error.errno not in CANNOT_CLONE:
                raise system_error("clone into", new.path, error) from error
            for at in range(0, old.nbytes, CHUNK_NBYTES):
                new.pwrite(old.pread(min(CHUNK_NBYTES, old.nbytes - at), at), at)

    def _unlink(self, number: int) -> None:
        """Let go of shards that were linked while the place changed hands."""
        for array in self._arrays.values():
            name = zarr_group.shard_name(array, self._ring, number)
            files.remove_tree(self._target / zarr_group.FOLDER / name)

    def _publish(self) -> None:
        """Make the links durable, and say which places they hold."""
        for array in self._arrays.values():
            files.sync_folder(self._target / zarr_group.FOLDER / array.name)
        file = File.open(
            self._target / FILE_NAME, self._count * DTYPE.itemsize, writable=True
        )
        places = Places(file, mapped=False)
        try:
            for number in sorted(self._sealed):
                places.put(number, 1)
            file.sync()
        finally:
            file.close()


def _tail_names(store: CheckedStore) -> set[str]:
    """Files of the tail whose rows shards have too; sums are a matter of their own."""
    large = place(store.schema).large
    mutable = {
        name for path, name in large.items() if store.schema.fields[path].mutable
    }
    return {file.path.name for file in store.files} - {FLAGS, SUMS} - mutable
