"""How many rows a sampler leaves out, against what it draws and against plain loops."""

import numpy as np
import pytest

import mmreplay as mr
from tests.samplers.test_contract import SAMPLERS

NUM_ENVS, CAPACITY, STEPS = 2, 40, 61
ENDS = {0: {4, 11, 12, 30, 47, 55}, 1: {2, 20, 21, 40, 58}}
SCHEMA = mr.Schema(
    {
        "observation": mr.Field((), "int64"),
        "action": mr.Field((), "int64"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
        "pair": mr.Field((), "int64"),
    }
)


def make(sampler):
    """Two environments whose rings have gone round, with ends of both kinds."""
    buffer = mr.ReplayBuffer.create(
        None, SCHEMA, CAPACITY, NUM_ENVS, engine="memory", sampler=sampler, autoreset="next_step"
    )
    for step in range(STEPS):
        ends = np.array([step in ENDS[env_id] for env_id in range(NUM_ENVS)])
        truncated = ends & (step % 2 == 0)
        buffer.add(
            observation=np.full(NUM_ENVS, step),
            action=np.zeros(NUM_ENVS, int),
            reward=np.ones(NUM_ENVS, np.float32),
            terminated=ends & ~truncated,
            truncated=truncated,
            # Some pairs stand in one environment, and some have but one row.
            pair=np.array([step // 3, 100 + step]) % 97,
        )
    return buffer


def alive(buffer):
    return int(buffer.span.lengths.sum())


def starts_of(batch):
    """The rows that a batch's items begin at, or are, of groups and single steps."""
    env_ids, positions = np.asarray(batch.env_ids), np.asarray(batch.positions)
    return set(zip(env_ids.tolist(), positions.tolist(), strict=True))


def legal_starts(buffer):
    view = buffer.view
    with view.lock:
        starts = view.starts
        ranks = np.arange(int(starts.lengths.sum()) - view.num_illegal)
        env_ids, positions = view.start_at(ranks)
    return list(zip(env_ids.tolist(), positions.tolist(), strict=True))


@pytest.mark.parametrize("name", [name for name in SAMPLERS if "ragged" not in name])
@pytest.mark.sliced(14)
def test_rows_that_are_left_out_are_those_that_no_draw_has(name):
    with make(SAMPLERS[name](7)) as buffer:
        drawn = set()
        for _ in range(200):
            left = buffer.count_left_out()
            drawn |= starts_of(buffer.sample(16))
        assert left == alive(buffer) - len(drawn)
        assert 0 < left < alive(buffer)


def stale(sampler=None):
    """The rows of one environment that are at most 20 versions behind version 70."""
    return mr.StalenessSampler("pair", 70, 20, sampler=sampler, seed=3)


NARROW = {
    "newest alone": lambda: mr.RecentSampler(3, 1.0, mr.UniformSampler(0), seed=0),
    "newest first": lambda: mr.EmphasizeRecentSampler(2, eta=0.999, smallest=1, seed=0),
    "groups of three": lambda: mr.GroupSampler("pair", rows=3, seed=0),
    "recent versions": stale,
    "groups of recent versions": lambda: stale(mr.GroupSampler("pair", seed=0)),
}


@pytest.mark.parametrize("name", NARROW)
def test_samplers_of_few_rows_leave_out_more_than_what_is_illegal(name):
    with make(NARROW[name]()) as buffer:
        left, drawn = buffer.count_left_out(), set()
        for _ in range(300):
            drawn |= starts_of(buffer.sample(8))
        assert left == alive(buffer) - len(drawn)
        assert left > alive(buffer) - len(legal_starts(buffer))


def test_ragged_episodes_leave_out_what_begins_none():
    with make(mr.EpisodeSampler(mr.UniformSampler(0), layout="ragged")) as buffer:
        drawn = set()
        for _ in range(200):
            batch = buffer.sample(4)
            firsts = np.asarray(batch.offsets[:-1])
            drawn |= {(int(batch.env_ids[at]), int(batch.positions[at])) for at in firsts}
        assert buffer.count_left_out() == alive(buffer) - len(drawn)


@pytest.mark.parametrize("inside", [None, "window", "mixture", "counter"])
def test_steps_of_priority_zero_are_left_out(inside):
    own = mr.PrioritizedSampler(seed=0, eps=0.0)
    length = 1
    if inside == "window":
        sampler, length = mr.SequenceSampler(3, own), 3
    elif inside == "mixture":
        other = mr.PrioritizedSampler(seed=1, eps=0.0)
        sampler = mr.MixtureSampler([(own, 1), (other, 1)])
    elif inside == "counter":
        sampler = mr.UseCounter(3, own, name=None, seed=0)
    else:
        sampler = own
    with make(sampler) as buffer:
        buffer.sample(1)
        steps = legal_starts(buffer)
        zero = [step for step in steps if step[1] % 3 == 0]
        env_ids, positions = np.array(zero).T
        own.update_priorities(buffer.view, env_ids, positions, np.zeros(len(zero)))
        known = set(steps)
        # A window needs each of its steps, of one episode.
        begins = [
            (env_id, at)
            for env_id, at in steps
            if all((env_id, at + more) in known for more in range(length))
            and not any(at + more in ENDS[env_id] for more in range(length - 1))
        ]
        good = set(begins) - (set(zero) if inside != "mixture" else set())
        assert buffer.count_left_out() == alive(buffer) - len(good)
        assert 0 < len(good) < alive(buffer)


def test_rows_that_were_used_up_are_left_out():
    sampler = mr.UseCounter(2, mr.UniformSampler(seed=0), name=None, seed=0)
    with make(sampler) as buffer:
        uses = dict.fromkeys(legal_starts(buffer), 0)
        left = []
        while any(count < 2 for count in uses.values()):
            batch = buffer.sample(5)
            for env_id, position in zip(batch.env_ids, batch.positions, strict=True):
                uses[int(env_id), int(position)] += 1
            left.append(sum(count < 2 for count in uses.values()))
            assert buffer.count_left_out() == alive(buffer) - left[-1]
        assert left[0] > left[-1] == 0


def test_a_sampler_of_a_user_leaves_out_what_is_no_legal_start():
    class Mine:
        def draw(self, view, batch_size):
            return mr.UniformSampler(seed=0).draw(view, batch_size)

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    with make(Mine()) as buffer:
        assert buffer.count_left_out() == alive(buffer) - len(legal_starts(buffer)) > 0
