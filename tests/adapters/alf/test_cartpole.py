"""A stream of CartPole, recorded as alf's drivers record it, goes through unharmed."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from mmreplay.adapters.alf import ReplayBuffer
from tests.adapters.alf.support import FIRST, LAST, MID, Spec

NUM_ENVS, STEPS, LENGTH, GAMMA = 3, 300, 128, 0.9


class TimeStep(NamedTuple):
    step_type: Any
    reward: Any
    discount: Any
    observation: Any
    prev_action: Any


class Experience(NamedTuple):
    time_step: Any
    action: Any
    state: Any = ()


SPEC = Experience(
    TimeStep(Spec((), torch.int32), Spec(), Spec(), Spec((4,)), Spec((), torch.int64)),
    Spec((), torch.int64),
)


def recorded():
    """Rows of each environment, ``[STEPS]`` dicts, a LAST row after each episode."""
    gymnasium = pytest.importorskip("gymnasium")
    rng, found = np.random.default_rng(0), []
    for env_id in range(NUM_ENVS):
        env = gymnasium.make("CartPole-v1", max_episode_steps=25)
        rows, over, previous = [], True, 0
        for step in range(STEPS):
            if over:
                observation, _ = env.reset(seed=1000 * env_id + step)
                kind, reward, discount = FIRST, 0.0, 1.0
            else:
                observation, reward, ended, cut, _ = env.step(previous)
                kind = LAST if ended or cut else MID
                discount = 0.0 if ended else 1.0
            over = kind == LAST
            action = int(rng.integers(2))
            rows.append(
                {
                    "step_type": kind,
                    "reward": reward,
                    "discount": discount,
                    "observation": observation,
                    "prev_action": previous,
                    "action": action,
                }
            )
            previous = action
        env.close()
        found.append(rows)
    return found


def batch_of(rows):
    stacked = {
        name: torch.as_tensor(np.stack([np.asarray(row[name]) for row in rows])) for name in rows[0]
    }
    time_step = TimeStep(
        stacked["step_type"].to(torch.int32),
        stacked["reward"].to(torch.float32),
        stacked["discount"].to(torch.float32),
        stacked["observation"],
        stacked["prev_action"],
    )
    return Experience(time_step, stacked["action"])


def test_what_was_recorded_is_drawn(tmp_path):
    stream = recorded()
    buffer = ReplayBuffer(
        SPEC,
        NUM_ENVS,
        LENGTH,
        prioritized_sampling=True,
        keep_episodic_info=True,
        record_episodic_return=True,
        gamma=GAMMA,
        path=tmp_path / "cart",
    )
    for step in range(STEPS):
        buffer.add_batch(batch_of([rows[step] for rows in stream]))
        if step == STEPS // 2:
            buffer.close()
            buffer = ReplayBuffer(
                SPEC,
                NUM_ENVS,
                LENGTH,
                prioritized_sampling=True,
                keep_episodic_info=True,
                record_episodic_return=True,
                gamma=GAMMA,
                path=tmp_path / "cart",
                resume=True,
            )
            # The run broke off: what follows is of another episode.
            for rows in stream:
                rows[step]["step_type"] = LAST
    data, info = buffer.get_batch(500, 3)
    buffer.update_priority(info.env_ids, info.positions, torch.rand(500))
    data, info = buffer.get_batch(500, 3)
    begins = buffer.get_episode_begin_position(info.positions, info.env_ids)
    left = buffer.steps_to_episode_end(info.positions, info.env_ids)
    for place in range(500):
        rows, first = stream[int(info.env_ids[place])], int(info.positions[place])
        window = rows[first : first + 3]
        for name in ("step_type", "reward", "discount", "prev_action"):
            wanted = [row[name] for row in window]
            assert getattr(data.time_step, name)[place].tolist() == wanted
        wanted = np.stack([row["observation"] for row in window])
        assert np.array_equal(data.time_step.observation[place].numpy(), wanted)
        assert data.action[place].tolist() == [row["action"] for row in window]
        begin = 1 + max([-1, *(p for p in range(first) if rows[p]["step_type"] == LAST)])
        assert int(begins[place]) == begin
        wanted = next((p for p in range(first, STEPS) if rows[p]["step_type"] == LAST), STEPS - 1)
        assert int(left[place]) == wanted - first
        check_return(rows, first, wanted, float(info.discounted_return[place]))
    buffer.close()


def check_return(rows, first, last, discounted):
    """Rewards of 1 a step, up to an end that is the pole's fall."""
    if rows[last]["discount"] != 0 or first == last:
        assert discounted == -1000
    else:
        # float32 of a sum of at most 25 terms below 10.
        assert discounted == pytest.approx(sum(GAMMA**k for k in range(last - first)), 1e-6)
