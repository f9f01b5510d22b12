"""Columns that name the episode of each row: their kinds, and where they change."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import zarr

import mmreplay as mr
from mmreplay.errors import SourceError
from mmreplay.ragged import Ragged
from mmreplay.schema import Field
from mmreplay.schema.episode_numbers import EpisodeChanges, are_numbers, episode_column
from mmreplay.schema.notes import Notes


def ragged(texts):
    """Texts of a block, which do not begin at the first byte of its memory."""
    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)])
    values = np.frombuffer(b"xyz" + b"".join(encoded), np.uint8)[3:]
    return Ragged(values, offsets)


@pytest.mark.parametrize("kind", ["int64", "uint8", "float32", "bool", "text"])
@pytest.mark.parametrize("seed", range(5))
def test_changes_over_blocks_are_those_of_a_list(kind, seed):
    """Against plain Python, for any cut into blocks."""
    rng = np.random.default_rng(seed)
    words = ["", "a", "b", "ab", "ba", "aa", "å", "abcabc", "abcabd"]
    for _ in range(60):
        lengths = rng.integers(1, 4, rng.integers(1, 12))
        numbers = np.repeat(rng.integers(0, 9, len(lengths)), lengths)
        held = [words[n] for n in numbers] if kind == "text" else numbers.astype(kind)
        begins = [n for n, (a, b) in enumerate(pairwise(held), 1) if a != b]
        changes, found, at = EpisodeChanges("x"), [], 0
        while at < len(held):
            size = int(rng.integers(1, 6))
            part = held[at : at + size]
            part = ragged(part) if kind == "text" else part.reshape(-1, 1).copy()
            changed = changes.of({"x": part})
            found += (np.flatnonzero(changed) + at).tolist()
            if kind != "text":
                part[:] = 0  # The memory is used for the next block.
            at += size
        assert found == begins
        notes = Notes()
        changes.add_doubts(notes)
        places = [held[n] for n in (0, *begins)]
        doubt = (
            f"the rows of an episode lie in {len(places)} places for "
            f"{len(set(places))} values of 'x': each was read as an episode"
        )
        doubts = [doubt] if len(set(places)) < len(places) else []
        if count := held.count("") if kind == "text" else 0:
            empty = (
                f"column 'x' is empty in {count} rows: those that follow each other "
                "were read as one episode"
            )
            doubts.insert(0, empty)
        assert notes.doubts == doubts


def test_no_column_and_no_rows_change_nothing():
    changes, notes = EpisodeChanges("x"), Notes()
    assert changes.of({"y": np.arange(3)}) is None
    assert changes.of({"x": np.arange(0)}) is None
    changes.add_doubts(notes)
    assert notes == Notes()


def test_integers_come_before_other_columns():
    columns = {"episode": ("int8", (1,)), "episode_index": ("float64", ())}
    texts = {"episode_id": Field.text(8)}
    assert episode_column(columns, texts) == "episode"
    del columns["episode"]
    assert episode_column(columns, texts) == "episode_index"
    assert episode_column({"episode": ("int64", (2,))}, texts) == "episode_id"
    others = {"episode": ("bfloat16", ()), "episode_id": ("complex64", ())}
    assert episode_column(others, {"episode_index": Field((None,), "int8", max_length=4)}) == ""


@pytest.mark.parametrize("odd", [0.5, np.nan, np.inf])
def test_floats_that_are_no_whole_numbers_are_a_doubt(odd):
    notes = Notes()
    blocks = [np.arange(3, dtype="f4"), np.array([1, odd], "f4")]
    assert not are_numbers("episode", iter(blocks), notes)
    assert notes.doubts == [
        f"column 'episode' does not say where episodes begin, as {odd} is no number of an episode"
    ]
    assert are_numbers("episode", iter(blocks[:1]), Notes())


IDS = {
    "float": np.array([0.0, 0, 7, 7, 2, 2]),
    "bool": np.array([True, True, False, False, False, False]),
    "text": ["a", "a", "ab", "ab", "b", "b"],
    "column": np.array([[4], [4], [9], [9], [2], [2]]),
}


def stored(path, ids):
    columns = {"obs": np.arange(6.0), "episode_id": ids}
    if path.suffix == ".zarr":
        group = zarr.open_group(path, mode="w")
        for name, data in columns.items():
            group.create_array(name, data=data)
    elif path.suffix == ".npz":
        np.savez(path, **columns)
    else:
        write = pq.write_table if path.suffix == ".parquet" else pa.csv.write_csv
        write(pa.table({n: list(column) for n, column in columns.items()}), path)
    return path


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("a.npz", ["float", "bool", "column"]),
        ("a.zarr", ["float", "bool", "column"]),
        ("a.parquet", ["float", "bool", "text", "column"]),
        ("a.csv", ["float", "bool", "text"]),
    ],
)
def test_episodes_may_be_named_by_floats_bools_and_texts(tmp_path, name, kinds):
    for kind in kinds:
        path = stored(tmp_path / name, IDS[kind])
        target = tmp_path / "target"
        options = {"dtypes": {"episode_id": "float64"}} if name == "a.csv" else {}
        options = options if kind == "float" else {}
        report = mr.load(path, target, strict=True, overwrite=True, **options)
        assert report.episodes == (2 if kind == "bool" else 3)
        with mr.ReplayBuffer.open(target) as buffer:
            begins = buffer.episodes.episodes(0).begin.tolist()
        assert begins == ([0, 2] if kind == "bool" else [0, 2, 4])


@pytest.mark.parametrize("name", ["a.npz", "a.zarr", "a.parquet", "a.csv"])
def test_numbers_that_come_back_and_floats_that_are_none_are_doubts(tmp_path, name):
    path = stored(tmp_path / name, np.array([3, 3, 0, 0, 3, 3]))
    assert mr.load(path, tmp_path / "target").doubts == (
        "the rows of an episode lie in 3 places for 2 values of 'episode_id': each was "
        "read as an episode",
    )
    with pytest.raises(SourceError, match="in 3 places for 2 values of 'episode_id'"):
        mr.load(path, tmp_path / "strict", strict=True)
    path = stored(tmp_path / name, np.array([0.0, 0.5, 1, 0, 0.5, 1]))
    report = mr.load(path, tmp_path / "target", overwrite=True)
    assert "no column says where episodes end: all rows are one episode" in report.doubts
    assert any("as 0.5 is no number of an episode" in each for each in report.doubts)


def test_texts_name_episodes_that_are_not_selected_as_a_field(tmp_path):
    path = stored(tmp_path / "a.parquet", IDS["text"])
    report = mr.load(path, tmp_path / "target", fields=["obs"])
    assert report.episodes == 3
    mr.load(path, tmp_path / "two", fields=["obs"], episodes=slice(1, 2))
    with mr.ReplayBuffer.open(tmp_path / "two") as buffer:
        assert buffer.gather_all()["obs"].tolist() == [2, 3]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_rows_without_a_name_of_their_episode_are_a_doubt(tmp_path, name):
    path = stored(tmp_path / name, np.array(["a", "a", "", "", "b", "b"]))
    report = mr.load(path, tmp_path / "target")
    assert report.episodes == 3
    assert report.doubts == (
        "column 'episode_id' is empty in 2 rows: those that follow each other were "
        "read as one episode",
    )
