"""Trees, in C and in numpy, against brute force over an array."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmreplay import kernels
from mmreplay.kernels import tree as twin
from mmreplay.samplers.sum_tree import SegmentTree, SumTree

SIZES = [1, 2, 3, 7, 8, 9, 15, 16, 17, 128, 255, 256, 257, 4096, 4097]
C = kernels.choose("tree", "")


@pytest.fixture(params=["c", "numpy"], autouse=True)
def kernel(request, monkeypatch):
    """Each test runs over both kernels."""
    if request.param == "c" and C.runs != "c":
        pytest.skip(C.why)
    monkeypatch.setenv("MMREPLAY_KERNELS", request.param)
    return request.param


def whole_numbers(rng, count, zeros=0.3):
    """Whole values, whose sums are exact in any order; some of them zero."""
    return rng.integers(1, 9, count) * (rng.random(count) >= zeros) * 1.0


def filled(values):
    tree = SumTree(len(values))
    tree.fill(values)
    return tree


def test_the_kernel_that_was_asked_for_runs(kernel):
    name = SumTree(1)._tree._kernel.__name__
    assert name == {"c": "mmreplay.kernels._tree", "numpy": "mmreplay.kernels.tree"}[kernel]


@pytest.mark.parametrize("capacity", SIZES)
@pytest.mark.parametrize("batch", [1, 5, 300])
def test_sets_and_finds_agree_with_an_array(capacity, batch, rng):
    tree, expected = SumTree(capacity), np.zeros(capacity)
    for _ in range(8):
        indices, values = rng.integers(capacity, size=batch), whole_numbers(rng, batch)
        tree.set(indices, values)
        for index, value in zip(indices, values, strict=True):
            expected[index] = value
        assert tree.leaves.tolist() == expected.tolist()
        assert tree.get(indices).tolist() == expected[indices].tolist()
        assert tree.total == expected.sum()
        assert tree.nnz == np.count_nonzero(expected)
        if tree.total:
            sums = rng.random(batch) * tree.total
            found, values = tree.draw(sums)
            bounds = np.cumsum(expected)
            assert found.tolist() == np.searchsorted(bounds, sums, "right").tolist()
            assert values.tolist() == expected[found].tolist()


@pytest.mark.parametrize("capacity", SIZES)
def test_every_boundary_falls_on_the_next_leaf_that_is_not_zero(capacity, rng):
    values = whole_numbers(rng, capacity)
    values[rng.integers(capacity)] = 1
    tree = filled(values)
    bounds = np.concatenate([[0], np.cumsum(values)])
    inside = bounds[bounds < tree.total]
    expected = np.searchsorted(bounds[1:], inside, "right")
    assert tree.find(inside).tolist() == expected.tolist()
    below = np.nextafter(bounds[1:], 0)[values > 0]
    assert tree.find(below).tolist() == np.flatnonzero(values).tolist()


@pytest.mark.parametrize("capacity", SIZES)
@pytest.mark.parametrize(("op", "identity"), [("min", None), ("max", None), ("max", 0.0)])
def test_minima_and_maxima_agree_with_an_array(capacity, op, identity, rng):
    tree = SegmentTree(capacity, op, identity)
    reduce = {"min": np.min, "max": np.max}[op]
    expected = np.full(capacity, tree.identity)
    assert tree.summary == tree.identity
    for _ in range(8):
        indices = rng.integers(capacity, size=5)
        values = rng.normal(size=5) if identity is None else rng.random(5)
        tree.set(indices, values)
        for index, value in zip(indices, values, strict=True):
            expected[index] = value
        assert tree.summary == reduce(expected)
        assert tree.leaves.tolist() == expected.tolist()
    tree.fill(expected[::-1].copy())
    assert tree.summary == reduce(expected)


@pytest.mark.parametrize("capacity", [1, 9, 257, 5000])
def test_setting_leaf_by_leaf_gives_the_nodes_that_filling_gives(capacity, rng):
    values = rng.random(capacity) * 10.0 ** rng.integers(-200, 200, capacity)
    values[rng.random(capacity) < 0.3] = 0
    at_once, by_batch = filled(values), SumTree(capacity)
    order = rng.permutation(capacity)
    for part in np.array_split(order, max(1, capacity // 37)):
        by_batch.set(part, rng.random(len(part)))
        by_batch.set(part, values[part])
    assert by_batch._tree._nodes.tobytes() == at_once._tree._nodes.tobytes()


def test_rounding_never_leads_to_a_leaf_of_zero(rng):
    """Values of all magnitudes, looked for at every bound and next to it."""
    for _ in range(50):
        values = 10.0 ** rng.uniform(-20, 20, 300)
        values[rng.random(300) < 0.5] = 0
        values[rng.integers(300)] = 1e-300
        tree = filled(values)
        bounds = np.cumsum(values)
        near = [np.nextafter(bounds, side) for side in (0, np.inf)]
        sums = np.concatenate([bounds, *near, rng.random(500) * tree.total, [0]])
        found, drawn = tree.draw(np.minimum(sums, tree.total))
        assert (drawn > 0).all()
        assert drawn.tolist() == values[found].tolist()


def test_what_is_found_is_where_the_sum_falls_but_for_rounding(rng):
    values = rng.random(100_000)
    tree, bounds = filled(values), np.cumsum(values)
    sums = rng.random(2000) * tree.total
    found = tree.find(sums)
    # 1e5 additions of half a unit in the last place each, of sums up to 5e4.
    slack = 1e5 * np.spacing(5e4)
    assert (sums < bounds[found] + slack).all()
    assert (sums >= bounds[found] - values[found] - slack).all()


def test_leaves_are_drawn_in_proportion_to_their_values(rng):
    values = whole_numbers(rng, 40)
    tree = filled(values)
    sums = (np.arange(10_000) + 0.5) / 10_000 * tree.total
    counts = np.bincount(tree.find(sums), minlength=40)
    # Evenly spaced sums: each leaf's share is exact to one draw at either end.
    assert np.abs(counts - 10_000 * values / tree.total).max() <= 1


@given(data=st.data())
def test_any_calls_agree_with_an_array(data):
    capacity = data.draw(st.integers(1, 300))
    tree, expected = SumTree(capacity), np.zeros(capacity)
    pair = st.tuples(st.integers(0, capacity - 1), st.integers(0, 1000))
    for pairs in data.draw(st.lists(st.lists(pair, max_size=40), max_size=6)):
        tree.set([i for i, _ in pairs], [v for _, v in pairs])
        for index, value in pairs:
            expected[index] = value
        assert tree.leaves.tolist() == expected.tolist()
        total = int(expected.sum())
        assert (tree.total, tree.nnz) == (total, np.count_nonzero(expected))
        if total:
            sums = np.unique(np.linspace(0, total - 1, 50).astype(int))
            bounds = np.cumsum(expected)
            answers = np.searchsorted(bounds, sums, "right")
            assert tree.find(sums).tolist() == answers.tolist()


@pytest.mark.parametrize("bad", [-1, 5, 2**40, -(2**62)])
def test_an_index_outside_the_tree_is_refused_and_nothing_changes(bad):
    tree = filled(np.arange(5.0))
    with pytest.raises(IndexError, match=rf"tree index must be in \[0, 4\], got {bad}"):
        tree.set([1, bad], [9.0, 9.0])
    with pytest.raises(IndexError, match=rf"tree index must be in \[0, 4\], got {bad}"):
        tree.get([1, bad])
    assert tree.leaves.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bad", [-1.0, -1e-300, np.nan, np.inf, -np.inf, 1e308])
def test_a_value_that_no_sum_can_hold_is_refused_and_nothing_changes(bad):
    tree = filled(np.arange(5.0))
    with pytest.raises(ValueError, match="tree leaf 2 must be at least 0 and at most"):
        tree.set([1, 2], [9.0, bad])
    with pytest.raises(ValueError, match="tree leaf 0 must be at least 0 and at most"):
        tree.fill([bad, 1, 1, 1, 1])
    assert (tree.leaves.tolist(), tree.total) == ([0, 1, 2, 3, 4], 10)


def test_the_greatest_values_have_a_finite_sum():
    tree = SumTree(257)
    tree.fill(np.full(257, tree._tree.high))
    assert np.isfinite(tree.total)


def test_the_first_of_several_mistakes_is_reported():
    tree = SumTree(5)
    with pytest.raises(ValueError, match=r"tree leaf 3 must be at least 0.*got -2\.0"):
        tree.set([1, 3, 9], [1.0, -2.0, 1.0])
    with pytest.raises(IndexError, match=r"tree index must be in \[0, 4\], got 9"):
        tree.set([1, 9, 3], [1.0, -2.0, -2.0])


def test_minima_and_maxima_refuse_only_what_has_no_order():
    for op in ("min", "max"):
        tree = SegmentTree(3, op)
        with pytest.raises(ValueError, match="tree leaf 0 must be a number, got nan"):
            tree.set([0], [np.nan])
        tree.set([0, 1, 2], [-np.inf, np.inf, -3])
        assert tree.summary == {"min": -np.inf, "max": np.inf}[op]


def test_a_maximum_that_is_zero_when_empty_holds_nothing_below():
    tree = SegmentTree(3, "max", identity=0)
    assert tree.summary == 0
    with pytest.raises(ValueError, match=r"tree leaf 1 must be at least 0, got -1\.0"):
        tree.set([1], [-1.0])


@pytest.mark.parametrize("bad", [-0.5, np.nan, np.inf, np.nextafter(10, 11), -np.inf])
def test_a_sum_that_falls_on_no_leaf_is_refused(bad):
    tree = filled(np.arange(5.0))
    with pytest.raises(ValueError, match=r"prefix sum must be in \[0, 10\.0\], got"):
        tree.find([1.0, bad])


def test_nothing_is_found_in_a_tree_of_zeros():
    with pytest.raises(ValueError, match="prefix sums need a leaf above 0, and all"):
        SumTree(5).find([0.0])


def test_empty_batches_do_nothing():
    tree = filled(np.arange(5.0))
    tree.set([], [])
    tree.set(np.empty(0, np.int32), np.empty(0, np.float32))
    assert tree.leaves.tolist() == [0, 1, 2, 3, 4]
    assert (tree.find([]).dtype, tree.find([]).shape) == (np.int64, (0,))
    assert (tree.get([]).dtype, tree.get([]).shape) == (np.float64, (0,))
    assert SumTree(5).find([]).shape == (0,)


def test_the_last_of_equal_indices_wins():
    tree = SumTree(20)
    tree.set([3, 3, 7, 3], [1.0, 0.0, 5.0, 2.0])
    assert (tree.get([3, 7]).tolist(), tree.total, tree.nnz) == ([2, 5], 7, 2)


def test_a_negative_zero_is_a_zero():
    tree = SumTree(3)
    tree.set([0, 1], [-0.0, 1.0])
    assert not np.signbit(tree.leaves).any()
    assert tree.nnz == 1


@pytest.mark.parametrize("dtype", ["int32", "uint8", "uint64"])
def test_indices_and_values_of_any_fitting_type_are_accepted(dtype):
    tree = SumTree(9)
    tree.set(np.array([1, 8], dtype), np.array([2, 3], "float32")[::-1])
    assert tree.get(np.array([[1], [8]], dtype)).tolist() == [[3], [2]]
    assert tree.find(np.array([0, 1, 2, 3, 4])).tolist() == [1, 1, 1, 8, 8]


def test_what_is_no_index_or_number_is_refused():
    tree = SumTree(9)
    with pytest.raises(TypeError, match="tree indices must be integers, got float64"):
        tree.set([1.5], [1.0])
    with pytest.raises(TypeError, match=r"tree values must be real.*got complex128"):
        tree.set([1], [1j])
    with pytest.raises(
        ValueError, match=r"tree values must have shape \[1\], one for each.*got \[2\]"
    ):
        tree.set([1], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"tree values must have one axis, got shape \[1, 1\]"):
        tree.set([[1]], [[1.0]])
    with pytest.raises(
        ValueError, match=r"tree values must have shape \[9\], one for each.*got \[8\]"
    ):
        tree.fill(np.ones(8))


def test_a_tree_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"tree capacity must be .*, got 0"):
        SumTree(0)
    with pytest.raises(ValueError, match=r"tree op must be one of.*got 'mean'"):
        SegmentTree(3, "mean")
    with pytest.raises(ValueError, match=r"tree identity must be 0\.0 for.*got 1\.0"):
        SegmentTree(3, "sum", 1.0)
    with pytest.raises(ValueError, match="tree identity must be -inf, or 0 for 'max', got 5"):
        SegmentTree(3, "max", 5)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_tree_goes_to_another_process_as_it_is(again, rng):
    tree = filled(rng.random(300))
    tree.set(rng.integers(300, size=50), np.zeros(50))
    there = again(tree)
    assert there._tree._nodes.tobytes() == tree._tree._nodes.tobytes()
    there.set([0], [5.0])
    assert tree.get([0]) != 5
    most = SegmentTree(5, "max")
    most.set([1], [-2.0])
    assert again(most).summary == -2


def test_leaves_are_only_looked_at():
    tree = SumTree(3)
    with pytest.raises(ValueError, match="read-only"):
        tree.leaves[0] = 1
    tree.set([0], [1.0])
    assert tree.total == 1


def test_arguments_are_left_as_they_were(rng):
    tree = SumTree(9)
    indices, values, sums = np.array([3, 1]), np.array([1.0, 2.0]), np.array([3.0, 0])
    tree.set(indices, values)
    tree.find(sums)
    assert (indices.tolist(), values.tolist(), sums.tolist()) == ([3, 1], [1, 2], [3, 0])


def test_a_leaf_takes_at_most_ten_bytes():
    assert SumTree(1_000_000).nbytes < 8.6 * 1_000_000
    assert all(SumTree(n).nbytes <= 10 * n for n in range(2000, 20_000, 777))


def test_nodes_begin_where_lines_of_the_cache_do():
    assert [SumTree(n)._tree._nodes.ctypes.data % 128 for n in SIZES] == [0] * len(SIZES)


class TestAsAlf:
    """Figures that alf's tree gives."""

    def test_thresholds_fall_where_they_do_in_alf(self):
        tree = filled([1, 0, 2, 0, 3, 4, 0])
        assert (tree.total, tree.nnz) == (10, 4)
        thresholds = [0, 0.99, 1, 2.99, 3, 5.99, 6, 9.99, 10]
        found = [0, 0, 2, 2, 4, 4, 5, 5, 5]
        assert tree.find_sum_bound(thresholds).tolist() == found
        assert tree.find(thresholds).tolist() == found

    def test_the_total_falls_on_the_last_leaf_that_is_not_zero(self):
        tree = filled([0.1] * 9 + [0])
        assert tree.find_sum_bound([tree.total]).tolist() == [8]
        lost = filled([1.0, 1e-30, 0.0])
        assert lost.find_sum_bound([[1.0, 0.5]]).tolist() == [[1, 0]]

    def test_leading_zeros_are_passed_over(self):
        tree = filled([0, 1, 0, 2, 0])
        found = tree.find_sum_bound([0, 0.5, 1, 2.9, 3])
        assert found.tolist() == [1, 1, 3, 3, 3]

    @pytest.mark.parametrize("bad", [3.5, -1.0, np.nan])
    def test_a_threshold_beyond_the_sum_is_refused(self, bad):
        with pytest.raises(ValueError, match=r"prefix sum must be in \[0, 3\.0\], got"):
            filled([0, 1, 0, 2, 0]).find_sum_bound([bad])

    def test_any_shape_is_looked_up(self):
        tree = filled(np.arange(7.0))
        assert tree.get([[1, 2], [3, 6]]).tolist() == [[1, 2], [3, 6]]
        assert tree.get(3).tolist() == 3
        assert tree.find_sum_bound(20).tolist() == 6

    def test_five_leaves_have_the_sums_that_alf_has(self):
        # alf keeps the nodes [0, 3, 1, 2, 1, 0, 2, 0, 0, 1]: its root is node 1,
        # its leaves by index are nodes 8, 9, 5, 6, 7.
        tree = filled([0, 1, 0, 2, 0])
        assert (tree.total, tree.nnz) == (3, 2)


def test_levels_hold_whole_nodes():
    for capacity in [*SIZES, 10**6, 10**9]:
        levels = twin.levels(capacity)
        assert (levels[0], levels[-1][1]) == ((0, 1), capacity)
        assert all(offset % 16 == 0 for offset, _ in levels)
        assert [above[1] for above in levels[:-1]] == [-(-below[1] // 16) for below in levels[1:]]
