"""The same calls to velora's own buffer and to ours; velora's own agents train."""

import json

import pytest
import torch

from mmreplay.adapters import velora as ours

# velora and what it imports warn of their own future.
pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
models = pytest.importorskip("velora.models", reason="velora is not installed")
theirs = pytest.importorskip("velora.buffer", reason="velora is not installed")

NAMES = ("states", "actions", "rewards", "next_states", "dones", "hiddens")
DIMS = (3, 2, 4)


def step():
    return (
        torch.randn(3, dtype=torch.float64),
        torch.randn(1, 2),
        float(torch.randn(())),
        torch.randn(3, dtype=torch.float64),
        bool(torch.rand(()) < 0.2),
        torch.randn(1, 4),
    )


def steps(count):
    return (
        torch.randn(count, 3, dtype=torch.float64),
        torch.randn(count, 2),
        torch.randn(count, dtype=torch.float64),
        torch.randn(count, 3),
        torch.rand(count) < 0.2,
        torch.randn(count, 4),
    )


def assert_same(mine, other):
    assert mine.metadata() == other.metadata()
    assert len(mine) == len(other)
    for name in NAMES:
        assert torch.equal(mine.state_dict()[name], other.state_dict()[name])
        assert torch.equal(getattr(mine, name), getattr(other, name))


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_leave_the_same_rows(tmp_path, seed):
    torch.manual_seed(seed)
    mine = ours.ReplayBuffer(11, *DIMS, path=tmp_path / "ring")
    other = theirs.ReplayBuffer(11, *DIMS)
    for _ in range(40):
        count = int(torch.randint(0, 15, ()))
        given = steps(count) if count else step()
        for buffer in (mine, other):
            (buffer.add_multi if count else buffer.add)(*given)
        assert_same(mine, other)
    rows = {tuple(row.tolist()) for row in other.states}
    batch = mine.sample(10)
    assert {tuple(row.tolist()) for row in batch.states} <= rows
    for name, tensor in vars(other.sample(10)).items():
        got = getattr(batch, name)
        assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype)
    mine.close()


def test_refusals_are_of_the_same_type(tmp_path):
    mine = ours.ReplayBuffer(11, *DIMS, path=tmp_path / "ring")
    other = theirs.ReplayBuffer(11, *DIMS)
    for buffer in (mine, other):
        with pytest.raises(ValueError, match="Available: 0, Requested: 1"):
            buffer.sample(1)
        with pytest.raises(ValueError, match="num_envs=1"):
            buffer.warm(None, 3, 1)
    mine.close()


@pytest.mark.parametrize("count", [5, 25])
def test_each_loads_what_the_other_saved(tmp_path, count):
    torch.manual_seed(1)
    mine = ours.ReplayBuffer(11, *DIMS, path=tmp_path / "ring")
    other = theirs.ReplayBuffer(11, *DIMS)
    given = steps(count)
    mine.add_multi(*given)
    other.add_multi(*given)
    mine.save(tmp_path / "mine")
    other.save(tmp_path / "theirs")
    names = [sorted(p.name for p in (tmp_path / n).iterdir()) for n in ("mine", "theirs")]
    assert names[0] == names[1]
    texts = [(tmp_path / n / "buffer_metadata.json").read_text() for n in ("mine", "theirs")]
    assert texts[0] == texts[1]
    told = json.loads(texts[0])
    back = theirs.ReplayBuffer.load(tmp_path / "mine" / "buffer_state", told)
    forth = ours.ReplayBuffer.load(tmp_path / "theirs" / "buffer_state", told)
    assert_same(forth, back)
    forth.close()
    mine.close()


def test_the_config_is_veloras_own(tmp_path):
    mine = ours.ReplayBuffer(11, *DIMS, path=tmp_path / "ring")
    assert mine.config() == theirs.ReplayBuffer(11, *DIMS).config()
    mine.close()


@pytest.mark.slow
def test_neuroflow_trains_saves_and_goes_on(tmp_path, monkeypatch):
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)  # it writes a database of metrics where it stands
    agent = models.NeuroFlowCT("InvertedPendulum-v5", 20, 128, buffer_size=10, seed=7)
    dims = (agent.state_dim, agent.action_dim, agent.buffer.hidden_dim)
    agent.buffer = ours.ReplayBuffer(5_000, *dims, path=tmp_path / "ring")
    before = [p.clone() for p in agent.actor.network.parameters()]
    agent.train(32, n_episodes=8, max_steps=100, window_size=4, warmup_steps=101)
    assert len(agent.buffer) > 101
    assert agent.buffer.rewards[:101].min() >= 0
    after = list(agent.actor.network.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    agent.save(tmp_path / "saved", buffer=True)
    told = json.loads((tmp_path / "saved" / "metadata.json").read_text())["buffer"]
    again = ours.ReplayBuffer.load(tmp_path / "saved" / "buffer_state", told)
    assert torch.equal(again.states, agent.buffer.states)
    agent.buffer.close()
    agent.buffer = ours.ReplayBuffer(5_000, *dims, path=tmp_path / "ring", resume=True)
    assert len(agent.buffer) == len(again)
    agent.train(32, n_episodes=1, max_steps=20, window_size=1, warmup_steps=0)
    assert len(agent.buffer) > len(again)
    again.close()
    agent.buffer.close()
