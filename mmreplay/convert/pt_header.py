"""The header of a torch file: a dict of tensors, written opcode by opcode.

torch reads it with ``weights_only=True``, which allows just what stands here. Writing
it by hand takes neither torch nor the memory of the tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from mmreplay.schema.dtypes import storage_dtype

# torch names the dtypes it has had from the start by classes of storages; those that
# came later lie in untyped ones, with the dtype beside.
STORAGES = {
    "bool": "BoolStorage", "int8": "CharStorage", "int16": "ShortStorage",
    "int32": "IntStorage", "int64": "LongStorage", "uint8": "ByteStorage",
    "float16": "HalfStorage", "float32": "FloatStorage", "float64": "DoubleStorage",
    "bfloat16": "BFloat16Storage",
}  # fmt: skip

Kinds = Mapping[str, tuple[str, tuple[int, ...]]]


def encode(tensors: Kinds) -> bytes:
    """A dict of contiguous tensors, whose storages are numbered in its order.

    Args:
        tensors: Dtype and shape by name.
    """
    items = b"".join(
        _text(name) + _tensor(str(key), dtype, shape)
        for key, (name, (dtype, shape)) in enumerate(tensors.items())
    )
    return b"\x80\x02}(" + items + b"u."


def _tensor(key: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """A call of the function with which torch puts a tensor together."""
    count = 1
    for axis in shape:
        count *= axis
    old = dtype in STORAGES
    storage = (
        _name("torch", STORAGES[dtype])
        if old
        else _name("torch.storage", "UntypedStorage")
    )
    size = count if old else count * storage_dtype(dtype).itemsize
    saved = _tuple(_text("storage"), storage, _text(key), _text("cpu"), _number(size))
    hooks = _name("collections", "OrderedDict") + b")R"
    parts = [
        saved + b"Q", _number(0), _tuple(*map(_number, shape)),
        _tuple(*map(_number, _strides(shape))), b"\x89", hooks,
    ]  # fmt: skip
    if not old:
        parts.append(_name("torch", dtype))
    build = "_rebuild_tensor_v2" if old else "_rebuild_tensor_v3"
    return _name("torch._utils", build) + _tuple(*parts) + b"R"


def _strides(shape: tuple[int, ...]) -> Iterator[int]:
    for axis in range(len(shape)):
        stride = 1
        for size in shape[axis + 1 :]:
            stride *= max(1, size)
        yield stride


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(number: int) -> bytes:
    if number < 1 << 8:
        return b"K" + bytes([number])
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _name(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def _tuple(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"
