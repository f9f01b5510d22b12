"""How long does the page of `mmreplay view` take, and what does it cost the writer?

The server runs as users start it, in a process of its own. Its memory is what
/proc/PID/status calls RssAnon: rows that are mapped are the kernel's to drop. The large
ring is sparse: its flags are written, its other rows are holes.

    python -m tools.bench.bench_view [--quick]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import mmreplay as mr

CURVE_STEPS = 1_000_000
WRITING_S = 5.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        rows: Of the large ring.
        episode: Steps of an episode in it.
        turns: Of the writer, watched and not.
    """

    rows: int = 100_000_000
    episode: int = 100
    turns: int = 3


QUICK = Sizes(rows=2_000_000, turns=1)

SPARSE = """
import os, sys
import numpy as np
import mmreplay as mr
from mmreplay.episodes import START, TERMINATED

path, rows, episode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
fields = {
    "observation": mr.Field((3,), "float32"),
    "action": mr.Field((), "int8"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
}
buffer = mr.ReplayBuffer.create(path, mr.Schema(fields), rows, commit_every=None)
flags = np.memmap(f"{path}/data-000001/flags.bin", np.uint8, "r+")
flags[:rows:episode] |= START
flags[episode - 1 : rows : episode] |= TERMINATED
flags.flush()
heads = np.array([rows])
commit = buffer.view.files.commit
commit.publish(heads, np.maximum(heads, commit.limits), np.zeros(1, np.int64))
# As a killed writer leaves it: what was published is there.
os._exit(0)
"""

WRITER = """
import sys, time
import numpy as np
import mmreplay as mr

path, seconds = sys.argv[1], float(sys.argv[2])
fields = {
    "observation": mr.Field((84, 84), "uint8"),
    "action": mr.Field((), "int64"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
}
rng = np.random.default_rng(0)
frames = rng.integers(0, 256, (64, 84, 84), np.uint8)
with mr.ReplayBuffer.create(path, mr.Schema(fields), 20_000) as buffer:
    print("ready", flush=True)
    sys.stdin.readline()
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(100):
            buffer.add(
                observation=frames[count % 64], action=count % 6,
                reward=float(count % 7 == 0), terminated=count % 500 == 499,
            )
            count += 1
    print(count / (time.perf_counter() - begin), flush=True)
"""


class Server:
    """``mmreplay view`` in a process of its own."""

    def __init__(self, path: Path) -> None:
        """Start it, and wait until it listens."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mmreplay", "view", str(path), "--no-open",
             "--port", "0"],
            stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert self.process.stdout is not None
        address = self.process.stdout.readline().split()[1]
        port, self.token = address.split(":")[2].split("/?token=")
        self.port = int(port)
        for _ in range(200):
            try:
                self.get("/api/nothing")
                return
            except ConnectionError:
                time.sleep(0.02)

    def get(self, path: str) -> bytes:
        """Return the body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Cookie": f"mmreplay-{self.port}={self.token}"}
        connection.request("GET", path, headers=headers)
        body = connection.getresponse().read()
        connection.close()
        return body

    def json(self, path: str) -> Any:
        """Return a JSON answer."""
        return json.loads(self.get(path))

    def timed(self, path: str) -> float:
        """Seconds until an answer has arrived."""
        begin = time.perf_counter()
        self.get(path)
        return time.perf_counter() - begin

    @property
    def anonymous_mib(self) -> float:
        """Memory of its own."""
        status = Path(f"/proc/{self.process.pid}/status").read_text("ascii")
        (line,) = (line for line in status.splitlines() if "RssAnon" in line)
        return int(line.split()[1]) / 1024

    def watch(self, stop: threading.Event) -> None:
        """Look as an open page does: live state, and an overview every 2 s."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Cookie": f"mmreplay-{self.port}={self.token}"}
        connection.request("GET", "/api/live", headers=headers)
        stream = connection.getresponse()
        last = 0.0
        while not stop.is_set() and stream.readline():
            if time.monotonic() - last > 2:
                last = time.monotonic()
                self.get("/api/b/0/overview")
        connection.close()

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(timeout=20)
        assert self.process.stdout is not None
        self.process.stdout.close()


def measure_large(folder: Path, sizes: Sizes) -> dict[str, float]:
    """Overview, table and memory of a ring of many rows and episodes."""
    path = folder / "large"
    arguments = [str(path), str(sizes.rows), str(sizes.episode)]
    subprocess.run([sys.executable, "-c", SPARSE, *arguments], check=True)
    server = Server(path)
    found = {"start_mib": server.anonymous_mib}
    try:
        found["overview_cold_s"] = server.timed("/api/b/0/overview")
        found["overview_mib"] = server.anonymous_mib
        assert server.json("/api/b/0/overview")["steps"] == sizes.rows
        begin = time.perf_counter()
        while server.json("/api/b/0/episodes?limit=1")["done"] < 1:
            time.sleep(0.2)
        found["all_returns_s"] = time.perf_counter() - begin
        found["all_returns_mib"] = server.anonymous_mib
        found["table_s"] = server.timed("/api/b/0/episodes?sort=length&limit=100")
        found["table_middle_s"] = server.timed(
            f"/api/b/0/episodes?sort=return&offset={sizes.rows // sizes.episode // 2}"
        )
        found["allowed_mib"] = 150 + 64 * sizes.rows / sizes.episode / (1 << 20)
        found["table_mib"] = server.anonymous_mib
    finally:
        server.close()
    return found


def measure_curve(folder: Path) -> dict[str, float]:
    """Curves of a million steps, four components."""
    path, rng = folder / "curve", np.random.default_rng(0)
    fields = {
        "observation": mr.Field((4,), "float32"),
        "reward": mr.Field((), "float32"),
    }
    with mr.ReplayBuffer.create(path, mr.Schema(fields), CURVE_STEPS) as buffer:
        for _ in range(10):
            count = CURVE_STEPS // 10
            buffer.extend(
                observation=rng.normal(size=(count, 4)).astype(np.float32),
                reward=np.ones(count, np.float32),
            )
    server = Server(path)
    try:
        query = f"field=observation&env=0&first=0&stop={CURVE_STEPS}&c0=0&c1=4"
        times = [
            server.timed(f"/api/b/0/curve?{query}&buckets={900 + turn}")
            for turn in range(11)
        ]
    finally:
        server.close()
    return {"curve_first_s": times[0], "curve_s": median(times[1:])}


def measure_writer(folder: Path, sizes: Sizes) -> dict[str, float]:
    """Steps a second of a writer, watched and not, in turns."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(sizes.turns):
        for watched in (False, True) if turn % 2 else (True, False):
            path = folder / f"writer-{turn}-{watched}"
            writer = subprocess.Popen(
                [sys.executable, "-c", WRITER, str(path), str(WRITING_S)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert writer.stdin is not None
            assert writer.stdout is not None
            writer.stdout.readline()
            stop, server, thread = threading.Event(), None, None
            if watched:
                server = Server(path)
                thread = threading.Thread(target=server.watch, args=(stop,))
                thread.start()
                time.sleep(1)
            writer.stdin.write("go\n")
            writer.stdin.flush()
            rates[watched].append(float(writer.stdout.readline()))
            stop.set()
            if server is not None and thread is not None:
                server.close()
                thread.join()
            writer.communicate()
    alone, watched_rate = median(rates[False]), median(rates[True])
    return {
        "alone_steps_s": alone,
        "watched_steps_s": watched_rate,
        "watched_share": watched_rate / alone,
    }


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    sizes = QUICK if parser.parse_args().quick else Sizes()
    with tempfile.TemporaryDirectory(prefix="mmreplay-view-") as name:
        folder = Path(name)
        found = {
            **measure_large(folder, sizes),
            **measure_curve(folder),
            **measure_writer(folder, sizes),
        }
    print(json.dumps({key: round(value, 4) for key, value in found.items()}, indent=1))


if __name__ == "__main__":
    main()
