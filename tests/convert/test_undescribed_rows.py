"""Files of ours without their description: the rows go where they were all the same."""

import csv

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file, save_file

import mmreplay as mr
from mmreplay.errors import SourceError

FORMATS = ["npz", "csv", "parquet", "safetensors"]
SCHEMA = mr.Schema(
    {
        "observation": mr.Field((2,), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)


@pytest.fixture(scope="module", params=["next_step", "disabled"])
def buffer(request, tmp_path_factory):
    """A ring of three environments that came round, with every kind of end."""
    path, rng = tmp_path_factory.mktemp("placed") / "b", np.random.default_rng(0)
    with mr.ReplayBuffer.create(
        path, SCHEMA, 50, 3, autoreset=request.param, commit_every=None
    ) as buffer:
        for number in range(120):
            drawn = rng.random(3)
            step = {
                "observation": rng.random((3, 2), np.float32),
                "terminated": drawn < 0.1,
                "truncated": drawn > 0.95,
            }
            over = step["terminated"] | step["truncated"]
            if request.param == "disabled" and over.all() | (number % 7 == 0):
                final = rng.random((3, 2), np.float32)
                buffer.add(step, final_observation=final)
            else:
                buffer.add(step)
        yield buffer


def stripped(buffer, path, change=lambda columns: columns):
    """Export, and write the columns again as other tools do."""
    mr.export(buffer, path)
    if path.suffix == ".csv":
        path.with_name(f"{path.name}.mmreplay.json").unlink()
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        columns = change(dict(zip(header, np.array(rows, object).T, strict=True)))
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
    elif path.suffix == ".npz":
        with np.load(path) as found:
            columns = {k: found[k] for k in found.files if k != "mmreplay.json"}
        np.savez(path, **change(columns))
    elif path.suffix == ".parquet":
        table = pq.read_table(path).replace_schema_metadata(None)
        kept = change({name: np.arange(len(table)) for name in table.column_names})
        rows = next(iter(kept.values()))
        pq.write_table(table.select(list(kept)).take(rows), path)
    else:
        save_file(change(load_file(path)), path)
    return path


@pytest.mark.parametrize("ending", FORMATS)
def test_rows_are_where_they_were(buffer, tmp_path, ending):
    """Final rows are no steps, and environments are not one behind the other."""
    path = stripped(buffer, tmp_path / f"a.{ending}")
    dtypes = {"dtypes": {"observation": "float32"}} if ending == "csv" else {}
    report = mr.load(path, tmp_path / "b", **dtypes)
    autoreset = buffer.metadata.autoreset
    lost = [note for note in report.notes if "description is lost" in note]
    assert len(lost) == 1
    assert f"and its autoreset {autoreset!r}" in lost[0]
    expected = buffer.gather_all()
    with mr.ReplayBuffer.open(tmp_path / "b") as found:
        rows = found.gather_all()
        assert found.metadata.autoreset == autoreset
        flags = found.flags(rows.env_ids, rows.positions)
    np.testing.assert_array_equal(rows.env_ids, expected.env_ids)
    np.testing.assert_array_equal(rows.positions, expected.positions)
    own = buffer.flags(expected.env_ids, expected.positions)
    np.testing.assert_array_equal(flags, own)
    for path_ in ("observation", "terminated", "truncated", "final"):
        np.testing.assert_array_equal(rows[path_], expected[path_])


@pytest.mark.parametrize("ending", FORMATS)
def test_without_flags_rows_are_refused(buffer, tmp_path, ending):
    """Each final row would be an episode of one step."""

    def plain(columns):
        return {name: rows for name, rows in columns.items() if name != "_flags"}

    path = stripped(buffer, tmp_path / f"a.{ending}", plain)
    with pytest.raises(
        SourceError,
        match=r"has '_env_id' and '_position' of a buffer's rows without '_flags', .*"
        "or leave out all of them to read every row as a step",
    ):
        mr.load(path, tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("_flags", 64, "a row has flags 64"),
        ("_env_id", -1, "row 0 has environment -1, "),
        ("_env_id", 1 << 40, "a row has environment 1099511627776"),
        ("_position", -1, "row 0 has environment 0, position -1"),
    ],
)
def test_columns_that_say_nonsense_are_refused(buffer, tmp_path, name, value, got):
    def changed(columns):
        rows = columns[name].astype(np.int64)
        rows[0] = value
        return columns | {name: rows}

    path = stripped(buffer, tmp_path / "a.npz", changed)
    with pytest.raises(SourceError, match=f"in order, but {got}"):
        mr.load(path, tmp_path / "b")


@pytest.mark.parametrize("ending", ["npz", "csv"])
def test_columns_of_no_whole_numbers_are_refused(buffer, tmp_path, ending):
    def changed(columns):
        return columns | {"_flags": columns["_flags"].astype(np.float64) + 0.5}

    path = stripped(buffer, tmp_path / f"a.{ending}", changed)
    with pytest.raises(SourceError, match=r"in order, but _flags is (float64|double)"):
        mr.load(path, tmp_path / "b")


def test_some_fields_alone_have_the_same_rows(buffer, tmp_path):
    path = stripped(buffer, tmp_path / "a.parquet")
    mr.load(path, tmp_path / "b", fields=["observation"])
    expected = buffer.gather_all()
    with mr.ReplayBuffer.open(tmp_path / "b") as found:
        rows = found.gather_all()
    np.testing.assert_array_equal(rows["observation"], expected["observation"])
    np.testing.assert_array_equal(rows["final"], expected["final"])


@pytest.mark.parametrize("ending", ["npz", "csv", "parquet", "safetensors", "pt"])
@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "x", "a"), ("a", "a/b", "a_b")])
def test_a_column_inside_another_is_joined_to_it(tmp_path, ending, names):
    columns, path = ({n: np.arange(4) + ord(n[-1]) for n in names}, tmp_path / f"a.{ending}")
    if ending == "npz":
        np.savez(path, **columns)
    elif ending == "safetensors":
        save_file(columns, path)
    elif ending == "pt":
        torch.save({name: torch.from_numpy(c) for name, c in columns.items()}, path)
    else:
        write = pa.csv.write_csv if ending == "csv" else pq.write_table
        write(pa.table(columns), path)
    joined = "a_b_2" if "a_b" in names else "a_b"
    report = mr.load(path, tmp_path / "b")
    assert (
        f"column 'a/b' became field {joined!r}, as another column's path is the "
        "beginning of 'a/b'" in report.notes
    )
    expected = {joined if n == "a/b" else n: column for n, column in columns.items()}
    for fields in (None, ["a/b"], [joined]):
        mr.load(path, tmp_path / "b", fields=fields, overwrite=True)
        wanted = set(expected) if fields is None else {joined}
        with mr.ReplayBuffer.open(tmp_path / "b") as found:
            rows = found.gather_all()
            assert set(found.schema.paths) == wanted
        for name in wanted:
            np.testing.assert_array_equal(rows[name], expected[name])


def test_texts_inside_another_column_are_joined_to_it(tmp_path):
    """Fields that vary: a column of texts, and an npz pair of offsets and values."""
    texts = pa.array(["x", "yz", "", "w"])
    pq.write_table(pa.table({"a": np.arange(4), "a/t": texts}), tmp_path / "a.parquet")
    np.savez(
        tmp_path / "a.npz",
        **{"a/x": np.arange(4), "a.values": np.arange(6)},
        **{"a.offsets": np.array([0, 1, 3, 3, 6])},
    )
    mr.load(tmp_path / "a.parquet", tmp_path / "b")
    with mr.ReplayBuffer.open(tmp_path / "b") as found:
        assert found.gather_all()["a_t"].text() == texts.to_pylist()
    mr.load(tmp_path / "a.npz", tmp_path / "c")
    with mr.ReplayBuffer.open(tmp_path / "c") as found:
        rows = found.gather_all()
    assert rows["a_x"].tolist() == [0, 1, 2, 3]
    assert rows["a"].lengths.tolist() == [1, 2, 0, 3]
