"""Updates of priorities, and the faults of others that are undone here."""

import json

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, SchemaError, StaleError
from mmreplay.samplers.prioritized import PrioritizedSampler
from tests.buffer.support import Twin
from tests.contracts.sampler import steps_of
from tests.samplers.prioritized import KINDS, WAY, column_of, filled, masses_of, update


@pytest.fixture(params=[False, True], ids=["float64", "float32"], autouse=True)
def _narrow(request, monkeypatch):
    monkeypatch.setitem(WAY, "narrow", request.param)


@pytest.mark.parametrize("make", KINDS)
class TestUpdates:
    """What `update_priorities` takes, drops and refuses."""

    def buffer(self, make, capacity=4, num_envs=2, **options):
        twin = Twin(None, capacity, num_envs, sampler=make(seed=0, **options))
        return twin, twin.buffer

    def test_the_last_of_equal_positions_wins(self, make):
        _, view = filled([[1.0, 1.0, 1.0]])
        sampler = make(alpha=1.0, seed=0)
        sampler.draw(view, 1)
        ids = np.zeros(4, np.int64)
        where = np.array([1, 2, 1, 1])
        sampler.update_priorities(view, ids, where, np.array([9.0, 4.0, 7.0, 2.5]))
        column = sampler.priorities.column.values
        assert column[:3].tolist() == [1.0, 2.5, 4.0]

    def test_nothing_may_be_updated(self, make):
        twin, buffer = self.buffer(make)
        assert update(buffer, [], []) == 0
        twin.extend([["", ""]] * 3)
        assert update(buffer, [], []) == 0

    def test_what_was_overwritten_is_dropped_and_counted(self, make):
        twin, buffer = self.buffer(make)
        twin.extend([["", ""]] * 9)
        buffer.sample(2)
        before = column_of(buffer).copy()
        # Position 4 lies where position 8 would in a ring of four slots.
        assert update(buffer, [(0, 4), (1, 0)], [77.0, 77.0]) == 2
        assert (column_of(buffer) == before).all()
        assert update(buffer, [(1, 4), (0, 6), (1, 1)], [77.0, 5.0, 77.0]) == 2
        assert (column_of(buffer) == 77.0).sum() == 0
        assert (column_of(buffer) == 5.0).sum() == 1

    @pytest.mark.parametrize("position", [9, 10, 1 << 40, -1])
    def test_what_was_never_written_is_refused(self, make, position):
        twin, buffer = self.buffer(make)
        twin.extend([["", ""]] * 9)
        buffer.sample(2)
        before = column_of(buffer).copy()
        with pytest.raises(StaleError, match="never written: positions must be below 9"):
            update(buffer, [(0, 7), (1, position)], [3.0, 3.0])
        assert (column_of(buffer) == before).all()

    @pytest.mark.parametrize("env_id", [2, -1])
    def test_environments_that_are_none_are_refused(self, make, env_id):
        twin, buffer = self.buffer(make)
        twin.extend([["", ""]] * 3)
        with pytest.raises(SchemaError, match=r"env_ids must be in \[0.*got values in"):
            update(buffer, [(env_id, 1)], [1.0])

    @pytest.mark.parametrize("value", [-1.0, np.nan, np.inf, -np.inf, 1e39])
    def test_an_invalid_priority_is_refused_and_nothing_is_stored(self, make, value):
        twin, buffer = self.buffer(make)
        twin.extend([["", ""]] * 3)
        buffer.sample(2)
        before = column_of(buffer).copy()
        with pytest.raises(SchemaError, match="priorities must be finite float32"):
            update(buffer, [(0, 0), (0, 1)], [5.0, value])
        assert (column_of(buffer) == before).all()

    def test_a_mean_of_all_is_refused(self, make):
        twin, buffer = self.buffer(make)
        twin.extend([["", ""]] * 3)
        batch = buffer.sample(2)
        message = r"priorities.*got shape \[\] for \[2\] env_ids and \[2\] positions"
        with pytest.raises(SchemaError, match=message):
            buffer.update_priorities(batch, np.float64(0.5))

    def test_half_floats_are_accepted_and_their_infinities_refused(self, make):
        twin, buffer = self.buffer(make)
        twin.extend([["", ""]] * 3)
        half = np.array([5, 65504], np.float16)
        assert update(buffer, [(0, 0), (0, 1)], half) == 0
        before = column_of(buffer).copy()
        assert set(half) <= set(before)
        with pytest.raises(SchemaError, match=r"priorities must be.*got inf at 1"):
            update(buffer, [(0, 0), (0, 1)], np.array([7, np.inf], np.float16))
        assert (column_of(buffer) == before).all()

    def test_an_illegal_start_is_never_opened(self, make):
        twin, buffer = self.buffer(make, capacity=8, num_envs=1)
        twin.extend([[""], ["u"], [""], [""]])
        # Position 1 ends without a final observation, and 3 waits for the next row.
        update(buffer, [(0, 1), (0, 3)], [1e6, 1e6])
        assert set(steps_of(buffer.sample(300))) == {(0, 0), (0, 2)}

    def test_a_row_keeps_the_priority_that_it_got_before_it_was_legal(self, make):
        twin, buffer = self.buffer(make, capacity=8, num_envs=1)
        twin.extend([[""]] * 3)
        update(buffer, [(0, 0), (0, 2)], [2.0, 6.0])
        twin.extend([[""]] * 2)
        assert set(steps_of(buffer.sample(300))) == {(0, p) for p in range(4)}
        assert column_of(buffer)[:5].tolist() == [2.0, 1.0, 6.0, 6.0, 6.0]

    def test_shapes_that_differ_are_refused(self, make):
        twin, buffer = self.buffer(make)
        twin.extend([["", ""]] * 3)
        with pytest.raises(SchemaError, match=r"got shape \[3\] for \[2\] env_ids"):
            update(buffer, [(0, 0), (0, 1)], [1.0, 2.0, 3.0])
        with pytest.raises(SchemaError, match=r"priorities must be real.*got bool"):
            update(buffer, [(0, 0)], [True])

    def test_windows_mix_the_priorities_of_their_steps(self, make):
        twin, buffer = self.buffer(make, capacity=9, num_envs=1, eta=0.75)
        twin.extend([[""]] * 9)
        values = np.array([[1.0, 4.0, np.nan], [2.0, 2.0, 8.0]])
        mask = np.array([[True, True, False], [True, True, True]])
        buffer.sampler.update_priorities(
            buffer.view, np.zeros(2, int), np.array([1, 4]), values, mask
        )
        # 0.75 * 4 + 0.25 * 2.5 and 0.75 * 8 + 0.25 * 4.
        assert column_of(buffer)[[1, 4]].tolist() == [3.625, 7.0]

    def test_a_window_without_a_transition_gets_priority_zero(self, make):
        twin, buffer = self.buffer(make, capacity=9, num_envs=1)
        twin.extend([[""]] * 9)
        buffer.sampler.update_priorities(
            buffer.view,
            np.zeros(2, int),
            np.array([1, 4]),
            np.full((2, 2), 3.0),
            np.array([[True, False], [False, False]]),
        )
        assert column_of(buffer)[[1, 4]].tolist() == [3.0, 0.0]

    @pytest.mark.parametrize(
        ("mask", "message"),
        [([[True], [True]], r"priorities: the mask must have the.*got \[2, 1\]")],
    )
    def test_masks_that_do_not_fit_are_refused(self, make, mask, message):
        twin, buffer = self.buffer(make, capacity=9, num_envs=1)
        twin.extend([[""]] * 9)
        with pytest.raises(SchemaError, match=message):
            buffer.sampler.update_priorities(
                buffer.view, np.zeros(2, int), np.array([1, 4]), np.ones((2, 2)), np.array(mask)
            )

    def test_bad_values_of_windows_are_refused(self, make):
        twin, buffer = self.buffer(make, capacity=9, num_envs=1)
        twin.extend([[""]] * 9)
        with pytest.raises(SchemaError, match=r"priorities must be.*got nan at 3"):
            buffer.sampler.update_priorities(
                buffer.view, np.zeros(2, int), np.array([1, 4]), np.array([[1, 2], [3, np.nan]])
            )


# The faults of alf's prioritized buffer (and of pytorchrl's), each undone here.


@pytest.mark.parametrize("make", KINDS)
def test_an_unwritten_row_is_never_drawn(make):
    twin = Twin(None, 8, 3, stored=True, sampler=make(seed=0))
    twin.add([""], env_ids=[1])
    assert set(steps_of(twin.buffer.sample(400))) == {(1, 0)}


@pytest.mark.parametrize("make", KINDS)
def test_priorities_that_are_all_outdated_are_no_error(make):
    twin = Twin(None, 4, stored=True, sampler=make(seed=0))
    twin.extend([[""]] * 20)
    assert update(twin.buffer, [(0, 1), (0, 2)], [9.0, 9.0]) == 2


@pytest.mark.parametrize("make", KINDS)
def test_an_empty_buffer_is_an_empty_error(make):
    twin = Twin(None, 4, sampler=make(seed=0))
    with pytest.raises(EmptyError, match="cannot draw 2 steps: none of 0 published"):
        twin.buffer.sample(2)


@pytest.mark.parametrize("make", KINDS)
def test_cleared_rows_are_not_drawn(make):
    twin = Twin(None, 6, 2, stored=True, sampler=make(seed=0))
    twin.extend([["", ""]] * 5)
    update(twin.buffer, [(0, 1), (1, 2)], [100.0, 50.0])
    twin.buffer.sample(8)
    twin.buffer.clear([0])
    assert {e for e, _ in steps_of(twin.buffer.sample(300))} == {1}
    twin.buffer.clear()
    with pytest.raises(EmptyError):
        twin.buffer.sample(2)
    twin.extend([["", ""]] * 2)
    assert set(steps_of(twin.buffer.sample(300))) == {(0, 5), (0, 6), (1, 5), (1, 6)}
    # What was cleared is not the highest priority of what came after.
    assert column_of(twin.buffer).max() == 1.0


@pytest.mark.parametrize("make", KINDS)
def test_dequeued_rows_are_not_drawn(make):
    twin = Twin(None, 6, stored=True, sampler=make(seed=0))
    twin.extend([[""]] * 5)
    update(twin.buffer, [(0, 0)], [100.0])
    twin.buffer.dequeue(2)
    assert set(steps_of(twin.buffer.sample(300))) == {(0, 2), (0, 3), (0, 4)}


def test_weights_after_a_reload_are_what_they_were(tmp_path):
    with Twin(tmp_path / "ring", 8, stored=True).buffer as buffer:
        buffer.sampler = sampler = mr.PrioritizedSampler(alpha=1, beta=1, seed=0)
        for number in range(5):
            buffer.add(
                observation=[number, 0],
                next_observation=[0, 0],
                action=0,
                reward=0,
                terminated=False,
                truncated=False,
            )
        update(buffer, [(0, 1), (0, 3)], [2.5, 0.5])
        state = sampler.state_dict()
        expected = sampler.draw(buffer.view, 20)
        sampler.close()
        again = mr.PrioritizedSampler(alpha=1, beta=1, seed=5)
        again.load_state_dict(json.loads(json.dumps(state)))
        found = again.draw(buffer.view, 20)
        assert steps_of(found) == steps_of(expected)
        assert (found.weights == expected.weights).all()
        again.close()


@pytest.mark.parametrize("make", KINDS)
def test_a_late_priority_does_not_open_an_ignored_start(make):
    sampler = mr.ignore_earliest(2, make(seed=0))
    twin = Twin(None, 8, stored=True, sampler=sampler)
    twin.extend([[""]] * 6)
    batch = twin.buffer.sample(64)
    assert set(steps_of(batch)) == {(0, p) for p in (2, 3, 4, 5)}
    twin.extend([[""]] * 4)
    # 2 is alive, and one of the earliest two now.
    twin.buffer.update_priorities(batch, np.full(64, 3.0))
    assert set(steps_of(twin.buffer.sample(300))) == {(0, p) for p in range(4, 10)}


@pytest.mark.parametrize("make", KINDS)
def test_priorities_stay_when_windows_become_longer(make):
    inner = make(seed=0)
    twin = Twin(None, 20, stored=True, sampler=mr.SequenceSampler(2, inner))
    twin.extend([[""]] * 12)
    batch = twin.buffer.sample(40)
    twin.buffer.update_priorities(batch, 1.0 + batch.positions)
    before = inner.priorities.column.values.copy()
    twin.buffer.sampler = mr.SequenceSampler(5, inner)
    assert set(steps_of(twin.buffer.sample(400))) == {(0, p) for p in range(8)}
    twin.buffer.sampler = mr.SequenceSampler(2, inner)
    assert set(steps_of(twin.buffer.sample(400))) == {(0, p) for p in range(11)}
    assert (inner.priorities.column.values == before).all()


@pytest.mark.parametrize("make", KINDS)
def test_no_environment_and_no_position_is_mixed_up(make, rng):
    twin = Twin(None, 32, 4, stored=True, layout="time_major", sampler=make(seed=0))
    twin.extend([[""] * 4] * 70)
    pairs = [(e, p) for e in range(4) for p in range(38, 70)]
    rng.shuffle(pairs)
    values = [e + p / 100 for e, p in pairs]
    assert update(twin.buffer, pairs, values) == 0
    if make is PrioritizedSampler:
        total = sum((v + 1e-6) ** 0.6 for v in values)
        for (env_id, position), found in masses_of(twin.buffer, 9000).items():
            mass = (env_id + position / 100 + 1e-6) ** 0.6
            assert found == pytest.approx(mass / total, rel=1e-5)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("at", ["note", "renew"])
def test_what_an_interrupted_update_stored_is_drawn_by(make, at, monkeypatch):
    """Also by rows that enter after it, which ask for the highest priority."""
    twin = Twin(None, 9, sampler=make(alpha=1.0, seed=0))
    twin.extend([[""]] * 4)
    buffer = twin.buffer
    buffer.sample(2)
    known = buffer.sampler.priorities
    whole = {"note": known._highest, "renew": known.distribution}[at]

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(whole), at, interrupted)
        with pytest.raises(KeyboardInterrupt):
            update(buffer, [(0, 1), (0, 2)], [50.0, 3.0])
    stored = column_of(buffer)[1] == 50.0
    twin.extend([[""]])
    probabilities = masses_of(buffer)
    assert (column_of(buffer)[4] == 50.0) == stored
    if make is PrioritizedSampler:
        masses = {place: column_of(buffer)[place[1]] + 1e-6 for place in probabilities}
        total = sum(masses.values())
        for place, probability in probabilities.items():
            assert probability == pytest.approx(masses[place] / total)
