"""A run: writers that join it, the shards that serve their rings, and its end."""

import json
import os
import subprocess
import sys

import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.ray import cluster as calls  # noqa: E402
from tests.on_ray.actors import ask, registry, shard, writing  # noqa: E402
from tests.on_ray.rows import SCHEMA, block, check  # noqa: E402
from tests.waits import until  # noqa: E402


def test_a_writer_on_each_node_makes_a_run_of_two_shards(run_name, tmp_path):
    writers = [
        writing(label, run_name, str(tmp_path / label), number)
        for number, label in enumerate(("n0", "n1"))
    ]
    assert [ask(writer, "key") for writer in writers] == ["n0", "n1"]
    assert [ask(writer, "add", 100) for writer in writers] == [100, 100]
    status = mr.ray.status(run_name)
    assert [each.key for each in status.shards] == ["n0", "n1"]
    assert status.steps == 200
    for label, each in zip(("n0", "n1"), status.shards, strict=True):
        assert each.alive
        assert each.error is None
        assert each.root == str(tmp_path / label)
        (ring,) = each.rings
        assert (ring.name, ring.rows, ring.num_envs) == ("ring-000", 100, 1)
        assert ring.heads == (100,)
        assert ring.free > 0
    for writer in writers:
        ask(writer, "close")
    with mr.ReplayBuffer.open(tmp_path / "n0" / run_name / "ring-000") as ring:
        check(ring.gather_all())


def test_shards_run_on_the_nodes_of_their_rings_and_share_one_folder(run_name, tmp_path, cluster):
    pair = [writing("n1", run_name, str(tmp_path), number) for number in range(2)]
    assert {ask(writer, "path") for writer in pair} == {
        str(tmp_path / run_name / "ring-000"),
        str(tmp_path / run_name / "ring-001"),
    }
    info = shard(run_name, "n1").call("info")
    assert set(info["rings"]) == {"ring-000", "ring-001"}
    assert info["pid"] not in [os.getpid(), *(ask(each, "pid") for each in pair)]
    assert [ring["writer"] for ring in info["rings"].values()] == [
        pid for _, pid in sorted((ask(each, "path"), ask(each, "pid")) for each in pair)
    ]
    ask(pair[0], "close")
    # A ring without a writer is the next one's that gives no name.
    again = writing("n1", run_name, str(tmp_path))
    assert ask(again, "path") == ask(pair[0], "path")


def test_a_driver_on_the_head_writes_and_a_block_is_seen_by_its_shard(run_name, tmp_path):
    with mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path, name="mine", num_envs=1) as writer:
        writer.add(number=0, writer=0, crc=0, terminated=False, truncated=False)
        (ring,) = mr.ray.status(run_name).shards[0].rings
        assert (ring.name, ring.rows, ring.writer) == ("mine", 1, os.getpid())
        assert writer.key == "head"
        assert repr(writer).startswith(f"<RingWriter of '{run_name}' on 'head'")


def test_stopping_a_run_frees_its_names_and_folders(run_name, tmp_path):
    writer = mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path)
    writer.close()
    remote, members = shard(run_name, "head"), registry(run_name)
    assert remote.call("info")["error"] is None
    assert members.call("members")["head"]["alive"]
    mr.ray.stop(run_name)
    assert calls.shard_keys(run_name) == []
    assert run_name not in calls.run_names()
    with mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path) as again:
        assert again.buffer.path == writer.buffer.path


def test_rates_are_of_rows_a_second(run_name, tmp_path):
    writer = writing("n0", run_name, str(tmp_path))
    remote = shard(run_name, "n0")

    def rate():
        ask(writer, "add", 100)
        return remote.call("info")["rings"]["ring-000"]["rate"]

    assert until(rate) > 0


def test_the_commands_show_a_run_and_end_it(run_name, tmp_path, cluster):
    with mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path) as writer:
        writer.extend(block(0, 0, 60))

    address = ("--address", cluster.address)

    def command(*words):
        return subprocess.run(
            [sys.executable, "-m", "mmreplay", *words, *address],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    shown = command("ray", "status", run_name)
    assert shown.returncode == 0
    assert f"run '{run_name}': 1 shard, 1 ring, 60 steps" in shown.stdout
    assert str(tmp_path / run_name / "ring-000") in shown.stdout
    assert "disk free" in shown.stdout
    found = json.loads(command("ray", "status", run_name, "--json").stdout)
    assert (found["run"], found["steps"]) == (run_name, 60)
    pytest.importorskip("starlette")
    page = str(tmp_path / "page")
    viewed = command("view", "--ray", run_name, "--save", page)
    assert viewed.returncode == 0, viewed.stderr
    assert viewed.stdout.startswith(f"{page}/index.html: 2 of 2 episodes")
    assert found["shards"][0]["rings"][0]["name"] == "ring-000"
    assert found["shards"][0]["rings"][0]["free"] > 0
    assert command("ray", "stop", run_name).returncode == 0
    gone = command("ray", "status", run_name)
    assert gone.returncode == 3
    assert f"this cluster has no run '{run_name}'" in gone.stderr
