"""docs/extending.md lists what adapters and datasets import."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()


def modules(cell):
    """Modules of a cell; `.name` is a module beside the one before it."""
    found = []
    for name in re.findall(r"`([\w.]+)`", cell):
        beside = name.startswith(".")
        found.append(found[-1].rpartition(".")[0] + name if beside else name)
    return found


def table(title, *columns):
    """Cells of each row of the table under a heading."""
    head = "| " + " | ".join(columns) + " |"
    text = PAGE.split(f"# {title}\n")[1].split(head)[1]
    lines = re.match(r"\n\|[-|]+\|\n((?:\|.*\n)+)", text)[1].splitlines()
    return [line.strip("|").split(" | ") for line in lines]


SURFACE = {module for cell, _ in table("Modules", "module", "offers") for module in modules(cell)}
EXCEPTIONS = {
    (user, module)
    for cell, users, _ in table("Exceptions", "module", "used by", "reason")
    for module in modules(cell)
    for user in modules(users)
}


def covers(listed, module):
    """Whether a module, or a package above it, is listed."""
    return any(f"{module}.".startswith(f"{each}.") for each in listed)


def imports():
    """Each (importer, imported) of adapters and datasets, as names of modules."""
    for package in ("adapters", "datasets"):
        for path in (ROOT / "mmreplay" / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            importer = ".".join(parts).removesuffix(".__init__")
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found = [each.name for each in node.names]
                elif isinstance(node, ast.ImportFrom):
                    found = [f"{node.module}.{each.name}" for each in node.names]
                else:
                    continue
                for name in found:
                    file = ROOT / name.replace(".", "/")
                    if not (file.is_dir() or file.with_suffix(".py").exists()):
                        name = name.rpartition(".")[0]
                    if name.startswith("mmreplay."):
                        yield importer, name


def test_what_the_page_lists_is_used():
    """Of the package, by adapters, by datasets or by the examples of the pages."""
    found = [*imports()]
    modules_used = {module for _, module in found}
    examples = "".join(
        path.read_text() for path in (ROOT / "docs").rglob("*.*") if path.suffix in (".md", ".py")
    )
    unused = [
        each
        for each in SURFACE
        if not any(covers([each], module) for module in modules_used)
        and f"from {each} import" not in examples
    ]
    assert unused == []
    assert {*found} >= EXCEPTIONS


def test_every_import_of_adapters_and_datasets_is_on_the_page():
    found = list(imports())
    assert len(found) > 300
    for importer, module in found:
        own = importer.split(".")[:2] == module.split(".")[:2]
        listed = covers(SURFACE, module) or (importer, module) in EXCEPTIONS
        assert own or listed, f"{importer} imports {module}"
