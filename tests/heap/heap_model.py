"""A model of a ring whose rows have values in a heap: its files, writer and readers.

Each actor is a generator that yields wherever another one may run, or a kill may come.
Files are cells with all the contents that a power cut may leave in them: those since
the last sync. After each step the model checks the image of a kill, and every image of
COMMIT that a power cut could leave, with every content of the cells of its rows.

A *mutant* breaks one law of docs/format.md. Bytes are counted in units of 8, the
alignment of values; `heap_size` and lengths are numbers of units.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum


class Violation(Exception):
    """A kill, a power cut or a reader would see what no law allows."""


class Mutant(Enum):
    RAISE_REPEATS_HEADS = "a raise repeats committed heads though a tail passed them"
    COMMIT_WRITES_EARLY_TAILS = "a commit writes the tails from before its sync"
    READERS_CHECK_LIMITS_ONLY = "readers look at limits again, and not at tails"
    EMPTY_VALUES_IN_RANGE = "references of length 0 have a position, which is checked"
    TRUSTS_UNSYNCED_SLOT = "bytes are overwritten before the durable slot is synced"
    NO_RAISE_ABOVE_DURABLE_HEAD = "rows that D does not count are given up in L alone"
    OPENING_TAKES_LIVE_TAILS = "an opening takes the live tails for the durable ones"
    BLOCK_NOT_SPLIT = "a block is published at once, however much heap it needs"
    HEAP_NOT_SYNCED = "a commit syncs the rows, and not the heap"
    LIVE_SLOT_LATE = "bytes are overwritten before the live slot says so"


@dataclass(frozen=True)
class Record:
    """One slot of COMMIT; tuples have an item for each environment."""

    sequence: int
    epoch: int
    boot_id: int
    heads: tuple[int, ...]
    limits: tuple[int, ...]
    tails: tuple[int, ...]
    heap_heads: tuple[int, ...]
    heap_tails: tuple[int, ...]

    @property
    def age(self):
        return self.epoch, self.sequence


@dataclass(frozen=True)
class Row:
    """What a row's cell holds; `number` tells each write from all others."""

    position: int
    number: int
    references: tuple[tuple[int, int], ...]


PARTIAL = "partial"
DURABLE, LIVE, ROW, HEAP = "durable", "live", "row", "heap"
Key = tuple[object, ...]


class Files:
    """Cells of files: the page cache, and what a power cut may leave."""

    def __init__(self):
        self._cells = {}
        self._writes = 0

    def write(self, key, value):
        self._writes += 1
        self._cells.setdefault(key, [(0, None)]).append((self._writes, value))

    def read(self, key):
        contents = self._cells.get(key)
        return contents[-1][1] if contents else None

    def possible(self, key):
        """Contents that a power cut may leave, oldest first."""
        contents = self._cells.get(key)
        return [value for _, value in contents] if contents else [None]

    def begin_sync(self, kinds):
        return {
            key: contents[-1][0]
            for key, contents in self._cells.items()
            if key[0] in kinds and len(contents) > 1
        }

    def end_sync(self, begun):
        for key, number in begun.items():
            contents = self._cells[key]
            while len(contents) > 1 and contents[1][0] <= number:
                contents.pop(0)

    def lose_power(self, rng):
        for key, contents in self._cells.items():
            if len(contents) == 1:
                continue
            value = rng.choice(contents)[1]
            differ = len({each for _, each in contents}) > 1
            if key[0] in (DURABLE, LIVE) and differ and rng.random() < 0.15:
                value = PARTIAL
            contents[:] = [(0, value)]


def maximum(*columns):
    return tuple(map(max, *columns))


class World:
    """One buffer, its machine, and all that may happen to both."""

    synced: tuple[str, ...] = (ROW, HEAP)
    """What a commit syncs first."""

    def __init__(
        self,
        seed=0,
        *,
        mutants=(),
        num_envs=1,
        slots=14,
        capacity=10,
        row_reserve=2,
        heap_size=8,
        max_lengths=(2,),
        lengths="any",
        block=1,
        commits=0.5,
    ):
        self.rng = random.Random(seed)
        self.mutants = frozenset(mutants)
        self.num_envs, self.slots, self.capacity = num_envs, slots, capacity
        self.row_reserve, self.heap_size = row_reserve, heap_size
        self.max_lengths, self.lengths, self.block = max_lengths, lengths, block
        # Of each 256 steps of an actor, how many are commits, roughly.
        self.commits = commits
        self.heap_reserve = max(heap_size // 16, sum(max_lengths))
        self.files, self.boot_id, self.number = Files(), 1, 0
        self.seen = Counter()
        self.written = {}
        zeros = (0,) * num_envs
        first = Record(1, 1, 0, zeros, zeros, zeros, zeros, zeros)
        for slot in (0, 1):
            self.files.write((DURABLE, slot), first)
            self.files.write((LIVE, slot), None)
        self.files.end_sync(self.files.begin_sync((DURABLE, LIVE)))
        self.committed_heads = zeros
        self.open()

    # What COMMIT says: docs/format.md, section 6.1.

    def is_void(self, record):
        if record is None or record == PARTIAL:
            return True
        return not all(
            0 <= record.tails[e] <= record.heads[e] <= record.limits[e]
            and 0 <= record.heap_tails[e] <= record.heap_heads[e]
            and record.heap_heads[e] <= record.heap_tails[e] + self.heap_size
            for e in range(self.num_envs)
        )

    def settle(self, durable_slots, live_slots, boot_id):
        """What is published and what is durable, by the contents of four slots."""
        durable_slots = [r for r in durable_slots if not self.is_void(r)]
        live_slots = [r for r in live_slots if not self.is_void(r)]
        if not durable_slots:
            raise Violation("no durable slot is valid")
        durable = max(durable_slots, key=lambda record: record.age)
        trusted = [r for r in live_slots if r.boot_id == boot_id]
        live = max(trusted, key=lambda record: record.age, default=None)
        truth = live if live is not None and live.epoch >= durable.epoch else durable
        limits = maximum(*(r.limits for r in durable_slots + live_slots), truth.limits)
        return self.without_overwritten(truth, limits), self.without_overwritten(durable, limits)

    def without_overwritten(self, record, limits):
        tails = maximum(record.tails, [limit - self.slots for limit in limits])
        heads = maximum(record.heads, tails)
        limits = maximum(limits, heads)
        return replace(record, heads=heads, limits=limits, tails=tails)

    def settled(self):
        """The same of the page cache."""
        durable, live = (
            [self.files.read((kind, slot)) for slot in (0, 1)] for kind in (DURABLE, LIVE)
        )
        return self.settle(durable, live, self.boot_id)

    # Values in the heap.

    def lay_out(self, heap_head, lengths):
        """References of one row's values, and the heap head after them."""
        references = []
        for length in lengths:
            if not length:
                given = Mutant.EMPTY_VALUES_IN_RANGE in self.mutants
                references.append((heap_head if given else 0, 0))
                continue
            position, size = heap_head, self.heap_size
            if position % size + length > size:
                position = (position // size + 1) * size
            references.append((position, length))
            heap_head = position + length
        return tuple(references), heap_head

    def is_legal(self, references, record, env_id):
        for position, length in references:
            if not length and Mutant.EMPTY_VALUES_IN_RANGE not in self.mutants:
                continue
            if position < record.heap_tails[env_id]:
                return False
            if position + length > record.heap_heads[env_id]:
                return False
            if length and position % self.heap_size + length > self.heap_size:
                return False
        return True

    def first_value(self, env_id, tail):
        """Heap position where the values of rows from a tail on begin."""
        for position in range(tail, self.live.heads[env_id]):
            row = self.files.read((ROW, env_id, position % self.slots))
            begins = [at for at, length in row.references if length]
            if begins:
                return min(begins)
        return self.live.heap_heads[env_id]

    # What is checked after each step.

    def check(self):
        self.check_kill()
        self.check_power_cuts()

    def check_kill(self):
        truth, _ = self.settled()
        self.seen["kills checked"] += 1
        self.check_rows(truth, lambda key: [self.files.read(key)], "a kill")
        for env_id in range(self.num_envs):
            if truth.heads[env_id] < self.published_heads[env_id]:
                raise Violation("a kill loses published rows")
            lost = truth.limits[env_id] - self.slots
            if truth.tails[env_id] > max(self.abandoned[env_id], lost):
                raise Violation("a kill gives up rows that the writer did not")

    def check_power_cuts(self):
        """Check what power cuts may leave; live slots could only add limits to it."""
        possible = []
        for slot in (0, 1):
            contents = list(dict.fromkeys(self.files.possible((DURABLE, slot))))
            possible.append([*contents, PARTIAL] if len(contents) > 1 else contents)
        for one in possible[0]:
            for other in possible[1]:
                truth, _ = self.settle([one, other], [], self.boot_id + 1)
                self.seen["power cuts checked"] += 1
                self.check_rows(truth, self.files.possible, "a power cut")
                for env_id in range(self.num_envs):
                    if truth.heads[env_id] < self.committed_heads[env_id]:
                        raise Violation("a power cut loses committed rows")

    def check_rows(self, record, contents, cause):
        for env_id in range(self.num_envs):
            for position in range(record.tails[env_id], record.heads[env_id]):
                number = self.written.get((env_id, position))
                rows = contents((ROW, env_id, position % self.slots))
                if any(
                    row is None or (row.position, row.number) != (position, number) for row in rows
                ):
                    raise Violation(f"{cause} tears row {position}")
                references = rows[0].references
                if not self.is_legal(references, record, env_id):
                    raise Violation(f"{cause} makes a reference of row {position} illegal")
                for expected, at in self.units(number, references):
                    if any(unit != expected for unit in contents((HEAP, env_id, at))):
                        raise Violation(f"{cause} tears a value of row {position}")

    def units(self, number, references):
        """What the heap holds of a row, and where."""
        for field, (position, length) in enumerate(references):
            for at in range(length):
                yield (number, field, at), (position + at) % self.heap_size

    # Opening for writing.

    def open(self):
        self.locks = set()
        truth, durable = self.settled()
        self.published_heads = truth.heads
        self.abandoned = maximum(truth.tails, durable.tails)
        self.actors = [self.opening(truth, durable)]

    def opening(self, truth, durable):
        slots = {
            (kind, slot): self.files.read((kind, slot))
            for kind in (DURABLE, LIVE)
            for slot in (0, 1)
        }
        valid = [record for record in slots.values() if not self.is_void(record)]
        epoch = 1 + max(record.epoch for record in valid)
        self.sequence = 1 + max(record.sequence for record in valid)

        def oldest_first(kind):
            ages = {
                slot: (0, 0) if self.is_void(slots[kind, slot]) else slots[kind, slot].age
                for slot in (0, 1)
            }
            return sorted(ages, key=lambda slot: ages[slot])

        live = replace(truth, epoch=epoch, boot_id=self.boot_id)
        for slot in oldest_first(LIVE):
            live = replace(live, sequence=self.next_sequence())
            self.files.write((LIVE, slot), PARTIAL)
            yield
            self.files.write((LIVE, slot), live)
            self.live_slot = slot
            yield
        older, newer = oldest_first(DURABLE)
        self.files.write((DURABLE, newer), slots[DURABLE, newer])
        yield
        yield from self.sync(DURABLE)
        for slot in (older, newer):
            durable = replace(
                durable, epoch=epoch, boot_id=self.boot_id, sequence=self.next_sequence()
            )
            self.files.write((DURABLE, slot), durable)
            yield
            yield from self.sync(DURABLE)
            self.durable_slot = slot
        self.live, self.durable = live, durable
        if Mutant.OPENING_TAKES_LIVE_TAILS in self.mutants:
            self.durable = replace(durable, tails=live.tails, heap_tails=live.heap_tails)
        self.actors = [self.writing(), self.committing()]
        yield

    def next_sequence(self):
        self.sequence += 1
        return self.sequence

    def sync(self, *kinds):
        begun = self.files.begin_sync(kinds)
        yield
        self.files.end_sync(begun)
        yield

    # Publishing and committing.

    def locked(self, name):
        while name in self.locks:
            yield
        self.locks.add(name)

    def publish(self, **columns):
        columns = {
            name: maximum(getattr(self.live, name), column) for name, column in columns.items()
        }
        record = replace(self.live, sequence=self.next_sequence(), **columns)
        if self.is_void(record):
            raise Violation(f"a void record is published: {record}")
        self.abandoned = maximum(self.abandoned, record.tails)
        slot = 1 - self.live_slot
        self.files.write((LIVE, slot), PARTIAL)
        yield
        self.files.write((LIVE, slot), record)
        self.live_slot, self.live = slot, record
        yield

    def put_durable(self, record):
        record = replace(
            record, sequence=self.next_sequence(), epoch=self.live.epoch, boot_id=self.boot_id
        )
        if not self.is_void(record):
            self.abandoned = maximum(self.abandoned, record.tails)
        slot = 1 - self.durable_slot
        if Mutant.TRUSTS_UNSYNCED_SLOT in self.mutants:
            self.durable = record
        self.files.write((DURABLE, slot), record)
        yield
        begun = self.files.begin_sync((DURABLE,))
        yield
        self.files.end_sync(begun)
        self.durable_slot, self.durable = slot, record
        yield

    def emptied(self, record):
        """The record with heads at the tails that passed them: no row is alive."""
        if Mutant.RAISE_REPEATS_HEADS in self.mutants:
            return record
        heads = maximum(record.heads, record.tails)
        return replace(
            record,
            heads=heads,
            limits=maximum(record.limits, heads),
            heap_heads=maximum(record.heap_heads, record.heap_tails),
        )

    def commit(self):
        yield from self.locked("commit")
        before = self.live
        kinds = self.synced
        if Mutant.HEAP_NOT_SYNCED in self.mutants:
            kinds = (ROW,)
        begun = self.files.begin_sync(kinds)
        for _ in range(3):
            yield
        self.files.end_sync(begun)
        yield
        yield from self.locked("slot")
        tails = maximum(self.live.tails, self.durable.tails)
        heap_tails = maximum(self.live.heap_tails, self.durable.heap_tails)
        if Mutant.COMMIT_WRITES_EARLY_TAILS in self.mutants:
            tails, heap_tails = before.tails, before.heap_tails
        record = replace(
            self.durable,
            heads=before.heads,
            heap_heads=before.heap_heads,
            tails=tails,
            heap_tails=heap_tails,
            limits=maximum(self.durable.limits, self.live.limits),
        )
        yield from self.put_durable(self.emptied(record))
        self.locks -= {"slot", "commit"}
        self.committed_heads = maximum(self.committed_heads, before.heads)
        self.seen["commits"] += 1

    def raise_tails(self, wanted):
        """Make tails durable with which the heap may be written up to wanted."""
        yield from self.locked("slot")
        tails = list(maximum(self.live.tails, self.durable.tails))
        heap_tails = list(maximum(self.live.heap_tails, self.durable.heap_tails))
        for env_id in range(self.num_envs):
            target = wanted[env_id] - self.heap_size
            if heap_tails[env_id] >= target:
                continue
            head, limit = self.live.heads[env_id], self.durable.limits[env_id]
            tail = min(head, max(tails[env_id], limit - self.slots))
            begin = self.first_value(env_id, tail)
            while tail < head and begin < target:
                tail += 1
                begin = self.first_value(env_id, tail)
            tails[env_id] = max(tails[env_id], tail)
            heap_tails[env_id] = max(heap_tails[env_id], begin)
            self.seen["raises"] += 1
            self.seen["raises that empty the ring"] += tail == head
        record = replace(
            self.durable,
            tails=maximum(tails, self.durable.tails),
            heap_tails=maximum(heap_tails, self.durable.heap_tails),
        )
        unchanged = (record.tails, record.heap_tails) == (
            self.durable.tails,
            self.durable.heap_tails,
        )
        counts_none = all(
            self.durable.tails[e] == self.durable.heads[e] for e in range(self.num_envs)
        )
        if counts_none and Mutant.NO_RAISE_ABOVE_DURABLE_HEAD in self.mutants:
            self.raised = record
        elif not unchanged:
            yield from self.put_durable(self.emptied(record))
        self.locks -= {"slot"}

    raised: Record | None = None

    def free_until(self, env_id):
        """Heap positions below may be written."""
        durable = self.durable.heap_tails[env_id]
        if self.raised is not None and self.raised.epoch == self.durable.epoch:
            durable = max(durable, self.raised.heap_tails[env_id])
        return min(self.live.heap_tails[env_id], durable) + self.heap_size

    def committing(self):
        """The thread of the writer: commits, and raises tails ahead."""
        while True:
            yield
            if self.rng.random() < self.commits * 0.2:
                yield from self.commit()
            elif self.rng.random() < 0.3:
                used = [
                    self.live.heap_heads[e] + self.heap_reserve / 2
                    > self.durable.heap_tails[e] + self.heap_size
                    for e in range(self.num_envs)
                ]
                if any(used):
                    yield from self.raise_tails(self.ahead(self.live.heap_heads))

    def ahead(self, heap_heads):
        return [heap_head + self.heap_reserve for heap_head in heap_heads]

    # Adding, and giving rows up.

    def writing(self):
        rng = self.rng
        while True:
            yield
            chance = rng.random()
            if chance < 0.8:
                env_ids = [e for e in range(self.num_envs) if rng.random() < 0.7] or [0]
                rows = {
                    e: [self.draw_lengths() for _ in range(rng.randint(1, self.block))]
                    for e in env_ids
                }
                yield from self.add(rows)
            elif chance < 0.9:
                env_id = rng.randrange(self.num_envs)
                first, head = self.first(env_id), self.live.heads[env_id]
                if first < head:
                    yield from self.drop(env_id, rng.randint(first, head))
            elif chance < 0.93:
                yield from self.clear()
                yield from self.commit()
            elif chance < 0.96 and self.commits:
                yield from self.commit()

    def draw_lengths(self):
        longest, rng = self.max_lengths, self.rng
        if self.lengths == "zero":
            return [0] * len(longest)
        if self.lengths == "longest":
            return list(longest)
        if self.lengths == "extremes":
            return [0] * len(longest) if rng.random() < 0.6 else list(longest)
        return [rng.randint(0, each) for each in longest]

    def first(self, env_id):
        """The oldest row alive."""
        record = self.live
        return max(
            record.tails[env_id],
            record.heads[env_id] - self.capacity,
            record.limits[env_id] - self.slots,
        )

    def add(self, rows):
        """Add rows, by environment a list of lengths each; as many at once as fit."""
        left = {env_id: list(each) for env_id, each in rows.items()}
        while any(left.values()):
            heads, heap_heads = list(self.live.heads), list(self.live.heap_heads)
            for env_id in left:
                count = 0
                while left[env_id] and count < self.row_reserve:
                    stored = yield from self.store(
                        env_id, left[env_id][0], heads, heap_heads, count
                    )
                    if not stored:
                        break
                    left[env_id].pop(0)
                    count += 1
            yield from self.publish(heads=heads, heap_heads=heap_heads)
            self.published_heads = tuple(heads)
            self.seen["publications"] += 1
            for env_id in rows:
                if self.first(env_id) == self.live.heads[env_id]:
                    self.seen["no row alive after an add"] += 1

    def store(self, env_id, lengths, heads, heap_heads, count):
        """Write one row above the heads, if it is the block's first or fits."""
        position = heads[env_id]
        references, heap_head = self.lay_out(heap_heads[env_id], lengths)
        if heap_head > self.free_until(env_id):
            if count and Mutant.BLOCK_NOT_SPLIT not in self.mutants:
                return False
            needed = list(heap_heads)
            needed[env_id] = heap_head
            yield from self.make_space(needed, heads, heap_heads)
            if heap_head > self.free_until(env_id):
                raise Violation(f"a row at heap position {heap_head} waits for itself")
        if position >= self.live.limits[env_id]:
            if count:
                return False
            yield from self.raise_limit(env_id, position)
        yield from self.before_row(env_id, position)
        self.number += 1
        for unit, at in self.units(self.number, references):
            self.files.write((HEAP, env_id, at), unit)
            yield
        row = Row(position, self.number, references)
        self.files.write((ROW, env_id, position % self.slots), row)
        self.written[env_id, position] = self.number
        yield
        heads[env_id], heap_heads[env_id] = position + 1, heap_head
        return True

    def make_space(self, needed, heads, heap_heads):
        """Let the heap be written so far; rows up to heads are not published yet."""
        yield from self.raise_tails(self.ahead(needed))
        heap_tails = maximum(self.live.heap_tails, self.raised_tails("heap_tails"))
        tails = maximum(self.live.tails, self.raised_tails("tails"))
        if Mutant.LIVE_SLOT_LATE in self.mutants:
            self.live = replace(self.live, tails=tails, heap_tails=heap_tails)
        else:
            yield from self.publish(tails=tails, heap_tails=heap_tails)

    def before_row(self, env_id, position):
        """What comes before a row is written: nothing."""
        yield from ()

    def raised_tails(self, name):
        durable = getattr(self.durable, name)
        if self.raised is not None and self.raised.epoch == self.durable.epoch:
            return maximum(durable, getattr(self.raised, name))
        return durable

    def raise_limit(self, env_id, position):
        limits = list(self.live.limits)
        reachable = min(self.live.heads[env_id] + self.row_reserve, self.first(env_id) + self.slots)
        limits[env_id] = max(limits[env_id], reachable)
        if limits[env_id] <= position:
            raise Violation(f"the limit of row {position} cannot rise")
        if limits[env_id] > self.slots:
            yield from self.locked("slot")
            raised = maximum(self.durable.limits, limits)
            yield from self.put_durable(replace(self.durable, limits=raised))
            self.locks -= {"slot"}
        yield from self.publish(limits=limits)

    def drop(self, env_id, tail):
        """Give up the rows of one environment below a tail, as `dequeue` does."""
        tails, heap_tails = list(self.live.tails), list(self.live.heap_tails)
        tails[env_id] = tail
        heap_tails[env_id] = self.first_value(env_id, tail)
        yield from self.publish(tails=tails, heap_tails=heap_tails)
        self.seen["drops"] += 1

    def clear(self):
        record = self.live
        yield from self.publish(tails=record.heads, heap_tails=record.heap_heads)
        self.seen["clears"] += 1

    # Reading beside the writer.

    def newest_live(self, seen):
        records = [self.files.read((LIVE, slot)) for slot in (0, 1)]
        trusted = [r for r in records if not self.is_void(r) and r.boot_id == self.boot_id]
        newest = max(trusted, key=lambda record: record.age, default=None)
        if newest is None or (seen is not None and newest.age < seen.age):
            return None
        return newest

    def reading(self):
        """Read rows of live records, as a process beside the writer does."""
        seen = None
        while True:
            yield
            record = self.newest_live(seen)
            if record is None:
                continue
            seen, env_id = record, self.rng.randrange(self.num_envs)
            head = record.heads[env_id]
            first = max(
                record.tails[env_id], head - self.capacity, record.limits[env_id] - self.slots
            )
            if first >= head:
                continue
            oldest = self.rng.random() < 0.5
            position = first if oldest else self.rng.randint(first, head - 1)
            seen = yield from self.read_row(record, env_id, position)

    def read_row(self, record, env_id, position):
        """Read one row alive in a record; return the record that it was checked by."""
        number = self.written[env_id, position]
        row = self.files.read((ROW, env_id, position % self.slots))
        yield
        legal, torn = self.is_legal(row.references, record, env_id), False
        if legal:
            for unit, at in self.units(number, row.references):
                torn |= self.files.read((HEAP, env_id, at)) != unit
                yield
        while (after := self.newest_live(record)) is None:
            yield
        oldest = after.limits[env_id] - self.slots
        if Mutant.READERS_CHECK_LIMITS_ONLY not in self.mutants:
            oldest = max(oldest, after.tails[env_id])
        if position < oldest:
            self.seen["reads discarded"] += 1
        elif not legal:
            raise Violation(f"a reader finds an illegal reference of row {position}")
        elif torn or (row.position, row.number) != (position, number):
            raise Violation(f"a reader gets row {position} torn")
        else:
            self.seen["reads"] += 1
        return after

    # Running.

    def run(self, steps, crashes=0.004):
        """Take steps of actors in random order, with kills and power cuts between."""
        rng, readers = self.rng, [self.reading(), self.reading()]
        for step in range(steps):
            if rng.random() < crashes:
                if rng.random() < 0.5:
                    self.kill()
                else:
                    self.lose_power()
                    readers = [self.reading(), self.reading()]
            else:
                next(rng.choice([*self.actors, *readers]))
            self.seen["steps"] += 1
            self.check_kill()
            if step % 2 == 0:
                self.check_power_cuts()

    def kill(self):
        self.seen["kills"] += 1
        self.raised = None
        self.open()

    def lose_power(self):
        self.seen["power cuts"] += 1
        self.raised = None
        self.files.lose_power(self.rng)
        self.boot_id += 1
        self.open()

    def finish(self, *actors):
        """Run actors one after the other to their ends, with checks between."""
        for actor in actors:
            for _ in actor:
                self.check()

    def finish_opening(self):
        opening = self.actors[0]
        while len(self.actors) == 1:
            next(opening)
            self.check()
