"""How the package is laid out: a report that `make check` prints and never fails on.

``python -m tools.house`` prints files and lines by folder; modules that one other
module alone imports; class names that name more than one class; circles of imports
inside a folder; the share of tests that import public names only; and the journeys of
`tools.journeys`. ``--tree`` prints the first of these with every folder's files.

``--density REVISION`` prints how dense the code of the package is at a revision of git
(``.`` is the working tree): characters and nodes of the syntax tree by line of code,
for the whole package and for ten functions that are drawn by ``--seed``. Named like
that for two revisions, it shows whether lines became fewer by being written denser.

What counts: a *line of code* is neither blank, a comment, nor part of a docstring. An
*import* counts wherever it stands, in functions too, and a string that is the name of
a module counts as one, since some modules are imported by name; an import for type
checkers alone counts neither as an importer nor as a part of a circle. A test is a file
``test_*.py`` that imports mmreplay. *Public* are the names of ``mmreplay.__all__`` and
the modules of `PUBLIC_MODULES`.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "mmreplay"
PUBLIC_MODULES = ("mmreplay.adapters", "mmreplay.errors", "mmreplay.testing")
"""Modules, with those inside them, that users import by their own names."""
FACES = ("Memory", "RandomMemory", "ReplayBuffer", "SegmentTree")
"""Names of classes in other libraries that adapters replace under the same name."""
SAMPLE = 10
LEAST_LINES = 5
"""Shorter functions are not drawn: their density says nothing."""

Sources = Mapping[str, str]
"""Text of Python files by their path from the root of the repository."""


def working_tree(folder: str) -> Sources:
    """Files of a folder as they are now."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def at_revision(revision: str, folder: str = PACKAGE) -> Sources:
    """Files of a folder as they are at a revision of git; ``.`` is the working tree."""
    if revision == ".":
        return working_tree(folder)
    listed = _git("ls-tree", "-r", "--name-only", revision, "--", f"{folder}/")
    paths = [path for path in listed.splitlines() if path.endswith(".py")]
    return {path: _git("show", f"{revision}:{path}") for path in paths}


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code: no blanks, comments or docstrings."""
    skipped = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
        tokenize.ENCODING,
    )
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        # A string that is a statement is a docstring, of an attribute too.
        if _is_docstring(node):
            lines -= _span(node)
    return lines


def _is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _span(node: ast.stmt) -> set[int]:
    """Numbers of a statement's lines."""
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def tree(sources: Sources, files: bool = False) -> list[str]:
    """Files, lines and lines of code by folder, each without its subfolders."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path in sources:
        folders[path.rpartition("/")[0]].append(path)
    rows = [("folder", "files", "lines", "of code")]
    total = [0, 0, 0]
    for folder, paths in sorted(folders.items()):
        counts = [
            (p, len(sources[p].splitlines()), len(code_lines(sources[p]))) for p in sorted(paths)
        ]
        sums = [len(paths), sum(c[1] for c in counts), sum(c[2] for c in counts)]
        total = [a + b for a, b in zip(total, sums, strict=True)]
        rows.append((f"{folder}/", *(str(n) for n in sums)))  # type: ignore[arg-type]  # three numbers
        if files:
            rows += [
                (f"  {p.rpartition('/')[2]}", "", str(lines), str(code))
                for p, lines, code in counts
            ]
    rows.append(("all", *(str(n) for n in total)))  # type: ignore[arg-type]  # three numbers
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def module_of(path: str) -> str:
    """The dotted name of a file's module."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(text: str, modules: Iterable[str], strings: bool = True) -> set[str]:
    """Which of some modules a file imports, in any scope.

    Args:
        text: Of the file.
        modules: That are looked for.
        strings: Whether a string that is a module's name counts.
    """
    known = set(modules)
    found: set[str] = set()
    for node in _without_type_checking(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
        elif strings and isinstance(node, ast.Constant):
            found.add(str(node.value))
    return found & known


def _without_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _without_type_checking(child)


def graph_of(sources: Sources, strings: bool = True) -> dict[str, set[str]]:
    """Modules of the package that each of its modules imports."""
    modules = {module_of(path): text for path, text in sources.items()}
    return {name: imports_of(text, modules, strings) - {name} for name, text in modules.items()}


def one_importer(graph: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Modules that one other module alone imports, and that module.

    The package's own face does not count: what it alone imports is public.
    """
    importers: dict[str, set[str]] = defaultdict(set)
    for name, imported in graph.items():
        for other in imported:
            importers[other].add(name)
    return [
        (name, next(iter(by)))
        for name, by in sorted(importers.items())
        if len(by) == 1 and by != {PACKAGE}
    ]


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules of one folder that import one another, directly or not."""

    def folder(name: str) -> str:
        return name.rpartition(".")[0]

    # Who imports from a package's face imports the face: it counts inside its folder.
    inside = {
        name: {
            other
            for other in imported
            if folder(other) == folder(name) or folder(other) == name or folder(name) == other
        }
        for name, imported in graph.items()
    }
    reached = {name: _reachable(name, inside) for name in inside}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in inside
        if name in reached[name]
    }
    return sorted(sorted(group) for group in groups)


def _reachable(name: str, graph: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(graph[name])
    while waiting:
        other = waiting.pop()
        if other not in reached:
            reached.add(other)
            waiting += graph[other]
    return reached


def class_names(sources: Sources) -> dict[str, list[str]]:
    """Names of classes that more than one class has, and where these are."""
    classes: dict[str, list[str]] = defaultdict(list)
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name not in FACES:
                classes[node.name].append(f"{path}:{node.lineno}")
    return {name: where for name, where in sorted(classes.items()) if len(where) > 1}


def public_tests(tests: Sources, public: Iterable[str]) -> tuple[int, int]:
    """How many files of tests import public names only, of how many.

    Args:
        tests: All files of tests.
        public: Names that ``from mmreplay import`` may take.
    """
    names = set(public)
    ok = total = 0
    for path, text in tests.items():
        if not path.rpartition("/")[2].startswith("test_"):
            continue
        uses = [use for node in ast.walk(ast.parse(text)) for use in _uses(node)]
        if uses:
            total += 1
            ok += all(_is_public(use, names) for use in uses)
    return ok, total


def _uses(node: ast.AST) -> Iterator[str]:
    """Dotted names of the package that a statement imports."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == PACKAGE:
                yield alias.name
    elif isinstance(node, ast.ImportFrom) and not node.level:
        module = node.module or ""
        if module.split(".")[0] == PACKAGE:
            for alias in node.names:
                yield f"{module}.{alias.name}"


def _is_public(use: str, names: set[str]) -> bool:
    inside = any(use == m or use.startswith(f"{m}.") for m in PUBLIC_MODULES)
    return use == PACKAGE or inside or use.removeprefix(f"{PACKAGE}.") in names


@dataclass(frozen=True, slots=True)
class Density:
    """How much stands in a line of code, on average.

    Attributes:
        name: Of what.
        lines: Lines of code.
        characters: By line, without indentation.
        nodes: Of the syntax tree, by line.
    """

    name: str
    lines: int
    characters: float
    nodes: float


def densities(sources: Sources, seed: int) -> list[Density]:
    """Of all files together, then of ten functions that are drawn by a seed."""
    lines = characters = nodes = 0
    functions: list[Density] = []
    for path, text in sources.items():
        numbers, split = code_lines(text), text.splitlines()
        module = ast.parse(text)
        lines += len(numbers)
        characters += sum(len(split[n - 1].strip()) for n in numbers)
        nodes += _nodes(module)
        for node in ast.walk(module):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                own = numbers & _span(node)
                if len(own) >= LEAST_LINES:
                    long = sum(len(split[n - 1].strip()) for n in own)
                    functions.append(
                        Density(
                            f"{path}:{node.lineno} {node.name}",
                            len(own),
                            long / len(own),
                            _nodes(node) / len(own),
                        )
                    )
    whole = Density(f"all, {len(sources)} files", lines, characters / lines, nodes / lines)
    drawn = random.Random(seed).sample(functions, min(SAMPLE, len(functions)))
    mean = _mean(f"mean of {len(functions)} functions", functions)
    return [whole, mean, *sorted(drawn, key=lambda density: density.name)]


def _mean(name: str, functions: Sequence[Density]) -> Density:
    count = max(1, len(functions))
    return Density(
        name,
        sum(f.lines for f in functions) // count,
        sum(f.characters for f in functions) / count,
        sum(f.nodes for f in functions) / count,
    )


def _nodes(tree: ast.AST) -> int:
    """Nodes without docstrings, and without contexts, which nobody writes."""
    nodes = list(ast.walk(tree))
    contexts = sum(isinstance(node, ast.expr_context) for node in nodes)
    # The statement and its constant.
    return len(nodes) - contexts - 2 * sum(map(_is_docstring, nodes))


def report(journeys: bool = True) -> Iterator[str]:
    """Lines of the report."""
    sources = working_tree(PACKAGE)
    yield "Files and lines by folder"
    yield from tree(sources)
    graph = graph_of(sources)
    alone = one_importer(graph)
    near = sum(a.rpartition(".")[0] == b.rpartition(".")[0] for a, b in alone)
    yield f"\nModules with one importer: {len(alone)}, in the same folder {near}"
    yield from (f"  {name} <- {by}" for name, by in alone)
    names = class_names(sources)
    yield f"\nClass names that more than one class has: {len(names)}"
    yield from (f"  {name}: {', '.join(where)}" for name, where in names.items())
    groups = circles(graph_of(sources, strings=False))
    yield f"\nCircles of imports inside a folder: {len(groups)}"
    yield from (f"  {' '.join(group)}" for group in groups)
    from mmreplay import __all__ as public

    ok, total = public_tests(working_tree("tests"), public)
    share = f"{ok / max(1, total):.0%}"
    yield f"\nTests that import public names only: {ok} of {total} files, {share}"
    if journeys:
        yield "\nFiles that one call passes through"
        done = subprocess.run(
            [sys.executable, "-m", "tools.journeys"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        yield done.stdout.rstrip() or done.stderr.rstrip()


def main() -> int:
    """Print what was asked for; never fail."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", action="store_true", help="with every file")
    parser.add_argument("--no-journeys", action="store_true", help="leave them out")
    parser.add_argument("--density", metavar="REVISION", help="of git; . is what is here")
    parser.add_argument("--seed", type=int, default=0, help="of the ten functions")
    options = parser.parse_args()
    if options.tree:
        print("\n".join(tree(working_tree(PACKAGE), files=True)))
    elif options.density:
        rows = [("code", "lines", "characters/line", "nodes/line")]
        rows += [
            (density.name, str(density.lines), f"{density.characters:.1f}", f"{density.nodes:.2f}")
            for density in densities(at_revision(options.density), options.seed)
        ]
        print("\n".join(columns(rows)))
    else:
        for line in report(not options.no_journeys):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
