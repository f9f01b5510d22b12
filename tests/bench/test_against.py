"""Comparing the benchmarks' lines of two trees."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from tools.bench import against
from tools.bench.against import compare, higher_is_better, own_lines, table

RESULT = {
    "rows": 1000,
    "name": "patches",
    "quick": True,
    "speedup": {"cpprb": 3.0},
    "median_us": {"mmreplay": 10.0, "mmreplay_torch": 12.0, "np_take": 8.0},
    "by_rows": {"1000": {"batch_us": 5.0, "peak_kib": 7.0}},
    "live_us": {"alone": {"sample": 4.0}, "writer_steps_per_s": 9.0},
    "sides": {"mmreplay": {"draw_ms": 2.0}, "original": {"draw_ms": 1.0}},
    "cold": {"mb_per_s": {"mmreplay": 3.0, "preadv": 4.0}},
}


def test_lines_are_the_times_and_speeds_of_mmreplay_alone():
    assert own_lines(RESULT) == {
        ("median_us", "mmreplay"): 10.0,
        ("median_us", "mmreplay_torch"): 12.0,
        ("by_rows", "1000", "batch_us"): 5.0,
        ("live_us", "alone", "sample"): 4.0,
        ("live_us", "writer_steps_per_s"): 9.0,
        ("sides", "mmreplay", "draw_ms"): 2.0,
        ("cold", "mb_per_s", "mmreplay"): 3.0,
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (("median_us", "mmreplay"), False),
        (("draw_us_by_rows", "any", "1000"), False),
        (("command_s", "stats"), False),
        (("busy_percent", "process"), False),
        (("checksum_percent",), None),
        (("fill_mb_per_s", "mmreplay"), True),
        (("vectors_256", "batches_a_second"), True),
        (("live_us", "writer_steps_per_s"), True),
        (("frames_s", "84x84", "random"), True),
        (("writer_steps_s", "alone"), True),
        (("live", "added_shown_longest_s"), False),
        (("memory", "mmreplay", "peak_over_limit"), None),
        (("rows",), None),
    ],
)
def test_the_last_key_with_a_unit_says_how_a_figure_is_read(line, expected):
    assert higher_is_better(line) is expected


def test_a_ratio_above_one_is_a_faster_tree():
    time, speed = ("median_us", "mmreplay"), ("mb_per_s", "mmreplay")
    now = [{time: 8.0, speed: 300.0}, {time: 10.0, speed: 200.0}]
    before = [{time: 10.0, speed: 150.0}, {time: 14.0, speed: 100.0}]
    first, second = compare("bench_x", now, before)
    assert (first.best, first.middle) == (10 / 8, 12 / 9)
    assert (second.best, second.middle) == (2.0, 2.0)


def test_only_lines_that_every_run_has_are_compared():
    a, b, c = ("a_us",), ("b_us",), ("c_us",)
    found = compare("bench_x", [{a: 1.0, b: 1.0}], [{a: 1.0, c: 1.0}])
    assert [each.line for each in found] == [a]


def compared(ratios: list[float]) -> against.Compared:
    """A time of this tree in rounds, over that of a revision which is always 1."""
    now = [{("a_us",): 1 / ratio} for ratio in ratios]
    (line,) = compare("bench_x", now, [{("a_us",): 1.0}] * len(ratios))
    return line


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        # Best and median are below the bound: of five rounds all must be.
        ([0.9] * 5, "slower"),
        ([0.9] * 4, "unclear"),
        ([0.8] * 8, "slower"),
        ([0.94, 0.949] * 4, "slower"),
        # One of both is not below.
        ([0.9] * 7 + [0.96], ""),
        ([0.94, 1.0, 1.0], ""),
        ([1.0] * 5, ""),
    ],
)
def test_a_line_is_slower_where_best_median_and_nearly_all_rounds_are(ratios, said):
    assert compared(ratios).said(0.95) == said


@pytest.mark.parametrize(
    # Of eight rounds seven suffice, (1 + 8) / 256, and six do not, (1 + 8 + 28) / 256.
    ("faster", "said"),
    [(1, "slower"), (2, "unclear")],
)
def test_one_round_of_eight_may_be_faster(faster, said):
    before = [{("a_us",): 3.0}] * faster + [{("a_us",): 1.0}] * (8 - faster)
    (line,) = compare("bench_x", [{("a_us",): 2.0}] * 8, before)
    assert (line.best, line.middle) == (0.5, 0.5)
    assert sum(ratio < 0.95 for ratio in line.rounds) == 8 - faster
    assert line.said(0.95) == said


def test_the_table_begins_with_the_slowest_lines():
    now = [{("a_us",): 2.0, ("b_us",): 1.0, ("c_us",): 2.0}] * 5
    before = [{("a_us",): 1.0, ("b_us",): 1.0, ("c_us",): 1.0}] * 4
    before += [{("a_us",): 1.0, ("b_us",): 1.0, ("c_us",): 2.0}]
    lines = compare("bench_x", now, before)
    rows = table(lines, 0.95).splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["slower", "unclear", "1.000"]
    assert rows[0].endswith("bench_x: a_us")
    assert against.summary(lines, 0.95).startswith("3 lines, 2 below 0.95, 1 of these unclear; ")


def test_scripts_with_a_slower_line_run_more_rounds_in_turns(monkeypatch):
    trees, seen = (Path("now"), Path("before")), []

    def run(script, tree, options):
        seen.append(tree.name)
        return {("a_us",): 2.0 if tree.name == "now" and len(seen) < 3 else 1.0}

    monkeypatch.setattr(against, "run", run)
    options = argparse.Namespace(rounds=1, more=2, bound=0.95)
    (line,) = against.measure("bench_x", trees, options)
    assert line.speed == 1
    assert seen == ["before", "now", "now", "before", "before", "now"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["HEAD", "--options=--rows=5"], "--options are of one script. Name it."),
        (["HEAD", "bench_add", "bench_zarr", "--options=--rows=5"], "--options are of one script."),
    ],
)
def test_options_without_their_script_are_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        against.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("figure", "more", "status", "said"),
    [(2.0, 5, 1, "slower"), (2.0, 0, 1, "unclear"), (1.0, 5, 0, "")],
)
def test_a_line_below_is_the_status_and_options_reach_the_script(
    monkeypatch, capsys, figure, more, status, said
):
    commands = []

    def run(command, cwd, **options):
        commands.append(command)
        slow = cwd == against.make_peers.ROOT
        text = json.dumps({"median_us": {"mmreplay": figure if slow else 1.0}})
        return subprocess.CompletedProcess(command, 0, text, "")

    def export(root, revision, folder):
        (folder / "tools" / "bench").mkdir(parents=True)
        (folder / "tools" / "bench" / "bench_add.py").touch()

    monkeypatch.setattr(against, "export", export)
    monkeypatch.setattr(against, "refuse_other_package", lambda python, tree: None)
    monkeypatch.setattr(subprocess, "run", run)
    given = ["HEAD", "bench_add", f"--more={more}", "--options=--rows=5"]
    assert against.main(given) == status
    lines = [each for each in capsys.readouterr().out.splitlines() if "bench_add: median" in each]
    assert all(line.startswith(said or " ") for line in lines)
    assert len(lines) == (2 if said else 1)
    assert all(command[-1] == "--rows=5" for command in commands)
    assert len(commands) == 6 + 2 * more * bool(said)
