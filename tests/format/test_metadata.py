"""metadata.json: it comes back equal, and everything it should not say is refused."""

import json
import os
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.errors import CorruptError, FormatError, SchemaError, VersionError
from mmreplay.format import metadata as metadata_file
from mmreplay.ring import Ring
from mmreplay.schema.dtypes import DTYPES
from tests.format.support import metadata_of

PATH = Path("metadata.json")


def sealed(value):
    """The bytes of any JSON with its right checksum."""
    body = json.dumps(value, indent=1).encode()[: -len("\n}")] + b",\n "
    return body + b'"crc32c": "%08x"\n}\n' % google_crc32c.value(body)


def value_of(**changes):
    value = json.loads(metadata_file.encode(metadata_of()))
    del value["crc32c"]
    return value | changes


fields = st.builds(
    mr.Field,
    st.lists(st.integers(1, 9), max_size=4).map(tuple),
    st.sampled_from(DTYPES),
    exact=st.booleans(),
    mutable=st.booleans(),
)
names = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=9
)
free_names = names.filter(lambda name: name not in ("terminated", "truncated"))


@given(
    schema=st.dictionaries(free_names, fields, min_size=1, max_size=6),
    capacity=st.integers(1, 1 << 30),
    num_envs=st.integers(1, 1 << 12),
    layout=st.sampled_from(["env_major", "time_major", None]),
    autoreset=st.sampled_from(["disabled", "same_step", "next_step"]),
    generation=st.integers(1, 999_999),
    user=st.dictionaries(names, st.integers() | names, max_size=3),
)
def test_metadata_comes_back_equal(schema, capacity, num_envs, layout, autoreset, generation, user):
    schema.pop("next_observation", None)
    metadata = metadata_of(
        ring=Ring.sized(capacity, num_envs, layout),
        autoreset=autoreset,
        generation=generation,
        schema=mr.Schema(schema or {"a": mr.Field((), "bool")}),
        user={key: value for key, value in user.items() if value != 2**64},
        ro_compat=("later",),
    )
    try:
        data = metadata_file.encode(metadata)
    except FormatError:
        # The user's integer was of more than 20 digits.
        return
    assert metadata_file.decode(data, PATH) == metadata


def test_the_bytes_end_in_the_checksum_of_what_is_before_it():
    data = metadata_file.encode(metadata_of())
    body, tail = data[:-23], data[-23:]
    assert tail == b'"crc32c": "%08x"\n}\n' % google_crc32c.value(body)
    assert body.startswith(b'{\n "format": "mmreplay",\n "version": [\n  1,\n  0\n ]')


def test_members_that_a_later_minor_version_adds_are_ignored():
    value = value_of(version=[1, 7], colour="blue")
    value["features"]["compat"] = ["colours"]
    assert metadata_file.decode(sealed(value), PATH) == metadata_of()


def test_unknown_features_refuse_reading_or_only_writing():
    value = value_of()
    value["features"] = {"incompat": [], "ro_compat": ["later"]}
    assert metadata_file.decode(sealed(value), PATH).unknown_features == ("later",)
    value["features"] = {"incompat": ["zstd", "aes"]}
    with pytest.raises(VersionError, match=r"needs the features \['aes', 'zstd'\]"):
        metadata_file.decode(sealed(value), PATH)


def test_a_buffer_of_an_unknown_ro_compat_feature_opens_read_only(tmp_path):
    mr.ReplayBuffer.create(tmp_path / "b", metadata_of().schema, 4).close()
    path = tmp_path / "b" / "metadata.json"
    value = json.loads(path.read_bytes())
    del value["crc32c"]
    value["features"]["ro_compat"] = ["later"]
    path.write_bytes(sealed(value))
    assert len(mr.ReplayBuffer.open(tmp_path / "b")) == 0
    with pytest.raises(VersionError, match=r"\['later'\], which this mmreplay cannot"):
        mr.ReplayBuffer.open(tmp_path / "b", "r+")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"format": "zarr"}, FormatError, "format must be 'mmreplay', got 'zarr'"),
        ({"version": [2, 0]}, VersionError, r"format version 2\.0, .*reads 1\.x"),
        ({"version": [0, 9]}, VersionError, r"format version 0\.9"),
        ({"version": "1.0"}, FormatError, r"version must be .*, got '1\.0'"),
        ({"version": [1]}, FormatError, r"must be \[major, minor\]"),
        ({"version": [True, 0]}, FormatError, r"must be \[major, minor\]"),
        ({"version": [1.0, 0]}, FormatError, r"must be \[major, minor\]"),
        ({"features": []}, FormatError, r"features must be an object, got \[\]"),
        ({"features": {"incompat": "a"}}, FormatError, "must be a list of names"),
        ({"features": {"ro_compat": [1]}}, FormatError, "must be a list of names"),
        ({"uuid": "00"}, FormatError, "uuid must be 32 hex digits, got '00'"),
        ({"uuid": "G" * 32}, FormatError, "must be 32 hex digits"),
        ({"uuid": 7}, FormatError, "uuid must be 32 hex digits, got 7"),
        ({"created": 7}, FormatError, "created must be a UTC time, got 7"),
        ({"created": "x" * 65}, FormatError, "must be a UTC time"),
        ({"generation": 0}, FormatError, r"generation .*in \[1, 999999\], got 0"),
        ({"generation": "1"}, FormatError, "generation must be an integer .*, got '1'"),
        ({"generation": 1_000_000}, FormatError, "generation must be .*, got 1000000"),
        ({"engine": "redis"}, FormatError, "engine must be one of .*, got 'redis'"),
        ({"layout": None}, FormatError, "layout must be one of .*, got None"),
        ({"autoreset": 1}, FormatError, "autoreset must be one of .*, got 1"),
        ({"capacity": 0}, FormatError, "capacity must be an integer in .*, got 0"),
        ({"capacity": -1}, FormatError, "capacity must be .*, got -1"),
        ({"capacity": 48.0}, FormatError, r"capacity must be an int.*, got 48\.0"),
        ({"capacity": True}, FormatError, "capacity must be an integer .*, got True"),
        ({"capacity": 1 << 49}, FormatError, "capacity must be"),
        ({"num_envs": 0}, FormatError, "num_envs must be .*, got 0"),
        ({"num_envs": 1 << 21}, FormatError, "num_envs must be .*, got 2097152"),
        ({"reserve": 1}, FormatError, "reserve must be an integer in .*, got 1"),
        ({"block_rows": 0}, FormatError, "block_rows must be .*, got 0"),
        ({"block_rows": 3}, FormatError, "block_rows must be a power of two, got 3"),
        ({"slots": 52}, FormatError, "slots must be at least 53 .*, got 52"),
        ({"slots": 55}, FormatError, "a multiple of 2, got 55"),
        ({"slots": 1 << 60}, FormatError, "slots must be"),
        ({"user": []}, FormatError, "'user' and 'roles' must be objects"),
        ({"roles": None}, FormatError, "'user' and 'roles' must be objects"),
        ({"roles": {"boss": "a"}}, FormatError, "role must be one of .*, got 'boss'"),
        ({"schema": {}}, FormatError, "schema fields must be .*, got dict"),
        ({"schema": []}, FormatError, "fields, got 0"),
        ({"schema": [7]}, FormatError, "schema field entry must be an object, got 7"),
    ],
)
def test_what_no_buffer_says_is_refused_by_name(changes, error, message):
    with pytest.raises(error, match=rf"^metadata\.json.*{message}"):
        metadata_file.decode(sealed(value_of(**changes)), PATH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "complex64"}, "dtype of 'action'"),
        ({"dtype": "object"}, "dtype of 'action'"),
        ({"dtype": ">f4"}, "dtype of 'action'"),
        ({"shape": [-1]}, r"axes of at least 0"),
        ({"shape": [1 << 60, 1 << 60]}, "take fewer than .* bytes per step"),
        ({"shape": [True]}, "shape of 'action'"),
        ({"shape": [1] * 33}, "at most 32 integers"),
        ({"mutable": 1}, "mutable of 'action' must be true or false, got 1"),
        ({"colour": 1}, "schema field keys"),
        ({"name": "../x/"}, "field path"),
        ({"name": "a\0b"}, "schema field name must be one without control"),
        ({"name": "a\x1b[2J"}, r"schema field name must be .*, got 'a\\x1b\[2J'"),
        ({"name": "reward"}, "must name each path once, got 'reward' twice"),
        ({"name": "x" * 300}, "300 characters"),
        ({"name": "\ud800"}, "that UTF-8 can hold"),
        ({"name": 7}, "schema field name"),
    ],
)
def test_fields_that_nobody_declared_are_refused_by_name(changes, message):
    value = value_of()
    del value["roles"]["action"]
    value["schema"][2] |= changes
    with pytest.raises(FormatError, match=rf"^metadata\.json: .*{message}"):
        metadata_file.decode(sealed(value), PATH)


@pytest.mark.parametrize("key", sorted(value_of()))
def test_each_member_is_needed(key):
    value = value_of()
    del value[key]
    with pytest.raises(FormatError, match=r"^metadata\.json"):
        metadata_file.decode(sealed(value), PATH)


def test_files_of_sizes_that_no_system_call_takes_are_refused():
    value = value_of(capacity=1 << 48, slots=(1 << 48) + 64, num_envs=1 << 20)
    with pytest.raises(FormatError, match="bytes, but must take fewer than"):
        metadata_file.decode(sealed(value), PATH)
    with pytest.raises(SchemaError, match="Choose a smaller capacity"):
        metadata_file.encode(metadata_of(ring=Ring.sized(1 << 48, 1 << 20)))


def test_a_missing_or_changed_byte_is_reported_as_damage():
    data = metadata_file.encode(metadata_of())
    with pytest.raises(CorruptError, match=r"has checksum .*damaged or edited by hand"):
        metadata_file.decode(data.replace(b'"note": "x"', b'"note": "y"'), PATH)
    for cut in (data[:-1], data + b"\n", data.replace(b'"crc32c"', b'"crc32d"')):
        with pytest.raises(CorruptError, match="does not end with its checksum"):
            metadata_file.decode(cut, PATH)


def test_user_metadata_that_does_not_fit_is_refused():
    with pytest.raises(SchemaError, match="metadata must take at most 1048576 bytes"):
        metadata_file.encode(metadata_of(user={"a": "x" * (1 << 20)}))
    with pytest.raises(FormatError, match="metadata cannot be stored"):
        metadata_file.encode(metadata_of(user={"a": object()}))


def test_folders_that_are_no_buffer_are_refused_by_name(tmp_path):
    with pytest.raises(FormatError, match=r"does not exist\. Check the path"):
        metadata_file.load(tmp_path / "none")
    with pytest.raises(FormatError, match="is not a replay buffer: it has no metadata"):
        metadata_file.load(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FormatError, match="must be a buffer's folder, got a file"):
        metadata_file.load(tmp_path / "file")
    (tmp_path / "metadata.json").write_bytes(b" " * (1 << 21))
    with pytest.raises(FormatError, match="at most 1048576 bytes, got 2097152"):
        metadata_file.load(tmp_path)


def test_a_link_or_pipe_instead_of_metadata_is_refused(tmp_path):
    path = tmp_path / "metadata.json"
    real = tmp_path / "real"
    real.write_bytes(metadata_file.encode(metadata_of()))
    path.symlink_to(real)
    with pytest.raises(FormatError, match="is not a regular file, but"):
        metadata_file.load(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FormatError, match="is not a regular file, but"):
        metadata_file.load(tmp_path)
