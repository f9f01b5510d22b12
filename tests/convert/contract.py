"""What all formats share beyond `mmreplay.testing.check_format`; subclass, name one."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from itertools import count
from typing import ClassVar

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert.base import BLOCK_NBYTES
from mmreplay.convert.registry import target_format
from mmreplay.disk import files
from mmreplay.errors import FullError, LockedError, ReplayError
from mmreplay.schema.dtypes import DTYPES
from mmreplay.testing import FORMAT_RULES, check_format, formats
from mmreplay.testing.buffers import make_large as make_large
from mmreplay.testing.formats import text_of as text_of
from tests import slices
from tests.convert.support import every_kind

numbers = count()

KILL = """
import os, signal, sys
import mmreplay as mr
def die(done, total):
    os.kill(os.getpid(), signal.SIGKILL)
mr.load(sys.argv[1], sys.argv[2], progress=die)
"""
MARKS = {
    "memory_is_bounded": [pytest.mark.slow],
    # `test_a_killed_load_leaves_no_target_and_can_be_started_again` is quicker.
    "killed_runs_leave_no_target": [pytest.mark.crash, pytest.mark.slow],
}
RULES = [pytest.param(rule, marks=MARKS.get(rule, [])) for rule in FORMAT_RULES]


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
    changes is allowed for by `stored_as`.
    """

    suffix: str
    dtypes = DTYPES
    options: ClassVar = {}
    stored_as = staticmethod(np.ascontiguousarray)
    # Blocks of 16 MiB: one that is read, one that is packed or padded, and the
    # arrays in which flags are checked; beside them buffers that are summed, and the
    # stage that records are packed in. 200 MiB of data in all.
    memory_nbytes = 3 * BLOCK_NBYTES + (2 << 20)
    large_nbytes = 200 << 20
    large_shape = (84, 84, 4)
    # Which writes of a load find the disk full, counted from 0.
    full_at = (0, 1, 3)

    @pytest.fixture(autouse=True)
    def _hurry(self, monkeypatch):
        """Wait for no device, as all is in the page cache; do less in a slice."""
        monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
        monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)
        monkeypatch.setattr(formats, "HISTORIES", slices.count(formats.HISTORIES, 8))

    def check(self, rule, tmp_path, **options):
        """Check one rule of the contract."""
        name = target_format(tmp_path / f"file{self.suffix}")
        check_format(
            name,
            tmp_path,
            rules=[rule],
            suffix=self.suffix,
            dtypes=self.dtypes,
            options=self.options,
            stored_as=self.stored_as,
            large_nbytes=self.large_nbytes,
            large_shape=self.large_shape,
            memory_nbytes=self.memory_nbytes,
            **options,
        )

    @pytest.fixture
    def source(self, tmp_path):
        """An open buffer of every dtype, with wraps, ends and final rows."""
        with every_kind(tmp_path / "source", dtypes=self.dtypes) as buffer:
            yield buffer

    @pytest.fixture
    def file(self, source, tmp_path):
        path = tmp_path / f"file{self.suffix}"
        mr.export(source, path)
        return path

    @pytest.mark.parametrize("rule", RULES)
    def test_the_contract_holds(self, rule, tmp_path):
        self.check(rule, tmp_path, flips=slices.count(60, 24))

    @pytest.mark.slow
    def test_many_flipped_bits_are_errors_or_change_nothing(self, tmp_path):
        self.check("flipped_bits_are_noticed", tmp_path, flips=600)

    def test_progress_is_reported_in_rows(self, source, tmp_path):
        calls = []
        mr.export(source, tmp_path / f"x{self.suffix}", progress=lambda *a: calls.append(a))
        total = int(source.span.lengths.sum())
        assert calls[-1] == (total, total)
        assert calls == sorted(calls)

    def test_a_buffer_in_use_is_not_replaced(self, file, tmp_path):
        mr.load(file, tmp_path / "target")
        with (
            mr.ReplayBuffer.open(tmp_path / "target", "r+"),
            pytest.raises(LockedError, match="open for writing"),
        ):
            mr.load(file, tmp_path / "target", overwrite=True)

    @pytest.mark.crash
    def test_a_killed_load_leaves_no_target_and_can_be_started_again(self, source, file, tmp_path):
        target = tmp_path / "new"
        died = subprocess.run([sys.executable, "-c", KILL, file, target], timeout=60)
        assert died.returncode == -signal.SIGKILL
        assert not target.exists()
        assert (tmp_path / "tmp-mmreplay-new-new").exists()
        mr.load(file, target)
        assert target.exists()
        assert not [p for p in tmp_path.iterdir() if p.name.startswith("tmp-")]

    def test_a_disk_full_during_a_load_is_an_error_and_leaves_nothing(
        self, file, tmp_path, monkeypatch
    ):
        target = tmp_path / "new"
        for number in self.full_at:
            with monkeypatch.context() as patch:
                patch.setattr(files, "disk", Faulty(number))
                with pytest.raises(FullError, match="No space left"):
                    mr.load(file, target)
            assert not target.exists()
            assert not [p for p in tmp_path.iterdir() if p.name.startswith("tmp-")]


def error_of(call):
    """What a call raises on purpose, or None."""
    try:
        call()
    except ReplayError as error:
        return error
    return None


def peak(call):
    """Most bytes that Python and numpy held during a call beyond those before."""
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401  # what an import costs is not the call's
    return formats.peak(call)
