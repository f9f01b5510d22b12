"""Stable-Baselines3's buffers on disk, beside the originals."""

import pickle
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mmreplay.episodes import START
from mmreplay.errors import EmptyError, FormatError, SchemaError

# Its own warnings: of RAM, of psutil, of a second learn().
pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
sb3 = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
torch = pytest.importorskip("torch")
gym = pytest.importorskip("gymnasium")
adapter = pytest.importorskip("mmreplay.adapters.sb3.replay_buffer")
buffers, vec_env = sb3.common.buffers, sb3.common.vec_env
ReplayBuffer, DictReplayBuffer = adapter.ReplayBuffer, adapter.DictReplayBuffer
spaces = gym.spaces
DQN, SAC, TD3 = sb3.DQN, sb3.SAC, sb3.TD3

BOX = spaces.Box(-1, 1, (3,), np.float32)
ACTION = spaces.Box(-1, 1, (2,), np.float32)


def walk(rng, space, envs, steps, ends=0.2):
    """Steps of environments that go on where they were, or start anew after an end."""

    def look():
        one = [np.asarray(space.sample()) for _ in range(envs)]
        return np.stack(one)

    space.seed(int(rng.integers(1 << 30)))
    obs = look()
    for _ in range(steps):
        then = look()
        done = rng.random(envs) < ends
        timeout = done & (rng.random(envs) < 0.5)
        yield SimpleNamespace(
            obs=obs,
            next_obs=then,
            done=done,
            timeout=timeout,
            action=rng.random((envs, 2), np.float32),
            reward=rng.random(envs),
            infos=[{"TimeLimit.truncated": bool(each)} for each in timeout],
        )
        obs = np.where(done.reshape(envs, *[1] * (then.ndim - 1)), look(), then)


def give(buffer, step):
    buffer.add(step.obs, step.next_obs, step.action, step.reward, step.done, step.infos)


def at(buffer, env_ids, positions):
    """The samples of given transitions."""
    return buffer._samples(buffer.ring.take(env_ids, positions), None)


@pytest.mark.parametrize("space", [BOX, spaces.Discrete(7), spaces.MultiBinary(4)])
@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("handled", [True, False])
def test_every_transition_is_the_one_that_the_original_holds(tmp_path, rng, space, envs, handled):
    arguments = (20 * envs, space, ACTION, "cpu", envs, False, handled)
    ours = ReplayBuffer(*arguments, path=tmp_path / "ring")
    theirs = buffers.ReplayBuffer(*arguments)
    for count, step in enumerate(walk(rng, space, envs, 53), 1):
        give(ours, step)
        give(theirs, step)
        state = (ours.pos, ours.full, ours.size())
        assert state == (theirs.pos, theirs.full, theirs.size())
        if count % 13:
            continue
        span = ours.ring.span
        for env in range(envs):
            positions = np.arange(span.first[env], span.stop[env])
            found, slots = at(ours, env, positions), positions % theirs.buffer_size
            ended = theirs.dones * (1 - theirs.timeouts)
            for name, array in (
                ("observations", theirs.observations),
                ("next_observations", theirs.next_observations),
                ("actions", theirs.actions),
                ("rewards", theirs.rewards[..., None]),
                ("dones", ended[..., None]),
            ):
                got, expected = getattr(found, name).numpy(), array[slots, env]
                assert got.dtype == expected.dtype
                np.testing.assert_array_equal(got, expected)
    drawn, original = ours.sample(16), theirs.sample(16)
    for ours_is, theirs_is in zip(drawn[:5], original[:5], strict=True):
        assert (ours_is.shape, ours_is.dtype) == (theirs_is.shape, theirs_is.dtype)
    assert drawn.discounts is None
    ours.close()


@pytest.mark.parametrize("envs", [1, 3])
def test_single_observations_give_every_transition_also_at_truncations(tmp_path, rng, envs):
    ours = ReplayBuffer(1000 * envs, BOX, ACTION, "cpu", envs, True, path=tmp_path / "r")
    steps = list(walk(rng, BOX, envs, 200))
    for step in steps:
        give(ours, step)
    drawable = 0
    for env in range(envs):
        position = 0
        for step in steps:
            if step is not steps[-1] or step.done[env]:
                drawable += 1
                found = at(ours, env, [position])
                np.testing.assert_array_equal(found.observations[0], step.obs[env])
                following = found.next_observations[0]
                np.testing.assert_array_equal(following, step.next_obs[env])
                assert found.dones[0] == (step.done[env] and not step.timeout[env])
            position += 1 + int(step.done[env])  # an end takes a second row
    starts = ours.ring.view.starts
    assert (starts.stop - starts.first).sum() - ours.ring.view.num_illegal == drawable
    # Half the disk: one observation a row.
    assert "next_observation" not in ours.ring.schema
    ours.close()


def test_folded_steps_are_those_of_the_original(tmp_path, rng):
    arguments = (40, BOX, ACTION, "cpu", 1)
    ours = ReplayBuffer(*arguments, path=tmp_path / "ring", n_steps=3, gamma=0.9)
    theirs = buffers.NStepReplayBuffer(*arguments, n_steps=3, gamma=0.9)
    for step in walk(rng, BOX, 1, 75):
        give(ours, step)
        give(theirs, step)
    # The original also draws steps whose window the newest step cuts short.
    positions = np.arange(35, 73)
    found, expected = at(ours, 0, positions), theirs._get_samples(positions % 40)
    for name in ("observations", "actions", "dones"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    # Theirs are sums in float32: three terms below 1 each, rounded once each.
    np.testing.assert_allclose(found.rewards, expected.rewards, rtol=0, atol=1e-6)
    goes_on = found.dones.numpy().ravel() == 0
    for name in ("next_observations", "discounts"):
        got, wanted = getattr(found, name).numpy(), getattr(expected, name).numpy()
        np.testing.assert_allclose(got[goes_on], wanted[goes_on], rtol=0, atol=1e-6)
    ours.close()


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("handled", [True, False])
def test_n_steps_stop_at_a_time_limit_that_is_not_done_as_in_the_original(
    tmp_path, rng, envs, handled
):
    arguments = (40 * envs, BOX, ACTION, "cpu", envs, False, handled)
    ours = ReplayBuffer(*arguments, path=tmp_path / "ring", n_steps=3, gamma=0.9)
    theirs = buffers.NStepReplayBuffer(*arguments, n_steps=3, gamma=0.9)
    for step in walk(rng, BOX, envs, 75, ends=0.1):
        for info in step.infos:
            info["TimeLimit.truncated"] |= bool(rng.random() < 0.2)
        give(ours, step)
        give(theirs, step)
    positions = np.arange(35, 73)
    for env in range(envs):
        found = at(ours, env, positions)
        # The original draws environments at random: one at a time instead.
        alone = buffers.NStepReplayBuffer(
            40, BOX, ACTION, "cpu", 1, False, handled, n_steps=3, gamma=0.9
        )
        for name in (
            "observations",
            "next_observations",
            "actions",
            "rewards",
            "dones",
            "timeouts",
        ):
            setattr(alone, name, getattr(theirs, name)[:, env : env + 1])
        alone.pos, alone.full = theirs.pos, theirs.full
        expected = alone._get_samples(positions % 40)
        for name in ("observations", "actions", "dones"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        np.testing.assert_allclose(found.rewards, expected.rewards, rtol=0, atol=1e-6)
        goes_on = found.dones.numpy().ravel() == 0
        for name in ("next_observations", "discounts"):
            got, wanted = getattr(found, name).numpy(), getattr(expected, name).numpy()
            np.testing.assert_allclose(got[goes_on], wanted[goes_on], rtol=0, atol=1e-6)
    ours.close()


@pytest.mark.parametrize("once", [True, False])
def test_the_step_after_a_time_limit_that_is_not_done_begins_an_episode(tmp_path, once):
    """By the short route too, and with the observation that the step led to."""
    ours = ReplayBuffer(20, BOX, ACTION, "cpu", 1, once, path=tmp_path / "ring", n_steps=2, gamma=1)
    for number in range(8):
        now = np.full((1, 3), number, np.float32)
        ours.add(
            now,
            now + 1,
            np.zeros((1, 2), np.float32),
            np.ones(1),
            np.zeros(1, bool),
            [{"TimeLimit.truncated": number == 3}],
        )
    episodes = ours.ring.episodes.episodes(0)
    assert episodes.lengths.tolist() == [4, 4]
    found = at(ours, 0, [2, 3])
    assert found.rewards.ravel().tolist() == [2, 1]
    assert found.next_observations[:, 0].tolist() == [4, 4]
    assert found.dones.ravel().tolist() == [0, 0]
    ours.close()


@pytest.mark.parametrize("once", [True, False])
def test_dict_observations_come_back_as_dicts(tmp_path, rng, once):
    space = spaces.Dict({"eye": spaces.Box(0, 255, (1, 8, 8), np.uint8), "arm/1": BOX})
    ours = DictReplayBuffer(64, space, ACTION, "cpu", 2, once, path=tmp_path / "ring")
    for number in range(10):
        now, then = (
            {"eye": np.full((2, 1, 8, 8), n, np.uint8), "arm/1": np.full((2, 3), n)}
            for n in (number, number + 1)
        )
        ours.add(now, then, rng.random((2, 2)), np.ones(2), np.full(2, number == 4), [{}] * 2)
    samples = ours.sample(32)
    eyes, arms = samples.observations["eye"], samples.observations["arm/1"]
    assert eyes.dtype == torch.uint8
    assert eyes.shape == (32, 1, 8, 8)
    np.testing.assert_array_equal(eyes[:, 0, 0, 0], arms[:, 0])
    assert (samples.next_observations["eye"] == eyes + 1).all()
    ours.close()


def test_a_dict_buffer_wants_a_dict():
    with pytest.raises(SchemaError, match=r"needs a Dict space, got .* Use ReplayBuffer"):
        DictReplayBuffer(10, BOX, ACTION)


def test_nothing_is_drawn_from_an_empty_buffer(tmp_path):
    with pytest.raises(EmptyError, match="transitions from an empty buffer"):
        ReplayBuffer(10, BOX, ACTION, path=tmp_path / "ring").sample(4)
    assert not (tmp_path / "ring").exists()


def test_samples_are_normalized_by_the_environment(tmp_path, rng):
    env = vec_env.VecNormalize(vec_env.DummyVecEnv([_Fixed]))
    env.obs_rms.mean[:], env.obs_rms.var[:], env.ret_rms.var = 0.5, 4.0, 9.0
    arguments = (100, BOX, ACTION, "cpu", 1)
    ours, theirs = (ReplayBuffer(*arguments, path=tmp_path / "r"), buffers.ReplayBuffer(*arguments))
    for step in walk(rng, BOX, 1, 30):
        give(ours, step)
        give(theirs, step)
    places = np.arange(30)
    found = ours._samples(ours.ring.take(0, places), env)
    for got, expected in zip(found[:5], theirs._get_samples(places, env)[:5], strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    ours.close()


class _Fixed(gym.Env):
    """The least that a VecNormalize asks of an environment."""

    observation_space, action_space = BOX, ACTION


def test_prioritized_draws_follow_what_was_learned(tmp_path, rng):
    ours = ReplayBuffer(
        100, BOX, ACTION, "cpu", path=tmp_path / "ring", prioritized={"alpha": 1.0, "eps": 0.0}
    )
    for step in walk(rng, BOX, 1, 100):
        give(ours, step)
    samples = ours.sample(400)
    assert samples.weights.shape == (400, 1)
    chosen = torch.from_numpy(samples.batch.positions) == 7
    assert chosen.any()
    dropped = ours.update_priorities(samples, chosen[:, None].float())
    assert dropped == 0
    seen = np.unique(samples.batch.positions)
    again = ours.sample(300).batch.positions
    assert not set(again) & (set(seen) - {7})
    ours.close()


def test_uniform_draws_keep_no_priorities(tmp_path, rng):
    ours = ReplayBuffer(100, BOX, ACTION, path=tmp_path / "ring")
    for step in walk(rng, BOX, 1, 3):
        give(ours, step)
    samples = ours.sample(4)
    with pytest.raises(SchemaError, match="needs a sampler with priorities, got UniformSampler"):
        ours.update_priorities(samples, np.ones(4))
    ours.close()


@pytest.mark.parametrize("once", [True, False])
def test_steps_that_do_not_follow_start_an_episode(tmp_path, rng, once):
    ours = ReplayBuffer(100, BOX, ACTION, "cpu", 1, once, path=tmp_path / "r", n_steps=2)
    for _ in range(4):
        for step in walk(rng, BOX, 1, 5, ends=0):
            give(ours, step)
    flags = ours.ring.flags(0, np.arange(20))
    assert np.flatnonzero(flags & START).tolist() == [0, 5, 10, 15]
    drawn = set(ours.sample(500).batch.positions)
    # What the last step before a cut led to is known where it was stored.
    assert drawn == {i for i in range(20) if i % 5 < 3 or (i < 19 and not once)}
    ours.close()


def test_a_pickle_is_a_path_and_goes_on_drawing(tmp_path, rng):
    ours = ReplayBuffer(100_000, BOX, ACTION, path=tmp_path / "ring", seed=3)
    for step in walk(rng, BOX, 1, 500):
        give(ours, step)
    ours.sample(8)
    data = pickle.dumps(ours)
    assert len(data) < 10_000
    expected = ours.sample(8)
    assert pickle.loads(data).ring is ours.ring
    ours.close()
    again = pickle.loads(data)
    np.testing.assert_array_equal(again.sample(8).observations, expected.observations)
    assert again.size() == 500
    again.close()


def test_a_reset_gives_everything_up(tmp_path, rng):
    ours = ReplayBuffer(100, BOX, ACTION, path=tmp_path / "ring")
    for step in walk(rng, BOX, 1, 30):
        give(ours, step)
    ours.reset()
    assert (ours.size(), ours.full) == (0, False)
    with pytest.raises(EmptyError):
        ours.sample(1)
    ours.close()


def model(kind, path, resume=False, once=False, **draws):
    """A small model over a buffer on disk."""
    discrete = issubclass(kind, DQN)
    return kind(
        "MlpPolicy",
        "CartPole-v1" if discrete else "Pendulum-v1",
        device="cpu",
        seed=0,
        buffer_size=1000,
        learning_starts=50,
        batch_size=16,
        optimize_memory_usage=once,
        policy_kwargs={"net_arch": [16]},
        replay_buffer_class=ReplayBuffer,
        replay_buffer_kwargs={"path": path, "resume": resume, **draws},
        **{"target_update_interval": 50} if discrete else {},
    )


@pytest.mark.parametrize("kind", [DQN, SAC, TD3])
@pytest.mark.parametrize("once", [True, False])
def test_models_train_with_it_unchanged(tmp_path, kind, once):
    agent = model(kind, tmp_path / "ring", once=once)
    before = [p.detach().clone() for p in agent.policy.parameters()]
    agent.learn(250)
    agent.learn(50)
    moved = zip(before, agent.policy.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in moved)
    assert agent.replay_buffer.size() >= 300  # DQN takes four steps at a time
    agent.replay_buffer.close()


def test_a_model_trains_the_same_from_ram_and_from_disk_under_the_same_draws(tmp_path):
    """Both gather by the same positions: then every weight is equal, bit for bit."""

    class Both(ReplayBuffer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, path=tmp_path / "ring")
            self.in_memory = buffers.ReplayBuffer(*args, **kwargs)

        def add(self, *args):
            super().add(*args)
            self.in_memory.add(*args)

        def sample(self, batch_size, env=None):
            samples = super().sample(batch_size, env)
            places = samples.batch.positions % self.in_memory.buffer_size
            other = self.in_memory._get_samples(places, env)
            for ours, theirs in zip(samples[:5], other[:5], strict=True):
                assert torch.equal(ours, theirs)
            return samples

    agent = SAC(
        "MlpPolicy",
        "Pendulum-v1",
        buffer_size=150,
        learning_starts=20,
        seed=0,
        batch_size=16,
        policy_kwargs={"net_arch": [16]},
        replay_buffer_class=Both,
    )
    agent.learn(260)  # past the time limit at 200, and past the ring's end
    assert agent.replay_buffer.full
    agent.replay_buffer.close()


def test_saving_and_loading_a_models_buffer_is_cheap(tmp_path):
    agent = model(DQN, tmp_path / "ring", resume=True)
    agent.learn(100)
    agent.save(tmp_path / "model.zip")
    agent.save_replay_buffer(tmp_path / "buffer.pkl")
    assert (tmp_path / "buffer.pkl").stat().st_size < 10_000
    again = DQN.load(tmp_path / "model.zip", env=gym.make("CartPole-v1"))
    again.load_replay_buffer(tmp_path / "buffer.pkl")
    assert again.replay_buffer.size() == 100
    again.learn(50, reset_num_timesteps=False)
    assert again.replay_buffer.size() >= 150
    again.replay_buffer.close()


def drawn(agent, steps=120):
    agent.learn(steps)
    return [agent.replay_buffer.sample(8).batch.positions.tolist() for _ in range(3)]


def test_models_of_the_same_seed_draw_alike_and_others_do_not(tmp_path):
    alike = [drawn(model(DQN, tmp_path / str(number))) for number in range(2)]
    assert alike[0] == alike[1]
    # Made first and trained later, too: each draws by the seed that it was made with.
    made = [model(DQN, tmp_path / f"made{number}") for number in range(2)]
    assert [drawn(each) for each in made] == alike
    np.random.seed(0)  # noqa: NPY002  # the one that is global
    several = [ReplayBuffer(9, BOX, ACTION).sampler.state_dict() for _ in range(2)]
    assert several[0] != several[1]
    np.random.seed(0)  # noqa: NPY002
    again = [ReplayBuffer(9, BOX, ACTION).sampler.state_dict() for _ in range(2)]
    assert again == several


def test_a_model_that_is_made_again_draws_by_the_numbers_of_its_seed(tmp_path):
    """Over what the folder holds by then; one that is loaded goes on instead."""
    agent = model(DQN, tmp_path / "ring", resume=True)
    first = agent.replay_buffer.sampler.state_dict()
    agent.learn(100)
    agent.save_replay_buffer(tmp_path / "buffer.pkl")
    left = agent.replay_buffer.sampler.state_dict()
    assert left["step"] > first["step"] == 0
    agent.replay_buffer.close()
    again = model(DQN, tmp_path / "ring", resume=True)
    assert again.replay_buffer.sampler.state_dict() == first
    again.load_replay_buffer(tmp_path / "buffer.pkl")
    assert again.replay_buffer.sampler.state_dict() == left
    again.replay_buffer.close()


def test_another_buffer_size_names_resize(tmp_path, rng):
    arguments = (BOX, ACTION, "cpu", 2)
    ours = ReplayBuffer(100, *arguments, path=tmp_path / "ring")
    for step in walk(rng, BOX, 2, 9):
        give(ours, step)
    ours.close()
    again = ReplayBuffer(200, *arguments, path=tmp_path / "ring", resume=True)
    told = r"^buffer_size: .*must hold 2 x 100 rows .* got 2 x 50 .*mmreplay resize .* 100"
    with pytest.raises(SchemaError, match=told):
        again.size()


def test_priorities_that_nobody_updates_are_said_once(tmp_path, rng):
    options = {"path": tmp_path / "ring", "prioritized": True}
    ours = ReplayBuffer(100, BOX, ACTION, **options)
    for step in walk(rng, BOX, 1, 20):
        give(ours, step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(adapter.PATIENCE - 1):
            ours.sample(2)
    with pytest.warns(UserWarning, match=r"Call replay_buffer\.update_priorities\(samp"):
        ours.sample(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 * adapter.PATIENCE):
            ours.sample(2)
    ours.close()
    learns = ReplayBuffer(100, BOX, ACTION, resume=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learns.update_priorities(learns.sample(2), [1.0, 2.0])
        for _ in range(2 * adapter.PATIENCE):
            learns.sample(2)
    learns.close()


KILLED = """
import os, sys
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import BaseCallback
from mmreplay.adapters.sb3 import ReplayBuffer

class Dies(BaseCallback):
    def _on_step(self):
        if self.num_timesteps == 150:
            print(self.model.replay_buffer.size(), flush=True)
            os.kill(os.getpid(), 9)
        return True

SAC("MlpPolicy", "Pendulum-v1", learning_starts=20, batch_size=16, buffer_size=1000,
    policy_kwargs={"net_arch": [16]}, replay_buffer_class=ReplayBuffer,
    replay_buffer_kwargs={"path": sys.argv[1]}).learn(1000, Dies())
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
        model(SAC, tmp_path / "ring")
    agent = model(SAC, tmp_path / "ring", resume=True)
    assert agent.replay_buffer.size() == held == 149  # the callback is before the add
    before = agent.replay_buffer.ring.gather_all()["observation"]
    agent.learn(60)
    after = agent.replay_buffer.ring.gather_all()["observation"]
    np.testing.assert_array_equal(after[:held], before)
    assert len(after) == held + 60
    agent.replay_buffer.close()


def test_the_prioritized_model_of_the_page_learns_priorities(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "migrating" / "sb3.md"
    (block,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    names = {}
    exec(compile(block, str(page), "exec"), names)
    agent = model(names["PrioritizedDQN"], tmp_path / "ring", n_steps=3, prioritized=True)
    agent.learn(200)
    probabilities = agent.replay_buffer.sample(64).batch.probabilities
    assert len(np.unique(probabilities)) > 10
    agent.replay_buffer.close()


def test_a_ring_of_images_is_gone_on_with(tmp_path):
    """A ring that the user made, with image fields in place of arrays."""
    import mmreplay as mr

    frames = spaces.Box(0, 255, (12, 16, 3), np.uint8)
    first = ReplayBuffer(100, frames, ACTION, path=tmp_path / "raw")
    give(first, next(walk(np.random.default_rng(0), frames, 1, 1)))
    schema, capacity = first.ring.schema, first.ring.capacity
    first.ring.close()
    images = dict.fromkeys(("observation", "next_observation"), mr.Field.image((12, 16, 3), "png"))
    mine = mr.Schema({**schema.fields, **images}, schema.roles)
    mr.ReplayBuffer.create(tmp_path / "mine", mine, capacity, autoreset="same_step").close()
    buffer = ReplayBuffer(100, frames, ACTION, path=tmp_path / "mine", resume=True)
    steps = list(walk(np.random.default_rng(1), frames, 1, 40))
    for step in steps:
        give(buffer, step)
    drawn = buffer.sample(64)
    rewards = [np.float32(step.reward[0]) for step in steps]
    for row, reward in enumerate(drawn.rewards[:, 0].numpy()):
        step = steps[rewards.index(reward)]
        np.testing.assert_array_equal(drawn.observations[row].numpy(), step.obs[0])
        np.testing.assert_array_equal(drawn.next_observations[row].numpy(), step.next_obs[0])
    buffer.ring.close()
