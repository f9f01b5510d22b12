"""The line between the core and its satellites: which names each may take.

`line.json` lists, for each satellite, the names of the core that it imports beyond the
public face, by module. The lists only fall: a name that is not in its list fails, and
so does one in it that is not imported any more. Instead of adding a name, give what is
needed to an object that the satellite holds already.
"""

import ast
import json
from collections import defaultdict
from pathlib import Path

import mmreplay

ROOT = Path(__file__).resolve().parents[1]
LINE = Path(__file__).with_name("line.json")
SATELLITES = (
    "adapters",
    "cli",
    "convert",
    "datasets",
    "page",
    "plan",
    "ray",
    "recording",
    "testing",
    "zarr_groups",
)
FACE = set(mmreplay._MODULES.values())


def satellite_of(module):
    """The satellite that a module is of; None for the core."""
    part = module.split(".")[1] if "." in module else ""
    return part if part in SATELLITES else None


def imported_names():
    """Of each module: the names that it imports of the package, by module."""
    paths = {}
    for path in sorted((ROOT / "mmreplay").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        paths[name.removesuffix(".__init__")] = path
    found = defaultdict(lambda: defaultdict(set))
    for module, path in paths.items():
        if module == "mmreplay":
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            assert not node.level
            if (node.module or "").split(".")[0] != "mmreplay":
                continue
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole not in paths:
                    found[module][node.module].add(alias.name)
                    continue
                # A module as a whole: what is asked of it.
                local = alias.asname or alias.name
                found[module][whole] |= {
                    each.attr
                    for each in ast.walk(tree)
                    if isinstance(each, ast.Attribute)
                    and isinstance(each.value, ast.Name)
                    and each.value.id == local
                }
    return found


def lines():
    """What each satellite takes of the core, and what others take of satellites."""
    public = set(mmreplay.__all__)
    found = defaultdict(lambda: defaultdict(set))
    for module, of in imported_names().items():
        mine = satellite_of(module)
        for other, names in of.items():
            theirs = satellite_of(other)
            if mine == theirs or other in ("mmreplay", "mmreplay.errors"):
                continue
            if mine is None:
                found["core"][other] |= names
            elif theirs is not None:
                found[f"{mine} of others"][other] |= names
            else:
                beyond = {n for n in names if n not in public or other not in FACE}
                found[mine][other] |= beyond
    return {
        who: {module: sorted(names) for module, names in sorted(of.items()) if names}
        for who, of in sorted(found.items())
    }


def test_satellites_take_the_names_of_their_lists_and_no_other():
    listed, found = json.loads(LINE.read_text()), lines()
    said = []
    for who in sorted({*listed, *found}):
        old = {(m, n) for m, names in listed.get(who, {}).items() for n in names}
        new = {(m, n) for m, names in found.get(who, {}).items() for n in names}
        said += [f"{who}: {m}.{n} is not in its list" for m, n in sorted(new - old)]
        said += [
            f"{who}: {m}.{n} is not used any more: take it out of the list"
            for m, n in sorted(old - new)
        ]
    assert said == []


if __name__ == "__main__":
    LINE.write_text(json.dumps(lines(), indent=1) + "\n")
