"""Values that vary, on their way to a device: the CPU, a GPU, and pinned memory."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import mmreplay as mr
from mmreplay.errors import SchemaError
from mmreplay.loader import devices, replay_loader
from mmreplay.loader.devices import arrays_of, pack, slab_offsets, unpack, with_tensors
from tests.loader.test_devices import LateSender, needs_cuda, poison
from tests.loader.test_workers import WORKERS, options

FIELDS = {
    "observation": {
        "prompt": mr.Field.text(max_bytes=200),
        "cloud": mr.Field((None, 3), "float16", max_length=40),
    },
    "tokens": mr.Field((None,), "int32", max_length=4000),
    "logp": mr.Field((None,), "float32", max_length=4000),
    "codes": mr.Field((None, 2), "uint16", max_length=30),
    "brain": mr.Field((None,), "bfloat16", max_length=50),
    "number": mr.Field((), "int64"),
    "terminated": mr.Field((), "bool"),
}
VARYING = ("observation/prompt", "observation/cloud", "tokens", "logp", "codes", "brain")
WIDE = ("uint16", "uint32", "uint64")
SAMPLERS = {
    "uniform": lambda: mr.UniformSampler(seed=0),
    "windows": lambda: mr.SequenceSampler(4, mr.UniformSampler(seed=0)),
    "episodes": lambda: mr.EpisodeSampler(mr.UniformSampler(seed=0), layout="ragged"),
}
# Of few steps and many: values go with the small arrays of a batch, and by themselves.
SIZES = [8, 96]


def step(number, rng):
    """One step, whose lengths no rounding fits, some of them 0."""
    count = int(rng.integers(4000)) if number % 9 else 0
    return {
        "observation": {
            "prompt": "Wie weit ist es? " * int(rng.integers(10)) + str(number),
            "cloud": rng.random((int(rng.integers(40)), 3)).astype(np.float16),
        },
        "tokens": rng.integers(1 << 31, size=count, dtype=np.int32),
        "logp": rng.random(count, np.float32),
        "codes": rng.integers(1 << 16, size=(int(rng.integers(30)), 2)).astype("uint16"),
        "brain": rng.integers(1 << 14, size=int(rng.integers(50))).astype("uint16"),
        "number": number,
        "terminated": number % 17 == 16,
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("varying") / "b"
    rng = np.random.default_rng(0)
    with mr.ReplayBuffer.create(
        path, mr.Schema(FIELDS), 300, heap_bytes="16 MiB", commit_every=None
    ) as buffer:
        for number in range(400):
            buffer.add(step(number, rng))
    return path


def expected_of(path, kind, size, count):
    """What the buffer itself draws, as tensors with memory of their own."""
    with mr.ReplayBuffer.open(path, sampler=SAMPLERS[kind]()) as alone:
        return [alone.sample(size).torch() for _ in range(count)]


def bits(tensor):
    return tensor.contiguous().cpu().view(torch.uint8)


def same(actual, expected):
    """Every value and every number of two batches is the same, wherever it is."""
    assert list(actual) == list(expected)
    for name, one in expected.items():
        found = actual[name]
        assert type(found) is type(one), name
        assert found.dtype == one.dtype, name
        assert found.shape == one.shape, name
        if isinstance(one, mr.Ragged):
            assert torch.equal(found.offsets.cpu(), one.offsets), name
            found, one = found.values, one.values
        assert torch.equal(bits(found), bits(one)), name
    for name in ("env_ids", "positions", "weights", "mask", "offsets"):
        one, found = getattr(expected, name), getattr(actual, name)
        assert (one is None) == (found is None), name
        assert one is None or torch.equal(found.cpu(), one), name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_what_is_put_together_comes_apart_as_it_was(path, kind, size):
    with mr.ReplayBuffer.open(path, sampler=SAMPLERS[kind]()) as buffer:
        batch = buffer.sample(size)
        arrays = arrays_of(batch)
        assert {f"#{name}" for name in VARYING} <= arrays.keys()
        offsets, nbytes = slab_offsets(arrays)
        slab = np.full(nbytes, 0xAA, np.uint8)
        pack(arrays, offsets, slab)
        tensors = unpack(torch.from_numpy(slab), arrays, offsets)
        same(with_tensors(batch, tensors), batch.torch())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_loader_gives_what_the_buffer_draws(path, kind, size):
    expected = expected_of(path, kind, size, 12)
    buffer = mr.ReplayBuffer.open(path, sampler=SAMPLERS[kind]())
    with buffer, mr.ReplayLoader(buffer, size, prefetch=3, num_threads=2) as loader:
        for one in expected:
            same(next(loader), one)


@pytest.fixture(params=[False, True], ids=["pageable", "pinned"])
def late(request, monkeypatch):
    """Let copies to the device be made as late as a GPU's may be."""
    pinned = request.param
    monkeypatch.setattr(devices, "is_pinned", lambda array: pinned)
    monkeypatch.setattr(devices, "sender_of", lambda device, capacity, _: LateSender(capacity))
    monkeypatch.setattr(replay_loader, "sender_of", devices.sender_of)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.sliced(1)
def test_memory_is_not_filled_again_before_it_was_copied(path, late, kind, size):
    expected = expected_of(path, kind, size, 20)
    buffer = mr.ReplayBuffer.open(path, sampler=SAMPLERS[kind]())
    with buffer, mr.ReplayLoader(buffer, size, prefetch=4, num_threads=2) as loader:
        for one in expected:
            poison(loader)
            same(next(loader), one)
            poison(loader)


@pytest.mark.parametrize("size", SIZES)
def test_batches_of_changing_size_are_gathered_into_the_same_memory(path, late, size):
    buffer = mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(seed=0))
    with buffer, mr.ReplayLoader(buffer, size, num_threads=1) as loader:
        made, make = [], loader._sender.pool._make
        loader._sender.pool._make = lambda *kind: made.append(kind) or make(*kind)
        for _ in range(40):
            next(loader)
        first = len(made)
        for _ in range(200):
            next(loader)
        # Each batch has another number of items: without rounding, five times as many.
        assert len(made) - first < 200


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_unsigned_items_are_padded_and_chosen(dtype):
    check_wide(dtype, "cpu")


def check_wide(dtype, device):
    """What torch has no index operations for, and the schema does."""
    top = np.iinfo(dtype).max
    values = np.array([1, top, 3, 4, top - 1], dtype)
    ragged = mr.Ragged(values, np.array([0, 2, 2, 5])).tensors().to(device)
    array, mask = ragged.padded(value=7)
    assert array.cpu().numpy().tolist() == [[1, top, 7], [7, 7, 7], [3, 4, top - 1]]
    assert mask.sum().item() == 5
    chosen = ragged[torch.tensor([2, 0], device=device)]
    assert [v.tolist() for v in chosen.numpy()] == [[3, 4, top - 1], [1, top]]
    joined = mr.Ragged.concatenate([ragged, chosen])
    assert joined.dtype == ragged.dtype
    assert joined.numpy().values.tolist() == [*values.tolist(), 3, 4, top - 1, 1, top]


def test_a_padding_that_no_tensor_holds_is_refused():
    ragged = mr.Ragged(np.ones(3, np.uint8), np.array([0, 3])).tensors()
    for value in (-1, 256, "a", None):
        with pytest.raises(SchemaError, match=r"number that uint8 holds, got"):
            ragged.padded(value=value)


def check_forms(batch, expected):
    """Jagged tensors, arrays with masks and texts of a batch, on its device."""
    for name in VARYING:
        ragged, one = batch[name], expected[name]
        device = ragged.values.device
        jagged = ragged.torch()
        assert jagged.layout == torch.jagged
        assert jagged.device == device
        for found, value in zip(jagged.unbind(), one, strict=True):
            assert torch.equal(bits(found), bits(value)), name
        for side in ("right", "left"):
            array, mask = ragged.padded(side=side)
            assert array.device == mask.device == device
            known, known_mask = one.padded(side=side)
            assert torch.equal(bits(array), bits(known)), name
            assert torch.equal(mask.cpu(), known_mask), name
        some = torch.tensor([3, 0, 3], device=device)
        for found, value in zip(ragged[some], one[[3, 0, 3]], strict=True):
            assert torch.equal(bits(found), bits(value)), name
        assert torch.equal(ragged.lengths.cpu(), one.lengths)
        assert torch.equal(bits(ragged[-1]), bits(one[-1]))
    texts = batch["observation/prompt"].text()
    assert texts == expected["observation/prompt"].text()
    assert any("weit" in text for text in texts)


def test_tensors_have_every_form(path):
    (expected,) = expected_of(path, "uniform", 32, 1)
    check_forms(expected.to("cpu"), expected)
    with pytest.raises(SchemaError, match="only tensors can be moved or pinned"):
        mr.ReplayBuffer.open(path).sample(4).pin_memory()


def draws_of(path, kind, count):
    return mr.ReplayStream(path, SAMPLERS[kind](), 24, count)


@pytest.mark.parametrize(("workers", "context"), WORKERS)
@pytest.mark.parametrize("kind", ["uniform", "windows"])
def test_workers_give_what_one_process_gives(path, kind, workers, context):
    loader = DataLoader(draws_of(path, kind, 6), batch_size=None, **options(workers, context))
    found = list(loader)
    alone = list(draws_of(path, kind, 6))
    assert len(found) == 6
    for batch, one in zip(found, alone, strict=True):
        same(batch.torch(), one.torch())


def steps_of(path, workers, context, **more):
    """Nested dicts of 16 steps each, from torch's own collation."""
    dataset = mr.ReplayDataset(path)
    return DataLoader(dataset, batch_size=16, **options(workers, context), **more)


@pytest.mark.parametrize(("workers", "context"), WORKERS)
def test_single_steps_are_put_into_batches(path, workers, context):
    with mr.ReplayBuffer.open(path) as buffer:
        rows = buffer.gather_all()
    seen = 0
    for batch in steps_of(path, workers, context):
        which = (batch["number"] - int(rows["number"][0])).numpy()
        for name in ("tokens", "codes"):
            for found, value in zip(batch[name], rows[name][which], strict=True):
                assert torch.equal(bits(found), bits(torch.from_numpy(value)))
        seen += len(which)
    assert seen >= 280


@pytest.mark.gpu
@needs_cuda
class TestCuda:
    @pytest.mark.parametrize("prefetch", [1, 2, 4, 8])
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("kind", SAMPLERS)
    def test_batches_are_those_of_the_cpu(self, path, kind, size, prefetch):
        expected = expected_of(path, kind, size, 15)
        buffer = mr.ReplayBuffer.open(path, sampler=SAMPLERS[kind]())
        options = {"device": "cuda", "prefetch": prefetch, "num_threads": 2}
        with buffer, mr.ReplayLoader(buffer, size, **options) as loader:
            for one in expected:
                batch = next(loader)
                for name in VARYING:
                    assert batch[name].values.device.type == "cuda"
                    assert batch[name].offsets.device.type == "cuda"
                same(batch, one)

    def test_batches_have_every_form(self, path):
        (expected,) = expected_of(path, "uniform", 32, 1)
        buffer = mr.ReplayBuffer.open(path, sampler=SAMPLERS["uniform"]())
        with buffer, mr.ReplayLoader(buffer, 32, device="cuda") as loader:
            check_forms(next(loader), expected)
        check_forms(expected.to("cuda"), expected)

    @pytest.mark.parametrize("dtype", WIDE)
    def test_wide_unsigned_items_are_padded_and_chosen(self, dtype):
        check_wide(dtype, "cuda")

    def test_one_field_is_moved_by_itself(self, path):
        with mr.ReplayBuffer.open(path, sampler=SAMPLERS["uniform"]()) as buffer:
            tokens = buffer.sample(32)["tokens"]
        jagged = tokens.torch("cuda")
        assert jagged.device.type == "cuda"
        assert torch.equal(jagged.values().cpu(), torch.from_numpy(tokens.values))
        pinned = tokens.tensors().pin_memory()
        assert pinned.values.is_pinned()
        assert pinned.offsets.is_pinned()
        moved = pinned.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(moved.values.cpu(), pinned.values)
        assert moved.padded(4000)[0].shape == (32, 4000)
        weights = torch.nn.Parameter(torch.ones(1, device="cuda"))
        logp = moved.values.float() * weights
        nested = torch.nested.nested_tensor_from_jagged(logp, moved.offsets)
        nested.values().sum().backward()
        assert weights.grad is not None

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("prefetch", [1, 2, 8])
    def test_memory_that_is_used_again_is_not_read_late(self, path, prefetch, size):
        expected = expected_of(path, "uniform", size, 40)
        buffer = mr.ReplayBuffer.open(path, sampler=SAMPLERS["uniform"]())
        options = {"device": "cuda", "prefetch": prefetch, "num_threads": 2}
        with buffer, mr.ReplayLoader(buffer, size, **options) as loader:
            sums, held = [], []
            for number, batch in zip(range(40), loader, strict=False):
                # A learner whose work is queued long after the batch was dropped.
                torch.cuda._sleep(2_000_000)
                sums.append(batch["tokens"].values.sum(dtype=torch.int64))
                if number % 7 == 0:
                    held.append((number, batch))
                del batch
                poison(loader)
            for found, one in zip(sums, expected, strict=True):
                assert int(found) == int(one["tokens"].values.sum(dtype=torch.int64))
            for number, batch in held:
                same(batch, expected[number])

    @pytest.mark.parametrize("size", SIZES)
    def test_memory_is_pinned_bounded_and_seldom_new(self, path, size):
        buffer = mr.ReplayBuffer.open(path, sampler=SAMPLERS["uniform"]())
        with buffer, mr.ReplayLoader(buffer, size, device="cuda") as loader:
            made, make = [], loader._sender.pool._make
            loader._sender.pool._make = lambda *kind: made.append(kind) or make(*kind)
            for _ in range(40):
                next(loader)
            first = len(made)
            for _ in range(200):
                next(loader)
            assert len(made) - first < 200
            pools = loader._sender.pool._pools.values()
            assert all(devices.is_pinned(a.view(np.uint8)) for p in pools for a in p)
        assert loader._sender.pool.nbytes == 0

    def test_values_are_gathered_into_pinned_memory(self, path):
        seen = []

        class Seen(devices.ToCuda):
            def _pinned(self, array, varies):
                copy = super()._pinned(array, varies)
                seen.append((varies, copy is array))
                return copy

        buffer = mr.ReplayBuffer.open(path, sampler=SAMPLERS["uniform"]())
        loader = mr.ReplayLoader(buffer, 96, device="cuda")
        loader._sender.__class__ = Seen
        with buffer, loader:
            next(loader)
        assert (True, True) in seen
        assert (True, False) not in seen

    def test_copies_run_while_the_learner_computes(self, path):
        buffer = mr.ReplayBuffer.open(path, sampler=SAMPLERS["uniform"]())
        with buffer, mr.ReplayLoader(buffer, 96, device="cuda") as loader:
            next(loader)
            torch.cuda.synchronize()
            # The learner's stream is busy: copies do not wait for it.
            torch.cuda._sleep(2_000_000_000)
            busy = torch.cuda.Event()
            busy.record()
            sent = loader._sender.send(buffer.sample(96))
            sent[1].synchronize()
            assert not busy.query()
            busy.synchronize()

    def test_a_learner_on_a_stream_of_its_own_reads_whole_batches(self, path):
        expected = expected_of(path, "uniform", 96, 20)
        buffer = mr.ReplayBuffer.open(path, sampler=SAMPLERS["uniform"]())
        stream, sums = torch.cuda.Stream(), []
        with buffer, mr.ReplayLoader(buffer, 96, device="cuda") as loader:
            for _ in expected:
                with torch.cuda.stream(stream):
                    batch = next(loader)
                    torch.cuda._sleep(1_000_000)
                    sums.append(batch["logp"].values.double().sum())
                del batch
            stream.synchronize()
        for found, one in zip(sums, expected, strict=True):
            # Added up in another order there.
            assert float(found) == pytest.approx(float(one["logp"].values.double().sum()), rel=1e-9)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_batches_of_workers_are_pinned(self, path, workers):
        loader = DataLoader(
            draws_of(path, "uniform", 5),
            batch_size=None,
            pin_memory=True,
            **options(workers, "spawn" if workers else None),
        )
        alone = list(draws_of(path, "uniform", 5))
        for batch, one in zip(loader, alone, strict=True):
            for name in VARYING:
                assert batch[name].values.is_pinned()
                assert batch[name].offsets.is_pinned()
            same(batch.to("cuda", non_blocking=True), one.torch())

    @pytest.mark.parametrize("workers", [0, 2])
    def test_batches_of_single_steps_are_pinned(self, path, workers):
        context = "spawn" if workers else None
        for batch in steps_of(path, workers, context, pin_memory=True):
            assert batch["tokens"].values.is_pinned()
            moved = batch["tokens"].to("cuda", non_blocking=True)
            torch.cuda.synchronize()
            assert torch.equal(moved.values.cpu(), batch["tokens"].values)
