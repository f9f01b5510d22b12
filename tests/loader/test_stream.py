"""ReplayStream: workers draw, and their number changes nothing."""

import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import mmreplay as mr
from mmreplay.errors import FormatError, SchemaError, StaleError
from tests.contracts.sampler import steps_of
from tests.loader.support import fill, legal, same_as_take, steps
from tests.loader.test_workers import WORKERS, options

# Three workers on two cores are what some of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
SAMPLERS = {
    "uniform": (lambda: mr.UniformSampler(seed=3), 7),
    "shuffled": (lambda: mr.ShuffledSampler(seed=3), None),
    "sequences": (lambda: mr.SequenceSampler(4, mr.ShuffledSampler(seed=3)), None),
    "mixture": (
        lambda: mr.MixtureSampler(
            [(mr.UniformSampler(seed=1), 3), (mr.RecentSampler(20, 0.5, seed=2), 1)], seed=3
        ),
        5,
    ),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream") / "b"
    fill(path)
    return path


def loader_of(stream, workers=0, context=None, **more):
    return DataLoader(stream, batch_size=None, **options(workers, context), **more)


def stream_of(path, kind, **more):
    make, num_batches = SAMPLERS[kind]
    return mr.ReplayStream(path, make(), 16, num_batches, **more)


@pytest.mark.parametrize(("workers", "context"), WORKERS)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_workers_give_what_one_process_gives(path, kind, workers, context):
    make, num_batches = SAMPLERS[kind]
    with mr.ReplayBuffer.open(path, sampler=make()) as buffer:
        stream = stream_of(path, kind)
        loader = loader_of(stream, workers, context)
        count = len(loader)
        assert num_batches in (None, count)
        found = list(loader)
        assert len(found) == count
        # The first iteration is what the sampler draws by itself.
        for batch in found:
            assert steps_of(batch) == steps_of(buffer.sample(16))
            if batch.mask is None:
                same_as_take(buffer, batch)
            else:
                numbers = 2 * batch.window_positions + batch.env_ids[:, None]
                assert (batch["observation/number"] == numbers).all()


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True), (3, False)])
@pytest.mark.sliced(1)
def test_each_iteration_is_another_epoch(path, workers, persistent):
    alone = loader_of(stream_of(path, "shuffled"))
    expected = [[steps_of(batch) for batch in alone] for _ in range(3)]
    stream = stream_of(path, "shuffled")
    more = {"persistent_workers": persistent} if workers else {}
    loader = loader_of(stream, workers, "fork", **more)
    with mr.ReplayBuffer.open(path) as buffer:
        every = legal(buffer)
    for number in range(3):
        found = [steps_of(batch) for batch in loader]
        assert found == expected[number]
        assert sorted(itertools.chain(*found)) == every
    assert expected[0] != expected[1] != expected[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_that_was_left_early_is_over(path, workers):
    alone = loader_of(stream_of(path, "shuffled"))
    expected = [[steps_of(batch) for batch in alone] for _ in range(2)]
    loader = loader_of(stream_of(path, "shuffled"), workers, "fork")
    next(iter(loader))
    assert [steps_of(batch) for batch in loader] == expected[1]


def test_an_iteration_is_chosen_by_its_number(path):
    alone = loader_of(stream_of(path, "uniform"))
    expected = [[steps_of(batch) for batch in alone] for _ in range(4)]
    stream = stream_of(path, "uniform")
    for number in (2, 0, 3):
        stream.set_epoch(number)
        assert [steps_of(b) for b in loader_of(stream, 2, "fork")] == expected[number]
    for epoch in (-1, "1", 1.7, True, None):
        told = f"epoch must be an integer of at least 0, got {epoch!r}"
        with pytest.raises(SchemaError, match=told):
            stream.set_epoch(epoch)


def test_another_epoch_than_that_of_a_loaded_state_is_refused(path):
    """A library that counts epochs from 0 in each process would lose the state."""
    stream = stream_of(path, "uniform")
    expected = [steps_of(batch) for batch in loader_of(stream)]
    stream.load_state_dict({"kind": "ReplayStream", "epoch": 2, "batches": 1})
    message = "epoch must be 2, in which the loaded state goes on, got 0. Count .* 2"
    with pytest.raises(SchemaError, match=message):
        stream.set_epoch(0)
    stream.set_epoch(2)
    resumed = [steps_of(batch) for batch in loader_of(stream)]
    # Once it has begun, any other one may come.
    stream.set_epoch(0)
    assert [steps_of(batch) for batch in loader_of(stream)] == expected
    stream.set_epoch(2)
    assert [steps_of(batch) for batch in loader_of(stream)] == resumed


@pytest.mark.parametrize("kind", ["uniform", "shuffled"])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_share_what_one_process_gives(path, kind, workers):
    expected = [steps_of(batch) for batch in loader_of(stream_of(path, kind))]
    found = {}
    count = -(-len(expected) // 3)
    for rank in range(3):
        make, num_batches = SAMPLERS[kind]
        number = None if num_batches is None else count
        stream = mr.ReplayStream(path, make(), 16, number, rank=rank, num_ranks=3)
        mine = [steps_of(batch) for batch in loader_of(stream, workers, "fork")]
        assert len(mine) == len(stream)
        found |= {rank + 3 * at: each for at, each in enumerate(mine)}
    whole = [found[step] for step in sorted(found)]
    assert whole[: len(expected)] == expected
    assert len(whole) == len(expected) or kind == "uniform"


@pytest.mark.parametrize("kind", ["uniform", "shuffled", "sequences"])
@pytest.mark.parametrize(("before", "after"), [(2, 0), (2, 3)])
@pytest.mark.sliced(1)
def test_a_run_goes_on_whatever_the_workers(path, kind, before, after):
    alone = loader_of(stream_of(path, kind))
    expected = [[steps_of(batch) for batch in alone] for _ in range(3)]
    for stopped in (1, 4):
        stream = stream_of(path, kind)
        list(loader_of(stream, before, "fork"))
        batches = iter(loader_of(stream, before, "fork"))
        taken = [steps_of(batch) for batch in itertools.islice(batches, stopped)]
        state = json.loads(json.dumps(stream.state_after(stopped)))
        del batches
        assert taken == expected[1][:stopped]
        fresh = stream_of(path, kind)
        fresh.load_state_dict(state)
        loader = loader_of(fresh, after, "fork")
        rest = iter(loader)
        first = steps_of(next(rest))
        # A state of the run that was gone on with tells of the whole iteration.
        assert fresh.state_after(1) == stream.state_after(stopped + 1)
        assert [first, *map(steps_of, rest)] == expected[1][stopped:]
        assert [steps_of(batch) for batch in loader] == expected[2]


def test_states_of_others_and_of_no_iteration_are_refused(path):
    stream = stream_of(path, "uniform")
    for number in (0, "1", 1.0):
        told = rf"num_batches must be an integer.*got {number!r}"
        with pytest.raises(SchemaError, match=told):
            stream.state_after(number)
    told = r"num_batches must count .* got 1\. Call it after a batch"
    with pytest.raises(SchemaError, match=told):
        stream.state_after(1)
    with pytest.raises(FormatError, match=r"stream state: kind.*got 'UniformSampler'"):
        stream.load_state_dict({"kind": "UniformSampler"})
    with pytest.raises(FormatError, match=r"sampler state: batches must be an.*got -1"):
        stream.load_state_dict({"kind": "ReplayStream", "epoch": 0, "batches": -1})


@pytest.mark.parametrize(
    "sampler",
    [
        mr.PrioritizedSampler(),
        mr.RankPrioritizedSampler(),
        mr.SequenceSampler(3, mr.PrioritizedSampler()),
    ],
)
def test_prioritized_samplers_are_refused_with_the_way_out(path, sampler):
    with pytest.raises(SchemaError, match="ReplayStream: each worker would have its"):
        mr.ReplayStream(path, sampler, 16)


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (mr.UseCounter(1), "UseCounter"),
        (mr.UseCounter(1, name=None, lease_s=9), "UseCounter"),
        (mr.SequenceSampler(3, mr.UseCounter(1)), "SequenceSampler around a UseC"),
    ],
)
def test_a_counter_of_uses_is_refused_with_the_way_out(path, sampler, name):
    told = f"^ReplayStream: each worker would have its own counts of the {name}.* Draw"
    with pytest.raises(SchemaError, match=told):
        mr.ReplayStream(path, sampler, 16)


@pytest.mark.parametrize("sampler", [mr.UniformSampler, None, 16])
def test_what_is_no_sampler_is_refused(path, sampler):
    told = "sampler must have draw, state_dict and load_state_dict, got"
    with pytest.raises(SchemaError, match=told):
        mr.ReplayStream(path, sampler, 8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank", "0"),
        ("rank", 1.0),
        ("rank", -1),
        ("num_ranks", "2"),
        ("num_ranks", 0),
        ("num_ranks", None),
    ],
)
def test_ranks_are_whole_numbers(path, name, value):
    told = rf"^{name} must be an integer .* got {value!r}\. Pass torch\.distributed's"
    with pytest.raises(SchemaError, match=told):
        mr.ReplayStream(path, mr.UniformSampler(0), 8, **{name: value})


@pytest.mark.parametrize("num_batches", ["3", 2.5, 0])
def test_batches_are_counted_by_whole_numbers(path, num_batches):
    told = rf"num_batches must be an integer .*.*got {num_batches!r}"
    with pytest.raises(SchemaError, match=told):
        mr.ReplayStream(path, mr.UniformSampler(0), 8, num_batches, num_ranks=2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"collate_fn": mr.collate}])
@pytest.mark.usefixtures("_short_waits")
@pytest.mark.sliced(1)
def test_batches_are_not_put_into_batches(path, workers, options):
    loader = DataLoader(stream_of(path, "uniform"), num_workers=workers, **options)
    told = r"collate needs single steps.*got a list of"
    with pytest.raises(SchemaError, match=told):
        next(iter(loader))


def test_ranks_are_counted_once(path):
    with pytest.raises(SchemaError, match=r"rank must be .* in \[0, 1\], got 2"):
        mr.ReplayStream(path, mr.UniformSampler(0), 16, rank=2, num_ranks=2)
    sampler = mr.ShuffledSampler(seed=0, rank=1, num_ranks=2)
    with pytest.raises(SchemaError, match=r"num_ranks must be 1 with a.*got 2"):
        mr.ReplayStream(path, sampler, 16, rank=1, num_ranks=2)
    found = []
    for rank in range(2):
        sampler = mr.ShuffledSampler(seed=0, rank=rank, num_ranks=2)
        loader = loader_of(mr.ReplayStream(path, sampler, 16), 2, "fork")
        found += [place for batch in loader for place in steps_of(batch)]
    with mr.ReplayBuffer.open(path) as buffer:
        assert sorted(found) == legal(buffer)


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (mr.ShuffledSampler(), "ShuffledSampler"),
        (mr.SequenceSampler(3, mr.UniformSampler()), "UniformSampler"),
        (
            mr.MixtureSampler([(mr.UniformSampler(0), 1), (mr.RecentSampler(9, 0.5), 1)]),
            "MixtureSampler",
        ),
        (
            mr.MixtureSampler([(mr.UniformSampler(0), 1), (mr.RecentSampler(9, 0.5), 1)], seed=0),
            "RecentSampler",
        ),
    ],
)
def test_ranks_with_seeds_of_their_own_are_refused(path, sampler, name):
    refused = (
        f"num_ranks: the {name} has no seed, so each of 2 ranks would draw by another "
        r"one\. Pass the same seed=\.\.\."
    )
    with pytest.raises(SchemaError, match=refused):
        mr.ReplayStream(path, sampler, 16, rank=0, num_ranks=2)
    mr.ReplayStream(path, sampler, 16)
    # One that goes on from a state has the seed of that one.
    sampler.load_state_dict(sampler.state_dict())
    mr.ReplayStream(path, sampler, 16, rank=0, num_ranks=2)


def test_ranks_of_a_sampler_need_a_seed_as_those_of_a_stream(path):
    sampler = mr.ShuffledSampler(rank=1, num_ranks=2)
    with pytest.raises(SchemaError, match="num_ranks: the ShuffledSampler has no seed"):
        mr.ReplayStream(path, sampler, 16)


def test_without_an_end_there_is_no_length(path):
    stream = mr.ReplayStream(path, mr.UniformSampler(0), 16)
    with pytest.raises(TypeError, match="draws without num_batches have no length"):
        len(stream)
    loader = loader_of(stream, 2, "fork")
    assert len(list(itertools.islice(loader, 5))) == 5


def test_transforms_are_made_in_the_workers(path):
    stack = [mr.FrameStack(3, paths="observation/pixels")]
    stream = stream_of(path, "uniform", transforms=stack)
    with mr.ReplayBuffer.open(path, transforms=stack) as buffer:
        for batch in loader_of(stream, 2, "fork"):
            same_as_take(buffer, batch)
            assert batch["observation/pixels"].shape[1] == 3


def test_epochs_of_a_buffer_that_is_being_written_are_refused(tmp_path):
    buffer = fill(tmp_path / "b", close=False)
    refused = r"being written.*ReplayDataset.draws"
    with pytest.raises(SchemaError, match=refused):
        stream_of(tmp_path / "b", "shuffled")
    hidden = mr.MixtureSampler([(mr.ShuffledSampler(0), 1), (mr.UniformSampler(1), 1)])
    for sampler in (hidden, mr.RecentSampler(3, 0.5, mr.ShuffledSampler(0))):
        with pytest.raises(SchemaError, match=f"{type(sampler).__name__}.*steps"):
            mr.ReplayStream(tmp_path / "b", sampler, 8)
    # Draws without epochs follow the writer.
    stream = mr.ReplayStream(tmp_path / "b", mr.UniformSampler(0), 64, 40)
    for first, batch in zip(range(200, 900, 7), loader_of(stream, 2, "fork"), strict=False):
        number = batch["observation/number"]
        assert (number == 2 * batch.positions + batch.env_ids).all()
        buffer.extend(steps(first, 7))
    buffer.close()
    # Made before a writer came, they are refused with the first batch.
    stream = stream_of(tmp_path / "b", "shuffled")
    with mr.ReplayBuffer.open(tmp_path / "b", mode="r+"):
        batches = iter(stream)
        with pytest.raises(SchemaError, match=refused):
            next(batches)


def test_a_buffer_in_ram_serves_its_own_process():
    buffer = fill(None, engine="memory", close=False)
    sampler = mr.UniformSampler(0)
    for batch in loader_of(mr.ReplayStream(buffer, sampler, 8, 3)):
        same_as_take(buffer, batch)


def test_a_pickle_holds_the_path_and_no_data(path):
    stream = stream_of(path, "shuffled")
    data = pickle.dumps(stream)
    assert len(data) < 8 * 1024 + 4096
    again = pickle.loads(data)
    assert [steps_of(b) for b in again] == [steps_of(b) for b in stream]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_pinned_where_there_is_a_gpu(path, workers):
    stream = stream_of(path, "uniform")
    for batch in loader_of(stream, workers, "spawn", pin_memory=True):
        assert all(batch[name].is_pinned() for name in batch)
        on_gpu = batch.to("cuda", non_blocking=True)
        assert np.array_equal(on_gpu.positions.cpu(), batch.positions)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_pin_memory_without_a_gpu_is_only_warned_of(path):
    loader = loader_of(stream_of(path, "uniform"), 2, "fork", pin_memory=True)
    with pytest.warns(UserWarning, match="pin_memory"):
        found = [steps_of(batch) for batch in loader]
    assert found == [steps_of(batch) for batch in stream_of(path, "uniform")]


@pytest.mark.parametrize("laps", [1, 3])
def test_a_draw_that_the_writer_lapped_is_made_anew(tmp_path, monkeypatch, laps):
    writer = fill(tmp_path / "b", close=False)
    stream = mr.ReplayStream(tmp_path / "b", mr.UniformSampler(seed=0), 16)
    gather, lapped = mr.ReplayDataset.__getitem__, []

    def late(dataset, draw):
        if len(lapped) < laps:
            lapped.append(draw)
            writer.extend(steps(int(writer.heads[0]), 2 * writer.capacity))
        return gather(dataset, draw)

    monkeypatch.setattr(mr.ReplayDataset, "__getitem__", late)
    with writer:
        batch = next(iter(stream))
        assert len(batch) == 16
        assert min(batch.positions) >= writer.heads.min() - writer.capacity
    number = batch["observation/number"]
    assert (number == batch.positions * 2 + batch.env_ids).all()


def test_a_writer_that_laps_every_draw_is_reported(tmp_path, monkeypatch):
    writer = fill(tmp_path / "b", close=False)
    stream = mr.ReplayStream(tmp_path / "b", mr.UniformSampler(seed=0), 16)
    gather = mr.ReplayDataset.__getitem__

    def late(dataset, draw):
        writer.extend(steps(int(writer.heads[0]), 2 * writer.capacity))
        return gather(dataset, draw)

    monkeypatch.setattr(mr.ReplayDataset, "__getitem__", late)
    with writer, pytest.raises(StaleError, match="overwritten before they were read"):
        next(iter(stream))
