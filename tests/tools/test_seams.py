"""The counts of tools/seams.py, of small packages whose counts are known."""

import ast
import re

import pytest

from tools import seams

SOURCE = '''"""Text of a module.

Two lines.
"""

from pack import other  # noqa


class PlainSampler:
    """A docstring."""


def f(store, sampler, view):
    # A comment.
    if isinstance(store, ZarrStore) or type(store) is MemmapStore:
        return getattr(store, "heap", None), hasattr(store, "records")
    if isinstance(view, (int, PlainSampler)) or store.engine == "zarr":
        try:
            return getattr(store, "name", None)
        except BaseException:
            raise
    return (
        1, 2
    )  # fmt: SKIP
'''.replace("SKIP", "skip")


@pytest.fixture
def counts(tmp_path):
    package = tmp_path / "pack"
    (package / "samplers").mkdir(parents=True)
    (package / "samplers" / "plain.py").write_text(SOURCE)
    (package / "other.py").write_text(
        "def g():\n    from pack.samplers.plain import f\n    return f\n"
    )
    (tmp_path / "pyproject.toml").write_text(
        "[[tool.importlinter.contracts]]\n"
        'id = "extensions"\nignore_imports = ["a -> b", "c -> d"]\n'
    )
    return seams.measured(package)


def test_each_check_is_counted(counts):
    assert counts == {
        "code": 13 + 3,
        "engines": 2,
        "engine names": 1,
        "samplers": 1,
        "getattr": 2,
        "exceptions": 2,
        "circles": 1,
        "complex": 0,
        "BaseException": 1,
        "skips": 1,
    }


def test_imports_for_types_alone_make_no_circle():
    tree = ast.parse("if TYPE_CHECKING:\n    import a\nelse:\n    import b\n")
    assert seams.imported(tree, {"a", "b"}) == {"b"}


def test_circles_of_modules_are_found():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert {frozenset(each) for each in seams.circles(imports)} == {
        frozenset("abc"),
        frozenset("de"),
    }


def test_complexity_counts_branches_conditions_and_operands():
    tree = ast.parse(
        "def f(x):\n"
        "    assert x\n"
        "    for y in x:\n"
        "        if y and x or y: pass\n"
        "    return [z for z in x if z if y]\n"
    )
    # 1, the assert, the loop, the if, two operands, the comprehension, two conditions.
    assert seams.complexity(tree.body[0]) == 9


@pytest.mark.slow
def test_the_page_on_architecture_says_how_large_core_and_satellites_are():
    text = (seams.ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `?(\w+)`? \| (\d+) \| ([\d,]+) \|", text, re.M)
    stated = {part: int(lines.replace(",", "")) for part, _, lines in rows}
    made = {
        part: lines
        for part, (_, lines) in seams.core_and_satellites(seams.ROOT / "mmreplay").items()
    }
    assert stated.keys() == made.keys()
    # Correct the table when a part has grown or shrunk by a tenth.
    assert [part for part in made if abs(stated[part] - made[part]) > 50 + made[part] / 10] == []
