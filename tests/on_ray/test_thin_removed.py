"""A ring of thin writers that is removed or replaced while its shard has it open."""

import os
import shutil
import warnings

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import (
    DurabilityWarning,
    FailedError,
    FullError,
    LockedError,
    RemovedError,
    SchemaError,
)
from mmreplay.format import ray_files
from mmreplay.format.metadata import FILE_NAME as METADATA
from mmreplay.ray import thin
from mmreplay.ray.lanes import Lanes, create_lanes
from mmreplay.ray.shard import Shard
from mmreplay.ray.thin import ThinWriter
from mmreplay.testing.disks import QuickDisk, using
from tests.on_ray.thin_support import ShardHere

SCHEMA = mr.Schema({"n": mr.Field((), "int64"), "terminated": mr.Field((), "bool")})
LOST = "does not know this writer any more, so {} rows of this writer are lost"
OLDER = "an older copy of its ring, or lost power: {} rows of this writer are lost"


class World:
    """A shard, its ring, and a writer whose steps are numbered.

    Attributes:
        num_steps: Steps that the writer took.
    """

    def __init__(self, root):
        self.root, self.ring = root, root / "run" / "thin"
        self.ring.parent.mkdir(parents=True)
        self.make()
        self.shard, self.num_steps = ShardHere(root), 0

    def make(self, num_lanes=2, capacity=4000, autoreset="disabled", **create):
        return create_lanes(
            self.ring, SCHEMA, capacity, num_lanes, commit_every=None, autoreset=autoreset, **create
        )

    def begin(self, num_envs=2, **options):
        self.writer = ThinWriter(self.shard, SCHEMA, num_envs, steps=8, **options)
        return self.writer

    def add(self, steps):
        """Add steps, and have them arrive; each has its number in all environments."""
        numbers = np.arange(self.num_steps, self.num_steps + steps)
        block = np.repeat(numbers[:, None], self.writer._num_envs, axis=1)
        self.writer.extend(n=block, terminated=np.zeros_like(block, bool))
        self.num_steps += steps
        self.writer.flush()

    def forget(self):
        """Let the lease end, since its writer is silent, and be forgotten."""
        ended = self.writer._writer
        lanes = self.shard.shard._lanes
        lanes._last_call = {ended: -1e9}
        for _ in range(ray_files.MAX_ENDED + 2):
            ThinWriter(self.shard, SCHEMA, 2).close()
        assert ended not in lanes._leases

    def forget_after(self, calls):
        """Let the lease be forgotten after so many more calls."""
        send, left = self.shard.send, [calls]

        def forgetting(method, *arguments):
            answer = send(method, *arguments)
            left[0] -= 1
            if not left[0]:
                self.shard.send = send
                self.forget()
            return answer

        self.shard.send = forgetting

    def rows(self):
        """Numbers in the ring, by environment."""
        with mr.ReplayBuffer.open(self.ring) as ring:
            rows = ring.gather_all()
            return [rows["n"][rows.env_ids == env].tolist() for env in range(ring.num_envs)]

    def check(self):
        """Each step is in the ring once, or counted as lost; the newest are there."""
        envs, found = self.writer._num_envs, self.rows()
        present = [n for numbers in found for n in numbers]
        numbers, counts = np.unique(present, return_counts=True)
        assert (counts == envs).all()
        assert envs * (self.num_steps - len(numbers)) == self.writer.lost_rows
        return numbers.tolist()

    def copy(self, name="copy"):
        shutil.copytree(self.ring, self.root / name)

    def put(self, name="copy"):
        """Put a copy in the place of the ring, which is moved aside."""
        self.ring.rename(self.root / f"aside-{name}")
        shutil.copytree(self.root / name, self.ring)


@pytest.fixture
def world(tmp_path):
    with using(QuickDisk()):
        made = World(tmp_path)
        yield made
        made.shard.kill()


def test_all_that_arrived_in_a_ring_that_was_made_again_is_counted_as_lost(world):
    writer = world.begin()
    world.add(50)
    shutil.rmtree(world.ring)
    world.make()
    with pytest.warns(DurabilityWarning, match=LOST.format(100)):
        world.add(20)
    assert writer.lost_rows == 100
    assert world.check() == list(range(50, 70))
    writer.close()
    assert world.check() == list(range(50, 70))


@pytest.mark.parametrize("keep", ["published", "committed"])
@pytest.mark.parametrize("before_lease", [True, False])
def test_rows_that_an_older_copy_has_not_are_counted_as_lost(world, keep, before_lease):
    if before_lease:
        world.copy()
    writer = world.begin(keep=keep)
    world.add(50)
    if not before_lease:
        # A copy opens as after a power cut.
        world.shard.shard._lanes.ring.commit()
        world.copy()
    world.add(30)
    world.put()
    had = 0 if before_lease else 50
    lost = 2 * (80 - had)
    with pytest.warns(DurabilityWarning, match=(LOST if before_lease else OLDER).format(lost)):
        world.add(20)
    writer.close()
    assert writer.lost_rows == lost
    assert world.check() == [*range(had), *range(80, 100)]


def test_without_a_folder_calls_raise_and_nothing_is_lost_once_it_is_back(world):
    writer = world.begin()
    world.add(50)
    away = world.root / "away"
    world.ring.rename(away)
    with pytest.raises(RemovedError, match=r"thin, the ring .* was removed\. Put it b"):
        world.add(20)
    # The steps of that call were taken.
    for call in (writer.flush, writer.close):
        with pytest.raises(RemovedError, match="'n0', was removed"):
            call()
    away.rename(world.ring)
    writer.close()
    assert writer.lost_rows == 0
    assert world.rows() == [[*range(50), *range(50, 70)]] * 2


def test_close_says_that_the_ring_is_gone_or_counts_what_a_new_one_has_not(world):
    writer = world.begin()
    world.add(50)
    shutil.rmtree(world.ring)
    with pytest.raises(RemovedError):
        writer.close()
    world.make()
    with pytest.warns(DurabilityWarning, match=LOST.format(100)):
        writer.close()
    assert writer.lost_rows == 100


def test_a_shard_that_was_restarted_says_that_a_leased_ring_is_gone(world):
    writer = world.begin()
    world.add(50)
    shutil.rmtree(world.ring)
    world.shard.restart()
    with pytest.raises(RemovedError, match="the ring for thin writers of the node"):
        writer.close()
    shutil.rmtree(world.root)
    world.shard.restart()
    with pytest.raises(RemovedError, match="the ring for thin writers of the node"):
        writer.close()
    world.ring.parent.mkdir(parents=True)
    with pytest.raises(FailedError, match="has no ring for thin writers"):
        ThinWriter(world.shard, SCHEMA)


def test_rows_of_earlier_leases_are_counted_too(world):
    writer = world.begin(num_envs=1)
    world.add(30)
    # Both environments go to others, since this writer is silent.
    now = [0.0]
    world.shard.shard._lanes._clock = lambda: now[0]
    world.shard.shard._lanes._last_call = dict.fromkeys([writer._writer], -1e9)
    other = ThinWriter(world.shard, SCHEMA, 2)
    other.close()
    world.copy()
    world.add(20)
    assert len(writer._former_leases) == 1
    assert world.check() == list(range(50))
    world.shard.shard._lanes.ring.commit()
    # A copy of before the second lease has the rows of the first one.
    world.put()
    with pytest.warns(DurabilityWarning, match=LOST.format(20)):
        world.add(10)
    assert writer.lost_rows == 20
    assert world.check() == [*range(30), *range(50, 60)]
    # And a new ring has none: first the newest lease is missed, then those before.
    shutil.rmtree(world.ring)
    world.make()
    with pytest.warns(DurabilityWarning) as caught:
        world.add(10)
    assert [str(each.message).count("are lost") for each in caught] == [2]
    writer.close()
    assert writer.lost_rows == 60
    assert world.check() == [*range(60, 70)]


def test_a_copy_in_which_the_lease_before_holds_gives_its_environments(world):
    """The ring has no others: who has them in the copy is this writer itself."""
    writer = world.begin()
    world.add(10)
    world.shard.shard._lanes.ring.commit()
    world.copy()
    world.add(10)
    world.put()
    with pytest.warns(DurabilityWarning, match=OLDER.format(20)):
        world.add(10)
    # The lease of now is not in the copy, and the one before it holds there.
    world.ring.rename(world.root / "second")
    shutil.copytree(world.root / "copy", world.ring)
    with pytest.warns(DurabilityWarning, match=LOST.format(20)):
        world.add(10)
    writer.close()
    assert writer.lost_rows == 40
    assert world.check() == [*range(10), *range(30, 40)]


@pytest.fixture
def forgetful(monkeypatch):
    """Rings remember two leases that ended."""
    monkeypatch.setattr(ray_files, "MAX_ENDED", 2)


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("keep", ["published", "committed"])
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_blocks_that_a_forgotten_lease_did_not_take_are_sent_in_another(world, ahead, keep):
    writer = world.begin(num_envs=1, ahead=ahead, keep=keep)
    world.add(16)
    world.forget()
    # Each call is answered, and nothing is in doubt. A warning would be an error here.
    world.add(40)
    writer.close()
    assert writer.lost_rows == 0
    assert world.check() == list(range(56))


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    ("ahead", "unanswered", "in_doubt"), [(1, 1, 8), (2, 2, 16), (2, 1, 0), (4, 3, 0)]
)
def test_a_forgotten_lease_doubles_no_block_and_loses_only_those_in_doubt(
    world, ahead, unanswered, in_doubt
):
    writer = world.begin(num_envs=1, ahead=ahead)
    world.add(16)
    # The first calls run and are not answered; an answer of a later one says so too.
    world.shard.unanswered = unanswered
    world.forget_after(ahead)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world.add(40)
    messages = [str(each.message) for each in caught]
    if in_doubt:
        assert messages == [
            f"the shard {LOST.format(in_doubt)}. They may be in the ring, and are not "
            "sent again. Make rings with an idle_s above the longest pause of a writer."
        ]
    else:
        assert not messages
    writer.close()
    assert writer.lost_rows == in_doubt
    numbers = sorted(n for own in world.rows() for n in own)
    assert numbers == list(range(56))


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("commits", [False, True])
def test_after_a_full_disk_a_block_is_in_doubt_only_where_its_call_committed(
    world, monkeypatch, commits
):
    if commits:
        monkeypatch.setattr(thin, "UNCOMMITTED_NBYTES", 0)
    writer = world.begin(num_envs=1, keep="committed")
    world.add(16)

    def full(*arguments):
        raise FullError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(*((ReplayBuffer, "commit") if commits else (Lanes, "_add")), full)
        with pytest.raises(FullError):
            world.add(8)
    world.forget()
    if commits:
        # It was added before the commit.
        with pytest.warns(DurabilityWarning, match=LOST.format(8)):
            writer.flush()
    writer.close()
    assert writer.lost_rows == (8 if commits else 0)
    assert sorted(n for own in world.rows() for n in own) == list(range(24))


@pytest.mark.usefixtures("forgetful")
def test_a_copy_that_forgets_the_lease_has_its_rows_all_the_same(world):
    writer = world.begin(num_envs=1)
    world.add(16)
    world.shard.shard._lanes.ring.commit()
    world.copy()
    world.put()
    world.add(8)
    world.forget()
    world.add(8)
    # Nor is it asked for a lease that it forgot later.
    world.forget()
    writer.flush()
    writer.flush()
    writer.close()
    assert writer.lost_rows == 0
    assert world.check() == list(range(32))


def test_the_warning_says_where_lost_rows_may_be(world):
    """One advice for each reason: of another ring, and of an older copy."""
    world.begin()
    world.add(10)
    world.shard.shard._lanes.ring.commit()
    world.copy()
    world.add(10)
    world.put()
    elsewhere = r"are in the folder that was its ring before, if anywhere\.$"
    with pytest.warns(DurabilityWarning, match=r"Use keep='committed' to have rows"):
        world.add(10)
    shutil.rmtree(world.ring)
    world.make()
    with pytest.warns(DurabilityWarning, match=elsewhere):
        world.writer.close()


@pytest.mark.parametrize("keep", ["published", "committed"])
def test_flush_tells_of_a_removed_ring_also_where_nothing_waits(world, keep):
    writer = world.begin(keep=keep)
    world.add(50)
    shutil.rmtree(world.ring)
    with pytest.raises(RemovedError, match="'n0', was removed"):
        writer.flush()
    world.make()
    with pytest.warns(DurabilityWarning, match=LOST.format(100)):
        writer.flush()
    assert writer.lost_rows == 100
    writer.flush()
    world.add(10)
    writer.close()
    assert writer.lost_rows == 100
    assert world.check() == list(range(50, 60))


def test_flush_tells_of_an_older_copy_also_where_nothing_waits(world):
    writer = world.begin()
    world.add(30)
    world.shard.shard._lanes.ring.commit()
    world.copy()
    world.add(20)
    world.put()
    with pytest.warns(DurabilityWarning, match=OLDER.format(40)):
        writer.flush()
    world.add(10)
    writer.close()
    assert world.check() == [*range(30), *range(50, 60)]


def test_flush_without_a_lease_takes_no_environments_and_still_tells(world):
    """A silent writer may lose its lease to others, and its rows only with the ring."""
    writer = world.begin()
    world.add(50)
    world.shard.shard._lanes._last_call = {writer._writer: -1e9}
    other = ThinWriter(world.shard, SCHEMA, 2)
    for _ in range(2):
        writer.flush()
    assert world.shard.shard._lanes.num_free == 0
    shutil.rmtree(world.ring)
    for call in (writer.flush, writer.close):
        with pytest.raises(RemovedError, match="'n0', was removed"):
            call()
    world.make()
    with pytest.warns(DurabilityWarning, match=LOST.format(100)):
        writer.close()
    assert writer.lost_rows == 100
    other.close()


@pytest.mark.parametrize("steps", [0, 8, 20])
def test_flush_makes_one_call_more_at_most(world, steps):
    writer = world.begin(ahead=1)
    world.add(8)
    calls, send = [], world.shard.send
    world.shard.send = lambda *call: calls.append(call) or send(*call)
    if steps:
        world.add(steps)
    else:
        writer.flush()
    assert len(calls) == max(1, -(-steps // 8))


def test_a_ring_with_a_smaller_reserve_gets_the_blocks_split(world):
    writer = world.begin()
    shutil.rmtree(world.ring)
    with pytest.raises(RemovedError):
        world.add(60)
    world.make(capacity=65)
    with mr.ReplayBuffer.open(world.ring) as ring:
        assert ring.metadata.ring.reserve // 2 < 8
    writer.close()
    assert writer.lost_rows == 0
    assert world.rows() == [list(range(60))] * 2


def test_final_observations_go_with_the_rows_of_their_block():
    from mmreplay.ray.thin import Block

    ended = np.array([[False], [True], [False], [True], [False]])
    columns = {"observation": np.arange(5.0)[:, None]}
    final = {"observation": np.arange(5.0)[:, None] + 0.5}
    whole = Block(columns, final, ended, resets=np.array([False]))
    parts = whole.split(2)
    assert [len(part.ended) for part in parts] == [2, 2, 1]
    joined = np.concatenate([part.final["observation"] for part in parts])
    assert (joined == final["observation"]).all()
    # The first step of a part is a reset where the step before it ended an episode.
    assert [part.resets.tolist() for part in parts] == [[False], [True], [True]]
    assert whole.split(5) == [whole]


def test_a_ring_with_another_autoreset_is_refused(world):
    writer = world.begin()
    world.add(10)
    shutil.rmtree(world.ring)
    world.make(autoreset="next_step")
    with pytest.raises(SchemaError, match="autoreset of the shard's ring must be 'di"):
        world.add(10)
    shutil.rmtree(world.ring)
    world.make()
    with pytest.warns(DurabilityWarning, match=LOST.format(20)):
        writer.close()


def test_the_folder_of_a_run_that_was_made_again_is_locked_again(world, tmp_path):
    writer = world.begin()
    world.add(10)
    (tmp_path / "run").rename(tmp_path / "former")
    world.make()
    with pytest.warns(DurabilityWarning, match=LOST.format(20)):
        world.add(10)
    with pytest.raises(LockedError, match="is served by pid"):
        Shard("run", str(tmp_path), "n1").serve("thin")
    # What it held before is free for others.
    Shard("former", str(tmp_path), "n1").serve("thin")
    writer.close()


def test_a_copy_with_the_times_of_its_original_is_served_instead(world, monkeypatch):
    """Even where the system gives its file the number of the original."""
    writer = world.begin()
    world.add(10)
    world.shard.shard._lanes.ring.commit()
    assert world.shard.shard.info()["rings"]["thin"]["steps"] == 20
    world.copy()
    world.add(10)
    world.put()
    known = world.shard.shard._versions["thin"]
    monkeypatch.setattr(world.shard.shard, "_find_rings", lambda: {"thin": known})
    assert world.shard.shard.info()["rings"]["thin"]["steps"] == 20
    monkeypatch.undo()
    status = os.stat(world.ring / METADATA)
    assert status.st_mtime_ns == known[1]
    with pytest.warns(DurabilityWarning, match=OLDER.format(20)):
        writer.close()


def test_counts_of_a_limiter_are_those_of_the_ring_that_is_there(world):
    shutil.rmtree(world.ring)
    limiter = mr.RateLimiter(samples_per_insert=1.0, min_size=1, error_buffer=1e6)
    world.make(limiter=limiter)
    writer = world.begin()
    world.add(10)
    assert world.shard.shard.counts()["counts"][0] == 20
    shutil.rmtree(world.ring)
    world.make(limiter=limiter)
    assert world.shard.shard.counts()["counts"][0] == 0
    with pytest.warns(DurabilityWarning, match=LOST.format(20)):
        writer.close()
