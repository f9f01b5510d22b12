"""mmreplay bench says how fast a buffer is, and refuses what it cannot measure."""

from mmreplay.cli.run import run


def test_bench_tells_rates_and_where_the_files_are(facts, path):
    found = facts("bench", path, "--seconds", "0.02", "--batch-size", "16")
    assert found["batch_size"] == 16
    assert found["warm"]["rows_per_s"] > 0
    assert found["larger"]["mb_per_s"] > 0
    assert found["memory"]["mapped"] > 0
    assert isinstance(found["advice"], list)
    assert found["file_system"]


def test_bench_prints_a_table(path, capsys):
    assert run(["bench", str(path), "--seconds", "0.02"]) == 0
    told = capsys.readouterr().out
    for words in ("in memory", "on disk, rows read at once", "4,096", "private"):
        assert words in told


def test_a_batch_larger_than_memory_is_refused(path, capsys):
    assert run(["bench", str(path), "--batch-size", "1e12"]) == 3
    told = capsys.readouterr().err
    assert (
        "batch_size is too large, got 1,000,000,000,000: the bench also draws 16 times"
        in told
    )
    assert "PiB, and this machine has " in told
    assert told.count("\n") == 1


def test_time_is_above_zero(path, capsys):
    assert run(["bench", str(path), "--seconds", "0"]) == 2
    assert "--seconds must be above 0, got 0.0" in capsys.readouterr().err
