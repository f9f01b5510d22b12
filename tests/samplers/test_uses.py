"""No row is drawn more often than it may, whatever ends the process."""

import errno
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections import Counter
from contextlib import suppress
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.disk.files import Disk
from mmreplay.episodes.starts import ListedStarts
from mmreplay.errors import EmptyError, FormatError, LockedError, SchemaError, StaleError
from mmreplay.samplers import priority_file, uses
from mmreplay.samplers.priority_file import SYNCED, read_column
from mmreplay.samplers.uses import _occurrences
from mmreplay.testing.disks import using
from tests import slices
from tests.contracts.sampler import ListedView

UNIFORM = mr.UniformSampler(seed=0)
FIELDS = {
    "uid": mr.Field((), "int32"),
    "observation": mr.Field((), "int8"),
    "terminated": mr.Field((), "bool"),
}


def ring(path, count=0, capacity=1000, num_envs=1, **options):
    """A ring of steps that end their episodes, so that each is a legal start."""
    buffer = mr.ReplayBuffer.create(
        path,
        mr.Schema(FIELDS),
        capacity,
        num_envs,
        autoreset="same_step",
        engine="memory" if path is None else "memmap",
        commit_every=None,
        **options,
    )
    if count:
        extend(buffer, np.arange(count))
    return buffer


def extend(buffer, uids, ends=True):
    shape = (len(uids), buffer.num_envs)
    numbers = np.repeat(np.asarray(uids, np.int32), buffer.num_envs).reshape(shape)
    buffer.extend(
        uid=numbers, observation=np.zeros(shape, np.int8), terminated=np.full(shape, ends)
    )


def steps_in(batch):
    return list(zip(batch.env_ids.tolist(), batch.positions.tolist(), strict=True))


def drain(buffer, size=7):
    """Every step that is drawn until none is left, and how often."""
    counts = Counter()
    while True:
        try:
            batch = buffer.sample(size)
        except EmptyError:
            return counts
        assert 1 <= len(batch) <= size
        counts.update(steps_in(batch))


INNER = {
    "uniform": lambda: mr.UniformSampler(seed=0),
    "distinct": lambda: mr.DistinctSampler(seed=0),
    "stratified": lambda: mr.StratifiedSampler(seed=0),
    "recent": lambda: mr.ignore_earliest(1, mr.UniformSampler(seed=0)),
    "prioritized": lambda: mr.PrioritizedSampler(name=None, seed=0),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("maximum", [1, 3])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_each_step_is_drawn_just_as_often_as_it_may(inner, maximum, num_envs):
    sampler = mr.UseCounter(maximum, INNER[inner](), name=None, seed=0)
    with ring(None, 20, num_envs=num_envs, sampler=sampler) as buffer:
        expected = {
            (env_id, position): maximum
            for env_id in range(num_envs)
            for position in range(inner == "recent", 20)
        }
        assert drain(buffer) == expected
        with pytest.raises(EmptyError):
            buffer.sample(1)
        # New rows begin with no use, also where they overwrite used ones.
        extend(buffer, np.arange(1500))
        counts = drain(buffer, 100)
        assert set(counts.values()) == {maximum}
        assert len(counts) == num_envs * (1000 - (inner == "recent"))


DISTINCT = {
    "distinct": lambda: mr.DistinctSampler(seed=1),
    "without the oldest": lambda: mr.ignore_earliest(1, mr.DistinctSampler(seed=1)),
    "recent enough": lambda: mr.StalenessSampler(
        "uid", 9, 8, sampler=mr.DistinctSampler(seed=1), seed=2
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("inner", DISTINCT)
@pytest.mark.parametrize("used", [3, 6])
@pytest.mark.sliced(1)
def test_each_set_of_steps_that_may_be_drawn_is_as_likely(inner, used):
    maximum, size, draws = 2, 2, 3000
    drawn = Counter()
    with ring(None, 10) as buffer:
        view = buffer.view
        # The oldest row is left out by the wrappers alone.
        uses = np.zeros(10, int)
        uses[2 : 2 + used] = maximum
        ticket = {
            "kind": "UseTicket",
            "uuid": view.home.uuid.hex(),
            "env_ids": [0] * used,
            "positions": list(range(2, 2 + used)),
            "uses": [maximum] * used,
        }
        other = DISTINCT[inner]()
        for _ in range(draws):
            sampler = mr.UseCounter(maximum, other, name=None, seed=0)
            sampler.acknowledge(view, ticket)
            draw = sampler.draw(view, size)
            # Of all legal starts, whether the others were listed or not.
            starts = 9 if inner == "without the oldest" else 10
            assert np.allclose(draw.probabilities, 1 / starts, rtol=1e-12)
            drawn[tuple(sorted(draw.positions.tolist()))] += 1
    left = [p for p in range(inner != "distinct", 10) if uses[p] < maximum]
    sets = list(combinations(left, size))
    assert set(drawn) == set(sets)
    mean = draws / len(sets)
    # Five standard deviations of a count; up to 21 counts.
    assert all(abs(count - mean) < 5 * mean**0.5 for count in drawn.values())


@pytest.mark.parametrize("inner", DISTINCT)
@pytest.mark.parametrize(("maximum", "lease_s"), [(2, None), (1, 1000)])
def test_no_step_comes_twice_in_a_batch_of_a_distinct_sampler(inner, maximum, lease_s):
    for seed in range(20):
        sampler = mr.UseCounter(maximum, DISTINCT[inner](), lease_s=lease_s, name=None, seed=seed)
        counts = Counter()
        with ring(None, 8, sampler=sampler) as buffer:
            legal = {(0, position) for position in range(inner != "distinct", 8)}
            while left := {step for step in legal if counts[step] < maximum}:
                batch = buffer.sample(5)
                drawn = steps_in(batch)
                assert len(set(drawn)) == len(drawn) == min(5, len(left))
                assert set(drawn) <= left
                counts.update(drawn)
            with pytest.raises(EmptyError):
                buffer.sample(1)


def test_probabilities_of_a_uniform_sampler_are_those_among_all_starts():
    sampler = mr.UseCounter(1, mr.UniformSampler(seed=0), name=None)
    with ring(None, 50, sampler=sampler) as buffer:
        for _ in range(5):
            assert np.allclose(buffer.sample(10).probabilities, 0.02, rtol=1e-12)


@settings(deadline=None, max_examples=slices.count(60, 25))
@given(data=st.data(), maximum=st.integers(1, 3), envs=st.integers(1, 2))
def test_histories_of_draws_and_laps_never_use_a_step_too_often(data, maximum, envs):
    sampler = mr.UseCounter(maximum, name=None, seed=data.draw(st.integers(0, 9)))
    counts = Counter()
    with ring(None, capacity=9, num_envs=envs, sampler=sampler) as buffer:
        for _ in range(data.draw(st.integers(1, 12))):
            extend(buffer, np.arange(data.draw(st.integers(0, 12))), data.draw(st.booleans()))
            if data.draw(st.booleans()):
                buffer.resize(data.draw(st.integers(4, 12)))
            view = buffer.view
            every = view.start_at(np.arange(int(view.starts.lengths.sum()) - view.num_illegal))
            legal = set(zip(*(each.tolist() for each in every), strict=True))
            left = {place for place in legal if counts[place] < maximum}
            try:
                batch = buffer.sample(data.draw(st.integers(1, 20)))
            except EmptyError:
                assert not left
                continue
            assert set(steps_in(batch)) <= left
            counts.update(steps_in(batch))
            assert max(counts.values()) <= maximum
            stored = sampler.uses(view, batch.env_ids, batch.positions)
            assert stored.tolist() == [counts[place] for place in steps_in(batch)]


def test_groups_are_used_whole():
    sampler = mr.UseCounter(1, mr.GroupSampler("uid", 3, seed=0), name=None)
    with ring(None, sampler=sampler) as buffer:
        extend(buffer, np.repeat(np.arange(5), 3))
        seen = []
        for _ in range(3):
            batch = buffer.sample(2)
            groups = batch["uid"].reshape(-1, 3)
            assert (groups == groups[:, :1]).all()
            seen += groups[:, 0].tolist()
        assert sorted(seen) == [0, 1, 2, 3, 4]
        with pytest.raises(EmptyError):
            buffer.sample(2)


CHILD = """
import os, sys
import mmreplay as mr
from mmreplay.cli.run import run
sampler = mr.UseCounter(
    int(sys.argv[2]), mr.UniformSampler(seed=int(sys.argv[3])),
    lease_s=float(sys.argv[4]) if len(sys.argv) > 4 else None,
)
buffer = mr.ReplayBuffer.open(sys.argv[1], sampler=sampler)
for number in range(6):
    batch = buffer.sample(5)
    if len(sys.argv) > 4 and number % 2:
        buffer.acknowledge(batch)
        print("a", *batch.positions.tolist(), flush=True)
    else:
        print("d", *batch.positions.tolist(), flush=True)
os._exit(9)  # as after SIGKILL: nothing is closed
"""


def child(path, maximum, seed, *lease):
    """What a process drew and acknowledged before it died."""
    command = [sys.executable, "-c", CHILD, str(path), str(maximum), str(seed), *lease]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 9
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(kind, [int(position) for position in rest]) for kind, *rest in lines]


def test_a_killed_process_leaves_its_uses(tmp_path):
    path = tmp_path / "ring"
    ring(path, 70).close()
    counts = Counter()
    for seed in range(2):
        for _, positions in child(path, 1, seed):
            counts.update((0, position) for position in positions)
    assert set(counts.values()) == {1}
    sampler = mr.UseCounter(1, seed=7)
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        counts.update(drain(buffer))
        assert sampler.where == "disk"
    # None twice, and none left out.
    assert counts == {(0, position): 1 for position in range(70)}


def test_leases_of_a_killed_process_end_and_acknowledged_rows_stay(tmp_path):
    path = tmp_path / "ring"
    ring(path, 70).close()
    lines = child(path, 1, 0, "1000")
    acknowledged = {p for kind, positions in lines if kind == "a" for p in positions}
    drawn = [p for _, positions in lines for p in positions]
    assert len(set(drawn)) == len(drawn) == 30
    with mr.ReplayBuffer.open(path, sampler=mr.UseCounter(1, seed=7)) as buffer:
        left = drain(buffer)
    assert {position for _, position in left} == set(range(70)) - acknowledged


def test_the_restarted_learner_acknowledges_its_ticket_and_uses_each_once(tmp_path):
    path, checkpoint = tmp_path / "ring", tmp_path / "checkpoint"
    ring(path, 40).close()
    trained = Counter()
    rng = np.random.default_rng(0)
    while True:
        # A learner that restarts, and dies at another line each time.
        sampler = mr.UseCounter(1, mr.UniformSampler(seed=1), lease_s=1000)
        with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
            if checkpoint.exists():
                known = json.loads(checkpoint.read_text())
                trained = Counter(known["trained"])
                buffer.acknowledge(known["ticket"])
            dies_at = int(rng.integers(4))
            try:
                batch = buffer.sample(6)
            except EmptyError:
                break
            if dies_at == 0:
                continue
            after = trained + Counter(map(str, batch.positions.tolist()))
            ticket = buffer.ticket(batch)
            if dies_at == 1:
                continue
            checkpoint.write_text(json.dumps({"trained": after, "ticket": ticket}))
            if dies_at == 2:
                continue
            buffer.acknowledge(batch)
    assert trained == {str(position): 1 for position in range(40)}


def test_a_lease_ends_after_its_time(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(uses, "monotonic", lambda: clock[0])
    sampler = mr.UseCounter(1, mr.DistinctSampler(seed=0), lease_s=10, name=None)
    with ring(None, 6, sampler=sampler) as buffer:
        first, second = buffer.sample(3), buffer.sample(9)
        assert sorted(steps_in(first) + steps_in(second)) == [(0, p) for p in range(6)]
        with pytest.raises(EmptyError, match=r"once, or is leased or in a .*, or wait u"):
            buffer.sample(1)
        assert buffer.acknowledge(first) == 3
        assert buffer.acknowledge(first) == 0
        ticket = buffer.ticket(second)
        clock[0] = 110.5
        again = buffer.sample(9)
        assert set(steps_in(again)) == set(steps_in(second))
        with pytest.raises(StaleError, match="acknowledge: the batch has no lease, as it"):
            buffer.acknowledge(second)
        with pytest.raises(StaleError, match="ticket: the batch has no lease"):
            buffer.ticket(second)
        # A ticket holds after the lease, and both may say so.
        assert buffer.acknowledge(json.loads(json.dumps(ticket))) == 3
        assert buffer.acknowledge(ticket) == 0
        assert buffer.acknowledge(again) == 0
        with pytest.raises(EmptyError, match="used once"):
            buffer.sample(1)


def test_a_lease_that_ended_is_acknowledged_until_the_next_draw(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(uses, "monotonic", lambda: clock[0])
    sampler = mr.UseCounter(1, mr.DistinctSampler(seed=0), lease_s=10, name=None)
    with ring(None, 6, sampler=sampler) as buffer:
        first, second = buffer.sample(2), buffer.sample(2)
        clock[0] = 110.5
        assert buffer.acknowledge(first) == 2
        buffer.sample(1)
        with pytest.raises(StaleError, match="acknowledge: the batch has no lease"):
            buffer.acknowledge(second)


def test_a_batch_without_leases_was_counted_when_it_was_drawn():
    with ring(None, 6, sampler=mr.UseCounter(1, name=None, seed=0)) as buffer:
        assert buffer.acknowledge(buffer.sample(2)) == 0


def test_a_ticket_is_the_number_of_the_use():
    sampler = mr.UseCounter(1, mr.DistinctSampler(seed=0), lease_s=1000, name=None)
    with ring(None, 2, sampler=sampler) as buffer:
        ticket = buffer.ticket(buffer.sample(2))
        assert ticket["uses"] == [1, 1]
        # In any order, any number of times, the highest counts; of a counter that was
        # made with a higher maximum, too.
        for number, count in ((2, 2), (1, 2), (2, 2), (3, 3), (1, 3)):
            buffer.acknowledge(ticket | {"uses": [number, number]})
            stored = sampler.uses(buffer.view, np.zeros(2, int), np.arange(2))
            assert stored.tolist() == [count, count]


def test_rows_that_were_overwritten_are_no_more_acknowledged():
    sampler = mr.UseCounter(1, lease_s=1000, name=None, seed=0)
    with ring(None, 8, capacity=8, sampler=sampler) as buffer:
        batch = buffer.sample(8)
        extend(buffer, np.arange(6))
        alive = int((batch.positions >= 6).sum())
        assert buffer.acknowledge(batch) == len({*batch.positions[batch.positions >= 6]})
        assert alive == len({*batch.positions[batch.positions >= 6]})
        counts = drain(buffer)
        assert {position for _, position in counts} == set(range(6, 14)) - {
            *batch.positions.tolist()
        }


def test_a_second_process_is_refused_and_another_name_is_not(tmp_path):
    path = tmp_path / "ring"
    with ring(path, 9, sampler=mr.UseCounter(1, seed=0)) as buffer:
        buffer.sample(2)
        with mr.ReplayBuffer.open(path, sampler=mr.UseCounter(1)) as other:
            with pytest.raises(LockedError, match="is locked by another sampler"):
                other.sample(1)
            other.sampler = mr.UseCounter(1, name="others")
            assert sum(drain(other).values()) == 9
        buffer.sampler.close()
        with mr.ReplayBuffer.open(path, sampler=mr.UseCounter(1)) as other:
            assert sum(drain(other).values()) == 7


def test_counts_and_priorities_have_no_name_in_common(tmp_path):
    path = tmp_path / "ring"
    with ring(path, 9, sampler=mr.UseCounter(1, seed=0)) as buffer:
        buffer.sample(2)
        buffer.sampler.close()
        buffer.sampler = mr.PrioritizedSampler(name="uses")
        with pytest.raises(
            SchemaError, match="name must be of priorities, got 'uses', which holds counts of uses"
        ):
            buffer.sample(1)
        buffer.sampler = mr.PrioritizedSampler()
        buffer.sample(1)
        buffer.sampler.close()
        buffer.sampler = mr.UseCounter(1, name="prioritized")
        with pytest.raises(SchemaError, match="must be of counts of uses, got 'prior"):
            buffer.sample(1)


def test_counts_lie_at_byte_twice_the_row_little_endian(tmp_path):
    path = tmp_path / "ring"
    sampler = mr.UseCounter(1000, mr.DistinctSampler(seed=0))
    with ring(path, 3, num_envs=2, sampler=sampler) as buffer:
        for _ in range(600):
            buffer.sample(6)
        rows = buffer.metadata.ring.rows(np.repeat([0, 1], 3), np.tile(np.arange(3), 2))
    data = (path / "samplers/uses/uses.bin").read_bytes()
    assert len(data) == 2 * buffer.metadata.ring.num_rows
    for row in rows.tolist():
        assert data[2 * row : 2 * row + 2] == bytes([600 & 255, 600 >> 8])


def test_a_ticket_holds_at_most_the_uses_that_are_counted():
    sampler = mr.UseCounter(65_535, name=None)
    with ring(None, 1, sampler=sampler) as buffer:
        buffer.sample(1)
        ticket = {
            "kind": "UseTicket",
            "uuid": buffer.metadata.uuid.hex(),
            "env_ids": [0],
            "positions": [0],
            "uses": [65_535],
        }
        for uses in (0, 65_536, 1 << 40):
            with pytest.raises(
                FormatError, match=rf"^ticket: uses must be in \[1, 65535\], got .*{uses}\]. Pass"
            ):
                buffer.acknowledge(ticket | {"uses": [uses]})
        assert sampler.uses(buffer.view, np.zeros(1, int), np.zeros(1, int)) == [1]
        assert buffer.acknowledge(ticket) == 1
        assert sampler.uses(buffer.view, np.zeros(1, int), np.zeros(1, int)) == [65_535]
        with pytest.raises(EmptyError):
            buffer.sample(1)


def test_a_resize_moves_the_counts(tmp_path):
    path = tmp_path / "ring"
    with ring(path, 30, capacity=30, sampler=mr.UseCounter(1, seed=0)) as buffer:
        used = {position for _, position in steps_in(buffer.sample(10))}
        buffer.resize(80)
        extend(buffer, np.arange(10))
        left = {position for _, position in drain(buffer)}
        assert left == set(range(40)) - used


def test_a_snapshot_takes_the_counts_along(tmp_path):
    with ring(tmp_path / "ring", 20, sampler=mr.UseCounter(1, seed=0)) as buffer:
        used = {position for _, position in steps_in(buffer.sample(8))}
        buffer.commit()
        buffer.snapshot(tmp_path / "copy")
        with mr.ReplayBuffer.open(tmp_path / "copy", sampler=mr.UseCounter(1)) as copy:
            assert {position for _, position in drain(copy)} == set(range(20)) - used
        assert mr.verify_buffer(tmp_path / "copy").ok


def power_cut(path, target):
    """A copy of the folder: of another inode, as its files are after a power cut."""
    subprocess.run(["cp", "-r", str(path), str(target)], check=True)


@pytest.mark.parametrize("sync", [False, True])
def test_what_was_synced_outlives_a_power_cut(tmp_path, sync):
    path, target = tmp_path / "ring", tmp_path / "after"
    sampler = mr.UseCounter(1, mr.DistinctSampler(seed=0), lease_s=1000)
    with ring(path, 20, sampler=sampler) as buffer:
        buffer.commit()
        batch = buffer.sample(5)
        buffer.acknowledge(batch, sync=sync)
        extend(buffer, np.arange(3))
        buffer.sample(1)  # another record, which no power cut is sure to keep
        assert (path / "samplers/uses" / SYNCED).exists() == sync
        power_cut(path, target)
    with mr.ReplayBuffer.open(target, sampler=mr.UseCounter(1)) as after:
        left = {position for _, position in drain(after)}
    used = set(batch.positions.tolist()) if sync else set()
    assert left == set(range(20)) - used


def test_a_counter_that_was_closed_outlives_a_power_cut(tmp_path):
    path, target = tmp_path / "ring", tmp_path / "after"
    with ring(path, 20, sampler=mr.UseCounter(1, seed=0)) as buffer:
        used = {position for _, position in steps_in(buffer.sample(5))}
        buffer.commit()
        buffer.sampler.close()
        power_cut(path, target)
    with mr.ReplayBuffer.open(target, sampler=mr.UseCounter(1)) as after:
        assert {position for _, position in drain(after)} == set(range(20)) - used


def test_a_damaged_synced_record_counts_as_none(tmp_path):
    path, target = tmp_path / "ring", tmp_path / "after"
    sampler = mr.UseCounter(1, lease_s=1000, seed=0)
    with ring(path, 20, sampler=sampler) as buffer:
        buffer.commit()
        buffer.acknowledge(buffer.sample(5), sync=True)
        power_cut(path, target)
    record = target / "samplers/uses" / SYNCED
    for data in (b"", b"x" * record.stat().st_size, record.read_bytes() * 2):
        record.write_bytes(data)
        (target / "samplers/uses/STATE").unlink(missing_ok=True)
        with (
            mr.ReplayBuffer.open(target, sampler=mr.UseCounter(1)) as after,
            pytest.warns(mr.DurabilityWarning, match="counts of uses that it h") as found,
        ):
            assert len(drain(after)) == 20
        state = target / "samplers/uses/STATE"
        messages = [str(each.message).partition(":")[0] for each in found]
        assert messages == [f"{state} is missing", f"{record} is damaged"]


def leasing():
    return mr.UseCounter(1, mr.DistinctSampler(seed=0), lease_s=1000, seed=0)


def left_in(path):
    """Numbers of the rows that a counter may draw from a folder."""
    with mr.ReplayBuffer.open(path, sampler=mr.UseCounter(1, seed=0)) as buffer:
        uids = []
        with suppress(EmptyError):
            while True:
                uids += buffer.sample(50)["uid"].tolist()
    return sorted(uids)


def test_what_was_synced_after_a_reopening_outlives_a_power_cut(tmp_path):
    path, target = tmp_path / "ring", tmp_path / "after"
    with ring(path, 20, sampler=leasing()) as buffer:
        buffer.commit()
        buffer.acknowledge(buffer.sample(5), sync=True)
    # STATE is stored through a mapping: the disk has the bytes that closing synced.
    state = (path / "samplers/uses/STATE").read_bytes()
    with mr.ReplayBuffer.open(path, "r+", sampler=leasing(), commit_every=None) as buffer:
        extend(buffer, np.arange(20, 30))
        buffer.commit()
        assert buffer.acknowledge(buffer.sample(100), sync=True) == 25
        power_cut(path, target)
    (target / "samplers/uses/STATE").write_bytes(state)
    assert left_in(target) == []
    # Numbers of records go on above both: the next closing is newer than either.
    with mr.ReplayBuffer.open(target, "r+", sampler=leasing(), commit_every=None) as buffer:
        extend(buffer, np.arange(30, 40))
        buffer.acknowledge(buffer.sample(4))
        buffer.commit()
    power_cut(target, tmp_path / "again")
    assert len(left_in(tmp_path / "again")) == 6


def test_a_closing_before_the_commit_keeps_what_was_synced(tmp_path):
    path, target = tmp_path / "ring", tmp_path / "after"
    with ring(path, 20) as writer:
        with mr.ReplayBuffer.open(path, sampler=leasing()) as reader:
            assert reader.acknowledge(reader.sample(5), sync=True) == 5
        writer.commit()
        power_cut(path, target)
    assert len(left_in(target)) == 15


@pytest.mark.parametrize("opened_first", ["writer", "counter"])
def test_counts_that_were_synced_before_the_commit_hold_once_it_came(tmp_path, opened_first):
    path, target = tmp_path / "ring", tmp_path / "after"
    with ring(path, 10, sampler=leasing()) as buffer:
        buffer.commit()
        extend(buffer, np.arange(10, 20))
        assert buffer.acknowledge(buffer.sample(100), sync=True) == 20
        extend(buffer, np.arange(20, 25))
        buffer.commit()
        extend(buffer, np.arange(25, 30))
        power_cut(path, target)
    if opened_first == "writer":
        with mr.ReplayBuffer.open(target, "r+", commit_every=None) as writer:
            assert writer.heads == 25
            extend(writer, np.arange(100, 105))
        assert left_in(target) == [*range(20, 25), *range(100, 105)]
    assert left_in(target) == ([] if opened_first == "writer" else list(range(20, 25)))


@pytest.mark.parametrize("drops", [1, 2, 3])
def test_rows_written_where_synced_ones_were_dropped_have_no_use(tmp_path, drops):
    path = tmp_path / "ring"
    with ring(path, 10, sampler=leasing()) as buffer:
        buffer.commit()
        extend(buffer, np.arange(10, 20))
        assert buffer.acknowledge(buffer.sample(100), sync=True) == 20
        power_cut(path, tmp_path / "cut-0")
    # After each power cut the writer alone opens the ring, and goes on.
    for drop in range(drops):
        target, after = tmp_path / f"cut-{drop}", tmp_path / f"cut-{drop + 1}"
        with mr.ReplayBuffer.open(target, "r+", commit_every=None) as writer:
            assert writer.recovery.how == "power_cut"
            first = 100 * (drop + 1)
            extend(writer, np.arange(first, first + 10))
            writer.commit()
            extend(writer, np.arange(7))
            power_cut(target, after)
    left = left_in(after)
    assert left == sorted(
        uid for drop in range(drops) for uid in range(100 * drop + 100, 100 * drop + 110)
    )


def test_a_synced_file_of_one_record_is_read(tmp_path):
    path, target = tmp_path / "ring", tmp_path / "after"
    with ring(path, 20, sampler=leasing()) as buffer:
        buffer.commit()
        buffer.acknowledge(buffer.sample(5), sync=True)
        power_cut(path, target)
    synced = target / "samplers/uses" / SYNCED
    data = synced.read_bytes()
    assert len(data) == 8192
    synced.write_bytes(data[:4096])  # as before the second record was there
    assert len(left_in(target)) == 15


def test_a_snapshot_after_a_power_cut_takes_the_counts_that_were_synced(tmp_path):
    path, target = tmp_path / "ring", tmp_path / "after"
    with ring(path, 20, sampler=leasing()) as buffer:
        buffer.acknowledge(buffer.sample(5), sync=True)
        buffer.commit()
        power_cut(path, target)
    with mr.ReplayBuffer.open(target) as reader:
        reader.snapshot(tmp_path / "copy")
    left = left_in(tmp_path / "copy")
    assert len(left) == 15
    assert left == left_in(target)


class FailingDisk(Disk):
    """Fails each sync of data while `fails`."""

    fails = False

    def datasync(self, fd):
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().datasync(fd)


def dropped_by_a_failed_sync(path, disk, numbering):
    """A ring whose rows 10 to 19 were seen by a sampler, cut, and others written."""
    with using(disk):
        buffer = ring(path, 10)
        buffer.commit()
        extend(buffer, np.arange(10, 20))
        with mr.ReplayBuffer.open(path, sampler=numbering) as reader:
            batch = reader.sample(20)
            if isinstance(numbering, mr.UseCounter):
                reader.acknowledge(batch)
            else:
                reader.update_priorities(batch, np.full(20, 7.0))
        disk.fails = True
        for call in (buffer.commit, buffer.close):
            with suppress(mr.FailedError):
                call()
        disk.fails = False
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        assert buffer.heads == 10
        extend(buffer, np.arange(100, 110))


def test_a_snapshot_leaves_out_counts_of_rows_that_were_dropped(tmp_path):
    dropped_by_a_failed_sync(tmp_path / "ring", FailingDisk(), leasing())
    with mr.ReplayBuffer.open(tmp_path / "ring") as reader:
        reader.snapshot(tmp_path / "copy")
    for folder in ("copy", "ring"):
        assert left_in(tmp_path / folder) == list(range(100, 110))


def test_a_snapshot_leaves_out_priorities_of_rows_that_were_dropped(tmp_path):
    sampler = mr.PrioritizedSampler(seed=0)
    dropped_by_a_failed_sync(tmp_path / "ring", FailingDisk(), sampler)
    with mr.ReplayBuffer.open(tmp_path / "ring") as reader:
        reader.snapshot(tmp_path / "copy")
    every = np.zeros(20, int), np.arange(20)
    for folder in ("copy", "ring"):
        with mr.ReplayBuffer.open(tmp_path / folder) as buffer:
            column = read_column(buffer.view.home, "prioritized")
            assert (column.read(*every)[10:] == -1).all()


@pytest.mark.parametrize("opened_first", ["writer", "learner"])
def test_a_ticket_counts_for_no_row_written_where_its_own_were_dropped(tmp_path, opened_first):
    path, target = tmp_path / "ring", tmp_path / "after"
    with ring(path, 10, sampler=leasing()) as buffer:
        buffer.commit()
        extend(buffer, np.arange(10, 20))
        ticket = json.loads(json.dumps(buffer.ticket(buffer.sample(20))))
        assert len(ticket["positions"]) == 20
        power_cut(path, target)
    if opened_first == "learner":
        with mr.ReplayBuffer.open(target, sampler=leasing()) as learner:
            assert learner.acknowledge(ticket) == 10
    with mr.ReplayBuffer.open(target, "r+", commit_every=None) as writer:
        extend(writer, np.arange(100, 110))
    with mr.ReplayBuffer.open(target, sampler=leasing()) as learner:
        assert learner.acknowledge(ticket) == 10 * (opened_first == "writer")
        assert sorted(learner.sample(99)["uid"].tolist()) == list(range(100, 110))


def test_a_ticket_that_says_no_epoch_counts_below_the_last_drop_alone(tmp_path):
    path, target = tmp_path / "ring", tmp_path / "after"
    with ring(path, 10, sampler=leasing()) as buffer:
        buffer.commit()
        extend(buffer, np.arange(10, 20))
        ticket = buffer.ticket(buffer.sample(20))
        old = {
            key: value for key, value in ticket.items() if key not in ("generation", "cut_epoch")
        }
        power_cut(path, target)
        # No row was cut: it is as good as another.
        assert buffer.acknowledge(old) == 20
    with mr.ReplayBuffer.open(target, "r+", sampler=leasing(), commit_every=None) as writer:
        extend(writer, np.arange(100, 110))
        assert writer.acknowledge(old) == 10
        assert sorted(writer.sample(99)["uid"].tolist()) == list(range(100, 110))


@pytest.mark.parametrize("acknowledged", [False, True])
def test_a_lease_counts_for_no_row_written_where_its_own_were_dropped(tmp_path, acknowledged):
    path, disk = tmp_path / "ring", FailingDisk()
    with using(disk):
        writer = ring(path, 10)
        writer.commit()
        extend(writer, np.arange(10, 20))
        reader = mr.ReplayBuffer.open(path, sampler=leasing())
        batch = reader.sample(20)
        disk.fails = True
        for call in (writer.commit, writer.close):
            with suppress(mr.FailedError):
                call()
        disk.fails = False
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as writer, reader:
        assert writer.heads == 10
        extend(writer, np.arange(100, 110))
        if acknowledged:
            assert reader.acknowledge(batch) == 10
        # Those of the rows below the cut are leased, or used.
        assert sorted(reader.sample(99)["uid"].tolist()) == list(range(100, 110))


def test_a_counter_on_a_network_file_system_is_refused_unless_it_counts_in_ram(
    tmp_path, monkeypatch
):
    path = tmp_path / "ring"
    monkeypatch.setattr(priority_file, "file_system", lambda path: "nfs4")
    with ring(path, 9, sampler=mr.UseCounter(1, seed=0)) as buffer:
        with pytest.raises(
            mr.FailedError,
            match=r"uses is on a network file system \(nfs4\), where counts of uses "
            r"cannot be kept safely\. Put the buffer on a local disk, or pass name=N",
        ):
            buffer.sample(2)
        buffer.sampler = mr.UseCounter(1, name=None, seed=0)
        assert sum(drain(buffer).values()) == 9
    with ring(None, 9, sampler=mr.UseCounter(1, seed=0)) as buffer:
        assert sum(drain(buffer).values()) == 9


def test_copies_that_leave_counts_out_say_so(tmp_path, capsys):
    path = tmp_path / "ring"
    with ring(path, 20, sampler=mr.UseCounter(1, seed=0)) as buffer:
        buffer.sample(5)
    told = (
        "the counts of uses 'uses' were not copied: a UseCounter draws each row of the "
        "copy as often as it may. Only a snapshot takes them along."
    )
    assert mr.compact(path, tmp_path / "compact").notes == (told,)
    assert mr.repair(path, tmp_path / "repaired").restored == (told,)
    assert told in mr.export(path, tmp_path / "a.npz").notes
    for command in (["compact", path, tmp_path / "c"], ["repair", "--in-place", path]):
        assert run([*map(str, command)]) == 0
        assert f"note {told}" in capsys.readouterr().out
    for folder in ("compact", "repaired", "ring"):
        assert len(left_in(tmp_path / folder)) == 20
    # With priorities as well, which a file can hold.
    former = tmp_path / "ring-damaged"
    with mr.ReplayBuffer.open(former, sampler=mr.PrioritizedSampler(seed=0)) as reader:
        reader.sample(4)
    notes = mr.export(former, tmp_path / "b.npz", priorities="prioritized").notes
    assert [note for note in notes if "were not copied" in note] == [told]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, r"maximum must be an integer in \[1, 65535\], got 0"),
        ((65_536,), {}, "maximum must be an integer"),
        ((1,), {"lease_s": 0}, "lease_s must be a finite number above 0, got 0"),
        ((1,), {"name": "a/b"}, "name must be 1 to 64 letters"),
        (
            (1, mr.ShuffledSampler()),
            {},
            "inside a UseCounter must have no epochs, got ShuffledSampler. Use a Dist",
        ),
        (
            (1, mr.MixtureSampler([(mr.ShuffledSampler(), 1), (UNIFORM, 1)])),
            {},
            "inside a UseCounter must have no epochs, got MixtureSampler. Use a Distin",
        ),
        (
            (1, mr.RecentSampler(3, 0.5, mr.ShuffledSampler())),
            {},
            "inside a UseCounter must have no epochs, got RecentSampler. Use a Distin",
        ),
        (
            (2,),
            {"lease_s": 60},
            "maximum must be 1 with lease_s, got 2: acknowledged out of order, uses of "
            "a row would be lost at a kill. Pass maximum=1, or leave out lease_s",
        ),
        (
            (1, mr.SequenceSampler(2)),
            {},
            "must draw single steps or groups, got the SequenceSampler, of windows",
        ),
        ((1, 3), {}, "sampler must have draw, state_dict and load_state_dict, got 3"),
        (
            (1, mr.UseCounter(2, name="others")),
            {},
            "must not count uses, got a UseCounter. Leave out one of the two: the sm",
        ),
        (
            (1, mr.RecentSampler(9, 0.5, mr.UseCounter(2))),
            {},
            "must not count uses, got a RecentSampler around a UseCounter. Leave out",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, options, message):
    with pytest.raises(SchemaError, match=message):
        mr.UseCounter(*arguments, **options)


def test_only_batches_of_the_counter_are_acknowledged():
    with (
        ring(None, 4, sampler=mr.UniformSampler(seed=0)) as plain,
        ring(None, 4, sampler=mr.UseCounter(1, lease_s=1e6, name=None)) as buffer,
    ):
        batch = plain.sample(2)
        with pytest.raises(
            SchemaError, match="acknowledge needs a sampler with one UseCounter, got U"
        ):
            plain.acknowledge(batch)
        with pytest.raises(SchemaError, match="ticket needs a sampler with one UseCounter"):
            plain.ticket(batch)
        with pytest.raises(SchemaError, match=r"acknowledge: the batch must be of .*got"):
            buffer.acknowledge(batch)
        with pytest.raises(SchemaError, match="ticket needs the batch that sample retu"):
            buffer.ticket({})
        good = buffer.ticket(buffer.sample(2))
        for change, message in (
            ({"kind": "Other"}, "ticket: kind must be 'UseTicket', got 'Other'"),
            ({"uuid": "00"}, "ticket: uuid must be .*, got '00'. Pass it to the buffer"),
            ({"uses": [1]}, "must be one number each for every row"),
            ({"env_ids": [0, 7]}, "of environments below 1"),
            ({"positions": [-1, 0]}, r"^ticket: positions must be in \[0, 2\*\*63\)"),
            ({"uses": "ab"}, "^ticket: uses must be a list of .*Pass what ticket ret"),
            (
                {"cut_epoch": -1},
                r"^ticket: generation and cut_epoch must be integers in "
                r"\[0, 2\*\*62\), got \[1, -1\]\. Pass what ticket returned",
            ),
            ({"generation": "1"}, r"^ticket: generation and .*, got \['1', 0\]"),
            ({"generation": 1 << 62}, "^ticket: generation and cut_epoch must be i"),
        ):
            with pytest.raises(FormatError, match=message):
                buffer.acknowledge(good | change)
        with pytest.raises(FormatError, match="kind must be 'UseTicket', got None"):
            buffer.acknowledge({})
        for wrong in (5, True, [1], "batch", None):
            with pytest.raises(SchemaError, match="acknowledge needs the batch that"):
                buffer.acknowledge(wrong)
        # Positions that are not there are of rows that left.
        assert buffer.acknowledge(good | {"positions": [99, 1 << 60]}) == 0


def test_draws_continue_exactly_from_a_state():
    first = mr.UseCounter(4, name=None, seed=5)
    with ring(None, 20, sampler=first) as buffer:
        buffer.sample(6)
        state = first.state_dict()
        ids, every = np.zeros(20, int), np.arange(20)
        counts = first.uses(buffer.view, ids, every)
        expected = steps_in(buffer.sample(6))
        # The counts are not in the state: here as they were before.
        again = mr.UseCounter(4, name=None, seed=0)
        again.uses(buffer.view, ids, every)
        again._counts.raise_to(ids, every, counts)
        again.load_state_dict(state)
        buffer.sampler = again
        assert steps_in(buffer.sample(6)) == expected
    for change, message in (
        ({"maximum": 3}, "maximum must be 4"),
        ({"kind": "UniformSampler"}, "kind must be 'UseCounter'"),
        ({"parts": []}, "parts must be a list of 1"),
    ):
        with pytest.raises(FormatError, match=message):
            again.load_state_dict(state | change)
    assert repr(mr.UseCounter(1, lease_s=9.0, seed=1)) == (
        "UseCounter(maximum=1, sampler=UniformSampler(seed=1), lease_s=9.0, seed=1)"
    )


def test_a_failed_draw_does_not_count():
    sampler = mr.UseCounter(1, mr.UniformSampler(seed=0), name=None, seed=0)
    with ring(None, 3, sampler=sampler) as buffer:
        drain(buffer)
        before = sampler.state_dict()
        with pytest.raises(EmptyError):
            buffer.sample(2)
        assert sampler.state_dict() == before


def test_a_pickled_counter_counts_on_without_its_leases(tmp_path):
    path = tmp_path / "ring"
    with ring(path, 9, sampler=mr.UseCounter(1, seed=0)) as buffer:
        buffer.sample(2)
        again = pickle.loads(pickle.dumps(buffer.sampler))
        buffer.sampler.close()
        buffer.sampler = again
        assert sum(drain(buffer).values()) == 7


def test_a_loader_draws_each_step_once():
    sampler = mr.UseCounter(1, mr.DistinctSampler(seed=0), name=None)
    seen = []
    with ring(None, 60, sampler=sampler) as buffer, mr.ReplayLoader(buffer, batch_size=6) as loader:
        batches = iter(loader)
        for _ in range(10):
            seen += next(batches).positions.tolist()
        with pytest.raises(EmptyError, match="used once"):
            next(batches)
    assert sorted(seen) == list(range(60))


def test_a_batch_of_a_loader_is_acknowledged():
    sampler = mr.UseCounter(1, mr.DistinctSampler(seed=0), name=None, lease_s=1000)
    with ring(None, 60, sampler=sampler) as buffer, mr.ReplayLoader(buffer, batch_size=6) as loader:
        batch = next(iter(loader))
        assert buffer.acknowledge(batch) == 6
        positions = batch.positions.numpy()
        assert (sampler.uses(buffer.view, np.zeros(6, int), positions) == 1).all()


@given(rows=st.lists(st.text("sx", max_size=8), min_size=1, max_size=3), data=st.data())
def test_listed_starts_are_ranked_as_a_list(rows, data):
    base = ListedView(rows, [3 * n for n in range(len(rows))])
    listed = [place for place in base.legal_starts() if data.draw(st.booleans())]
    env_ids, positions = np.array(listed, np.int64).reshape(-1, 2).T
    view = ListedStarts(base, env_ids, positions)
    assert int(view.starts.lengths.sum()) - view.num_illegal == len(listed)
    ids, steps = view.start_at(np.arange(len(listed)))
    assert list(zip(ids.tolist(), steps.tolist(), strict=True)) == listed
    for env_id, first in enumerate(base.span.first.tolist()):
        for position in range(first, int(base.span.stop[env_id]) + 1):
            place = np.array([env_id]), np.array([position])
            before = view.legal_before(*place)[0]
            assert before == sum(each < (env_id, position) for each in listed)
            if view.starts.first[env_id] <= position < view.starts.stop[env_id]:
                assert view.legal(*place)[0] == ((env_id, position) in listed)
    for env_id, position in listed:
        assert view.starts.first[env_id] <= position < view.starts.stop[env_id]


@given(st.lists(st.integers(0, 4), max_size=20))
def test_occurrences_are_counted_from_one(rows):
    seen = Counter()
    expected = []
    for row in rows:
        seen[row] += 1
        expected.append(seen[row])
    assert _occurrences(np.array(rows, np.int64)).tolist() == expected


class Reading(mr.UniformSampler):
    """Reads a row in each draw, as the writer adds some, and draws from all."""

    writer = None

    def draw(self, view, batch_size):
        view.starts  # noqa: B018  a look before the writer's rows
        head = int(self.writer.heads[0])
        extend(self.writer, np.arange(head, head + 5))
        view.read_rows(("uid",), np.zeros(1, int), view.span.stop - 1)
        return super().draw(view, batch_size)


def test_rows_that_come_during_a_draw_are_counted_too(tmp_path):
    path = tmp_path / "ring"
    inner = Reading(seed=0)
    with (
        ring(path, 5) as inner.writer,
        mr.ReplayBuffer.open(path, sampler=mr.UseCounter(1, inner)) as reader,
    ):
        seen = []
        for _ in range(60):
            seen += reader.sample(3).positions.tolist()
        assert len(set(seen)) == len(seen) == 180
        assert max(seen) > 200


def leased():
    return mr.UseCounter(1, lease_s=60, name=None, seed=0)


@pytest.mark.parametrize(
    "around",
    [
        lambda counter: mr.RecentSampler(5, 0.5, counter, seed=0),
        lambda counter: mr.RecentSampler(5, 0.5, mr.ignore_earliest(2, counter)),
        lambda counter: mr.MixtureSampler([(counter, 1), (mr.UniformSampler(), 1)]),
        lambda counter: mr.MixtureSampler([(mr.SequenceSampler(2, counter), 1)]),
    ],
)
def test_a_lease_is_refused_where_a_batch_has_another_key(around):
    with pytest.raises(SchemaError, match="must not lease its steps, got a UseCounter"):
        around(leased())
    around(mr.UseCounter(1, name=None, seed=0))


def test_a_lease_goes_around_recent_and_mixed_draws():
    for inner in (
        mr.RecentSampler(5, 0.5, seed=0),
        mr.MixtureSampler([(mr.DistinctSampler(seed=0), 1)], seed=0),
    ):
        counter = mr.UseCounter(1, inner, lease_s=60, name=None, seed=0)
        buffer = ring(None, 20, sampler=counter)
        batch = buffer.sample(4)
        assert buffer.acknowledge(batch) == len(set(steps_in(batch)))


ROLLED_BACK = {
    "steps": lambda counter: counter,
    "windows": lambda counter: mr.SequenceSampler(1, counter),
    "padded": lambda counter: mr.EpisodeSampler(counter),
    "ragged": lambda counter: mr.EpisodeSampler(counter, layout="ragged"),
}


@pytest.mark.parametrize("form", ROLLED_BACK)
def test_after_a_state_is_loaded_a_batch_counts_for_itself_alone(form):
    counter = mr.UseCounter(1, mr.DistinctSampler(seed=0), lease_s=60, name=None, seed=0)
    with ring(None, 20, sampler=ROLLED_BACK[form](counter)) as buffer:
        every = np.zeros(20, int), np.arange(20)
        state = buffer.sampler.state_dict()
        first = buffer.sample(5)
        buffer.sampler.load_state_dict(state)
        second = buffer.sample(5)
        assert first.key == second.key
        assert not set(first.positions) & set(second.positions)
        tickets = [buffer.ticket(batch)["positions"] for batch in (first, second)]
        assert [set(ticket) for ticket in tickets] == [set(first.positions), set(second.positions)]
        assert buffer.acknowledge(second) == 5
        assert buffer.acknowledge(second) == 0
        used = counter.uses(buffer.view, *every)
        assert set(np.flatnonzero(used)) == set(second.positions)
        # The first one is leased as it was.
        assert len(buffer.sample(20)) == 10
        assert buffer.acknowledge(first) == 5


def test_another_batch_with_the_key_of_one_whose_lease_ended_is_not_acknowledged():
    counter = mr.UseCounter(1, mr.DistinctSampler(seed=0), lease_s=60, name=None, seed=0)
    with ring(None, 20, sampler=counter) as buffer:
        state = counter.state_dict()
        first = buffer.sample(5)
        ticket = buffer.ticket(first)
        counter._leases.clear()  # as when it has ended
        counter._counts.raise_to(first.env_ids, first.positions, np.ones(5, int))
        counter.load_state_dict(state)
        second = buffer.sample(5)
        for call in (buffer.acknowledge, buffer.ticket):
            with pytest.raises(StaleError, match="another batch was drawn with its k"):
                call(first)
        assert buffer.acknowledge(ticket) == 0
        assert buffer.acknowledge(second) == 5


def test_a_batch_of_groups_and_of_tensors_is_found_again():
    counter = mr.UseCounter(1, mr.GroupSampler("uid", seed=0), lease_s=60, name=None, seed=0)
    with ring(None, sampler=counter) as buffer:
        extend(buffer, [1, 1, 2, 2, 3])
        state = counter.state_dict()
        first = buffer.sample(1)
        counter.load_state_dict(state)
        second = buffer.sample(1).torch()
        assert buffer.acknowledge(second) == len(second)
        assert buffer.acknowledge(first) == len(first)


def once():
    return mr.UseCounter(1, mr.DistinctSampler(seed=0), seed=0)


def used_up(path):
    """Files of a counter that used every step of a ring."""
    with ring(path, 20, sampler=once()) as buffer:
        assert len(buffer.sample(20)) == 20
    return path / "samplers" / "uses"


@pytest.mark.parametrize("name", ["uses.bin", "STATE"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: None, "is missing"),
        (lambda data: b"", "bytes"),
        (lambda data: data[:-2], "bytes"),
        (lambda data: data[:-1], "bytes"),
        (lambda data: data + b"x", "bytes"),
        (lambda data: data[: len(data) // 2], "bytes"),
    ],
)
def test_files_of_a_counter_that_are_missing_or_too_short_are_named(
    tmp_path, name, damage, message
):
    file = used_up(tmp_path / "ring") / name
    data = damage(file.read_bytes())
    file.unlink()
    if data is not None:
        file.write_bytes(data)
    with (
        pytest.warns(mr.DurabilityWarning, match=f"{file} .*{message}.*counts of uses"),
        mr.ReplayBuffer.open(tmp_path / "ring", "r+", sampler=once()) as buffer,
        suppress(EmptyError),
    ):
        buffer.sample(1)


# One slot of zeros alone may never have been written.
@pytest.mark.parametrize(
    ("slots", "zeros"), [((0,), False), ((1,), False), ((0, 1), False), ((0, 1), True)]
)
def test_damaged_records_of_a_counter_are_named(tmp_path, slots, zeros):
    file = used_up(tmp_path / "ring") / "STATE"
    data = bytearray(file.read_bytes())
    size = len(data) // 2
    for slot in slots:
        data[slot * size : (slot + 1) * size] = (b"\0" if zeros else b"\xff") * size
    file.write_bytes(data)
    with (
        pytest.warns(mr.DurabilityWarning, match=f"{file} has .* damaged records of 2"),
        mr.ReplayBuffer.open(tmp_path / "ring", "r+", sampler=once()) as buffer,
        suppress(EmptyError),
    ):
        buffer.sample(1)


def test_a_counter_whose_file_is_too_short_keeps_what_is_left(tmp_path):
    file = used_up(tmp_path / "ring") / "uses.bin"
    os.truncate(file, 2 * 15)
    with (
        pytest.warns(mr.DurabilityWarning, match="has 30 bytes of"),
        mr.ReplayBuffer.open(tmp_path / "ring", "r+", sampler=once()) as buffer,
    ):
        assert sorted(buffer.sample(20).positions.tolist()) == [15, 16, 17, 18, 19]


def test_counts_that_were_synced_outlive_the_loss_of_the_records(tmp_path):
    path = tmp_path / "ring"
    counter = mr.UseCounter(1, mr.DistinctSampler(seed=0), lease_s=1000, seed=0)
    with ring(path, 20, sampler=counter) as buffer:
        buffer.commit()
        buffer.acknowledge(buffer.sample(5), sync=True)
    (path / "samplers/uses/STATE").unlink()
    with (
        pytest.warns(mr.DurabilityWarning, match="STATE is missing: counts of uses"),
        mr.ReplayBuffer.open(path, "r+", sampler=once()) as buffer,
    ):
        assert len(buffer.sample(20)) == 15


def test_whole_files_of_a_counter_warn_of_nothing(tmp_path):
    path = tmp_path / "ring"
    for count in (0, 5, 5):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if not path.exists():
                ring(path, 20, sampler=once()).close()
            with mr.ReplayBuffer.open(path, "r+", sampler=once()) as buffer:
                if count:
                    assert len(buffer.sample(count)) == count
                buffer.resize(900 + count)
    with warnings.catch_warnings(), mr.ReplayBuffer.open(path, "r+") as buffer:
        warnings.simplefilter("error")
        buffer.resize(30)
        buffer.sampler = once()
        assert len(buffer.sample(30)) == 10


def test_a_pickle_that_leases_rows_of_several_uses_is_refused():
    sampler = mr.UseCounter(1, mr.DistinctSampler(0), lease_s=9, name=None)
    # As it could be made before.
    sampler._maximum = 2
    with pytest.raises(SchemaError, match="maximum must be 1 with lease_s, got 2: ack"):
        pickle.loads(pickle.dumps(sampler))
