"""The benchmarks of vector transitions run, small, so that they cannot rot."""

import json
import subprocess
import sys

import pytest

from tools.bench import bench_add, bench_sample, peers, transitions
from tools.bench.turns import race, speedups


def quick(module, *options):
    """What a benchmark prints, run as a user runs it."""
    command = [sys.executable, "-W", "default", "-m", f"tools.bench.{module}"]
    done = subprocess.run(
        [*command, "--quick", *options], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


@pytest.fixture
def libraries():
    found = peers.installed()
    missing = sorted(peers.MODULES.keys() - found)
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; see tools/bench/peers.txt")
    return found


def test_adds_are_measured_without_any_peer(tmp_path):
    result = bench_add.measure(tmp_path, bench_add.QUICK, [])
    assert set(result["median_us"]) == {
        "add_1_fresh_ring",
        "add_1_full_ring",
        "add_1024_first_lap",
        "add_1024_full_ring",
    }
    assert all(us["mmreplay"] > 0 for us in result["median_us"].values())


@pytest.mark.slow
def test_draws_are_measured_without_any_peer(tmp_path):
    result = bench_sample.measure(tmp_path, bench_sample.QUICK, [])
    assert set(result["sample_256"]["median_us"]) == set(bench_sample.VARIANTS)
    assert set(result["floor_256_us"]) == {"records", "records_as_tensors", "mmreplay"}
    assert result["live_reader_us"]["beside_a_writer"]["sample_256"] > 0
    assert result["live_reader_us"]["writer_steps_per_s"] > 0


@pytest.mark.peer
def test_adds_are_measured_against_every_peer(libraries):
    speedup = quick("bench_add")["speedup"]
    assert set(speedup["add_1024_full_ring"]) == set(libraries)


@pytest.mark.peer
def test_draws_are_measured_against_every_peer(libraries):
    over = quick("bench_sample")["sample_4096"]["speedup_of_mmreplay"]
    assert set(over) == {*libraries, "fastest"}


def test_a_peer_asked_for_by_name_must_be_installed():
    with pytest.raises(SystemExit, match=r"Peers must be .* got \['reverb'\]\."):
        peers.installed("reverb")


def test_no_peer_at_all_may_be_asked_for():
    assert peers.installed("") == []


@pytest.mark.parametrize("path", ["observation", "terminated", "action"])
def test_a_side_that_draws_wrong_rows_is_refused(path):
    rows = transitions.block(90)
    rows[path] = rows[path][::-1]
    with pytest.raises(AssertionError, match=f"peer: {path} of the drawn rows"):
        transitions.check(rows, "peer")


def test_ratios_are_computed_turn_by_turn():
    calls = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = race(sides, turns=3, calls=2, warm=1)
    assert "".join(calls) == "aabbbbaaaabbbbaa"
    assert [len(t) for t in times.values()] == [3, 3]
    assert speedups({"a": times["a"], "b": 4 * times["a"]}, "a") == {"b": 4.0}
