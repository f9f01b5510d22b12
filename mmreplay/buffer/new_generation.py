"""The target of every copy: new files that are a buffer only once they are whole.

A new generation is filled from one of several sources: rows of a reader (resize,
add_field, compact), files of a live buffer (snapshot), blocks of another format (load),
or what survived damage (repair). Whatever fills it, it becomes durable in one order,
and metadata.json, without which a folder is no buffer, appears last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mmreplay.disk import files
from mmreplay.disk.lock import FILE_NAME as LOCK
from mmreplay.disk.lock import WriterLock, refuse_network
from mmreplay.errors import FormatError, LockedError
from mmreplay.format import metadata as metadata_file
from mmreplay.format.metadata import Metadata
from mmreplay.storage import recovery
from mmreplay.storage.engines import STORES
from mmreplay.storage.layout import HEAP, SUMS
from mmreplay.storage.store import CheckedStore, DiskStore

Ids = NDArray[np.int64]


class NewGeneration:
    """The files of a generation that is being made; use ``with``.

    A source writes rows into `store`, and the checksums of the blocks that they fill
    (`sum_blocks`); then `finish` makes all of it durable, and `publish` makes a new
    folder a buffer. Leaving the ``with`` closes the files; what is left of a
    generation that failed is removed by `new_folder`, or by the resize.

    Attributes:
        path: The buffer's folder.
        metadata: What the generation will be.
        encoded: The bytes of metadata.json.
        folder: The data folder.
        store: The rows, open for writing.
    """

    def __init__(
        self, path: Path, metadata: Metadata, *, max_sums_nbytes: int | None = None
    ) -> None:
        """Make the data folder and its files.

        Args:
            path: The buffer's folder, which exists.
            metadata: What the generation will be.
            max_sums_nbytes: Reserve no space for checksums that take more.
        """
        self.path, self.metadata = path, metadata
        # Metadata that cannot be written is refused before there is a file.
        self.encoded = metadata_file.encode(metadata)
        self.folder = path / metadata.folder
        # A creation or resize that was killed may have left one.
        files.remove_tree(self.folder)
        files.make_folder(self.folder)
        self.store: CheckedStore = create_store(self.folder, metadata, max_sums_nbytes)

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Close the files, and let their mappings go."""
        self.store.close()
        self.store.unmap()

    def sum_blocks(self, tails: Ids, heads: Ids) -> None:
        """Write the checksums of every whole block that holds a row.

        Args:
            tails: int64 ``[E]``, the oldest position of each environment.
            heads: int64 ``[E]``, the next one to be written.
        """
        store, size = self.store, self.metadata.ring.block_rows
        # The first block may begin with rows that were never written, and a hole that
        # is read through a mapping is a SIGBUS where tmpfs is full.
        store.allocate(tails // size * size, tails)
        for env_id in range(self.metadata.ring.num_envs):
            first = int(tails[env_id]) // size
            blocks = range(first, int(heads[env_id]) // size)
            sums = [store.checksum(env_id, block) for block in blocks]
            if sums:
                store.write_sums(env_id, first, np.array(sums, np.uint32))

    def finish(
        self,
        heads: Ids,
        tails: Ids,
        heap_heads: Ids | None = None,
        heap_tails: Ids | None = None,
        *,
        seal: bool | None = True,
    ) -> None:
        """Make the rows durable, and then COMMIT, which says that they are.

        Args:
            heads: int64 ``[E]``, positions to go on from.
            tails: int64 ``[E]``, oldest positions alive.
            heap_heads: int64 ``[E]``, heap positions to go on from, where a field
                varies.
            heap_tails: int64 ``[E]``, where values begin; by default at 0.
            seal: Of the Zarr engine: True seals all rows into shards; False leaves
                the rows that no shard holds in the staging files, and has the group
                say so; None leaves the group to a writer that goes on with it.
        """
        store = self.store
        # Checksums first, of either engine: their file may need space, and sealing
        # gives back the space of staging rows, which nothing may ask for again after.
        store.sync_sums()
        if seal is not None:
            # Before the sync: sealing writes shards and the shard index, which only
            # the sync below vouches for.
            store.settle(tails, heads, seal=seal)
        store.sync()
        # COMMIT last: from here on an opening trusts every row between its tails and
        # heads, which a power cut must not have taken.
        recovery.create(self.folder, self.metadata, heads, tails, heap_heads, heap_tails)
        files.sync_folder(self.folder)

    def shrink_heap(self, metadata: Metadata) -> None:
        """Make the heap's file smaller, before `finish`: no value lies behind its end.

        Args:
            metadata: With the new size.
        """
        self.metadata, self.encoded = metadata, metadata_file.encode(metadata)
        for file in self.store.files:
            if file.path.name == HEAP:
                file.resize(metadata.heap_nbytes * metadata.ring.num_envs)

    def publish(self) -> None:
        """Write metadata.json, which makes the folder a buffer, and unmark it."""
        files.replace_bytes(self.path / metadata_file.FILE_NAME, self.encoded)
        files.remove_tree(self.path / recovery.HALF)


@contextmanager
def new_folder(target: Path, allow_network: bool) -> Iterator[None]:
    """Hold a new or empty folder, marked as half made until it is whole.

    A copy that fails gives its space back: a disk that was too small would stay full.
    A copy that is killed, or gets Ctrl-C, leaves what there is, and the next attempt
    starts again.

    Args:
        target: The folder. The caller publishes metadata.json last, and then removes
            the mark; see `NewGeneration.publish`.
        allow_network: Write to a network file system all the same.

    Raises:
        FormatError: It holds something.
        LockedError: Another process fills it.
    """
    existed = os.path.exists(target)
    prepare_folder(target)
    try:
        refuse_network(target, allow_network)
        lock = WriterLock(target)
    except LockedError:
        raise
    except Exception:
        # Without the lock, files in the folder may belong to another process.
        with suppress(OSError):
            if not existed:
                files.disk.rmdir(target)
        raise
    try:
        recovery.clear_half(target)
        others = set(files.names(target))
        inode = os.stat(target).st_ino
        try:
            recovery.mark_half(target)
            yield
        except Exception:
            # The error says why the copy failed, not what could not be removed. A
            # repair in place that fails at its exchange has a whole buffer here, or
            # already the damaged one.
            with suppress(OSError):
                if os.stat(target).st_ino == inode and not _is_buffer(target):
                    _give_back(target, others, existed)
            raise
    finally:
        lock.release()


def _is_buffer(target: Path) -> bool:
    names = files.names(target)
    return metadata_file.FILE_NAME in names and recovery.HALF not in names


def _give_back(target: Path, others: set[str], existed: bool) -> None:
    """Remove what was made in a folder since, and the folder unless it existed."""
    for name in set(files.names(target)) - others - {recovery.HALF}:
        files.remove_tree(target / name)
    # The mark last: without it the other files would look like a user's.
    files.remove_tree(target / recovery.HALF)
    if not existed and others <= {LOCK}:
        files.remove_tree(target)


def prepare_folder(path: Path, way_out: str = "Choose another path.") -> None:
    """Make a buffer's folder, or accept an empty one or a creation cut short.

    Args:
        path: The folder.
        way_out: What to do if the folder holds a buffer.
    """
    # By os.path, to which a folder that may not be passed through is no error yet.
    for parent in (path, *path.parents):
        _check_folder_possible(parent)
    if os.path.exists(path / metadata_file.FILE_NAME):
        raise FormatError(f"{path} already holds a buffer. {way_out}")
    if os.path.isdir(path):
        strangers = [
            name
            for name in files.names(path)
            if name != LOCK and not name.startswith(("data-", "tmp-"))
        ]
        if strangers and not (path / recovery.HALF).exists():
            raise FormatError(
                f"{path} is a folder with other files ({strangers[0]!r}, ...). Choose "
                "a new or empty folder."
            )
        # A creation that was killed may not have synced this entry.
        files.sync_entry(path)
        return
    # Likewise a parent folder, in which nothing was made yet.
    standing = next(p for p in Path(os.path.abspath(path)).parents if os.path.exists(p))
    if os.access(standing, os.R_OK) and not files.names(standing):
        files.sync_entry(standing)
    for parent in [*reversed(path.parents), path]:
        if not os.path.exists(parent):
            files.make_folder(parent, exist_ok=True)


def _check_folder_possible(folder: Path) -> None:
    """Refuse a path at which no folder can be made.

    Raises:
        FormatError: It is a file, or a link that leads nowhere.
    """
    # In this order: another process may make the folder in between.
    if not os.path.lexists(folder) or os.path.isdir(folder):
        return
    if os.path.exists(folder):
        raise FormatError(f"{folder} is a file, not a folder. Choose another path.")
    raise FormatError(
        f"{folder} is a link to {os.readlink(folder)!r}, which does not exist. Make "
        "that folder, remove the link, or choose another path."
    )


def create_store(folder: Path, metadata: Metadata, most_nbytes: int | None = None) -> DiskStore:
    """Create the files of a new generation in an existing folder.

    Space for checksums is reserved at once, at most 8 bytes a row, in large rings a
    thousandth of that: a full disk would keep rows that it holds from a commit.

    Args:
        folder: The generation's.
        metadata: What it will be.
        most_nbytes: Reserve no space for checksums that take more.
    """
    store = STORES[metadata.engine].create(folder, metadata)
    try:
        for file in store.files:
            few = most_nbytes is None or file.nbytes <= most_nbytes
            if file.path.name == SUMS and few:
                file.allocate(0, file.nbytes)
    except BaseException:
        store.close()
        raise
    return store
