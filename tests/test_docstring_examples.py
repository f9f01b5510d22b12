"""The example of each public class and function runs alone, with what it shows."""

import doctest
import inspect
import shutil

import numpy as np
import pytest

import mmreplay as mr

PARSER = doctest.DocTestParser()
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Examples begin as numpy's do, with what everybody imports, and with the buffer that
# README's "Write" makes.
NAMES = {"mr": mr, "np": np}


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    pytest.importorskip("gymnasium")
    folder = tmp_path_factory.mktemp("examples")
    mr.record("CartPole-v1", folder / "cartpole", steps=4000, num_envs=8, capacity=10_000)
    return folder / "cartpole"


@pytest.mark.parametrize("name", mr.__all__)
def test_the_example_of_a_public_name_runs(name, cartpole, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    shutil.copytree(cartpole, tmp_path / "runs" / "cartpole")
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(getattr(mr, name))
    _, found, example = text.partition("\nExample:\n")
    assert found, f"mmreplay.{name} has no section Example"
    test = PARSER.get_doctest(example, dict(NAMES), name, None, None)
    assert test.examples
    assert f"mr.{name}" in example or not inspect.isfunction(getattr(mr, name))
    told = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(test, out=told.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(told)
