"""Readers beside a writer whose heap wraps: every value is whole, and of its row."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from threading import Event

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import StaleError, StarvedError

SPAWN = multiprocessing.get_context("spawn")
WAIT_S = 60
MILLION = 1_000_000
SCHEMA = mr.Schema(
    {"name": mr.Field.text(max_bytes=20), "tokens": mr.Field((None,), "int64", max_length=60)}
)
NUM_ENVS = 2
BLOCK = 16
HEAP_NBYTES = 32 << 10
LAPS = 4


def lengths_of(positions):
    return positions * 7919 % 61


def write(path, pipe):
    """Add rows that are told by their environment and position, until told to stop."""
    with mr.ReplayBuffer.open(path, "r+", commit_every=0.02) as buffer:
        position = int(buffer.heads[0])
        while not pipe.poll():
            buffer.extend(block_at(position))
            position += BLOCK
            if position == 4 * BLOCK:
                pipe.send("writing")
        pipe.send(position)


def block_at(position):
    """The columns of a block, told by environment and position."""
    positions = np.arange(position, position + BLOCK)
    items = [
        [1_000 * n + np.arange(lengths_of(n)) + 10**12 * env_id for env_id in range(NUM_ENVS)]
        for n in positions.tolist()
    ]
    names = [[f"{e}:{n}" for e in range(NUM_ENVS)] for n in positions]
    return {"name": names, "tokens": items}


def wrong_values(batch):
    """Values that are not those of their rows."""
    tokens, env_ids, positions = batch["tokens"], batch.env_ids, batch.positions
    lengths = lengths_of(positions)
    if (tokens.lengths != lengths).any():
        return np.flatnonzero(tokens.lengths != lengths)
    first = 1_000 * positions + 10**12 * env_ids
    expected = np.repeat(first - tokens.offsets[:-1], lengths)
    expected += np.arange(len(expected))
    names = [f"{e}:{n}" for e, n in zip(env_ids, positions, strict=True)]
    wrong = np.array([a != b for a, b in zip(names, batch["name"].text(), strict=True)])
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return np.union1d(np.flatnonzero(wrong), rows[tokens.values != expected])


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize("count", [20_000, pytest.param(MILLION, marks=pytest.mark.slow)])
@pytest.mark.sliced(1)
def test_every_value_is_that_of_its_row_while_the_heap_wraps(tmp_path, engine, count):
    path = tmp_path / "ring"
    mr.ReplayBuffer.create(
        path,
        SCHEMA,
        2_000,
        NUM_ENVS,
        heap_bytes=HEAP_NBYTES,
        engine=engine,
        autoreset="disabled",
        layout="env_major",
    ).close()
    ours, theirs = SPAWN.Pipe()
    writer = SPAWN.Process(target=write, args=(path, theirs))
    writer.start()
    try:
        assert ours.poll(WAIT_S)
        assert ours.recv() == "writing"
        read = stale = 0
        with closing(mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(seed=0))) as reader:
            # A row takes about 300 bytes of the heap; the reader sees it lap.
            enough = int(reader.heads[0]) + LAPS * HEAP_NBYTES // 300
            while read < count or reader.heads[0] < enough:
                try:
                    batch = reader.sample(64)
                except (StaleError, StarvedError):
                    stale += 1
                    assert stale < count
                    continue
                assert not len(wrong_values(batch))
                read += 2 * len(batch)
                with suppress(StaleError):
                    span = reader.span
                    newest = np.arange(span.first[0], span.stop[0])[-64:]
                    batch = reader.take(np.zeros(len(newest), int), newest)
                    assert not len(wrong_values(batch))
                    read += 2 * len(batch)
    finally:
        ours.send("enough")
        writer.join(WAIT_S)
        writer.kill()
    assert writer.exitcode == 0


@pytest.mark.parametrize("count", [20_000, pytest.param(MILLION, marks=pytest.mark.slow)])
def test_every_value_in_ram_is_that_of_its_row_while_threads_write(count):
    """A buffer in RAM has no other readers than threads of its process."""
    stop = Event()
    with (
        mr.ReplayBuffer.create(
            None,
            SCHEMA,
            2_000,
            NUM_ENVS,
            heap_bytes=HEAP_NBYTES,
            engine="memory",
            autoreset="disabled",
            layout="env_major",
            sampler=mr.UniformSampler(seed=0),
        ) as buffer,
        ThreadPoolExecutor(1) as pool,
    ):
        buffer.extend(block_at(0))

        def lap():
            while not stop.is_set():
                buffer.extend(block_at(int(buffer.heads[0])))

        writing = pool.submit(lap)
        try:
            read = stale = 0
            enough = int(buffer.heads[0]) + LAPS * HEAP_NBYTES // 300
            while (read < count or buffer.heads[0] < enough) and not writing.done():
                try:
                    batch = buffer.sample(64)
                    assert not len(wrong_values(batch))
                    read += 2 * len(batch)
                    span = buffer.span
                    newest = np.arange(span.first[0], span.stop[0])[-64:]
                    batch = buffer.take(np.zeros(len(newest), int), newest)
                    assert not len(wrong_values(batch))
                    read += 2 * len(batch)
                except (StaleError, StarvedError):
                    stale += 1
                    assert stale < count
        finally:
            stop.set()
        writing.result(WAIT_S)
        assert read >= count
