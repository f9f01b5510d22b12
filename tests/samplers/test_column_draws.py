"""Draws by a column beside a live writer, through transforms, and inside each other."""

import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError

FIELDS = {
    "group": mr.Field((), "int64"),
    "version": mr.Field((), "int64"),
    "observation": mr.Field((2,), "int64"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
}

WRITER = """
import sys
import numpy as np
import mmreplay as mr
buffer = mr.ReplayBuffer.open(sys.argv[1], "r+", commit_every=None)
head = int(buffer.heads[0])
print("ready", flush=True)
# A block while the other side draws, sixteen of which are a lap.
while sys.stdin.readline():
    numbers = np.arange(head, head + 64)
    buffer.extend(
        group=numbers // 4, version=numbers // 16,
        observation=np.stack([numbers, -numbers], 1),
        reward=(numbers % 3).astype(np.float32), terminated=np.ones(64, bool),
    )
    head += 64
    print(head, flush=True)
"""


def steps_of(numbers):
    return {
        "group": numbers // 4,
        "version": numbers // 16,
        "observation": np.stack([numbers, -numbers], 1),
        "reward": (numbers % 3).astype(np.float32),
        "terminated": np.ones(len(numbers), bool),
    }


class Written:
    """A ring that another process laps, and its reader."""

    def __init__(self, path):
        self.child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.child.stdout.readline() == "ready\n"
        self.reader = mr.ReplayBuffer.open(path)

    @contextmanager
    def adding(self):
        """Have a block added at the same time."""
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        yield self.reader
        assert self.child.stdout.readline()

    def close(self):
        self.reader.close()
        self.child.communicate()


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "ring"
    with mr.ReplayBuffer.create(path, mr.Schema(FIELDS), 1000) as buffer:
        buffer.extend(steps_of(np.arange(256)))
    written = Written(path)
    yield written
    written.close()


@pytest.mark.slow
def test_rows_that_are_found_while_a_writer_laps_hold_their_value(written):
    rng = np.random.default_rng(0)
    reader, hits = written.reader, 0
    for _ in range(400):
        span = reader.span
        values = rng.integers(max(0, span.first[0] - 300), span.stop[0] + 300, 20) // 4
        with written.adding():
            env_ids, positions = reader.find("group", values)
        for value, ids, found in zip(values, env_ids, positions, strict=True):
            # By its position each row is known, whatever the writer did since.
            assert (found // 4 == value).all()
            assert (ids == 0).all()
            assert sorted(set(found.tolist()), reverse=True) == found.tolist()
            hits += len(found)
    assert hits > 1000
    reader.find("group", 0)
    assert reader.span.stop[0] == 256 + 400 * 64  # of a ring of 1,000


@pytest.mark.parametrize("uses", [False, True])
@pytest.mark.sliced(1)
def test_groups_are_whole_while_a_writer_laps(written, uses):
    reader = written.reader
    sampler = mr.GroupSampler("group", 4, "reward_varies", seed=0)
    reader.sampler = mr.UseCounter(1, sampler) if uses else sampler
    seen = set()
    for _ in range(200):
        with written.adding():
            batch = reader.sample(5)
        groups = batch["group"].reshape(-1, 4)
        assert (groups == groups[:, :1]).all()
        numbers = batch["observation"][:, 0].reshape(-1, 4)
        assert (numbers == 4 * groups[:, :1] + np.arange(4)).all()
        assert (batch["observation"][:, 1] == -numbers.reshape(-1)).all()
        rewards = batch["reward"].reshape(-1, 4)
        assert (rewards.max(1) > rewards.min(1)).all()
        if uses:
            assert not seen & set(groups[:, 0].tolist())
            seen |= set(groups[:, 0].tolist())
    assert not uses or len(seen) > 500


@pytest.mark.slow
def test_recent_steps_are_recent_while_a_writer_laps(written):
    reader = written.reader
    sampler = mr.StalenessSampler("version", 0, 3, seed=0)
    reader.sampler = sampler
    for _ in range(200):
        current = int(reader.span.stop[0]) // 16
        sampler.move_to(current)
        with written.adding():
            batch = reader.sample(32)
        assert (batch["version"] >= current - 3).all()
        assert (batch["version"] == batch["observation"][:, 0] // 16).all()


def episodes(count):
    """Episodes of four steps, each a group."""
    numbers = np.arange(4 * count)
    return steps_of(numbers) | {"terminated": numbers % 4 == 3}


SAMPLERS = {
    "groups": lambda: mr.GroupSampler("group", 4, seed=0),
    "staleness": lambda: mr.StalenessSampler("version", 99, seed=0),
    "uses": lambda: mr.UseCounter(9, mr.UniformSampler(seed=0), name=None),
    "uses of groups": lambda: mr.UseCounter(9, mr.GroupSampler("group", 4, seed=0), name=None),
    "uses of recent steps": lambda: mr.UseCounter(
        9, mr.StalenessSampler("version", 99, seed=0), name=None
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_transforms_are_applied_to_what_they_draw(name):
    transforms = [mr.NStep(2, 0.5), mr.FrameStack(2)]
    with mr.ReplayBuffer.create(
        None,
        mr.Schema(FIELDS),
        400,
        engine="memory",
        transforms=transforms,
        sampler=SAMPLERS[name](),
    ) as buffer:
        buffer.extend(episodes(20))
        for _ in range(5):
            batch = buffer.sample(6)
            again = buffer.take(batch.env_ids, batch.positions, key=batch.key)
            for path in batch:
                assert (batch[path] == again[path]).all()
            position = batch.positions
            following = (position % 4 < 3) * ((position + 1) % 3) * 0.5
            assert np.allclose(batch["reward"], position % 3 + following)


def test_windows_begin_at_recent_steps_and_at_unused_ones():
    with mr.ReplayBuffer.create(None, mr.Schema(FIELDS), 400, engine="memory") as buffer:
        buffer.extend(episodes(20))
        recent = mr.StalenessSampler("version", 4, 1, seed=0)
        buffer.sampler = mr.SequenceSampler(2, recent)
        batch = buffer.sample(64)
        assert (batch["version"][:, 0] >= 3).all()
        assert (np.diff(batch["observation"][..., 0], axis=1) == 1).all()
        counter = mr.UseCounter(1, mr.UniformSampler(seed=0), name=None, lease_s=1e6, seed=0)
        buffer.sampler = mr.SequenceSampler(2, counter)
        first = buffer.sample(30)
        second = buffer.sample(30)
        starts = np.concatenate([first.positions, second.positions])
        assert len(set(starts.tolist())) == len(starts) == 60
        with pytest.raises(EmptyError):
            buffer.sample(1)
        assert buffer.acknowledge(first) == 30
        ids, every = np.zeros(80, int), np.arange(80)
        assert counter.uses(buffer.view, ids, every)[first.positions].tolist() == [1] * 30
        assert counter.uses(buffer.view, ids, every).sum() == 30


def test_several_buffers_draw_by_their_columns():
    made = []
    for first in (0, 1000):
        buffer = mr.ReplayBuffer.create(None, mr.Schema(FIELDS), 400, engine="memory")
        buffer.extend(steps_of(np.arange(first, first + 80)))
        buffer.sampler = mr.StalenessSampler("version", (first + 79) // 16, 1, seed=0)
        made.append(buffer)
    both = mr.concat(made, shares=[1, 1], seed=0)
    batch = both.sample(40)
    versions = batch["version"]
    assert (versions[batch.buffer_ids == 0] >= 3).all()
    assert (versions[batch.buffer_ids == 1] >= 66).all()
    assert (batch.buffer_ids == 1).sum() == 20
