"""States in the middle of an epoch, and the draws after them: one case a function.

Each case makes its buffers anew, draws, gives a state and the next three draws. With a
recorded state it makes everything anew with other seeds, loads that state, and gives
the next three draws again. `frozen_files` says how to add one.
"""

from __future__ import annotations

import re
from contextlib import ExitStack

import mmreplay as mr
from tests.frozen.frozen_files import packed, unpacked
from tests.frozen.frozen_worlds import (
    buffer,
    drawn,
    drawn_steps,
    fixed_uuids,
    write,
    write_together,
)

BATCH = 7
BEFORE = 4
AFTER = 3


def _returns(made, minimum):
    return mr.return_within(mr.episode_table(made), minimum)


def _split(made, number, by="episode"):
    return mr.split(made, [0.7, 0.3], by=by, seed=5)[number]


# How each sampler is made of a buffer and a seed.
SAMPLERS = {
    "uniform": lambda b, s: mr.UniformSampler(s),
    "uniform_block": lambda b, s: mr.UniformSampler(s, block=4),
    "distinct": lambda b, s: mr.DistinctSampler(s),
    "shuffled": lambda b, s: mr.ShuffledSampler(s),
    "shuffled_block": lambda b, s: mr.ShuffledSampler(s, block=5),
    "shuffled_rank": lambda b, s: mr.ShuffledSampler(s, rank=1, num_ranks=2, drop_last=True),
    "shuffled_batches": lambda b, s: mr.ShuffledSampler(s, batches=20),
    "in_order": lambda b, s: mr.ShuffledSampler(s, shuffle=False),
    "in_order_time_major": lambda b, s: mr.ShuffledSampler(s, shuffle=False, layout="time_major"),
    "stratified": lambda b, s: mr.StratifiedSampler(s),
    "stratified_independent": lambda b, s: mr.StratifiedSampler(s, stratified=False),
    "recent": lambda b, s: mr.RecentSampler(9, 0.3, seed=s),
    "recent_prioritized": lambda b, s: mr.RecentSampler(
        9, 0.3, mr.PrioritizedSampler(seed=s + 1), seed=s
    ),
    "shrinking": lambda b, s: mr.EmphasizeRecentSampler(40, eta=0.97, smallest=20, seed=s),
    "prioritized": lambda b, s: mr.PrioritizedSampler(seed=s),
    "prioritized_memory": lambda b, s: mr.PrioritizedSampler(
        0.9, 0.5, eps=1e-3, normalize="buffer", stratified=False, name=None, seed=s
    ),
    "prioritized_schedules": lambda b, s: mr.PrioritizedSampler(
        mr.LinearSchedule(0.4, 0.9, 10),
        mr.LinearSchedule(0.2, 1.0, 10),
        normalize="mean",
        alpha_every=2,
        initial_priority=2.5,
        seed=s,
    ),
    "rank_prioritized": lambda b, s: mr.RankPrioritizedSampler(seed=s),
    "rank_prioritized_sorting": lambda b, s: mr.RankPrioritizedSampler(
        resort_every=5, stratified=False, normalize="buffer", name=None, seed=s
    ),
    "sequence": lambda b, s: mr.SequenceSampler(4, mr.UniformSampler(s)),
    "sequence_any": lambda b, s: mr.SequenceSampler(
        4, mr.UniformSampler(s), boundary="any", stride=2
    ),
    "sequence_pad": lambda b, s: mr.SequenceSampler(
        4, mr.UniformSampler(s), boundary="pad", burn_in=2, bootstrap=1
    ),
    "sequence_shuffled": lambda b, s: mr.SequenceSampler(3, mr.ShuffledSampler(s)),
    "sequence_prioritized": lambda b, s: mr.SequenceSampler(3, mr.PrioritizedSampler(seed=s)),
    "episode": lambda b, s: mr.EpisodeSampler(mr.UniformSampler(s)),
    "episode_ragged": lambda b, s: mr.EpisodeSampler(
        mr.UniformSampler(s), by="length", layout="ragged", max_length=9
    ),
    "episode_unfinished": lambda b, s: mr.EpisodeSampler(
        mr.UniformSampler(s), by="length", headless=True, running=True
    ),
    "episode_shuffled": lambda b, s: mr.EpisodeSampler(mr.ShuffledSampler(s)),
    "episode_return_within": lambda b, s: mr.EpisodeSampler(
        mr.UniformSampler(s), where=_returns(b, 0.0)
    ),
    "mixture": lambda b, s: mr.MixtureSampler(
        [(mr.PrioritizedSampler(seed=s), 3), (mr.UniformSampler(s + 1), 1)], seed=s + 2
    ),
    "mixture_shuffled": lambda b, s: mr.MixtureSampler(
        [(mr.ShuffledSampler(s), 2), (mr.StratifiedSampler(s + 1), 1)], seed=s + 2
    ),
    "mixture_of_sequences": lambda b, s: mr.MixtureSampler(
        [
            (mr.SequenceSampler(3, mr.UniformSampler(s)), 1),
            (mr.SequenceSampler(3, mr.DistinctSampler(s)), 1),
        ],
        seed=s,
    ),
    "ignore_earliest": lambda b, s: mr.ignore_earliest(9, mr.UniformSampler(s)),
    "ignore_earliest_shuffled": lambda b, s: mr.ignore_earliest(9, mr.ShuffledSampler(s)),
    "ignore_earliest_prioritized": lambda b, s: mr.ignore_earliest(
        9, mr.PrioritizedSampler(seed=s)
    ),
    "split": lambda b, s: _split(b, 0).sampler(mr.UniformSampler(s)),
    "split_shuffled": lambda b, s: _split(b, 1).sampler(mr.ShuffledSampler(s)),
    "split_by_step": lambda b, s: _split(b, 1, "step").sampler(mr.DistinctSampler(s)),
    "split_prioritized": lambda b, s: _split(b, 0).sampler(mr.PrioritizedSampler(seed=s)),
    "sequence_in_split": lambda b, s: _split(b, 0).sampler(
        mr.SequenceSampler(3, mr.UniformSampler(s))
    ),
}
KEEPS_PRIORITIES = re.compile("prioritized|^mixture$")
# Buffers of the Zarr engine take a second to make: of each kind of draw one is enough,
# and all those that draw by row.
WITH_ZARR = {"uniform", "shuffled", "episode", "split_shuffled"}
RINGS = (
    ("memmap", "env_major"),
    ("memmap", "time_major"),
    ("memory", "env_major"),
    ("zarr", "env_major"),
)


def cases():
    """Sampler, engine and layout of every case."""
    return [
        (name, engine, layout)
        for name in SAMPLERS
        for engine, layout in RINGS
        if engine != "zarr" or name in WITH_ZARR or KEEPS_PRIORITIES.search(name)
    ]


def entry_of(name, engine, layout):
    """Name of a sampler's recorded entry; engines share one where draws are the same.

    Priorities are drawn by row, and the rings of the Zarr engine have more rows.
    """
    own = engine == "zarr" and KEEPS_PRIORITIES.search(name)
    return f"{name}/{layout}" + ("/zarr" if own else "")


def _updated(made, batch, number):
    """Give a batch priorities that follow from its positions."""
    made.update_priorities(batch, 0.1 + (batch.positions * 7 + number) % 13 / 4)


def sampler_case(name, folder, recorded=None, engine="memmap", layout="env_major"):
    """One sampler over one buffer, whose writer adds meanwhile."""
    keeps = KEEPS_PRIORITIES.search(name) is not None
    add = write_together if layout == "time_major" else write
    with fixed_uuids(), buffer(folder / "a", engine, layout) as made:
        seed = 3 if recorded is None else 1003
        sampler = made.sampler = SAMPLERS[name](made, seed)
        if recorded is None:
            for number in range(BEFORE):
                batch = made.sample(BATCH)
                if keeps:
                    _updated(made, batch, number)
                if number == 2:
                    add(made, 150, 152)
            state = sampler.state_dict(priorities=True) if keeps else sampler.state_dict()
        else:
            add(made, 150, 152)
            state = unpacked(recorded)
            sampler.load_state_dict(state)
        return packed(state), [drawn(made.sample(BATCH)) for _ in range(AFTER)]


def _two(stack, folder, seed):
    """Two buffers of different lengths; one draws uniformly, one by priorities."""
    stack.enter_context(fixed_uuids())
    one = stack.enter_context(buffer(folder / "a"))
    two = stack.enter_context(buffer(folder / "b", num_steps=30))
    one.sampler = mr.UniformSampler(seed)
    two.sampler = mr.PrioritizedSampler(seed=seed + 1)
    return one, two


def _concat(folder, recorded, shares):
    seed = 3 if recorded is None else 1003
    with ExitStack() as stack:
        both = mr.concat(_two(stack, folder, seed), shares, seed=seed)
        if recorded is None:
            for number in range(BEFORE):
                batch = both.sample(BATCH)
                both.update_priorities(batch, 0.5 + (batch.positions + number) % 5)
            state = both.state_dict(priorities=True)
        else:
            state = unpacked(recorded)
            both.load_state_dict(state)
        return packed(state), [drawn(both.sample(BATCH)) for _ in range(AFTER)]


def concat_case(folder, recorded=None):
    """Several buffers, divided at random."""
    return _concat(folder, recorded, None)


def concat_shares_case(folder, recorded=None):
    """Several buffers, in shares."""
    return _concat(folder, recorded, [3, 1])


def _draws(folder, recorded, make):
    with fixed_uuids(), buffer(folder / "a") as made:
        seed = 3 if recorded is None else 1003
        draws = mr.ReplayDataset(made).draws(make(seed), BATCH)
        if recorded is None:
            batches = iter(draws)
            for _ in range(BEFORE + 2):  # two are ahead of the learner
                next(batches)
            state = draws.state_after(BEFORE)
            draws.load_state_dict(state)
        else:
            state = unpacked(recorded)
            draws.load_state_dict(state)
        batches = iter(draws)
        return packed(state), [drawn_steps(next(batches)) for _ in range(AFTER)]


def dataset_case(folder, recorded=None):
    """Draws of a map-style dataset."""
    return _draws(folder, recorded, mr.UniformSampler)


def dataset_shuffled_case(folder, recorded=None):
    """The same by epochs."""
    return _draws(folder, recorded, mr.ShuffledSampler)


def concat_dataset_case(folder, recorded=None):
    """Draws of a map-style dataset of several buffers."""
    seed = 3 if recorded is None else 1003
    with ExitStack() as stack:
        both = mr.concat(_two(stack, folder, seed), seed=seed)
        both.buffers[1].sampler = mr.DistinctSampler(seed)
        dataset = mr.ConcatDataset(both)
        draws = dataset.draws(BATCH)
        if recorded is None:
            batches = iter(draws)
            for _ in range(BEFORE + 2):
                next(batches)
            state = draws.state_after(BEFORE)
        else:
            state = unpacked(recorded)
        draws.load_state_dict(state)
        batches = iter(draws)
        found = [drawn(dataset[next(batches)]) for _ in range(AFTER)]
        return packed(state), found


def _loader(stack, source, recorded, update):
    loader = stack.enter_context(mr.ReplayLoader(source, BATCH, num_threads=1))
    priorities = update is not None
    if recorded is None:
        batches = iter(loader)
        taken = [next(batches) for _ in range(BEFORE)]
        # Loading a state drops what was drawn ahead: updates count from here on.
        loader.load_state_dict(loader.state_dict())
        if update is not None:
            for number, batch in enumerate(taken):
                update(loader, batch, number)
        state = loader.state_dict(priorities) if priorities else loader.state_dict()
    else:
        state = unpacked(recorded)
        loader.load_state_dict(state)
    batches = iter(loader)
    return packed(state), [drawn(next(batches)) for _ in range(AFTER)]


def _loader_of_one(folder, recorded, make, update=None):
    with ExitStack() as stack:
        stack.enter_context(fixed_uuids())
        made = stack.enter_context(buffer(folder / "a"))
        made.sampler = make(3 if recorded is None else 1003)
        return _loader(stack, made, recorded, update)


def loader_case(folder, recorded=None):
    """A loader of threads, uniformly."""
    return _loader_of_one(folder, recorded, mr.UniformSampler)


def loader_shuffled_case(folder, recorded=None):
    """A loader of threads, by epochs."""
    return _loader_of_one(folder, recorded, mr.ShuffledSampler)


def _update_tensors(loader, batch, number):
    values = 0.1 + (batch.positions * 7 + number) % 13 / 4
    loader.update_priorities(batch, values)


def loader_prioritized_case(folder, recorded=None):
    """A loader of threads, by priorities that are updated."""
    make = lambda seed: mr.PrioritizedSampler(seed=seed)  # noqa: E731
    return _loader_of_one(folder, recorded, make, _update_tensors)


def loader_sequence_case(folder, recorded=None):
    """A loader of threads, windows."""
    make = lambda seed: mr.SequenceSampler(3, mr.UniformSampler(seed))  # noqa: E731
    return _loader_of_one(folder, recorded, make)


def loader_concat_case(folder, recorded=None):
    """A loader of threads over several buffers, one of them by priorities."""
    seed = 3 if recorded is None else 1003
    with ExitStack() as stack:
        both = mr.concat(_two(stack, folder, seed), [1, 1], seed=seed)
        return _loader(stack, both, recorded, _update_tensors)


def _batches(stream, num_workers, count):
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(stream, batch_size=None, num_workers=num_workers))
    return [next(batches) for _ in range(count)]


def _stream(stream, recorded, num_workers):
    if recorded is None:
        _batches(stream, num_workers, BEFORE)
        state = stream.state_after(BEFORE)
    else:
        state = unpacked(recorded)
    stream.load_state_dict(state)
    found = _batches(stream, num_workers, AFTER)
    # Iterations to come have seeds of their own.
    stream.set_epoch(5)
    found += _batches(stream, num_workers, 1)
    return packed(state), [drawn(batch) for batch in found]


def _stream_of_one(folder, recorded, make, num_workers, **options):
    # A stream's state counts batches alone, so the same seed has to be given again.
    with fixed_uuids(), buffer(folder / "a") as made:
        made.commit()
    with mr.ReplayBuffer.open(folder / "a") as made:
        stream = mr.ReplayStream(made, make(3), BATCH, **options)
        return _stream(stream, recorded, num_workers)


def stream_case(folder, recorded=None, num_workers=0):
    """A stream, of one rank of two."""
    return _stream_of_one(folder, recorded, mr.UniformSampler, num_workers, rank=1, num_ranks=2)


def stream_shuffled_case(folder, recorded=None, num_workers=0):
    """A stream, by epochs."""
    return _stream_of_one(folder, recorded, mr.ShuffledSampler, num_workers)


def concat_stream_case(folder, recorded=None, num_workers=0):
    """A stream of several buffers."""
    with ExitStack() as stack:
        for made in _two(stack, folder, 3):
            made.close()
        made = [mr.ReplayBuffer.open(folder / name) for name in "ab"]
        for place, each in enumerate(made):
            stack.enter_context(each)
            each.sampler = mr.UniformSampler(3 + place)
        stream = mr.ConcatStream(mr.concat(made, [2, 1], seed=3), BATCH)
        return _stream(stream, recorded, num_workers)


STREAMS = {
    "stream": stream_case,
    "stream_shuffled": stream_shuffled_case,
    "concat_stream": concat_stream_case,
}
OTHERS = {
    "concat": concat_case,
    "concat_shares": concat_shares_case,
    "dataset": dataset_case,
    "dataset_shuffled": dataset_shuffled_case,
    "concat_dataset": concat_dataset_case,
    "loader": loader_case,
    "loader_shuffled": loader_shuffled_case,
    "loader_prioritized": loader_prioritized_case,
    "loader_sequence": loader_sequence_case,
    "loader_concat": loader_concat_case,
    **STREAMS,
}


def recordings(folder):
    """State and draws of every case, by its name in the file."""
    found = {}
    for name, engine, layout in cases():
        entry = entry_of(name, engine, layout)
        if entry not in found:
            place = folder / entry
            place.mkdir(parents=True)
            state, draws = sampler_case(name, place, None, engine, layout)
            found[entry] = {"state": state, "draws": draws}
    for name, case in OTHERS.items():
        place = folder / name
        place.mkdir()
        state, draws = case(place)
        found[name] = {"state": state, "draws": draws}
    return found
