"""Answers while a writer overwrites the oldest rows of a full ring."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.page import episodes
from tests.page.conftest import healthy_steps, make_buffer


@pytest.fixture
def full(tmp_path, rng):
    """Two full rings of 1,000 rows."""
    return make_buffer(tmp_path / "full", rng, count=1500)


@pytest.fixture
def overwritten(full, rng, monkeypatch):
    """Whenever the page reads, each environment loses its ten oldest rows first.

    Returns the writer.
    """
    read = ReplayBuffer.get_fields
    with mr.ReplayBuffer.open(full, "r+") as writer:
        steps = healthy_steps(rng, 10, 2)

        def get_fields(self, paths, env_ids, positions):
            if self is not writer:
                writer.extend(steps, final_observation=steps["observation"])
            return read(self, paths, env_ids, positions)

        def get_field(self, path, env_ids, positions):
            return get_fields(self, (path,), env_ids, positions)[path]

        monkeypatch.setattr(ReplayBuffer, "get_fields", get_fields)
        monkeypatch.setattr(ReplayBuffer, "get_field", get_field)
        yield writer


@pytest.mark.usefixtures("overwritten")
def test_the_overview_of_what_is_left(ask, full):
    found = ask(full).json("overview")
    assert 1900 < found["steps"] <= 2000
    for field in found["fields"]:
        assert 1500 < field["rows"] < 2000, field
    assert {check["level"] for check in found["checks"]} == {"fine"}
    counts = found["histograms"]["reward"]["components"][0]["counts"]
    assert sum(counts) == found["histograms"]["reward"]["rows"]


@pytest.mark.usefixtures("overwritten")
def test_a_curve_of_what_is_left(ask, full):
    head, body = ask(full).arrays("curve", "env=1&field=reward&first=0&stop=1500")
    assert 500 < head["first"] < 700
    curves = np.frombuffer(body, "<f4").reshape(3, -1)
    with mr.ReplayBuffer.open(full) as buffer:
        values = buffer.get_field("reward", 1, np.arange(800, head["stop"]))
    np.testing.assert_array_equal(curves[2][800 - head["first"] :], values)


@pytest.mark.usefixtures("overwritten")
def test_frames_of_what_is_left(ask, full):
    at = ",".join(f"0:{position}" for position in range(500, 1000, 10))
    head, _ = ask(full).arrays("frames", f"field=observation/pixels&at={at}&side=24")
    assert 30 < len(head["at"]) < 50


def test_an_episode_that_fills_its_ring(ask, tmp_path, rng, monkeypatch):
    # It has no end: its first steps are overwritten all the time.
    def endless(steps):
        for name in ("terminated", "truncated"):
            steps[name][:] = False

    path = make_buffer(tmp_path / "b", rng, count=1500, num_envs=1, change=endless)
    with mr.ReplayBuffer.open(path, "r+") as writer:
        client = ask(path)
        before = client.json("episode", "env=0&at=1400")
        assert (before["begin"], before["end"]) == (500, 1500)
        rewards, added = episodes._rewards, []

        def overtaken(*arguments):
            if len(added) < 3:
                steps = healthy_steps(rng, 20, 1, length=1000)
                added.append(writer.extend({name: _first(v) for name, v in steps.items()}))
            return rewards(*arguments)

        monkeypatch.setattr(episodes, "_rewards", overtaken)
        found = client.json("episode", "env=0&at=1400")
        assert found["missing_start"]
        values = writer.get_field("reward", 0, np.arange(found["begin"], found["end"]))
        assert found["begin"] >= 560
        assert found["return"] == pytest.approx(values.sum(dtype=np.float64))
        listed = found["rewards"]
        assert listed["at"] == np.flatnonzero(values).tolist()
        np.testing.assert_array_equal(listed["values"], values[values != 0])


def _first(value):
    if isinstance(value, dict):
        return {name: _first(each) for name, each in value.items()}
    return value[:, 0]


def test_kinds_are_those_of_episodes_that_are_left(ask, full, rng, monkeypatch):
    steps = healthy_steps(rng, 100, 2)
    kinds = episodes.end_kinds
    with mr.ReplayBuffer.open(full, "r+") as writer:

        def overtaken(*arguments):
            writer.extend(steps, final_observation=steps["observation"])
            return kinds(*arguments)

        monkeypatch.setattr(episodes, "end_kinds", overtaken)
        rows = ask(full).json("episodes", "sort=begin")["rows"]
    first = min(row[1] + row[2] for row in rows)
    assert first > 600


@pytest.mark.usefixtures("overwritten")
def test_what_is_compared_is_left(ask, full, tmp_path, rng):
    other = make_buffer(tmp_path / "other", rng)
    assert ask(full, other).json("compare", "c=1")["histograms"]
