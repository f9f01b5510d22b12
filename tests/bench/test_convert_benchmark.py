"""The benchmark of conversions runs, small, so that it cannot rot."""

import json

import numpy as np
import pytest

from tools.bench import bench_convert
from tools.bench.bench_convert import OURS, SUFFIX, Sizes
from tools.bench.convert_peers import COPY, PEERS

TINY = Sizes(300, 20, 1)


@pytest.mark.parametrize("name", ["csv", "parquet"])
def test_a_process_converts_and_tells_what_it_took(name, tmp_path, capsys):
    for place, rows in (("buffer", 300), ("small", 50)):
        bench_convert.fill(tmp_path / place, "vectors", rows)
    for direction in ("export", "read", "load"):
        bench_convert.child(OURS, name, direction, tmp_path)
        took = json.loads(capsys.readouterr().out)
        assert took["seconds"] > 0
        assert 0 <= took["peak_nbytes"] < 200 << 20


@pytest.mark.parametrize("name", SUFFIX)
@pytest.mark.sliced(2)
@pytest.mark.slow
def test_peers_write_what_they_read(name, tmp_path):
    kind = "vectors" if name == "csv" else "pixels"
    bench_convert.fill(tmp_path / "buffer", kind, 20)
    held = bench_convert.columns(tmp_path / "buffer")
    for side, peer in PEERS[name].items():
        if peer.write is None or not peer.images:
            continue
        pytest.importorskip(peer.module)
        peer.write(held)(tmp_path / f"x.{name}")
        found = peer.read(tmp_path / f"x.{name}")
        column = found["reward"]
        assert np.asarray(column).tobytes() == held["reward"].tobytes(), side
        assert len(column) == 20


def test_a_copy_is_of_what_ours_wrote(tmp_path):
    for place, rows in (("buffer", 300), ("small", 50)):
        bench_convert.fill(tmp_path / place, "vectors", rows)
    bench_convert.child(OURS, "npz", "export", tmp_path)
    bench_convert.child(COPY, "npz", "export", tmp_path)
    whole = (tmp_path / "ours.npz").read_bytes()
    assert (tmp_path / f"{COPY}.npz").read_bytes() == whole


@pytest.mark.slow
def test_every_format_is_measured_both_ways_and_none_twice(tmp_path, monkeypatch):
    done = tmp_path / "done.json"
    result = bench_convert.measure(tmp_path, TINY, done=done)
    for kind, told in result.items():
        for name in SUFFIX:
            if (kind, name) == ("pixels", "csv"):
                assert name not in told
                continue
            for direction in ("export", "read", "load"):
                assert told[name][direction]["mb_per_s"] > 0
                assert 0 <= told[name][direction]["peak_anon_mib"] < 200
    assert set(result["vectors"]["npz"]["export"]["speedup"]) == {"np_savez", COPY}
    assert set(result["vectors"]["npz"]["load"]["speedup"]) == {COPY}
    assert {each.name for each in tmp_path.iterdir()} == {"done.json"}
    monkeypatch.setattr(bench_convert, "run", None)
    assert bench_convert.measure(tmp_path, TINY, done=done) == result
