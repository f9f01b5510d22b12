"""The benchmark of prioritized draws runs, small, so that it cannot rot."""

import json
import subprocess
import sys

import pytest

from tools.bench import bench_prioritized, prioritized_peers


@pytest.mark.slow
def test_turns_are_measured_without_any_peer(tmp_path):
    result = bench_prioritized.measure(tmp_path, bench_prioritized.QUICK, [])
    for batch in (256, 4096):
        assert set(result[f"turn_{batch}"]["median_us"]) == {"mmreplay", "mmreplay_torch"}
        assert all(us > 0 for us in result[f"also_{batch}_us"].values())
    for kind in ("PrioritizedSampler", "RankPrioritizedSampler"):
        assert result["many_rows"][kind]["ratio"] > 0


@pytest.mark.peer
def test_turns_are_measured_against_every_peer():
    found = prioritized_peers.installed()
    missing = sorted(prioritized_peers.MODULES.keys() - found)
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; see docs/benchmarks.md")
    command = [sys.executable, "-W", "ignore", "-m", "tools.bench.bench_prioritized"]
    done = subprocess.run([*command, "--quick"], check=True, capture_output=True, text=True)
    over = json.loads(done.stdout)["turn_4096"]["speedup_of_mmreplay"]
    assert set(over) == {*found, "fastest"}


def test_a_peer_asked_for_by_name_must_be_installed():
    with pytest.raises(SystemExit, match=r"Peers must be .* got \['reverb'\]\."):
        prioritized_peers.installed("reverb")
