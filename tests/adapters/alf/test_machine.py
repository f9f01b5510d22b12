"""Any calls in any order leave the buffer as they leave a list of dicts."""

import numpy as np
import pytest
import torch
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

from mmreplay.adapters.alf import ReplayBuffer
from mmreplay.adapters.common import values
from mmreplay.disk.files import Disk
from mmreplay.testing.disks import using
from tests.adapters.alf.support import SPEC, rows
from tests.adapters.alf.twin import Twin

DISCOUNTS = [0.0, 0.5, 1.0]


class Machine(RuleBasedStateMachine):
    """Step types in any order: alf does not say that FIRST follows LAST."""

    @initialize(
        num_envs=st.integers(1, 3),
        length=st.integers(1, 6),
        ignored=st.integers(0, 2),
        prioritized=st.booleans(),
    )
    def make(self, num_envs, length, ignored, prioritized):
        torch.manual_seed(0)
        values._seeded.clear()  # so that it draws the same when it is run again
        self.buffer = ReplayBuffer(
            SPEC,
            num_envs,
            length,
            ignored,
            prioritized,
            keep_episodic_info=True,
            record_episodic_return=True,
            default_return=-7.0,
            gamma=0.5,
        )
        self.twin = Twin(num_envs, length, ignored, -7.0, 0.5)
        self.num_envs, self.prioritized = num_envs, prioritized
        # By environment and position, of rows that were given one.
        self.priorities = {}

    def teardown(self):
        if hasattr(self, "buffer"):
            self.buffer.close()

    @rule(data=st.data())
    def add(self, data):
        ids = data.draw(st.permutations(range(self.num_envs)))
        ids = ids[: data.draw(st.integers(1, self.num_envs))]
        each = [
            data.draw(st.tuples(st.integers(0, 2), st.sampled_from(DISCOUNTS), st.integers(-9, 99)))
            for _ in ids
        ]
        batch = rows(*zip(*each, strict=True))
        everyone = ids == list(range(self.num_envs))
        self.buffer.add_batch(batch, None if everyone else torch.tensor(ids))
        for env_id, row in zip(ids, each, strict=True):
            self.twin.add(env_id, *row)

    @rule(env_id=st.integers(0, 2))
    def clear(self, env_id):
        if env_id < self.num_envs:
            self.buffer.clear(torch.tensor([env_id]))
            self.twin.clear(env_id)

    @rule(count=st.integers(0, 7))
    def remove(self, count):
        self.buffer.remove_up_to(count)
        for env_id in range(self.num_envs):
            self.twin.remove(env_id, count)

    @rule()
    def break_off(self):
        self.buffer._core._log.break_off(self.buffer._core.buffer)
        self.twin.break_off()

    @precondition(lambda self: self.prioritized)
    @rule(data=st.data(), value=st.integers(0, 9))
    def update(self, data, value):
        env_id = data.draw(st.integers(0, self.num_envs - 1))
        head = self.twin.heads[env_id]
        if head == 0:
            return
        position = data.draw(st.integers(max(0, head - 9), head - 1))
        ids, positions = torch.tensor([env_id]), torch.tensor([position])
        self.buffer.update_priority(ids, positions, torch.tensor([float(value)]))
        if any(row["position"] == position for row in self.twin.rings[env_id]):
            self.priorities[env_id, position] = value

    @rule(length=st.integers(1, 3), size=st.integers(1, 40))
    def draw(self, length, size):
        starts = self.twin.starts(length)
        if self.prioritized:
            starts = {s for s in starts if self.priorities.get(s, 1) > 0}
            drawable = bool(starts)
        else:
            short = min(map(len, self.twin.rings)) - self.twin.ignored < length
            drawable = not short
        if not drawable:
            with pytest.raises(AssertionError):
                self.buffer.get_batch(size, length)
            return
        data, info = self.buffer.get_batch(size, length)
        assert data.reward.shape == (size, length)
        for place in range(size):
            env_id, first = int(info.env_ids[place]), int(info.positions[place])
            assert (env_id, first) in starts
            window = [
                row for row in self.twin.rings[env_id] if first <= row["position"] < first + length
            ]
            for name in ("step_type", "discount", "reward"):
                wanted = [row[name] for row in window]
                assert getattr(data, name)[place].tolist() == wanted
            wanted = window[0]["return"]
            assert float(info.discounted_return[place]) == pytest.approx(wanted)
        self._weigh(info)

    def _weigh(self, info):
        """Weights of steps whose priority is known are as their priorities."""
        if not self.prioritized:
            assert info.importance_weights == ()
            return
        pairs = zip(info.env_ids.tolist(), info.positions.tolist(), strict=True)
        known = [
            (weight, self.priorities[pair])
            for weight, pair in zip(info.importance_weights.tolist(), pairs, strict=True)
            if pair in self.priorities
        ]
        for weight, priority in known[1:]:
            assert weight * known[0][1] == pytest.approx(known[0][0] * priority)

    @invariant()
    def rows_are_those_of_the_twin(self):
        if not hasattr(self, "buffer"):
            return
        sizes = [len(ring) for ring in self.twin.rings]
        assert self.buffer.current_size.tolist() == sizes
        assert self.buffer.current_pos.tolist() == self.twin.heads
        wanted = [(env_id, row) for env_id, ring in enumerate(self.twin.rings) for row in ring]
        ids = torch.tensor([env_id for env_id, _ in wanted], dtype=torch.int64)
        positions = torch.tensor([r["position"] for _, r in wanted], dtype=torch.int64)
        found = self.buffer.get_field("reward", ids, positions)
        assert found.tolist() == [row["reward"] for _, row in wanted]
        found = self.buffer.get_field("step_type", ids, positions)
        assert found.tolist() == [row["step_type"] for _, row in wanted]
        begins = self.buffer.get_episode_begin_position(positions, ids)
        assert begins.tolist() == [row["begin"] for _, row in wanted]
        zeros = self.buffer.get_disc_0_begin_position(positions, ids)
        assert zeros.tolist() == [row["zero"] for _, row in wanted]
        left = self.buffer.steps_to_episode_end(positions, ids)
        assert left.tolist() == [self.twin.left(*each) for each in wanted]

    @rule()
    def gather(self):
        spans = {
            (head - len(ring), head)
            for ring, head in zip(self.twin.rings, self.twin.heads, strict=True)
        }
        if len(spans) > 1:
            with pytest.raises(AssertionError):
                self.buffer.gather_all()
            return
        data, info = self.buffer.gather_all()
        wanted = [[row["reward"] for row in ring] for ring in self.twin.rings]
        assert np.array_equal(data.reward.numpy(), np.array(wanted, np.float32))
        assert info.positions.tolist() == [next(iter(spans))[0]] * self.num_envs


class QuickDisk(Disk):
    """A disk that syncs nothing: no power is cut here."""

    def datasync(self, fd):
        pass

    def sync_folder(self, fd):
        pass


@pytest.mark.parametrize(
    ("examples", "steps"), [(12, 20), pytest.param(300, 40, marks=pytest.mark.slow)]
)
def test_a_buffer_is_what_the_lists_say(examples, steps):
    chosen = settings(max_examples=examples, stateful_step_count=steps)
    with using(QuickDisk()):
        run_state_machine_as_test(Machine, settings=chosen)
