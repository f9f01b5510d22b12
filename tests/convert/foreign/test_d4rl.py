"""D4RL's files, written by h5py as D4RL writes them."""

import h5py
import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert import registry
from mmreplay.errors import CorruptError, FormatError, SchemaError, SourceError
from tests.convert.foreign.oracle import assert_same, drawn, joined


def episodes(rng, lengths=(5, 1, 7, 3), last_open=False):
    """Episodes with what followed each step, terminated and timed out in turns."""
    found = []
    for number, length in enumerate(lengths):
        seen = rng.random((length + 1, 3)).astype(np.float32)
        ends = np.zeros(length, bool)
        ends[-1] = not (last_open and number == len(lengths) - 1)
        found.append(
            {
                "observation": seen[:-1],
                "next_observation": seen[1:],
                "action": rng.random((length, 2)).astype(np.float32),
                "reward": rng.random(length).astype(np.float32),
                "terminated": ends & (number % 2 == 0),
                "truncated": ends & (number % 2 == 1),
            }
        )
    return found


NAMES = {
    "observation": "observations",
    "next_observation": "next_observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminals",
    "truncated": "timeouts",
}


def write(path, episodes, leave=(), **options):
    with h5py.File(path, "w") as file:
        for name, values in joined(episodes).items():
            if NAMES[name] not in leave:
                file.create_dataset(NAMES[name], data=values, **options)
    return path


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "chunks": True}])
def test_every_step_comes_with_what_followed_it(tmp_path, rng, options):
    found = episodes(rng)
    write(tmp_path / "a.hdf5", found, **options)
    report = mr.load(tmp_path / "a.hdf5", tmp_path / "buffer", strict=True)
    # Each of four episodes has a row more, of what was seen last.
    assert (report.rows, report.episodes) == (16 + 4, 4)
    got, left = drawn(tmp_path / "buffer", ["observation"])
    assert left == 0
    assert_same(got, joined(found))


def test_without_timeouts_observations_tell_episodes_apart(tmp_path, rng):
    found = episodes(rng)
    write(tmp_path / "a.hdf5", found, leave=["timeouts"])
    report = mr.load(tmp_path / "a.hdf5", tmp_path / "buffer", strict=True)
    assert report.episodes == 4
    assert any("1 episodes without a marked end" in note for note in report.notes)
    assert any("1 episodes were cut off without" in note for note in report.notes)
    got, _ = drawn(tmp_path / "buffer", ["observation"])
    assert_same(got, joined(found))


def test_ends_of_d3rlpy_are_timeouts_where_nothing_terminated(tmp_path, rng):
    found = episodes(rng)
    write(tmp_path / "a.h5", found, leave=["timeouts", "next_observations"])
    with h5py.File(tmp_path / "a.h5", "a") as file:
        whole = joined(found)
        ended = whole["terminated"] | whole["truncated"]
        file["episode_terminals"] = ended.astype(np.float32)
    mr.load(tmp_path / "a.h5", tmp_path / "buffer", strict=True)
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        rows = buffer.gather_all()
        np.testing.assert_array_equal(rows["truncated"], whole["truncated"])


def test_time_limits_that_nothing_tells_are_a_doubt(tmp_path, rng):
    write(tmp_path / "a.hdf5", episodes(rng), leave=["timeouts", "next_observations"])
    report = mr.load(tmp_path / "a.hdf5", tmp_path / "buffer")
    assert "neither 'timeouts' nor 'next_observations'" in report.doubts[0]
    with pytest.raises(SourceError, match=r"allows no guess\. Load without strict if the guess is"):
        mr.load(tmp_path / "a.hdf5", tmp_path / "strict", strict=True)
    assert not (tmp_path / "strict").exists()


def test_an_episode_at_the_end_of_the_file_is_truncated(tmp_path, rng):
    found = episodes(rng, last_open=True)
    write(tmp_path / "a.hdf5", found)
    mr.load(tmp_path / "a.hdf5", tmp_path / "buffer")
    found[-1]["truncated"][-1] = True
    got, _ = drawn(tmp_path / "buffer", ["observation"])
    assert_same(got, joined(found))


def test_other_rows_are_fields_and_other_data_is_reported(tmp_path, rng):
    write(tmp_path / "a.hdf5", episodes(rng))
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        file["infos/qpos"] = rng.random((16, 4))
        file["infos/name"] = np.array([b"x"] * 16)
        file["infos/short"] = rng.random(3)
        file["metadata/algorithm"] = "sac"
        file["elsewhere"] = h5py.SoftLink("/observations")
        file["outside"] = h5py.ExternalLink("/etc/passwd", "/")
    report = mr.load(tmp_path / "a.hdf5", tmp_path / "buffer")
    for told in ("'infos/short'", "'metadata'"):
        assert any(told in note for note in report.notes), told
    for told in ("infos/name'", "'elsewhere' is a link", "'outside' is a link"):
        assert any(told in doubt for doubt in report.doubts), told
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        assert buffer.schema["info/qpos"] == mr.Field((4,), "float64")
        assert "info/name" not in buffer.schema


def test_what_goes_out_comes_back(tmp_path, rng):
    found = episodes(rng)
    write(tmp_path / "a.hdf5", found)
    mr.load(tmp_path / "a.hdf5", tmp_path / "buffer")
    report = mr.export(tmp_path / "buffer", tmp_path / "b.hdf5")
    assert report.notes == ()
    with h5py.File(tmp_path / "b.hdf5") as file:
        for name, values in joined(found).items():
            np.testing.assert_array_equal(file[NAMES[name]][()], values)
            assert file[NAMES[name]].dtype == values.dtype
    mr.load(tmp_path / "b.hdf5", tmp_path / "again", strict=True)
    got, _ = drawn(tmp_path / "again", ["observation"])
    assert_same(got, joined(found))


def test_environments_follow_each_other_and_open_ends_are_reported(tmp_path, rng):
    schema = mr.Schema(
        {
            "observation": {"x": mr.Field((2,), "float32")},
            "action": mr.Field((), "int64"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
        }
    )
    seen = rng.random((6, 2, 2)).astype(np.float32)
    with mr.ReplayBuffer.create(tmp_path / "buffer", schema, 10, 2, autoreset="disabled") as buffer:
        buffer.extend(
            observation={"x": seen},
            action=np.arange(12).reshape(6, 2),
            reward=np.zeros((6, 2), np.float32),
            terminated=np.zeros((6, 2), bool),
        )
    report = mr.export(tmp_path / "buffer", tmp_path / "a.hdf5")
    assert any("2 episodes were cut off" in note for note in report.notes)
    assert any("2 environments' steps follow" in note for note in report.notes)
    with h5py.File(tmp_path / "a.hdf5") as file:
        assert file["actions"][()].tolist() == [*range(0, 12, 2), *range(1, 12, 2)]
        assert np.flatnonzero(file["timeouts"][()]).tolist() == [5, 11]
        nexts = file["next_observations/x"][()]
        np.testing.assert_array_equal(nexts[:5], seen[1:, 0])
        # Not known: its own, as when the library draws a step that ends.
        np.testing.assert_array_equal(nexts[5], seen[5, 0])


def test_small_blocks_give_the_same_rows(tmp_path, rng):
    path = write(tmp_path / "a.hdf5", episodes(rng), leave=["timeouts"])
    found = registry.source_format(path)
    assert found.name == "d4rl"
    whole = None
    for size in (1, 2, 3, 100):
        with registry.open_reader(found, path) as reader:
            blocks = list(reader.blocks(size))
        assert all(len(block) == size for block in blocks[:-1])
        flags = np.concatenate([block.flags for block in blocks])
        seen = np.concatenate([block.columns["observation"] for block in blocks])
        whole = whole or (flags, seen)
        np.testing.assert_array_equal(flags, whole[0])
        np.testing.assert_array_equal(seen, whole[1])


def test_uncompressed_datasets_are_mapped(tmp_path, rng):
    found = episodes(rng)
    path = write(tmp_path / "a.hdf5", found)
    with registry.open_reader(registry.named("d4rl"), path) as reader:
        arrays = reader.arrays()
    np.testing.assert_array_equal(arrays["actions"], joined(found)["action"])
    assert not arrays["actions"].flags.writeable


def test_a_schema_without_what_d4rl_keeps_is_refused(tmp_path):
    schema = mr.Schema({"observation": mr.Field((2,), "float32")})
    with (
        mr.ReplayBuffer.create(tmp_path / "buffer", schema, 10) as buffer,
        pytest.raises(SchemaError, match=r"role 'action' has no field, which D4RL needs\."),
    ):
        mr.export(buffer, tmp_path / "a.hdf5")
    assert not (tmp_path / "a.hdf5").exists()


@pytest.mark.parametrize("name", [".", "a/./b"])
@pytest.mark.parametrize("target", ["a.hdf5", "a-v0"])
def test_names_that_hdf5_does_not_take_are_refused(tmp_path, name, target):
    fields = {n: mr.Field((), "float32") for n in ("observation", "action", "reward")}
    schema = mr.Schema.from_flat({**fields, name: mr.Field((), "int8")})
    form = "minari" if target == "a-v0" else "d4rl"
    with (
        mr.ReplayBuffer.create(tmp_path / "buffer", schema, 10) as buffer,
        pytest.raises(SchemaError, match=r"the name '\.' stands for its own group in"),
    ):
        mr.export(buffer, tmp_path / target, format=form)
    assert not (tmp_path / target).exists()


@pytest.mark.parametrize("name", ["timeouts", "next_observations"])
def test_columns_of_other_lengths_are_left_out_as_a_doubt(tmp_path, rng, name):
    write(tmp_path / "a.hdf5", episodes(rng))
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        short = file[name][:-1]
        del file[name]
        file[name] = short
    report = mr.load(tmp_path / "a.hdf5", tmp_path / "buffer")
    assert f"'{name}' was left out: it has 15 rows, not 16" in report.doubts
    assert not any("are not there" in note for note in report.notes)


def test_timeouts_that_are_a_link_are_a_doubt(tmp_path, rng):
    write(tmp_path / "a.hdf5", episodes(rng))
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        file.move("timeouts", "limits")
        file["timeouts"] = h5py.SoftLink("/limits")
    report = mr.load(tmp_path / "a.hdf5", tmp_path / "buffer")
    assert report.doubts == ("/: 'timeouts' is a link, and was left out",)


def test_next_observations_unlike_the_observations_are_a_doubt(tmp_path, rng):
    write(tmp_path / "a.hdf5", episodes(rng))
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        wide = file["next_observations"][()].astype("f8")
        del file["next_observations"]
        file["next_observations"] = wide
    report = mr.load(tmp_path / "a.hdf5", tmp_path / "buffer")
    assert report.rows == 16
    assert report.doubts[0].startswith("'next_observations' were left out: of 'obser")
    assert any("'next_observations' were left out: what" in n for n in report.notes)


def test_terminals_that_are_no_dataset_are_reported(tmp_path, rng):
    write(tmp_path / "a.hdf5", episodes(rng), leave=["terminals"])
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        file["terminals/x"] = np.zeros(16, bool)
    with pytest.raises(FormatError, match="has no dataset 'terminals' with one row per"):
        mr.load(tmp_path / "a.hdf5", tmp_path / "buffer")


def test_an_end_that_is_no_number_is_refused_with_its_row(tmp_path, rng):
    write(tmp_path / "a.hdf5", episodes(rng), leave=["timeouts"])
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        file["timeouts"] = np.where(np.arange(16) == 11, np.nan, 0)
    with pytest.raises(SourceError, match=r"'timeouts' .*got NaN or no value in row 11"):
        mr.load(tmp_path / "a.hdf5", tmp_path / "buffer")
    assert not (tmp_path / "buffer").exists()


def test_a_truncated_column_is_an_error_that_names_it(tmp_path, rng):
    write(tmp_path / "a.hdf5", episodes(rng), leave=["actions"])
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        file["actions"] = np.zeros((3, 2), np.float32)
    with pytest.raises(FormatError, match=r"'actions' must have 16 rows like .* got 3"):
        mr.load(tmp_path / "a.hdf5", tmp_path / "buffer")


def test_a_truncated_file_is_an_error_that_names_it(tmp_path, rng):
    path = write(tmp_path / "a.hdf5", episodes(rng))
    data = path.read_bytes()
    for size in (0, 9, 500, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises((FormatError, CorruptError), match=str(path)):
            mr.load(path, tmp_path / "buffer", format="d4rl")
        assert not (tmp_path / "buffer").exists()


def test_names_of_columns_work_with_selections_and_several_sources(tmp_path, rng):
    one, two = (write(tmp_path / f"{n}.hdf5", episodes(rng)) for n in range(2))
    changes = {"drop": ["rewards"], "cast": {"actions": "float64"}, "rename": {"actions": "torque"}}
    for sources, options in (
        (one, {}),
        (one, {"where": "length > 2"}),
        (one, {"rows": slice(0, 6)}),
        (one, {"map": lambda columns: {}}),
        (one, {"frame_skip": 2}),
        ([one, two], {}),
        ([one, two], {"fields": ["observations", "actions", "rewards"], "where": "length > 2"}),
    ):
        mr.load(sources, tmp_path / "x", overwrite=True, **changes, **options)
        with mr.ReplayBuffer.open(tmp_path / "x") as buffer:
            assert "reward" not in buffer.schema.paths
            assert buffer.schema["torque"].dtype == "float64"
    with pytest.raises(SchemaError, match=r"drop must be fields .* Did you mean 'rewards'"):
        mr.load([one, two], tmp_path / "y", drop=["rewardss"])


def test_a_column_that_a_function_adds_goes_before_a_name_of_the_source(tmp_path, rng):
    write(tmp_path / "a.hdf5", episodes(rng))

    def add(columns):
        return {"rewards": np.ones((len(columns["reward"]), 3), np.float32)}

    add.schema = {"rewards": mr.Field((3,), "float32")}
    mr.load(tmp_path / "a.hdf5", tmp_path / "x", map=add, rename={"rewards": "terms"})
    with mr.ReplayBuffer.open(tmp_path / "x") as buffer:
        assert buffer.schema["terms"].shape == (3,)
        assert buffer.schema.role("reward") == "reward"


def test_a_field_that_a_function_adds_is_not_all_that_the_source_has_below(tmp_path, rng):
    found = episodes(rng)
    write(tmp_path / "a.hdf5", found)
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        file["infos/qpos"] = np.zeros((len(file["rewards"]), 2))

    def add(columns):
        return {"infos": np.ones(len(columns["reward"]), np.float32)}

    mr.load(tmp_path / "a.hdf5", tmp_path / "x")
    with mr.ReplayBuffer.open(tmp_path / "x") as buffer:
        before = set(buffer.schema.paths)
    add.schema = {"infos": mr.Field((), "float32")}
    mr.load(tmp_path / "a.hdf5", tmp_path / "y", map=add, drop=["infos"])
    with mr.ReplayBuffer.open(tmp_path / "y") as buffer:
        assert set(buffer.schema.paths) == before
    mr.load(tmp_path / "a.hdf5", tmp_path / "z", map=add, drop=["infos/qpos"])
    with mr.ReplayBuffer.open(tmp_path / "z") as buffer:
        assert len(buffer.schema.paths) == len(before)
        assert "infos" in buffer.schema.paths
