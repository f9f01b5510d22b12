"""The benchmark of looking at a buffer measures what it says."""

import pytest

from tools.bench import bench_looking


@pytest.mark.slow
def test_stats_are_compared_with_numpys(tmp_path):
    pytest.importorskip("matplotlib")
    sizes = bench_looking.Sizes(steps=4000, num_envs=2, turns=1)
    found = bench_looking.measure(tmp_path, sizes)
    assert set(found["command_s"]) == {"stats", "plot"}
    assert found["speedup"]["numpy"] > 0
    assert (tmp_path / "looked_at.png").stat().st_size > 1000


def test_facts_that_differ_are_refused(tmp_path):
    import mmreplay as mr

    sizes = bench_looking.Sizes(steps=400, num_envs=2, turns=1)
    columns = bench_looking.fill(tmp_path / "b", sizes)
    columns["reward"] = columns["reward"] + 1
    with (
        mr.ReplayBuffer.open(tmp_path / "b") as buffer,
        pytest.raises(SystemExit, match="stats must find what numpy finds"),
    ):
        bench_looking.check(columns, buffer)
