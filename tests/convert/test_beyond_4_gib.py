"""Columns of more than 4 GiB, where zips turn to 64 bits; the files are sparse."""

import zipfile

import numpy as np
import pytest
import torch
from safetensors import safe_open

import mmreplay as mr
from mmreplay.convert import registry
from mmreplay.convert.base import Block
from mmreplay.convert.description import Description
from mmreplay.disk import files

ROWS, WIDTH, STEP = 66_000, 65_536, 1_000
SCHEMA = mr.Schema.from_flat(
    {"image": mr.Field((WIDTH,), "uint8"), "reward": mr.Field((), "float32")}
)


class Sparse(files.Disk):
    """A disk that takes no room for zeros, and syncs nothing."""

    def pwrite(self, fd, data, offset):
        if len(data) >= 1 << 15 and not np.frombuffer(data, np.uint8).any():
            return len(data)
        return super().pwrite(fd, data, offset)

    def allocate(self, fd, offset, nbytes):
        pass

    def datasync(self, fd):
        pass


def blocks():
    """Rows of zeros, of which the first and the last are not."""
    image = np.zeros((STEP, WIDTH), np.uint8)
    for first in range(0, ROWS, STEP):
        image[0] = 5 if first == 0 else 0
        image[-1] = 7 if first + STEP == ROWS else 0
        positions = np.arange(first, first + STEP)
        flags = (positions == 0).astype(np.uint8)
        columns = {"image": image, "reward": positions.astype(np.float32)}
        yield Block(columns, np.zeros_like(positions), positions, flags)


@pytest.fixture(params=["npz", "pt", "safetensors"])
def path(request, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "disk", Sparse())
    made = tmp_path / f"a.{request.param}"
    about = Description(SCHEMA, np.zeros(1, np.int64), np.array([ROWS]), ROWS)
    found = registry.named(request.param)
    with registry.open_writer(found, made, about, overwrite=False) as writer:
        for block in blocks():
            writer.write(block)
        writer.finish()
    yield made
    made.unlink()


@pytest.mark.slow
def test_its_library_and_we_read_what_lies_beyond(path):
    assert path.stat().st_size > ROWS * WIDTH > 1 << 32
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as found:
            assert found["reward"][-1] == ROWS - 1
            assert found["_position"].tolist() == list(range(ROWS))
    elif path.suffix == ".pt":
        found = torch.load(path, weights_only=True, mmap=True)
        assert found["image"].shape == (ROWS, WIDTH)
        assert found["image"][[0, -2, -1], -1].tolist() == [5, 0, 7]
        assert found["reward"][-1] == ROWS - 1
    else:
        with safe_open(path, "np") as found:
            assert found.get_slice("image")[ROWS - 2 :, -1].tolist() == [0, 7]
            assert found.get_tensor("reward")[-1] == ROWS - 1
    if path.suffix != ".safetensors":
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    with registry.open_reader(registry.named(path.suffix[1:]), path) as reader:
        arrays = reader.arrays()
        assert arrays["image"].shape == (ROWS, WIDTH)
        assert arrays["image"][[0, -2, -1], -1].tolist() == [5, 0, 7]
        rows = 0
        for block in reader.blocks():
            assert block.columns["reward"][0] == rows
            rows += len(block)
        assert rows == ROWS
