"""The benchmarks of real recordings run, small, and tell what they should."""

import numpy as np
import pytest

from tools.bench import bench_bytes, bench_zarr_peers, recorded

pytest.importorskip("ale_py", reason="ale-py is not installed")
pytest.importorskip("mujoco", reason="mujoco is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", [recorded.ATARI, recorded.MUJOCO])
def test_recordings_are_rows_of_the_schema_one_environment_after_another(name):
    rows = recorded.columns(name, 48)
    fields = recorded.SCHEMAS[name].fields
    assert set(rows) == set(fields)
    for path, column in rows.items():
        assert (column.shape, column.dtype) == ((48, *fields[path].shape), column.dtype)
    steps = list(recorded.steps(name, 48))
    # Six steps of each of eight environments; the same seed plays the same.
    assert np.array_equal(rows["reward"][:6], [each["reward"][0] for each in steps])


def test_every_codec_is_read_without_any_peer(tmp_path):
    found = bench_zarr_peers.measure(40, 8, 2, tmp_path, [])
    assert set(found) == set(bench_zarr_peers.KINDS)
    for kind in found.values():
        for told in kind.values():
            assert told["speedup_over"] == {}
            assert told["median_us"]["mmreplay"] > 0


@pytest.mark.peer
def test_every_codec_is_read_against_tensorstore(tmp_path):
    pytest.importorskip("tensorstore", reason="tensorstore is not installed")
    found = bench_zarr_peers.measure(40, 8, 2, tmp_path, ["tensorstore"])
    for kind in found.values():
        for told in kind.values():
            assert set(told["speedup_over"]) == {"tensorstore", bench_zarr_peers.CACHED}


def test_bytes_are_reported_for_every_method_of_both_recordings(tmp_path):
    found = bench_bytes.measure({"atari": 40, "mujoco": 200}, tmp_path)
    for kind in ("atari", "mujoco"):
        told = found[kind]
        assert set(told["times_smaller"]) == {
            "mmreplay_blosc-lz4",
            "mmreplay_zstd",
            "mmreplay_none",
            "npz_deflate",
            "hdf5_gzip",
            "parquet_zstd",
        }
        assert set(told["bytes"]) == {"raw", *told["times_smaller"]}
    # Nothing is made smaller by no codec.
    assert found["atari"]["times_smaller"]["mmreplay_none"] < 1
    assert found["atari"]["times_smaller"]["mmreplay_zstd"] > 5
