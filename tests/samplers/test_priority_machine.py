"""A hypothesis machine drives a buffer, its sampler and a reader's against dicts.

``HYPOTHESIS_PROFILE=explore`` runs it longer, from a fresh seed each time.
"""

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
from mmreplay.testing.disks import using
from tests.buffer.support import Twin
from tests.model.test_machine import QuickDisk
from tests.samplers.priority_model import PriorityModel, check
from tests.slices import count

KINDS = st.sampled_from(["", "", "", "t", "u"])
EXPLORES = os.environ.get("HYPOTHESIS_PROFILE") == "explore"
VALUES = st.floats(0, 8, width=32) | st.just(0.0)


class PriorityMachine(RuleBasedStateMachine):
    """Everything that may happen to a buffer and to the priorities of its rows."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.twin = None

    @initialize(
        capacity=st.sampled_from([1, 2, 5, 8, 33]),
        num_envs=st.integers(1, 3),
        autoreset=st.sampled_from(["disabled", "next_step"]),
        layout=st.sampled_from(["env_major", "time_major"]),
        stored=st.booleans(),
        in_ram=st.booleans(),
        eps=st.sampled_from([0.0, 0.25]),
        reads=st.booleans(),
    )
    def create(self, capacity, num_envs, autoreset, layout, stored, in_ram, eps, reads):
        path = None if in_ram else self.folder / "ring"
        self.twin = Twin(
            path, capacity, num_envs, autoreset=autoreset, layout=layout, stored=stored
        )
        self.eps, self.in_ram = eps, in_ram
        self.reads = reads and not in_ram
        self.model = PriorityModel(self.twin.oracle)
        self.reader = mr.ReplayBuffer.open(path) if self.reads else None
        self.sampler = self.make()

    def make(self):
        return mr.PrioritizedSampler(alpha=0.7, eps=self.eps, seed=0)

    @property
    def view(self):
        """As the writer's process draws, or a reader's."""
        return (self.reader if self.reads else self.twin.buffer).view

    def _kinds(self, data, count):
        envs = range(len(self.twin.oracle.envs))
        ids = data.draw(st.permutations(envs))
        ids = ids[: data.draw(st.integers(1, len(ids)))]
        return ids, [[data.draw(KINDS) for _ in ids] for _ in range(count)]

    @rule(data=st.data(), count=st.integers(1, 9), final=st.booleans())
    def extend(self, data, count, final):
        ids, kinds = self._kinds(data, count)
        final = final and self.twin.autoreset == "disabled" and not self.twin.stored
        self.twin.extend(kinds, ids, final)

    @rule(lap=st.integers(20, 120))
    def extend_far(self, lap):
        num_envs = len(self.twin.oracle.envs)
        self.twin.extend([["t" if n % 7 == 3 else ""] * num_envs for n in range(lap)])

    @rule(data=st.data())
    def update(self, data):
        ends = [len(stream.rows) for stream in self.twin.oracle.envs]
        written = [e for e, stop in enumerate(ends) if stop]
        if not written:
            return
        pairs = []
        for _ in range(data.draw(st.integers(0, 8))):
            env_id = data.draw(st.sampled_from(written))
            back = data.draw(st.integers(1, ends[env_id]))
            pairs.append((env_id, ends[env_id] - min(back, ends[env_id])))
        values = [data.draw(VALUES) for _ in pairs]
        env_ids, positions = np.array(pairs, np.int64).reshape(-1, 2).T
        # Those of float32 go another way.
        given = np.array(values, data.draw(st.sampled_from(["f4", "f8"])))
        dropped = self.sampler.update_priorities(self.view, env_ids, positions, given)
        assert dropped == self.model.update(pairs, values)

    @rule(count=st.integers(1, 50))
    def draw(self, count):
        probabilities = self.model.probabilities(0.7, self.eps)
        if not any(probabilities.values()):
            with pytest.raises(mr.errors.EmptyError):
                self.sampler.draw(self.view, count)
            return
        draw = self.sampler.draw(self.view, count)
        for *place, probability in zip(
            draw.env_ids.tolist(), draw.positions.tolist(), draw.probabilities, strict=True
        ):
            assert abs(probability - probabilities[tuple(place)]) <= 1e-9 * probability

    @rule(data=st.data())
    def clear(self, data):
        ids, _ = self._kinds(data, 0)
        self.twin.buffer.clear(ids)
        self.twin.oracle.clear(ids)

    @rule(data=st.data())
    def dequeue(self, data):
        lengths = self.twin.buffer.span.lengths
        ids = [e for e in range(len(lengths)) if lengths[e]]
        if ids:
            count = data.draw(st.integers(1, int(lengths[ids].min())))
            self.twin.buffer.dequeue(count, ids)
            self.twin.oracle.dequeue(count, ids)

    @rule(capacity=st.sampled_from([1, 3, 8, 20, 40]))
    def resize(self, capacity):
        self.twin.buffer.resize(capacity)
        self.twin.oracle.resize(capacity)

    @rule()
    def close_the_sampler(self):
        if self.in_ram or self.sampler.where is None:
            return
        self.sampler.close()
        self.sampler = self.make()

    @rule()
    def lose_the_sampler(self):
        """What a kill leaves: nothing synced, and no word said."""
        if self.in_ram or self.sampler.where is None:
            return
        drop(self.sampler)
        self.sampler = self.make()

    @rule()
    def save_and_load(self):
        state = self.sampler.state_dict(priorities=True)
        other = self.make()
        self.sampler.close()
        if "priorities" in state or not self.in_ram:
            other.load_state_dict(state)
            self.sampler = other

    @precondition(lambda self: self.twin and not self.in_ram)
    @rule(how=st.sampled_from(["break", "truncate", "continue"]))
    def open_again(self, how):
        self.twin.reopen(how)

    @rule()
    def look(self):
        if self.twin is not None:
            check(self.sampler, self.view, self.model, 0.7, self.eps)
            expected = "RAM, as the data" if self.in_ram else "disk"
            assert self.sampler.where == expected

    @invariant()
    def no_more_memory_than_promised(self):
        if self.twin is not None and self.sampler.where is not None:
            rows = self.sampler.priorities
            assert len(rows.column.values) == rows.column.ring.num_rows

    def teardown(self):
        if self.twin is not None:
            self.look()
            self.sampler.close()
            if self.reader is not None:
                self.reader.close()
            self.twin.buffer.close()
        shutil.rmtree(self.folder)


def drop(sampler):
    """Leave a column as the death of the process does."""
    column = sampler.priorities.column
    column._finalizer.detach()
    column.values = column.values[:0].copy()
    column.files.release()


@pytest.mark.model
def test_priorities_are_what_the_dict_says(tmp_path):
    chosen = settings(
        max_examples=2000 if EXPLORES else count(60, 20), stateful_step_count=60 if EXPLORES else 25
    )
    with using(QuickDisk()):
        run_state_machine_as_test(lambda: PriorityMachine(tmp_path), settings=chosen)
