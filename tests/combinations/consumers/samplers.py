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
        assert (batch.probabilities == 1 / len(legal)).all()
        assert (batch.weights == 1).all()
    # The chance to miss a start is below 1e-10.
    draw = mr.UniformSampler(seed=4).draw(built.buffer.view, 30 * len(legal))
    assert set(indices_of(draw)) == set(legal)
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
            drawn += indices_of(sampler.draw(view, 4))
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
        sampler.update_priorities(
            view, batch.env_ids, batch.positions, np.array([1.0, -1.0, 2.0])
        )
    env_ids, positions = np.array(legal).T
    values = np.zeros(len(legal))
    chosen = int(rng.integers(len(legal)))
    values[chosen] = 2.0
    sampler.update_priorities(view, env_ids, positions, values)
    batch = built.buffer.sample_by(sampler, 9)
    assert set(indices_of(batch)) == {legal[chosen]}
    assert (batch.probabilities == 1).all()


def ranked(built, rng):
    """Probabilities by rank add up to one."""
    sampler = mr.RankPrioritizedSampler(alpha=1.0, name=None, seed=1)
    batch = sample_by(built, sampler, 6)
    if batch is not None:
        assert_legal(built, batch)
        assert (batch.probabilities > 0).all()
        assert (batch.probabilities <= 1).all()


def stratified(built, rng):
    """As many steps of each environment that has some."""
    size = 3 * built.case.num_envs
    batch = sample_by(built, mr.StratifiedSampler(seed=1), size)
    if batch is not None:
        indices = assert_legal(built, batch)
        counts = Counter(env_id for env_id, _ in indices)
        envs = {env_id for env_id, _ in built.twin.legal()}
        assert set(counts) == envs
        assert max(counts.values()) - min(counts.values()) <= 1
        assert_resumes(built, lambda seed: mr.StratifiedSampler(seed=seed), size)


def recent(built, rng):
    """A share of the newest legal starts of each environment."""
    legal = built.twin.legal()
    sampler = mr.RecentSampler(2, 0.5, mr.UniformSampler(seed=1), seed=2)
    batch = sample_by(built, sampler, 6)
    if batch is not None:
        indices = assert_legal(built, batch)
        newest = {
            index for e, _ in legal for index in [p for p in legal if p[0] == e][-2:]
        }
        # Where they are few, all are drawn by the other sampler.
        if 0.5 * len(legal) / built.case.num_envs > 2:
            assert set(indices[:3]) <= newest
        assert_resumes(
            built, lambda s: mr.RecentSampler(2, 0.5, mr.UniformSampler(s), seed=s)
        )


def emphasized(built, rng):
    """The window of newest steps is within the legal starts."""
    batch = sample_by(built, mr.EmphasizeRecentSampler(5, smallest=3, seed=1), 6)
    if batch is not None:
        assert_legal(built, batch)


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
    assert_column(
        "group",
        batch["group"],
        [twin.row(p).values["group"] for p in indices_of(batch)],
    )


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
            drawn += indices_of(built.buffer.sample_by(counter, 3))
        except mr.EmptyError:
            break
    assert Counter(drawn) == dict.fromkeys(legal, 2)


def mixture(built, rng):
    """Shares of a batch, exact in the long run."""
    sampler = mr.MixtureSampler(
        [(mr.UniformSampler(seed=1), 3), (mr.ShuffledSampler(seed=2), 1)], seed=3
    )
    batch = sample_by(built, sampler, 8)
    if batch is not None:
        assert_legal(built, batch)
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


def check_windows(built, buffer, length, boundary, options, without_next=False):
    """Windows drawn from a buffer are those of the twin."""
    twin = built.twin
    expected = twin.windows(length, boundary, **options, without_next=without_next)
    sampler = mr.SequenceSampler(
        length, mr.UniformSampler(seed=1), boundary=boundary, **options
    )
    if not expected:
        with refused(mr.EmptyError):
            buffer.sample_by(sampler, 2)
        return
    draw = sampler.draw(buffer.view, 20 * len(expected))
    assert set(indices_of(draw)) == set(expected)
    np.testing.assert_allclose(draw.probabilities, 1 / len(expected), rtol=1e-9)
    batch = buffer.sample_by(sampler, 4)
    for number, index in enumerate(indices_of(batch)):
        indices, mask, is_first = expected[index]
        positions = batch.window_positions[number].tolist()
        assert positions == [p for _, p in indices], (index, positions)
        assert batch["is_first"][number].tolist() == is_first, index
        found = (
            [True] * len(mask) if batch.mask is None else batch.mask[number].tolist()
        )
        assert found == mask, (index, found, mask)
    windows = [expected[index] for index in indices_of(batch)]
    assert_window_fields(twin, batch, windows, without_next)


def assert_window_fields(twin, batch, windows, without_next):
    """Fields of windows are those of their steps, each with its next observation."""
    rows = [
        [window_step(twin, p, without_next) for p in indices] for indices, *_ in windows
    ]
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
    for layout in ("padded", "ragged"):
        sampler = mr.EpisodeSampler(
            mr.UniformSampler(seed=1),
            # The first step of an episode without its beginning cannot be drawn.
            by="length" if options["headless"] else "episode",
            layout=layout,
            **options,
        )
        if not expected:
            with refused(mr.EmptyError):
                built.buffer.sample_by(sampler, 2)
            continue
        by_start = {indices[0]: (indices, mask) for indices, mask in expected}
        draw = sampler.draw(built.buffer.view, 20 * len(expected))
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
        [(mr.UniformSampler(seed=seed), 2), (mr.ShuffledSampler(seed=seed), 1)],
        seed=seed,
    ),
    "sequence": lambda seed: mr.SequenceSampler(
        2, mr.UniformSampler(seed=seed), boundary="pad"
    ),
    "epoch_windows": lambda seed: mr.SequenceSampler(
        2, mr.ShuffledSampler(seed=seed), boundary="pad"
    ),
    "uses": lambda seed: mr.UseCounter(2, mr.DistinctSampler(seed=seed), name=None),
    "used_windows": lambda seed: mr.StalenessSampler(
        "group", 10**6, 10**7, sampler=mr.DistinctSampler(seed=seed)
    ),
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
