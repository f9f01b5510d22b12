"""Which answer to ``autoreset`` is asked for, and how a wrong one is noticed."""

import warnings

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.episodes import BREAK, END, FINAL, START
from mmreplay.episodes.rules import after_ends, next_step_signature
from mmreplay.errors import AutoresetWarning, SchemaError
from mmreplay.page.overview import find_reset_rows_of

gymnasium = pytest.importorskip("gymnasium")
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402

ANSWERS = ("disabled", "same_step", "next_step")
FLAG = mr.Field((), "bool")


def schema_of(space, stored=False):
    schema = mr.Schema.from_spaces(space, gymnasium.spaces.Discrete(2))
    fields = dict(schema.fields)
    if stored:
        fields["next_observation"] = fields["observation"]
    return mr.Schema.from_flat(fields)


def played(name, mode, steps, num_envs=4):
    """Steps of a vector environment, as Gymnasium's own loops yield them.

    Each with what the step led to: the final observation where it ended.
    """
    envs = SyncVectorEnv(
        [lambda: gymnasium.make(name)] * num_envs, autoreset_mode=AutoresetMode[mode]
    )
    envs.action_space.seed(0)
    observation, _ = envs.reset(seed=0)
    for _ in range(steps):
        action = envs.action_space.sample()
        following, reward, terminated, truncated, infos = envs.step(action)
        led_to, ended = following.copy(), terminated | truncated
        if mode == "SAME_STEP" and ended.any():
            for env in np.flatnonzero(ended):
                led_to[env] = infos["final_obs"][env]
        if mode == "DISABLED" and ended.any():
            following, _ = envs.reset(options={"reset_mask": ended})
        yield (
            {
                "observation": observation.copy(),
                "action": action,
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
            },
            led_to,
        )
        observation = following
    envs.close()


def warned(name, mode, answer, way, call, steps):
    """Messages of the warnings of one buffer that was filled in some way."""
    num_envs, stored = 4, way == "next_observation"
    space = gymnasium.make(name).observation_space
    given = list(played(name, mode, steps, num_envs))
    with (
        warnings.catch_warnings(record=True) as found,
        mr.ReplayBuffer.create(
            None, schema_of(space, stored), steps, num_envs, engine="memory", autoreset=answer
        ) as buffer,
    ):
        warnings.simplefilter("always")
        final = way == "final_observation" and answer != "next_step"
        if stored:
            given = [({**step, "next_observation": led}, led) for step, led in given]
        if call == "extend":
            block = {name: np.stack([s[name] for s, _ in given]) for name in given[0][0]}
            led = np.stack([led for _, led in given])
            buffer.extend(block, final_observation=led if final else None)
        for step, led in given if call == "add" else ():
            ended = final and (step["terminated"] | step["truncated"]).any()
            buffer.add(step, final_observation=led if ended else None)
    assert {each.category for each in found} <= {AutoresetWarning}
    assert {each.filename for each in found} <= {__file__}
    return [str(each.message) for each in found]


@pytest.mark.parametrize("num_envs", [2, np.int64(8)])
def test_what_follows_an_end_is_never_guessed(tmp_path, num_envs):
    schema = mr.Schema({"reward": mr.Field((), "float32"), "terminated": FLAG})
    with pytest.raises(
        SchemaError,
        match=rf"autoreset must say what the {num_envs} environments do .*"
        r"Schema.from_env\(envs\).*'next_step' \(Gymnasium's vector default, EnvPool: "
        r".*'same_step' "
        r"\(AutoresetMode.SAME_STEP, Stable-Baselines3's VecEnv, Isaac Lab: .*"
        r"'disabled' \(you call reset\)",
    ):
        mr.ReplayBuffer.create(tmp_path / "b", schema, 9, num_envs)
    assert not (tmp_path / "b").exists()
    for answer in ANSWERS:
        with mr.ReplayBuffer.create(
            None, schema, 9, num_envs, engine="memory", autoreset=answer
        ) as buffer:
            assert buffer.autoreset == answer
    with mr.ReplayBuffer.create(None, schema, 9, engine="memory") as buffer:
        assert buffer.autoreset == "disabled"


def add_all(buffer, steps):
    for step, _ in steps:
        buffer.add(step)


def test_a_wrong_answer_lets_reset_steps_be_drawn_and_is_warned_of(tmp_path):
    """Of 1,000 steps of random CartPole, 4 in 100 draws are no steps of it."""
    space = gymnasium.make("CartPole-v1").observation_space
    schema, steps = schema_of(space), list(played("CartPole-v1", "NEXT_STEP", 1000))
    with pytest.raises(SchemaError, match=r"autoreset must say what.*do after an episode ends"):
        mr.ReplayBuffer.create(tmp_path / "b", schema, 1000, 4)
    drawn = {}
    for answer in ("disabled", "next_step"):
        sampler = mr.UniformSampler(seed=0)
        with mr.ReplayBuffer.create(
            tmp_path / answer, schema, 1000, 4, autoreset=answer, sampler=sampler
        ) as buffer:
            if answer == "disabled":
                with pytest.warns(AutoresetWarning, match="autoreset='disabled' looks"):
                    add_all(buffer, steps)
            else:
                add_all(buffer, steps)
            # CartPole rewards each step with 1.
            drawn[answer] = (buffer.sample(4000)["reward"] == 0).mean()
    assert 0.03 < drawn["disabled"] < 0.06
    assert drawn["next_step"] == 0


@pytest.mark.parametrize("call", ["add", "extend"])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("mode", [mode.name for mode in AutoresetMode])
@pytest.mark.parametrize("way", ["rewards", "final_observation", "next_observation"])
@pytest.mark.parametrize("name", ["CartPole-v1", "FrozenLake-v1"])
def test_gymnasiums_next_step_mode_under_another_answer_is_warned_of_once(
    name, way, mode, answer, call
):
    """In FrozenLake almost every reward is 0: rewards alone say nothing there."""
    found = warned(name, mode, answer, way, call, 250)
    wrong = mode == "NEXT_STEP" and answer != "next_step"
    if not wrong or (name, way) == ("FrozenLake-v1", "rewards"):
        assert found == []
        return
    (message,) = found
    assert message.startswith(f"autoreset='{answer}' looks wrong: the r")
    assert "create the buffer with autoreset='next_step'" in message
    assert ("repeats the final observation" in message) == (way != "rewards")
    assert ("must be infos['final_obs']" in message) == (way == "next_observation")


def ring(**options):
    schema = mr.Schema(
        {
            "observation": mr.Field((2,), "float32"),
            "reward": options.pop("reward", mr.Field((), "float32")),
            "terminated": FLAG,
        }
    )
    return mr.ReplayBuffer.create(
        None, schema, 4000, options.pop("num_envs", 1), engine="memory", **options
    )


def episodes(buffer, rng, count, first=0.0, others=1.0, final=False, still=False):
    """Episodes of one environment, whose first reward may differ from the others."""
    for _ in range(count):
        seen = rng.random((9, 2), np.float32)
        for t in range(8):
            buffer.add(
                observation=seen[0] if still else seen[t],
                reward=first if t == 0 else others,
                terminated=t == 7,
                final_observation=seen[8 * (not still)] if final and t == 7 else None,
            )


def quiet(fill):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill()


@pytest.mark.parametrize("others", [1.0, 0.0])
def test_fewer_than_32_ends_decide_nothing(rng, others):
    with ring() as buffer:
        quiet(lambda: episodes(buffer, rng, 32, others=others))
        with pytest.warns(AutoresetWarning) if others else warnings.catch_warnings():
            episodes(buffer, rng, 2, others=others)


def test_a_known_final_observation_that_no_row_repeats_is_proof_of_a_right_answer(rng):
    with ring() as buffer:
        quiet(lambda: episodes(buffer, rng, 200, final=True))


def test_an_observation_that_never_changes_decides_nothing(rng):
    """The rewards are, as they are where no final observation is known."""
    with ring() as buffer:
        quiet(lambda: episodes(buffer, rng, 32, final=True, still=True))
        with pytest.warns(AutoresetWarning, match="the reward is 0 after each of 3"):
            episodes(buffer, rng, 2, final=True, still=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float64"])
def test_zeros_of_every_dtype_are_found(rng, dtype):
    with ring(reward=mr.Field((), dtype)) as buffer:
        stored = buffer.schema["reward"].numpy
        one = np.array({"bfloat16": 0x3F80}.get(dtype, 1), stored)
        with pytest.warns(AutoresetWarning):
            episodes(buffer, rng, 40, stored.type(0), one)


def test_a_warning_that_is_an_error_leaves_nothing_of_the_step_and_comes_once(rng):
    with ring() as buffer:
        warnings.simplefilter("error")
        with pytest.raises(AutoresetWarning):
            episodes(buffer, rng, 40)
        heads = buffer.heads.copy()
        step = {"observation": [0.0, 0.0], "reward": 0.0, "terminated": False}
        buffer.add(step)
        assert buffer.heads == heads + 1
        assert heads % 8 == 0
        episodes(buffer, rng, 40)


def test_rows_that_cannot_be_read_stop_the_check_and_no_add(rng, monkeypatch):
    with ring() as buffer:
        store = buffer.view._store
        monkeypatch.setattr(type(store), "gather", _refuse)
        quiet(lambda: episodes(buffer, rng, 40))
        assert len(buffer) == 320


def _refuse(self, rows, paths):
    raise OSError("no")


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_a_buffer_that_goes_on_is_checked_and_a_resize_forgets_nothing(tmp_path, rng, engine):
    schema = mr.Schema({"reward": mr.Field((), "float32"), "terminated": FLAG})

    def fill(buffer, steps):
        reward = (np.arange(steps) % 8 != 0).astype(np.float32)
        ended = np.arange(steps) % 8 == 7
        for lead in range(0, steps, 24):
            buffer.extend(reward=reward[lead : lead + 24], terminated=ended[lead : lead + 24])

    with mr.ReplayBuffer.create(tmp_path / "b", schema, 4000, engine=engine) as buffer:
        quiet(lambda: fill(buffer, 8 * 20))
        buffer.resize(5000)
        with pytest.warns(AutoresetWarning):
            fill(buffer, 8 * 15)
        quiet(lambda: fill(buffer, 8 * 40))
    with mr.ReplayBuffer.open(tmp_path / "b", "r+") as buffer:
        with pytest.warns(AutoresetWarning):
            fill(buffer, 8 * 40)
        quiet(lambda: fill(buffer, 8 * 40))


def talk(number):
    """Texts, bytes and tokens of an observation, of equal lengths for some numbers."""
    return {
        "text": f"ü{number % 1000:03}",
        "bytes": bytes([number % 251, 7]),
        "tokens": np.array([number, number + 1][: 1 + number % 2], np.int32),
    }


TALK = {
    "text": mr.Field.text(20),
    "bytes": mr.Field.bytes(20),
    "tokens": mr.Field((None,), "int32", max_length=4),
}


@pytest.mark.parametrize("engine", ["memory", "memmap", "zarr"])
@pytest.mark.parametrize("kind", ["text", "tokens", "all", "beside"])
@pytest.mark.parametrize("way", ["rewards", "final_observation", "next_observation"])
@pytest.mark.parametrize(("call", "num_envs"), [("add", 1), ("extend", 2)])
@pytest.mark.parametrize("resets", [True, False])
def test_resets_are_found_by_values_of_any_length(
    tmp_path, engine, kind, way, call, resets, num_envs
):
    """And are not missed because a field that is no observation varies."""
    fields = {
        "observation": mr.Field((1,), "float32"),
        "reward": mr.Field((), "float32"),
        "terminated": FLAG,
    }
    if kind == "beside":
        fields["note"] = mr.Field.text(20)
    else:
        fields["observation"] = TALK if kind == "all" else TALK[kind]
    if way == "next_observation":
        fields["next_observation"] = fields["observation"]

    def observed(number):
        if kind == "beside":
            return np.array([number], np.float32)
        return talk(number) if kind == "all" else talk(number)[kind]

    steps, finals = [], []
    for t in range(9 * 36):
        # A row that resets has reward 0 and what the episode ended with.
        ended, reset = t % 9 == 8, resets and t % 9 == 0 and t > 0
        step = {
            "observation": observed(t),
            "reward": 0.0 if reset or t % 9 == 3 else 1.0,
            "terminated": ended,
        }
        following = observed(t + 1 if resets or not ended else t + 100)
        if kind == "beside":
            step["note"] = "a" * (t % 3)
        if way == "next_observation":
            step["next_observation"] = following
        steps.append(step)
        finals.append(following)
    with (
        warnings.catch_warnings(record=True) as found,
        mr.ReplayBuffer.create(
            None if engine == "memory" else tmp_path / "b",
            mr.Schema(fields),
            400,
            num_envs,
            engine=engine,
            autoreset="disabled",
            heap_bytes="64 KiB",
        ) as buffer,
    ):
        warnings.simplefilter("always")
        final = way == "final_observation"
        if call == "add":
            for step, last in zip(steps, finals, strict=True):
                given = last if final and step["terminated"] else None
                buffer.add(
                    {name: many(v, num_envs) for name, v in step.items()},
                    final_observation=None if given is None else many(given, num_envs),
                )
        else:
            # Several blocks: ends count where a row follows them.
            for first in range(0, len(steps), 27):
                block = [
                    {name: many(v, num_envs) for name, v in step.items()}
                    for step in steps[first : first + 27]
                ]
                last = [many(each, num_envs) for each in finals[first : first + 27]]
                buffer.extend(joined(block), final_observation=joined(last) if final else None)
        judged = find_reset_rows_of(buffer)
    messages = [str(each.message) for each in found]
    if not resets:
        assert (messages, judged) == ([], None)
        return
    [message] = messages
    assert "autoreset='disabled' looks wrong: the r" in message
    assert ("repeats the final observation" in message) == (way != "rewards")
    # The page judges by the same rule.
    assert ("repeats the final observation" in judged) == (way != "rewards")


def many(value, num_envs):
    """A value, or nested values, of each of some environments."""
    if isinstance(value, dict):
        return {name: many(each, num_envs) for name, each in value.items()}
    return value if num_envs == 1 else [value] * num_envs


def joined(steps):
    """Steps as one block."""
    if isinstance(steps[0], dict):
        return {name: joined([step[name] for step in steps]) for name in steps[0]}
    return list(steps)


def test_adapters_whose_library_states_the_mode_are_not_checked(tmp_path, rng):
    with ring() as buffer:
        buffer.skip_autoreset_check()
        quiet(lambda: episodes(buffer, rng, 60))


def test_rows_after_ends_are_those_of_a_loop(rng):
    """Over random flags of several environments, also cut off at either side."""
    for _ in range(200):
        num = int(rng.integers(1, 40))
        env_ids = np.sort(rng.integers(0, 3, num))
        flags = rng.choice(
            np.array([0, START, START | END, 2, 4, FINAL, START | BREAK], np.uint8), num
        )
        expected = [
            i
            for i in range(1, num)
            if env_ids[i] == env_ids[i - 1]
            and flags[i] & START
            and not flags[i] & (BREAK | FINAL)
            and flags[i - 1] & (END | FINAL)
        ]
        assert after_ends(flags, env_ids).tolist() == expected


def test_the_signature_is_judged_by_the_numbers_stated():
    zeros, ones = np.zeros(32), np.ones(100)
    assert "0% of all other" in next_step_signature(zeros, ones)
    assert next_step_signature(zeros[:31], ones) is None
    assert next_step_signature(zeros, np.repeat([0, 1], 50)) is None
    assert "49% of" in next_step_signature(zeros, np.repeat([0, 1], [49, 51]))
    assert next_step_signature(np.append(zeros, 1e-9), ones) is None
    assert next_step_signature(np.append(zeros, np.nan), ones) is None
    # Rewards of several parts are 0 where all parts are.
    assert next_step_signature(np.stack([zeros, zeros + 1], 1), ones) is None
    known, last, final = np.ones(3, bool), [np.zeros((3, 2))], [np.ones((3, 2))]
    ends = (np.zeros(3), np.zeros(9), known, last, final)
    assert "each of 3 episode ends has reward 0" in next_step_signature(*ends, final)
    assert next_step_signature(*ends, last) is None
    assert next_step_signature(np.ones(3), *ends[1:], final) is None
    assert next_step_signature(*ends[:2], np.array([False, True, True]), *ends[3:], final) is None
    nans = [np.full((3, 2), np.nan)]
    assert next_step_signature(*ends[:4], nans, nans) is not None
