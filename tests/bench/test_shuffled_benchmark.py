"""The benchmark of shuffled epochs runs, small, so that it cannot rot."""

from tools.bench import bench_shuffled


def test_epochs_are_measured_and_take_no_memory_that_grows():
    result = bench_shuffled.measure(bench_shuffled.QUICK)
    assert result["first_batch_speedup"] > 0
    small, large = result["by_rows"].values()
    for costs in (small, large):
        assert costs["first_batch_ms"] > 0
        assert costs["batch_us"] > 0
    # A table of the smaller order is 80 KB; the larger one is computed.
    assert 0 < large["peak_kib"] < 2048
