"""Two gloo ranks of two workers train what one process trains, on each step once."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from tests.loader.support import legal

ROOT = Path(__file__).parents[2]


def ranks(folder, tmp_path, num_ranks, workers):
    """Run all ranks and return what each wrote."""
    outs = [tmp_path / f"{num_ranks}-{rank}.npz" for rank in range(num_ranks)]
    meeting = tmp_path / f"meeting-{num_ranks}"
    children = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.loader.cloning",
                str(folder),
                str(rank),
                str(num_ranks),
                str(workers),
                str(meeting),
                str(out),
            ],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    told = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [0] * num_ranks, told
    return [np.load(out) for out in outs]


@pytest.mark.slow
def test_ranks_and_workers_train_what_one_process_trains(tmp_path):
    gymnasium = pytest.importorskip("gymnasium")
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    folder = tmp_path / "cartpole"
    mr.record(env, folder, steps=1500, seed=0)
    env.close()
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        one = ranks(folder, tmp_path, 1, 0)
        two = ranks(folder, tmp_path, 2, 2)
        with mr.ReplayBuffer.open(folder) as buffer:
            expected = legal(buffer)
    finally:
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert len(expected) > 1000
    for runs in (one, two):
        found = np.concatenate([run["places"] for run in runs], 1).T
        assert sorted(map(tuple, found.tolist())) == expected
    # Sums of float64 gradients in another order: 50 updates of rounding errors.
    for run in two:
        np.testing.assert_allclose(run["weights"], one[0]["weights"], rtol=1e-10)
    assert np.array_equal(two[0]["weights"], two[1]["weights"])
