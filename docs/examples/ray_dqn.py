"""DQN on CartPole over two nodes: a player with a ring on each, and one learner.

    python docs/examples/ray_dqn.py                     # two nodes on this machine
    RAY_ADDRESS=auto python docs/examples/ray_dqn.py    # all nodes of a running cluster

Each player adds its steps to a ring on the disk of its node, without a call of Ray. The
learner draws 3-step transitions from all rings by priority, as if they were one buffer.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster
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
        env = gym.make("CartPole-v1")
        # Nodes of one machine share its disk, so each has a folder there.
        label = ray.get_runtime_context().get_node_labels().get("mmreplay", "")
        schema = mr.Schema.from_env(env)
        self.writer = mr.ray.writer(RUN, schema, 20_000, root=Path(root, label))
        self.env = gym.wrappers.RecordEpisodeStatistics(env, buffer_length=20)
        self.observation, _ = self.env.reset(seed=seed)
        self.network, self.rng = q_network(), np.random.default_rng(seed)

    def play(self, weights: dict[str, Any], epsilon: float) -> float:
        """Add steps; return the mean return of the last 20 episodes."""
        self.network.load_state_dict(weights)
        for _ in range(STEPS):
            action = int(self.network(torch.as_tensor(self.observation)).argmax())
            if self.rng.random() < epsilon:
                action = int(self.rng.integers(2))
            following, reward, terminated, truncated, _ = self.env.step(action)
            done = terminated or truncated
            self.writer.add(
                observation=self.observation,
                action=action,
                reward=float(reward),
                terminated=terminated,
                truncated=truncated,
                final_observation=following if done else None,
            )
            self.observation = self.env.reset()[0] if done else following
        return float(np.mean(self.env.return_queue))


def learn(client: mr.ray.ReplayClient, players: list[Any]) -> None:
    """Learn from steps while players add new ones, round by round."""
    online, target = q_network(), q_network()
    optimizer = torch.optim.Adam(online.parameters(), 5e-4)
    for number in range(ROUNDS):
        epsilon = max(0.02, 1.0 - number / (0.4 * ROUNDS))
        target.load_state_dict(online.state_dict())
        weights = ray.put(online.state_dict())
        playing = [player.play.remote(weights, epsilon) for player in players]
        if number == 0:
            ray.get(playing)  # else there is nothing to draw
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
        mean = np.mean(ray.get(playing))
        print(f"round {number}: mean return {mean:.0f}", flush=True)


def main() -> None:
    """Connect to a cluster, or start one, and train."""
    torch.set_num_threads(1)
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        head = {"num_cpus": 1, "labels": {"mmreplay": "first"}}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1, labels={"mmreplay": "second"})
        address = cluster.address
    ray.init(address=address, log_to_driver=False)
    player = ray.remote(Player).options(num_cpus=1, scheduling_strategy="SPREAD")
    with tempfile.TemporaryDirectory() as root:
        nodes = [node for node in ray.nodes() if node["Resources"].get("CPU")]
        players = [player.remote(root, seed) for seed in range(len(nodes))]
        sampler = mr.PrioritizedSampler(alpha=0.6, beta=0.4, seed=0)
        ray.get([each.__ray_ready__.remote() for each in players])
        with mr.ray.ReplayClient(RUN, sampler, [mr.NStep(3, 0.99)], 64) as client:
            learn(client, players)
        print(f"{len(mr.ray.status(RUN).shards)} nodes had rings")
        mr.ray.stop(RUN)


if __name__ == "__main__":
    main()
