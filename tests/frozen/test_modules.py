"""Paths that pages name lead where they led; entry points and formats are there."""

import subprocess
import sys
from importlib.metadata import distribution
from importlib.util import find_spec

import pytest

from tests.frozen import surface
from tests.frozen.records import recorded

MODULES = recorded("modules")

PLUGIN = """
from mmreplay.convert.registry import Format
FORMAT = Format("raw", "frozen_plugin", "raw bytes", suffixes=(".raw",), reads=False)
"""
# Words after `mmreplay.` on the pages that name parts of files and no modules.
NO_MODULES = {
    "mmreplay.json",
    "mmreplay.json.npy",
    "mmreplay.crc32c",
    "mmreplay.rows",
    "mmreplay.part",
    "mmreplay.formats",
}


def peer_of(name):
    """The library that a path needs, where it is not installed."""
    for module, library in surface.PEERS.items():
        if f"{name}.".startswith(f"{module}.") and find_spec(library) is None:
            return library
    return None


@pytest.mark.parametrize("name", MODULES["paths"])
def test_a_path_that_a_page_named_leads_there(name):
    if library := peer_of(name):
        pytest.skip(f"{library} is not installed")
    assert surface.resolved(name) is not None


@pytest.mark.parametrize("page", surface.PAGES, ids=lambda page: page.name)
def test_a_page_names_no_path_that_leads_nowhere(page):
    for name in surface.documented(page.read_text()) - NO_MODULES:
        if peer_of(name) is None:
            assert surface.resolved(name) is not None, name


@pytest.mark.parametrize("name", MODULES["entry points"])
def test_an_entry_point_of_the_package_can_be_called(name):
    group, _, wanted = name.partition("/")
    found = distribution("mmreplay").entry_points.select(group=group, name=wanted)
    assert [callable(point.load()) for point in found] == [True]


def test_the_package_can_be_run_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "mmreplay", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("mmreplay ")


@pytest.mark.parametrize("name", MODULES["extras"])
def test_an_extra_is_there_to_be_installed(name):
    assert name in distribution("mmreplay").metadata.get_all("Provides-Extra")


@pytest.mark.parametrize("name", MODULES["formats"])
def test_a_format_is_known_by_its_name_and_suffixes(name):
    old, now = MODULES["formats"][name], surface.formats()[name]
    assert set(old["suffixes"]) <= set(now["suffixes"])
    for way in ("reads", "writes"):
        assert now[way] or not old[way]


def test_formats_of_other_packages_are_found_by_their_entry_points(tmp_path):
    (tmp_path / "frozen_plugin.py").write_text(PLUGIN)
    info = tmp_path / "frozen_plugin-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: frozen-plugin\n")
    (info / "entry_points.txt").write_text("[mmreplay.formats]\nraw = frozen_plugin:FORMAT\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "from mmreplay.convert.registry import formats\n"
        "print(formats()['raw'].suffixes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "('.raw',)\n"
