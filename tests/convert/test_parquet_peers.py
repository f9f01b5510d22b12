"""parquet and csv in the libraries that people read them with, and back from these.

They are in nobody's dependencies: install pandas, polars, duckdb and datasets beside
mmreplay to run this.
"""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.episodes import START

pytestmark = pytest.mark.peer
STATE, PIXELS = "observation/state", "observation/pixels"
SCHEMA = mr.Schema(
    {
        "observation": {
            "pixels": mr.Field((8, 8, 3), "uint8"),
            "state": mr.Field((17,), "float32"),
            "matrix": mr.Field((2, 3), "float64"),
        },
        "action": mr.Field((), "int64"),
        "half": mr.Field((), "float16"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    }
)


def need(name):
    return pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.fixture
def rows(tmp_path):
    rng = np.random.default_rng(0)
    lead = (60, 2)
    with mr.ReplayBuffer.create(tmp_path / "source", SCHEMA, 60, 2, autoreset="disabled") as buffer:
        buffer.extend(
            observation={
                "pixels": rng.integers(0, 256, (*lead, 8, 8, 3), np.uint8),
                "state": rng.random((*lead, 17), np.float32),
                "matrix": rng.random((*lead, 2, 3)),
            },
            action=np.arange(120).reshape(lead),
            half=rng.random(lead).astype(np.float16),
            reward=rng.random(lead, np.float32),
            terminated=rng.random(lead) < 0.1,
        )
        found = buffer.gather_all()
    mr.export(tmp_path / "source", tmp_path / "a.parquet")
    mr.export(tmp_path / "source", tmp_path / "parts.parquet", file_nbytes=10_000)
    return found


def episodes(rows):
    """Sums of rewards by episode, in order."""
    starts = np.append(True, rows["terminated"][:-1])
    starts |= np.append(True, np.diff(rows.env_ids) != 0)
    return np.bincount(np.cumsum(starts) - 1, rows["reward"].astype(np.float64))


def same_pixels(cells, rows):
    """Bytes, or lists of them, are the images."""
    got = [np.frombuffer(bytes(cell), np.uint8).reshape(8, 8, 3) for cell in cells]
    np.testing.assert_array_equal(np.stack(got), rows[PIXELS])


def test_pandas(rows, tmp_path):
    pandas = need("pandas")
    frame = pandas.read_parquet(tmp_path / "a.parquet")
    np.testing.assert_array_equal(np.stack(frame[STATE]), rows[STATE])
    matrix = np.stack(frame["observation/matrix"]).reshape(-1, 2, 3)
    np.testing.assert_array_equal(matrix, rows["observation/matrix"])
    same_pixels(frame[PIXELS], rows)
    assert frame["half"].dtype == np.float16
    sums = frame.groupby("episode_index")["reward"].apply(lambda r: r.astype("f8").sum())
    np.testing.assert_allclose(sums, episodes(rows), rtol=1e-12)  # order of summing
    parts = pandas.read_parquet(tmp_path / "parts.parquet")
    np.testing.assert_array_equal(parts["action"], rows["action"])
    mr.export(tmp_path / "source", tmp_path / "a.csv", fields=["action", "reward"])
    table = pandas.read_csv(tmp_path / "a.csv", dtype={"reward": np.float32})
    np.testing.assert_array_equal(table["reward"], rows["reward"])


def test_polars(rows, tmp_path):
    polars = need("polars")
    frame = polars.read_parquet(tmp_path / "a.parquet")
    assert frame.schema[STATE] == polars.Array(polars.Float32, 17)
    np.testing.assert_array_equal(frame[STATE].to_numpy(), rows[STATE])
    same_pixels(frame[PIXELS], rows)
    parts = polars.scan_parquet(tmp_path / "parts.parquet" / "*.parquet")
    one = parts.filter(polars.col("episode_index") == 1).collect()
    assert one["step_index"].to_list() == list(range(len(one)))
    assert abs(one["reward"].cast(polars.Float64).sum() - episodes(rows)[1]) < 1e-9


def test_duckdb(rows, tmp_path):
    duckdb = need("duckdb")
    parts = tmp_path / "parts.parquet" / "*.parquet"
    for path in (tmp_path / "a.parquet", parts):
        found = duckdb.sql(
            f"select episode_index, sum(reward::double) from '{path}' group by 1 order by 1"
        ).fetchall()
        np.testing.assert_allclose([s for _, s in found], episodes(rows), rtol=1e-12)
    cells = duckdb.sql(f'select "{PIXELS}", "{STATE}" from \'{tmp_path / "a.parquet"}\'').fetchall()
    same_pixels([pixels for pixels, _ in cells], rows)
    np.testing.assert_array_equal(np.array([s for _, s in cells], "f4"), rows[STATE])


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_datasets(rows, tmp_path):
    datasets = need("datasets")
    for number, files in enumerate(("a.parquet", "parts.parquet/*.parquet")):
        found = datasets.load_dataset(
            "parquet",
            data_files=str(tmp_path / files),
            split="train",
            cache_dir=str(tmp_path / f"cache{number}"),
        )
        assert found.features[STATE].length == 17
        assert len(found) == len(rows["action"])
        same_pixels(found[:][PIXELS], rows)
        np.testing.assert_array_equal(np.array(found[:][STATE], "f4"), rows[STATE])


def came_back(path, rows, renamed=str):
    """A table of somebody else's holds the rows, as one environment."""
    report = mr.load(path, path.with_name("target"))
    with mr.ReplayBuffer.open(path.with_name("target")) as target:
        found = target.gather_all()
        for name in ("action", "reward", STATE, "terminated"):
            np.testing.assert_array_equal(found[renamed(name)], rows[name])
        starts = np.append(True, rows["terminated"][:-1])
        assert report.episodes == starts.sum()


def plain(rows):
    return {
        "action": rows["action"],
        "reward": rows["reward"],
        STATE: list(rows[STATE]),
        "terminated": rows["terminated"],
        "note": ["text"] * len(rows["action"]),
    }


def test_what_pandas_writes_comes_in(rows, tmp_path):
    pandas = need("pandas")
    pandas.DataFrame(plain(rows)).to_parquet(tmp_path / "b.parquet")
    came_back(tmp_path / "b.parquet", rows)


def test_what_pandas_writes_as_csv_comes_in(rows, tmp_path):
    pandas = need("pandas")
    columns = {k: v for k, v in plain(rows).items() if k not in (STATE, "reward")}
    columns |= {f"{STATE}.{i}": rows[STATE][:, i] for i in range(17)}
    columns["reward"] = np.where(rows["action"] == 3, np.nan, rows["reward"])
    pandas.DataFrame(columns).to_csv(tmp_path / "b.csv")
    report = mr.load(
        tmp_path / "b.csv", tmp_path / "target", dtypes={STATE: "float32", "reward": "float32"}
    )
    assert "empty cells of column 'reward' became NaN" in report.notes
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        found = target.gather_all()
        np.testing.assert_array_equal(found[STATE], rows[STATE])
        np.testing.assert_array_equal(found["reward"], columns["reward"])
        assert target.schema.role("terminated") == "terminated"


def test_what_polars_writes_comes_in(rows, tmp_path):
    polars = need("polars")
    frame = polars.DataFrame(plain(rows) | {STATE: rows[STATE]})
    frame.write_parquet(tmp_path / "b.parquet")
    came_back(tmp_path / "b.parquet", rows)
    mr.export(tmp_path / "source", tmp_path / "c.parquet")
    polars.read_parquet(tmp_path / "c.parquet").write_parquet(tmp_path / "d.parquet")
    report = mr.load(tmp_path / "d.parquet", tmp_path / "again")
    assert "a buffer whose description is lost" in " ".join(report.notes)


def test_what_duckdb_writes_comes_in(rows, tmp_path):
    duckdb, target = need("duckdb"), tmp_path / "b.parquet"
    duckdb.sql(
        f"copy (select action, reward, \"{STATE}\", terminated, 'x' as note from "
        f"'{tmp_path / 'a.parquet'}' order by action) to '{target}' (format parquet)"
    )
    order = np.argsort(rows["action"])
    came_back(target, {name: rows[name][order] for name in rows})


@pytest.mark.filterwarnings("ignore")
def test_what_hugging_face_datasets_writes_comes_in(rows, tmp_path):
    datasets = need("datasets")
    found = datasets.Dataset.from_dict(
        plain(rows),
        features=datasets.Features(
            {
                "action": datasets.Value("int64"),
                "reward": datasets.Value("float32"),
                STATE: datasets.List(datasets.Value("float32"), length=17),
                "terminated": datasets.Value("bool"),
                "note": datasets.Value("string"),
            }
        ),
    )
    found.to_parquet(str(tmp_path / "b.parquet"))
    came_back(tmp_path / "b.parquet", rows)


TEXTS = ["=1+1", "", 'a "b",\n', "å"]
VARYING = mr.Schema(
    {
        "text": mr.Field.text(max_bytes=20),
        "frame": mr.Field.bytes(max_bytes=20),
        "tokens": mr.Field((None,), "int32", max_length=9),
        "points": mr.Field((None, 2), "float32", max_length=9),
        "reward": mr.Field((), "float32"),
    }
)


@pytest.fixture
def varying(tmp_path):
    """Rows of values of any length, as lists, and a file of them."""
    made = {
        "text": TEXTS,
        "frame": [text.encode() for text in TEXTS],
        "tokens": [list(range(n)) for n in (3, 0, 1, 9)],
        "points": [[[0.5, n]] * n for n in (2, 0, 1, 3)],
    }
    with mr.ReplayBuffer.create(tmp_path / "varying", VARYING, 8, heap_bytes=8192) as buffer:
        for row in range(4):
            points = np.array(made["points"][row], np.float32).reshape(-1, 2)
            tokens = np.array(made["tokens"][row], np.int32)
            buffer.add(
                text=TEXTS[row],
                frame=made["frame"][row],
                tokens=tokens,
                points=points,
                reward=float(row),
            )
        mr.export(buffer, tmp_path / "v.parquet")
        mr.export(buffer, tmp_path / "v.csv")
    return made


def listed(cells):
    """Cells as lists, whatever arrays the library made of them."""
    if isinstance(cells, str | bytes | int | float):
        return cells
    return [listed(cell) for cell in getattr(cells, "tolist", lambda: cells)()]


def test_pandas_reads_values_of_any_length(varying, tmp_path):
    pandas = need("pandas")
    frame = pandas.read_parquet(tmp_path / "v.parquet")
    for name, cells in varying.items():
        assert listed(list(frame[name])) == cells
    table = pandas.read_csv(tmp_path / "v.csv", keep_default_na=False)
    assert table["text"].tolist() == TEXTS


def test_polars_and_duckdb_read_values_of_any_length(varying, tmp_path):
    polars, duckdb = need("polars"), need("duckdb")
    frame = polars.read_parquet(tmp_path / "v.parquet")
    assert frame.schema["text"] == polars.String
    for name, cells in varying.items():
        assert listed(frame[name].to_list()) == cells
    columns = ", ".join(varying)
    rows = duckdb.sql(f"select {columns} from '{tmp_path / 'v.parquet'}'").fetchall()
    for name, cells in zip(varying, zip(*rows, strict=True), strict=True):
        assert listed(list(cells)) == varying[name], cells


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_datasets_read_and_write_values_of_any_length(varying, tmp_path):
    datasets = need("datasets")
    found = datasets.load_dataset(
        "parquet",
        data_files=str(tmp_path / "v.parquet"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert found.features["text"].dtype == "string"
    for name, cells in varying.items():
        assert listed(list(found[:][name])) == cells
    columns = [*varying, "reward"]
    found.select_columns(columns).to_parquet(str(tmp_path / "w.parquet"))
    mr.load(tmp_path / "w.parquet", tmp_path / "again")
    with mr.ReplayBuffer.open(tmp_path / "again") as buffer:
        assert buffer.schema["text"].kind == "text"
        assert buffer.schema["frame"].kind == "bytes"
        rows = buffer.gather_all()
        assert rows["text"].text() == TEXTS
        for name in ("tokens", "points"):
            assert [each.tolist() for each in rows[name]] == varying[name]


def test_what_pandas_and_polars_write_of_any_length_comes_in(varying, tmp_path):
    pandas, polars = need("pandas"), need("polars")
    columns = {name: varying[name] for name in ("text", "frame", "tokens")}
    columns["reward"] = [0.0, 1.0, 2.0, 3.0]
    pandas.DataFrame(columns).to_parquet(tmp_path / "a.parquet")
    polars.DataFrame(columns).write_parquet(tmp_path / "b.parquet")
    for name in ("a", "b"):
        mr.load(tmp_path / f"{name}.parquet", tmp_path / name)
        with mr.ReplayBuffer.open(tmp_path / name) as buffer:
            rows = buffer.gather_all()
        assert rows["text"].text() == TEXTS
        assert [each.tolist() for each in rows["tokens"]] == varying["tokens"]


ROWS = 1_200
WORDS = np.array(["", "go", "größer", "日本語", "=1+1", 'a "b",\n', "x" * 40])
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"]


def table(seed):
    """A table of somebody else's, of all kinds of columns that come in."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, ROWS)
    episodes = np.repeat(np.arange(ROWS), lengths)[:ROWS]
    return {
        "episode_id": np.array([f"run-{number:03d}" for number in episodes]),
        **{name: rng.integers(0, 100, ROWS).astype(name) for name in INTEGERS},
        "observation": rng.normal(size=(ROWS, 6)).astype("f4"),
        "reward": rng.normal(size=ROWS),
        "f4": rng.normal(size=ROWS).astype("f4"),
        "terminated": np.append(np.diff(episodes) != 0, True) & (episodes % 2 == 0),
        "note": WORDS[rng.integers(0, len(WORDS), ROWS)],
        "word": WORDS[rng.integers(1, 4, ROWS)],
    }


def cells_of(rows, name):
    """A column as Python's own values."""
    values = rows[name]
    return values.text() if isinstance(values, mr.Ragged) else np.asarray(values).tolist()


def judged(source, read, target, **options):
    """Compare each cell with what the library reads; the number of rows.

    Args:
        source: The file or folder.
        read: The library's columns, lists by name.
        target: Of our buffer.
        options: Of `load`.
    """
    report = mr.load(source, target, overwrite=True, **options)
    assert not any("left out" in text for text in (*report.doubts, *report.notes))
    with mr.ReplayBuffer.open(target) as buffer:
        rows = buffer.gather_all()
        assert set(buffer.schema.paths) == set(read)
        env_ids, positions = rows.env_ids, rows.positions
        begins = (buffer.view.flags(env_ids, positions) & START) != 0
    for name, cells in read.items():
        assert cells_of(rows, name) == cells, name
    names = read["episode_id"]
    changed = [a != b for a, b in zip(names[1:], names[:-1], strict=True)]
    ended = read["terminated"][:-1]
    over = [bool(a or b) for a, b in zip(changed, ended, strict=True)]
    assert begins[1:].tolist() == over
    return report.rows


def test_tables_that_polars_edits_are_read_as_polars_reads_them(tmp_path):
    polars = need("polars")
    col = polars.col
    frame = polars.DataFrame(table(0)).with_columns(col("word").cast(polars.Categorical))
    other = polars.DataFrame(table(1)).with_columns(col("word").cast(polars.Categorical))
    other = other.with_columns(col("episode_id") + "b")
    edits = {
        "written": frame,
        "filtered": frame.filter((col("int8") > 30) & (col("note") != "go")),
        "sorted": frame.sort("episode_id", "reward"),
        "sliced": frame.slice(100, 1_050),
        "added": frame.with_columns(
            (col("f4") * 2).alias("twice"), col("int64").cast(polars.Float32)
        ),
        "joined": frame.join(
            other.group_by("int8").agg(col("reward").mean().alias("mean")),
            on="int8",
            how="inner",
            maintain_order="left",
        ),
        "several": polars.concat([frame, other]),
    }
    compared = 0
    for name, edited in edits.items():
        path = tmp_path / f"{name}.parquet"
        options = {"row_group_size": 97} if name == "several" else {}
        edited.write_parquet(path, **options)
        read = polars.read_parquet(path).to_dict(as_series=False)
        compared += judged(path, read, tmp_path / "buffer")
    parts = tmp_path / "parts"
    parts.mkdir()
    empty = frame.clear()
    shuffled = other.select(other.columns[::-1]).with_columns(
        col("int8").cast(polars.Int32), col("f4").cast(polars.Float64)
    )
    for number, part in enumerate((frame[:700], empty, frame[700:], shuffled)):
        part.write_parquet(parts / f"part-{number}.parquet")
    read = polars.concat([frame, shuffled.select(frame.columns)], how="vertical_relaxed").to_dict(
        as_series=False
    )
    compared += judged(parts, read, tmp_path / "buffer")
    assert compared > 9_000
    flat = frame.drop("observation").with_columns(col("word").cast(polars.String))
    flat.write_csv(tmp_path / "a.csv")
    dtypes = {name: name for name in INTEGERS} | {"f4": "float32", "word": "text"}
    read = flat.to_dict(as_series=False)
    assert judged(tmp_path / "a.csv", read, tmp_path / "buffer", dtypes=dtypes) == ROWS


def test_tables_that_pandas_edits_are_read_as_pandas_reads_them(tmp_path):
    pandas = need("pandas")
    columns = table(2)
    columns["observation"] = list(columns["observation"])
    frame = pandas.DataFrame(columns)
    frame["word"] = frame["word"].astype("category")
    other = pandas.DataFrame(table(3) | {"observation": columns["observation"]})
    other["episode_id"] += "b"
    edits = {
        "written": frame,
        "filtered": frame[(frame["int8"] > 30) & (frame["note"] != "go")],
        "sorted": frame.sort_values(["episode_id", "reward"]),
        "added": frame.assign(twice=frame["f4"] * 2, int16=frame["int16"].astype("f8")),
        "joined": frame.merge(
            other.groupby("int8", as_index=False)["reward"]
            .mean()
            .rename(columns={"reward": "mean"}),
            on="int8",
        ),
        "several": pandas.concat([frame.astype({"word": "str"}), other]),
    }
    compared = 0
    for name, edited in edits.items():
        path = tmp_path / f"{name}.parquet"
        edited.to_parquet(path, index=False)
        read = pandas.read_parquet(path)
        read = {name: [listed(cell) for cell in read[name].tolist()] for name in read.columns}
        compared += judged(path, read, tmp_path / "buffer")
    assert compared > 7_000
    flat = frame.drop(columns="observation")
    flat.to_csv(tmp_path / "a.csv", index=False)
    dtypes = {name: name for name in INTEGERS} | {"f4": "float32", "word": "text"}
    again = pandas.read_csv(tmp_path / "a.csv", keep_default_na=False, dtype={"f4": "float32"})
    read = {name: again[name].tolist() for name in again.columns}
    assert judged(tmp_path / "a.csv", read, tmp_path / "buffer", dtypes=dtypes) == ROWS


def test_tables_that_duckdb_edits_are_read_as_duckdb_reads_them(tmp_path):
    duckdb, polars = need("duckdb"), need("polars")
    frame = polars.DataFrame(table(4))  # noqa: F841  # duckdb finds it by its name.
    other = polars.DataFrame(table(5))  # noqa: F841
    edits = {
        "written": "select * from frame",
        "filtered": "select * from frame where int8 > 30 and note <> 'go'",
        "sorted": "select * from frame order by episode_id, reward",
        "added": "select *, f4 * 2 as twice, word || '!' as loud from frame",
        "changed": "select * replace (int8::double as int8, f4::double as f4) from frame",
        "joined": "select frame.*, m.mean from frame join (select int8, avg(reward) "
        "as mean from other group by 1) m on frame.int8 = m.int8 "
        "order by frame.episode_id",
        "several": "select * from frame union all "
        "select * replace (episode_id || 'b' as episode_id) from other",
    }
    compared = 0
    for name, query in edits.items():
        path = tmp_path / f"{name}.parquet"
        duckdb.sql(f"copy ({query}) to '{path}' (format parquet, row_group_size 2048)")
        found = duckdb.sql(f"select * from '{path}'")
        cells = zip(*found.fetchall(), strict=True)
        read = {
            column: [listed(cell) for cell in values]
            for column, values in zip(found.columns, cells, strict=True)
        }
        compared += judged(path, read, tmp_path / "buffer")
    assert compared > 8_000
    path = tmp_path / "a.csv"
    duckdb.sql(f"copy (select * exclude (observation) from frame) to '{path}'")
    texts = {"note": "VARCHAR", "word": "VARCHAR", "episode_id": "VARCHAR", "f4": "FLOAT"}
    found = duckdb.read_csv(str(path), dtype=texts, na_values=["nothing"])
    cells = zip(*found.fetchall(), strict=True)
    read = {
        column: [cell or "" if column in texts and column != "f4" else cell for cell in values]
        for column, values in zip(found.columns, cells, strict=True)
    }
    dtypes = {name: name for name in INTEGERS} | {"f4": "float32", "word": "text"}
    assert judged(path, read, tmp_path / "buffer", dtypes=dtypes) == ROWS
