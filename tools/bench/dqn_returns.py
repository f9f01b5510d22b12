"""Does RLlib's DQN learn as well from a ring as from RLlib's own buffer?

Slow, and in the environment of ``make ray``: CartPole over several seeds, by DQN with
RLlib's prioritized buffer and with a ring, each run in a process of its own. A cluster
has two nodes: the learner and its buffer are on one, the environments on the other.
With ``--kill`` each run on a ring is killed in its middle by SIGKILL, the processes of
both nodes with it, and goes on from RLlib's last checkpoint and the ring. Prints one
line of JSON: for each side the mean return of the last iterations, by seed, and over
all seeds.

    build/ray/bin/python -m tools.bench.dqn_returns --seeds 5 --kill
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.ray_runs import cluster
from tools.bench.turns import OURS, report, rounded

RLLIB = "rllib"
TYPES = {
    OURS: "mmreplay.ray.rllib.PrioritizedRingEpisodeReplayBuffer",
    RLLIB: "PrioritizedEpisodeReplayBuffer",
}
NUM_ENVS = 4
STEPS = 500
"""Environment steps of an iteration."""
LAST = 10
"""Iterations whose mean return counts."""


def make(side: str, seed: int, folder: Path) -> Any:
    """An algorithm that keeps its experience in a buffer of a side."""
    buffer = {"type": TYPES[side], "capacity": 50_000, "alpha": 0.6, "beta": 0.4}
    if side == OURS:
        buffer |= {"path": str(folder / "ring"), "num_envs": NUM_ENVS, "seed": seed}
    config = import_module("ray.rllib.algorithms.dqn").DQNConfig()
    config = config.environment("CartPole-v1").debugging(seed=seed)
    # An update for 16 steps, of a larger batch: RLlib takes 50 ms for any.
    config = config.env_runners(
        num_env_runners=1, num_envs_per_env_runner=NUM_ENVS, rollout_fragment_length=4
    )
    config = config.learners(num_learners=0)
    config = config.reporting(min_sample_timesteps_per_iteration=STEPS)
    config = config.training(
        lr=1e-3,
        train_batch_size_per_learner=256,
        target_network_update_freq=500,
        num_steps_sampled_before_learning_starts=500,
        epsilon=[(0, 1.0), (6000, 0.02)],
        replay_buffer_config=buffer,
    )
    return config.build_algo()


def run(side: str, seed: int, iterations: int, kill: int, folder: Path, address: str) -> None:
    """Train, and write the return of each iteration into a file as it comes.

    Args:
        side: `OURS` or `RLLIB`.
        seed: Of all that is random.
        iterations: In all.
        kill: The iteration after which this process kills itself; 0 for none.
        folder: Of the ring, the checkpoint and the returns.
        address: Of the cluster; this process is on its head, which has no CPUs.
    """
    ray = import_module("ray")
    ray.init(address=address, log_to_driver=False)
    returns, kept = folder / "returns.json", folder / "checkpoint"
    done: list[float] = []
    if kept.exists():
        done = json.loads(returns.read_text("utf-8"))
        algorithms = import_module("ray.rllib.algorithms.algorithm")
        algorithm = algorithms.Algorithm.from_checkpoint(str(kept))
    else:
        algorithm = make(side, seed, folder)
    here = ray.get_runtime_context().get_node_id()
    players = algorithm.env_runner_group.foreach_env_runner(
        lambda _: import_module("ray").get_runtime_context().get_node_id(), local_env_runner=False
    )
    assert players, "no environments on the other node"
    assert here not in players, "environments on the learner's node"
    while len(done) < iterations:
        result = algorithm.train()
        done.append(float(result["env_runners"]["episode_return_mean"]))
        print(f"{side}, iteration {len(done)}: {done[-1]:.0f}", file=sys.stderr)
        if len(done) == kill:
            algorithm.save_to_path(str(kept))
            returns.write_text(json.dumps(done), "utf-8")
            # What comes after the checkpoint is in the ring alone.
            algorithm.train()
            os.kill(os.getpid(), signal.SIGKILL)
    report({"returns": done, "steps": len(algorithm.local_replay_buffer)})


def measure(seeds: int, iterations: int, kill: bool) -> dict[str, object]:
    """Train both sides with each seed; see the module."""
    last: dict[str, list[float]] = {side: [] for side in TYPES}
    kills = 0
    with cluster(1, head_cpus=0):
        address = import_module("ray").get_runtime_context().gcs_address
        for seed in range(seeds):
            for side in TYPES:
                at = iterations // 2 if kill and side == OURS else 0
                returns, killed = _trained(side, seed, iterations, at, address)
                kills += killed
                # Of an iteration in which no episode ended there is none.
                last[side].append(float(np.nanmean(returns[-LAST:])))
                print(f"seed {seed}, {side}: {last[side][-1]:.0f}", file=sys.stderr)
    return {
        "seeds": seeds,
        "steps": iterations * STEPS,
        "kills": kills,
        "return_of_the_last": {s: [rounded(r) for r in v] for s, v in last.items()},
        "mean_return": {s: rounded(float(np.mean(v))) for s, v in last.items()},
    }


def _trained(
    side: str, seed: int, iterations: int, kill: int, address: str
) -> tuple[list[float], int]:
    """Returns of a run by iteration, and how often it was killed."""
    kills = 0
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as folder:
        command = [
            sys.executable,
            "-m",
            "tools.bench.dqn_returns",
            "--side",
            side,
            "--seed",
            str(seed),
            "--iterations",
            str(iterations),
            "--kill-at",
            str(kill),
            "--folder",
            folder,
            "--address",
            address,
        ]
        while True:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != -signal.SIGKILL:
                break
            kills += 1
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return json.loads(done.stdout.splitlines()[-1])["returns"], kills


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=50, help="of 500 steps")
    parser.add_argument("--kill", action="store_true", help="each run on a ring, once")
    for hidden, kind in (
        ("--side", str),
        ("--seed", int),
        ("--kill-at", int),
        ("--folder", Path),
        ("--address", str),
    ):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        run(
            options.side,
            options.seed,
            options.iterations,
            options.kill_at,
            options.folder,
            options.address,
        )
        return
    report(measure(options.seeds, options.iterations, options.kill))


if __name__ == "__main__":
    main()
