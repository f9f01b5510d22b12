"""What tests of runs have in common: writers on nodes, and calls of actors."""

from __future__ import annotations

import os
import signal

import ray

from mmreplay.ray import cluster as calls
from mmreplay.ray.cluster import Remote
from tests.on_ray.rows import Writing
from tests.waits import WAIT_S, until


def writing(label, *arguments, selector=None, **more):
    """An actor on the node of a label that writes; see `Writing`."""
    where = {"label_selector": {"mmreplay": label}} if selector is None else selector
    return ray.remote(Writing).options(num_cpus=0, **where).remote(*arguments, **more)


def ask(actor, method, *arguments):
    """What an actor of a test answers."""
    return ray.get(getattr(actor, method).remote(*arguments), timeout=WAIT_S)


def shard(run, key):
    """The shard of a node."""
    return Remote(calls.shard_name(run, key))


def registry(run):
    """The registry of a run."""
    return Remote(calls.registry_name(run))


def kill(pid):
    """Kill a process and wait until it has ended."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: ended(pid))


def ended(pid):
    """Whether a process is no more, or waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
