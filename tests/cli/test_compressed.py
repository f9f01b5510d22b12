"""``mmreplay record --engine zarr``: what is recorded lies in shards."""

import json
import subprocess
import sys

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli import change
from mmreplay.cli.run import run


def test_a_recording_in_shards_is_reported_and_continued(tmp_path, capsys):
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
    assert "engine must be 'zarr'" in capsys.readouterr().err
    assert run([*line, "hdf5"]) == 2
    assert "--engine must be one of" in capsys.readouterr().err


def test_telling_of_a_compressed_buffer_unpacks_nothing(tmp_path):
    schema = mr.Schema({"reward": mr.Field((), "float32")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 9, engine="zarr") as buffer:
        buffer.extend(reward=np.arange(9, dtype=np.float32))
    told = (
        "import sys\nfrom mmreplay.cli.run import run\n"
        f"code = run(['info', {str(tmp_path / 'b')!r}, '--json'])\n"
        "sys.exit(code or bool({'zarr', 'numcodecs'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", told], check=True, capture_output=True)


def test_codec_and_level_are_options_of_every_command_that_makes_shards(tmp_path, capsys):
    pytest.importorskip("gymnasium")
    path, kept = str(tmp_path / "b"), str(tmp_path / "c")
    line = ["record", "CartPole-v1", path, "--steps", "40"]
    asked = ["--engine", "zarr", "--codec", "zstd", "--level", "9"]
    assert run([*line, *asked]) == 0
    assert run([*line, *asked]) == 0
    with mr.ReplayBuffer.open(path) as buffer:
        assert buffer.metadata.sharding.to_json().items() >= {("codec", "zstd"), ("level", 9)}
    assert run([*line, "--level", "3"]) == 3
    assert "level must be 9, as in the buffer" in capsys.readouterr().err
    assert run([*line, "--codec", "gzip"]) == 2
    for option in ("--engine", "--codec"):
        assert run(["convert", path, f"{path}.npz", option, "other"]) == 2
        assert f"{option} must be one of" in capsys.readouterr().err
    assert run(["compact", path, kept, "--level", "1", "--chunk-crc32c"]) == 0
    with mr.ReplayBuffer.open(kept) as buffer:
        assert buffer.metadata.sharding.level == 1
        assert buffer.metadata.sharding.chunk_crc32c
    assert run(["verify", kept]) == 0
    raw = ["compact", path, str(tmp_path / "d"), "--codec", "raw", "--level", "1"]
    assert run(raw) == 2
    assert "need a codec that compresses" in capsys.readouterr().err


def test_a_plan_tells_what_shards_would_take(tmp_path, capsys):
    schema = mr.Schema({"reward": mr.Field((), "float32")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 5000) as buffer:
        buffer.extend(reward=np.zeros(5000, np.float32))
    assert run(["plan", str(tmp_path / "b"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["compressed"]
    assert set(told) == {"blosc-lz4", "zstd"}
    assert told["zstd"]["ratios"]["reward"] > 100
    assert told["zstd"]["nbytes"] < 4 * 5000 / 50
    assert run(["plan", str(tmp_path / "b"), "--capacity", "1e6"]) == 0
    assert "as zstd" in capsys.readouterr().out
    assert run(["plan", "--field", "a:bool", "--capacity", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compressed"] == {}


def test_a_plan_takes_fields_and_layout_of_what_is_there(tmp_path, capsys):
    schema = mr.Schema({"reward": mr.Field((), "float32")})
    with mr.ReplayBuffer.create(
        tmp_path / "b", schema, 64, 40, layout="env_major", engine="zarr", autoreset="disabled"
    ) as buffer:
        buffer.extend(reward=np.zeros((64, 40), np.float32))
        group = buffer.zarr_path
    for path in (tmp_path / "b", group):
        assert run(["plan", str(path), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["ring"]["layout"] == "env_major"
        assert (told["ring"]["capacity"], told["ring"]["num_envs"]) == (64, 40)
        assert told["compressed"]["zstd"]["ratios"]["reward"] > 1
    assert run(["plan", str(group), "--num-envs", "41", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ring"]["layout"] == "time_major"


def test_a_plan_of_a_url_asks_the_bucket_and_no_environment(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert run(["plan", "s3://bucket/a", "--capacity", "9"]) != 0
    assert "needs obstore, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("line", [["clear"], ["resize", "3"]])
def test_a_group_is_refused_before_anybody_is_asked(tmp_path, capsys, line, monkeypatch):
    schema = mr.Schema({"reward": mr.Field((), "float32")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 64, engine="zarr") as buffer:
        buffer.extend(reward=np.zeros(64, np.float32))
        group = buffer.zarr_path

    def confirm(*args):
        raise AssertionError(args)

    monkeypatch.setattr(change, "confirm", confirm)
    command, *rest = line
    assert run([command, str(group), *rest]) == 1
    assert "is a Zarr group, which cannot be written" in capsys.readouterr().err
