"""Batches of a ring by rank, as Ray Train's workers draw them."""

import json
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from torch.utils.data import DataLoader  # noqa: E402

import mmreplay as mr  # noqa: E402
from mmreplay.ray.train import ranked_stream, train_loader  # noqa: E402

STEPS = 1003
SCHEMA = mr.Schema(
    {
        "observation": mr.Field((3,), "float32"),
        "action": mr.Field((), "int64"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    }
)


@pytest.fixture
def ring(tmp_path):
    rng = np.random.default_rng(0)
    with mr.ReplayBuffer.create(tmp_path / "ring", SCHEMA, 2000) as buffer:
        buffer.extend(
            observation=rng.random((STEPS, 3), np.float32),
            action=np.arange(STEPS),
            reward=rng.random(STEPS).astype(np.float32),
            terminated=np.arange(STEPS) % 50 == 49,
        )
    return tmp_path / "ring"


def drawn(stream, skip=0):
    batches = list(DataLoader(stream, batch_size=None))
    return [np.asarray(batch["action"]) for batch in batches[skip:]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_draw_equally_many_batches_of_other_steps(ring, num_ranks):
    by_rank = [
        drawn(ranked_stream(ring, mr.ShuffledSampler(seed=0), 32, (), r, num_ranks))
        for r in range(num_ranks)
    ]
    assert len({len(batches) for batches in by_rank}) == 1
    every = np.concatenate([batch for batches in by_rank for batch in batches])
    assert len(np.unique(every)) == len(every)
    # Less than a batch of each rank is left out, and nothing by a single one.
    assert len(every) > STEPS - 2 - 32 * num_ranks
    assert num_ranks > 1 or len(every) == STEPS - 1


def test_a_sampler_with_its_own_rank_draws_as_one_without(ring):
    """The last batch of one rank would be a batch that another one has not."""
    batch_size = (STEPS - 1 - 1) // 4
    for rank in range(2):
        own = mr.ShuffledSampler(seed=0, rank=rank, num_ranks=2)
        got = drawn(ranked_stream(ring, own, batch_size, (), rank, 2))
        plain = mr.ShuffledSampler(seed=0)
        want = drawn(ranked_stream(ring, plain, batch_size, (), rank, 2))
        assert len(got) == len(want) == 2
        np.testing.assert_array_equal(got, want)


def test_a_block_and_an_order_stay(ring):
    sampler = mr.ShuffledSampler(seed=0, shuffle=False)
    batches = drawn(ranked_stream(ring, sampler, 10, (), 1, 2))
    np.testing.assert_array_equal(batches[0], np.arange(1, 21, 2))


def test_other_samplers_interleave_their_batches(ring):
    def make(rank, num_ranks):
        return ranked_stream(ring, mr.UniformSampler(seed=3), 16, (), rank, num_ranks)

    whole = iter(DataLoader(make(0, 1), batch_size=None))
    ranks = [iter(DataLoader(make(rank, 2), batch_size=None)) for rank in range(2)]
    for number in range(6):
        got = next(ranks[number % 2])["action"]
        np.testing.assert_array_equal(got, next(whole)["action"])


def test_epochs_of_other_samplers_have_equally_many_batches_for_each_rank(ring):
    def make(rank):
        windows = mr.SequenceSampler(5, sampler=mr.ShuffledSampler(seed=0))
        return ranked_stream(ring, windows, 31, (), rank, 2)

    numbers = [len(drawn(make(rank))) for rank in range(2)]
    assert numbers[0] == numbers[1] > 0


def test_a_state_continues_with_the_next_batch(ring):
    def make():
        return ranked_stream(ring, mr.ShuffledSampler(seed=5), 32, (), 1, 2)

    stream = make()
    whole = drawn(stream)
    state = json.loads(json.dumps(stream.state_after(4)))
    again = make()
    again.load_state_dict(state)
    rest = drawn(again)
    assert len(rest) == len(whole) - 4
    for got, want in zip(rest, whole[4:], strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_sampler_without_a_seed_or_of_another_rank_is_refused(ring):
    with pytest.raises(mr.SchemaError, match="has no seed"):
        ranked_stream(ring, mr.ShuffledSampler(), 32, (), 0, 2)
    other = mr.ShuffledSampler(seed=0, rank=1, num_ranks=3)
    with pytest.raises(mr.SchemaError, match="is for rank 1 of 3"):
        ranked_stream(ring, other, 32, (), 0, 2)
    with pytest.raises(mr.SchemaError, match="priorities"):
        ranked_stream(ring, mr.PrioritizedSampler(seed=0), 32, (), 0, 2)


def test_outside_of_a_worker_it_says_what_to_use(ring):
    with pytest.raises(mr.FailedError, match="ReplayStream"):
        train_loader(ring, mr.ShuffledSampler(seed=0), 32)


def _train(config):
    """Draw an epoch; the first attempt is killed in the middle of it."""
    import torch
    import torch.distributed

    context = ray.train.get_context()
    rank, folder = context.get_world_rank(), Path(config["folder"])
    loader = train_loader(config["path"], mr.ShuffledSampler(seed=0), 50)
    checkpoint, first = ray.train.get_checkpoint(), 0
    if checkpoint is not None:
        with checkpoint.as_directory() as kept:
            state = json.loads((Path(kept) / "state.json").read_text())
        loader.dataset.load_state_dict(state)
        first = config["stop"]
    seen = []
    for number, batch in enumerate(loader, first + 1):
        seen.append(batch["action"].numpy())
        torch.distributed.all_reduce(torch.tensor([float(len(batch))]))
        if number == config["stop"]:
            break
    np.save(folder / f"{rank}-{first}.npy", np.concatenate(seen))
    with tempfile.TemporaryDirectory() as temporary:
        state = loader.dataset.state_after(number - first)
        (Path(temporary) / "state.json").write_text(json.dumps(state))
        given = ray.train.Checkpoint.from_directory(temporary) if rank == 0 else None
        ray.train.report({"batches": number}, checkpoint=given)
    ray.train.get_all_reported_checkpoints()  # Waits until it is stored.
    if checkpoint is None and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_killed_workers_of_ray_train_continue_the_epoch(cluster, ring, tmp_path):
    import ray.train.torch

    trainer = ray.train.torch.TorchTrainer(
        _train,
        train_loop_config={"path": str(ring), "folder": str(tmp_path), "stop": 4},
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(tmp_path / "train"),
            name="run",
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    )
    assert trainer.fit().metrics["batches"] == STEPS // 2 // 50
    for rank in range(2):
        stream = ranked_stream(ring, mr.ShuffledSampler(seed=0), 50, (), rank, 2)
        parts = [np.load(tmp_path / f"{rank}-{first}.npy") for first in (0, 4)]
        np.testing.assert_array_equal(np.concatenate(parts), np.concatenate(drawn(stream)))
