"""velora's buffer on disk does what velora's does, by its golden values."""

import gc
import json
import pickle
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmreplay.adapters.common import location, values
from mmreplay.adapters.velora import BatchExperience, BufferBase, ReplayBuffer
from mmreplay.adapters.velora import save as velora_save
from mmreplay.disk.files import remove_tree
from mmreplay.errors import CorruptError, FormatError, SchemaError

NAMES = ("states", "actions", "rewards", "next_states", "dones", "hiddens")


def step(value):
    """One step in which every number tells the step."""
    return (
        torch.full((2,), float(value)),
        torch.full((1, 1), float(value)),
        float(value),
        torch.full((2,), value + 0.5),
        value % 3 == 0,
        torch.full((1, 3), float(value)),
    )


def steps(values):
    values = torch.as_tensor(values, dtype=torch.float64)
    wide = values[:, None]
    return (
        wide.repeat(1, 2),
        values,
        values,
        wide.repeat(1, 2) + 0.5,
        values % 3 == 0,
        wide.repeat(1, 3),
    )


@pytest.fixture
def buffer(tmp_path):
    buffer = ReplayBuffer(4, 2, 1, 3, path=tmp_path / "ring")
    yield buffer
    buffer.close()


def test_six_adds_into_four_wrap_as_veloras_do(buffer):
    for value in range(6):
        buffer.add(*step(value))
    assert buffer.states[:, 0].tolist() == [4, 5, 2, 3]
    assert (buffer.position, buffer.size, len(buffer)) == (2, 4, 4)
    assert json.dumps(buffer.metadata()) == (
        '{"capacity": 4, "state_dim": 2, "action_dim": 1, "hidden_dim": 3, '
        '"position": 2, "size": 4, "device": null}'
    )


@pytest.mark.parametrize("name", ["capacity", "state_dim", "action_dim", "hidden_dim"])
def test_what_a_buffer_was_made_with_does_not_change(buffer, name):
    buffer.add(*step(1))
    known = buffer.metadata()
    with pytest.raises(SchemaError, match=rf"^{name} cannot .* made with {known[name]}, got 20"):
        setattr(buffer, name, 20)
    assert buffer.metadata() == known


@pytest.mark.parametrize("name", ["state_dim", "action_dim", "hidden_dim"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "x"])
def test_features_that_make_no_sense_are_refused_by_name(tmp_path, name, value):
    dims = {"state_dim": 2, "action_dim": 1, "hidden_dim": 3, name: value}
    with pytest.raises(SchemaError, match=f"^{name} must be an integer of at .*{value!r}"):
        ReplayBuffer(4, **dims, path=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_pickle_keeps_the_names_of_an_earlier_version(buffer):
    told = {"capacity": 4, "state_dim": 2, "action_dim": 1, "hidden_dim": 3}
    state = buffer.__getstate__()
    assert {name: state[name] for name in told} == told


def test_a_pickled_buffer_has_the_capacity_that_its_folder_has(buffer):
    for value in range(6):
        buffer.add(*step(value))
    kept = pickle.dumps(buffer)
    buffer._ring.resize(8)
    buffer.close()
    again = pickle.loads(kept)
    for value in range(6, 9):
        again.add(*step(value))
    assert (again.capacity, again.size, again.position) == (8, 7, 1)
    assert again.states[:, 0].tolist() == [8, 0, 2, 3, 4, 5, 6, 7]
    again.close()


def test_ten_added_at_once_leave_the_last_four(buffer):
    buffer.add_multi(*steps(range(10)))
    assert buffer.states[:, 0].tolist() == [8, 9, 6, 7]
    assert (buffer.position, buffer.size) == (2, 4)
    assert buffer.dones[:, 0].tolist() == [0, 1, 1, 0]


def test_steps_added_one_by_one_or_at_once_are_the_same(buffer, tmp_path):
    other = ReplayBuffer(4, 2, 1, 3, path=tmp_path / "other")
    for value in range(5):
        buffer.add(*step(value))
    other.add_multi(*steps(range(3)))
    other.add_multi(*steps(range(3, 5)))
    mine, theirs = buffer.state_dict(), other.state_dict()
    assert list(mine) == list(NAMES)
    for name in NAMES:
        assert mine[name].dtype == torch.float32
        assert torch.equal(mine[name], theirs[name])
    other.close()


def test_rows_never_written_are_zero(buffer):
    buffer.add(*step(7))
    assert buffer.states[:, 0].tolist() == [7, 0, 0, 0]
    assert buffer.hiddens.shape == (4, 3)


def test_a_batch_holds_whole_steps_of_those_stored(buffer):
    buffer.add_multi(*steps(range(10)))
    batch = buffer.sample(4)
    assert isinstance(batch, BatchExperience)
    seen = set()
    for _ in range(30):
        batch = buffer.sample(3)
        values = batch.states[:, 0]
        seen |= set(values.tolist())
        assert torch.equal(batch.next_states, values[:, None].repeat(1, 2) + 0.5)
        assert torch.equal(batch.actions, values[:, None])
        assert torch.equal(batch.rewards, values[:, None])
        assert torch.equal(batch.dones[:, 0], (values % 3 == 0).float())
        assert torch.equal(batch.hiddens, values[:, None].repeat(1, 3))
    # 90 draws miss one of four with probability 4 * 0.75**90 < 3e-11.
    assert seen == {6, 7, 8, 9}


def test_draws_repeat_under_torchs_seed(tmp_path, monkeypatch):
    drawn = []
    for name in "ab":
        torch.manual_seed(5)
        monkeypatch.setattr(values, "_seeded", Counter())  # as a new process
        buffer = ReplayBuffer(50, 2, 1, 3, path=tmp_path / name)
        buffer.add_multi(*steps(range(50)))
        drawn.append(buffer.sample(20).rewards)
        buffer.close()
    assert torch.equal(*drawn)


def test_a_batch_of_none_is_empty_and_too_large_a_one_refused(buffer):
    assert buffer.sample(0).hiddens.shape == (0, 3)
    buffer.add(*step(1))
    with pytest.raises(ValueError, match=r"Available: 1, Requested: 2; add steps"):
        buffer.sample(2)


def test_the_base_does_not_sample(tmp_path):
    base = BufferBase(4, 2, 1, 3, path=tmp_path / "base")
    for arguments, named in (((), {}), ((1,), {}), ((), {"batch_size": 1})):
        with pytest.raises(NotImplementedError, match="use ReplayBuffer"):
            base.sample(*arguments, **named)
    base.close()


def test_a_scalar_is_not_repeated_over_a_state_and_nothing_is_added(buffer):
    state, *rest = step(1)
    with pytest.raises(SchemaError, match=r"states must have the shape \[2\], got \[\]\."):
        buffer.add(state[0], *rest)
    wide = steps(range(3))
    with pytest.raises(SchemaError, match=r"next_states must have .* got \[2, 2\]"):
        buffer.add_multi(*wide[:3], wide[3][:2], *wide[4:])
    for nothing in (None, "1"):
        with pytest.raises(SchemaError, match=r"rewards must be numbers"):
            buffer.add(*step(1)[:2], nothing, *step(1)[3:])
    assert len(buffer) == 0


def test_bfloat16_is_cast_as_other_floats_are(buffer):
    rough = [v.bfloat16() if isinstance(v, torch.Tensor) else v for v in step(3)]
    buffer.add(*rough)
    buffer.add_multi(*(v.bfloat16() for v in steps(range(4, 6))))
    found = buffer.state_dict()
    exact = steps(range(3, 6))
    for tensor, given in zip(found.values(), exact, strict=True):
        told = given.bfloat16().float().reshape(3, -1)
        assert torch.equal(tensor[:3], told)


def test_what_is_saved_loads_and_goes_on_where_it_was(buffer, tmp_path):
    buffer.add_multi(*steps(range(6)))
    buffer.save(tmp_path / "saved", "v1.2_")
    buffer.save(tmp_path / "saved", "v1.3_")
    names = sorted(p.name for p in (tmp_path / "saved").iterdir())
    assert names == [
        "v1.2_metadata.json",
        "v1.2_state.safetensors",
        "v1.3_metadata.json",
        "v1.3_state.safetensors",
    ]
    text = (tmp_path / "saved" / "v1.2_metadata.json").read_text()
    assert text == json.dumps(buffer.metadata(), indent=2)
    found = load_file(tmp_path / "saved" / "v1.2_state.safetensors")
    for name in NAMES:
        assert torch.equal(found[name], buffer.state_dict()[name])
    again = ReplayBuffer.load(
        tmp_path / "saved" / "v1.2_state", json.loads(text), path=tmp_path / "again"
    )
    assert again.metadata() == buffer.metadata() | {"device": "cpu"}
    buffer.add(*step(6))
    again.add(*step(6))
    for name in NAMES:
        assert torch.equal(again.state_dict()[name], buffer.state_dict()[name])
    again.close()
    opened = ReplayBuffer(4, 2, 1, 3, path=tmp_path / "again", resume=True)
    assert opened.metadata() == buffer.metadata()
    opened.close()


def test_a_half_full_buffer_loads_and_a_gpus_goes_to_the_cpu(buffer, tmp_path):
    buffer.add_multi(*steps(range(2)))
    buffer.save(tmp_path)
    told = buffer.metadata() | {"device": "cuda:0"}
    again = ReplayBuffer.load(tmp_path / "buffer_state.safetensors", told)
    assert len(again) == 2
    assert again.sample(1).states.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    again.close()


def test_files_of_veloras_own_load(tmp_path):
    made = {
        name: torch.arange(4.0)[:, None].repeat(1, width)
        for name, width in zip(NAMES, (2, 1, 1, 2, 1, 3), strict=True)
    }
    save_file(made, tmp_path / "buffer_state.safetensors")
    told = {"capacity": 4, "state_dim": 2, "action_dim": 1, "hidden_dim": 3}
    told |= {"position": 1, "size": 4, "device": None}
    buffer = ReplayBuffer.load(tmp_path / "buffer_state.safetensors", told)
    assert torch.equal(buffer.states, made["states"])
    assert buffer.position == 1
    buffer.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": 99}, r"metadata must be \{'capacity': 4, 'state_dim':"),
        ({"position": 1}, r"4\}\. Pass the metadata of the same save\."),
        ({"size": 9}, r"must be within the capacity of 4, got 9"),
        ({"size": "many"}, "must have capacity, state_dim, action_dim,"),
    ],
)
def test_metadata_of_other_tensors_is_refused(buffer, tmp_path, change, message):
    buffer.add_multi(*steps(range(6)))
    buffer.save(tmp_path)
    told = buffer.metadata() | change
    with pytest.raises(FormatError, match=message):
        ReplayBuffer.load(tmp_path / "buffer_state", told)
    with pytest.raises(FormatError, match=r"must have capacity,"):
        ReplayBuffer.load(tmp_path / "buffer_state", [told])


def test_tensors_of_other_shapes_are_refused(tmp_path):
    save_file({"states": torch.zeros(4, 2)}, tmp_path / "s.safetensors")
    told = {"capacity": 4, "state_dim": 2, "action_dim": 1, "hidden_dim": 3}
    told |= {"position": 0, "size": 0, "device": None}
    with pytest.raises(FormatError, match=r"'actions' must be float32.* got none"):
        ReplayBuffer.load(tmp_path / "s", told)
    cut = (tmp_path / "s.safetensors").read_bytes()[:-3]
    (tmp_path / "s.safetensors").write_bytes(cut)
    with pytest.raises(
        CorruptError, match=r"must have 104 bytes as its header says, got 101\. The file was"
    ):
        ReplayBuffer.load(tmp_path / "s", told)


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_load_that_was_killed_is_refused_by_name(buffer, tmp_path, monkeypatch, blocks):
    buffer.add_multi(*steps(range(6)))
    buffer.save(tmp_path)
    told = buffer.metadata()
    monkeypatch.setattr(velora_save, "block_rows", lambda _: 1)
    read, calls = velora_save.TensorFile.read, []

    def dies(self, *args):
        calls.append(args)
        if len(calls) > 6 * blocks:
            raise KeyboardInterrupt
        return read(self, *args)

    monkeypatch.setattr(velora_save.TensorFile, "read", dies)
    with pytest.raises(KeyboardInterrupt):
        ReplayBuffer.load(tmp_path / "buffer_state", told, path=tmp_path / "new")
    gc.collect()
    monkeypatch.undo()
    with pytest.raises(FormatError, match=f"holds {blocks} of the 4 steps of a load tha"):
        ReplayBuffer(4, 2, 1, 3, path=tmp_path / "new", resume=True)
    remove_tree(tmp_path / "new")
    loaded = ReplayBuffer.load(tmp_path / "buffer_state", told, path=tmp_path / "new")
    loaded.close()
    loaded = ReplayBuffer(4, 2, 1, 3, path=tmp_path / "new", resume=True)
    assert (loaded.size, loaded.position) == (4, 2)
    loaded.close()


def test_a_load_without_a_path_passes_over_what_is_there(buffer, tmp_path, monkeypatch):
    monkeypatch.setenv("MMREPLAY_DIR", str(tmp_path))
    buffer.add_multi(*steps(range(3)))
    buffer.save(tmp_path)
    for run in range(2):
        monkeypatch.setattr(location, "_numbers", {})  # as a script that is run again
        loaded = ReplayBuffer.load(tmp_path / "buffer_state", buffer.metadata())
        assert loaded.home.path == tmp_path / f"velora-load-{run}"
        # And what the script makes beside it is found again.
        beside = ReplayBuffer(4, 2, 1, 3, resume=True)
        assert (beside.home.path, beside.size) == (tmp_path / "velora-0", run)
        beside.add_multi(*steps(range(1)))
        for each in (loaded, beside):
            each.close()
    with pytest.raises(FormatError, match=r"already holds a buffer\. Choose another path"):
        ReplayBuffer.load(tmp_path / "buffer_state", buffer.metadata(), path=loaded.home.path)


class Agent:
    """Acts at random, and counts its steps in the hidden state."""

    def __init__(self, name, **kwargs):
        self.env = SimpleNamespace(spec=SimpleNamespace(id=name, kwargs=kwargs))
        self.device = torch.device("cpu")
        self.seen = []

    def predict(self, states, hidden, train_mode=False):
        assert train_mode
        hidden = torch.zeros(len(states), 3) if hidden is None else hidden
        actions = torch.randint(2, (len(states),))
        self.seen.append(states)
        return actions, hidden + 1


@pytest.mark.parametrize("count", [101, 13])
def test_warming_gives_exactly_as_many_steps_and_no_resets(tmp_path, count):
    pytest.importorskip("gymnasium")
    torch.manual_seed(0)
    buffer = ReplayBuffer(200, 4, 1, 3, path=tmp_path / "ring")
    buffer.warm(Agent("CartPole-v1"), count, 8)
    assert len(buffer) == count
    data = buffer.sample(count)
    # CartPole rewards every step with 1; the no-op of a reset gives 0.
    assert (data.rewards == 1).all()
    # A random policy balances a pole for more than 60 steps once in 10,000 episodes.
    assert data.hiddens.max() <= 60
    first = (buffer.hiddens[:count, 0] == 1).sum()
    assert first >= 8 if count > 8 else True
    # An episode ends as often as it begins, but for those that are running.
    assert 0 <= first - buffer.dones[:count].sum() <= 8
    buffer.warm(Agent("CartPole-v1"), count - 5)
    assert len(buffer) == count
    buffer.close()


def test_warming_beyond_the_capacity_or_with_one_environment_is_refused(buffer):
    with pytest.raises(ValueError, match=r"'num_envs=1' cannot be smaller than 2\."):
        buffer.warm(Agent("CartPole-v1"), 2, 1)
    with pytest.raises(ValueError, match=r"must be at most the capacity of 4, got 5\."):
        buffer.warm(Agent("CartPole-v1"), 5)


def test_a_buffer_that_is_there_needs_resume(buffer, tmp_path):
    buffer.add_multi(*steps(range(3)))
    buffer.close()
    with pytest.raises(FormatError, match="resume=True"):
        ReplayBuffer(4, 2, 1, 3, path=tmp_path / "ring")
    again = ReplayBuffer(4, 2, 1, 3, path=tmp_path / "ring", resume=True)
    assert again.states[:, 0].tolist() == [0, 1, 2, 0]
    assert str(tmp_path) in repr(again)
    again.close()


def test_random_calls_give_what_a_list_of_steps_gives(tmp_path):
    rng = np.random.default_rng(3)
    buffer = ReplayBuffer(7, 2, 1, 3, path=tmp_path / "ring")
    rows, made = [None] * 7, 0
    for _ in range(60):
        count = int(rng.integers(0, 18))
        values = list(range(made, made + max(1, count)))
        if count == 0:
            buffer.add(*step(made))
        else:
            buffer.add_multi(*steps(values))
        for value in values:
            rows[value % 7] = value
        made += len(values)
        assert buffer.position == made % 7
        assert buffer.rewards[:, 0].tolist() == [value or 0 for value in rows]
    buffer.close()


KILLED = """
import os, sys
import torch
from mmreplay.adapters.velora import ReplayBuffer
buffer = ReplayBuffer(40, 2, 1, 3, path=sys.argv[1], resume=True)
for value in range(len(buffer), len(buffer) + 30):
    row = torch.full((2,), float(value))
    buffer.add(row, row[:1], value, row + 0.5, False, torch.zeros(3))
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.crash
def test_steps_of_killed_processes_are_there_and_the_ring_goes_on(tmp_path):
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "ring"])
        assert done.returncode == -9
    buffer = ReplayBuffer(40, 2, 1, 3, path=tmp_path / "ring", resume=True)
    assert (buffer.size, buffer.position) == (40, 20)
    assert buffer.rewards[:, 0].tolist() == [*range(40, 60), *range(20, 40)]
    buffer.close()
