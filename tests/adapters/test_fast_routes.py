"""Steps that adapters hand on as they are leave what the longer way leaves."""

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmreplay.adapters import alf, pytorchrl, skrl, velora
from mmreplay.adapters.alf.errors import RefusedError, UnfitError
from mmreplay.buffer import append
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import SchemaError
from mmreplay.kernels import rows as twin
from mmreplay.storage import commit_state, layout
from tests.adapters.routes import each_route

Row = namedtuple("Row", ["step_type", "discount", "reward", "parts"])
STEPS = 260


class Skrl:
    ERRORS = SchemaError

    def __init__(self, path, envs):
        self.memory = skrl.RandomMemory(40, envs, "cpu", path=path, seed=0)
        self.envs = envs
        for name, size, dtype in (
            ("observations", 5, torch.float32),
            ("rewards", 1, torch.float32),
            ("next_observations", 5, torch.float32),
            ("terminated", 1, torch.bool),
            ("half", 3, torch.bfloat16 if envs == 2 else torch.float16),
        ):
            self.memory.create_tensor(name, size, dtype)

    def step(self, rng):
        found = {
            "observations": torch.from_numpy(rng.random((self.envs, 5), np.float32)),
            "next_observations": torch.from_numpy(rng.random((self.envs, 5), "f4")),
            "terminated": torch.from_numpy(rng.random((self.envs, 1)) < 0.1),
        }
        kind = self.memory._declared["half"].dtype
        found["half"] = found["observations"][:, ::2].to(kind)
        return found | {"rewards": found["observations"][:, :1]}

    def add(self, step):
        self.memory.add_samples(**step)

    def bad(self, step):
        yield step | {"observations": torch.zeros(self.envs, 4)}
        yield step | {"terminated": torch.zeros(self.envs + 1, 1, dtype=torch.bool)}
        yield step | {"rewards": torch.zeros(self.envs + 2)}

    def close(self):
        self.memory.home.close()


class Alf:
    ERRORS = (UnfitError, RefusedError)

    def __init__(self, path, envs):
        self.envs = envs
        spec = Row(
            torch.zeros((), dtype=torch.int32),
            torch.zeros(()),
            torch.zeros(()),
            {"a": torch.zeros(3), "b": (torch.zeros(2, dtype=torch.uint8),)},
        )
        self.buffer = alf.ReplayBuffer(spec, envs, 40, path=path)

    def step(self, rng):
        kind = np.ones(self.envs, np.int32)
        if rng.random() < 0.3:
            kind = rng.integers(0, 3, self.envs).astype(np.int32)
        told = torch.from_numpy(rng.random((self.envs, 3), np.float32))
        discount = torch.from_numpy((rng.random(self.envs) < 0.8).astype("f4"))
        small = torch.from_numpy(rng.integers(0, 9, (self.envs, 2)).astype("u1"))
        return Row(torch.from_numpy(kind), discount, told[:, 0], {"a": told, "b": (small,)})

    def add(self, step):
        assert self.buffer.add_batch(step)

    def bad(self, step):
        yield step._replace(reward=torch.zeros(self.envs + 1))
        yield step._replace(parts={"a": step.parts["a"]})
        yield step._replace(parts=step.parts | {"a": torch.zeros(self.envs, 4)})
        yield step._replace(parts=step.parts | {"b": (torch.full((self.envs, 2), 0.5),)})

    def close(self):
        self.buffer.close()


class Pytorchrl:
    ERRORS = SchemaError

    def __init__(self, path, envs):
        self.envs = envs
        actor, algorithm = (SimpleNamespace(is_recurrent=False), SimpleNamespace(gamma=0.9))
        make = pytorchrl.NStepReplayBuffer.create_factory(40, 2, path=path)
        self.storage = make("cpu", actor, algorithm, None)

    def step(self, rng):
        def some(*shape):
            return torch.from_numpy(rng.random((self.envs, *shape), np.float32))

        hidden = torch.zeros(self.envs, 4)
        return {
            "Observation": some(5),
            "RecurrentHiddenStates": hidden,
            "Done": some(1),
            "Action": some(2),
            "Reward": some(1),
            "NextObservation": some(5),
            "NextRecurrentHiddenStates": hidden,
            "NextDone": (some(1) < 0.1).float(),
        }

    def add(self, step):
        self.storage.insert_transition(step)

    def bad(self, step):
        yield step | {"Observation": torch.zeros(self.envs, 4)}
        yield step | {"Reward": torch.zeros(self.envs + 1, 1)}
        yield {key: step[key] for key in step if key != "Action"}

    def close(self):
        self.storage.close()


class Velora:
    ERRORS = SchemaError

    def __init__(self, path, envs):
        self.buffer = velora.ReplayBuffer(40, 5, 2, 3, path=path)
        self.lead = (1,) * (envs - 1)  # with an axis of the environment and without

    def step(self, rng):
        def some(*shape):
            return torch.from_numpy(rng.random((*self.lead, *shape), np.float32))

        told = float(rng.random()), bool(rng.random() < 0.1)
        return [some(5), some(2), told[0], some(5), told[1], some(3)]

    def add(self, step):
        self.buffer.add(*step)

    def bad(self, step):
        yield [torch.zeros(4), *step[1:]]
        yield [*step[:2], "1", *step[3:]]
        yield [*step[:5], torch.zeros(2, 3)]

    def close(self):
        self.buffer.home.close()


FACES = [Skrl, Alf, Pytorchrl, Velora]


class Pixels(Skrl):
    """Frames are stored in a file of their own, where a ring wants arrays."""

    SIZE = (3, 40, 40)

    def __init__(self, path, envs):
        super().__init__(path, envs)
        self.memory.create_tensor("frames", self.SIZE, torch.uint8, keep_dimensions=True)

    def step(self, rng):
        frames = rng.integers(0, 255, (self.envs, *self.SIZE)).astype(np.uint8)
        return super().step(rng) | {"frames": torch.from_numpy(frames)}


def files_of(folder):
    files = [f for f in sorted(folder.rglob("*")) if f.suffix == ".bin"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.parametrize("envs", [1, 2, 3])
@pytest.mark.parametrize("face", FACES)
def test_the_routes_leave_the_same_files_and_words(tmp_path, monkeypatch, face, envs):
    left, taken = [], {}
    for way in each_route(monkeypatch, taken):
        rng, told = np.random.default_rng(5), []
        memory = face(tmp_path / way, envs)
        for number in range(STEPS):
            step = memory.step(rng)
            memory.add(step)
            if number % 20 == 0:
                for bad in memory.bad(step):
                    with pytest.raises(face.ERRORS) as raised:
                        memory.add(bad)
                    told.append((type(raised.value), str(raised.value)))
        memory.close()
        left.append((files_of(tmp_path / way), told))
    assert len(left[0][0]) >= 3
    assert left[0] == left[1]
    # An only environment of alf's, bfloat16, and tensors of velora's with two axes too
    # many always go the longer way.
    some = {Alf: envs != 1, Skrl: envs != 2, Velora: envs != 3}.get(face, True)
    assert taken == {"short": taken["short"], "long": 0}
    assert (taken["short"] > STEPS // 2) == some


@pytest.mark.parametrize("face", FACES)
def test_tensors_go_in_as_capsules(tmp_path, monkeypatch, face):
    """Most steps do: those that end somewhere go in as arrays."""
    taken, short = [], ReplayBuffer.try_add

    def try_add(self, data, published=None):
        found = short(self, data, published)
        if found is not None:
            taken.append("PyCapsule" in {type(each).__name__ for each in data.values()})
        return found

    monkeypatch.setattr(ReplayBuffer, "try_add", try_add)
    rng, envs = np.random.default_rng(3), 1 if face is Velora else 3
    memory = face(tmp_path / "ring", envs)
    for _ in range(STEPS):
        memory.add(memory.step(rng))
    memory.close()
    assert sum(taken) > STEPS // 2
    assert all(taken)


def test_a_refused_step_of_alf_leaves_nothing_that_hides_a_beginning(tmp_path):
    face = Alf(tmp_path / "alf", 2)
    told = face.step(np.random.default_rng(0))

    def add(*kinds, dtype=torch.int32):
        face.add(told._replace(step_type=torch.tensor(kinds, dtype=dtype)))

    add(0, 0)
    add(1, 1)
    with pytest.raises(RefusedError, match=r"of shape \[1\] must have a row for each of 2"):
        add(1, dtype=torch.int64)  # of the same bytes as the next one
    add(1, 0)
    batch = face.buffer._own.buffer.gather_all()
    assert batch.fields["truncated"].tolist() == [False] * 4 + [True, False]
    face.close()


def test_a_sample_with_and_without_its_axis_goes_in_by_either_route(tmp_path):
    memory = skrl.Memory(5, 1, "cpu", path=tmp_path / "ring")
    for name, size in (("observations", 3), ("rewards", 1)):
        memory.create_tensor(name, size)
    for number in range(3):
        told = torch.full((1, 3), float(number))
        memory.add_samples(observations=told, rewards=told[0, :1])
    rewards = memory.get_tensor_by_name("rewards").flatten().tolist()
    assert rewards[:3] == [0, 1, 2]
    memory.home.close()


def odd_tensors():
    """Tensors whose values are not what lies at their address, or which have none."""
    values = torch.arange(6.0).reshape(2, 3) + 1
    negated = torch._neg_view(values)
    assert negated.is_neg()
    yield negated, -values
    yield torch.complex(values, values).conj().imag, -values
    yield torch.nn.Parameter(values), values
    yield values.clone().requires_grad_(), values
    yield values.T.contiguous().T, values
    yield torch._efficientzerotensor((2, 3)), 0 * values
    yield values.expand(1, 2, 3)[0], values
    yield values[:1].expand(2, 3), values[[0, 0]]
    yield values.double(), values
    yield values.flip(0), values[[1, 0]]


@pytest.mark.parametrize("kernel", ["c", "numpy"])
def test_tensors_are_stored_by_value(tmp_path, monkeypatch, kernel):
    if kernel == "numpy":
        monkeypatch.setattr(layout, "rows", twin)
        monkeypatch.setattr(commit_state, "rows", twin)
        monkeypatch.setattr(append, "rows", twin)
    memory = skrl.Memory(8, 2, "cpu", path=tmp_path / "ring")
    memory.create_tensor("observations", 3)
    for _ in range(20):  # until the ring has come round
        memory.add_samples(observations=torch.zeros(2, 3))
    for given, expected in odd_tensors():
        row = memory.memory_index
        memory.add_samples(observations=given)
        found = memory.get_tensor_by_name("observations", keepdim=True)[row]
        assert torch.equal(found, expected)
    memory.home.close()


@pytest.mark.parametrize("envs", [1, 3])
def test_frames_go_the_short_way_as_arrays(tmp_path, monkeypatch, envs):
    left, taken = [], {}
    for way in each_route(monkeypatch, taken):
        rng = np.random.default_rng(7)
        memory = Pixels(tmp_path / way, envs)
        for _ in range(90):
            memory.add(memory.step(rng))
        memory.close()
        left.append(files_of(tmp_path / way))
    assert left[0] == left[1]
    assert taken == {"short": taken["short"], "long": 0}
    assert taken["short"] > 60


@pytest.mark.parametrize("envs", [1, 2])
def test_ends_without_axes_take_no_axis(tmp_path, envs):
    memory = skrl.Memory(8, envs, "cpu", path=tmp_path / "ring")
    memory.create_tensor("observations", 3)
    memory.create_tensor("terminated", [], torch.bool, keep_dimensions=True)
    now, none = torch.zeros(envs, 3), torch.zeros(envs, dtype=torch.bool)
    for _ in range(20):
        memory.add_samples(observations=now, terminated=none)
        with pytest.raises(SchemaError, match=r"be \[n, \], or one sample without n, got shape"):
            memory.add_samples(observations=now, terminated=none[:, None])
    memory.home.close()
