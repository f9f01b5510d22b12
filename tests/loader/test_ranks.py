"""Legal starts by rank, against a look at every row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.buffer.support import Twin
from tests.loader.support import legal

KINDS = ["", "", "", "t", "u"]


def check_ranks(buffer):
    expected = legal(buffer)
    view = buffer.view
    assert int(view.starts.lengths.sum()) - view.num_illegal == len(expected)
    ranks = np.arange(len(expected))
    env_ids, positions = view.index.start_at(ranks)
    assert list(zip(env_ids.tolist(), positions.tolist(), strict=True)) == expected
    # In any order, and again and again.
    mixed = np.random.default_rng(0).integers(max(1, len(ranks)), size=20)
    if expected:
        env_ids, positions = view.index.start_at(mixed)
        found = list(zip(env_ids.tolist(), positions.tolist(), strict=True))
        assert found == [expected[rank] for rank in mixed]


# Final observations are given only where they are read.
CASES = [
    (autoreset, stored, final)
    for autoreset in ("disabled", "same_step", "next_step")
    for stored in (False, True)
    for final in (False, True)
    if not (final and (stored or autoreset == "next_step"))
]


@pytest.mark.parametrize(("autoreset", "stored", "final"), CASES)
def test_every_rank_is_the_start_that_counting_finds(autoreset, stored, final, rng):
    twin = Twin(None, 13, 3, autoreset=autoreset, stored=stored)
    for _ in range(60):
        subset = rng.permutation(3)[: rng.integers(1, 4)].tolist()
        kinds = [KINDS[i] for i in rng.integers(len(KINDS), size=len(subset))]
        twin.add(kinds, subset, final=final)
        check_ranks(twin.buffer)


@given(st.data())
def test_ranks_hold_after_any_calls(data):
    autoreset = data.draw(st.sampled_from(["disabled", "next_step"]))
    capacity = data.draw(st.integers(1, 9))
    twin = Twin(None, capacity, 2, autoreset=autoreset)
    for _ in range(data.draw(st.integers(1, 12))):
        call = data.draw(st.sampled_from(["extend", "extend", "clear", "dequeue"]))
        if call == "clear":
            twin.buffer.clear(data.draw(st.sampled_from([[0], [1], None])))
        elif call == "dequeue":
            least = int(twin.buffer.span.lengths.min())
            if least:
                twin.buffer.dequeue(data.draw(st.integers(1, least)))
        else:
            count = data.draw(st.integers(1, 14))
            ends = data.draw(
                st.lists(st.sampled_from(KINDS), min_size=2 * count, max_size=2 * count)
            )
            twin.extend([ends[2 * i : 2 * i + 2] for i in range(count)])
        check_ranks(twin.buffer)
