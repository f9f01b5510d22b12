"""The head of a cluster killed, a raylet stopped, and writers of small rings killed."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.ray.cluster import RESTARTING  # noqa: E402
from tests.on_ray.actors import ask, ended, kill, registry, shard  # noqa: E402
from tests.on_ray.conftest import Nodes  # noqa: E402
from tests.on_ray.rows import block, check  # noqa: E402
from tests.on_ray.test_random_kills import Writes, noted  # noqa: E402
from tests.waits import WAIT_S, until  # noqa: E402

pytestmark = pytest.mark.slow

CAPACITY, STEPS = 2_000, 40
TEXT = mr.Schema(
    {
        "number": mr.Field((), "int64"),
        "writer": mr.Field((), "int64"),
        "crc": mr.Field((), "uint32"),
        "mission": mr.Field.text(60),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)


def missions(numbers):
    return [f"ünit {number} " * (number % 5) for number in numbers]


class WritesText(Writes):
    """Writes a ring with values of any length again and again."""

    def __init__(self, run, root, number, notes, engine):
        self.number = number
        self.writer = mr.ray.writer(
            run, TEXT, CAPACITY, root=root, name=engine, engine=engine, heap_bytes="256 KiB"
        )
        super(Writes, self).__init__(notes)

    def work(self):
        rows = int(self.writer.buffer.heads.sum())
        while True:
            columns = block(self.number, rows, STEPS)
            columns["mission"] = missions(columns["number"].tolist())
            self.writer.extend(columns)
            rows += STEPS
            self.note(rows)


def start(kind, label, *arguments):
    where = {"num_cpus": 0, "label_selector": {"mmreplay": label}}
    return ray.remote(kind).options(**where).remote(*arguments)


class Drawing:
    """Draws in a thread, and counts batches with rows of each writer."""

    def __init__(self, run):
        self.client = mr.ray.ReplayClient(run, mr.UniformSampler(seed=0), batch_size=32)
        self.counts, self.error = {}, None
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._draw, daemon=True)
        self.thread.start()

    def _draw(self):
        try:
            for batch in self.client:
                check(batch)
                if "mission" in batch:
                    numbers = batch["number"].tolist()
                    assert batch["mission"].text() == missions(numbers)
                for writer in {*batch["writer"].tolist()}:
                    self.counts[writer] = self.counts.get(writer, 0) + 1
                if self.stopped.wait(0.01):
                    return
        except BaseException as error:
            self.error = error

    def close(self):
        self.stopped.set()
        self.thread.join(WAIT_S)
        self.client.close()

    def goes_on(self, *writers):
        """Wait until batches with rows of each of these writers have come."""
        before = dict(self.counts)
        until(
            lambda: (
                self.error
                or all(self.counts.get(each, 0) > before.get(each, 0) + 5 for each in writers)
            )
        )
        assert self.error is None


@pytest.fixture
def drawing(run_name):
    made = []

    def draw():
        made.append(Drawing(run_name))
        return made[-1]

    yield draw
    for each in made:
        each.close()


def test_killed_writers_of_rings_that_lap_lose_no_published_row(
    run_name, tmp_path, cluster, drawing
):
    """Records and shards, with values of any length; 12 kills, and 20 laps of each."""
    engines = ("memmap", "zarr")
    rng = random.Random(0)
    places = {engine: (f"n{k}", k) for k, engine in enumerate(engines)}

    def begin(engine):
        label, number = places[engine]
        notes = str(tmp_path / f"{engine}.note")
        return start(WritesText, label, run_name, str(tmp_path / label), number, notes, engine)

    writers = {engine: begin(engine) for engine in engines}
    for engine in engines:
        ask(writers[engine], "pid")
        until(lambda: noted(tmp_path / f"{engine}.note")[0] > CAPACITY)  # noqa: B023
    draws = drawing()
    for engine in engines * 6:
        time.sleep(rng.random())
        pid, error = ask(writers[engine], "pid")
        assert error is None
        kill(pid)
        label, _ = places[engine]
        path = tmp_path / label / run_name / engine
        published = noted(tmp_path / f"{engine}.note")[0]
        with mr.ReplayBuffer.open(path, mode="r") as ring:
            head = int(ring.heads[0])
            assert published <= head <= published + STEPS
            batch = ring.gather_all()
            numbers = batch["number"].tolist()
            assert numbers == list(range(head - len(numbers), head))
            assert len(numbers) > CAPACITY // 2
            assert batch["mission"].text() == missions(numbers)
            check(batch)
        writers[engine] = begin(engine)
        ask(writers[engine], "pid")
        draws.goes_on(0, 1)
    for engine, (label, _) in places.items():
        until(lambda: noted(tmp_path / f"{engine}.note")[0] > 20 * CAPACITY)  # noqa: B023
        kill(ask(writers[engine], "pid")[0])
        assert mr.verify_buffer(tmp_path / label / run_name / engine).ok


def test_a_raylet_that_is_stopped_for_a_minute_and_for_longer(run_name, tmp_path, cluster, drawing):
    """As a node that is cut off: its processes live, and nothing hears of it."""
    notes = [tmp_path / f"{k}.note" for k in range(2)]

    def begin(number):
        root = str(tmp_path / f"n{number}")
        return start(Writes, f"n{number}", run_name, root, number, str(notes[number]))

    writers = [begin(number) for number in range(2)]
    pids = [ask(writer, "pid")[0] for writer in writers]
    shard_pid = shard(run_name, "n1").call("info")["pid"]
    draws = drawing()
    draws.goes_on(0, 1)
    node_id = cluster.node_id("n1")
    raylet = cluster.by_label["n1"].all_processes["raylet"][0].process.pid

    # For a minute: nothing changes, and nothing is lost.
    os.kill(raylet, signal.SIGSTOP)
    stop = time.monotonic() + 60.0
    while time.monotonic() < stop:
        before = noted(notes[1])[0]
        draws.goes_on(0, 1)
        until(lambda: noted(notes[1])[0] > before)  # noqa: B023
        time.sleep(2)
    os.kill(raylet, signal.SIGCONT)
    draws.goes_on(0, 1)
    # Ray counts its beats from the first one on again.
    time.sleep(15)
    assert registry(run_name).call("states") == {"n0": "alive", "n1": "alive"}
    assert shard(run_name, "n1").call("info")["pid"] == shard_pid

    # Until Ray takes the node for dead: it is away, draws are of the other, and its
    # writer writes on.
    os.kill(raylet, signal.SIGSTOP)
    cluster.wait_dead(node_id)
    assert registry(run_name).call("states")["n1"] in ("away", RESTARTING)
    draws.goes_on(0)
    before = noted(notes[1])[0]
    until(lambda: noted(notes[1])[0] > before)
    # A raylet that hears of its own death ends.
    os.kill(raylet, signal.SIGCONT)
    until(lambda: ended(raylet))
    cluster.remove("n1")
    until(lambda: ended(pids[1]) and ended(shard_pid))
    published = noted(notes[1])[0]

    cluster.add("n1")
    assert shard(run_name, "n1").call("info", timeout_s=WAIT_S)["error"] is None
    writers[1] = begin(1)
    ask(writers[1], "pid")
    draws.goes_on(0, 1)
    for writer in writers:
        kill(ask(writer, "pid")[0])
    for number in range(2):
        path = tmp_path / f"n{number}" / run_name / f"w{number}"
        with mr.ReplayBuffer.open(path, mode="r") as ring:
            assert ring.heads[0] >= noted(notes[number])[0]
            batch = ring.gather_all()
            assert batch["number"].tolist() == list(range(ring.heads[0]))
            check(batch)
    assert noted(notes[1])[0] > published


def a_cluster(root: str) -> None:
    """Start a cluster, a writer on a node of it and a learner here, and say so."""
    from ray.cluster_utils import Cluster

    nodes = Nodes(
        Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": 80_000_000,
                "include_dashboard": False,
                "labels": {"mmreplay": "head"},
            },
        )
    )
    nodes.add("n0")
    ray.init(address=nodes.address, log_to_driver=False)
    writer = start(Writes, "n0", "run", f"{root}/n0", 0, f"{root}/n0.note")
    processes = nodes.cluster.head_node.all_processes
    pids = {
        "writer": ask(writer, "pid")[0],
        "shard": shard("run", "n0").call("info")["pid"],
        "raylet": nodes.by_label["n0"].all_processes["raylet"][0].process.pid,
        "head": [processes[each][0].process.pid for each in ("raylet", "gcs_server")],
    }
    client = mr.ray.ReplayClient("run", mr.UniformSampler(seed=0), batch_size=32)
    drawn = Path(root, "drawn")
    for number, batch in enumerate(client):
        check(batch)
        drawn.write_text(str(number))
        if number == 20:
            Path(root, "pids.tmp").write_text(json.dumps(pids))
            Path(root, "pids.tmp").rename(Path(root, "pids"))
        time.sleep(0.02)


def test_without_its_head_a_cluster_ends_and_the_next_one_goes_on_with_the_folders(
    cluster, tmp_path
):
    """A learner and a writer go on until Ray ends their processes, after a minute."""
    environ = {
        **os.environ,
        # Of a minute, for which Ray waits for a head.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "8",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    code = "import sys; from tests.on_ray.test_outages import a_cluster; a_cluster(sys.argv[1])"
    heads = []
    for turn in range(2):
        (tmp_path / "pids").unlink(missing_ok=True)
        learner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environ)
        until(lambda: learner.poll() is not None or (tmp_path / "pids").exists())  # noqa: B023
        pids = json.loads((tmp_path / "pids").read_text())
        for pid in pids.pop("head"):
            kill(pid)
        drawn, written = (tmp_path / "drawn").read_text(), noted(tmp_path / "n0.note")
        # Both go on without a head.
        until(lambda: (tmp_path / "drawn").read_text() not in ("", drawn))  # noqa: B023
        until(lambda: noted(tmp_path / "n0.note")[0] > written[0])  # noqa: B023
        # Ray ends the driver, and the node with its processes.
        assert learner.wait(WAIT_S) != 0
        until(lambda: all(map(ended, pids.values())))  # noqa: B023
        path = tmp_path / "n0" / "run" / "w0"
        with mr.ReplayBuffer.open(path, mode="r") as ring:
            heads.append(int(ring.heads[0]))
            assert heads[turn] >= noted(tmp_path / "n0.note")[0]
            batch = ring.gather_all()
            assert batch["number"].tolist() == list(range(heads[turn]))
            check(batch)
        assert mr.verify_buffer(path).ok
    assert all(one < two for one, two in itertools.pairwise(heads))
