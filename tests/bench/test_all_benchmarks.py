"""All benchmarks are run by one command, which writes the docs' tables and plots."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench import all as every
from tools.bench import bench_limits, held_to, make_peers, page, plots, tables
from tools.bench.questions import QUESTIONS, Figure, Ratios
from tools.bench.tables import Target
from tools.bench.turns import OURS

RESULT = {
    "rows": 40_960,
    "speedup": {"add_1_full_ring": {"cpprb": 3.25, "skrl": 1.5}},
    "median_us": {"add_1_full_ring": {OURS: 10.0, "cpprb": 32.5}},
    "fill_mb_per_s": {OURS: 1530.4, "cpprb": 386.0},
}
LIMITS = {"memory_mb_per_s": {"memcpy": 4000.0}, "disk_mb_per_s": {"a": 700.0}}


def record(result):
    return {
        "result": result,
        "day": "2031-02-03",
        "seconds": 4.0,
        "load_before": 0.1,
        "machine": "2 cores",
        "versions": "Python 3.11",
    }


@pytest.fixture
def results():
    return {"bench_add": record(RESULT), "bench_limits": record(LIMITS)}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(40_960, "40,960"), (1530.4, "1,530"), (3.254, "3.25"), ("cgroup", "cgroup")],
)
def test_figures_are_shown_with_three_digits(value, shown):
    assert tables.figure(value) == shown


def test_figures_without_a_peer_stand_in_a_table_with_their_names():
    figures = [
        Figure("fill, MB/s", "fill_mb_per_s"),
        Figure("rows", "rows"),
        Figure("nothing", "not there"),
    ]
    assert page.figure_table(figures, record(RESULT)) == [
        "| | |",
        "|---|---|",
        "| fill, MB/s | mmreplay **1,530**, cpprb **386** |",
        "| rows | **40,960** |",
    ]


RECORDS = {
    **json.loads((page.ROOT / "docs/figures" / page.RECORDED).read_text()),
    **json.loads((page.ROOT / "docs/figures" / page.RAW).read_text()),
}


def test_the_page_and_the_readme_hold_the_recorded_figures():
    drawn = (page.ROOT / "docs/figures").glob("benchmarks_*.svg")
    plots = [f"figures/{path.name}" for path in sorted(drawn)]
    written = (page.ROOT / "docs/benchmarks.md").read_text()
    assert written == page.page(RECORDS, plots), "run: python -m tools.bench.page"
    readme = (page.ROOT / "README.md").read_text()
    assert readme == tables.with_block(readme, "readme", page.readme_table(RECORDS))


def test_every_record_answers_a_question_and_every_question_finds_its_figures():
    scripts = [question.script for question in QUESTIONS]
    assert sorted(scripts) == sorted(RECORDS)
    missing = [
        (question.script, row.label)
        for question in QUESTIONS
        for row in (*question.ratios, *question.figures)
        if page.look_up(
            RECORDS[question.script], row.ratios if isinstance(row, Ratios) else row.path
        )
        is None
    ]
    # Nobody ran these originals beyond memory, and no copy loads csv and parquet.
    originals = ("skrl", "pytorchrl", "tmrl", "velora")
    assert {label for script, label in missing if script == "bench_convert"} == {
        "vectors, load csv",
        "vectors, load parquet",
        "pixels, load parquet",
    }
    assert {label for script, label in missing if script != "bench_convert"} <= {
        f"{name}, original" for name in originals
    }


@pytest.mark.parametrize(
    ("path", "bound", "minimum", "row"),
    [
        ("speedup add_1_full_ring cpprb", 3, True, "3.25 | at least 3 | met"),
        ("speedup add_1_full_ring *", 3, True, "1.5 | at least 3 | **missed**"),
        ("speedup add_1_full_ring *", 3, False, "3.25 | at most 3 | **missed**"),
        ("speedup add_1_full_ring", 3, True, "not measured | at least 3 | "),
        ("speedup nothing cpprb", 3, True, "not measured | at least 3 | "),
        ("rows more", 3, True, "not measured | at least 3 | "),
    ],
)
def test_a_target_is_met_by_the_worst_of_its_figures(results, path, bound, minimum, row):
    target = Target("how", "bench_add", tuple(path.split()), bound, minimum)
    assert target.row(results) == f"| how | `bench_add` | {row} |".replace("  |", " |")


def test_targets_are_of_scripts_that_there_are():
    assert {target.script for target in held_to.TARGETS} <= set(every.SCRIPTS)
    assert set(every.PEERS_OF) <= set(every.SCRIPTS)


def test_a_script_that_is_run_otherwise_has_its_options(monkeypatch, tmp_path):
    commands = []

    def run(command, **_):
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 0, '{"rows": 1}\n', "")

    monkeypatch.setattr(every.subprocess, "run", run)
    assert every.run("bench_beyond_8", tmp_path, ["--quick"], 9)["result"] == {"rows": 1}
    expected = ["-m", "tools.bench.bench_beyond", "--times", "8", "--quick"]
    assert commands[0] == expected
    assert {name for name, *_ in every.OTHERWISE.values()} <= set(every.SCRIPTS)


def test_text_outside_the_generated_blocks_stays():
    text = "a\n<!-- bench:x -->old<!-- /bench:x -->\nb\n"
    new = tables.with_block(text, "x", ["new"])
    assert new == "a\n<!-- bench:x -->\n\nnew\n\n<!-- /bench:x -->\nb\n"
    assert tables.with_block(new, "x", ["new"]) == new
    assert tables.with_block("a\n", "x", ["new"]).startswith("a\n\n<!-- bench:x -->")


@pytest.mark.parametrize(
    "text",
    [
        "<!-- bench:x -->",
        "<!-- /bench:x --> <!-- bench:x -->",
        "<!-- bench:x --> <!-- bench:x --> <!-- /bench:x -->",
    ],
)
def test_unbalanced_block_comments_are_refused(text):
    with pytest.raises(ValueError, match=r"<!-- bench:x --> must be .* got \d and \d\."):
        tables.with_block(text, "x", [])


def test_plots_have_the_limits_and_logarithmic_axes(results, tmp_path):
    limits = plots.limits_of(results)
    assert limits == {"memcpy": 4000.0, "disk": 700.0}
    (line,) = plots.lines(results, plots.TIMES, limits)
    assert line[:2] == ("add: add 1 full ring", {OURS: 10.0, "cpprb": 32.5})
    # 168 bytes at 4,000 bytes a microsecond.
    assert line[2] == pytest.approx(0.042)
    # Numbers of rows are no libraries.
    by_rows = {"few": {"result": {"median_us": {"1000": 3.0, "100000": 4.0}}}}
    assert plots.lines(by_rows, plots.TIMES, {}) == []
    drawn = plots.draw_all(results, tmp_path)
    assert [path.suffix for path in drawn] == [".svg", ".svg"]
    # Powers of ten at the ticks, and names in the legend, are drawn as shapes.
    assert all("<!-- memcpy" in path.read_text() for path in drawn)
    assert "10^{2}" in drawn[0].read_text()


def test_all_is_written_by_one_command(results, tmp_path, monkeypatch, capsys):
    (tmp_path / "figures").mkdir()
    # As of a script that was run by itself.
    results["bench_limits"].pop("load_before")
    (tmp_path / "figures" / every.RAW).write_text(json.dumps(results))
    monkeypatch.setattr(sys, "argv", ["all", "--redraw", "--docs", str(tmp_path)])
    assert every.main() == 0
    text = (tmp_path / "benchmarks.md").read_text()
    assert text.startswith("# Benchmarks\n")
    assert "| add 1, over cpprb | `bench_add` | 3.25 | at least 3 | met |" in text
    source = "`python -m tools.bench.bench_add`; 2031-02-03; 2 cores; load 0.1 before; 4 s."
    assert f"\n{source}\n" in text
    assert "bench_limits`; 2031-02-03; 2 cores; 4 s.\n" in text
    assert "| 1 row, full ring | 10 | **3.25** (32.5) | **1.5** |" in text
    assert text.count("\nNot measured.\n") == len(QUESTIONS) - 2
    for path in re.findall(r"!\[.*\]\((.*)\)", text):
        assert (tmp_path / path).exists()
    assert capsys.readouterr().out.endswith("benchmarks.md\n")


def backwards(value):
    if isinstance(value, dict):
        return {key: backwards(each) for key, each in reversed(value.items())}
    return value


@pytest.mark.slow
def test_a_page_is_the_same_when_it_is_written_from_the_record(tmp_path, monkeypatch):
    figures = tmp_path / "figures"
    results = {"bench_ragged": backwards(RECORDS["bench_ragged"])}
    written = every.publish(results, tmp_path / "benchmarks.md", figures)
    texts = [path.read_text() for path in written]
    monkeypatch.setattr(sys, "argv", ["all", "--redraw", "--docs", str(tmp_path)])
    assert every.main() == 0
    assert [path.read_text() for path in written] == texts


@pytest.mark.slow
def test_a_script_runs_in_the_interpreter_that_is_named(tmp_path, monkeypatch):
    options = ["bench_tree", "--quick", "--peers", "", "--docs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["all", *options, "--python", sys.executable])
    assert every.main() == 0
    kept = json.loads((tmp_path / "figures" / every.RAW).read_text())
    assert kept["bench_tree"]["result"]["median_us"]
    assert "numpy" in kept["bench_tree"]["versions"]


@pytest.mark.slow
def test_a_script_that_fails_leaves_the_others_results(results, tmp_path, monkeypatch, capsys):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / every.RAW).write_text(json.dumps(results))
    options = ["bench_add", "--docs", str(tmp_path), "--folder", "/nowhere/at/all"]
    monkeypatch.setattr(sys, "argv", ["all", *options, "--python", sys.executable])
    assert every.main() == 1
    assert "bench_add: ended with 1" in capsys.readouterr().err
    kept = json.loads((tmp_path / "figures" / every.RAW).read_text())
    assert kept == results


def test_scripts_get_the_peers_that_they_support(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["all", "--peers", "cpprb,cpprb_mmap"])
    options = every._options()
    assert every._passed("bench_add", options) == ["--peers", "cpprb"]
    assert every._passed("bench_cold", options) == ["--peers", "cpprb_mmap"]
    assert every._passed("bench_pixels", options) == ["--peers", ""]
    assert every._passed("bench_memory", options) == []


def test_every_peer_is_pinned():
    lines = make_peers.PINS.read_text().splitlines()
    named = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", line) for line in named)
    commands = make_peers.steps(Path("/e"))
    assert all(command[0] == "/e/bin/python" for command in commands)


@pytest.mark.slow
def test_limits_are_measured(tmp_path):
    from tests.bench.test_disk_benchmarks import leaves_the_cache

    if not leaves_the_cache(tmp_path):
        pytest.skip("files here live in memory alone, so none can be made cold")
    sizes = bench_limits.Sizes(1 << 20, 2 * bench_limits.BLOCK, 1)
    found = bench_limits.measure(tmp_path, sizes)
    assert all(rate > 0 for group in found.values() for rate in group.values())
