"""Sequences: every window that there is and no other, by brute force."""

import itertools
import json
import pickle
from collections import Counter

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, FormatError, SchemaError
from mmreplay.samplers.sequence import SequenceSampler
from mmreplay.samplers.uniform import UniformSampler
from tests.buffer.support import Twin
from tests.samplers.test_uniform import chi_square_limit
from tests.samplers.windows_oracle import assert_windows, drawn, windows

SHAPES = [
    {"length": 1},
    {"length": 3},
    {"length": 4, "stride": 3},
    {"length": 2, "burn_in": 2},
    {"length": 2, "burn_in": 1, "bootstrap": 1, "stride": 2},
    {"length": 9},
]
BOUNDARIES = ["episode", "any", "pad"]

pytestmark = pytest.mark.filterwarnings(
    "ignore:windows with boundary='any' hold steps whose next observation is unknown"
)


def view_of(buffer):
    return buffer._reader


def random_turn(twin, rng, turn):
    """Add some steps to some environments; clear and reopen now and then."""
    num_envs = twin.buffer.num_envs
    steps = int(rng.integers(1, 6))
    env_ids = rng.permutation(num_envs)[: rng.integers(1, num_envs + 1)].tolist()
    ends = [0.7, 0.15, 0.15] if turn % 20 < 14 else [0.1, 0.5, 0.4]
    kinds = rng.choice(["", "t", "u"], (steps, len(env_ids)), p=ends)
    final = twin.autoreset == "disabled" and not twin.stored and turn % 3 == 0
    twin.extend(kinds.tolist(), env_ids, final)
    if turn % 11 == 10:
        twin.buffer.clear([turn % num_envs])
        twin.oracle.clear([turn % num_envs])
    if turn % 13 == 12 and twin.path is not None:
        twin.reopen(["break", "truncate", "continue"][turn % 3])


def check_shape(view, oracle, samplers, shape, boundary):
    """One sampler that has seen all, and one that has seen nothing yet, agree."""
    expected = windows(oracle, boundary=boundary, **shape)
    key = (boundary, *shape.items())
    fresh = SequenceSampler(sampler=UniformSampler(3), boundary=boundary, **shape)
    for sampler in (samplers[key], fresh):
        if expected:
            draw = sampler.draw(view, 30 * len(expected))
            assert_windows(draw, expected)
            assert (draw.probabilities == 1 / len(expected)).all()
            check_view(sampler.shown(view), list(expected))
        else:
            with pytest.raises(EmptyError, match="cannot draw 2 windows of"):
                sampler.draw(view, 2)


def check_view(view, legal):
    """Everything that the view inside says of the legal starts."""
    starts = view.starts
    ranks = np.arange(len(legal))
    places = view.start_at(ranks)
    assert list(zip(*(a.tolist() for a in places), strict=True)) == legal
    rows = [
        (env_id, position)
        for env_id in range(len(starts.first))
        for position in range(starts.first[env_id], starts.stop[env_id])
    ]
    env_ids, positions = np.array(rows).T
    told = view.legal(env_ids, positions)
    assert [row for row, yes in zip(rows, told, strict=True) if yes] == legal
    assert view.num_illegal == len(rows) - len(legal)
    before = np.cumsum(told) - told
    assert (view.legal_before(env_ids, positions) == before).all()


@pytest.mark.parametrize("turns", [15, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("autoreset", ["disabled", "next_step"])
@pytest.mark.parametrize(("capacity", "num_envs"), [(14, 1), (11, 3)])
def test_windows_are_those_found_by_looking_at_every_row(
    tmp_path, autoreset, stored, capacity, num_envs, turns, rng
):
    twin = Twin(tmp_path / "ring", capacity, num_envs, autoreset=autoreset, stored=stored)
    cases = list(itertools.product(SHAPES, BOUNDARIES))
    samplers = {
        (boundary, *shape.items()): SequenceSampler(
            sampler=UniformSampler(2), boundary=boundary, **shape
        )
        for shape, boundary in cases
    }
    for turn in range(turns):
        random_turn(twin, rng, turn)
        # Each turn looks at some of the cases, so that samplers skip moments.
        for number in rng.permutation(len(cases))[:6]:
            shape, boundary = cases[number]
            view = view_of(twin.buffer)
            check_shape(view, twin.oracle, samplers, shape, boundary)
    twin.buffer.close()


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_windows_of_transformed_steps_are_of_their_legal_starts(tmp_path, boundary, rng):
    twin = Twin(tmp_path / "ring", 25, 2, autoreset="next_step")
    transforms = [mr.FrameStack(3), mr.NStep(2, gamma=0.9)]
    reader = mr.ReplayBuffer.open(twin.path, transforms=transforms)
    view = view_of(reader)
    shape = {"length": 3, "burn_in": 1, "stride": 2, "boundary": boundary}
    sampler = SequenceSampler(sampler=UniformSampler(0), **shape)
    seen = 0
    for turn in range(30):
        random_turn(twin, rng, 1 + turn % 8)
        view.refresh()
        starts = view.starts
        rows = [
            (e, p)
            for e in range(2)
            for p in range(starts.first[e], starts.stop[e])
            if view.legal(np.array([e]), np.array([p]))[0]
        ]
        expected = windows(twin.oracle, legal=rows, before=2, **shape)
        if expected:
            assert_windows(sampler.draw(view, 30 * len(expected)), expected)
            seen += 1
    assert seen > 10
    reader.close()
    twin.buffer.close()


def filled(path, episodes=(7, 4, 1, 12, 5), num_envs=2, **options):
    """A buffer of episodes of these lengths; a step's reward is its position."""
    twin = Twin(path, 64, num_envs, **options)
    kinds = [k for n in episodes for k in [""] * (n - 1) + ["t"]]
    twin.extend([[k] * num_envs for k in kinds])
    return twin


def test_a_batch_holds_windows_flags_and_first_states(tmp_path):
    twin = filled(tmp_path / "ring")
    sampler = SequenceSampler(4, UniformSampler(0), boundary="pad", first_only=("action", "reward"))
    with mr.ReplayBuffer.open(twin.path, sampler=sampler) as buffer:
        batch = buffer.sample(40)
    assert batch["observation"].shape == (40, 4, 2)
    assert batch["next_observation"].shape == (40, 4, 2)
    assert batch["is_first"].shape == batch.mask.shape == (40, 4)
    assert batch["action"].shape == batch["reward"].shape == (40,)
    starts, places = {0, 7, 11, 12, 24}, batch.window_positions
    assert (batch["is_first"] == np.isin(places, list(starts)) & batch.mask).all()
    assert (batch["observation"][:, 0, 0] == batch["action"]).all()
    observed = batch["observation"].astype(np.int64)
    for row, env_id in enumerate(batch.env_ids):
        steps = twin.buffer.take(env_id, places[row])
        assert (observed[row] == steps["observation"]).all()
    torched = batch.torch()
    assert torched["is_first"].shape == (40, 4)
    twin.buffer.close()


def test_a_path_of_first_only_that_is_no_field_is_refused(tmp_path):
    twin = filled(tmp_path / "ring")
    sampler = SequenceSampler(4, first_only=("state",))
    refused = r"first_only must name fields of.*got 'state'"
    mixture = mr.MixtureSampler([(sampler, 1), (mr.ignore_earliest(2, sampler), 1)])
    for wrong in (sampler, mixture):
        with pytest.raises(SchemaError, match=refused):
            mr.ReplayBuffer.open(twin.path, sampler=wrong)
        with pytest.raises(SchemaError, match=refused):
            mr.ReplayBuffer.create(tmp_path / "b", twin.buffer.schema, 9, sampler=wrong)
        with pytest.raises(SchemaError, match=refused):
            mr.ReplayDataset(twin.path).draws(wrong, 4)
        with pytest.raises(SchemaError, match=refused):
            twin.buffer.sampler = wrong
    assert not (tmp_path / "b").exists()
    # Fields after transforms count, and of a function they are not known.
    good = SequenceSampler(4, first_only=("discount",))
    returns = [mr.NStep(2, gamma=0.9)]
    mr.ReplayBuffer.open(twin.path, sampler=good, transforms=returns).close()
    late = [mr.Apply(dict)]
    with (
        mr.ReplayBuffer.open(twin.path, sampler=sampler, transforms=late) as buffer,
        pytest.raises(SchemaError, match=refused),
    ):
        buffer.sample(2)
    twin.buffer.close()


def test_every_window_comes_once_an_epoch_of_a_shuffled_sampler(tmp_path):
    twin = filled(tmp_path / "ring")
    view = view_of(twin.buffer)
    sampler = SequenceSampler(4, mr.ShuffledSampler(seed=1))
    expected = sorted(windows(twin.oracle, 4))
    for epoch in range(3):
        names = []
        for _ in range(sampler.num_batches(view, 5)):
            assert sampler.epoch == epoch
            assert sampler.more(view, 5)
            draw = sampler.draw(view, 5)
            names += zip(draw.env_ids.tolist(), draw.positions.tolist(), strict=True)
        assert sampler.epoch == epoch + 1
        assert sorted(names) == expected
    twin.buffer.close()


def test_recent_windows_are_the_newest_of_each_environment(tmp_path):
    twin = filled(tmp_path / "ring")
    view = view_of(twin.buffer)
    sampler = SequenceSampler(4, mr.RecentSampler(3, 1.0, seed=0))
    draw = sampler.draw(view, 300)
    every = sorted(windows(twin.oracle, 4))
    newest = [n for e in range(2) for n in [w for w in every if w[0] == e][-3:]]
    names = zip(draw.env_ids.tolist(), draw.positions.tolist(), strict=True)
    assert sorted(set(names)) == newest
    twin.buffer.close()


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_windows_come_as_often_as_their_priorities_say(tmp_path, boundary, rng):
    twin = Twin(tmp_path / "ring", 40, 2, autoreset="next_step")
    shape = {"length": 3, "burn_in": 1, "bootstrap": 1, "boundary": boundary}
    inner = mr.PrioritizedSampler(1.0, 0.0, eps=0.0, eta=0.5, stratified=False, name=None, seed=0)
    sampler, view = SequenceSampler(sampler=inner, **shape), view_of(twin.buffer)
    for turn in range(12):
        random_turn(twin, rng, 1 + turn % 8)
        expected = windows(twin.oracle, **shape)
        if not expected:
            continue
        draw = sampler.draw(view, 60 * len(expected))
        assert {n for n, _ in drawn(draw)} <= set(expected)
        names = list(expected)
        env_ids, positions = np.array(names).T
        values = rng.random((len(names), 5)) + 0.1
        mask = np.array([expected[name][1] for name in names])
        assert sampler.update_priorities(view, env_ids, positions, values, mask) == 0
        counted = np.where(mask[:, 1:4], values[:, 1:4], 0)
        means = counted.sum(1) / mask[:, 1:4].sum(1)
        share = 0.5 * counted.max(1) + 0.5 * means
        share /= share.sum()
        draw = sampler.draw(view, 4000)
        wanted = dict(zip(names, share, strict=True))
        probabilities = [wanted[name] for name, _ in drawn(draw)]
        # Priorities are stored as float32.
        np.testing.assert_allclose(draw.probabilities, probabilities, rtol=1e-5)
        counts = Counter(name for name, _ in drawn(draw))
        statistic = sum((counts[n] - 4000 * p) ** 2 / (4000 * p) for n, p in wanted.items())
        assert statistic < chi_square_limit(max(1, len(names) - 1))
    twin.buffer.close()


def test_priorities_of_the_steps_to_learn_from_suffice(tmp_path):
    twin = filled(tmp_path / "ring")
    inner = mr.PrioritizedSampler(1.0, name=None, eta=1.0, seed=0)
    sampler = SequenceSampler(3, inner, burn_in=2)
    with mr.ReplayBuffer.open(twin.path, sampler=sampler) as buffer:
        batch = buffer.sample(8)
        assert buffer.update_priorities(batch, np.full((8, 5), 2.0)) == 0
        assert buffer.update_priorities(batch, np.full((8, 3), 2.0)) == 0
        assert buffer.update_priorities(batch, np.full(8, 2.0)) == 0
        with pytest.raises(SchemaError, match=r"priorities must have.*got \[8, 4\]"):
            buffer.update_priorities(batch, np.ones((8, 4)))
    twin.buffer.close()


def test_a_state_brings_the_windows_back(tmp_path):
    twin = filled(tmp_path / "ring")
    view = view_of(twin.buffer)
    sampler = SequenceSampler(3, UniformSampler(5), burn_in=1)
    sampler.draw(view, 4)
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = [drawn(sampler.draw(view, 9)) for _ in range(3)]
    other = SequenceSampler(3, UniformSampler(6), burn_in=1)
    other.load_state_dict(state)
    assert [drawn(other.draw(view, 9)) for _ in range(3)] == expected
    with pytest.raises(FormatError, match=r"sampler state: length must be 4 as.*got 3"):
        SequenceSampler(4, burn_in=1).load_state_dict(state)
    with pytest.raises(FormatError, match=r"sampler state: kind.*got 'SequenceSampler'"):
        UniformSampler().load_state_dict(state)
    twin.buffer.close()


def test_a_sampler_travels_without_its_buffer(tmp_path):
    twin = filled(tmp_path / "ring")
    view = view_of(twin.buffer)
    sampler = SequenceSampler(3, UniformSampler(5))
    sampler.draw(view, 4)
    other = pickle.loads(pickle.dumps(sampler))
    assert drawn(other.draw(view, 9)) == drawn(sampler.draw(view, 9))
    twin.buffer.close()


def test_padded_steps_do_not_count_in_priorities(tmp_path):
    twin = filled(tmp_path / "ring", (7, 4))
    sampler = SequenceSampler(3, mr.PrioritizedSampler(1.0, 0.0, eps=0.0, seed=0), boundary="pad")
    with mr.ReplayBuffer.open(twin.path, sampler=sampler) as buffer:
        batch = buffer.sample(500)
        values = np.where(batch.mask, 1.0, 1e6)
        buffer.update_priorities(batch, values)
        probabilities = buffer.sample(100).probabilities
    np.testing.assert_allclose(probabilities, 1 / 22)
    twin.buffer.close()


def test_a_sampler_serves_several_buffers_in_turn(tmp_path):
    twins = [
        filled(tmp_path / name, lengths) for name, lengths in (("a", (9, 3)), ("b", (2, 8, 5)))
    ]
    sampler = SequenceSampler(3, UniformSampler(5))
    for twin in [*twins, *twins]:
        expected = windows(twin.oracle, 3)
        draw = sampler.draw(view_of(twin.buffer), 30 * len(expected))
        assert_windows(draw, expected)
    for twin in twins:
        twin.buffer.close()


def test_windows_of_many_environments(tmp_path, rng):
    twin = Twin(tmp_path / "ring", 30, 40)
    sampler = SequenceSampler(4, UniformSampler(0), stride=2)
    for turn in range(6):
        random_turn(twin, rng, 1 + turn)
        kinds = rng.choice(["", "t"], (9, 40), p=[0.8, 0.2]).tolist()
        twin.extend(kinds)
        expected = windows(twin.oracle, 4, stride=2)
        assert_windows(sampler.draw(view_of(twin.buffer), 30 * len(expected)), expected)
    twin.buffer.close()


def test_windows_longer_than_every_episode_are_not_there(tmp_path):
    twin = filled(tmp_path / "ring")
    with (
        mr.ReplayBuffer.open(twin.path, sampler=SequenceSampler(13)) as buffer,
        pytest.raises(
            EmptyError,
            match=r"cannot draw 2 windows of 13 steps with boundary 'episode': none of "
            r"58 published rows begins one. Add steps.*boundary='pad'",
        ),
    ):
        buffer.sample(2)
    twin.buffer.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length must be an integer of at least 1, got 0"),
        ({"length": 2.0}, "length must be an integer.*got 2.0"),
        ({"length": 2, "burn_in": -1}, "burn_in must be an integer of at.*got -1"),
        ({"length": 2, "stride": 0}, "stride must be an integer of at least.*got 0"),
        ({"length": 2, "bootstrap": -3}, "bootstrap must be an integer.*got -3"),
        ({"length": 2, "boundary": "no"}, "boundary must be one of.*got 'no'"),
        ({"length": 2, "first_only": "state"}, "first_only.*got the string 'state'"),
        ({"length": 2, "first_only": 3}, "first_only must be a sequence of.*got 3"),
        ({"length": 2.5}, "length must be an integer of at least 1, got 2.5"),
        ({"length": 2, "sampler": "a"}, "sampler must have draw, state_dict.*got 'a'"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(SchemaError, match=message):
        SequenceSampler(**arguments)


class Windowed(mr.UniformSampler):
    """Somebody's own, which draws windows and does not say so."""

    def draw(self, view, batch_size):
        return SequenceSampler(2, mr.UniformSampler(0)).draw(view, batch_size)


def test_windows_inside_windows_are_refused(tmp_path):
    for inside, form in (
        (SequenceSampler(2), "SequenceSampler, of windows of 2 steps"),
        (mr.EpisodeSampler(), "EpisodeSampler, of padded episodes"),
        (mr.ignore_earliest(2, SequenceSampler(2)), "RestrictedSampler, of windows"),
    ):
        for make in (lambda s: SequenceSampler(3, s), mr.EpisodeSampler):
            with pytest.raises(SchemaError, match=f"must draw single steps, got the {form}"):
                make(inside)
    twin = filled(tmp_path / "ring")
    sampler = SequenceSampler(3, Windowed(0))
    with pytest.raises(SchemaError, match=r"the sampler.*got the Windowed, of windows"):
        sampler.draw(view_of(twin.buffer), 2)
    twin.buffer.close()


def test_what_the_sampler_inside_cannot_do_is_said(tmp_path):
    twin = filled(tmp_path / "ring")
    sampler, view = SequenceSampler(3), view_of(twin.buffer)
    assert sampler.more(view, 4)
    assert sampler.epoch is None
    assert not sampler.keeps_priorities
    with pytest.raises(TypeError, match="with epochs, got UniformSampler"):
        sampler.num_batches(view, 4)
    ones = np.ones(1, np.int64)
    with pytest.raises(SchemaError, match=r"update_priorities needs a.*got \['UniformSampler'\]"):
        sampler.update_priorities(view, ones, ones, np.ones(1))
    twin.buffer.close()


class Named(SequenceSampler):
    """A user's subclass, whose states have the kind of the class that it extends."""


class NamedEpisodes(mr.EpisodeSampler):
    """A user's subclass of the other sampler of windows."""


@pytest.mark.parametrize(
    "make", [lambda: Named(3, UniformSampler(0)), lambda: NamedEpisodes(UniformSampler(0))]
)
def test_states_of_a_subclass_load(tmp_path, make):
    twin = filled(tmp_path / "ring")
    sampler, view = make(), view_of(twin.buffer)
    sampler.draw(view, 4)
    state = sampler.state_dict()
    expected = sampler.draw(view, 4).positions.tolist()
    again = make()
    again.load_state_dict(state)
    assert again.draw(view, 4).positions.tolist() == expected
    with pytest.raises(FormatError, match=r"sampler state: kind must be.*got 'Named2'"):
        make().load_state_dict(state | {"kind": "Named2"})
    twin.buffer.close()
