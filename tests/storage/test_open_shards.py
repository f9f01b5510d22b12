"""More shards than the process may open files: those that are kept make room."""

import errno
import os
import resource

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FailedError
from mmreplay.storage.zarr import shards
from mmreplay.verify import verify_buffer
from tests.buffer.test_snapshots import SCHEMA, assert_right, extend
from tests.descriptors import few_descriptors

NUM_ENVS = 48


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("shards") / "b"
    with mr.ReplayBuffer.create(
        path,
        SCHEMA,
        64,
        NUM_ENVS,
        layout="env_major",
        engine="zarr",
        codec="zstd",
        commit_every=None,
        autoreset="disabled",
    ) as buffer:
        for _ in range(3):
            extend(buffer, 41)
    assert len(list(path.rglob("c.*"))) > 400
    return path


@pytest.mark.slow
def test_all_is_read_checked_and_repaired(path, tmp_path):
    with few_descriptors(100):
        assert verify_buffer(path).findings == ()
        assert mr.repair(path, tmp_path / "r").cuts == ()
        with mr.ReplayBuffer.open(path) as buffer:
            assert_right(buffer)
            batch = buffer.sample(4096)
    assert (batch["large"] == batch.positions[:, None]).all()


@pytest.mark.slow
def test_a_draw_of_more_shards_than_can_be_open_is_split(path, monkeypatch):
    monkeypatch.setattr(shards, "_most_open", lambda: 4096)
    with mr.ReplayBuffer.open(path) as buffer:
        held = [os.dup(0) for _ in range(300)]
        try:
            with few_descriptors(20):
                assert_right(buffer)
                batch = buffer.sample(4096)
        finally:
            for each in held:
                os.close(each)
    assert (batch["large"] == batch.positions[:, None]).all()


@pytest.mark.slow
def test_who_holds_all_descriptors_gives_some_back(path, monkeypatch):
    monkeypatch.setattr(shards, "_most_open", lambda: 4096)
    with mr.ReplayBuffer.open(path) as buffer, few_descriptors(100):
        for position in range(60, 120, 3):
            env_ids = np.arange(NUM_ENVS)
            batch = buffer.take(env_ids, np.full(NUM_ENVS, position))
            assert (batch["number"] == position).all()


def test_no_descriptor_to_close_is_an_error(path):
    with mr.ReplayBuffer.open(path) as buffer, few_descriptors(0):
        with pytest.raises(FailedError, match="Close files or buffers") as caught:
            buffer.sample(256)
        assert caught.value.errno == errno.EMFILE


@pytest.mark.parametrize(("soft", "limit"), [(2, 1), (1024, 256), (1 << 20, 4096)])
def test_a_quarter_of_the_files_may_be_shards(monkeypatch, soft, limit):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert shards._most_open() == limit
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
    assert shards._most_open() == shards.MAX_OPEN


def test_the_limit_of_open_shards_is_exact(path, monkeypatch):
    monkeypatch.setattr(shards, "_most_open", lambda: 10)
    with mr.ReplayBuffer.open(path) as buffer:
        kept = buffer._files.store._reader._open
        for env_id in range(20):
            known = set(kept)
            buffer.take([env_id], [100])
            assert len(kept) <= 10
            if len(known) <= 8:
                assert known <= set(kept)
        assert len(kept) == 10
