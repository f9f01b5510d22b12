"""Steps are drawn, checked and located alike in C, in numpy, and by counting."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmreplay import kernels
from mmreplay.episodes import FINAL, START, TERMINATED, TRUNCATED, fold_table, legal_start_table
from mmreplay.kernels import steps as twin
from mmreplay.ring import Ring

C = kernels.choose("steps", "").module
KERNELS = [twin] if C is twin else [twin, C]
BITS = bytes([TERMINATED, TRUNCATED])


@st.composite
def rings(draw):
    layout = draw(st.sampled_from(["env_major", "time_major"]))
    slots, num_envs = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    return Ring(slots, num_envs, layout, 0, 1, slots)


def random(seed):
    return np.random.default_rng(seed)


def random_steps(ring, count, rng):
    return rng.integers(0, ring.num_envs, count), rng.integers(0, 40, count)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", [0, 7, (1 << 63) - 1, (1 << 64) - 1])
@pytest.mark.parametrize("step", [0, 1, 1 << 40])
def test_shares_are_those_of_numpys_generator(kernel, seed, step):
    philox = np.random.Philox(key=seed, counter=[0, step, 0, 0])
    for count in (0, 1, 4, 101):
        out = np.empty(count)
        kernel.shares(seed, step, out)
        philox.state = np.random.Philox(key=seed, counter=[0, step, 0, 0]).state
        assert out.tolist() == np.random.Generator(philox).random(count).tolist()


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=40),
    st.integers(0, 1 << 50),
    st.integers(0, 99),
)
def test_picks_are_the_rows_that_counting_finds(kernel, lengths, base, seed):
    lengths[-1] += 1
    ends = np.cumsum(lengths)
    stops = base + ends * 3
    env_ids, positions = np.empty(50, np.int64), np.empty(50, np.int64)
    kernel.pick(seed, 3, ends, stops, env_ids, positions)
    listed = [
        (env_id, stops[env_id] - length + at)
        for env_id, length in enumerate(lengths)
        for at in range(length)
    ]
    shares = np.empty(50)
    kernel.shares(seed, 3, shares)
    wanted = [listed[int(share * len(listed))] for share in shares.tolist()]
    assert list(zip(env_ids.tolist(), positions.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("derived", [False, True])
@given(ring=rings(), seed=st.integers(0, 1 << 32))
def test_steps_are_judged_by_two_rows(kernel, derived, ring, seed):
    rng = random(seed)
    flags = rng.integers(0, 256, ring.num_rows).astype(np.uint8)
    env_ids, positions = random_steps(ring, 20, rng)
    table, out = legal_start_table(derived=derived), np.empty(20, bool)
    heads = np.full(ring.num_envs, 100)
    kernel.legal(flags, *ring.shape, table, heads, 1, env_ids, positions, out)
    here = flags[ring.rows(env_ids, positions)] & 63
    after = flags[ring.rows(env_ids, positions + 1)] & 63
    assert out.tolist() == table.reshape(64, 64)[here, after].tolist()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("derived", [False, True])
@given(ring=rings(), seed=st.integers(0, 1 << 32), data=st.data())
def test_steps_that_are_folded_are_judged_row_by_row(kernel, derived, ring, seed, data):
    rng = random(seed)
    flags = rng.integers(0, 64, ring.num_rows).astype(np.uint8)
    flags[rng.random(ring.num_rows) < 0.7] = 0
    env_ids, positions = random_steps(ring, 20, rng)
    table, out = fold_table(derived=derived), np.empty(20, bool)
    heads = positions.max() + rng.integers(0, 4, ring.num_envs)
    after = data.draw(st.integers(0, max(1, ring.slots - 1)))
    kernel.legal(flags, *ring.shape, table, heads, after, env_ids, positions, out)

    def is_legal(env_id, position):
        here = flags[ring.row(env_id, position)]
        if here & FINAL:
            return False
        for then in range(position + 1, position + after + 1):
            following = flags[ring.row(env_id, then)] if then < heads[env_id] else 0
            if not table.reshape(64, 64)[here, following]:
                return False
            if following & START or then >= heads[env_id]:
                return True
            here = following
        return True

    steps = zip(env_ids.tolist(), positions.tolist(), strict=True)
    assert out.tolist() == [is_legal(*step) for step in steps]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bare", [False, True])
@given(ring=rings(), seed=st.integers(0, 1 << 32))
def test_steps_are_placed_with_those_after(kernel, bare, ring, seed):
    rng = random(seed)
    flags = rng.integers(0, 64, ring.num_rows).astype(np.uint8)
    env_ids, positions = random_steps(ring, 20, rng)
    heads = rng.integers(0, 45, ring.num_envs)
    rows, pairs = np.empty(20, np.int64), np.empty((20, 2), np.int64)
    for out in (rows, pairs):
        ends = np.empty((2, 20), bool)
        kernel.locate_rows(flags, env_ids, positions, heads, *ring.shape, BITS, bare, out, ends)
    expected = ring.rows(env_ids, positions)
    here = flags[expected]
    assert rows.tolist() == pairs[:, 0].tolist() == expected.tolist()
    assert ends.tolist() == [((here & bit) != 0).tolist() for bit in BITS]
    for at, (env_id, position) in enumerate(zip(env_ids, positions, strict=True)):
        after = ring.row(int(env_id), int(position) + 1)
        there = position + 1 < heads[env_id]
        alone = bare and not (there and not flags[after] & START)
        assert pairs[at, 1] == (expected[at] if alone else after)


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    slots=st.one_of(st.integers(1, 600), st.sampled_from([1 << n for n in range(13)])),
    lap=st.one_of(st.integers(0, 1 << 53), st.integers((1 << 63) - 600, 1 << 63)),
    step=st.integers(-1, 1),
)
def test_a_slot_is_what_is_left_of_a_position_however_high(kernel, slots, lap, step):
    # First, last and second of a lap, the highest laps that there are included.
    position = min(max(0, lap // slots * slots + step), (1 << 63) - 2)
    flags, zero = np.zeros(slots, np.uint8), np.zeros(1, np.int64)
    rows, ends = np.empty((1, 2), np.int64), np.empty((2, 1), bool)
    places = (np.zeros(1, np.int64), np.array([position]), zero)
    kernel.locate_rows(flags, *places, slots, 1, False, BITS, False, rows, ends)
    assert rows.tolist() == [[position % slots, (position + 1) % slots]]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("wide", [1, 2])
@given(ring=rings(), seed=st.integers(0, 1 << 32), count=st.integers(0, 600))
def test_records_are_gathered_from_the_rows_of_their_steps(kernel, wide, ring, seed, count):
    rng, waits = random(seed), seed % 2 == 1
    flags = rng.integers(0, 64, ring.num_rows).astype(np.uint8)
    records = rng.integers(0, 256, (ring.num_rows, 11)).astype(np.uint8)
    steps = (*random_steps(ring, count, rng), rng.integers(0, 45, ring.num_envs))
    rows = np.empty((count, 2) if wide == 2 else count, np.int64)
    wanted, ends = np.empty((2, 2, count), bool)
    kernel.locate_rows(flags, *steps, *ring.shape, BITS, True, rows, wanted)
    out = np.empty((wide * count, 11), np.uint8)
    kernel.take(records, 11, flags, *steps, *ring.shape, BITS, True, out, ends, waits)
    assert ends.tolist() == wanted.tolist()
    assert out.tolist() == records[rows.reshape(-1)].tolist()


@pytest.mark.parametrize("kernel", KERNELS)
@given(ring=rings(), seed=st.integers(0, 1 << 32), count=st.integers(0, 20))
def test_numbers_of_steps_are_stored_where_all_are_alive(kernel, ring, seed, count):
    rng = random(seed)
    firsts = rng.integers(0, 30, ring.num_envs)
    stops = firsts + rng.integers(0, ring.slots + 1, ring.num_envs)
    env_ids = rng.integers(0, ring.num_envs, count)
    positions = firsts[env_ids] + rng.integers(0, 2 * ring.slots, count)
    if rng.random() < 0.7:
        kept = positions < stops[env_ids]
        env_ids, positions = env_ids[kept], positions[kept]
    numbers = rng.random(len(env_ids)).astype(np.float32)
    if rng.random() < 0.3 and len(numbers):
        bad = [-1.0, np.nan, np.inf, -0.0]
        numbers[rng.integers(len(numbers))] = bad[rng.integers(4)]
    column = rng.random(ring.num_rows).astype(np.float32)
    wanted, rows = column.copy(), np.full(len(env_ids), -1)
    alive = (positions >= firsts[env_ids]) & (positions < stops[env_ids])
    good = alive.all() and (numbers >= 0).all() and np.isfinite(numbers).all()
    told = kernel.store(column, env_ids, positions, numbers, firsts, stops, *ring.shape, rows)
    assert told is bool(good)
    if good:
        expected = ring.rows(env_ids, positions)
        assert rows.tolist() == expected.tolist()
        # One after the other: of equal places the last wins.
        for row, number in zip(expected, numbers, strict=True):
            wanted[row] = number
    assert column.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("env_id", "position"), [(-1, 1), (2, 1), (0, -1), (0, 0)])
def test_no_number_of_an_unknown_row_is_stored(kernel, env_id, position):
    column, one = np.zeros(6, np.float32), np.ones(1, np.float32)
    places = np.array([env_id]), np.array([position])
    alive = np.array([1, 1]), np.array([3, 3])
    rows = np.zeros(1, np.int64)
    assert not kernel.store(column, *places, one, *alive, 3, 2, False, rows)
    assert not column.any()


@pytest.mark.skipif(C is twin, reason="the kernels in C are not built")
def test_a_batch_during_which_others_run_is_whole():
    flags, some = np.zeros(9, np.uint8), np.zeros(5000, np.int64)
    out, ends = np.empty((5000, 4), np.uint8), np.empty((2, 5000), bool)
    where = (flags, some, some, some[:1], 9, 1, False, BITS, False)
    C.take(np.arange(36, dtype=np.uint8), 4, *where, out, ends, False)
    assert (out == np.arange(4)).all()


CONCURRENT = """
import gc, sys, threading
import numpy as np
from mmreplay import kernels

take = kernels.choose("steps", "c").module.take
some, stride, waits = np.zeros(1000, np.int64), 8192, sys.argv[1] == "True"
record, ends = np.zeros(stride, np.uint8), np.empty((2, 1000), bool)
out = np.empty((1000, stride), np.uint8)
where = np.zeros(1, np.uint8), some, some, some[:1], 1, 1, False, bytes(2), False
gate, ran = threading.Lock(), []

def other():
    with gate:
        ran.append(True)

# From here on a thread runs only where the other one lets it. Others would where
# garbage is collected (files are closed), arrays are made, or a third one wants to run.
gc.disable()
sys.setswitchinterval(1000)
with gate:
    threading.Thread(target=other).start()
for _ in range(1000 if waits else 20):
    take(record, stride, *where, out, ends, waits)
    if ran:
        break
print(bool(ran))
"""


@pytest.mark.skipif(C is twin, reason="the kernels in C are not built")
@pytest.mark.parametrize("waits", [False, True])
def test_other_threads_run_while_a_short_batch_waits_for_pages(waits):
    told = subprocess.run(
        [sys.executable, "-c", CONCURRENT, str(waits)], capture_output=True, text=True, check=True
    ).stdout
    assert told == f"{waits}\n"


@pytest.mark.parametrize("kernel", KERNELS)
@given(ring=rings(), seed=st.integers(0, 1 << 32))
def test_what_lies_in_a_row_is_the_newest_below_the_stop(kernel, ring, seed):
    rng = random(seed)
    stops = rng.integers(0, 100, ring.num_envs)
    rows = np.arange(ring.num_rows)
    env_ids, positions = np.empty_like(rows), np.empty_like(rows)
    kernel.locate_positions(rows, stops, *ring.shape, env_ids, positions)
    assert ring.rows(env_ids, positions).tolist() == rows.tolist()
    ages = stops[env_ids] - positions
    assert ages.min() >= 1
    assert ages.max() <= ring.slots


@pytest.mark.parametrize("kernel", KERNELS)
@given(ring=rings(), seed=st.integers(0, 1 << 32), tries=st.integers(0, 200))
def test_legal_picks_are_the_first_legal_ones_of_all(kernel, ring, seed, tries):
    rng = random(seed)
    flags = rng.integers(0, 256, ring.num_rows).astype(np.uint8)
    table, ends = (legal_start_table(derived=True), np.arange(1, ring.num_envs + 1) * ring.slots)
    heads, after = rng.integers(0, 90, ring.num_envs), int(rng.integers(0, ring.slots))
    stretches, is_legal = (ends, ends * 5), (flags, *ring.shape, table, heads, after)
    picks, good = np.empty((2, tries), np.int64), np.empty(tries, bool)
    kernel.pick(seed, 1, *stretches, *picks)
    kernel.legal(*is_legal, *picks, good)
    found = np.empty((2, 70), np.int64)
    count = kernel.pick_legal(seed, 1, *stretches, *is_legal, tries, *found)
    assert count == min(70, np.count_nonzero(good))
    assert found[:, :count].tolist() == picks[:, good][:, :count].tolist()


@pytest.mark.parametrize("kernel", KERNELS)
@given(ring=rings(), seed=st.integers(0, 1 << 32), count=st.integers(0, 150))
def test_all_steps_are_legal_where_each_is(kernel, ring, seed, count):
    rng = random(seed)
    # A final row now and then.
    flags = (rng.random(ring.num_rows) < 0.02).astype(np.uint8) * FINAL
    heads = rng.integers(ring.slots, 60, ring.num_envs)
    firsts = heads - ring.slots
    is_legal = (flags, *ring.shape, legal_start_table(derived=True), heads, 1)
    env_ids = rng.integers(0, ring.num_envs, count)
    positions = firsts[env_ids] + rng.integers(0, ring.slots, count)
    if count and rng.random() < 0.3:
        strange = [(-1, 5), (ring.num_envs, 5), (0, -1), (0, 1 << 62), (0, heads[0])]
        strange.append((0, firsts[0] - 1))
        at = rng.integers(count)
        env_ids[at], positions[at] = strange[rng.integers(len(strange))]
    known = (env_ids >= 0) & (env_ids < ring.num_envs)
    inside = known & (positions >= 0)
    inside[known] &= positions[known] >= firsts[env_ids[known]]
    inside[known] &= positions[known] < heads[env_ids[known]]
    wanted, out = bool(inside.all()), np.empty(count, bool)
    if wanted:
        kernel.legal(*is_legal, env_ids, positions, out)
        wanted = bool(out.all())
    steps = env_ids, positions
    assert kernel.all_legal(*is_legal, firsts, heads, *steps) is wanted


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    masses=st.lists(st.sampled_from([0.0, 1e-300, 0.1, 1.0, 3.0]), min_size=1),
    num_batches=st.integers(1, 4),
    size=st.integers(0, 30),
    seed=st.integers(0, 99),
)
def test_points_are_divided_as_by_hand(kernel, masses, num_batches, size, seed):
    totals, rng = np.array(masses), random(seed)
    totals[rng.integers(len(totals))] = 1.0
    fractions = totals / totals.sum()
    edges = np.concatenate([[0.0], np.cumsum(fractions)])
    points = rng.random((num_batches, size))
    # Some lie on edges, and one as near to the end as it can.
    on_edges = rng.random(points.shape) < 0.3
    points[on_edges] = rng.choice(np.append(edges[:-1], 1 - 2**-53), on_edges.sum())
    points = np.minimum(points, 1 - 2**-53)
    wanted = [[[] for _ in range(num_batches)] for _ in totals]
    massive = np.flatnonzero(fractions)
    for batch, own in enumerate(points):
        for point in own:
            below = int((edges[1:-1] <= point).sum())
            number = min([*massive[massive >= below], massive[-1]])
            share = (point - edges[number]) / fractions[number]
            wanted[number][batch].append(min(max(share, 0.0), 1 - 2**-53))
    shares = np.empty(points.size)
    counts = np.empty((len(totals), num_batches), np.int64)
    kernel.divide(fractions, points, shares, counts)
    assert counts.tolist() == [[len(own) for own in each] for each in wanted]
    assert shares.tolist() == [share for each in wanted for own in each for share in own]


def refusals_of_divisions():
    halves, points, shares = np.full(2, 0.5), np.zeros((2, 3)), np.zeros(6)
    counts = np.zeros((2, 2), np.int64)
    yield "divide", (halves * 0, points, shares, counts)
    yield "divide", (halves[:0], points, shares, counts)
    yield "divide", (halves, points, shares, counts[:, :0].copy())
    yield "divide", (halves, points, shares[:5], counts)
    yield "divide", (halves, points.reshape(-1)[:5], shares[:5], counts)
    yield "divide", (halves, points, shares, counts.reshape(-1)[:3])


def refusals():
    flags, table, out = (np.zeros(6, np.uint8), legal_start_table(derived=True), np.empty(1, bool))
    one, ends = np.zeros(1, np.int64), np.empty((2, 1), bool)
    two, pair = np.zeros(2, np.int64), np.empty((1, 2), np.int64)
    ring = (3, 2, False)
    for env_id, position in ((-1, 0), (2, 0), (0, -1)):
        at = (np.array([env_id]), np.array([position]))
        yield "legal", (flags, *ring, table, two, 1, *at, out)
        yield "locate_rows", (flags, *at, two, *ring, BITS, True, pair, ends)
    yield "legal", (flags[:5], *ring, table, two, 1, one, one, out)
    yield "legal", (flags, *ring, table, two, 1, one, two, out)
    yield "legal", (flags, *ring, table[:9], two, 1, one, one, out)
    yield "legal", (flags, *ring, table, two, 1, two, two, out)
    yield "legal", (flags, *ring, table, one, 1, one, one, out)
    yield "legal", (flags, *ring, table, two, 3, one, one, out)
    yield "legal", (flags, *ring, table, two, -1, one, one, out)
    known = (flags, *ring, table, two, 1)
    yield "all_legal", (flags[:5], *known[1:], two, two, one, one)
    yield "all_legal", (*known, one, two, one, one)
    yield "all_legal", (*known, two, one, one, one)
    yield "all_legal", (*known, two, two, one, two)
    yield "locate_rows", (flags[:5], one, one, two, *ring, BITS, False, one, ends)
    yield "locate_rows", (flags, one, two, two, *ring, BITS, False, one, ends)
    yield "locate_rows", (flags, one, one, one, *ring, BITS, False, one, ends)
    yield "locate_rows", (flags, one, one, two, *ring, b"\2", False, one, ends)
    yield "locate_rows", (flags, one, one, two, *ring, BITS, False, np.arange(3), ends)
    yield "locate_positions", (np.array([6]), two, *ring, one, one)
    yield "locate_positions", (np.array([-1]), two, *ring, one, one)
    yield "locate_positions", (one, one, *ring, one, one)
    yield "locate_positions", (one, two, *ring, two, one)
    yield "pick", (1, 0, two, two, one, one)
    is_legal = (flags, *ring, table, two, 1)
    yield "pick_legal", (1, 0, two, two, *is_legal, 9, one, one)
    yield "pick_legal", (1, 0, two + 1, two, *is_legal, 9, one, two)
    yield "pick_legal", (1, 0, two + 9, two, *is_legal, 9, one, one)
    yield "pick_legal", (1, 0, two + 1, two + 9, flags[:5], *is_legal[1:], 9, one, one)
    yield "pick", (1, 0, np.ones(1, np.int64), two, one, one)
    yield "pick", (1, 0, np.ones(1, np.int64), one, one, two)


def refusals_of_columns():
    flags, ends = np.zeros(6, np.uint8), np.empty((2, 1), bool)
    one, two, ring = np.zeros(1, np.int64), np.zeros(2, np.int64), (3, 2, False)
    records, whole = np.zeros((6, 4), np.uint8), np.zeros((1, 4), np.uint8)
    at = (flags, one, one, two, *ring, BITS, False)
    yield "take", (records, 4, *at, whole[:, :3].copy(), ends, False)
    yield "take", (records, 4, *at, np.zeros((3, 4), np.uint8), ends, False)
    yield "take", (records[:5], 4, *at, whole, ends, False)
    yield "take", (records, 0, *at, whole, ends, False)
    yield "take", (records, 1 << 62, *at, whole, ends, False)
    yield "take", (records, 4, flags, one - 1, *at[2:], whole, ends, False)
    yield "take", (records, 4, flags[:5], *at[1:], whole, ends, False)
    yield "take", (records, 4, *at, whole, ends[:1].copy(), False)
    column, number, spans = np.zeros(6, np.float32), np.ones(1, np.float32), (two, two)
    yield "store", (column[:5], one, one, number, *spans, *ring, one)
    yield "store", (column, one, two, number, *spans, *ring, one)
    yield "store", (column, one, one, column[:2], *spans, *ring, one)
    yield "store", (column, one, one, number, one, two, *ring, one)
    yield "store", (column, one, one, number, two, one, *ring, one)
    yield "store", (column, one, one, number, *spans, *ring, two)


def refusals_of_splits():
    records, out = np.zeros((8, 10), np.uint8), np.zeros(40, np.uint8)
    whole = np.array([[2, 8, 0]], np.int64)
    for stride, first, count in ((0, 0, 1), (10, -1, 1), (10, 5, 4), (10, 0, -1)):
        yield "split", (records, stride, first, count, whole, out)
    for stride in (0, -1):
        yield "split", (records, stride, 0, 0, whole.reshape(-1)[:0], out)
    yield "split", (records, 10, 0, 6, whole, out)
    for part in ([-1, 2, 0], [2, 9, 0], [2, 0, 0], [2, 8, -1], [2, 8, 33], [2, 8]):
        yield "split", (records, 10, 0, 1, np.array(part, np.int64), out)


REFUSALS = [*refusals(), *refusals_of_columns(), *refusals_of_splits(), *refusals_of_divisions()]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("count", [0, 1, 300, 5000])
def test_records_are_split_into_columns(kernel, count):
    rng, first = random(count), 7
    widths = [1, 2, 3, 4, 8, 16, 20, 32, 64, 68]
    offsets = np.cumsum([1, *widths])
    stride = int(offsets[-1]) + 5
    table = rng.integers(0, 256, (first + count + 2, stride), np.uint8)
    places = np.cumsum([3, *(count * width + 5 for width in widths)])
    parts = np.stack([offsets[:-1], widths, places[:-1]], axis=1)
    out = np.full(int(places[-1]), 0xEE, np.uint8)
    kernel.split(table, stride, first, count, np.ascontiguousarray(parts), out)
    expected = np.full_like(out, 0xEE)
    for offset, width, place in parts.tolist():
        column = table[first : first + count, offset : offset + width]
        expected[place : place + count * width] = column.reshape(-1)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("name", "arguments"), REFUSALS)
def test_what_does_not_fit_is_refused(kernel, name, arguments):
    with pytest.raises(ValueError, match="must"):
        getattr(kernel, name)(*arguments)


@pytest.mark.skipif(C is twin, reason="the kernels in C are not built")
@pytest.mark.parametrize(
    "name",
    [
        "shares",
        "pick",
        "pick_legal",
        "legal",
        "all_legal",
        "divide",
        "locate_rows",
        "store",
        "take",
        "split",
        "locate_positions",
    ],
)
def test_c_counts_its_arguments_and_wants_arrays(name):
    with pytest.raises(TypeError, match=rf"{name} takes \d+ arguments, got 1"):
        getattr(C, name)(1)
    counts = {"shares": 3, "pick": 6, "legal": 10, "locate_rows": 11, "locate_positions": 7}
    counts |= {"take": 14, "store": 10, "split": 6, "pick_legal": 14}
    counts |= {"all_legal": 11, "divide": 4}
    count = counts[name]
    with pytest.raises(TypeError):
        getattr(C, name)(*["x"] * count)
