"""Two columns of a foreign source that would become one field, in each format."""

import gzip
import json

import h5py
import numpy as np
import pyarrow as pa
import pytest
import torch
import zarr

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.errors import FormatError, SchemaError, SourceError
from tests.convert.foreign import (
    test_d4rl,
    test_dqn_replay,
    test_lerobot,
    test_minari,
    test_pickles,
    test_rlds,
    test_robomimic,
    test_tensors,
)
from tests.storage.zarr_groups import put

DONE = {"done": "terminated"}


def lerobot(own, other, path=None, **more):
    def make(folder, rng):
        data = test_lerobot.frames(rng)
        for name in (own, other):
            data.setdefault(name, rng.random((11, 2)).astype(np.float32))
        made = test_lerobot.write(folder / "set", data)
        return made, {name: data[name] for name in (own, other)}, DONE | more

    return make


def hdf5(path, changes):
    """Add datasets to a file, each by the values of another one."""
    with h5py.File(path, "a") as file:
        groups = [f"data/{name}" for name in file["data"]] if "data" in file else ["/"]
        held = {name: [] for pair in changes for name in pair}
        for group in groups:
            for own, other in changes:
                values = file[group][own][()]
                file[group][other] = values[..., ::-1].copy() if values.ndim > 1 else (1 - values)
                held[own].append(values)
                held[other].append(file[group][other][()])
    return {name: np.concatenate(each) for name, each in held.items()}


def robomimic(own, other):
    def make(folder, rng):
        made = test_robomimic.demonstrations(rng, (4, 3))
        path = test_robomimic.write(folder / "a.hdf5", made, leave=("next_obs",))
        return path, hdf5(path, [(own, other)]), {}

    return make


def d4rl(own, other):
    def make(folder, rng):
        path = test_d4rl.write(folder / "a.hdf5", test_d4rl.episodes(rng))
        return path, hdf5(path, [(own, other)]), {}

    return make


def minari(folder, rng):
    made = test_minari.write(folder / "set", "hdf5", test_minari.made(rng))
    held = {"observations/_index_0": [], "observations/0": []}
    with h5py.File(made / "data" / "main_data.hdf5", "a") as file:
        for episode in file.values():
            seen = episode["observations"][()]
            del episode["observations"]
            for number, (name, each) in enumerate(held.items()):
                episode[name] = seen + number
                each.append(seen + number)
    return made, {name: np.concatenate(each) for name, each in held.items()}, {}


def pt(nested, flat, tree):
    def make(folder, rng):
        held = {
            name: torch.from_numpy(rng.random((7, 2)).astype(np.float32)) for name in (nested, flat)
        }
        rest = {"action": torch.zeros(7, 1), "done": torch.zeros(7)}
        torch.save(rest | tree(*held.values()), folder / "a.pt")
        return folder / "a.pt", {n: v.numpy() for n, v in held.items()}, {}

    return make


def skrl(folder, rng):
    held = {
        name: torch.from_numpy(rng.random((7, 1, 2)).astype(np.float32))
        for name in ("states/x", "['states']['x']")
    }
    flat, nested = held.values()
    rest = {"action": torch.zeros(7, 1, 1), "done": torch.zeros(7, 1, 1)}
    torch.save(rest | {"states/x": flat, "states": {"x": nested}}, folder / "a.pt")
    return folder / "a.pt", {n: v.numpy() for n, v in held.items()}, {"layout": "skrl"}


def zarr_group(folder, rng):
    group = zarr.open_group(folder / "a.zarr", mode="w")
    held = {}
    for name in ("data/obs", "obs", "data/action"):
        held[name] = rng.random((20, 3)).astype(np.float32)
        put(group, name, held[name], chunks=(5, 3))
    put(group, "meta/episode_ends", np.array([8, 20]), chunks=(2,))
    return folder / "a.zarr", {n: held[n] for n in ("data/obs", "obs")}, {}


def sb3(folder, rng):
    state = test_pickles.steps(rng, envs=1, full=False, pos=6)
    for name in ("observations", "next_observations"):
        state[name] = {1: state[name], "1": state[name] + 1}
    path = test_pickles.save(folder, **state)
    held = {
        own: state["observations"][key][:6, 0]
        for own, key in (("observations[1]", 1), ("observations/1", "1"))
    }
    return path, held, {"allow_pickle": True}


def alf(folder, rng):
    ring, _ = test_tensors.played(rng, envs=1, rows=9)
    ring.state["observation|x"] = ring.state["time_step|observation|x"] + 1
    path = ring.save(folder / "a.pt", prefix="")
    names = ("time_step|observation|x", "observation|x")
    return path, {name: ring.state[name][0, :9] for name in names}, {}


def pytorchrl(folder, rng):
    data = test_tensors.storage(rng, processes=1)
    data["action"] = data["Action"] + 1
    path = test_tensors.save(folder / "a.pt", data, size=10, step=0)
    held = {name: data[name][:, 0] for name in ("Action", "action")}
    return path, held, DONE


def dqn(folder, rng):
    ring, added, _ = test_dqn_replay.played(rng, count=10, slots=30, stack=1)
    made = test_dqn_replay.write(folder / "logs", ring, added)
    other = made / "$store$_reward_ckpt.00.gz"
    with gzip.open(other, "wb") as file:
        np.save(file, ring["reward"] + 1)
    name = "$store$_reward_ckpt.0.gz"
    held = {name: ring["reward"][:added], other.name: ring["reward"][:added] + 1}
    return made, held, {}


SOURCES = {
    "lerobot, reward": (lerobot("next.reward", "reward"), "reward"),
    "lerobot, slash": (lerobot("observation.state", "observation/state"), "observation/state"),
    "robomimic, obs": (robomimic("obs/pose", "observation/pose"), "observation/pose"),
    "robomimic, action": (robomimic("actions", "action"), "action"),
    "robomimic, done": (robomimic("dones", "done"), "done"),
    "d4rl, reward": (d4rl("rewards", "reward"), "reward"),
    "d4rl, action": (d4rl("actions", "action"), "action"),
    "minari": (minari, "observation/0"),
    "pt, flat": (pt("['obs']['a']", "obs/a", lambda x, y: {"obs": {"a": x}, "obs/a": y}), "obs/a"),
    "pt, numbers": (
        pt("['obs'][0]", "['obs']['0']", lambda x, y: {"obs": {0: x, "0": y}}),
        "obs/0",
    ),
    "pt, skrl": (skrl, "states/x"),
    "zarr": (zarr_group, "obs"),
    "sb3": (sb3, "observation/1"),
    "alf": (alf, "observation/x"),
    "pytorchrl": (pytorchrl, "action"),
    "dqn-replay": (dqn, "reward"),
}


OTHERS = {"robomimic, action": "reward", "d4rl, action": "reward", "pytorchrl": "reward"}
"""Another field of the source, where it is not the action."""


@pytest.mark.parametrize("source", SOURCES)
def test_two_columns_of_one_field_are_refused_and_one_can_be_selected(source, tmp_path, rng):
    make, path = SOURCES[source]
    where, held, options = make(tmp_path, rng)
    for more in ({}, {"strict": True}):
        with pytest.raises(SourceError) as error:
            mr.load(where, tmp_path / "buffer", **options, **more)
        text = str(error.value)
        assert all(repr(own) in text for own in held)
        assert f"both become field {path!r}. Pass fields= (--fields) with one" in text
        assert not (tmp_path / "buffer").exists()
    with pytest.raises(SourceError, match="both become field"):
        mr.load(where, tmp_path / "buffer", fields=[*held], **options)
    other = OTHERS.get(source, "action")
    for own, values in held.items():
        mr.load(where, tmp_path / "buffer", fields=[other, own], overwrite=True, **options)
        with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
            # The done of robomimic is what both ends are read from.
            ends = {"terminated", "truncated"} if own == "dones" else set()
            assert set(buffer.schema.paths) == {path, other} | ends
            result = buffer.gather_all()[path]
        assert same(result, values), own
    # Neither of them is wanted.
    mr.load(where, tmp_path / "other", fields=[other], **options)
    with mr.ReplayBuffer.open(tmp_path / "other") as buffer:
        assert buffer.schema.paths == (other,)


def same(result, values):
    """Return whether values are those of the rows.

    Final rows may stand among the rows, and the newest row may be no step.
    """
    result = np.asarray(result).reshape(len(result), -1).tolist()
    values = np.asarray(values).reshape(len(values), -1).tolist()
    few, many = sorted((result, values), key=len)
    left = iter(many)
    return len(few) > 3 and all(any(row == each for each in left) for row in few)


def with_end(kind):
    """A source with a column of the name of an end, what ends are read from, and it."""

    def make(folder, rng):
        if kind == "lerobot":
            data = test_lerobot.frames(rng) | {"terminated": np.ones(11, bool)}
            return test_lerobot.write(folder / "set", data), "terminated", "next.done"
        if kind == "lerobot without done":
            data = test_lerobot.frames(rng) | {"truncated": np.ones(11, bool)}
            del data["next.done"]
            made = test_lerobot.write(folder / "set", data)
            return made, "truncated", "episode_index"
        if kind == "robomimic":
            made = test_robomimic.demonstrations(rng, (4, 3))
            path = test_robomimic.write(folder / "a.hdf5", made)
            hdf5(path, [("dones", "terminated")])
            return path, "terminated", "dones"
        if kind == "d4rl":
            path = test_d4rl.write(folder / "a.hdf5", test_d4rl.episodes(rng))
            hdf5(path, [("timeouts", "truncated")])
            return path, "truncated", "timeouts"
        if kind == "rlds":
            examples, _ = test_rlds.episodes(rng)
            features = test_rlds.FEATURES | {"truncated": test_rlds.tensor("bool")}
            for each in examples:
                each["steps/truncated"] = each["steps/is_last"]
            made = test_rlds.write(folder / "set", examples, features=features)
            return made, "truncated", "is_last"
        ring, added, _ = test_dqn_replay.played(rng)
        ring["terminated"] = 1 - ring["terminal"]
        made = test_dqn_replay.write(folder / "logs", ring, added)
        names = (f"$store$_{name}_ckpt.0.gz" for name in ("terminated", "terminal"))
        return made, *names

    return make


@pytest.mark.parametrize(
    "kind", ["lerobot", "lerobot without done", "robomimic", "d4rl", "rlds", "dqn-replay"]
)
def test_a_column_never_hides_behind_the_episode_ends(kind, tmp_path, rng):
    where, column, end = with_end(kind)(tmp_path, rng)
    with pytest.raises(SourceError) as error:
        mr.load(where, tmp_path / "buffer", strict=True)
    assert f"columns {column!r} and {end!r} both become field" in str(error.value)
    assert f"with {end!r} in place of {column!r}" in str(error.value)
    with pytest.raises(SourceError, match="in place of"):
        mr.load(where, tmp_path / "buffer", fields=["observation", column])
    mr.load(where, tmp_path / "buffer", fields=["observation", end])
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        rows = buffer.gather_all()
        name = "truncated" if "truncated" in column else "terminated"
        # All of them are true in the column, or where no end is.
        assert not rows[name].all()
        assert len(buffer.episodes.episodes(0).begin) > 1


def test_a_number_called_task_and_the_texts_of_tasks_are_two_columns(tmp_path, rng):
    data = test_lerobot.frames(rng) | {"task": np.arange(11)}
    folder = test_lerobot.write(tmp_path / "set", data)
    test_lerobot.write_tasks(folder, "v3.0")
    with pytest.raises(SourceError, match="columns 'task' and 'meta/tasks' both bec"):
        mr.load(folder, tmp_path / "buffer")
    mr.load(folder, tmp_path / "numbers", fields=["action", "task"])
    mr.load(folder, tmp_path / "texts", fields=["action", "meta/tasks"])
    with mr.ReplayBuffer.open(tmp_path / "numbers") as buffer:
        assert buffer.gather_all()["task"].tolist() == list(range(11))
    with mr.ReplayBuffer.open(tmp_path / "texts") as buffer:
        assert buffer.gather_all()["task"].text() == [test_lerobot.TASKS[0]] * 11


def test_a_column_that_is_a_branch_too_is_joined_by_its_name(tmp_path, rng):
    data = test_lerobot.frames(rng)
    data["action.original"] = rng.random((11, 2)).astype(np.float32)
    folder = test_lerobot.write(tmp_path / "set", data)
    report = mr.load(folder, tmp_path / "buffer", done="terminated", strict=True)
    assert (
        "column 'action.original' became field 'action_original', as another column's "
        "path is the beginning of 'action/original'" in report.notes
    )
    for name in ("action_original", "action.original", "action/original"):
        mr.load(folder, tmp_path / "one", fields=[name], overwrite=True)
        with mr.ReplayBuffer.open(tmp_path / "one") as buffer:
            assert buffer.schema.paths == ("action_original",)
            rows = buffer.gather_all()
        np.testing.assert_array_equal(rows["action_original"], data["action.original"])


def test_a_column_that_is_joined_never_meets_another(tmp_path, rng):
    names = ("action.original", "action_original", "observation.state.x")
    data = test_lerobot.frames(rng)
    data |= {name: rng.random((11, 2)).astype(np.float32) for name in names}
    data["action_original_2.x"] = rng.random((11, 2)).astype(np.float32)
    folder = test_lerobot.write(tmp_path / "set", data)
    mr.load(folder, tmp_path / "buffer", done="terminated", strict=True)
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        rows = buffer.gather_all()
    for own, path in (
        ("action", "action"),
        ("action.original", "action_original_3"),
        ("action_original", "action_original"),
        ("action_original_2.x", "action_original_2/x"),
        ("observation.state", "observation/state"),
        ("observation.state.x", "observation/state_x"),
    ):
        np.testing.assert_array_equal(rows[path], data[own])


def test_arrays_of_a_group_are_joined_too(tmp_path, rng):
    names = ("data/action", "action/x", "action_x")
    values = {name: rng.random(6) for name in names}
    group = zarr.open_group(tmp_path / "group", mode="w")
    for name, data in {"obs": rng.random((6, 2)), **values}.items():
        put(group, name, data)
    with mr.ReplayBuffer.open(mr.ZarrSource(tmp_path / "group")) as buffer:
        rows = buffer.gather_all()
    mr.load(tmp_path / "group", tmp_path / "one", fields=["action/x"])
    with mr.ReplayBuffer.open(tmp_path / "one") as buffer:
        assert buffer.gather_all()["action_x_2"].tolist() == values["action/x"].tolist()
    for own, path in zip(names, ("action", "action_x_2", "action_x"), strict=True):
        np.testing.assert_array_equal(rows[path], values[own])


def test_the_command_takes_names_of_the_source(tmp_path, rng, capsys):
    data = test_lerobot.frames(rng) | {"reward": np.zeros(11, np.float32)}
    folder = test_lerobot.write(tmp_path / "set", data)
    target = tmp_path / "buffer"
    arguments = ["convert", str(folder), str(target)]
    assert run(arguments) != 0
    assert "columns 'next.reward' and 'reward' both" in capsys.readouterr().err
    arguments += ["--fields", "observation, action, next.reward, next.done"]
    assert run(arguments) == 0
    with mr.ReplayBuffer.open(target) as buffer:
        assert buffer.schema.paths == (
            "observation/state",
            "action",
            "reward",
            "terminated",
            "truncated",
        )
        rewards = buffer.gather_all()["reward"]
    np.testing.assert_array_equal(rewards, data["next.reward"])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("next.rewrd", "next.reward"),
        ("rewrd", "reward"),
        ("observatoin", "observation"),
        ("observation.stat", "observation.state"),
        ("observation/stat", "observation/state"),
    ],
)
def test_a_name_that_is_misspelt_is_guessed_from_both_kinds(tmp_path, rng, typed, meant):
    folder = test_lerobot.write(tmp_path / "set", test_lerobot.frames(rng))
    match = rf"fields must be .*, got '{typed}'\. Did you mean '{meant}'\?$"
    with pytest.raises(SchemaError, match=match):
        mr.load(folder, tmp_path / "buffer", fields=["action", typed])
    with pytest.raises(SchemaError, match=r"got 'zzz'\. Check the spelling\.$"):
        mr.load(folder, tmp_path / "buffer", fields=["zzz"])


def test_a_struct_and_a_column_of_its_path_are_refused(tmp_path, rng):
    data = test_lerobot.frames(rng)
    folder = test_lerobot.write(tmp_path / "set", data, files=1)
    path = folder / "data" / "chunk-000" / "file-000.parquet"
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    struct = pa.StructArray.from_arrays([pa.array(np.ones(11))], ["x"])
    table = table.append_column("a", struct)
    pq.write_table(table.append_column("a/x", pa.array(np.zeros(11))), path)
    with pytest.raises(SourceError, match="column before it both hold 'a/x', by its"):
        mr.load(folder, tmp_path / "buffer")


def test_two_features_of_one_path_are_refused(tmp_path, rng):
    examples, _ = test_rlds.episodes(rng)
    features = {"observation/pose": test_rlds.tensor("float32", 3)}
    folder = test_rlds.write(tmp_path / "set", examples, features=test_rlds.FEATURES | features)
    with pytest.raises(FormatError, match="has two features 'observation/pose', by"):
        mr.load(folder, tmp_path / "buffer")


@pytest.mark.parametrize("name", ["my_index_0", "_index_a", "x_index_1_y"])
def test_a_key_of_minari_that_is_no_item_of_a_tuple_keeps_its_name(name, tmp_path, rng):
    folder = test_minari.write(tmp_path / "set", "hdf5", test_minari.made(rng))
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        for episode in file.values():
            seen = episode["observations"][()]
            del episode["observations"]
            episode[f"observations/{name}"] = seen
    mr.load(folder, tmp_path / "buffer")
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        assert f"observation/{name}" in buffer.schema
    assert json.loads((folder / "data" / "metadata.json").read_text())
