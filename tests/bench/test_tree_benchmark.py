"""The benchmark of sum trees runs, small, so that it cannot rot."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tools.bench import bench_tree
from tools.bench.bench_tree import OURS, QUICK, TORCHRL


def test_trees_are_measured_without_any_peer():
    result = bench_tree.measure(QUICK, [])
    assert set(result["speedup"]) == {"1,000", "20,000"}
    assert set(result["speedup_over_twin"]) == set(result["median_us"]["1,000"])
    assert set(result["median_us"]["20,000"]["set_4096"]) == {OURS}
    assert set(result["times_as_long_among_most_leaves"]) == {"256", "4096"}
    assert 8 < result["bytes_per_leaf"]["20,000"] < 10


def test_a_tree_that_finds_other_leaves_is_refused():
    class Next(bench_tree.Ours):
        def __init__(self, leaves):
            super().__init__(leaves, "")
            self.find = lambda sums: self.tree.find(sums) + 1

    with pytest.raises(AssertionError, match="shifted finds other leaves"):
        bench_tree.check({"shifted": Next(bench_tree.CHECKED_LEAVES)})


def test_either_kernel_is_measured_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("MMREPLAY_KERNELS", "c")
    tree = bench_tree.Ours(3, "numpy").tree
    assert tree._tree._kernel.__name__ == "mmreplay.kernels.tree"
    assert bench_tree.os.environ["MMREPLAY_KERNELS"] == "c"
    tree.set(np.array([1]), np.array([1.0]))
    assert tree.total == 1


@pytest.mark.peer
def test_trees_are_measured_against_torchrl():
    pytest.importorskip("torchrl")
    done = subprocess.run(
        [sys.executable, "-W", "default", "-m", "tools.bench.bench_tree", "--quick"],
        check=True,
        capture_output=True,
        text=True,
    )
    speedup = json.loads(done.stdout)["speedup"]["20,000"]["find_256"]
    assert set(speedup) == {TORCHRL}
