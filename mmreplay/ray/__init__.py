"""Rings of several machines as one replay memory, on Ray.

Rings stay folders on a node's disk, with one writer each. Ray places the actors that
serve them, restarts them and carries messages. ``import mmreplay`` does not import
Ray; ``mr.ray`` does, on first use.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmreplay.ray.client import ReplayClient as ReplayClient
    from mmreplay.ray.client_stats import ClientStats as ClientStats
    from mmreplay.ray.client_stats import LostWarning as LostWarning
    from mmreplay.ray.data import read as read
    from mmreplay.ray.data import write as write
    from mmreplay.ray.ring_writer import RingWriter as RingWriter
    from mmreplay.ray.ring_writer import writer as writer
    from mmreplay.ray.run_status import RunStatus as RunStatus
    from mmreplay.ray.run_status import status as status
    from mmreplay.ray.run_status import stop as stop
    from mmreplay.ray.thin import ThinWriter as ThinWriter
    from mmreplay.ray.thin import thin_ring as thin_ring
    from mmreplay.ray.thin import thin_writer as thin_writer
    from mmreplay.ray.train import train_loader as train_loader

# The first and the last version with which `make ray` passes.
OLDEST, NEWEST = (2, 55, 1), (2, 60)

MISSING = "mmreplay.ray needs Ray, which is not installed. Run: pip install 'mmreplay[ray]'"

try:
    import ray
except ImportError as error:
    raise ModuleNotFoundError(MISSING, name="ray") from error
_installed = tuple(int(part) for part in re.findall(r"\d+", ray.__version__)[:3])
if _installed < OLDEST or _installed[: len(NEWEST)] > NEWEST:
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    raise ImportError(
        f"mmreplay.ray needs Ray {oldest} to {newest}, got {ray.__version__}. Run: "
        "pip install 'mmreplay[ray]'",
        name="ray",
    )

_MODULES = {
    "ClientStats": "mmreplay.ray.client_stats",
    "LostWarning": "mmreplay.ray.client_stats",
    "ReplayClient": "mmreplay.ray.client",
    "RingWriter": "mmreplay.ray.ring_writer",
    "RunStatus": "mmreplay.ray.run_status",
    "ThinWriter": "mmreplay.ray.thin",
    "read": "mmreplay.ray.data",
    "status": "mmreplay.ray.run_status",
    "stop": "mmreplay.ray.run_status",
    "thin_ring": "mmreplay.ray.thin",
    "thin_writer": "mmreplay.ray.thin",
    "train_loader": "mmreplay.ray.train",
    "write": "mmreplay.ray.data",
    "writer": "mmreplay.ray.ring_writer",
}
"""Public names and their modules; no module may have the name of a function."""

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'mmreplay.ray' has no attribute {name!r}")
