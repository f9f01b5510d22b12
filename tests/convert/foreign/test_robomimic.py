"""robomimic's files, written by h5py as robomimic writes them."""

import h5py
import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert import registry
from mmreplay.errors import FormatError, SchemaError, SourceError
from tests.convert.foreign.oracle import assert_same, drawn, joined


def demonstrations(rng, lengths=(4, 1, 12)):
    found = []
    for length in lengths:
        seen = rng.random((length + 1, 3))
        image = rng.integers(0, 256, (length + 1, 4, 4, 3), np.uint8)
        done = np.zeros(length, bool)
        done[-1] = length != 1
        found.append(
            {
                "observation/pose": seen[:-1],
                "next_observation/pose": seen[1:],
                "observation/image": image[:-1],
                "next_observation/image": image[1:],
                "action": rng.random((length, 2)),
                "reward": rng.random(length),
                "done": done.astype(np.int64),
                "terminated": done,
                "truncated": ~done & (np.arange(length) == length - 1),
                "states": rng.random((length, 5)),
            }
        )
    return found


def write(path, demos, leave=()):
    names = {"observation": "obs", "next_observation": "next_obs"}
    names |= {"action": "actions", "reward": "rewards", "done": "dones"}
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(len(demo["action"]) for demo in demos)
        data.attrs["env_args"] = '{"env_name": "Lift"}'
        for number, demo in enumerate(demos):
            group = data.create_group(f"demo_{number * 9}")
            group.attrs["num_samples"] = len(demo["action"])
            for path_, values in demo.items():
                top, slash, rest = path_.partition("/")
                name = names.get(top, top)
                if name not in (*leave, "terminated", "truncated"):
                    group.create_dataset(name + slash + rest, data=values)
        file["mask/train"] = np.array([b"demo_0", b"demo_18"])
    return path


OBSERVATIONS = ["observation/pose", "observation/image"]


def test_every_step_comes_with_what_followed_it(tmp_path, rng):
    found = demonstrations(rng)
    path = write(tmp_path / "a.hdf5", found)
    assert registry.source_format(path).name == "robomimic"
    report = mr.load(path, tmp_path / "buffer", strict=True)
    assert (report.rows, report.episodes) == (17 + 3, 3)
    got, left = drawn(tmp_path / "buffer", OBSERVATIONS)
    assert left == 0
    assert_same(got, joined(found))
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        told = buffer.metadata.user["robomimic"]["env_args"]
    assert told == '{"env_name": "Lift"}'


def test_a_filter_chooses_demonstrations(tmp_path, rng):
    found = demonstrations(rng)
    path = write(tmp_path / "a.hdf5", found)
    mr.load(path, tmp_path / "buffer", filter="train")
    got, _ = drawn(tmp_path / "buffer", OBSERVATIONS)
    assert_same(got, joined([found[0], found[2]]))
    with h5py.File(path, "a") as file:
        file.create_group("mask/group")
    for name in ("valid", "group"):
        with pytest.raises(SchemaError, match=rf"filter must be one of train in .*, got '{name}'"):
            mr.load(path, tmp_path / "other", filter=name)


@pytest.mark.parametrize(
    "names",
    [
        ("traj_0", "traj_2", "traj_10"),
        ("demo_0", "demo_9", "episode_1"),
        ("demo_007", "demo_08", "demo_9"),
        ("a", "b", "c"),
        ("0", "1", "10"),
    ],
)
def test_demonstrations_of_other_names_are_read_in_their_order(tmp_path, rng, names):
    found = demonstrations(rng)
    path = write(tmp_path / "a.hdf5", found)
    with h5py.File(path, "a") as file:
        for number, name in enumerate(names):
            file.move(f"data/demo_{number * 9}", f"data/tmp_{name}")
        for name in names:
            file.move(f"data/tmp_{name}", f"data/{name}")
        del file["mask/train"]
        file["mask/train"] = np.array([names[0].encode(), names[2].encode()])
        file["data/about"] = np.zeros(3)
    assert registry.source_format(path).name == "robomimic"
    report = mr.load(path, tmp_path / "buffer", strict=True)
    assert "'data/about' is no demonstration, and was left out" in report.notes
    others = [name for name in names if not name.startswith("demo_")]
    told = f"{len(others)} demonstrations have other names than demo_<n>, such as"
    assert any(told in note for note in report.notes) == bool(others)
    assert_same(drawn(tmp_path / "buffer", OBSERVATIONS)[0], joined(found))
    mr.load(path, tmp_path / "some", filter="train", strict=True)
    some, _ = drawn(tmp_path / "some", OBSERVATIONS)
    assert_same(some, joined([found[0], found[2]]))


def test_groups_without_actions_and_lost_names_of_a_filter_are_doubts(tmp_path, rng):
    path = write(tmp_path / "a.hdf5", demonstrations(rng))
    with h5py.File(path, "a") as file:
        file["data/episode_3/obs/pose"] = np.zeros((4, 3))
        del file["mask/train"]
        file["mask/train"] = np.array([b"demo_0", b"demo_70", b"demo_8"])
    report = mr.load(path, tmp_path / "buffer", filter="train")
    assert report.doubts[:2] == (
        "group 'data/episode_3' has no 'actions', and was left out",
        "filter 'train' names 2 demonstrations that are not in the file, such as 'demo_8'",
    )
    with pytest.raises(SourceError, match="group 'data/episode_3' has no 'actions'"):
        mr.load(path, tmp_path / "strict", strict=True)


def test_steps_done_within_a_demonstration_are_a_doubt_and_no_ends(tmp_path, rng):
    found = demonstrations(rng)
    found[2]["done"][3:] = 1
    path = write(tmp_path / "a.hdf5", found)
    report = mr.load(path, tmp_path / "buffer")
    assert "8 steps are done within a demonstration" in report.doubts[0]
    got, _ = drawn(tmp_path / "buffer", OBSERVATIONS)
    assert_same(got, joined(found))


def test_without_next_observations_the_last_steps_follow_is_not_known(tmp_path, rng):
    found = demonstrations(rng)
    path = write(tmp_path / "a.hdf5", found, leave=["next_obs"])
    report = mr.load(path, tmp_path / "buffer")
    assert report.rows == 17
    assert any("'next_obs' are not there" in note for note in report.notes)
    got, left = drawn(tmp_path / "buffer", OBSERVATIONS)
    # The one that ends by being cut off; the others are terminated.
    assert left == 1
    assert len(got["action"]) == 16


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda seen: seen[:-1], r"3 rows of float64\[3\]"),
        (lambda seen: np.repeat(seen, 2, 0), r"8 rows of float64\[3\]"),
        (lambda seen: seen[:, :2], r"4 rows of float64\[2\]"),
        (lambda seen: seen.astype("f4"), r"4 rows of float32\[3\]"),
    ],
)
def test_next_observations_that_are_not_one_a_step_are_refused(tmp_path, rng, change, got):
    found = demonstrations(rng)
    # What lies behind them in the file would be read in their place.
    found[0]["next_observation/pose"] = change(found[0]["next_observation/pose"])
    path = write(tmp_path / "a.hdf5", found)
    message = (
        r"demo_0': what followed 'observation/pose' must have 4 rows of float64\[3\] "
        rf".*, got {got}"
    )
    with pytest.raises(FormatError, match=message):
        mr.load(path, tmp_path / "buffer")
    assert not (tmp_path / "buffer").exists()


def test_columns_of_a_known_name_that_are_left_out_are_doubts(tmp_path, rng):
    found = demonstrations(rng)
    found[0]["observation/depth"] = rng.random((2, 3))
    found[0]["next_observation/other"] = rng.random((4, 3))
    path = write(tmp_path / "a.hdf5", found)
    report = mr.load(path, tmp_path / "buffer")
    assert "'observation/depth' was left out: it has no row a step" in report.doubts
    assert any("'next_obs' are of ['observation/image'" in d for d in report.doubts)
    for demo in found:
        del demo["next_observation/image"]
    path = write(tmp_path / "b.hdf5", found)
    report = mr.load(path, tmp_path / "other")
    assert report.rows == 17
    assert any("or all of the next ones where they lack" in d for d in report.doubts)
    assert not any("are not there" in note for note in report.notes)


def test_dones_that_are_no_flags_are_refused(tmp_path, rng):
    found = demonstrations(rng)
    found[0]["done"] = np.zeros((4, 2), np.int64)
    path = write(tmp_path / "a.hdf5", found)
    with pytest.raises(FormatError, match=r"demo_0/dones' must .* 4 rows of int64\[2\]"):
        mr.load(path, tmp_path / "buffer")


def test_demonstrations_that_differ_are_refused(tmp_path, rng):
    found = demonstrations(rng)
    found[1]["action"] = rng.random((1, 5))
    path = write(tmp_path / "a.hdf5", found)
    with pytest.raises(FormatError, match=r"demo_9.*'action' must .*float64\[5\]\. "):
        mr.load(path, tmp_path / "buffer")
    assert not (tmp_path / "buffer").exists()
