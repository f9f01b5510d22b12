"""Fields that are cast, renamed and dropped on the way."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError, SourceError
from mmreplay.schema.dtypes import DTYPES, bfloat16_bits, from_bfloat16_bits
from mmreplay.testing.disks import QuickDisk, using

VALUES = [0, 1, 2, 3, 100, 127]


@pytest.fixture(autouse=True)
def quick_disk():
    """A disk that syncs nothing: no test here cuts the power."""
    with using(QuickDisk()):
        yield


@pytest.fixture
def ring(tmp_path):
    schema = mr.Schema(
        {
            "observation": {
                "camera": mr.Field((2, 2), "uint8"),
                "state": mr.Field((3,), "float64"),
            },
            "action": mr.Field((), "int64"),
            "reward": mr.Field((), "float32"),
            "note": mr.Field.text(max_bytes=20),
            "terminated": mr.Field((), "bool"),
        }
    )
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 20, heap_bytes=4096) as buffer:
        buffer.set_statistics({"mean": 3})
        for n, value in enumerate(VALUES):
            buffer.add(
                observation={"camera": np.full((2, 2), value), "state": np.arange(3) + value / 3},
                action=value,
                reward=value / 10,
                note=f"n{n}",
                terminated=n % 3 == 2,
            )
    return tmp_path / "ring"


def columns_of(path):
    with mr.ReplayBuffer.open(path) as buffer:
        assert not mr.verify_buffer(path).findings
        return buffer.schema, buffer.gather_all(), buffer.statistics


def test_fields_get_other_names_dtypes_or_go(ring, tmp_path):
    changes = {
        "cast": {"observation/state": "float32", "action": "int8"},
        "rename": {"observation/camera": "observation/top", "reward": "score"},
        "drop": ["note"],
    }
    report = mr.load(ring, tmp_path / "a", **changes)
    mr.export(ring, tmp_path / "b.parquet", **changes)
    mr.load(tmp_path / "b.parquet", tmp_path / "b")
    _, before, _ = columns_of(ring)
    for name in "ab":
        schema, after, statistics = columns_of(tmp_path / name)
        assert schema.paths == (
            "observation/top",
            "observation/state",
            "action",
            "score",
            "terminated",
        )
        assert schema.role("reward") == "score"
        assert statistics == {}
        assert (after["observation/top"] == before["observation/camera"]).all()
        assert after["action"].dtype == np.int8
        assert after["action"].tolist() == VALUES
        np.testing.assert_array_equal(
            after["observation/state"], before["observation/state"].astype(np.float32)
        )
    (note,) = (note for note in report.notes if "rounded" in note)
    assert note.startswith("field 'observation/state' was rounded to float32, by at most ")
    assert 0 < float(note.split()[-4]) < 2**-24


def test_a_subtree_is_renamed_with_all_that_stands_below(ring, tmp_path):
    mr.load(ring, tmp_path / "a", rename={"observation": "obs"}, drop=["note"])
    schema, after, _ = columns_of(tmp_path / "a")
    assert schema.paths[:2] == ("obs/camera", "obs/state")
    assert schema.role("observation") == "obs"
    assert after["obs/camera"].shape == (6, 2, 2)


def test_drops_alone_leave_the_statistics(ring, tmp_path):
    mr.load(ring, tmp_path / "a", drop=["observation/camera"])
    schema, _, statistics = columns_of(tmp_path / "a")
    assert "observation/camera" not in schema.paths
    assert statistics == {"mean": 3}


def test_a_condition_may_name_what_is_dropped_or_renamed(ring, tmp_path):
    mr.load(ring, tmp_path / "a", where="max(action) > 2", drop=["action"], rename={"reward": "r"})
    schema, after, _ = columns_of(tmp_path / "a")
    assert "action" not in schema.paths
    assert len(after["r"]) == 3


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_each_cast_is_what_numpy_says_or_is_refused(tmp_path, source, target):
    values = np.array([0, 1, 1, 0], np.float32)
    stored = bfloat16_bits(values) if source == "bfloat16" else values.astype(source)
    schema = mr.Schema({"x": mr.Field((), source)})
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 9) as buffer:
        buffer.extend(x=stored)
    mr.load(tmp_path / "a", tmp_path / "b", cast={"x": target})
    _, after, _ = columns_of(tmp_path / "b")
    found = after["x"]
    if target == "bfloat16":
        found = from_bfloat16_bits(np.asarray(found).view(np.uint16))
    assert found.astype(np.float32).tolist() == values.tolist()


@pytest.mark.parametrize(
    ("dtype", "value", "target"),
    [
        ("int64", 300, "uint8"),
        ("int64", -1, "uint64"),
        ("uint64", 2**63, "int64"),
        ("int64", 2, "bool"),
        ("float32", 0.5, "int32"),
        ("float64", np.nan, "int32"),
        ("float64", 1e19, "int64"),
        ("float64", 1e300, "float32"),
        ("float64", 1e39, "bfloat16"),
        ("float32", 70000.0, "float16"),
    ],
)
def test_a_value_that_the_dtype_does_not_hold_is_refused(tmp_path, dtype, value, target):
    schema = mr.Schema({"x": mr.Field((), dtype)})
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 9) as buffer:
        buffer.extend(x=np.array([1, value], dtype))
    with pytest.raises(
        SourceError, match=rf"cast: field 'x' has the value .*, which {target} does"
    ):
        mr.load(tmp_path / "a", tmp_path / "b", cast={"x": target})
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("dtype", "value", "target", "error"),
    [
        ("int64", 2**53 + 1, "float64", 2**-53),
        ("int64", -(2**53) - 1, "float64", 2**-53),
        ("uint64", 2**64 - 1, "float64", 2**-64),
        ("int64", 2**63 - 1, "float32", 2**-63),
        ("int64", 2**24 + 1, "float32", 2**-24),
        ("int64", 2**53 + 2, "float64", 0),
        ("int64", -(2**63), "float64", 0),
        ("int64", 2**60, "bfloat16", 0),
    ],
)
def test_a_note_says_how_much_an_integer_was_rounded(tmp_path, dtype, value, target, error):
    schema = mr.Schema({"x": mr.Field((), dtype)})
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 9) as buffer:
        buffer.extend(x=np.array([0, value, 1], dtype))
    report = mr.load(tmp_path / "a", tmp_path / "b", cast={"x": target})
    notes = [note for note in report.notes if "rounded" in note]
    wanted = f"field 'x' was rounded to {target}, by at most {error:.2g} of a value"
    assert notes == ([wanted] if error else [])


def test_infinity_and_nan_stay_what_they_are(tmp_path):
    schema = mr.Schema({"x": mr.Field((), "float64")})
    values = [np.inf, -np.inf, np.nan, 0.0]
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 9) as buffer:
        buffer.extend(x=np.array(values))
    report = mr.load(tmp_path / "a", tmp_path / "b", cast={"x": "float16"})
    _, after, _ = columns_of(tmp_path / "b")
    np.testing.assert_array_equal(after["x"], np.array(values, np.float16))
    assert not any("rounded" in note for note in report.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": ["nope"]}, "drop must be fields or subtrees of .*, got 'nope'"),
        ({"cast": {"nope": "int8"}}, "cast must be fields or subtrees of .*, got 'nope'"),
        ({"rename": {"nope": "a"}}, "rename must be fields or subtrees of .*, got 'nope'"),
        ({"drop": "note"}, r"drop must be a list of paths, got 'note'. Pass \['note'\]"),
        (
            {"drop": ["observation", "action", "reward", "note", "terminated"]},
            "drop leaves no field",
        ),
        ({"cast": {"observation": "int8"}}, "cast: 'observation' is several fields"),
        ({"cast": {"note": "int8"}}, "values of field 'note' have any length"),
        ({"cast": {"action": "int7"}}, "dtype must be one of"),
        ({"rename": {"action": "reward"}}, "two fields would be named 'reward'"),
        ({"rename": {"action": "observation"}}, "observation"),
        ({"rename": {"action": ""}}, "rename: a path must be a text, got ''"),
        ({"rename": {"acton": "a"}}, "Did you mean 'action'"),
    ],
)
def test_changes_that_make_no_sense_are_refused(ring, tmp_path, changes, message):
    with pytest.raises(SchemaError, match=message):
        mr.load(ring, tmp_path / "a", **changes)
    with pytest.raises(SchemaError, match=message):
        mr.export(ring, tmp_path / "a.npz", **changes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ring"]


def test_a_name_that_would_end_episodes_is_refused(tmp_path):
    schema = mr.Schema({"reward": mr.Field((), "float32"), "done": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 20) as buffer:
        for n in range(9):
            buffer.add(reward=n, done=n % 3 == 2)
    message = (
        "rename: field 'terminated' would play the role terminated, and the source does not end "
        "its episodes by it. Give it another name, leave it out, or add the rows to a new ring"
    )
    for target in ("x", "x.npz", "x.parquet"):
        with pytest.raises(SchemaError, match=message):
            mr.export(tmp_path / "ring", tmp_path / target, rename={"done": "terminated"})
        assert not (tmp_path / target).exists()
    mr.load(tmp_path / "ring", tmp_path / "y", rename={"done": "over", "reward": "score"})
    assert columns_of(tmp_path / "y")[1]["over"].tolist() == [n % 3 == 2 for n in range(9)]


@pytest.fixture
def misnamed(tmp_path):
    """A ring whose episodes end by the field done, beside another named terminated."""
    end = mr.Field((), "bool")
    schema = mr.Schema(
        {"reward": mr.Field((), "float32"), "done": end, "terminated": end},
        roles={"terminated": "done"},
    )
    with mr.ReplayBuffer.create(tmp_path / "misnamed", schema, 20) as buffer:
        for n in range(9):
            buffer.add(reward=n, done=n % 3 == 2, terminated=n == 4)
    return tmp_path / "misnamed"


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"drop": ["done"]}, "drop"),
        ({"fields": ["reward", "terminated"]}, "fields"),
        (
            {"drop": ["reward"], "rename": {"done": "over", "terminated": "truncated"}},
            "rename, drop",
        ),
    ],
)
def test_a_field_that_becomes_an_end_is_refused_by_the_option(misnamed, tmp_path, options, option):
    for target in ("x", "x.npz"):
        with pytest.raises(SchemaError, match=f"^{option}: field '.*' would play the role"):
            mr.export(misnamed, tmp_path / target, **options)
        assert not (tmp_path / target).exists()
    mr.load(misnamed, tmp_path / "y", drop=["done", "terminated"])


def test_a_plain_field_named_as_an_end_is_read_by_conditions_and_renamed(misnamed, tmp_path):
    mr.load(misnamed, tmp_path / "ring2")
    both = [misnamed, tmp_path / "ring2"]
    for sources, factor in ((both[0], 1), (both, 2)):
        mr.load(sources, tmp_path / "x", overwrite=True, where="any(terminated) and return > 0")
        assert columns_of(tmp_path / "x")[1]["reward"].tolist() == [3, 4, 5] * factor
        changes = {"drop": ["done"], "rename": {"terminated": "over"}}
        mr.load(sources, tmp_path / "x", overwrite=True, **changes)
        assert columns_of(tmp_path / "x")[1]["over"].tolist() == [n == 4 for n in range(9)] * factor
    assert mr.episode_table(both[0], where="any(terminated)").number.tolist() == [1]


def test_ends_keep_their_roles_under_other_names(ring, tmp_path):
    mr.load(ring, tmp_path / "a", rename={"terminated": "done"})
    mr.load(tmp_path / "a", tmp_path / "b", rename={"done": "terminated"})
    for name, path in (("a", "done"), ("b", "terminated")):
        schema, after, _ = columns_of(tmp_path / name)
        assert schema.role("terminated") == path
        assert after[path].tolist() == [n % 3 == 2 for n in range(len(VALUES))]


def test_the_command_line_changes_likewise(cli, ring, tmp_path):
    words = ["--cast", "action=int8", "--rename", "reward=score", "--drop", "note"]
    assert cli(ring, tmp_path / "a", *words, "--drop", "observation")[0] == 0
    schema, after, _ = columns_of(tmp_path / "a")
    assert schema.paths == ("action", "score", "terminated")
    assert after["action"].dtype == np.int8


def test_an_error_names_its_source_once(cli, tmp_path):
    schema = mr.Schema({"x": mr.Field((), "int64")})
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 9) as buffer:
        buffer.extend(x=np.array([1, 300]))
    code, _, err = cli(tmp_path / "a", tmp_path / "b", "--cast", "x=uint8")
    assert (code, err.count("while reading")) == (3, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cast", "action"], "--cast must be A=B, got 'action'"),
        (["--rename", "a=b", "--rename", "a=c"], "--rename must give 'a' once, got it twice"),
    ],
)
def test_mistakes_of_pairs_are_one_line(cli, ring, tmp_path, words, message):
    code, _, err = cli(ring, tmp_path / "a", *words)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
