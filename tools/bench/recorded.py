"""Real experience to measure with: Atari and MuJoCo, played by random actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr

Rows = Mapping[str, NDArray[Any]]
NUM_ENVS = 8
ATARI, MUJOCO = "ALE/Breakout-v5", "HalfCheetah-v5"
NEEDED = ("gymnasium", "ale_py", "mujoco")
SCHEMAS = {
    ATARI: mr.Schema(
        {
            "observation": mr.Field((84, 84, 4), "uint8"),
            "action": mr.Field((), "int64"),
            "reward": mr.Field((), "float64"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    ),
    MUJOCO: mr.Schema(
        {
            "observation": mr.Field((17,), "float64"),
            "action": mr.Field((6,), "float32"),
            "reward": mr.Field((), "float64"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    ),
}


def steps(name: str, rows: int) -> Iterator[Rows]:
    """Steps of 8 environments at a time, each environment's one after another.

    Args:
        name: `ATARI`, four frames of 84 x 84 a row as agents get them, or `MUJOCO`.
        rows: At least so many in all.

    Yields:
        Rows by path, ``[8, *shape]``.
    """
    import gymnasium

    if name == ATARI:
        import ale_py

        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        gymnasium.register_envs(ale_py)
    envs: Any = gymnasium.make_vec(name, num_envs=NUM_ENVS)
    envs.action_space.seed(0)
    seen, _ = envs.reset(seed=0)
    for _ in range(-(-rows // NUM_ENVS)):
        actions = envs.action_space.sample()
        following, rewards, terminated, truncated, _ = envs.step(actions)
        frames = np.moveaxis(seen, 1, -1) if name == ATARI else seen
        yield {
            "observation": np.ascontiguousarray(frames),
            "action": actions,
            "reward": np.asarray(rewards, np.float64),
            "terminated": terminated,
            "truncated": truncated,
        }
        seen = following.copy()
    envs.close()


def columns(name: str, rows: int) -> Rows:
    """Rows by path, ``[rows, *shape]``, environment by environment."""
    found = list(steps(name, rows))
    joined = {}
    for path in found[0]:
        whole = np.stack([each[path] for each in found], axis=1)
        joined[path] = whole.reshape(-1, *whole.shape[2:])[:rows]
    return joined
