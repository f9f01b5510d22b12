"""npz with deflated members: as lossless, and smaller."""

import json
import signal
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.convert.npz import packed_limit
from mmreplay.disk import files
from mmreplay.errors import FullError, SchemaError
from tests.convert.contract import Faulty, make_large, numbers, peak
from tests.convert.support import every_kind, histories, play, same


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)


@pytest.fixture
def source(tmp_path):
    with every_kind(tmp_path / "source") as buffer:
        yield buffer


def export(source, path, **options):
    return mr.export(source, path, compression="deflate", **options)


@given(past=histories())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_buffer_comes_back_to_the_bit(tmp_path, past):
    place = tmp_path / str(next(numbers))
    with play(place / "source", past) as source:
        export(source, place / "a.npz", compression_level=1 + past["seed"] % 9)
        mr.load(place / "a.npz", place / "target")
        with mr.ReplayBuffer.open(place / "target") as target:
            same(source, target)


def test_numpy_and_zip_read_every_member(source, tmp_path):
    export(source, tmp_path / "a.npz")
    rows = source.gather_all()
    with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
        for path in source.schema.paths:
            assert found[path].tobytes() == np.ascontiguousarray(rows[path]).tobytes()
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert archive.testzip() is None
        kinds = {each.compress_type for each in archive.infolist()}
        assert kinds == {zipfile.ZIP_DEFLATED}


def test_what_packs_well_is_small_and_no_bomb(tmp_path):
    schema = mr.Schema({"a": mr.Field((1 << 16,), "uint8")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 200) as buffer:
        buffer.extend(a=np.zeros((200, 1 << 16), np.uint8))
        report = export(buffer, tmp_path / "a.npz")
        assert report.nbytes == (tmp_path / "a.npz").stat().st_size < 30_000
        mr.load(tmp_path / "a.npz", tmp_path / "c")
        with mr.ReplayBuffer.open(tmp_path / "c") as loaded:
            same(buffer, loaded)


def test_noise_takes_no_more_than_its_size(tmp_path):
    rng = np.random.default_rng(0)
    schema = mr.Schema({"a": mr.Field((50_000,), "uint8"), "b": mr.Field((), "int8")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 40) as buffer:
        noise = rng.integers(0, 256, (40, 50_000), np.uint8)
        buffer.extend(a=noise, b=np.arange(40, dtype=np.int8))
        export(buffer, tmp_path / "a.npz", compression_level=9)
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        for each in archive.infolist():
            assert each.compress_size <= packed_limit(each.file_size)
    with np.load(tmp_path / "a.npz") as found:
        np.testing.assert_array_equal(found["a"], noise)


def test_equal_buffers_give_equal_files(source, tmp_path):
    for name in "ab":
        export(source, tmp_path / f"{name}.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_an_empty_buffer_comes_back_empty(source, tmp_path):
    source.clear()
    export(source, tmp_path / "a.npz")
    mr.load(tmp_path / "a.npz", tmp_path / "b")
    with mr.ReplayBuffer.open(tmp_path / "b") as loaded:
        same(source, loaded)


@pytest.mark.parametrize("number", [0, 1, 30, 90])
def test_a_full_disk_is_an_error_and_leaves_nothing(source, tmp_path, monkeypatch, number):
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", Faulty(number))
        with pytest.raises(FullError, match="No space left"):
            export(source, tmp_path / "a.npz")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


KILL = """
import os, signal, sys
import mmreplay as mr
die = lambda done, total: os.kill(os.getpid(), signal.SIGKILL)
mr.export(sys.argv[1], sys.argv[2], progress=die, compression="deflate")
"""


@pytest.mark.crash
def test_a_killed_run_leaves_no_target_and_can_be_started_again(source, tmp_path):
    source.close()
    target = tmp_path / "a.npz"
    died = subprocess.run([sys.executable, "-c", KILL, source.path, target], timeout=60)
    assert died.returncode == -signal.SIGKILL
    assert not target.exists()
    export(source.path, target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz", "source"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_buffer(tmp_path):
    make_large(tmp_path / "source", 200 << 20, (84, 84, 4))
    # Two blocks of 16 MiB, as in the contract of formats; 200 MiB of data in all.
    most = 3 * (16 << 20)
    options = {"compression": "deflate", "compression_level": 1}
    assert peak(lambda: mr.export(tmp_path / "source", tmp_path / "a.npz", **options)) < most


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "lzma"}, r"compression must be 'deflate' or None, got 'lzma'\. Leave"),
        (
            {"compression": "deflate", "compression_level": 0},
            r"compression_level must be an integer in \[1, 9\], got 0\.",
        ),
        (
            {"compression": "deflate", "compression_level": True},
            r"compression_level must be an integer in \[1, 9\], got True\.",
        ),
        ({"compression_level": 3}, r"must be None without compression, got 3\. Pass"),
    ],
)
def test_other_packing_is_refused(source, tmp_path, options, message):
    with pytest.raises(SchemaError, match=message):
        mr.export(source, tmp_path / "a.npz", **options)


def test_formats_that_cannot_pack_say_which_can(source, tmp_path, capsys):
    with pytest.raises(
        SchemaError, match=r"'pt' as a target, which takes layout\. Leave it out, or use npz"
    ):
        export(source, tmp_path / "a.pt")
    source.commit()
    args = ["convert", str(source.path), "--compression", "deflate"]
    assert run([*args, str(tmp_path / "a.safetensors")]) == 3
    assert "use npz" in capsys.readouterr().err
    assert run([*args, str(tmp_path / "a.npz"), "-n", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target_nbytes"] is None
    assert run([*args, str(tmp_path / "a.npz")]) == 0
