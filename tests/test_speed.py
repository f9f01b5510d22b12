"""What is measured of a buffer adds up, and the advice follows from the figures."""

import re
from dataclasses import replace

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, FailedError, SchemaError
from mmreplay.speed import Rate, SpeedReport, _advice, measure_speed
from mmreplay.storage.residency import Memory

GIB = 1 << 30


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("speed") / "b"
    schema = mr.Schema(
        {
            "observation": mr.Field((64, 65), "uint8"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
        }
    )
    with mr.ReplayBuffer.create(path, schema, 4000) as buffer:
        buffer.extend(
            observation=np.zeros((4000, 64, 65), np.uint8),
            reward=np.zeros(4000, np.float32),
            terminated=np.zeros(4000, bool),
        )
    return path


def test_a_buffer_is_measured(path):
    found = measure_speed(path, batch_size=32, seconds=0.02)
    step = 2 * 64 * 65 + 4 + 1
    rates = [found.warm, found.larger, found.cold, found.unasked]
    for rate in (rate for rate in rates if rate is not None):
        assert rate.mb_per_s == pytest.approx(rate.rows_per_s * step / 1e6)
    assert (found.cold is None) == (found.disk_mb_per_s is None)
    assert found.larger_size == 16 * 32
    assert found.nbytes > 4000 * 64 * 65
    assert found.memory.mapped >= 4000 * 64 * 65


def test_there_has_to_be_something_to_draw(tmp_path, path):
    mr.ReplayBuffer.create(tmp_path / "b", mr.Schema({"a": mr.Field((), "int8")}), 9)
    with pytest.raises(EmptyError, match="cannot draw"):
        measure_speed(tmp_path / "b", seconds=0.01)
    for options in ({"batch_size": 0}, {"seconds": 0}):
        with pytest.raises(SchemaError, match="batch_size, seconds: got"):
            measure_speed(path, **options)


def report(**changes):
    """Figures of which nothing follows, but for some."""
    same = Rate(1000.0, 10.0)
    memory = Memory(10 * GIB, GIB, GIB, 10 * GIB)
    plain = SpeedReport(
        256, same, same, same, same, 500.0, memory, 10 * GIB, "ext4", ()
    )
    return replace(plain, **changes)


def test_of_even_figures_no_advice_follows():
    assert list(_advice(report())) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"unasked": Rate(10.0, 0.1)}, r"come 100.0 times .*leave advise='auto'"),
        ({"unasked": Rate(4000.0, 40.0)}, r"is 4.0 times .*try advise='never'"),
        ({"larger": Rate(3000.0, 30.0)}, r"batches of 4,096 steps come at 3.0 times"),
        ({"cold": None}, r"cannot be dropped, so nothing was measured cold"),
        ({"file_system": "nfs4"}, r"the files are on nfs4: a copy on a local disk"),
        (
            {
                "warm": Rate(5000.0, 50.0),
                "larger": Rate(5000.0, 50.0),
                "memory": Memory(10 * GIB, GIB, GIB, 2 * GIB),
            },
            r"rows in memory come 5.0 times as fast, and 20% of the files are there",
        ),
    ],
)
def test_advice_follows_from_the_figures(changes, told):
    (sentence,) = _advice(report(**changes))
    assert re.search(told, sentence), sentence


def test_pages_that_hang_together_are_dropped_together(tmp_path):
    schema = mr.Schema({"pixels": mr.Field((84, 84), "uint8")})
    rng = np.random.default_rng(0)
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 2000) as buffer:
        # In one go: on many file systems the page cache then holds pieces of MiB.
        buffer.extend(pixels=rng.integers(0, 255, (2000, 84, 84), np.uint8))
    found = measure_speed(tmp_path / "b", batch_size=32, seconds=0.02)
    if found.file_system in ("tmpfs", "ramfs", "overlay"):
        pytest.skip(f"{found.file_system} lives in memory, or may")
    assert found.cold is not None


def test_a_zarr_group_is_refused(path, tmp_path):
    mr.compact(path, tmp_path / "c", codec="zstd")
    with mr.ReplayBuffer.open(tmp_path / "c") as buffer:
        group = buffer.zarr_path
    assert measure_speed(tmp_path / "c", 32, 0.01).warm.rows_per_s > 0
    with pytest.raises(
        FailedError, match="is a Zarr group, expected a buffer's folder"
    ):
        measure_speed(group, 32, 0.01)
