"""Whatever happens to a buffer, a reader written from docs/format.md reads the same.

It also finds every block sum right that the page says is valid, so that the page's
rule for which ones are valid is held to what the writer really keeps.
"""

import shutil

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.testing.disks import QuickDisk, using
from tests.format import independent_reader
from tests.format.support import fill, schema_of, step_of
from tests.slices import count

SEEDS = 12
TURNS = count(25, 15)


def assert_same(folder):
    """Both readers find the same rows; returns how many blocks were checked."""
    theirs = independent_reader.read(folder)
    with mr.ReplayBuffer.open(folder) as buffer:
        span, ours = buffer.span, buffer.gather_all()
    assert theirs["first"].tolist() == span.first.tolist()
    assert theirs["stop"].tolist() == span.stop.tolist()
    for env, (flags, columns) in enumerate(theirs["envs"]):
        mine = ours.env_ids == env
        assert np.array_equal((flags & 8) != 0, ours["final"][mine])
        for path, column in columns.items():
            if isinstance(column, list):
                values = [value.tobytes() for value in ours[path][mine]]
                assert column == values, (env, path)
                continue
            assert column.tobytes() == ours[path][mine].tobytes(), (env, path)
    return theirs["blocks"]


@pytest.fixture
def quick_disk():
    with using(QuickDisk()):
        yield


def _layout(rng, engine, varies):
    """Shards follow the heaps of single environments."""
    drawn = str(rng.choice(["env_major", "time_major"]))
    return "env_major" if varies and engine == "zarr" else drawn


class Random:
    """A buffer that random things happen to."""

    def __init__(self, folder, rng, engine="memmap", varies=False):
        self.folder, self.rng, self.number = folder, rng, 0
        self.varies = varies
        more = {"pixels": mr.Field((4096,), "uint8")}
        if varies:
            more["text"] = mr.Field.text(max_bytes=90)
            more["pairs"] = mr.Field((None, 2), "int16", max_length=100)
        self.num_envs = int(rng.integers(1, 4))
        self.buffer = mr.ReplayBuffer.create(
            folder,
            schema_of(**more),
            int(rng.choice([1, 2, 7, 40, 64])),
            self.num_envs,
            layout=_layout(rng, engine, varies),
            autoreset=str(rng.choice(["disabled", "same_step", "next_step"])),
            commit_every=None,
            engine=engine,
            heap_bytes=4096 if varies else None,
        )

    def do(self, action):
        """Let one thing happen, and what it has the sealing thread do."""
        getattr(self, action)()
        sealing = getattr(self.buffer._files.store, "sealing", None)
        if sealing is not None:
            sealing.seal_now([])

    def steps(self, count):
        made = []
        for _ in range(count):
            step = step_of(self.number, self.num_envs)
            shape = (self.num_envs, 4096)
            step["pixels"] = np.full(shape, self.number % 256, np.uint8)
            if self.varies:
                step |= self.values()
            made.append(step)
            self.number += 1
        return {
            path: [step[path] for step in made]
            if path in ("text", "pairs")
            else np.stack([step[path] for step in made])
            for path in made[0]
        }

    def values(self):
        """Values that vary of one step, some of them empty."""
        lengths = self.rng.integers(-30, 90, self.num_envs).clip(0)
        pairs = [np.full((length, 2), self.number % 999, np.int16) for length in lengths]
        return {"text": ["ab" * (length // 2) for length in lengths], "pairs": pairs}

    def add(self):
        for _ in range(int(self.rng.integers(1, 9))):
            step = {path: column[0] for path, column in self.steps(1).items()}
            self.buffer.add(nest(step))

    def add_some(self):
        ids = np.flatnonzero(self.rng.random(self.num_envs) < 0.5)
        if len(ids):
            step = {
                path: [column[0][env_id] for env_id in ids]
                if isinstance(column, list)
                else column[0][ids]
                for path, column in self.steps(1).items()
            }
            self.buffer.add(nest(step), env_ids=ids)

    def extend(self):
        self.buffer.extend(nest(self.steps(int(self.rng.integers(1, 70)))))

    def commit(self):
        self.buffer.commit()

    def clear(self):
        self.buffer.clear(self.rng.integers(self.num_envs, size=1))

    def dequeue(self):
        if (self.buffer.span.lengths > 2).all():
            self.buffer.dequeue(2)

    def resize(self):
        self.buffer.resize(int(self.rng.choice([1, 5, 33, 70])))

    def reopen(self):
        how = str(self.rng.choice(["break", "truncate", "continue"]))
        self.buffer.close()
        self.buffer = mr.ReplayBuffer.open(self.folder, "r+", on_resume=how, commit_every=None)

    def lose_power(self):
        """Go on from a copy, in which only what was committed is believed."""
        copy = self.folder.with_name(self.folder.name + "x")
        shutil.copytree(self.folder, copy)
        self.buffer.close()
        self.folder = copy
        self.buffer = mr.ReplayBuffer.open(copy, "r+", commit_every=None)


def nest(flat):
    from mmreplay.nesting import unflatten

    return unflatten(flat)


ACTIONS = [
    *("add", "add", "add", "add_some", "extend", "extend", "commit", "commit"),
    *("clear", "dequeue", "resize", "reopen", "lose_power"),
]


@pytest.mark.parametrize(
    ("engine", "seed"),
    [("memmap", seed) for seed in range(SEEDS)] + [("zarr", seed) for seed in range(2)],
)
@pytest.mark.sliced(5)
def test_random_buffers_of_values_that_vary_read_equal(tmp_path, engine, seed, quick_disk):
    random = Random(tmp_path / "b", np.random.default_rng(seed), engine, varies=True)
    actions = [action for action in ACTIONS if action != "resize"]
    for turn in range(TURNS):
        random.do(str(random.rng.choice(actions)))
        assert_same(random.folder)
        if turn % 5 == 0:
            assert_same(shutil.copytree(random.folder, tmp_path / f"copy{turn}"))
    random.extend()
    random.buffer.close()
    assert_same(random.folder)
    assert (random.buffer.metadata.heap_nbytes, random.number > 20) == (4096, True)


def test_the_independent_reader_sees_a_damaged_value(tmp_path):
    schema = mr.Schema({"text": mr.Field.text(max_bytes=9)})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 48, heap_bytes=4096) as buffer:
        buffer.add({"text": "value"})
    path = tmp_path / "b" / "data-000001" / "heap.bin"
    data = bytearray(path.read_bytes())
    data[2] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError):
        independent_reader.read(tmp_path / "b")


@pytest.mark.parametrize(
    ("engine", "seed"),
    [("memmap", seed) for seed in range(SEEDS)] + [("zarr", seed) for seed in range(4)],
)
@pytest.mark.sliced(5)
def test_random_buffers_read_equal_live_and_copied(tmp_path, engine, seed, quick_disk):
    random = Random(tmp_path / "b", np.random.default_rng(seed), engine)
    checked = 0
    for turn in range(TURNS):
        random.do(str(random.rng.choice(ACTIONS)))
        checked += assert_same(random.folder)
        if turn % 5 == 0:
            copy = shutil.copytree(random.folder, tmp_path / f"copy{turn}")
            checked += assert_same(copy)
    random.extend()
    random.add()
    random.buffer.close()
    assert checked + assert_same(random.folder) > 0


def test_the_independent_reader_sees_a_damaged_row(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "b", schema_of(), 48, 2, autoreset="disabled") as buffer:
        fill(buffer, 0, 20)
    path = tmp_path / "b" / "data-000001" / "records.bin"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError, match=r"\(0, 0\)"):
        independent_reader.read(tmp_path / "b")
