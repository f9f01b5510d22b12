"""Files loaded into either engine of buffers on a disk."""

import json

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.disk import files
from mmreplay.errors import SchemaError
from mmreplay.format.sharding import CODECS
from mmreplay.verify import verify_buffer
from tests.convert.support import every_kind, same_rows


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)


@pytest.fixture
def file(tmp_path):
    every_kind(tmp_path / "source").close()
    mr.export(tmp_path / "source", tmp_path / "a.npz")
    return tmp_path / "a.npz"


@pytest.mark.parametrize("codec", [None, *CODECS])
@pytest.mark.sliced(2)
def test_compressed_shards_hold_the_same_rows(tmp_path, file, codec):
    mr.load(file, tmp_path / "made", engine="zarr", codec=codec)
    with (
        mr.ReplayBuffer.open(tmp_path / "source") as one,
        mr.ReplayBuffer.open(tmp_path / "made") as other,
    ):
        same_rows(one, other)
        assert other.metadata.engine == "zarr"
        assert other.metadata.sharding.codec == codec or codec is None
    assert not verify_buffer(tmp_path / "made").findings


def test_many_blocks_are_sealed_while_they_come(tmp_path, rng):
    schema = mr.Schema.from_flat({"reward": mr.Field((), "float64")})
    with mr.ReplayBuffer.create(
        tmp_path / "source", schema, 40_000, 2, autoreset="disabled"
    ) as buffer:
        buffer.extend(reward=rng.random((55_000, 2)))
        for name, options in (("all", {}), ("newest", {"capacity": 9000})):
            mr.export(buffer, tmp_path / f"{name}.npz")
            mr.load(tmp_path / f"{name}.npz", tmp_path / name, engine="zarr", **options)
        with mr.ReplayBuffer.open(tmp_path / "all") as found:
            same_rows(buffer, found)
        with mr.ReplayBuffer.open(tmp_path / "newest", "r+") as found:
            assert found.span.lengths.tolist() == [9000, 9000]
            assert found.span.stop.tolist() == buffer.span.stop.tolist()
            env_ids = np.repeat([0, 1], 9000)
            positions = np.tile(np.arange(46_000, 55_000), 2)
            want = buffer.get_field("reward", env_ids, positions)
            assert (found.gather_all()["reward"] == want).all()
            found.add(reward=np.zeros(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "memory"}, r"engine must be one of \['memmap', 'zarr'\], got 'memory'\."),
        ({"codec": "zstd"}, "codec='zstd' needs engine='zarr', got engine='memmap'"),
        ({"engine": "zarr", "codec": "lzma"}, r"codec must be one of .* got 'lzma'"),
    ],
)
def test_engines_and_codecs_that_are_none_are_refused(tmp_path, file, options, message):
    with pytest.raises(SchemaError, match=message):
        mr.load(file, tmp_path / "made", **options)
    assert not (tmp_path / "made").exists()


def test_the_command_takes_both(tmp_path, file, capsys):
    target = str(tmp_path / "made")
    way = ["convert", str(file), target, "--engine", "zarr", "--codec", "zstd"]
    way += ["--fields", "observation,all/bfloat16"]
    assert run([*way, "-n", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target_nbytes"] is None
    assert run(way) == 0
    with mr.ReplayBuffer.open(target) as found:
        assert found.metadata.sharding.codec == "zstd"
    assert run(["convert", target, str(tmp_path / "again.pt")]) == 0
    mr.load(tmp_path / "again.pt", tmp_path / "back")
    with mr.ReplayBuffer.open(target) as one, mr.ReplayBuffer.open(tmp_path / "back") as other:
        same_rows(one, other)
