"""Rings of alf and storages of pytorchrl, as torch saves them."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.convert import registry
from mmreplay.errors import FormatError, SchemaError, SourceError
from tests.convert.foreign.oracle import assert_same, drawn

FIRST, MID, LAST = 0, 1, 2


class Ring:
    """alf's RingBuffer: the position of the next row is never wrapped."""

    def __init__(self, envs, slots):
        self.state = {
            "time_step|step_type": np.zeros((envs, slots), np.int32),
            "time_step|reward": np.zeros((envs, slots), np.float32),
            "time_step|discount": np.zeros((envs, slots), np.float32),
            "time_step|observation|x": np.zeros((envs, slots, 3), np.float32),
            "action": np.zeros((envs, slots), np.int64),
            "rollout_info|p": np.zeros((envs, slots, 2), np.float32),
        }
        self.heads = np.zeros(envs, np.int64)
        self.slots = slots

    def add(self, env, **row):
        slot = self.heads[env] % self.slots
        for name, each in self.state.items():
            each[env, slot] = row[name.split("|")[1] if "|" in name else name]
        self.heads[env] += 1

    def save(self, path, prefix="alg/_replay_buffer."):
        top, _, rest = prefix.partition("/")
        state = self.state | {
            "_current_pos": self.heads,
            "_current_size": np.minimum(self.heads, self.slots),
            "_indexed_pos": np.zeros((len(self.heads), self.slots), np.int64),
        }
        inner = {rest + name: torch.from_numpy(each) for name, each in state.items()}
        torch.save({top: inner, "step": 7}, path)
        return path


def played(rng, envs=2, slots=12, rows=30):
    """A ring, and the steps that are left of each environment, oldest first."""
    ring, steps = Ring(envs, slots), []
    for env in range(envs):
        told = []
        kind, left = FIRST, int(rng.integers(1, 5))
        for _ in range(rows):
            over = kind == LAST and rng.random() < 0.5
            row = {
                "step_type": kind,
                "reward": np.float32(rng.random()),
                "discount": np.float32(0.0 if over else 1.0),
                "observation": rng.random(3).astype(np.float32),
                "action": int(rng.integers(4)),
                "p": rng.random(2).astype(np.float32),
            }
            ring.add(env, **row)
            told.append(row)
            left -= 1
            if kind == LAST:
                kind, left = FIRST, int(rng.integers(1, 5))
            else:
                kind = LAST if left <= 0 else MID
        told = told[-slots:]
        newest = len(told) - 2
        for number, (row, after) in enumerate(pairwise(told)):
            if row["step_type"] != LAST:
                steps.append((row, after, number == newest))
    return ring, steps


def columns_of(steps):
    def ends(after, newest):
        over = after["step_type"] == LAST and after["discount"] == 0
        return over, (after["step_type"] == LAST and not over) or (
            newest and after["step_type"] != LAST
        )

    ended = np.array([ends(after, newest) for _, after, newest in steps])
    return {
        "observation/x": np.stack([row["observation"] for row, _, _ in steps]),
        "next_observation/x": np.stack([row["observation"] for _, row, _ in steps]),
        "action": np.array([row["action"] for row, _, _ in steps]),
        "rollout_info/p": np.stack([row["p"] for row, _, _ in steps]),
        "reward": np.array([after["reward"] for _, after, _ in steps]),
        "discount": np.array([after["discount"] for _, after, _ in steps]),
        "terminated": ended[:, 0],
        "truncated": ended[:, 1],
    }


@pytest.mark.parametrize("name", ["ckpt-120", "ckpt-120-replay_buffer", "ring.bin"])
def test_a_checkpoint_of_alf_is_known_by_what_it_holds(tmp_path, rng, name):
    ring, steps = played(rng)
    ring.save(tmp_path / "ckpt.pt").rename(tmp_path / name)
    assert registry.source_format(tmp_path / name).name == "alf"
    mr.load(tmp_path / name, tmp_path / "buffer", strict=True)
    assert_same(drawn(tmp_path / "buffer", ["observation/x"])[0], columns_of(steps))
    for other in (b"", b"12", b"PK\3\4 and more", bytes(99)):
        (tmp_path / name).write_bytes(other)
        with pytest.raises(FormatError, match="got a file of no known format"):
            mr.load(tmp_path / name, tmp_path / "other")


@pytest.mark.parametrize("rows", [8, 12, 30])
def test_steps_of_alf_take_the_reward_of_the_row_behind(tmp_path, rng, rows):
    ring, steps = played(rng, rows=rows)
    path = ring.save(tmp_path / "ckpt.pt")
    assert registry.source_format(path).name == "alf"
    mr.load(path, tmp_path / "buffer", strict=True)
    found, left = drawn(tmp_path / "buffer", ["observation/x"])
    assert left == 0
    assert_same(found, columns_of(steps))


def test_a_ring_that_says_more_rows_than_it_has_is_refused(tmp_path, rng):
    ring, _ = played(rng)
    ring.heads[1] = -4
    with pytest.raises(FormatError, match=r"must be at most .* and at most _curr"):
        mr.load(ring.save(tmp_path / "a.pt"), tmp_path / "buffer")
    assert not (tmp_path / "buffer").exists()


def test_two_rings_in_one_file_are_refused(tmp_path, rng):
    ring, _ = played(rng)
    names = {"_current_pos": torch.from_numpy(ring.heads)}
    names |= {"_current_size": torch.from_numpy(ring.heads)}
    torch.save({"a": names, "b": dict(names)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"must hold one replay buffer .* got 2 "):
        mr.load(tmp_path / "a.pt", tmp_path / "buffer")


def test_a_first_row_begins_an_episode_whatever_came_before(tmp_path):
    ring = Ring(1, 12)
    for number, kind in enumerate([FIRST, MID, MID, FIRST, FIRST, MID, LAST]):
        ring.add(
            0,
            step_type=kind,
            reward=number,
            discount=kind != LAST,
            action=number,
            observation=np.full(3, number),
            p=np.zeros(2),
        )
    path = ring.save(tmp_path / "a.pt")
    report = mr.load(path, tmp_path / "buffer", strict=True)
    assert any("1 episodes were cut off without an end" in n for n in report.notes)
    got, left = drawn(tmp_path / "buffer", ["observation/x"])
    assert left == 0
    assert got["observation/x"][:, 0].tolist() == [0, 1, 4, 5]
    assert got["next_observation/x"][:, 0].tolist() == [1, 2, 5, 6]
    assert got["reward"].tolist() == [1, 2, 5, 6]
    assert got["terminated"].tolist() == [False, False, False, True]
    assert got["truncated"].tolist() == [False, True, False, False]


def storage(rng, slots=10, processes=3):
    seen = rng.random((slots, processes, 4)).astype(np.float32)
    done = (rng.random((slots, processes, 1)) < 0.3).astype(np.float32)
    nexts = rng.random((slots, processes, 4)).astype(np.float32)
    nexts = np.where(done > 0, nexts, np.roll(seen, -1, 0))
    return {
        "Observation": seen,
        "NextObservation": nexts,
        "Action": rng.random((slots, processes, 2)).astype(np.float32),
        "Reward": rng.random((slots, processes, 1)).astype(np.float32),
        "Done": np.roll(done, 1, 0),
        "NextDone": done,
        "RecurrentHiddenStates": np.zeros((1, processes, 1), np.float32),
    }


def save(path, data, **more):
    tensors = {name: torch.from_numpy(each.copy()) for name, each in data.items()}
    torch.save(tensors | more, path)
    return path


@pytest.mark.parametrize(("size", "step"), [(10, 4), (6, 6), (10, 0)])
def test_rows_of_pytorchrl_come_oldest_first(tmp_path, rng, size, step):
    data = storage(rng)
    path = save(tmp_path / "a.pt", data, size=size, step=step)
    assert registry.source_format(path).name == "pytorchrl"
    report = mr.load(path, tmp_path / "buffer")
    assert any("may mix time limits" in doubt for doubt in report.doubts)
    order = (np.arange(size) + (step if size == 10 else 0)) % 10
    found, left = drawn(tmp_path / "buffer", ["observation"])
    assert left == 0

    def rows(name):
        return np.concatenate(np.moveaxis(data[name][order], 1, 0))

    done = rows("NextDone")[:, 0] > 0
    newest = np.arange(len(done)) % size == size - 1
    assert_same(
        found,
        {
            "observation": rows("Observation"),
            "next_observation": rows("NextObservation"),
            "action": rows("Action"),
            "reward": rows("Reward")[:, 0],
            "terminated": done,
            "truncated": newest & ~done,
        },
    )


def test_a_storage_without_its_size_is_doubted(tmp_path, rng):
    path = save(tmp_path / "a.pt", storage(rng))
    report = mr.load(path, tmp_path / "buffer")
    assert any("does not say how many rows" in doubt for doubt in report.doubts)
    mr.load(path, tmp_path / "part", size=5, step=5)
    with mr.ReplayBuffer.open(tmp_path / "part") as buffer:
        assert buffer.num_envs == 3
    with pytest.raises(SourceError, match=r"allows no guess\. Load without strict if the guess is"):
        mr.load(path, tmp_path / "strict", strict=True)
    mr.load(path, tmp_path / "told", strict=True, size=5, done="truncated")
    with mr.ReplayBuffer.open(tmp_path / "told") as buffer:
        assert not buffer.gather_all()["terminated"].any()
    with pytest.raises(FormatError, match="size 11 and step 0 must be within"):
        mr.load(path, tmp_path / "other", size=11)
    full = mr.load(path, tmp_path / "full", size=10, done="terminated")
    assert any("does not say which row is the newest" in d for d in full.doubts)
    told = mr.load(path, tmp_path / "all", size=10, step=0, done="terminated")
    assert not told.doubts


def test_tensors_of_a_storage_that_do_not_fit_are_doubts(tmp_path, rng):
    data = storage(rng) | {"Reward": np.zeros((9, 3, 1), np.float32)}
    data["NextObservation/x"] = data.pop("NextObservation")
    path = save(tmp_path / "a.pt", data, size=10, step=4)
    report = mr.load(path, tmp_path / "buffer", done="terminated", format="pytorchrl")
    assert "tensor 'Reward' was left out: it has no row a step" in report.doubts
    assert any("'NextObservation' are of ['observation/x']" in d for d in report.doubts)
    assert any("'RecurrentHiddenStates' was left" in note for note in report.notes)


@pytest.mark.parametrize("options", [{"size": "two"}, {"step": 1.5}, {"size": True}])
def test_sizes_that_are_no_integers_are_refused(tmp_path, rng, options):
    path = save(tmp_path / "a.pt", storage(rng))
    told = f"{next(iter(options))} must be an integer.*{next(iter(options.values()))!r}"
    with pytest.raises(SchemaError, match=told):
        mr.load(path, tmp_path / "buffer", **options)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"NextObservation": np.zeros((10, 3, 5), "f4")}, r"what followed .*float32\[5\]"),
        ({"NextDone": np.zeros((10, 3, 2), "f4")}, r"one flag .*10 rows of float32\[2\]"),
        ({"NextDone": np.full((10, 3, 1), np.nan, "f4")}, "got NaN or no value in row"),
    ],
)
def test_storages_that_make_no_sense_are_refused(tmp_path, rng, change, match):
    path = save(tmp_path / "a.pt", storage(rng) | change)
    with pytest.raises((FormatError, SourceError), match=match):
        mr.load(path, tmp_path / "buffer", done="terminated")
    assert not (tmp_path / "buffer").exists()


def test_a_plain_file_of_tensors_is_neither(tmp_path):
    torch.save({"observations": torch.zeros(3, 2)}, tmp_path / "a.pt")
    assert registry.source_format(tmp_path / "a.pt").name == "pt"
