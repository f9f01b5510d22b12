"""skrl's and rofunc's memories where faces share a ring, or a call is cut short."""

import pickle
import shutil

import pytest
import torch

import mmreplay as mr
from mmreplay.adapters import rofunc, skrl
from mmreplay.errors import SchemaError
from tests.adapters.memory_oracle import Oracle, assert_same, declared, samples


def memory_at(path, rows=5, envs=2, **options):
    memory = skrl.RandomMemory(rows, envs, "cpu", path=path, **options)
    return declared(memory)


def test_faces_of_one_ring_share_its_cursor(tmp_path, rng):
    first = memory_at(tmp_path / "ring")
    first.add_samples(**samples(0, 2))
    faces = [first, pickle.loads(pickle.dumps(first))]
    oracle, number = Oracle(5, 2), 2
    oracle.add(0, 2)
    for _ in range(40):
        count = 1 if faces[0].env_index else int(rng.integers(1, 3))
        faces[int(rng.integers(2))].add_samples(**samples(number, count))
        oracle.add(number, count)
        number += count
        for each in faces:
            assert_same(each, oracle)
    first.home.close()


def test_a_whole_row_of_another_face_is_refused_as_well(tmp_path):
    first = memory_at(tmp_path / "ring")
    first.add_samples(**samples(0, 1))
    other = pickle.loads(pickle.dumps(first))
    first.add_samples(**samples(1, 1))
    other.add_samples(**samples(2, 1))
    with pytest.raises(SchemaError, match="environments from 1 on, because the row is"):
        first.add_samples(**samples(3, 2))
    other.reset()
    assert len(first) == first.env_index == 0
    first.home.close()


@pytest.mark.parametrize("count", [1, 2])
def test_an_add_that_was_interrupted_is_counted_where_its_rows_are(tmp_path, monkeypatch, count):
    memory, oracle = memory_at(tmp_path / "ring"), Oracle(5, 2)
    memory.add_samples(**samples(0, 2))
    add = mr.ReplayBuffer.add

    def interrupted(*arguments, **options):
        add(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(mr.ReplayBuffer, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        memory.add_samples(**samples(2, count))
    monkeypatch.undo()
    for number in range(2 + count, 17):
        memory.add_samples(**samples(number, 1))
    oracle.add(0, 17)
    assert_same(memory, oracle)
    memory.home.close()


def test_an_interrupted_load_leaves_no_sample(tmp_path, monkeypatch):
    source = memory_at(tmp_path / "source")
    for first in range(0, 8, 2):
        source.add_samples(**samples(first, 2))
    source.save(str(tmp_path))
    source.home.close()
    (file,) = (tmp_path / "memories").iterdir()
    memory = memory_at(tmp_path / "ring")
    memory.add_samples(**samples(90, 2))
    extend, calls = mr.ReplayBuffer.extend, []

    def dies(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:  # between the environments
            # As a process that is killed leaves it.
            shutil.copytree(tmp_path / "ring", tmp_path / "killed")
            raise KeyboardInterrupt
        extend(*arguments, **options)

    monkeypatch.setattr(mr.ReplayBuffer, "extend", dies)
    with pytest.raises(KeyboardInterrupt):
        memory.load(str(file))
    monkeypatch.undo()
    for each in (memory, memory_at(tmp_path / "killed", resume=True)):
        assert (len(each), each.memory_index, each.env_index) == (0, 0, 0)
        oracle = Oracle(5, 2)
        for number in range(7):
            each.add_samples(**samples(number, 1))
            oracle.add(number, 1)
        assert_same(each, oracle)
        each.home.close()


def test_what_another_library_made_is_left_as_it_is(tmp_path):
    schema = mr.Schema({"observations": mr.Field((3,), "float32")})
    for name, user in (("alf", {"adapter": "alf"}), ("own", {"by": "me"})):
        mr.ReplayBuffer.create(tmp_path / name, schema, 5, user_metadata=user).close()
    before = (tmp_path / "alf" / "metadata.json").read_bytes()
    with pytest.raises(SchemaError, match=r"a buffer of the adapter 'alf'\. Choose"):
        skrl.Memory(5, path=tmp_path / "alf", resume=True)
    assert (tmp_path / "alf" / "metadata.json").read_bytes() == before
    memory = skrl.Memory(5, device="cpu", path=tmp_path / "own", resume=True)
    memory.create_tensor("observations", 3)
    with pytest.raises(SchemaError, match=r"'rewards': .* was not made by a memory"):
        memory.create_tensor("rewards", 1)
    memory.home.close()


def test_two_tensors_that_would_be_stored_under_one_name_are_refused():
    memory = skrl.Memory(5, device="cpu")
    memory.create_tensor("reward", 1)
    with pytest.raises(SchemaError, match="tensor 'tensor/reward': 'reward' is stored"):
        memory.create_tensor("tensor/reward", 1)
    memory.home.close()


def test_skrl_and_rofunc_go_on_with_each_others_memories(tmp_path):
    memory = skrl.Memory(5, device="cpu", path=tmp_path / "ring")
    memory.create_tensor("a", 1)
    memory.add_samples(a=torch.ones(3, 1))
    memory.home.close()
    again = rofunc.Memory(5, device="cpu", path=tmp_path / "ring", resume=True)
    again.create_tensor("a", 1)
    assert again.create_tensor("b", 1)
    assert len(again) == 3
    again.home.close()
