"""Tensors that another library names: whole files, in blocks."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from mmreplay.convert import safetensors
from mmreplay.convert.safetensors import TensorFile, block_rows, write_tensors
from mmreplay.errors import FormatError

COLUMNS = {"wide": ("float32", (3,)), "flag": ("bool", ()), "half": ("float16", (2, 2))}


def arrays(rows):
    rng = np.random.default_rng(0)
    return {
        "wide": rng.random((rows, 3), np.float32),
        "flag": rng.random(rows) < 0.5,
        "half": rng.random((rows, 2, 2)).astype(np.float16),
    }


def write(path, rows, values):
    def read(first, stop):
        return {name: array[first:stop] for name, array in values.items()}

    write_tensors(path, COLUMNS, rows, read, {"by": "a test"})


@pytest.mark.parametrize("rows", [0, 1, 10])
def test_what_is_written_in_blocks_reads_back(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(safetensors, "BLOCK_NBYTES", 63)
    assert block_rows(COLUMNS) == 3  # of 21 bytes each
    values = arrays(rows)
    write(tmp_path / "t.safetensors", rows, values)
    found = load_file(tmp_path / "t.safetensors")
    with TensorFile(tmp_path / "t.safetensors") as file:
        assert file.texts["by"] == "a test"
        file.expect(COLUMNS, rows)
        for name, array in values.items():
            assert np.array_equal(found[name], array)
            assert found[name].dtype == array.dtype
            assert np.array_equal(file.read(name, 0, rows), array)
            assert np.array_equal(file.read(name, rows // 2, rows), array[rows // 2 :])


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    write(tmp_path / "t.safetensors", 2, arrays(2))
    before = (tmp_path / "t.safetensors").read_bytes()

    def fail(first, stop):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path / "t.safetensors", COLUMNS, 2, fail, {})
    assert (tmp_path / "t.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


def test_other_tensors_than_expected_are_refused(tmp_path):
    write(tmp_path / "t.safetensors", 2, arrays(2))
    with TensorFile(tmp_path / "t.safetensors") as file:
        with pytest.raises(FormatError, match=r"must be bool\[3\], got bool\[2\]"):
            file.expect(COLUMNS, 3)
        with pytest.raises(FormatError, match=r"'more' must be int8\[2\], got none"):
            file.expect({**COLUMNS, "more": ("int8", ())}, 2)
