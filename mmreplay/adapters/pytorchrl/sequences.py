"""Whole sequences for recurrent actors, which overlap by rows that are stored twice.

As in pytorchrl, rows form sequences one after the other; where one is full, its last
rows are inserted again, so that they begin the next. The *grid* says where sequences
begin: it restarts with each reset, and with each writer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mmreplay.adapters.common.location import StrPath
from mmreplay.adapters.common.values import check_counts
from mmreplay.adapters.pytorchrl.data import (
    DONE2,
    ENDED,
    GAMMAS,
    KEY,
    N_STEP,
    OBS2,
    REW,
    RHS,
    RHS2,
    Gammas,
    Slice,
    nstep_sums,
)
from mmreplay.adapters.pytorchrl.ring import RingStorage
from mmreplay.errors import EmptyError

Ids = NDArray[np.int64]


class Grid:
    """Where sequences begin.

    Attributes:
        origins: Positions at which the grid restarts, ascending.
    """

    def __init__(self, length: int, origins: list[int], overlap: int = 0, n_step: int = 1) -> None:
        """Lay sequences of a length from origins on.

        Args:
            length: Rows of a sequence.
            origins: Positions at which it restarts.
            overlap: Rows of a sequence that are those of the one before again.
            n_step: Steps that each row of a sequence is followed for.
        """
        self.length, self.overlap, self.n_step = length, overlap, n_step
        self.origins = origins

    def start(self, position: int) -> None:
        """Restart at a position: the rows before do not lead to it."""
        if position != self.origins[-1]:
            self.origins.append(position)

    def moved(self, shift: int, mark: int) -> None:
        """Follow rows that were copied forward, up to a mark where it restarts."""
        kept = [origin + shift for origin in self.origins if origin + shift < mark]
        self.origins = kept or [mark]
        self.start(mark)

    def sequences(self, first: int, stop: int) -> tuple[Ids, Ids]:
        """First whole sequence of each part of the grid, and how many there are.

        A sequence is whole when the steps are there that follow its last row; in a
        part that another one follows, when its rows are.

        Args:
            first: The oldest row.
            stop: One past the newest.
        """
        begin, fresh = np.array(self.origins), self.length - self.overlap
        needed = np.ones(len(begin), np.int64)
        needed[-1] = self.n_step
        counts = (self._steps(begin, stop) - self.length - needed + 1) // fresh + 1
        ahead = -(-np.maximum(first - begin, 0) // self.length)
        return begin + ahead * self.length, np.maximum(counts - ahead, 0)

    def _steps(self, begin: Ids, stop: int) -> Ids:
        """Steps of each part, those that are there again counted once."""
        rows = np.append(begin[1:], stop) - begin
        full, rest = np.divmod(rows, self.length)
        ends = np.where(full > 0, np.maximum(rest, self.overlap), rest)
        found: Ids = full * (self.length - self.overlap) + ends
        return found

    def starts(self, first: int, stop: int) -> Ids:
        """Positions at which whole sequences begin, int64 ``[S]``, ascending."""
        begin, counts = self.sequences(first, stop)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        ranks = np.arange(counts.sum()) - before
        found: Ids = np.repeat(begin, counts) + ranks * self.length
        return found

    def following(self, starts: Ids, stop: int) -> tuple[Ids, NDArray[np.bool_]]:
        """Positions of each row's steps, and which are there.

        A step that ends a sequence is followed by one of the next, behind those that
        are there again.

        Args:
            starts: int64 ``[S]``.
            stop: One past the newest row.

        Returns:
            int64 and bool ``[S, length, n_step]``; a step beyond its part is replaced
            by the last step of the part.
        """
        begin = np.array(self.origins)
        part = np.searchsorted(begin, starts, side="right") - 1
        fresh = self.length - self.overlap
        number = ((starts - begin[part]) // self.length * fresh)[:, None, None]
        steps = np.arange(self.length)[:, None] + np.arange(self.n_step)
        steps = number + steps
        last = self._steps(begin, stop)[part, None, None] - 1
        there = steps <= last
        steps = np.minimum(steps, last)
        sequence = np.maximum(steps - self.overlap, 0) // fresh
        behind = begin[part, None, None] + sequence * self.overlap + steps
        # Its own rows, and not those of the one before that they are again: the oldest
        # sequence's are overwritten.
        own = starts[:, None, None] + steps - number
        found: Ids = np.where(steps - number < self.length, own, behind)
        return found, there


class SequenceStorage(RingStorage):
    """A storage that keeps sequences where the actor is recurrent.

    Attributes:
        recurrent_actor: Whether it is.
        sequence_length: Rows of a sequence: the algorithm's ``update_every``.
        overlap_length: Rows that a sequence shares with the one before.
        non_overlap_length: Its other rows.
    """

    _fixed: ClassVar[dict[str, str]] = RingStorage._fixed | dict.fromkeys(
        ("sequence_length", "overlap_length", "non_overlap_length", "recurrent_actor"),
        "Make another storage, with an actor and an algorithm's update_every that give it.",
    )
    _n_step: int = 1
    _gammas: Gammas | None = None

    def __init__(
        self,
        size: int,
        device: Any,
        actor: Any,
        algorithm: Any,
        envs: Any,
        *,
        path: StrPath | None = None,
        resume: bool = False,
    ) -> None:
        """Make a storage; see `RingStorage`. Sequences are kept twice the size."""
        self.recurrent_actor = bool(actor.is_recurrent)
        self._grid: Grid | None = None
        # Whether the newest rows are a slice of somebody else's.
        self._apart = False
        if self.recurrent_actor:
            length = int(algorithm.update_every)
            self.sequence_length = length
            self.overlap_length = int(actor.sequence_overlap * length)
            self.non_overlap_length = length - self.overlap_length
            self.staged_overlap: Mapping[str, Any] | None = None
            self._grid = Grid(length, [0], self.overlap_length, self._n_step)
            size = self._doubled(size)
        else:
            self._unstored = (RHS, RHS2)
        super().__init__(size, device, actor, algorithm, envs, path=path, resume=resume)
        self._random = np.random.default_rng(self._seed)

    def _doubled(self, size: int) -> int:
        """Rows of whole sequences, twice as many for those that are stored twice."""
        return int(size) // self.sequence_length * self.sequence_length * 2

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """See `RingStorage`; of sequences, `max_size` is doubled as the size is."""
        if parameter_name == "max_size" and self._grid is not None:
            check_counts(self.sequence_length, max_size=new_parameter_value)
            new_parameter_value = self._doubled(new_parameter_value)
        super().update_storage_parameter(parameter_name, new_parameter_value)

    def _recall(self) -> None:
        """Restore the grid; a new writer begins a part of it."""
        super()._recall()
        if self._grid is not None:
            origins = self._made.statistics.get(KEY, {}).get("grid", [0])
            self._grid.origins = [int(origin) for origin in origins]
            self._start(int(self._made.heads[0]))

    def _note(self) -> None:
        """Store grid and gammas with the data, without those of overwritten rows."""
        first = int(self._made.span.first[0])
        state: dict[str, Any] = {}
        if self._grid is not None:
            past = [n for n, origin in enumerate(self._grid.origins) if origin <= first]
            self._grid.origins = self._grid.origins[past[-1] if past else 0 :]
            state["grid"] = self._grid.origins
        if self._gammas is not None:
            self._gammas.forget(first)
            state[GAMMAS] = [self._gammas.begins, self._gammas.values]
        self._made.set_statistics({**self._made.statistics, KEY: state})

    def _start(self, position: int) -> None:
        """Restart the grid."""
        assert self._grid is not None
        self._grid.start(position)
        self._note()

    def _interrupt(self) -> None:
        """See `RingStorage`; whole sequences need no grid of their own."""
        super()._interrupt()
        if self._grid is None or self._ring is None:
            return
        self._apart = True
        head = int(self._ring.heads[0])
        if self._n_step > 1 or (head - self._grid.origins[-1]) % self.sequence_length:
            self._start(head)

    def insert_transition(self, sample: Mapping[str, Any]) -> None:
        """Insert one step of every environment; see `RingStorage`.

        Where it begins a sequence, the end of the one before is inserted again first.
        """
        if self._grid is not None:
            self._settle()
            _, stop = self._alive()
            if self._apart:
                self._start(stop)
                self._apart = False
            since = stop - self._grid.origins[-1]
            again = self.overlap_length and since % self.sequence_length == 0
            if since and again:
                self._append_again(self.overlap_length)
        super().insert_transition(sample)

    def _append_again(self, count: int) -> None:
        """Insert copies of the newest rows."""
        first, stop = max(0, self.size - count), self._alive()[1]
        rows = self._columns(self.get_data_slice(first, self.size))
        self._copying(stop - (self.size - first), stop, self.size - first)
        self._append(rows)

    def _copying(self, first: int, stop: int, shift: int) -> None:
        """Keep the gammas of rows that are about to be copied, for their copies."""
        if self._gammas is None:
            return
        before = self._gammas.begins.copy()
        self._gammas.copied(first, stop, shift)
        if self._gammas.begins != before:
            self._note()

    def get_all_buffer_data(self, data_to_cpu: bool = False) -> Mapping[str, Any]:
        """All rows inserted since the last reset; of sequences, those that are whole.

        Args:
            data_to_cpu: Keep the newest rows as well, for `reset` to begin with.
        """
        found = super().get_all_buffer_data(data_to_cpu)
        if self._grid is None or not isinstance(found, Slice):
            return found
        first, stop = found.range
        if data_to_cpu:
            ahead = max(0, self.size - self.overlap_length)
            self.staged_overlap = self.get_data_slice(ahead, self.size)
        return self._sliced(first, stop - (stop - first) % self.sequence_length)

    def _owns(self, rows: tuple[int, int]) -> bool:
        """Return whether these are the forgotten rows, except half a sequence."""
        if self._grid is None or self._forgotten is None:
            return super()._owns(rows)
        return rows[0] == self._forgotten[0] and rows[1] <= self._forgotten[1]

    def reset(self) -> None:
        """Forget the rows inserted since the last reset; begin with what was kept."""
        super().reset()
        if self._grid is not None and self.staged_overlap is not None:
            staged, self.staged_overlap = self.staged_overlap, None
            if self.overlap_length:
                self._settle()
                self._append(self._columns(staged))

    def _moved(self, shift: int) -> None:
        if self._grid is not None:
            self._grid.moved(shift, self._mark)
            self._note()

    def _sequences(self, mini_batch_size: int) -> dict[str, Any]:
        """A batch of whole sequences, ``[S * length, *shape]``; hidden states first."""
        assert self._grid is not None
        length = self.sequence_length
        first, stop = self._alive()
        count = mini_batch_size // length + 1
        starts = self._grid.starts(first, stop)
        if self._ring is None or not len(starts):
            raise EmptyError(
                f"cannot draw {count} sequences from {stop - first} rows: a sequence "
                f"needs {length} rows in order and {self._n_step - 1} more steps. "
                "Insert transitions first."
            )
        env_ids, starts, extra = self._chosen(starts, count)
        sequences = starts[:, None] + np.arange(length)
        drawn = self._ring.take(np.repeat(env_ids, length), sequences.reshape(-1))
        fields = {path: drawn.fields[path] for path in self._paths}
        if self._n_step > 1:
            fields |= self._folded(env_ids, starts, stop, fields)
        hidden = [path for path in fields if path.split("/")[0] in (RHS, RHS2)]
        fields |= {path: fields[path][::length] for path in hidden}
        return self._tensors(fields) | extra

    def _chosen(self, starts: Ids, count: int) -> tuple[Ids, Ids, dict[str, Any]]:
        """Draw sequences uniformly: environments, starts, and the batch's extras."""
        chosen = starts[self._random.integers(len(starts), size=count)]
        return self._random.integers(self._made.num_envs, size=count), chosen, {}

    def _folded(
        self, env_ids: Ids, starts: Ids, stop: int, fields: dict[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """Return rewards over n steps up to the first end, and the last next values.

        As `NStep` does, except that a row's steps may lie in two sequences. Where steps
        are missing, ``n_step`` counts the summed steps.
        """
        assert self._grid is not None
        ring, envs = self._made, env_ids[:, None, None]
        sequences, there = self._grid.following(starts, stop)
        ends = ring.get_field(ENDED, envs, sequences).astype(bool)
        rewards = ring.get_field(REW, envs, sequences)
        assert self._gammas is not None
        gammas = self._gammas.at(starts[:, None] + np.arange(self.sequence_length))
        summed, sums = nstep_sums(rewards, ends, there, gammas)
        count = summed.sum(-1)
        last = np.take_along_axis(sequences, count[..., None] - 1, -1)[..., 0]
        found: dict[str, NDArray[Any]] = {REW: sums.reshape(fields[REW].shape).astype(np.float32)}
        for path in self._paths:
            if path.split("/")[0] in (OBS2, RHS2, DONE2):
                array = ring.get_field(path, env_ids[:, None], last)
                found[path] = array.reshape(fields[path].shape)
        short = (count < self._n_step) & ~(ends & summed).any(-1)
        if short.any():
            found[N_STEP] = np.where(short, count, self._n_step).reshape(-1, 1)
        return found

    def _batches(self, num_mini_batch: int, size: int) -> Iterator[dict[str, Any]]:
        self._settle()
        for _ in range(num_mini_batch):
            yield self._sequences(size)
