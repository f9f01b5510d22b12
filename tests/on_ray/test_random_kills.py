"""Random kills of everything that a run is made of, under rows with checksums.

Writers on two nodes write, and a learner on one of them draws, all the time. A writer
notes in a file how many rows are published; these must be there in the end, and whole.
``MMREPLAY_KILLS`` says how many kills; an hour has some 500.
"""

import os
import random
import struct
import sys
import threading
import time
import traceback

import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.ray import cluster as calls  # noqa: E402
from tests.on_ray.actors import ask, ended, kill, shard  # noqa: E402
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
        sampler = mr.PrioritizedSampler(seed=0)
        self.client = mr.ray.ReplayClient(run, sampler, batch_size=64)
        super().__init__(notes)

    def work(self):
        for count, batch in enumerate(self.client):
            check(batch)
            priorities = 1.0 + (batch["number"] % 7)
            self.client.update_priorities(batch, priorities)
            self.note(count)


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

    def strike(self, kind, number):
        """Kill one process, and start again what Ray does not."""
        if kind == "shard":
            kill(shard(self.name, LABELS[number]).call("info")["pid"])
        elif kind == "registry":
            actor = ray.get_actor(calls.registry_name(self.name), calls.NAMESPACE)
            ray.kill(actor, no_restart=False)
        elif kind == "writer":
            kill(ask(self.writers[number], "pid")[0])
            self.writers[number] = self.write(number)
        elif kind == "raylet":
            # Not that of the learner, whose draws go on without the other node.
            pid = ask(self.writers[1], "pid")[0]
            node_id = self.nodes.node_id(LABELS[1])
            self.nodes.kill_raylet(LABELS[1])
            until(lambda: ended(pid))
            # Ray would start actors on it until then.
            self.nodes.wait_dead(node_id)
            self.nodes.remove(LABELS[1])
            self.nodes.add(LABELS[1])
            self.writers[1] = self.write(1)
            shard(self.name, LABELS[1]).call("info")
        else:
            kill(ask(self.learner, "pid")[0])
            self.learner = self.learn()

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


@pytest.mark.slow
def test_random_kills_lose_no_published_row(run_name, tmp_path, cluster):
    rng = random.Random(SEED)
    run = Run(run_name, tmp_path, cluster)
    run.healthy()
    took = {kind: [] for kind in KINDS}
    for _ in range(KILLS):
        (kind,) = rng.choices([*KINDS], [*KINDS.values()])
        number = rng.randrange(2)
        time.sleep(rng.random() * 0.2)
        print(f"kills a {kind} of {number}", flush=True)
        run.strike(kind, number)
        took[kind].append(run.healthy())
    ray.kill(run.learner)
    rows = run.check()
    for kind, times in took.items():
        if times:
            middle = sorted(times)[len(times) // 2]
            print(
                f"{len(times)} kills of a {kind}: {BATCHES} more batches after "
                f"{middle:.1f} s (median), {max(times):.1f} s (most)"
            )
    print(f"{KILLS} kills, {rows:,} rows: none lost, none wrong")
