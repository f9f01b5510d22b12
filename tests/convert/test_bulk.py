"""How bytes of many rows go to the disk when they are converted."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert.buffer_writer import legal_flags
from mmreplay.convert.episode_ends import first_rows
from mmreplay.disk import files
from tests.convert.support import same_rows

SCHEMA = {
    "observation": mr.Field((17,), "float32"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
}


class NotedWrites(files.Disk):
    """A disk that tells how much is written to it at once."""

    def __init__(self):
        self.written = []

    def pwrite(self, fd, data, offset):
        self.written.append(len(data))
        return super().pwrite(fd, data, offset)


def filled(path, rng, rows=5000, capacity=3000, num_envs=1, layout=None):
    """A buffer whose ring has wrapped."""
    buffer = mr.ReplayBuffer.create(
        path, mr.Schema(SCHEMA), capacity, num_envs, layout=layout, autoreset="disabled"
    )
    for _ in range(2):
        shape = (rows // 2, num_envs)
        buffer.extend(
            observation=rng.standard_normal((*shape, 17), np.float32),
            reward=rng.standard_normal(shape, np.float32),
            terminated=rng.random(shape) < 0.01,
        )
    buffer.close()
    return path


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("capacity", [None, 1700])
def test_a_ring_that_has_wrapped_comes_back(tmp_path, rng, layout, num_envs, capacity):
    source = filled(tmp_path / "source", rng, num_envs=num_envs, layout=layout)
    mr.export(source, tmp_path / "there.npz")
    mr.load(tmp_path / "there.npz", tmp_path / "back", capacity=capacity)
    with mr.ReplayBuffer.open(source) as one, mr.ReplayBuffer.open(tmp_path / "back") as other:
        if capacity is None:
            same_rows(one, other)
        for env_id in range(num_envs):
            positions = np.arange(5000 - (capacity or 3000), 5000)
            for path in one.schema.paths:
                expected = one.get_field(path, env_id, positions)
                assert np.array_equal(other.get_field(path, env_id, positions), expected)
    assert not mr.verify_buffer(tmp_path / "back").findings


def test_arrays_are_written_in_chunks_that_stay_in_the_page_cache(tmp_path, rng, monkeypatch):
    source, disk = filled(tmp_path / "source", rng), NotedWrites()
    monkeypatch.setattr(files, "disk", disk)
    mr.export(source, tmp_path / "there.npz")
    assert max(disk.written) == files.NEW_PAGES_NBYTES


@pytest.mark.parametrize("env_ids", [[4, 4, 4], [2, 4, 2], [3], []])
def test_the_first_rows_of_environments_do_not_keep_their_block_alive(env_ids):
    given = np.array(env_ids, np.int64)
    ids, places = first_rows(given)
    given[:] = 9
    expected = np.unique(np.array(env_ids, np.int64), return_index=True)
    assert ids.tolist() == expected[0].tolist()
    assert places.tolist() == expected[1].tolist()


@pytest.mark.parametrize("final_follows", [False, True])
def test_rows_without_flags_may_follow_each_other(final_follows):
    assert legal_flags(final_follows)[0, 0]
