"""Each fault is named in a buffer that has it, and nothing is in its healthy twin."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.page.sample import take_sample

STEPS = 800
"""Steps of each environment."""


def robot(rng, count=STEPS, num_envs=2, length=40):
    """Steps of a robot with vectors alone ``[count, num_envs]``."""
    lead = count, num_envs
    ends = np.zeros(lead, bool)
    ends[length - 1 :: length] = True
    kinds = rng.random(lead) < 0.8
    return {
        "observation": rng.normal(size=(*lead, 6)).astype(np.float32),
        "action": rng.uniform(-0.9, 0.9, (*lead, 3)).astype(np.float32),
        "reward": rng.normal(size=lead).astype(np.float32),
        "terminated": ends & kinds,
        "truncated": ends & ~kinds,
    }


def game(rng):
    """The robot with one discrete action of four."""
    steps = robot(rng)
    return steps | {"action": rng.integers(0, 4, steps["reward"].shape)}


def keyboard(rng):
    """The robot with three switches of two, three and five places."""
    steps = robot(rng)
    switches = [rng.integers(0, n, steps["reward"].shape) for n in (2, 3, 5)]
    return steps | {"action": np.stack(switches, -1)}


def grid(rng):
    """A walk on 64 cells, along whose walls an agent runs."""
    steps = robot(rng)
    cells = np.zeros(steps["reward"].shape, np.int64)
    moves = rng.integers(-1, 2, cells.shape)
    for t in range(1, len(cells)):
        cells[t] = (cells[t - 1] + moves[t]).clip(0, 63)
    return steps | {"observation": cells, "action": moves + 1}


def camera(rng):
    """The robot with frames alone."""
    steps = robot(rng)
    shape = *steps["reward"].shape, 16, 16, 3
    return steps | {"observation": rng.integers(0, 256, shape, np.uint8)}


def choice(rng):
    """The robot with one of thirty actions, which is 1, the others 0."""
    steps = robot(rng)
    actions = np.eye(30, dtype=np.float32)
    return steps | {"action": actions[rng.integers(0, 30, steps["reward"].shape)]}


def make(path, steps):
    """A buffer of steps ``[T, E]``, of one field each."""
    fields = {name: mr.Field(value.shape[2:], str(value.dtype)) for name, value in steps.items()}
    count, num_envs = steps["reward"].shape
    with mr.ReplayBuffer.create(
        path, mr.Schema(fields), count + 50, num_envs, autoreset="disabled"
    ) as buffer:
        buffer.extend(steps, final_observation=steps["observation"])
    return path


def goals_alone(rng):
    """The robot, which is rewarded at the ends of episodes alone."""
    steps = robot(rng)
    ends = steps["terminated"] | steps["truncated"]
    return steps | {"reward": ends.astype(np.float32)}


def saturated_but_for_one_row_beyond(steps, rng):
    actions = steps["action"]
    actions[:] = np.where(rng.random(actions.shape) < 0.75, np.sign(actions), actions)
    actions[100, 0], actions[101, 1] = 1.5, -1.5


def saturated_by_tanh(steps, rng):
    # 66 % lie beyond 0.99, and none has the value of another.
    actions = steps["action"]
    size = np.where(
        rng.random(actions.shape) < 0.66,
        rng.uniform(0.99, 1, actions.shape),
        rng.uniform(0, 0.99, actions.shape),
    )
    actions[:] = np.sign(actions) * size


def saturated_lately(steps, rng):
    actions = steps["action"][-STEPS // 8 :]
    actions[:] = np.sign(actions)


def saturated_in_one_environment(steps, rng):
    actions = steps["action"][:, 1]
    many = rng.random(actions.shape) < 0.3
    actions[:] = np.where(many, np.sign(actions), actions)


def frozen_environment(steps, rng):
    observations = steps["observation"]
    observations[STEPS // 4 :, 1] = observations[STEPS // 4, 1]


def frozen_lately(steps, rng):
    observations = steps["observation"]
    observations[-STEPS // 8 :] = observations[-STEPS // 8]


def stored_twice(steps, rng):
    for values in steps.values():
        if values.dtype != bool:
            values[1::2] = values[::2]


def one_in_ten_stored_twice(steps, rng):
    observations = steps["observation"]
    observations[5::10] = observations[4::10]


def one_in_four_frames_is_the_one_before(steps, rng):
    frames = steps["observation"]
    frames[3::4] = frames[2::4]


def larger_goals_lately(steps, rng):
    steps["reward"][-STEPS // 4 :] *= 1000


def smaller_in_the_newest_eighth(steps, rng):
    steps["reward"][-STEPS // 8 :] /= 1000


def no_reward_in_one_environment(steps, rng):
    steps["reward"][:, 1] = 0


def rare_rewards_in_one_environment_alone(steps, rng):
    rewards = steps["reward"]
    rewards[:] = np.where(rng.random(rewards.shape) < 0.06, 1, 0)
    rewards[:, 1] = 0


def no_reward_lately(steps, rng):
    steps["reward"][-STEPS // 4 :] = 0


def never_ends(steps, rng):
    for name in ("terminated", "truncated"):
        steps[name][:, 1] = False


def both_flags(steps, rng):
    ends = steps["terminated"] | steps["truncated"]
    steps["terminated"][:] = steps["truncated"][:] = ends


def one_action_lately(steps, rng):
    steps["action"][-STEPS // 8 :] = 2


def one_action_in_one_environment(steps, rng):
    steps["action"][:, 1] = 2


def a_choice_nearly_always(steps, rng):
    actions = steps["action"]
    actions[rng.random(actions.shape[:2]) < 0.94] = np.eye(30)[7]


def one_value_lately(steps, rng):
    steps["action"][-STEPS // 8 :, :, 1] = 0.25


def a_switch_with_one_value(steps, rng):
    switch = steps["action"][..., 1]
    switch[:] = np.where(rng.random(switch.shape) < 0.99, 2, switch)


def larger_lately(steps, rng):
    steps["reward"][-STEPS // 8 :] *= 1000


def smaller_lately(steps, rng):
    steps["reward"][-STEPS // 4 :] /= 1000


def one_large_reward(steps, rng):
    steps["reward"][101, 1] = 1e6


def one_large_reward_at_an_end(steps, rng):
    steps["terminated"][79, 1] = True
    steps["reward"][79, 1] = 1e6


def clipped(steps, rng):
    values = steps["observation"][..., 2]
    values[:] = (10 * values).clip(-1, 1)


def a_sensor_that_breaks(steps, rng):
    steps["observation"][-STEPS // 7 :, :, 3] = 0.5


def one_much_larger(steps, rng):
    steps["observation"][..., 4] *= 1e6


FAULTS = [
    (robot, saturated_but_for_one_row_beyond, "saturated", "Saturated: action["),
    (robot, saturated_by_tanh, "saturated", "Saturated: action["),
    (robot, saturated_lately, "saturated", "] and 2 more in the newest eighth"),
    (robot, saturated_in_one_environment, "saturated", " in environment 1"),
    (robot, frozen_environment, "repeated rows", " in environment 1"),
    (robot, frozen_lately, "repeated rows", " in the newest eighth"),
    (grid, frozen_environment, "repeated rows", " in environment 1"),
    (camera, frozen_lately, "repeated frames", " in the newest eighth"),
    (robot, stored_twice, "repeated rows", "Repeated observations"),
    (camera, frozen_environment, "repeated frames", " in environment 1"),
    (camera, stored_twice, "repeated frames", "Repeated frames: observation"),
    (
        camera,
        one_in_four_frames_is_the_one_before,
        "repeated frames",
        "Repeated frames: observation",
    ),
    (grid, stored_twice, "repeated rows", "Repeated observations"),
    (robot, one_in_ten_stored_twice, "repeated rows", "Repeated observations"),
    (robot, no_reward_in_one_environment, "rewards", "No reward in environment 1"),
    (robot, rare_rewards_in_one_environment_alone, "rewards", "No reward in environment 1"),
    (robot, no_reward_lately, "rewards", "No reward in the newest quarter"),
    (robot, never_ends, "never ends", "No episode ends in environment 1"),
    (robot, both_flags, "ends", "40 of 40 ends are terminated and truncated"),
    (game, one_action_lately, "one action", " in the newest eighth: 2"),
    (game, one_action_in_one_environment, "one action", " in environment 1: 2"),
    (robot, one_value_lately, "one action", "newest eighth: action[1] is 0.25"),
    (choice, a_choice_nearly_always, "one action", "Nearly always one action: 7"),
    (robot, a_sensor_that_breaks, "never changes", "changes: observation[3]"),
    (keyboard, a_switch_with_one_value, "one action", ": action[1] is 2"),
    (robot, larger_lately, "reward scale", " times larger"),
    (goals_alone, larger_goals_lately, "reward scale", " times larger"),
    (robot, smaller_lately, "reward scale", " times smaller"),
    (robot, smaller_in_the_newest_eighth, "reward scale", " times smaller"),
    (robot, one_large_reward, "reward scale", "1 reward is far beyond the others"),
    (robot, one_large_reward_at_an_end, "reward scale", "1 reward is far beyond"),
    (robot, clipped, "clipped", "Clipped: observation[2]"),
    (robot, one_much_larger, "scales", "larger than the others: observation[4]"),
]


def levels(client):
    """Titles of the findings by their ids and levels."""
    found = client.json("overview")["checks"]
    assert not any(check["failed"] for check in found)
    return {(check["id"], check["level"] == "fine"): check["title"] for check in found}


@pytest.mark.parametrize(("kind", "fault", "name", "title"), FAULTS)
def test_a_fault_is_named_where_it_is_and_in_no_healthy_twin(
    ask, tmp_path, rng, kind, fault, name, title
):
    steps = kind(rng)
    twin = levels(ask(make(tmp_path / "twin", steps)))
    assert [key for key in twin if not key[1]] == []
    fault(steps, rng)
    found = levels(ask(make(tmp_path / "fault", steps)))
    assert title in found[name, False]
    assert (name, True) not in found


def flat(value):
    """An observation as arrays: a tuple by names."""
    if isinstance(value, tuple):
        return {f"part{i}": np.asarray(each) for i, each in enumerate(value)}
    return {"all": np.asarray(value)}


def record(path, name, count, max_steps=100, num_envs=2):
    """Steps of an environment of gymnasium, by random actions."""
    gymnasium = pytest.importorskip("gymnasium")
    columns = {}
    for env_id in range(num_envs):
        env = gymnasium.make(name, max_episode_steps=max_steps)
        env.action_space.seed(env_id)
        observation, _ = env.reset(seed=env_id)
        rows = []
        for _ in range(count):
            action = np.asarray(env.action_space.sample())
            following, *what = env.step(action if action.ndim else action.item())
            rows.append((flat(observation), flat(following), action, *what[:3]))
            observation = env.reset()[0] if what[1] or what[2] else following
        env.close()
        columns[env_id] = [*zip(*rows, strict=True)]
    observation, action = columns[0][0][0], columns[0][2][0]
    schema = mr.Schema(
        {
            "observation": {
                part: mr.Field(value.shape, str(value.dtype)) for part, value in observation.items()
            },
            "action": mr.Field(action.shape, str(action.dtype)),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )
    names = "observation", "following", "action", "reward", "terminated", "truncated"
    with mr.ReplayBuffer.create(path, schema, 2 * count, num_envs, autoreset="disabled") as buffer:
        for env_id, some in columns.items():
            steps = dict(zip(names, some, strict=True))
            for part in ("observation", "following"):
                steps[part] = {
                    each: np.stack([row[each] for row in steps[part]])[:, None]
                    for each in observation
                }
            final = steps.pop("following")
            steps |= {each: np.array(steps[each])[:, None] for each in names[2:]}
            steps["reward"] = steps["reward"].astype(np.float32)
            buffer.extend(steps, env_ids=[env_id], final_observation=final)
    return path


HEALTHY = [
    "CartPole-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Acrobot-v1",
    "Pendulum-v1",
    "Taxi-v4",
    "Blackjack-v1",
    "HalfCheetah-v5",
    "Hopper-v5",
    "Walker2d-v5",
    "Swimmer-v5",
    "InvertedPendulum-v5",
    "Reacher-v5",
    "InvertedDoublePendulum-v5",
    "Pusher-v5",
    "Ant-v5",
    "Humanoid-v5",
]
MUJOCO = HEALTHY[7:]


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.sliced(6)
def test_nothing_stands_out_of_an_environment_of_gymnasium(ask, tmp_path, name):
    if name in MUJOCO:
        pytest.importorskip("mujoco")
    found = levels(ask(record(tmp_path / "a", name, 300)))
    assert [title for (_, fine), title in found.items() if not fine] == []
    assert ("repeated rows", True) in found


def balance(observation):
    """Push the cart to where the pole falls."""
    return (observation[:, 2] + observation[:, 3] / 2 > 0).astype(np.int64)


def climb(observation):
    """Push the car the way it moves."""
    return np.where(observation[:, 1] >= 0, 2, 0)


def swing(observation):
    """Swing a pendulum up, and hold it there."""
    cos, sin, speed = observation.T
    angle = np.arctan2(sin, cos)
    energy = speed**2 / 2 + 15 * (cos - 1)
    torque = -0.3 * np.sign(speed + 1e-9) * energy.clip(-6, 6)
    torque = np.where(np.abs(angle) < 0.6, -(12 * angle + 3 * speed), torque)
    return torque.clip(-2, 2)[:, None].astype(np.float32)


RECORDED = [
    # Environment, steps, environments, what a vector environment does after an end,
    # policy, and what the environment is made with.
    ("CartPole-v1", 3000, 4, "next_step", balance, {}),
    ("CartPole-v1", 3000, 1, "same_step", None, {}),
    ("CartPole-v1", 3000, 8, "disabled", None, {}),
    ("MountainCar-v0", 3000, 2, "same_step", climb, {}),
    ("Acrobot-v1", 3000, 2, "disabled", None, {}),
    ("Pendulum-v1", 4000, 2, "next_step", swing, {}),
    ("FrozenLake-v1", 4000, 4, "next_step", None, {}),
    ("FrozenLake-v1", 4000, 4, "disabled", None, {"is_slippery": False}),
    ("CliffWalking-v1", 4000, 4, "same_step", None, {"max_episode_steps": 200}),
    ("Taxi-v4", 3000, 2, "disabled", None, {}),
    ("Hopper-v5", 2000, 4, "same_step", None, {}),
    ("HalfCheetah-v5", 1500, 2, "disabled", None, {"max_episode_steps": 300}),
    ("Humanoid-v5", 1000, 2, "next_step", None, {}),
    ("ALE/Breakout-v5", 600, 2, "next_step", None, {}),
    ("ALE/Breakout-v5", 1000, 2, "same_step", None, {"obs_type": "ram"}),
    ("ALE/SpaceInvaders-v5", 600, 2, "disabled", None, {}),
    ("ALE/Tennis-v5", 800, 2, "next_step", None, {}),
    ("ALE/Qbert-v5", 600, 2, "disabled", None, {}),
]


@pytest.mark.parametrize(("name", "steps", "num_envs", "autoreset", "policy", "options"), RECORDED)
@pytest.mark.sliced(4)
def test_nothing_stands_out_of_what_is_recorded(
    ask, tmp_path, name, steps, num_envs, autoreset, policy, options
):
    gymnasium = pytest.importorskip("gymnasium")
    if name.startswith("ALE/"):
        ale_py = pytest.importorskip("ale_py")
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        gymnasium.register_envs(ale_py)
    if name in MUJOCO:
        pytest.importorskip("mujoco")
    envs = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.make(name, **options)] * num_envs,
        autoreset_mode=gymnasium.vector.AutoresetMode[autoreset.upper()],
    )
    mr.record(envs, tmp_path / "a", policy, steps=steps, seed=3, progress=False)
    envs.close()
    found = levels(ask(tmp_path / "a"))
    assert [title for (_, fine), title in found.items() if not fine] == []


def few_goals(rng):
    """The robot, with a goal that is worth 100 and is reached twice."""
    steps = robot(rng)
    steps["reward"] *= np.float32(0.01)
    steps["reward"][79, 0] = steps["reward"][399, 1] = 100
    steps["terminated"][79, 0] = steps["terminated"][399, 1] = True
    return steps


def late_goals(rng):
    """The robot, which reaches its goal in the newest half, at episodes' ends."""
    steps = robot(rng)
    steps["reward"] *= np.float32(0.01)
    ends = steps["terminated"].copy()
    ends[: STEPS // 2] = False
    steps["reward"][ends] = 100
    return steps


def a_switch_and_a_torque(rng):
    """The robot with a gripper, which is open or closed."""
    steps = robot(rng)
    grips = np.repeat(rng.choice([-1, 1], (STEPS // 20, 2)), 20, axis=0)
    steps["action"][..., 2] = grips
    return steps


def eight_positions(rng):
    """The robot, whose torques are multiples of a quarter."""
    steps = robot(rng)
    steps["action"] = (rng.integers(-4, 5, steps["action"].shape) / 4).astype("f4")
    return steps


def one_hot(rng):
    """The walk on eight cells, of which one is 1."""
    steps = grid(rng)
    cells = np.eye(8, dtype=np.float32)[steps["observation"] % 8]
    return steps | {"observation": cells}


def touches(rng):
    """The robot with a contact, whose force is hardly ever between 0 and 1."""
    steps = robot(rng)
    force = np.repeat(rng.random((STEPS // 40, 2)) < 0.4, 40, axis=0).astype("f4")
    between = rng.random(force.shape) < 0.015
    force[between] = rng.random(between.sum())
    steps["observation"][..., 3] = force
    return steps


def rests_lately(rng):
    """The robot, which touches nothing in half of the steps, and in the newest."""
    steps = robot(rng)
    apart = np.repeat(rng.random((STEPS // 20, 2)) < 0.5, 20, axis=0)
    apart[-STEPS // 7 :] = True
    steps["observation"][..., 3][apart] = 0
    return steps


def costs_that_fall(rng):
    """The robot, which learns to reach its place: costs are those of the way to it."""
    steps = robot(rng)
    at = np.arange(STEPS)[:, None]
    cost = 10 * np.exp(-(at % 40) * (1 + at // 40) / 8) + 1e-9
    steps["reward"] = (-cost * rng.uniform(1, 2, (STEPS, 2))).astype(np.float32)
    return steps


def a_game_that_stands_still(rng):
    """The frames of a game, which shows a still for 24 steps of 40, and flickers."""
    steps = camera(rng)
    frames = steps["observation"]
    flickers = rng.random(frames.shape[:2]) < 0.05
    for t in range(1, STEPS):
        still = flickers[t] | (t % 40 < 24)
        frames[t, still] = frames[t - 1, still]
    return steps | {"action": rng.integers(0, 4, steps["reward"].shape)}


def an_environment_that_is_new(rng):
    """Two environments, whose episodes are of any length."""
    steps = robot(rng)
    steps["terminated"] = rng.random(steps["reward"].shape) < 0.03
    steps["truncated"][:] = False
    return steps


TWINS = [
    robot,
    game,
    keyboard,
    grid,
    camera,
    choice,
    few_goals,
    late_goals,
    goals_alone,
    a_switch_and_a_torque,
    touches,
    rests_lately,
    costs_that_fall,
    a_game_that_stands_still,
    eight_positions,
    one_hot,
    an_environment_that_is_new,
]


@pytest.mark.parametrize("kind", TWINS)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_stands_out_of_a_healthy_buffer_of_any_kind(ask, tmp_path, kind, seed):
    found = levels(ask(make(tmp_path / "a", kind(np.random.default_rng(seed)))))
    assert [title for (_, fine), title in found.items() if not fine] == []


def test_a_few_equal_frames_among_the_newest_are_fine(ask, tmp_path, rng):
    steps = camera(rng)
    frames = steps["observation"]
    frames[-60::10] = frames[-61:-1:10]
    found = levels(ask(make(tmp_path / "a", steps)))
    assert [title for (_, fine), title in found.items() if not fine] == []


@pytest.mark.slow
def test_environments_as_long_as_two_runs_are_looked_at_everywhere(tmp_path):
    lead = 128, 1023
    path = make(
        tmp_path / "a", {"observation": np.zeros((*lead, 1), np.float32), "reward": np.zeros(lead)}
    )
    with mr.ReplayBuffer.open(path) as buffer:
        sample = take_sample(buffer)
    assert not sample.complete
    counts = np.bincount(sample.eighths, minlength=8)
    assert counts.min() > len(sample) / 64
    assert (np.diff(sample.env_ids) >= 0).all()
    assert len({*zip(sample.env_ids, sample.positions, strict=True)}) == len(sample)


def test_fine_findings_of_many_fields_are_counted(ask, tmp_path, rng):
    numbers = rng.normal(size=(9, 400)).astype(np.float32)
    fields = {f"n{i}": mr.Field((), "float32") for i in range(9)}
    with mr.ReplayBuffer.create(
        tmp_path / "a",
        mr.Schema({"observation": fields, "reward": mr.Field((), "float32")}),
        400,
        autoreset="disabled",
    ) as buffer:
        values = {f"n{i}": column for i, column in enumerate(numbers)}
        values["n7"] = (10 * numbers[7]).clip(-1, 1)
        buffer.extend(observation=values, reward=numbers[0])
    found = ask(tmp_path / "a").json("overview")["checks"]
    clipped = [check for check in found if check["id"] == "clipped"]
    assert [check["level"] for check in clipped] == ["look", *4 * ["fine"]]
    assert clipped[0]["title"] == "Clipped: observation/n7"
    assert clipped[-1]["text"] == "So it is with 5 more fields."


def test_an_action_of_many_components_is_looked_at_by_sections(ask, tmp_path, rng):
    steps = robot(rng)
    steps["action"] = rng.uniform(-0.9, 0.9, (STEPS, 2, 2000)).astype(np.float32)
    twin = levels(ask(make(tmp_path / "twin", steps)))
    assert [key for key in twin if not key[1]] == []
    late = steps["action"][-STEPS // 8 :, :, 1990]
    late[:] = np.sign(late)
    found = levels(ask(make(tmp_path / "fault", steps)))
    title = found["saturated", False]
    assert title.startswith("Saturated: action[1990] in the newest ")
