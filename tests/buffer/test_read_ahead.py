"""The disk is asked for what a gather reads, before the gather does."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.storage.gather import Records
from mmreplay.storage.memmap import MemmapStore
from tests.loader.support import fill, steps

GOAL = {"achieved": "observation/pixels", "desired": "goal", "info": ["extra"]}


def distance(achieved, desired, info):
    """A reward of pixels, which have a file of their own."""
    assert info["extra"].shape == (len(achieved), 3)
    return -np.abs(achieved.astype(np.float32) - desired).mean((1, 2))


def brightness(observations):
    """A value of pixels, which have a file of their own."""
    return observations["observation/pixels"].mean((1, 2))


TRANSFORMS = {
    "steps": [],
    "stack": [mr.FrameStack(4, paths="observation/pixels")],
    "n-step": [mr.NStep(3, gamma=0.9, rewards="reward")],
    "both": [
        mr.FrameStack(2, paths="observation/pixels"),
        mr.NStep(2, gamma=0.9, rewards="reward"),
    ],
    "history": [mr.ActionHistory(3)],
    "returns": [mr.FrameStack(3), mr.Delta("observation/number")],
    "to the end": [mr.DiscountedReturn(0.9)],
    "to the end, valued": [mr.GAE(0.9, value="reward")],
    "to the end, seen": [mr.LambdaReturn(0.9, value=brightness)],
    "some steps, seen": [mr.GAE(0.9, value=brightness, horizon=3)],
    "final ones, seen": [mr.GAE(0.9, value="reward", bootstrap=brightness)],
}
GOALS = {
    f"{strategy}, {name}": [mr.HER(strategy, 0.7, distance, **GOAL), *more]
    for strategy in ("future", "final", "episode")
    for name, more in {
        "alone": [],
        "n-step": [mr.NStep(3, gamma=0.9)],
        "all": [mr.FrameStack(3, paths="observation/pixels"), mr.NStep(2, 0.9)],
    }.items()
}
SAMPLERS = {
    "uniform": lambda: mr.UniformSampler(seed=0),
    "sequences": lambda: mr.SequenceSampler(5, mr.UniformSampler(seed=0)),
    "padded": lambda: mr.SequenceSampler(5, mr.UniformSampler(0), boundary="pad"),
}
FILES = ("observation/pixels", "goal", "action")
"""Fields with a file of their own, and one that lies with the others in records."""
FIELDS = {
    "observation": {"number": mr.Field((), "float32"), "pixels": mr.Field((64, 65), "uint8")},
    "goal": mr.Field((64, 65), "uint8"),
    "action": mr.Field((3,), "float32"),
    "extra": mr.Field((3,), "float32"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}


def made(path, stored):
    """Random steps; next observations are stored or derived."""
    rng, count = np.random.default_rng(0), 150

    def observation():
        return {
            "number": rng.random((count, 2), np.float32),
            "pixels": rng.integers(0, 255, (count, 2, 64, 65), np.uint8),
        }

    more = {"next_observation": observation()} if stored else {}
    fields = FIELDS | dict.fromkeys(more, FIELDS["observation"])
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 100, 2, autoreset="disabled") as buffer:
        buffer.extend(
            observation=observation(),
            goal=rng.integers(0, 255, (count, 2, 64, 65), np.uint8),
            action=rng.random((count, 2, 3), np.float32),
            extra=rng.random((count, 2, 3), np.float32),
            reward=rng.random((count, 2), np.float32),
            terminated=rng.random((count, 2)) < 0.05,
            truncated=rng.random((count, 2)) < 0.05,
            **more,
        )
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ahead")
    return {stored: made(folder / str(stored), stored) for stored in (False, True)}


@pytest.fixture(scope="module")
def path(paths):
    return paths[False]


class Spy:
    """Rows that a store was asked for, and those it read, by field."""

    def __init__(self, monkeypatch, store):
        self.asked, self.read = {}, {}
        gather = MemmapStore.gather

        def noting(of):
            def note(store, rows, paths, now=False):
                for path in paths:
                    for each in store.packed if path in store.packed else (path,):
                        of.setdefault(each, set()).update(rows.tolist())
                return 0

            return note

        def reading(store, rows, paths):
            noting(self.read)(store, rows, paths)
            return gather(store, rows, paths)

        def columns(records, rows, *some):
            noting(self.read)(store, rows.reshape(-1), tuple(store.packed))
            return plain(records, rows, *some)

        def noted_fold(records, *some):
            packed = folded(records, *some)
            num_packed, places = some[5:7]
            rows = places[3 : 3 + num_packed].reshape(-1)
            noting(self.read)(store, rows, tuple(store.packed))
            return packed

        plain, folded = Records.columns, Records.fold_fields
        monkeypatch.setattr(MemmapStore, "prefetch", noting(self.asked))
        monkeypatch.setattr(MemmapStore, "gather", reading)
        monkeypatch.setattr(Records, "columns", columns)
        monkeypatch.setattr(Records, "fold_fields", noted_fold)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("transforms", TRANSFORMS | GOALS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_is_read_was_asked_for(paths, monkeypatch, transforms, sampler, stored):
    to_the_end = transforms.startswith(("to the end", "some steps", "final ones"))
    sampler, transforms = SAMPLERS[sampler](), (TRANSFORMS | GOALS)[transforms]
    with mr.ReplayBuffer.open(paths[stored], transforms=transforms) as buffer:
        for _ in range(5):
            drawn = buffer.view.draw(sampler, 20)
            spy = Spy(monkeypatch, buffer.view._store)
            buffer.view.prefetch(drawn.draw)
            ahead = {name: set(rows) for name, rows in spy.asked.items()}
            buffer.view.gather(drawn)
            monkeypatch.undo()
            assert spy.read
            for name, rows in spy.read.items():
                # Of rows to an episode's end one in each few pages is enough.
                enough = set(rows) if not to_the_end else set(near(rows, ahead[name]))
                assert enough <= ahead[name], name
            # And not much more: what is asked for twice over would be read twice.
            asked, read = (sum(map(len, of.values())) for of in (ahead, spy.read))
            assert asked <= 1.5 * read


def near(rows, asked):
    """Rows that are not within 16 of one that was asked for."""
    there = np.array(sorted(asked))
    return [row for row in rows if np.abs(there - row).min() > 16]


def test_bytes_are_those_of_every_row_of_every_step(path):
    with mr.ReplayBuffer.open(path) as buffer:
        fields = buffer.schema.fields
        observed = fields["observation/number"].nbytes + 64 * 65
        rest = 64 * 65 + 2 * 3 * 4 + 4 + 1 + 1
        drawn = buffer.view.draw(mr.UniformSampler(seed=0), 20)
        assert buffer.view.nbytes(drawn.draw) == 20 * (2 * observed + rest)
        windows = mr.SequenceSampler(5, mr.UniformSampler(seed=0))
        drawn = buffer.view.draw(windows, 20)
        assert buffer.view.nbytes(drawn.draw) == 100 * (2 * observed + rest)


def test_nothing_is_asked_for_where_all_is_in_memory(path):
    fill_in_ram = fill(None, engine="memory", close=False)
    for buffer in (mr.ReplayBuffer.open(path), fill_in_ram):
        sampler = mr.UniformSampler(seed=0)
        for _ in range(3):
            # The rows were written a moment ago: they are in the page cache.
            drawn = buffer.view.draw(sampler, 20)
            assert buffer.view.prefetch(drawn.draw) == 0
        buffer.close()


class TestOverwritten:
    def test_a_draw_is_made_good_that_was_overwritten_since(self, tmp_path):
        buffer = fill(tmp_path / "b", close=False)
        for sampler in (mr.UniformSampler(0), mr.ShuffledSampler(0)):
            reading = buffer.view
            drawn = reading.draw(sampler, 50)
            first = int(buffer.heads[0])
            buffer.extend(steps(first, 60))
            batch = reading.gather(drawn)
            assert (batch.positions >= first + 60 - buffer.slots).all()
            numbers = batch["observation/number"]
            assert (numbers == 2 * batch.positions + batch.env_ids).all()
            once = isinstance(sampler, mr.ShuffledSampler)
            assert (len(batch) < 50) == once
            if once:
                kept = np.isin(drawn.draw.positions, batch.positions)
                assert kept.sum() == len(batch)
        buffer.close()

    def test_a_draw_of_which_nothing_is_left_is_drawn_anew(self, tmp_path):
        buffer = fill(tmp_path / "b", close=False)
        for sampler in (mr.UniformSampler(0), mr.ShuffledSampler(0)):
            reading = buffer.view
            drawn = reading.draw(sampler, 50)
            buffer.extend(steps(int(buffer.heads[0]), 200))
            assert len(reading.gather(drawn)) == 50
        buffer.close()
