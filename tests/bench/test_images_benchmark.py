"""bench_images runs on small stores, and its figures are ratios."""

from dataclasses import replace

import pytest

from tools.bench import bench_images

TINY = replace(bench_images.QUICK, episodes=1)


@pytest.mark.slow
def test_adds_and_imports_are_measured(tmp_path):
    pytest.importorskip("av")
    pytest.importorskip("simplejpeg")
    for name, question in {"add": bench_images.adds, "import": bench_images.imports}.items():
        (tmp_path / name).mkdir()
        result = question(tmp_path / name, TINY)
        assert all(each > 0 for each in result["median_us"].values())
        assert all(value > 0 for key, value in result.items() if key != "median_us")


@pytest.mark.slow
def test_every_question_is_answered(tmp_path):
    pytest.importorskip("av")
    result = bench_images.measure(tmp_path, TINY)
    assert {*result} == {"draw", "add", "lerobot", "import"}
    assert {*result["draw"]} == {*bench_images.SHAPES}
    assert all({*kinds} == {"camera", "rendered"} for kinds in result["draw"].values())
    assert result["draw"]["96x96"]["camera"]["bytes_over_raw"]["mmreplay"] < 0.5
    nbytes = result["lerobot"]["nbytes"]
    assert nbytes["jpeg 90:420"] < nbytes["raw"] / 4
