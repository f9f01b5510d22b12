"""Folders copied while their writer adds: what the copy holds, whatever the order.

Files are copied one after another, and the writer goes on between them, as it does
beside ``cp -r``. Each row says its position, so a row that is another's is told.
"""

import shutil

import numpy as np
import pytest

import mmreplay as mr

SCHEMA = mr.Schema(
    {
        "number": mr.Field((), "int64"),
        "large": mr.Field((600,), "int64"),
        "note": mr.Field((), "int64", mutable=True),
    }
)


def add(buffer, count):
    for _ in range(count):
        number = int(buffer.heads[0])
        buffer.add(number=number, large=np.full(600, number), note=-number)


def copied(source, target, order, write_more):
    """Copy file by file, doing something before each."""
    for path in order:
        write_more()
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def right(rows):
    """Which rows are what their positions say."""
    number = rows["number"] == rows.positions
    large = (rows["large"] == rows.positions[:, None]).all(axis=1)
    return number & large & (rows["note"] == -rows.positions)


def copied_buffer(tmp_path, rng, count, capacity=40):
    """A copy of a buffer that held so many rows, and what was committed and stayed."""
    source, target = tmp_path / "source", tmp_path / "copy"
    with mr.ReplayBuffer.create(source, SCHEMA, capacity, commit_every=None) as buffer:
        add(buffer, count)
        buffer.commit()
        committed = int(buffer.committed[0])
        add(buffer, int(rng.integers(0, 4)))

        def write_more():
            add(buffer, int(rng.integers(0, 5)))
            if rng.random() < 0.5:
                buffer.commit()

        order = rng.permutation([p for p in source.rglob("*") if p.is_file()]).tolist()
        copied(source, target, order, write_more)
        first = int(buffer.span.first[0])
        # Rows that the limit passed may have been overwritten already.
        lost = int(buffer._files.commit.limits[0]) - buffer.slots
    return target, max(first, lost), committed


SEEDS = [*range(6), *(pytest.param(s, marks=pytest.mark.slow) for s in range(6, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_committed_before_and_stays_to_the_end_is_in_the_copy(tmp_path, seed):
    rng = np.random.default_rng(seed)
    copy, first, committed = copied_buffer(tmp_path, rng, int(rng.integers(5, 120)))
    with mr.ReplayBuffer.open(copy) as reader:
        assert reader.recovery.how in ("clean", "power_cut")
        rows = reader.gather_all()
    with mr.ReplayBuffer.open(copy, "r+") as buffer:
        assert buffer.gather_all().positions.tolist() == rows.positions.tolist()
        add(buffer, 3)
        assert right(buffer.gather_all())[-3:].all()
    whole = set(rows.positions[right(rows)].tolist())
    assert whole >= set(range(first, committed))


def test_a_copy_in_the_first_lap_with_the_record_first_has_no_wrong_row(tmp_path, rng):
    source, target = tmp_path / "source", tmp_path / "copy"
    with mr.ReplayBuffer.create(source, SCHEMA, 400, commit_every=None) as buffer:
        add(buffer, 50)
        buffer.commit()
        files = [p for p in source.rglob("*") if p.is_file()]
        files.sort(key=lambda path: path.name != "COMMIT")
        copied(source, target, files, lambda: (add(buffer, 5), buffer.commit()))
    with mr.ReplayBuffer.open(target) as reader:
        rows = reader.gather_all()
        assert rows.positions.tolist() == list(range(55))
        assert right(rows).all()


def test_a_copy_of_a_writer_that_waits_is_whole(tmp_path, rng):
    source, target = tmp_path / "source", tmp_path / "copy"
    with mr.ReplayBuffer.create(source, SCHEMA, 40, commit_every=None) as buffer:
        add(buffer, 90)
        buffer.commit()
        shutil.copytree(source, target)
        add(buffer, 30)
    with mr.ReplayBuffer.open(target) as reader:
        rows = reader.gather_all()
        assert rows.positions.tolist() == list(range(50, 90))
        assert right(rows).all()
    assert mr.verify_buffer(target).ok


@pytest.mark.slow
def test_a_wrong_row_of_a_live_copy_is_possible_and_verify_finds_its_block(tmp_path):
    found = wrong = 0
    for seed in range(30):
        copy, _, _ = copied_buffer(tmp_path / str(seed), np.random.default_rng(seed), 100)
        with mr.ReplayBuffer.open(copy) as reader:
            rows, size = reader.gather_all(), reader.metadata.ring.block_rows
            committed = int(reader.committed[0]) // size * size
        bad = rows.positions[~right(rows) & (rows["note"] == -rows.positions)]
        if (bad < committed).any():
            wrong += 1
            found += not mr.verify_buffer(copy).ok
    assert wrong > 3
    assert found == wrong
