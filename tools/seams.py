"""How far apart the parts of the package are: the checks that ask what a part is.

``python -m tools.seams`` prints, for the package or for each path that it is given, in
how many places code asks which engine, store, heap, commit state or sampler it has, how
many exceptions the contracts of imports have, and how much code there is. With
``--parts`` it prints how large the core and each satellite are.

Counted are, of Python files alone:

- *code*: lines without blanks, comments and docstrings;
- *engines*: ``isinstance``, ``issubclass``, and ``type(...)`` compared, with a class
  of `ENGINES`;
- *engine names*: comparisons of a name or attribute ``engine``;
- *samplers*: the same checks with a class that `mmreplay.samplers` defines;
- *getattr*: ``hasattr`` and ``getattr`` with a default, of an attribute of `OPTIONAL`;
- *exceptions*: lines of ``ignore_imports`` of contracts between satellites and core;
- *circles*: groups of modules that import each other, be it in functions;
- *complex*: functions with a complexity above 15. Each branch, loop, handler, condition
  of a comprehension, operand of a boolean beyond the first, and assert adds 1 to 1;
- *BaseException* and *skips*: ``except BaseException`` and ``fmt: skip``.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGINES = {
    "Store",
    "MemmapStore",
    "ZarrStore",
    "MemoryStore",
    "GroupStore",
    "ClosedStore",
    "FileHeap",
    "MemoryHeap",
    "ShardHeap",
    "HeapSpace",
    "SealedHeapSpace",
    "CommitState",
    "CommitReader",
    "CommitWriter",
    "MemoryCommitState",
}
OPTIONAL = {"heap", "records", "sealing", "durable_tails", "refresh"}
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.Assert,
    ast.comprehension,
    ast.match_case,
)


def code_lines(source: str) -> int:
    """Lines with code: no blanks, comments or docstrings."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            documented |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - documented)


def complexity(function: ast.AST) -> int:
    """The number of ways through a function, those of functions in it included."""
    number = 1
    for node in ast.walk(function):
        number += isinstance(node, BRANCHES)
        if isinstance(node, ast.comprehension):
            number += len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            number += len(node.values) - 1
    return number


def asked_classes(tree: ast.AST) -> Iterator[set[str]]:
    """The classes of each check of what an object is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("isinstance", "issubclass") and len(node.args) == 2:
                yield names_in(node.args[1])
        elif isinstance(node, ast.Compare) and _is_type(node.left):
            yield set().union(*map(names_in, node.comparators))


def _is_type(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"


def names_in(node: ast.AST) -> set[str]:
    """Names and last attributes in an expression."""
    return {
        each.id if isinstance(each, ast.Name) else each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute)
    }


def engine_comparisons(tree: ast.AST) -> int:
    """Comparisons of a name or an attribute ``engine``."""
    return sum(
        isinstance(node, ast.Compare)
        and any(
            getattr(side, "attr", getattr(side, "id", None)) == "engine"
            for side in (node.left, *node.comparators)
        )
        for node in ast.walk(tree)
    )


def optional_attributes(tree: ast.AST) -> int:
    """``hasattr``, and ``getattr`` with a default, of what an engine may lack."""
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id, len(node.args)) in (("hasattr", 2), ("getattr", 3))
        and isinstance(node.args[1], ast.Constant)
        and node.args[1].value in OPTIONAL
        for node in ast.walk(tree)
    )


def imported(tree: ast.Module, modules: Collection[str]) -> set[str]:
    """Modules that a module imports, also in functions; not for types alone."""
    found: set[str] = set()
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in names_in(node.test):
            nodes += node.orelse
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                full = f"{node.module}.{each.name}"
                found.add(full if full in modules else str(node.module))
        else:
            nodes += ast.iter_child_nodes(node)
    return found


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that reach each other by imports (Tarjan's algorithm)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        path.append(module)
        for other in imports[module] & imports.keys():
            if other not in numbers:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in path:
                lowest[module] = min(lowest[module], numbers[other])
        if lowest[module] == numbers[module]:
            group: set[str] = set()
            while module not in group:
                group.add(path.pop())
            if len(group) > 1:
                found.append(group)

    for module in imports:
        if module not in numbers:
            visit(module)
    return found


def measured(package: Path) -> dict[str, int]:
    """Each count of one package."""
    counts = dict.fromkeys(
        (
            "code",
            "engines",
            "engine names",
            "samplers",
            "getattr",
            "exceptions",
            "circles",
            "complex",
            "BaseException",
            "skips",
        ),
        0,
    )
    sources = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    samplers = {
        node.name
        for path, tree in trees.items()
        if path.parent == package / "samplers"
        for node in tree.body
        if isinstance(node, ast.ClassDef) and "Sampler" in node.name
    }
    names = {
        path: ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        for path in trees
    }
    modules = {*names.values()}
    imports = {names[path]: imported(tree, modules) for path, tree in trees.items()}
    for path, tree in trees.items():
        source = sources[path]
        counts["code"] += code_lines(source)
        for asked in asked_classes(tree):
            counts["engines"] += bool(asked & ENGINES)
            counts["samplers"] += bool(asked & samplers)
        counts["engine names"] += engine_comparisons(tree)
        counts["getattr"] += optional_attributes(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                counts["complex"] += complexity(node) > 15
        counts["BaseException"] += source.count("except BaseException")
        counts["skips"] += len(re.findall(r"# fmt: " "skip", source))
    counts["circles"] = len(circles(imports))
    project = package.parent / "pyproject.toml"
    if project.exists():
        for contract in tomllib.loads(project.read_text())["tool"]["importlinter"]["contracts"]:
            if contract["id"] in ("core", "satellites", "internals", "extensions"):
                counts["exceptions"] += len(contract.get("ignore_imports", ()))
    return counts


def core_and_satellites(package: Path) -> dict[str, tuple[int, int]]:
    """Files and lines of code of the core, and of each satellite, largest first."""
    contracts = tomllib.loads((package.parent / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]["contracts"]
    (core,) = (contract for contract in contracts if contract["id"] == "core")
    satellites = {name.rpartition(".")[2] for name in core["forbidden_modules"]}
    counts: dict[str, tuple[int, int]] = {}
    for path in package.rglob("*.py"):
        top = path.relative_to(package).parts[0].removesuffix(".py")
        part = top if top in satellites else "core"
        files, lines = counts.get(part, (0, 0))
        counts[part] = files + 1, lines + code_lines(path.read_text())
    return dict(sorted(counts.items(), key=lambda item: -item[1][1]))


def main() -> None:
    """Print the counts of each package, a column each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packages", nargs="*", type=Path, default=[ROOT / "mmreplay"])
    parser.add_argument("--parts", action="store_true")
    arguments = parser.parse_args()
    if arguments.parts:
        for part, (files, lines) in core_and_satellites(arguments.packages[0].resolve()).items():
            print(f"{part:14}{files:6} files {lines:8,} lines")
        return
    columns = [measured(path.resolve()) for path in arguments.packages]
    for name in columns[0]:
        print(f"{name:14}", *(f"{column[name]:9,}" for column in columns))


if __name__ == "__main__":
    main()
