"""The end of a run, over a cluster of this process."""

from contextlib import nullcontext

import pytest

ray = pytest.importorskip("ray")

from mmreplay.errors import FailedError  # noqa: E402
from mmreplay.ray import cluster, run_status  # noqa: E402


def test_any_error_of_an_actor_is_a_named_one(monkeypatch):
    def get(reference, timeout):
        raise ray.exceptions.RayTaskError("extend", "lines", KeyError("a"))

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(FailedError, match=r"a call of mmreplay/r failed by KeyError: "):
        cluster.Remote("mmreplay/r").receive(None, 1.0)


def test_a_run_is_stopped_registry_first_with_the_shards_that_it_made_last(monkeypatch):
    shards, ended = ["a"], []

    class Remote:
        def __init__(self, name):
            self.name = name

        def send(self, method):
            ended.append(f"{method} {self.name}")

        def receive(self, reference, timeout_s):
            pass

    def kill(name):
        ended.append(name)
        if name == "mmreplay/run":
            # It made a shard again in the meantime.
            shards.append("b")

    monkeypatch.setattr(cluster, "require_connection", nullcontext)
    monkeypatch.setattr(cluster, "shard_keys", lambda run: list(shards))
    monkeypatch.setattr(cluster, "forget_facts", lambda run: ended.append("forget"))
    monkeypatch.setattr(cluster, "kill", kill)
    monkeypatch.setattr(run_status, "Remote", Remote)
    run_status.stop("run")
    assert ended == [
        "mmreplay/run", "stop mmreplay/run/a", "stop mmreplay/run/b",
        "mmreplay/run/a", "mmreplay/run/b", "forget",
    ]  # fmt: skip
