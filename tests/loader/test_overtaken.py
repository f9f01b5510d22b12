"""Epochs whose drawn steps are overwritten before they are copied, and limiters."""

import threading

import numpy as np
import pytest

import mmreplay as mr
from tests.loader.support import fill, steps


class Gate:
    """A transform's function that waits, so that draws run ahead of gathers."""

    def __init__(self):
        self.open = threading.Event()
        self.inside = threading.Event()

    def __call__(self, fields):
        """Wait."""
        self.inside.set()
        self.open.wait(20)
        return fields


def positions(batch):
    return batch.positions.tolist()


@pytest.mark.parametrize("lost", [25, 55])
def test_an_epoch_ends_with_itself_whatever_was_lost_of_it(tmp_path, lost):
    gate = Gate()
    sampler = mr.ShuffledSampler(seed=0, shuffle=False)
    buffer = fill(
        tmp_path / "b", 100, 100, 1, close=False, sampler=sampler, transforms=[mr.Apply(gate)]
    )
    expected = [
        p
        for p in range(100)
        if buffer.view.legal(*map(_array, (0, p)))[0] and p < buffer.view.starts.stop[0]
    ]
    with buffer, mr.ReplayLoader(buffer, 10, prefetch=4, num_threads=1) as loader:
        batches = iter(loader)
        gate.inside.wait(20)
        while len(loader._work._drawn) < 4:
            threading.Event().wait(0.001)
        # The first batch is being made; its rows and the next ones' are overwritten.
        buffer.extend(steps(100, lost, 1))
        gate.open.set()
        found = [positions(batch) for batch in batches]
        flat = [p for batch in found for p in batch]
        # In order, each once, of this epoch alone, and all that there was left to have.
        assert flat == sorted(set(flat))
        assert set(flat) <= set(expected)
        assert [p for p in flat if p >= lost + 10] == [p for p in expected if p >= lost + 10]
        assert sampler.epoch == 1


def test_a_run_goes_on_exactly_where_batches_were_lost(tmp_path):
    gate = Gate()
    buffer = fill(
        tmp_path / "b",
        400,
        400,
        1,
        close=False,
        sampler=mr.ShuffledSampler(seed=0, shuffle=False),
        transforms=[mr.Apply(gate)],
    )
    with buffer:
        with mr.ReplayLoader(buffer, 10, prefetch=4, num_threads=1) as loader:
            batches = iter(loader)
            gate.inside.wait(20)
            while len(loader._work._drawn) < 4:
                threading.Event().wait(0.001)
            buffer.extend(steps(400, 80, 1))
            gate.open.set()
            next(batches)
            state = loader.state_dict()
            rest = [positions(batch) for batch in batches]
        buffer.sampler = mr.ShuffledSampler(seed=9, shuffle=False)
        with mr.ReplayLoader(buffer, 10) as again:
            again.load_state_dict(state)
            assert [positions(batch) for batch in again] == rest


def test_the_end_of_an_epoch_is_reported_whatever_a_limiter_says(tmp_path):
    # 3 samples an insert and 20 steps: two batches of 10 are allowed, and a bit more.
    limiter = mr.RateLimiter(1.0, 10, error_buffer=10.0, timeout=0.5)
    schema = mr.Schema({"x": mr.Field((), "int64")})
    with mr.ReplayBuffer.create(
        tmp_path / "b",
        schema,
        1000,
        limiter=limiter,
        sampler=mr.ShuffledSampler(seed=0),
        commit_every=None,
    ) as buffer:
        for number in range(20):
            buffer.add(x=number)
        with mr.ReplayLoader(buffer, 10) as loader:
            assert sum(len(batch) for batch in loader) == 20
            # The next epoch is another one, which has to be allowed.
            for number in range(20):
                buffer.add(x=number)
            assert len(next(iter(loader))) == 10


def _array(value):
    return np.array([value])
