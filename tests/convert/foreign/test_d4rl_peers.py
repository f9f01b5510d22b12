"""D4RL's own `qlearning_dataset` beside the steps that we draw from its files.

The package itself needs mujoco_py, which cannot be installed: the one function is taken
out of its source.
"""

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

import mmreplay as mr
from tests.convert.foreign.oracle import drawn

pytestmark = pytest.mark.peer
PACKAGE = find_spec("d4rl")
if PACKAGE is None:
    pytest.skip("d4rl is not installed", allow_module_level=True)


def qlearning_dataset(dataset, limit=10**9):
    """What the function makes of a dict of arrays, by the paths of our fields."""
    tree = ast.parse(Path(PACKAGE.origin).read_text())
    (function,) = (
        each
        for each in tree.body
        if isinstance(each, ast.FunctionDef) and each.name == "qlearning_dataset"
    )
    names = {"np": np}
    exec(compile(ast.Module([function], []), PACKAGE.origin, "exec"), names)
    env = SimpleNamespace(_max_episode_steps=limit)
    made = names["qlearning_dataset"](env, dataset=dataset)
    return {
        "observation": made["observations"],
        "action": made["actions"],
        "next_observation": made["next_observations"],
        "reward": made["rewards"],
        "terminated": made["terminals"],
    }


def sets(rng, rows):
    terminals = rng.random(rows) < 0.03
    timeouts = (rng.random(rows) < 0.03) & ~terminals
    return {
        "observations": rng.normal(size=(rows, 11)).astype(np.float32),
        "actions": rng.normal(size=(rows, 3)).astype(np.float32),
        "rewards": rng.normal(size=rows).astype(np.float32),
        "terminals": terminals,
        "timeouts": timeouts,
        "infos/qpos": rng.normal(size=(rows, 5)),
    }


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "chunks": True}])
@pytest.mark.parametrize("seed", range(5))
def test_steps_are_the_transitions_that_d4rl_learns_from(tmp_path, seed, options):
    data = sets(np.random.default_rng(seed), 2_000)
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name, values in data.items():
            file.create_dataset(name, data=values, **options)
    mr.load(tmp_path / "a.hdf5", tmp_path / "buffer", strict=True)
    found, _ = drawn(tmp_path / "buffer", ["observation"])
    # A step that ran out of time has no next observation, there and here; nor has
    # the newest one, which D4RL leaves out even where it is terminal.
    found = {
        name: values[: -1 if data["terminals"][-1] else None] for name, values in found.items()
    }
    expected = qlearning_dataset(data)
    assert len(expected["reward"]) > 1_800
    over = expected["terminated"]
    for path, values in expected.items():
        if path == "next_observation":
            # D4RL has the first observation of the next episode there, which no
            # learner reads.
            np.testing.assert_array_equal(found[path][~over], values[~over])
        else:
            np.testing.assert_array_equal(found[path], values, err_msg=path)
    kept = np.flatnonzero(~data["timeouts"][:-1])
    np.testing.assert_array_equal(found["info/qpos"], data["infos/qpos"][kept])


def test_without_timeouts_the_steps_are_those_of_episodes_without_a_limit(tmp_path):
    data = sets(np.random.default_rng(7), 1_500)
    del data["timeouts"]
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name, values in data.items():
            file.create_dataset(name, data=values)
    report = mr.load(tmp_path / "a.hdf5", tmp_path / "buffer")
    assert any("neither 'timeouts' nor 'next_observations'" in d for d in report.doubts)
    found, _ = drawn(tmp_path / "buffer", ["observation"])
    expected = qlearning_dataset(data)
    over = expected["terminated"]
    for path, values in expected.items():
        rows = slice(None) if path != "next_observation" else ~over
        np.testing.assert_array_equal(found[path][: len(values)][rows], values[rows])
    assert len(found["reward"]) - len(over) == data["terminals"][-1]
