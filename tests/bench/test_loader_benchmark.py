"""The benchmark of the loader runs, small, so that it cannot rot."""

import pytest
import torch

from tools.bench import bench_gpu, bench_loader


@pytest.mark.slow
def test_throughput_and_waits_are_measured(tmp_path):
    sizes = bench_loader.Sizes(blocks=8, frames=512, turns=2, steps=5)
    found = bench_loader.measure(tmp_path, sizes)
    for kind in ("vectors_256", "vectors_4096", "pixels_256"):
        least = 0.9 * found[kind]["batches_a_second"]
        assert found[kind]["batches_a_second_in_the_best_tenth"] > least > 0
        assert found[kind]["over_the_bare_gather"]["loader"] > 0
    for shares in found["learner_waits"].values():
        assert all(0 <= share < 1 for share in shares.values())


def test_without_a_gpu_its_benchmark_says_so(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = bench_gpu.measure(tmp_path, bench_loader.QUICK)
    assert found == {"skipped": "torch finds no CUDA device here"}


def test_token_sequences_are_checked_without_a_gpu(tmp_path):
    sizes = bench_loader.Sizes(blocks=8, frames=512, turns=2, steps=5)
    with bench_gpu.tokens(tmp_path, sizes) as buffer:
        assert buffer.heads.tolist() == [512]
        batch = buffer.sample(64)
        bench_gpu.check(batch)
        batch["tokens"].values[-1] ^= 1
        with pytest.raises(AssertionError, match="not that of its number"):
            bench_gpu.check(batch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_copies_to_a_gpu_are_measured(tmp_path):
    sizes = bench_loader.Sizes(blocks=8, frames=1024, turns=2, steps=5)
    found = bench_gpu.measure(tmp_path, sizes)
    for prefetch in (1, 2, 4, 8):
        for kind in (found, found["tokens"]):
            assert kind[f"prefetch_{prefetch}"]["over_the_pinned_copy"] > 0
