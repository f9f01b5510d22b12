"""Leases and blocks of one ring, call by call, and killed at each call of the disk."""

import multiprocessing
import os
import signal
from contextlib import suppress

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk import files
from mmreplay.errors import FailedError, FormatError, FullError, SchemaError
from mmreplay.format.ray_files import read_leases
from mmreplay.ray.cluster import UnansweredError
from mmreplay.ray.lanes import Lanes, create_lanes, has_lanes, open_lanes
from mmreplay.testing.disks import FaultyDisk, QuickDisk, using
from tests.on_ray.thin_support import SCHEMA, Feed, add_steps, check_rows, make_writer

A, B, C = ("a" * 32, "b" * 32, "c" * 32)
DESCRIBED = (SCHEMA.to_json(), dict(SCHEMA.roles))


@pytest.fixture(autouse=True)
def quick():
    """A disk that syncs nothing: no power is cut here."""
    with using(QuickDisk()):
        yield


@pytest.fixture
def lanes(tmp_path):
    create_lanes(
        tmp_path / "ring", SCHEMA, 400, 4, idle_s=10.0, commit_every=None, autoreset="disabled"
    )
    lanes = open_lanes(tmp_path / "ring", commit_every=None)
    yield lanes
    lanes.close()


def columns_of(feed, count):
    """The next steps of a feed, none of which ends an episode."""
    never = np.zeros((count, feed.num_envs), bool)
    columns, _ = feed.steps(never, never, with_final=False)
    feed.advance(never, with_final=False)
    return columns


def test_a_lease_is_the_same_however_often_it_is_asked_for(lanes):
    terms = lanes.lease(A, 2, *DESCRIBED)
    assert (
        terms
        == lanes.lease(A, 2, *DESCRIBED)
        == {
            "state": "holds",
            "heads": [0, 0],
            "committed": [0, 0],
            "reserve": lanes.ring.metadata.ring.reserve,
            "autoreset": "disabled",
            "limiter": None,
        }
    )
    assert lanes.num_free == 2
    assert [lease.env_ids for lease in read_leases(lanes.ring.path).leases] == [(0, 1)]
    assert lanes.lease(B, 1, *DESCRIBED)["heads"] == [0]
    with pytest.raises(FailedError, match=r"has 1 of 4 environments free, as 2 other writers have"):
        lanes.lease(C, 2, *DESCRIBED)
    assert lanes.give_back(A) == lanes.give_back(A)
    assert lanes.give_back(A)["state"] == "ended"
    assert lanes.num_free == 3
    assert lanes.lease(A, 2, *DESCRIBED)["state"] == "ended"
    assert lanes.give_back(C)["state"] == "unknown"


def test_a_block_is_added_where_it_follows_the_heads_and_nowhere_else(lanes):
    lanes.lease(A, 2, *DESCRIBED)
    feed = Feed(0, 2)
    blocks = [columns_of(feed, 3) for _ in range(3)]
    assert lanes.extend(A, [0, 0], blocks[0])["heads"] == [3, 3]
    # Again, ahead, half ahead, of another writer, and none.
    assert lanes.extend(A, [0, 0], blocks[0])["heads"] == [3, 3]
    assert lanes.extend(A, [6, 6], blocks[2])["heads"] == [3, 3]
    assert lanes.extend(A, [3, 6], blocks[2])["heads"] == [3, 3]
    assert lanes.extend(B, [3, 3], blocks[1])["state"] == "unknown"
    assert lanes.extend(A, [], None)["heads"] == [3, 3]
    assert lanes.extend(A, [3, 3], blocks[1])["heads"] == [6, 6]
    assert lanes.extend(A, [], None)["committed"] == [0, 0]
    assert lanes.extend(A, [6, 6], blocks[2], None, True) == {
        "state": "holds",
        "heads": [9, 9],
        "committed": [9, 9],
    }
    assert lanes.give_back(A)["heads"] == [9, 9]
    assert lanes.extend(A, [9, 9], blocks[0]) == {
        "state": "ended",
        "heads": [9, 9],
        "committed": [9, 9],
    }
    assert lanes.ring.heads.tolist() == [9, 9, 0, 0]
    check_rows(lanes.ring.path, {0: feed}, {0: 0}, [0])


def test_a_block_is_one_publication_or_is_refused(lanes):
    half = lanes.ring.metadata.ring.reserve // 2
    lanes.lease(A, 1, *DESCRIBED)
    with pytest.raises(SchemaError, match=rf"must have 1 to {half} steps, half of the"):
        lanes.extend(A, [0], columns_of(Feed(0, 1), half + 1))
    assert lanes.extend(A, [0], columns_of(Feed(0, 1), half))["heads"] == [half]
    with pytest.raises(SchemaError, match="must have 1 to"):
        lanes.extend(A, [half], columns_of(Feed(0, 1), 0))


def test_a_full_disk_adds_nothing_and_the_block_may_come_again(lanes):
    lanes.lease(A, 1, *DESCRIBED)
    block = columns_of(Feed(0, 1), 3)
    no_space = OSError(28, "No space left on device")
    with using(FaultyDisk(no_space, 0, 9, names=("allocate", "pwrite"))):
        with pytest.raises(FullError):
            lanes.extend(A, [0], block)
        with pytest.raises(FullError):
            lanes.lease(B, 1, *DESCRIBED)
    assert lanes.extend(A, [], None)["heads"] == [0]
    assert lanes.num_free == 3
    assert lanes.extend(A, [0], block)["heads"] == [3]


@pytest.fixture
def clock():
    """Seconds that a test advances."""
    return [0.0]


def test_silent_writers_lose_their_lanes_to_the_next_and_only_as_many_as_it_needs(tmp_path, clock):
    create_lanes(
        tmp_path / "ring", SCHEMA, 400, 3, idle_s=10.0, commit_every=None, autoreset="disabled"
    )
    with mr.ReplayBuffer.open(
        tmp_path / "ring", "r+", on_resume="continue", commit_every=None
    ) as ring:
        lanes = Lanes(ring, lambda: clock[0])
        lanes.lease(A, 1, *DESCRIBED)
        lanes.lease(B, 1, *DESCRIBED)
        feeds = {0: Feed(0, 1), 1: Feed(1, 2)}
        block = columns_of(feeds[0], 3)
        lanes.extend(A, [0], block)
        clock[0] = 6.0
        lanes.extend(B, [], None)
        clock[0] = 12.0
        assert lanes.num_free == 2
        terms = lanes.lease(C, 2, *DESCRIBED)
        assert sorted(terms["heads"]) == [0, 3]
        assert lanes.extend(A, [3], block) == {"state": "ended", "heads": [3], "committed": [3]}
        assert lanes.extend(B, [], None)["state"] == "holds"
        lanes.extend(C, terms["heads"], columns_of(feeds[1], 4))
        clock[0] = 20.0
        assert lanes.num_free == 0
        assert lanes.extend(B, [], None)["state"] == "holds"
    check_rows(tmp_path / "ring", feeds, {0: 0, 1: 0}, feeds)


def test_a_lease_in_place_of_a_former_one_has_its_lanes_and_begins_episodes(lanes):
    feed = Feed(0, 2)
    lanes.lease(B, 1, *DESCRIBED)
    lanes.lease(A, 2, *DESCRIBED)
    lanes.extend(A, [0, 0], columns_of(feed, 2))
    again = lanes.lease(C, 2, *DESCRIBED, A)
    assert again["heads"] == [2, 2]
    assert lanes.lease(C, 2, *DESCRIBED, A) == again
    assert lanes.extend(A, [2, 2], columns_of(Feed(0, 2), 2))["state"] == "ended"
    lanes.extend(C, [2, 2], columns_of(feed, 2))
    leases = read_leases(lanes.ring.path).leases
    assert [(lease.writer, lease.env_ids) for lease in leases] == [
        (B, (0,)),
        (A, (1, 2)),
        (C, (1, 2)),
    ]
    flags = lanes.ring.flags([1, 2], [2, 2])
    assert flags.tolist() == [mr.episodes.START | mr.episodes.BREAK | mr.episodes.CUT] * 2


def test_an_end_that_no_row_followed_is_declared_again_after_a_restart(tmp_path):
    create_lanes(tmp_path / "ring", SCHEMA, 400, 1, commit_every=None)
    feed = Feed(0, 1)
    lanes = open_lanes(tmp_path / "ring", commit_every=None)
    lanes.lease(A, 1, *DESCRIBED)
    lanes.extend(A, [0], columns_of(feed, 2))
    lanes.give_back(A)
    lanes.lease(B, 1, *DESCRIBED)
    # No warning: the end comes with the row that stores it.
    lanes.close()
    lanes = open_lanes(tmp_path / "ring", commit_every=None)
    lanes.extend(B, [2], columns_of(feed, 2))
    lanes.extend(B, [4], columns_of(feed, 2))
    start, cut = mr.episodes.START | mr.episodes.BREAK, mr.episodes.CUT
    flags = lanes.ring.flags([0] * 6, np.arange(6)).tolist()
    assert flags == [mr.episodes.START, 0, start | cut, 0, 0, 0]
    lanes.close()


def test_a_ring_of_thin_writers_is_made_once(tmp_path):
    path = tmp_path / "ring"
    create_lanes(path, SCHEMA, 100, 2, idle_s=5.0, commit_every=None, autoreset="disabled")
    lanes = open_lanes(path)
    # Also while its shard has it open.
    create_lanes(path, SCHEMA, 100, 2, idle_s=7.0)
    lanes.lease(A, 1, *DESCRIBED)
    lanes.close()
    assert read_leases(path).idle_s == 5.0
    for arguments, message in (
        ((SCHEMA, 101, 2), "capacity must be 100, as of .*ring, got 101"),
        ((SCHEMA, 100, 3), "num_envs must be 2, as of .*ring, got 3"),
        ((mr.Schema({"x": mr.Field((), "int8")}), 100, 2), "has another schema: field"),
    ):
        with pytest.raises(SchemaError, match=message):
            create_lanes(path, *arguments)
    create_lanes(path, SCHEMA, 100, 2, engine="memmap", autoreset="disabled")
    for given, message in (
        ({"engine": "zarr"}, "engine must be 'memmap', as of .*ring, got 'zarr'"),
        ({"autoreset": "next_step"}, "autoreset must be 'disabled', as of .*ring"),
    ):
        with pytest.raises(SchemaError, match=message):
            create_lanes(path, SCHEMA, 100, 2, **given)
    with pytest.raises(SchemaError, match="idle_s must be a finite number above 0"):
        create_lanes(path, SCHEMA, 100, 2, idle_s=0)
    with mr.ReplayBuffer.create(tmp_path / "own", SCHEMA, 100, commit_every=None) as own:
        own.extend({p: c[:, 0] for p, c in columns_of(Feed(0, 1), 3).items()})
    with pytest.raises(SchemaError, match="own is a ring with a writer of its own"):
        create_lanes(tmp_path / "own", SCHEMA, 100, 1)
    assert not has_lanes(tmp_path / "own")


def test_a_new_ring_asks_what_its_environments_do_after_an_end(tmp_path):
    path = tmp_path / "ring"
    with pytest.raises(SchemaError, match="autoreset must say what the 2 environments"):
        create_lanes(path, SCHEMA, 100, 2)
    assert not path.exists()
    create_lanes(path, SCHEMA, 100, 2, autoreset="next_step")
    create_lanes(path, SCHEMA, 100, 2)
    lanes = open_lanes(path)
    assert lanes.lease(A, 1, *DESCRIBED)["autoreset"] == "next_step"
    lanes.close()


def test_a_ring_whose_making_was_killed_is_finished(tmp_path):
    path = tmp_path / "ring"
    mr.ReplayBuffer.create(path, SCHEMA, 100, 2, autoreset="disabled").close()
    create_lanes(path, SCHEMA, 100, 2)
    assert has_lanes(path)


def test_damaged_leases_are_refused_and_the_ring_is_closed(tmp_path):
    path = tmp_path / "ring"
    create_lanes(path, SCHEMA, 100, 2, autoreset="disabled")
    (path / "ray" / "writers.json").write_text("{")
    with pytest.raises(FormatError, match=r"writers\.json"):
        open_lanes(path)
    (path / "ray" / "writers.json").unlink()
    open_lanes(path).close()


def test_another_schema_is_refused(lanes):
    other = mr.Schema({"x": mr.Field((), "float32")})
    with pytest.raises(SchemaError, match=r"another schema: field .* missing here, and"):
        lanes.lease(A, 1, other.to_json(), dict(other.roles))
    with pytest.raises(SchemaError, match="num_envs must be at most 4, the environments"):
        lanes.lease(A, 5, *DESCRIBED)
    with pytest.raises(SchemaError, match="num_envs must be an integer of at least 1"):
        lanes.lease(A, 0, *DESCRIBED)


# A real process, killed at each call that it makes of the disk.


class ProcessShard:
    """Lanes in a child process, which is made again when it was killed.

    Attributes:
        at: The disk's call at which the next child ends itself; None for none.
    """

    def __init__(self, folder, at):
        self.folder, self.at, self.child, self.pipe = folder, at, None, None
        self.kills = 0

    def send(self, method, *arguments):
        return method, arguments

    def receive(self, call, timeout_s):
        if self.child is None:
            context = multiprocessing.get_context("fork")
            self.pipe, end = context.Pipe()
            arguments = self.folder, self.at, end, self.pipe
            self.child = context.Process(target=serve, args=arguments)
            self.child.start()
            end.close()
            # The next child lives.
            self.at = None
        try:
            self.pipe.send(call)
            return self.pipe.recv()
        except (EOFError, OSError):
            self.child.join()
            self.kills += self.child.exitcode == -signal.SIGKILL
            self.child = None
            raise UnansweredError("killed") from None

    def settle(self):
        """Do nothing: nothing prints an error here."""

    def call(self, method, *arguments, timeout_s):
        while True:
            with suppress(UnansweredError):
                return self.receive(self.send(method, *arguments), timeout_s)

    def close(self):
        if self.child is not None:
            self.pipe.close()
            self.child.join()


def serve(folder, at, pipe, other):
    """Answer calls until the other end is closed."""
    other.close()
    files.disk = QuickDisk() if at is None else FaultyDisk("kill", at)
    lanes = open_lanes(folder, commit_every=None)
    with suppress(EOFError):
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(lanes, method)(*arguments))
    os._exit(0)


@pytest.mark.crash
@pytest.mark.slow
def test_a_process_that_is_killed_at_any_call_of_the_disk_loses_and_doubles_nothing(tmp_path):
    at = kills = 0
    while True:
        folder = tmp_path / str(at)
        create_lanes(folder, SCHEMA, 64, 2, commit_every=None, autoreset="disabled")
        shard = ProcessShard(folder, at)
        rng, feeds = np.random.default_rng(at), {}
        for number in range(2):
            keep = ("published", "committed")[number]
            writer, feeds[number] = make_writer(shard, number, 2, steps=4, keep=keep)
            assert add_steps(writer, feeds[number], rng, 14, 0.2) is None
            writer.close()
            assert writer.lost_rows == 0
        shard.close()
        check_rows(folder, feeds, {0: 0, 1: 0}, feeds)
        assert mr.verify_buffer(folder).findings == ()
        if not shard.kills:
            break
        kills += shard.kills
        at += 1
    assert kills > 40


def test_thin_writers_have_no_fields_that_vary(tmp_path):
    schema = mr.Schema({"mission": mr.Field.text(9), "x": mr.Field((), "int32")})
    with pytest.raises(
        SchemaError, match="field 'mission' varies from step to step, which a ring of"
    ):
        create_lanes(tmp_path / "ring", schema, 10, 2)
    assert not list(tmp_path.iterdir())
