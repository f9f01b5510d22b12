"""RLlib's replay buffers over a ring, and rings as its offline data."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray.rllib", reason="RLlib is not installed: see make ray")

import gymnasium as gym
from ray.data.block import BlockAccessor
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.cql import CQLConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.sac import SACConfig as PlainSACConfig
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers.utils import update_priorities_in_episode_replay_buffer

import mmreplay as mr
from mmreplay.ray.rllib import (
    PrioritizedRingEpisodeReplayBuffer,
    RingEpisodeReplayBuffer,
    RingOfflineData,
    RLlibDatasource,
    SACConfig,
)
from tests.waits import until

# Ray's own code meets Ray's own deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    # RLlib makes tensors of arrays that lie in Ray's object store.
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
]
KINDS = [RingEpisodeReplayBuffer, PrioritizedRingEpisodeReplayBuffer]
GAMMA = 0.9
ROOT = Path(__file__).parents[2]


def chunk(id_, observations, first, count, done=None, numpy=True):
    """Steps of an episode, whose actions number all steps of the test."""
    steps = slice(first, first + count)
    episode = SingleAgentEpisode(
        id_=id_,
        observations=list(observations["observation"][first : first + count + 1]),
        actions=list(observations["action"][steps]),
        rewards=list(observations["reward"][steps]),
        terminated=done == "terminated",
        truncated=done == "truncated",
        t_started=first,
        len_lookback_buffer=0,
    )
    return episode.to_numpy() if numpy else episode


class Episodes:
    """Episodes that several environments play, as chunks, and their transitions."""

    def __init__(self, seed, num_running=3, numpy=True):
        self.rng, self.numpy, self.action = np.random.default_rng(seed), numpy, 0
        self.running = [self._begin() for _ in range(num_running)]
        self.done = []
        self.number = 0

    def _begin(self):
        length = int(self.rng.integers(1, 30))
        rewards = self.rng.random(length)
        episode = {
            "observation": self.rng.random((length + 1, 4), np.float32),
            "action": np.arange(self.action, self.action + length),
            "reward": rewards,
            "length": length,
            "sent": 0,
            "end": ("terminated", "truncated")[int(self.rng.integers(2))],
            "id": f"episode {self.action}",
        }
        self.action += length
        return episode

    def chunks(self, max_steps=5):
        """The next chunk of each environment."""
        chunks = []
        for env, episode in enumerate(self.running):
            left = episode["length"] - episode["sent"]
            count = min(left, int(self.rng.integers(1, max_steps + 1)))
            done = episode["end"] if count == left else None
            chunks.append(chunk(episode["id"], episode, episode["sent"], count, done, self.numpy))
            episode["sent"] += count
            if done:
                self.done.append(episode)
                self.running[env] = self._begin()
        return chunks

    def transitions(self, n=1):
        """By action: observation, return, next observation, ends, steps folded."""
        found = {}
        for episode in [*self.done, *self.running]:
            ended = episode["sent"] == episode["length"]
            # The last step sent waits for the next chunk.
            stop = episode["sent"] if ended else episode["sent"] - n
            for t in range(stop):
                k = min(n, episode["sent"] - t)
                last = ended and t + k == episode["length"]
                found[int(episode["action"][t])] = (
                    episode["observation"][t],
                    sum(GAMMA**i * episode["reward"][t + i] for i in range(k)),
                    episode["observation"][t + k],
                    last and episode["end"] == "terminated",
                    last and episode["end"] == "truncated",
                    k,
                )
        return found


def check_drawn(episodes, transitions):
    """Each drawn episode is the transition of its action."""
    for episode in episodes:
        assert len(episode) == 1
        want = transitions[int(episode.get_actions(0))]
        np.testing.assert_array_equal(episode.get_observations(0), want[0])
        np.testing.assert_allclose(episode.get_rewards(0), want[1], rtol=1e-6)
        np.testing.assert_array_equal(episode.get_observations(1), want[2])
        assert (episode.is_terminated, episode.is_truncated) == want[3:5]
        n_step = episode.get_extra_model_outputs("n_step", 0)
        assert want[3] or n_step == want[5]
        assert 0 < episode.get_extra_model_outputs("weights", 0) <= 1


def draw(buffer, count, n_step=1, beta=0.4):
    return buffer.sample(
        num_items=count,
        n_step=n_step,
        gamma=GAMMA,
        beta=beta,
        sample_episodes=True,
        batch_length_T=0,
        lookback=0,
        min_batch_length_T=0,
    )


def actions(episodes):
    return {int(episode.get_actions(0)) for episode in episodes}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize(("num_envs", "numpy"), [(3, True), (7, False), (1, True)])
def test_what_is_drawn_are_the_transitions_of_the_episodes(kind, n_step, num_envs, numpy, tmp_path):
    played = Episodes(0, min(3, num_envs), numpy)
    buffer = kind(5000, path=tmp_path / "ring", num_envs=num_envs, seed=0)
    for _ in range(80):
        buffer.add(played.chunks())
    transitions = played.transitions(n_step)
    drawn = [episode for _ in range(40) for episode in draw(buffer, 256, n_step)]
    check_drawn(drawn, transitions)
    assert actions(drawn) == set(transitions)
    sent = sum(episode["sent"] for episode in [*played.done, *played.running])
    assert len(buffer) == sent
    buffer.close()
    assert mr.verify_buffer(tmp_path / "ring").ok


def test_a_range_of_steps_draws_each_number(tmp_path):
    played = Episodes(1)
    buffer = RingEpisodeReplayBuffer(5000, path=tmp_path / "ring", num_envs=3, seed=0)
    for _ in range(80):
        buffer.add(played.chunks())
    by_steps = {n: played.transitions(n) for n in (1, 2, 3)}
    seen = set()
    for episode in draw(buffer, 600, (1, 4)):
        steps = int(episode.get_extra_model_outputs("n_step", 0))
        fitting = [n for n in by_steps if by_steps[n][int(episode.get_actions(0))][5] == steps]
        if episode.is_terminated:
            continue
        check_drawn([episode], by_steps[fitting[0]])
        seen.add(steps)
    assert seen == {1, 2, 3}


def test_chunks_of_one_call_may_end_and_begin_episodes_of_one_environment(tmp_path):
    played = Episodes(2, num_running=1)
    buffer = RingEpisodeReplayBuffer(5000, path=tmp_path / "ring", num_envs=1, seed=0)
    for _ in range(20):
        buffer.add([c for _ in range(6) for c in played.chunks()])
    drawn = draw(buffer, 2000)
    check_drawn(drawn, played.transitions())
    assert actions(drawn) == set(played.transitions())


def test_environments_of_the_ring_fill_alike(tmp_path):
    played = Episodes(3, num_running=2)
    buffer = RingEpisodeReplayBuffer(5000, path=tmp_path / "ring", num_envs=8)
    for _ in range(300):
        buffer.add(played.chunks())
    heads = buffer.ring.heads
    # An episode has at most 30 rows and a final one.
    assert heads.max() - heads.min() <= 31


def test_a_ring_of_too_few_environments_warns_and_truncates(tmp_path):
    played = Episodes(4, num_running=3)
    buffer = RingEpisodeReplayBuffer(5000, path=tmp_path / "ring", num_envs=2, seed=0)
    buffer.add(played.chunks()[:2])
    with pytest.warns(RuntimeWarning, match="num_envs is 2"):
        buffer.add([chunk for _ in range(40) for chunk in played.chunks()])
    transitions = played.transitions()
    for episode in draw(buffer, 500):
        want = transitions[int(episode.get_actions(0))]
        np.testing.assert_array_equal(episode.get_observations(1), want[2])


def test_a_full_ring_gives_up_its_oldest_steps(tmp_path):
    played = Episodes(5)
    buffer = RingEpisodeReplayBuffer(300, path=tmp_path / "ring", num_envs=3, seed=0)
    for _ in range(300):
        buffer.add(played.chunks())
    assert len(buffer) <= 300
    drawn = draw(buffer, 2000)
    check_drawn(drawn, played.transitions())
    assert min(actions(drawn)) > played.action - 500


def test_nested_observations_and_actions_come_back_nested(tmp_path):
    rng = np.random.default_rng(0)
    steps = [
        {"pixels": rng.integers(0, 255, (4, 4), np.uint8), "joints": rng.random(3)}
        for _ in range(11)
    ]
    moves = [{"arm": rng.random(2), "grip": int(rng.integers(2))} for _ in range(10)]
    episode = SingleAgentEpisode(
        id_="a",
        observations=steps,
        actions=moves,
        rewards=list(range(10)),
        terminated=True,
        len_lookback_buffer=0,
    )
    buffer = RingEpisodeReplayBuffer(100, path=tmp_path / "ring", num_envs=1, seed=0)
    buffer.add(episode)
    for drawn in draw(buffer, 50):
        t = int(drawn.get_rewards(0))
        for name in ("pixels", "joints"):
            got = drawn.get_observations(0)[name], drawn.get_observations(1)[name]
            np.testing.assert_array_equal(got[0], steps[t][name])
            np.testing.assert_array_equal(got[1], steps[t + 1][name])
        np.testing.assert_array_equal(drawn.get_actions(0)["arm"], moves[t]["arm"])
        assert drawn.get_actions(0)["grip"] == moves[t]["grip"]


def test_drawn_episodes_have_all_that_the_constructor_sets(tmp_path):
    played = Episodes(6)
    buffer = RingEpisodeReplayBuffer(500, path=tmp_path / "ring", num_envs=3, seed=0)
    for _ in range(10):
        buffer.add(played.chunks())
    (drawn,) = draw(buffer, 1)
    made = SingleAgentEpisode(
        id_=drawn.id_,
        observations=[drawn.get_observations(0), drawn.get_observations(1)],
        actions=[drawn.get_actions(0)],
        rewards=[drawn.get_rewards(0)],
        terminated=drawn.is_terminated,
        truncated=drawn.is_truncated,
        len_lookback_buffer=0,
    ).to_numpy()
    for slot in SingleAgentEpisode.__slots__:
        got, want = getattr(drawn, slot), getattr(made, slot)
        assert type(got) is type(want), slot
    assert drawn.get_state().keys() == made.get_state().keys()
    assert len(drawn[:1]) == 1


def test_priorities_decide_what_is_drawn_and_weights_make_up_for_it(tmp_path):
    played = Episodes(7)
    buffer = PrioritizedRingEpisodeReplayBuffer(
        500, path=tmp_path / "ring", num_envs=3, alpha=0.5, seed=0
    )
    for _ in range(12):
        buffer.add(played.chunks())
    priority = {action: 0.01 + (action % 7) for action in played.transitions()}
    for _ in range(60):
        drawn = draw(buffer, 64)
        errors = [-priority[int(e.get_actions(0))] for e in drawn]
        update_priorities_in_episode_replay_buffer(
            replay_buffer=buffer, td_errors={"default_policy": {"td_error": np.array(errors)}}
        )
    mass = {action: p**0.5 for action, p in priority.items()}
    total, least = sum(mass.values()), min(mass.values())
    counts = dict.fromkeys(mass, 0)
    for _ in range(300):
        for episode in draw(buffer, 64, beta=0.7):
            action = int(episode.get_actions(0))
            counts[action] += 1
            # (N P) ** -beta over the greatest of the buffer, as in RLlib.
            want = (mass[action] / least) ** -0.7
            got = episode.get_extra_model_outputs("weights", 0)
            np.testing.assert_allclose(got, want, rtol=1e-4)
    expected = np.array([mass[a] / total * 300 * 64 for a in counts])
    # Stratified draws vary less than independent ones: 6 standard deviations.
    bound = 6 * np.sqrt(expected) + 3
    assert (np.abs(np.array(list(counts.values())) - expected) < bound).all()


def test_a_killed_process_leaves_steps_and_priorities(tmp_path):
    program = f"""
        import os, signal, sys
        import numpy as np
        sys.path.insert(0, {str(ROOT)!r})
        from tests.on_ray.test_rllib import Episodes, draw
        from mmreplay.ray.rllib import PrioritizedRingEpisodeReplayBuffer
        buffer = PrioritizedRingEpisodeReplayBuffer(
            500, path={str(tmp_path / "ring")!r}, num_envs=3, alpha=1.0, seed=0
        )
        played = Episodes(8)
        for _ in range(12):
            buffer.add(played.chunks())
        for _ in range(40):
            draw(buffer, 64)
            buffer.update_priorities(np.full(64, 7.0))
        print(len(buffer), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    steps = int(done.stdout.split()[-1])
    buffer = PrioritizedRingEpisodeReplayBuffer(
        500, path=tmp_path / "ring", num_envs=3, alpha=1.0, seed=0
    )
    assert len(buffer) == steps
    drawn = draw(buffer, 256, beta=1.0)
    # The greatest weight is that of a step of priority 7, as all are.
    weights = {float(e.get_extra_model_outputs("weights", 0)) for e in drawn}
    assert weights == {1.0}
    assert buffer._sampler.priorities.highest() == 7.0
    # What ran is truncated: the next chunk begins an episode.
    buffer.add(Episodes(9).chunks())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sample_episodes": False}, "sample_episodes"),
        ({"batch_length_T": 20}, "batch_length_T"),
        ({"include_infos": True}, "include_infos"),
    ],
)
def test_what_the_ring_does_not_hold_is_refused(options, name, tmp_path):
    buffer = RingEpisodeReplayBuffer(100, path=tmp_path / "ring", num_envs=1)
    with pytest.raises(mr.SchemaError, match=name):
        buffer.sample(num_items=4, n_step=1, **{"sample_episodes": True, **options})
    with pytest.raises(mr.SchemaError, match="weight must be None"):
        buffer.add([], weight=2.0)
    with pytest.raises(mr.EmptyError, match="no step yet"):
        draw(buffer, 4)


def test_another_number_of_steps_draws_on_by_the_same_priorities(tmp_path):
    played = Episodes(10)
    buffer = PrioritizedRingEpisodeReplayBuffer(
        500, path=tmp_path / "ring", num_envs=3, alpha=1.0, seed=0
    )
    for _ in range(12):
        buffer.add(played.chunks())
    for n_step in (1, 3, 1):
        for _ in range(20):
            drawn = draw(buffer, 64, n_step)
            check_drawn(drawn, played.transitions(n_step))
            buffer.update_priorities(np.full(64, 5.0))
        assert buffer._sampler.where == "disk"
        assert buffer._sampler.priorities.highest() == 5.0


def test_episodes_of_several_agents_are_refused(tmp_path):
    buffer = RingEpisodeReplayBuffer(100, path=tmp_path / "ring", num_envs=1)
    with pytest.raises(mr.SchemaError, match="got MultiAgentEpisode"):
        buffer.add([MultiAgentEpisode()])


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_ring_that_was_recorded_is_refused_before_it_changes(autoreset, tmp_path):
    schema = mr.Schema(
        {
            "observation": mr.Field((4,), "float32"),
            "action": mr.Field((), "int64"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )
    path = tmp_path / "ring"
    mr.ReplayBuffer.create(path, schema, 50, autoreset=autoreset).close()
    before = {each.name: each.stat().st_mtime_ns for each in path.iterdir()}
    with pytest.raises(mr.SchemaError, match=f"{path} has autoreset='{autoreset}'"):
        RingEpisodeReplayBuffer(100, path=path)
    assert {each.name: each.stat().st_mtime_ns for each in path.iterdir()} == before


def test_a_ring_that_is_not_closed_is_locked(tmp_path):
    buffer = RingEpisodeReplayBuffer(100, path=tmp_path / "ring", num_envs=1)
    buffer.add(Episodes(0, 1).chunks())
    with pytest.raises(mr.LockedError, match="Close that buffer first"):
        RingEpisodeReplayBuffer(100, path=tmp_path / "ring", num_envs=1)
    buffer.close()
    RingEpisodeReplayBuffer(100, path=tmp_path / "ring", num_envs=1).close()


def name_of(kind):
    return f"mmreplay.ray.rllib.{kind.__name__}"


def dqn(path, kind=PrioritizedRingEpisodeReplayBuffer, num_learners=0, n_step=1):
    return (
        DQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=2)
        .learners(num_learners=num_learners)
        .reporting(min_sample_timesteps_per_iteration=100)
        .training(
            n_step=n_step,
            train_batch_size_per_learner=32,
            num_steps_sampled_before_learning_starts=50,
            replay_buffer_config={
                "type": name_of(kind),
                "path": str(path),
                "capacity": 20_000,
                "num_envs": 2,
                "alpha": 0.6,
                "beta": 0.4,
            },
        )
    )


def test_dqn_learns_from_a_ring_and_goes_on_from_a_checkpoint(cluster, tmp_path):
    algorithm = dqn(tmp_path / "ring").build_algo()
    for _ in range(3):
        result = algorithm.train()
    buffer = algorithm.local_replay_buffer
    steps = len(buffer)
    assert steps >= 300
    assert result["replay_buffer"]["num_env_steps_added_lifetime"] == steps
    assert buffer._sampler.where == "disk"
    checkpoint = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    buffer.close()
    algorithm.stop()
    algorithm = Algorithm.from_checkpoint(checkpoint)
    assert len(algorithm.local_replay_buffer) == steps
    algorithm.train()
    assert len(algorithm.local_replay_buffer) > steps
    algorithm.local_replay_buffer.close()
    algorithm.stop()
    assert mr.verify_buffer(tmp_path / "ring").ok


def test_several_learners_are_refused(cluster, tmp_path):
    with pytest.raises(mr.SchemaError, match="num_learners must be at most 1"):
        dqn(tmp_path / "ring", num_learners=2).build_algo()
    config = SACConfig().learners(num_learners=2)
    config.training(replay_buffer_config={"type": name_of(KINDS[1]), "path": "x"})
    with pytest.raises(mr.SchemaError, match="num_learners must be at most 1"):
        config.validate()


def test_a_config_for_sac_accepts_a_ring_where_rllib_refuses(tmp_path):
    for kind in KINDS:
        given = {"type": name_of(kind), "path": str(tmp_path / "ring")}
        config = SACConfig().environment("Pendulum-v1")
        config.training(replay_buffer_config=given).validate()
        assert config.replay_buffer_config["type"] == name_of(kind)
        plain = PlainSACConfig().environment("Pendulum-v1")
        with pytest.raises(ValueError, match="EpisodeReplayBuffer"):
            plain.training(replay_buffer_config=given).validate()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sac_learns_from_a_ring(cluster, kind, tmp_path):
    config = (
        SACConfig()
        .environment("Pendulum-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=2)
        .reporting(min_sample_timesteps_per_iteration=100)
        .training(
            train_batch_size_per_learner=32,
            num_steps_sampled_before_learning_starts=100,
            replay_buffer_config={
                "type": name_of(kind),
                "path": str(tmp_path / "ring"),
                "capacity": 20_000,
                "num_envs": 2,
            },
        )
    )
    algorithm = config.build_algo()
    for _ in range(2):
        algorithm.train()
    steps = len(algorithm.local_replay_buffer)
    checkpoint = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    algorithm.local_replay_buffer.close()
    algorithm.stop()
    algorithm = Algorithm.from_checkpoint(checkpoint)
    assert type(algorithm.config) is SACConfig
    assert len(algorithm.local_replay_buffer) == steps
    algorithm.train()
    algorithm.local_replay_buffer.close()
    algorithm.stop()


@pytest.mark.slow
def test_dqn_that_is_killed_goes_on_with_every_step(cluster, tmp_path):
    program = f"""
        import os, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        from tests.on_ray.test_rllib import dqn
        algorithm = dqn({str(tmp_path / "ring")!r}).build_algo()
        for _ in range(2):
            algorithm.train()
        algorithm.save_to_path({str(tmp_path / "checkpoint")!r})
        algorithm.train()
        print(len(algorithm.local_replay_buffer), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": cluster.address},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    steps = int(done.stdout.split()[-1])
    algorithm = Algorithm.from_checkpoint(str(tmp_path / "checkpoint"))
    assert len(algorithm.local_replay_buffer) == steps
    algorithm.train()
    assert len(algorithm.local_replay_buffer) > steps
    algorithm.local_replay_buffer.close()
    algorithm.stop()


def record(path, env_id, steps=300):
    env = gym.make_vec(env_id, num_envs=2)
    observation, _ = env.reset(seed=0)
    env.action_space.seed(0)
    with mr.ReplayBuffer.create(path, mr.Schema.from_env(env), steps + 100, num_envs=2) as ring:
        for _ in range(steps):
            action = env.action_space.sample()
            following, reward, terminated, truncated, _ = env.step(action)
            ring.add(
                observation=observation,
                action=action,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
            )
            observation = following
    env.close()


def offline(config, env_id, path):
    env = gym.make(env_id)
    return (
        config.environment(
            env_id, observation_space=env.observation_space, action_space=env.action_space
        )
        .env_runners(num_env_runners=0)
        .learners(num_learners=0)
        .offline_data(
            input_=[str(path)],
            offline_data_class=RingOfflineData,
            dataset_num_iters_per_learner=2,
            map_batches_kwargs={"concurrency": 1, "num_cpus": 0.5},
        )
        .training(train_batch_size_per_learner=64)
    )


def test_offline_rows_are_those_of_the_ring(cluster, tmp_path):
    record(tmp_path / "ring", "CartPole-v1")
    config = offline(BCConfig(), "CartPole-v1", tmp_path / "ring")
    rows = RingOfflineData(config).data.to_pandas()
    with mr.ReplayBuffer.open(tmp_path / "ring") as ring:
        view = ring.view
        count = int(view.starts.lengths.sum()) - view.num_illegal
        env_ids, positions = view.start_at(np.arange(count))
        batch = ring.take(env_ids, positions)
        begins = view.locate(env_ids, positions)[0]
    assert set(rows) == {
        "obs",
        "actions",
        "rewards",
        "new_obs",
        "terminateds",
        "truncateds",
        "eps_id",
    }
    assert len(rows) == count
    order = np.lexsort([positions, env_ids])
    got = rows.sort_values("eps_id", kind="stable")
    assert len(set(got["eps_id"])) == len(set(zip(env_ids, begins, strict=True)))
    want = sorted(map(tuple, batch["observation"][order].tolist()))
    assert sorted(map(tuple, np.stack(rows["obs"]).tolist())) == want
    want = sorted(map(tuple, batch["next_observation"].tolist()))
    assert sorted(map(tuple, np.stack(rows["new_obs"]).tolist())) == want


def test_episodes_of_rings_of_other_numbers_of_environments_have_other_ids(tmp_path):
    schema = mr.Schema(
        {
            "observation": mr.Field((), "float32"),
            "action": mr.Field((), "int64"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )
    for name, num_envs in (("a", 4), ("b", 1), ("c", 2)):
        with mr.ReplayBuffer.create(
            tmp_path / name, schema, 10, num_envs, autoreset="disabled"
        ) as ring:
            for _ in range(4):
                ring.add(
                    {path: np.zeros(num_envs, field.numpy) for path, field in schema.fields.items()}
                )
    source = RLlibDatasource([tmp_path / name for name in "abc"])
    ids = [
        set(block["eps_id"])
        for task in source.get_read_tasks(1)
        for block in (BlockAccessor.for_block(each).to_numpy() for each in task())
    ]
    assert len(set().union(*ids)) == 7


def test_without_gymnasium_the_import_says_what_to_install():
    code = "import sys; sys.modules['gymnasium'] = None; import mmreplay.ray.rllib"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "needs RLlib, which is not installed" in done.stderr
    assert "pip install 'mmreplay[rllib]'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "env_id"), [(BCConfig, "CartPole-v1"), (CQLConfig, "Pendulum-v1")]
)
def test_offline_algorithms_learn_from_a_ring(cluster, make, env_id, tmp_path):
    record(tmp_path / "ring", env_id)
    config = offline(make(), env_id, tmp_path / "ring")
    # CQL has other ones, and refuses its own default.
    config.training(**({"lr": None} if make is CQLConfig else {}))
    algorithm = config.build_algo()
    for _ in range(2):
        learned = algorithm.train()["learners"]["default_policy"]
    assert learned["num_module_steps_trained"] > 0
    assert np.isfinite(float(learned["total_loss"]))
    algorithm.stop()


@pytest.mark.parametrize("config", ["BCConfig", "DQNConfig"])
def test_the_programs_of_the_page_build_and_learn(cluster, tmp_path, config):
    page = (Path(__file__).parents[2] / "docs" / "ray.md").read_text()
    (block,) = (each for each in page.split("```python\n") if f"{config}()" in each)
    record(tmp_path / "expert", "CartPole-v1")
    names = {}
    program = block.partition("```")[0].replace('"runs/', f'"{tmp_path}/')
    exec(compile(program, "ray.md", "exec"), names)
    algorithm = names["config"].build_algo()
    algorithm.train()
    learned = until(lambda: algorithm.train()["learners"].get("default_policy"))
    assert np.isfinite(float(learned["total_loss"]))
    algorithm.stop()


def test_nested_observations_are_refused_offline(cluster, tmp_path):
    schema = mr.Schema({"observation": {"a": mr.Field((), "float32")}})
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 10) as ring:
        ring.extend(observation={"a": np.zeros(5, np.float32)})
    config = offline(BCConfig(), "CartPole-v1", tmp_path / "ring")
    with pytest.raises(Exception, match="one field for the role 'observation'"):
        RingOfflineData(config).data.take(1)
