"""skrl's and rofunc's memories on disk, beside a list of dicts."""

import pickle
import re
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.adapters import rofunc, skrl
from mmreplay.errors import EmptyError, FormatError, SchemaError
from tests.adapters.memory_oracle import NAMES, Oracle, assert_same, declared, samples


@pytest.mark.parametrize("envs", [1, 3])
def test_samples_lie_in_the_cells_that_they_should(tmp_path, rng, envs):
    memory = declared(skrl.Memory(7, envs, device="cpu", path=tmp_path / "ring"))
    oracle, number = Oracle(7, envs), 0
    for _ in range(60):
        count = int(rng.integers(1, 12 if envs == 1 else envs + 1))
        if count == envs and memory.env_index:
            count = 1
        given = samples(number, count)
        if count == 1 and rng.random() < 0.5:
            given = {name: value[0] for name, value in given.items()}
        memory.add_samples(**given, unknown=torch.zeros(9), states=None)
        oracle.add(number, count)
        number += count
        assert_same(memory, oracle)
    memory.home.close()


def test_what_was_added_is_there_again(tmp_path):
    memory = declared(skrl.Memory(5, 2, device="cpu", path=tmp_path / "ring"))
    oracle = Oracle(5, 2)
    for first in range(0, 14, 2):
        memory.add_samples(**samples(first, 2))
        oracle.add(first, 2)
    memory.add_samples(**samples(14, 1))
    oracle.add(14, 1)
    memory.home.close()
    with pytest.raises(FormatError, match="resume=True"):
        skrl.Memory(5, 2, path=tmp_path / "ring")
    with pytest.raises(SchemaError, match=r"\(memory_size, num_envs\) \(6, 2\), got \(5, 2\)"):
        skrl.Memory(6, 2, path=tmp_path / "ring", resume=True)
    again = skrl.Memory(5, 2, device="cpu", path=tmp_path / "ring", resume=True)
    assert_same(declared(again), oracle)
    again.add_samples(**samples(15, 1))
    oracle.add(15, 1)
    assert_same(again, oracle)
    again.home.close()


KILLED = """
import os, sys
from mmreplay.adapters import skrl
from tests.adapters.memory_oracle import declared, samples

memory = declared(skrl.Memory(5, 3, device="cpu", path=sys.argv[1]))
for first in range(0, 24, 3):
    memory.add_samples(**samples(first, 3))
memory.add_samples(**samples(24, 2))  # and two of a row
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_loses_no_sample(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "ring")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    oracle = Oracle(5, 3)
    oracle.add(0, 26)
    memory = skrl.Memory(5, 3, device="cpu", path=tmp_path / "ring", resume=True)
    assert_same(declared(memory), oracle)
    memory.home.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_whole_tensors_are_views_where_their_rows_lie_in_order(tmp_path, dtype):
    memory = skrl.RandomMemory(16, 2, "cpu", path=tmp_path / "ring")
    memory.create_tensor("a", 3, dtype)
    memory.create_tensor("values", 1)
    written, views = torch.zeros(16, 2, 3, dtype=dtype), 0
    for number in range(16 * 19):
        row = torch.full((2, 3), number % 200).to(dtype)
        memory.add_samples(a=row, values=torch.ones(2, 1))
        written[number % 16] = row
        if number % 16 != 15:
            continue
        whole = memory.get_tensor_by_name("a")
        assert torch.equal(whole, written)
        assert torch.equal(memory.tensors_view["a"], written.flatten(0, 1))
        # A copy has room for its own numbers; a view shows a file.
        views += whole.untyped_storage().nbytes() > whole.nbytes
        whole.fill_(7)
        assert torch.equal(memory.get_tensor_by_name("a"), written)
        kept = memory.get_tensor_by_name("values")
        memory.set_tensor_by_name("values", kept + 1)
        assert (kept == 1).all()
    # Of 19 rounds, 16 rows of 19 lie in one stretch in four.
    assert views == 4
    memory.home.close()


def test_a_tensor_that_comes_late_leaves_the_others_as_they_are(tmp_path):
    memory = declared(skrl.Memory(5, 2, device="cpu", path=tmp_path / "ring"))
    memory.add_samples(**samples(0, 2))
    assert memory.create_tensor("log_prob", 1)
    assert memory.get_tensor_by_name("log_prob").isnan().all()
    assert memory.get_tensor_by_name("observations")[0, 1, 0] == 1
    memory.add_samples(**samples(2, 2), log_prob=torch.ones(2, 1))
    assert memory.get_tensor_by_name("log_prob")[1].eq(1).all()
    memory.home.close()


def test_a_tensor_is_declared_once(tmp_path):
    memory = skrl.Memory(5, path=tmp_path / "ring")
    assert memory.create_tensor("a", 3, torch.float32)
    assert not memory.create_tensor("a", 3)
    assert not memory.create_tensor("b", None)
    assert memory.create_tensor("k", [2, 2], keep_dimensions=True)
    assert not memory.create_tensor("k", (2, 2), keep_dimensions=True)
    with pytest.raises(SchemaError, match=r"as \[3\] torch\.float32 already, got \[4\] None\."):
        memory.create_tensor("a", 4)
    with pytest.raises(ValueError, match=r"is declared as .* already"):
        memory.create_tensor("a", 3, torch.int8)
    with pytest.raises(SchemaError, match="must be a list or tuple of axes"):
        memory.create_tensor("c", 4, keep_dimensions=True)
    assert memory.get_tensor_names() == ["a", "k"]


def test_every_space_has_its_size(tmp_path):
    spaces = pytest.importorskip("gymnasium").spaces
    box = spaces.Box(-1, 1, (2, 3))
    cases = [
        (7, 7),
        (2.0, 2),
        ((2, 3), 6),
        ([4], 4),
        (box, 6),
        (spaces.Discrete(5), 1),
        (spaces.MultiDiscrete([3, 4]), 2),
        (spaces.MultiBinary([2, 2]), 4),
        (spaces.Tuple((box, spaces.Discrete(2))), 7),
        (spaces.Dict({"a": box, "b": spaces.Dict({"c": spaces.MultiBinary(4)})}), 10),
        (type("Box", (), {"shape": (5,)})(), 5),  # gym's, told by its name
    ]
    for number, (space, size) in enumerate(cases):
        memory = rofunc.Memory(2, device="cpu")
        memory.create_tensor(f"t{number}", space)
        assert memory.get_tensor_by_name(f"t{number}").shape == (2, 1, size)
    with pytest.raises(SchemaError, match="size must be a number, a sequence of axes, or"):
        rofunc.Memory(2).create_tensor("t", "box")
    shapes = [
        (4, (4,)),
        (2.0, (2,)),
        ([2, 3], (2, 3)),
        (box, (2, 3)),
        (spaces.Discrete(5), (1,)),
        (spaces.MultiBinary([2, 2]), (2, 2)),
    ]
    for space, shape in shapes:
        memory = rofunc.Memory(2, device="cpu")
        memory.create_tensor("t", space, keep_dimensions=True)
        assert memory.get_tensor_by_name("t").shape == (2, 1, *shape)
    for space in (spaces.Dict({"a": box}), spaces.Tuple((box,))):
        with pytest.raises(SchemaError, match="must be a space of one shape"):
            rofunc.Memory(2).create_tensor("t", space, keep_dimensions=True)


@pytest.mark.parametrize("kind", [skrl.RandomMemory, rofunc.RandomMemory])
@pytest.mark.parametrize(("name", "value"), [("memory_size", 8), ("num_envs", 3)])
def test_the_size_of_a_memory_does_not_change(kind, name, value):
    memory = declared(kind(4, 2, device="cpu"))
    known = getattr(memory, name)
    setattr(memory, name, known)
    for count in range(2):
        with pytest.raises(
            SchemaError, match=rf"^{name} cannot .* made with {known}, got {value}\..*another"
        ):
            setattr(memory, name, value)
        memory.add_samples(**samples(2 * count, 2))
        assert (memory.memory_size, memory.num_envs, len(memory)) == (4, 2, 2 + 2 * count)
    assert memory.get_tensor_by_name("rewards").shape == (4, 2, 1)


def test_a_pickled_memory_refuses_a_folder_that_was_resized(tmp_path):
    memory = declared(skrl.RandomMemory(4, device="cpu", path=tmp_path / "ring"))
    memory.add_samples(**samples(0, 3))
    kept = pickle.dumps(memory)
    memory.home.close()
    with mr.ReplayBuffer.open(tmp_path / "ring", mode="r+") as ring:
        ring.resize(8)
    with pytest.raises(SchemaError, match=r"\(memory_size, num_envs\) \(4, 1\), got \(8, 1\)"):
        pickle.loads(kept)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"replacement": "no"}, "replacement must be True or False, got 'no'"),
        ({"replacement": None}, "replacement must be True or False, got None"),
        ({"export": "no"}, "export must be True or False, got 'no'"),
        ({"export_directory": 3}, "export_directory must be a path, got 3"),
        ({"export_directory": None}, "export_directory must be a path, got None"),
        ({"export_format": ["pt"]}, "Unsupported export format"),
        ({"mutable": "values"}, "mutable must be a sequence of names.* Pass"),
        ({"seed": "x"}, "seed must be an integer of at least 0, got 'x'"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
    ],
)
@pytest.mark.parametrize("kind", [skrl.RandomMemory, rofunc.RandomMemory])
def test_arguments_that_make_no_sense_are_refused_by_name(tmp_path, kind, options, match):
    with pytest.raises(SchemaError, match=f"^{match}"):
        kind(4, 2, "cpu", path=tmp_path / "ring", **options)
    assert not (tmp_path / "ring").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mini_batches": 0}, r"mini_batches must be .* at least 1, got 0"),
        ({"mini_batches": -2}, r"mini_batches must be .* at least 1, got -2"),
        ({"sequence_length": 0}, "sequence_length must be an integer of.*got 0"),
        ({"sequence_length": 1.5}, "sequence_length must be an integer.*got 1.5"),
        ({"sequence_length": "2"}, "sequence_length must be an integer.*got '2'"),
    ],
)
def test_draws_that_make_no_sense_are_refused_by_name(options, match):
    memory = declared(skrl.RandomMemory(4, 2, device="cpu"))
    memory.add_samples(**samples(0, 2))
    with pytest.raises(SchemaError, match=f"^{match}"):
        memory.sample(["rewards"], 2, **options)


def test_a_dtype_that_is_not_of_torch_is_refused_by_name():
    with pytest.raises(SchemaError, match=r"dtype must be a torch\.dtype, got 'float32'"):
        skrl.Memory(4).create_tensor("a", 1, "float32")


DEVICES = ["cuda:99", "no such device", "mps:77", torch.device("cuda:99")]
"""What no machine has."""


@pytest.mark.parametrize("kind", [skrl.Memory, skrl.RandomMemory])
def test_a_device_that_is_not_there_falls_back_with_a_warning(kind):
    default = kind(4).device
    absent = DEVICES if torch.cuda.is_available() else [*DEVICES, "cuda:0"]
    for device in absent:
        told = re.escape(f"device: cannot use {str(device)!r} (")
        with pytest.warns(RuntimeWarning, match=told + rf".*go to '{default}'; pass"):
            memory = kind(4, device=device)
        assert memory.device == default
        memory = declared(memory)
        memory.add_samples(**samples(0, 1))
        found = memory.sample_by_index(["rewards"], [0])[0][0]
        assert found.device.type == default.type
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in (None, "cpu", torch.device("cpu")):
            kind(4, device=device)


def without_parse_device(monkeypatch, kind):
    """The names of kind's original, as it was before 1.4."""
    if kind.system == "skrl":
        monkeypatch.setitem(sys.modules, "skrl", SimpleNamespace())
    return kind


@pytest.mark.parametrize(
    "kind", [rofunc.Memory, rofunc.RandomMemory, skrl.Memory, skrl.RandomMemory]
)
def test_a_device_stays_where_the_original_parses_none(monkeypatch, tmp_path, kind):
    kind = without_parse_device(monkeypatch, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in ("cuda:99", torch.device("cuda:99"), "cpu"):
            memory = kind(4, device=device, path=tmp_path / "ring")
            assert memory.device == torch.device(device)
        assert kind(4).device == (torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
        memory = kind(4, device="cuda:99", path=tmp_path / "ring")
    with pytest.raises(SchemaError, match=r"^device: cannot use 'cuda:99' \(.*\)\. Ma"):
        memory.create_tensor("a", 2)
    assert memory.get_tensor_names() == []
    assert not (tmp_path / "ring").exists()
    with pytest.raises(RuntimeError, match="no such device"):
        kind(4, device="no such device")


def test_a_loaded_skrl_that_parses_devices_falls_back(monkeypatch):
    torch_config = SimpleNamespace(parse_device=torch.device)
    loaded = SimpleNamespace(config=SimpleNamespace(torch=torch_config))
    monkeypatch.setitem(sys.modules, "skrl", loaded)
    with pytest.warns(RuntimeWarning, match="device: cannot use 'cuda:99'"):
        assert skrl.Memory(4, device="cuda:99").device == skrl.Memory(4).device


def test_a_memory_pickled_on_a_machine_with_another_device_is_read_on_this(tmp_path):
    memory = declared(skrl.RandomMemory(4, device="cpu", path=tmp_path / "ring"))
    memory.add_samples(**samples(0, 1))
    memory.device, memory._on_cpu = torch.device("cuda:99"), False
    with pytest.warns(RuntimeWarning, match="device: cannot use 'cuda:99'"):
        again = pickle.loads(pickle.dumps(memory))
    found = again.sample_by_index(["rewards"], [0])[0][0]
    assert found.device.type == again.device.type == skrl.Memory(4).device.type
    memory.home.close()


def test_replacement_is_the_seventh_argument():
    given = (5, 2, "cpu", False, "pt", "")
    for kind, usual in ((rofunc.RandomMemory, True), (skrl.RandomMemory, False)):
        assert kind(*given)._replacement is usual
        assert kind(*given, not usual)._replacement is not usual


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float64]
)
def test_dtypes_are_preserved(tmp_path, dtype):
    memory = skrl.Memory(4, 2, device="cpu", path=tmp_path / "ring")
    memory.create_tensor("a", 3, dtype)
    values = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    memory.add_samples(a=values)
    (found,) = memory.sample_all(["a"])[0]
    assert found.dtype == dtype
    assert torch.equal(found, values)
    whole = memory.get_tensor_by_name("a", keepdim=False)
    assert (whole.shape, whole.dtype) == ((8, 3), dtype)
    memory.home.close()


def test_names_of_roles_are_free(tmp_path):
    memory = skrl.Memory(4, device="cpu", path=tmp_path / "ring")
    for name in ("observation", "terminated", "truncated", "next_observation"):
        memory.create_tensor(name, 2)
    value = torch.arange(2.0)[None]
    memory.add_samples(observation=value, terminated=value, truncated=value)
    found = memory.sample_all(["terminated", "observation"])[0]
    assert all(torch.equal(each, value) for each in found)
    memory.home.close()


def test_episodes_are_visible_to_every_opener_of_the_folder(tmp_path):
    memory = skrl.Memory(50, 2, device="cpu", path=tmp_path / "ring")
    for name, size, dtype in (
        ("observations", 3, None),
        ("next_observations", 3, None),
        ("rewards", 1, None),
        ("terminated", 1, torch.bool),
    ):
        memory.create_tensor(name, size, dtype)
    for number in range(20):
        given = samples(2 * number, 2)
        del given["actions"]
        given["next_observations"] = given["observations"] + 2
        memory.add_samples(**given)
    with mr.ReplayBuffer.open(tmp_path / "ring", transforms=[mr.NStep(3, gamma=0.5)]) as reader:
        batch = reader.sample(100)
        numbers = batch["observations"][:, 0].astype(int)
        ends = [next(n for n in range(i, i + 5, 2) if n % 5 == 4 or n >= i + 4) for i in numbers]
        np.testing.assert_array_equal(batch["next_observations"][:, 0] - 2, ends)
    memory.home.close()


def test_on_policy_agents_write_back(tmp_path):
    memory = declared(skrl.Memory(6, 2, device="cpu", path=tmp_path / "ring"))
    memory.create_tensor("late", 2)
    with pytest.raises(EmptyError, match="tensor 'values': the memory has no samples to"):
        memory.set_tensor_by_name("values", torch.zeros(6, 2, 1))
    for first in range(0, 8, 2):
        memory.add_samples(**samples(first, 2), values=torch.ones(2, 1))
    memory.set_tensor_by_name("values", torch.arange(12.0).reshape(6, 2, 1))
    memory.set_tensor_by_name("late", 7.0)  # broadcast, as copy_ does
    assert memory.get_tensor_by_name("values")[:4].flatten().tolist() == list(range(8))
    assert memory.get_tensor_by_name("values")[4:].isnan().all()
    assert memory.get_tensor_by_name("late")[:4].eq(7).all()
    assert (memory.memory_index, len(memory)) == (4, 8)
    with pytest.raises(SchemaError, match=r"'rewards' is not .*mutable=\['rewards'"):
        memory.set_tensor_by_name("rewards", torch.zeros(6, 2, 1))
    for call in (memory.get_tensor_by_name, lambda n: memory.set_tensor_by_name(n, 0)):
        with pytest.raises(KeyError, match="nothing"):
            call("nothing")
    memory.home.close()


def test_attributes_are_the_tensors(tmp_path):
    memory = declared(rofunc.Memory(3, 2, device="cpu", path=tmp_path / "ring"))
    memory.add_samples(**samples(0, 2))
    assert memory._tensor_actions.shape == (3, 2, 2, 2)
    assert memory.tensors_view["actions"].shape == (6, 2, 2)
    assert list(memory.tensors) == sorted([*NAMES, "values"])
    assert memory.tensors_keep_dimensions["actions"] is True
    assert memory.all_sequence_indexes.tolist() == [0, 2, 4, 1, 3, 5]
    with pytest.raises(AttributeError, match="no attribute 'tensor'"):
        memory.tensor  # noqa: B018
    assert not hasattr(memory, "_tensor_nothing")
    memory.share_memory()
    assert str(tmp_path / "ring") in repr(memory)
    memory.home.close()


@pytest.mark.parametrize("counts", [(0, 1), (-3, 1), (2.5, 1), ("9", 1), (9, 0)])
def test_counts_are_looked_at_before_the_first_sample(counts):
    with pytest.raises(SchemaError, match="must be an integer of at least 1, got"):
        skrl.RandomMemory(*counts)
    assert rofunc.RandomMemory(1e3).memory_size == 1000


def test_a_reset_gives_samples_up_and_keeps_tensors(tmp_path):
    memory = declared(skrl.Memory(4, 2, device="cpu", path=tmp_path / "ring"))
    for first in range(0, 12, 2):
        memory.add_samples(**samples(first, 2))
    memory.add_samples(**samples(12, 1))
    memory.reset()
    assert (len(memory), memory.filled, memory.env_index) == (0, False, 0)
    assert memory.get_tensor_by_name("rewards").isnan().all()
    oracle = Oracle(4, 2)
    for first in range(0, 38, 2):
        memory.add_samples(**samples(first, 2))
        oracle.add(first, 2)
    assert_same(memory, oracle)
    memory.home.close()
    again = skrl.Memory(4, 2, device="cpu", path=tmp_path / "ring", resume=True)
    assert_same(declared(again), oracle)
    again.home.close()


def test_an_interrupted_reset_is_finished(tmp_path, monkeypatch):
    memory = declared(skrl.Memory(4, 2, device="cpu", path=tmp_path / "ring"))
    memory.add_samples(**samples(0, 2))
    monkeypatch.setattr(mr.ReplayBuffer, "clear", lambda self: None)
    memory.reset()
    memory.home.close()
    monkeypatch.undo()
    again = skrl.Memory(4, 2, device="cpu", path=tmp_path / "ring", resume=True)
    assert len(again) == len(again.ring) == 0
    again.home.close()


@pytest.mark.parametrize(
    ("samples", "match"),
    [
        ({}, r"add_samples must .*, got the tensors \[\]\. "),
        ({"b": torch.zeros(2, 1)}, r"add_samples must .* got the tensors \['b'\]"),
        (
            {"observations": torch.zeros(2, 4)},
            r"3\], or one sample without n, got shape \[2, 4\]\.",
        ),
        ({"observations": torch.zeros(3, 3)}, "must get 1 to 2 samples, .* got 3"),
        (
            {"observations": torch.zeros(2, 3), "rewards": torch.zeros(1, 1)},
            r"got \[\(1,\), \(2,\)\] of samples",
        ),
        ({"rewards": 1.5}, r"'rewards' must be a tensor \[n, 1\], got float\."),
    ],
)
def test_samples_that_do_not_fit_are_refused_whole(tmp_path, samples, match):
    memory = declared(skrl.Memory(4, 2, device="cpu", path=tmp_path / "ring"))
    with pytest.raises(SchemaError, match=match):
        memory.add_samples(**samples)
    assert len(memory) == 0
    memory.home.close()


def test_a_row_is_not_written_over_half_a_row(tmp_path):
    memory = declared(skrl.Memory(4, 2, device="cpu", path=tmp_path / "ring"))
    memory.add_samples(**samples(0, 1))
    with pytest.raises(SchemaError, match="environments from 1 on, because the row is"):
        memory.add_samples(**samples(1, 2))
    memory.home.close()
