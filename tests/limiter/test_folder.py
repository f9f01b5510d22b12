"""What lies in a limiter's folder, and a process that may open nothing more."""

import errno
import os
import signal

import pytest

import mmreplay as mr
from mmreplay.disk import files
from mmreplay.errors import FailedError, SchemaError
from mmreplay.verify import verify_buffer
from tests.descriptors import few_descriptors
from tests.limiter.support import SCHEMA, add, child, create, rate_limiter, reader, until_starved

MESSAGE = r"cannot {} .*{}.*Too many open files \(errno 24\)"


@pytest.fixture
def refused(monkeypatch):
    """Names that cannot be opened, for want of descriptors."""
    names = set()

    class Full(files.Disk):
        def open(self, path, flags):
            if path.name in names:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().open(path, flags)

    monkeypatch.setattr(files, "disk", Full())
    return names


def test_only_names_of_learners_are_opened(tmp_path):
    limiter = rate_limiter(error_buffer=1e6)
    create(tmp_path / "b", limiter).close()
    folder = tmp_path / "b" / "limiter"
    strange = ["", "0", "0000", "256", "-01", "000.bak"]
    for name in [*strange, *(f"x{number}" for number in range(300))]:
        (folder / f"learner-{name}").write_bytes(bytes(16))
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", limiter=limiter) as buffer:
        before = len(os.listdir("/proc/self/fd"))
        add(buffer, 20)
        buffer.sample(1)
        # Its files as a writer and a learner, the count that it reads, and the two
        # files that the first step maps for writing.
        assert len(os.listdir("/proc/self/fd")) <= before + 5


@pytest.mark.parametrize("data", [b"", b"\7" * 5, b"\xff" * 8 + bytes(8), b"\1" * 4096])
def test_a_count_that_is_none_is_made_anew(tmp_path, data):
    create(tmp_path / "b", rate_limiter()).close()
    path = tmp_path / "b" / "limiter" / "learner-000"
    path.write_bytes(data)
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", limiter=rate_limiter()) as buffer:
        assert until_starved(lambda: add(buffer)) == 15
        assert until_starved(lambda: buffer.sample(1)) == 40
    assert path.read_bytes()[:8] == (40).to_bytes(8, "little")
    assert path.stat().st_size == 16


def test_what_is_no_count_has_drawn_nothing(tmp_path):
    with create(tmp_path / "b", rate_limiter()) as buffer:
        (tmp_path / "b" / "limiter" / "learner-007").mkdir()
        (tmp_path / "b" / "limiter" / "learner-008").write_bytes(b"1")
        (tmp_path / "b" / "limiter" / "learner-009").symlink_to("learner-000")
        assert until_starved(lambda: add(buffer)) == 15
        assert until_starved(lambda: buffer.sample(1)) == 40


def test_too_few_descriptors_are_reported_and_both_sides_continue(tmp_path):
    with create(tmp_path / "b", rate_limiter()) as buffer:
        told = MESSAGE.format("create", "writer")
        with few_descriptors(0), pytest.raises(FailedError, match=told):
            add(buffer)
        add(buffer, 12)
        with few_descriptors(0):
            with pytest.raises(FailedError, match=MESSAGE.format("list", "limiter")):
                add(buffer)
            with pytest.raises(FailedError, match=MESSAGE.format("create", "learner")):
                buffer.sample(1)
        assert until_starved(lambda: buffer.sample(1)) == 28
        assert until_starved(lambda: add(buffer)) == 10


def test_a_count_that_cannot_be_opened_is_no_missing_count(tmp_path, refused):
    with (
        create(tmp_path / "b", rate_limiter()) as buffer,
        reader(tmp_path / "b", rate_limiter()) as r,
    ):
        add(buffer, 12)
        r.sample(1)
        refused.add("learner-000")
        for call in (lambda: add(buffer), lambda: buffer.sample(1)):
            with pytest.raises(FailedError, match=MESSAGE.format("open", "learner-000")):
                call()
        refused.clear()
        buffer.sample(1)


@pytest.mark.crash
def test_a_file_that_cannot_be_opened_is_not_free(tmp_path, refused):
    create(tmp_path / "b", rate_limiter()).close()
    told, tell = os.pipe()

    def live():
        with mr.ReplayBuffer.open(tmp_path / "b", "r+", limiter=rate_limiter()) as buffer:
            add(buffer)
            os.write(tell, b".")
            signal.pause()

    pid = child(live)
    assert os.read(told, 1) == b"."
    try:
        with reader(tmp_path / "b", rate_limiter(patience=0)) as buffer:
            refused.add("writer")
            with pytest.raises(FailedError, match=MESSAGE.format("open", "writer")):
                buffer.sample(1)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_parameters_that_do_not_fit_leave_no_buffer(tmp_path):
    with pytest.raises(SchemaError, match=r"min_size must be at most 100.*got 101"):
        create(tmp_path / "b", rate_limiter(min_size=101))
    assert not (tmp_path / "b").exists()


def test_a_reader_that_adds_is_refused_before_it_registers_as_the_writer(tmp_path):
    create(tmp_path / "b", rate_limiter()).close()
    with reader(tmp_path / "b", rate_limiter()) as buffer:
        with pytest.raises(FailedError, match="'r\\+'"):
            add(buffer)
        with pytest.raises(FailedError, match="'r\\+'"):
            buffer.extend(number=[1, 2])
        assert not (tmp_path / "b" / "limiter" / "writer").exists()


@pytest.mark.parametrize("links", [True, False])
def test_who_come_first_at_once_agree(tmp_path, monkeypatch, links):
    """On what was there when the first of them came."""
    path, others = tmp_path / "b", []
    replace_bytes = files.replace_bytes

    def overtaken(*args):
        monkeypatch.setattr(files, "replace_bytes", replace_bytes)
        add(writer, 250)
        others.append(reader(path, rate_limiter()))
        replace_bytes(*args)

    def refuse(*_):
        raise PermissionError(errno.EPERM, "no links")

    if not links:
        monkeypatch.setattr(files.disk, "link", refuse)
    with mr.ReplayBuffer.create(path, SCHEMA, 100, commit_every=None) as writer:
        monkeypatch.setattr(files, "replace_bytes", overtaken)
        readers = [reader(path, rate_limiter()), *others, reader(path, rate_limiter())]
        assert [each.limit._base for each in readers] == [150] * 3
        for each in readers:
            each.close()
    assert files.names(path / "limiter") == ["law.json"]
    assert verify_buffer(path).findings == ()
