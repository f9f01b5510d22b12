"""The bound of a rate limiter holds over grants, and no side waits for ever."""

import functools
import heapq
import itertools
import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray

import mmreplay as mr
from mmreplay.buffer.limiting import Counts
from mmreplay.errors import FailedError, SchemaError, StarvedError
from mmreplay.ray import grants as grants_module
from mmreplay.ray.grants import Allowance, Asker, Grants
from mmreplay.ray.limits import _ask
from tests.waits import until

ROWS, ITEMS = 64, 256


class World:
    """A run in simulated time: writers, learners, a registry, and what kills them.

    Every message takes some time, every count is read while others write, and a row is
    published some time after it was begun.
    """

    def __init__(self, limiter, writers, learners, seed, busy_s=(0.02, 0.01)):
        self.limiter, self.rng = limiter, np.random.default_rng(seed)
        self.now = 0.0
        self.inserts = self.samples = 0
        self.events, self.order = [], itertools.count()
        self.grants = Grants(limiter, self.clock)
        self.down_until = 0.0
        self.names = itertools.count()
        self.worst_low = self.worst_high = 0.0
        self.longest = self.last = 0.0
        self.under_way = {}
        self.busy_s = busy_s
        self.lives = {}
        for number in range(writers + learners):
            self.begin(number, "insert" if number < writers else "sample")

    def clock(self):
        return self.now

    def at(self, delay, call, *arguments):
        heapq.heappush(self.events, (self.now + delay, next(self.order), call, arguments))

    def delay(self, mean=0.001):
        return float(self.rng.exponential(mean))

    def begin(self, number, side):
        count = ROWS if side == "insert" else ITEMS
        ahead = count // 2 if side == "insert" else count
        allowance = Allowance(count, ahead, self.clock)
        name = f"{side} {next(self.names)}"
        self.lives[number] = name, side
        self.at(self.delay(), self.work, number, name, side, allowance, False)
        self.at(self.delay(), self.tick, number, name, side, allowance)

    def alive(self, number, name):
        return self.lives.get(number, ("", ""))[0] == name

    def tick(self, number, name, side, allowance):
        """The asking thread."""
        if not self.alive(number, name):
            return
        need = 1 if side == "insert" else ITEMS
        wants = allowance.wants(need if allowance.available < need else 0)
        unused, request, sent = allowance.request()
        count = allowance.count if wants else 0
        self.under_way[name] = unused
        arguments = number, name, side, allowance, count, unused, request, sent
        self.at(self.delay(), self.arrive, *arguments)

    def arrive(self, number, name, side, allowance, count, unused, request, sent, ahead=0):
        grants, granted = self.grants, 0
        if self.now >= self.down_until:
            grants.check(side, allowance.count)
            if grants.ask(name, side, count, unused, request, ahead):
                answer = grants.decide(name, count)
                granted = answer.granted
                if grants.is_old(refused=bool(count) and not granted):
                    # Counts are read at another time than they arrive, and answers to
                    # others come between.
                    began = grants.begin_look()
                    self.at(self.delay(), self.read, grants, began)
        wait = self.delay() if granted or not count else 0.005
        self.at(wait, self.answered, number, name, side, allowance, granted, sent)

    def read(self, grants, began):
        counts = Counts(self.inserts, self.samples, self.inserts)
        self.at(self.delay(), grants.looked, began, counts)

    def answered(self, number, name, side, allowance, granted, sent):
        allowance.granted(granted, sent)
        # Some replies are lost: the asker asks again, and the grant is void.
        self.at(self.delay(), self.tick, number, name, side, allowance)

    def work(self, number, name, side, allowance, begun):
        """The side's own thread: takes what it may, and is done some time later."""
        if not self.alive(number, name):
            return
        need = 8 if side == "insert" else ITEMS
        if begun:
            if side == "insert":
                # Published, and only then used.
                self.inserts += need
                allowance.use(need)
            else:
                self.samples += need
            self.measure()
        if allowance.available >= need:
            if side == "sample":
                allowance.use(need)
            mean = self.busy_s[0] / 8 if side == "insert" else self.busy_s[1]
            self.at(self.delay(mean), self.work, number, name, side, allowance, True)
        else:
            self.at(0.001, self.work, number, name, side, allowance, False)

    def measure(self):
        self.longest = max(self.longest, self.now - self.last)
        self.last = self.now
        if self.inserts > self.limiter.min_size:
            ratio, least, error = self.limiter.settings
            difference = ratio * self.inserts - self.samples - ratio * least
            self.worst_high = max(self.worst_high, difference - error)
            self.worst_low = max(self.worst_low, -difference - error)

    def kill_registry(self):
        self.grants = Grants(self.limiter, self.clock)
        self.down_until = self.now + 1.5

    def kill(self, number, back_after):
        if number not in self.lives:
            return
        _, side = self.lives.pop(number)
        self.at(back_after, self.begin, number, side)

    def run(self, until):
        while self.events and self.events[0][0] < until:
            self.now, _, call, arguments = heapq.heappop(self.events)
            call(*arguments)
        self.now = until

    @property
    def ratio(self):
        return self.samples / (self.inserts - self.limiter.min_size)


class DrawsAhead(World):
    """A run whose learners draw ahead; a ring counts what is drawn.

    Attributes:
        received: Items that learners took.
        ahead: Batches that a learner has at most, in calls of `per_call`.
        by_turns: One program writes and learns by turns.
        says: Whether learners say how many they have.
    """

    def __init__(self, *arguments, ahead, per_call, by_turns=False, says=True):
        self.ahead, self.per_call = ahead, per_call
        self.by_turns, self.says, self.received = by_turns, says, 0
        # Batches asked for and ready, what each side waits for, its allowance.
        self.asked, self.ready, self.needs = {}, {}, {}
        self.allowances, self.begun = {}, set()
        super().__init__(*arguments)
        if by_turns:
            self.at(0.01, self.turn, 0)

    def begin(self, number, side):
        count = ROWS if side == "insert" else ITEMS
        ahead = ROWS // 2 if side == "insert" else 0
        allowance = self.allowances[number] = Allowance(count, ahead, self.clock)
        self.asked[number] = self.ready[number] = self.needs[number] = 0
        name = f"{side} {next(self.names)}"
        self.lives[number] = name, side
        self.at(self.delay(), self.tick, number, name, side, allowance)
        if not self.by_turns:
            each = self.write if side == "insert" else self.learn
            self.at(self.delay(), each, number)

    def tick(self, number, name, side, allowance):
        need = self.needs[number]
        wants = allowance.wants(need if allowance.available < need else 0)
        unused, request, sent = allowance.request()
        count = allowance.count if wants else 0
        ahead = self.ready[number] * ITEMS * self.says
        arguments = number, name, side, allowance, count, unused, request, sent
        self.at(self.delay(), self.arrive, *arguments, ahead)

    def draw_ahead(self, number):
        """As a loader's threads: from the first batch that was granted on."""
        while (
            number in self.begun
            and self.asked[number] + self.ready[number] + self.per_call <= self.ahead
        ):
            self.asked[number] += self.per_call
            self.at(self.delay(0.002), self.drawn, number)

    def drawn(self, number):
        self.samples += self.per_call * ITEMS
        self.at(self.delay(), self.answer, number)

    def answer(self, number):
        self.asked[number] -= self.per_call
        self.ready[number] += self.per_call

    def take(self, number):
        """Take a batch, if one is granted and ready."""
        self.needs[number] = ITEMS
        if self.allowances[number].available < ITEMS:
            return False
        self.begun.add(number)
        self.draw_ahead(number)
        if not self.ready[number]:
            return False
        self.needs[number] = 0
        self.ready[number] -= 1
        self.allowances[number].use(ITEMS)
        self.received += ITEMS
        self.draw_ahead(number)
        self.measure()
        return True

    def add(self, number, rows):
        """Publish rows, if they are granted."""
        self.needs[number] = 1
        if self.allowances[number].available < rows:
            return False
        self.needs[number] = 0
        self.inserts += rows
        self.allowances[number].use(rows)
        self.measure()
        return True

    def write(self, number):
        mean = self.busy_s[0] / 8 if self.add(number, 8) else 0.001
        self.at(self.delay(mean), self.write, number)

    def learn(self, number):
        mean = self.busy_s[1] if self.take(number) else 0.001
        self.at(self.delay(mean), self.learn, number)

    def turn(self, written):
        """The rows of one batch by writer 0, then the batch by learner 1."""
        ratio, least, _ = self.limiter.settings
        if written < ITEMS / ratio or self.inserts < least:
            written += 8 * self.add(0, 8)
        elif self.take(1):
            written = 0
        self.at(0.001, self.turn, written)

    def measure(self):
        samples, self.samples = self.samples, self.received
        super().measure()
        self.samples = samples


def limiter(ratio=4.0, min_size=1_000, writers=4, learners=2, error=None):
    full = ratio * ROWS * writers + ITEMS * learners
    return mr.RateLimiter(ratio, min_size, full if error is None else error)


@pytest.mark.parametrize("ratio", [0.25, 4.0, 32.0])
@pytest.mark.parametrize(("writers", "learners"), [(1, 1), (4, 2), (1, 4)])
def test_the_ratio_stays_within_the_bound(ratio, writers, learners):
    rule = limiter(ratio, writers=writers, learners=learners)
    world = World(rule, writers, learners, seed=1)
    world.run(40.0)
    # At the beginning one grant may pass min_size.
    assert world.worst_high <= ratio * ROWS
    # A draw that is under way is counted some time after its grant was used.
    assert world.worst_low <= ITEMS * learners
    assert world.longest < 1.5
    assert world.inserts > 2_000
    error = 2 * rule.error_buffer / (world.inserts - rule.min_size)
    assert abs(world.ratio - ratio) <= error


def test_kills_of_the_registry_and_of_askers_neither_stall_nor_bend_the_ratio():
    for seed in range(2):
        world = World(limiter(), 4, 2, seed)
        for second in range(3, 60, 7):
            world.at(second, world.kill_registry)
        for second in range(5, 60, 11):
            number = int(world.rng.integers(6))
            world.at(second, world.kill, number, float(world.rng.uniform(0.5, 15)))
        world.run(70.0)
        # What was under way at a kill of the registry, of all askers, may pass.
        assert world.worst_high <= 4 * ROWS * 4 * 2
        assert world.worst_low <= ITEMS * 2 * 2
        # A registry that is down grants nothing, and a silent asker is waited for.
        assert world.longest < 14
        assert world.inserts > 5_000
        assert world.ratio == pytest.approx(4.0, rel=0.03)


def test_the_least_error_buffer_never_stalls_and_is_slower():
    least = (4 * ROWS + ITEMS) / 2
    full = World(limiter(), 4, 2, seed=2)
    slow = World(limiter(error=least), 4, 2, seed=2)
    for world in (full, slow):
        world.run(60.0)
        # Who asked ahead and does not go on is waited for as long as grants last.
        assert world.longest < 12
        assert world.worst_high <= 4 * ROWS
    assert 1_500 < slow.inserts < full.inserts


@pytest.mark.parametrize(("ahead", "per_call"), [(2, 1), (16, 8)])
@pytest.mark.parametrize("error", [None, (4 * ROWS + ITEMS) / 2])
def test_batches_drawn_ahead_neither_stall_a_run_nor_bend_the_ratio(ahead, per_call, error):
    rule = limiter(error=error, writers=2)
    world = DrawsAhead(rule, 2, 2, 1, ahead=ahead, per_call=per_call)
    world.run(30.0)
    assert world.longest < 1.5
    assert world.inserts > 20_000
    # A grant, and what was drawn since the last request of a learner.
    assert world.worst_high <= 4 * ROWS + 2 * per_call * ITEMS
    assert world.worst_low <= ITEMS * 2
    error = rule.error_buffer + 4 * ROWS + 2 * per_call * ITEMS
    difference = 4 * (world.inserts - rule.min_size) - world.received
    assert abs(difference) <= error


@pytest.mark.parametrize(("ahead", "per_call"), [(2, 1), (8, 4), (16, 8)])
def test_a_program_that_writes_and_learns_by_turns_does_not_wait_for_itself(ahead, per_call):
    inserts = []
    for says in (True, False):
        rule = limiter(writers=1, learners=1)
        world = DrawsAhead(rule, 1, 1, 1, ahead=ahead, per_call=per_call, by_turns=True, says=says)
        world.run(30.0)
        inserts.append(world.inserts)
    # Were batches that wait for it counted as taken, it would wait for rows that it
    # does not write while it waits.
    assert inserts[0] > 20_000
    assert inserts[1] < 1_000 + 2 * ITEMS


@pytest.mark.parametrize("side", ["insert", "sample"])
def test_a_dead_asker_is_waited_for_as_long_as_its_grants_last(side):
    rule = limiter(error=(4 * ROWS + ITEMS) / 2)
    world = World(rule, 2, 2, seed=3)
    world.run(5.0)
    before = world.inserts, world.samples
    dead = 0 if side == "insert" else 2
    world.at(0.0, world.kill, dead, 1000.0)
    world.run(40.0)
    assert world.inserts > before[0] + 1_000
    assert world.samples > before[1] + 4_000


def test_rows_are_free_until_the_least_size_also_with_all_that_is_under_way():
    grants = begun(limiter(error=300.0), 0, 0)
    granted = 0
    for number in range(1, 100):
        grants.ask("w", "insert", ROWS, granted, number)
        answer = grants.decide("w", ROWS)
        if not answer.granted:
            break
        granted += ROWS
    # The first sum not below 1,000; 4 * (1,024 + 64) is beyond 4,300.
    assert granted == 1_024


def begun(rule, inserts, samples, clock=None):
    grants = Grants(rule, clock or itertools.count().__next__)
    grants.looked(grants.begin_look(), Counts(inserts, samples, inserts))
    return grants


def test_nothing_is_granted_before_counts_are_known():
    grants = Grants(limiter(), lambda: 5.0)
    assert grants.is_old(refused=False)
    grants.ask("w", "insert", ROWS, 0, 1)
    assert grants.decide("w", ROWS).granted == 0
    grants.looked(5.0, Counts(0, 0, 0))
    assert grants.decide("w", ROWS).granted == ROWS
    assert not grants.is_old(refused=False)


def test_what_was_granted_since_a_look_began_counts_as_done_for_the_own_side_only():
    rule = mr.RateLimiter(1.0, 1, 150.0)
    now = [0.0]
    grants = Grants(rule, lambda: now[0])
    grants.looked(0.0, Counts(100, 0, 100))
    now[0] = 1.0
    grants.ask("a", "sample", 50, 0, 1)
    assert grants.decide("a", 50).granted == 50
    began = grants.begin_look()
    now[0] = 2.0
    # The look began when the grant was given: its items may be counted or not.
    grants.looked(began, Counts(100, 30, 100))
    grants.ask("b", "sample", 200, 0, 1)
    # 100 - (30 + 50 + 200) < 1 - 150.
    assert grants.decide("b", 200).granted == 0
    grants.ask("a", "sample", 0, 0, 2)
    now[0] = 3.0
    grants.looked(grants.begin_look(), Counts(100, 50, 100))
    # 100 - (50 + 199) = 1 - 150 + 0.
    assert grants.decide("b", 199).granted == 199


def test_items_ahead_of_a_learner_are_not_done_once_a_look_has_counted_them():
    rule = mr.RateLimiter(1.0, 1, 100.0)
    now = [0.0]
    grants = Grants(rule, lambda: now[0])
    grants.looked(0.0, Counts(100, 250, 100))
    now[0] = 1.0
    # Said after the look: it may not have counted them.
    grants.ask("l", "sample", 50, 0, 1, ahead=150)
    assert grants.decide("l", 50).granted == 0
    now[0] = 2.0
    grants.looked(grants.begin_look(), Counts(100, 250, 100))
    # 100 - (250 - 150 + 99) = 1 - 100 + 0.
    assert grants.decide("l", 99).granted == 99
    grants.ask("w", "insert", 200, 0, 1)
    # 100 + 101 - 100 = 1 + 100.
    assert grants.decide("w", 102).granted == 0
    assert grants.decide("w", 101).granted == 101


def test_a_request_that_arrives_late_changes_nothing():
    grants = begun(limiter(), 0, 0)
    assert grants.ask("w", "insert", ROWS, 0, 2)
    assert not grants.ask("w", "insert", ROWS, 5, 2)
    assert not grants.ask("w", "insert", ROWS, 5, 1)
    assert grants.ask("w", "insert", ROWS, 0, 3)


def test_a_registry_that_was_killed_learns_what_is_held_from_requests():
    rule = mr.RateLimiter(1.0, 1, 150.0)
    grants = begun(rule, 100, 0)
    grants.ask("a", "insert", ROWS, 40, 7)
    grants.ask("b", "insert", ROWS, 0, 3)
    # 100 + 40 + 11 = 151.
    assert grants.decide("b", 12).granted == 0
    assert grants.decide("b", 11).granted == 11


def test_others_are_askers_of_the_other_side_that_live():
    now = [0.0]
    grants = Grants(limiter(), lambda: now[0])
    grants.looked(0.0, Counts(0, 0, 0))
    grants.ask("w", "insert", 0, 0, 1)
    grants.ask("v", "insert", 0, 0, 1)
    grants.ask("l", "sample", 0, 0, 1)
    assert grants.decide("l", 0).others == 2
    assert grants.decide("w", 0).others == 1
    now[0] = 11.0
    grants.looked(grants.begin_look(), Counts(0, 0, 0))
    grants.ask("w", "insert", 0, 0, 2)
    assert grants.decide("w", 0).others == 0


@pytest.mark.parametrize(
    ("rows", "items", "minimum", "full"), [(64, 256, 256, 512), (512, 32, 1040, 2080)]
)
def test_an_error_buffer_in_which_both_could_wait_is_refused(rows, items, minimum, full):
    grants = begun(mr.RateLimiter(4.0, 1_000, minimum - 1), 0, 0)
    grants.check("insert", min(rows, 8))
    grants.ask("w", "insert", rows, 0, 1)
    with pytest.raises(SchemaError, match=rf"at least {minimum} .*got {minimum - 1}"):
        grants.check("sample", items)
    with pytest.raises(SchemaError, match=rf"Pass {full} or more for full speed"):
        grants.check("sample", items)
    grants = begun(mr.RateLimiter(4.0, 1_000, minimum), 0, 0)
    grants.ask("w", "insert", rows, 0, 1)
    grants.check("sample", items)
    begun(mr.RateLimiter(4.0, 1_000, math.inf), 0, 0).check("insert", 1 << 40)


def test_the_error_buffer_for_full_speed_counts_all_that_live():
    grants = begun(mr.RateLimiter(4.0, 1_000, 200.0), 0, 0)
    for name in "abc":
        grants.ask(name, "insert", 64, 0, 1)
    with pytest.raises(SchemaError, match="Pass 1024 or more"):
        grants.check("sample", 256)


def test_another_bound_is_refused():
    grants = begun(limiter(), 0, 0)
    grants.agree(limiter().settings)
    with pytest.raises(SchemaError, match=r"must be \[4\.0, 1000, 1536\.0\]"):
        grants.agree(limiter(ratio=5.0).settings)


def test_an_allowance_is_used_oldest_first_and_void_after_the_patience():
    now = [0.0]
    allowance = Allowance(64, 32, lambda: now[0])
    assert not allowance.wants()
    assert allowance.wants(1)
    allowance.granted(64, 0.0)
    now[0] = 6.0
    allowance.granted(64, 6.0)
    assert allowance.available == 128
    allowance.use(100)
    assert allowance.available == 28
    assert allowance.request()[0] == 28
    assert allowance.wants()
    now[0] = 15.9
    assert allowance.available == 28
    now[0] = 16.0
    assert allowance.available == 0
    # It used some, and asks once more.
    assert allowance.wants()
    allowance.granted(64, 16.0)
    assert not allowance.wants()


def test_rows_under_way_are_held_after_their_grants_are_void():
    now = [0.0]
    allowance = Allowance(64, 32, lambda: now[0])
    allowance.granted(64, 0.0)
    allowance.use(48)
    allowance.set_under_way(48)
    assert allowance.available == 16
    assert allowance.request()[0] == 64
    now[0] = 60.0
    assert allowance.available == 0
    assert allowance.request()[0] == 48
    allowance.set_under_way(0)
    assert allowance.request()[0] == 0


def test_one_that_does_nothing_does_not_ask_again():
    now = [0.0]
    allowance = Allowance(64, 64, lambda: now[0])
    allowance.granted(64, 0.0)
    assert not allowance.wants()
    now[0] = 20.0
    assert allowance.available == 0
    assert not allowance.wants()
    assert allowance.wants(1)


def test_more_than_was_granted_uses_all_of_it():
    allowance = Allowance(64, 0, lambda: 0.0)
    allowance.granted(64, 0.0)
    allowance.use(1_000)
    assert allowance.available == 0


class Registry:
    """Answers requests in the asking thread, as the registry would."""

    def __init__(self, rule, counts):
        self.grants = begun(rule, *counts, clock=time.monotonic)
        self.calls = []
        self.silent = 0

    def __call__(self, count, unused, number, who="a", side="insert"):
        self.calls.append((count, unused, number))
        if self.silent:
            self.silent -= 1
            return None
        self.grants.ask(who, side, count, unused, number)
        return self.grants.decide(who, count)


def asker(registry, rule, side="insert", count=ROWS):
    allowance = Allowance(count, count // 2 if side == "insert" else 0)
    ask = functools.partial(registry, side=side)
    return Asker(side, rule, allowance, ask, "run 'r'")


def test_an_asker_gets_what_it_waits_for_and_asks_ahead_of_its_end():
    rule = limiter(error=math.inf)
    own = asker(registry := Registry(rule, (0, 0)), rule)
    assert own.wait(1)
    assert own.available == ROWS
    own.use(ROWS // 2)
    until(lambda: own.available > ROWS // 2)
    own.use(10 * ROWS)
    until(lambda: own.available == ROWS)
    assert own.answer.granted == ROWS
    own.close()
    assert [number for _, _, number in registry.calls] == sorted(
        {number for _, _, number in registry.calls}
    )
    with pytest.raises(FailedError, match=r"this asker of .* is closed"):
        own.use(1)


def test_an_asker_asks_again_where_the_registry_does_not_answer():
    rule = limiter(error=math.inf)
    registry = Registry(rule, (0, 0))
    registry.silent = 3
    own = asker(registry, rule)
    assert own.wait(1)
    own.close()
    assert len(registry.calls) >= 4


@pytest.fixture
def by_answers(monkeypatch):
    """Let each request to a registry take 0.05 s, and nothing else any time."""

    def count_time(registry):
        clock = SimpleNamespace(monotonic=lambda: 0.05 * len(registry.calls))
        monkeypatch.setattr(grants_module, "time", clock)
        return registry

    return count_time


def test_a_wait_ends_with_the_timeout_or_alone_and_says_what_is_counted(by_answers):
    full = mr.RateLimiter(1.0, 10, 70.0, timeout=0.2)
    own = asker(by_answers(Registry(full, (80, 0))), full)
    with pytest.raises(StarvedError, match=r"run 'r': .* 0\.2 s have passed\. 80 rows"):
        own.wait(1)
    own.close()
    alone = mr.RateLimiter(1.0, 10, 70.0, patience=0.2)
    own = asker(by_answers(Registry(alone, (80, 0))), alone)
    with pytest.raises(StarvedError, match="waited for a client to draw, but none is"):
        own.wait(1)
    own.close()
    proceeds = mr.RateLimiter(1.0, 10, 70.0, patience=0.1, on_timeout="proceed")
    own = asker(by_answers(Registry(proceeds, (80, 0))), proceeds, "sample", 200)
    assert own.wait(200) is False
    own.close()


def test_a_wait_ends_after_the_patience_where_the_registry_does_not_answer():
    rule = mr.RateLimiter(1.0, 10, 70.0, patience=0.2)
    registry = Registry(rule, (80, 0))
    # Another one lives, as far as the last answer says.
    registry.grants.ask("client", "sample", 64, 0, 1)
    own = asker(registry, rule)
    own.set_under_way(0)
    until(lambda: own.answer is not None)
    registry.silent = math.inf
    with pytest.raises(StarvedError, match="draw, but the registry does not answer"):
        own.wait(1)
    own.close()


def test_an_asker_whose_process_left_the_cluster_says_so(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    ask = functools.partial(_ask, None, "who", "insert", [1.0, 1, 100.0], lambda: 0)
    with pytest.raises(FailedError, match=r"not connected .* before ray.shutdown"):
        ask(1, 0, 1)


def test_a_wait_for_a_side_that_lives_goes_on(by_answers):
    rule = mr.RateLimiter(1.0, 10, 70.0, patience=0.1)
    registry = by_answers(Registry(rule, (80, 0)))
    registry.grants.ask("client", "sample", 64, 0, 1)
    own = asker(registry, rule)
    waited = threading.Thread(target=own.wait, args=(1,), daemon=True)
    waited.start()
    until(lambda: len(registry.calls) > 20)
    assert waited.is_alive()
    registry.grants.looked(time.monotonic(), Counts(80, 75, 80))
    waited.join(10)
    assert not waited.is_alive()
    own.close()


def test_what_a_request_raises_is_raised_by_the_calls():
    def refuse(*_, **__):
        raise SchemaError("error_buffer must be at least 9")

    own = asker(refuse, limiter())
    with pytest.raises(SchemaError, match="at least 9"):
        own.wait(1)
    with pytest.raises(SchemaError, match="at least 9"):
        own.use(1)
    own.close()


def test_closing_ends_a_wait_in_another_thread():
    rule = mr.RateLimiter(1.0, 10, 70.0, patience=1000.0)
    own = asker(Registry(rule, (80, 0)), rule)
    errors = []

    def wait():
        try:
            own.wait(1)
        except FailedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    until(lambda: own.answer is not None)
    own.close()
    thread.join(10)
    assert len(errors) == 1
