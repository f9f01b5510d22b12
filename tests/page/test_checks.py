"""Each finding appears on a buffer made for it, and on none of the healthy ones."""

import re
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.page import checks as checks_module
from mmreplay.page import overview as overview_module
from mmreplay.page.checks import check_behind, check_dominates, check_ends, check_unknown_next
from mmreplay.page.priorities import EPS
from tests.page.conftest import healthy_steps, make_buffer, schema

LEVELS = ["problem", "look", "fine"]


def findings(client):
    """Problems and looks of the overview, by the id of the check."""
    checks = client.json("overview")["checks"]
    levels = [LEVELS.index(check["level"]) for check in checks]
    assert levels == sorted(levels)
    assert all(check["title"] and check["text"] and check["to"] for check in checks)
    return {check["id"]: check for check in checks if check["level"] != "fine"}


def discrete(rng, count, actions, path, capacity=5000, **options):
    fields = {
        "observation": mr.Field((3,), "float32"),
        "action": mr.Field((), "int64"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    }
    ends = np.zeros(count, bool)
    ends[24::25] = True
    data = {
        "observation": rng.normal(size=(count, 3)).astype(np.float32),
        "action": actions,
        "reward": np.ones(count, np.float32) * rng.integers(1, 5, count),
        "terminated": ends,
    }
    data |= options.pop("data", {})
    with mr.ReplayBuffer.create(
        path, mr.Schema(fields), capacity, autoreset="disabled", **options
    ) as buffer:
        buffer.extend(data)
    return path


def healthy(kind, tmp_path, rng):
    path = tmp_path / "healthy"
    if kind == "robot":
        return make_buffer(path, rng)
    if kind == "one environment":
        return make_buffer(path, rng, num_envs=1)
    if kind == "time major":
        return make_buffer(path, rng, num_envs=5, layout="time_major")
    if kind == "compressed":
        return make_buffer(path, rng, engine="zarr")
    if kind == "full ring":
        return make_buffer(path, rng, count=1500, num_envs=1, capacity=400)
    if kind == "next step":
        steps = healthy_steps(rng, 310, 2, 31)
        steps["reward"][0::31] = 0
        with mr.ReplayBuffer.create(path, schema(), 500, 2, autoreset="next_step") as buffer:
            buffer.extend(steps)
        return path
    return discrete(rng, 500, rng.integers(0, 4, 500), path)


HEALTHY = [
    "robot",
    "one environment",
    "time major",
    "compressed",
    "full ring",
    "next step",
    "discrete",
]


@pytest.mark.parametrize("kind", HEALTHY)
def test_nothing_stands_out_of_a_healthy_buffer(ask, tmp_path, rng, kind):
    assert findings(ask(healthy(kind, tmp_path, rng))) == {}


def test_every_reward_is_0(ask, tmp_path, rng):
    path = make_buffer(tmp_path / "a", rng, change=lambda steps: steps["reward"].fill(0))
    finding_of = findings(ask(path))
    assert finding_of["rewards"]["level"] == "problem"
    assert "None of 600 rewards differs from 0." in finding_of["rewards"]["text"]


@pytest.mark.parametrize("value", [-1, 1])
def test_rewards_that_are_all_the_same_are_fine(ask, tmp_path, rng, value):
    path = make_buffer(tmp_path / "a", rng, change=lambda steps: steps["reward"].fill(value))
    client = ask(path)
    assert findings(client) == {}
    [found] = [c for c in client.json("overview")["checks"] if c["id"] == "rewards"]
    assert found["title"] == f"Every reward is {value}"
    assert found["text"] == (
        "A return says how long the episode is. Looked at: all steps and each of 2 environments."
    )


def test_every_finite_reward_is_the_same(ask, tmp_path, rng):
    def change(steps):
        steps["reward"][:] = 5
        steps["reward"][7, 1] = np.nan

    client = ask(make_buffer(tmp_path / "a", rng, change=change))
    assert [*findings(client)] == ["not finite"]
    [found] = [c for c in client.json("overview")["checks"] if c["id"] == "rewards"]
    assert found["title"] == "Every reward is 5"
    assert found["text"].startswith("Of those that are finite; a return says ")


@pytest.mark.parametrize(("count", "level"), [(1, "look"), (2, "fine")])
def test_rewards_are_rare_below_one_of_ten_thousand_steps(ask, tmp_path, rng, count, level):
    rewards = np.zeros(19_000, np.float32)
    rewards[[5000, 15_000][:count]] = 1
    path = discrete(
        rng, 19_000, rng.integers(0, 4, 19_000), tmp_path / "a", 20_000, data={"reward": rewards}
    )
    checks = ask(path).json("overview")["checks"]
    [found] = [check for check in checks if check["id"] == "rewards"]
    assert found["level"] == level
    share = "0.0053 %" if count == 1 else "0.011 %"
    assert found["text"].startswith(f"{share} of steps have a reward other than 0")
    assert (found["title"] == "Rewards are rare") == (level == "look")


def test_no_reward_field(ask, tmp_path, rng):
    fields = {"observation": mr.Field((2,), "float32")}
    with mr.ReplayBuffer.create(tmp_path / "a", mr.Schema(fields), 100) as buffer:
        buffer.extend(observation=rng.random((50, 2), np.float32))
    finding_of = findings(ask(tmp_path / "a"))
    assert finding_of["rewards"]["title"] == "No reward field"
    client = ask(tmp_path / "a")
    assert client.json("overview")["returns"]["count"] == 0
    assert client.json("episodes")["rows"][0][3] is None
    assert client.json("episode", "env=0&at=3")["rewards"] is None


def test_rewards_that_are_all_nan(ask, tmp_path, rng):
    path = make_buffer(tmp_path / "a", rng, change=lambda steps: steps["reward"].fill(np.nan))
    client = ask(path)
    finding_of = findings(client)
    assert finding_of["rewards"]["title"] == "No finite reward"
    assert finding_of["not finite"]["title"] == "Not finite: reward"
    assert client.json("episodes")["rows"][0][3] is None
    assert client.json("episode", "env=0&at=3")["return"] is None


def test_values_that_are_not_finite(ask, tmp_path, rng):
    def change(steps):
        steps["observation"]["joints"][7, 1, 2] = np.nan
        steps["observation"]["joints"][8, 1, :] = -np.inf

    finding_of = findings(ask(make_buffer(tmp_path / "a", rng, change=change)))
    assert [*finding_of] == ["not finite"]
    assert finding_of["not finite"]["level"] == "problem"
    assert finding_of["not finite"]["text"].startswith("1 NaN and 4 infinite of 2,400 ")
    assert finding_of["not finite"]["to"] == "field:observation/joints"


def test_a_component_of_an_observation_that_never_changes_is_fine_and_named(ask, tmp_path, rng):
    # MuJoCo's Ant, Humanoid and Pusher have some, and so has the memory of a game.
    def change(steps):
        steps["observation"]["joints"][..., 2] = 0.25

    client = ask(make_buffer(tmp_path / "a", rng, change=change))
    assert findings(client) == {}
    [found] = never_changes(client)
    assert found["title"] == "All components but 1 change"
    assert found["text"].startswith(
        "1 of 4 components has one value in all 600 rows looked at "
        "(observation/joints[2] is 0.25). "
    )


def test_an_observation_that_never_changes(ask, tmp_path, rng):
    def change(steps):
        steps["observation"]["joints"][:] = 0.25

    finding_of = findings(ask(make_buffer(tmp_path / "a", rng, change=change)))
    assert [*finding_of] == ["never changes"]
    assert finding_of["never changes"]["level"] == "look"
    assert finding_of["never changes"]["title"] == "Never changes: observation/joints[0] and 3 more"


def never_changes(client):
    checks = client.json("overview")["checks"]
    return [check for check in checks if check["id"] == "never changes"]


def test_an_action_that_never_changes(ask, tmp_path, rng):
    def change(steps):
        steps["action"][..., 1] = -1

    finding_of = findings(ask(make_buffer(tmp_path / "a", rng, change=change)))
    assert [*finding_of] == ["never changes"]
    assert finding_of["never changes"]["title"] == "Never changes: action[1]"


@pytest.mark.parametrize("at", [0, 7, 299])
def test_a_nan_does_not_hide_what_never_changes(ask, tmp_path, rng, at):
    def change(steps):
        steps["observation"]["joints"][..., 2] = 0.25
        steps["observation"]["joints"][at, :, 2] = np.nan
        steps["observation"]["joints"][..., 3] = np.nan

    client = ask(make_buffer(tmp_path / "a", rng, change=change))
    assert [*findings(client)] == ["not finite"]
    [found] = never_changes(client)
    assert "1 of 4 components has one finite value" in found["text"]
    assert "observation/joints[2] is 0.25" in found["text"]


def test_with_one_action_not_all_components_change(ask, tmp_path, rng):
    client = ask(discrete(rng, 500, np.full(500, 3), tmp_path / "a"))
    assert [*findings(client)] == ["one action"]
    titles = [check["title"] for check in client.json("overview")["checks"]]
    assert "All components change" not in titles
    client = ask(discrete(rng, 500, rng.integers(0, 4, 500), tmp_path / "b"))
    titles = [check["title"] for check in client.json("overview")["checks"]]
    assert "All components change" in titles


def test_images_that_never_change(ask, tmp_path, rng):
    def change(steps):
        steps["observation"]["pixels"][:] = 7

    finding_of = findings(ask(make_buffer(tmp_path / "a", rng, change=change)))
    assert [*finding_of] == ["never changes"]
    assert finding_of["never changes"]["level"] == "problem"


def test_repeated_frames(ask, tmp_path, rng):
    def change(steps):
        pixels = steps["observation"]["pixels"]
        pixels[1::5] = pixels[0::5]

    finding_of = findings(ask(make_buffer(tmp_path / "a", rng, change=change)))
    assert [*finding_of] == ["repeated frames"]
    assert finding_of["repeated frames"]["level"] == "look"
    share = 60 / (300 - 10)
    assert finding_of["repeated frames"]["text"].startswith(f"{100 * share:.0f} %")


@pytest.mark.parametrize(("share", "level"), [(0.4, "look"), (0.8, "problem")])
def test_saturated_actions(ask, tmp_path, rng, share, level):
    def change(steps):
        saturated = rng.random(steps["reward"].shape) < share
        sign = np.where(rng.random(steps["reward"].shape) < 0.5, -3.0, 3.0)
        actions = steps["action"].clip(-2.9, 2.9)
        actions[..., 1] = np.where(saturated, sign, actions[..., 1])
        steps["action"][:] = actions

    finding_of = findings(ask(make_buffer(tmp_path / "a", rng, change=change)))
    assert [*finding_of] == ["saturated"]
    assert finding_of["saturated"]["level"] == level
    assert finding_of["saturated"]["title"] == "Saturated: action[1]"
    assert "-3 or 3" in finding_of["saturated"]["text"]


def test_all_saturated_components_are_counted(ask, tmp_path, rng):
    def change(steps):
        steps["action"][:] = steps["action"].clip(-2.9, 2.9)
        steps["action"][rng.random(steps["action"].shape) < 0.5] = 3.0

    finding_of = findings(ask(make_buffer(tmp_path / "a", rng, change=change)))
    title = finding_of["saturated"]["title"]
    assert title in ("Saturated: action[0] and 1 more", "Saturated: action[1] and 1 more")
    assert "of the values of action[" in finding_of["saturated"]["text"]


@pytest.mark.parametrize("warm", [-1, 0, 3])
def test_actions_that_saturate_after_a_warm_up(ask, tmp_path, rng, warm):
    fields = {
        "observation": mr.Field((2,), "float32"),
        "action": mr.Field((2,), "float32"),
        "reward": mr.Field((), "float32"),
    }
    count = 20_000
    actions = rng.uniform(-2.9, 2.9, (count, 2)).astype(np.float32)
    late = np.arange(count) > 5000
    actions[late & (rng.random(count) < 0.7), 1] = 3
    actions[~late, 1] = warm
    with mr.ReplayBuffer.create(tmp_path / "a", mr.Schema(fields), count) as buffer:
        buffer.extend(
            observation=rng.random((count, 2), np.float32),
            action=actions,
            reward=rng.random(count, np.float32),
        )
    finding_of = findings(ask(tmp_path / "a"))
    assert finding_of["saturated"]["title"] == "Saturated: action[1]"


def test_a_gripper_with_nan_is_not_saturated(ask, tmp_path, rng):
    def change(steps):
        steps["action"][..., 1] = rng.choice([-1, 1], steps["reward"].shape)
        steps["action"][:60, :, 1] = np.nan

    finding_of = findings(ask(make_buffer(tmp_path / "a", rng, change=change)))
    assert [*finding_of] == ["not finite"]


def test_a_gripper_is_not_saturated(ask, tmp_path, rng):
    def change(steps):
        steps["action"][..., 1] = rng.choice([-1, 0, 1], steps["reward"].shape)

    assert findings(ask(make_buffer(tmp_path / "a", rng, change=change))) == {}


def test_one_action(ask, tmp_path, rng):
    actions = np.where(np.arange(500) % 20 == 0, 1, 3)
    path = discrete(rng, 500, actions, tmp_path / "a")
    finding_of = findings(ask(path))
    assert [*finding_of] == ["one action"]
    assert finding_of["one action"]["level"] == "problem"
    assert finding_of["one action"]["title"] == "Nearly always one action: 3"
    assert finding_of["one action"]["text"].startswith("95 % of steps")


def test_no_episode_has_ended(ask, tmp_path, rng):
    def change(steps):
        steps["terminated"][:] = steps["truncated"][:] = False

    client = ask(make_buffer(tmp_path / "new", rng, 1000, 1, change=change))
    assert findings(client) == {}
    titles = [check["title"] for check in client.json("overview")["checks"]]
    assert "No episode has ended yet" in titles

    path = make_buffer(tmp_path / "a", rng, 1001, 1, 2000, change=change)
    finding_of = findings(ask(path))
    assert [*finding_of] == ["ends"]
    assert finding_of["ends"]["title"] == "No episode has ended yet"
    assert finding_of["ends"]["text"].startswith("The longest has 1,001 steps so far.")


def test_episodes_that_are_all_truncated_are_fine(ask, tmp_path, rng):
    def change(steps):
        steps["truncated"] |= steps["terminated"]
        steps["terminated"][:] = False

    client = ask(make_buffer(tmp_path / "a", rng, change=change))
    assert findings(client) == {}
    [found] = [c for c in client.json("overview")["checks"] if c["id"] == "ends"]
    assert found["text"] == (
        "0 terminated, 20 truncated, 0 broken off. Targets must bootstrap at the end."
    )


def test_one_episode_dominates(ask, tmp_path, rng):
    def change(steps):
        for name in ("terminated", "truncated"):
            steps[name][40:] = False

    path = make_buffer(tmp_path / "a", rng, num_envs=1, change=change)
    finding_of = findings(ask(path))
    assert [*finding_of] == ["dominates"]
    assert "270 of 300 steps (90 %)" in finding_of["dominates"]["text"]


def test_steps_that_are_never_drawn(ask, tmp_path, rng):
    steps = healthy_steps(rng, 300, 2)
    steps["truncated"] |= steps["terminated"]
    steps["terminated"][:150] = False
    steps["truncated"][150:] = False
    with mr.ReplayBuffer.create(tmp_path / "a", schema(), 500, 2, autoreset="disabled") as buffer:
        buffer.extend(steps)
        never = buffer.episodes.num_illegal - buffer.episodes.num_finals
    finding_of = findings(ask(tmp_path / "a"))
    assert "next unknown" in finding_of
    assert finding_of["next unknown"]["text"].startswith(f"{never} of 600 steps")


def test_an_environment_is_behind(ask, tmp_path, rng):
    steps = healthy_steps(rng, 200, 1)
    with mr.ReplayBuffer.create(tmp_path / "a", schema(), 500, 3, autoreset="disabled") as buffer:
        for env_id in (0, 2, 0, 2, 1):
            buffer.extend(steps, env_ids=[env_id], final_observation=steps["observation"])
    finding_of = findings(ask(tmp_path / "a"))
    assert finding_of["behind"]["title"] == "Environment 1 is behind"
    assert finding_of["behind"]["level"] == "look"
    assert finding_of["behind"]["text"].startswith("Environment 1 has ")
    assert finding_of["behind"]["text"].endswith("; the others are not behind.")


def test_environments_behind_are_counted():
    finding = check_behind([900, 1000, 300, 1000, 980])
    assert finding.title == "2 environments are behind"
    assert finding.text == (
        "Environment 2 has 700 rows less than environment 1, the furthest, which has "
        "1,000; 2 of 5 environments are behind."
    )
    assert check_behind([980, 1000]).level == "fine"


def next_step_rows(rng, count):
    """Steps of a next-step environment, of which reset rows are told as steps."""
    steps = healthy_steps(rng, count, 1, 30)
    ends = steps["terminated"] | steps["truncated"]
    after = np.flatnonzero(ends[:, 0])[:-1] + 1
    steps["reward"][after] = 0
    return steps


def test_reset_rows_stored_as_steps_by_the_writers_own_rule(ask, tmp_path, rng):
    steps = next_step_rows(rng, 1500)
    path = tmp_path / "a"
    with mr.ReplayBuffer.create(path, schema(), 2000, 2, autoreset="same_step") as b:
        both = {
            name: {p: np.repeat(v, 2, 1) for p, v in value.items()}
            if isinstance(value, dict)
            else np.repeat(value, 2, 1)
            for name, value in steps.items()
        }
        with pytest.warns(mr.AutoresetWarning) as caught:
            b.extend(both, final_observation=both["observation"])
    finding_of = findings(ask(path))
    assert finding_of["reset rows"]["level"] == "problem"
    clause = finding_of["reset rows"]["text"].split(". Such rows")[0]
    # The same number of ends is judged, in the same words.
    assert clause[1:] in str(caught[0].message)


def test_priorities_hardly_updated(ask, tmp_path, rng):
    path = make_buffer(tmp_path / "a", rng)
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        batch = buffer.sample(8)
        buffer.update_priorities(batch, np.full(8, 0.5))
    finding_of = findings(ask(path))
    assert finding_of["priorities"]["title"] == "Priorities are hardly updated"


def test_few_rows_take_most_draws(ask, tmp_path, rng):
    path = make_buffer(tmp_path / "a", rng)
    sampler = mr.PrioritizedSampler(seed=0)
    values = rng.random(600).astype(np.float32) + 0.01
    values[:6] = 1e4
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        buffer.sample(1)
        positions = np.tile(np.arange(300), 2)
        env_ids = np.repeat([0, 1], 300)
        sampler.update_priorities(buffer.view, env_ids, positions, values)
    client = ask(path)
    finding_of = findings(client)
    assert finding_of["priorities"]["title"] == "Few rows take most draws"
    priorities = client.json("overview", "alpha=0.6")["priorities"]
    with mr.ReplayBuffer.open(path) as stored:
        spans = stored.span
        steps = [np.arange(a, b) for a, b in zip(spans.first, spans.stop, strict=True)]
        ids = np.repeat([0, 1], [len(some) for some in steps])
        positions = np.concatenate(steps)
        steps_only = (stored.flags(ids, positions) & 8) == 0
        column = np.fromfile(path / "samplers" / "prioritized" / "priorities.bin", "<f4")
        raw = column[stored.metadata.ring.rows(ids, positions)][steps_only]
    for alpha in (0.6, 0.0, 1.0):
        masses = np.sort((raw.astype(float) + EPS) ** alpha)[::-1]
        priorities = client.json("overview", f"alpha={alpha}")["priorities"]
        top = masses[: len(masses) // 100].sum() / masses.sum()
        assert priorities["top_share"] == pytest.approx(float(top))
        effective = masses.sum() ** 2 / (masses**2).sum() / len(masses)
        assert priorities["effective"] == pytest.approx(float(effective))
        assert sum(priorities["counts"]) == len(masses)


def test_draws_that_are_worth_few_rows(ask, tmp_path, rng):
    path = make_buffer(tmp_path / "a", rng)
    sampler = mr.PrioritizedSampler(seed=0)
    values = rng.random(620).astype(np.float32) * 1e-6
    # 30 rows of the same high priority: the top 1 % of rows have a fifth of the mass.
    values[::21] = 1000 + rng.random(30)
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        buffer.sample(1)
        env_ids, positions = np.repeat([0, 1], 310), np.tile(np.arange(310), 2)
        sampler.update_priorities(buffer.view, env_ids, positions, values)
    client = ask(path)
    priorities = client.json("overview")["priorities"]
    assert priorities["top_share"] < 0.3
    assert priorities["effective"] < 0.1
    assert findings(client)["priorities"]["title"] == "Few rows take most draws"


def test_spread_priorities_are_fine(ask, tmp_path, rng):
    path = make_buffer(tmp_path / "a", rng)
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        buffer.sample(1)
        env_ids, positions = np.repeat([0, 1], 300), np.tile(np.arange(300), 2)
        sampler.update_priorities(buffer.view, env_ids, positions, rng.random(600) + 0.1)
    assert "priorities" not in findings(ask(path))


def test_a_few_steps_say_nothing_of_what_never_changes(ask, tmp_path, rng):
    def change(steps):
        steps["action"][:] = 0
        steps["observation"]["pixels"][:] = 0
        steps["observation"]["joints"][:] = 0

    finding_of = findings(ask(make_buffer(tmp_path / "a", rng, count=8, change=change)))
    assert finding_of == {}


def test_an_empty_buffer_has_no_findings(ask, tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "a", schema(), 100, autoreset="disabled"):
        pass
    client = ask(tmp_path / "a")
    overview = client.json("overview")
    assert overview["checks"] == []
    assert overview["steps"] == overview["rows"] == 0
    assert len(overview["fields"]) == 6
    assert client.json("episodes")["rows"] == []
    assert client.refused("draws", "sampler=UniformSampler")[0] == 409
    assert client.refused("episode", "env=0&at=0")[0] == 410


def test_the_documented_findings_are_those_of_the_page():
    root = Path(mr.__file__).parent
    made = re.findall(
        r'PageFinding\(\s*(?:"\w+"|level),\s*"([a-z ]+)"', (root / "page" / "checks.py").read_text()
    )
    text = (root.parent / "docs" / "view.md").read_text()
    documented = re.findall(r"^\| ([a-z ]+) \|", text, re.M)
    assert documented[0] == "finding"
    assert sorted(documented[1:]) == sorted(set(made))


def test_edges_of_the_rules():
    counts = {"terminated": 0, "truncated": 0, "both": 0, "broken off": 1}
    assert check_ends(counts, 9).level == "fine"
    broken = check_ends({**counts, "terminated": 16, "broken off": 4}, 9)
    assert broken.title == "4 of 20 episodes were broken off"
    whole = check_ends({**counts, "terminated": 16, "broken off": 0}, 9)
    assert whole.title == "Episodes end as the environment says"
    assert check_dominates(50, 100, 2).level == "fine"
    assert check_dominates(51, 100, 2).level == "look"
    assert check_dominates(100, 100, 1) is None
    assert check_unknown_next(1, 100) is None
    assert check_unknown_next(2, 100).level == "look"


def test_a_sample_says_that_it_is_one(ask, tmp_path, rng):
    fields = {"observation": mr.Field((2,), "float32"), "reward": mr.Field((), "float32")}
    path = tmp_path / "a"
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 200_000) as buffer:
        rewards = rng.random(150_000, np.float32) + 1
        buffer.extend(observation=rng.random((150_000, 2), np.float32), reward=rewards)
    overview = ask(path).json("overview")
    assert not overview["sample"]["whole"]
    assert 60_000 < overview["sample"]["rows"] <= 65_536
    reward = next(f for f in overview["fields"] if f["path"] == "reward")
    assert reward["mean"] == pytest.approx(float(rewards.mean()), rel=0.02)


CHECKS = {
    "check_rewards": "rewards",
    "check_finite": "not finite",
    "check_changes": "never changes",
    "check_repeats": "repeated frames",
    "check_repeated_rows": "repeated rows",
    "check_scales": "scales",
    "check_clipped": "clipped",
    "check_endless": "never ends",
    "check_saturated": "saturated",
    "check_one_action": "one action",
    "check_ends": "ends",
    "check_dominates": "dominates",
    "check_heap": "heap",
    "check_unknown_next": "next unknown",
    "check_behind": "behind",
    "check_reset_rows": "reset rows",
    "check_priorities": "priorities",
}


def fail(*_, **__):
    raise TypeError("no such operation")


def robot_with_priorities(path, rng):
    make_buffer(path, rng)
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        batch = buffer.sample(300)
        buffer.update_priorities(batch, rng.random(300))
    return path


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_that_fails_is_named_and_takes_no_other_with_it(
    ask, tmp_path, rng, monkeypatch, caplog, check
):
    path = robot_with_priorities(tmp_path / "a", rng)
    whole = ask(path).json("overview")
    monkeypatch.setattr(f"mmreplay.page.checks.{check}", fail)
    overview = ask(path).json("overview")
    name = CHECKS[check]
    names = [name]
    if name == "repeated frames":
        names = [f"{name} of observation/pixels"]
    if name in ("clipped", "saturated", "one action"):
        names = [f"{name} of {field['path']}" for field in whole["fields"]]
    failed = [each for each in overview["checks"] if each["failed"]]
    assert [each["id"] for each in failed] == names
    for each in failed:
        title = each["id"][0].upper() + each["id"][1:]
        assert each["level"] == "look"
        assert each["title"] == f"{title} could not be computed"
        assert each["text"] == "The check failed: TypeError."
        assert f"check {each['id']!r} failed" in caplog.text
    others = [each for each in overview["checks"] if not each["failed"]]
    assert others == [each for each in whole["checks"] if each["id"] != name]
    # All else is as it was, the priorities beside their check, too.
    for part in ("fields", "histograms", "returns", "episodes", "priorities"):
        assert overview[part] == whole[part]
    assert whole["priorities"]["rows"] == 600


def test_a_field_whose_check_fails_takes_no_other_field_with_it(ask, tmp_path, rng, monkeypatch):
    choice = mr.Field((), "int64")
    schema = mr.Schema(
        {"action": {"left": choice, "right": choice}, "end": mr.Field((), "bool")},
        roles={"terminated": "end"},
    )
    path = tmp_path / "a"
    with mr.ReplayBuffer.create(path, schema, 400, autoreset="disabled") as buffer:
        for number in range(300):
            buffer.add(
                action={"left": rng.integers(3), "right": rng.integers(3)}, end=number % 50 == 49
            )

    def finding_of(name):
        return [c for c in ask(path).json("overview")["checks"] if name in c["id"]]

    left, right = finding_of("one action")
    check = checks_module.check_one_action

    def some(facts):
        return fail() if facts.path == "action/left" else check(facts)

    monkeypatch.setattr(checks_module, "check_one_action", some)
    # Findings stand by level: the failed one is first.
    failed, other = finding_of("one action")
    assert failed["title"] == "One action of action/left could not be computed"
    assert other == right
    assert left["level"] == "fine"


def test_a_field_that_cannot_be_measured_is_named_and_nothing_is_claimed_of_it(
    ask, tmp_path, rng, monkeypatch
):
    path = make_buffer(tmp_path / "a", rng)
    measure = overview_module.measure

    def some(buffer, path, *rest):
        if path == "reward":
            raise mr.CorruptError("Block 3 is damaged.")
        return measure(buffer, path, *rest)

    monkeypatch.setattr(overview_module, "measure", some)
    overview = ask(path).json("overview")
    finding_of = {check["id"]: check for check in overview["checks"]}
    failed = finding_of["values of reward"]
    assert failed["level"] == "problem"
    assert failed["title"] == "Values of reward could not be computed"
    assert failed["text"] == "The check failed: Block 3 is damaged."
    assert not {"rewards", "not finite", "never changes"} & finding_of.keys()
    rows = {field["path"]: field["rows"] for field in overview["fields"]}
    assert (rows["reward"], rows["action"]) == (0, 600)


def test_priorities_that_cannot_be_read_are_named(ask, tmp_path, rng, monkeypatch):
    path = robot_with_priorities(tmp_path / "a", rng)
    monkeypatch.setattr(overview_module, "measure_priorities", fail)
    overview = ask(path).json("overview")
    assert overview["priorities"] is None
    [failed] = [c for c in overview["checks"] if c["id"] == "priorities"]
    assert failed["title"] == "Priorities could not be computed"
    assert overview["steps"] == 600
