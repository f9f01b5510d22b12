"""What is repaired holds every row that is proven, unchanged, and no other."""

import os
import shutil

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import CorruptError, FormatError, LockedError, VersionError
from mmreplay.repairing import restore
from mmreplay.verify import verify_buffer
from tests.buffer.test_snapshots import SCHEMA, create, extend

DATA = "data-000001"
AUTORESETS = ("disabled", "next_step")


def contents(path):
    """What every row of each environment says, oldest first."""
    with mr.ReplayBuffer.open(path) as buffer:
        rows = buffer.gather_all()
    return [rows["number"][rows.env_ids == env].tolist() for env in range(2)], rows


def assert_repaired(path, made, expected):
    """The new buffer is whole and holds the expected numbers, each a whole row."""
    assert verify_buffer(made.target).findings == ()
    numbers, rows = contents(made.target)
    assert numbers == expected
    assert (rows["large"] == rows["number"][:, None]).all()
    assert (rows["note"] == -rows["number"]).all()
    assert made.rows == sum(len(each) for each in expected)
    with mr.ReplayBuffer.open(made.target, "r+", commit_every=None) as buffer:
        heads = buffer.heads.copy()
        extend(buffer, 50)
        assert (buffer.heads == heads + 50).all()
    assert verify_buffer(made.target).findings == ()


@pytest.fixture(params=["env_major", "time_major"])
def damaged(tmp_path, request):
    """A closed buffer: two environments of positions [57, 97), blocks of two rows."""
    with create(tmp_path / "b", layout=request.param) as buffer:
        for _ in range(97):
            extend(buffer, 1)
    return tmp_path / "b"


def row(path, env_id, position):
    with mr.ReplayBuffer.open(path) as buffer:
        return buffer.metadata.ring.row(env_id, position)


def put(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def without(*dropped):
    return [[n for n in range(57, 97) if n not in each] for each in dropped]


def test_a_whole_buffer_is_copied_as_it_is(damaged):
    made = mr.repair(damaged)
    assert made.cuts == ()
    assert made.restored == ()
    assert made.target.name == "b-repaired"
    assert_repaired(damaged, made, without([], []))


def test_episodes_that_lost_their_first_steps_are_counted(tmp_path):
    """One ends before the cut, and one where it begins: of a third the head is gone."""
    schema = mr.Schema({"x": mr.Field((), "int64"), "terminated": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 1 << 14) as buffer:
        block = buffer.metadata.ring.block_rows
        ends = np.zeros((4 * block, 1), bool)
        ends[[block - 2, block - 1, 3 * block - 1]] = True
        buffer.extend(x=np.arange(4 * block)[:, None], terminated=ends)
    record = tmp_path / "b" / DATA / "records.bin"
    size = record.stat().st_size // buffer.slots
    for number, told in ((3, 0), (1, 1)):
        at = (number * block + 5) * size
        before = record.read_bytes()[at]
        put(record, at, bytes([before ^ 1]))
        made = mr.repair(tmp_path / "b", tmp_path / f"r{number}")
        assert made.cut_rows == block
        # What the newest rows lost stands before nothing.
        assert [each[:39] for each in made.restored] == [
            "episodes that lost their first steps: 1"
        ] * told
        put(record, at, bytes([before]))


def test_priorities_that_are_not_copied_are_reported(tmp_path):
    sampler = mr.PrioritizedSampler(seed=0, name="mine")
    with create(tmp_path / "b") as buffer:
        buffer.sampler = sampler
        extend(buffer, 9)
        buffer.sample(4)
    made = mr.repair(tmp_path / "b")
    assert made.restored == (
        "the priorities 'mine' were not copied. Use export(..., "
        "priorities='mine') or mmreplay convert --priorities mine to copy them.",
    )


def test_only_the_block_with_a_flipped_byte_is_dropped(damaged, tmp_path):
    before = {p: p.read_bytes() for p in damaged.rglob("*") if p.is_file()}
    damage = damaged / DATA / "f000.bin"
    put(damage, row(damaged, 1, 70) * 4800 + 9, b"\xff")
    before[damage] = damage.read_bytes()
    made = mr.repair(damaged, tmp_path / "c")
    assert made.cuts == (mr.DroppedRows(1, 70, 72, "checksum"),)
    with mr.ReplayBuffer.open(tmp_path / "c") as buffer:
        # The newest rows stay at their positions, the older ones move up.
        assert buffer.get_field("number", 1, [96, 72, 71]).tolist() == [96, 72, 69]
        assert buffer.flags(1, 72) & 17 == 17
        assert buffer.metadata.uuid != mr.ReplayBuffer.open(damaged).metadata.uuid
    assert_repaired(damaged, made, without([], [70, 71]))
    assert before == {p: p.read_bytes() for p in damaged.rglob("*") if p.is_file()}


@pytest.mark.sliced(1)
def test_many_damaged_blocks_are_dropped_and_the_rest_survives(damaged, rng, tmp_path):
    """Against an oracle: the blocks whose bytes were changed, and no other row."""
    for turn in range(6):
        path = tmp_path / f"d{turn}"
        shutil.copytree(damaged, path)
        cut = [set(), set()]
        for _ in range(int(rng.integers(1, 12))):
            env_id, position = int(rng.integers(2)), int(rng.integers(57, 96))
            name, size = [("f000.bin", 4800), ("records.bin", 8), ("flags.bin", 1)][
                int(rng.integers(3))
            ]
            file = path / DATA / name
            at = row(path, env_id, position) * size + int(rng.integers(size))
            # A byte that is changed twice may be what it was.
            if position in cut[env_id]:
                continue
            put(file, at, bytes([file.read_bytes()[at] ^ int(rng.integers(1, 256))]))
            cut[env_id] |= {position // 2 * 2, position // 2 * 2 + 1}
        assert_repaired(path, mr.repair(path), without(*cut))


def test_rows_of_a_lost_checksum_are_dropped_by_default(damaged, tmp_path):
    with mr.ReplayBuffer.open(damaged) as buffer:
        ring = buffer.metadata.ring
    entry = 8 * (40 % ring.num_blocks)
    put(damaged / DATA / "sums.bin", entry, b"\0" * 8)
    made = mr.repair(damaged, tmp_path / "c")
    assert made.cuts == (mr.DroppedRows(0, 80, 82, "unproven"),)
    assert_repaired(damaged, made, without([80, 81], []))
    made = mr.repair(damaged, tmp_path / "e", keep_unproven=True)
    assert_repaired(damaged, made, without([], []))


def test_a_truncated_file_loses_the_rows_that_it_held(damaged):
    path = damaged / DATA / "f000.bin"
    first, last = row(damaged, 0, 57), row(damaged, 1, 96)
    held = max(first, last)
    os.truncate(path, held * 4800 + 100)
    made = mr.repair(damaged)
    assert {cut.why for cut in made.cuts} == {"missing"}
    assert any("f000.bin has" in each for each in made.restored)
    rows = contents(made.target)[1]
    assert (rows["large"] == rows["number"][:, None]).all()
    assert made.rows + made.cut_rows == 80
    assert verify_buffer(made.target).findings == ()


def test_heads_are_found_from_the_checksums_where_commit_is_lost(damaged):
    put(damaged / DATA / "COMMIT", 0, b"\0" * 16384)
    made = mr.repair(damaged)
    assert any("heads" in each for each in made.restored)
    # The newest row is in no whole block.
    assert contents(made.target)[0] == [list(range(56, 96))] * 2
    assert verify_buffer(made.target).findings == ()


@pytest.mark.parametrize("where", [30, 400, -60, -10])
def test_a_flipped_bit_of_the_metadata_is_turned_back(damaged, where):
    path = damaged / "metadata.json"
    data = bytearray(path.read_bytes())
    data[where] ^= 4
    path.write_bytes(data)
    made = mr.repair(damaged)
    assert made.restored == ("metadata.json had one wrong bit, which was corrected",)
    assert_repaired(damaged, made, without([], []))


@pytest.mark.parametrize(
    ("name", "length", "behind"),
    [
        (f"{DATA}/COMMIT", 0, 16384),
        (f"{DATA}/COMMIT", 4096, 0),
        (f"{DATA}/f000.bin", 0, 1),
        ("metadata.json", -10, 10),
        ("metadata.json", -3, 0),
        ("metadata.json", 1, 0),
    ],
)
def test_opening_a_damaged_buffer_advises_a_repair(damaged, name, length, behind):
    path = damaged / name
    path.write_bytes(path.read_bytes()[:length] + b"0" * behind)
    told = r"(?i)restore it from a copy, or run mmreplay repair SOURCE TARGET\.$"
    with pytest.raises(CorruptError, match=told):
        mr.ReplayBuffer.open(damaged)


def test_lost_metadata_are_copied_from_a_snapshot(damaged, tmp_path):
    with mr.ReplayBuffer.open(damaged) as buffer:
        buffer.snapshot(tmp_path / "s")
    (damaged / "metadata.json").write_bytes(b"{")
    with pytest.raises(CorruptError, match=r"copy\. There is no second copy.*like="):
        mr.repair(damaged)
    assert not (tmp_path / "b-repaired").exists()
    made = mr.repair(damaged, like=tmp_path / "s")
    assert_repaired(damaged, made, without([], []))


def test_adjacent_dropped_ranges_are_merged(damaged):
    for position in (70, 72, 74, 80):
        put(damaged / DATA / "f000.bin", 4800 * row(damaged, 1, position), b"xyz")
    made = mr.repair(damaged)
    assert [(c.env_id, c.first, c.stop, c.why) for c in made.cuts] == [
        (1, 70, 76, "checksum"),
        (1, 80, 82, "checksum"),
    ]


def test_metadata_of_another_buffer_are_refused(damaged, tmp_path):
    with mr.ReplayBuffer.open(damaged) as buffer:
        schema, capacity, num_envs = buffer.schema, buffer.capacity, buffer.num_envs
    mr.ReplayBuffer.create(
        tmp_path / "other", schema, capacity, num_envs=num_envs, autoreset="disabled"
    ).close()
    (damaged / "metadata.json").unlink()
    message = r"other is of buffer \w+, but .*COMMIT is of \['\w+'\]"
    with pytest.raises(CorruptError, match=message):
        mr.repair(damaged, like=tmp_path / "other")
    assert not (tmp_path / "b-repaired").exists()


def test_opening_a_buffer_without_metadata_advises_a_repair(damaged):
    (damaged / "metadata.json").unlink()
    told = r"has no metadata.json\. .* or run mmreplay repair SOURCE TARGET\.$"
    with pytest.raises(FormatError, match=told):
        mr.ReplayBuffer.open(damaged)


@pytest.mark.parametrize("autoreset", AUTORESETS)
@pytest.mark.sliced(1)
def test_impossible_flags_of_rows_without_a_checksum_are_dropped_or_repaired(
    tmp_path, rng, autoreset
):
    schema = mr.Schema({"number": mr.Field((), "int64"), "terminated": mr.Field((), "bool")})
    for turn in range(20):
        path = tmp_path / f"{turn}"
        with mr.ReplayBuffer.create(
            path, schema, 1024, autoreset=autoreset, commit_every=None
        ) as buffer:
            numbers = np.arange(60)
            buffer.extend(number=numbers, terminated=rng.random(60) < 0.2)
        with mr.ReplayBuffer.open(path) as buffer:
            assert buffer.metadata.ring.block_rows == 64
        flags = path / DATA / "flags.bin"
        for _ in range(5):
            put(flags, int(rng.integers(60)), bytes([int(rng.integers(256))]))
        made = mr.repair(path)
        assert verify_buffer(made.target).findings == ()
        assert {cut.why for cut in made.cuts} <= {"flags"}
        with mr.ReplayBuffer.open(made.target) as buffer:
            rows = buffer.gather_all()
        gone = [n for cut in made.cuts for n in range(cut.first, cut.stop)]
        assert rows["number"].tolist() == [n for n in range(60) if n not in gone]


def test_a_repair_without_surviving_rows_is_reported(damaged):
    put(damaged / DATA / "COMMIT", 0, b"\0" * 16384)
    sums = damaged / DATA / "sums.bin"
    sums.write_bytes(b"\1" * sums.stat().st_size)
    with pytest.raises(CorruptError, match="no block has a valid checksum"):
        mr.repair(damaged)


def test_a_live_writer_is_left_alone(tmp_path):
    with create(tmp_path / "a"), pytest.raises(LockedError, match="take a snapshot") as caught:
        mr.repair(tmp_path / "a")
    assert caught.value.pid == os.getpid()


def test_a_target_inside_and_a_folder_that_is_no_buffer_are_refused(tmp_path, damaged):
    with pytest.raises(FormatError, match="is inside the buffer"):
        mr.repair(damaged, damaged / "x")
    (tmp_path / "link").symlink_to(damaged)
    with pytest.raises(FormatError, match=r"link is the buffer itself. Choose a pa"):
        mr.repair(damaged, tmp_path / "link")
    with pytest.raises(FormatError, match="does not exist"):
        mr.repair(tmp_path / "none")


def test_a_newer_version_is_refused(damaged):
    path = damaged / "metadata.json"
    path.write_bytes(
        path.read_bytes()
        .replace(b"[1, 0]", b"[2, 0]")
        .replace(b'"version": [\n  1', b'"version": [\n  2')
    )
    with pytest.raises(VersionError, match="newer mmreplay"):
        mr.repair(damaged)


def test_schema_is_what_the_tests_think():
    assert [f.nbytes for f in SCHEMA.fields.values()] == [8, 4800, 8, 1]


def test_blocks_above_the_heads_are_no_rows():
    """A record that contradicts itself may vouch for them."""
    good, gone = restore._rest(74, 82, [(76, 78, "checksum"), (84, 86, "unproven")])
    assert good == [(74, 76), (78, 82)]
    assert gone == [(76, 78, "checksum")]


def test_an_empty_file_costs_its_rows_and_is_no_error(damaged):
    os.truncate(damaged / DATA / "flags.bin", 0)
    made = mr.repair(damaged)
    assert (made.rows, {cut.why for cut in made.cuts}) == (0, {"missing"})
    assert verify_buffer(made.target).findings == ()


def test_damaged_statistics_are_left_out_and_reported(tmp_path):
    with create(tmp_path / "a") as buffer:
        extend(buffer, 20)
        buffer.set_statistics({"mean": 1.5})
    whole = mr.repair(tmp_path / "a", tmp_path / "b")
    assert whole.restored == ()
    (tmp_path / "a" / "statistics.json").write_text("{bro")
    made = mr.repair(tmp_path / "a", tmp_path / "c")
    (fact,) = made.restored
    told = f"statistics are left out: {tmp_path / 'a' / 'statistics.json'} is not"
    assert fact.startswith(told)
    assert made.rows == whole.rows
    with mr.ReplayBuffer.open(tmp_path / "c") as buffer:
        assert buffer.statistics == {}
