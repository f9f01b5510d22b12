"""Parts of one buffer: disjoint, seeded, whole episodes, any sampler."""

import json

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, FormatError, SchemaError
from tests.buffer.support import Twin
from tests.contracts.sampler import steps_of
from tests.samplers.frequencies import assert_distribution


@pytest.fixture
def twin(tmp_path, rng):
    """A wrapped ring of two environments with short episodes and a running one."""
    twin = Twin(tmp_path / "b", 90, 2)
    for _ in range(12):
        kinds = rng.choice(["", "t", "u"], (10, 2), p=[0.7, 0.15, 0.15])
        twin.extend(kinds.tolist(), final=bool(rng.integers(2)))
    yield twin
    twin.buffer.close()


def rows(part):
    """Every (env_id, position) of a part."""
    stretches = zip(part.env_ids.tolist(), part.begins.tolist(), part.ends.tolist(), strict=True)
    return [(env, p) for env, begin, end in stretches for p in range(begin, end)]


def episode_of(buffer):
    """Number of the episode of each step, by (env_id, position)."""
    found, number = {}, 0
    for env_id in range(buffer.num_envs):
        episodes = buffer.episodes.episodes(env_id)
        for begin, end in zip(episodes.begin, episodes.end, strict=True):
            number += 1
            found |= {(env_id, p): number for p in range(int(begin), int(end))}
    return found


def epoch(part, view):
    """The steps of one epoch over a part."""
    sampler, found = part.sampler(mr.ShuffledSampler(0)), []
    while sampler.epoch == 0 and sampler.more(view, 7):
        found += steps_of(sampler.draw(view, 7))
    return found


FRACTIONS = [[0.9, 0.1], [0.5, 0.3, 0.2], [1.0], [0.25, 0.25], [1 / 3] * 3]


@pytest.mark.parametrize("by", ["episode", "step"])
@pytest.mark.parametrize("fractions", FRACTIONS)
def test_parts_are_disjoint_and_together_everything(twin, fractions, by):
    episodes = episode_of(twin.buffer)
    total = len(set(episodes.values())) if by == "episode" else len(episodes)
    parts = mr.split(twin.buffer, fractions, by=by, seed=3)
    every = [row for part in parts for row in rows(part)]
    assert len(every) == len(set(every))
    for part, fraction in zip(parts, fractions, strict=True):
        mine = rows(part)
        assert len(part) == len(mine)
        size = len({episodes[row] for row in mine}) if by == "episode" else len(mine)
        assert abs(size - fraction * total) <= 1
    if sum(fractions) > 0.99:
        assert sorted(every) == sorted(episodes)


def test_no_episode_is_in_two_parts(twin):
    episodes = episode_of(twin.buffer)
    parts = mr.split(twin.buffer, [0.6, 0.2, 0.2], seed=0)
    held = [{episodes[row] for row in rows(part)} for part in parts]
    for number, mine in enumerate(held):
        for other in held[number + 1 :]:
            assert not mine & other


@pytest.mark.parametrize("by", ["episode", "step"])
def test_the_seed_alone_decides(twin, by):
    first, again, other = (
        [sorted(rows(p)) for p in mr.split(twin.buffer, [0.5, 0.5], by=by, seed=seed)]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_every_episode_is_as_likely_to_be_held_out(twin):
    episodes = episode_of(twin.buffer)
    total = len(set(episodes.values()))
    size, held = round(total * 0.25), []
    for seed in range(300):
        _, part = mr.split(twin.buffer, [0.75, 0.25], seed=seed)
        held += {episodes[row] for row in rows(part)}
    # Without replacement they scatter less than the limit for independent ones.
    assert abs(len(held) - 300 * size) <= 300
    assert_distribution(held, dict.fromkeys(range(1, total + 1), 1 / total))


@pytest.mark.parametrize("by", ["episode", "step"])
@pytest.mark.parametrize("fractions", FRACTIONS)
def test_draws_are_the_legal_starts_of_the_part(twin, fractions, by):
    view, legal = twin.buffer.view, set(twin.oracle.legal())
    for part in mr.split(twin.buffer, fractions, by=by, seed=3):
        expected = sorted(legal & set(rows(part)))
        assert sorted(epoch(part, view)) == expected
        sampler = part.sampler(mr.UniformSampler(0))
        drawn = [p for _ in range(10) for p in steps_of(sampler.draw(view, 400))]
        assert_distribution(drawn, dict.fromkeys(expected, 1 / len(expected)))
        draw = part.sampler(mr.StratifiedSampler(0)).draw(view, 500)
        assert set(steps_of(draw)) <= set(expected)
        assert {e for e, _ in steps_of(draw)} == {e for e, _ in expected}


@pytest.mark.parametrize("by", ["episode", "step"])
def test_views_of_parts_keep_what_views_promise(twin, by):
    view = twin.buffer.view
    for part in mr.split(twin.buffer, [0.7, 0.3], by=by, seed=1):
        shown = part.of(view)
        expected = sorted(set(twin.oracle.legal()) & set(rows(part)))
        starts = shown.starts
        inside = [
            (env_id, p)
            for env_id in range(2)
            for p in range(int(starts.first[env_id]), int(starts.stop[env_id]))
        ]
        env_ids, positions = np.array(inside).T
        legal = shown.legal(env_ids, positions).tolist()
        assert [row for row, yes in zip(inside, legal, strict=True) if yes] == expected
        assert shown.num_illegal == len(inside) - len(expected)
        found = shown.start_at(np.arange(len(expected)))
        assert list(zip(*(a.tolist() for a in found), strict=True)) == expected
        ranks = shown.legal_before(env_ids, positions).tolist()
        assert ranks == [sum(start < row for start in expected) for row in inside]


def test_a_ring_that_moves_on_takes_steps_away_and_adds_none(twin, rng):
    parts = mr.split(twin.buffer, [0.5, 0.5], seed=2)
    for _ in range(12):
        twin.extend(rng.choice(["", "t"], (9, 2)).tolist())
        legal = set(twin.oracle.legal())
        for part in parts:
            expected = sorted(legal & set(rows(part)))
            sampler = part.sampler(mr.UniformSampler(0))
            if not expected:
                with pytest.raises(EmptyError, match="is a legal start"):
                    sampler.draw(twin.buffer.view, 3)
                continue
            # At most 90 starts: one is missed with a probability of 90 * exp(-22).
            drawn = steps_of(sampler.draw(twin.buffer.view, 2000))
            assert set(drawn) == set(expected)
    assert not expected


def test_windows_of_a_part_stay_in_its_episodes(twin):
    episodes = episode_of(twin.buffer)
    for part in mr.split(twin.buffer, [0.5, 0.5], seed=5):
        mine = {episodes[row] for row in rows(part)}
        inner = mr.SequenceSampler(3, mr.UniformSampler(0), boundary="episode")
        outer = mr.SequenceSampler(3, part.sampler(mr.UniformSampler(0)))
        for sampler in (part.sampler(inner), outer):
            draw = sampler.draw(twin.buffer.view, 300)
            env_ids = np.repeat(draw.env_ids, 3).tolist()
            places_ = draw.windows.positions.reshape(-1).tolist()
            drawn = {episodes[row] for row in zip(env_ids, places_, strict=True)}
            assert drawn <= mine
            longer = {e for e in mine if sum(v == e for v in episodes.values()) > 3}
            assert longer <= drawn


def test_a_part_is_stored_and_read_back(twin):
    part, other = mr.split(twin.buffer, [0.5, 0.5], seed=5)
    again = mr.Part.from_state(part.state_dict())
    assert rows(again) == rows(part)
    listed = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in part.state_dict().items()
    }
    assert rows(mr.Part.from_state(json.loads(json.dumps(listed)))) == rows(part)
    sampler = part.sampler(mr.UniformSampler(0))
    sampler.draw(twin.buffer.view, 3)
    fresh = again.sampler(mr.UniformSampler(1))
    fresh.load_state_dict(sampler.state_dict())
    view = twin.buffer.view
    assert steps_of(fresh.draw(view, 9)) == steps_of(sampler.draw(view, 9))
    with pytest.raises(FormatError, match=r"sampler state: it must be.*with other steps"):
        other.sampler(mr.UniformSampler(0)).load_state_dict(sampler.state_dict())
    assert repr(part) == f"<Part of {len(part):,} steps in {len(part.ends)} stretches>"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"kind": "x"}, "sampler state: kind must be 'Part', got 'x'"),
        ({"env_ids": 3}, "sampler state: env_ids must be a list of integers, got 3"),
        ({"begins": [3]}, "part state: ranges overlap or are out of order"),
        ({"buffer": None}, "part state: ranges overlap or are out of order"),
    ],
)
def test_a_damaged_part_is_refused(twin, damage, message):
    state = mr.split(twin.buffer, [1.0])[0].state_dict()
    with pytest.raises(FormatError, match=message):
        mr.Part.from_state(state | damage)
    swapped = state | {"begins": state["ends"], "ends": state["begins"]}
    with pytest.raises(FormatError, match="overlap or are out of order"):
        mr.Part.from_state(swapped)


def test_a_part_of_another_buffer_is_refused(twin, tmp_path):
    (part,) = mr.split(twin.buffer, [1.0])
    other = Twin(tmp_path / "other", 20)
    other.extend([["t"]] * 9)
    with pytest.raises(FormatError, match=r"the view must be of buffer .*, which was split, got "):
        part.sampler().draw(other.buffer.view, 3)
    other.buffer.close()


@pytest.mark.parametrize(
    ("fractions", "by", "message"),
    [
        ([], "episode", r"whose sum is at most 1, got \[\]"),
        (3, "episode", "fractions must be numbers.*sum is at most 1, got 3"),
        (["a"], "episode", r"whose sum is at most 1, got \['a'\]"),
        ([0.5, 0.6], "episode", "whose sum is at most 1"),
        ([0.0, 1.0], "step", r"whose sum is at most 1, got \[0\.0, 1\.0\]"),
        ([float("nan")], "step", r"whose sum is at most 1, got \[nan\]"),
        ([0.5], "row", "by must be 'episode' or 'step', got 'row'"),
    ],
)
def test_fractions_that_make_no_sense_are_refused(twin, fractions, by, message):
    with pytest.raises(SchemaError, match=message):
        mr.split(twin.buffer, fractions, by=by)


def test_too_few_episodes_are_said(tmp_path):
    twin = Twin(tmp_path / "few", 20)
    twin.extend([["t"]] * 3)
    with pytest.raises(EmptyError, match=r"cannot split 3 episodes by \[0.9, 0.1\]"):
        mr.split(twin.buffer, [0.9, 0.1])
    twin.buffer.clear()
    with pytest.raises(EmptyError, match=r"cannot split 0 steps by \[1.0\]"):
        mr.split(twin.buffer, [1.0], by="step")
    twin.buffer.close()


@pytest.mark.parametrize("windows", [mr.SequenceSampler(3), mr.EpisodeSampler()])
def test_no_windows_are_drawn_from_steps_of_parted_episodes(twin, windows):
    part = mr.split(twin.buffer, [0.5, 0.5], by="step")[0]
    for sampler in (windows, mr.ignore_earliest(2, windows)):
        with pytest.raises(SchemaError, match="part: windows must be drawn from whole"):
            part.sampler(sampler).draw(twin.buffer.view, 4)
    inner = mr.SequenceSampler(3, part.sampler(mr.UniformSampler(0)))
    assert set(steps_of(inner.draw(twin.buffer.view, 40))) <= set(rows(part))
    # An only part holds every episode whole.
    whole = mr.split(twin.buffer, [1.0], by="step")[0]
    whole.sampler(windows).draw(twin.buffer.view, 4)


@pytest.mark.parametrize("windows", [mr.SequenceSampler(1), mr.EpisodeSampler()])
def test_whole_episodes_may_lose_steps_and_grow(twin, windows):
    parts = mr.split(twin.buffer, [0.5, 0.5], seed=1)
    for _ in range(5):
        twin.extend([["", ""]] * 3)
        for part in parts:
            draw = part.sampler(windows).draw(twin.buffer.view, 20)
            steps = draw.windows.positions[draw.windows.mask]
            envs = np.broadcast_to(draw.env_ids[:, None], draw.windows.mask.shape)
            drawn = zip(envs[draw.windows.mask].tolist(), steps.tolist(), strict=True)
            assert set(drawn) <= set(rows(part))
