"""Reprs say what things are; where it can be, they are the call that makes them."""

import numpy as np
import pytest

import mmreplay as mr

NAMES = {**{name: getattr(mr, name) for name in mr.__all__}, "array": np.array}

CALLS = [
    "UniformSampler()",
    "UniformSampler(seed=0, block=4)",
    "DistinctSampler(seed=3)",
    "StratifiedSampler(seed=0, stratified=False)",
    "PrioritizedSampler(alpha=0.6, beta=0.4, seed=0)",
    "PrioritizedSampler(alpha=0.5, beta=LinearSchedule(start=0.4, stop=1.0, steps=9), "
    "eps=0.01, alpha_every=7, normalize='buffer', name=None)",
    "RankPrioritizedSampler(alpha=0.7, beta=0.5, resort_every=10, stratified=False)",
    "RecentSampler(steps=100, ratio=0.5, sampler=UniformSampler(seed=0), seed=1)",
    "EmphasizeRecentSampler(num_updates=100, eta=0.5, smallest=10, seed=0)",
    "ShuffledSampler(seed=0)",
    "ShuffledSampler(seed=0, rank=1, block=8, num_ranks=2, drop_last=True)",
    "ShuffledSampler(shuffle=False, layout='time_major', batches=3)",
    "SequenceSampler(length=8, sampler=UniformSampler(seed=0), boundary='pad', "
    "stride=2, bootstrap=1)",
    "SequenceSampler(length=8, sampler=UniformSampler(), burn_in=4, first_only=('state',))",
    "EpisodeSampler(sampler=UniformSampler(seed=0), by='length', min_length=2, "
    "max_length=9, running=True)",
    "MixtureSampler(samplers=[(UniformSampler(seed=0), 0.25), "
    "(StratifiedSampler(seed=1), 0.75)], seed=2)",
    "LinearSchedule(start=0.4, stop=1.0, steps=100)",
    "NStep(n=3, gamma=0.99, rewards=None, discount='discount')",
    "FrameStack(k=4, paths=None, axis=None)",
    "ActionHistory(k=2, path=None, name='action_history', fill=0)",
    "Cast(dtype='float32', paths=None, scale=0.5, offset=0.0)",
    "OneHot(num_classes=3, path=None, start=0, dtype='float32')",
    "Delta(paths=None, name='delta')",
    "Normalize(means={'x': 0.0}, stds={'x': 1.0}, clip=None)",
    "SumTree(8)",
    "SegmentTree(8, 'min')",
    "SegmentTree(8, 'max', identity=0.0)",
    "RateLimiter(samples_per_insert=4.0, min_size=10, error_buffer=8.0, timeout=None, "
    "patience=10.0, on_timeout='raise')",
]


@pytest.mark.parametrize("call", CALLS)
def test_a_repr_is_the_call_that_makes_it_again(call):
    assert repr(eval(call, NAMES)) == call


def test_a_repr_tells_the_seed_that_a_state_brought():
    sampler = mr.UniformSampler(seed=0)
    sampler.load_state_dict(mr.UniformSampler(seed=7).state_dict())
    assert repr(sampler) == "UniformSampler(seed=7)"


@pytest.fixture
def path(tmp_path):
    schema = mr.Schema(
        {"observation": mr.Field((2,), "float32"), "terminated": mr.Field((), "bool")}
    )
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 50) as buffer:
        buffer.extend(observation=np.zeros((40, 2), np.float32), terminated=np.arange(40) % 10 == 9)
    return tmp_path / "b"


def test_reprs_of_datasets_and_streams_are_their_calls(path):
    dataset = mr.ReplayDataset(path, [mr.Delta()])
    made = "transforms=[Delta(paths=None, name='delta')]"
    assert repr(dataset) == f"ReplayDataset({str(path)!r}, {made})"
    assert repr(eval(repr(dataset), NAMES)) == repr(dataset)
    draws = dataset.draws(mr.UniformSampler(seed=0), batch_size=4, num_batches=2)
    assert repr(draws) == (
        f"<Draws of {dataset!r} by UniformSampler(seed=0), batch_size=4, num_batches=2>"
    )
    stream = mr.ReplayStream(
        path, mr.UniformSampler(seed=0), 8, 5, transforms=[mr.Delta()], num_ranks=2
    )
    assert repr(stream) == (
        f"ReplayStream({str(path)!r}, UniformSampler(seed=0), batch_size=8, "
        f"num_batches=5, {made}, rank=0, num_ranks=2)"
    )
    assert repr(eval(repr(stream), NAMES)) == repr(stream)


def test_what_is_of_an_open_buffer_names_it(path):
    with mr.ReplayBuffer.open(path) as buffer:
        assert repr(buffer.view) == f"<View of {path}: 40 rows>"
        assert repr(buffer.episodes) == "<EpisodeIndex of 40 steps>"
        first = mr.split(buffer, [0.5, 0.5])[0]
        assert repr(first.sampler(mr.UniformSampler(seed=0))) == (
            f"<UniformSampler(seed=0) within {first!r}>"
        )
        earliest = mr.ignore_earliest(3, mr.UniformSampler(seed=0))
        assert repr(earliest) == "<UniformSampler(seed=0) within ignore_earliest(3)>"
        loader = mr.ReplayLoader(buffer, 8, prefetch=3)
        assert repr(loader) == f"<ReplayLoader of {buffer!r}, batch_size=8, prefetch=3>"
        loader.close()
        assert repr(loader).endswith("prefetch=3, closed>")
    ram = mr.ReplayBuffer.create(None, buffer.schema, 9, engine="memory")
    assert repr(ram.view) == "<View of a buffer in RAM: 0 rows>"
    assert repr(mr.ReplayDataset(ram)) == "<ReplayDataset of a buffer in RAM>"


def test_several_buffers_name_each(path):
    with mr.concat([path, path], shares=[1, 3], seed=0) as both:
        named = f"[{both.buffers[0]!r}, {both.buffers[1]!r}]"
        assert repr(both) == f"<Concat of {named}, shares=[0.25, 0.75]>"
        dataset = mr.ConcatDataset(both)
        each = [mr.ReplayDataset(path)] * 2
        assert repr(dataset) == f"<ConcatDataset of {each}>"
        assert repr(dataset.draws(4)) == f"<Draws of {both!r}, batch_size=4>"
        assert repr(mr.ConcatStream(both, 4)) == (
            f"<ConcatStream of {dataset!r}, batch_size=4, rank 0 of 1>"
        )
        with mr.ReplayLoader(both, 8) as loader:
            assert repr(loader).startswith(f"<ReplayLoader of {both!r}, batch_size=8")
