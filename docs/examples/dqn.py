"""DQN with prioritized n-step replay, from a buffer on disk or from plain lists in RAM.

    python docs/examples/dqn.py cartpole
    python docs/examples/dqn.py catch --replay ram --seed 1

Double DQN (van Hasselt et al. 2016) over prioritized (Schaul et al. 2016) 3-step
transitions. `cartpole` is Gymnasium's. `catch` is made of pixels: a ball crosses a
grid of 12 x 8 diagonally, and one frame does not tell which way it goes, so two are
stacked. The buffer on disk stores single steps and single frames; n-step returns,
stacks and next observations are made when a batch is drawn. The other replay keeps
ready transitions in lists, as textbooks do: both must learn the same.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import mmreplay as mr

GAMMA, N_STEPS, ALPHA, BETA = 0.99, 3, 0.6, 0.4
HEIGHT, WIDTH = 12, 8


class Catch(gym.Env[NDArray[np.uint8], int]):
    """A ball falls diagonally and bounces off the walls; a paddle may catch it.

    Observation uint8 ``[12, 8]``, 255 for ball and paddle; three actions: left, stay,
    right; the reward is 1 or -1 in the last step.
    """

    observation_space = gym.spaces.Box(0, 255, (HEIGHT, WIDTH), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Drop a ball from the top, going left or right."""
        super().reset(seed=seed)
        self._row, self._paddle = 0, WIDTH // 2
        self._column = int(self.np_random.integers(WIDTH))
        self._drift = int(self.np_random.choice([-1, 1]))
        return self._frame(), {}

    def step(self, action: int) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Move the paddle and the ball."""
        self._paddle = int(np.clip(self._paddle + int(action) - 1, 0, WIDTH - 1))
        if not 0 <= self._column + self._drift < WIDTH:
            self._drift = -self._drift
        self._column += self._drift
        self._row += 1
        over = self._row == HEIGHT - 1
        reward = (1.0 if self._column == self._paddle else -1.0) if over else 0.0
        return self._frame(), reward, over, False, {}

    def _frame(self) -> NDArray[np.uint8]:
        frame = np.zeros((HEIGHT, WIDTH), np.uint8)
        frame[self._row, self._column] = frame[HEIGHT - 1, self._paddle] = 255
        return frame


@dataclass(frozen=True)
class Task:
    """What is learned, and how long for."""

    make: Any
    stack: int
    steps: int
    capacity: int
    learning_rate: float
    target_every: int


TASKS = {
    "cartpole": Task(lambda: gym.make("CartPole-v1"), 1, 20_000, 10_000, 5e-4, 250),
    "catch": Task(Catch, 2, 12_000, 6_000, 1e-3, 250),
}


@dataclass(frozen=True)
class Transitions:
    """A batch as the agent learns from it; tensors ``[B, ...]``."""

    observation: torch.Tensor
    action: torch.Tensor
    reward: torch.Tensor
    next_observation: torch.Tensor
    discount: torch.Tensor
    weights: torch.Tensor


class Replay(Protocol):
    """What the agent needs of a replay memory."""

    def add(self, step: dict[str, Any], final: NDArray[Any]) -> None:
        """Keep a step; final is what was observed after it."""

    def sample(self, batch_size: int) -> Transitions:
        """Draw a batch by priority."""

    def update_priorities(self, errors: NDArray[np.float32]) -> None:
        """Tell the errors of the batch drawn last."""


class DiskReplay:
    """mmreplay: single steps in a folder, everything else derived."""

    def __init__(self, folder: Path, env: gym.Env[Any, Any], task: Task, seed: int):
        transforms: list[Any] = [mr.NStep(N_STEPS, GAMMA)]
        if task.stack > 1:
            transforms.insert(0, mr.FrameStack(task.stack))
        self._buffer = mr.ReplayBuffer.create(
            folder,
            mr.Schema.from_env(env),
            task.capacity,
            sampler=mr.PrioritizedSampler(alpha=ALPHA, beta=BETA, seed=seed),
            transforms=transforms,
        )
        self._batch: mr.Batch | None = None

    def add(self, step: dict[str, Any], final: NDArray[Any]) -> None:
        """Keep a step."""
        over = step["terminated"] or step["truncated"]
        self._buffer.add(step, final_observation=final if over else None)

    def sample(self, batch_size: int) -> Transitions:
        """Draw a batch by priority."""
        self._batch = self._buffer.sample(batch_size)
        batch = self._batch.torch()
        return Transitions(
            batch["observation"],
            batch["action"],
            batch["reward"].float(),
            batch["next_observation"],
            batch["discount"].float(),
            batch.weights,
        )

    def update_priorities(self, errors: NDArray[np.float32]) -> None:
        """Tell the errors of the batch drawn last."""
        assert self._batch is not None
        self._buffer.update_priorities(self._batch, errors)

    def close(self) -> None:
        """Close the buffer; it stays on disk."""
        self._buffer.close()


class RamReplay:
    """The textbook: transitions made when they happen, kept in lists."""

    def __init__(self, task: Task, seed: int):
        self._task = task
        self._rng = np.random.default_rng(seed)
        self._items: list[tuple[Any, ...]] = []
        self._priorities = np.zeros(task.capacity)
        self._cursor = 0
        self._episode: deque[tuple[Any, int, float]] = deque()
        self._frames: deque[NDArray[Any]] = deque(maxlen=task.stack)
        self._drawn = np.zeros(0, np.int64)

    def add(self, step: dict[str, Any], final: NDArray[Any]) -> None:
        """Keep a step, and the transitions of n steps that it completes."""
        over = step["terminated"] or step["truncated"]
        here = stacked(self._frames, step["observation"])
        after = stacked(deque(self._frames, self._task.stack), final)
        self._episode.append((here, step["action"], step["reward"]))
        while self._episode and (over or len(self._episode) == N_STEPS):
            rewards = [reward for _, _, reward in self._episode]
            total = sum(GAMMA**i * reward for i, reward in enumerate(rewards))
            discount = 0.0 if step["terminated"] else GAMMA ** len(rewards)
            first, action, _ = self._episode.popleft()
            self._keep((first, action, total, after, discount))
        if over:
            self._frames.clear()

    def _keep(self, item: tuple[Any, ...]) -> None:
        highest = max(1.0, float(self._priorities.max()))
        if len(self._items) < self._task.capacity:
            self._items.append(item)
        else:
            self._items[self._cursor] = item
        self._priorities[self._cursor] = highest
        self._cursor = (self._cursor + 1) % self._task.capacity

    def sample(self, batch_size: int) -> Transitions:
        """Draw a batch by priority."""
        masses = self._priorities[: len(self._items)] ** ALPHA
        law = masses / masses.sum()
        self._drawn = self._rng.choice(len(self._items), batch_size, p=law)
        weights = (len(self._items) * law[self._drawn]) ** -BETA
        columns = zip(*(self._items[i] for i in self._drawn), strict=True)
        arrays = [torch.as_tensor(np.array(column)) for column in columns]
        observation, action, reward, following, discount = arrays
        return Transitions(
            observation,
            action,
            reward.float(),
            following,
            discount.float(),
            torch.as_tensor(weights / weights.max(), dtype=torch.float32),
        )

    def update_priorities(self, errors: NDArray[np.float32]) -> None:
        """Tell the errors of the batch drawn last."""
        self._priorities[self._drawn] = errors

    def close(self) -> None:
        """Do nothing."""


def stacked(frames: deque[NDArray[Any]], frame: NDArray[Any]) -> NDArray[Any]:
    """Append a frame; return the last ones as one array, the first one repeated."""
    frames.append(frame)
    missing = [frames[0]] * ((frames.maxlen or 1) - len(frames))
    several = [*missing, *frames]
    return np.stack(several) if len(several) > 1 else several[0]


class Agent:
    """Two networks and one step of learning."""

    def __init__(self, env: gym.Env[Any, Any], task: Task, seed: int) -> None:
        torch.manual_seed(seed)
        shape = env.observation_space.shape or ()
        self._actions = int(env.action_space.n)  # type: ignore[attr-defined]  # both are Discrete
        self._scale = 255.0 if env.observation_space.dtype == np.uint8 else 1.0
        inputs = int(np.prod(shape)) * task.stack
        self._online = self._network(inputs)
        self._target = self._network(inputs)
        self._optimizer = torch.optim.Adam(self._online.parameters(), task.learning_rate)
        self.copy()

    def _network(self, inputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, self._actions),
        )

    def copy(self) -> None:
        """Let the target network be what the online one is now."""
        self._target.load_state_dict(self._online.state_dict())

    def values(self, network: nn.Module, observation: torch.Tensor) -> torch.Tensor:
        """Action values, ``[B, actions]``."""
        values: torch.Tensor = network(observation.float() / self._scale)
        return values

    @torch.no_grad()
    def act(self, observation: NDArray[Any]) -> int:
        """The action of highest value."""
        one = torch.as_tensor(observation)[None]
        return int(self.values(self._online, one).argmax())

    def learn(self, batch: Transitions) -> NDArray[np.float32]:
        """Take one step on a batch; return its absolute errors."""
        rows = torch.arange(len(batch.reward))
        with torch.no_grad():
            best = self.values(self._online, batch.next_observation).argmax(1)
            following = self.values(self._target, batch.next_observation)[rows, best]
            goal = batch.reward + batch.discount * following
        guess = self.values(self._online, batch.observation)[rows, batch.action]
        loss = batch.weights * nn.functional.smooth_l1_loss(guess, goal, reduction="none")
        self._optimizer.zero_grad()
        loss.mean().backward()
        nn.utils.clip_grad_norm_(self._online.parameters(), 10.0)
        self._optimizer.step()
        errors: NDArray[np.float32] = (guess - goal).abs().detach().numpy()
        return errors + 1e-3


def train(task: Task, replay: Replay, seed: int) -> float:
    """Train an agent; return the best mean return of 20 greedy episodes on the way."""
    torch.set_num_threads(1)
    env = task.make()
    rng = np.random.default_rng(seed)
    agent = Agent(env, task, seed)
    frames: deque[NDArray[Any]] = deque(maxlen=task.stack)
    observation, _ = env.reset(seed=seed)
    best = -np.inf
    for number in range(1, task.steps + 1):
        epsilon = max(0.05, 1.0 - number / (0.3 * task.steps))
        seen = stacked(frames, observation)
        greedy = rng.random() >= epsilon
        action = agent.act(seen) if greedy else int(rng.integers(env.action_space.n))
        following, reward, terminated, truncated, _ = env.step(action)
        step = {
            "observation": observation,
            "action": action,
            "reward": float(reward),
            "terminated": terminated,
            "truncated": truncated,
        }
        replay.add(step, following)
        observation = following
        if terminated or truncated:
            frames.clear()
            observation, _ = env.reset()
        if number >= 1_000:
            replay.update_priorities(agent.learn(replay.sample(64)))
        if number % task.target_every == 0:
            agent.copy()
        if number % (task.steps // 10) == 0:
            best = max(best, evaluate(task, agent, seed))
    return float(best)


def evaluate(task: Task, agent: Agent, seed: int, episodes: int = 20) -> float:
    """Mean return of greedy episodes that training has not seen."""
    env = task.make()
    total = 0.0
    for episode in range(episodes):
        frames: deque[NDArray[Any]] = deque(maxlen=task.stack)
        observation, _ = env.reset(seed=10_000 + 100 * seed + episode)
        over = False
        while not over:
            action = agent.act(stacked(frames, observation))
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            over = terminated or truncated
    return total / episodes


def run(name: str, kind: str, seed: int, folder: Path) -> float:
    """Train on a task with one kind of replay; return the mean return."""
    task = TASKS[name]
    replay: DiskReplay | RamReplay
    if kind == "disk":
        replay = DiskReplay(folder, task.make(), task, seed)
    else:
        replay = RamReplay(task, seed)
    try:
        return train(task, replay, seed)
    finally:
        replay.close()


def main() -> None:
    """Read the command line, train, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--replay", choices=("disk", "ram"), default="disk")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mean = run(options.task, options.replay, options.seed, Path(folder) / "replay")
    print(json.dumps({**vars(options), "mean_return": round(mean, 2)}))


if __name__ == "__main__":
    main()
