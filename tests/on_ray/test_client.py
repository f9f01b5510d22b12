"""The client as a loader, over shards of this process."""

import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.errors import FailedError, FormatError, SchemaError
from mmreplay.loader import prefetch
from mmreplay.ray import client as client_module
from mmreplay.ray.client import RayRun, ReplayClient
from mmreplay.ray.client_stats import LostWarning
from mmreplay.ray.requests import Requests
from mmreplay.ray.sources import RingsSource
from mmreplay.samplers.base import Draw, Sampler
from tests.on_ray.rings import Run, Shard, ring


@pytest.fixture
def run(tmp_path):
    shards = [
        Shard(f"s{n}", {"r": ring(tmp_path / f"{n}", 100 * n + np.arange(40 + n))})
        for n in range(2)
    ]
    result = Run(*shards, key="s0")
    yield result
    for shard in shards:
        shard.state = "alive"
    result.close()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("per_call", [1, 4])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_batches_come_as_tensors_and_take_priorities(run, alone, per_call, prefetch):
    sampler = mr.PrioritizedSampler(seed=0)
    with ReplayClient(
        run, sampler, batch_size=32, prefetch=prefetch, per_call=per_call, alone=alone
    ) as client:
        assert client.prefetch == prefetch * per_call
        batches = []
        for batch, _ in zip(client, range(30), strict=False):
            assert batch["n"].shape == (32,)
            assert torch.equal(batch["n"], 100 * batch.buffer_ids + batch.positions)
            assert client.update_priorities(batch, torch.rand(32)) == 0
            batches.append((batch, batch["n"].clone()))
        for batch, numbers in batches:
            # Memory is used again only once nobody has the batch.
            assert torch.equal(batch["n"], numbers)
        assert repr(client).startswith("<ReplayClient of <run 'test' of 2 rings>")
        assert client.stats().rings == ("s0/r", "s1/r")
    assert client.closed
    with pytest.raises(FailedError, match="is closed"):
        next(client)


@pytest.mark.parametrize("away_s", [300e-6, 700e-6])
def test_a_learner_that_is_back_soon_gathers_small_batches_itself(run, monkeypatch, away_s):
    now, quick, requested = [0.0], [], prefetch.LearnerTiming.requested
    threads, gather = [], RingsSource.gather

    def noting(self, small):
        requested(self, small)
        quick.append(self.quick)

    def gathering(self, pending):
        threads.append(threading.current_thread())
        return gather(self, pending)

    monkeypatch.setattr(RingsSource, "gather", gathering)
    monkeypatch.setattr(prefetch, "perf_counter", lambda: now[0])
    monkeypatch.setattr(prefetch.LearnerTiming, "requested", noting)
    with ReplayClient(run, mr.UniformSampler(0), batch_size=32) as client:
        for _ in range(40):
            next(client)
            now[0] += away_s
    # At first it is not known that no page is missing.
    assert set(quick[10:]) == {away_s < 500e-6}
    if away_s < 500e-6:
        assert set(threads[15:]) == {threading.main_thread()}


@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_signals_handler_may_close_it_while_the_learner_waits_for_priorities(
    run, monkeypatch, prefetch
):
    """The learner waits for a reply that is one to its priorities as well."""
    look, closed, errors = Requests._look, [], []

    def struck(self, request, timeout_s):
        # As a handler would, in the middle of the wait.
        waits = timeout_s and request.shares and request.shard.updating is request
        by_learner = threading.current_thread() is learner
        if waits and by_learner and counted[0] > 20 and not closed:
            closed.append(request)
            client.close()
        return look(self, request, timeout_s)

    def learn():
        try:
            for batch in client:
                client.update_priorities(batch, torch.rand(32))
                counted[0] += 1
        except FailedError as error:
            errors.append(str(error))

    monkeypatch.setattr(Requests, "_look", struck)
    counted = [0]
    sampler = mr.PrioritizedSampler(seed=0)
    client = ReplayClient(run, sampler, batch_size=32, prefetch=prefetch)
    learner = threading.Thread(target=learn, daemon=True)
    learner.start()
    learner.join(60)
    # A thread that waits for itself never ends.
    assert not learner.is_alive()
    assert closed
    assert errors == ["run 'test': the client is closed."]


def test_memory_is_used_again(run):
    with ReplayClient(run, mr.UniformSampler(0), batch_size=64) as client:
        seen = set()
        for batch, _ in zip(client, range(60), strict=False):
            seen.add(batch["n"].data_ptr())
            del batch
    assert len(seen) < 20


def test_a_state_continues_with_the_next_batch(run):
    with ReplayClient(run, mr.UniformSampler(0), batch_size=16) as client:
        steps = iter(client)
        for _ in range(5):
            next(steps)
        state = client.state_dict()
        expected = [next(steps)["n"].tolist() for _ in range(6)]
    with ReplayClient(run, mr.UniformSampler(1), batch_size=16) as client:
        client.load_state_dict(state)
        steps = iter(client)
        assert [next(steps)["n"].tolist() for _ in range(6)] == expected
        with pytest.raises(FormatError, match="kind must be 'ReplayClient'"):
            client.load_state_dict({**state, "kind": "ReplayLoader"})
    assert state["kind"] == "ReplayClient"


def test_a_lost_node_warns_in_the_learners_thread(run):
    with ReplayClient(run, mr.UniformSampler(0), batch_size=64, lost_s=0.2) as client:
        steps = iter(client)
        next(steps)
        run.known[1].state = "silent"
        with pytest.warns(LostWarning, match="node 's1' has not answered") as caught:
            batches = list(islice(steps, 5))
        assert caught[0].filename == __file__
        assert set(batches[-1].buffer_ids.tolist()) == {0}
        assert client.stats().lost == ("s1/r",)
        run.known[1].state = "alive"
        while client.stats().lost:
            next(steps)
        for _ in range(4):
            batch = next(steps)
        assert set(batch.buffer_ids.tolist()) == {0, 1}


@pytest.mark.parametrize("sampler", [mr.UniformSampler, mr.PrioritizedSampler, mr.ShuffledSampler])
@pytest.mark.parametrize("prefetch", [1, 4])
def test_closing_waits_for_no_draw_of_a_silent_node(run, sampler, prefetch):
    client = ReplayClient(run, sampler(seed=0), batch_size=8, prefetch=prefetch, lost_s=60.0)
    next(iter(client))
    run.known[1].state = "silent"
    # The threads wait for it by now.
    with suppress(FailedError), ThreadPoolExecutor(1) as pool:
        waits = pool.submit(list, client)
        time.sleep(0.5)
        began = time.monotonic()
        client.close()
        # Two waits of half a second, and time for a busy machine.
        assert time.monotonic() - began < 10
        waits.result()
    run.known[1].state = "alive"


def test_closing_sends_the_priorities_of_draws_that_nobody_waits_for(run):
    sampler = mr.PrioritizedSampler(eps=0.0, seed=0)
    client = ReplayClient(run, sampler, batch_size=64, prefetch=1, lost_s=60.0)
    batch = next(iter(client))
    client.update_priorities(batch, np.full(64, 7.0))
    next(client)
    for shard in run.known:
        shard.state = "silent"

    def back():
        for shard in run.known:
            shard.state = "alive"

    timer = threading.Timer(0.7, back)
    timer.start()
    client.close()
    timer.join()
    assert client.stats().dropped == 0
    for shard in run.known:
        masses = shard.draws.masses(client._rings.source.table.client, 0, 0.0)
        assert masses["r"][3] == 7.0


def test_what_shards_cannot_make_again_says_why_over_several_rings(run):
    class Here(mr.UniformSampler):
        """A class of a function, that no other process can import."""

    for sampler, words in (
        (Here(seed=0), "Here must be a class that the nodes of a run can import"),
        (mr.PrioritizedSampler(alpha=lambda step: 0.5), "alpha of PrioritizedSampler must be"),
    ):
        with pytest.raises(SchemaError, match=words):
            ReplayClient(run, sampler)


def test_other_samplers_draw_from_the_one_ring_of_this_node(run):
    class Here(mr.UniformSampler):
        """A class of a function, that no other process can import."""

    run.known.pop().draws.close()
    for sampler in (
        mr.RankPrioritizedSampler(seed=0),
        mr.DistinctSampler(seed=0),
        mr.ShuffledSampler(seed=0),
        mr.SequenceSampler(4, mr.RankPrioritizedSampler(seed=0)),
        Here(seed=0),
        mr.SequenceSampler(4, Here(seed=0)),
        mr.PrioritizedSampler(alpha=lambda step: 0.5, seed=0),
    ):
        with ReplayClient(run, sampler, batch_size=8) as client:
            assert len(next(iter(client))) == 8
            assert len(client.stats().rings) == 1
    with ReplayClient(run, mr.ShuffledSampler(seed=0), batch_size=8) as client:
        assert len(client) == 5
        assert sorted(n for b in client for n in b["n"].tolist()) == list(range(40))


ONE_RING = [
    lambda seed: mr.RankPrioritizedSampler(seed=seed),
    lambda seed: mr.DistinctSampler(seed=seed),
    lambda seed: mr.RecentSampler(20, 0.5, seed=seed),
    lambda seed: mr.SequenceSampler(4, mr.DistinctSampler(seed=seed)),
    lambda seed: mr.MixtureSampler(
        [(mr.UniformSampler(seed=1), 1), (mr.ShuffledSampler(seed=2), 1)], seed=seed
    ),
]


@pytest.mark.parametrize("make", ONE_RING)
def test_each_rank_and_seed_draws_other_steps_of_the_one_ring(run, make):
    run.known.pop().draws.close()

    def drawn(**options):
        with ReplayClient(run, make(options.pop("own", 0)), batch_size=8, **options) as c:
            return [next(iter(c)).positions.tolist() for _ in range(3)]

    options = [
        {},
        {"rank": 1, "num_ranks": 3},
        {"rank": 2, "num_ranks": 3},
        {"seed": 7},
        {"seed": 7, "rank": 1, "num_ranks": 3},
        {"seed": 7, "rank": 2, "num_ranks": 3},
    ]
    steps = [drawn(**each) for each in options]
    assert len({str(each) for each in steps}) == len(options)
    assert [drawn(**each) for each in options] == steps
    assert drawn(rank=0, num_ranks=3) == steps[0]
    assert drawn(own=5, seed=7) == steps[3]
    with mr.ReplayBuffer.open(run.known[0].folders["r"], sampler=make(0)) as buffer:
        assert [buffer.sample(8).positions.tolist() for _ in range(3)] == steps[0]


class Oldest:
    """Draws the oldest step, by no seed; no subclass of `Sampler`."""

    def draw(self, view, batch_size):
        """Draw."""
        first = np.full(batch_size, view.span.first[0])
        ones = np.ones(batch_size)
        return Draw(np.zeros(batch_size, np.int64), first, ones, ones)

    def state_dict(self):
        """Nothing."""
        return {}

    def load_state_dict(self, state):
        """Do nothing."""


class OldestSampler(Oldest, Sampler):
    """The same, with the defaults of `Sampler`."""


@pytest.mark.parametrize("sampler", [Oldest(), OldestSampler()])
def test_a_sampler_without_a_seed_takes_none_of_a_client(run, sampler):
    with pytest.raises(
        SchemaError, match=r"^Oldest.* cannot draw a batch in parts, .* with 2 rings"
    ):
        ReplayClient(run, sampler)
    run.known.pop().draws.close()
    with ReplayClient(run, sampler, batch_size=4, num_ranks=2) as client:
        assert next(client).positions.tolist() == [0] * 4
    with pytest.raises(SchemaError, match="group"):
        ReplayClient(run, sampler, group="g")
    for options in ({"seed": 3}, {"rank": 1, "num_ranks": 2}):
        with pytest.raises(SchemaError, match=r"must be left out with Oldest.*whose st"):
            ReplayClient(run, sampler, **options)


@pytest.mark.parametrize(
    "sampler",
    [
        mr.RankPrioritizedSampler(),
        mr.DistinctSampler(),
        mr.StratifiedSampler(stratified=False),
        mr.EpisodeSampler(),
        mr.MixtureSampler([(mr.UniformSampler(), 1)]),
        mr.EmphasizeRecentSampler(10),
        mr.RecentSampler(5, 0.5),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_other_samplers_are_refused_by_name_over_several_rings(run, sampler):
    name = type(sampler).__name__
    with pytest.raises(
        SchemaError, match=rf"^{name} cannot draw a batch in parts, .* with 2 rings"
    ):
        ReplayClient(run, sampler)
    run.known.pop(0).draws.close()
    with pytest.raises(SchemaError, match=rf"^{name} cannot draw .* with its ring on 's1'"):
        ReplayClient(run, sampler)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"prefetch": 0}, r"prefetch must be an integer in \[1, 4096\], got 0"),
        ({"per_call": 0}, r"per_call must be an integer in \[1, 4096\], got 0"),
        ({"prefetch": 10**9}, r"prefetch must be an integer in \[1, 4096\], got 10"),
        ({"per_call": 4097}, r"per_call must be an integer in \[1, 4096\], got 4097"),
        (
            {"prefetch": 65, "per_call": 64},
            r"prefetch \* per_call must be at most 4096 batches, got 65 \* 64",
        ),
        ({"alone": 1}, "alone must be"),
        ({"lost_s": 0}, "lost_s must be"),
        ({"straggler_s": -1}, "straggler_s must be"),
        ({"rank": 2, "num_ranks": 2}, "rank must be below num_ranks, 2, got 2"),
        ({"num_ranks": 0}, "num_ranks must be"),
        ({"device": "tpu9"}, "device must be"),
        ({"group": "a"}, "group must be None with UniformSampler, got 'a'"),
    ],
)
def test_wrong_arguments_are_refused(run, options, match):
    with pytest.raises(SchemaError, match=match):
        ReplayClient(run, mr.UniformSampler(0), **options)


@pytest.mark.parametrize("name", [None, 5, "a/b", ""])
def test_a_run_has_a_name(name):
    with pytest.raises(SchemaError, match="run must be a name of letters"):
        ReplayClient(name, mr.UniformSampler(0))


@pytest.mark.parametrize("transforms", [None, mr.Cast("float32")])
def test_transforms_are_a_list(run, transforms):
    with pytest.raises(SchemaError, match="transforms must be a list of transforms"):
        ReplayClient(run, mr.UniformSampler(0), transforms)


def test_a_closed_client_takes_no_priorities(run):
    with ReplayClient(run, mr.PrioritizedSampler(seed=0), batch_size=8) as client:
        batch = next(client)
    with pytest.raises(FailedError, match="update_priorities: this client is closed"):
        client.update_priorities(batch, np.ones(8))


def test_a_client_that_is_closed_leaves_no_answer_to_ray(run):
    with ReplayClient(run, mr.UniformSampler(0), batch_size=8) as client:
        next(client)
    assert [shard.calls.count("settle") for shard in run.known] == [1, 1]


def test_a_dropped_client_ends(run):
    client = ReplayClient(run, mr.UniformSampler(0), batch_size=8)
    next(iter(client))
    rings, worker = weakref.ref(client._rings.source), client._rings.source._worker
    del client
    gc.collect()
    assert not worker.running
    assert rings() is None or rings()._worker is None


def test_a_client_without_epochs_has_no_length(run):
    with (
        ReplayClient(run, mr.UniformSampler(0)) as client,
        pytest.raises(TypeError, match="UniformSampler draws without an end"),
    ):
        len(client)


@pytest.mark.parametrize("sampler", [mr.UniformSampler(), mr.DistinctSampler()])
def test_a_shard_of_another_version_is_refused(tmp_path, sampler):
    shard = Shard("s0", {"r": ring(tmp_path / "r", np.arange(50))})
    shard.version = "9.9.9"
    with pytest.raises(mr.FailedError, match=r"the shard 's0' has 9\.9\.9\. Install"):
        ReplayClient(Run(shard, key="s0"), sampler)


@pytest.mark.parametrize("name", ["", "a/b", 3])
def test_a_group_has_a_name(run, name):
    with pytest.raises(SchemaError, match="group must be a name of letters"):
        ReplayClient(run, mr.ShuffledSampler(seed=0), group=name)


def test_a_function_of_the_step_weighs_batches(run):
    sampler = mr.PrioritizedSampler(1.0, lambda step: min(step / 16, 1.0), seed=0)
    with ReplayClient(run, sampler, batch_size=64) as client:
        for step in range(12):
            batch = next(client)
            expected = (1 / batch.probabilities) ** (step / 16)
            np.testing.assert_allclose(batch.weights, expected / max(expected), 1e-4)
            client.update_priorities(batch, np.asarray(batch["n"]) + 1.0)
    assert batch.weights.min() < 0.9


def test_a_forked_child_sends_nothing_when_it_closes(run):
    client = ReplayClient(run, mr.PrioritizedSampler(seed=0), batch_size=8)
    (pending,) = islice(client, 1)
    client.update_priorities(pending, np.ones(8))
    pid = os.fork()
    if not pid:
        sent = [len(shard.calls) for shard in run.known]
        client._closer()
        os._exit(int(sent != [len(shard.calls) for shard in run.known]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    client.close()


class Registry:
    """Says of shard ``"n0"`` what `state` was when it was asked.

    Attributes:
        now: Its clock.
        state: Of the shard.
        delay: Until an answer is here.
    """

    def __init__(self):
        self.now, self.state, self.delay = 100.0, "alive", 0.0

    def monotonic(self):
        """The time."""
        return self.now

    def send(self, name):
        """Begin a call."""
        assert name == "states"
        return self.now, {"n0": self.state}

    def receive(self, call, timeout):
        """Return its answer."""
        return call[1]

    def is_initialized(self):
        """Ray is there."""
        return True

    def wait(self, calls, timeout):
        """Tell the calls with an answer from others."""
        done = [call for call in calls if self.now - call[0] >= self.delay]
        return done, [call for call in calls if call not in done]


@pytest.fixture
def registry(monkeypatch):
    """The registry that `RayRun` asks."""
    found = Registry()
    monkeypatch.setattr(client_module.cluster, "require_connection", lambda: None)
    monkeypatch.setattr(client_module.cluster, "this_node_id", lambda: "here")
    monkeypatch.setattr(client_module.cluster, "Remote", lambda name: found)
    monkeypatch.setattr(client_module, "require_run", lambda run: None)
    monkeypatch.setattr(client_module, "ray", found)
    monkeypatch.setattr(client_module, "time", found)
    return found


def test_an_answer_that_nobody_looked_for_is_no_news_of_a_shard(registry):
    run = RayRun("test")
    assert run.states() is None
    registry.now += 0.5
    assert run.states() == {"n0": "alive"}
    # One more call is under way, and the next outage comes a minute later.
    registry.now += 60
    registry.state = "being restarted"
    assert run.states() is None
    registry.now += 0.5
    assert run.states() == {"n0": "being restarted"}


@pytest.mark.parametrize("delay", [0.2, 0.6, 1.4])
def test_a_registry_that_is_slow_to_answer_is_heard(registry, delay):
    registry.delay = delay
    run = RayRun("test")
    heard = []
    for _ in range(20):
        heard.append(run.states())
        registry.now += 0.3
    assert None not in heard[7:]
