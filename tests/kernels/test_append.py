"""A step stored and published by one call leaves the bytes of three stores."""

import mmap
from time import monotonic

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import kernels
from mmreplay.format import commit
from mmreplay.kernels import rows as twin
from mmreplay.storage import layout
from mmreplay.storage.layout import record_layout
from tests.kernels.test_rows import record

FIELDS = {
    "observation": mr.Field((5,), "float32"),
    "odd": mr.Field((3,), "int8"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}
SCHEMA = mr.Schema(FIELDS)
STRIDE = record_layout(SCHEMA).stride
ROWS = 40
ENVS = [1, 3]


class Bench:
    """An append kernel, its files in memory, and what it is held against."""

    def __init__(self, rows, num_envs, monkeypatch, rng):
        monkeypatch.setattr(layout, "rows", rows)
        self.num_envs, self.rows = num_envs, rows
        self.first = record(num_envs, rng)
        self.slot = self.new_slot()
        self.packer = layout.packer(SCHEMA, record_layout(SCHEMA), num_envs)
        self.append = rows.Append(self.packer, self.slot)
        size = commit.slot_nbytes(num_envs)
        self.size = size
        self.records = self.mapped(ROWS * STRIDE + 9)
        self.flags = self.mapped(ROWS)
        self.commit = self.mapped(4 * size)
        self.limits, self.tails = self.first.limits, self.first.tails

    def mapped(self, nbytes):
        found = mmap.mmap(-1, nbytes)
        found[:] = b"\xee" * nbytes
        return found

    def new_slot(self):
        return self.rows.Slot(self.first.encode(), 16, 128, self.num_envs)

    def reserve(self, low=0, high=ROWS, until=1e18, **changes):
        given = {
            name: getattr(self, name) for name in ("records", "flags", "commit", "limits", "tails")
        }
        given |= changes
        self.append.reserve(*given.values(), low, high, until)

    def step(self, rng, **changes):
        lead = (self.num_envs,) if self.num_envs > 1 else ()
        found = {
            path: rng.integers(-99, 99, (*lead, *f.shape)).astype(f.numpy)
            for path, f in FIELDS.items()
        }
        none = np.zeros(lead, bool)
        return found | {"terminated": none, "truncated": none} | changes

    def add(self, step, row, offset=0, number=7, heads=None):
        heads = np.arange(self.num_envs) + 50 if heads is None else heads
        return self.append.add(step, row, offset, number, heads)

    def untouched(self):
        every = bytes(self.records) + bytes(self.flags) + bytes(self.commit)
        return set(every) == {0xEE}


@pytest.fixture(params=ENVS)
def bench(request, rows, monkeypatch, rng):
    return Bench(rows, request.param, monkeypatch, rng)


def test_it_stores_what_the_packer_and_the_slot_make(bench, rng):
    bench.reserve()
    envs, size = bench.num_envs, bench.size
    packer = layout.packer(SCHEMA, record_layout(SCHEMA), envs)
    expected = bytearray(bench.records), bytearray(bench.flags), bytearray(bench.commit)
    other = bench.new_slot()
    for number in range(1, 30):
        row = int(rng.integers(ROWS // envs)) * envs
        step, where = bench.step(rng), size * (number % 4)
        heads = rng.integers(1 << 40, size=envs)
        assert bench.add(step, row, where, number, heads) is True
        assert packer.prepare(step) == 0
        packed = packer.rows
        expected[0][row * STRIDE : row * STRIDE + len(packed)] = packed
        expected[1][row : row + envs] = bytes(envs)
        told = other.publish(number, heads, bench.limits, bench.tails)
        expected[2][where : where + size] = told
        found = bytes(bench.records), bytes(bench.flags), bytes(bench.commit)
        assert found == tuple(map(bytes, expected))


@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_a_step_that_ends_somewhere_is_left(bench, rng, name):
    bench.reserve()
    ends = np.zeros(bench.num_envs, bool)
    ends[-1] = True
    step = bench.step(rng, **{name: ends if bench.num_envs > 1 else ends[0]})
    assert bench.add(step, 0) is False
    assert bench.untouched()


@pytest.mark.parametrize(
    "odd",
    [
        {"observation": [1.0] * 5},
        {"odd": np.zeros(3, np.int16)},
        {"odd": np.zeros((7, 3), np.int8)},
        {"more": 1.0},
        {"odd": None},
    ],
)
def test_a_step_that_needs_a_look_is_left(bench, rng, odd):
    bench.reserve()
    assert bench.add(bench.step(rng, **odd), 0) is False
    assert bench.add({}, 0) is False
    assert bench.untouched()


def test_rows_and_times_that_are_not_reserved_are_left(bench, rng):
    step, envs = bench.step(rng), bench.num_envs
    assert bench.add(step, 0) is False
    bench.reserve(low=9, high=9 + 2 * envs)
    for row in (0, 8, 9 + envs + 1, ROWS, -1, 1 << 60):
        assert bench.add(step, row) is False
    bench.reserve(until=monotonic() - 0.001)
    assert bench.add(step, 0) is False
    bench.reserve()
    bench.append.release()
    assert bench.add(step, 0) is False
    assert bench.untouched()
    bench.reserve(low=9, high=9 + 2 * envs, until=monotonic() + 1000)
    assert bench.add(step, 9)
    assert bench.add(step, 9 + envs)


@pytest.mark.parametrize("offset", [-1, 1 << 60])
def test_a_row_outside_is_refused(bench, rng, offset):
    bench.reserve()
    for where in (offset, 3 * bench.size + 1):
        with pytest.raises(ValueError, match="add: offset must be of a publicat"):
            bench.add(bench.step(rng), 0, where)
    assert bench.untouched()


def test_heads_of_other_environments_are_refused(bench, rng):
    bench.reserve()
    with pytest.raises(ValueError, match=r"Slot: values must be int64"):
        bench.add(bench.step(rng), 0, heads=np.zeros(bench.num_envs + 1, np.int64))
    assert bench.untouched()


@pytest.mark.parametrize(
    "changes",
    [
        {"low": -1},
        {"low": 9, "high": 8},
        {"high": ROWS + 1},
        {"limits": np.zeros(9, np.int64)},
        {"tails": np.zeros(0, np.int64)},
        {"flags": bytearray(ROWS - 1)},
        {"records": bytearray(ROWS * STRIDE - 1)},
    ],
)
def test_a_reservation_beyond_what_is_there_is_refused(bench, rng, changes):
    bench.reserve()
    with pytest.raises(ValueError, match="reserve: rows must be in the files"):
        bench.reserve(**changes)
    # And the former reservation is over.
    assert bench.add(bench.step(rng), 0) is False
    assert bench.untouched()


def block(bench, rng, rows):
    return {
        path: rng.integers(-99, 99, (rows, *f.shape)).astype(f.numpy) for path, f in FIELDS.items()
    }


def extend(bench, columns, first, flags, row, offset=0, number=7, **changes):
    given = {name: getattr(bench, name) for name in ("records", "flags", "commit")} | changes
    heads = np.arange(bench.num_envs) + 50
    return bench.append.extend(
        columns,
        first,
        flags,
        given["records"],
        row,
        given["flags"],
        given["commit"],
        offset,
        number,
        heads,
        bench.limits,
        bench.tails,
    )


def test_a_block_is_stored_as_the_packer_packs_it_and_the_slot_publishes_it(bench, rng):
    packer = layout.packer(SCHEMA, record_layout(SCHEMA), bench.num_envs)
    expected = bytearray(bench.records), bytearray(bench.flags), bytearray(bench.commit)
    other, size = bench.new_slot(), bench.size
    for number in range(1, 20):
        count, first = int(rng.integers(1, 20)), int(rng.integers(5))
        row = int(rng.integers(ROWS - count + 1))
        columns = block(bench, rng, first + count + 2)
        flags = rng.integers(16, size=count).astype(np.uint8)
        assert extend(bench, columns, first, flags, row, size, number) is None
        out = memoryview(expected[0])[row * STRIDE : (row + count) * STRIDE]
        packer.stream(out, columns, first, first + count)
        expected[1][row : row + count] = flags.tobytes()
        heads = np.arange(bench.num_envs) + 50
        told = other.publish(number, heads, bench.limits, bench.tails)
        expected[2][size : 2 * size] = told
        found = bytes(bench.records), bytes(bench.flags), bytes(bench.commit)
        assert found == tuple(map(bytes, expected))


@pytest.mark.parametrize(
    ("row", "first", "count", "offset"),
    [
        (-1, 0, 8, 0),
        (ROWS - 7, 0, 8, 0),
        (1 << 60, 0, 8, 0),
        (0, -1, 8, 0),
        (0, 0, 0, 0),
        (0, 0, 8, -1),
        (0, 0, 8, 1 << 60),
    ],
)
def test_a_block_outside_the_files_is_refused(bench, rng, row, first, count, offset):
    flags = np.zeros(count, np.uint8)
    with pytest.raises(ValueError, match="extend: rows must be in the files, and off"):
        extend(bench, block(bench, rng, 8), first, flags, row, offset)
    assert bench.untouched()


def test_a_block_of_too_few_rows_is_not_published(bench, rng):
    before = bytes(bench.commit)
    for first in (1, (1 << 62)):
        with pytest.raises(ValueError, match=r"pack: .* must have .* rows"):
            extend(bench, block(bench, rng, 8), first, np.zeros(8, np.uint8), 0)
    assert bytes(bench.commit) == before


def test_a_block_goes_into_files_that_may_be_written(bench, rng):
    flags, columns = np.zeros(8, np.uint8), block(bench, rng, 8)
    for name in ("records", "flags", "commit"):
        read_only = {name: bytes(getattr(bench, name))}
        with pytest.raises((BufferError, TypeError, ValueError)):
            extend(bench, columns, 0, flags, 0, **read_only)
    extend(bench, columns, 0, flags, 0)
    for mapping in (bench.records, bench.flags, bench.commit):
        mapping.close()


def test_mappings_are_let_go(rows, monkeypatch, rng):
    bench = Bench(rows, 1, monkeypatch, rng)
    bench.reserve()
    assert bench.add(bench.step(rng), 3)
    bench.append.release()
    bench.records.close()
    bench.records = bench.mapped(ROWS * STRIDE)
    bench.reserve()
    bench.append = None
    for each in (bench.records, bench.flags, bench.commit):
        each.close()


def test_an_append_is_of_a_packer_and_a_slot_of_as_many_environments(monkeypatch, rng):
    rows = kernels.choose("rows", "").module
    if rows is twin:
        pytest.skip("the kernels in C are not built here")
    one, three = (Bench(rows, n, monkeypatch, rng) for n in ENVS)
    with pytest.raises(ValueError, match=r"packer and slot must have .*, got 1 and 3"):
        rows.Append(one.packer, three.slot)
    for given in ((one.slot, one.packer), (one.packer, None), (object(), one.slot)):
        with pytest.raises(TypeError, match="takes a RecordPacker and a Slot"):
            rows.Append(*given)
    with pytest.raises(TypeError, match="add takes 5 arguments, got 1"):
        one.append.add({})


class HeapBench(Bench):
    """One whose publications have the bounds of a heap."""

    def __init__(self, rows, monkeypatch, rng):
        super().__init__(rows, 1, monkeypatch, rng)
        self.heap_tails = np.array([24])
        self.first = record(1, rng, heap_tails=self.heap_tails, heap_heads=np.array([40]))
        self.slot = self.new_slot()
        self.append = rows.Append(self.packer, self.slot)
        self.size = commit.record_nbytes(1, 4096)
        self.limits, self.tails = self.first.limits, self.first.tails

    def new_slot(self):
        columns = 4 if self.first.heap_heads is None else 6
        return self.rows.Slot(self.first.encode(), 16, 128, 1, columns)

    def reserve(self, **changes):
        given = [getattr(self, n) for n in ("records", "flags", "commit")]
        given += [self.limits, self.tails, 0, ROWS, 1e18]
        heap_tails = changes.get("heap_tails", self.heap_tails)
        self.append.reserve(*given, *(() if heap_tails is None else (heap_tails,)))


def test_a_step_is_published_with_the_bounds_of_its_heap(rows, monkeypatch, rng):
    bench = HeapBench(rows, monkeypatch, rng)
    assert bench.slot.has_heap
    bench.reserve()
    other = bench.new_slot()
    for number in range(1, 9):
        heads, heap_heads = np.array([50 + number]), np.array([8 * number])
        step = bench.step(rng)
        assert bench.append.add(step, number, 0, number, heads, heap_heads) is True
        told = other.publish(number, heads, bench.limits, bench.tails, heap_heads, bench.heap_tails)
        assert bench.commit[: bench.size] == bytes(told)


def test_bounds_of_a_heap_are_given_where_there_is_one(rows, monkeypatch, rng):
    heads = np.array([50])
    bench = HeapBench(rows, monkeypatch, rng)
    with pytest.raises(ValueError, match="reserve: heap tails must be given"):
        bench.reserve(heap_tails=None)
    with pytest.raises(ValueError, match="reserve: rows must be in the files"):
        bench.reserve(heap_tails=np.array([1, 2]))
    bench.reserve()
    with pytest.raises(TypeError, match="add takes"):
        bench.append.add(bench.step(rng), 0, 0, 7, heads)
    with pytest.raises(ValueError, match="values must be int64"):
        bench.append.add(bench.step(rng), 0, 0, 7, heads, np.array([1, 2]))
    with pytest.raises(ValueError, match="extend: it publishes no heap"):
        extend(bench, block(bench, rng, 8), 0, np.zeros(8, np.uint8), 0)
    assert bench.untouched()
    plain = Bench(rows, 1, monkeypatch, rng)
    assert not plain.slot.has_heap
    plain.reserve()
    with pytest.raises(TypeError, match="add takes"):
        plain.append.add(plain.step(rng), 0, 0, 7, heads, heads)
    assert plain.untouched()
