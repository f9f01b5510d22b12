"""Next observations at every boundary, against the oracle.

Rings are small and sequences long: a de Bruijn sequence holds every window of a
few kinds of step once, and a ring of a few rows that it runs through sees each of
them at its cursor, at its wrap and at its tail.
"""

import itertools

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import StaleError
from tests.buffer.oracle import columns
from tests.buffer.support import Twin, check, step

KINDS = ("", "t", "u", "tu")
WINDOW = 3
LAYOUTS = ("env_major", "time_major")


def de_bruijn(letters, length):
    """A cyclic sequence with every window of the length exactly once."""
    seen, word = set(), (letters[0],) * length
    found = []
    while True:
        for letter in reversed(letters):
            after = (*word[1:], letter)
            if after not in seen:
                break
        else:
            return found
        seen.add(after)
        found.append(letter)
        word = after


def test_the_sequence_holds_every_window_once():
    found = de_bruijn("abc", 3)
    cyclic = found + found[:2]
    windows = {tuple(cyclic[i : i + 3]) for i in range(27)}
    assert len(found) == len(windows) == 27


@pytest.fixture(params=["memmap", "memory"])
def path(request, tmp_path):
    return tmp_path / "ring" if request.param == "memmap" else None


def run_through(twin, letters, shift):
    """Feed both environments a sequence, the second one's shifted against it."""
    sequence = de_bruijn(letters, WINDOW)
    for index, (kind, final) in enumerate(sequence):
        other, _ = sequence[(index + shift) % len(sequence)]
        twin.add([kind, other], final=final)
        twin.check(illegal=index % 3 == 0)


@pytest.mark.parametrize("stored", [False, True], ids=["derived", "stored"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("autoreset", ["disabled", "same_step"])
def test_every_pattern_of_ends(path, layout, autoreset, stored):
    twin = Twin(path, 5, 2, layout=layout, autoreset=autoreset, stored=stored)
    finals = [False] if stored else [False, True]
    letters = [(kind, f) for kind in KINDS for f in finals if kind or not f]
    run_through(twin, letters, shift=5)


@pytest.mark.parametrize("stored", [False, True], ids=["derived", "stored"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pattern_of_ends_where_final_rows_follow(path, layout, stored):
    twin = Twin(path, 5, 2, layout=layout, autoreset="next_step", stored=stored)
    run_through(twin, [(kind, False) for kind in KINDS], shift=11)


@pytest.mark.parametrize("capacity", range(1, 7))
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_every_short_history_at_every_slot_of_the_ring(capacity, autoreset):
    kinds = ["", "t", "u"]
    finals = [False] if autoreset == "next_step" else [False, True]
    twin = Twin(None, capacity, autoreset=autoreset)
    for word in itertools.product(itertools.product(kinds, finals), repeat=3):
        twin.buffer.clear()
        twin.oracle.clear([0])
        for kind, final in word:
            twin.add([kind], final=final)
        twin.check(illegal=False)


@pytest.mark.parametrize("autoreset", ["disabled", "same_step", "next_step"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sliced(1)
def test_blocks_give_what_single_steps_give(path, layout, autoreset, rng):
    twin = Twin(path, 40, 3, layout=layout, autoreset=autoreset)
    for _ in range(60):
        steps = int(rng.integers(1, 60))
        env_ids = [0, 1, 2]
        if rng.random() < 0.4:
            env_ids = rng.permutation(3)[: rng.integers(1, 4)].tolist()
        kinds = rng.choice(KINDS, (steps, len(env_ids)), p=[0.6, 0.2, 0.1, 0.1])
        final = autoreset != "next_step" and bool(rng.random() < 0.5)
        twin.extend(kinds.tolist(), env_ids, final)
        twin.check(illegal=False)
    twin.check()


@pytest.mark.parametrize("how", ["break", "truncate", "continue"])
@pytest.mark.parametrize("stored", [False, True], ids=["derived", "stored"])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.sliced(2)
def test_what_resuming_does_to_the_step_before(tmp_path, how, stored, autoreset):
    twin = Twin(tmp_path / "ring", 6, 2, autoreset=autoreset, stored=stored)
    final = not stored and autoreset == "same_step"
    for before in itertools.product(KINDS, repeat=2):
        for kind in ("", "t"):
            twin.add([kind, kind], final=final)
            twin.add(before, final=final)
            twin.reopen(how)
            twin.check()
            twin.add(["", "u"], env_ids=[1, 0])
            # What a fresh reader says of the cut must not wait for a look around.
            with mr.ReplayBuffer.open(twin.path) as reader:
                check(reader, twin.oracle, illegal=False)
            twin.check()


@pytest.mark.parametrize("how", ["break", "truncate", "continue"])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_what_resuming_after_a_clear_makes_of_the_next_row(tmp_path, how, autoreset):
    twin = Twin(tmp_path / "ring", 6, 2, autoreset=autoreset)
    for kinds in itertools.product(KINDS, repeat=2):
        twin.add(["", ""])
        twin.add(kinds)
        twin.buffer.clear()
        twin.oracle.clear([0, 1])
        twin.reopen(how)
        # Where final rows follow ends, this one is final, though its end is gone.
        twin.add(["", ""])
        twin.check()
        twin.add(["t", ""])
        twin.check()
    twin.buffer.close()


def test_a_reader_sees_the_cut_flag_before_it_looks_at_anything_else(tmp_path):
    twin = Twin(tmp_path / "ring", 6, stored=True)
    twin.add([""])
    twin.reopen("truncate")
    twin.add([""])
    with mr.ReplayBuffer.open(twin.path) as reader:
        assert reader.take([0, 0], [0, 1])["truncated"].tolist() == [True, False]
    twin.buffer.close()


def test_resuming_with_no_row_leaves_no_trace(tmp_path):
    twin = Twin(tmp_path / "ring", 6)
    twin.add([""])
    for how in ("truncate", "break", "continue"):
        twin.reopen(how)
    twin.add([""])
    twin.check()
    assert not twin.buffer.take([0], [0])["truncated"].any()


@pytest.mark.parametrize("change", ["resize", "add_field"])
def test_a_break_outlives_what_rebuilds_the_buffer(tmp_path, change):
    twin = Twin(tmp_path / "ring", 6, 2)
    twin.add(["", ""])
    twin.reopen("truncate")
    if change == "resize":
        twin.buffer.resize(9)
        twin.oracle.resize(9)
    else:
        twin.buffer.add_field("more", mr.Field((), "int8"), 0)
    with pytest.raises(StaleError, match="cannot be drawn"):
        twin.buffer.take([0], [0])
    if change == "resize":
        twin.add(["", ""])
        twin.check()
    else:
        twin.buffer.add(step_with(twin, more=np.array([1, 1], np.int8)))
        twin.oracle.add({0: {}, 1: {}})
    with pytest.raises(StaleError, match="the last before a gap"):
        twin.buffer.take([0], [0])
    assert twin.buffer.get_field("truncated", 0, 0)


@pytest.mark.parametrize("stored", [False, True], ids=["derived", "stored"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capacity", [3, 6, 40])
def test_a_final_row_to_come_is_known_after_a_clear_and_a_resize(
    tmp_path, capacity, layout, stored
):
    twin = Twin(tmp_path / "b", 6, 2, autoreset="next_step", stored=stored, layout=layout)
    twin.extend([["", ""]] * 9 + [["t", ""], ["", "u"]])
    for whose in (twin.buffer, twin.oracle):
        whose.clear([0, 1])
    for size in (capacity, 5):
        twin.buffer.resize(size)
        twin.oracle.resize(size)
        twin.reopen("continue")
    # What the second environment adds is its final row, and no step.
    twin.add(["", ""])
    twin.check()
    assert twin.buffer.gather_all()["final"].tolist() == [False, True]
    for _ in range(4):
        twin.add(["", ""])
        twin.check()


def step_with(twin, **more):
    rows = twin.buffer.gather_all()
    fields = {path: rows[path][[0, 0]] for path in twin.buffer.schema.paths}
    return fields | more


@pytest.mark.parametrize("autoreset", ["disabled", "same_step", "next_step"])
@pytest.mark.sliced(2)
def test_clearing_some_environments_leaves_the_others(path, autoreset, rng):
    twin = Twin(path, 7, 3, autoreset=autoreset)
    for _ in range(120):
        env_ids = rng.permutation(3)[: rng.integers(1, 4)].tolist()
        twin.add(rng.choice(KINDS, len(env_ids)).tolist(), env_ids)
        if rng.random() < 0.3:
            some = rng.permutation(3)[: rng.integers(1, 4)].tolist()
            twin.buffer.clear(some)
            twin.oracle.clear(some)
        twin.check()


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.sliced(1)
def test_dequeued_rows_are_gone_and_their_successors_are_not(path, autoreset, rng):
    twin = Twin(path, 9, 2, autoreset=autoreset)
    for _ in range(150):
        twin.add(rng.choice(KINDS, 2).tolist(), final=autoreset == "same_step")
        held = int(twin.buffer.span.lengths.min())
        count = int(rng.integers(0, 4))
        if 0 < count <= held:
            env_ids = [[0], [1], [1, 0], [0, 1]][rng.integers(4)]
            batch = twin.buffer.dequeue(count, env_ids)
            taken = twin.oracle.dequeue(count, env_ids)
            assert list(zip(batch.env_ids, batch.positions, strict=True)) == taken
            values = [twin.oracle.row(*path) for path in taken]
            assert batch["observation"].tolist() == [v["observation"] for v in values]
        twin.check()


def test_read_only_steps_without_ends_accept_a_final_observation(path):
    buffer = Twin(path, 4).buffer
    made = columns([step(1), step(2)])
    for array in made.values():
        array.flags.writeable = False
    buffer.extend(made, final_observation=np.zeros((2, 2), np.int64))
    assert buffer.gather_all()["action"].tolist() == [1, 2]
