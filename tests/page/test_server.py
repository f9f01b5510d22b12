"""The page over HTTP: who is let in, what headers say, and live state."""

import asyncio
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.page.guard import POLICY, Guard, is_loopback
from tests.page.conftest import healthy_steps, make_buffer, schema, squeezed
from tests.waits import WAIT_S, until

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from mmreplay.errors import FailedError
from mmreplay.page import app
from mmreplay.page.api import Page

SOON_S = 15.0
"""Many looks, of which there are two a second: a core may be shared."""


class Browser:
    """Sends requests as a browser that has the cookie does."""

    def __init__(self, server):
        self.port = server.listener.getsockname()[1]
        self.server = server
        self.headers = {"Cookie": f"mmreplay-{self.port}={token_of(server)}"}

    def request(self, path, method="GET", headers=None, cookie=True, host=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        sent = dict(self.headers) if cookie else {}
        sent |= headers or {}
        connection.putrequest(method, path, skip_host=host is not None, skip_accept_encoding=True)
        if host:
            connection.putheader("Host", host)
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        response.data = response.read()
        connection.close()
        return response

    def json(self, path):
        response = self.request(path)
        assert response.status == 200, response.data
        return json.loads(response.data)

    def events(self, seconds=20.0):
        """States that the server sends, until the caller stops."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        connection.request("GET", "/api/live", headers=self.headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        try:
            while line := response.fp.readline():
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        finally:
            connection.close()


def token_of(server):
    return server.url.partition("token=")[2]


@pytest.fixture
def serve():
    """Serve pages of buffers on free ports; they end with the test."""
    servers = []

    def start(*paths, host="127.0.0.1", **options):
        server = app.make_server(Page(paths, **options), host, 0)
        server.start()
        servers.append(server)
        browser = Browser(server)
        for _ in range(100):
            with socket.socket() as probe:
                if server.server.started and not probe.connect_ex(("127.0.0.1", browser.port)):
                    break
            time.sleep(0.05)
        return browser

    yield start
    for server in servers:
        server.close()


def test_the_first_address_gives_the_cookie(serve, path):
    browser = serve(path)
    token = token_of(browser.server)
    response = browser.request(f"/?token={token}", cookie=False)
    assert (response.status, response.headers["location"]) == (303, "/")
    cookie = response.headers["set-cookie"]
    assert cookie.startswith(f"mmreplay-{browser.port}={token};")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert len(token) >= 32


def test_who_has_no_key_sees_nothing(serve, path):
    browser = serve(path)
    for address in ("/", "/?token=x", "/api/buffers", "/static/app.js", "/api/live"):
        response = browser.request(address, cookie=False)
        assert response.status == 403, address
        assert b"robot" not in response.data
    for value in ("x", "", "ä"):
        cookie = {"Cookie": f"mmreplay-{browser.port}={value}"}
        raw = {"Cookie": cookie["Cookie"].encode().decode("latin-1")}
        assert browser.request("/api/buffers", headers=raw).status == 403


def test_a_page_does_not_log_another_out(serve, path):
    one, two = serve(path), serve(path)
    both = "; ".join([one.headers["Cookie"], two.headers["Cookie"]])
    for browser in (one, two):
        assert browser.request("/api/buffers", headers={"Cookie": both}).status == 200
    headers = {"Cookie": two.headers["Cookie"]}
    assert one.request("/api/buffers", headers=headers).status == 403


def test_a_foreign_host_is_refused(serve, path):
    browser = serve(path)
    port = browser.port
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1:{port + 1}", "x"):
        assert browser.request("/api/buffers", host=host).status == 421
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"LOCALHOST:{port}"):
        assert browser.request("/api/buffers", host=host).status == 200


def test_only_get(serve, path):
    browser = serve(path)
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"):
        response = browser.request("/api/buffers", method)
        assert (response.status, response.headers["allow"]) == (405, "GET")


def test_every_response_has_the_security_headers(serve, path):
    browser = serve(path)
    for address, cookie in (
        ("/api/buffers", True),
        ("/nothing", True),
        ("/", False),
        ("/api/x", True),
        ("/static/x", True),
        ("/api/b/0/curve", True),
    ):
        headers = browser.request(address, cookie=cookie).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers
        assert "access-control-allow-origin" not in headers


def test_no_path_of_a_request_reaches_the_disk(serve, path, tmp_path):
    (tmp_path / "secret.js").write_text("secret")
    browser = serve(path)
    for address in (
        "/static/../guard.py",
        "/static/..%2fguard.py",
        "/static/%2e%2e/guard.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/..%2f..%2fetc/passwd",
        "/static/",
        "/static/vendor/",
        "/static/app.js%00",
        "//etc/passwd",
        f"/static/{tmp_path}/secret.js",
    ):
        assert browser.request(address).status == 404, address


def test_answers_are_those_of_the_page(serve, path):
    browser = serve(path)
    overview = browser.json("/api/b/0/overview")
    assert overview["steps"] == 600
    page = Page([path])
    frames = page.answer("/api/b/0/frames", "field=observation%2Fpixels&env=0&first=3&count=2")
    response = browser.request("/api/b/0/frames?field=observation%2Fpixels&env=0&first=3&count=2")
    assert response.data == frames.body
    page.close()
    tag = browser.request("/api/b/0/overview").headers["etag"]
    again = browser.request("/api/b/0/overview", headers={"If-None-Match": tag})
    assert (again.status, again.data) == (304, b"")


def test_bounds_over_http(serve, path):
    browser = serve(path)
    assert browser.request("/api/b/0/curve?field=reward").status == 400
    assert browser.request("/api/b/9/overview").status == 404
    assert browser.request("/api/b/0/overview?" + "x" * 20_000).status == 400


def test_state_follows_a_writer(serve, tmp_path, rng):
    path = tmp_path / "live"
    steps = healthy_steps(rng, 10, 1)
    with mr.ReplayBuffer.create(path, schema(), 100, autoreset="disabled") as writer:
        events = serve(path).events()
        first = next(events)[0]
        assert (first["state"], first["head"], first["pid"]) == ("live", 0, os.getpid())
        one = {k: v[:, 0] for k, v in steps.items() if k != "observation"}
        one["observation"] = {k: v[:, 0] for k, v in steps["observation"].items()}
        begin = time.monotonic()
        writer.extend(one)
        head = next(events)[0]["head"]
        assert head == 10
        assert time.monotonic() - begin < SOON_S
    states = [first["state"]]
    for state in events:
        states.append(state[0]["state"])
        if states[-1] == "closed":
            break
    assert states[-1] == "closed"


def test_states_come_twice_a_second_at_most(serve, tmp_path, rng):
    path = tmp_path / "live"
    fields = {"observation": mr.Field((2,), "float32")}
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 1000) as writer:
        stop = threading.Event()

        def write():
            while not stop.is_set():
                writer.add(observation=np.zeros(2, np.float32))
                time.sleep(0.002)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            begin = time.monotonic()
            events = serve(path).events()
            next(events)
            for _ in range(4):
                state = next(events)[0]
            assert time.monotonic() - begin > 1.6
            assert state["rate"] > 0
        finally:
            stop.set()
            thread.join()


WRITER = """
import sys, time, numpy as np, mmreplay as mr
fields = {"observation": mr.Field((2,), "float32")}
buffer = mr.ReplayBuffer.create(sys.argv[1], mr.Schema(fields), 1000)
print("ready", flush=True)
while True:
    buffer.add(observation=np.zeros(2, np.float32))
    time.sleep(0.01)
"""


@pytest.mark.crash
def test_a_killed_writer_is_seen(serve, tmp_path):
    path = tmp_path / "killed"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout.readline() == "ready\n"
        browser = serve(path)
        events = browser.events()
        assert next(events)[0]["state"] == "live"
        begin = time.monotonic()
        writer.send_signal(signal.SIGKILL)
        until(lambda: next(events)[0]["state"] == "gone")
        assert time.monotonic() - begin < SOON_S
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert opening_of(browser) == "the writer was killed; no published row is lost"
    assert end_of(browser) == "unfinished"
    # A page that starts later says it as well, and follows the next writer.
    later = serve(path)
    assert later.json("/api/buffers")["buffers"][0]["state"] == "gone"
    assert opening_of(later) == "the writer was killed; no published row is lost"
    with mr.ReplayBuffer.open(path, "r+", on_resume="continue"):
        assert later.json("/api/buffers")["buffers"][0]["state"] == "live"
        assert opening_of(later) == "a writer is at work"
        assert end_of(later) == "running"
    assert opening_of(later) == opening_of(browser) == "closed in order"
    assert end_of(later) == "unfinished"


def opening_of(browser):
    return browser.json("/api/b/0/overview")["storage"]["opening"]


def end_of(browser):
    (row,) = browser.json("/api/b/0/episodes")["rows"]
    episode = browser.json("/api/b/0/episode?env=0&at=0")
    assert episode["kind"] == row[4]
    for word in ("running", "unfinished"):
        assert browser.json(f"/api/b/0/episodes?end={word}")["total"] == 1
    return row[4]


def test_a_state_has_another_version_when_its_writer_ends(serve, tmp_path):
    path = tmp_path / "a"
    fields = {"observation": mr.Field((2,), "float32")}
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 100) as buffer:
        buffer.add(observation=np.zeros(2, np.float32))
        browser = serve(path)
        live = browser.json("/api/buffers")["buffers"][0]
        assert opening_of(browser) == "a writer is at work"
    closed = browser.json("/api/buffers")["buffers"][0]
    assert (live["state"], closed["state"]) == ("live", "closed")
    assert live["version"].endswith(".live")
    assert closed["version"].endswith(".closed")
    assert opening_of(browser) == "closed in order"


def test_a_seventeenth_viewer_waits(serve, path):
    browser = serve(path)
    streams = []
    for _ in range(16):
        streams.append(browser.events())
        next(streams[-1])
    response = browser.request("/api/live")
    assert response.status == 503
    assert b"16 live viewers" in response.data
    assert browser.json("/api/b/0/overview")["steps"] == 600
    for stream in streams:
        stream.close()
    for _ in range(60):
        time.sleep(0.1)
        try:
            stream = browser.events()
            next(stream)
            stream.close()
            return
        except AssertionError:
            pass
    pytest.fail("viewers that left are still counted")


def damaged(path):
    (path / "data-000001" / "COMMIT").write_bytes(b"")


def live(app, key, send):
    """Ask for the state as a client that leaves at once."""
    headers = [(b"host", b"127.0.0.1:1"), (b"cookie", f"mmreplay-1={key}".encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "GET",
        "path": "/api/live",
        "raw_path": b"/api/live",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "state": {},
        "headers": headers,
        "client": ("1", 1),
        "server": ("1", 1),
    }

    async def receive():
        return {"type": "http.disconnect"}

    return asyncio.wait_for(app(scope, receive, send), 20)


def test_viewers_that_left_before_the_first_event_are_not_counted(path, monkeypatch):
    monkeypatch.setattr("mmreplay.page.app.RESPONSE_S", 0.2)
    page, guard = Page([path]), Guard("127.0.0.1", 1)
    made = app.make_app(page, guard)
    statuses = []

    async def never(message):
        statuses.append(message.get("status"))
        await asyncio.sleep(100)

    async def leave():
        for _ in range(20):
            await live(made, guard.token, never)

    asyncio.run(leave())
    assert statuses == [200] * 20
    page.close()


def test_a_damaged_buffer_is_reported_and_the_server_lives_on(serve, tmp_path, rng):
    good = make_buffer(tmp_path / "good", rng)
    bad = make_buffer(tmp_path / "bad", rng)
    damaged(bad)
    browser = serve(bad, good)
    states = browser.json("/api/buffers")["buffers"]
    assert [state["state"] for state in states] == ["unreadable", "closed"]
    assert "COMMIT" in states[0]["text"]
    assert states[0]["repair"].startswith("mmreplay repair")
    response = browser.request("/api/b/0/overview")
    assert response.status == 409
    assert "COMMIT" in json.loads(response.data)["error"]
    assert browser.json("/api/b/1/overview")["steps"] == 600


@pytest.mark.parametrize("name", ["metadata.json", "data-000001/flags.bin", "all"])
@pytest.mark.parametrize("damage", ["cut", "noise", "text"])
def test_hostile_files_give_words(serve, tmp_path, rng, name, damage):
    path = make_buffer(tmp_path / "bad", rng)
    files = [p for p in path.rglob("*") if p.is_file() and p.name != "LOCK"]
    for file in files:
        if name not in ("all", str(file.relative_to(path))):
            continue
        data = file.read_bytes()
        changed = {
            "cut": data[: len(data) // 2],
            "noise": rng.integers(0, 256, len(data), np.uint8).tobytes(),
            "text": b"{" * 1000,
        }
        file.write_bytes(changed[damage])
    browser = serve(path)
    assert browser.request("/api/buffers").status == 200
    for query in (
        "overview",
        "episodes",
        "episode?env=0&at=0",
        "values?env=0&first=0",
        "curve?field=reward&env=0&first=0&stop=9",
        "draws?sampler=UniformSampler",
        "frames?field=observation%2Fpixels&env=0&first=0",
    ):
        response = browser.request(f"/api/b/0/{query}")
        assert response.status in (200, 400, 404, 409, 410), query
        if response.status != 200:
            assert json.loads(response.data)["error"]


def test_the_last_commit_is_followed_after_the_last_row(serve, tmp_path, rng):
    path = tmp_path / "commits"
    steps = squeezed(healthy_steps(rng, 500, 1))
    with mr.ReplayBuffer.create(
        path, schema(), 1000, autoreset="disabled", commit_every=None
    ) as writer:
        writer.extend(steps, final_observation=steps["observation"])
        browser = serve(path)
        events = browser.events()
        first = next(events)[0]

        def commit(tag=""):
            headers = {"If-None-Match": tag} if tag else {}
            response = browser.request("/api/b/0/overview", headers=headers)
            assert response.status == 200
            value = json.loads(response.data)["storage"]["commit"]
            return value, response.headers["etag"]

        before, tag = commit()
        assert before["behind"] > 500
        writer.commit()
        versions = (s[0]["version"] for s in events)
        assert next(v for v in versions if v != first["version"])
        after, tag = commit(tag)
        assert (after["behind"], after["clean"]) == (0, False)
        assert after["time"] > before["time"]
    closed = next(s[0] for s in events if s[0]["state"] == "closed")
    assert closed["version"] != first["version"]
    last, tag = commit(tag)
    assert (last["behind"], last["clean"]) == (0, True)
    again = browser.request("/api/b/0/overview", headers={"If-None-Match": tag})
    assert again.status == 304


def test_a_live_buffer_that_is_moved_is_followed(serve, tmp_path, rng):
    path, elsewhere = tmp_path / "runs" / "x", tmp_path / "elsewhere"
    steps = squeezed(healthy_steps(rng, 60, 1))
    path.parent.mkdir()
    with mr.ReplayBuffer.create(
        path, schema(), 1000, autoreset="disabled", commit_every=None
    ) as writer:
        browser = serve(path)
        state = browser.json("/api/buffers")["buffers"][0]
        assert (state["state"], state["moved"], state["text"]) == ("live", None, "")
        path.rename(elsewhere)
        writer.extend(steps, final_observation=steps["observation"])
        state = browser.json("/api/buffers")["buffers"][0]
        assert (state["state"], state["pid"]) == ("live", os.getpid())
        assert state["head"] == writer.heads.sum()
        assert state["moved"] == str(elsewhere)
        words = f"{path} leads nowhere: the folder was moved to {elsewhere}."
        assert state["text"].startswith(words)
        overview = browser.json("/api/b/0/overview")
        assert overview["steps"] == 60
        assert overview["storage"]["path"] == str(elsewhere)
        assert browser.json("/api/b/0/draws?sampler=UniformSampler")["count"] == 256
    state = browser.json("/api/buffers")["buffers"][0]
    assert (state["state"], state["moved"]) == ("closed", str(elsewhere))


def test_a_deleted_buffer_shows_its_last_state(serve, path):
    browser = serve(path)
    overview = browser.json("/api/b/0/overview")
    shutil.rmtree(path)
    state = browser.json("/api/buffers")["buffers"][0]
    assert state["state"] == "removed"
    assert browser.json("/api/b/0/overview")["steps"] == overview["steps"]
    assert browser.request("/api/b/0/values?env=0&first=0").status == 409
    table = browser.json("/api/b/0/episodes?sort=length")
    assert table["total"] == overview["episodes"]["count"] == len(table["rows"])
    assert table["done"] == 1.0


def test_a_buffer_that_is_made_again_is_opened_again(serve, path, rng):
    browser = serve(path)
    assert browser.json("/api/b/0/overview")["steps"] == 600
    shutil.rmtree(path)
    assert browser.json("/api/buffers")["buffers"][0]["state"] == "removed"
    make_buffer(path, rng, count=60)
    until(lambda: browser.json("/api/buffers")["buffers"][0]["state"] == "closed")
    until(lambda: browser.json("/api/b/0/overview")["steps"] == 120)


def test_another_buffer_of_the_same_sizes_is_another(serve, path, rng):
    browser = serve(path)

    def returns():
        rows = browser.json("/api/b/0/episodes?sort=begin&desc=0&limit=500")["rows"]
        return [row[3] for row in rows if row[0] == 1]

    def stored():
        with mr.ReplayBuffer.open(path) as buffer:
            table = mr.episode_table(buffer)
        return pytest.approx(table.returns[table.env_ids == 1].tolist(), abs=1e-4)

    before = returns()
    assert before == stored()
    shutil.rmtree(path)
    assert browser.json("/api/buffers")["buffers"][0]["state"] == "removed"
    # The same ends at the same positions, and other rewards.
    make_buffer(path, rng)
    time.sleep(1.1)
    assert returns() == stored()
    assert returns() != before


def test_rewards_that_are_written_again_are_read_again(serve, tmp_path):
    fields = {
        "observation": mr.Field((), "float32"),
        "reward": mr.Field((), "float32", mutable=True),
        "terminated": mr.Field((), "bool"),
    }
    path = tmp_path / "mutable"
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 100, autoreset="disabled") as buffer:
        zeros = np.zeros(20, np.float32)
        ends = np.arange(20) % 10 == 9
        buffer.extend(observation=zeros, reward=zeros, terminated=ends)
        browser = serve(path)
        assert [row[3] for row in browser.json("/api/b/0/episodes")["rows"]] == [0, 0]
        buffer.write_field("reward", 0, np.arange(10), np.ones(10, np.float32))
        time.sleep(2.1)
        rows = browser.json("/api/b/0/episodes?sort=begin&desc=0")["rows"]
        assert [row[3] for row in rows] == [10, 0]


def test_a_resized_buffer_stays_shown(serve, path):
    browser = serve(path)
    before = browser.json("/api/buffers")["buffers"][0]["version"]
    assert browser.json("/api/b/0/overview")["capacity"] == 1000
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        buffer.resize(400)
    # An answer may be a second old, or older where it takes long to make.
    until(lambda: browser.json("/api/b/0/overview")["capacity"] == 400)
    after = browser.json("/api/buffers")["buffers"][0]
    assert after["version"].split(".")[0] != before.split(".")[0]
    response = browser.request("/api/b/0/frames?field=observation%2Fpixels&env=0&first=250&v=1.0")
    assert (response.status, response.headers["cache-control"]) == (200, "private, no-cache")


def test_a_slow_client_holds_no_thread(serve, path):
    browser = serve(path)
    slow = []
    for _ in range(8):
        client = socket.create_connection(("127.0.0.1", browser.port))
        client.sendall(
            b"GET /api/b/0/frames?field=observation%2Fpixels&env=0&first=0&count=96 "
            b"HTTP/1.1\r\nHost: 127.0.0.1:" + str(browser.port).encode() + b"\r\n"
            b"Cookie: " + browser.headers["Cookie"].encode() + b"\r\n\r\n"
        )
        slow.append(client)
    begin = time.monotonic()
    assert browser.json("/api/b/0/episodes")["all"] == 20
    # Until then the answers of slow clients would hold their threads.
    assert time.monotonic() - begin < app.RESPONSE_S / 2
    for client in slow:
        client.close()


@pytest.mark.parametrize("sent", ["nothing", "no key", "no host", "half"])
@pytest.mark.sliced(2)
def test_clients_without_the_key_do_not_keep_the_owner_out(serve, path, sent):
    browser = serve(path)
    events = browser.events()
    next(events)
    address = ("127.0.0.1", browser.port)
    host = f"127.0.0.1:{browser.port}" if sent != "no host" else "evil.example"
    request = f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    data = {"nothing": b"", "half": request[:-2]}.get(sent, request)
    clients = []
    try:
        for number in range(3 * 60):
            client = socket.create_connection(address, 20)
            client.sendall(data)
            clients.append(client)
            if number % 20 == 19:
                assert browser.json("/api/buffers")["buffers"][0]["head"] == 620
        assert browser.json("/api/b/0/overview")["steps"] == 600
        # The oldest of them were closed, those that got an answer too.
        head = b""
        while received := clients[0].recv(1 << 16):
            head += received
        if data == request:
            status = b"421" if sent == "no host" else b"403"
            assert head.startswith(b"HTTP/1.1 " + status)
            assert b"connection: close" in head.lower()
        # The owner's stream goes on.
        buffer = mr.ReplayBuffer.open(path, "r+")
        assert any(state[0]["state"] == "live" for state in events)
        buffer.close()
    finally:
        for client in clients:
            client.close()


def test_connections_that_send_no_request_are_closed(serve, path, monkeypatch):
    monkeypatch.setattr(app, "SILENT_S", 0.2)
    browser = serve(path)
    events = browser.events()
    assert next(events)[0]["state"] == "closed"
    address = ("127.0.0.1", browser.port)
    host = f"Host: 127.0.0.1:{browser.port}\r\n".encode()
    silent = [socket.create_connection(address, 20) for _ in range(60)]
    for number, client in enumerate(silent):
        if number % 3 == 1:
            client.sendall(b"GET / HTTP/1.1\r\n" + host)
        elif number % 3 == 2:
            # Refused without the key, and half of another request.
            client.sendall(b"GET / HTTP/1.1\r\n" + host + b"\r\nGET /")
    for client in silent:
        # Reset where the rest of what it sent was not read.
        with suppress(ConnectionResetError):
            while client.recv(1 << 16):
                pass
        client.close()
    # A stream is no silent connection.
    overview = browser.json("/api/b/0/overview")
    assert overview["steps"] == 600
    buffer = mr.ReplayBuffer.open(path, "r+")
    assert any(state[0]["state"] == "live" for state in events)
    buffer.close()


def test_at_most_four_threads_work(serve, path):
    browser = serve(path)
    before = threading.active_count()
    requests = [
        threading.Thread(target=browser.request, args=(f"/api/b/0/overview?alpha={number / 20}",))
        for number in range(20)
    ]
    for request in requests:
        request.start()
    most = 0
    while any(request.is_alive() for request in requests):
        # First, as a request may end before all threads are counted.
        asking = sum(request.is_alive() for request in requests)
        most = max(most, threading.active_count() - asking - before)
        time.sleep(0.005)
    for request in requests:
        request.join()
    assert most <= 4


def test_state_does_not_wait_for_requests(serve, path, monkeypatch):
    browser = serve(path)
    begun, done = threading.Semaphore(0), threading.Event()
    answer = Page.answer

    def wait(page, address, *arguments):
        if address.endswith("/curve"):
            begun.release()
            done.wait(2 * WAIT_S)
        return answer(page, address, *arguments)

    monkeypatch.setattr(Page, "answer", wait)
    address = "/api/b/0/curve?field=reward&env=0&first=0&stop=9"
    requests = [threading.Thread(target=browser.request, args=(address,)) for _ in range(8)]
    for request in requests:
        request.start()
    try:
        for _ in range(app.MAX_THREADS):
            assert begun.acquire(timeout=WAIT_S)
        begin = time.monotonic()
        assert browser.json("/api/buffers")["buffers"][0]["head"] == 620
        assert next(browser.events())[0]["head"] == 620
        assert time.monotonic() - begin < WAIT_S
        assert all(request.is_alive() for request in requests)
    finally:
        done.set()
        for request in requests:
            request.join()


def test_an_occupied_port_is_named(path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(FailedError, match=rf"Port {port} of 127\.0\.0\.1 is taken"):
            app.make_server(Page([path]), "127.0.0.1", port)


def test_a_host_that_is_not_ours_is_named(path):
    with pytest.raises(FailedError, match="Cannot listen on port"):
        app.make_server(Page([path]), "192.0.2.1", 0)


def test_small_answers_are_sent_at_once():
    # asyncio sets TCP_NODELAY for sockets that name their protocol.
    with app.bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_without_a_port_the_first_free_one_is_bound(path):
    one, two = app.bind("127.0.0.1", None), app.bind("127.0.0.1", None)
    try:
        numbers = [listener.getsockname()[1] for listener in (one, two)]
        assert app.FIRST_PORT <= numbers[0] < numbers[1]
    finally:
        one.close()
        two.close()


def test_other_machines_get_compressed_answers(serve, path):
    browser = serve(path, host="0.0.0.0")
    headers = {"Accept-Encoding": "gzip"}
    response = browser.request("/api/b/0/overview", headers=headers)
    assert response.headers["content-encoding"] == "gzip"
    import gzip

    assert json.loads(gzip.decompress(response.data))["steps"] == 600
    plain = browser.request("/api/b/0/overview")
    assert "content-encoding" not in plain.headers
    # Reached by an address, not by a name that somebody else chose.
    port = browser.port
    assert browser.request("/api/buffers", host=f"10.1.2.3:{port}").status == 200
    assert browser.request("/api/buffers", host=f"evil.example:{port}").status == 421


def test_hosts_of_the_guard():
    guard = Guard("192.168.1.5", 80, "key")
    cookie = {"cookie": "mmreplay-80=key"}
    for host, status in (
        ("192.168.1.5", None),
        ("192.168.1.5:80", None),
        ("localhost", None),
        ("192.168.1.6", 421),
        ("", 421),
        ("192.168.1.5:81", 421),
        (":80", 421),
    ):
        found = guard.check("GET", "/api/buffers", "", cookie | {"host": host})
        assert (None if found is None else found.status) == status, host
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")


def test_view_in_a_notebook_prints_a_link(path, capsys):
    page = mr.view(path, port=0)
    try:
        assert capsys.readouterr().out == f"Open {page.url} in a browser.\n"
        assert page.url in page._repr_html_()
        browser = Browser(page._server)
        for _ in range(100):
            try:
                assert browser.json("/api/b/0/overview")["steps"] == 600
                break
            except ConnectionError:
                time.sleep(0.05)
    finally:
        page.close()
    with pytest.raises(mr.SchemaError, match="at least one path, got none"):
        mr.view()
    with pytest.raises(mr.FormatError, match="does not exist"):
        mr.view("nowhere")


@pytest.mark.crash
def test_the_command_serves_until_ctrl_c(path):
    command = [sys.executable, "-m", "mmreplay", "view", str(path), "--no-open"]
    process = subprocess.Popen(
        [*command, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("Open http://127.0.0.1:")
        url = line.split()[1]
        port, token = url.split(":")[2].split("/?token=")
        time.sleep(0.3)
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
        headers = {"Cookie": f"mmreplay-{port}={token}"}
        connection.request("GET", "/api/live", headers=headers)
        response = connection.getresponse()
        assert b"state" in response.readline()
        # A page that is open must not keep it from ending.
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (0, ""), out
        response.close()
        connection.close()
    finally:
        process.kill()
        process.communicate()


def test_an_ipv6_address_is_served(path):
    try:
        server = app.make_server(Page([path]), "::1", 0)
    except FailedError:
        pytest.skip("this machine has no ::1")
    server.start()
    port = server.listener.getsockname()[1]
    try:
        assert server.url.startswith(f"http://[::1]:{port}/?token=")
        connection = http.client.HTTPConnection("::1", port, timeout=20)
        connection.request(
            "GET",
            "/api/buffers",
            headers={"Host": f"[::1]:{port}", "Cookie": f"mmreplay-{port}={token_of(server)}"},
        )
        response = connection.getresponse()
        assert (response.status, "content-encoding" in response.headers) == (200, False)
        connection.close()
    finally:
        server.close()


def test_a_notebook_without_the_extra_hears_what_to_install(path, monkeypatch):
    import mmreplay.page

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "mmreplay.page.app")
    monkeypatch.delattr(mmreplay.page, "app")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'mmreplay\[web\]'"):
        mr.view(path)


def test_a_notebooks_page_ends_with_its_block(path):
    with mr.view(path, port=0, sampler="UniformSampler()") as page:
        port = page._server.listener.getsockname()[1]
        assert repr(page) == f"<ServedPage {page.url}>"
        browser = Browser(page._server)
        for _ in range(100):
            try:
                assert browser.json("/api/b/0/draws")["sampler"] == "UniformSampler()"
                break
            except ConnectionError:
                time.sleep(0.05)
    page.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5).close()
