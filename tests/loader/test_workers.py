"""torch's DataLoader over a buffer: three ways, no worker or two, fork and spawn."""

import itertools
import multiprocessing
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import mmreplay as mr
from tests.loader.support import fill, legal, same_as_take, steps

SPAWN = pytest.param(2, "spawn", marks=pytest.mark.slow, id="2-spawn")
WORKERS = [pytest.param(0, None, id="0"), pytest.param(2, "fork", id="2-fork"), SPAWN]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("workers") / "b"
    fill(path)
    return path


def options(workers, context):
    if not workers:
        return {"num_workers": 0}
    return {
        "num_workers": workers,
        "multiprocessing_context": multiprocessing.get_context(context),
        "timeout": 60,
    }


def draws_of(path, **more):
    dataset = mr.ReplayDataset(path)
    return dataset, dataset.draws(mr.UniformSampler(seed=7), 32, **more)


@pytest.mark.parametrize(("workers", "context"), WORKERS)
@pytest.mark.parametrize("way", ["sampler", "batch_sampler"])
def test_draws_pass_through_a_loader(path, way, workers, context):
    dataset, draws = draws_of(path, num_batches=6)
    if way == "sampler":
        more = {"sampler": draws, "batch_size": None}
    else:
        more = {"batch_sampler": draws, "collate_fn": mr.collate}
    loader = DataLoader(dataset, **more, **options(workers, context))
    assert len(loader) == 6
    found = list(loader)
    assert len(found) == 6
    _, again = draws_of(path, num_batches=6)
    # The draws, in their order, whatever the number of workers.
    for batch, draw in zip(found, again, strict=True):
        assert isinstance(batch, mr.Batch)
        np.testing.assert_array_equal(batch.positions, draw.positions)
        np.testing.assert_array_equal(batch.env_ids, draw.env_ids)
        np.testing.assert_array_equal(batch.probabilities, draw.probabilities)
        same_as_take(dataset.buffer, batch)


@pytest.mark.parametrize(("workers", "context"), WORKERS)
def test_endless_draws_may_stop_at_any_batch(path, workers, context):
    dataset, draws = draws_of(path)
    loader = DataLoader(dataset, sampler=draws, batch_size=None, **options(workers, context))
    for batch in itertools.islice(loader, 5):
        same_as_take(dataset.buffer, batch)


@pytest.mark.parametrize("collate", [None, mr.collate])
@pytest.mark.parametrize(("workers", "context"), WORKERS)
def test_shuffling_gives_every_legal_start_once(path, workers, context, collate):
    dataset = mr.ReplayDataset(path)
    loader = DataLoader(
        dataset,
        batch_size=32,
        shuffle=True,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(0),
        **options(workers, context),
    )
    seen, expected = Counter(), legal(dataset.buffer)
    for batch in loader:
        numbers = batch["observation"]["number"]
        seen.update(numbers.tolist())
        expect = dataset.buffer.take(numbers.numpy() % 2, numbers.numpy() // 2).torch()
        for part in ("observation", "next_observation"):
            for name, tensor in batch[part].items():
                assert (tensor == expect[f"{part}/{name}"]).all()
        for name in ("action", "brain", "terminated", "truncated"):
            assert batch[name].dtype == expect[name].dtype
            assert (batch[name] == expect[name]).all()
    assert seen == Counter(2 * position + env_id for env_id, position in expected)


@pytest.mark.parametrize("autoreset", ["disabled", "next_step"])
def test_next_observations_are_right_at_every_boundary(tmp_path, autoreset):
    fill(tmp_path / "b", autoreset=autoreset, count=333)
    dataset = mr.ReplayDataset(tmp_path / "b")
    loader = DataLoader(dataset, batch_size=16, shuffle=True, **options(2, "fork"))
    for batch in loader:
        number = batch["observation"]["number"]
        # Only a terminated step without a final row stands in for its own next.
        own = batch["terminated"] & (autoreset == "disabled")
        expected = torch.where(own, number, number + 2)
        assert (batch["next_observation"]["number"] == expected).all()
        assert (batch["next_observation"]["pixels"][:, 5, 5] == expected % 251).all()


@pytest.mark.parametrize(("workers", "context"), [pytest.param(2, "fork", id="2-fork"), SPAWN])
@pytest.mark.slow
def test_persistent_workers_see_a_growing_buffer(tmp_path, workers, context):
    buffer = fill(tmp_path / "b", count=20, capacity=1000, close=False)
    dataset = mr.ReplayDataset(buffer)
    loader = DataLoader(
        dataset,
        sampler=dataset.draws(mr.UniformSampler(0), 64, num_batches=4),
        batch_size=None,
        persistent_workers=True,
        **options(workers, context),
    )
    newest = []
    for epoch in range(4):
        for batch in loader:
            same_as_take(buffer, batch)
            newest.append(int(batch.positions.max()))
        assert newest[-1] >= 20 + 100 * epoch - 40
        buffer.extend(steps(20 + 100 * epoch, 100))
    assert max(newest) > 250
    # Plain shuffling follows too: each epoch has the legal starts of its moment.
    plain = DataLoader(
        dataset, batch_size=64, shuffle=True, persistent_workers=True, **options(workers, context)
    )
    for epoch in range(2):
        numbers = [n for b in plain for n in b["observation"]["number"].tolist()]
        assert sorted(numbers) == sorted(2 * p + e for e, p in legal(buffer))
        buffer.extend(steps(420 + 50 * epoch, 50))
    buffer.close()


@pytest.mark.slow
def test_workers_follow_a_writer_that_overwrites_what_was_drawn(tmp_path):
    buffer = fill(tmp_path / "b", capacity=100, close=False)
    dataset = mr.ReplayDataset(buffer)
    loader = DataLoader(
        dataset,
        sampler=dataset.draws(mr.UniformSampler(0), 64, num_batches=40),
        batch_size=None,
        **options(2, "fork"),
    )
    first = 200
    for batch in loader:
        # Whole rows of one moment: every field tells the same number.
        number = batch["observation/number"]
        assert (number == 2 * batch.positions + batch.env_ids).all()
        assert (batch["observation/pixels"] == (number % 251)[:, None, None]).all()
        assert (batch["action"][:, 1] == -number).all()
        buffer.extend(steps(first, 5))
        first += 5
    buffer.close()


@pytest.mark.parametrize(
    ("context", "error"),
    [("fork", r"RAM of another process\. Use"), ("spawn", "RAM of another process")],
)
@pytest.mark.usefixtures("_short_waits")
@pytest.mark.sliced(1)
def test_workers_refuse_a_buffer_in_ram(context, error):
    dataset = mr.ReplayDataset(fill(None, engine="memory", close=False))
    loader = DataLoader(dataset, batch_size=8, **options(2, context))
    with pytest.raises(ValueError, match=error):
        next(iter(loader))


@pytest.mark.usefixtures("_short_waits")
def test_an_error_in_a_worker_reaches_the_learner(path):
    dataset = mr.ReplayDataset(path)
    loader = DataLoader(dataset, sampler=[10**6], batch_size=None, **options(1, "fork"))
    with pytest.raises(IndexError, match=r"rank 1000000 must be in \[0, 185\)"):
        next(iter(loader))
