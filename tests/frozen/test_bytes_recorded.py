"""Files of fixed sequences of writes, and exported files, are what they were."""

import json

import pytest

from tests.frozen.bytes_cases import CASES
from tests.frozen.frozen_files import load

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
RECORDED = load("bytes.json")


def test_every_recorded_case_is_tested():
    assert set(RECORDED) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_files_are_as_recorded(tmp_path, name):
    found = json.loads(json.dumps(CASES[name](tmp_path)))
    assert found == RECORDED[name]


def test_each_kind_of_file_is_recorded():
    names = {path.split("/")[-1] for files in RECORDED.values() for path in files}
    for name in (
        "metadata.json",
        "statistics.json",
        "COMMIT",
        "LOCK",
        "STATE",
        "places.bin",
        "priorities.bin",
        "records.bin",
        "flags.bin",
        "sums.bin",
        "law.json",
        "learner-000",
        "writer",
        "zarr.json",
        "bytes of shards",
        "x.npz",
        "packed.npz",
        "x.pt",
        "x.csv",
        "x.csv.mmreplay.json",
        "x.safetensors",
        "x.parquet",
        "x.hdf5",
    ):
        assert name in names, name
