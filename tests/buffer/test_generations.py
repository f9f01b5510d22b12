"""What a writer sweeps, what readers learn of a resize, and what a copy is."""

import shutil

import pytest

import mmreplay as mr
from mmreplay.errors import FailedError
from mmreplay.testing.disks import Disk, WatchedDisk, using
from tests.format.support import fill, schema_of


def test_the_writer_sweeps_its_own_left_overs_and_nothing_else(tmp_path):
    folder = tmp_path / "b"
    mr.ReplayBuffer.create(folder, schema_of(), 48, 2, autoreset="disabled").close()
    for name in ("tmp-metadata.json", "notes.txt", "data-old"):
        (folder / name).write_bytes(b"x")
    for name in ("data-000002", "tmp-folder", "data-²²²²²²"):
        (folder / name).mkdir()
        (folder / name / "f").write_bytes(b"x")
    before = {path.name for path in folder.iterdir()}
    mr.ReplayBuffer.open(folder).close()
    assert {path.name for path in folder.iterdir()} == before
    with mr.ReplayBuffer.open(folder, "r+") as buffer:
        removed = ("data-000002", "tmp-folder", "tmp-metadata.json")
        assert buffer.recovery.removed == removed
    assert {path.name for path in folder.iterdir()} == before - set(removed)


class NoMove(Disk):
    """A disk that dies at the first store after metadata.json was renamed."""

    renamed = False

    def rename(self, source, target):
        super().rename(source, target)
        self.renamed = target.name == "metadata.json"

    def store(self, fd, mapping, offset, data):
        if self.renamed:
            raise KeyboardInterrupt
        super().store(fd, mapping, offset, data)


def test_readers_learn_of_a_resize_whose_writer_died_before_it_could_tell(tmp_path):
    buffer = mr.ReplayBuffer.create(tmp_path / "b", schema_of(), 48, 2, autoreset="disabled")
    fill(buffer, 0, 10)
    reader = mr.ReplayBuffer.open(tmp_path / "b")
    with using(NoMove()), pytest.raises(KeyboardInterrupt):
        buffer.resize(8)
    with pytest.raises(FailedError, match="the switch to data-000002 failed"):
        buffer.close()
    assert reader.capacity == 48
    with mr.ReplayBuffer.open(tmp_path / "b", "r+") as again:
        assert again.capacity == 8
        fill(again, 10, 12)
        assert reader.heads.tolist() == [12, 12]
        assert reader.capacity == 8
    reader.close()


def test_a_copy_of_a_buffer_is_treated_as_after_a_power_cut(tmp_path):
    buffer = mr.ReplayBuffer.create(
        tmp_path / "b", schema_of(), 48, 2, commit_every=None, autoreset="disabled"
    )
    fill(buffer, 0, 20)
    buffer.commit()
    fill(buffer, 20, 30)
    shutil.copytree(tmp_path / "b", tmp_path / "copy")
    assert mr.ReplayBuffer.open(tmp_path / "b").heads.tolist() == [30, 30]
    copy = mr.ReplayBuffer.open(tmp_path / "copy")
    assert copy.heads.tolist() == [20, 20]
    assert (copy.recovery.how, copy.recovery.cut_rows) == ("power_cut", 20)
    rows = copy.gather_all()
    assert rows["action"].tolist() == [*range(20), *range(1000, 1020)]
    buffer.close()


def test_a_ring_made_larger_syncs_nothing_until_it_wraps(tmp_path):
    schema = mr.Schema({"number": mr.Field((), "int64")})
    path = tmp_path / "ring"
    with mr.ReplayBuffer.create(path, schema, 40, commit_every=None) as buffer:
        for number in range(500):
            buffer.add(number=number)
        buffer.resize(300)
        ring = buffer.metadata.ring
        # In whole blocks, so that none with a living row is written into.
        first = int(buffer.span.first[0]) // ring.block_rows * ring.block_rows
        with using(WatchedDisk()) as disk:
            for number in range(500, first + ring.slots):
                buffer.add(number=number)
            assert disk.calls["datasync"] == 0
            buffer.add(number=number + 1)
            assert disk.calls["datasync"] == 1
    assert mr.verify_buffer(path).ok
