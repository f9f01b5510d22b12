"""Long rows are copied and read alike in C, by numpy, and as indexing has them."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmreplay import kernels
from mmreplay.kernels import copies as twin

C = kernels.choose("copies", "").module
KERNELS = [twin] if C is twin else [twin, C]
STRIDES = [1, 15, 16, 63, 64, 65, 700, 4096, 28224]
ROWS, NBYTES = 40, 4096
MARK = 0xEE


def table_of(count, stride):
    return np.random.default_rng(0).integers(0, 256, (count, stride), np.uint8)


def guarded(nbytes, skip):
    """Bytes, and room among them that begins anywhere."""
    whole = np.full(nbytes + 64, MARK, np.uint8)
    return whole, whole[skip : skip + nbytes]


def outside(guarded_array, out, skip):
    return np.concatenate([guarded_array[:skip], guarded_array[skip + len(out) :]])


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A descriptor of a file of rows, and the rows."""
    path, table = tmp_path_factory.mktemp("copies") / "rows", table_of(ROWS, NBYTES)
    table.tofile(path)
    fd = os.open(path, os.O_RDONLY)
    yield fd, table
    os.close(fd)


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    st.sampled_from(STRIDES),
    st.lists(st.integers(0, 8), max_size=12),
    st.integers(0, 33),
    st.integers(0, 20),
)
def test_rows_are_copied_and_nothing_else(kernel, stride, rows, skip, rest):
    table, wanted = table_of(9, stride), np.array(rows, np.int64)
    # What is left over at the end of the array is no row.
    rest = np.zeros(min(rest, stride - 1), np.uint8)
    source = np.concatenate([table.reshape(-1), rest])
    whole, out = guarded(len(rows) * stride, skip)
    kernel.copy_rows(source, stride, wanted, out)
    assert out.tobytes() == table[wanted].tobytes()
    assert (outside(whole, out, skip) == MARK).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("waits", [False, True])
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=12),
    st.integers(0, 33),
    st.integers(0, 5),
)
def test_spans_are_copied_and_nothing_else(kernel, waits, spans, skip, gap):
    source = table_of(1, 240)[0]
    begins, nbytes = np.array(spans, np.int64).reshape(-1, 2).T.copy()
    targets = np.cumsum(nbytes + gap) - nbytes
    whole, out = guarded(int((nbytes + gap).sum()), skip)
    kernel.copy_spans(source, begins, nbytes, out, targets, waits)
    expected = np.full(len(out), MARK, np.uint8)
    for begin, size, target in zip(begins, nbytes, targets, strict=True):
        expected[target : target + size] = source[begin : begin + size]
    assert out.tobytes() == expected.tobytes()
    assert (outside(whole, out, skip) == MARK).all()
    together = np.full(int(nbytes.sum()), MARK, np.uint8)
    kernel.copy_spans(source, begins, nbytes, together, None, waits)
    copied = [source[begin : begin + size] for begin, size in spans]
    assert together.tobytes() == b"".join(map(bytes, copied))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("begin", "size", "target"),
    [
        (-1, 4, 0),
        (0, -1, 0),
        (13, 4, 0),
        (17, 0, 0),
        (0, 17, 0),
        (0, 4, 5),
        (0, 4, -1),
        (1 << 62, 4, 0),
        (0, (1 << 63) - 1, 0),
        (8, (1 << 63) - 4, 0),
    ],
)
def test_spans_outside_of_an_array_are_refused(kernel, begin, size, target):
    source, out = np.zeros(16, np.uint8), np.full(8, MARK, np.uint8)
    spans = [np.array([0, number]) for number in (begin, size, target)]
    spans[1][0] = 2
    with pytest.raises(ValueError, match="copy_spans: spans must lie inside"):
        kernel.copy_spans(source, spans[0], spans[1], out, spans[2], False)
    with pytest.raises(ValueError, match="copy_spans: spans must lie inside"):
        kernel.copy_spans(source, spans[0], spans[1][:1], out, spans[2], False)
    sizes = np.array([4, 5])
    with pytest.raises(ValueError, match="copy_spans: spans must lie inside"):
        kernel.copy_spans(source, np.zeros(2, np.int64), sizes, out, None, False)
    assert (out == MARK).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["<f4", "<i2", "V8", "?"])
def test_rows_of_any_dtype_are_copied(kernel, dtype):
    source = table_of(6, 64) % 2
    typed = source.view(dtype)
    out = np.empty((3, typed.shape[1]), dtype)
    kernel.copy_rows(typed, 64, np.array([5, 0, 5]), out)
    assert out.tobytes() == source[[5, 0, 5]].tobytes()


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(1, 9)), max_size=9),
    st.integers(0, 33),
    st.booleans(),
)
def test_rows_are_read_in_whatever_order_they_are_asked_for(kernel, opened, ranges, skip, ask):
    fd, table = opened
    rows = [row for first, n in ranges for row in range(first, first + n)]
    wanted = np.minimum(np.array(rows, np.int64), ROWS - 1)
    whole, out = guarded(len(wanted) * NBYTES, skip)
    assert kernel.read_rows(fd, NBYTES, wanted, out, ask) is True
    assert out.tobytes() == table[wanted].tobytes()
    assert (outside(whole, out, skip) == MARK).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("ask", [False, True])
@given(
    st.lists(
        st.tuples(st.integers(0, ROWS * NBYTES), st.sampled_from([0, 1, 9, 300_000])), max_size=9
    ),
    st.integers(0, 33),
)
def test_spans_of_a_file_are_read_and_nothing_else(kernel, opened, ask, spans, skip):
    fd, table = opened
    data = table.reshape(-1)
    begins = np.array([begin for begin, _ in spans], np.int64)
    nbytes = np.minimum([size for _, size in spans], data.size - begins)
    nbytes = nbytes.astype(np.int64)
    whole, out = guarded(int(nbytes.sum()), skip)
    assert kernel.read_spans(fd, begins, nbytes, out, ask) is True
    parts = [data[b : b + n].tobytes() for b, n in zip(begins, nbytes, strict=True)]
    assert out.tobytes() == b"".join(parts)
    assert (outside(whole, out, skip) == MARK).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_spans_that_cannot_be_read_are_reported_or_refused(kernel, opened):
    fd, table = opened
    end, out = table.size, np.zeros(12, np.uint8)
    begins = np.array([end - 2, 8])
    assert kernel.read_spans(fd, begins, np.array([4, 8]), out, True) is False
    # What lies before the end is there by then.
    assert out[4:].tobytes() == table.reshape(-1)[8:16].tobytes()
    assert kernel.read_spans(-1, begins, np.array([2, 8]), out, False) is False
    for sizes in ([4, 9], [-1, 4], [(1 << 63) - 1, 4], [4]):
        with pytest.raises(ValueError, match="read_spans: spans must exist"):
            kernel.read_spans(fd, begins, np.array(sizes), out, False)
    with pytest.raises(ValueError, match="read_spans: spans must exist"):
        kernel.read_spans(fd, begins - end, np.array([4, 8]), out, False)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("ask", [False, True])
def test_rows_beyond_a_file_are_reported(kernel, opened, ask):
    fd, table = opened
    out = np.zeros((3, NBYTES), np.uint8)
    assert kernel.read_rows(fd, NBYTES, np.array([ROWS, 1, 0]), out, ask) is False
    # What lies before the end is there by then.
    assert (out[1:] == table[[1, 0]]).all()
    longer = np.zeros((1, 3 * NBYTES), np.uint8)
    last = np.array([ROWS // 3])
    assert kernel.read_rows(fd, 3 * NBYTES, last, longer, ask) is False


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_closed_descriptor_is_reported(kernel, tmp_path):
    out = np.empty((1, 8), np.uint8)
    assert kernel.read_rows(-1, 8, np.array([0]), out, True) is False
    folder = os.open(tmp_path, os.O_RDONLY)
    assert kernel.read_rows(folder, 8, np.array([0]), out, True) is False
    os.close(folder)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_descriptor_is_left_open(kernel, opened):
    def free():
        fd = os.dup(opened[0])
        os.close(fd)
        return fd

    before = free()
    for rows in ([0], [ROWS], []):
        out = np.empty((len(rows), NBYTES), np.uint8)
        kernel.read_rows(opened[0], NBYTES, np.array(rows, np.int64), out, True)
    assert free() == before


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [[-1], [9], [1 << 62], [0, 0, -(1 << 63)]])
def test_rows_that_are_none_are_refused(kernel, rows):
    source = np.zeros((9, 16), np.uint8)
    out = np.full((len(rows), 16), MARK, np.uint8)
    with pytest.raises(ValueError, match="copy_rows: rows must exist"):
        kernel.copy_rows(source, 16, np.array(rows), out)
    if min(rows) < 0 or max(rows) > 9:
        with pytest.raises(ValueError, match="read_rows: rows must exist"):
            kernel.read_rows(0, 16, np.array(rows), out, False)
    assert (out == MARK).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("stride", "size", "message"),
    [
        (0, 32, "rows must have at least one byte"),
        (-8, 32, "rows must have at least one byte"),
        (16, 31, "rows must exist, and out must hold all of them"),
        (16, 33, "rows must exist, and out must hold all of them"),
        (16, 48, "rows must exist, and out must hold all of them"),
    ],
)
def test_an_array_of_another_size_is_refused(kernel, stride, size, message):
    rows, out = np.array([0, 1]), np.empty(size, np.uint8)
    with pytest.raises(ValueError, match=f"copy_rows: {message}"):
        kernel.copy_rows(np.zeros(64, np.uint8), stride, rows, out)
    with pytest.raises(ValueError, match=f"read_rows: {message}"):
        kernel.read_rows(0, stride, rows, out, False)


@pytest.mark.skipif(C is twin, reason="the kernels in C are not built")
@pytest.mark.parametrize(
    ("rows", "out"),
    [
        (np.zeros(2, np.int64), bytes(32)),
        (np.zeros(4, np.int64)[::2], np.empty(32, np.uint8)),
        (np.zeros(2, np.int64), np.empty(64, np.uint8)[::2]),
        (np.zeros(2, np.int32), np.empty(32, np.uint8)),
        ("01", np.empty(32, np.uint8)),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_c(rows, out):
    with pytest.raises((ValueError, TypeError, BufferError)):
        C.copy_rows(np.zeros(64, np.uint8), 16, rows, out)
    with pytest.raises((ValueError, TypeError, BufferError)):
        C.read_rows(0, 16, rows, out, True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_thread_that_asks_is_over_when_the_call_is(kernel, tmp_path):
    table, path = table_of(300, 8192), tmp_path / "rows"
    table.tofile(path)
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    wanted = np.random.default_rng(0).permutation(300)[:200]
    out = np.empty((200, 8192), np.uint8)
    assert kernel.read_rows(fd, 8192, wanted, out, True)
    assert (out == table[wanted]).all()
    tasks = sorted(os.listdir("/proc/self/task"))
    assert kernel.read_rows(fd, 8192, wanted[::-1].copy(), out, True)
    assert sorted(os.listdir("/proc/self/task")) == tasks
    os.close(fd)


STARVED = """
import os, resource, sys, threading
import numpy as np
from mmreplay import kernels

read_rows = kernels.choose("copies", "c").module.read_rows
fd, rows = os.open(sys.argv[1], os.O_RDONLY), np.arange(40)
out = np.empty((40, 4096), np.uint8)
threading.stack_size(8 << 20)
thread = threading.Thread(target=int)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), -1))
try:
    thread.start()
except RuntimeError:
    print("no thread")
print(read_rows(fd, 4096, rows, out, True))
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print(out.sum())
"""


@pytest.mark.skipif(C is twin, reason="the kernels in C are not built")
def test_rows_are_read_where_the_system_has_no_thread_left(tmp_path):
    table = table_of(ROWS, NBYTES)
    table.tofile(tmp_path / "rows")
    told = subprocess.run(
        [sys.executable, "-c", STARVED, str(tmp_path / "rows")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    assert told[:3] == ["no thread", "True", str(table.sum())]


REFERENCE = np.dtype([("position", "<i8"), ("length", "<u4"), ("crc", "<u4")])
HEAP_NBYTES, LONGEST, ITEM = 4096, 60, 12
EDGES = [
    0,
    1,
    7,
    8,
    16,
    4080,
    4088,
    4096,
    4104,
    8192,
    -8,
    -1,
    1 << 61,
    (1 << 63) - 8,
    (1 << 63) - 1,
    -(1 << 63),
]


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(EDGES) | st.integers(0, 1200).map(lambda n: 8 * n),
            st.sampled_from([0, 1, 3, LONGEST, LONGEST + 1, (1 << 32) - 1]),
            st.sampled_from([0, 5]),
            st.integers(0, 1),
        ),
        max_size=12,
    ),
    st.sampled_from([(0, 0), (8, 4096), (800, 4896), (4096, 8184)]),
)
def test_only_references_that_may_be_read_are_found(kernel, each_one, bounds):
    records = np.zeros(len(each_one), np.dtype([("value", REFERENCE), ("more", "V8")]))
    env_ids = np.array([env for *_, env in each_one], np.int64)
    records["value"] = np.array([each[:3] for each in each_one], REFERENCE)
    tails, heads = np.array([bounds[0], 0]), np.array([bounds[1], 4096])
    begins, nbytes = np.full((2, len(each_one)), -7)
    offsets = np.full(len(each_one) + 1, -7)
    illegal = kernel.find_values(
        records["value"], env_ids, tails, heads, HEAP_NBYTES, LONGEST, ITEM, begins, nbytes, offsets
    )
    wrong, items = 0, 0
    assert offsets[0] == 0
    for at, (position, length, crc, env) in enumerate(each_one):
        size = length * ITEM
        empty = (position, length, crc) == (0, 0, 0)
        legal = (
            1 <= length <= LONGEST
            and position % 8 == 0
            and tails[env] <= position <= position + size <= heads[env]
            and position % HEAP_NBYTES + size <= HEAP_NBYTES
        )
        wrong += not (legal or empty)
        items += length if legal else 0
        assert nbytes[at] == (size if legal else 0)
        assert offsets[at + 1] == items
        if legal:
            assert begins[at] == env * HEAP_NBYTES + position % HEAP_NBYTES
        else:
            assert begins[at] == env * HEAP_NBYTES
    assert illegal == wrong


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"references": np.zeros(3, "V8")}, "references must be of a heap"),
        ({"references": np.zeros((1, 3), REFERENCE)}, "references must be of a heap"),
        ({"heap_nbytes": 0}, "references must be of a heap"),
        ({"longest": 0}, "references must be of a heap"),
        ({"longest": 1 << 32}, "references must be of a heap"),
        ({"item_nbytes": -1}, "references must be of a heap"),
        ({"item_nbytes": 1 << 62}, "references must be of a heap"),
        ({"heads": np.zeros(1, np.int64)}, "references must be of a heap"),
        ({"env_ids": np.zeros(2, np.int64)}, "as many numbers as there are refer"),
        ({"begins": np.zeros(2, np.int64)}, "as many numbers as there are refer"),
        ({"nbytes": np.zeros(4, np.int64)}, "as many numbers as there are refer"),
        ({"offsets": np.zeros(3, np.int64)}, "as many numbers as there are refer"),
        ({"env_ids": np.array([0, 2, 0])}, "environments must exist"),
        ({"env_ids": np.array([0, -1, 0])}, "environments must exist"),
    ],
)
def test_references_that_are_of_no_heap_are_refused(kernel, change, message):
    arguments = {
        "references": np.zeros(3, REFERENCE),
        "env_ids": np.zeros(3, np.int64),
        "tails": np.zeros(2, np.int64),
        "heads": np.zeros(2, np.int64),
        "heap_nbytes": 4096,
        "longest": 60,
        "item_nbytes": 12,
        "begins": np.zeros(3, np.int64),
        "nbytes": np.zeros(3, np.int64),
        "offsets": np.zeros(4, np.int64),
    }
    assert kernel.find_values(*arguments.values()) == 0
    with pytest.raises(ValueError, match=f"find_values: .*{message}"):
        kernel.find_values(*(arguments | change).values())
