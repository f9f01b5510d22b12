"""A shard in this process: what it opens, what it refuses, and that it tries again."""

import os
import resource
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.cli.run import run as command  # noqa: E402
from mmreplay.disk import lock  # noqa: E402
from mmreplay.ray import shard as shards  # noqa: E402
from mmreplay.ray.draws import RingDraws  # noqa: E402
from mmreplay.ray.messages import client_to_bytes, request_to_bytes  # noqa: E402
from mmreplay.ray.shard import Shard  # noqa: E402
from tests.on_ray.rings import client_of, wanted_of  # noqa: E402
from tests.on_ray.rows import SCHEMA, block, check  # noqa: E402
from tests.waits import until  # noqa: E402


def fill(path, steps, schema=SCHEMA):
    """Make a ring, which has no writer then."""
    with mr.ReplayBuffer.create(path, schema, 1000) as ring:
        ring.extend(block(0, 0, steps))


@pytest.fixture
def shard(tmp_path):
    shard = Shard("run", str(tmp_path), "here")
    yield shard
    shard.stop()


def test_it_serves_the_rings_of_its_folder_and_those_that_come(shard, tmp_path):
    fill(tmp_path / "run" / "a", 10)
    (tmp_path / "run" / "half").mkdir()
    assert set(shard.open_rings()) == {"a"}
    opened = shard.rings["a"]
    fill(tmp_path / "run" / "b", 20)
    facts = shard.serve("b")
    assert (facts["steps"], facts["heads"], facts["writer"]) == (20, [20], None)
    assert shard.rings["a"] is opened
    check(shard.rings["b"].gather_all())
    info = shard.info()
    assert (info["run"], info["key"], info["pid"]) == ("run", "here", os.getpid())
    assert list(info["rings"]) == ["a", "b"]


def test_it_reads_while_a_writer_writes(shard, tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "run" / "a", SCHEMA, 1000) as ring:
        assert shard.serve("a")["writer"] == os.getpid()
        ring.extend(block(0, 0, 30))
        assert shard.serve("a")["heads"] == [30]


def test_a_folder_that_is_missing_is_an_answer_until_it_is_there(shard, tmp_path):
    assert shard.info()["error"]["kind"] == "FormatError"
    with pytest.raises(mr.FormatError, match=r"run does not exist on the node 'here'"):
        shard.serve("a")
    fill(tmp_path / "run" / "a", 10)
    assert shard.serve("a")["steps"] == 10
    assert shard.info()["error"] is None
    with pytest.raises(mr.FormatError, match=r"b does not exist .* local disk"):
        shard.serve("b")


def test_rates_are_those_of_a_second_or_more(shard, tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(shards, "time", SimpleNamespace(monotonic=lambda: now))
    with mr.ReplayBuffer.create(tmp_path / "run" / "a", SCHEMA, 1000) as ring:
        rates = []
        for steps, seconds in ((0, 0), (10, 0.5), (10, 0.75), (30, 0.5), (0, 1.0)):
            ring.extend(block(0, len(ring), steps))
            now += seconds
            rates.append(shard.serve("a")["rate"])
    # After 0, 0.5, 1.25, 1.75 and 2.75 s: since 0, 0, then 0.5 and 1.75.
    assert rates == [None, None, 20 / 1.25, 40 / 1.25, 0.0]


def test_it_says_the_sums_of_priorities_that_clients_draw_by(shard, tmp_path):
    fill(tmp_path / "run" / "a", 10)
    client = client_of(mr.PrioritizedSampler(alpha=1.0, initial_priority=2.0, name="td"))
    assert shard.info()["rings"]["a"]["priorities"] is None
    shard.masses(client, 0, 0.0)
    shard.masses(client_of(mr.UniformSampler()), 0, 0.0)
    ((name, total),) = shard.info()["rings"]["a"]["priorities"].items()
    assert (name, total) == ("td", pytest.approx(2.0 * 10, rel=1e-4))


def test_a_ring_that_was_deleted_is_no_more_and_its_name_free(shard, tmp_path):
    for name in ("a", "b"):
        fill(tmp_path / "run" / name, 10)
    opened = shard.open_rings()["a"]
    shutil.rmtree(tmp_path / "run" / "a")
    assert list(shard.info()["rings"]) == ["b"]
    assert opened.closed
    fill(tmp_path / "run" / "a", 30)
    assert shard.serve("a")["steps"] == 30
    # Another one in its place, between two looks.
    shutil.rmtree(tmp_path / "run" / "a")
    fill(tmp_path / "run" / "a", 20)
    assert shard.serve("a")["steps"] == 20


def test_a_ring_that_is_deleted_while_the_rings_are_looked_for_is_no_more(
    shard, tmp_path, monkeypatch
):
    for name in ("a", "b"):
        fill(tmp_path / "run" / name, 10)
    find = shard._find_rings

    def then_delete():
        found = find()
        shutil.rmtree(tmp_path / "run" / "a", ignore_errors=True)
        return found

    monkeypatch.setattr(shard, "_find_rings", then_delete)
    assert list(shard.open_rings()) == ["b"]


def test_a_damaged_ring_is_an_answer_until_it_is_whole(shard, tmp_path):
    fill(tmp_path / "run" / "a", 10)
    damaged = tmp_path / "run" / "b" / "metadata.json"
    fill(tmp_path / "run" / "b", 10)
    whole = damaged.read_bytes()
    damaged.write_bytes(b"{")
    with pytest.raises(mr.FormatError):
        shard.open_rings()
    error = shard.info()["error"]
    assert "run/b" in error["message"]
    damaged.write_bytes(whole)
    assert set(shard.open_rings()) == {"a", "b"}


def test_a_copy_of_a_ring_is_an_answer_until_it_is_out(shard, tmp_path):
    run = tmp_path / "run"
    fill(run / "a", 10)
    assert set(shard.open_rings()) == {"a"}
    shutil.copytree(run / "a", run / "0")
    told = f"{run}/0 is a copy of {run}/a, with the same uuid.*mmreplay convert"
    with pytest.raises(mr.SchemaError, match=told):
        shard.open_rings()
    assert shard.info()["error"]["kind"] == "SchemaError"
    shutil.rmtree(run / "0")
    (run / "a").rename(run / "b")
    assert set(shard.open_rings()) == {"b"}
    # As the message and the page say.
    assert command(["convert", str(run / "b"), str(run / "c")]) == 0
    assert set(shard.open_rings()) == {"b", "c"}


def test_too_few_files_are_an_answer_until_there_are_enough(shard, tmp_path):
    fill(tmp_path / "run" / "a", 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Files that are open stay so, and no other can be opened.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        error = shard.info()["error"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in error["message"]
    assert shard.info()["error"] is None
    assert shard.serve("a")["steps"] == 10


def test_one_folder_has_one_shard(shard, tmp_path):
    fill(tmp_path / "run" / "a", 10)
    shard.open_rings()
    second = Shard("run", str(tmp_path), "there")
    with pytest.raises(
        mr.LockedError, match=rf"run is served by pid {os.getpid()} .* by the node 'there' as well"
    ) as caught:
        second.open_rings()
    assert caught.value.pid == os.getpid()
    assert second.info()["error"]["kind"] == "LockedError"
    shard.stop()
    assert second.serve("a")["steps"] == 10
    second.stop()


def test_a_stopped_shard_refuses_calls(shard, tmp_path):
    fill(tmp_path / "run" / "a", 10)
    (ring,) = shard.open_rings().values()
    shard.stop()
    assert ring.closed
    with pytest.raises(mr.FailedError, match="the run 'run' was stopped"):
        shard.serve("a")
    mr.ReplayBuffer.open(tmp_path / "run" / "a", "r+").close()


def test_a_stop_does_not_wait_for_a_draw_that_looks_for_rings(shard, tmp_path):
    fill(tmp_path / "run" / "a", 10)
    client, looks = client_of(mr.UniformSampler()), threading.Event()
    folders = shard._draws._folders

    def look():
        looks.set()
        until(lambda: shard._stopped)
        return folders()

    shard._draws._folders = look
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(shard.masses, client, 0, 0.0)
        looks.wait()
        pool.submit(shard.stop).result(timeout=60.0)
        with pytest.raises(mr.FailedError, match="the run 'run' was stopped"):
            asked.result(timeout=60.0)


@pytest.mark.parametrize("method", ["_masses", "_draw"])
def test_a_draw_during_a_stop_is_answered_by_it(shard, tmp_path, monkeypatch, method):
    fill(tmp_path / "run" / "a", 10)
    original = getattr(RingDraws, method)

    def stopped(*arguments):
        shard.stop()
        return original(*arguments)

    monkeypatch.setattr(RingDraws, method, stopped)
    client, wanted = client_of(mr.UniformSampler()), wanted_of({"a": [0.5]}, rows=True)
    with pytest.raises(mr.FailedError, match="the run 'run' was stopped"):
        shard.exchange(client_to_bytes(client), *request_to_bytes({}, wanted, 0.0))


def test_rings_of_another_schema_are_refused(shard, tmp_path):
    fill(tmp_path / "run" / "a", 10)
    other = mr.Schema({"number": mr.Field((), "int32")})
    mr.ReplayBuffer.create(tmp_path / "run" / "b", other, 10).close()
    with pytest.raises(mr.SchemaError, match="Draw from buffers of one schema"):
        shard.open_rings()


def test_a_network_file_system_is_refused_unless_it_was_allowed(shard, tmp_path, monkeypatch):
    fill(tmp_path / "run" / "a", 10)
    monkeypatch.setattr(lock, "file_system", lambda _: "nfs4")
    with pytest.raises(mr.FailedError, match=r"network file system \(nfs4\)"):
        shard.open_rings()
    allowed = Shard("run", str(tmp_path), "here", network=True)
    assert allowed.serve("a")["steps"] == 10
    allowed.stop()


@pytest.mark.parametrize("root", ["", "\0", "/dev/null", "relative", "~nobody/x"])
def test_the_constructor_never_raises(root):
    shard = Shard("run", root, "here")
    assert shard.info()["error"] is not None
