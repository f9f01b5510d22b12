"""Draws of windows and folded draws: what the buffer makes of what samplers draw."""

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.buffer.reader import GenerationReader
from mmreplay.errors import SchemaError, StaleError
from mmreplay.samplers.base import Draw, Windows
from tests.buffer.support import Twin, schema
from tests.episodes.test_index import legal_rows


class ListedDraws:
    """Hands out draws that were written down, one after the other."""

    def __init__(self, *draws):
        self.draws = list(draws)

    def draw(self, view, batch_size):
        assert view.starts is not None
        draw = self.draws.pop(0)
        assert len(draw) == batch_size
        return draw


def windows_of(*firsts, length=3, key=5):
    """One window of environment 0 from each of these positions on."""
    positions = np.array(firsts)[:, None] + np.arange(length)
    mask = np.ones(positions.shape, bool)
    mask[0, -1] = False
    count = len(firsts)
    return Draw(
        np.zeros(count, np.int64),
        positions[:, 0].copy(),
        np.full(count, 0.25),
        np.full(count, 2, np.float32),
        key,
        Windows(positions, mask),
    )


def running(path, count=12, capacity=100, **options):
    twin = Twin(path, capacity, **options)
    twin.extend([[""]] * count)
    return twin


@pytest.mark.parametrize("engine", ["memmap", "memory"])
@pytest.mark.parametrize("contiguous", [False, True])
def test_a_window_holds_what_its_steps_are_alone(tmp_path, engine, contiguous):
    twin = running(tmp_path / "b" if engine == "memmap" else None)
    twin.buffer.sampler = ListedDraws(windows_of(2, 7))
    batch = twin.buffer.sample(2, contiguous=contiguous)
    positions = [[2, 3, 4], [7, 8, 9]]
    alone = twin.buffer.take(0, np.ravel(positions))
    assert batch.window_positions.tolist() == positions
    assert batch.mask.tolist() == [[True, True, False], [True] * 3]
    assert batch.key == 5
    assert set(batch) == set(alone)
    for path in alone:
        expected = alone[path].reshape(2, 3, *alone[path].shape[1:])
        np.testing.assert_array_equal(batch[path], expected)
        assert not contiguous or batch[path].flags.c_contiguous
    assert "Batch of 2 windows" in repr(batch)


def test_windows_become_tensors_with_their_mask(tmp_path):
    twin = running(tmp_path / "b")
    twin.buffer.sampler = ListedDraws(windows_of(2, 7))
    batch = twin.buffer.sample(2).torch("cpu")
    assert batch.mask.dtype == torch.bool
    assert batch.mask.shape == batch.window_positions.shape == (2, 3)
    assert batch["observation"].shape == (2, 3, 2)


def test_windows_are_drawn_again_where_one_was_overwritten_meanwhile(tmp_path, monkeypatch):
    twin = running(tmp_path / "b", 60, 60)
    slots = twin.buffer.metadata.ring.slots
    plain, calls = GenerationReader.copy_steps, []

    def slow(view, env_ids, positions, *options):
        calls.append(positions.tolist())
        found = plain(view, env_ids, positions, *options)
        if len(calls) == 1:
            twin.extend([[""]] * (slots - 60 + 4))  # position 3 is overwritten
        return found

    monkeypatch.setattr(GenerationReader, "copy_steps", slow)
    head = slots + 4
    fresh = windows_of(head - 9, head - 8, head - 20, length=3)
    with mr.ReplayBuffer.open(tmp_path / "b") as reader:
        reader.sampler = ListedDraws(windows_of(50, 2, 40, length=3), fresh)
        batch = reader.sample(3)
        assert len(calls) == 2
        expected = fresh.windows.positions
        assert batch.window_positions.tolist() == expected.tolist()
        assert batch.positions.tolist() == fresh.positions.tolist()
        assert batch.mask[:, 2].tolist() == [False, True, True]
        np.testing.assert_array_equal(batch["action"], expected + 1)


def test_windows_of_another_length_are_drawn_again_all_of_them(tmp_path, monkeypatch):
    twin = running(tmp_path / "b", 60, 60)
    stale = [np.array([False, True]), None]
    monkeypatch.setattr(GenerationReader, "stale", lambda *_: stale.pop(0))
    draws = windows_of(30, 31), windows_of(41, 42, length=5)
    twin.buffer.sampler = ListedDraws(*draws)
    batch = twin.buffer.sample(2)
    assert batch.positions.tolist() == [41, 42]
    assert batch["reward"].shape == (2, 5)


def test_a_draw_of_windows_is_gathered_where_it_is_handed_to(tmp_path):
    twin = running(tmp_path / "b")
    draw = windows_of(2, 7)
    batch = twin.buffer.gather(draw)
    np.testing.assert_array_equal(batch["action"], draw.windows.positions + 1)
    with pytest.raises(StaleError, match="position 11 of environment 0 cannot be dra"):
        twin.buffer.gather(windows_of(2, 9))
    with pytest.raises(StaleError, match="position 12 of environment 0 is not in the"):
        twin.buffer.gather(windows_of(2, 10))


TRANSFORMS = {
    "nstep": [mr.NStep(3, 0.9)],
    "stack": [mr.FrameStack(3)],
    "both": [mr.NStep(2, 0.9), mr.FrameStack(4)],
}


@pytest.mark.parametrize("stored", [False, True], ids=["derived", "stored"])
@pytest.mark.parametrize("autoreset", ["disabled", "next_step"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_legal_starts_are_those_that_walking_finds(tmp_path, name, autoreset, stored, rng):
    transforms = TRANSFORMS[name]
    twin = Twin(None, 9, 2, stored=stored, autoreset=autoreset, transforms=transforms)
    steps = sum(t.n for t in transforms if isinstance(t, mr.NStep)) or 1
    frames = sum(t.k - 1 for t in transforms if isinstance(t, mr.FrameStack))
    rule = (not stored, autoreset == "next_step", frames, steps - stored)
    for turn in range(60):
        env_ids = rng.permutation(2)[: rng.integers(1, 3)].tolist()
        kinds = rng.choice(["", "t", "u"], len(env_ids), p=[0.8, 0.1, 0.1]).tolist()
        final = autoreset == "disabled" and not stored and turn % 2 == 0
        twin.add(kinds, env_ids, final)
        if turn % 17 == 16:
            twin.buffer.clear([turn % 2])
        expected = naive_starts(twin.buffer, rule)
        view = twin.buffer.view
        count = int(view.starts.lengths.sum()) - view.num_illegal
        assert count == len(expected)
        env_ids, positions = view.start_at(np.arange(count))
        found = list(zip(env_ids.tolist(), positions.tolist(), strict=True))
        assert found == expected
        assert view.legal(env_ids, positions).all()
        if count:
            batch = twin.buffer.sample(40)
            assert set(zip(batch.env_ids, batch.positions, strict=True)) <= set(found)


def naive_starts(buffer, rule):
    view, found = buffer.view, []
    for env_id in range(buffer.num_envs):
        first, stop = int(view.span.first[env_id]), int(view.span.stop[env_id])
        rows = np.arange(first, stop)
        flags = view.flags(np.full(len(rows), env_id), rows).tolist()
        # A list that ends where the newest row is: rows before the first are unknown.
        verdicts = legal_rows([0] * first + flags, first, *rule)
        found += [(env_id, row) for row, said in verdicts.items() if said == "yes"]
    return found


def test_transforms_are_described_and_retained_through_a_resize(tmp_path):
    transforms = [mr.NStep(2, 0.5)]
    twin = running(tmp_path / "b", 6, transforms=transforms)
    assert twin.buffer.transforms == tuple(transforms)
    twin.buffer.resize(200)
    batch = twin.buffer.take(0, [0, 1])
    assert batch["discount"].tolist() == [0.25, 0.25]
    assert batch["next_observation"][:, 0].tolist() == [3, 4]


def test_transforms_that_do_not_fit_leave_no_folder_and_nothing_open(tmp_path):
    bad = [mr.FrameStack(3, "pixels")]
    with pytest.raises(SchemaError, match="FrameStack: 'pixels' must be one of the"):
        mr.ReplayBuffer.create(tmp_path / "b", schema(), 9, transforms=bad)
    assert not (tmp_path / "b").exists()
    Twin(tmp_path / "b", 9).buffer.close()
    with pytest.raises(SchemaError, match="FrameStack: 'pixels' must be one of the"):
        mr.ReplayBuffer.open(tmp_path / "b", "r+", transforms=bad)
    # The lock was given back.
    mr.ReplayBuffer.open(tmp_path / "b", "r+").close()


def test_what_is_no_transform_is_refused(tmp_path):
    with pytest.raises(SchemaError, match=r"transforms must be transforms such.*got 3"):
        mr.ReplayBuffer.create(None, schema(), 9, engine="memory", transforms=[3])


class Noted(mr.UniformSampler):
    """Keeps what it is told instead of priorities."""

    def update_priorities(self, view, env_ids, positions, values, mask=None):
        self.updated = (env_ids, positions, values, mask)
        return 4


def test_priorities_reach_the_sampler_as_arrays(tmp_path):
    twin = running(tmp_path / "b", sampler=Noted(0))
    batch = twin.buffer.sample(5)
    errors = torch.arange(5.0, requires_grad=True)
    assert twin.buffer.update_priorities(batch.torch(), errors) == 4
    env_ids, positions, values, mask = twin.buffer.sampler.updated
    assert positions.tolist() == batch.positions.tolist()
    assert env_ids.tolist() == [0] * 5
    assert values.tolist() == [0, 1, 2, 3, 4]
    assert mask is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_priorities_of_half_the_width_are_accepted_by_a_buffer_and_by_several(dtype):
    sampler = mr.PrioritizedSampler(seed=0)
    buffer = running(None, sampler=sampler).buffer
    errors = torch.tensor([0.5, 2.5, 4.0], dtype=dtype, requires_grad=True)
    for source in (buffer, mr.concat([buffer])):
        batch = source.sample(3)
        source.update_priorities(batch.torch(), torch.zeros(3))
        assert source.update_priorities(batch, errors) == 0
        rows = sampler.priorities.column.ring.rows(batch.env_ids, batch.positions)
        assert sampler.priorities.column.values[rows].tolist() == [0.5, 2.5, 4.0]


def test_priorities_of_windows_come_with_the_mask(tmp_path):
    twin = running(tmp_path / "b", sampler=Noted(0))
    batch = twin.buffer.gather(windows_of(2, 7))
    twin.buffer.update_priorities(batch, [[1, 2, 3], [4, 5, 6]])
    *_, values, mask = twin.buffer.sampler.updated
    assert values.shape == (2, 3)
    assert mask.tolist() == batch.mask.tolist()


def test_a_sampler_without_priorities_says_so(tmp_path):
    twin = running(tmp_path / "b")
    batch = twin.buffer.sample(2)
    with pytest.raises(SchemaError, match=r"update_priorities.*got UniformSampler"):
        twin.buffer.update_priorities(batch, [1, 2])


def test_starts_by_rank_need_no_look_before_and_say_how_many_there_are(tmp_path):
    path = tmp_path / "ring"
    with mr.ReplayBuffer.create(path, mr.Schema({"n": mr.Field((), "int64")}), 9) as w:
        for number in range(12):
            w.add(n=number)
    with mr.ReplayBuffer.open(path) as buffer:
        env_ids, positions = buffer.view.start_at(np.array([0, 8]))
        assert (env_ids.tolist(), positions.tolist()) == ([0, 0], [3, 11])
    with mr.ReplayBuffer.open(path) as buffer:
        told = "ranks must be below 9, the number of legal starts, got 9. Draw"
        with pytest.raises(StaleError, match=told):
            buffer.view.start_at(np.array([0, 9]))
