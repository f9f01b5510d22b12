"""ReplayLoader hands over what the buffer's sample gives, in its order, and resumes."""

import gc
import json
import threading
from collections import Counter
from contextlib import contextmanager
from itertools import islice
from time import sleep

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.errors import FormatError, SchemaError
from tests.contracts.sampler import steps_of
from tests.loader.support import fill, legal, same_as_take, steps

SAMPLERS = {
    "uniform": lambda: mr.UniformSampler(seed=3),
    "shuffled": lambda: mr.ShuffledSampler(seed=3),
    "prioritized": lambda: mr.PrioritizedSampler(seed=3, name=None),
    "sequences": lambda: mr.SequenceSampler(4, mr.UniformSampler(seed=3)),
    "padded": lambda: mr.SequenceSampler(
        6, mr.PrioritizedSampler(seed=3, name=None), boundary="pad"
    ),
    "ragged": lambda: mr.EpisodeSampler(mr.UniformSampler(seed=3), layout="ragged"),
    "mixture": lambda: mr.MixtureSampler(
        [(mr.UniformSampler(seed=1), 3), (mr.RecentSampler(20, 0.5, seed=2), 1)], seed=3
    ),
}
TRANSFORMS = {
    "steps": [],
    "folds": [mr.FrameStack(3, paths="observation/pixels")],
    "random": [mr.Apply(lambda f, rng: f | {"noise": rng.random(len(f["action"]))}, True)],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("loader") / "b"
    fill(path)
    return path


def opened(path, sampler=None, transforms=()):
    sampler = sampler or mr.UniformSampler(seed=3)
    return mr.ReplayBuffer.open(path, sampler=sampler, transforms=transforms)


@contextmanager
def loading(path, batch_size, sampler=None, transforms=(), **options):
    """A loader over a buffer that is closed after it."""
    buffer = opened(path, sampler, transforms)
    with buffer, mr.ReplayLoader(buffer, batch_size, **options) as loader:
        yield buffer, loader


def endless(loader):
    """Epoch after epoch."""
    while True:
        yield from loader


def same(batch, expected):
    """Two batches hold the same draw and the same data."""
    expected = expected.torch()
    assert list(batch) == list(expected)
    for name in ("env_ids", "positions", "probabilities", "weights", "mask", "offsets"):
        one, other = getattr(batch, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert torch.equal(one, other), name
    for field in expected:
        assert batch[field].dtype == expected[field].dtype
        assert torch.equal(batch[field], expected[field]), field
    assert batch.key == expected.key


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(("prefetch", "num_threads"), [(1, 1), (2, 1), (8, 3)])
def test_batches_are_those_of_sample_in_their_order(path, kind, prefetch, num_threads):
    with opened(path, SAMPLERS[kind]()) as alone:
        expected = [alone.sample(16) for _ in range(9)]
    with opened(path, SAMPLERS[kind]()) as buffer:
        options = {"prefetch": prefetch, "num_threads": num_threads}
        with mr.ReplayLoader(buffer, 16, **options) as loader:
            found = iter(loader)
            for one in expected:
                same(next(found), one)


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_transforms_make_what_they_make_of_a_sample(path, kind):
    with opened(path, transforms=TRANSFORMS[kind]) as alone:
        expected = [alone.sample(16) for _ in range(6)]
    with loading(path, 16, transforms=TRANSFORMS[kind], prefetch=3, num_threads=2) as (_, loader):
        for one, batch in zip(expected, loader, strict=False):
            same(batch, one)


class Counting(mr.UniformSampler):
    """Counts its draws, and says when there are so many."""

    def __init__(self, enough):
        super().__init__(seed=0)
        self.draws, self.enough, self.there = 0, enough, threading.Event()

    def draw(self, view, batch_size):
        self.draws += 1
        if self.draws >= self.enough:
            self.there.set()
        return super().draw(view, batch_size)


@pytest.mark.parametrize("prefetch", [0, 4097, 10**9])
def test_how_many_batches_are_drawn_ahead_is_bounded(path, prefetch):
    told = rf"prefetch must be an integer in \[1, 4096\], got {prefetch}"
    with mr.ReplayBuffer.open(path) as buffer, pytest.raises(SchemaError, match=told):
        mr.ReplayLoader(buffer, 8, device="cpu", prefetch=prefetch)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_draws_are_made_so_far_ahead_and_no_further(path, prefetch):
    sampler = Counting(enough=3 + prefetch)
    with loading(path, 8, sampler, prefetch=prefetch, num_threads=2) as (_, loader):
        found = iter(loader)
        for taken in range(1, 4):
            next(found)
            assert sampler.draws <= taken + prefetch
        # A learner that takes its time finds them all drawn.
        loader._work._timing.quick = False
        loader._work._wake_thread()
        assert sampler.there.wait(20)
        assert sampler.draws == 3 + prefetch


def test_a_batch_that_is_held_does_not_change(path):
    with loading(path, 16, prefetch=2) as (_, loader):
        kept, parts, copies = [], [], []
        for batch, _ in zip(loader, range(60), strict=False):
            copies.append({name: batch[name].clone() for name in batch})
            if len(copies) % 2:
                kept.append(batch)
            else:
                # A part of one field holds the memory of the batch.
                kept.append(None)
                parts.append((len(copies) - 1, batch["observation/pixels"][3:5]))
        for batch, copy in zip(kept, copies, strict=True):
            for name in batch or ():
                assert torch.equal(batch[name], copy[name])
        for place, part in parts:
            assert torch.equal(part, copies[place]["observation/pixels"][3:5])


def test_memory_of_batches_that_nobody_holds_is_used_again(path):
    with loading(path, 64, prefetch=2) as (_, loader):
        pool = loader._sender.pool
        made = Counter()
        make = pool._make

        def counted(shape, dtype):
            made[shape] += 1
            return make(shape, dtype)

        pool._make = counted
        for place, _ in enumerate(zip(loader, range(200), strict=False)):
            # A learner that hurries makes batches itself, one that does not has them.
            if place % 8 == 0:
                sleep(0.002)
        # Two drawn ahead, one being filled, the learner's, new and old, and one that
        # both threads looked for at once; each with the pixels before and after.
        assert 2 <= made[64, 64, 65] <= 6 * 2
        assert pool.nbytes < 6 * 2 * 64 * 64 * 65 + (1 << 20)
    assert loader._sender.pool.nbytes == 0


def test_an_update_counts_for_every_draw_made_after_it(path):
    sampler = mr.PrioritizedSampler(alpha=1.0, eps=0.0, seed=0, name=None)
    with loading(path, 32, sampler, prefetch=3) as (buffer, loader):
        found = iter(loader)
        next(found)
        all_of_them = legal(buffer)
        env_ids, positions = np.array(all_of_them).T
        every = buffer.take(env_ids, positions)
        values = np.zeros(len(every))
        values[7] = 1.0
        assert loader.update_priorities(every, values) == 0
        batches = [next(found) for _ in range(8)]
        # At most those that were drawn already do not know of it.
        for batch in batches[3:]:
            assert set(steps_of(batch)) == {all_of_them[7]}
        assert loader.update_priorities(batches[-1], torch.ones(32)) == 0


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.sliced(3)
def test_a_run_that_is_stopped_after_any_batch_goes_on_there(path, kind):
    with opened(path, SAMPLERS[kind]()) as alone:
        expected = [alone.sample(40) for _ in range(6)]
    for stopped in range(5):
        with loading(path, 40, SAMPLERS[kind](), prefetch=3) as (_, loader):
            found = iter(loader)
            for _ in range(stopped):
                next(found)
            state = loader.state_dict()
        if kind != "shuffled":  # whose state holds arrays
            state = json.loads(json.dumps(state))
        with loading(path, 40, SAMPLERS[kind](), prefetch=2) as (_, loader):
            next(iter(loader))
            loader.load_state_dict(state)
            for one, batch in zip(expected[stopped:], endless(loader), strict=False):
                same(batch, one)


@pytest.mark.parametrize("other", [{}, mr.UniformSampler(seed=0).state_dict()])
def test_a_state_that_is_none_of_a_loader_is_refused_by_name(path, other):
    with (
        loading(path, 40, mr.UniformSampler(seed=0)) as (_, loader),
        pytest.raises(FormatError, match="loader state: kind must be 'ReplayLoader', got"),
    ):
        loader.load_state_dict(other)


def test_priorities_go_with_the_state_if_asked_for(path):
    sampler = mr.PrioritizedSampler(seed=0, name=None)
    inner = mr.SequenceSampler(3, mr.PrioritizedSampler(seed=0, name=None))
    for each in (sampler, inner):
        with loading(path, 32, each, prefetch=1) as (buffer, loader):
            for _ in range(4):
                batch = next(loader)
                loader.update_priorities(batch, np.arange(32) + 1.0)
            # What was drawn by older priorities is out of the way.
            next(loader)
            loader.load_state_dict(loader.state_dict(priorities=True))
            state = loader.state_dict(priorities=True)
            expected = [next(loader) for _ in range(3)]
            loader.update_priorities(batch, np.ones(32))
            # Its thread would draw one more ahead, from the sampler of both.
            loader.close()
            with mr.ReplayLoader(buffer, 32) as other:
                other.load_state_dict(state)
                for one in expected:
                    same(next(other), one)


@pytest.mark.parametrize("state", [{}, {"kind": "ReplayLoader", "sampler": 3}, None])
def test_what_is_no_loaders_state_is_refused(path, state):
    refused = pytest.raises(FormatError, match=r"loader state(: kind must be| has no)")
    with loading(path, 4) as (_, loader), refused:
        loader.load_state_dict(state)


def test_a_state_that_does_not_fit_leaves_the_loader_where_it_is(path):
    with opened(path) as alone:
        expected = [alone.sample(8) for _ in range(3)]
    with loading(path, 8, prefetch=4) as (_, loader):
        same(next(iter(loader)), expected[0])
        state = {"kind": "ReplayLoader", "sampler": {"kind": "ShuffledSampler"}}
        with pytest.raises(FormatError, match=r"sampler state:.*got 'ShuffledSampler'"):
            loader.load_state_dict(state)
        for one in expected[1:]:
            same(next(iter(loader)), one)


def test_a_closed_loader_leaves_the_sampler_where_the_learner_is(path):
    with loading(path, 8, prefetch=6) as (buffer, loader):
        for _ in zip(range(3), loader, strict=False):
            pass
        loader.close()
        assert buffer.sampler.state_dict()["step"] == 3


@pytest.mark.parametrize(("prefetch", "num_threads"), [(1, 1), (4, 2)])
def test_each_iteration_is_an_epoch(path, prefetch, num_threads):
    with opened(path, mr.ShuffledSampler(seed=0)) as buffer:
        options = {"prefetch": prefetch, "num_threads": num_threads}
        with mr.ReplayLoader(buffer, 32, **options) as loader:
            expected = legal(buffer)
            for _ in range(3):
                assert len(loader) == -(-len(expected) // 32)
                found = [place for batch in loader for place in steps_of(batch)]
                assert sorted(found) == expected
                with pytest.raises(StopIteration):
                    next(loader)


@pytest.mark.parametrize(("prefetch", "num_threads"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("wait_s", [0, 0.003])
def test_an_epoch_whose_batches_were_counted_is_over(path, prefetch, num_threads, wait_s):
    """A learner that knows their number asks for no batch beyond the last one.

    Threads find the end of an epoch before the learner begins the next one, or not:
    many epochs have both.
    """
    with opened(path, mr.ShuffledSampler(seed=0)) as buffer:
        options = {"prefetch": prefetch, "num_threads": num_threads}
        with mr.ReplayLoader(buffer, 32, **options) as loader:
            expected = legal(buffer)
            for _ in range(30):
                found = []
                for batch in islice(loader, len(loader)):
                    sleep(wait_s)
                    found += steps_of(batch)
                assert sorted(found) == expected


@pytest.mark.parametrize(("prefetch", "num_threads"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("wait_s", [0, 0.01])
@pytest.mark.parametrize("asked_for_the_end", [False, True])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_state_of_an_epochs_end_goes_on_with_the_next_epoch(
    path, prefetch, num_threads, wait_s, asked_for_the_end, windows, drop_last
):
    """As Lightning needs it, which counts batches and never asks for the end."""

    def sampler(seed=0):
        inner = mr.ShuffledSampler(seed=seed, drop_last=drop_last)
        return mr.SequenceSampler(3, inner) if windows else inner

    options = {"prefetch": prefetch, "num_threads": num_threads}
    with opened(path, sampler()) as buffer, mr.ReplayLoader(buffer, 32) as loader:
        epochs = [[steps_of(batch) for batch in loader] for _ in range(2)]
    with loading(path, 32, sampler(), **options) as (_, loader):
        count = len(loader) + asked_for_the_end
        assert [steps_of(batch) for batch in islice(loader, count)] == epochs[0]
        sleep(wait_s)
        state = json.loads(json.dumps(loader.state_dict()))
    with loading(path, 32, sampler(9), **options) as (_, loader):
        loader.load_state_dict(state)
        assert [steps_of(batch) for batch in loader] == epochs[1]


@pytest.mark.parametrize("at_end", [1, "yes", None])
def test_a_state_that_does_not_say_whether_its_epoch_has_ended_is_refused(path, at_end):
    with loading(path, 32, mr.ShuffledSampler(seed=0)) as (_, loader):
        state = {**loader.state_dict(), "at_end": at_end}
        with pytest.raises(mr.FormatError, match="at_end must be True or False, got"):
            loader.load_state_dict(state)


def test_an_epoch_that_was_left_goes_on(path):
    with loading(path, 32, mr.ShuffledSampler(seed=0), prefetch=3) as (buffer, loader):
        found = []
        for batch in loader:
            found += steps_of(batch)
            break
        for batch in loader:
            found += steps_of(batch)
        assert sorted(found) == legal(buffer)


def test_without_epochs_there_is_no_length(path):
    refused = pytest.raises(TypeError, match="UniformSampler draws without an end")
    with loading(path, 4) as (_, loader), refused:
        len(loader)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("batch_size", "of at least 1"),
        ("prefetch", r"in \[1, 4096\]"),
        ("num_threads", "of at least 1"),
    ],
)
@pytest.mark.parametrize("number", [0, -1, 1.5, True, "a"])
def test_numbers_are_integers_of_at_least_one(path, name, bounds, number):
    options = {"batch_size": 4} | {name: number}
    told = f"{name} must be an integer {bounds}, got {number!r}"
    with opened(path) as buffer, pytest.raises(SchemaError, match=told):
        mr.ReplayLoader(buffer, **options)


def test_a_path_is_no_open_buffer(path):
    with pytest.raises(SchemaError, match=r"buffer must be an open.*got PosixPath"):
        mr.ReplayLoader(path, 4)


@pytest.mark.parametrize("kind", ["uniform", "shuffled", "sequences"])
@pytest.mark.slow
def test_a_writer_may_overwrite_what_was_drawn(tmp_path, kind):
    fill(tmp_path / "b", capacity=100)
    buffer = mr.ReplayBuffer.open(tmp_path / "b", "r+", sampler=SAMPLERS[kind]())
    with buffer, mr.ReplayLoader(buffer, 32, prefetch=4, num_threads=2) as loader:
        for first, batch in zip(range(200, 600, 9), endless(loader), strict=False):
            numbers = batch["observation/number"]
            expected = 2 * batch.positions + batch.env_ids
            if numbers.ndim == 2:
                expected, numbers = expected[:, None], numbers[:, :1]
            # Whole rows of one moment, whichever they are.
            assert (numbers == expected).all()
            pixels = batch["observation/pixels"].flatten(-2)
            assert (pixels == pixels[..., :1]).all()
            buffer.extend(steps(first, 9))


def test_a_resized_buffer_is_followed(tmp_path):
    fill(tmp_path / "b", capacity=100)
    writer = mr.ReplayBuffer.open(tmp_path / "b", "r+")
    with opened(tmp_path / "b") as buffer, mr.ReplayLoader(buffer, 16) as loader:
        found = iter(loader)
        next(found)
        writer.resize(40)
        for _ in range(6):
            batch = next(found)
            assert (batch["observation/number"] >= 0).all()
        same_as_take(buffer, batch)
        assert buffer.capacity == 40
        assert int(batch.positions.min()) >= 160
    writer.close()


def test_a_loader_over_a_buffer_in_ram(path):
    buffer = fill(None, engine="memory", close=False)
    with mr.ReplayLoader(buffer, 16) as loader:
        for batch, _ in zip(loader, range(5), strict=False):
            same_as_take(buffer, batch)
    del loader
    gc.collect()
