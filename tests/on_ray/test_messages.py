"""What is sent to shards and back is read as it was written."""

import numpy as np
import pytest

pytest.importorskip("ray")

import mmreplay as mr
from mmreplay.ray.messages import (
    ARGUMENT_NBYTES,
    client_from_bytes,
    client_to_bytes,
    from_bytes,
    reply_from_bytes,
    reply_to_bytes,
    request_from_bytes,
    request_to_bytes,
    to_bytes,
)
from tests.on_ray.rings import client_of, update_of, wanted_of


def equal(one, other):
    """Whether messages are equal, with the dtypes of their arrays."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(equal(one[n], other[n]) for n in one)
    if isinstance(one, list | tuple):
        alike = type(one) is type(other) and len(one) == len(other)
        return alike and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("count", [0, 1, 7, 256])
def test_columns_are_joined_and_aligned(count):
    columns = [
        [np.arange(count), np.arange(3)],
        [np.ones((count, 3), bool)],
        [np.arange(2 * count, dtype=np.float32)[::2]],
        [np.zeros((0, 2), np.uint8), np.ones((count, 2), np.uint8)],
    ]
    head, arrays = from_bytes(to_bytes({"highest": float("inf")}, columns))
    assert head == {"highest": float("inf")}
    for array, column in zip(arrays, columns, strict=True):
        assert equal(array, np.concatenate(column))
        assert array.flags.aligned
        assert not array.flags.writeable


@pytest.mark.parametrize(
    "transforms", [(), (mr.Normalize({"n": np.arange(3.0)}, {"n": np.ones(3, np.float32)}),)]
)
def test_a_client_is_the_same_each_time(transforms):
    client = client_of(mr.SequenceSampler(3, mr.PrioritizedSampler(0.5)), transforms)
    read = client_from_bytes(client_to_bytes(client))
    assert equal(read, client)
    assert client_from_bytes(client_to_bytes(client)) is read


def test_a_request_of_a_few_rings_is_one_argument(rng):
    wanted = wanted_of({"a": rng.random(5), "b": rng.random(3)}, step=7, key=2**64 - 1)
    wanted |= {"epoch": ("name", 3), "block_rows": 9, "rows": ["b"]}
    updates = {"b": [update_of([1, 2], [3, 4])], "a": [update_of([5], [6])]}
    (message,) = request_to_bytes(updates, wanted, 2.5)
    read = request_from_bytes([message])
    assert equal(read, (updates, wanted, 2.5))
    assert list(read[1]["shares"]) == ["a", "b"]
    nothing = request_to_bytes({}, wanted_of({}), 0.0)
    assert equal(request_from_bytes(nothing), ({}, wanted_of({}), 0.0))


def test_a_large_request_is_several_arguments_that_ray_sends_at_once(rng):
    wanted = wanted_of({"a": rng.random(40_000)})
    arguments = request_to_bytes({}, wanted, 0.0)
    assert len(arguments) == 4
    assert all(len(each) <= ARGUMENT_NBYTES < 100 << 10 for each in arguments)
    assert equal(request_from_bytes(arguments), ({}, wanted, 0.0))


def test_priorities_of_a_ring_are_one_update_with_the_last_behind():
    updates = {
        "a": [update_of([1, 2], [3, 4]), update_of([2], [9])],
        "b": [update_of([7], [1]), update_of([], [])],
    }
    read, _, _ = request_from_bytes(request_to_bytes(updates, wanted_of({}), 0.0))
    wanted = {"a": [update_of([1, 2, 2], [3, 4, 9])], "b": [update_of([7], [1])]}
    assert equal(read, wanted)


def test_priorities_of_windows_stay_apart(rng):
    windows = [
        {
            "env_ids": np.zeros(2, np.int64),
            "positions": np.arange(2),
            "values": rng.random((2, length)),
            "mask": mask,
        }
        for length, mask in ((3, np.ones((2, 3), bool)), (2, None))
    ]
    updates = {"a": windows, "b": [update_of([1], [1])]}
    request = request_to_bytes(updates, wanted_of({}), 0.0)
    assert equal(request_from_bytes(request)[0], updates)


def test_steps_with_numbers_of_other_dtypes_stay_apart():
    one, other = update_of([1, 2], [3, 4]), update_of([5, 6], [7, 8])
    for name in ("env_ids", "positions"):
        narrow = one | {name: one[name].astype(np.int32)}
        for own in ([narrow, other], [other, narrow]):
            request = request_to_bytes({"a": own}, wanted_of({}), 0.0)
            assert equal(request_from_bytes(request)[0], {"a": own})


def draw_of(rng, count, **more):
    return {
        "env_ids": np.zeros(count, np.int64),
        "positions": rng.integers(0, 1 << 62, count),
        "probabilities": rng.random(count),
        "windows": None,
        "mask": None,
        "is_first": None,
        "first_only": [],
        **more,
    }


def test_a_reply_has_draws_with_windows_and_without(rng):
    windows = {
        "windows": rng.integers(0, 9, (2, 3)),
        "mask": np.ones((2, 3), bool),
        "is_first": None,
        "first_only": ["a/b"],
        "bfloat16": ["c"],
    }
    reply = {
        "masses": {"a": [0.1 + 0.2, 3.0, float("inf"), 1e-300], "z": [0.0] * 4},
        "draws": {
            "a": draw_of(rng, 4),
            "none": None,
            "w": draw_of(rng, 2, **windows),
            "empty": draw_of(rng, 0),
        },
        "dropped": 5,
    }
    assert equal(reply_from_bytes(reply_to_bytes(reply)), reply)
    nothing = {"masses": {}, "draws": {}, "dropped": 0}
    assert equal(reply_from_bytes(reply_to_bytes(nothing)), nothing)


def test_a_reply_with_rows_is_left_to_ray(rng):
    drawn = draw_of(rng, 2, fields={"n": np.arange(2)}, bfloat16=[])
    reply = {"masses": {}, "draws": {"a": drawn}, "dropped": 0}
    assert reply_to_bytes(reply) is reply
