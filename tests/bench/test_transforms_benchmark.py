"""The benchmark of transforms runs, small, and refuses what is not the steps' own."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tools.bench import bench_transforms, transform_peers

SMALL = bench_transforms.Sizes(rows=4_000, goals=1_000, frames=300, turns=2, calls=2, batch=32)


def test_n_steps_are_measured_without_any_peer(tmp_path):
    result = bench_transforms.n_steps(tmp_path, SMALL, [])
    assert result["median_us"]["mmreplay"] > 0


@pytest.mark.slow
def test_transforms_are_measured_without_any_peer(tmp_path):
    result = bench_transforms.measure(tmp_path, SMALL, [])
    assert result["stacked_frames"].pop("over_the_bare_take") > 0
    frames = result["stacked_frames"]
    parts = [result[name] for name in result if name not in ("rows", "stacked_frames")]
    for part in (*parts, frames["with_next_ones"]):
        assert part["speedup_of_mmreplay"] == {}
        assert part["median_us"]["mmreplay"] > 0
    assert set(frames["frames_us"]) == {"mmreplay", "np_take"}


@pytest.mark.peer
def test_transforms_are_measured_against_every_peer():
    found = transform_peers.installed()
    missing = sorted(transform_peers.MODULES.keys() - found)
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; see docs/benchmarks.md")
    command = [sys.executable, "-W", "ignore", "-m", "tools.bench.bench_transforms"]
    done = subprocess.run([*command, "--quick"], check=True, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    for part, sides in (
        ("n_step", transform_peers.N_STEPS),
        ("prioritized_n_step_stacked", transform_peers.ALL),
        ("her_future", transform_peers.GOALS),
    ):
        assert set(result[part]["speedup_of_mmreplay"]) == {*sides, "fastest"}


def drawn(numbers):
    """What a draw of n steps from some numbers is to hold."""
    count = np.minimum(transform_peers.N, 100 - numbers % 100)
    steps = transform_peers.vectors(numbers)
    last = transform_peers.vectors(numbers + count - 1)
    rewards = [
        sum(
            transform_peers.GAMMA**i * transform_peers.vectors(number + i)["reward"]
            for i in range(k)
        )
        for number, k in zip(numbers, count, strict=True)
    ]
    return {
        "observation": steps["observation"],
        "action": steps["action"],
        "next_observation": last["next_observation"],
        "reward": np.array(rewards),
        "terminated": last["terminated"],
    }


@pytest.mark.parametrize("path", ["reward", "action", "next_observation", "terminated"])
def test_a_batch_that_is_not_the_steps_own_is_refused(path):
    numbers = np.array([3, 98, 150, 299])
    batch = drawn(numbers)
    transform_peers.check(batch, "peer")
    batch[path] = np.roll(batch[path], 1, axis=0)
    with pytest.raises(AssertionError, match=f"peer: .*{path}.* not their own"):
        transform_peers.check(batch, "peer")


def test_stacks_that_reach_into_another_episode_are_refused():
    numbers = np.array([3, 98, 101])
    frames = transform_peers._stacks(numbers, transform_peers.frame)
    batch = {"observation": frames} | {
        path: transform_peers.vectors(numbers)[path] for path in ("action", "reward")
    }
    transform_peers.check(batch, "peer", 1)
    frames[2, 0] = transform_peers.frame(np.array([98]))[0]
    with pytest.raises(AssertionError, match="frame 3"):
        transform_peers.check(batch, "peer", 1)


def test_goals_that_the_episode_did_not_reach_are_refused():
    numbers = np.arange(100)
    batch = transform_peers.goals(numbers)
    ahead = transform_peers.goals(np.minimum(numbers + 5, 99))
    goal = ahead["next_observation/achieved_goal"].copy()
    goal[::5] = 0
    batch["observation/desired_goal"] = goal
    achieved = batch["next_observation/achieved_goal"]
    batch["reward"] = transform_peers.reached(achieved, goal, {})
    transform_peers.check_goals(batch, "peer")
    goal[1] = achieved[1] - 1
    with pytest.raises(AssertionError, match="80% relabelled, 1 wrongly"):
        transform_peers.check_goals(batch, "peer")
