"""Rings as a Ray Data dataset, and a dataset as rings.

A dataset has one row for each legal start of the rings, environment by environment,
oldest first, made by the rings' transforms. Each ring is read on a node that has its
folder. Columns have the paths of fields; ``env_id``, ``position`` and ``buffer_id``
(the number of the ring among the paths) say where a row lies.
"""

from __future__ import annotations

import os
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
from numpy.typing import NDArray
from ray.data.block import BlockAccessor, BlockMetadata
from ray.data.datasource import Datasink, Datasource, ReadTask
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmreplay.arguments import flag
from mmreplay.buffer.opening import StrPath, check_options, holds_buffer
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.episode_facts import EpisodeFacts
from mmreplay.convert.parquet import encode_field
from mmreplay.convert.select import bounds_of, paths_of
from mmreplay.disk import files
from mmreplay.disk.files import rename
from mmreplay.disk.lock import Owner
from mmreplay.errors import (
    EmptyError,
    FailedError,
    FormatError,
    LockedError,
    ReplayError,
    SchemaError,
    StaleError,
    StarvedError,
)
from mmreplay.format.metadata import load as load_metadata
from mmreplay.nesting import unflatten
from mmreplay.ragged import Ragged
from mmreplay.ray.agreement import described
from mmreplay.ray.cluster import require_connection
from mmreplay.ring import Span
from mmreplay.samplers.shuffled import EpochSnapshot
from mmreplay.schema import Schema
from mmreplay.schema.schema import refuse_varying
from mmreplay.transforms.base import Transform

BLOCK_NBYTES = 8 << 20
"""Bytes of a block: large enough that Ray's cost a block does not count, and small
enough that a node holds many."""
ANSWER_S = 60.0
"""How long a node may take to look at the rings it is asked for."""
MAX_TRIES = 10
"""Attempts to read a block whose rows a writer overwrites meanwhile."""
NUM_LOOKED_AT = 64
"""Rows whose values that vary say how long those of a row are."""
LABEL = "mmreplay"
"""Label of a node by which users may name it."""

Columns = dict[str, Any]
"""By name arrays ``[N, *shape]``, or `Ragged` of N values."""
Ids = NDArray[np.int64]
Paths = StrPath | Sequence[StrPath] | Mapping[str, Sequence[StrPath]]


@dataclass(frozen=True, slots=True)
class RingStarts:
    """The legal starts of one ring when a dataset was made.

    Attributes:
        path: The ring's folder, on the nodes that have it.
        snapshot: Where the legal starts lay; None where there was none.
        first: First rank to read.
        stop: One past the last rank to read.
        nbytes: Bytes of one row, by column.
        stored: Columns that are copied as they are stored, whatever else is read.
        varying: Columns of values of any length, whose bytes are those of an average.
    """

    path: str
    snapshot: EpochSnapshot | None
    first: int
    stop: int
    nbytes: dict[str, int]
    stored: frozenset[str]
    varying: frozenset[str] = frozenset()

    @property
    def num_rows(self) -> int:
        """Rows to read."""
        return self.stop - self.first


def read(
    paths: Paths,
    fields: Sequence[str] | None = None,
    transforms: Sequence[Transform] = (),
    episodes: slice | None = None,
    *,
    live: bool = False,
) -> ray.data.Dataset:
    """Read rings into a dataset: one row for each step that can be drawn.

    Each ring is read on a node that has its folder. Nodes are asked for it, or named:
    by node id, by the value of their label ``mmreplay``, or by host name.

    Ray Data keeps the order of rows only with
    ``DataContext.get_current().execution_options.preserve_order = True``.

    Args:
        paths: Folders of rings; or folders by node. Relative ones start from this
            process's working folder, on whichever node they are.
        fields: Columns to read, paths or subtrees; all by default.
        transforms: What is made of stored steps, in order.
        episodes: Of each ring, the episodes to read, such as ``slice(0, 100)``:
            counted as `mmreplay.export` does.
        live: Read rings that are being written too: the rows that there are now, less
            those that are overwritten before they are read. A `RuntimeWarning` of the
            task, and `RingDatasource.left_out`, say how many those were.

    Raises:
        LockedError: A ring is being written, and `live` is False.
        FormatError: No node has a ring at a path, or several nodes have other ones.
        SchemaError: Rings differ in their columns, a column is unknown, a node that is
            named has no CPU, or this process is not connected to a cluster.
        EmptyError: No ring has a legal start.
        FailedError: A node did not answer.

    Example::

        dataset = mr.ray.read(["runs/a", "runs/b"], fields=["observation", "reward"])
        for batch in dataset.iter_torch_batches(batch_size=256):
            ...
    """
    return read_as(RingDatasource, paths, fields, transforms, episodes, live)


def read_as(
    kind: type[RingDatasource],
    paths: Paths,
    fields: Sequence[str] | None = None,
    transforms: Sequence[Transform] = (),
    episodes: slice | None = None,
    live: bool = False,
) -> ray.data.Dataset:
    """Read rings by a datasource of some kind; see `read`.

    Args:
        kind: `RingDatasource` or a subclass.
        paths: As in `read`, as the other arguments.
        fields: See there.
        transforms: See there.
        episodes: See there.
        live: See there.
    """
    require_connection()
    transforms = check_options(transforms=transforms)
    flag("live", live)
    look = partial(look_at, transforms=transforms, episodes=episodes, live=live)
    named = _named(paths)
    total = sum(len(group) for group in named.values())
    if total == 0:
        raise SchemaError(
            f"paths must name at least one ring, got {paths!r}. Pass the folder of a ring."
        )
    placed: dict[tuple[str, ...], list[tuple[int, RingStarts]]] = {}
    number = 0
    for node, group in named.items():
        found = _find(node, group, look)
        for nodes, ring in found:
            placed.setdefault(nodes, []).append((number, ring))
            number += 1
    every = [ring for group in placed.values() for _, ring in group]
    _check_alike(every)
    datasets = []
    for nodes, numbered in placed.items():
        rings = {number: ring for number, ring in numbered if ring.num_rows}
        if rings:
            source = kind._of(rings, fields, transforms, live)
            selector = _selector(nodes)
            if selector is None:
                datasets.append(ray.data.read_datasource(source))
                continue
            bound: dict[str, Any] = {"label_selector": selector}
            if "label_selector" not in signature(ray.data.read_datasource).parameters:
                # Versions without the parameter pass any other to the datasource.
                bound = {"ray_remote_args": bound}
            datasets.append(ray.data.read_datasource(source, **bound))
    if not datasets:
        raise EmptyError(f"none of {len(every)} rings has a legal start. Add steps first.")
    return datasets[0].union(*datasets[1:]) if len(datasets) > 1 else datasets[0]


class RingDatasource(Datasource):
    """Rings of this node as a source of Ray Data; see `read`.

    Reads as many columns as `Dataset.select_columns` asks for.

    Example::

        source = RingDatasource(["runs/live"], live=True)
        dataset = ray.data.read_datasource(source).materialize()
        source.left_out()
    """

    def __init__(
        self,
        paths: StrPath | Sequence[StrPath],
        fields: Sequence[str] | None = None,
        transforms: Sequence[Transform] = (),
        episodes: slice | None = None,
        *,
        live: bool = False,
    ) -> None:
        """Look at rings that this process can open; the arguments are those of `read`.

        Raises:
            LockedError: A ring is being written, and `live` is False.
            FormatError: There is no ring at a path.
            SchemaError: Rings differ in their columns, or a column is unknown.
            EmptyError: No ring has a legal start.
        """
        transforms = tuple(transforms)
        every = [
            look_at(path, transforms=transforms, episodes=episodes, live=live)
            for path in _folders(paths)
        ]
        _check_alike(every)
        rings = {number: ring for number, ring in enumerate(every) if ring.num_rows}
        if not rings:
            raise EmptyError(f"none of {len(every)} rings has a legal start. Add steps first.")
        self._take(rings, fields, transforms, live)

    @classmethod
    def _of(
        cls,
        rings: dict[int, RingStarts],
        fields: Sequence[str] | None,
        transforms: Sequence[Transform],
        live: bool,
    ) -> RingDatasource:
        source = cls.__new__(cls)
        source._take(rings, fields, tuple(transforms), live)
        return source

    def _take(
        self,
        rings: dict[int, RingStarts],
        fields: Sequence[str] | None,
        transforms: tuple[Transform, ...],
        live: bool,
    ) -> None:
        super().__init__()
        self._rings, self._transforms, self._live = rings, transforms, live
        nbytes = next(iter(rings.values())).nbytes
        columns = tuple(nbytes) if fields is None else paths_of(tuple(nbytes), fields)
        # Ray's mixin reads this attribute, and sets it nowhere.
        self._projection_map = {name: name for name in columns}
        self._nbytes = nbytes
        self._count = None
        if live:
            self._count = ray.remote(_Count).options(num_cpus=0).remote()

    def left_out(self) -> int:
        """Rows of live rings that were overwritten before they were read, so far.

        Raises:
            FailedError: The count's actor does not answer.
        """
        if self._count is None:
            return 0
        try:
            return int(ray.get(self._count.total.remote(), timeout=ANSWER_S))
        except ray.exceptions.RayError as error:
            raise FailedError(
                f"the count of rows that were left out is lost: {error}. Read again."
            ) from error

    def supports_projection_pushdown(self) -> bool:
        """Columns that nothing asks for are not read."""
        return True

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of all rows."""
        return self._row_nbytes() * sum(ring.num_rows for ring in self._rings.values())

    def _row_nbytes(self) -> int:
        return max(1, sum(self._nbytes[name] for name in self._projection_map))

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None
    ) -> list[ReadTask]:
        """Divide the rings into tasks of like numbers of rows."""
        total = sum(ring.num_rows for ring in self._rings.values())
        row_nbytes = self._row_nbytes()
        tasks = []
        for number, ring in self._rings.items():
            share = round(parallelism * ring.num_rows / total)
            count = min(max(1, share), ring.num_rows)
            edges = np.linspace(ring.first, ring.stop, count + 1).astype(np.int64)
            for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                metadata = BlockMetadata(
                    num_rows=None if self._live else stop - first,
                    size_bytes=(stop - first) * row_nbytes,
                    exec_stats=None,
                    input_files=(ring.path,),
                )
                task = partial(
                    read_rows,
                    ring,
                    number,
                    first,
                    stop,
                    tuple(self._projection_map),
                    self._transforms,
                    self._count,
                    self._finish,
                )
                limit = {"per_task_row_limit": per_task_row_limit}
                tasks.append(ReadTask(task, metadata, **limit))
        return tasks

    _finish: Callable[[ReplayBuffer, Columns], Columns] | None = None
    """What a subclass makes of each block."""


class _Count:
    """Counts the rows that tasks on any node left out; an actor."""

    def __init__(self) -> None:
        self._total = 0

    def add(self, count: int) -> None:
        self._total += count

    def total(self) -> int:
        return self._total


def look_at(
    path: StrPath,
    *,
    transforms: tuple[Transform, ...] = (),
    episodes: slice | None = None,
    live: bool = False,
) -> RingStarts:
    """Look at a ring of this node.

    Args:
        path: Its folder.
        transforms: As in `read`, as the next two.
        episodes: See there.
        live: See there.

    Raises:
        LockedError: It is being written, and `live` is False.
        FormatError: There is no ring.
        SchemaError: `episodes` selects none, or a transform does not fit.
    """
    where = files.absolute(path)
    with ReplayBuffer.open(where, transforms=transforms) as buffer:
        owner = Owner(where)
        if not live and owner.alive:
            raise LockedError(
                f"{where} is being written by {owner}. Close its writer, or "
                "pass live=True to read the rows that are there now.",
                pid=owner.pid,
                host=owner.host,
            )
        view = buffer.view
        with view.lock:
            snapshot = EpochSnapshot.of(view)
        first, stop = 0, snapshot.total
        if episodes is not None:
            reader = BufferReader(buffer)
            description = reader.describe()
            facts = EpisodeFacts(reader)
            numbers = np.arange(len(facts))
            begin, end = bounds_of("episodes", episodes, len(facts))
            chosen = facts.ranges((begin <= numbers) & (numbers < end))
            first, stop = _ranks_within(buffer, chosen.span(description.stop), snapshot)
        nbytes: dict[str, int] = {}
        varying: frozenset[str] = frozenset()
        if snapshot.total:
            # Values that vary are as long as those of some rows, on average.
            ranks = np.linspace(0, snapshot.total - 1, NUM_LOOKED_AT).astype(np.int64)
            ranks = ranks if buffer.schema.varying else ranks[:1]
            env_ids, positions = snapshot.steps_at(view, ranks)
            some = buffer.take(env_ids, positions)
            nbytes = {name: -(-array.nbytes // len(ranks)) for name, array in some.fields.items()}
            varying = frozenset(name for name, c in some.fields.items() if isinstance(c, Ragged))
            for name in ("env_id", "position", "buffer_id"):
                nbytes.setdefault(name, 8)
        stored = frozenset() if transforms else frozenset(buffer.schema.paths)
        known = snapshot if snapshot.total else None
        return RingStarts(str(where), known, first, stop, nbytes, stored, varying)


def _ranks_within(buffer: ReplayBuffer, span: Span, snapshot: EpochSnapshot) -> tuple[int, int]:
    """Ranks of the legal starts in consecutive rows of consecutive environments."""
    envs = np.flatnonzero(span.lengths)
    if not len(envs):
        return 0, 0
    low, high = envs[:1], envs[-1:]
    view = buffer.view
    with view.lock:
        edges = np.append(0, np.cumsum(snapshot.counts))
        first = int(view.legal_before(low, span.first[low])[0])
        stop = int(view.legal_before(high, np.minimum(span.stop, snapshot.stops)[high])[0])
    return first, max(first, min(stop, int(edges[int(high[0]) + 1])))


def read_rows(
    ring: RingStarts,
    number: int,
    first: int,
    stop: int,
    columns: tuple[str, ...],
    transforms: tuple[Transform, ...],
    count: Any = None,
    finish: Callable[[ReplayBuffer, Columns], Columns] | None = None,
) -> Iterator[Any]:
    """Read some legal starts of a ring as blocks; a task runs it where the ring is.

    Args:
        ring: The ring.
        number: Its ``buffer_id``.
        first: First rank.
        stop: One past the last rank.
        columns: What to read.
        transforms: As in `read`.
        count: Actor that counts rows that were left out, or None.
        finish: Makes other columns of each block's; may be None.

    Raises:
        StarvedError: A writer overwrote every row of a block, again and again.
    """
    snapshot = ring.snapshot
    assert snapshot is not None
    lost = 0
    row_nbytes = max(1, sum(ring.nbytes.get(name, 8) for name in columns))
    rows = max(1, BLOCK_NBYTES // row_nbytes)
    with ReplayBuffer.open(ring.path, transforms=transforms) as buffer:
        for begin in range(first, stop, rows):
            ranks = np.arange(begin, min(begin + rows, stop))
            block = _gather(buffer, ring, snapshot, ranks, columns)
            block.setdefault("buffer_id", np.full(len(block["position"]), number))
            lost += len(ranks) - len(block["position"])
            if not len(block["position"]):
                continue
            if finish is not None:
                block = finish(buffer, block)
            else:
                # Rows that are only counted need a column, too.
                names = columns or ("position",)
                block = {name: block[name] for name in names}
            yield _arrow_block(buffer, block)
    if lost:
        warnings.warn(
            f"{ring.path}: {lost} of {stop - first} rows were overwritten before they "
            "were read, and are left out.",
            RuntimeWarning,
            stacklevel=2,
        )
        if count is not None:
            ray.get(count.add.remote(lost), timeout=ANSWER_S)


def _arrow_block(buffer: ReplayBuffer, block: Columns) -> Any:
    """A block of Ray Data; values that vary are lists, text and bytes, as in parquet.

    Raises:
        SchemaError: A row has several values of a field that varies.
    """
    ragged = {name: c for name, c in block.items() if isinstance(c, Ragged)}
    if not ragged:
        return BlockAccessor.batch_to_arrow_block(block)
    fields = dict(buffer.schema.fields)
    fields |= {name: fields[path] for path, name in buffer.view.next_paths.items()}
    # The number of rows, where every column that is read varies.
    plain = {name: c for name, c in block.items() if name not in ragged}
    any_column = np.empty(len(next(iter(ragged.values()))), np.int8)
    made = BlockAccessor.batch_to_arrow_block(plain or {"": any_column})
    for name, values in ragged.items():
        if len(values.shape) != 1:
            raise SchemaError(
                f"column {name!r} has {values.shape[1]} values of any length a row, "
                "which Ray Data cannot read. Leave the stack out, or read other fields."
            )
        made = made.append_column(name, encode_field(values, fields[name]))
    return made.select(list(block))


def _gather(
    buffer: ReplayBuffer,
    ring: RingStarts,
    snapshot: EpochSnapshot,
    ranks: Ids,
    columns: tuple[str, ...],
) -> Columns:
    """Columns of the legal starts of some ranks, less those that are overwritten."""
    own = ("env_id", "position", "buffer_id")
    wanted = tuple(name for name in columns if name not in own or name in ring.stored)
    for _ in range(MAX_TRIES):
        view = buffer.view
        with view.lock:
            snapshot.check(view)
            env_ids, positions = snapshot.steps_at(view, ranks)
        there = positions >= 0
        env_ids, positions = env_ids[there], positions[there]
        block: Columns = {}
        try:
            if not wanted or not len(positions):
                pass
            elif ring.stored.issuperset(wanted):
                block = dict(buffer.get_fields(wanted, env_ids, positions))
            else:
                # Random transforms give a retried task what they gave the first.
                key = zlib.crc32(positions.tobytes())
                taken = buffer.take(env_ids, positions, key=key)
                block = {name: taken.fields[name] for name in wanted}
        except StaleError:
            if (positions >= buffer.view.starts.first[env_ids]).all():
                raise
            continue
        block = {
            name: c if isinstance(c, Ragged) else np.ascontiguousarray(c)
            for name, c in block.items()
        }
        block.setdefault("env_id", env_ids)
        block.setdefault("position", positions)
        return block
    raise StarvedError(
        f"gave up after {MAX_TRIES} attempts: the writer of {ring.path} overwrote rows "
        f"of a block of {len(ranks)} before they were read. Increase `capacity`."
    )


# Which node has which ring.


def _named(paths: Paths) -> dict[str | None, list[StrPath]]:
    """Folders by the name of the node that has them, None where users name none."""
    if isinstance(paths, Mapping):
        return {str(node): _folders(group) for node, group in paths.items()}
    return {None: _folders(paths)}


def _folders(paths: StrPath | Sequence[StrPath]) -> list[StrPath]:
    """Absolute paths: tasks on other nodes have other working folders."""
    if isinstance(paths, str | os.PathLike):
        return [files.absolute(paths)]
    if not isinstance(paths, Sequence):
        raise SchemaError(
            f"paths must be folders, got {type(paths).__name__}. Pass a list of paths."
        )
    return [files.absolute(path) for path in paths]


def _find(
    name: str | None, paths: list[StrPath], look: Callable[[StrPath], RingStarts]
) -> list[tuple[tuple[str, ...], RingStarts]]:
    """The nodes that have each ring, none where any node may read it, and the ring.

    Args:
        name: Of one node, or None for any.
        paths: Folders of rings.
        look: Looks at a ring of the node that it runs on.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    workers = [node for node in alive if node["Resources"].get("CPU", 0) > 0]
    if name is not None:
        named = [node for node in alive if name in _names_of(node)]
        if not named:
            known = sorted({text for node in alive for text in _names_of(node)})
            raise FormatError(
                f"no node is named {name!r} by its id, host name or label "
                f"{LABEL!r}, of {known}. Pass one of those."
            )
        asked = [node for node in named if node in workers]
    elif len(alive) == 1 and workers:
        return [((), look(path)) for path in paths]
    else:
        asked = workers
    if not asked:
        who = "this cluster" if name is None else f"node {name!r}"
        raise SchemaError(
            f"{who} has no CPU, which Ray Data needs to read rings there. Start a node "
            "that has their folders with --num-cpus=1 or more, and name that one."
        )
    answers = {node["NodeID"]: _ask(node["NodeID"], paths, look) for node in asked}
    found = []
    for index, path in enumerate(paths):
        seen: dict[str, RingStarts] = {}
        errors: list[ReplayError] = []
        for node_id, replies in answers.items():
            reply = replies[index]
            if isinstance(reply, RingStarts):
                seen[node_id] = reply
            elif not isinstance(reply, FormatError) or not errors:
                errors.append(reply)
        if not seen:
            raise errors[-1]
        uuids = {ring.snapshot.buffer for ring in seen.values() if ring.snapshot}
        if len(uuids) > 1:
            raise FormatError(
                f"{path} is another ring on each of {len(seen)} nodes. Pass "
                "{node: [path]} for those to read."
            )
        everywhere = name is None and len(seen) == len(workers)
        found.append((() if everywhere else tuple(sorted(seen)), next(iter(seen.values()))))
    return found


def _names_of(node: Mapping[str, Any]) -> set[str]:
    label = node.get("Labels", {}).get(LABEL)
    return {node["NodeID"], node["NodeManagerHostname"], *([label] if label else [])}


def _ask(
    node_id: str, paths: list[StrPath], look: Callable[[StrPath], RingStarts]
) -> list[RingStarts | ReplayError]:
    """Have a node look at rings.

    Raises:
        FailedError: It did not answer in time.
    """
    options = {
        "num_cpus": 0,
        "max_retries": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
    reply = ray.remote(_look_at_all).options(**options).remote(paths, look)
    try:
        return list(ray.get(reply, timeout=ANSWER_S))
    except ray.exceptions.RayError as error:
        raise FailedError(
            f"node {node_id} did not look at {paths}: {error}. Check that it is alive "
            "and has mmreplay installed."
        ) from error


def _look_at_all(
    paths: list[StrPath], look: Callable[[StrPath], RingStarts]
) -> list[RingStarts | ReplayError]:
    replies: list[RingStarts | ReplayError] = []
    for path in paths:
        try:
            replies.append(look(path))
        except ReplayError as error:
            replies.append(error)
    return replies


def _selector(nodes: tuple[str, ...]) -> dict[str, str] | None:
    """What binds tasks to nodes; None for any node."""
    if not nodes:
        return None
    value = nodes[0] if len(nodes) == 1 else f"in({', '.join(nodes)})"
    return {"ray.io/node-id": value}


def _check_alike(rings: Sequence[RingStarts]) -> None:
    """Refuse rings of different columns.

    Raises:
        SchemaError: They have not the same ones.
    """

    def nbytes_of(ring: RingStarts) -> set[tuple[str, int]]:
        fixed = {name: ring.nbytes[name] for name in ring.nbytes.keys() - ring.varying}
        return {*fixed.items(), *((name, 0) for name in ring.varying)}

    some = [ring for ring in rings if ring.num_rows]
    for ring in some[1:]:
        first = some[0]
        if nbytes_of(ring) != nbytes_of(first):
            different = sorted(nbytes_of(ring) ^ nbytes_of(first))
            raise SchemaError(
                f"rings of one dataset must have the same columns, but {ring.path} and "
                f"{first.path} differ in {different[0][0]!r}. Read them into datasets "
                "of their own."
            )


# From a dataset to rings.


def write(dataset: ray.data.Dataset, path: StrPath, schema: Schema) -> list[str]:
    """Write the rows of a dataset into rings, one for each write task.

    A ring appears as ``part-00000``, and so on, once it is whole and durable. Read
    them together with ``mr.concat``, or with `read`. In a cluster of several nodes each
    task writes to its own node's disk.

    Rows follow each other as in the dataset. Columns ``buffer_id``, ``env_id`` and
    ``position``, as `read` gives them, show where a row does not continue the one
    before: its episode is then stored as truncated, with the column
    ``next_observation`` as its final observation. So shuffled rows stay transitions.

    Args:
        dataset: With a column for each field of the schema, by its path.
        path: Folder of the rings; new, or without rings. A relative one starts from
            this process's working folder.
        schema: Of the rings.

    Returns:
        The rings' folders.

    Raises:
        FormatError: The path holds rings already.
        SchemaError: A column is missing, or does not fit its field.
        FullError: No space is left; rings that are whole stay.

    Example::

        rings = mr.ray.write(dataset, "runs/expert", schema)
        batch = mr.concat(rings).sample(256)
    """
    if not isinstance(dataset, ray.data.Dataset):
        raise SchemaError(
            f"dataset must be a ray.data.Dataset, got {type(dataset).__name__}. Pass "
            "what mr.ray.read or ray.data made."
        )
    sink = RingDatasink(path, schema)
    sink.refuse_old()
    dataset.write_datasink(sink)
    return sink.rings


class RingDatasink(Datasink):
    """Writes one ring for each write task; see `write`.

    Attributes:
        path: Folder of the rings.
        schema: Of the rings.
        rings: The rings' folders, once all are written.
    """

    def __init__(self, path: StrPath, schema: Schema) -> None:
        """Describe the rings."""
        described(schema)
        refuse_varying(schema, "a ring that Ray Data writes")
        self.path, self.schema = files.absolute(path), schema
        self.rings: list[str] = []
        self._run = uuid.uuid4().hex

    def on_write_start(self, schema: Any = None) -> None:
        """Check the columns, and make the folder on this node.

        Raises:
            FormatError: It holds rings already.
            SchemaError: A column is missing.
        """
        if schema is not None:
            _check_columns(self.schema, schema.names)
        self.refuse_old()
        self._make_folders()

    def _make_folders(self) -> None:
        for folder in reversed((self.path, *self.path.parents)):
            if not folder.exists():
                files.make_folder(folder, exist_ok=True)

    def refuse_old(self) -> None:
        """Refuse a folder that holds rings.

        Raises:
            FormatError: It holds some already.
        """
        if not self.path.is_dir():
            return
        if holds_buffer(self.path):
            raise FormatError(
                f"{self.path} is a ring itself. Pass a folder in which rings may lie."
            )
        old = [name for name in files.names(self.path) if name.startswith("part-")]
        if old:
            raise FormatError(
                f"{self.path} holds {old[0]} already. Pass a new folder, or remove the rings in it."
            )

    def write(self, blocks: Iterable[Any], ctx: Any) -> str | None:
        """Write a ring of this task's rows, whole or not at all."""
        self._make_folders()
        name, prefix = (f"part-{ctx.task_idx:05d}", f"tmp-{self._run}-{ctx.task_idx:05d}-")
        for entry in files.names(self.path):
            # An attempt of this task that was killed.
            if entry.startswith(prefix):
                files.remove_tree(self.path / entry)
        target = self.path / name
        if (target / "metadata.json").exists():
            return str(self._written_before(target))
        batches = [BlockAccessor.for_block(block).to_numpy() for block in blocks]
        batches = [rows for rows in batches if rows and len(next(iter(rows.values())))]
        if not batches:
            return None
        for rows in batches:
            _check_columns(self.schema, rows)
        firsts = [_row_id(rows, 0) for rows in batches]
        follows = [
            _follows(rows, after) for rows, after in zip(batches, [*firsts[1:], None], strict=True)
        ]
        breaks = [
            ~follow | _ended(self.schema, rows)
            for rows, follow in zip(batches, follows, strict=True)
        ]
        # Each end may have a row of its own, for the final observation.
        capacity = sum(len(ends) + int(ends.sum()) for ends in breaks)
        staged = self.path / f"{prefix}{uuid.uuid4().hex}"
        ring = ReplayBuffer.create(
            staged, self.schema, capacity, commit_every=None, user_metadata={"write": self._run}
        )
        with ring:
            broken = False
            for rows, follow in zip(batches, follows, strict=True):
                broken = _extend(ring, rows, follow, broken)
        try:
            rename(staged, target)
        except ReplayError:
            # Another attempt of this task was faster.
            if not (target / "metadata.json").exists():
                raise
            files.remove_tree(staged)
            return str(self._written_before(target))
        return str(target)

    def _written_before(self, target: Path) -> Path:
        """Return a ring that another attempt of this task wrote."""
        if load_metadata(target).user.get("write") != self._run:
            raise FormatError(
                f"{target} is a ring of another write. Pass a new folder, or remove "
                "the rings in it."
            )
        return target

    def on_write_complete(self, write_result: Any) -> None:
        """List the rings."""
        self.rings = sorted(path for path in write_result.write_returns if path)

    def on_write_failed(self, error: Exception) -> None:
        """Remove what this write left unfinished on this node."""
        if self.path.is_dir():
            for entry in files.names(self.path):
                if entry.startswith(f"tmp-{self._run}-"):
                    files.remove_tree(self.path / entry)


def _check_columns(schema: Schema, names: Iterable[str]) -> None:
    """Refuse rows that lack a field.

    Raises:
        SchemaError: A column is missing.
    """
    known = list(names)
    missing = [path for path in schema.paths if path not in known]
    if missing:
        raise SchemaError(
            f"the dataset must have a column for each field, but {missing[0]!r} is not "
            f"one of {known}. Rename the column, or leave the field out of the schema."
        )


ROW_COLUMNS = ("buffer_id", "env_id", "position")


def _row_id(rows: Columns, index: int) -> tuple[int, ...] | None:
    """Where a row lay when it was read, or None where the columns do not say."""
    if "position" not in rows:
        return None
    return tuple(int(rows[name][index]) for name in ROW_COLUMNS if name in rows)


def _follows(rows: Columns, after: tuple[int, ...] | None) -> NDArray[np.bool_]:
    """Bool ``[T]``: the next row continues this one.

    Args:
        rows: Of one block.
        after: Where the first row of the next block lay.
    """
    count = len(next(iter(rows.values())))
    follows = np.ones(count, np.bool_)
    if "position" in rows:
        position = rows["position"].astype(np.int64)
        follows[:-1] = position[1:] == position[:-1] + 1
        for name in ("buffer_id", "env_id"):
            if name in rows:
                follows[:-1] &= rows[name][1:] == rows[name][:-1]
        last = _row_id(rows, count - 1)
        assert last is not None
        follows[-1] = after == (*last[:-1], last[-1] + 1)
    return follows


def _ended(schema: Schema, rows: Columns) -> NDArray[np.bool_]:
    """Bool ``[T]``: the row ends an episode by itself."""
    ended = np.zeros(len(next(iter(rows.values()))), np.bool_)
    for role in ("terminated", "truncated"):
        path = schema.role(role)
        if path is not None:
            ended |= rows[path].astype(bool).reshape(len(ended), -1).any(axis=1)
    return ended


def _extend(ring: ReplayBuffer, rows: Columns, follows: NDArray[np.bool_], broken: bool) -> bool:
    """Add rows in order, with an end where the next row does not continue a row.

    Args:
        ring: Of one environment.
        rows: Of one block.
        follows: See `_follows`.
        broken: The first row does not continue the ring's last one.

    Returns:
        Whether the next block's first row does not continue these.
    """
    schema = ring.schema
    breaks = ~follows & ~_ended(schema, rows)
    if broken:
        ring.end_episodes()
    truncated = schema.role("truncated")
    following = _next_observations(schema, rows)
    known = following or schema.role("next_observation") is not None
    if truncated is not None and known and schema.num_agents is None:
        # One call: what follows a break is an episode of its own by this column.
        rows = {**rows, truncated: rows[truncated].astype(bool) | breaks}
        breaks = np.zeros(len(follows), np.bool_)
    stops = np.flatnonzero(breaks) + 1
    for part in np.split(np.arange(len(follows)), stops):
        if not len(part):
            continue
        if part[0]:
            ring.end_episodes()
        run = slice(int(part[0]), int(part[-1]) + 1)
        final = {path: array[run] for path, array in following.items()}
        ring.extend(
            {path: rows[path][run] for path in schema.paths},
            final_observation=final.get("") if "" in final else unflatten(final) or None,
        )
    return bool(breaks[-1])


def _next_observations(schema: Schema, rows: Columns) -> Columns:
    """Columns of derived next observations, by their path within the observation.

    The path of an observation that is one field is ``""``. Empty where the columns are
    not there, or next observations are fields of their own.
    """
    role = schema.role("observation")
    if role is None or schema.role("next_observation") is not None:
        return {}
    ends = [path[len(role) :] for path in schema.role_paths("observation")]
    if not all(f"next_observation{end}" in rows for end in ends):
        return {}
    return {end.lstrip("/"): rows[f"next_observation{end}"] for end in ends}
