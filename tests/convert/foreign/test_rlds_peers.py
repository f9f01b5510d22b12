"""TFRecord files that another library writes, from the messages of protobuf itself."""

import numpy as np
import pytest

import mmreplay as mr
from tests.convert.foreign.oracle import assert_same, drawn
from tests.convert.foreign.test_rlds import LANGUAGE, OBSERVATIONS, episodes, write

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
writer = pytest.importorskip("tfrecord.writer", reason="tfrecord is not installed")


def kind(values):
    if isinstance(values, list):
        return values, "byte"
    if values.dtype.kind == "f":
        return values.tolist(), "float"
    # Protobuf takes no bool for an integer.
    return values.astype(int).tolist(), "int"


def test_every_step_is_what_was_written(tmp_path, rng):
    found, wanted = episodes(rng)
    folder = write(tmp_path / "set", [], shards=0)
    path = folder / "robot-train.tfrecord-00000-of-00001"
    file = writer.TFRecordWriter(str(path))
    for each in found:
        file.write({name: kind(values) for name, values in each.items()})
    file.close()
    report = mr.load(folder, tmp_path / "buffer")
    assert report.doubts == (LANGUAGE,)
    got, left = drawn(tmp_path / "buffer", OBSERVATIONS)
    assert left == 0
    assert_same(got, wanted)
    assert np.isfinite(got["reward"]).all()
