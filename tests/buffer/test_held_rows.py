"""Rows that a callback holds stay, whatever ends their writer."""

import os
import signal
import time

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FullError
from tests.slices import count

CAPACITY = 200
SCHEMAS = {
    "rows": mr.Schema({"x": mr.Field((), "int64")}),
    "heap bytes": mr.Schema({"x": mr.Field((), "int64"), "note": mr.Field.text(max_bytes=100)}),
}


def values(schema, number):
    step = {"x": number}
    return step | {"note": "n" * 60} if "note" in schema.paths else step


def make(path, kind, engine, steps, **options):
    """A closed ring of some laps."""
    schema = SCHEMAS[kind]
    if kind == "heap bytes":
        options["heap_bytes"] = 8192
    with mr.ReplayBuffer.create(path, schema, CAPACITY, engine=engine, **options) as buffer:
        for number in range(steps):
            buffer.add(values(schema, number))


def first_row(path):
    with mr.ReplayBuffer.open(path) as buffer:
        return int(buffer.span.first[0])


class Holder:
    """Lets no row go from a position on, and notes what it was asked."""

    def __init__(self, first):
        self.limit = first + CAPACITY
        self.calls = []

    def __call__(self, heads, tails, needed, target):
        self.calls.append((int(heads[0]), int(needed[0]), int(target[0])))
        if (needed > self.limit).any():
            raise FullError("held")
        return np.minimum(target, self.limit)


@pytest.mark.crash
@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.sliced(1)
def test_no_kill_loses_a_row_that_is_held(tmp_path, engine, kind):
    ring, schema = tmp_path / "ring", SCHEMAS[kind]
    make(ring, kind, engine, 5 * CAPACITY)
    held = first_row(ring)
    for life in range(count(75, 4)):
        process = os.fork()
        if not process:
            try:
                buffer = mr.ReplayBuffer.open(ring, "r+", commit_every=0.01)
                # The thread that commits has a turn before a row is held, and after.
                time.sleep(0.03)
                buffer.hold_rows(Holder(held))
                try:
                    while True:
                        buffer.add(values(schema, int(buffer.heads[0])))
                except FullError:
                    pass
                time.sleep(0.03)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
        with mr.ReplayBuffer.open(ring) as buffer:
            assert buffer.span.first[0] == held, f"life {life}"
            rows = buffer.gather_all()
            assert rows["x"].tolist() == [*range(held, int(buffer.heads[0]))]
    assert not mr.verify_buffer(ring).findings


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_rows_are_asked_for_although_limits_are_ahead(tmp_path, engine):
    ring = tmp_path / "ring"
    make(ring, "rows", engine, 5 * CAPACITY)
    with mr.ReplayBuffer.open(ring, "r+", commit_every=None) as buffer:
        head = int(buffer.heads[0])
        holder = Holder(head - CAPACITY)
        buffer.hold_rows(holder)
        for _ in range(2):
            with pytest.raises(FullError, match="held"):
                buffer.add(x=head)
        with pytest.raises(FullError, match="held"):
            buffer.extend(x=np.arange(head, head + 3))
        assert buffer.heads[0] == head
        assert [call[:2] for call in holder.calls] == [(head, head + 1)] * 2 + [(head, head + 3)]
        holder.limit += 2
        buffer.add(x=head)
        buffer.add(x=head + 1)
        with pytest.raises(FullError, match="held"):
            buffer.add(x=head + 2)
        assert buffer.span.first[0] == head + 2 - CAPACITY
        buffer.hold_rows(None)
        buffer.extend(x=np.arange(head + 2, head + 2 * CAPACITY))
        assert buffer.gather_all()["x"].tolist() == [*range(head + CAPACITY, head + 2 * CAPACITY)]


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.sliced(1)
def test_no_limit_is_durable_that_the_callback_did_not_let_go(tmp_path, kind):
    ring, schema = tmp_path / "ring", SCHEMAS[kind]
    make(ring, kind, "memmap", 5 * CAPACITY)
    with mr.ReplayBuffer.open(ring, "r+", commit_every=0.01) as buffer:
        committer = buffer._files.committer
        before = committer.limits.copy()
        time.sleep(0.1)
        assert committer.limits.tolist() == before.tolist()
        first = int(buffer.span.first[0])
        holder = Holder(first)
        buffer.hold_rows(holder)
        for step in range(3 * CAPACITY):
            holder.limit += 1
            try:
                buffer.add(values(schema, int(buffer.heads[0])))
            except FullError:
                continue
            assert (committer.limits <= np.maximum(before, holder.limit)).all(), step
        time.sleep(0.1)
        assert (committer.limits <= np.maximum(before, holder.limit)).all()
        assert buffer.span.first[0] <= holder.limit - CAPACITY
        # How often it was asked depends on the load; that rows were let go does not.
        assert buffer.span.first[0] >= first + CAPACITY
        assert holder.calls


def test_the_thread_raises_limits_again_once_nothing_is_held(tmp_path):
    ring = tmp_path / "ring"
    make(ring, "rows", "memmap", 5 * CAPACITY)
    with mr.ReplayBuffer.open(ring, "r+", commit_every=0.01) as buffer:
        buffer.hold_rows(Holder(0))
        buffer.hold_rows(None)
        head = int(buffer.heads[0])
        reserve = buffer.metadata.ring.reserve
        buffer.extend(x=np.arange(head, head + 2 * reserve))
        deadline = time.monotonic() + 60
        while buffer._files.committer.limits[0] < head + 3 * reserve:
            assert time.monotonic() < deadline
            time.sleep(0.01)
