"""What the names of columns say, and what is said of them."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from safetensors.numpy import save_file

import mmreplay as mr
from mmreplay.convert import registry
from mmreplay.errors import SourceError
from mmreplay.schema.naming import InferredColumns
from mmreplay.schema.notes import Notes

ENDS = [0.0, np.nan, 1.0]


def as_npz(path, ends):
    np.savez(path, obs=np.arange(3.0), terminals=ends)


def as_csv(path, ends):
    cells = ["" if np.isnan(end) else str(end) for end in ends]
    lines = [f"{row},{cell}" for row, cell in enumerate(cells)]
    path.write_text("\n".join(["obs,terminals", *lines, ""]))


def as_parquet(path, ends):
    held = pa.array([None if np.isnan(end) else end for end in ends])
    pq.write_table(pa.table({"obs": np.arange(3.0), "terminals": held}), path)


def as_zarr(path, ends):
    group = zarr.open_group(str(path), mode="w")
    group.create_array("obs", data=np.arange(3.0))
    group.create_array("terminals", data=np.array(ends))


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.npz", as_npz), ("a.csv", as_csv), ("a.parquet", as_parquet), ("a.zarr", as_zarr)],
)
def test_an_end_that_is_missing_is_refused_and_no_termination(tmp_path, name, write):
    write(tmp_path / name, ENDS)
    told = "column 'terminals' tells.*NaN or no value in row 1"
    with pytest.raises(SourceError, match=told):
        mr.load(tmp_path / name, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_rows_are_counted_over_blocks():
    plain = InferredColumns({"obs": ("float32", ()), "dones": ("float16", (1,))}, Notes())
    found = {"obs": np.zeros(3, "f4"), "dones": np.array([[0], [1], [np.nan]], "f2")}
    with pytest.raises(SourceError, match=r"column 'dones' tells.*NaN or no value in row 2"):
        plain.take(found, 0)
    with pytest.raises(SourceError, match="in row 702"):
        plain.take(found, 700)
    _, terminated, _ = plain.take({name: each[:2] for name, each in found.items()}, 9)
    assert terminated.tolist() == [False, True]


@pytest.mark.parametrize("name", ["reward", "obs"])
def test_columns_that_no_field_can_be_are_doubts(name):
    notes = Notes()
    columns = {"act": ("float32", ()), "x": ("complex64", ()), name: ("U3", ())}
    InferredColumns(columns, notes)
    assert any(f"column {name!r} was left out" in doubt for doubt in notes.doubts)
    assert any("column 'x' was left out" in doubt for doubt in notes.doubts)


def test_arrays_that_an_npz_file_loses_are_doubts(tmp_path):
    np.savez(
        tmp_path / "a.npz", x=np.zeros(9), reward=np.ones(9, complex), terminals=np.zeros(9, bool)
    )
    report = mr.load(tmp_path / "a.npz", tmp_path / "target")
    assert any("'reward.npy' of complex128 cannot be" in doubt for doubt in report.doubts)


NUMBERS = [4, 4, 4, 9, 9, 2]


def as_arrays(path, columns):
    if path.suffix == ".npz":
        np.savez(path, **columns)
    elif path.suffix == ".pt":
        torch.save({name: torch.from_numpy(a) for name, a in columns.items()}, path)
    elif path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        save_file(columns, path)


@pytest.mark.parametrize("name", ["a.npz", "a.pt", "a.safetensors", "a.parquet"])
@pytest.mark.parametrize("number", ["episode_index", "episode_id", "episode"])
def test_a_number_of_an_episode_that_changes_begins_one(tmp_path, name, number):
    columns = {"obs": np.arange(6.0), number: np.array(NUMBERS)}
    as_arrays(tmp_path / name, columns)
    report = mr.load(tmp_path / name, tmp_path / "target", strict=True)
    assert f"episodes begin where column {number!r} changes, and" in report.notes[-1]
    with registry.open_reader(registry.source_format(tmp_path / name), tmp_path / name) as reader:
        for rows in (1, 2, 4, 6):
            flags = np.concatenate([block.flags for block in reader.blocks(rows)])
            assert np.flatnonzero(flags).tolist() == [0, 3, 5]


def test_numbers_next_to_ends_leave_them_unchanged(tmp_path):
    ends = np.array([False, True, False, False, True, False])
    columns = {"obs": np.arange(6.0), "terminated": ends, "episode": np.array(NUMBERS)}
    as_arrays(tmp_path / "a.npz", columns)
    assert mr.load(tmp_path / "a.npz", tmp_path / "target", strict=True).episodes == 4
    with mr.ReplayBuffer.open(tmp_path / "target") as buffer:
        assert buffer.episodes.episodes(0).begin.tolist() == [0, 2, 3, 5]


def test_what_has_no_value_a_step_is_a_doubt_under_a_known_name_only(tmp_path):
    torch.save({"x": torch.zeros(3), "rewards": "abc", "note": "c"}, tmp_path / "a.pt")
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    group.create_array("x", data=np.zeros(3))
    for name in ("rewards", "note"):
        group.create_array(name, data=np.zeros((), "f4"))
    for name in ("a.pt", "a.zarr"):
        report = mr.load(tmp_path / name, tmp_path / f"{name}-buffer")
        assert any("'rewards'" in doubt for doubt in report.doubts), name
        assert any("'note'" in note for note in report.notes), name
