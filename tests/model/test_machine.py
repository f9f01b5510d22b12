"""A hypothesis machine drives a buffer on disk against a list of dicts.

``HYPOTHESIS_PROFILE=explore`` runs it longer, from a fresh seed each time.
"""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import mmreplay as mr
from mmreplay.errors import FullError
from mmreplay.testing.disks import FaultyDisk, QuickDisk, using
from tests.model.ring_model import Driven
from tests.slices import count

KINDS = st.sampled_from(["", "", "", "t", "u", "tu"])
RESUME = st.sampled_from(["break", "truncate", "continue"])
AUTORESETS = ["disabled", "same_step", "next_step"]
EXPLORES = os.environ.get("HYPOTHESIS_PROFILE") == "explore"


class RingMachine(RuleBasedStateMachine):
    """Everything a user may do to a buffer, in any order."""

    engine = "memmap"

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.driven = None

    @initialize(
        capacity=st.sampled_from([1, 2, 3, 5, 8, 40, 70]),
        num_envs=st.integers(1, 3),
        autoreset=st.sampled_from(AUTORESETS),
        layout=st.sampled_from(["env_major", "time_major"]),
        commit_every=st.sampled_from([None, None, 0.002]),
    )
    def create(self, capacity, num_envs, autoreset, layout, commit_every):
        self.driven = Driven(
            self.folder, capacity, num_envs, autoreset, layout, commit_every, self.engine
        )

    def _made(self, data, limit):
        """Steps of some environments, drawn; and whether final observations come."""
        driven = self.driven
        every = range(driven.num_envs)
        env_ids = None
        if data.draw(st.booleans()):
            env_ids = data.draw(st.permutations(every))
            env_ids = env_ids[: data.draw(st.integers(1, driven.num_envs))]
        ids = list(every) if env_ids is None else env_ids
        count = data.draw(st.integers(1, limit))
        made = [driven.step(ids, [data.draw(KINDS) for _ in ids]) for _ in range(count)]
        final = not driven.oracle.next_step and data.draw(st.booleans())
        return made, env_ids, final

    @rule(data=st.data())
    def add(self, data):
        made, env_ids, final = self._made(data, 1)
        self.driven.call(made, env_ids, final, many=False)
        self.driven.accept(made, final)

    @rule(data=st.data(), beyond=st.integers(0, 5))
    def extend(self, data, beyond):
        most = min(12, self.driven.oracle.capacity + beyond)
        made, env_ids, final = self._made(data, most)
        self.driven.call(made, env_ids, final, many=True)
        self.driven.accept(made, final)

    @rule(lap=st.integers(1, 90))
    def extend_far(self, lap):
        every = range(self.driven.num_envs)
        made = [
            self.driven.step(every, ["t" if n % 7 == e else "" for e in every]) for n in range(lap)
        ]
        self.driven.call(made, None, False, many=True)
        self.driven.accept(made, False)

    @rule(data=st.data(), at=st.integers(0, 6))
    def add_on_a_full_disk(self, data, at):
        made, env_ids, final = self._made(data, 1)
        fault = OSError(errno.ENOSPC, "No space left on device")
        try:
            with using(FaultyDisk(fault, at=at, names=("pwrite", "allocate"))):
                self.driven.call(made, env_ids, final, many=False)
        except FullError:
            self._revive()
        else:
            self.driven.accept(made, final)

    def _revive(self):
        """Where a durable slot failed, nothing more is taken: open again."""
        if self.driven.buffer._files.committer.failure is not None:
            self.driven.drop()
            self.driven.reopen("break")

    @rule(data=st.data())
    def clear(self, data):
        ids = data.draw(st.permutations(range(self.driven.num_envs)))
        ids = ids[: data.draw(st.integers(1, self.driven.num_envs))]
        self.driven.buffer.clear(ids)
        self.driven.oracle.clear(ids)
        self.driven.committed()

    @rule(data=st.data())
    def dequeue(self, data):
        lengths = self.driven.buffer.span.lengths
        ids = [e for e in range(self.driven.num_envs) if lengths[e]]
        if ids:
            count = data.draw(st.integers(1, int(lengths[ids].min())))
            batch = self.driven.buffer.dequeue(count, ids)
            taken = self.driven.oracle.dequeue(count, ids)
            assert list(zip(batch.env_ids, batch.positions, strict=True)) == taken

    @rule(data=st.data(), value=st.floats(width=32, allow_nan=False))
    def set_mutable(self, data, value):
        alive = self.driven.oracle.alive()
        if alive:
            some = data.draw(st.lists(st.sampled_from(alive), min_size=1, max_size=5))
            env_ids, positions = np.array(some).T
            values = np.full(len(some), value, np.float32)
            self.driven.buffer.write_field("note", env_ids, positions, values)
            for env_id, position in some:
                row = self.driven.oracle.envs[env_id].rows[position]
                row.values["note"] = np.float32(value)

    @rule()
    def commit(self):
        self.driven.buffer.commit()
        self.driven.committed()

    @rule(how=RESUME)
    def close_and_open(self, how):
        self.driven.committed()
        self.driven.buffer.close()
        self.driven.reopen(how)
        assert self.driven.buffer.recovery.how == "clean"

    @rule(how=RESUME)
    def kill_and_open(self, how):
        self.driven.drop()
        self.driven.reopen(how)

    @rule(capacity=st.sampled_from([1, 2, 4, 9, 33, 64]))
    def resize(self, capacity):
        self.driven.buffer.resize(capacity)
        self.driven.oracle.resize(capacity)
        self.driven.committed()

    @precondition(lambda self: self.driven and len(self.driven.extra) < 2)
    @rule(fill=st.integers(-5, 5))
    def add_field(self, fill):
        name = f"extra{len(self.driven.extra)}"
        self.driven.buffer.add_field(name, mr.Field((), "int16"), fill)
        self.driven.extra[name] = fill
        for stream in self.driven.oracle.envs:
            for row in stream.rows:
                row.values[name] = np.int16(fill)
        self.driven.committed()

    @rule()
    def open_another_reader(self):
        self.driven.reader.close()
        self.driven.reader = mr.ReplayBuffer.open(self.driven.path)

    @rule()
    def copy_the_folder(self):
        self.driven.check_copy(self.folder / "copy")

    @invariant()
    def everything_is_as_the_oracle_says(self):
        if self.driven is not None:
            self.driven.check()

    def teardown(self):
        if self.driven is not None:
            self.driven.reader.close()
            self.driven.buffer.close()
            report = mr.verify_buffer(self.driven.path)
            assert report.ok, report.findings
        shutil.rmtree(self.folder)


@pytest.mark.model
def test_the_ring_is_what_the_oracle_says(tmp_path):
    chosen = settings(
        max_examples=2000 if EXPLORES else count(60, 12), stateful_step_count=60 if EXPLORES else 30
    )
    with using(QuickDisk()):
        run_state_machine_as_test(lambda: RingMachine(tmp_path), settings=chosen)


class ShardedMachine(RingMachine):
    """The same over compressed shards."""

    engine = "zarr"


@pytest.mark.model
def test_a_ring_in_shards_is_what_the_oracle_says(tmp_path):
    chosen = settings(
        max_examples=1000 if EXPLORES else count(15, 5), stateful_step_count=60 if EXPLORES else 30
    )
    with using(QuickDisk()):
        run_state_machine_as_test(lambda: ShardedMachine(tmp_path), settings=chosen)
