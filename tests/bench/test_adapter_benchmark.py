"""The benchmark of adapters runs, small, so that it cannot rot."""

import numpy as np
import pytest

from tools.bench import bench_adapters
from tools.bench.bench_adapters import QUICK, THEIRS, Skrl


def test_adapters_are_measured_without_the_originals(tmp_path):
    result = bench_adapters.measure(tmp_path, QUICK, [])
    assert "skrl" in result
    for parts in result.values():
        for part in ("add", "sample"):
            assert parts[part]["speedup"] == {}
            assert parts[part]["median_us"]["mmreplay"] > 0


@pytest.mark.peer
def test_adapters_are_measured_against_the_originals(tmp_path):
    found = bench_adapters.chosen(bench_adapters.MODULES, None)
    if not found:
        pytest.skip("no library is installed; see tools/bench/peers.txt")
    result = bench_adapters.measure(tmp_path, QUICK, found)
    for system in found:
        assert result[system]["sample"]["speedup"][THEIRS] > 0


def test_a_draw_of_something_else_would_be_noticed(tmp_path):
    face = Skrl(tmp_path / "ring", 80)
    rewards = np.arange(100, dtype=np.float32)[:, None]
    face.drawn = lambda batch: (rewards + 1, rewards)
    with pytest.raises(AssertionError, match="skrl: a drawn transition is not one"):
        bench_adapters.check(face, "skrl", 80)
