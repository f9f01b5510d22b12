"""The comparison of learning curves runs, small, and tells what differs."""

from importlib.util import find_spec

import numpy as np
import pytest

from tools import curves


def test_scores_of_two_distributions_are_distinguished():
    alike = [1.0, 2.0, 3.0, 4.0]
    assert curves.p_value(alike, alike[::-1]) == 1
    # Of 70 ways to deal eight scores, two part them so.
    assert curves.p_value(alike, [9.0, 9.5, 9.1, 9.9]) == pytest.approx(2 / 70)


def test_random_deals_stand_for_all_of_many_scores(monkeypatch):
    """Deals of 6 scores of 12 at random, against all 924: within 4 sigma of 100,000."""
    rng = np.random.default_rng(3)
    one, other = rng.normal(0, 1, (2, 6)) + np.array([[0.0], [0.9]])
    exact = curves.p_value(one.tolist(), other.tolist())
    assert 0.02 < exact < 0.5
    monkeypatch.setattr(curves, "MAX_EXACT", 5)
    dealt = curves.p_value(one.tolist(), other.tolist())
    assert dealt != exact
    sigma = (exact * (1 - exact) / curves.DEALS) ** 0.5
    assert dealt == pytest.approx(exact, abs=4 * sigma)


def test_the_table_says_how_many_deals_were_made():
    curve = np.array([[10, 60, 80, 100], [1, 2, 4, 6]], float)
    for seeds, deals in ((3, "all"), (20, "100,000 random")):
        sides = {side: [curve] * seeds for side in curves.SIDES}
        table = curves.scores_of({"DQN": sides})["DQN"]
        assert table["deals"] == deals
        assert table["p_value"] == {"disk": 1.0, "killed": 1.0}


def test_the_score_is_of_the_last_quarter():
    curve = np.array([[10, 60, 80, 100], [1, 2, 4, 6]], float)
    assert curves.score(curve) == 5
    assert curves.score(curve[:, :2]) == 2


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("DQN", 450),
        ("SAC", 450),
        ("TD3", 450),
        ("DDPG", 450),
        ("PPO", 4096),
        ("NeuroFlow", 4),
        ("pytorchrl DDPG", 1000),
    ],
)
def test_agents_are_trained_from_all_sides(tmp_path, name, steps):
    module = curves.MODULES[curves.TASKS[name]["library"]]
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    found = {side: [curves.run(name, side, 0, steps, tmp_path)] for side in curves.SIDES}
    for (curve,) in found.values():
        assert curve.shape[1] >= 2
        assert (np.diff(curve[0]) >= 0).all()
    if find_spec("matplotlib") is None:
        return
    curves.plot({name: found}, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").stat().st_size > 1000
