"""The simulator may lose what was not synced, and nothing else."""

import os

import numpy as np
import pytest

from mmreplay.disk import files
from mmreplay.testing.disks import using
from tools.torture.power import PowerCut, SimulatedDisk

CRASHES = 200


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def images(disk, target, count=CRASHES):
    """Return the files that crashes leave, of as many crashes as asked."""
    for seed in range(count):
        disk.crash(target, np.random.default_rng(seed))
        yield {
            str(path.relative_to(target)): path.read_bytes()
            for path in sorted(target.rglob("*"))
            if path.is_file()
        }


def created(work, nbytes=4096):
    file = files.File.create(work / "a", nbytes)
    file.sync()
    files.sync_folder(work)
    return file


def test_what_was_synced_survives(work, tmp_path):
    with using(SimulatedDisk(work)) as disk:
        file = created(work)
        file.pwrite(b"x" * 100, 7)
        file.sync()
        expected = (work / "a").read_bytes()
        assert all(i == {"a": expected} for i in images(disk, tmp_path / "image"))


@pytest.mark.slow
def test_any_subset_of_unsynced_writes_may_survive(work, tmp_path):
    with using(SimulatedDisk(work)) as disk:
        file = created(work)
        file.pwrite(b"1" * 1024, 0)
        file.pwrite(b"2" * 1024, 512)
        seen = [i["a"] for i in images(disk, tmp_path / "image", 1500)]
    # Sectors of 512 bytes: the first may be old or 1, the second old, 1 or 2, the
    # third old or 2, each whatever the others are.
    zero, one, two = bytes(512), b"1" * 512, b"2" * 512
    whole = {a + b + c for a in (zero, one) for b in (zero, one, two) for c in (zero, two)}
    assert whole <= {content[:1536] for content in seen}
    assert all(set(content[:512]) <= {0, *b"1"} for content in seen)
    assert all(set(content[512:1024]) <= {0, *b"12"} for content in seen)
    assert all(content[1536:] == bytes(4096 - 1536) for content in seen)


def test_a_sector_is_never_a_mix_of_two_states(work, tmp_path):
    with using(SimulatedDisk(work)) as disk:
        file = created(work)
        file.pwrite(b"1" * 16, 0)
        file.pwrite(b"2" * 8, 8)
        seen = {i["a"][:16] for i in images(disk, tmp_path / "image")}
    assert seen == {bytes(16), b"1" * 16, b"1" * 8 + b"2" * 8}


def test_a_file_never_synced_may_be_missing_empty_or_whole(work, tmp_path):
    with using(SimulatedDisk(work)) as disk:
        files.File.create(work / "a", 100).pwrite(b"x" * 100, 0)
        seen = {i.get("a") for i in images(disk, tmp_path / "image")}
    assert {None, b"", b"x" * 100} <= seen


def test_a_synced_file_without_its_folder_may_be_missing(work, tmp_path):
    with using(SimulatedDisk(work)) as disk:
        file = files.File.create(work / "a", 100)
        file.pwrite(b"x" * 100, 0)
        file.sync()
        seen = {i.get("a") for i in images(disk, tmp_path / "image")}
    assert seen == {None, b"x" * 100}


def test_a_rename_without_its_folder_may_not_have_happened(work, tmp_path):
    (work / "a").write_bytes(b"old")
    with using(SimulatedDisk(work)) as disk:
        file = files.File.create(work / "b", 3)
        file.pwrite(b"new", 0)
        file.sync()
        files.sync_folder(work)
        disk.rename(work / "b", work / "a")
        seen = {tuple(i.items()) for i in images(disk, tmp_path / "image")}
    assert seen == {(("a", b"old"), ("b", b"new")), (("a", b"new"),)}


def test_a_removed_file_may_come_back(work, tmp_path):
    (work / "a").write_bytes(b"old")
    with using(SimulatedDisk(work)) as disk:
        disk.unlink(work / "a")
        seen = {i.get("a") for i in images(disk, tmp_path / "image")}
    assert seen == {None, b"old"}


def test_what_came_before_a_synced_rename_does_not_come_after_it(work, tmp_path):
    (work / "made").mkdir()
    with using(SimulatedDisk(work)) as disk:
        created(work).close()
        disk.unlink(work / "a")
        files.File.create(work / "made" / "b", 7).sync()
        disk.rename(work / "made" / "b", work / "a")
        # The one that it came from, as another thread may at this moment.
        files.sync_folder(work / "made")
        files.sync_folder(work)
        assert all(i == {"a": bytes(7)} for i in images(disk, tmp_path / "image"))


def test_a_folder_takes_what_is_in_it_along(work, tmp_path):
    with using(SimulatedDisk(work)) as disk:
        disk.mkdir(work / "folder")
        file = files.File.create(work / "folder" / "a", 3)
        file.pwrite(b"abc", 0)
        file.sync()
        files.sync_folder(work / "folder")
        seen = {i.get("folder/a") for i in images(disk, tmp_path / "image")}
    assert seen == {None, b"abc"}


def test_a_store_into_a_mapping_is_a_write_not_yet_synced(work, tmp_path):
    with using(SimulatedDisk(work)) as disk:
        file = created(work)
        file.map_writable()
        file.store(b"live", 0)
        seen = {i["a"][:4] for i in images(disk, tmp_path / "image")}
    assert seen == {bytes(4), b"live"}


def test_after_the_power_cut_nothing_more_is_written(work):
    with using(SimulatedDisk(work)) as disk:
        file = created(work)
        disk.calls_left = 1
        file.pwrite(b"a", 0)
        with pytest.raises(PowerCut):
            file.pwrite(b"b", 1)
        with pytest.raises(PowerCut):
            file.sync()
    assert (work / "a").read_bytes()[:2] == b"a\0"


def test_a_crash_in_place_keeps_the_inode(work):
    with using(SimulatedDisk(work)) as disk:
        created(work).pwrite(b"a", 0)
        before = (work / "a").stat().st_ino
        disk.crash(work, np.random.default_rng(0))
    assert (work / "a").stat().st_ino == before


def test_equal_generators_crash_alike(work, tmp_path):
    with using(SimulatedDisk(work)) as disk:
        file = created(work)
        for at in range(20):
            file.pwrite(os.urandom(200), at * 150)
        first = list(images(disk, tmp_path / "image", 20))
        assert first == list(images(disk, tmp_path / "image", 20))
        assert any(first[0] != other for other in first)
