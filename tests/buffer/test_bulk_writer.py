"""BulkWriter makes a buffer of the rows that it is given, and no buffer before."""

from contextlib import closing

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer import opening
from mmreplay.buffer.bulk_writer import BulkWriter
from mmreplay.episodes import START, TERMINATED

LENGTH = 10
FIELDS = {
    "observation": mr.Field((3,), "float32"),
    "large": mr.Field((700,), "uint8"),
    "score": mr.Field((), "float32", mutable=True),
    "text": mr.Field.text(40),
    "terminated": mr.Field((), "bool"),
}


def described(engine="memmap", layout=None, heap_bytes=60_000, capacity=400):
    schema = mr.Schema(FIELDS)
    return opening.describe(
        schema, capacity, 3, engine, layout, "disabled", None, None, heap_bytes=heap_bytes
    )


def rows(rng, env_ids, positions):
    """Columns of rows, and their flags; what a row holds follows from where it is."""
    numbers = positions * 3 + env_ids
    texts = [b"x" * int(n % 37) for n in numbers]
    flags = np.where(positions % LENGTH == 0, START, 0) | np.where(
        positions % LENGTH == LENGTH - 1, TERMINATED, 0
    )
    columns = {
        "observation": np.stack([numbers, numbers + 1, numbers + 2], axis=1).astype(np.float32),
        "large": np.repeat(numbers % 251, 700).reshape(-1, 700).astype(np.uint8),
        "score": numbers.astype(np.float32),
        "text": mr.Ragged(
            np.frombuffer(b"".join(texts), np.uint8),
            np.concatenate([[0], np.cumsum([len(text) for text in texts])]),
        ),
        "terminated": (flags & TERMINATED) != 0,
    }
    return columns, flags.astype(np.uint8)


def blocks(rng, oldest, heads):
    """Rows in blocks of some environments, in the order of each one's positions."""
    at = oldest.copy()
    while (at < heads).any():
        counts = np.minimum(rng.integers(0, 40, len(at)), heads - at)
        env_ids = np.repeat(np.arange(len(at)), counts)
        positions = np.concatenate(
            [np.arange(first, first + n) for first, n in zip(at, counts, strict=True)]
        )
        if len(env_ids) and rng.random() < 0.5:
            # Rows of a step follow each other, instead of those of an environment.
            order = np.argsort(positions, kind="stable")
            env_ids, positions = env_ids[order], positions[order]
        if len(env_ids):
            yield env_ids, positions
        at += counts


@pytest.mark.parametrize(
    ("engine", "layout"), [("memmap", "env_major"), ("memmap", "time_major"), ("zarr", None)]
)
def test_the_buffer_holds_the_rows_that_were_given(tmp_path, rng, engine, layout):
    # Shards take the values, of which the heap does not hold all.
    metadata = described(engine, layout, 60_000 if engine == "memmap" else 6_000)
    oldest, heads = np.array([0, 707, 1290]), np.array([399, 1100, 1290])
    with closing(BulkWriter(tmp_path, metadata, oldest, heads)) as bulk:
        for env_ids, positions in blocks(rng, oldest, heads):
            columns, flags = rows(rng, env_ids, positions)
            bulk.write(columns, env_ids, positions, flags)
        assert not len(bulk.overfull())
        bulk.finish()
        with pytest.raises(mr.FormatError):
            mr.ReplayBuffer.open(tmp_path)
        bulk.publish({"mean": 3})
    assert mr.verify_buffer(tmp_path).findings == ()
    with mr.ReplayBuffer.open(tmp_path) as buffer:
        assert (buffer.tails.tolist(), buffer.heads.tolist()) == (oldest.tolist(), heads.tolist())
        assert (buffer.recovery.how, buffer.statistics) == ("clean", {"mean": 3})
        for env_id in range(3):
            positions = np.arange(oldest[env_id], heads[env_id])
            env_ids = np.full(len(positions), env_id)
            columns, flags = rows(rng, env_ids, positions)
            np.testing.assert_array_equal(buffer.flags(env_ids, positions), flags)
            for path, expected in columns.items():
                found = buffer.get_field(path, env_ids, positions)
                if path == "text":
                    np.testing.assert_array_equal(found.offsets, expected.offsets)
                    found, expected = found.values, expected.values
                np.testing.assert_array_equal(found, expected)
    # It goes on where the rows end.
    with mr.ReplayBuffer.open(tmp_path, "r+") as buffer:
        columns, _ = rows(rng, np.arange(3), heads)
        buffer.add({**columns, "text": ["a", "bb", "ccc"]})
        np.testing.assert_array_equal(buffer.heads, heads + 1)


def test_environments_whose_values_the_heap_does_not_hold_are_named(tmp_path, rng):
    oldest, heads = np.zeros(3, np.int64), np.array([40, 390, 40])
    metadata = described(heap_bytes=8192)
    with closing(BulkWriter(tmp_path, metadata, oldest, heads)) as bulk:
        for env_ids, positions in blocks(rng, oldest, heads):
            columns, flags = rows(rng, env_ids, positions)
            bulk.write(columns, env_ids, positions, flags)
        assert bulk.overfull().tolist() == [1]
