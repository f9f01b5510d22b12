"""Reads a buffer, environment by environment, oldest row first.

The registry's module of the format "buffer"; `buffer_writer` has its other half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.buffer.opening import StrPath
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.buffer.statistics import counts_left_behind, left_behind
from mmreplay.convert.base import BLOCK_NBYTES, Block, Notes, Reader, default_rows, read_ahead
from mmreplay.convert.buffer_writer import open_writer as open_writer
from mmreplay.convert.buffer_writer import planned as planned
from mmreplay.convert.description import PRIORITY, Description, refuse_new_ends, select_fields
from mmreplay.convert.select import env_mask, paths_of
from mmreplay.convert.stored_priorities import StoredPriorities
from mmreplay.convert.values import split_by_bytes, value_nbytes
from mmreplay.episodes import CUT, TRUNCATED
from mmreplay.errors import FailedError, StaleError, undone_by
from mmreplay.format.metadata import ON_DISK
from mmreplay.ring import Span
from mmreplay.storage.commit_state import DISCARDED_ROWS


class BufferReader(Reader):
    """Reads the rows of a buffer that are alive when the reader is made.

    A live writer may continue: if it overwrites rows before they are read, reading
    ends with StaleError.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        *,
        fields: Sequence[str] | None = None,
        env_ids: ArrayLike | None = None,
        priorities: str | None = None,
        owned: bool = False,
    ) -> None:
        """Read a buffer.

        Args:
            buffer: Open for reading or writing, on disk or in RAM.
            fields: Paths to read; all by default. The flags keep the ends.
            env_ids: int ``[N]``; all by default. Environments keep their numbers,
                those left out are empty.
            priorities: Name of a sampler's stored column to read as well.
            owned: Close the buffer with the reader.
        """
        self.report = Notes()
        self._buffer = buffer
        self._owned = owned
        first, stop = buffer.span.first.copy(), buffer.span.stop.copy()
        if env_ids is not None:
            first = np.where(env_mask(buffer.num_envs, env_ids), first, stop)
        self._span = Span(first, stop)
        self._dropped_epoch = buffer.view.home.cut_epoch
        self._priorities = None
        notes = left_behind if priorities is None else counts_left_behind
        for note in notes(buffer.path):
            self.report.note(note)
        if priorities is not None:
            self._priorities = StoredPriorities(
                buffer.path, buffer.metadata, priorities, self.report
            )
        metadata = buffer.metadata
        self.engine = metadata.engine if metadata.engine in ON_DISK else None
        schema = metadata.schema
        if fields is not None:
            selected = select_fields(schema, paths_of(schema.paths, fields))
            refuse_new_ends(schema.roles, selected, "fields")
            schema = selected
        # The heap of a compressed buffer holds the values of a few rows, and its shards
        # those of all.
        bounds_rows = bool(schema.varying) and metadata.engine != "zarr"
        self._paths = schema.paths
        self._description = Description(
            schema=schema,
            first=self._span.first,
            stop=self._span.stop,
            capacity=metadata.ring.capacity,
            autoreset=metadata.autoreset,
            layout=metadata.ring.layout,
            uuid=metadata.uuid.hex(),
            statistics=buffer.statistics,
            user=metadata.user,
            priorities=priorities or "",
            heap_nbytes=metadata.heap_nbytes if bounds_rows else 0,
        )

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        rows = rows_per_block or default_rows(self._description.select(self._paths))
        return read_ahead(self._blocks(rows, self._paths))

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`: only flags are read."""
        return self._blocks(BLOCK_NBYTES // 32, ())

    def measures(self) -> Iterator[Block]:
        """See `Reader.measures`: only references are read."""
        paths = self._description.schema.varying
        rows = max(1, BLOCK_NBYTES // (32 * (1 + len(paths))))
        for env_id, first, stop in self._row_ranges(rows):
            yield self._block(env_id, first, stop, paths, lengths=True)

    def narrow(self, span: Span) -> None:
        """See `Reader.narrow`."""
        self._span = span

    def only(self, paths: tuple[str, ...]) -> None:
        """See `Reader.only`."""
        self._paths = paths

    def identity(self) -> object:
        """See `Reader.identity`: the buffer, and how often rows were discarded."""
        return self._buffer.metadata.uuid, self._buffer.view.home.cut_epoch

    def oldest(self) -> NDArray[np.int64]:
        """See `Reader.oldest`."""
        return np.maximum(self._description.first, self._buffer.span.first)

    def _row_ranges(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """All rows as (environment, first, stop), at most so many each."""
        firsts, stops = self._span.first.tolist(), self._span.stop.tolist()
        for env_id, (begin, end) in enumerate(zip(firsts, stops, strict=True)):
            for first in range(begin, end, rows):
                yield env_id, first, min(first + rows, end)

    def _blocks(self, rows: int, paths: tuple[str, ...]) -> Iterator[Block]:
        schema = select_fields(self._description.schema, paths) if paths else None
        for env_id, first, stop in self._row_ranges(rows):
            if schema is None or not schema.varying:
                yield self._block(env_id, first, stop, paths)
                continue
            lengths = self._block(env_id, first, stop, schema.varying, lengths=True)
            for begin, end in split_by_bytes(value_nbytes(lengths, schema)):
                yield self._block(env_id, first + begin, first + end, paths)

    def _block(
        self, env_id: int, first: int, stop: int, paths: tuple[str, ...], *, lengths: bool = False
    ) -> Block:
        view = self._buffer.view
        moment = view.limits_before
        if view.home.cut_epoch != self._dropped_epoch:
            raise StaleError(DISCARDED_ROWS)
        positions = np.arange(first, stop)
        env_ids = np.full(len(positions), env_id)
        columns: dict[str, NDArray[np.generic]] = {}
        try:
            view.check_alive(env_ids, positions)
            if lengths:
                columns |= view.get_lengths(paths, env_ids, positions)
            elif paths:
                columns |= view.read_values(paths, env_ids, positions)
            if self._priorities is not None and paths and not lengths:
                columns[PRIORITY] = self._priorities.read(env_ids, positions)
            flags = view.flags(env_ids, positions)
            if stop == self._span.stop[env_id] < self._description.stop[env_id]:
                # The row after the last one is left out: if it is cut off from its
                # predecessor, only its flags say that the predecessor is truncated.
                after = view.flags(np.array([env_id]), np.array([stop]))
                flags[-1] |= TRUNCATED if after[0] & CUT else 0
            if view.stale(env_ids, positions, moment) is not None:
                view.check_alive(env_ids, positions)
        except FailedError as error:
            # A writer that began after a failed sync may have cut rows during the read.
            if self._buffer.view.home.cut_epoch == self._dropped_epoch:
                raise
            raise StaleError(DISCARDED_ROWS) from error
        except StaleError as error:
            raise StaleError(
                f"environment {env_id}: the writer overwrote rows of [{first}, {stop}) "
                "before they were read. Pause the writer, or export a snapshot."
            ) from error
        return Block(columns, env_ids, positions, flags)

    def close(self) -> None:
        """See `Reader.close`."""
        if self._owned:
            self._buffer.close()


def open_reader(
    path: StrPath,
    *,
    fields: Sequence[str] | None = None,
    env_ids: ArrayLike | None = None,
    priorities: str | None = None,
) -> BufferReader:
    """Open a buffer's folder as a source; see `BufferReader`."""
    buffer = ReplayBuffer.open(path)
    with undone_by(buffer.close):
        return BufferReader(
            buffer, fields=fields, env_ids=env_ids, priorities=priorities, owned=True
        )
