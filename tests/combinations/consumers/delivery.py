"""Batches on their way to a learner: loaders, datasets, streams, joins and parts."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

import mmreplay as mr
from tests.combinations.build import build, indices_of
from tests.combinations.compare import (
    assert_column,
    assert_refusal,
    assert_steps,
    expected_step,
    plain,
    refused,
    same_batch,
)
from tests.combinations.consumers.samplers import SAMPLERS, assert_even, assert_windows, window_step

IN_ORDER = {name: make for name, make in SAMPLERS.items() if name != "uses"}
"""Samplers whose draws go on from a state alone: counts of uses are in none."""


def of_case(built, rng, sampler):
    """The buffer of a case with a sampler, of the writer itself or opened again."""
    if built.path is not None or rng.integers(2):
        return built.open(sampler=sampler)
    built.buffer.sampler = sampler
    return built.buffer


def assert_delivered(twin, batch, with_next=True):
    """The steps of a batch of arrays or tensors hold their values; return indices."""
    indices = indices_of(batch)
    fields = {path: as_arrays(column) for path, column in batch.fields.items()}
    assert_steps(fields, [expected_step(twin, index) for index in indices])
    return indices


def as_arrays(column):
    return column if isinstance(column, mr.Ragged) else np.asarray(plain(column))


def loader(num_threads):
    """A consumer that looks at a loader of so many threads."""

    def look(built, rng):
        legal = built.twin.legal()
        buffer = of_case(built, rng, mr.ShuffledSampler(seed=1))
        with mr.ReplayLoader(buffer, 4, num_threads=num_threads) as batches:
            if not legal:
                with refused(mr.EmptyError):
                    next(iter(batches))
                return
            for _ in range(2):
                drawn = []
                for batch in batches:
                    drawn += assert_delivered(built.twin, batch)
                assert sorted(drawn) == legal
        # The same batches as without a loader, and resumed like them.
        name = sorted(IN_ORDER)[int(rng.integers(len(IN_ORDER)))]
        expected = of_case(built, rng, IN_ORDER[name](7))
        wanted = []
        for _ in range(4):
            try:
                wanted.append(expected.sample(3))
            except mr.EmptyError:
                return
        buffer = built.open(sampler=IN_ORDER[name](7))
        with mr.ReplayLoader(buffer, 3, num_threads=num_threads) as batches:
            found = iter(endless(batches))
            for batch in wanted[:2]:
                same_batch(next(found), batch)
            state = pickle.loads(pickle.dumps(batches.state_dict()))
        again = built.open(sampler=IN_ORDER[name](8))
        with mr.ReplayLoader(again, 3, num_threads=num_threads) as batches:
            batches.load_state_dict(state)
            found = iter(endless(batches))
            for batch in wanted[2:]:
                same_batch(next(found), batch)

    return look


def endless(batches):
    """Batches of one iteration after another."""
    while True:
        yield from batches


def failed_batch(built, rng):
    """An error in a loader's thread is raised, and takes no step out of an epoch."""
    legal = built.twin.legal()
    if not legal:
        return
    calls = []
    failing = int(rng.integers(1 + len(legal) // 3))

    def function(batch):
        calls.append(1)
        if len(calls) == 1 + failing:
            raise ArithmeticError("asked to fail")
        return batch

    buffer = built.open(transforms=[mr.Apply(function)], sampler=mr.ShuffledSampler(seed=1))
    drawn, errors = [], []
    with mr.ReplayLoader(buffer, 3, num_threads=1) as loader:
        batches = iter(loader)
        while len(drawn) < len(legal):
            try:
                drawn += assert_delivered(built.twin, next(batches))
            except ArithmeticError as error:
                errors.append(str(error))
                batches = iter(loader)
    assert sorted(drawn) == legal
    assert errors == ["asked to fail"] * (failing < -(-len(legal) // 3))


def no_threads(built, rng):
    """A loader of 0 threads is refused, and takes nothing."""
    sampler = mr.ShuffledSampler(seed=1)
    buffer = of_case(built, rng, sampler)
    before = sampler.state_dict()
    try:
        mr.ReplayLoader(buffer, 4, num_threads=0)
    except mr.SchemaError as error:
        assert_refusal(error)
    else:
        raise AssertionError("0 threads were not refused")
    assert sampler.state_dict() == before


def dataset(num_workers):
    """A consumer that looks at a dataset with so many workers."""

    def look(built, rng):
        twin, legal = built.twin, built.twin.legal()
        buffer = built.open()
        data = mr.ReplayDataset(buffer)
        assert len(data) == len(legal)
        draws = data.draws(mr.ShuffledSampler(seed=2), 4)
        loader = DataLoader(data, sampler=draws, batch_size=None, num_workers=num_workers)
        if not legal:
            with refused(mr.EmptyError):
                next(iter(loader))
            return
        drawn = []
        for batch in loader:
            drawn += assert_delivered(twin, batch)
        assert sorted(drawn) == legal
        if num_workers:
            return
        for name in with_windows(twin):
            same = IN_ORDER[name](3)
            draws = data.draws(IN_ORDER[name](3), 2, num_batches=3)
            for batch in DataLoader(data, sampler=draws, batch_size=None):
                same_batch(batch, buffer.sample_by(same, 2))
        number = int(rng.integers(len(legal)))
        assert_item(data[number], expected_step(twin, legal[number]))
        by_rank = DataLoader(data, batch_size=3, collate_fn=mr.collate)
        items = next(iter(by_rank))
        steps = [expected_step(twin, index) for index in legal[:3]]
        for path in steps[0]:
            column = as_arrays(at_path(items, path))
            assert_column(path, column, [step[path] for step in steps])

    return look


def at_path(values, path):
    """A leaf of nested values."""
    for name in path.split("/"):
        values = values[name]
    return values


def assert_item(item, step):
    """One step as nested tensors."""
    for path, value in step.items():
        found = at_path(item, path)
        if isinstance(found, mr.Ragged):
            found = np.asarray(found.values)
            if isinstance(value, str | bytes):
                value = value.encode() if isinstance(value, str) else value
                value = np.frombuffer(value, np.uint8)
        np.testing.assert_array_equal(np.asarray(plain(found)), value, err_msg=path)


def stream(built, rng):
    """A stream draws what its sampler draws, whichever rank hands it out."""
    if not built.twin.legal():
        return
    buffer = built.open()
    for name in ("uniform", "stratified", "distinct", *with_windows(built.twin)):
        size = min(2, len(built.twin.legal()))
        sampler = IN_ORDER[name](3)
        wanted = [buffer.sample_by(sampler, size) for _ in range(4)]
        found = mr.ReplayStream(buffer, IN_ORDER[name](3), size, 4)
        for batch, expected in zip(found, wanted, strict=True):
            same_batch(batch, expected)
        for rank in range(2):
            split = mr.ReplayStream(buffer, IN_ORDER[name](3), size, 2, rank=rank, num_ranks=2)
            for batch, expected in zip(split, wanted[rank::2], strict=True):
                same_batch(batch, expected)
        rest = mr.ReplayStream(buffer, IN_ORDER[name](3), size, 4)
        next(iter(rest))
        again = mr.ReplayStream(buffer, IN_ORDER[name](3), size, 4)
        again.load_state_dict(rest.state_after(1))
        for batch, expected in zip(again, wanted[1:], strict=True):
            same_batch(batch, expected)


def with_windows(twin):
    """Names of samplers of several steps at once that have something to draw."""
    episodes = ("episodes", "ragged") if twin.whole_episodes() else ()
    return "sequence", *episodes


def stream_epochs(built, rng):
    """Epochs of a stream have each step once, and none where rows are being written."""
    legal, buffer = built.twin.legal(), built.open()
    if not legal:
        return
    if built.path is not None and built.buffer.writable:
        with refused(mr.SchemaError):
            mr.ReplayStream(buffer, mr.ShuffledSampler(seed=1), 3)
        copy = built.new_path("unwritten")
        buffer.snapshot(copy)
        buffer = mr.ReplayBuffer.open(copy)
        built.opened.append(buffer)
    drawn = []
    for batch in mr.ReplayStream(buffer, mr.ShuffledSampler(seed=1), 3):
        drawn += assert_delivered(built.twin, batch)
    assert sorted(drawn) == legal


# Several buffers.


def others(built, count):
    """The buffer of a case, and others like it."""
    found = [built]
    for number in range(1, count):
        name = f"other-{number}"
        folder = built.folder / name
        case = replace(built.case, seed=built.case.seed + 1000 * number, history="fresh")
        folder.mkdir(exist_ok=True)
        other = build(case, Path(folder))
        if "added" in built.fields:
            other.buffer.add_field("added", mr.Field((), "float32"), 1.5)
            other.twin.add_field("added", np.float32(1.5))
        built.opened.append(other)
        found.append(other)
    return found


def concat(count):
    """A consumer that looks at so many buffers, drawn from as one."""

    def look(built, rng):
        every = others(built, count)
        twins = [each.twin for each in every]
        legal = [twin.legal() for twin in twins]
        total = sum(map(len, legal))

        def joined(seed, **options):
            buffers = [each.open(sampler=mr.UniformSampler(seed=seed + 1)) for each in every]
            return mr.concat(buffers, seed=seed, **options)

        both = joined(1)
        assert len(both) == sum(len(twin.steps()) for twin in twins)
        if not total:
            with refused(mr.EmptyError):
                both.sample(3)
            return
        batch = both.sample(9)
        indices = check_joined(twins, batch)
        np.testing.assert_allclose(batch.probabilities, 1 / total, rtol=1e-6)
        assert all(index in legal[number] for number, index in indices)
        state = both.state_dict()
        expected = [both.sample(4) for _ in range(2)]
        again = joined(5)
        again.load_state_dict(state)
        for one in expected:
            same_batch(again.sample(4), one)
        chosen = indices[::-1]
        columns = [[n for n, _ in chosen], *zip(*[p for _, p in chosen], strict=True)]
        taken = both.take(*map(np.array, columns))
        assert check_joined(twins, taken) == chosen
        if count > 1:
            shares = joined(1, shares=[2, 1, 1])
            if all(legal):
                counts = np.bincount(shares.sample(8).buffer_ids, minlength=3)
                assert counts.tolist() == [4, 2, 2]
            else:
                before = [each.sampler.state_dict() for each in shares.buffers]
                with refused(mr.EmptyError):
                    shares.sample(8)
                assert [each.sampler.state_dict() for each in shares.buffers] == before
        with mr.ReplayLoader(joined(1), 9) as batches:
            same_batch(next(iter(batches)), batch)
        check_joined_windows(every)
        check_joined_episodes(every)

    return look


def check_joined_windows(every):
    """Windows of joined buffers are those of one of them, each as probable."""
    twins = [each.twin for each in every]
    expected = [twin.windows(2, "pad") for twin in twins]
    total = sum(map(len, expected))
    buffers = [each.open(sampler=SAMPLERS["sequence"](2)) for each in every]
    batch = mr.concat(buffers, seed=3).sample(30)
    found = list(zip(batch.buffer_ids.tolist(), indices_of(batch), strict=True))
    assert_even(batch, total)
    windows = [expected[number][index] for number, index in found]
    assert_windows(batch, windows)
    rows = [
        [window_step(twins[number], index) for index in indices]
        for (number, _), (indices, *_) in zip(found, windows, strict=True)
    ]
    for path in rows[0][0]:
        values = [[step[path] for step in steps] for steps in rows]
        assert_column(path, batch.fields[path], values)


def check_joined_episodes(every):
    """Whole episodes of joined buffers are padded to the longest of all."""
    expected = [
        {indices[0]: (indices, mask) for indices, mask in each.twin.whole_episodes()}
        for each in every
    ]
    if not all(expected):
        return
    buffers = [each.open(sampler=SAMPLERS["episodes"](2)) for each in every]
    batch = mr.concat(buffers, seed=3, shares=[1] * len(every)).sample(6)
    length = batch.window_positions.shape[1]
    lengths = []
    for number, index in enumerate(indices_of(batch)):
        indices, mask = expected[batch.buffer_ids[number]][index]
        rest = length - len(indices)
        lengths.append(len(indices))
        positions = [p for _, p in indices]
        assert batch.window_positions[number].tolist() == [*positions, *[positions[-1]] * rest], (
            index
        )
        assert batch.mask[number].tolist() == [*mask, *[False] * rest], index
    assert length == max(lengths)


def check_joined(twins, batch):
    """Steps of a joined batch hold their values; return (buffer, index) of each."""
    ids = batch.buffer_ids.tolist()
    indices = list(zip(ids, indices_of(batch), strict=True))
    steps = [expected_step(twins[number], index) for number, index in indices]
    assert_steps({p: as_arrays(a) for p, a in batch.fields.items()}, steps)
    return indices


def split(built, rng):
    """Parts share no step and have all of them; whole episodes stay together."""
    twin, buffer = built.twin, built.open()
    legal = set(twin.legal())
    for by in ("episode", "step"):
        units = twin.episodes() if by == "episode" else [[p] for p in twin.steps()]
        sizes = round(len(units) * 0.6), len(units) - round(len(units) * 0.6)
        if min(sizes) < 1 or len(units) < 2:
            if len(units) < 2:
                with refused(mr.EmptyError):
                    mr.split(buffer, [0.6, 0.4], by=by)
            continue
        parts = mr.split(buffer, [0.6, 0.4], by=by, seed=3)
        drawn = []
        for split in parts:
            mine = steps_of(split, twin)
            if by == "episode":
                together = [set(steps) for steps in units]
                assert all(s <= mine or not s & mine for s in together)
            drawn += mine
            copy = type(split).from_state(pickle.loads(pickle.dumps(split.state_dict())))
            check_split(buffer, copy, mine & legal)
            if by == "episode":
                check_windows_of_split(built, buffer, copy, mine)
        assert sorted(drawn) == twin.steps()


def steps_of(split, twin):
    """Steps within the ranges of a split."""
    ranges = zip(split.env_ids.tolist(), split.begins.tolist(), split.ends.tolist(), strict=True)
    rows = {(e, p) for e, begin, end in ranges for p in range(begin, end)}
    return rows & set(twin.steps())


def check_split(buffer, split, legal):
    """An epoch of a split has each of its legal starts once."""
    sampler = split.sampler(mr.ShuffledSampler(seed=1))
    if not legal:
        with refused(mr.EmptyError):
            buffer.sample_by(sampler, 2)
        return
    drawn = []
    while len(drawn) < len(legal):
        drawn += indices_of(buffer.sample_by(sampler, 3))
    assert sorted(drawn) == sorted(legal)


def check_windows_of_split(built, buffer, split, mine):
    """Windows of a split hold its steps alone."""
    expected = built.twin.windows(2, "pad")
    starts = {index for index in expected if index in mine}
    sampler = split.sampler(mr.SequenceSampler(2, mr.UniformSampler(seed=1), boundary="pad"))
    if not starts:
        with refused(mr.EmptyError):
            buffer.sample_by(sampler, 2)
        return
    draw = sampler.draw(buffer.view, 20 * len(starts))
    assert set(indices_of(draw)) == starts


def resumed(built, rng):
    """A sampler that is saved and loaded, or pickled, draws on as if it were not."""
    buffer = built.open()
    name = sorted(SAMPLERS)[int(rng.integers(len(SAMPLERS)))]
    one = SAMPLERS[name](3)
    try:
        for _ in range(2):
            buffer.sample_by(one, 2)
        state = pickle.loads(pickle.dumps(one.state_dict()))
        copy = pickle.loads(pickle.dumps(one))
        expected = [buffer.sample_by(one, 2) for _ in range(2)]
    except mr.EmptyError:
        return
    other = SAMPLERS[name](4)
    other.load_state_dict(state)
    for batch in expected if name in IN_ORDER else ():
        same_batch(buffer.sample_by(other, 2), batch)
        same_batch(buffer.sample_by(copy, 2), batch)


CONSUMERS = {
    "ReplayLoader": loader(None),
    "ReplayLoader, 2 threads": loader(2),
    "ReplayLoader, 0 threads": no_threads,
    "failed batch of a loader": failed_batch,
    "ReplayDataset": dataset(0),
    "ReplayDataset, 2 workers": dataset(2),
    "ReplayStream": stream,
    "ReplayStream, epochs": stream_epochs,
    "concat of 1": concat(1),
    "concat of 3": concat(3),
    "split": split,
    "resumed": resumed,
}
RARE = {"ReplayDataset, 2 workers": 25}
OF_HISTORY = {"concatenated": ("concat of 3",), "split": ("split",)}
