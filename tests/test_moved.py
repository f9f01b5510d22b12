"""Pickles of earlier versions name modules and classes that have moved since."""

import importlib
import pickle
from contextlib import nullcontext

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import moved
from mmreplay.adapters.common.location import BufferLocation
from mmreplay.storage.foreign_zarr.mapping import GroupMapping
from mmreplay.storage.recovery import Recovery

CLASSES = {
    "mmreplay.adapters.home Home": BufferLocation,
    "mmreplay.buffer.compacting Compacted": mr.CompactReport,
    "mmreplay.buffer.snapshot Snapshot": mr.Snapshot,
    "mmreplay.collect.recorder Recorded": mr.RecordReport,
    "mmreplay.recovery Recovery": Recovery,
    "mmreplay.repairing.mending Cut": mr.DroppedRows,
    "mmreplay.repairing.mending Repaired": mr.RepairReport,
    "mmreplay.storage.group_mapping GroupMapping": GroupMapping,
    "mmreplay.storage.residency Memory": mr.MemoryUsage,
    "mmreplay.storage.zarr_source ZarrSource": mr.ZarrSource,
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_pickle_finds_a_class_by_its_old_name(name):
    module, _, attribute = name.partition(" ")
    data = f"c{module}\n{attribute}\n.".encode()
    assert pickle.loads(data) is CLASSES[name]


@pytest.mark.parametrize("old", moved.MOVED)
def test_a_module_that_moved_is_imported_by_its_old_name(old):
    assert importlib.import_module(old).__name__ == old
    importlib.import_module(moved.MOVED[old])


@pytest.mark.parametrize(("old", "name"), moved.RENAMED)
def test_a_class_that_was_renamed_is_found_by_its_old_name(old, name):
    expected = (
        pytest.warns(DeprecationWarning, match=f"^{old}.{name} is now ")
        if old in moved.IMPORTED
        else nullcontext()
    )
    with expected:
        assert getattr(importlib.import_module(old), name) is not None


def test_an_epoch_of_blocks_continues_from_an_old_pickle(tmp_path):
    schema = mr.Schema({"x": mr.Field((), "int64")})
    with mr.ReplayBuffer.create(
        tmp_path / "b", schema, 100, autoreset="disabled"
    ) as buffer:
        buffer.extend(x=np.arange(100))
        sampler = mr.ShuffledSampler(seed=1, block=8)
        sampler.draw(buffer.view, 16)
        data = pickle.dumps(sampler, 3)
        name = b"cmmreplay.samplers.uniform\nBlockPermutation\n"
        assert name in data
        old = data.replace(name, b"cmmreplay.samplers.blocks\nBlockPermutation\n")
        copy = pickle.loads(old)
        for _ in range(4):
            drawn = sampler.draw(buffer.view, 16).positions
            assert copy.draw(buffer.view, 16).positions.tolist() == drawn.tolist()


def test_a_memory_without_a_buffer_comes_back_from_an_old_pickle():
    data = pickle.dumps(BufferLocation("skrl-memory"), 3)
    name = b"cmmreplay.adapters.common.location\nBufferLocation\n"
    assert name in data
    old = data.replace(name, b"cmmreplay.adapters.home\nHome\n")
    assert pickle.loads(old).temporary
