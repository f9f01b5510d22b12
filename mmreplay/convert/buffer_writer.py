"""Rows of a buffer that was loaded past the page cache, asked for where they fit.

Who loads a buffer often draws from it next. Found on the disk, its first batches take
ten times as long as in memory; so a thread asks for the files, while the caller goes
on. Nobody waits for it, and what goes wrong with it goes wrong with nothing else.

Rows put into the files of a new buffer, which appears whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.new_generation import NewGeneration
from mmreplay.buffer.statistics import write_statistics
from mmreplay.convert.base import Block, Notes, Writer
from mmreplay.convert.description import PRIORITY, Description
from mmreplay.convert.direct_writer import DirectWriter, laying
from mmreplay.convert.episode_ends import alone, check_env_ids
from mmreplay.convert.staging import Staging
from mmreplay.convert.stored_priorities import PriorityWriter
from mmreplay.disk.files import File
from mmreplay.disk.filesystem import NETWORK, file_system
from mmreplay.episodes import ALL_FLAGS, CUT, FINAL, START, TERMINATED, TRUNCATED
from mmreplay.errors import ReplayError, SchemaError, SourceError
from mmreplay.format.metadata import Metadata
from mmreplay.process import Worker
from mmreplay.ring import Span
from mmreplay.storage.layout import SUMS, record_layout
from mmreplay.storage.memory_usage import available_nbytes
from mmreplay.storage.store import CheckedStore
from mmreplay.verify.boundaries import alone_problem, names, pair_problem

SHARE = 4
"""Of the memory that is available files take one part of so many, or are left alone."""


def warm(paths: Sequence[Path]) -> Worker[None] | None:
    """Begin to read files into memory, if there is plenty for them.

    Returns:
        The worker that asks; it does not keep the interpreter from ending.
    """
    if not paths:
        return None
    with suppress(OSError, RuntimeError):
        if sum(path.stat().st_size for path in paths) <= available_nbytes() // SHARE:
            worker: Worker[None] = Worker("mmreplay-warm", partial(_ask, list(paths)))
            worker.start()
            return worker
    return None


def _ask(paths: list[Path], _: Worker[None]) -> None:
    for path in paths:
        # Removed meanwhile, or on a device that fails: who draws is told.
        with suppress(ReplayError):
            file = File.open(path, None)
            try:
                file.will_need(0, file.nbytes)
            finally:
                file.close()


NONE = ALL_FLAGS + 1
"""Stands for the flags of the row before an environment's first."""


class BufferWriter(Writer):
    """Writes a new buffer; see `Writer` for what each method owes.

    Every row is checked: its place, its flags alone and after those of the row
    before, and its ends against its flags.
    """

    def __init__(
        self, target: Path, description: Description, metadata: Metadata,
        overwrite: bool,
    ) -> None:  # fmt: skip
        self.nbytes = 0
        self.notes = Notes()
        self._description = description
        self._metadata = metadata
        self._served = record_layout(description.schema).served
        self._paths = [p for p in description.schema.paths if p not in self._served]
        self._kept = np.maximum(
            description.first, description.stop - metadata.ring.capacity
        )
        self._next = description.first.copy()
        self._last = np.full(description.num_envs, NONE, np.uint8)
        self._tell_dropped()
        self._staging = Staging(target, overwrite=overwrite, folder=True)
        self._new: NewGeneration | None = None
        self._laying: DirectWriter | None = None
        self._priorities: PriorityWriter | None = None
        try:
            self._refuse_network()
            if description.priorities:
                self._priorities = PriorityWriter(
                    self._staging.path, metadata, description.priorities
                )
            self._new = NewGeneration(self._staging.path, metadata)
            self._reserve_holes(self._new.store)
            span = Span(self._kept, description.stop)
            self._laying = laying(self._new.store, self._paths, span)
        except BaseException:
            self.abort()
            raise

    def _tell_dropped(self) -> None:
        dropped = int((self._kept - self._description.first).sum())
        self._drops = dropped > 0
        if dropped:
            self.notes.note(
                f"the oldest {dropped:,} rows were left out: the capacity is "
                f"{self._metadata.ring.capacity:,} rows per environment"
            )

    def _refuse_network(self) -> None:
        kind = file_system(self._staging.path)
        if kind in NETWORK:
            raise SchemaError(
                f"{self._staging.target} is on a network file system ({kind}), "
                "expected a local one for a buffer; load to a local disk and copy it"
            )

    def _reserve_holes(self, store: CheckedStore) -> None:
        """Reserve rows before the oldest that are summed with it, and never written.

        A hole that is read through a mapping is a SIGBUS where tmpfs is full.
        """
        ring, kept = self._metadata.ring, self._kept
        begins = kept // ring.block_rows * ring.block_rows
        summed = begins + ring.block_rows <= self._description.stop
        for env_id in np.flatnonzero((begins < kept) & summed).tolist():
            where = ring.stretch(env_id, int(begins[env_id]), int(kept[env_id]))
            for row, step, count in where:
                for file in store.files:
                    if file.path.name != SUMS:
                        nbytes = file.nbytes // ring.num_rows
                        span = step * (count - 1) + 1
                        file.allocate(row * nbytes, span * nbytes)

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        if not len(block):
            return
        assert self._laying is not None
        self._check_places(block)
        self._check_fields(block)
        if self._drops:
            block = block.taken(block.positions >= self._kept[block.env_ids])
        if len(block):
            self._laying.write(block)
        if self._priorities is not None:
            self._priorities.write(
                block.env_ids, block.positions, block.columns[PRIORITY]
            )

    def _check_places(self, block: Block) -> None:
        """Check that each environment goes on where it was, with flags that fit.

        Raises:
            SourceError: It does not.
        """
        env_ids, description = block.env_ids, self._description
        check_env_ids(env_ids, description.num_envs)
        ids, positions, flags = env_ids, block.positions, block.flags
        begins = np.zeros(1, np.int64)
        if not alone(ids):
            order = np.argsort(ids, kind="stable")
            ids, positions, flags = ids[order], positions[order], flags[order]
            begins = np.flatnonzero(np.diff(ids, prepend=-1))
        counts = np.diff(begins, append=len(ids))
        here = ids[begins]
        first, expected = self._next[here] - begins, np.arange(len(ids))
        # Of rows of one environment a number is added, not an array that takes longer.
        expected += first if len(first) == 1 else np.repeat(first, counts)
        self._refuse(ids, positions, expected, positions != expected, "position")
        stops = self._next[here] + counts
        if (stops > description.stop[here]).any():
            which = int(here[np.argmax(stops > description.stop[here])])
            raise SourceError(
                f"environment {which}: got rows up to position "
                f"{int(stops[here == which][0])}, expected them to stop at "
                f"{int(description.stop[which])}; the source is damaged"
            )
        before = np.concatenate([flags[:1], flags[:-1]])
        before[begins] = self._last[here]
        self._check_flags(ids, positions, before, flags)
        self._next[here] = stops
        self._last[here] = flags[begins + counts - 1]

    def _refuse(
        self, ids: NDArray[np.int64], got: NDArray[np.int64],
        expected: NDArray[np.int64], bad: NDArray[np.bool_], what: str,
    ) -> None:  # fmt: skip
        if bad.any():
            which = int(np.argmax(bad))
            raise SourceError(
                f"environment {ids[which]}: got {what} {got[which]}, expected "
                f"{expected[which]}; rows of one environment follow each other, oldest "
                "first: the source is damaged, or was reordered"
            )

    def _check_flags(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64],
        before: NDArray[np.uint8], flags: NDArray[np.uint8],
    ) -> None:  # fmt: skip
        law = _law(self._metadata.autoreset == "next_step")
        # Of most rows nothing is told, nor of those before: they may follow each other.
        told_of = np.flatnonzero((before | flags) != 0)
        marks = flags[told_of]
        good = law[np.minimum(before[told_of], NONE), marks]
        good &= (positions[told_of] != 0) | ((marks & START) != 0)
        if good.all():
            return
        which = int(told_of[np.argmin(good)])
        got, earlier = int(flags[which]), int(before[which])
        told = "" if earlier == NONE else f" after {names(earlier)}"
        follows = self._metadata.autoreset == "next_step"
        expected = alone_problem(got)
        if not expected and earlier != NONE:
            expected = pair_problem(earlier, got, follows)
        raise SourceError(
            f"environment {ids[which]}, position {positions[which]}: got flags "
            f"{names(got)}{told}, expected {expected or 'START at the first row'}; the "
            "source is damaged, or was edited"
        )

    def _check_fields(self, block: Block) -> None:
        """Check that each column is of its field's shape and dtype.

        Raises:
            SourceError: One is missing or differs, or ends contradict the flags.
        """
        fields = self._description.schema.fields
        for path in fields:
            column = block.columns.get(path)
            want = (len(block), *fields[path].shape)
            if (
                column is None
                or column.dtype != fields[path].numpy
                or (column.shape != want)
            ):
                got = "nothing" if column is None else f"{column.dtype}{column.shape}"
                raise SourceError(
                    f"field {path!r}: got {got}, expected {fields[path].numpy}{want}; "
                    "the source differs from its description"
                )
        self._check_ends(block)

    def _check_ends(self, block: Block) -> None:
        """Refuse ends that somebody edited without the flags, which are the truth."""
        for path, role in self._served.items():
            bit = TERMINATED if role == "terminated" else TRUNCATED
            given = block.columns[path].astype(bool)
            told = (block.flags & bit) != 0
            bad = told & ~given
            extra = given & ~told
            if role == "truncated":
                # A row that says CUT reports the step before it as truncated.
                alike = block.env_ids[1:] == block.env_ids[:-1]
                extra[:-1] &= alike & ((block.flags[1:] & CUT) == 0)
                extra[-1] = False
            bad |= extra & ((block.flags & FINAL) == 0)
            if bad.any():
                which = int(np.argmax(bad))
                raise SourceError(
                    f"field {path!r}, environment {block.env_ids[which]}, position "
                    f"{block.positions[which]}: got {bool(given[which])}, expected "
                    f"{bool(told[which])} as the flags say; change '_flags' as well, "
                    "or drop the description to have ends found anew"
                )

    def finish(self) -> None:
        """See `Writer.finish`."""
        stop = self._description.stop
        if (self._next != stop).any():
            which = int(np.argmax(self._next != stop))
            raise SourceError(
                f"environment {which}: got rows up to position {self._next[which]}, "
                f"expected them up to {stop[which]}; the source was cut"
            )
        assert self._new is not None
        assert self._laying is not None
        # Blocks are summed as they are written.
        self._laying.finish()
        self._new.finish(stop, self._kept)
        if self._priorities is not None:
            # Closed, they speak of durable rows alone, which these now are.
            self._priorities.finish()
        folder = self._staging.path
        if self._description.statistics:
            write_statistics(folder, self._description.statistics)
        self._new.publish()
        past = self._laying.past
        self._close()
        self.nbytes = self._staging.publish()
        folder = self._staging.target / self._metadata.folder
        warm([folder / name for name in past])

    def _close(self) -> None:
        if self._laying is not None:
            self._laying.close()
        if self._priorities is not None:
            column, self._priorities = self._priorities, None
            column.close()
        if self._new is not None:
            new, self._new = self._new, None
            new.close()

    def abort(self) -> None:
        """See `Writer.abort`."""
        self._close()
        self._staging.abort()


@cache
def _law(final_follows: bool) -> NDArray[np.bool_]:
    """Which flags may follow which: bool ``[65, 256]``, row 64 for no row before."""
    alone = np.array([not alone_problem(flags) for flags in range(256)])
    law = np.zeros((NONE + 1, 256), bool)
    law[NONE] = alone
    for before in range(NONE):
        if alone[before]:
            fits = [not pair_problem(before, f, final_follows) for f in range(NONE)]
            law[before, :NONE] = alone[:NONE] & fits
    return law
