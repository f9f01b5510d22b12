"""parquet: footers and page headers that lie are refused before pyarrow sees them."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mmreplay as mr
from mmreplay.convert import base, parquet, parquet_checks
from mmreplay.convert.parquet_checks import MalformedThrift, Thrift
from mmreplay.errors import CorruptError, FormatError
from tests.convert import thrift


def load(path, **options):
    return mr.load(path, path.with_name("target"), **options)


def chunk(at=4, packed=10, values=1, kind=2, **more):
    found = {1: kind, 3: [b"x"], 5: values, 7: packed, 9: at}
    return {3: found | {int(k[1:]): v for k, v in more.items()}}


def footer(*chunks, rows=1, group_rows=1):
    return {3: rows, 4: [{1: list(chunks), 3: group_rows}]}


def page(unpacked=8, packed=8, values=1, kind=5):
    return thrift.struct({1: 0, 2: unpacked, 3: packed, kind: {1: values}})


GOOD = page() + bytes(8)


def one(**lie):
    """A file of one column of one page, whose header says something else."""
    body = page(**lie) + bytes(8)
    return thrift.parquet(footer(chunk(packed=len(body))), body)


def deep(times):
    value = {}
    for _ in range(times):
        value = {2: value}
    return {2: value}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has 0 bytes and does not begin with b'PAR1'"),
        (b"PAR2" + bytes(40), "is not a parquet file: it has 44 bytes"),
        (
            thrift.parquet({}, magic=b"PARE"),
            r"must end with b'PAR1' at byte 9, got b'PARE'\. The file",
        ),
        (thrift.parquet({}, size=99), "must have at most 1 bytes, got 99 at byte 5"),
        (thrift.parquet({}), "must count the rows of its 0 row groups, got None"),
        (thrift.parquet({3: -1}), "must count the rows of .*, got -1"),
        (thrift.parquet(footer(rows=2)), "count the rows of its 1 row groups, got 2"),
        (thrift.parquet({3: 1, 4: [7]}), "a value of kind 6 at byte 5 instead of a dict"),
        (thrift.parquet({3: 1, 4: [{1: [5], 3: 1}]}), "of kind 6 at byte 8 instead of"),
        (thrift.parquet({3: {}}), "a value of kind 12 at byte 1 instead of a int"),
        (
            thrift.parquet(footer({3: {5: 1}})),
            r"at byte 4 holds a column that is outside this file\. The",
        ),
        (thrift.parquet(footer({})), r"at byte 4 holds a column that is outside this file\. The"),
        (
            thrift.parquet(footer(chunk(_11=-4))),
            "the footer at byte 4 holds a column that is outside this",
        ),
        (
            thrift.parquet(footer({1: b"/etc/passwd", **chunk()})),
            r"at byte 4 holds a column that is outside this file\. The",
        ),
        (thrift.parquet(footer(chunk(packed=999))), "columns take more than the 4 byte"),
        (thrift.parquet(footer(chunk(at=99)), GOOD), r"got one at bytes \[99, 109\)"),
        (
            thrift.parquet(footer(chunk(at=0)), GOOD),
            r"columns must lie between .* got one at bytes \[0, 10\)",
        ),
        (thrift.parquet(footer(chunk(packed=4)), GOOD), "page at byte 4 holds its end"),
        (one(packed=999), "999 bytes, past its colu"),
        (one(unpacked=-1), r"the page at byte 4 holds sizes \(-1, 8\)\. The file is"),
        (one(unpacked=1 << 30), "a page of every column must take at most .* got 1073741824"),
        (
            # Runs of one value: no bytes, and a billion values.
            one(values=1 << 30),
            "a page of every column must take at most .* got 8589934592",
        ),
        (thrift.parquet(deep(40)), "more than 24 values inside each other"),
        (thrift.parquet(b"\x19" * 5001), "more than 24 values inside each other"),
        (thrift.parquet(b"\x1b" + b"\x01\xbb" * 5000), "more than 24 values inside"),
        (thrift.parquet(b"\x19\xfc\xff\xff\x03"), "a list of 65535 at byte 5, past"),
        (thrift.parquet(b"\x18\xff\xff\x03"), "65535 bytes at byte 4, past the end"),
        (thrift.parquet(b"\x16" + b"\xff" * 11), "a number of more than 64 bits"),
        (thrift.parquet(b"\x1d\0"), "a value of kind 13 at byte 1"),
        (thrift.parquet(b"\x16"), "holds its end at byte 1"),
    ],
)
def test_lying_headers_are_refused(tmp_path, data, message):
    path = tmp_path / "a.parquet"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "target").exists()


def test_every_kind_of_thrift_is_stepped_over():
    data = bytes.fromhex(
        "11 12 13 05 17 0102030405060708 1b 01 68 01 01 61 19 21 01 02 06 0a 08 00"
    )
    # True, false, a byte, a double, a map, a list of bools, and an integer whose field
    # number is written out in full.
    thrift = Thrift(data, 9)
    assert thrift.struct({}) == {}
    assert thrift.at == len(data)
    assert Thrift(b"\x06\x08\x04\0", 9).struct({4: int}) == {4: 2}


@pytest.mark.parametrize("size", [0, 1, 20, 300])
def test_what_is_no_thrift_is_malformed_and_nothing_else(size):
    rng = np.random.default_rng(size)
    for _ in range(300):
        try:
            Thrift(rng.bytes(size), 50).struct(parquet_checks.FOOTER)
        except MalformedThrift:
            continue


def test_a_footer_of_too_much_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({f"x{i}": [1.0] for i in range(9)}), path)
    for name, value, message in (
        ("MAX_CHUNKS", 8, r"at most 8 column chunks, got 9\. Write it with"),
        ("MAX_STRUCTS", 8, "more than 8 structs"),
        ("MAX_FOOTER_NBYTES", 9, "must have at most 9 bytes, got 1764"),
        ("MAX_PAGES_NBYTES", 9, "a page of every column must take at most 9 "),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(parquet_checks, name, value)
            with pytest.raises(FormatError, match=message):
                load(path)


def test_lists_that_one_row_group_could_make_endless_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [[1.0] * 9] * 9}), path)
    # More than its pages, less than its values with their levels.
    monkeypatch.setattr(parquet_checks, "MAX_PAGES_NBYTES", 900)
    with pytest.raises(FormatError, match=r"column 'x' must .* got 81 values of 12"):
        load(path)


def test_a_small_file_that_stands_for_endless_rows_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.zeros(3_000_000)}), path, compression="zstd")
    monkeypatch.setattr(base, "HARMLESS_NBYTES", 1 << 20)
    with pytest.raises(FormatError, match="says that 13950 bytes hold 24000000, more than 1,000"):
        load(path)
    assert load(path, allow_expansion=True).rows == 3_000_000


def test_pages_that_are_not_what_their_headers_say_are_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.arange(1000.0)}), path, compression="zstd")
    data = bytearray(path.read_bytes())
    at = data.index(b"\x28\xb5\x2f\xfd")
    data[at : at + 4] = bytes(4)
    path.write_bytes(data)
    with pytest.raises(
        CorruptError, match=r"does not match its headers \(ZSTD decompression failed:"
    ):
        load(path)


def test_a_footer_of_more_rows_than_its_pages_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.arange(20.0)}), path)
    # 20 rows: of the file, of the column and of the row group, as i64.
    head, *rest = path.read_bytes().split(b"\x16\x28")
    assert len(rest) == 3
    file, column, group = rest
    path.write_bytes(head + b"\x16\x2a" + file + b"\x16\x28" + column + b"\x16\x2a" + group)
    with pytest.raises(
        CorruptError, match=r"has 20 rows, but its footer says 21\. The file is damaged\."
    ):
        load(path)


def test_a_file_truncated_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.random.default_rng(0).random(500_000)}), path)
    with parquet.open_reader(path) as reader:
        blocks = reader.blocks(1000)
        assert len(next(blocks)) == 1000
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(CorruptError, match="was truncated while") as caught:
            list(blocks)
    assert str(path) in str(caught.value)


LOAD = """
import sys
import mmreplay as mr
try:
    mr.load(sys.argv[1], sys.argv[2])
except ValueError as error:
    print(error)
"""


def test_a_footer_over_which_pyarrow_ends_the_process_does_not_end_ours(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [[1.0, 2.0]] * 20}), path)
    # The column's repetition is none of three, and its histograms are too long for it.
    optional, unknown = b"\x35\x02\x18\x01x", b"\x35\x03\x18\x01x"
    data = path.read_bytes()
    assert data.count(optional) == 1
    path.write_bytes(data.replace(optional, unknown))
    command = [sys.executable, "-c", LOAD, path, tmp_path / "target"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert str(path) in ended.stdout
