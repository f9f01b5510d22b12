"""Accelerate's prepared loaders give the batches that ours give, and resume."""

import json
import os
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import mmreplay as mr
from mmreplay.errors import SchemaError
from tests.contracts.sampler import steps_of
from tests.loader.support import SIZE, draws_of, fill, legal, loader_of

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
Configuration = accelerate.DataLoaderConfiguration
WORKERS = pytest.mark.parametrize("workers", [0, 2])
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("accelerate") / "b"
    fill(path, count=700, capacity=700)
    return path


def prepared(loader, **options):
    options.setdefault("dispatch_batches", False)
    made = accelerate.Accelerator(cpu=True, dataloader_config=Configuration(**options))
    return made.prepare(loader)


def stream_of(path, **options):
    return mr.ReplayStream(path, mr.ShuffledSampler(seed=0), SIZE, **options)


def assert_same_batches(batches, expected, minimum=1000):
    items = 0
    for one, other in zip(batches, expected, strict=True):
        assert type(one) is mr.Batch
        assert steps_of(one) == steps_of(other)
        assert set(one) == set(other)
        for name in one:
            assert torch.equal(one[name], other[name])
        items += len(one)
    assert items >= minimum


def epochs(loader, count=2):
    return [batch for _ in range(count) for batch in loader]


@WORKERS
def test_whole_draws_pass_by_the_batch_sampler(path, workers):
    batches = epochs(prepared(loader_of(*draws_of(path), workers)))
    assert_same_batches(batches, epochs(loader_of(*draws_of(path))))


@WORKERS
def test_a_stream_passes_where_processes_dispatch_no_batches(path, workers):
    loader = DataLoader(stream_of(path), batch_size=None, num_workers=workers)
    assert_same_batches(
        epochs(prepared(loader)), epochs(DataLoader(stream_of(path), batch_size=None))
    )
    with pytest.raises(TypeError, match="batch size of tensors"):
        next(iter(prepared(loader, dispatch_batches=None)))


def test_draws_as_the_sampler_are_dropped(path):
    """So that docs/loader.md passes them as the batch sampler."""
    dataset, draws = draws_of(path)
    loader = DataLoader(dataset, sampler=draws, batch_size=None)
    assert type(next(iter(loader))) is mr.Batch
    first = next(iter(prepared(loader)))
    assert type(first) is dict
    assert first["observation"]["number"].shape == ()


def test_a_replay_loader_passes_as_it_is_and_its_state_is_saved(path, tmp_path):
    def opened():
        buffer = mr.ReplayBuffer.open(path, sampler=mr.ShuffledSampler(seed=0))
        return mr.ReplayLoader(buffer, SIZE)

    with opened() as loader:
        expected = epochs(loader)
    with opened() as loader:
        made = accelerate.Accelerator(cpu=True)
        assert made.prepare(loader) is loader
        made.register_for_checkpointing(loader)
        begun = list(islice(loader, 5))
        made.save_state(tmp_path / "state")
    with opened() as again:
        made = accelerate.Accelerator(cpu=True)
        made.register_for_checkpointing(again)
        made.load_state(tmp_path / "state")
        assert_same_batches(begun + epochs(again), expected)


@WORKERS
def test_draws_go_on_after_a_saved_state(path, tmp_path, workers):
    expected = epochs(loader_of(*draws_of(path)))
    dataset, draws = draws_of(path)
    loader = prepared(loader_of(dataset, draws, workers))
    begun = list(islice(loader, 5))
    # Accelerate itself is a batch ahead, and workers are more.
    accelerate.Accelerator(cpu=True).save(draws.state_after(5), tmp_path / "draws.pt")
    dataset, draws = draws_of(path, seed=9)
    draws.load_state_dict(torch.load(tmp_path / "draws.pt", weights_only=True))
    batches = begun + epochs(prepared(loader_of(dataset, draws, workers)))
    assert_same_batches(batches, expected)


@WORKERS
def test_first_batches_are_skipped(path, workers):
    made = accelerate.Accelerator(cpu=True)
    loader = made.prepare(loader_of(*draws_of(path), workers))
    skipped = made.skip_first_batches(loader, 5)
    expected = epochs(loader_of(*draws_of(path)), 1)
    assert_same_batches(list(skipped), expected[5:], 300)


@WORKERS
@pytest.mark.parametrize("epoch", [0, 2])
def test_a_stream_goes_on_after_a_saved_state(path, workers, epoch):
    alone = DataLoader(stream_of(path), batch_size=None)
    expected = epochs(alone, epoch + 2)
    whole = len(expected) // (epoch + 2)
    stream = stream_of(path)
    loader = prepared(DataLoader(stream, batch_size=None, num_workers=workers))
    begun = epochs(loader, epoch) + list(islice(loader, 5))
    state = stream.state_after(5)
    stream = stream_of(path)
    loader = prepared(DataLoader(stream, batch_size=None, num_workers=workers))
    stream.load_state_dict(state)
    if epoch:
        # Accelerate counts from 0 in each process, and tells the stream.
        way_out = rf"got 0\. Count epochs from {epoch}; under .* set_epoch\({epoch}\)"
        with pytest.raises(SchemaError, match=f"epoch must be {epoch}.*{way_out}"):
            next(iter(loader))
    loader.set_epoch(epoch)
    batches = begun + epochs(loader)
    assert len(batches) == whole * (epoch + 2)
    assert_same_batches(batches, expected)


SCRIPT = """
import json, sys
import accelerate
import mmreplay as mr
from torch.utils.data import DataLoader
from tests.contracts.sampler import steps_of

path, way = sys.argv[1:]
options = {"even_batches": False, "dispatch_batches": False}
config = accelerate.DataLoaderConfiguration(**options)
made = accelerate.Accelerator(cpu=True, dataloader_config=config)
sampler = mr.ShuffledSampler(seed=0)
if way == "draws":
    dataset = mr.ReplayDataset(path)
    draws = dataset.draws(sampler, 64)
    loader = DataLoader(dataset, batch_sampler=draws, collate_fn=mr.collate)
    loader = made.prepare(loader)
else:
    ranks = {"rank": made.process_index, "num_ranks": made.num_processes}
    stream = mr.ReplayStream(path, sampler, 64, **ranks)
    loader = DataLoader(stream, batch_size=None, num_workers=2)
assert made.num_processes == 2
batches = [steps_of(batch) for _ in range(2) for batch in loader]
made.wait_for_everyone()
print("batches", json.dumps(batches))
"""


@pytest.mark.parametrize("way", ["draws", "stream"])
def test_two_processes_share_an_epoch(path, way, tmp_path):
    """Of an odd number of batches, so that one process has one more."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(ROOT),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, path, way],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=240) for process in running]
    assert [process.returncode for process in running] == [0, 0], said[0][1][-2000:]
    parts = [
        json.loads(line.removeprefix("batches "))
        for out, _ in said
        for line in out.splitlines()
        if line.startswith("batches ")
    ]
    expected = legal(mr.ReplayBuffer.open(path))
    both = [tuple(place) for part in parts for batch in part for place in batch]
    # Each step of the buffer once an epoch, between them.
    assert len(both) == 2 * len(expected) >= 1000
    assert sorted(both) == sorted(2 * expected)
    if way == "draws":
        alone = [steps_of(batch) for batch in epochs(loader_of(*draws_of(path)), 1)]
        first = [[tuple(p) for p in batch] for batch in parts[0]]
        assert first[: len(alone[::2])] == alone[::2]
