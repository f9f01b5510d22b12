"""Importing mmreplay is cheap, and what it offers is documented."""

import ast
import inspect
import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import mmreplay

HEAVY = {
    "torch",
    "zarr",
    "numcodecs",
    "pyarrow",
    "pandas",
    "h5py",
    "safetensors",
    "gymnasium",
    "ale_py",
    "mujoco",
    "matplotlib",
    "typer",
    "rich",
}


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running code."""
    listing = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{listing}"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    names = json.loads(done.stdout.splitlines()[-1])
    return {name.partition(".")[0] for name in names}


def test_importing_mmreplay_loads_nothing_heavy():
    assert not HEAVY & modules_after("import mmreplay")


def test_a_heavy_module_would_be_noticed():
    assert "safetensors" in modules_after("import safetensors")


def test_a_buffer_and_a_schema_are_had_without_torch_or_gymnasium():
    loaded = modules_after("from mmreplay import Field, ReplayBuffer, Schema")
    assert not HEAVY & loaded


def test_a_similar_name_is_suggested():
    done = subprocess.run(
        [sys.executable, "-c", "import mmreplay\nmmreplay.ReplyBuffer"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Did you mean: 'ReplayBuffer'?" in done.stderr


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("ReplayBufer", "ReplayBuffer"),
        ("UniformSample", "UniformSampler"),
        ("nstep", "NStep"),
        ("field", "Field"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_near_one(name, near):
    with pytest.raises(AttributeError, match=f"{name!r}. Did you mean: {near!r}?"):
        getattr(mmreplay, name)
    assert not hasattr(mmreplay, name)
    assert getattr(mmreplay, name, None) is None
    told = f"cannot import name {name!r} from 'mmreplay'. Did you mean: {near!r}?"
    with pytest.raises(ImportError, match=told):
        exec(f"from mmreplay import {name}", {})


def test_a_name_without_a_similar_one_gets_pythons_message():
    with pytest.raises(AttributeError, match=r"has no attribute 'quux'$"):
        _ = mmreplay.quux
    with pytest.raises(ImportError, match="cannot import name 'quux' from 'mmreplay'"):
        exec("from mmreplay import quux", {})


def test_modules_with_names_near_to_public_ones_are_imported():
    code = "from mmreplay import schema, samplers, stats, batch, limiter, plan"
    assert "mmreplay" in modules_after(code)


def test_the_adapters_as_such_load_nothing_and_need_no_library():
    assert not HEAVY & modules_after("import mmreplay.adapters")


@pytest.mark.parametrize("library", ["alf", "pytorchrl", "sb3", "skrl", "tmrl", "velora"])
@pytest.mark.sliced(2)
def test_reading_the_files_of_a_library_loads_no_torch(library):
    loaded = modules_after(f"import mmreplay.adapters.{library}.files")
    assert "mmreplay" in loaded
    assert not {"torch", "stable_baselines3"} & loaded


@pytest.mark.skipif(find_spec("stable_baselines3") is not None, reason="it is here")
def test_an_adapter_names_the_library_that_it_lacks():
    with pytest.raises(
        ModuleNotFoundError, match="sb3 needs stable-baselines3, which is not installed"
    ):
        _ = import_module("mmreplay.adapters.sb3").ReplayBuffer


def test_no_public_name_is_listed_twice():
    assert len(mmreplay.__all__) == len(set(mmreplay.__all__))


def test_type_checkers_see_each_public_name():
    tree = ast.parse(Path(mmreplay.__file__).read_text())
    (imports,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module
        for node in ast.walk(imports)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    missing = mmreplay._MODULES.items() - seen.items()
    assert not missing, (
        f"{dict(missing)} need an import under TYPE_CHECKING of mmreplay/__init__.py"
    )


def test_dir_lists_the_public_names():
    assert set(mmreplay.__all__) <= set(dir(mmreplay))


@pytest.mark.parametrize("name", mmreplay.__all__)
def test_every_public_name_resolves_and_has_a_docstring(name):
    thing = getattr(mmreplay, name)
    if isinstance(thing, str):  # __version__
        return
    assert inspect.getdoc(thing), f"mmreplay.{name} has no docstring"
    if inspect.isclass(thing):
        # A dataclass without one is given its signature for a docstring.
        assert thing.__doc__
        assert not thing.__doc__.startswith(f"{name}(")


def public_methods() -> list[str]:
    """Methods and properties that the public classes define themselves."""
    found = []
    for name in mmreplay.__all__:
        thing = getattr(mmreplay, name)
        if not inspect.isclass(thing):
            continue
        for member, value in vars(thing).items():
            described = inspect.isroutine(value) or isinstance(value, property)
            if described and not member.startswith("_"):
                found.append(f"{name}.{member}")
    return found


def test_every_public_method_has_a_docstring():
    missing = []
    for path in public_methods():
        name, member = path.split(".")
        if not inspect.getdoc(getattr(getattr(mmreplay, name), member)):
            missing.append(path)
    assert not missing


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        mmreplay.no_such_name  # noqa: B018


def test_every_error_is_had_from_the_package():
    errors = mmreplay.errors
    for name, kind in vars(errors).items():
        known = isinstance(kind, type) and issubclass(kind, Exception)
        if known and not name.startswith("_"):
            assert getattr(mmreplay, name) is kind
    done = subprocess.run(
        [sys.executable, "-c", "import mmreplay as mr\nprint(mr.errors.FullError)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "FullError" in done.stdout
