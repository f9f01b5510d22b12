"""What Stable-Baselines3's buffers on disk refuse, before anything is stored."""

import inspect
from pathlib import Path

import numpy as np
import pytest

from mmreplay.episodes import START
from mmreplay.errors import EmptyError, SchemaError
from tests.adapters.routes import each_route

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
spaces = pytest.importorskip("gymnasium").spaces
theirs = pytest.importorskip("stable_baselines3.common.buffers")
her = pytest.importorskip("stable_baselines3.her.her_replay_buffer")
adapter = pytest.importorskip("mmreplay.adapters.sb3.replay_buffer")

BOX = spaces.Box(-1, 1, (3,), np.float32)
ACTION = spaces.Box(-1, 1, (2,), np.float32)
COMPLETE = {"obs": (2, 3), "next_obs": (2, 3), "action": (2, 2), "reward": 2, "done": 2}


@pytest.fixture
def buffer(tmp_path):
    buffer = adapter.ReplayBuffer(8, BOX, ACTION, "cpu", 2, path=tmp_path / "ring")
    yield buffer
    buffer.close()


def give(buffer, **shapes):
    made = {name: np.zeros(shape) for name, shape in (COMPLETE | shapes).items()}
    buffer.add(**made, infos=[{}] * buffer.n_envs)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("obs", (3, 2)),
        ("obs", 3),
        ("next_obs", (2, 4)),
        ("action", (4,)),
        ("action", (1, 4)),
        ("action", (2, 3)),
        ("reward", 3),
        ("reward", (2, 2)),
        ("done", (1,)),
    ],
)
def test_values_of_another_shape_are_neither_repeated_nor_moved(buffer, name, shape):
    give(buffer)
    told = name.removeprefix("next_").replace("obs", "observation")
    with pytest.raises(SchemaError, match=rf"^{told} must have the shape .*neither repeated"):
        give(buffer, **{name: shape})
    assert buffer.size() == 1


BOXES = spaces.Sequence(BOX)
VARYING = {
    "Text": spaces.Text(5),
    "Sequence": BOXES,
    "Graph": spaces.Graph(BOX, None),
    "Dict": spaces.Dict(box=BOX, word=spaces.Text(5)),
    "Tuple": spaces.Tuple([BOX, BOXES]),
}


@pytest.mark.parametrize("kind", VARYING)
@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_spaces_whose_values_vary_are_refused_with_a_way_out(tmp_path, kind, name):
    given = {"observation_space": BOX, "action_space": ACTION} | {name: VARYING[kind]}
    part = {"Dict": r"\['word'\]", "Tuple": r"\[1\]"}.get(kind, "")
    with pytest.raises(
        SchemaError, match=rf"^{name}{part} must have values of one shape, .* Pad it to"
    ):
        adapter.ReplayBuffer(8, *given.values(), path=tmp_path / "ring")
    assert not (tmp_path / "ring").exists()


def test_axes_of_one_and_those_of_the_action_are_no_matter(tmp_path, buffer):
    give(buffer, obs=(2, 1, 3), action=(2, 2, 1), reward=(2, 1), done=(2, 1))
    assert buffer.size() == 1
    one = adapter.ReplayBuffer(
        8, spaces.Discrete(4), spaces.Box(-1, 1, (2, 2)), path=tmp_path / "one"
    )
    give(one, obs=(), next_obs=1, action=(1, 2, 2), reward=(), done=1)
    give(one, obs=1, next_obs=(1, 1), action=(1, 4), reward=1, done=(1, 1))
    assert one.size() == 2
    one.close()


def test_an_action_of_one_environment_may_come_with_the_axes_of_its_space(tmp_path):
    shape = (10, 7)
    space = spaces.Box(-1, 1, shape)
    ours = adapter.ReplayBuffer(8, BOX, space, "cpu", path=tmp_path / "ring")
    original = theirs.ReplayBuffer(8, BOX, space, "cpu")
    action = np.arange(70, dtype=np.float32).reshape(shape)
    obs, reward, done = np.zeros((1, 3), np.float32), np.zeros(1), np.zeros(1, bool)
    for buffer in (ours, original):
        buffer.add(obs, obs, action, reward, done, [{}])
        buffer.add(obs, obs, action[None], reward, done, [{}])
    stored = ours.ring.gather_all()["action"]
    np.testing.assert_array_equal(stored, original.actions[:2, 0])
    with pytest.raises(SchemaError, match=r"action must have .* got \[7, 9\]"):
        ours.add(obs, obs, action[:9].T, reward, done, [{}])
    ours.close()


@pytest.mark.parametrize("prioritized", ["yes", 1, [0.6]])
def test_what_says_not_how_to_draw_is_refused(prioritized):
    with pytest.raises(SchemaError, match=r"prioritized must .* such as .* got"):
        adapter.ReplayBuffer(8, BOX, ACTION, prioritized=prioritized)


@pytest.mark.parametrize(
    ("kind", "space", "message"),
    [
        (
            "ReplayBuffer",
            spaces.Dict({"a": BOX}),
            "needs a space that is no Dict, got .* Use DictReplay",
        ),
        ("DictReplayBuffer", BOX, "needs a Dict space, got .* Use ReplayBuffer"),
    ],
)
def test_each_space_has_its_buffer(kind, space, message):
    with pytest.raises(SchemaError, match=message):
        getattr(adapter, kind)(8, space, ACTION)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"buffer_size": 0}, "buffer_size must be an integer"),
        ({"buffer_size": 2.5}, "buffer_size must be an integer"),
        ({"buffer_size": "9"}, "buffer_size must be an integer"),
        ({"optimize_memory_usage": "no"}, "optimize_memory_usage must be True or False, got 'no'"),
        (
            {"handle_timeout_termination": "no"},
            "handle_timeout_termination must be True or False, got 'no'",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(tmp_path, options, match):
    given = {"buffer_size": 9, "observation_space": BOX, "action_space": BOX}
    with pytest.raises(SchemaError, match=f"^{match}"):
        adapter.ReplayBuffer(**given | options, path=tmp_path / "ring")
    assert not (tmp_path / "ring").exists()


def test_no_environments_are_refused():
    with pytest.raises(SchemaError, match="n_envs must be an integer of at least 1, got 0"):
        adapter.ReplayBuffer(8, BOX, ACTION, n_envs=0)


def test_priorities_of_nothing_are_refused(buffer):
    with pytest.raises(EmptyError, match="cannot update priorities of an empty"):
        buffer.update_priorities(None, [1.0])


@pytest.mark.parametrize(
    "original", [theirs.ReplayBuffer, theirs.DictReplayBuffer, her.HerReplayBuffer]
)
def test_calls_take_what_the_originals_take(original):
    mine = getattr(adapter, original.__name__)
    for label, member in inspect.getmembers(original, callable):
        if label.startswith("_") and label != "__init__":
            continue
        wanted = list(inspect.signature(member).parameters.values())
        given = list(inspect.signature(getattr(mine, label)).parameters.values())
        for one, other in zip(given, wanted, strict=False):
            assert (one.name, one.default) == (other.name, other.default), label
        assert len(given) >= len(wanted), label


@pytest.mark.parametrize("once", [False, True])
def test_the_short_route_leaves_what_the_long_one_leaves(tmp_path, monkeypatch, once):
    """Steps, ends, steps that do not follow, and rewards that are refused."""
    left, taken = [], {}
    for way in each_route(monkeypatch, taken):
        rng, done = np.random.default_rng(5), False
        action = np.zeros((1, 2), np.float32)
        ours = adapter.ReplayBuffer(40, BOX, ACTION, "cpu", 1, once, path=tmp_path / way)
        obs = rng.random((1, 3), np.float32)
        for number in range(200):
            following = rng.random((1, 3), np.float32)
            if done or number % 30 == 9:
                obs = rng.random((1, 3), np.float32)
            done = bool(rng.random() < 0.1)
            told = {"TimeLimit.truncated": bool(rng.random() < (0.5 if done else 0.1))}
            ends = np.array([done])
            if number % 20 == 5 and not done:
                large = np.array([1e300])
                with pytest.raises(
                    SchemaError, match=r"'reward': float32 cannot hold .* float64 values"
                ):
                    ours.add(obs, following, action, large, ends, [told])
            ours.add(obs, following, action, rng.random(1), ends, [told])
            obs = following
        folder = Path(ours.home.path)
        ours.close()
        files = sorted(folder.rglob("*.bin"))
        left.append([(file.name, file.read_bytes()) for file in files])
    assert left[0] == left[1]
    assert taken["short"] > 100
    assert taken["long"] == 0


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("kind", ["float64", "int32"])
def test_next_observations_of_another_dtype_are_cast(tmp_path, once, kind):
    """What a step led to is compared as it is stored, by whichever route it came."""
    path, action = tmp_path / "ring", np.zeros((1, 2), np.float32)
    buffer = adapter.ReplayBuffer(8, BOX, ACTION, "cpu", 1, once, path=path)
    told, going_on = (np.zeros(1), np.zeros(1, bool)), [{}]
    for number in range(5):
        obs = np.full((1, 3), number, np.float32)
        buffer.add(obs, (obs + 1).astype(kind), action, *told, going_on)
    flags = buffer.ring.flags(0, np.arange(5))
    assert np.flatnonzero(flags & START).tolist() == [0]
    wrong = np.zeros((1, 6), np.float32)
    with pytest.raises(SchemaError, match=r"observation must have .* got \[1, 6\]"):
        buffer.add(obs + 1, wrong, action, *told, going_on)
    assert buffer.ring.heads.tolist() == [5]
    buffer.close()
