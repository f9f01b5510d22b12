"""The benchmark of the page measures what it says."""

import pytest

from tools.bench import bench_view, view_browser

pytest.importorskip("uvicorn")
SMALL = bench_view.Sizes(
    rows=20_000,
    turns=1,
    killed=1,
    small=60,
    camera=6,
    curve_steps=20_000,
    scrub_s=0.5,
    writing_s=0.5,
    added=2,
)


@pytest.mark.slow
def test_the_server_is_measured(tmp_path):
    found = bench_view.measure_large(tmp_path, SMALL)
    assert 0 < found["overview_cold_s"] < 60
    assert found["table_mib"] > 0
    found = bench_view.measure_curve(tmp_path, SMALL, None)
    assert found["curve_s"] > 0
    assert view_browser.wheel_nbytes(("h11",)) > 10_000


@pytest.mark.slow
@pytest.mark.skipif(
    not view_browser.is_there(), reason="chromium, chromium-driver or selenium missing"
)
def test_the_page_is_measured_in_the_browser(tmp_path):
    found = bench_view.measure(tmp_path, SMALL)
    assert found["page_kib"] < 200
    assert found["wheels_mib"] < 2
    assert 0 < found["opening"]["first_paint_s"] < found["opening"]["overview_s"]
    assert found["curve"]["curve_drawn_s"] > 0
    assert found["frames_s"]["84x84"]["random"] > 1
    assert found["live"]["writer_gone_longest_s"] < 20
    assert set(found["writer_share"]) == {"watched", "browser"}
