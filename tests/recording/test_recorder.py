"""Recording: what environments did is what the buffer holds, to the step."""

import sys
from unittest.mock import DEFAULT, Mock

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import mmreplay as mr
from mmreplay import nesting
from mmreplay.errors import LockedError, SchemaError
from mmreplay.recording import environments

# One-step episodes, adjacent ends, and ends of both kinds.
LENGTHS = (3, 1, 1, 4, 2, 1, 5)
MODES = {
    "next_step": AutoresetMode.NEXT_STEP,
    "same_step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}


class LoggedEnv(gym.Env):
    """Plays episodes of set lengths and keeps a log of every true transition."""

    action_space = spaces.Discrete(5)

    def __init__(self, tag=0, nested=False, reuses=False):
        leaf = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space = leaf
        if nested:
            parts = spaces.Tuple((leaf, spaces.Discrete(1000)))
            self.observation_space = spaces.Dict({"parts": parts, "whole": leaf})
        self.tag, self.nested = tag, nested
        self.episode, self.log = -1, []
        self.array = np.zeros(3, np.float32) if reuses else None

    def observe(self):
        here = np.array([self.tag, self.episode, self.step_], np.float32)
        if self.array is not None:
            self.array[:] = here
            here = self.array
        if not self.nested:
            return here
        return {"parts": (here + 1, self.step_), "whole": here}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.step_ = 0
        return self.observe(), {}

    def step(self, action):
        before = flat("observation", self.observe())
        self.step_ += 1
        ended = self.step_ == LENGTHS[self.episode % len(LENGTHS)]
        terminated = ended and self.episode % 2 == 0
        truncated = ended and self.episode % 3 != 0 and not terminated
        truncated = ended and (truncated or not terminated)
        reward = 1000 * self.episode + self.step_
        following = self.observe()
        self.log.append(
            before
            | {"action": np.array(action), "reward": reward}
            | {"terminated": terminated, "truncated": truncated}
            | flat("next_observation", following)
        )
        return following, float(reward), terminated, truncated, {}


def flat(name, value):
    return {p: np.array(leaf) for p, leaf in nesting.flatten({name: value}).items()}


def vector(mode, num_envs=3, **kwargs):
    makers = [lambda tag=tag: LoggedEnv(tag, **kwargs) for tag in range(num_envs)]
    return SyncVectorEnv(makers, autoreset_mode=MODES[mode])


def check_column(column, log, field):
    assert len(column) == len(log)
    for value, transition in zip(column, log, strict=True):
        np.testing.assert_array_equal(value, transition[field])


def check_against_logs(path, logs):
    """Every step is the log's, in order; every drawable one has its true next."""
    with mr.ReplayBuffer.open(path) as buffer:
        everything = buffer.gather_all()
        for env_id, log in enumerate(logs):
            mine = (everything.env_ids == env_id) & ~everything["final"]
            log = log[: int(mine.sum())]
            for field in buffer.schema.paths:
                check_column(everything[field][mine], log, field)
            # Only the newest step of an episode that still runs has no next yet.
            if log and not (log[-1]["terminated"] or log[-1]["truncated"]):
                log = log[:-1]
            positions = everything.positions[mine][: len(log)]
            batch = buffer.take(np.full(len(log), env_id), positions)
            for field in batch:
                check_column(batch[field], log, field)
        return len(buffer), int((~everything["final"]).sum())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 7, 30, 50, 61])
@pytest.mark.parametrize("mode", MODES)
def test_a_vector_environment_is_recorded_to_the_step(tmp_path, mode, steps, nested):
    env = vector(mode, nested=nested)
    done = mr.record(env, tmp_path / "b", steps=steps, seed=0)
    alive, steps_in = check_against_logs(tmp_path / "b", [e.log for e in env.envs])
    assert done.steps == steps == alive == steps_in
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert buffer.autoreset == mode
        counts = buffer.sizes
        assert counts.max() - counts.min() <= 1 + len(LENGTHS)
        everything = buffer.gather_all()
        ends = everything["terminated"] | everything["truncated"]
        assert done.episodes == int((ends & ~everything["final"]).sum())
        row = 1 + sum(f.nbytes for f in buffer.schema.fields.values()) - 2
        assert done.nbytes == row * len(everything)


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("steps", [1, 9, 40])
def test_a_single_environment_is_recorded_to_the_step(tmp_path, steps, nested, reuses):
    env = LoggedEnv(nested=nested, reuses=reuses)
    done = mr.record(env, tmp_path / "b", steps=steps, seed=0)
    assert check_against_logs(tmp_path / "b", [env.log]) == (steps, steps)
    assert done.steps == steps
    assert done.path == tmp_path / "b"
    assert done.seconds > 0


@pytest.mark.parametrize("wrap", [int, np.int32, np.float64])
def test_rewards_of_any_number_type_are_accepted(tmp_path, wrap):
    class Rewards(gym.Wrapper):
        def step(self, action):
            observation, reward, *rest = self.env.step(action)
            return observation, wrap(reward), *rest

    env = Rewards(LoggedEnv())
    mr.record(env, tmp_path / "b", steps=20)
    check_against_logs(tmp_path / "b", [env.unwrapped.log])


@pytest.mark.parametrize("mode", MODES)
def test_a_policy_gets_what_the_environment_gives(tmp_path, mode):
    env = vector(mode)
    seen = []

    def policy(observation):
        seen.append(observation.copy())
        return (observation.sum(axis=1) % 5).astype(np.int64)

    mr.record(env, tmp_path / "b", policy, steps=40)
    assert {array.shape for array in seen} == {(3, 3)}
    check_against_logs(tmp_path / "b", [e.log for e in env.envs])
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        rows = buffer.gather_all()
        steps = ~rows["final"]
        expected = rows["observation"][steps].sum(axis=1) % 5
        np.testing.assert_array_equal(rows["action"][steps], expected)


def test_a_ring_that_wraps_keeps_the_newest(tmp_path):
    env = vector("next_step")
    recorded = mr.record(env, tmp_path / "b", steps=300, capacity=20)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert buffer.capacity == 20
        assert recorded.held == len(buffer) < 60
        assert (buffer.span.lengths <= 20).all()
        newest = buffer.heads - 1
        for env_id, env_ in enumerate(env.envs):
            row = buffer.get_field("observation", env_id, newest[env_id])
            assert row[1] in (env_.episode, env_.episode - 1)


@pytest.mark.parametrize("mode", MODES)
def test_an_existing_buffer_is_gone_on_with(tmp_path, mode):
    mr.record(vector(mode), tmp_path / "b", steps=31)
    before = mr.ReplayBuffer.open(tmp_path / "b").gather_all()
    done = mr.record(vector(mode), tmp_path / "b", steps=17)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert done.steps == 17
        assert len(buffer) == 48
        after = buffer.gather_all()
        for env_id in range(3):
            mine = before.env_ids == env_id
            now = np.flatnonzero(after.env_ids == env_id)[: mine.sum()]
            np.testing.assert_array_equal(after["observation"][now], before["observation"][mine])
        # The last step before the break is not joined with what came after it.
        batch = buffer.sample(500)
        same = batch["observation"][:, 1] == batch["next_observation"][:, 1]
        assert same.all()


def test_the_same_seed_records_the_same(tmp_path):
    for name in "ab":
        mr.record("CartPole-v1", tmp_path / name, steps=100, num_envs=2, seed=3)
    a, b = (mr.ReplayBuffer.open(tmp_path / name).gather_all() for name in "ab")
    for field in a:
        np.testing.assert_array_equal(a[field], b[field])


def test_an_id_makes_a_vector_environment(tmp_path):
    mr.record("CartPole-v1", tmp_path / "b", steps=50, num_envs=4, capacity=100)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert buffer.num_envs == 4
        assert buffer.autoreset == "next_step"
        assert len(buffer) == 50


def test_an_id_takes_keywords_of_its_environment(tmp_path):
    mr.record("ALE/Pong-v5", tmp_path / "b", steps=3, env_kwargs={"obs_type": "grayscale"})
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert buffer.schema["observation"] == mr.Field((210, 160), "uint8")


@pytest.mark.parametrize("mode", MODES)
def test_an_interruption_closes_and_goes_on_up(tmp_path, mode):
    env = vector(mode)
    calls = iter(range(100))

    def policy(observation):
        if next(calls) == 12:
            raise KeyboardInterrupt
        return env.action_space.sample()

    with pytest.raises(KeyboardInterrupt):
        mr.record(env, tmp_path / "b", policy, steps=1000, progress=True)
    steps, _ = check_against_logs(tmp_path / "b", [e.log for e in env.envs])
    assert 12 <= steps <= 36
    with mr.ReplayBuffer.open(tmp_path / "b", "r+") as buffer:
        assert buffer.recovery.how == "clean"


# The call after an end, in which a "next_step" environment resets, is the fourth.
@pytest.mark.parametrize("call", [0, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_what_strikes_within_a_step_goes_on_up_and_loses_none(tmp_path, monkeypatch, mode, call):
    env = vector(mode)
    step, effects = env.step, iter([DEFAULT] * call + [KeyboardInterrupt])
    monkeypatch.setattr(env, "step", Mock(wraps=step, side_effect=effects))
    with pytest.raises(KeyboardInterrupt):
        mr.record(env, tmp_path / "b", steps=1000)
    logs = [each.log for each in env.envs]
    if call == 0:
        assert not any(logs)
        assert not (tmp_path / "b").exists()
        return
    steps, _ = check_against_logs(tmp_path / "b", logs)
    assert steps == sum(map(len, logs))
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        # Each end has the observation that it led to.
        ends = [each["terminated"] or each["truncated"] for log in logs for each in log]
        assert buffer.gather_all()["final"].sum() == sum(ends)


def test_progress_tells_steps_rate_and_bytes(tmp_path, capsys):
    mr.record(vector("next_step"), tmp_path / "b", steps=30, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "30/30" in err
    assert "steps/s" in err
    assert "MB/s" in err


def test_nothing_is_printed_where_stderr_is_no_terminal(tmp_path, capsys):
    mr.record(vector("next_step"), tmp_path / "b", steps=3)
    assert capsys.readouterr() == ("", "")


def test_a_buffer_of_other_fields_is_refused(tmp_path):
    mr.record(LoggedEnv(), tmp_path / "b", steps=3)
    with pytest.raises(
        SchemaError,
        match=r"field 'observation': the environment gives .*float32\[4\].* holds .*"
        r"float32\[3\]\. Record to another path",
    ):
        mr.record(gym.make("CartPole-v1"), tmp_path / "b", steps=3)
    # Nothing was written, and the lock is free again.
    with mr.ReplayBuffer.open(tmp_path / "b", "r+") as buffer:
        assert len(buffer) == 3


def test_a_buffer_that_is_being_written_is_refused(tmp_path):
    mr.record(LoggedEnv(), tmp_path / "b", steps=3)
    with (
        mr.ReplayBuffer.open(tmp_path / "b", "r+"),
        pytest.raises(LockedError, match="already open for writing"),
    ):
        mr.record(LoggedEnv(), tmp_path / "b", steps=3)


def test_an_unknown_id_is_refused(tmp_path):
    with pytest.raises(SchemaError, match="'NoSuch-v0' is unknown to gymnasium"):
        mr.record("NoSuch-v0", tmp_path / "b", steps=3)
    assert not (tmp_path / "b").exists()


def test_an_id_with_several_colons_is_refused(tmp_path):
    with pytest.raises(SchemaError, match=r"'a:b:c' must have one ':' at most.* Pass"):
        mr.record("a:b:c", tmp_path / "b", steps=3)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "3"])
def test_a_number_of_steps_is_a_positive_integer(tmp_path, steps):
    with pytest.raises(SchemaError, match=r"steps must be an integer of at"):
        mr.record(LoggedEnv(), tmp_path / "b", steps=steps)


def test_num_envs_of_an_id_is_a_positive_integer(tmp_path):
    with pytest.raises(SchemaError, match=r"num_envs must be an integer.*got 0"):
        mr.record("CartPole-v1", tmp_path / "b", steps=3, num_envs=0)


def test_num_envs_of_an_environment_is_its_own(tmp_path):
    with pytest.raises(SchemaError, match=r"num_envs must be 3 like the .* got 4"):
        mr.record(vector("next_step"), tmp_path / "b", steps=3, num_envs=4)


def test_what_is_no_environment_is_refused(tmp_path):
    with pytest.raises(SchemaError, match=r"env must be a Gymnasium environment.* got dict"):
        mr.record({}, tmp_path / "b", steps=3)


def test_a_mode_that_is_not_stated_is_asked_for(tmp_path):
    env = vector("next_step")
    del env.metadata["autoreset_mode"]
    with pytest.raises(SchemaError, match=r"has no metadata\['autoreset_mode'\]. Pass"):
        mr.record(env, tmp_path / "b", steps=3)
    mr.record(env, tmp_path / "b", steps=30, autoreset="next_step")
    check_against_logs(tmp_path / "b", [e.log for e in env.envs])


def test_a_mode_that_contradicts_the_metadata_is_refused(tmp_path):
    with pytest.raises(SchemaError, match=r"must be 'next_step' as .* got 'disabled'"):
        mr.record(vector("next_step"), tmp_path / "b", steps=3, autoreset="disabled")


def test_an_unknown_mode_is_refused(tmp_path):
    with pytest.raises(SchemaError, match=r"autoreset must be one of.*got 'later'"):
        mr.record(vector("next_step"), tmp_path / "b", steps=3, autoreset="later")


def nothing(info):
    return {}


def none_at_ends(info):
    if "final_obs" in info:
        info["final_obs"][:] = None
    return info


def in_a_list(info):
    """As `gymnasium.wrappers.vector.DictInfoToList` gives them."""
    finals = info.get("final_obs", [None] * 3)
    return [{} if final is None else {"final_obs": final} for final in finals]


def as_one_batch(info):
    if "final_obs" in info:
        blank = np.zeros(3, np.float32)
        given = [blank if o is None else o for o in info["final_obs"]]
        info["final_obs"] = np.stack(given)
    return info


def as_a_list(info):
    if "final_obs" in info:
        info["final_obs"] = list(info["final_obs"])
    return info


class Says(gym.vector.VectorWrapper):
    """Changes the infos of each step."""

    def __init__(self, env, change):
        super().__init__(env)
        self.change = change

    def step(self, actions):
        *found, info = self.env.step(actions)
        return *found, self.change(info)


@pytest.mark.parametrize(
    "change",
    [nothing, none_at_ends, lambda info: [{}] * 3, lambda info: in_a_list({})],
    ids=range(4),
)
def test_an_end_without_its_final_observation_is_refused(tmp_path, change):
    env = Says(vector("same_step"), change)
    with pytest.raises(SchemaError, match=r"ended without info\['final_obs'\]"):
        mr.record(env, tmp_path / "b", steps=100)


@pytest.mark.parametrize("change", [as_one_batch, as_a_list, in_a_list])
def test_final_observations_may_come_in_other_forms(tmp_path, change):
    env = Says(vector("same_step"), change)
    mr.record(env, tmp_path / "b", steps=60)
    check_against_logs(tmp_path / "b", [e.log for e in env.unwrapped.envs])


@pytest.mark.parametrize(
    ("module", "name"), [("gymnasium", "CartPole-v1"), ("ale_py", "ALE/Pong-v5")]
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, module, name):
    known = environments.find_spec
    monkeypatch.setattr(
        environments, "find_spec", lambda name: None if name == module else known(name)
    )
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'mmreplay\[rl\]'"):
        mr.record(name, tmp_path / "b", steps=3)


def test_rich_is_loaded_only_for_a_bar(tmp_path):
    import subprocess

    code = (
        "import sys, mmreplay as mr\n"
        f"mr.record('CartPole-v1', {str(tmp_path / 'b')!r}, steps=3)\n"
        "assert 'rich' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
