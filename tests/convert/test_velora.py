"""velora's pair, out and in, beside a list of transitions."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mmreplay as mr
from mmreplay.convert import registry
from mmreplay.disk import files
from mmreplay.errors import CorruptError, FormatError, SchemaError, SourceError

FIELDS = {
    "observation/a": mr.Field((2,), "float32"),
    "observation/b": mr.Field((), "uint8"),
    "action": mr.Field((1,), "float32"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}
NEXT_OBSERVATION = {
    "next_observation/a": mr.Field((2,), "float32"),
    "next_observation/b": mr.Field((), "uint8"),
}
KEYS = ["capacity", "state_dim", "action_dim", "hidden_dim", "position", "size", "device"]


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)


def state(env, number):
    """The observation before a step: of environment, step and a small number."""
    return {"a": np.array([env, number], np.float32), "b": np.uint8((env + number) % 251)}


def flat(observation):
    return [*observation["a"].tolist(), float(observation["b"])]


def play(buffer, steps, stored, autoreset, seed):
    """Play and return what a list of transitions would be."""
    rng = np.random.default_rng(seed)
    envs = buffer.num_envs
    number = np.zeros(envs, int)
    transitions = [[] for _ in range(envs)]
    for _ in range(steps):
        now = [state(env, number[env]) for env in range(envs)]
        after = [state(env, number[env] + 1) for env in range(envs)]
        terminated, truncated = rng.random(envs) < 0.1, rng.random(envs) < 0.1
        action = rng.random((envs, 1)).astype(np.float32)
        reward = rng.random(envs).astype(np.float32)

        def stack(values):
            return {key: np.stack([one[key] for one in values]) for key in "ab"}

        given = {
            "observation": stack(now),
            "action": action,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
        }
        if stored:
            buffer.add(given | {"next_observation": stack(after)})
        elif autoreset == "same_step":
            buffer.add(given, final_observation=stack(after))
        else:
            buffer.add(given)
        done = terminated | truncated
        for env in range(envs):
            follows = flat(after[env])
            if done[env] and not stored and autoreset == "disabled":
                follows = flat(now[env]) if terminated[env] else None
            row = (flat(now[env]), action[env].tolist(), reward[env], follows)
            transitions[env].append((*row, float(done[env])))
        number = np.where(done, number + 10, number + 1)
    return transitions


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("autoreset", ["disabled", "same_step"])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_rows_are_the_transitions(tmp_path, num_envs, autoreset, stored, seed):
    schema = mr.Schema.from_flat(FIELDS | (NEXT_OBSERVATION if stored else {}))
    with mr.ReplayBuffer.create(
        tmp_path / "b", schema, 500, num_envs, autoreset=autoreset
    ) as buffer:
        lists = play(buffer, 60, stored, autoreset, seed)
        if not stored:
            for each in lists:
                # Nobody knows what follows the newest step, unless it ended.
                if not each[-1][4]:
                    each[-1] = (*each[-1][:3], None, 0.0)
        want = [row for each in lists for row in each if row[3] is not None]
        report = mr.export(buffer, tmp_path / "v", format="safetensors", layout="velora")
    lost = sum(len(each) for each in lists) - len(want)
    assert (f"{lost} steps were left out" in "".join(report.notes)) == (lost > 0)
    metadata = json.loads((tmp_path / "v" / "buffer_metadata.json").read_text())
    assert list(metadata) == KEYS
    assert metadata["size"] == len(want)
    assert metadata["position"] == len(want) % metadata["capacity"]
    assert (metadata["state_dim"], metadata["action_dim"]) == (3, 1)
    found = load_file(tmp_path / "v" / "buffer_state.safetensors")
    size = metadata["size"]
    assert {tuple(t.shape[:1]) for t in found.values()} == {(metadata["capacity"],)}
    states, actions, rewards, nexts, dones = (
        found[name][:size].tolist()
        for name in ("states", "actions", "rewards", "next_states", "dones")
    )
    assert states == [row[0] for row in want]
    np.testing.assert_array_equal(np.array(actions), np.array([r[1] for r in want]))
    np.testing.assert_array_equal(np.ravel(rewards), [row[2] for row in want])
    assert nexts == [row[3] for row in want]
    assert np.ravel(dones).tolist() == [row[4] for row in want]
    assert not any(t[size:].any() for t in found.values())


def test_steps_wait_for_the_next_block(tmp_path, monkeypatch):
    schema = mr.Schema.from_flat(FIELDS)
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 500, 2, autoreset="disabled") as buffer:
        play(buffer, 40, False, "disabled", 3)
        for name, rows in (("v", None), ("w", 1), ("x", 7)):
            if rows is not None:
                monkeypatch.setattr(
                    "mmreplay.convert.buffer_reader.default_rows", lambda _, n=rows: n
                )
            mr.export(buffer, tmp_path / name, format="safetensors", layout="velora")
    whole = (tmp_path / "v" / "buffer_state.safetensors").read_bytes()
    for name in "wx":
        assert (tmp_path / name / "buffer_state.safetensors").read_bytes() == whole


def velora(folder, adds, capacity=4, prefix="buffer_", **change):
    """What velora's own save leaves after so many adds into a ring."""
    folder.mkdir(exist_ok=True)
    tensors = {
        "states": torch.zeros(capacity, 2),
        "actions": torch.zeros(capacity, 1),
        "rewards": torch.zeros(capacity, 1),
        "next_states": torch.zeros(capacity, 2),
        "dones": torch.zeros(capacity, 1),
        "hiddens": torch.zeros(capacity, 3),
    }
    for number in range(adds):
        at = number % capacity
        for name, tensor in tensors.items():
            tensor[at] = number + (name == "next_states")
        tensors["dones"][at] = number % 3 == 2
    metadata = dict(
        zip(KEYS, (capacity, 2, 1, 3, adds % capacity, min(adds, capacity), None), strict=True)
    )
    (folder / f"{prefix}metadata.json").write_text(json.dumps(metadata | change))
    save_file(tensors, folder / f"{prefix}state.safetensors")
    return folder


@pytest.mark.parametrize("adds", [0, 1, 3, 4, 6, 9])
@pytest.mark.parametrize("by", ["folder", "file"])
def test_a_pair_comes_in_in_the_order_of_its_adds(tmp_path, adds, by):
    folder = velora(tmp_path / "v", adds)
    path = folder if by == "folder" else folder / "buffer_state.safetensors"
    report = mr.load(path, tmp_path / "b")
    want = list(range(max(0, adds - 4), adds))
    assert f"velora's pair: {len(want)} of 4 rows were written" in report.notes[0]
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        rows = buffer.gather_all()
        assert np.asarray(rows["states"])[:, 0].tolist() == want
        assert np.asarray(rows["next_states"])[:, 1].tolist() == [n + 1 for n in want]
        assert np.asarray(rows["hiddens"]).shape == (len(want), 3)
        assert np.asarray(rows["dones"]).tolist() == [n % 3 == 2 for n in want]
        roles = {"observation": "states", "next_observation": "next_states"}
        for role, name in {**roles, "reward": "rewards", "action": "actions"}.items():
            assert buffer.schema.role(role) == name
    assert not mr.verify_buffer(tmp_path / "b").findings


def test_what_was_written_comes_in_again_and_under_any_prefix(tmp_path):
    schema = mr.Schema.from_flat(FIELDS | NEXT_OBSERVATION)
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 500, 2, autoreset="disabled") as buffer:
        play(buffer, 30, True, "disabled", 5)
        options = {"format": "safetensors", "layout": "velora", "prefix": "v1.2_"}
        mr.export(buffer, tmp_path / "v", **options)
        mr.export(buffer, tmp_path / "v", overwrite=True, **options)
        names = sorted(path.name for path in (tmp_path / "v").iterdir())
        assert names == ["v1.2_metadata.json", "v1.2_state.safetensors"]
        mr.load(tmp_path / "v", tmp_path / "c")
        with mr.ReplayBuffer.open(tmp_path / "c") as loaded:
            rewards = np.asarray(buffer.gather_all()["reward"])
            np.testing.assert_array_equal(loaded.gather_all()["rewards"], rewards)


def test_an_agents_checkpoint_is_known(tmp_path):
    folder = velora(tmp_path / "v", 6)
    inner = json.loads((folder / "buffer_metadata.json").read_text())
    (folder / "buffer_metadata.json").unlink()
    (folder / "metadata.json").write_text(json.dumps({"model": {}, "buffer": inner}))
    assert mr.load(folder, tmp_path / "b").rows == 4
    for name in ("model", "optim"):
        save_file({"actor.weight": torch.zeros(3)}, folder / f"{name}_state.safetensors")
    assert registry.source_format(folder).name == "safetensors-folder"
    mr.load(folder, tmp_path / "c")
    with mr.ReplayBuffer.open(tmp_path / "b") as one, mr.ReplayBuffer.open(tmp_path / "c") as other:
        rows, again = one.gather_all(), other.gather_all()
        assert rows.fields.keys() == again.fields.keys()
        assert all((rows[path] == again[path]).all() for path in one.schema.paths)
    (folder / "buffer_state.safetensors").unlink()
    with pytest.raises(
        FormatError, match=r"v is a checkpoint of velora without its buffer\. Save it with buffer=T"
    ):
        mr.load(folder, tmp_path / "d")


def test_what_does_not_fit_together_is_a_doubt_or_an_error(tmp_path):
    doubtful = velora(tmp_path / "v", 3, capacity=4)
    path = doubtful / "buffer_metadata.json"
    good = json.loads(path.read_text())
    for change, message in (
        ({"capacity": 99}, "says capacity 99, but the tensors have 4 rows"),
        ({"position": 1}, "says position 1 and size 3 of 4, which does not"),
    ):
        path.write_text(json.dumps(good | change))
        assert message in "".join(mr.load(doubtful, tmp_path / "b").doubts)
        with pytest.raises(SourceError, match=message):
            mr.load(doubtful, tmp_path / "c", strict=True)
        files.remove_tree(tmp_path / "b")
    for change, error, message in (
        ({"size": 5}, CorruptError, "must be within the 4 rows of .*, got 5 and"),
        ({"position": 4}, CorruptError, "The two files are not of the same save"),
        ({"state_dim": 3}, FormatError, r"'(next_)?states' must .* got float32\[4, 2\]"),
        ({"size": -1}, FormatError, "size must be an integer .* got -1"),
        ({"size": "3"}, FormatError, "size must be an integer .* got 3"),
        ({"buffer": 3}, FormatError, "capacity must be .* got None"),
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(error, match=message) as caught:
            mr.load(doubtful, tmp_path / "c")
        assert str(doubtful) in str(caught.value)
    assert not (tmp_path / "c").exists()


def test_other_tensors_are_refused(tmp_path):
    folder = velora(tmp_path / "v", 3)
    save_file({"states": torch.zeros(4, 2)}, folder / "buffer_state.safetensors")
    with pytest.raises(FormatError, match="must hold the tensors states, act"):
        mr.load(folder, tmp_path / "b")
    (folder / "buffer_metadata.json").unlink()
    with pytest.raises(FormatError, match="is not a pair of velora's files,"):
        mr.load(folder / "buffer_state.safetensors", tmp_path / "b", layout="velora")


def test_numbers_that_float32_cannot_hold_are_a_doubt(tmp_path):
    schema = mr.Schema.from_flat(FIELDS | {"reward": mr.Field((), "float64")} | NEXT_OBSERVATION)
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 9) as buffer:
        play(buffer, 4, True, "disabled", 1)
        options = {"format": "safetensors", "layout": "velora"}
        # float32 rewards were given, which float64 holds, and gives back.
        assert mr.export(buffer, tmp_path / "v", **options).doubts == ()
        buffer.add(
            observation=state(0, 1),
            next_observation=state(0, 2),
            action=[0.5],
            reward=0.1,
            terminated=False,
            truncated=False,
        )
        report = mr.export(buffer, tmp_path / "w", **options)
    assert "field 'reward' of float64 was rounded to float32" in report.doubts[0]


@pytest.mark.parametrize(
    ("drop", "options", "message"),
    [
        ("action", {"layout": "velora"}, "role 'action' has no field, but velora's"),
        ("", {"layout": "skrl"}, "layout must be 'velora', or None for mmreplay's own, got"),
        (
            "",
            {"layout": "velora", "prefix": "a/b"},
            r"a file's name, such as 'buffer_', got 'a/b'\.",
        ),
        (
            "",
            {"layout": "velora", "part_bytes": 5e9},
            r"which is one pair of files, got 5000000000\.0\. Leave one",
        ),
        ("", {"prefix": "a_"}, r"prefix needs layout='velora', got 'a_' without a layout\."),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(tmp_path, drop, options, message):
    fields = {path: each for path, each in FIELDS.items() if path != drop}
    schema = mr.Schema.from_flat(fields)
    with (
        mr.ReplayBuffer.create(tmp_path / "b", schema, 9) as buffer,
        pytest.raises(SchemaError, match=message),
    ):
        mr.export(buffer, tmp_path / "v", format="safetensors", **options)
    assert not (tmp_path / "v").exists()


def test_foreign_tensors_next_to_metadata_are_no_pair(tmp_path):
    schema = mr.Schema.from_flat(FIELDS)
    (tmp_path / "metadata.json").write_text('{"project": "mine"}')
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 500) as buffer:
        play(buffer, 5, False, "disabled", 1)
        mr.export(buffer, tmp_path / "env_state.safetensors")
    assert mr.load(tmp_path / "env_state.safetensors", tmp_path / "c").rows == 5
    with mr.ReplayBuffer.open(tmp_path / "c") as loaded:
        assert loaded.schema == schema
    save_file({"states": torch.zeros(4, 2)}, tmp_path / "my_state.safetensors")
    assert mr.load(tmp_path / "my_state.safetensors", tmp_path / "d").rows == 4
