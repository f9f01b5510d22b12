"""Samples drawn from skrl's and rofunc's memories on disk, and files of them."""

import re

import numpy as np
import pytest
import torch

from mmreplay.adapters import rofunc, skrl
from mmreplay.errors import EmptyError, SchemaError, StaleError
from tests.adapters.memory_oracle import NAMES, Oracle, declared, samples


@pytest.mark.parametrize("kind", [skrl.RandomMemory, rofunc.RandomMemory])
@pytest.mark.parametrize("replacement", [True, False])
def test_draws_are_samples_that_are_there(tmp_path, kind, replacement):
    memory = declared(kind(6, 2, device="cpu", path=tmp_path / "ring", replacement=replacement))
    with pytest.raises(EmptyError, match=r"cannot draw 4 samples from an empty memory\."):
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
    with pytest.raises(ValueError, match="sequence_length must be an integer of at least 1, got 0"):
        memory.sample(["observations"], 1, sequence_length=0)
    memory.home.close()


def test_two_environments_expand_a_sequence_by_two_cells(tmp_path):
    memory = declared(skrl.RandomMemory(6, 2, device="cpu", path=tmp_path / "ring"))
    for first in range(0, 12, 2):
        memory.add_samples(**samples(first, 2))
    assert memory.all_sequence_indexes.tolist() == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]
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
        *[2] * 5,
        1,
        1,
    ]
    memory.home.close()


def test_indexes_may_be_narrower_than_the_number_of_cells():
    memory = skrl.Memory(400, device="cpu")
    memory.create_tensor("a", 1)
    memory.add_samples(a=torch.arange(400.0)[:, None])
    for indexes in (np.array([1, -1], np.int8), torch.tensor([1, 255]).to(torch.uint8)):
        (found,) = memory.sample_by_index(["a"], indexes)
        assert found[0].flatten().tolist() == [1, 399 if indexes[1] < 0 else 255]
    memory.home.close()


def test_samples_are_had_by_any_kind_of_index(tmp_path):
    memory = declared(rofunc.Memory(6, 2, device="cpu", path=tmp_path / "ring"))
    for first in range(0, 8, 2):
        memory.add_samples(**samples(first, 2))
    for indexes in ([1, 5], (1, 5), np.array([1, 5]), torch.tensor([1, -7])):
        (found,) = memory.sample_by_index(["observations"], indexes)
        assert found[0][:, 0].tolist() == [1, 5]
    mask = np.zeros(12, bool)
    mask[[1, 5]] = True
    for indexes in (mask, torch.from_numpy(mask)):
        (found,) = memory.sample_by_index(["observations"], indexes)
        assert found[0][:, 0].tolist() == [1, 5]
    with pytest.raises(IndexError, match=r"indexes: a mask must have the shape \[12\], one"):
        memory.sample_by_index(["observations"], [True, False])
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
            3,
            1,
            "cpu",
            export=True,
            export_format="npz",
            export_directory=str(tmp_path / "a" / "b"),
            path=tmp_path / "ring",
        )
    )
    memory.add_samples(**samples(0, 7))
    files = sorted((tmp_path / "a" / "b" / "memories").iterdir())
    found = [np.load(file)["observations"][:, 0, 0].tolist() for file in files]
    assert found == [[0, 1, 2], [3, 4, 5]]
    memory.home.close()


@pytest.mark.parametrize("kind", [rofunc.Memory, rofunc.RandomMemory])
@pytest.mark.parametrize("word", ["np", "npz"])
def test_both_of_rofuncs_words_write_npz(tmp_path, kind, word):
    memory = declared(
        kind(
            3,
            1,
            "cpu",
            export=True,
            export_format=word,
            export_directory=str(tmp_path),
            path=tmp_path / "ring",
        )
    )
    assert memory.export_format == word
    memory.add_samples(**samples(0, 3))
    memory.save(str(tmp_path), word)
    files = sorted((tmp_path / "memories").iterdir())
    assert [file.suffix for file in files] == [".npz"] * 2
    for file in files:
        assert np.load(file)["observations"][:, 0, 0].tolist() == [0, 1, 2]
    memory.home.close()


def test_an_unknown_format_is_refused_at_once(tmp_path):
    with pytest.raises(SchemaError, match=r"Unsupported export format 'np'\. Pass one of"):
        skrl.Memory(3, export_format="np")
    with pytest.raises(SchemaError, match=r"format 'xls'\. Pass one of .*csv, np;"):
        rofunc.Memory(3, export_format="xls")
    with pytest.raises(SchemaError, match=r"format 'np'\. Pass one of pt, npz, csv;"):
        rofunc.Memory(3).load("memory.np")
    with pytest.raises(ValueError, match="Unsupported export format"):
        skrl.Memory(3).save(str(tmp_path), "xls")
    with pytest.raises(ValueError, match="Unsupported export format"):
        skrl.Memory(3).load("memory.pkl")


def test_a_plain_memory_draws_nothing():
    with pytest.raises(NotImplementedError, match="use RandomMemory"):
        skrl.Memory(3).sample(["a"], 1)
