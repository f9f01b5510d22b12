"""Do agents learn alike from a ring on disk and from RAM?

DQN on CartPole and SAC on Pendulum (Stable-Baselines3, small networks) are trained from
several seeds with its own buffer and with ours. Draws differ, so that returns agree in
law only: a run's score is the mean return of its last quarter of steps, and the p-value
is the share of all ways to deal the scores to two sides whose means are as far apart
(Fisher's exact permutation test). Run in an environment that has stable-baselines3:

    python -m tools.curves --seeds 5 --plot docs/figures/curves.svg
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]
"""float64 ``[2, N]``: step at which each episode ended, and its return."""

SIDES = ("RAM", "disk")
TASKS: dict[str, dict[str, Any]] = {
    "DQN": {
        "env": "CartPole-v1", "steps": 50_000, "learning_rate": 2.3e-3,
        "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000,
        "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128,
        "exploration_fraction": 0.16, "exploration_final_eps": 0.04,
    },
    "SAC": {
        "env": "Pendulum-v1", "steps": 8_000, "learning_rate": 1e-3,
        "batch_size": 64, "buffer_size": 100_000, "learning_starts": 200,
    },
}  # fmt: skip


def run(name: str, side: str, seed: int, steps: int, folder: Path) -> Curve:
    """Train one agent and return its curve."""
    sb3 = import_module("stable_baselines3")
    monitor = import_module("stable_baselines3.common.monitor").Monitor
    options = dict(TASKS[name])
    env = monitor(import_module("gymnasium").make(options.pop("env")))
    del options["steps"]
    if side == "disk":
        adapter = import_module("mmreplay.adapters.sb3")
        options |= {
            "replay_buffer_class": adapter.ReplayBuffer,
            "replay_buffer_kwargs": {"path": folder / f"{name}-{seed}"},
        }
    agent = getattr(sb3, name)(
        "MlpPolicy", env, seed=seed, device="cpu",
        policy_kwargs={"net_arch": [64, 64]}, **options,
    )  # fmt: skip
    agent.learn(steps)
    if side == "disk":
        agent.replay_buffer.close()
    ends = np.cumsum(env.get_episode_lengths())
    return np.array([ends, env.get_episode_rewards()], np.float64)


def score(curve: Curve, steps: int) -> float:
    """Mean return of the episodes that ended in the last quarter; else of the last."""
    late = curve[1][curve[0] > 0.75 * steps]
    return float((late if len(late) else curve[1][-1:]).mean())


def p_value(one: list[float], other: list[float]) -> float:
    """How likely means so far apart are, were both of one law."""
    scores = np.array(one + other)
    apart = abs(np.mean(one) - np.mean(other))
    total, count = scores.sum(), len(one)
    sums = [scores[list(c)].sum() for c in combinations(range(len(scores)), count)]
    means = np.array(sums) / count
    others = (total - np.array(sums)) / len(other)
    # Sums in another order differ in their last digits.
    return float((np.abs(means - others) >= apart * (1 - 1e-9)).mean())


def plot(curves: dict[str, dict[str, list[Curve]]], path: Path) -> None:
    """Draw every run's returns, smoothed over ten episodes."""
    matplotlib = import_module("matplotlib")
    matplotlib.use("svg")
    pyplot = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, len(curves), figsize=(9, 3.2), squeeze=False)
    for axis, (name, sides) in zip(axes[0], curves.items(), strict=True):
        for side, colour in zip(SIDES, ("tab:gray", "tab:blue"), strict=True):
            for number, (ends, returns) in enumerate(sides[side]):
                width = min(10, len(returns))
                smooth = np.convolve(returns, np.full(width, 1 / width), "valid")
                label = side if number == 0 else None
                axis.plot(
                    ends[width - 1 :], smooth, color=colour, alpha=0.7, label=label
                )
        axis.set(title=f"{name}, {TASKS[name]['env']}", xlabel="steps")
        axis.legend(frameon=False)
    axes[0][0].set_ylabel("return")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of each run; for a quick look")
    parser.add_argument("--only", choices=list(TASKS))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    import_module("torch").set_num_threads(1)
    curves: dict[str, dict[str, list[Curve]]] = {}
    told: dict[str, object] = {}
    for name in [options.only] if options.only else TASKS:
        steps = options.steps or TASKS[name]["steps"]
        with tempfile.TemporaryDirectory() as folder:
            curves[name] = {
                side: [
                    run(name, side, seed, steps, Path(folder))
                    for seed in range(options.seeds)
                ]
                for side in SIDES
            }
        scores = {
            side: [score(curve, steps) for curve in some]
            for side, some in curves[name].items()
        }
        told[name] = {
            "steps": steps,
            "scores": {s: [round(x, 1) for x in some] for s, some in scores.items()},
            "p_value": p_value(*scores.values()),
        }
    print(json.dumps({"curves": told}), flush=True)
    if options.plot:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()
