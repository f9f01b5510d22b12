"""Text and values of several lengths: no original takes them, and each adapter says so.

Stable-Baselines3's spaces are in test_sb3_arguments.py.
"""

import re

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.adapters import alf, rofunc, skrl, tmrl, velora
from mmreplay.errors import SchemaError
from tests.adapters.alf.support import Spec
from tests.adapters.pytorchrl_steps import storages, transition
from tests.adapters.test_tmrl import Buffer

WAY_OUT = (
    "Pad it to one shape, or store it in an mmreplay.ReplayBuffer, which has fields that vary."
)
VALUES = {
    "text": ("abc", "str"),
    "bytes": (b"abc", "bytes"),
    "texts": (np.array(["abc"]), "<U3"),
    "ragged": (mr.Ragged(np.zeros(3, np.float32), np.array([0, 1, 3])), "Ragged"),
    "jagged": (None, "nested tensor"),
    "lists": ([[1.0], [1.0, 2.0]], "list of several"),
}


def value_of(kind):
    """A value, and what messages call it."""
    value, got = VALUES[kind]
    if kind == "jagged":
        # The first one imports much: 1 s, which only the process that runs this needs.
        rows = [torch.zeros(3), torch.zeros(2)]
        value = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return value, got


@pytest.fixture(params=VALUES)
def varying(request):
    return value_of(request.param)


def refused(name, got):
    message = f"{name} must be numbers of one shape, got {got}. {WAY_OUT}"
    return pytest.raises(SchemaError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize("library", [skrl, rofunc])
@pytest.mark.parametrize("keep", [False, True])
def test_memories_refuse_sizes_that_vary(library, keep, tmp_path):
    spaces = pytest.importorskip("gymnasium").spaces
    box = spaces.Box(-1, 1, (2,))
    memory = library.RandomMemory(5, device="cpu", path=tmp_path / "ring")
    for size in ((None,), [None, 3], spaces.Text(5), spaces.Sequence(box), spaces.Graph(box, box)):
        message = rf"size must be of one shape, got .*\. {re.escape(WAY_OUT)}"
        with pytest.raises(SchemaError, match=message):
            memory.create_tensor("states", size, torch.float32, keep)
    assert not memory.get_tensor_names()


@pytest.mark.parametrize("library", [skrl, rofunc])
@pytest.mark.parametrize("kind", ["ragged", "jagged", "text"])
def test_memories_refuse_values_that_vary(library, kind, tmp_path):
    memory = library.RandomMemory(5, device="cpu", path=tmp_path / "ring")
    memory.create_tensor("states", 3, torch.float32)
    value, got = value_of(kind)
    with refused("tensor 'states'", got):
        memory.add_samples(states=value)
    assert len(memory) == 0


@pytest.mark.parametrize(
    "leaf",
    [
        Spec((None,)),
        Spec((None, 3)),
        Spec((), np.dtype("U5")),
        Spec((), "object"),
        mr.Field((None,), "int32", max_length=5),
        mr.Field.text(max_bytes=5),
    ],
)
def test_specs_that_vary_are_refused(leaf):
    message = rf"data_spec: 'step/o' must be numbers of one shape, .*{WAY_OUT}"
    with pytest.raises(RuntimeError, match=message):
        alf.ReplayBuffer({"o": leaf}, 1, 5)


def test_alf_refuses_values_that_vary(varying):
    value, got = varying
    buffer = alf.ReplayBuffer({"o": Spec((3,))}, 1, 5)
    with refused("step/o", got) as caught:
        buffer.add_batch({"o": value}, torch.tensor([0]))
    assert isinstance(caught.value, RuntimeError)
    assert buffer.total_size == 0


def test_tmrl_refuses_values_that_vary(varying, tmp_path):
    value, got = varying
    if isinstance(value, list):
        # A list is a part of a nest there.
        value, got = np.array(b"abc"), "|S3"
    memory = tmrl.GenericTorchMemory(9, 1, path=tmp_path / "ring")
    act = np.float32([1])
    with refused("observation/obs/0", got):
        memory.append(Buffer([(act, (value,), 1.0, False, False, {})] * 4))
    assert len(memory) == 0
    memory.close()


def test_tmrl_refuses_arrays_of_several_lengths(tmp_path):
    memory = tmrl.GenericTorchMemory(9, 1, path=tmp_path / "ring")
    act = np.float32([1])
    samples = [(act, (np.zeros(n),), 1.0, False, False, {}) for n in (2, 3)]
    with pytest.raises(SchemaError, match=rf"one shape .*\[\[2\], \[3\]\]\. {WAY_OUT}"):
        memory.append(Buffer(samples))
    memory.close()


def test_velora_refuses_values_that_vary(varying, tmp_path):
    value, got = varying
    buffer = velora.ReplayBuffer(5, 2, 1, 3, path=tmp_path / "ring")
    rest = torch.zeros(1), 0.0, torch.zeros(2), False, torch.zeros(3)
    with refused("states", got):
        buffer.add(value, *rest)
    assert len(buffer) == 0
    buffer.close()


def test_pytorchrl_refuses_values_that_vary(varying, tmp_path):
    value, got = varying
    with storages(tmp_path) as make:
        storage = make()
        with refused("Observation", got):
            storage.insert_transition(transition(0) | {"Observation": value})
        assert storage.size == 0
