"""DQN Replay's checkpoints, written as Dopamine writes them: gzip of numpy.save."""

import gzip

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert import registry
from mmreplay.errors import CorruptError, FormatError, SchemaError
from tests.convert.contract import error_of, text_of
from tests.convert.foreign.oracle import drawn


def played(rng, count=40, slots=25, stack=4):
    """A ring as Dopamine fills it, and its rows oldest first with padding marked."""
    rows, start = [], True
    while len(rows) < count:
        if start:
            rows += [(np.zeros((5, 4), np.uint8), 0, 0.0, 0, True)] * (stack - 1)
        over = int(rng.random() < 0.2)
        frame = rng.integers(1, 256, (5, 4), np.uint8)
        rows.append((frame, int(rng.integers(4)), float(rng.random()), over, False))
        start = bool(over)
    ring = {
        "observation": np.zeros((slots, 5, 4), np.uint8),
        "action": np.zeros(slots, np.int32),
        "reward": np.zeros(slots, np.float32),
        "terminal": np.zeros(slots, np.uint8),
    }
    for number, row in enumerate(rows):
        for values, value in zip(ring.values(), row, strict=False):
            values[number % slots] = value
    return ring, len(rows), rows[-slots:]


def write(folder, ring, added, number=0):
    folder.mkdir(exist_ok=True)
    for name, values in ring.items():
        save(folder / f"$store$_{name}_ckpt.{number}.gz", values)
    save(folder / f"add_count_ckpt.{number}.gz", np.array(added))
    save(folder / f"invalid_range_ckpt.{number}.gz", np.arange(5))
    return folder


def save(path, values, level=1):
    with gzip.open(path, "wb", level) as file:
        np.save(file, values, allow_pickle=False)


@pytest.mark.parametrize(("count", "slots"), [(40, 25), (20, 60), (400, 333)])
def test_rows_come_oldest_first_without_what_stands_before_episodes(tmp_path, rng, count, slots):
    ring, added, rows = played(rng, count, slots)
    folder = write(tmp_path / "logs", ring, added)
    assert registry.source_format(folder).name == "dqn-replay"
    report = mr.load(folder, tmp_path / "buffer", strict=True)
    real = [row for row in rows if not row[4]]
    assert report.rows == len(real)
    dropped = len(rows) - len(real)
    assert any(note.startswith(f"{dropped} rows were left") for note in report.notes)
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        found = buffer.gather_all()
        for name, column in zip(
            ["observation", "action", "reward", "terminated"],
            zip(*[row[:4] for row in real], strict=True),
            strict=True,
        ):
            np.testing.assert_array_equal(found[name], np.array(column).astype(found[name].dtype))
        ends = sum(row[3] for row in real)
        assert report.episodes == ends + (real[-1][3] == 0)


def test_checkpoints_follow_each_other_or_are_chosen(tmp_path, rng):
    first, second = (played(rng, 20, 60) for _ in range(2))
    write(tmp_path / "logs", *first[:2], number=2)
    write(tmp_path / "logs", *second[:2], number=10)
    mr.load(tmp_path / "logs", tmp_path / "both")
    mr.load(tmp_path / "logs", tmp_path / "one", checkpoint=10)
    actions = [[r[1] for r in each[2] if not r[4]] for each in (first, second)]
    for name, wanted in (("both", actions[0] + actions[1]), ("one", actions[1])):
        with mr.ReplayBuffer.open(tmp_path / name) as buffer:
            assert buffer.gather_all()["action"].tolist() == wanted
    assert not mr.verify_buffer(tmp_path / "both").findings
    with pytest.raises(SchemaError, match=r"checkpoint must be one of .2, 10. in .*, got 3"):
        mr.load(tmp_path / "logs", tmp_path / "none", checkpoint=3)


def test_without_a_count_the_order_is_doubted(tmp_path, rng):
    ring, added, _ = played(rng)
    folder = write(tmp_path / "logs", ring, added)
    (folder / "add_count_ckpt.0.gz").unlink()
    report = mr.load(folder, tmp_path / "buffer", padding=0)
    assert report.rows == 25
    assert "is missing, which says which row is the oldest" in report.doubts[0]


def test_steps_are_drawn_with_stacked_frames(tmp_path, rng):
    ring, added, _ = played(rng, 40, 60)
    mr.load(write(tmp_path / "logs", ring, added), tmp_path / "buffer")
    found, _ = drawn(tmp_path / "buffer", ["observation"])
    with mr.ReplayBuffer.open(tmp_path / "buffer", transforms=[mr.FrameStack(4)]) as buffer:
        batch = buffer.sample(8)
    assert batch["observation"].shape == (8, 4, 5, 4)
    assert found["observation"].dtype == np.uint8


def test_a_bomb_needs_leave(tmp_path, rng):
    ring, added, _ = played(rng)
    folder = write(tmp_path / "logs", ring, added)
    zeros = np.zeros((25, 1 << 19), np.uint8)
    save(folder / "$store$_observation_ckpt.0.gz", zeros, level=9)
    with pytest.raises(FormatError, match="more than 1000 times as many"):
        mr.load(folder, tmp_path / "buffer")


@pytest.mark.parametrize("name", ["observation", "terminal"])
def test_a_truncated_or_flipped_file_is_named_with_its_offset(tmp_path, rng, name):
    ring, added, _ = played(rng)
    folder = write(tmp_path / "logs", ring, added)
    path = folder / f"$store$_{name}_ckpt.0.gz"
    whole = path.read_bytes()
    for number, place in enumerate(rng.integers(0, len(whole), 25).tolist()):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed if number % 2 else whole[:place])
        target = tmp_path / str(number)

        def load(target=target):
            mr.load(folder, target)

        error = error_of(load)
        if error is not None:
            assert str(folder) in text_of(error)
            assert not target.exists()
        else:
            # Names and dates of gzip's header.
            assert number % 2
            assert place < 40


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (np.zeros(7, np.uint8), "has 25 rows, but the terminals have 7"),
        (np.zeros((25, 2), np.uint8), "terminal.*must hold one flag per row, got .* .2."),
        (np.array(["a"] * 25), "dtype"),
    ],
)
def test_terminals_that_make_no_sense_are_refused(tmp_path, rng, values, match):
    ring, added, _ = played(rng)
    folder = write(tmp_path / "logs", ring, added)
    save(folder / "$store$_terminal_ckpt.0.gz", values)
    with pytest.raises(FormatError, match=match):
        mr.load(folder, tmp_path / "buffer")


def test_a_folder_that_lacks_a_field_is_refused(tmp_path, rng):
    ring, added, _ = played(rng)
    folder = write(tmp_path / "logs", ring, added)
    (folder / "$store$_reward_ckpt.0.gz").unlink()
    with pytest.raises(FormatError, match=r"lacks .store._reward_ckpt.0.gz"):
        mr.load(folder, tmp_path / "buffer")
    save(folder / "$store$_reward_ckpt.0.gz", np.zeros(25, np.float32))
    (folder / "add_count_ckpt.0.gz").write_bytes(b"no")
    with pytest.raises(CorruptError, match=r"add_count_ckpt.0.gz cannot be"):
        mr.load(folder, tmp_path / "buffer")


@pytest.mark.parametrize("padding", ["abc", -1, [1], 1.5, True])
def test_a_padding_that_is_no_count_is_refused(tmp_path, rng, padding):
    folder = write(tmp_path / "logs", *played(rng)[:2])
    with pytest.raises(SchemaError, match=r"padding must be an integer of at least 0, got "):
        mr.load(folder, tmp_path / "buffer", padding=padding)
