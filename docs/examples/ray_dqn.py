"""DQN on CartPole over two nodes: a player with a ring on each, and one learner.

    python docs/examples/ray_dqn.py                  # two nodes on this machine
    python docs/examples/ray_dqn.py --address auto   # all nodes of a running cluster

Each player adds its steps to a ring on the disk of its node, without a call of Ray. The
learner draws 3-step transitions from all rings by priority, as if they were one buffer.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn

import mmreplay as mr

RUN, ROUNDS, STEPS, UPDATES = "ray-dqn", 40, 250, 200


def q_network() -> nn.Module:
    """Action values of observations: float32 ``[B, 4]`` to ``[B, 2]``."""
    return nn.Sequential(
        nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
    )


class Player:
    """Plays on one node, and writes the ring of that node."""

    def __init__(self, root: str, seed: int) -> None:
        self.env, self.rng = gym.make("CartPole-v1"), np.random.default_rng(seed)
        # Nodes of one machine share its disk, so each has a folder there.
        label = ray.get_runtime_context().get_node_labels().get("mmreplay", "")
        schema = mr.Schema.from_env(self.env)
        self.writer = mr.ray.writer(RUN, schema, 20_000, root=Path(root, label))
        self.network, self.total = q_network(), 0.0
        self.observation, _ = self.env.reset(seed=seed)

    def play(self, weights: dict[str, Any], epsilon: float) -> list[float]:
        """Add steps; return the returns of the episodes that ended."""
        self.network.load_state_dict(weights)
        returns = []
        for _ in range(STEPS):
            with torch.no_grad():
                action = int(self.network(torch.as_tensor(self.observation)).argmax())
            if self.rng.random() < epsilon:
                action = int(self.rng.integers(2))
            following, reward, terminated, truncated, _ = self.env.step(action)
            done = terminated or truncated
            self.writer.add(
                observation=self.observation, action=action, reward=float(reward),
                terminated=terminated, truncated=truncated,
                final_observation=following if done else None,
            )  # fmt: skip
            self.observation, self.total = following, self.total + float(reward)
            if done:
                returns.append(self.total)
                self.observation, self.total = self.env.reset()[0], 0.0
        return returns

    def close(self) -> None:
        """Close the ring; it stays on disk."""
        self.writer.close()


def learn(client: mr.ray.ReplayClient, players: list[Any]) -> None:
    """Learn from steps while players add new ones, round by round."""
    online, target, returns = q_network(), q_network(), []
    optimizer = torch.optim.Adam(online.parameters(), 5e-4)
    for number in range(ROUNDS):
        epsilon = max(0.02, 1.0 - number / (0.4 * ROUNDS))
        target.load_state_dict(online.state_dict())
        weights = ray.put(online.state_dict())
        playing = [player.play.remote(weights, epsilon) for player in players]
        if number == 0:
            ray.wait(playing, num_returns=len(playing))  # else there is nothing to draw
        for _ in range(UPDATES):
            batch = next(client)
            with torch.no_grad():
                best = target(batch["next_observation"]).amax(1)
                goal = (batch["reward"] + batch["discount"] * best).float()
            guess = online(batch["observation"])[range(len(batch)), batch["action"]]
            loss = nn.functional.smooth_l1_loss(guess, goal, reduction="none")
            optimizer.zero_grad()
            (batch.weights * loss).mean().backward()
            optimizer.step()
            client.update_priorities(batch, (guess - goal).detach().abs() + 1e-3)
        for ended in ray.get(playing):
            returns += ended
        print(f"round {number}: mean return {np.mean(returns[-20:]):.0f}", flush=True)


def main() -> None:
    """Connect to a cluster, or start one, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of a cluster; default: start two nodes")
    address = parser.parse_args().address
    torch.set_num_threads(1)
    if address is None:
        head = {"num_cpus": 1, "labels": {"mmreplay": "first"}}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1, labels={"mmreplay": "second"})
        address = cluster.address
    ray.init(address=address, log_to_driver=False)
    nodes = [n["NodeID"] for n in ray.nodes() if n["Resources"].get("CPU", 0) >= 1]
    with tempfile.TemporaryDirectory() as root:
        players = []
        for seed, node in enumerate(nodes):
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            actor = ray.remote(Player).options(num_cpus=1, scheduling_strategy=here)
            players.append(actor.remote(root, seed))
        ray.get([player.__ray_ready__.remote() for player in players])
        sampler = mr.PrioritizedSampler(alpha=0.6, beta=0.4, seed=0)
        transforms = [mr.NStep(3, 0.99)]
        with mr.ray.ReplayClient(RUN, sampler, transforms, batch_size=64) as client:
            learn(client, players)
        ray.get([player.close.remote() for player in players])
        print(f"{len(mr.ray.status(RUN).shards)} nodes had rings")
        mr.ray.stop(RUN)


if __name__ == "__main__":
    main()
