"""``mmreplay convert``: what it makes, what it says, and how it fails."""

import json

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError
from tests.convert.support import every_kind, same_rows


@pytest.fixture
def source(tmp_path):
    every_kind(tmp_path / "source").close()
    return tmp_path / "source"


def test_a_buffer_goes_through_every_format_and_back(cli, source, tmp_path):
    chain = ["a.npz", "b.pt", "c.safetensors", "back"]
    before = source
    for name in chain:
        code, out, err = cli(before, tmp_path / name)
        assert (code, err) == (0, "")
        assert f"{tmp_path / name}: 48 rows" in out
        before = tmp_path / name
    with mr.ReplayBuffer.open(source) as one, mr.ReplayBuffer.open(before) as other:
        same_rows(one, other)


def test_formats_can_be_named(cli, source, tmp_path):
    assert cli(source, tmp_path / "a.bin", "--to", "npz")[0] == 0
    back = tmp_path / "runs.v2"
    assert cli(tmp_path / "a.bin", back, "--from", "npz", "--to", "buffer")[0] == 0
    assert mr.ReplayBuffer.open(back).num_envs == 2


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("a.npz", "csv"),
        ("a.bin", "npz"),
        ("a.pt", "npz"),
        ("a.parquet", "buffer"),
        ("a.npz.bak", "npz"),
    ],
)
def test_a_suffix_of_another_format_is_reported(cli, source, tmp_path, name, written):
    told = (
        f"note: {name} does not end as {written} does: name the format with "
        f"format='{written}' (--from {written}) to read it\n"
    )
    arguments = (source, tmp_path / name, "--to", written, "--fields", "single/int8")
    assert told in cli(*arguments, "--dry-run")[1]
    assert told in cli(*arguments)[1]
    target, only = tmp_path / f"by_{name}", ["single/int8"]
    report = mr.export(source, target, format=written, fields=only)
    assert any(each.startswith(f"by_{name} does not end as") for each in report.notes)


@pytest.mark.parametrize(
    ("name", "written"), [("A.NPZ", "npz"), ("a.csv.gz", "csv"), ("a", "npz"), ("v1.2", "buffer")]
)
def test_a_suffix_that_fits_or_says_nothing_is_not_reported(cli, source, tmp_path, name, written):
    out = cli(source, tmp_path / name, "--to", written, "--fields", "single/int8")[1]
    assert "48 rows" in out
    assert "does not end as" not in out


def test_unknown_formats_get_the_name_that_is_near(cli, source, tmp_path):
    assert "got 'npx'. Did you mean 'npz'?" in cli(source, tmp_path / "a", "--to", "npx")[2]
    told = cli(source, tmp_path / "a", "--from", "parket")[2]
    assert "got 'parket'. Did you mean 'parquet'?" in told
    assert "Did you mean '.npz'?" in cli(source, tmp_path / "a.npx")[2]
    told = cli(source, tmp_path / "a", "--to", "qqq")[2]
    assert "got 'qqq'. Install the package that adds it" in told
    assert "Name the format with format= (--to)." in cli(source, tmp_path / "a.qqq")[2]


@pytest.mark.parametrize("name", ["found", "description", "path"])
def test_options_with_names_of_our_own_arguments_are_refused_as_unknown(source, tmp_path, name):
    told = f"option {name!r} is unknown to 'npz' as a"
    with pytest.raises(SchemaError, match=told):
        mr.export(source, tmp_path / "a.npz", **{name: 1})
    mr.export(source, tmp_path / "b.npz")
    with pytest.raises(SchemaError, match=told):
        mr.load(tmp_path / "b.npz", tmp_path / "b", **{name: 1})


def test_fields_environments_and_capacity_are_chosen(cli, source, tmp_path):
    cli(source, tmp_path / "all.npz")
    for index, origin in enumerate((source, tmp_path / "all.npz")):
        target = tmp_path / f"part{index}"
        code, out, _ = cli(
            origin, target, "--fields", "observation,single/int8", "--env", 1, "--capacity", 5
        )
        assert code == 0
        assert "note: the oldest 19 rows were left out" in out
        with mr.ReplayBuffer.open(target) as buffer:
            assert buffer.schema.paths == ("single/int8", "observation/o")
            assert buffer.span.lengths.tolist() == [0, 5]


STEPS = mr.Schema.from_flat(
    {name: mr.Field((2,), "float32") for name in ("observation", "action")}
    | {"reward": mr.Field((), "float32"), "terminated": mr.Field((), "bool")}
)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.parquet", ["-o", "compression=foo"], "compression must be one of"),
        ("a.parquet", ["-o", "vectors=z"], "vectors must be one of auto"),
        ("a.parquet", ["-o", "file_nbytes=0"], "file_nbytes must be a num"),
        ("a-v0", ["--to", "minari", "-o", "dataset_id=!"], "as Minari demands, got"),
        ("a-v0", ["--to", "minari", "-o", "dataset_id=3"], "as Minari demands, got 3"),
        ("a name", ["--to", "minari"], "a name'. Name the folder so"),
        ("a-v0", ["--to", "minari", "--fields", "action"], "role 'observation' has no"),
        ("a.hdf5", ["--fields", "observation,reward"], "role 'action' has no field"),
        ("a.csv.gz", ["-o", "compression_level=77"], "in [0, 9], got 77"),
        ("a.csv.gz", ["-o", "compression_level=3.0"], "in [0, 9], got 3.0"),
        ("a.csv.gz", ["-o", "compression_level=true"], "in [0, 9], got True"),
        ("a.csv.gz", ["-o", "layout=skrl"], "skrl's layout is not gzipped"),
        ("a.csv", ["-o", "layout=velora"], "layout must be 'skrl'"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(cli, tmp_path, name, options, message):
    with mr.ReplayBuffer.create(tmp_path / "b", STEPS, 8) as buffer:
        buffer.add(
            {
                "observation": np.zeros(2, np.float32),
                "reward": 0.0,
                "action": np.zeros(2, np.float32),
                "terminated": True,
            }
        )
    for dry in ([], ["-n"]):
        code, _, err = cli(tmp_path / "b", tmp_path / name, *options, *dry)
        assert code == 3
        assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_strict_dry_run_refuses_what_a_strict_run_would(cli, tmp_path):
    np.savez(tmp_path / "a.npz", observations=np.zeros((3, 2)), dones=np.ones(3))
    for dry in ([], ["-n"]):
        code, _, err = cli(tmp_path / "a.npz", tmp_path / "b", "--strict", *dry)
        assert code == 3
        assert "column 'dones' may mix time limits with terminations" in err
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_a_dry_run_tells_what_it_would_not_replace(cli, source, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_bytes(b"")
    given = [source, tmp_path / "mine", "-n"]
    assert "exists: add --overwrite" in cli(*given)[1]
    assert "is refused, unless an earlier run made" in cli(*given, "--overwrite")[1]
    with mr.ReplayBuffer.create(tmp_path / "open", STEPS, 8):
        for dry in ([], ["-n"]):
            code, _, err = cli(source, tmp_path / "open", "--overwrite", *dry)
            assert code == 1
            assert "is open for writing, so it cannot be replaced" in err


@pytest.mark.parametrize("name", ["x", "link"])
def test_a_target_in_a_file_is_refused(cli, source, tmp_path, name):
    (tmp_path / "x").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    code, _, err = cli(source, tmp_path / name / "new" / "a.npz")
    assert code == 3
    assert f"{tmp_path / name} is not a folder" in err
    assert (tmp_path / "x").read_bytes() == b"mine"


def test_a_name_too_long_for_the_staged_name_is_refused(cli, source, tmp_path):
    name = "ä" * 116
    code, _, err = cli(source, tmp_path / "new" / f"{name}a.npz")
    assert code == 3
    assert "at most 236 bytes, got 237" in err
    assert not (tmp_path / "new").exists()
    assert cli(source, tmp_path / f"{name}.npz")[0] == 0


def test_a_dry_run_prints_the_plan_and_writes_nothing(cli, source, tmp_path):
    code, out, _ = cli(source, tmp_path / "a.npz", "-n", "--json")
    plan = json.loads(out)
    assert code == 0
    assert (plan["target_format"], plan["rows"], plan["num_envs"]) == ("npz", 48, 2)
    assert not (tmp_path / "a.npz").exists()
    assert "single/bfloat16" in cli(source, tmp_path / "a.npz", "-n")[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_a_report_is_printed_as_json(cli, source, tmp_path):
    report = json.loads(cli(source, tmp_path / "a.npz", "--json")[1])
    assert report["rows"] == 48
    assert report["nbytes"] == (tmp_path / "a.npz").stat().st_size


def test_overwriting_is_refused_by_default(cli, source, tmp_path):
    (tmp_path / "a.npz").write_bytes(b"mine")
    code, _, err = cli(source, tmp_path / "a.npz")
    assert code == 3
    assert r"already exists. Choose another path, or pass" in err
    assert (tmp_path / "a.npz").read_bytes() == b"mine"
    assert cli(source, tmp_path / "a.npz", "--overwrite")[0] == 0


def test_strict_refuses_what_is_guessed(cli, tmp_path):
    np.savez(tmp_path / "a.npz", obs=np.zeros((4, 2)))
    code, _, err = cli(tmp_path / "a.npz", tmp_path / "b", "--strict")
    assert code == 3
    assert "all rows are one episode" in err
    code, out, _ = cli(tmp_path / "a.npz", tmp_path / "b")
    assert code == 0
    assert "doubt: no column says where episodes end" in out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["nothing", "b.npz"], 3, "does not exist"),
        (["source", "b.foo"], 3, r"writes no format of this name.*\.npz"),
        (["source", "b", "--to", "foo"], 3, "format must be one of buffer"),
        (["source", "b.npz", "--fields", "x"], 3, "fields must be fields or subtrees"),
        (["source", "b.npz", "--env", "2"], 3, r"one or more integers in \[0, 2\)"),
        (["source", "b.npz", "-o", "x=1"], 3, "option 'x' is unknown to"),
        (["source", "b.npz", "-o", "x"], 2, "must be NAME=VALUE"),
        (["source", "b.npz", "--capacity", "0"], 2, "must be at least 1, got 0"),
        (["source", "b.npz", "--capacity", "9"], 3, "option 'capacity'"),
        (["source"], 2, "Missing argument"),
        (["source", "s3://b/a.npz"], 3, "DST must be .* the address 's3:.*a.npz'"),
        (["https://x.org/a.npz", "b"], 3, "SRC must be a path on .* 'https:/.*"),
        (["source", "b.zip"], 3, r"writes no format of this name.*\.pt, \.pth, \.sa"),
        (["source", "b.pt", "--compression", "zstd"], 3, "npz or .*, which take it"),
        (["source", "b.npz", "--codec", "zstd"], 3, "use buffer or lerobot, which take it"),
        (["source", "/"], 3, "DST must be .* got '/', the root of all"),
        (
            ["source", "b", "--engine", "zarr", "-o", "codec=[1]"],
            3,
            r"codec must be one of .*, got \[1\]",
        ),
        (
            ["source", "b.csv", "-o", "force=no"],
            3,
            "option 'force' must be true or false, got 'no'",
        ),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(
    cli, source, tmp_path, monkeypatch, args, code, message
):
    monkeypatch.chdir(tmp_path)
    got, _, err = cli(*args)
    assert got == code
    assert len(err.splitlines()) == 1
    assert pytest.RaisesExc(Exception, match=message).matches(Exception(err))


def test_an_option_goes_to_one_side_where_it_says_so(cli, tmp_path):
    size = {"states": np.zeros((5, 2, 3)), "rewards": np.zeros((5, 2, 1))}
    np.savez(tmp_path / "theirs.npz", **size)
    both = [tmp_path / "theirs.npz", tmp_path / "ours.npz"]
    options = ["-o", "from.layout=skrl", "-o", "from.size=4"]
    assert cli(*both, *options)[0] == 0
    with np.load(tmp_path / "ours.npz") as found:
        assert found["states"].shape == (8, 3)
        assert "_env_id" in found
    assert cli(both[0], tmp_path / "b", "-o", "layout=skrl", "-o", "size=4")[0] == 0
    for wrong in ("to.size=4", "x.layout=skrl", "from.colour=1"):
        code, _, err = cli(*both, "--overwrite", *options, "-o", wrong)
        assert code == 3
        assert f"option '{wrong.partition('=')[0]}' is unknown to" in err
    code, _, err = cli(*both, "--overwrite", "-o", "from.layot=skrl")
    assert code == 3
    assert "Did you mean 'layout'?" in err


def test_a_damaged_file_exits_with_1_and_names_it(cli, source, tmp_path):
    path = tmp_path / "a.npz"
    cli(source, path)
    path.write_bytes(path.read_bytes()[:-9])
    code, _, err = cli(path, tmp_path / "b")
    assert code == 1
    assert str(path) in err


def test_what_others_wrote_is_refused_with_what_to_do(cli, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    (tmp_path / "semi.csv").write_text("a;b\n1;2\n")
    said = {}
    for name in ("model.pt", "semi.csv"):
        code, _, said[name] = cli(tmp_path / name, tmp_path / "b")
        assert code == 3
        assert "\x1b" not in said[name]
        assert not (tmp_path / "b").exists()
    assert "(Unsupported global: GLOBAL torch.nn.modules.linear" in said["model.pt"]
    assert "of numbers among ['a;b']. Separate columns" in (said["semi.csv"])


def test_a_column_without_a_name_is_said_to_have_none(cli, tmp_path):
    (tmp_path / "a.csv").write_text(",reward,note\n0,1.5,x\n1,2.5,y\n")
    code, out, _ = cli(tmp_path / "a.csv", tmp_path / "b")
    assert code == 0
    assert "note: column '' has no name, and was left out" in out
    assert "note: column 'note' varies from row to row: text of at most 1 byte\n" in out


@pytest.mark.parametrize(
    ("text", "described"), [("False", False), ("false", False), ("True", True), ("true", True)]
)
def test_values_are_spelled_as_in_json_or_in_python(cli, tmp_path, text, described):
    with mr.ReplayBuffer.create(tmp_path / "b", STEPS, 8, 2, autoreset="disabled"):
        pass
    cli(tmp_path / "b", tmp_path / "a.csv")
    args = (tmp_path / "a.csv", tmp_path / "c", "-o", f"sidecar={text}")
    code, out, err = cli(*args, "--json")
    assert code == (0 if described else 3)
    assert ("tells of a buffer" in out + err) == (not described) or err
    assert cli(tmp_path / "b", tmp_path / "n.npz", "-o", "compression=None")[0] == 0


@pytest.mark.parametrize("dtypes", ["float32", '["a"]', "3"])
def test_dtypes_that_are_no_mapping_are_refused(cli, tmp_path, dtypes):
    (tmp_path / "a.csv").write_text("obs,action\n1,2\n")
    code, _, err = cli(tmp_path / "a.csv", tmp_path / "b", "-o", f"dtypes={dtypes}")
    assert code == 3
    assert "dtypes must map" in err
    assert "must map fields to dtypes" in err


def test_an_option_that_went_to_both_sides_is_reported(cli, tmp_path):
    np.savez(tmp_path / "a.npz", obs=np.zeros((4, 2)), reward=np.zeros(4))
    both = tmp_path / "a.npz", tmp_path / "b.npz"
    code, _, err = cli(*both, "-o", "layout=skrl")
    assert code == 3
    assert "'layout' was passed to both sides. Use from.layout" in err
    assert cli(*both, "-o", "to.layout=skrl")[0] == 0
    assert "both sides" not in cli(*both, "-o", "from.layout=skrl")[2]
