"""Both twins of the packer: what needs no conversion, with the bytes of numpy."""

import sys
import tracemalloc

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.nesting import unflatten
from mmreplay.schema.dtypes import DTYPES
from mmreplay.storage import layout
from mmreplay.storage.layout import PACKED_NBYTES, record_layout

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
    monkeypatch.setattr(layout, "rows", rows)
    return layout.packer(SCHEMA, PLACED, 1)


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
    "float32": [
        0.1,
        -1e38,
        1e-45,
        1e-40,
        -0.0,
        3.4028234663852886e38,
        np.float64(0.3),
        np.float32(0.7),
        np.float32("inf"),
    ],
    "float64": [0.1, -1.7e308, 5e-324, np.float64("nan"), -0.0],
    "exact": [np.float32(0.3), np.float32("nan")],
    "bool": [True, False, np.True_, np.False_],
}


ODD = {
    "int8": [-129, 128, True, 1.0, np.int16(3), "1", None],
    "uint8": [-1, 256],
    "int32": [1 << 31, -(1 << 31) - 1],
    "uint32": [-1, 1 << 32],
    "int64": [1 << 63, -(1 << 63) - 1, 1 << 99],
    "uint64": [-1, 1 << 64],
    "float16": [0.5, 1],
    "bfloat16": [0.5, np.uint16(3), np.float32(1)],
    "float32": [
        1,
        3.5e38,
        -1e39,
        float("nan"),
        float("inf"),
        -float("inf"),
        True,
        np.float16(1),
        [0.5],
    ],
    "float64": [1, float("nan"), float("inf"), np.float32(0.5)],
    "exact": [0.5, np.float64(0.5)],
    "bool": [1, 0.0, np.int8(1)],
    "mutable": [0.5, np.float32(0.5)],
    "terminated": [1, None, np.float32(0)],
}


@pytest.mark.parametrize(
    ("path", "value"), [(p, v) for p, values in SCALARS.items() for v in values]
)
def test_a_plain_scalar_is_packed_as_numpy_assigns_it(packer, path, value):
    step = plain() | {path: value}
    assert packer.prepare(step) == 0
    assert bytes(packer.rows) == packed(step)


@pytest.mark.parametrize(("path", "value"), [(p, v) for p, values in ODD.items() for v in values])
def test_a_value_that_must_be_looked_at_is_left(packer, path, value):
    assert packer.prepare(plain() | {path: value}) == -1


def test_arrays_are_packed_with_every_bit(packer, rng):
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
            assert packer.prepare(given) == marks
            assert bytes(packer.rows) == packed(step)


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
        np.ma.zeros((2, 3), "f4"),
        [[0.0] * 3] * 2,
        0.5,
    ],
)
def test_an_array_that_must_be_looked_at_is_left(packer, value):
    assert packer.prepare(plain() | {"float32s": value}) == -1


@pytest.mark.parametrize(
    "view",
    [lambda a: np.repeat(a, 2, 1)[:, ::2], np.asfortranarray, lambda a: a[::-1]],
    ids=["apart", "transposed", "reversed"],
)
def test_an_array_of_any_strides_is_packed_by_value(packer, rng, view):
    step = plain() | {"float32s": view(rng.random((2, 3)).astype("f4"))}
    assert packer.prepare(step) == 0
    assert bytes(packer.rows) == packed(step)


def test_a_step_of_other_names_is_left(packer):
    step = plain()
    assert packer.prepare(step | {"more": 1}) == -1
    assert packer.prepare({p: v for p, v in step.items() if p != "int8"}) == -1
    renamed = {p: v for p, v in step.items() if p != "int8"} | {"int9": step["int8"]}
    assert packer.prepare(renamed) == -1
    assert packer.prepare(mr.Schema(FIELDS).fields | {}) == -1
    assert packer.prepare(type("Mine", (dict,), {})(step)) == -1


@pytest.mark.parametrize("terminated", [False, True, np.True_, np.ones((), bool)])
@pytest.mark.parametrize("truncated", [False, True, np.ones(1, bool)])
def test_ends_are_reported(packer, terminated, truncated):
    step = plain() | {"terminated": terminated, "truncated": truncated}
    assert packer.prepare(step) == 2 * bool(terminated) + 4 * bool(truncated)


def test_members_that_do_not_fit_are_refused(rows):
    def make(kind, shape, offset, mark=0):
        member = ("a", np.dtype("f4"), None, kind, 4, shape, offset, mark)
        keys = layout.keys_of(["a"])
        return rows.RecordPacker((member,), keys, 8, 1, 8, np.ndarray, np.float64)

    make("f", (), 4)
    with pytest.raises(ValueError, match="RecordPacker: 'a' is no bool that ends a step"):
        make("f", (), 4, mark=2)
    with pytest.raises(ValueError, match="RecordPacker: 'a' ends outside the record"):
        make("", (2,), 4)
    with pytest.raises(ValueError, match="RecordPacker: 'a' takes no scalars"):
        make("f", (2,), 0)


@pytest.mark.parametrize(
    "keys",
    [
        (),
        (("", -1, 0),),
        (("", -1, 1), ("b", -1, 1)),
        (("", -1, 2), ("a", 0, 0)),
        (("", -1, 2), ("a", 0, 0), ("b", 0, 0)),
        (("", -1, 1), ("a", 0, 0), ("b", -1, 0)),
        (("", -1, 1), ("a", 1, 0)),
    ],
)
def test_keys_that_are_no_tree_of_the_fields_are_refused(rows, keys):
    member = ("a", np.dtype("f4"), None, "f", 4, (), 0, 0)
    with pytest.raises(ValueError, match=r"RecordPacker: .*key"):
        rows.RecordPacker((member,), keys, 8, 1, 8, np.ndarray, np.float64)


NESTED = {
    "observation/position": mr.Field((3,), "float32"),
    "observation/deep/er/still": mr.Field((), "float64"),
    "observation/deep/pixels": mr.Field((70, 70), "uint8"),
    "action": mr.Field((2,), "int32"),
    "done/terminated": mr.Field((), "bool"),
    "observation/later": mr.Field((), "float32"),
}
NESTED_SCHEMA = mr.Schema.from_flat(NESTED, {"terminated": "done/terminated"})


@pytest.fixture(params=[1, 3])
def nested(request, rows, monkeypatch, rng):
    """A packer of nested fields, a step as both mappings, and its record's bytes."""
    monkeypatch.setattr(layout, "rows", rows)
    placed = record_layout(NESTED_SCHEMA)
    packer = layout.packer(NESTED_SCHEMA, placed, request.param)
    lead = () if request.param == 1 else (request.param,)
    flat = {
        path: np.frombuffer(rng.bytes(field.nbytes * request.param), field.numpy).reshape(
            (*lead, *field.shape)
        )
        for path, field in NESTED.items()
        if path != "done/terminated"
    }
    flat["done/terminated"] = np.ones(lead, bool)
    expected = np.zeros(request.param, placed.record)
    for path in placed.record.names:
        expected[path] = flat[path]
    return packer, flat, expected.tobytes()


def test_a_nested_step_is_packed_as_the_flat_one(nested):
    packer, flat, expected = nested
    for step in (flat, unflatten(flat), unflatten(dict(reversed(flat.items())))):
        packer.rows[:] = bytes(len(packer.rows))
        assert packer.prepare(step) == 2
        assert bytes(packer.rows) == expected
        assert set(packer.ends) == {2}
        unpacked = packer.unpacked()
        assert list(unpacked) == ["observation/deep/pixels"]
        assert unpacked["observation/deep/pixels"] is flat["observation/deep/pixels"]
        assert packer.unpacked() == {}


def changed(step, *path, value=None):
    """A nested step in which one key's value is another, or gone."""
    made = {name: dict(v) if type(v) is dict else v for name, v in step.items()}
    branch = made
    for name in path[:-1]:
        branch[name] = dict(branch[name])
        branch = branch[name]
    if value is None:
        del branch[path[-1]]
    else:
        branch[path[-1]] = value
    return made


def test_a_nested_step_of_other_names_is_left(nested):
    packer, flat, _ = nested
    step, value = unflatten(flat), flat["observation/later"]
    assert packer.prepare(changed(step, "more", value=value)) == -1
    assert packer.prepare(changed(step, "observation", "more", value=value)) == -1
    assert packer.prepare(changed(step, "observation", "later")) == -1
    assert packer.prepare(changed(step, "observation", "later", value={})) == -1
    assert packer.prepare(changed(step, "observation", "deep", value=value)) == -1
    assert packer.prepare(changed(step, "observation", "deep", "er", value=(1,))) == -1
    assert packer.prepare({"observation": step["observation"]}) == -1
    kind = type("Mine", (dict,), {})
    inner = kind(step["observation"]["deep"])
    assert packer.prepare(changed(step, "observation", "deep", value=inner)) == -1
    mixed = {p: v for p, v in flat.items() if not p.startswith("done")}
    assert packer.prepare(mixed | {"done": {"terminated": value}}) == -1
    assert packer.unpacked() == {}
    assert packer.prepare(step) == 2


def test_values_that_are_not_packed_are_let_go(nested):
    packer, flat, _ = nested
    pixels = flat["observation/deep/pixels"].copy()
    count = sys.getrefcount(pixels)
    for _ in range(3):
        assert packer.prepare(flat | {"observation/deep/pixels": pixels}) == 2
        assert sys.getrefcount(pixels) == count + 1
        assert packer.prepare(flat | {"action": None}) == -1
    packer.unpacked()
    assert sys.getrefcount(pixels) == count


def test_the_columns_of_a_nested_block_are_returned_as_they_are(nested, rng):
    packer, flat, _ = nested
    block = {path: np.repeat(value[None], 5, 0) for path, value in flat.items()}
    for data in (block, unflatten(block)):
        columns = packer.block(data)
        assert list(columns) == list(NESTED)
        assert all(columns[path] is block[path] for path in block)
    assert packer.block(unflatten(block | {"action": block["action"][:4]})) is None
    assert packer.block(unflatten(block) | {"more": 1}) is None


def test_many_fields_are_found(rows, monkeypatch):
    monkeypatch.setattr(layout, "rows", rows)
    schema = mr.Schema({f"f{n}": mr.Field((), "int32") for n in range(100)})
    packer = layout.packer(schema, record_layout(schema), 1)
    assert packer.prepare({f"f{n}": n for n in range(100)}) == 0
    assert np.frombuffer(packer.rows, "i4").tolist() == list(range(100))
    assert packer.prepare({f"g{n}": n for n in range(100)}) == -1


def test_rows_that_are_held_keep_their_size(packer):
    with pytest.raises(BufferError):
        packer.rows.append(1)


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
def test_the_steps_of_a_plain_block_are_counted(rows, monkeypatch, num_envs, lead, steps, rng):
    monkeypatch.setattr(layout, "rows", rows)
    packer = layout.packer(SCHEMA, PLACED, num_envs)
    columns = packer.block(arrays(lead, rng))
    assert (-1 if columns is None else len(columns["int8"])) == steps


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
    assert packer.block(block) is not None
    assert packer.block(block | {path: value}) is None
    del block["int8"]
    assert packer.block(block) is None


@pytest.fixture
def wide(rows, monkeypatch):
    """A packer of three environments."""
    monkeypatch.setattr(layout, "rows", rows)
    return layout.packer(SCHEMA, PLACED, 3)


def all_packed(step):
    """The records of all environments as numpy assigns them."""
    found = np.zeros(3, PLACED.record)
    for path in PLACED.record.names:
        found[path] = step[path]
    return found.tobytes()


def test_a_step_of_all_environments_is_recognized_by_its_shapes(wide, rng):
    step = arrays((3,), rng)
    assert wide.prepare(step) >= 0
    assert wide.prepare(arrays((2,), rng)) == -1
    assert wide.prepare(arrays((1, 3), rng)) == -1
    assert wide.prepare(arrays((), rng)) == -1
    for value in (np.zeros(3), np.zeros(4, "f4"), np.zeros((3, 1), "f4"), [0.0] * 3):
        assert wide.prepare(step | {"float32": value}) == -1
    assert wide.prepare(step | {"float32s": np.zeros((3, 3, 2), "f4")}) == -1
    assert wide.prepare(step | {"more": np.zeros(3)}) == -1
    assert wide.prepare(type("Mine", (dict,), {})(step)) == -1
    del step["int8"]
    assert wide.prepare(step) == -1


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
            assert wide.prepare(given) == marks
            assert bytes(wide.rows) == all_packed(given)
            ends = 2 * given["terminated"] + 4 * given["truncated"]
            assert list(wide.ends) == ends.tolist()


def test_ends_of_any_environment_are_reported(wide, rng):
    step = arrays((3,), rng)
    for number in range(3):
        for path, mark in (("terminated", 2), ("truncated", 4)):
            none = {"terminated": np.zeros(3, bool), "truncated": np.zeros(3, bool)}
            none[path][number] = True
            assert wide.prepare(step | none) == mark


def test_long_values_are_looked_at_and_not_copied(wide, rng):
    """Such as frames whose axes were moved, which are copied where they are written."""
    step = arrays((3,), rng)
    step["large"] = np.repeat(step["large"], 2, 1)[:, ::2]
    wide.prepare(step)
    assert list(wide.unpacked()) == ["large", "mutable"]
    tracemalloc.start()
    try:
        assert wide.prepare(step) >= 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < step["large"].nbytes


def test_records_too_long_to_be_packed_by_the_look_are_looked_at(rows, monkeypatch, rng):
    monkeypatch.setattr(layout, "rows", rows)
    count = -(-PACKED_NBYTES // PLACED.stride)
    for num_envs, packed in ((count - 1, True), (count, False)):
        packer = layout.packer(SCHEMA, PLACED, num_envs)
        assert len(packer.rows) == (num_envs * PLACED.stride if packed else 0)
        assert packer.prepare(arrays((num_envs,), rng)) >= 0
        stored = set(FIELDS) - {"terminated", "truncated"}
        expected = {"large", "mutable"} if packed else stored
        assert set(packer.unpacked()) == expected
        assert packer.prepare(arrays((num_envs + 1,), rng)) == -1


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
def test_what_is_streamed_is_what_is_packed(rows, monkeypatch, nbytes, count, skew, rng):
    monkeypatch.setattr(layout, "rows", rows)
    schema = mr.Schema({"a": mr.Field((nbytes,), "uint8"), "b": mr.Field((), "float32")})
    placed = record_layout(schema)
    packer = layout.packer(schema, placed, 1)
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
    monkeypatch.setattr(layout, "rows", rows)
    schema = mr.Schema({"a": mr.Field((nbytes,), "uint8"), "b": mr.Field((), "uint8")})
    placed = record_layout(schema)
    given = {
        "a": rng.integers(0, 256, (9, nbytes), np.uint8),
        "b": rng.integers(0, 256, 9, np.uint8),
    }
    out = np.zeros((9, placed.stride), np.uint8)
    layout.packer(schema, placed, 1).pack(out, given, 0, 9)
    found = out.reshape(-1).view(placed.record)
    assert np.array_equal(found["a"], given["a"])
    assert np.array_equal(found["b"], given["b"])


@pytest.mark.parametrize(("first", "stop"), [(-1, 2), (3, 2), (0, 5), (0, 41)])
def test_rows_that_do_not_fit_are_not_packed(packer, first, stop, rng):
    block = arrays((40,), rng)
    out = np.zeros((4, PLACED.stride), np.uint8)
    with pytest.raises(ValueError, match=r"^pack: out must hold rows .*, got \d+ bytes"):
        packer.pack(out, block, first, stop)
    block["int8"] = block["int8"][:2]
    with pytest.raises(ValueError, match=r"^pack: 'int8' must have 3 rows of 1 bytes, got 2"):
        packer.pack(out, block, 0, 3)
    assert not out.any()
