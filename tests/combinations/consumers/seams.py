"""What lies between calls: failed and closed draws, refusals, warnings, priorities."""

import warnings
from collections import Counter

import numpy as np

import mmreplay as mr
from tests.combinations.build import HEAP, IN_HEAP, field_of, indices_of, value_of
from tests.combinations.compare import refused
from tests.waits import until

AHEAD = 4
"""Batches that a loader gathers ahead."""
NEVER = 10**9


def nothing(seed):
    """A sampler that never has a step to draw."""
    return mr.StalenessSampler("group", NEVER, 1, seed=seed)


def mixture_with_nothing(built, rng):
    """Where a part of a mixture has nothing to draw, the others have used nothing."""
    legal = built.twin.legal()
    if not legal:
        return
    counter = mr.UseCounter(1, mr.DistinctSampler(seed=1), name=None)
    epochs = mr.ShuffledSampler(seed=2)
    parts = [(counter, 1), (epochs, 1), (nothing(3), 1)]
    buffer = built.open(sampler=mr.MixtureSampler(parts, seed=4))
    before = counter.state_dict(), epochs.state_dict()
    for _ in range(2):
        with refused(mr.EmptyError):
            buffer.sample(6)
    assert (counter.state_dict(), epochs.state_dict()) == before
    assert sorted(all_of(buffer, counter)) == legal


def empty_buffer(built, rng):
    """Where one buffer has nothing to draw, those joined with it have used nothing."""
    legal = built.twin.legal()
    if not legal:
        return
    counter = mr.UseCounter(1, mr.DistinctSampler(seed=1), name=None)
    epochs = mr.ShuffledSampler(seed=2)
    buffers = [built.open(sampler=each) for each in (counter, epochs, nothing(3))]
    both = mr.concat(buffers, seed=4, shares=[1, 1, 1])
    before = counter.state_dict(), epochs.state_dict()
    for _ in range(2):
        with refused(mr.EmptyError):
            both.sample(6)
    assert (counter.state_dict(), epochs.state_dict()) == before
    assert sorted(all_of(buffers[0], counter)) == legal


def all_of(buffer, counter):
    """Places that a counter still has, each as often as it may be used."""
    drawn = []
    while True:
        try:
            drawn += indices_of(buffer.sample_by(counter, 3))
        except mr.EmptyError:
            return drawn


def closed_loader(built, rng):
    """A loader that is closed with batches ahead has used the batches taken alone."""
    legal = built.twin.legal()
    if not legal:
        return
    most = -(-len(legal) // 2)
    taken = min(int(rng.integers(1, 3)), most)
    counter = mr.UseCounter(1, mr.DistinctSampler(seed=1), name=None)
    epochs = mr.ShuffledSampler(seed=2)
    for sampler in (counter, epochs):
        buffer, drawn = built.open(sampler=sampler), []
        with mr.ReplayLoader(buffer, 2, num_threads=2, prefetch=AHEAD) as batches:
            found = ahead(batches, most)
            for _, batch in zip(range(taken), found, strict=False):
                drawn += indices_of(batch)
        if sampler is counter:
            drawn += all_of(buffer, counter)
        else:
            while sampler.epoch == 0 and sampler.more(buffer.view, 2):
                drawn += indices_of(buffer.sample(2))
        assert Counter(drawn) == dict.fromkeys(legal, 1), type(sampler).__name__


def ahead(batches, count):
    """Iterate over a loader, once as many batches as there may be are gathered."""
    found = iter(batches)
    until(lambda: batches._work.num_ready() >= min(AHEAD, count))
    return found


def loader_ahead(built, rng):
    """Batches gathered ahead come in the order of draws, and are none of the state."""
    legal = built.twin.legal()
    buffer = built.open(sampler=mr.ShuffledSampler(seed=1))
    count = -(-len(legal) // 2)
    wanted = [indices_of(buffer.sample(2)) for _ in range(count)]
    taken = min(2, count)
    buffer = built.open(sampler=mr.ShuffledSampler(seed=1))
    with mr.ReplayLoader(buffer, 2, num_threads=2, prefetch=AHEAD) as batches:
        found = ahead(batches, count)
        for indices in wanted[:taken]:
            assert indices_of(next(found)) == indices
        state = batches.state_dict()
    again = built.open(sampler=mr.ShuffledSampler(seed=2))
    with mr.ReplayLoader(again, 2, num_threads=1) as batches:
        batches.load_state_dict(state)
        # What is left of the epoch, or the next one where nothing is.
        for indices, batch in zip(wanted[taken:], batches, strict=False):
            assert indices_of(batch) == indices


def refusals(built, rng):
    """What cannot work is refused when it is made, before anything is drawn."""
    counter = mr.UseCounter(1, mr.DistinctSampler(seed=1))
    windows = mr.SequenceSampler(2, mr.UniformSampler(seed=1), boundary="pad")
    for make in (
        lambda: mr.concat([groups(built), groups(built)]),
        lambda: mr.MixtureSampler([(counter, 1), (mr.UseCounter(1), 1)]),
        lambda: mr.MixtureSampler([(windows, 1), (mr.UniformSampler(seed=1), 1)]),
        lambda: mr.UseCounter(2, lease_s=1.0),
        lambda: mr.UseCounter(1, mr.MixtureSampler([(mr.ShuffledSampler(1), 1)])),
    ):
        with refused(mr.SchemaError):
            make()


def groups(built):
    return built.open(sampler=mr.GroupSampler("group", rows=3, seed=1))


def reset_rows(built, rng):
    """Rows that look like resets are warned of, whatever the kind of the fields."""
    kind = built.case.kind
    if kind in ("nested", "agents"):
        return
    schema = mr.Schema.from_flat(
        {
            "observation": field_of(kind),
            "action": mr.Field((), "int32"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )
    for known in (True, False):
        buffer = mr.ReplayBuffer.create(
            None,
            schema,
            200,
            engine="memory",
            commit_every=None,
            autoreset="same_step" if known else "disabled",
            heap_bytes=HEAP if kind in IN_HEAP else None,
        )
        with buffer, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for episode in range(5 if known else 34):
                first = value_of(kind, 4 * episode + 5)
                last = value_of(kind, 4 * episode + 7)
                options = {"final_observation": last} if known else {}
                step(buffer, first, 1.0, False)
                step(buffer, first, 1.0, True, **options)
                # The action is ignored, and the observation is still the last one.
                step(buffer, last, 0.0, False)
        words = [str(each.message) for each in caught]
        assert any("autoreset" in text for text in words), (kind, known, words)


def step(buffer, observation, reward, truncated, **options):
    buffer.add(
        observation=observation,
        action=np.int32(0),
        reward=np.float32(reward),
        terminated=False,
        truncated=truncated,
        **options,
    )


def priorities_of_starts(built, rng):
    """Priorities are those of the steps, with and without next observations."""
    twin = built.twin
    legal, every = twin.legal(), twin.legal(without_next=True)
    if not legal or built.path is None:
        return

    def draw(without, values=None):
        """Probabilities by index; priorities are stored if given."""
        sampler = mr.PrioritizedSampler(alpha=1.0, eps=0.0, name="kept", seed=1)
        transforms = [mr.WithoutNext()] if without else []
        with built.open(sampler=sampler, transforms=transforms) as buffer:
            batch = buffer.sample(20 * len(every))
            found = dict(zip(indices_of(batch), batch.probabilities, strict=True))
            if values is not None:
                env_ids, positions = np.array(list(values)).T
                numbers = np.array(list(values.values()))
                sampler.update_priorities(buffer.view, env_ids, positions, numbers)
        return found

    draw(False)
    given = {p: float(rng.integers(1, 5)) for p in every}
    # A step that is no legal start now keeps its priority for when it is one.
    draw(bool(rng.integers(2)), given)
    for without, some in ((False, legal), (True, every)):
        total = sum(given[p] for p in some)
        for index, probability in draw(without).items():
            np.testing.assert_allclose(probability, given[index] / total, rtol=1e-6)


def by_priority(built, rng):
    """Buffers joined by priority have the probabilities and weights of one buffer."""
    legal = built.twin.legal()
    if not legal:
        return

    def make(seed):
        return mr.PrioritizedSampler(alpha=1.0, eps=0.0, beta=0.5, name=None, seed=seed)

    buffers = [built.open(sampler=make(seed)) for seed in range(2)]
    masses = {}
    for number, buffer in enumerate(buffers):
        env_ids, positions = np.array(legal).T
        values = rng.integers(1, 9, len(legal)).astype(np.float64)
        view = buffer.view
        buffer.sampler.update_priorities(view, env_ids, positions, values)
        masses |= {(number, p): v for p, v in zip(legal, values, strict=True)}
    both = mr.concat(buffers, by="priority", seed=2)
    batch = both.sample(12)
    drawn = list(zip(batch.buffer_ids.tolist(), indices_of(batch), strict=True))
    total = sum(masses.values())
    expected = np.array([masses[each] / total for each in drawn])
    np.testing.assert_allclose(batch.probabilities, expected, rtol=1e-6)
    weights = expected**-0.5
    np.testing.assert_allclose(batch.weights, weights / weights.max(), rtol=1e-5)


def lengths(built, rng):
    """Whole episodes of some lengths: those counted are the steps of the batch."""
    least, most = int(rng.integers(1, 4)), int(rng.integers(4, 6))
    expected = [
        indices for indices, _ in built.twin.whole_episodes() if least <= len(indices) <= most
    ]
    sampler = mr.EpisodeSampler(mr.UniformSampler(seed=1), min_length=least, max_length=most)
    if not expected:
        with refused(mr.EmptyError):
            built.buffer.sample_by(sampler, 2)
        return
    draw = sampler.draw(built.buffer.view, 20 * len(expected))
    assert set(indices_of(draw)) == {indices[0] for indices in expected}


def returns(built, rng):
    """Whole episodes of some returns: those counted are of the steps of the batch."""
    totals = {indices[0]: built.twin.total(indices) for indices, _ in built.twin.whole_episodes()}
    least = sorted(totals.values())[len(totals) // 2] if totals else 0.0
    expected = {index for index, total in totals.items() if total >= least}
    where = mr.return_within(mr.episode_table(built.buffer), least=least)
    sampler = mr.EpisodeSampler(mr.UniformSampler(seed=1), where=where)
    if not expected:
        with refused(mr.EmptyError):
            built.buffer.sample_by(sampler, 2)
        return
    draw = sampler.draw(built.buffer.view, 20 * len(expected))
    assert set(indices_of(draw)) == expected


CONSUMERS = {
    "mixture with an empty part": mixture_with_nothing,
    "concat with an empty buffer": empty_buffer,
    "closed loader": closed_loader,
    "loader ahead": loader_ahead,
    "refusals": refusals,
    "reset rows": reset_rows,
    "kept priorities": priorities_of_starts,
    "concat by priority": by_priority,
    "episodes by length": lengths,
    "episodes by return": returns,
}
RARE = {"reset rows": 10, "refusals": 5}
