"""Would the attacks notice if a rule of the commit protocol were missing?

Each mutant is the real code with one rule taken out. One that survives says that
the attacks are blind there, or that the rule is none.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

from mmreplay.buffer.append import Appender
from mmreplay.buffer.heap_values import ValueWriter
from mmreplay.buffer.reader import GenerationReader
from mmreplay.format import commit
from mmreplay.format.commit import Identity, Record
from mmreplay.storage import recovery
from mmreplay.storage.commit_state import CommitWriter
from mmreplay.storage.committer import Committer
from mmreplay.storage.disk_space import targets
from mmreplay.storage.heap import HeapSpace
from mmreplay.storage.layout import HEAP, SUMS
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.write_path import PartialPageFiller
from mmreplay.storage.zarr.engine import ZarrStore
from mmreplay.storage.zarr.sealing import Sealing
from tools.torture import kills, powerloss
from tools.torture.powerloss import Report
from tools.torture.rows import GEOMETRIES, HEAPED, SHARDED, Array, Geometry
from tools.torture.scarce import SCARCE

Patch = tuple[object, str, Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """The protocol without one rule.

    Attributes:
        name: What the report calls it.
        rule: What it no longer does.
        patches: Object, attribute and what takes its place.
        early_crashes: Cuts come mostly in recovery and soon after.
        live: A reader of a live writer notices, no opening does.
        geometries: Buffers to attack.
    """

    name: str
    rule: str
    patches: tuple[Patch, ...]
    early_crashes: bool = False
    live: bool = False
    geometries: tuple[Geometry, ...] = GEOMETRIES

    def attack(self, states: int, seed: int) -> Report:
        """Attack it until something is found or states are spent."""
        with ExitStack() as stack:
            for owner, name, new in self.patches:
                stack.enter_context(mock.patch.object(owner, name, new))
            if self.live:
                return kills.attack(states, seed, until_found=True)
            return powerloss.attack(
                states, seed, self.geometries, until_found=True, early_crashes=self.early_crashes
            )


def _nothing(*_: object, **__: object) -> None:
    pass


def _limits_unpublished(self: Appender, heads: Array) -> None:
    now = self._heads, self._limits, heads, self._ahead_rows, self._store.limit_step
    target, _ = targets(self._ring, self._committer, *now)
    self._set_published(self._heads, np.maximum(target, self._limits), self._tails)


_publish = CommitWriter.publish
_write_durable = CommitWriter._write_durable


def _publish_no_limit(
    self: CommitWriter, heads: Array, limits: Array, tails: Array, *heap: Any
) -> None:
    _publish(self, heads, heads, tails, *heap)


class _Unsynced:
    """A file that says it synced."""

    def __init__(self, file: Any) -> None:
        self.pwrite = file.pwrite
        self.sync = _nothing


def _write_unsynced(self: CommitWriter, record: Record) -> None:
    file: Any = self._file
    unsynced: Any = _Unsynced(file)
    self._file = unsynced
    try:
        _write_durable(self, record)
    finally:
        self._file = file


def _write_one_slot(self: CommitWriter, record: Record) -> None:
    slot = self._next_durable
    _write_durable(self, record)
    self._next_durable = slot


def _trust_any_boot(self: Identity, record: Record) -> bool:
    return (record.device, record.inode) == (self.device, self.inode)


def _give_up_with_live_heads(self: CommitWriter, limits: Array, *_: Array | None) -> None:
    heads, tails = self.published[:2]
    self._write_durable(replace(self.committed, heads=heads, tails=tails, limits=limits))


def _publish_by_number(
    self: CommitWriter, heads: Array, limits: Array, tails: Array, *heap: Any
) -> None:
    self.next_live = commit.LIVE_SLOTS[self.committed.sequence & 1]
    _publish(self, heads, limits, tails, *heap)


def _commit_newest(
    self: CommitWriter, heads: Array, tails: Array, flags: int = 0, *_: Array | None
) -> None:
    heads, tails = self.published[:2]
    limits = np.maximum(self.committed.limits, self.limits)
    self._write_durable(
        replace(self.committed, heads=heads, tails=tails, limits=limits, flags=flags)
    )


def _sync_immutable(self: MemmapStore) -> None:
    fields = self.schema.fields
    mutable = {name for path, name in self.placement.large.items() if fields[path].mutable}
    for name, file in self._files.items():
        if name != SUMS and name not in mutable:
            file.sync()


def _drop_unpublished(self: Appender, env_ids: Array, firsts: Array) -> None:
    tails = self._tails.copy()
    tails[env_ids] = np.maximum(tails[env_ids], firsts)
    self._commit.tails = self._tails = tails


def _sync_but_heap(self: MemmapStore) -> None:
    for name, file in self._files.items():
        if name not in (SUMS, HEAP):
            file.sync()


_sync = Committer._sync
_commit = CommitWriter.commit


def _sync_after_look(self: Committer) -> Any:
    state: Any = self._commit_state
    state.early_tails = state.tails, state.heap_tails
    return _sync(self)


def _commit_early_tails(
    self: CommitWriter, heads: Array, tails: Array, flags: int = 0, *heap: Array | None
) -> None:
    early: Any = self
    early_tails, early_heap_tails = early.early_tails
    _commit(self, heads, tails, flags, *heap)
    if early_heap_tails is not None:
        record = replace(self.committed, heads=heads, tails=early_tails)
        self._write_durable(replace(record, heap_heads=heap[0], heap_tails=early_heap_tails))


def _raise_live_only(self: Committer, needed: Array, wanted: Array) -> tuple[Array, Array]:
    assert self._heap is not None
    return self._heap.raised(wanted, self._commit_state.limits)


def _free_by_live(self: HeapSpace) -> Array:
    heap_tails = self._commit_state.heap_tails
    assert heap_tails is not None
    return heap_tails + self.nbytes


def _give_up_unpublished(self: ValueWriter, needed: Array) -> None:
    state: Any = self._commit
    wanted = needed + self._space.reserve
    assert self._committer is not None
    tails, heap_tails = self._committer.durable_heap_tails(needed, wanted)
    state.tails = np.maximum(tails, state.tails)
    state.heap_tails = np.maximum(heap_tails, state.heap_tails)


def _free_more_heap(self: HeapSpace) -> Array:
    return _free_by_live(self) + 512


_free = PartialPageFiller.free


def _free_more(self: PartialPageFiller, limits: Array) -> None:
    _free(self, limits + 3)


MUTANTS = (
    Mutant(
        "NoReserve",
        "say what will be overwritten before it is",
        (
            (Appender, "_raise_limits", _limits_unpublished),
            (CommitWriter, "publish", _publish_no_limit),
            (Committer, "_give_up", _nothing),
        ),
    ),
    Mutant(
        "LiveReserve",
        "say so in a durable slot, not only in a live one",
        (
            (Committer, "durable_limits", lambda self, needed, target: target),
            (Committer, "_give_up", _nothing),
        ),
    ),
    Mutant(
        "NoDataSync", "sync the rows before vouching for them", ((MemmapStore, "sync", _nothing),)
    ),
    Mutant(
        "NoSumsSync",
        "sync the checksums before vouching for them",
        ((MemmapStore, "sync_sums", _nothing),),
    ),
    Mutant(
        "NoSlotSync", "sync the durable slot", ((CommitWriter, "_write_durable", _write_unsynced),)
    ),
    Mutant(
        "SingleSlot",
        "use the durable slots in turn",
        ((CommitWriter, "_write_durable", _write_one_slot),),
    ),
    Mutant(
        "RestartSlot0",
        "overwrite the older slot first when opening",
        ((recovery, "_oldest_first", lambda slots, which: list(which)),),
        early_crashes=True,
    ),
    Mutant(
        "InheritUnsynced",
        "sync what a killed writer left before overwriting a slot",
        ((recovery, "_sync_inherited", _nothing),),
        early_crashes=True,
    ),
    Mutant(
        "TrustOldBoot",
        "distrust live slots of another boot",
        ((Identity, "trusts", _trust_any_boot),),
    ),
    Mutant(
        "LiveHeadsInReserve",
        "repeat the committed heads when giving rows up",
        ((CommitWriter, "give_up", _give_up_with_live_heads),),
    ),
    Mutant(
        "LiveSlotByNumber",
        "use the live slots in turn",
        ((CommitWriter, "publish", _publish_by_number),),
    ),
    Mutant(
        "HeadsAfterSync",
        "vouch for what was published before the sync began",
        ((CommitWriter, "commit", _commit_newest),),
    ),
    Mutant(
        "NoMutableSync",
        "sync what `write_field` wrote before a commit returns",
        ((MemmapStore, "sync", _sync_immutable),),
    ),
    Mutant("DequeueUntold", "publish what was dequeued", ((Appender, "drop", _drop_unpublished),)),
    Mutant(
        "ClearsMore",
        "clear no page of rows that are not given up",
        (*SCARCE, (PartialPageFiller, "free", _free_more)),
    ),
    Mutant(
        "NoRecheck",
        "look at the limit again after copying rows",
        ((GenerationReader, "stale", _nothing),),
        live=True,
    ),
    Mutant(
        "RaiseRepeatsHeads",
        "move the heads of a durable record to tails that passed them",
        ((Record, "with_heads_at_tails", lambda self: self),),
        geometries=HEAPED,
    ),
    Mutant(
        "CommitEarlyTails",
        "write the tails of now, not those from before the sync",
        ((Committer, "_sync", _sync_after_look), (CommitWriter, "commit", _commit_early_tails)),
        geometries=HEAPED,
    ),
    Mutant(
        "HeapUnsynced",
        "sync the heap before vouching for its values",
        ((MemmapStore, "sync", _sync_but_heap),),
        geometries=HEAPED,
    ),
    Mutant(
        "HeapTailsLive",
        "make heap tails durable before values are overwritten",
        (
            (Committer, "durable_heap_tails", _raise_live_only),
            (HeapSpace, "free_until", property(_free_by_live)),
        ),
        geometries=HEAPED,
    ),
    Mutant(
        "HeapTailsUnpublished",
        "publish heap tails before values are overwritten",
        ((ValueWriter, "_give_up", _give_up_unpublished),),
        geometries=HEAPED,
    ),
    Mutant(
        "HeapOverrun",
        "write no byte more than heap tails allow",
        ((HeapSpace, "free_until", property(_free_more_heap)),),
        geometries=HEAPED,
    ),
    Mutant(
        "NoDisown",
        "have a group say nothing of its rows before one is replaced",
        ((Sealing, "_clear_group_state", _nothing),),
        geometries=SHARDED,
    ),
    Mutant(
        "NotSettled",
        "say in the group what is alive when the buffer is closed",
        ((ZarrStore, "settle_last", _nothing),),
        geometries=SHARDED,
    ),
    Mutant(
        "SealedUntrue",
        "leave what no shard holds out of what a group tells",
        ((Sealing, "_sealed", lambda self, first, stop: stop),),
        geometries=SHARDED,
    ),
)


def hunt(states: int, seed: int) -> list[Mutant]:
    """Attack every mutant, print a table, and return the survivors."""
    survivors = []
    for mutant in MUTANTS:
        report = mutant.attack(states, seed)
        kinds = ", ".join(sorted(report.findings)) or "SURVIVED"
        print(f"{mutant.name:20} {report.states:6} states  {kinds}", flush=True)
        if not report.findings:
            survivors.append(mutant)
    return survivors
