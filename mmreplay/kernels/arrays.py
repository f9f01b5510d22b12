"""Arrays in the form that the kernels of trees take."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.errors import unmasked

ALIGNMENT = 128
"""Bytes of a node: two lines of the cache, which processors fetch in pairs."""


def aligned(count: int, value: float) -> NDArray[np.float64]:
    """float64 ``[count]`` that begins where a line of the cache does."""
    padding = ALIGNMENT // 8
    # Zeros come from the kernel page by page, as they are written.
    padded = np.zeros(count + padding)
    skip = -padded.ctypes.data % ALIGNMENT // 8
    nodes = padded[skip : skip + count]
    if value != 0:
        nodes.fill(value)
    return nodes


def real(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Numbers as float64 ``[B]``, contiguous.

    Raises:
        TypeError: They are not real numbers.
        ValueError: They have not one axis.
    """
    array = unmasked(name, values)
    if array.dtype.kind not in "fiu" and array.size:
        raise TypeError(f"{name} must be real numbers, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {list(array.shape)}. Reshape it.")
    return np.ascontiguousarray(array, np.float64)


def limits(op: str, identity: float, capacity: int) -> tuple[float, float]:
    """Least and greatest value of a leaf."""
    if op == "sum":
        return 0.0, float(np.finfo(np.float64).max) / 2 / capacity
    return (0.0 if op == "max" and identity == 0 else -np.inf), np.inf
