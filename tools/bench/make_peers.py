"""Make the environment of the other replay libraries: one command, pinned.

``python -m tools.bench.make_peers [FOLDER]`` makes a virtual environment, build/peers
unless told otherwise, installs tools/bench/peers.txt, builds mmreplay into it from this
folder, and compiles TorchRL's C++ where its wheel does not load. It takes minutes and
3 GB of disk; called again it installs what is missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "peers"
PINS = ROOT / "tools" / "bench" / "peers.txt"


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def steps(folder: Path) -> list[list[str]]:
    """Commands that fill an environment, in order."""
    python = str(python_of(folder))
    pip = [python, "-m", "pip", "install", "--quiet"]
    # The build runs in the environment itself, so that it too is pinned.
    pinned = ["--constraint", str(ROOT / "constraints.txt")]
    return [
        [*pip, *pinned, "setuptools", "wheel"],
        [*pip, "--requirement", str(PINS)],
        [*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)],
        [python, "-m", "tools.bench.build_torchrl"],
    ]


def main() -> int:
    """Make it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder.absolute()
    if not python_of(folder).exists():
        venv.create(folder, with_pip=True)
    for command in steps(folder):
        print(" ".join(command), flush=True)
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode:
            return done.returncode
    print(f"peers are in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
