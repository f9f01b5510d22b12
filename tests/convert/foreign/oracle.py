"""Steps of a buffer, and of a list of episodes, side by side."""

import numpy as np

import mmreplay as mr
from mmreplay.nesting import flatten


def drawn(path, observations):
    """Every step of a buffer that has a next observation, with it, in order.

    Args:
        path: The buffer.
        observations: Paths of what is observed.
    """
    with mr.ReplayBuffer.open(path) as buffer:
        rows = buffer.gather_all()
        final = (buffer.view.flags(rows.env_ids, rows.positions) & 8) != 0
        steps = ~final
        env_ids, positions = rows.env_ids[steps], rows.positions[steps]
        starts = buffer.view.starts
        legal = buffer.view.legal(env_ids, positions)
        legal &= (positions >= starts.first[env_ids]) & (positions < starts.stop[env_ids])
        batch = buffer.take(env_ids[legal], positions[legal])
        names = [*buffer.schema.paths, *(f"next_{path}" for path in observations)]
        return {name: np.asarray(batch[name]) for name in names}, int((~legal).sum())


def episode(observations, actions, rewards, terminations, truncations):
    """What an episode of T + 1 observations gives step by step."""
    found = {"reward": np.asarray(rewards), "terminated": np.asarray(terminations)}
    found["truncated"] = np.asarray(truncations)
    for path, values in flatten({"observation": observations}).items():
        found[path] = np.asarray(values)[:-1]
        found[f"next_{path}"] = np.asarray(values)[1:]
    for path, values in flatten({"action": actions}).items():
        found[path] = np.asarray(values)
    return found


def joined(episodes):
    return {name: np.concatenate([e[name] for e in episodes]) for name in episodes[0]}


def assert_same(one, other):
    assert set(one) == set(other)
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
