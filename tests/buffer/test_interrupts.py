"""Ctrl-C at any moment, threads that add at once, buffers that nobody closed."""

import functools
import gc
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import mmreplay as mr
from tests.buffer.support import Twin, check_rows, step

SCHEMA = mr.Schema(
    {
        "observation": mr.Field((4,), "int64"),
        "large": mr.Field((1024,), "int64"),
        "terminated": mr.Field((), "bool"),
    }
)


def row(number):
    return {
        "observation": np.full(4, number),
        "large": np.full(1024, number),
        "terminated": number % 3 == 0,
    }


def numbers(buffer):
    """Number of every row alive by position; each row must be of one piece."""
    rows = buffer.gather_all()
    values = rows["observation"][:, 0]
    assert (rows["observation"] == values[:, None]).all()
    assert (rows["large"] == values[:, None]).all()
    assert (rows["terminated"] == (values % 3 == 0)).all()
    return dict(zip(rows.positions.tolist(), values.tolist(), strict=True))


@pytest.fixture
def alarms():
    """Raises KeyboardInterrupt after so many seconds, as Ctrl-C would."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupted(alarms, seconds, call):
    """Make the call, or a part of it."""
    try:
        alarms(seconds)
        call()
        alarms(0)
    except KeyboardInterrupt:
        return True
    return False


def test_an_add_that_is_interrupted_anywhere_is_in_or_not(tmp_path, alarms, rng):
    path = tmp_path / "ring"
    buffer = mr.ReplayBuffer.create(path, SCHEMA, 20, commit_every=None)
    reader = mr.ReplayBuffer.open(path)
    seen, struck = {}, 0
    for number in range(600):
        head = int(buffer.heads[0])
        call = functools.partial(buffer.add, row(number))
        struck += interrupted(alarms, rng.uniform(1e-5, 2e-4), call)
        assert int(buffer.heads[0]) in (head, head + 1)
        # What a reader saw once stays what it is for as long as it is alive.
        shown = numbers(reader)
        assert all(seen.get(place, value) == value for place, value in shown.items())
        seen = shown
        assert shown == numbers(buffer)
        assert len(buffer) == len(shown)
    # The moments are chance: of 600 alarms a good part falls into the call.
    assert struck > 30
    reader.close()
    buffer.close()
    assert mr.verify_buffer(path).ok


def test_a_look_that_is_interrupted_counts_no_row_twice(tmp_path, monkeypatch):
    twin = Twin(tmp_path / "ring", 9, 3)
    twin.extend([["", "t", "u"]] * 7)
    with mr.ReplayBuffer.open(twin.path) as reader:
        store = reader._files.store
        read = store.flags_between

        def interrupt(env_id, first, stop):
            if env_id == 2:
                raise KeyboardInterrupt
            return read(env_id, first, stop)

        monkeypatch.setattr(store, "flags_between", interrupt)
        with pytest.raises(KeyboardInterrupt):
            len(reader)
        monkeypatch.setattr(store, "flags_between", read)
        check_rows(reader, twin.oracle)
    twin.buffer.close()


def test_threads_take_turns_and_lose_nothing(tmp_path):
    path = tmp_path / "ring"
    schema = mr.Schema({"number": mr.Field((), "int64")})
    buffer = mr.ReplayBuffer.create(path, schema, 2000, 2, commit_every=0.001, autoreset="disabled")

    def work(first):
        for number in range(first, first + 300):
            if number % 3:
                buffer.add({"number": np.array([number, -number])})
            elif number % 2:
                buffer.add({"number": np.array([number])}, env_ids=[0])
                buffer.add({"number": np.array([-number])}, env_ids=[1])
            else:
                buffer.extend({"number": np.array([[number, -number]])})

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sorted(1000 * i + n for i in range(3) for n in range(300))
    buffer.close()
    with mr.ReplayBuffer.open(path) as again:
        rows = again.gather_all()
        assert sorted(rows["number"][rows.env_ids == 0].tolist()) == expected
        assert sorted((-rows["number"][rows.env_ids == 1]).tolist()) == expected
    assert mr.verify_buffer(path).ok


def test_a_buffer_that_nobody_closed_is_closed_when_it_goes(tmp_path):
    twin = Twin(tmp_path / "ring", 9)
    twin.add([""])
    threads = threading.active_count()
    other = mr.ReplayBuffer.create(tmp_path / "other", SCHEMA, 9)
    assert threading.active_count() == threads + 1
    del twin, other
    gc.collect()
    assert threading.active_count() == threads
    for name in ("ring", "other"):
        with mr.ReplayBuffer.open(tmp_path / name, "r+") as buffer:
            assert buffer.recovery.how == "clean"


LEFT_OPEN = """
import sys
import mmreplay as mr
schema = mr.Schema({"value": mr.Field((), "int64")})
buffer = mr.ReplayBuffer.create(sys.argv[1], schema, 9)
buffer.add(value=7)
"""


@pytest.mark.parametrize("last", ["", "raise SystemExit(0)", "keep = [buffer]"])
@pytest.mark.sliced(2)
def test_a_program_that_ends_without_closing_has_committed(tmp_path, last):
    path = tmp_path / "ring"
    code = LEFT_OPEN + last
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(path)], check=True)
    with mr.ReplayBuffer.open(path) as buffer:
        assert buffer.recovery.how == "clean"
        assert buffer.committed.tolist() == [1]
        assert buffer.gather_all()["value"].tolist() == [7]


def test_a_with_block_that_fails_closes_and_keeps_what_is_in(tmp_path):
    path = tmp_path / "ring"
    buffer = Twin(path, 5).buffer
    with pytest.raises(ZeroDivisionError), buffer:
        fail_after_an_add(buffer)
    assert buffer.closed
    with mr.ReplayBuffer.open(path, "r+") as again:
        assert len(again) == 1


def fail_after_an_add(buffer):
    buffer.add(step(1))
    raise ZeroDivisionError
