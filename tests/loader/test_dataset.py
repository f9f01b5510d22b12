"""ReplayDataset: draws and single steps are what the buffer's take gives."""

import io
import os
import pickle
import threading

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.errors import EmptyError, FormatError, SchemaError, StaleError, StarvedError
from tests.loader.support import fill, legal, same_as_take, steps


def draw_of(steps):
    env_ids, positions = np.array(steps, np.int64).reshape(-1, 2).T.copy()
    count = len(positions)
    return mr.Draw(env_ids, positions, np.full(count, 0.25), np.full(count, 0.5, np.float32))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("loader") / "b"
    fill(path)
    return path


def test_a_draw_is_gathered_whole(path):
    dataset = mr.ReplayDataset(path)
    draw = next(iter(dataset.draws(mr.UniformSampler(seed=0), 64)))
    batch = dataset[draw]
    same_as_take(dataset.buffer, batch)
    np.testing.assert_array_equal(batch.positions, draw.positions)
    np.testing.assert_array_equal(batch.env_ids, draw.env_ids)
    assert batch["observation/pixels"].shape == (64, 64, 65)
    assert batch["brain"].dtype == torch.bfloat16
    assert "next_observation/number" in batch


def test_a_draw_keeps_its_probabilities_and_weights(path):
    batch = mr.ReplayDataset(path)[draw_of([(0, 150), (1, 151)])]
    assert batch.probabilities.tolist() == [0.25, 0.25]
    assert batch.weights.tolist() == [0.5, 0.5]


def test_tensors_of_a_batch_share_no_memory(path):
    batch = mr.ReplayDataset(path)[draw_of([(0, 150), (1, 151)])]
    storages = [batch[name].untyped_storage() for name in batch]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    for name, storage in zip(batch, storages, strict=True):
        assert storage.nbytes() == batch[name].nbytes


def test_length_is_the_number_of_legal_starts(path):
    dataset = mr.ReplayDataset(path)
    assert len(dataset) == len(legal(dataset.buffer))


def test_every_rank_is_one_legal_start_in_order(path):
    dataset = mr.ReplayDataset(path)
    numbers = [item["observation"]["number"].item() for item in dataset]
    assert numbers == [2 * p + e for e, p in legal(dataset.buffer)]


def test_a_single_step_is_a_nested_dict_that_torch_stacks(path):
    dataset = mr.ReplayDataset(path)
    item = dataset[5]
    place = legal(dataset.buffer)[5]
    expected = dataset.buffer.take(*([i] for i in place)).torch()
    assert item.keys() == expected.data.keys()
    assert item["action"].shape == (3,)
    assert item["brain"].dtype == torch.bfloat16
    for part in ("observation", "next_observation"):
        for name, tensor in item[part].items():
            assert (tensor == expected[f"{part}/{name}"][0]).all()
    stacked = torch.utils.data.default_collate([item, dataset[6]])
    assert stacked["observation"]["pixels"].shape == (2, 64, 65)


def test_many_ranks_are_gathered_at_once_in_their_order(path):
    dataset = mr.ReplayDataset(path)
    ranks = [9, 0, 9, len(dataset) - 1, -1]
    items = dataset.__getitems__(ranks)
    one_by_one = [dataset[rank] for rank in ranks]
    for many, one in zip(items, one_by_one, strict=True):
        assert (many["observation"]["number"] == one["observation"]["number"]).all()
    assert dataset.__getitems__([]) == []


def test_an_open_buffer_may_be_given(tmp_path):
    buffer = fill(tmp_path / "b", close=False)
    dataset = mr.ReplayDataset(buffer)
    assert dataset.buffer is buffer
    before = len(dataset)
    buffer.extend(steps(200, 1))
    assert len(dataset) != before or legal(buffer)[-1][1] == 199
    buffer.close()


def test_a_buffer_in_ram_serves_the_process_it_is_in():
    dataset = mr.ReplayDataset(fill(None, engine="memory", close=False))
    batch = dataset[next(iter(dataset.draws(mr.UniformSampler(0), 8)))]
    same_as_take(dataset.buffer, batch)
    assert len(dataset) == len(legal(dataset.buffer))


def test_a_buffer_in_ram_is_not_pickled():
    dataset = mr.ReplayDataset(fill(None, engine="memory", close=False))
    with pytest.raises(SchemaError, match="ReplayDataset: the buffer is in the RAM of"):
        pickle.dumps(dataset)


def test_a_pickle_is_the_path_and_opens_when_used(path):
    data = pickle.dumps(mr.ReplayDataset(path))
    assert len(data) < 400
    again = pickle.loads(data)
    assert again._buffer is None
    assert len(again) == len(mr.ReplayDataset(path))


def test_a_writers_lock_does_not_travel(tmp_path):
    buffer = fill(tmp_path / "b", close=False)
    again = pickle.loads(pickle.dumps(mr.ReplayDataset(buffer)))
    assert not again.buffer.writable
    buffer.close()


@pytest.mark.parametrize("engine", ["memmap", "memory"])
def test_a_forked_child_opens_its_own(tmp_path, engine):
    path = tmp_path / "b" if engine == "memmap" else None
    buffer = fill(path, engine=engine, close=False)
    dataset = mr.ReplayDataset(buffer)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = f"{dataset.buffer is buffer} {dataset.buffer.writable}"
        except SchemaError as error:
            told = str(error)
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with io.FileIO(read) as pipe:
        told = pipe.read().decode()
    buffer.close()
    if engine == "memmap":
        assert told == "False False"
    else:
        assert "the buffer is in the RAM of another process" in told


@pytest.mark.parametrize("rank", [10_000, -10_000])
def test_a_rank_beyond_the_legal_starts_is_refused(path, rank):
    dataset = mr.ReplayDataset(path)
    count = len(dataset)
    pattern = rf"rank -?\d+ must be in \[0, {count}\), as the buffer has {count} legal"
    with pytest.raises(IndexError, match=pattern):
        dataset[rank]
    with pytest.raises(IndexError, match=pattern):
        dataset.__getitems__([0, rank])


def test_ranks_that_a_writer_took_away_begin_again(tmp_path):
    buffer = fill(tmp_path / "b", close=False)
    dataset = mr.ReplayDataset(tmp_path / "b")
    before = len(dataset)
    buffer.clear([0])
    assert len(dataset) < before
    items = dataset.__getitems__([before - 1])
    assert items[0]["observation"]["number"].item() % 2 == 1
    with pytest.raises(IndexError, match="Read len"):
        dataset[before - 1]
    buffer.clear()
    with pytest.raises(EmptyError, match="its writer cleared it"):
        dataset.__getitems__([before - 1])
    buffer.close()


@pytest.mark.parametrize("index", [1.5, "a", None, slice(3), [1]])
def test_an_index_is_an_integer_or_a_draw(path, index):
    with pytest.raises(SchemaError, match="index must be an integer or a Draw, got"):
        mr.ReplayDataset(path)[index]


@pytest.mark.parametrize("complete", [True, False])
def test_another_buffers_draw_is_refused(path, tmp_path, complete):
    """Its positions would be gathered from rows it never saw."""
    fill(tmp_path / "other")
    other, dataset = mr.ReplayDataset(tmp_path / "other"), mr.ReplayDataset(path)
    draw = next(iter(other.draws(mr.UniformSampler(seed=0), 8)))
    if not complete:
        draw = draw.taken(np.arange(3))
    with pytest.raises(SchemaError, match=r"index must be a draw.*got one of buffer"):
        dataset[draw]
    assert len(other[draw]) == len(draw)


def test_a_draw_that_a_sampler_keeps_is_not_marked(path, tmp_path):
    """One that draws the same steps each time may serve two datasets."""

    class Fixed(mr.UniformSampler):
        first = None

        def draw(self, view, batch_size):
            self.first = self.first or super().draw(view, batch_size)
            return self.first

    fill(tmp_path / "other")
    fixed = Fixed(seed=0)
    for each in (path, tmp_path / "other", path):
        dataset = mr.ReplayDataset(each)
        assert len(dataset[next(iter(dataset.draws(fixed, 8)))]) == 8
    assert fixed.first.buffer == b""


def test_a_draw_of_a_snapshot_is_of_its_buffer(path, tmp_path):
    """Rows have the same positions in both."""
    with mr.ReplayBuffer.open(path) as buffer:
        buffer.snapshot(tmp_path / "copy")
    dataset, copy = mr.ReplayDataset(path), mr.ReplayDataset(tmp_path / "copy")
    draw = next(iter(copy.draws(mr.UniformSampler(seed=0), 8)))
    one, other = dataset[draw], copy[draw]
    for field in one:
        assert (one[field] == other[field]).all()


def test_a_list_of_draws_names_the_way_out(path):
    dataset = mr.ReplayDataset(path)
    with pytest.raises(SchemaError, match=r"index must be an.*got a list of Draws"):
        dataset.__getitems__([draw_of([(0, 150)])])


def test_numpy_integers_are_integers(path):
    dataset = mr.ReplayDataset(path)
    here = dataset[np.int32(3)]["observation"]["number"]
    assert here == dataset[3]["observation"]["number"]


def drawn_then_overwritten(folder, sampler, count, batch_size=50):
    """A buffer, a dataset, a draw, and which of it was given up since."""
    buffer = fill(folder, close=False)
    dataset = mr.ReplayDataset(folder)
    draw = next(iter(dataset.draws(sampler, batch_size)))
    buffer.extend(steps(200, count))
    dead = draw.positions < buffer.span.first[draw.env_ids]
    assert dead.any()
    assert not dead.all()
    return buffer, dataset, draw, dead


@pytest.mark.parametrize(
    "sampler",
    [mr.UniformSampler(seed=1), mr.ShuffledSampler(seed=1), mr.PrioritizedSampler()],
    ids=lambda sampler: type(sampler).__name__,
)
def test_rows_that_died_since_the_draw_are_left_out_and_counted(tmp_path, sampler):
    """So the rest has its law: no step comes in that the sampler did not draw."""
    made = drawn_then_overwritten(tmp_path / "b", sampler, 40)
    buffer, dataset, draw, dead = made
    batch = dataset[draw]
    same_as_take(buffer, batch)
    for name in ("env_ids", "positions", "probabilities", "weights"):
        expected = getattr(draw, name)[~dead]
        np.testing.assert_array_equal(getattr(batch, name), expected)
    assert dataset.left_out == dead.sum()
    buffer.close()


def test_episodes_of_which_a_step_died_are_left_out_whole(tmp_path):
    sampler = mr.EpisodeSampler(mr.UniformSampler(seed=1), layout="ragged")
    made = drawn_then_overwritten(tmp_path / "b", sampler, 40, 20)
    buffer, dataset, draw, dead = made
    whole = ~np.logical_or.reduceat(dead, draw.offsets[:-1])
    batch = dataset[draw]
    lengths = np.diff(draw.offsets)
    assert np.diff(batch.offsets).tolist() == lengths[whole].tolist()
    first = draw.positions[np.repeat(whole, lengths)]
    np.testing.assert_array_equal(batch.positions, first)
    buffer.close()


def test_a_draw_of_which_nothing_is_left_is_an_error(tmp_path):
    buffer = fill(tmp_path / "b", close=False)
    dataset = mr.ReplayDataset(buffer)
    draw = next(iter(dataset.draws(mr.UniformSampler(seed=1), 5)))
    buffer.clear()
    with pytest.raises(StaleError, match="all 5 steps or windows of a draw were"):
        dataset[draw]
    buffer.close()


def test_rows_that_die_while_they_are_gathered_are_asked_for_anew(tmp_path, monkeypatch):
    buffer = fill(tmp_path / "b", close=False)
    dataset = mr.ReplayDataset(tmp_path / "b")
    draw = draw_of([(0, 101), (1, 180)])
    taken, gather = [], mr.ReplayBuffer.gather

    def slow(self, draw):
        if not taken:
            buffer.extend(steps(200, 30))
        taken.append(draw.positions.tolist())
        return gather(self, draw)

    monkeypatch.setattr(mr.ReplayBuffer, "gather", slow)
    batch = dataset[draw]
    assert taken[0] == [101, 180]
    assert len(taken) == 2
    assert batch.positions.tolist() == [180]
    buffer.close()


def test_a_writer_that_is_always_faster_is_named(tmp_path, monkeypatch):
    buffer = fill(tmp_path / "b", close=False)
    dataset = mr.ReplayDataset(tmp_path / "b")
    number, gather = [200], mr.ReplayBuffer.gather

    def overtaken(self, draw):
        buffer.extend(steps(number[0], 100))
        number[0] += 100
        return gather(self, draw)

    monkeypatch.setattr(mr.ReplayBuffer, "gather", overtaken)
    with pytest.raises(StarvedError, match=r"after 10 attempts.*Enlarge the capacity"):
        dataset[0]
    buffer.close()


def test_a_draw_of_another_buffer_is_refused(path):
    dataset = mr.ReplayDataset(path)
    with pytest.raises(SchemaError, match=r"env_ids must be.*got values in \[5, 5\]"):
        dataset[draw_of([(5, 150)])]
    with pytest.raises(StaleError, match="is not in the buffer"):
        dataset[draw_of([(0, 10_000)])]


def test_what_is_no_buffer_is_refused_at_once(tmp_path):
    with pytest.raises(FormatError, match="does not exist"):
        mr.ReplayDataset(tmp_path / "none")


@pytest.mark.parametrize("name", ["batch_size", "num_batches"])
def test_draws_are_of_at_least_one_step(path, name):
    options = {"batch_size": 4, "num_batches": 4} | {name: 0}
    with pytest.raises(SchemaError, match=f"{name} must be an integer of.*got 0"):
        mr.ReplayDataset(path).draws(mr.UniformSampler(0), **options)


def test_draws_have_a_length_where_they_have_an_end(path):
    dataset = mr.ReplayDataset(path)
    draws = dataset.draws(mr.UniformSampler(0), 4, num_batches=3)
    assert len(draws) == len(list(draws)) == 3
    with pytest.raises(TypeError, match="draws without num_batches have no length"):
        len(dataset.draws(mr.UniformSampler(0), 4))


def test_draws_go_on_with_the_sampler_where_it_is(path):
    dataset = mr.ReplayDataset(path)
    sampler = mr.UniformSampler(0)
    draws = dataset.draws(sampler, 4, num_batches=3)
    first, second = list(draws), list(draws)
    assert sampler.state_dict()["step"] == 6
    assert not np.array_equal(first[0].positions, second[0].positions)


class Watched(mr.UniformSampler):
    """Tells whether another thread could look at the buffer during a draw."""

    def __init__(self, view):
        super().__init__(seed=0)
        self.view, self.open = view, []

    def draw(self, view, batch_size):
        def look():
            if self.view.lock.acquire(blocking=False):
                self.view.lock.release()
                self.open.append(batch_size)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return super().draw(view, batch_size)


def test_a_draw_keeps_other_threads_from_moving_the_view(path):
    dataset = mr.ReplayDataset(path)
    sampler = Watched(dataset.buffer.view)
    assert len(list(dataset.draws(sampler, 8, num_batches=2))) == 2
    assert sampler.open == []


@pytest.mark.parametrize("sampler", [mr.UniformSampler, None, 4])
def test_draws_are_of_a_sampler(path, sampler):
    told = "sampler must have draw, state_dict and load_state_dict, got"
    with pytest.raises(SchemaError, match=told):
        mr.ReplayDataset(path).draws(sampler, 4)
