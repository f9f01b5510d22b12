"""Values of any length in files: all five formats, both ways."""

import csv
import io
import json
import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.checksums import crc32c
from mmreplay.convert import csv_values, parquet
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.buffer_writer import open_writer
from mmreplay.convert.transfer import describe
from mmreplay.convert.values import split_by_bytes
from mmreplay.disk import files
from mmreplay.errors import CorruptError, FormatError, SchemaError, SourceError
from mmreplay.testing.formats import peak
from mmreplay.verify import verify_buffer
from tests.convert.contract import error_of
from tests.convert.support import retold
from tests.convert.test_kills import after, in_a_child
from tools.torture import forged_values

FORMATS = {
    "npz": {},
    "deflated.npz": {"compression": "deflate"},
    "pt": {},
    "safetensors": {},
    "parts.safetensors": {"part_bytes": 3000},
    "csv": {},
    "csv.gz": {},
    "parquet": {},
    "groups.parquet": {"row_group_nbytes": 2000, "compression": "none"},
    "files.parquet": {"file_nbytes": 4000},
}
EVERY = pytest.mark.parametrize("name", FORMATS)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
HARD = (
    "",
    "=1+1",
    'a"b,c\r\n\n',
    "\0",
    "\r",
    "\ufeff",
    "å\x1b[31m<b>",
    "null",
    "'",
    " x ",
    "\\n",
    "[1]",
    "@SUM(A1)",
    "\t",
    "\u2028",
)
KINDS = {
    "points": mr.Field((None, 2), "float32", max_length=6),
    "text": mr.Field.text(max_bytes=60),
    "tokens": mr.Field((None,), "int16", max_length=40),
    "raw": mr.Field.bytes(max_bytes=30),
    "deep": mr.Field((None, 2, 3), "bool", max_length=4),
    "half": mr.Field((None,), "float16", max_length=5),
    "real": mr.Field((None, 1), "float64", max_length=5),
    "wide": mr.Field((None,), "uint64", max_length=5),
    "plain": mr.Field((None,), "uint8", max_length=5),
    "fixed": mr.Field((3,), "float32"),
    "terminated": mr.Field((), "bool"),
}


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    """Wait for no device: what these tests look at is in the page cache."""
    monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)


def value_of(field, rng, texts=HARD):
    """A value of a field, of any length."""
    if not field.varies:
        return rng.random(field.shape).astype(field.numpy)
    if field.kind == "text":
        return texts[int(rng.integers(len(texts)))]
    length = int(rng.choice([0, 1, field.max_length]))
    if field.kind == "bytes":
        return rng.bytes(length)
    shape = (length, *field.inner)
    if field.numpy.kind == "f":
        limits = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-7, 0.1, 65504.0]
        return rng.choice(limits, shape).astype(field.numpy)
    if field.dtype == "bool":
        return rng.random(shape) < 0.5
    info = np.iinfo(field.numpy)
    return rng.integers(info.min, info.max, shape, field.numpy, endpoint=True)


def fill(buffer, steps, rng, texts=HARD):
    for _ in range(steps):
        buffer.add(
            {
                path: [value_of(field, rng, texts) for _ in range(buffer.num_envs)]
                for path, field in buffer.schema.fields.items()
            }
        )


def make(path, fields=KINDS, num_envs=2, capacity=12, steps=20, seed=0, **options):
    options = {"heap_bytes": 32768, "autoreset": "disabled"} | options
    buffer = mr.ReplayBuffer.create(path, mr.Schema(fields), capacity, num_envs, **options)
    fill(buffer, steps, np.random.default_rng(seed))
    return buffer


def rows_of(buffer):
    """Each row as a dict of its values, by environment and position."""
    batch = buffer.gather_all()
    places = zip(batch.env_ids.tolist(), batch.positions.tolist(), strict=True)
    flags = buffer.flags(batch.env_ids, batch.positions)
    return {
        place: {path: np.asarray(batch[path][at]) for path in batch} | {"": flags[at]}
        for at, place in enumerate(places)
    }


def same(result, expected):
    assert result.keys() == expected.keys()
    for place, row in expected.items():
        assert result[place].keys() == row.keys()
        for path, value in row.items():
            got = result[place][path]
            assert got.dtype == value.dtype
            assert got.shape == value.shape
            assert got.tobytes() == value.tobytes(), (place, path)


def again(tmp_path, file, **options):
    """The rows that a file gives, loaded and verified."""
    target = tmp_path / "again"
    report = mr.load(file, target, overwrite=True, **options)
    assert verify_buffer(target, deep=True).ok
    with mr.ReplayBuffer.open(target) as buffer:
        return rows_of(buffer), buffer.metadata, report


@EVERY
def test_values_come_back_to_the_bit(name, tmp_path):
    file = tmp_path / f"a.{name}"
    with make(tmp_path / "source") as source:
        expected = rows_of(source)
        mr.export(source, file, **FORMATS[name])
        metadata = source.metadata
    found, loaded, _ = again(tmp_path, file)
    same(found, expected)
    assert loaded.schema == metadata.schema
    assert loaded.heap_nbytes == metadata.heap_nbytes


@pytest.mark.model
@EVERY
@pytest.mark.sliced(3)
def test_lists_of_values_come_back(name, tmp_path_factory):
    """Rows of hypothesis's choice against a list of dicts."""
    row = st.fixed_dictionaries(
        {
            "text": TEXTS,
            "tokens": st.lists(st.integers(-(2**15), 2**15 - 1), max_size=9),
            "raw": st.binary(max_size=9),
            "points": st.lists(st.tuples(*[st.floats(width=32, allow_nan=False)] * 2), max_size=4),
        }
    )
    fields = {key: KINDS[key] for key in ("text", "tokens", "raw", "points")}

    @settings(max_examples=12, deadline=None)
    @given(st.lists(row, max_size=9), st.integers(1, 2))
    def come_back(rows, num_envs):
        folder = tmp_path_factory.mktemp("model")
        schema = mr.Schema(fields)
        buffer = mr.ReplayBuffer.create(
            folder / "source", schema, 9, num_envs, heap_bytes=8192, autoreset="disabled"
        )
        with buffer:
            for each in rows:
                points = np.array(each["points"], np.float32).reshape(-1, 2)
                step = {**each, "points": points}
                step["tokens"] = np.array(each["tokens"], np.int16)
                buffer.add({path: [step[path]] * num_envs for path in fields})
            mr.export(buffer, folder / f"a.{name}", **FORMATS[name])
        mr.load(folder / f"a.{name}", folder / "again")
        with mr.ReplayBuffer.open(folder / "again") as loaded:
            batch = loaded.gather_all()
        assert len(batch) == len(rows) * num_envs
        for at, each in enumerate(rows * num_envs):
            assert batch["text"][at].tobytes().decode() == each["text"]
            assert batch["tokens"][at].tolist() == each["tokens"]
            assert batch["raw"][at].tobytes() == each["raw"]
            points = np.array(each["points"], np.float32).reshape(-1, 2)
            assert batch["points"][at].tobytes() == points.tobytes()

    come_back()


@EVERY
def test_an_empty_ring_comes_back(name, tmp_path):
    with make(tmp_path / "source", steps=0) as source:
        mr.export(source, tmp_path / f"a.{name}", **FORMATS[name])
    found, _, report = again(tmp_path, tmp_path / f"a.{name}")
    assert (found, report.rows) == ({}, 0)


@EVERY
def test_rows_and_fields_are_selected_on_both_sides(name, tmp_path):
    file = tmp_path / f"a.{name}"
    with make(tmp_path / "source") as source:
        every = rows_of(source)
        paths = ["tokens", "text", "terminated"]
        mr.export(source, file, fields=paths, env_ids=[1], rows=slice(2, 9), **FORMATS[name])
    found, loaded, _ = again(tmp_path, file, rows=slice(1, 5))
    places = sorted(place for place in every if place[0] == 1)[3:7]
    kept = (*paths, "", "final")
    expected = {p: {k: v for k, v in every[p].items() if k in kept} for p in places}
    same(found, expected)
    assert loaded.schema.paths == tuple(sorted(paths, key=list(KINDS).index))


def test_ranges_of_rows_keep_their_values(tmp_path, cli):
    with make(tmp_path / "source", num_envs=1, steps=12) as source:
        rows = rows_of(source)
        uuid = source.metadata.uuid.hex()
    selection = {"format": "mmreplay selection", "version": 1, "uuid": uuid}
    selection["rows"] = [[0, 1, 3], [0, 8, 10]]
    (tmp_path / "some.json").write_text(json.dumps(selection))
    target = tmp_path / "some.npz"
    assert cli(tmp_path / "source", target, "--select", tmp_path / "some.json")[0] == 0
    found, _, _ = again(tmp_path, target)
    for at, position in enumerate((1, 2, 8, 9), 1):
        for path in ("text", "tokens", "deep"):
            got, want = found[0, at][path], rows[0, position][path]
            assert got.tobytes() == want.tobytes()


@EVERY
def test_final_rows_and_priorities_go_along(name, tmp_path):
    fields = {
        "observation": {"text": KINDS["text"], "points": KINDS["points"]},
        "tokens": KINDS["tokens"],
        "reward": mr.Field((), "float32"),
        "terminated": KINDS["terminated"],
    }
    rng = np.random.default_rng(2)
    sampler = mr.PrioritizedSampler(seed=0, name="own")
    buffer = mr.ReplayBuffer.create(
        tmp_path / "source", mr.Schema(fields), 30, heap_bytes=16384, sampler=sampler
    )

    def observation():
        return {key: value_of(KINDS[key], rng) for key in ("text", "points")}

    with buffer:
        for number in range(20):
            last = number % 5 == 4
            buffer.add(
                observation=observation(),
                tokens=value_of(KINDS["tokens"], rng),
                reward=float(number),
                terminated=last,
                final_observation=observation() if last else None,
            )
        batch = buffer.sample(8)
        buffer.update_priorities(batch, np.arange(8) + 1.0)
        buffer.commit()
        expected = rows_of(buffer)
        mr.export(buffer, tmp_path / f"a.{name}", priorities="own", **FORMATS[name])
    found, _, _ = again(tmp_path, tmp_path / f"a.{name}")
    same(found, expected)
    assert sum(bool(row["final"]) for row in found.values()) == 4
    sampler = mr.PrioritizedSampler(seed=0, name="own")
    with mr.ReplayBuffer.open(tmp_path / "again", "r+", sampler=sampler) as loaded:
        drawn = loaded.sample(64)
        assert len(set(np.round(drawn.weights, 5).tolist())) > 1


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
def test_rows_of_several_environments_come_mixed(layout, tmp_path):
    with make(tmp_path / "source", num_envs=3, layout=layout) as source:
        expected = rows_of(source)
        mr.export(source, tmp_path / "a.npz")
    found, loaded, _ = again(tmp_path, tmp_path / "a.npz")
    same(found, expected)
    assert loaded.ring.layout == layout


def test_a_ring_in_memory_is_exported(tmp_path):
    with make(None, engine="memory") as source:
        expected = rows_of(source)
        mr.export(source, tmp_path / "a.parquet")
    same(again(tmp_path, tmp_path / "a.parquet")[0], expected)


# What the heap of a loaded ring takes.


def test_the_heap_is_the_sources_or_planned_or_passed(tmp_path, cli):
    with make(tmp_path / "source") as source:
        expected = rows_of(source)
        mr.export(source, tmp_path / "a.npz")
    _, metadata, report = again(tmp_path, tmp_path / "a.npz")
    assert metadata.heap_nbytes == 32768
    assert "heap_bytes is 32.00 KiB per environment, as in the source" in report.notes[0]
    found, metadata, report = again(tmp_path, tmp_path / "a.npz", capacity=40)
    same(found, expected)
    assert metadata.heap_nbytes != 32768
    assert "per environment, planned from the values: pass" in report.notes[0]
    _, metadata, report = again(tmp_path, tmp_path / "a.npz", heap_bytes="1 MiB")
    assert metadata.heap_nbytes == 1 << 20
    assert "heap_bytes is 1.00 MiB per environment, as passed" in report.notes[0]
    code, out, _ = cli(tmp_path / "a.npz", tmp_path / "cli", "--heap-bytes", "64 KiB")
    assert code == 0
    assert "heap_bytes is 64.00 KiB per environment" in out


def test_a_plan_says_what_values_take(tmp_path, cli):
    with make(tmp_path / "source") as source:
        nbytes = sum(
            each.values.nbytes
            for each in source.gather_all().values()
            if isinstance(each, mr.Ragged)
        )
    for name in ("a.npz", "a.pt", "a.safetensors"):
        code, out, _ = cli(tmp_path / "source", tmp_path / name, "-n", "--json")
        assert code == 0
        planned = json.loads(out)
        assert planned["nbytes"] > nbytes
        assert not (tmp_path / name).exists()
        cli(tmp_path / "source", tmp_path / name)
        assert planned["target_nbytes"] == (tmp_path / name).stat().st_size
    code, out, _ = cli(tmp_path / "source", tmp_path / "b", "-n")
    assert code == 0
    assert "[up to 4, 2, 3]" in out


def test_a_heap_that_is_too_small_for_a_row_is_refused(tmp_path):
    fields = {"text": mr.Field.text(max_bytes=3000)}
    with make(tmp_path / "source", fields, num_envs=1) as source:
        mr.export(source, tmp_path / "a.npz")
    with pytest.raises(SchemaError, match="heap_bytes must be at least 12288"):
        mr.load(tmp_path / "a.npz", tmp_path / "again", heap_bytes=4096)
    assert not (tmp_path / "again").exists()


def test_a_planned_heap_holds_the_rows_also_of_a_writer_that_goes_on(tmp_path):
    fields = {"text": mr.Field.text(max_bytes=3000), "terminated": KINDS["terminated"]}
    buffer = mr.ReplayBuffer.create(tmp_path / "source", mr.Schema(fields), 50, heap_bytes=1 << 20)
    with buffer:
        for number in range(50):
            # The newest are the longest, and longer than the average.
            buffer.add(text="x" * (60 * number), terminated=False)
        mr.export(buffer, tmp_path / "a.npz")
    _, metadata, _ = again(tmp_path, tmp_path / "a.npz", capacity=20)
    assert metadata.heap_nbytes < 1 << 17
    with mr.ReplayBuffer.open(tmp_path / "again", "r+", commit_every=0.01) as loaded:
        loaded.commit()
        assert loaded.span.lengths.tolist() == [20]
        lengths = loaded.gather_all()["text"].lengths
        assert lengths.tolist() == [60 * number for number in range(30, 50)]


def test_rows_that_a_smaller_heap_cannot_hold_are_left_out_and_counted(tmp_path):
    with make(tmp_path / "source", capacity=60, steps=60) as source:
        expected = rows_of(source)
        mr.export(source, tmp_path / "a.npz")
    least = 4096
    found, _, report = again(tmp_path, tmp_path / "a.npz", heap_bytes=least)
    assert len(found) < len(expected)
    lost = len(expected) - len(found)
    assert f"the oldest {lost} rows were left out: heap_bytes of 4,096 do" in str(report.notes)
    same(found, {place: expected[place] for place in found})
    for env_id in range(2):
        kept = sorted(p for e, p in found if e == env_id)
        assert kept == sorted(p for e, p in expected if e == env_id)[-len(kept) :]


@pytest.mark.parametrize("heap_bytes", [None, pytest.param(4096, marks=pytest.mark.slow)])
@EVERY
@pytest.mark.slow
def test_a_compressed_ring_is_made_of_files_whatever_its_heap_holds(name, heap_bytes, tmp_path):
    options = {"capacity": 60, "steps": 70, "heap_bytes": 65536}
    with make(tmp_path / "source", layout="time_major", **options) as source:
        expected = rows_of(source)
        mr.export(source, tmp_path / f"a.{name}", **FORMATS[name])
    found, metadata, report = again(
        tmp_path, tmp_path / f"a.{name}", engine="zarr", heap_bytes=heap_bytes
    )
    same(found, expected)
    assert (metadata.engine, metadata.ring.layout) == ("zarr", "env_major")
    assert metadata.heap_nbytes == (heap_bytes or 65536)
    assert not any("left out" in note for note in report.notes)
    with mr.ReplayBuffer.open(
        tmp_path / "again", "r+", check_values=True, on_resume="continue"
    ) as buffer:
        # The small heap lapped.
        assert (buffer._files.commit.heap_heads > 4096).all()
        assert (buffer._files.commit.heap_tails > 0).all() == (heap_bytes == 4096)
        heads = buffer.heads.copy()
        fill(buffer, 9, np.random.default_rng(9))
        assert (buffer.heads == heads + 9).all()
        assert len(buffer.gather_all()) == 120
    assert verify_buffer(tmp_path / "again").ok


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_of_final_rows_only_observations_have_values(engine, tmp_path):
    fields = {
        "observation": mr.Field.text(max_bytes=40),
        "more": mr.Field.text(max_bytes=40),
        "terminated": mr.Field((), "bool"),
    }
    with mr.ReplayBuffer.create(
        tmp_path / "source", mr.Schema(fields), 90, heap_bytes=65536
    ) as source:
        for number in range(40):
            last = number % 5 == 4
            source.add(
                observation=f"seen {number}",
                more=f"more {number}",
                terminated=last,
                final_observation=f"final {number}" if last else None,
            )
        expected = rows_of(source)
        reader = BufferReader(source)
        writer = open_writer(tmp_path / "again", describe(reader), engine=engine)
        for block in reader.blocks(7):
            # A reader of another package gives each row a value.
            texts = [b"more"] * len(block)
            values = np.frombuffer(b"".join(texts), np.uint8)
            more = mr.Ragged(values, 4 * np.arange(len(block) + 1))
            writer.write(replace(block, columns={**block.columns, "more": more}))
        writer.finish()
    assert verify_buffer(tmp_path / "again").ok
    with mr.ReplayBuffer.open(tmp_path / "again", check_values=True) as made:
        found = rows_of(made)
    for place, row in found.items():
        final = place[1] % 6 == 5
        assert row["more"].tobytes() == (b"" if final else b"more")
        assert row["observation"].tobytes() == expected[place]["observation"].tobytes()


@pytest.mark.slow
def test_a_compressed_ring_becomes_files_and_a_ring_of_either_engine(tmp_path):
    # Its heap holds the values of some of its rows, and its shards those of all.
    with make(tmp_path / "source", engine="zarr", capacity=60, steps=70, heap_bytes=4096) as source:
        expected = rows_of(source)
        mr.export(source, tmp_path / "a.npz")
    found, metadata, report = again(tmp_path, tmp_path / "a.npz")
    same(found, expected)
    assert metadata.heap_nbytes > 4096
    assert "per environment, planned from the values: pass" in report.notes[0]
    same(again(tmp_path, tmp_path / "a.npz", engine="zarr")[0], expected)
    same(again(tmp_path, tmp_path / "source", engine="zarr")[0], expected)
    same(again(tmp_path, tmp_path / "source")[0], expected)


def test_the_command_line_makes_a_compressed_ring(tmp_path, cli):
    with make(tmp_path / "source", capacity=60, steps=60) as source:
        expected = rows_of(source)
        mr.export(source, tmp_path / "a.npz")
    code, out, _ = cli(
        tmp_path / "a.npz",
        tmp_path / "again",
        "--engine",
        "zarr",
        "--codec",
        "zstd",
        "--heap-bytes",
        "8 KiB",
    )
    assert code == 0
    assert "heap_bytes is 8.00 KiB per environment" in out
    with mr.ReplayBuffer.open(tmp_path / "again") as buffer:
        assert buffer.metadata.sharding.codec == "zstd"
        same(rows_of(buffer), expected)


def test_a_source_that_holds_more_than_its_heap_is_refused(tmp_path):
    with make(tmp_path / "source", capacity=60, steps=60) as source:
        mr.export(source, tmp_path / "a.safetensors")

    def lie(texts):
        told = json.loads(texts["mmreplay"])
        told["heap_bytes"] = 4096
        texts["mmreplay"] = json.dumps(told)
        del texts["mmreplay.crc32c"]

    retold(tmp_path / "a.safetensors", lie)
    with pytest.raises(SourceError, match="values must take at most 4096 bytes"):
        mr.load(tmp_path / "a.safetensors", tmp_path / "again")
    assert not (tmp_path / "again").exists()


# Real readers.


@pytest.fixture
def texts(tmp_path):
    """A source of three rows, and what they hold."""
    fields = {key: KINDS[key] for key in ("text", "tokens", "points", "raw")}
    rows = [
        {"text": "=1+å\n", "tokens": [1, 2], "points": [[1, 2]], "raw": b"\0\xff"},
        {"text": "", "tokens": [], "points": [], "raw": b""},
        {"text": "b", "tokens": [-3], "points": [[3, 4], [5, 6]], "raw": b"xyz"},
    ]
    with mr.ReplayBuffer.create(
        tmp_path / "source", mr.Schema(fields), 8, heap_bytes=8192
    ) as buffer:
        for row in rows:
            points = np.array(row["points"], np.float32).reshape(-1, 2)
            tokens = np.array(row["tokens"], np.int16)
            buffer.add({**row, "points": points, "tokens": tokens})
    return rows


def arrays_are(arrays, rows):
    """Values and offsets hold the rows."""
    for path, dtype in (("tokens", np.int16), ("raw", np.uint8), ("text", np.uint8)):
        offsets, values = (np.asarray(arrays[f"{path}.{n}"]) for n in ("offsets", "values"))
        assert offsets.dtype == np.int64
        assert values.dtype == dtype
        for at, row in enumerate(rows):
            value = values[offsets[at] : offsets[at + 1]]
            want = row[path].encode() if path == "text" else row[path]
            assert value.tolist() == list(want)
    assert np.asarray(arrays["points.values"]).shape == (3, 2)


def test_numpy_reads_values_and_offsets(texts, tmp_path):
    mr.export(tmp_path / "source", tmp_path / "a.npz", compression="deflate")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        arrays_are(arrays, texts)
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert archive.testzip() is None


def test_torch_reads_values_and_offsets(texts, tmp_path):
    torch = pytest.importorskip("torch")
    mr.export(tmp_path / "source", tmp_path / "a.pt")
    tensors = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)
    arrays_are(tensors, texts)
    jagged = torch.nested.nested_tensor_from_jagged(
        tensors["tokens.values"], tensors["tokens.offsets"]
    )
    assert [each.tolist() for each in jagged.unbind()] == [[1, 2], [], [-3]]


def test_safetensors_reads_values_and_offsets(texts, tmp_path):
    from safetensors.numpy import load_file

    mr.export(tmp_path / "source", tmp_path / "a.safetensors")
    arrays_are(load_file(tmp_path / "a.safetensors"), texts)


def test_pyarrow_reads_lists_strings_and_bytes(texts, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    mr.export(tmp_path / "source", tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    assert str(table.schema.field("text").type) == "string"
    assert str(table.schema.field("raw").type) == "binary"
    for path in ("text", "tokens", "points", "raw"):
        assert table.column(path).null_count == 0
        assert table.column(path).to_pylist() == [row[path] for row in texts]


def test_the_csv_module_reads_text_json_and_base64(texts, tmp_path):
    mr.export(tmp_path / "source", tmp_path / "a.csv")
    with open(tmp_path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == [row["text"] for row in texts]
    assert [json.loads(row["tokens"]) for row in rows] == [r["tokens"] for r in texts]
    assert [json.loads(row["points"]) for row in rows] == [r["points"] for r in texts]
    assert [row["raw"] for row in rows] == ["AP8=", "", "eHl6"]


# Damaged files.

BAD = {
    "an offset that falls": (".offsets", lambda a: np.sort(a)[::-1].copy(), "begin"),
    "no 0 first": (".offsets", lambda a: a + 1, "offsets must begin with 0, got 1"),
    "beyond the values": (
        ".offsets",
        lambda a: np.where(np.arange(len(a)) < 3, a, 2**62),
        "row 2: offsets must rise to at most",
    ),
    "a fall in the middle": (
        ".offsets",
        lambda a: np.where(np.arange(len(a)) == 3, -1, a),
        "row 2: offsets must rise to at most .* got -1",
    ),
    "another dtype": (".offsets", lambda a: a.astype(np.int32), "must be int64"),
    "one missing": (".offsets", lambda a: a[:-1].copy(), "must be int64"),
    "a value too long": (
        ".offsets",
        lambda a: np.where(np.arange(len(a)) == 0, 0, a[-1]),
        "row 0 must have 0 to 60 items",
    ),
    "values left over": (".values", lambda a: np.concatenate([a, a]), "the last offset must be"),
    "no UTF-8": (".values", lambda a: a | 0x80, "row .* must be UTF-8"),
    "values of another dtype": (".values", lambda a: a.astype(np.int16), "must be uint8"),
    "values missing": (".values", lambda a: a[:-1].copy(), "offsets must rise"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("format", ["npz", "pt", "safetensors"])
def test_forged_arrays_are_refused_by_field_and_row(format, case, tmp_path):
    ending, change, message = BAD[case]
    file = tmp_path / f"a.{format}"
    with make(tmp_path / "source", num_envs=1, capacity=60, steps=60) as source:
        mr.export(source, file)
    name = f"text{ending}"
    if format == "npz":
        with np.load(file) as loaded:
            arrays = dict(loaded)
        arrays[name] = change(arrays[name])
        np.savez(file, allow_pickle=False, **arrays)
    elif format == "pt":
        torch = pytest.importorskip("torch")
        tensors = torch.load(file, weights_only=True)
        tensors[name] = torch.from_numpy(change(tensors[name].numpy()))
        torch.save(tensors, file)
    else:
        from safetensors.numpy import load, save

        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        texts = json.loads(data[8 : 8 + size])["__metadata__"]
        del texts["mmreplay.crc32c"]
        arrays = load(data)
        arrays[name] = change(arrays[name])
        file.write_bytes(save(arrays, metadata=texts))
    before = file.read_bytes()
    with pytest.raises(FormatError, match=message) as raised:
        mr.load(file, tmp_path / "target")
    assert str(file) in str(raised.value)
    assert "text" in str(raised.value)
    assert not (tmp_path / "target").exists()
    assert file.read_bytes() == before


CELLS = {
    ("points", "[[1,2],[3]]"): "must be JSON of float32",
    ("points", "[1,2]"): "must be JSON of float32",
    ("points", "[[[1,2]]]"): "must be JSON of float32",
    ("tokens", "[1,2"): "must be JSON of int16",
    ("tokens", "[1,,2]"): "must be JSON of int16",
    ("tokens", "[40000]"): "must be JSON of int16",
    ("tokens", "[1.5]"): "must be JSON of int16",
    ("tokens", '["nan"]'): "must be JSON of int16",
    ("tokens", ""): "must be JSON of int16",
    ("tokens", "[" * 999): "must be JSON of int16",
    ("tokens", "[" + "1," * 60 + "1]"): "row 4 must have 0 to 40 items, got 61",
    ("text", "x" * 61): "row 4 must have 0 to 60 items, got 61",
    ("raw", "A"): "must be base64",
    ("raw", "å"): "must be base64",
    ("raw", "A" * 80): "row 4 must have 0 to 30 items, got 60",
}


@pytest.mark.parametrize(("path", "cell"), CELLS)
def test_forged_cells_are_refused_by_line_and_column(path, cell, tmp_path):
    file = tmp_path / "a.csv"
    with make(tmp_path / "source", num_envs=1) as source:
        mr.export(source, file)
    rows = list(csv.reader(io.StringIO(file.read_bytes().decode(), newline="")))
    rows[5][rows[0].index(path)] = cell
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    data = text.getvalue().encode()
    file.write_bytes(data)
    sidecar = tmp_path / "a.csv.mmreplay.json"
    told = json.loads(sidecar.read_text())
    told["csv"] |= {"nbytes": len(data), "crc32c": f"{crc32c(memoryview(data)):08x}"}
    sidecar.write_text(json.dumps(told))
    with pytest.raises(CorruptError, match=CELLS[path, cell]) as raised:
        mr.load(file, tmp_path / "target")
    assert repr(path) in str(raised.value)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("format", list(forged_values.WAYS))
@pytest.mark.sliced(2)
def test_what_is_forged_is_refused_by_name_or_loaded(format, tmp_path):
    with forged_values.make_buffer(tmp_path / "source") as source:
        mr.export(source, tmp_path / f"a.{format}")
    held = {each.name: each.read_bytes() for each in sorted(tmp_path.glob(f"a.{format}*"))}
    refused = 0
    for number in range(40):
        rng = np.random.default_rng(number)
        told, made = forged_values.forge(format, held, rng)
        for name, data in made.items():
            (tmp_path / name).write_bytes(data)
        error = error_of(
            lambda: mr.load(tmp_path / f"a.{format}", tmp_path / "target", overwrite=True)
        )
        if error is not None:
            refused += 1
            assert isinstance(error, FormatError), told
            assert f"a.{format}" in str(error), told
    assert refused > 10


# What cannot be written is refused.


@pytest.mark.parametrize("format", ["npz", "pt", "safetensors"])
def test_a_field_with_the_name_of_an_array_is_refused(format, tmp_path):
    fields = {"a": KINDS["tokens"], "a.offsets": mr.Field((), "int64")}
    with (
        make(tmp_path / "source", fields, num_envs=1) as source,
        pytest.raises(SchemaError, match=r"'a\.offsets' has the name of an array"),
    ):
        mr.export(source, tmp_path / f"a.{format}")


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("a.hdf5", {}, "which format 'd4rl' cannot store"),
        ("a.npz", {"layout": "skrl"}, "which layout 'skrl' cannot store"),
        ("a.csv", {"layout": "skrl"}, "which layout 'skrl' cannot store"),
    ],
)
def test_layouts_of_others_refuse_fields_that_vary(target, options, message, tmp_path):
    with make(tmp_path / "source", num_envs=1) as source, pytest.raises(SchemaError, match=message):
        mr.export(source, tmp_path / target, **options)
    assert not (tmp_path / target).exists()


def test_a_row_that_no_csv_line_holds_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_values, "MAX_TEXT_NBYTES", 50)
    with (
        make(tmp_path / "source") as source,
        pytest.raises(SchemaError, match="cells of a csv row must take at most 50"),
    ):
        mr.export(source, tmp_path / "a.csv")
    assert not list(tmp_path.glob("*.csv*"))


@pytest.mark.slow
def test_long_cells_come_back_and_are_explained(tmp_path):
    fields = {"text": mr.Field.text(max_bytes=9 << 20), "n": KINDS["tokens"]}
    long = 'å,"\n' * (1 << 20)
    with mr.ReplayBuffer.create(
        tmp_path / "source", mr.Schema(fields), 4, heap_bytes="64 MiB"
    ) as buffer:
        for text in ("a", long, "b"):
            buffer.add(text=text, n=np.zeros(2, np.int16))
        mr.export(buffer, tmp_path / "a.csv")
    mr.load(tmp_path / "a.csv", tmp_path / "again")
    with mr.ReplayBuffer.open(tmp_path / "again") as loaded:
        assert loaded.gather_all()["text"].text() == ["a", long, "b"]
    data = (tmp_path / "a.csv").read_bytes().replace(b"[0,0]", b"[0,x]", 2)
    (tmp_path / "a.csv").write_bytes(data)
    told = json.loads((tmp_path / "a.csv.mmreplay.json").read_text())
    told["csv"]["crc32c"] = f"{crc32c(memoryview(data)):08x}"
    (tmp_path / "a.csv.mmreplay.json").write_text(json.dumps(told))
    with pytest.raises(CorruptError, match=r"line 2, column 'n' must be JSON"):
        mr.load(tmp_path / "a.csv", tmp_path / "again", overwrite=True)


# Files without a description.


def save(path, arrays):
    """Arrays as a library saves them."""
    if path.suffix == ".npz":
        np.savez(path, allow_pickle=False, **arrays)
    elif path.suffix == ".pt":
        torch = pytest.importorskip("torch")
        torch.save({name: torch.from_numpy(a) for name, a in arrays.items()}, path)
    else:
        from safetensors.numpy import save_file

        save_file(arrays, path)


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_values_and_offsets_of_others_become_a_field_that_varies(suffix, tmp_path):
    arrays = {
        "observation": np.arange(12.0).reshape(4, 3),
        "tokens.values": np.arange(10, dtype=np.int32),
        "tokens.offsets": np.array([0, 3, 3, 9, 10]),
        "terminated": np.array([False, True, False, True]),
    }
    save(tmp_path / f"a{suffix}", arrays)
    report = mr.load(tmp_path / f"a{suffix}", tmp_path / "again", strict=True)
    assert "'tokens' varies from row to row: int32[up to 8]" in report.notes
    with mr.ReplayBuffer.open(tmp_path / "again") as loaded:
        tokens = loaded.gather_all()["tokens"]
    assert [each.tolist() for each in tokens] == [[0, 1, 2], [], [*range(3, 9)], [9]]


@pytest.mark.parametrize(
    "offsets", [np.array([0, 9, 3, 4]), np.array([1, 2, 3, 4]), np.array([0, 1, 2, 3])]
)
def test_arrays_that_only_have_such_names_are_fields_as_before(offsets, tmp_path):
    arrays = {
        "observation": np.arange(12.0).reshape(4, 3),
        "x.values": np.arange(4.0),
        "x.offsets": offsets,
        "terminated": np.array([False, True, False, True]),
    }
    save(tmp_path / "a.npz", arrays)
    mr.load(tmp_path / "a.npz", tmp_path / "again")
    with mr.ReplayBuffer.open(tmp_path / "again") as loaded:
        assert loaded.schema["x.offsets"].shape == ()
        assert loaded.gather_all()["x.offsets"].tolist() == offsets.tolist()


def test_values_come_back_where_the_description_is_lost(tmp_path):
    with make(tmp_path / "source") as source:
        expected = source.gather_all()
        mr.export(source, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as loaded:
        arrays = {name: loaded[name] for name in loaded if name != "mmreplay.json"}
    save(tmp_path / "b.npz", arrays)
    report = mr.load(tmp_path / "b.npz", tmp_path / "again")
    assert "a buffer whose description is lost" in " ".join(report.notes)
    with mr.ReplayBuffer.open(tmp_path / "again") as loaded:
        rows = loaded.gather_all()
    for path in ("tokens", "text", "points"):
        assert rows[path].values.tobytes() == expected[path].values.tobytes()
        assert rows[path].offsets.tolist() == expected[path].offsets.tolist()


# Foreign parquet files.


def write_table(path, columns, **options):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path, **options)
    return path


@pytest.mark.parametrize(
    "options", [{}, {"use_dictionary": False, "row_group_size": 7}, {"data_page_version": "2.0"}]
)
def test_strings_bytes_and_lists_of_others_become_fields_that_vary(options, tmp_path):
    pa = pytest.importorskip("pyarrow")
    texts = ["go to the red door", "å", ""] * 10
    lists = [list(range(n % 5)) for n in range(30)]
    points = [[[1.0, 2.0]] * (n % 3) for n in range(30)]
    path = write_table(
        tmp_path / "a.parquet",
        {
            "observation": pa.array(texts),
            "large": pa.array(texts, pa.large_string()),
            "frame": pa.array([text.encode() for text in texts]),
            "tokens": pa.array(lists, pa.list_(pa.int32())),
            "points": pa.array(points, pa.list_(pa.list_(pa.float64()))),
            "even": pa.array([[1, 2]] * 30),
            "reward": pa.array(np.arange(30.0)),
            "terminated": pa.array([n % 10 == 9 for n in range(30)]),
            "missing": pa.array([None, *texts[1:]]),
            "uneven": pa.array([[[1] * (n % 3)] for n in range(30)]),
        },
        **options,
    )
    report = mr.load(path, tmp_path / "again")
    assert "column 'tokens' varies from row to row: int32[up to 4]" in report.notes
    for name, doubt in zip(("missing", "uneven"), report.doubts, strict=True):
        assert doubt.startswith(f"column {name!r} of")
        assert doubt.endswith("left out")
    with pytest.raises(SourceError, match=r"column 'missing' of .* strict allows no"):
        mr.load(path, tmp_path / "strict", strict=True)
    with mr.ReplayBuffer.open(tmp_path / "again") as loaded:
        assert loaded.schema.role("observation") == "observation"
        assert loaded.schema["large"].kind == "text"
        assert loaded.schema["even"].shape == (2,)
        rows = loaded.gather_all()
    for name in ("observation", "large", "frame"):
        assert rows[name].text() == texts
    assert [each.tolist() for each in rows["tokens"]] == lists
    assert [each.tolist() for each in rows["points"]] == points


@pytest.mark.parametrize(
    "lists",
    [
        [[1, 2], [3], [4, 5, 6]],
        [[1], [], [], []],
        [[1], [1], [1], []],
        [[1, 2], [], [], []],
        [[[1, 2]], [[3, 3], [4, 4]], []],
    ],
)
def test_lists_whose_average_length_is_the_first_ones_vary(lists, tmp_path):
    path = write_table(tmp_path / "a.parquet", {"reward": np.arange(float(len(lists))), "x": lists})
    mr.load(path, tmp_path / "again")
    with mr.ReplayBuffer.open(tmp_path / "again") as loaded:
        assert loaded.schema["x"].varies
        assert [each.tolist() for each in loaded.gather_all()["x"]] == lists


@pytest.mark.parametrize(
    "lists",
    [
        [[1, 2], None, [3], []],
        [[1, 2], None, [3, 4], [5, 6]],
        [[1, 2], None, None, None],
        [[1], [None], [2, 3], [4]],
    ],
)
def test_lists_that_lack_values_are_left_out(lists, tmp_path):
    path = write_table(tmp_path / "a.parquet", {"reward": np.arange(4.0), "x": lists})
    report = mr.load(path, tmp_path / "again")
    assert any("column 'x' of" in d and "has empty values (null)" in d for d in report.doubts)
    with mr.ReplayBuffer.open(tmp_path / "again") as loaded:
        assert "x" not in loaded.schema
        assert loaded.gather_all()["reward"].tolist() == [0, 1, 2, 3]


def test_lists_of_one_length_in_one_file_and_of_others_in_the_next_vary(tmp_path):
    (tmp_path / "files").mkdir()
    even, uneven = [[1], [1], [1]], [[1, 2], [], [1]]
    for number, lists in enumerate((even, uneven)):
        columns = {"reward": np.arange(3.0), "x": lists}
        write_table(tmp_path / "files" / f"{number}.parquet", columns)
    mr.load(tmp_path / "files", tmp_path / "again")
    with mr.ReplayBuffer.open(tmp_path / "again") as loaded:
        rows = loaded.gather_all()["x"]
    assert [each.tolist() for each in rows] == even + uneven


@pytest.mark.parametrize("store_schema", [False, True])
def test_a_text_that_a_few_bytes_repeat_is_bounded(store_schema, tmp_path):
    """One entry of a dictionary, named by each row; with a schema its type says so."""
    pa = pytest.importorskip("pyarrow")
    text = "x" * (1 << 20)
    values = pa.DictionaryArray.from_arrays(np.zeros(4000, np.int32), [text])
    path = write_table(
        tmp_path / "a.parquet",
        {"text": values, "reward": np.zeros(4000)},
        store_schema=store_schema,
    )
    assert path.stat().st_size < 1 << 20

    def load():
        with pytest.raises(FormatError, match="more than 1,000 times as many"):
            mr.load(path, tmp_path / "again")

    assert peak(load) < 64 << 20
    delta = write_table(
        tmp_path / "b.parquet",
        {"text": [text] * 9, "reward": np.zeros(9)},
        use_dictionary=False,
        column_encoding={"text": "DELTA_BYTE_ARRAY", "reward": "PLAIN"},
    )
    report = mr.load(delta, tmp_path / "again")
    assert any("DELTA_BYTE_ARRAY" in doubt for doubt in report.doubts)
    report = mr.load(delta, tmp_path / "again", overwrite=True, allow_expansion=True)
    with mr.ReplayBuffer.open(tmp_path / "again") as loaded:
        assert loaded.gather_all()["text"].text() == [text] * 9


def test_an_entry_that_a_dictionary_lacks_is_damage():
    pa = pytest.importorskip("pyarrow")
    buffers = [None, pa.py_buffer(np.array([0, 1, 3], np.int32))]
    numbers = pa.Array.from_buffers(pa.int32(), 3, buffers)
    entries = pa.array(["a", "bb", "c"])
    kind = pa.dictionary(pa.int32(), pa.string())
    array = pa.DictionaryArray.from_arrays(numbers, entries, safe=False)
    assert array.type == kind
    with pytest.raises(ValueError, match="beyond the 3 of its dictionary"):
        parquet.row_nbytes_of(array)
    array = pa.DictionaryArray.from_arrays(pa.array([1, None, 0]), entries)
    assert parquet.row_nbytes_of(array).tolist() == [2, 0, 1]


# Memory.

LARGE = {
    "text": mr.Field.text(max_bytes=1 << 17),
    "tokens": mr.Field((None,), "int32", max_length=1 << 14),
    "reward": mr.Field((), "float32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["npz", "pt", "safetensors", "csv", "parquet"])
def test_memory_does_not_grow_with_the_values(name, tmp_path):
    """160 MiB of values, by blocks of 8 MiB."""
    rng = np.random.default_rng(0)
    for size, steps in (("small", 20), ("large", 2000)):
        source = mr.ReplayBuffer.create(
            tmp_path / size, mr.Schema(LARGE), steps, heap_bytes="300 MiB"
        )
        with source:
            for _ in range(steps):
                text = rng.integers(32, 127, rng.integers(1 << 17), np.uint8)
                tokens = rng.integers(-9, 9, rng.integers(1 << 12), np.int32)
                source.add(text=text.tobytes().decode(), tokens=tokens, reward=0.0)
        file, target = tmp_path / f"{size}.{name}", tmp_path / f"{size} again"
        exported = peak(lambda s=source, f=file: mr.export(s.path, f))
        loaded = peak(lambda f=file, t=target: mr.load(f, t))
    assert file.stat().st_size > 80 << 20
    assert exported < 72 << 20
    assert loaded < 72 << 20


ANONYMOUS = """
import sys, threading, time
import pyarrow
import mmreplay as mr

def anonymous():
    status = open("/proc/self/status").read()
    return int(status.split("RssAnon:")[1].split()[0]) << 10

source, file, target = sys.argv[1:]
mr.export(source, file, rows=slice(0, 2), overwrite=True)
mr.load(file, target, overwrite=True)
before, highest, over = anonymous(), [0], threading.Event()

def watch():
    while not over.wait(0.002):
        highest[0] = max(highest[0], anonymous() - before)

thread = threading.Thread(target=watch)
thread.start()
mr.export(source, file, overwrite=True)
mr.load(file, target, overwrite=True)
over.set()
thread.join()
print(highest[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["npz", "csv", "parquet"])
def test_the_process_does_not_grow_with_the_values(name, tmp_path):
    """Also what Arrow allocates is bounded: 400 MiB of values go out and in."""
    rng = np.random.default_rng(0)
    with mr.ReplayBuffer.create(
        tmp_path / "source", mr.Schema(LARGE), 4500, heap_bytes="512 MiB"
    ) as source:
        for _ in range(4500):
            text = rng.integers(32, 127, rng.integers(1 << 17), np.uint8)
            tokens = rng.integers(-9, 9, rng.integers(1 << 14), np.int32)
            source.add(text=text.tobytes().decode(), tokens=tokens, reward=0.0)
    files_ = [tmp_path / "source", tmp_path / f"a.{name}", tmp_path / "again"]
    ran = subprocess.run(
        [sys.executable, "-c", ANONYMOUS, *map(str, files_)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert (tmp_path / f"a.{name}").stat().st_size > 250 << 20
    assert int(ran.stdout) < 224 << 20


def test_ranges_of_rows_are_complete_and_bound_their_bytes():
    nbytes = np.array([5, 0, 0, 5, 99, 1, 1, 1])
    assert list(split_by_bytes(nbytes, 10)) == [(0, 4), (4, 5), (5, 8)]
    assert list(split_by_bytes(np.zeros(0, np.int64), 10)) == []
    assert list(split_by_bytes(np.zeros(3, np.int64), 10)) == [(0, 3)]


# Rings that are full.


@pytest.mark.parametrize("engine", ["memmap", "memory", "zarr"])
@pytest.mark.parametrize("every", [None, 10])
@pytest.mark.slow
def test_each_row_whose_bytes_are_needed_is_in_one_file(engine, every, tmp_path):
    fields = {"text": mr.Field.text(max_bytes=400), "tokens": KINDS["tokens"]}
    path = None if engine == "memory" else tmp_path / "source"
    buffer = mr.ReplayBuffer.create(
        path,
        mr.Schema(fields),
        60,
        2,
        heap_bytes=8192,
        engine=engine,
        autoreset="disabled",
        commit_every=0.01,
    )
    rng, rows = np.random.default_rng(1), []
    with buffer, mr.AutoExport(buffer, tmp_path / "files", every=every) as exports:
        for _ in range(300):
            texts = ["å" * int(rng.integers(200)) for _ in range(2)]
            tokens = [value_of(KINDS["tokens"], rng) for _ in range(2)]
            buffer.add(text=texts, tokens=tokens)
            rows.append((texts, tokens))
        assert len(exports.reports) > 3
        exports.flush()
        # The heap is the tighter bound, but where shards hold the values: fewer rows
        # live than the capacity has.
        assert (buffer.span.lengths.max() < 60) == (engine != "zarr")
        made = [file for file, _ in exports.reports]
    found = {}
    for file in made:
        loaded = again(tmp_path, file)[0]
        assert not loaded.keys() & found.keys()
        found |= loaded
    assert len(found) == 600
    assert len(made) < 60
    for (env_id, position), row in found.items():
        texts, tokens = rows[position]
        assert row["text"].tobytes().decode() == texts[env_id]
        assert row["tokens"].tobytes() == tokens[env_id].tobytes()


def test_a_damaged_value_is_in_no_file_and_its_row_stays(tmp_path):
    schema = mr.Schema({"text": mr.Field.text(max_bytes=8)})
    buffer = mr.ReplayBuffer.create(tmp_path / "source", schema, 60, heap_bytes=4096)
    buffer.extend(text=["aaaaaaaa"] * 20)
    buffer.commit()
    with (tmp_path / "source" / "data-000001" / "heap.bin").open("r+b") as file:
        file.seek(8)
        file.write(b"b")
    message = "'text' is damaged in position 1 of environment 0: its value differs from"
    with pytest.raises(CorruptError, match=message):
        mr.AutoExport(buffer, tmp_path / "files").flush()
    assert list((tmp_path / "files").iterdir()) == []
    assert len(buffer) == 20
    buffer.close()


@pytest.mark.crash
@pytest.mark.parametrize(("engine", "capacity"), [("memmap", 500), ("zarr", 64)])
@pytest.mark.sliced(1)
@pytest.mark.slow
def test_a_killed_writer_leaves_each_row_whose_values_end_in_a_file(engine, capacity, tmp_path):
    """Rows end as their bytes are needed, long before the capacity is reached.

    Those of a compressed buffer end by the capacity, long after their bytes.
    """
    rng = np.random.default_rng(5)
    exported = 0
    for turn in range(12):
        folder = tmp_path / str(turn)
        folder.mkdir()

        def write(folder=folder):
            fields = {"text": mr.Field.text(max_bytes=400)}
            buffer = mr.ReplayBuffer.create(
                folder / "buffer",
                mr.Schema(fields),
                capacity,
                heap_bytes=8192,
                commit_every=0.005,
                engine=engine,
            )
            with mr.AutoExport(buffer, folder / "files"):
                for number in range(100_000):
                    buffer.add(text=f"{number} " * (number % 60))

        assert in_a_child(after(float(rng.uniform(0.05, 0.3))), write)
        if not (folder / "buffer" / "metadata.json").exists():
            continue
        texts = {}
        for path in folder.glob("files/[!t]*.npz"):
            with np.load(path) as file:
                values = mr.Ragged(file["text.values"], file["text.offsets"]).text()
                texts |= zip(file["_position"].tolist(), values, strict=True)
        exported += len(texts)
        with mr.ReplayBuffer.open(folder / "buffer") as buffer:
            alive = buffer.gather_all()
            stop = int(buffer.span.stop[0])
            texts |= zip(alive.positions.tolist(), alive["text"].text(), strict=True)
        assert texts == {n: f"{n} " * (n % 60) for n in range(stop)}
    assert exported


def test_rows_whose_bytes_are_needed_wait_for_a_callback_that_holds_them(tmp_path):
    fields = {"text": mr.Field.text(max_bytes=400)}
    buffer = mr.ReplayBuffer.create(
        tmp_path / "a", mr.Schema(fields), 100, heap_bytes=4096, commit_every=0.01
    )
    calls = []

    def before_overwrite(heads, tails, needed, target):
        calls.append((heads.copy(), tails.copy(), needed.copy()))
        if len(calls) > 1 and needed[0] > heads[0] + buffer.metadata.ring.reserve:
            raise RuntimeError("not yet")
        return target

    with buffer:
        buffer.hold_rows(before_overwrite)
        for _ in range(10):
            buffer.add(text="x" * 390)
        with pytest.raises(RuntimeError, match="not yet"):
            buffer.add(text="x" * 390)
        added = int(buffer.heads[0])
        assert 2 <= added == len(buffer)
        # Nothing was given up, also by the thread that raises tails ahead.
        assert buffer.span.first.tolist() == [0]
        assert buffer.gather_all()["text"].text() == ["x" * 390] * added
        heads, _, needed = calls[-1]
        assert heads[0] == added
        assert needed[0] == 100 + 1
        buffer.hold_rows(None)
        buffer.add(text="y" * 390)
        assert buffer.span.first[0] >= 1
