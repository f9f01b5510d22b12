"""Zarr groups opened as buffers: what zarr-python wrote, drawn as from a buffer."""

import pickle
import warnings

import numpy as np
import pytest
import zarr
from torch.utils.data import DataLoader

import mmreplay as mr
from mmreplay.errors import FailedError, FormatError, SchemaError, SourceError
from mmreplay.zarr_groups.mapping import GroupMapping
from tests.storage.zarr_groups import policy_store, put

LENGTHS = (20, 40, 40)
LAST = np.cumsum(LENGTHS) - 1


@pytest.fixture(params=[(2, "a.zarr"), (3, "a.zarr"), (2, "a.zip"), (3, "a.zip")])
def store(tmp_path, rng, request):
    """A store's path, and what it holds."""
    version, name = request.param
    held = policy_store(tmp_path / name, rng, version, LENGTHS)
    return tmp_path / name, held


def group(path, arrays, version=3):
    """A plain group of arrays."""
    made = zarr.open_group(path, mode="w", zarr_format=version)
    for name, data in arrays.items():
        put(made, name, np.asarray(data))
    return path


def test_every_row_is_the_arrays_row_and_ends_are_the_stores(store):
    path, held = store
    with mr.ReplayBuffer.open(path) as buffer:
        found = buffer.gather_all()
        assert (len(buffer), buffer.num_envs) == (100, 1)
        episodes = buffer.episodes.episodes(0)
    assert episodes.begin.tolist() == [0, 20, 60]
    for name, data in held.items():
        assert np.array_equal(found[name], data)
        assert found[name].dtype == data.dtype
    assert np.flatnonzero(found["truncated"]).tolist() == LAST.tolist()
    assert not found["terminated"].any()


def test_the_mapping_says_how_fields_and_ends_were_found(store):
    with mr.ReplayBuffer.open(store[0]) as buffer:
        mapping, roles = buffer.mapping, dict(buffer.schema.roles)
    assert isinstance(mapping, GroupMapping)
    assert mapping.arrays == {"action": "data/action", "img": "data/img", "state": "data/state"}
    assert not mapping.ours
    assert not mapping.doubts
    assert "3 episodes end where 'meta/episode_ends' says" in mapping.notes[0]
    assert (roles["observation"], roles["action"]) == ("state", "action")


def test_draws_give_rows_and_what_followed_them_and_no_last_ones(store):
    path, held = store
    with mr.ReplayBuffer.open(path, sampler=mr.ShuffledSampler(seed=0)) as buffer:
        batch = buffer.sample(1000)
    assert sorted(batch.positions) == sorted(set(range(100)) - set(LAST))
    assert np.array_equal(batch["img"], held["img"][batch.positions])
    assert np.array_equal(batch["next_observation"], held["state"][batch.positions + 1])


def test_windows_and_transforms_work_as_over_a_buffer(store):
    path, held = store
    sampler = mr.SequenceSampler(4, mr.UniformSampler(seed=0))
    transforms = [mr.FrameStack(2)]
    with mr.ReplayBuffer.open(path, sampler=sampler, transforms=transforms) as buffer:
        batch = buffer.sample(30)
    places = batch.positions[:, None] + np.arange(4)
    assert batch["state"].shape == (30, 4, 2, 5)
    assert batch.mask.any(axis=1).all()
    assert np.array_equal(batch["state"][:, :, -1][batch.mask], held["state"][places[batch.mask]])


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_open_the_group_themselves(tmp_path, rng, context):
    held = policy_store(tmp_path / "a.zarr", rng, 3, LENGTHS)
    dataset = mr.ReplayDataset(tmp_path / "a.zarr")
    draws = dataset.draws(mr.UniformSampler(seed=0), 16, num_batches=3)
    batches = list(
        DataLoader(
            dataset, sampler=draws, batch_size=None, num_workers=1, multiprocessing_context=context
        )
    )
    assert len(batches) == 3
    for batch in batches:
        assert np.array_equal(batch["img"].numpy(), held["img"][batch.positions])


def test_a_dataset_of_a_source_keeps_its_options_in_a_pickle(tmp_path, rng):
    held = policy_store(tmp_path / "a.zarr", rng)
    source = mr.ZarrSource(tmp_path / "a.zarr", fields={"data/img": "observation"})
    dataset = pickle.loads(pickle.dumps(mr.ReplayDataset(source)))
    batch = dataset.buffer.take(0, [3, 50])
    assert np.array_equal(batch["next_observation"], held["img"][[4, 51]])
    assert set(batch.fields) == {"observation", "next_observation", "terminated", "truncated"}


def test_a_group_joins_a_buffer(tmp_path, rng):
    policy_store(tmp_path / "a.zarr", rng)
    policy_store(tmp_path / "b.zarr", rng)
    mr.load(tmp_path / "a.zarr", tmp_path / "buffer")
    parts = [mr.ReplayBuffer.open(tmp_path / "buffer"), mr.ReplayBuffer.open(tmp_path / "b.zarr")]
    assert len(mr.concat(parts).sample(50)) == 50


def test_two_openings_are_the_same_buffer_to_a_sampler(tmp_path, rng):
    policy_store(tmp_path / "a.zarr", rng)
    first = mr.ReplayBuffer.open(tmp_path / "a.zarr", sampler=mr.ShuffledSampler(0))
    second = mr.ReplayBuffer.open(tmp_path / "a.zarr", sampler=mr.ShuffledSampler(0))
    before = first.sample(30).positions
    second.sampler.load_state_dict(first.sampler.state_dict())
    after = second.sample(67).positions
    assert sorted([*before, *after]) == sorted(set(range(100)) - set(LAST))


def test_flags_by_name_are_the_ends_where_nothing_counts_episodes(tmp_path, rng):
    ends = np.zeros((30, 1), bool)
    ends[[9, 19]] = True
    stops = np.zeros(30, "uint8")
    stops[29] = 1
    arrays = {
        "observations": rng.random((30, 2)),
        "dones": ends,
        "timeouts": stops,
        "next_observations": rng.random((30, 2)),
    }
    with mr.ReplayBuffer.open(group(tmp_path / "g", arrays)) as buffer:
        found = buffer.gather_all()
        drawable = buffer.view.starts.lengths.sum() - buffer.view.num_illegal
    assert np.flatnonzero(found["dones"]).tolist() == [9, 19]
    assert np.flatnonzero(found["timeouts"]).tolist() == [29]
    # The next observations are the group's own, so that every row can be drawn.
    assert drawable == 30


def test_numbers_of_episodes_tell_where_they_begin(tmp_path, rng):
    numbers = np.repeat([4, 5, 9], [10, 3, 17])
    arrays = {"obs": rng.random((30, 2)), "episode_index": numbers}
    with mr.ReplayBuffer.open(group(tmp_path / "g", arrays)) as buffer:
        assert buffer.episodes.episodes(0).begin.tolist() == [0, 10, 13]
        assert any("'episode_index' changes" in note for note in buffer.mapping.notes)


def test_flags_decide_how_counted_episodes_end_and_others_are_doubted(tmp_path, rng):
    done = np.zeros(30, bool)
    done[[9, 15]] = True
    arrays = {"obs": rng.random((30, 2)), "terminal": done, "episode_ends": [10, 30]}
    with mr.ReplayBuffer.open(group(tmp_path / "g", arrays)) as buffer:
        found, mapping = buffer.gather_all(), buffer.mapping
    assert np.flatnonzero(found["terminal"]).tolist() == [9]
    assert np.flatnonzero(found["truncated"]).tolist() == [29]
    assert mapping.doubts[0].startswith("1 steps end within what the group calls one")


def test_the_meaning_of_ends_can_be_given(tmp_path, rng):
    arrays = {"obs": rng.random((30, 2)), "ends": [10, 30]}
    source = mr.ZarrSource(group(tmp_path / "g", arrays), episode_ends="ends", ends="terminated")
    with mr.ReplayBuffer.open(source) as buffer:
        assert np.flatnonzero(buffer.gather_all()["terminated"]).tolist() == [9, 29]


def test_a_plain_group_is_one_episode_with_a_doubt(tmp_path, rng):
    arrays = {"obs": rng.random((30, 2)), "action": rng.random(30), "other": [1, 2]}
    with mr.ReplayBuffer.open(group(tmp_path / "g", arrays)) as buffer:
        assert (len(buffer), len(buffer.episodes.episodes(0).begin)) == (30, 1)
        mapping = buffer.mapping
    assert "array 'other' of shape [2] was left out: most have 30 rows" in mapping.notes
    assert mapping.doubts == (
        "arrays differ in length; 30 rows were taken to be the steps",
        "no column says where episodes end: all rows are one episode",
    )


def test_rows_behind_the_last_end_are_doubted(tmp_path, rng):
    arrays = {"obs": rng.random((30, 2)), "episode_ends": [10, 10, 25]}
    with mr.ReplayBuffer.open(group(tmp_path / "g", arrays)) as buffer:
        assert "5 rows stand behind the last end" in buffer.mapping.doubts[0]
        assert "1 episodes without a row" in buffer.mapping.notes
        assert buffer.episodes.episodes(0).begin.tolist() == [0, 10, 25]


@pytest.mark.parametrize(
    "ends",
    [
        [10, 5],
        [10, 31],
        [-1, 30],
        [1.5, 30.0],
        np.array([10, (1 << 63) + 20], "uint64"),
        np.array([(1 << 64) - 1, 30], "uint64"),
    ],
)
def test_ends_that_contradict_the_rows_are_refused(tmp_path, rng, ends):
    arrays = {"obs": rng.random((30, 2)), "episode_ends": ends}
    with pytest.raises(SourceError, match=r"g: 'episode_ends' must .*, got .*\. "):
        mr.ReplayBuffer.open(group(tmp_path / "g", arrays))


def test_the_usual_one_of_two_arrays_of_ends_is_used_with_a_doubt(tmp_path, rng):
    arrays = {
        "obs": rng.random((30, 2)),
        "aside/episode_ends": [5, 30],
        "meta/episode_ends": [10, 30],
    }
    path = group(tmp_path / "g", arrays)
    with mr.ReplayBuffer.open(path) as buffer:
        assert buffer.episodes.episodes(0).begin.tolist() == [0, 10]
        assert buffer.mapping.doubts == (
            "2 arrays are called 'episode_ends', and 'meta/episode_ends' was taken; "
            "name one with episode_ends=",
        )
    source = mr.ZarrSource(path, episode_ends="aside/episode_ends")
    with mr.ReplayBuffer.open(source) as buffer:
        assert buffer.episodes.episodes(0).begin.tolist() == [0, 5]
        assert buffer.mapping.doubts == ()


def test_arrays_of_no_row_are_left_out(tmp_path, rng):
    empty = {"a/a": np.zeros((0, 3)), "a/b": np.zeros(0), "a/c": np.zeros((0, 2))}
    arrays = {**empty, "obs": rng.random((30, 2)), "episode_ends": [30]}
    with mr.ReplayBuffer.open(group(tmp_path / "g", arrays)) as buffer:
        assert len(buffer) == 30
        told = "array 'a/a' of shape [0, 3] was left out: most have 30 rows"
        assert told in buffer.mapping.notes


def test_a_group_without_rows_is_refused(tmp_path):
    with pytest.raises(SourceError, match="has no array with one row a step"):
        mr.ReplayBuffer.open(group(tmp_path / "e", {"obs": np.zeros((0, 3))}))
    with pytest.raises(SourceError, match="has no array with one row a step"):
        mr.ReplayBuffer.open(group(tmp_path / "g", {}))


def test_names_that_are_not_there_are_refused(tmp_path, rng):
    path = policy_store(tmp_path / "a.zarr", rng) and tmp_path / "a.zarr"
    with pytest.raises(SchemaError, match=r"has no array 'data/nope'\. Name"):
        mr.ReplayBuffer.open(mr.ZarrSource(path, fields={"data/nope": "a"}))
    with pytest.raises(SchemaError, match=r"has no array 'nope'\. Name"):
        mr.ReplayBuffer.open(mr.ZarrSource(path, episode_ends="nope"))
    with pytest.raises(SchemaError, match="ends must be one of terminated, truncated"):
        mr.ZarrSource(path, ends="over")
    with pytest.raises(SchemaError, match=r"fields must be a dict .*, got \{\}"):
        mr.ZarrSource(path, fields={})


def test_a_group_is_not_written_to(tmp_path, rng):
    policy_store(tmp_path / "a.zarr", rng)
    with pytest.raises(FailedError, match=r".*\.zarr is a Zarr group, which cannot be written"):
        mr.ReplayBuffer.open(tmp_path / "a.zarr", "r+")
    with (
        mr.ReplayBuffer.open(tmp_path / "a.zarr") as buffer,
        pytest.raises(FailedError, match="is a Zarr group, which cannot be written"),
    ):
        buffer.add(img=0, state=0, action=0)
    with (
        mr.ReplayBuffer.open(tmp_path / "a.zarr") as buffer,
        pytest.raises(FailedError, match=r"a.zarr has no folder, which snapshot"),
    ):
        buffer.snapshot(tmp_path / "b")


def test_what_is_no_group_is_refused(tmp_path, rng):
    source = mr.ZarrSource(tmp_path / "none")
    with pytest.raises(FormatError, match=r"none must be a Zarr group.*does not exist"):
        mr.ReplayBuffer.open(source)
    zarr.create_array(tmp_path / "array", shape=(3,), chunks=(3,), dtype="i4")
    with pytest.raises(FormatError, match="array must be a Zarr group, got an array"):
        mr.ReplayBuffer.open(tmp_path / "array")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match=r"empty must be .*, got nothing"):
        mr.ReplayBuffer.open(mr.ZarrSource(tmp_path / "empty"))


@pytest.mark.parametrize("version", [2, 3])
def test_consolidated_metadata_is_enough(tmp_path, rng, version):
    path = tmp_path / "a.zarr"
    held = policy_store(path, rng, version)
    with warnings.catch_warnings():
        # zarr-python warns that version 3 has no word on it.
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(path)
    for each in path.rglob("*"):
        if each.name in (".zarray", "zarr.json") and each.parent != path:
            each.unlink()
    with mr.ReplayBuffer.open(path) as buffer:
        assert np.array_equal(buffer.gather_all()["img"], held["img"])
