"""One life of a training of `test_killed_agents.py`: it is killed, and another goes on.

python -m tests.adapters.killed_agents NAME FOLDER STEPS
The agents are the originals'. Each call that adds rows to our memory is logged, with
its rows before it and a word after it; the log judges what the memory holds.
"""

import importlib.util
import os
import pickle
import sys
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

import mmreplay as mr
from mmreplay import nesting
from tools.curve_agents import AGENTS, QUIET, TASKS

ENDS = ("terminated", "truncated")
SMALL = {"learning_starts": 40, "batch_size": 32, "buffer_size": 20_000}
# Of each: where its task is from, what is other there, and steps of one call of learn.
TRAININGS = {
    "sb3 SAC": ("SAC", {"options": SMALL}, 40),
    "sb3 DQN": ("DQN", {"options": SMALL | {"train_freq": 4}}, 40),
    "sb3 HER": ("HER", {}, 40),
    "skrl": (
        "DDPG",
        {
            "options": {
                "batch_size": 32,
                "learning_starts": 40,
                "random_timesteps": 0,
                "experiment": QUIET,
            }
        },
        40,
    ),
    "velora": ("NeuroFlow", {}, 3),
    "pytorchrl": (
        "pytorchrl DDPG",
        {
            "options": TASKS["pytorchrl DDPG"]["options"]
            | {"start_steps": 60, "update_every": 10, "num_updates": 5, "mini_batch_size": 32}
        },
        40,
    ),
    "tmrl": ("tmrl", {}, 40),
}


class Log:
    """Records in a file, each written by one call of the system."""

    def __init__(self, path):
        self.file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def write(self, what, rows=None):
        record = pickle.dumps((what, rows))
        os.write(self.file, len(record).to_bytes(4, "little") + record)


def records(path):
    """What is in a log; a last record that a kill cut off is not."""
    data, found = path.read_bytes(), []
    while len(data) >= 4 and len(data) >= 4 + (size := int.from_bytes(data[:4], "little")):
        found.append(pickle.loads(data[4 : 4 + size]))
        data = data[4 + size :]
    return found


def rows_in(ring):
    """Rows of a folder by path, oldest first, without final rows; and their number."""
    if not (ring / "metadata.json").exists():
        return {}, 0
    with mr.ReplayBuffer.open(ring) as buffer:
        found = buffer.gather_all()
        mine = ~found["final"]
        columns = {path: column[mine] for path, column in found.fields.items()}
        ends = [columns[name] for name in ENDS if name in columns]
        columns["ended"] = np.any(ends, axis=0)
    return columns, int(mine.sum())


def logged(log, cls, method, rows_of):
    """Have a class log each call of a method."""
    add = getattr(cls, method)

    def adding(self, *args, **kwargs):
        log.write("add", rows_of(*args, **kwargs))
        found = add(self, *args, **kwargs)
        log.write("added")
        return found

    setattr(cls, method, adding)


def array(value):
    return np.array(value.detach().cpu() if hasattr(value, "detach") else value)


# What each library's calls add, as rows by path.


def of_sb3(obs, next_obs, action, reward, done, infos):
    row = nesting.flatten({"observation": obs, "next_observation": next_obs})
    row |= {"action": action, "reward": reward, "ended": done}
    return [{path: array(value)[0] for path, value in row.items()}]


def of_skrl(**tensors):
    return [
        {name: array(value).reshape(-1) for name, value in tensors.items() if value is not None}
    ]


VELORA = ("states", "actions", "rewards", "next_states", "dones", "hiddens")


def of_velora(*values):
    return [dict(zip(VELORA, (array(v).reshape(-1) for v in values), strict=True))]


def many_of_velora(*columns):
    return [
        dict(zip(VELORA, (array(v).reshape(-1) for v in row), strict=True))
        for row in zip(*columns, strict=True)
    ]


def of_pytorchrl(sample):
    return [
        {
            name: array(value).reshape(-1)
            for name, value in sample.items()
            if hasattr(value, "shape")
        }
    ]


TMRL = ("act", "obs/0", "reward", "terminated", "truncated")


def of_tmrl(buffer):
    return [
        {
            f"observation/{name}": array(value)
            for name, value in zip(TMRL, (act, obs[0], *others), strict=True)
        }
        for act, obs, *others, _ in buffer.memory
    ]


ADDS = {
    "sb3": ("mmreplay.adapters.sb3", "ReplayBuffer", {"add": of_sb3}),
    "HER": ("mmreplay.adapters.sb3", "HerReplayBuffer", {"add": of_sb3}),
    "skrl": ("mmreplay.adapters.skrl", "RandomMemory", {"add_samples": of_skrl}),
    "velora": (
        "mmreplay.adapters.velora",
        "ReplayBuffer",
        {"add": of_velora, "add_multi": many_of_velora},
    ),
    "pytorchrl": (
        "mmreplay.adapters.pytorchrl",
        "ReplayBuffer",
        {"insert_transition": of_pytorchrl},
    ),
    "tmrl": ("mmreplay.adapters.tmrl", "GenericTorchMemory", {"append_buffer": of_tmrl}),
}


def hindsight(task, seed, ring, notes):
    """Stable-Baselines3's SAC with hindsight, in its own environment of goals."""
    sb3 = import_module("stable_baselines3")
    env = import_module("stable_baselines3.common.envs").BitFlippingEnv(n_bits=4, continuous=True)
    if task["saved"] is not None:
        model = sb3.SAC.load(task["saved"] / "agent", env=env, device="cpu")
    else:
        model = sb3.SAC(
            "MultiInputPolicy",
            env,
            seed=seed,
            device="cpu",
            policy_kwargs={"net_arch": [32]},
            **SMALL,
            replay_buffer_class=import_module("mmreplay.adapters.sb3").HerReplayBuffer,
            replay_buffer_kwargs={"path": ring, "resume": True},
        )
    return SimpleNamespace(
        learn=lambda steps: model.learn(steps, reset_num_timesteps=False),
        save=lambda folder: model.save(folder / "agent"),
    )


def tmrl(task, seed, ring, notes):
    """tmrl's trainer and SAC, of a worker that plays Pendulum between its rounds."""
    torch, gymnasium = import_module("torch"), import_module("gymnasium")
    # Without its top package and its settings, which would fill the home folder.
    top = ModuleType("tmrl")
    top.__path__ = list(importlib.util.find_spec("tmrl").submodule_search_locations)
    settings = ModuleType("tmrl.config.config_constants")
    settings.DEBUG_MODE = False
    config = ModuleType("tmrl.config")
    config.config_constants = settings
    sys.modules |= {"tmrl": top, config.__name__: config, settings.__name__: settings}
    torch.manual_seed(seed)
    env = gymnasium.make(TASKS["SAC"]["env"])
    agent_of = import_module("tmrl.custom.custom_algorithms").SpinupSacAgent
    memory_of = import_module("mmreplay.adapters.tmrl").GenericTorchMemory
    models = import_module("tmrl.custom.custom_models")

    class Tuples(gymnasium.ObservationWrapper):
        observation_space = gymnasium.spaces.Tuple((env.observation_space,))

        def observation(self, observation):
            return (observation,)

    class Worker:
        """Plays with the newest model, as tmrl's RolloutWorker does."""

        def __init__(self):
            self.env, self.actor, self.seen = Tuples(env), None, None

        def broadcast_model(self, actor):
            self.actor = actor

        def retrieve_buffer(self):
            rows = []
            for _ in range(5):
                if self.seen is None:
                    self.seen, _ = self.env.reset()
                    nothing = np.zeros(1, np.float32)
                    rows.append((nothing, self.seen, 0.0, False, False, {}))
                    continue
                act = self.env.action_space.sample()
                if self.actor is not None:
                    act = self.actor.act_(self.seen)
                self.seen, reward, ended, cut, _ = self.env.step(act)
                rows.append((act, self.seen, float(reward), ended, cut, {}))
                if ended or cut:
                    self.seen = None
            return Samples(rows)

    class Samples:
        stat_train_return = stat_test_return = 0.0
        stat_train_steps = stat_test_steps = 0

        def __init__(self, rows):
            self.memory = rows

        def __len__(self):
            return len(self.memory)

    trainer = import_module("tmrl.training_offline").TrainingOffline(
        env_cls=(Tuples(env).observation_space, env.action_space),
        memory_cls=lambda nb_steps, device: memory_of(
            20_000, 32, nb_steps=nb_steps, device=device, path=ring, resume=True
        ),
        training_agent_cls=lambda **spaces: agent_of(
            **spaces, model_cls=lambda seen, acts: models.MLPActorCritic(seen, acts, (32, 32))
        ),
        rounds=1,
        steps=40,
        update_model_interval=20,
        update_buffer_interval=5,
        start_training=40,
        sleep_between_buffer_retrieval_attempts=0.0,
        device="cpu",
    )
    if task["saved"] is not None:
        state = torch.load(task["saved"] / "agent.pt")
        trainer.agent.model.load_state_dict(state)
    worker = Worker()
    return SimpleNamespace(
        learn=lambda steps: trainer.run_epoch(worker),
        save=lambda folder: torch.save(trainer.agent.model.state_dict(), folder / "agent.pt"),
    )


def live(name, folder, steps):
    """Train until the memory holds so many rows, from what an earlier life left."""
    import_module("torch").set_num_threads(1)
    kind, other, at_once = TRAININGS[name]
    task = TASKS.get(kind, {"library": kind}) | other | {"done": 0, "saved": None}
    saved = sorted(folder.glob("saved-*"), key=lambda path: int(path.name[6:]))
    if saved:
        task["saved"] = saved[-1]
    ring, log = folder / "ring", Log(folder / "log")
    # Asked of the folder itself, before the library's memory opens it.
    log.write("resumed", rows_in(ring)[1])
    module, cls, methods = ADDS[task["library"]]
    for method, rows_of in methods.items():
        logged(log, getattr(import_module(module), cls), method, rows_of)
    makers = AGENTS | {"HER": hindsight, "tmrl": tmrl}
    with chdir(folder):  # some libraries write where they stand
        agent = makers[task["library"]](task, len(saved), ring, [])
        number = len(saved)
        while rows_in(ring)[1] < steps:
            agent.learn(at_once)
            unfinished = folder / "unfinished"
            unfinished.mkdir(exist_ok=True)
            agent.save(unfinished)
            unfinished.rename(folder / f"saved-{number}")
            number += 1
        log.write("finished")


if __name__ == "__main__":
    live(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
