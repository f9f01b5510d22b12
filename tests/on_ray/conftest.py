"""A Ray cluster on this machine: a head without CPUs and two nodes.

The test process runs again inside a network namespace that has only loopback, so that
no test sees another cluster, and no cluster is seen from outside. Everything that is
left at the end is found by a variable in its environment and killed by its pid.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.waits import until

MARK = "MMREPLAY_ON_RAY"
"""The variable whose value names the processes of one test session."""
ISOLATE = ("unshare", "--map-root-user", "--net")
SETTINGS = {
    # A local start would write a token into the home folder, which turns
    # authentication on for every later cluster of this user.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",
}
STORE_NBYTES = 80_000_000
"""Of the object store of each node; Ray's least is 75 MiB."""
NUM_CPUS = 2

FOLDER = Path(__file__).parent
if find_spec("ray") is None:
    # All others import mmreplay.ray, which does not work without Ray: see `make ray`.
    WITHOUT_RAY = "test_run_refusals.py"
    collect_ignore = [path.name for path in FOLDER.glob("test_*.py") if path.name != WITHOUT_RAY]


def pytest_configure(config: pytest.Config) -> None:
    """Run the same command again in a network namespace, unless Ray is missing."""
    if find_spec("ray") is None:
        return
    # Ray 2.55 leaves this to the collector where it starts a node.
    config.addinivalue_line("filterwarnings", "ignore:unclosed file .*'/dev/null':ResourceWarning")
    os.environ.update(SETTINGS)
    if MARK in os.environ or hasattr(config, "workerinput") or _forbidden():
        return
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        # Output is redirected by now, and would stay so in the program that follows.
        capture.stop_global_capturing()
    command = [sys.executable, *sys.orig_argv[1:]]
    os.environ[MARK] = uuid.uuid4().hex
    script = 'ip link set lo up && exec "$@"'
    os.execvp(ISOLATE[0], [*ISOLATE, "sh", "-c", script, "sh", *command])


def _forbidden() -> str:
    """Return why this machine allows no network namespace, or nothing."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return "the tools unshare (util-linux) and ip (iproute2) are missing"
    tried = subprocess.run(
        [*ISOLATE, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() if tried.returncode else ""


@dataclass
class Nodes:
    """The cluster that tests use, and what they do to it.

    Attributes:
        address: What `ray.init` takes.
        by_label: The nodes that carry the label ``mmreplay``, by its value.
        killed: Ray's ids of nodes that were killed.
    """

    cluster: Any
    by_label: dict[str, Any] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        """What `ray.init` takes."""
        return str(self.cluster.address)

    def add(self, label: str | None) -> Any:
        """Start a node and return it; with None it has no label."""
        labels = {} if label is None else {"mmreplay": label}
        node = self.cluster.add_node(
            num_cpus=NUM_CPUS,
            object_store_memory=STORE_NBYTES,
            labels=labels,
            resources={"unlabelled": 1} if label is None else {},
        )
        if label is not None:
            self.by_label[label] = node
        return node

    def remove(self, label: str) -> None:
        """Kill all processes of a node, as a power cut would."""
        self.remove_node(self.by_label.pop(label))

    def remove_node(self, node: Any) -> None:
        """Kill all processes of a node that `add` returned."""
        self.killed.append(str(node.node_id))
        self.cluster.remove_node(node, allow_graceful=False)

    def kill_raylet(self, label: str) -> None:
        """Kill a node's raylet and nothing else; the node is then removed and added.

        Workers hold on to a raylet that was killed and not waited for, a minute and
        more.
        """
        process = self.by_label[label].all_processes["raylet"][0].process
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def node_id(self, label: str) -> str:
        """Return Ray's id of the node of a label."""
        return str(self.by_label[label].node_id)

    def wait_dead(self, node_id: str) -> None:
        """Wait until Ray has declared a node dead, which takes 15 seconds."""
        import ray

        until(lambda: all(not node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id))


@pytest.fixture(autouse=True)
def _ended_shards() -> Iterator[None]:
    """End the simulated shards of a test with it."""
    yield
    support = sys.modules.get("tests.on_ray.thin_support")
    for shard in [] if support is None else list(support.SHARDS):
        shard.kill()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Nodes]:
    """A head without CPUs, and nodes with the labels ``n0`` and ``n1``.

    The test process is a driver on the head.
    """
    ray = pytest.importorskip("ray", reason="Ray is not installed: see make ray")
    if MARK not in os.environ:
        pytest.skip(
            "no network namespace: "
            + (_forbidden() or "run tests/on_ray by itself, as make ray does")
        )
    from ray.cluster_utils import Cluster

    # Paths of sockets in it end at 107 bytes; and without one of its own, clusters
    # share a file of addresses.
    folder = tempfile.mkdtemp(prefix="r-", dir="/tmp")
    os.environ["RAY_TMPDIR"] = folder
    # Each worker of pytest-xdist has a cluster of its own, and kills only that.
    os.environ[MARK] = mark = uuid.uuid4().hex
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = Nodes(
            Cluster(
                initialize_head=True,
                head_node_args={
                    "num_cpus": 0,
                    "object_store_memory": STORE_NBYTES,
                    "include_dashboard": False,
                    # All nodes have this host's name, which is the key of a node
                    # without a label.
                    "labels": {"mmreplay": "head"},
                },
            )
        )
        try:
            nodes.add("n0")
            nodes.add("n1")
            ray.init(address=nodes.address, log_to_driver=False)
            yield nodes
        finally:
            with suppress(Exception):
                ray.shutdown()
            with suppress(Exception):
                nodes.cluster.shutdown()
            _kill_left(mark)
            shutil.rmtree(folder, ignore_errors=True)


def _kill_left(mark: str) -> None:
    """Kill the processes of this session that outlived its cluster."""
    variable = f"{MARK}={mark}".encode()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with suppress(OSError):
            if variable in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


@pytest.fixture
def run_name(cluster: Nodes) -> Iterator[str]:
    """A name that no other test's run has; the run is stopped in the end."""
    import mmreplay.ray

    name = f"run-{uuid.uuid4().hex[:8]}"
    yield name
    with suppress(mmreplay.SchemaError):
        mmreplay.ray.stop(name)


@pytest.fixture(autouse=True)
def _both_nodes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave the cluster with the two nodes that it began with, and no other."""
    yield
    if "cluster" in request.fixturenames:
        nodes: Nodes = request.getfixturevalue("cluster")
        # Ray would start actors of the next test on them until they are declared dead.
        while nodes.killed:
            nodes.wait_dead(nodes.killed.pop())
        for label in ("n0", "n1"):
            if label not in nodes.by_label:
                nodes.add(label)
