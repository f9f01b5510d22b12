"""The benchmarks of rings on Ray run, small, so that they cannot rot."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("ray.rllib", reason="RLlib is not installed: see make ray")

from tools.bench import bench_ray, ray_runs
from tools.bench.turns import OURS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]


PEERS = {"torchrl"} if find_spec("torchrl") else set()
QUESTIONS = """
import json, pathlib, sys
from tools.bench import ray_runs
question = getattr(ray_runs, sys.argv[1])
arguments = [None] if sys.argv[1] == "same_node" else []
folder = pathlib.Path(sys.argv[2])
print(json.dumps(question(folder, ray_runs.RUN_QUICK, *arguments)))
"""


def printed(*words):
    # Each has a cluster of its own, to which this process cannot connect as well.
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def answer(question, folder):
    return printed("-c", QUESTIONS, question, str(folder))


def test_adds_and_draws_on_one_node_are_measured(tmp_path):
    result = answer("same_node", tmp_path)
    for part, ours in (
        ("add_8_steps", ray_runs.ALONE),
        ("alone", ray_runs.ALONE),
        ("shard", ray_runs.SHARED),
    ):
        assert set(result[part]["median_us"]) == {ours} | PEERS
        assert all(ratio > 0 for ratio in result[part]["speedup"].values())


def test_batches_of_other_nodes_are_measured(tmp_path):
    result = answer("other_nodes", tmp_path)
    assert result["vectors"]["batch_nbytes"] > 256 * 4 * (2 * 17 + 6)
    assert result["batch_of_1_mib"]["batch_nbytes"] >= 1 << 20
    assert result["batch_of_7_mb"]["batch_nbytes"] >= 256 * 84 * 84 * 4
    for part in result.values():
        assert part["time_over_bare"] > 0
        assert set(part["speedup"]) == {ray_runs.BARE} | PEERS


def test_one_ring_is_held_against_two(tmp_path):
    result = answer("one_against_two", tmp_path)
    # By chance one run of 300,000 fails, as priorities arrive when they do.
    assert result["rings-1_chi_squared_p"] > 1e-6
    assert result["rings-2_chi_squared_p"] > 1e-6
    assert result["kolmogorov_smirnov_p"] > 1e-6
    assert result["rate_of_two_over_one"] > 0
    assert result["rate_of_two_over_one_4_a_call"] > 0


def test_a_ring_beyond_memory_is_measured(tmp_path):
    result = answer("beyond_memory", tmp_path)
    if "not_measured" in result:
        pytest.skip(result["not_measured"])
    assert result["mb_per_s"]["mmreplay"] > 0
    assert result["preadv_mb_per_s"] > 0
    # What died under its limit has no figure, and says how it ended.
    died = set(result.get("died", {}))
    assert set(result["mb_per_s"]) | died == {"mmreplay"} | PEERS


def test_both_buffers_behind_rllib_are_measured(tmp_path):
    result = bench_ray.behind_rllib(tmp_path, bench_ray.QUICK)
    for question in ("add_8_steps", "sample_256_and_update"):
        assert result[question]["speedup"]["rllib"] > 0
        assert set(result[question]["median_us"]) == {OURS, "rllib"}


def test_both_epochs_have_the_same_rows(tmp_path):
    # The sides compare the sums of the numbers of their rows.
    result = bench_ray.epochs(tmp_path, bench_ray.QUICK)
    assert result["rows"] == bench_ray.QUICK.rows
    assert result["speedup"]["ray_data"] > 0
    assert 0 < result["memory_of_ours_over_ray_data"] < 1


def test_a_killed_run_of_dqn_goes_on_with_its_ring():
    options = ("--seeds", "1", "--iterations", "2", "--kill")
    result = printed("-m", "tools.bench.dqn_returns", *options)
    assert result["kills"] == 1
    assert all(value > 0 for value in result["mean_return"].values())
