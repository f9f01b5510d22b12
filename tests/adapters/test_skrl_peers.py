"""skrl's own memory beside ours, and its agents over ours."""

import numpy as np
import pytest

from mmreplay.errors import SchemaError

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("skrl", reason="skrl is not installed")
torch = pytest.importorskip("torch")
gym = pytest.importorskip("gymnasium")
skrl_config = pytest.importorskip("skrl").config
theirs = pytest.importorskip("skrl.memories.torch")
ddpg = pytest.importorskip("skrl.agents.torch.ddpg")
ppo = pytest.importorskip("skrl.agents.torch.ppo")
models = pytest.importorskip("skrl.models.torch")
noises = pytest.importorskip("skrl.resources.noises.torch")
trainers = pytest.importorskip("skrl.trainers.torch")
post = pytest.importorskip("skrl.utils.postprocessing")
wrappers = pytest.importorskip("skrl.envs.wrappers.torch")
ours = pytest.importorskip("mmreplay.adapters.skrl")

spaces = gym.spaces
BOX = spaces.Box(-1, 1, (2, 2))
SIZES = {
    "observations": spaces.Dict({"a": BOX, "b": spaces.Discrete(3)}),
    "actions": spaces.MultiDiscrete([3, 4]),
    "rewards": 1,
    "terminated": 1,
}
DTYPES = {"actions": torch.int32, "terminated": torch.bool}
NAMES = [*SIZES, "none"]


def pair(path, rows, envs):
    """The original and ours, declared alike."""
    arguments = {"memory_size": rows, "num_envs": envs, "device": "cpu"}
    made = theirs.RandomMemory(**arguments), ours.RandomMemory(**arguments, path=path)
    for memory in made:
        for name, size in SIZES.items():
            assert memory.create_tensor(name=name, size=size, dtype=DTYPES.get(name))
            assert not memory.create_tensor(name=name, size=size)
        assert not memory.create_tensor(name="none", size=None)
    return made


def samples(rng, count):
    return {
        "observations": torch.from_numpy(rng.random((count, 5))).float(),
        "actions": torch.from_numpy(rng.integers(3, size=(count, 2))),
        "rewards": torch.from_numpy(rng.random((count, 1))),
        "terminated": torch.from_numpy(rng.random((count, 1)) < 0.2),
    }


def same(one, other):
    """Whether two tensors are equal to the bit, NaN being itself."""
    if one is None or other is None:
        return one is other
    kinds = (one.shape, one.dtype) == (other.shape, other.dtype)
    return kinds and bool(((one == other) | (one != one) & (other != other)).all())


def assert_alike(original, memory, rng):
    for name in ("memory_index", "env_index", "filled", "memory_size", "num_envs"):
        assert getattr(original, name) == getattr(memory, name)
    assert len(original) == len(memory)
    assert original.get_tensor_names() == memory.get_tensor_names()
    every = original.all_sequence_indexes
    np.testing.assert_array_equal(every, memory.all_sequence_indexes)
    for name in SIZES:
        assert same(original.get_tensor_by_name(name), memory.get_tensor_by_name(name))
        assert same(original.tensors_view[name], memory.tensors_view[name])
    if len(memory) == 0:
        return
    indexes = rng.integers(len(memory), size=12)
    for parts in (1, 5):
        for one, other in zip(
            original.sample_by_index(NAMES, indexes=indexes, mini_batches=parts),
            memory.sample_by_index(NAMES, indexes=indexes, mini_batches=parts),
            strict=True,
        ):
            assert all(map(same, one, other))


@pytest.mark.parametrize("envs", [1, 4])
def test_the_same_samples_lie_in_the_same_cells(tmp_path, rng, envs):
    original, memory = pair(tmp_path / "ring", 9, envs)
    for _ in range(80):
        # What the original gets wrong is left out: samples that cross the end of a
        # row, a row over half a row, and many samples of several tensors.
        room = envs - original.env_index
        count = envs if not original.env_index and rng.random() < 0.7 else 1
        count = int(rng.integers(1, room + 1)) if count == 1 else count
        given = samples(rng, count)
        if count == 1 and rng.random() < 0.5:
            given = {name: value[0] for name, value in given.items()}
        for each in (original, memory):
            each.add_samples(**given, more=torch.zeros(count, 1), none=None)
        assert_alike(original, memory, rng)
        if rng.random() < 0.03:
            original.reset()
            memory.reset()
            assert len(original) == len(memory) == 0
            # The original keeps what was reset; here it is gone.
            for name in SIZES:
                original.tensors[name].fill_(memory._declared[name].nothing)
    memory.home.close()


def test_many_samples_of_one_tensor_wrap_like_the_original_s(tmp_path, rng):
    original = theirs.RandomMemory(memory_size=10, device="cpu")
    memory = ours.RandomMemory(memory_size=10, device="cpu", path=tmp_path / "ring")
    for each in (original, memory):
        each.create_tensor(name="a", size=2)
    for count in (4, 3, 2, 8, 1, 9, 10, 2, 2):
        values = torch.from_numpy(rng.random((count, 2))).float()
        for each in (original, memory):
            each.add_samples(a=values)
        # The original forgets that it is full where it wraps in the middle.
        assert original.memory_index == memory.memory_index
        there = memory.get_tensor_by_name("a")
        assert same(original.get_tensor_by_name("a"), there)
    memory.home.close()


@pytest.mark.parametrize("replacement", [False, True])
def test_draws_have_the_shapes_of_the_original_s(tmp_path, rng, replacement):
    original, memory = pair(tmp_path / "ring", 20, 3)
    original._replacement = memory._replacement = replacement
    for _ in range(15):
        given = samples(rng, 3)
        original.add_samples(**given)
        memory.add_samples(**given)
    for size, parts, length in ((8, 1, 1), (100, 1, 1), (7, 3, 1), (6, 2, 4)):
        drawn = [
            each.sample(NAMES, batch_size=size, mini_batches=parts, sequence_length=length)
            for each in (original, memory)
        ]
        assert len(drawn[0]) == len(drawn[1]) == parts
        for one, other in zip(*drawn, strict=True):
            for left, right in zip(one, other, strict=True):
                kinds = [None if t is None else (t.shape, t.dtype) for t in (left, right)]
                assert kinds[0] == kinds[1]
        # What ours drew is what the original holds there.
        again = original.sample_by_index(
            NAMES, indexes=memory.get_sampling_indexes(), mini_batches=parts
        )
        for one, other in zip(again, drawn[1], strict=True):
            assert all(map(same, one, other))
    memory.home.close()


@pytest.mark.parametrize("suffix", ["pt", "npz", "csv"])
def test_files_are_read_by_the_other(tmp_path, rng, suffix):
    original, memory = pair(tmp_path / "ring", 6, 2)
    for _ in range(6):
        given = samples(rng, 2)
        original.add_samples(**given)
        memory.add_samples(**given)
    memory.save(str(tmp_path / "ours"), format=suffix)
    ((_, data),) = post.MemoryFileIterator(str(tmp_path / "ours/memories/*"))
    for name in SIZES:
        expected = original.get_tensor_by_name(name)
        if suffix == "csv":  # whose True and False are both read as True
            found = torch.tensor(data[name]).reshape(expected.shape).to(expected.dtype)
            assert same(found, expected) or name == "terminated"
        else:
            assert same(torch.as_tensor(data[name]), expected)
    original.save(str(tmp_path / "theirs"), format=suffix)
    (file,) = (tmp_path / "theirs" / "memories").iterdir()
    memory.reset()
    memory.load(str(file))
    for name in SIZES:
        assert same(memory.get_tensor_by_name(name), original.get_tensor_by_name(name))
    memory.home.close()


def test_what_the_original_refuses_is_a_value_error_here_too(tmp_path):
    original, memory = pair(tmp_path / "ring", 6, 2)
    for each in (original, memory):
        for call in (
            lambda memory=each: memory.add_samples(),
            lambda memory=each: memory.create_tensor(name="rewards", size=2),
            lambda memory=each: memory.create_tensor(name="rewards", size=1, dtype=torch.int8),
            lambda memory=each: memory.create_tensor(name="x", size=3, keep_dimensions=True),
            lambda memory=each: memory.add_samples(rewards=torch.zeros(2, 1, 1)),
        ):
            with pytest.raises(ValueError, match=r"\w"):  # in its own words
                call()
        with pytest.raises(KeyError):
            each.get_tensor_by_name("x")
    assert issubclass(SchemaError, ValueError)


class Net(models.Model):
    """A small network whose last layer is of some size."""

    def __init__(self, inputs, outputs, **options):
        models.Model.__init__(self, **options)
        self.inputs = inputs
        self.net = torch.nn.Sequential(
            torch.nn.Linear(inputs, 16), torch.nn.ELU(), torch.nn.Linear(16, outputs)
        )

    def joined(self, inputs):
        parts = [inputs["observations"], inputs.get("taken_actions")]
        return torch.cat([p for p in parts if p is not None], dim=1)[:, : self.inputs]


class Fixed(models.DeterministicMixin, Net):
    def __init__(self, inputs, outputs, **options):
        Net.__init__(self, inputs, outputs, **options)
        models.DeterministicMixin.__init__(self)

    def compute(self, inputs, role):
        return self.net(self.joined(inputs)), {}


class Gaussian(models.GaussianMixin, Net):
    def __init__(self, inputs, outputs, **options):
        Net.__init__(self, inputs, outputs, **options)
        models.GaussianMixin.__init__(self)
        self.spread = torch.nn.Parameter(torch.zeros(outputs))

    def compute(self, inputs, role):
        return self.net(self.joined(inputs)), {"log_std": self.spread}


def pendulum(envs):
    return wrappers.wrap_env(
        gym.make_vec("Pendulum-v1", envs, vectorization_mode="sync"), verbose=False
    )


def trained(agent, env, timesteps):
    trainer = trainers.SequentialTrainer(
        env=env,
        agents=agent,
        cfg={"timesteps": timesteps, "headless": True, "disable_progressbar": True},
    )
    trainer.train()


def weights(kinds):
    return [p.detach().clone() for kind in kinds.values() for p in kind.parameters()]


def quiet(directory):
    return {"directory": str(directory), "write_interval": 0, "checkpoint_interval": 0}


def spaces_of(env):
    return {
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "device": "cpu",
    }


def ddpg_over(memory, env, directory, learning_starts):
    """An agent that learns from a memory, and its networks by name."""
    shape = spaces_of(env)
    kinds = {name: Fixed(3, 1, **shape) for name in ("policy", "target_policy")}
    kinds |= {name: Fixed(4, 1, **shape) for name in ("critic", "target_critic")}
    agent = ddpg.DDPG(
        models=kinds,
        memory=memory,
        **shape,
        cfg={"batch_size": 16, "learning_starts": learning_starts, "experiment": quiet(directory)},
    )
    return agent, kinds


@pytest.mark.parametrize("replacement", [False, True])
def test_ddpg_trains_with_it_unchanged(tmp_path, replacement):
    torch.manual_seed(0)
    env = pendulum(3)
    memory = ours.RandomMemory(
        memory_size=100, num_envs=3, device="cpu", replacement=replacement, path=tmp_path / "ring"
    )
    agent, kinds = ddpg_over(memory, env, tmp_path, 20)
    before = weights(kinds)
    trained(agent, env, 150)
    assert memory.filled
    assert memory.memory_index == 50
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(kinds), strict=True))
    memory.home.close()
    # A run that goes on finds its samples.
    again = ours.RandomMemory(
        memory_size=100, num_envs=3, device="cpu", path=tmp_path / "ring", resume=True
    )
    agent, _ = ddpg_over(again, env, tmp_path, 0)
    trained(agent, env, 10)
    assert (len(again), again.memory_index) == (300, 60)
    again.home.close()


def run_ppo(memory, directory):
    """Train over a memory by seeds alone; weights afterwards."""
    torch.manual_seed(3)
    env = pendulum(2)
    env._env.reset(seed=3)  # the generators of all resets
    shape = spaces_of(env)
    kinds = {"policy": Gaussian(3, 1, **shape), "value": Fixed(3, 1, **shape)}
    agent = ppo.PPO(
        models=kinds,
        memory=memory,
        **shape,
        cfg={
            "rollouts": 16,
            "mini_batches": 2,
            "learning_epochs": 2,
            "experiment": quiet(directory),
        },
    )
    before = weights(kinds)
    trained(agent, env, 64)
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(kinds), strict=True))
    return weights(kinds)


def run_ddpg(memory, directory):
    """Train over a memory by seeds alone; weights afterwards."""
    torch.manual_seed(3)
    env = pendulum(3)
    env._env.reset(seed=3)
    agent, kinds = ddpg_over(memory, env, directory, 9)
    trained(agent, env, 60)
    return weights(kinds)


class SameDraws(ours.RandomMemory):
    """Ours, with the draws of skrl's under the same seed."""

    def sample(self, names, *, batch_size, mini_batches=1):
        indexes = torch.randperm(len(self))[:batch_size]
        return self.sample_by_index(names, indexes, mini_batches)


def test_devices_are_those_that_skrl_would_take():
    parse = skrl_config.torch.parse_device
    cpu = torch.device("cpu")
    asked = [None, "cpu", cpu, "cuda:0", "cuda:99", torch.device("cuda:99"), "x", 0, ""]
    for device in asked:
        assert ours.RandomMemory(4, device=device).device == parse(device), device
        original = theirs.RandomMemory(memory_size=4, device=device)
        assert ours.Memory(4, device=device).device == original.device


def test_ddpg_learns_bit_for_bit_what_it_learns_from_ram(tmp_path):
    size = {"memory_size": 40, "num_envs": 3, "device": "cpu"}
    memory = SameDraws(**size, path=tmp_path / "r")
    ran = [run_ddpg(m, tmp_path) for m in (theirs.RandomMemory(**size), memory)]
    assert memory.filled
    assert all(map(torch.equal, *ran))
    memory.home.close()


def test_ppo_learns_bit_for_bit_what_it_learns_from_ram(tmp_path):
    size = {"memory_size": 16, "num_envs": 2, "device": "cpu"}
    original = theirs.RandomMemory(**size)
    memory = SameDraws(**size, path=tmp_path / "r")
    ran = [run_ppo(each, tmp_path) for each in (original, memory)]
    assert all(map(torch.equal, *ran))
    for name in original.get_tensor_names():
        found, expected = (m.get_tensor_by_name(name) for m in (memory, original))
        assert same(found, expected)
    assert memory.filled
    for name in ("returns", "advantages", "values", "log_prob"):
        assert memory.get_tensor_by_name(name).isfinite().all()
    advantages = memory.get_tensor_by_name("advantages")
    # skrl normalizes them.
    assert abs(advantages.mean()) < 1e-5
    memory.home.close()
