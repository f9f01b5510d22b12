"""What every format owes: subclass it and name the suffix."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import tracemalloc
from itertools import count
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.convert.base import BLOCK_NBYTES
from mmreplay.disk import files
from mmreplay.errors import (
    CorruptError,
    FailedError,
    FormatError,
    FullError,
    LockedError,
    ReplayError,
)
from mmreplay.schema.dtypes import DTYPES
from tests.convert.support import (
    every_kind,
    histories,
    nested,
    play,
    same_but_rows,
    same_rows,
)

numbers = count()

KILL = """
import os, signal, sys
import mmreplay as mr
def die(done, total):
    os.kill(os.getpid(), signal.SIGKILL)
mr.{how}(sys.argv[1], sys.argv[2], progress=die)
"""


class Faulty(files.Disk):
    """A disk on which the n-th write, counted from 0, finds no room."""

    def __init__(self, number):
        self.number = number

    def pwrite(self, fd, data, offset):
        self.number -= 1
        if self.number < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwrite(fd, data, offset)


class FormatContract:
    """Every format that is written and read without loss.

    What a format cannot hold is left out of its buffers by `dtypes`, and what it
    changes is allowed for by `same_rows`.
    """

    suffix: str
    dtypes = DTYPES
    options: ClassVar = {}
    # Blocks of 16 MiB: one that is read, one that is packed or padded, and the
    # arrays in which flags are checked; beside them pieces that are summed, and the
    # stage that records are packed in. 200 MiB of data in all.
    most_nbytes = 3 * BLOCK_NBYTES + (2 << 20)
    large_nbytes = 200 << 20
    image = (84, 84, 4)
    # Which of a run's writes find no room, counted from 0.
    full_at = (0, 1, 3)

    def same_rows(self, one, other):
        same_rows(one, other)

    def same(self, one, other):
        same_but_rows(one, other)
        self.same_rows(one, other)

    @pytest.fixture(autouse=True)
    def _hurry(self, monkeypatch):
        """Wait for no device: what these tests look at is in the page cache."""
        monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
        monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)

    @pytest.fixture
    def source(self, tmp_path):
        """An open buffer of every dtype, with wraps, ends, finals and a cut."""
        with every_kind(tmp_path / "source", dtypes=self.dtypes) as buffer:
            yield buffer

    @pytest.fixture
    def file(self, source, tmp_path):
        path = tmp_path / f"file{self.suffix}"
        mr.export(source, path)
        return path

    @given(data=st.data())
    @settings(
        max_examples=25,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            # One test for every format, each of a class of its own.
            HealthCheck.differing_executors,
        ],
    )
    def test_a_buffer_comes_back_to_the_bit(self, tmp_path, data):
        past = data.draw(histories(self.dtypes))
        place = tmp_path / str(next(numbers))
        with play(place / "source", past) as source:
            mr.export(source, place / f"file{self.suffix}", **self.options)
            report = mr.load(place / f"file{self.suffix}", place / "target")
            with mr.ReplayBuffer.open(place / "target") as target:
                self.same(source, target)
                assert report.rows == int(target.span.lengths.sum())
                assert report.episodes == num_episodes(target)
        assert not mr.verify_buffer(place / "target").findings

    def test_every_dtype_comes_back_and_is_whole(self, source, file, tmp_path):
        report = mr.load(file, tmp_path / "target")
        assert (report.notes, report.doubts) == ((), ())
        assert report.nbytes > 0
        with mr.ReplayBuffer.open(tmp_path / "target") as target:
            self.same(source, target)
        assert not mr.verify_buffer(tmp_path / "target").findings

    def test_a_loaded_buffer_goes_on_where_its_source_stopped(
        self, source, file, tmp_path
    ):
        mr.load(file, tmp_path / "target")
        row = source.gather_all()
        step = {path: row[path][:1].repeat(2, 0) for path in source.schema.paths}
        for mode in ("r+", "r"):
            with mr.ReplayBuffer.open(
                tmp_path / "target", mode, on_resume="continue"
            ) as target:
                if mode == "r+":
                    for _ in range(60):
                        target.add(nested(step))
                np.testing.assert_array_equal(target.heads, source.heads + 60)

    def test_an_empty_buffer_comes_back_empty(self, source, tmp_path):
        source.clear()
        mr.export(source, tmp_path / f"empty{self.suffix}")
        report = mr.load(tmp_path / f"empty{self.suffix}", tmp_path / "target")
        assert (report.rows, report.episodes) == (0, 0)
        with mr.ReplayBuffer.open(tmp_path / "target") as target:
            self.same(source, target)

    def test_equal_buffers_give_equal_files(self, source, file, tmp_path):
        again = tmp_path / f"again{self.suffix}"
        mr.export(source.path, again)
        assert again.read_bytes() == file.read_bytes()

    def test_some_fields_and_environments_are_exported(self, source, tmp_path):
        path = tmp_path / f"part{self.suffix}"
        mr.export(source, path, fields=["observation", "all"], env_ids=[1])
        mr.load(path, tmp_path / "target")
        with mr.ReplayBuffer.open(tmp_path / "target") as target:
            kept = [p for p in source.schema.paths if p.startswith(("obs", "all"))]
            assert list(target.schema.paths) == kept
            np.testing.assert_array_equal(target.heads, source.heads)
            assert target.span.lengths.tolist() == [0, source.span.lengths[1]]
            assert target.episodes.sizes().tolist()[1] == source.sizes[1]

    def test_progress_is_reported_in_rows(self, source, tmp_path):
        calls = []
        mr.export(
            source,
            tmp_path / f"x{self.suffix}",
            progress=lambda *a: calls.append(a),
        )
        total = int(source.span.lengths.sum())
        assert calls[-1] == (total, total)
        assert calls == sorted(calls)

    def test_an_existing_target_is_refused_and_left_as_it_is(self, source, file):
        before = file.read_bytes()
        with pytest.raises(FormatError, match="exists already, expected a new path"):
            mr.export(source, file)
        assert file.read_bytes() == before

    def test_an_existing_target_is_replaced_on_request(self, source, file, tmp_path):
        source.clear([0])
        mr.export(source, file, overwrite=True)
        mr.load(file, tmp_path / "target")
        mr.load(file, tmp_path / "target", overwrite=True)
        with mr.ReplayBuffer.open(tmp_path / "target") as target:
            self.same(source, target)
        assert not [p for p in tmp_path.iterdir() if p.name.startswith("tmp-")]

    def test_a_buffer_in_use_is_not_replaced(self, file, tmp_path):
        mr.load(file, tmp_path / "target")
        with (
            mr.ReplayBuffer.open(tmp_path / "target", "r+"),
            pytest.raises(LockedError, match="open for writing"),
        ):
            mr.load(file, tmp_path / "target", overwrite=True)

    def test_two_runs_for_one_target_do_not_mix(self, source, tmp_path):
        target = tmp_path / f"x{self.suffix}"

        def again(*_):
            with pytest.raises(LockedError, match="written by another run"):
                mr.export(source, target)

        mr.export(source, target, progress=again)
        assert target.exists()

    @pytest.mark.crash
    @pytest.mark.parametrize("how", ["export", "load"])
    def test_a_killed_run_leaves_no_target_and_can_be_started_again(
        self, source, file, tmp_path, how
    ):
        source.close()
        target = tmp_path / ("new" + (self.suffix if how == "export" else ""))
        origin = source.path if how == "export" else file
        call = getattr(mr, how)
        code = KILL.format(how=how)
        died = subprocess.run([sys.executable, "-c", code, origin, target], timeout=60)
        assert died.returncode == -signal.SIGKILL
        assert not target.exists()
        assert (tmp_path / f"tmp-mmreplay-new-{target.name}").exists()
        call(origin, target)
        assert target.exists()
        assert not [p for p in tmp_path.iterdir() if p.name.startswith("tmp-")]

    @pytest.mark.parametrize("how", ["export", "load"])
    def test_a_full_disk_is_an_error_and_leaves_nothing(
        self, source, file, tmp_path, monkeypatch, how
    ):
        origin = source if how == "export" else file
        target = tmp_path / ("new" + (self.suffix if how == "export" else ""))
        for number in self.full_at:
            with monkeypatch.context() as patch:
                patch.setattr(files, "disk", Faulty(number))
                with pytest.raises(FullError, match="No space left"):
                    getattr(mr, how)(origin, target)
            assert not target.exists()
            assert not [p for p in tmp_path.iterdir() if p.name.startswith("tmp-")]

    @pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.7, 0.98, 0.999])
    def test_a_truncated_file_is_an_error_that_names_it(self, file, tmp_path, share):
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(FormatError) as caught:
            mr.load(file, tmp_path / "target")
        assert str(file) in text_of(caught.value)
        assert not (tmp_path / "target").exists()

    def test_a_flipped_bit_is_an_error_or_changes_nothing(self, source, file, tmp_path):
        self.flip(source, file, tmp_path, 60)

    @pytest.mark.slow
    def test_many_flipped_bits_are_errors_or_change_nothing(
        self, source, file, tmp_path
    ):
        self.flip(source, file, tmp_path, 600)

    def flip(self, source, file, tmp_path, times):
        rng = np.random.default_rng(1)
        whole = file.read_bytes()
        noticed = 0
        for place in rng.integers(0, len(whole), times).tolist():
            data = bytearray(whole)
            data[place] ^= 1 << int(rng.integers(8))
            file.write_bytes(data)
            error = error_of(lambda: mr.load(file, tmp_path / "target"))
            if error is not None:
                noticed += 1
                assert str(file) in text_of(error), (place, error)
                assert not (tmp_path / "target").exists()
                continue
            with mr.ReplayBuffer.open(tmp_path / "target") as target:
                self.same_rows(source, target)
            files.remove_tree(tmp_path / "target")
        # What is not noticed is padding, dates, and text of the description.
        assert noticed > 0.7 * times

    def test_what_is_no_file_is_refused(self, file, tmp_path):
        link = tmp_path / f"link{self.suffix}"
        link.symlink_to(file)
        pipe = tmp_path / f"pipe{self.suffix}"
        os.mkfifo(pipe)
        for path in (link, pipe):
            with pytest.raises(FormatError, match="not a regular file"):
                mr.load(path, tmp_path / "target")

    def test_another_file_under_this_suffix_is_refused(self, tmp_path):
        path = tmp_path / f"other{self.suffix}"
        for data in (b"", b"no", b"hello world, I am not it\n" * 40, bytes(4096)):
            path.write_bytes(data)
            with pytest.raises((FormatError, CorruptError)) as caught:
                mr.load(path, tmp_path / "target")
            assert str(path) in str(caught.value)

    @pytest.mark.slow
    def test_memory_does_not_grow_with_the_buffer(self, tmp_path):
        make_large(tmp_path / "source", self.large_nbytes, self.image)
        file = tmp_path / f"large{self.suffix}"
        assert peak(lambda: mr.export(tmp_path / "source", file)) < self.most_nbytes
        assert peak(lambda: mr.load(file, tmp_path / "target")) < self.most_nbytes
        with (
            mr.ReplayBuffer.open(tmp_path / "source") as source,
            mr.ReplayBuffer.open(tmp_path / "target") as target,
        ):
            assert (source.heads == target.heads).all()
            for path in source.schema.paths:
                ids, places = [1, 0, 1], [5, 700, 800]
                a, b = (each.get_field(path, ids, places) for each in (source, target))
                np.testing.assert_array_equal(a, b)

    def test_a_device_that_fails_a_sync_leaves_no_target(
        self, source, tmp_path, monkeypatch
    ):
        def fail(self, fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        target = tmp_path / f"x{self.suffix}"
        with monkeypatch.context() as patch:
            patch.setattr(files.Disk, "datasync", fail)
            with pytest.raises(FailedError, match="cannot sync"):
                mr.export(source, target)
        assert not target.exists()


def error_of(call):
    """What a call raises on purpose, or None."""
    try:
        call()
    except ReplayError as error:
        return error
    return None


def num_episodes(buffer):
    """Episodes alive, those among them whose beginning was overwritten."""
    each = [buffer.episodes.episodes(env_id) for env_id in range(buffer.num_envs)]
    return sum(len(found.begin) for found in each)


def text_of(error):
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def make_large(path, nbytes, image):
    """Two environments of images and small fields, nbytes in all."""
    schema = mr.Schema(
        {
            "observation": mr.Field(image, "uint8"),
            "small": mr.Field((17,), "float32"),
            "terminated": mr.Field((), "bool"),
        }
    )
    count = nbytes // schema.row_nbytes // 2
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (100, 2, *image), np.uint8)
    with mr.ReplayBuffer.create(
        path, schema, count, 2, commit_every=None, autoreset="disabled"
    ) as buffer:
        for first in range(0, count, 100):
            size = min(100, count - first)
            marks = images.reshape(100, 2, -1)[:, :, 0]
            marks[:] = (first + np.arange(100))[:, None] % 251
            ends = np.zeros((size, 2), bool)
            ends[-1] = True
            small = rng.random((size, 2, 17)).astype(np.float32)
            buffer.extend(observation=images[:size], small=small, terminated=ends)


def peak(call):
    """Most bytes that Python and numpy held during a call beyond those before."""
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401  # what an import costs is not the call's
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
