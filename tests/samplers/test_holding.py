"""What a draw took is stored with its batch, and given back without one."""

import contextlib
import threading
import time
from collections import Counter

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, FailedError, FullError, SchemaError, StaleError
from mmreplay.samplers import uses
from mmreplay.samplers.base import Draw
from mmreplay.samplers.holding import Claims, all_or_nothing
from mmreplay.samplers.priority_file import PriorityColumn, PriorityFile
from mmreplay.testing import SAMPLER_RULES, check_sampler
from mmreplay.testing.samplers import FailingView, ViewFailedError

FIELDS = {
    "uid": mr.Field((), "int64"),
    "version": mr.Field((), "int64"),
    "group": mr.Field((), "int64"),
}
ROWS = 24


def ring(path, sampler=None, rows=ROWS, **options):
    """A ring of steps that have no next observation: each is a legal start."""
    engine = "memory" if path is None else "memmap"
    buffer = mr.ReplayBuffer.create(
        path, mr.Schema(FIELDS), 100, engine=engine, sampler=sampler, commit_every=None, **options
    )
    every = np.arange(rows)
    buffer.extend(uid=every, version=np.full(rows, 5), group=every // 2)
    return buffer


def counter(inner=None, maximum=1, **options):
    inner = mr.DistinctSampler(seed=0) if inner is None else inner
    return mr.UseCounter(maximum, inner, name=None, seed=0, **options)


def nothing_fresh():
    """A sampler that finds nothing to draw."""
    return mr.StalenessSampler("version", 99, 1, seed=1)


class TwoInTurn:
    """A wrapper of a user, of which no one knows that it has a counter inside."""

    def __init__(self, *inner):
        self.inner = inner
        self.step = 0

    def draw(self, view, batch_size):
        draws = [one.draw(view, batch_size) for one in self.inner]
        self.step += 1
        return Draw(
            np.concatenate([draw.env_ids for draw in draws]),
            np.concatenate([draw.positions for draw in draws]),
            np.concatenate([draw.probabilities for draw in draws]),
            np.concatenate([draw.weights for draw in draws]),
            draws[0].key,
        )

    def state_dict(self):
        return {"step": self.step, "inner": [one.state_dict() for one in self.inner]}

    def load_state_dict(self, state):
        self.step = state["step"]
        for one, own in zip(self.inner, state["inner"], strict=True):
            one.load_state_dict(own)


def used(buffer, *counters):
    """How often each row was used, of all counters together."""
    env_ids, positions = np.zeros(ROWS, int), np.arange(ROWS)
    return sum(each.uses(buffer.view, env_ids, positions) for each in counters)


def drain(buffer, sampler):
    """Every row that a sampler draws until none is left, and how often."""
    drawn = Counter()
    with contextlib.suppress(EmptyError):
        while True:
            drawn.update(buffer.sample_by(sampler, 5).positions.tolist())
    return drawn


ONCE = Counter(range(ROWS))
AROUND = {
    "mixture": lambda own: mr.MixtureSampler([(own, 1), (nothing_fresh(), 1)], seed=0),
    "recent": lambda own: mr.RecentSampler(
        2, 0.5, mr.MixtureSampler([(own, 1), (nothing_fresh(), 1)], seed=0)
    ),
    "windows": lambda own: mr.SequenceSampler(
        1, mr.MixtureSampler([(own, 1), (nothing_fresh(), 1)], seed=0)
    ),
    "a part": lambda own: mr.ignore_earliest(
        1, mr.MixtureSampler([(own, 1), (nothing_fresh(), 1)], seed=0)
    ),
    "a user's": lambda own: TwoInTurn(own, nothing_fresh()),
    "a user's in a mixture": lambda own: mr.MixtureSampler(
        [(TwoInTurn(own), 1), (nothing_fresh(), 1)], seed=0
    ),
    "a user's around a mixture": lambda own: TwoInTurn(
        mr.MixtureSampler([(own, 1), (nothing_fresh(), 1)], seed=0)
    ),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("maximum", [1, 2])
def test_a_sample_whose_second_part_is_empty_uses_nothing_up(around, maximum):
    own = counter(mr.UniformSampler(seed=0), maximum)
    with ring(None, AROUND[around](own)) as buffer:
        state = buffer.sampler.state_dict()
        for _ in range(9):
            with pytest.raises(EmptyError):
                buffer.sample(6)
        assert buffer.sampler.state_dict() == state
        assert not used(buffer, own).any()
        assert drain(buffer, own) == Counter(maximum * list(range(ROWS)))


@pytest.mark.parametrize("around", [name for name in AROUND if "user" not in name])
def test_a_draw_of_a_sampler_of_ours_uses_nothing_up_by_itself(around):
    own = counter()
    with ring(None) as buffer:
        sampler = AROUND[around](own)
        for _ in range(9):
            with pytest.raises(EmptyError):
                sampler.draw(buffer.view, 6)
        assert drain(buffer, own) == ONCE


COUNTING = {
    "counter": lambda: counter(),
    "groups": lambda: counter(mr.GroupSampler("group", 2, seed=0)),
    "recent enough": lambda: counter(mr.StalenessSampler("version", 5, 9, seed=0)),
    "leases": lambda: counter(lease_s=1000),
    "leases of groups": lambda: counter(mr.GroupSampler("group", 2, seed=0), lease_s=1000),
    "mixture": lambda: mr.MixtureSampler([(counter(), 1), (UNIFORM(), 1)], seed=0),
    "windows": lambda: mr.SequenceSampler(1, counter()),
    "a part": lambda: mr.ignore_earliest(1, counter()),
    "a user's": lambda: TwoInTurn(counter()),
}


def UNIFORM():
    return mr.UniformSampler(seed=3)


@pytest.mark.parametrize("kind", COUNTING)
@pytest.mark.parametrize("within", [False, True], ids=["drawn", "held"])
def test_a_draw_that_fails_at_any_look_at_the_view_leaves_the_next_as_it_was(kind, within):
    sampler, twin = COUNTING[kind](), COUNTING[kind]()
    with ring(None) as buffer, ring(None) as other:
        view, failures, claims = FailingView(buffer.view), 0, Claims()
        for access in range(100):
            view.left = access
            try:
                if within:
                    draw = claims.call(sampler.draw, view, 2)
                else:
                    draw = sampler.draw(view, 2)
            except ViewFailedError:
                claims.release()
                failures += 1
                continue
            break
        assert failures > 3
        assert draw.positions.tolist() == twin.draw(other.view, 2).positions.tolist()


def once(inner, seed):
    return mr.UseCounter(1, inner, name=None, seed=seed)


WRAPPERS = {
    "mixture": lambda seed: mr.MixtureSampler(
        [(once(mr.UniformSampler(seed), seed), 1), (mr.ShuffledSampler(seed), 1)], seed=seed
    ),
    "recent": lambda seed: mr.RecentSampler(2, 0.5, once(mr.UniformSampler(seed), seed), seed=seed),
    "windows": lambda seed: mr.SequenceSampler(2, once(mr.UniformSampler(seed), seed)),
    "episodes": lambda seed: mr.EpisodeSampler(once(mr.UniformSampler(seed), seed)),
    "a part": lambda seed: mr.ignore_earliest(2, once(mr.UniformSampler(seed), seed)),
    "recent versions": lambda seed: once(mr.StalenessSampler("pair", 9, seed=seed), seed),
    "groups": lambda seed: once(mr.GroupSampler("pair", seed=seed), seed),
    "priorities": lambda seed: once(mr.PrioritizedSampler(seed=seed, name=None), seed),
    "windows in a mixture": lambda seed: mr.MixtureSampler(
        [
            (mr.SequenceSampler(2, once(mr.UniformSampler(seed), seed)), 1),
            (mr.SequenceSampler(2, mr.UniformSampler(seed)), 1),
        ],
        seed=seed,
    ),
    "a user's": lambda seed: TwoInTurn(once(mr.UniformSampler(seed), seed)),
}


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("rule", [rule for rule in SAMPLER_RULES if rule.startswith("failed_")])
def test_wrappers_of_a_counter_keep_the_rules_of_draws_that_fail(kind, rule, tmp_path):
    check_sampler(WRAPPERS[kind], tmp_path, rules=[rule])


def raising(fields):
    raise ValueError("this row is bad")


@pytest.mark.parametrize(
    ("kind", "several"),
    [(kind, False) for kind in COUNTING]
    # Batches of groups cannot be divided, and leased ones not acknowledged.
    + [(kind, True) for kind in COUNTING if not {"groups", "leases"} & {*kind.split()}],
)
def test_a_batch_that_a_transform_refuses_uses_nothing_up(tmp_path, kind, several):
    sampler, twin = COUNTING[kind](), COUNTING[kind]()
    ring(tmp_path / "a").close()
    with ring(None, twin) as other:
        with mr.ReplayBuffer.open(
            tmp_path / "a", sampler=sampler, transforms=[mr.Apply(raising)]
        ) as buffer:
            state = sampler.state_dict()
            source = buffer
            if several:
                source = mr.concat([other, buffer], shares=[1, 1], seed=0)
            for _ in range(5):
                with pytest.raises(ValueError, match="this row is bad"):
                    source.sample(4)
            assert sampler.state_dict() == state
            # As if nothing had been drawn.
            first = sampler.draw(buffer.view, 4)
        assert first.positions.tolist() == other.sample(4).positions.tolist()


def test_several_samplers_are_not_put_back_over_the_draws_of_other_threads():
    """What another thread was given meanwhile does not come twice in an epoch."""
    given = []

    def fails_once(fields):
        if not given:
            other = threading.Thread(
                target=lambda: given.extend(first.sample(4).positions.tolist())
            )
            other.start()
            other.join()
            raise ValueError("after a draw in another thread")
        return fields

    first = ring(None, mr.ShuffledSampler(seed=0))
    second = ring(None, transforms=[mr.Apply(fails_once)])
    both = mr.concat([first, second], shares=[1, 1], seed=0)
    with pytest.raises(ValueError, match="after a draw in another thread"):
        both.sample(8)
    while first.sampler.epoch == 0 and first.sampler.more(first.view, 4):
        given += first.sample(4).positions.tolist()
    assert len(given) == len(set(given))


def test_a_sampler_is_not_put_back_over_the_draws_of_others():
    seen = []

    def draws_itself(fields):
        if not seen:
            seen.append(None)
            seen.extend(buffer.sample(4).positions.tolist())
            raise ValueError("after another draw")
        return fields

    sampler = mr.ShuffledSampler(seed=0)
    with mr.ReplayBuffer.create(
        None,
        mr.Schema(FIELDS),
        100,
        engine="memory",
        sampler=sampler,
        transforms=[mr.Apply(draws_itself)],
    ) as buffer:
        every = np.arange(ROWS)
        buffer.extend(uid=every, version=every, group=every)
        with pytest.raises(ValueError, match="after another draw"):
            buffer.sample(4)
        inner = seen[1:]
        later = []
        while sampler.epoch == 0:
            later += buffer.sample(4).positions.tolist()
        assert not set(inner) & set(later)


def test_a_seed_that_the_system_gave_stays_one_after_a_draw_that_failed():
    sampler = mr.MixtureSampler([(mr.UniformSampler(), 1), (nothing_fresh(), 1)])
    with ring(None, sampler) as buffer:
        seeds = [part.state_dict()["seed"] for part in sampler.parts]
        with pytest.raises(EmptyError):
            buffer.sample(4)
        assert [part.state_dict()["seed"] for part in sampler.parts] == seeds
        given = [g.given for part in sampler.parts for g in part.generators()]
        assert given == [False, True]
        assert not sampler.generators()[0].given


def test_a_sampler_that_refuses_its_own_state_keeps_the_first_error():
    class Stubborn(mr.UniformSampler):
        def load_state_dict(self, state):
            raise TypeError("no states here")

    with ring(None, Stubborn(seed=0), rows=0) as buffer:
        with pytest.raises(EmptyError) as found:
            buffer.sample(2)
        assert found.value.__notes__ == [
            "Stubborn refuses the state that it had before: no states here"
        ]


# Loaders.


@pytest.mark.parametrize("kind", ["counter", "recent enough", "a user's"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_batches_that_a_loader_never_handed_out_are_drawn_again(kind, num_threads):
    sampler = COUNTING[kind]()
    drawn = Counter()
    with ring(None, sampler) as buffer:
        for _ in range(3):
            with mr.ReplayLoader(buffer, 2, num_threads=num_threads, prefetch=4) as loader:
                drawn.update(next(iter(loader)).positions.tolist())
                _await(lambda loader=loader: loader._work.num_ready() >= 3)
        drawn += drain(buffer, sampler)
    assert drawn == ONCE


def _await(condition):
    while not condition():
        time.sleep(0.001)


def test_a_loader_whose_state_is_loaded_gives_back_what_it_drew_ahead():
    sampler = counter()
    with ring(None, sampler) as buffer, mr.ReplayLoader(buffer, 4) as loader:
        first = next(iter(loader)).positions.tolist()
        state = loader.state_dict()
        second = next(loader).positions.tolist()
        loader.load_state_dict(state)
        # By another order, as the rows of the second batch are used.
        rest = [p for batch in _batches(loader) for p in batch.positions.tolist()]
    assert Counter(first + second + rest) == ONCE


def _batches(loader):
    """All batches of a loader, until nothing is left."""
    with contextlib.suppress(EmptyError):
        yield from loader


def test_a_dropped_loader_gives_back_what_it_drew_ahead():
    sampler = counter()
    with ring(None, sampler) as buffer:
        loader = mr.ReplayLoader(buffer, 4, prefetch=4)
        drawn = Counter(next(iter(loader)).positions.tolist())
        work = loader._work
        _await(lambda: work.num_ready() >= 3)
        del loader
        assert drawn + drain(buffer, sampler) == ONCE


def test_a_loader_hands_out_after_a_batch_that_a_transform_refused(tmp_path):
    refused = []

    def once(fields):
        if not refused:
            refused.append(fields["uid"].tolist())
            raise ValueError("this row is bad")
        return fields

    ring(tmp_path / "a").close()
    sampler, drawn = counter(), Counter()
    with (
        mr.ReplayBuffer.open(
            tmp_path / "a", sampler=sampler, transforms=[mr.Apply(once)]
        ) as buffer,
        mr.ReplayLoader(buffer, 4, prefetch=3) as loader,
    ):
        batches = iter(loader)
        with pytest.raises(ValueError, match="this row is bad"):
            next(batches)
        for _ in range(5):
            drawn.update(next(batches).positions.tolist())
        # The refused rows are drawn as any others.
        with contextlib.suppress(EmptyError):
            while True:
                drawn.update(next(batches).positions.tolist())
    with mr.ReplayBuffer.open(tmp_path / "a") as buffer:
        drawn += drain(buffer, sampler)
    assert drawn == ONCE


@pytest.mark.parametrize("maximum", [1, 3])
def test_loaders_and_samples_of_several_threads_use_each_row_just_as_often(maximum):
    sampler = counter(mr.UniformSampler(seed=1), maximum)
    drawn, lock, failures = Counter(), threading.Lock(), []

    def learn(number):
        try:
            with mr.ReplayLoader(buffer, 1 + number, prefetch=3) as loader:
                for turn, batch in enumerate(loader):
                    with lock:
                        drawn.update(batch.positions.tolist())
                    if turn == 3:
                        break
            with contextlib.suppress(EmptyError):
                while True:
                    batch = buffer.sample(2)
                    with lock:
                        drawn.update(batch.positions.tolist())
        except EmptyError:
            pass
        except BaseException as error:
            failures.append(error)

    with ring(None, sampler) as buffer:
        threads = [threading.Thread(target=learn, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        drawn += drain(buffer, sampler)
    assert drawn == Counter(maximum * list(range(ROWS)))


def test_a_released_batch_loses_no_use_to_one_that_was_handed_out_after_it():
    sampler = counter(maximum=2)
    with ring(None, sampler, rows=4) as buffer:
        first, second = (mr.ReplayLoader(buffer, 4, prefetch=1) for _ in range(2))
        with second:
            with first:
                # Both have each row: one use is of the first, and one of the second.
                iter(first)
                _await(lambda: first._work.num_ready() >= 1)
                iter(second)
                batch = next(second)
            drawn = Counter(batch.positions.tolist())
        assert drawn + drain(buffer, sampler) == Counter(2 * list(range(4)))


def test_the_clock_of_a_batch_begins_when_it_is_handed_out(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(uses, "monotonic", lambda: clock[0])
    sampler = counter(lease_s=10)
    with ring(None, sampler) as buffer, mr.ReplayLoader(buffer, 4) as loader:
        iter(loader)
        _await(lambda: loader._work.num_ready() >= 2)
        assert sampler._leases == {}
        clock[0] = 150.0  # the batches wait longer than any lease
        batch = next(loader)
        clock[0] = 159.0
        assert len(buffer.ticket(batch)["positions"]) == 4
        assert buffer.acknowledge(batch) == 4
        late = next(loader)
        clock[0] = 170.0
        buffer.sample(1)
        with pytest.raises(StaleError, match="the batch has no lease"):
            buffer.ticket(late)


def test_counts_that_are_closed_hand_out_nothing_that_was_drawn_before(tmp_path):
    sampler = mr.UseCounter(1, mr.DistinctSampler(seed=0))
    with ring(tmp_path / "a", sampler) as buffer:
        with mr.ReplayLoader(buffer, 4) as loader:
            iter(loader)
            _await(lambda: loader._work.num_ready() >= 2)
            sampler.close()
            with pytest.raises(
                FailedError,
                match=r"the counts of uses 'uses' were closed before a batch that they "
                r"are of was handed out\. Draw another batch",
            ):
                next(loader)
        assert drain(buffer, sampler) == ONCE


def test_a_draw_for_a_dataloader_is_counted_when_it_is_yielded():
    sampler = counter()
    with ring(None) as buffer:
        dataset = mr.ReplayDataset(buffer)
        draws = iter(dataset.draws(sampler, 4))
        assert not used(buffer, sampler).any()
        draw = next(draws)
        assert used(buffer, sampler).sum() == 4
        assert len(dataset[draw]) == 4
        poor = TwoInTurn(sampler, nothing_fresh())
        failing = iter(dataset.draws(poor, 4))
        with pytest.raises(EmptyError):
            next(failing)
        assert used(buffer, sampler).sum() == 4


def test_draws_continue_after_a_resize_with_batches_ahead(tmp_path):
    sampler = mr.UseCounter(1, mr.DistinctSampler(seed=0))
    with ring(tmp_path / "a", sampler) as buffer:
        with mr.ReplayLoader(buffer, 2, prefetch=3) as loader:
            iter(loader)
            _await(lambda: loader._work.num_ready() >= 3)
            buffer.resize(200)
            drawn = Counter(next(loader).positions.tolist())
            drawn.update(next(loader).positions.tolist())
        assert drawn + drain(buffer, sampler) == ONCE


# Two rings.


def failing_store(monkeypatch, column_type, number):
    """Have one store of counts fail, after it changed them, and no other."""
    calls, store = [0], column_type.store

    def fail(self, rows, numbers):
        store(self, rows, numbers)
        calls[0] += 1
        if calls[0] == number:
            raise FullError("no space is left")

    monkeypatch.setattr(column_type, "store", fail)


@pytest.mark.parametrize("where", ["RAM", "disk"])
@pytest.mark.parametrize("number", [1, 2])
def test_where_the_second_ring_cannot_store_the_first_is_put_back(
    tmp_path, monkeypatch, where, number
):
    folders = [None, None] if where == "RAM" else [tmp_path / "a", tmp_path / "b"]
    name = None if where == "RAM" else "uses"
    samplers = [mr.UseCounter(1, mr.DistinctSampler(seed=n), name=name) for n in range(2)]
    with ring(folders[0], samplers[0]) as one, ring(folders[1], samplers[1]) as other:
        both = mr.concat([one, other], shares=[1, 1], seed=0)
        for buffer, sampler in zip((one, other), samplers, strict=True):
            assert not used(buffer, sampler).any()
        state = both.state_dict()
        column_type = PriorityColumn if where == "RAM" else PriorityFile
        with monkeypatch.context() as patch:
            failing_store(patch, column_type, number)
            with pytest.raises(FullError, match="no space is left"):
                both.sample(4)
        assert both.state_dict() == state
        for buffer, sampler in zip((one, other), samplers, strict=True):
            assert not used(buffer, sampler).any()
            assert drain(buffer, sampler) == ONCE


def test_where_a_second_ring_cannot_store_the_first_is_released():
    first, second = counter(lease_s=1000), counter(lease_s=1000)
    with ring(None, first) as one, ring(None, second) as other:
        claims = Claims()
        for buffer, sampler in ((one, first), (other, second)):
            claims.call(sampler.draw, buffer.view, 4)
        second.close()
        with pytest.raises(FailedError, match="were closed before a batch"):
            claims.store()
        assert first._leases == {}
        assert drain(one, first) == ONCE
        assert drain(other, second) == ONCE


def test_a_loader_over_two_rings_loses_no_use_and_makes_none_twice():
    samplers = [counter(mr.UniformSampler(seed=n)) for n in range(2)]
    drawn = [Counter(), Counter()]
    with ring(None, samplers[0]) as one, ring(None, samplers[1]) as other:
        for turn in range(3):
            both = mr.concat([one, other], shares=[1, 1], seed=turn)
            with mr.ReplayLoader(both, 4, prefetch=3) as loader:
                batch = next(iter(loader))
                _await(lambda loader=loader: loader._work.num_ready() >= 2)
            for number in range(2):
                mine = batch.positions[batch.buffer_ids == number]
                drawn[number].update(mine.tolist())
        for number, buffer in enumerate((one, other)):
            drawn[number] += drain(buffer, samplers[number])
    assert drawn == [ONCE, ONCE]


# Refusals.


@pytest.mark.parametrize(
    ("samplers", "message"),
    [
        (
            lambda: [counter(mr.GroupSampler("group", 2)) for _ in range(2)],
            r"concat cannot divide batches of groups, which the UseCounter of buffer 0 "
            r"draws\. Draw from each buffer by itself",
        ),
        (
            lambda: [
                mr.UniformSampler(0),
                mr.EpisodeSampler(mr.UniformSampler(0), layout="ragged"),
            ],
            r"concat cannot divide batches of ragged episodes, which the "
            r"EpisodeSampler of buffer 1 draws\. Create the EpisodeSampler with l",
        ),
        (
            lambda: [mr.UniformSampler(0), mr.SequenceSampler(2)],
            r"concat: samplers must all draw the same, got \['single steps', 'windows "
            r"of 2 steps'\]\. Give all buffers samplers of single steps, or of windows",
        ),
        (
            lambda: [counter()] * 2,
            r"concat: a UseCounter must count in one buffer alone, got one that is in "
            r"the samplers of two\. Give each buffer a sampler of its own",
        ),
    ],
)
def test_samplers_that_share_no_batch_are_refused_before_any_draw(samplers, message):
    first, second = samplers()
    with ring(None, first) as one, ring(None, second) as other:
        with pytest.raises(SchemaError, match=message):
            mr.concat([one, other], seed=0)
        one.sampler = other.sampler = mr.UniformSampler(0)
        both = mr.concat([one, other], seed=0)
        one.sampler, other.sampler = first, second
        with pytest.raises(SchemaError, match=message):
            both.sample(4)


def test_counters_of_one_name_are_refused_in_one_mixture():
    message = (
        r"name must be another one for each UseCounter of a sampler, got 'uses' "
        r"twice\. Give each a name of its own, or None"
    )
    with pytest.raises(SchemaError, match=message):
        mr.MixtureSampler([(mr.UseCounter(1), 1), (mr.UseCounter(2), 1)])
    with pytest.raises(SchemaError, match=message):
        mr.MixtureSampler([(mr.ignore_earliest(2, mr.UseCounter(1)), 1), (mr.UseCounter(1), 1)])
    one = mr.UseCounter(1)
    mr.MixtureSampler([(one, 1), (one, 2), (mr.UseCounter(1, name="other"), 1)])
    mr.MixtureSampler([(counter(), 1), (counter(), 1)])


def test_what_is_drawn_within_another_draw_is_stored_with_it():
    one, other = counter(), counter()
    with ring(None) as buffer:

        def draw_both():
            all_or_nothing([one], one.draw, buffer.view, 4)
            assert not used(buffer, one).any()
            return all_or_nothing([other], other.draw, buffer.view, 4)

        all_or_nothing([], draw_both)
        assert used(buffer, one).sum() == used(buffer, other).sum() == 4


class HandsOut:
    """A sampler of a user during whose draw another thread hands a batch out."""

    def __init__(self, inner):
        self.inner, self.waiting = inner, []

    def draw(self, view, batch_size):
        while self.waiting:
            thread = threading.Thread(target=self.waiting.pop().store)
            thread.start()
            thread.join()
        return self.inner.draw(view, batch_size)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


@pytest.mark.parametrize("maximum", [2, 3])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_use_that_is_handed_out_during_a_draw_counts_once(maximum, rows):
    inside = HandsOut(mr.DistinctSampler(seed=0))
    sampler = counter(inside, maximum)
    with ring(None, sampler, rows=rows) as buffer:
        for turn in range(maximum):
            drawn = buffer.view.draw(sampler, rows)
            assert len(drawn.draw) == rows, turn
            inside.waiting.append(drawn.claims)
        with pytest.raises(EmptyError, match=f"used {maximum} times"):
            buffer.sample(1)
        every = np.arange(rows)
        assert sampler.uses(buffer.view, 0 * every, every).tolist() == [maximum] * rows
