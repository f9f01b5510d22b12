"""Policies: what one does wrong names it, and what was expected of it."""

import functools
import sys

import gymnasium as gym
import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer.opening import remove_empty
from mmreplay.cli.run import run
from mmreplay.errors import SchemaError
from mmreplay.recording import recorder
from tests.recording.test_recorder import LoggedEnv, vector

POLICIES = {
    "text": (lambda _: "a", r"an action of .*Discrete\(\[2\]\), got 'a'"),
    "shape": (lambda _: np.zeros(3), r"an action of .*, got array\(\[0., 0., 0.\]\)"),
    "range": (lambda _: np.array([99]), r"an action of .*, got array\(\[99\]\)"),
    "nothing": (lambda _: None, "an action of .*, got None"),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("single", [False, True])
def test_an_action_that_fails_names_policy_action_and_space(tmp_path, name, single):
    policy, told = POLICIES[name]
    env = "CartPole-v1"
    if single:
        env = gym.make(env)
        told = told.replace(r"Multi", "").replace(r"\(\[2\]\)", r"\(2\)")
    with pytest.raises(SchemaError, match=f"policy .*lambda.* must return {told}") as caught:
        mr.record(env, tmp_path / "b", policy, steps=5)
    assert "Return an action that action_space.contains" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_fails_later_keeps_its_rows(tmp_path):
    calls = []

    def policy(_):
        calls.append(1)
        return "a" if len(calls) > 3 else np.array([0])

    with pytest.raises(SchemaError, match=r"policy.*got 'a'") as caught:
        mr.record("CartPole-v1", tmp_path / "b", policy, steps=7)
    assert not [n for n in getattr(caught.value, "__notes__", []) if "is empty" in n]
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert len(buffer) == 3


def test_an_action_that_no_field_takes_names_the_policy(tmp_path):
    with pytest.raises(SchemaError, match=r"policy.*got 1\.5"):
        mr.record(LoggedEnv(), tmp_path / "b", lambda _: 1.5, steps=5)


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize("there", [False, True])
def test_a_recording_without_a_step_leaves_no_folder(tmp_path, engine, there):
    path = tmp_path / "runs" / "b"
    if there:
        path.mkdir(parents=True)
    with pytest.raises(SchemaError, match=r"policy.*got 'a'"):
        mr.record("CartPole-v1", path, lambda _: "a", steps=5, engine=engine)
    left = ["runs", "runs/b"] if there else []
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == left
    assert mr.record("CartPole-v1", path, steps=5, engine=engine).held == 5


def test_a_recording_that_is_interrupted_before_a_step_leaves_no_folder(tmp_path):
    def policy(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mr.record("CartPole-v1", tmp_path / "runs" / "b", policy, steps=5)
    assert list(tmp_path.iterdir()) == []


def test_a_recording_that_fails_removes_no_buffer_and_no_file_of_others(tmp_path):
    mr.record("CartPole-v1", tmp_path / "b", steps=5)
    with mr.ReplayBuffer.open(tmp_path / "b", "r+") as buffer:
        buffer.clear()
    with pytest.raises(SchemaError, match=r"policy.*got 'a'"):
        mr.record("CartPole-v1", tmp_path / "b", lambda _: "a", steps=5)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert len(buffer) == 0

    def leaves_a_file(_):
        (tmp_path / "c" / "notes.txt").write_text("mine")
        return "a"

    with pytest.raises(SchemaError, match=r"policy.*got 'a'"):
        mr.record("CartPole-v1", tmp_path / "c", leaves_a_file, steps=5)
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["notes.txt"]


def test_a_buffer_that_another_writer_opened_is_not_removed(tmp_path, monkeypatch):
    """It was opened between the failure and the removal: its lock is held."""
    opened = []

    def late(path, uuid):
        opened.append(mr.ReplayBuffer.open(path, "r+"))
        remove_empty(path, uuid)

    monkeypatch.setattr(recorder, "remove_empty", late)
    with pytest.raises(SchemaError, match=r"policy.*got 'a'"):
        mr.record("CartPole-v1", tmp_path / "b", lambda _: "a", steps=5)
    opened.pop().close()
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert len(buffer) == 0


def test_a_policy_may_return_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    actions = torch.tensor([[0.5], [-0.25]], requires_grad=True)
    vector_env = gym.make_vec("Pendulum-v1", num_envs=2, vectorization_mode="sync")
    mr.record(vector_env, tmp_path / "v", lambda _: actions, steps=6)
    with mr.ReplayBuffer.open(tmp_path / "v") as buffer:
        found = buffer.gather_all()
    for env_id, value in enumerate([0.5, -0.25]):
        assert set(found["action"][found.env_ids == env_id].ravel()) == {value}
    mr.record(gym.make("CartPole-v1"), tmp_path / "s", lambda _: torch.tensor(1), steps=5)
    with mr.ReplayBuffer.open(tmp_path / "s") as buffer:
        assert buffer.gather_all()["action"].tolist() == [1] * 5
    narrow = actions.detach().bfloat16()
    assert mr.record(vector_env, tmp_path / "n", lambda _: narrow, steps=6).held == 6


def test_tensors_within_an_action_become_arrays(tmp_path):
    torch = pytest.importorskip("torch")

    class Nested(LoggedEnv):
        action_space = gym.spaces.Dict(
            {
                "parts": gym.spaces.Tuple(
                    (gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,), np.float32))
                ),
                "kind": gym.spaces.Discrete(4),
            }
        )

        def step(self, action):
            assert self.action_space.contains(action)
            return super().step(0)

    def policy(_):
        return {"parts": (torch.tensor(2), torch.tensor([0.5, -0.5])), "kind": np.int64(3)}

    mr.record(Nested(), tmp_path / "b", policy, steps=4)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        found = buffer.gather_all()
        found = {name: found[name][~found["final"]] for name in buffer.schema.paths}
        assert found["action/parts/0"].tolist() == [2] * 4
        assert found["action/parts/1"].tolist() == [[0.5, -0.5]] * 4
        assert found["action/kind"].tolist() == [3] * 4


def test_more_environments_than_a_buffer_has_are_refused_before_one_is_made(tmp_path):
    made = []
    gym.register("Counted-v0", entry_point=lambda: made.append(1) or LoggedEnv())
    try:
        with pytest.raises(
            SchemaError, match=r"num_envs must be .* in \[1, 1048576\], got 1000000000"
        ):
            mr.record("Counted-v0", tmp_path / "b", steps=9, num_envs=10**9)
    finally:
        del gym.registry["Counted-v0"]
    assert not made
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_another_width_are_accepted(tmp_path):
    env = gym.make("Pendulum-v1")
    recorded = mr.record(env, tmp_path / "b", lambda _: np.zeros(1), steps=5)
    assert recorded.steps == 5


def test_what_an_environment_raises_by_itself_goes_on_up(tmp_path):
    class Broken(LoggedEnv):
        def step(self, action):
            raise ZeroDivisionError("by itself")

    with pytest.raises(ZeroDivisionError, match="by itself"):
        mr.record(Broken(), tmp_path / "b", lambda _: 1, steps=5)


def test_what_a_policy_raises_goes_on_up_with_its_name(tmp_path):
    def policy(observation):
        raise ZeroDivisionError("boom")

    with pytest.raises(ZeroDivisionError, match="boom") as caught:
        mr.record(LoggedEnv(), tmp_path / "b", policy, steps=5)
    assert "raised by the policy" in caught.value.__notes__[0]
    assert ".policy" in caught.value.__notes__[0]


def test_what_takes_no_observation_is_refused_before_there_is_a_folder(tmp_path):
    def policy(observation, state):
        return 1

    told = "policy must be a function of one observation that returns an action, got"
    with pytest.raises(SchemaError, match=told):
        mr.record(LoggedEnv(), tmp_path / "b", policy, steps=5)
    with pytest.raises(SchemaError, match=r"policy must be a function of one.*got 3"):
        mr.record(LoggedEnv(), tmp_path / "b", 3, steps=5)
    assert not (tmp_path / "b").exists()
    bound = functools.partial(policy, state=None)
    assert mr.record(LoggedEnv(), tmp_path / "b", bound, steps=5).steps == 5


SOURCE = """
def text(observation): return "a"
def fails(observation): raise ValueError("boom")
def leaves(observation): raise SystemExit(0)
def two(a, b): return 0
"""


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("text", 3, "policy text must return an action of "),
        ("fails", 1, "--policy 'acting:fails' raised ValueError: boom. It must return"),
        ("leaves", 1, "--policy 'acting:leaves' raised SystemExit: 0. It must"),
        ("two", 3, "policy must be a function of one observation"),
    ],
)
def test_a_wrong_policy_is_one_line(tmp_path, monkeypatch, capsys, name, code, message):
    (tmp_path / "acting.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "acting", raising=False)
    words = ["record", "CartPole-v1", "b", "--steps", "9", "--policy", f"acting:{name}"]
    assert run(words) == code
    err = capsys.readouterr().err
    assert message in err
    assert (err.count("\n"), err.startswith("mmreplay: ")) == (1, True)


@pytest.mark.parametrize("source", ["def f(:", "raise SystemExit(0)", "1 / 0"])
def test_a_module_that_cannot_be_imported_is_a_usage_error(tmp_path, monkeypatch, capsys, source):
    (tmp_path / "acting.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "acting", raising=False)
    words = ["record", "CartPole-v1", "b", "--steps", "9", "--policy", "acting:f"]
    assert run(words) == 2
    assert "mmreplay: --policy 'acting:f': " in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_errors_in_a_vector_environment_are_reported_likewise(tmp_path, mode):
    env = vector(mode)
    with pytest.raises(SchemaError, match=r"policy.*got 'aaa'"):
        mr.record(env, tmp_path / "b", lambda _: "aaa", steps=5)
