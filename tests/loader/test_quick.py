"""A learner that is back at once makes small batches itself: the same ones."""

import threading
from contextlib import suppress

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.loader import prefetch
from tests.ctrl_c import CtrlC
from tests.loader.support import fill, steps
from tests.loader.test_loader import SAMPLERS, TRANSFORMS, Counting, endless, opened, same
from tests.loader.test_loader_ends import failing
from tests.slices import count


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("quick") / "b"
    fill(path)
    return path


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Whoever comes back is quick; how many batches were made so."""
    counted, make = [], prefetch.Prefetcher._sample

    def counting(self):
        found = make(self)
        if found is not None:
            counted.append(threading.current_thread().name)
        return found

    monkeypatch.setattr(prefetch, "QUICK_S", 60.0)
    monkeypatch.setattr(prefetch.Prefetcher, "_sample", counting)
    return counted


@pytest.mark.parametrize("kind", SAMPLERS)
def test_batches_are_those_of_sample_in_their_order(path, kind, made):
    alone, buffer = (opened(path, SAMPLERS[kind]()) for _ in range(2))
    with alone, buffer, mr.ReplayLoader(buffer, 16, num_threads=2) as loader:
        batches = endless(loader)
        for _ in range(60):
            same(next(batches), alone.sample(16))
    assert len(made) > 20
    assert set(made) == {threading.main_thread().name}


def test_several_buffers_are_drawn_from_so_too(path, made):
    def both():
        buffers = [opened(path, mr.ShuffledSampler(seed=k)) for k in range(2)]
        return mr.concat(buffers, seed=3)

    alone = both()
    with mr.ReplayLoader(both(), 16) as loader:
        for _ in range(40):
            same(next(loader), alone.sample(16))
    assert len(made) > 20


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_a_state_saved_between_batches_continues_there(path, kind, made):
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
    assert len(made) > 20


def test_epochs_end_where_they_do(path, made):
    buffer = opened(path, mr.ShuffledSampler(seed=0))
    with buffer, mr.ReplayLoader(buffer, 3) as loader:
        for _ in range(3):
            epoch = [place for batch in loader for place in batch.positions]
            assert len(epoch) == len(mr.ReplayDataset(path))
    assert len(made) > 50


@pytest.mark.parametrize("at", range(30, 36))
def test_an_error_is_raised_where_its_batch_would_be(path, at):
    cause = OSError("the disk")
    error = KeyError("x")
    error.__cause__ = cause
    buffer, alone = failing(path, at, error), opened(path, mr.UniformSampler(seed=0))
    with buffer, alone, mr.ReplayLoader(buffer, 8) as loader:
        for _ in range(at - 1):
            assert (next(loader).positions.numpy() == alone.sample(8).positions).all()
        with pytest.raises(KeyError) as caught:
            next(loader)
        assert caught.value is error
        assert error.__cause__ is cause
        alone.sample(8)
        assert (next(loader).positions.numpy() == alone.sample(8).positions).all()


def test_a_transform_does_not_end_the_iteration_in_silence(path):
    buffer = failing(path, 30, StopIteration("x"))
    with buffer, mr.ReplayLoader(buffer, 8) as loader:
        for _ in range(29):
            next(loader)
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            next(loader)


def test_batches_go_on_where_ctrl_c_struck(path):
    with opened(path) as alone:
        expected = [alone.sample(8).positions.tolist() for _ in range(count(20_000, 6000))]
    places = {str(draw): number for number, draw in enumerate(expected)}
    found, buffer = [], opened(path)
    with buffer, mr.ReplayLoader(buffer, 8) as loader, CtrlC(count(40, 12)) as ctrl_c:
        while ctrl_c.comes():
            with suppress(KeyboardInterrupt):
                batch = ctrl_c.during(loader.__next__)
                found.append(places.get(str(batch.positions.tolist())))
    numbers = [number for number in found if number is not None]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] + 1 - len(numbers) <= ctrl_c.strikes


def test_new_rows_of_a_writer_are_drawn(tmp_path, made):
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
    assert len(made) > 50


def test_one_that_comes_later_makes_the_first_itself_and_has_threads_go_on(path, made, monkeypatch):
    sampler = Counting(enough=31)
    with (
        opened(path, sampler) as buffer,
        opened(path, mr.UniformSampler(seed=0)) as alone,
        mr.ReplayLoader(buffer, 16, prefetch=5) as loader,
    ):
        for _ in range(25):
            same(next(loader), alone.sample(16))
        assert sampler.draws == 25
        monkeypatch.setattr(prefetch, "QUICK_S", 0.0)
        so_far = len(made)
        same(next(loader), alone.sample(16))
        assert len(made) == so_far + 1
        # Five more, by threads.
        assert sampler.there.wait(20)
        same(next(loader), alone.sample(16))
        assert len(made) == so_far + 1
