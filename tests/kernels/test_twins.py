"""Kernels in C equal their numpy twins, and step aside where they are not built."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from array import array
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import mmreplay as mr
from mmreplay import kernels
from mmreplay.kernels import tree as twin

C = kernels.choose("tree", "").module
needs_c = pytest.mark.skipif(C is twin, reason="the kernels in C are not built")
TREES = [twin] if C is twin else [twin, C]
LIMITS = {twin.SUM: (0.0, 1e300), twin.MIN: (-1e300, 1e300), twin.MAX: (0.0, np.inf)}


def test_c_runs_where_it_is_built_unless_numpy_is_asked_for():
    assert kernels.choose("tree", "numpy").module is twin
    assert kernels.choose("tree", "numpy").why == "MMREPLAY_KERNELS=numpy asks for it"
    found = kernels.choose("tree", "")
    assert (found.runs == "c") == (found.module is not twin)


def test_the_environment_decides(monkeypatch):
    monkeypatch.setenv("MMREPLAY_KERNELS", "numpy")
    assert kernels.load("tree") is twin
    monkeypatch.delenv("MMREPLAY_KERNELS")
    assert kernels.load("tree") is C


def test_a_choice_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("MMREPLAY_KERNELS", "C++")
    with pytest.raises(ValueError, match=r"must be 'c', 'numpy' or unset, got 'C\+\+'"):
        kernels.load("tree")


@pytest.fixture
def unbuilt(monkeypatch):
    """As where there was no compiler."""
    monkeypatch.setitem(sys.modules, "mmreplay.kernels._tree", None)


@pytest.mark.usefixtures("unbuilt")
def test_the_twin_serves_where_c_was_not_built():
    found = kernels.choose("tree", "")
    assert (found.runs, found.module) == ("numpy", twin)
    assert found.why.startswith("C was not built when mmreplay was installed")


@pytest.fixture(scope="module")
def without_c(tmp_path_factory):
    """Run Python where mmreplay was installed without a compiler."""
    folder = tmp_path_factory.mktemp("installed")
    unbuilt = shutil.ignore_patterns("*.so", "*.c", "*.h", "__pycache__")
    package = Path(kernels.__file__).parent.parent
    shutil.copytree(package, folder / "mmreplay", ignore=unbuilt)

    def call(*words, code=0, kernels=""):
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            env={
                **os.environ,
                "PYTHONPATH": str(folder),
                "MMREPLAY_KERNELS": kernels,
                # As users run it: the tests' own filters are not theirs.
                "PYTHONWARNINGS": "",
            },
            capture_output=True,
            text=True,
            timeout=120,
            cwd=folder,
        )
        assert done.returncode == code, done.stderr
        return done.stdout, done.stderr

    return call


OPENS = """
import sys
from pathlib import Path
import mmreplay as mr
assert mr.__file__.startswith(str(Path.cwd())), mr.__file__
schema = mr.Schema({"x": mr.Field((), "float32")})
for number in range(2):
    mr.ReplayBuffer.create(f"{sys.argv[1]}{number}", schema, 10).close()
    mr.ReplayBuffer.open(f"{sys.argv[1]}{number}").close()
    mr.ReplayBuffer.create(None, schema, 10, engine="memory").close()
"""
ALL = ", ".join(kernels.NAMES)
WARNED = (
    f"KernelsWarning: mmreplay runs without its C kernels ({ALL}), "
    "which were not built when it was installed"
)


def test_missing_c_kernels_warn_once_a_process(without_c, tmp_path):
    _, err = without_c("-c", OPENS, tmp_path / "b")
    assert err.count("Warning") == 1
    assert err.startswith("<string>:8: " + WARNED)
    assert "Install a C compiler and reinstall mmreplay" in err
    assert "or set MMREPLAY_KERNELS=numpy" in err


@pytest.mark.slow
def test_a_reader_and_a_buffer_in_memory_warn_too(without_c, tmp_path):
    without_c("-c", OPENS, tmp_path / "b", kernels="numpy")
    reads = "import sys, mmreplay as mr; mr.ReplayBuffer.open(sys.argv[1])"
    assert WARNED in without_c("-c", reads, tmp_path / "b0")[1]
    ram = (
        "import mmreplay as mr; mr.ReplayBuffer.create(None, "
        "mr.Schema({'x': mr.Field((), 'int8')}), 9, engine='memory')"
    )
    assert WARNED in without_c("-c", ram)[1]


def test_numpy_chosen_on_purpose_is_silent(without_c, tmp_path):
    assert without_c("-c", OPENS, tmp_path / "b", kernels="numpy") == ("", "")


def test_who_wants_warnings_as_errors_gets_no_folder(without_c, tmp_path):
    _, err = without_c("-W", "error", "-c", OPENS, tmp_path / "b", code=1)
    assert WARNED in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_line_tells_of_c_that_was_not_built(without_c, tmp_path):
    without_c("-c", OPENS, tmp_path / "b", kernels="numpy")
    module = ("-m", "mmreplay")
    out, err = without_c(*module, "--version")
    told = f"(without C kernels, slower: {ALL})"
    assert (out, err) == (f"mmreplay {mr.__version__} {told}\n", "")
    out, err = without_c(*module, "info", tmp_path / "b0")
    assert f"kernels       numpy, slower: C was not built ({ALL})" in out
    assert (err.count("\n"), err[:31]) == (1, "mmreplay: mmreplay runs without")
    out, _ = without_c(*module, "info", tmp_path / "b0", "--json")
    assert json.loads(out)["kernels_not_built"] == list(kernels.NAMES)
    out, err = without_c(*module, "info", tmp_path / "b0", kernels="numpy")
    assert ("kernels" in out, err) == (False, "")
    assert without_c(*module, "--version", kernels="numpy")[0] == (f"mmreplay {mr.__version__}\n")


@needs_c
def test_built_c_kernels_do_not_warn(monkeypatch, recwarn):
    monkeypatch.setattr(kernels, "looked", False)
    monkeypatch.delenv("MMREPLAY_KERNELS", raising=False)
    assert kernels.missing() == ()
    kernels.warn_of_missing(1)
    assert not recwarn


@pytest.mark.usefixtures("unbuilt")
def test_a_kernel_that_was_not_built_is_named(monkeypatch):
    monkeypatch.setattr(kernels, "looked", False)
    monkeypatch.delenv("MMREPLAY_KERNELS", raising=False)
    with pytest.warns(kernels.KernelsWarning, match=r"its C kernels \(.*tree\), which"):
        kernels.warn_of_missing(1)


@pytest.mark.usefixtures("unbuilt")
def test_c_asked_for_and_not_built_is_refused():
    wanted = "kernel 'tree' was not built in C, which MMREPLAY_KERNELS=c asks for"
    with pytest.raises(ModuleNotFoundError, match=wanted):
        kernels.choose("tree", "c")


def both(capacity, op, fill):
    """Two trees of the same leaves, of no further use than to be compared."""
    nodes = np.full(twin.num_nodes(capacity), {twin.MIN: np.inf}.get(op, 0.0))
    offset, count = twin.levels(capacity)[-1]
    nodes[offset : offset + count] = fill
    pair = nodes.copy(), nodes
    C.rebuild(pair[0], capacity, op)
    twin.rebuild(pair[1], capacity, op)
    return pair


def alike(pair):
    return pair[0].tobytes() == pair[1].tobytes()


capacities = st.integers(1, 700)
reals = st.one_of(
    st.floats(0, 1e290), st.just(0.0), st.just(-0.0), st.floats(0, 1), st.just(5e-324)
)


@needs_c
@given(data=st.data(), capacity=capacities, op=st.sampled_from([*LIMITS]))
def test_both_twins_make_the_same_nodes_to_the_last_bit(data, capacity, op):
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    fill = rng.random(capacity) * 10.0 ** rng.integers(-30, 30, capacity)
    fill[rng.random(capacity) < 0.3] = 0
    pair = both(capacity, op, fill)
    assert alike(pair)
    for _ in range(3):
        size = data.draw(st.integers(0, 300))
        indices = rng.integers(capacity, size=size)
        values = data.draw(arrays(np.float64, size, elements=reals))
        found = [
            kernel.set_leaves(nodes, capacity, op, *LIMITS[op], indices, values)
            for kernel, nodes in zip((C, twin), pair, strict=True)
        ]
        assert found == [-1, -1]
        assert alike(pair)


@pytest.mark.parametrize("kernel", TREES)
@given(data=st.data(), capacity=capacities, stratified=st.booleans())
def test_shares_fall_where_the_sums_do_that_they_are(kernel, data, capacity, stratified):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    fill = rng.random(capacity) * 10.0 ** rng.integers(-30, 30, capacity)
    fill[rng.integers(capacity)] = 1.0
    nodes = both(capacity, twin.SUM, fill)[1]
    count = data.draw(st.integers(0, 80))
    scale = data.draw(st.sampled_from([0.0, 1.0, 1e-20]))
    shares = rng.random(count)
    sums = (shares + np.arange(count)) / count if stratified and count else shares
    wanted, masses = np.empty(count, np.int64), np.empty(count)
    assert twin.find_leaves(nodes, capacity, sums * nodes[0], wanted, masses) == -1
    found, ratios = np.empty(count, np.int64), np.empty(count)
    drawn = kernel.draw_leaves(nodes, capacity, shares, stratified, scale, found, ratios)
    assert drawn == -1
    assert found.tolist() == wanted.tolist()
    assert shares.tolist() == (masses / nodes[0]).tolist()
    least = scale or masses.min(initial=np.inf)
    assert ratios.tolist() == (least / masses).tolist()


@pytest.mark.parametrize("kernel", TREES)
@pytest.mark.parametrize("bad", [np.nan, -0.1, 1.1])
def test_a_share_that_is_none_is_refused(kernel, bad):
    nodes = both(5, twin.SUM, 1.0)[1]
    shares, some = np.array([0.5, bad, 0.5]), (np.empty(3, np.int64), np.empty(3))
    assert kernel.draw_leaves(nodes, 5, shares, False, 0.0, *some) == 1
    assert shares[0] == 0.5
    nodes[:] = 0
    assert kernel.draw_leaves(nodes, 5, shares, False, 0.0, *some) == 0


@pytest.mark.parametrize("kernel", TREES)
@given(data=st.data(), capacity=capacities)
def test_numbers_are_looked_up_where_all_leaves_are_open(kernel, data, capacity):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    fill = (rng.random(capacity) < data.draw(st.sampled_from([0.9, 1.0]))) * 1.0
    nodes, numbers = both(capacity, twin.SUM, fill)[1], rng.random(capacity)
    numbers = numbers.astype(np.float32)
    places = rng.integers(0, capacity, data.draw(st.integers(0, 50)))
    out = np.empty(len(places))
    told = kernel.add_to_open(nodes, capacity, places, numbers, 1e-6, out)
    assert told is bool(fill[places].all())
    if told:
        assert out.tolist() == (numbers[places].astype(np.float64) + 1e-6).tolist()
    for stray in (-1, capacity):
        where, room = np.array([stray]), np.empty(1)
        assert not kernel.add_to_open(nodes, capacity, where, numbers, 0.0, room)


SPECIAL = [
    0.0,
    5e-324,
    2.0**-1045,
    2.0**-1046,
    np.nextafter(2.0**-1046, 0),
    2.0**-1022,
    np.finfo(np.float64).max,
    np.inf,
    np.nan,
    1 + 2.0**-24,
    1 + 2.0**-25,
    np.nextafter(1 + 2.0**-24, 1),
    3 + 2.0**-23,
]


def rounded(value):
    """A number of at least 0 as a whole multiple of the 24th of its bits."""
    if value == 0 or not np.isfinite(value):
        return value
    # Numbers below 2**-1022 have as small a last bit as that has.
    unit = Fraction(2) ** (max(math.frexp(value)[1], -1021) - 24)
    whole = math.floor(Fraction(value) / unit + Fraction(1, 2)) * unit
    return float(whole) if whole < 2**1024 else np.inf


@pytest.mark.parametrize("kernel", TREES)
@given(
    arrays(np.float64, st.integers(0, 60), elements=st.floats(0, None, width=64))
    | st.just(np.array(SPECIAL))
)
def test_24_bits_are_left_of_numbers(kernel, values):
    found = values.copy()
    assert kernel.shorten(found) is None
    expected = np.array([rounded(value) for value in values.tolist()])
    assert found.tobytes() == expected.tobytes()


@needs_c
@pytest.mark.parametrize("size", [1, 1023, 1024, 5000])
def test_both_twins_leave_the_same_bits(size, rng):
    values = rng.integers(0, 1 << 63, size).view(np.float64)
    pair = values.copy(), values.copy()
    C.shorten(pair[0])
    twin.shorten(pair[1])
    assert alike(pair)
    # Of any shape, and again nothing changes.
    C.shorten(pair[0].reshape(-1, 1))
    assert alike(pair)


@needs_c
@given(data=st.data(), capacity=capacities)
def test_both_twins_find_the_same_leaves(data, capacity):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    fill = rng.random(capacity) * 10.0 ** rng.integers(-30, 30, capacity)
    fill[rng.random(capacity) < 0.5] = 0
    fill[rng.integers(capacity)] = data.draw(st.sampled_from([5e-324, 1e-9, 1.0]))
    pair = both(capacity, twin.SUM, fill)
    bounds = np.cumsum(fill)
    near = [bounds, np.nextafter(bounds, 0), np.nextafter(bounds, np.inf), [0.0]]
    sums = np.concatenate([*near, rng.random(100) * pair[0][0]])
    sums = np.minimum(sums, pair[0][0])
    answers = []
    for kernel, nodes in zip((C, twin), pair, strict=True):
        indices, values = np.empty(len(sums), np.int64), np.empty(len(sums))
        assert kernel.find_leaves(nodes, capacity, sums, indices, values) == -1
        answers.append((indices.tolist(), values.tolist()))
    assert answers[0] == answers[1]
    assert (fill[answers[0][0]] > 0).all()


@needs_c
@pytest.mark.parametrize("size", [1023, 1024, 2047, 2048, 2049, 6000])
def test_batches_of_several_chunks_are_set_alike(size, rng):
    pair = both(70_000, twin.SUM, rng.random(70_000))
    indices, values = rng.integers(70_000, size=size), rng.random(size)
    indices[-50:] = indices[:50]
    for kernel, nodes in zip((C, twin), pair, strict=True):
        kernel.set_leaves(nodes, 70_000, twin.SUM, 0.0, 1e300, indices, values)
    assert alike(pair)


@needs_c
@given(
    indices=st.lists(st.integers(-3, 12), min_size=1, max_size=8),
    values=arrays(np.float64, 8, elements=st.sampled_from([1.0, -1.0, np.nan, 1e301])),
)
def test_both_twins_refuse_the_same_pair_first(indices, values):
    pair = both(10, twin.SUM, np.arange(10.0))
    where, what = np.array(indices), values[: len(indices)].copy()
    found = [
        kernel.set_leaves(nodes, 10, twin.SUM, 0.0, 1e300, where, what)
        for kernel, nodes in zip((C, twin), pair, strict=True)
    ]
    assert found[0] == found[1]
    assert alike(pair)


@needs_c
@pytest.mark.parametrize(
    "call",
    [
        lambda nodes, i, x: C.get_leaves(nodes, 5000, i, x),
        lambda nodes, i, x: C.get_leaves(nodes, 0, i, x),
        lambda nodes, i, x: C.get_leaves(nodes, -(2**62), i, x),
        lambda nodes, i, x: C.get_leaves(nodes, 100, i.astype(np.int32), x),
        lambda nodes, i, x: C.get_leaves(nodes, 100, i, np.zeros(3)),
        lambda nodes, i, x: C.get_leaves(nodes, 100, i[::2], x[::2]),
        lambda nodes, i, x: C.get_leaves(nodes, 100, i, b"read-only" * 8),
        lambda nodes, i, x: C.find_leaves(nodes, 100, x, i, np.zeros(3)),
        lambda nodes, i, x: C.set_leaves(nodes, 100, 0, 0.0, 1.0, i, np.zeros(3)),
        lambda nodes, i, x: C.set_leaves(bytes(nodes), 100, 0, 0.0, 1.0, i, x),
        lambda nodes, i, x: C.draw_leaves(nodes, 100, x, 0, 0.0, i[:2].copy(), x),
        lambda nodes, i, x: C.draw_leaves(nodes, 100, bytes(x), 0, 0.0, i, x),
        lambda nodes, i, x: C.draw_leaves(nodes, 100, x, 0, "least", i, x),
        lambda nodes, i, x: C.draw_leaves(nodes, 100, x),
        lambda nodes, i, x: C.add_to_open(nodes, 100, i, np.zeros(99, "f4"), 0.0, x),
        lambda nodes, i, x: C.add_to_open(nodes, 100, i, np.zeros(198, "f4")[::2], 0, x),
        lambda nodes, i, x: C.add_to_open(nodes, 100, i, np.zeros(100, "f4"), 0, x[:1]),
        lambda nodes, i, x: C.add_to_open(nodes, 100, i),
        lambda nodes, i, x: C.rebuild(nodes, 1000, 0),
        lambda nodes, i, x: C.shorten(x.astype(np.float32)),
        lambda nodes, i, x: C.shorten(x[::2]),
        lambda nodes, i, x: C.shorten(bytes(x)),
        lambda nodes, i, x: C.shorten([0.0]),
        lambda nodes, i, x: C.set_leaves(nodes),
        lambda nodes, i, x: C.get_leaves(nodes, "100", i, x),
        lambda nodes, i, x: C.get_leaves(nodes, 100, i, [0.0] * 4),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_c_and_let_go(call):
    nodes = array("d", bytes(8 * twin.num_nodes(100)))
    with pytest.raises((ValueError, TypeError, BufferError)):
        call(nodes, np.zeros(4, np.int64), np.zeros(4))
    nodes.append(0.0)  # refused while somebody holds the buffer


@needs_c
def test_a_search_during_a_write_stays_inside_the_tree(rng):
    """No answer is promised then; that memory is left alone is."""
    capacity = 5000
    nodes, _ = both(capacity, twin.SUM, rng.random(capacity))
    stop = threading.Event()

    def write():
        indices = np.arange(capacity)
        while not stop.is_set():
            for values in (np.zeros(capacity), np.ones(capacity)):
                C.set_leaves(nodes, capacity, twin.SUM, 0.0, 1.0, indices, values)

    writer = threading.Thread(target=write)
    writer.start()
    found, values = np.empty(2000, np.int64), np.empty(2000)
    try:
        for _ in range(300):
            found[:] = 0
            C.find_leaves(nodes, capacity, rng.random(2000), found, values)
            assert found.min() >= 0
            assert found.max() < capacity
    finally:
        stop.set()
        writer.join()
