"""Random kills of everything that a run is made of, under rows with checksums.

Writers on two nodes write, and a learner on one of them draws, all the time. A writer
notes in a file how many rows are published; these must be there in the end, and whole.
``MMREPLAY_KILLS`` says how many kills; an hour has some 500.

For each kind of kill it prints how long the first batch takes from the restart on: the
first one with rows of the ring whose shard, node or writer is back, or the first one at
all. A shard, registry or writer is back when it answers, a node when it has joined, and
a learner when its process begins to make its client.
"""

import collections
import os
import random
import statistics
import struct
import sys
import threading
import time
import traceback

import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.ray import cluster as calls  # noqa: E402
from tests.on_ray.actors import ask, ended, kill, registry, shard  # noqa: E402
from tests.on_ray.conftest import until  # noqa: E402
from tests.on_ray.rows import SCHEMA, block, check  # noqa: E402

KILLS = int(os.environ.get("MMREPLAY_KILLS", "20"))
SEED = int(os.environ.get("MMREPLAY_SEED", "0"))
CAPACITY = 5_000_000
STEPS = 32
BATCHES = 8
"""More than are drawn ahead: so many after a kill were asked for since."""
NOTE = struct.Struct("<qd")
KINDS = {"shard": 8, "writer": 6, "learner": 3, "registry": 2, "raylet": 1}
"""What is killed, and how often each."""
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
        for count, batch in enumerate(self.client):
            check(batch)
            self.batches.append((time.monotonic(), set(batch["writer"].tolist())))
            priorities = 1.0 + (batch["number"] % 7)
            self.client.update_priorities(batch, priorities)
            self.note(count)

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
    """A run under kills."""

    def __init__(self, name, folder, nodes):
        self.name, self.folder, self.nodes = name, folder, nodes
        self.writers = [self.write(number) for number in range(2)]
        for writer in self.writers:
            ask(writer, "pid")
        self.learner = self.learn()

    def on(self, number):
        return {"num_cpus": 0, "label_selector": {"mmreplay": LABELS[number]}}

    def notes(self, what):
        return self.folder / f"{what}.note"

    def write(self, number):
        arguments = self.name, str(self.folder / LABELS[number]), number
        actor = ray.remote(Writes).options(**self.on(number))
        return actor.remote(*arguments, str(self.notes(f"w{number}")))

    def learn(self):
        self.notes("learner").unlink(missing_ok=True)
        actor = ray.remote(Learns).options(**self.on(0))
        return actor.remote(self.name, str(self.notes("learner")))

    def healthy(self):
        """Wait until everything goes on, and return after how many seconds.

        No error of a writer or of the learner, whose sums were all right.
        """
        began = time.monotonic()
        marks = [noted(self.notes(f"w{number}"))[0] for number in range(2)]
        mark = noted(self.notes("learner"))[0]
        for actor in (*self.writers, self.learner):
            assert ask(actor, "pid")[1] is None
        try:
            until(lambda: noted(self.notes("learner"))[0] >= mark + BATCHES)
        except AssertionError:
            print(ask(self.learner, "pid"), mr.ray.status(self.name))
            print(ask(self.learner, "stacks"))
            raise
        took = time.monotonic() - began
        for number in range(2):
            note = self.notes(f"w{number}")
            until(lambda: noted(note)[0] > marks[number])  # noqa: B023
        return took

    def first_batch(self, since, writer):
        """Seconds from a restart to the first batch; see `Learns.first_after`."""
        arguments = self.learner, "first_after", since, writer
        return until(lambda: ask(*arguments))

    def strike(self, kind, number):
        """Kill one process, and start again what Ray does not.

        Returns:
            When it was back, and the writer of whose rows the next batch tells; None
            for when the learner began, and for any.
        """
        if kind == "shard":
            remote = shard(self.name, LABELS[number])
            kill(remote.call("info")["pid"])
            remote.call("info")
            return time.monotonic(), number
        if kind == "registry":
            actor = ray.get_actor(calls.registry_name(self.name), calls.NAMESPACE)
            ray.kill(actor, no_restart=False)
            registry(self.name).call("members")
            return time.monotonic(), None
        if kind == "writer":
            kill(ask(self.writers[number], "pid")[0])
            self.writers[number] = self.write(number)
            ask(self.writers[number], "pid")
            return time.monotonic(), number
        if kind == "raylet":
            # Not that of the learner, whose draws go on without the other node.
            pid = ask(self.writers[1], "pid")[0]
            node_id = self.nodes.node_id(LABELS[1])
            self.nodes.kill_raylet(LABELS[1])
            until(lambda: ended(pid))
            # Ray would start actors on it until then.
            self.nodes.wait_dead(node_id)
            self.nodes.remove(LABELS[1])
            self.nodes.add(LABELS[1])
            joined = time.monotonic()
            self.writers[1] = self.write(1)
            shard(self.name, LABELS[1]).call("info")
            return joined, 1
        kill(ask(self.learner, "pid")[0])
        self.learner = self.learn()
        return None, None

    def check(self):
        """Check that every published row is there and whole; return how many."""
        rows = 0
        for number in range(2):
            kill(ask(self.writers[number], "pid")[0])
            published = noted(self.notes(f"w{number}"))[0]
            path = self.folder / LABELS[number] / self.name / f"w{number}"
            with mr.ReplayBuffer.open(path) as ring:
                assert ring.heads[0] >= published
                batch = ring.gather_all()
                assert batch["number"].tolist() == list(range(ring.heads[0]))
                check(batch)
                rows += len(batch["number"])
            assert mr.verify_buffer(path).ok
        return rows


def spread(times):
    """The median and the most of some seconds."""
    return f"{statistics.median(times):.2f} s (median), {max(times):.2f} s (most)"


@pytest.mark.slow
def test_random_kills_lose_no_published_row(run_name, tmp_path, cluster):
    rng = random.Random(SEED)
    run = Run(run_name, tmp_path, cluster)
    run.healthy()
    took, first = ({kind: [] for kind in KINDS} for _ in range(2))
    for _ in range(KILLS):
        (kind,) = rng.choices([*KINDS], [*KINDS.values()])
        number = rng.randrange(2)
        time.sleep(rng.random() * 0.2)
        print(f"kills a {kind} of {number}", flush=True)
        since, writer = run.strike(kind, number)
        took[kind].append(run.healthy())
        first[kind].append(run.first_batch(since, writer))
    ray.kill(run.learner)
    rows = run.check()
    for kind, times in took.items():
        if times:
            print(
                f"{len(times)} kills of a {kind}: first batch {spread(first[kind])} "
                f"after it was back, {BATCHES} more batches after {spread(times)}"
            )
    print(f"{KILLS} kills, {rows:,} rows: none lost, none wrong")
