"""Values in DLPack capsules are taken as the arrays of the same values are, or left."""

import ctypes

import numpy as np
import pytest
import torch
from torch.utils.dlpack import to_dlpack

import mmreplay as mr
from mmreplay.schema.dtypes import DTYPES
from mmreplay.storage import layout
from mmreplay.storage.layout import record_layout

NAMED = {dtype: f"of_{dtype}" for dtype in DTYPES if dtype != "bfloat16"}
FIELDS = {
    **{name: mr.Field((2, 3), dtype) for dtype, name in NAMED.items()},
    "alone": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}
SCHEMA = mr.Schema(FIELDS)
ELSEWHERE = {
    "large": mr.Field((600,), "float64"),
    "mutable": mr.Field((2,), "float32", mutable=True),
}
ENVS = [1, 3]


class Tensor(ctypes.Structure):
    """A DLManagedTensor: https://dmlc.github.io/dlpack/latest/c_api.html."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
ALIVE = []


def capsule(array, name=b"dltensor", **changes):
    """A capsule of a contiguous float32 array's values, and what is said of them."""
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    told = {
        "data": array.ctypes.data,
        "device": (1, 0),
        "ndim": array.ndim,
        "code": 2,
        "bits": 32,
        "lanes": 1,
        "shape": shape,
        "deleter": ctypes.cast(DELETER, ctypes.c_void_p).value,
    }
    told |= changes
    told["device"] = (ctypes.c_int32 * 2)(*told["device"])
    made = Tensor(**told)
    ALIVE.append((array, shape, made))
    return new_capsule(ctypes.addressof(made), name, None)


@pytest.fixture(params=ENVS)
def envs(request):
    return request.param


@pytest.fixture
def take(rows, monkeypatch, envs):
    """What takes a step of some fields, and its record."""
    monkeypatch.setattr(layout, "rows", rows)

    def taker(schema=SCHEMA):
        packer = layout.packer(schema, record_layout(schema), envs)
        return packer.prepare, lambda: bytes(packer.rows)

    return taker


def step_of(rng, envs):
    lead = (envs,) if envs > 1 else ()
    found = {
        path: np.frombuffer(rng.bytes(envs * f.nbytes), f.numpy).reshape((*lead, *f.shape)).copy()
        for path, f in FIELDS.items()
    }
    found["of_bool"] = found["of_bool"].view(np.uint8) % 2 == 1
    none = np.zeros(lead, bool)
    return found | {"terminated": none, "truncated": none}


def by_numpy(array):
    return array.__dlpack__()


def by_torch(array):
    return to_dlpack(torch.from_numpy(array))


@pytest.mark.parametrize("exchange", [by_numpy, by_torch])
def test_capsules_are_packed_with_every_bit(take, rng, envs, exchange):
    (one, packed), (other, expected) = take(), take()
    for _ in range(10):
        step = step_of(rng, envs)
        given = {path: exchange(array) for path, array in step.items()}
        if envs == 1:  # where an axis of the environments may be there
            given["alone"] = exchange(step["alone"][None])
        assert one(given) == other(step) == 0
        assert packed() == expected()


@pytest.mark.parametrize("path", NAMED.values())
def test_capsules_are_packed_among_arrays(take, rng, envs, path):
    (one, packed), (other, expected) = take(), take()
    step = step_of(rng, envs)
    assert one(step | {path: by_torch(step[path])}) == other(step) == 0
    assert packed() == expected()


def test_strided_values_are_packed(take, rng, envs):
    """Such as columns of a tensor that holds more."""
    (one, packed), (other, expected) = take(), take()
    step = step_of(rng, envs)
    wide = torch.from_numpy(rng.random((envs, 4, 3), np.float32))
    part = wide[:, 1:3] if envs > 1 else wide[0, 1:3]
    found = one(step | {"of_float32": to_dlpack(part)})
    assert found == other(step | {"of_float32": part.numpy()}) == 0
    assert packed() == expected()


def test_what_has_no_strides_lies_in_order(take, rng, envs):
    (one, packed), (other, expected) = take(), take()
    step = step_of(rng, envs)
    values = rng.random(step["of_float32"].shape, np.float32)
    assert one(step | {"of_float32": capsule(values)}) == 0
    assert other(step | {"of_float32": values}) == 0
    assert packed() == expected()


def test_values_begin_behind_an_offset(take, rng, envs):
    (one, packed), (other, expected) = take(), take()
    step = step_of(rng, envs)
    shape = step["of_float32"].shape
    more = rng.random((2, *shape), np.float32)
    made = capsule(more[0], data=more.ctypes.data, offset=more[0].nbytes)
    assert one(step | {"of_float32": made}) == 0
    assert other(step | {"of_float32": more[1]}) == 0
    assert packed() == expected()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": b"another"},
        {"name": b"dltensor_versioned"},
        {"device": (2, 0)},
        {"data": None},
        {"code": 0},
        {"code": 4},
        {"bits": 64},
        {"lanes": 2},
    ],
    ids=str,
)
def test_what_is_not_there_as_it_is_stored_is_left(take, rng, envs, changes):
    one, _ = take()
    step = step_of(rng, envs)
    values = rng.random((*step["of_float32"].shape[:-2], 2, 3), np.float32)
    assert one(step | {"of_float32": capsule(values)}) == 0
    assert one(step | {"of_float32": capsule(values, **changes)}) == -1


@pytest.mark.parametrize("path", ["of_float32", "alone"])
@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 2), (1, 1), (2, 3, 1), (4,), (0,)])
def test_other_shapes_are_left(take, rng, envs, path, shape):
    one, _ = take()
    lead = (envs,) if envs > 1 else ()
    for more in (lead, (envs + 1,), (1, *lead, 1)):
        values = np.zeros((*more, *shape), np.float32)
        assert one(step_of(rng, envs) | {path: by_torch(values)}) == -1


def test_values_out_of_order_are_left(take, rng, envs):
    one, _ = take()
    values = torch.zeros(*step_of(rng, envs)["of_float32"].shape[:-2], 3, 2)
    assert one(step_of(rng, envs) | {"of_float32": to_dlpack(values.mT)}) == -1


@pytest.mark.parametrize("path", ELSEWHERE)
def test_fields_in_files_of_their_own_are_left(take, rng, envs, path):
    field = ELSEWHERE[path]
    one, _ = take(mr.Schema(FIELDS | {path: field}))
    step = step_of(rng, envs)
    lead = (envs,) if envs > 1 else ()
    step[path] = np.zeros((*lead, *field.shape), field.numpy)
    assert one(step) == 0
    assert one(step | {path: by_torch(step[path])}) == -1


@pytest.mark.parametrize(("path", "mark"), [("terminated", 2), ("truncated", 4)])
@pytest.mark.parametrize("alone", [False, True])
def test_ends_in_capsules_are_bits_of_each_environment(take, rng, envs, path, mark, alone):
    one, _ = take()
    step = step_of(rng, envs)
    ends = step[path].reshape((envs,)).copy()
    shaped = (envs, 1) if alone else (envs,)
    assert one(step | {path: by_torch(ends.reshape(shaped))}) == 0
    ends[-1] = True
    assert one(step | {path: by_torch(ends.reshape(shaped))}) == mark
    assert list(one.__self__.ends) == [0] * (envs - 1) + [mark]


def test_a_capsule_that_was_used_up_is_left(take, rng, envs):
    one, _ = take()
    step = step_of(rng, envs)
    values = torch.from_numpy(step["of_float32"])
    used = to_dlpack(values)
    torch.utils.dlpack.from_dlpack(used)
    assert one(step | {"of_float32": used}) == -1


def test_steps_too_long_to_be_packed_by_the_look_are_left(take, rng, envs):
    """A ring packs them from arrays."""
    many = {f"f{number}": mr.Field((200,), "float32") for number in range(24)}
    schema = mr.Schema({"alone": FIELDS["alone"]} | many)
    assert not record_layout(schema).large
    one, packed = take(schema)
    assert (len(packed()) > 0) == (envs == 1)
    lead = (envs,) if envs > 1 else ()
    step = {p: np.zeros((*lead, *f.shape), f.numpy) for p, f in schema.fields.items()}
    assert one(step) == 0
    expected = 0 if envs == 1 else -1
    assert one({path: by_torch(array) for path, array in step.items()}) == expected
    assert one(step | {"alone": by_torch(step["alone"])}) == expected


def test_ends_in_a_capsule_and_ends_in_an_array_are_joined(take, rng, envs):
    one, _ = take()
    step = step_of(rng, envs)
    step["terminated"] = step["terminated"] | True
    given = step | {"truncated": by_torch(step["truncated"].reshape(envs))}
    assert one(given) == 2
    assert list(one.__self__.ends) == [2] * envs


@pytest.mark.parametrize(("axes", "expected"), [(15, 0), (16, -1), (31, -1)])
def test_axes_without_number_are_left(take, envs, axes, expected):
    field = mr.Field((1,) * axes, "float32")
    one, _ = take(mr.Schema({"x": field}))
    values = np.zeros((envs, *field.shape), np.float32)
    assert one({"x": by_torch(values)}) == expected


@pytest.mark.parametrize("stride", [1 << 61, 1 << 62, -(1 << 62)])
def test_a_stride_that_is_no_number_of_bytes_does_no_harm(take, rng, envs, stride):
    schema = mr.Schema({"x": mr.Field((1, 3), "float32")})
    (one, packed), (other, expected) = take(schema), take(schema)
    shape = (envs, 1, 3) if envs > 1 else (1, 3)
    values = rng.random(shape, np.float32)
    strides = (ctypes.c_int64 * len(shape))(*(3, stride, 1)[-len(shape) :])
    ALIVE.append(strides)
    assert one({"x": capsule(values, strides=strides)}) == other({"x": values}) == 0
    assert packed() == expected()
