"""Functions of the user's that raise: named, with what they got, of their own type."""

import functools

import numpy as np
import pytest

import mmreplay as mr
from tests.buffer.support import schema, step


class OwnError(Exception):
    """What a user's function raises."""


def fails(*_, **__):
    raise OwnError("own words")


MADE = []


@pytest.fixture(autouse=True)
def _all_closed():
    """What a test that raises leaves open must not go on committing in later ones."""
    yield
    while MADE:
        MADE.pop().close()


def filled(path=None, **options):
    engine = "memory" if path is None else "memmap"
    buffer = mr.ReplayBuffer.create(path, schema(), 100, engine=engine, **options)
    MADE.append(buffer)
    for number in range(40):
        ends = number % 9 == 8
        final = {"final_observation": [7, 7]} if ends else {}
        buffer.add(step(number, "u" if ends else ""), **final)
    return buffer


def goals(**options):
    fields = {
        "observation": {
            "achieved_goal": mr.Field((3,), "float32"),
            "desired_goal": mr.Field((3,), "float32"),
        },
        "action": mr.Field((), "int32"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    }
    buffer = mr.ReplayBuffer.create(
        None,
        mr.Schema(fields),
        100,
        engine="memory",
        transforms=[mr.HER("future", 1.0, fails, info=["action"])],
        **options,
    )
    for number in range(40):
        goal = np.full(3, number, np.float32)
        buffer.add(
            observation={"achieved_goal": goal, "desired_goal": goal},
            action=1,
            reward=0.0,
            terminated=number % 9 == 8,
        )
    return buffer


def notes_of(error):
    return "\n".join(error.value.__notes__)


CALLS = {
    "HER": (
        lambda _: goals(sampler=mr.UniformSampler(0)).sample(8),
        "raised by HER reward_fn tests.test_user_functions.fails, which got ("
        "float32[8, 3], float32[8, 3], {'action': int32[8]})",
    ),
    "Apply": (
        lambda _: filled(transforms=[mr.Apply(fails)]).sample(8),
        "raised by Apply's function tests.test_user_functions.fails, which got ({"
        "'observation': int64[8, 2], 'action': int32[8], 'reward': float32[8], ",
    ),
    "Apply, random": (
        lambda _: filled(transforms=[mr.Apply(fails, random=True)]).sample(8),
        "}, Generator)",
    ),
    "a partial": (
        lambda _: filled(transforms=[mr.Apply(functools.partial(fails, gain=1))]).sample(8),
        "raised by Apply's function functools.partial, which got ({",
    ),
    "DiscountedReturn": (
        lambda _: filled(
            transforms=[mr.DiscountedReturn(0.9, time_limit="bootstrap", value_fn=fails)]
        ).take(0, np.arange(3)),
        "raised by DiscountedReturn value_fn tests.test_user_functions.fails, which got ({",
    ),
    "GAE": (
        lambda _: filled(transforms=[mr.GAE(0.9, value=fails)]).sample(8),
        "raised by GAE value function tests.test_user_functions.fails, which got ({",
    ),
    "LambdaReturn": (
        lambda _: filled(transforms=[mr.LambdaReturn(0.9, value=np.ravel, bootstrap=fails)]).take(
            0, np.arange(3)
        ),
        "raised by LambdaReturn value function tests.test_user_functions.fails, which got ({",
    ),
    "EpisodeSampler": (
        lambda _: filled(sampler=mr.EpisodeSampler(mr.UniformSampler(0), where=fails)).sample(2),
        "raised by EpisodeSampler where tests.test_user_functions.fails, which got "
        "(EpisodeRows(env_ids=int64[4], ",
    ),
    "a schedule": (
        lambda _: filled(sampler=mr.PrioritizedSampler(beta=fails, seed=0)).sample(2),
        "raised by the schedule of beta tests.test_user_functions.fails, which got (0)",
    ),
    "export": (
        lambda path: mr.export(filled(path / "a"), path / "a.npz", progress=fails),
        "raised by progress tests.test_user_functions.fails, which got (",
    ),
    "verify": (
        lambda path: (filled(path / "a").close(), mr.verify_buffer(path / "a", progress=fails)),
        "raised by progress tests.test_user_functions.fails, which got (",
    ),
    "statistics": (
        lambda path: mr.field_moments(filled(path / "a"), progress=fails),
        "raised by progress tests.test_user_functions.fails, which got (",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_that_raises_is_named_with_what_it_got(tmp_path, name):
    call, expected = CALLS[name]
    with pytest.raises(OwnError, match="own words") as error:
        call(tmp_path)
    assert expected in notes_of(error)


def test_a_loaders_thread_tells_the_same(tmp_path):
    filled(tmp_path / "a").close()
    buffer = mr.ReplayBuffer.open(tmp_path / "a", transforms=[mr.Apply(fails)])
    with mr.ReplayLoader(buffer, 8) as loader, pytest.raises(OwnError) as error:
        next(iter(loader))
    assert "raised by Apply's function tests.test_user_functions.fails" in notes_of(error)
    buffer.close()
