"""Modules of the package that tests replace, hide or skip by name exist.

`pytest.importorskip` of a module that was renamed skips, and `sys.modules` takes any
name; a replaced name that nobody reads is no better.
"""

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from mmreplay import kernels

TESTS = Path(__file__).parent
CALLS = {
    "setattr",
    "delattr",
    "setitem",
    "delitem",
    "patch",
    "importorskip",
    "import_module",
    "parametrize",
}
DOTTED = re.compile(r"mmreplay(\.\w*[A-Za-z0-9])+")


def named(source: str) -> set[str]:
    """Dotted names under mmreplay that calls of a source get as text."""
    found = set()
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        function = ast.unparse(call.func).rpartition(".")[2]
        if function not in CALLS:
            continue
        for node in ast.walk(call):
            if isinstance(node, ast.Constant) and DOTTED.fullmatch(str(node.value)):
                found.add(str(node.value))
    return found


# Keys of files, which look like modules.
KEYS = {"mmreplay.crc32c", "mmreplay.json"}


def missing(name: str) -> str:
    """The first part of a dotted name that does not exist, or nothing."""
    parts = name.split(".")
    package, _, last = name.rpartition(".")
    if package == "mmreplay.kernels" and last.startswith("_"):
        # Built or not, it is one of the kernels.
        return "" if last[1:] in kernels.NAMES else name
    for count in range(2, len(parts) + 1):
        module = ".".join(parts[:count])
        try:
            if find_spec(module) is not None:
                continue
        except ModuleNotFoundError:
            pass  # its parent is no package, but may hold the name
        held = import_module(".".join(parts[: count - 1]))
        for part in parts[count - 1 :]:
            if not hasattr(held, part):
                return module
            held = getattr(held, part)
        return ""
    return ""


@pytest.mark.slow
def test_names_that_tests_strike_exist():
    names = {
        name: path.relative_to(TESTS)
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__)
        for name in named(path.read_text())
    }
    assert len(names) > 15
    assert [f"{names[name]}: {name}" for name in set(names) - KEYS if missing(name)] == []


def test_a_missing_name_is_noticed():
    source = "monkeypatch.setattr('mmreplay.disk.files.disk', 1); f('mmreplay.nothing.x')"
    assert named(source) == {"mmreplay.disk.files.disk"}
    assert missing("mmreplay.disk.files.disk") == ""
    assert missing("mmreplay.disk.files.no_disk") == "mmreplay.disk.files.no_disk"
    assert missing("mmreplay.filed.disk") == "mmreplay.filed"
    assert missing("mmreplay.kernels._trees") == "mmreplay.kernels._trees"
    assert missing("mmreplay.adapters.sb4") == "mmreplay.adapters.sb4"
