"""Several buffers drawn from by priority as one, against one buffer with all rows."""

import pickle

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, FormatError, SchemaError
from mmreplay.samplers.divided import DrawAtShares
from mmreplay.samplers.joint import DrawPlan, JointWeights
from tests.samplers.frequencies import assert_distribution

SCHEMA = mr.Schema({"n": mr.Field((), "int64")})


def made(numbers, path=None, capacity=None, **options):
    """A buffer of rows that hold these numbers, with a sampler by priority."""
    sampler = mr.PrioritizedSampler(**{"name": None, "seed": 0, **options})
    engine = "memory" if path is None else "memmap"
    capacity = len(numbers) if capacity is None else capacity
    buffer = mr.ReplayBuffer.create(
        path, SCHEMA, max(1, capacity), engine=engine, sampler=sampler, commit_every=None
    )
    if len(numbers):
        buffer.extend(n=np.asarray(numbers))
    return buffer


def prioritize(buffer, values):
    """Give rows 0 to len(values) these priorities."""
    count = len(values)
    with buffer.view.lock:
        buffer.sampler.update_priorities(
            buffer.view, np.zeros(count, np.int64), np.arange(count), np.asarray(values)
        )


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("normalize", ["batch", "buffer", "mean"])
def test_over_one_buffer_the_draws_are_the_samplers_own(stratified, normalize, rng):
    options = {"stratified": stratified, "normalize": normalize, "seed": 5}
    values = rng.random(300) ** 4
    alone, part = made(np.arange(300), **options), made(np.arange(300), **options)
    for buffer in (alone, part):
        prioritize(buffer, values)
    one = mr.concat([part], by="priority", seed=5)
    for _ in range(20):
        expected, batch = alone.sample(64), one.sample(64)
        np.testing.assert_array_equal(batch.positions, expected.positions)
        np.testing.assert_array_equal(batch.probabilities, expected.probabilities)
        np.testing.assert_allclose(batch.weights, expected.weights, rtol=1e-6)
        new = rng.random(64)
        alone.update_priorities(expected, new)
        one.update_priorities(batch, new)


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("normalize", ["batch", "buffer", "mean"])
@pytest.mark.parametrize("windows", [False, True])
def test_steps_are_drawn_and_weighted_as_from_one_buffer_of_all(
    stratified, normalize, windows, rng
):
    sizes = (3, 400, 40)
    options = {"stratified": stratified, "normalize": normalize, "beta": 0.7}
    values = [rng.random(size) + 0.01 for size in sizes]
    buffers = [made(np.arange(size), **options) for size in sizes]
    for buffer, own in zip(buffers, values, strict=True):
        prioritize(buffer, own)
        if windows:
            # One step each: the windows' starts are the steps themselves.
            buffer.sampler = mr.SequenceSampler(1, buffer.sampler)
    several = mr.concat(buffers, by="priority", seed=1)
    masses = np.concatenate([(v.astype(np.float32) + 1e-6) ** 0.6 for v in values])
    law = masses / masses.sum()
    firsts = np.array([0, 3, 403])
    drawn = []
    for _ in range(300):
        batch = several.sample(128)
        rows = firsts[batch.buffer_ids] + batch.positions
        drawn += rows.tolist()
        np.testing.assert_allclose(batch.probabilities, law[rows], rtol=1e-6)
        weights = (len(law) * law[rows]) ** -0.7
        scale = {"batch": weights.max(), "buffer": ((len(law) * law.min()) ** -0.7), "mean": 1.0}[
            normalize
        ]
        np.testing.assert_allclose(batch.weights, weights / scale, rtol=1e-5)
        assert (np.diff(batch.buffer_ids) >= 0).all()
    # Stratified draws vary less than independent ones, so the test is conservative.
    assert_distribution(drawn, dict(enumerate(law)))


def test_a_buffer_of_a_thousandth_of_the_rows_gets_a_thousandth(rng):
    few, many = made(np.arange(10)), made(np.arange(10_000))
    several = mr.concat([few, many], by="priority", seed=0)
    drawn = np.zeros(10, np.int64)
    for _ in range(1000):
        batch = several.sample(1000)
        own = batch.positions[batch.buffer_ids == 0]
        drawn += np.bincount(own, minlength=10)
    # 1,000 batches of 1,000 steps: stratified, each batch takes 0 or 1 or 2 of the ten
    # rows, 0.999 on average, with a variance below 1 a batch: 5 standard deviations.
    assert abs(drawn.sum() - 1e6 * 10 / 10_010) < 5 * 1000**0.5


def brute_force(known, now, points):
    """Where points fall: each buffer's row by the masses of now, and q."""
    fractions = known / known.sum()
    edges = np.concatenate([[0], np.cumsum(fractions)])
    found = []
    for point in points:
        number = int(np.searchsorted(edges[1:-1], point, side="right"))
        share = (point - edges[number]) / fractions[number]
        masses = now[number]
        row = int(np.searchsorted(np.cumsum(masses), share * masses.sum(), "right"))
        row = min(row, len(masses) - 1)
        found.append((number, row, fractions[number] * masses[row] / masses.sum()))
    return found


@pytest.mark.slow
def test_weights_stay_unbiased_where_masses_moved_since_the_plan(rng):
    """The mean of a value, estimated by stale sums, is the mean of all rows now."""
    then = [rng.random(30) + 0.1, rng.random(100) + 0.1]
    now = [then[0] * 3, np.concatenate([then[1] * 0.5, np.full(200, 1.5)])]
    values = [rng.normal(1, 1, 30) + np.sqrt(now[0]), rng.normal(3, 1, 300)]
    known = np.array([masses.sum() for masses in then])
    truth = np.concatenate(values).mean()
    size, count = 32, 4000
    total = sum(masses.sum() for masses in now)
    estimates, wrong = [], []
    for _ in range(count):
        points = (np.arange(size) + rng.random(size)) / size
        plan = DrawPlan.of(known, points)
        fractions, shares = plan.fractions, plan.shares
        assert sum(map(len, shares)) == size
        rows = []
        for number, own in enumerate(shares):
            cumulated = np.cumsum(now[number])
            at = np.searchsorted(cumulated, own * cumulated[-1], side="right")
            at = np.minimum(at, len(cumulated) - 1)
            share = now[number][at] / cumulated[-1]
            rows += [(number, row, q) for row, q in zip(at, fractions[number] * share, strict=True)]
        for mine, other in zip(rows, brute_force(known, now, points), strict=True):
            assert mine[:2] == other[:2]
            assert mine[2] == pytest.approx(other[2])
        weights = np.array([1 / (330 * q) for _, _, q in rows])
        drawn = np.array([values[number][row] for number, row, _ in rows])
        estimates.append((weights * drawn).mean())
        weights = np.array([total / (330 * now[n][row]) for n, row, _ in rows])
        wrong.append((weights * drawn).mean())
    # Five standard errors; by the probabilities of one tree of now it is far off.
    limit = 5 / count**0.5
    assert abs(np.mean(estimates) - truth) < limit * np.std(estimates)
    assert abs(np.mean(wrong) - truth) > limit * np.std(wrong)


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_every_point_has_one_buffer_and_none_without_mass(count, rng):
    for _ in range(300):
        totals = 10.0 ** rng.uniform(-300, 300, count) * (rng.random(count) < 0.7)
        if not totals.sum() > 0:
            continue
        points = np.sort(rng.random(50))
        points[rng.integers(50)] = 0.0
        points[-1] = 1 - 2.0**-53
        plan = DrawPlan.of(totals, points)
        fractions, shares = plan.fractions, plan.shares
        assert sum(map(len, shares)) == 50
        for total, fraction, own in zip(totals, fractions, shares, strict=True):
            assert total > 0 or not len(own)
            assert ((own >= 0) & (own < 1)).all()
            assert fraction == total / totals.sum()


def test_new_rows_enter_at_the_highest_priority_of_all_buffers():
    first = made(np.arange(4), capacity=8)
    second = made(np.arange(4), capacity=8)
    several = mr.concat([first, second], by="priority", seed=0)
    batch = several.sample(8)
    several.update_priorities(batch, np.where(batch.buffer_ids == 1, 50.0, 0.5))
    several.sample(8)
    first.extend(n=np.arange(4))
    several.sample(8)
    store = first.sampler.priorities
    assert (store.column.values[4:8] == 50).all()
    assert store.initial == 50
    first.sampler.enter_at(0.2)  # never below the initial one
    assert store.initial == 1.0


def test_rows_that_are_overwritten_before_they_are_copied_are_drawn_again(tmp_path):
    """By the same shares, with the masses and probabilities of then."""
    path = tmp_path / "b"
    writer = made(np.arange(100), path, name=None)
    sampler = mr.PrioritizedSampler(name=None, seed=0)
    reader = mr.ReplayBuffer.open(path, sampler=sampler)
    other = made(np.arange(1000, 1100))
    several = mr.concat([reader, other], by="priority", seed=0)
    loader = mr.ReplayLoader(several, 64, prefetch=1)
    steps = iter(loader)
    for number in range(50):
        batch = next(steps)
        numbers = batch["n"].numpy()
        ids = batch.buffer_ids.numpy()
        positions = batch.positions.numpy()
        np.testing.assert_array_equal(numbers, np.where(ids == 0, positions, positions + 1000))
        np.testing.assert_allclose(batch.probabilities.numpy(), 1 / 200, rtol=1e-6)
        np.testing.assert_array_equal(batch.weights.numpy(), np.ones(64))
        writer.extend(n=np.arange(100 + 40 * number, 140 + 40 * number))
    loader.close()
    reader.close()
    writer.close()


@pytest.mark.parametrize("prefetch", [1, 3])
def test_loaders_give_the_batches_of_concat(prefetch, rng):
    values = [rng.random(50), rng.random(200)]

    def several():
        buffers = [made(np.arange(len(own)), normalize="batch") for own in values]
        for buffer, own in zip(buffers, values, strict=True):
            prioritize(buffer, own)
        return mr.concat(buffers, by="priority", seed=3)

    plain = several()
    with mr.ReplayLoader(several(), 32, prefetch=prefetch) as loader:
        for batch, _ in zip(loader, range(10), strict=False):
            expected = plain.sample(32)
            for name in ("buffer_ids", "positions", "probabilities", "weights"):
                mine = getattr(batch, name).numpy()
                np.testing.assert_array_equal(mine, getattr(expected, name), name)


def test_draws_of_a_dataset_have_the_weights_of_the_whole(tmp_path, rng):
    from torch.utils.data import DataLoader

    buffers = [made(np.arange(n), tmp_path / str(n), name=None) for n in (20, 200)]
    for buffer in buffers:
        prioritize(buffer, rng.random(len(buffer)))
    state = mr.concat(buffers, by="priority", seed=3).state_dict()
    expected = mr.concat(buffers, by="priority", seed=0)
    expected.load_state_dict(state)
    dataset = mr.ConcatDataset(mr.concat(buffers, by="priority", seed=3))
    for num_workers in (0, 2):
        draws = dataset.draws(32, 4)
        draws.load_state_dict(state)
        expected.load_state_dict(state)
        loader = DataLoader(dataset, sampler=draws, batch_size=None, num_workers=num_workers)
        for batch in loader:
            other = expected.sample(32)
            np.testing.assert_array_equal(batch.positions.numpy(), other.positions)
            np.testing.assert_array_equal(batch.weights.numpy(), other.weights)
            assert batch.weights.max() == 1.0
    for buffer in buffers:
        buffer.close()


def test_a_state_continues_the_draws_and_fits_no_other_division(rng):
    def several(by="priority"):
        return mr.concat([made(np.arange(n)) for n in (10, 30)], by=by, seed=7)

    first, second = several(), several()
    for _ in range(3):
        batch = first.sample(16)
        first.update_priorities(batch, np.abs(batch["n"]) + 0.5)
    state = pickle.loads(pickle.dumps(first.state_dict(priorities=True)))
    second = mr.concat(list(first.buffers), by="priority", seed=1)
    expected = [first.sample(16).positions.tolist() for _ in range(3)]
    second.load_state_dict(state)
    assert [second.sample(16).positions.tolist() for _ in range(3)] == expected
    with pytest.raises(FormatError, match="by"):
        several("rows").load_state_dict(state)
    with pytest.raises(FormatError, match="by"):
        several().load_state_dict(several("rows").state_dict())
    assert "by" not in several("rows").state_dict()
    assert repr(several()).endswith(", by='priority'>")


ALONE = (
    "{} cannot draw a batch in parts, which concat by priority needs. Use one that can, such as "
    "UniformSampler, StratifiedSampler or PrioritizedSampler, or a SequenceSampler around it."
)
UNLIKE = (
    "by='priority' needs samplers of one class with equal arguments in all buffers, but {}. Open "
    "the buffers with such samplers, or leave `by` out."
)


class OwnDraw(mr.PrioritizedSampler):
    """Counts its draws."""

    drawn = 0

    def draw(self, view, batch_size):
        self.drawn += 1
        return super().draw(view, batch_size)


class OwnState(mr.PrioritizedSampler):
    """Has a word of its own in its state."""

    def state_dict(self, priorities=False):
        return {**super().state_dict(priorities), "own": 1}


class OwnArguments(mr.PrioritizedSampler):
    """Has a constructor of its own."""

    def __init__(self, extra=3, **options):
        super().__init__(**options)
        self.extra = extra


class OwnWindows(mr.SequenceSampler):
    """Has a constructor of its own around one of priorities."""

    def __init__(self, inside, **options):
        super().__init__(2, inside, **options)


@pytest.mark.parametrize(
    "makes",
    [
        [OwnDraw, OwnDraw],
        [mr.PrioritizedSampler, OwnState],
        [OwnState, mr.PrioritizedSampler],
        [OwnArguments, mr.PrioritizedSampler],
        [lambda **options: OwnWindows(OwnDraw(**options))] * 2,
    ],
)
def test_a_class_of_others_that_keeps_to_the_priorities_draws_as_theirs(makes, rng):
    values = [rng.random(9), rng.random(40)]

    def several(makes):
        buffers = [made(np.arange(len(own))) for own in values]
        for buffer, own, make in zip(buffers, values, makes, strict=True):
            buffer.sampler = make(name=None, seed=0)
            count = len(own)
            with buffer.view.lock:
                buffer.sampler.update_priorities(
                    buffer.view, np.zeros(count, np.int64), np.arange(count), own
                )
        return mr.concat(buffers, by="priority", seed=3)

    own = several(makes)
    plain = several(
        [mr.PrioritizedSampler] * 2
        if isinstance(makes[0], type)
        else [lambda **options: mr.SequenceSampler(2, mr.PrioritizedSampler(**options))] * 2
    )
    for _ in range(3):
        batch, expected = own.sample(32), plain.sample(32)
        np.testing.assert_array_equal(batch.positions, expected.positions)
        np.testing.assert_array_equal(batch.weights, expected.weights)
        for several_of, drawn in ((own, batch), (plain, expected)):
            several_of.update_priorities(drawn, np.asarray(drawn.positions) + 1.0)


class Newest(mr.UniformSampler):
    """Has an argument that the samplers of mmreplay do not know."""

    def __init__(self, seed=None, *, window=100):
        super().__init__(seed)
        self.window = window


class Forgetful(mr.UniformSampler):
    """Does not keep its argument."""

    def __init__(self, seed=None, *, window=100):
        super().__init__(seed)


class OtherMass(mr.UniformSampler):
    """Replaces a part of the law."""

    def points(self, numbers):
        return np.sort(numbers)


class OtherDraw(mr.StratifiedSampler):
    """Replaces the draw of one that keeps no priorities."""

    def draw(self, view, batch_size):
        return mr.UniformSampler(0).draw(view, batch_size)


@pytest.mark.parametrize(
    ("samplers", "message"),
    [
        (
            [Newest(window=7), Newest(window=100)],
            UNLIKE.format("window is 100 in buffer 1, and 7 in buffer 0"),
        ),
        (
            [Forgetful(), Forgetful()],
            "Forgetful must say with which window it was made, and has no such attribute. Define "
            "settings(), or keep the argument.",
        ),
        (
            [mr.UniformSampler(), OtherMass()],
            UNLIKE.format("buffer 1 has a OtherMass, and buffer 0 a UniformSampler"),
        ),
        ([OtherDraw(0)], ALONE.format("OtherDraw")),
        (
            [mr.PrioritizedSampler(name=None), mr.RankPrioritizedSampler(name=None)],
            ALONE.format("RankPrioritizedSampler"),
        ),
        (
            [mr.PrioritizedSampler(name=None), mr.PrioritizedSampler(0.7, name=None)],
            UNLIKE.format("alpha is 0.7 in buffer 1, and 0.6 in buffer 0"),
        ),
        (
            [
                mr.SequenceSampler(2, mr.PrioritizedSampler(name=None)),
                mr.PrioritizedSampler(name=None),
            ],
            UNLIKE.format(
                "buffer 1 has a PrioritizedSampler, and buffer 0 a SequenceSampler around "
                "PrioritizedSampler"
            ),
        ),
        (
            [
                mr.PrioritizedSampler(name=None),
                mr.SequenceSampler(2, mr.PrioritizedSampler(name=None)),
            ],
            UNLIKE.format(
                "buffer 1 has a SequenceSampler around PrioritizedSampler, and buffer 0 a "
                "PrioritizedSampler"
            ),
        ),
        (
            [mr.SequenceSampler(2), mr.SequenceSampler(3)],
            UNLIKE.format("length is 3 in buffer 1, and 2 in buffer 0"),
        ),
        (
            [mr.StratifiedSampler(0), mr.UniformSampler(0)],
            UNLIKE.format("buffer 1 has a UniformSampler, and buffer 0 a StratifiedSampler"),
        ),
        (
            [mr.SequenceSampler(2, mr.DistinctSampler(0))],
            ALONE.format("SequenceSampler around DistinctSampler"),
        ),
        ([mr.ShuffledSampler(0)], ALONE.format("ShuffledSampler")),
    ],
)
def test_samplers_that_cannot_draw_as_one_are_named(samplers, message):
    buffers = [made(np.arange(9)) for _ in samplers]
    for buffer, sampler in zip(buffers, samplers, strict=True):
        buffer.sampler = sampler
    with pytest.raises(SchemaError) as error:
        mr.concat(buffers, by="priority")
    assert str(error.value) == message


def test_a_sampler_replaced_later_is_refused_at_the_draw():
    buffers = [made(np.arange(9)) for _ in range(2)]
    several = mr.concat(buffers, by="priority")
    several.sample(4)
    buffers[1].sampler = mr.UniformSampler(0)
    with pytest.raises(SchemaError, match="buffer 1 has a UniformSampler"):
        several.sample(4)


def test_wrong_arguments_are_refused():
    buffers = [made(np.arange(9)) for _ in range(2)]
    with pytest.raises(SchemaError, match=r"by must be .*'rows'.*got 'priorities'"):
        mr.concat(buffers, by="priorities")
    with pytest.raises(SchemaError, match="by must be 'rows' where shares are given"):
        mr.concat(buffers, [1, 1], by="priority")


def test_buffers_without_mass():
    empty, full = made([], capacity=4), made(np.arange(9), eps=1e-6)
    several = mr.concat([empty, full], by="priority", seed=0)
    assert (several.sample(64).buffer_ids == 1).all()
    empty.extend(n=np.arange(2))
    assert set(several.sample(64).buffer_ids.tolist()) == {0, 1}
    nothing = mr.concat([made([], capacity=4)], by="priority")
    with pytest.raises(EmptyError, match="the 1 buffers have 0 legal starts"):
        nothing.sample(4)
    zero = made(np.arange(9), eps=0.0)
    prioritize(zero, np.zeros(9))
    with pytest.raises(EmptyError, match="9 legal starts, and all of them priority 0"):
        mr.concat([zero], by="priority").sample(4)


def test_weights_of_tiny_probabilities_are_finite():
    probabilities = np.array([1e-300, 1e-10, 0.5])
    weights = JointWeights(1.0, 0.0).of(probabilities)
    np.testing.assert_allclose(weights, [1.0, 0.0, 0.0], atol=1e-30)
    part = DrawAtShares(mr.UniformSampler(0), np.array([0.0, 0.5]), 3, None)
    buffer = made(np.arange(4))
    for _ in range(2):  # the same draw each time
        draw = part.draw(buffer.view, 99)
        assert draw.positions.tolist() == [0, 2]
        assert draw.key == 3
