"""The report of the layout counts what it says it counts."""

import shutil
import subprocess
import sys

import pytest

from tools import house

MODULE = '''"""A module."""

LIMIT = 1
"""Of something."""


# Why.
def double(number):
    """Return twice a number."""
    return (
        2 * number
    )
'''


def test_blanks_comments_and_docstrings_are_no_code():
    assert house.code_lines(MODULE) == {3, 8, 10, 11, 12}


def test_a_string_that_is_used_is_code():
    assert house.code_lines('print("""one\ntwo""")\n') == {1, 2}


def test_files_and_lines_are_counted_by_folder():
    sources = {"p/a.py": MODULE, "p/b.py": "x = 1\n", "p/q/c.py": "\n"}
    lines = [line.split() for line in house.tree(sources)]
    assert lines[1:] == [["p/", "2", "13", "6"], ["p/q/", "1", "1", "0"], ["all", "3", "14", "6"]]
    assert ["a.py", "12", "5"] in [line.split() for line in house.tree(sources, True)]


def test_imports_are_found_in_functions_and_by_name_but_not_for_types_alone():
    text = """
from typing import TYPE_CHECKING
import p.a
from p import b
from p.c import thing
if TYPE_CHECKING:
    from p import d
def late():
    from p import e
    return "p.f"
"""
    modules = [f"p.{name}" for name in "abcdef"]
    assert house.imports_of(text, modules) == {"p.a", "p.b", "p.c", "p.e", "p.f"}
    assert "p.f" not in house.imports_of(text, modules, strings=False)


def test_a_module_of_one_importer_is_named_with_it():
    graph = {
        "mmreplay": {"mmreplay.public"},
        "mmreplay.public": {"mmreplay.helper", "mmreplay.shared"},
        "mmreplay.other": {"mmreplay.shared"},
        "mmreplay.helper": set(),
        "mmreplay.shared": set(),
    }
    assert house.one_importer(graph) == [("mmreplay.helper", "mmreplay.public")]


def test_a_circle_counts_inside_a_folder_only():
    graph = {
        "p.q.a": {"p.q.b"},
        "p.q.b": {"p.q.c"},
        "p.q.c": {"p.q.a"},
        "p.q.d": {"p.q.a", "p.r.e"},
        "p.r.e": {"p.q.d"},
    }
    assert house.circles(graph) == [["p.q.a", "p.q.b", "p.q.c"]]


def test_a_class_name_of_two_classes_is_named_with_both():
    sources = {
        "p/a.py": "class Part: ...\nclass Whole: ...\n",
        "p/b.py": "def f():\n    class Part: ...\n",
    }
    assert house.class_names(sources) == {"Part": ["p/a.py:1", "p/b.py:2"]}


def test_tests_that_import_public_names_only_are_counted():
    tests = {
        "tests/test_a.py": "import mmreplay as mr\nfrom mmreplay import Field\n",
        "tests/test_b.py": "from mmreplay.errors import SchemaError\n",
        "tests/test_c.py": "from mmreplay import Field, ring\n",
        "tests/test_d.py": "def test_d():\n    import mmreplay.storage.memmap\n",
        "tests/test_e.py": "import numpy\n",
        "tests/helper.py": "import mmreplay\n",
    }
    assert house.public_tests(tests, ["Field"]) == (2, 4)


def test_denser_writing_is_seen():
    loose = "def f(a, b, c):\n    d = a + b\n    e = d + c\n    g = e\n    return g\n"
    tight = "def f(a, b, c):\n" + "    d = (a + b + c) * (a - b - c) + a\n" * 4
    before, *_ = house.densities({"p.py": loose}, 0)
    after, _, drawn = house.densities({"p.py": tight}, 0)
    assert after.lines == before.lines == 5
    assert after.nodes > before.nodes
    assert after.characters > before.characters
    assert drawn.name == "p.py:1 f"


def test_docstrings_make_nothing_denser():
    bare = "def f(a):\n    b = a\n    c = b\n    d = c\n    return d\n"
    told = bare.replace("\n    b", '\n    """Return it."""\n    b')
    assert house.densities({"p.py": bare}, 0)[1] == house.densities({"p.py": told}, 0)[1]


def test_the_same_seed_draws_the_same_functions():
    function = "def f{}(a):\n    b = a\n    c = b\n    d = c\n    return d\n"
    sources = {"p.py": "".join(function.format(n) for n in range(50))}
    drawn = house.densities(sources, 1)[2:]
    assert len(drawn) == house.SAMPLE
    assert drawn == house.densities(sources, 1)[2:]
    assert drawn != house.densities(sources, 2)[2:]


@pytest.mark.slow
def test_the_report_of_this_repository_is_printed():
    done = subprocess.run(
        [sys.executable, "-m", "tools.house", "--no-journeys"],
        capture_output=True,
        text=True,
        check=True,
    )
    for title in ("Files and lines", "Modules with one", "Class names", "Circles of"):
        assert title in done.stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_an_unknown_revision_is_refused_by_name():
    done = subprocess.run(
        [sys.executable, "-m", "tools.house", "--density", "no-such-revision"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no-such-revision" in done.stderr
