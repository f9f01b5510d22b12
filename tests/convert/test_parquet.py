"""parquet: the contract, part files, what others write, and files that contradict."""

import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mmreplay as mr
from mmreplay.convert import parquet
from mmreplay.convert.base import BLOCK_NBYTES, Block
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.episode_ends import EpisodeNumbers
from mmreplay.errors import CorruptError, FormatError, SchemaError, SourceError
from tests.convert.contract import FormatContract
from tests.convert.support import every_kind, same_rows


class TestParquet(FormatContract):
    suffix = ".parquet"
    # A row group of 32 MiB is held on top of the blocks.
    memory_nbytes = 6 * BLOCK_NBYTES


@pytest.fixture
def source(tmp_path):
    with every_kind(tmp_path / "source") as buffer:
        yield buffer


def load(path, **options):
    return mr.load(path, path.with_name("target"), **options)


def same_as(source, path):
    load(path)
    with mr.ReplayBuffer.open(path.with_name("target")) as target:
        same_rows(source, target)


@pytest.mark.parametrize("vectors", ["auto", "list", "binary"])
@pytest.mark.parametrize(
    "packed", [{}, {"compression": "none"}, {"compression": "zstd", "compression_level": 9}]
)
def test_every_way_to_write_comes_back(source, tmp_path, vectors, packed):
    mr.export(source, tmp_path / "a.parquet", vectors=vectors, **packed)
    same_as(source, tmp_path / "a.parquet")


def test_images_are_bytes_and_short_vectors_of_floats_lists(source, tmp_path):
    mr.export(source, tmp_path / "a.parquet")
    schema = pq.read_schema(tmp_path / "a.parquet")
    assert schema.field("all/uint8").type == pa.binary(6)
    assert schema.field("all/bfloat16").type == pa.binary(12)
    assert schema.field("all/float32").type.list_size == 6
    assert schema.field("all/float32").metadata[b"shape"] == b"[3, 2]"
    assert schema.field("single/uint8").type == pa.uint8()
    assert json.loads(described(tmp_path / "a.parquet")[b"mmreplay"])["num_envs"] == 2


def test_row_groups_go_by_bytes(source, tmp_path):
    mr.export(source, tmp_path / "a.parquet", row_group_nbytes=5000)
    found = pq.ParquetFile(tmp_path / "a.parquet").metadata
    groups = [found.row_group(i).num_rows for i in range(found.num_row_groups)]
    row_nbytes = 17 + sum(each.nbytes for each in source.schema.fields.values())
    room = 5000 // row_nbytes
    assert groups[:-1] == [room] * (found.num_rows // room)
    same_as(source, tmp_path / "a.parquet")


def test_rows_are_numbered_by_episode_and_step(source, tmp_path):
    mr.export(source, tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet").to_pydict()
    episode, step, seen = -1, 0, set()
    for env_id, flags, got, at in zip(
        table["_env_id"], table["_flags"], table["episode_index"], table["step_index"], strict=True
    ):
        if env_id not in seen and flags & 8:
            # Of what this row ended no step is left.
            assert (got, at) == (-1, 0)
        else:
            if flags & 1 or env_id not in seen:
                episode, step = episode + 1, 0
            assert (got, at) == (episode, step)
            step += 1
        seen.add(env_id)


def test_an_environment_of_which_only_a_final_row_is_left_has_no_episode(tmp_path):
    steps = EpisodeNumbers(2)
    ids = np.array([0, 1, 0, 1, 0])
    flags = np.array([8, 0, 1, 2, 0], np.uint8)
    found = steps.number(Block({}, ids, np.array([4, 9, 5, 10, 6]), flags))
    assert [each.tolist() for each in found] == [[-1, 0, 1, 0, 1], [0, 0, 0, 1, 1]]
    more = steps.number(Block({}, ids[:2], np.array([7, 11]), np.array([2, 1], np.uint8)))
    assert [each.tolist() for each in more] == [[1, 2], [2, 0]]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), "int64"), ((), "uint8"), ((), "float32"), ((2,), "int64"), ((2, 3), "uint8")],
)
def test_a_field_of_the_name_of_a_derived_column_keeps_it(tmp_path, shape, dtype):
    with mr.ReplayBuffer.create(
        tmp_path / "s",
        mr.Schema({n: mr.Field(shape, dtype) for n in ("episode_index", "step_index")}),
        8,
    ) as buffer:
        values = np.full((5, 1, *shape), 7, dtype)
        buffer.extend(episode_index=values, step_index=values)
        report = mr.export(buffer, tmp_path / "a.parquet")
        assert "is stored as '_episode_index', because a field has" in report.notes[0]
        same_as(buffer, tmp_path / "a.parquet")
    names = pq.read_schema(tmp_path / "a.parquet").names
    assert {"episode_index", "_episode_index", "step_index", "_step_index"} < set(names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vectors": "tensor"}, r"vectors must be one of auto, list, binary, got 'tensor'\."),
        ({"compression": "zip"}, r"one of zstd, snappy, gzip, lz4, brotli, none, got 'zip'\."),
        ({"compression_level": 99}, "compression_level must be -131072 to 22, got 99 for"),
        ({"row_group_nbytes": 0}, r"must be a number of bytes, at least 1, got 0\. Leave it"),
        ({"file_nbytes": "1"}, "file_nbytes must be a number of bytes, at least 1, got"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(source, tmp_path, options, message):
    with pytest.raises(SchemaError, match=message):
        mr.export(source, tmp_path / "a.parquet", **options)
    assert not [each for each in tmp_path.iterdir() if each.name != "source"]


@pytest.fixture
def folder(source, tmp_path):
    mr.export(source, tmp_path / "d.parquet", file_nbytes=3000)
    return tmp_path / "d.parquet"


def test_a_folder_of_parts_comes_back(source, folder):
    assert len(list(folder.iterdir())) >= 3
    same_as(source, folder)


def test_a_part_that_is_missing_is_noticed(source, folder):
    parts = sorted(folder.iterdir())
    parts[-1].rename(folder / "last.txt")
    with pytest.raises(CorruptError, match="the missing file, or remove the added file"):
        load(folder)
    (folder / "last.txt").rename(parts[-1])
    parts[1].unlink()
    with pytest.raises(FormatError, match=r"must begin with row 16, got b'32'\. A file is"):
        load(folder)


def test_parts_of_two_datasets_are_refused(source, folder, tmp_path):
    source.set_statistics({"mean": 3})
    mr.export(source, tmp_path / "e.parquet", file_nbytes=3000)
    name = "part-00001.parquet"
    shutil.copy(tmp_path / "e.parquet" / name, folder / name)
    with pytest.raises(FormatError, match="has another description than"):
        load(folder)


def test_a_folder_of_parts_is_replaced_and_anybodys_is_not(source, folder):
    assert len(list(folder.iterdir())) > 2
    mr.export(source, folder, file_nbytes=1 << 20, overwrite=True)
    assert [each.name for each in folder.iterdir()] == ["part-00000.parquet"]
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FormatError, match="is a folder that holds no buffer"):
        mr.export(source, folder, file_nbytes=3000, overwrite=True)


def test_a_folder_of_none_is_refused(tmp_path):
    folder = tmp_path / "none"
    folder.mkdir()
    with pytest.raises(FormatError, match=r"must hold 1 to .* parquet files, got 0"):
        mr.load(folder, tmp_path / "target", format="parquet")


def described(path):
    """Key-value metadata of a file."""
    found = dict(pq.read_metadata(path).metadata)
    del found[b"ARROW:schema"]
    return found


DIE = """
import os, signal, sys
import mmreplay as mr
def die(done, total):
    os.kill(os.getpid(), signal.SIGKILL)
mr.export(sys.argv[1], sys.argv[2], file_nbytes=3000, progress=die)
"""


@pytest.mark.crash
def test_a_folder_whose_run_is_killed_is_not_there(source, tmp_path):
    source.close()
    target = tmp_path / "d.parquet"
    died = subprocess.run([sys.executable, "-c", DIE, source.path, target], timeout=60)
    assert died.returncode == -signal.SIGKILL
    assert not target.exists()
    mr.export(source.path, target, file_nbytes=3000)
    assert load(target).rows > 0
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("tmp-")]


def rewritten(path, change, metadata=None):
    """A file with its table changed, and its metadata or another."""
    table = pq.read_table(path)
    metadata = described(path) if metadata is None else metadata
    pq.write_table(change(table).replace_schema_metadata(metadata), path)
    return path


def test_a_file_that_was_edited_is_refused(source, tmp_path):
    def again():
        mr.export(source, tmp_path / "a.parquet", overwrite=True)
        return tmp_path / "a.parquet"

    with pytest.raises(FormatError, match=r"column 'all/int8' must be int8\[3, 2\] as .* got none"):
        load(rewritten(again(), lambda t: t.drop(["all/int8"])))
    with pytest.raises(FormatError, match=r"column 'single/float64' must .* got float"):
        load(rewritten(again(), lambda t: cast(t, "single/float64", pa.float32())))
    with pytest.raises(CorruptError, match=r"must have checksum .*, got .*The file is"):
        load(rewritten(again(), lambda t: changed(t, "single/int32")))
    with pytest.raises(CorruptError, match="holds 3 rows, but its description says"):
        load(rewritten(again(), lambda t: t.slice(0, 3)))
    with pytest.raises(CorruptError, match="'single/int32' must have a value in"):
        load(rewritten(again(), lambda t: changed(t, "single/int32", None)))


def test_a_file_that_lost_its_description_is_refused_or_noted(source, tmp_path):
    mr.export(source, tmp_path / "a.parquet")
    metadata = described(tmp_path / "a.parquet")
    del metadata[b"mmreplay"]
    rewritten(tmp_path / "a.parquet", lambda t: t, metadata)
    with pytest.raises(
        CorruptError, match=r"checksums in its metadata, but no 'mmreplay'\. The file is"
    ):
        load(tmp_path / "a.parquet")
    rewritten(tmp_path / "a.parquet", lambda t: t, {b"mine": b"1"})
    report = load(tmp_path / "a.parquet")
    assert "are of a buffer whose description is lost" in " ".join(report.notes)


def cast(table, name, kind):
    number = table.schema.get_field_index(name)
    return table.set_column(number, name, table[name].cast(kind, safe=False))


def changed(table, name, value=5):
    number = table.schema.get_field_index(name)
    values = [value, *table[name].to_pylist()[1:]]
    return table.set_column(number, name, pa.array(values, table[name].type))


def test_a_file_without_its_checksums_is_read_with_a_doubt(source, tmp_path):
    mr.export(source, tmp_path / "a.parquet")
    metadata = described(tmp_path / "a.parquet")
    del metadata[b"mmreplay.crc32c"]
    path = rewritten(tmp_path / "a.parquet", lambda t: t, metadata)
    same_as(source, path)
    with pytest.raises(
        mr.errors.SourceError, match=r"has no 'mmreplay\.crc32c' next to its description, so its"
    ):
        mr.load(path, tmp_path / "strict", strict=True)


def test_rows_that_differ_from_the_description_are_refused(source, tmp_path):
    reader = BufferReader(source)
    blocks = list(reader.blocks())
    for given, message in (
        ([*blocks, blocks[0]], r"got more than the 48 rows that the source describes\. The"),
        (blocks[:1], r"got 24 rows, but the source describes 48\. The"),
    ):
        writer = parquet.open_writer(tmp_path / "x.parquet", reader.describe())
        with writer, pytest.raises(FormatError, match=message):
            write_all(writer, given)
        assert not (tmp_path / "x.parquet").exists()


def write_all(writer, blocks):
    for block in blocks:
        writer.write(block)
    writer.finish()


def write(path, **columns):
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def lists(rows, size):
    return pa.array(np.arange(rows * size, dtype="f4").reshape(rows, size).tolist())


def test_a_plain_file_comes_in(tmp_path):
    ends = [False, True, False, False, True]
    path = write(
        tmp_path / "a.parquet",
        obs=lists(5, 3),
        nested=pa.array(np.arange(30).reshape(5, 2, 3).tolist()),
        raw=pa.array([bytes([i] * 4) for i in range(5)], pa.binary(4)),
        tensor=pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((5, 2, 2))),
        reward=pa.array([1.0, None, 3.0, 4.0, 5.0]),
        terminated=ends,
        name=list("abcde"),
    )
    report = load(path, strict=True)
    assert (report.rows, report.episodes) == (5, 2)
    notes = " ".join(report.notes)
    assert "missing values of column 'reward' became NaN" in notes
    assert "column 'name' varies from row to row: text of at most 1 byte" in notes
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        rows = target.gather_all()
        np.testing.assert_array_equal(rows["obs"], np.arange(15).reshape(5, 3))
        np.testing.assert_array_equal(rows["nested"], np.arange(30).reshape(5, 2, 3))
        np.testing.assert_array_equal(rows["raw"][:, 3], np.arange(5))
        np.testing.assert_array_equal(rows["reward"], [1, np.nan, 3, 4, 5])
        assert rows["tensor"].shape == (5, 2, 2)
        assert rows["nested"].dtype == np.int64


def test_several_plain_files_come_in_in_natural_order(tmp_path):
    write(tmp_path / "d" / "._part-0.parquet", other=pa.array([1]))
    for number in (10, 2, 1):
        write(
            tmp_path / "d" / f"part-{number}.parquet",
            x=pa.array([number, number]),
            episode_index=[number, number],
        )
    report = load(tmp_path / "d", strict=True)
    assert (report.rows, report.episodes) == (6, 3)
    assert "3 files were read" in " ".join(report.notes)
    assert "episodes begin where column 'episode_index' changes" in " ".join(report.notes)
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        assert target.gather_all()["x"].tolist() == [1, 1, 2, 2, 10, 10]
    path = write(tmp_path / "d" / "part-3.parquet", x=pa.array([1, 2]))
    match = (
        r"part-3\.parquet lacks column 'episode_index', unlike .*part-1\.parquet\. "
        "Write all files with the same columns, or load files of different tables one "
        "by one."
    )
    with pytest.raises(FormatError, match=match):
        mr.load(tmp_path / "d", tmp_path / "other")
    write(path, x=pa.array([1]), y=pa.array([2]), episode_index=[3])
    with pytest.raises(FormatError, match=r"part-3\.parquet has column 'y', unlike"):
        mr.load(tmp_path / "d", tmp_path / "other")


@pytest.mark.parametrize("order", ["rows first", "none first"])
@pytest.mark.parametrize(
    ("empty", "values"),
    [
        (pa.int8(), pa.array([True, False])),
        (pa.string(), pa.array([1, 2], pa.int32())),
        (pa.float64(), pa.array([(1 << 53) + 1, 2])),
        (pa.list_(pa.int8()), pa.array([0.5, 1.5])),
    ],
)
def test_the_types_of_a_file_of_no_rows_count_for_nothing(tmp_path, empty, values, order):
    names = ["part-0.parquet", "part-1.parquet"]
    if order == "none first":
        names.reverse()
    write(tmp_path / "d" / names[0], x=values, reward=pa.array([1.0, 2.0], pa.float32()))
    write(tmp_path / "d" / names[1], x=pa.array([], empty), reward=pa.nulls(0))
    assert load(tmp_path / "d").rows == 2
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        assert target.schema.fields["x"].dtype == values.to_numpy(False).dtype.name
        assert target.schema.fields["reward"].dtype == "float32"
        assert target.gather_all()["x"].tolist() == values.to_pylist()


TWO_TYPES = {
    "integers": (pa.array([1, -2], pa.int8()), pa.array([3, 4], pa.int64()), "int64"),
    "signs": (pa.array([1, 255], pa.uint8()), pa.array([-3, 4], pa.int16()), "int16"),
    "floats": (
        pa.array([1.5, -0.0], pa.float16()),
        pa.array([0.1, 1e300], pa.float64()),
        "float64",
    ),
    "pandas": (pa.array([1, 2]), pa.array([0.5, 3.0]), "float64"),
    "lists": (pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)), pa.array([[3.0, 4.0]]), "float64"),
    "large lists": (
        pa.array([[1], [2]], pa.large_list(pa.int16())),
        pa.array([[3]], pa.list_(pa.int32())),
        "int32",
    ),
    "lists in lists": (
        pa.array([[[1], [2]]], pa.list_(pa.list_(pa.uint8(), 1), 2)),
        pa.array([[[3], [4]]]),
        "int64",
    ),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", list(TWO_TYPES))
def test_parts_of_other_types_and_orders_hold_the_same_values(tmp_path, case, turned):
    """Against Python's own values."""
    *parts, dtype = TWO_TYPES[case]
    parts = parts[::-1] if turned else parts
    done = 0
    for number, part in enumerate(parts):
        columns = {"x": part, "n": pa.array(np.arange(done, done + len(part)))}
        names = list(columns)[:: -1 if number else 1]
        write(tmp_path / "d" / f"part-{number}.parquet", **{name: columns[name] for name in names})
        done += len(part)
    report = load(tmp_path / "d")
    assert any("'x' is of several types, and was read as" in n for n in report.notes)
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        rows = target.gather_all()
        assert target.schema["x"].dtype == dtype
    assert rows["n"].tolist() == list(range(done))
    held = [value for part in parts for value in part.to_pylist()]
    assert rows["x"].tolist() == held


@pytest.mark.parametrize("wide", [pa.string(), pa.large_string()])
def test_texts_of_parts_may_be_stored_in_three_ways(tmp_path, wide):
    texts = ["a", "", "déjà", "a"]
    kinds = [wide, pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]
    for number, kind in enumerate(kinds):
        x = pa.array(np.arange(4))
        write(tmp_path / "d" / f"part-{number}.parquet", x=x, t=pa.array(texts).cast(kind))
    load(tmp_path / "d")
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        assert target.gather_all()["t"].text() == 4 * texts


@pytest.mark.parametrize(
    ("one", "other", "error", "message"),
    [
        (
            [1],
            ["a"],
            FormatError,
            r"part-1\.parquet: column 'x' is string, but int64 before, and no field "
            r"holds both\. Write all files with one type, or load them one by one\.$",
        ),
        (pa.array([1], pa.uint64()), [-1], FormatError, "int64, but uint64 before"),
        ([True], [1], FormatError, "int64, but bool before"),
        ([[1]], [1], FormatError, "int64, but list<element: int64> before"),
        (
            [0.5],
            [2**53 + 1],
            SourceError,
            r"part-1\.parquet: column 'x' is int64, and double of another file cannot "
            r"hold it \(Integer value 9007199254740993 .*\)\. Write all files with one",
        ),
    ],
)
def test_types_of_parts_that_no_field_holds_are_refused(tmp_path, one, other, error, message):
    for number, values in enumerate((one, other)):
        write(tmp_path / "d" / f"part-{number}.parquet", x=values, y=[0.0])
    with pytest.raises(error, match=message):
        load(tmp_path / "d")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("empty", [(0,), (1,), (2,), (0, 2, 3), (0, 1)])
def test_parts_and_row_groups_without_rows_change_nothing(tmp_path, empty):
    table = pa.table({"x": [[1.0, 2.0], [3.0, 4.0]], "t": ["a", "bc"], "n": [1, 2]})
    parts = [table, table]
    for number in empty:
        parts.insert(number, table.slice(0, 0))
    (tmp_path / "d").mkdir()
    for number, part in enumerate(parts):
        pq.write_table(part, tmp_path / "d" / f"{number}.parquet")
    with pq.ParquetWriter(tmp_path / "one.parquet", table.schema) as writer:
        for part in parts:
            writer.write_table(part)
    for source in ("d", "one.parquet"):
        mr.load(tmp_path / source, tmp_path / "target", overwrite=True)
        with mr.ReplayBuffer.open(tmp_path / "target") as target:
            rows = target.gather_all()
        assert rows["x"].tolist() == 2 * [[1, 2], [3, 4]]
        assert (rows["t"].text(), rows["n"].tolist()) == (2 * ["a", "bc"], [1, 2, 1, 2])


def test_a_file_without_any_row_is_an_empty_buffer(tmp_path):
    table = pa.table({"x": [[1.0, 2.0]], "t": ["a"], "n": [1]})
    pq.write_table(table.slice(0, 0), tmp_path / "a.parquet")
    with pq.ParquetWriter(tmp_path / "b.parquet", table.schema):
        pass
    for name in ("a", "b"):
        assert mr.load(tmp_path / f"{name}.parquet", tmp_path / name).rows == 0


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"x": [1, 2, None]}, SourceError, r"'x' lacks a value in row 2\. Fill"),
        (
            {"x": [[[1], [2]], [[1], [2, 3]]]},
            SourceError,
            r"row 1 must have shape \[2, 1\] like the first",
        ),
        ({"x": [[1.0], None]}, SourceError, "can be a field. Name a file"),
        ({"x": ["a", None]}, SourceError, "can be a field. Name a file"),
    ],
)
def test_plain_columns_that_can_be_no_field_are_refused(tmp_path, columns, error, message):
    with pytest.raises(error, match=message):
        load(write(tmp_path / "a.parquet", **columns))
    assert not (tmp_path / "target").exists()


LABELS = "__index_level_0__"
LEFT_OUT = f"column '{LABELS}' is the index of a pandas table, and was left out"


def labelled(path, labels, about=None, name=LABELS, **columns):
    """Write a table with the labels of its rows, as pandas does after a filter."""
    about = json.dumps({"index_columns": [name]}) if about is None else about
    table = pa.table({**columns, name: labels})
    pq.write_table(table.replace_schema_metadata({"pandas": about}), path)
    return path


def test_labels_of_rows_are_left_out(tmp_path):
    columns = {"x": [1.0, 2.0], "terminated": [False, True]}
    path = labelled(tmp_path / "a.parquet", [0, 7], **columns)
    report = load(path, strict=True)
    assert (LEFT_OUT in report.notes, LEFT_OUT in report.doubts) == (True, False)
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        assert target.schema.paths == ("x", "terminated")
        assert target.gather_all()["x"].tolist() == [1.0, 2.0]
    for labels in (["a", "b"], [0.5, 1.5]):
        path = labelled(tmp_path / "a.parquet", labels, **columns)
        report = load(path, overwrite=True)
        assert (LEFT_OUT in report.notes, LEFT_OUT in report.doubts) == (False, True)


def test_some_files_of_a_table_may_have_labels_of_rows(tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    write(folder / "a.parquet", x=[1, 2])
    labelled(folder / "b.parquet", [5, 7], x=[3, 4])
    write(folder / "c.parquet", x=[5])
    assert LEFT_OUT in load(folder).notes
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        assert target.schema.paths == ("x",)
        assert target.gather_all()["x"].tolist() == [1, 2, 3, 4, 5]


def test_an_index_that_has_a_name_is_a_column(tmp_path):
    path = labelled(tmp_path / "a.parquet", [0, 1, 1], name="episode_index", x=[1, 2, 3])
    report = load(path)
    assert (report.episodes, report.doubts) == (2, ())
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        assert target.schema.paths == ("x", "episode_index")


@pytest.mark.parametrize(
    "about",
    [
        "",
        "x",
        "{",
        "[]",
        "1",
        "null",
        "{}",
        "[" * 100_000,
        b"\xff",
        '{"index_columns": 1}',
        '{"index_columns": null}',
        '{"index_columns": [{"kind": "range"}, 0, null, ["__index_level_0__"]]}',
        '{"index_columns": ["x", "__index_level_1__"]}',
    ],
)
def test_metadata_that_names_no_labels_leaves_nothing_out(tmp_path, about):
    path = labelled(tmp_path / "a.parquet", [0, 7], about, x=[1.0, 2.0])
    load(path)
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        assert target.schema.paths == ("x", LABELS)


@pytest.mark.parametrize("seed", range(5))
def test_the_first_row_that_lacks_a_value_is_found(seed):
    rng = np.random.default_rng(seed)
    for _ in range(100):
        rows = [
            None
            if rng.random() < 0.1
            else [None if rng.random() < 0.1 else 1.0 for _ in range(rng.integers(3))]
            for _ in range(20)
        ]
        array = pa.array(rows, pa.list_(pa.float64())).slice(rng.integers(9))
        lacking = [row is None or None in row for row in array.to_pylist()]
        assert parquet.has_nulls(array) == any(lacking)
        if any(lacking):
            assert parquet.first_null(array) == lacking.index(True)


def test_a_row_that_lacks_a_value_is_counted_over_files(tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    write(folder / "a.parquet", x=[1, 2, 3], y=[1.0, 2.0, 3.0])
    pq.write_table(
        pa.table({"x": [4, None, None], "y": [1.0, 2.0, 3.0]}),
        folder / "b.parquet",
        row_group_size=1,
    )
    with pytest.raises(SourceError, match=r"b\.parquet: column 'x' lacks a .* row 4\."):
        load(folder)


def test_a_column_twice_is_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(FormatError, match=r"has two columns 'x'\. Rename one\."):
        load(tmp_path / "a.parquet")
