"""The benchmarks of reading from the disk run, small, so that they cannot rot."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from tests.bench.test_disk_benchmarks import leaves_the_cache
from tools.bench import bench_beyond, bench_cold, disk_peers
from tools.bench.disk_peers import LOADER, MAKERS, RINGS, RingShape
from tools.bench.turns import OURS

SMALL = RingShape((84, 84), 1_000, 8, 50)
# The loader holds five batches of 7 MB, beside what is not written yet.
BEYOND = bench_beyond.Sizes(limit_mib=64, turns=1, seconds=0.01)


@pytest.fixture
def disk(tmp_path):
    if not leaves_the_cache(tmp_path):
        pytest.skip("files here live in memory alone, so none can be made cold")
    return tmp_path


@pytest.mark.parametrize("kind", bench_cold.KINDS)
def test_what_is_made_cold_is_rows(tmp_path, kind):
    shape = replace(bench_cold.KINDS[kind], rows=2000)
    side = bench_cold.filled(tmp_path / "ours", bench_cold.OURS, shape)
    side.close()
    (file,) = bench_cold.files_of_rows(tmp_path / "ours", shape)
    assert file.stat().st_size >= shape.rows * np.prod(shape.row)
    assert len([p for p in (tmp_path / "ours").rglob("*") if p.is_file()]) > 3


@pytest.mark.slow
def test_cold_batches_are_measured_against_a_plain_memmap(disk):
    found = bench_cold.measure(disk, bench_cold.Sizes(40, 1), ["np_memmap"])
    assert set(found) == set(bench_cold.KINDS)
    for kind in found.values():
        assert kind["speedup"]["np_memmap"] > 0
        assert kind["over_the_best_threads"] > 0
        assert kind["speedup_of_the_best_threads"].keys() == {"mmreplay", *kind["speedup"]}
        assert all(rate > 0 for rate in kind["mb_per_s"].values())


@pytest.mark.peer
def test_cold_batches_are_measured_against_every_peer(disk):
    names = disk_peers.installed()
    if len(names) < len(MAKERS) - 1:
        pytest.skip("not all is installed; see tools/bench/peers.txt")
    found = bench_cold.measure(disk, bench_cold.Sizes(40, 1), names)
    assert all(set(kind["speedup"]) == set(names) for kind in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("row", [bench_beyond.SHAPE, (1008,)])
def test_a_ring_larger_than_the_memory_is_measured(disk, row):
    found = bench_beyond.measure(disk, replace(BEYOND, row=row), ["np_memmap"])
    assert found["row_nbytes"] == np.prod(row)
    assert found["draw_speedup_of_mmreplay"]["np_memmap"] > 0
    assert set(found["adds_per_s"]) == {OURS, LOADER, "np_memmap"}
    if found["enforced_by"] != bench_beyond.DROPPED:
        assert found["memory"][OURS]["peak_over_limit"] <= 1.01


@pytest.mark.parametrize("name", sorted(MAKERS | RINGS))
@pytest.mark.parametrize("length", [1, 50])
def test_every_side_draws_its_own_rows(tmp_path, name, length):
    if find_spec((MAKERS | RINGS)[name][0]) is None:
        pytest.skip("not installed; see tools/bench/peers.txt")
    shape = replace(SMALL, length=length)
    side = bench_cold.filled(tmp_path / name, name, shape)
    bench_cold.refuse_wrong(side.draw(), name, shape)
    side.close()


@pytest.mark.parametrize("name", sorted(RINGS))
def test_a_full_ring_goes_on(tmp_path, name):
    if find_spec(RINGS[name][0]) is None:
        pytest.skip("not installed; see tools/bench/peers.txt")
    shape = RingShape(bench_beyond.SHAPE, 256, 32)
    side = disk_peers.make(name, tmp_path / name, shape)
    for first in range(0, 256, bench_beyond.ADDS):
        side.extend(bench_cold.block(first, bench_beyond.ADDS))
    head, found = bench_beyond.turn(name, side, 256, shape, 0.0)
    head, found = bench_beyond.turn(name, side, head, shape, 0.0)
    side.close()
    assert head == 256 + 2 * bench_beyond.ADDS
    assert found["draw_s"] > 0
    assert found["add_s"] > 0


def test_a_run_whose_rows_do_not_follow_each_other_is_refused():
    rows = bench_cold.block(0, bench_cold.BLOCK, (84, 84))
    shape = RingShape((84, 84), 250, 2, 125)
    bench_cold.refuse_wrong(rows, "peer", shape)
    with pytest.raises(AssertionError, match="peer: a run's rows do not follow"):
        bench_cold.refuse_wrong(np.roll(rows, 1, 0), "peer", shape)


def test_rows_that_are_gone_from_a_ring_are_refused():
    rows = bench_cold.block(64, 64)
    bench_beyond.refuse_wrong(rows, "peer", 128, 64)
    with pytest.raises(AssertionError, match="peer: drew a row that is not in the"):
        bench_beyond.refuse_wrong(rows, "peer", 129, 64)
