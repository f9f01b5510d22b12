"""Facts of the episodes of a source, and reductions of their steps, in one pass.

Episodes are numbered environment by environment, oldest first. Memory: some numbers for
each episode, whatever the steps. Sums of floats are taken step by step from the oldest,
so that they do not depend on how a source is cut into blocks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import Block, Progress, Reader
from mmreplay.convert.condition import Condition, Expression, Reduction
from mmreplay.convert.condition_values import INT64, BeyondInt64, Truth, as_float64, as_int64
from mmreplay.convert.description import Description
from mmreplay.convert.episode_ends import inside
from mmreplay.convert.ranges import RowRanges
from mmreplay.episodes import CUT, FINAL, START, TERMINATED, TRUNCATED
from mmreplay.errors import SchemaError, called
from mmreplay.ragged import Ragged
from mmreplay.ring import Span, one_env
from mmreplay.storage.layout import record_layout

Ids = NDArray[np.int64]
MAX_EPISODES = 50_000_000


class Digests:
    """Digests of what episodes consist of.

    That is all values of their steps, final observations, and how they end; not where
    they stand, nor how the episode before them ended. Of each environment one episode
    is open at a time: its columns have a hash each, so that blocks do not matter.
    """

    def __init__(self, description: Description) -> None:
        """Begin without an episode."""
        schema = description.schema
        # The flags say what these fields do, and hold what the next row says.
        ends = record_layout(schema).served
        self._paths = sorted(path for path in schema.paths if path not in ends)
        self._observed = set(schema.role_paths("observation"))
        self._open = [-1] * description.num_envs
        self._steps = [0] * description.num_envs
        self._hashes: list[dict[str, Any]] = [{} for _ in self._open]
        self._made = np.zeros(0, "S16")

    def look(self, block: Block, episodes: Ids, edges: Ids, lengths: Ids, ends: Ids) -> None:
        """Take the next rows in.

        Args:
            block: With all fields, its rows by environments.
            episodes: int64 ``[P]``, the episode of each section of these.
            edges: int64 ``[P + 1]``, the first row of each section, and the end.
            lengths: int64 ``[P]``, steps of each.
            ends: int64 ``[M]``, the flags by which episodes end, as far as known.
        """
        columns = {path: block.columns[path] for path in self._paths}
        for number, episode in enumerate(episodes.tolist()):
            first, stop = int(edges[number]), int(edges[number + 1])
            env_id = int(block.env_ids[first])
            if self._open[env_id] != episode:
                self._close(env_id, ends)
                self._open[env_id] = episode
            self._steps[env_id] += int(lengths[number])
            hashes = self._hashes[env_id]
            for path, column in columns.items():
                # Of the final row the observation alone has a meaning.
                last = stop if path in self._observed else first + int(lengths[number])
                values: Any = column[first:last]
                if isinstance(values, Ragged):
                    _update(hashes, f"{path}//lengths", values.lengths)
                    values = values.values[values.offsets[0] : values.offsets[-1]]
                _update(hashes, path, values)

    def _close(self, env_id: int, ends: Ids) -> None:
        episode = self._open[env_id]
        if episode < 0:
            return
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{ends[episode]} {self._steps[env_id]}".encode())
        for path, each in self._hashes[env_id].items():
            digest.update(f" {path} ".encode() + each.digest())
        self._made = grown(self._made, episode + 1)
        self._made[episode] = digest.digest()
        self._hashes[env_id], self._steps[env_id] = {}, 0

    def result(self, ends: Ids) -> NDArray[np.bytes_]:
        """S16 ``[M]`` of all episodes, by the order in which they were met."""
        for env_id in range(len(self._open)):
            self._close(env_id, ends)
        return self._made


def _update(hashes: dict[str, Any], name: str, values: Any) -> None:
    if name not in hashes:
        hashes[name] = hashlib.blake2b(digest_size=16)
    # Frames that wait in a video are decoded here.
    hashes[name].update(np.asarray(values).tobytes())


@dataclass(frozen=True, slots=True)
class Sections:
    """The steps of a block by episode: one section follows another.

    Attributes:
        episodes: int64 ``[P]``, the episode of each section, each once.
        starts: int64 ``[P]``, its first step among the block's.
        lengths: int64 ``[P]``, above 0.
        fresh: bool ``[P]``, whether no step of the episode came before.
    """

    episodes: Ids
    starts: Ids
    lengths: Ids
    fresh: NDArray[np.bool_]


class EpisodeFacts:
    """The episodes of a reader, with what a condition asks of them.

    Attributes:
        env_ids: int64 ``[N]``.
        first: int64 ``[N]``, position of the first row.
        stop: int64 ``[N]``, one past the last row, the final one included.
        lengths: int64 ``[N]``, steps; final rows are none.
        terminated: bool ``[N]``, by a flag.
        truncated: bool ``[N]``, likewise, or by the CUT of the row after it.
        ended_by_next: bool ``[N]``, by that CUT.
        begun: bool ``[N]``, with their beginning.
        complete: bool ``[N]``, with their beginning and an end.
        returns: float64 ``[N]``, where the condition names them or they are asked for;
            else empty.
        digests: S16 ``[N]``, if asked for: those of equal episodes are equal.
    """

    digests: NDArray[np.bytes_] = np.zeros(0, "S16")
    returns: NDArray[np.float64] = np.zeros(0)

    def __init__(
        self,
        reader: Reader,
        condition: Condition | None = None,
        *,
        span: Span | None = None,
        returns: bool = False,
        digests: bool = False,
        source: int = 0,
        before: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """Read what is needed, once.

        Args:
            reader: The source; fields that are not needed are not read.
            condition: What is asked, checked against the reader's fields.
            span: The rows to look at; all by default.
            returns: Sum rewards in any case.
            digests: Compute digests; all fields are read.
            source: Place of the source among several, from 0.
            before: Episodes of the sources before it.
            progress: Called after each block with (rows done, rows in all).

        Raises:
            SchemaError: An integer becomes larger than int64, or there are more than 50
                million episodes.
        """
        description = reader.describe()
        paths = () if condition is None else condition.paths
        reductions = [] if condition is None else condition.reductions
        self._reward = description.schema.role("reward") or ""
        self._sums = bool(self._reward) and (returns or "return" in _facts(condition))
        self._condition, self._source, self._before = condition, source, before
        self._open = np.full(description.num_envs, -1)
        self._count = 0
        self._grown = {name: np.zeros(0, np.int64) for name in ("env", "first", "stop", "length")}
        self._grown |= {name: np.zeros(0, np.int64) for name in ("flags", "begun", "by_next")}
        self._returns = Sums(real=True)
        self._reduced = [_accumulator(each) for each in reductions]
        self._digests = Digests(description) if digests else None
        read = (*paths, self._reward) if self._sums and self._reward not in paths else paths
        if digests:
            read = description.schema.paths
        reader.only(read)
        span = span or Span(description.first, description.stop)
        done, rows = 0, int(span.lengths.sum())
        for block in reader.blocks() if read else reader.marks():
            mine = block.select(inside(block, span))
            self._look(mine, description)
            done += len(mine)
            if progress is not None:
                called("progress", progress, done, rows)
        reader.only(description.schema.paths)
        self._finish()

    def _look(self, block: Block, description: Description) -> None:
        """Take the next rows in."""
        if not len(block):
            return
        if not one_env(block.env_ids):
            block = block.take(np.argsort(block.env_ids, kind="stable"))
        env_ids, positions, flags = block.env_ids, block.positions, block.flags
        first_of_env = np.diff(env_ids, prepend=-1) != 0
        # Of an environment's oldest rows a final one has no step.
        starts = (flags & START) != 0
        at = np.flatnonzero(first_of_env | starts)
        env = env_ids[at]
        new = starts[at] | (self._open[env] < 0)
        ids = np.where(new, self._count + np.cumsum(new) - 1, self._open[env])
        before = np.where(first_of_env[at], self._open[env], np.roll(ids, 1))
        self._count += int(new.sum())
        if self._count > MAX_EPISODES:
            raise SchemaError(
                f"the source has more than {MAX_EPISODES:,} episodes, too many to select from "
                "at once. Select environments first, with env_ids."
            )
        for name, column in self._grown.items():
            self._grown[name] = grown(column, self._count)
        facts = self._grown
        facts["env"][ids] = env
        facts["first"][ids[new]] = positions[at[new]]
        facts["begun"][ids[new]] = starts[at[new]]
        last = np.append(at[1:], len(env_ids)) - 1
        facts["stop"][ids] = positions[last] + 1
        facts["flags"][ids] |= np.bitwise_or.reduceat(flags, at) & (TERMINATED | TRUNCATED)
        cut = before[((flags[at] & CUT) != 0) & starts[at]]
        facts["flags"][cut[cut >= 0]] |= TRUNCATED
        facts["by_next"][cut[cut >= 0]] = 1
        newest = np.flatnonzero(np.diff(env, append=-1))
        self._open[env[newest]] = ids[newest]
        steps = (flags & FINAL) == 0
        lengths = np.add.reduceat(steps, at, dtype=np.int64)
        if self._digests is not None:
            self._digests.look(block, ids, np.append(at, len(block)), lengths, facts["flags"])
        some = lengths > 0
        ids, lengths = ids[some], lengths[some]
        fresh = facts["length"][ids] == 0
        facts["length"][ids] += lengths
        if not len(ids) or not (self._sums or self._reduced):
            return
        sections = Sections(ids, np.cumsum(lengths) - lengths, lengths, fresh)
        rows = _Steps(block.select(steps), description)
        if self._sums:
            rewards = as_float64(rows.field(self._reward)).reshape(len(rows), 1)
            self._returns.add(rewards, sections, self._count)
        for reduction in self._reduced:
            try:
                reduction.take(rows, sections, self._count)
            except BeyondInt64 as beyond:
                section = np.searchsorted(sections.starts, beyond.where or 0, "right") - 1
                raise self._beyond(int(ids[section])) from None

    def _beyond(self, episode: int) -> SchemaError:
        facts = self._grown
        return SchemaError(
            f"where: an integer of the episode at position {facts['first'][episode]} of "
            f"environment {facts['env'][episode]} becomes larger than int64. Make it a float, as "
            "in x * 1.0."
        )

    def _finish(self) -> None:
        """Put the episodes into the order of their numbers."""
        facts = {name: column[: self._count] for name, column in self._grown.items()}
        # A final row whose steps are gone is no episode.
        there = np.flatnonzero(facts["length"] > 0)
        order = there[np.argsort(facts["env"][there], kind="stable")]
        self.env_ids, self.first, self.stop, self.lengths = (
            facts[name][order] for name in ("env", "first", "stop", "length")
        )
        self.terminated = (facts["flags"][order] & TERMINATED) != 0
        self.truncated = (facts["flags"][order] & TRUNCATED) != 0
        self.ended_by_next = facts["by_next"][order] != 0
        self.begun = facts["begun"][order] != 0
        self.complete = self.begun & (self.terminated | self.truncated)
        if self._digests is not None:
            self.digests = self._digests.result(facts["flags"])[order]
        if self._sums:
            self.returns = self._returns.result(order, self.lengths)
        try:
            self._values = [each.result(order, self.lengths) for each in self._reduced]
        except BeyondInt64 as beyond:
            raise self._beyond(int(order[beyond.where or 0])) from None

    def __len__(self) -> int:
        """Episodes."""
        return len(self.env_ids)

    def selected(self) -> Truth:
        """For which episodes the condition holds, bool ``[N]``; not known of some.

        Raises:
            SchemaError: An integer becomes larger than int64.
        """
        assert self._condition is not None
        if not len(self):
            return Truth(np.zeros(0, bool))
        try:
            truth = self._condition.holds(self)
        except BeyondInt64 as beyond:
            episode = np.flatnonzero(
                (self._grown["first"][: self._count] == self.first[beyond.where or 0])
                & (self._grown["env"][: self._count] == self.env_ids[beyond.where or 0])
            )
            raise self._beyond(int(episode[0])) from None
        unknown = None if truth.unknown is None else np.broadcast_to(truth.unknown, len(self))
        return Truth(np.broadcast_to(truth.true, len(self)), unknown)

    def ranges(self, chosen: NDArray[np.bool_]) -> RowRanges:
        """The rows of some episodes, bool ``[N]``, their final rows included."""
        env_ids, first, stop = (each[chosen] for each in (self.env_ids, self.first, self.stop))
        apart = (np.diff(env_ids) != 0) | (first[1:] != stop[:-1])
        begins, ends = np.append(True, apart), np.append(apart, True)
        if not len(env_ids):
            return RowRanges(env_ids, first, stop)
        truncated = self.truncated[chosen][ends]
        return RowRanges(env_ids[begins], first[begins], stop[ends], truncated=truncated)

    def fact(self, name: str) -> Any:
        """See `Episodes.fact`."""
        return {
            "return": self.returns,
            "length": self.lengths,
            "env": self.env_ids,
            "number": self._before + np.arange(len(self)),
            "source": np.full(len(self), self._source),
            "terminated": self.terminated,
            "truncated": self.truncated,
            "whole": self.complete,
        }[name]

    def reduced(self, number: int) -> Any:
        """See `Episodes.reduced`."""
        return self._values[number]


def _facts(condition: Condition | None) -> set[str]:
    return set() if condition is None else condition.facts


class _Steps:
    """The steps of a block, as expressions take them."""

    def __init__(self, block: Block, description: Description) -> None:
        self._block, self._fields = block, description.schema.fields
        self._columns: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._block)

    def field(self, path: str) -> Any:
        """See `Steps.field`."""
        if path not in self._columns:
            column, field = self._block.columns[path], self._fields[path]
            # Frames of a video are decoded now.
            numbers = column if field.varies else field.rules.numbers(field, np.asarray(column))
            self._columns[path] = numbers
        return self._columns[path]


def grown(column: NDArray[Any], count: int) -> NDArray[Any]:
    """An array of at least so many elements that begins with a column; zeros follow."""
    if len(column) >= count:
        return column
    longer = np.zeros(max(count, 2 * len(column), 16), column.dtype)
    longer[: len(column)] = column
    return longer


class Sums:
    """Sums of each episode's numbers, over all components of its steps."""

    def __init__(self, *, real: bool, mean: bool = False) -> None:
        """Sum float64, or integers exactly; a mean divides by how many there were."""
        self._sums = np.zeros(0, np.float64 if real else np.int64)
        self._mean, self._components = mean, 1

    def add(self, values: NDArray[Any], sections: Sections, count: int) -> None:
        """Add the numbers of steps, ``[N, C]``."""
        self._components = values.shape[1]
        self._sums = sums = grown(self._sums, count)
        starts, lengths = sections.starts * values.shape[1], sections.lengths * values.shape[1]
        flat = values.reshape(-1)
        if sums.dtype == np.float64:
            if len(flat):
                # `bincount` adds one number after another, to the sum so far here.
                weights = flat.astype(np.float64)
                with np.errstate(over="ignore", invalid="ignore"):
                    # Infinities of both signs are NaN, as a sum in turn has it.
                    weights[starts] += sums[sections.episodes]
                which = np.repeat(np.arange(len(lengths)), lengths)
                sums[sections.episodes] = np.bincount(which, weights, len(lengths))
            return
        before = sums[sections.episodes]
        if sums.dtype == object or _largest(flat) * (len(flat) + 1) + _largest(before) > INT64.max:
            exact = np.add.reduceat(flat.astype(object), starts) + before
            if ((exact > INT64.max) | (exact < INT64.min)).any():
                # What later blocks add may bring it back.
                self._sums = sums = sums.astype(object)
            sums[sections.episodes] = exact
            return
        sums[sections.episodes] = before + np.add.reduceat(flat.astype(np.int64), starts)

    def result(self, order: Ids, lengths: Ids) -> Any:
        """Sums or means of episodes in their order, ``[N]``.

        Raises:
            BeyondInt64: A sum of integers does not fit; of a mean it may.
        """
        sums = self._sums[order] if len(order) else self._sums[:0]
        if not self._mean and sums.dtype == object:
            beyond = np.flatnonzero((sums > INT64.max) | (sums < INT64.min))
            if len(beyond):
                raise BeyondInt64(int(beyond[0]))
            sums = sums.astype(np.int64)
        if not self._mean:
            return sums
        with np.errstate(all="ignore"):
            return sums.astype(np.float64) / (lengths * self._components)


def _largest(numbers: NDArray[Any]) -> int:
    return max(abs(int(numbers.max())), abs(int(numbers.min()))) if len(numbers) else 0


class _Accumulator(Protocol):
    """What a reduction has of each episode so far."""

    _name: str
    _of: Expression

    def __init__(self, reduction: Reduction) -> None:
        self._name, self._of = reduction.name, reduction.of

    def take(self, rows: _Steps, sections: Sections, count: int) -> None:
        """Take steps in.

        Args:
            rows: Of a block.
            sections: Their episodes.
            count: Episodes so far.
        """

    def result(self, order: Ids, lengths: Ids) -> Any:
        """Its values of episodes in their order, ``[N]``."""


def _numbers(of: Expression, rows: _Steps) -> NDArray[Any]:
    """Numbers of steps, ``[N, C]``; bools are integers."""
    values = np.asarray(of.evaluate(rows))
    values = values.astype(np.int64) if values.dtype == bool else values
    return np.broadcast_to(values, (len(rows), *values.shape[1:]))


class _Sum(_Accumulator):
    def __init__(self, reduction: Reduction) -> None:
        super().__init__(reduction)
        self._sums = Sums(real=self._of.kind == "float", mean=self._name == "mean")

    def take(self, rows: _Steps, sections: Sections, count: int) -> None:
        numbers = _numbers(self._of, rows)
        if self._of.kind != "float" and (self._name == "sum" or numbers.dtype != np.uint64):
            numbers = as_int64(numbers)
        self._sums.add(numbers, sections, count)

    def result(self, order: Ids, lengths: Ids) -> Any:
        return self._sums.result(order, lengths)


class _Extreme(_Accumulator):
    _so_far: NDArray[Any] | None = None

    def take(self, rows: _Steps, sections: Sections, count: int) -> None:
        numbers = _numbers(self._of, rows)
        better = np.minimum if self._name == "min" else np.maximum
        if self._so_far is None:
            self._so_far = np.zeros(0, numbers.dtype)
        self._so_far = found = grown(self._so_far, count)
        here = better.reduceat(numbers.reshape(-1), sections.starts * numbers.shape[1])
        known = better(found[sections.episodes], here)
        found[sections.episodes] = np.where(sections.fresh, here, known)

    def result(self, order: Ids, lengths: Ids) -> Any:
        return np.zeros(0) if self._so_far is None else self._so_far[order]


class _Counts(_Accumulator):
    """Counts what is true, and what is unknown."""

    def __init__(self, reduction: Reduction) -> None:
        super().__init__(reduction)
        self._true = self._unknown = np.zeros(0, np.int64)
        self._components = 1

    def take(self, rows: _Steps, sections: Sections, count: int) -> None:
        truth: Truth = self._of.evaluate(rows)
        self._components = truth.true.shape[1] if truth.true.ndim else 1
        self._true = _counted(truth.true, grown(self._true, count), rows, sections)
        self._unknown = grown(self._unknown, count)
        if truth.unknown is not None:
            self._unknown = _counted(truth.unknown, self._unknown, rows, sections)

    def result(self, order: Ids, lengths: Ids) -> Any:
        if not len(order):
            return np.zeros(0, np.int64) if self._name == "count" else Truth(np.zeros(0, bool))
        true, unknown = self._true[order], self._unknown[order]
        if self._name == "count":
            return true
        if self._name == "any":
            return Truth.of(true > 0, (true == 0) & (unknown > 0))
        every = lengths * self._components
        return Truth.of(true == every, (true + unknown == every) & (unknown > 0))


def _counted(truth: NDArray[np.bool_], counts: Ids, rows: _Steps, sections: Sections) -> Ids:
    """Counts, with those of the steps of a block added."""
    each = truth.sum(axis=1) if truth.ndim else np.full(len(rows), int(truth))
    counts[sections.episodes] += np.add.reduceat(each, sections.starts, dtype=np.int64)
    return counts


class _Edge(_Accumulator):
    """The value of the first or of the last step."""

    def __init__(self, reduction: Reduction) -> None:
        super().__init__(reduction)
        self._episodes: list[Ids] = []
        self._edges: list[Any] = []

    def take(self, rows: _Steps, sections: Sections, count: int) -> None:
        starts, episodes = sections.starts, sections.episodes
        if self._name == "start":
            at, episodes = starts[sections.fresh], episodes[sections.fresh]
        else:
            at = starts + sections.lengths - 1
        value = self._of.evaluate(rows)
        if not isinstance(value, Ragged):
            value = np.broadcast_to(np.asarray(value), (len(rows), 1))[:, 0]
        self._episodes.append(episodes)
        # A copy: the block is valid until the next one is read.
        self._edges.append(value[at])

    def result(self, order: Ids, lengths: Ids) -> Any:
        episodes = np.concatenate([np.zeros(0, np.int64), *self._episodes])
        latest = np.zeros(int(episodes.max(initial=-1)) + 1, np.int64)
        latest[episodes] = np.arange(len(episodes))
        every: Any
        if self._of.kind == "text":
            every = Ragged.concatenate(self._edges) if self._edges else _no_texts()
        else:
            every = np.concatenate(self._edges) if self._edges else np.zeros(0)
        return every[latest[order]]


def _no_texts() -> Ragged:
    return Ragged(np.zeros(0, np.uint8), np.zeros(1, np.int64))


def _accumulator(reduction: Reduction) -> _Accumulator:
    kinds: dict[str, type[_Accumulator]] = {"start": _Edge, "end": _Edge, "sum": _Sum}
    kinds |= {"mean": _Sum, "min": _Extreme, "max": _Extreme}
    return kinds.get(reduction.name, _Counts)(reduction)
