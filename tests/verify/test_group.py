"""What a compressed buffer's group tells other readers is what the buffer is."""

import json
import shutil
import threading

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import strict_json
from mmreplay.testing.disks import QuickDisk, using
from mmreplay.verify import verify_buffer
from tests.verify.support import DATA, schema, steps

ENGINE = {"engine": "zarr", "codec": "none", "autoreset": "disabled"}
ENGINE["commit_every"] = None


@pytest.fixture(autouse=True)
def quick():
    """Each place is a dozen files that are synced; no power is cut here."""
    with using(QuickDisk()):
        yield


@pytest.fixture(params=["env_major", "time_major"])
def path(tmp_path, rng, request):
    """A closed buffer that went round, all of its rows in shards."""
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(path, schema(), 64, 2, layout=request.param, **ENGINE) as buffer:
        for _ in range(5):
            buffer.extend(steps(rng, 20, 2))
    assert verify_buffer(path).findings == ()
    return path


def where_is(path, env_id, position):
    """File's name and byte of a row of one byte, in chunks that are not packed."""
    with mr.ReplayBuffer.open(path) as buffer:
        ring, size = buffer.metadata.ring, buffer.metadata.sharding.shard_rows
        array = buffer._files.store._arrays["%flags"]
    step, within = divmod(position % ring.slots, size)
    if ring.layout == "env_major":
        return f"c.{env_id}.{step}", within
    assert array.num_chunks == 1
    return f"c.0.{step}", env_id * size + within


def change(path, name, env_id, position):
    """Flip a bit of what the group says of one row; its file."""
    shard, at = where_is(path, env_id, position)
    file = path / DATA / "zarr" / name / shard
    data = bytearray(file.read_bytes())
    data[at] ^= 2
    file.write_bytes(data)
    return f"{DATA}/zarr/{name}/{shard}"


@pytest.mark.parametrize("name", ["%flags", "terminated", "truncated"])
@pytest.mark.parametrize(("env_id", "position"), [(0, 36), (1, 60), (1, 99)])
def test_flags_that_differ_from_the_buffers_are_reported(path, name, env_id, position):
    file = change(path, name, env_id, position)
    (finding,) = verify_buffer(path).findings
    assert (finding.kind, finding.file, finding.damage) == ("file", file, True)
    where = f"environment {env_id}, position {position}: {name!r} is "
    assert finding.message.startswith(where)
    assert "but flags.bin says " in finding.message
    assert verify_buffer(path, deep=False).ok


def test_flags_of_an_overwritten_row_are_not_checked(path):
    change(path, "%flags", 1, 35)
    assert verify_buffer(path).findings == ()


def test_missing_shards_are_reported(path):
    shutil.rmtree(path / DATA / "zarr/truncated")
    (path / DATA / "zarr/truncated").mkdir()
    kinds = {(f.kind, "is missing" in f.message) for f in verify_buffer(path).findings}
    assert kinds == {("file", True)}


@pytest.mark.parametrize("name", ["", "reward/", "%flags/"])
@pytest.mark.parametrize("deep", [True, False])
def test_missing_metadata_is_reported(path, name, deep):
    (path / DATA / f"zarr/{name}zarr.json").unlink()
    (finding,) = verify_buffer(path, deep=deep).findings
    assert (finding.kind, finding.damage) == ("file", True)
    assert f"{name}zarr.json is missing" in finding.message


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("", ("attributes", "mmreplay", "capacity"), "attributes/mmreplay/capacity"),
        ("", ("attributes", "mmreplay", "uuid"), "attributes/mmreplay/uuid"),
        ("reward/", ("data_type",), "data_type"),
        ("observation/", ("chunk_grid", "name"), "chunk_grid/name"),
        ("%flags/", ("codecs",), "codecs"),
    ],
)
def test_metadata_of_another_group_is_reported(path, name, keys, message):
    file = path / DATA / f"zarr/{name}zarr.json"
    value = json.loads(file.read_bytes())
    inner = value
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = "another"
    file.write_text(json.dumps(value))
    (finding,) = verify_buffer(path, deep=False).findings
    assert finding.file == f"{DATA}/zarr/{name}zarr.json"
    assert f"{message} must be " in finding.message
    file.write_text("{")
    (finding,) = verify_buffer(path, deep=False).findings
    assert "zarr.json is not valid JSON" in finding.message


def test_what_a_user_says_may_nest_as_deep_as_metadata_takes(tmp_path):
    inner = 1
    for _ in range(strict_json.MAX_DEPTH - 2):
        inner = [inner]
    path = tmp_path / "d"
    mr.ReplayBuffer.create(path, schema(), 64, 2, user_metadata={"a": inner}, **ENGINE).close()
    assert verify_buffer(path).findings == ()


@pytest.mark.sliced(1)
def test_a_copy_by_compact_is_whole(path, tmp_path):
    change(path, "%flags", 0, 40)
    (path / DATA / "zarr/zarr.json").unlink()
    mr.compact(path, tmp_path / "c")
    assert verify_buffer(tmp_path / "c").findings == ()


def test_names_that_are_not_ours_are_notes(path):
    for name in ("stranger", "reward/c.0.0.0", "reward/c.0.0.bak"):
        (path / DATA / "zarr" / name).write_bytes(b"")
    report = verify_buffer(path, deep=False)
    assert report.ok
    first, second = report.findings
    assert (first.kind, second.kind) == ("unknown", "unknown")
    assert f"{DATA}/zarr holds stranger, which is not" in first.message
    assert "zarr/reward holds c.0.0.0 and 1 more, which is not" in second.message


@pytest.mark.sliced(1)
def test_a_half_made_shard_is_left_over_unless_its_writer_lives(path):
    with mr.ReplayBuffer.open(path, "r+"):
        (path / DATA / "zarr/tmp-0").write_bytes(b"")
        assert verify_buffer(path).findings == ()
    (finding,) = verify_buffer(path).findings
    assert (finding.kind, finding.damage) == ("left_over", False)
    mr.ReplayBuffer.open(path, "r+").close()
    assert verify_buffer(path).findings == ()


@pytest.mark.sliced(1)
def test_what_a_live_writer_does_meanwhile_is_no_damage(path, rng):
    done = threading.Event()
    batches = [steps(rng, 7, 2) for _ in range(4)]

    def write():
        with mr.ReplayBuffer.open(path, "r+") as buffer:
            number = 0
            while not done.is_set():
                buffer.extend(batches[number % 4])
                number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        reports = [verify_buffer(path) for _ in range(15)]
    finally:
        done.set()
        writer.join()
    assert [f for r in reports for f in r.findings if f.damage] == []
    assert np.all([r.ok for r in reports])
