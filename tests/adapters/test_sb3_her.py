"""Stable-Baselines3's hindsight on disk, beside the original."""

import pickle
import signal
import subprocess
import sys
import warnings
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from mmreplay.errors import EmptyError, FormatError, SchemaError

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
sb3 = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
torch = pytest.importorskip("torch")
gym = pytest.importorskip("gymnasium")
her = pytest.importorskip("stable_baselines3.her.her_replay_buffer")
flipping = pytest.importorskip("stable_baselines3.common.envs")
adapter = pytest.importorskip("mmreplay.adapters.sb3.replay_buffer")
HerReplayBuffer, vec_env = adapter.HerReplayBuffer, sb3.common.vec_env
Strategy = her.GoalSelectionStrategy
DDPG, DQN, SAC = sb3.DDPG, sb3.DQN, sb3.SAC

GOAL = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
SPACE = gym.spaces.Dict({"observation": GOAL, "achieved_goal": GOAL, "desired_goal": GOAL})
ACTION = gym.spaces.Box(-1, 1, (2,), np.float32)
STRATEGIES = ["future", "final", "episode"]


@pytest.fixture(autouse=True)
def one_thread():
    """Networks this small are slower on several threads, and far more beside others."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


class Reach(gym.Env):
    """The least that hindsight asks of an environment; `seen` is what it was asked."""

    observation_space, action_space = SPACE, ACTION

    def __init__(self):
        self.seen = []

    def compute_reward(self, achieved, desired, infos):
        self.seen.append((achieved, desired, infos))
        bonus = np.array([info.get("bonus", 0) for info in infos], np.float64)
        return -np.linalg.norm(achieved - desired, axis=1) + bonus


def reach(envs=1):
    return vec_env.DummyVecEnv([Reach] * envs)


def walk(rng, envs, steps, ends=0.2, time_limits=0.1):
    """Steps of environments that go on where they were, or start anew after an end."""

    def look():
        return {key: rng.random((envs, 2), np.float32) for key in SPACE}

    obs = look()
    for number in range(steps):
        then = look()
        done = rng.random(envs) < ends
        timeout = np.where(done, rng.random(envs) < 0.5, rng.random(envs) < time_limits)
        yield SimpleNamespace(
            obs=obs,
            next_obs=then,
            done=done,
            action=rng.random((envs, 2), np.float32),
            reward=rng.random(envs),
            infos=[
                {"TimeLimit.truncated": bool(each), "bonus": number + env / 10}
                for env, each in enumerate(timeout)
            ],
        )
        anew = look()
        obs = {key: np.where(done[:, None], anew[key], then[key]) for key in then}


def give(buffer, step):
    buffer.add(step.obs, step.next_obs, step.action, step.reward, step.done, step.infos)


def both(tmp_path, envs=1, size=40, **options):
    """Ours and the original, over environments of their own."""
    env = reach(envs)
    arguments = (size * envs, SPACE, ACTION, env, "cpu", envs)
    ours = HerReplayBuffer(*arguments, path=tmp_path / "ring", seed=0, **options)
    return ours, her.HerReplayBuffer(*arguments, **options)


def steps_of(samples):
    """Environments and positions of a batch."""
    batch = samples.batch
    return list(zip(batch.env_ids.tolist(), batch.positions.tolist(), strict=True))


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("handled", [True, False])
@pytest.mark.parametrize("infos", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_transition_is_the_one_that_the_original_draws(
    tmp_path, rng, monkeypatch, envs, handled, infos, strategy
):
    """Given the same steps and goals: to the bit, through wraps and truncations."""
    options = {"goal_selection_strategy": strategy, "copy_info_dict": infos}
    ours, theirs = both(tmp_path, envs, handle_timeout_termination=handled, **options)
    compared = 0
    for number, step in enumerate(walk(rng, envs, 130)):
        give(ours, step)
        give(theirs, step)
        assert (ours.pos, ours.full, ours.size()) == (theirs.pos, theirs.full, theirs.size())
        if number in (50, 97):
            ours.truncate_last_trajectory()
            theirs.truncate_last_trajectory()
        if number % 7 and number not in (50, 97):
            continue
        if not (theirs.ep_length > 0).any():
            continue
        valid = np.argwhere(theirs.ep_length > 0)
        found = ours.sample(300)
        slots = {(at % 40, env) for env, at in steps_of(found)}
        assert slots <= set(map(tuple, valid.tolist()))
        if len(valid) < 20 * envs:  # every one is drawn, but once in 10**6
            assert slots == set(map(tuple, valid.tolist()))
        envs_of, at = found.batch.env_ids, found.batch.positions % 40
        real = 300 - 240
        goals = found.goal_positions % 40
        monkeypatch.setattr(
            theirs,
            "_sample_goals",
            lambda _, ids, g=goals: theirs.next_observations["achieved_goal"][g, ids],
        )
        parts = [
            theirs._get_real_samples(at[:real], envs_of[:real]),
            theirs._get_virtual_samples(at[real:], envs_of[real:]),
        ]
        monkeypatch.undo()
        for name in ("actions", "rewards", "dones"):
            expected = torch.cat([getattr(part, name) for part in parts])
            assert torch.equal(getattr(found, name), expected)
            assert getattr(found, name).dtype == expected.dtype
        for name in ("observations", "next_observations"):
            for key in SPACE:
                expected = torch.cat([getattr(part, name)[key] for part in parts])
                assert torch.equal(getattr(found, name)[key], expected)
        compared += 1
    assert compared > 12
    if infos:
        # What compute_reward was told is what the original tells it, by ours first.
        (seen,) = ours.env.get_attr("seen", indices=[0])
        mine, other = seen[-2], seen[-1]
        assert mine[2] == list(other[2])
        np.testing.assert_array_equal(mine[0], other[0])
    ours.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_and_goals_follow_the_distribution_of_the_original(tmp_path, rng, strategy):
    ours, theirs = both(tmp_path, 2, 12, goal_selection_strategy=strategy)
    for step in walk(rng, 2, 17, ends=0.4):
        give(ours, step)
        give(theirs, step)
    where = {
        tuple(theirs.next_observations["achieved_goal"][slot, env].tolist()): (env, slot)
        for slot in range(12)
        for env in range(2)
    }
    starts = {
        tuple(theirs.observations["achieved_goal"][slot, env].tolist()): (env, slot)
        for slot in range(12)
        for env in range(2)
    }
    np.random.seed(0)  # noqa: NPY002  # the original draws by it
    counts = []
    for buffer in (ours, theirs):
        counts.append(Counter())
        for _ in range(150):
            found = buffer.sample(256)
            first = 256 - int(0.8 * 256)
            observations = found.observations
            at = map(tuple, observations["achieved_goal"][first:].tolist())
            goals = map(tuple, observations["desired_goal"][first:].tolist())
            counts[-1].update(
                (starts[one], where[other]) for one, other in zip(at, goals, strict=True)
            )
    assert set(counts[0]) == set(counts[1])
    # Two samples of one law: Pearson's statistic has mean df and variance 2 df, df
    # being one less than the pairs. Seven standard deviations are beyond any seed.
    statistic = sum(
        (counts[0][each] - counts[1][each]) ** 2 / (counts[0][each] + counts[1][each])
        for each in counts[0]
    )
    freedom = len(counts[0]) - 1
    assert abs(statistic - freedom) < 7 * (2 * freedom) ** 0.5
    ours.close()


def test_half_the_disk_gives_the_same_transitions(tmp_path, rng):
    steps = list(walk(rng, 2, 60, time_limits=0))
    ours, found = {}, {}
    for once in (False, True):
        ours[once] = HerReplayBuffer(
            400, SPACE, ACTION, reach(2), "cpu", 2, once, path=tmp_path / str(once)
        )
        for step in steps:
            give(ours[once], step)
        ours[once].truncate_last_trajectory()
        found[once] = ours[once].sample(2000)
    assert "next_observation/achieved_goal" not in ours[True].ring.schema

    def seen(samples):
        parts = [
            *(samples.observations[key] for key in SPACE),
            *(samples.next_observations[key] for key in SPACE),
            samples.actions,
            samples.dones,
            samples.rewards,
        ]
        real = 2000 - 1600
        return set(map(tuple, torch.cat(parts, 1)[:real].tolist()))

    # 400 draws of at most 120: each transition is drawn, but for a few, by chance.
    whole, half = seen(found[False]), seen(found[True])
    assert len(whole & half) > 90
    for buffer in ours.values():
        buffer.close()


def test_samples_are_normalized_after_rewards_were_computed(tmp_path, rng):
    ours, theirs = both(tmp_path)
    normal = vec_env.VecNormalize(ours.env)
    for rms in normal.obs_rms.values():
        rms.mean[:], rms.var[:] = 0.5, 4.0
    normal.ret_rms.var = 9.0
    for step in walk(rng, 1, 30):
        give(ours, step)
        give(theirs, step)
    found = ours.sample(100, normal)
    at, real = found.batch.positions, 20
    theirs._sample_goals = lambda *_: theirs.next_observations["achieved_goal"][
        found.goal_positions, 0
    ]
    zeros = np.zeros(100, np.int64)
    parts = [
        theirs._get_real_samples(at[:real], zeros[:real], normal),
        theirs._get_virtual_samples(at[real:], zeros[real:], normal),
    ]
    expected = torch.cat([part.rewards for part in parts])
    assert torch.equal(found.rewards, expected)
    for key in SPACE:
        wanted = torch.cat([part.observations[key] for part in parts])
        assert torch.equal(found.observations[key], wanted)
    ours.close()


@pytest.mark.parametrize("strategy", [*STRATEGIES, "FUTURE", *Strategy])
def test_strategies_are_given_as_the_original_takes_them(strategy):
    kind = HerReplayBuffer(10, SPACE, ACTION, None, goal_selection_strategy=strategy)
    other = her.HerReplayBuffer(10, SPACE, ACTION, None, goal_selection_strategy=strategy)
    assert kind.goal_selection_strategy is other.goal_selection_strategy
    assert kind.her_ratio == other.her_ratio
    assert isinstance(kind, her.HerReplayBuffer)


@pytest.mark.parametrize("strategy", ["past", 1, None])
def test_another_strategy_is_refused(strategy):
    with pytest.raises(SchemaError, match="goal_selection_strategy must be one of"):
        HerReplayBuffer(10, SPACE, ACTION, None, goal_selection_strategy=strategy)


@pytest.mark.parametrize("count", [-1, 1.5, "4"])
def test_another_number_of_goals_is_refused(count):
    with pytest.raises(SchemaError, match="n_sampled_goal must be an integer"):
        HerReplayBuffer(10, SPACE, ACTION, None, n_sampled_goal=count)


def test_a_space_without_goals_is_refused():
    space = gym.spaces.Dict({"observation": GOAL, "achieved_goal": GOAL})
    with pytest.raises(SchemaError, match="needs a Dict with achieved_goal and des"):
        HerReplayBuffer(10, space, ACTION, None)
    with pytest.raises(SchemaError, match="needs a Dict space"):
        HerReplayBuffer(10, GOAL, ACTION, None)


@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_so_many_of_a_batch_have_other_goals_as_in_the_original(tmp_path, rng, count):
    ours, _ = both(tmp_path, n_sampled_goal=count)
    for step in walk(rng, 1, 40):
        give(ours, step)
    for size in (1, 7, 256):
        found = ours.sample(size)
        assert len(found.goal_positions) == int((1 - 1 / (count + 1)) * size)
        assert len(found.rewards) == size
    ours.close()


def test_without_an_environment_no_reward_is_made_up(tmp_path, rng):
    ours = HerReplayBuffer(40, SPACE, ACTION, None, path=tmp_path / "ring")
    with pytest.raises(EmptyError, match="no episode has ended yet"):
        ours.sample(8)
    for step in walk(rng, 1, 40):
        give(ours, step)
    with pytest.raises(SchemaError, match=r"env is None, .* Call set_env\(env\)"):
        ours.sample(8)
    ours.set_env(reach())
    ours.sample(8)
    with pytest.raises(ValueError, match="already initialized"):
        ours.set_env(reach())
    ours.close()


def test_infos_that_compute_reward_writes_into_are_empty_the_next_time(tmp_path, rng):
    class Writing:
        def __init__(self):
            self.empty = []

        def env_method(self, name, achieved, desired, infos, indices):
            self.empty.append(infos == [{}] * len(achieved))
            infos[-1]["written"] = True
            return [np.zeros(len(achieved), np.float32)]

    ours, _ = both(tmp_path)
    for step in walk(rng, 1, 20):
        give(ours, step)
    writing = Writing()
    ours.env = writing
    for batch_size in (10, 10, 20, 10):
        ours.sample(batch_size)
    assert writing.empty == [True] * 4
    ours.close()


def test_rewards_that_are_not_one_a_goal_are_refused(tmp_path, rng, monkeypatch):
    ours, _ = both(tmp_path)
    for step in walk(rng, 1, 40):
        give(ours, step)
    monkeypatch.setattr(Reach, "compute_reward", lambda *_: 0.5)
    with pytest.raises(SchemaError, match=r"compute_reward must .* got shape \[\] for 8 goals"):
        ours.sample(10)
    ours.close()


def test_infos_are_restored_with_their_size_limit(tmp_path, rng):
    options = {"path": tmp_path / "ring", "copy_info_dict": True}
    ours = HerReplayBuffer(40, SPACE, ACTION, reach(), **options)
    steps = list(walk(rng, 1, 20))
    for step in steps:
        give(ours, step)
    step.infos[0]["long"] = "x" * 1000
    with pytest.raises(SchemaError, match=r"infos\[0\] takes \d+ bytes as text"):
        give(ours, step)
    room = ours.ring.schema["info"].shape
    ours.close()
    again = HerReplayBuffer(40, SPACE, ACTION, reach(), resume=True, **options)
    again.sample(64)
    (seen,) = again.env.get_attr("seen")
    at = again.sample(64).batch.positions  # the same law, other steps
    assert {info["bonus"] for info in seen[0][2]} <= {n + 0.0 for n in range(20)}
    (seen,) = again.env.get_attr("seen")
    assert [info["bonus"] for info in seen[1][2]] == at[-51:].tolist()
    give(again, steps[0])
    assert again.ring.schema["info"].shape == room
    again.close()
    without = HerReplayBuffer(40, SPACE, ACTION, reach(), path=tmp_path / "ring", resume=True)
    with pytest.raises(SchemaError, match=r"must hold .* Pass the arguments"):
        without.size()


def test_infos_go_on_behind_a_pickle(tmp_path, rng):
    ours, _ = both(tmp_path, copy_info_dict=True)
    steps = list(walk(rng, 1, 12, ends=0, time_limits=0))
    for step in steps[:6]:
        give(ours, step)
    data = pickle.dumps(ours)
    ours.close()
    again = pickle.loads(data)
    again.set_env(reach())
    for step in steps[6:]:
        give(again, step)
    assert again.ring.episodes.episodes(0).lengths.tolist() == [12]
    again.truncate_last_trajectory()
    found = again.sample(100)
    (seen,) = again.env.get_attr("seen")
    wanted = found.batch.positions[-80:].tolist()
    assert [info["bonus"] for info in seen[0][2]] == wanted
    again.close()


def test_a_folder_without_infos_is_refused_where_they_are_asked_for(tmp_path, rng):
    ours, _ = both(tmp_path)
    for step in walk(rng, 1, 5):
        give(ours, step)
    ours.close()
    again = HerReplayBuffer(
        40, SPACE, ACTION, reach(), path=tmp_path / "ring", resume=True, copy_info_dict=True
    )
    with pytest.raises(SchemaError, match=r"copy_info_dict=True needs infos, but .* has none"):
        give(again, step)


@pytest.mark.parametrize("option", [{"info_keys": ["a"]}, {"info_bytes": 64}])
def test_how_infos_are_stored_is_refused_where_they_are_not(option):
    (name,) = option
    with pytest.raises(SchemaError, match=f"{name} must be left out unless copy_info_dict is True"):
        HerReplayBuffer(10, SPACE, ACTION, None, **option)


@pytest.mark.parametrize("keys", ["is_success", [3], [b"a"]])
def test_names_of_infos_are_a_sequence_of_text(keys):
    with pytest.raises(SchemaError, match=r"^info_keys must be .*\[.is_success.\], got"):
        HerReplayBuffer(10, SPACE, ACTION, None, copy_info_dict=True, info_keys=keys)


def test_copying_infos_is_true_or_false():
    with pytest.raises(SchemaError, match=r"^copy_info_dict must be True or False, got"):
        HerReplayBuffer(10, SPACE, ACTION, None, copy_info_dict="no")


def flip(n_bits=4, **options):
    return flipping.BitFlippingEnv(n_bits=n_bits, **options)


def model(kind, path, env=None, resume=False, **options):
    """A small model over a buffer on disk."""
    continuous = not issubclass(kind, DQN)
    return kind(
        "MultiInputPolicy",
        flip(continuous=continuous) if env is None else env,
        buffer_size=400,
        learning_starts=30,
        batch_size=16,
        seed=0,
        device="cpu",
        policy_kwargs={"net_arch": [16]},
        replay_buffer_class=HerReplayBuffer,
        replay_buffer_kwargs={"path": path, "resume": resume, **options},
    )


@pytest.mark.parametrize("kind", [DDPG, SAC, DQN])
def test_models_train_with_it_unchanged(tmp_path, kind):
    agent = model(kind, tmp_path / "ring", copy_info_dict=True)
    before = [p.detach().clone() for p in agent.policy.parameters()]
    agent.learn(120)
    agent.learn(40)
    moved = zip(before, agent.policy.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in moved)
    assert agent.replay_buffer.size() >= 160
    agent.replay_buffer.close()


@pytest.mark.parametrize("options", [{"discrete_obs_space": True}, {"image_obs_space": True}])
def test_goals_of_other_spaces_are_relabelled_too(tmp_path, options):
    agent = model(DQN, tmp_path / "ring", env=flip(**options))
    agent.learn(40)
    found = agent.replay_buffer.sample(64)
    goals = found.observations["desired_goal"][-51:]
    assert torch.equal(goals, found.next_observations["desired_goal"][-51:])
    assert len(torch.unique(goals, dim=0)) > 1
    agent.replay_buffer.close()


def test_several_environments_and_normalization_train(tmp_path):
    env = vec_env.DummyVecEnv([lambda: flip(continuous=True)] * 3)
    agent = model(SAC, tmp_path / "ring", env=vec_env.VecNormalize(env, norm_obs=False))
    agent.learn(150)
    assert agent.replay_buffer.size() >= 50
    agent.replay_buffer.close()


def test_saving_and_loading_a_models_buffer_truncates_or_goes_on(tmp_path):
    agent = model(DQN, tmp_path / "ring", resume=True)
    agent.learn(400, callback=lambda *_: agent.replay_buffer.pos < 50)
    buffer = agent.replay_buffer
    while len(buffer._running()) == 0:
        agent.learn(1, reset_num_timesteps=False)
    held, heads = buffer.size(), buffer.ring.heads
    episodes = len(buffer.ring.episodes.episodes(0).begin)
    agent.save(tmp_path / "model.zip")
    agent.save_replay_buffer(tmp_path / "buffer.pkl")
    assert (tmp_path / "buffer.pkl").stat().st_size < 10_000
    buffer.close()
    for goes_on in (True, False):
        again = DQN.load(tmp_path / "model.zip", env=flip())
        again.load_replay_buffer(tmp_path / "buffer.pkl", truncate_last_traj=not goes_on)
        loaded = again.replay_buffer
        assert loaded.env is again.env
        assert "not open yet" in repr(loaded)
        newest = set()
        for _ in range(40):
            newest |= {int(heads[0] - 1)} & set(loaded.sample(64).batch.positions)
        assert bool(newest) == (not goes_on)
        assert loaded.size() == held
        loaded.close()
    # And on: the next step is of the same episode, if it begins where that stopped.
    steps = np.random.default_rng(1)
    for goes_on in (True, False):
        ring = HerReplayBuffer(40, SPACE, ACTION, reach(), path=tmp_path / str(goes_on))
        first, second = walk(steps, 1, 2, ends=0)
        give(ring, first)
        data = pickle.dumps(ring)
        ring.close()
        ring = pickle.loads(data)
        ring.set_env(reach())
        if not goes_on:
            second.obs = {key: value + 1 for key, value in second.obs.items()}
        give(ring, second)
        lengths = ring.ring.episodes.episodes(0).lengths.tolist()
        assert lengths == ([2] if goes_on else [1, 1])
        ring.close()
    assert episodes > 5


def test_truncating_says_so_where_an_episode_is_running(tmp_path, rng):
    ours, theirs = both(tmp_path)
    for step in walk(rng, 1, 9, ends=0):
        give(ours, step)
        give(theirs, step)
    for buffer in (ours, theirs):
        with pytest.warns(UserWarning, match="trajectory in the replay buffer will be"):
            buffer.truncate_last_trajectory()
    found = {at for _, at in steps_of(ours.sample(200))}
    assert found == set(range(9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.truncate_last_trajectory()
        # What was cut stays so in a pickle.
        data = pickle.dumps(ours)
        ours.close()
        again = pickle.loads(data)
        again.set_env(reach())
        assert {at for _, at in steps_of(again.sample(200))} == set(range(9))
    for following in walk(rng, 1, 1):
        give(again, following)
    assert again.ring.episodes.episodes(0).lengths.tolist() == [9, 1]
    assert again.ring.gather_all()["truncated"].tolist()[8]
    again.reset()
    with pytest.raises(EmptyError):
        again.sample(1)
    again.close()


KILLED = """
import os, sys
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.envs import BitFlippingEnv
from mmreplay.adapters.sb3 import HerReplayBuffer

class Dies(BaseCallback):
    def _on_step(self):
        buffer = self.model.replay_buffer
        if self.num_timesteps > 90 and len(buffer._running()):
            print(buffer.size(), flush=True)
            os.kill(os.getpid(), 9)
        return True

DQN("MultiInputPolicy", BitFlippingEnv(n_bits=4), learning_starts=20, batch_size=16,
    buffer_size=400, policy_kwargs={"net_arch": [16]}, device="cpu",
    replay_buffer_class=HerReplayBuffer, replay_buffer_kwargs={"path": sys.argv[1]},
).learn(1000, Dies())
"""


def test_a_run_that_was_killed_goes_on_with_its_buffer(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "ring")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    held = int(done.stdout)
    with pytest.raises(FormatError, match="resume=True"):
        model(DQN, tmp_path / "ring")
    agent = model(DQN, tmp_path / "ring", resume=True)
    assert agent.replay_buffer.size() == held
    # The episode that was running is ended: all of it is drawn, its last step too.
    found = Counter()
    for _ in range(60):
        found.update(at for _, at in steps_of(agent.replay_buffer.sample(64)))
    assert set(found) == set(range(held))
    agent.learn(60)
    after = agent.replay_buffer.ring
    assert len(after) >= held + 60
    assert after.gather_all()["truncated"][held - 1]
    agent.replay_buffer.close()


def solved(kind, buffer_class, path, bits, steps, train_freq, **options):
    """Episodes of 50 whose goal a trained agent reaches."""
    continuous = not issubclass(kind, DQN)
    agent = kind(
        "MultiInputPolicy",
        flip(n_bits=bits, continuous=continuous),
        seed=1,
        learning_rate=1e-3,
        buffer_size=20_000,
        learning_starts=300,
        batch_size=64,
        train_freq=train_freq,
        gradient_steps=1,
        gamma=0.95,
        device="cpu",
        policy_kwargs={"net_arch": [64] * (1 + continuous)},
        replay_buffer_class=buffer_class,
        replay_buffer_kwargs={"path": path},
        **options,
    )
    agent.learn(steps)
    agent.replay_buffer.close()
    env, count = flip(n_bits=bits, continuous=continuous), 0
    for seed in range(50):
        obs, _ = env.reset(seed=seed)
        over = terminated = False
        while not over:
            action, _ = agent.predict(obs, deterministic=True)
            obs, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
        count += terminated
    return count


@pytest.mark.slow
def test_hindsight_learns_what_the_plain_buffer_does_not(tmp_path):
    """Ten bits: without other goals hardly any episode is ever rewarded."""
    with_goals, plain = (
        solved(
            DQN,
            kind,
            tmp_path / kind.__name__,
            10,
            5_000,
            2,
            exploration_fraction=0.3,
            target_update_interval=100,
        )
        for kind in (HerReplayBuffer, adapter.DictReplayBuffer)
    )
    assert with_goals > plain + 25


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DDPG, SAC])
def test_continuous_agents_learn_to_reach_goals(tmp_path, kind):
    assert solved(kind, HerReplayBuffer, tmp_path / "ring", 8, 6_000, 1) >= 40
