"""What a plan says is what a buffer takes."""

import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError
from mmreplay.plan import free_nbytes, plan_buffer

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
    with mr.ReplayBuffer.create(tmp_path / "b", SCHEMA, capacity, num_envs):
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
    assert (found["observation"].file, found["observation"].row_nbytes) == (
        "f000.bin",
        7056,
    )
    assert found["observation"].kind == "uint8[84, 84]"
    assert (found["action"].file, found["action"].kind) == ("records.bin", "int64")
    assert found["advantage"].file == "f001.bin"
    assert (found["terminated"].file, found["terminated"].nbytes) == ("flags.bin", 0)


@pytest.mark.parametrize(("capacity", "num_envs"), [(0, 1), (1, 0), (1 << 60, 1)])
def test_numbers_out_of_range_are_refused(capacity, num_envs):
    with pytest.raises(SchemaError, match=r"(capacity|num_envs): got .* expected an"):
        plan_buffer(SCHEMA, capacity, num_envs)


def test_free_space_is_that_of_the_disk_that_would_hold_the_path(tmp_path):
    # The disk is shared: it fills and empties between two looks.
    gap = free_nbytes(tmp_path / "not" / "there" / "yet") - free_nbytes(tmp_path)
    assert abs(gap) < 1 << 30
