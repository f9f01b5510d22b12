"""The benchmark of conversions runs, small, so that it cannot rot."""

import json

import pytest

from tools.bench import bench_convert
from tools.bench.bench_convert import PEERS, SCHEMAS, SUFFIX, Sizes

TINY = Sizes(300, 20, 1)


@pytest.mark.parametrize("name", ["csv", "parquet"])
def test_a_process_converts_and_tells_what_it_took(name, tmp_path, capsys):
    for place, rows in (("buffer", 300), ("small", 50)):
        bench_convert.fill(tmp_path / place, "vectors", rows)
    for direction in ("export", "read", "load"):
        bench_convert.child("ours", name, direction, tmp_path)
        took = json.loads(capsys.readouterr().out)
        assert took["seconds"] > 0
        assert 0 <= took["peak_nbytes"] < 200 << 20


def test_peers_write_what_they_read(tmp_path):
    bench_convert.fill(tmp_path / "buffer", "pixels", 20)
    held = bench_convert.columns(tmp_path / "buffer")
    for name in ("npz", "safetensors"):
        PEERS[name].write(held)(tmp_path / f"x.{name}")
        found = PEERS[name].read(tmp_path / f"x.{name}")
        assert set(found) == set(SCHEMAS["pixels"])
        assert (found["observation"] == held["observation"]).all()


@pytest.mark.slow
def test_every_format_is_measured_both_ways(tmp_path):
    result = bench_convert.measure(tmp_path, TINY, list(SUFFIX))
    for kind, told in result.items():
        for name in SUFFIX:
            if (kind, name) == ("pixels", "csv"):
                assert name not in told
                continue
            for direction in ("export", "read", "load"):
                assert told[name][direction]["mb_per_s"] > 0
                assert 0 <= told[name][direction]["peak_anon_mib"] < 200
    assert result["vectors"]["npz"]["export"]["speedup"] > 0
    assert "speedup" not in result["vectors"]["npz"]["load"]
