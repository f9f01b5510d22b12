"""Calls that read rows: values, flags, order, episodes, statistics, verification."""

import shutil

import numpy as np

import mmreplay as mr
from mmreplay.episodes import FINAL, START
from tests.combinations.build import damage, indices_of, nested, stacked, stored_at
from tests.combinations.compare import (
    assert_column,
    assert_rows,
    assert_steps,
    expected_step,
    refused,
)


def gather_all(built, rng):
    """All rows, oldest first, and which are final."""
    assert_rows(built.twin, built.buffer.gather_all())


def legal_starts(built, rng):
    """Legal starts in their order, with or without next observations."""
    twin = built.twin
    assert started(built.buffer) == twin.legal()
    with built.open(transforms=[mr.WithoutNext()]) as buffer:
        assert started(buffer) == twin.legal(without_next=True)


def started(buffer):
    """(env_id, position) of all legal starts by rank."""
    view = buffer.view
    count = int(view.starts.lengths.sum()) - view.num_illegal
    env_ids, positions = view.start_at(np.arange(count))
    return list(zip(env_ids.tolist(), positions.tolist(), strict=True))


def take(built, rng):
    """Each legal start can be taken, and no other row."""
    twin, buffer = built.twin, built.buffer
    legal = twin.legal()
    if legal:
        chosen = [legal[i] for i in rng.permutation(len(legal))]
        batch = buffer.take(*np.array(chosen).T)
        assert indices_of(batch) == chosen
        assert_steps(batch.fields, [expected_step(twin, index) for index in chosen])
    others = [index for index in twin.alive() if index not in set(legal)]
    gone = [(e, env.first - 1) for e, env in enumerate(twin.envs) if env.first]
    for index in [*others[:2], *gone[:1]]:
        with refused(mr.StaleError):
            buffer.take([index[0]], [index[1]])


def get_field(built, rng):
    """Fields of any rows, and their flags."""
    twin, buffer = built.twin, built.buffer
    alive = twin.alive()
    if not alive:
        return
    chosen = [alive[i] for i in rng.integers(len(alive), size=7)]
    env_ids, positions = np.array(chosen).T
    for path in buffer.schema.paths:
        known = [i for i, index in enumerate(chosen) if path in twin.stored(index)]
        if known:
            column = buffer.get_field(path, env_ids[known], positions[known])
            expected = [twin.stored(chosen[i])[path] for i in known]
            assert_column(path, column, expected)
    flags = buffer.flags(env_ids, positions)
    assert ((flags & FINAL) != 0).tolist() == [twin.row(p).final for p in chosen]
    assert ((flags & START) != 0).tolist() == [twin.begins(p) for p in chosen]


def find(built, rng):
    """Rows by the value of a column, newest first."""
    twin, buffer = built.twin, built.buffer
    steps = twin.steps()
    for path in ("uid", "group"):
        values = {int(twin.row(index).values[path]) for index in steps} | {10_000}
        for value in sorted(values)[-3:]:
            found = buffer.find(path, value)
            indices = list(zip(*(column.tolist() for column in found), strict=True))
            expected = [p for p in steps if twin.row(p).values[path] == value]
            assert sorted(indices) == expected, (path, value)
            numbers = [twin.row(index).values["uid"] for index in indices]
            mine = {e: [p for f, p in indices if f == e] for e, _ in indices}
            assert all(p == sorted(p, reverse=True) for p in mine.values()), numbers


def episode_table(built, rng):
    """Episodes with their lengths, returns and ends."""
    twin, table = built.twin, mr.episode_table(built.buffer)
    episodes = twin.episodes()
    assert table.env_ids.tolist() == [steps[0][0] for steps in episodes]
    assert table.begin.tolist() == [steps[0][1] for steps in episodes]
    assert table.end.tolist() == [steps[-1][1] + 1 for steps in episodes]
    assert table.lengths.tolist() == [len(steps) for steps in episodes]
    assert table.returns.tolist() == [twin.total(steps) for steps in episodes]
    assert table.headless.tolist() == [twin.headless(steps) for steps in episodes]
    assert table.running.tolist() == [twin.running(steps) for steps in episodes]
    assert table.broken.tolist() == [twin.broken(steps) for steps in episodes]


def stats(built, rng):
    """Moments of each field over all steps."""
    twin, buffer = built.twin, built.buffer
    steps, moments = twin.steps(), mr.field_moments(buffer)
    assert len(buffer) == len(steps)
    for path in buffer.schema.paths:
        values = [numbers(built, path, twin.stored(index)[path]) for index in steps]
        flat = np.concatenate([np.zeros(0), *values])
        assert moments[path].count == flat.size, path
        if flat.size:
            np.testing.assert_allclose(moments[path].mean, flat.mean(), rtol=1e-9)
            np.testing.assert_allclose(moments[path].std, flat.std(), 1e-9, 1e-9)
            assert moments[path].min == flat.min(), path
            assert moments[path].max == flat.max(), path
    for path in ("reward", "action"):
        values = [float(twin.row(index).values[path]) for index in steps]
        counts, edges = mr.histogram(buffer, path, 5)
        assert 1 <= len(counts) <= 5
        if steps:
            assert edges[0] <= min(values)
            assert edges[-1] >= max(values)
            # The outermost bins are not empty: the edges are those of the values.
            assert counts[0] > 0
            assert counts[-1] > 0
        assert counts.tolist() == np.histogram(values, edges)[0].tolist(), path


def numbers(built, path, value):
    """What statistics count of a value."""
    if isinstance(value, str | bytes):
        return np.array([len(value.encode() if isinstance(value, str) else value)])
    if built.fields.get(path) == "bfloat16":
        bits = np.asarray(value).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64).ravel()
    return np.asarray(value, np.float64).ravel()


def write_field(built, rng):
    """A mutable field takes other values, which each read shows."""
    twin, buffer = built.twin, built.buffer
    steps = twin.steps()
    if built.fields.get("extra") != "mutable" or not buffer.writable or not steps:
        return
    index = steps[int(rng.integers(len(steps)))]
    value = np.array([-1.0, 0.25], np.float32)
    buffer.write_field("extra", [index[0]], [index[1]], value[None])
    twin.row(index).values["extra"] = value
    built.changes += 1
    assert_rows(twin, buffer.gather_all())


def verify(built, rng):
    """Nothing is damaged; in a copy with another byte, something is."""
    if built.path is None:
        return
    if built.buffer.writable:
        built.buffer.commit()
    findings = mr.verify_buffer(built.path).findings
    # Of a resize the former rows stay until the next writer.
    assert [f.message for f in findings if f.damage] == []
    alive = built.twin.alive()
    # The newest rows are in no shard yet.
    alive = [index for index in alive if stored_at(built.path, *index)[0].exists()]
    if alive:
        copy = built.new_path("damaged")
        shutil.copytree(built.path, copy)
        index = alive[int(rng.integers(len(alive)))]
        damage(copy, *index)
        findings = mr.verify_buffer(copy).findings
        kind = "sum" if stored_at(copy, *index)[0].suffix == ".bin" else "file"
        assert kind in [f.kind for f in findings if f.damage]


def bad_steps(built, rng):
    """A step that does not fit changes nothing."""
    buffer, twin = built.buffer, built.twin
    if not buffer.writable:
        return
    steps = twin.steps()
    if not steps:
        return
    good = twin.row(steps[-1]).values
    rows = [{**good, "reward": np.array([1.0, 2.0, 3.0], np.float32)}]
    rows = [{path: v for path, v in row.items() if path in buffer.schema.paths} for row in rows]
    heads = buffer.heads.tolist()
    with refused(mr.SchemaError):
        buffer.add(nested(stacked(rows * built.case.num_envs)))
    assert buffer.heads.tolist() == heads
    assert_rows(twin, buffer.gather_all())


CONSUMERS = {
    "gather_all": gather_all,
    "legal_starts": legal_starts,
    "take": take,
    "get_field": get_field,
    "find": find,
    "episode_table": episode_table,
    "stats": stats,
    "write_field": write_field,
    "verify": verify,
    "bad_steps": bad_steps,
}
