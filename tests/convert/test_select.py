"""Episodes, rows, fields and environments chosen of a source."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.convert import buffer_reader as buffers
from mmreplay.convert.select import Selection, select
from mmreplay.disk import files
from mmreplay.errors import FormatError, SchemaError, SourceError
from tests.convert.contract import numbers
from tests.convert.support import every_kind, histories, play
from tests.slices import count

START, TERMINATED, TRUNCATED, FINAL, CUT = 1, 2, 4, 8, 32


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)


@pytest.fixture
def source(tmp_path):
    with every_kind(tmp_path / "source") as buffer:
        yield buffer


def listed(buffer):
    """Every row as (environment, position, flags), as a person would write it down."""
    rows = buffer.gather_all()
    flags = buffer.view.flags(rows.env_ids, rows.positions)
    return list(zip(rows.env_ids.tolist(), rows.positions.tolist(), flags.tolist(), strict=True))


def grouped(rows):
    """Episodes, one list of rows each; a final row of none belongs to no episode."""
    found, last = [], None
    for row in rows:
        fresh = row[0] != last
        last = row[0]
        if row[2] & START or (fresh and not row[2] & FINAL):
            found.append([])
        elif fresh:
            continue
        if found and (not found[-1] or found[-1][-1][0] == row[0]):
            found[-1].append(row)
    return found


def steps_of(rows):
    return [row[:2] for row in rows]


slices = st.builds(slice, st.none() | st.integers(-30, 30), st.none() | st.integers(-30, 30))


@given(past=histories(), episodes=st.none() | slices, rows=st.none() | slices)
@settings(max_examples=count(60, 15), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_chosen_is_what_a_list_of_rows_gives(tmp_path, past, episodes, rows):
    place = tmp_path / str(next(numbers))
    with play(place / "source", past) as source:
        want = listed(source)
        if episodes is not None:
            want = [row for each in grouped(want)[episodes] for row in each]
        if rows is not None:
            want = want[rows]
        mr.export(source, place / "all.npz")
        chosen_ = {"episodes": episodes, "rows": rows}
        if not want and len(listed(source)):
            for call in (mr.export, mr.load):
                origin = source if call is mr.export else place / "all.npz"
                with pytest.raises(SchemaError, match=r"(rows|episodes) selects none of \d+, got"):
                    call(origin, place / "x.npz", **chosen_)
            return
        mr.export(source, place / "part.npz", **chosen_)
        mr.load(place / "part.npz", place / "one")
        mr.load(place / "all.npz", place / "other", **chosen_)
        truncated = source.schema.role("truncated")
        told = source.gather_all()
        for name in ("one", "other"):
            assert not mr.verify_buffer(place / name).findings
            with mr.ReplayBuffer.open(place / name) as part:
                assert steps_of(listed(part)) == steps_of(want)
                if not truncated or not want:
                    continue
                # A step that its next row alone tells as truncated stays truncated.
                kept = part.gather_all()
                both = dict(zip(steps_of(listed(source)), told[truncated], strict=True))
                step = [not row[2] & FINAL for row in want]
                got = np.asarray(kept[truncated])[step]
                assert got.tolist() == [bool(both[row[:2]]) for row in want if not row[2] & FINAL]


def test_environments_and_fields_come_first(source, tmp_path):
    mr.export(source, tmp_path / "all.npz")
    choice = {"fields": ["observation"], "env_ids": [1], "rows": slice(2, 5)}
    mr.export(source, tmp_path / "a.npz", **choice)
    mr.load(tmp_path / "a.npz", tmp_path / "a")
    mr.load(tmp_path / "all.npz", tmp_path / "b", **choice)
    first = int(source.span.first[1])
    for name in "ab":
        with mr.ReplayBuffer.open(tmp_path / name) as part:
            assert part.schema.paths == ("observation/o",)
            rows = part.gather_all()
            assert rows.positions.tolist() == [first + 2, first + 3, first + 4]
            assert part.heads[0] == source.heads[0]
            want = source.get_field("observation/o", 1, rows.positions)
            assert rows["observation/o"].tobytes() == want.tobytes()


@pytest.mark.parametrize("fields", [["a"], ["a", "truncated"]])
def test_a_step_truncated_by_a_resume_alone_stays_so(tmp_path, fields):
    schema = mr.Schema(
        {
            name: mr.Field((), kind)
            for name, kind in {"a": "int8", "terminated": "bool", "truncated": "bool"}.items()
        }
    )
    step = {"terminated": False, "truncated": False}
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 9) as buffer:
        buffer.add(a=1, **step)
        buffer.add(a=2, **step)
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", on_resume="truncate") as buffer:
        buffer.add(a=3, **step)
        mr.export(buffer, tmp_path / "a.npz", fields=fields, episodes=slice(0, 1))
        mr.export(buffer, tmp_path / "all.npz")
    mr.load(tmp_path / "all.npz", tmp_path / "c", rows=slice(0, 2))
    with np.load(tmp_path / "a.npz") as found:
        assert found["_flags"].tolist() == [START, TRUNCATED]
    with mr.ReplayBuffer.open(tmp_path / "c") as loaded:
        assert loaded.flags(0, [0, 1]).tolist() == [START, TRUNCATED]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"rows": slice(0, 9, 2)}, r"rows must be a slice of step 1, such as slice\(0, 100\)"),
        ({"episodes": 3}, r"episodes must be a slice, a list of integers or a table with"),
        ({"rows": slice("a")}, r"rows must be a slice of step 1, such as slice\(0, 100\)"),
        ({"rows": slice(99, None)}, r"rows selects none of 48, got 99:\. Select at least one\."),
        (
            {"episodes": slice(3, 3)},
            r"episodes selects none of 18, got 3:3\. Select at least one\.",
        ),
    ],
)
def test_rows_and_fields_outside_the_source_are_refused(source, tmp_path, choice, message):
    with pytest.raises(SchemaError, match=message):
        mr.export(source, tmp_path / "a.npz", **choice)
    assert not (tmp_path / "a.npz").exists()


def test_rows_of_unknown_environments_are_refused_while_counting(source, tmp_path):
    mr.export(source, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as found:
        arrays = dict(found)
    arrays["_env_id"][-1] = 7
    np.savez(tmp_path / "b.npz", **arrays)
    with pytest.raises(
        SourceError, match=r"environment 7: environments must be in \[0, 2\)\. The source"
    ):
        mr.load(tmp_path / "b.npz", tmp_path / "b", episodes=slice(0, 2))


def test_a_buffer_is_read_where_it_is_wanted_only(source, monkeypatch):
    reader = buffers.BufferReader(source)
    asked = []
    read = type(source.view).read_values

    def counted(self, paths, ids, at):
        asked.append(len(at))
        return read(self, paths, ids, at)

    monkeypatch.setattr(type(source.view), "read_values", counted)
    with select(reader, Selection(rows=slice(3, 7)))[""].reader as part:
        assert sum(len(each) for each in part.blocks()) == 4
    assert sum(asked) == 4


def test_the_command_line_chooses_likewise(cli, source, tmp_path):
    source.commit()
    want = listed(source)
    for text, rows in (
        ("3:9", want[3:9]),
        (":5", want[:5]),
        ("-4:", want[-4:]),
        ("2", want[2:3]),
        ("-1", want[-1:]),
    ):
        place = tmp_path / f"rows{text}"
        assert cli(source.path, place, "--to", "buffer", f"--rows={text}")[0] == 0
        with mr.ReplayBuffer.open(place) as part:
            assert steps_of(listed(part)) == steps_of(rows)
    code, out, _ = cli(source.path, tmp_path / "e.npz", "--episodes", "1:3")
    assert code == 0
    episodes = grouped(want)[1:3]
    assert f"{sum(map(len, episodes))} rows, 2 episodes" in out


@pytest.mark.parametrize("text", ["", "a", "1:2:3", "1-2", ":", "1.5"])
def test_an_invalid_range_is_a_usage_error(cli, source, tmp_path, text):
    code, _, err = cli(source.path, tmp_path / "a.npz", f"--rows={text}")
    if text == ":":
        assert code == 0
        return
    assert code == 2
    assert "must be A:B, such as 0:100, or one number" in err


def test_a_dry_run_tells_what_is_chosen_and_what_it_would_take(cli, source, tmp_path):
    source.commit()
    plan = json.loads(cli(source.path, tmp_path / "a.npz", "-n", "--json", "--rows", "0:7")[1])
    assert plan["rows"] == 7
    cli(source.path, tmp_path / "a.npz", "--rows", "0:7")
    assert plan["target_nbytes"] == (tmp_path / "a.npz").stat().st_size
    code, _, err = cli(source.path, tmp_path / "b", "-n", "--engine", "memory")
    assert code == 2
    assert "--engine must be one of memmap, zarr, got 'memory'" in err
    assert cli(source.path, tmp_path / "b", "-n", "--capacity", "5")[0] == 0
    assert not (tmp_path / "b").exists()


def test_choices_may_be_arrays(source, tmp_path):
    mr.export(source, tmp_path / "a.npz")
    fields, env_ids = np.array(["observation", "single/int8"]), np.array([0, 1])
    for name, origin in (("b", tmp_path / "a.npz"), ("c", source.path)):
        mr.load(origin, tmp_path / name, fields=fields, env_ids=env_ids)
        with mr.ReplayBuffer.open(tmp_path / name) as buffer:
            assert set(buffer.schema.paths) == {"observation/o", "single/int8"}
            assert buffer.span.lengths.all()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            {"env_ids": [[0], [0, 1]]},
            r"env_ids must be one or more integers in \[0, 2\), got \[\[0\],",
        ),
        ({"fields": np.array([])}, r"fields must be a list of at least one path, got array\(\[\],"),
        ({"fields": 3}, r"fields must be a list of at least one path, got 3\. Leave"),
    ],
)
def test_what_is_no_choice_is_refused(source, tmp_path, choice, message):
    mr.export(source, tmp_path / "a.npz")
    with pytest.raises(SchemaError, match=message):
        mr.load(tmp_path / "a.npz", tmp_path / "b", **choice)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("path", [b"a.npz", 3, None])
def test_what_is_no_path_is_refused(source, tmp_path, path):
    with pytest.raises(FormatError, match="target must be a str or pathlib"):
        mr.export(source, path)
    with pytest.raises(FormatError, match="source must be a str or pathlib"):
        mr.load(path, tmp_path / "b")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, None, 3], "column 'x' lacks a value"),
        ([[[1.0]], [[1.0, 2.0]], [[1.0]]], "column 'x': row 1 must have shape"),
    ],
)
def test_a_column_that_is_left_out_is_not_read(tmp_path, values, message):
    columns = {"obs": [1.0, 2.0, 3.0], "episode": [0, 0, 1], "done": [0, 1, 0]}
    table = pa.table({**columns, "x": values})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=message):
        mr.load(tmp_path / "a.parquet", tmp_path / "b")
    # What tells of episodes is known all the same.
    mr.load(tmp_path / "a.parquet", tmp_path / "b", fields=["obs"])
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert buffer.schema.paths == ("obs",)
        assert buffer.gather_all()["obs"].tolist() == [1.0, 2.0, 3.0]
        flags = [each for _, _, each in listed(buffer)]
    assert [each & (START | TERMINATED) for each in flags] == [1, 2, 1]
