"""A writer without a disk: its rows travel to a shard in blocks, and each arrives once.

The writer holds a lease of environments of the shard's ring (mmreplay/ray/lanes.py),
and knows their heads. A block names the heads that it follows; it is in if, and only
if, the heads are past it. So after any error the writer asks for the heads, and sends
again what is above them. Answers of blocks that are sent ahead may be older than an
answer before them: only heads that were asked for after all of these say that rows are
lost, as they are after a power cut of the shard's node.

The ring may be removed, and another one or an older copy put in its place. Each answer
says which ring it is of. Where that is another one, the writer asks it for all leases
that it ever had: rows that are not below those heads are lost.
"""

from __future__ import annotations

import time
import uuid
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import integer, number, one_of
from mmreplay.buffer.opening import StrPath, absolute
from mmreplay.buffer.step_encoder import StepEncoder
from mmreplay.disk import files
from mmreplay.errors import (
    DurabilityWarning,
    FailedError,
    FullError,
    LockedError,
    RemovedError,
    ReplayError,
    SchemaError,
    frames_to_caller,
)
from mmreplay.format.ray_files import IDLE_S
from mmreplay.limiter import RateLimiter
from mmreplay.process import ProcessGuard
from mmreplay.ray import cluster
from mmreplay.ray.agreement import described
from mmreplay.ray.cluster import ANSWER_S, PAUSE_S, VERSION, Remote, UnansweredError
from mmreplay.ray.grants import Asker, Grants, limiter_from
from mmreplay.ray.lanes import THIN, Answer, Terms, counts_after, create_lanes
from mmreplay.ray.limits import ask_registry, refuse_other_limiters, refuse_unfit_limiter
from mmreplay.ray.registry import start_registry
from mmreplay.ray.ring_writer import (
    LOCKED_S,
    check_create,
    check_folder,
    node_key,
    remove_refused,
    serve,
)
from mmreplay.schema import Schema
from mmreplay.schema.schema import refuse_varying

Keep = Literal["published", "committed"]
OnFull = Literal["raise", "wait"]
Positions = NDArray[np.int64]
Columns = dict[str, NDArray[Any]]

STEPS = 64
NBYTES = 1 << 20
UNCOMMITTED_NBYTES = 64 << 20
"""Blocks that wait for a commit; beyond, the shard is asked to commit."""
FULL_S = 1.0
"""Between two tries where the shard's disk is full."""
UNKNOWN = "does not know this writer any more, so"
OLDER = "has an older copy of its ring, or lost power:"
IN_OTHER_RING = "They are in the folder that was its ring before, if anywhere."
IN_DOUBT = (
    "They may be in the ring, and are not sent again. Make rings with an idle_s above "
    "the longest pause of a writer."
)
UNCOMMITTED = "Use keep='committed' to have rows sent again after a power cut."


def thin_ring(
    run: str,
    schema: Schema,
    capacity: int,
    *,
    root: StrPath,
    num_envs: int = 8,
    idle_s: float = IDLE_S,
    limiter: RateLimiter | None = None,
    key: str | None = None,
    **create: Any,
) -> None:
    """Make the ring of this node for writers without a disk; may be repeated.

    The ring is the buffer ``root/run/thin``. The node's shard writes it.

    Args:
        run: The run's name.
        schema: The fields of one step; the same in the whole run.
        capacity: Rows of each environment.
        root: A folder on a disk of this node, the same for all writers of the node.
        num_envs: Environments of all its thin writers together.
        idle_s: Seconds after which a thin writer that was silent may lose its
            environments to another one.
        limiter: Of the whole run, equal to that of its writers; the ring's thin writers
            follow it. None for no limit.
        key: What names this node where it has no label ``mmreplay``; by default its
            host's name.
        **create: More arguments of `ReplayBuffer.create`, as ``autoreset``, which a
            new ring asks for.

    Raises:
        SchemaError: An argument is not legal, there is no cluster, or the run has
            another schema or limiter, or the node another root or ring.
        LockedError: The folder is served already.
        FailedError: The disk cannot be written, or is a network file system.
        FullError: No space is left.

    Example:
        >>> import ray  # doctest: +SKIP
        >>> ray.init(address="auto")  # doctest: +SKIP
        >>> mr.ray.thin_ring(  # doctest: +SKIP
        ...     "cartpole", schema, 100_000, root="/data/replay", num_envs=32,
        ...     autoreset="next_step",
        ... )
    """
    cluster.require_connection()
    cluster.check_name("run", run)
    refuse_other_limiters(limiter)
    node = cluster.this_node()
    key, where = node_key(node, key), absolute(root)
    network = bool(create.get("allow_network", False))
    number("idle_s", idle_s, above=0)
    fields, roles = described(schema)
    refuse_varying(schema, "a ring of thin writers, unlike one of mr.ray.writer,")
    # Before there is a registry, which would stay.
    ring = where / run / THIN
    check_folder(ring.parent, network)
    check_create(ring, schema, capacity, num_envs, limiter, create)
    registry = start_registry(run)
    registry.call("check", VERSION, fields, roles)
    if limiter is not None:
        # Of the smallest writer: of one environment, and one step at a time.
        refuse_unfit_limiter(run, limiter, 1)
    files.make_folder(where, exist_ok=True)
    files.make_folder(where / run, exist_ok=True)
    made = create_lanes(ring, schema, capacity, num_envs, idle_s=idle_s, limiter=limiter, **create)
    try:
        registry.call("join", key, str(where), node.host, node.node_id, network)
        serve(Remote(cluster.shard_name(run, key)), THIN)
    except SchemaError:
        if made is not None:
            # The shard may have opened it, and is ended by a refusal.
            remove_refused(ring, made, LOCKED_S)
        raise


def thin_writer(
    run: str,
    schema: Schema,
    *,
    num_envs: int = 1,
    to: str | None = None,
    steps: int = STEPS,
    nbytes: int = NBYTES,
    ahead: int = 2,
    keep: Keep = "published",
    on_full: OnFull = "raise",
    limiter: RateLimiter | None = None,
    timeout_s: float = ANSWER_S,
) -> ThinWriter:
    """Write rows of a run from a process without a disk.

    Its environments are some of a ring that `thin_ring` made. Steps are sent in blocks,
    and each block arrives once, whatever is killed meanwhile.

    Args:
        run: The run's name.
        schema: The fields of one step, those of the run.
        num_envs: Environments of this writer.
        to: The key of the node to write to; None chooses the one with the most free
            environments.
        steps: Steps of a block; fewer where the ring's reserve is small.
        nbytes: Bytes of a block, and at least one step.
        ahead: Blocks that are sent before the answer of the first of them.
        keep: When a block is safe. ``"published"``: when it has arrived, from every
            kill, and not from a power cut of the node. ``"committed"``: from that too;
            it is held here until then.
        on_full: Where the node's disk is full: ``"raise"`` an error, or ``"wait"``.
        limiter: That of the ring, with this writer's `timeout`, `patience` and
            `on_timeout`. By default the ring's, with the defaults.
        timeout_s: Seconds within which the shard must answer, restarts included.

    Raises:
        SchemaError: An argument is not legal, there is no cluster, or the run has
            another schema or limiter.
        FailedError: There is no such run or node, it has no ring for thin writers, or
            other writers have the environments.
        StarvedError: The run does not answer.

    Example:
        >>> with mr.ray.thin_writer("cartpole", schema) as writer:  # doctest: +SKIP
        ...     writer.add(observation=observation, reward=1.0, terminated=False)
    """
    cluster.require_connection()
    cluster.check_name("run", run)
    refuse_other_limiters(limiter)
    error = FailedError(
        f"no node of the run {run!r} has a ring for thin writers. Call "
        "mr.ray.thin_ring on a node with a disk."
    )
    registry = Remote(cluster.registry_name(run))
    registry.call("check", VERSION, *described(schema))
    for key in _shards(run, to):
        try:
            return ThinWriter(
                Remote(cluster.shard_name(run, key)),
                schema,
                num_envs,
                steps=steps,
                nbytes=nbytes,
                ahead=ahead,
                keep=keep,
                on_full=on_full,
                limiter=limiter,
                ask=partial(ask_registry, run, "insert"),
                timeout_s=timeout_s,
            )
        except FailedError as refused:
            # Other writers may have taken the environments since it was asked.
            error = refused
    raise error


def _shards(run: str, to: str | None) -> list[str]:
    """Keys of the nodes with a ring of thin writers, most free environments first.

    Raises:
        SchemaError: The run has no node of that key.
    """
    free: dict[str, int] = {}
    members = Remote(cluster.registry_name(run)).call("members")
    if to is not None:
        if cluster.check_name("to", to) not in members:
            raise SchemaError(
                f"to must be a node of the run {run!r}, {sorted(members)}, got "
                f"{to!r}. None takes the one with the most free environments."
            )
        return [to]
    for key, member in members.items():
        ring = (member["info"] or {"rings": {}})["rings"].get(THIN)
        if member["alive"] and ring is not None and ring["free"] is not None:
            free[key] = ring["free"]
    return sorted(free, key=lambda key: -free[key])


class Shard(Protocol):
    """What a thin writer needs of a shard; `mmreplay.ray.cluster.Remote` is one."""

    def send(self, method: str, *arguments: object) -> Any:
        """Begin a call."""

    def receive(self, reference: Any, timeout_s: float) -> Any:
        """Return its answer, or raise `UnansweredError`."""

    def call(self, method: str, *arguments: object, timeout_s: float = ...) -> Any:
        """Call again until there is an answer."""

    def settle(self) -> None:
        """Look at answers that no one needs any more."""


def _close_asker(guard: ProcessGuard, asker: Asker) -> None:
    """End the asking of a writer that was forgotten, in its own process."""
    if not guard.forked:
        asker.close()


@dataclass(slots=True, eq=False)
class Block:
    """Steps that are sent together.

    Attributes:
        columns: Per path ``[T, E, *shape]``.
        final: Likewise, of the observation's fields; None where no final rows follow.
        ended: bool ``[T, E]``, steps that end an episode.
        resets: bool ``[E]``, environments of the writer whose first step here is what
            the episode before it ended with; see `ThinWriter._put`.
        envs: int64 ``[N]``, the environments of the writer that it has, then N in place
            of E in the arrays above; None for all.
        first: int64 ``[E]``, heads that the block follows, of all environments.
        after: int64 ``[E]``, heads after it.
        granted: The rate limiter allows it.
        published: The shard said that it arrived.
        call: A call whose answer was not taken yet.
        commits: The call commits too.
        doubtful: A call ended so that nothing says whether it added the block.
    """

    columns: Columns
    final: Columns | None
    ended: NDArray[np.bool_]
    resets: NDArray[np.bool_] | None = None
    envs: Positions | None = None
    first: Positions = field(init=False)
    after: Positions = field(init=False)
    granted: bool = False
    published: bool = False
    call: Any = None
    commits: bool = False
    doubtful: bool = False

    def move_to(self, first: Positions) -> Positions:
        """Let the block follow some heads, and return those after it."""
        self.first, self.after = first, first.copy()
        self.published, self.call, self.doubtful = False, None, False
        envs = slice(None) if self.envs is None else self.envs
        with_final = self.final is not None
        self.after[envs] = counts_after(first[envs], self.ended, with_final)
        return self.after

    def without_resets(self) -> list[Block]:
        """The same without the first steps of `resets`, in up to two blocks."""
        resets = self.resets
        if resets is None or not resets.any():
            return [self]
        assert self.envs is None
        assert self.final is None
        blocks = []
        if not resets.all():
            blocks.append(self._slice(slice(1), np.flatnonzero(~resets)))
        if len(self.ended) > 1:
            rest = self._slice(slice(1, None), None)
            rest.resets = self.ended[0] & ~resets
            blocks.append(rest)
        return blocks

    def split(self, max_steps: int) -> list[Block]:
        """The same in blocks of so many steps."""
        if len(self.ended) <= max_steps:
            return [self]
        # Blocks of some environments have one step.
        assert self.envs is None
        blocks, resets = [], self.resets
        for first in range(0, len(self.ended), max_steps):
            part = self._slice(slice(first, first + max_steps), None)
            part.resets = resets
            if resets is not None:
                for ended in part.ended:
                    resets = ended & ~resets
            blocks.append(part)
        return blocks

    def _slice(self, steps: slice, envs: Positions | None) -> Block:
        own: tuple[Any, ...] = (steps,) if envs is None else (steps, envs)
        columns = {path: column[own] for path, column in self.columns.items()}
        final = self.final and {path: each[own] for path, each in self.final.items()}
        return Block(columns, final, self.ended[own], envs=envs, granted=self.granted)

    @property
    def num_rows(self) -> int:
        """Rows that it takes in the ring."""
        return int((self.after - self.first).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        columns = [*self.columns.values(), *(self.final or {}).values()]
        return sum(column.nbytes for column in columns)


@dataclass(slots=True, eq=False)
class FormerLease:
    """A lease that a writer had, and which of its rows are in the ring.

    Attributes:
        writer: Its number.
        begun: int64 ``[E]``, heads when it began.
        stop: int64 ``[E]``, one past the newest of its rows that are in the ring.
        ring: Of the answer that said so; see `Answer`.
    """

    writer: str
    begun: Positions
    stop: Positions
    ring: str


class StepCollector:
    """Collects steps until a block is full.

    A block has final rows after all of its ends or after none: where this changes, a
    new block begins.
    """

    def __init__(self, schema: Schema, num_envs: int, max_steps: int) -> None:
        self._schema, self._num_envs, self.max_steps = schema, num_envs, max_steps
        self.count = 0
        self._columns: Columns = {}
        self._final: Columns | None = None
        self._with_final: bool | None = None

    def add(self, columns: Columns, final: Columns | None, ended: NDArray[np.bool_]) -> int:
        """Take as many steps as fit.

        Args:
            columns: Per path ``[T, E, *shape]``.
            final: Likewise, or None.
            ended: bool ``[T, E]``.

        Returns:
            How many; 0 where the block must be closed first.
        """
        steps = min(self.max_steps - self.count, len(ended))
        own = ended[:steps]
        if own.any():
            with_final = final is not None
            if self._with_final not in (None, with_final):
                return 0
            self._with_final = with_final
        if not self.count:
            self._columns = self._empty(self._schema.paths)
            self._ended = np.zeros((self.max_steps, self._num_envs), bool)
        span = slice(self.count, self.count + steps)
        for path, column in columns.items():
            self._columns[path][span] = column[:steps]
        self._ended[span] = own
        if final is not None and own.any():
            if self._final is None:
                self._final = self._empty(tuple(final))
            for path, column in final.items():
                self._final[path][span][own] = column[:steps][own]
        self.count += steps
        return steps

    def close(self) -> Block:
        """Return the steps collected, and begin another block."""
        count = self.count
        columns = {path: column[:count] for path, column in self._columns.items()}
        final = self._final and {path: column[:count] for path, column in self._final.items()}
        block = Block(columns, final, self._ended[:count])
        self.count, self._columns, self._final = 0, {}, None
        self._with_final = None
        return block

    def _empty(self, paths: tuple[str, ...]) -> Columns:
        lead = (self.max_steps, self._num_envs)
        fields = self._schema.fields
        return {path: np.zeros((*lead, *fields[path].shape), fields[path].numpy) for path in paths}


class ThinWriter:
    """Adds rows of some environments to the ring of a shard; `thin_writer` makes it.

    Steps are checked and collected here, and sent in blocks. A call may raise what
    stopped an earlier block, such as `FullError`: nothing of the call is taken then,
    and blocks are held and sent again by the next call.

    One thread at a time may call it.

    Attributes:
        lost_rows: Rows that had arrived and are gone: the shard's node lost power, or
            its ring was removed or replaced. Where another ring replaced it, the rows
            that had arrived and are not in the new ring. Also rows that may be in the
            ring: their call was not answered before it forgot the writer's lease.
    """

    def __init__(
        self,
        shard: Shard,
        schema: Schema,
        num_envs: int = 1,
        *,
        steps: int = STEPS,
        nbytes: int = NBYTES,
        ahead: int = 2,
        keep: Keep = "published",
        on_full: OnFull = "raise",
        limiter: RateLimiter | None = None,
        ask: Callable[[RateLimiter, int], Asker] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> None:
        """Lease environments of a shard; see `thin_writer`.

        Args:
            shard: Calls to it.
            schema: See `thin_writer`, as for all others.
            num_envs: Environments.
            steps: Steps of a block.
            nbytes: Bytes of a block.
            ahead: Blocks that are under way.
            keep: When a block is safe.
            on_full: Where the disk is full.
            limiter: That of the ring.
            ask: Begins to ask for grants of so many rows at a time, where the ring has
                a limiter; None to write without.
            timeout_s: Within which the shard must answer.
        """
        self._shard, self._schema = shard, schema
        self._num_envs = integer("num_envs", num_envs, 1)
        self._steps = integer("steps", steps, 1)
        self._nbytes = integer("nbytes", nbytes, 1)
        self._ahead = integer("ahead", ahead, 1)
        one_of("keep", keep, ("published", "committed"), "Leave it out.")
        one_of("on_full", on_full, ("raise", "wait"), "Leave it out.")
        self._keep, self._on_full = keep, on_full
        self._timeout_s = number("timeout_s", timeout_s, above=0)
        self._blocks: deque[Block] = deque()
        self._head = self._begun = np.zeros(self._num_envs, np.int64)
        self._resets = np.zeros(self._num_envs, bool)
        self._begins = False
        self._autoreset: str | None = None
        self._writer: str | None = None
        self._next_writer = uuid.uuid4().hex
        self._former: str | None = None
        self._former_leases: list[FormerLease] = []
        self._ring = ""
        self.lost_rows = 0
        self._guard = ProcessGuard("this writer was made", "Make one in the child")
        self._closed = False
        self._stopped = False
        self._losses: list[tuple[str, str]] = []
        self._terms: Terms
        self._asker: Asker | None = None
        self._begin()
        self._encoder = StepEncoder(schema, self._num_envs, self._terms["autoreset"])
        self._collector = StepCollector(schema, self._num_envs, self._max_steps())
        try:
            bound = self._bound(limiter)
            if bound is not None and ask is not None:
                self._asker = ask(bound, self._collector.max_steps * self._num_envs)
                weakref.finalize(self, _close_asker, self._guard, self._asker)
        except BaseException:
            self._call("give_back", self._writer)
            raise

    def _bound(self, limiter: RateLimiter | None) -> RateLimiter | None:
        """The limiter of the ring, with the waits of the one that was passed.

        Raises:
            SchemaError: It is another one.
        """
        settings = self._terms["limiter"]
        if limiter is None:
            return None if settings is None else limiter_from(settings)
        if settings is None:
            raise SchemaError(
                f"limiter must be None, as {self._shard} has a ring without one, got "
                f"{limiter}. Pass it to mr.ray.thin_ring on that node first."
            )
        Grants(limiter_from(settings)).agree(limiter.settings)
        return limiter

    def add(
        self,
        data: Mapping[str, object] | None = None,
        /,
        *others: object,
        final_observation: object = None,
        **fields: object,
    ) -> None:
        """Add one step of each environment, all or nothing; see `ReplayBuffer.add`.

        Args:
            data: The step as one nested mapping, or else keywords; every field of the
                schema ``[E, *shape]``, or ``[*shape]`` where num_envs is 1; of fields
                of several agents also a dict by their names.
            *others: Refused: fields are given by name.
            final_observation: The observation that each ended episode ended with.
            **fields: The step's fields, in place of data.

        Raises:
            SchemaError: A field is unknown, missing, or of a wrong shape or dtype.
            FullError: The shard's disk has no space left.
            StarvedError: The shard does not answer, or the limiter's wait is over.
            RemovedError: The ring was removed, and there is none.
            FailedError: The run was stopped, or the writer is closed.
            ForkedError: This process was forked from the one that made it.
        """
        self._retry()
        mapping = self._as_mapping("add", data, others, fields)
        self._take(*self._encoder.encode_step(mapping, final_observation))

    def extend(
        self,
        data: Mapping[str, object] | None = None,
        /,
        *others: object,
        final_observation: object = None,
        **fields: object,
    ) -> None:
        """Add many steps of each environment; see `ReplayBuffer.extend`.

        Args:
            data: As in `add`, every field ``[T, E, *shape]``, or ``[T, *shape]`` where
                num_envs is 1.
            *others: As in `add`.
            final_observation: As in `add`, with a leading axis of steps.
            **fields: As in `add`.

        Raises:
            SchemaError: As in `add`.
            FullError: As in `add`.
            StarvedError: As in `add`.
            FailedError: As in `add`.
        """
        self._retry()
        mapping = self._as_mapping("extend", data, others, fields)
        self._take(*self._encoder.encode_block(mapping, final_observation))

    def flush(self) -> None:
        """Send all steps, and return when they have arrived.

        With ``keep="committed"`` they survive a power cut of the shard's node then.
        Where none waits, one call asks whether the ring still has those of before.

        Raises:
            FullError: The shard's disk has no space left.
            StarvedError: The shard does not answer, or the limiter's wait is over.
            RemovedError: The ring was removed, and there is none.
            FailedError: The run was stopped, or the shard's disk failed.
        """
        self._check_open()
        waits = bool(self._collector.count or self._blocks)
        self._flush()
        if not waits:
            # No answer said which ring is there, and what it has.
            if self._writer is not None:
                self._reconcile(self._ask())
                self._ask_for_former_leases()
            else:
                self._ask_for_former_leases(again=True)
            self._warn_of_loss()

    def _flush(self) -> None:
        if self._collector.count:
            self._put(self._collector.close())
        self._deliver(ahead=0)
        while self._blocks:
            # They have arrived, and wait for a commit.
            self._reconcile(self._ask(commit=True))
            self._deliver(ahead=0)
        self._stopped = False
        self._warn_of_loss()

    def close(self) -> None:
        """Send all steps and give the environments back; a second call does nothing.

        A rate limiter does not hold up the last blocks.

        Raises:
            FullError: As of `flush`; the writer is still open.
            StarvedError: Likewise.
            FailedError: Likewise.
        """
        if self._closed:
            return
        self._guard.check()
        asker, self._asker = self._asker, None
        try:
            self._flush()
            if self._writer is not None:
                # Heads below those that were answered before: rows are lost.
                self._reconcile(self._call("give_back", self._writer))
                self._ask_for_former_leases()
            else:
                self._ask_for_former_leases(again=True)
        except BaseException:
            self._asker = asker
            raise
        self._closed = True
        if asker is not None:
            asker.close()
        self._shard.settle()
        self._warn_of_loss()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it; an error inside the block is raised rather than one of closing."""
        try:
            self.close()
        except ReplayError:
            if error is None:
                raise

    def __repr__(self) -> str:
        """Show the environments and what waits."""
        waiting = sum(not block.published for block in self._blocks)
        return (
            f"<ThinWriter of {self._num_envs} environments: {waiting} blocks wait, "
            f"{self.lost_rows} rows lost>"
        )

    # Steps to blocks.

    def _as_mapping(
        self,
        call: str,
        data: Mapping[str, object] | None,
        others: tuple[object, ...],
        fields: Mapping[str, object],
    ) -> Mapping[str, object]:
        if others:
            self._encoder.validator.refuse_positional(1 + len(others), call)
        if data is None:
            return fields
        if fields:
            self._encoder.validator.refuse_both(fields)
        return data

    def _take(self, columns: Columns, ended: NDArray[np.bool_], final: Columns | None) -> None:
        """Collect steps, and send the blocks that are full; see `StepEncoder`."""
        while len(ended):
            collector = self._collector
            steps = collector.add(columns, final, ended)
            columns = {path: column[steps:] for path, column in columns.items()}
            final = final and {path: column[steps:] for path, column in final.items()}
            ended = ended[steps:]
            if steps and collector.count < collector.max_steps:
                continue
            self._put(collector.close())
            try:
                if not self._stopped:
                    self._deliver(self._ahead)
            except ReplayError:
                # The steps are taken. The next call tries again, and raises what it
                # gets before it takes another one.
                self._stopped = True
        # After all is taken, as a warning may be an error.
        self._warn_of_loss()

    def _max_steps(self) -> int:
        row_nbytes = self._num_envs * max(1, self._schema.row_nbytes)
        return max(1, min(self._steps, self._nbytes // row_nbytes, self._terms["reserve"] // 2))

    # Blocks to the shard.

    def _check_open(self) -> None:
        self._guard.check()
        if self._closed:
            raise FailedError("this writer is closed. Make another one.")

    def _retry(self) -> None:
        """Send what an earlier call could not."""
        self._check_open()
        if self._stopped:
            self._deliver(self._ahead)
            self._stopped = False

    def _put(self, block: Block) -> None:
        """Place a new block behind those that wait.

        With ``autoreset="next_step"`` the step after an end is what the episode ended
        with. In other environments of the ring nothing of that episode is before it,
        and it would be a first step: so the first block of a lease leaves it out.
        """
        if self._autoreset == "next_step":
            block.resets = self._resets
            for ended in block.ended:
                self._resets = ended & ~self._resets
        self._append_blocks([block])

    def _append_blocks(self, blocks: list[Block]) -> None:
        # Another ring may have a smaller reserve than that of before.
        max_steps = max(1, self._terms["reserve"] // 2)
        for whole in blocks:
            for block in whole.split(max_steps):
                for part in block.without_resets() if self._begins else [block]:
                    self._head = part.move_to(self._head)
                    self._blocks.append(part)
                self._begins = False

    def _deliver(self, ahead: int) -> None:
        """Send blocks, and wait until at most `ahead` of them are not answered.

        Raises:
            FullError: The shard's disk has no space left, and ``on_full="raise"``.
            StarvedError: The shard does not answer, or the limiter's wait is over.
            FailedError: The run was stopped, the shard's disk failed, or the lease was
                lost and other writers have the environments.
        """
        while True:
            if self._writer is None and self._blocks:
                self._begin()
            self._ask_for_former_leases()
            waiting = [block for block in self._blocks if not block.published]
            refused = False
            for block in waiting[: self._ahead]:
                if not self._is_granted(block):
                    refused = True
                    break
                if block.call is None:
                    self._send(block)
            if refused and waiting[0].call is None:
                self._await_grant(waiting[0])
            elif refused or len(waiting) > ahead:
                # Also where one was refused: rows under way are in the way of a grant.
                self._receive(waiting[0])
                self._note_under_way()
            else:
                return

    def _is_granted(self, block: Block) -> bool:
        """Whether a block may be sent; the bound may be passed by what it has more."""
        if self._asker is not None and not block.granted and self._asker.available:
            self._grant(block)
        return self._asker is None or block.granted

    def _await_grant(self, block: Block) -> None:
        """Wait for a grant; nothing is under way.

        Raises:
            StarvedError: The limiter's wait is over.
        """
        if self._asker is not None:
            self._asker.wait(1)
            self._grant(block)

    def _grant(self, block: Block) -> None:
        assert self._asker is not None
        block.granted = True
        self._asker.use(block.num_rows, self._rows_under_way())

    def _rows_under_way(self) -> int:
        """Rows that were granted and may not be published yet."""
        return sum(
            block.num_rows for block in self._blocks if block.granted and not block.published
        )

    def _note_under_way(self) -> None:
        if self._asker is not None:
            self._asker.set_under_way(self._rows_under_way())

    def _send(self, block: Block) -> None:
        block.commits = False
        if self._keep == "committed":
            held = sum(each.nbytes for each in self._blocks)
            block.commits = held > UNCOMMITTED_NBYTES
        block.call = self._shard.send(
            "extend",
            self._writer,
            block.first.tolist(),
            block.columns,
            block.final,
            block.commits,
            None if block.envs is None else block.envs.tolist(),
        )

    def _receive(self, block: Block) -> None:
        """Take the answer of the oldest block that was sent."""
        stop = time.monotonic() + self._timeout_s
        try:
            answer = self._take_answer(block, stop)
        except (UnansweredError, LockedError):
            self._reconcile(self._ask(stop=stop))
            return
        except ReplayError as error:
            # All blocks are sent again.
            self._take_answers(stop)
            if isinstance(error, FullError) and self._on_full == "wait":
                time.sleep(FULL_S)
                return
            self._shard.settle()
            raise
        arrived = (
            answer["state"] == "holds"
            and answer["heads"] == block.after.tolist()
            and answer.get("ring", "") == self._ring
        )
        if arrived:
            self._drop_done(np.array(answer["committed"]))
        else:
            # The answer may be older than the one before it, and prove nothing.
            self._reconcile(self._ask())

    def _take_answer(self, block: Block, stop: float) -> Answer:
        """Wait for the answer of a block, and note what it proves of all blocks."""
        left = max(0.0, stop - time.monotonic())
        try:
            answer: Answer = self._shard.receive(block.call, left)
        except ReplayError as error:
            added_nothing = isinstance(error, FullError | LockedError | RemovedError)
            # The commit that raised comes after the block.
            block.doubtful |= block.commits or not added_nothing
            block.call = None
            raise
        block.call = None
        if answer["heads"] and answer.get("ring", "") == self._ring:
            for each in self._blocks:
                if not each.published:
                    each.published = bool((each.after <= answer["heads"]).all())
        return answer

    def _take_answers(self, stop: float) -> None:
        """Take the answers of all blocks under way; calls without one do no harm.

        Where the lease is forgotten, heads do not say what arrived, and answers do.
        """
        for block in self._blocks:
            if block.call is not None:
                with suppress(ReplayError):
                    self._take_answer(block, stop)

    def _ask(self, commit: bool = False, stop: float | None = None) -> Answer:
        """Ask for the heads, after all calls."""
        if stop is None:
            stop = time.monotonic() + self._timeout_s
        self._take_answers(stop)
        answer: Answer = self._call("extend", self._writer, [], None, None, commit, stop=stop)
        return answer

    def _call(self, method: str, *arguments: object, stop: float | None = None) -> Any:
        """Call until the shard answers, and has its folder.

        A shard whose node manager was killed answers for some seconds more, and keeps
        the next one from its rings. One whose disk is full is waited for as long as
        that takes, with ``on_full="wait"``.

        Args:
            method: Of the shard.
            *arguments: Of the method.
            stop: When to end; None for `timeout_s` from now.
        """
        if stop is None:
            stop = time.monotonic() + self._timeout_s
        while True:
            left = max(0.0, stop - time.monotonic())
            try:
                return self._shard.call(method, *arguments, timeout_s=left)
            except LockedError:
                if time.monotonic() + PAUSE_S >= stop:
                    raise
                time.sleep(PAUSE_S)
            except FullError:
                if self._on_full == "raise":
                    raise
                time.sleep(FULL_S)
                stop = time.monotonic() + self._timeout_s

    def _drop_done(self, committed: Positions) -> None:
        """Drop the oldest blocks that need not be sent again, whatever happens."""
        blocks = self._blocks
        while blocks and blocks[0].published:
            if self._keep == "committed" and (committed < blocks[0].after).any():
                return
            blocks.popleft()

    def _reconcile(self, answer: Answer) -> None:
        """Find out from heads that were asked for what arrived, and what is lost."""
        ring = answer.get("ring", "")
        same_ring = ring == self._ring != ""
        self._ring = ring
        edges = [*(block.first for block in self._blocks), self._head]
        if answer["state"] == "unknown" and same_ring:
            # The lease ended long ago, with all that had arrived. Of blocks in doubt
            # nothing says whether they had: sent again, they might be double.
            num_arrived = sum(block.published for block in self._blocks)
            rest = list(self._blocks)[num_arrived:]
            self._blocks = deque(block for block in rest if not block.doubtful)
            self._end_lease(edges[num_arrived])
            lost = sum(block.num_rows for block in rest if block.doubtful)
            self._count_lost(lost, UNKNOWN, IN_DOUBT)
            return
        if answer["state"] == "unknown":
            # Nothing of it is there, and all blocks that are held are sent again.
            self._end_lease(self._begun)
            lost = int((edges[0] - self._begun).sum())
            self._count_lost(lost, UNKNOWN, IN_OTHER_RING)
            return
        heads = np.array(answer["heads"], np.int64)
        below = [n for n, edge in enumerate(edges) if (edge <= heads).all()]
        # Where all environments are below, rows that had arrived are lost.
        arrived = below[-1] if below else 0
        exact = bool((edges[arrived] == heads).all())
        stop = np.maximum(heads, self._begun)
        lost = int(np.maximum(edges[0] - stop, 0).sum())
        for index, block in enumerate(self._blocks):
            block.published = index < arrived
        if answer["state"] == "holds" and exact:
            self._drop_done(np.array(answer["committed"]))
        else:
            # Rows below the heads of a lease that ended were committed. Where heads
            # are at no edge, a power cut took more than a lap of the ring: what is
            # below is not there to be drawn.
            for _ in range(arrived):
                self._blocks.popleft()
            former = self._writer if answer["state"] == "holds" else None
            self._end_lease(np.minimum(stop, edges[arrived]), former)
            self._count_lost(lost, OLDER, UNCOMMITTED)

    def _end_lease(self, stop: Positions, former: str | None = None) -> None:
        """Note what the ring has of this lease; the next call begins another one."""
        assert self._writer is not None
        if (stop > self._begun).any():
            self._former_leases.append(FormerLease(self._writer, self._begun, stop, self._ring))
        self._writer, self._former = None, former
        self._next_writer = uuid.uuid4().hex

    def _ask_for_former_leases(self, again: bool = False) -> None:
        """Count the rows of former leases that the ring of now has not.

        Args:
            again: Ask which ring that is; else by the last answer.
        """
        if again:
            self._ring = ""
        while True:
            # The ring may be replaced again meanwhile: then all are asked for again.
            lease = next((each for each in self._former_leases if each.ring != self._ring), None)
            if lease is None:
                break
            answer: Answer = self._call("extend", lease.writer, [], None)
            self._ring = answer.get("ring", "")
            stop = lease.begun
            if answer["state"] != "unknown":
                heads = np.array(answer["heads"], np.int64)
                stop = np.clip(heads, lease.begun, lease.stop)
            elif self._ring == lease.ring:
                # It forgot the lease, and not its rows.
                stop = lease.stop
            if answer["state"] == "holds":
                # Of a time before it ended: its environments are this writer's.
                self._former = lease.writer
            lost = int((lease.stop - stop).sum())
            lease.stop, lease.ring = stop, self._ring
            if answer["state"] == "unknown":
                self._count_lost(lost, UNKNOWN, IN_OTHER_RING)
            else:
                self._count_lost(lost, OLDER, UNCOMMITTED)
        self._former_leases = [
            each for each in self._former_leases if (each.stop > each.begun).any()
        ]

    def _count_lost(self, lost: int, why: str, advice: str) -> None:
        self.lost_rows += lost
        if lost:
            loss = f"{self._shard} {why} {lost} rows of this writer are lost."
            self._losses.append((loss, advice))

    def _warn_of_loss(self) -> None:
        if self._losses:
            losses, advice = zip(*self._losses, strict=True)
            self._losses.clear()
            warnings.warn(
                " ".join([*losses, *dict.fromkeys(advice)]),
                DurabilityWarning,
                stacklevel=frames_to_caller(),
            )

    def _begin(self) -> None:
        """Lease environments, and place the blocks that wait at their heads."""
        while self._writer is None:
            # One of them may have environments of this writer.
            self._ask_for_former_leases()
            terms: Terms = self._call(
                "lease", self._next_writer, self._num_envs, *described(self._schema), self._former
            )
            if terms["state"] != "holds":
                # It was granted, and lost before this writer heard of it.
                self._next_writer = uuid.uuid4().hex
            elif self._autoreset not in (None, terms["autoreset"]):
                raise SchemaError(
                    f"autoreset of {self._shard}'s ring must be {self._autoreset!r}, "
                    f"as of the ring before it, got {terms['autoreset']!r}. Make it "
                    "again with that one, or make another writer."
                )
            else:
                self._writer, self._terms = self._next_writer, terms
                self._autoreset, self._former = terms["autoreset"], None
                self._ring = terms.get("ring", "")
        self._head, self._begins = np.array(terms["heads"], np.int64), True
        self._begun = self._head
        blocks = list(self._blocks)
        self._blocks.clear()
        self._append_blocks(blocks)
