"""Batches of several rings by one law, over shards of this process."""

import math
import pickle
import shutil
import threading
import time
import warnings

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import (
    EmptyError,
    FailedError,
    LockedError,
    SchemaError,
    StaleError,
    StarvedError,
)
from mmreplay.loader.prefetch import PendingBatch
from mmreplay.ray import draws, priority_updates, requests, ring_table
from mmreplay.ray.client_stats import LostWarning
from mmreplay.ray.cluster import ALIVE, RESTARTING
from mmreplay.ray.sources import RingsSource
from mmreplay.storage.gather import SharedArrays
from tests.combinations.own_sampler import ThirdsSampler
from tests.on_ray.rings import SCHEMA, Run, Shard, ring
from tests.samplers.frequencies import assert_distribution
from tests.waits import until


@pytest.fixture
def make(tmp_path):
    """Make a source over rings of these numbers, one shard each."""
    made = []

    def source(numbers, sampler, *, keys=None, here="elsewhere", **options):
        shards = []
        for number, own in enumerate(numbers):
            key = f"s{number}" if keys is None else keys[number]
            folder = tmp_path / f"{len(made)}-{number}"
            shards.append(Shard(key, {"r": ring(folder, own)}))
        run = Run(*shards, key=here)
        # No node is lost because this machine is busy.
        options.setdefault("lost_s", 600.0)
        result = RingsSource(run, sampler, (), **options)
        made.append((result, run))
        return result, shards

    yield source
    for result, run in made:
        for shard in run.known:
            shard.state = "alive"
        result.close()
        run.close()


def sample(source, count):
    """The next batch."""
    return source.sample(PendingBatch(), count)


def draw(source, count):
    """A batch that is asked for and not gathered."""
    pending = PendingBatch()
    source.draw(pending, count)
    return pending


def prioritize(source, number, values):
    """Give the first rows of a ring these priorities, at once."""
    count = len(values)
    shard = source.table.rings[number].shard
    update = {
        "env_ids": np.zeros(count, np.int64),
        "positions": np.arange(count),
        "values": np.asarray(values, np.float32),
        "mask": None,
    }
    arguments = (source.table.client, {source.table.rings[number].name: [update]}, None, 0.0)
    calls = shard.calls.send("exchange", *arguments)
    calls.result(1.0)


LOCAL = pytest.mark.parametrize("here", ["elsewhere", "s0"])


@pytest.mark.parametrize(("here", "alone"), [("elsewhere", False), ("s0", False), ("s0", True)])
@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("normalize", ["batch", "buffer", "mean"])
def test_one_ring_draws_what_the_local_sampler_draws(
    make, tmp_path, here, alone, stratified, normalize, rng
):
    options = {"stratified": stratified, "normalize": normalize, "seed": 5}
    values = rng.random(300) ** 4
    path = ring(tmp_path / "local", np.arange(300))
    local = mr.ReplayBuffer.open(path, sampler=mr.PrioritizedSampler(**options))
    sampler = mr.PrioritizedSampler(**options)
    source, _ = make([np.arange(300)], sampler, here=here, alone=alone)
    with local.view.lock:
        local.sampler.update_priorities(local.view, np.zeros(300, np.int64), np.arange(300), values)
    prioritize(source, 0, values)
    source.table.ask_all()
    for _ in range(20):
        expected, batch = local.sample(64), sample(source, 64)
        np.testing.assert_array_equal(batch.positions, expected.positions)
        np.testing.assert_array_equal(batch["n"], expected["n"])
        np.testing.assert_array_equal(batch.probabilities, expected.probabilities)
        np.testing.assert_allclose(batch.weights, expected.weights, rtol=1e-6)
        new = rng.random(64)
        local.update_priorities(expected, new)
        source.update_priorities(batch, new)
    local.close()


def probabilities_of_thirds(sizes):
    """Probability of each row by `ThirdsSampler`, of the row's own number."""
    masses = {
        100 * ring + position: 1.0 if position % 3 else 5.0
        for ring, size in enumerate(sizes)
        for position in range(size)
    }
    total = sum(masses.values())
    return {number: mass / total for number, mass in masses.items()}


PROBABILITIES = {
    "a user's own": (lambda: ThirdsSampler(0), probabilities_of_thirds),
    "as many of each environment": (
        lambda: mr.StratifiedSampler(0),
        lambda sizes: {
            100 * ring + position: 1 / len(sizes) / size
            for ring, size in enumerate(sizes)
            for position in range(size)
        },
    ),
    "not the oldest": (
        lambda: mr.ignore_earliest(2, mr.UniformSampler(0)),
        lambda sizes: {
            100 * ring + position: 1 / (sum(sizes) - 2 * len(sizes))
            for ring, size in enumerate(sizes)
            for position in range(2, size)
        },
    ),
}


@LOCAL
@pytest.mark.parametrize("name", PROBABILITIES)
def test_probabilities_of_shares_are_those_of_one_ring_with_all_rows(make, here, name):
    sampler, probabilities = PROBABILITIES[name]
    sizes = (30, 12, 3)
    source, _ = make(
        [np.arange(size) + 100 * ring for ring, size in enumerate(sizes)], sampler(), here=here
    )
    expected, drawn = probabilities(sizes), []
    for _ in range(100):
        batch = sample(source, 64)
        numbers = batch["n"].tolist()
        drawn += numbers
        np.testing.assert_allclose(batch.probabilities, [expected[n] for n in numbers])
        np.testing.assert_array_equal(batch.weights, np.ones(64, np.float32))
    assert_distribution(drawn, expected)


@LOCAL
def test_one_ring_draws_what_a_user_s_own_sampler_draws(make, tmp_path, here):
    path = ring(tmp_path / "local", np.arange(300))
    local = mr.ReplayBuffer.open(path, sampler=ThirdsSampler(3))
    source, _ = make([np.arange(300)], ThirdsSampler(3), here=here)
    for _ in range(10):
        expected, batch = local.sample(50), sample(source, 50)
        np.testing.assert_array_equal(batch["n"], expected["n"])
        np.testing.assert_array_equal(batch.probabilities, expected.probabilities)
    local.close()


@LOCAL
def test_one_ring_draws_what_the_local_uniform_sampler_draws(make, tmp_path, here):
    path = ring(tmp_path / "local", np.arange(300))
    local = mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(seed=3))
    source, _ = make([np.arange(300)], mr.UniformSampler(seed=3), here=here)
    for _ in range(10):
        expected, batch = local.sample(50), sample(source, 50)
        np.testing.assert_array_equal(batch.positions, expected.positions)
        np.testing.assert_array_equal(batch["n"], expected["n"])
        np.testing.assert_array_equal(batch.probabilities, expected.probabilities)
        np.testing.assert_array_equal(batch.weights, np.ones(50, np.float32))
    local.close()


@pytest.mark.parametrize("per_call", [1, 3])
@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("normalize", ["batch", "buffer", "mean"])
@pytest.mark.parametrize("windows", [False, True])
def test_rings_are_drawn_from_and_weighted_as_one_buffer(
    make, per_call, stratified, normalize, windows, rng
):
    sizes = (3, 400, 40)
    sampler = mr.PrioritizedSampler(beta=0.7, stratified=stratified, normalize=normalize, seed=1)
    if windows:
        # One step each: the windows' starts are the steps themselves.
        sampler = mr.SequenceSampler(1, sampler)
    source, _ = make([np.arange(n) for n in sizes], sampler, here="s1", per_call=per_call)
    values = [rng.random(size) + 0.01 for size in sizes]
    for number, own in enumerate(values):
        prioritize(source, number, own)
    source.table.ask_all()
    masses = np.concatenate([(v.astype(np.float32) + 1e-6) ** 0.6 for v in values])
    law, firsts = masses / masses.sum(), np.array([0, 3, 403])
    drawn = []
    for _ in range(300):
        batch = sample(source, 128)
        rows = firsts[batch.buffer_ids] + batch.positions
        drawn += rows.tolist()
        np.testing.assert_array_equal(batch["n"].reshape(-1), batch.positions)
        np.testing.assert_allclose(batch.probabilities, law[rows], rtol=1e-6)
        weights = (len(law) * law[rows]) ** -0.7
        scale = {"batch": weights.max(), "buffer": (len(law) * law.min()) ** -0.7, "mean": 1.0}[
            normalize
        ]
        np.testing.assert_allclose(batch.weights, weights / scale, rtol=1e-5)
        assert (np.diff(batch.buffer_ids) >= 0).all()
    # Stratified draws vary less than independent ones, so the test is conservative.
    assert_distribution(drawn, dict(enumerate(law)))


def test_uniform_draws_are_those_of_one_buffer(make):
    sizes = (5, 200, 60)
    source, _ = make([np.arange(n) for n in sizes], mr.UniformSampler(seed=2), here="s2")
    firsts, drawn = np.array([0, 5, 205]), []
    for _ in range(200):
        batch = sample(source, 128)
        np.testing.assert_array_equal(batch["n"], batch.positions)
        np.testing.assert_allclose(batch.probabilities, 1 / 265)
        np.testing.assert_array_equal(batch.weights, 1.0)
        drawn += (firsts[batch.buffer_ids] + batch.positions).tolist()
    assert_distribution(drawn, dict.fromkeys(range(265), 1 / 265))


@pytest.mark.parametrize("sampler", [mr.UniformSampler, mr.PrioritizedSampler])
def test_a_ring_of_a_thousandth_of_the_rows_gets_a_thousandth(make, sampler):
    source, _ = make([np.arange(10), np.arange(10_000)], sampler(seed=0))
    drawn = np.zeros(10, np.int64)
    for _ in range(500):
        batch = sample(source, 1000)
        drawn += np.bincount(batch.positions[batch.buffer_ids == 0], minlength=10)
    # 500,000 draws, 499.5 of them expected from the ten rows; independent ones have a
    # variance of as many: 5 standard deviations are 112. Chi-square of the ten rows
    # with 9 degrees of freedom: 40 is passed once in 10^5.
    assert abs(drawn.sum() - 499.5) < 112
    assert ((drawn - 49.95) ** 2 / 49.95).sum() < 40


@LOCAL
def test_weights_stay_unbiased_where_masses_moved_since_the_plan(make, here, rng):
    """The mean of a value, estimated by stale masses, is the mean of all rows now."""
    sampler = mr.PrioritizedSampler(1.0, 1.0, eps=0.0, normalize="mean", seed=4)
    source, _ = make([np.arange(30), np.arange(300)], sampler, here=here)
    values = [rng.normal(1, 1, 30), rng.normal(3, 1, 300)]
    estimates, wrong = [], []
    for turn in range(1500):
        low = [rng.random(30) + 0.1, rng.random(300) + 0.1]
        # They swing by a factor of 40 between two plans, in opposite ways.
        swing = [40.0 if (turn + n) % 2 else 1.0 for n in range(2)]
        pending = draw(source, 32)
        for number in range(2):
            prioritize(source, number, low[number] * swing[number])
        batch = source.gather(pending)
        drawn = np.array(
            [values[i][p] for i, p in zip(batch.buffer_ids, batch.positions, strict=True)]
        )
        estimates.append((batch.weights * drawn).mean())
        masses = [own * by for own, by in zip(low, swing, strict=True)]
        total = sum(own.sum() for own in masses)
        naive = np.array(
            [
                total / (330 * masses[i][p])
                for i, p in zip(batch.buffer_ids, batch.positions, strict=True)
            ]
        )
        wrong.append((naive * drawn).mean())
    truth = np.concatenate(values).mean()
    # Five standard errors; by the masses of now alone it is far off. Where the draws
    # of a ring are made at the plan they are never stale, and those of the other are.
    limit = 5 / len(estimates) ** 0.5
    assert abs(np.mean(estimates) - truth) < limit * np.std(estimates)
    assert abs(np.mean(wrong) - truth) > limit * np.std(wrong)


def test_an_empty_ring_gives_its_points_to_the_others(make, rng):
    """As many times as phi says, so that the weights stay unbiased."""
    sampler = mr.PrioritizedSampler(1.0, 1.0, eps=0.0, normalize="mean", seed=4)
    source, _ = make([np.arange(40), np.arange(100), np.arange(60)], sampler)
    values = rng.normal(1, 1, 160)
    masses = rng.random(160) + 0.2
    estimates = []
    for _ in range(800):
        prioritize(source, 0, np.full(40, 1.0))
        prioritize(source, 1, masses[:100])
        prioritize(source, 2, masses[100:])
        source.table.ask_all()
        pending = draw(source, 32)
        # It had 40 of some 150 when the batch was planned.
        prioritize(source, 0, np.zeros(40))
        batch = source.gather(pending)
        assert (batch.buffer_ids > 0).all()
        assert len(batch) == 32
        rows = np.where(batch.buffer_ids == 1, 0, 100) + batch.positions
        # N counts the silent ring's rows no more.
        estimates.append((batch.weights * values[rows]).mean())
    limit = 5 / len(estimates) ** 0.5
    assert abs(np.mean(estimates) - values.mean()) < limit * np.std(estimates)
    assert source.stats().redrawn > 0


def test_no_mass_anywhere_is_an_empty_error(make):
    empty = mr.UniformSampler(0)
    source, _ = make([[], []], empty)
    with pytest.raises(EmptyError, match="2 rings of run 'test' have 0 legal starts"):
        sample(source, 4)
    zero, _ = make([np.arange(9)], mr.PrioritizedSampler(eps=0.0))
    pending = draw(zero, 4)
    prioritize(zero, 0, np.zeros(9))
    # Also where it was found out after the plan.
    match = "the ring of run 'test' has 9 legal starts, and all of them priority 0"
    with pytest.raises(EmptyError, match=match):
        zero.gather(pending)


def test_a_batch_may_be_larger_than_what_is_there(make):
    source, _ = make([np.arange(3), np.arange(2)], mr.PrioritizedSampler(seed=0))
    batch = sample(source, 1000)
    assert len(batch) == 1000
    assert set(zip(batch.buffer_ids.tolist(), batch["n"].tolist(), strict=True)) == {
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
    }


@pytest.mark.parametrize("per_call", [1, 4])
def test_a_state_continues_the_draws(make, per_call):
    sampler = mr.PrioritizedSampler(seed=3)
    source, _ = make([np.arange(50), np.arange(20)], sampler, per_call=per_call)
    for _ in range(5):
        sample(source, 16)
    state = source.state_dict()
    expected = [sample(source, 16).positions.tolist() for _ in range(6)]
    source.load_state_dict(state)
    assert [sample(source, 16).positions.tolist() for _ in range(6)] == expected
    with pytest.raises(mr.FormatError, match="kind"):
        source.load_state_dict({"kind": "Concat"})


def test_ranks_draw_other_steps(make):
    one, _ = make([np.arange(500)], mr.UniformSampler(seed=3))
    other, _ = make([np.arange(500)], mr.UniformSampler(seed=3), rank=1)
    again, _ = make([np.arange(500)], mr.UniformSampler(seed=3), rank=1)
    first = sample(one, 20).positions.tolist()
    second = sample(other, 20).positions.tolist()
    assert first != second
    assert sample(again, 20).positions.tolist() == second


def test_priorities_travel_with_the_next_draw_of_their_shard(make):
    source, (first, second) = make([np.arange(50), np.arange(50)], mr.PrioritizedSampler(seed=0))
    batch = sample(source, 64)
    first.calls.clear()
    second.calls.clear()
    assert source.update_priorities(batch, np.full(64, 7.0)) == 0
    assert not first.calls
    sample(source, 64)
    assert first.calls == second.calls == ["exchange"]
    assert source.table.highest == 7.0


def test_priorities_are_sent_by_themselves_where_nothing_is_drawn(make, monkeypatch):
    # Masses are not asked for besides.
    monkeypatch.setattr(ring_table, "OLD_S", math.inf)
    source, (shard,) = make([np.arange(50)], mr.PrioritizedSampler(seed=0))
    batch = sample(source, 8)
    source.update_priorities(batch, np.full(8, 7.0))
    source.tick()
    assert shard.calls[-1] == "exchange"
    assert source.table.rings[0].mass.highest == 1.0
    monkeypatch.setattr(priority_updates, "IDLE_S", 0.0)
    source.tick()
    source.tick()
    assert source.table.rings[0].mass.highest == 7.0


def test_the_last_priorities_are_sent_by_close(make):
    source, (shard,) = make([np.arange(50)], mr.PrioritizedSampler(eps=0.0, seed=0))
    batch = sample(source, 8)
    source.update_priorities(batch, np.full(8, 7.0))
    source.close()
    client = source.table.client
    assert shard.draws.masses(client, 0, 0.0)["r"][3] == 7.0


def highest_at(shard, source):
    """The highest priority that a shard has."""
    return shard.draws.masses(source.table.client, 0, 0.0)["r"][3]


def test_close_sends_what_was_noted_while_others_were_sent(make, monkeypatch):
    monkeypatch.setattr(priority_updates, "IDLE_S", 0.0)
    source, (shard,) = make([np.arange(50)], mr.PrioritizedSampler(seed=0))
    first, second = sample(source, 8), sample(source, 8)
    shard.state = "slow"
    source.update_priorities(first, np.full(8, 2.0))
    source.tick()
    source.update_priorities(second, np.full(8, 100.0))
    source.tick()
    source.close()
    assert highest_at(shard, source) == 100.0
    assert source.stats().dropped == 0


def test_the_newest_priorities_win(make):
    """Those of two requests could arrive in the other order."""
    source, (shard,) = make([np.arange(50)], mr.PrioritizedSampler(eps=0.0, seed=0))
    batch = sample(source, 8)
    shard.state = "slow"
    source.update_priorities(batch, np.full(8, 9.0))
    older = draw(source, 8)
    source.update_priorities(batch, np.full(8, 3.0))
    newer = draw(source, 8)
    # As where a thread has the newer one first.
    source.gather(newer)
    source.gather(older)
    sample(source, 8)
    source.close()
    count = len(np.unique(batch.positions))
    masses = shard.draws.masses(source.table.client, 0, 0.0)["r"]
    assert masses[0] == pytest.approx(count * 3.0**0.6 + 50 - count)


@pytest.mark.parametrize("state", ["silent", "restarting"])
def test_priorities_for_a_lost_node_are_sent_when_it_is_back(make, monkeypatch, state):
    monkeypatch.setattr(ring_table, "OLD_S", 0.0)
    source, (first, _) = make(
        [np.arange(50), np.arange(50)], mr.PrioritizedSampler(seed=0), lost_s=0.1
    )
    batch = sample(source, 64)
    source.update_priorities(batch, np.full(64, 7.0))
    first.state = state
    assert set(sample(source, 64).buffer_ids) == {1}
    first.state = "alive"
    while source.stats().lost:
        source.tick()
    source.close()
    assert highest_at(first, source) == 7.0
    assert source.stats().dropped == 0


def test_priorities_that_cannot_be_sent_are_counted(make):
    source, (first, second) = make(
        [np.arange(50), np.arange(50)], mr.PrioritizedSampler(seed=0), lost_s=0.1
    )
    batch = sample(source, 64)
    source.update_priorities(batch, np.full(64, 7.0))
    first.state = "silent"
    with pytest.warns(LostWarning, match="the last priorities of node 's0'"):
        source.close()
    assert source.stats().dropped == (batch.buffer_ids == 0).sum() > 0
    assert highest_at(second, source) == 7.0
    first.state = "alive"


def test_close_without_a_cluster_closes_the_rings_of_this_node(make):
    source, (there, here) = make(
        [np.arange(50), np.arange(50)],
        mr.PrioritizedSampler(seed=0),
        keys=["a-there", "z-here"],
        here="z-here",
        alone=True,
    )
    batch = sample(source, 64)
    source.update_priorities(batch, np.full(64, 7.0))
    there.state = "gone"
    with pytest.warns(LostWarning, match="'a-there' were not stored: not connected"):
        source.close()
    assert source.stats().dropped == (batch.buffer_ids == 0).sum() > 0
    # Its priorities are free.
    assert highest_at(here, source) == 7.0


def test_a_request_that_ends_its_shard_is_not_repeated_without_end(make, monkeypatch):
    monkeypatch.setattr(requests, "MAX_REPEAT_S", 0.3)
    monkeypatch.setattr(ring_table, "OLD_S", 0.0)
    source, (shard,) = make([np.arange(50)], mr.UniformSampler(seed=0))
    shard.state = "poisoned"
    source.begin()
    with pytest.raises(StarvedError, match=r"'s0' ended each time .* 8 steps.*per_call"):
        sample(source, 8)
    shard.state = "alive"
    assert len(sample(source, 8)) == 8


def test_closing_ends_the_repeats_of_a_request(make):
    source, (shard,) = make([np.arange(50)], mr.UniformSampler(seed=0))
    shard.state = "poisoned"
    pending = draw(source, 8)
    source.end_waits()
    with pytest.raises(FailedError, match="the client is closed"):
        source.gather(pending)
    shard.state = "alive"


def test_a_flush_says_the_step_of_the_client(make, monkeypatch):
    monkeypatch.setattr(priority_updates, "IDLE_S", 0.0)
    schedule = mr.LinearSchedule(0.0, 1.0, steps=10)
    sampler = mr.PrioritizedSampler(schedule, alpha_every=1, eps=0.0, seed=0, initial_priority=16.0)
    source, _ = make([np.arange(50)], sampler)
    for _ in range(12):
        batch = sample(source, 64)
    assert source.table.rings[0].mass.total == pytest.approx(50 * 16)
    source.update_priorities(batch, np.full(64, 16.0))
    for _ in range(2):
        source.tick()
    assert source.table.rings[0].mass.total == pytest.approx(50 * 16)


def test_a_ring_without_a_share_gets_its_priorities_soon(make, monkeypatch):
    """Whatever else is drawn."""
    source, _ = make([np.arange(50), np.arange(50)], mr.PrioritizedSampler(seed=0))
    batch = sample(source, 64)
    first_rows = batch.buffer_ids == 0
    prioritize(source, 0, np.zeros(50))
    source.table.ask_all()
    source.update_priorities(batch, np.where(first_rows, 0.0, 1.0))
    monkeypatch.setattr(priority_updates, "IDLE_S", 0.05)
    time.sleep(0.1)
    for _ in range(3):
        # The other ring alone is asked.
        assert set(sample(source, 8).buffer_ids) == {1}
        source.tick()
    assert not source.table.shards["s0"].updates


def test_an_answer_that_is_no_error_of_mmreplay_is_raised_by_the_draw(make, monkeypatch):
    """The looking-after goes on, as nothing else hears that a lost node is back."""
    monkeypatch.setattr(ring_table, "OLD_S", 0.0)
    source, (shard, _) = make([np.arange(50), np.arange(50)], mr.UniformSampler(seed=0), lost_s=0.2)

    def broken(*arguments):
        raise FileNotFoundError("run")

    own = shard.draws.masses
    shard.draws.masses = broken
    for _ in range(4):
        source.tick()
    shard.draws.masses = own
    shard.state = "silent"
    sample(source, 64)
    shard.state = "alive"
    while source.stats().lost:
        source.tick()
    source.table.warnings.clear()


def fails_once(shard, error):
    """Have the next exchange of a shard raise an error."""
    exchange = shard.draws.exchange

    def fail(*arguments):
        shard.draws.exchange = exchange
        raise error

    shard.draws.exchange = fail


@pytest.mark.parametrize("error", [MemoryError(), OSError(5, "an error"), KeyError(0)])
@pytest.mark.parametrize("alone", [False, True])
def test_an_error_that_is_none_of_mmreplay_is_met_once(make, monkeypatch, error, alone):
    """The priorities of its request are counted, and newer ones are sent."""
    monkeypatch.setattr(requests, "SOONEST_S", 0.0)
    monkeypatch.setattr(priority_updates, "IDLE_S", 0.0)
    source, (shard,) = make([np.arange(50)], mr.PrioritizedSampler(seed=0))
    batch = sample(source, 8)
    source.update_priorities(batch, np.full(8, 2.0))
    fails_once(shard, error)
    if alone:
        # In a request of their own, nothing waits for the answer.
        for _ in range(2):
            source.tick()
    else:
        with pytest.raises(type(error)) as caught:
            sample(source, 8)
        assert caught.value is error
    assert source.stats().dropped == 8
    for value in range(3, 8):
        source.update_priorities(sample(source, 8), np.full(8, value))
        source.tick()
    source.close()
    assert highest_at(shard, source) == 7.0
    assert source.stats().dropped == 8
    assert not source.table.warnings


@pytest.mark.parametrize("under_way", [False, True])
def test_close_says_which_priorities_an_error_took(make, monkeypatch, under_way):
    monkeypatch.setattr(priority_updates, "IDLE_S", 0.0)
    source, (shard,) = make([np.arange(50)], mr.PrioritizedSampler(seed=0))
    source.update_priorities(sample(source, 8), np.full(8, 2.0))
    fails_once(shard, MemoryError("no memory"))
    if under_way:
        shard.state = "slow"
        source.tick()
    with pytest.warns(LostWarning, match="node 's0' were not stored: no memory"):
        source.close()
    assert source.stats().dropped == 8


def test_what_cannot_be_sent_at_all_is_sent_again(make, monkeypatch):
    source, (shard,) = make([np.arange(50)], mr.PrioritizedSampler(seed=0))
    source.update_priorities(sample(source, 8), np.full(8, 2.0))
    send = shard.send

    def refused(*arguments):
        monkeypatch.setattr(shard, "send", send)
        raise MemoryError

    monkeypatch.setattr(shard, "send", refused)
    with pytest.raises(MemoryError):
        sample(source, 8)
    sample(source, 8)
    assert highest_at(shard, source) == 2.0
    assert source.stats().dropped == 0


def test_newer_priorities_win_that_are_sent_while_older_ones_come_back(make, monkeypatch):
    monkeypatch.setattr(ring_table, "OLD_S", 0.0)
    source, (shard, _) = make(
        [np.arange(50), np.arange(50)], mr.PrioritizedSampler(eps=0.0, seed=0), lost_s=0.1
    )
    batch = sample(source, 64)
    source.update_priorities(batch, np.full(64, 9.0))
    shard.state = "silent"
    older, put_back = draw(source, 8), source._requests._put_back
    threads = []

    def newer():
        source.update_priorities(batch, np.full(64, 3.0))
        known = source.table.shards["s0"]
        request = source._requests.send(known, 0, 0, {})
        # The older request never arrived.
        older.shares[0].requests[0][0].call.lost = True
        shard.state = "alive"
        source._requests.answer(request)

    def overtaken(*arguments):
        if not threads:
            # It cannot begin before all is put back.
            threads.append(threading.Thread(target=newer))
            threads[0].start()
            threads[0].join(0.3)
        put_back(*arguments)

    monkeypatch.setattr(source._requests, "_put_back", overtaken)
    source.gather(older)
    for thread in threads:
        thread.join()
    assert threads
    while source.stats().lost:
        source.tick()
    source.close()
    count = len(np.unique(batch.positions[batch.buffer_ids == 0]))
    masses = shard.draws.masses(source.table.client, 0, 0.0)["r"]
    assert masses[0] == pytest.approx(count * 3.0**0.6 + 50 - count)


def test_a_thread_that_failed_is_said_by_the_next_draw(make, monkeypatch):
    source, _ = make([np.arange(50)], mr.UniformSampler(seed=0))
    failed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda arguments: failed.set())

    def broken():
        raise MemoryError("none")

    monkeypatch.setattr(source, "tick", broken)
    source.begin()
    assert failed.wait(20)
    with pytest.raises(FailedError, match="looks after the shards ended by MemoryErr"):
        sample(source, 8)


def test_a_look_for_rings_that_fails_warns_once(make, monkeypatch):
    monkeypatch.setattr(ring_table, "LOOK_S", 0.0)
    source, (shard,) = make([np.arange(50)], mr.UniformSampler(seed=0), here="s0")
    shard.info = lambda: {"error": {"kind": "FailedError", "message": "no disk"}}
    for _ in range(8):
        source.tick()
    assert list(source.table.warnings) == ["run 'test': no disk"]
    source.table.warnings.clear()


def test_priorities_that_cannot_be_sent_for_an_unknown_reason_warn_once(make, monkeypatch):
    source, _ = make([np.arange(50)], mr.PrioritizedSampler(seed=0))

    def broken(shard):
        raise KeyError("a bug")

    monkeypatch.setattr(source._updates, "send_waiting", broken)
    for _ in range(8):
        source.tick()
    assert list(source.table.warnings) == ["run 'test': 'a bug'"]
    source.table.warnings.clear()


def test_no_node_at_first_is_a_starved_error(tmp_path):
    shard = Shard("s0", {"r": ring(tmp_path / "r", np.arange(10))})
    shard.state = "silent"
    with pytest.raises(StarvedError, match=r"has answered for 0\.1 s, of \['s0'\]"):
        RingsSource(Run(shard), mr.UniformSampler(0), (), lost_s=0.1)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (np.full(8, -1.0), "priorities must be finite"),
        (np.full(8, np.nan), "priorities must be finite"),
        (np.full(8, "x"), "real numbers"),
        (np.ones(7), r"must have shape \[8\], got \[7\]"),
        (np.ones((8, 2)), r"must have shape \[8\], got \[8, 2\]"),
    ],
)
def test_priorities_that_a_shard_would_refuse_are_refused_here(make, values, match):
    source, _ = make([np.arange(50)], mr.PrioritizedSampler(seed=0))
    batch = sample(source, 8)
    with pytest.raises(SchemaError, match=match):
        source.update_priorities(batch, values)
    batch.buffer_ids = None
    with pytest.raises(SchemaError, match="without buffer_ids"):
        source.update_priorities(batch, np.ones(8))


def test_priorities_of_windows_are_theirs(make):
    sampler = mr.SequenceSampler(3, mr.PrioritizedSampler(1.0, eps=0.0, eta=1.0), burn_in=1)
    source, _ = make([np.arange(40)], sampler)
    batch = sample(source, 8)
    assert batch["n"].shape == (8, 4)
    assert batch["is_first"].shape == batch.mask.shape == (8, 4)
    source.update_priorities(batch, np.tile([9.0, 1.0, 5.0, 2.0], (8, 1)))
    source.update_priorities(batch, np.tile([1.0, 6.0, 2.0], (8, 1)))
    with pytest.raises(SchemaError, match=r"\[8\] or \[8, 4\] or \[8, 3\], got"):
        source.update_priorities(batch, np.ones((8, 2)))
    sample(source, 8)
    assert source.table.rings[0].mass.highest == 6.0


@pytest.mark.parametrize("shape", [(8,), (8, 4), (8, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_an_array_of_priorities_may_be_used_again(make, shape, dtype):
    sampler = mr.SequenceSampler(3, mr.PrioritizedSampler(1.0, eps=0.0, eta=1.0), burn_in=1)
    source, _ = make([np.arange(40)], sampler)
    batch = sample(source, 8)
    values = np.full(shape, 9, dtype)
    source.update_priorities(batch, values)
    values[:] = 100
    sample(source, 8)
    assert source.table.rings[0].mass.highest == 9.0


def test_a_sampler_without_priorities_takes_none(make):
    source, _ = make([np.arange(50)], mr.UniformSampler(0))
    batch = sample(source, 8)
    with pytest.raises(SchemaError, match="got UniformSampler"):
        source.update_priorities(batch, np.ones(8))


def test_a_restart_in_the_middle_repeats_the_same_draws(make):
    source, (shard, _) = make([np.arange(50), np.arange(50)], mr.PrioritizedSampler(seed=0))
    batch = sample(source, 32)
    state = source.state_dict()
    expected = sample(source, 32).positions.tolist()
    source.load_state_dict(state)
    source.update_priorities(batch, np.ones(32))
    pending = draw(source, 32)
    shard.state = "restarting"

    def back():
        until(lambda: source.stats().repeated > 0)
        shard.restart()
        shard.state = "alive"

    thread = threading.Thread(target=back)
    thread.start()
    assert source.gather(pending).positions.tolist() == expected
    thread.join()
    assert source.stats().repeated > 0
    assert not source.stats().lost


@pytest.mark.parametrize("state", ["silent", "restarting"])
def test_a_lost_node_drops_out_and_comes_back(make, monkeypatch, state):
    monkeypatch.setattr(ring_table, "OLD_S", 0.0)
    source, (first, _) = make(
        [np.arange(50), np.arange(50)], mr.PrioritizedSampler(seed=0), lost_s=0.2
    )
    assert set(sample(source, 64).buffer_ids) == {0, 1}
    first.state = state
    began = time.monotonic()
    batch = sample(source, 64)
    assert time.monotonic() - began >= 0.2
    assert len(batch) == 64
    assert set(batch.buffer_ids) == {1}
    np.testing.assert_allclose(batch.probabilities, 1 / 50)
    stats = source.stats()
    assert (stats.lost, stats.times_lost) == (("s0/r",), 1)
    assert stats.rings == ("s0/r", "s1/r")
    with pytest.warns(LostWarning, match=r"node 's0' has not answered for 0\.2 s"):
        source.warn()
    # Nothing more waits for it.
    asked = first.calls.count("exchange")
    for _ in range(20):
        assert set(sample(source, 64).buffer_ids) == {1}
        source.tick()
    assert first.calls.count("exchange") == asked
    first.state = "alive"
    while source.stats().lost:
        source.tick()
    assert set(sample(source, 64).buffer_ids) == {0, 1}
    assert source.stats().times_lost == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source.warn()


def back_later(source, shards, wait_s=0.4):
    """Have shards that are being restarted back after some time."""

    def back():
        time.sleep(wait_s)
        for shard in shards:
            shard.restart()
            shard.state = "alive"
        source.table.run.said = {shard.key: ALIVE for shard in shards}

    thread = threading.Thread(target=back, daemon=True)
    thread.start()
    return thread


def restarting(source, shards):
    """Have shards restart, as the registry says."""
    for shard in shards:
        shard.state = "restarting"
    source.table.run.said = {shard.key: RESTARTING for shard in shards}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("registry", ["says so", "is silent"])
def test_a_shard_that_is_being_restarted_for_long_is_waited_for(make, monkeypatch, count, registry):
    # A restart that takes long is not a request that ends its shard.
    monkeypatch.setattr(requests, "MAX_REPEAT_S", 0.4)
    source, shards = make([np.arange(50), np.arange(50)], mr.UniformSampler(seed=0), lost_s=0.4)
    sample(source, 64)
    restarting(source, shards[:count])
    if registry == "is silent":
        source.table.run.said = None
    thread = back_later(source, shards[:count], 1.0)
    assert set(sample(source, 64).buffer_ids) == {0, 1}
    thread.join()
    assert source.stats().times_lost == 0


def test_a_shard_that_a_silent_registry_says_nothing_of_is_lost(make, monkeypatch):
    monkeypatch.setattr(ring_table, "REGISTRY_S", 0.2)
    source, (first, _) = make([np.arange(50), np.arange(50)], mr.UniformSampler(seed=0), lost_s=0.1)
    restarting(source, [first])
    source.table.run.said = None
    began = time.monotonic()
    assert set(sample(source, 64).buffer_ids) == {1}
    assert time.monotonic() - began >= 0.3


def test_a_shard_whose_restart_takes_too_long_is_one_starved_error(make, monkeypatch):
    monkeypatch.setattr(ring_table, "OLD_S", 0.0)
    source, (first, _) = make(
        [np.arange(50), np.arange(50)], mr.UniformSampler(seed=0), lost_s=0.1, patience_s=0.3
    )
    pending = [draw(source, 64) for _ in range(3)]
    restarting(source, [first])
    source.table.run.said |= {"s1": "alive"}
    with pytest.raises(
        StarvedError,
        match=r"waited 0\.3 s for shards \['s0'\] to be restarted; 's0' is being "
        r"restarted, 's1' is alive\. See the logs",
    ):
        source.gather(pending[0])
    for each in pending[1:]:
        assert set(source.gather(each).buffer_ids) == {1}
    first.state = "alive"
    while source.stats().lost:
        source.tick()
    assert set(sample(source, 64).buffer_ids) == {0, 1}


def test_where_all_shards_were_lost_those_that_are_restarted_are_waited_for(make, monkeypatch):
    """No storm of errors: a learner that asks again waits."""
    monkeypatch.setattr(ring_table, "OLD_S", 0.0)
    source, shards = make([np.arange(50), np.arange(50)], mr.UniformSampler(seed=0), lost_s=0.4)
    restarting(source, shards)
    source.table.run.said = {"s0": "away", "s1": "away"}
    with pytest.raises(StarvedError, match="no node has answered"):
        sample(source, 64)
    restarting(source, shards)
    thread = back_later(source, shards)
    assert len(sample(source, 64)) == 64
    thread.join()


def test_where_no_shard_is_restarted_in_time_each_call_waits_for_them(make):
    source, shards = make(
        [np.arange(50), np.arange(50)], mr.UniformSampler(seed=0), lost_s=0.1, patience_s=0.2
    )
    restarting(source, shards)
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(StarvedError, match=r"waited 0\.2 s for shards"):
            sample(source, 64)
        assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("back", [True, False])
def test_a_client_is_made_once_its_shards_were_restarted(make, tmp_path, back):
    shard = Shard("s0", {"r": ring(tmp_path / "r", np.arange(50))})
    run = Run(shard)
    run.said, shard.state = {"s0": RESTARTING}, "restarting"
    options = {"lost_s": 0.1, "patience_s": 600.0 if back else 0.3}
    if back:
        timer = threading.Timer(0.5, lambda: setattr(shard, "state", "alive"))
        timer.start()
        RingsSource(run, mr.UniformSampler(seed=0), (), **options).close()
    else:
        with pytest.raises(StarvedError, match=r"waited 0\.3 s for shards \['s0'\]"):
            RingsSource(run, mr.UniformSampler(seed=0), (), **options)
    run.close()


def test_batches_asked_for_before_a_loss_are_whole(make):
    """Whatever was planned before, each comes with all of its steps."""
    source, (first, _) = make(
        [np.arange(50), np.arange(50)], mr.PrioritizedSampler(seed=0), lost_s=0.1
    )
    ahead = [draw(source, 64) for _ in range(4)]
    first.state = "silent"
    for pending in ahead:
        batch = source.gather(pending)
        assert len(batch) == 64
        assert set(batch.buffer_ids) == {1}
        np.testing.assert_array_equal(batch["n"], batch.positions)


def test_all_nodes_lost_is_a_starved_error(make):
    source, shards = make([np.arange(50), np.arange(50)], mr.UniformSampler(0), lost_s=0.1)
    sample(source, 8)
    for shard in shards:
        shard.state = "silent"
    with pytest.raises(StarvedError, match=r"no node has answered .* \['s0', 's1'\]"):
        sample(source, 8)
    shards[1].state = "alive"
    for _ in range(2):
        time.sleep(0.01)
        source.table.shards["s1"].heard_at = 0.0
        source.tick()
    assert set(sample(source, 8).buffer_ids) == {1}


def test_a_straggler_is_left_out_of_one_batch(make):
    source, (first, _) = make(
        [np.arange(50), np.arange(50)], mr.UniformSampler(0), straggler_s=0.05
    )
    first.state = "silent"
    assert set(sample(source, 64).buffer_ids) == {1}
    first.state = "alive"
    assert set(sample(source, 64).buffer_ids) == {0, 1}
    stats = source.stats()
    assert stats.late == 1
    assert not stats.lost
    assert stats.redrawn > 0


def test_where_all_are_late_they_are_waited_for(make):
    source, shards = make([np.arange(50), np.arange(50)], mr.UniformSampler(0), straggler_s=0.02)
    for shard in shards:
        shard.state = "silent"

    def back():
        time.sleep(0.3)
        for shard in shards:
            shard.state = "alive"

    thread = threading.Thread(target=back)
    thread.start()
    assert set(sample(source, 64).buffer_ids) == {0, 1}
    thread.join()


@pytest.mark.parametrize("here", ["elsewhere", "s0"])
@pytest.mark.parametrize("sampler", [mr.UniformSampler, mr.PrioritizedSampler])
def test_a_ring_that_was_deleted_and_made_again_is_followed(tmp_path, monkeypatch, sampler, here):
    monkeypatch.setattr(ring_table, "OLD_S", 0.0)
    monkeypatch.setattr(draws, "LOOK_S", 0.0)
    monkeypatch.setattr(ring_table, "LOOK_S", 0.0)
    path = ring(tmp_path / "a", np.arange(50))
    shard = Shard("s0", {"a": path})
    run = Run(shard, Shard("s1", {"b": ring(tmp_path / "b", np.arange(50))}), key=here)
    source = RingsSource(run, sampler(seed=0), ())
    assert set(sample(source, 64).buffer_ids) == {0, 1}
    shutil.rmtree(path)
    time.sleep(0.01)
    ring(path, 1000 + np.arange(20))
    for _ in range(8):
        batch = sample(source, 64)
        assert len(batch) == 64
        source.tick()
    own = batch["n"][batch.buffer_ids == 0]
    assert len(own)
    assert own.min() >= 1000
    source.close()
    run.close()


PICTURES = mr.Schema(
    {
        "n": mr.Field((), "int64"),
        "vector": mr.Field((200,), "float32"),
        "picture": mr.Field((16, 300), "uint8"),
    }
)


def pictures(numbers):
    """Rows that hold these numbers everywhere, ``[*numbers.shape, *shape]``."""
    each = numbers[..., np.newaxis]
    return {
        "n": numbers,
        "vector": np.broadcast_to(each, (*numbers.shape, 200)).astype(np.float32),
        "picture": np.broadcast_to(each[..., np.newaxis] % 251, (*numbers.shape, 16, 300)).astype(
            np.uint8
        ),
    }


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize("per_call", [1, 3])
@pytest.mark.parametrize(
    ("make_sampler", "alone"),
    [
        (lambda: mr.PrioritizedSampler(seed=1), False),
        (lambda: mr.PrioritizedSampler(seed=1), True),
        (lambda: mr.UniformSampler(seed=1), False),
        (lambda: mr.SequenceSampler(3, sampler=mr.UniformSampler(seed=1)), False),
        (lambda: mr.ShuffledSampler(seed=1), False),
    ],
)
def test_rings_of_this_node_are_gathered_into_the_arrays_of_the_batch(
    tmp_path, monkeypatch, engine, per_call, make_sampler, alone
):
    folders = {}
    for number in range(4):
        folder = folders[f"r{number}"] = tmp_path / str(number)
        numbers = 1000 * number + np.arange(150 * number)
        with mr.ReplayBuffer.create(folder, PICTURES, 500, engine=engine) as ring:
            if number:
                ring.extend(pictures(numbers))
    there = {"r3": folders.pop("r3")}
    joined, batches, found = SharedArrays.joined, [], []

    def spied(self, columns, name, order):
        array = joined(self, columns, name, order)
        if name in PICTURES.fields:
            found.append(array is not None)
        return array

    for way in ("shared", "copied", "with another node"):
        patched = spied if way != "copied" else lambda *_: None
        monkeypatch.setattr(SharedArrays, "joined", patched)
        shards = [Shard("s0", folders)]
        if way == "with another node":
            shards.append(Shard("s1", there))
        run = Run(*shards, key="s0")
        source = RingsSource(run, make_sampler(), (), per_call=per_call, alone=alone)
        own = [sample(source, 48 // per_call) for _ in range(6)]
        for batch in own:
            expected = 1000 * batch.buffer_ids + batch.positions
            if batch.window_positions is not None:
                expected = 1000 * batch.buffer_ids[:, np.newaxis] + batch.window_positions
                expected = np.where(batch.mask, expected, batch["n"])
            for path, column in pictures(expected).items():
                np.testing.assert_array_equal(batch[path], column)
        if way == "shared":
            # All three fields of each batch, or of each call.
            assert len(found) >= 3 * len(own) // per_call
            assert all(found)
        found.clear()
        batches.append(own)
        source.close()
        run.close()
    for one, other in zip(*batches[:2], strict=True):
        np.testing.assert_array_equal(one["n"], other["n"])
        np.testing.assert_array_equal(one.weights, other.weights)


@pytest.mark.parametrize("alone", [False, True])
def test_rows_overwritten_between_draw_and_gather_are_drawn_again(tmp_path, alone, monkeypatch):
    with mr.ReplayBuffer.create(tmp_path / "a", SCHEMA, 100) as writer:
        writer.extend(n=np.arange(100))
        shard = Shard("s0", {"a": tmp_path / "a"})
        other = Shard("s1", {"b": ring(tmp_path / "b", np.arange(1000))})
        run = Run(shard, other, key="s0")
        sampler = mr.PrioritizedSampler(seed=0)
        source = RingsSource(run, sampler, (), alone=alone)
        for turn in range(1, 20):
            pending = draw(source, 64)
            if not alone:
                # Answered before the rows are overwritten.
                for request, _ in pending.shares[0].requests:
                    source._requests.answer(request)
            writer.extend(n=100 * turn + np.arange(100))
            batch = source.gather(pending)
            assert len(batch) == 64
            np.testing.assert_array_equal(batch["n"], batch.positions)
            own = batch.positions[batch.buffer_ids == 0]
            assert not len(own) or own.min() >= 100 * turn
        assert source.stats().overwritten > 0
        gather = mr.ReplayBuffer.gather

        def overtaken(self, drawn):
            writer.extend(n=np.arange(100))
            return gather(self, drawn)

        monkeypatch.setattr(mr.ReplayBuffer, "gather", overtaken)
        with pytest.raises(StarvedError, match="gave up after 100 attempts"):
            sample(source, 500)
        source.close()
        run.close()


def test_a_client_that_is_refused_owns_no_priorities(tmp_path):
    path = ring(tmp_path / "a", np.arange(50))
    other = Shard("s1", {"b": ring(tmp_path / "b", np.arange(50))})

    def refused(*arguments):
        raise FailedError("no disk")

    other.draws.masses = refused
    run, sampler = Run(Shard("s0", {"a": path}), other, key="s0"), mr.PrioritizedSampler
    with pytest.raises(FailedError, match="no disk") as caught:
        RingsSource(run, sampler(seed=0), (), alone=True)
    # While the error, and what it refers to, is still there.
    with mr.ReplayBuffer.open(path, sampler=sampler(seed=0)) as buffer:
        buffer.sample(4)
        assert "RAM" not in buffer.sampler.where
    del caught


def test_new_rings_and_new_nodes_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(ring_table, "OLD_S", 0.0)
    monkeypatch.setattr(ring_table, "LOOK_S", 0.0)
    first = Shard("s0", {"a": ring(tmp_path / "a", np.arange(10))})
    run = Run(first)
    source = RingsSource(run, mr.UniformSampler(0), ())
    assert set(sample(source, 64).buffer_ids) == {0}
    first.folders["b"] = ring(tmp_path / "b", np.arange(10))
    for _ in range(3):
        source.tick()
    assert set(sample(source, 64).buffer_ids) == {0, 1}
    run.known.append(Shard("s1", {"c": ring(tmp_path / "c", np.arange(10))}))
    source.tick()
    assert set(sample(source, 64).buffer_ids) == {0, 1, 2}
    assert source.stats().rings == ("s0/a", "s0/b", "s1/c")
    source.close()
    run.close()


@pytest.mark.parametrize("error", [KeyError("once"), FailedError("once")])
def test_new_rings_are_found_after_a_look_that_failed(tmp_path, monkeypatch, error):
    monkeypatch.setattr(ring_table, "LOOK_S", 0.0)
    shard = Shard("s0", {"a": ring(tmp_path / "a", np.arange(10))})
    run = Run(shard, key="s0")
    source, info = RingsSource(run, mr.UniformSampler(seed=0), ()), shard.info

    def fail():
        shard.info = info
        raise error

    shard.info = fail
    for _ in range(2):
        source.tick()
    assert list(source.table.warnings) == [f"run 'test': {error}"]
    source.table.warnings.clear()
    run.known.append(Shard("s1", {"b": ring(tmp_path / "b", np.arange(10))}))
    shard.folders["c"] = ring(tmp_path / "c", np.arange(10))
    for _ in range(4):
        source.tick()
    assert set(source.stats().rings) == {"s0/a", "s0/c", "s1/b"}
    assert not source.table.warnings
    source.close()
    run.close()


@pytest.mark.parametrize("here", ["elsewhere", "s0"])
@pytest.mark.parametrize("damaged", ["info", "masses"])
def test_a_damaged_ring_of_one_node_hides_none_of_others(tmp_path, monkeypatch, here, damaged):
    monkeypatch.setattr(ring_table, "LOOK_S", 0.0)
    monkeypatch.setattr(ring_table, "OLD_S", 0.0)
    first = Shard("s0", {"a": ring(tmp_path / "a", np.arange(10))})
    second = Shard("s1", {"b": ring(tmp_path / "b", np.arange(10))})
    run = Run(first, second, key=here)
    source = RingsSource(run, mr.UniformSampler(seed=0), ())
    if damaged == "info":
        error = {"kind": "FormatError", "message": "a/x is damaged"}
        first.info = lambda: {"error": error}
    else:

        def masses(*arguments):
            raise mr.FormatError("a/x is damaged")

        first.draws.masses = masses
    run.known.append(Shard("s2", {"c": ring(tmp_path / "c", np.arange(10))}))
    second.folders["d"] = ring(tmp_path / "d", np.arange(10))
    for _ in range(4):
        source.tick()
    assert set(source.stats().rings) == {"s0/a", "s1/b", "s1/d", "s2/c"}
    assert all(ring.mass.total for ring in source.table.rings[1:])
    if damaged == "info" or here == "elsewhere":
        assert set(source.table.warnings) == {"run 'test': a/x is damaged"}
    source.table.warnings.clear()
    source.close()
    run.close()


@pytest.mark.parametrize("here", ["elsewhere", "s0", "s1"])
@pytest.mark.parametrize("one_node", [False, True])
@pytest.mark.parametrize("sampler", [mr.UniformSampler, mr.ShuffledSampler])
def test_a_copy_of_a_ring_is_refused(tmp_path, here, one_node, sampler):
    path = ring(tmp_path / "a", np.arange(50))
    shutil.copytree(path, tmp_path / "b")
    shards = [Shard("s0", {"a": path}), Shard("s1", {"b": tmp_path / "b"})]
    if one_node:
        shards[0].folders |= shards.pop().folders
    run = Run(*shards, key=here)
    key = "s0" if one_node else "s1"
    told = f"ring {key}/b in {tmp_path}/b is a copy of s0/a in {path}, with the same"
    with pytest.raises(SchemaError, match=told):
        RingsSource(run, sampler(seed=0), ())
    run.close()


@pytest.mark.parametrize("here", ["elsewhere", "s0", "s1"])
@pytest.mark.parametrize("key", ["s0", "s1"])
def test_a_copy_that_comes_later_is_not_drawn_from(tmp_path, monkeypatch, here, key):
    monkeypatch.setattr(ring_table, "LOOK_S", 0.0)
    monkeypatch.setattr(ring_table, "OLD_S", 0.0)
    monkeypatch.setattr(draws, "LOOK_S", 0.0)
    path = ring(tmp_path / "a", np.arange(50))
    run = Run(Shard("s0", {"a": path}), Shard("s1", {"b": ring(tmp_path / "b", [1])}), key=here)
    source = RingsSource(run, mr.UniformSampler(seed=0), ())
    by_key = {shard.key: shard for shard in run.known}
    # By name before the ring that is drawn from.
    shutil.copytree(path, tmp_path / "0")
    by_key[key].folders = {"0": tmp_path / "0", **by_key[key].folders}
    by_key[key].folders["c"] = ring(tmp_path / "c", np.arange(50))
    for _ in range(6):
        source.tick()
        sample(source, 8)
    (text,) = source.table.warnings
    assert f"ring {key}/0 in {tmp_path}/0 is a copy of s0/a in {path}" in text
    source.table.warnings.clear()
    assert source.stats().rings == ("s0/a", "s1/b", f"{key}/c")
    num_looks = sum(shard.calls.count("info") for shard in run.known)
    for _ in range(5):
        source.tick()
    # A copy is not looked at as a new ring again and again.
    more = sum(shard.calls.count("info") for shard in run.known) - num_looks
    assert more <= (5 if here != "elsewhere" else 0)
    source.table.warnings.clear()
    # As the message says.
    shutil.rmtree(by_key["s0"].folders.pop("a"))
    for _ in range(6):
        source.tick()
    assert source.stats().rings[-1] == f"{key}/0"
    assert {2, 3} <= set(sample(source, 64).buffer_ids) <= {1, 2, 3}
    source.table.warnings.clear()
    source.close()
    run.close()


def ways(lost):
    """Whose client it is, and the nodes before and after a move.

    A node that is lost has no client, and serves no other ring.
    """
    return [
        (here, former, now)
        for former, now in [("s0", "s1"), ("s1", "s0"), ("s0", "s0")]
        for here in ("elsewhere", "s0", "s1")
        if not lost or former not in (here, now)
    ]


@pytest.mark.parametrize(
    ("lost", "here", "former", "now"),
    [(lost, *way) for lost in (False, True) for way in ways(lost)],
)
def test_a_ring_that_was_moved_is_no_copy(tmp_path, monkeypatch, lost, here, former, now):
    monkeypatch.setattr(ring_table, "LOOK_S", 0.0)
    monkeypatch.setattr(ring_table, "OLD_S", 0.0)
    monkeypatch.setattr(draws, "LOOK_S", 0.0)
    path = ring(tmp_path / "a", np.arange(50))
    shards = {key: Shard(key, {key: ring(tmp_path / key, [7])}) for key in ("s0", "s1")}
    shards[former].folders["a"] = path
    run = Run(*shards.values(), key=here)
    source = RingsSource(run, mr.UniformSampler(seed=0), (), lost_s=0.1)
    if lost:
        shards[former].state = "silent"
        while not source.stats().lost:
            sample(source, 8)
        source.table.warnings.clear()
    else:
        del shards[former].folders["a"]
    path.rename(tmp_path / "b")
    shards[now].folders["b"] = tmp_path / "b"
    for _ in range(6):
        source.tick()
    batch = sample(source, 64)
    assert source.stats().rings[-1] == f"{now}/b"
    assert 3 in batch.buffer_ids
    assert not source.table.warnings
    shards[former].state = "alive"
    source.close()
    run.close()


def two_rings(tmp_path, sampler, here, **options):
    """A source over rings a and b of one shard; and what deletes the first."""
    shard = Shard("s0", {n: ring(tmp_path / n, np.arange(100)) for n in "ab"})
    run = Run(shard, key=here)
    source = RingsSource(run, sampler, (), **options)

    def delete():
        shutil.rmtree(shard.folders.pop("a"))

    return source, run, delete


@pytest.mark.parametrize(("here", "alone"), [("elsewhere", False), ("s0", False), ("s0", True)])
def test_priorities_of_a_deleted_ring_are_dropped(tmp_path, here, alone):
    sampler = mr.PrioritizedSampler(seed=0)
    source, run, delete = two_rings(tmp_path, sampler, here, alone=alone)
    batch = sample(source, 32)
    count = (batch.buffer_ids == 0).sum()
    delete()
    assert source.update_priorities(batch, np.ones(32)) == (count if alone else 0)
    for _ in range(3):
        assert set(sample(source, 8).buffer_ids) == {1}
    assert source.stats().dropped == count
    source.update_priorities(batch, np.ones(32))
    source.close()
    assert source.stats().dropped == 2 * count
    run.close()


@pytest.mark.parametrize("state", ["alive", "slow"])
def test_batches_ahead_count_as_soon_as_their_call_is_answered(tmp_path, state):
    """Their rings have counted them, and a limiter is to know that."""
    shard = Shard("s0", {"r": ring(tmp_path / "r", np.arange(50))})
    run = Run(shard)
    source = RingsSource(run, mr.UniformSampler(0), (), per_call=2, ahead=2)
    sample(source, 8)
    shard.state = state
    # One of the call that was gathered, and two of the call ahead.
    assert source.num_answered() == {"alive": 3, "slow": 1}[state]
    shard.state = "alive"
    for _ in range(4):
        sample(source, 8)
    source.close()
    run.close()


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_batches_ahead_go_without_a_deleted_ring(tmp_path, monkeypatch, closed, alone):
    monkeypatch.setattr(ring_table, "LOOK_S", 0.0)
    sampler = mr.PrioritizedSampler(seed=0) if alone else mr.UniformSampler(seed=0)
    source, run, delete = two_rings(tmp_path, sampler, "s0", alone=alone)
    ahead = [draw(source, 32) for _ in range(3)]
    delete()
    if closed:
        for _ in range(3):
            source.tick()
    for pending in ahead:
        source.prefetch(pending)
        batch = source.gather(pending)
        assert set(batch.buffer_ids) == {1}
        assert len(batch) == 32
    assert set(sample(source, 32).buffer_ids) == {1}
    assert not source.table.warnings
    source.close()
    run.close()


def test_an_error_of_a_ring_that_is_there_is_raised(tmp_path, monkeypatch):
    source, run, _ = two_rings(tmp_path, mr.UniformSampler(seed=0), "s0")

    def refuse(self, draw):
        raise FailedError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(mr.ReplayBuffer, "gather", refuse)
        for _ in range(2):
            with pytest.raises(FailedError, match="the disk is gone"):
                sample(source, 8)
    assert len(sample(source, 8)) == 8
    source.close()
    run.close()


def test_new_rings_of_this_node_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(ring_table, "LOOK_S", 0.0)
    shard = Shard("s0", {"a": ring(tmp_path / "a", np.arange(10))})
    run = Run(shard, key="s0")
    source = RingsSource(run, mr.UniformSampler(0), ())
    assert set(sample(source, 64).buffer_ids) == {0}
    shard.folders["b"] = ring(tmp_path / "b", np.arange(10))
    for _ in range(2):
        source.tick()
    assert set(sample(source, 64).buffer_ids) == {0, 1}
    assert "exchange" not in shard.calls
    source.close()
    run.close()


def test_a_ring_that_grew_is_seen_without_a_share(tmp_path, monkeypatch):
    monkeypatch.setattr(ring_table, "OLD_S", 0.0)
    with mr.ReplayBuffer.create(tmp_path / "b", SCHEMA, 100) as writer:
        first = Shard("s0", {"a": ring(tmp_path / "a", np.arange(10))})
        second = Shard("s1", {"b": tmp_path / "b"})
        run = Run(first, second)
        source = RingsSource(run, mr.PrioritizedSampler(seed=0), ())
        assert set(sample(source, 64).buffer_ids) == {0}
        writer.extend(n=np.arange(50))
        for _ in range(2):
            source.tick()
        assert set(sample(source, 64).buffer_ids) == {0, 1}
        source.close()
        run.close()


def test_alone_owns_the_priorities_of_its_node(make):
    source, (shard, other) = make(
        [np.arange(50), np.arange(50)], mr.PrioritizedSampler(seed=0), here="s0", alone=True
    )
    batch = sample(source, 64)
    assert "exchange" not in shard.calls
    assert "exchange" in other.calls
    source.update_priorities(batch, np.full(64, 3.0))
    # At once, and without a call.
    assert shard.calls == ["info"]
    rival = Run(shard, other)
    with pytest.raises(LockedError, match="of pid"):
        RingsSource(rival, mr.PrioritizedSampler(seed=0), ())
    # Draws without priorities need no owner.
    uniform = RingsSource(rival, mr.UniformSampler(seed=0), ())
    assert len(sample(uniform, 8)) == 8
    uniform.close()
    source.close()
    after = RingsSource(rival, mr.PrioritizedSampler(seed=0), ())
    assert after.table.rings[0].mass.highest == 3.0
    after.close()


def test_alone_without_a_ring_of_this_node_is_refused(make):
    with pytest.raises(SchemaError, match=r"alone=True needs a ring .*on \['s0'\]"):
        make([np.arange(50)], mr.PrioritizedSampler(seed=0), alone=True)


def test_a_ring_of_this_node_is_known_by_the_node_and_not_by_its_key(tmp_path):
    """A writer may give its shard any key."""
    shard = Shard("disk-7", {"a": ring(tmp_path / "a", np.arange(10))})
    shard.node_id = "node"
    run = Run(shard, key="node")
    source = RingsSource(run, mr.PrioritizedSampler(seed=0), (), alone=True)
    assert len(sample(source, 8)) == 8
    assert "exchange" not in shard.calls
    source.close()
    run.close()


def test_rings_of_another_schema_are_refused(tmp_path):
    schema = mr.Schema({"n": mr.Field((2,), "int64")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 10) as other:
        other.extend(n=np.zeros((3, 2), np.int64))
    first = Shard("s0", {"a": ring(tmp_path / "a", np.arange(10))})
    run = Run(first, Shard("s1", {"b": tmp_path / "b"}))
    with pytest.raises(SchemaError, match="field 'n' of ring s1/b must be"):
        RingsSource(run, mr.UniformSampler(0), ())
    run.close()
    with pytest.raises(SchemaError, match="run 'test' must have a ring"):
        RingsSource(Run(), mr.UniformSampler(0), ())


def double(batch):
    return {"n": 2 * batch["n"]}


def test_functions_are_refused_where_rings_are_elsewhere(tmp_path):
    shard = Shard("s0", {"a": ring(tmp_path / "a", np.arange(10))})
    run = Run(shard, key="s0")
    source = RingsSource(run, mr.UniformSampler(0), [mr.Apply(double)])
    batch = sample(source, 8)
    np.testing.assert_array_equal(batch["n"], 2 * batch.positions)
    source.close()
    with pytest.raises(SchemaError, match="got Apply"):
        RingsSource(Run(shard), mr.UniformSampler(0), [mr.Apply(double)])
    # By priority the shard draws, also of this node's rings.
    with pytest.raises(SchemaError, match="got Apply"):
        RingsSource(run, mr.PrioritizedSampler(), [mr.Apply(double)])
    with pytest.raises(SchemaError, match=r"^RankPrioritizedSampler cannot draw"):
        RingsSource(run, mr.RankPrioritizedSampler(), ())
    run.close()


def test_fields_that_are_missing_are_named(tmp_path):
    run = Run(Shard("s0", {"a": ring(tmp_path / "a", np.arange(10))}))
    with pytest.raises(SchemaError, match="reward"):
        RingsSource(run, mr.UniformSampler(0), [mr.NStep(3, gamma=0.9)])
    run.close()


WIDE = mr.Schema({"n": mr.Field((), "int64"), "pixels": mr.Field((4096,), "uint8")})


@pytest.fixture
def wide(tmp_path):
    """A source over two rings of rows of 4 KiB, each on a node of its own."""
    shards, made = [], []
    for name in ("a", "b"):
        numbers = np.arange(300) + 1000 * (name == "b")
        with mr.ReplayBuffer.create(tmp_path / name, WIDE, 300, commit_every=None) as own:
            own.extend(n=numbers, pixels=np.repeat(numbers[:, None] % 251, 4096, 1))
        shards.append(Shard(name, {"r": tmp_path / name}))

    def source(sampler, here="elsewhere", **options):
        made.append(RingsSource(Run(*shards, key=here), sampler, (), **options))
        return made[-1]

    yield source, shards
    for each in made:
        each.close()
    for shard in shards:
        shard.draws.close()


@pytest.mark.parametrize("per_call", [1, 3])
@pytest.mark.parametrize("length", [1, 3])
def test_rows_of_other_nodes_travel_in_blocks(wide, per_call, length):
    make, shards = wide
    sampler = mr.UniformSampler(seed=3)
    if length > 1:
        sampler = mr.SequenceSampler(length, sampler=sampler)
    there = make(sampler, per_call=per_call, seed=3)
    here = make(sampler, "a", per_call=per_call, seed=3)
    for _ in range(3 * per_call):
        one, other = sample(there, 150), sample(here, 150)
        for path in ("n", "pixels", "next_n"):
            if path in one.fields:
                np.testing.assert_array_equal(one.fields[path], other.fields[path])
        np.testing.assert_array_equal(one.positions, other.positions)
        np.testing.assert_array_equal(one.fields["pixels"][..., 17], one.fields["n"] % 251)
        assert all(array.flags.writeable for array in one.fields.values())
    # The first reply taught how large a row is.
    assert [shard.calls.count("blocks") > 0 for shard in shards] == [True, True]


def test_blocks_hold_no_more_than_ray_sends_with_a_reply(wide):
    make, _ = wide
    source = make(mr.UniformSampler(seed=0))
    for _ in range(2):
        pending = draw(source, 200)
        (planned,) = pending.shares
        asked = [request for request, _ in planned.requests]
        source.gather(pending)
    assert len(asked) == 2
    for request in asked:
        ((_, drawn),) = request.reply["draws"].items()
        blocks = drawn["blocks"]
        assert sum(len(block["n"]) for block in blocks) == len(drawn["positions"])
        assert all(len(pickle.dumps(block)) < 100 << 10 for block in blocks)


@pytest.mark.parametrize("here", ["elsewhere", "s1"])
@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("num_rings", [1, 2, 3])
def test_batches_of_one_call_are_those_of_a_call_each(make, here, prioritized, length, num_rings):
    rings = [np.arange(50), 1000 + np.arange(3), 2000 + np.arange(400)][:num_rings]
    beta = mr.LinearSchedule(0.2, 1.0, 5)
    batches = []
    for per_call in (1, 4):
        sampler = mr.UniformSampler(seed=3)
        if prioritized:
            sampler = mr.PrioritizedSampler(beta=beta, seed=3)
        if length > 1:
            sampler = mr.SequenceSampler(length, sampler=sampler)
        source, _ = make(rings, sampler, here=here, per_call=per_call, seed=3)
        if prioritized:
            for number, own in enumerate(rings):
                prioritize(source, number, 1.0 + np.arange(len(own)) % 7)
            source.table.ask_all()
        batches.append([sample(source, 40) for _ in range(9)])
    for one, other in zip(*batches, strict=True):
        for name in ("env_ids", "positions", "probabilities", "weights", "buffer_ids"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        np.testing.assert_array_equal(one["n"], other["n"])
        assert one.key == other.key
        if length > 1:
            np.testing.assert_array_equal(one.mask, other.mask)
            np.testing.assert_array_equal(one.window_positions, other.window_positions)
        first = 1000 * one.buffer_ids
        drawn = one["n"] if length == 1 else one["n"][:, 0]
        np.testing.assert_array_equal(drawn, first + one.positions)
        assert (np.diff(one.buffer_ids) >= 0).all()


def test_batches_of_one_call_are_apart_where_rows_were_overwritten(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "a", SCHEMA, 100) as writer:
        writer.extend(n=np.arange(100))
        run = Run(Shard("s0", {"a": tmp_path / "a"}), key="s0")
        source = RingsSource(run, mr.PrioritizedSampler(seed=0), (), per_call=4)
        for turn in range(1, 9):
            pending = [draw(source, 64) for _ in range(4)]
            if turn % 2:
                for request, _ in pending[0].shares[0].requests:
                    source._requests.answer(request)
                writer.extend(n=100 * turn + np.arange(100))
            for each in pending:
                batch = source.gather(each)
                assert len(batch) == 64
                assert (batch.positions >= 100 * (turn - 1 + turn % 2)).all()
                np.testing.assert_array_equal(batch["n"], batch.positions)
            if not turn % 2:
                writer.extend(n=100 * turn + np.arange(100))
        assert source.stats().overwritten > 0
        source.close()
        run.close()


def test_a_lost_shard_is_heard_again_though_it_never_answers_former_calls(make, monkeypatch):
    source, (shard,) = make([np.arange(50)], mr.UniformSampler(0), lost_s=60.0)
    known = source.table.shards["s0"]
    shard.state, send = "silent", shard.send

    class Deaf:
        def result(self, timeout_s):
            raise ring_table.NotYetError

    monkeypatch.setattr(shard, "send", lambda *_: Deaf())
    monkeypatch.setattr(ring_table, "OLD_S", 0.0)
    source.table.ask_again(known)
    assert not known.lost
    known.lost = True
    for _ in range(20):
        source.table.ask_again(known)
    assert len(known.asked) <= ring_table.MAX_ASKED
    shard.state = "alive"
    monkeypatch.setattr(shard, "send", send)
    for _ in range(2):
        source.table.ask_again(known)
    assert not known.lost


def test_few_rows_and_too_many_travel_as_one_result(wide):
    make, shards = wide
    source = make(mr.UniformSampler(seed=0))
    for count in (200, 4, 5000):
        for shard in shards:
            shard.calls.clear()
        source._draws._planned.clear()
        source.gather(draw(source, count))
        source.gather(draw(source, count))
        used = any("blocks" in shard.calls for shard in shards)
        assert used == (count == 200)


def test_a_restart_in_the_middle_repeats_blocks(wide):
    make, shards = wide
    source = make(mr.PrioritizedSampler(seed=0), lost_s=60.0)
    sample(source, 100)
    before = draw(source, 100)
    shards[0].state = "restarting"
    threading.Timer(0.2, lambda: setattr(shards[0], "state", "alive")).start()
    batch = source.gather(before)
    assert len(batch) == 100
    np.testing.assert_array_equal(batch.fields["pixels"][:, 0], batch.fields["n"] % 251)
    assert "blocks" in shards[0].calls


def test_rows_of_this_node_are_gathered_for_all_batches_of_a_call(make, monkeypatch):
    numbers = [np.arange(500)]
    source, _ = make(numbers, mr.PrioritizedSampler(seed=0), per_call=4, here="s0")
    other, _ = make(numbers, mr.PrioritizedSampler(seed=0), per_call=4)
    ring, gathers = source.table.rings[0], []
    gather = ring.buffer.gather
    monkeypatch.setattr(
        ring.buffer, "gather", lambda draw: gathers.append(len(draw)) or gather(draw)
    )
    for _ in range(8):
        one, two = sample(source, 32), sample(other, 32)
        np.testing.assert_array_equal(one.fields["n"], two.fields["n"])
        np.testing.assert_array_equal(one.fields["n"], one.positions)
    assert gathers == [128, 128]


def test_one_overwritten_row_leaves_the_other_batches_of_a_call(make, monkeypatch):
    source, _ = make([np.arange(500)], mr.PrioritizedSampler(seed=0), per_call=4, here="s0")
    ring = source.table.rings[0]
    gather = ring.buffer.gather

    def overtaken(drawn):
        if len(drawn) > 32:
            raise StaleError("overwritten")
        return gather(drawn)

    monkeypatch.setattr(ring.buffer, "gather", overtaken)
    for _ in range(4):
        batch = sample(source, 32)
        np.testing.assert_array_equal(batch.fields["n"], batch.positions)
    assert source.stats().overwritten == 0


def test_blocks_of_an_epoch_leave_out_what_was_overwritten(wide, tmp_path):
    make, shards = wide
    source = make(mr.ShuffledSampler(seed=0))
    drawn = list(sample(source, 100).fields["n"])
    with mr.ReplayBuffer.open(tmp_path / "a", "r+", commit_every=None) as own:
        numbers = np.arange(300, 500)
        own.extend(n=numbers, pixels=np.repeat(numbers[:, None] % 251, 4096, 1))
    while (batch := sample(source, 200)) is not None:
        np.testing.assert_array_equal(
            batch.fields["pixels"], np.repeat(batch.fields["n"][:, None] % 251, 4096, 1)
        )
        drawn += list(batch.fields["n"])
    assert len(drawn) == len(set(drawn))
    assert set(range(1000, 1299)) <= set(drawn)
    assert source.stats().skipped > 100
    assert shards[0].calls.count("blocks") > 0
