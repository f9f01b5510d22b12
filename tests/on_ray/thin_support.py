"""Rows that name themselves and their check; a shard whose calls go wrong by choice."""

import json
import shutil
import warnings
import weakref
import zlib

import numpy as np

import mmreplay as mr
from mmreplay.disk import files
from mmreplay.episodes import BREAK, CUT, END, FINAL, START
from mmreplay.errors import DurabilityWarning, ReplayError
from mmreplay.format.ray_files import read_leases
from mmreplay.ray.cluster import UnansweredError
from mmreplay.ray.lanes import Lanes, create_lanes, has_lanes
from mmreplay.ray.shard import Shard
from mmreplay.ray.thin import ThinWriter
from mmreplay.testing.disks import FaultyDisk, QuickDisk, using
from tools.torture.powerloss import abandon

SCHEMA = mr.Schema(
    {
        "observation": mr.Field((3,), "float32"),
        "writer": mr.Field((), "int64"),
        "env": mr.Field((), "int64"),
        "seq": mr.Field((), "int64"),
        "crc": mr.Field((), "uint32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)


def crc(writer, env, seq):
    return zlib.crc32(f"{writer}/{env}/{seq}".encode())


def observation(writer, env, seq, final=False):
    return np.array([writer, env, seq + (0.5 if final else 0.0)], np.float32)


class Feed:
    """A thin writer's environments, and what they have given it.

    Attributes:
        number: The writer's number, in all of its rows.
        seq: The next step, the same in all environments.
        ended: Steps that ended an episode by environment; with True where a final
            observation was given.
    """

    def __init__(self, number, num_envs):
        self.number, self.num_envs, self.seq = number, num_envs, 0
        self.ended = [{} for _ in range(num_envs)]

    def steps(self, ends, truncated, with_final):
        """Columns ``[T, E]`` of the next steps, and final observations or None.

        Args:
            ends: bool ``[T, E]``.
            truncated: bool ``[T, E]``: rather than terminated.
            with_final: Whether final observations are given.
        """
        count, envs = ends.shape
        numbers = np.arange(self.seq, self.seq + count)
        each = [[(self.number, env, seq) for env in range(envs)] for seq in numbers]
        columns = {
            "observation": np.array([[observation(*row) for row in e] for e in each]),
            "writer": np.full((count, envs), self.number),
            "env": np.tile(np.arange(envs), (count, 1)),
            "seq": np.repeat(numbers[:, None], envs, axis=1),
            "crc": np.array([[crc(*row) for row in e] for e in each], np.uint32),
            "terminated": ends & ~truncated,
            "truncated": ends & truncated,
        }
        last = np.array([[observation(*row, final=True) for row in e] for e in each])
        return columns, last if with_final else None

    def advance(self, ends, with_final):
        """Note that the writer took the steps of `steps`."""
        for step, env in np.argwhere(ends).tolist():
            self.ended[env][self.seq + step] = with_final
        self.seq += len(ends)

    def num_rows(self, env, seqs):
        """Rows that steps of an environment take in the ring."""
        return len(seqs) + sum(self.ended[env].get(seq, False) for seq in seqs)


SHARDS = weakref.WeakSet()
"""Those that were made; `conftest` ends them with their test. A ring that is left open
would be closed in the middle of another test, on the disk that is full there."""


class SimulatedShard:
    """A shard in this process; its calls are lost, late, or killed, by choice.

    Attributes:
        plan: What happens to the next calls that run: None, ``"before"`` and
            ``"after"`` (killed around it), a number (killed at that call of the
            disk), ``"lost"`` (never runs), ``"late"`` (runs after it was given up),
            ``"deliver"`` (late calls run before it), ``"swapped"`` (the next call runs
            first) or ``"full"``.
    """

    def __init__(self, folder, capacity=4000, num_lanes=5, idle_s=600.0):
        self.folder, self.now = folder, 0.0
        with using(QuickDisk()):
            create_lanes(
                folder,
                SCHEMA,
                capacity,
                num_lanes,
                idle_s=idle_s,
                commit_every=None,
                autoreset="disabled",
            )
        self.plan, self.queue, self.late = [], [], []
        self.lanes = None
        self.kills = 0
        SHARDS.add(self)

    def __repr__(self):
        return "the simulated shard"

    def opened(self):
        if self.lanes is None:
            ring = mr.ReplayBuffer.open(self.folder, "r+", on_resume="continue", commit_every=None)
            self.lanes = Lanes(ring, lambda: self.now)
        return self.lanes

    def kill(self):
        """As SIGKILL: what was not answered is not, and may be late."""
        self.kills += 1
        if self.lanes is not None:
            abandon(self.lanes.ring)
        self.lanes = None
        self.late += [call for call in self.queue if call["state"] == "sent"]
        for call in self.queue:
            call["state"] = "failed"
        self.queue.clear()

    def lose_power(self):
        """As a power cut: rows above the last commit are gone."""
        self.kill()
        self.late.clear()
        aside = self.folder.with_name("aside")
        shutil.copytree(self.folder, aside)
        shutil.rmtree(self.folder)
        aside.rename(self.folder)

    def run_late(self):
        """Run the calls that were given up, as a network may bring them late."""
        late, self.late = self.late, []
        for call in late:
            try:
                getattr(self.opened(), call["method"])(*call["arguments"])
            except ReplayError:
                continue

    def send(self, method, *arguments):
        # What travels is what was there when it was sent.
        call = {"method": method, "arguments": _copied(arguments), "state": "sent"}
        self.queue.append(call)
        return call

    def receive(self, call, timeout_s):
        while call["state"] == "sent":
            at = 1 if self.plan[:1] == ["swapped"] and len(self.queue) > 1 else 0
            self._run(self.queue.pop(at))
        if call["state"] == "failed":
            raise UnansweredError("the simulated shard does not answer")
        if call["state"] == "raised":
            raise call["answer"]
        return call["answer"]

    def settle(self):
        """Do nothing: nothing prints an error here."""

    def call(self, method, *arguments, timeout_s):
        for _ in range(20):
            try:
                return self.receive(self.send(method, *arguments), timeout_s)
            except UnansweredError:
                continue
        raise mr.StarvedError("the simulated shard did not answer for long")

    def _run(self, call):
        fault = self.plan.pop(0) if self.plan else None
        if fault in ("lost", "late"):
            call["state"] = "failed"
            if fault == "late":
                self.late.append(call)
            return
        if fault == "deliver":
            self.run_late()
        if fault == "before":
            # It was under way, and is not late.
            self.kill()
            call["state"] = "failed"
            return
        disk = QuickDisk()
        if fault == "full":
            disk = FaultyDisk(
                OSError(28, "No space left on device"), 0, 1000, names=("pwrite", "allocate")
            )
        elif isinstance(fault, int):
            disk = FaultyDisk(Dead(), fault)
        before = files.disk
        files.disk = disk
        try:
            answer = getattr(self.opened(), call["method"])(*call["arguments"])
        except Dead:
            self.kill()
            call["state"] = "failed"
            return
        except ReplayError as error:
            call["state"], call["answer"] = "raised", error
            if fault == "full":
                return
        else:
            # Through JSON: nothing but plain values are answered.
            answer = {**answer, "ring": self.opened().ring.files_identity}
            call["state"], call["answer"] = "done", json.loads(json.dumps(answer))
        finally:
            files.disk = before
        if fault == "after":
            self.kill()
            call["state"] = "failed"


class ShardHere:
    """The shard itself, in this process; `ThinWriter` calls it.

    Attributes:
        shard: The shard; `restart` makes another one.
        unanswered: So many of the next calls run, and are not answered.
    """

    def __init__(self, root):
        self.root, self.unanswered = root, 0
        self.shard = Shard("run", str(root), "n0")
        SHARDS.add(self)

    def __repr__(self):
        return "the shard"

    def restart(self):
        self.kill()
        self.shard = Shard("run", str(self.root), "n0")

    def kill(self):
        lanes, self.shard._lanes = self.shard._lanes, None
        if lanes is not None and not lanes.ring.closed:
            abandon(lanes.ring)
        self.shard.stop()

    def send(self, method, *arguments):
        try:
            answer = getattr(self.shard, method)(*_copied(arguments))
        except ReplayError as error:
            answer = error
        if self.unanswered:
            self.unanswered -= 1
            answer = UnansweredError("the shard does not answer")
        return answer

    def receive(self, answer, timeout_s):
        if isinstance(answer, ReplayError):
            raise answer
        return answer

    def call(self, method, *arguments, timeout_s):
        while True:
            try:
                return self.receive(self.send(method, *arguments), timeout_s)
            except UnansweredError:
                continue

    def settle(self):
        """Do nothing: nothing prints an error here."""


class Dead(BaseException):
    """The simulated process ended here."""


def _copied(value):
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_copied(item) for item in value)
    return value


def quietly(function, *arguments, **options):
    """Call, and return the error or None; warnings of lost rows are expected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DurabilityWarning)
        try:
            function(*arguments, **options)
        except ReplayError as error:
            return error
    return None


def check_rows(folder, feeds, lost_rows, complete, all_alive=True):
    """Check each row of the ring against what the writers were given.

    Args:
        folder: The ring, which nothing writes now.
        feeds: By the writer's number.
        lost_rows: Of each, what its writer counted; None where any number may be.
        complete: Numbers of writers of which every row must be there but the lost.
        all_alive: Nothing was overwritten.

    Returns:
        How many rows there are.
    """
    with mr.ReplayBuffer.open(folder) as ring:
        assert has_lanes(folder)
        rows = ring.gather_all()
        final = rows.fields["final"]
        flags = ring.flags(rows.env_ids, rows.positions)
        present = {(n, e): [] for n, feed in feeds.items() for e in range(feed.num_envs)}
        finals, begins = set(), first_rows(folder)
        for lane in range(ring.num_envs):
            before = None
            for at in np.flatnonzero(rows.env_ids == lane).tolist():
                if final[at] and before is None:
                    # The step before it was overwritten.
                    continue
                if final[at]:
                    check_final(rows, at, flags[at], before, feeds)
                    finals.add(before[0])
                    before = (before[0], True, before[2])
                    continue
                row = tuple(int(rows[name][at]) for name in ("writer", "env", "seq"))
                number, env, seq = row
                assert rows["crc"][at] == crc(*row), row
                assert (rows["observation"][at] == observation(*row)).all(), row
                ended = seq in feeds[number].ended[env]
                assert bool(flags[at] & END) == ended, row
                begins_lease = (lane, int(rows.positions[at])) in begins
                check_boundary(row, flags[at], before, feeds, begins_lease)
                present[number, env].append(seq)
                before = (row, False, ended)
        for (number, env), seqs in present.items():
            # Never twice, and no lease ends within an order of another.
            assert len(set(seqs)) == len(seqs), (number, env)
    if all_alive:
        for number in complete:
            feed, missing = feeds[number], 0
            for env in range(feed.num_envs):
                seqs = set(present[number, env])
                gone = sorted(set(range(feed.seq)) - seqs)
                missing += feed.num_rows(env, gone)
                for seq in seqs:
                    if feed.ended[env].get(seq):
                        assert (number, env, seq) in finals
            if lost_rows[number] is not None:
                assert missing == lost_rows[number], (number, missing)
    return len(final)


def check_final(rows, at, flags, before, feeds):
    row, had_final, ended = before
    number, env, seq = row
    assert ended, row
    assert not had_final, row
    assert feeds[number].ended[env][seq], row
    assert (rows["observation"][at] == observation(*row, final=True)).all(), row
    assert flags & FINAL


def first_rows(folder):
    """Lanes and positions at which a lease began."""
    leases = read_leases(folder).leases
    return {at for each in leases for at in zip(each.env_ids, each.first, strict=True)}


def check_boundary(row, flags, before, feeds, begins_lease):
    """A step follows the one before it, or begins an episode and says so."""
    number, env, seq = row
    if before is None:
        return
    (last, had_final, ended) = before
    # A writer that lost its lease may get the same environments again.
    follows = last == (number, env, seq - 1)
    if follows and not (begins_lease and flags & BREAK):
        assert not flags & BREAK, row
        assert bool(flags & START) == ended, row
        assert had_final == bool(feeds[number].ended[env].get(seq - 1)), row
        return
    assert begins_lease, (row, last)
    assert flags & START, (row, last)
    assert flags & BREAK, (row, last)
    assert bool(flags & CUT) == (not ended), (row, last)


def make_writer(shard, number, num_envs, **options):
    """A thin writer and its feed."""
    return ThinWriter(shard, SCHEMA, num_envs, **options), Feed(number, num_envs)


def add_steps(writer, feed, rng, count, ends=0.1, with_final=True, blocks=False):
    """Add steps one by one or as one block; return an error that was raised."""
    shape = (count, feed.num_envs)
    ended, truncated = rng.random(shape) < ends, rng.random(shape) < 0.5
    if blocks:
        columns, final = feed.steps(ended, truncated, with_final)
        error = quietly(writer.extend, columns, final_observation=final)
        if error is None:
            feed.advance(ended, with_final)
        return error
    for step in range(count):
        one = slice(step, step + 1)
        columns, final = feed.steps(ended[one], truncated[one], with_final)
        last = None if final is None else final[0]
        data = {path: column[0] for path, column in columns.items()}
        if error := quietly(writer.add, data, final_observation=last):
            return error
        feed.advance(ended[one], with_final)
    return None
