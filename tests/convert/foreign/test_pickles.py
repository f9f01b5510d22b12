"""Pickles of Stable-Baselines3 and tmrl, and pickles that would do harm."""

import os
import pickle
import sys
import types
from functools import partial

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.convert import registry
from mmreplay.errors import CorruptError, FormatError, SchemaError, SourceError
from tests.convert.contract import error_of, text_of
from tests.convert.foreign.oracle import assert_same, drawn

BUFFERS = "stable_baselines3.common.buffers"


def save(folder, **state):
    """Pickle a buffer of a class that is not there any more when it is read."""
    module = types.ModuleType(BUFFERS)
    made = type("ReplayBuffer", (), {"__module__": BUFFERS})
    module.ReplayBuffer = made
    with pytest.MonkeyPatch.context() as patch:
        for parent in (BUFFERS.split(".")[0], BUFFERS.rpartition(".")[0]):
            patch.setitem(sys.modules, parent, types.ModuleType(parent))
        patch.setitem(sys.modules, BUFFERS, module)
        buffer = made()
        vars(buffer).update(state)
        # Stands for spaces and devices, which are objects of other classes.
        buffer.other = made()
        path = folder / "buffer.pkl"
        path.write_bytes(pickle.dumps(buffer, pickle.HIGHEST_PROTOCOL))
    return path


@pytest.fixture
def make(tmp_path):
    return partial(save, tmp_path)


def steps(rng, slots=10, envs=2, full=True, pos=4):
    dones = (rng.random((slots, envs)) < 0.3).astype(np.float32)
    seen = rng.random((slots, envs, 3)).astype(np.float32)
    nexts = rng.random((slots, envs, 3)).astype(np.float32)
    # What was seen next is the next row, unless something ended there.
    follow = np.roll(seen, -1, 0)
    nexts = np.where(dones[..., None] > 0, nexts, follow)
    nexts[pos - 1] = rng.random((envs, 3))
    return {
        "observations": seen,
        "next_observations": nexts,
        "actions": rng.random((slots, envs, 1)).astype(np.float32),
        "rewards": rng.random((slots, envs)).astype(np.float32),
        "dones": dones,
        "timeouts": dones * (rng.random((slots, envs)) < 0.5),
        "pos": pos,
        "full": full,
        "handle_timeout_termination": True,
        "optimize_memory_usage": False,
    }


def expected(state):
    """Steps of every environment, oldest first, as `drawn` gives them."""
    first = state["pos"] if state["full"] else 0
    count = len(state["dones"]) if state["full"] else state["pos"]
    order = (first + np.arange(count)) % len(state["dones"])

    def rows(name):
        return np.concatenate(np.moveaxis(state[name][order], 1, 0))

    done, timeout = rows("dones") > 0, rows("timeouts") > 0
    truncated = timeout.copy()
    # Of each environment the newest step is cut off.
    last = np.arange(len(done)) % count == count - 1
    truncated[last & ~done] = True
    return {
        "observation": rows("observations"),
        "next_observation": rows("next_observations"),
        "action": rows("actions"),
        "reward": rows("rewards"),
        "terminated": done & ~timeout,
        "truncated": truncated,
    }


@pytest.mark.parametrize("full", [True, False])
def test_steps_of_a_saved_buffer_come_oldest_first(tmp_path, rng, make, full):
    state = steps(rng, full=full)
    path = make(**state)
    assert registry.source_format(path).name == "sb3"
    mr.load(path, tmp_path / "target", allow_pickle=True, strict=True)
    found, left = drawn(tmp_path / "target", ["observation"])
    assert left == 0
    assert_same(found, expected(state))


class Thrifty:
    """What SB3's `add` keeps with optimize_memory_usage, and the steps themselves.

    The next observation of a step goes to the slot behind its own, where the oldest
    step's observation is lost by it.
    """

    def __init__(self, slots, envs):
        self.slots, self.envs, self.played = slots, envs, []
        lead = (slots, envs)
        self.state = {
            "observations": np.zeros((*lead, 2), np.float32),
            "actions": np.zeros((*lead, 1), np.float32),
            "rewards": np.zeros(lead, np.float32),
            "dones": np.zeros(lead, np.float32),
            "timeouts": np.zeros(lead, np.float32),
            "pos": 0,
            "full": False,
            "handle_timeout_termination": False,
            "optimize_memory_usage": True,
        }

    def add(self, rng, seen, done):
        state, pos = self.state, self.state["pos"]
        nexts = rng.random((self.envs, 2)).astype(np.float32)
        action = rng.random((self.envs, 1)).astype(np.float32)
        state["observations"][pos] = seen
        state["observations"][(pos + 1) % self.slots] = nexts
        state["actions"][pos], state["dones"][pos] = action, done
        self.played.append((seen, action, nexts, done))
        state["pos"] = (pos + 1) % self.slots
        state["full"] = state["full"] or state["pos"] == 0
        # An episode that is over is followed by another's first observation.
        reset = rng.random((self.envs, 2)).astype(np.float32)
        return np.where(done[:, None] > 0, reset, nexts)

    def play(self, rng, count):
        seen = rng.random((self.envs, 2)).astype(np.float32)
        for _ in range(count):
            seen = self.add(rng, seen, (rng.random(self.envs) < 0.25).astype("f4"))
        kept = len(self.played)
        if self.state["full"]:
            # As theirs, which never draws the slot of which half was overwritten.
            kept = self.slots - 1
        return self.played[-kept:]


@pytest.mark.parametrize("count", [1, 5, 8, 9, 11, 16, 30])
def test_a_memory_efficient_buffer_gives_no_step_it_never_saw(tmp_path, rng, make, count):
    ring = Thrifty(8, 3)
    kept = ring.play(rng, count)
    report = mr.load(make(**ring.state), tmp_path / "target", allow_pickle=True)
    assert any("but for the newest step" in note for note in report.notes)
    lost = any("the newest observation was written over" in n for n in report.notes)
    assert lost == ring.state["full"]
    found, left = drawn(tmp_path / "target", ["observation"])
    assert left == 0
    wanted = [[part[env] for part in step] for env in range(3) for step in kept]
    seen, action, nexts, done = (np.array(part) for part in zip(*wanted, strict=True))
    np.testing.assert_array_equal(found["observation"], seen)
    np.testing.assert_array_equal(found["action"], action)
    np.testing.assert_array_equal(found["terminated"], done > 0)
    newest = np.arange(len(done)) % len(kept) == len(kept) - 1
    np.testing.assert_array_equal(found["truncated"], newest & (done == 0))
    # Behind a step that terminated nothing is drawn but zeros.
    known = (done == 0) | newest
    np.testing.assert_array_equal(found["next_observation"][known], nexts[known])


def test_a_ring_of_one_slot_that_was_overwritten_holds_no_step(tmp_path, rng, make):
    ring = Thrifty(1, 1)
    ring.play(rng, 3)
    with pytest.raises(FormatError, match="holds an empty buffer"):
        mr.load(make(**ring.state), tmp_path / "target", allow_pickle=True)


def test_timeouts_that_were_not_handled_are_a_doubt(tmp_path, rng, make):
    path = make(**steps(rng) | {"handle_timeout_termination": False})
    report = mr.load(path, tmp_path / "target", allow_pickle=True)
    assert "did not handle timeouts" in report.doubts[0]


def test_dicts_of_observations_come_in(tmp_path, rng, make):
    state = steps(rng)
    for name in ("observations", "next_observations"):
        state[name] = {"a": state[name], "b": state[name][..., :1] * 2}
    mr.load(make(**state), tmp_path / "target", allow_pickle=True)
    found, _ = drawn(tmp_path / "target", ["observation/a", "observation/b"])
    flat = expected(state | {n: state[n]["a"] for n in state if "observations" in n})
    np.testing.assert_array_equal(found["next_observation/a"], flat["next_observation"])
    np.testing.assert_array_equal(found["observation/b"], flat["observation"][:, :1] * 2)


def test_no_pickle_is_run_without_leave(tmp_path, rng, make):
    with pytest.raises(SchemaError, match=r"a pickle is a program .*--allow-pickle"):
        mr.load(make(**steps(rng)), tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_the_command_line_asks_for_leave(tmp_path, rng, make):
    path = make(**steps(rng))
    assert run(["convert", str(path), str(tmp_path / "target")]) == 3
    assert not (tmp_path / "target").exists()
    assert run(["convert", str(path), str(tmp_path / "t"), "--allow-pickle"]) == 0
    assert (tmp_path / "t").exists()


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("name", ["data.pkl", "stable.pkl"])
def test_what_a_pickle_names_does_not_run_even_with_leave(tmp_path, name):
    harm = Harm(tmp_path / "harmed")
    state = {"x": harm, "stable_baselines3": harm}
    (tmp_path / name).write_bytes(pickle.dumps([state, harm]))
    error = error_of(lambda: mr.load(tmp_path / name, tmp_path / "target", allow_pickle=True))
    assert isinstance(error, FormatError)
    assert name in text_of(error)
    assert not (tmp_path / "harmed").exists()


def test_a_truncated_pickle_is_named_with_its_offset(tmp_path, rng, make):
    path = make(**steps(rng))
    data = path.read_bytes()
    for size in (0, 1, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptError, match=r"buffer.pkl is not a complete .* before byte"):
            mr.load(path, tmp_path / "t", format="sb3", allow_pickle=True)
        assert not (tmp_path / "t").exists()


def test_flipped_bits_are_errors_or_other_values(tmp_path, rng, make):
    path = make(**steps(rng))
    whole = path.read_bytes()
    for number, place in enumerate(rng.integers(0, len(whole), 60).tolist()):
        data = bytearray(whole)
        data[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        target = tmp_path / str(number)

        def load(target=target):
            mr.load(path, target, format="sb3", allow_pickle=True)

        error = error_of(load)
        assert error is None or str(path) in text_of(error)
        assert (error is None) == target.exists()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"pos": 99}, r"pos must be in \[0, 10\) .* got 99 and True"),
        ({"actions": np.zeros((3, 2))}, "'action' must be an array of 10 .* got .3, 2"),
        ({"dones": None}, "holds no array 'dones' of steps and environments"),
        ({"pos": 10, "full": False}, r"pos must be in \[0, 10\) .* got 10 and False"),
        ({"pos": 0, "full": False}, "holds an empty buffer"),
        (
            {"next_observations": np.zeros((10, 2, 4), np.float32)},
            r"what followed 'observation' must have 10 rows of float32\[3\] as in the "
            r"observations, got 10 rows of float32\[4\]",
        ),
        (
            {"next_observations": {"b": np.zeros((10, 2, 3), np.float32)}},
            r"must have \['observation'\] .* got \['observation/b'\]",
        ),
        (
            {"timeouts": np.zeros((10, 2, 2), np.float32)},
            r"'timeouts' must hold one flag for each of 10 steps, got 10 rows of floa",
        ),
        ({"timeouts": {"a": np.zeros((10, 2))}}, "'timeouts' must be .* got dict"),
    ],
)
def test_a_buffer_that_makes_no_sense_is_refused(tmp_path, rng, make, change, match):
    path = make(**steps(rng) | change)
    with pytest.raises(FormatError, match=match):
        mr.load(path, tmp_path / "target", allow_pickle=True)


def generic(rng):
    """Rows as tmrl keeps them, and steps as they were played."""
    rows, played = [], []
    for number, length in enumerate((4, 1, 3)):
        seen = [(rng.random(2), rng.random(3)) for _ in range(length + 1)]
        rows.append((np.zeros(2), seen[0], 0.0, False, False, {}, False))
        for step in range(length):
            last = step == length - 1
            ends = (last and number % 2 == 0, last and number % 2 == 1)
            action, reward = rng.random(2), float(rng.random())
            rows.append((action, seen[step + 1], reward, *ends, {}, any(ends)))
            played.append((seen[step], action, reward, seen[step + 1], *ends))
    return [list(column) for column in zip(*rows, strict=True)], played


def columns_of(played):
    seen, action, reward, nexts, terminated, truncated = zip(*played, strict=True)
    return {
        "observation/0": np.stack([each[0] for each in seen]),
        "observation/1": np.stack([each[1] for each in seen]),
        "next_observation/0": np.stack([each[0] for each in nexts]),
        "next_observation/1": np.stack([each[1] for each in nexts]),
        "action": np.stack(action),
        "reward": np.array(reward),
        "terminated": np.array(terminated),
        "truncated": np.array(truncated),
    }


FIELDS = ["observation/0", "observation/1"]


def test_tmrl_columns_are_moved_to_the_observation_they_follow(tmp_path, rng):
    data, played = generic(rng)
    (tmp_path / "data.pkl").write_bytes(pickle.dumps(data))
    assert registry.source_format(tmp_path / "data.pkl").name == "tmrl"
    report = mr.load(tmp_path / "data.pkl", tmp_path / "target", allow_pickle=True)
    # Rows of ours are theirs: the last of an episode is its final row.
    assert (report.rows, report.episodes) == (len(data[0]), 3)
    found, left = drawn(tmp_path / "target", FIELDS)
    assert left == 0
    assert_same(found, columns_of(played))


def test_a_first_row_without_an_action_gets_none(tmp_path, rng):
    data, played = generic(rng)
    data[0][0] = data[0][5] = None
    (tmp_path / "data.pkl").write_bytes(pickle.dumps(data))
    mr.load(tmp_path / "data.pkl", tmp_path / "target", allow_pickle=True)
    assert_same(drawn(tmp_path / "target", FIELDS)[0], columns_of(played))


def test_memories_for_trackmania_have_their_fields_named(tmp_path, rng):
    rows = 8
    ends = [False] * 7 + [True]
    data = [
        list(range(rows)),
        [rng.random(3) for _ in range(rows)],
        [np.array([float(n)]) for n in range(rows)],
        [rng.random((4, 2)) for _ in range(rows)],
        ends,
        [float(n) for n in range(rows)],
        [{}] * rows,
        ends,
        [False] * rows,
    ]
    (tmp_path / "data.pkl").write_bytes(pickle.dumps(data))
    mr.load(tmp_path / "data.pkl", tmp_path / "target", allow_pickle=True)
    found, _ = drawn(tmp_path / "target", ["observation/speed", "observation/lidar"])
    np.testing.assert_array_equal(found["observation/lidar"], np.stack(data[3])[:-1])
    assert found["next_observation/speed"][:, 0].tolist() == list(range(1, 8))
    assert found["reward"].tolist() == list(range(1, 8))
    assert found["terminated"].tolist() == [False] * 6 + [True]


def test_ends_that_are_no_flags_are_refused(tmp_path, rng):
    data, _ = generic(rng)
    data[3] = [[False, True]] * len(data[3])
    (tmp_path / "data.pkl").write_bytes(pickle.dumps(data))
    with pytest.raises(SourceError, match=r"'terminated' must hold one flag per row"):
        mr.load(tmp_path / "data.pkl", tmp_path / "target", allow_pickle=True)


@pytest.mark.parametrize("data", [{"a": 1}, [[1], [2]], [[1], [2, 3]] * 4, 7])
def test_other_pickles_are_no_data_of_tmrl(tmp_path, data):
    (tmp_path / "data.pkl").write_bytes(pickle.dumps(data))
    with pytest.raises(FormatError, match=r"data.pkl must hold"):
        mr.load(tmp_path / "data.pkl", tmp_path / "t", format="tmrl", allow_pickle=True)
