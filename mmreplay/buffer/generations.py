"""The generation of a buffer that is in force, followed through resizes."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer import lifecycle, rebuild, room
from mmreplay.buffer.groups import GroupParts
from mmreplay.buffer.reading import Reading, fold_of, listed
from mmreplay.buffer.view import ReplacedError
from mmreplay.buffer.writer import Writer
from mmreplay.errors import FailedError, RemovedError
from mmreplay.ring import Ring
from mmreplay.samplers.columns import close_columns
from mmreplay.schema import Schema
from mmreplay.storage.commit_reader import CommitReader
from mmreplay.storage.group_mapping import GroupMapping
from mmreplay.storage.zarr import ZarrStore
from mmreplay.storage.zarr_source import ZarrSource

if TYPE_CHECKING:
    from mmreplay.transforms.base import Transform

T = TypeVar("T")


class Generations:
    """What every call of an open buffer asks for its files; see `ReplayBuffer`.

    Threads: a draw reads the generation that it began with to its end, whichever is
    put in force meanwhile, and by whom.

    Attributes:
        path: The folder, or None for a buffer in RAM.
        transforms: What draws make of stored steps, in order.
    """

    _finalizer: weakref.finalize[..., Generations]

    def __init__(
        self,
        parts: lifecycle.Parts,
        transforms: Sequence[Transform] = (),
        commit_every: float | None = None,
    ) -> None:
        """Take over open parts.

        Args:
            parts: The generation in force.
            transforms: What draws make of stored steps.
            commit_every: Seconds between commits by a thread; None for none.
        """
        self.path = parts.path
        self._commit_every = commit_every
        # Whoever changes the buffer takes turns, whichever generation is in force.
        self._turn = threading.RLock()
        self._switching = threading.Lock()
        try:
            self.transforms = listed(transforms)
            self._use(parts)
        except BaseException:
            # Transforms that do not fit leave nothing open.
            parts.close()
            raise

    def _use(self, parts: lifecycle.Parts, former: Reading | None = None) -> None:
        """Read from these parts on; of what does not fit nothing is taken over."""
        fold = fold_of(self.transforms, parts.metadata)
        reading = Reading(parts, fold, former)
        with reading.view.lock:
            if former is not None:
                self._finalizer.detach()
                former.view.replaced = True
            self._parts, self._reading = parts, reading
            # A buffer that was dropped or left open at exit is closed all the same.
            self._finalizer = weakref.finalize(
                self, _close_in_owner, parts, os.getpid()
            )

    def _give_back(self) -> None:
        """Close everything, what samplers keep beside the data included."""
        self._finalizer.detach()
        try:
            self._parts.close()
            self._parts.store.unmap()
        finally:
            close_columns(self._reading.view.home)

    def close(self, seal: bool = True) -> None:
        """Commit and give everything back; a second call does nothing.

        Args:
            seal: Of the Zarr engine: put the shards that are not full yet into the
                group too, so that it holds every row; False leaves their rows to
                the next writer, where only this library reads them.

        Raises:
            FullError: All is committed and closed, but no space is left to put the
                newest rows into the group.
            RemovedError: All is closed, but the folder was deleted, or its path leads
                to another one.
            FailedError: Likewise, for want of memory, of threads or of files to
                open; or the device failed.
        """
        with self._turn:
            closed, store = self._parts.closed, self._parts.store
            if self._parts.writer is not None and not closed:
                self._parts.writer.owner.check()
            self._parts.seals = seal
            self._give_back()
            if isinstance(store, ZarrStore) and not closed:
                store.sealing.tell()

    def __enter__(self) -> Self:
        """Return the buffer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the buffer."""
        self.close()

    @property
    def source(self) -> ZarrSource | None:
        """What a Zarr group was opened by, for `open` again; None of buffers."""
        return self._parts.source if isinstance(self._parts, GroupParts) else None

    @property
    def mapping(self) -> GroupMapping | None:
        """How a Zarr group was taken, with notes and doubts; None of buffers."""
        return self._parts.mapping if isinstance(self._parts, GroupParts) else None

    @property
    def _name(self) -> str:
        return str(self.path or self.source or "this buffer")

    def _read(self) -> Reading:
        parts = self._parts
        # Another thread may have put another generation in force just now.
        if parts.closed and parts is self._parts:
            raise FailedError(
                f"{self._name} is closed, expected it open; use ReplayBuffer.open"
            )
        reading = self._reading
        reading.view.refresh()
        if parts.refuse_removed is not None and not parts.ledger.moved:
            self._look_for(parts)
        if self._parts.ledger.moved:
            self._follow()
            reading = self._reading
        return reading

    def _look_for(self, parts: lifecycle.Parts) -> None:
        """See that a reader's folder is still where its path leads."""
        ledger = parts.ledger
        assert parts.refuse_removed is not None
        if parts.refuse_removed() and isinstance(ledger, CommitReader):
            ledger.moved = True

    def _follow(self) -> None:
        """Open what the writer put in place of this generation, once for all threads.

        The same steps live in another folder then.
        """
        with self._switching:
            parts = self._parts
            if parts.ledger.moved and not parts.closed:
                assert self.path is not None
                fresh = lifecycle.open_reader(self.path, parts.policy)
                if fresh.metadata.uuid != parts.metadata.uuid:
                    fresh.close()
                    raise RemovedError(
                        f"{self.path} leads to another buffer now, expected the one "
                        "that was opened, which was resized elsewhere; close this "
                        "buffer, and open that one by its new path",
                        errno_=errno.ESTALE,
                    )
                try:
                    self._use(fresh, self._reading)
                except BaseException:
                    # Transforms that do not fit: every later call says so as well.
                    fresh.close()
                    raise
                parts.close()

    def _in_force(self, call: Callable[[Reading], T]) -> T:
        """Call with what reads the generation in force until the end of the call."""
        while True:
            try:
                return call(self._read())
            except ReplacedError:
                continue

    def _writer(self) -> Writer:
        parts = self._parts
        writer = parts.writer
        if writer is None or parts.closed:
            return parts.writing(self._name)
        return writer

    def _rebuild(
        self, ring: Ring, schema: Schema, fill: dict[str, NDArray[np.generic]] | None
    ) -> None:
        parts, reading = self._parts, self._reading
        metadata = parts.metadata.next_generation(ring, schema)
        # Refused before the switch, which nothing takes back.
        fold_of(self.transforms, metadata)
        if parts.path is not None:
            there = room.ring_nbytes(parts.metadata, parts.ledger.heads)
            room.warn_where_short(parts.path, metadata, there, 3)
        fresh = rebuild.swap(parts, reading, ring, schema, fill, self._commit_every)
        try:
            self._use(fresh, reading)
        except BaseException:
            fresh.close()
            raise
        finally:
            if parts.path is not None:
                parts.retire()

    def _commit(self) -> None:
        parts = self._parts
        try:
            parts.writing(self._name).check()
            if parts.committer is not None:
                parts.committer.commit()
        except FailedError:
            with self._turn:
                # A generation that replaced this one meanwhile is durable as a whole.
                if parts is self._parts:
                    raise


def _close_in_owner(parts: lifecycle.Parts, pid: int) -> None:
    if os.getpid() == pid:
        # A buffer that is collected has no caller to raise to.
        with suppress(RemovedError):
            parts.close()
