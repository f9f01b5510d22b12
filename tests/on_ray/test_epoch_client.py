"""Clients that go through epochs of a run, over shards of this process."""

import json
import re
import shutil
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from itertools import islice

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FailedError, FormatError, SchemaError, StaleError, StarvedError
from mmreplay.format.ray_files import FrozenEpoch, read_epochs, write_epochs
from mmreplay.ray import draws, requests
from mmreplay.ray.client import ReplayClient
from mmreplay.ray.cluster import RESTARTING
from mmreplay.ray.epoch_names import EpochNames
from mmreplay.ray.epochs import freeze_rings
from mmreplay.ray.known_run import KnownRun
from mmreplay.ray.ring_table import RingTable
from tests.on_ray.rings import Run, Shard, ring
from tests.waits import until

SIZES = (40, 33, 7)
ALL = Counter(range(sum(SIZES)))


@pytest.fixture(params=["elsewhere", "s0"], ids=["all elsewhere", "one here"])
def run(tmp_path, request):
    """Three rings on three nodes, of which one may be the learner's."""
    edges = np.cumsum((0, *SIZES))
    shards = [
        Shard(f"s{n}", {"r": ring(tmp_path / f"{n}", np.arange(*edges[n : n + 2]))})
        for n in range(3)
    ]
    result = Run(*shards, key=request.param)
    yield result
    result.close()


def client_of(run, **options):
    options = {"batch_size": 8, **options}
    return ReplayClient(run, mr.ShuffledSampler(seed=options.pop("order", 0)), **options)


def started(thread):
    thread.start()
    return thread


@contextmanager
def silent_until_warned(shard, match):
    """A node that does not answer until its learner was warned that it waits."""
    with ExitStack() as stack:
        warns = pytest.warns(mr.ray.LostWarning, match=match)
        caught = stack.enter_context(warns)
        shard.state = "silent"

        def come_back():
            for _ in range(6_000):
                if any(re.search(match, str(each.message)) for each in [*caught]):
                    break
                time.sleep(0.01)
            shard.state = "alive"

        started(threading.Thread(target=come_back, daemon=True))
        yield


def numbers(batches):
    return [n for batch in batches for n in batch["n"].tolist()]


def test_each_iteration_is_an_epoch_of_every_start_once(run):
    with client_of(run) as client:
        assert len(client) == 10
        orders = [numbers(client) for _ in range(3)]
        assert all(Counter(order) == ALL for order in orders)
        assert len({tuple(order) for order in orders}) == 3
    with client_of(run) as client:
        assert [numbers(client) for _ in range(3)] == orders


def test_probabilities_and_buffer_ids_are_those_of_all_rings(run):
    with client_of(run) as client:
        for batch in client:
            assert batch.probabilities.tolist() == pytest.approx([1 / 80] * len(batch))
            assert (batch.weights == 1).all()
            limits = np.cumsum((0, *SIZES))
            rings = np.searchsorted(limits, batch["n"].numpy(), side="right") - 1
            assert batch.buffer_ids.tolist() == rings.tolist()


def test_ranks_are_disjoint_and_cover_everything(run):
    clients = [client_of(run, rank=rank, num_ranks=3) for rank in range(3)]
    for _ in range(2):
        drawn = [numbers(client) for client in clients]
        assert Counter(n for own in drawn for n in own) == ALL
        assert {len(own) for own in drawn} == {26, 27}
    for client in clients:
        client.close()


@pytest.mark.parametrize("prefetch", [1, 4])
def test_a_state_goes_on_with_the_next_batch_elsewhere(run, prefetch):
    with client_of(run, prefetch=prefetch) as client:
        batches = iter(client)
        drawn = numbers(islice(batches, 4))
        state = json.loads(json.dumps(client.state_dict()))
        expected = numbers(batches)
        following = numbers(client)
    assert Counter(drawn + expected) == ALL
    with client_of(run, order=9, prefetch=prefetch) as client:
        client.load_state_dict(state)
        assert numbers(client) == expected
        assert numbers(client) == following


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("wait_s", [0, 0.05])
@pytest.mark.parametrize("options", [{}, {"num_ranks": 2, "rank": 1}])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_a_state_of_an_epochs_end_goes_on_with_no_batch_and_then_the_next_epoch(
    run, prefetch, wait_s, options, drop_last, closed
):
    def client():
        sampler = mr.ShuffledSampler(seed=0, drop_last=drop_last)
        return ReplayClient(run, sampler, batch_size=9, prefetch=prefetch, group="g", **options)

    with client() as own:
        batches = iter(own)
        drawn = numbers(islice(batches, len(own)))
        time.sleep(wait_s)
        last = json.loads(json.dumps(own.state_dict()))
        if not closed:
            following = numbers(own)
    if closed:
        assert own.state_dict() == last
        with client() as own:
            own.load_state_dict(last)
            epochs = [numbers(own) for _ in range(2)]
            assert epochs[0] == []
            following = epochs[1]
    assert len(drawn) == len(following) > 0
    with client() as own:
        own.load_state_dict(last)
        assert numbers(own) == []
        after = json.loads(json.dumps(own.state_dict()))
        assert numbers(own) == following
    with client() as own:
        own.load_state_dict(after)
        assert numbers(own) == following


def test_a_state_that_does_not_say_whether_its_epoch_has_ended_is_refused(run):
    with client_of(run) as client:
        state = {**client.state_dict(), "at_end": 1}
        with pytest.raises(FormatError, match="at_end must be True or False, got 1"):
            client.load_state_dict(state)


@pytest.mark.parametrize("wait_s", [0, 0.05])
def test_an_epoch_whose_batches_were_counted_is_over(run, wait_s):
    with client_of(run) as client:
        for _ in range(5):
            drawn = numbers(islice(client, len(client)))
            time.sleep(wait_s)
            assert Counter(drawn) == ALL


def test_a_shard_that_is_restarted_goes_on_with_the_epoch(run):
    with client_of(run) as client:
        batches = iter(client)
        drawn = numbers(islice(batches, 3))
        for shard in run.known:
            shard.restart()
        drawn += numbers(batches)
        assert Counter(drawn) == ALL


def test_a_silent_node_is_waited_for_and_drawn_when_it_is_back(run):
    with client_of(run, lost_s=0.2) as client:
        batches = iter(client)
        drawn = numbers(islice(batches, 2))
        with silent_until_warned(run.known[1], ""):
            drawn += numbers(batches)
        assert Counter(drawn) == ALL


@pytest.mark.filterwarnings("ignore::mmreplay.ray.client_stats.LostWarning")
def test_an_epoch_lacks_nothing_after_a_restart_that_took_too_long(run):
    with client_of(run, lost_s=0.1, patience_s=0.3, prefetch=3) as client:
        batches = iter(client)
        drawn = numbers(islice(batches, 2))
        run.said, run.known[1].state = {"s1": RESTARTING}, "restarting"

        def go_on():
            while True:
                drawn.extend(numbers([next(batches)]))

        with pytest.raises(StarvedError, match=r"waited 0\.3 s for shards \['s1'\]"):
            go_on()
        run.known[1].restart()
        run.known[1].state = "alive"
        assert Counter(drawn + numbers(batches)) == ALL


@pytest.mark.filterwarnings("ignore::mmreplay.ray.client_stats.LostWarning")
def test_the_oldest_batch_is_starved_though_another_one_found_the_shard_overdue(run, monkeypatch):
    def found_by_another(table):
        for shard in table.shards.values():
            shard.overdue = False

    monkeypatch.setattr(RingTable, "refuse_overdue", found_by_another)
    with client_of(run, lost_s=0.1, patience_s=0.3, prefetch=3) as client:
        batches = iter(client)
        next(batches)
        shard = run.known[1]
        run.said, shard.state = {"s1": RESTARTING}, "restarting"
        # Without the error the epoch would end once the shard is back.
        back = threading.Timer(5, setattr, (shard, "state", "alive"))
        back.start()
        with pytest.raises(StarvedError, match=r"waited 0\.3 s for shards \['s1'\]"):
            numbers(batches)
        back.cancel()


@pytest.mark.parametrize("patience_s", [0, -1.0, "long"])
def test_a_patience_that_is_no_time_is_refused(run, patience_s):
    with pytest.raises(SchemaError, match="patience_s must be"):
        client_of(run, patience_s=patience_s)


@pytest.mark.parametrize("back", [True, False])
def test_a_sampler_of_one_ring_waits_for_a_shard_that_is_being_restarted(tmp_path, back):
    shard = Shard("s0", {"r": ring(tmp_path / "r", np.arange(9))})
    run = Run(shard, key="s0")
    run.said, shard.state = {"s0": RESTARTING}, "restarting"
    options = {"lost_s": 0.1, "patience_s": 600.0 if back else 0.3}
    if back:
        threading.Timer(0.5, lambda: setattr(shard, "state", "alive")).start()
        ReplayClient(run, mr.DistinctSampler(seed=0), **options).close()
    else:
        with pytest.raises(StarvedError, match=r"waited 0\.3 s for shards \['s0'\]"):
            ReplayClient(run, mr.DistinctSampler(seed=0), **options)
    run.close()


@pytest.mark.parametrize("counted", [False, True])
def test_an_epoch_begins_when_a_node_that_was_away_at_first_is_back(run, counted):
    with (
        silent_until_warned(run.known[1], r"waits for nodes \['s1'\]"),
        client_of(run, lost_s=0.2) as client,
    ):
        # To count begins the epoch, before any thread looks after the shards.
        num_batches = len(client) if counted else 10
        drawn = numbers(client)
        assert num_batches == 10
        assert Counter(drawn) == ALL


def test_several_learners_begin_when_a_node_that_was_away_is_back(run):
    clients = [client_of(run, rank=rank, num_ranks=2) for rank in range(2)]
    with silent_until_warned(run.known[1], r"waits for nodes \['s1'\]"):
        drawn = numbers(clients[0])
    assert Counter(drawn + numbers(clients[1])) == ALL
    for client in clients:
        client.close()


def made_again(run, number):
    """Delete a ring, make another one of its name, and return all that is left."""
    folders, own = run.known[number].folders, np.arange(1000, 1009)
    path = folders.pop("r")
    # At once: a batch ahead that opens half a ring gets another error.
    shutil.rmtree(path.rename(path.with_name("deleted")))
    folders["r"] = ring(path, own)
    edges = np.cumsum((0, *SIZES))
    left = set(ALL) - set(range(*edges[number : number + 2]))
    return Counter({*left, *own.tolist()})


@pytest.mark.parametrize("number", [0, 1])
def test_the_next_epoch_is_over_the_ring_that_was_made_again(run, number):
    with client_of(run) as client:
        assert Counter(numbers(client)) == ALL
        expected = made_again(run, number)
        assert Counter(numbers(client)) == expected


def test_an_epoch_whose_ring_was_made_again_in_the_middle_is_a_stale_error(run, monkeypatch):
    monkeypatch.setattr(draws, "LOOK_S", 0.0)
    with client_of(run, prefetch=1) as client:
        batches = iter(client)
        next(batches)
        expected = made_again(run, 1)
        num_calls = len(run.known[1].calls)
        with pytest.raises(StaleError, match=r"ring s1/r does not know epoch 0"):
            list(batches)
        assert len(run.known[1].calls) - num_calls < 20
    with client_of(run) as client:
        assert Counter(numbers(client)) == expected


def test_a_state_of_an_epoch_whose_ring_was_deleted_is_a_stale_error(run):
    with client_of(run, rank=0, num_ranks=2) as client:
        next(iter(client))
        state = json.loads(json.dumps(client.state_dict()))
    with mr.ReplayBuffer.open(run.known[0].folders["r"]) as buffer:
        uuid = buffer.metadata.uuid.hex()
    shutil.rmtree(run.known[0].folders.pop("r"))
    with client_of(run, rank=0, num_ranks=2) as again:
        again.load_state_dict(state)
        with pytest.raises(StaleError, match=f"rings .*{uuid}.* are nowhere"):
            next(iter(again))
    # A learner of the same group that begins later.
    with (
        client_of(run, rank=1, num_ranks=2) as other,
        pytest.raises(StaleError, match=f"rings .*{uuid}.* are nowhere"),
    ):
        next(iter(other))


def fails_once(shard, at, error):
    """Have the at-th exchange of a shard raise an error."""
    exchange, calls = shard.draws.exchange, []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == at:
            raise error
        return exchange(*arguments)

    shard.draws.exchange = fail


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("error", [FailedError("cannot read"), OSError(5, "an error")])
def test_an_epoch_lacks_nothing_after_an_error(run, at, prefetch, error):
    fails_once(run.known[1], at, error)
    with client_of(run, prefetch=prefetch) as client:
        batches, drawn, errors = iter(client), [], []
        while True:
            try:
                drawn += numbers([next(batches)])
            except StopIteration:
                break
            except OSError as caught:
                errors.append(caught)
                assert len(client) == 10
        assert Counter(drawn) == ALL
        assert len(errors) == 1
        assert client.stats().skipped == 0
        assert Counter(numbers(client)) == ALL
    with client_of(run) as client:
        assert Counter(numbers(client)) == ALL


def test_an_epoch_lacks_nothing_after_a_shard_that_ended_again_and_again(run, monkeypatch):
    monkeypatch.setattr(requests, "MAX_REPEAT_S", 0.1)
    with client_of(run, prefetch=3) as client:
        batches = iter(client)
        drawn = numbers(islice(batches, 2))
        run.known[1].state = "poisoned"

        def go_on():
            while True:
                drawn.extend(numbers([next(batches)]))

        with pytest.raises(StarvedError, match="the shard 's1' ended each time"):
            go_on()
        state = json.loads(json.dumps(client.state_dict()))
        run.known[1].state = "alive"
        rest = numbers(batches)
        assert Counter(drawn + rest) == ALL
        assert client.stats().skipped == 0
    with client_of(run) as client:
        client.load_state_dict(state)
        assert numbers(client) == rest


def test_starts_that_were_overwritten_count_once_where_an_error_was_met(run, monkeypatch):
    with (
        mr.ReplayBuffer.open(run.known[0].folders["r"], "r+") as writer,
        client_of(run, prefetch=4) as client,
    ):
        batches = iter(client)
        drawn = numbers(islice(batches, 2))
        writer.extend(n=np.arange(1000, 1030))
        fails_once(run.known[1], 3, FailedError("cannot read"))
        failed = 0
        while True:
            try:
                drawn += numbers([next(batches)])
            except StopIteration:
                break
            except FailedError:
                failed += 1
        assert failed == 1
        assert max(Counter(drawn).values()) == 1
        assert client.stats().skipped == 80 - len(drawn) > 0


@pytest.mark.parametrize("group", ["x" * 300, 7])
def test_a_state_of_another_group_than_can_be_stored_is_refused(run, group):
    with client_of(run) as client:
        state = client.state_dict()
        state["sampler"]["group"] = group
        with pytest.raises(FormatError, match="group must be a name of 256"):
            client.load_state_dict(state)


def test_closing_ends_the_wait_for_a_node(run):
    client = client_of(run, lost_s=0.2)
    run.known[1].state = "silent"
    failed = []

    def go():
        try:
            list(client)
        except FailedError as error:
            failed.append(error)

    def start():
        thread.start()
        # While it waits, and not after.
        until(lambda: len(caught) > 0)

    thread = threading.Thread(target=go, daemon=True)
    match = r"epoch 0 waits for nodes \['s1'\]"
    with pytest.warns(mr.ray.LostWarning, match=match) as caught:
        start()
    assert thread.is_alive()
    client.close()
    thread.join(20)
    assert len(failed) == 1
    run.known[1].state = "alive"


def test_an_epoch_that_a_ring_forgot_is_brought_back(run):
    with client_of(run, prefetch=1) as client:
        batches = iter(client)
        drawn = numbers(islice(batches, 2))
        for shard in run.known:
            write_epochs(shard.folders["r"], [])
            shard.restart()
        drawn += numbers(batches)
        assert Counter(drawn) == ALL
    if run.node_id == "elsewhere":
        assert all(len(read_epochs(shard.folders["r"])) == 1 for shard in run.known)


def test_overwritten_starts_are_left_out_and_counted(run):
    with (
        mr.ReplayBuffer.open(run.known[0].folders["r"], "r+") as writer,
        client_of(run, prefetch=1) as client,
    ):
        batches = iter(client)
        drawn = numbers(islice(batches, 2))
        writer.extend(n=np.arange(1000, 1030))
        drawn += numbers(batches)
        assert max(Counter(drawn).values()) == 1
        assert set(drawn) <= set(range(80))
        assert set(range(30, 80)) <= set(drawn)
        assert client.stats().skipped == 80 - len(drawn) > 0
        assert set(numbers(client)) == {*range(30, 80), *range(1000, 1030)}
        assert client.stats().skipped == 0


def test_ranks_without_a_seed_are_refused(run):
    with pytest.raises(SchemaError, match="seed must be given where 2 learners share"):
        ReplayClient(run, mr.ShuffledSampler(), num_ranks=2)
    ReplayClient(run, mr.ShuffledSampler(), num_ranks=2, seed=1).close()


def test_a_rank_other_than_that_of_the_sampler_is_refused(run):
    def rows(rank, num_ranks):
        sampler = mr.ShuffledSampler(seed=0, rank=0, num_ranks=2)
        with ReplayClient(run, sampler, rank=rank, num_ranks=num_ranks) as client:
            return numbers(client)

    for rank, num_ranks in ((3, 4), (1, 2), (0, 4)):
        got = f"{rank} of {num_ranks}"
        with pytest.raises(SchemaError, match=f"of the ShuffledSampler, got {got}"):
            rows(rank, num_ranks)
    assert rows(0, 1) == rows(0, 2)
    assert len(rows(0, 2)) == 40


class Shards:
    """Rings that freeze, and may be away."""

    def __init__(self, *uuids):
        self.frozen = dict.fromkeys(uuids)
        self.away = set()
        self.kill_after = None

    def ask(self, buffers):
        found = {}
        for uuid in self.frozen:
            if uuid in self.away:
                continue
            if self.frozen[uuid] is None and buffers is not None and uuid in buffers:
                if self.kill_after == 0:
                    raise KeyboardInterrupt
                if self.kill_after is not None:
                    self.kill_after -= 1
                epoch = FrozenEpoch("x", 0, (1,), (1,), tuple(buffers))
                self.frozen[uuid] = epoch.to_json()
            found[uuid] = self.frozen[uuid]
        return found, sorted(self.away)


def test_a_registry_killed_in_the_middle_goes_on_with_the_same_rings():
    shards = Shards("a" * 32, "b" * 32, "c" * 32)
    shards.kill_after = 1
    with pytest.raises(KeyboardInterrupt):
        freeze_rings(shards.ask)
    shards.kill_after = None
    # A ring that came since is for the next epoch.
    shards.frozen["0" * 32] = None
    answer = freeze_rings(shards.ask)
    assert list(answer["rings"]) == ["a" * 32, "b" * 32, "c" * 32]
    assert answer["away"] == []
    assert None not in answer["rings"].values()
    assert freeze_rings(shards.ask) == answer


def test_an_epoch_begins_once_every_shard_has_answered():
    shards = Shards("a" * 32, "b" * 32)
    shards.away = {"b" * 32}
    assert freeze_rings(shards.ask) == {"rings": {}, "away": ["b" * 32]}
    assert shards.frozen["a" * 32] is None
    shards.away = set()
    answer = freeze_rings(shards.ask)
    assert len(answer["rings"]) == 2
    shards.away = {"b" * 32}
    answer = freeze_rings(shards.ask)
    assert answer["away"] == ["b" * 32]


class Broken:
    """A shard that answers, with an error."""

    def send(self, *arguments):
        return None

    def receive(self, reference, timeout_s):
        raise FailedError("the disk of s0 cannot be read")


def test_a_shard_that_answers_with_an_error_is_not_away():
    with pytest.raises(FailedError, match="the disk of s0"):
        EpochNames(KnownRun("test"))._frozen({"s0": Broken()}, {}, "x", 0, None)
