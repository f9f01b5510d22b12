"""Text that a source has comes in, or is a doubt that strict refuses."""

import json
from decimal import Decimal

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import mmreplay as mr
from mmreplay.errors import SourceError

WORDS = ["go", "", "a text of more than twelve bytes", "go"]
BASE = {
    "episode_index": pa.array([0, 0, 1, 1]),
    "reward": pa.array([0.0, 1.0, 2.0, 3.0]),
    "terminated": pa.array([False, True, False, True]),
}


def forms():
    """One column of words in each type that Arrow has for it."""
    raw = [word.encode() for word in WORDS]
    return {
        "string": pa.array(WORDS),
        "large_string": pa.array(WORDS, pa.large_string()),
        "string_view": pa.array(WORDS, pa.string_view()),
        "dictionary": pa.array(WORDS).dictionary_encode(),
        "dictionary of large_string": pa.array(WORDS, pa.large_string()).dictionary_encode(),
        "dictionary of int8": pa.array(WORDS).cast(pa.dictionary(pa.int8(), "string")),
        "binary": pa.array(raw),
        "binary_view": pa.array(raw, pa.binary_view()),
        "dictionary of binary": pa.array(raw).dictionary_encode(),
    }


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("coded", [False, True])
def test_every_form_of_text_in_parquet_is_a_field(tmp_path, form, coded):
    table = pa.table({**BASE, "task": forms()[form]})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, use_dictionary=coded, row_group_size=3)
    mr.load(path, tmp_path / "b", strict=True)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        field, rows = buffer.schema["task"], buffer.gather_all()["task"]
    assert field.kind == ("bytes" if "binary" in form else "text")
    assert [each.tobytes().decode() for each in rows] == WORDS


@pytest.mark.parametrize("form", ["string_view", "dictionary"])
def test_a_missing_text_of_any_form_is_a_doubt(tmp_path, form):
    words = pa.array(["a", None, "b", "a"])
    words = words.dictionary_encode() if form == "dictionary" else words.cast(form)
    pq.write_table(pa.table({**BASE, "task": words}), tmp_path / "a.parquet")
    report = mr.load(tmp_path / "a.parquet", tmp_path / "b")
    assert "'task' of string cannot be a field, as it has empty" in report.doubts[0]


def others():
    """Columns of values that no field holds."""
    return {
        "lists of strings": pa.array([["a"], [], ["b", "c"], ["d"]]),
        "timestamp": pa.array([1, 2, 3, 4], pa.timestamp("us")),
        "duration": pa.array([1, 2, 3, 4], pa.duration("us")),
        "date32": pa.array([1, 2, 3, 4], pa.date32()),
        "decimal": pa.array([Decimal("1.5")] * 4),
        "struct": pa.array([{"x": 1, "y": "a"}] * 4),
        "map": pa.array([[("a", 1)]] * 4, pa.map_(pa.string(), pa.int64())),
    }


@pytest.mark.parametrize("kind", others())
def test_columns_of_parquet_that_no_field_holds_are_doubts(tmp_path, kind):
    pq.write_table(pa.table({**BASE, "x": others()[kind]}), tmp_path / "a.parquet")
    report = mr.load(tmp_path / "a.parquet", tmp_path / "b")
    assert len(report.doubts) == 1
    assert report.doubts[0].startswith("column 'x' of ")
    with pytest.raises(SourceError, match=r"column 'x' of .* strict allows no guess"):
        mr.load(tmp_path / "a.parquet", tmp_path / "c", strict=True)


def test_a_column_without_any_value_is_no_loss(tmp_path):
    pq.write_table(pa.table({**BASE, "x": pa.nulls(4)}), tmp_path / "a.parquet")
    report = mr.load(tmp_path / "a.parquet", tmp_path / "b", strict=True)
    assert any("column 'x' of null cannot be a field" in note for note in report.notes)


def lerobot(folder, words):
    """A dataset of LeRobot with a column of words."""
    (folder / "meta").mkdir(parents=True)
    (folder / "data" / "chunk-000").mkdir(parents=True)
    table = pa.table(
        {
            "episode_index": BASE["episode_index"],
            "observation.state": pa.array([[1.0]] * 4),
            "action": pa.array([[1.0]] * 4),
            "language_instruction": words,
        }
    )
    pq.write_table(table, folder / "data" / "chunk-000" / "episode_000000.parquet")
    info = {"codebase_version": "v2.1", "total_episodes": 2, "total_frames": 4, "features": {}}
    (folder / "meta" / "info.json").write_text(json.dumps(info))


@pytest.mark.parametrize("form", ["string", "large_string", "string_view", "dictionary"])
def test_words_of_lerobot_are_a_field(tmp_path, form):
    lerobot(tmp_path / "set", forms()[form])
    mr.load(tmp_path / "set", tmp_path / "b", strict=True)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert buffer.gather_all()["language_instruction"].text() == WORDS


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (pa.array(["a", None, "b", "c"]), r"some frames have none \(null\)"),
        (pa.array([["a"]] * 4), r"list<element: string> is no field dtype"),
        (pa.array([1, 2, 3, 4], pa.timestamp("us")), r"timestamp\[us\] is no field d"),
    ],
)
def test_words_of_lerobot_that_are_left_out_are_a_doubt(tmp_path, words, why):
    lerobot(tmp_path / "set", words)
    assert len(mr.load(tmp_path / "set", tmp_path / "b").doubts) == 1
    with pytest.raises(SourceError, match=f"column 'language_instruction' was left out: {why}"):
        mr.load(tmp_path / "set", tmp_path / "c", strict=True)


ARRAYS = {
    "obs": np.arange(8.0).reshape(4, 2),
    "terminated": np.array([False, True, False, True]),
    "truncated": np.zeros(4, bool),
}


@pytest.mark.parametrize(
    "words", [np.array(WORDS), np.array(WORDS).astype("S9"), np.zeros(4, "M8[s]")]
)
def test_words_of_an_npz_file_are_a_doubt(tmp_path, words):
    np.savez(tmp_path / "a.npz", **ARRAYS, words=words, version=np.array("1.2"))
    report = mr.load(tmp_path / "a.npz", tmp_path / "b")
    assert len(report.doubts) == 1
    assert any("'version.npy' of <U3 cannot be" in note for note in report.notes)
    with pytest.raises(SourceError, match=r"array 'words.npy' of .* was left out"):
        mr.load(tmp_path / "a.npz", tmp_path / "c", strict=True)


def test_words_of_a_pt_file_are_a_doubt(tmp_path):
    tensors = {name: torch.from_numpy(array) for name, array in ARRAYS.items()}
    torch.save({**tensors, "words": WORDS, "version": "1.2"}, tmp_path / "a.pt")
    report = mr.load(tmp_path / "a.pt", tmp_path / "b")
    assert report.doubts == ("'words' is a list, and was left out",)
    assert "'version' is a str, and was left out" in report.notes


def test_words_of_a_csv_file_without_a_name_are_a_doubt(tmp_path):
    numbers = "".join(f"{n},{n}.5,{n % 2}\n" for n in range(3))
    (tmp_path / "a.csv").write_text(",reward,terminated\n" + numbers)
    report = mr.load(tmp_path / "a.csv", tmp_path / "a", strict=True)
    assert "column '' has no name, and was left out" in report.notes
    words = "".join(f"row{n},{n}.5,{n % 2}\n" for n in range(3))
    (tmp_path / "b.csv").write_text(",reward,terminated\n" + words)
    report = mr.load(tmp_path / "b.csv", tmp_path / "b")
    assert "column '' has no name, and was left out" in report.doubts


@pytest.mark.parametrize("kind", ["d4rl", "robomimic"])
def test_words_of_hdf5_are_a_doubt(tmp_path, kind):
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        group = file if kind == "d4rl" else file.create_group("data/demo_0")
        observations = "observations" if kind == "d4rl" else "obs/state"
        group[observations] = ARRAYS["obs"]
        group["actions"] = ARRAYS["obs"]
        group["rewards"] = np.zeros(4)
        ends = ("terminals", "timeouts") if kind == "d4rl" else ("dones",)
        for name in ends:
            group[name] = np.array([0, 0, 0, 1 if name != "timeouts" else 0], bool)
        group["words"] = WORDS
        group["version"] = 3
    report = mr.load(tmp_path / "a.hdf5", tmp_path / "b")
    assert [d for d in report.doubts if "words' was left out" in d]
    assert any("version' was left out: it is a single" in note for note in report.notes)
    with pytest.raises(SourceError, match="words' was left out"):
        mr.load(tmp_path / "a.hdf5", tmp_path / "c", strict=True)


def test_arrays_that_a_description_lacks_are_a_doubt(tmp_path):
    """Somebody added them, and the description says nothing of them."""
    with mr.ReplayBuffer.create(
        tmp_path / "ring", mr.Schema({"obs": mr.Field((), "int64")}), 4
    ) as ring:
        ring.extend(obs=np.arange(4))
    mr.export(tmp_path / "ring", tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as found:
        np.savez(tmp_path / "b.npz", **found, extra=np.arange(4))
    mr.export(tmp_path / "ring", tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    metadata = pq.read_metadata(tmp_path / "a.parquet").metadata
    named = {name: metadata[name] for name in (b"mmreplay", b"mmreplay.crc32c")}
    table = table.append_column("extra", pa.array(range(4)))
    pq.write_table(table.replace_schema_metadata(named), tmp_path / "b.parquet")
    for name in ("a.npz", "a.parquet"):
        assert mr.load(tmp_path / name, tmp_path / f"{name}-b").doubts == ()
    for name in ("b.npz", "b.parquet"):
        report = mr.load(tmp_path / name, tmp_path / f"{name}-b")
        assert report.doubts == ("'extra' is not in the description, and was left out",)
