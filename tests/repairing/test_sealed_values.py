"""Repair of compressed buffers with values that vary, in shards and in the heap."""

import os
import shutil
import struct

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.episodes import BREAK, START
from mmreplay.testing.disks import QuickDisk, using
from mmreplay.verify import verify_buffer
from tests.repairing.test_values import (
    DATA,
    HEAP_BYTES,
    LOST_HEAPS,
    add,
    create,
    forge,
    numbers_of,
    values_at,
)

CAPACITY, STEPS = 64, 406
SHARD_ROWS = 4
ALIVE = range(STEPS - CAPACITY, STEPS)


@pytest.fixture(autouse=True)
def quick_disk():
    """A disk that syncs nothing: no test here cuts the power."""
    with using(QuickDisk()):
        yield


def sealed_ring(path, seal=True):
    """A closed buffer of two environments, whose heaps lapped; numbers are positions.

    Its newest rows are in no shard where it was not to be sealed.
    """
    with create(path, capacity=CAPACITY, engine="zarr", codec="none") as buffer:
        assert buffer.metadata.sharding.shard_rows == SHARD_ROWS
        add(buffer, range(STEPS))
        assert (buffer._files.commit.heap_tails > 0).all()
        buffer.close(seal=seal)
    return path


@pytest.fixture(scope="module")
def rings(tmp_path_factory):
    """By whether all rows are in shards, a ring to be copied."""
    folder = tmp_path_factory.mktemp("rings")
    with using(QuickDisk()):
        return {seal: sealed_ring(folder / str(seal), seal) for seal in (True, False)}


@pytest.fixture
def damaged(rings, tmp_path):
    """The path of a ring, to be damaged."""
    return shutil.copytree(rings[True], tmp_path / "b")


@pytest.fixture
def staged(rings, tmp_path):
    """The newest rows are in the staging files, with their values in the heap."""
    path = shutil.copytree(rings[False], tmp_path / "b")
    with mr.ReplayBuffer.open(path) as buffer:
        rows = buffer.metadata.ring.rows(np.zeros(2, int), np.array([STEPS - 5, STEPS - 1]))
        assert buffer._files.store.sealed(rows).tolist() == [True, False]
    return path


def shard_of(path, env_id, position, name="text"):
    with mr.ReplayBuffer.open(path) as buffer:
        slots = buffer.metadata.ring.slots
    tail = ".0" if name.startswith("%references") else ""
    step = position % slots // SHARD_ROWS
    return path / DATA / "zarr" / name / f"c.{env_id}.{step}{tail}"


def rows_of_shard(position):
    first = position // SHARD_ROWS * SHARD_ROWS
    return range(first, min(first + SHARD_ROWS, STEPS))


def with_values(numbers):
    """Those of the rows that have values."""
    return [number for number in numbers if number % 7]


def assert_repaired(made, *dropped, count=100):
    """The new buffer is whole, holds the other rows, and takes more."""
    expected = [[n for n in ALIVE if n not in each] for each in dropped]
    assert verify_buffer(made.target).findings == ()
    assert numbers_of(made.target) == expected
    assert made.rows == sum(map(len, expected))
    with mr.ReplayBuffer.open(made.target, "r+", commit_every=None) as buffer:
        assert buffer.metadata.engine == "zarr"
        assert buffer.heads.tolist() == [STEPS, STEPS]
        add(buffer, range(STEPS, STEPS + count))
    assert verify_buffer(made.target).findings == ()
    assert numbers_of(made.target)[1][-1] == STEPS + count - 1


@pytest.mark.parametrize("seal", [True, False])
@pytest.mark.sliced(1)
@pytest.mark.slow
def test_every_value_comes_along_also_those_that_the_heap_gave_up(rings, tmp_path, seal):
    path = shutil.copytree(rings[seal], tmp_path / "b")
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    made = mr.repair(path)
    assert (made.cuts, made.restored) == ((), ())
    assert before == {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    assert_repaired(made, [], [], count=300)


@pytest.mark.slow
def test_in_place_both_change_places(damaged):
    made = mr.repair(damaged, in_place=True)
    assert made.target == damaged
    assert_repaired(made, [], [])


def test_a_value_that_was_changed_in_its_shard_costs_its_row_alone(damaged):
    shard = shard_of(damaged, 1, 375)
    data = shard.read_bytes()
    assert data.count(b"375 of 1 ") == 1
    shard.write_bytes(data.replace(b"375 of 1 ", b"375 of 2 "))
    made = mr.repair(damaged)
    assert made.cuts == (mr.DroppedRows(1, 375, 376, "value"),)
    assert_repaired(made, [], [375])


DAMAGED = {"no UTF-8": b"\xff", "half a character": b"\x80", "another character": b"Z"}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("at", ["first", "last"])
def test_a_text_that_was_changed_in_the_heap_costs_its_row_alone_when_sealed(tmp_path, damage, at):
    # As it was, no reader could take its chunk, and a repair dropped all of its rows.
    schema = mr.Schema({"text": mr.Field.text(max_bytes=20), "more": mr.Field.bytes(max_bytes=20)})
    options = {"heap_bytes": 65_536, "engine": "zarr", "commit_every": None}
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(path, schema, 100, **options) as buffer:
        assert buffer.metadata.sharding.shard_rows == 16
        buffer.extend(text=["åaaaaaa"] * 20, more=[b"mmmmmmmm"] * 20)
        buffer.close(seal=False)
    # Two values of eight bytes for each row; those of the first rows are in a shard.
    for value in (2 * 17, 2 * 18 + 1):
        with (path / DATA / "heap.bin").open("r+b") as file:
            file.seek(8 * value + (0 if at == "first" else 7))
            file.write(DAMAGED[damage])
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        buffer.extend(text=["c"] * 70, more=[b"c"] * 70)
    with mr.ReplayBuffer.open(path) as buffer:
        sealed = buffer._files.store.sealed(np.arange(90))
        assert sealed.all()
        others = [position for position in range(90) if position != 17]
        assert buffer.get_field("text", 0, others).text() == (["åaaaaaa"] * 19 + ["c"] * 70)
        if damage == "another character" and at == "last":
            assert buffer.get_field("text", 0, 17).text() == "åaaaaaZ"
        else:
            with pytest.raises(mr.errors.CorruptError, match="in position 17 of"):
                buffer.get_field("text", 0, 17)
        # Bytes of any kind can be stored as they are.
        assert DAMAGED[damage] in buffer.get_field("more", 0, 18).values.tobytes()
    found = [finding.message for finding in verify_buffer(path).findings]
    assert [message.partition(": ")[0] for message in found] == [
        "field 'text' of environment 0, position 17",
        "field 'more' of environment 0, position 18",
    ]
    made = mr.repair(path)
    assert made.cuts == (mr.DroppedRows(0, 17, 19, "value"),)
    assert verify_buffer(made.target).findings == ()


@pytest.mark.slow
def test_values_of_other_lengths_than_their_references_cost_their_rows_alone(damaged):
    shard = shard_of(damaged, 0, 373)
    data = shard.read_bytes()
    # One byte less of one value, and one more of the next in the same chunk.
    at = data.index(b"373 of 0 ")
    assert data[at + 9 : at + 13] == struct.pack("<I", 9)
    forged = struct.pack("<I", 8) + b"373 of 0" + struct.pack("<I", 10) + b"x"
    shard.write_bytes(data[: at - 4] + forged + data[at + 13 :])
    made = mr.repair(damaged)
    assert made.cuts == (mr.DroppedRows(0, 373, 375, "value"),)
    assert_repaired(made, [373, 374], [])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: b"\xff" * 4 + data[4:], id="its count"),
        pytest.param(lambda data: data[:-1] + b"\xff", id="its index"),
        pytest.param(lambda data: data[:10], id="cut"),
        pytest.param(lambda data: b"", id="empty"),
    ],
)
@pytest.mark.sliced(2)
@pytest.mark.slow
def test_a_damaged_shard_of_values_costs_its_rows_with_values(damaged, change):
    shard = shard_of(damaged, 1, 375)
    shard.write_bytes(change(shard.read_bytes()))
    made = mr.repair(damaged)
    lost = with_values(rows_of_shard(375))
    assert {cut.why for cut in made.cuts} == {"value"}
    assert made.cut_rows == len(lost)
    assert_repaired(made, [], lost)


@pytest.mark.parametrize("stand_in", ["nothing", "folder", "link"])
@pytest.mark.slow
def test_a_shard_of_values_that_is_gone_costs_its_rows_with_values(damaged, stand_in):
    shard = shard_of(damaged, 1, 375, "tokens")
    shard.unlink()
    if stand_in == "folder":
        shard.mkdir()
    elif stand_in == "link":
        shard.symlink_to(shard_of(damaged, 0, 375, "tokens"))
    made = mr.repair(damaged)
    assert_repaired(made, [], with_values(rows_of_shard(375)))


@pytest.mark.slow
def test_a_shard_of_references_that_is_gone_costs_its_rows(damaged):
    shard_of(damaged, 1, 375, "%references/text").unlink()
    made = mr.repair(damaged)
    assert {(cut.env_id, cut.why) for cut in made.cuts} == {(1, "missing")}
    lost = [n for cut in made.cuts for n in range(cut.first, cut.stop)]
    # The block under their checksum.
    assert set(rows_of_shard(375)) <= set(lost)
    assert len(lost) <= 8
    assert_repaired(made, [], lost)


@pytest.mark.slow
def test_references_that_no_checksum_covers_are_read_all_the_same(damaged):
    # The newest rows are in no whole block, and so under no checksum.
    with mr.ReplayBuffer.open(damaged) as buffer:
        assert STEPS % buffer.metadata.ring.block_rows
    shard_of(damaged, 0, STEPS - 1, "%references/text").unlink()
    made = mr.repair(damaged)
    assert {cut.why for cut in made.cuts} == {"value"}
    assert_repaired(made, rows_of_shard(STEPS - 1), [])


def test_a_value_that_was_changed_in_the_heap_costs_its_row_alone(staged):
    reference, _ = values_at(staged, 1, STEPS - 1)
    with (staged / DATA / "heap.bin").open("r+b") as file:
        file.seek(HEAP_BYTES + int(reference["position"]) % HEAP_BYTES)
        file.write(b"\xff")
    made = mr.repair(staged)
    assert made.cuts == (mr.DroppedRows(1, STEPS - 1, STEPS, "value"),)
    assert numbers_of(made.target) == [list(ALIVE), list(ALIVE)[:-1]]
    assert verify_buffer(made.target).findings == ()


@pytest.mark.parametrize(
    "reference",
    [
        pytest.param(((1 << 62) - 8, 1, 0), id="out of range"),
        pytest.param((3 * HEAP_BYTES - 8, 90, 0), id="across the ring's end"),
        pytest.param((4, 8, 0), id="unaligned"),
        pytest.param((-8, 8, 0), id="negative"),
        pytest.param((0, 101, 0), id="too long"),
        pytest.param((0, 0, 7), id="empty with a checksum"),
        pytest.param((8, 0, 0), id="empty with a position"),
        pytest.param((0, 8, 0), id="given up"),
    ],
)
@pytest.mark.sliced(1)
def test_a_reference_in_the_staging_files_that_leads_elsewhere_costs_its_row_alone(
    staged, reference
):
    forge(staged, 0, STEPS - 2, reference)
    made = mr.repair(staged, keep_unproven=True)
    assert made.cuts == (mr.DroppedRows(0, STEPS - 2, STEPS - 1, "value"),)
    assert_repaired(made, [STEPS - 2], [])


@pytest.mark.parametrize("change", LOST_HEAPS)
@pytest.mark.sliced(1)
def test_a_heap_that_is_gone_costs_rows_in_no_shard_and_no_others(staged, change):
    LOST_HEAPS[change](staged / DATA / "heap.bin")
    made = mr.repair(staged)
    assert {cut.why for cut in made.cuts} == {"value"}
    lost = with_values(rows_of_shard(STEPS - 1))
    assert_repaired(made, lost, lost)


@pytest.mark.slow
def test_a_short_heap_costs_the_values_behind_its_end(staged):
    reference, _ = values_at(staged, 1, STEPS - 2)
    nbytes = HEAP_BYTES + int(reference["position"]) % HEAP_BYTES
    os.truncate(staged / DATA / "heap.bin", nbytes)
    made = mr.repair(staged)
    assert any(f"heap.bin has {nbytes} bytes of" in fact for fact in made.restored)
    assert_repaired(made, [], [STEPS - 2, STEPS - 1])


@pytest.mark.slow
def test_what_lies_in_shards_needs_no_heap(damaged):
    (damaged / DATA / "heap.bin").unlink()
    made = mr.repair(damaged)
    assert made.cuts == ()
    assert made.restored == ("heap.bin is missing: rows in other files are used",)
    assert_repaired(made, [], [])


@pytest.mark.slow
def test_staging_files_that_are_gone_cost_what_no_shard_holds(staged):
    (staged / DATA / "records.bin").unlink()
    made = mr.repair(staged)
    assert {cut.why for cut in made.cuts} == {"missing"}
    assert_repaired(made, rows_of_shard(STEPS - 1), rows_of_shard(STEPS - 1))


@pytest.mark.slow
def test_without_the_shard_index_rows_are_looked_for_in_shards(damaged):
    (damaged / DATA / "places.bin").unlink()
    made = mr.repair(damaged)
    # Rows without a checksum may lie in shards or not, which nothing shows now.
    lost = {n for cut in made.cuts for n in range(cut.first, cut.stop)}
    assert {cut.why for cut in made.cuts} == {"missing"}
    assert lost == {*rows_of_shard(ALIVE[0])} & {*ALIVE} | {*rows_of_shard(ALIVE[-1])}
    assert_repaired(made, lost, lost)


def test_without_a_record_in_commit_values_are_known_by_their_checksums(damaged):
    commit = damaged / DATA / "COMMIT"
    commit.write_bytes(bytes(commit.stat().st_size))
    made = mr.repair(damaged)
    assert verify_buffer(made.target).findings == ()
    for numbers in numbers_of(made.target):
        assert len(numbers) > CAPACITY - 16
        assert numbers == list(range(numbers[0], numbers[-1] + 1))


def test_rows_after_those_that_are_lost_begin_an_episode(damaged):
    shard_of(damaged, 0, 373).unlink()
    made = mr.repair(damaged)
    (cut,) = made.cuts
    with mr.ReplayBuffer.open(made.target) as buffer:
        flags = buffer.flags(0, [cut.stop - 1, cut.stop, cut.stop + 1])
        assert flags.tolist() == [0, START | BREAK, 0]
        assert buffer.get_field("number", 0, [cut.stop]).tolist() == [cut.stop]
