"""The end of a run, over a cluster of this process."""

from contextlib import nullcontext
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.errors import FailedError, SchemaError  # noqa: E402
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
        "mmreplay/run",
        "stop mmreplay/run/a",
        "stop mmreplay/run/b",
        "mmreplay/run/a",
        "mmreplay/run/b",
        "forget",
    ]


def test_the_page_shows_the_rings_of_this_node_whatever_its_shard_is_called(monkeypatch, capsys):
    from mmreplay.cli.view import rings_here

    def shard_status(key, node_id):
        ring = run_status.RingStatus(
            "ring-000", f"/data/{key}", 100, 1, 60, 60, (60,), None, None, None, {}
        )
        return run_status.ShardStatus(key, "host", "/data", 1, True, None, (ring,), node_id)

    shards = (shard_status("disk-7", "here"), shard_status("host", "there"))
    status = run_status.RunStatus("run", shards)
    monkeypatch.setattr(mr.ray, "status", lambda run: status)
    monkeypatch.setattr(cluster, "connected", nullcontext)
    # Another node of the same host has the name that this one would have.
    monkeypatch.setattr(cluster, "this_node", lambda: cluster.Node("here", "host", None))
    monkeypatch.setattr(cluster, "this_node_id", lambda: "here")
    assert rings_here("run", "auto") == [Path("/data/disk-7")]
    printed = capsys.readouterr().out
    assert "/data/host" in printed
    assert "/data/disk-7" not in printed
    monkeypatch.setattr(cluster, "this_node_id", lambda: "nowhere")
    message = r"the run 'run' has no ring on this node \(host\)\. .* disk-7, host\.$"
    with pytest.raises(SchemaError, match=message):
        rings_here("run", "auto")


@pytest.mark.parametrize(
    ("heads", "shown"),
    [((1250,), "1,250"), ((7, 7), "7"), (tuple(range(1000, 1251)), "1,000 to 1,250")],
)
def test_the_table_shows_the_least_and_the_most_head_of_a_ring(capsys, heads, shown):
    from mmreplay.cli.ray import print_status

    ring = run_status.RingStatus(
        "ring-000", "/data", 2000, len(heads), 60, sum(heads), heads, 5.0, None, None, {}
    )
    shard = run_status.ShardStatus("n0", "host", "/", 1, True, None, (ring,), "id")
    print_status(run_status.RunStatus("run", (shard,)))
    lines = capsys.readouterr().out.splitlines()
    (names,) = (line for line in lines if "heads" in line)
    (row,) = (line for line in lines if "ring-000" in line)
    assert row[: names.index("heads") + 5].endswith(f"  {shown}")


class Answers:
    """Stands for Ray: what was asked for, and which results are there."""

    def __init__(self, monkeypatch, there):
        self.there, self.asked = set(there), []
        monkeypatch.setattr(ray, "wait", lambda every, num_returns, timeout: None)
        monkeypatch.setattr(ray, "get", self.get)

    def get(self, references, timeout):
        if not self.there.issuperset(references):
            raise ray.exceptions.GetTimeoutError("late")
        self.asked += references
        raise ray.exceptions.RayTaskError("exchange", "lines", FailedError("stopped"))


def test_errors_under_way_are_looked_at_in_the_end(monkeypatch):
    answers = Answers(monkeypatch, there=["a", "b", "b1"])
    calls = cluster.Unanswered()
    calls.add("a", ["a"], lambda: calls)
    calls.add("b", ["b", "b1"], lambda: None)
    calls.add("late", ["late"], lambda: None)
    calls.add("seen", ["seen"], lambda: None)
    calls.remove("seen")
    calls.settle()
    assert answers.asked == ["a", "b", "b1"]
    answers.there.add("late")
    calls.settle()
    assert answers.asked == ["a", "b", "b1", "late"]


def test_calls_that_no_one_needs_do_not_add_up(monkeypatch):
    answers = Answers(monkeypatch, there=range(200))
    calls = cluster.Unanswered()
    for number in range(100):
        # Every second one is still waited for.
        needed = (lambda: calls) if number % 2 and number < 20 else (lambda: None)
        calls.add(number, [number], needed)
    assert set(answers.asked).isdisjoint(range(1, 20, 2))
    assert len(calls._calls) <= cluster.MAX_UNANSWERED + 10
