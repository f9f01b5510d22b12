"""The same buffers to tmrl's own memories and to ours."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from mmreplay.adapters.tmrl import GenericTorchMemory

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def theirs():
    """tmrl's memories, without its top package, which would fill the home folder."""
    found = importlib.util.find_spec("tmrl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("tmrl is not installed")
    top = ModuleType("tmrl")
    top.__path__ = [str(Path(found.submodule_search_locations[0]))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tmrl", top)
        from tmrl.custom import custom_memories

        yield custom_memories
        for name in [n for n in sys.modules if n.startswith("tmrl.")]:
            patch.delitem(sys.modules, name)


def episodes(rng, count):
    """Samples as rollout workers send them; no two ends are adjacent."""
    rows = []
    for n in range(count):
        ended = n > 0 and (rows[-1][3] or rows[-1][4])
        kind = None if ended or n == 0 else rng.choice([None, "a", "b"], p=[0.8, 0.1, 0.1])
        act = rng.random(3).astype(np.float32)
        obs = (np.float32([n]), rng.random(19).astype(np.float32))
        rows.append((act, obs, float(rng.random()), kind == "a", kind == "b", {}))
    return rows


def buffer_of(rows):
    class Buffer(SimpleNamespace):
        def __len__(self):
            return len(self.memory)

    return Buffer(
        memory=rows,
        stat_train_return=1.0,
        stat_test_return=2.0,
        stat_train_steps=3,
        stat_test_steps=4,
    )


def assert_same(mine, other):
    assert type(mine) is type(other) or np.isscalar(other)
    if isinstance(other, tuple | list):
        assert len(mine) == len(other)
        for a, b in zip(mine, other, strict=True):
            assert_same(a, b)
    else:
        assert np.array_equal(np.asarray(mine), np.asarray(other))
        assert np.shape(mine) == np.shape(other)


@pytest.mark.parametrize("seed", range(3))
def test_the_generic_memory_gives_the_same_transitions(theirs, tmp_path, seed):
    rng = np.random.default_rng(seed)
    mine = GenericTorchMemory(40, 8, nb_steps=2, path=tmp_path / "ring")
    other = theirs.GenericTorchMemory(40, 8, dataset_path=str(tmp_path), nb_steps=2)
    for _ in range(6):
        # tmrl loses what comes while its length is 0.
        rows = episodes(rng, int(rng.integers(5, 30)))
        mine.append(buffer_of(rows))
        other.append(buffer_of(rows))
        starts = [i for i in range(len(other)) if not other.data[6][i]]
        assert len(mine) == len(starts)
        for item, start in enumerate(starts):
            a, b = mine[item], other[start]
            assert_same(a[0], b[0])
            assert_same(a[1], b[1])
            assert a[2] == np.float32(b[2])
            for x, y in zip(a[3:], b[3:], strict=True):
                assert_same(x, y)
    for a, b in zip(mine, other, strict=True):
        assert len(a) == len(b) == 6
        for x, y in zip(a, b, strict=True):
            if isinstance(y, tuple):
                assert isinstance(x, tuple)
                assert [t.shape for t in x] == [t.shape for t in y]
            else:
                assert x.shape == y.shape
                # But for rewards, which are float64 in tmrl's batches.
                assert x.dtype == (torch.float32 if y.dtype == torch.float64 else y.dtype)
    assert mine.stat_test_return == other.stat_test_return == 2.0
    mine.close()


@pytest.mark.parametrize(("images", "acts"), [(4, 1), (2, 3), (1, 1), (3, 3)])
def test_histories_are_those_of_the_lidar_memory(theirs, tmp_path, images, acts):
    rng = np.random.default_rng(images)
    mine = GenericTorchMemory(
        500, path=tmp_path / "ring", imgs_obs=images, act_buf_len=acts, imgs_shape=(-1,)
    )
    other = theirs.MemoryTMLidar(500, 8, str(tmp_path), imgs_obs=images, act_buf_len=acts)
    for _ in range(5):
        rows = episodes(rng, 40)
        mine.append(buffer_of(rows))
        if other.data:
            for column, new in zip(other.data, columns(rows), strict=True):
                column += new
        else:
            other.data = columns(rows)
    of = {mine[i][0][1][-19:].tobytes(): mine[i] for i in range(len(mine))}
    least = max(images, acts)
    compared = 0
    for item in range(len(other)):
        # Where the last of the rows ends an episode, tmrl takes a neighbour.
        if other.data[4][item + least - 1]:
            continue
        theirs_ = other[item]
        ours = of[theirs_[0][1][-19:].tobytes()]
        for a, b in zip(ours, theirs_, strict=True):
            assert_same(a, b)
        compared += 1
    assert compared > 100
    mine.close()


def columns(rows):
    """What MemoryTMLidar keeps of samples."""
    return [
        list(range(len(rows))),
        [r[0] for r in rows],
        [r[1][0] for r in rows],
        [r[1][1] for r in rows],
        [r[3] or r[4] for r in rows],
        [r[2] for r in rows],
        [r[5] for r in rows],
        [r[3] for r in rows],
        [r[4] for r in rows],
    ]
