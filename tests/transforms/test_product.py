"""N-step, stacks, windows, hindsight, derived and stored next observations, autoreset
rules, wraps, clears and ends of all kinds at once, against episodes in Python lists."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.errors import StaleError
from tests.slices import count
from tests.transforms.oracle import after, expected, known_stop
from tests.transforms.world import World, distance

KINDS = st.sampled_from(["", "", "", "t", "u", "tu"])


@st.composite
def worlds(draw):
    """A small ring with anything in it, its transforms, and what they are."""
    n, k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ratio = draw(st.sampled_from([None, 0.0, 0.6, 1.0]))
    strategy = draw(st.sampled_from(["future", "final", "episode"]))
    gamma = draw(st.sampled_from([0.0, 0.5, 1.0]))
    transforms = [mr.NStep(n, gamma)]
    if ratio is not None:
        transforms.insert(0, mr.HER(strategy, ratio, distance))
    # Anywhere: what frames are stacked is none of the others' business.
    transforms.insert(draw(st.integers(0, len(transforms))), mr.FrameStack(k, "observation/frame"))
    capacity, num_envs = draw(st.integers(k + n, 12)), draw(st.integers(1, 3))
    autoreset = draw(st.sampled_from(["disabled", "same_step", "next_step"]))
    stored = draw(st.booleans())
    world = World(capacity, num_envs, autoreset, stored, transforms)
    for _ in range(draw(st.integers(1, 30))):
        kinds = draw(st.tuples(*[KINDS] * num_envs))
        final = draw(st.booleans()) and autoreset != "next_step" and not stored
        world.add(kinds, final=final)
        if draw(st.integers(0, 20)) == 0:
            world.clear()
    options = {"n": n, "k": k, "gamma": gamma, "ratio": ratio, "strategy": strategy}
    return world, options, draw(st.integers(1, 4)), draw(st.integers(0, 2**64 - 1))


def transition(world, options, row, goal=None):
    """What the oracle makes of a row, rewarded for a goal or as it was stored."""
    env_id, _, episode, t = row

    def reward(i):
        if goal is None:
            return episode.steps[i]["reward"]
        achieved = np.array(after(episode, i, world.stored)["achieved_goal"])
        return distance(achieved, goal, {})

    some = {name: options[name] for name in ("n", "k", "gamma")}
    return expected(
        episode,
        t,
        world.first(env_id),
        **some,
        stored=world.stored,
        next_step=world.autoreset == "next_step",
        reward=reward,
    )


def legal_rows(world, options):
    return [row for row in world.rows() if transition(world, options, row)]


def check(world, options, rows, batch, groups):
    """Compare a batch of rows, of which those of a group share their goal."""
    goals = batch["observation/desired_goal"].reshape(len(rows), 2)
    fields = {
        path: array.reshape(len(rows), *array.shape[batch.positions.ndim :])
        for path, array in batch.fields.items()
    }
    for group in groups:
        steps = [rows[i][3] for i in group]
        episode = rows[group[0]][2]
        stop = known_stop(episode, world.stored)
        last = min(max(steps) + options["n"], len(episode.steps)) - 1
        own = [episode.steps[t]["observation"]["desired_goal"] for t in steps]
        kept = [bool((goals[i] == goal).all()) for i, goal in zip(group, own, strict=True)]
        assert len(set(kept)) == 1
        if options["ratio"] in (None, 0.0) or last >= stop:
            assert all(kept)
        if options["ratio"] == 1.0 and last < stop:
            assert not any(kept)
        if not kept[0]:
            assert (goals[group] == goals[group[0]]).all()
            first = max(0, world.first(rows[group[0]][0]) - episode.begin)
            start = {"future": max(steps), "final": stop - 1, "episode": first}
            seen = range(start[options["strategy"]], stop)
            allowed = [after(episode, j, world.stored)["achieved_goal"] for j in seen]
            assert goals[group[0]].tolist() in allowed
        for i in group:
            goal = None if kept[0] else goals[i]
            same(fields, i, transition(world, options, rows[i], goal))
            if goal is not None:
                assert (fields["next_observation/desired_goal"][i] == goal).all()


def same(fields, i, wanted):
    for path, value in wanted.items():
        got = fields[path][i]
        if path in ("reward", "discount"):
            # Summed in float64 in another order, then rounded to float32.
            np.testing.assert_allclose(got, value, rtol=2e-7, atol=1e-12)
        else:
            np.testing.assert_array_equal(got, value, err_msg=path)


def product(case):
    world, options, length, key = case
    rows = legal_rows(world, options)
    every = {(row[0], row[1]) for row in rows}
    for row in world.rows():
        if row[:2] not in every:
            with pytest.raises(StaleError, match="cannot be drawn"):
                world.buffer.take(row[0], row[1])
    if not rows:
        return
    ids, positions = [row[0] for row in rows], [row[1] for row in rows]
    check(world, options, rows, world.draw(ids, positions, key), [[i] for i in range(len(rows))])
    windows = [
        rows[i : i + length]
        for i in range(len(rows) - length + 1)
        if rows[i + length - 1][:2] == (rows[i][0], rows[i][1] + length - 1)
    ]
    if not windows:
        return
    batch = world.draw(
        [w[0][0] for w in windows],
        [w[0][1] for w in windows],
        key,
        [[row[1] for row in w] for w in windows],
    )
    flat = [row for w in windows for row in w]
    groups = {}
    for i, row in enumerate(flat):
        groups.setdefault((i // length, row[2].begin), []).append(i)
    flatten(batch, length)
    check(world, options, flat, batch, list(groups.values()))


def flatten(batch, length):
    for path, array in batch.fields.items():
        assert array.shape[1] == length
        batch.fields[path] = array.reshape(-1, *array.shape[2:])


@pytest.mark.parametrize("on_resume", ["break", "truncate", "continue"])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_draws_stop_where_a_run_was_broken_off(on_resume, stored, n, tmp_path):
    transforms = [
        mr.HER("future", 1.0, distance),
        mr.FrameStack(3, "observation/frame"),
        mr.NStep(n, 0.5),
    ]
    world = World(20, 2, "disabled", stored, transforms, tmp_path / "buffer")
    for number in range(14):
        if number in (5, 9):
            world.reopen(on_resume)
        world.add(["", "t" if number == 8 else ""])
    options = {"n": n, "k": 3, "gamma": 0.5, "ratio": 1.0, "strategy": "future"}
    product((world, options, 2, 11))


@settings(max_examples=count(120, 25), deadline=None)
@given(worlds())
def test_every_legal_draw_equals_the_lists(case):
    product(case)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(worlds())
def test_every_legal_draw_equals_the_lists_at_length(case):
    product(case)
