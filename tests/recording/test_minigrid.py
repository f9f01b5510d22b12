"""MiniGrid's missions are recorded, and come back as texts."""

import pytest

import mmreplay as mr

pytest.importorskip("minigrid", reason="minigrid is not installed")
gym = pytest.importorskip("gymnasium")
# minigrid registers its environments when gymnasium is asked for one.
ENV = "BabyAI-GoToLocal-v0"


def played(env, steps):
    """Missions and images that the environment gave, before each action of a policy."""
    seen = []

    def policy(observation):
        seen.append((observation["mission"], observation["image"].copy()))
        return env.action_space.sample()

    return seen, policy


def test_missions_of_one_environment_are_recorded(tmp_path):
    env = gym.make(ENV)
    env.action_space.seed(0)
    seen, policy = played(env, 200)
    report = mr.record(env, tmp_path / "ring", steps=200, seed=0, policy=policy)
    assert report.heap_bytes > 0
    with mr.ReplayBuffer.open(tmp_path / "ring") as buffer:
        schema = buffer.schema
        assert schema["observation/mission"].kind == "text"
        rows = buffer.gather_all()
        steps = ~rows["final"]
        texts = [
            t for t, step in zip(rows["observation/mission"].text(), steps, strict=True) if step
        ]
        assert len(texts) == len(seen) == 200
        given = [m if isinstance(m, str) else m[0] for m, _ in seen]
        assert texts == given
        assert len(set(texts)) > 1
        images = rows["observation/image"][steps]
        for image, (_, expected) in zip(images, seen, strict=True):
            assert (image == expected.reshape(image.shape)).all()
        batch = buffer.sample(8)
        found = schema.to_env(batch)
        assert found["mission"] == tuple(batch["observation/mission"].text())
        space, _ = schema.to_spaces()
        assert all(space["mission"].contains(text) for text in found["mission"])
    env.close()


def test_missions_of_several_environments_are_recorded(tmp_path):
    report = mr.record(ENV, tmp_path / "ring", steps=120, num_envs=3, seed=0)
    assert report.heap_bytes > 0
    with mr.ReplayBuffer.open(tmp_path / "ring") as buffer:
        texts = buffer.sample(64)["observation/mission"].text()
        assert all(text.startswith("go to") for text in texts)


def test_a_ring_that_was_made_without_missions_goes_on(tmp_path):
    env = gym.make(ENV)
    schema = mr.Schema.from_env(env, exclude=["observation/mission"])
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 200, autoreset="disabled"):
        pass
    with pytest.warns(RuntimeWarning, match="observation/mission"):
        mr.record(env, tmp_path / "ring", steps=20, seed=0)
    with mr.ReplayBuffer.open(tmp_path / "ring") as buffer:
        assert "observation/mission" not in buffer.schema
        assert len(buffer) >= 20
    env.close()
