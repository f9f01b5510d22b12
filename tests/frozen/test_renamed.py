"""Names that are going to change: the old ones go on doing what they did."""

import json

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.episodes import CUT, START

# Of an alias's own warning it is free to speak; everything else is an error.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FIELDS = {
    "observation": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
    "mark": mr.Field((), "float32", mutable=True),
}


def made(path=None, **options):
    engine = "memory" if path is None else "memmap"
    buffer = mr.ReplayBuffer.create(
        path, mr.Schema(FIELDS), 20, engine=engine, autoreset="disabled", **options
    )
    for number in range(10):
        buffer.add(observation=number, terminated=False, mark=0.0)
    return buffer


def test_cut_ends_the_episodes_that_run():
    buffer = made()
    buffer.cut()
    buffer.add(observation=10.0, terminated=False, mark=0.0)
    flags = buffer.flags(0, np.arange(11))
    assert np.flatnonzero(flags & START).tolist() == [0, 10]
    assert np.flatnonzero(flags & CUT).tolist() == [10]


def test_cut_takes_environments_by_name():
    buffer = mr.ReplayBuffer.create(
        None, mr.Schema(FIELDS), 20, 2, engine="memory", autoreset="disabled"
    )
    for number in range(4):
        pair = np.full(2, number, np.float32)
        buffer.add(observation=pair, terminated=pair > 9, mark=pair)
    buffer.cut(env_ids=[1])
    pair = np.zeros(2, np.float32)
    buffer.add(observation=pair, terminated=pair > 9, mark=pair)
    flags = buffer.flags([[0], [1]], np.arange(5)[None])
    assert np.argwhere(flags & CUT).tolist() == [[1, 4]]


def test_set_writes_a_mutable_field():
    buffer = made()
    buffer.set("mark", 0, np.arange(3), np.full(3, 7.5))
    assert buffer.gather_all()["mark"].tolist() == [7.5] * 3 + [0.0] * 7


def test_user_is_stored_with_the_buffer(tmp_path):
    made(tmp_path / "ring", user={"by": "me"}).close()
    with mr.ReplayBuffer.open(tmp_path / "ring") as buffer:
        assert buffer.metadata.user == {"by": "me"}
    assert json.loads((tmp_path / "ring" / "metadata.json").read_text())["user"] == {
        "by": "me"
    }


def test_an_emphasis_on_recent_steps_draws_from_a_range_that_shrinks():
    sampler = mr.ShrinkingSampler(num_updates=10, eta=0.5, smallest=2, seed=0)
    buffer = made(sampler=sampler)
    drawn = [buffer.sample(4).positions for _ in range(10)]
    assert min(drawn[-1]) > 0
    again = mr.ShrinkingSampler(10, eta=0.5, smallest=2, seed=0)
    assert isinstance(again, type(sampler))
    again.load_state_dict(sampler.state_dict())
    buffer.sampler = again
    first = buffer.sample(4).positions
    again.load_state_dict(sampler.state_dict())
    assert (buffer.sample(4).positions == first).all()


@pytest.mark.parametrize("then", ["raise", "go_on"])
def test_a_limiter_raises_or_goes_on(tmp_path, then):
    limiter = mr.RateLimiter(1.0, 15, error_buffer=1000.0, timeout=0.0, then=then)
    assert limiter == mr.RateLimiter(1.0, 15, 1000.0, 0.0, 10.0, then)
    buffer = made(tmp_path / "ring", limiter=limiter)
    if then == "raise":
        with pytest.raises(mr.StarvedError):
            buffer.sample(4)
    else:
        assert len(buffer.sample(4).positions) == 4
    buffer.close()


def test_reports_are_of_the_classes_that_have_their_names(tmp_path):
    made(tmp_path / "ring").close()
    compacted = mr.compact(tmp_path / "ring", tmp_path / "compact")
    assert isinstance(compacted, mr.Compacted)
    repaired = mr.repair(tmp_path / "ring", tmp_path / "whole")
    assert isinstance(repaired, mr.Repaired)
    with made() as buffer:
        assert isinstance(buffer.memory(), mr.Memory)


def test_a_repair_names_what_it_cut(tmp_path):
    made(tmp_path / "ring").close()
    record = tmp_path / "ring" / "data-000001" / "records.bin"
    data = bytearray(record.read_bytes())
    data[40] ^= 255
    record.write_bytes(data)
    report = mr.repair(tmp_path / "ring", tmp_path / "whole")
    assert len(report.cuts) > 0
    assert all(isinstance(each, mr.Cut) for each in report.cuts)


def test_a_recording_reports_what_it_wrote(tmp_path):
    pytest.importorskip("gymnasium")
    report = mr.record("CartPole-v1", tmp_path / "a", steps=20, seed=0)
    assert isinstance(report, mr.Recorded)
    assert report.steps == 20
