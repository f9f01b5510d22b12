"""What is built and packed: kernels where a compiler is, and nothing else missing."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from mmreplay.kernels import NAMES

pytest.importorskip("setuptools")
ROOT = Path(__file__).resolve().parent.parent
FILES = [
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "constraints.txt",
]
BUILD = "import sys, setuptools.build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
WHICH = (
    "from mmreplay import kernels\n"
    "print(*(kernels.choose(name, '').runs for name in kernels.NAMES))"
)

pytestmark = pytest.mark.slow


@pytest.fixture
def source(tmp_path):
    """A copy of what is packed, with nothing built in it."""
    copy = tmp_path / "source"
    unbuilt = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "mmreplay", copy / "mmreplay", ignore=unbuilt)
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    return copy


def python(source, *args, **environment):
    done = subprocess.run(
        [sys.executable, *args],
        cwd=source,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_without_a_compiler_all_is_built_but_the_kernels(source, tmp_path):
    python(source, "-c", BUILD, "build_wheel", tmp_path, CC="/bin/false")
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(tmp_path / "installed")
    assert "mmreplay/kernels/tree.py" in names
    assert not [name for name in names if name.endswith((".so", ".c"))]
    assert python(tmp_path / "installed", "-c", WHICH) == " ".join(["numpy"] * len(NAMES))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_one_wheel_serves_every_python_and_the_sdist_has_the_sources(source, tmp_path):
    python(source, "-c", BUILD, "build_sdist", tmp_path)
    [sdist] = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        names = [name.partition("/")[2] for name in packed.getnames()]
        # The wheel is built from the sdist, as by whoever has no clone.
        packed.extractall(tmp_path / "unpacked", filter="data")
    assert {"setup.py", *(f"mmreplay/kernels/_{name}.c" for name in NAMES)} <= {*names}
    assert not [name for name in names if name.endswith(".so")]
    [unpacked] = (tmp_path / "unpacked").iterdir()
    python(unpacked, "-c", BUILD, "build_wheel", tmp_path)
    [wheel] = tmp_path.glob("*-cp311-abi3-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(tmp_path / "installed")
    built = {f"mmreplay/kernels/_{name}.abi3.so" for name in NAMES}
    assert built | {"mmreplay/py.typed"} <= {*names}
    assert not [name for name in names if name.endswith(".c")]
    assert python(tmp_path / "installed", "-c", WHICH) == " ".join(["c"] * len(NAMES))
