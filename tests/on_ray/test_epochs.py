"""Shuffled epochs over several rings: each legal start once, resumable, disjoint."""

import json
from collections import Counter

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, FormatError, SchemaError
from mmreplay.format.ray_files import FrozenEpoch, read_epochs
from mmreplay.ray.epochs import NUM_NAMES, EpochPlan, FrozenEpochs, FrozenRun, at_epoch, frozen_now

SCHEMA = mr.Schema({"n": mr.Field((), "int64"), "terminated": mr.Field((), "bool")})
A, B = "a" * 32, "b" * 32


class Rings:
    """Rings of one process, served as a shard serves them."""

    def __init__(self, folder, sizes, capacity=100, transforms=(), make=None):
        self.make = make or mr.ShuffledSampler
        self.writers, self.readers, self.epochs = {}, {}, {}
        self.written = 0
        for number, size in enumerate(sizes):
            path = folder / f"ring-{number}"
            writer = mr.ReplayBuffer.create(path, SCHEMA, capacity, commit_every=None)
            uuid = writer.metadata.uuid.hex()
            self.writers[uuid] = writer
            self.readers[uuid] = mr.ReplayBuffer.open(path, transforms=transforms)
            self.epochs[uuid] = FrozenEpochs(path, uuid)
            self.add(uuid, size)

    def add(self, uuid, count):
        numbers = np.arange(self.written, self.written + count)
        self.written += count
        if count:
            self.writers[uuid].extend(n=numbers, terminated=numbers % 10 == 9)

    def freeze(self, name, epoch):
        buffers = sorted(self.readers)
        frozen = {}
        for uuid in buffers:
            view = self.readers[uuid].view

            def look(view=view):
                with view.lock:
                    return frozen_now(self.make(), view)

            frozen[uuid] = self.epochs[uuid].freeze(name, epoch, buffers, look)
        return FrozenRun.of(frozen)

    def draw(self, share, name="x"):
        """The numbers of the rows of one batch."""
        drawn = []
        for uuid, shares in share.shares.items():
            frozen = self.epochs[uuid].get(name, share.epoch)
            assert share.name == name
            sampler = at_epoch(self.make(), frozen, uuid)
            reader = self.readers[uuid]
            with reader.view.lock:
                draw = sampler.draw_at(reader.view, shares)
            drawn.append(reader.gather(draw)["n"])
        return np.concatenate(drawn) if drawn else np.empty(0, np.int64)

    def legal(self, uuid):
        """The numbers of all legal starts of a ring now."""
        view = self.readers[uuid].view
        total = self.make().mass(view, 0).num_legal
        if not total:
            return []
        env_ids, positions = view.start_at(np.arange(total))
        return self.readers[uuid].take(env_ids, positions)["n"].tolist()

    def all_legal(self):
        return sorted(n for uuid in self.readers for n in self.legal(uuid))

    def close(self):
        for buffer in (*self.writers.values(), *self.readers.values()):
            buffer.close()


@pytest.fixture
def made(tmp_path):
    rings = []

    def make(sizes, **options):
        rings.append(Rings(tmp_path / f"run-{len(rings)}", sizes, **options))
        return rings[-1]

    yield make
    for each in rings:
        each.close()


def go_through(plan, rings, batch_size, name="x"):
    """Draw the rest of an epoch; the batches."""
    batches = []
    if plan.frozen(plan.epoch) is None:
        plan.begin(rings.freeze(name, plan.epoch))
    for uuid, frozen in plan.frozen(plan.epoch).rings.items():
        rings.epochs[uuid].put(frozen)
    while (part := plan.next(batch_size)) is not None:
        batch = rings.draw(part, name)
        plan.gathered(part, len(batch))
        batches.append(batch.tolist())
    plan.next_epoch()
    return batches


def flat(batches):
    return [each for batch in batches for each in batch]


@pytest.mark.parametrize("sizes", [[30], [40, 0, 17], [1, 1, 1], [90, 3, 250]])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"shuffle": False}, {"block": 7}], ids=["", "in order", "blocks"]
)
def test_each_start_once_and_ranks_disjoint(made, sizes, num_ranks, options):
    rings = made(sizes, capacity=100)
    plans = [
        EpochPlan(mr.ShuffledSampler(5, **options), rank, num_ranks) for rank in range(num_ranks)
    ]
    for _ in range(2):
        drawn = [flat(go_through(plan, rings, 8)) for plan in plans]
        assert sorted(flat(drawn)) == rings.all_legal()
        sizes_of_ranks = [len(each) for each in drawn]
        assert max(sizes_of_ranks) - min(sizes_of_ranks) <= 1
        assert all(plan.skipped == 0 for plan in plans)


def test_epochs_have_orders_of_their_own_and_seeds_too(made):
    rings = made([60, 40])
    plan = EpochPlan(mr.ShuffledSampler(5))
    orders = [flat(go_through(plan, rings, 9)) for _ in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    other = EpochPlan(mr.ShuffledSampler(6))
    assert flat(go_through(other, rings, 9)) not in orders
    again = EpochPlan(mr.ShuffledSampler(5))
    assert [flat(go_through(again, rings, 9)) for _ in range(3)] == orders


@pytest.mark.parametrize("options", [{}, {"block": 5}, {"shuffle": False}])
def test_over_one_ring_an_epoch_is_that_of_the_sampler(made, options):
    rings = made([77])
    (reader,) = rings.readers.values()
    reader.sampler = mr.ShuffledSampler(5, **options)
    plan = EpochPlan(mr.ShuffledSampler(5, **options))
    for _ in range(2):
        expected = [reader.sample(10)["n"].tolist() for _ in range(8)]
        assert go_through(plan, rings, 10) == expected


def test_what_is_written_during_an_epoch_is_for_the_next_one(made):
    rings = made([30, 20])
    first, _ = rings.readers
    plan = EpochPlan(mr.ShuffledSampler(0))
    plan.begin(rings.freeze("x", 0))
    part = plan.next(10)
    plan.gathered(part, len(rings.draw(part)))
    rings.add(first, 40)
    drawn = flat(go_through(plan, rings, 10))
    assert len(drawn) == 40
    assert max(drawn) < 50
    assert sorted(flat(go_through(plan, rings, 10))) == list(range(90))


@pytest.mark.parametrize("seed", range(10))
def test_a_ring_that_wraps_in_mid_epoch_skips_what_is_gone_and_nothing_else(made, seed):
    rng = np.random.default_rng(seed)
    rings = made([100, 60, 30], capacity=100)
    plans = [EpochPlan(mr.ShuffledSampler(seed), rank, 2) for rank in range(2)]
    frozen = rings.freeze("x", 0)
    for plan in plans:
        plan.begin(frozen)
    then = rings.all_legal()
    drawn, sent, alive_at_end = [], 0, set()
    turn = 0
    while any(plan.epoch == 0 for plan in plans):
        plan = plans[turn % 2]
        turn += 1
        if plan.epoch:
            continue
        part = plan.next(8)
        if part is None:
            plan.next_epoch()
            continue
        batch = rings.draw(part)
        plan.gathered(part, len(batch))
        drawn += batch.tolist()
        sent += part.stop - part.first
        for uuid in rings.readers:
            rings.add(uuid, int(rng.integers(0, 8)))
    alive_at_end = set(rings.all_legal())
    assert sent == len(then)
    assert max(Counter(drawn).values()) == 1
    assert set(drawn) <= set(then)
    # Whatever was alive to the end was drawn; the rest was drawn or skipped.
    assert set(then) & alive_at_end <= set(drawn)
    assert sum(plan.skipped for plan in plans) == len(then) - len(drawn) > 0


def test_an_epoch_of_which_nothing_is_left_hands_over_empty_batches(made):
    rings = made([100], capacity=100)
    (uuid,) = rings.readers
    plan = EpochPlan(mr.ShuffledSampler(0))
    plan.begin(rings.freeze("x", 0))
    rings.add(uuid, 300)
    assert flat(go_through(plan, rings, 30)) == []
    assert plan.skipped == 100
    assert len(flat(go_through(plan, rings, 30))) == 100
    assert plan.skipped == 0


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_state_after_any_batch_goes_on_as_if_nothing_happened(made, ahead):
    rings = made([41, 30])
    plan = EpochPlan(mr.ShuffledSampler(3))
    states, batches, parts = [], [], []
    for _ in range(25):
        while len(parts) <= ahead:
            if plan.frozen(plan.epoch) is None:
                plan.begin(rings.freeze("x", plan.epoch))
            state = json.dumps(plan.state_dict())
            part = plan.next(8)
            if part is None:
                plan.next_epoch()
            else:
                states.append(state)
                parts.append(part)
        part = parts.pop(0)
        batch = rings.draw(part)
        plan.gathered(part, len(batch))
        batches.append(batch.tolist())
    for number in (0, 1, 4, 8, 9, 10, 17, 20):
        other = EpochPlan(mr.ShuffledSampler(99))
        other.load_state_dict(json.loads(states[number]))
        found = []
        while len(found) < 25 - number:
            found += go_through(other, rings, 8)
        assert found[: 25 - number] == batches[number:]


def test_a_state_brings_back_what_the_rings_forgot(made):
    rings = made([20, 20])
    plan = EpochPlan(mr.ShuffledSampler(3))
    plan.begin(rings.freeze("x", 0))
    part = plan.next(10)
    drawn = rings.draw(part).tolist()
    plan.gathered(part, 10)
    state = plan.state_dict()
    for uuid in rings.readers:
        rings.add(uuid, 30)
    for epoch in (1, 2):
        rings.freeze("x", epoch)
    other = EpochPlan(mr.ShuffledSampler(3))
    other.load_state_dict(state)
    assert all(epochs.get("x", 0) is None for epochs in rings.epochs.values())
    assert sorted(drawn + flat(go_through(other, rings, 10))) == list(range(40))


def test_without_a_last_batch_every_rank_has_as_many_full_ones(made):
    rings = made([41, 30])
    plans = [EpochPlan(mr.ShuffledSampler(3, drop_last=True), r, 3) for r in range(3)]
    batches = [go_through(plan, rings, 5) for plan in plans]
    # 71 starts, 23 of each rank.
    assert [[len(batch) for batch in own] for own in batches] == [[5] * 4] * 3


def test_windows_and_steps_behind_transforms_have_starts_of_their_own(made):
    def windows():
        return mr.SequenceSampler(4, mr.ShuffledSampler())

    rings = made([35, 28], make=windows)
    starts = rings.freeze("x", 0).totals.sum()
    plan = EpochPlan(mr.ShuffledSampler(1))
    drawn = flat(go_through(plan, rings, 8))
    firsts = [window[0] for window in drawn]
    assert len(set(firsts)) == len(firsts) == starts

    rings = made([35, 28], transforms=[mr.NStep(3, 0.9, "n")])
    plan = EpochPlan(mr.ShuffledSampler(1))
    assert sorted(flat(go_through(plan, rings, 8))) == rings.all_legal()


def test_a_frozen_epoch_outlives_the_process_and_is_never_frozen_twice(tmp_path):
    epochs = FrozenEpochs(tmp_path, A)
    counts = iter(range(1, 100))

    def look():
        count = next(counts)
        return np.array([count, 0]), np.array([count, 0])

    first = epochs.freeze("x", 0, [A, B], look)
    assert first == FrozenEpoch("x", 0, (1, 0), (1, 0), (A, B))
    assert epochs.freeze("x", 0, [A], look) is first
    again = FrozenEpochs(tmp_path, A)
    assert again.freeze("x", 0, [A, B], look) == first
    assert again.get("x", 1) is None


def test_the_two_newest_epochs_of_a_name_are_remembered(tmp_path):
    epochs = FrozenEpochs(tmp_path, A)

    def look():
        return np.array([7]), np.array([7])

    for epoch in range(5):
        epochs.freeze("x", epoch, [A], look)
        epochs.freeze("y", 2 * epoch, [A], look)
    found = [(each.name, each.epoch) for each in read_epochs(tmp_path)]
    assert sorted(found) == [("x", 3), ("x", 4), ("y", 6), ("y", 8)]
    epochs.put(FrozenEpoch("x", 0, (7,), (7,), (A,)))
    assert epochs.get("x", 0)
    assert epochs.get("x", 4)
    assert epochs.get("x", 3) is None
    assert epochs.names("") == ["y", "x"]
    assert epochs.names("y") == ["y"]
    for number in range(NUM_NAMES + 5):
        epochs.freeze(f"z{number}", 0, [A], look)
    assert epochs.names("") == [f"z{number}" for number in range(5, NUM_NAMES + 5)]


def test_samplers_and_options_that_have_no_epochs_over_rings_are_refused(made):
    rings = made([10])
    (reader,) = rings.readers.values()
    with pytest.raises(SchemaError, match="epochs need a ShuffledSampler"):
        frozen_now(mr.UniformSampler(), reader.view)
    with pytest.raises(SchemaError, match="batches must be None"):
        EpochPlan(mr.ShuffledSampler(batches=3))
    with pytest.raises(SchemaError, match="layout must be 'env_major'"):
        EpochPlan(mr.ShuffledSampler(shuffle=False, layout="time_major"))


def test_too_few_starts_for_all_learners_are_refused(made):
    rings = made([2])
    plan = EpochPlan(mr.ShuffledSampler(0), 2, 3)
    with pytest.raises(EmptyError, match="each of 3 learners, got 2 in 1 rings"):
        plan.begin(rings.freeze("x", 0))


def test_rings_that_are_not_those_of_one_epoch_are_refused():
    rings = {A: FrozenEpoch("x", 0, (1,), (1,), (A, B))}
    with pytest.raises(FormatError, match="is over other rings"):
        FrozenRun.of(rings)
    rings[B] = FrozenEpoch("x", 1, (1,), (1,), (A, B))
    with pytest.raises(FormatError, match="is over other rings"):
        FrozenRun.of(rings)
    rings[B] = FrozenEpoch("x", 0, (4,), (3,), (A, B))
    assert FrozenRun.of(rings).totals.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "ShuffledSampler"}, "kind must be 'EpochPlan'"),
        ({"num_ranks": 2}, "num_ranks"),
        ({"done": 21}, "done must be at most"),
        ({"done": 1, "began": None}, "done must be at most"),
        ({"began": 3}, "began must describe"),
        ({"began": {"name": "x", "rings": {A: {"stops": [1]}}}}, "an object with"),
        ({"began": {"name": "x", "rings": {A: 3}}}, "an object with"),
    ],
)
def test_states_of_other_things_are_refused(made, change, match):
    rings = made([20])
    plan = EpochPlan(mr.ShuffledSampler(0))
    plan.begin(rings.freeze("x", 0))
    plan.gathered(plan.next(8), 8)
    state = plan.state_dict() | change
    before = plan.state_dict()
    with pytest.raises(FormatError, match=match):
        plan.load_state_dict(state)
    assert plan.state_dict() == before
