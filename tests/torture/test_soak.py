"""A slice of ``python -m tools.torture soak``, and that it would notice."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer.reader import GenerationReader
from tools.torture import processes, soak
from tools.torture.latencies import Latencies
from tools.torture.powerloss import Report
from tools.torture.processes import Usage

SLICE = soak.Size(200_000, 2.0, capacity=512, batch=64, samples=20)


@pytest.fixture
def roomy(monkeypatch):
    """What a process takes in its first seconds is no growth."""
    monkeypatch.setattr(processes, "GROWTH_NBYTES", 1 << 30)
    monkeypatch.setattr(soak, "GROWTH_NBYTES", 1 << 30)


@pytest.mark.slow
def test_five_processes_tear_no_row_and_leave_a_whole_buffer(roomy, capsys):
    report = soak.attack(SLICE, 1)
    assert report.findings == {}, report.examples
    assert report.states >= SLICE.rows
    assert report.seen["laps"] > 3
    for role in soak.ROLES[1:]:
        assert report.seen[f"{role} drawn"] > 10 * SLICE.batch
        assert role in capsys.readouterr().out or role != "steps"


@pytest.mark.slow
def test_a_reader_that_does_not_look_again_tears_rows(roomy, monkeypatch):
    monkeypatch.setattr(GenerationReader, "stale", lambda *_: None)
    small = soak.Size(400_000, 3.0, capacity=64, batch=256, draws_per_s=1e6)
    report = soak.attack(small, 1)
    assert any("failed" in kind for kind in report.findings)


def drawn(tmp_path):
    envs = np.arange(4)
    path = tmp_path / "buffer"
    with mr.ReplayBuffer.create(path, soak.SCHEMA, 64, 4, autoreset="same_step") as buffer:
        for position in range(50):
            buffer.add(soak.made(envs, np.full(4, position)))
        return buffer.sample(32, contiguous=True)


def test_right_rows_are_right_and_each_byte_counts(tmp_path):
    batch = drawn(tmp_path)
    assert soak.wrong(batch) == []
    for path, kind in {
        "observation": "torn row",
        "reward": "torn row",
        "place": "torn row",
        "checksum": "torn row",
        "terminated": "wrong end",
        "next_observation": "wrong next",
    }.items():
        column = batch.fields[path]
        for byte in range(column[0].nbytes):
            bytes_ = column.view(np.uint8).reshape(len(column), -1)
            bytes_[7, byte] ^= 1
            assert soak.wrong(batch)[0].startswith(kind), (path, byte)
            bytes_[7, byte] ^= 1
    assert soak.wrong(batch) == []


def test_growth_in_the_last_third_is_reported():
    grows = [Usage(1 << 20, 5, 1)] * 20 + [Usage(4 << 20, 6, 2)] * 10
    report = Report()
    soak._judged({"reader": grows, "writer": grows[:20]}, report)
    assert report.findings["growth"] == 3
    assert "reader nbytes from 1048576 to 4194304" in report.examples["growth"]


def test_percentiles_are_those_of_numpy_within_a_bin():
    times = Latencies(("one", "none"))
    taken = np.random.default_rng(0).lognormal(10, 2, 5003)
    for nanoseconds in taken.astype(int).tolist():
        times.note("one", nanoseconds)
    for percent in (50, 90, 99, 99.9):
        exact = np.percentile(taken, percent, method="inverted_cdf") / 1000
        # The upper edge of a bin, which is 5 percent wide.
        assert exact <= times.percentile_us("one", percent) <= 1.06 * exact
    assert np.isnan(times.percentile_us("none", 50))
    assert "one" in times.table()
