"""Rows that a writer overwrote while they were copied: what becomes of the batch."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer.reader import GenerationReader
from mmreplay.errors import StarvedError
from tests.buffer.support import Twin


@pytest.fixture
def strike(monkeypatch):
    """Have rows overwritten, as far as can be told, whichever a function names.

    It is asked of the positions of every look at once-drawn steps, first steps of
    windows or steps of ragged episodes, and answers bool ``[B]`` or None.
    """

    def strike(which):
        monkeypatch.setattr(
            GenerationReader, "stale", lambda _, ids, positions, before: which(positions)
        )

    return strike


def first_only(which):
    """Strike at the first look alone."""
    answers = [which]
    return lambda positions: answers.pop()(positions) if answers else None


def first(count):
    return first_only(lambda positions: np.arange(len(positions)) < count)


def prioritized(path, normalize="batch"):
    """Twelve steps with priorities 1 to 12, of which the newest cannot be drawn."""
    sampler = mr.PrioritizedSampler(
        alpha=1.0, beta=0.5, eps=0, seed=3, name=None, normalize=normalize
    )
    twin = Twin(path, 40, sampler=sampler)
    twin.extend([[""]] * 13)
    batch = twin.buffer.take(0, np.arange(12))
    twin.buffer.update_priorities(batch, np.arange(1.0, 13))
    return twin.buffer


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("normalize", ["batch", "buffer", "mean"])
def test_weights_are_those_of_one_draw(tmp_path, strike, normalize, seed):
    buffer = prioritized(tmp_path / "b", normalize)
    buffer.sampler.load_state_dict(buffer.sampler.state_dict() | {"seed": seed})
    strike(first(2))
    batch = buffer.sample(6)
    masses = batch.positions + 1.0
    np.testing.assert_allclose(batch.probabilities, masses / masses_of(12))
    scale = {"batch": masses.min(), "buffer": 1.0, "mean": masses_of(12) / 12}
    expected = (scale[normalize] / masses) ** 0.5
    np.testing.assert_allclose(batch.weights, expected, rtol=1e-6)
    np.testing.assert_array_equal(batch["action"], batch.positions + 1)


def masses_of(count):
    return count * (count + 1) / 2


def test_strata_are_those_of_one_draw(tmp_path, strike):
    sampler = mr.PrioritizedSampler(alpha=0.0, seed=0, name=None)
    twin = Twin(tmp_path / "b", 40, sampler=sampler)
    twin.extend([[""]] * 13)
    strike(first(5))
    # Equal masses and as many segments as steps: each is drawn once.
    assert sorted(twin.buffer.sample(12).positions) == list(range(12))


def test_the_key_is_that_of_the_draw_that_was_gathered(tmp_path, strike):
    buffer = prioritized(tmp_path / "b")
    keys, plain = [], buffer.sampler.draw
    buffer.sampler.draw = lambda *args: noted(keys, plain(*args))
    strike(first(1))
    assert buffer.sample(4).key == keys[1] != keys[0]


def noted(keys, draw):
    keys.append(draw.key)
    return draw


def test_a_writer_that_is_always_faster_is_named(tmp_path, strike):
    buffer = prioritized(tmp_path / "b")
    strike(lambda positions: np.arange(len(positions)) < 3)
    message = r"100 attempts: .* overwrote 3 of the 8 drawn steps .*`capacity` \(now 40\)"
    with pytest.raises(StarvedError, match=message):
        buffer.sample(8)


SHUFFLED = {
    "single": lambda: mr.ShuffledSampler(1),
    "shares": lambda: mr.ShuffledSampler(1, batches=5),
    "full": lambda: mr.ShuffledSampler(1, drop_last=True),
    "later": lambda: mr.ignore_earliest(1, mr.ShuffledSampler(1)),
    "windows": lambda: mr.SequenceSampler(3, mr.ShuffledSampler(1)),
    "padded": lambda: mr.EpisodeSampler(mr.ShuffledSampler(1)),
    "ragged": lambda: mr.EpisodeSampler(mr.ShuffledSampler(1), layout="ragged"),
    "mixed": lambda: mr.MixtureSampler([(mr.ShuffledSampler(1), 1)]),
    "recent": lambda: mr.RecentSampler(99, 0.5, mr.ShuffledSampler(1)),
}


def named(batch):
    """What identifies the draws: steps, first steps, or episodes by theirs."""
    if batch.offsets is None:
        return batch.positions.tolist()
    return batch.positions[batch.offsets[:-1]].tolist()


@pytest.mark.parametrize("kind", SHUFFLED)
def test_an_epoch_loses_what_was_overwritten_and_repeats_nothing(tmp_path, strike, kind, rng):
    kinds = [[k] for k in ["", "", "t", "", "t", "", "", "", "t"] * 5]
    twin = Twin(tmp_path / "b", 100, sampler=SHUFFLED[kind]())
    twin.extend(kinds)
    buffer, sampler = twin.buffer, twin.buffer.sampler
    strike(lambda positions: None)
    whole = [named(buffer.sample(4)) for _ in range(30)]
    sampler.load_state_dict(SHUFFLED[kind]().state_dict())
    lost = set()

    def some(positions):
        gone = rng.random(len(positions)) < 0.4
        lost.update(positions[gone].tolist())
        return gone

    strike(some)
    seen = []
    while len(seen) < 30:
        batch = buffer.sample(4)
        assert len(batch) > 0
        windows = batch.window_positions
        steps = batch.positions if windows is None else windows
        np.testing.assert_array_equal(batch["action"], steps + 1)
        seen.append(named(batch))
        if batch.offsets is not None:
            # Whole, although steps of other episodes were gone.
            begins = [
                range(p, p + n) for p, n in zip(seen[-1], np.diff(batch.offsets), strict=True)
            ]
            assert [p for r in begins for p in r] == batch.positions.tolist()
    # What comes is what would have come, in its order, without some of it.
    rest = iter([place for batch in whole for place in batch])
    count = 0
    for place in (place for batch in seen for place in batch):
        for skipped in rest:
            if skipped == place:
                break
            count += 1
            assert lost.intersection(episode(kind, skipped))
        else:
            break
    assert count > 5


def episode(kind, begin):
    """The steps that are lost with one."""
    lengths = {0: 3, 3: 2, 5: 4}
    return range(begin, begin + (lengths[begin % 9] if kind == "ragged" else 1))
