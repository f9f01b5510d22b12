"""Episodes: every whole one and no other, by brute force."""

import itertools
import json
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, FormatError, SchemaError
from mmreplay.samplers.episode import EpisodeSampler, return_within
from mmreplay.samplers.uniform import UniformSampler
from tests.buffer.support import Twin
from tests.samplers.test_sequence import random_turn, view_of
from tests.samplers.test_uniform import assert_uniform, chi_square_limit
from tests.samplers.windows_oracle import episode_begins


@dataclass
class Episode:
    """One episode of the oracle: steps alive, those of batches, legal starts."""

    env_id: int
    steps: list
    in_batch: list
    legal: list
    missing_start: bool
    running: bool


def episodes(oracle):
    """Every episode with a step alive, by environment, oldest first."""
    legal, in_batch = set(oracle.legal()), set(oracle.window_steps())
    found = []
    for env_id, stream in enumerate(oracle.envs):
        rows = stream.rows
        alive = [p for e, p in oracle.alive() if e == env_id]
        for number in sorted({rows[p].episode for p in alive}):
            mine = [p for p in alive if rows[p].episode == number]
            steps = [p for p in mine if not rows[p].final]
            over = any(rows[p].ended() or rows[p].final for p in mine)
            newest = mine[-1] == len(rows) - 1
            held = [p for p in steps if (env_id, p) in in_batch]
            # A last step that waits for its final row is still to come.
            over = over and held[-1:] == steps[-1:]
            if steps:
                found.append(
                    Episode(
                        env_id,
                        steps,
                        held,
                        [p for p in steps if (env_id, p) in legal],
                        not episode_begins(oracle, env_id, mine[0]),
                        newest and not over,
                    )
                )
    return found


def drawn(draw):
    """The episodes of a padded draw: (env_id, positions)."""
    return [(env_id, steps) for env_id, steps, _ in masked(draw)]


def masked(draw):
    """The same, each with the positions where the mask is true."""
    w = draw.windows
    found = []
    for env_id, row, mask in zip(draw.env_ids, w.positions, w.mask, strict=True):
        steps = sorted(set(row.tolist()))  # padded with the last step again
        assert row.tolist() == steps + [steps[-1]] * (len(row) - len(steps))
        assert not mask[len(steps) :].any()
        learned = row[: len(steps)][mask[: len(steps)]]
        found.append((int(env_id), tuple(steps), tuple(learned.tolist())))
    assert w.positions.shape[1] == max(len(steps) for _, steps, _ in found)
    return found


def ragged(draw):
    """The episodes of a ragged draw."""
    assert draw.windows is None
    pieces = itertools.pairwise(draw.offsets.tolist())
    return [(int(draw.env_ids[a]), tuple(draw.positions[a:b].tolist())) for a, b in pieces]


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_an_episode_whose_final_row_is_still_to_come_is_no_whole_one(layout):
    schema = mr.Schema(
        {
            "observation": mr.Field((), "int64"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )
    with mr.ReplayBuffer.create(None, schema, 16, engine="memory", autoreset="next_step") as buffer:
        sampler = mr.EpisodeSampler(mr.UniformSampler(seed=0), layout=layout)
        for step in range(3):
            buffer.add(observation=step, reward=1.0, terminated=False, truncated=step == 2)
        with pytest.raises(mr.EmptyError):
            buffer.sample_by(sampler, 1)
        running = mr.EpisodeSampler(mr.UniformSampler(0), layout=layout, running=True)
        assert buffer.sample_by(running, 1)["observation"].ravel().tolist() == [0, 1]
        buffer.add(observation=3, reward=0.0, terminated=False, truncated=False)
        batch = buffer.sample_by(sampler, 1)
        assert batch["observation"].ravel().tolist() == [0, 1, 2]


CASES = [
    {},
    {"by": "length"},
    {"by": "length", "headless": True},
    {"running": True},
    {"by": "length", "headless": True, "running": True},
    {"by": "length", "running": True, "max_length": 5},
    {"min_length": 2, "max_length": 4},
    {"where": lambda rows: rows.begin % 2 == 0},
]


def wanted(oracle, case):
    """What a sampler with these arguments may draw, and how often each."""
    found = {}
    for episode in episodes(oracle):
        length = len(episode.in_batch)
        least, most = case.get("min_length", 1), case.get("max_length", 1 << 40)
        where = case.get("where")
        if where is not None and episode.steps[0] % 2:
            continue
        if (
            episode.in_batch
            and least <= length <= most
            and (not episode.missing_start or case.get("headless"))
            and (not episode.running or case.get("running"))
        ):
            weight = len(episode.in_batch) if case.get("by") == "length" else 1
            found[episode.env_id, tuple(episode.in_batch), tuple(episode.legal)] = weight
    return found


def assert_shares(names, weights):
    """Each name comes in proportion to its weight."""
    counts, total = Counter(names), sum(weights.values())
    assert set(counts) == set(weights)
    statistic = 0.0
    for name, weight in weights.items():
        mean = len(names) * weight / total
        statistic += (counts[name] - mean) ** 2 / mean
    assert statistic < chi_square_limit(max(1, len(weights) - 1))


@pytest.mark.parametrize("turns", [15, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("autoreset", ["disabled", "next_step"])
@pytest.mark.parametrize(("capacity", "num_envs"), [(17, 1), (12, 3)])
def test_episodes_are_those_found_by_looking_at_every_row(
    tmp_path, autoreset, stored, capacity, num_envs, turns, rng
):
    twin = Twin(tmp_path / "ring", capacity, num_envs, autoreset=autoreset, stored=stored)
    kept = [EpisodeSampler(UniformSampler(1), **case) for case in CASES]
    for turn in range(turns):
        random_turn(twin, rng, turn)
        for number in rng.permutation(len(CASES))[:3]:
            case, view = CASES[number], view_of(twin.buffer)
            expected = wanted(twin.oracle, case)
            for sampler in (kept[number], EpisodeSampler(UniformSampler(2), **case)):
                if expected:
                    draw = sampler.draw(view, 30 * sum(expected.values()))
                    assert_shares(masked(draw), expected)
                else:
                    with pytest.raises(EmptyError, match="published rows begins one"):
                        sampler.draw(view, 1)
    twin.buffer.close()


def filled(path, lengths=(7, 4, 1, 12, 5), num_envs=2):
    """A buffer of episodes of these lengths, the last one running."""
    twin = Twin(path, 64, num_envs)
    kinds = [k for n in lengths for k in [""] * (n - 1) + ["t"]]
    twin.extend([[k] * num_envs for k in [*kinds, "", ""]])
    return twin


def test_a_ragged_batch_holds_the_same_steps_one_after_another(tmp_path):
    twin = filled(tmp_path / "ring")
    view = view_of(twin.buffer)
    padded = drawn(EpisodeSampler(UniformSampler(3)).draw(view, 50))
    sampler = EpisodeSampler(UniformSampler(3), layout="ragged")
    assert ragged(sampler.draw(view, 50)) == padded
    sampler = EpisodeSampler(UniformSampler(3), layout="ragged")
    with mr.ReplayBuffer.open(twin.path, sampler=sampler) as buffer:
        batch = buffer.sample(50)
        tensors = batch.torch()
    assert len(batch["reward"]) == len(batch) == sum(len(p) for _, p in padded)
    lengths = [len(positions) for _, positions in padded]
    assert np.diff(batch.offsets).tolist() == lengths
    assert tensors.offsets.tolist() == batch.offsets.tolist()
    ends = batch["terminated"]
    assert np.flatnonzero(ends).tolist() == (batch.offsets[1:] - 1).tolist()
    twin.buffer.close()


def test_a_padded_batch_has_a_mask_and_tells_first_steps(tmp_path):
    twin = filled(tmp_path / "ring")
    with mr.ReplayBuffer.open(twin.path, sampler=EpisodeSampler()) as buffer:
        batch = buffer.sample(20)
    longest = batch.mask.sum(1).max()
    assert batch["observation"].shape == (20, longest, 2)
    assert batch["is_first"][:, 0].all()
    assert not batch["is_first"][:, 1:].any()
    ends = batch["terminated"] & batch.mask
    assert (ends.sum(1) == 1).all()
    assert (ends.argmax(1) == batch.mask.sum(1) - 1).all()
    twin.buffer.close()


def test_every_episode_comes_once_an_epoch_of_a_shuffled_sampler(tmp_path):
    twin = filled(tmp_path / "ring")
    view = view_of(twin.buffer)
    sampler = EpisodeSampler(mr.ShuffledSampler(seed=1))
    assert sampler.num_batches(view, 4) == 3
    found = []
    while sampler.epoch == 0:
        assert sampler.more(view, 4)
        found += masked(sampler.draw(view, 4))
    assert sorted(found) == sorted(wanted(twin.oracle, {}))
    twin.buffer.close()


def test_episodes_come_by_the_priorities_of_their_first_steps(tmp_path):
    twin = filled(tmp_path / "ring")
    inner = mr.PrioritizedSampler(1.0, eps=0.0, eta=1.0, name=None, seed=0)
    with mr.ReplayBuffer.open(twin.path, sampler=EpisodeSampler(inner)) as buffer:
        batch = buffer.sample(200)
        error = np.where(batch["observation"][..., 0] <= 14, 3.0, 1.0)
        assert buffer.update_priorities(batch, error) == 0
        batch = buffer.sample(4000)
    # The first episode of each environment holds rows up to observation 14.
    share = (batch.positions == 0).mean()
    assert abs(share - 6 / (6 + 8)) < 0.01
    twin.buffer.close()


def test_episodes_are_chosen_by_their_returns(tmp_path):
    twin = filled(tmp_path / "ring")
    table = mr.episode_table(twin.buffer)
    for least, most in ((-np.inf, np.inf), (20.0, np.inf), (3.0, 60.0)):
        sampler = EpisodeSampler(UniformSampler(0), where=return_within(table, least, most))
        good = (table.returns >= least) & (table.returns <= most) & table.whole
        expected = {
            (int(e), tuple(range(b, s)))
            for e, b, s in zip(table.env_ids[good], table.begin[good], table.end[good], strict=True)
        }
        names = drawn(sampler.draw(view_of(twin.buffer), 40 * len(expected)))
        assert_uniform(names, expected)
    nobody = EpisodeSampler(where=return_within(table, 1e9))
    with pytest.raises(
        EmptyError, match=r"cannot draw 3 episodes: none of 62.*have `where` choose"
    ):
        nobody.draw(view_of(twin.buffer), 3)
    twin.buffer.close()


def test_a_filter_is_not_asked_again_of_an_episode_that_is_over(tmp_path):
    twin = filled(tmp_path / "ring")
    asked = []

    def where(rows):
        asked.extend(zip(rows.env_ids.tolist(), rows.begin.tolist(), strict=True))
        return np.ones(len(rows.begin), bool)

    sampler = EpisodeSampler(where=where)
    for _ in range(3):
        sampler.draw(view_of(twin.buffer), 3)
        twin.add(["t", ""])
        twin.add(["", ""])
    over = [name for name in asked if name[1] < 29]
    assert len(over) == len(set(over)) == 10
    twin.buffer.close()


def test_a_state_brings_the_episodes_back(tmp_path):
    twin = filled(tmp_path / "ring")
    view = view_of(twin.buffer)
    sampler = EpisodeSampler(UniformSampler(5), by="length")
    sampler.draw(view, 3)
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = [drawn(sampler.draw(view, 4)) for _ in range(3)]
    other = EpisodeSampler(UniformSampler(6), by="length")
    other.load_state_dict(state)
    assert [drawn(other.draw(view, 4)) for _ in range(3)] == expected
    with pytest.raises(FormatError, match=r"sampler state: by must be.*got 'length'"):
        EpisodeSampler().load_state_dict(state)
    twin.buffer.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "steps"}, "by must be one of.*got 'steps'"),
        ({"layout": "flat"}, "layout must be one of.*got 'flat'"),
        ({"min_length": 0}, "min_length must be an integer of at least 1, got 0"),
        ({"max_length": 2.5}, "max_length must be an integer of at least 1, got 2.5"),
        ({"where": 3}, "where must be a callable that selects episodes, got 3"),
        ({"sampler": 3}, "sampler must have draw, state_dict and.*got 3"),
        ({"min_length": 5, "max_length": 4}, "min_length and max_length.*got 5 and 4"),
        ({"headless": True}, "headless must be False with.*got True: the first"),
        (
            {"headless": True, "by": "length", "min_length": 2},
            "headless must be False with min_length, max_length or where, got True",
        ),
        (
            {"sampler": mr.PrioritizedSampler(name=None), "layout": "ragged"},
            "layout must be 'padded' with a sampler with priorities, got 'ragged'",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(SchemaError, match=message):
        EpisodeSampler(**arguments)


@pytest.mark.parametrize("answer", [True, np.ones(3, bool), np.ones(10)])
def test_a_filter_that_does_not_tell_of_each_episode_is_refused(tmp_path, answer):
    twin = filled(tmp_path / "ring", num_envs=1)
    sampler = EpisodeSampler(where=lambda rows: answer)
    with pytest.raises(SchemaError, match=r"where must return bool\[5\], got"):
        sampler.draw(view_of(twin.buffer), 3)
    twin.buffer.close()


@pytest.mark.parametrize("option", [{"max_length": 12}, {"where": np.ones_like}])
def test_epochs_take_no_episodes_that_may_leave_them(option):
    with pytest.raises(SchemaError, match=r"running must be False with.*got True"):
        mr.EpisodeSampler(mr.ShuffledSampler(0), running=True, **option)
    mr.EpisodeSampler(mr.UniformSampler(0), running=True, **option)
    mr.EpisodeSampler(mr.ShuffledSampler(0), **option)
