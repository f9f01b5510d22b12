"""Files of ours whose rows others filtered: what is left comes back as it was."""

import csv
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file, save_file

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.convert.undescribed import POSITION_COLUMNS
from mmreplay.disk import files
from mmreplay.errors import CorruptError, SchemaError, SourceError
from mmreplay.verify import verify_buffer
from tests.convert.curated import (
    AUTORESETS,
    BREAK,
    FINAL,
    TERMINATED,
    TRUNCATED,
    compare,
    conditions,
    expected,
    holds,
    loaded,
    record,
    rows_of,
)

FORMATS = ["parquet", "csv", "npz", "safetensors"]
CSV_DTYPES = {"dtypes": {"observation": "float32", "reward": "float32", "note": "text"}}

pytestmark = pytest.mark.filterwarnings("ignore:.*end_episodes of environments")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)


@pytest.fixture(params=AUTORESETS)
def ring(request, tmp_path):
    return record(tmp_path / "ring", request.param, 3)


def options(path):
    return CSV_DTYPES if path.suffix == ".csv" else {}


def table_of(ring):
    """The exported columns, as others hold them: without the description."""
    path = ring.with_name("all.parquet")
    mr.export(ring, path, overwrite=True)
    return pq.read_table(path).replace_schema_metadata(None)


def chosen(ring, numbers, ending):
    """A file of some of the rows, in an order, written by another tool."""
    path = ring.with_name(f"some.{ending}")
    if ending == "parquet":
        table = table_of(ring).take(pa.array(numbers, pa.int64()))
        pq.write_table(table, path, row_group_size=7)
        return path
    whole = ring.with_name(f"all.{ending}")
    mr.export(ring, whole, overwrite=True)
    if ending == "csv":
        with whole.open(newline="") as file:
            header, *rows = csv.reader(file)
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([header, *(rows[n] for n in numbers)])
        return path
    if ending == "npz":
        with np.load(whole) as arrays:
            columns = {k: arrays[k] for k in arrays.files if k != "mmreplay.json"}
    else:
        columns = load_file(whole)
    taken = {k: c[numbers] for k, c in columns.items() if not k.startswith("note.")}
    begins, texts = columns["note.offsets"], columns["note.values"]
    some = [texts[begins[n] : begins[n + 1]] for n in numbers]
    taken["note.offsets"] = np.cumsum([0, *map(len, some)])
    taken["note.values"] = np.concatenate([texts[:0], *some])
    np.savez(path, **taken) if ending == "npz" else save_file(taken, path)
    return path


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("autoreset", AUTORESETS)
@pytest.mark.parametrize("seed", range(6))
def test_what_a_filter_keeps_comes_back_as_a_twin_says(tmp_path, seed, autoreset, ending):
    ring = record(tmp_path / "ring", autoreset, seed)
    rows, table = rows_of(ring), table_of(ring)
    compare(loaded(ring), expected(rows, [True] * len(rows)))  # the twin is right
    how, tests = conditions(seed, table.column_names)
    columns = {name: table[name].to_pylist() for name, _, _ in tests}
    kept = [how(holds(columns[name][n], *test) for name, *test in tests) for n in range(len(rows))]
    if not any(kept):
        kept[len(kept) // 2] = True
    path = chosen(ring, np.flatnonzero(kept), ending)
    mr.load(path, tmp_path / "again", **options(path))
    compare(loaded(tmp_path / "again"), expected(rows, kept))


@pytest.mark.parametrize("ending", FORMATS)
def test_the_report_counts_holes_and_lost_steps_of_final_rows(ring, tmp_path, ending):
    rows = rows_of(ring)
    finals = [n for n, row in enumerate(rows) if row["flags"] & FINAL and n]
    removed = finals[1] - 1
    kept = [n for n in range(len(rows)) if n not in (removed - 2, removed)]
    path = chosen(ring, kept, ending)
    report = mr.load(path, tmp_path / "again", **options(path))
    assert report.rows == len(rows) - 3
    assert [note for note in report.notes if "hole" in note] == [
        "_position has 2 holes: the rows behind one follow at the next positions, and "
        "rows that were no neighbours are of different episodes"
    ]
    assert "1 final rows were left out, whose step is not there" in report.notes


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.sliced(3)
def test_strict_refuses_an_autoreset_that_rows_do_not_say(ring, tmp_path, ending):
    """Against the file format: what may follow an end in each mode."""
    rows = rows_of(ring)
    with mr.ReplayBuffer.open(ring) as buffer:
        own = buffer.autoreset
    pairs = list(pairwise(rows))
    steps = [n for n, row in enumerate(rows) if not row["flags"] & FINAL]
    # A row behind an end that is no final row is of another mode than "next_step".
    said = [
        n
        for n, (one, other) in enumerate(pairs)
        if one["env"] == other["env"]
        and one["flags"] & (TERMINATED | TRUNCATED)
        and not other["flags"] & (FINAL | BREAK)
    ]
    assert bool(said) == (own != "next_step")
    unsaid = [n for n in range(len(rows)) if n not in {at + 1 for at in said}]
    for number, (kept, sure) in enumerate(
        ((range(len(rows)), bool(said)), (steps, True), (unsaid, False))
    ):
        path = chosen(ring, list(kept), ending)
        more = options(path) | {"strict": True}
        if sure:
            report = mr.load(path, tmp_path / f"{number}", **more)
            assert any("its autoreset 'disabled'" in note for note in report.notes)
            continue
        match = (
            r"the buffer's autoreset was taken as '(next_step|disabled)': its rows do "
            r"not say .*\. Load without strict if the guess is right, or pass"
        )
        with pytest.raises(SourceError, match=match):
            mr.load(path, tmp_path / f"{number}", **more)


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("autoreset", AUTORESETS)
@pytest.mark.sliced(3)
def test_a_given_autoreset_answers_what_rows_do_not_say(ring, tmp_path, ending, autoreset):
    """Rows without the first step after each end: all but the mode comes back."""
    rows = rows_of(ring)
    pairs = list(pairwise(rows))
    said = {
        n + 1
        for n, (one, other) in enumerate(pairs)
        if one["env"] == other["env"]
        and one["flags"] & (TERMINATED | TRUNCATED)
        and not other["flags"] & (FINAL | BREAK)
    }
    kept = [n not in said for n in range(len(rows))]
    path = chosen(ring, np.flatnonzero(kept), ending)
    more = options(path) | {"strict": True, "autoreset": autoreset}
    report = mr.load(path, tmp_path / "again", **more)
    assert not report.doubts
    assert any(f"its autoreset {autoreset!r}" in note for note in report.notes)
    with mr.ReplayBuffer.open(tmp_path / "again") as buffer:
        assert buffer.autoreset == autoreset
    found = [
        {name: value for name, value in row.items() if name != "flags"}
        for row in rows_of(tmp_path / "again")
    ]
    # As without it: the mode decides no value, and no position.
    mr.load(path, tmp_path / "guessed", **options(path))
    guessed = rows_of(tmp_path / "guessed")
    assert len(found) == len(guessed) > 0
    for one, other in zip(found, guessed, strict=True):
        np.testing.assert_equal(one, {name: other[name] for name in one})
    assert verify_buffer(tmp_path / "again").ok


@pytest.mark.parametrize("ending", FORMATS)
def test_an_autoreset_that_rows_contradict_or_need_not_is_refused(ring, tmp_path, ending):
    with mr.ReplayBuffer.open(ring) as buffer:
        own = buffer.autoreset
    rows = rows_of(ring)
    path = chosen(ring, range(len(rows)), ending)
    more = options(path)
    if own != "next_step":
        told = "autoreset must not be 'next_step' for these rows: an episode's end is"
        with pytest.raises(SchemaError, match=told):
            mr.load(path, tmp_path / "again", autoreset="next_step", **more)
    told = "autoreset must be one of 'disabled', 'same_step', 'next_step', got 'next'"
    with pytest.raises(SchemaError, match=told):
        mr.load(path, tmp_path / "again", autoreset="next", **more)
    needless = "autoreset is for files with the columns _env_id, _position, _flags and"
    described = ring.with_name(f"described.{ending}")
    mr.export(ring, described)
    with pytest.raises(SchemaError, match=needless):
        mr.load(described, tmp_path / "again", autoreset="disabled")
    if ending == "npz":
        np.savez(tmp_path / "plain.npz", reward=np.ones(5, np.float32))
        with pytest.raises(SchemaError, match=needless):
            mr.load(tmp_path / "plain.npz", tmp_path / "again", autoreset="disabled")
    assert not (tmp_path / "again").exists()


@pytest.mark.sliced(1)
def test_the_command_takes_an_autoreset(ring, tmp_path, capsys):
    rows = rows_of(ring)
    # An end without a final row, and no row behind it, says nothing.
    steps = [n for n, row in enumerate(rows) if row["flags"] & FINAL]
    path = chosen(ring, [steps[-1] - 1, steps[-1]], "parquet")
    command = ["convert", str(path), str(tmp_path / "again"), "--strict"]
    assert run(command) != 0
    assert "pass autoreset= (--autoreset) to say it" in capsys.readouterr().err
    assert run([*command, "--autoreset", "same_step"]) == 0
    with mr.ReplayBuffer.open(tmp_path / "again") as buffer:
        assert buffer.autoreset == "same_step"
    lerobot = ["convert", str(ring), str(tmp_path / "a.npz"), "--autoreset", "disabled"]
    assert run(lerobot) != 0
    assert "option 'autoreset' is unknown to 'buffer'" in capsys.readouterr().err


@pytest.mark.parametrize("ending", FORMATS)
def test_environments_may_interleave(ring, tmp_path, ending):
    rows = rows_of(ring)
    kept = [n for n in range(len(rows)) if n % 5]
    kept.sort(key=lambda n: (rows[n]["position"], -rows[n]["env"]))
    path = chosen(ring, kept, ending)
    mr.load(path, tmp_path / "again", **options(path))
    some = [n in kept for n in range(len(rows))]
    compare(loaded(tmp_path / "again"), expected(rows, some))


@pytest.mark.parametrize("ending", FORMATS)
def test_rows_out_of_order_are_refused_by_position(ring, tmp_path, ending):
    rows = rows_of(ring)
    order = np.arange(len(rows))
    order[[7, 8]] = order[[8, 7]]
    path = chosen(ring, order, ending)
    with pytest.raises(
        SourceError,
        match=f"row 8 has position {rows[7]['position']} of environment 0 behind "
        f"position {rows[8]['position']}. Sort the rows by _env_id and _position.",
    ):
        mr.load(path, tmp_path / "again", **options(path))
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("ending", FORMATS)
def test_rows_that_are_there_twice_are_refused_by_position(ring, tmp_path, ending):
    rows = rows_of(ring)
    path = chosen(ring, [*range(8), *range(7, len(rows))], ending)
    with pytest.raises(
        SourceError,
        match=f"row 8 has position {rows[7]['position']} of environment 0 again. "
        "Remove rows that are there twice.",
    ):
        mr.load(path, tmp_path / "again", **options(path))


@pytest.mark.parametrize("ending", ["parquet", "csv"])
@pytest.mark.parametrize(
    ("removed", "there", "lost"),
    [
        (["_flags"], "'_env_id' and '_position'", "'_flags'"),
        (["_flags", "_env_id"], "'_position'", "'_env_id' and '_flags'"),
        (["_flags", "_position"], "'_env_id'", "'_position' and '_flags'"),
        (["_position"], "'_env_id' and '_flags'", "'_position'"),
        (["_env_id", "_position"], "'_flags'", "'_env_id' and '_position'"),
    ],
)
def test_positions_without_flags_are_refused_with_the_way_out(
    ring, tmp_path, ending, removed, there, lost
):
    table, path = table_of(ring).drop_columns(removed), tmp_path / f"some.{ending}"
    if ending == "csv":
        keep = [name for name in table.column_names if name != "observation"]
        pa.csv.write_csv(table.select(keep), path)
    else:
        pq.write_table(table, path)
    with pytest.raises(
        SourceError,
        match=f"the file has {there} of a buffer's rows without {lost}, so that .*"
        "Keep all of _env_id, _position, _flags, or leave out all of them",
    ):
        mr.load(path, tmp_path / "again")


@pytest.mark.parametrize("name", POSITION_COLUMNS)
@pytest.mark.sliced(1)
def test_a_row_without_its_position_is_named_with_ways_out_that_work(ring, tmp_path, name):
    table, path = table_of(ring), tmp_path / "some.parquet"
    row = 11
    some = pa.array([n != row for n in range(len(table))])
    column = pc.if_else(some, table[name], None)
    lacking = table.set_column(table.schema.get_field_index(name), name, column)
    pq.write_table(lacking, path, row_group_size=7)
    match = (
        rf"row {row} has no {name}\. Remove rows without it, or leave out the three "
        r"columns to read every row as a step\."
    )
    with pytest.raises(SourceError, match=match):
        mr.load(path, tmp_path / "again")
    pq.write_table(lacking.filter(some), path)
    assert mr.load(path, tmp_path / "again").rows in (len(table) - 1, len(table) - 2)
    pq.write_table(lacking.drop_columns(list(POSITION_COLUMNS)), path)
    assert mr.load(path, tmp_path / "steps").rows == len(table)


def test_labels_of_rows_that_pandas_adds_are_no_field(ring, tmp_path):
    rows, table = rows_of(ring), table_of(ring)
    kept = [n % 4 > 0 for n in range(len(rows))]
    labels, path = "__index_level_0__", tmp_path / "some.parquet"
    table = table.append_column(labels, pa.array(range(len(rows)))).filter(pa.array(kept))
    about = {"pandas": f'{{"index_columns": ["{labels}"]}}'}
    pq.write_table(table.replace_schema_metadata(about), path)
    report = mr.load(path, tmp_path / "again")
    assert any(f"column '{labels}' is the index" in note for note in report.notes)
    with mr.ReplayBuffer.open(tmp_path / "again") as again:
        assert labels not in again.schema
    compare(loaded(tmp_path / "again"), expected(rows, kept))


def test_episodes_and_steps_alone_are_a_foreign_file(ring, tmp_path):
    table = table_of(ring).drop_columns(["_env_id", "_position", "_flags"])
    pq.write_table(table, tmp_path / "some.parquet")
    report = mr.load(tmp_path / "some.parquet", tmp_path / "again")
    assert "episodes begin where column 'episode_index' changes" in report.notes
    assert report.rows == len(table)


@pytest.mark.parametrize("columns", [POSITION_COLUMNS, ("_flags",)])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (pa.string(), "string"),
        (pa.float64(), "double"),
        (pa.decimal128(20, 0), r"decimal128\(20, 0\)"),
        (pa.timestamp("us"), r"timestamp\[us\]"),
    ],
)
def test_positions_that_are_no_integers_are_refused(ring, tmp_path, columns, dtype, kind):
    table = table_of(ring)
    for name in columns:
        number = table.schema.get_field_index(name)
        cast = table[name].cast(pa.int64()).cast(dtype)
        table = table.set_column(number, name, cast)
    pq.write_table(table, tmp_path / "some.parquet")
    with pytest.raises(
        SourceError, match=rf"{columns[0]} is {kind}\. Store the three as integers in each row\."
    ):
        mr.load(tmp_path / "some.parquet", tmp_path / "again")


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("U20", "<U20"), ("complex64", "complex64"), ("float32", r"float32 of shape \[.*\]")],
)
def test_position_arrays_that_are_no_integers_are_refused(ring, tmp_path, dtype, kind):
    with np.load(chosen(ring, np.arange(4), "npz")) as arrays:
        columns = {
            name: arrays[name].astype(dtype if name in POSITION_COLUMNS else None)
            for name in arrays.files
        }
    np.savez(tmp_path / "cast.npz", **columns)
    match = rf"is {kind}\. Store the three as integers in each row\."
    with pytest.raises(SourceError, match=match):
        mr.load(tmp_path / "cast.npz", tmp_path / "again")


@pytest.mark.parametrize(
    ("cast", "kind"),
    [
        (lambda column: column.tolist(), "a list"),
        (lambda column: torch.from_numpy(column).to(torch.complex64), "torch.complex"),
    ],
)
def test_position_tensors_that_are_no_integers_are_refused(ring, tmp_path, cast, kind):
    with np.load(chosen(ring, np.arange(4), "npz")) as arrays:
        columns = {
            name: cast(array.astype(np.int64))
            if name in POSITION_COLUMNS
            else torch.from_numpy(array)
            for name, array in arrays.items()
        }
    torch.save(columns, tmp_path / "cast.pt")
    with pytest.raises(SourceError, match=f"is {kind}.* Store the three as integers"):
        mr.load(tmp_path / "cast.pt", tmp_path / "again")


def test_the_columns_may_have_other_integers_and_be_among_others(ring, tmp_path):
    rows, table = rows_of(ring), table_of(ring)
    kept = np.arange(len(table)) % 4 != 3
    columns = {
        "extra": pa.array(np.arange(len(table))),
        "_flags": table["_flags"].cast(pa.int64()),
        "_position": table["_position"].cast(pa.uint32()),
        **{n: table[n] for n in table.column_names if not n.startswith("_")},
        "_env_id": table["_env_id"].cast(pa.int8()),
    }
    pq.write_table(pa.table(columns).filter(pa.array(kept)), tmp_path / "some.parquet")
    mr.load(tmp_path / "some.parquet", tmp_path / "again")
    compare(loaded(tmp_path / "again"), expected(rows, kept.tolist()))


@pytest.mark.sliced(1)
def test_an_environment_may_lose_all_rows(ring, tmp_path):
    rows = rows_of(ring)
    kept = [n for n, row in enumerate(rows) if row["env"] != 1]
    mr.load(chosen(ring, kept, "parquet"), tmp_path / "again")
    with mr.ReplayBuffer.open(tmp_path / "again") as buffer:
        assert buffer.num_envs == 3
        assert buffer.sizes[1] == 0
    some = [row["env"] != 1 for row in rows]
    compare(loaded(tmp_path / "again"), expected(rows, some))


@pytest.mark.parametrize("ending", ["parquet", "npz", "safetensors"])
def test_a_filter_that_keeps_nothing_gives_no_rows(ring, tmp_path, ending):
    path = chosen(ring, np.zeros(0, np.int64), ending)
    assert mr.load(path, tmp_path / "again").rows == 0


def test_some_fields_of_a_curated_file_are_read_alone(ring, tmp_path):
    rows, table = rows_of(ring), table_of(ring)
    kept = np.arange(len(table)) % 4 != 3
    pq.write_table(table.filter(pa.array(kept)), tmp_path / "some.parquet")
    mr.load(tmp_path / "some.parquet", tmp_path / "again", fields=["observation"])
    want = expected(rows, kept.tolist())
    with mr.ReplayBuffer.open(tmp_path / "again") as buffer:
        assert buffer.schema.paths == ("observation",)
        batch = buffer.gather_all()
    steps = [
        tuple(observation)
        for observation, final in zip(batch["observation"].tolist(), batch["final"], strict=True)
        if not final
    ]
    assert steps == [step[0] for env in sorted(want) for step in want[env]]


@pytest.mark.sliced(1)
def test_rows_of_a_curated_file_are_selected_after_its_holes(ring, tmp_path):
    rows = rows_of(ring)
    kept = [n for n in range(len(rows)) if n % 6]
    path = chosen(ring, kept, "parquet")
    mr.load(path, tmp_path / "all")
    mr.load(path, tmp_path / "some", rows=slice(4, 15))
    every, some = rows_of(tmp_path / "all"), rows_of(tmp_path / "some")
    for one, other in zip(every[4:15], some, strict=True):
        assert one["observation"] == other["observation"]


def test_a_step_that_its_next_row_truncates_stays_truncated_without_it(tmp_path):
    """Only the row after an interruption says so, and a filter may remove it."""
    schema = mr.Schema({"observation": mr.Field((), "int64"), "truncated": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 16, autoreset="disabled") as buffer:
        for number in range(8):
            if number == 4:
                buffer.end_episodes()
            buffer.add(observation=number, truncated=False)
    mr.export(tmp_path / "ring", tmp_path / "all.parquet")
    table = pq.read_table(tmp_path / "all.parquet").replace_schema_metadata(None)
    for name, kept in (("head", range(4)), ("hole", [0, 1, 2, 3, 5, 6, 7])):
        pq.write_table(table.take(list(kept)), tmp_path / f"{name}.parquet")
        mr.load(tmp_path / f"{name}.parquet", tmp_path / name)
        with mr.ReplayBuffer.open(tmp_path / name) as again:
            rows = again.gather_all()
        assert rows["observation"].tolist() == list(kept)
        assert np.flatnonzero(rows["truncated"]).tolist() == [3]


def test_a_filtered_file_with_its_old_description_is_refused(ring, tmp_path):
    """pandas, polars, duckdb and pyarrow drop it; others may copy all metadata."""
    table = table_of(ring)
    metadata = pq.read_metadata(tmp_path / "all.parquet").metadata
    named = {name: metadata[name] for name in (b"mmreplay", b"mmreplay.crc32c")}
    table = table.replace_schema_metadata(named)
    pq.write_table(table.slice(3), tmp_path / "some.parquet")
    with pytest.raises(
        CorruptError,
        match=f"holds {len(table) - 3} rows, but its description says {len(table)}. "
        ".*; if rows were filtered, write them without the metadata 'mmreplay' and "
        "'mmreplay.crc32c'.",
    ):
        mr.load(tmp_path / "some.parquet", tmp_path / "again")


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_files_and_row_groups_without_rows_are_read(tmp_path, empty):
    table = pa.table({"episode_index": [0, 0, 1], "obs": [[1.0, 2.0]] * 3, "word": ["a", "b", "c"]})
    tables = [table, table]
    tables.insert(empty, table.slice(0, 0))
    (tmp_path / "parts").mkdir()
    with pq.ParquetWriter(tmp_path / "groups.parquet", table.schema) as writer:
        for number, each in enumerate(tables):
            writer.write_table(each)
            pq.write_table(each, tmp_path / "parts" / f"part-{number}.parquet")
    for name in ("parts", "groups.parquet"):
        mr.load(tmp_path / name, tmp_path / "b", format="parquet", overwrite=True)
        with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
            rows = buffer.gather_all()
        assert rows["obs"].tolist() == [[1.0, 2.0]] * 6
        assert rows["word"].text() == ["a", "b", "c"] * 2


def test_a_table_without_rows_is_no_damaged_file(tmp_path):
    table = pa.table(
        {"episode_index": pa.array([], pa.int64()), "reward": pa.array([], pa.float64())}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with pq.ParquetWriter(tmp_path / "b.parquet", table.schema):
        pass
    for name in "ab":
        assert mr.load(tmp_path / f"{name}.parquet", tmp_path / name).rows == 0
