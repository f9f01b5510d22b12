"""The benchmark of the loader runs, small, so that it cannot rot."""

from tools.bench import bench_loader


def test_throughput_and_waits_are_measured(tmp_path):
    sizes = bench_loader.Sizes(blocks=8, frames=512, turns=2, steps=5)
    found = bench_loader.measure(tmp_path, sizes)
    for kind in ("vectors_256", "vectors_4096", "pixels_256"):
        assert found[kind]["batches_a_second"] > 0
        assert found[kind]["over_the_bare_gather"]["loader"] > 0
    for shares in found["learner_waits"].values():
        assert all(0 <= share < 1 for share in shares.values())
