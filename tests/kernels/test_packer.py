"""Both twins of the packer: what needs no conversion, with the bytes of numpy."""

import tracemalloc

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.schema.dtypes import DTYPES
from mmreplay.storage import write_path
from mmreplay.storage.layout import record_layout
from mmreplay.storage.write_path import LEAST_NBYTES

FIELDS = {
    **{dtype: mr.Field((), dtype) for dtype in DTYPES},
    **{f"{dtype}s": mr.Field((2, 3), dtype) for dtype in DTYPES},
    "exact": mr.Field((), "float32", exact=True),
    "large": mr.Field((600,), "float64"),
    "mutable": mr.Field((), "float32", mutable=True),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}


SCHEMA = mr.Schema(FIELDS)


PLACED = record_layout(SCHEMA)


@pytest.fixture
def packer(rows, monkeypatch):
    monkeypatch.setattr(write_path, "rows", rows)
    return write_path.packer(SCHEMA, PLACED, 1)


def plain():
    return {path: np.zeros(f.shape, f.numpy) for path, f in FIELDS.items()}


def packed(step):
    """The record as numpy assigns it."""
    found = np.zeros(1, PLACED.record)
    for path in PLACED.record.names:
        found[path] = step[path]
    return found.tobytes()


SCALARS = {
    "int8": [-128, 127, np.int8(-3)],
    "uint8": [0, 255, np.uint8(200)],
    "int16": [-(1 << 15), (1 << 15) - 1, np.int16(-3)],
    "uint16": [0, (1 << 16) - 1, np.uint16(9)],
    "int32": [-(1 << 31), (1 << 31) - 1, np.int32(-3)],
    "uint32": [0, (1 << 32) - 1, np.uint32(9)],
    "int64": [-(1 << 63), (1 << 63) - 1, np.int64(-3)],
    "uint64": [0, (1 << 64) - 1, np.uint64(9)],
    "float16": [np.float16(1.5), np.float16("nan")],
    "float32": [0.1, -1e38, 1e-45, 1e-40, -0.0, 3.4028234663852886e38, np.float64(0.3),
                np.float32(0.7), np.float32("inf")],
    "float64": [0.1, -1.7e308, 5e-324, np.float64("nan"), -0.0],
    "exact": [np.float32(0.3), np.float32("nan")],
    "bool": [True, False, np.True_, np.False_],
}  # fmt: skip


ODD = {
    "int8": [-129, 128, True, 1.0, np.int16(3), "1", None],
    "uint8": [-1, 256],
    "int32": [1 << 31, -(1 << 31) - 1],
    "uint32": [-1, 1 << 32],
    "int64": [1 << 63, -(1 << 63) - 1, 1 << 99],
    "uint64": [-1, 1 << 64],
    "float16": [0.5, 1],
    "bfloat16": [0.5, np.uint16(3), np.float32(1)],
    "float32": [1, 3.5e38, -1e39, float("nan"), float("inf"), -float("inf"), True,
                np.float16(1), [0.5]],
    "float64": [1, float("nan"), float("inf"), np.float32(0.5)],
    "exact": [0.5, np.float64(0.5)],
    "bool": [1, 0.0, np.int8(1)],
    "mutable": [0.5, np.float32(0.5)],
    "terminated": [1, None, np.float32(0)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value"), [(p, v) for p, values in SCALARS.items() for v in values]
)
def test_a_plain_scalar_is_taken_as_numpy_assigns_it(packer, path, value):
    step = plain() | {path: value}
    assert packer.step(step) == 0
    assert bytes(packer.record) == packed(step)


@pytest.mark.parametrize(
    ("path", "value"), [(p, v) for p, values in ODD.items() for v in values]
)
def test_a_value_that_must_be_looked_at_is_left(packer, path, value):
    assert packer.step(plain() | {path: value}) == -1


def test_arrays_are_taken_with_every_bit(packer, rng):
    for _ in range(20):
        step = {
            path: np.frombuffer(rng.bytes(f.nbytes), f.numpy).reshape(f.shape)
            for path, f in FIELDS.items()
        }
        for path in ("bool", "bools", "terminated", "truncated"):
            step[path] = step[path].view(np.uint8) % 2 == 1
        one = {path: value[None] for path, value in step.items()}
        marks = 2 * int(step["terminated"]) + 4 * int(step["truncated"])
        for given in (step, one, dict(reversed(step.items()))):
            assert packer.step(given) == marks
            assert bytes(packer.record) == packed(step)


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((3, 2), "f4"),
        np.zeros(6, "f4"),
        np.zeros((2, 2, 3), "f4"),
        np.zeros((1, 1, 2, 3), "f4"),
        np.zeros((2, 3), "f8"),
        np.zeros((2, 3), ">f4"),
        np.zeros((2, 3), "u4"),
        np.zeros((2, 6), "f4")[:, ::2],
        np.zeros((3, 2), "f4").T,
        np.ma.zeros((2, 3), "f4"),
        [[0.0] * 3] * 2,
        0.5,
    ],
)
def test_an_array_that_must_be_looked_at_is_left(packer, value):
    assert packer.step(plain() | {"float32s": value}) == -1


def test_a_step_of_other_names_is_left(packer):
    step = plain()
    assert packer.step(step | {"more": 1}) == -1
    assert packer.step({p: v for p, v in step.items() if p != "int8"}) == -1
    renamed = {p: v for p, v in step.items() if p != "int8"} | {"int9": step["int8"]}
    assert packer.step(renamed) == -1
    assert packer.step(mr.Schema(FIELDS).fields | {}) == -1
    assert packer.step(type("Mine", (dict,), {})(step)) == -1


@pytest.mark.parametrize("terminated", [False, True, np.True_, np.ones((), bool)])
@pytest.mark.parametrize("truncated", [False, True, np.ones(1, bool)])
def test_ends_are_told(packer, terminated, truncated):
    step = plain() | {"terminated": terminated, "truncated": truncated}
    assert packer.step(step) == 2 * bool(terminated) + 4 * bool(truncated)


def test_members_that_do_not_fit_are_refused(rows):
    def make(kind, shape, offset):
        member = ("a", np.dtype("f4"), None, kind, 4, shape, offset, 0)
        return rows.Packer((member,), 8, 1, 8, np.ndarray, np.float64)

    make("f", (), 4)
    with pytest.raises(ValueError, match="Packer: 'a' ends outside the record"):
        make("", (2,), 4)
    with pytest.raises(ValueError, match="Packer: 'a' takes no scalars"):
        make("f", (2,), 0)


def test_a_record_that_is_held_keeps_its_size(packer):
    with pytest.raises(BufferError):
        packer.record.append(1)


def arrays(lead, rng):
    found = {
        path: np.frombuffer(rng.bytes(int(np.prod(lead)) * f.nbytes), f.numpy).reshape(
            (*lead, *f.shape)
        )
        for path, f in FIELDS.items()
    }
    for path in ("bool", "bools", "terminated", "truncated"):
        found[path] = found[path].view(np.uint8) % 2 == 1
    return found


@pytest.mark.parametrize(
    ("num_envs", "lead", "steps"),
    [
        (1, (5,), 5),
        (1, (5, 1), 5),
        (1, (1,), 1),
        (1, (0,), -1),
        (1, (), -1),
        (1, (5, 2), -1),
        (1, (1, 5, 1), -1),
        (3, (5, 3), 5),
        (3, (5,), -1),
        (3, (3,), -1),
        (3, (5, 4), -1),
    ],
)
def test_the_steps_of_a_plain_block_are_counted(
    rows, monkeypatch, num_envs, lead, steps, rng
):
    monkeypatch.setattr(write_path, "rows", rows)
    packer = write_path.packer(SCHEMA, PLACED, num_envs)
    assert packer.block(arrays(lead, rng)) == steps


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("float32", np.zeros(4, "f4")),
        ("float32", np.zeros(10, "f4")[::2]),
        ("float32", np.zeros(5, "f8")),
        ("float32", [0.0] * 5),
        ("float32", np.float32(0)),
        ("float32s", np.zeros((5, 3, 2), "f4")),
        ("float32s", np.zeros((5, 2), "f4")),
        ("mutable", np.zeros((5, 2), "f4")),
        ("more", np.zeros(5)),
    ],
)
def test_a_block_that_must_be_looked_at_is_left(packer, path, value, rng):
    block = arrays((5,), rng)
    assert packer.block(block) == 5
    assert packer.block(block | {path: value}) == -1
    del block["int8"]
    assert packer.block(block) == -1


@pytest.fixture
def wide(rows, monkeypatch):
    """A packer of three environments."""
    monkeypatch.setattr(write_path, "rows", rows)
    return write_path.packer(SCHEMA, PLACED, 3)


def all_packed(step):
    """The records of all environments as numpy assigns them."""
    found = np.zeros(3, PLACED.record)
    for path in PLACED.record.names:
        found[path] = step[path]
    return found.tobytes()


def test_a_step_of_all_environments_is_told_by_its_shapes(wide, rng):
    step = arrays((3,), rng)
    assert wide.wide(step) >= 0
    assert wide.wide(arrays((2,), rng)) == -1
    assert wide.wide(arrays((1, 3), rng)) == -1
    assert wide.wide(arrays((), rng)) == -1
    for value in (np.zeros(3), np.zeros(4, "f4"), np.zeros((3, 1), "f4"), [0.0] * 3):
        assert wide.wide(step | {"float32": value}) == -1
    assert wide.wide(step | {"float32s": np.zeros((3, 3, 2), "f4")}) == -1
    assert wide.wide(step | {"more": np.zeros(3)}) == -1
    assert wide.wide(type("Mine", (dict,), {})(step)) == -1
    del step["int8"]
    assert wide.wide(step) == -1


def test_a_step_of_all_environments_is_packed_with_every_bit(wide, rng):
    for _ in range(20):
        step = {
            path: np.frombuffer(rng.bytes(3 * f.nbytes), f.numpy).reshape(3, *f.shape)
            for path, f in FIELDS.items()
        }
        for path in ("bool", "bools", "terminated", "truncated"):
            step[path] = step[path].view(np.uint8) % 2 == 1
        # Of any strides: of the environments, of the values, of both, and none.
        views = {
            "float32": step["float32"].repeat(2)[::2],
            "int64": step["int64"][::-1].copy()[::-1],
            "int8": step["int8"][::-1],
            "uint16": np.broadcast_to(step["uint16"][:1], (3,)),
            "float64s": step["float64s"].repeat(3, 0)[::3],
            "float32s": np.asfortranarray(step["float32s"]),
            "int16s": step["int16s"][:, ::-1],
            "bools": np.broadcast_to(step["bools"][:1, :1, :1], (3, 2, 3)),
            "terminated": step["terminated"].repeat(5)[::5],
        }
        for given in (step, step | views, dict(reversed(step.items()))):
            marks = 2 * given["terminated"].any() + 4 * given["truncated"].any()
            assert wide.wide(given) == marks
            assert bytes(wide.rows) == all_packed(given)


def test_ends_of_any_environment_are_told(wide, rng):
    step = arrays((3,), rng)
    for number in range(3):
        for path, mark in (("terminated", 2), ("truncated", 4)):
            none = {"terminated": np.zeros(3, bool), "truncated": np.zeros(3, bool)}
            none[path][number] = True
            assert wide.wide(step | none) == mark


def test_long_values_are_looked_at_and_not_copied(wide, rng):
    """Such as frames whose axes were moved, which are copied where they are written."""
    step = arrays((3,), rng)
    step["large"] = np.repeat(step["large"], 2, 1)[:, ::2]
    wide.wide(step)
    tracemalloc.start()
    try:
        assert wide.wide(step) >= 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < step["large"].nbytes


def test_records_too_long_to_be_packed_by_the_look_are_looked_at(
    rows, monkeypatch, rng
):
    monkeypatch.setattr(write_path, "rows", rows)
    count = -(-LEAST_NBYTES // PLACED.stride)
    for num_envs, packed in ((count - 1, True), (count, False)):
        packer = write_path.packer(SCHEMA, PLACED, num_envs)
        assert len(packer.rows) == (num_envs * PLACED.stride if packed else 0)
        assert packer.wide(arrays((num_envs,), rng)) >= 0
        assert packer.wide(arrays((num_envs + 1,), rng)) == -1


def test_rows_are_packed_where_they_belong(packer, rng):
    block = arrays((40,), rng)
    stride = PLACED.stride
    out = np.full((30, stride), 0xEE, np.uint8)
    packer.pack(out, block, 7, 33)
    expected = np.full((30, stride), 0xEE, np.uint8)
    assert PLACED.record.fields is not None
    for path, (dtype, offset, *_) in PLACED.record.fields.items():
        raw = block[path].reshape(40, -1).view(np.uint8)[7:33]
        expected[:26, offset : offset + dtype.itemsize] = raw
    assert np.array_equal(out, expected)
    packer.pack(out, block, 3, 3)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("skew", [0, 8, 40, 63])
@pytest.mark.parametrize("nbytes", [1, 4, 13, 68, 1000, 3000])
@pytest.mark.parametrize("count", [1, 2, 60])
def test_what_is_streamed_is_what_is_packed(
    rows, monkeypatch, nbytes, count, skew, rng
):
    monkeypatch.setattr(write_path, "rows", rows)
    schema = mr.Schema(
        {"a": mr.Field((nbytes,), "uint8"), "b": mr.Field((), "float32")}
    )
    placed = record_layout(schema)
    packer = write_path.packer(schema, placed, 1)
    given = {
        "a": rng.integers(0, 256, (70, nbytes), np.uint8),
        "b": rng.random(70).astype(np.float32),
    }
    expected = np.zeros((count, placed.stride), np.uint8)
    packer.pack(expected, given, 5, 5 + count)
    # Whatever stood there, and wherever lines of the cache begin.
    room = np.full(expected.size + 128, 0xEE, np.uint8)
    begin = -room.ctypes.data % 64 + skew
    target = memoryview(room)[begin : begin + expected.size]
    packer.stream(target, given, 5, 5 + count)
    assert bytes(target) == expected.tobytes()
    assert (room[:begin] == 0xEE).all()
    assert (room[begin + expected.size :] == 0xEE).all()


def test_arrays_that_are_not_contiguous_are_packed_by_value(packer, rng):
    block = arrays((40,), rng)
    apart = {path: np.repeat(array, 2, 0)[::2] for path, array in block.items()}
    out = np.zeros((2, 40, PLACED.stride), np.uint8)
    packer.pack(out[0], block, 0, 40)
    packer.pack(out[1], apart, 0, 40)
    assert np.array_equal(out[0], out[1])


@pytest.mark.parametrize("nbytes", [*range(1, 40), 63, 64, 65, 300])
def test_values_of_every_size_are_packed_whole(rows, monkeypatch, nbytes, rng):
    monkeypatch.setattr(write_path, "rows", rows)
    schema = mr.Schema({"a": mr.Field((nbytes,), "uint8"), "b": mr.Field((), "uint8")})
    placed = record_layout(schema)
    given = {
        "a": rng.integers(0, 256, (9, nbytes), np.uint8),
        "b": rng.integers(0, 256, 9, np.uint8),
    }
    out = np.zeros((9, placed.stride), np.uint8)
    write_path.packer(schema, placed, 1).pack(out, given, 0, 9)
    found = out.reshape(-1).view(placed.record)
    assert np.array_equal(found["a"], given["a"])
    assert np.array_equal(found["b"], given["b"])


@pytest.mark.parametrize(("first", "stop"), [(-1, 2), (3, 2), (0, 5), (0, 41)])
def test_rows_that_do_not_fit_are_not_packed(packer, first, stop, rng):
    block = arrays((40,), rng)
    out = np.zeros((4, PLACED.stride), np.uint8)
    with pytest.raises(ValueError, match=r"^pack: got \d+ bytes for .*, expected"):
        packer.pack(out, block, first, stop)
    block["int8"] = block["int8"][:2]
    with pytest.raises(
        ValueError, match=r"^pack: got 2 bytes for 3 rows of 1 .*'int8'"
    ):
        packer.pack(out, block, 0, 3)
    assert not out.any()
