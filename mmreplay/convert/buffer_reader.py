"""A buffer as a format: read env by env, oldest first, and written as a new one.

A new buffer begins at the source's first positions and keeps flags, autoreset and
statistics, so that what was exported and loaded again is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from mmreplay.buffer import opening
from mmreplay.buffer import opening as lifecycle
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.buffer.statistics import left_behind
from mmreplay.convert.ahead import beside
from mmreplay.convert.base import (
    BLOCK_NBYTES,
    Block,
    Notes,
    Reader,
    default_rows,
)
from mmreplay.convert.buffer_writer import BufferWriter
from mmreplay.convert.description import PRIORITY, Description, part
from mmreplay.convert.select import mask_of, paths_of
from mmreplay.convert.stored_priorities import StoredPriorities
from mmreplay.episodes import CUT, TRUNCATED
from mmreplay.errors import SchemaError, StaleError, shown
from mmreplay.format.metadata import Engine, Metadata
from mmreplay.format.sharding import Codec
from mmreplay.ring import Layout, Span
from mmreplay.storage.commit_state import CUT_ROWS
from mmreplay.storage.engines import ON_DISK


class BufferReader(Reader):
    """The rows of a buffer that are alive when the reader is made.

    A live writer may run on: rows that it gives up before they are read end the
    reading with StaleError.
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
            fields: Paths to read; all by default. Ends are kept by the flags.
            env_ids: int ``[N]``; all by default. Environments keep their numbers,
                those left out are empty.
            priorities: Name of a sampler's stored column that goes along.
            owned: Close it with the reader.
        """
        self.report = Notes()
        self._buffer = buffer
        self._owned = owned
        self._span = _part(buffer.span, env_ids, buffer.num_envs)
        self._cut_epoch = buffer.view.home.cut_epoch
        self._priorities = None
        if priorities is None:
            for told in left_behind(buffer.path):
                self.report.note(told)
        else:
            self._priorities = StoredPriorities(
                buffer.path, buffer.metadata, priorities, self.report
            )
        self._description = self._describe(buffer, fields, priorities or "")

    def _describe(
        self, buffer: ReplayBuffer, fields: Sequence[str] | None, priorities: str
    ) -> Description:
        metadata = buffer.metadata
        schema = metadata.schema
        if fields is not None:
            schema = part(schema, paths_of(schema.paths, fields))
        return Description(
            schema=schema,
            first=self._span.first,
            stop=self._span.stop,
            capacity=metadata.ring.capacity,
            autoreset=metadata.autoreset,
            layout=metadata.ring.layout,
            uuid=metadata.uuid.hex(),
            statistics=buffer.statistics,
            user=metadata.user,
            priorities=priorities,
        )

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        rows = rows_per_block or default_rows(self._description)
        return beside(self._parts(rows, self._description.schema.paths))

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`: flags alone are read."""
        return self._parts(BLOCK_NBYTES // 32, ())

    def narrow(self, span: Span) -> None:
        """See `Reader.narrow`."""
        self._span = span

    def _parts(self, rows: int, paths: tuple[str, ...]) -> Iterator[Block]:
        firsts, stops = self._span.first.tolist(), self._span.stop.tolist()
        for env_id, (begin, end) in enumerate(zip(firsts, stops, strict=True)):
            for first in range(begin, end, rows):
                yield self._block(env_id, first, min(first + rows, end), paths)

    def _block(
        self, env_id: int, first: int, stop: int, paths: tuple[str, ...]
    ) -> Block:
        view = self._buffer.view
        moment = view.limits_before
        if view.home.cut_epoch != self._cut_epoch:
            raise StaleError(CUT_ROWS)
        positions = np.arange(first, stop)
        env_ids = np.full(len(positions), env_id)
        try:
            view.check_alive(env_ids, positions)
            columns = dict(view.read(paths, env_ids, positions)) if paths else {}
            if self._priorities is not None and paths:
                columns[PRIORITY] = self._priorities.read(env_ids, positions)
            flags = view.flags(env_ids, positions)
            if stop == self._span.stop[env_id] < self._description.stop[env_id]:
                flags[-1] |= self._truncated(env_id, stop)
            if view.stale(env_ids, positions, moment) is not None:
                view.check_alive(env_ids, positions)
        except StaleError as error:
            raise StaleError(
                f"environment {env_id}: the writer gave up rows of [{first}, {stop}) "
                "before they were read, expected them alive; pause the writer, or "
                "export a copy"
            ) from error
        return Block(columns, env_ids, positions, flags)

    def _truncated(self, env_id: int, position: int) -> int:
        """TRUNCATED where a row that is left out is what says it of the one before."""
        flags = self._buffer.view.flags(np.array([env_id]), np.array([position]))
        return TRUNCATED if flags[0] & CUT else 0

    def close(self) -> None:
        """See `Reader.close`."""
        if self._owned:
            self._buffer.close()


def _part(span: Span, env_ids: ArrayLike | None, num_envs: int) -> Span:
    """The span with every environment that was not asked for emptied."""
    first = span.first.copy()
    if env_ids is not None:
        first = np.where(mask_of(num_envs, env_ids), first, span.stop)
    return Span(first, span.stop.copy())


def open_reader(
    path: lifecycle.StrPath,
    *,
    fields: Sequence[str] | None = None,
    env_ids: ArrayLike | None = None,
    priorities: str | None = None,
) -> BufferReader:
    """Open a buffer's folder as a source; see `BufferReader`."""
    buffer = ReplayBuffer.open(path)
    try:
        return BufferReader(
            buffer, fields=fields, env_ids=env_ids, priorities=priorities, owned=True
        )
    except BaseException:
        buffer.close()
        raise


def open_writer(
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    capacity: int | None = None,
    engine: Engine = "memmap",
    codec: Codec | None = None,
    ring_layout: Layout | None = None,
    priorities: str | None = None,
) -> BufferWriter:
    """Make a new buffer as a target.

    Args:
        target: Its folder.
        description: What will come.
        overwrite: Replace a closed buffer, or a file, that is there.
        capacity: Rows per environment; the source's by default. Of more rows the
            newest stay.
        engine: ``"memmap"``, or ``"zarr"`` for compressed shards.
        codec: Of the shards.
        ring_layout: How rows lie in its files; the source's by default.
        priorities: Name that the source's priorities are stored under; the one they
            had by default.
    """
    if priorities is not None:
        if not description.priorities:
            raise SchemaError(
                f"priorities: got {shown(priorities)} for a source that holds none, "
                "expected None; export them with priorities=, or leave it out"
            )
        description = replace(description, priorities=priorities)
    metadata = _metadata(description, capacity, engine, ring_layout, codec)
    return BufferWriter(lifecycle.absolute(target), description, metadata, overwrite)


def planned(
    description: Description,
    *,
    capacity: int | None = None,
    engine: Engine = "memmap",
    codec: Codec | None = None,
    ring_layout: Layout | None = None,
    priorities: str | None = None,
) -> int | None:
    """Bytes that the rows take on disk, unpacked ones; see `registry.planned`."""
    metadata = _metadata(description, capacity, engine, ring_layout, codec)
    if metadata.sharding is not None:
        return None
    kept = np.minimum(description.stop - description.first, metadata.ring.capacity)
    return int(kept.sum()) * description.schema.row_nbytes


def _metadata(
    description: Description,
    capacity: int | None,
    engine: Engine,
    layout: Layout | None,
    codec: Codec | None,
) -> Metadata:
    """What a new buffer of the rows is.

    Raises:
        SchemaError: A number or choice is not legal.
    """
    if engine not in ON_DISK:
        raise SchemaError(
            f"engine: got {shown(engine)}, expected one of {list(ON_DISK)}, which are "
            "on a disk; leave it out for 'memmap'"
        )
    return opening.describe(
        description.schema,
        description.capacity if capacity is None else capacity,
        description.num_envs,
        engine,
        layout or description.layout,
        description.autoreset,
        description.user,
        codec,
    )
