"""Buffers to show, and a page that answers about them."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.page.api import Page
from mmreplay.page.wire import unpack

LENGTH = 30


def schema():
    """A robot with a camera."""
    return mr.Schema(
        {
            "observation": {
                "pixels": mr.Field((24, 32, 3), "uint8"),
                "joints": mr.Field((4,), "float32"),
            },
            "action": mr.Field((2,), "float32"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )


def healthy_steps(rng, count, num_envs, length=LENGTH):
    """Steps without a fault, ``[count, num_envs]``: ends of both kinds."""
    lead = (count, num_envs)
    ends = np.zeros(lead, bool)
    ends[length - 1 :: length] = True
    kinds = rng.random(lead) < 0.9
    return {
        "observation": {
            "pixels": rng.integers(0, 256, (*lead, 24, 32, 3), np.uint8),
            "joints": rng.normal(size=(*lead, 4)).astype(np.float32),
        },
        "action": rng.normal(size=(*lead, 2)).astype(np.float32),
        "reward": rng.normal(size=lead).astype(np.float32),
        "terminated": ends & kinds,
        "truncated": ends & ~kinds,
    }


def make_buffer(path, rng, count=300, num_envs=2, capacity=1000, change=None, **options):
    """Make a buffer of steps; `change` may alter them before they are added."""
    options = {"autoreset": "disabled", "commit_every": None} | options
    steps = healthy_steps(rng, count, num_envs)
    if change is not None:
        change(steps)
    final = steps["observation"]
    with mr.ReplayBuffer.create(
        path, options.pop("schema", schema()), capacity, num_envs, **options
    ) as buffer:
        if num_envs == 1:
            steps = squeezed(steps)
            final = squeezed(final)
        buffer.extend(steps, final_observation=final)
    return path


def squeezed(steps, axis=1):
    """Steps without an axis of length 1."""
    return {
        name: squeezed(value, axis) if isinstance(value, dict) else np.take(value, 0, axis)
        for name, value in steps.items()
    }


def one_step(rng):
    """One step of one environment."""
    return squeezed(squeezed(healthy_steps(rng, 1, 1)), axis=0)


@pytest.fixture(scope="session")
def driver():
    """One browser for all modules."""
    from tests.page.browser import start

    driver = start()
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture
def tab(driver):
    """The browser's tab."""
    from tests.page.browser import Tab

    return Tab(driver)


@pytest.fixture
def serve():
    """Serve pages of buffers until the end of the test; returns their addresses."""
    from mmreplay.page import app

    servers = []

    def begin(*paths, **options):
        server = app.make_server(Page(paths, **options), "127.0.0.1", 0)
        server.start()
        servers.append(server)
        while not server.server.started:
            time.sleep(0.02)
        begin.servers = servers
        return server.url

    yield begin
    for server in servers:
        server.close()


@pytest.fixture
def path(tmp_path, rng):
    """Two environments of 300 steps each, ten episodes each, without a fault."""
    return make_buffer(tmp_path / "runs" / "robot", rng)


@pytest.fixture
def stored(path):
    """The same buffer, open to compare with."""
    with mr.ReplayBuffer.open(path) as buffer:
        yield buffer


class Client:
    """Asks a page without a server."""

    def __init__(self, *paths, **options):
        self.page = Page(paths, **options)

    def answer(self, name, query="", tag="", number=0):
        return self.page.answer(f"/api/b/{number}/{name}", query, tag)

    def json(self, name, query="", number=0):
        answer = self.answer(name, query, number=number)
        assert answer.status == 200, answer.body
        return json.loads(answer.body)

    def arrays(self, name, query):
        answer = self.answer(name, query)
        assert answer.status == 200, answer.body
        return unpack(answer.body)

    def refused(self, name, query=""):
        answer = self.answer(name, query)
        return answer.status, json.loads(answer.body)["error"]


@pytest.fixture
def ask():
    """Make clients of pages, which are closed at the end."""
    clients = []

    def make(*paths, **options):
        clients.append(Client(*paths, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.page.close()
