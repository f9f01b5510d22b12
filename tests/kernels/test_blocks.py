"""Values of many steps are laid out, summed and copied alike by C and by its twin."""

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmreplay import kernels
from mmreplay.kernels import rows as twin
from mmreplay.schema.field import REFERENCE
from tests import slices

C = kernels.choose("rows", "").module
KERNELS = [twin] if C is twin else [twin, C]
SIZE, LONG = 128, 1 << 20


def arguments(values, items, listed, heads, free, first=0, stop=None, out=LONG):
    """What `pack_values` takes, of values [F][T][E] of bytes."""
    steps, envs = len(values[0]), len(heads)
    sources, offsets, references, addresses = [], [], [], []
    for field, item, each in zip(values, items, listed, strict=True):
        cells = tuple(
            np.frombuffer(value, np.uint8).reshape(-1, item) for step in field for value in step
        )
        lengths, where = np.zeros((2, len(cells)), np.int64)
        assert twin.measure_values(
            cells, np.ndarray, np.dtype(np.uint8), (item,), SIZE, ord("a"), lengths, where
        )
        where = np.array([cell.ctypes.data for cell in cells], np.int64)
        joined = b"".join(value for step in field for value in step)
        sources.append(cells if each else np.frombuffer(joined, np.uint8))
        addresses.append(where if each else None)
        offsets.append(np.concatenate([[0], np.cumsum(lengths)]))
        references.append(np.full(len(cells), 7, np.int64).repeat(2).view(REFERENCE))
    return {
        "sources": tuple(sources),
        "offsets": tuple(offsets),
        "references": tuple(references),
        "addresses": tuple(addresses),
        "items": np.array(items),
        "envs": envs,
        "first": first,
        "stop": steps if stop is None else stop,
        "heads": np.array(heads),
        "free": np.array(free),
        "size": SIZE,
        "out": np.full(out, 0xEE, np.uint8),
        "after": np.full(envs, -1),
        "segments": np.full((2 * envs, 4), -1),
    }


def expected(values, items, heads, free, first, stop, out):
    """Steps, segments, heap heads and references, value by value."""
    ways = []
    for count in range(stop - first, -1, -1):
        at, fits, after, references, stretches = 0, True, [], {}, []
        for env, head in enumerate(heads):
            for step in range(first, first + count):
                for field, item in enumerate(items):
                    data = values[field][step][env]
                    if not data:
                        references[field, step, env] = (0, 0, 0)
                        continue
                    if head % SIZE + len(data) > SIZE:
                        head += -head % SIZE
                    crc = google_crc32c.value(data)
                    references[field, step, env] = (head, len(data) // item, crc)
                    stretches.append((env, at, head, data))
                    space = len(data) + -len(data) % 8
                    head += space
                    at += space
            after.append(head)
            fits &= head <= free[env]
        ways.append((count, at <= out and fits, after, references, stretches))
    whole = [way for way in ways if way[1]]
    return whole[0]


values_of = st.integers(1, 2).flatmap(
    lambda envs: st.lists(
        st.lists(
            st.lists(st.binary(max_size=30), min_size=envs, max_size=envs), min_size=4, max_size=4
        ),
        min_size=1,
        max_size=2,
    )
)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=slices.count(300, 100))
@given(values_of, st.data())
def test_values_lie_as_they_do_one_by_one(kernel, values, data):
    envs = len(values[0][0])
    items = [data.draw(st.sampled_from([1, 2, 3])) for _ in values]
    values = [
        [[value[: len(value) // item * item] for value in step] for step in field]
        for field, item in zip(values, items, strict=True)
    ]
    listed = [data.draw(st.booleans()) for _ in values]
    heads = [8 * data.draw(st.integers(0, 40)) for _ in range(envs)]
    free = [head + data.draw(st.integers(0, SIZE)) for head in heads]
    first = data.draw(st.integers(0, 3))
    stop = data.draw(st.integers(first, 4))
    out = data.draw(st.sampled_from([0, 40, 100, LONG]))
    given_ = arguments(values, items, listed, heads, free, first, stop, out)
    steps, segments = kernel.pack_values(*given_.values())
    count, _, after, references, stretches = expected(values, items, heads, free, first, stop, out)
    if not count and stop > first:
        space = [
            len(field[first][env]) + -len(field[first][env]) % 8
            for field in values
            for env in range(envs)
        ]
        one = expected(values, items, heads, [1 << 40] * envs, first, first + 1, LONG)
        if sum(space) > out:
            assert (steps, segments) == (-sum(space), 0)
        else:
            assert (steps, segments) == (0, 0)
            assert given_["after"].tolist() == one[2]
        return
    assert steps == count
    assert given_["after"].tolist() == after
    for (field, step, env), reference in references.items():
        stored = given_["references"][field][step * envs + env]
        assert stored.tolist() == reference
    heaps = {}
    for env, begin, end, position in given_["segments"][:segments].tolist():
        assert begin < end
        assert position % SIZE + end - begin <= SIZE
        for at in range(begin, end):
            heaps[env, position + at - begin] = given_["out"][at]
        # The zeros behind the last value are not written.
        assert (env, position + end - begin) in {
            (other, place + len(value)) for other, _, place, value in stretches
        }
    for env, _, position, value in stretches:
        padded = value + bytes(-len(value) % 8)
        found = [heaps.pop((env, position + at), 0) for at in range(len(padded))]
        assert bytes(found) == padded
    assert not heaps


@pytest.mark.parametrize("kernel", KERNELS)
def test_text_and_bytes_are_packed_as_they_were_measured(kernel):
    cells = ("", "für", "ab")
    lengths, where = np.zeros((2, 3), np.int64)
    assert kernel.measure_values(
        cells, np.ndarray, np.dtype(np.uint8), (), 9, ord("t"), lengths, where
    )
    given_ = arguments([[[b""]] * 3], [1], [True], [0], [SIZE])
    given_ |= {
        "sources": (cells,),
        "addresses": (where,),
        "offsets": (np.concatenate([[0], np.cumsum(lengths)]),),
    }
    assert kernel.pack_values(*given_.values()) == (3, 1)
    assert given_["out"][:16].tobytes() == "für".encode() + bytes(4) + b"ab" + bytes(6)
    lengths = [reference["length"] for reference in given_["references"][0]]
    assert lengths == [0, 4, 2]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {"offsets": (np.array([0, 8, 7, 9]),)},
        {"offsets": (np.array([-1, 2, 3, 9]),)},
        {"offsets": (np.array([0, 2, 9]),)},
        {"offsets": (np.array([0, 0, 0, SIZE + 1]),)},
        {"references": (np.zeros(2, REFERENCE),)},
        {"items": np.array([0])},
        {"items": np.array([1, 1])},
        {"envs": 0},
        {"envs": 2},
        {"first": -1},
        {"first": 2, "stop": 1},
        {"stop": 4},
        {"heads": np.array([-8])},
        {"heads": np.array([4])},
        {"heads": np.array([0, 0])},
        {"free": np.array([SIZE + 1])},
        {"size": 0},
        {"size": 12, "free": np.array([12])},
        {"after": np.zeros(2, np.int64)},
        {"segments": np.zeros((1, 4), np.int64)},
    ],
    ids=str,
)
def test_values_that_do_not_exist_are_refused(kernel, listed, change):
    values = [[[b"ab"], [b"c"], [b"defghi"]]]
    given_ = arguments(values, [1], [listed], [0], [SIZE])
    assert kernel.pack_values(*given_.values()) == (3, 1)
    given_ = arguments(values, [1], [listed], [0], [SIZE])
    with pytest.raises(ValueError, match="pack_values: values must exist, and arrays"):
        kernel.pack_values(*(given_ | change).values())
    assert set(given_["out"].tolist()) == {0xEE}


@pytest.mark.parametrize("kernel", KERNELS)
def test_bytes_and_addresses_must_be_of_all_values(kernel):
    values = [[[b"ab"], [b"c"], [b"defghi"]]]
    given_ = arguments(values, [1], [False], [0], [SIZE])
    given_["sources"] = (given_["sources"][0][:8],)
    with pytest.raises(ValueError, match="pack_values: values must exist, and arrays"):
        kernel.pack_values(*given_.values())
    for name in ("sources", "addresses"):
        given_ = arguments(values, [1], [True], [0], [SIZE])
        given_[name] = (given_[name][0][:2],)
        with pytest.raises(ValueError, match="pack_values: values must exist, and arr"):
            kernel.pack_values(*given_.values())
