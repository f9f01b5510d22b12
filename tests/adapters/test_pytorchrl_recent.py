"""pytorchrl's EREBuffer on disk draws from the newest steps, batch by batch fewer."""

import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from mmreplay.adapters.common import values
from mmreplay.adapters.pytorchrl import EREBuffer
from mmreplay.errors import EmptyError, SchemaError
from tests.adapters.pytorchrl_steps import ALGORITHM, actor, recurrent_actor, transition


@pytest.fixture
def make(tmp_path):
    made = []

    def make(size=200, with_=None, **named):
        build = EREBuffer.create_factory(size, path=tmp_path / "ring", **named)
        made.append(build("cpu", with_ or actor(), ALGORITHM, None))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


def order_of(batch, envs):
    """Places of steps as pytorchrl lays them out: step by step, of each environment."""
    seen = batch["Observation"][:, 0].double().numpy()
    return np.rint(np.floor(seen + 1e-3) * envs + (seen % 1) * 10).astype(int)


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("count", [150, 500])
def test_batches_are_uniform_over_windows_that_shrink(make, envs, count):
    storage = make(eta=0.999, cmin=40)
    for number in range(count):
        storage.insert_transition(transition(number, envs))
    stop, rows = count * envs, min(count, 200) * envs
    drawn = [[] for _ in range(4)]
    for _ in range(5):
        for k, batch in enumerate(storage.generate_batches(4, 1000)):
            window = max(int(rows * 0.999 ** (1000 * k / 4)), 40)
            assert batch["ck"] == window
            assert "per_weights" not in batch
            assert (batch["n_step"], batch["idxs"].shape) == (1, (1000, 2))
            drawn[k].append(order_of(batch, envs) - (stop - window))
            assert storage.after_gradients(batch, {"Algorithm": {}}) == {"Algorithm": {}}
    for k, places in enumerate(map(np.concatenate, drawn)):
        window = max(int(rows * 0.999 ** (1000 * k / 4)), 40)
        counts = np.bincount(places, minlength=window)
        assert len(counts) == window
        expected = 5000 / window
        # Chi-square has a mean of window - 1 and a variance of twice that; six standard
        # deviations are exceeded once in a million.
        chi = ((counts - expected) ** 2 / expected).sum()
        assert chi < window - 1 + 6 * np.sqrt(2 * window), k


def test_less_than_cmin_are_drawn_uniformly_whatever_alpha(make):
    storage = make(eta=0.9, cmin=50, alpha=0.6)
    with pytest.raises(EmptyError, match=r"Insert transitions first\."):
        next(storage.generate_batches(1, 4))
    for number in range(49):
        storage.insert_transition(transition(number))
    for batch in storage.generate_batches(3, 2000):
        assert batch["ck"] == 49
        assert "per_weights" not in batch
        assert len(batch["Observation"].unique()) == 49
        # Without weights there is nothing to learn.
        storage.after_gradients(batch, {"Algorithm": {}})
        assert "ck" in batch
    storage.insert_transition(transition(49))
    assert "per_weights" in next(storage.generate_batches(1, 4))


@pytest.mark.parametrize("envs", [1, 2])
def test_priorities_count_within_the_window_as_those_of_a_list(make, monkeypatch, envs):
    rng = np.random.default_rng(3)
    options = {"epsilon": 0.1, "alpha": 0.7, "beta": 0.5, "default_error": 2.0}
    # The draws depend neither on the seed outside nor on storages made before. Under
    # 58 a step with the highest error is overwritten, with 1 environment and with 2.
    monkeypatch.setattr(values, "_seeded", Counter())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(58)
        storage = make(60, eta=0.9985, cmin=20, **options)
    errors, number = {}, 0
    for _ in range(12):
        for _ in range(int(rng.integers(1, 20)) if errors else 40):
            # A new step overwrites the oldest of 60, whose error no longer counts.
            remaining = [errors[place] for place in sorted(errors)[-59 * envs :]]
            entry = max(2.0, max(remaining, default=0))
            for env in range(envs):
                errors[number * envs + env] = entry
            # New rows enter when they are first looked at.
            storage.insert_transition(transition(number, envs))
            storage._prioritized.priorities.follow(storage._ring.view)
            number += 1
        for k, batch in enumerate(storage.generate_batches(3, 64)):
            alive = sorted(errors)[-60 * envs :]
            window = max(int(len(alive) * 0.9985 ** (1000 * k / 3)), 20)
            assert batch["ck"] == window
            places = alive[-window:]
            shares = np.array([errors[place] for place in places]) ** 0.7
            shares /= shares.sum()
            weights = (window * shares) ** -0.5
            weights /= weights.max()
            expected = dict(zip(places, weights, strict=True))
            drawn = order_of(batch, envs)
            assert set(drawn) <= set(places)
            np.testing.assert_allclose(
                batch["per_weights"][:, 0], [expected[place] for place in drawn], 1e-5
            )
            told = {place: float(rng.random() * 5) for place in drawn}
            given = torch.tensor([told[place] for place in drawn])[:, None]
            storage.after_gradients(batch, {"Algorithm": {"errors": given}})
            assert not {"idxs", "ck"} & set(batch)
            errors |= {place: error + 0.1 for place, error in told.items()}


def test_priorities_draw_in_their_proportion_within_the_window(make):
    storage = make(alpha=1.0, eta=0.998, cmin=10, default_error=1.0)
    for number in range(100):
        storage.insert_transition(transition(number))
    for _ in range(10):
        for batch in storage.generate_batches(2, 200):
            errors = torch.where(batch["Observation"] % 2 == 1, 3.0, 1.0)
            storage.after_gradients(batch, {"Algorithm": {"errors": errors}})
    whole, part = storage.generate_batches(2, 8000)
    assert (whole["ck"], part["ck"]) == (100, 36)
    assert float(part["Observation"].min()) == 64
    for batch in (whole, part):
        odd = (batch["Observation"] % 2 == 1).float().mean()
        # Five standard deviations of 8,000 draws are 0.025.
        assert abs(odd - 0.75) < 0.025


def test_n_step_windows_are_of_steps_that_are_complete(make):
    storage = make(n_step=3, eta=0.998, cmin=10)
    for number in range(52):
        storage.insert_transition(transition(number, reward=1.0))
    whole, part = storage.generate_batches(2, 500)
    assert (whole["ck"], part["ck"]) == (50, 18)
    assert (float(part["Observation"].min()), float(part["Observation"].max())) == (32, 49)
    assert torch.allclose(part["Reward"], torch.full((500, 1), 2.71))
    assert torch.equal(part["NextObservation"], part["Observation"] + 3)


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_sequences_are_the_newest_of_each_environment(make, alpha):
    storage = make(with_=recurrent_actor(), eta=0.999, cmin=40, alpha=alpha)
    for number in range(5):
        storage.insert_transition(transition(number, 2))
    # 10 rows of both environments are less than cmin.
    batch = next(storage.generate_batches(1, 9))
    assert (batch["per_weights"], batch["ck"]) == (1.0, 1)
    for number in range(5, 62):
        storage.insert_transition(transition(number, 2))
    # 20 sequences of each, at every third step; 2 of each environment are left.
    firsts = [set() for _ in range(4)]
    for _ in range(40):
        for k, batch in enumerate(storage.generate_batches(4, 9)):
            assert batch["ck"] == max(int(20 * 0.999 ** (1000 * k / 4)), 4)
            rows = batch["Observation"].reshape(2, 5)
            assert torch.allclose(rows, rows[:, :1] + torch.arange(5))
            firsts[k] |= {round(float(row), 1) for row in rows[:, 0]}
            if alpha:
                assert batch["per_weights"].shape == (10, 1)
            else:
                assert batch["per_weights"] == 1.0
            errors = torch.ones(6, 1)
            storage.after_gradients(batch, {"Algorithm": {"errors": errors}})
            assert ("ck" in batch) == (alpha == 0)
    for k, seen in enumerate(firsts):
        newest = [3 * i for i in range(20)][-max(int(20 * 0.999 ** (250 * k)), 4) :]
        assert seen <= {round(i + env / 10, 1) for i in newest for env in range(2)}
        # 80 draws miss one of at most 40, a quarter of them at most.
        assert len(seen) > len(newest)


def slopes_of(returns, eta):
    """What pytorchrl's formula makes of returns, one after the other."""
    found, kept, most, least = [], [], -np.inf, 0.0
    for each in returns:
        kept = [*kept, each][-20:]
        if len(kept) < 20:
            continue
        slope = np.gradient(kept).mean()
        most = slope if slope > most else most * 0.9999
        least = abs(slope) if slope < -least else least * 0.9999
        if slope:
            slope /= most if slope > 0 else least
        rank = np.abs(np.linspace(-1, 1, 1000) - slope).argmin()
        found.append((slope, np.linspace(1, eta, 1000)[rank]))
    return found


def test_eta_follows_the_returns(make):
    storage = make(eta=0.996)
    returns = np.random.default_rng(2).normal(size=80).cumsum().tolist()
    found = []
    for each in returns:
        info = {"Algorithm": {}, "Episodes": {"TrainReward": each}}
        told = storage.update_eta(info)["Algorithm"]
        if told:
            assert told["eta"] == storage.eta
            found.append((told["RewardGradient"], told["eta"]))
    assert found == slopes_of(returns, 0.996)
    assert min(eta for _, eta in found) < 0.9965
    assert storage.initial_eta == 0.996
    # Nothing is added where no episode ended.
    storage.update_eta({"Algorithm": {}})
    assert len(storage.eps_reward) == 20


def test_returns_that_stay_the_same_leave_eta_in_the_middle(make):
    storage = make(eta=0.99)
    for _ in range(25):
        info = {"Algorithm": {}, "Episodes": {"TrainReward": -200.0}}
        told = storage.update_eta(info)["Algorithm"]
    assert told["RewardGradient"] == 0
    assert told["eta"] == pytest.approx(0.995, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("eta", 0, r"\(0, 1\]"),
        ("eta", 1.1, r"\(0, 1\]"),
        ("cmin", 0, "at least 1"),
        ("cmin", 2.5, "an integer"),
        ("beta", 2, r"\[0, 1\]"),
    ],
)
def test_eta_and_cmin_are_judged_where_they_are_given(make, name, value, match):
    wrong = rf"^{name} must be .*{match}.*got {value}"
    with pytest.raises(SchemaError, match=wrong):
        EREBuffer.create_factory(60, **{name: value})
    with pytest.raises(SchemaError, match=wrong):
        EREBuffer(60, "cpu", actor(), ALGORITHM, None, **{name: value})
    storage = make()
    with pytest.raises(SchemaError, match=wrong):
        storage.update_storage_parameter(name, value)


def test_eta_and_cmin_may_change(make):
    storage = make(cmin=10)
    for number in range(100):
        storage.insert_transition(transition(number))
    assert [batch["ck"] for batch in storage.generate_batches(2, 4)] == [100, 100]
    storage.update_storage_parameter("eta", 0.998)
    assert [batch["ck"] for batch in storage.generate_batches(2, 4)] == [100, 36]
    storage.update_storage_parameter("cmin", 50)
    assert [batch["ck"] for batch in storage.generate_batches(2, 4)] == [100, 50]


def test_errors_survive_a_resume_and_draws_go_with_a_pickle(make):
    options = {"alpha": 1.0, "eta": 0.998, "cmin": 10, "default_error": 0.5}
    storage = make(**options)
    for number in range(100):
        storage.insert_transition(transition(number))
    for batch in storage.generate_batches(40, 64):
        errors = torch.where(batch["Observation"] == 95, 20.0, 0.5)
        storage.after_gradients(batch, {"Algorithm": {"errors": errors}})
    kept = pickle.dumps(storage)
    expected = list(storage.generate_batches(2, 32))
    storage.close()
    again = pickle.loads(kept)
    for mine, other in zip(again.generate_batches(2, 32), expected, strict=True):
        assert torch.equal(mine["Observation"], other["Observation"])
        assert torch.equal(mine["per_weights"], other["per_weights"])
    again.close()
    storage = make(**options, resume=True)
    _, part = storage.generate_batches(2, 4000)
    share = (part["Observation"] == 95).float().mean()
    # 20 of 20 + 35 * 0.5; five standard deviations of 4,000 draws are 0.04.
    assert abs(share - 20 / 37.5) < 0.04


def test_errors_stay_with_rows_that_a_reset_keeps(make):
    options = {"alpha": 1.0, "cmin": 10, "default_error": 0.5}
    storage = make(**options)
    for number in range(30):
        storage.insert_transition(transition(number))
    for batch in storage.generate_batches(20, 64):
        errors = torch.where(batch["Observation"] == 25, 20.0, 0.5)
        storage.after_gradients(batch, {"Algorithm": {"errors": errors}})
    storage.close()
    storage = make(**options, resume=True)
    storage.insert_transition(transition(90))
    storage.reset()
    (batch,) = storage.generate_batches(1, 4000)
    share = (batch["Observation"] == 25).float().mean()
    # Five standard deviations of 4,000 draws are 0.04.
    assert abs(share - 20 / 34.5) < 0.04
