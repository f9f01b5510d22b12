"""Record the public surface: ``python -m tests.frozen.record_surface``.

Adds what is new and refuses to change what was recorded. Modules whose library is not
installed are left as they are recorded; see README.md beside this file.
"""

from __future__ import annotations

import inspect
import tempfile
import warnings
from importlib.metadata import distribution
from pathlib import Path

from tests.frozen import bad_calls, command_line, pickled, records, surface


def moved(name: str) -> bool:
    """Whether a documented module is an alias of another one by now."""
    return not hasattr(surface.module(name), "__file__")


def names() -> dict[str, object]:
    """The names of every documented module that can be imported here."""
    found: dict[str, object] = {}
    for name in surface.MODULES:
        try:
            if moved(name):
                print(f"left as recorded: {name} has moved")
                continue
            found[name] = surface.surface(name)
        except ModuleNotFoundError as error:
            print(f"left as recorded: {error}")
    return found


def paths() -> list[str]:
    """Dotted names that pages and public docstrings hold and that lead somewhere."""
    texts = [page.read_text() for page in surface.PAGES]
    for name in surface.MODULES:
        try:
            held = surface.module(name)
        except ModuleNotFoundError:
            continue
        if moved(name):
            continue
        texts.append(held.__doc__ or "")
        for each in surface.public(name):
            thing = surface.get(held, each)
            texts.append(inspect.getdoc(thing) or "")
            if inspect.isclass(thing):
                for kind in surface.ours(thing):
                    texts += [inspect.getdoc(m) or "" for m in vars(kind).values()]
    leading = []
    for name in sorted(set().union(*map(surface.documented, texts))):
        try:
            surface.resolved(name)
        except (ImportError, AttributeError) as error:
            print(f"leads nowhere: {name} ({error})")
        else:
            leading.append(name)
    return leading


def modules() -> dict[str, object]:
    """Dotted names, entry points, extras and formats."""
    installed = distribution("mmreplay")
    return {
        "paths": dict.fromkeys(paths(), True),
        "entry points": {f"{point.group}/{point.name}": True for point in installed.entry_points},
        "extras": dict.fromkeys(installed.metadata.get_all("Provides-Extra"), True),
        "formats": surface.formats(),
    }


def commands() -> dict[str, object]:
    """Options, JSON and exit codes of the command line."""
    found: dict[str, object] = {"commands": command_line.commands()}
    for kind, cases, look in (
        ("prints", command_line.PRINTS, command_line.prints),
        ("ends", command_line.ENDS, command_line.end),
    ):
        here = found[kind] = {}
        for name in cases:
            with tempfile.TemporaryDirectory() as folder:
                here[name] = look(name, Path(folder))
    return found


def pickles() -> dict[str, object]:
    """What every pickled object does, after it was pickled where it was not yet."""
    found = {}
    for name, case in pickled.CASES.items():
        if not case.installed:
            print(f"left as recorded: {name} needs {case.needs}")
            continue
        pickled.record(name)
        with tempfile.TemporaryDirectory() as folder:
            found[name] = pickled.behaviour(name, Path(folder))
    return found


def errors() -> dict[str, object]:
    """Classes of the errors of wrong calls."""
    found = {}
    for name in bad_calls.CALLS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = bad_calls.error_of(name, Path(folder))
    return found


def main() -> None:
    """Record everything that can be described here."""
    warnings.simplefilter("ignore")
    records.record("names", names())
    records.record("modules", modules())
    records.record("command_line", commands())
    records.record("pickles", pickles())
    records.record("bad_calls", errors())


if __name__ == "__main__":
    main()
