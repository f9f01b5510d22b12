"""Writes a new buffer from blocks of rows; it appears complete or not at all.

A new buffer begins at the source's first positions and keeps flags, autoreset and
statistics, so that a buffer that was exported and loaded again is the same to the bit,
but for images that became arrays in the file.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import format_size
from mmreplay.buffer.bulk_writer import BulkWriter
from mmreplay.buffer.opening import absolute, describe
from mmreplay.convert.base import Block, Notes, Writer
from mmreplay.convert.description import PRIORITY, Description
from mmreplay.convert.episode_ends import check_env_ids
from mmreplay.convert.staging import Staging
from mmreplay.convert.stored_priorities import PriorityWriter
from mmreplay.convert.values import ValueSizes, check_values
from mmreplay.disk.files import NETWORK, file_system
from mmreplay.episodes import ALL_FLAGS, CUT, FINAL, START, TERMINATED, TRUNCATED
from mmreplay.episodes.boundaries import alone_problem, names, pair_problem
from mmreplay.errors import SchemaError, SourceError, refuse_masked, shown, undone_by
from mmreplay.format.metadata import (
    HEAP_STEP_NBYTES,
    ON_DISK,
    Engine,
    Metadata,
    planned_heap_nbytes,
    planned_lengths,
    smallest_heap_nbytes,
)
from mmreplay.format.sharding import Codec
from mmreplay.ragged import Ragged
from mmreplay.ring import Layout, one_env
from mmreplay.storage import disk_space
from mmreplay.storage.layout import record_layout

NO_FLAGS = ALL_FLAGS + 1
"""Stands for the flags of the row before an environment's first."""


class BufferWriter(Writer):
    """Writes a new buffer; see `Writer`.

    Checks every row: its position, its flags alone and after those of the row before,
    and its end fields against its flags.
    """

    def __init__(
        self,
        target: Path,
        description: Description,
        metadata: Metadata,
        overwrite: bool,
        *,
        bounded: bool = False,
        heap_passed: bool = False,
    ) -> None:
        """Make the staged folder.

        Args:
            target: Of the buffer.
            description: Of the rows.
            metadata: Of the buffer.
            overwrite: Replace a buffer that exists.
            bounded: The heap is as large as values may be: it is cut to what they are.
            heap_passed: The user said how large the heap is.
        """
        self._bounded = bounded
        self.nbytes = 0
        self.notes = Notes()
        self._description = description
        self._metadata = metadata
        self._served = record_layout(description.schema).served
        # The oldest row of each environment that the new ring holds.
        self._oldest = np.maximum(description.first, description.stop - metadata.ring.capacity)
        self._next = description.first.copy()
        self._rows = 0
        self._last_flags = np.full(description.num_envs, NO_FLAGS, np.uint8)
        dropped = int((self._oldest - description.first).sum())
        if dropped:
            self.notes.note(
                f"the oldest {dropped:,} rows were left out: the capacity is "
                f"{metadata.ring.capacity:,} rows per environment"
            )
        if metadata.heap_nbytes and not bounded:
            source = description.heap_nbytes
            how = (
                "as in the source" if metadata.heap_nbytes == source else "planned from the values"
            )
            self._fit_values(metadata.heap_nbytes, "as passed" if heap_passed else how)
        self._drops = bool((self._oldest > description.first).any())
        self._staging = Staging(target, overwrite=overwrite, folder=True)
        self._bulk: BulkWriter | None = None
        self._priorities: PriorityWriter | None = None
        with undone_by(self.abort):
            self._refuse_network()
            if description.priorities:
                self._priorities = PriorityWriter(
                    self._staging.path, metadata, description.priorities
                )
            self._bulk = BulkWriter(self._staging.path, metadata, self._oldest, description.stop)

    def _fit_values(self, heap_nbytes: int, how: str) -> None:
        """Leave out the oldest rows whose values the heap does not hold."""
        source, values = self._description.heap_nbytes, self._description.values
        self.notes.note(
            f"heap_bytes is {format_size(heap_nbytes)} per environment, {how}: pass "
            "heap_bytes= (--heap-bytes) for another size"
        )
        if 0 < source <= heap_nbytes or self._metadata.engine == "zarr":
            # The source's heap held the values, and so does one that is not smaller.
            # Shards take the values from the heap, which so bounds no row's life.
            return
        assert values is not None
        oldest = values.fitting(self._oldest, heap_nbytes)
        dropped = int((oldest - self._oldest).sum())
        self._oldest = oldest
        if dropped:
            self.notes.note(
                f"the oldest {dropped:,} rows were left out: heap_bytes of "
                f"{heap_nbytes:,} do not hold their values"
            )

    def _refuse_network(self) -> None:
        kind = file_system(self._staging.path)
        if kind in NETWORK:
            raise SchemaError(
                f"{self._staging.target} is on a network file system ({kind}). Load to "
                "a local disk, then copy the buffer."
            )

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        if not len(block):
            return
        assert self._bulk is not None
        self._check_positions(block)
        self._check_columns(block)
        self._check_ends(block)
        self._rows += len(block)
        if self._drops:
            block = block.select(block.positions >= self._oldest[block.env_ids])
        if len(block):
            self._bulk.write(block.columns, block.env_ids, block.positions, block.flags)
            over = self._bulk.overfull()
            if len(over):
                raise SourceError(
                    f"environment {over[0]}: values must take at most "
                    f"{self._metadata.heap_nbytes} bytes, as the description of the source "
                    "says, got more. The source is damaged, or pass heap_bytes= "
                    "(--heap-bytes)."
                )
        if self._priorities is not None:
            self._priorities.write(block.env_ids, block.positions, block.columns[PRIORITY])

    def _check_positions(self, block: Block) -> None:
        """Check that each environment continues where it stopped, with legal flags.

        Raises:
            SourceError: It does not.
        """
        env_ids, description = block.env_ids, self._description
        check_env_ids(env_ids, description.num_envs)
        ids, positions, flags = env_ids, block.positions, block.flags
        begins = np.zeros(1, np.int64)
        if not one_env(ids):
            order = np.argsort(ids, kind="stable")
            ids, positions, flags = ids[order], positions[order], flags[order]
            begins = np.flatnonzero(np.diff(ids, prepend=-1))
        counts = np.diff(begins, append=len(ids))
        here = ids[begins]
        first, expected = self._next[here] - begins, np.arange(len(ids))
        # For rows of one environment a number is added: an array takes longer.
        expected += first if len(first) == 1 else np.repeat(first, counts)
        wrong = positions != expected
        if wrong.any():
            which = int(np.argmax(wrong))
            raise SourceError(
                f"environment {ids[which]}: the next position must be "
                f"{expected[which]}, got {positions[which]}. The rows of the source "
                "are damaged or out of order."
            )
        stops = self._next[here] + counts
        if (stops > description.stop[here]).any():
            which = int(here[np.argmax(stops > description.stop[here])])
            raise SourceError(
                f"environment {which}: rows must stop at position "
                f"{int(description.stop[which])}, got rows up to "
                f"{int(stops[here == which][0])}. The source is damaged."
            )
        before = np.concatenate([flags[:1], flags[:-1]])
        before[begins] = self._last_flags[here]
        self._check_flags(ids, positions, before, flags)
        self._next[here] = stops
        self._last_flags[here] = flags[begins + counts - 1]

    def _check_flags(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        before: NDArray[np.uint8],
        flags: NDArray[np.uint8],
    ) -> None:
        final_follows = self._metadata.autoreset == "next_step"
        legal = legal_flags(final_follows)
        # Most rows have no flags, and neither have the rows before them: a legal pair.
        flagged = np.flatnonzero((before | flags) != 0)
        here = flags[flagged]
        good = legal[np.minimum(before[flagged], NO_FLAGS), here]
        good &= (positions[flagged] != 0) | ((here & START) != 0)
        if good.all():
            return
        which = int(flagged[np.argmin(good)])
        got, earlier = int(flags[which]), int(before[which])
        after = "" if earlier == NO_FLAGS else f" after {names(earlier)}"
        rule = alone_problem(got)
        if not rule and earlier != NO_FLAGS:
            rule = pair_problem(earlier, got, final_follows)
        rule = rule or "the first row of an environment must have START"
        raise SourceError(
            f"environment {ids[which]}, position {positions[which]}: {rule}, got "
            f"{names(got)}{after}. The source is damaged or was edited."
        )

    def _check_columns(self, block: Block) -> None:
        """Check that each column has its field's shape and dtype.

        Raises:
            SourceError: One is missing or differs.
        """
        fields = self._description.schema.fields
        for path in fields:
            column = block.columns.get(path)
            refuse_masked(column, f"field {path!r}")
            want = (len(block), *fields[path].shape)
            if fields[path].varies:
                self._check_values(path, block)
            elif column is None or column.dtype != fields[path].numpy or (column.shape != want):
                got = "nothing" if column is None else f"{column.dtype}{column.shape}"
                raise SourceError(
                    f"field {path!r} must be {fields[path].numpy}{want}, got {got}. "
                    "The source differs from its description."
                )

    def _check_values(self, path: str, block: Block) -> None:
        """Check the values of a field that varies.

        Raises:
            SourceError: They are no values of the field.
        """
        field = self._description.schema.fields[path]
        # A reader of another package may give anything.
        values: object = block.columns.get(path)
        if (
            not isinstance(values, Ragged)
            or values.shape != (len(block),)
            or values.dtype != field.numpy
            or values.inner != field.inner
        ):
            got = getattr(values, "form", type(values).__name__)
            got = "nothing" if values is None else got
            raise SourceError(
                f"field {path!r} must be {field.description}, one for each of "
                f"{len(block)} rows, got {got}. The source differs from its "
                "description."
            )
        rising = values.offsets[0] == 0 and values.offsets[-1] == len(values.values)
        if not rising or (np.diff(values.offsets) < 0).any():
            raise SourceError(
                f"field {path!r}: offsets must rise from 0 to {len(values.values)}, "
                "the number of items. The reader of the source is wrong."
            )
        check_values(values, field, f"field {path!r}", self._rows)

    def _check_ends(self, block: Block) -> None:
        """Refuse end fields that contradict the flags, which decide.

        Raises:
            SourceError: They were edited without the flags.
        """
        for path, role in self._served.items():
            bit = TERMINATED if role == "terminated" else TRUNCATED
            column = block.columns[path].astype(bool)
            flagged = (block.flags & bit) != 0
            bad = flagged & ~column
            extra = column & ~flagged
            if role == "truncated":
                # A row that says CUT reports the step before it as truncated.
                alike = block.env_ids[1:] == block.env_ids[:-1]
                extra[:-1] &= alike & ((block.flags[1:] & CUT) == 0)
                extra[-1] = False
            bad |= extra & ((block.flags & FINAL) == 0)
            if bad.any():
                which = int(np.argmax(bad))
                raise SourceError(
                    f"field {path!r}, environment {block.env_ids[which]}, position "
                    f"{block.positions[which]} must be {bool(flagged[which])} as the "
                    f"flags say, got {bool(column[which])}. Change '_flags' as well, "
                    "or remove the description so that episode ends are detected again."
                )

    def finish(self) -> None:
        """See `Writer.finish`."""
        stop = self._description.stop
        if (self._next != stop).any():
            which = int(np.argmax(self._next != stop))
            raise SourceError(
                f"environment {which}: rows must reach position {stop[which]}, got "
                f"rows up to {self._next[which]}. The source is truncated."
            )
        assert self._bulk is not None
        bulk = self._bulk
        if self._bounded and (heap_nbytes := bulk.fit_heap()) is not None:
            self.notes.note(
                f"heap_bytes is {format_size(heap_nbytes)} per environment, by what was stored: "
                "pass heap_bytes= (--heap-bytes) for another size"
            )
        bulk.finish()
        if self._priorities is not None:
            # A closed column covers durable rows only, which these are by now.
            self._priorities.finish()
        bulk.publish(self._description.statistics)
        self._close()
        self.nbytes = self._staging.publish()
        bulk.warm(self._staging.target)

    def _close(self) -> None:
        if self._bulk is not None:
            bulk, self._bulk = self._bulk, None
            bulk.close()
        if self._priorities is not None:
            column, self._priorities = self._priorities, None
            column.close()

    def abort(self) -> None:
        """See `Writer.abort`."""
        self._close()
        self._staging.abort()


@cache
def legal_flags(final_follows: bool) -> NDArray[np.bool_]:
    """Return which flags may follow which, bool ``[65, 256]``.

    Args:
        final_follows: The autoreset is ``"next_step"``.

    Returns:
        By the flags of the row before (`NO_FLAGS` if there is none) and the row's own.
    """
    alone = np.array([not alone_problem(flags) for flags in range(256)])
    legal = np.zeros((NO_FLAGS + 1, 256), bool)
    legal[NO_FLAGS] = alone
    for before in range(NO_FLAGS):
        if alone[before]:
            fits = [not pair_problem(before, f, final_follows) for f in range(NO_FLAGS)]
            legal[before, :NO_FLAGS] = alone[:NO_FLAGS] & fits
    return legal


def open_writer(
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    capacity: int | None = None,
    engine: Engine | None = None,
    codec: Codec | None = None,
    ring_layout: Layout | None = None,
    priorities: str | None = None,
    heap_bytes: int | str | None = None,
) -> BufferWriter:
    """Make a new buffer as a target.

    Args:
        target: Its folder.
        description: Of the rows.
        overwrite: Replace a closed buffer, or a file, that exists.
        capacity: Rows per environment; the source's by default. Of more rows the
            newest stay.
        engine: ``"memmap"``, or ``"zarr"`` for compressed shards; by default the
            description's, or ``"memmap"``.
        codec: Of the shards.
        ring_layout: How rows lie in its files; the source's by default.
        priorities: Name to store the source's priorities under; their old one by
            default.
        heap_bytes: Bytes for the values that vary, of each environment, such as
            ``"1 GiB"``. By default those of the source; of others enough for these
            values and for as many more as the capacity has rows. Shards hold the
            values of all rows however few these are.
    """
    if priorities is not None:
        if not description.priorities:
            raise SchemaError(
                "priorities must be None for a source without priorities, got "
                f"{shown(priorities)}. Export the source with priorities=, or leave it "
                "out."
            )
        description = replace(description, priorities=priorities)
    metadata = _metadata(description, capacity, engine, ring_layout, codec, heap_bytes)
    bounded = heap_bytes is None and bounds_of(description) is not None
    if metadata.heap_nbytes and not bounded:
        disk_space.refuse_larger_heap(absolute(target), metadata)
    return BufferWriter(
        absolute(target),
        description,
        metadata,
        overwrite,
        bounded=bounded,
        heap_passed=heap_bytes is not None,
    )


def bounds_of(description: Description) -> ValueSizes | None:
    """Upper bounds of the values' sizes, where these are known when they are made."""
    return None if description.values is None else description.values.at_most


def planned(
    description: Description,
    *,
    capacity: int | None = None,
    engine: Engine | None = None,
    codec: Codec | None = None,
    ring_layout: Layout | None = None,
    priorities: str | None = None,
    heap_bytes: int | str | None = None,
) -> int | None:
    """Bytes that uncompressed rows take on disk; see `registry.planned`."""
    metadata = _metadata(description, capacity, engine, ring_layout, codec, heap_bytes)
    if metadata.sharding is not None:
        return None
    rows = np.minimum(description.stop - description.first, metadata.ring.capacity)
    nbytes = int(rows.sum()) * description.schema.row_nbytes
    if bounds_of(description) is not None:
        # Images are smaller than their bounds: so much is planned for each.
        return nbytes + round(sum(planned_lengths(description.schema).values()) * int(rows.sum()))
    if description.values is not None:
        in_heaps = np.minimum(description.values.heap_nbytes, metadata.heap_nbytes)
        nbytes += int(in_heaps.sum())
    return nbytes


def _metadata(
    description: Description,
    capacity: int | None,
    engine: Engine | None,
    layout: Layout | None,
    codec: Codec | None,
    heap_bytes: int | str | None,
) -> Metadata:
    """Metadata of a new buffer of the rows.

    Raises:
        SchemaError: A number or choice is not legal.
    """
    if engine is None:
        engine = description.engine or "memmap"
    if engine not in ON_DISK:
        raise SchemaError(
            f"engine must be one of {list(ON_DISK)}, got {shown(engine)}. Leave it out "
            "for 'memmap'."
        )
    if heap_bytes is None and description.schema.varying:
        if (bounds := bounds_of(description)) is not None:
            description = replace(description, heap_nbytes=0, values=bounds)
        heap_bytes = _heap_nbytes(description, capacity)
    if layout is None and not (engine == "zarr" and description.schema.varying):
        # Shards of values that vary have a layout of their own.
        layout = description.layout
    return describe(
        description.schema,
        description.capacity if capacity is None else capacity,
        description.num_envs,
        engine,
        layout,
        description.autoreset,
        description.user,
        codec,
        heap_bytes=heap_bytes,
    )


def _heap_nbytes(description: Description, capacity: int | None) -> int:
    """Bytes of each environment's heap in a new buffer of the rows.

    Those of the source's ring; for another capacity, or a source without a heap, those
    that hold these values and a capacity of average ones.
    """
    if capacity is None and description.heap_nbytes:
        return description.heap_nbytes
    schema, values = description.schema, description.values
    if values is None:
        return smallest_heap_nbytes(schema)
    rows = description.capacity if capacity is None else capacity
    planned = planned_heap_nbytes(schema, max(1, rows), values.mean_lengths)
    # The rows of one environment may have longer values than the average. A writer that
    # goes on keeps a reserve free, a sixteenth of the heap or the longest row.
    oldest = np.maximum(description.first, description.stop - rows)
    held = int(values.heap_nbytes_from(oldest).max())
    nbytes = max(planned, -(-16 * held // 15), held + schema.max_heap_nbytes)
    return -(-nbytes // HEAP_STEP_NBYTES) * HEAP_STEP_NBYTES
