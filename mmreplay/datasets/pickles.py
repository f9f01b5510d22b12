"""Pickles, read only with the user's permission: a pickle is a program, not a format.

It runs with stand-ins for all names except those that numpy builds arrays with, so no
code of other libraries runs and none of them is needed. The pickle still decides how
much memory it takes.
"""

from __future__ import annotations

import collections
import io
import pickle
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay.disk.files import File
from mmreplay.disk.seekable import SeekableFile
from mmreplay.errors import CorruptError, ReplayError, SchemaError

MEANING = (
    "a pickle is a program that its maker wrote and you would run; mmreplay runs it "
    "with stand-ins for all but numpy's arrays, and its memory is not limited"
)
HEAD_NBYTES = 1 << 12
_ARRAYS = {
    "numpy": ("dtype", "ndarray"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.numeric": ("_frombuffer",),
    "numpy.core.numeric": ("_frombuffer",),
}


class StandIn:
    """Replaces an object of a class that is not loaded.

    Attributes:
        state: Attributes of the object in the pickle.
        name: Name of its class.
    """

    name = ""

    def __new__(cls, *_: object, **__: object) -> StandIn:
        """Accept any arguments."""
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        # One built by __reduce__'s second form was never initialized.
        self.state = {}
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.state |= part

    def __setitem__(self, key: object, value: object) -> None:
        """Ignore an item of a mapping."""

    def append(self, value: object) -> None:
        """Ignore an item of a sequence."""

    def extend(self, values: object) -> None:
        """Ignore items of a sequence."""

    def add(self, value: object) -> None:
        """Ignore an item of a set."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ARRAYS.get(module, ()):
            home = {"dtype": np, "ndarray": np}.get(name)
            return getattr(home or _numpy_module(module), name)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        return type("StandIn", (StandIn,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"a reference to {str(pid)[:40]!r} elsewhere")


def _numpy_module(module: str) -> Any:
    # numpy 2 keeps them under _core, and still names what older ones wrote.
    return import_module(f"numpy._core.{module.rpartition('.')[2]}")


def load(path: Path, allowed: bool) -> Any:
    """Return the content of a pickle.

    Args:
        path: The file.
        allowed: Whether the user permits to run it.

    Raises:
        SchemaError: The user does not permit it.
        CorruptError: It is incomplete, or no pickle of arrays.
    """
    if not allowed:
        raise SchemaError(
            f"{path} is a pickle, and {MEANING}. Pass allow_pickle=True "
            "(--allow-pickle) if you trust its maker."
        )
    file = File.open(path, None)
    raw = SeekableFile(file)
    try:
        return _Unpickler(io.BufferedReader(raw)).load()
    except ReplayError:
        raise
    except Exception as error:
        # Pickles make Python raise whatever they like.
        raise CorruptError(
            f"{path} is not a complete pickle of arrays: {type(error).__name__} "
            f"({str(error)[:200]}) before byte {raw.tell()}. The file is truncated or "
            "damaged: restore it from a copy."
        ) from error
    finally:
        file.close()


def head(path: Path) -> bytes:
    """Return the first bytes of a pickle; none if the path is no pickle.

    Raises:
        FormatError: It is a link.
    """
    if not path.is_file():
        return b""
    with closing(File.open(path, None)) as file:
        data = file.pread(min(HEAD_NBYTES, file.nbytes), 0)
    # Protocols 2 and later say so; lists of the first ones begin with "(l" or "(".
    return data if data[:1] in (b"\x80", b"(", b"]") else b""
