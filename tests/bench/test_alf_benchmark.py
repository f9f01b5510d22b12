"""The benchmark of the alf adapter runs, small, so that it cannot rot."""

import pytest

from tools.bench import bench_alf


def test_adds_and_draws_are_timed_and_are_of_what_was_added(tmp_path):
    pytest.importorskip("torch")
    told = bench_alf.measure(tmp_path, bench_alf.QUICK)
    assert set(told) == {"uniform_add", "uniform_draw", "prioritized_add", "prioritized_draw"}
    for part in told.values():
        assert set(part["median_us"]) == {"mmreplay", "tensors"}
        assert part["speedup"]["tensors"] > 0


def test_a_memory_that_draws_other_rows_is_refused():
    memory = bench_alf.Tensors(False, 8)
    bench_alf.filled(memory, 8)
    memory._leaves.reward[:] = 0
    with pytest.raises(AssertionError, match="a row is not what was added"):
        bench_alf.check(memory, 32)
