"""What a plan says is what a buffer takes."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk.files import free_nbytes
from mmreplay.errors import SchemaError
from mmreplay.plan import estimate, plan_buffer
from mmreplay.testing.disks import QuickDisk, using

SCHEMA = mr.Schema(
    {
        "observation": mr.Field((84, 84), "uint8"),
        "x": mr.Field((3,), "float32"),
        "action": mr.Field((), "int64"),
        "advantage": mr.Field((), "float32", mutable=True),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)


@pytest.mark.parametrize("num_envs", [1, 3, 40])
@pytest.mark.parametrize("capacity", [1, 17, 5000, 10**7])
def test_the_plan_is_what_create_makes(tmp_path, capacity, num_envs):
    plan = plan_buffer(SCHEMA, capacity, num_envs)
    with mr.ReplayBuffer.create(tmp_path / "b", SCHEMA, capacity, num_envs, autoreset="disabled"):
        pass
    files = (tmp_path / "b" / "data-000001").iterdir()
    assert plan.nbytes == sum(file.stat().st_size for file in files)
    parts = sum(field.nbytes for field in plan.fields)
    rest = plan.padding_nbytes + plan.flags_nbytes + plan.sums_nbytes
    assert plan.nbytes == parts + rest + plan.commit_nbytes
    kept = plan.nbytes - plan.sums_nbytes - plan.commit_nbytes - plan.slack_nbytes
    assert kept == capacity * num_envs * plan.row_nbytes == plan.pages_nbytes


def test_fields_say_where_they_lie_and_what_they_take():
    found = {field.path: field for field in plan_buffer(SCHEMA, 100).fields}
    assert (found["observation"].file, found["observation"].row_nbytes) == ("f000.bin", 7056)
    assert found["observation"].kind == "uint8[84, 84]"
    assert (found["action"].file, found["action"].kind) == ("records.bin", "int64")
    assert found["advantage"].file == "f001.bin"
    assert (found["terminated"].file, found["terminated"].nbytes) == ("flags.bin", 0)


@pytest.mark.parametrize(("capacity", "num_envs"), [(0, 1), (1, 0), (1 << 60, 1)])
def test_numbers_out_of_range_are_refused(capacity, num_envs):
    with pytest.raises(SchemaError, match=r"(capacity|num_envs) must be an integer in .*, got "):
        plan_buffer(SCHEMA, capacity, num_envs)


def test_free_space_is_that_of_the_disk_that_would_hold_the_path(tmp_path):
    # The disk is shared: it fills and empties between two looks.
    gap = free_nbytes(tmp_path / "not" / "there" / "yet") - free_nbytes(tmp_path)
    assert abs(gap) < 1 << 30


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["blosc-lz4", "zstd"])
@pytest.mark.parametrize("num_envs", [1, 3, 40])
@pytest.mark.sliced(1)
def test_the_estimate_is_near_what_shards_take(tmp_path, rng, codec, num_envs):
    steps = 4000 // num_envs
    frames = np.repeat(rng.integers(0, 50, (steps, num_envs, 84, 7)), 12, axis=-1)
    columns = {
        "observation": frames.astype(np.uint8),
        "x": rng.random((steps, num_envs, 3), np.float32),
        "action": rng.integers(0, 6, (steps, num_envs)),
        "advantage": rng.random((steps, num_envs), np.float32),
        "terminated": np.zeros((steps, num_envs), bool),
        "truncated": np.zeros((steps, num_envs), bool),
    }
    if num_envs == 1:
        columns = {path: column[:, 0] for path, column in columns.items()}
    with using(QuickDisk()):
        for name, options in (("a", {}), ("b", {"engine": "zarr", "codec": codec})):
            with mr.ReplayBuffer.create(
                tmp_path / name, SCHEMA, steps, num_envs, autoreset="disabled", **options
            ) as buffer:
                buffer.extend(columns)
    found = estimate(tmp_path / "a", steps, num_envs, codec)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        packed = buffer.compression
    assert found.ratios["advantage"] == 1
    for path, (nbytes, raw) in packed.items():
        if path in ("terminated", "truncated"):
            continue  # a few bytes of them are mostly the indices of their shards
        # Rows are alike all over, but for shards that are half empty: a quarter of
        # the capacity each, of which the last is not full, holds zeros.
        assert found.ratios[path] == pytest.approx(raw / nbytes, rel=0.35), path
    assert mr.ReplayBuffer.open(tmp_path / "a").compression == {}
    del columns["advantage"]
    told = sum(c.nbytes / found.ratios[path] for path, c in columns.items())
    assert found.nbytes == pytest.approx(told, rel=0.02, abs=4 * steps * num_envs + 999)


def test_of_an_empty_buffer_nothing_is_estimated(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "b", SCHEMA, 9):
        pass
    assert estimate(tmp_path / "b", 9, 1, "zstd") is None


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.sliced(1)
def test_an_estimate_is_of_the_source_s_own_layout(tmp_path, rng, layout):
    schema = mr.Schema({"number": mr.Field((), "int64")})
    numbers = rng.integers(0, 1 << 62, 40)
    with using(QuickDisk()):
        with mr.ReplayBuffer.create(
            tmp_path / "a", schema, 1024, 40, layout=layout, autoreset="disabled"
        ) as buffer:
            # The same for all steps of an environment, so that its chunks are small.
            buffer.extend(number=np.tile(numbers, (1024, 1)))
        mr.compact(tmp_path / "a", tmp_path / "b", codec="zstd")
        with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
            packed, raw = buffer.compression["number"]
    found = estimate(tmp_path / "a", 1024, 40, "zstd")
    # Indices of shards, and those that are not full, are what differs.
    assert found.ratios["number"] == pytest.approx(raw / packed, rel=0.25)
    assert estimate(tmp_path / "b", 1024, 40, "zstd").ratios == found.ratios


# Values that vary.

VARYING = mr.Schema(
    {
        "mission": mr.Field.text(max_bytes=4000),
        "tokens": mr.Field((None, 3), "int16", max_length=500),
        "x": mr.Field((), "int32"),
    }
)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("length", [0, 7, 300])
@pytest.mark.parametrize("capacity", [1, 40, 3000])
def test_a_planned_heap_is_what_create_makes_and_holds_all_rows(
    tmp_path, capacity, length, num_envs
):
    plan = plan_buffer(VARYING, capacity, num_envs, lengths=length)
    with mr.ReplayBuffer.create(
        tmp_path / "b",
        VARYING,
        capacity,
        num_envs,
        heap_bytes=plan.heap_bytes,
        autoreset="disabled",
        commit_every=None,
    ) as buffer:
        files = (tmp_path / "b" / "data-000001").iterdir()
        assert plan.nbytes == sum(file.stat().st_size for file in files)
        assert plan.heap_nbytes == num_envs * plan.heap_bytes
        steps = min(capacity, 700)
        block = {
            "mission": [["m" * length] * num_envs] * steps,
            "tokens": np.zeros((steps, num_envs, length, 3), np.int16),
            "x": np.zeros((steps, num_envs), np.int32),
        }
        for _ in range(-(-3 * capacity // steps)):
            buffer.extend(block)
        # It lapped more than once, and no row ended for want of heap.
        assert (buffer.sizes == capacity).all()


def test_a_heap_may_be_given_and_lengths_by_field():
    plan = plan_buffer(VARYING, 1000, heap_bytes="1 MiB")
    assert plan.heap_bytes == plan.heap_nbytes == 1 << 20
    by_field = plan_buffer(VARYING, 10**6, lengths={"mission": 10.5, "tokens": 40})
    values = round(10.5) + 40 * VARYING["tokens"].inner_nbytes
    assert by_field.values_nbytes == values
    assert by_field.batch_nbytes(9) == 18 * (by_field.row_nbytes + values)
    given = plan_buffer(VARYING, 1000, heap_bytes="1 MiB")
    assert given.values_nbytes == given.heap_bytes // 1000
    # 16 bytes of text and 240 of tokens, and a sixteenth more.
    assert 256e6 * 16 / 15 <= by_field.heap_bytes <= 256e6 * 16 / 15 + 8192
    assert by_field.pages_nbytes >= by_field.heap_nbytes
    assert plan_buffer(SCHEMA, 1000).heap_nbytes == 0
    kinds = [field.kind for field in plan.fields]
    assert kinds == ["text of at most 4000 bytes", "int16[up to 500, 3]", "int32"]
    assert {field.row_nbytes for field in plan.fields} == {16, 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "lengths must say how long an average value of field 'mission' is, got n"),
        ({"lengths": {"mission": 3}}, "average value of field 'tokens' is"),
        ({"lengths": {"x": 3}}, "lengths must be of fields that vary, got 'x'"),
        ({"lengths": 501}, r"length of field 'tokens' must be .* in \[0, 500\], got 501"),
        ({"lengths": -1}, "length of field 'mission' must be"),
        ({"heap_bytes": 4096}, "heap_bytes must be at least"),
        ({"heap_bytes": "much"}, "heap_bytes must be a size such as"),
    ],
)
def test_a_heap_that_nothing_says_is_refused(options, message):
    with pytest.raises(SchemaError, match=message):
        plan_buffer(VARYING, 100, **options)


def test_an_index_by_a_column_is_planned():
    assert plan_buffer(SCHEMA, 1000, 2).index_nbytes == 24 * 2000


def test_a_batch_of_images_is_planned_with_their_arrays():
    field = mr.Field.image((48, 64, 3))
    planned = mr.plan_buffer(mr.Schema({"image": field}), 100)
    assert planned.arrays_nbytes == 48 * 64 * 3
    assert planned.batch_nbytes(10) == 20 * (planned.row_nbytes + planned.values_nbytes + 9216)
    assert planned.values_nbytes == 9216 // 4
