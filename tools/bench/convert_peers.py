"""What people write and read files with now, and a plain copy of the same bytes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, NDArray[np.generic]]
Prepared = Callable[[Path], object]
"""What is timed: writes the path, or reads it."""
COPY = "synced_copy"
"""The side that copies a file that is there, and syncs the copy."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What people use instead.

    Attributes:
        module: That it needs.
        write: Prepares a call that writes columns, if it writes.
        read: Reads a file whole, if it reads.
        images: Whether it takes images.
    """

    module: str
    write: Callable[[Columns], Prepared] | None = None
    read: Prepared | None = None
    images: bool = True


def flat(columns: Columns) -> Columns:
    """A column a value, as tables have them."""
    found = {}
    for name, column in columns.items():
        wide = column.reshape(len(column), -1)
        for number in range(wide.shape[1]):
            label = f"{name}.{number}" if column.ndim > 1 else name
            found[label] = wide[:, number].copy()
    return found


def frame(columns: Columns) -> Any:
    """A data frame with a column a field: vectors in cells, images as bytes."""
    import pandas

    found: dict[str, object] = {}
    for name, column in columns.items():
        if column.dtype == np.uint8 and column.ndim > 1:
            found[name] = [row.tobytes() for row in column]
        else:
            found[name] = list(column) if column.ndim > 1 else column
    return pandas.DataFrame(found)


def _savez(columns: Columns) -> Prepared:
    return lambda path: np.savez(path, allow_pickle=False, **dict(columns))


def _load_npz(path: Path) -> object:
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found}


def _torch_save(columns: Columns) -> Prepared:
    import torch

    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    return lambda path: torch.save(tensors, path)


def _torch_load(path: Path) -> object:
    import torch

    return torch.load(path, weights_only=True)


def _save_file(columns: Columns) -> Prepared:
    from safetensors.numpy import save_file

    return lambda path: save_file(columns, path)


def _load_file(path: Path) -> object:
    from safetensors.numpy import load_file

    return load_file(path)


def _to_csv(columns: Columns) -> Prepared:
    import pandas

    made = pandas.DataFrame(flat(columns))
    return lambda path: made.to_csv(path, index=False)


def _read_csv(path: Path) -> object:
    """The same columns of the same dtypes, exact: pandas' default parser rounds."""
    import pandas

    return pandas.read_csv(path, dtype=_dtypes(path), float_precision="round_trip")


def _read_csv_inexact(path: Path) -> object:
    import pandas

    return pandas.read_csv(path, dtype=_dtypes(path))


def _dtypes(path: Path) -> dict[str, str]:
    with path.open(encoding="utf-8") as file:
        names = [name.strip('"') for name in file.readline().rstrip("\n").split(",")]
    kinds = {"_env_id": "int64", "_position": "int64", "_flags": "uint8", "terminated": "bool"}
    return {name: kinds.get(name, "float32") for name in names}


def _arrow_csv(path: Path) -> object:
    """Pyarrow alone: what parsing the text costs at least."""
    import pyarrow.csv

    return pyarrow.csv.read_csv(
        path, convert_options=pyarrow.csv.ConvertOptions(column_types=_dtypes(path), null_values=[])
    )


def _to_parquet(columns: Columns) -> Prepared:
    made = frame(columns)
    return lambda path: made.to_parquet(path, compression="zstd")


def _read_parquet(path: Path) -> object:
    import pandas

    return pandas.read_parquet(path)


def _torchrl_to_parquet(columns: Columns) -> Prepared:
    """TensorDict's own: a column a value, as it takes tensors of one number only."""
    import torch

    tensordict: Any = import_module("tensordict")
    tensors = {name: torch.from_numpy(each) for name, each in flat(columns).items()}
    made = tensordict.TensorDict(tensors, batch_size=[len(next(iter(tensors.values())))])
    return lambda path: made.to_parquet(path)


def _torchrl_from_parquet(path: Path) -> object:
    tensordict: Any = import_module("tensordict")
    return tensordict.TensorDict.from_parquet(path)


PEERS: dict[str, dict[str, Peer]] = {
    "npz": {"np_savez": Peer("numpy", _savez, _load_npz)},
    "pt": {"torch_save": Peer("torch", _torch_save, _torch_load)},
    "safetensors": {"save_file": Peer("safetensors", _save_file, _load_file)},
    "csv": {
        "pandas": Peer("pandas", _to_csv, _read_csv),
        "pandas_inexact": Peer("pandas", read=_read_csv_inexact),
        "pyarrow_alone": Peer("pyarrow", read=_arrow_csv),
    },
    "parquet": {
        "pandas": Peer("pandas", _to_parquet, _read_parquet),
        "torchrl": Peer("torchrl", _torchrl_to_parquet, _torchrl_from_parquet, False),
    },
}


def copy(source: Path, target: Path) -> None:
    """A plain copy of a file's bytes, synced."""
    shutil.copyfile(source, target)
    sync(target)


def sync(path: Path) -> None:
    """Wait for a file's bytes to be on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fdatasync(descriptor)
    os.close(descriptor)
