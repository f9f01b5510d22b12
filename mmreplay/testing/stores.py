"""The contract of stores, the engines that hold a buffer's rows: `check_store`.

The rules write rows of every dtype, small, shaped and large fields, mutable ones and
episode ends, in both layouts, beside one numpy array for each field. All is compared
by its bits: a NaN that comes back as another NaN is another value.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import ReplayError
from mmreplay.ring import LAYOUTS, Layout, Ring, runs
from mmreplay.schema import Field, Schema
from mmreplay.schema.dtypes import DTYPES
from mmreplay.storage.store import CheckedStore, Store
from mmreplay.testing.disks import FaultyDisk, WatchedDisk, using
from mmreplay.testing.rules import ContractError, by_name, run_rules

SMALL = {dtype: Field((), dtype) for dtype in DTYPES}
SHAPED = {f"{dtype}s": Field((2, 3), dtype) for dtype in DTYPES}
LARGE = {
    "pixels": Field((64, 64), "uint8"),
    "brain": Field((2048,), "bfloat16"),
    "doubles": Field((600,), "float64"),
}
MUTABLE = {
    "returns": Field((), "float32", mutable=True),
    "vectors": Field((3,), "int16", mutable=True),
}
ENDS = {"terminated": Field((), "bool"), "truncated": Field((), "bool")}
SCHEMA = Schema(SMALL | SHAPED | LARGE | MUTABLE | ENDS)
FEW = Schema({"number": SMALL["int64"], "doubles": LARGE["doubles"], **MUTABLE, **ENDS})
"""A field of each kind, for rules that make many stores."""
STORED = tuple(path for path in SCHEMA.paths if path not in ENDS)
"""Fields that are read from rows; ends are read from flags."""
SCHEMAS = (SMALL, LARGE, MUTABLE, ENDS, ENDS | {"a": Field((), "bool")}, {"a": SMALL["int8"]})

QUIET, LOUD = 0x7FC12345, 0x7FA54321
SPECIAL_BITS = {
    "float16": [0x7E2A, 0x7D01, 0xFE03, 0x7C00, 0x8000, 0x0001],
    "bfloat16": [0x7FC1, 0x7F81, 0xFFD5, 0x7F80, 0x8000, 0x0001],
    "float32": [QUIET, LOUD, QUIET | 1 << 31, 0x7F800000, 1 << 31, 1],
    "float64": [
        0x7FF8000000012345,
        0x7FF4000000054321,
        0xFFF8000000000001,
        0x7FF0000000000000,
        1 << 63,
        1,
    ],
}
"""NaNs with payloads, quiet and signaling, an infinity, -0 and the least number."""
MAX_FAULTS = 60
"""Disk calls at which a fault is tried."""

Array = NDArray[Any]
Columns = dict[str, Array]
MakeStore = Callable[[Ring, Schema, Path], Store]


def any_bits(declared: Field, count: int, rng: np.random.Generator) -> Array:
    """Values of a field with every bit pattern possible, bool aside."""
    shape = (count, *declared.shape)
    if declared.dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    nbytes = declared.numpy.itemsize * int(np.prod(shape))
    return np.frombuffer(rng.bytes(nbytes), declared.numpy).reshape(shape)


def bits(array: Array) -> Array:
    """The array's bytes."""
    return np.ascontiguousarray(array).view(np.uint8)


def columns(count: int, rng: np.random.Generator, schema: Schema = SCHEMA) -> Columns:
    """Values of rows, of every field of a schema."""
    return {path: any_bits(item, count, rng) for path, item in schema.fields.items()}


def zeros(count: int) -> Columns:
    """Zeros of every field that is read from rows."""
    return {path: np.zeros((count, *SCHEMA[path].shape), SCHEMA[path].numpy) for path in STORED}


class QuickFaultyDisk(FaultyDisk):
    """A disk on which one call fails, and that syncs nothing."""

    def datasync(self, fd: int) -> None:
        """Fail, or do nothing."""
        self.watch("datasync")

    def sync_folder(self, fd: int) -> None:
        """Fail, or do nothing."""
        self.watch("sync_folder")


@dataclass
class StoreCase:
    """A kind of store to check, and a folder for its files.

    Attributes:
        make_store: Makes a new one in a folder.
        open_store: Opens one that was closed; None for stores in RAM.
        folder: Holds the folders.
        rng: Draws values.
    """

    make_store: MakeStore
    open_store: MakeStore | None
    folder: Path
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    made: list[Store] = field(default_factory=list)

    def store(self, ring: Ring, schema: Schema = SCHEMA) -> Store:
        """Make a store, which is closed with the case."""
        self.made.append(self.make_store(ring, schema, self.new_folder()))
        return self.made[-1]

    def new_folder(self) -> Path:
        """Make a folder for one store."""
        path = self.folder / str(len(list(self.folder.iterdir())))
        path.mkdir()
        return path

    def stores(self) -> Iterator[tuple[Store, Ring]]:
        """Make a store of each layout."""
        for layout in LAYOUTS:
            ring = small_ring(layout)
            yield self.store(ring), ring

    def close(self) -> None:
        """Close the stores made so far."""
        for store in self.made:
            store.close()


def small_ring(layout: Layout) -> Ring:
    """A ring of 13 rows of three environments."""
    return Ring.sized(13, 3, layout)


def compare(got: Array, wanted: Array, what: str, advice: str) -> None:
    """Refuse an array that differs in dtype, shape or a bit."""
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        raise ContractError(
            f"{what} is {got.dtype}{list(got.shape)} instead of "
            f"{wanted.dtype}{list(wanted.shape)}. {advice}"
        )
    rows = len(got)
    if not got.size:
        return
    differ = (bits(got).reshape(rows, -1) != bits(wanted).reshape(rows, -1)).any(1)
    if differ.any():
        row = int(differ.argmax())
        raise ContractError(
            f"{what} differs in {int(differ.sum())} of {rows} rows: row {row} is "
            f"{bits(got[row : row + 1]).tobytes()[:8].hex()}... instead of "
            f"{bits(wanted[row : row + 1]).tobytes()[:8].hex()}.... {advice}"
        )


def compare_rows(
    store: Store,
    rows: NDArray[np.int64],
    wanted: Mapping[str, Array],
    what: str,
    advice: str = "Return the bits that were written last",
) -> None:
    """Compare what a gather of rows returns with columns."""
    paths = [path for path in wanted if path not in ENDS]
    result = store.gather(rows, paths)
    if sorted(result) != sorted(paths):
        raise ContractError(f"gather returned {sorted(result)}. Return {sorted(paths)}")
    for path in paths:
        compare(result[path], wanted[path], f"field {path!r} {what}", advice)


def new_stores_hold_zeros(case: StoreCase) -> None:
    """Rows that were never written are zeros, flags included."""
    for store, ring in case.stores():
        rows, nothing = np.arange(ring.num_rows), zeros(ring.num_rows)
        compare_rows(store, rows, nothing, "of a new store", "Return zeros")
        none = np.zeros(len(rows), np.uint8)
        compare(store.flags(rows), none, "flags of a new store", "Return zeros")


def nothing_is_missing(case: StoreCase) -> None:
    """A store has every attribute and method of `Store`."""
    kinds = (Store,) if case.open_store is None else (Store, CheckedStore)
    names = {name for kind in kinds for name in (*vars(kind), *kind.__annotations__)}
    for store, _ in case.stores():
        for name in sorted(name for name in names if not name.startswith("_")):
            if not hasattr(store, name):
                raise ContractError(
                    f"the store has no {name!r}. Derive it from "
                    "mmreplay.storage.store.UnsealedStore if its rows stay where they "
                    "were written, or see mmreplay.storage.store.Store"
                )


def heap_and_records_are_those_of_the_fields(case: StoreCase) -> None:
    """`heap` is None where no field varies, and `records` where none is packed."""
    for store, _ in case.stores():
        if store.heap is not None:
            raise ContractError(
                f"heap is {type(store.heap).__name__} where no field varies. Set it to None"
            )
        if store.records is not None and not store.packed:
            raise ContractError(
                "records are there, but packed has no path. Name the fields of records"
            )


def rows_come_back_bit_for_bit(case: StoreCase) -> None:
    """Rows and flags are read as they were written last, in any order."""
    rng = case.rng
    for store, ring in case.stores():
        every, flags = np.arange(ring.num_rows), np.zeros(ring.num_rows, np.uint8)
        twin = zeros(ring.num_rows)
        for _ in range(40):
            count = int(rng.choice([1, 2, 5, 11]))
            rows = rng.permutation(ring.num_rows)[:count]
            if rng.random() < 0.5:
                rows.sort()
            written = columns(count, rng)
            marks = rng.integers(0, 64, count).astype(np.uint8)
            store.write(runs(rows), written, marks)
            flags[rows] = marks
            for path, array in twin.items():
                array[rows] = written[path]
            some = rng.integers(0, ring.num_rows, 29)
            wanted = {path: array[some] for path, array in twin.items()}
            compare_rows(store, some, wanted, "of some rows")
            advice = "Return the flags that were written last"
            compare(store.flags(some), flags[some], "flags of some rows", advice)
            compare(store.flags(rows, new=True), marks, "flags of new rows", advice)
            compare(store.all_flags[rows], marks, "all_flags of new rows", advice)
        compare_rows(store, every, twin, "of all rows")


def stored_rows_are_those_written(case: StoreCase) -> None:
    """`stored` returns rows as `gather` does, and `sealed` a bool of each."""
    for store, ring in case.stores():
        rows = case.rng.permutation(ring.num_rows)
        written = columns(len(rows), case.rng)
        store.write(runs(rows), written, np.zeros(len(rows), np.uint8))
        found = store.stored(rows, STORED)
        for path in STORED:
            what = f"field {path!r} of stored rows"
            compare(found[path], written[path], what, "Return the bits that were written")
        sealed = store.sealed(rows.reshape(-1, 1))
        if (sealed.dtype, sealed.shape) != (np.dtype(bool), (len(rows), 1)):
            raise ContractError(
                f"sealed returned {sealed.dtype}{list(sealed.shape)} for rows "
                f"{[len(rows), 1]}. Return bool of the shape of the rows"
            )


def files_hold_rows_where_they_are_placed(case: StoreCase) -> None:
    """`placement` is None, or says where `files` have each row of each field."""
    for store, ring in case.stores():
        placement = store.placement
        if placement is None:
            continue
        rows = np.arange(ring.num_rows)
        written = columns(len(rows), case.rng)
        store.write(runs(rows), written, np.zeros(len(rows), np.uint8))
        opened = {file.path.name: file for file in store.files}
        for path in STORED:
            name, item = placement.file_of(path), SCHEMA[path]
            if name not in opened:
                raise ContractError(
                    f"placement names the file {name!r}, but files has {sorted(opened)}. "
                    "Return all files, or set placement to None"
                )
            data = opened[name].pread(opened[name].nbytes, 0)
            if path in placement.large:
                found = np.frombuffer(data, item.numpy).reshape(-1, *item.shape)
            else:
                found = np.frombuffer(data, placement.record)[path]
            compare(found, written[path], f"field {path!r} of {name}", "Write rows there")


def mapped_fields_show_rows(case: StoreCase) -> None:
    """`map_field` returns None, or every row by its slot and environment."""
    for store, ring in case.stores():
        env_ids, slots = np.divmod(np.arange(ring.num_rows), ring.slots)
        rows = ring.rows(env_ids, slots)
        written = columns(len(rows), case.rng)
        store.write(runs(rows), written, np.zeros(len(rows), np.uint8))
        for path in STORED:
            mapped = store.map_field(path)
            if mapped is not None:
                flat = mapped.swapaxes(0, 1).reshape(-1, *SCHEMA[path].shape)
                compare(flat, written[path], f"mapped field {path!r}", "Map [slots, envs]")


def floats_keep_their_bits(case: StoreCase) -> None:
    """NaNs with payloads, infinities, -0 and the least numbers keep their bits."""
    for store, _ in case.stores():
        for dtype, numbers in SPECIAL_BITS.items():
            words = np.array(numbers, f"<u{SCHEMA[dtype].numpy.itemsize}")
            written = columns(len(words), case.rng)
            written[dtype] = words.view(SCHEMA[dtype].numpy)
            rows = np.arange(len(words)) * 2
            store.write(runs(rows), written, np.zeros(len(words), np.uint8))
            compare_rows(store, rows, written, "of special floats", "Store bytes, not numbers")


def a_single_row_needs_no_axis(case: StoreCase) -> None:
    """A single row may be written without an axis of one."""
    for layout in LAYOUTS:
        store = case.store(Ring.sized(5, 1, layout))
        written = columns(1, case.rng)
        row = {path: column[0] for path, column in written.items()}
        store.write([(3, 0, 1)], row, np.array([9], np.uint8))
        compare_rows(store, np.array([3]), written, "of a single row")


def columns_may_be_strided(case: StoreCase) -> None:
    """Reversed and strided columns are written by value."""
    for store, _ in case.stores():
        written = {path: item[::-2] for path, item in columns(8, case.rng).items()}
        rows = np.array([4, 5, 9, 0])
        store.write(runs(rows), written, np.arange(4, dtype=np.uint8)[::-1].copy())
        compare_rows(store, rows, written, "of strided columns")
        wanted = np.array([3, 2, 1, 0], np.uint8)
        compare(store.flags(rows), wanted, "flags of strided columns", "Copy by value")


def what_was_read_is_a_copy(case: StoreCase) -> None:
    """Arrays of an earlier gather do not change with a later write."""
    for store, _ in case.stores():
        rows = np.array([1, 2, 3])
        first = columns(3, case.rng)
        store.write(runs(rows), first, np.ones(3, np.uint8))
        result, marks = store.gather(rows, STORED), store.flags(rows)
        store.write(runs(rows), columns(3, case.rng), np.zeros(3, np.uint8))
        for path, array in result.items():
            what = f"field {path!r} of an earlier gather"
            compare(array, first[path], what, "Return copies")
        compare(marks, np.ones(3, np.uint8), "flags read earlier", "Return copies")


def what_was_written_may_change(case: StoreCase) -> None:
    """The caller may change arrays after `write` returned."""
    for store, _ in case.stores():
        rows = np.array([1, 2, 3])
        written = {path: np.array(item) for path, item in columns(3, case.rng).items()}
        before = {path: item.copy() for path, item in written.items()}
        store.write(runs(rows), written, np.ones(3, np.uint8))
        for column in written.values():
            column[...] = 0
        compare_rows(store, rows, before, "changed after the write", "Copy in write")


def fields_are_read_alone(case: StoreCase) -> None:
    """A gather of one field returns that field alone; of no rows, empty arrays."""
    none = np.empty(0, np.int64)
    for store, _ in case.stores():
        rows = np.array([7, 2])
        written = columns(2, case.rng)
        store.write(runs(rows), written, np.zeros(2, np.uint8))
        for path in STORED:
            compare_rows(store, rows[::-1], {path: written[path][::-1]}, "read alone")
        store.prefetch(none, STORED)
        compare_rows(
            store,
            none,
            {p: written[p][:0] for p in STORED},
            "of no rows",
            "Return arrays [0, *shape]",
        )
        if store.flags(none).shape != (0,):
            raise ContractError(
                f"flags of no rows have the shape {store.flags(none).shape}. Return "
                "the shape of the rows"
            )


def flags_between_cross_the_wrap(case: StoreCase) -> None:
    """`flags_between` returns the flags of positions in order, around the wrap."""
    rng = case.rng
    for store, ring in case.stores():
        history = rng.integers(0, 64, 60).astype(np.uint8)
        for env_id in range(3):
            for position in range(60):
                rows = np.array([ring.row(env_id, position)])
                marks = history[position : position + 1] ^ np.uint8(env_id)
                store.write(runs(rows), columns(1, rng), marks)
        for env_id in range(3):
            for first in range(60 - ring.slots, 60):
                for stop in (first, first + 1, (first + 60) // 2, 60):
                    compare(
                        store.flags_between(env_id, first, stop),
                        (history[first:stop] ^ env_id).astype(np.uint8),
                        f"flags_between({env_id}, {first}, {stop})",
                        "Read position p from slot p % ring.slots",
                    )


def set_changes_one_field(case: StoreCase) -> None:
    """`set` replaces the values of a mutable field in its rows, and nothing else."""
    rng = case.rng
    for store, ring in case.stores():
        every = np.arange(ring.num_rows)
        written = columns(len(every), rng)
        store.write(runs(every), written, np.zeros(len(every), np.uint8))
        for path in MUTABLE:
            rows = np.array([5, 6, 7, 2, 0, 30])
            values = any_bits(SCHEMA[path], len(rows), rng)
            store.set(path, rows, values)
            written[path] = np.array(written[path])
            written[path][rows] = values
            compare_rows(store, every, written, f"after set of {path!r}")
        store.set("returns", np.array([4, 4]), np.array([1, 2], np.float32))
        compare_rows(
            store,
            np.array([4]),
            {"returns": np.array([2], np.float32)},
            "set twice for one row",
            "Let the last value win",
        )


def prepared_steps_are_written(case: StoreCase) -> None:
    """`prepare` returns -1, or `write_prepared` writes what `write` would."""
    for store, ring in case.stores():
        step = columns(ring.num_envs, case.rng)
        step["terminated"] = np.array([True, False, False])
        step["truncated"] = np.zeros(3, bool)
        ends = store.prepare(step)
        if ends == -1:
            continue
        rows = np.array([ring.row(env_id, 4) for env_id in range(ring.num_envs)])
        flags = np.array([1, 2, 3], np.uint8)
        store.write_prepared(runs(rows), flags)
        compare_rows(store, rows, step, "of a prepared step")
        compare(store.flags(rows), flags, "flags of a prepared step", "Write flags")


def space_can_be_reserved(case: StoreCase) -> None:
    """`allocate` may be called for the same positions again, and changes no row."""
    for store, ring in case.stores():
        shift = np.arange(ring.num_envs)
        for first, stop in ((0, 1), (0, 5), (2, 5), (0, 2), (0, ring.slots), (4, 4)):
            for lap in (0, 7 * ring.slots):
                store.allocate(lap + first + shift, lap + stop + shift)
        none = np.zeros(ring.num_rows, np.uint8)
        result = store.flags(np.arange(ring.num_rows))
        compare(result, none, "flags after allocate", "Leave rows as they are")


def reading_ahead_changes_nothing(case: StoreCase) -> None:
    """`prefetch` may be called at any time, and changes no row."""
    for store, ring in case.stores():
        rows = case.rng.permutation(ring.num_rows)
        written = columns(len(rows), case.rng)
        store.write(runs(rows), written, np.zeros(len(rows), np.uint8))
        for _ in range(40):
            store.prefetch(rows, STORED)
        compare_rows(store, rows, written, "after prefetch")


def any_schema_is_stored(case: StoreCase) -> None:
    """Schemas of one kind of field are written, read, synced and sized."""
    for layout in LAYOUTS:
        ring = small_ring(layout)
        for fields in SCHEMAS:
            schema = Schema(fields)
            store = case.store(ring, schema)
            rows = np.array([3, 4, 1])
            written = columns(3, case.rng, schema)
            flags: NDArray[np.uint8] = np.array([1, 2, 3], np.uint8)
            store.write(runs(rows), written, flags)
            compare_rows(store, rows, written, f"of the fields {', '.join(fields)}")
            compare(store.flags(rows), flags, "flags", "Write flags of any schema")
            store.sync()
            apparent, allocated = store.disk_nbytes()
            if apparent < ring.num_rows or allocated < 0:
                raise ContractError(
                    f"disk_nbytes is {(apparent, allocated)} for {ring.num_rows} rows. "
                    "Return (apparent, allocated) bytes of the files"
                )
            store.close()


def synced_rows_are_reopened(case: StoreCase) -> None:
    """After `sync` and `close` another opening reads the same rows and flags."""
    if case.open_store is None:
        return
    for layout in LAYOUTS:
        ring, folder = small_ring(layout), case.new_folder()
        store = case.make_store(ring, SCHEMA, folder)
        rows = case.rng.permutation(ring.num_rows)[:20]
        written = columns(len(rows), case.rng)
        flags = case.rng.integers(0, 64, len(rows)).astype(np.uint8)
        store.write(runs(rows), written, flags)
        store.sync()
        store.close()
        again = case.open_store(ring, SCHEMA, folder)
        case.made.append(again)
        compare_rows(again, rows, written, "after another opening")
        compare(again.flags(rows), flags, "flags after another opening", "Store flags")


def checksums_show_changes(case: StoreCase) -> None:
    """A block's checksum changes with any row or flag, not with a mutable field.

    Checksums that were written are read back with the lap of their block.
    """
    if case.open_store is None:
        return
    for layout in LAYOUTS:
        ring = Ring.sized(40, 3, layout)
        store = cast(CheckedStore, case.store(ring))
        size = ring.block_rows
        rows = ring.rows(np.full(size, 1), np.arange(size))
        written = columns(size, case.rng)
        flags = np.zeros(size, np.uint8)
        store.write(runs(rows), written, flags)
        seen = {store.checksum(1, 0)}
        if seen != {store.checksum(1, 0)}:
            raise ContractError(
                "the checksum of a block differs from call to call. Compute it from "
                "the block's rows alone"
            )
        for path in ("int8", "pixels", "float64s", "flags"):
            if path == "flags":
                flags[-1] ^= 1
            else:
                written[path] = np.array(written[path])
                written[path].view(np.uint8).reshape(-1)[-1] ^= 1
            store.write(runs(rows), written, flags)
            seen.add(store.checksum(1, 0))
        if len(seen) != 5:
            raise ContractError(
                f"{len(seen)} checksums of a block that was changed in 4 bits, one "
                "after another. Include every field that is not mutable, and the flags"
            )
        last = store.checksum(1, 0)
        store.set("returns", rows, np.full(size, 7, np.float32))
        if store.checksum(1, 0) != last:
            raise ContractError(
                "the checksum of a block changed with a mutable field. Leave mutable "
                "fields out: they change after their block was summed"
            )
        first = 3 * ring.num_blocks - 2
        store.write_sums(1, first, np.array([11, 12, 13, 14], np.uint32))
        store.sync_sums()
        result = [store.read_sum(1, first + i) for i in range(4)]
        if result != [(11, 2), (12, 2), (13, 3), (14, 3)]:
            raise ContractError(
                f"checksums of blocks {first} to {first + 3} of {ring.num_blocks} are "
                f"read as {result}. Return (checksum, block // ring.num_blocks)"
            )


def failed_disk_calls_are_errors(case: StoreCase) -> None:
    """A failure at any disk call is an error of mmreplay, or loses nothing.

    Every call of `mmreplay.disk` fails in turn, from the new store to its last sync.
    """
    if case.open_store is None:
        return
    watched = WatchedDisk()
    with using(watched):
        write_and_sync(case, case.new_folder())
    total = sum(watched.calls.values())
    if not watched.calls["pwrite"] + watched.calls["store"]:
        raise ContractError(
            "rows were written without a call of mmreplay.disk, so that no test can "
            "fail or tear a write. Write with mmreplay.disk.files"
        )
    for number in (errno.ENOSPC, errno.EIO):
        for at in np.unique(np.linspace(0, total - 1, MAX_FAULTS).astype(int)).tolist():
            fail_at(case, at, number)


def fail_at(case: StoreCase, at: int, number: int) -> None:
    """Let one disk call fail, and check what the store makes of it."""
    folder = case.new_folder()
    disk = QuickFaultyDisk(OSError(number, os.strerror(number)), at)
    name = errno.errorcode[number]
    try:
        with using(disk):
            rows, written, flags = write_and_sync(case, folder)
    except ReplayError:
        return
    except OSError as error:
        raise ContractError(
            f"disk call {at} failed with {name}, which raised {type(error).__name__} "
            f"({error}). Raise mmreplay.FullError or mmreplay.FailedError with the path"
        ) from error
    assert case.open_store is not None
    after = f"after disk call {at} failed with {name} and nothing was raised"
    again = case.open_store(small_ring("env_major"), FEW, folder)
    try:
        compare_rows(again, rows, written, after, "Raise the error of a failed call")
        compare(again.flags(rows), flags, f"flags {after}", "Raise the error")
    finally:
        again.close()


def write_and_sync(
    case: StoreCase, folder: Path
) -> tuple[NDArray[np.int64], Columns, NDArray[np.uint8]]:
    """Make a store, write rows, set values, write checksums, sync and close."""
    ring = small_ring("env_major")
    store = cast(CheckedStore, case.make_store(ring, FEW, folder))
    try:
        positions = np.zeros(ring.num_envs, np.int64)
        store.allocate(positions, positions + 8)
        rows = ring.rows(np.repeat(np.arange(3), 8), np.tile(np.arange(8), 3))
        written = columns(len(rows), np.random.default_rng(1), FEW)
        flags = np.arange(len(rows), dtype=np.uint8)
        store.write(runs(rows), written, flags)
        values = np.full(len(rows), 3, np.float32)
        store.set("returns", rows, values)
        store.write_sums(0, 0, np.array([store.checksum(0, 0)], np.uint32))
        store.sync()
        store.sync_sums()
    finally:
        # An error of `close` after another one says nothing new.
        with suppress(ReplayError):
            store.close()
    return rows, {**written, "returns": values}, flags


def closing_twice_is_harmless(case: StoreCase) -> None:
    """A second `close` does nothing."""
    for store, _ in case.stores():
        case.made.remove(store)
        store.close()
        try:
            store.close()
        except Exception as error:
            raise ContractError(
                f"the second close raised {type(error).__name__} ({error}). Return"
            ) from error


RULES = by_name(
    new_stores_hold_zeros,
    nothing_is_missing,
    heap_and_records_are_those_of_the_fields,
    rows_come_back_bit_for_bit,
    stored_rows_are_those_written,
    files_hold_rows_where_they_are_placed,
    mapped_fields_show_rows,
    floats_keep_their_bits,
    a_single_row_needs_no_axis,
    columns_may_be_strided,
    what_was_read_is_a_copy,
    what_was_written_may_change,
    fields_are_read_alone,
    flags_between_cross_the_wrap,
    set_changes_one_field,
    prepared_steps_are_written,
    space_can_be_reserved,
    reading_ahead_changes_nothing,
    any_schema_is_stored,
    synced_rows_are_reopened,
    checksums_show_changes,
    failed_disk_calls_are_errors,
    closing_twice_is_harmless,
)
STORE_RULES = tuple(RULES)
"""Names of the rules of `check_store`."""


def check_store(
    make_store: MakeStore,
    folder: str | Path | None = None,
    *,
    open_store: MakeStore | None = None,
    rules: Sequence[str] | None = None,
) -> None:
    """Check that an engine keeps the contract of `mmreplay.storage.store.Store`.

    With `open_store`, it is checked as a store on a disk, a `CheckedStore`: rows are
    read again after a reopening, checksums show changes, and every disk call fails in
    turn.

    Args:
        make_store: Makes a new store from a ring, a schema and an empty folder.
        folder: Where files are made; a temporary folder by default.
        open_store: Opens for writing the store that was made in a folder; None for a
            store in RAM.
        rules: Names of the rules to check, of `STORE_RULES`; all by default.

    Raises:
        ContractError: A rule is broken. What the store itself raises is passed on, with
            a note that names the rule.

    Example:
        >>> from mmreplay.storage.memory import MemoryStore
        >>> from mmreplay.testing import check_store
        >>> check_store(lambda ring, schema, folder: MemoryStore(ring, schema))
    """

    @contextmanager
    def make_case(own: Path) -> Iterator[StoreCase]:
        case = StoreCase(make_store, open_store, own)
        try:
            yield case
        finally:
            case.close()

    run_rules("the store", RULES, rules, folder, make_case)
