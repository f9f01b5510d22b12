"""The rings of a run as one client knows them: where they are, and their masses.

Rings get numbers as they are found, which batches name them by. The masses that are
known may be old: a draw by old masses lags behind the priorities and is not wrong, see
`mmreplay.samplers.joint`. A shard that has not answered for too long is *lost*, until
it answers again.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmreplay import errors
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import FailedError, FormatError, SchemaError, StarvedError
from mmreplay.ray.client_stats import ClientStats
from mmreplay.ray.cluster import ALIVE, RESTARTING, check_version
from mmreplay.ray.descriptions import Description, describe_sampler, describe_transforms
from mmreplay.ray.draws import Client, Masses, RingDraws, Update, describe_client
from mmreplay.ray.shard_calls import (
    Call,
    CallLostError,
    LocalCalls,
    NotYetError,
    RingInfo,
    RunCalls,
    ShardCalls,
)
from mmreplay.samplers.base import Sampler, traits_of
from mmreplay.samplers.joint import Mass
from mmreplay.schema import Schema
from mmreplay.transforms.base import Transform

if TYPE_CHECKING:
    from mmreplay.ray.requests import Request

REPEAT_S = 0.05
"""Seconds between two tries of a call whose shard is being restarted."""
OLD_S = 1.0
"""Masses that are older are asked for, also of rings that are lost."""
MAX_ASKED = 8
"""Calls for the masses of a lost shard that are waited for."""
LOOK_S = 2.0
"""Seconds between two looks for new shards."""
REGISTRY_S = 10.0
"""A registry that says nothing for so long holds no shard from being lost."""
WAIT_S = 0.5
"""A wait for an answer looks so often whether the shard counts as lost."""


@dataclass(slots=True, eq=False)
class KnownRing:
    """What is known of a ring.

    Attributes:
        number: Its number in batches.
        name: Within its shard.
        uuid: In hex digits.
        shard: That serves it.
        folder: On its node.
        buffer: To gather from, where it is on this node.
        mass: As it was heard last.
        listed: Whether the shard has it, as it said last.
    """

    number: int
    name: str
    uuid: str
    shard: KnownShard
    folder: str
    buffer: ReplayBuffer | None
    mass: Mass = field(default_factory=lambda: Mass(0.0, 0, np.inf, 0.0))
    listed: bool = True


@dataclass(slots=True, eq=False)
class KnownShard:
    """What is known of a shard.

    Attributes:
        remote: Calls to the actor.
        calls: That draw: the same, or of this process.
        draws: This process's own, where it draws without a call.
        rings: By name.
        copies: Names of rings that are copies of others, and are not drawn from.
        lost: It has not answered for too long.
        overdue: It was being restarted for too long, which no learner has heard of.
        overdue_at: When that was noted last.
        heard_at: When it was heard last.
        restarted_at: When it was being restarted last, as far as was asked.
        sent_at: When a request was sent to it last.
        updates: Priorities to be sent, by ring.
        updating: The request with priorities that is under way; others wait for it, so
            that the newest ones win.
        asked: Calls for masses that are under way, and since when, the oldest first.
            There is one, but for a shard that is lost.
        listed: A call for the rings of this node, likewise.
    """

    remote: ShardCalls
    calls: ShardCalls
    draws: RingDraws | None = None
    rings: dict[str, KnownRing] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()
    lost: bool = False
    overdue: bool = False
    overdue_at: float = -math.inf
    heard_at: float = 0.0
    restarted_at: float = 0.0
    sent_at: float = 0.0
    updates: dict[str, list[Update]] = field(default_factory=dict)
    updating: Request | None = None
    asked: list[tuple[Call, float]] = field(default_factory=list)
    listed: Call | None = None


class Errors:
    """A context manager that keeps errors: an error ends its own block only."""

    def __init__(self) -> None:
        """Keep none yet."""
        self._first: Exception | None = None

    def __enter__(self) -> None:
        """Begin a block."""

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        """End a block; Ctrl-C ends all."""
        if isinstance(error, Exception):
            self._first = self._first or error
            return True
        return False

    def raise_first(self) -> None:
        """Raise the first error, if there was one."""
        if self._first is not None:
            try:
                raise self._first
            finally:
                # Its traceback has this frame.
                self._first = None


class RingTable:
    """Finds the rings of a run, hears of their masses, and notes which nodes are lost.

    Threads: any may call. `lock` is held where rings or masses change, and by a client
    that plans by them.

    Attributes:
        run: The run.
        client: What its rings are drawn by.
        prioritized: Whether that is by priority.
        transforms: Of every ring.
        lock: Guards all of it.
        shards: By key.
        rings: By number.
        warnings: Of nodes that were lost, for the learner's thread.
        step: Of the next batch, for exponents that follow a schedule.
        closing: Whether waits for a node that is away are to end.
    """

    def __init__(
        self,
        run: RunCalls,
        sampler: Sampler,
        transforms: Sequence[Transform],
        stats: ClientStats,
        *,
        alone: bool,
        lost_s: float,
        patience_s: float = 600.0,
        waits: bool = False,
    ) -> None:
        """Find the rings.

        Args:
            run: The run.
            sampler: What they are drawn by.
            transforms: Of every ring.
            stats: What is met is counted there.
            alone: Own the priorities of this node's rings.
            lost_s: Seconds without an answer after which a shard is lost.
            patience_s: Seconds that a shard which is being restarted is waited for.
            waits: Lost shards are waited for, and the call that waits warns of it.

        Raises:
            SchemaError: The run has no ring, schemas differ, or the sampler or a
                transform cannot draw from rings of a run.
            StarvedError: No node with a ring answers.
        """
        self.run, self._stats = run, stats
        self.transforms = tuple(transforms)
        self._alone, self.lost_s, self._waits = alone, lost_s, waits
        self._patience_s = patience_s
        described: list[Description] = []
        # Refused once it is known that a ring is on another node.
        self._not_described: SchemaError | None = None
        try:
            described = describe_transforms(transforms)
        except SchemaError as error:
            self._not_described = error
        self.client: Client = describe_client(describe_sampler(sampler), described)
        self.prioritized = traits_of(sampler).priorities
        self.lock = threading.RLock()
        self.shards: dict[str, KnownShard] = {}
        self.rings: list[KnownRing] = []
        self.warnings: deque[str] = deque()
        self.step = 0
        self.closing = False
        self._schema: Schema | None = None
        self._looked_at = 0.0
        self._new_rings = False
        try:
            self.find_rings()
            self._refuse_missing_rings()
        except BaseException:
            # Priorities that are owned already would stay this process's.
            self.close()
            raise

    def _refuse_missing_rings(self) -> None:
        """Refuse a run without a ring that can be drawn, or owned where alone.

        Raises:
            SchemaError: The run has no ring, or this node has none to own.
            StarvedError: No node with a ring answers.
        """
        run = self.run.run
        away = sorted(key for key, shard in self.shards.items() if shard.lost)
        if away and not self.rings:
            self.refuse_overdue()
            raise StarvedError(
                f"run {run!r}: no node with a ring has answered for {self.lost_s:g} s, "
                f"of {away}. Check them with mmreplay ray status {run}, and make "
                "the client again."
            )
        owned = any(shard.draws is not None for shard in self.shards.values())
        if self.rings and self._alone and self.prioritized and not owned:
            raise SchemaError(
                f"alone=True needs a ring of run {run!r} on this node, but its "
                f"rings are on {sorted(self.shards)}. Leave it out, or run the learner "
                "on a node with a ring."
            )
        if not self.rings:
            raise SchemaError(
                f"run {run!r} must have a ring, but none was found. Make one with "
                "mr.ray.writer(run, schema, capacity, root=...)."
            )

    @property
    def schema(self) -> Schema:
        """The fields of one step."""
        assert self._schema is not None
        return self._schema

    @property
    def highest(self) -> float:
        """The highest priority of all rings, at which new rows enter."""
        return max((ring.mass.highest for ring in self.rings), default=0.0)

    # Rings.

    def find_rings(self) -> None:
        """Take in shards and rings that are new, and ask all for their masses.

        An error of one shard keeps no ring of another one out; the first is raised in
        the end.

        Raises:
            SchemaError: A ring has another schema, or is a copy of another one, or
                transforms do not travel.
            LockedError: Another process owns the priorities of a ring.
        """
        self._looked_at = time.monotonic()
        self._new_rings = False
        asked, errors = [], Errors()
        for calls in sorted(self.run.shards(), key=lambda calls: calls.key):
            shard = self.shards.get(calls.key)
            if shard is None:
                shard = self.shards[calls.key] = KnownShard(calls, calls)
            if not shard.lost:
                asked.append((shard, calls.send("info"), time.monotonic()))
        answers: list[tuple[KnownShard, Mapping[str, Any]]] = []
        for shard, call, at in asked:
            with errors:
                info = self._wait(shard, call, at, "info")
                if info is not None:
                    answers.append((shard, info))
                    # Of all before any is taken in: a ring may have been moved.
                    self._unlist(shard, info)
        for shard, info in answers:
            with errors:
                self._take_in(shard, info)
        with errors:
            self.ask_all()
        errors.raise_first()

    def look_again(self) -> None:
        """Have the next look find rings as if some were new."""
        self._new_rings = True

    def find_new_rings(self) -> None:
        """Look every `LOOK_S` for shards or rings that are new; nothing is waited for.

        Raises:
            ReplayError: See `find_rings`.
        """
        if not self._new_rings and time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        keys = {calls.key for calls in self.run.shards()}
        is_new, errors = self._new_rings or not keys <= self.shards.keys(), Errors()
        for shard in list(self.shards.values()):
            # Masses of its rings are this process's own, and say of no other ring.
            if shard.draws is None or shard.lost:
                continue
            if shard.listed is None:
                shard.listed = shard.remote.send("info")
                continue
            # Before the answer, which may be an error: the next look asks again.
            call, shard.listed, before = shard.listed, None, len(self.rings)
            with errors, suppress(CallLostError):
                try:
                    info = call.result(0.0)
                except NotYetError:
                    shard.listed = call
                else:
                    self._unlist(shard, info)
                    if self._copies(shard, info).keys() - shard.copies:
                        # Or moved here: the other shard is to say so.
                        is_new = True
                    else:
                        self._take_in(shard, info)
            is_new |= len(self.rings) > before
        if is_new:
            self.find_rings()
        errors.raise_first()

    def _unlist(self, shard: KnownShard, info: Mapping[str, Any]) -> None:
        """Note which rings a shard has no more."""
        if info["error"] is not None:
            # It may have those that are not among its rings now.
            return
        found: Mapping[str, RingInfo] = info["rings"]
        for name, ring in list(shard.rings.items()):
            ring.listed = name in found and found[name]["uuid"] == ring.uuid

    def _copies(self, shard: KnownShard, info: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """By name of a ring that is a copy: name and folder of the other one."""
        found: Mapping[str, RingInfo] = info.get("rings", {})
        known = {
            ring.uuid: ring for ring in list(self.rings) if ring.listed and not ring.shard.lost
        }
        copies, seen = {}, dict[str, tuple[str, str]]()
        # Those that are drawn from already are not the copies.
        for name in sorted(found, key=lambda name: (name not in shard.rings, name)):
            uuid, path = found[name]["uuid"], found[name]["path"]
            ring = known.get(uuid)
            if ring is not None and ring is not shard.rings.get(name):
                copies[name] = f"{ring.shard.remote.key}/{ring.name}", ring.folder
            elif uuid in seen:
                copies[name] = seen[uuid]
            seen.setdefault(uuid, (f"{shard.remote.key}/{name}", path))
        return copies

    def _take_in(self, shard: KnownShard, info: Mapping[str, Any]) -> None:
        """Open what is on this node, and number the rings that are new.

        Raises:
            ReplayError: See `refuse_shard`.
            SchemaError: A ring has another schema, or is a copy of another one; a copy
                is raised once the others are taken in.
        """
        refuse_shard(shard.remote.key, info)
        copies = self._copies(shard, info)
        shard.copies = frozenset(copies)
        found = {n: each for n, each in info["rings"].items() if n not in copies}
        here = info["node_id"] == self.run.node_id
        buffers: Mapping[str, ReplayBuffer] = {}
        if here and (self._alone or not self.prioritized):
            folders = {name: Path(each["path"]) for name, each in found.items()}
            if all(folder.is_dir() for folder in folders.values()):
                if shard.draws is None:
                    shard.draws = RingDraws(self.client, self.transforms)
                    shard.calls = LocalCalls(shard.remote.key, shard.draws)
                shard.draws.serve(folders)
                buffers = shard.draws.buffers
        if shard.draws is None and self._not_described is not None:
            raise self._not_described
        for name in sorted(found):
            each, ring = found[name], shard.rings.get(name)
            if ring is not None and ring.uuid == each["uuid"]:
                if shard.draws is not None:
                    ring.buffer = buffers.get(name)
                continue
            schema = Schema.from_json(each["schema"], each["roles"])
            self._check_schema(schema, f"{shard.remote.key}/{name}")
            buffer = buffers.get(name)
            if here and buffer is None:
                buffer = _opened(each, self.transforms)
            with self.lock:
                if ring is None:
                    ring = KnownRing(
                        len(self.rings), name, each["uuid"], shard, each["path"], buffer
                    )
                    shard.rings[name] = ring
                    self.rings.append(ring)
                else:
                    # It was deleted and made again: another ring of this number.
                    ring.uuid, ring.buffer, ring.listed = each["uuid"], buffer, True
        if copies:
            name, (other, folder) = next(iter(copies.items()))
            raise SchemaError(
                f"ring {shard.remote.key}/{name} in {info['rings'][name]['path']} is a "
                f"copy of {other} in {folder}, with the same uuid. Take one of them "
                "out of the run; mmreplay convert makes a copy that is a ring of its "
                "own."
            )

    def _check_schema(self, schema: Schema, name: str) -> None:
        if self._schema is None:
            self._schema = schema
            return
        mine, other = schema.fields, self._schema.fields
        for path in dict.fromkeys((*other, *mine)):
            if mine.get(path) != other.get(path):
                first = self.rings[0]
                raise SchemaError(
                    f"field {path!r} of ring {name} must be {other.get(path)}, as in "
                    f"{first.shard.remote.key}/{first.name}, got {mine.get(path)}. "
                    "Use one schema in a run."
                )
        if schema != self._schema:
            raise SchemaError(
                f"ring {name} must have the roles and the order of fields of the "
                f"others, {dict(self._schema.roles)}, got {dict(schema.roles)}. Use "
                "one schema in a run."
            )

    # Their masses.

    def ask_all(self) -> None:
        """Ask all shards for their masses, and wait.

        Raises:
            ReplayError: The first answer that is one, once all others are noted.
        """
        errors = Errors()
        asked = [
            (shard, self._send_masses(shard), time.monotonic())
            for shard in list(self.shards.values())
            if not shard.lost
        ]
        for shard, call, at in asked:
            with errors:
                masses = self._wait(shard, call, at, "masses")
                if masses is not None:
                    self.note(shard, masses)
        errors.raise_first()

    def ask_again(self, shard: KnownShard) -> None:
        """Ask a shard for masses where those that are known are old; do not wait.

        One that is lost is asked again while calls have no answer: those of before a
        node died may never have one.
        """
        now = time.monotonic()
        waiting, asked = [], shard.asked
        for call, at in asked:
            try:
                masses = call.result(0.0)
            except NotYetError:
                if not self.is_lost(shard, at) or now - at <= self.lost_s:
                    waiting.append((call, at))
            except CallLostError:
                self.is_lost(shard, at)
            else:
                shard.asked = []
                self.note(shard, masses)
                return
        since = waiting[-1][1] if waiting else shard.heard_at
        if (not waiting or shard.lost) and now - since > OLD_S:
            waiting.append((self._send_masses(shard), now))
        shard.asked = waiting[-MAX_ASKED:]

    def ask_lost(self) -> None:
        """Ask lost shards again, and see whether they answer; do not wait."""
        for shard in list(self.shards.values()):
            if shard.lost:
                self.ask_again(shard)

    def _send_masses(self, shard: KnownShard) -> Call:
        return shard.calls.send("masses", self.client, self.step, self.highest)

    def note(self, shard: KnownShard, masses: Masses) -> None:
        """Take note of masses that were heard."""
        with self.lock:
            shard.heard_at = time.monotonic()
            shard.lost = shard.overdue = False
            if any(n not in masses and r.mass.num_legal for n, r in shard.rings.items()):
                # One was taken out: what was a copy of it is looked at as a new ring.
                for each in self.shards.values():
                    each.copies = frozenset()
            for name, ring in shard.rings.items():
                total, num_legal, lowest, highest = masses.get(name, (0, 0, np.inf, 0))
                ring.mass = Mass(total, int(num_legal), lowest, highest)
            known = shard.rings.keys() | shard.copies
            self._new_rings |= bool(masses.keys() - known)

    # Nodes that do not answer.

    def _wait(self, shard: KnownShard, call: Call, at: float, method: str) -> Any:
        """Wait for the answer to a call that asks; None where the shard is lost."""
        while True:
            try:
                return call.result(WAIT_S)
            except NotYetError:
                pass
            except CallLostError:
                time.sleep(REPEAT_S)
                self._stats.repeated += 1
                if method == "masses":
                    call = self._send_masses(shard)
                else:
                    call = shard.remote.send(method)
            if self.closing or self.is_lost(shard, at):
                return None

    def is_lost(self, shard: KnownShard, since: float) -> bool:
        """Whether a shard has been silent for too long."""
        if shard.lost:
            return True
        now, silent_since = time.monotonic(), max(since, shard.heard_at)
        silent_s, overdue = now - silent_since, False
        if silent_s < self.lost_s:
            return False
        self.note_restarts(silent_s - self.lost_s)
        # A shard that was restarted has as long to answer as any other.
        if now - shard.restarted_at < self.lost_s:
            if silent_s < self._patience_s:
                return False
            overdue = True
        with self.lock:
            if not shard.lost:
                shard.lost, shard.overdue = True, overdue
                if overdue:
                    shard.overdue_at = now
                self._stats.times_lost += 1
                if self._waits:
                    return True
                rings = [f"{shard.remote.key}/{name}" for name in shard.rings]
                self.warnings.append(
                    f"run {self.run.run!r}: node {shard.remote.key!r} has not "
                    f"answered for {self.lost_s:g} s. Batches are drawn without its "
                    f"rings {rings} until it answers."
                )
        return True

    def note_restarts(self, unsaid_s: float) -> None:
        """Note which shards are being restarted; see `is_restarted`."""
        now = time.monotonic()
        for key, shard in list(self.shards.items()):
            if is_restarted(self.run, key, unsaid_s):
                shard.restarted_at = now

    def refuse_overdue(self) -> None:
        """End the wait for shards that were being restarted for too long, once.

        Raises:
            StarvedError: There are such shards.
        """
        with self.lock:
            overdue = [key for key, each in self.shards.items() if each.overdue]
            for key in overdue:
                self.shards[key].overdue = False
        if overdue:
            raise StarvedError(out_of_patience(self.run, overdue, self._patience_s))

    def refuse_overdue_since(self, shard: KnownShard, began: float) -> None:
        """End a wait that was under way when a shard was restarted for too long.

        Batches wait in several threads, and only the oldest one's error reaches the
        learner.

        Raises:
            StarvedError: It was found so since the wait began.
        """
        if shard.overdue_at >= began:
            keys = [shard.remote.key]
            raise StarvedError(out_of_patience(self.run, keys, self._patience_s))

    def await_restarts(self) -> None:
        """Where no shard answers, wait for those that are restarted, or just were.

        Raises:
            StarvedError: None of them has answered in time.
        """
        began = restarted_at = time.monotonic()
        while all(shard.lost for shard in list(self.shards.values())):
            now, keys = time.monotonic(), list(self.shards)
            restarted = [k for k in keys if is_restarted(self.run, k, now - began)]
            if restarted:
                restarted_at = now
                if now - began >= self._patience_s:
                    raise StarvedError(out_of_patience(self.run, restarted, self._patience_s))
            elif (
                now - restarted_at >= self.lost_s or ALIVE not in (self.run.states() or {}).values()
            ):
                return
            if self.closing:
                return
            time.sleep(REPEAT_S)
            self.ask_lost()

    def refuse_closing(self) -> None:
        """End a wait for a node that is away.

        Raises:
            FailedError: The client is closed.
        """
        if self.closing:
            raise FailedError(f"run {self.run.run!r}: the client is closed.")

    def close(self) -> None:
        """Close the rings of this node, and leave no answer behind."""
        for shard in list(self.shards.values()):
            if not shard.lost:
                shard.remote.settle()
            if shard.draws is not None:
                shard.draws.close()
        for ring in self.rings:
            if ring.buffer is not None:
                ring.buffer.close()


def is_restarted(run: RunCalls, key: str, unsaid_s: float) -> bool:
    """Whether a shard is being restarted on its node, as the registry says.

    Args:
        run: The shard's.
        key: The shard's.
        unsaid_s: For how long the registry has been asked, if it says nothing: it may
            be restarted itself.
    """
    states = run.states()
    return unsaid_s < REGISTRY_S if states is None else states.get(key) == RESTARTING


def out_of_patience(run: RunCalls, keys: Sequence[str], patience_s: float) -> str:
    """Say that shards were waited for in vain, and the state of each of the run."""
    states = run.states() or dict.fromkeys(keys, "silent, as the registry is")
    every = ", ".join(f"{key!r} is {state}" for key, state in sorted(states.items()))
    return (
        f"run {run.run!r}: waited {patience_s:g} s for shards {sorted(keys)} to be "
        f"restarted; {every}. See the logs of their nodes, and draw again."
    )


def refuse_shard(key: str, info: Mapping[str, Any]) -> None:
    """Refuse a shard that says it cannot serve its rings, or not this client.

    Args:
        key: Its node's.
        info: What it says of itself.

    Raises:
        ReplayError: What it met when it opened its rings.
        FailedError: It has another version of mmreplay.
    """
    if info["error"] is not None:
        kind = getattr(errors, info["error"]["kind"], FailedError)
        raise kind(info["error"]["message"])
    check_version(f"the shard {key!r}", info["version"])


def _opened(info: RingInfo, transforms: Sequence[Transform]) -> ReplayBuffer | None:
    """Open a ring of this node, where its folder can be seen from here."""
    try:
        buffer = ReplayBuffer.open(info["path"], transforms=transforms)
    except FormatError:
        # Another container of this node has it under another path.
        return None
    if buffer.metadata.uuid.hex() == info["uuid"]:
        return buffer
    buffer.close()
    return None
