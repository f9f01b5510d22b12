"""The benchmarks of pixels and memory run, small, so that they cannot rot."""

import mmap
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from tools.bench import bench_memory, bench_pixels, cold

SMALL = replace(bench_pixels.QUICK, rows=500, warm_turns=3, cold_turns=1)


def leaves_the_cache(folder):
    """Whether the file system here has pages that can be dropped."""
    path = folder / "probe"
    path.write_bytes(bytes(1 << 20))
    cold.drop(path)
    return cold.resident(path) < 0.01


@pytest.mark.slow
def test_pixels_are_measured_without_any_peer(tmp_path):
    if not leaves_the_cache(tmp_path):
        pytest.skip("files here live in memory alone, so none can be made cold")
    result = bench_pixels.measure(tmp_path, SMALL, peers=False)
    assert result["fill_mb_per_s"]["mmreplay"] > 0
    assert result["warm_over_take"] > 0
    assert result["cold_over_preadv"] > 0


@pytest.mark.peer
def test_pixels_are_measured_against_torchrl(tmp_path):
    if find_spec("torchrl") is None:
        pytest.skip("torchrl is not installed; see tools/bench/peers.txt")
    if not leaves_the_cache(tmp_path):
        pytest.skip("files here live in memory alone, so none can be made cold")
    result = bench_pixels.measure(tmp_path, SMALL, peers=True)
    assert result["fill_speedup"]["total"] > 0
    assert result["cold_speedup"].keys() == {bench_pixels.MAPPED}


@pytest.mark.slow
@pytest.mark.parametrize("cgroup", [True, False])
def test_memory_stays_flat_under_a_limit(tmp_path, cgroup):
    limit = 64 << 20
    result = bench_memory.measure(tmp_path, limit, cgroup=cgroup)
    assert result["ring_over_limit"] == pytest.approx(4, abs=0.01)
    # Three batches of 7 MB may be under way; the ring itself is 256 MiB.
    assert result["anonymous_growth_mib"] < 24
    if "peak_over_limit" in result:
        assert result["peak_over_limit"] <= 1.01
    else:
        assert result["enforced_by"] == "RLIMIT_DATA"


def test_a_row_that_is_not_its_numbers_is_refused():
    rows = bench_pixels.block(0, 10).copy()
    bench_pixels.check(rows, "peer", 10)
    rows[3, 40, 40, 0] ^= 1
    with pytest.raises(AssertionError, match="peer: a drawn row is not row 3"):
        bench_pixels.check(rows, "peer", 10)


def test_a_mapped_file_can_be_made_cold(tmp_path):
    if not leaves_the_cache(tmp_path):
        pytest.skip("files here live in memory alone, so none can be made cold")
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    pages = np.frombuffer(mapping, np.uint8)
    assert pages[::4096].sum() > 0
    assert len(list(cold.mappings(path))) == 1
    assert cold.resident(path) == 1.0
    cold.drop(path)
    assert cold.resident(path) < 0.01
    assert (pages == ord("x")).all()


def test_touching_memory_leaves_no_file(tmp_path):
    cold.touch_memory(tmp_path, 9 << 20)
    assert list(tmp_path.iterdir()) == []
