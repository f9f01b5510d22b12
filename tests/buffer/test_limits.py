"""Clocks that jump, positions beyond 32 bits, files cut and reads that fail."""

import errno
import os
import resource
import time

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.errors import CorruptError, FailedError, FullError
from mmreplay.format import metadata as metadata_file
from mmreplay.storage import gather, recovery
from mmreplay.verify import verify_buffer
from tests.format.support import fill, schema_of

YEAR_NS = 365 * 24 * 3600 * 10**9


def make(path, **options):
    options = {"commit_every": None, "autoreset": "disabled"} | options
    return mr.ReplayBuffer.create(path, schema_of(), 12, 2, **options)


def starting_at(path, position):
    """A buffer both of whose environments go on from a position."""
    make(path).close()
    metadata = metadata_file.load(path)
    (path / metadata.folder / "COMMIT").unlink()
    heads = np.full(2, position)
    recovery.create(path / metadata.folder, metadata, heads, heads)
    return path


def check(buffer, position, count):
    """The newest steps are `fill`'s, from a position on."""
    span = buffer.span
    first = max(position, position + count - 12)
    assert span.stop.tolist() == [position + count] * 2
    assert span.first.tolist() == [first] * 2
    rows = buffer.gather_all()
    numbers = rows.positions - position
    assert rows["action"].tolist() == (1000 * rows.env_ids + numbers).tolist()


@pytest.mark.parametrize("bits", [31, 32, 53, 61])
def test_positions_pass_what_smaller_numbers_hold(tmp_path, bits):
    position = (1 << bits) - 7
    path = starting_at(tmp_path / "b", position)
    sampler = mr.PrioritizedSampler(seed=0, name="prioritized")
    with mr.ReplayBuffer.open(path, "r+", sampler=sampler) as buffer:
        for first in range(0, 40, 5):
            fill(buffer, first, first + 5)
            buffer.commit()
            check(buffer, position, first + 5)
            batch = buffer.sample(64)
            values = batch["action"] - 1000 * batch.env_ids + position
            assert (values == batch.positions).all()
            assert buffer.update_priorities(batch, np.ones(64)) == 0
        ends = buffer.episodes.episodes(0)
        assert (ends.lengths > 0).all()
    assert verify_buffer(path).ok
    with mr.ReplayBuffer.open(path) as buffer:
        check(buffer, position, 40)


def test_positions_beyond_any_disks_life_are_refused_and_nothing_is_lost(tmp_path):
    position = (1 << 62) - 80
    path = starting_at(tmp_path / "b", position)
    told = r"positions must be below \d+, got \d+\. Export the rows"
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        with pytest.raises(FullError, match=told):
            fill(buffer, 0, 60)
        written = int(buffer.heads[0]) - position
        check(buffer, position, written)
    with mr.ReplayBuffer.open(path) as buffer:
        assert written > 20
        check(buffer, position, written)
    assert verify_buffer(path).ok


@pytest.mark.parametrize("jump", [-80 * YEAR_NS, -YEAR_NS, YEAR_NS, 200 * YEAR_NS])
def test_a_clock_that_jumps_decides_nothing(tmp_path, monkeypatch, jump):
    now = time.time_ns
    with make(tmp_path / "b", commit_every=0.01) as buffer:
        fill(buffer, 0, 9)
        buffer.commit()
        with monkeypatch.context() as patch:
            patch.setattr(time, "time_ns", lambda: now() + jump)
            patch.setattr(time, "time", lambda: (now() + jump) / 1e9)
            fill(buffer, 9, 20)
            buffer.commit()
            check(buffer, 0, 20)
            # A reader that opens while the clock stands elsewhere sees the same.
            with mr.ReplayBuffer.open(tmp_path / "b") as reader:
                check(reader, 0, 20)
        assert run(["info", str(tmp_path / "b")]) == 0
        fill(buffer, 20, 25)
    for mode in ("r", "r+"):
        with mr.ReplayBuffer.open(tmp_path / "b", mode) as buffer:
            assert buffer.recovery.how == "clean"
            check(buffer, 0, 25)
    assert verify_buffer(tmp_path / "b").ok


@pytest.mark.parametrize("name", ["records.bin", "flags.bin"])
def test_a_file_truncated_under_a_reader_is_an_error_where_files_are_read(tmp_path, name):
    with make(tmp_path / "b") as buffer:
        fill(buffer, 0, 30)
    with mr.ReplayBuffer.open(tmp_path / "b", read_mode="pread") as reader:
        reader.sample(8)
        os.truncate(tmp_path / "b" / "data-000001" / name, 3)
        if name == "records.bin":
            with pytest.raises(CorruptError, match=r"records.bin ends at byte .*was trunc"):
                reader.gather_all()
        with pytest.raises(CorruptError, match=rf"{name} has 3 bytes, but metadata"):
            mr.ReplayBuffer.open(tmp_path / "b")


def test_a_device_that_cannot_be_read_is_an_error_where_files_are_read(tmp_path, monkeypatch):
    with make(tmp_path / "b") as buffer:
        fill(buffer, 0, 30)
    with mr.ReplayBuffer.open(tmp_path / "b", read_mode="pread") as reader:
        with monkeypatch.context() as patch:

            def fail(*_):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(os, "preadv", fail)
            patch.setattr(gather._copies, "read_rows", lambda *_: False)
            with pytest.raises(FailedError, match=r"cannot read .*Input/output error"):
                reader.gather_all()
        check(reader, 0, 30)


def test_too_few_descriptors_are_reported_and_a_writer_continues(tmp_path):
    with make(tmp_path / "b") as buffer:
        fill(buffer, 0, 9)
        # Once with enough, so that all is imported.
        mr.export(tmp_path / "b", tmp_path / "whole.npz")
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.open("/dev/null", os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            for do in (
                lambda: buffer.resize(20),
                lambda: buffer.set_statistics({"mean": 1}),
                lambda: mr.export(tmp_path / "b", tmp_path / "a.npz"),
                lambda: mr.ReplayBuffer.open(tmp_path / "b"),
            ):
                with pytest.raises(FailedError, match="Too many open files"):
                    do()
            fill(buffer, 9, 20)
            buffer.commit()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        check(buffer, 0, 20)
        buffer.resize(12)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        check(buffer, 0, 20)


def test_environments_any_number_of_steps_apart_are_resized_at_once(tmp_path):
    path = tmp_path / "b"
    make(path).close()
    metadata = metadata_file.load(path)
    (path / metadata.folder / "COMMIT").unlink()
    heads = np.array([0, 1 << 50])
    recovery.create(path / metadata.folder, metadata, heads, heads)
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        fill(buffer, 0, 5)
        buffer.resize(20)
        fill(buffer, 5, 9)
        rows = buffer.gather_all()
        numbers = rows.positions - heads[rows.env_ids]
        assert numbers.tolist() == [*range(9), *range(9)]
        assert rows["action"].tolist() == (1000 * rows.env_ids + numbers).tolist()
    assert verify_buffer(path).ok


TEXTS = mr.Schema({"text": mr.Field.text(200), "number": mr.Field((), "int64")})


def with_heaps_at(path, heap_position, num_envs, engine):
    """A buffer of texts whose heaps go on from a position."""
    mr.ReplayBuffer.create(
        path, TEXTS, 256, num_envs, engine=engine, heap_bytes=1 << 20, autoreset="disabled"
    ).close()
    metadata = metadata_file.load(path)
    (path / metadata.folder / "COMMIT").unlink()
    heaps = np.full(num_envs, heap_position)
    recovery.create(path / metadata.folder, metadata, None, None, heaps, heaps)
    return path


def text_of(number):
    return f"{number}:" + "x" * (number % 190)


def add_texts(buffer, how, first, stop):
    """Add steps of numbers, one by one or all at once."""
    numbers = np.arange(first, stop)
    envs = buffer.num_envs
    shape = (-1,) if envs == 1 else (-1, 1)
    every = np.broadcast_to(numbers.reshape(shape), (len(numbers), envs)[: len(shape)])
    texts = [text_of(number) for number in numbers]
    texts = texts if envs == 1 else [[text] * envs for text in texts]
    if how == "extend":
        buffer.extend(text=texts, number=every)
        return
    for text, number in zip(texts, every, strict=True):
        if how == "some":
            buffer.add(text=text, number=number, env_ids=list(range(envs)))
        else:
            buffer.add(text=text, number=number)


def check_texts(buffer):
    """Every row has the text of its number, and the newest ones are all there."""
    rows = buffer.gather_all()
    texts = list(rows["text"].text())
    assert texts == [text_of(number) for number in rows["number"]]
    return len(texts)


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize("how", ["add", "some", "extend"])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.sliced(2)
def test_heap_positions_that_kernels_cannot_count_are_refused(tmp_path, engine, how, num_envs):
    path = with_heaps_at(tmp_path / "b", (1 << 61) - (1 << 16), num_envs, engine)
    told = r"heap positions must be at most 2305843009213693944, got \d+ of envi"
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        with pytest.raises(FullError, match=told) as caught:
            add_texts(buffer, how, 0, 2_000)
        assert caught.value.errno == errno.EOVERFLOW
        written = int(buffer.heads[0])
        # 65,536 bytes hold some 600 texts of 98 bytes, in words of 8.
        assert 500 < written < 700
        count = check_texts(buffer)
        with pytest.raises(FullError, match="Export the rows and continue in a new"):
            add_texts(buffer, how, written, written + 1_000)
    with mr.ReplayBuffer.open(path) as buffer:
        assert check_texts(buffer) >= count > 100
    assert verify_buffer(path).ok


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("how", ["add", "some", "extend"])
def test_a_heap_that_another_writer_wrote_beyond_is_read_and_not_written(tmp_path, how, num_envs):
    path = with_heaps_at(tmp_path / "b", (1 << 61) + (1 << 20), num_envs, "memmap")
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        with pytest.raises(FullError, match="heap positions must be at most"):
            add_texts(buffer, how, 0, 2)
        assert len(buffer) == 0
