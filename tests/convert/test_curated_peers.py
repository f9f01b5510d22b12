"""Rows that pandas, polars and duckdb filtered come back as a twin says.

They are in nobody's dependencies: install pandas, polars and duckdb beside mmreplay to
run this.
"""

import os

import pytest

import mmreplay as mr
from mmreplay.disk import files
from tests.convert.curated import (
    AUTORESETS,
    FINAL,
    START,
    compare,
    conditions,
    expected,
    holds,
    loaded,
    record,
    rows_of,
)

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore:.*end_episodes of environments")]
FILTERS = int(os.environ.get("FILTERS", "200"))
"""Of each library and autoreset, one half in parquet and one half in csv."""


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)


def with_polars(polars, source, target, how, tests):
    def condition(name, operator, operand):
        column = polars.col(name)
        return {
            "in": lambda: column.is_in(operand),
            ">": lambda: column > operand,
            "<": lambda: column < operand,
            "between": lambda: column.is_between(*operand),
            "not divided by": lambda: column % operand != 0,
            "without": lambda: (column & operand) == 0,
        }[operator]()

    join = polars.all_horizontal if how is all else polars.any_horizontal
    kept = join([condition(*test) for test in tests])
    if source.suffix == ".csv":
        polars.read_csv(source).filter(kept).write_csv(target)
    else:
        polars.scan_parquet(source).filter(kept).collect().write_parquet(target)


def with_pandas(pandas, source, target, how, tests):
    def condition(name, operator, operand):
        column = frame[name]
        return {
            "in": lambda: column.isin(operand),
            ">": lambda: column > operand,
            "<": lambda: column < operand,
            "between": lambda: column.between(*operand),
            "not divided by": lambda: column % operand != 0,
            "without": lambda: (column & operand) == 0,
        }[operator]()

    csv = source.suffix == ".csv"
    frame = pandas.read_csv(source) if csv else pandas.read_parquet(source)
    every = pandas.concat([condition(*test) for test in tests], axis=1)
    # The index, which now has holes, is written too.
    some = frame[every.all(axis=1) if how is all else every.any(axis=1)]
    some.to_csv(target) if csv else some.to_parquet(target)


def with_duckdb(duckdb, source, target, how, tests):
    def condition(name, operator, operand):
        return {
            "in": lambda: f"{name} in ({', '.join(map(str, operand))})",
            ">": lambda: f"{name} > {operand}",
            "<": lambda: f"{name} < {operand}",
            "between": lambda: f"{name} between {operand[0]} and {operand[1]}",
            "not divided by": lambda: f"{name} % {operand} <> 0",
            "without": lambda: f"({name}::integer & {operand}) = 0",
        }[operator]()

    words = " and " if how is all else " or "
    kept = words.join(condition(*test) for test in tests)
    duckdb.sql(f"copy (select * from '{source}' where {kept}) to '{target}'")


@pytest.mark.parametrize("ending", ["parquet", "csv"])
@pytest.mark.parametrize("autoreset", AUTORESETS)
@pytest.mark.parametrize(
    ("name", "write"), [("polars", with_polars), ("pandas", with_pandas), ("duckdb", with_duckdb)]
)
def test_what_a_library_keeps_comes_back_as_a_twin_says(tmp_path, name, write, autoreset, ending):
    library = pytest.importorskip(name, reason=f"{name} is not installed")
    empty = holes = 0
    seeds = range(ending == "csv", FILTERS, 2)
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        ring = record(folder / "ring", autoreset, seed)
        mr.export(ring, folder / f"all.{ending}")
        rows = rows_of(ring)
        columns = columns_of(rows, ending)
        how, tests = conditions(seed, columns)
        kept = [
            how(holds(columns[column][n], *test) for column, *test in tests)
            for n in range(len(rows))
        ]
        target = folder / f"some.{ending}"
        write(library, folder / f"all.{ending}", target, how, tests)
        if not any(kept):
            empty += 1
            continue
        # Where all notes that are left are empty, no cell tells that they are text.
        chosen = {"observation": "float32", "reward": "float32", "note": "text"}
        given = {"dtypes": chosen} if ending == "csv" else {}
        report = mr.load(target, folder / "again", **given)
        holes += any("holes" in note for note in report.notes)
        compare(loaded(folder / "again"), expected(rows, kept))
    assert empty <= len(seeds) // 2
    assert holes >= len(seeds) // 4


def columns_of(rows, ending):
    """The columns of an exported file that conditions name, found in plain Python."""
    columns = {
        "_env_id": [row["env"] for row in rows],
        "_position": [row["position"] for row in rows],
        "_flags": [row["flags"] for row in rows],
        "action": [row["step"][0] for row in rows],
        "reward": [row["step"][1] for row in rows],
    }
    if ending == "csv":
        return columns
    episodes, steps, begun, last = [], [], -1, None
    for row in rows:
        oldest, final = row["env"] != last, bool(row["flags"] & FINAL)
        if row["flags"] & START or (oldest and not final):
            begun += 1
            episodes.append(begun)
            steps.append(0)
        elif oldest:
            # A final row of which the ring has no step any more.
            episodes.append(-1)
            steps.append(0)
        else:
            episodes.append(episodes[-1])
            steps.append(steps[-1] + 1)
        last = row["env"]
    return {**columns, "episode_index": episodes, "step_index": steps}


@pytest.mark.parametrize("name", ["polars", "pandas"])
def test_a_table_that_a_library_filtered_selects_its_episodes(tmp_path, name):
    library = pytest.importorskip(name, reason=f"{name} is not installed")
    rings = [record(tmp_path / f"ring{seed}", "same_step", seed) for seed in range(3)]
    for source in (rings[0], rings):
        table = mr.episode_table(source)
        frame = library.DataFrame(table.to_dict())
        if name == "polars":
            some = frame.filter(library.col("whole") & (library.col("returns") > 0))
            some = some.sort("returns")
            empty = some.filter(library.col("lengths") < 0)
        else:
            some = frame[frame["whole"] & (frame["returns"] > 0)].sort_values("returns")
            empty = some[some["lengths"] < 0]
        assert 0 < len(some) < len(table)
        target = tmp_path / f"x{len(table)}"
        mr.load(source, target / "by_table", episodes=some)
        mr.load(source, target / "by_where", where="whole and return > 0")
        mr.load(source, target / "but_these", skip=some)
        assert rows_of(target / "by_table") == rows_of(target / "by_where")
        both = len(rows_of(target / "by_table")) + len(rows_of(target / "but_these"))
        assert both == len(rows_of(all_of(source, target)))
        with pytest.raises(mr.SchemaError, match="no episode is selected"):
            mr.load(source, target / "none", episodes=empty)


def all_of(source, target):
    """All rows of the sources, without final rows whose step is gone."""
    mr.load(source, target / "all", where="number >= 0")
    return target / "all"
