"""The benchmark of durability runs, small, so that it cannot rot."""

from tools.bench import bench_durability


def test_each_level_is_given_its_price():
    result = bench_durability.measure(bench_durability.QUICK)
    assert set(result["busy_percent"]) == set(bench_durability.LEVELS)
    assert all(0 < share < 100 for share in result["busy_percent"].values())
    assert result["times_process"]["process"] == 1
