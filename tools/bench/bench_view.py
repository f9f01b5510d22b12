"""How long does the page of `mmreplay view` take, and what does it cost the writer?

The server runs as users start it, in a process of its own. Its memory is what
/proc/PID/status calls RssAnon: rows that are mapped are the kernel's to drop. The large
ring is sparse: its flags are written, its other rows are holes. Where headless Chromium
is installed, it shows the page, on the same machine (`view_browser`).

    python -m tools.bench.bench_view [--quick]
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import mmreplay as mr
from mmreplay.page.static_files import static_files
from tools.bench import view_browser
from tools.bench.turns import rounded, run_benchmark
from tools.bench.view_browser import Browser

WHEELS = ("starlette", "uvicorn", "anyio", "h11", "click", "idna", "typing_extensions")
"""What the extra ``web`` installs."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        rows: Of the large ring.
        episode: Steps of an episode in it.
        turns: Of the writer, watched and not.
        small: Frames of 84 x 84 to scrub over.
        camera: Frames of 480 x 640 x 3.
        curve_steps: Steps of a curve.
        scrub_s: Seconds of scrubbing, each way.
        writing_s: Seconds that a writer adds.
        added: Steps added one by one.
        killed: Writers that are killed.
    """

    rows: int = 100_000_000
    episode: int = 100
    turns: int = 3
    small: int = 20_000
    camera: int = 600
    curve_steps: int = 1_000_000
    scrub_s: float = 4.0
    writing_s: float = 5.0
    added: int = 12
    killed: int = 12


QUICK = Sizes(rows=2_000_000, turns=1, small=1_000, camera=60, killed=2)

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


ONE_BY_ONE = """
import sys, time
import numpy as np
import mmreplay as mr

fields = {"observation": mr.Field((4,), "float32"), "reward": mr.Field((), "float32")}
with mr.ReplayBuffer.create(sys.argv[1], mr.Schema(fields), 1000) as buffer:
    def add():
        buffer.add(observation=np.zeros(4, np.float32), reward=1.0)
        return time.time()
    add()
    print("ready", flush=True)
    for line in sys.stdin:
        print(add(), flush=True)
"""


class Server:
    """``mmreplay view`` in a process of its own."""

    def __init__(self, path: Path) -> None:
        """Start it, and wait until it listens."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mmreplay", "view", str(path), "--no-open", "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout is not None
        address = self.process.stdout.readline().split()[1]
        port, self.token = address.split(":")[2].split("/?token=")
        self.port = int(port)
        self.url = address
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
        """Look as an open page does: live state, and overviews a tenth of the time."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Cookie": f"mmreplay-{self.port}={self.token}"}
        connection.request("GET", "/api/live", headers=headers)
        stream = connection.getresponse()
        last, pause = 0.0, 2.0
        while not stop.is_set() and stream.readline():
            if time.monotonic() - last > pause:
                last = time.monotonic()
                pause = max(2.0, 10 * self.timed("/api/b/0/overview"))
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
        found["table_mib"] = server.anonymous_mib
        per_episode = 64 * sizes.rows / sizes.episode / (1 << 20)
        found["over_64_b_an_episode_mib"] = found["table_mib"] - per_episode
    finally:
        server.close()
    return found


def measure_curve(folder: Path, sizes: Sizes, browser: Browser | None) -> dict[str, float]:
    """Curves of one long episode, four components."""
    steps = sizes.curve_steps
    path, rng = folder / "curve", np.random.default_rng(0)
    fields = {"observation": mr.Field((4,), "float32"), "reward": mr.Field((), "float32")}
    with mr.ReplayBuffer.create(path, mr.Schema(fields), steps) as buffer:
        for _ in range(10):
            count = steps // 10
            buffer.extend(
                observation=rng.normal(size=(count, 4)).astype(np.float32),
                reward=np.ones(count, np.float32),
            )
    server = Server(path)
    try:
        query = f"field=observation&env=0&first=0&stop={steps}&c0=0&c1=4"
        times = [server.timed(f"/api/b/0/curve?{query}&buckets={900 + turn}") for turn in range(11)]
        found = {"curve_first_s": times[0], "curve_s": median(times[1:])}
        if browser is not None:
            found["curve_drawn_s"] = browser.curve_s(server.url, steps)
    finally:
        server.close()
    return found


def measure_opening(folder: Path, browser: Browser, turns: int) -> dict[str, float]:
    """The large ring's overview in the browser, each time of a new server."""
    found = []
    for _ in range(turns):
        server = Server(folder / "large")
        try:
            found.append(browser.opened(server.url))
        finally:
            server.close()
    return {name: median(each[name] for each in found) for name in found[0]}


def measure_scrubbing(folder: Path, browser: Browser, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Frames that are painted a second, by their shape."""
    found = {}
    rng = np.random.default_rng(0)
    for name, shape, steps in (
        ("84x84", (84, 84), sizes.small),
        ("480x640x3", (480, 640, 3), sizes.camera),
    ):
        path = folder / name
        fields = {"observation": mr.Field(shape, "uint8"), "reward": mr.Field((), "float32")}
        block = min(100, steps)
        with mr.ReplayBuffer.create(path, mr.Schema(fields), steps) as buffer:
            for _ in range(steps // block):
                frames = rng.integers(0, 256, (block, *shape), np.uint8)
                buffer.extend(observation=frames, reward=np.ones(block, np.float32))
        server = Server(path)
        try:
            found[name] = browser.scrubbed(server.url, steps, sizes.scrub_s)
        finally:
            server.close()
    return found


@contextmanager
def one_by_one(path: Path, browser: Browser) -> Iterator[subprocess.Popen[str]]:
    """A writer that adds a step for each line that it reads, shown in the browser."""
    writer = subprocess.Popen(
        [sys.executable, "-c", ONE_BY_ONE, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    server = Server(path)
    try:
        browser.watch_steps(server.url)
        yield writer
    finally:
        writer.kill()
        writer.communicate()
        server.close()


def measure_live(folder: Path, browser: Browser, sizes: Sizes) -> dict[str, float]:
    """Seconds until a step that was added is shown, and a killed writer reported."""
    shown, gone = [], []
    for turn in range(sizes.turns):
        with one_by_one(folder / f"live-{turn}", browser) as writer:
            assert writer.stdin is not None
            assert writer.stdout is not None
            added = {}
            for number in range(sizes.added):
                # Not in step with the server's clock.
                time.sleep(0.8 + 0.07 * number)
                writer.stdin.write("add\n")
                writer.stdin.flush()
                added[str(2 + number)] = float(writer.stdout.readline())
            time.sleep(1.5)
            seen = browser.steps_seen()
            shown += [seen[steps] - at for steps, at in added.items()]
    for number in range(sizes.killed):
        with one_by_one(folder / f"killed-{number}", browser) as writer:
            time.sleep(0.8 + 0.07 * number)
            at = time.time()
            writer.send_signal(signal.SIGKILL)
            gone.append(browser.gone_seen() - at)
    return {
        "added_shown_median_s": median(shown),
        "added_shown_longest_s": max(shown),
        "writer_gone_median_s": median(gone),
        "writer_gone_longest_s": max(gone),
    }


def measure_writer(
    folder: Path, sizes: Sizes, browser: Browser | None
) -> dict[str, dict[str, float]]:
    """Steps a second of a writer: alone, watched, and watched in the browser here."""
    ways = ["alone", "watched", *([] if browser is None else ["browser"])]
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(sizes.turns):
        for way in ways if turn % 2 else reversed(ways):
            path = folder / f"writer-{turn}-{way}"
            rates[way].append(_writer_rate(path, way, sizes, browser))
    middle = {way: median(each) for way, each in rates.items()}
    share = {way: middle[way] / middle["alone"] for way in ways[1:]}
    return {"writer_steps_s": middle, "writer_share": share}


def _writer_rate(path: Path, way: str, sizes: Sizes, browser: Browser | None) -> float:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(sizes.writing_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdout.readline()
    stop, server, thread = threading.Event(), None, None
    if way != "alone":
        server = Server(path)
        if way == "watched":
            thread = threading.Thread(target=server.watch, args=(stop,))
            thread.start()
        elif browser is not None:
            browser.open(server.url)
        time.sleep(1)
    writer.stdin.write("go\n")
    writer.stdin.flush()
    rate = float(writer.stdout.readline())
    stop.set()
    if server is not None:
        if browser is not None:
            browser.driver.get("about:blank")
        server.close()
    if thread is not None:
        thread.join()
    writer.communicate()
    return rate


def measure(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Measure the server, then the page in the browser where there is one."""
    found: dict[str, Any] = {
        "rows": sizes.rows,
        "episodes": sizes.rows // sizes.episode,
        "page_kib": sum(len(data) for data, _ in static_files().values()) / 1024,
        "wheels_mib": view_browser.wheel_nbytes(WHEELS) / (1 << 20),
    }
    found["server"] = measure_large(folder, sizes)
    browser = Browser() if view_browser.is_there() else None
    try:
        found["curve"] = measure_curve(folder, sizes, browser)
        if browser is not None:
            found["opening"] = measure_opening(folder, browser, sizes.turns)
            found["frames_s"] = measure_scrubbing(folder, browser, sizes)
            found["live"] = measure_live(folder, browser, sizes)
        found |= measure_writer(folder, sizes, browser)
    finally:
        if browser is not None:
            browser.close()
    return _rounded(found)


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _rounded(value)
        if isinstance(value, dict)
        else value
        if isinstance(value, int)
        else rounded(value)
        for name, value in figures.items()
    }


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(
        __doc__, lambda folder, options: measure(folder, QUICK if options.quick else Sizes())
    )


if __name__ == "__main__":
    main()
