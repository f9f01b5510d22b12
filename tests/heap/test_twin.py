"""Buffers of values that vary against lists of arrays, whatever is done to both.

``HYPOTHESIS_PROFILE=explore`` runs it longer, from a fresh seed each time.
"""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.episodes import END, FINAL
from mmreplay.testing.disks import QuickDisk, using
from tests.slices import count
from tools.torture.powerloss import abandon

pytestmark = pytest.mark.model

EXPLORES = os.environ.get("HYPOTHESIS_PROFILE") == "explore"

MAX_POINTS, MAX_TEXT, MAX_TOKENS = 40, 60, 200
SCHEMA = mr.Schema(
    {
        "observation": {
            "points": mr.Field((None, 2), "float32", max_length=MAX_POINTS),
            "speed": mr.Field((3,), "float32"),
            "text": mr.Field.text(max_bytes=MAX_TEXT),
        },
        "tokens": mr.Field((None,), "int16", max_length=MAX_TOKENS),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)
OBSERVATION = SCHEMA.role_paths("observation")
HEAP_BYTES = 4096
"""Less than five of the longest rows: the smallest heap that there is. A shard has one
row there, and of four times the heap four."""


class Ring:
    """A buffer and what it must hold: a list of rows for each environment."""

    def __init__(self, folder, engine, num_envs, layout, autoreset, seed):
        self.engine, self.num_envs = engine, num_envs
        self.path = None if engine == "memory" else Path(folder) / "ring"
        self.rng = np.random.default_rng(seed)
        self.rows = [[] for _ in range(num_envs)]
        self.removed = np.zeros(num_envs, np.int64)
        self.buffer = mr.ReplayBuffer.create(
            self.path,
            SCHEMA,
            50,
            num_envs,
            engine=engine,
            heap_bytes=HEAP_BYTES * (4 if engine == "zarr" and seed % 2 else 1),
            layout=None if engine == "zarr" else layout,
            autoreset=autoreset,
            commit_every=None,
            sampler=mr.UniformSampler(seed=seed),
        )
        self.next_step = autoreset == "next_step"

    def observation(self):
        rng = self.rng
        length = int(rng.choice([0, 1, MAX_POINTS, rng.integers(MAX_POINTS + 1)]))
        return {
            "points": rng.random((length, 2)).astype(np.float32),
            "speed": rng.random(3).astype(np.float32),
            "text": "å" * int(rng.choice([0, 1, MAX_TEXT // 2])),
        }

    def step(self):
        rng = self.rng
        length = int(rng.choice([0, 0, MAX_TOKENS, rng.integers(MAX_TOKENS + 1)]))
        ends = rng.random(2) < 0.15
        return {
            "observation": self.observation(),
            "tokens": rng.integers(-99, 99, length).astype(np.int16),
            "reward": np.float32(rng.random()),
            "terminated": bool(ends[0]),
            "truncated": bool(ends[1]),
        }

    def note(self, env_id, step, final):
        """Append what one step stores."""
        rows = self.rows[env_id]
        row = {f"observation/{name}": v for name, v in step["observation"].items()}
        row |= {path: step[path] for path in SCHEMA.paths if path in step}
        after_end = bool(rows) and rows[-1]["ends"] and not rows[-1]["final"]
        row["final"] = self.next_step and after_end
        row["ends"] = (row["terminated"] or row["truncated"]) and not row["final"]
        if row["final"]:
            row["tokens"] = row["tokens"][:0]
        rows.append(row)
        if final is not None and row["ends"]:
            last = {f"observation/{name}": v for name, v in final.items()}
            empty = step["tokens"][:0]
            rows.append(last | {"tokens": empty, "final": True, "ends": False})

    def add(self, env_ids, finals):
        steps = [self.step() for _ in env_ids]
        given = [self.observation() if finals else None for _ in env_ids]
        for env_id, step, final in zip(env_ids, steps, given, strict=True):
            self.note(env_id, step, final)
        every = list(env_ids) == list(range(self.num_envs))
        self.buffer.add(
            columns(steps),
            final_observation=columns(given) if finals else None,
            env_ids=None if every else env_ids,
        )

    def extend(self, count, finals):
        steps = [[self.step() for _ in range(self.num_envs)] for _ in range(count)]
        given = [
            [self.observation() if finals else None for _ in range(self.num_envs)]
            for _ in range(count)
        ]
        for at in range(count):
            for env_id in range(self.num_envs):
                self.note(env_id, steps[at][env_id], given[at][env_id])
        self.buffer.extend(blocks(steps), final_observation=blocks(given) if finals else None)

    def reopen(self, *, killed):
        if self.path is None:
            return
        if killed:
            abandon(self.buffer)
        else:
            self.buffer.close()
        # Episodes go on, so that the twin need not know of boundaries.
        self.buffer = mr.ReplayBuffer.open(
            self.path,
            "r+",
            on_resume="continue",
            commit_every=None,
            sampler=mr.UniformSampler(seed=1),
        )

    def check(self):
        buffer = self.buffer
        assert buffer.heads.tolist() == [len(rows) for rows in self.rows]
        batch = buffer.gather_all()
        flags = buffer.flags(batch.env_ids, batch.positions)
        assert len(batch) == int(buffer.span.lengths.sum())
        if self.engine == "zarr":
            # What the heap gives up is in shards.
            oldest = np.maximum(self.removed, buffer.heads - buffer.capacity)
            assert buffer.span.first.tolist() == oldest.tolist()
        for at, (env_id, position) in enumerate(
            zip(batch.env_ids.tolist(), batch.positions.tolist(), strict=True)
        ):
            row = self.rows[env_id][position]
            assert bool(flags[at] & FINAL) == row["final"]
            assert bool(flags[at] & END) == row["ends"]
            same(batch, at, row, (*OBSERVATION, "tokens"))
        for env_id in np.flatnonzero(buffer.span.lengths).tolist():
            newest = int(buffer.heads[env_id]) - 1
            values = buffer.get_field("tokens", env_id, [newest])
            assert values[0].tolist() == self.rows[env_id][newest]["tokens"].tolist()
        self.check_sample()

    def check_sample(self):
        buffer = self.buffer
        try:
            batch = buffer.sample(6)
        except mr.EmptyError:
            return
        again = buffer.take(batch.env_ids, batch.positions)
        for at, (env_id, position) in enumerate(
            zip(batch.env_ids.tolist(), batch.positions.tolist(), strict=True)
        ):
            rows = self.rows[env_id]
            same(batch, at, rows[position], (*OBSERVATION, "tokens"))
            same(again, at, rows[position], (*OBSERVATION, "tokens"))
            follows = position + 1 < len(rows)
            if rows[position]["ends"]:
                follows = follows and rows[position + 1]["final"]
            source = rows[position + 1] if follows else rows[position]
            nexts = {path: f"next_{path}" for path in OBSERVATION}
            same(batch, at, source, OBSERVATION, nexts)

    def close(self):
        self.buffer.close()


def same(batch, at, row, paths, names=None):
    for path in paths:
        got = batch.fields[path if names is None else names[path]]
        if path == "observation/text":
            assert got[at].tobytes().decode() == row[path]
        else:
            assert np.array_equal(got[at], row[path]), path


def columns(steps):
    """Steps of some environments, as one mapping of lists and arrays."""
    first, merged = steps[0], {}
    for name, value in first.items():
        each = [step[name] for step in steps]
        varies = name in ("points", "text", "tokens")
        if isinstance(value, dict):
            merged[name] = columns(each)
        else:
            merged[name] = each if varies else np.array(each)
    return merged


def blocks(steps):
    """Steps ``[T][E]``, likewise."""
    by_time = [columns(each) for each in steps]

    def merge(values):
        if isinstance(values[0], dict):
            return {name: merge([each[name] for each in values]) for name in values[0]}
        return values if isinstance(values[0], list) else np.array(values)

    return merge(by_time)


CALLS = st.sampled_from(
    ["add"] * 6 + ["some", "extend", "extend", "drop", "clear", "close", "kill", "commit", "resize"]
)


@settings(deadline=None, max_examples=2500 if EXPLORES else count(100, 12))
@given(
    engine=st.sampled_from(["memmap", "zarr", "memory"]),
    num_envs=st.integers(1, 3),
    layout=st.sampled_from(["env_major", "time_major"]),
    autoreset=st.sampled_from(["disabled", "same_step", "next_step"]),
    seed=st.integers(0, 1 << 30),
    calls=st.lists(st.tuples(CALLS, st.integers(0, 1 << 20)), max_size=40),
)
def test_a_buffer_holds_what_the_lists_hold(engine, num_envs, layout, autoreset, seed, calls):
    folder = tempfile.mkdtemp(prefix="heap-twin-")
    try:
        with using(QuickDisk()):
            ring = Ring(folder, engine, num_envs, layout, autoreset, seed)
            for name, number in calls:
                call(ring, name, number)
                ring.check()
            ring.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def call(ring, name, number):
    buffer, envs = ring.buffer, ring.num_envs
    finals = number % 2 == 1 and not ring.next_step
    if name == "add":
        ring.add(range(envs), finals)
        assert (buffer.span.lengths > 0).all(), "the newest row is alive"
    elif name == "some":
        chosen = [env_id for env_id in range(envs) if number >> env_id & 1] or [0]
        ring.add(chosen, finals)
    elif name == "extend":
        ring.extend(1 + number % 30, finals)
        assert (buffer.span.lengths > 0).all()
    elif name == "drop" and (sizes := buffer.span.lengths).min() > 0:
        buffer.dequeue(1 + number % int(sizes.min()))
        ring.removed = buffer.span.first
    elif name == "clear":
        buffer.clear([number % envs])
        ring.removed = np.maximum(ring.removed, buffer.span.first)
    elif name == "commit":
        buffer.commit()
    elif name == "resize":
        buffer.resize(20 + number % 50)
        ring.removed = np.maximum(ring.removed, buffer.span.first)
    elif name in ("close", "kill"):
        ring.reopen(killed=name == "kill")
