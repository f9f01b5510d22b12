"""Memory is some blocks, however large the source is."""

from functools import partial

import h5py
import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert.base import BLOCK_NBYTES
from tests.convert.contract import peak
from tests.convert.foreign import lerobot_sets, test_dqn_replay, test_lerobot, test_minari

pytestmark = [pytest.mark.slow]

# A block, the pieces it is joined of, and a quarter of a block held several times; 140
# MiB of data. A record batch of an Arrow file is held whole, and is not among them.
MAX_NBYTES = 4 * BLOCK_NBYTES
ROWS = 5000


def frames(rng, count=ROWS):
    images = np.zeros((count, 84, 84, 4), np.uint8)
    images[:, :, :, 0] = rng.integers(0, 256, (count, 84, 84), np.uint8)
    return images


def d4rl(folder, rng):
    images = frames(rng)
    with h5py.File(folder / "a.hdf5", "w") as file:
        file["observations"] = images
        images = np.roll(images, -1, 0)
        images[99::100] = 7
        file["next_observations"] = images
        file["actions"] = np.zeros((ROWS, 2), np.float32)
        file["rewards"] = np.zeros(ROWS, np.float32)
        file["terminals"] = np.arange(ROWS) % 100 == 99
    return folder / "a.hdf5"


def minari(folder, rng):
    ends = np.arange(ROWS) == ROWS - 1
    actions, rewards = np.zeros(ROWS, np.int64), np.zeros(ROWS)
    episode = [frames(rng, ROWS + 1), actions, rewards, ends, ends & False]
    return test_minari.write(folder / "a-v0", "hdf5", [episode])


def dqn_replay(folder, rng):
    ring = {
        "observation": frames(rng),
        "action": np.zeros(ROWS, np.int32),
        "reward": np.zeros(ROWS, np.float32),
        "terminal": (np.arange(ROWS) % 50 == 49).astype(np.uint8),
    }
    return test_dqn_replay.write(folder / "logs", ring, ROWS + 700)


def lerobot(folder, rng):
    data = test_lerobot.frames(rng, (ROWS // 2, ROWS // 2))
    data["observation.state"] = rng.random((ROWS, 4000)).astype(np.float32)
    return test_lerobot.write(folder / "set", data, files=1)


def video(folder, rng):
    pytest.importorskip("av", reason="PyAV is not installed")
    lengths, many = (100, 127, 60), 12
    # 143 MiB of frames, of a file that has as many again that belong to no episode.
    content = [part for number in range(many) for part in (number, -100)]
    cameras = {lerobot_sets.TOP: {(0, 0): content}}
    size = partial(lerobot_sets.film, size=256)
    lengths = [lengths[number % 3] for number in range(many)]
    return lerobot_sets.make(folder / "set", lengths, cameras, video=size)


@pytest.mark.parametrize("make", [d4rl, minari, dqn_replay, lerobot, video])
def test_memory_does_not_grow_with_the_source(tmp_path, rng, make):
    source = make(tmp_path, rng)
    options = {"video": "decode"} if make is video else {}
    assert peak(lambda: mr.load(source, tmp_path / "buffer", **options)) < MAX_NBYTES


def test_memory_does_not_grow_with_the_target(tmp_path, rng):
    mr.load(d4rl(tmp_path, rng), tmp_path / "buffer")
    for name, form in (("b.hdf5", "d4rl"), ("b-v0", "minari")):
        target = tmp_path / name

        def export(target=target, form=form):
            mr.export(tmp_path / "buffer", target, format=form)

        assert peak(export) < MAX_NBYTES
