"""Tests beside other libraries: an environment for each group that fits together.

``python -m tools.peers [NAME ...]`` makes each group's environment in
build/peers-NAME, at pinned versions, and runs its tests there; without a name, all
groups one after another. It takes minutes and 2 to 4 GB of disk a group. Called again
it only runs the tests, unless a version has changed. The standard library is enough.
``python -m tools.peers --table`` prints the table of docs/peers.md.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PINNED = "-c constraints.txt"
PYTEST = "-m pytest -m peer -rs"


class Group(NamedTuple):
    """Libraries that fit in one environment, and the tests that need them."""

    libraries: str
    installs: tuple[str, ...]
    """Arguments of `pip install`, one call each, in order."""
    tests: tuple[str, ...]


CURVES = "tests/tools/test_curves.py"
KILLED = "tests/adapters/test_killed_agents.py"
NAMES = "tests/adapters/test_names.py"
MEMORIES = "tests/convert/foreign/test_memory_peers.py"
LEROBOT = "tests/convert/foreign/test_lerobot_peers.py"

GROUPS = {
    "skrl": Group(
        "skrl",
        (f"{PINNED} skrl==2.1.1",),
        ("tests/adapters/test_skrl_peers.py", NAMES, CURVES, KILLED),
    ),
    "sb3": Group(
        "Stable-Baselines3",
        (f"{PINNED} stable-baselines3==2.9.2",),
        (
            "tests/adapters/test_sb3.py",
            "tests/adapters/test_sb3_arguments.py",
            "tests/adapters/test_sb3_faces.py",
            "tests/adapters/test_sb3_her.py",
            CURVES,
            KILLED,
        ),
    ),
    "velora": Group(
        "velora, which asks for older versions",
        (
            f"{PINNED} array-api-compat==1.16.0 sqlmodel==0.0.24 plotly==7.1.0",
            "--no-deps velora==0.2.0",
        ),
        ("tests/adapters/test_velora_peers.py", NAMES, CURVES, KILLED),
    ),
    "pytorchrl": Group(
        "pytorchrl",
        (f"{PINNED} pytorchrl==3.2.15 gym==0.26.2",),
        ("tests/adapters/test_pytorchrl_peers.py", MEMORIES, NAMES, CURVES, KILLED),
    ),
    "tmrl": Group(
        "tmrl, which asks for Windows",
        (f"{PINNED} pandas==3.1.1 rtgym==0.16", "--no-deps tmrl==0.7.1 tlspyo==0.3.0"),
        ("tests/adapters/test_tmrl_peers.py", MEMORIES, NAMES, KILLED),
    ),
    "datasets": Group(
        "Minari, RLDS, robomimic, pickles of Stable-Baselines3, and one function of D4RL",
        (
            f"{PINNED} jax==0.10.2 minari==0.5.4 stable-baselines3==2.9.2 "
            "tfrecord==1.14.6 termcolor==3.3.0 psutil==7.2.2 tensorboardX==2.6.5 "
            "tqdm==4.70.1",
            "--no-deps robomimic==0.3.0 d4rl==1.1",
        ),
        ("tests/convert/foreign",),
    ),
    "lerobot": Group(
        "LeRobot 0.4, which asks for an older torch; with its own v3 files",
        (
            f"{PINNED} datasets==5.2.0 pandas==3.1.1 jsonlines==4.0.0 einops==0.8.2 "
            "draccus==0.10.0 deepdiff==9.1.0 termcolor==3.3.0 imageio==2.38.1 "
            "requests==2.34.2 psutil==7.2.2 pyserial==3.5",
            "--no-deps lerobot==0.4.4 torchvision==0.28.0 accelerate==1.15.0 "
            "diffusers==0.42.1 opencv-python-headless==5.0.0.93",
            # For tools.bench.bench_images.
            "--no-deps lmdb==3.0.0 pylance==14.0.2",
        ),
        (LEROBOT,),
    ),
    "lerobot-v2": Group(
        "LeRobot 0.3, which writes v2.1",
        (
            f"{PINNED} datasets==5.2.0 pandas==3.1.1 jsonlines==4.0.0 einops==0.8.2 "
            "draccus==0.10.0 deepdiff==9.1.0 termcolor==3.3.0 imageio==2.38.1 "
            "requests==2.34.2 psutil==7.2.2",
            "--no-deps lerobot==0.3.3 torchvision==0.28.0 accelerate==1.15.0 "
            "diffusers==0.42.1 opencv-python-headless==5.0.0.93",
        ),
        (LEROBOT,),
    ),
    "tables": Group(
        "pandas, polars, duckdb, Hugging Face `datasets`",
        (f"{PINNED} pandas==3.1.1 polars==2.1.0 duckdb==2.0.0 datasets==5.2.0",),
        ("tests/convert/test_parquet_peers.py", "tests/convert/test_curated_peers.py"),
    ),
    "storage": Group(
        "S3 (moto, which asks for older versions), tensorstore, zarrs",
        (
            f"{PINNED} obstore==0.12.1 tensorstore==0.1.86 zarrs==0.2.3",
            "moto[server]==5.2.5 boto3==1.44.8",
        ),
        ("tests/storage/test_remote.py", "tests/storage/test_zarr_peers.py"),
    ),
    "loaders": Group(
        "Accelerate, Lightning",
        (f"{PINNED} accelerate==1.15.0 lightning==2.6.6",),
        ("tests/loader/test_accelerate_peers.py", "tests/loader/test_lightning_peers.py"),
    ),
}


def table() -> str:
    """The groups as a table in Markdown."""
    lines = ["| `PEER=` | libraries | `pip install` | tests |", "|---|---|---|---|"]
    for name, group in GROUPS.items():
        installs = ", then ".join(f"`{arguments}`" for arguments in group.installs)
        tests = " ".join(f"`{test}`" for test in group.tests)
        lines.append(f"| `{name}` | {group.libraries} | {installs} | {tests} |")
    return "\n".join(lines) + "\n"


def commands(name: str) -> list[list[str]]:
    """What fills a group's environment, in order."""
    pip = [str(python_of(name)), "-m", "pip", "install"]
    # The build runs in the environment itself, so that it too is pinned.
    ours = ["setuptools wheel", "--no-build-isolation -e .[dev]"]
    return [
        [*pip, *shlex.split(arguments)]
        for arguments in (*(f"{PINNED} {each}" for each in ours), *GROUPS[name].installs)
    ]


def python_of(name: str) -> Path:
    """The interpreter of a group."""
    return ROOT / "build" / f"peers-{name}" / "bin" / "python"


def run(command: list[str]) -> int:
    """Print a command, run it in the repository, and return its exit status."""
    print(shlex.join(command), flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def install(name: str) -> bool:
    """Make a group's environment, if it is not there as it should be."""
    python = python_of(name)
    installed = python.parents[1] / "installed.txt"
    wanted = "\n".join(map(shlex.join, commands(name)))
    wanted += "\n" + (ROOT / "constraints.txt").read_text()
    if installed.is_file() and installed.read_text() == wanted:
        return True
    venv.create(python.parents[1], with_pip=True, clear=True)
    if any(run(command) for command in commands(name)):
        return False
    installed.write_text(wanted)
    return True


def missing(name: str, report: Path) -> set[str]:
    """Libraries of a group without which tests were skipped, as if not installed.

    Args:
        name: The group.
        report: What pytest wrote of its tests, in the form of JUnit.
    """
    arguments = " ".join(GROUPS[name].installs)
    installed = {plain(each) for each in re.findall(r"([\w.-]+)(?:\[\w+\])?==", arguments)}
    found = set()
    for skipped in ElementTree.parse(report).iter("skipped"):
        # "name is not installed", or what pytest itself says of a module.
        reason = skipped.get("message", "")
        if re.search("not installed|missing|could not import", reason):
            module = re.search(r"could not import '([\w-]+)|([\w-]+)", reason)
            assert module is not None
            found.add(plain(module[1] or module[2]))
    return found & installed


def plain(name: str) -> str:
    """The name of a library, as it is imported."""
    return name.lower().replace("-", "_")


def main() -> int:
    """Make and run; return 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(GROUPS))
    parser.add_argument("--table", action="store_true", help="print the table")
    options = parser.parse_args()
    if options.table:
        print(table(), end="")
        return 0
    unknown = set(options.names) - GROUPS.keys()
    if unknown:
        parser.error(f"no group {min(unknown)!r}. Name one of {', '.join(GROUPS)}.")
    ended = {}
    for name in options.names or GROUPS:
        python = python_of(name)
        report = python.parents[1] / "tests.xml"
        command = [*shlex.split(f"{python} {PYTEST}"), f"--junitxml={report}"]
        if not install(name):
            ended[name] = "not installed"
        elif run([*command, *GROUPS[name].tests]):
            ended[name] = "tests failed"
        elif without := missing(name, report):
            ended[name] = f"tests skipped without {', '.join(sorted(without))}"
        else:
            ended[name] = "passed"
    for name, what in ended.items():
        print(f"{name}: {what}")
    return int(set(ended.values()) != {"passed"})


if __name__ == "__main__":
    sys.exit(main())
