"""Repair of buffers with values that vary: each value whole, or its row dropped."""

import os

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.format.metadata import load
from mmreplay.schema.field import REFERENCE
from mmreplay.storage.layout import record_layout
from mmreplay.verify import verify_buffer

DATA = "data-000001"
SCHEMA = mr.Schema(
    {
        "number": mr.Field((), "int64"),
        "tokens": mr.Field((None, 2), "int32", max_length=20),
        "text": mr.Field.text(max_bytes=100),
        "large": mr.Field((600,), "int64"),
    }
)
HEAP_BYTES = 8192
STEPS = 40


def step(number, env_id):
    """A row, by its number; every seventh has no value."""
    length = number % 7
    return {
        "number": number,
        "tokens": np.full((length, 2), number + 1000 * env_id, np.int32),
        "text": f"{number} of {env_id} " * (length > 0),
        "large": np.full(600, number),
    }


def add(buffer, numbers):
    for number in numbers:
        both = [step(number, env_id) for env_id in range(2)]
        buffer.add({path: [each[path] for each in both] for path in SCHEMA.fields})


def create(path, layout="env_major", capacity=64, **options):
    return mr.ReplayBuffer.create(
        path,
        SCHEMA,
        capacity,
        2,
        layout=layout,
        commit_every=None,
        autoreset="disabled",
        **{"heap_bytes": HEAP_BYTES, **options},
    )


@pytest.fixture(params=["env_major", "time_major"])
def damaged(tmp_path, request):
    """The path of a closed buffer of two environments, to be damaged."""
    with create(tmp_path / "b", request.param) as buffer:
        add(buffer, range(STEPS))
    return tmp_path / "b"


def numbers_of(path):
    """The rows of each environment, after comparing each of their values."""
    with mr.ReplayBuffer.open(path, check_values=True) as buffer:
        rows = buffer.gather_all()
    found = [[], []]
    for at, env_id in enumerate(rows.env_ids.tolist()):
        number = int(rows["number"][at])
        expected = step(number, env_id)
        assert rows["tokens"][at].tolist() == expected["tokens"].tolist()
        assert rows["text"].text()[at] == expected["text"]
        assert (rows["large"][at] == number).all()
        found[env_id].append(number)
    return found


def assert_repaired(made, expected):
    """The new buffer is whole, holds these rows, and takes more."""
    assert verify_buffer(made.target).findings == ()
    assert numbers_of(made.target) == expected
    assert made.rows == sum(map(len, expected))
    with mr.ReplayBuffer.open(made.target, "r+", commit_every=None) as buffer:
        heads = buffer.heads.copy()
        add(buffer, range(STEPS, STEPS + 100))
        assert (buffer.heads == heads + 100).all()
    assert verify_buffer(made.target).findings == ()
    assert numbers_of(made.target)[0][-1] == STEPS + 99


def without(*dropped):
    return [[n for n in range(STEPS) if n not in each] for each in dropped]


def values_at(path, env_id, position, field="text"):
    """The reference of a row, and where it lies in records.bin."""
    metadata = load(path)
    record = record_layout(metadata.schema).record
    at = metadata.ring.row(env_id, position) * record.itemsize
    at += record.fields[field][1]
    data = (path / DATA / "records.bin").read_bytes()[at : at + REFERENCE.itemsize]
    return np.frombuffer(data, REFERENCE)[0], at


def forge(path, env_id, position, reference):
    """Put another reference into a row, whose block then has no checksum."""
    _, at = values_at(path, env_id, position)
    with (path / DATA / "records.bin").open("r+b") as file:
        file.seek(at)
        file.write(np.array([reference], REFERENCE).tobytes())
    # A reader would see the wrong sum first.
    sums = path / DATA / "sums.bin"
    sums.write_bytes(bytes(sums.stat().st_size))


def test_a_whole_buffer_is_copied_with_its_values(damaged):
    made = mr.repair(damaged)
    assert made.cuts == ()
    assert made.restored == ()
    assert_repaired(made, without([], []))


def test_a_value_whose_checksum_is_wrong_costs_its_row_alone(damaged):
    reference, _ = values_at(damaged, 1, 11)
    heap = damaged / DATA / "heap.bin"
    with heap.open("r+b") as file:
        file.seek(HEAP_BYTES + int(reference["position"]) % HEAP_BYTES)
        file.write(b"\xff")
    before = {p: p.read_bytes() for p in damaged.rglob("*") if p.is_file()}
    made = mr.repair(damaged)
    assert made.cuts == (mr.DroppedRows(1, 11, 12, "value"),)
    assert before == {p: p.read_bytes() for p in damaged.rglob("*") if p.is_file()}
    # The rows before moved up: newest rows keep their positions.
    with mr.ReplayBuffer.open(made.target) as buffer:
        assert buffer.get_field("number", 1, [11, 12]).tolist() == [10, 12]
        assert buffer.get_field("text", 1, [11, 12]).text() == ["10 of 1 ", "12 of 1 "]
    assert_repaired(made, without([], [11]))


@pytest.mark.parametrize(
    "reference",
    [
        pytest.param(((1 << 62) - 8, 1, 0), id="out of range"),
        pytest.param((HEAP_BYTES - 8, 90, 0), id="across the ring's end"),
        pytest.param((HEAP_BYTES + 8, 8, 0), id="into another environment"),
        pytest.param((4, 8, 0), id="unaligned"),
        pytest.param((-8, 8, 0), id="negative"),
        pytest.param((0, 101, 0), id="too long"),
        pytest.param((0, 0, 7), id="empty with a checksum"),
        pytest.param((0, 8, 0), id="another value"),
    ],
)
def test_a_reference_that_leads_elsewhere_costs_its_row_alone(damaged, reference):
    forge(damaged, 0, 17, reference)
    made = mr.repair(damaged, keep_unproven=True)
    assert made.cuts == (mr.DroppedRows(0, 17, 18, "value"),)
    assert_repaired(made, without([17], []))


LOST_HEAPS = {
    "unlink": lambda heap: heap.unlink(),
    "empty": lambda heap: os.truncate(heap, 0),
    "zeros": lambda heap: heap.write_bytes(bytes(heap.stat().st_size)),
    "other": lambda heap: heap.write_bytes(os.urandom(heap.stat().st_size)),
}


@pytest.mark.parametrize("change", LOST_HEAPS)
def test_a_heap_that_is_gone_costs_the_rows_with_values(damaged, change):
    LOST_HEAPS[change](damaged / DATA / "heap.bin")
    made = mr.repair(damaged)
    assert {cut.why for cut in made.cuts} == {"value"}
    left = list(range(0, STEPS, 7))
    assert made.cut_rows == 2 * (STEPS - len(left))
    said = {"unlink": "heap.bin is missing: rows", "empty": "heap.bin has 0 bytes of"}
    assert [fact[: len(said[change])] for fact in made.restored if "heap" in fact] == (
        [said[change]] if change in said else []
    )
    assert_repaired(made, [left, left])


def test_a_short_heap_costs_the_rows_behind_its_end(damaged):
    reference, _ = values_at(damaged, 1, 20)
    nbytes = HEAP_BYTES + int(reference["position"])
    os.truncate(damaged / DATA / "heap.bin", nbytes)
    made = mr.repair(damaged)
    assert any(f"heap.bin has {nbytes} bytes of" in fact for fact in made.restored)
    # The tokens of row 20 lie before its text.
    lost = [n for n in range(20, STEPS) if n % 7]
    assert_repaired(made, without([], lost))


def test_a_heap_that_is_longer_is_used_as_far_as_it_should_go(damaged):
    with (damaged / DATA / "heap.bin").open("ab") as file:
        file.write(bytes(4096))
    made = mr.repair(damaged)
    assert made.cuts == ()
    assert any("heap.bin has 20480 bytes of 16384" in fact for fact in made.restored)
    assert_repaired(made, without([], []))


def test_the_oldest_rows_of_a_full_heap_make_space_for_a_reserve(tmp_path):
    with create(tmp_path / "b", capacity=128, heap_bytes=4096) as buffer:
        add(buffer, range(200))
    before = numbers_of(tmp_path / "b")
    made = mr.repair(tmp_path / "b")
    after = numbers_of(made.target)
    assert {cut.why for cut in made.cuts} == {"heap"}
    assert made.rows + made.cut_rows == sum(map(len, before))
    for env_id in range(2):
        assert after[env_id] == before[env_id][-len(after[env_id]) :]
        cuts = [cut for cut in made.cuts if cut.env_id == env_id]
        assert [cut.first for cut in cuts] == [before[env_id][0]] * len(cuts)
    with mr.ReplayBuffer.open(made.target) as buffer:
        assert (buffer.view.heap_used <= 4096 - 264).all()
        # The next older row would not fit.
        assert (buffer.view.heap_used > 4096 - 264 - 264).any()
        assert buffer.heads.tolist() == [200, 200]
    assert verify_buffer(made.target).findings == ()


def test_without_a_record_in_commit_values_are_known_by_their_checksums(damaged):
    with mr.ReplayBuffer.open(damaged, "r+", commit_every=None) as buffer:
        add(buffer, range(STEPS, 300))
    commit = damaged / DATA / "COMMIT"
    commit.write_bytes(bytes(commit.stat().st_size))
    made = mr.repair(damaged)
    assert verify_buffer(made.target).findings == ()
    found = numbers_of(made.target)
    assert all(each == list(range(each[0], each[-1] + 1)) for each in found)
    assert made.rows > 0
