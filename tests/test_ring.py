"""Ring arithmetic against arrays that are written row by row."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmreplay.ring import LAYOUTS, MAX_BLOCK_ROWS, MAX_RESERVE, Ring, Span, runs

rings = st.builds(Ring.sized, st.integers(1, 200), st.integers(1, 5), st.sampled_from(LAYOUTS))


def twin_rows(ring: Ring) -> np.ndarray:
    """The row of each (environment, slot), as the two layouts are drawn."""
    rows = np.arange(ring.num_rows)
    if ring.layout == "env_major":
        return rows.reshape(ring.num_envs, ring.slots)
    return rows.reshape(ring.slots, ring.num_envs).T


@given(rings, st.data())
def test_rows_are_those_of_the_layout_drawn(ring, data):
    table = twin_rows(ring)
    pairs = st.tuples(st.integers(0, ring.num_envs - 1), st.integers(0, 2**62))
    drawn = data.draw(st.lists(pairs, min_size=1))
    expected = [int(table[env, position % ring.slots]) for env, position in drawn]
    assert [ring.row(*pair) for pair in drawn] == expected
    env_ids, positions = np.array(drawn, np.int64).T
    rows = ring.rows(env_ids, positions)
    assert rows.tolist() == expected
    assert rows.dtype == np.int64


@given(rings)
def test_no_two_slots_share_a_row(ring):
    env_ids = np.arange(ring.num_envs)[:, None]
    rows = ring.rows(env_ids, np.arange(ring.slots)[None, :])
    rows = np.broadcast_to(rows, (ring.num_envs, ring.slots))
    assert sorted(rows.ravel().tolist()) == list(range(ring.num_rows))


@given(rings, st.data())
def test_a_range_is_its_positions_one_by_one(ring, data):
    env_id = data.draw(st.integers(0, ring.num_envs - 1))
    first = data.draw(st.integers(0, 5 * ring.slots))
    stop = first + data.draw(st.integers(0, 3 * ring.slots))
    pieces = ring.split_at_wrap(env_id, first, stop)
    rows = [row + i * step for row, step, count in pieces for i in range(count)]
    assert rows == [ring.row(env_id, position) for position in range(first, stop)]
    assert all(count > 0 for _, _, count in pieces)
    # A new piece only where the ring wraps.
    assert len(pieces) <= 2 + (stop - first) // ring.slots


@given(st.lists(st.integers(0, 30), min_size=1))
def test_runs_are_the_rows_in_the_order_given(rows):
    found = runs(np.array(rows))
    assert [row + i - a for row, a, b in found for i in range(a, b)] == rows
    assert [a for _, a, _ in found] == [0, *[b for _, _, b in found[:-1]]]
    breaks = sum(b - a != 1 for a, b in pairwise(rows))
    assert len(found) == breaks + 1


@given(st.integers(1, 10**9), st.integers(1, 10_000))
def test_sizes_are_as_the_format_says(capacity, num_envs):
    ring = Ring.sized(capacity, num_envs)
    # Two at least, for a step and its final row.
    assert ring.reserve == max(2, min(MAX_RESERVE, capacity // 16))
    assert ring.block_rows == max(
        n for n in (2**k for k in range(11)) if n <= max(1, min(1024, capacity // 16))
    )
    assert ring.block_rows <= MAX_BLOCK_ROWS
    assert ring.slots % ring.block_rows == 0
    least = capacity + ring.reserve + ring.block_rows
    assert least <= ring.slots < least + ring.block_rows
    assert ring.num_blocks * ring.block_rows == ring.slots
    assert ring.layout == ("env_major" if num_envs <= 32 else "time_major")


@given(st.integers(1, 10**7), st.integers(1, 300), st.integers(1, 10**6))
def test_the_reserve_suits_what_rows_take(capacity, num_envs, row_nbytes):
    ring, step = Ring.sized(capacity, num_envs, None, row_nbytes), row_nbytes * num_envs
    most = max(4096, (8 << 20) // step)
    least = min(512, (1 << 20) // step) if capacity >= 1024 else 2
    assert ring.reserve == max(2, least, min(most, capacity // 16))
    # What a small ring has more of is little.
    more = (ring.reserve - max(2, capacity // 16)) * step
    assert more <= 1 << 20
    assert ring.slots >= capacity + ring.reserve + ring.block_rows


@pytest.mark.parametrize("capacity", [1, 2, 15, 16, 17, 31, 33, 64, 100, 160])
def test_no_block_with_a_living_row_is_ever_overwritten(capacity):
    """All heads of three laps, each with all limits that the protocol allows."""
    ring = Ring.sized(capacity, 1)
    for head in range(3 * ring.slots):
        for limit in range(head, head + ring.reserve + 1):
            # What the rows below limit may already have been written over.
            gone = limit - ring.slots
            first = max(0, head - capacity)
            oldest_block = first - first % ring.block_rows
            assert first >= gone
            assert oldest_block >= max(0, gone)
            # A block of positions is one block of slots: it does not wrap.
            last = oldest_block + ring.block_rows - 1
            assert last % ring.slots - oldest_block % ring.slots == last - oldest_block


def test_a_span_counts_its_rows():
    span = Span(np.array([3, 0]), np.array([7, 0]))
    assert span.lengths.tolist() == [4, 0]
