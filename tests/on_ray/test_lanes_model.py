"""Thin writers and the lanes of one ring under every order of faults: once each row."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.on_ray.thin_support import SimulatedShard, add_steps, check_rows, make_writer, quietly

pytestmark = pytest.mark.model

EXAMPLES = int(os.environ.get("MMREPLAY_LANES_EXAMPLES", "30"))
FAULTS = st.lists(
    st.one_of(
        st.none(),
        st.sampled_from(["before", "after", "lost", "late", "late", "deliver", "swapped", "full"]),
        st.integers(0, 30),
    ),
    max_size=6,
)


class LanesMachine(RuleBasedStateMachine):
    """Writers come, add, flush and go; calls of theirs are lost, late and killed."""

    capacity, num_lanes = 4000, 5

    @initialize(seed=st.integers(0, 1 << 20))
    def begin(self, seed):
        self.folder = Path(tempfile.mkdtemp(prefix="raythin-"))
        self.rng = np.random.default_rng(seed)
        self.shard = SimulatedShard(self.folder / "ring", self.capacity, self.num_lanes)
        self.writers, self.feeds, self.ended = {}, {}, {}

    @precondition(lambda self: len(self.writers) < 3)
    @rule(
        num_envs=st.integers(1, 2),
        steps=st.integers(1, 9),
        ahead=st.integers(1, 3),
        keep=st.sampled_from(["published", "committed"]),
    )
    def come(self, num_envs, steps, ahead, keep):
        number = len(self.feeds)
        made = []
        error = quietly(
            lambda: made.append(
                make_writer(self.shard, number, num_envs, steps=steps, ahead=ahead, keep=keep)
            )
        )
        if error is None:
            [(self.writers[number], self.feeds[number])] = made

    @precondition(lambda self: self.writers)
    @rule(
        data=st.data(),
        count=st.integers(1, 20),
        ends=st.sampled_from([0.0, 0.2, 0.9]),
        with_final=st.booleans(),
        blocks=st.booleans(),
        faults=FAULTS,
    )
    def add(self, data, count, ends, with_final, blocks, faults):
        self.shard.plan += faults
        number = data.draw(st.sampled_from(sorted(self.writers)))
        add_steps(
            self.writers[number], self.feeds[number], self.rng, count, ends, with_final, blocks
        )

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), faults=FAULTS)
    def flush(self, data, faults):
        self.shard.plan += faults
        number = data.draw(st.sampled_from(sorted(self.writers)))
        quietly(self.writers[number].flush)

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def close(self, data):
        number = data.draw(st.sampled_from(sorted(self.writers)))
        if quietly(self.writers[number].close) is None:
            self.ended[number] = self.writers.pop(number)

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def die(self, data):
        """A writer's process ends: its rows that had not arrived are lost."""
        number = data.draw(st.sampled_from(sorted(self.writers)))
        self.writers.pop(number)

    @rule()
    def kill(self):
        self.shard.kill()

    @rule()
    def lose_power(self):
        self.shard.lose_power()

    @rule()
    def commit(self):
        self.shard.opened().ring.commit()

    @rule()
    def bring_late_calls(self):
        self.shard.run_late()

    @rule()
    def wait_long(self):
        self.shard.now += 601.0

    def teardown(self):
        if not hasattr(self, "shard"):
            return
        try:
            self._check()
        finally:
            if self.shard.lanes is not None:
                self.shard.lanes.ring.close()
            shutil.rmtree(self.folder)

    def _check(self):
        shard = self.shard
        shard.plan.clear()
        while self.writers:
            # One that lost its environments waits for those of another, or of writers
            # that are dead.
            shard.now += 601.0
            done = []
            for number, writer in self.writers.items():
                if quietly(writer.close) is None:
                    done.append(number)
            assert done
            for number in done:
                self.ended[number] = self.writers.pop(number)
            shard.run_late()
        shard.opened().close()
        lost = {number: writer.lost_rows for number, writer in self.ended.items()}
        for number, writer in self.ended.items():
            assert not writer._blocks
            if writer._keep == "committed":
                assert not lost[number]
        check_rows(shard.folder, self.feeds, lost, self.ended, all_alive=self.capacity == 4000)


class SmallLanesMachine(LanesMachine):
    """The same over a ring that is overwritten many times."""

    capacity, num_lanes = 40, 3


CHOSEN = settings(
    max_examples=EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # To shrink a failure takes minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
TestLanes = LanesMachine.TestCase
TestLanes.settings = CHOSEN
TestSmallLanes = SmallLanesMachine.TestCase
TestSmallLanes.settings = CHOSEN
