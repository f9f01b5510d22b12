"""The C kernels are there and are what Python calls.

A C file that is renamed, left out of setup.py or not loaded leaves its numpy twin in
use, with the same results, so that no other test says so.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import mmreplay
from mmreplay import kernels

PACKAGE = Path(mmreplay.__file__).parent
FOLDER = PACKAGE / "kernels"
EXPECTED = os.environ.get("MMREPLAY_KERNELS") == "c" or any(
    shutil.which(compiler) for compiler in ("cc", "gcc", "clang")
)
needs_c = pytest.mark.skipif(not EXPECTED, reason="there is no C compiler here")


def loaded(node):
    """The kernel that an expression loads, or None."""
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Attribute)
            and each.func.attr == "load"
            and ast.unparse(each.func.value) == "kernels"
            and isinstance(each.args[0], ast.Constant)
        ):
            return each.args[0].value
    return None


def last(node):
    """The last word of a name, dotted or not."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def looked_up(source):
    """Kernel and name of everything that a module looks up in a kernel."""
    tree = ast.parse(source)
    held, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := loaded(node.value)):
            found.add((name, node.attr))
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            name = loaded(node.value)
            # `load(...).crc32c` is a function already.
            if name and not isinstance(node.value, ast.Attribute):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                held |= {last(target): name for target in targets}
    for node in ast.walk(tree):
        # Another name in a function: `kernel, nodes = tree._kernel, tree._nodes`.
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                if isinstance(target, ast.Tuple):
                    for one, other in zip(target.elts, node.value.elts, strict=False):
                        if last(other) in held:
                            held[last(one)] = held[last(other)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and last(node.value) in held:
            found.add((held[last(node.value)], node.attr))
    return {pair for pair in found if pair[1] != "load"}


@cache
def all_looked_up():
    """Kernel and name of everything that the package looks up in a kernel."""
    sources = (path.read_text() for path in PACKAGE.rglob("*.py") if path.parent != FOLDER)
    return set().union(*(looked_up(source) for source in sources if "kernels" in source))


def test_every_c_file_is_a_kernel_and_is_built_by_setup():
    files = {path.stem.removeprefix("_") for path in FOLDER.glob("*.c")}
    assert files == set(kernels.NAMES)
    setup = (PACKAGE.parent / "setup.py").read_text()
    (names,) = re.findall(r"for name in \(([^)]*)\)", setup)
    assert set(re.findall(r'"_(\w+)"', names)) == files


@needs_c
def test_c_runs_where_it_is_asked_for():
    code = (
        "import json; from mmreplay import kernels;"
        "print(json.dumps({n: kernels.load(n).__name__ for n in kernels.NAMES}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"MMREPLAY_KERNELS": "c"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: f"mmreplay.kernels._{name}" for name in kernels.NAMES}


def test_every_kernel_is_looked_up_by_the_package():
    assert {name for name, _ in all_looked_up()} == set(kernels.NAMES)
    assert len(all_looked_up()) > 20


@needs_c
def test_what_python_looks_up_is_what_c_has_and_in_its_twin():
    there = set()
    for kernel in kernels.NAMES:
        module = import_module(f"mmreplay.kernels._{kernel}")
        assert module.__file__.endswith(".so")
        there |= {(kernel, name) for name in vars(module) if not name.startswith("_")}
    assert there == all_looked_up()
    twins = {kernel: import_module(f"mmreplay.kernels.{kernel}") for kernel in kernels.NAMES}
    assert [pair for pair in there if not callable(getattr(twins[pair[0]], pair[1], None))] == []
