"""What a buffer is created and opened with, refused before anything is made."""

import pytest

import mmreplay as mr
from mmreplay.errors import FormatError, SchemaError

FLAG = mr.Field((), "bool")
SCHEMA = mr.Schema(
    {
        "observation": mr.Field((2,), "int64"),
        "reward": mr.Field((), "float32"),
        "terminated": FLAG,
        "truncated": FLAG,
    }
)


def made(path=None, capacity=20, **options):
    engine = "memory" if path is None else "memmap"
    return mr.ReplayBuffer.create(path, SCHEMA, capacity, engine=engine, **options)


def add(buffer, count):
    for number in range(count):
        buffer.add(observation=[number, number], reward=1.0, terminated=False, truncated=False)


OPTIONS = {
    "a number": ({"sampler": 3}, r"sampler must be a sampler.*got 3"),
    "a sampler's class": (
        {"sampler": mr.UniformSampler},
        r"sampler must be a sampler.*one, or leave it out\.",
    ),
    "one transform": (
        {"transforms": mr.NStep(2, 0.9)},
        "transforms must be a list of transforms, got NStep",
    ),
    "no transforms at all": ({"transforms": 3}, r"transforms must be a list of.*got 3"),
    "a transform's class": (
        {"transforms": [mr.NStep]},
        r"transforms must be.*got <class 'mmreplay\.transforms\.nstep\.NStep'>",
    ),
    "steps ahead": (
        {"transforms": [mr.NStep(20, 0.9)]},
        r"transforms must read at most 20 rows of each.*got windows of 21",
    ),
    "frames": (
        {"transforms": [mr.FrameStack(20)]},
        r"transforms must read at most 20 rows of each.*got windows of 21",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_cannot_be_is_refused_before_there_is_a_folder(tmp_path, name):
    options, told = OPTIONS[name]
    with pytest.raises(SchemaError, match=told):
        made(tmp_path / "b", **options)
    assert not (tmp_path / "b").exists()
    made(tmp_path / "b").close()
    for mode in ("r", "r+"):
        with pytest.raises(SchemaError, match=told):
            mr.ReplayBuffer.open(tmp_path / "b", mode, **options)
    mr.ReplayBuffer.open(tmp_path / "b", "r+").close()


def test_a_buffer_is_not_made_smaller_than_its_windows():
    with made(transforms=[mr.NStep(5, 0.9)]) as buffer:
        add(buffer, 15)
        with pytest.raises(
            SchemaError, match=r"transforms must read at most 5 rows.*got windows of 6"
        ):
            buffer.resize(5)
        assert buffer.capacity == 20
        buffer.resize(6)
        assert buffer.sample(9).positions.tolist() == [9] * 9


@pytest.mark.parametrize("name", [None, "b"])
@pytest.mark.parametrize("value", [{1, 2}, float("nan"), b"bytes"])
def test_a_users_own_that_is_no_json_is_refused(tmp_path, name, value):
    path = None if name is None else tmp_path / name
    with pytest.raises(FormatError, match=r"user_metadata cannot .*Pass JSON"):
        made(path, user_metadata={"key": value})
    assert not (tmp_path / "b").exists()


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match=r".* is a file, not a folder"):
        made(tmp_path / "file" / "b")


@pytest.mark.parametrize("call", ["clear", "end_episodes", "dequeue"])
def test_an_environment_named_twice_is_to_be_left_out(call):
    with made() as buffer:
        add(buffer, 3)
        with pytest.raises(
            SchemaError, match=r"must name each environment once, got \[0, 0\]\. Use extend"
        ):
            getattr(buffer, call)(*([1] if call == "dequeue" else []), env_ids=[0, 0])


def test_windows_larger_than_memory_are_refused_with_their_length():
    with made(sampler=mr.SequenceSampler(10)) as buffer:
        add(buffer, 15)
        nbytes = 10**13 * 10 * SCHEMA.row_nbytes
        told = f"fields of {10**13} windows of 10 steps need "
        with pytest.raises(MemoryError, match=f"{told}{nbytes:,} bytes"):
            buffer.sample(10**13)
