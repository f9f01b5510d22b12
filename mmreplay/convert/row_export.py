"""Writes rows of a ring to files, in the background, before they are overwritten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import integer
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert import registry
from mmreplay.convert.base import Reader, Report, Writer
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.description import Description
from mmreplay.convert.mapped import Changes, change
from mmreplay.convert.ranges import RangesReader, RowRanges
from mmreplay.convert.registry import Format
from mmreplay.convert.transfer import transfer
from mmreplay.process import thread_pool
from mmreplay.ring import Span

Array = NDArray[np.int64]


class RowExport:
    """Writes rows of an open buffer to files; see `AutoExport`."""

    def __init__(
        self,
        buffer: ReplayBuffer,
        folder: Path,
        file_format: Format,
        *,
        fields: Sequence[str] | None,
        every: int | None,
        **options: object,
    ) -> None:
        """Hold the rows of a buffer.

        Args:
            buffer: Open for writing.
            folder: Of the files.
            file_format: Their format.
            fields: As `AutoExport` has them, like `every`.
            every: Rows of a file.
            **options: The format's.
        """
        self.reports: list[tuple[Path, Report]] = []
        self._buffer, self._folder, self._format = buffer, folder, file_format
        self._fields, self._options = fields, options
        capacity = buffer.capacity
        way_out = "It is at most the capacity; leave it out for one file per lap."
        self._every = (
            None if every is None else integer("every", every, 1, way_out, maximum=capacity)
        )
        self._ending = (*self._format.suffixes, "")[0]
        # A target that is begun and aborted raises the errors of all later ones.
        with self._open_writer(self._folder / f"probe{self._ending}")(
            replace(self._describe(), first=buffer.span.stop)
        ):
            pass
        self._changed = threading.Condition()
        self._pool = thread_pool(1, "mmreplay-auto-export")
        self._job: Future[None] | None = None
        self._asked: Span | None = None
        self._begun = buffer.span.first.copy()
        self._exported = self._begun.copy()
        buffer.hold_rows(self._before_overwrite)

    def _describe(self) -> Description:
        return self._for_format(BufferReader(self._buffer, fields=self._fields)).describe()

    def _for_format(self, reader: Reader) -> Reader:
        """The same rows as the format takes them: see `Format.images`."""
        arrays = not self._format.takes_images(self._options)
        return change(reader, Changes(), arrays=arrays)

    def _open_writer(self, target: Path) -> Callable[[Description], Writer]:
        def open_writer(description: Description) -> Writer:
            return registry.open_writer(
                self._format, target, description, overwrite=False, **self._options
            )

        return open_writer

    def _before_overwrite(self, heads: Array, tails: Array, needed: Array, target: Array) -> Array:
        """Delay the overwriting of rows that are not exported; see `hold_rows`."""
        ring = self._buffer.metadata.ring
        every = min(self._every or ring.capacity, ring.capacity)
        with self._changed:
            self._skip_dropped(tails)
            # Beyond a reserve above the heads no row's slot is needed, but the bytes of
            # old rows' values: those end whatever the number of rows. Of a compressed
            # buffer whole shards are needed, and no row ends for the bytes.
            for_values = needed > heads + ring.reserve
            for_values &= self._buffer.metadata.sharding is None
            due = (needed > self._begun + every) & ~for_values
            due |= needed > self._begun + ring.capacity
            if due.any():
                self._wait()
                self._skip_dropped(tails)
                self._begin(heads)
            full = self._exported + ring.capacity
            while self._job is not None and (needed > full).any():
                if not self._job.done():
                    self._changed.wait()
                self._settle()
                full = self._exported + ring.capacity
            edge = np.where(for_values, full, np.minimum(self._begun + every, full))
            return np.maximum(needed, np.minimum(target, edge))

    def _skip_dropped(self, tails: Array) -> None:
        """Skip rows that the user dropped."""
        self._settle()
        if self._job is None:
            self._begun = np.maximum(self._begun, tails)
            self._exported = self._begun.copy()

    def _begin(self, heads: Array) -> None:
        """Start to export the rows since the last file, up to heads."""
        span = Span(self._begun, heads.copy())
        if (span.lengths > 0).any():
            # Without a job the rows would be requested again, rather than lost.
            self._asked = span
            self._job = self._pool.submit(self._run, span)
            self._begun = span.stop
            self._job.add_done_callback(self._notify)

    def _notify(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def _settle(self) -> None:
        """Note the result of a finished export, and raise its error.

        After an error its rows are exported again.
        """
        if self._job is None or not self._job.done():
            return
        job, self._job = self._job, None
        if job.exception() is None:
            self._exported = self._begun.copy()
        else:
            self._begun = self._exported.copy()
        job.result()

    def _wait(self) -> None:
        while self._job is not None:
            if not self._job.done():
                self._changed.wait()
            self._settle()

    def _run(self, span: Span) -> None:
        if span is not self._asked:
            # An old job: a pool that got no thread raises, but keeps the job.
            return
        stamp = datetime.now().strftime("%y-%m-%d_%H-%M-%S-%f")
        name = f"{stamp}_memory_{self._buffer.metadata.uuid.hex()[:8]}{self._ending}"
        path = self._folder / name
        rows = BufferReader(self._buffer, fields=self._fields)
        rows.narrow(span)
        chosen = RangesReader(rows, RowRanges.of_span(span), span.stop)
        report = transfer(self._for_format(chosen), self._open_writer(path))
        self.reports.append((path, report))

    def flush(self) -> None:
        """See `AutoExport.flush`."""
        with self._changed:
            self._skip_dropped(self._buffer.tails)
            self._wait()
            self._begin(self._buffer.heads)
            self._wait()

    def close(self) -> None:
        """See `AutoExport.close`."""
        if not self._buffer.closed:
            self._buffer.hold_rows(None)
        with self._changed:
            self._wait()
        self._pool.shutdown()
