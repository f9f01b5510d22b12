"""``mmreplay record --engine zarr``: what is recorded lies in shards."""

import json
import subprocess
import sys

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli.exits import run


def test_a_recording_in_shards_is_told_and_gone_on_with(tmp_path, capsys):
    pytest.importorskip("gymnasium")
    path = str(tmp_path / "b")
    line = ["record", "CartPole-v1", path, "--steps", "300", "--engine"]
    assert run([*line, "zarr", "--capacity", "200"]) == 0
    assert run(["record", "CartPole-v1", path, "--steps", "40"]) == 0
    capsys.readouterr()
    assert run(["info", path, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["engine"], told["codec"]) == ("zarr", "blosc-lz4")
    assert told["compression"]["observation"][0] > 0
    assert run(["verify", path]) == 0
    with mr.ReplayBuffer.open(path) as buffer:
        assert buffer.zarr_path.is_dir()
    capsys.readouterr()
    assert run([*line, "memmap"]) == 3
    assert "engine: got 'memmap', expected 'zarr'" in capsys.readouterr().err
    assert run([*line, "hdf5"]) == 2
    assert "--engine: got 'hdf5', expected one of" in capsys.readouterr().err


def test_telling_of_a_compressed_buffer_unpacks_nothing(tmp_path):
    schema = mr.Schema({"reward": mr.Field((), "float32")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 9, engine="zarr") as buffer:
        buffer.extend(reward=np.arange(9, dtype=np.float32))
    told = (
        "import sys\nfrom mmreplay.cli.exits import run\n"
        f"code = run(['info', {str(tmp_path / 'b')!r}, '--json'])\n"
        "sys.exit(code or bool({'zarr', 'numcodecs'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", told], check=True, capture_output=True)
