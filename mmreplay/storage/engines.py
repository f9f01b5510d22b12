"""The stores of the engines whose buffers lie in a folder, by engine.

A new engine is a module with a `DiskStore`, a line here, and its name in `Engine`
(`format/metadata.py`), since metadata.json holds that name.
"""

from __future__ import annotations

from mmreplay.format.metadata import Engine
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.store import DiskStore
from mmreplay.storage.zarr.engine import ZarrStore

STORES: dict[Engine, type[DiskStore]] = {"memmap": MemmapStore, "zarr": ZarrStore}
