"""Tables of the episodes of any source, and selections by them."""

import pickle

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import stats
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.episode_facts import EpisodeFacts
from mmreplay.errors import FormatError, SchemaError
from mmreplay.testing.disks import QuickDisk, using
from tests.convert import condition_twin as twin
from tests.convert.curated import AUTORESETS, record
from tests.convert.test_joined import make, read, ring, steps_in
from tests.convert.test_where import random_ring
from tests.slices import count

pytestmark = pytest.mark.filterwarnings("ignore:.*end_episodes of environments")


@pytest.fixture(autouse=True)
def quick_disk():
    """A disk that syncs nothing: no test here cuts the power."""
    with using(QuickDisk()):
        yield


def equal(one, other):
    for name, column in one.to_dict().items():
        np.testing.assert_array_equal(column, other.to_dict()[name], err_msg=name)
        assert column.dtype == other.to_dict()[name].dtype, name


def test_the_table_of_a_folder_is_that_of_its_buffer(tmp_path):
    for turn in range(count(60, 5)):
        path = tmp_path / str(turn)
        with random_ring(path, twin.make(turn)) as buffer:
            wanted = stats.episode_table(buffer)
            buffer.commit()
            equal(mr.episode_table(path), wanted)
            equal(mr.episode_table(buffer), wanted)
            equal(mr.episode_table(buffer, where="number >= 0"), wanted)
        equal(mr.episode_table([path]), wanted)


@pytest.mark.parametrize("autoreset", AUTORESETS)
@pytest.mark.sliced(1)
def test_final_rows_and_broken_episodes_are_seen_likewise(tmp_path, autoreset):
    for seed in range(count(30, 3)):
        path = record(tmp_path / str(seed), autoreset, seed)
        with mr.ReplayBuffer.open(path) as buffer:
            wanted = stats.episode_table(buffer)
        equal(mr.episode_table(path), wanted)
        mr.export(path, tmp_path / f"{seed}.npz")
        equal(mr.episode_table(tmp_path / f"{seed}.npz"), wanted)


def test_returns_are_those_of_conditions_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(stats, "MAX_BLOCK_ROWS", 7)
    schema = mr.Schema({"reward": mr.Field((), "float32"), "terminated": mr.Field((), "bool")})
    rng = np.random.default_rng(1)
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 2000, autoreset="same_step") as buffer:
        ends = np.zeros(1500, bool)
        ends[[100, 101, 900, 1499]] = True
        buffer.extend(reward=rng.normal(size=1500).astype(np.float32) * 1e3, terminated=ends)
        table = mr.episode_table(buffer)
        with BufferReader(buffer) as reader:
            facts = EpisodeFacts(reader, returns=True)
    assert table.returns.tobytes() == facts.returns.tobytes()
    assert mr.episode_table(tmp_path / "a").returns.tobytes() == facts.returns.tobytes()
    exact = float(table.returns[1])
    assert len(mr.episode_table(tmp_path / "a", where=f"return == {exact!r}")) == 1


def test_a_table_of_several_sources_selects_what_its_condition_does(tmp_path):
    for turn in range(count(40, 3)):
        rng = twin.make(turn)
        folder = tmp_path / str(turn)
        folder.mkdir()
        paths, _ = make(folder, rng, 2, "same_step")
        mr.export(paths[-1], folder / "last.npz")
        paths[-1] = folder / "last.npz"
        every = mr.episode_table(paths)
        assert every.number.tolist() == [*range(len(every))]
        assert (np.diff(every.source) >= 0).all()
        assert set(every.source) == set(range(len(paths)))
        some = mr.episode_table(paths, where="length > 3 or env == 1")
        assert 0 < len(some) < len(every)
        mr.load(paths, folder / "by_table", episodes=some)
        mr.load(paths, folder / "by_where", where="length > 3 or env == 1")
        assert read(folder / "by_table") == read(folder / "by_where")


def test_progress_counts_the_rows_of_each_source(tmp_path):
    paths = [ring(tmp_path / "a"), ring(tmp_path / "b", 6, 12)]
    seen = []
    mr.episode_table(paths, lambda *now: seen.append(now))
    assert seen[-1] == (12, 12)
    assert (6, 6) in seen


def test_environments_are_numbered_as_selections_number_them(tmp_path):
    ring(tmp_path / "a", num_envs=3)
    table = mr.episode_table(tmp_path / "a", env_ids=[1, 2], where="env == 2")
    assert table.env_ids.tolist() == [2, 2]
    assert table.number.tolist() == [2, 3]
    mr.load(tmp_path / "a", tmp_path / "x", env_ids=[1, 2], episodes=table)
    with mr.ReplayBuffer.open(tmp_path / "x") as buffer:
        assert buffer.span.lengths.tolist() == [0, 0, 6]


def test_a_column_of_numbers_in_any_order_is_a_set(tmp_path):
    ring(tmp_path / "a", steps=18)
    for numbers in ([4, 1], [1, 4, 4, 1], np.array([4, 1], np.int32)):
        mr.load(tmp_path / "a", tmp_path / "x", episodes={"number": numbers}, overwrite=True)
        assert steps_in(tmp_path / "x") == [3, 4, 5, 12, 13, 14]
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"number": [4, 1], "why": ["a", "b"]})
    mr.load(tmp_path / "a", tmp_path / "x", episodes=table, overwrite=True)
    assert steps_in(tmp_path / "x") == [3, 4, 5, 12, 13, 14]
    mr.load(tmp_path / "a", tmp_path / "x", skip=table, overwrite=True)
    assert steps_in(tmp_path / "x") == [0, 1, 2, 6, 7, 8, 9, 10, 11, 15, 16, 17]


def test_without_a_reward_returns_are_unknown(tmp_path):
    np.savez(tmp_path / "theirs.npz", observation=np.zeros((4, 2), np.float32))
    table = mr.episode_table(tmp_path / "theirs.npz")
    assert np.isnan(table.returns).all()
    assert (len(table), table.lengths.tolist()) == (1, [4])


def test_a_table_of_several_sources_is_pickled_with_them(tmp_path):
    paths = [ring(tmp_path / "a"), ring(tmp_path / "b", 6)]
    table = mr.episode_table(paths)
    again = pickle.loads(pickle.dumps(table))
    equal(again, table)
    assert again.source.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        ([], {}, SchemaError, "buffer must be at least one buffer, file or folder"),
        ("nowhere", {}, FormatError, "nowhere does not exist"),
        ("a", {"newest": 3}, SchemaError, r"newest must be None but for an open buffer .*got 3"),
        ("a", {"where": "retrun > 3"}, SchemaError, "Did you mean return"),
        ("a", {"env_ids": [4]}, SchemaError, r"env_ids must be one or more integers in \[0, 1\)"),
        (3, {}, FormatError, "source must be a str or pathlib.Path, got int"),
    ],
)
def test_what_is_no_source_is_refused(tmp_path, monkeypatch, source, options, error, message):
    monkeypatch.chdir(tmp_path)
    ring(tmp_path / "a")
    with pytest.raises(error, match=message):
        mr.episode_table(source, **options)
