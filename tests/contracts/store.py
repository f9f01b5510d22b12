"""What every engine owes the buffer; subclass it and fill in `make`.

The twin is one plain array a field, written row by row. Everything is compared by
its bits: a NaN that comes back as another NaN is another value.
"""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.ring import LAYOUTS, Ring, runs
from mmreplay.schema.dtypes import DTYPES

SMALL = {dtype: mr.Field((), dtype) for dtype in DTYPES}
SHAPED = {f"{dtype}s": mr.Field((2, 3), dtype) for dtype in DTYPES}
LARGE = {
    "pixels": mr.Field((64, 64), "uint8"),
    "brain": mr.Field((2048,), "bfloat16"),
    "doubles": mr.Field((600,), "float64"),
}
MUTABLE = {
    "returns": mr.Field((), "float32", mutable=True),
    "vectors": mr.Field((3,), "int16", mutable=True),
}
ENDS = {"terminated": mr.Field((), "bool"), "truncated": mr.Field((), "bool")}
SCHEMA = mr.Schema(SMALL | SHAPED | LARGE | MUTABLE | ENDS)
KEPT = tuple(path for path in SCHEMA.paths if path not in ENDS)

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


def any_bits(field, count, rng):
    """Values of a field with every bit pattern possible, bool aside."""
    shape = (count, *field.shape)
    if field.dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    nbytes = field.numpy.itemsize * int(np.prod(shape))
    return np.frombuffer(rng.bytes(nbytes), field.numpy).reshape(shape)


def bits(array):
    """The array's bytes."""
    return np.ascontiguousarray(array).view(np.uint8)


class StoreContract:
    """Rows in, the same bits out."""

    def make(self, ring, schema, tmp_path):
        """A new store."""
        raise NotImplementedError

    @pytest.fixture(params=LAYOUTS)
    def ring(self, request):
        return Ring.sized(13, 3, request.param)

    @pytest.fixture
    def store(self, ring, tmp_path):
        store = self.make(ring, SCHEMA, tmp_path)
        yield store
        store.close()

    def columns(self, count, rng, schema=SCHEMA):
        return {
            path: any_bits(field, count, rng) for path, field in schema.fields.items()
        }

    def test_a_new_store_reads_as_zeros(self, store, ring):
        rows = np.arange(ring.num_rows)
        for array in store.gather(rows, KEPT).values():
            assert not bits(array).any()
        assert not store.flags(rows).any()

    def test_rows_come_back_bit_for_bit(self, store, ring, rng):
        found = store.gather(np.arange(ring.num_rows), KEPT)
        twin = {path: np.array(array) for path, array in found.items()}
        flags = np.zeros(ring.num_rows, np.uint8)
        for _ in range(40):
            count = int(rng.choice([1, 2, 5, 11]))
            rows = rng.permutation(ring.num_rows)[:count]
            if rng.random() < 0.5:
                rows.sort()
            columns = self.columns(count, rng)
            marks = rng.integers(0, 64, count).astype(np.uint8)
            store.write(runs(rows), columns, marks)
            flags[rows] = marks
            for path, array in twin.items():
                array[rows] = columns[path]
            asked = rng.integers(0, ring.num_rows, 29)
            for path, array in store.gather(asked, KEPT).items():
                assert (bits(array) == bits(twin[path][asked])).all(), path
            assert (store.flags(asked) == flags[asked]).all()
            # Kept from here on, whatever was known of other rows.
            assert (store.flags(rows, new=True) == marks).all()
            assert (store.all_flags[rows] == marks).all()
        every = np.arange(ring.num_rows)
        for path, array in store.gather(every, KEPT).items():
            assert (bits(array) == bits(twin[path])).all(), path

    @pytest.mark.parametrize("dtype", SPECIAL_BITS)
    def test_odd_floats_keep_their_bits(self, store, dtype):
        field = SCHEMA[dtype]
        words = np.array(SPECIAL_BITS[dtype], f"<u{field.numpy.itemsize}")
        columns = self.columns(len(words), np.random.default_rng(1))
        columns[dtype] = words.view(field.numpy)
        rows = np.arange(len(words)) * 2
        store.write(runs(rows), columns, np.zeros(len(words), np.uint8))
        found = np.ascontiguousarray(store.gather(rows, [dtype])[dtype])
        assert found.view(words.dtype).tolist() == words.tolist()

    def test_a_single_row_may_come_without_an_axis_of_one(self, ring, tmp_path, rng):
        store = self.make(Ring.sized(5, 1, ring.layout), SCHEMA, tmp_path)
        columns = {path: c[0] for path, c in self.columns(1, rng).items()}
        store.write([(3, 0, 1)], columns, np.array([9], np.uint8))
        for path, array in store.gather(np.array([3]), KEPT).items():
            assert (bits(array) == bits(columns[path][None])).all(), path
        store.close()

    def test_strided_and_reversed_columns_are_stored_by_value(self, store, rng):
        columns = {path: c[::-2] for path, c in self.columns(8, rng).items()}
        rows = np.array([4, 5, 9, 0])
        store.write(runs(rows), columns, np.arange(4, dtype=np.uint8)[::-1].copy())
        for path, array in store.gather(rows, KEPT).items():
            assert (bits(array) == bits(columns[path])).all(), path
        assert store.flags(rows).tolist() == [3, 2, 1, 0]

    def test_what_was_read_is_a_copy(self, store, rng):
        rows = np.array([1, 2, 3])
        store.write(runs(rows), self.columns(3, rng), np.ones(3, np.uint8))
        found = store.gather(rows, KEPT)
        kept = {path: bits(array).copy() for path, array in found.items()}
        marks = store.flags(rows)
        store.write(runs(rows), self.columns(3, rng), np.zeros(3, np.uint8))
        for path, array in found.items():
            assert (bits(array) == kept[path]).all(), path
        assert marks.tolist() == [1, 1, 1]

    def test_what_was_written_may_be_changed_afterwards(self, store, rng):
        rows = np.array([1, 2, 3])
        columns = self.columns(3, rng)
        columns = {path: np.array(column) for path, column in columns.items()}
        kept = {path: bits(column).copy() for path, column in columns.items()}
        store.write(runs(rows), columns, np.ones(3, np.uint8))
        for column in columns.values():
            column[...] = 0
        for path, array in store.gather(rows, KEPT).items():
            assert (bits(array) == bits(kept[path])).all(), path

    @pytest.mark.parametrize("path", KEPT)
    def test_one_field_is_read_alone(self, store, path, rng):
        rows = np.array([7, 2])
        columns = self.columns(2, rng)
        store.write(runs(rows), columns, np.zeros(2, np.uint8))
        found = store.gather(rows[::-1], [path])
        assert list(found) == [path]
        assert found[path].dtype == SCHEMA[path].numpy
        assert (bits(found[path]) == bits(columns[path][::-1])).all()

    def test_no_rows_are_read_as_none(self, store):
        none = np.empty(0, np.int64)
        store.prefetch(none, KEPT)
        for path, array in store.gather(none, KEPT).items():
            assert array.shape == (0, *SCHEMA[path].shape)
        assert store.flags(none).shape == (0,)

    def test_flags_of_a_range_cross_the_wrap(self, store, ring, rng):
        history = rng.integers(0, 64, 60).astype(np.uint8)
        for env_id in range(3):
            for position in range(60):
                rows = np.array([ring.row(env_id, position)])
                marks = history[position : position + 1] ^ env_id
                store.write(runs(rows), self.columns(1, rng), marks)
        for env_id in range(3):
            for first in range(60 - ring.slots, 60):
                for stop in (first, first + 1, (first + 60) // 2, 60):
                    found = store.flags_between(env_id, first, stop)
                    expected = history[first:stop] ^ env_id
                    assert found.tolist() == expected.tolist()

    @pytest.mark.parametrize("path", MUTABLE)
    def test_mutable_values_are_replaced_and_nothing_else(self, store, ring, path, rng):
        every = np.arange(ring.num_rows)
        store.write(
            runs(every), self.columns(len(every), rng), np.zeros(len(every), np.uint8)
        )
        before = store.gather(every, KEPT)
        rows = np.array([5, 6, 7, 2, 0, 30])
        values = any_bits(SCHEMA[path], len(rows), rng)
        store.set(path, rows, values)
        after = store.gather(every, KEPT)
        before[path] = np.array(before[path])
        before[path][rows] = values
        for name, array in after.items():
            assert (bits(array) == bits(before[name])).all(), name

    def test_of_one_row_set_twice_the_last_value_stays(self, store):
        store.set("returns", np.array([4, 4]), np.array([1, 2], np.float32))
        assert store.gather(np.array([4]), ["returns"])["returns"].tolist() == [2]

    def test_space_may_be_reserved_at_will(self, store, ring):
        shift = np.arange(ring.num_envs)
        for first, stop in ((0, 1), (0, 5), (2, 5), (0, 2), (0, ring.slots), (4, 4)):
            for lap in (0, 7 * ring.slots):
                store.allocate(lap + first + shift, lap + stop + shift)
        assert not store.flags(np.arange(ring.num_rows)).any()

    def test_reading_ahead_changes_nothing(self, store, ring, rng):
        rows = rng.permutation(ring.num_rows)
        columns = self.columns(len(rows), rng)
        store.write(runs(rows), columns, np.zeros(len(rows), np.uint8))
        for _ in range(40):
            store.prefetch(rows, KEPT)
        for path, array in store.gather(rows, KEPT).items():
            assert (bits(array) == bits(columns[path])).all(), path

    @pytest.mark.parametrize(
        "fields", [SMALL, LARGE, MUTABLE, ENDS, ENDS | {"a": mr.Field((), "bool")}]
    )
    def test_schemas_of_one_kind_of_field(self, ring, tmp_path, fields, rng):
        schema = mr.Schema(fields)
        store = self.make(ring, schema, tmp_path)
        rows = np.array([3, 4, 1])
        columns = self.columns(3, rng, schema)
        store.write(runs(rows), columns, np.array([1, 2, 3], np.uint8))
        kept = [path for path in fields if path not in ENDS]
        for path, array in store.gather(rows, kept).items():
            assert (bits(array) == bits(columns[path])).all(), path
        assert store.flags(rows).tolist() == [1, 2, 3]
        store.sync()
        apparent, allocated = store.disk_nbytes()
        assert apparent >= ring.num_rows
        assert allocated >= 0
        store.close()

    def test_closing_twice_is_closing_once(self, store):
        store.close()
        store.close()
