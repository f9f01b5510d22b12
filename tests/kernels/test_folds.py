"""Rows around steps, columns, sums and goals: C and numpy, against plain loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmreplay import kernels
from mmreplay.episodes import CUT, END, FINAL, START, TERMINATED, TRUNCATED
from mmreplay.kernels import steps as twin
from mmreplay.ring import Ring

C = kernels.choose("steps", "").module
KERNELS = [twin] if C is twin else [twin, C]
LARGEST = np.iinfo(np.int64).max


@st.composite
def rings(draw):
    layout = draw(st.sampled_from(["env_major", "time_major"]))
    slots, num_envs = draw(st.integers(2, 9)), draw(st.integers(1, 4))
    return Ring(slots, num_envs, layout, 0, 1, slots)


def sparse_flags(ring, rng):
    """Flags of which most rows have none, as rows in the middle of episodes."""
    flags = rng.integers(0, 256, ring.num_rows).astype(np.uint8)
    flags[rng.random(ring.num_rows) < 0.6] = 0
    return flags


@st.composite
def wanted(draw, steps, maximum=9):
    """Columns and marks as a plan lays them out, and what they stand for."""
    columns, marks, groups = [], [], []
    for _ in range(draw(st.integers(0, 4))):
        start, width = len(columns), draw(st.integers(1, 3))
        beyond = draw(st.booleans())
        group = [
            (draw(st.integers(0, steps)), draw(st.integers(0, maximum)), beyond)
            for _ in range(width)
        ]
        columns += [(*one, start, width, at) for at, one in enumerate(group)]
        for bit in draw(st.lists(st.sampled_from([TERMINATED, TRUNCATED]), max_size=2)):
            first = len(marks)
            marks += [(start + at, bit, first, width, at) for at in range(width)]
        groups.append((start, width, group))
    return columns, marks, groups


def flag(flags, ring, heads, env_id, position):
    """Flags of a position, 0 where nothing is written."""
    if not 0 <= position < heads[env_id]:
        return 0
    return int(flags[ring.row(env_id, position)])


def around(flags, ring, heads, before, steps, env_id, position):
    """First, last, following and whether it terminates, row by row."""
    first = position
    while first > max(0, position - before):
        if flag(flags, ring, heads, env_id, first) & START:
            break
        first -= 1
    last = position
    while last < position + steps - 1:
        after = flag(flags, ring, heads, env_id, last + 1)
        if flag(flags, ring, heads, env_id, last) & END or after & (START | FINAL):
            break
        last += 1
    here, after = (flag(flags, ring, heads, env_id, p) for p in (last, last + 1))
    terminated, bare = bool(here & TERMINATED), not after & FINAL
    following = last + 1
    if bare and terminated:
        following = last
    elif bare and (here & END or after & START):
        following = position
    return first, last, following, terminated


@pytest.mark.parametrize("kernel", KERNELS)
@given(ring=rings(), seed=st.integers(0, 1 << 32), data=st.data())
def test_rows_around_steps_are_those_found_row_by_row(kernel, ring, seed, data):
    rng = np.random.default_rng(seed)
    flags, count = sparse_flags(ring, rng), data.draw(st.sampled_from([0, 1, 20, 300]))
    before = data.draw(st.integers(0, ring.slots - 1))
    steps = data.draw(st.integers(1, ring.slots - 1))
    columns, marks, _ = data.draw(wanted(steps, ring.slots))
    env_ids = rng.integers(0, ring.num_envs, count)
    positions = rng.integers(0, 40, count)
    heads = rng.integers(0, 45, ring.num_envs)
    out = np.full((3 + len(columns), count), -1)
    ends = np.empty((1 + len(marks), count), bool)
    kernel.fold_steps(
        flags,
        env_ids,
        positions,
        heads,
        *ring.shape,
        before,
        steps,
        np.array(columns, np.int64),
        np.array(marks, np.int64),
        out,
        ends,
    )

    places = np.empty((len(columns), count), np.int64)
    for at, (env_id, position) in enumerate(zip(env_ids.tolist(), positions.tolist(), strict=True)):
        told = around(flags, ring, heads, before, steps, env_id, position)
        assert (*out[:3, at].tolist(), bool(ends[0, at])) == told
        first, last, following, _ = told
        for which, (ahead, back, beyond, *_) in enumerate(columns):
            cap = following if beyond else last
            places[which, at] = max(min(position + ahead, cap) - back, first)
    for which, (_, _, _, start, width, at) in enumerate(columns):
        rows = out[3 + start : 3 + start + width].reshape(-1)[at::width]
        assert rows.tolist() == ring.rows(env_ids, places[which]).tolist()
    for column, bit, start, width, at in marks:
        found = ends[1 + start : 1 + start + width].reshape(-1)[at::width]
        for told, env_id, position_at in zip(
            found.tolist(), env_ids.tolist(), places[column].tolist(), strict=True
        ):
            here = flag(flags, ring, heads, env_id, position_at) & bit
            after = flag(flags, ring, heads, env_id, position_at + 1) & CUT
            assert told == bool(here or (bit == TRUNCATED and after))


@pytest.mark.parametrize("kernel", KERNELS)
@given(ring=rings(), seed=st.integers(0, 1 << 32), data=st.data())
def test_one_call_does_what_four_do(kernel, ring, seed, data):
    rng = np.random.default_rng(seed)
    flags, count = sparse_flags(ring, rng), data.draw(st.sampled_from([0, 1, 33, 300]))
    before = data.draw(st.integers(0, ring.slots - 1))
    steps = data.draw(st.integers(1, ring.slots - 1))
    columns, marks, groups = data.draw(wanted(steps, ring.slots))
    # Columns of the steps folded, which sums are of; few columns are asked for early.
    first = len(columns)
    columns += [(ahead, 0, False, first, steps, ahead) for ahead in range(steps)]
    stride = data.draw(st.sampled_from([40, 168, 3000]))
    records = rng.integers(0, 256, (ring.num_rows, stride)).astype(np.uint8)
    numbers = rng.standard_normal((ring.num_rows, 4)).astype(np.float32)
    records[:, :16] = numbers.view(np.uint8)
    end, parts, summed = 3, [], []
    for _ in range(data.draw(st.integers(0, 4))):
        nbytes = data.draw(st.integers(1, stride))
        offset = data.draw(st.integers(0, stride - nbytes))
        start, width, _ = data.draw(st.sampled_from([(first, steps, ()), *groups]))
        parts.append((offset, nbytes, start, width, end))
        end += count * width * nbytes + 5
    for offset, values, wide, wide_out in ((0, 2, 4, 4), (4, 1, 4, 8), (0, 2, 8, 4)):
        if data.draw(st.booleans()):
            summed.append((offset, values, wide, wide_out, first, end))
            end += count * values * wide_out + 1
    discount = end if data.draw(st.booleans()) else -1
    fields = np.full(end + 4 * count, 0xEE, np.uint8)
    powers = 0.9 ** np.arange(steps + 1.0)
    env_ids = rng.integers(0, ring.num_envs, count)
    positions = rng.integers(0, 40, count)
    heads = rng.integers(0, 45, ring.num_envs)
    where = (
        flags,
        env_ids,
        positions,
        heads,
        *ring.shape,
        before,
        steps,
        np.array(columns, np.int64),
        np.array(marks, np.int64),
    )
    out = np.empty((2, 3 + len(columns), count), np.int64)
    told = np.empty((2, 1 + len(marks), count), bool)
    kernel.fold_steps(*where, out[0], told[0])
    expected, last = fields.copy(), out[0, 1]
    copied = np.array(parts, np.int64)
    kernel.columns(records, stride, out[0, 3:], count, copied, expected, False)
    for offset, values, wide, wide_out, start, position_at in summed:
        rows = out[0, 3 + start : 3 + start + steps].reshape(-1)
        each = np.ascontiguousarray(records[rows, offset : offset + values * wide])
        total = np.empty(count * values * wide_out, np.uint8)
        kernel.weighted_sums(positions, last, powers[:-1], each, wide, total, wide_out)
        expected[position_at : position_at + total.size] = total
    if discount >= 0:
        factors = np.empty(count, np.float32)
        kernel.discounts(positions, last, powers, told[0, 0], factors)
        expected[discount:] = factors.view(np.uint8)

    kernel.fold_fields(
        records,
        stride,
        *where,
        out[1],
        told[1],
        copied,
        np.array(summed, np.int64),
        powers,
        discount,
        fields,
        seed % 2 == 1,
    )
    assert np.array_equal(out[0], out[1])
    assert np.array_equal(told[0], told[1])
    assert np.array_equal(fields, expected)


@pytest.mark.parametrize("kernel", KERNELS)
@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_columns_hold_the_fields_of_their_rows(kernel, seed, data):
    rng = np.random.default_rng(seed)
    count = data.draw(st.sampled_from([0, 1, 7, 100]))
    stride, num_rows = data.draw(st.integers(1, 700)), 13
    records = rng.integers(0, 256, (num_rows, stride)).astype(np.uint8)
    total = data.draw(st.integers(1, 6))
    rows = rng.integers(0, num_rows, (total, count))
    parts, end = [], 3
    for _ in range(data.draw(st.integers(0, 20))):
        nbytes = data.draw(st.integers(1, stride))
        offset = data.draw(st.integers(0, stride - nbytes))
        start = data.draw(st.integers(0, total - 1))
        width = data.draw(st.integers(1, total - start))
        parts.append((offset, nbytes, start, width, end))
        end += count * width * nbytes + 5
    out = np.full(end, 0xEE, np.uint8)
    expected = out.copy()
    kernel.columns(records, stride, rows, count, np.array(parts, np.int64), out, seed % 2 == 1)
    for offset, nbytes, start, width, position_at in parts:
        some = rows[start : start + width].reshape(-1)
        column = records[some, offset : offset + nbytes].reshape(-1)
        expected[position_at : position_at + column.size] = column
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("wide", [1, 2])
@given(ring=rings(), seed=st.integers(0, 1 << 32), count=st.integers(0, 600))
def test_fields_are_those_of_the_records_read(kernel, wide, ring, seed, count):
    rng, bits = np.random.default_rng(seed), bytes([TERMINATED, TRUNCATED])
    flags = rng.integers(0, 64, ring.num_rows).astype(np.uint8)
    records = rng.integers(0, 256, (ring.num_rows, 40)).astype(np.uint8)
    steps = (
        rng.integers(0, ring.num_envs, count),
        rng.integers(0, 40, count),
        rng.integers(0, 45, ring.num_envs),
    )
    where = (flags, *steps, *ring.shape, bits, True)
    whole, wanted = np.empty((count, wide, 40), np.uint8), np.empty((2, count), bool)
    kernel.take(records, 40, *where, whole, wanted, False)
    fields = [(0, 4, 0), (4, 17, wide - 1), (21, 8, 0), (29, 11, wide - 1)]
    parts, end = [], 0
    for offset, nbytes, start in fields:
        parts.append((offset, nbytes, start, 1, end))
        end += count * nbytes
    out, ends = np.empty(end, np.uint8), np.empty((2, count), bool)
    kernel.take_fields(
        records, 40, *where, wide, np.array(parts, np.int64), out, ends, seed % 2 == 1
    )
    assert ends.tolist() == wanted.tolist()
    for offset, nbytes, start, _, position_at in parts:
        column = out[position_at : position_at + count * nbytes].reshape(count, nbytes)
        assert np.array_equal(column, whole[:, start, offset : offset + nbytes])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("out", [np.float32, np.float64])
@given(
    seed=st.integers(0, 1 << 32),
    length=st.integers(1, 12),
    width=st.integers(0, 3),
    gamma=st.floats(0, 1),
)
def test_sums_are_those_of_adding_one_by_one_to_the_bit(dtype, out, seed, length, width, gamma):
    rng, count = np.random.default_rng(seed), 20
    values = (rng.standard_normal((count, length, width)) * 1e3).astype(dtype)
    odd = [np.inf, -np.inf, np.nan, -0.0, np.finfo(dtype).max]
    some = rng.random(values.shape) < 0.1
    values[some] = rng.choice(odd, int(some.sum()))
    positions = rng.integers(0, 1000, count)
    last = positions + rng.integers(0, length, count)
    powers = gamma ** np.arange(length + 1.0)
    expected = np.zeros((count, width))
    with np.errstate(all="ignore"):
        for step in range(count):
            for at in range(int(last[step] - positions[step]) + 1):
                wide = values[step, at].astype(np.float64)
                expected[step] = expected[step] + powers[at] * wide
        expected = expected.astype(out)
    told = []
    for kernel in KERNELS:
        sums = np.empty((count, width), out)
        kernel.weighted_sums(
            positions, last, powers[:-1], values, values.itemsize, sums, sums.itemsize
        )
        # A NaN's sign means nothing, and processors choose it as they like.
        assert np.array_equal(np.isnan(sums), np.isnan(expected))
        told.append(np.where(np.isnan(sums), 0, sums).tobytes())
    assert set(told) == {np.where(np.isnan(expected), 0, expected).tobytes()}


@pytest.mark.parametrize("kernel", KERNELS)
@given(seed=st.integers(0, 1 << 32), gamma=st.floats(0, 1))
def test_discounts_are_powers_but_for_what_terminated(kernel, seed, gamma):
    rng = np.random.default_rng(seed)
    positions, steps = rng.integers(0, 99, 30), rng.integers(0, 4, 30)
    terminated, out = rng.random(30) < 0.3, np.empty(30, np.float32)
    powers = gamma ** np.arange(5.0)
    kernel.discounts(positions, positions + steps, powers, terminated, out)
    expected = np.where(terminated, 0, powers[steps + 1]).astype(np.float32)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kernel", KERNELS)
@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_episodes_are_located_as_by_counting(kernel, seed, data):
    rng, num_envs = np.random.default_rng(seed), data.draw(st.integers(1, 5))
    lengths = rng.integers(0, 9, num_envs)
    # Each queue has room of its own, which is not all in use.
    firsts = np.cumsum([3, *(lengths[:-1] + 4)])
    queues = rng.integers(0, 100, (2, int((lengths + 5).sum()) + 3))
    for first, length in zip(firsts, lengths, strict=True):
        queues[:, first : first + length].sort(axis=1)
    alive, seen = rng.integers(0, 9, num_envs), rng.integers(100, 200, num_envs)
    newest = rng.integers(0, 64, num_envs).astype(np.uint8)
    env_ids, positions = rng.integers(0, num_envs, 40), rng.integers(0, 110, 40)
    begin, end = np.empty((2, 40), np.int64)
    kernel.locate(
        queues, firsts, firsts + lengths, alive, seen, newest, env_ids, positions, begin, end
    )
    for at, (env_id, position) in enumerate(zip(env_ids, positions, strict=True)):
        first = firsts[env_id]
        starts, closed = queues[:, first : first + lengths[env_id]]
        passed = int((starts <= position).sum())
        assert begin[at] == (starts[passed - 1] if passed else alive[env_id])
        final = bool(newest[env_id] & FINAL)
        last = passed == len(starts)
        assert end[at] == (seen[env_id] - final if last else closed[passed])


@pytest.mark.parametrize("kernel", KERNELS)
@given(ring=rings(), seed=st.integers(0, 1 << 32))
def test_ends_without_a_final_row_are_one_step_less(kernel, ring, seed):
    rng = np.random.default_rng(seed)
    flags = sparse_flags(ring, rng)
    env_ids, ends = rng.integers(0, ring.num_envs, 30), rng.integers(0, 40, 30)
    heads, found = rng.integers(0, 45, ring.num_envs), ends.copy()
    kernel.known(flags, *ring.shape, heads, env_ids, found)
    final = [
        bool(flag(flags, ring, heads, int(e), int(p)) & FINAL)
        for e, p in zip(env_ids, ends, strict=True)
    ]
    assert found.tolist() == (ends - ~np.array(final)).tolist()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", [0, 1, 2])
@given(
    key=st.integers(0, (1 << 64) - 1),
    stream=st.integers(0, 9),
    ratio=st.floats(0, 1),
    seed=st.integers(0, 1 << 32),
)
def test_goals_follow_from_numpys_numbers(kernel, kind, key, stream, ratio, seed):
    rng = np.random.default_rng(seed)
    begins, lengths = rng.integers(0, 50, 33), rng.integers(1, 20, 33)
    starts = begins + (lengths * rng.random(33)).astype(np.int64)
    stops, lasts = begins + lengths, starts + rng.integers(0, 4, 33)
    chosen, (rows, later) = np.empty(33, bool), np.empty((2, 33), np.int64)
    kernel.hindsight(key, stream, ratio, kind, begins, stops, starts, lasts, chosen, rows, later)
    philox = np.random.Philox(key=key + (stream << 64))
    chance, share = np.random.Generator(philox).random((2, 33)).tolist()

    def position_at(first, stop, share):
        length = max(stop - first, 1)
        return first + min(int(share * length), length - 1)

    for at in range(33):
        assert chosen[at] == (chance[at] < ratio and lasts[at] < stops[at])
        if not chosen[at]:
            assert rows[at] == later[at] == starts[at]
            continue
        assert later[at] == position_at(starts[at], stops[at], share[at])
        first = begins[at] if kind == 2 else starts[at]
        assert rows[at] == position_at(first, stops[at], 1.0 if kind == 1 else share[at])


@pytest.mark.parametrize("kernel", KERNELS)
@given(seed=st.integers(0, 1 << 32), shape=st.tuples(st.integers(1, 4), st.integers(0, 30)))
def test_rows_are_replaced_and_the_others_stay(kernel, seed, shape):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (25, *shape)).astype(np.uint8)
    which = rng.integers(0, 25, 9)
    for some in (rng.random((9, *shape)), rng.random((9, *shape[1:]))):
        new, out = (some * 256).astype(np.uint8), values.copy()
        kernel.replace(out, 25, which, new)
        expected = values.copy()
        for row, one in zip(which, new, strict=True):
            expected[row] = one
        assert np.array_equal(out, expected)


def refusals_of_folds():
    flags, one, two = (np.zeros(6, np.uint8), np.zeros(1, np.int64), np.zeros(2, np.int64))
    ring, none = (3, 2, False), np.zeros(0, np.int64)
    three, end = np.zeros((3, 1), np.int64), np.empty(1, bool)
    steps = (flags, one, one, two)
    good = (*steps, *ring, 1, 2, none, none, three, end)
    for env_id, position in ((-1, 0), (2, 0), (0, -1), (0, LARGEST), (0, LARGEST - 2)):
        at = (flags, np.array([env_id]), np.array([position]), two)
        yield "fold_steps", (*at, *good[4:])
    yield "fold_steps", (flags[:5], *good[1:])
    yield "fold_steps", (flags, two, *good[2:])
    yield "fold_steps", (*good[:3], one, *good[4:])
    for window in ((-1, 2), (3, 2), (1, 0), (1, 3)):
        yield "fold_steps", (*steps, *ring, *window, none, none, three, end)
    yield "fold_steps", (*good[:11], np.zeros((4, 1), np.int64), end)
    yield "fold_steps", (*good[:12], np.empty(2, bool))
    four, mark = np.zeros((4, 1), np.int64), np.empty(2, bool)
    for column in (
        [-1, 0, 0, 0, 1, 0],
        [3, 0, 0, 0, 1, 0],
        [0, -1, 0, 0, 1, 0],
        [0, 4, 0, 0, 1, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, -1, 1, 0],
        [0, 0, 0, 0, 2, 0],
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 1, -1],
        [0, 0, 0],
    ):
        given = np.array(column, np.int64)
        yield "fold_steps", (*good[:9], given, none, four, end)
    fine = np.array([0, 0, 0, 0, 1, 0], np.int64)
    for one_mark in (
        [1, 2, 0, 1, 0],
        [-1, 2, 0, 1, 0],
        [0, 256, 0, 1, 0],
        [0, -1, 0, 1, 0],
        [0, 2, 1, 1, 0],
        [0, 2, 0, 2, 0],
        [0, 2, 0, 1, 1],
        [0, 2, 0],
    ):
        given = np.array(one_mark, np.int64)
        yield "fold_steps", (*good[:9], fine, given, four, mark)


def refusals_of_fold_fields():
    flags, one, two = np.zeros(6, np.uint8), np.zeros(1, np.int64), np.zeros(2, int)
    records, fields = np.zeros((6, 8), np.uint8), np.zeros(16, np.uint8)
    columns = np.array([0, 0, 0, 0, 2, 0, 1, 0, 0, 0, 2, 1], np.int64)
    none, out = np.zeros(0, np.int64), np.zeros((5, 1), np.int64)
    part, added = np.array([0, 4, 0, 2, 0]), np.array([0, 1, 4, 4, 0, 8])
    where = (flags, one, one, two, 3, 2, False, 1, 2, columns, none, out)
    ends, powers = np.empty(1, bool), np.ones(3)
    good = (records, 8, *where, ends, part, added, powers, 12, fields, False)
    for at, wrong in (
        (0, records[:5]),
        (1, 0),
        (1, 6),
        (3, one - 1),
        (4, one - 1),
        (4, two),
        (9, -1),
        (9, 3),
        (11, columns[[0, 1, 2, 3, 4, 5] * 2]),
        (11, columns[:6]),
        (11, columns[[6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5]]),
        (13, out[:4].copy()),
        (14, np.empty(2, bool)),
        (15, part[:4].copy()),
        (16, added[:5].copy()),
        (17, np.ones(2)),
        (18, 13),
        (19, fields[:15].copy()),
    ):
        yield "fold_fields", (*good[:at], wrong, *good[at + 1 :])
    for wrong in (
        [-1, 4, 0, 2, 0],
        [5, 4, 0, 2, 0],
        [0, 0, 0, 2, 0],
        [0, 4, 1, 2, 0],
        [0, 4, -1, 2, 0],
        [0, 4, 0, 3, 0],
        [0, 4, 0, 0, 0],
        [0, 4, 0, 2, 9],
        [0, 4, 0, 2, -1],
        [0, 4, LARGEST, 1, 0],
    ):
        yield "fold_fields", (*good[:15], np.array(wrong, np.int64), *good[16:])
    for wrong in (
        [-1, 1, 4, 4, 0, 8],
        [5, 1, 4, 4, 0, 8],
        [0, 0, 4, 4, 0, 8],
        [0, 3, 4, 4, 0, 8],
        [0, 1, 2, 4, 0, 8],
        [0, 1, 4, 2, 0, 8],
        [0, 1, 4, 4, 1, 8],
        [0, 1, 4, 4, -1, 8],
        [0, 1, 4, 4, 0, 13],
        [0, 1, 4, 4, 0, -1],
        [0, LARGEST, 4, 4, 0, 8],
    ):
        yield "fold_fields", (*good[:16], np.array(wrong, np.int64), *good[17:])


def refusals_of_columns():
    records, out = np.zeros((6, 4), np.uint8), np.zeros(8, np.uint8)
    rows, part = np.zeros((1, 2), np.int64), np.array([0, 4, 0, 1, 0], np.int64)
    yield "columns", (records, 4, np.array([[0, 6]]), 2, part, out, False)
    yield "columns", (records, 4, np.array([[-1, 0]]), 2, part, out, False)
    yield "columns", (records, 0, rows, 2, part, out, False)
    yield "columns", (records, 5, rows, 2, part, out, False)
    yield "columns", (records, 4, rows, -1, part, out, False)
    yield "columns", (records, 4, rows, 2, part[:4].copy(), out, False)
    for wrong in (
        [-1, 4, 0, 1, 0],
        [1, 4, 0, 1, 0],
        [0, 0, 0, 1, 0],
        [0, 4, 1, 1, 0],
        [0, 4, -1, 1, 0],
        [0, 4, 0, 2, 0],
        [0, 4, 0, 0, 0],
        [0, 4, 0, 1, 1],
        [0, 4, 0, 1, -1],
        [0, 4, 0, 1, 9],
        [0, 4, LARGEST, 1, 0],
    ):
        given = np.array(wrong, np.int64)
        yield "columns", (records, 4, rows, 2, given, out, False)
    flags, ends = np.zeros(6, np.uint8), np.empty((2, 1), bool)
    one, two, bits = np.zeros(1, np.int64), np.zeros(2, np.int64), b"\2\4"
    at = (flags, one, one, two, 3, 2, False, bits, False)
    yield "take_fields", (records, 4, *at, 3, part, out, ends, False)
    yield "take_fields", (records[:5], 4, *at, 1, part, out, ends, False)
    yield "take_fields", (records, 4, *at, 1, part[:4].copy(), out, ends, False)
    yield ("take_fields", (records, 4, flags, one - 1, *at[2:], 1, part, out, ends, False))
    yield "take_fields", (records, 4, *at, 1, part, out, ends[:1].copy(), False)
    for wrong in ([0, 4, 1, 1, 0], [0, 4, 0, 2, 0], [0, 5, 0, 1, 0], [0, 4, 0, 1, 5]):
        given = np.array(wrong, np.int64)
        yield "take_fields", (records, 4, *at, 1, given, out, ends, False)


def refusals_of_sums():
    one, two, powers = np.zeros(1, np.int64), np.zeros(2, np.int64), np.ones(2)
    values, out = np.zeros((1, 2), np.float32), np.zeros(1, np.float32)
    yield "weighted_sums", (one, two, powers, values, 4, out, 4)
    yield "weighted_sums", (one, one + 2, powers, values, 4, out, 4)
    yield "weighted_sums", (one, one - 1, powers, values, 4, out, 4)
    yield "weighted_sums", (one, one, powers[:0], values, 4, out, 4)
    yield "weighted_sums", (one, one, powers, values, 2, out, 4)
    yield "weighted_sums", (one, one, powers, values, 4, out, 2)
    yield "weighted_sums", (one, one, powers, values, 8, out, 4)
    yield "weighted_sums", (one, one, powers, out, 4, out, 4)
    yield "weighted_sums", (one[:0], one[:0], powers, values, 4, out, 4)
    ends = np.zeros(1, bool)
    yield "discounts", (one, two, powers, ends, out)
    yield "discounts", (one, one + 1, powers, ends, out)
    yield "discounts", (one, one - 1, powers, ends, out)
    yield "discounts", (one, one, powers, ends[:0], out)
    yield "discounts", (one, one, powers, ends, values)


def refusals_of_goals():
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    queues, last, flags = np.zeros((2, 3), np.int64), np.zeros(1, np.uint8), b"\0" * 6
    located = (queues, one, one + 3, one, one, last, one, one, one.copy(), one.copy())
    for at, wrong in enumerate(
        [queues.reshape(-1)[:5], two, two, two, two, b"\0\0", two, two, two, two]
    ):
        yield "locate", (*located[:at], wrong, *located[at + 1 :])
    yield "locate", (queues, one - 1, *located[2:])
    yield "locate", (queues, one, one + 4, *located[3:])
    yield "locate", (queues, one + 3, one, *located[3:])
    yield "locate", (*located[:6], one + 1, *located[7:])
    flags = np.zeros(6, np.uint8)
    yield "known", (flags[:5], 3, 2, False, two, one, one)
    yield "known", (flags, 3, 2, False, one, one, one)
    yield "known", (flags, 3, 2, False, two, two, one)
    yield "known", (flags, 3, 2, False, two, one + 2, one)
    yield "known", (flags, 3, 2, False, two, one, one - 1)
    chosen = np.empty(1, bool)
    goals = (one, one, one, one, chosen, one.copy(), one.copy())
    for at in range(7):
        wrong = np.zeros(2, bool) if at == 4 else two
        yield "hindsight", (0, 0, 0.5, 0, *goals[:at], wrong, *goals[at + 1 :])
    for at in range(3):
        yield "hindsight", (0, 0, 0.5, 0, *goals[:at], one - 1, *goals[at + 1 :])
    out, some = np.zeros(6, np.uint8), np.zeros(2, np.uint8)
    yield "replace", (out, -1, one, some)
    yield "replace", (out, 0, one[:0], some[:0])
    yield "replace", (out, 4, one, some)
    yield "replace", (out, 3, one[:0], some)
    yield "replace", (out, 3, one, out[:4])
    yield "replace", (out, 3, one, some[:0])
    yield "replace", (out, 3, one + 3, some)
    yield "replace", (out, 3, one - 1, some)


REFUSALS = [
    *refusals_of_folds(),
    *refusals_of_fold_fields(),
    *refusals_of_columns(),
    *refusals_of_sums(),
    *refusals_of_goals(),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("name", "arguments"), REFUSALS)
def test_what_does_not_fit_is_refused(kernel, name, arguments):
    with pytest.raises(ValueError, match="must"):
        getattr(kernel, name)(*arguments)


@pytest.mark.skipif(C is twin, reason="the kernels in C are not built")
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("fold_steps", 13),
        ("fold_fields", 21),
        ("columns", 7),
        ("weighted_sums", 7),
        ("discounts", 5),
        ("take_fields", 16),
        ("locate", 10),
        ("known", 7),
        ("hindsight", 11),
        ("replace", 4),
    ],
)
def test_c_counts_its_arguments_and_wants_arrays(name, count):
    with pytest.raises(TypeError, match=rf"{name} takes {count} arguments, got 1"):
        getattr(C, name)(1)
    with pytest.raises(TypeError):
        getattr(C, name)(*["x"] * count)
