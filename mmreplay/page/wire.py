"""The bytes of answers: JSON in which NaN is null, and arrays after a JSON head.

A binary answer is ``MMRV``, the length of the head as a little-endian uint32, the head
padded with spaces to a multiple of 8 bytes, and then little-endian arrays end to end.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMRV"
JSON_TYPE, BINARY_TYPE = "application/json", "application/octet-stream"


def encode_json(value: object) -> bytes:
    """Return a value as JSON; NaN and infinities are null, arrays are lists."""
    text = json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))
    return text.encode()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        items = value.tolist()
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            return _plain(items)
        return items
    if isinstance(value, np.generic):
        return _plain(value.item())
    return value


def pack(head: dict[str, Any], *arrays: NDArray[Any]) -> bytes:
    """Return a binary answer.

    Args:
        head: JSON values.
        arrays: Written as they lie in memory, little-endian.
    """
    text = encode_json(head)
    text += b" " * (-(len(MAGIC) + 4 + len(text)) % 8)
    parts = [MAGIC, struct.pack("<I", len(text)), text]
    for array in arrays:
        little = array.dtype.newbyteorder("<")
        parts.append(np.ascontiguousarray(array, little).tobytes())
    return b"".join(parts)


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return head and body of a binary answer."""
    if data[:4] != MAGIC:
        raise ValueError("this is no binary answer of the page")
    (length,) = struct.unpack_from("<I", data, 4)
    head: dict[str, Any] = json.loads(data[8 : 8 + length])
    return head, data[8 + length :]
