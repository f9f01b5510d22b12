"""Buffers that are missing, foreign, unreadable, odd, or damaged while shown."""

import http.client
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import kernels
from mmreplay.page import launch
from tests.page.conftest import make_buffer
from tests.page.served import Served
from tests.waits import until

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from mmreplay.page import app

HOSTILE = "<img src=x onerror=alert(1)><script>"
NOBODY = 65534
ROUTES = (
    "overview",
    "episodes",
    "episode?env=0&at=0",
    "values?env=0&first=0&count=9",
    "curve?field=reward&env=0&first=0&stop=90",
    "draws?sampler=UniformSampler",
    "frames?field=observation%2Fpixels&env=0&first=0",
)


@pytest.fixture
def serve():
    """Start servers in processes of their own, which end with the test."""
    servers = []

    def start(*arguments, **options):
        servers.append(Served(*arguments, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def run(*arguments, python=(), before=(), env=None):
    """Run the command to its end: its code, and what it printed to stderr."""
    done = subprocess.run(
        [
            *before,
            sys.executable,
            *python,
            "-m",
            "mmreplay",
            "view",
            "--no-open",
            "--port",
            "0",
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | (env or {}),
        check=False,
    )
    return done.returncode, done.stderr


def as_nobody():
    """Begin of a command that another user runs; skip where that cannot be."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to become another user")
    before = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    probe = [*before, sys.executable, "-Bc", "import mmreplay.page.app"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("another user cannot run this Python")
    return before


def reachable(path):
    """Let every user reach a folder of pytest's, whose parents are private."""
    changed = []
    for parent in path.parents:
        mode = os.stat(parent).st_mode
        if mode & 0o001:
            break
        os.chmod(parent, mode | 0o011)
        changed.append((parent, mode))
    return changed


@pytest.fixture
def public(tmp_path):
    """A folder that other users reach."""
    changed = reachable(tmp_path / "x")
    yield tmp_path
    for parent, mode in changed:
        os.chmod(parent, mode)


@pytest.mark.slow
def test_paths_without_a_buffer_are_named(path, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("nowhere", "does not exist"),
        ("file", "must be a buffer's folder, got a file"),
        ("empty", "has no metadata.json"),
    ):
        code, err = run(path, tmp_path / name)
        assert code == 3, err
        assert err.startswith("mmreplay: ")
        assert str(tmp_path / name) in err
        assert words in err


def test_a_foreign_zarr_is_shown(serve, tmp_path, rng):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "foreign.zarr", mode="w")
    values = rng.normal(size=(500, 3)).astype(np.float32)
    group.create_array("observation", data=values)
    group.create_array("reward", data=values[:, 0].copy())
    server = serve(tmp_path / "foreign.zarr")
    assert server.json("/api/buffers")["buffers"][0]["state"] == "closed"
    overview = server.json("/api/b/0/overview")
    assert overview["steps"] == 500
    fields = {field["path"]: field for field in overview["fields"]}
    assert fields["observation"]["high"] == pytest.approx(float(values.max()))
    for route in ROUTES[:-1]:
        assert server.get(f"/api/b/0/{route}")[0] == 200, route


@pytest.mark.slow
def test_a_buffer_that_may_not_be_read(public, rng):
    before = as_nobody()
    path = make_buffer(public / "mine", rng)
    for name in ("", "metadata.json", "data-000001/flags.bin"):
        mode = os.stat(path / name).st_mode
        os.chmod(path / name, 0)
        code, err = run(path, before=before, python=["-B"])
        os.chmod(path / name, mode)
        assert code == 1, err
        assert "Permission denied" in err
        assert str(path) in err
        assert "Traceback" not in err


@pytest.mark.slow
def test_a_buffer_that_may_not_be_written_is_shown(serve, public, rng):
    before = as_nobody()
    path = make_buffer(public / "mine", rng)
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        buffer.update_priorities(buffer.sample(256), rng.random(256))
    os.chmod(path / "LOCK", 0o644)
    server = serve(path, before=before, python=["-B"])
    for route in (*ROUTES, "draws?sampler=PrioritizedSampler"):
        assert server.get(f"/api/b/0/{route}")[0] == 200, route


def test_a_port_that_another_program_has(path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, err = run(path, "--port", port)
    assert (code, err) == (
        1,
        f"mmreplay: Port {port} of 127.0.0.1 is taken by another program. Pass another "
        "--port, or 0 for any free one.\n",
    )


@pytest.mark.parametrize("missing", ["starlette", "uvicorn", "anyio"])
@pytest.mark.sliced(1)
def test_without_the_extra_the_command_says_what_to_install(path, tmp_path, missing):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{missing!r}] = None\n")
    code, err = run(path, env={"PYTHONPATH": str(tmp_path)})
    assert (code, err) == (
        1,
        "mmreplay: The page needs Starlette and uvicorn. Run: pip install 'mmreplay[web]'\n",
    )


def test_without_a_browser_the_address_is_printed(path, tmp_path):
    (tmp_path / "w3m").write_text("#!/bin/sh\nsleep 60\n")
    os.chmod(tmp_path / "w3m", 0o755)
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    }
    # A browser of the terminal would take it away from the server.
    env |= {"PATH": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mmreplay", "view", str(path), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        assert process.stdout.readline().startswith("Open http://127.0.0.1:")
        assert process.stdout.readline() == "No browser was found on this machine.\n"
    finally:
        process.kill()
        process.communicate()


class FakeBrowser:
    """A browser that ends when its window is closed."""

    def __init__(self):
        self.urls, self.ended, self.closed = [], [], threading.Event()

    def open(self, url):
        self.urls.append(url)
        self.closed.wait(20)
        self.ended.append(url)
        return True


def test_the_browser_is_not_waited_for(monkeypatch):
    browser = FakeBrowser()
    monkeypatch.setattr(launch.webbrowser, "get", lambda: browser)
    assert launch.open_browser("http://127.0.0.1:1/")
    assert not browser.ended
    until(lambda: browser.urls)
    browser.closed.set()
    assert browser.urls == ["http://127.0.0.1:1/"]


@pytest.mark.crash
@pytest.mark.parametrize("name", ["flags.bin", "records.bin", "COMMIT", "all"])
@pytest.mark.sliced(1)
def test_files_that_become_shorter_while_they_are_shown(serve, tmp_path, rng, name):
    bad = make_buffer(tmp_path / "bad", rng)
    server = serve(bad, make_buffer(tmp_path / "good", rng))
    for route in ROUTES:
        assert server.get(f"/api/b/0/{route}")[0] == 200, route
    for file in (bad / "data-000001").iterdir():
        if file.is_file() and name in (file.name, "all"):
            os.truncate(file, 0)
    state, good = server.json("/api/buffers")["buffers"]
    assert (state["state"], good["state"]) == ("unreadable", "closed")
    for route in ROUTES:
        status, text = server.refused(f"/api/b/0/{route}")
        assert status == 409
        assert str(bad) in text
    # A mapped page beyond the end of its file would have ended the process.
    assert server.json("/api/b/1/overview")["steps"] == 600


SHORTENED_DURING_A_READ = """
import json, os, sys
from pathlib import Path
from mmreplay.page import shown
from mmreplay.page.api import Page
from mmreplay.page.saved import save_page

path, route = Path(sys.argv[1]), sys.argv[2]
page = Page([path, Path(sys.argv[3])])
page.states()
check = shown.DataFiles.check

def cut_after_the_check(files):
    check(files)
    for file in (path / "data-000001").iterdir():
        if file.is_file() and file.name != "COMMIT":
            os.truncate(file, 0)
            shown.DataFiles.check = check

shown.DataFiles.check = cut_after_the_check
if route == "save":
    try:
        save_page(page, path.parent / "saved")
    except Exception as error:
        answers = [(409, json.dumps({"error": str(error)}))]
    assert not (path.parent / "saved").exists()
else:
    answers = [page.answer("/api/b/0/" + route.partition("?")[0],
                           route.partition("?")[2])]
    answers = [(answer.status, answer.body.decode()) for answer in answers]
again = page.answer("/api/b/0/overview", "")
answers.append((again.status, again.body.decode()))
state, good = page.states()
other = page.answer("/api/b/1/overview", "")
print(json.dumps([answers, state["state"], good["state"], other.status]))
"""


@pytest.mark.crash
@pytest.mark.skipif(
    kernels.choose("faults", kernels.choice()).runs != "c", reason="the kernels in C are not built"
)
@pytest.mark.parametrize(
    "route",
    [
        "overview",
        "episodes",
        "episode?env=0&at=0",
        "values?env=0&first=0",
        "curve?env=0&field=reward&first=0&stop=100",
        "draws?sampler=UniformSampler()",
        "frames?env=0&field=observation/pixels&first=0&count=4",
        "compare?c=1",
        "save",
    ],
)
@pytest.mark.sliced(2)
def test_a_file_that_is_shortened_during_a_read_does_not_end_the_server(tmp_path, rng, route):
    bad = make_buffer(tmp_path / "bad", rng)
    good = make_buffer(tmp_path / "good", rng)
    done = subprocess.run(
        [sys.executable, "-c", SHORTENED_DURING_A_READ, str(bad), route, str(good)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    answers, state, other, status = json.loads(done.stdout)
    assert (state, other, status) == ("unreadable", "closed", 200)
    for code, body in answers:
        assert code == 409, body
        assert "cut" in body or "bytes" in body


@pytest.mark.crash
def test_a_fault_of_the_servers_own_is_words(ask, path, monkeypatch, caplog):
    def fail(*_):
        raise KeyError("x")

    monkeypatch.setattr("mmreplay.page.api.read_episode", fail)
    client = ask(path)
    assert client.refused("episode", "env=0&at=0") == (500, "The server failed: KeyError.")
    assert "KeyError: 'x'" in caplog.text
    assert client.json("overview")["steps"] == 600


def test_buffers_of_one_name_are_shown_by_their_paths(ask, tmp_path, rng):
    one = make_buffer(tmp_path / "one" / "robot", rng, count=30)
    two = make_buffer(tmp_path / "two" / "robot", rng, count=30)
    states = ask(one, two).page.states()
    assert [state["name"] for state in states] == [str(one), str(two)]


def test_a_command_that_repairs_quotes_its_paths(ask, tmp_path, rng):
    path = make_buffer(tmp_path / "my run; rm x", rng, count=30)
    (path / "data-000001" / "COMMIT").write_bytes(b"")
    (state,) = ask(path).page.states()
    assert state["repair"] == f"mmreplay repair '{path}' '{path}-repaired'"


def test_a_hostile_name_of_a_field_is_data(ask, tmp_path, rng):
    fields = {
        "observation": {HOSTILE: mr.Field((2,), "float32")},
        HOSTILE: mr.Field((20, 20), "uint8"),
        "action": mr.Field((2,), "float32"),
    }
    path = tmp_path / "hostile"
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 100) as buffer:
        buffer.extend(
            {
                "observation": {HOSTILE: np.full((50, 2), np.nan, np.float32)},
                HOSTILE: np.zeros((50, 20, 20), np.uint8),
                "action": np.zeros((50, 2), np.float32),
            }
        )
    client = ask(path)
    answers = [
        client.answer("overview"),
        client.answer("values", "env=0&first=0"),
        client.answer("curve", f"field={HOSTILE}&env=0&first=0&stop=9"),
        client.answer("frames", f"field={HOSTILE}&env=0&first=0"),
        client.answer("curve", f"field={HOSTILE}x&env=0&first=0&stop=9"),
    ]
    assert [answer.status for answer in answers] == [200, 200, 200, 200, 404]
    types = {answer.media_type for answer in answers}
    assert types == {"application/json", "application/octet-stream"}
    titles = [check["title"] for check in client.json("overview")["checks"]]
    assert f"Not finite: observation/{HOSTILE}" in titles


def test_a_buffer_without_ends_or_rewards(ask, tmp_path, rng):
    path = tmp_path / "bare"
    fields = {"observation": mr.Field((2,), "float32")}
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 100, 2, autoreset="disabled") as buffer:
        buffer.extend(observation=rng.normal(size=(50, 2, 2)).astype(np.float32))
    client = ask(path)
    overview = client.json("overview")
    assert overview["ends"]["running"] == 2
    titles = [check["title"] for check in overview["checks"]]
    assert titles[0] == "No reward field"
    assert "No episode has ended yet" in titles
    for sort in ("age", "return", "length"):
        rows = client.json("episodes", f"sort={sort}")["rows"]
        assert sorted(row[0] for row in rows) == [0, 1]
    episode = client.json("episode", "env=1&at=49")
    assert (episode["begin"], episode["end"], episode["kind"]) == (0, 50, "unfinished")
    assert client.json("draws", "sampler=EpisodeSampler(running=True)")["count"] == 256
    status, text = client.refused("draws", "sampler=EpisodeSampler()")
    assert status == 409
    assert "none of 100 published rows begins one" in text


@pytest.mark.slow
def test_an_episode_of_a_million_steps(serve, tmp_path, rng):
    path, count = tmp_path / "long", 1_000_000
    fields = {
        "observation": mr.Field((4,), "float32"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    }
    values = rng.normal(size=(count, 4)).astype(np.float32)
    rewards = (np.arange(count) % 1000 == 0).astype(np.float32)
    with mr.ReplayBuffer.create(path, mr.Schema(fields), count, autoreset="disabled") as buffer:
        ends = np.arange(count) == count - 1
        buffer.extend(observation=values, reward=rewards, terminated=ends)
    server = serve(path)
    overview = server.json("/api/b/0/overview")
    assert overview["lengths"]["y"] == [count]
    assert overview["returns"]["y"] == [1000]
    episode = server.json("/api/b/0/episode?env=0&at=555555")
    assert (episode["begin"], episode["end"], episode["return"]) == (0, count, 1000)
    assert episode["rewards"]["count"] == 1000
    assert episode["rewards"]["at"] == [*range(0, count, 1000)]
    query = f"field=observation&env=0&first=0&stop={count}&buckets=1000&c0=0&c1=4"
    status, body = server.get(f"/api/b/0/curve?{query}")
    assert status == 200
    curves = np.frombuffer(body[-3 * 4 * 1000 * 4 :], "<f4").reshape(3, 4, 1000)
    buckets = values.reshape(1000, 1000, 4)
    np.testing.assert_array_equal(curves[0], buckets.min(1).T)
    np.testing.assert_array_equal(curves[1], buckets.max(1).T)
    np.testing.assert_allclose(curves[2], buckets.mean(1).T, atol=1e-6)
    assert server.anonymous_mib < 150


TRAINER = """
import sys, numpy as np, mmreplay as mr
sampler = mr.PrioritizedSampler(seed=0)
with mr.ReplayBuffer.open(sys.argv[1], sampler=sampler) as buffer:
    for _ in range(300):
        batch = buffer.sample(64)
        buffer.update_priorities(batch, np.full(64, 7.0))
    print(sampler.where, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.crash
def test_a_trainer_that_starts_while_draws_are_shown_has_its_priorities_on_disk(serve, path, rng):
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        buffer.update_priorities(buffer.sample(256), rng.random(256))
    folder = path / "samplers" / "prioritized"
    before = {name: (folder / name).read_bytes() for name in ("STATE", "LOCK")}
    server = serve(path, "--sampler", "PrioritizedSampler(alpha=1)")
    stop, statuses = threading.Event(), []

    def look():
        seed = 0
        while not stop.is_set():
            seed += 1
            statuses.append(server.get(f"/api/b/0/draws?seed={seed}")[0])
            statuses.append(server.get("/api/b/0/overview")[0])

    viewer = threading.Thread(target=look)
    viewer.start()
    try:
        while len(statuses) < 20:
            time.sleep(0.01)
        for name, data in before.items():
            assert (folder / name).read_bytes() == data, name
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(path)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert trainer.stdout.readline() == "disk\n"
            with open("/proc/locks") as table:
                inode = str(os.stat(folder / "LOCK").st_ino)
                holders = [line.split()[4] for line in table if f":{inode} " in line]
            assert str(server.process.pid) not in holders
        finally:
            trainer.communicate("\n")
    finally:
        stop.set()
        viewer.join()
    assert set(statuses) == {200}
    # What the trainer learned is what the page shows then.
    with mr.ReplayBuffer.open(path, sampler=mr.PrioritizedSampler(alpha=1)) as buffer:
        draw = buffer.sampler.draw(buffer.view, 256)
        assert buffer.sampler.where == "disk"
    found = server.json("/api/b/0/draws?seed=1")["probabilities"]
    assert max(found) == pytest.approx(draw.probabilities.max(), rel=1e-3)


def slow_request(server, address):
    """A client that asks and never reads."""
    client = socket.socket()
    # What the kernel takes in for it is no memory of the server's.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    client.sendall(
        f"GET {address} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Cookie: {server.cookie}\r\n\r\n".encode()
    )
    return client


@pytest.mark.crash
@pytest.mark.slow
def test_slow_clients_hold_no_memory_and_keep_no_one_waiting(serve, tmp_path, rng):
    fields = {"observation": mr.Field((480, 640, 3), "uint8")}
    path = tmp_path / "frames"
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 50) as buffer:
        frames = rng.integers(0, 256, (40, 480, 640, 3), np.uint8)
        buffer.extend(observation=frames)
    server = serve(path)
    address = "/api/b/0/frames?field=observation&env=0&first=0&count=4"
    assert len(server.get(address)[1]) > 3 << 20
    highest = 0.0
    clients = []
    for _ in range(40):
        clients.append(slow_request(server, address))
        highest = max(highest, server.anonymous_mib)
    for _ in range(50):
        highest = max(highest, server.anonymous_mib)
        time.sleep(0.02)
    begin = time.monotonic()
    assert server.json("/api/b/0/values?env=0&first=0")["first"] == 0
    # Until then the answers of slow clients would hold their threads.
    assert time.monotonic() - begin < app.RESPONSE_S / 2
    # 40 answers of 3.5 MiB are 140: at most 16 are kept, beside what three threads
    # work at and what malloc keeps.
    assert highest < 150
    for client in clients:
        client.close()
    assert server.close() == ""


def test_requests_beyond_the_bounds_of_http(serve, path):
    server = serve(path)
    for line, status in (
        (b"POST /api/buffers HTTP/1.1", b"405"),
        (b"GET /api/b/0/overview?" + b"x" * 9000 + b" HTTP/1.1", b"400"),
        (b"NONSENSE", b"400"),
    ):
        with socket.create_connection(("127.0.0.1", server.port), 20) as client:
            host = f"Host: 127.0.0.1:{server.port}\r\nCookie: {server.cookie}"
            client.sendall(line + b"\r\n" + host.encode() + b"\r\n\r\n")
            assert client.recv(1 << 16).split()[1] == status, line[:40]
    with socket.create_connection(("127.0.0.1", server.port), 20) as client:
        client.sendall(b"GET / HTTP/1.1\r\nX: ")
        sent = 0
        # The server closes as it answers; where the client has sent more by then, the
        # kernel resets the connection, and may drop the answer.
        try:
            while sent < 1 << 20 and not select.select([client], [], [], 0.1)[0]:
                client.sendall(b"x" * 8192)
                sent += 8192
            answer = client.recv(1 << 16)
        except (BrokenPipeError, ConnectionResetError):
            answer = b"HTTP/1.1 400"
        assert answer.split()[1] == b"400"
        assert sent < 1 << 20
    assert server.json("/api/buffers")
    response = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    response.request("GET", "/api/buffers")
    assert response.getresponse().status == 403
    response.close()


@pytest.mark.slow
def test_a_resize_and_a_removal_by_another_process(serve, path):
    server = serve(path)
    assert server.json("/api/b/0/overview")["capacity"] == 1000
    code = "import sys, mmreplay as mr\n"
    code += "with mr.ReplayBuffer.open(sys.argv[1], 'r+') as b: b.resize(200)"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    # An answer may be a second old, or older where it takes long to make.
    until(lambda: server.json("/api/b/0/overview")["capacity"] == 200)
    assert server.json("/api/b/0/overview")["rows"] == 400
    status, text = server.refused("/api/b/0/episode?env=0&at=5")
    assert (status, text) == (410, "Position 5 of environment 0 was overwritten.")
    subprocess.run(["rm", "-r", str(path)], check=True)
    assert server.json("/api/buffers")["buffers"][0]["state"] == "removed"
    assert server.json("/api/b/0/overview")["capacity"] == 200
    assert server.get("/api/b/0/values?env=0&first=0")[0] == 409


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype", "rows"),
    [
        ((480, 640, 3), "uint8", 600),
        ((480, 640), "float32", 300),
        ((1 << 20,), "float32", 100),
        ((10_000,), "bfloat16", 4000),
    ],
)
def test_memory_is_bounded_whatever_the_fields(serve, tmp_path, rng, shape, dtype, rows):
    fields = {
        "observation": mr.Field(shape, dtype),
        "action": mr.Field(shape[-1:], "float32"),
        "terminated": mr.Field((), "bool"),
    }
    path = tmp_path / "large"
    with mr.ReplayBuffer.create(path, mr.Schema(fields), rows, autoreset="disabled") as buffer:
        for _ in range(0, rows, 50):
            kind = np.float32 if dtype == "bfloat16" else dtype
            buffer.extend(
                observation=rng.integers(0, 255, (50, *shape)).astype(kind),
                action=rng.random((50, *shape[-1:]), np.float32),
                terminated=np.arange(50) % 25 == 24,
            )
    server = serve(path)
    stop, highest = threading.Event(), [0.0]

    def look():
        while not stop.is_set():
            highest[0] = max(highest[0], server.anonymous_mib)
            time.sleep(0.002)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        assert server.json("/api/b/0/overview")["steps"] == rows
        for route in (
            "frames?field=observation&env=0&first=0&count=16",
            "curve?field=observation&env=0&first=0&stop=50&c0=0&c1=8",
            "curve?field=action&env=0&first=0&stop=50&c0=0&c1=8",
        ):
            assert server.get(f"/api/b/0/{route}")[0] in (200, 400)
    finally:
        stop.set()
        watcher.join()
    assert highest[0] < 150


@pytest.mark.slow
def test_large_buckets_take_little_memory(serve, tmp_path, rng):
    count = 200_000
    path = tmp_path / "wide"
    fields = {"observation": mr.Field((64,), "float32")}
    values = rng.random((count, 64), np.float32)
    values[::1000, ::7] = np.nan
    with mr.ReplayBuffer.create(path, mr.Schema(fields), count) as buffer:
        for first in range(0, count, 20_000):
            buffer.extend(observation=values[first : first + 20_000])
    server = serve(path)
    query = f"field=observation&env=0&first=0&stop={count}&c0=0&c1=64"
    stop, highest = threading.Event(), [0.0]

    def look():
        while not stop.is_set():
            highest[0] = max(highest[0], server.anonymous_mib)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for buckets in (1, 64):
            address = f"/api/b/0/curve?{query}&buckets={buckets}"
            with ThreadPoolExecutor(3) as pool:
                answers = list(pool.map(server.get, [address] * 3))
            assert [status for status, _ in answers] == [200] * 3
    finally:
        stop.set()
        looking.join()
    curves = np.frombuffer(answers[0][1][-3 * 64 * 64 * 4 :], "<f4").reshape(3, 64, 64)
    expected = np.nanmin(values.reshape(64, count // 64, 64), axis=1).T
    np.testing.assert_array_equal(curves[0], expected)
    assert highest[0] < 150
