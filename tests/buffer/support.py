"""Buffers and oracles that get the same calls, and the comparison of both."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, StaleError
from tests.buffer.oracle import Oracle, columns

FIELDS = {
    "observation": mr.Field((2,), "int64"),
    "action": mr.Field((), "int32"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}
NEXT = {"next_observation": mr.Field((2,), "int64")}


def schema(stored=False, **more):
    return mr.Schema(FIELDS | (NEXT if stored else {}) | more)


def step(number, kind="", stored=False):
    """Values that no other step has; `kind` has t and u for its two ends."""
    values = {
        "observation": [number, -number],
        "action": np.int32(number),
        "reward": np.float32(number / 4),
        "terminated": "t" in kind,
        "truncated": "u" in kind,
    }
    if stored:
        values["next_observation"] = [1000 + number, number]
    return values


class Twin:
    """One buffer and its oracle, fed alike."""

    def __init__(self, path, capacity, num_envs=1, *, stored=False, **options):
        self.path = path
        self.stored = stored
        options.setdefault("commit_every", None)
        if path is None:
            options["engine"] = "memory"
        self.autoreset = options.setdefault("autoreset", "disabled")
        self.buffer = mr.ReplayBuffer.create(path, schema(stored), capacity, num_envs, **options)
        self.oracle = Oracle(capacity, num_envs, self.autoreset, stored)
        self.number = 0

    def steps(self, env_ids, kinds):
        """One step for each environment, with its final observation or None."""
        made, finals = {}, {}
        for env_id, kind in zip(env_ids, kinds, strict=True):
            self.number += 1
            made[env_id] = step(self.number, kind, self.stored)
            finals[env_id] = [-7, self.number]
        return made, finals

    def add(self, kinds, env_ids=None, final=False):
        """Add one step; `kinds` has one entry an environment."""
        ids = list(range(self.buffer.num_envs)) if env_ids is None else env_ids
        steps, finals = self.steps(ids, kinds)
        options = {"final_observation": list(finals.values())} if final else {}
        self.buffer.add(columns(list(steps.values())), env_ids=env_ids, **options)
        self.oracle.add(steps, finals if final else None)

    def extend(self, kinds, env_ids=None, final=False):
        """Add many steps; `kinds` is a list of what `add` takes."""
        ids = list(range(self.buffer.num_envs)) if env_ids is None else env_ids
        made = [self.steps(ids, some) for some in kinds]
        given = [columns(list(steps.values())) for steps, _ in made]
        data = {name: np.stack([g[name] for g in given]) for name in given[0]}
        options = {}
        if final:
            options["final_observation"] = [list(f.values()) for _, f in made]
        self.buffer.extend(data, env_ids=env_ids, **options)
        finals = [f for _, f in made] if final else None
        self.oracle.extend([steps for steps, _ in made], finals)

    def reopen(self, how="break"):
        self.buffer.close()
        self.buffer = mr.ReplayBuffer.open(self.path, "r+", on_resume=how, commit_every=None)
        self.oracle.resume(how)

    def check(self, illegal=True):
        check(self.buffer, self.oracle, illegal)


def check(buffer, oracle, illegal=True):
    """Compare everything that the buffer shows with the oracle."""
    check_rows(buffer, oracle)
    legal = oracle.legal()
    if not legal:
        with pytest.raises(EmptyError, match="is a legal start yet"):
            buffer.sample(1)
    else:
        env_ids, positions = np.array(list(legal)).T
        batch = buffer.take(env_ids, positions)
        same(batch, list(legal.values()))
        assert buffer.sample(1).probabilities[0] == 1 / len(legal)
        assert ranked(buffer, len(legal)) == list(legal)
    if illegal:
        for env_id, position in set(oracle.alive()) - set(legal):
            with pytest.raises(StaleError, match="cannot be drawn as a transition"):
                buffer.take([env_id], [position])


def ranked(buffer, count):
    """The legal starts that a sampler's view names by rank."""
    view = buffer._reader
    assert view.starts is not None  # a draw looks first
    ids, positions = view.start_at(np.arange(count))
    return list(zip(ids.tolist(), positions.tolist(), strict=True))


def check_rows(buffer, oracle):
    """Compare spans, counts and every row."""
    streams = oracle.envs
    span = buffer.span
    assert span.first.tolist() == [s.first(oracle.capacity) for s in streams]
    assert span.stop.tolist() == [len(s.rows) for s in streams]
    steps = oracle.steps()
    assert len(buffer) == len(steps)
    counts = [sum(e == env_id for e, _ in steps) for env_id in range(len(streams))]
    assert buffer.sizes.tolist() == counts
    rows = buffer.gather_all()
    alive = oracle.alive()
    assert list(zip(rows.env_ids, rows.positions, strict=True)) == alive
    if alive:
        same(rows, [oracle.row(*place) for place in alive])
        finals = [oracle.envs[e].rows[p].final for e, p in alive]
        assert rows["final"].tolist() == finals


def same(batch, values):
    """The batch's fields hold these values, in this order, and no other field."""
    expected = columns(values)
    assert set(batch) - {"final"} == set(expected)
    for name, column in expected.items():
        np.testing.assert_array_equal(batch[name], column, err_msg=name)
