"""Batches arrive whole on a device: one copy of small arrays, one of each large one."""

import ctypes
import gc
import threading
from collections import deque

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.errors import SchemaError
from mmreplay.loader import devices, replay_loader
from mmreplay.loader.devices import (
    ALIGNMENT,
    ToCuda,
    array_over,
    arrays_of,
    pack,
    sender_of,
    slab_offsets,
    unpack,
    with_tensors,
)
from mmreplay.storage.gather import BufferPool
from tests.loader.support import fill

SAMPLERS = {
    "uniform": lambda: mr.UniformSampler(seed=0),
    "windows": lambda: mr.SequenceSampler(4, mr.UniformSampler(seed=0)),
    "ragged": lambda: mr.EpisodeSampler(mr.UniformSampler(seed=0), layout="ragged"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("devices") / "b"
    fill(path)
    return path


def same(actual, expected):
    """Every tensor of two batches is the same, on whichever device."""
    assert list(actual) == list(expected)
    for name in expected:
        assert actual[name].dtype == expected[name].dtype, name
        assert torch.equal(actual[name].cpu(), expected[name]), name
    for name in ("env_ids", "positions", "probabilities", "weights", "mask", "offsets"):
        one, other = getattr(actual, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        assert one is None or torch.equal(one.cpu(), other), name
    assert actual.key == expected.key
    assert actual.bfloat16 == expected.bfloat16


@pytest.mark.parametrize("kind", SAMPLERS)
def test_what_is_put_together_comes_apart_as_it_was(path, kind):
    with mr.ReplayBuffer.open(path, sampler=SAMPLERS[kind]()) as buffer:
        batch = buffer.sample(16)
        arrays = arrays_of(batch)
        offsets, nbytes = slab_offsets(arrays)
        assert all(place % ALIGNMENT == 0 for place in offsets.values())
        slab = np.full(nbytes, 0xAA, np.uint8)
        pack(arrays, offsets, slab)
        tensors = unpack(torch.from_numpy(slab), arrays, offsets)
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        same(with_tensors(batch, tensors), batch.torch())


@pytest.mark.parametrize("device", ["banana", 3.5, "meta"])
def test_a_device_that_is_none_is_refused(path, device):
    refused = pytest.raises(SchemaError, match=r"device must be 'cpu' or 'cuda', got")
    with mr.ReplayBuffer.open(path) as buffer, refused:
        mr.ReplayLoader(buffer, 8, device=device)


@pytest.mark.parametrize(
    "view_of", [lambda a: a, lambda a: a[2:5], lambda a: a.view("V4"), torch.from_numpy]
)
def test_memory_of_a_tensor_is_not_used_again_while_it_is_seen(view_of):
    made = []

    def make(shape, dtype):
        made.append(torch.zeros(4096, dtype=torch.uint8))
        return array_over(made[-1], shape, dtype)

    recycler, kind = BufferPool(make=make), ((8, 4), np.dtype(np.uint8))
    held = view_of(recycler.empty(*kind))
    for _ in range(4):
        recycler.empty(*kind)[...] = 7
    assert [int(tensor.sum()) for tensor in made] == [0, 7 * 32]
    del held
    # Nobody sees the first one any more: it is handed out again.
    both = [recycler.empty(*kind) for _ in range(2)]
    assert len(both) == len(made) == 2


def test_an_array_over_a_tensor_keeps_it_alive():
    array = array_over(torch.arange(12, dtype=torch.uint8), (3, 2), np.dtype("<u2"))
    gc.collect()
    assert array.tobytes() == bytes(range(12))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_way_out_is_the_cpu():
    with pytest.raises(SchemaError, match=r"finds no GPU, got .* Pass device='cpu'"):
        sender_of("cuda", 3)


def test_to_another_kind_of_device_batches_are_moved():
    with pytest.raises(SchemaError, match=r"got 'mps'\. .* move the batches"):
        sender_of("mps", 3)


def poison(loader):
    """Overwrite all host memory of batches that is not in use, as gathers would."""
    recycler = loader._sender.pool
    kinds = [(a.shape, a.dtype) for pool in recycler._pools.values() for a in pool]
    held = [recycler.empty(*kind) for kind in kinds]
    for array in held:
        array.view(np.uint8)[...] = 0xEE


class LateEvent:
    """An event that is reached when the test says so."""

    def __init__(self, copies):
        self.copies, self.reached = copies, False

    def query(self):
        return self.reached

    def reach(self):
        for there, address, nbytes in self.copies:
            # By address, as a GPU does: it holds nothing.
            ctypes.memmove(there.data_ptr(), address, nbytes)
        self.reached = True


class LateSender(ToCuda):
    """A sender whose copies are made as late as a GPU's may be."""

    def __init__(self, capacity):
        self.pool = BufferPool(capacity, 64, 1 << 40)
        self._lock, self._copying = threading.Lock(), deque()

    def _begin(self, sources):
        there = {name: torch.from_numpy(a).clone() for name, a in sources.items()}
        for tensor in there.values():
            tensor.view(torch.uint8).fill_(0xDD)
        return there, LateEvent(
            [(there[name], a.ctypes.data, a.nbytes) for name, a in sources.items()]
        )

    def receive(self, sent):
        sent[1].reach()
        return sent[0]

    def settle(self):
        self._copying.clear()
        self.pool.clear()


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.sliced(1)
def test_memory_is_not_filled_again_before_it_was_copied(path, monkeypatch, kind, pinned):
    monkeypatch.setattr(devices, "is_pinned", lambda array: pinned)
    monkeypatch.setattr(devices, "sender_of", lambda device, capacity, _: LateSender(capacity))
    monkeypatch.setattr(replay_loader, "sender_of", devices.sender_of)
    with mr.ReplayBuffer.open(path, sampler=SAMPLERS[kind]()) as alone:
        expected = [alone.sample(64).torch() for _ in range(30)]
    buffer = mr.ReplayBuffer.open(path, sampler=SAMPLERS[kind]())
    with buffer, mr.ReplayLoader(buffer, 64, prefetch=4, num_threads=2) as loader:
        for one in expected:
            poison(loader)
            same(next(loader), one)
            poison(loader)
        # What flew on is let go as soon as it was copied.
        assert len(loader._sender._copying) <= 4 + 2 + 1


needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no CUDA device here"
)


@pytest.mark.gpu
@needs_cuda
class TestCuda:
    @pytest.mark.parametrize("prefetch", range(1, 9))
    @pytest.mark.parametrize("kind", SAMPLERS)
    def test_batches_are_those_of_the_cpu(self, path, kind, prefetch):
        with mr.ReplayBuffer.open(path, sampler=SAMPLERS[kind]()) as alone:
            expected = [alone.sample(64).torch() for _ in range(20)]
        buffer = mr.ReplayBuffer.open(path, sampler=SAMPLERS[kind]())
        options = {"device": "cuda", "prefetch": prefetch, "num_threads": 2}
        with buffer, mr.ReplayLoader(buffer, 64, **options) as loader:
            for one in expected:
                batch = next(loader)
                assert batch["action"].device.type == "cuda"
                same(batch, one)

    @pytest.mark.parametrize("prefetch", [1, 2, 8])
    def test_memory_that_is_used_again_is_nobodys(self, path, prefetch):
        with mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(0)) as alone:
            expected = [alone.sample(256)["observation/pixels"] for _ in range(60)]
        buffer = mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(0))
        options = {"device": "cuda", "prefetch": prefetch}
        with buffer, mr.ReplayLoader(buffer, 256, **options) as loader:
            sums, kept = [], []
            for number, batch in zip(range(60), loader, strict=False):
                # A learner whose work is queued long after the batch was dropped.
                torch.cuda._sleep(2_000_000)
                sums.append(batch["observation/pixels"].sum(dtype=torch.int64))
                if number % 7 == 0:
                    kept.append((number, batch))
                del batch
                poison(loader)
            for found, pixels in zip(sums, expected, strict=True):
                assert int(found) == int(pixels.sum(dtype=np.int64))
            for number, batch in kept:
                found = batch["observation/pixels"].cpu().numpy()
                assert (found == expected[number]).all()

    def test_memory_is_pinned_and_bounded(self, path):
        buffer = mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(0))
        with buffer, mr.ReplayLoader(buffer, 256, device="cuda") as loader:
            for _ in range(40):
                next(loader)
            pools = loader._sender.pool._pools.values()
            assert all(devices.is_pinned(a.view(np.uint8)) for p in pools for a in p)
            # Filled, waiting, the learner's, and the one that it had before.
            most = loader.prefetch + loader._num_threads + 2
            assert max(len(pool) for pool in pools) <= most
        assert loader._sender.pool.nbytes == 0

    def test_copies_run_while_the_learner_computes(self, path):
        buffer = mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(0))
        with buffer, mr.ReplayLoader(buffer, 256, device="cuda") as loader:
            next(loader)
            torch.cuda.synchronize()
            # The learner's stream is busy: copies do not wait for it.
            torch.cuda._sleep(2_000_000_000)
            busy = torch.cuda.Event()
            busy.record()
            sent = loader._sender.send(buffer.sample(256))
            sent[1].synchronize()
            assert not busy.query()
            busy.synchronize()
