"""The comparison of learning curves runs, small, and tells what differs."""

import numpy as np
import pytest

from tools import curves


def test_scores_of_two_laws_are_told_apart():
    alike = [1.0, 2.0, 3.0, 4.0]
    assert curves.p_value(alike, alike[::-1]) == 1
    # Of 70 ways to deal eight scores, two part them so.
    assert curves.p_value(alike, [9.0, 9.5, 9.1, 9.9]) == pytest.approx(2 / 70)


def test_the_score_is_of_the_last_quarter():
    curve = np.array([[10, 60, 80, 100], [1, 2, 4, 6]], float)
    assert curves.score(curve, 100) == 5
    assert curves.score(curve[:, :2], 100) == 2


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", curves.TASKS)
def test_agents_are_trained_from_both_sides(tmp_path, name):
    pytest.importorskip("stable_baselines3", reason="stable-baselines3 is missing")
    pytest.importorskip("matplotlib")
    found = {side: [curves.run(name, side, 0, 450, tmp_path)] for side in curves.SIDES}
    for (curve,) in found.values():
        assert curve.shape[1] >= 2
        assert (np.diff(curve[0]) > 0).all()
    curves.plot({name: found}, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").stat().st_size > 1000
