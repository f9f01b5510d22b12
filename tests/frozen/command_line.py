"""What the command line takes, prints as JSON and exits with, through its entry."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import typer.core

import mmreplay as mr

(_ENTRY,) = distribution("mmreplay").entry_points.select(group="console_scripts", name="mmreplay")


def run(*args: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            _ENTRY.load()([str(arg) for arg in args])
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return code, out.getvalue(), err.getvalue()


class _Seen(Exception):
    """The command line is there to be looked at, and does not run."""


def commands() -> dict[str, Any]:
    """Arguments and options of every command."""
    held: list[Any] = []

    def look(self: Any, *_: object, **__: object) -> None:
        held.append(self)
        raise _Seen

    with mock.patch.object(typer.core.TyperGroup, "main", look), contextlib.suppress(_Seen):
        _ENTRY.load()(["--help"])
    (root,) = held
    return {
        "": _parameters(root),
        **{name: _parameters(each) for name, each in root.commands.items()},
    }


def _parameters(command: Any) -> dict[str, Any]:
    """The positional words in order, and each spelling of each option."""
    arguments, options = [], {}
    for each in command.params:
        what = {
            "required": bool(each.required),
            "many": bool(each.multiple) if hasattr(each, "multiple") else False,
            "words": each.nargs,
        }
        if each.param_type_name == "argument":
            arguments.append(what)
            continue
        flag = bool(getattr(each, "is_flag", False))
        for spelling in (*each.opts, *each.secondary_opts):
            options[spelling] = what | {"flag": flag}
    return {"arguments": arguments, "options": options}


SCHEMA = mr.Schema(
    {
        "observation": {"pixels": mr.Field((8, 8), "uint8"), "speed": mr.Field((), "float32")},
        "action": mr.Field((2,), "float32"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)


def fill(path: Path, **options: Any) -> Path:
    """A buffer of 45 steps of 2 environments."""
    # `--engine zarr` would give another one; see tests/conftest.py.
    options.setdefault("engine", "memmap")
    rng = np.random.default_rng(0)
    ends = np.zeros((45, 2), bool)
    ends[9::10] = True
    with mr.ReplayBuffer.create(
        path, SCHEMA, 100, 2, commit_every=None, autoreset="disabled", **options
    ) as buffer:
        buffer.extend(
            {
                "observation": {
                    "pixels": rng.integers(0, 256, (45, 2, 8, 8), np.uint8),
                    "speed": rng.random((45, 2), np.float32),
                },
                "action": rng.random((45, 2, 2), np.float32),
                "reward": np.ones((45, 2), np.float32),
                "terminated": ends & (np.arange(45) < 20)[:, None],
                "truncated": ends & (np.arange(45) >= 20)[:, None],
            }
        )
    return path


def _damaged(folder: Path) -> Path:
    """A buffer whose metadata is no JSON."""
    ring = fill(folder / "damaged")
    (ring / "metadata.json").write_text("{no json")
    return ring


PRINTS = {
    "info": lambda d: ["info", fill(d / "a")],
    "info, compressed": lambda d: ["info", fill(d / "z", engine="zarr")],
    "info, installation": lambda _: ["info", "--build"],
    "head": lambda d: ["head", fill(d / "a"), "-n", 2],
    "plan": lambda d: ["plan", fill(d / "a")],
    "plan, fields": lambda _: ["plan", "--field", "x:float32:3", "--capacity", "1e6"],
    "stats": lambda d: ["stats", fill(d / "a")],
    "plot": lambda d: ["plot", fill(d / "a"), "--output", d / "a.png"],
    "convert": lambda d: ["convert", fill(d / "a"), d / "a.npz"],
    "verify": lambda d: ["verify", fill(d / "a")],
    "verify, damaged": lambda d: ["verify", _damaged(d)],
    "verify, missing": lambda d: ["verify", d / "missing"],
    "clear": lambda d: ["clear", fill(d / "a"), "--yes"],
    "resize": lambda d: ["resize", fill(d / "a"), 50, "--yes"],
    "snapshot": lambda d: ["snapshot", fill(d / "a"), d / "b"],
    "repair": lambda d: ["repair", fill(d / "a"), d / "b"],
    "compact": lambda d: ["compact", fill(d / "a"), d / "b"],
    "record": lambda d: ["record", "CartPole-v1", d / "a", "--steps", 20, "--seed", 0],
}
NEEDS = {
    "plot": "matplotlib",
    "record": "gymnasium",
    "unknown policy": "gymnasium",
    "interrupted": "gymnasium",
}
"""Libraries that are not installed everywhere, by case."""


def shape(value: Any) -> Any:
    """The keys of JSON, and the types of what they hold."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if isinstance(value, bool) or value is None:
        return {True: "bool", False: "null"}[value is not None]
    return "number" if isinstance(value, int | float) else "text"


def prints(name: str, folder: Path) -> dict[str, Any]:
    """The JSON of one command, and how it ended."""
    code, out, _ = run(*PRINTS[name](folder), "--json")
    return {"exit": code, "json": shape(json.loads(out))}


def _locked(folder: Path) -> list[object]:
    path = fill(folder / "a")
    # Kept open until the process ends or the collector takes it; the list holds it.
    OPEN.append(mr.ReplayBuffer.open(path, "r+"))
    return ["resize", path, 50, "--yes"]


OPEN: list[mr.ReplayBuffer] = []


def _newer(folder: Path) -> list[object]:
    file = fill(folder / "a") / "metadata.json"
    file.write_text(file.read_text().replace("  1,\n  0", "  7,\n  0"))
    return ["info", file.parent]


def _empty_commit(folder: Path) -> list[object]:
    path = fill(folder / "a")
    (path / "data-000001" / "COMMIT").write_bytes(b"")
    return ["info", path]


def _empty(folder: Path) -> list[object]:
    mr.ReplayBuffer.create(folder / "e", SCHEMA, 10, engine="memmap").close()
    return ["head", folder / "e"]


def _there(folder: Path) -> list[object]:
    (folder / "a.npz").write_bytes(b"x")
    return ["convert", fill(folder / "a"), folder / "a.npz"]


def _no_folder(folder: Path) -> list[object]:
    (folder / "file").write_text("")
    return ["info", folder / "file"]


def _interrupted(folder: Path) -> list[object]:
    """A policy that Ctrl-C strikes."""
    (folder / "frozen_policy.py").write_text("def act(*_):\n    raise KeyboardInterrupt\n")
    sys.path.insert(0, str(folder))
    policy = "frozen_policy:act"
    return ["record", "CartPole-v1", folder / "a", "--steps", 9, "--policy", policy]


ENDS = {
    "version": lambda _: ["--version"],
    "help": lambda _: ["--help"],
    "no command": lambda _: [],
    "unknown command": lambda _: ["nonsense"],
    "unknown option": lambda _: ["info", "x", "--nonsense"],
    "argument missing": lambda _: ["head"],
    "a path that is empty": lambda _: ["info", ""],
    "a number that is none": lambda _: ["resize", "x", "many"],
    "a number too small": lambda _: ["resize", "x", "0"],
    "nobody to ask": lambda d: ["clear", fill(d / "a")],
    "path missing": lambda d: ["info", d / "typo"],
    "a file": _no_folder,
    "no buffer": lambda d: ["info", d],
    "no JSON": lambda d: ["info", _damaged(d)],
    "torn commit": _empty_commit,
    "newer version": _newer,
    "locked": _locked,
    "no rows": _empty,
    "unknown environment of a buffer": lambda d: ["head", fill(d / "a"), "--env", 9],
    "unknown field": lambda d: ["convert", fill(d / "a"), d / "a.npz", "--fields", "none"],
    "unknown format": lambda d: ["convert", fill(d / "a"), d / "a.doc"],
    "unknown format by name": lambda d: ["convert", fill(d / "a"), d / "a", "--to", "doc"],
    "target is there": _there,
    "source is no such file": lambda d: ["convert", d / "a.npz", d / "b"],
    "unknown policy": lambda d: [
        "record",
        "CartPole-v1",
        d / "a",
        "--steps",
        9,
        "--policy",
        "no_such:f",
    ],
    "snapshot onto itself": lambda d: ["snapshot", fill(d / "a"), d / "a"],
    "verify, good": lambda d: ["verify", fill(d / "a")],
    "verify, damaged": lambda d: ["verify", _damaged(d)],
    "verify, missing": lambda d: ["verify", d / "typo"],
    "repair without a target": lambda d: ["repair", _damaged(d)],
    "a library is missing": lambda d: ["plot", fill(d / "a"), "--output", d / "a.png"],
    "interrupted": _interrupted,
}


def end(name: str, folder: Path) -> int:
    """Exit code of a case of `ENDS`; nobody is there to answer a question."""
    with (
        _absent("matplotlib.figure" if name == "a library is missing" else ""),
        mock.patch.object(sys, "stdin", io.StringIO()),
        mock.patch.object(sys, "path", [*sys.path]),
    ):
        try:
            return run(*ENDS[name](folder))[0]
        finally:
            while OPEN:
                OPEN.pop().close()


@contextlib.contextmanager
def _absent(name: str) -> Iterator[None]:
    """Have a module missing; others that are imported meanwhile stay."""
    if not name:
        yield
        return
    held = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if held is not None:
            sys.modules[name] = held


def printed_to_a_full_disk(folder: Path) -> int:
    """Exit code where what is printed goes to a full disk."""
    with open("/dev/full", "wb") as out:
        return subprocess.run(
            [sys.executable, "-m", "mmreplay", "info", str(fill(folder / "a"))],
            stdout=out,
            stderr=subprocess.DEVNULL,
            timeout=60,
            # Else nothing waits to be flushed at the end.
            env={n: each for n, each in os.environ.items() if n != "PYTHONUNBUFFERED"},
        ).returncode
