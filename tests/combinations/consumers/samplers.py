"""Each sampler: which steps, how probable they are, and what a batch holds of them."""

from collections import Counter
from itertools import pairwise

import numpy as np

import mmreplay as mr
from tests.combinations.build import indices_of
from tests.combinations.compare import (
    assert_column,
    assert_steps,
    expected_step,
    refused,
    same_batch,
)


def sample_by(built, sampler, size):
    """A batch of a sampler, or None where the twin has no legal start."""
    if built.twin.legal():
        return built.buffer.sample_by(sampler, size)
    with refused(mr.EmptyError):
        built.buffer.sample_by(sampler, size)
    return None


def assert_legal(built, batch, among=None):
    """The steps of a batch are legal starts, and their values those stored."""
    legal = built.twin.legal() if among is None else among
    indices = indices_of(batch)
    assert set(indices) <= set(legal), set(indices) - set(legal)
    assert_steps(batch.fields, [expected_step(built.twin, p) for p in indices])
    return indices


def assert_even(drawn, total, factor=1.0):
    """Each step drawn had its part of so many, and none counts more than another.

    Args:
        drawn: A draw, or a batch.
        total: Of how many, one number or one for each step.
        factor: Of how many each step has the probability.
    """
    expected = factor / np.broadcast_to(np.asarray(total), len(drawn.env_ids))
    np.testing.assert_allclose(np.asarray(drawn.probabilities), expected, rtol=1e-6)
    assert (np.asarray(drawn.weights) == 1).all()


def drawn_of(built, sampler, count):
    """Many steps, so that the chance to miss one that may be drawn is below 1e-10.

    Args:
        built: What to draw from.
        sampler: Draws.
        count: Steps that may be drawn.
    """
    draw = sampler.draw(built.buffer.view, 30 * count)
    return draw, indices_of(draw)


def by_env(indices):
    """Indices of each environment that has some, in their order."""
    found = {}
    for index in indices:
        found.setdefault(index[0], []).append(index)
    return found


def assert_resumes(built, make, size=3):
    """A loaded state draws what the sampler itself goes on to draw."""
    if not built.twin.legal():
        return
    one, other = make(1), make(2)
    built.buffer.sample_by(one, size)
    state = one.state_dict()
    expected = [built.buffer.sample_by(one, size) for _ in range(2)]
    other.load_state_dict(state)
    for batch in expected:
        same_batch(built.buffer.sample_by(other, size), batch)


def uniform(built, rng):
    """Each legal start is drawn, and no other, with the same probability."""
    legal = built.twin.legal()
    for options in ({}, {"block": 4}):
        batch = sample_by(built, mr.UniformSampler(seed=3, **options), 5)
        if batch is None:
            return
        assert_legal(built, batch)
        assert_even(batch, len(legal))
    assert set(drawn_of(built, mr.UniformSampler(seed=4), len(legal))[1]) == set(legal)
    assert_resumes(built, lambda seed: mr.UniformSampler(seed=seed))


def shuffled(built, rng):
    """An epoch has each legal start once, in any number of ranks and batches."""
    legal, view = built.twin.legal(), built.buffer.view
    if not legal:
        with refused(mr.EmptyError):
            built.buffer.sample_by(mr.ShuffledSampler(seed=1), 3)
        return
    for options in ({}, {"block": 3}, {"shuffle": False}, {"batches": 2}):
        sampler, drawn = mr.ShuffledSampler(seed=5, **options), []
        while sampler.epoch == 0 and sampler.more(view, 4):
            draw = sampler.draw(view, 4)
            assert_even(draw, len(legal))
            drawn += indices_of(draw)
        assert sorted(drawn) == legal, options
    shares = []
    for rank in range(2):
        sampler = mr.ShuffledSampler(seed=5, rank=rank, num_ranks=2)
        try:
            while sampler.epoch == 0 and sampler.more(view, 4):
                shares += indices_of(sampler.draw(view, 4))
        except mr.EmptyError:
            assert len(legal) < 2
    assert set(shares) <= set(legal)
    assert len(legal) < 2 or set(shares) == set(legal)
    assert_resumes(built, lambda seed: mr.ShuffledSampler(seed=seed))


def distinct(built, rng):
    """No step twice in a batch."""
    legal = built.twin.legal()
    batch = sample_by(built, mr.DistinctSampler(seed=2), max(1, len(legal) // 2))
    if batch is not None:
        indices = assert_legal(built, batch)
        assert len(set(indices)) == len(indices)
        everything = built.buffer.sample_by(mr.DistinctSampler(seed=2), len(legal))
        assert sorted(indices_of(everything)) == legal
        assert_even(batch, len(legal))
        assert_even(everything, len(legal))
        assert_resumes(built, lambda seed: mr.DistinctSampler(seed=seed), 1)


def prioritized(built, rng):
    """Probabilities and weights are those of the priorities."""
    legal = built.twin.legal()
    sampler = mr.PrioritizedSampler(alpha=1.0, beta=1.0, name=None, seed=1)
    batch = sample_by(built, sampler, 6)
    if batch is None:
        return
    indices = assert_legal(built, batch)
    np.testing.assert_allclose(batch.probabilities, 1 / len(legal), rtol=1e-6)
    priorities = dict.fromkeys(legal, 1.0)
    values = rng.integers(1, 9, len(indices)).astype(np.float64)
    view = built.buffer.view
    dropped = sampler.update_priorities(view, batch.env_ids, batch.positions, values)
    assert dropped == 0
    priorities |= dict(zip(indices, values.tolist(), strict=True))
    masses = {index: value + 1e-6 for index, value in priorities.items()}
    total = sum(masses.values())
    batch = built.buffer.sample_by(sampler, 8)
    indices = assert_legal(built, batch)
    expected = np.array([masses[index] / total for index in indices])
    # Masses have 24 significant bits.
    np.testing.assert_allclose(batch.probabilities, expected, rtol=1e-6)
    weights = 1 / (len(legal) * expected)
    np.testing.assert_allclose(batch.weights, weights / weights.max(), rtol=1e-5)
    # Of segments of equal mass some lie within the mass of each step.
    assert set(drawn_of(built, sampler, len(legal))[1]) == set(legal)
    state = sampler.state_dict(priorities=True)
    other = mr.PrioritizedSampler(alpha=1.0, beta=1.0, name=None, seed=9)
    other.load_state_dict(state)
    same_batch(built.buffer.sample_by(other, 5), built.buffer.sample_by(sampler, 5))


def prioritized_none(built, rng):
    """A legal start of priority 0 is drawn least, and bad values set nothing."""
    legal = built.twin.legal()
    if not legal:
        return
    sampler = mr.PrioritizedSampler(alpha=1.0, eps=0.0, name=None, seed=1)
    batch = built.buffer.sample_by(sampler, 3)
    view = built.buffer.view
    with refused(mr.SchemaError):
        sampler.update_priorities(view, batch.env_ids, batch.positions, np.array([1.0, -1.0, 2.0]))
    env_ids, positions = np.array(legal).T
    values = np.zeros(len(legal))
    chosen = int(rng.integers(len(legal)))
    values[chosen] = 2.0
    sampler.update_priorities(view, env_ids, positions, values)
    batch = built.buffer.sample_by(sampler, 9)
    assert set(indices_of(batch)) == {legal[chosen]}
    assert (batch.probabilities == 1).all()


def ranked(built, rng):
    """Probabilities and weights are those of the ranks, of equal priorities, too."""
    legal = built.twin.legal()

    def make(seed):
        return mr.RankPrioritizedSampler(alpha=1.0, beta=1.0, resort_every=1, name=None, seed=seed)

    sampler = make(1)
    batch = sample_by(built, sampler, 6)
    if batch is None:
        return
    assert_legal(built, batch)
    shares = 1 / np.arange(1.0, len(legal) + 1)
    shares /= shares.sum()
    # Of segments of equal mass some lie within the mass of each step.
    count = int(2 / shares[-1]) + 1
    draw = sampler.draw(built.buffer.view, count)
    found = dict(zip(indices_of(draw), draw.probabilities.tolist(), strict=True))
    assert set(found) == set(legal)
    np.testing.assert_allclose(sorted(found.values()), shares[::-1], rtol=1e-6)
    ranks = rng.permutation(len(legal))
    view = built.buffer.view
    sampler.update_priorities(view, *np.array(legal).T, 1.0 * (len(legal) - ranks))
    draw = sampler.draw(view, count)
    assert set(indices_of(draw)) == set(legal)
    share_of = dict(zip(legal, shares[ranks].tolist(), strict=True))
    expected = np.array([share_of[index] for index in indices_of(draw)])
    np.testing.assert_allclose(draw.probabilities, expected, rtol=1e-6)
    np.testing.assert_allclose(draw.weights, shares[-1] / expected, rtol=1e-5)
    assert_resumes(built, make)


def stratified(built, rng):
    """As many steps of each environment that has some."""
    size, legal = 3 * built.case.num_envs, built.twin.legal()
    batch = sample_by(built, mr.StratifiedSampler(seed=1), size)
    if batch is not None:
        indices = assert_legal(built, batch)
        counts = Counter(env_id for env_id, _ in indices)
        envs = {env_id for env_id, _ in legal}
        assert set(counts) == envs
        assert max(counts.values()) - min(counts.values()) <= 1
        draw, indices = drawn_of(built, mr.StratifiedSampler(seed=2), 3 * len(legal))
        assert set(indices) == set(legal)
        counts = {env_id: len(mine) for env_id, mine in by_env(legal).items()}
        for drawn in (batch, draw):
            own = np.array([counts[e] for e in drawn.env_ids.tolist()])
            assert_even(drawn, len(counts) * own)
        assert_resumes(built, lambda seed: mr.StratifiedSampler(seed=seed), size)


def recent(built, rng):
    """A share of the newest legal starts of each environment."""
    legal = built.twin.legal()

    def make(seed):
        return mr.RecentSampler(2, 0.5, mr.UniformSampler(seed), seed=seed)

    batch = sample_by(built, make(1), 6)
    if batch is None:
        return
    assert_legal(built, batch)
    draw, indices = drawn_of(built, make(2), 2 * len(legal))
    # Where they are few, all are drawn by the other sampler.
    many = 0.5 * len(legal) / built.case.num_envs > 2
    num_newest = len(indices) // 2 if many else 0
    newest = {env_id: mine[-2:] for env_id, mine in by_env(legal).items()}
    if many:
        assert set(indices[:num_newest]) == {p for mine in newest.values() for p in mine}
    assert set(indices[num_newest:]) == set(legal)
    for drawn, first in ((batch, 3 if many else 0), (draw, num_newest)):
        totals = np.full(len(drawn.env_ids), len(legal))
        for number, env_id in enumerate(drawn.env_ids[:first].tolist()):
            totals[number] = len(newest) * len(newest[env_id])
        assert_even(drawn, totals)
    assert_resumes(built, make)


def emphasized(built, rng):
    """The window of newest steps shrinks with each draw, and begins again."""
    legal = built.twin.legal()
    updates, smallest = 5, 3

    def make(seed):
        return mr.EmphasizeRecentSampler(updates, smallest=smallest, seed=seed)

    sampler = make(1)
    if not legal:
        with refused(mr.EmptyError):
            built.buffer.sample_by(sampler, 6)
        return
    for number in (*range(updates), 0):
        share = 0.996 ** (1000 * (number + 1) / updates)
        window = min(max(int(len(legal) * share), smallest), len(legal))
        each, newest = 0, []
        while len(newest) < window:
            each += 1
            newest = [p for mine in by_env(legal).values() for p in mine[-each:]]
        draw, indices = drawn_of(built, sampler, len(newest))
        assert set(indices) == set(newest), number
        assert_even(draw, len(newest))
    assert_legal(built, built.buffer.sample_by(sampler, 6))
    assert_resumes(built, make)


def ignore_earliest(built, rng):
    """The oldest rows are not drawn."""
    twin, count = built.twin, 3
    kept = [p for p in twin.legal() if p[1] >= twin.envs[p[0]].first + count]
    sampler = mr.ignore_earliest(count, mr.UniformSampler(seed=1))
    if not kept:
        with refused(mr.EmptyError):
            built.buffer.sample_by(sampler, 3)
        return
    batch = built.buffer.sample_by(sampler, 30 * len(kept))
    assert set(indices_of(batch)) == set(kept)
    assert_even(batch, len(kept))
    assert_resumes(built, lambda seed: mr.ignore_earliest(count, mr.UniformSampler(seed=seed)))


def groups(built, rng):
    """Whole groups: all rows of a value are legal starts."""
    twin = built.twin
    legal, members = set(twin.legal()), {}
    for index in twin.steps():
        members.setdefault(int(twin.row(index).values["group"]), []).append(index)
    whole = {
        value: indices
        for value, indices in members.items()
        if len(indices) == 3 and legal.issuperset(indices)
    }
    sampler = mr.GroupSampler("group", rows=3, seed=1)
    if not whole:
        with refused(mr.EmptyError):
            built.buffer.sample_by(sampler, 2)
        return
    batch = built.buffer.sample_by(sampler, len(whole))
    drawn = [
        sorted(indices_of(batch)[first:stop])
        for first, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    ]
    assert sorted(drawn) == sorted(whole.values())
    assert_column("group", batch["group"], [twin.row(p).values["group"] for p in indices_of(batch)])
    # Each of its rows would have led to the group.
    assert_even(batch, len(legal), 3)
    assert_resumes(built, lambda seed: mr.GroupSampler("group", rows=3, seed=seed))


def staleness(built, rng):
    """Only rows whose column is recent enough."""
    twin, legal = built.twin, built.twin.legal()
    current = max((int(twin.row(p).values["group"]) for p in twin.steps()), default=0)
    kept = [p for p in legal if twin.row(p).values["group"] >= current - 1]
    sampler = mr.StalenessSampler("group", current, 1, seed=1)
    if not kept:
        with refused(mr.EmptyError):
            built.buffer.sample_by(sampler, 2)
        return
    batch = built.buffer.sample_by(sampler, 30 * len(kept))
    assert set(indices_of(batch)) == set(kept)
    # Of all legal starts, those left out among them.
    assert_even(batch, len(legal))
    assert_resumes(built, lambda seed: mr.StalenessSampler("group", current, 1, seed=seed))


def uses(built, rng):
    """Each step at most so often, and not at all once all are used."""
    legal = built.twin.legal()
    counter = mr.UseCounter(2, mr.DistinctSampler(seed=1), name=None)
    drawn = []
    if not legal:
        with refused(mr.EmptyError):
            built.buffer.sample_by(counter, 2)
        return
    for _ in range(3 * len(legal)):
        try:
            batch = built.buffer.sample_by(counter, 3)
        except mr.EmptyError:
            break
        drawn += indices_of(batch)
        # Of all legal starts, those used up among them.
        assert_even(batch, len(legal))
    assert Counter(drawn) == dict.fromkeys(legal, 2)
    # States do not hold the uses: so many are never used up.
    for inner in (mr.UniformSampler, mr.DistinctSampler):
        assert_resumes(built, lambda s, inner=inner: mr.UseCounter(99, inner(s), name=None, seed=s))


def mixture(built, rng):
    """Shares of a batch, exact in the long run."""
    sampler = mr.MixtureSampler(
        [(mr.UniformSampler(seed=1), 3), (mr.ShuffledSampler(seed=2), 1)], seed=3
    )
    batch = sample_by(built, sampler, 8)
    if batch is not None:
        assert_legal(built, batch)
        # Each part draws what it draws alone, and is never off its share by a step.
        parts = [mr.UniformSampler(seed=1), mr.UniformSampler(seed=2)]
        alone = [mr.UniformSampler(seed=1), mr.UniformSampler(seed=2)]
        both = mr.MixtureSampler([(parts[0], 3), (parts[1], 1)], seed=3)
        for counts in ((6, 2), (2, 1), (2, 0), (2, 1)):
            batch = built.buffer.sample_by(both, sum(counts))
            expected = [
                index
                for part, count in zip(alone, counts, strict=True)
                if count
                for index in indices_of(built.buffer.sample_by(part, count))
            ]
            assert indices_of(batch) == expected, counts
            assert_even(batch, len(built.twin.legal()))
        assert_resumes(
            built,
            lambda s: mr.MixtureSampler(
                [(mr.UniformSampler(s), 3), (mr.ShuffledSampler(s), 1)], seed=s
            ),
        )


def sequence(built, rng):
    """Windows with all their steps, the mask, and where episodes begin."""
    boundary = ("episode", "any", "pad")[int(rng.integers(3))]
    options = {
        "burn_in": int(rng.integers(2)),
        "bootstrap": int(rng.integers(2)),
        "stride": int(rng.integers(1, 3)),
    }
    check_windows(built, built.buffer, 2, boundary, options)
    if built.twin.windows(2, boundary, **options):
        assert_resumes(
            built,
            lambda seed: mr.SequenceSampler(
                2, mr.UniformSampler(seed=seed), boundary=boundary, **options
            ),
        )


def check_windows(built, buffer, length, boundary, options, without_next=False):
    """Windows drawn from a buffer are those of the twin."""
    twin = built.twin
    expected = twin.windows(length, boundary, **options, without_next=without_next)
    sampler = mr.SequenceSampler(length, mr.UniformSampler(seed=1), boundary=boundary, **options)
    if not expected:
        with refused(mr.EmptyError):
            buffer.sample_by(sampler, 2)
        return
    draw = sampler.draw(buffer.view, 20 * len(expected))
    assert set(indices_of(draw)) == set(expected)
    assert_even(draw, len(expected))
    batch = buffer.sample_by(sampler, 4)
    windows = [expected[index] for index in indices_of(batch)]
    assert_windows(batch, windows)
    assert_window_fields(twin, batch, windows, without_next)


def assert_windows(batch, windows):
    """Windows of a batch have these places, masks and beginnings of episodes."""
    for number, (indices, mask, is_first) in enumerate(windows):
        positions = batch.window_positions[number].tolist()
        assert positions == [p for _, p in indices], (indices, positions)
        assert batch["is_first"][number].tolist() == is_first, indices
        found = [True] * len(mask) if batch.mask is None else batch.mask[number].tolist()
        assert found == mask, (indices, found, mask)


def assert_window_fields(twin, batch, windows, without_next):
    """Fields of windows are those of their steps, each with its next observation."""
    rows = [[window_step(twin, p, without_next) for p in indices] for indices, *_ in windows]
    for path in rows[0][0]:
        expected = [[step[path] for step in steps] for steps in rows]
        assert_column(path, batch.fields[path], expected)


def window_step(twin, index, without_next=False):
    """What a window holds of a step: its own observation where the next is unknown."""
    values = dict(twin.stored(index))
    if without_next:
        return {p: v for p, v in values.items() if not p.startswith("next_")}
    if twin.next_observation == "derived":
        following = twin.next_of(index)
        for path in twin.observations:
            values[f"next_{path}"] = (following or values)[path]
    return values


def whole_episodes(built, rng):
    """Whole episodes, padded or one after another, with all their steps."""
    twin = built.twin
    options = {"running": bool(rng.integers(2)), "headless": bool(rng.integers(2))}
    expected = twin.whole_episodes(**options)
    # The first step of an episode without its beginning cannot be drawn.
    by_length = options["headless"] or bool(rng.integers(2))
    for layout in ("padded", "ragged"):

        def make(seed, layout=layout):
            return mr.EpisodeSampler(
                mr.UniformSampler(seed=seed),
                by="length" if by_length else "episode",
                layout=layout,
                **options,
            )

        sampler = make(1)
        if not expected:
            with refused(mr.EmptyError):
                built.buffer.sample_by(sampler, 2)
            continue
        by_start = {indices[0]: (indices, mask) for indices, mask in expected}
        num_steps = sum(len(indices) for indices, _ in expected)
        draw = sampler.draw(built.buffer.view, 30 * num_steps)
        # An episode comes as often as it is long, or as any other.
        assert_even(draw, num_steps if by_length else len(expected))
        assert_resumes(built, make)
        drawn = indices_of(draw)
        if layout == "ragged":
            drawn = [drawn[first] for first in draw.offsets[:-1]]
        # By length, the step drawn is any step of the episode.
        starts = {starts_of(expected)[index] for index in drawn}
        assert starts == set(by_start)
        batch = built.buffer.sample_by(sampler, 3)
        if layout == "padded":
            check_padded(built, batch, starts_of(expected), by_start)
        else:
            check_ragged(built, batch, by_start)


def starts_of(episodes):
    """By step of an episode, its first one."""
    return {index: indices[0] for indices, _ in episodes for index in indices}


def check_padded(built, batch, starts, by_start):
    length = batch.window_positions.shape[1]
    windows = []
    for number, index in enumerate(indices_of(batch)):
        indices, mask = by_start[starts[index]]
        rest = length - len(indices)
        windows.append(([*indices, *[indices[-1]] * rest], [*mask, *[False] * rest]))
        positions = [p for _, p in windows[-1][0]]
        assert batch.window_positions[number].tolist() == positions
        assert batch.mask[number].tolist() == windows[-1][1], index
    assert length == max(len(by_start[starts[index]][0]) for index in indices_of(batch))
    assert_window_fields(built.twin, batch, windows, False)


def check_ragged(built, batch, by_start):
    indices, offsets = indices_of(batch), batch.offsets.tolist()
    masks = []
    for first, stop in pairwise(offsets):
        expected, mask = by_start[indices[first]]
        assert indices[first:stop] == expected
        masks += mask
    found = [True] * len(masks) if batch.mask is None else batch.mask.tolist()
    assert found == masks
    expected = [window_step(built.twin, index) for index in indices]
    for path in expected[0]:
        assert_column(path, batch[path], [values[path] for values in expected])


SAMPLERS = {
    "uniform": lambda seed: mr.UniformSampler(seed=seed),
    "shuffled": lambda seed: mr.ShuffledSampler(seed=seed),
    "distinct": lambda seed: mr.DistinctSampler(seed=seed),
    "prioritized": lambda seed: mr.PrioritizedSampler(name=None, seed=seed),
    "stratified": lambda seed: mr.StratifiedSampler(seed=seed),
    "recent": lambda seed: mr.RecentSampler(2, 0.5, mr.UniformSampler(seed), seed=seed),
    "mixture": lambda seed: mr.MixtureSampler(
        [(mr.UniformSampler(seed=seed), 2), (mr.ShuffledSampler(seed=seed), 1)], seed=seed
    ),
    "sequence": lambda seed: mr.SequenceSampler(2, mr.UniformSampler(seed=seed), boundary="pad"),
    "epoch_windows": lambda seed: mr.SequenceSampler(
        2, mr.ShuffledSampler(seed=seed), boundary="pad"
    ),
    "uses": lambda seed: mr.UseCounter(2, mr.DistinctSampler(seed=seed), name=None, seed=seed),
    "many_uses": lambda seed: mr.UseCounter(99, mr.UniformSampler(seed=seed), name=None, seed=seed),
    "stale": lambda seed: mr.StalenessSampler(
        "group", 10**6, 10**7, sampler=mr.DistinctSampler(seed=seed), seed=seed
    ),
    "ranked": lambda seed: mr.RankPrioritizedSampler(name=None, seed=seed),
    "emphasized": lambda seed: mr.EmphasizeRecentSampler(5, smallest=3, seed=seed),
    "later": lambda seed: mr.ignore_earliest(1, mr.UniformSampler(seed=seed)),
    "groups": lambda seed: mr.GroupSampler("group", rows=3, seed=seed),
    "episodes": lambda seed: mr.EpisodeSampler(mr.UniformSampler(seed=seed)),
    "ragged": lambda seed: mr.EpisodeSampler(mr.UniformSampler(seed=seed), layout="ragged"),
}
"""A sampler of each kind by a seed, for consumers that take any."""


def stored_uses(built, rng):
    """Uses are counted in a file by batches that came, and outlive their counter."""
    legal = built.twin.legal()
    if not legal or built.path is None:
        return
    fails, counts = [], Counter()

    def function(batch):
        if fails:
            raise ArithmeticError("asked to fail")
        return batch

    def opened(seed):
        counter = mr.UseCounter(2, mr.DistinctSampler(seed=seed), name="counted")
        return counter, built.open(transforms=[mr.Apply(function)], sampler=counter)

    def check(counter, buffer):
        env_ids, positions = np.array(legal).T
        uses = counter.uses(buffer.view, env_ids, positions).tolist()
        assert uses == [counts[index] for index in legal]

    counter, buffer = opened(1)
    for number in range(len(legal)):
        if number % 3 == 1:
            fails.append(True)
            with refused(ArithmeticError):
                buffer.sample(1)
            fails.clear()
        counts.update(indices_of(buffer.sample(1)))
        check(counter, buffer)
    counter.close()
    again, buffer = opened(2)
    check(again, buffer)
    while sum(counts.values()) < 2 * len(legal):
        counts.update(indices_of(buffer.sample(1)))
    check(again, buffer)
    assert counts == dict.fromkeys(legal, 2)
    with refused(mr.EmptyError):
        buffer.sample(1)
    again.close()


def looks_of(built, buffer):
    """What a failed draw must leave: the sampler's state, and all counts of uses."""
    sampler, indices = buffer.sampler, built.twin.alive()
    state = {k: v for k, v in sampler.state_dict().items() if k != "priorities"}
    uses = []
    if isinstance(sampler, mr.UseCounter):
        uses = sampler.uses(buffer.view, *np.array(indices).T).tolist()
    return repr(state), uses


def failed_draw(built, rng):
    """A draw that raises leaves samplers and uses as they were."""
    if not built.twin.legal():
        return
    name = sorted(SAMPLERS)[int(rng.integers(len(SAMPLERS)))]
    fails = []

    def function(batch):
        if fails:
            raise ArithmeticError("asked to fail")
        return batch

    failing = built.open(transforms=[mr.Apply(function)], sampler=SAMPLERS[name](5))
    plain = built.open(sampler=SAMPLERS[name](5))
    for number in range(4):
        if number in (0, 2):
            fails.append(True)
            before = looks_of(built, failing)
            with refused(ArithmeticError, mr.ReplayError):
                failing.sample(2)
            assert looks_of(built, failing) == before, name
            fails.clear()
        try:
            expected = plain.sample(2)
        except mr.EmptyError:
            with refused(mr.EmptyError):
                failing.sample(2)
            return
        same_batch(failing.sample(2), expected)


CONSUMERS = {
    "UniformSampler": uniform,
    "ShuffledSampler": shuffled,
    "DistinctSampler": distinct,
    "PrioritizedSampler": prioritized,
    "priorities of 0": prioritized_none,
    "RankPrioritizedSampler": ranked,
    "StratifiedSampler": stratified,
    "RecentSampler": recent,
    "EmphasizeRecentSampler": emphasized,
    "ignore_earliest": ignore_earliest,
    "GroupSampler": groups,
    "StalenessSampler": staleness,
    "UseCounter": uses,
    "MixtureSampler": mixture,
    "SequenceSampler": sequence,
    "EpisodeSampler": whole_episodes,
    "failed draw": failed_draw,
    "stored uses": stored_uses,
}
