"""``mmreplay info --build``: kernels, Python and libraries."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from mmreplay import __version__, kernels
from mmreplay.cli import show

# Those that decide what runs and what can be read, needed or not.
LIBRARIES = (
    "numpy",
    "torch",
    "google-crc32c",
    "isal",
    "zarr",
    "numcodecs",
    "safetensors",
    "pyarrow",
    "gymnasium",
    "ale-py",
    "mujoco",
    "h5py",
    "matplotlib",
    "typer",
    "rich",
)


def print_installation(json: bool) -> None:
    """Print what `facts` finds."""
    built = facts()
    if json:
        show.print_json(built)
    else:
        _print(built)


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
            name: {"runs": kernel.runs, "why": kernel.why} for name, kernel in chosen.items()
        },
        "libraries": {name: _version(name) for name in LIBRARIES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _print(built: dict[str, Any]) -> None:
    runs = [
        (f"kernel {name}", f"{kernel['runs']} ({kernel['why']})")
        for name, kernel in built["kernels"].items()
    ]
    python = f"{built['python']} ({built['implementation']}, {built['system']})"
    libraries = [(name, version or "not installed") for name, version in built["libraries"].items()]
    title = f"mmreplay {built['version']}"
    show.print_facts(title, [*runs, ("python", python), *libraries])
