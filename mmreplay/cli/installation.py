"""What mmreplay itself runs on: kernels, Python and libraries."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from mmreplay import __version__, kernels
from mmreplay.cli import show

# Those that decide what runs and what can be read, needed or not.
LIBRARIES = (
    "numpy", "torch", "google-crc32c", "isal", "zarr", "numcodecs", "safetensors",
    "pyarrow", "gymnasium", "ale-py", "mujoco", "h5py", "matplotlib", "typer", "rich",
)  # fmt: skip


def tell(json: bool) -> None:
    """Print what `facts` finds."""
    found = facts()
    if json:
        show.print_json(found)
    else:
        _print(found)


def facts() -> dict[str, Any]:
    """Everything that ``info --build`` knows, as JSON values; loads no library."""
    asked = kernels.choice()
    chosen = {name: kernels.choose(name, asked) for name in kernels.NAMES}
    return {
        "version": __version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "system": f"{platform.system()} {platform.machine()}",
        "kernels": {
            name: {"runs": kernel.runs, "why": kernel.why}
            for name, kernel in chosen.items()
        },
        "libraries": {name: _version(name) for name in LIBRARIES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _print(found: dict[str, Any]) -> None:
    runs = [
        (f"kernel {name}", f"{kernel['runs']} ({kernel['why']})")
        for name, kernel in found["kernels"].items()
    ]
    python = f"{found['python']} ({found['implementation']}, {found['system']})"
    libraries = [
        (name, version or "not installed")
        for name, version in found["libraries"].items()
    ]
    title = f"mmreplay {found['version']}"
    show.print_facts(title, [*runs, ("python", python), *libraries])
