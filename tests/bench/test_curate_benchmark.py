"""The benchmark of curation runs, small, and tells what it should."""

import pytest

from tools.bench import bench_curate

pytest.importorskip("av", reason="PyAV is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_every_question_has_its_ratio(tmp_path):
    result = bench_curate.measure(tmp_path, bench_curate.QUICK)
    ratios = {
        "where": ("field_over_moments", "length_over_moments"),
        "merge": ("merged_over_single",),
        "lerobot": ("encoded_again_over_copied",),
        "append": ("many_over_few",),
        "held": ("free_over_held",),
    }
    for question, names in ratios.items():
        for name in names:
            assert result[question][name] > 0, (question, name)
        assert all(each > 0 for each in result[question]["median_us"].values())
