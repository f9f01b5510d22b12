"""What Gymnasium's own vectors and wrappers gave is what comes back from the ring.

An outermost wrapper logs what `reset` and `step` return, with Gymnasium's
``final_obs``; its `RecordEpisodeStatistics` judges lengths and returns of episodes.
"""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces, wrappers
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector

import mmreplay as mr
from mmreplay import nesting

NUM_ENVS, STEPS = 3, 1050
WORDS = {
    AutoresetMode.NEXT_STEP: "next_step",
    AutoresetMode.SAME_STEP: "same_step",
    AutoresetMode.DISABLED: "disabled",
}


def scaled(observation):
    return np.float64(observation * 2)


def as_dict(observation):
    return {"whole": observation, "parts": (observation[:1], observation[1:])}


BOX4 = spaces.Box(-np.inf, np.inf, (4,))
TWICE = spaces.Box(-np.inf, np.inf, (4,), np.float64)
NESTED = spaces.Dict(
    whole=BOX4,
    parts=spaces.Tuple((spaces.Box(-np.inf, np.inf, (1,)), spaces.Box(-np.inf, np.inf, (3,)))),
)

# Of each: the environment, wrappers of one environment, and wrappers of the vector.
WRAPPED = {
    "CartPole": ("CartPole-v1", [], []),
    "FrozenLake": ("FrozenLake-v1", [], []),
    "Blackjack": ("Blackjack-v1", [], []),
    "Pendulum, cut": ("Pendulum-v1", [partial(wrappers.TimeLimit, max_episode_steps=17)], []),
    "frames, stacked": ("CartPole-v1", [partial(wrappers.FrameStackObservation, stack_size=3)], []),
    "time, as a dict": ("CartPole-v1", [partial(wrappers.TimeAwareObservation, flatten=False)], []),
    "nested, flat": ("Blackjack-v1", [wrappers.FlattenObservation], []),
    "delayed": ("CartPole-v1", [partial(wrappers.DelayObservation, delay=2)], []),
    "normalized each": ("CartPole-v1", [wrappers.NormalizeObservation], []),
    "nested": (
        "CartPole-v1",
        [partial(wrappers.TransformObservation, func=as_dict, observation_space=NESTED)],
        [],
    ),
    "flat by the vector": ("Blackjack-v1", [], [vector.FlattenObservation]),
    "of another dtype by the vector": (
        "CartPole-v1",
        [],
        [partial(vector.DtypeObservation, dtype=np.float64)],
    ),
    "rescaled by the vector": (
        "MountainCar-v0",
        [partial(wrappers.TimeLimit, max_episode_steps=23)],
        [partial(vector.RescaleObservation, min_obs=np.float32(0), max_obs=np.float32(1))],
    ),
    "changed by the vector": (
        "CartPole-v1",
        [],
        [
            partial(
                vector.VectorizeTransformObservation,
                wrapper=wrappers.TransformObservation,
                func=scaled,
                observation_space=TWICE,
            )
        ],
    ),
    "rewards, normalized by the vector": ("CartPole-v1", [], [vector.NormalizeReward]),
    "infos in a list": ("CartPole-v1", [], [vector.DictInfoToList]),
}
CHANGED = {
    "flat by the vector",
    "of another dtype by the vector",
    "rescaled by the vector",
    "changed by the vector",
}


class Log(gym.vector.VectorWrapper):
    """The transitions of each environment, as Gymnasium returned them.

    Of each a dict, and beside it what Gymnasium says of episodes that ended.
    """

    def __init__(self, env):
        super().__init__(env)
        self.rows = [[] for _ in range(self.num_envs)]
        self.episodes = [[] for _ in range(self.num_envs)]
        self.mode = env.metadata["autoreset_mode"]

    def reset(self, *, seed=None, options=None):
        self.seen, infos = self.env.reset(seed=seed, options=options)
        self.seen = copied(self.seen)
        if options is None:
            self.ended = np.zeros(self.num_envs, bool)
        return self.seen, infos

    def step(self, actions):
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        kept, ended = copied(observation), terminated | truncated
        for env in range(self.num_envs):
            said = infos[env] if isinstance(infos, list) else at(infos, env)
            if ended[env]:
                told = said.get("final_info", said)["episode"]
                self.episodes[env].append((int(told["l"]), float(told["r"])))
            if self.mode is AutoresetMode.NEXT_STEP and self.ended[env]:
                continue  # Gymnasium's reset: no action was taken
            following = {"next_observation": at(kept, env)}
            if self.mode is AutoresetMode.SAME_STEP and ended[env]:
                following["next_observation"] = said["final_obs"]
            self.rows[env].append(
                flat("observation", at(self.seen, env))
                | flat("action", at(actions, env))
                | {"reward": np.float32(reward[env])}
                | {"terminated": terminated[env], "truncated": truncated[env]}
                | flat("next_observation", following["next_observation"])
            )
        self.seen, self.ended = kept, ended
        return observation, reward, terminated, truncated, infos


def copied(value):
    if isinstance(value, dict):
        return {name: copied(part) for name, part in value.items()}
    return tuple(map(copied, value)) if isinstance(value, tuple) else np.array(value)


def at(value, env):
    """Of one environment, what a vector has; of infos, what is there."""
    if isinstance(value, dict):
        return {
            name: at(part, env)
            for name, part in value.items()
            if not name.startswith("_") and value.get(f"_{name}", every)[env]
        }
    if isinstance(value, tuple):
        return tuple(at(part, env) for part in value)
    return value[env]


every = np.ones(NUM_ENVS, bool)


def flat(name, value):
    found = nesting.flatten({name: value})
    return {path: np.array(leaf) for path, leaf in found.items()}


def vector_of(name, mode, kind=SyncVectorEnv):
    """A wrapped vector, with a log of it outermost."""
    env_id, singles, vectors = WRAPPED[name]

    def make():
        env = gym.make(env_id)
        for wrap in singles:
            env = wrap(env)
        return wrappers.RecordEpisodeStatistics(env)

    # A copy of each: some environments return their own array.
    envs = kind([make] * NUM_ENVS, autoreset_mode=mode)
    for wrap in vectors:
        envs = wrap(envs)
    envs = Log(envs)
    envs.action_space.seed(5)
    return envs


def refused_by_gymnasium(name, mode):
    """It changes no observations of same-step vectors, lest final ones stay."""
    if name not in CHANGED or mode is not AutoresetMode.SAME_STEP:
        return False
    with pytest.raises(ValueError, match="Expected autoreset_mode to be NEXT_STEP"):
        vector_of(name, mode)
    return True


def assert_rows_are_the_logs(buffer, log, steps):
    """Every step, item by item; of each that can be drawn also what it led to."""
    everything, compared, led = buffer.gather_all(), 0, 0
    for env, rows in enumerate(log.rows):
        mine = (everything.env_ids == env) & ~everything["final"]
        count = int(mine.sum())
        # Of the last call the ring may lack the environments that had most.
        assert len(rows) - count in (0, 1)
        rows = rows[:count]
        compared += count
        for path in buffer.schema.paths:
            want = np.stack([row[path] for row in rows])
            np.testing.assert_array_equal(everything[path][mine], want, path)
        # What follows the newest row of an environment is not there.
        positions = everything.positions[mine]
        if positions[-1] == buffer.heads[env] - 1:
            rows, positions = rows[:-1], positions[:-1]
        batch = buffer.take(np.full(len(rows), env), positions)
        assert set(batch) == set(rows[0])
        for path in batch:
            want = np.stack([row[path] for row in rows])
            np.testing.assert_array_equal(batch[path], want, path)
        led += sum(row["terminated"] or row["truncated"] for row in rows)
    assert compared == steps
    # Ends were among them, each with its final observation.
    assert led > 20
    return led


def assert_episodes_are_those_that_gymnasium_counted(buffer, log):
    table = mr.episode_table(buffer)
    for env, told in enumerate(log.episodes):
        mine = (table.env_ids == env) & table.whole
        lengths, returns = table.lengths[mine], table.returns[mine]
        told = told[: len(lengths)]
        assert len(told) > 3
        assert lengths.tolist() == [length for length, _ in told]
        np.testing.assert_allclose(returns, [total for _, total in told], rtol=1e-5)


@pytest.mark.filterwarnings("ignore")  # Gymnasium's own, of bounds and dtypes
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=WORDS.values())
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.sliced(5)
def test_what_wrapped_vectors_gave_is_recorded(tmp_path, name, mode):
    if refused_by_gymnasium(name, mode):
        return
    log = vector_of(name, mode)
    done = mr.record(log, tmp_path / "b", steps=STEPS, seed=3)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert buffer.autoreset == WORDS[mode]
        assert done.steps == STEPS
        assert_rows_are_the_logs(buffer, log, STEPS)
        if name != "rewards, normalized by the vector":
            assert_episodes_are_those_that_gymnasium_counted(buffer, log)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=WORDS.values())
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.sliced(8)
def test_what_a_loop_adds_of_wrapped_vectors_comes_back(name, mode):
    """The loop that docs/writing.md shows, with infos as they come."""
    if refused_by_gymnasium(name, mode):
        return
    log = vector_of(name, mode)
    with mr.ReplayBuffer.create(
        None, mr.Schema.from_env(log), 2 * STEPS, NUM_ENVS, engine="memory", autoreset=WORDS[mode]
    ) as buffer:
        observation, _ = log.reset(seed=4)
        for _ in range(STEPS // NUM_ENVS):
            action = log.action_space.sample()
            # Read before the step: some vectors return their own array.
            observation = copied(observation)
            following, reward, terminated, truncated, infos = log.step(action)
            ended, final = terminated | truncated, None
            if mode is AutoresetMode.SAME_STEP:
                final = (
                    [each.get("final_obs") for each in infos]
                    if isinstance(infos, list)
                    else infos.get("final_obs")
                )
            elif mode is AutoresetMode.DISABLED and ended.any():
                final = copied(following)
                following, _ = log.reset(options={"reset_mask": ended})
            buffer.add(
                observation=observation,
                action=action,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                final_observation=final,
            )
            observation = following
        steps = sum(map(len, log.rows))
        assert_rows_are_the_logs(buffer, log, steps)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=WORDS.values())
@pytest.mark.sliced(1)
def test_what_processes_gave_is_recorded(tmp_path, mode):
    log = vector_of("nested", mode, AsyncVectorEnv)
    try:
        mr.record(log, tmp_path / "b", steps=STEPS, seed=3)
    finally:
        log.close()
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert_rows_are_the_logs(buffer, log, STEPS)
        assert_episodes_are_those_that_gymnasium_counted(buffer, log)
