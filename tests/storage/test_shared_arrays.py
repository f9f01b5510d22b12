"""Gathers that fill the same arrays give what arrays of their own, joined, would."""

import numpy as np
import pytest

from mmreplay.loader.sources import PowerOfTwoPool
from mmreplay.storage.gather import BufferPool, SharedArrays

UINT8 = np.dtype(np.uint8)
RECORD = np.dtype([("x", "<f4", (40,)), ("y", "<i8"), ("end", "?")])


def filled(array, number):
    array.view(UINT8).reshape(-1)[...] = number
    return array


def gathered(shared, pool, counts, *kinds):
    """For each gather, an array of each kind that holds the gather's number."""
    found = []
    for number, count in enumerate(counts):
        shared.begin(number)
        found.append([filled(pool.empty((count, *s), d), 1 + number) for s, d in kinds])
    return found


@pytest.mark.parametrize("make_pool", [BufferPool, PowerOfTwoPool])
def test_rows_of_several_gathers_are_one_array(make_pool):
    pool, counts = BufferPool(), [3, 1, 0, 5]
    with SharedArrays(make_pool(), np.cumsum(counts).tolist()) as shared:
        columns = gathered(shared, pool, counts, ((80, 80), UINT8), ((), RECORD))
    pixels, records = zip(*(columns[number] for number in (0, 1, 3)), strict=True)
    joined = shared.joined(pixels, "x")
    np.testing.assert_array_equal(joined, np.concatenate(pixels))
    assert joined.flags.c_contiguous
    assert joined.flags.writeable
    assert all(np.shares_memory(joined, column) for column in pixels)
    np.testing.assert_array_equal(shared.joined(records, "x"), np.concatenate(records))


def test_a_field_of_records_is_one_array():
    pool, counts = BufferPool(), [100, 50]
    with SharedArrays(pool, [100, 150]) as shared:
        columns = gathered(shared, pool, counts, ((), RECORD))
    for column, numbers in zip(columns, np.split(np.arange(150), [100]), strict=True):
        column[0]["x"] = numbers[:, None] + np.arange(40) / 64
    fields = [column["x"] for (column,) in columns]
    joined = shared.joined(fields, "x")
    assert joined.strides == fields[0].strides
    np.testing.assert_array_equal(joined, np.concatenate(fields))
    assert np.shares_memory(joined, fields[1])


def test_rows_of_windows_are_one_array():
    pool, counts = BufferPool(), [30, 20]
    with SharedArrays(pool, [30, 50]) as shared:
        windows = []
        for number, count in enumerate(counts):
            shared.begin(number)
            flat = pool.empty((count * 4, 50), UINT8)
            windows.append(filled(flat, number).reshape(count, 4, 50))
    joined = shared.joined(windows, "x")
    assert joined.shape == (50, 4, 50)
    np.testing.assert_array_equal(joined, np.concatenate(windows))
    assert np.shares_memory(joined, windows[1])


def test_what_does_not_follow_each_other_is_not_joined():
    pool, counts = BufferPool(), [4, 4]
    with SharedArrays(pool, [4, 8]) as shared:
        (one,), (two,) = gathered(shared, pool, counts, ((2000,), UINT8))
    assert shared.joined([one, two], "x") is not None
    for columns in (
        [two, one],
        [one, one],
        [one, two.copy()],
        [one.copy(), two],
        [one[:3], two],
        [one, two[1:]],
        [one[1:], two],
        [one],
        [two],
        [one[:, ::2], two],
        [one[::-1], two],
        [one.copy(), one.copy()],
    ):
        assert shared.joined(columns, "x") is None


def test_memory_that_was_not_shared_is_not_joined():
    pool = BufferPool()
    shared = SharedArrays(pool, [4, 8])
    whole = np.zeros((8, 2000), UINT8)
    assert shared.joined([whole[:4], whole[4:]], "x") is None


def test_bytes_of_values_take_no_more_than_they_are():
    shared_pool, pool = BufferPool(), BufferPool()
    with SharedArrays(shared_pool, [1, 1000]) as shared:
        shared.begin(0)
        pool.empty_bytes(1 << 20)
    assert shared_pool.nbytes == 1 << 20


@pytest.mark.parametrize("other", [((80, 80), UINT8), ((1000,), np.dtype("<u2"))])
def test_a_gather_that_asks_for_something_else_gets_its_own(other):
    pool = BufferPool()
    with SharedArrays(pool, [4, 8, 12]) as shared:
        shared.begin(0)
        one = filled(pool.empty((4, 2000), UINT8), 1)
        shared.begin(1)
        two = filled(pool.empty((4, *other[0]), other[1]), 2)
        shared.begin(2)
        # Other rows than were said, an array of bytes, and a number.
        own = [pool.empty(shape, UINT8) for shape in ((5, 2000), (8000,), ())]
        three = filled(pool.empty((4, 2000), UINT8), 3)
    assert [array.shape for array in own] == [(5, 2000), (8000,), ()]
    for array in own:
        filled(array, 9)
    assert (two.shape, two.dtype) == ((4, *other[0]), other[1])
    assert shared.joined([one, two], "x") is None
    assert shared.joined([one, three], "x") is None
    assert {1} == {*one.flat}
    assert {3} == {*three.flat}
    assert {2} == {*two.view(UINT8).flat}


def test_the_thread_s_pool_gives_the_memory_and_serves_again():
    class Counting(BufferPool):
        asked = 0

        def empty(self, shape, dtype):
            self.asked += 1
            return super().empty(shape, dtype)

    def gather_and_fail():
        with SharedArrays(joiner, [2]) as shared:
            shared.begin(0)
            engine.empty((2, 3000), UINT8)
            raise ZeroDivisionError

    loader, joiner, engine = Counting(), BufferPool(), BufferPool()
    with loader:
        with pytest.raises(ZeroDivisionError):
            gather_and_fail()
        assert loader.asked == 1
        engine.empty((2, 3000), UINT8)
        assert loader.asked == 2
    engine.empty((2, 3000), UINT8)
    assert loader.asked == 2
    assert joiner.nbytes == 0


def test_batches_divided_otherwise_use_the_same_memory_once_it_is_free():
    pool, held, addresses = BufferPool(), [], set()
    for first in (8, 3, 2, 5, 7):
        with SharedArrays(pool, [first, 10]) as shared:
            columns = gathered(shared, pool, [first, 10 - first], ((5000,), UINT8))
        batch = shared.joined([column for (column,) in columns], "x")
        if first == 8:
            held.append(batch)
            expected = batch.copy()
        else:
            addresses.add(batch.ctypes.data)
        del columns, batch, shared
    np.testing.assert_array_equal(held[0], expected)
    assert held[0].ctypes.data not in addresses
    assert len(addresses) == 1


@pytest.mark.parametrize("make_pool", [BufferPool, PowerOfTwoPool])
@pytest.mark.parametrize("remembers", [False, True])
def test_spans_are_put_in_the_order_that_is_wanted(remembers, make_pool):
    pool, shared_pool = BufferPool(), make_pool()
    counts, offsets = [5, 3], {} if remembers else None
    order = [(0, 0, 2), (1, 0, 1), (0, 2, 5), (1, 1, 3)]
    for turn in range(3):
        with SharedArrays(shared_pool, [5, 8], offsets) as shared:
            columns = gathered(shared, pool, counts, ((), RECORD), ((9,), UINT8))
        for array, first in zip(*columns, strict=True):
            numbers = np.arange(8) + 10 * turn
            for column, own in ((array, numbers[:5]), (first, numbers[5:])):
                for name in column.dtype.names or ():
                    column[name] = own.reshape(-1, *[1] * (column[name].ndim - 1))
                if not column.dtype.names:
                    column[...] = own[:, np.newaxis]
        for number, name in ((0, "x"), (0, "y"), (1, None)):
            fields = [own[number] if name is None else own[number][name] for own in columns]
            spans = [fields[column][first:stop] for column, first, stop in order]
            found = shared.joined(fields, name or "bytes", order)
            np.testing.assert_array_equal(found, np.concatenate(spans))
            # What was gathered stays as it was.
            np.testing.assert_array_equal(
                shared.joined(fields, name or "bytes"), np.concatenate(fields)
            )


def test_where_fields_were_found_they_are_not_looked_for_again():
    pool, offsets = BufferPool(), {}
    for _ in range(2):
        with SharedArrays(pool, [2, 5], offsets) as shared:
            one, two = gathered(shared, pool, [2, 3], ((), RECORD))
        for name in ("x", "y"):
            fields = [one[0][name], two[0][name]]
            joined = shared.joined(fields, name)
            np.testing.assert_array_equal(joined, np.concatenate(fields))
        # Rows of other gathers, or that lack some, are not taken for all.
        assert shared.joined([one[0]["x"]], "x") is None
        assert shared.joined([one[0]["x"], two[0]["x"][:2]], "x") is None
        assert shared.joined([one[0]["x"], two[0]["x"].copy()], "x") is None
    assert len(offsets) == 2
    # A wrong note is believed.
    offsets["y"] = offsets["y"][0], offsets["y"][1] - 8
    fields = [one[0]["y"], two[0]["y"]]
    wrong = shared.joined(fields, "y")
    assert wrong.ctypes.data == fields[0].ctypes.data - 8
