"""Recorded entries are added to and never changed, and states are read back equal."""

import numpy as np
import pytest
import torch

from tests.frozen import frozen_files


def test_a_recorded_entry_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(frozen_files, "DATA", tmp_path)
    assert frozen_files.add("a.json", {"one": 1, "two": [2]}) == ["one", "two"]
    before = (tmp_path / "a.json").read_bytes()
    with pytest.raises(frozen_files.ChangedError, match=r"\['two'\] would change"):
        frozen_files.add("a.json", {"two": [3], "three": 3})
    assert (tmp_path / "a.json").read_bytes() == before
    assert frozen_files.add("a.json", {"two": [2], "three": 3}) == ["three"]
    assert frozen_files.load("a.json") == {"one": 1, "two": [2], "three": 3}


def test_a_packed_state_is_unpacked_with_its_types():
    array = np.array([[1.5, np.nan]], np.float32)
    state = {"a": [1, 2.0, None, "x"], "b": array, "c": torch.tensor([3, 4])}
    found = frozen_files.unpacked(frozen_files.packed(state))
    assert found["a"] == state["a"]
    assert found["b"].dtype == np.float32
    assert found["b"].tobytes() == array.tobytes()
    assert found["c"].tolist() == [3, 4]
    assert found["c"].dtype == torch.int64
