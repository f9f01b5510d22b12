"""Sidecars of csv files: whose they are, and what becomes of those left behind."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FormatError
from tests.convert.support import same, seven_and_eight


@pytest.fixture
def source(tmp_path):
    with seven_and_eight(tmp_path / "b") as buffer:
        yield buffer


def test_a_foreign_file_under_the_name_of_a_sidecar_is_preserved(source, tmp_path):
    place = tmp_path / "a.csv.mmreplay.json"
    for text in ("precious", "{}", '{"csv": 3}'):
        place.write_text(text)
        with pytest.raises(
            FormatError, match=r"exists and is not a sidecar of mmreplay\. Move it away, or"
        ):
            mr.export(source, tmp_path / "a.csv")
        assert place.read_text() == text
        assert not (tmp_path / "a.csv").exists()
    mr.export(source, tmp_path / "a.csv", overwrite=True)
    assert mr.load(tmp_path / "a.csv", tmp_path / "c").rows == 2


def test_a_sidecar_that_lost_its_file_is_replaced(source, tmp_path):
    mr.export(source, tmp_path / "a.csv")
    (tmp_path / "a.csv").unlink()
    mr.export(source, tmp_path / "a.csv")
    mr.load(tmp_path / "a.csv", tmp_path / "c")
    with mr.ReplayBuffer.open(tmp_path / "c") as loaded:
        same(source, loaded)


@pytest.mark.parametrize("damaged", [False, True])
def test_skrls_layout_takes_a_stale_sidecar_away(source, tmp_path, damaged):
    place = tmp_path / "a.csv.mmreplay.json"
    mr.export(source, tmp_path / "a.csv")
    if damaged:
        place.write_text(place.read_text().replace('"capacity":8', '"capacity":9'))
    mr.export(source, tmp_path / "a.csv", layout="skrl", overwrite=True)
    assert not place.exists()
    mr.load(tmp_path / "a.csv", tmp_path / "c")
    with mr.ReplayBuffer.open(tmp_path / "c") as loaded:
        np.testing.assert_array_equal(np.ravel(loaded.gather_all()["x"]), [7, 8])
    place.write_text("precious")
    mr.export(source, tmp_path / "a.csv", layout="skrl", overwrite=True)
    assert place.read_text() == "precious"
