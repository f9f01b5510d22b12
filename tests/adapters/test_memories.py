"""skrl's and rofunc's memories on disk, beside a list of dicts."""

import re

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.adapters import rofunc, skrl
from mmreplay.errors import EmptyError, FormatError, SchemaError, StaleError

NAMES = ["actions", "observations", "rewards", "terminated"]


def declared(memory):
    memory.create_tensor("observations", 3, torch.float32)
    memory.create_tensor("actions", (2, 2), torch.int64, keep_dimensions=True)
    memory.create_tensor("rewards", 1)
    memory.create_tensor("terminated", 1, torch.bool)
    memory.create_tensor("values", 1)
    return memory


def samples(first, count):
    """Samples that are numbered, and tell their number in every tensor."""
    numbers = torch.arange(first, first + count)
    return {
        "observations": numbers[:, None].float() + torch.arange(3) / 8,
        "actions": numbers[:, None, None] * 10 + torch.arange(4).reshape(2, 2),
        "rewards": numbers[:, None].double() / 3,  # cast, as copy_ does
        "terminated": (numbers % 5 == 4)[:, None],
    }


class Oracle:
    """What the memory's authors meant: cells one after another, round and round."""

    def __init__(self, rows, envs):
        self.rows, self.envs = rows, envs
        self.cells, self.next, self.filled = {}, 0, False

    def add(self, first, count):
        for number in range(first, first + count):
            self.cells[self.next] = number
            self.next += 1
            if self.next == self.rows * self.envs:
                self.next, self.filled = 0, True


def assert_same(memory, oracle):
    assert len(memory) == len(oracle.cells)
    assert (memory.memory_index, memory.env_index) == divmod(oracle.next, oracle.envs)
    assert memory.filled is oracle.filled
    cells = sorted(oracle.cells)
    numbers = torch.tensor([oracle.cells[cell] for cell in cells])
    expected = samples(0, int(numbers.max()) + 1)
    (found,) = memory.sample_all(NAMES)
    for name, tensor in zip(NAMES, found, strict=True):
        wanted = expected[name][numbers].to(tensor.dtype)
        assert torch.equal(tensor, wanted)
        whole = memory.get_tensor_by_name(name)
        assert whole.shape == (oracle.rows, oracle.envs, *wanted.shape[1:])
        flat = whole.reshape(-1, *wanted.shape[1:])
        assert torch.equal(flat[cells], wanted)
        if whole.is_floating_point():
            empty = sorted(set(range(len(flat))) - set(cells))
            assert flat[empty].isnan().all()
        assert torch.equal(memory.tensors[name], whole) or whole.isnan().any()


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
    with pytest.raises(SchemaError, match=r"holds a memory of .* \(5, 2\), got \(6, 2"):
        skrl.Memory(6, 2, path=tmp_path / "ring", resume=True)
    again = skrl.Memory(5, 2, device="cpu", path=tmp_path / "ring", resume=True)
    assert_same(declared(again), oracle)
    again.add_samples(**samples(15, 1))
    oracle.add(15, 1)
    assert_same(again, oracle)
    again.home.close()


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
    with pytest.raises(
        SchemaError, match=r"'a': got \[4\].*expected \[3\] torch.float"
    ):
        memory.create_tensor("a", 4)
    with pytest.raises(ValueError, match="declared already"):
        memory.create_tensor("a", 3, torch.int8)
    with pytest.raises(SchemaError, match="expected a list or tuple of axes"):
        memory.create_tensor("c", 4, keep_dimensions=True)
    assert memory.get_tensor_names() == ["a", "k"]


def test_every_space_has_its_size(tmp_path):
    spaces = pytest.importorskip("gymnasium").spaces
    box = spaces.Box(-1, 1, (2, 3))
    cases = [
        (7, 7), (2.0, 2), ((2, 3), 6), ([4], 4), (box, 6), (spaces.Discrete(5), 1),
        (spaces.MultiDiscrete([3, 4]), 2), (spaces.MultiBinary([2, 2]), 4),
        (spaces.Tuple((box, spaces.Discrete(2))), 7),
        (spaces.Dict({"a": box, "b": spaces.Dict({"c": spaces.MultiBinary(4)})}), 10),
        (type("Box", (), {"shape": (5,)})(), 5),  # gym's, told by its name
    ]  # fmt: skip
    for number, (space, size) in enumerate(cases):
        memory = rofunc.Memory(2, device="cpu")
        memory.create_tensor(f"t{number}", space)
        assert memory.get_tensor_by_name(f"t{number}").shape == (2, 1, size)
    with pytest.raises(SchemaError, match="expected a number, a sequence of axes, or"):
        rofunc.Memory(2).create_tensor("t", "box")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
    ],
)
def test_dtypes_are_kept(tmp_path, dtype):
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


def test_episodes_are_told_to_whoever_opens_the_folder(tmp_path):
    memory = skrl.Memory(50, 2, device="cpu", path=tmp_path / "ring")
    for name, size, dtype in (
        ("observations", 3, None), ("next_observations", 3, None), ("rewards", 1, None),
        ("terminated", 1, torch.bool),
    ):  # fmt: skip
        memory.create_tensor(name, size, dtype)
    for number in range(20):
        given = samples(2 * number, 2)
        del given["actions"]
        given["next_observations"] = given["observations"] + 2
        memory.add_samples(**given)
    with mr.ReplayBuffer.open(
        tmp_path / "ring", transforms=[mr.NStep(3, gamma=0.5)]
    ) as reader:
        batch = reader.sample(100)
        numbers = batch["observations"][:, 0].astype(int)
        ends = [
            next(n for n in range(i, i + 5, 2) if n % 5 == 4 or n >= i + 4)
            for i in numbers
        ]
        np.testing.assert_array_equal(batch["next_observations"][:, 0] - 2, ends)
    memory.home.close()


def test_on_policy_agents_write_back(tmp_path):
    memory = declared(skrl.Memory(6, 2, device="cpu", path=tmp_path / "ring"))
    memory.create_tensor("late", 2)
    with pytest.raises(EmptyError, match="for a memory without samples"):
        memory.set_tensor_by_name("values", torch.zeros(6, 2, 1))
    for first in range(0, 8, 2):
        memory.add_samples(**samples(first, 2), values=torch.ones(2, 1))
    memory.set_tensor_by_name("values", torch.arange(12.0).reshape(6, 2, 1))
    memory.set_tensor_by_name("late", 7.0)  # broadcast, as copy_ does
    assert memory.get_tensor_by_name("values")[:4].flatten().tolist() == list(range(8))
    assert memory.get_tensor_by_name("values")[4:].isnan().all()
    assert memory.get_tensor_by_name("late")[:4].eq(7).all()
    assert (memory.memory_index, len(memory)) == (4, 8)
    with pytest.raises(SchemaError, match="'rewards' is not mutable"):
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
    memory.share_memory()
    assert str(tmp_path / "ring") in repr(memory)
    memory.home.close()


def test_a_reset_gives_samples_up_and_keeps_tensors(tmp_path):
    memory = declared(skrl.Memory(4, 2, device="cpu", path=tmp_path / "ring"))
    for first in range(0, 12, 2):
        memory.add_samples(**samples(first, 2))
    memory.add_samples(**samples(12, 1))
    memory.reset()
    assert (len(memory), memory.filled, memory.env_index) == (0, False, 0)
    assert memory.get_tensor_by_name("rewards").isnan().all()
    oracle = Oracle(4, 2)
    memory.add_samples(**samples(0, 2))
    oracle.add(0, 2)
    assert_same(memory, oracle)
    memory.home.close()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, r"got the tensors \[\], expected samples"),
        ({"b": torch.zeros(2, 1)}, r"got the tensors \['b'\], expected samples"),
        ({"observations": torch.zeros(2, 4)}, r"got shape \[2, 4\], expected \[n, 3\]"),
        ({"observations": torch.zeros(3, 3)}, "got 3 samples, expected 1 to 2"),
        (
            {"observations": torch.zeros(2, 3), "rewards": torch.zeros(1, 1)},
            r"got \[\(1,\), \(2,\)\] of samples",
        ),
    ],
)
def test_samples_that_do_not_fit_are_refused_whole(tmp_path, given, match):
    memory = declared(skrl.Memory(4, 2, device="cpu", path=tmp_path / "ring"))
    with pytest.raises(SchemaError, match=match):
        memory.add_samples(**given)
    assert len(memory) == 0
    memory.home.close()


def test_a_row_is_not_written_over_half_a_row(tmp_path):
    memory = declared(skrl.Memory(4, 2, device="cpu", path=tmp_path / "ring"))
    memory.add_samples(**samples(0, 1))
    with pytest.raises(SchemaError, match="as the row is half written"):
        memory.add_samples(**samples(1, 2))
    memory.home.close()


@pytest.mark.parametrize("kind", [skrl.RandomMemory, rofunc.RandomMemory])
@pytest.mark.parametrize("replacement", [True, False])
def test_draws_are_samples_that_are_there(tmp_path, kind, replacement):
    memory = declared(
        kind(6, 2, device="cpu", path=tmp_path / "ring", replacement=replacement)
    )
    with pytest.raises(EmptyError, match="got an empty memory"):
        memory.sample(NAMES, 4)
    oracle = Oracle(6, 2)
    for first in range(0, 16, 2):
        memory.add_samples(**samples(first, 2))
        oracle.add(first, 2)
    memory.add_samples(**samples(16, 1))
    oracle.add(16, 1)
    (drawn,) = memory.sample(["rewards", "observations"], 300)
    assert len(drawn[0]) == (300 if replacement else 12)
    cells = memory.get_sampling_indexes().tolist()
    assert set(cells) == set(range(12))
    assert drawn[1][:, 0].tolist() == [oracle.cells[cell] for cell in cells]
    assert torch.equal(memory.sample_by_index(["rewards"], cells)[0][0], drawn[0])
    memory.home.close()


def test_sequences_never_go_from_the_newest_to_the_oldest(tmp_path):
    memory = declared(skrl.RandomMemory(6, device="cpu", path=tmp_path / "ring"))
    for number in range(8):
        memory.add_samples(**samples(number, 1))
    (drawn,) = memory.sample(["observations"], 50, sequence_length=3)
    numbers = drawn[0][:, 0].reshape(-1, 3)
    # Rows 2 to 7 are there: four sequences, each once.
    assert sorted(numbers[:, 0].tolist()) == [2, 3, 4, 5]
    assert (numbers[:, 1:] - numbers[:, :-1] == 1).all()
    assert memory.sampling_indexes.tolist() == [n % 6 for n in numbers.flatten().int()]
    with pytest.raises(EmptyError):
        memory.sample(["observations"], 1, sequence_length=7)
    memory.home.close()


def test_two_environments_expand_a_sequence_by_two_cells(tmp_path):
    memory = declared(skrl.RandomMemory(6, 2, device="cpu", path=tmp_path / "ring"))
    for first in range(0, 12, 2):
        memory.add_samples(**samples(first, 2))
    assert memory.all_sequence_indexes.tolist() == [
        0,
        2,
        4,
        6,
        8,
        10,
        1,
        3,
        5,
        7,
        9,
        11,
    ]
    memory.sample(NAMES, 8, sequence_length=3)
    cells = memory.sampling_indexes.reshape(-1, 3)
    assert (cells == cells[:, :1] + torch.tensor([0, 2, 4])).all()
    assert sorted(cells[:, 0].tolist()) == list(range(8))
    memory.home.close()


def test_mini_batches_lose_nothing(tmp_path):
    memory = declared(skrl.Memory(6, 2, device="cpu", path=tmp_path / "ring"))
    for first in range(0, 12, 2):
        memory.add_samples(**samples(first, 2))
    for length, order in ((1, range(12)), (2, memory.all_sequence_indexes)):
        parts = memory.sample_all(["observations", "none"], 5, length)
        assert [len(part[0]) for part in parts] == [3, 3, 2, 2, 2]
        assert torch.cat([part[0] for part in parts])[:, 0].tolist() == list(order)
        assert parts[0][1] is None
    assert [len(p[0]) for p in memory.sample_by_index(["rewards"], range(12), 7)] == [
        *[2] * 5, 1, 1,
    ]  # fmt: skip
    memory.home.close()


def test_samples_are_had_by_any_kind_of_index(tmp_path):
    memory = declared(rofunc.Memory(6, 2, device="cpu", path=tmp_path / "ring"))
    for first in range(0, 8, 2):
        memory.add_samples(**samples(first, 2))
    for indexes in ([1, 5], (1, 5), np.array([1, 5]), torch.tensor([1, -7])):
        (found,) = memory.sample_by_index(["observations"], indexes)
        assert found[0][:, 0].tolist() == [1, 5]
    for indexes in ([8], [-1], [12]):
        with pytest.raises(StaleError):
            memory.sample_by_index(["observations"], indexes)
    with pytest.raises(KeyError, match="nothing"):
        memory.sample_by_index(["nothing"], [0])
    memory.home.close()


@pytest.mark.parametrize("suffix", ["pt", "npz", "csv"])
def test_what_is_saved_loads(tmp_path, suffix):
    memory = declared(rofunc.Memory(5, 2, device="cpu", path=tmp_path / "ring"))
    with pytest.raises(EmptyError, match="cannot save a memory without samples"):
        memory.save(str(tmp_path))
    for first in range(0, 16, 2):
        memory.add_samples(**samples(first, 2), values=torch.ones(2, 1))
    memory.save(str(tmp_path), suffix)
    (file,) = (tmp_path / "memories").glob(f"*.{suffix}")
    assert re.fullmatch(rf"[\d_-]{{24}}_memory_0x[0-9a-f]+\.{suffix}", file.name)
    other = declared(rofunc.Memory(7, 2, device="cpu", path=tmp_path / "other"))
    other.add_samples(**samples(90, 2))
    other.load(str(file))
    assert (len(other), other.memory_index, other.filled) == (10, 5, False)
    (found,) = other.sample_all(NAMES)
    for name, tensor in zip(NAMES, found, strict=True):
        assert torch.equal(tensor, samples(6, 10)[name].to(tensor.dtype))
    other.add_samples(**samples(16, 2))
    assert other.get_tensor_by_name("observations")[5, 1, 0] == 17
    few = declared(rofunc.Memory(3, 2, device="cpu", path=tmp_path / "few"))
    few.load(str(file))
    assert few.filled
    (numbers,) = few.sample_all(["observations"])[0]
    assert set(numbers[:, 0].tolist()) == set(range(10, 16))
    few.create_tensor("absent", 1)
    with pytest.raises(KeyError, match="absent"):
        few.load(str(file))
    for each in (memory, other, few):
        each.home.close()


def test_a_memory_is_saved_each_time_it_is_full(tmp_path):
    memory = declared(
        skrl.Memory(
            3, 1, "cpu", export=True, export_format="npz",
            export_directory=str(tmp_path / "a" / "b"), path=tmp_path / "ring",
        )
    )  # fmt: skip
    memory.add_samples(**samples(0, 7))
    files = sorted((tmp_path / "a" / "b" / "memories").iterdir())
    found = [np.load(file)["observations"][:, 0, 0].tolist() for file in files]
    assert found == [[0, 1, 2], [3, 4, 5]]
    memory.home.close()


def test_an_unknown_format_is_refused_at_once(tmp_path):
    with pytest.raises(SchemaError, match="Unsupported export format: got 'np', exp"):
        skrl.Memory(3, export_format="np")
    with pytest.raises(ValueError, match="Unsupported export format"):
        skrl.Memory(3).save(str(tmp_path), "xls")
    with pytest.raises(ValueError, match="Unsupported export format"):
        skrl.Memory(3).load("memory.pkl")


def test_a_plain_memory_draws_nothing():
    with pytest.raises(NotImplementedError, match="use RandomMemory"):
        skrl.Memory(3).sample(["a"], 1)
