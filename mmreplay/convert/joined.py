"""Reads several sources as one: their rows, one source after the other.

Sources are looked at one by one, and opened again when their rows are read, so that
any number of them needs one open file at a time. A live ring is read up to the heads
that it had at the first look.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import one_of
from mmreplay.convert.base import Block, Notes, Progress, Reader, name_source
from mmreplay.convert.description import Description, refuse_new_ends
from mmreplay.convert.episode_facts import EpisodeFacts
from mmreplay.convert.provenance import PROVENANCE
from mmreplay.convert.ranges import RangesReader, RowRanges
from mmreplay.convert.select import (
    Origin,
    Selected,
    Selection,
    bounds_of,
    check_selection,
    choose,
    divide,
    facts_of,
    paths_of,
    span_of,
    there,
)
from mmreplay.errors import SchemaError, StaleError
from mmreplay.schema import Field, Schema
from mmreplay.schema.source_names import OwnNames

Ids = NDArray[np.int64]
Envs = Literal["append", "stack"]
JOINS: tuple[Envs, ...] = ("append", "stack")
Opener = Callable[[], Reader]


@dataclass(slots=True)
class Source:
    """One of several sources.

    Attributes:
        path: Of it.
        open: Opens a reader of all of it.
        identity: What says that it is still the same one.
        description: As it was at the first look.
        ranges: The rows of it that are read.
        continue_from: int64 ``[E]``, where its rows begin behind those of other
            sources; -1 where none stand before them. See `RangesReader`.
        stop: int64 ``[E]``, where its rows end then.
        envs: The first of its environments among those of all.
    """

    path: Path
    open: Opener
    identity: object
    description: Description
    ranges: RowRanges
    continue_from: Ids
    stop: Ids
    envs: int = 0


def join(
    openers: Sequence[tuple[Path, Opener]],
    selection: Selection,
    envs: Envs = "append",
    progress: Progress | None = None,
) -> dict[str, Selected]:
    """What is selected of several sources, in their order, by the names of splits.

    Episodes are numbered over all of them. Final rows whose step is not in the source
    are left out. Without splits the one name is ``""``.

    Args:
        openers: Path of each, and what opens it.
        selection: What to read; not `Selection.ranges`, which are of one source.
        envs: ``"append"``: environment e of all sources is one, with their rows one
            after another. ``"stack"``: each source brings its own environments.
        progress: Called with (rows done, rows in all) of each source that is looked at.

    Raises:
        SchemaError: The sources do not fit together: which one, and what to do.
    """
    one_of("envs", envs, JOINS)
    check_selection(selection)
    if selection.ranges is not None:
        raise SchemaError(
            "select names rows of one source, and there are several. Convert that source by itself."
        )
    notes = Notes()
    paths: tuple[str, ...] | None = None
    own_names: OwnNames = {}
    sources: list[Source] = []
    facts: list[EpisodeFacts] = []
    rows = 0
    for path, opener in openers:
        with name_source(path), opener() as reader:
            description = reader.describe()
            if not sources:
                own_names = reader.own_names()
                if selection.fields is not None:
                    paths = paths_of(description.schema.paths, selection.fields, own_names)
            else:
                _refuse_unequal(sources[0], path, description, envs, paths)
            span = span_of(description, selection)
            rows += int(span.lengths.sum())
            before = sum(map(len, facts))
            looked = facts_of(
                reader, selection, span, source=len(facts), before=before, progress=progress
            )
            facts.append(looked)
            _add(notes, path, reader.report)
            none = np.full(description.num_envs, -1)
            identity = _identity(reader, path)
            # What has no engine of its own becomes a buffer as any file does.
            description = replace(description, engine=reader.engine or "memmap")
            no_rows = RowRanges.of([])
            sources.append(Source(path, opener, identity, description, no_rows, none, none))
    if selection.env_ids is not None:
        notes.steps.append(f"env_ids leaves {rows:,} rows")
    chosen = choose(facts, selection, notes)
    edges = np.cumsum([0, *map(len, facts)]).tolist()
    of_each = [slice(*each) for each in pairwise(edges)]
    for source, each, mine in zip(sources, facts, of_each, strict=True):
        with _open(source) as reader:
            chosen[mine] = there(chosen[mine], each, reader, notes)
            source.ranges = each.ranges(chosen[mine])
    if selection.rows is not None:
        _slice_rows(sources, selection.rows)
        notes.steps.append(f"rows leaves {sum(each.ranges.rows for each in sources):,} rows")
    _check_twice(sources, notes if selection.unique else None)
    selected = {}
    for name, taken in divide(chosen, selection, notes).items():
        some = sources
        if selection.splits is not None:
            some = [
                replace(source, ranges=each.ranges(taken[mine]))
                for source, each, mine in zip(sources, facts, of_each, strict=True)
            ]
        origins = [
            Origin(
                source.description,
                source.ranges,
                # Rows that were sliced are of fewer episodes.
                None if selection.rows is not None else (len(each), int(taken[mine].sum())),
            )
            for source, each, mine in zip(some, facts, of_each, strict=True)
        ]
        selected[name] = Selected(JoinedReader(some, envs, notes, paths, own_names), origins)
    return selected


class JoinedReader(Reader):
    """The rows of several sources, one source after the other.

    Where the last row of a source ends no episode, the first one of the next source
    begins another by an interruption (BREAK).
    """

    def __init__(
        self,
        sources: Sequence[Source],
        envs: Envs,
        notes: Notes,
        paths: tuple[str, ...] | None = None,
        own_names: OwnNames | None = None,
    ) -> None:
        """Lay the rows of sources out one after another.

        Args:
            sources: At least one.
            envs: See `join`.
            notes: Of the result.
            paths: The fields to read; all by default.
            own_names: See `Reader.own_names`; of the first source.
        """
        self._own_names = own_names or {}
        self.report, self._sources = notes, [source for source in sources if source.ranges.rows]
        first = sources[0].description
        counts = [source.description.num_envs for source in sources]
        num_envs = sum(counts) if envs == "stack" else counts[0]
        begins = np.full(num_envs, -1)
        ends = np.full(num_envs, -1)
        offset = 0
        for source, count in zip(sources, counts, strict=True):
            source.envs = offset if envs == "stack" else 0
            offset += count
            within = slice(source.envs, source.envs + count)
            lengths = np.bincount(
                source.ranges.env_ids, source.ranges.stop - source.ranges.first, count
            ).astype(np.int64)
            oldest = source.ranges.span(source.description.stop).first
            source.continue_from = ends[within].copy()
            fresh = (lengths > 0) & (begins[within] < 0)
            begins[within] = np.where(fresh, oldest, begins[within])
            ends[within] = np.where(fresh, oldest, ends[within]) + lengths
            source.stop = ends[within].copy()
        ends[begins < 0] = begins[begins < 0] = 0
        self._paths = first.schema.paths if paths is None else paths
        schema = _widest([source.description.schema for source in sources], self._paths)
        priorities = {source.description.priorities for source in sources}
        if priorities - {""} and len(priorities) > 1:
            notes.doubt("priorities were left out, as not every source has those of one sampler")
        keys = {key for each in sources for key in each.description.user}
        for key in sorted(keys - {PROVENANCE}):
            if any(each.description.user.get(key) != first.user.get(key) for each in sources):
                notes.doubt(
                    f"user metadata {key!r} differs between sources: the first one's was taken"
                    + _unlike_rates(sources, key)
                )
        description = replace(
            first,
            schema=schema,
            first=begins,
            stop=ends,
            capacity=max(1, int((ends - begins).max())),
            uuid="",
            statistics={},
            priorities=first.priorities if len(priorities) == 1 else "",
            heap_nbytes=0,
        )
        self._description = description if paths is None else description.select(paths)
        refuse_new_ends(schema.roles, self._description.schema, "fields")

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def own_names(self) -> OwnNames:
        """See `Reader.own_names`."""
        return self._own_names

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        for reader, ranged, last, source in self._open_each():
            blocks = ranged.select(reader.blocks(rows_per_block), ranged.paths, last)
            yield from _moved(blocks, source)

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`."""
        for reader, ranged, last, source in self._open_each():
            yield from _moved(ranged.select(reader.marks(), (), last), source)

    def measures(self) -> Iterator[Block]:
        """See `Reader.measures`."""
        varying = self._description.schema.varying
        for reader, ranged, last, source in self._open_each():
            yield from _moved(ranged.select(reader.measures(), varying, last), source)

    def path_of(self, env_id: int, position: int) -> Path | None:
        """See `Reader.path_of`."""
        for source in self._sources:
            within = env_id - source.envs
            if 0 <= within < len(source.stop) and position < source.stop[within]:
                return source.path
        return None

    def only(self, paths: tuple[str, ...]) -> None:
        """See `Reader.only`."""
        self._paths = paths

    def _open_each(self) -> Iterator[tuple[Reader, RangesReader, NDArray[np.uint8], Source]]:
        """Each source, open, with the flags of the rows before its own."""
        last = np.zeros(self._description.num_envs, np.uint8)
        for source in self._sources:
            count = source.description.num_envs
            with _open(source) as reader:
                reader.narrow(source.ranges.span(source.description.stop))
                ranged = RangesReader(reader, source.ranges, continue_from=source.continue_from)
                ranged.keep(self._paths, priorities=bool(self._description.priorities))
                yield reader, ranged, last[source.envs : source.envs + count], source
                # Some of what a source says is found as its rows are read.
                _add(self.report, source.path, reader.report)

    def close(self) -> None:
        """See `Reader.close`: sources are open only while they are read."""


def _unlike_rates(sources: Sequence[Source], key: str) -> str:
    """What to say of user metadata by which sources have several fps, if they do."""
    rates = []
    for each in sources:
        value = each.description.user.get(key)
        rate = value if key == "fps" else None
        if isinstance(value, dict):
            rate = value.get("fps")
        if rate is not None:
            rates.append((rate, each.path))
    for rate, path in rates[1:]:
        if rate != rates[0][0]:
            return (
                f". fps is {rates[0][0]} in {rates[0][1]} and {rate} in {path}: to LeRobot, pass "
                "fps= (-o fps=) if the first one is wrong"
            )
    return ""


def _add(notes: Notes, path: Path, more: Notes) -> None:
    """Add what a reader says of a source."""
    for note in more.notes:
        notes.note(f"{path}: {note}")
    for doubt in more.doubts:
        notes.doubt(f"{path}: {doubt}")


def _identity(reader: Reader, path: Path) -> object:
    """What says that a source is still the same one."""
    try:
        status = os.stat(path)
    except OSError:
        return reader.identity()
    if not stat.S_ISREG(status.st_mode):
        return reader.identity()
    return status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def _open(source: Source) -> Iterator[Reader]:
    """Open a source again.

    Raises:
        StaleError: It is another one by now, or rows of it were discarded.
    """
    with name_source(source.path), source.open() as reader:
        if _identity(reader, source.path) != source.identity:
            raise StaleError(
                f"{source.path} was changed or replaced since it was first looked at. Run the "
                "conversion again."
            )
        yield reader


def _moved(blocks: Iterator[Block], source: Source) -> Iterator[Block]:
    """The same rows, with environments counted among those of all sources."""
    with name_source(source.path):
        for block in blocks:
            yield replace(block, env_ids=block.env_ids + source.envs)


def _slice_rows(sources: Sequence[Source], rows: slice) -> None:
    """Leave some of the rows, counted over all sources."""
    counts = [source.ranges.rows for source in sources]
    first, stop = bounds_of("rows", rows, sum(counts))
    before = 0
    for source, count in zip(sources, counts, strict=True):
        low, high = max(0, first - before), min(count, stop - before)
        source.ranges = source.ranges.sliced(low, max(low, high))
        before += count


def _refuse_unequal(
    one: Source, path: Path, other: Description, envs: Envs, paths: tuple[str, ...] | None
) -> None:
    """Refuse a source that does not fit the first one in the fields that are read."""
    first, schema = one.description, other.schema
    for field in (*first.schema.paths, *schema.paths) if paths is None else paths:
        mine, its = first.schema.fields.get(field), schema.fields.get(field)
        if mine is None or its is None:
            has, lacks = (one.path, path) if its is None else (path, one.path)
            raise SchemaError(
                f"{has} has a field {field!r}, and {lacks} has not. Leave it out with fields."
            )
        if _bare(mine) != _bare(its):
            raise SchemaError(
                f"field {field!r} is {mine.rules.describe(mine)} in {one.path}, and "
                f"{its.rules.describe(its)} in {path}. Leave it out with fields, or convert one of "
                "the sources first."
            )
    for role in sorted({*first.schema.roles, *schema.roles}):
        read = paths is None or first.schema.role(role) in paths
        if read and first.schema.role(role) != schema.role(role):
            raise SchemaError(
                f"the {role} is {first.schema.role(role)!r} in {one.path}, and "
                f"{schema.role(role)!r} in {path}. Convert one of the sources first."
            )
    if first.autoreset != other.autoreset:
        raise SchemaError(
            f"autoreset is {first.autoreset!r} in {one.path}, and {other.autoreset!r} in {path}. "
            "Sources with one meaning of ends can be joined."
        )
    if envs == "append" and first.num_envs != other.num_envs:
        raise SchemaError(
            f"{one.path} has {first.num_envs} environments, and {path} has {other.num_envs}. "
            "Pass envs='stack' (--envs stack) to set them side by side."
        )


def _bare(field: Field) -> tuple[object, ...]:
    """What fields of joined sources have in common: all but the longest length.

    Of images their codec and size, whatever their quality.
    """
    if field.encoding is not None:
        return field.kind, field.encoding.codec, field.encoding.shape
    shape = (None, *field.shape[1:]) if field.varies else field.shape
    return field.kind, field.dtype, shape


def _widest(schemas: Sequence[Schema], paths: Sequence[str]) -> Schema:
    """The first schema, with the longest lengths that all have of the fields read."""
    fields = dict(schemas[0].fields)
    for path in schemas[0].varying:
        if path not in paths:
            continue
        fields[path] = max(
            (schema.fields[path] for schema in schemas), key=lambda field: field.max_length or 0
        )
    return Schema.from_flat(fields, schemas[0].roles)


def _check_twice(sources: Sequence[Source], notes: Notes | None) -> None:
    """Look for rows of one buffer that two sources have.

    Args:
        sources: With the rows that are selected.
        notes: Of the result, for a doubt; None refuses instead.

    Raises:
        SchemaError: There are some, and `notes` is None.
    """
    by_uuid: dict[str, list[Source]] = {}
    for source in sources:
        if source.description.uuid:
            by_uuid.setdefault(source.description.uuid, []).append(source)
    for several in by_uuid.values():
        rows = sorted(
            (env_id, first, stop, number)
            for number, source in enumerate(several)
            for env_id, first, stop in zip(
                source.ranges.env_ids.tolist(),
                source.ranges.first.tolist(),
                source.ranges.stop.tolist(),
                strict=True,
            )
        )
        for one, other in pairwise(rows):
            if one[0] == other[0] and other[1] < one[2]:
                both = (
                    f"{several[one[3]].path} and {several[other[3]].path} both have the row at "
                    f"position {other[1]} of environment {other[0]} of one buffer"
                )
                if notes is None:
                    raise SchemaError(f"{both}. Pass one of them, or select other episodes.")
                notes.doubt(f"{both}, in episodes that are not equal: both stay")
                return
