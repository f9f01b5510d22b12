"""A run: writers that join it, the shards that serve their rings, and its end."""

import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.ray import cluster as calls  # noqa: E402
from mmreplay.ray.cluster import Remote  # noqa: E402
from tests.on_ray.rows import Writing, check  # noqa: E402


def writing(label, *arguments, **more):
    """An actor on the node of a label that writes."""
    return (
        ray.remote(Writing)
        .options(num_cpus=0, label_selector={"mmreplay": label})
        .remote(*arguments, **more)
    )


def ask(actor, method, *arguments):
    """What an actor of a test answers."""
    return ray.get(getattr(actor, method).remote(*arguments), timeout=60)


def shard(run, key):
    """The shard of a node."""
    return Remote(calls.shard_name(run, key))


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
    for writer in writers:
        ask(writer, "close")
    with mr.ReplayBuffer.open(tmp_path / "n0" / run_name / "ring-000") as ring:
        check(ring.gather_all())
