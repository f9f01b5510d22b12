"""The actors of a run: their names, the nodes that they run on, and calls of them.

A run has one actor on each node that has rings of it, the *shard*, named by its key,
and one *registry*. They are detached, so that they outlive the driver that made them,
and Ray restarts them after a kill. Ray repeats no call, as a repeated call could run
twice and in another order: `Remote.call` repeats those that may be repeated.

The key of a node is the value of its label ``mmreplay``, or else its host's name. By a
label the actor waits while its node is gone, and is back with it. Without one it is
bound to the node's id, which a node that comes back does not keep: the registry makes
it again.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypedDict

import ray
from ray._private.state import actors
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayError,
    RayTaskError,
)
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from mmreplay.errors import FailedError, ReplayError, SchemaError, StarvedError, shown

VERSION = str(import_module("mmreplay").__version__)
"""Of mmreplay, which every node of a run has; the package's face stands on no layer."""
NAMESPACE = "mmreplay"
LABEL = "mmreplay"
"""The label of a node that names its disk."""
HEAD = "node:__internal_head__"
"""The resource that the head of a cluster has."""
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""Of runs, rings and keys, which become names of folders and of actors; Ray's labels
are of this form, too."""
ALIVE = "alive"
"""State of a shard whose process serves."""
RESTARTING = "being restarted"
"""State of a shard whose process has ended, or begins, on a node that is here."""
ANSWER_S = 60.0
"""Within which a call is answered, restarts of its actor included."""
PAUSE_S = 0.05
"""Between two tries of a call."""
SETTLE_S = 1.0
"""How long those who end wait for answers that they do not need."""
MAX_UNANSWERED = 16
"""More calls without an answer are looked through for those that no one needs."""

SHARD_THREADS = {"draw": 2, "write": 1, "control": 1, "count": 1}
"""Threads of a shard by the kind of call, so that none waits for one of another kind.
Asynchronous calls would cost 20 to 40 % more."""
SHARD_CALLS = {
    "masses": "draw",
    "exchange": "draw",
    "lease": "write",
    "extend": "write",
    "give_back": "write",
    "info": "control",
    "serve": "control",
    "freeze": "control",
    "stop": "control",
    "counts": "count",
    "restore": "control",
    "epoch_names": "control",
}
REGISTRY_THREADS = {"grant": 2, "epoch": 1, "join": 2, "control": 1}
"""Those of a registry: others do not wait while it asks for a shard that is away."""
REGISTRY_CALLS = {
    "grant": "grant",
    "limit": "grant",
    "check_limit": "grant",
    "bound": "grant",
    "known_bound": "grant",
    "epoch": "epoch",
    "epoch_name": "epoch",
    "join": "join",
    "check": "control",
    "members": "control",
}


class UnansweredError(StarvedError):
    """An actor gave no answer: it is restarted, its node is gone, or it is slow."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster.

    Attributes:
        node_id: Ray's number of it, another one each time that it joins.
        host: Its host's name.
        label: The value of its label ``mmreplay``; None where it has none.
    """

    node_id: str
    host: str
    label: str | None

    @property
    def key(self) -> str:
        """What names the node's shards."""
        return self.host if self.label is None else self.label


def require_connection() -> None:
    """Refuse a process that is not connected to a cluster.

    Raises:
        SchemaError: It is not.
    """
    if not ray.is_initialized():
        raise SchemaError(
            "this process is not connected to a Ray cluster. Call ray.init() first, "
            "with address='auto' on a machine of the cluster."
        )


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be connected to a cluster for a while.

    Raises:
        SchemaError: There is none at the address.
    """
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SchemaError(
            f"there is no Ray cluster at {address!r}: {_line(error)}. Run this on a "
            "machine of the cluster, or pass the address of its head."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def check_name(what: str, name: object) -> str:
    """Return a run's, ring's or node's name if it is legal.

    Raises:
        SchemaError: It is not.
    """
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    raise SchemaError(
        f"{what} must be a name of letters, digits, '-', '_' and '.', at most 63, got "
        f"{shown(name)}. Give it a name such as 'cartpole-1'."
    )


def check_version(who: str, theirs: str, mine: str = VERSION) -> None:
    """Refuse another version of mmreplay than that of an actor of a run.

    Raises:
        FailedError: It has another one.
    """
    if mine != theirs:
        raise FailedError(
            f"this process has mmreplay {mine}, but {who} has {theirs}. Install one "
            "version on every node."
        )


def nodes() -> list[Node]:
    """The nodes that are alive."""
    return [
        Node(
            str(node["NodeID"]), str(node["NodeManagerHostname"]), node.get("Labels", {}).get(LABEL)
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def this_node() -> Node:
    """The node that this process runs on."""
    node_id = ray.get_runtime_context().get_node_id()
    for node in nodes():
        if node.node_id == node_id:
            return node
    # Ray lists a node some time after it started.
    labels = ray.get_runtime_context().get_node_labels()
    return Node(node_id, socket.gethostname(), labels.get(LABEL))


def this_node_id() -> str:
    """Ray's number of the node that this process runs on; none without a cluster."""
    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""


def registry_name(run: str) -> str:
    """Name of a run's registry."""
    return f"mmreplay/{run}"


def shard_name(run: str, key: str) -> str:
    """Name of the shard of a run on the node of a key."""
    return f"mmreplay/{run}/{key}"


def shard_keys(run: str) -> list[str]:
    """Keys of all shards of a run that Ray knows, also while they are restarted."""
    start = shard_name(run, "")
    names = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        each["name"].removeprefix(start)
        for each in names
        if each["namespace"] == NAMESPACE and each["name"].startswith(start)
    )


def shard_states(run: str) -> dict[str, str]:
    """What Ray says of the shards of a run, by key.

    Returns:
        `ALIVE`, `RESTARTING`, or ``"away"`` where it waits for its node.
    """
    here = {node.key for node in nodes()}
    states = {}
    for key in shard_keys(run):
        actor = _actor(shard_name(run, key))
        if actor is None:
            continue
        # Of Ray's public calls only those of its dashboard say it, which need not run.
        facts = actors(actor._actor_id.hex())
        if facts.get("State") == "ALIVE":
            states[key] = ALIVE
        else:
            # A shard of a label waits for its node as one that is restarted.
            states[key] = RESTARTING if key in here else "away"
    return states


def run_names() -> list[str]:
    """Names of the runs that have a registry."""
    found = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in found if each["namespace"] == NAMESPACE]
    return sorted(
        split_name(name)[0]
        for name in names
        if name.startswith("mmreplay/") and name.count("/") == 1
    )


def run_exists(run: str) -> bool:
    """Whether the run has a registry."""
    return _actor(registry_name(run)) is not None


def actor_class(kind: type, threads: dict[str, int], calls: dict[str, str]) -> Any:
    """Make a plain class an actor's, with threads for each kind of call."""
    for method, group in calls.items():
        if hasattr(kind, method):
            ray.method(concurrency_group=group)(getattr(kind, method))
    return ray.remote(concurrency_groups=dict(threads))(kind)


def options_of(name: str) -> dict[str, Any]:
    """Options of the actor of a run that has a name, which may be there already."""
    return {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
    }


def _actor(name: str) -> Any:
    """The handle of a named actor, or None."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def kill(name: str) -> None:
    """End an actor for good, if it exists, and wait until its name is free."""
    actor = _actor(name)
    if actor is None:
        return
    ray.kill(actor, no_restart=True)
    stop = time.monotonic() + ANSWER_S
    while _actor(name) is not None and time.monotonic() < stop:
        time.sleep(PAUSE_S)


class RunFacts(TypedDict):
    """What is stored of a run with the cluster, where it outlives all its actors.

    A node without a label takes the name of its shard along, so that Ray knows nothing
    of it any more.

    Attributes:
        members: Of its nodes by key: root, host and network.
        bound: Settings of its rate limiter; None without one.
        schema: Fields and roles of its rings; None while there is none.
        counts: Of its nodes by key, what the rings counted for the rate limiter: rows
            written, items drawn and rows alive.
    """

    members: dict[str, list[Any]]
    bound: list[float] | None
    schema: list[Any] | None
    counts: dict[str, list[int]]


def load_facts(run: str) -> RunFacts:
    """Return what `save_facts` stored of a run; nothing of a new one."""
    stored = _internal_kv_get(registry_name(run), namespace=NAMESPACE)
    facts: RunFacts = {"members": {}, "bound": None, "schema": None, "counts": {}}
    return {**facts, **json.loads(stored)} if stored else facts


def save_facts(run: str, facts: RunFacts) -> None:
    """Store facts of a run with the cluster."""
    value = json.dumps(facts).encode()
    _internal_kv_put(registry_name(run), value, namespace=NAMESPACE)


def forget_facts(run: str) -> None:
    """Remove what `save_facts` stored."""
    _internal_kv_del(registry_name(run), namespace=NAMESPACE)


class Unanswered:
    """The calls of an actor whose answers were not looked at.

    Ray prints an error that no one asked for, as where a run is stopped while calls
    are under way. So those who need an answer no more look at it all the same.

    Threads: any may call.
    """

    def __init__(self) -> None:
        """Begin without a call."""
        self._calls: dict[Any, tuple[list[Any], Callable[[], object]]] = {}

    def add(self, key: Any, references: list[Any], needed: Callable[[], object]) -> None:
        """Note a call that was sent.

        Args:
            key: Names it.
            references: Of its results.
            needed: Returns None once no one looks at the answer any more.
        """
        if len(self._calls) >= MAX_UNANSWERED:
            self._look(dropped=True)
        self._calls[key] = references, needed

    def remove(self, key: Any) -> None:
        """Forget a call whose answer was looked at."""
        self._calls.pop(key, None)

    def settle(self) -> None:
        """Wait a moment for the answers of all calls, and look at those."""
        every = [each for own, _ in list(self._calls.values()) for each in own]
        if every:
            ray.wait(every, num_returns=len(every), timeout=SETTLE_S)
            self._look()

    def _look(self, dropped: bool = False) -> None:
        """Look at the answers that are here; where dropped, only those of no one."""
        for key, (references, needed) in list(self._calls.items()):
            if dropped and needed() is not None:
                continue
            try:
                ray.get(references, timeout=0.0)
            except GetTimeoutError:
                continue
            except RayError:
                # What is wrong with it concerns no one by now.
                pass
            self.remove(key)


class Remote:
    """A named actor of a run, and calls of it.

    Attributes:
        name: The actor's.
    """

    def __init__(self, name: str) -> None:
        """Remember the name; the actor is looked up at the first call."""
        self.name = name
        self._handle: Any = None
        self._unanswered = Unanswered()

    def __repr__(self) -> str:
        """Show the name."""
        return f"<Remote {self.name}>"

    def send(self, method: str, *arguments: object) -> Any:
        """Begin a call and return Ray's reference, for `receive`.

        Raises:
            FailedError: There is no actor of this name.
        """
        if self._handle is None:
            self._handle = _actor(self.name)
            if self._handle is None:
                raise stopped(self.name)
        reference = getattr(self._handle, method).remote(*arguments)
        self._unanswered.add(reference, [reference], lambda: None)
        return reference

    def settle(self) -> None:
        """Look at answers that no one needs any more: Ray prints errors else."""
        if ray.is_initialized():
            self._unanswered.settle()

    def receive(self, reference: Any, timeout_s: float) -> Any:
        """Return the answer of a call.

        Args:
            reference: What `send` returned.
            timeout_s: How long to wait.

        Raises:
            UnansweredError: There is none; the call may have run, or may run later.
            ReplayError: What the call raised.
            FailedError: It raised an error of another kind.
        """
        try:
            answer = ray.get(reference, timeout=timeout_s)
        except GetTimeoutError as error:
            raise UnansweredError(
                f"{self.name} did not answer for {timeout_s:g} seconds"
            ) from error
        except RayError as error:
            self._unanswered.remove(reference)
            if isinstance(error, RayTaskError):
                if isinstance(error.cause, ReplayError):
                    raise error.cause from None
                raise FailedError(
                    f"a call of {self.name} failed by {type(error.cause).__name__}: "
                    f"{_line(error.cause)}. See its log."
                ) from error
            if isinstance(error, ActorDiedError | ActorUnschedulableError):
                # Dead for good; there may be another actor of the name.
                self._handle = None
                raise UnansweredError(f"{self.name} ended: {_line(error)}") from error
            raise UnansweredError(f"{self.name}: {_line(error)}") from error
        self._unanswered.remove(reference)
        return answer

    def call(self, method: str, *arguments: object, timeout_s: float = ANSWER_S) -> Any:
        """Call until it is answered; only for calls that may run twice.

        Args:
            method: Of the actor.
            *arguments: Arrays, numbers, strings, and dicts and lists of these.
            timeout_s: Seconds after which the call fails.

        Raises:
            FailedError: There is no actor of this name: the run was stopped.
            StarvedError: No answer came in time.
            ReplayError: What the call raised.
        """
        stop = time.monotonic() + timeout_s
        while True:
            try:
                left = max(0.0, stop - time.monotonic())
                return self.receive(self.send(method, *arguments), left)
            except UnansweredError as error:
                if time.monotonic() + PAUSE_S >= stop:
                    run, key = split_name(self.name)
                    who = f"the shard {key!r}" if key else "the registry"
                    raise StarvedError(
                        f"{who} of the run {run!r} did not answer for {timeout_s:g} "
                        f"seconds. See mmreplay ray status {run}."
                    ) from error
            time.sleep(PAUSE_S)


def split_name(name: str) -> tuple[str, str]:
    """Run and key of an actor's name; no key for a registry."""
    _, run, *key = name.split("/")
    return run, "".join(key)


def stopped(name: str) -> FailedError:
    """Return the error for an actor that is no more."""
    run, key = split_name(name)
    if key and run_exists(run):
        return FailedError(
            f"the shard {key!r} of the run {run!r} ended with its node. Start the "
            f"node again, then run mmreplay ray status {run}."
        )
    return FailedError(
        f"the run {run!r} was stopped, or never began. Begin it with mr.ray.writer, "
        "and make this client again."
    )


def _line(error: BaseException) -> str:
    """First line of an error's text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
