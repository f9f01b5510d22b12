"""A learner that is back at once makes batches itself: the same ones.

Small ones instead of a thread, large ones while a thread makes the one before.
"""

import threading
from contextlib import suppress
from time import sleep

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.loader import prefetch, replay_loader
from tests.loader.support import CtrlC, fill, steps
from tests.loader.test_loader import SAMPLERS, TRANSFORMS, endless, opened, same


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("quick") / "b"
    fill(path)
    return path


@pytest.fixture(params=["small", "large"], autouse=True)
def made(request, monkeypatch):
    """Who made batches in a thread that is none of the loader's."""
    counted = []
    if request.param == "small":
        monkeypatch.setattr(prefetch, "QUICK_S", 60.0)
        monkeypatch.setattr(prefetch, "Prefetcher", counting(counted))
    else:
        monkeypatch.setattr(prefetch, "SMALL_NBYTES", 0)
        monkeypatch.setattr(prefetch, "HURRIED", 1e9)
        monkeypatch.setattr(prefetch, "Prefetcher", waited_for(counted))
    monkeypatch.setattr(replay_loader, "Prefetcher", prefetch.Prefetcher)
    return counted


def counting(counted):
    class Counting(prefetch.Prefetcher):
        def _make(self):
            found = super()._make()
            if found is not prefetch.NOTHING:
                counted.append(threading.current_thread().name)
            return found

    return Counting


def waited_for(counted):
    """Its threads begin a batch, and go on when the learner can do no more."""

    class WaitedFor(prefetch.Prefetcher):
        waits = False

        def _await(self):
            self.waits = True
            super()._await()
            self.waits = False

        def _gather(self, entry, *caught):
            thread = threading.current_thread().name
            if thread != "mmreplay-load":
                counted.append(thread)
            while thread == "mmreplay-load" and not (self.waits or self._stop):
                sleep(0.001)
            super()._gather(entry, *caught)

    return WaitedFor


@pytest.mark.parametrize("kind", SAMPLERS)
def test_batches_are_those_of_sample_in_their_order(path, kind, made):
    alone, buffer = (opened(path, SAMPLERS[kind]()) for _ in range(2))
    with (
        alone,
        buffer,
        mr.ReplayLoader(buffer, 16, prefetch=4, num_threads=2) as loader,
    ):
        batches = endless(loader)
        for _ in range(60):
            same(next(batches), alone.sample(16))
    assert len(made) > 10
    assert set(made) == {threading.main_thread().name}


def test_several_buffers_are_drawn_from_so_too(path, made):
    def both():
        buffers = [opened(path, mr.ShuffledSampler(seed=k)) for k in range(2)]
        return mr.concat(buffers, seed=3)

    alone = both()
    with mr.ReplayLoader(both(), 16) as loader:
        for _ in range(40):
            same(next(loader), alone.sample(16))
    assert len(made) > 10


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_a_state_taken_between_batches_goes_on_there(path, kind, made):
    def buffer():
        return opened(path, mr.ShuffledSampler(seed=3), TRANSFORMS[kind])

    with buffer() as one, buffer() as other, buffer() as alone:
        with mr.ReplayLoader(one, 16) as loader:
            batches = endless(loader)
            for _ in range(30):
                next(batches)
                alone.sample(16)
            state = loader.state_dict()
            expected = [alone.sample(16) for _ in range(20)]
            for batch in expected:
                same(next(batches), batch)
        with mr.ReplayLoader(other, 16) as loader:
            loader.load_state_dict(state)
            for one, batch in zip(endless(loader), expected, strict=False):
                same(one, batch)
    assert len(made) > 10


def test_epochs_end_where_they_do(path, made):
    buffer = opened(path, mr.ShuffledSampler(seed=0))
    with buffer, mr.ReplayLoader(buffer, 3) as loader:
        for _ in range(3):
            epoch = [place for batch in loader for place in batch.positions]
            assert len(epoch) == len(mr.ReplayDataset(path))
    assert len(made) > 20


def failing(path, at, error):
    """A buffer whose at-th batch fails to be made, and the batches of one that is well.

    They are not always made in their order.
    """
    with opened(path) as alone:
        expected = [alone.sample(8) for _ in range(at + 1)]
    bad = expected[at - 1]["observation/number"]

    def fail(fields):
        if np.array_equal(fields["observation/number"], bad):
            raise error
        return fields

    return opened(path, transforms=[mr.Apply(fail)]), expected


@pytest.mark.parametrize("at", range(30, 36))
def test_an_error_is_raised_where_its_batch_would_be(path, at):
    cause = OSError("the disk")
    error = KeyError("x")
    error.__cause__ = cause
    buffer, expected = failing(path, at, error)
    with buffer, mr.ReplayLoader(buffer, 8) as loader:
        for batch in expected[:-2]:
            np.testing.assert_array_equal(next(loader).positions, batch.positions)
        with pytest.raises(KeyError) as caught:
            next(loader)
        assert caught.value is error
        assert error.__cause__ is cause
        batch = next(loader)
        np.testing.assert_array_equal(batch.positions, expected[-1].positions)


def test_a_transform_does_not_end_the_iteration_in_silence(path):
    buffer, _ = failing(path, 30, StopIteration("x"))
    with buffer, mr.ReplayLoader(buffer, 8) as loader:
        for _ in range(29):
            next(loader)
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            next(loader)


def test_batches_go_on_where_ctrl_c_struck(path):
    with opened(path) as alone:
        expected = [alone.sample(8).positions.tolist() for _ in range(20_000)]
    places = {str(draw): number for number, draw in enumerate(expected)}
    found, buffer = [], opened(path)
    with buffer, mr.ReplayLoader(buffer, 8) as loader, CtrlC(40) as ctrl_c:
        while ctrl_c.comes():
            with suppress(KeyboardInterrupt):
                batch = ctrl_c.during(loader.__next__)
                found.append(places.get(str(batch.positions.tolist())))
    numbers = [number for number in found if number is not None]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] + 1 - len(numbers) <= ctrl_c.strikes


def test_a_writer_beside_it_is_followed(tmp_path, made):
    with fill(tmp_path / "b", count=100, close=False) as buffer:
        buffer.sampler = mr.UniformSampler(seed=0)
        with mr.ReplayLoader(buffer, 16) as loader:
            for first in range(100, 400, 10):
                buffer.extend(steps(first, 10))
                batch = [next(loader) for _ in range(4)][-1]
                # All but what was drawn before the last step was added.
                assert batch.positions.min() >= first + 10 - 100
                number = batch["observation/number"].numpy()
                place = batch.positions.numpy() * 2 + batch.env_ids.numpy()
                np.testing.assert_array_equal(number, place)
            assert batch.positions.max() > 300
    assert len(made) > 20
