"""Fields seen through their files, without a copy."""

import numpy as np
import pytest

import mmreplay as mr

SCHEMA = mr.Schema(
    {
        "number": mr.Field((), "int16"),
        "observation": mr.Field((3,), "float32"),
        "pixels": mr.Field((64, 64), "uint8"),
        "note": mr.Field((2,), "float64", mutable=True),
        "terminated": mr.Field((), "bool"),
    }
)
PATHS = ("number", "observation", "pixels", "note")


def columns(first, count, envs):
    numbers = np.arange(first, first + count)[:, None] * envs + np.arange(envs)
    return {
        "number": numbers.astype(np.int16),
        "observation": numbers[..., None] + np.float32([0, 0.25, 0.5]),
        "pixels": np.broadcast_to(
            (numbers % 251).astype(np.uint8)[..., None, None], (count, envs, 64, 64)
        ),
        "note": numbers[..., None] + [0.0, 0.5],
        "terminated": np.zeros((count, envs), bool),
    }


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("envs", [1, 3])
def test_views_are_what_is_gathered_at_every_turn_of_the_ring(tmp_path, layout, envs):
    path, lengths = tmp_path / "ring", set()
    with (
        mr.ReplayBuffer.create(
            path, SCHEMA, 20, envs, layout=layout, autoreset="disabled"
        ) as buffer,
        mr.ReplayBuffer.open(path) as reader,
    ):
        for first in range(0, 70, 7):
            buffer.extend(columns(first, 7, envs))
            span = buffer.span
            places = np.arange(span.first[0], span.stop[0])[:, None]
            for name in PATHS:
                for each in (buffer, reader):
                    views = each.mapped(name)
                    lengths.add(len(views))
                    expected = each.get_field(name, np.arange(envs), places)
                    np.testing.assert_array_equal(np.concatenate(views), expected)
                    assert not any(view.flags.owndata for view in views)
    assert lengths == {1, 2}


def test_what_is_written_into_a_view_stays_there(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "ring", SCHEMA, 20) as buffer:
        buffer.extend(columns(0, 10, 1))
        for name in PATHS:
            before = buffer.get_field(name, 0, np.arange(10))
            (view,) = buffer.mapped(name)
            view[...] = 77
            np.testing.assert_array_equal(buffer.get_field(name, 0, range(10)), before)
            np.testing.assert_array_equal(buffer.mapped(name)[0][:, 0], before)
            assert (view == 77).all()
        buffer.commit()
    with mr.ReplayBuffer.open(tmp_path / "ring") as again:
        assert again.get_field("number", 0, np.arange(10)).tolist() == list(range(10))


def test_views_outlive_their_buffer(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "ring", SCHEMA, 20) as buffer:
        buffer.extend(columns(0, 10, 1))
        (view,) = buffer.mapped("number")
    assert view[:, 0].tolist() == list(range(10))


@pytest.mark.parametrize("engine", ["memory", "zarr", "memmap"])
def test_there_is_no_view_of_what_lies_in_no_file_or_not_side_by_side(tmp_path, engine):
    path = None if engine == "memory" else tmp_path / "ring"
    with mr.ReplayBuffer.create(path, SCHEMA, 20, 2, engine=engine, autoreset="disabled") as buffer:
        buffer.extend(columns(0, 5, 2))
        assert (buffer.mapped("number") is None) == (engine != "memmap")
        assert buffer.mapped("terminated") is None
        buffer.extend({k: v[:, :1] for k, v in columns(5, 1, 2).items()}, env_ids=[0])
        assert buffer.mapped("number") is None


def test_values_of_any_length_have_no_views(tmp_path):
    schema = mr.Schema({"text": mr.Field.text(max_bytes=9), "number": mr.Field((), "int16")})
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 9, heap_bytes="4 KiB") as buffer:
        buffer.extend(text=["a", "bc"], number=[1, 2])
        assert buffer.mapped("text") is None
        (view,) = buffer.mapped("number")
        assert view[:, 0].tolist() == [1, 2]
