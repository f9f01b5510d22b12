"""Puts the values of fields that vary into the heap, before the rows that name them.

Until they are stored, a column of such a field holds a *span* for each row: a reference
whose position is that of the value's first byte among the bytes that were given. So it
is ordered and cut as any other column. Right before the rows are written, values go to
the heap and spans become the references that rows store.

The order keeps a kill harmless: values, then rows, then heads and heap heads by one
publication. What was written and not published is overwritten by the next row.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.checksums import crc32c
from mmreplay.episodes import FINAL
from mmreplay.errors import FullError
from mmreplay.format.heap import MAX_HEAD, References, aligned, checksums, lay_out, nbytes_of
from mmreplay.format.metadata import heap_reserve_nbytes
from mmreplay.nesting import SEPARATOR
from mmreplay.ragged import Ragged
from mmreplay.schema import Schema
from mmreplay.schema.field import HEAP_ALIGNMENT, REFERENCE, Field
from mmreplay.schema.varying import ValueList
from mmreplay.storage.commit_state import MemoryCommitState, WritableCommitState, heap_bounds
from mmreplay.storage.committer import Committer
from mmreplay.storage.heap import SCANNED_ROWS, HeapSpace
from mmreplay.storage.store import Columns, Store

if TYPE_CHECKING:
    from mmreplay.buffer.reader import GenerationReader
    from mmreplay.kernels.rows import RowsKernel

_copies = kernels.load("copies")
_rows = cast("RowsKernel", kernels.load("rows"))

_REFERENCE = struct.Struct("<qII")
EMPTY = bytes(REFERENCE.itemsize)
"""The reference of a value without items."""
CHUNK_STEP_NBYTES, MAX_CHUNK_NBYTES = 256 << 10, 16 << 20
"""Memory for values that are put together is taken in multiples of the former, and
given back after a block that needs more than the latter."""
STAGE_NBYTES = 1 << 20
"""Values of a block are put together and written so many bytes at a time, at most, or
those of one step."""
Array = NDArray[np.int64]
Bytes = Mapping[str, NDArray[np.uint8]]
"""Per path the bytes of the values that its spans name."""
BeforeOverwrite = Callable[[Array, Array, Array, Array], Array]
"""See `ReplayBuffer.hold_rows`."""


@dataclass(frozen=True, slots=True, eq=False)
class ValueBlock:
    """Values of T steps of all environments, to be stored with their rows.

    Attributes:
        sources: Of each field its values, or the bytes of all; see
            `kernels.blocks.pack_values`, as the next three.
        offsets: Of each int64 ``[T * E + 1]``, the items before each value, and of all.
        addresses: Of each int64 ``[T * E]``; None of bytes.
        references: Of each `REFERENCE` ``[T, E]``, or ``[E]`` of one step, written when
            values are stored.
        nbytes: At least as many as they take in a heap.
    """

    sources: tuple[tuple[Any, ...] | NDArray[np.uint8], ...]
    offsets: tuple[Array, ...]
    addresses: tuple[Array | None, ...]
    references: tuple[References, ...]
    nbytes: int


class ValueWriter:
    """Writes values of one open buffer, for its appender."""

    def __init__(
        self,
        store: Store,
        space: HeapSpace,
        commit: WritableCommitState,
        committer: Committer | None,
    ) -> None:
        """Continue after the values that are published.

        Args:
            store: The rows, with a heap.
            space: Of that heap.
            commit: Publishes rows.
            committer: Makes tails durable before values are overwritten; None in RAM.
        """
        assert store.heap is not None
        self._heap, self._space = store.heap, space
        self._commit, self._committer = commit, committer
        self._fields = {path: store.schema.fields[path] for path in store.schema.varying}
        self._observed = frozenset(store.schema.role_paths("observation"))
        self._before_overwrite: BeforeOverwrite | None = None
        # Looked up once: it is asked at each step.
        self._window = self._heap.window
        self._capacity = store.ring.capacity
        self._free_until = 0
        self._chunk = np.zeros(0, np.uint8)
        self._item_nbytes = np.array(
            [field.inner_nbytes for field in self._fields.values()], np.int64
        )
        # Stretches of a block that go to one stretch of a heap: two where it begins
        # again.
        self._segments = np.empty((2 * store.ring.num_envs, 4), np.int64)
        # Of one step of the only environment.
        self._plain = [PlainValue(p, field) for p, field in self._fields.items()]
        self._reference_bytes = [bytearray(EMPTY) for _ in self._fields]
        self._references = [np.frombuffer(b, REFERENCE) for b in self._reference_bytes]
        fields = [plain.arguments for plain in self._plain]
        looks = [plain.look for plain in self._plain]
        self._mapped = list(
            zip(fields, looks, self._references, self._reference_bytes, strict=True)
        )
        # Heap heads at which the committer is woken next.
        self._wake_at = np.zeros(store.ring.num_envs, np.int64)

    @property
    def heap_heads(self) -> Array:
        """int64 ``[E]``, published."""
        heap_heads = self._commit.heap_heads
        assert heap_heads is not None
        return heap_heads

    def ask_before(self, callback: BeforeOverwrite | None) -> None:
        """Ask before rows end for their values; see `ReplayBuffer.hold_rows`."""
        if not self._space.ends_rows:
            return
        self._before_overwrite = callback
        if self._committer is not None:
            # The thread raises tails ahead only over rows that the callback let go.
            held = None if callback is None else self._commit.tails
            self._committer.highest_tails = held

    def spans(self, columns: Columns) -> tuple[Columns, Bytes]:
        """Replace the values of columns by spans.

        Args:
            columns: Per path an array; of fields that vary `Ragged` or `ValueList`.

        Returns:
            The columns, with `REFERENCE` arrays of the same leading shape, and the
            bytes of their values.
        """
        named: dict[str, NDArray[np.generic]] = dict(columns)
        data = {}
        for path, field in self._fields.items():
            values: Ragged | ValueList | None = named.get(path)  # type: ignore[assignment]  # of fields that vary
            if values is None:
                continue
            if isinstance(values, ValueList):
                values = values.joined(field)
            items = np.ascontiguousarray(values.values)
            data[path] = items.reshape(-1).view(np.uint8)
            spans = np.zeros(len(values.offsets) - 1, REFERENCE)
            spans["position"] = values.offsets[:-1] * field.inner_nbytes
            spans["length"] = np.diff(values.offsets)
            named[path] = spans.reshape(values.shape)
        return named, data

    def block(self, columns: Columns) -> tuple[Columns, ValueBlock]:
        """Take the values of steps of all environments out of their columns.

        Args:
            columns: Per path ``[T, E, ...]``, or ``[E, ...]`` of one step; of fields
                that vary `Ragged` or `ValueList`.

        Returns:
            The columns, with references that `store_block` writes, and the values.
        """
        named: dict[str, NDArray[np.generic]] = dict(columns)
        sources: list[tuple[Any, ...] | NDArray[np.uint8]] = []
        addresses: list[Array | None] = []
        offsets, references, nbytes = [], [], 0
        for path, item in zip(self._fields, self._item_nbytes.tolist(), strict=True):
            values: Any = columns[path]
            if isinstance(values, ValueList):
                sources.append(values.values)
                addresses.append(values.addresses)
            else:
                items = np.ascontiguousarray(values.values)
                sources.append(items.reshape(-1).view(np.uint8))
                addresses.append(None)
            offsets.append(np.ascontiguousarray(values.offsets))
            references.append(np.empty(values.shape, REFERENCE))
            named[path] = references[-1]
            count = len(offsets[-1]) - 1
            nbytes += int(offsets[-1][-1]) * item + HEAP_ALIGNMENT * count
        return named, ValueBlock(
            tuple(sources), tuple(offsets), tuple(addresses), tuple(references), nbytes
        )

    def store_block(self, block: ValueBlock, first: int, stop: int) -> tuple[int, Array]:
        """Write the values of some steps, as many as fit; one at least.

        Where not even one fits, the oldest rows end first, which frees their values.

        Args:
            block: Their values.
            first: The first step.
            stop: The one after the last.

        Returns:
            The number of steps stored by now, counted from the block's first, and int64
            ``[E]``, the heap heads to publish with the rows.
        """
        heap, num_envs = self._heap, len(self._segments) // 2
        heads, done = self.heap_heads, first
        _refuse_overflow(heads)
        chunk = self._chunk_of(min(block.nbytes, STAGE_NBYTES))
        while done < stop:
            # One pass over the values lays them out, copies and sums them: 256 of 2.6
            # KB take 35 us, and to write them 45 (tools/bench/bench_ragged.py).
            after = np.empty(num_envs, np.int64)
            steps, count = _rows.pack_values(
                block.sources,
                block.offsets,
                block.references,
                block.addresses,
                self._item_nbytes,
                num_envs,
                done,
                stop,
                heads,
                self._space.free_until,
                heap.nbytes,
                chunk,
                after,
                self._segments,
            )
            if steps < 0:
                chunk = self._chunk_of(-steps)
            elif not steps and done > first:
                break
            elif not steps:
                self._give_up(after)
                assert (after <= self._space.free_until).all(), "the longest row fits"
            else:
                for env_id, begin, end, position in self._segments[:count].tolist():
                    heap.write(env_id, position, chunk[begin:end].data)
                heads, done = after, done + steps
        if len(self._chunk) > MAX_CHUNK_NBYTES:
            self._chunk = np.zeros(0, np.uint8)
        return done, heads

    def store_step(self, columns: Columns) -> tuple[Columns, Array] | None:
        """Write the values of one step of the only environment, if they fit.

        The same as `block` and `store_block` without an array for each number: a step
        of one value takes 3 us less.

        Args:
            columns: Per path an array, or `Ragged` of one value.

        Returns:
            As `store`; None where tails must be raised first.
        """
        values = []
        for path in self._fields:
            items: NDArray[np.generic] = columns[path].values  # type: ignore[attr-defined]  # of fields that vary
            values.append((len(items), items.reshape(-1).view(np.uint8).data))
        heap_heads = self._put_step(values)
        if heap_heads is None:
            return None
        references = zip(self._fields, self._references, strict=True)
        return {**columns, **dict(references)}, heap_heads

    def store_mapped(self, data: Mapping[str, object]) -> tuple[dict[str, object], Array] | None:
        """Store the values of one step as `store_plain` does, into ready pages.

        Each by one call of C, from a mapping of whole paths.
        """
        if data.__class__ is not dict:
            return None
        window = self._window()
        head, size, stored = int(self.heap_heads[0]), self._heap.nbytes, dict(data)
        if window is None or head > MAX_HEAD:
            return None
        mapping, near, far = window
        for plain, look, reference, into in self._mapped:
            path, array, dtype, inner, maximum, kind = plain
            if path not in stored or (look is not None and not look(stored[path])):
                return None
            head = _rows.store_value(
                stored[path],
                array,
                dtype,
                inner,
                maximum,
                kind,
                head,
                size,
                self._free_until,
                mapping,
                near,
                far,
                into,
            )
            if head < 0:
                return None
            stored[path] = reference
        return stored, np.array([head])

    def store_plain(self, data: Mapping[str, object]) -> tuple[dict[str, object], Array] | None:
        """Write the values of one step of the only environment as they were given.

        Args:
            data: A nested or flat mapping of values, not validated yet.

        Returns:
            The mapping with references in place of values, which hold until the next
            call, and the heap heads after them; None where a value needs a look or a
            conversion, or tails must be raised first.
        """
        if data.__class__ is not dict:
            return None
        stored, values = dict(data), []
        for plain, reference in zip(self._plain, self._references, strict=True):
            found = plain.take(stored, reference)
            if found is None:
                return None
            values.append(found)
        heap_heads = self._put_step(values)
        return None if heap_heads is None else (stored, heap_heads)

    def _put_step(self, values: list[tuple[int, memoryview]]) -> Array | None:
        """Write the values of one step of the only environment, if they fit.

        Args:
            values: Of each field that varies its items and its bytes.

        Returns:
            int64 ``[1]``, the heap head after them, with `_references` set; None where
            tails must be raised first.
        """
        heap, heap_head = self._heap, int(self.heap_heads[0])
        size, written = heap.nbytes, []
        for (length, data), into in zip(values, self._reference_bytes, strict=True):
            nbytes = len(data)
            if not nbytes:
                into[:] = EMPTY
                continue
            if heap_head % size + nbytes > size:
                heap_head += -heap_head % size
            written.append((heap_head, data))
            _REFERENCE.pack_into(into, 0, heap_head, length, crc32c(data))
            heap_head += nbytes + -nbytes % HEAP_ALIGNMENT
        if heap_head > self._free_until:
            # What was allowed once stays so: tails never fall.
            self._free_until = int(self._space.free_until[0])
            if heap_head > self._free_until:
                return None
        for position, data in written:
            heap.write(0, position, data)
        return np.array([heap_head])

    def without_values(self, columns: Columns, flags: NDArray[np.uint8]) -> Columns:
        """Leave out values that have no meaning: of final rows all but observations.

        Args:
            columns: Per path ``[N, ...]``, with spans.
            flags: uint8 ``[N]``.
        """
        final = (flags & FINAL) != 0
        if not final.any():
            return columns
        left = dict(columns)
        for path in self._fields.keys() - self._observed:
            spans: References = left[path].copy()  # type: ignore[assignment]  # made by `spans`
            spans[final] = np.zeros((), REFERENCE)
            left[path] = spans
        return left

    def behind(self, spans: Columns, more: Bytes, data: Bytes) -> tuple[Columns, Bytes]:
        """Put the values of some columns behind those of others.

        Args:
            spans: The columns.
            more: Per path the bytes that they name.
            data: Per path the bytes that the others name.

        Returns:
            The columns, whose spans name bytes behind those, and all bytes.
        """
        moved, joined = dict(spans), dict(data)
        for path, added in more.items():
            column: References = spans[path].copy()  # type: ignore[assignment]  # likewise
            column["position"] += len(data[path])
            moved[path] = column
            joined[path] = np.concatenate([data[path], added])
        return moved, joined

    def count_fitting(self, env_ids: Array, steps: Array, columns: Columns) -> int:
        """Count the steps whose values fit into the heap now; one at least.

        Where not even one fits, the oldest rows end first, which frees their values.

        Args:
            env_ids: int64 ``[N]``, each row's environment, equal ones together.
            steps: int64 ``[N]``, each row's step, rising in each environment.
            columns: Spans ``[N]`` in the order of the rows.

        Returns:
            Steps, at most one more than the highest of `steps`.
        """
        stops = self._lay_out(env_ids, columns)[1]
        misfits = stops > self._space.free_until[env_ids]
        if not misfits.any():
            return int(steps.max()) + 1
        fitting = int(steps[misfits].min())
        if fitting:
            return fitting
        first = steps == 0
        needed = self.heap_heads.copy()
        np.maximum.at(needed, env_ids[first], stops[first])
        self._give_up(needed)
        misfits = stops > self._space.free_until[env_ids]
        fitting = int(steps[misfits].min()) if misfits.any() else int(steps.max()) + 1
        assert fitting, "a raise lets the longest row in"
        return fitting

    def _give_up(self, needed: Array) -> None:
        """Discard the oldest rows, so that the heap may be written so far.

        Raises:
            FullError: No heap may.
        """
        _refuse_overflow(needed)
        commit, space = self._commit, self._space
        # All environments up to their full reserve: each raise waits for the disk.
        wanted = np.maximum(needed, self.heap_heads) + space.reserve
        highest = None
        if self._before_overwrite is not None:
            highest = self._held_tails(self._before_overwrite, needed, wanted)
        committer = self._committer
        space.await_shards(needed, None if committer is None else committer.commit)
        if committer is not None:
            committer.highest_tails = highest
            tails, heap_tails = committer.durable_heap_tails(needed, wanted)
        else:
            tails, heap_tails = space.raised(wanted, commit.limits, highest)
        _, published = heap_bounds(commit)
        # Durable first, then published, then the first byte is overwritten: readers,
        # and an opening after a kill, see the published tails.
        commit.publish(
            commit.heads,
            commit.limits,
            np.maximum(tails, commit.tails),
            None,
            np.maximum(heap_tails, published),
        )

    def _held_tails(self, before_overwrite: BeforeOverwrite, needed: Array, wanted: Array) -> Array:
        """Ask how far tails may rise; it may wait until rows are let go.

        Args:
            before_overwrite: Asked in terms of limits: a row leaves a ring where the
                limit passes it by more than the capacity.
            needed: int64 ``[E]``, heap heads that must be reached.
            wanted: int64 ``[E]``, those that are to be reached.

        Returns:
            int64 ``[E]``, at least the tails that let the heap be written as needed.
        """
        commit, capacity = self._commit, self._capacity
        limits = commit.limits
        if self._committer is not None:
            limits = self._committer.limits
        lowest = self._space.raised(needed, limits)[0]
        target = self._space.raised(wanted, limits)[0]
        allowed = before_overwrite(commit.heads, commit.tails, lowest + capacity, target + capacity)
        return np.maximum(lowest, allowed - capacity)

    def _lay_out(self, env_ids: Array, columns: Columns) -> tuple[Array, Array]:
        """Where values of rows go.

        Returns:
            int64 ``[N, F]``, the heap position of each value of F fields, and int64
            ``[N]``, the heap head after each row.
        """
        nbytes = self._nbytes(columns)
        starts = np.empty_like(nbytes)
        stops = np.empty(len(env_ids), np.int64)
        for env_id, rows in _by_env(env_ids):
            laid_out = lay_out(
                int(self.heap_heads[env_id]), nbytes[rows].reshape(-1), self._heap.nbytes
            )
            starts[rows] = laid_out[0].reshape(-1, nbytes.shape[1])
            stops[rows] = laid_out[1].reshape(-1, nbytes.shape[1])[:, -1]
        return starts, stops

    def _nbytes(self, columns: Columns) -> Array:
        """Bytes of the values of rows, int64 ``[N, F]``."""
        sizes = []
        for path, field in self._fields.items():
            spans: References = columns[path]  # type: ignore[assignment]  # made by `spans`
            sizes.append(nbytes_of(spans, field))
        return np.stack(sizes, axis=1)

    def store(self, env_ids: Array, columns: Columns, data: Bytes) -> tuple[Columns, Array]:
        """Write the values of rows that fit.

        Args:
            env_ids: int64 ``[N]``, each row's environment, equal ones together and in
                the order of their positions.
            columns: Per path ``[N, ...]``, with spans.
            data: The bytes that spans name.

        Returns:
            The columns with references, and int64 ``[E]``, the heap heads to publish
            with the rows.
        """
        starts, stops = self._lay_out(env_ids, columns)
        nbytes = self._nbytes(columns)
        heap_heads = self.heap_heads.copy()
        stored: dict[str, NDArray[np.generic]] = dict(columns)
        sources = []
        for number, path in enumerate(self._fields):
            spans: References = columns[path]  # type: ignore[assignment]  # made by `spans`
            begins = spans["position"].astype(np.int64)
            sources.append((data[path], begins))
            references = np.zeros(len(spans), REFERENCE)
            there = spans["length"] > 0
            references["length"] = spans["length"]
            references["position"][there] = starts[there, number]
            references["crc"] = checksums(data[path], begins, nbytes[:, number])
            stored[path] = references
        for env_id, rows in _by_env(env_ids):
            heap_heads[env_id] = stops[rows][-1]
            self._write(env_id, rows, starts, nbytes, sources)
        return stored, heap_heads

    def _write(
        self,
        env_id: int,
        rows: slice,
        starts: Array,
        nbytes: Array,
        sources: list[tuple[NDArray[np.uint8], Array]],
    ) -> None:
        """Write one environment's values, those up to the ring's end at once."""
        size = self._heap.nbytes
        there = nbytes[rows] > 0
        if not there.any():
            return
        laps = starts[rows] // size
        for lap in np.unique(laps[there]).tolist():
            chosen = there & (laps == lap)
            base = int(starts[rows][chosen].min())
            end = int((starts[rows] + nbytes[rows])[chosen].max())
            chunk = self._chunk_of(end - base)
            # What lies between values is zeros: at most the end of their last words.
            lasts = (starts[rows] + nbytes[rows])[chosen] - 1 - base
            self._chunk.view(np.uint64)[lasts // HEAP_ALIGNMENT] = 0
            for number, (source, begins) in enumerate(sources):
                which = chosen[:, number]
                if which.any():
                    _copies.copy_spans(
                        source,
                        begins[rows][which],
                        nbytes[rows][which, number],
                        chunk,
                        starts[rows][which, number] - base,
                        False,
                    )
            self._heap.write(env_id, base, chunk.data)
        if len(self._chunk) > MAX_CHUNK_NBYTES:
            self._chunk = np.zeros(0, np.uint8)

    def _chunk_of(self, nbytes: int) -> NDArray[np.uint8]:
        """Return the first bytes of `_chunk`, in which values are put together."""
        if len(self._chunk) < nbytes:
            # In steps, so that blocks of about the same size take new memory once.
            self._chunk = np.zeros(-(-nbytes // CHUNK_STEP_NBYTES) * CHUNK_STEP_NBYTES, np.uint8)
        return self._chunk[:nbytes]

    def wake(self) -> None:
        """Have tails raised, or a commit made, before an add must wait for it."""
        if self._committer is None:
            return
        heap_heads = self.heap_heads
        if len(heap_heads) == 1 and heap_heads[0] < self._wake_at[0]:
            return
        if (heap_heads < self._wake_at).all():
            return
        # At most twice in a reserve: the committer may be waiting for the disk.
        self._wake_at = heap_heads + self._space.reserve // 2
        if self._space.raise_due or self._space.commit_due:
            self._committer.wake()


class PlainValue:
    """Takes the value of one field of one step where it needs no conversion.

    Attributes:
        look: Says whether a value is the file of an image; None of other fields.
    """

    def __init__(self, path: str, field: Field) -> None:
        """Take values of a field that varies."""
        assert field.max_length is not None
        self._path, self._names = path, path.split(SEPARATOR)
        self._maximum, self._kind = field.max_length, field.kind
        # Arrays of text are looked at, and so are images, and floats with 16 bits that
        # numpy does not know.
        self._is_array = field.kind in ("array", "bytes") and field.dtype != "bfloat16"
        encoding = field.encoding
        self.look = None if encoding is None else encoding.is_file
        self._dtype, self._inner = field.numpy, field.inner
        self._ndim = 1 + len(field.inner)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Path, and what `store_value` takes of the field."""
        known = self._kind == "text" or self._is_array
        kind = "b" if self.look is not None else self._kind[0]
        return (
            self._path,
            np.ndarray,
            self._dtype,
            self._inner,
            self._maximum,
            ord(kind) if known or self.look is not None else 0,
        )

    def take(self, data: dict[str, Any], reference: References) -> tuple[int, memoryview] | None:
        """Replace the value by a reference; return its items and bytes.

        Args:
            data: Flat, or nested: a branch that the value is in is copied.
            reference: Put in its place.

        Returns:
            None where the value is not there, or needs a look.
        """
        branch, name = data, self._path
        if name not in data:
            *names, name = self._names
            for each in names:
                below = branch.get(each)
                if below.__class__ is not dict:
                    return None
                branch[each] = below = dict(below)
                branch = below
        value: Any = branch.get(name)
        kind = value.__class__
        if kind is np.ndarray:
            if (
                not self._is_array
                or value.ndim != self._ndim
                or value.dtype != self._dtype
                or value.shape[1:] != self._inner
                or not value.flags.c_contiguous
            ):
                return None
            length = len(value)
            content = value.data.cast("B") if value.size else memoryview(b"")
        elif kind is str and self._kind == "text":
            try:
                content = memoryview(value.encode())
            except UnicodeEncodeError:
                return None
            length = len(content)
        elif kind is bytes and (
            self._kind == "bytes" or (self.look is not None and self.look(value))
        ):
            content = memoryview(value)
            length = len(content)
        else:
            return None
        if length > self._maximum:
            return None
        branch[name] = reference
        return length, content


class ValueCopier:
    """Writes the values of copied rows into a new heap, from its beginning on."""

    def __init__(self, store: Store) -> None:
        """Begin with an empty heap.

        Args:
            store: The target, with a heap.
        """
        assert store.heap is not None
        # What is published of the copy while it is made: nothing but heap heads.
        self._commit = MemoryCommitState(store.ring.num_envs, store.heap.nbytes)
        space = store.heap_space(self._commit)
        assert space is not None
        self._space = space
        self._writer = ValueWriter(store, space, self._commit, None)
        self._schema = store.schema
        self._heads = self._commit.heads.copy()
        self._sealed = store.sealing is not None
        if store.sealing is not None:
            store.sealing.read_values_by(self._commit)

    def begin(self, oldest: Array) -> None:
        """Note where each environment's rows begin, int64 ``[E]``."""
        self._heads = oldest.copy()
        self._commit.publish(oldest, self._commit.limits, oldest)

    def end(self, heads: Array) -> None:
        """Note that all rows were written, up to heads, int64 ``[E]``."""
        self._commit.publish(heads, self._commit.limits, self._commit.tails)

    @property
    def heap_heads(self) -> Array:
        """int64 ``[E]``, after the values so far."""
        return self._writer.heap_heads

    @property
    def heap_tails(self) -> Array:
        """int64 ``[E]``, below which only shards hold the values."""
        return heap_bounds(self._commit)[1]

    def store_rows(self, columns: Columns, env_ids: Array, flags: NDArray[np.uint8]) -> Columns:
        """Write values of rows, and return columns with references.

        Args:
            columns: Per path ``[N, ...]``, `Ragged` of fields that vary.
            env_ids: int64 ``[N]``, equal ones together, in the order of positions.
            flags: uint8 ``[N]``; of final rows only observations have values.
        """
        spans, data = self._writer.spans(columns)
        spans = self._writer.without_values(spans, flags)
        return self._publish(env_ids, spans, data)

    def store(
        self,
        columns: Columns,
        env_ids: Array,
        positions: Array,
        fits: NDArray[np.bool_],
        flags: NDArray[np.uint8] | None = None,
    ) -> Columns:
        """Write values of one environment's rows, and return columns with references.

        Args:
            columns: Per path ``[N, ...]``, `Ragged` of fields that vary.
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``; earlier rows were written.
            fits: bool ``[N]``, the rows whose values are copied; others have none.
            flags: uint8 ``[N]``; of final rows only observations have values. None for
                rows of a buffer, which have no others.
        """
        commit = self._commit
        # Rows given before were written by now, and shards may be made of them.
        commit.publish(self._heads.copy(), commit.limits, commit.tails)
        self._heads[env_ids[0]] = positions[-1] + 1
        spans, data = self._writer.spans(columns)
        if flags is not None:
            spans = self._writer.without_values(spans, flags)
        without = dict(spans)
        for path in self._schema.varying:
            column: References = spans[path].copy()  # type: ignore[assignment]  # made by `spans`
            column[~fits] = np.zeros((), REFERENCE)
            without[path] = column
        if self._sealed:
            # The longest values of a shard take a quarter of the heap at most.
            fitting = self._writer.count_fitting(env_ids, np.zeros_like(env_ids), without)
            assert fitting
        return self._publish(env_ids, without, data)

    def _publish(self, env_ids: Array, spans: Columns, data: Bytes) -> Columns:
        stored, heap_heads = self._writer.store(env_ids, spans, data)
        commit = self._commit
        commit.publish(commit.heads, commit.limits, commit.tails, heap_heads)
        return stored


def first_fitting(
    reader: GenerationReader, schema: Schema, heap_nbytes: int, firsts: Array, stops: Array
) -> Array:
    """The oldest rows whose values, and those of all after them, fit into a heap.

    Args:
        reader: The source.
        schema: Of the copy.
        heap_nbytes: Bytes of each environment's heap in it.
        firsts: int64 ``[E]``, the oldest rows to copy.
        stops: int64 ``[E]``, the rows after the newest.

    Returns:
        int64 ``[E]``, at least firsts. A reserve of the heap stays free, so that the
        next rows need not wait for one.
    """
    fitting, held = firsts.copy(), reader.files.metadata.schema.fields
    fields = {path: schema.fields[path] for path in schema.varying if path in held}
    if not fields:
        # The rows have no values yet.
        return fitting
    for env_id in range(len(firsts)):
        # From 0 on, less than a ring: no bytes are skipped at its end.
        left = heap_nbytes - heap_reserve_nbytes(schema, heap_nbytes)
        first, stop = int(firsts[env_id]), int(stops[env_id])
        while first < stop:
            begin = max(first, stop - SCANNED_ROWS)
            positions = np.arange(begin, stop)
            ids = np.full(len(positions), env_id)
            rows = reader.references(tuple(fields), ids, positions)
            sizes = [aligned(nbytes_of(rows[path], field)) for path, field in fields.items()]
            used = np.cumsum(np.sum(sizes, axis=0)[::-1])
            over = np.flatnonzero(used > left)
            if len(over):
                fitting[env_id] = stop - int(over[0])
                break
            left, stop = left - int(used[-1]), begin
    return fitting


def _refuse_overflow(heap_heads: Array) -> None:
    """Refuse heap positions that kernels do not count to, before any row ends.

    Args:
        heap_heads: int64 ``[E]``, to be reached.

    Raises:
        FullError: One is too high.
    """
    if heap_heads.max() > MAX_HEAD:
        raise FullError(
            f"heap positions must be at most {MAX_HEAD}, got {heap_heads.max()} of "
            f"environment {heap_heads.argmax()}. Export the rows and continue in a new "
            "buffer.",
            errno_=errno.EOVERFLOW,
        )


def _by_env(env_ids: Array) -> list[tuple[int, slice]]:
    """The rows of each environment, which lie together."""
    if not len(env_ids):
        return []
    edges = [0, *(np.flatnonzero(np.diff(env_ids)) + 1).tolist(), len(env_ids)]
    return [(int(env_ids[first]), slice(first, stop)) for first, stop in pairwise(edges)]
