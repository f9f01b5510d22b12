"""csv: pairs that disagree, runs that are killed between them, and hostile text."""

import gzip
import json
import os
import signal
import subprocess
import sys
import zlib
from contextlib import closing

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert import base, csv, csv_text
from mmreplay.disk import files
from mmreplay.errors import CorruptError, FailedError, FormatError, SchemaError
from tests.convert.contract import error_of, peak

SCHEMA = mr.Schema({"x": mr.Field((2,), "int32"), "r": mr.Field((), "float32")})


def make(path, count):
    buffer = mr.ReplayBuffer.create(path, SCHEMA, 50)
    x = np.arange(2 * count, dtype=np.int32).reshape(count, 1, 2)
    buffer.extend(x=x, r=np.ones((count, 1)))
    return buffer


@pytest.fixture
def file(tmp_path):
    with make(tmp_path / "source", 9) as buffer:
        mr.export(buffer, tmp_path / "a.csv")
    return tmp_path / "a.csv"


def load(path, **options):
    return mr.load(path, path.with_name("target"), **options)


KILL = """
import os, signal, sys
import mmreplay as mr
from mmreplay.disk import files
class Dying(files.Disk):
    def rename(self, source, target):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        super().rename(source, target)
left = int(sys.argv[3])
files.disk = Dying()
mr.export(sys.argv[1], sys.argv[2], overwrite=True)
"""


@pytest.mark.crash
@pytest.mark.parametrize(
    ("before", "renames"),
    [
        ("nothing", 1),
        ("a table", 1),
        ("a pair", 1),
        ("a pair", 2),
        *(
            pytest.param(before, renames, marks=pytest.mark.slow)
            for before in ("nothing", "a table", "a pair")
            for renames in (0, 2, 3)
        ),
    ],
)
@pytest.mark.sliced(1)
def test_a_kill_never_leaves_a_pair_that_disagrees(tmp_path, before, renames):
    path = tmp_path / "a.csv"
    make(tmp_path / "new", 20).close()
    if before == "a table":
        path.write_text("x\n1\n2\n3\n")
    if before == "a pair":
        with make(tmp_path / "old", 7) as old:
            mr.export(old, path)
    died = subprocess.run(
        [sys.executable, "-c", KILL, tmp_path / "new", path, str(renames)], timeout=60
    )
    # A new sidecar, the csv file, and the sidecar again, where one was replaced.
    last = 2 if before == "nothing" else 3
    assert died.returncode == (-signal.SIGKILL if renames < last else 0)
    appeared = renames >= 2
    if not appeared and before == "nothing":
        assert not path.exists()
    else:
        rows = 20 if appeared else {"a table": 3, "a pair": 7}[before]
        report = load(path)
        assert report.rows == rows
        described = appeared or before == "a pair"
        assert bool(report.notes) == (not described)
    mr.export(tmp_path / "new", path, overwrite=True)
    assert load(path, overwrite=True).rows == 20
    assert "before" not in json.loads(csv.sidecar_path(path).read_bytes())


def test_a_run_that_fails_puts_the_sidecar_back(tmp_path, file, monkeypatch):
    told = csv.sidecar_path(file).read_bytes()

    def fail(self, source, target):
        if target == file:
            raise OSError(5, os.strerror(5))
        os.replace(source, target)

    with make(tmp_path / "new", 20) as new, monkeypatch.context() as patch:
        patch.setattr(files.Disk, "rename", fail)
        with pytest.raises(FailedError):
            mr.export(new, file, overwrite=True)
        file.rename(tmp_path / "b.csv")
        with pytest.raises(FailedError):
            mr.export(new, file, overwrite=True)
        (tmp_path / "b.csv").rename(file)
    assert csv.sidecar_path(file).read_bytes() == told
    assert load(file).rows == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d + b"\n", r"has 152 bytes, but a\.csv\.mmreplay\.json says 151\. The file"),
        (
            lambda d: d.replace(b"17", b"18"),
            r"has checksum da49f413, but a\.csv\.mmreplay\.json says",
        ),
        (
            lambda d: d.replace(b"\n0,3,0,6,", b"\n0,3,0,x,"),
            r"line 5, column 'x.0' must be an integer in \[-21.*, got 'x'",
        ),
        (
            lambda d: d.replace(b"\n0,3,0,6,7,1", b"\n0,3,0,6,711"),
            r"line 5 must have 6 cells, got 5\. The file was edited or",
        ),
        (
            lambda d: d.replace(b"r\n", b"s\n"),
            r"line 1, column 6 must be 'r' as the sidecar says, got 's'\. Pass",
        ),
        (
            lambda d: d.replace(b",r\n", b"  \n"),
            r"line 1, column 5 must be .* as the sidecar says, got 'x\.1  '",
        ),
    ],
)
def test_a_file_that_was_edited_is_refused(file, change, message):
    data = file.read_bytes()
    assert change(data) != data
    file.write_bytes(change(data))
    with pytest.raises(FormatError, match=message) as caught:
        load(file)
    assert str(file) in str(caught.value)


def test_sidecars_that_say_nothing_are_refused(file):
    path = csv.sidecar_path(file)
    good = json.loads(path.read_bytes())
    for changed, message in (
        ({**good, "csv": 3}, r"does not say to which csv file it belongs\. Move it"),
        ({**good, "csv": {"nbytes": "9", "crc32c": "0"}}, "does not say to which csv"),
        ({**good, "csv": {"nbytes": 9, "crc32c": "zz"}}, "does not say to which csv"),
        ({**good, "format": "x"}, "It is not a description of mmreplay"),
        ({**good, "before": "{}", "csv": {**good["csv"], "nbytes": 9}}, "does not say"),
        ({**good, "user": {"mine": 1}}, "the description must have checksum .*, got"),
        (
            {
                **good,
                "csv": {**good["csv"], "nbytes": 9},
                "before": json.dumps({**good, "csv": {**good["csv"], "nbytes": 8}}),
            },
            "says those of one of its two entries",
        ),
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(FormatError, match=message):
            load(file)
    path.write_bytes(b" " * (csv.MAX_SIDECAR_NBYTES + 1))
    with pytest.raises(FormatError, match="at most"):
        load(file)
    assert load(file, sidecar=False).rows == 9


def test_a_file_without_its_sidecar_or_its_checksums_is_reported(file):
    file.write_bytes(file.read_bytes().replace(b"1.0\n", b"7.0\n", 1))
    path = csv.sidecar_path(file)
    good = json.loads(path.read_bytes())
    for told in (
        without(good, "csv"),
        *({**good, "csv": without(good["csv"], name)} for name in good["csv"]),
    ):
        path.write_text(json.dumps(told))
        with pytest.raises(
            FormatError, match=r"does not say to which csv file it belongs\. Move it away"
        ):
            load(file)
    path.unlink()
    assert "a buffer whose description is lost" in " ".join(load(file).notes)


def without(value, name):
    return {key: each for key, each in value.items() if key != name}


def test_a_sidecar_of_other_rows_is_refused(file, tmp_path):
    # All checksums are right: somebody took pains.
    with make(tmp_path / "more", 11) as buffer:
        mr.export(buffer, tmp_path / "b.csv")
    one, other = (files.File.open(path, None) for path in (file, tmp_path / "b.csv"))
    with closing(one), closing(other):
        described = csv.find_sidecar(other).description
        told = csv.Sidecar(described, one.nbytes, csv.checksum(one))
    csv.sidecar_path(file).write_bytes(told.to_json())
    with pytest.raises(
        CorruptError, match=r"has 9 rows, but its sidecar says 11\. The two files are"
    ):
        load(file)


def test_words_that_only_python_takes_for_numbers_are_refused(tmp_path):
    rows = "1,2\n" * 300_000 + "\u0663,4\n"
    with pytest.raises(FormatError, match="column 'a' mixes words and numbers"):
        load(table(tmp_path, f"a,b\n{rows}".encode()))


def table(tmp_path, data):
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "line 1 must be column names .*, got no text"),
        (b"\n \n\r\n", "line 1 must be .*, got no text"),
        (b"a,b\0\n1,2\n", "line 1 must be .*, got no text"),
        (b"a,\xff\n1,2\n", r"got bytes that are no UTF-8 text\. Add a header"),
        (b"a,b,a\n1,2,3\n", "got the column 'a' twice"),
        (b'a,"b\n1,2\n', "line 1 must be .*, got 'a,"),
        (b"," * 200_000 + b"\n", "more than 200000 columns"),
        (b"a,b\n", r"no column of numbers among \['a', 'b'\]"),
        (b"a,b\nx,y\n", r"has no row or no column of numbers among \['a', 'b'\]\."),
        (b"a,b\n1,2\n\n3\n", r"line 4 must have 2 cells, got 1\. The file was edited"),
        (b"a,b\n1,2\n\n3,4,5\n", "line 4 must have 2 cells, got 3"),
        (b'a,b\n1,2\n3,"4\n5,6\n', "line 3 must be a row of cells, got"),
        (b'a,b\n1,x\n3,"y\n5,6\n', "has 1 quotes, so that one is never closed"),
        (b"a,b\n1,\xff\n", "line 2 must be a row of cells, got"),
        (b"a,b\n1,2\n1e999,3\n", "column 'a' must be within .*, got '1e999'"),
        (
            b"a,b\n" + b"1,2\n" * 300_000 + b"\nx,3\n",
            "line 300003, column 'a' must be a number like the rows before, got 'x'",
        ),
        (
            b'a,b\n"1\n",2\n' + b"1,2\n" * 300_000 + b"x,3\n",
            "line 300004, column 'a' must be a number like the rows before, got 'x'",
        ),
    ],
)
def test_hostile_tables_are_refused(tmp_path, data, message):
    path = table(tmp_path, data)
    with pytest.raises(FormatError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("dtypes", "error", "message"),
    [
        ({"b": "int8"}, FormatError, r"line 2, column 'b' must be an integer in .*, got '200'"),
        ({"c": "int8"}, SchemaError, r"\(a, b\), got 'c'\. Check the spelling\."),
        ({"aa": "int8"}, SchemaError, r"got 'aa'\. Did you mean 'a'\?"),
        (
            {"a": "bfloat16"},
            SchemaError,
            r"uint32, uint64, float32, float64, got bfloat16 for 'a'\.",
        ),
        ({"a": "bool"}, FormatError, "line 2, column 'a' must be true or false, got '7'"),
    ],
)
def test_dtypes_that_do_not_fit_are_refused(tmp_path, dtypes, error, message):
    with pytest.raises(error, match=message):
        load(table(tmp_path, b"a,b\n7,200\n"), dtypes=dtypes)


def sparse(path, head, nbytes, fill):
    with path.open("wb") as file:
        file.write(head)
        for _ in range(nbytes >> 20):
            file.write(fill * (1 << 20))
    return path


@pytest.mark.parametrize(
    ("head", "fill"), [(b"a,b\n1,2\n3,", b"4"), (b'a,b\n1,2\n3,"', b"4"), (b"", b"a")]
)
def test_a_line_without_end_takes_no_memory(tmp_path, head, fill):
    path = sparse(tmp_path / "a.csv", head, 96 << 20, fill)
    found = []
    assert peak(lambda: found.append(error_of(lambda: load(path)))) < 80 << 20
    assert isinstance(found[0], FormatError)
    assert any(
        text in str(found[0])
        for text in (
            f"line 3 must be a row of at most {csv_text.BLOCK_NBYTES} bytes, got more",
            "got a line of more than",
        )
    )


def test_a_gzip_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "HARMLESS_NBYTES", 1 << 20)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 2_000_000))
    with pytest.raises(
        FormatError, match="says that 7809 bytes hold 8000004, more than 1,000 times"
    ):
        load(path)
    assert load(path, allow_expansion=True).rows == 2_000_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            gzip.compress(b"a\n1\n", mtime=0)[:-9],
            r"ends before its gzipped data is complete at byte 15\. The",
        ),
        (
            gzip.compress(b"a\n1\n", mtime=0) + b"no",
            "cannot be unpacked .*incorrect header check.* at byte",
        ),
        (
            gzip.compress(b"a\n1\n", mtime=0)[:-8] + bytes(8),
            "cannot be unpacked .*incorrect data check.* at byte",
        ),
    ],
)
def test_damaged_gzip_is_an_error(tmp_path, data, message):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=message):
        load(path)


def test_members_of_gzip_follow_each_other(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"a\n1\n", mtime=0) + gzip.compress(b"2\n3\n", mtime=0))
    assert load(path).rows == 3
    assert zlib.crc32(b"") == 0


def test_what_arrow_finds_and_we_do_not_is_still_an_error(file, monkeypatch):
    monkeypatch.setattr(csv_text, "explain", lambda *_: None)
    file.write_bytes(file.read_bytes().replace(b"\n0,3,0,6,", b"\n0,3,0,x,"))
    with pytest.raises(CorruptError, match=r"cannot be read after 0 rows .In CSV column"):
        load(file)


def test_text_is_given_back_whole(tmp_path):
    path = table(tmp_path, bytes(range(256)) * 9000)
    file = files.File.open(path, None)
    text = csv_text.Text(file, False)
    first = text.read(10)
    text.unread(first)
    sizes = [1, 70_000, 1 << 20, 1 << 22, 5]
    assert b"".join(text.read(size) for size in sizes) == path.read_bytes()
    assert text.read(1) == b""
    file.close()


@pytest.mark.parametrize("size", [8, 13, 64])
def test_lines_are_split_where_no_quote_is_open(tmp_path, size):
    data = b'a,"b\n\n""c\n",d\n1,2\n"\n",4\n5,6\n7,8'
    path = table(tmp_path, data)
    with closing(files.File.open(path, None)) as file:
        pieces = list(csv_text.Text(file, False).lines(size))
    assert b"".join(pieces) == data
    for piece in pieces[:-1]:
        assert piece.endswith(b"\n")
        assert piece.count(b'"') % 2 == 0
