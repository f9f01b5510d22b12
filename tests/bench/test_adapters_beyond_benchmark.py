"""The benchmark of adapters under a memory limit runs, small, so that it cannot rot."""

import pytest

from tools.bench import bench_adapters_beyond as bench
from tools.bench.turns import OURS


@pytest.mark.slow
def test_a_ring_of_four_times_the_limit_runs_where_tensors_do_not(tmp_path):
    limit = 16 * bench.MIB
    found = bench.outcome("alf", OURS, tmp_path, limit)
    assert found["steps"] * bench.ROW_NBYTES["alf"] > 3.9 * limit
    assert found["draw_ms"] > 0
    assert found["anonymous_mib"] < 16
    assert "failed" in bench.outcome("alf", bench.THEIRS, tmp_path, limit)


def test_a_side_that_does_what_it_should_not_fails_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "chosen", lambda modules, wanted: [])
    monkeypatch.setattr(bench, "outcome", lambda system, *_: {"steps": 1})
    with pytest.raises(AssertionError, match="alf, original: got"):
        bench.measure(tmp_path, bench.MIB, [])
