"""Other libraries' n-step returns, frame stacks and hindsight, filled with known steps.

Steps are known by their number, which the observation begins with; `check` refuses a
batch that is not made of the steps that it says it is.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.bench import transitions
from tools.bench.transitions import EPISODE, Columns
from tools.bench.turns import chosen

N, GAMMA, K = 3, 0.99, 4
ALPHA, BETA = 0.6, 0.4
MAX_ENVS = 100
"""Environments of the libraries that add a step of all of them at once."""
GOAL = 3
Draw = Callable[[int], Mapping[str, Any]]
"""Draws so many steps, as torch tensors by our paths."""
Ids = NDArray[np.int64]


def vectors(numbers: Ids) -> Columns:
    """Steps of 17 + 6 floats, ``[B, *shape]``; every episode terminates.

    Where one is truncated, libraries without final observations leave it out, or know
    no next one.
    """
    data = transitions.columns(numbers)
    data["terminated"] = numbers % EPISODE == EPISODE - 1
    data["truncated"] = np.zeros_like(data["terminated"])
    for name, shift in (("observation", 0), ("next_observation", 1)):
        data[name] = data[name].copy()
        data[name][..., 0] = numbers + shift
    data["reward"] = (numbers % 64 / 8).astype(np.float32)
    return data


def frames(numbers: Ids) -> Columns:
    """Steps of single frames, ``uint8[B, 84, 84]``, without the next ones."""
    data = vectors(numbers)
    del data["next_observation"]
    data["observation"] = frame(numbers)
    return data


_NOISE = np.random.default_rng(3).integers(0, 256, (64, 84, 84), np.uint8)


def frame(numbers: Ids) -> NDArray[np.uint8]:
    """Frames that begin with their number."""
    found = _NOISE[numbers % 64]
    found.reshape(-1, 84 * 84)[:, :8] = numbers[:, None].view(np.uint8)
    return found


def goals(numbers: Ids) -> Columns:
    """Steps of a goal environment; each achieves its number and what follows."""
    ends = numbers % EPISODE == EPISODE - 1
    return {
        "observation/observation": vectors(numbers)["observation"],
        "observation/achieved_goal": _goal(numbers),
        "observation/desired_goal": np.zeros((len(numbers), GOAL), np.float32),
        "action": vectors(numbers)["action"],
        "reward": np.full(len(numbers), -1, np.float32),
        "next_observation/observation": vectors(numbers + 1)["observation"],
        "next_observation/achieved_goal": _goal(numbers + 1),
        "next_observation/desired_goal": np.zeros((len(numbers), GOAL), np.float32),
        "terminated": np.zeros(len(numbers), bool),
        "truncated": ends,
    }


def _goal(numbers: Ids) -> NDArray[np.float32]:
    return np.stack([numbers, -numbers, numbers % 7], axis=1).astype(np.float32)


def reached(achieved: NDArray[Any], desired: NDArray[Any], info: object) -> NDArray[np.float32]:
    """Reward of a goal environment: 0 where the goal was reached, else -1."""
    del info
    far: NDArray[np.bool_] = np.linalg.norm(achieved - desired, axis=-1) > 0.05
    return -far.astype(np.float32)


def check(drawn: Mapping[str, Any], side: str, n: int = N) -> None:
    """Refuse a batch of n-step transitions that are not those of their numbers.

    Args:
        drawn: By our paths; the observation a vector, or K of them.
        side: Who drew it.
        n: Steps folded.
    """
    arrays = {path: np.asarray(values) for path, values in drawn.items()}
    seen = arrays["observation"]
    numbers = _numbers(seen, -1)
    count = np.minimum(n, EPISODE - numbers % EPISODE)
    last = numbers + count - 1
    rewards = np.zeros(len(numbers))
    for step in range(n):
        rewards += GAMMA**step * (step < count) * vectors(numbers + step)["reward"]
    told = {
        "reward": np.allclose(arrays["reward"].reshape(-1), rewards, rtol=1e-5),
        "action": np.array_equal(
            arrays["action"].reshape(len(numbers), -1), vectors(numbers)["action"]
        ),
    }
    ends = vectors(last)["terminated"]
    if "terminated" in arrays:
        told["terminated"] = np.array_equal(arrays["terminated"].reshape(-1) != 0, ends)
    # The next observation of a terminated step is not used; some libraries lack it.
    some = ~ends
    if "next_observation" in arrays:
        then = _numbers(arrays["next_observation"], -1)
        told["next_observation"] = np.array_equal(then[some], last[some] + 1)
    if seen.ndim > 2:
        for back in range(K):
            known = np.minimum(back, numbers % EPISODE)
            frames_ = _numbers(seen, -1 - back)
            told[f"frame {back}"] = np.array_equal(frames_, numbers - known)
    wrong = [name for name, good in told.items() if not good]
    if wrong:
        raise AssertionError(f"{side}: {wrong} of the drawn steps are not their own")


def _numbers(seen: NDArray[Any], at: int) -> Ids:
    """Numbers of observations, or of one of each stack."""
    if seen.dtype == np.uint8:
        some = seen[:, at] if seen.ndim == 4 else seen
        first = np.ascontiguousarray(some.reshape(len(some), -1)[:, :8])
        return first.view(np.int64)[:, 0]
    some = seen[:, at] if seen.ndim == 3 else seen
    found: Ids = some[:, 0].astype(np.int64)
    return found


def check_goals(drawn: Mapping[str, Any], side: str) -> None:
    """Refuse goals that the step's episode did not reach from the step on."""
    arrays = {path: np.asarray(values) for path, values in drawn.items()}
    numbers = arrays["observation/observation"][:, 0].astype(np.int64)
    goal = arrays["observation/desired_goal"]
    relabelled = goal.any(axis=1)
    first, stop = numbers + 1, (numbers // EPISODE + 1) * EPISODE
    good = ~relabelled | ((goal[:, 0] >= first) & (goal[:, 0] <= stop))
    good &= arrays["reward"].reshape(-1) == np.where(relabelled & (goal[:, 0] == first), 0, -1)
    share = float(relabelled.mean())
    if not good.all() or not 0.6 < share < 0.95:
        raise AssertionError(f"{side}: {share:.0%} relabelled, {(~good).sum()} wrongly")


def torch_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Tensors of arrays, without a copy."""
    torch = import_module("torch")
    return {path: torch.from_numpy(array) for path, array in arrays.items()}


def num_envs_of(rows: int) -> int:
    """Environments that each hold whole episodes, of so many steps in all."""
    return min(MAX_ENVS, rows // EPISODE)


def steps_of_envs(rows: int) -> list[Ids]:
    """Numbers of the steps of all environments, one array each time they step."""
    each = rows // num_envs_of(rows)
    first = np.arange(num_envs_of(rows)) * each
    return [first + step for step in range(each)]


# ---- n steps ------------------------------------------------------------------


def sb3_n_steps(rows: int) -> Draw:
    """Stable-Baselines3's NStepReplayBuffer, which folds when it draws."""
    box = import_module("gymnasium").spaces.Box
    buffer = import_module("stable_baselines3.common.buffers").NStepReplayBuffer(
        rows,
        box(-np.inf, np.inf, (17,), np.float32),
        box(-1, 1, (6,), np.float32),
        device="cpu",
        n_envs=num_envs_of(rows),
        n_steps=N,
        gamma=GAMMA,
    )
    for numbers in steps_of_envs(rows):
        data = vectors(numbers)
        buffer.add(
            data["observation"],
            data["next_observation"],
            data["action"],
            data["reward"],
            data["terminated"] | data["truncated"],
            [{"TimeLimit.truncated": bool(end)} for end in data["truncated"]],
        )

    def draw(count: int) -> Mapping[str, Any]:
        found = buffer.sample(count)
        return {
            "observation": found.observations,
            "action": found.actions,
            "next_observation": found.next_observations,
            "terminated": found.dones,
            "reward": found.rewards,
            "discount": found.discounts,
        }

    return draw


def cpprb_n_steps(rows: int) -> Draw:
    """The ReplayBuffer of cpprb with Nstep, which folds when it adds."""
    buffer = _cpprb("ReplayBuffer", rows, (17,), Nstep=_NSTEP)
    _cpprb_fill(buffer, rows, vectors)
    return lambda count: torch_of(buffer.sample(count))


_NSTEP = {"size": N, "gamma": GAMMA, "rew": "reward", "next": "next_observation"}


def _cpprb(name: str, rows: int, shape: tuple[int, ...], **options: Any) -> Any:
    dtype = np.uint8 if len(shape) > 2 else np.float32
    fields: dict[str, dict[str, Any]] = {
        "observation": {"shape": shape, "dtype": dtype},
        "action": {"shape": 6, "dtype": np.float32},
        "reward": {"dtype": np.float32},
        "done": {"dtype": np.float32},
    }
    if "next_of" not in options:
        fields["next_observation"] = {"shape": shape, "dtype": dtype}
    return getattr(import_module("cpprb"), name)(rows, fields, **options)


def _cpprb_fill(buffer: Any, rows: int, data_of: Callable[[Ids], Columns]) -> None:
    """Add whole episodes: what is folded must not go on in the next one."""
    for first in range(0, rows, EPISODE):
        data = data_of(np.arange(first, min(first + EPISODE, rows)))
        _cpprb_add(buffer, data)


def _cpprb_add(buffer: Any, data: Columns) -> None:
    ends = data.pop("terminated") | data.pop("truncated")
    buffer.add(**data, done=ends.astype(np.float32))
    buffer.on_episode_end()


def tianshou_n_steps(rows: int) -> Draw:
    """The VectorReplayBuffer of tianshou with its compute_nstep_return."""
    buffer = _tianshou("VectorReplayBuffer", rows, vectors)
    return _tianshou_draw(buffer)


def _tianshou(name: str, rows: int, data_of: Callable[[Ids], Columns], **options: Any) -> Any:
    data = import_module("tianshou.data")
    buffer = getattr(data, name)(rows, num_envs_of(rows), **options)
    for numbers in steps_of_envs(rows):
        step = data_of(numbers)
        given = {
            "obs": step["observation"],
            "act": step["action"],
            "rew": step["reward"],
            "terminated": step["terminated"],
            "truncated": step["truncated"],
        }
        if "next_observation" in step:
            given["obs_next"] = step["next_observation"]
        buffer.add(data.Batch(**given))
    return buffer


def _tianshou_draw(buffer: Any, n: int = N, errors: Any = None) -> Draw:
    torch = import_module("torch")
    algorithm = import_module("tianshou.algorithm.algorithm_base").Algorithm

    def nothing(_: Any, indices: Ids) -> Any:
        return torch.zeros(len(indices), 1)

    def draw(count: int) -> Mapping[str, Any]:
        found, indices = buffer.sample(count)
        returns = found.rew
        if n > 1:
            # Read the next observation of the n-th step, as a target network would.
            found = algorithm.compute_nstep_return(found, buffer, indices, nothing, GAMMA, n)
            returns = found.returns
            last = indices
            for _ in range(n - 1):
                last = buffer.next(last)
            then = buffer[last]
        else:
            then = found
        if errors is not None:
            buffer.update_weight(indices, errors(count))
        return {
            "observation": torch.from_numpy(found.obs),
            "next_observation": torch.from_numpy(then.obs_next),
            "action": torch.from_numpy(found.act),
            "terminated": torch.from_numpy(then.terminated),
            "reward": torch.as_tensor(returns),
        }

    return draw


def torchrl_n_steps(rows: int) -> Draw:
    """TorchRL's slices of n steps and its MultiStep over them, when it draws."""
    torch = import_module("torch")
    data = import_module("torchrl.data")
    logging.getLogger("torchrl").setLevel(logging.ERROR)
    samplers = import_module("torchrl.data.replay_buffers.samplers")
    stored = import_module("tensordict").TensorDict
    fold = import_module("torchrl.data.postprocs").MultiStep(GAMMA, N)
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(rows),
        sampler=samplers.SliceSampler(slice_len=N, end_key=("next", "done"), cache_values=True),
    )
    for first in range(0, rows, 10_000):
        block = torch_of(vectors(np.arange(first, min(first + 10_000, rows))))
        done = (block["terminated"] | block["truncated"])[:, None]
        after = {
            "observation": block["next_observation"],
            "reward": block["reward"][:, None],
            "done": done,
            "terminated": block["terminated"][:, None],
        }
        now = {"observation": block["observation"], "action": block["action"]}
        buffer.extend(stored({**now, "next": after}, batch_size=[len(done)]))

    def draw(count: int) -> Mapping[str, Any]:
        found = fold(buffer.sample(N * count).reshape(count, N))[:, 0]
        return {
            "observation": found["observation"],
            "action": found["action"],
            "next_observation": found["next", "observation"],
            "reward": found["next", "reward"],
            "discount": found["gamma"],
        }

    torch.manual_seed(0)
    return draw


# ---- stacks of frames ---------------------------------------------------------


def cpprb_frames(rows: int) -> Draw:
    """The stack_compress of cpprb, over stacks that it is given whole."""
    buffer = _cpprb(
        "ReplayBuffer", rows, (84, 84, K), next_of="observation", stack_compress="observation"
    )

    # next_of stores the observation of the next row, episode by episode.
    for first in range(0, rows, EPISODE):
        numbers = np.arange(first, min(first + EPISODE, rows))
        data = frames(numbers)
        data["observation"] = np.moveaxis(_stacks(numbers, frame), 1, -1)
        data["next_observation"] = np.moveaxis(_stacks(numbers, frame, ahead=1), 1, -1)
        _cpprb_add(buffer, data)

    def draw(count: int) -> Mapping[str, Any]:
        drawn = torch_of(buffer.sample(count))
        for path in ("observation", "next_observation"):
            drawn[path] = drawn[path].movedim(-1, 1)
        return drawn

    return draw


def _stacks(numbers: Ids, of: Callable[[Ids], NDArray[Any]], ahead: int = 0) -> NDArray[Any]:
    """Stacks of steps, ``[B, K, *shape]``, oldest first."""
    begin = numbers // EPISODE * EPISODE
    lags = np.arange(K - 1, -1, -1)
    rows = np.maximum(numbers[:, None] + ahead - lags, begin[:, None])
    found = of(rows.reshape(-1))
    return found.reshape(*rows.shape, *found.shape[1:])


def tianshou_frames(rows: int) -> Draw:
    """The stack_num of tianshou, over single frames."""
    options = {"stack_num": K, "ignore_obs_next": True}
    return _tianshou_draw(_tianshou("VectorReplayBuffer", rows, frames, **options), 1)


# ---- prioritized n steps of stacks --------------------------------------------


def tianshou_all(rows: int, pixels: bool, errors: Callable[[int], Any]) -> Draw:
    """The PrioritizedVectorReplayBuffer of tianshou with stacks and n-step returns."""
    options = {"stack_num": K, "ignore_obs_next": True, "alpha": ALPHA, "beta": BETA}

    def steps(numbers: Ids) -> Columns:
        data = frames(numbers) if pixels else vectors(numbers)
        data.pop("next_observation", None)
        return data

    made = _tianshou("PrioritizedVectorReplayBuffer", rows, steps, **options)
    return _tianshou_draw(made, N, errors)


def cpprb_all(rows: int, pixels: bool, errors: Callable[[int], Any]) -> Draw:
    """The PrioritizedReplayBuffer of cpprb, which is given whole stacks."""
    shape = (K, 84, 84) if pixels else (K, 17)
    buffer = _cpprb("PrioritizedReplayBuffer", rows, shape, Nstep=_NSTEP, alpha=ALPHA)

    def steps(numbers: Ids) -> Columns:
        def of(some: Ids) -> NDArray[Any]:
            return frame(some) if pixels else vectors(some)["observation"]

        data = frames(numbers) if pixels else vectors(numbers)
        data["observation"] = _stacks(numbers, of)
        data["next_observation"] = _stacks(numbers, of, ahead=1)
        return data

    _cpprb_fill(buffer, rows, steps)

    def draw(count: int) -> Mapping[str, Any]:
        found = buffer.sample(count, beta=BETA)
        buffer.update_priorities(found["indexes"], errors(count))
        return torch_of(found)

    return draw


# ---- hindsight ----------------------------------------------------------------


def sb3_goals(rows: int) -> Draw:
    """Stable-Baselines3's HerReplayBuffer, the future of each step, 4 goals to 1."""
    gymnasium = import_module("gymnasium")
    box = gymnasium.spaces.Box
    goal = box(-np.inf, np.inf, (GOAL,), np.float32)
    space = gymnasium.spaces.Dict(
        {
            "observation": box(-np.inf, np.inf, (17,), np.float32),
            "achieved_goal": goal,
            "desired_goal": goal,
        }
    )
    action = box(-1, 1, (6,), np.float32)

    class Goals(gymnasium.Env):  # type: ignore[misc, name-defined]
        observation_space, action_space = space, action

        def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
            return reached(achieved, desired, info)

    vec = import_module("stable_baselines3.common.vec_env").DummyVecEnv
    buffer = import_module("stable_baselines3").HerReplayBuffer(
        rows,
        space,
        action,
        vec([Goals]),
        device="cpu",
        n_sampled_goal=4,
        goal_selection_strategy="future",
    )
    for number in range(rows):
        data = goals(np.array([number]))
        now, then = (
            {
                name: data[f"{top}/{name}"]
                for name in ("observation", "achieved_goal", "desired_goal")
            }
            for top in ("observation", "next_observation")
        )
        ends = data["truncated"]
        info = [{"TimeLimit.truncated": bool(ends[0])}]
        buffer.add(now, then, data["action"], data["reward"], ends, info)

    def draw(count: int) -> Mapping[str, Any]:
        found = buffer.sample(count)
        here = {f"observation/{p}": a for p, a in found.observations.items()}
        next_ = {f"next_observation/{p}": a for p, a in found.next_observations.items()}
        ends = {"terminated": found.dones, "reward": found.rewards}
        return {**here, **next_, **ends, "action": found.actions}

    return draw


MODULES = {
    "cpprb": "cpprb",
    "stable_baselines3": "stable_baselines3",
    "tianshou": "tianshou",
    "torchrl": "torchrl",
}
N_STEPS: dict[str, Callable[[int], Draw]] = {
    "cpprb": cpprb_n_steps,
    "stable_baselines3": sb3_n_steps,
    "tianshou": tianshou_n_steps,
    "torchrl": torchrl_n_steps,
}
FRAMES: dict[str, Callable[[int], Draw]] = {"cpprb": cpprb_frames, "tianshou": tianshou_frames}
ALL: dict[str, Callable[[int, bool, Callable[[int], Any]], Draw]] = {
    "cpprb": cpprb_all,
    "tianshou": tianshou_all,
}
GOALS: dict[str, Callable[[int], Draw]] = {"stable_baselines3": sb3_goals}


def installed(wanted: str | None = None) -> list[str]:
    """Names of the peers that can be imported, of those wanted.

    Args:
        wanted: Comma-separated names; None for all, ``""`` for none.

    Raises:
        SystemExit: A peer asked for by name is unknown or missing.
    """
    warnings.filterwarnings("ignore", module="tianshou|torchrl|stable_baselines3")
    return chosen(MODULES, wanted)
