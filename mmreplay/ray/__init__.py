"""Rings of several machines as one replay memory, on Ray.

Rings stay folders on a node's disk, with one writer each. Ray places the actors that
serve them, restarts them and carries messages. ``import mmreplay`` does not import
Ray; ``mr.ray`` does, on first use.
"""

from __future__ import annotations

SUPPORTED = "2.60"

MISSING = (
    "mmreplay.ray needs Ray, which is not installed. Run: pip install 'mmreplay[ray]'"
)

try:
    import ray
except ImportError as error:
    raise ImportError(MISSING, name="ray") from error
if not ray.__version__.startswith(SUPPORTED + "."):
    raise ImportError(
        f"mmreplay.ray needs Ray {SUPPORTED}, got {ray.__version__}. Run: "
        f"pip install 'mmreplay[ray]'",
        name="ray",
    )
