"""Random kills of everything that a run is made of, under rows with checksums.

Writers on two nodes write, and a learner on one of them draws, all the time; beside it
a thin writer sends its rows to the other node. A writer notes in a file how many rows
are published; these must be there in the end, and whole, and those of thin writers
once. Now and then two are killed one right after the other. ``MMREPLAY_KILLS`` says
how many kills; an hour has some 500.

For each kind of kill it prints how long the first batch takes from the restart on: the
first one with rows of the ring whose shard, node or writer is back, or the first one at
all. A shard, registry or writer is back when it answers, a node when it has joined, and
a learner when its process begins to make its client.
"""

import collections
import itertools
import os
import random
import statistics
import struct
import sys
import threading
import time
import traceback
from contextlib import suppress

import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.errors import FailedError, StarvedError  # noqa: E402
from mmreplay.ray import cluster as calls  # noqa: E402
from tests.on_ray.actors import ask, ended, kill, registry, shard  # noqa: E402
from tests.on_ray.rows import SCHEMA, block, check  # noqa: E402
from tests.waits import WAIT_S, until  # noqa: E402

KILLS = int(os.environ.get("MMREPLAY_KILLS", "20"))
SEED = int(os.environ.get("MMREPLAY_SEED", "0"))
CAPACITY = 5_000_000
STEPS = 32
THIN_STEPS = 8
"""Of a block of the thin writer, so that several are under way."""
THIN_ENVS, IDLE_S = 4, 5.0
"""Those of thin writers that were killed go to the next ones."""
THIN = 100
"""Numbers of thin writers begin here; one that is started again has the next one."""
BATCHES = 8
"""More than are drawn ahead: so many after a kill were asked for since."""
NOTE = struct.Struct("<qd")
KINDS = {"shard": 8, "writer": 6, "thin writer": 4, "learner": 3, "registry": 2, "raylet": 1}
"""What is killed, and how often each."""
PAIRS = 0.2
"""Share of the strikes that kill two."""
LABELS = ("n0", "n1")


class Noting:
    """An actor that works in a thread and notes how far it is in a file."""

    def __init__(self, notes):
        self.file = os.open(notes, os.O_RDWR | os.O_CREAT)
        self.error = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        try:
            self.work()
        except BaseException as error:
            self.error = repr(error)
            raise

    def note(self, number):
        os.pwrite(self.file, NOTE.pack(number, time.monotonic()), 0)

    def pid(self):
        return os.getpid(), self.error

    def stacks(self):
        """What every thread does now."""
        frames = sys._current_frames().values()
        return "\n".join("".join(traceback.format_stack(frame)) for frame in frames)


class Writes(Noting):
    """Writes one ring; what it has noted is published."""

    def __init__(self, run, root, number, notes):
        self.number = number
        name = f"w{number}"
        self.writer = mr.ray.writer(run, SCHEMA, CAPACITY, root=root, name=name)
        super().__init__(notes)

    def work(self):
        rows = int(self.writer.buffer.heads.sum())
        while True:
            self.writer.extend(block(self.number, rows, STEPS))
            rows += STEPS
            self.note(rows)
            time.sleep(0.01)


class WritesThin(Noting):
    """Writes rows of its number to the ring of thin writers, of another node."""

    def __init__(self, run, number, notes):
        self.number = number
        stop = time.monotonic() + 60.0
        while True:
            try:
                self.writer = mr.ray.thin_writer(run, SCHEMA, steps=THIN_STEPS, timeout_s=120.0)
                break
            except FailedError:
                # Those that were killed have all environments for a while.
                if time.monotonic() > stop:
                    raise
            time.sleep(0.1)
        super().__init__(notes)

    def work(self):
        rows = 0
        while True:
            self.writer.extend(block(self.number, rows, STEPS))
            rows += STEPS
            if rows % (4 * STEPS) == 0:
                self.writer.flush()
                # No power was cut: nothing that arrived is gone.
                assert self.writer.lost_rows == 0
                self.note(rows)
            time.sleep(0.02)


def make_thin_ring(run, root):
    """Make the ring of thin writers of the node that this runs on."""
    mr.ray.thin_ring(
        run, SCHEMA, CAPACITY, root=root, num_envs=THIN_ENVS, idle_s=IDLE_S, autoreset="disabled"
    )


class Learns(Noting):
    """Draws from the whole run, and checks every row."""

    def __init__(self, run, notes):
        self.began = time.monotonic()
        # When each batch came, and of which writers it has rows.
        self.batches = collections.deque(maxlen=100_000)
        sampler = mr.PrioritizedSampler(seed=0)
        self.client = mr.ray.ReplayClient(run, sampler, batch_size=64)
        super().__init__(notes)

    def work(self):
        for count in itertools.count():
            batch = self._next_batch()
            check(batch)
            self.batches.append((time.monotonic(), set(batch["writer"].tolist())))
            priorities = 1.0 + (batch["number"] % 7)
            self.client.update_priorities(batch, priorities)
            self.note(count)

    def _next_batch(self):
        """The next batch, also where both shards were killed and are late together."""
        while True:
            try:
                return next(self.client)
            except StarvedError as error:
                # It says so, and to draw again, once no node answered for `lost_s`.
                if "no node has answered for" not in str(error):
                    raise

    def first_after(self, since, writer):
        """When the first batch came after a time, with rows of a writer or of any."""
        since = self.began if since is None else since
        for at, writers in tuple(self.batches):
            if at > since and (writer is None or writer in writers):
                return at - since
        return None


def noted(path):
    """What an actor noted last: a number, and when."""
    data = path.read_bytes() if path.exists() else b""
    return NOTE.unpack(data) if len(data) == NOTE.size else (0, 0.0)


class Run:
    """A run under kills.

    Attributes:
        actors: ``"w0"`` and ``"w1"``, the writers of the nodes; ``"learner"`` and
            ``"thin"``, both on the first node.
        num_thin: Thin writers that were started.
    """

    def __init__(self, name, folder, nodes):
        self.name, self.folder, self.nodes = name, folder, nodes
        self.actors, self.num_thin = {}, 0
        for what in ("w0", "w1"):
            self.start(what)
        for what in ("w0", "w1"):
            ask(self.actors[what], "pid")
        make = ray.remote(make_thin_ring).options(**self.on(1))
        ray.get(make.remote(name, self.root(1)), timeout=WAIT_S)
        for what in ("thin", "learner"):
            self.start(what)

    def on(self, number):
        return {"num_cpus": 0, "label_selector": {"mmreplay": LABELS[number]}}

    def root(self, number):
        return str(self.folder / LABELS[number])

    def notes(self, what):
        if what == "thin":
            what = f"thin-{self.num_thin - 1}"
        return self.folder / f"{what}.note"

    def node_of(self, what):
        """The number of the node of an actor."""
        return int(what == "w1")

    def start(self, what):
        """Start an actor, or start it again; it may wait for its node."""
        if what == "thin":
            self.num_thin += 1
        if what == "learner":
            self.notes(what).unlink(missing_ok=True)
        notes = str(self.notes(what))
        node = self.node_of(what)
        kind, arguments = {
            "learner": (Learns, (self.name, notes)),
            "thin": (WritesThin, (self.name, THIN + self.num_thin - 1, notes)),
        }.get(what, (Writes, (self.name, self.root(node), node, notes)))
        actor = ray.remote(kind).options(**self.on(node))
        self.actors[what] = actor.remote(*arguments)

    def healthy(self):
        """Wait until everything goes on, and return after how many seconds.

        No error of a writer or of the learner, whose sums were all right.
        """
        began = time.monotonic()
        marks = {what: noted(self.notes(what))[0] for what in self.actors}
        for actor in self.actors.values():
            assert ask(actor, "pid")[1] is None
        wanted = marks["learner"] + BATCHES
        try:
            until(lambda: noted(self.notes("learner"))[0] >= wanted)
        except AssertionError:
            learner = self.actors["learner"]
            print(ask(learner, "pid"), mr.ray.status(self.name))
            print(ask(learner, "stacks"))
            raise
        took = time.monotonic() - began
        for what, mark in marks.items():
            until(lambda: noted(self.notes(what))[0] > mark)  # noqa: B023
        return took

    def first_batch(self, since, writer):
        """Seconds from a restart to the first batch; see `Learns.first_after`."""
        arguments = self.actors["learner"], "first_after", since, writer
        return until(lambda: ask(*arguments))

    def strike(self, *kills):
        """Kill one process, or two one right after the other.

        What Ray does not start again is started here.

        Args:
            *kills: Of each a kind, and the number of the node where there are two.

        Returns:
            When the last one was back, and the writer of whose rows the next batch
            tells; None for when the learner began, and for any.
        """
        # All are found before the first one ends.
        ends = [self.end_of(kind, number) for kind, number in kills]
        for end in ends:
            end()
        dead = set()
        for kind, number in kills:
            if kind == "raylet":
                own = {what for what in self.actors if self.node_of(what) == number}
                since, writer = self.start_node(number), number
                dead |= own
        for kind, number in kills:
            what = {"writer": f"w{number}", "thin writer": "thin"}.get(kind, kind)
            dead |= {what} & self.actors.keys()
        for what in sorted(dead):
            self.start(what)
        for kind, number in kills:
            if kind == "shard":
                shard(self.name, LABELS[number]).call("info")
                since, writer = time.monotonic(), number
            elif kind == "registry":
                registry(self.name).call("members")
                since, writer = time.monotonic(), None
            elif kind == "writer":
                ask(self.actors[f"w{number}"], "pid")
                since, writer = time.monotonic(), number
            elif kind == "thin writer":
                ask(self.actors["thin"], "pid")
                since, writer = time.monotonic(), THIN + self.num_thin - 1
            elif kind == "learner":
                since = writer = None
        return since, writer

    def end_of(self, kind, number):
        """Find a process; return what ends it."""
        if kind == "registry":
            actor = ray.get_actor(calls.registry_name(self.name), calls.NAMESPACE)
            return lambda: ray.kill(actor, no_restart=False)
        if kind == "raylet":
            return self.end_of_node(number)
        if kind == "shard":
            pid = shard(self.name, LABELS[number]).call("info")["pid"]
        else:
            what = {"writer": f"w{number}", "thin writer": "thin"}.get(kind, kind)
            pid = ask(self.actors[what], "pid")[0]

        def end():
            # It may end with its raylet.
            with suppress(ProcessLookupError):
                kill(pid)

        return end

    def end_of_node(self, number):
        """Find what ends a raylet; its workers end by themselves."""
        own = [what for what in self.actors if self.node_of(what) == number]
        pids = [ask(self.actors[what], "pid")[0] for what in own]

        def end():
            self.nodes.kill_raylet(LABELS[number])
            until(lambda: all(map(ended, pids)))

        return end

    def start_node(self, number):
        """Start a node again whose raylet was killed, and return when it joined."""
        # Ray would start actors on it until then.
        self.nodes.wait_dead(self.nodes.node_id(LABELS[number]))
        self.nodes.remove(LABELS[number])
        self.nodes.add(LABELS[number])
        return time.monotonic()

    def check(self):
        """Check that every published row is there and whole; return how many."""
        for what in ("w0", "w1", "thin"):
            kill(ask(self.actors[what], "pid")[0])
        # The shard may have a block of the thin writer yet.
        mr.ray.stop(self.name)
        return sum(self.check_ring(number) for number in range(2)) + self.check_thin()

    def check_ring(self, number):
        published = noted(self.notes(f"w{number}"))[0]
        path = self.folder / LABELS[number] / self.name / f"w{number}"
        with mr.ReplayBuffer.open(path) as ring:
            assert ring.heads[0] >= published
            batch = ring.gather_all()
            assert batch["number"].tolist() == list(range(ring.heads[0]))
            check(batch)
        assert mr.verify_buffer(path).ok
        return len(batch["number"])

    def check_thin(self):
        """Each row of every thin writer once, in whole and without a gap."""
        path = self.folder / LABELS[1] / self.name / "thin"
        with mr.ReplayBuffer.open(path) as ring:
            batch = ring.gather_all()
            # Nothing was overwritten.
            assert len(batch["number"]) == ring.heads.sum()
        check(batch)
        for number in range(self.num_thin):
            rows = batch["number"][batch["writer"] == THIN + number]
            assert sorted(rows.tolist()) == list(range(len(rows)))
            assert len(rows) >= noted(self.folder / f"thin-{number}.note")[0]
        assert mr.verify_buffer(path).ok
        return len(batch["number"])


def spread(times):
    """The median and the most of some seconds."""
    return f"{statistics.median(times):.2f} s (median), {max(times):.2f} s (most)"


def chosen_kills(rng, count):
    """What is killed at a time, as `Run.strike` takes it."""
    kills = []
    while len(kills) < count:
        (kind,) = rng.choices([*KINDS], [*KINDS.values()])
        number = rng.randrange(2) if kind in ("shard", "writer", "raylet") else 0
        if (kind, number) not in kills:
            kills.append((kind, number))
    return kills


@pytest.mark.slow
def test_random_kills_lose_no_published_row(run_name, tmp_path, cluster):
    rng = random.Random(SEED)
    run = Run(run_name, tmp_path, cluster)
    run.healthy()
    took, first = ({kind: [] for kind in (*KINDS, "pair")} for _ in range(2))
    left = KILLS
    while left > 0:
        kills = chosen_kills(rng, 2 if left > 1 and rng.random() < PAIRS else 1)
        left -= len(kills)
        time.sleep(rng.random() * 0.2)
        print("kills", *(f"{kind} {number}" for kind, number in kills), flush=True)
        since, writer = run.strike(*kills)
        kind = kills[0][0] if len(kills) == 1 else "pair"
        took[kind].append(run.healthy())
        first[kind].append(run.first_batch(since, writer))
    ray.kill(run.actors["learner"])
    rows = run.check()
    for kind, times in took.items():
        if times:
            print(
                f"{len(times)} kills of a {kind}: first batch {spread(first[kind])} "
                f"after it was back, {BATCHES} more batches after {spread(times)}"
            )
    print(f"{KILLS} kills, {rows:,} rows: none lost, none wrong")
