"""The cluster that the tests of this folder use."""

import os
import signal
import subprocess

import pytest

ray = pytest.importorskip("ray")

from ray.exceptions import ActorUnavailableError, GetTimeoutError  # noqa: E402

from tests.waits import WAIT_S, until  # noqa: E402


class Where:
    """An actor that says where it runs."""

    def where(self):
        return os.getpid(), ray.get_runtime_context().get_node_id()


def test_actors_run_where_their_label_says_and_come_back_after_a_kill(cluster):
    for label in ("n0", "n1"):
        actor = (
            ray.remote(Where)
            .options(num_cpus=0, max_restarts=-1, label_selector={"mmreplay": label})
            .remote()
        )
        pid, node_id = ray.get(actor.where.remote(), timeout=WAIT_S)
        assert node_id == cluster.node_id(label)
        os.kill(pid, signal.SIGKILL)
        again, node_id = until(
            lambda: ray.get(actor.where.remote(), timeout=20),  # noqa: B023
            ActorUnavailableError,
            GetTimeoutError,
        )
        assert again != pid
        assert node_id == cluster.node_id(label)
        ray.kill(actor)


def test_the_cluster_has_only_loopback(cluster):
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    assert [line.split(": ")[1] for line in links.splitlines()] == ["lo"]
