"""Files in layouts of other libraries, and of several files, to be tampered with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import mmreplay as mr

_THEIRS = "24-01-02_03-04-05-678901_memory_0x7f00ab"
LAYOUTS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "npz": ((f"{_THEIRS}.npz", {"layout": "skrl"}),),
    "pt": ((f"{_THEIRS}.pt", {"layout": "skrl"}),),
    "csv": ((f"{_THEIRS}.csv", {"layout": "skrl"}),),
    "safetensors": (("parts", {"part_bytes": 700}),),
}
"""Files and folders that are known by their names, and the options that make them."""


def layouts(format: str, buffer: Path, folder: Path) -> dict[str, dict[str, bytes]]:
    """Files of a format in other layouts, each with the one that is named first."""
    made = {}
    for name, options in LAYOUTS.get(format, ()):
        target = folder / name
        mr.export(buffer, target, format=format, **options)
        # Of a folder the index comes first.
        paths = sorted(target.iterdir(), reverse=True) if target.is_dir() else [target]
        made[f"{name} {options}"] = {each.name: each.read_bytes() for each in paths}
    if format == "safetensors":
        made["velora's pair"] = velora()
    return made


def velora() -> dict[str, bytes]:
    """Velora's pair of files, by name."""
    from safetensors.numpy import save

    widths = {"states": 3, "next_states": 3, "actions": 1, "hiddens": 2}
    rng = np.random.default_rng(7)
    arrays = {
        name: rng.random((8, widths.get(name, 1)), np.float32)
        for name in (*widths, "rewards", "dones")
    }
    told = {"state_dim": 3, "action_dim": 1, "hidden_dim": 2}
    told |= {"capacity": 8, "position": 3, "size": 8}
    return {
        "buffer_state.safetensors": save(arrays),
        "buffer_metadata.json": json.dumps(told).encode(),
    }
