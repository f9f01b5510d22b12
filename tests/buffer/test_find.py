"""Rows by the value of a column, against a loop over all rows."""

import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import mmreplay as mr
from mmreplay.buffer.reader import GenerationReader
from mmreplay.episodes import column_index
from mmreplay.errors import SchemaError
from tests.buffer.support import Twin, schema
from tests.slices import count


def expected(buffer, path, value):
    """Rows that hold a value, newest first, by reading all of them."""
    every = buffer.gather_all()
    rows = zip(
        every.positions.tolist(),
        every.env_ids.tolist(),
        every[path].tolist(),
        every["final"].tolist(),
        strict=True,
    )
    return sorted(((-p, e) for p, e, number, final in rows if number == value and not final))


def looked_up(buffer, path, value):
    env_ids, positions = buffer.find(path, value)
    assert env_ids.dtype == positions.dtype == np.int64
    return list(zip((-positions).tolist(), env_ids.tolist(), strict=True))


class Machine(RuleBasedStateMachine):
    """Any history of a small ring finds what a loop finds."""

    capacity, num_envs = 7, 1

    @initialize(engine=st.sampled_from(["memmap", "memory"]))
    def create(self, engine):
        fields = {
            "observation": mr.Field((), "int8"),
            "uid": mr.Field((), "int16"),
            "version": mr.Field((), "uint64"),
            "terminated": mr.Field((), "bool"),
        }
        self.folder = tempfile.TemporaryDirectory()
        self.engine = engine
        path = None if engine == "memory" else f"{self.folder.name}/ring"
        self.buffer = mr.ReplayBuffer.create(
            path,
            mr.Schema(fields),
            self.capacity,
            self.num_envs,
            engine=engine,
            autoreset="same_step",
            commit_every=None,
        )

    @rule(
        uids=st.lists(st.integers(-2, 3), min_size=1, max_size=9),
        ends=st.booleans(),
        final=st.booleans(),
    )
    def extend(self, uids, ends, final):
        count = len(uids)
        shape = (count, self.num_envs)
        uid = np.array(uids)[:, None] + np.arange(self.num_envs)
        given_ = {
            "observation": np.zeros(shape, np.int8),
            "uid": uid,
            "version": (uid % 2).astype(np.uint64) + np.uint64(2**63),
            "terminated": np.full(shape, ends),
        }
        options = {}
        if final and ends:
            options["final_observation"] = np.ones(shape, np.int8)
        self.buffer.extend(given_, **options)

    @rule()
    def clear(self):
        self.buffer.clear()

    @rule(count=st.integers(1, 3))
    def dequeue(self, count):
        if (self.buffer.sizes >= count).all() and self.buffer.sizes.any():
            with suppress(mr.EmptyError):
                self.buffer.dequeue(count)

    @rule(capacity=st.integers(3, 20))
    def resize(self, capacity):
        self.buffer.resize(capacity)

    @rule()
    def reopen(self):
        if self.engine != "memory":
            path = self.buffer.path
            self.buffer.close()
            self.buffer = mr.ReplayBuffer.open(path, "r+", commit_every=None)

    @rule()
    def look(self):
        self.buffer.find("uid", 0)

    @invariant()
    def same_as_a_loop(self):
        if not hasattr(self, "buffer"):
            return
        numbers = list(range(-3, 8))
        for value in numbers:
            assert looked_up(self.buffer, "uid", value) == expected(self.buffer, "uid", value)
        assert looked_up(self.buffer, "version", np.uint64(2**63)) == expected(
            self.buffer, "version", 2**63
        )
        env_ids, positions = self.buffer.find("uid", numbers)
        for value, ids, steps in zip(numbers, env_ids, positions, strict=True):
            pairs = zip((-steps).tolist(), ids.tolist(), strict=True)
            assert list(pairs) == expected(self.buffer, "uid", value)

    def teardown(self):
        if hasattr(self, "buffer"):
            self.buffer.close()
            self.folder.cleanup()


class TwoEnvironments(Machine):
    num_envs = 2


# Few steps are enough for a ring of seven rows to lap; no deadline, files are made.
Machine.TestCase.settings = settings(
    max_examples=count(40, 15), stateful_step_count=12, deadline=None
)
TwoEnvironments.TestCase.settings = Machine.TestCase.settings
TestOneEnvironment = Machine.TestCase
TestTwoEnvironments = TwoEnvironments.TestCase


def ring(path, dtype="int64", capacity=1000, num_envs=1, **options):
    fields = {"uid": mr.Field((), dtype), "x": mr.Field((), "int32")}
    return mr.ReplayBuffer.create(
        path,
        mr.Schema(fields),
        capacity,
        num_envs,
        engine="memory" if path is None else "memmap",
        autoreset="disabled",
        commit_every=None,
        **options,
    )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
@given(data=st.data())
@pytest.mark.sliced(3)
def test_values_of_any_integer_type_are_compared_as_integers(dtype, data):
    info = np.iinfo(dtype)
    edges = [info.min, info.min + 1, 0, 1, info.max - 1, info.max]
    stored = data.draw(st.lists(st.sampled_from(edges), min_size=1, max_size=20))
    with ring(None, dtype) as buffer:
        buffer.extend(uid=np.array(stored, dtype), x=np.zeros(len(stored), np.int32))
        for kind in ("int64", "uint64", "int8", "uint16"):
            asked = np.iinfo(kind)
            for value in {asked.min, 0, 1, asked.max, *edges}:
                if asked.min <= value <= asked.max:
                    env_ids, positions = buffer.find("uid", np.array([value], kind))
                    hits = [at for at, own in enumerate(stored) if own == value]
                    assert positions[0].tolist() == hits[::-1]
                    assert env_ids.lengths.tolist() == [len(hits)]


def test_the_rows_of_each_value_come_in_the_order_of_the_values():
    with ring(None) as buffer:
        buffer.extend(uid=[5, 7, 5, 9], x=np.zeros(4, np.int32))
        _, positions = buffer.find("uid", [9, 4, 5, 9])
        assert [each.tolist() for each in positions] == [[3], [], [2, 0], [3]]
        assert positions.shape == (4,)
        assert buffer.find("uid", [])[1].shape == (0,)
        assert buffer.find("uid", 4)[1].tolist() == []


@pytest.mark.parametrize(
    ("path", "values", "message"),
    [
        ("observation", 1, "field 'observation' must be one integer and not mutable"),
        ("reward", 1, r"'reward' must be one integer .*, got Field\(shape=\(\), dtype="),
        ("terminated", 1, "field 'terminated' must be one integer"),
        ("reward", "a", "field 'reward' must be one integer"),
        ("actoin", 1.5, "field 'actoin' is not in the schema.* Did you mean 'action'"),
        ("late", 1, "field 'late' must be one integer and not mutable"),
        ("brain", 1, "field 'brain' must be one integer"),
        ("actoin", 1, "field 'actoin' is not in the schema.* Did you mean 'action'"),
        ("action", 1.0, r"values of field .* must be an integer, .*, got 1\.0"),
        ("action", [[1]], r"must be .* one axis, got int64\[1, 1\]\. Cast"),
        ("action", "a", "must be an integer, or integers along one axis"),
        ("action", [1, None], "must be an integer, or integers along one axis"),
    ],
)
def test_what_rows_are_not_looked_up_by_is_refused(path, values, message):
    fields = {"late": mr.Field((), "int32", mutable=True), "brain": mr.Field((), "bfloat16")}
    own = schema(**fields)
    with (
        mr.ReplayBuffer.create(None, own, 9, engine="memory") as buffer,
        pytest.raises(SchemaError, match=message),
    ):
        buffer.find(path, values)


def test_a_reader_finds_what_a_writer_adds_and_gives_up(tmp_path):
    twin = Twin(tmp_path / "ring", 20)
    reader = mr.ReplayBuffer.open(tmp_path / "ring")
    for number in range(1, 90):
        twin.add([""])
        assert reader.find("action", number)[1].tolist() == [number - 1]
        assert not len(reader.find("action", number - 20)[1])
    twin.buffer.resize(40)
    twin.add([""])
    assert reader.find("action", 90)[1].tolist() == [89]
    twin.buffer.close()
    reader.close()


KILLED = """
import os, sys, numpy as np, mmreplay as mr
fields = {"uid": mr.Field((), "int64"), "x": mr.Field((), "int32")}
buffer = mr.ReplayBuffer.create(sys.argv[1], mr.Schema(fields), 100, commit_every=None)
for uid in range(250):
    buffer.add(uid=uid // 2, x=0)
print("ready", flush=True)
sys.stdin.read()
"""


def test_rows_of_a_killed_process_are_found(tmp_path):
    path = tmp_path / "ring"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
    with mr.ReplayBuffer.open(path) as buffer:
        assert buffer.find("uid", 124)[1].tolist() == [249, 248]
        assert buffer.find("uid", 74)[1].tolist() == []


def test_an_index_keeps_at_most_24_bytes_a_living_row():
    rng = np.random.default_rng(0)
    with ring(None, capacity=20_000, num_envs=2) as buffer:
        for _ in range(40):
            count = int(rng.integers(1, 4000))
            uid = rng.integers(0, 1 << 62, (count, 2))
            buffer.extend(uid=uid, x=np.zeros((count, 2), np.int32))
            buffer.find("uid", 0)
            index = buffer.view.column_index("uid")
            rows = int(buffer.span.lengths.sum())
            spare = column_index.BYTES_A_ROW * column_index.SPARE_ENTRIES
            assert index.nbytes <= column_index.BYTES_A_ROW * rows + spare


def test_an_index_is_shared_and_reads_each_row_once(monkeypatch):
    reads = []
    original = GenerationReader._read_column

    def counted(self, path, env_ids, positions):
        reads.extend(positions.tolist())
        return original(self, path, env_ids, positions)

    with ring(None) as buffer:
        monkeypatch.setattr(GenerationReader, "_read_column", counted)
        for first in range(0, 500, 50):
            buffer.extend(uid=np.arange(first, first + 50), x=np.zeros(50, np.int32))
            assert buffer.find("uid", first)[1].tolist() == [first]
            assert buffer.find("uid", first + 1)[1].tolist() == [first + 1]
        assert reads == list(range(500))


def test_an_interrupt_in_the_middle_of_a_look_leaves_the_index_whole(monkeypatch):
    with ring(None) as buffer:
        buffer.extend(uid=np.arange(50) % 7, x=np.zeros(50, np.int32))
        buffer.find("uid", 0)
        buffer.extend(uid=np.arange(50) % 7, x=np.zeros(50, np.int32))
        index = buffer.view.column_index
        for name in ("_merged", "position_chunks"):
            original = getattr(column_index, name)

            def stop(*arguments, original=original):
                original(*arguments)
                raise KeyboardInterrupt

            buffer.extend(uid=np.arange(70) % 7, x=np.zeros(70, np.int32))
            monkeypatch.setattr(column_index, name, stop)
            with pytest.raises(KeyboardInterrupt):
                index("uid")
            monkeypatch.setattr(column_index, name, original)
            for value in range(7):
                assert looked_up(buffer, "uid", value) == [
                    (-position, 0)
                    for position in buffer.gather_all().positions[::-1].tolist()
                    if buffer.get_field("uid", 0, position) == value
                ]


def test_a_value_is_broken_when_rows_of_it_left_while_others_stay():
    with ring(None, capacity=100) as buffer:
        buffer.extend(uid=np.arange(100) // 2, x=np.zeros(100, np.int32))
        index = buffer.view.column_index("uid")
        assert not index.look_up(np.arange(50)).broken.any()
        # The older of two rows with 0 leaves, then the other one.
        for first, broken in ((101, True), (102, False)):
            buffer.extend(uid=[first + 1000], x=np.zeros(1, np.int32))
            matches = buffer.view.column_index("uid").look_up(np.arange(3))
            assert matches.broken.tolist() == [broken, False, False]


def test_a_value_stays_broken_when_entries_of_rows_that_left_are_dropped():
    with ring(None, capacity=5000) as buffer:
        buffer.extend(uid=[7, 8], x=np.zeros(2, np.int32))
        for _ in range(3):
            # A row of 7 stays, and the first one leaves.
            buffer.extend(uid=np.arange(4000) + 100, x=np.zeros(4000, np.int32))
            buffer.extend(uid=[7], x=np.zeros(1, np.int32))
            matches = buffer.view.column_index("uid").look_up(np.array([7, 8]))
        entries = buffer.view.column_index("uid").nbytes // 20
        assert entries < 1.25 * 5000 + 1024
        assert matches.broken.tolist() == [True, False]
