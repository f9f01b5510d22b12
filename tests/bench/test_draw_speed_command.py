"""tools/bench/draw_speed says how fast a buffer is, and refuses what cannot be."""

import json

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError
from tools.bench.draw_speed import main


@pytest.fixture
def path(tmp_path):
    schema = mr.Schema({"x": mr.Field((8,), "float32")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 500) as buffer:
        buffer.extend(x=np.zeros((500, 8), np.float32))
    return str(tmp_path / "b")


def test_rates_and_where_the_files_are_are_printed_as_json(path, capsys):
    main([path, "--seconds", "0.02", "--batch-size", "16", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["batch_size"] == 16
    assert found["warm"]["rows_per_s"] > 0
    assert found["larger"]["mb_per_s"] > 0
    assert found["memory"]["mapped"] > 0
    assert isinstance(found["advice"], list)
    assert found["file_system"]


def test_a_table_is_printed(path, capsys):
    main([path, "--seconds", "0.02"])
    printed = capsys.readouterr().out
    for words in ("in memory", "on disk, rows read at once", "4,096", "private"):
        assert words in printed


def test_a_batch_larger_than_memory_is_refused(path):
    with pytest.raises(SchemaError, match="batch_size is too large, got 1,000,000,0"):
        main([path, "--batch-size", str(10**12)])


def test_time_is_above_zero(path, capsys):
    with pytest.raises(SystemExit):
        main([path, "--seconds", "0"])
    assert "--seconds must be above 0, got 0.0" in capsys.readouterr().err
