"""One open generation of a buffer: what is alive, what may be drawn, and its data.

The read path, in this order: a sampler draws steps from the reader, which is its view
of the buffer; their rows are copied; the reader rechecks which of the copied rows may
have been overwritten during the copy; the others are the batch.

Rows are copied first and checked afterwards because the writer may live in another
process and waits for no reader. Before it overwrites a row it publishes a limit, so
that the limits read after the copy say exactly which rows may be torn.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay import kernels
from mmreplay.arguments import integer
from mmreplay.batch import Batch
from mmreplay.buffer.draw import (
    DrawCount,
    LimitsBefore,
    PendingDraw,
    batch_transform,
    check_fields,
    draw_of,
    fields_under,
    integers,
    left_of,
    newest_steps,
    next_paths,
    num_drawn,
    oldest_steps,
    steps_of,
)
from mmreplay.buffer.open_files import OpenFiles
from mmreplay.buffer.read_plan import Fields, Ids, ReadPlan
from mmreplay.buffer.value_reader import ValueReader, decoded
from mmreplay.disk.files import File
from mmreplay.episodes import (
    CUT,
    FINAL,
    TERMINATED,
    TRUNCATED,
    EpisodeIndex,
    fold_table,
    legal_start_table,
)
from mmreplay.episodes.column_index import ColumnIndex
from mmreplay.episodes.starts import BufferIdentity, EpisodeSteps, StartTable, StartView
from mmreplay.errors import EmptyError, FailedError, SchemaError, StaleError, StarvedError, shown
from mmreplay.ragged import Ragged
from mmreplay.ring import Span
from mmreplay.samplers.base import Draw, Sampler, require_integer, traits_of
from mmreplay.samplers.holding import Claims, bookmark_of, put_back, threads, unmoved
from mmreplay.samplers.uses import UseCounter, counters_in
from mmreplay.schema.convert import array_of, on_host
from mmreplay.storage.commit_state import DISCARDED_ROWS
from mmreplay.storage.gather import SPLIT_ROWS, ColumnLayouts, Records, after
from mmreplay.storage.layout import record_layout, served_ends
from mmreplay.transforms.base import Asked, Direct, FoundRows, RowPlan, RowReads, Sums

if TYPE_CHECKING:
    from mmreplay.transforms.base import Transform

MAX_REDRAWS = 100
SCAN_ROWS = 8192
SERVED = {"terminated": TERMINATED, "truncated": TRUNCATED}
_kernel = kernels.load("steps")


class ReplacedError(FailedError):
    """Another generation replaced this one: draw from that one."""


class GenerationReader(StartView):
    """Reads one generation of an open buffer, and is the view that samplers draw from.

    A draw looks at `starts` first and keeps to that index until it ends. Threads: hold
    `lock` from there to the end of the draw; copying rows needs no lock.

    Readers of one buffer share one lock: a resize hands it on, so that a thread that
    waits for it with the former reader, and samplers that are drawn from through
    either, are excluded by the same lock.

    There is one reader, and so one view, per generation, and `starts` is the same
    object while nothing changed: samplers of windows, restricted views and priorities
    compare both by identity.

    Attributes:
        files: The generation's open files.
        home: Identity of the buffer, for samplers that keep something beside it.
        lock: Shared by the readers of all generations of an open buffer.
        replaced: Another generation has replaced this one.
        num_illegal: Rows within `starts`, as last looked at, that are no legal start.
        derived: Next observations are read from the following row, where transforms do
            not leave them out.
        next_paths: Path of each observation to the name of its derived next one.
    """

    # Slots: of an object with more than 30 attributes Python looks each up in a hash
    # table, which is 0.3 of the 10 µs that a draw of 256 small steps takes.
    __slots__ = (
        "__weakref__",
        "_after",
        "_afters",
        "_agent_ends",
        "_apart",
        "_as_stored",
        "_before",
        "_bfloat16",
        "_bits",
        "_column_indexes",
        "_columns",
        "_commit",
        "_final_follows",
        "_foreign_commit",
        "_index",
        "_indexed",
        "_later",
        "_layouts",
        "_legal_table",
        "_num_records",
        "_numbered",
        "_of",
        "_packed",
        "_pairs",
        "_plain_reads",
        "_ring",
        "_schema",
        "_served",
        "_single",
        "_span",
        "_step_nbytes",
        "_store",
        "_transform",
        "_values",
        "_warned_of_is_first",
        "derived",
        "draws",
        "files",
        "home",
        "lock",
        "next_paths",
        "num_illegal",
        "replaced",
    )

    def __init__(
        self,
        files: OpenFiles,
        transforms: Sequence[Transform] = (),
        former: GenerationReader | None = None,
    ) -> None:
        """Read a generation.

        Args:
            files: Its open files.
            transforms: What draws make of stored steps, in order.
            former: The reader of the generation before, which hands its lock on.

        Raises:
            SchemaError: The transforms do not fit.
        """
        metadata = files.metadata
        schema, ring, commit = metadata.schema, metadata.ring, files.commit
        self.lock: threading.RLock = threading.RLock() if former is None else former.lock
        self.files, self.replaced = files, False
        # Of all generations, as the lock is.
        self.draws: DrawCount = DrawCount() if former is None else former.draws
        self._store, self._commit, self._schema, self._ring = (files.store, commit, schema, ring)
        # Only another process's record changes without a call of this process.
        self._foreign_commit = commit if commit.follows else None
        self.home = identity_of(files)

        transform = batch_transform(transforms, metadata) if transforms else None
        self._transform = transform
        self._before = 0 if transform is None else transform.before
        self._after = 1 if transform is None else transform.after
        self._final_follows = metadata.autoreset == "next_step"
        self._plan_reads(files)
        if transform is None:
            paths = [path for path, f in schema.fields.items() if f.dtype == "bfloat16"]
            self._bfloat16 = frozenset(paths) | {self.next_paths.get(path, path) for path in paths}
            reach: dict[str, tuple[int, ...]] = {
                path: (0, 1) if path in self.next_paths else (0,) for path in schema.paths
            }
        else:
            self._bfloat16 = transform.bfloat16
            reach = transform.reach
        self._step_nbytes = sum(
            len(offsets) * schema.fields[path].nbytes for path, offsets in reach.items()
        )
        self._warned_of_is_first = False
        self._column_indexes: dict[str, ColumnIndex] = {}

        self._index = self._make_index()
        self._indexed: Span | None = None
        self.num_illegal = 0
        self._span = self._make_span(commit.heads, commit.tails)

    def _plan_reads(self, files: OpenFiles) -> None:
        """Find out which fields lie together, and which are read from flags."""
        store, schema = files.store, files.metadata.schema
        self._served = {path: SERVED[role] for path, role in served_ends(schema).items()}
        transform, self._as_stored = self._transform, frozenset[str]()
        if transform is not None:
            self._as_stored = transform.as_stored
        # Images are decoded when a batch is complete; functions get them decoded.
        has_images = bool(schema.varying) and schema.drawn is not schema
        self._later = has_images and (transform is None or transform.names is not None)
        # Ends per agent are stored as fields; cuts are in the flags only.
        agents = schema.num_agents is not None
        self._agent_ends = {
            role: path for role in SERVED if agents and (path := schema.role(role)) is not None
        }
        self._bits = bytes(self._served.values())
        self.derived = self.derives_next
        if self._transform is not None:
            self.derived = self._transform.derived
        self.next_paths = next_paths(schema) if self.derived else {}
        together = store.packed & self.next_paths.keys()
        self._pairs = {p: n for p, n in self.next_paths.items() if p in together}
        self._apart = tuple(p for p in self.next_paths if p not in together)
        self._packed = tuple(p for p in schema.paths if p in store.packed)
        self._values: ValueReader | None = None
        if store.heap is not None:
            self._values = ValueReader(files, store.heap, self.next_paths, self._dead)
        alone = store.packed | self._served.keys()
        self._single = tuple(p for p in schema.paths if p not in alone)
        table = legal_start_table if self._transform is None else fold_table
        self._legal_table = table(derived=self.derived)
        apart = self._single or self._apart or not self._packed
        # Records of a step that hold all of its batch: its own, or its own and the
        # one after; 0 where fields lie elsewhere too.
        self._num_records = 0 if apart else 2 if self._pairs else 1
        # The same fields as columns: of the step's own record, and of the one after.
        columns = [(path, 0, None) for path in self._packed]
        columns += [(path, 1, None) for path in self._pairs]
        names = (*self._packed, *self._pairs.values())
        self._numbered = tuple((str(at), name) for at, name in enumerate(names))
        self._columns = ColumnLayouts(record_layout(schema).record, columns)
        self._layouts: dict[tuple[str, ...], ColumnLayouts] = {}
        self._afters = {after(p): n for p, n in self._pairs.items()}
        following = tuple(path for path in schema.paths if path in self.next_paths)
        self._plain_reads = ((schema.paths, 0), (following, 1))

    def still(self) -> GenerationReader:
        """Return another view of the generation; see `ReplayBuffer.still_view`.

        Raises:
            FailedError: The buffer is open for writing.
        """
        files = self.files
        if files.appender is not None:
            # What it publishes while rows are copied would not be seen.
            raise FailedError(
                f"a still view of {files.name} needs a buffer opened with mode='r', but "
                "this one is open for writing. Open its path once more with "
                "ReplayBuffer.open, or draw from view."
            )
        return GenerationReader(replace(files, commit=copy.copy(files.commit)))

    def __repr__(self) -> str:
        """Say what it is."""
        buffer = self.home.folder or "a buffer in RAM"
        rows = int(self._span.lengths.sum())
        known = "replaced" if self.replaced else f"{rows:,} rows"
        return f"<View of {buffer}: {known}>"

    @property
    def data_files(self) -> list[File]:
        """Open files that hold the rows."""
        return self._store.files

    @property
    def data_paths(self) -> list[Path]:
        """Paths of the same files and, in a compressed buffer, of its shards."""
        return [*(file.path for file in self._store.files), *self._store.shard_paths()]

    # The view: what is alive, and which steps are legal starts.

    def refresh(self) -> None:
        """Look at what a writer in another process published since."""
        if self._foreign_commit is not None:
            with self.lock:
                self._foreign_commit.refresh()

    @property
    def heads(self) -> Ids:
        """int64 ``[E]``: rows below are written."""
        return self._commit.heads

    @property
    def heap_heads(self) -> Ids | None:
        """int64 ``[E]``: bytes of values that vary written so far; None without any."""
        return self._commit.heap_heads

    @property
    def heap_used(self) -> Ids | None:
        """int64 ``[E]``: bytes of values that vary in each heap; None without any."""
        # Heads last: the tails never fall, so that no difference is below 0.
        tails, heads = self._commit.heap_tails, self._commit.heap_heads
        return None if heads is None or tails is None else heads - tails

    @property
    def span(self) -> Span:
        """What is alive now."""
        heads, tails = self._commit.heads, self._commit.tails
        if heads is not self._of[0] or tails is not self._of[1]:
            self._span = self._make_span(heads, tails)
        return self._span

    def _make_span(self, heads: Ids, tails: Ids) -> Span:
        span = Span(np.maximum(tails, heads - self._ring.capacity), heads)
        self._of = (heads, tails)
        return span

    def _make_index(self) -> EpisodeIndex:
        return EpisodeIndex(
            self._ring.num_envs,
            derived=self.derived,
            final_follows=self._final_follows,
            before=self._before,
            after=None if self._transform is None else self._after,
        )

    @property
    def index(self) -> EpisodeIndex:
        """The episodes alive now."""
        with self.lock:
            self._update_index()
            return self._index

    def _update_index(self) -> Span:
        """Index the rows alive now, which a draw then keeps to."""
        span = self.span
        if span is not self._indexed:
            try:
                self._index.update(span, self._store.flags_between, self._new_flags)
            except BaseException:
                # Ctrl-C in the middle: rows half taken in would be counted twice.
                self._indexed = None
                self._index = self._make_index()
                raise
            self._indexed, self.num_illegal = span, self._index.num_illegal
        return span

    def _new_flags(self, env_ids: Ids, positions: Ids) -> NDArray[np.uint8]:
        """Flags of rows that the index takes in, and that copies look at from here."""
        return self._store.flags(self._ring.rows(env_ids, positions), new=True)

    @property
    def derives_next(self) -> bool:
        """Whether the schema stores no next observation of the observation it has."""
        role = self._schema.role
        return role("observation") is not None and role("next_observation") is None

    @property
    def steps(self) -> StartView:
        """The steps of windows and whole episodes; see `StartView.steps`."""
        return EpisodeSteps(self) if self.derived else self

    @property
    def starts(self) -> Span:
        """Where legal starts lie; see `StartView.starts`."""
        known, commit = self._span is self._indexed, self._commit
        if known and self._of[0] is commit.heads and self._of[1] is commit.tails:
            # Nothing came or went since the last look, as between most draws.
            return self._index.starts
        with self.lock:
            self._update_index()
            return self._index.starts

    def _indexed_rows(self) -> tuple[Span, EpisodeIndex]:
        """The rows whose flags are known, and the index of them.

        Newer rows may be published already; of their flags nothing is known.
        """
        index, known = self._index, self._indexed
        if known is None:
            # Drawn before this generation replaced another one.
            with self.lock:
                known, index = self._update_index(), self._index
        return known, index

    def legal(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Bool ``[B]``, which positions are legal starts; see `StartView.legal`.

        By their flags and those after, which is cheaper than a bisection.
        """
        legal = np.empty(len(positions), np.bool_)
        env_ids = np.ascontiguousarray(env_ids)
        positions = np.ascontiguousarray(positions)
        _kernel.legal(*self.table, env_ids, positions, legal)
        return legal

    @property
    def table(self) -> StartTable:
        """What kernels look legal starts up in."""
        heads = self._indexed_rows()[0].stop
        return (self._store.all_flags, *self._ring.shape, self._legal_table, heads, self._after)

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """Legal starts by rank; see `StartView.start_at`.

        Raises:
            StaleError: There are fewer legal starts.
        """
        self._indexed_rows()
        try:
            return self._index.start_at(ranks)
        except IndexError as error:
            raise StaleError(
                f"ranks must be below {self._index.num_legal}, the number of legal starts, "
                f"got {int(np.max(ranks))}. Draw ranks after a look at `view.starts`."
            ) from error

    def legal_before(self, env_ids: Ids, positions: Ids) -> Ids:
        """Ranks of positions; see `StartView.legal_before`."""
        return self._index.legal_before(env_ids, positions)

    def flags(self, env_ids: Ids, positions: Ids) -> NDArray[np.uint8]:
        """Flags of rows, uint8 ``[B]``."""
        return self._store.flags(self._ring.rows(env_ids, positions))

    def check_current(self) -> None:
        """Refuse a draw that would take samplers back to a former generation.

        Raises:
            ReplacedError: A thread replaced this generation since the view was taken.
        """
        if self.replaced:
            raise ReplacedError(
                "this view is out of date because the buffer was resized. Use `buffer.view` again."
            )

    def check_alive(self, env_ids: Ids, positions: Ids) -> None:
        """Refuse positions that are not alive.

        Raises:
            StaleError: A position was given up, or is not written yet.
            SchemaError: An environment is unknown.
        """
        if len(env_ids) and (env_ids.min() < 0 or env_ids.max() >= self._ring.num_envs):
            raise SchemaError(
                f"env_ids must be in [0, {self._ring.num_envs}), got values in "
                f"[{env_ids.min()}, {env_ids.max()}]. Environments are counted from 0."
            )
        span = self.span
        bad = (positions < span.first[env_ids]) | (positions >= span.stop[env_ids])
        if bad.any():
            which = int(np.flatnonzero(bad)[0])
            env_id, position = int(env_ids[which]), int(positions[which])
            raise StaleError(
                f"position {position} of environment {env_id} is not in the buffer, "
                f"which holds [{span.first[env_id]}, {span.stop[env_id]}). It was "
                "overwritten, cleared, or is not written yet."
            )

    # From a sampler to a batch.

    def sample(
        self, sampler: Sampler, batch_size: int, claims: Claims, contiguous: bool = False
    ) -> Batch:
        """Draw a batch and gather it; see `ReplayBuffer.sample`.

        Args:
            sampler: Draws.
            batch_size: Steps, or windows.
            claims: Gets what the draw takes, for the caller to store or to release.
            contiguous: See `ReplayBuffer.sample`.
        """
        # `integer` alone takes a tenth of a microsecond more, at every draw.
        if type(batch_size) is not int or batch_size < 1:
            integer("batch_size", batch_size, 1, "Pass a number of steps, such as 256.")
        try:
            draw, fields, stale = self._try_sample(sampler, int(batch_size), claims, contiguous)
            if stale is not None:
                draw, fields = self._redraw(sampler, draw, fields, stale, claims)
                if contiguous:
                    fields = _contiguous(fields)
        except MemoryError as error:
            length = getattr(sampler, "length", None)
            row_nbytes = self._schema.row_nbytes
            if self._values is not None:
                row_nbytes += self._values.average_nbytes(self.span, self.get_lengths)
            nbytes = int(batch_size) * row_nbytes * (length or 1)
            windows = "" if length is None else f" windows of {length} steps"
            size = f"about {nbytes:,}" if self._schema.varying else f"{nbytes:,}"
            raise MemoryError(
                f"batch_size: the stored fields of {batch_size}{windows} need "
                f"{size} bytes, which exceeds the memory. Draw several smaller "
                "batches."
            ) from error
        return self._batch(draw, fields)

    def _try_sample(
        self,
        sampler: Sampler,
        count: int,
        claims: Claims,
        contiguous: bool = False,
        again: bool = False,
    ) -> tuple[Draw, Fields, NDArray[np.bool_] | None]:
        """Draw, copy and recheck once: the draw, its data, and which of it is stale."""
        # `bookmark_of` and `Claims.call` are in line: calls are felt in a small batch.
        bookmark = getattr(sampler, "bookmark", None) or partial(bookmark_of, sampler)
        with self.lock:
            if self.replaced:
                self.check_current()
            draws, drawing, commit = self.draws, threads.drawing, self._commit
            before = commit.limits, commit.tails
            if not again or claims.number != draws.total:
                # Where others drew since, no earlier state is put back over theirs.
                claims.before, claims.sampler = bookmark(), sampler
            outer = drawing.claims
            if outer is None:
                draws.total += 1
            else:
                draws.count()
            claims.number = draws.total
            try:
                drawing.claims = claims
                draw = sampler.draw(self, count)
            except BaseException as error:
                # Before another thread draws; what it took is released by the caller.
                put_back(sampler, claims.before, error)
                raise
            finally:
                drawing.claims = outer
            claims.after = bookmark()
        fields = self.copy_draw(draw, contiguous)
        windows = draw.windows
        oldest = draw.positions if windows is None else windows.positions[:, 0]
        return draw, fields, self.stale(draw.env_ids, oldest, before)

    def put_back(self, sampler: Sampler, claims: Claims, error: BaseException) -> None:
        """Put a sampler back to before a sample that failed.

        Not where others have drawn since: what they drew would be drawn again.
        """
        with self.lock:
            if getattr(claims, "number", -1) != self.draws.total:
                return
            if hasattr(claims, "after") and unmoved(claims.after, bookmark_of(sampler)):
                put_back(sampler, claims.before, error)

    @property
    def batch_names(self) -> tuple[str, ...] | None:
        """Names of the fields of a batch; None where a function makes them."""
        if self._transform is not None:
            return self._transform.names
        return (*self._schema.paths, *self.next_paths.values())

    def check_sampler(self, sampler: Sampler) -> None:
        """Check the fields that a sampler names; see `check_fields`."""
        check_fields(sampler, self._schema, self._transform)

    def draw(self, sampler: Sampler, count: int) -> PendingDraw:
        """Draw now and copy later, by `gather`.

        Raises:
            ReplacedError: Another generation replaced this one.
        """
        with self.lock:
            self.check_current()
            before, claims = self.limits_before, Claims()
            self.draws.count()
            bookmark = bookmark_of(sampler)
            try:
                draw = claims.call(sampler.draw, self, count)
            except BaseException as error:
                claims.release()
                put_back(sampler, bookmark, error)
                raise
            return PendingDraw(sampler, draw, count, before, self.home, claims)

    def gather(self, pending: PendingDraw, *, skip: bool = False) -> Batch | None:
        """Copy the data of a draw, as whole as `sample` does.

        What was overwritten since is not copied at all: transforms know no such row.

        Args:
            pending: The draw, perhaps of a former generation.
            skip: Where nothing is left of a draw without replacement, return None:
                another draw would be what comes next.
        """
        sampler, draw, before = pending.sampler, pending.draw, pending.before
        now, overwritten = self.limits_before, None
        if now[0] is not before[0] or now[1] is not before[1]:
            overwritten = self.stale(draw.env_ids, oldest_steps(draw), before)
        if pending.home is not self.home:
            # The new generation holds what was alive at the resize, and no more.
            lost = oldest_steps(draw) < self.span.first[draw.env_ids]
            lost |= self._reaches_dropped(pending)
            overwritten = lost if overwritten is None else overwritten | lost
        if overwritten is not None and overwritten.any():
            indices, left = left_of(draw, ~overwritten)
            once = traits_of(sampler).once
            if once and skip and not len(indices):
                return None
            if once and len(indices):
                draw = left
            else:
                pending.claims.release()
                fresh = self.draw(sampler, pending.count)
                pending.claims.append(fresh.claims)
                draw, before = fresh.draw, fresh.before
        fields = self.copy_draw(draw)
        stale = self.stale(draw.env_ids, oldest_steps(draw), before)
        if stale is not None:
            if skip and traits_of(sampler).once and not len(left_of(draw, ~stale)[0]):
                return None
            draw, fields = self._redraw(sampler, draw, fields, stale, pending.claims)
        return self._batch(draw, fields)

    def _reaches_dropped(self, pending: PendingDraw) -> NDArray[np.bool_]:
        """Which steps reach rows that were dropped since the draw, bool ``[B]``."""
        draw, home, stop = pending.draw, pending.home, self.span.stop
        known = self.home.known(stop, home.generation, home.cut_epoch)
        if known is stop:
            return np.zeros(len(draw), bool)
        return newest_steps(draw) + max(1, self._after) >= known[draw.env_ids]

    def _redraw(
        self, sampler: Sampler, draw: Draw, fields: Fields, stale: NDArray[np.bool_], claims: Claims
    ) -> tuple[Draw, Fields]:
        """Replace a batch of which some rows were overwritten while they were copied.

        The whole batch is drawn again: steps of a small draw of their own would have
        the strata and the greatest weight of that draw. A sampler without replacement
        would lose what it drew, so there the rest is kept, without what is gone.
        """
        count = num_drawn(draw)
        once = traits_of(sampler).once
        for _ in range(MAX_REDRAWS):
            if once:
                indices, left = left_of(draw, ~stale)
                if len(indices):
                    return left, {path: a[indices] for path, a in fields.items()}
            # None of what the draw took is handed out.
            claims.release()
            draw, fields, overwritten = self._try_sample(
                sampler, count, claims, again=hasattr(claims, "number")
            )
            if overwritten is None:
                return draw, fields
            stale = overwritten
        raise StarvedError(
            f"gave up after {MAX_REDRAWS} attempts: the writer overwrote "
            f"{np.count_nonzero(stale)} of the {len(stale)} drawn steps before they "
            f"were read. Increase `capacity` (now {self.home.ring.capacity}) or lower "
            "`batch_size`."
        )

    def gather_draw(self, draw: Draw) -> Batch:
        """Gather exactly the steps of a draw that was made before, or elsewhere.

        Raises:
            StaleError: A step is not in the buffer, or cannot be drawn.
        """
        before = self.limits_before
        env_ids, positions = steps_of(draw)
        with self.lock:
            starts = self.starts
            legal = _kernel.all_legal(
                *self.table,
                starts.first,
                starts.stop,
                np.ascontiguousarray(env_ids),
                np.ascontiguousarray(positions),
            )
        if not legal:
            mask = draw.mask if draw.windows is None else draw.windows.mask
            self._refuse_illegal(env_ids, positions, mask)
        fields = self.copy_draw(draw)
        stale = self.stale(env_ids, positions, before)
        if stale is not None:
            which = int(np.flatnonzero(stale)[0])
            raise StaleError(
                f"position {positions[which]} of environment {env_ids[which]} was "
                "overwritten while it was read. Draw again."
            )
        return self._batch(draw, fields)

    def _refuse_illegal(self, env_ids: Ids, positions: Ids, mask: NDArray[np.bool_] | None) -> None:
        """Say which of some steps cannot be drawn.

        Args:
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``.
            mask: bool of N steps, of windows and episodes, which may hold steps of
                `steps` where it is false; None elsewhere.

        Raises:
            StaleError: One is not in the buffer, or is no legal start.
            SchemaError: An environment is unknown.
        """
        self.check_alive(env_ids, positions)
        with self.lock:
            legal = _are_starts(self, env_ids, positions)
            if mask is not None:
                legal |= ~mask.reshape(-1) & _are_starts(self.steps, env_ids, positions)
        illegal = np.flatnonzero(~legal)
        if len(illegal):
            which = int(illegal[0])
            raise StaleError(
                f"position {positions[which]} of environment {env_ids[which]} cannot "
                "be drawn as a transition: its next observation, or its window for "
                "transforms, is unknown. It is a final row, one of the newest rows, "
                "or the last before a gap: read its fields with get_field."
            )

    def take(self, env_ids: ArrayLike, positions: ArrayLike, key: int) -> Batch:
        """Gather given steps; see `ReplayBuffer.take`."""
        ids, pos = self._check_rows(env_ids, positions)
        return self.gather_draw(draw_of(ids.ravel(), pos.ravel(), key))

    def _batch(self, draw: Draw, fields: Fields) -> Batch:
        windows = draw.windows
        return Batch(
            fields,
            draw.env_ids,
            draw.positions,
            draw.probabilities,
            draw.weights,
            draw.mask if windows is None else windows.mask,
            self._bfloat16,
            draw.key,
            None if windows is None else windows.positions,
            draw.offsets,
            buffer=self.home.uuid,
        )

    # The recheck: which copied rows may have been overwritten while they were copied.

    @property
    def limits_before(self) -> LimitsBefore:
        """What to keep before rows are copied; see `stale`."""
        return self._commit.limits, self._commit.tails

    def stale(self, env_ids: Ids, positions: Ids, before: LimitsBefore) -> NDArray[np.bool_] | None:
        """Find the copied rows that may have been overwritten while they were copied.

        This comes after the copy, always. The writer publishes a limit before it
        overwrites the first row below it, a lap earlier: if the limits that are read
        now are those from before the copy, no copied byte can have changed; if they
        are higher, the rows a ring's slots below them are suspect, and no others.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, alive at that time; of steps that transforms
                fold, the rows before them count too.
            before: `limits_before` from before the copy.

        Returns:
            bool ``[B]``, or None for none.

        Raises:
            ReplacedError: See `check_uncut`.
        """
        if self._foreign_commit is not None:
            self.check_uncut()
        limits, tails = self._commit.limits, self._commit.tails
        # Values that vary are overwritten when a tail has passed their rows; other
        # rows below a tail are still intact, but transforms know none of them.
        watched = self._transform is not None or self._values is not None
        if limits is before[0] and (not watched or tails is before[1]):
            return None
        dead = self._overwritten(env_ids, positions)
        return dead if dead.any() else None

    def _overwritten(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Which steps' rows, and rows that transforms fold, may be overwritten now."""
        oldest = self._oldest_intact(env_ids)
        transformed = self._transform is not None
        dead: NDArray[np.bool_] = positions - self._before < oldest
        if transformed and dead.any():
            # Where the episode begins later, nothing before it was read.
            with self.lock:
                begun = self.index.begun(env_ids, positions)
            dead = np.maximum(positions - self._before, begun) < oldest
        if transformed:
            # Transforms ask the index for episodes, which knows no dropped row.
            dead |= positions < self.span.first[env_ids]
        return dead

    def _dead(self, env_ids: Ids, positions: Ids, *, alone: bool) -> NDArray[np.bool_]:
        """Which steps may be overwritten by now, alone or with what transforms read."""
        self.check_uncut()
        if alone:
            return positions < self._oldest_intact(env_ids)
        return self._overwritten(env_ids, positions)

    def _oldest_intact(self, env_ids: Ids) -> Ids:
        """Positions below which rows or their values may be overwritten, int64 [B]."""
        oldest: Ids = self._commit.limits[env_ids] - self._ring.slots
        if self._values is not None:
            oldest = np.maximum(oldest, self._commit.tails[env_ids])
        return oldest

    def check_uncut(self) -> None:
        """Refuse rows that were read beside a writer, after a look at its record.

        Raises:
            ReplacedError: A writer that began after a failed sync cut them, and may
                have written other rows there.
        """
        commit = self._foreign_commit
        if commit is not None:
            with self.lock:
                commit.refresh()
            if commit.discarded:
                raise ReplacedError(DISCARDED_ROWS)

    def intact(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Whether rows read until now were whole; see `transforms.base.BufferRows`."""
        self.check_uncut()
        intact: NDArray[np.bool_] = positions >= self._oldest_intact(env_ids)
        return intact

    def _check_not_overwritten(self, env_ids: Ids, positions: Ids, before: LimitsBefore) -> None:
        """Raise StaleError if rows were given up while they were copied."""
        if self.stale(env_ids, positions, before) is not None:
            self.check_alive(env_ids, positions)

    # Gathering: copies of steps, through the transforms or as they are stored.

    def copy_draw(self, draw: Draw, contiguous: bool = False) -> Fields:
        """Copy the data of a draw.

        Args:
            draw: Legal starts; of windows, every step is one.
            contiguous: Small fields, too, are arrays of their own.

        Returns:
            Per path ``[B, *shape]``, or ``[B, T, *shape]`` of windows.
        """
        fields = self._copy_draw(draw, contiguous)
        # Images that are left, once the other steps of windows are out.
        return decoded(fields) if self._later else fields

    def _copy_draw(self, draw: Draw, contiguous: bool) -> Fields:
        """The same, in which images may still have to be decoded."""
        windows, transform = draw.windows, self._transform
        if windows is None:
            if transform is None:
                fields = self.copy_steps(draw.env_ids, draw.positions, contiguous)
                if self._values is None:
                    return fields
                return self._values.with_values(fields, draw.env_ids, draw.positions)
            fields = transform.gather(self, draw.env_ids, draw.positions, draw.key, None)
            if draw.mask is not None:
                _clear_masked(fields, transform.unknown, draw.mask)
            return _contiguous(fields) if contiguous else fields
        shape = windows.positions.shape
        env_ids, positions = steps_of(draw)
        if transform is None:
            fields = self.copy_steps(env_ids, positions, contiguous)
            if self._values is not None:
                fields = self._values.with_values(fields, env_ids, positions, later=self._later)
        else:
            fields = transform.gather(self, env_ids, positions, draw.key, shape[1])
        fields = {path: a.reshape(*shape, *a.shape[1:]) for path, a in fields.items()}
        if transform is not None:
            _clear_masked(fields, transform.unknown, windows.mask)
        for path in fields_under(windows.first_only, fields):
            fields[path] = fields[path][:, 0]
        if contiguous:
            fields = _contiguous(fields)
        if windows.is_first is not None:
            if "is_first" in fields and not self._warned_of_is_first:
                self._warned_of_is_first = True
                warnings.warn(
                    "field 'is_first' has the name of the marks of episode starts "
                    "that a sampler of windows adds to batches. Batches hold the "
                    "field and not the marks: rename the field to have both.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            fields.setdefault("is_first", windows.is_first)
        return fields

    def references(self, paths: tuple[str, ...], env_ids: Ids, positions: Ids) -> Fields:
        """Fields as rows store them, with references where they vary."""
        return self._store.stored(self._ring.rows(env_ids, positions), paths)

    def copy_steps(self, env_ids: Ids, positions: Ids, contiguous: bool = False) -> Fields:
        """Copy steps as they are: stored fields, both ends, and next observations.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, alive and, where next observations are derived,
                legal starts.
            contiguous: Small fields, too, are arrays of their own.

        Returns:
            Per path ``[B, *shape]``.
        """
        known, index = self._indexed_rows()
        heads = known.stop
        # Records that are mapped are found and copied by one call.
        records = self._store.records
        if self._num_records and records is not None:
            return self._from_mapped_records(records, env_ids, positions, heads, index, contiguous)
        if self.derived:
            fields = self._with_next(env_ids, positions, heads, index)
        else:
            rows = np.empty(len(positions), np.int64)
            ends = self._find_rows(env_ids, positions, heads, index, rows)
            fields = self._fetch(rows, self._schema.paths)
            fields = self._add_ends(fields, ends, env_ids, positions, heads, index)
        return _contiguous(fields) if contiguous else fields

    def _from_mapped_records(
        self,
        records: Records,
        env_ids: Ids,
        positions: Ids,
        heads: Ids,
        index: EpisodeIndex,
        contiguous: bool,
    ) -> Fields:
        """Copy steps whose fields all lie in mapped records."""
        steps = (
            self._store.all_flags,
            np.ascontiguousarray(env_ids),
            np.ascontiguousarray(positions),
            heads,
            self._bits,
            index.bare,
            self._num_records,
        )
        fields: Fields = {}
        if contiguous:
            packed, ends = records.take_fields(*steps, self._columns)
            for number, name in self._numbered:
                fields[name] = packed[number]
        else:
            packed, ends = records.take(*steps)
            for path in self._packed:
                fields[path] = packed[path]
            for path, name in self._afters.items():
                fields[name] = packed[path]
        return self._add_ends(fields, ends, env_ids, positions, heads, index)

    def _find_rows(
        self, env_ids: Ids, positions: Ids, heads: Ids, index: EpisodeIndex, rows: Ids
    ) -> NDArray[np.bool_]:
        """Find rows, and those after if rows has two columns; return the ends."""
        ends = np.empty((len(self._bits), len(positions)), np.bool_)
        _kernel.locate_rows(
            self._store.all_flags,
            np.ascontiguousarray(env_ids),
            np.ascontiguousarray(positions),
            heads,
            *self._ring.shape,
            self._bits,
            index.bare,
            rows,
            ends,
        )
        return ends

    def _with_next(self, env_ids: Ids, positions: Ids, heads: Ids, index: EpisodeIndex) -> Fields:
        pairs = np.empty((len(positions), 2), np.int64)
        ends = self._find_rows(env_ids, positions, heads, index, pairs)
        rows = pairs[:, 0]
        fields: Fields = {}
        if self._single:
            fields = self._fetch(rows, self._single)
        if self._apart:
            next_obs = self._fetch(pairs[:, 1], self._apart)
            fields |= {self.next_paths[path]: next_obs[path] for path in self._apart}
        if self._packed:
            # The row after lies beside the row: both are read by one call.
            rows = pairs.reshape(-1) if self._pairs else rows
            packed = self._fetch(rows, self._packed)
            for path, array in packed.items():
                fields[path] = array[::2] if self._pairs else array
            fields |= {name: packed[path][1::2] for path, name in self._pairs.items()}
        return self._add_ends(fields, ends, env_ids, positions, heads, index)

    def _fetch(self, rows: Ids, paths: tuple[str, ...]) -> Fields:
        self._store.prefetch(rows, paths, now=True)
        return self._store.gather(rows, paths)

    def _add_ends(
        self,
        fields: Fields,
        ends: NDArray[np.bool_],
        env_ids: Ids,
        positions: Ids,
        heads: Ids,
        index: EpisodeIndex,
    ) -> Fields:
        # By number: iterating over an array takes three times as long.
        for kind, path in enumerate(self._served):
            fields[path] = ends[kind]
        if index.num_forced_truncations and (self._served or self._agent_ends):
            # Steps before a row that says so are reported as truncated.
            for path, flag in self._served.items():
                if flag == TRUNCATED:
                    forced = self._forced_truncations(env_ids, positions, heads)
                    fields[path] = forced | (fields[path] != 0)
            of_agents = self._agent_ends.get("truncated")
            if of_agents is not None and of_agents in fields:
                forced = self._forced_truncations(env_ids, positions, heads)
                fields[of_agents] = self._truncated_agents(fields, of_agents, forced)
        return fields

    def _truncated_agents(
        self, fields: Fields, path: str, forced: NDArray[np.bool_]
    ) -> NDArray[np.generic]:
        """Which agents are truncated, bool ``[B, num_agents]``.

        A forced truncation of a step truncates the agents that have not ended yet.
        """
        truncated, other = fields[path] != 0, self._agent_ends.get("terminated")
        ended = truncated if other is None else truncated | (fields[other] != 0)
        joined: NDArray[np.bool_] = truncated | (forced[..., None] & ~ended)
        return joined

    def _forced_truncations(self, env_ids: Ids, positions: Ids, heads: Ids) -> NDArray[np.bool_]:
        """Which steps the CUT flag of the next row truncates, bool ``[B]``."""
        # Reads published rows only: a hole of the file may raise SIGBUS.
        followed = positions + 1 < heads[env_ids]
        flags = self._store.flags(self._ring.rows(env_ids, positions + followed))
        forced: NDArray[np.bool_] = followed & ((flags & CUT) != 0)
        return forced

    # The buffer as transforms read it; see `transforms.base.BufferRows`.

    def plan(
        self, before: int, steps: int, direct: Direct, asked: Asked, sums: Sums | None
    ) -> ReadPlan:
        """Lay out what transforms read of each draw."""
        return ReadPlan(
            self._store,
            self._served,
            self._agent_ends.get("truncated"),
            before,
            steps,
            direct,
            asked,
            sums,
        )

    def find(self, plan: RowPlan, env_ids: Ids, positions: Ids) -> FoundRows:
        """Look around legal starts, and read; see `transforms.base.BufferRows`."""
        known = self._indexed
        if known is None:
            known = self._indexed_rows()[0]
        found = plan.find(env_ids, positions, known.stop, self._read)
        if self._values is None:
            return found
        # References of two fields look alike: each becomes its value while it is known
        # which field it is of.
        return found._replace(
            fields=self._values.with_values(
                found.fields, env_ids, positions, as_stored=self._as_stored, later=self._later
            ),
            columns={
                where: self._values.with_values(
                    columns, env_ids, positions, as_stored=self._as_stored
                )
                for where, columns in found.columns.items()
            },
        )

    def read(self, paths: tuple[str, ...], env_ids: Ids, positions: Ids) -> Fields:
        """Copy stored fields of rows, nothing derived but the two ends."""
        return self._read_values(paths, env_ids, positions, self._as_stored)

    def _read_values(
        self, paths: tuple[str, ...], env_ids: Ids, positions: Ids, as_stored: Collection[str] = ()
    ) -> Fields:
        """The same; see `ValueReader.with_values` for what stays as it is stored."""
        fields = self._read_stored(paths, env_ids, positions)
        if self._values is None:
            return fields
        return self._values.with_values(
            fields, env_ids, positions, by_row=True, as_stored=as_stored
        )

    def _read_stored(self, paths: tuple[str, ...], env_ids: Ids, positions: Ids) -> Fields:
        """The same, with references of fields that vary."""
        return self._read(paths, env_ids, positions, self._commit.heads)

    def _read(self, paths: tuple[str, ...], env_ids: Ids, positions: Ids, heads: Ids) -> Fields:
        rows = self._ring.rows(env_ids, positions)
        records = self._store.records
        # Many that lie one after the other come as columns from `gather`.
        apart = len(rows) < SPLIT_ROWS or rows[-1] - rows[0] != len(rows) - 1
        apart = apart and self._agent_ends.get("truncated") not in paths
        if records is not None and apart and self._store.packed.issuperset(paths):
            if (layout := self._layouts.get(paths)) is None:
                columns = [(path, 0, None) for path in paths]
                layout = ColumnLayouts(records.record, columns)
                self._layouts[paths] = layout
            packed = records.columns(rows, len(rows), layout)
            return {path: packed[str(at)] for at, path in enumerate(paths)}
        fields = self._fetch(rows, paths)
        for path in paths:
            flag = self._served.get(path)
            if flag is not None:
                ended = (self._store.flags(rows) & flag) != 0
                if flag == TRUNCATED:
                    ended |= self._forced_truncations(env_ids, positions, heads)
                fields[path] = ended
        truncated = self._agent_ends.get("truncated")
        if truncated in paths:
            others = tuple(self._agent_ends[role] for role in self._agent_ends)
            missing = tuple(path for path in others if path not in fields)
            ends = fields | self._fetch(rows, missing)
            forced = self._forced_truncations(env_ids, positions, heads)
            fields[truncated] = self._truncated_agents(ends, truncated, forced)
        return {path: fields[path] for path in paths}

    def locate(self, env_ids: Ids, positions: Ids) -> tuple[Ids, Ids]:
        """Begin and end of episodes; see `transforms.base.BufferRows`."""
        with self.lock:
            self._update_index()
            return self._index.locate(env_ids, positions)

    def known(self, env_ids: Ids, ends: Ids) -> Ids:
        """Where what is known of episodes ends; see `transforms.base.BufferRows`."""
        if not self.derived:
            return ends
        known_ends = ends.copy()
        env_ids = np.ascontiguousarray(env_ids)
        heads = self._indexed_rows()[0].stop
        flags, shape = self._store.all_flags, self._ring.shape
        _kernel.known(flags, *shape, heads, env_ids, known_ends)
        return known_ends

    # Read-ahead: asking the disk for the rows of draws that are gathered later.

    def nbytes(self, draw: Draw) -> int:
        """Bytes that the draw is read from, rows read twice counted twice."""
        windows = draw.windows
        count = len(draw) if windows is None else windows.positions.size
        return count * self._step_nbytes

    def prefetch(self, draw: Draw) -> int:
        """Start reading the draw's rows where pages are missing.

        Returns:
            Bytes asked for; 0 where all seem to be in memory.
        """
        span, packed = self.span, self._store.packed
        env_ids, positions = steps_of(draw)
        reads: Sequence[RowReads] | Any
        if self._transform is None:
            reads = [(paths, env_ids, positions + k) for paths, k in self._plain_reads]
        else:
            length = None if draw.windows is None else draw.windows.positions.shape[1]
            reads = self._transform.rows_read(self, env_ids, positions, draw.key, length)
        together: dict[str, list[Ids]] = {}
        asked = 0
        for paths, ids, pos in reads:
            # Some may have been overwritten since; others are still to be written.
            last = np.maximum(span.first, span.stop - 1)
            alive = np.clip(pos, span.first[ids], last[ids])
            rows = self._ring.rows(ids, alive)
            apart = tuple(path for path in paths if path not in packed)
            if apart:
                asked += self._store.prefetch(rows, apart)
            for path in paths:
                if path in packed:
                    # To read one of them is to read all: one stands for the others.
                    together.setdefault(next(iter(together), path), []).append(rows)
                    break
        for path, every in together.items():
            asked += self._store.prefetch(np.concatenate(every), (path,))
        return asked

    # Rows by value.

    def column_index(self, path: str) -> ColumnIndex:
        """The rows alive by the value of a field; see `StartView.column_index`."""
        with self.lock:
            index = self._column_indexes.get(path)
            if index is None:
                require_integer(path, self._schema)
                index = self._column_indexes[path] = ColumnIndex(self._ring)
            index.update(self.span, partial(self._read_column, path))
            return index

    def _read_column(
        self, path: str, env_ids: Ids, positions: Ids
    ) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Values of rows, and which of those are whole and no final rows."""
        steps = (self.flags(env_ids, positions) & FINAL) == 0
        fields, whole = self.read_rows((path,), env_ids, positions)
        return fields[path], whole & steps

    def read_rows(
        self, paths: tuple[str, ...], env_ids: Ids, positions: Ids
    ) -> tuple[Fields, NDArray[np.bool_]]:
        """Copy rows, and say which are whole; see `StartView.read_rows`."""
        drawn = {path: self._schema[path].drawn for path in paths}
        columns = self._read_values(paths, env_ids, positions)
        whole = self.intact(env_ids, positions)
        fields = {
            path: columns[path]
            if field.varies
            else np.ascontiguousarray(columns[path]).reshape(len(positions), *field.shape)
            for path, field in drawn.items()
        }
        return fields, whole

    def role(self, name: str) -> str | None:
        """Path of the field or subtree that plays a role; None if none does."""
        return self._schema.role(name)

    def find_rows(self, path: str, values: ArrayLike) -> tuple[Any, Any]:
        """Find rows by value; see `ReplayBuffer.find`."""
        with self.lock:
            # A field by which no row is found is refused before values of its kind.
            index = self.column_index(path)
            wanted = array_of(values, "values")
            if not wanted.size:
                wanted = wanted.astype(np.int64)
            if wanted.dtype.kind not in "iu" or wanted.ndim > 1:
                got = f"{wanted.dtype}{list(wanted.shape)}"
                if not wanted.ndim:
                    got = shown(wanted.item())
                raise SchemaError(
                    f"values of field {path!r} must be an integer, or integers along "
                    f"one axis, got {got}. Cast or flatten them."
                )
            matches = index.look_up(np.atleast_1d(wanted))
        if not wanted.ndim:
            return matches.env_ids, matches.positions
        return (
            Ragged(matches.env_ids, matches.offsets),
            Ragged(matches.positions, matches.offsets),
        )

    # Given rows: stored fields and flags, final rows included.

    def _check_rows(self, env_ids: ArrayLike, positions: ArrayLike) -> tuple[Ids, Ids]:
        """Broadcast and check what a user names rows with."""
        ids, pos = integers("env_ids", env_ids), integers("positions", positions)
        try:
            ids, pos = np.broadcast_arrays(ids, pos)
        except ValueError:
            raise SchemaError(
                "env_ids and positions must have shapes that broadcast, got "
                f"{list(ids.shape)} and {list(pos.shape)}. Pass one environment "
                "for each position."
            ) from None
        self.check_alive(ids.ravel(), pos.ravel())
        return ids, pos

    def get_fields(
        self, paths: tuple[str, ...], env_ids: ArrayLike, positions: ArrayLike
    ) -> Fields:
        """Some fields of given rows; see `ReplayBuffer.get_fields`."""
        fields = [self._schema[path].drawn for path in paths]
        before = self.limits_before
        ids, pos = self._check_rows(env_ids, positions)
        columns = self._read_values(paths, ids.ravel(), pos.ravel())
        self._check_not_overwritten(ids.ravel(), pos.ravel(), before)
        return {
            path: columns[path].reshape(*ids.shape)
            if field.varies
            else np.ascontiguousarray(columns[path]).reshape((*ids.shape, *field.shape))
            for path, field in zip(paths, fields, strict=True)
        }

    def get_stored(self, paths: tuple[str, ...], env_ids: Ids, positions: Ids) -> Fields:
        """Fields of given rows as they are stored, with references where they vary.

        Args:
            paths: The fields.
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``.

        Raises:
            StaleError: A position is not in the buffer.
        """
        before = self.limits_before
        self.check_alive(env_ids, positions)
        fields = self.references(paths, env_ids, positions)
        self._check_not_overwritten(env_ids, positions, before)
        return fields

    def get_lengths(
        self,
        paths: Sequence[str],
        env_ids: ArrayLike,
        positions: ArrayLike,
        *,
        damaged: bool = False,
    ) -> dict[str, Ids]:
        """Items of the values of given rows, without the values.

        Args:
            paths: Fields that vary.
            env_ids: int, any shape that broadcasts with positions.
            positions: int, any shape.
            damaged: What damaged references say counts, too.

        Returns:
            Per path int64 ``[*broadcast]``.

        Raises:
            StaleError: A position is not in the buffer.
            CorruptError: A reference of a row that is still there is illegal.
        """
        before = self.limits_before
        ids, pos = self._check_rows(env_ids, positions)
        assert self._values is not None
        flat = ids.ravel(), pos.ravel()
        found = self._values.lengths(paths, *flat, damaged=damaged)
        self._check_not_overwritten(*flat, before)
        return {path: lengths.reshape(ids.shape) for path, lengths in found.items()}

    def get_flags(self, env_ids: ArrayLike, positions: ArrayLike) -> NDArray[np.uint8]:
        """Flags of given rows; see `ReplayBuffer.flags`."""
        before = self.limits_before
        ids, pos = self._check_rows(env_ids, positions)
        flags = self.flags(ids, pos)
        self._check_not_overwritten(ids, pos, before)
        return flags

    def gather_rows(
        self, env_ids: Ids, positions: Ids, before: LimitsBefore, *, copied: bool = False
    ) -> Batch:
        """Stored fields of rows, and which are final.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, alive when the limits were read.
            before: `limits_before`.
            copied: See `ValueReader.with_values`.
        """
        fields = self._read_stored(self._schema.paths, env_ids, positions)
        if self._values is not None:
            self._values.refuse_overlaps(fields, env_ids, positions)
            fields = self._values.with_values(fields, env_ids, positions, copied=copied)
        final = (self.flags(env_ids, positions) & FINAL) != 0
        self._check_not_overwritten(env_ids, positions, before)
        fields.setdefault("final", final)
        return self._batch(draw_of(env_ids, positions), fields)

    def read_values(self, paths: Sequence[str], env_ids: Ids, positions: Ids) -> Fields:
        """Stored fields of rows in order that go to another file.

        Args:
            paths: Fields to read.
            env_ids: int64 ``[N]``, equal ones together.
            positions: int64 ``[N]``, rising in each environment.

        Returns:
            Per path ``[N, *shape]``, or `Ragged`; whole if the rows are not `stale`.

        Raises:
            CorruptError: A reference of a row that is still there is illegal, or its
                value differs from its checksum.
        """
        varying = [path for path in paths if path in self._schema.varying]
        if self._values is None or not varying:
            return self._read_stored(tuple(paths), env_ids, positions)
        read = tuple(dict.fromkeys((*paths, *self._schema.varying)))
        fields = self._read_stored(read, env_ids, positions)
        self._values.refuse_overlaps(fields, env_ids, positions)
        wanted = {path: fields[path] for path in paths}
        return self._values.with_values(wanted, env_ids, positions, copied=True)

    def gather_all(self) -> Batch:
        """Every row; see `ReplayBuffer.gather_all`."""
        before = self.limits_before
        ids, span = np.arange(self._ring.num_envs), self.span
        return self._gather_between(ids, span.first, span.stop, before)

    def oldest(self, count: int, env_ids: Ids | None) -> Batch:
        """The oldest rows of each environment; see `ReplayBuffer.dequeue`."""
        integer("count", count, 1, "Pass a number of rows.")
        before = self.limits_before
        ids = np.arange(self._ring.num_envs) if env_ids is None else env_ids
        span = self.span
        lengths = span.lengths[ids]
        if (lengths < count).any():
            which = int(ids[np.argmin(lengths)])
            raise EmptyError(
                f"cannot dequeue {count} rows: environment {which} holds "
                f"{lengths.min()}. Pass a smaller count, or name other environments."
            )
        firsts = span.first[ids]
        return self._gather_between(ids, firsts, firsts + count, before)

    def _gather_between(self, ids: Ids, firsts: Ids, stops: Ids, before: LimitsBefore) -> Batch:
        lengths = stops - firsts
        total = int(lengths.sum())
        env_ids = np.repeat(ids, lengths)
        edges = np.cumsum(lengths) - lengths
        positions = np.arange(total) - np.repeat(edges - firsts, lengths)
        out: Fields = {}
        varying: dict[str, list[Ragged]] = {}
        for first in range(0, max(1, total), SCAN_ROWS):
            block = slice(first, first + SCAN_ROWS)
            rows = self.gather_rows(env_ids[block], positions[block], before)
            for path, array in rows.fields.items():
                if isinstance(array, Ragged):
                    varying.setdefault(path, []).append(array)
                    out[path] = array
                    continue
                if path not in out:
                    out[path] = np.empty((total, *array.shape[1:]), array.dtype)
                out[path][block] = array
        for path, parts in varying.items():
            out[path] = Ragged.concatenate(parts)
        return self._batch(draw_of(env_ids, positions), out)

    def map_field(self, path: str) -> list[NDArray[Any]] | None:
        """Views of a field of all rows alive; see `ReplayBuffer.mapped`.

        For a field that is larger than RAM, such as the tensors that adapters hand
        out. The mapping is private: it shows the pages of the file, and a write into
        one makes a copy of the page. So a stray store neither ends the process, as on
        a read-only mapping, nor changes a row that was published.
        """
        span, slots, field = self.span, self._ring.slots, self._schema[path]
        first, stop = int(span.first[0]), int(span.stop[0])
        in_step = (span.first == first).all() and (span.stop == stop).all()
        if field.varies or not in_step or (steps := self._store.map_field(path)) is None:
            return None
        begin, count = first % slots, stop - first
        ahead = min(count, slots - begin)
        blocks = [steps[begin : begin + ahead]]
        return blocks if ahead == count else [*blocks, steps[: count - ahead]]

    # Changes that readers pass on.

    def write_field(
        self, path: str, env_ids: ArrayLike, positions: ArrayLike, values: object
    ) -> None:
        """Overwrite values of a mutable field."""
        field = self._schema[path]
        if field.varies:
            raise SchemaError(
                f"field {path!r} varies from step to step, and its published values "
                "never change. Keep what is rewritten in a field of one shape."
            )
        if not field.mutable:
            raise SchemaError(
                f"field {path!r} is not mutable, and published rows of other fields "
                "never change. Declare it with Field(..., mutable=True)."
            )
        ids, pos = self._check_rows(env_ids, positions)
        column = field.convert(values, path, ids.shape)
        rows = self._ring.rows(ids.ravel(), pos.ravel())
        if len(rows):
            self._store.set(path, rows, column.reshape(-1, *field.shape))

    def update_priorities(self, sampler: Sampler, batch: Batch, values: ArrayLike) -> int:
        """Pass priorities to a sampler; see `ReplayBuffer.update_priorities`."""
        # To ask isinstance for the protocol takes 9 us, a tenth of a whole turn.
        update = getattr(sampler, "update_priorities", None)
        if update is None:
            raise SchemaError(
                "update_priorities needs a sampler with priorities, got "
                f"{type(sampler).__name__}. Open the buffer with "
                "sampler=mmreplay.PrioritizedSampler(...), or pass a batch drawn by a "
                "dataset's draws to draws.update_priorities."
            )
        if not isinstance(batch, Batch):
            raise SchemaError(
                "update_priorities needs the batch that sample returned, got "
                f"{type(batch).__name__}. Pass update_priorities(batch, values)."
            )
        self._check_own("update_priorities", batch)
        mask = None if batch.mask is None else _array(batch.mask)
        # To make tensors of both and to look at these as arrays takes 4 us.
        env_ids = _array(batch.drawn("env_ids"))
        positions = _array(batch.drawn("positions"))
        numbers = _array(values)
        with self.lock:
            self.check_current()
            return int(update(self, env_ids, positions, numbers, mask))

    def _check_own(self, method: str, batch: Batch) -> None:
        """Refuse the batch of another buffer."""
        uuid, several = self.home.uuid, batch.buffer_ids is not None
        if several or batch.buffer not in (b"", uuid):
            whose = "several buffers" if several else f"buffer {batch.buffer.hex()}"
            raise SchemaError(
                f"{method}: the batch must be of {uuid.hex()} "
                f"({self.home.folder or 'in RAM'}), got one of {whose}. Pass it to "
                "the buffer that drew it."
            )

    def acknowledge(self, sampler: Sampler, batch: Batch | dict[str, Any], sync: bool) -> int:
        """Store the uses of a batch; see `ReplayBuffer.acknowledge`."""
        counter = _counter("acknowledge", sampler)
        what: Draw | dict[str, Any]
        if isinstance(batch, Batch):
            self._check_own("acknowledge", batch)
            what = _draw_again(batch)
        elif isinstance(batch, dict):
            what = batch
        else:
            raise SchemaError(
                "acknowledge needs the batch that sample returned, or its ticket, got "
                f"{shown(batch)}. Pass acknowledge(batch)."
            )
        with self.lock:
            self.check_current()
            return counter.acknowledge(self, what, sync)

    def ticket(self, sampler: Sampler, batch: Batch) -> dict[str, Any]:
        """Return what acknowledges a batch later; see `ReplayBuffer.ticket`."""
        counter = _counter("ticket", sampler)
        if not isinstance(batch, Batch):
            raise SchemaError(
                f"ticket needs the batch that sample returned, got "
                f"{type(batch).__name__}. Pass ticket(batch)."
            )
        self._check_own("ticket", batch)
        with self.lock:
            self.check_current()
            return counter.ticket(self, _draw_again(batch))


def _are_starts(view: StartView, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
    """Which rows alive are legal starts of a view, bool ``[N]``."""
    starts = view.starts
    legal: NDArray[np.bool_] = starts.first[env_ids] <= positions
    legal &= positions < starts.stop[env_ids]
    legal &= view.legal(env_ids, positions)
    return legal


def identity_of(files: OpenFiles) -> BufferIdentity:
    """Which buffer open files are of, for what is stored beside it."""
    metadata, epoch = files.metadata, files.commit.cut_epoch
    return BufferIdentity(
        metadata.ring,
        files.path,
        metadata.uuid,
        metadata.generation,
        epoch,
        files.commit.cuts if epoch else None,
        metadata.heap_nbytes,
    )


def _draw_again(batch: Batch) -> Draw:
    """Key, steps and offsets of a batch's draw, wherever its tensors are."""
    draw = draw_of(_array(batch.drawn("env_ids")), _array(batch.drawn("positions")), batch.key)
    if batch.offsets is None:
        return draw
    return replace(draw, offsets=_array(batch.offsets))


def _counter(method: str, sampler: Sampler) -> UseCounter:
    """The only `UseCounter` among a sampler and its parts."""
    counters = counters_in(sampler)
    if len(counters) != 1:
        raise SchemaError(
            f"{method} needs a sampler with one UseCounter, got "
            f"{type(sampler).__name__} with {len(counters)}. Open the buffer with "
            "sampler=mmreplay.UseCounter(1, lease_s=60)."
        )
    return counters[0]


def _clear_masked(fields: Fields, unknown: frozenset[str], mask: NDArray[np.bool_]) -> None:
    """Write 0 where the mask is false and the value is unknown: NaN times 0 is NaN.

    Losses that are weighed by the mask are then right without a look at the values.
    """
    for name in unknown & fields.keys():
        values = fields[name]
        there = mask.reshape(*mask.shape, *[1] * (values.ndim - mask.ndim))
        np.copyto(values, 0, where=np.isnan(values) & ~there)


def _contiguous(fields: Fields) -> Fields:
    """Fields as arrays of their own."""
    return {
        path: array if isinstance(array, Ragged) else np.ascontiguousarray(array)
        for path, array in fields.items()
    }


def _array(values: Any) -> NDArray[Any]:
    """An array of what may be a tensor, of any device, with a gradient or without."""
    if type(values) is np.ndarray:
        return values
    if hasattr(values, "detach"):
        values = on_host(values)
    return array_of(values, "values")
