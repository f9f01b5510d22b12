"""Pong as 84 x 84 frames, and the recording of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv
from numpy.typing import NDArray

import mmreplay as mr
from tools.demo.processes import resident

NUM_ENVS = 4
CAPACITY = 4_000
STEPS = 24_000
SEED = 0


class SmallFrames(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Gray frames of 210 x 160, cut to the court and halved to 84 x 84."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)

    def observation(self, observation: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Mean of every 2 x 2 pixels, with two columns of black on either side."""
        court = observation[26:194].astype(np.uint16)
        rows = court[::2] + court[1::2]
        small = np.zeros((84, 84), np.uint8)
        small[:, 2:82] = (rows[:, ::2] + rows[:, 1::2]) >> 2
        return small


def make_pong() -> gymnasium.Env[Any, Any]:
    """One environment; one frame a step."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)
    return SmallFrames(gymnasium.make("ALE/Pong-v5", obs_type="grayscale"))


def make_pongs() -> SyncVectorEnv[Any, Any]:
    """Several, which reset in the step after an end."""
    return SyncVectorEnv([make_pong] * NUM_ENVS)


def record(path: Path) -> tuple[mr.RecordReport, dict[str, int]]:
    """Play into a new buffer, and return what was written and the memory taken."""
    env = make_pongs()
    done = mr.record(env, path, steps=STEPS, capacity=CAPACITY, seed=SEED, progress=True)
    return done, resident()
