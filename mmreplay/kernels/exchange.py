"""Values in DLPack capsules, as arrays: the numpy twin of ``_rows_exchange.h``."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAME = b"dltensor"
MOST_AXES = 16
"""Values with more axes are left to the caller."""
_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _CapsuleSource:
    """An object from which numpy takes a capsule."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU; numpy looks whether it is so

    def __dlpack__(self, **options: object) -> object:
        return self._capsule


def shown(value: object, alone: bool) -> NDArray[Any] | None:
    """A capsule's values.

    Args:
        value: Whatever was given.
        alone: Show ``[n, 1]`` as ``[n]``.

    Returns:
        An array without a copy; None of what is no capsule, was one that is used up,
        or is elsewhere or nowhere.
    """
    if not _valid(value, NAME):
        return None
    # The first word says where the values are; of nowhere numpy makes some.
    if not ctypes.c_void_p.from_address(_pointer(value, NAME)).value:
        return None
    try:
        array: NDArray[Any] = np.from_dlpack(_CapsuleSource(value))  # type: ignore[arg-type]  # a capsule
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None
    if array.ndim > MOST_AXES:
        return None
    lone = alone and array.ndim == 2 and array.shape[1] == 1
    return array[:, 0] if lone else array
