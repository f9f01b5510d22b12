"""The benchmark of compressed shards runs, and refuses sides that differ."""

import numpy as np
import pytest

from tools.bench import bench_zarr


@pytest.mark.slow
def test_every_codec_is_reported_with_ratios(tmp_path):
    result = bench_zarr.measure(bench_zarr.QUICK, tmp_path)
    assert set(result) == {*bench_zarr.CODECS, "add", "seal", "rows"}
    told = result["blosc-lz4"]
    assert told["times_smaller"] > 5
    assert set(told["speedup_over"]) == {bench_zarr.ZARR, bench_zarr.RAW}
    assert set(told["cold"]["speedup_over"]) == {bench_zarr.RAW}
    assert set(result["seal"]["zstd"]["speedup_over"]) == {bench_zarr.ZARR}


def test_sides_that_differ_are_not_timed():
    with pytest.raises(ValueError, match="The sides must read the same rows"):
        bench_zarr.check(np.zeros(3), np.ones(3))
