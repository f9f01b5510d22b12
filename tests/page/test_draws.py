"""What is drawn equals the sampler's own draw, and leaves no trace in its files."""

import fcntl
import os

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.page.draws import SAMPLERS, age_histogram, parse_sampler
from mmreplay.page.requests import Refusal
from tests.page.conftest import make_buffer


@pytest.fixture
def prioritized(path, rng):
    """A buffer with stored priorities of two orders of magnitude."""
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        batch = buffer.sample(512)
        buffer.update_priorities(batch, rng.random(512) * 100)
    return path


def files_of(path):
    folder = path / "samplers" / "prioritized"
    return {
        name: ((folder / name).read_bytes(), os.stat(folder / name).st_mtime_ns)
        for name in ("STATE", "LOCK", "priorities.bin")
    }


def test_draws_are_the_samplers_own(ask, prioritized):
    client = ask(prioritized)
    text = "PrioritizedSampler(alpha=0.8, beta=0.5)"
    answer = client.json("draws", f"sampler={text}&seed=3")
    sampler = mr.PrioritizedSampler(alpha=0.8, beta=0.5, seed=3)
    with mr.ReplayBuffer.open(prioritized) as buffer:
        draw = sampler.draw(buffer.view, 256)
        sampler.close()
        heads = buffer.heads
    assert answer["env_ids"] == draw.env_ids.tolist()
    assert answer["positions"] == draw.positions.tolist()
    np.testing.assert_allclose(answer["probabilities"], draw.probabilities, rtol=1e-6)
    np.testing.assert_allclose(answer["weights"], draw.weights, rtol=1e-5)
    ages = heads[draw.env_ids] - 1 - draw.positions
    assert answer["ages"] == ages.tolist()
    assert sum(answer["drawn"]) == 256
    assert answer["priorities"]


def test_draws_take_no_lock_and_write_no_state(ask, prioritized):
    before = files_of(prioritized)
    client = ask(prioritized)
    for seed in range(3):
        for name in ("PrioritizedSampler", "RankPrioritizedSampler"):
            client.json("draws", f"sampler={name}()&seed={seed}")
    client.json("overview")
    assert files_of(prioritized) == before
    # A trainer that starts now gets the column, not a copy in RAM.
    sampler = mr.PrioritizedSampler()
    with mr.ReplayBuffer.open(prioritized, sampler=sampler) as buffer:
        buffer.sample(1)
        assert sampler.where == "disk"
        sampler.close()


def test_draws_work_while_a_trainer_holds_the_lock(ask, prioritized):
    with open(prioritized / "samplers" / "prioritized" / "LOCK", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = ask(prioritized).json("draws", "sampler=PrioritizedSampler()")
    assert len(answer["positions"]) == 256


def test_the_command_line_names_the_first_sampler(ask, path):
    client = ask(path, sampler="UniformSampler()")
    answer = client.json("draws", "seed=1")
    assert answer["sampler"] == "UniformSampler()"
    assert not answer["priorities"]


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_sampler_draws(ask, path, name):
    arguments = {
        "RecentSampler": "(steps=50, ratio=0.5)",
        "EmphasizeRecentSampler": "(num_updates=10)",
    }.get(name, "")
    answer = ask(path).json("draws", f"sampler={name}{arguments}")
    assert len(answer["positions"]) == 256
    assert answer == ask(path).json("draws", f"sampler={name}{arguments}")


def test_samplers_within_samplers(ask, prioritized):
    text = (
        "RecentSampler(10, 0.5, PrioritizedSampler(beta=LinearSchedule(0.4, 1.0, 5)))"
    )
    before = files_of(prioritized)
    assert len(ask(prioritized).json("draws", f"sampler={text}")["positions"]) == 256
    assert files_of(prioritized) == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "print('x')",
        "__import__('os').system('touch pwned')",
        "UniformSampler.__init__",
        "UniformSampler(seed=open('x'))",
        "UniformSampler(seed=(lambda: 1)())",
        "UniformSampler(*[1])",
        "UniformSampler(**{'seed': 1})",
        "UniformSampler(seed=[1] * 9)",
        "UniformSampler(block=10**99)",
        "UniformSampler(block=99999999999999999999)",
        "UniformSampler(x=1)",
        "UniformSampler(seed=-1)",
        "PrioritizedSampler(alpha='x')",
        "PrioritizedSampler(alpha=PrioritizedSampler)",
        "SequenceSampler(10)",
        "UniformSampler()()",
        "UniformSampler(); 1",
        "(" * 90 + ")" * 90,
        "R" * 400,
        "RecentSampler(1, 0.5, RecentSampler(1, 0.5, RecentSampler(1, 0.5, "
        "RecentSampler(1, 0.5, RecentSampler(1, 0.5)))))",
        "UniformSampler(\x00)",
    ],
)
def test_text_that_is_no_sampler_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal) as refused:
        parse_sampler(text, 0)
    assert refused.value.status == 400
    assert [*tmp_path.iterdir()] == []


def test_a_name_of_a_column_is_not_used(path):
    sampler = parse_sampler("PrioritizedSampler(name='prioritized')", 0)
    with mr.ReplayBuffer.open(path) as buffer:
        sampler.draw(buffer.view, 8)
    assert not (path / "samplers").exists()


def test_ages_are_counted_without_reading(rng):
    for lengths in ([1], [40], [41], [1000, 10, 0], [123456]):
        edges, counts = age_histogram(np.array(lengths))
        ages = np.concatenate([np.arange(length) for length in lengths])
        assert counts.tolist() == np.histogram(ages, edges)[0].tolist()
        assert counts.sum() == sum(lengths)


def test_rings_too_large_to_copy_are_refused(ask, tmp_path, rng, monkeypatch):
    monkeypatch.setattr("mmreplay.page.draws.MAX_PRIORITY_ROWS", 100)
    path = make_buffer(tmp_path / "a", rng)
    status, text = ask(path).refused("draws", "sampler=PrioritizedSampler()")
    assert status == 413
    assert "at most 100 rows" in text
    assert ask(path).json("draws", "sampler=UniformSampler")["seed"] == 0
