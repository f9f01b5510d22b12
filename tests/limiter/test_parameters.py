"""A law that is none is refused, and one without an upper bound holds."""

import json
import math

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FailedError, FormatError, SchemaError
from tests.limiter.support import add, create, rate_limiter, reader, until_starved

NAN = math.nan
RATIO = "must be a number above 0, .* Give the items drawn for each row written"
MINIMUM = "must be an integer of at least 1, .*rows that must be written before the first"
ERROR = r"must be at least 4 .*larger one, or float\('inf'\) for min_size"
TIMEOUT = "must be seconds of at least 0 or None, .*the longest .* leave it out"
PATIENCE = "must be seconds of at least 0, .*how long a call .* leave it out"


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("samples_per_insert", [0, -1.0, NAN, math.inf, "a", None, True, 10**400], RATIO),
        ("min_size", [0, -1, 1.5, 10.0, NAN, math.inf, "a", None, True], MINIMUM),
        ("error_buffer", [3.9, -math.inf, NAN, "a", None, True, 10**400], ERROR),
        ("timeout", [-1.0, NAN, "x", False, [1.0]], TIMEOUT),
        ("patience", [-5, NAN, "x", None, True], PATIENCE),
    ],
)
def test_invalid_parameters_are_refused(name, values, expected):
    for value in values:
        with pytest.raises(SchemaError, match=f"^{name} {expected}"):
            rate_limiter(**{name: value})


@pytest.mark.parametrize("name", ["timeout", "patience"])
@pytest.mark.parametrize("value", [0, 0.0, 1e9, math.inf, np.float32(2)])
def test_any_time_is_legal(name, value):
    assert getattr(rate_limiter(**{name: value}), name) == value


def test_numbers_of_numpy_are_those_of_python(tmp_path):
    numbers = {"samples_per_insert": np.float32(4), "error_buffer": np.float64(20)}
    create(tmp_path / "b", rate_limiter(min_size=np.int64(10), **numbers)).close()
    reader(tmp_path / "b", rate_limiter()).close()


@pytest.mark.parametrize(("error", "written"), [(20.0, 20.0), (20, 20.0), (math.inf, None)])
def test_the_parameters_are_json(tmp_path, error, written):
    create(tmp_path / "b", rate_limiter(error_buffer=error)).close()
    text = (tmp_path / "b" / "limiter" / "law.json").read_text()
    assert json.loads(text) == {"law": [4.0, 10, written], "base": 0}
    assert mr.verify_buffer(tmp_path / "b").findings == ()


def test_without_an_error_the_least_size_alone_counts(tmp_path):
    limiter = rate_limiter(error_buffer=math.inf)
    with create(tmp_path / "b", limiter) as buffer:
        add(buffer, 9)
        expected = r"9 rows are written, 9 of them alive \(the sampler leaves out 0\), "
        expected += r"and 0 items drawn; the limiter needs 10 rows alive and 4 items per row "
        expected += r"within inf\. Start the other"
        assert until_starved(lambda: buffer.sample(1), expected) == 0
        add(buffer, 991)
        for _ in range(1000):
            buffer.sample(16)
    with reader(tmp_path / "b", limiter) as buffer:
        buffer.sample(16)
    with pytest.raises(SchemaError, match=r"must be \[4.0, 10, inf\] as in .*, got .*20.0\]"):
        reader(tmp_path / "b", rate_limiter())


def test_no_product_is_too_large_to_draw():
    limiter = mr.RateLimiter(1e308, 1000, math.inf)
    assert limiter.allows_insert(1000, 0, 1000)
    assert limiter.allows_sample(1000, 10**9, 1000)


def test_refused_parameters_leave_no_folder(tmp_path):
    create(tmp_path / "b", None).close()
    with pytest.raises(SchemaError, match=r"min_size must be at most 100.*got 101"):
        reader(tmp_path / "b", rate_limiter(min_size=101))
    assert not (tmp_path / "b" / "limiter").exists()


def test_parameters_that_could_not_be_written_are_written_by_the_next(tmp_path, monkeypatch):
    create(tmp_path / "b", None).close()

    def fail(*_):
        raise FailedError("no")

    with monkeypatch.context() as patch:
        patch.setattr("mmreplay.disk.files.replace_bytes", fail)
        with pytest.raises(FailedError, match="no"):
            reader(tmp_path / "b", rate_limiter())
    reader(tmp_path / "b", rate_limiter(min_size=20)).close()


@pytest.mark.parametrize("base", [True, -1, 1.5, None, "1"])
def test_a_base_that_is_no_count_is_refused(tmp_path, base):
    create(tmp_path / "b", rate_limiter()).close()
    value = {"law": [4.0, 10, 20.0], "base": base}
    (tmp_path / "b" / "limiter" / "law.json").write_text(json.dumps(value))
    with pytest.raises(FormatError, match=r"base must be an integer of at least 0"):
        reader(tmp_path / "b", rate_limiter())
