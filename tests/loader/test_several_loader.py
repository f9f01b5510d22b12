"""ReplayLoader over several buffers: what `concat` draws, ahead of the learner."""

import threading

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, SchemaError
from tests.loader.live_writer import CAPACITY, FIELDS, broken
from tests.loader.support import fill, steps
from tests.loader.test_live import begun, ended
from tests.loader.test_loader import SAMPLERS, TRANSFORMS, same

SHARES = {"exact": [3, 1], "random": None}


def opened(paths, kind="uniform", shares=(3, 1), transforms=()):
    buffers = [
        mr.ReplayBuffer.open(path, sampler=SAMPLERS[kind](), transforms=transforms)
        for path in paths
    ]
    return mr.concat(buffers, shares, seed=5)


def same_of_several(batch, expected):
    same(batch, expected)
    np.testing.assert_array_equal(batch.buffer_ids, expected.buffer_ids)


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("kind", sorted(SAMPLERS.keys() - {"ragged"}))
def test_batches_are_those_of_concat_in_their_order(paths, kind, shares):
    alone = opened(paths, kind, SHARES[shares])
    both = opened(paths, kind, SHARES[shares])
    with mr.ReplayLoader(both, 16, prefetch=3, num_threads=2) as loader:
        for _ in range(12):
            same_of_several(next(loader), alone.sample(16))


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_transforms_of_each_buffer_are_made(paths, kind):
    alone, both = (opened(paths, transforms=TRANSFORMS[kind]) for _ in range(2))
    with mr.ReplayLoader(both, 16) as loader:
        for _ in range(5):
            same_of_several(next(loader), alone.sample(16))


@pytest.mark.parametrize("shares", SHARES)
def test_a_run_that_is_stopped_after_any_batch_goes_on_there(paths, shares):
    alone = opened(paths, "shuffled", SHARES[shares])
    expected = [alone.sample(16) for _ in range(8)]
    both = opened(paths, "shuffled", SHARES[shares])
    with mr.ReplayLoader(both, 16, prefetch=4) as loader:
        for one in expected[:3]:
            same_of_several(next(loader), one)
        state = loader.state_dict()
        next(loader)
        loader.load_state_dict(state)
        for one in expected[3:5]:
            same_of_several(next(loader), one)
        state = loader.state_dict()
    # A closed loader leaves what draws where the learner is.
    same_of_several(both.sample(16).torch(), expected[5])
    fresh = opened(paths, "shuffled", SHARES[shares])
    with mr.ReplayLoader(fresh, 16) as loader:
        loader.load_state_dict(state)
        for one in expected[5:]:
            same_of_several(next(loader), one)


def test_priorities_flow_back_to_the_buffer_of_each_step(paths):
    both = opened(paths, "prioritized")
    with mr.ReplayLoader(both, 64, prefetch=2) as loader:
        for _ in range(40):
            batch = next(loader)
            # All but one place of each buffer, so that they are drawn ever less.
            values = np.where(batch.positions % 50 == 7, 1.0, 1e-6)
            assert loader.update_priorities(batch, values) == 0
        for _ in range(loader.prefetch):
            next(loader)
        batch = next(loader)
        assert batch.buffer_ids.tolist() == [0] * 48 + [1] * 16
        assert (batch.positions % 50 == 7).float().mean() > 0.9
        state = loader.state_dict(priorities=True)
    again = opened(paths, "prioritized")
    with mr.ReplayLoader(again, 64) as other, mr.ReplayLoader(both, 64) as loader:
        other.load_state_dict(state)
        same_of_several(next(other), next(loader))


def test_a_writer_that_is_there_from_the_beginning_is_waited_for(tmp_path):
    one = fill(tmp_path / "a", close=False)
    two = mr.ReplayBuffer.create(tmp_path / "b", one.schema, 100, 2, autoreset="disabled")
    with one, two, mr.ReplayLoader(mr.concat([one, two], [1, 1], seed=0), 8) as loader:
        with pytest.raises(EmptyError, match="cannot draw") as told:
            next(loader)
        assert "buffer 1 of concat" in told.value.__notes__[0]
        two.extend(steps(0, 20))
        assert next(loader).buffer_ids.tolist() == [0] * 4 + [1] * 4


@pytest.mark.slow
def test_actors_in_other_processes_are_followed(tmp_path):
    paths = [tmp_path / name for name in "ab"]
    children = [begun(path, FIELDS, 8, 0) for path in paths]
    samplers = [mr.PrioritizedSampler(seed=0), mr.UniformSampler(seed=0)]
    buffers = [
        mr.ReplayBuffer.open(path, sampler=sampler)
        for path, sampler in zip(paths, samplers, strict=True)
    ]
    newest = np.zeros(2, np.int64)
    both = mr.concat(buffers, [1, 1], seed=0)
    with mr.ReplayLoader(both, 128, prefetch=3, num_threads=2) as loader:
        for batch in loader:
            assert broken(batch) == 0
            loader.update_priorities(batch, np.ones(len(batch)))
            np.maximum.at(newest, batch.buffer_ids.numpy(), batch.positions.numpy())
            over = all(child.poll() is not None for child in children)
            if over and (newest > 4 * CAPACITY).all():
                break
    for child, buffer in zip(children, buffers, strict=True):
        assert ended(child) >= 8 * CAPACITY
        buffer.close()


def test_a_buffer_that_is_resized_meanwhile_is_followed(tmp_path):
    one, two = fill(tmp_path / "a", close=False), fill(tmp_path / "b", close=False)
    reader = mr.ReplayBuffer.open(tmp_path / "b", sampler=mr.UniformSampler(seed=0))
    with one, two, reader:
        both = mr.concat([one, reader], [1, 1], seed=0)
        with mr.ReplayLoader(both, 16, prefetch=3, num_threads=2) as loader:
            next(loader)
            two.resize(150)
            two.extend(steps(200, 50))
            one.resize(80)
            found = [next(loader) for _ in range(30)]
        late = np.concatenate([b.positions.numpy() for b in found[10:]])
        assert late.max() >= 200


@pytest.mark.slow
def test_memory_of_batches_of_varying_shares_is_bounded(paths):
    both = opened(paths, shares=None)
    with mr.ReplayLoader(both, 48, prefetch=2) as loader:
        batch, sizes = next(loader), set()
        for number in range(80):
            kept = {path: batch[path].clone() for path in batch}
            following = next(loader)
            assert all((batch[path] == kept[path]).all() for path in batch)
            batch = following
            sizes.add(int((batch.buffer_ids == 0).sum()))
            if number == 40:
                after_some = loader._sender.pool.nbytes
        assert len(sizes) > 8
        assert loader._sender.pool.nbytes <= 1.5 * after_some


def test_each_buffers_limiter_counts_its_steps(tmp_path):
    buffers = [
        fill(tmp_path / name, close=False, limiter=mr.RateLimiter(4.0, 1, 1e6)) for name in "ab"
    ]
    told = [[], []]
    for number, buffer in enumerate(buffers):
        count = buffer.limit.count

        def counted(size, number=number, count=count):
            told[number].append(size)
            count(size)

        buffer.limit.count = counted
    with mr.ReplayLoader(mr.concat(buffers, [3, 1], seed=0), 16) as loader:
        for _ in range(3):
            next(loader)
    assert told == [[12] * 3, [4] * 3]
    for buffer in buffers:
        buffer.close()


def test_there_are_no_epochs_and_threads_end(paths):
    both = opened(paths, "shuffled")
    with mr.ReplayLoader(both, 16) as loader:
        with pytest.raises(TypeError, match="Concat draws without an end"):
            len(loader)
        next(loader)
    assert not [t for t in threading.enumerate() if t.name == "mmreplay-load"]
    with pytest.raises(SchemaError, match=r"buffer must be an open.*got list"):
        mr.ReplayLoader([1, 2], 4)
