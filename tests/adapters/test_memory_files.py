"""Files of skrl's and rofunc's memories, by the names and cells that they hold."""

import numpy as np
import pytest
import torch

from mmreplay.adapters import rofunc, skrl
from mmreplay.errors import SchemaError

NAMES = ("observation", "reward", "terminated")


def role_named(path):
    memory = skrl.Memory(3, device="cpu", path=path)
    for name in NAMES:
        memory.create_tensor(name, 1)
    return memory


def saved(memory, folder, suffix):
    memory.save(str(folder), suffix)
    (file,) = (folder / "memories").glob(f"*.{suffix}")
    return file


@pytest.mark.parametrize("suffix", ["pt", "npz", "csv"])
@pytest.mark.parametrize(("name", "size"), [("a", 2), ("b", 2), ("b", 8), ("b", 3)])
def test_a_tensor_of_another_size_is_not_read_as_fewer_or_more(tmp_path, suffix, name, size):
    memory = skrl.Memory(4, 2, device="cpu")
    memory.create_tensor("a", 1)
    memory.create_tensor("b", 4)
    for number in range(4):
        memory.add_samples(a=torch.full((2, 1), number), b=torch.full((2, 4), number))
    file = saved(memory, tmp_path, suffix)
    other = skrl.Memory(4, 2, device="cpu")
    other.create_tensor(name, size)
    other.add_samples(**{name: torch.ones(2, size)})
    with pytest.raises(SchemaError, match=rf"tensor '{name}' has . numbers .* {size}"):
        other.load(str(file))
    assert other.get_tensor_by_name(name)[0].eq(1).all()
    memory.home.close()
    other.home.close()


@pytest.mark.parametrize("suffix", ["pt", "npz", "csv"])
def test_tensors_are_called_in_files_what_they_are_called(tmp_path, suffix):
    memory = role_named(tmp_path / "ring")
    values = torch.tensor([[1.0], [0.0], [1.0]])
    memory.add_samples(observation=values, reward=values + 1, terminated=values)
    file = saved(memory, tmp_path, suffix)
    if suffix == "pt":
        assert sorted(torch.load(file)) == list(NAMES)
    elif suffix == "npz":
        assert sorted(np.load(file)) == list(NAMES)
    else:
        assert file.read_text().split()[0] == ",".join(f"{name}.0" for name in NAMES)
    other = role_named(tmp_path / "other")
    other.load(str(file))
    for name, expected in zip(NAMES, (values, values + 1, values), strict=True):
        assert torch.equal(other.sample_all([name])[0][0], expected)
    for each in (memory, other):
        each.home.close()


def test_files_of_skrl_and_of_before_are_read_by_either_name(tmp_path):
    ones = torch.ones(3, 1, 1)
    for number, under in enumerate(("", "tensor/")):
        file = tmp_path / f"{number}.pt"
        torch.save({under + name: ones for name in NAMES}, file)
        memory = role_named(tmp_path / f"ring{number}")
        memory.load(str(file))
        assert memory.sample_all(["observation"])[0][0].tolist() == [[1.0]] * 3
        memory.home.close()


@pytest.mark.parametrize("suffix", ["pt", "npz", "csv"])
@pytest.mark.parametrize(("rows", "extra"), [(6, 0), (6, 1), (6, 2), (0, 1), (0, 2)])
def test_whole_numbers_come_back_with_as_many_samples(tmp_path, suffix, rows, extra):
    def made(path):
        memory = rofunc.Memory(6, 3, "cpu", path=path)
        memory.create_tensor("n", 1, torch.int64)
        return memory

    memory = made(tmp_path / "ring")
    for first in range(0, rows, 3):
        memory.add_samples(n=torch.arange(first, first + 3)[:, None])
    for number in range(rows, rows + extra):
        memory.add_samples(n=torch.tensor([[number]]))
    other = made(tmp_path / "other")
    other.load(str(saved(memory, tmp_path, suffix)))
    assert len(other) == len(memory) == rows + extra
    assert other.env_index == memory.env_index
    expected = list(range(rows + extra))
    assert other.sample_all(["n"])[0][0].flatten().tolist() == expected
    for each in (memory, other):
        each.home.close()


@pytest.mark.parametrize("suffix", ["pt", "npz", "csv"])
@pytest.mark.parametrize("more", [0, 1])
def test_samples_come_back_whose_floats_nobody_wrote_yet(tmp_path, suffix, more):
    def made(path):
        memory = skrl.Memory(6, 2, "cpu", path=path)
        memory.create_tensor("n", 1, torch.int64)
        memory.create_tensor("values", 1)
        return memory

    memory = made(tmp_path / "ring")
    memory.add_samples(n=torch.tensor([[0], [1]]), values=torch.ones(2, 1))
    memory.add_samples(n=torch.tensor([[2], [3]]))
    if more:
        memory.add_samples(n=torch.tensor([[4]]))
    other = made(tmp_path / "other")
    other.load(str(saved(memory, tmp_path, suffix)))
    numbers, values = other.sample_all(["n", "values"])[0]
    assert numbers.flatten().tolist() == list(range(4 + more))
    assert values[:2].tolist() == [[1.0]] * 2
    assert values[2:].isnan().all()
    assert other.env_index == memory.env_index
    for each in (memory, other):
        each.home.close()
