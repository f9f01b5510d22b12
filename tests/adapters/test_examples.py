"""The example of each adapter's class runs alone, with the output that it shows."""

import doctest
import inspect
import sys
from importlib import import_module

import numpy as np
import pytest

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LIBRARIES = ("alf", "pytorchrl", "rofunc", "skrl", "tmrl", "velora")


def classes():
    """Public classes of the adapters that need no library."""
    for library in LIBRARIES:
        package = import_module(f"mmreplay.adapters.{library}")
        names = getattr(package, "__all__", ("Memory", "RandomMemory"))
        for name in names:
            if inspect.isclass(getattr(package, name)):
                yield pytest.param(getattr(package, name), id=f"{library}-{name}")


@pytest.mark.parametrize("kind", list(classes()))
def test_the_example_of_an_adapter_runs(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = inspect.getdoc(kind).partition("\nExample:\n")[2]
    assert example, f"{kind.__module__}.{kind.__name__} has no section Example"
    names = {"np": np, **vars(sys.modules[kind.__module__])}
    test = doctest.DocTestParser().get_doctest(example, names, kind.__name__, None, 0)
    output = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(test, out=output.append)
    assert test.examples
    assert runner.summarize(verbose=False).failed == 0, "".join(output)
