"""The benchmark of sequences of any length runs, small, so that it cannot rot."""

from importlib.util import find_spec

import numpy as np
import pytest

from tests.bench.test_disk_benchmarks import leaves_the_cache
from tools.bench import bench_ragged, ragged_peers, token_rows
from tools.bench.turns import OURS

SMALL = bench_ragged.Sizes(rows=1024, turns=1, calls=8, slow_calls=1, cold_turns=1)


def measured(folder, names):
    """What it prints; where files cannot be made cold, nothing of cold draws."""
    if leaves_the_cache(folder):
        return bench_ragged.measure(folder, SMALL, names)
    return bench_ragged.race_sides(folder / "fast", [OURS, *names], SMALL, 8)


@pytest.mark.slow
def test_sequences_are_measured_against_padded_rows_and_sqlite(tmp_path):
    found = measured(tmp_path, ["padded", "sqlite"])
    for kind in ("add_1", "add_256", "draw_256"):
        assert set(found[kind]["speedup"]) == {"padded", "sqlite"}
        assert min(found[kind]["median_us"].values()) > 0
    assert found["draw_256"]["over_the_bare_gather"] > 0
    assert found["add_256"]["over_the_bare_write"][OURS] > 0
    disk = found["disk_over_values"]
    assert disk[OURS] < 1.2 < disk["padded"]
    if "cold" in found:
        assert found["cold"]["over_pixels"]["tokens"] > 0
        assert found["not_installed"] == ["transfer_queue"]


@pytest.mark.peer
@pytest.mark.parametrize("name", ["lmdb", "torchrl", "transfer_queue"])
def test_sequences_are_measured_against_others(tmp_path, name):
    if find_spec(ragged_peers.MODULES[name]) is None:
        pytest.skip(f"{name} is not installed; see tools/bench/peers.txt")
    found = bench_ragged.race_sides(tmp_path / "b", [OURS, name], SMALL, 2)
    for kind in ("add_1", "add_256", "draw_256"):
        assert found[kind]["speedup"][name] > 0


def test_rows_that_are_not_their_numbers_are_refused():
    rows = token_rows.rows(4000, 200)
    token_rows.check(rows, "a side")
    for change in (lambda r: r[:-1], lambda r: r[:0], lambda r: np.append(r, 1)):
        with pytest.raises(AssertionError, match="a side: a drawn row is not that of"):
            token_rows.check([change(rows[150])], "a side")
    assert token_rows.nbytes(5000) == sum(row.nbytes for row in token_rows.rows(0, 5000))
