"""The benchmarks of rings on Ray run, small, so that they cannot rot."""

import pytest

pytest.importorskip("ray.rllib", reason="RLlib is not installed: see make ray")

from tools.bench import bench_ray, dqn_returns
from tools.bench.turns import OURS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]


def test_both_buffers_behind_rllib_are_measured(tmp_path):
    result = bench_ray.behind_rllib(tmp_path, bench_ray.QUICK)
    for question in ("add_8_steps", "sample_256_and_update"):
        assert result[question]["speedup"]["rllib"] > 0
        assert set(result[question]["median_us"]) == {OURS, "rllib"}


def test_both_epochs_have_the_same_rows(tmp_path):
    # The sides compare the sums of the numbers of their rows.
    result = bench_ray.epochs(tmp_path, bench_ray.QUICK)
    assert result["rows"] == bench_ray.QUICK.rows
    assert result["speedup"]["ray_data"] > 0
    assert 0 < result["memory_of_ours_over_ray_data"] < 1


def test_a_killed_run_of_dqn_goes_on_with_its_ring():
    result = dqn_returns.measure(seeds=1, iterations=2, kill=True)
    assert result["kills"] == 1
    assert all(value > 0 for value in result["mean_return"].values())
