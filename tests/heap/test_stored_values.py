"""Values that vary on real files: what is refused, damaged, and overwritten."""

import errno
import os

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer.copy_files import FileCopy
from mmreplay.disk.files import Disk
from mmreplay.errors import CorruptError, FullError, SchemaError
from mmreplay.schema.field import REFERENCE
from mmreplay.testing.disks import FaultyDisk, WatchedDisk, using
from tools.torture.powerloss import abandon

SCHEMA = mr.Schema(
    {
        "observation": mr.Field((), "float32"),
        "tokens": mr.Field((None,), "int32", max_length=100),
        "terminated": mr.Field((), "bool"),
    }
)
M = 400
HEAP_BYTES = 4096
DATA = "data-000001"


def step(number, length=10):
    return {
        "observation": np.float32(number),
        "tokens": np.arange(number, number + length, dtype=np.int32),
        "terminated": False,
    }


def create(path, capacity=200, **options):
    given = {"heap_bytes": HEAP_BYTES, "commit_every": None}
    return mr.ReplayBuffer.create(path, SCHEMA, capacity, **(given | options))


def filled(path, steps=30, **options):
    buffer = create(path, **options)
    for number in range(steps):
        buffer.add(step(number))
    return buffer


@pytest.fixture
def ring(tmp_path):
    """The path of a closed buffer of 30 rows, all alive."""
    filled(tmp_path / "ring").close()
    return tmp_path / "ring"


# Arguments


@pytest.mark.parametrize(
    ("heap_bytes", "match"),
    [
        (None, "field 'tokens' varies: .* about capacity times the average bytes of"),
        (0, "heap_bytes must be an integer of at least 1, got 0"),
        (-1, "heap_bytes must be an integer of at least 1, got -1"),
        (1.5, r"heap_bytes must be an integer of at least 1, got 1\.5"),
        ("much", "heap_bytes must be a size such as '1 GiB', got 'much'"),
        (1 << 62, "1 heaps of 4611686018427387904 bytes must take fewer than"),
    ],
)
def test_an_impossible_heap_is_refused_before_there_is_a_folder(tmp_path, heap_bytes, match):
    with pytest.raises(SchemaError, match=match):
        create(tmp_path / "ring", heap_bytes=heap_bytes)
    assert not (tmp_path / "ring").exists()


def test_a_heap_below_four_longest_rows_is_refused(tmp_path):
    schema = mr.Schema({"tokens": mr.Field((None,), "int32", max_length=2000)})
    for heap_bytes, given in (("16 KiB", 16_384), (10, 10), ("1 KiB", 1024)):
        with pytest.raises(
            SchemaError, match=rf"at least 32768 for this schema, 4 times.* got {given}\."
        ):
            mr.ReplayBuffer.create(tmp_path / "ring", schema, 10, heap_bytes=heap_bytes)


def test_a_heap_without_a_field_that_varies_is_refused(tmp_path):
    schema = mr.Schema({"observation": mr.Field((), "float32")})
    match = r"heap_bytes must be None without a field that varies, got 9\. Leave it out"
    with pytest.raises(SchemaError, match=match):
        mr.ReplayBuffer.create(tmp_path / "ring", schema, 10, heap_bytes=9)


@pytest.mark.parametrize(
    ("heap_bytes", "nbytes"), [(5000, 8192), ("5000 B", 8192), ("8KiB", 8192), ("0.5 MiB", 1 << 19)]
)
def test_a_size_may_have_a_unit_and_is_rounded_up(tmp_path, heap_bytes, nbytes):
    with create(tmp_path / "ring", heap_bytes=heap_bytes) as buffer:
        assert buffer.metadata.heap_nbytes == nbytes
        assert os.path.getsize(tmp_path / "ring" / DATA / "heap.bin") == nbytes


def tokens_of(buffer):
    """By position, of the only environment."""
    batch = buffer.gather_all()
    return {
        position: batch["tokens"][at].tolist()
        for at, position in enumerate(batch.positions.tolist())
    }


@pytest.mark.parametrize("engine", ["memmap", "memory"])
def test_a_resize_keeps_the_newest_values_that_fit(tmp_path, engine):
    path = None if engine == "memory" else tmp_path / "ring"
    buffer = filled(path, steps=150, engine=engine)
    before = tokens_of(buffer)
    buffer.resize(60)
    after = tokens_of(buffer)
    assert list(after) == list(before)[-60:]
    assert all(after[position] == before[position] for position in after)
    # Values begin at 0 of the new heap.
    assert buffer._files.commit.heap_heads.tolist() == [40 * len(after)]
    assert buffer._files.commit.heap_tails.tolist() == [0]
    for number in range(150, 300):
        buffer.add(step(number))
    assert all(
        values == step(position)["tokens"].tolist()
        for position, values in tokens_of(buffer).items()
    )
    buffer.close()


@pytest.mark.parametrize("heap_bytes", [4096, "8 KiB", 65_536])
def test_a_resize_may_give_another_heap(tmp_path, heap_bytes):
    buffer = filled(tmp_path / "ring", steps=400, heap_bytes=16_384, capacity=300)
    held = len(tokens_of(buffer))
    buffer.resize(300, heap_bytes=heap_bytes)
    nbytes = buffer.metadata.heap_nbytes
    fits = (nbytes - max(nbytes // 16, M)) // 40
    assert len(tokens_of(buffer)) == min(held, fits)
    buffer.close()
    assert mr.verify_buffer(tmp_path / "ring").ok
    with mr.ReplayBuffer.open(tmp_path / "ring") as again:
        assert again.metadata.heap_nbytes == nbytes
        assert tokens_of(again)[399] == step(399)["tokens"].tolist()
    with (
        mr.ReplayBuffer.open(tmp_path / "ring", "r+") as again,
        pytest.raises(SchemaError, match="heap_bytes must be an integer of at least"),
    ):
        again.resize(300, heap_bytes=0)


def test_another_field_leaves_the_values_as_they_are(ring):
    with mr.ReplayBuffer.open(ring, "r+") as buffer:
        before = tokens_of(buffer)
        buffer.add_field("more", mr.Field((2,), "int8"), 7)
        assert tokens_of(buffer) == before
        assert buffer.get_field("more", 0, [3]).tolist() == [[7, 7]]
        buffer.add(step(30) | {"more": np.zeros(2, np.int8)})
    assert mr.verify_buffer(ring).ok


def test_a_compacted_copy_has_a_heap_of_its_own(tmp_path):
    filled(tmp_path / "ring", steps=150).close()
    mr.compact(tmp_path / "ring", tmp_path / "copy", codec=None)
    with (
        mr.ReplayBuffer.open(tmp_path / "ring") as buffer,
        mr.ReplayBuffer.open(tmp_path / "copy") as copy,
    ):
        before, after = tokens_of(buffer), tokens_of(copy)
    # A reserve of the new heap stays free.
    assert list(after) == list(before)[-len(after) :]
    assert len(after) == (HEAP_BYTES - M) // 40
    assert all(after[position] == before[position] for position in after)
    assert mr.verify_buffer(tmp_path / "copy").findings == ()


@pytest.mark.parametrize("steps", [30, 150, 331])
def test_a_snapshot_holds_the_values_of_its_rows(tmp_path, steps):
    buffer = filled(tmp_path / "ring", steps=steps)
    before = tokens_of(buffer)
    buffer.snapshot(tmp_path / "copy")
    buffer.add(step(steps))
    with mr.ReplayBuffer.open(tmp_path / "copy") as copy:
        assert tokens_of(copy) == before
    assert mr.verify_buffer(tmp_path / "copy").findings == ()
    buffer.close()
    with mr.ReplayBuffer.open(tmp_path / "copy", "r+") as copy:
        for number in range(steps, steps + 150):
            copy.add(step(number))
        assert all(
            values == step(position)["tokens"].tolist()
            for position, values in tokens_of(copy).items()
        )


def test_a_snapshot_leaves_out_rows_whose_values_are_overwritten_meanwhile(tmp_path, monkeypatch):
    buffer = filled(tmp_path / "ring", steps=90)
    first = int(buffer.span.first[0])
    copy_heap = FileCopy._copy_heap

    def copied_late(self, source, target):
        for number in range(90, 130):
            buffer.add(step(number))
        copy_heap(self, source, target)

    monkeypatch.setattr(FileCopy, "_copy_heap", copied_late)
    made = buffer.snapshot(tmp_path / "copy")
    assert made.cut_rows > 0
    with mr.ReplayBuffer.open(tmp_path / "copy") as copy:
        held = tokens_of(copy)
        assert copy.heads.tolist() == [90]
        assert min(held) > first
        assert all(held[at] == step(at)["tokens"].tolist() for at in held)
    assert mr.verify_buffer(tmp_path / "copy").findings == ()
    buffer.close()


# Damage


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda path: path.unlink(), r"heap\.bin is missing"),
        (lambda path: os.truncate(path, 100), r"heap\.bin has 100 bytes, but"),
        (lambda path: path.write_bytes(bytes(8192)), r"heap\.bin has 8192 bytes, but"),
    ],
)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_heap_that_is_not_there_is_damage(ring, damage, match, mode):
    damage(ring / DATA / "heap.bin")
    with pytest.raises(CorruptError, match=match):
        mr.ReplayBuffer.open(ring, mode)


def forge(path, position, reference):
    """Put another reference into the record of a row."""
    records = path / DATA / "records.bin"
    with mr.ReplayBuffer.open(path) as buffer:
        stride = os.path.getsize(records) // buffer.metadata.ring.num_rows
    with records.open("r+b") as file:
        file.seek(position * stride)
        file.write(np.array([reference], REFERENCE).tobytes())


FORGED = {
    "beyond the head": (30 * 40 - 32, 10, 0),
    "far beyond it": ((1 << 62) - 8, 1, 0),
    "negative": (-8, 1, 0),
    "unaligned": (4, 1, 0),
    "too long": (0, 101, 0),
    "longest of all": (0, 2**32 - 1, 0),
    "empty with a checksum": (0, 0, 7),
    "empty with a position": (8, 0, 0),
}


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_reference_that_leads_elsewhere_is_damage(ring, forged, mode):
    forge(ring, 12, FORGED[forged])
    with mr.ReplayBuffer.open(ring, mode) as buffer:
        match = "field 'tokens' is damaged in position 12 of environment 0"
        with pytest.raises(CorruptError, match=match):
            buffer.take(0, [11, 12, 13])
        with pytest.raises(CorruptError, match=match):
            buffer.get_field("tokens", 0, [12])
        with pytest.raises(CorruptError, match=match):
            buffer.gather_all()
        # The others are still there.
        others = buffer.take(0, [10, 13])
        assert others["tokens"][1].tolist() == step(13)["tokens"].tolist()


def test_a_reference_of_the_next_observation_is_named_by_its_own_row(tmp_path):
    schema = mr.Schema({"observation": mr.Field.text(max_bytes=100)})
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 50, heap_bytes=HEAP_BYTES) as buffer:
        for number in range(10):
            buffer.add({"observation": f"step {number}"})
    forge(tmp_path / "ring", 5, (4, 1, 0))
    with (
        mr.ReplayBuffer.open(tmp_path / "ring") as buffer,
        pytest.raises(CorruptError, match="'observation' is damaged in position 5 of"),
    ):
        buffer.take(0, [4])


def test_a_batch_beyond_memory_is_measured_with_its_values(ring):
    with mr.ReplayBuffer.open(ring) as buffer:
        row_nbytes = buffer.schema.row_nbytes + 40
        match = (
            "batch_size: the stored fields of 1000000000000000 need about "
            f"{row_nbytes * 10**15:,} bytes, which exceeds the memory"
        )
        with pytest.raises(MemoryError, match=match):
            buffer.sample(10**15)


def test_an_illegal_reference_of_an_overwritten_row_is_no_damage(tmp_path):
    writer = filled(tmp_path / "ring", steps=60, capacity=60)
    with mr.ReplayBuffer.open(tmp_path / "ring") as reader:
        view = reader.view
        pending = view.draw(mr.UniformSampler(seed=0), 20)
        drawn = pending.draw.positions.copy()
        for number in range(60, 200):
            writer.add(step(number))
        # Its rows were overwritten, and their references lead above the heap head
        # that the reader knows.
        references = view._store.gather(drawn % writer.slots, ("tokens",))["tokens"]
        known = int(view._commit.heap_heads[0])
        assert (references["position"] > known).any()
        fields = view._store.gather(drawn % writer.slots, ("tokens",))
        read = view._values.with_values(fields, np.zeros(20, np.int64), drawn)
        assert read["tokens"].shape == (20,)
        batch = view.gather(pending)
        assert batch.positions.min() > drawn.max()
        for at, position in enumerate(batch.positions.tolist()):
            assert batch["tokens"][at].tolist() == step(position)["tokens"].tolist()
    writer.close()


def test_a_buffer_of_values_verifies(tmp_path):
    buffer = filled(tmp_path / "ring", steps=200)
    assert mr.verify_buffer(tmp_path / "ring").findings == ()
    buffer.commit()
    buffer.close()
    report = mr.verify_buffer(tmp_path / "ring")
    assert report.findings == ()
    assert report.nbytes > 40 * 40


@pytest.mark.parametrize("forged", FORGED)
def test_verify_finds_a_reference_that_leads_elsewhere(ring, forged):
    forge(ring, 12, FORGED[forged])
    found = [f for f in mr.verify_buffer(ring).findings if f.kind == "value"]
    assert [finding.damage for finding in found] == [True]
    assert "field 'tokens' of environment 0, position 12: its ref" in found[0].message


def test_verify_finds_a_value_that_was_changed(ring):
    with (ring / DATA / "heap.bin").open("r+b") as file:
        file.seek(40 * 17 + 3)
        file.write(b"x")
    found = mr.verify_buffer(ring).findings
    assert [finding.kind for finding in found] == ["value"]
    assert "position 17: the checksum of its value must be" in found[0].message
    # The rows are there all the same: a reader looks at the checksum where asked.
    with mr.ReplayBuffer.open(ring) as buffer:
        assert len(buffer.get_field("tokens", 0, [17])[0]) == 10
    match = "'tokens' is damaged in position 17 of environment 0: its value differs from"
    for mode in ("r", "r+"):
        with mr.ReplayBuffer.open(ring, mode, check_values=True) as buffer:
            assert len(buffer.get_field("tokens", 0, [16, 18])) == 2
            with pytest.raises(CorruptError, match=match):
                buffer.take(0, [16, 17, 18])


def change(path, position):
    """Change a byte of the value of a row of `ring`."""
    with (path / DATA / "heap.bin").open("r+b") as file:
        file.seek(40 * position + 3)
        file.write(b"x")


def resize(path):
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        buffer.resize(100)


def add_field(path):
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        buffer.add_field("more", mr.Field((), "int8"), 0)


def stack_and_resize(path):
    # Draws fold no row before the oldest one: that one is copied all the same.
    stack = mr.FrameStack(4, paths=["observation"])
    with mr.ReplayBuffer.open(path, "r+", transforms=[stack]) as buffer:
        buffer.resize(100)


COPIES = {
    "resize": resize,
    "resize of stacks": stack_and_resize,
    "add_field": add_field,
    "compact": lambda path: mr.compact(path, path.parent / "copy", codec=None),
    "compact to shards": lambda path: mr.compact(path, path.parent / "copy"),
    "export": lambda path: mr.export(path, path.parent / "copy.npz"),
    "export of text": lambda path: mr.export(path, path.parent / "copy.csv"),
    "export of a table": lambda path: mr.export(path, path.parent / "copy.parquet"),
}


@pytest.mark.parametrize("position", [0, 17])
@pytest.mark.parametrize("copy", COPIES)
def test_no_copy_gives_a_damaged_value_a_checksum_that_fits(ring, copy, position):
    # It did: the damage was there for good, and verify found nothing.
    change(ring, position)
    match = (
        f"'tokens' is damaged in position {position} of environment 0: its value "
        "differs from its checksum. Restore the buffer from a copy, or run mmreplay "
        "repair SOURCE TARGET"
    )
    with pytest.raises(CorruptError, match=match):
        COPIES[copy](ring)
    assert [path.name for path in ring.parent.iterdir()] == ["ring"]
    (finding,) = mr.verify_buffer(ring).findings
    assert f"position {position}: the checksum of its value must" in finding.message
    made = mr.repair(ring, ring.parent / "repaired")
    assert (made.rows, made.cuts) == (29, (mr.DroppedRows(0, position, position + 1, "value"),))
    COPIES[copy](made.target)


def test_verify_finds_values_that_overlap(ring):
    with mr.ReplayBuffer.open(ring) as buffer:
        fields = buffer.view._store.gather(np.array([12]), ("tokens",))
        reference = fields["tokens"][0]
    forge(ring, 14, tuple(reference))
    found = [f for f in mr.verify_buffer(ring).findings if f.kind == "value"]
    assert "position 14: its value must begin at heap position 560" in found[0].message


def test_rows_whose_values_overlap_are_not_all_read_at_once(ring):
    with mr.ReplayBuffer.open(ring) as buffer:
        fields = buffer.view._store.gather(np.array([12]), ("tokens",))
        reference = tuple(fields["tokens"][0])
    for position in range(13, 30):
        forge(ring, position, reference)
    with mr.ReplayBuffer.open(ring) as buffer:
        with pytest.raises(CorruptError, match="'tokens' is damaged in position 13 of"):
            buffer.gather_all()
        assert len(buffer.take(0, [12, 20])) == 2


# What may be overwritten


def test_a_heap_is_written_no_further_than_a_synced_record_allows(tmp_path):
    buffer = filled(tmp_path / "ring")
    space = buffer._files.appender._values._space
    seen = []

    class Looking(WatchedDisk):
        def datasync(self, fd):
            seen.append(("before", int(space.free_until[0])))
            Disk.datasync(self, fd)

    commit = buffer._files.commit
    with using(Looking()):
        free = int(space.free_until[0])
        wanted = np.array([free + 2 * M])
        buffer._files.committer.durable_heap_tails(wanted, wanted)
    # The slot says more while it is not synced, which allows nothing yet; nor does the
    # synced one before it is published.
    assert seen == [("before", free)]
    assert int(commit.committed.heap_tails[0]) + HEAP_BYTES >= free + 2 * M
    assert int(space.free_until[0]) == free
    buffer.close()


def test_tails_are_raised_ahead_in_a_durable_record_alone(tmp_path):
    buffer = create(tmp_path / "ring")
    committer, commit = buffer._files.committer, buffer._files.commit
    number = 0
    while not committer._heap.raise_due:
        buffer.add(step(number))
        number += 1
    assert number * 40 < HEAP_BYTES
    committer._turn(due=float("inf"))
    # A reserve of a longest row; what readers see is raised by an add that needs it.
    durable = int(commit.committed.heap_tails[0])
    assert durable + HEAP_BYTES >= number * 40 + M
    assert commit.heap_tails.tolist() == [0]
    assert not committer._heap.raise_due
    with using(FaultyDisk(OSError(errno.EIO, "no sync"), names=("datasync",))):
        while commit.heap_tails.tolist() == [0]:
            buffer.add(step(number))
            number += 1
    assert commit.heap_tails.tolist() == [durable]
    buffer.close()


def test_a_commit_comes_before_half_of_the_heap_is_lost_to_a_power_cut(tmp_path):
    buffer = create(tmp_path / "ring")
    committer, heap = buffer._files.committer, buffer._files.committer._heap
    number = 0
    while not heap.commit_due:
        buffer.add(step(number))
        number += 1
    assert number * 40 > HEAP_BYTES // 2
    assert buffer.committed.tolist() == [0]
    committer._turn(due=float("inf"))
    assert buffer.committed.tolist() == [number]
    buffer.close()


def test_a_full_disk_refuses_a_row_and_loses_none(tmp_path):
    buffer = filled(tmp_path / "ring", steps=20)
    full = OSError(errno.ENOSPC, "No space left on device")
    with using(FaultyDisk(full, names=("pwrite", "store"))), pytest.raises(FullError):
        buffer.add(step(20))
    assert buffer.heads.tolist() == [20]
    buffer.add(step(20))
    batch = buffer.gather_all()
    for at in range(21):
        assert batch["tokens"][at].tolist() == step(at)["tokens"].tolist()
    buffer.close()


def test_a_block_larger_than_the_heap_is_added_in_several_publications(tmp_path):
    buffer = create(tmp_path / "ring", capacity=500)
    steps = [step(number, 100) for number in range(300)]
    buffer.extend(
        {
            "observation": np.array([each["observation"] for each in steps]),
            "tokens": [each["tokens"] for each in steps],
            "terminated": np.zeros(300, bool),
        }
    )
    assert buffer.heads.tolist() == [300]
    first = int(buffer.span.first[0])
    assert 300 - HEAP_BYTES // M <= first < 300
    batch = buffer.gather_all()
    assert batch["tokens"][-1].tolist() == steps[-1]["tokens"].tolist()
    buffer.close()


BLOCK_SCHEMA = mr.Schema(
    {
        "tokens": mr.Field((None, 2), "int16", max_length=40),
        "text": mr.Field.text(max_bytes=90),
        "raw": mr.Field.bytes(max_bytes=30),
        "terminated": mr.Field((), "bool"),
    }
)


def blocks_of(form, steps, envs, rng):
    """A block in one of the forms that `extend` takes, and its values by step."""
    shape = (steps, envs)
    tokens = [
        rng.integers(-99, 99, (rng.integers(41), 2)).astype(np.int16) for _ in range(steps * envs)
    ]
    texts = ["ü" * int(rng.integers(45)) for _ in tokens]
    raws = [rng.bytes(int(rng.integers(31))) for _ in tokens]
    columns = {"tokens": tokens, "text": texts, "raw": raws}
    given = {}
    for path, each in columns.items():
        if form == "ragged" and path != "text":
            arrays = [np.frombuffer(v, np.uint8) if path == "raw" else v for v in each]
            offsets = np.cumsum([0, *map(len, arrays)])
            ragged = mr.Ragged(np.concatenate(arrays), offsets)
            given[path] = ragged if envs == 1 else ragged.reshape(*shape)
        elif envs == 1:
            given[path] = tuple(each) if form == "tuple" else each
        else:
            given[path] = [each[at : at + envs] for at in range(0, len(each), envs)]
    given["terminated"] = np.zeros(shape, bool)
    expected = list(zip((v.tolist() for v in tokens), texts, raws, strict=True))
    return given, [expected[at : at + envs] for at in range(0, len(expected), envs)]


@pytest.mark.parametrize("form", ["list", "tuple", "ragged"])
@pytest.mark.parametrize(
    ("envs", "layout"), [(1, "env_major"), (2, "env_major"), (2, "time_major")]
)
# A block at once; several writes for it; and steps that are longer than one.
@pytest.mark.parametrize("stage", [1 << 20, 700, 16])
def test_blocks_of_any_form_hold_the_values_of_their_rows(
    tmp_path, monkeypatch, rng, form, envs, layout, stage
):
    monkeypatch.setattr("mmreplay.buffer.heap_values.STAGE_NBYTES", stage)
    added = []
    with mr.ReplayBuffer.create(
        tmp_path / "ring",
        BLOCK_SCHEMA,
        200,
        heap_bytes=8192,
        num_envs=envs,
        layout=layout,
        autoreset="same_step",
        commit_every=None,
    ) as buffer:
        for steps in (7, 1, 40, 90, 23):
            given, values = blocks_of(form, steps, envs, rng)
            buffer.extend(given)
            added += values
            batch = buffer.gather_all()
            assert batch["tokens"].dtype == np.int16
            texts, raws = batch["text"].text(), list(batch["raw"])
            ids = batch.env_ids.tolist()
            for at, (env, position) in enumerate(zip(ids, batch.positions.tolist(), strict=True)):
                assert (batch["tokens"][at].tolist(), texts[at], raws[at].tobytes()) == added[
                    position
                ][env]
            assert set(batch.env_ids) == set(range(envs))
            assert batch.positions.max() == len(added) - 1
        # The heap is too small for all of them.
        assert len(batch) < envs * len(added)
        buffer.commit()
    assert mr.verify_buffer(tmp_path / "ring").findings == ()


def test_empty_values_take_no_space(tmp_path):
    buffer = create(tmp_path / "ring", capacity=200)
    for number in range(1000):
        buffer.add(step(number, 0))
    assert buffer._files.commit.heap_heads.tolist() == [0]
    assert int(buffer.span.lengths[0]) == 200
    buffer.close()


def test_a_killed_writer_leaves_every_published_value(tmp_path):
    buffer = filled(tmp_path / "ring", steps=150)
    first = int(buffer.span.first[0])
    abandon(buffer)
    with mr.ReplayBuffer.open(tmp_path / "ring", "r+") as again:
        assert again.recovery.how == "killed"
        assert again.span.first.tolist() == [first]
        batch = again.gather_all()
        for at, position in enumerate(batch.positions.tolist()):
            assert batch["tokens"][at].tolist() == step(position)["tokens"].tolist()


def test_two_environments_do_not_read_each_others_values(tmp_path):
    buffer = create(tmp_path / "ring", num_envs=2, autoreset="disabled")
    for number in range(100):
        buffer.add(
            {
                "observation": np.array([number, -number], np.float32),
                "tokens": [np.full(number % 50, number), np.full(50, -number)],
                "terminated": np.zeros(2, bool),
            }
        )
    batch = buffer.sample(64)
    for at in range(64):
        number = int(batch.positions[at])
        value = -number if batch.env_ids[at] else number
        length = 50 if batch.env_ids[at] else number % 50
        assert batch["tokens"][at].tolist() == [value] * length
    buffer.close()


def test_values_are_read_without_a_mapping_too(ring):
    with mr.ReplayBuffer.open(ring, read_mode="pread") as buffer:
        batch = buffer.gather_all()
        for at in range(30):
            assert batch["tokens"][at].tolist() == step(at)["tokens"].tolist()
        assert (batch["tokens"].lengths == 10).all()


def test_windows_hold_the_values_of_each_step(ring):
    sampler = mr.SequenceSampler(4, mr.UniformSampler(seed=0))
    with mr.ReplayBuffer.open(ring, sampler=sampler) as buffer:
        batch = buffer.sample(8)
        assert batch["tokens"].shape == (8, 4)
        for window in range(8):
            for at in range(4):
                position = int(batch.window_positions[window, at])
                expected = step(position)["tokens"].tolist()
                assert batch["tokens"][window, at].tolist() == expected


def test_contiguous_batches_hold_values(ring):
    with mr.ReplayBuffer.open(ring) as buffer:
        batch = buffer.sample(8, contiguous=True)
        for at, position in enumerate(batch.positions.tolist()):
            assert batch["tokens"][at].tolist() == step(position)["tokens"].tolist()


def test_stacks_hold_a_value_for_each_frame(ring):
    stack = mr.FrameStack(3, paths=["tokens"])
    sampler = mr.UniformSampler(seed=0)
    with mr.ReplayBuffer.open(ring, sampler=sampler, transforms=[stack]) as buffer:
        batch = buffer.sample(8)
        assert batch["tokens"].shape == (8, 3)
        for at, position in enumerate(batch.positions.tolist()):
            for frame in range(3):
                row = max(0, position - 2 + frame)
                assert batch["tokens"][at, frame].tolist() == step(row)["tokens"].tolist()
    with pytest.raises(SchemaError, match="axis must be None for 'tokens', which varies"):
        mr.ReplayBuffer.open(ring, transforms=[mr.FrameStack(3, paths=["tokens"], axis=0)])


@pytest.mark.parametrize("blocks", [False, True])
def test_a_forged_reference_raises_no_heap_tail_beyond_what_was_written(ring, blocks):
    # Of a row that is given up for want of heap, first of all.
    forge(ring, 3, (1 << 20, 10, 0))
    with mr.ReplayBuffer.open(ring, "r+", commit_every=None) as buffer:
        newer = [step(number) for number in range(30, 400)]
        if blocks:
            buffer.extend({path: [each[path] for each in newer] for path in newer[0]})
        else:
            for each in newer:
                buffer.add(each)
        state = buffer._files.commit
        assert (state.heap_tails <= state.heap_heads).all()
    with mr.ReplayBuffer.open(ring) as buffer:
        assert buffer.heads[0] == 400
        span = buffer.span
        positions = np.arange(span.first[0], span.stop[0])
        found = buffer.get_field("tokens", np.zeros(len(positions), int), positions)
        expected = [step(number)["tokens"].tolist() for number in positions]
        assert [each.tolist() for each in found] == expected
        assert len(expected) > 50
