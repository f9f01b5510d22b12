"""Hindsight over a ring as `HerReplayBuffer` draws it, beside a list of episodes."""

import json
from collections import Counter

import numpy as np
import pytest

from mmreplay import Field, ReplayBuffer, Schema, UniformSampler
from mmreplay.adapters.sb3 import goals as sb3_goals
from mmreplay.adapters.sb3.steps import Steps
from mmreplay.errors import CorruptError, EmptyError, SchemaError

ENVS = 3


class Episodes:
    """A ring whose goals tell the step, and the episodes that went into it."""

    def __init__(self, path, once, capacity=40, envs=ENVS):
        names = ["observation"] + ["next_observation"] * (not once)
        fields = {
            f"{name}/{key}": Field((1,), "float32")
            for name in names
            for key in ("achieved_goal", "desired_goal")
        }
        ends = {name: Field((), "bool") for name in ("terminated", "truncated")}
        schema = Schema.from_flat(fields | ends)
        self.ring = ReplayBuffer.create(
            path, schema, capacity, envs, autoreset="same_step", commit_every=None
        )
        self.ring.skip_autoreset_check()  # as the adapter does
        self.once, self.envs, self.number = once, envs, 0
        self.closed = np.full(envs, -1)
        self.hindsight = sb3_goals.Hindsight("achieved_goal")
        # Of each environment, episodes of positions; the last one is running.
        self.episodes = [[[]] for _ in range(envs)]
        self.unknown = set()

    def add(self, done):
        """One step of each environment; step n leads from goal n to n + 0.5."""
        now = np.full((self.envs, 1), self.number, np.float32)
        heads = self.ring.heads
        now += 1000 * np.arange(self.envs)[:, None]
        step = {"terminated": done, "truncated": np.zeros(self.envs, bool)}
        step["observation"] = {"achieved_goal": now, "desired_goal": -now}
        then = {"achieved_goal": now + 0.5, "desired_goal": -now}
        if not self.once:
            self.ring.add(step | {"next_observation": then})
        else:
            # The row after a step that goes on shows what it led to.
            step["observation"]["achieved_goal"] = now
            self.ring.add(step, final_observation=then if done.any() else None)
        for env in range(self.envs):
            self.episodes[env][-1].append((int(heads[env]), self.number))
            if done[env]:
                self.episodes[env].append([])
        self.number += 1

    def end_episodes(self):
        heads = self.ring.heads
        self.closed = self.closed.copy()
        running = [env for env in range(self.envs) if self.episodes[env][-1]]
        self.ring.end_episodes(np.array(running, np.int64))
        for env in running:
            self.closed[env] = heads[env]
            if self.once:
                self.unknown.add((env, self.episodes[env][-1][-1][0]))
            self.episodes[env].append([])

    def complete(self):
        """Of each environment, ended episodes with all their steps alive."""
        first = self.ring.span.first
        return [
            [e for e in self.episodes[env][:-1] if e and e[0][0] >= first[env]]
            for env in range(self.envs)
        ]

    def achieved(self, env, position):
        """The goal that a step achieved."""
        for episode in self.episodes[env]:
            for at, number in episode:
                if at == position:
                    later = 1.0 if self.once else 0.5
                    last = episode[-1][0] == at
                    return 1000 * env + number + (0.5 if last else later)
        raise AssertionError((env, position))

    def pairs(self, strategy):
        """Each drawable step with the steps whose goals it may get."""
        found = {}
        for env, episodes in enumerate(self.complete()):
            for episode in episodes:
                steps = [at for at, _ in episode if (env, at) not in self.unknown]
                for at in steps:
                    later = [other for other in steps if other >= at]
                    found[env, at] = {"future": later, "final": steps[-1:], "episode": steps}[
                        strategy
                    ]
        return found

    def draw(self, sampler, batch_size, num_virtual, strategy):
        return self.hindsight.draw(
            self.ring, sampler, self.closed, batch_size, num_virtual, strategy
        )


def drawable(world):
    view = world.ring.view
    with view.lock:
        ended = sb3_goals.EndedStarts(view, world.closed)
        starts = ended.starts
        env_ids = np.repeat(np.arange(world.envs), starts.lengths)
        spans = zip(starts.first, starts.stop, strict=True)
        positions = np.concatenate([np.arange(*span) for span in spans])
        legal = ended.legal(env_ids, positions)
        assert ended.num_illegal == (~legal).sum()
        places = env_ids[legal], positions[legal]
        if ended.num_illegal:
            ranked = ended.start_at(np.arange(legal.sum()))
            np.testing.assert_array_equal(ranked, places)
    return set(zip(*(column.tolist() for column in places), strict=True))


@pytest.mark.parametrize("once", [False, True])
def test_whole_ended_episodes_alone_are_drawn_from(tmp_path, rng, once):
    world = Episodes(tmp_path / "ring", once)
    seen = 0
    for number in range(300):
        world.add(rng.random(ENVS) < (0.02 if 100 < number < 200 else 0.2))
        if rng.random() < 0.1:
            world.end_episodes()
        expected = set(world.pairs("future"))
        assert drawable(world) == expected
        seen += len(expected) > 0
    assert seen > 200
    assert world.ring.span.first.min() > 100
    world.ring.close()


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("strategy", sb3_goals.STRATEGIES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.sliced(2)
def test_goals_follow_the_distribution_and_come_from_the_step_that_achieved_them(
    tmp_path, rng, monkeypatch, once, strategy, wide
):
    if wide:  # goals are read without the rest of their steps
        monkeypatch.setattr(sb3_goals, "WIDE", 0)
    world = Episodes(tmp_path / "ring", once, 12, 2)
    for _ in range(17):
        world.add(rng.random(2) < 0.3)
    world.add(np.array([False, False]))
    world.end_episodes()
    pairs = world.pairs(strategy)
    sampler, counts = UniformSampler(3), Counter()
    draws, virtual = 200, 192
    for _ in range(draws):
        batch, stops, goals, given = world.draw(sampler, 256, virtual, strategy)
        ids, at = batch.env_ids, batch.positions
        ends = {(env, e[-1][0]) for env in range(2) for e in world.episodes[env] if e}
        places = list(zip(ids.tolist(), at.tolist(), strict=True))
        last = at == stops - 1
        assert last.tolist() == [place in ends for place in places]
        assert set(places) == set(pairs)
        counts.update(zip(places[-virtual:], goals.tolist(), strict=True))
        wanted = [world.achieved(*each) for each in zip(ids[-virtual:], goals, strict=True)]
        assert given[:, 0].tolist() == wanted
    law = {
        (place, goal): draws * virtual / len(pairs) / len(goals)
        for place, goals in pairs.items()
        for goal in goals
    }
    assert set(counts) == set(law)
    # Pearson's statistic has mean df and variance 2 df under the law; seven standard
    # deviations are beyond any seed, and a bias of a tenth is far beyond those.
    statistic = sum((counts[each] - n) ** 2 / n for each, n in law.items())
    freedom = len(law) - 1
    assert abs(statistic - freedom) < 7 * (2 * freedom) ** 0.5
    world.ring.close()


def test_the_same_seed_draws_the_same_goals(tmp_path, rng):
    world = Episodes(tmp_path / "ring", False)
    for _ in range(30):
        world.add(rng.random(ENVS) < 0.3)
    drawn = [world.draw(UniformSampler(5), 64, 50, "future") for _ in range(2)]
    other = world.draw(UniformSampler(6), 64, 50, "future")
    np.testing.assert_array_equal(drawn[0][2], drawn[1][2])
    assert (drawn[0][2] != other[2]).any()
    world.ring.close()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("virtual", [0, 8])
def test_none_or_all_of_a_batch_may_get_goals(tmp_path, monkeypatch, virtual, wide):
    if wide:
        monkeypatch.setattr(sb3_goals, "WIDE", 0)
    world = Episodes(tmp_path / "ring", False)
    world.add(np.ones(ENVS, bool))
    _, _, goals, given = world.draw(UniformSampler(0), 8, virtual, "future")
    assert len(goals) == len(given) == virtual
    world.ring.close()


def test_without_a_whole_episode_nothing_is_drawn(tmp_path):
    world = Episodes(tmp_path / "ring", False, 10)
    told = r"cannot draw 4 transitions: the \d+ rows hold no"
    for _ in range(15):  # longer than the ring
        world.add(np.zeros(ENVS, bool))
        with pytest.raises(EmptyError, match=told):
            world.draw(UniformSampler(0), 4, 3, "future")
    world.add(np.ones(ENVS, bool))
    with pytest.raises(EmptyError, match=told):
        world.draw(UniformSampler(0), 4, 3, "future")
    world.ring.close()


INFO = {
    "is_success": True,
    "n": 3,
    "x": 0.1,
    "nan": float("inf"),
    "name": "Ä\0",
    "no": None,
    "list": [1, [2.5, "a"]],
    "pair": (1, (2, [3])),
    "nested": {"a": {"b": 1}},
    "array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "flag": np.bool_(True),
    "half": np.float16(0.5),
    "double": np.float64(0.1),
    "text": np.str_("abc"),
    "empty": np.zeros((0, 2), np.int8),
    "complex": np.complex64(1 + 2j),
}


def test_infos_come_back_as_they_went_in():
    rows = sb3_goals.encoded([INFO, {}, {"x": 1}], None, 0)
    assert rows.shape[1] % 64 == 0
    found, empty, one = sb3_goals.decoded(rows)
    assert (empty, one) == ({}, {"x": 1})
    assert list(found) == list(INFO)
    for key, value in INFO.items():
        assert type(found[key]) is type(value)
        if isinstance(value, np.ndarray | np.generic):
            assert found[key].dtype == value.dtype
            np.testing.assert_array_equal(found[key], value)
        else:
            assert found[key] == value
    found["array"][0, 0] = 7  # one's own


def test_only_the_keys_that_are_named_are_stored():
    info = {"a": 1, "b": object(), "terminal_observation": {"x": np.zeros(3)}}
    assert sb3_goals.decoded(sb3_goals.encoded([info], ["a", "c"], 0)) == [{"a": 1}]
    del info["b"]
    assert sb3_goals.decoded(sb3_goals.encoded([info], None, 0)) == [{"a": 1}]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), r"infos\[i\]\['k'\] must be .* got object"),
        ([1, {2}], r"infos\[i\]\['k'\]\[1\] must be .* got set"),
        ({1: 2}, r"infos\[i\]\['k'\] must be .* got dict"),
        ({"\0": 2}, r"infos\[i\]\['k'\] must be .* got dict"),
        (np.array([None]), r"infos\[i\]\['k'\] must be .* got ndarray"),
    ],
)
def test_what_cannot_be_stored_is_named(value, name):
    with pytest.raises(SchemaError, match=rf"^{name}\. .*info_keys=\["):
        sb3_goals.encoded([{"k": value}], None, 0)


def test_an_info_that_is_too_large_names_its_size():
    told = r"infos\[1\] takes 29 bytes as text, more than"
    with pytest.raises(SchemaError, match=told):
        sb3_goals.encoded([{"a": 1}, {"a": 12345678901234567890123}], None, 16)


def test_the_infos_of_a_monitor_fit_at_an_end():
    first = sb3_goals.encoded([{"TimeLimit.truncated": False}], None, 0)
    told = {"TimeLimit.truncated": True, "episode": {"r": -1 / 3, "l": 1000, "t": 2 / 7}}
    again = sb3_goals.encoded([told], None, first.shape[1])
    assert sb3_goals.decoded(again) == [told]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff",
        json.dumps({"\0": ["array", "O", [1], ""]}).encode(),
        json.dumps({"\0": ["array", "<f4", [9], ""]}).encode(),
        json.dumps({"\0": ["array"]}).encode(),
        json.dumps({"\0": 3}).encode(),
        b"3",
    ],
)
def test_damaged_infos_are_refused(text):
    row = np.zeros((1, 64), np.uint8)
    row[0, : len(text)] = np.frombuffer(text, np.uint8)
    with pytest.raises(CorruptError, match="info: the stored bytes are not JSON"):
        sb3_goals.decoded(row)


def test_further_fields_go_into_steps_of_one_and_of_several_environments():
    class FloatSpace:
        dtype = np.dtype("float32")

    for envs in (1, 2):
        extra = {"info": Field((4,), "uint8")}
        steps = Steps(FloatSpace, (3,), Field((2,), "float32"), envs, False, extra)
        assert steps.schema["info"] == extra["info"]
        steps.extra = {"info": np.arange(4 * envs, dtype=np.uint8).reshape(envs, 4)}
        zeros = np.zeros((envs, 3), np.float32)
        none = np.zeros(envs, bool)
        arguments = (np.zeros((envs, 2), np.float32), np.zeros(envs))
        step, _ = steps.rows({"": zeros}, {"": zeros}, *arguments, none, none)
        assert step["info"].reshape(envs, 4).tolist() == steps.extra["info"].tolist()
        plain = steps.plain(zeros, zeros, *arguments, none)
        assert (plain is None) == (envs == 2)
        if plain is not None:
            assert plain["info"] is steps.extra["info"]
            assert steps.exact(plain)
