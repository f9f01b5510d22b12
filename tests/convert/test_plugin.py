"""A package of somebody else's adds formats, found by entry points that pip wrote."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from tests.convert.support import every_kind

PAGE = Path(__file__).parents[2] / "docs" / "convert.md"
READS = '''
"""Rows that count: a text file with a number."""
import numpy as np

import mmreplay as mr
from mmreplay.convert.base import Block, Notes, Reader
from mmreplay.convert.description import Description
from mmreplay.convert.episode_ends import Marks
from mmreplay.convert.registry import Format

FORMAT = Format("count", "counting", "rows that count", (".count",), writes=False)
SCHEMA = mr.Schema({"number": mr.Field((), "int64")})


class CountReader(Reader):
    def __init__(self, path, start):
        self.report = Notes()
        self.report.doubt("nothing tells where episodes end")
        self._count, self._start = int(path.read_text()), start

    def describe(self):
        stop = np.array([self._count])
        return Description(SCHEMA, np.zeros(1, np.int64), stop, self._count)

    def blocks(self, rows_per_block=None):
        never = np.zeros(self._count, bool)
        positions = np.arange(self._count)
        flags = Marks(1).mark(0, never, never)
        columns = {"number": positions + self._start}
        yield Block(columns, np.zeros_like(positions), positions, flags)

    def close(self):
        pass


def open_reader(path, *, start=0):
    return CountReader(path, start)
'''
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "myformat"
version = "0.1"

[project.entry-points."mmreplay.formats"]
raw = "myformat:FORMAT"
count = "counting:FORMAT"

[tool.setuptools]
py-modules = ["myformat", "counting"]
"""


def write_package(folder):
    """The format of the page, and one that reads, as a package's sources."""
    example = re.search(r"^```python\n(# myformat.*?)^```", PAGE.read_text(), re.M | re.S)
    folder.mkdir()
    (folder / "myformat.py").write_text(example[1])
    (folder / "counting.py").write_text(READS)
    (folder / "pyproject.toml").write_text(PROJECT)
    return folder


def installed_by_hand(tmp_path):
    """What pip leaves of a package: its modules, and a folder of what it says."""
    site = write_package(tmp_path / "site")
    info = site / "myformat-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: myformat\n")
    points = PROJECT.partition('formats"]')[2].partition("[tool")[0]
    points = points.replace('"', "")
    (info / "entry_points.txt").write_text("[mmreplay.formats]" + points)
    return site


def installed_by_pip(tmp_path):
    """The package, installed from its sources into a folder of its own."""
    source, site = write_package(tmp_path / "package"), tmp_path / "site"
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *options, source],
        check=True,
        timeout=120,
        capture_output=True,
    )
    return site


def mmreplay(site, *args):
    """The command in a process of its own, as a user has it."""
    found = subprocess.run(
        [sys.executable, "-m", "mmreplay", *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in found.stderr
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize(
    "install", [installed_by_hand, pytest.param(installed_by_pip, marks=pytest.mark.slow)]
)
@pytest.mark.sliced(1)
def test_a_package_adds_formats_to_the_command_line(tmp_path, install):
    site = install(tmp_path)
    with every_kind(tmp_path / "source") as source:
        nbytes = sum(each.nbytes for each in source.schema.fields.values())
    code, out = mmreplay(site, "convert", tmp_path / "source", tmp_path / "a.raw")
    assert (code, "48 rows" in out) == (0, True)
    assert (tmp_path / "a.raw").stat().st_size == 48 * nbytes

    (tmp_path / "a.count").write_text("7")
    argv = ["convert", tmp_path / "a.count", tmp_path / "b"]
    code, out = mmreplay(site, *argv, "--strict")
    assert (code, "nothing tells where episodes end" in out) == (3, True)
    assert mmreplay(site, *argv, "-o", "start=5")[0] == 0
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        rows = buffer.gather_all()
        np.testing.assert_array_equal(rows["number"], np.arange(5, 12))
    # Other formats are as they were.
    assert mmreplay(site, "convert", tmp_path / "b", tmp_path / "b.npz")[0] == 0


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothere_xyz", "No module named 'nothere_xyz'"),
        ("x = 1 / 0", "ZeroDivisionError"),
        ("y = 1", "AttributeError"),
    ],
)
@pytest.mark.sliced(1)
@pytest.mark.slow
def test_a_broken_package_breaks_its_own_format_alone(tmp_path, code, message):
    site = installed_by_hand(tmp_path)
    (site / "myformat.py").write_text(code)
    every_kind(tmp_path / "b").close()
    assert mmreplay(site, "convert", tmp_path / "b", tmp_path / "b.npz")[0] == 0
    for target in (["c", "--to", "raw"], ["c.raw"]):
        got, out = mmreplay(site, "convert", tmp_path / "b", tmp_path / target[0], *target[1:])
        assert got == 3
        assert "entry point 'raw' of mmreplay.formats must be a" in out
        assert message in out
    # The other one of the package is there.
    (tmp_path / "a.count").write_text("7")
    assert mmreplay(site, "convert", tmp_path / "a.count", tmp_path / "d")[0] == 0


def test_the_example_of_the_page_is_short():
    example = re.search(r"^```python\n(# myformat.*?)^```", PAGE.read_text(), re.M | re.S)
    lines = [line for line in example[1].splitlines() if line.strip()]
    assert len(lines) <= 32
