"""What a store answers whose rows and values stay where they were written.

`UnsealedStore` is a base of every engine but Zarr's, which moves rows to shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.format.heap import References, legal
from mmreplay.ring import Ring
from mmreplay.schema import Schema
from mmreplay.schema.field import REFERENCE
from mmreplay.storage.heap import Heap, HeapSpace
from mmreplay.storage.layout import HEAP, RecordLayout
from mmreplay.storage.store import Columns, NewBytes, TakenValues, flags_between

if TYPE_CHECKING:
    from mmreplay.storage.commit_state import WritableCommitState

_copies = kernels.load("copies")


class UnsealedStore:
    """Rows stay in their files, or in RAM, and values that vary in the heap."""

    ring: Ring
    schema: Schema
    heap: Heap | None
    placement: RecordLayout | None = None
    sealing = None

    @property
    def all_flags(self) -> NDArray[np.uint8]:
        """Flags of every row; see `Store.all_flags`."""
        raise NotImplementedError

    def gather(
        self, rows: NDArray[np.int64], paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Copy rows out; see `Store.gather`."""
        raise NotImplementedError

    def stored(
        self, rows: NDArray[np.int64], paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Copy rows out as they are stored: as `gather` does."""
        return self.gather(rows, paths)

    def heap_references(self, rows: NDArray[np.int64], columns: Columns) -> Columns:
        """Those that `gather` returned; see `Store.heap_references`."""
        return columns

    @cached_property
    def _lengths(self) -> dict[str, tuple[int, int]]:
        """Of each field that varies: its `max_length`, and bytes of an item.

        Found once: to find them took a tenth of a draw.
        """
        fields = self.schema.fields
        lengths = ((path, fields[path].max_length) for path in self.schema.varying)
        return {path: (length or 0, fields[path].inner_nbytes) for path, length in lengths}

    def take_values(
        self,
        path: str,
        references: References,
        env_ids: NDArray[np.int64],
        heap_tails: NDArray[np.int64],
        heap_heads: NDArray[np.int64],
        buffer: NewBytes,
    ) -> TakenValues:
        """Copy values out of the heap; see `Store.take_values`."""
        heap, count = self.heap, len(references)
        assert heap is not None
        max_length, item_nbytes = self._lengths[path]
        begins, nbytes = np.empty(count, np.int64), np.empty(count, np.int64)
        offsets, illegal = np.empty(count + 1, np.int64), None
        found = begins, nbytes, offsets
        bounds = heap_tails, heap_heads, heap.nbytes, max_length, item_nbytes
        # Checked before the heap is touched: it may lead anywhere.
        if _copies.find_values(references, env_ids, *bounds, *found):
            illegal = ~legal(
                references,
                self.schema.fields[path],
                heap.nbytes,
                heap_tails[env_ids],
                heap_heads[env_ids],
            )
            references = np.where(illegal, np.zeros((), REFERENCE), references)
        data = buffer(offsets.item(count) * item_nbytes)
        heap.take(begins, nbytes, data)
        return references, data, offsets, illegal

    def flags_between(self, env_id: int, first: int, stop: int) -> NDArray[np.uint8]:
        """Flags of a span; see `Store.flags_between`."""
        return flags_between(self.all_flags, self.ring, env_id, first, stop)

    def sealed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """No row; see `Store.sealed`."""
        return np.zeros(rows.shape, np.bool_)

    def file_with(self, path: str, row: int) -> str:
        """heap.bin; see `Store.file_with`."""
        return HEAP

    def shard_paths(self) -> list[Path]:
        """None; see `Store.shard_paths`."""
        return []

    def map_field(self, path: str) -> NDArray[Any] | None:
        """None; see `Store.map_field`."""
        return None

    def begin_writing(
        self, commit: WritableCommitState, refuse_removed: Callable[[], object]
    ) -> None:
        """Do nothing: no file is opened by its path later."""

    def heap_space(self, commit: WritableCommitState) -> HeapSpace | None:
        """By the rows whose values the heap has; see `Store.heap_space`."""
        return None if self.heap is None else HeapSpace(self, self.heap, commit)

    def settle(
        self, first: NDArray[np.int64], stop: NDArray[np.int64], *, seal: bool = True
    ) -> None:
        """Do nothing: rows stay where they are."""

    def settle_last(
        self, tails: NDArray[np.int64], heads: NDArray[np.int64], *, seal: bool
    ) -> None:
        """Do nothing: rows stay where they are."""
