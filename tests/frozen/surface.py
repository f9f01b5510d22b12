"""What the package offers now: names, signatures, members; no internals are named."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PEERS = {"mmreplay.adapters.sb3": "stable_baselines3", "mmreplay.ray": "ray"}
"""Documented modules that import the library they stand for."""
MODULES = (
    "mmreplay",
    "mmreplay.episodes",
    "mmreplay.errors",
    "mmreplay.schema",
    "mmreplay.samplers.base",
    "mmreplay.convert.base",
    "mmreplay.convert.episode_ends",
    "mmreplay.convert.registry",
    "mmreplay.convert.staging",
    "mmreplay.adapters.alf",
    "mmreplay.adapters.pytorchrl",
    "mmreplay.adapters.rofunc",
    "mmreplay.adapters.sb3",
    "mmreplay.adapters.skrl",
    "mmreplay.adapters.tmrl",
    "mmreplay.adapters.velora",
    "mmreplay.testing",
)
"""Modules that README, docs or a public docstring tell to import from."""
BETWEEN_MODULES = {
    "ReplayBuffer": {
        "hold_rows",
        "add_as_is",
        "skip_autoreset_check",
        "in_place",
        "files_identity",
    },
    "RateLimiter": {"law", "bind", "check"},
    "BufferIdentity": {"cut_epoch"},
    "*": {"check_priorities", "discount_with"},
}
"""Members that modules call of each other, by class; no page names them."""
PROTOCOLS = (
    "__len__",
    "__iter__",
    "__next__",
    "__getitem__",
    "__setitem__",
    "__contains__",
    "__getattr__",
    "__call__",
    "__enter__",
    "__exit__",
    "__eq__",
    "__array__",
)
KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "position",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "either",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "**",
}
Parameters = list[list[str | None]]


def documented(text: str) -> set[str]:
    """Every dotted name under mmreplay that a text holds."""
    return set(re.findall(r"\bmmreplay(?:\.[A-Za-z_]\w*)+", text))


def resolved(name: str) -> Any:
    """What a dotted name leads to: a module, or a name in one.

    Raises:
        ImportError: No module of that name, and no module that holds it.
        AttributeError: The module holds no such name.
    """
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise
            continue
        for part in parts[cut:]:
            found = get(found, part)
        return found
    raise ImportError(f"there is no module {name}")


def get(owner: object, name: str) -> Any:
    """A public name, however it is served; an alias may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(owner, name)


def plain(default: object) -> str:
    """A default as text, or that there is one where its text differs by process."""
    if default is None or isinstance(default, bool | int | float | str | bytes):
        return repr(default)
    if isinstance(default, tuple | list | dict | set | frozenset) and " at 0x" not in (
        text := repr(default)
    ):
        return text
    return "..."


def parameters(function: Any, *, method: bool = False) -> Parameters | None:
    """Name, kind and default of each parameter; None where Python knows none."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return None
    return [
        [each.name, KINDS[each.kind], None if each.default is each.empty else plain(each.default)]
        for each in found[1 if method else 0 :]
    ]


def attributes(kind: type) -> set[str]:
    """Names that the class's docstring lists as attributes."""
    found: set[str] = set()
    for each in ours(kind):
        text = inspect.cleandoc(each.__dict__.get("__doc__") or "")
        _, _, section = text.partition("\nAttributes:\n")
        for line in section.splitlines():
            if line and not line.startswith(" "):
                break
            if match := re.match(r"    ((?:\w+(?:, )?)+):", line):
                found |= set(match[1].split(", "))
    return found


def ours(kind: type) -> list[type]:
    """The class and its bases that this package defines."""
    return [each for each in kind.__mro__ if each.__module__.startswith("mmreplay")]


def members(kind: type) -> dict[str, Any]:
    """Public members: the parameters of what is called, "value" for all else."""
    found: dict[str, Any] = {}
    for each in reversed(ours(kind)):
        names = {*vars(each), *getattr(each, "__annotations__", ())}
        for name in names:
            if not name.startswith("_"):
                found[name] = member(kind, name)
    for name in attributes(kind):
        found.setdefault(name, "value")
    for name in BETWEEN_MODULES.get(kind.__name__, set()) | BETWEEN_MODULES["*"]:
        found.pop(name, None)
    return found


def member(kind: type, name: str) -> Any:
    """Parameters of a method, or "value"."""
    held = inspect.getattr_static(kind, name, None)
    if isinstance(held, classmethod | staticmethod):
        return parameters(get(kind, name))
    if inspect.isfunction(held):
        return parameters(held, method=True)
    return "value"


def described(thing: object) -> dict[str, Any]:
    """One public name."""
    if inspect.isclass(thing):
        names = {each.__name__ for each in thing.__mro__[1:]}
        return {
            "kind": "class",
            "call": parameters(thing),
            "errors": sorted(
                name
                for name in names
                if isinstance(getattr(builtins, name, None), type) and name != "object"
            ),
            "members": members(thing),
            "protocols": sorted(
                name for name in PROTOCOLS if any(name in vars(each) for each in ours(thing))
            ),
        }
    if callable(thing) and not isinstance(thing, type):
        return {"kind": "function", "call": parameters(thing)}
    return {"kind": "value", "type": type(thing).__name__}


def module(name: str) -> Any:
    """A documented module.

    Raises:
        ModuleNotFoundError: The library that it stands for is not installed.
    """
    if name in PEERS and find_spec(PEERS[name]) is None:
        raise ModuleNotFoundError(f"{name} needs {PEERS[name]}", name=PEERS[name])
    return import_module(name)


def public(name: str) -> Iterator[str]:
    """Names that a documented module offers.

    Those of ``__all__``; else classes that it defines, and whatever else of its own
    the pages name. Of mmreplay.errors, the errors; of mmreplay.episodes, the flags.
    """
    held = module(name)
    if hasattr(held, "__all__"):
        yield from held.__all__
        return
    assigned = defined(Path(held.__file__))
    words = set(re.findall(r"\w+", "".join(page.read_text() for page in PAGES)))
    adapter = name.startswith("mmreplay.adapters.")
    for each, value in vars(held).items():
        if each.startswith("_") or inspect.ismodule(value):
            continue
        home = getattr(value, "__module__", None) or ""
        if name == "mmreplay.errors":
            if inspect.isclass(value) and issubclass(value, Exception | Warning):
                yield each
        elif name == "mmreplay.episodes":
            if each.isupper() and each in words:
                yield each
        elif each in assigned:
            if each in words or inspect.isclass(value):
                yield each
        elif adapter and each in words and home.startswith("mmreplay.adapters."):
            yield each


def defined(path: Path) -> set[str]:
    """Names that a file defines, or imports under their own name to offer them."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname for a in node.names if a.asname == a.name}
        elif isinstance(node, ast.Assign):
            found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def surface(name: str) -> dict[str, Any]:
    """Every public name of a documented module, described."""
    held = module(name)
    return {each: described(get(held, each)) for each in sorted(set(public(name)))}


def objections(old: Parameters, new: Parameters | None) -> list[str]:
    """What a call that the recorded parameters allow would no longer do."""
    if new is None:
        return ["has no signature"]
    names = {each[0]: each for each in new}
    positional = [n for n, kind, _ in new if kind in ("position", "either")]
    rest = {kind for _, kind, _ in new}
    found = []
    for number, (name, kind, default) in enumerate(old):
        if kind in ("*", "**"):
            if kind not in rest:
                found.append(f"takes no {kind}{name} any more")
            continue
        assert name is not None
        if name not in names:
            found.append(f"has no parameter {name!r} any more")
            continue
        _, kind_now, default_now = names[name]
        if kind_now != kind and (kind, kind_now) not in (
            ("keyword", "either"),
            ("position", "either"),
        ):
            found.append(f"parameter {name!r} was of kind {kind!r}, is {kind_now!r}")
        elif kind in ("position", "either") and (
            len(positional) <= number or positional[number] != name
        ):
            found.append(f"parameter {name!r} was number {number} and is not")
        if default is not None and default_now != default:
            found.append(f"the default of {name!r} was {default}, is {default_now}")
    known = {name for name, *_ in old}
    found += [
        f"needs a new argument {name!r}"
        for name, kind, default in new
        if name not in known and kind not in ("*", "**") and default is None
    ]
    return found


def formats() -> dict[str, Any]:
    """Formats that ship with the package: suffixes, and which way they go."""
    registry = import_module("mmreplay.convert.registry")
    return {
        name: {"reads": each.reads, "writes": each.writes, "suffixes": list(each.suffixes)}
        for name, each in sorted(registry.formats().items())
    }
