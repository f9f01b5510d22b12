"""Values that vary in compressed buffers: shards hold them, and the heap laps."""

import contextlib
import errno
import json
import os
import shutil
import struct
import threading
import warnings
from functools import cache

import google_crc32c
import numpy as np
import pytest
from numcodecs import blosc

import mmreplay as mr
from mmreplay.buffer.copy_files import ShardCopy
from mmreplay.buffer.value_reader import ValueReader
from mmreplay.errors import CorruptError, FullError, SchemaError
from mmreplay.format import metadata as metadata_file
from mmreplay.format.sharding import Sharding
from mmreplay.schema.field import REFERENCE
from mmreplay.storage.zarr.engine import ZarrStore
from mmreplay.storage.zarr.sealing import Sealing
from mmreplay.storage.zarr.shards import ShardMaker
from mmreplay.testing.disks import QuickDisk, using
from tools.torture.powerloss import abandon

SCHEMA = mr.Schema(
    {
        "observation": mr.Field.text(max_bytes=60),
        "tokens": mr.Field((None, 2), "int16", max_length=20),
        "blob": mr.Field.bytes(max_bytes=30),
        "number": mr.Field((), "int64"),
    }
)
HEAP_BYTES = 8192
"""Of about eighty rows; a shard has eight."""
CAPACITY, SLOTS = 200, 232
DATA = "data-000001"


@pytest.fixture(autouse=True)
def quick_disk():
    """A disk that syncs nothing: no test here cuts the power."""
    with using(QuickDisk()):
        yield


@cache
def step(number):
    rng = np.random.default_rng(number)
    return {
        "observation": "å" * int(rng.integers(0, 31)),
        "tokens": rng.integers(-9, 9, (int(rng.integers(0, 21)), 2)).astype(np.int16),
        "blob": bytes(rng.integers(0, 256, int(rng.integers(0, 31))).astype(np.uint8)),
        "number": number,
    }


def create(path, **options):
    given = {"heap_bytes": HEAP_BYTES, "commit_every": None, "engine": "zarr"}
    return mr.ReplayBuffer.create(path, SCHEMA, CAPACITY, **(given | options))


def go_on(buffer, steps):
    for number in range(int(buffer.heads[0]), int(buffer.heads[0]) + steps):
        buffer.add(step(number))


def filled(path, steps, **options):
    buffer = create(path, **options)
    go_on(buffer, steps)
    return buffer


@pytest.fixture(scope="module")
def closed_ring(tmp_path_factory):
    """A closed buffer of 200 rows, to be copied."""
    path = tmp_path_factory.mktemp("closed") / "ring"
    with using(QuickDisk()):
        filled(path, 300).close()
    return path


@pytest.fixture
def ring(closed_ring, tmp_path):
    """The path of a closed buffer of 200 rows."""
    return shutil.copytree(closed_ring, tmp_path / "ring")


def reopened(path):
    return mr.ReplayBuffer.open(
        path, "r+", on_resume="continue", commit_every=None, check_values=True
    )


def check(buffer, count=CAPACITY):
    """Every row alive is what its position says, and there are so many."""
    batch = buffer.gather_all()
    assert len(batch) == count
    same(batch)


def same(batch):
    for at, position in enumerate(batch.positions.tolist()):
        expected = step(position)
        assert batch["observation"][at].tobytes().decode() == expected["observation"]
        assert np.array_equal(batch["tokens"][at], expected["tokens"])
        assert batch["blob"][at].tobytes() == expected["blob"]
        assert batch["number"][at] == position


def bounds(buffer):
    commit = buffer._files.commit
    return int(commit.heap_heads[0]), int(commit.heap_tails[0])


# Writing


@pytest.mark.slow
def test_rows_live_as_long_as_the_capacity_says_however_often_the_heap_laps(tmp_path):
    buffer = create(tmp_path / "ring")
    for number in range(700):
        buffer.add(step(number))
        if number % 50 == 0:
            check(buffer, min(number + 1, CAPACITY))
    heap_head, heap_tail = bounds(buffer)
    assert heap_head > 5 * HEAP_BYTES
    assert heap_head - HEAP_BYTES <= heap_tail < heap_head
    buffer.close()
    with mr.ReplayBuffer.open(tmp_path / "ring", check_values=True) as reader:
        check(reader)
        same(reader.sample(64))
    report = mr.verify_buffer(tmp_path / "ring")
    assert report.findings == ()


@pytest.mark.slow
def test_blocks_are_published_as_the_heap_takes_them(tmp_path):
    buffer = create(tmp_path / "ring")
    for first in range(0, 600, 150):
        steps = [step(number) for number in range(first, first + 150)]
        columns = {path: [each[path] for each in steps] for path in SCHEMA.paths}
        columns["number"] = np.array(columns["number"])
        buffer.extend(columns)
        check(buffer, min(first + 150, CAPACITY))
    buffer.close()
    assert mr.verify_buffer(tmp_path / "ring").ok


@pytest.mark.slow
def test_a_writer_goes_on_in_a_shard_that_a_close_has_sealed(tmp_path):
    buffer = create(tmp_path / "ring")
    for turn in range(8):
        go_on(buffer, 37)
        check(buffer, min(37 * (turn + 1), CAPACITY))
        buffer.close(seal=turn % 3 != 0)
        assert mr.verify_buffer(tmp_path / "ring").ok
        buffer = reopened(tmp_path / "ring")
    buffer.close()


def test_a_killed_writer_leaves_every_published_value(tmp_path):
    buffer = create(tmp_path / "ring")
    for turn in range(6):
        go_on(buffer, 61)
        abandon(buffer)
        buffer = reopened(tmp_path / "ring")
        check(buffer, min(61 * (turn + 1), CAPACITY))
    buffer.close()


@pytest.mark.slow
def test_removed_values_make_space_though_no_shard_holds_them(tmp_path):
    # Fewer rows than a shard has, of more bytes than the heap has.
    buffer = create(tmp_path / "ring", heap_bytes=4 * HEAP_BYTES)
    rows = buffer.metadata.sharding.shard_rows
    assert rows == 32
    full = {"observation": "o" * 60, "blob": b"b" * 30, "number": 1}
    full["tokens"] = np.ones((20, 2), np.int16)
    for _ in range(rows * 9):
        for _ in range(rows - 1):
            buffer.add(full)
        buffer.clear()
    assert bounds(buffer)[0] > 12 * HEAP_BYTES
    buffer.close()


@pytest.mark.slow
def test_two_environments_seal_each_by_itself(tmp_path):
    buffer = create(tmp_path / "ring", num_envs=2, autoreset="disabled")
    assert buffer.layout == "env_major"
    for number in range(750):
        row = step(number // 3 if number % 3 == 0 else number - number // 3 - 1)
        columns = {path: [value] for path, value in row.items()}
        buffer.add(columns, env_ids=[0] if number % 3 == 0 else [1])
    assert buffer.heads.tolist() == [250, 500]
    check(buffer, 2 * CAPACITY)
    buffer.close()
    assert mr.verify_buffer(tmp_path / "ring").ok


def test_a_full_disk_refuses_the_row_that_needs_a_shard_and_loses_none(tmp_path, monkeypatch):
    buffer = create(tmp_path / "ring")

    def full(self, range_id):
        raise FullError("no space", errno_=errno.ENOSPC)

    with monkeypatch.context() as patched:
        patched.setattr(ShardMaker, "made", full)
        with pytest.raises(FullError, match="cannot seal the oldest rows of the heap"):
            go_on(buffer, 400)
        count = int(buffer.heads[0])
        assert 40 < count < 200
        check(buffer, count)
        with pytest.raises(FullError, match=r"Free some space, and call again\."):
            buffer.add(step(count))
    go_on(buffer, 300)
    check(buffer)
    buffer.close()
    assert mr.verify_buffer(tmp_path / "ring").ok


# Reading


@pytest.mark.slow
def test_a_reader_gets_whole_values_from_a_writer_that_laps(tmp_path):
    writer = filled(tmp_path / "ring", 100)
    stop, failures = threading.Event(), []

    def read():
        with mr.ReplayBuffer.open(tmp_path / "ring") as reader:
            while not stop.is_set():
                try:
                    same(reader.sample(32))
                except mr.StaleError:
                    continue
                except BaseException as error:
                    failures.append(error)
                    return

    thread = threading.Thread(target=read)
    thread.start()
    go_on(writer, 900)
    stop.set()
    thread.join()
    writer.close()
    assert not failures
    assert bounds(writer)[0] > 8 * HEAP_BYTES


def test_a_value_that_is_sealed_and_overwritten_while_it_is_read_is_read_again(
    tmp_path, monkeypatch
):
    writer = filled(tmp_path / "ring", 60)
    with mr.ReplayBuffer.open(tmp_path / "ring") as reader:
        store = reader._files.store
        heap, calls = store.heap, []
        take = type(heap).take

        def overwritten(self, *arguments):
            if self is heap and not calls:
                calls.append(1)
                go_on(writer, 130)
            take(self, *arguments)

        monkeypatch.setattr(type(heap), "take", overwritten)
        batch = reader.take(0, [55, 56, 57])
        assert calls
        same(batch)
    assert bounds(writer)[1] > HEAP_BYTES
    writer.close()


@pytest.mark.parametrize("tail", [104, 106, 111, 112])
@pytest.mark.sliced(2)
def test_the_other_rows_of_a_shard_that_is_overwritten_are_not_read(tmp_path, monkeypatch, tail):
    # Rows below a tail may be overwritten, but the shard holds others: those are put
    # back, and the heap may have given up their values.
    writer = filled(tmp_path / "ring", 240, heap_bytes=2 * HEAP_BYTES)
    assert (writer.slots, writer.metadata.sharding.shard_rows) == (240, 16)
    writer.dequeue(tail - 40)
    writer.commit()
    with mr.ReplayBuffer.open(tmp_path / "ring") as reader:
        store, calls, take_values = reader._files.store, [], ZarrStore.take_values

        def slowly(self, *arguments):
            if self is store and not calls:
                calls.append(1)
                while writer.heads[0] < writer.slots + tail // 8 * 8 - 2:
                    go_on(writer, 1)
            return take_values(self, *arguments)

        monkeypatch.setattr(ZarrStore, "take_values", slowly)
        with contextlib.suppress(mr.StaleError):
            same(reader.take(0, [tail, tail + 1]))
        assert calls
    writer.close()


@pytest.mark.parametrize("read_mode", ["mmap", "pread"])
@pytest.mark.sliced(1)
def test_draws_hold_values_of_shards_and_of_the_heap(tmp_path, read_mode):
    buffer = filled(tmp_path / "ring", 300)
    buffer.commit()
    with mr.ReplayBuffer.open(tmp_path / "ring", read_mode=read_mode) as reader:
        sealed = reader._files.store.sealed(np.arange(reader.slots))
        assert sealed.any()
        assert not sealed.all()
        same(reader.take(0, np.arange(100, 299)))
    sampler = mr.SequenceSampler(5)
    with mr.ReplayBuffer.open(tmp_path / "ring", sampler=sampler) as reader:
        windows = reader.sample(8)
        assert windows["observation"].shape == (8, 5)
        for row in range(8):
            for at in range(5):
                value = windows["observation"][row, at]
                expected = step(int(windows.positions[row]) + at)["observation"]
                assert value.tobytes().decode() == expected
    buffer.close()


# With any Zarr reader


@pytest.mark.slow
def test_zarr_python_reads_the_values_of_a_closed_buffer_unaided(ring):
    zarr = pytest.importorskip("zarr")
    with mr.ReplayBuffer.open(ring) as buffer:
        path = buffer.zarr_path
    with warnings.catch_warnings():
        # Of types whose specification may change it warns where it writes, not here.
        warnings.simplefilter("error")
        group = zarr.open_group(path, mode="r")
        about = group.attrs["mmreplay"]
        tokens = group["tokens"]
        kept = tokens.attrs["mmreplay"]
        assert (kept["dtype"], kept["inner_shape"]) == ("int16", [2])
        for position in range(about["first"][0], about["stop"][0]):
            slot, expected = position % about["slots"], step(position)
            at = slice(slot, slot + 1)
            assert group["observation"][0, at].tolist() == [expected["observation"]]
            assert group["blob"][0, at].tolist() == [expected["blob"]]
            value = np.frombuffer(tokens[0, at][0], kept["dtype"])
            assert np.array_equal(value.reshape(-1, 2), expected["tokens"])
    assert about["sealed"] == about["stop"]


def test_zarr_python_warns_where_it_writes_such_an_array(tmp_path):
    zarr = pytest.importorskip("zarr")
    with pytest.warns(Warning, match="does not have a Zarr V3 specification"):
        zarr.create_array(tmp_path / "a", shape=(2,), dtype="variable_length_bytes")


def test_a_group_without_its_buffer_is_refused_by_the_fields_name(ring, tmp_path):
    with mr.ReplayBuffer.open(ring) as buffer:
        shutil.copytree(buffer.zarr_path, tmp_path / "group")
    with pytest.raises(SchemaError, match="field 'observation' varies from step to"):
        mr.ReplayBuffer.open(tmp_path / "group")


# Copies


@pytest.mark.slow
def test_a_snapshot_of_a_live_buffer_can_be_written_on(tmp_path):
    writer = filled(tmp_path / "ring", 250)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            go_on(writer, 1)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for turn in range(4):
            with mr.ReplayBuffer.open(tmp_path / "ring") as reader:
                made = reader.snapshot(tmp_path / f"copy{turn}", pause=turn % 2 == 0)
            assert made.how == "link"
            with reopened(tmp_path / f"copy{turn}") as buffer:
                check(buffer, made.rows)
                go_on(buffer, 150)
                check(buffer)
            assert mr.verify_buffer(tmp_path / f"copy{turn}").ok
    finally:
        stop.set()
        thread.join()
    writer.close()


def test_a_snapshot_leaves_out_rows_that_are_cleared_meanwhile(tmp_path, monkeypatch):
    writer, rows = filled(tmp_path / "ring", 37), []
    copy_values = ShardCopy._copy_values

    def copied_late(self, env_id, first, stop):
        if not rows:
            # No shard is made of the newest ones, and the heap laps over their values.
            writer.clear()
            go_on(writer, 180)
        rows.extend(range(first, stop))
        return copy_values(self, env_id, first, stop)

    monkeypatch.setattr(ShardCopy, "_copy_values", copied_late)
    made = writer.snapshot(tmp_path / "copy")
    assert 36 in rows
    assert (made.rows, made.cut_rows) == (0, 37)
    with reopened(tmp_path / "copy") as buffer:
        assert buffer.heads.tolist() == [37]
        go_on(buffer, 150)
        check(buffer, 150)
    assert mr.verify_buffer(tmp_path / "copy").ok
    writer.close()


def test_a_snapshot_of_a_closed_buffer_can_be_written_on(ring, tmp_path):
    with mr.ReplayBuffer.open(ring) as reader:
        reader.snapshot(tmp_path / "copy")
    with reopened(tmp_path / "copy") as buffer:
        check(buffer)
        go_on(buffer, 150)
        check(buffer)
    assert mr.verify_buffer(tmp_path / "copy").ok


@pytest.mark.parametrize("heap_bytes", [None, 4096, 65_536])
@pytest.mark.slow
def test_a_resize_drops_no_row_for_want_of_heap(ring, heap_bytes):
    with reopened(ring) as buffer:
        buffer.resize(150, heap_bytes=heap_bytes)
        check(buffer, 150)
        go_on(buffer, 200)
        check(buffer, 150)
    assert mr.verify_buffer(ring).ok


@pytest.mark.slow
def test_another_field_leaves_the_values_as_they_are(ring):
    with reopened(ring) as buffer:
        buffer.add_field("more", mr.Field((), "int32"), 7)
        check(buffer)
        for number in range(300, 400):
            buffer.add({**step(number), "more": 8})
        check(buffer)
        assert buffer.gather_all()["more"].tolist() == [7] * 100 + [8] * 100
    assert mr.verify_buffer(ring).ok


@pytest.mark.parametrize("codec", ["none", "zstd", "blosc-lz4"])
@pytest.mark.sliced(1)
def test_a_compacted_copy_holds_every_value(ring, tmp_path, codec):
    assert mr.compact(ring, tmp_path / "copy", codec=codec, chunk_crc32c=True).rows
    with reopened(tmp_path / "copy") as buffer:
        check(buffer)
        go_on(buffer, 100)
        check(buffer)
    assert mr.verify_buffer(tmp_path / "copy").ok


def test_a_copy_to_memory_mapped_files_holds_what_the_heap_takes(ring, tmp_path):
    rows = mr.compact(ring, tmp_path / "copy", codec=None).rows
    assert 40 < rows < CAPACITY
    with reopened(tmp_path / "copy") as buffer:
        assert buffer.metadata.engine == "memmap"
        check(buffer, rows)


def test_rows_of_all_environments_side_by_side_become_shards_of_each(tmp_path):
    schema = mr.Schema({"text": mr.Field.text(max_bytes=60)})
    with mr.ReplayBuffer.create(
        tmp_path / "ring",
        schema,
        50,
        2,
        heap_bytes=4096,
        layout="time_major",
        autoreset="disabled",
        engine="memmap",
    ) as buffer:
        for number in range(40):
            buffer.add({"text": [f"one {number}", f"two {number}"]})
    mr.compact(tmp_path / "ring", tmp_path / "copy")
    with mr.ReplayBuffer.open(tmp_path / "copy") as copied:
        assert copied.layout == "env_major"
        texts = copied.gather_all()["text"].text()
    assert texts == [f"one {n}" for n in range(40)] + [f"two {n}" for n in range(40)]


# What is refused


def test_a_layout_whose_shards_hold_several_environments_is_refused(tmp_path):
    with pytest.raises(SchemaError, match="layout must be 'env_major' with engine="):
        create(tmp_path / "ring", layout="time_major", num_envs=2, autoreset="disabled")
    assert not (tmp_path / "ring").exists()


def test_shards_have_as_many_rows_as_a_quarter_of_the_heap_holds(tmp_path):
    longest = SCHEMA.max_heap_nbytes
    for heap_bytes, rows in ((4096, 4), (8192, 8), (1 << 20, 32)):
        with create(tmp_path / str(rows), heap_bytes=heap_bytes) as buffer:
            assert buffer.metadata.sharding.shard_rows == rows
            assert heap_bytes >= 4 * rows * longest


def test_values_that_no_chunk_can_hold_are_refused(tmp_path):
    schema = mr.Schema({"blob": mr.Field.bytes(max_bytes=1 << 31)})
    with pytest.raises(SchemaError, match="must have values of at most 2147418112"):
        mr.ReplayBuffer.create(tmp_path / "ring", schema, 10, heap_bytes="16 GiB", engine="zarr")


@pytest.mark.parametrize(
    ("shard_rows", "slots", "match"),
    [
        (16, 240, "heap_bytes must be at least 11264 for shards of 16 rows"),
        (8, 224, "slots must be at least 228 where a field varies, got 224"),
    ],
)
def test_shards_that_a_heap_could_not_wait_for_are_refused(ring, shard_rows, slots, match):
    data = json.loads((ring / "metadata.json").read_bytes())
    data["zarr"]["shard_rows"], data["slots"] = shard_rows, slots
    del data["crc32c"]
    body = json.dumps(data, indent=1)[:-2].encode() + b",\n "
    end = b'"crc32c": "%08x"\n}\n' % google_crc32c.value(body)
    (ring / "metadata.json").write_bytes(body + end)
    with pytest.raises(mr.ReplayError, match=match):
        metadata_file.load(ring)


def test_a_smaller_heap_makes_smaller_shards():
    assert Sharding("none", 0, 8).value_chunk(30) == (1, 8)
    assert Sharding("none", 0, 8).value_chunk(50_000) == (1, 2)
    assert Sharding("none", 0, 8).value_chunk(1 << 30) == (1, 1)


# Damage


def shard_of(ring, field):
    """A shard with rows alive."""
    return ring / DATA / "zarr" / field / f"c.0.{250 % SLOTS // 8}"


def change(path, chunk):
    """Replace the only chunk of a shard by what a function makes of it."""
    data = path.read_bytes()
    offset, nbytes = struct.unpack("<QQ", data[-20:-4])
    raw = chunk(bytearray(blosc.decompress(data[offset : offset + nbytes])))
    packed = raw if isinstance(raw, bytes) else blosc.compress(bytes(raw), b"lz4", 5, 0)
    index = struct.pack("<QQ", 0, len(packed))
    crc = struct.pack("<I", google_crc32c.value(index))
    path.write_bytes(packed + index + crc)


def first_value(raw):
    """Where the first value that is not empty begins, and its bytes."""
    at = 4
    while not (nbytes := int.from_bytes(raw[at : at + 4], "little")):
        at += 4
    return at + 4, nbytes


def with_bytes(raw, at, new):
    raw[at : at + len(new)] = new
    return raw


def shorter(raw):
    at, nbytes = first_value(raw)
    return raw[: at - 4] + struct.pack("<I", nbytes - 2) + raw[at + 2 :]


def huge(raw):
    """A chunk of few bytes that says it holds two gigabytes."""
    packed = bytearray(blosc.compress(bytes(raw), b"lz4", 5, 0))
    packed[4:8] = struct.pack("<I", (1 << 31) - 1)
    return bytes(packed)


FORGED = {
    "too many values": (lambda raw: with_bytes(raw, 0, b"\xff" * 4), "4294967295"),
    "too few values": (lambda raw: with_bytes(raw, 0, b"\1\0\0\0"), "it says 1 values"),
    "a length beyond": (lambda raw: with_bytes(raw, 4, b"\xff" * 4), "ends behind"),
    "bytes behind": (lambda raw: raw + b"x", "1 bytes follow the last value"),
    "no UTF-8": (lambda raw: with_bytes(raw, first_value(raw)[0], b"\xff"), "invalid start byte"),
    "half a character": (lambda raw: with_bytes(raw, first_value(raw)[0], b"\xa5"), "UTF-8|utf-8"),
    "a huge size": (huge, "its header says 2147483647 bytes"),
    "nothing": (lambda raw: b"", "does not hold 8 values"),
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.sliced(3)
def test_a_forged_chunk_is_damage_that_names_its_shard(ring, name):
    chunk, match = FORGED[name]
    shard = shard_of(ring, "observation")
    change(shard, chunk)
    with mr.ReplayBuffer.open(ring) as buffer:
        with pytest.raises(CorruptError, match=match) as caught:
            buffer.gather_all()
        assert str(shard) in str(caught.value)
    report = mr.verify_buffer(ring)
    assert not report.ok
    assert any(str(shard) in finding.message for finding in report.findings)


def test_a_value_of_another_length_than_its_reference_says_is_damage(ring):
    shard = shard_of(ring, "observation")
    change(shard, shorter)
    with (
        mr.ReplayBuffer.open(ring) as buffer,
        pytest.raises(CorruptError, match="field 'observation' is damaged in position"),
    ):
        buffer.gather_all()
    (finding,) = mr.verify_buffer(ring).findings
    assert "leads to no value, or to one of another length" in finding.message


def claim(shard, nbytes):
    """Let every reference of a shard say that its value has so many bytes."""

    def lie(raw):
        references = np.frombuffer(raw, REFERENCE)
        references["length"] = nbytes
        return raw

    change(shard, lie)


BEYOND_MEMORY = (1 << 31) - (1 << 16)
"""The longest value that may be sealed: hundreds of them exceed any memory."""


@pytest.fixture
def claimed(tmp_path):
    """The path of 300 rows of ten bytes, each of which claims two gigabytes."""
    schema = mr.Schema({"blob": mr.Field.bytes(max_bytes=BEYOND_MEMORY)})
    with mr.ReplayBuffer.create(
        tmp_path / "ring", schema, 300, engine="zarr", heap_bytes="8 GiB"
    ) as buffer:
        assert buffer.metadata.sharding.shard_rows == 1
        buffer.extend(blob=[b"x" * 10] * 300)
    for shard in (tmp_path / "ring" / DATA / "zarr" / "%references").rglob("c.*"):
        claim(shard, BEYOND_MEMORY)
    return tmp_path / "ring"


READS = {
    "sample": lambda buffer: buffer.sample(256),
    "a small sample": lambda buffer: buffer.sample(2),
    "gather_all": lambda buffer: buffer.gather_all(),
    "get_field": lambda buffer: buffer.get_field("blob", 0, np.arange(250)),
    "checked": lambda buffer: mr.ReplayBuffer.open(buffer.path, check_values=True).gather_all(),
    "a table": lambda buffer: mr.export(buffer, buffer.path.parent / "copy.parquet"),
    "a copy": lambda buffer: mr.compact(buffer.path, buffer.path.parent / "copy"),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.sliced(2)
def test_a_sealed_reference_that_claims_any_memory_is_damage_of_its_shard(claimed, read):
    match = (
        r"field 'blob' is damaged in position \d+ of environment 0: its reference does "
        r"not lead to a value in the shard .*/ring/data-000001/zarr/blob/c\.0\.\d+\. "
        "Restore the buffer from a copy, or run mmreplay repair SOURCE TARGET"
    )
    with mr.ReplayBuffer.open(claimed) as buffer, pytest.raises(CorruptError, match=match):
        READS[read](buffer)
    assert [path.name for path in claimed.parent.iterdir()] == ["ring"]


@pytest.mark.slow
def test_verify_finds_every_sealed_reference_that_claims_another_length(claimed):
    report = mr.verify_buffer(claimed)
    found = [finding for finding in report.findings if finding.kind == "value"]
    assert len(found) == 300
    assert all("leads to no value" in finding.message for finding in found)


def test_values_around_one_of_another_length_stay_their_own(ring, monkeypatch):
    shard = shard_of(ring, "observation")
    change(shard, shorter)
    # As if its row was overwritten meanwhile: then the others are the batch.
    monkeypatch.setattr(ValueReader, "_refuse_damaged", lambda *_, **__: None)
    with mr.ReplayBuffer.open(ring) as buffer:
        positions = np.arange(int(buffer.span.first[0]), int(buffer.span.stop[0]))
        texts = buffer.get_field("observation", 0, positions).text()
    expected = [step(number)["observation"] for number in positions.tolist()]
    (damaged,) = [at for at, text in enumerate(texts) if text != expected[at]]
    assert texts[damaged] == ""


def test_a_value_that_was_changed_is_found(ring):
    shard = shard_of(ring, "blob")
    change(shard, lambda raw: with_bytes(raw, first_value(raw)[0], b"\0\1\2"))
    with mr.ReplayBuffer.open(ring) as buffer:
        buffer.gather_all()
    with (
        mr.ReplayBuffer.open(ring, check_values=True) as buffer,
        pytest.raises(CorruptError, match="its value differs from its checksum"),
    ):
        buffer.gather_all()
    (finding,) = mr.verify_buffer(ring).findings
    assert "the checksum of its value must be" in finding.message


@pytest.mark.parametrize(
    "reference", [(-8, 1, 0), (1 << 40, 1, 0), (0, 2**32 - 1, 0), (HEAP_BYTES - 8, 40, 0)]
)
def test_a_forged_reference_of_a_row_in_no_shard_is_damage(tmp_path, reference):
    buffer = filled(tmp_path / "ring", 100)
    buffer.close(seal=False)
    with mr.ReplayBuffer.open(tmp_path / "ring") as reader:
        rows = np.flatnonzero(~reader._files.store.sealed(np.arange(100)))
    stride = os.path.getsize(tmp_path / "ring" / DATA / "records.bin") // buffer.slots
    with open(tmp_path / "ring" / DATA / "records.bin", "r+b") as file:
        file.seek(int(rows[0]) * stride)
        file.write(np.array([reference], REFERENCE).tobytes())
    with (
        mr.ReplayBuffer.open(tmp_path / "ring") as reader,
        pytest.raises(CorruptError, match=f"is damaged in position {rows[0]} of"),
    ):
        reader.gather_all()
    assert not mr.verify_buffer(tmp_path / "ring").ok


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda path: path.unlink(), r"heap\.bin is missing"),
        (lambda path: os.truncate(path, 100), r"heap\.bin has 100 bytes, but"),
        (lambda path: path.write_bytes(bytes(4096)), r"heap\.bin has 4096 bytes, but"),
    ],
)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_heap_that_is_not_there_is_damage(ring, damage, match, mode):
    damage(ring / DATA / "heap.bin")
    with pytest.raises(CorruptError, match=match):
        mr.ReplayBuffer.open(ring, mode)
    assert not mr.verify_buffer(ring).ok


def test_a_heap_that_was_replaced_is_damage_of_the_rows_in_no_shard(tmp_path):
    filled(tmp_path / "ring", 100).close(seal=False)
    (tmp_path / "ring" / DATA / "heap.bin").write_bytes(os.urandom(HEAP_BYTES))
    with mr.ReplayBuffer.open(tmp_path / "ring", check_values=True) as reader:
        staged = np.flatnonzero(~reader._files.store.sealed(np.arange(100)))
        assert 0 < len(staged) < 20
        with pytest.raises(CorruptError, match="its value differs from its checksum"):
            reader.get_field("observation", 0, staged)
        for number in np.setdiff1d(np.arange(100), staged).tolist():
            text = reader.get_field("observation", 0, [number]).text()
            assert text == [step(number)["observation"]]
    found = mr.verify_buffer(tmp_path / "ring").findings
    assert {finding.kind for finding in found} == {"value"}


# Rows that are held


@pytest.mark.slow
def test_rows_that_are_held_stay_with_their_values(tmp_path, monkeypatch):
    held, asked, put_back = 0, [], []

    def before_overwrite(heads, tails, needed, target):
        asked.append((int(heads[0]), int(needed[0])))
        if needed[0] > held + CAPACITY:
            raise RuntimeError("not yet")
        # As few as can be.
        return needed

    monkeypatch.setattr(Sealing, "_unpack", lambda *_: put_back.append(1))
    buffer = create(tmp_path / "ring")
    rows = buffer.metadata.sharding.shard_rows
    buffer.hold_rows(before_overwrite)
    go_on(buffer, CAPACITY)
    for held in range(9, 700, 9):
        with pytest.raises(RuntimeError, match="not yet"):
            go_on(buffer, 99)
        # Held rows are there, and as limits are whole shards, up to seven more.
        assert held - 8 < buffer.span.first[0] <= held
        check(buffer)
        limit = int(buffer._files.commit.limits[0])
        assert limit <= SLOTS or limit % rows == 0
    # Rows do not end with the heap's bytes, so that nothing asked for those.
    assert bounds(buffer)[0] > 8 * HEAP_BYTES
    assert all(0 < needed - head <= rows for head, needed in asked)
    assert not put_back
    buffer.hold_rows(None)
    go_on(buffer, 300)
    check(buffer)
    buffer.close()
    assert mr.verify_buffer(tmp_path / "ring").ok


def test_a_field_that_varies_joins_a_ring_of_others(tmp_path):
    schema = mr.Schema({"number": mr.Field((), "int64")})
    with mr.ReplayBuffer.create(
        tmp_path / "ring", schema, 60, engine="zarr", commit_every=None
    ) as buffer:
        for number in range(100):
            buffer.add({"number": number})
        text = mr.Field.text(max_bytes=60)
        buffer.add_field("text", text, "", heap_bytes=4096)
        for number in range(100, 180):
            buffer.add({"number": number, "text": f"step {number}"})
            texts = buffer.gather_all()["text"].text()
            assert len(texts) == 60
        assert texts == [f"step {number}" for number in range(120, 180)]
    assert mr.verify_buffer(tmp_path / "ring").ok
