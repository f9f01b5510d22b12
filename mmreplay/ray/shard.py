"""The actor of a node that serves its rings of one run.

A shard has no data of its own: it opens the rings in ``root/run`` and answers calls.
Its constructor must never raise, since an actor that fails there once at a restart is
dead for good; so rings are opened at the first call, and what fails is answered as its
error and tried again at the next call.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmreplay.buffer.opening import holds_buffer
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.concatenation import check_schema
from mmreplay.disk.files import free_nbytes
from mmreplay.disk.lock import Owner, WriterLock, refuse_network
from mmreplay.errors import (
    FailedError,
    FormatError,
    LockedError,
    RemovedError,
    ReplayError,
    SchemaError,
    system_failure,
)
from mmreplay.format.metadata import FILE_NAME as METADATA
from mmreplay.limiter import RateLimiter
from mmreplay.limiter.rate_counter import BoundCounter
from mmreplay.ray import cluster
from mmreplay.ray.agreement import described
from mmreplay.ray.cluster import VERSION, Node, this_node_id
from mmreplay.ray.draws import Client, Masses, ShardDraws
from mmreplay.ray.lanes import THIN, Answer, Lanes, Terms, has_lanes, open_lanes
from mmreplay.ray.limits import counter_of
from mmreplay.ray.messages import client_from_bytes, reply_to_bytes, request_from_bytes
from mmreplay.ray.reply_blocks import in_blocks, num_blocks

T = TypeVar("T")
RATE_S = 1.0
"""The least time between the two counts of rows that make a rate."""


@dataclass(frozen=True, slots=True)
class RingCount:
    """What counts the rows and items of one ring for the run's rate limiter.

    Attributes:
        ring: The ring.
        limiter: The run's.
        limit: What counts.
    """

    ring: ReplayBuffer
    limiter: RateLimiter
    limit: BoundCounter


class Shard:
    """Serves the rings of one node; a plain class, made an actor by `cluster`.

    Attributes:
        run: The run.
        key: The node's key.
        folder: The run's folder on this node.
        rings: The rings that are open, by name.
    """

    def __init__(self, run: str, root: str, key: str, network: bool = False) -> None:
        """Remember the arguments; nothing here may raise.

        Args:
            run: The run.
            root: The folder of the runs on this node.
            key: The node's key.
            network: Whether the folder may be on a network file system.
        """
        self.run, self.root, self.key, self.network = run, root, key, network
        self.folder = Path(root) / run
        self.rings: dict[str, ReplayBuffer] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        self._lanes: Lanes | None = None
        self._had_lanes = False
        self._lock = threading.RLock()
        self._folder_lock: WriterLock | None = None
        self._stopped = False
        self._counts: dict[str, list[tuple[float, int]]] = {}
        self._draws = ShardDraws(self._folders)
        self._counters: dict[str, RingCount] = {}

    # Calls by writers, clients and the registry; each may be repeated.

    def info(self) -> dict[str, Any]:
        """Say who this is and what it serves; an error of opening is a part of it."""
        error = None
        # Before the lock: draws take theirs first.
        sums = self._draws.sums_of_priorities()
        with self._lock:
            try:
                self.open_rings()
            except (ReplayError, OSError) as caught:
                error = {"kind": type(caught).__name__, "message": str(caught)}
            rings = {}
            for name in self.rings:
                try:
                    rings[name] = {**self._facts(name), "priorities": sums.get(name)}
                except ReplayError as caught:
                    error = {"kind": type(caught).__name__, "message": str(caught)}
        return {
            "run": self.run,
            "key": self.key,
            "root": self.root,
            "network": self.network,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "node_id": this_node_id(),
            "version": VERSION,
            "error": error,
            "rings": rings,
        }

    def serve(self, name: str) -> dict[str, Any]:
        """Open a ring that a writer made, and say what it is.

        Raises:
            FormatError: There is no such ring.
            LockedError: Another process serves the folder.
        """
        rings = self.open_rings()
        if name not in rings:
            raise FormatError(
                f"{self.folder / name} does not exist on the node {self.key!r}. Check "
                "that root names a folder of its local disk."
            )
        with self._lock:
            return self._facts(name)

    def freeze(
        self, client: Client, name: str, epoch: int, buffers: Sequence[str] | None
    ) -> dict[str, dict[str, Any] | None]:
        """Freeze an epoch, or say what was frozen; see `ShardDraws.freeze`."""
        with self._until_stopped():
            return self._draws.freeze(client, name, epoch, buffers)

    def restore(self, client: Client, frozen: Mapping[str, Mapping[str, Any]]) -> None:
        """Remember epochs that a client brings back; see `ShardDraws.restore`."""
        with self._until_stopped():
            self._draws.restore(client, frozen)

    def epoch_names(self, start: str) -> list[str]:
        """Names of frozen epochs that begin so; see `ShardDraws.epoch_names`."""
        return self._draws.epoch_names(start)

    def counts(self) -> dict[str, Any]:
        """Say what the rings count for the run's rate limiter, all together.

        Returns:
            ``counts``, rows written, items drawn and rows alive, and ``bound``, the
            limiter's settings; None where no ring has any.
        """
        with self._lock:
            if not self.rings or not all(r.in_place for r in self.rings.values()):
                self.open_rings()
            bound, sums = None, [0, 0, 0]
            for name, ring in self.rings.items():
                counter = self._counter(name, ring)
                if counter is not None:
                    bound = list(counter.limiter.settings)
                    counts = counter.limit.counts()
                    found = (counts.inserts, counts.samples, counts.size)
                    sums = [a + b for a, b in zip(sums, found, strict=True)]
            return {"counts": sums, "bound": bound}

    def lease(
        self,
        writer: str,
        num_envs: int,
        fields: list[dict[str, Any]],
        roles: dict[str, str],
        former: str | None = None,
    ) -> Terms:
        """Give a thin writer environments; see `Lanes.lease`."""

        def begin(lanes: Lanes) -> Terms:
            terms = lanes.lease(writer, num_envs, fields, roles, former)
            return {**terms, "ring": lanes.ring.files_identity}

        return self._by_lanes(begin)

    def extend(
        self,
        writer: str,
        first: list[int],
        columns: dict[str, NDArray[Any]] | None,
        final: dict[str, NDArray[Any]] | None = None,
        commit: bool = False,
        envs: list[int] | None = None,
    ) -> Answer:
        """Add a block of a thin writer; see `Lanes.extend`."""

        def add(lanes: Lanes) -> Answer:
            answer = lanes.extend(writer, first, columns, final, commit, envs)
            return {**answer, "ring": lanes.ring.files_identity}

        return self._by_lanes(add, leased=True)

    def give_back(self, writer: str) -> Answer:
        """End the lease of a thin writer; see `Lanes.give_back`."""

        def end(lanes: Lanes) -> Answer:
            answer = lanes.give_back(writer)
            return {**answer, "ring": lanes.ring.files_identity}

        return self._by_lanes(end, leased=True)

    def masses(self, client: Client, step: int, highest: float) -> Masses:
        """What there is to draw from; see `ShardDraws.masses`."""
        with self._until_stopped():
            return self._draws.masses(client, step, highest)

    def exchange(self, client: bytes, *request: bytes) -> Any:
        """Set priorities, then draw; see `ShardDraws.exchange`.

        Args:
            client: From `client_to_bytes`.
            *request: From `request_to_bytes`.

        Returns:
            The reply, as `reply_to_bytes` writes it; and behind it the blocks of its
            rows where a client wants them.
        """
        updates, wanted, highest = request_from_bytes(request)
        with self._until_stopped():
            reply = self._draws.exchange(client_from_bytes(client), updates, wanted, highest)
        if not num_blocks(wanted):
            return reply_to_bytes(reply)
        results = in_blocks(reply, wanted)
        results[0] = reply_to_bytes(reply)
        return results

    def stop(self) -> None:
        """Close all rings and give the folder back; later calls are refused."""
        with self._lock:
            self._stopped = True
        # Draws that look for rings hold their lock, and want this one.
        self._draws.close()
        with self._lock:
            self._close()

    # What the calls stand on.

    def open_rings(self) -> dict[str, ReplayBuffer]:
        """Open the rings that are not open yet, and return all.

        Raises:
            FailedError: The run was stopped, or the disk cannot be read.
            FormatError: A folder is missing, or a ring is damaged.
            LockedError: Another process serves the folder.
            SchemaError: A ring has another schema than the others, or is a copy of one.
        """
        with self._lock:
            self._refuse_stopped()
            self._take_folder()
            found = self._find_rings()
            for name in [*self.rings]:
                version, ring = self._versions[name], self.rings[name]
                if found.get(name) != version or not ring.in_place:
                    # It was deleted, or another one has its name now; a copy that
                    # keeps times may even get the file's number.
                    with suppress(ReplayError):
                        self.rings.pop(name).close()
            for name, version in found.items():
                if name not in self.rings:
                    try:
                        self._open(name)
                    except FormatError:
                        if not holds_buffer(self.folder / name):
                            # Deleted since it was listed.
                            continue
                        raise
                    self._versions[name] = version
            return dict(self.rings)

    def _counter(self, name: str, ring: ReplayBuffer) -> RingCount | None:
        """Return what counts for a ring; None where its writer has no limiter."""
        counter = self._counters.get(name)
        if counter is not None and counter.ring is ring:
            return counter
        if counter is not None:
            counter.limit.close()
        found = counter_of(self.folder / name)
        if found is None:
            return None
        limit = found.bind_to(ring)
        self._counters[name] = counter = RingCount(ring, found.limiter, limit)
        return counter

    def _by_lanes(self, call: Callable[[Lanes], T], leased: bool = False) -> T:
        """Call the lanes of the ring of thin writers that is in the folder now.

        Args:
            call: May run for a ring that is not in the folder any more, and again.
            leased: By a writer that has a lease, so that there was a ring.

        Raises:
            RemovedError: There was such a ring, and is none.
            FailedError: There is no such ring, or the run was stopped.
            FormatError: Its ``writers.json`` is damaged.
            LockedError: Another process writes it, or serves the folder.
        """
        while True:
            lanes = self._thin(leased)
            try:
                return call(lanes)
            except RemovedError:
                if lanes.in_place:
                    raise
                with self._lock:
                    if self._lanes is lanes:
                        self._lanes = None
                # Its rows go with its folder, and their writers are to hear of it.
                with suppress(ReplayError):
                    lanes.close()

    def _thin(self, leased: bool) -> Lanes:
        """Return the lanes of the ring of thin writers, opened at the first call."""
        folder = self.folder / THIN
        with self._lock:
            self._refuse_stopped()
            if self._lanes is not None:
                return self._lanes
            there = holds_buffer(folder) and has_lanes(folder)
            if not there and (leased or self._had_lanes):
                raise RemovedError(
                    f"{folder}, the ring for thin writers of the node {self.key!r}, "
                    "was removed. Put it back, or call mr.ray.thin_ring on that node.",
                    errno_=errno.ENOENT,
                )
            self._take_folder()
            if not there:
                raise FailedError(
                    f"the node {self.key!r} of the run {self.run!r} has no ring "
                    "for thin writers. Call mr.ray.thin_ring on that node."
                )
            self._lanes = open_lanes(folder, allow_network=self.network)
            self._had_lanes = True
            return self._lanes

    def _refuse_stopped(self) -> None:
        if self._stopped:
            raise FailedError(f"the run {self.run!r} was stopped. Begin it with mr.ray.writer.")

    @contextmanager
    def _until_stopped(self) -> Iterator[None]:
        """Refuse a call of which a stop closed the rings, whatever came of it."""
        try:
            yield
        finally:
            self._refuse_stopped()

    def _folders(self) -> dict[str, Path]:
        """Folders of the rings by name, for draws, which open them as they need."""
        return {name: self.folder / name for name in self.open_rings()}

    def _take_folder(self) -> None:
        """Hold the folder's lock, so that no second shard serves its rings."""
        if self._folder_lock is not None:
            if self._folder_lock.in_place or not self.folder.is_dir():
                return
            # Of a folder that another one has replaced.
            self._folder_lock.release()
            self._folder_lock = None
        if not self.folder.is_dir():
            raise FormatError(
                f"{self.folder} does not exist on the node {self.key!r}. Begin with "
                "mr.ray.writer on that node."
            )
        refuse_network(self.folder, self.network)
        try:
            self._folder_lock = WriterLock(self.folder)
        except LockedError as error:
            holder = f"pid {error.pid} on {error.host}" if error.pid else "a process"
            raise LockedError(
                f"{self.folder} is served by {holder} already, and cannot be served "
                f"by the node {self.key!r} as well. Give each node a root of its own, "
                "or stop the other run.",
                pid=error.pid,
                host=error.host,
            ) from error

    def _find_rings(self) -> dict[str, tuple[int, int]]:
        """Names of the rings in the folder, and what another one of a name changes."""
        found = {}
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            raise system_failure("list the rings in", self.folder, error) from error
        for name in names:
            # A folder becomes a buffer when this file appears in it, last.
            with suppress(OSError):
                status = os.stat(self.folder / name / METADATA)
                found[name] = status.st_ino, status.st_mtime_ns
        return dict(sorted(found.items()))

    def _open(self, name: str) -> None:
        """Open one ring to draw from it; its writer is another process."""
        ring = ReplayBuffer.open(self.folder / name)
        try:
            _refuse_copy(ring, self.rings)
            described(ring.schema)
            for first in self.rings.values():
                check_schema(len(self.rings), ring, first)
                break
        except BaseException:
            ring.close()
            raise
        self.rings[name] = ring

    def _facts(self, name: str) -> dict[str, Any]:
        """What there is to say of an open ring, in JSON's types."""
        ring = self.rings[name]
        heads = ring.heads
        rows = int(heads.sum())
        return {
            "path": str(ring.path),
            "uuid": ring.metadata.uuid.hex(),
            "schema": ring.schema.to_json(),
            "roles": dict(ring.schema.roles),
            "capacity": ring.capacity,
            "num_envs": ring.num_envs,
            "steps": len(ring),
            "heads": heads.tolist(),
            "rate": self._rate(name, rows),
            "writer": Owner(self.folder / name).process,
            "free": self._num_free(name),
            "disk_free": self._disk_free(name),
        }

    def _num_free(self, name: str) -> int | None:
        """Environments that thin writers can have; None of other rings."""
        if name != THIN or not has_lanes(self.folder / THIN):
            return None
        try:
            return self._by_lanes(lambda lanes: lanes.num_free)
        except ReplayError:
            # It is drawn from all the same, and a lease says what is wrong.
            return 0

    def _disk_free(self, name: str) -> int | None:
        """Bytes free on the disk of a ring; None where it cannot be asked."""
        try:
            return free_nbytes(self.folder / name)
        except OSError:
            return None

    def _rate(self, name: str, rows: int) -> float | None:
        """Rows a second since an earlier count; None for want of one."""
        now = time.monotonic()
        counts = self._counts.setdefault(name, [])
        counts.append((now, rows))
        while len(counts) > 2 and now - counts[1][0] >= RATE_S:
            del counts[0]
        if now - counts[0][0] < RATE_S:
            return None
        return (rows - counts[0][1]) / (now - counts[0][0])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold what guards the table of rings."""
        with self._lock:
            yield

    def _close(self) -> None:
        """Close everything, the lock of the folder last."""
        try:
            lanes, self._lanes = self._lanes, None
            if lanes is not None:
                lanes.close()
            while self._counters:
                self._counters.popitem()[1].limit.close()
            while self.rings:
                self.rings.popitem()[1].close()
        finally:
            held, self._folder_lock = self._folder_lock, None
            if held is not None:
                held.release()


def _refuse_copy(ring: ReplayBuffer, others: Mapping[str, ReplayBuffer]) -> None:
    """Refuse a ring that is a copy of another one: clients know rings by their uuids.

    Raises:
        SchemaError: It is.
    """
    for other in others.values():
        if other.metadata.uuid == ring.metadata.uuid:
            raise SchemaError(
                f"{ring.path} is a copy of {other.path}, with the same uuid. Take one "
                "of them out of the folder of the run; mmreplay convert makes a copy "
                "that is a ring of its own."
            )


def start_shard(run: str, key: str, root: str, node: Node, network: bool) -> None:
    """Make the shard of a node, unless there is one of its name.

    Args:
        run: The run.
        key: The node's key.
        root: Folder of the runs on that node.
        node: The node.
        network: Whether the folder may be on a network file system.
    """
    binding: dict[str, Any] = {"label_selector": {cluster.LABEL: key}}
    if node.label != key:
        binding = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False)}
    actor = cluster.actor_class(Shard, cluster.SHARD_THREADS, cluster.SHARD_CALLS)
    options = {**cluster.options_of(cluster.shard_name(run, key)), **binding}
    actor.options(**options).remote(run, root, key, network)
