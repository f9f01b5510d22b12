"""Implicit Q-learning on a Minari dataset: from Minari's reader, and from a buffer.

    python docs/examples/offline.py
    python docs/examples/offline.py --seed 1 --updates 3000

A scripted policy plays CartPole well two times of three, and at random the third;
Minari's own collector records it. The same agent (IQL, Kostrikov et al. 2021, of two
actions) is then trained twice on the same draws: from the arrays that Minari reads, and
from the buffer that `mmreplay.load` made of the folder. Both give the same numbers, so
both agents play alike. Needs minari, jax (Minari's collector), gymnasium and h5py.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import minari
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import mmreplay as mr

NAME = "cartpole/scripted-v0"
GAMMA, EXPECTILE, TEMPERATURE, BATCH, RATE = 0.99, 0.8, 3.0, 256, 1e-3
NAMES = ("observation", "action", "reward", "next_observation", "terminated")

Batch = dict[str, NDArray[np.generic]]
Draw = Callable[[NDArray[np.int64]], Batch]
"""Steps by their numbers, from 0, in the order in which they were played."""


def scripted(observation: NDArray[np.float32]) -> int:
    """Push to where the pole falls, and back to the middle."""
    place, speed, angle, turn = observation.tolist()
    return int(0.05 * place + 0.2 * speed + angle + 0.5 * turn > 0)


def record(episodes: int, seed: int) -> minari.MinariDataset:
    """Play and record; steps that follow a random third of the actions included."""
    rng = np.random.default_rng(seed)
    env = minari.DataCollector(gym.make("CartPole-v1", max_episode_steps=200))
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed + episode)
        done = False
        while not done:
            action = scripted(observation)
            if rng.random() < 1 / 3:
                action = int(rng.integers(2))
            observation, _, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
    made = env.create_dataset(NAME, eval_env="CartPole-v1")
    env.close()
    return made


def minari_steps(dataset: minari.MinariDataset) -> tuple[Draw, int]:
    """Steps as Minari reads them, all in memory."""
    parts: dict[str, list[NDArray[np.generic]]] = {name: [] for name in NAMES}
    for episode in dataset.iterate_episodes():
        parts["observation"].append(episode.observations[:-1])
        parts["next_observation"].append(episode.observations[1:])
        parts["action"].append(episode.actions)
        parts["reward"].append(episode.rewards)
        parts["terminated"].append(episode.terminations)
    whole = {name: np.concatenate(each) for name, each in parts.items()}
    return lambda numbers: {n: v[numbers] for n, v in whole.items()}, dataset.total_steps


def buffer_steps(buffer: mr.ReplayBuffer) -> tuple[Draw, int]:
    """Steps as the buffer gives them, read from disk batch by batch."""
    found = buffer.episodes.episodes(0)
    positions = np.concatenate(
        [np.arange(begin, end) for begin, end in zip(found.begin, found.end, strict=True)]
    )

    def draw(numbers: NDArray[np.int64]) -> Batch:
        here = positions[numbers]
        batch = buffer.take(np.zeros_like(here), here)
        return {name: np.asarray(batch[name]) for name in NAMES}

    return draw, len(positions)


def network(outputs: int) -> nn.Sequential:
    """Two layers of 64."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
    )


def train(draw: Draw, count: int, updates: int, seed: int) -> nn.Sequential:
    """Train value, action values and policy; return the policy."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    policy, value, action_values, slow = (network(n) for n in (2, 1, 2, 2))
    slow.load_state_dict(action_values.state_dict())
    optimizer = torch.optim.Adam(
        [p for net in (policy, value, action_values) for p in net.parameters()], RATE
    )
    for _ in range(updates):
        batch = draw(rng.integers(count, size=BATCH))
        seen, action, reward, after, over = (
            torch.as_tensor(np.ascontiguousarray(batch[name])) for name in NAMES
        )
        chosen = action.long()[:, None]
        with torch.no_grad():
            best = slow(seen).gather(1, chosen)[:, 0]
            target = reward.float() + GAMMA * ~over * value(after)[:, 0]
        here = value(seen)[:, 0]
        gap = best - here
        weight = torch.where(gap > 0, EXPECTILE, 1 - EXPECTILE)
        taken = action_values(seen).gather(1, chosen)[:, 0]
        scale = torch.exp(TEMPERATURE * gap.detach()).clamp(max=100.0)
        log_policy = torch.log_softmax(policy(seen), 1).gather(1, chosen)[:, 0]
        loss = (weight * gap**2).mean() + ((taken - target) ** 2).mean()
        loss = loss - (scale * log_policy).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(slow.parameters(), action_values.parameters(), strict=True):
                old.lerp_(new, 0.005)
    return policy


def score(policy: nn.Sequential, episodes: int = 10) -> float:
    """Mean return of the policy's likeliest actions; 500 at most."""
    env = gym.make("CartPole-v1")
    total = 0.0
    for episode in range(episodes):
        observation, _ = env.reset(seed=10_000 + episode)
        done = False
        while not done:
            with torch.no_grad():
                action = int(policy(torch.as_tensor(observation)).argmax())
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            done = terminated or truncated
    env.close()
    return total / episodes


def main() -> None:
    """Record, convert, train from both, and print both scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        os.environ["MINARI_DATASETS_PATH"] = home
        dataset = record(chosen.episodes, chosen.seed)
        mr.load(Path(home) / NAME, Path(home) / "buffer")
        found = {}
        with mr.ReplayBuffer.open(Path(home) / "buffer") as buffer:
            for kind, (draw, count) in (
                ("minari", minari_steps(dataset)),
                ("buffer", buffer_steps(buffer)),
            ):
                policy = train(draw, count, chosen.updates, chosen.seed)
                found[kind] = score(policy)
        print(json.dumps({"steps": count, **found}))


if __name__ == "__main__":
    main()
