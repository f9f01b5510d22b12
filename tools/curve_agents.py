"""Agents of four libraries on small tasks, over their own memory or over ours.

Each learns in two halves, so that a run which is killed between them and goes on in
another process does what the others do. Libraries are imported when one is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

Notes = list[tuple[float, float]]
"""Of each episode: the step at which it ended, and its return."""


class Agent(Protocol):
    """An agent in its environment."""

    def learn(self, steps: int) -> None:
        """Go on for so many steps."""

    def save(self, folder: Path) -> None:
        """Keep what is learned, and no transition."""


def note(env: Any, notes: Notes, width: int = 1, done: int = 0) -> Any:
    """Take down the episodes of an environment, one of so many that step together."""
    step, told = env.step, SimpleNamespace(steps=done, total=0.0)

    def stepping(action: Any) -> Any:
        found = step(action)
        told.steps += width
        told.total += float(found[1])
        if found[2] or found[3]:
            notes.append((told.steps, told.total))
            told.total = 0.0
        return found

    env.step = stepping
    return env


def sb3(task: Mapping[str, Any], seed: int, ring: Path | None, notes: Notes) -> Agent:
    """Stable-Baselines3's agents of this task's kind."""
    library = import_module("stable_baselines3")
    env = note(import_module("gymnasium").make(task["env"]), notes, 1, task["done"])
    options = dict(task["options"])
    if ring is not None:
        options |= {
            "replay_buffer_class": import_module("mmreplay.adapters.sb3").ReplayBuffer,
            "replay_buffer_kwargs": {"path": ring, "resume": True},
        }
    kind = getattr(library, task["kind"])
    if task["saved"] is not None:
        model = kind.load(task["saved"] / "agent", env=env, device="cpu")
    else:
        if task["kind"] == "TD3":
            noise = import_module("stable_baselines3.common.noise").NormalActionNoise
            options["action_noise"] = noise(np.zeros(1), np.full(1, 0.2))
        model = kind(
            "MlpPolicy",
            env,
            seed=seed,
            device="cpu",
            policy_kwargs={"net_arch": [64, 64]},
            **options,
        )
    return SimpleNamespace(
        learn=lambda steps: model.learn(steps, reset_num_timesteps=False),
        save=lambda folder: model.save(folder / "agent"),
    )


def _networks(torch: Any, kind: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Models of skrl for three observations and one action."""
    models = import_module("skrl.models.torch")

    def layers(inputs: int) -> Any:
        return torch.nn.Sequential(
            torch.nn.Linear(inputs, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 1),
        )

    def joined(inputs_by_name: Mapping[str, Any], inputs: int) -> Any:
        taken = inputs_by_name["observations"], inputs_by_name.get("taken_actions")
        return torch.cat([part for part in taken if part is not None], 1)[:, :inputs]

    def fixed(inputs: int, bound: bool) -> Any:
        class Fixed(models.DeterministicMixin, models.Model):  # type: ignore[misc, name-defined]  # of a library imported late
            def __init__(self) -> None:
                models.Model.__init__(self, **shape)
                models.DeterministicMixin.__init__(self)
                self.net = layers(inputs)

            def compute(self, inputs_: Any, role: str = "") -> Any:
                found = self.net(joined(inputs_, inputs))
                return (2 * torch.tanh(found) if bound else found), {}

        return Fixed()

    class Gaussian(models.GaussianMixin, models.Model):  # type: ignore[misc, name-defined]  # of a library imported late
        def __init__(self) -> None:
            models.Model.__init__(self, **shape)
            models.GaussianMixin.__init__(self)
            self.net, self.spread = layers(3), torch.nn.Parameter(torch.zeros(1))

        def compute(self, inputs: Any, role: str = "") -> Any:
            mean = 2 * torch.tanh(self.net(joined(inputs, 3)))
            return mean, {"log_std": self.spread}

    if kind == "PPO":
        return {"policy": Gaussian(), "value": fixed(3, False)}
    return {
        "policy": fixed(3, True),
        "target_policy": fixed(3, True),
        "critic": fixed(4, False),
        "target_critic": fixed(4, False),
    }


def skrl(task: Mapping[str, Any], seed: int, ring: Path | None, notes: Notes) -> Agent:
    """DDPG or PPO of skrl."""
    torch, width, kind = import_module("torch"), task["envs"], task["kind"]
    gymnasium = import_module("gymnasium")
    import_module("skrl.utils").set_seed(seed)
    made = [lambda: note(gymnasium.make(task["env"]), notes, width, task["done"])] * width
    wrap = import_module("skrl.envs.wrappers.torch").wrap_env
    env = wrap(gymnasium.vector.SyncVectorEnv(made), verbose=False)
    env.reset = lambda reset=env._env.reset: _tensors(torch, reset(seed=seed))
    shape = {
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "device": "cpu",
    }
    if ring is None:
        memories, options = import_module("skrl.memories.torch"), {}
    else:
        memories = import_module("mmreplay.adapters.skrl")
        options = {"path": ring, "resume": True}
    memory = memories.RandomMemory(
        memory_size=task["rows"], num_envs=width, device="cpu", replacement=True, **options
    )
    cfg = dict(task["options"])
    if kind == "DDPG":
        cfg |= {
            "exploration_noise": import_module("skrl.resources.noises.torch").GaussianNoise,
            "exploration_noise_kwargs": {"mean": 0.0, "std": 0.2, "device": "cpu"},
        }
    agents = import_module(f"skrl.agents.torch.{kind.lower()}")
    agent = getattr(agents, kind)(
        models=_networks(torch, kind, shape), memory=memory, cfg=cfg, **shape
    )
    if task["saved"] is not None:
        agent.load(str(task["saved"] / "agent.pt"))

    def learn(steps: int) -> None:
        trainer = import_module("skrl.trainers.torch").SequentialTrainer
        told = {"headless": True, "disable_progressbar": True}
        trainer(env=env, agents=agent, cfg={"timesteps": steps // width, **told}).train()

    return SimpleNamespace(learn=learn, save=lambda folder: agent.save(str(folder / "agent.pt")))


def _tensors(torch: Any, result: Any) -> Any:
    return torch.from_numpy(np.asarray(result[0])), result[1]


def velora(task: Mapping[str, Any], seed: int, ring: Path | None, notes: Notes) -> Agent:
    """NeuroFlow of velora; its steps are episodes."""
    models = import_module("velora.models")
    agent = models.NeuroFlowCT(task["env"], 20, 64, seed=seed, **task["options"])
    if task["saved"] is not None:
        agent = models.NeuroFlowCT.load(task["saved"] / "agent", buffer=False)
    agent.env = note(agent.env, notes, 1, task["done"])
    if ring is not None:
        dims = (agent.state_dim, agent.action_dim, agent.actor.hidden_size)
        agent.buffer = import_module("mmreplay.adapters.velora").ReplayBuffer(
            task["options"]["buffer_size"], *dims, path=ring, resume=True
        )

    def learn(steps: int) -> None:
        agent.train(
            64,
            n_episodes=steps,
            max_steps=200,
            window_size=10,
            display_count=steps,
            warmup_steps=None if len(agent.buffer) < 128 else 0,
        )

    return SimpleNamespace(
        learn=learn, save=lambda folder: agent.save(folder / "agent", buffer=False)
    )


def pytorchrl(task: Mapping[str, Any], seed: int, ring: Path | None, notes: Notes) -> Agent:
    """DDPG of pytorchrl."""
    torch, gym = import_module("torch"), import_module("gym")
    agents, gymnasium = import_module("pytorchrl.agent"), import_module("gymnasium")
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - pytorchrl draws by it

    class Old(gym.Env):  # type: ignore[misc, name-defined]  # of a library imported late
        def __init__(self) -> None:
            env = gymnasium.make(task["env"])
            self._env = note(env, notes, 1, task["done"])
            self._env.reset(seed=seed)
            self.observation_space = gym.spaces.Box(-8, 8, (3,), np.float32)
            self.action_space = gym.spaces.Box(-2, 2, (1,), np.float32)

        def reset(self) -> Any:
            return self._env.reset()[0]

        def step(self, action: Any) -> Any:
            found = self._env.step(np.reshape(action, 1))
            return found[0], float(found[1]), found[2] or found[3], found[4]

    module = import_module(f"{agents.__name__}.env")
    envs, actions, seen = module.VecEnv.create_factory(Old, vec_env_size=1)
    algorithms = import_module(f"{agents.__name__}.algorithms")
    algorithm, name = algorithms.DDPG.create_factory(**task["options"])
    actor = import_module(f"{agents.__name__}.actors").OffPolicyActor.create_factory(
        seen, actions, name, noise="Gauss"
    )
    if ring is None:
        storages, options = import_module(f"{agents.__name__}.storages"), {}
    else:
        storages = import_module("mmreplay.adapters.pytorchrl")
        options = {"path": ring, "resume": True}
    storage = storages.ReplayBuffer.create_factory(task["rows"], **options)
    scheme = import_module("pytorchrl.scheme").Scheme(
        algo_factory=algorithm,
        actor_factory=actor,
        storage_factory=storage,
        train_envs_factory=envs,
    )
    made = import_module("pytorchrl.learner").Learner(scheme, target_steps=1 << 60)
    algo = made.update_worker.grad_workers.local_worker().algo
    parts = {
        part: getattr(algo, part) for part in ("actor", "actor_targ", "pi_optimizer", "q_optimizer")
    }
    if task["saved"] is not None:
        for part, state in torch.load(task["saved"] / "agent.pt").items():
            parts[part].load_state_dict(state)

    def learn(steps: int) -> None:
        until = made.num_samples_collected + steps
        while made.num_samples_collected < until:
            made.step()

    def save(folder: Path) -> None:
        states = {part: found.state_dict() for part, found in parts.items()}
        torch.save(states, folder / "agent.pt")

    return SimpleNamespace(learn=learn, save=save)


QUIET = {"write_interval": 0, "checkpoint_interval": 0}
AGENTS: dict[str, Callable[[Mapping[str, Any], int, Path | None, Notes], Agent]] = {
    "sb3": sb3,
    "skrl": skrl,
    "velora": velora,
    "pytorchrl": pytorchrl,
}
TASKS: dict[str, dict[str, Any]] = {
    "DQN": {
        "library": "sb3",
        "kind": "DQN",
        "env": "CartPole-v1",
        "steps": 30_000,
        "options": {
            "learning_rate": 2.3e-3,
            "batch_size": 64,
            "buffer_size": 100_000,
            "learning_starts": 1000,
            "target_update_interval": 10,
            "train_freq": 256,
            "gradient_steps": 128,
            "exploration_fraction": 0.3,
            "exploration_final_eps": 0.04,
        },
    },
    "SAC": {
        "library": "sb3",
        "kind": "SAC",
        "env": "Pendulum-v1",
        "steps": 5_000,
        "options": {
            "learning_rate": 1e-3,
            "batch_size": 64,
            "buffer_size": 100_000,
            "learning_starts": 200,
        },
    },
    "TD3": {
        "library": "sb3",
        "kind": "TD3",
        "env": "Pendulum-v1",
        "steps": 5_000,
        "options": {
            "learning_rate": 1e-3,
            "batch_size": 64,
            "buffer_size": 100_000,
            "learning_starts": 200,
        },
    },
    "DDPG": {
        "library": "skrl",
        "kind": "DDPG",
        "env": "Pendulum-v1",
        "steps": 6_000,
        "envs": 1,
        "rows": 15_000,
        "options": {
            "batch_size": 64,
            "learning_starts": 200,
            "random_timesteps": 0,
            "experiment": QUIET,
        },
    },
    "PPO": {
        "library": "skrl",
        "kind": "PPO",
        "env": "Pendulum-v1",
        "steps": 40_960,
        "envs": 8,
        "rows": 256,
        "options": {
            "rollouts": 256,
            "learning_epochs": 10,
            "mini_batches": 16,
            "discount_factor": 0.9,
            "learning_rate": 1e-3,
            "experiment": QUIET,
            "time_limit_bootstrap": True,
        },
    },
    "NeuroFlow": {
        "library": "velora",
        "kind": "NeuroFlowCT",
        "env": "InvertedPendulum-v5",
        "steps": 80,
        "options": {"buffer_size": 100_000, "actor_lr": 1e-3, "critic_lr": 1e-3},
    },
    "pytorchrl DDPG": {
        "library": "pytorchrl",
        "kind": "DDPG",
        "env": "Pendulum-v1",
        "steps": 6_000,
        "rows": 100_000,
        "options": {
            "start_steps": 500,
            "update_every": 50,
            "num_updates": 50,
            "mini_batch_size": 64,
            "num_test_episodes": 0,
            "lr_q": 1e-3,
            "lr_pi": 1e-3,
        },
    },
}
