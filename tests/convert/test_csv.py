"""csv: the contract, what text holds, and what others write."""

import csv
import gzip
from typing import ClassVar

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.convert import csv as ours
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.csv import Cells
from mmreplay.errors import FormatError, SchemaError, SourceError
from mmreplay.schema.dtypes import DTYPES
from mmreplay.testing import with_one_nan
from tests.convert.contract import FormatContract
from tests.convert.support import every_kind, same_rows


class Texts(FormatContract):
    dtypes = tuple(name for name in DTYPES if name != "bfloat16")
    options: ClassVar = {"force": True}
    large_shape = (40,)
    large_nbytes = 40 << 20
    stored_as = staticmethod(with_one_nan)


class TestCsv(Texts):
    suffix = ".csv"


@pytest.mark.slow
class TestCsvGzipped(Texts):
    suffix = ".csv.gz"


@pytest.fixture
def source(tmp_path):
    with every_kind(tmp_path / "source", dtypes=Texts.dtypes) as buffer:
        yield buffer


def load(path, **options):
    return mr.load(path, path.with_name("target"), **options)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.reader(file, strict=True))


def test_columns_are_values_and_vectors_have_one_each(source, tmp_path):
    mr.export(source, tmp_path / "a.csv")
    header, *rows = rows_of(tmp_path / "a.csv")
    assert header[:3] == ["_env_id", "_position", "_flags"]
    assert [f"all/uint8.{i}" for i in range(6)] == [
        name for name in header if name.startswith("all/uint8.")
    ]
    whole = source.gather_all()
    at = header.index("all/uint8.0")
    got = [[int(cell) for cell in row[at : at + 6]] for row in rows]
    np.testing.assert_array_equal(got, whole["all/uint8"].reshape(-1, 6))
    assert {row[header.index("terminated")] for row in rows} == {"true", "false"}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_float_reads_back_to_the_same_bits(tmp_path, dtype):
    kind = np.dtype(dtype)
    raw = np.random.default_rng(0).bytes(60_000 * kind.itemsize)
    values = with_one_nan(np.frombuffer(raw, kind))
    values[:5] = [np.nan, np.inf, -np.inf, -0.0, np.finfo(kind).smallest_subnormal]
    if dtype == "float16":
        values = with_one_nan(np.arange(1 << 16, dtype="u2").view("f2"))
    schema = mr.Schema({"x": mr.Field((), dtype)})
    with mr.ReplayBuffer.create(tmp_path / "s", schema, len(values)) as buffer:
        buffer.extend(x=values[:, None])
        report = mr.export(buffer, tmp_path / "a.csv")
    assert report.doubts == ()
    load(tmp_path / "a.csv", strict=True)
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        assert target.gather_all()["x"].tobytes() == values.tobytes()


@pytest.mark.parametrize(("dtype", "lost"), [("float64", 2), ("float16", 1)])
def test_nans_that_carry_something_are_counted_and_refused_under_strict(
    tmp_path, capsys, dtype, lost
):
    kind = np.dtype(dtype)
    values = np.full(4, np.nan, kind)
    bits = values.view(f"u{kind.itemsize}")
    bits[1] |= 5
    if lost == 2:
        values[2] = -np.nan
        bits[2] |= np.uint64(1) << np.uint64(63)
    schema = mr.Schema({"x": mr.Field((), dtype)})
    with mr.ReplayBuffer.create(tmp_path / "s", schema, 8) as buffer:
        buffer.extend(x=values[:, None])
    report = mr.export(tmp_path / "s", tmp_path / "a.csv")
    assert report.doubts == (
        f"{lost} NaNs lose their sign or payload, because text has only one NaN",
    )
    with pytest.raises(SourceError, match="lose their sign or payload"):
        mr.export(tmp_path / "s", tmp_path / "b.csv", strict=True)
    assert run(["convert", f"{tmp_path}/s", f"{tmp_path}/b.csv", "--strict"]) == 3
    told = capsys.readouterr().err
    assert "NaNs lose their sign or payload" in told
    assert "strict allows no loss" in told
    assert not (tmp_path / "b.csv").exists()
    assert not (tmp_path / "b.csv.mmreplay.json").exists()


def empty(path, fields):
    schema = mr.Schema.from_flat(fields)
    return mr.ReplayBuffer.create(path, schema, 4)


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"x": mr.Field((), "bfloat16")}, {}, "field 'x': csv cannot store"),
        (
            {"i": mr.Field((84, 84), "uint8")},
            {},
            r"csv: rows must have at most 4096 columns, got 7059\. Leave",
        ),
        (
            {"i": mr.Field((500, 500), "uint8")},
            {"force": True},
            r"have at most 200000 columns, got 250003\. Leave images out",
        ),
        (
            {"a": mr.Field((1,), "int8"), "a.0": mr.Field((), "int8")},
            {},
            r"column 'a\.0' is the name of two columns\. Leave one of the",
        ),
        ({"x": mr.Field((), "int8")}, {"compression_level": 11}, "compression_level m"),
        ({"x": mr.Field((), "int8")}, {"compression_level": 3}, "which is not gzipped"),
    ],
)
def test_what_text_cannot_hold_is_refused(tmp_path, fields, options, message):
    with empty(tmp_path / "s", fields) as buffer, pytest.raises(SchemaError, match=message):
        mr.export(buffer, tmp_path / "a.csv", **options)
    assert not [each for each in tmp_path.iterdir() if each.name != "s"]


@pytest.mark.parametrize("name", ["x\ny", "x\ry"])
def test_a_header_of_several_lines_is_refused(name):
    """No schema has such a field; what is no schema's may still ask."""
    with pytest.raises(
        SchemaError, match=r"the name has line breaks, which a header cannot hold\."
    ):
        Cells({name: ("int8", (2,))})


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_images_are_written_when_forced(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    with empty(tmp_path / "s", {"i": mr.Field((84, 84), "uint8")}) as buffer:
        buffer.extend(i=np.arange(3 * 84 * 84).reshape(3, 1, 84, 84).astype(np.uint8))
        mr.export(buffer, path, force=True)
        assert (path.read_bytes()[:2] == b"\x1f\x8b") == (suffix == ".csv.gz")
        load(path)
        with mr.ReplayBuffer.open(tmp_path / "target") as target:
            same_rows(buffer, target)


def test_rows_that_differ_from_the_description_are_refused(source, tmp_path):
    reader = BufferReader(source)
    blocks = list(reader.blocks())
    for given, message in (
        ([*blocks, blocks[0]], r"72 rows, but the source describes 48\. The source changed"),
        (blocks[:1], r"got 24 rows, but the source describes 48\. The"),
    ):
        writer = ours.open_writer(tmp_path / "x.csv", reader.describe())
        with writer, pytest.raises(FormatError, match=message):
            write_all(writer, given)
        assert not (tmp_path / "x.csv").exists()


def write_all(writer, blocks):
    for block in blocks:
        writer.write(block)
    writer.finish()


PLAIN = """\
,obs.0,obs.1,reward,terminated,action,name,tags
0,1.5,-2,0,False,3,"a, b","x
y"
1,inf,nan,0.5,True,-1,c,
"""


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\n  \n"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_plain_file_comes_in(tmp_path, ending, start, packed):
    data = start + PLAIN.replace("\n", ending).replace("1,inf", f"{ending}1,inf").encode()
    path = tmp_path / ("a.csv.gz" if packed else "a.csv")
    path.write_bytes(gzip.compress(data) if packed else data)
    report = load(path, strict=True)
    assert (report.rows, report.episodes) == (2, 1)
    told = " ".join(report.notes)
    for name, limit in (("name", 4), ("tags", 4)):
        text = f"column '{name}' varies from row to row: text of at most {limit} bytes"
        assert text in told
    assert "column '' has no name, and was left out" in told
    assert "episode ends were read from 'terminated'" in told
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        rows = target.gather_all()
        np.testing.assert_array_equal(rows["obs"], [[1.5, -2], [np.inf, np.nan]])
        np.testing.assert_array_equal(rows["reward"], [0, 0.5])
        assert rows["action"].tolist() == [3, -1]
        assert rows["action"].dtype == np.int64
        assert rows["name"].text() == ["a, b", "c"]
        assert rows["tags"].text() == [f"x{ending}y", ""]
        assert target.schema.role("observation") == "obs"


@pytest.mark.parametrize("words", [("True", "False"), ("1", "0"), ("true", "false")])
def test_ends_may_be_words_or_digits(tmp_path, words):
    yes, no = words
    path = tmp_path / "a.csv"
    path.write_text(f"x,terminated,truncated\n1,{no},{yes}\n2,{yes},{no}\n3,{no},{no}\n")
    assert load(path, strict=True).episodes == 3


def test_a_number_of_an_episode_that_changes_begins_one(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("episode_id,x\n4,1\n4,2\n9,3\n9,4\n9,5\n")
    assert load(path, strict=True).episodes == 2


def test_kinds_are_found_over_all_of_a_file(tmp_path):
    # Blocks are a MiB: the first says int64 of both, the last does not.
    path = tmp_path / "a.csv"
    lines = ["x,y,z"] + ["1,2,18446744073709551615"] * 100_000 + ["1,2.5,3"]
    path.write_text("\n".join(lines))
    load(path)
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        rows = target.gather_all()
        kinds = [str(rows[name].dtype) for name in "xyz"]
        assert kinds == ["int64", "float64", "uint64"]
        assert rows["y"][-1] == 2.5


@pytest.mark.parametrize("order", ["sorted", "reversed", "interleaved"])
def test_columns_of_one_vector_are_put_in_the_order_of_their_numbers(tmp_path, order):
    """Tools that sort names put obs.10 before obs.2."""
    names = [f"obs.{i}" for i in range(12)]
    if order == "interleaved":
        header = [name for i in range(12) for name in (f"obs.{i}", f"act.{i}")]
    else:
        header = sorted(names, reverse=order == "reversed")
    cells = [name.split(".")[1] for name in header]
    lines = [",".join([*header, "terminated"])]
    lines += [",".join([*cells, end]) for end in ("false", "true")]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    assert load(tmp_path / "a.csv", strict=True).doubts == ()
    with mr.ReplayBuffer.open(tmp_path / "target") as buffer:
        assert buffer.gather_all()["obs"].tolist() == [list(range(12))] * 2
        assert "obs.1" not in buffer.schema.paths


@pytest.mark.parametrize("odd", ["x.01", "x.00", "x.\u0661"])
def test_columns_outside_a_vector_are_fields(tmp_path, odd):
    text = f"x.0,x.1,{odd},terminated\n1,2,77,0\n3,4,88,1\n"
    (tmp_path / "a.csv").write_text(text)
    load(tmp_path / "a.csv")
    with mr.ReplayBuffer.open(tmp_path / "target") as buffer:
        rows = buffer.gather_all()
    assert rows["x"].tolist() == [[1, 2], [3, 4]]
    assert rows[odd].tolist() == [77, 88]


def test_columns_of_a_vector_that_lacks_one_are_no_vector(tmp_path):
    (tmp_path / "a.csv").write_text("obs.0,obs.2,terminated\n1,2,0\n3,4,1\n")
    report = load(tmp_path / "a.csv")
    told = "columns obs.0 to obs.2 are fields of their own: obs.1 is missing"
    assert report.doubts == (told,)
    with mr.ReplayBuffer.open(tmp_path / "target") as buffer:
        rows = buffer.gather_all()
    assert (rows["obs.0"].tolist(), rows["obs.2"].tolist()) == ([1, 3], [2, 4])


@pytest.mark.parametrize(
    ("cells", "rounded"),
    [
        ("9007199254740993,0 1.5,1", True),
        ("1.5,0 9007199254740993,1", True),
        ("99999999999999999999,0 1,1", True),
        ("18446744073709551615,0 -1,1", True),
        ("9007199254740992,0 1.5,1", False),
        ("100000000000000000000,0 1e300,1", False),
        ("9007199254740993,0 1,1", False),
    ],
)
def test_integers_that_float64_cannot_hold_are_a_doubt(tmp_path, cells, rounded):
    (tmp_path / "a.csv").write_text("x,terminated\n" + cells.replace(" ", "\n"))
    told = "column 'x' has integers that float64 cannot hold, and they were rounded"
    assert load(tmp_path / "a.csv").doubts == ((told,) if rounded else ())
    if rounded:
        (tmp_path / "b").mkdir()
        chosen = mr.load(tmp_path / "a.csv", tmp_path / "b/c", dtypes={"x": "float32"})
        assert chosen.doubts == ()


def test_integers_among_floats_of_one_vector_are_a_doubt(tmp_path):
    text = "x.0,x.1,terminated\n1,2.5,0\n9007199254740993,1,1\n"
    (tmp_path / "a.csv").write_text(text)
    assert "'x.0' has integers that float64 cannot" in load(tmp_path / "a.csv").doubts[0]


def test_empty_cells_become_nan_and_make_whole_numbers_a_doubt(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,y,terminated\n1,,0\n,2.5,0\n")
    report = load(path)
    assert "empty cells of column 'y' became NaN" in report.notes
    assert report.doubts == ("column 'x' of int64 has empty cells, and became float64",)


@pytest.mark.parametrize("word", ["True", "false"])
@pytest.mark.parametrize("name", ["terminated", "flag"])
def test_an_empty_cell_among_bools_is_refused_with_its_line(tmp_path, word, name):
    path = tmp_path / "a.csv"
    path.write_text(f"x,{name}\n1,{word}\n2,\n3,{word}\n")
    with pytest.raises(FormatError, match=rf"line 3, column '{name}' must be .* got ''"):
        load(path)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", ["note", "obs.1", "reward"])
def test_a_column_of_empty_cells_alone_becomes_nan(tmp_path, name):
    path = tmp_path / "a.csv"
    path.write_text(f"x,obs.0,{name}\n1,2,\n3,4,\n")
    report = load(path)
    assert f"column {name!r} is empty, and became NaN" in report.doubts
    with mr.ReplayBuffer.open(tmp_path / "target") as buffer:
        found = buffer.gather_all()[name.removesuffix(".1")]
    assert np.isnan(found[..., -1] if name == "obs.1" else found).all()


def test_words_behind_empty_cells_are_no_damaged_numbers(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,note\n" + "1,\n" * (1 << 19) + "2,word\n")
    load(path)
    with mr.ReplayBuffer.open(tmp_path / "target") as buffer:
        notes = buffer.gather_all()["note"]
        assert notes.lengths.sum() == 4
        assert notes[1 << 19].tobytes() == b"word"


@pytest.mark.parametrize(
    "cells", [["1", "", "0"], ["0.5", "", "0"], ["nan", "1", "0"], ["", "", ""]]
)
def test_an_end_without_a_value_is_refused(tmp_path, cells):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["x,dones", *(f"1,{cell}" for cell in cells), ""]))
    row = 1 if cells[1] == "" != cells[0] else 0
    with pytest.raises(
        SourceError, match=f"column 'dones' .* must be 0 or 1 in every row, got .* in row {row}"
    ):
        load(path)


@pytest.mark.parametrize("name", ["obs", "obs.1", "reward", "note"])
def test_columns_of_words_are_a_doubt_where_their_name_is_of_a_role(tmp_path, name):
    path = tmp_path / "a.csv"
    path.write_text(f"x,obs.0,{name}\n1,1,NA\n2,2,3\n")
    report = load(path)
    told = f"column {name!r} varies from row to row: text of at most 2 bytes"
    assert told in (report.notes if name == "note" else report.doubts)
    with mr.ReplayBuffer.open(tmp_path / "target") as buffer:
        if name == "reward":
            assert "column 'reward' was left out: a reward cannot vary" in report.doubts
            assert "reward" not in buffer.schema
        else:
            assert buffer.gather_all()[name].text() == ["NA", "3" if name else ""]


WORDS = ["", "one", '=1+1, "x"', "zwei\nZeilen", "日本語", " spaced ", "007"]


def test_a_column_of_words_becomes_a_text_field(tmp_path):
    path = tmp_path / "a.csv"
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerows([["prompt", "reward"], *([each, 0.5] for each in WORDS)])
    report = mr.load(path, tmp_path / "target")
    told = "column 'prompt' varies from row to row: text of at most 16 bytes"
    assert told in report.notes
    with mr.ReplayBuffer.open(tmp_path / "target") as buffer:
        assert buffer.schema["prompt"] == mr.Field.text(16)
        assert buffer.gather_all()["prompt"].text() == WORDS
    again = mr.export(tmp_path / "target", tmp_path / "b.csv").rows
    assert again == len(WORDS)
    mr.load(tmp_path / "b.csv", tmp_path / "again")
    with mr.ReplayBuffer.open(tmp_path / "again") as buffer:
        assert buffer.gather_all()["prompt"].text() == WORDS


def test_the_plan_of_a_table_names_its_text(tmp_path, capsys):
    path = tmp_path / "a.csv"
    path.write_text("prompt,reward,note\nWho?,1,x\nWhere?,2,\n")
    assert run(["convert", str(path), str(tmp_path / "t"), "-n"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["prompt", "text", "[up", "to", "8]"] in lines
    assert "column 'note' varies from row to row: text of at most 1 byte" in (
        " ".join(mr.load(path, tmp_path / "t").notes)
    )


@pytest.mark.parametrize("num_envs", [1, 2])
def test_text_of_a_table_is_interleaved_and_selected_as_numbers_are(tmp_path, num_envs):
    path = tmp_path / "a.csv"
    rows = "".join(f"{n},text {n}\n" for n in range(6))
    path.write_text(f"x,note\n{rows}")
    mr.load(path, tmp_path / "t", layout="skrl", num_envs=num_envs)
    with mr.ReplayBuffer.open(tmp_path / "t") as buffer:
        found = buffer.gather_all()
        assert found["note"].text() == [f"text {n}" for n in found["x"].tolist()]
        assert buffer.num_envs == num_envs
    mr.load(path, tmp_path / "x", fields=["x"])
    mr.load(path, tmp_path / "note", fields=["note"])
    with mr.ReplayBuffer.open(tmp_path / "x") as buffer:
        assert buffer.schema.paths == ("x",)
    with mr.ReplayBuffer.open(tmp_path / "note") as buffer:
        assert buffer.gather_all()["note"].text() == [f"text {n}" for n in range(6)]


def test_a_table_of_text_alone_comes_in_where_that_is_said(tmp_path):
    (tmp_path / "a.csv").write_text("prompt\nWho?\nWie weit?\n")
    way_out = r"no column of numbers among .* Pass dtypes=\{'prompt': 'text'\} to read"
    with pytest.raises(FormatError, match=way_out):
        mr.load(tmp_path / "a.csv", tmp_path / "t")
    mr.load(tmp_path / "a.csv", tmp_path / "t", dtypes={"prompt": "text"})
    with mr.ReplayBuffer.open(tmp_path / "t") as buffer:
        assert buffer.gather_all()["prompt"].text() == ["Who?", "Wie weit?"]


def test_numbers_are_read_as_text_where_that_is_said(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,code,y\n1,007,a\n2,010,b\n")
    report = mr.load(path, tmp_path / "t", dtypes={"code": "text", "x": "float32"})
    with mr.ReplayBuffer.open(tmp_path / "t") as buffer:
        rows = buffer.gather_all()
        assert rows["code"].text() == ["007", "010"]
        assert rows["x"].dtype == np.float32
    assert not [each for each in report.doubts if "code" in each]
    with pytest.raises(SchemaError, match="dtypes must be 'text' for column 'y' of"):
        mr.load(path, tmp_path / "other", dtypes={"y": "int64"})
    with pytest.raises(SchemaError, match=r"dtypes must name fields .*\(x, code, y\)"):
        mr.load(path, tmp_path / "other", dtypes={"z": "text"})


def test_a_word_behind_numbers_is_refused_and_read_as_text_where_that_is_said(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,note\n" + "1,2\n" * (1 << 19) + "2,word\n")
    way_out = r"got 'word'. Correct the file, or pass dtypes=\{'note': 'text'\} to read"
    with pytest.raises(FormatError, match=way_out):
        load(path)
    mr.load(path, tmp_path / "t", dtypes={"note": "text"})
    with mr.ReplayBuffer.open(tmp_path / "t") as buffer:
        assert buffer.gather_all()["note"][[0, 1 << 19]].text() == ["2", "word"]


@pytest.mark.parametrize("fits", ["3.4028235e38", "-inf", "nan", ""])
def test_numbers_that_a_requested_dtype_makes_infinite_are_refused(tmp_path, fits):
    path = tmp_path / "a.csv"
    told = {"dtypes": {"obs": "f4", "n": "f4"}}
    path.write_text(f"obs.0,obs.1,n\n1,{fits},1\n2,3,2\n")
    load(path, **told)
    path.write_text("obs.0,obs.1,n\n1,2,3\n1,1e39,2\n2,3,2\n")
    mr.load(path, tmp_path / "wide")
    with pytest.raises(FormatError, match=r"line 3, column 'obs.1' must .* got '1e39'"):
        mr.load(path, tmp_path / "other", **told)
    assert not (tmp_path / "other").exists()


def test_a_header_of_numbers_is_a_doubt(tmp_path):
    (tmp_path / "a.csv").write_text("1,2.5\n3,4\n")
    report = mr.load(tmp_path / "a.csv", tmp_path / "t")
    assert "the first line may be a row" in report.doubts[0]
    with pytest.raises(SourceError, match=r"as names \(1, 2.5\)"):
        mr.load(tmp_path / "a.csv", tmp_path / "u", strict=True)


def test_dtypes_may_be_requested(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("obs.0,obs.1,n\n1.5,2.5,7\n")
    load(path, dtypes={"obs": "float32", "n": "uint8"})
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        assert target.schema["obs"].dtype == "float32"
        assert target.gather_all()["n"].dtype == np.uint8


def test_the_sidecar_may_be_passed_over(source, tmp_path):
    mr.export(source, tmp_path / "a.csv", fields=["single/int32", "terminated"])
    report = load(tmp_path / "a.csv", sidecar=False)
    assert "a buffer whose description is lost" in " ".join(report.notes)
    with pytest.raises(
        SchemaError, match=r"whose sidecar has the dtypes, got \{'terminated': 'bool'\}\."
    ):
        mr.load(tmp_path / "a.csv", tmp_path / "b", dtypes={"terminated": "bool"})
