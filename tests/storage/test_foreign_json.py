"""Attributes that others wrote refuse no group; what is made to harm is refused."""

import json
import warnings

import numpy as np
import pytest
import zarr

import mmreplay as mr
from mmreplay.errors import CorruptError, FormatError
from mmreplay.storage.zarr.group_json import MAX_JSON_DEPTH, parse
from tests.storage.zarr_groups import put

ODD = {
    "nan": float("nan"),
    "inf": [float("inf"), -float("inf")],
    "long": 10**30,
    "deep": json.loads("[" * 40 + "]" * 40),
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("consolidated", [True, False])
def test_attributes_that_nobody_needs_refuse_no_group(tmp_path, rng, version, name, consolidated):
    data = rng.random((30, 3))
    made = zarr.open_group(tmp_path / "g", mode="w", zarr_format=version)
    put(made, "obs", data).attrs["odd"] = ODD[name]
    made.attrs["odd"] = ODD[name]
    if consolidated:
        with warnings.catch_warnings():
            # Version 3 has no consolidated metadata yet, says zarr-python.
            warnings.simplefilter("ignore")
            zarr.consolidate_metadata(tmp_path / "g")
    with mr.ReplayBuffer.open(tmp_path / "g") as buffer:
        assert np.array_equal(buffer.gather_all()["obs"], data)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1" + 40 * "0", "1e400"])
def test_a_number_that_is_no_fill_value_is_none(tmp_path, rng, value):
    made = zarr.open_group(tmp_path / "g", mode="w")
    put(made, "obs", np.arange(30))
    file = tmp_path / "g/obs/zarr.json"
    text = file.read_text()
    assert '"fill_value": 0' in text
    file.write_text(text.replace('"fill_value": 0', f'"fill_value": {value}'))
    with pytest.raises(FormatError, match=r"refuses its metadata \(.*int"):
        mr.ReplayBuffer.open(tmp_path / "g")


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH, 900, 200_000])
def test_what_nests_too_deep_is_refused(depth):
    text = '{"a": ' + "[" * depth + "]" * depth + "}"
    with pytest.raises(FormatError, match=r"x.json nests deeper than 128"):
        parse(text.encode(), "x.json")
    less = '{"a": ' + "[" * (MAX_JSON_DEPTH - 1) + "]" * (MAX_JSON_DEPTH - 1) + "}"
    assert parse(less.encode(), "x.json")


def test_a_number_of_a_million_digits_takes_no_time():
    found = parse(b'{"a": ' + b"9" * 1_000_000 + b', "b": -12345678901234567890123}', "")
    assert found == {"a": float("inf"), "b": -12345678901234567890123.0}


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"{", CorruptError, "x.json is not valid JSON .*Restore"),
        (b"\xff", CorruptError, "x.json is not valid JSON .*Restore"),
        (b"[]", FormatError, "x.json must hold a JSON object, got a list"),
        (b'{"a": {"b": 1, "b": 2}}', FormatError, r"x.json has a key twice .*'b'"),
    ],
)
def test_what_is_no_object_is_refused(data, error, message):
    with pytest.raises(error, match=message):
        parse(data, "x.json")
