"""The model of a ring whose values are sealed into shards; see `heap_model`.

A *range* is the rows of one shard. Its number says where their values are: odd in the
shard, even in the heap. A mutant breaks one rule of docs/format.md, section 15.4.
"""

from dataclasses import replace
from enum import Enum

from tests.heap.heap_model import HEAP, ROW, Violation, World, maximum

NUMBER, SHARD = "number", "shard"


class SealedMutant(Enum):
    GIVES_UP_BEFORE_SYNC = "heap bytes are given up before the numbers are synced"
    READERS_IGNORE_NUMBERS = "readers do not look at the number after the values"
    GIVES_UP_ABOVE_DURABLE_HEAD = "ranges that a power cut leaves incomplete are passed"
    SEALS_BY_LIVE_TAILS = "shards lack rows that only the live slot gave up"


class SealedWorld(World):
    """One buffer whose ranges are sealed; the heap gives up values, and no row."""

    synced = (ROW, HEAP, NUMBER)

    def __init__(self, seed=0, *, shard_rows=2, heap_size=None, **options):
        self.shard_rows = shard_rows
        self.versions = {}
        longest = sum(options.get("max_lengths", (2,)))
        super().__init__(seed, heap_size=heap_size or 4 * shard_rows * longest, **options)
        assert self.slots % shard_rows == 0
        assert self.slots >= self.capacity + self.row_reserve + shard_rows
        assert self.heap_size >= 4 * shard_rows * longest

    # Ranges.

    def range_of(self, position):
        return position % self.slots // self.shard_rows

    def number_of(self, env_id, position):
        return self.files.read((NUMBER, env_id, self.range_of(position))) or 0

    def sealing(self):
        """The thread that seals: complete ranges, and now and then others, as a close.

        All of them, one after another, in any order.
        """
        while True:
            yield
            env_id = self.rng.randrange(self.num_envs)
            head = self.live.heads[env_id]
            oldest = max(0, head - self.slots + self.shard_rows)
            if oldest < head:
                position = self.rng.randint(oldest, head - 1)
                if self.rng.random() < 0.1 or self.is_complete(position, head):
                    yield from self.seal(env_id, position)

    def is_complete(self, position, head):
        return (position // self.shard_rows + 1) * self.shard_rows <= head

    def seal(self, env_id, position):
        """Make a shard of the range of a position, unless a row of it is written."""
        yield from self.locked("seal")
        key = env_id, self.range_of(position)
        number, version = self.number_of(env_id, position), self.versions.get(key, 0)
        if number % 2 == 0:
            # As before an old shard is removed: on the disk, too, the number is even.
            yield from self.sync(NUMBER)
            content = yield from self.values_of_range(env_id, position)
            if self.versions.get(key, 0) == version:
                self.files.write((SHARD, *key), content)
                yield
                yield from self.sync(SHARD)
                if self.versions.get(key, 0) == version:
                    self.files.write((NUMBER, *key), number + 1)
                    yield
                    yield from self.sync(NUMBER)
                    self.seen["seals"] += 1
        self.locks -= {"seal"}

    def values_of_range(self, env_id, position):
        """What a shard holds: by position the units of the row's values."""
        first = position // self.shard_rows * self.shard_rows
        content = {}
        for each in range(first, first + self.shard_rows):
            row = self.files.read((ROW, env_id, each % self.slots))
            if each >= self.live.heads[env_id] or row is None or row.position != each:
                continue
            content[each] = tuple(
                self.files.read((HEAP, env_id, at))
                for _, at in self.units(row.number, row.references)
            )
            yield
        tails = maximum(self.live.tails, [0])
        if SealedMutant.SEALS_BY_LIVE_TAILS not in self.mutants:
            tails = [min(pair) for pair in zip(self.live.tails, self.durable.tails, strict=True)]
        return frozenset((each, units) for each, units in content.items() if each >= tails[env_id])

    def unseal(self, env_id, position):
        """Have a range's values in the heap alone, before a row of it is written."""
        key = env_id, self.range_of(position)
        number = self.number_of(env_id, position)
        if number % 2:
            self.files.write((NUMBER, *key), number + 1)
            self.seen["unseals"] += 1
        self.versions[key] = self.versions.get(key, 0) + 1
        yield

    # What the heap gives up.

    def alive_from(self, env_id):
        """Position below which no row is alive, nor would be after a power cut."""
        tail = min(self.live.tails[env_id], self.durable.tails[env_id])
        return max(tail, self.durable.limits[env_id] - self.slots, 0)

    def first_of(self, env_id, position):
        """Where the values of rows from a position on begin."""
        return self.first_value(env_id, max(position, self.alive_from(env_id)))

    def raise_tails(self, wanted):
        """Make heap tails durable as far as shards hold the values."""
        yield from self.locked("slot")
        heap_tails = list(maximum(self.live.heap_tails, self.durable.heap_tails))
        heads = self.live.heads
        if SealedMutant.GIVES_UP_ABOVE_DURABLE_HEAD not in self.mutants:
            heads = tuple(map(min, self.live.heads, self.durable.heads))
        sealed = {
            env_id: self.sealed_until(env_id, heads[env_id]) for env_id in range(self.num_envs)
        }
        if SealedMutant.GIVES_UP_BEFORE_SYNC not in self.mutants:
            yield from self.sync(NUMBER)
        size = self.shard_rows
        for env_id, stop in sealed.items():
            target = wanted[env_id] - self.heap_size
            after = self.alive_from(env_id) // size * size
            while heap_tails[env_id] < target and after <= stop:
                begin = self.first_of(env_id, after)
                heap_tails[env_id] = max(heap_tails[env_id], begin)
                after += size
                self.seen["raises"] += 1
        raised = tuple(heap_tails)
        if raised != self.durable.heap_tails:
            record = replace(self.durable, heap_tails=raised)
            yield from self.put_durable(self.emptied(record))
        self.locks -= {"slot"}

    def sealed_until(self, env_id, head):
        """Position up to which the ranges from the oldest row on are sealed."""
        size = self.shard_rows
        stop = self.alive_from(env_id) // size * size
        while stop + size <= head and self.number_of(env_id, stop) % 2:
            stop += size
        return stop

    def make_space(self, needed, heads, heap_heads):
        """Wait for shards, and for a commit where they are of newer rows."""
        # Rows that are not published wait for nothing.
        if tuple(heads) != self.live.heads:
            yield from self.publish(heads=heads, heap_heads=heap_heads)
            self.published_heads = tuple(heads)
        for env_id in range(self.num_envs):
            if needed[env_id] <= self.free_until(env_id):
                continue
            size, head = self.shard_rows, self.live.heads[env_id]
            for position in range(self.alive_from(env_id) // size * size, head, size):
                if self.is_complete(position, head):
                    yield from self.seal(env_id, position)
        yield from self.raise_tails(self.ahead(needed))
        if any(
            self.durable.heap_tails[e] + self.heap_size < needed[e] for e in range(self.num_envs)
        ):
            yield from self.commit()
            yield from self.raise_tails(self.ahead(needed))
        yield from self.publish(heap_tails=self.durable.heap_tails)

    # Adding, and giving rows up.

    def opening(self, truth, durable):
        yield from super().opening(truth, durable)
        self.versions = {}
        self.actors.append(self.sealing())

    def before_row(self, env_id, position):
        yield from self.unseal(env_id, position)

    def raise_limit(self, env_id, position):
        limits, size = list(self.live.limits), self.shard_rows
        reachable = -(-(self.live.heads[env_id] + self.row_reserve) // size) * size
        limits[env_id] = max(limits[env_id], reachable)
        if limits[env_id] > self.first(env_id) + self.slots:
            raise Violation(f"the limit of row {position} cannot rise")
        if limits[env_id] > self.slots:
            yield from self.locked("slot")
            raised = maximum(self.durable.limits, limits)
            yield from self.put_durable(replace(self.durable, limits=raised))
            self.locks -= {"slot"}
        yield from self.publish(limits=limits)

    def drop(self, env_id, tail):
        tails = list(self.live.tails)
        tails[env_id] = tail
        yield from self.publish(tails=tails)
        self.seen["drops"] += 1

    def clear(self):
        yield from self.publish(tails=self.live.heads)
        self.seen["clears"] += 1

    # What is checked after each step.

    def check_rows(self, record, contents, cause):
        for env_id in range(self.num_envs):
            for position in range(record.tails[env_id], record.heads[env_id]):
                number = self.written.get((env_id, position))
                rows = contents((ROW, env_id, position % self.slots))
                if any(
                    row is None or (row.position, row.number) != (position, number) for row in rows
                ):
                    raise Violation(f"{cause} tears row {position}")
                key = env_id, self.range_of(position)
                numbers = {each or 0 for each in contents((NUMBER, *key))}
                units = list(self.units(number, rows[0].references))
                if any(each % 2 for each in numbers):
                    expected = position, tuple(unit for unit, _ in units)
                    for shard in contents((SHARD, *key)):
                        if shard is None or expected not in shard:
                            raise Violation(f"{cause} leaves row {position} in no shard")
                # Where the range is written on, its values are needed in the heap.
                complete = self.is_complete(position, record.heads[env_id])
                if complete and all(each % 2 for each in numbers):
                    continue
                if not self.is_legal(rows[0].references, record, env_id):
                    raise Violation(f"{cause} makes a reference of {position} illegal")
                for expected, at in units:
                    if any(each != expected for each in contents((HEAP, env_id, at))):
                        raise Violation(f"{cause} tears a value of row {position}")

    # Reading beside the writer.

    def read_row(self, record, env_id, position):
        number = self.written[env_id, position]
        before = self.number_of(env_id, position)
        row = self.files.read((ROW, env_id, position % self.slots))
        yield
        expected, torn, legal = list(self.units(number, row.references)), False, True
        if before % 2:
            shard = self.files.read((SHARD, env_id, self.range_of(position)))
            torn = (position, tuple(unit for unit, _ in expected)) not in shard
            yield
        else:
            legal = self.is_legal(row.references, record, env_id)
            for unit, at in expected if legal else ():
                torn |= self.files.read((HEAP, env_id, at)) != unit
                yield
        moved = self.number_of(env_id, position) != before
        if SealedMutant.READERS_IGNORE_NUMBERS in self.mutants:
            moved = False
        yield
        while (after := self.newest_live(record)) is None:
            yield
        oldest = max(after.limits[env_id] - self.slots, after.tails[env_id])
        if position < oldest or moved:
            self.seen["reads discarded"] += 1
            self.seen["reads again"] += moved
        elif not legal:
            raise Violation(f"a reader finds an illegal reference of row {position}")
        elif torn or (row.position, row.number) != (position, number):
            raise Violation(f"a reader gets row {position} torn")
        else:
            self.seen["reads"] += 1
            self.seen["reads of shards"] += before % 2
        return after
