"""Formats that come with mmreplay: what each is called, and where it lives."""

from __future__ import annotations

from dataclasses import dataclass

BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        name: What ``format=``, ``--from`` and ``--to`` take.
        home: The module that reads and writes it, imported on first use.
        about: What it is, in a few words.
        suffixes: Endings of its files' names, in lower case; none for folders.
        reads: Whether it can be a source.
        writes: Whether it can be a target.
        asks: Whether its home is asked for what a path holds (``recognizes``); such
            formats come before those that go by the suffix alone.
    """

    name: str
    home: str
    about: str
    suffixes: tuple[str, ...] = ()
    reads: bool = True
    writes: bool = True
    asks: bool = False


OURS = (
    Format(BUFFER, "mmreplay.convert.rows", "a buffer's folder"),
    Format("npz", "mmreplay.convert.npz", "numpy arrays in a zip", (".npz",)),
    Format("pt", "mmreplay.convert.pt", "a dict of torch tensors", (".pt", ".pth")),
    Format(
        "safetensors", "mmreplay.convert.safetensors", "tensors under a JSON header",
        (".safetensors", ".safetensors.index.json"),
    ),
    Format(
        "safetensors-folder", "mmreplay.convert.safetensors",
        "a folder of its parts, or velora's pair", writes=False, asks=True,
    ),
    Format("csv", "mmreplay.convert.csv", "a table of text", (".csv", ".csv.gz")),
    Format(
        "parquet", "mmreplay.convert.parquet", "a table, or a folder of part files",
        (".parquet", ".pq"),
    ),
    Format(
        "parquet-folder", "mmreplay.convert.parquet", "a folder of parquet files",
        writes=False, asks=True,
    ),
)  # fmt: skip
_HDF5, _TORCH = (".hdf5", ".h5"), (".pt", ".pth")
FOREIGN = (
    Format(
        "d4rl", "mmreplay.convert.foreign.d4rl", "D4RL's HDF5", _HDF5, asks=True
    ),
    Format(
        "minari", "mmreplay.convert.foreign.minari", "a Minari dataset's folder",
        asks=True,
    ),
    Format(
        "robomimic", "mmreplay.convert.foreign.robomimic", "robomimic's HDF5", _HDF5,
        writes=False, asks=True,
    ),
    Format(
        "sb3", "mmreplay.convert.foreign.sb3", "Stable-Baselines3's pickled buffer",
        (".pkl",), writes=False, asks=True,
    ),
    Format(
        "tmrl", "mmreplay.convert.foreign.tmrl", "tmrl's data.pkl", (".pkl",),
        writes=False, asks=True,
    ),
    Format(
        "alf", "mmreplay.convert.foreign.alf", "alf's replay buffer in a checkpoint",
        _TORCH, writes=False, asks=True,
    ),
    Format(
        "pytorchrl", "mmreplay.convert.foreign.pytorchrl", "pytorchrl's storage",
        _TORCH, writes=False, asks=True,
    ),
    Format(
        "dqn-replay", "mmreplay.convert.foreign.dqn_replay", "a folder of DQN Replay",
        writes=False, asks=True,
    ),
    Format(
        "lerobot", "mmreplay.convert.foreign.lerobot", "a LeRobot dataset's folder",
        writes=False, asks=True,
    ),
    Format(
        "rlds", "mmreplay.convert.foreign.rlds", "an RLDS dataset's folder",
        writes=False, asks=True,
    ),
    Format(
        "zarr", "mmreplay.convert.foreign.zarr_group", "a Zarr group, also at s3://",
        writes=False, asks=True,
    ),
    Format(
        "zarr-zip", "mmreplay.convert.foreign.zarr_group", "a Zarr group in a zip file",
        (".zip",), writes=False, asks=True,
    ),
)  # fmt: skip
"""The field's datasets; those that share a suffix, or are folders, are looked into."""
