"""What is drawn equals the sampler's own draw, and leaves no trace in its files."""

import fcntl
import gc
import os
import threading
import time
import tracemalloc
import weakref
from urllib.parse import urlencode

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.page import priorities
from mmreplay.page.draws import age_histogram, known_samplers, parse_sampler
from mmreplay.page.requests import Refusal
from tests.page.conftest import healthy_steps, make_buffer, schema


@pytest.fixture
def prioritized(path, rng):
    """A buffer with stored priorities of two orders of magnitude."""
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        batch = buffer.sample(512)
        buffer.update_priorities(batch, rng.random(512) * 100)
    return path


def files_of(path):
    folder = path / "samplers" / "prioritized"
    return {
        name: ((folder / name).read_bytes(), os.stat(folder / name).st_mtime_ns)
        for name in ("STATE", "LOCK", "priorities.bin")
    }


def test_draws_are_the_samplers_own(ask, prioritized):
    client = ask(prioritized)
    text = "PrioritizedSampler(alpha=0.8, beta=0.5)"
    answer = client.json("draws", f"sampler={text}&seed=3")
    sampler = mr.PrioritizedSampler(alpha=0.8, beta=0.5, seed=3)
    with mr.ReplayBuffer.open(prioritized) as buffer:
        draw = sampler.draw(buffer.view, 256)
        sampler.close()
        heads = buffer.heads
    assert answer["env_ids"] == draw.env_ids.tolist()
    assert answer["positions"] == draw.positions.tolist()
    np.testing.assert_allclose(answer["probabilities"], draw.probabilities, rtol=1e-6)
    np.testing.assert_allclose(answer["weights"], draw.weights, rtol=1e-5)
    ages = heads[draw.env_ids] - 1 - draw.positions
    assert answer["ages"] == ages.tolist()
    assert sum(answer["drawn"]) == 256
    assert answer["priorities"]


def test_draws_take_no_lock_and_write_no_state(ask, prioritized):
    before = files_of(prioritized)
    client = ask(prioritized)
    for seed in range(3):
        for name in ("PrioritizedSampler", "RankPrioritizedSampler"):
            client.json("draws", f"sampler={name}()&seed={seed}")
    client.json("overview")
    assert files_of(prioritized) == before
    # A trainer that starts now gets the column, not a copy in RAM.
    sampler = mr.PrioritizedSampler()
    with mr.ReplayBuffer.open(prioritized, sampler=sampler) as buffer:
        buffer.sample(1)
        assert sampler.where == "disk"
        sampler.close()


def test_draws_work_while_a_trainer_holds_the_lock(ask, prioritized):
    with open(prioritized / "samplers" / "prioritized" / "LOCK", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = ask(prioritized).json("draws", "sampler=PrioritizedSampler()")
    assert len(answer["positions"]) == 256


def test_the_command_line_names_the_first_sampler(ask, path):
    client = ask(path, sampler="UniformSampler()")
    answer = client.json("draws", "seed=1")
    assert answer["sampler"] == "UniformSampler()"
    assert not answer["priorities"]


def prioritized_ring(path, rng, layout, num_envs):
    """A ring that has wrapped, with priorities of most rows."""
    buffer = mr.ReplayBuffer.create(
        path, schema(), 150, num_envs, layout=layout, autoreset="disabled"
    )
    with buffer:
        steps = healthy_steps(rng, 370, num_envs)
        buffer.extend(steps, final_observation=steps["observation"])
        sampler = buffer.sampler = mr.PrioritizedSampler(seed=0)
        buffer.update_priorities(buffer.sample(200), rng.random(200) * 100)
        sampler.close()
        # Rows that the sampler has not seen.
        steps = healthy_steps(rng, 33, num_envs)
        buffer.extend(steps, final_observation=steps["observation"])
    return path


@pytest.mark.parametrize(("layout", "num_envs"), [("env_major", 3), ("time_major", 3)])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"alpha": 0},
        {"alpha": 1.3, "eps": 0.5, "normalize": "buffer"},
        {"normalize": "mean", "stratified": False},
        {"initial_priority": 1e6, "beta": 1},
    ],
)
def test_draws_by_blocks_are_those_of_the_sum_tree(
    ask, tmp_path, rng, monkeypatch, layout, num_envs, arguments
):
    monkeypatch.setattr(priorities, "BLOCK_ROWS", 8)
    monkeypatch.setattr(priorities, "CHUNK_ROWS", 64)
    path = prioritized_ring(tmp_path / "ring", rng, layout, num_envs)
    text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    answer = ask(path).json("draws", f"sampler=PrioritizedSampler({text})&seed=5")
    sampler = mr.PrioritizedSampler(**arguments, seed=5)
    with mr.ReplayBuffer.open(path) as buffer:
        draw = sampler.draw(buffer.view, 256)
        assert sampler.where == "disk"
        sampler.close()
    assert answer["env_ids"] == draw.env_ids.tolist()
    assert answer["positions"] == draw.positions.tolist()
    np.testing.assert_allclose(answer["probabilities"], draw.probabilities, rtol=1e-9)
    np.testing.assert_allclose(answer["weights"], draw.weights, rtol=1e-6)


def test_a_large_ring_is_weighed_once_and_keeps_no_priorities(ask, tmp_path, rng, monkeypatch):
    monkeypatch.setattr("mmreplay.page.draws.LARGE_ROWS", 100)
    path = make_buffer(tmp_path / "a", rng)
    weighed = []
    look = priorities.Weighing.look

    def count(self, view, first, stop):
        weighed.append(stop - first)
        return look(self, view, first, stop)

    monkeypatch.setattr(priorities.Weighing, "look", count)
    monkeypatch.setattr(priorities, "BLOCK_ROWS", 8)
    client = ask(path)
    client.json("draws", "sampler=PrioritizedSampler()")
    with mr.ReplayBuffer.open(path) as buffer:
        num_rows = buffer.view.home.ring.num_rows
    assert weighed[0] == num_rows
    assert set(weighed[1:]) == {8}
    # While a writer adds rows, the masses of 30 s before choose the blocks.
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        steps = healthy_steps(rng, 5, 2)
        buffer.extend(steps, final_observation=steps["observation"])
    weighed.clear()
    client.json("draws", "sampler=PrioritizedSampler()&seed=1")
    assert set(weighed) == {8}


def test_priorities_are_weighed_again_when_the_sampler_wrote_them(ask, prioritized):
    client = ask(prioritized)
    before = client.json("draws", "sampler=PrioritizedSampler(alpha=1)&seed=1")
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ReplayBuffer.open(prioritized, sampler=sampler) as buffer:
        batch = buffer.sample(1)
        buffer.update_priorities(batch, [1e9])
        step = [int(batch.env_ids[0]), int(batch.positions[0])]
    # The time of a file counts in ticks of a clock of some milliseconds.
    column = prioritized / "samplers" / "prioritized" / "priorities.bin"
    os.utime(column, ns=(0, os.stat(column).st_mtime_ns + 10**8))
    after = client.json("draws", "sampler=PrioritizedSampler(alpha=1)&seed=1")
    drawn = set(zip(after["env_ids"], after["positions"], strict=True))
    assert drawn == {tuple(step)}
    assert after["positions"] != before["positions"]


def uniform():
    return mr.UniformSampler(seed=3)


# The text, and the same sampler made by hand.
TEXTS = {
    "UniformSampler": uniform,
    "UniformSampler(block=16)": lambda: mr.UniformSampler(seed=3, block=16),
    "RankPrioritizedSampler()": lambda: mr.RankPrioritizedSampler(name=None, seed=3),
    "RecentSampler(50, ratio=0.5)": lambda: mr.RecentSampler(50, 0.5, uniform(), seed=3),
    "EmphasizeRecentSampler(10)": lambda: mr.EmphasizeRecentSampler(10, seed=3),
    "StratifiedSampler()": lambda: mr.StratifiedSampler(seed=3),
    "DistinctSampler(seed=9)": lambda: mr.DistinctSampler(seed=9),
    "ShuffledSampler": lambda: mr.ShuffledSampler(seed=3),
    "SequenceSampler(8, stride=4)": lambda: mr.SequenceSampler(8, uniform(), stride=4),
    "SequenceSampler(5, ShuffledSampler(), burn_in=2, bootstrap=1, boundary='pad')": (
        lambda: mr.SequenceSampler(
            5, mr.ShuffledSampler(seed=3), burn_in=2, bootstrap=1, boundary="pad"
        )
    ),
    "SequenceSampler(8, PrioritizedSampler(), first_only=('action',))": (
        lambda: mr.SequenceSampler(8, mr.PrioritizedSampler(name=None, seed=3))
    ),
    "EpisodeSampler()": lambda: mr.EpisodeSampler(uniform()),
    "EpisodeSampler(by='length', layout='ragged')": (
        lambda: mr.EpisodeSampler(uniform(), by="length")
    ),
    "EpisodeSampler(PrioritizedSampler(), min_length=5)": lambda: mr.EpisodeSampler(
        mr.PrioritizedSampler(name=None, seed=3), min_length=5
    ),
    "MixtureSampler([(PrioritizedSampler(), 3), (UniformSampler(), 1)])": (
        lambda: mr.MixtureSampler(
            [(mr.PrioritizedSampler(name=None, seed=3), 3), (uniform(), 1)], seed=3
        )
    ),
    "MixtureSampler([[EpisodeSampler(), 3], [EpisodeSampler(by='length'), 1]])": (
        lambda: mr.MixtureSampler(
            [(mr.EpisodeSampler(uniform()), 3), (mr.EpisodeSampler(uniform(), by="length"), 1)],
            seed=3,
        )
    ),
    "ignore_earliest(40, UniformSampler())": lambda: mr.ignore_earliest(40, uniform()),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_draws_what_the_sampler_draws(ask, path, text):
    query = urlencode({"sampler": text, "seed": 3})
    answer = ask(path).json("draws", query)
    sampler = TEXTS[text]()
    with mr.ReplayBuffer.open(path) as buffer:
        draw = sampler.draw(buffer.view, 256)
    assert answer["env_ids"] == draw.env_ids.tolist()
    assert answer["positions"] == draw.positions.tolist()
    np.testing.assert_allclose(answer["probabilities"], draw.probabilities)
    np.testing.assert_allclose(answer["weights"], draw.weights)
    assert answer == ask(path).json("draws", query)
    # No sampler of the list is left out.
    ours = {
        name
        for name, made in known_samplers().items()
        if made.__module__.startswith("mmreplay.") and getattr(made, "only_starts", True)
    }
    assert {name for name in ours if any(name in known for known in TEXTS)} == ours


def test_what_is_drawn_by_its_steps_is_named(ask, path):
    client = ask(path)
    for text, form in (
        ("UniformSampler", None),
        ("SequenceSampler(8, burn_in=2)", "windows of 10 steps"),
        ("EpisodeSampler", "episodes"),
    ):
        assert client.json("draws", f"sampler={text}")["form"] == form


def test_episodes_of_any_length_are_drawn_in_little_memory(ask, tmp_path):
    fields = {"observation": mr.Field((), "int8"), "terminated": mr.Field((), "bool")}
    path = tmp_path / "long"
    count = 1_000_000
    ends = np.zeros(count, bool)
    ends[[count // 2, count - 1]] = True
    with mr.ReplayBuffer.create(path, mr.Schema(fields), count, autoreset="disabled") as buffer:
        buffer.extend(observation=np.zeros(count, np.int8), terminated=ends)
    client = ask(path)
    client.json("draws", "sampler=UniformSampler")
    for text in (
        "EpisodeSampler()",
        "EpisodeSampler(layout='ragged')",
        "SequenceSampler(60000)",
        "UniformSampler(block=1099511627776)",
        "PrioritizedSampler()",
    ):
        tracemalloc.start()
        client.json("draws", f"sampler={text}")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # All steps of 256 such episodes would take 2 GB.
        assert peak < 32 << 20, text


def test_samplers_within_samplers(ask, prioritized):
    text = "RecentSampler(10, 0.5, PrioritizedSampler(beta=LinearSchedule(0.4, 1.0, 5)))"
    before = files_of(prioritized)
    assert len(ask(prioritized).json("draws", f"sampler={text}")["positions"]) == 256
    assert files_of(prioritized) == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "print('x')",
        "__import__('os').system('touch pwned')",
        "UniformSampler.__init__",
        "UniformSampler(seed=open('x'))",
        "UniformSampler(seed=(lambda: 1)())",
        "UniformSampler(*[1])",
        "UniformSampler(**{'seed': 1})",
        "UniformSampler(seed=[1] * 9)",
        "UniformSampler(block=10**99)",
        "UniformSampler(block=99999999999999999999)",
        "UniformSampler(x=1)",
        "UniformSampler(seed=-1)",
        "PrioritizedSampler(alpha='x')",
        "PrioritizedSampler(alpha=PrioritizedSampler)",
        "SequenceSampler(10, SequenceSampler(10))",
        "SequenceSampler(1099511627776)",
        "SequenceSampler(1, burn_in=65537)",
        "SequenceSampler(length=10, sampler='x')",
        "EpisodeSampler(where=UniformSampler())",
        "EpisodeSampler(where=print)",
        "PrioritizedSampler(name='../../../etc')",
        "MixtureSampler([UniformSampler()])",
        "MixtureSampler([(UniformSampler(), 1), (SequenceSampler(3), open)])",
        "concat()",
        "LinearSchedule(0, 1, 5)",
        "UniformSampler()()",
        "UniformSampler(); 1",
        "(" * 90 + ")" * 90,
        "R" * 400,
        "RecentSampler(1, 1.0, " * 8 + "UniformSampler()" + ")" * 8,
        "MixtureSampler(" + "[" * 9 + "]" * 9 + ")",
        "UniformSampler(\x00)",
    ],
)
def test_text_that_is_no_sampler_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal) as refused:
        parse_sampler(text, 0)
    assert refused.value.status == 400
    assert [*tmp_path.iterdir()] == []


class OwnPriorities(mr.PrioritizedSampler):
    """Would take the lock of the stored priorities."""


class OwnRanks(mr.RankPrioritizedSampler):
    """Would, too."""


class OwnWindows(mr.SequenceSampler):
    """Would lay out windows of any length."""


class Hiding(mr.UniformSampler):
    """Has a sampler inside that no text names."""

    def __init__(self, seed=None):
        super().__init__(seed)
        vars(self).update(parts=(OwnPriorities(seed=seed),))


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("OwnPriorities()", "OwnPriorities", "would lock"),
        ("OwnPriorities", "OwnPriorities", "would lock"),
        ("OwnRanks()", "OwnRanks", "would lock"),
        ("SequenceSampler(3, OwnPriorities())", "OwnPriorities", "would lock"),
        ("RecentSampler(5, 0.5, OwnPriorities())", "OwnPriorities", "would lock"),
        ("OwnWindows(3, PrioritizedSampler())", "OwnWindows", "would lock"),
        ("OwnWindows(65537)", "OwnWindows", "would lock"),
        ("Hiding()", "Hiding", "keeps priorities, or reads more than starts"),
    ],
)
def test_a_class_of_others_that_would_write_is_refused_by_name(
    ask, prioritized, tmp_path, rng, text, name, reason
):
    if reason == "would lock":
        reason += " stored priorities or lay out windows"
    without = tmp_path / "without"
    make_buffer(without, rng)
    before = files_of(prioritized)
    for each in (prioritized, without):
        status, words = ask(each).refused("draws", urlencode({"sampler": text, "seed": 0}))
        assert status == 400
        assert words == (
            f"The page cannot draw from {name}, which {reason}. Draw from it in Python."
        )
    assert files_of(prioritized) == before
    assert not (without / "samplers").exists()


def test_messages_name_samplers_as_they_are_typed():
    with pytest.raises(Refusal, match="got the SequenceSampler, of") as refused:
        parse_sampler("SequenceSampler(10, SequenceSampler(10))", 0)
    assert "WindowStarts" not in str(refused.value)


def test_a_sampler_takes_the_column_that_it_names(ask, path, rng):
    for name, highest in (("td", 1000.0), ("prioritized", 1.0)):
        sampler = mr.PrioritizedSampler(name=name, seed=0)
        with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
            batch = buffer.sample(8)
            buffer.update_priorities(batch, np.full(8, highest))
            pairs = zip(batch.env_ids.tolist(), batch.positions.tolist(), strict=True)
            steps = set(pairs)
    client = ask(path)
    for kind in ("PrioritizedSampler", "RankPrioritizedSampler"):
        drawn = client.json("draws", f"sampler={kind}(4.0, name='td')")
        found = zip(drawn["env_ids"], drawn["positions"], strict=True)
        assert set(found) <= steps, kind
        status, text = client.refused("draws", f"sampler={kind}(name='x')")
        assert status == 400
        assert text == ("The buffer has no priorities named 'x'. Known are prioritized, td.")
    drawn = client.json("draws", "sampler=PrioritizedSampler(name=None)")
    assert len(set(drawn["probabilities"])) == 1


def test_a_buffer_without_priorities_gets_no_folder_for_them(ask, path):
    for kind in ("PrioritizedSampler", "RankPrioritizedSampler"):
        ask(path).json("draws", f"sampler={kind}(name='prioritized')")
    assert not (path / "samplers").exists()


def test_ages_are_counted_without_reading(rng):
    for lengths in ([1], [40], [41], [1000, 10, 0], [123456]):
        edges, counts = age_histogram(np.array(lengths))
        ages = np.concatenate([np.arange(length) for length in lengths])
        assert counts.tolist() == np.histogram(ages, edges)[0].tolist()
        assert counts.sum() == sum(lengths)


def test_rings_too_large_to_rank_are_refused(ask, tmp_path, rng, monkeypatch):
    monkeypatch.setattr("mmreplay.page.draws.MAX_RANKED_ROWS", 100)
    path = make_buffer(tmp_path / "a", rng)
    status, text = ask(path).refused("draws", "sampler=RankPrioritizedSampler()")
    assert status == 413
    assert "at most 100 rows" in text
    assert "Use PrioritizedSampler." in text
    assert ask(path).json("draws", "sampler=PrioritizedSampler")["seed"] == 0


def test_rows_that_a_text_ranks_are_counted_together(ask, path, monkeypatch):
    monkeypatch.setattr("mmreplay.page.draws.MAX_RANKED_ROWS", 5000)
    one = "(RankPrioritizedSampler(),1)"
    client = ask(path)
    text = f"MixtureSampler([{one},{one}])"
    assert len(client.json("draws", f"sampler={text}")["ages"]) == 256
    text = f"MixtureSampler([{one},{one},{one}])"
    status, words = client.refused("draws", f"sampler={text}")
    assert status == 413
    assert "at most 5,000 rows, and this one has 2,240 for each of 3" in words


def test_draws_that_take_too_much_are_refused(ask, prioritized, monkeypatch):
    client = ask(prioritized)
    nested = "SequenceSampler(4, sampler=PrioritizedSampler())"
    assert client.json("draws", f"sampler={nested}")["form"]
    monkeypatch.setattr("mmreplay.page.draws.MAX_WEIGHED_ROWS", 2000)
    status, words = client.refused("draws", f"sampler={nested}")
    assert status == 413
    assert "at most 2,000 rows, and this one has 2,240. Use it alone." in words
    assert client.json("draws", "sampler=PrioritizedSampler()")["ages"]
    assert client.json("draws", "sampler=SequenceSampler(4)")["ages"]
    monkeypatch.setattr("mmreplay.page.draws.MAX_EPISODES", 10)
    for text in ("SequenceSampler(4)", "EpisodeSampler()"):
        status, words = client.refused("draws", f"sampler={text}")
        assert status == 413
        assert "of at most 10 episodes, and this buffer has 20." in words
    assert client.json("draws", "sampler=UniformSampler()")["ages"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("PrioritizedSampler(alpha=4, eps=1e200)", "Use a smaller alpha or eps."),
        ("SequenceSampler(2, sampler=PrioritizedSampler(4, eps=1e200))", "overflows"),
        ("MixtureSampler([(UniformSampler(),1e308),(UniformSampler(),1e308)])", "cannot draw"),
    ],
)
def test_arguments_that_overflow_are_refused(ask, prioritized, text, words):
    with np.errstate(all="ignore"):
        status, text = ask(prioritized).refused("draws", urlencode({"sampler": text}))
    assert status == 400
    assert words in text


def test_masses_are_those_of_the_buffer_as_it_is(ask, prioritized, monkeypatch):
    # Masses of a large ring are 30 s old at most, but never of other rows.
    monkeypatch.setattr("mmreplay.page.draws.LARGE_ROWS", 1)
    monkeypatch.setattr("mmreplay.page.draws.written_at", lambda _: 1)
    monkeypatch.setattr("mmreplay.page.priorities.BLOCK_ROWS", 16)
    client = ask(prioritized)
    client.json("draws", "sampler=PrioritizedSampler()")
    with mr.ReplayBuffer.open(prioritized, "r+") as buffer:
        buffer.resize(6000)
        buffer.resize(150)
    answer = client.json("draws", "sampler=PrioritizedSampler()")
    with mr.ReplayBuffer.open(prioritized) as buffer:
        first = buffer.span.first
        assert len(answer["ages"]) == 256
        assert (np.array(answer["positions"]) >= first[answer["env_ids"]]).all()
    assert sum(answer["probabilities"]) > 0


def test_the_view_of_draws_is_dropped_after_a_while(ask, path, monkeypatch):
    client = ask(path)
    client.json("draws", "sampler=UniformSampler()")
    view = weakref.ref(client.page.shown[0].buffer.view_to_draw_from())
    client.page.states()
    assert view() is not None
    monkeypatch.setattr("mmreplay.page.shown.DRAWING_S", 0)
    client.page.states()
    gc.collect()
    assert view() is None
    assert client.json("draws", "sampler=UniformSampler()")["ages"]


def test_state_does_not_wait_for_a_draw(ask, path, rng):
    client = ask(path)
    shown = client.page.shown[0].buffer
    client.json("draws", "sampler=UniformSampler")
    drawing, done = threading.Event(), threading.Event()

    def draw():
        with shown.view_to_draw_from().lock:
            drawing.set()
            done.wait(20)

    thread = threading.Thread(target=draw)
    thread.start()
    assert drawing.wait(20)
    try:
        begin = time.monotonic()
        assert client.page.states()[0]["head"] == 620
        assert client.json("overview")["steps"] == 600
        assert time.monotonic() - begin < 10
        assert thread.is_alive()
    finally:
        done.set()
        thread.join()
    # A draw sees what was added since the draw before.
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        steps = healthy_steps(rng, 5, 2)
        buffer.extend(steps, final_observation=steps["observation"])
    answer = client.json("draws", "sampler=RecentSampler(2, 1)")
    assert max(answer["positions"]) >= 310


def test_steps_of_priority_0_are_not_drawn(ask, path):
    sampler = mr.PrioritizedSampler(seed=0, eps=0)
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        buffer.sample(1)
        stops = buffer.span.stop
        env_ids = np.repeat([0, 1], stops)
        positions = np.concatenate([np.arange(stop) for stop in stops])
        zeros = np.zeros(len(positions))
        sampler.update_priorities(buffer.view, env_ids, positions, zeros)
    status, text = ask(path).refused("draws", "sampler=PrioritizedSampler(eps=0)")
    assert (status, text) == (409, "cannot draw 256 steps: all 600 legal starts have priority 0.")
    assert len(ask(path).json("draws", "sampler=PrioritizedSampler()")["ages"]) == 256


@pytest.mark.parametrize(
    ("text", "seed", "own"),
    [
        ("UniformSampler()", 7, False),
        ("UniformSampler(seed=1)", 1, True),
        ("PrioritizedSampler(seed=1, alpha=0.5)", 1, True),
        ("ignore_earliest(3)", 7, False),
        ("DistinctSampler(seed=None)", None, False),
        ("MixtureSampler([(UniformSampler(seed=1), 1)])", None, False),
    ],
)
def test_the_seed_that_is_shown_is_the_one_that_is_used(ask, path, text, seed, own):
    answer = ask(path).json("draws", urlencode({"sampler": text, "seed": 7}))
    assert (answer["seed"], answer["own_seed"]) == (seed, own)
    assert answer["ranked"] is False


def test_draws_by_rank_say_so(ask, path):
    assert ask(path).json("draws", "sampler=RankPrioritizedSampler()")["ranked"]


@pytest.mark.parametrize("text", ["mr.UniformSampler()", "mmreplay.UniformSampler"])
def test_a_sampler_may_be_named_as_in_python(text):
    assert isinstance(parse_sampler(text, 0).sampler, mr.UniformSampler)
    alone = "ignore_earliest(2, mr.UniformSampler(seed=0))"
    assert parse_sampler(alone, 0).seed == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("PrioritisedSampler", "Did you mean 'PrioritizedSampler'?"),
        ("GroupSampler('group')", "The page cannot draw from GroupSampler, which"),
        ("MixtureSampler([StalenessSampler()])", "cannot draw from StalenessSampler"),
        ("prioritizedsampler(alpha=1)", "Did you mean 'PrioritizedSampler'?"),
        ("RecentSampler(9, sampler=Unifrm())", "Did you mean 'UniformSampler'?"),
        ("UniformSampler(", "'(' was never closed"),
        ("ignore_earliest", "ignore_earliest is not a sampler"),
        ("PrioritizedSampler(alpha=9)", "alpha must be a number in [0, 4], got 9"),
        ("EpisodeSampler(where=1)", "cannot be typed here"),
        ("other.UniformSampler()", "Known are"),
    ],
)
def test_a_typing_error_is_answered_with_what_can_be_typed(text, words):
    with pytest.raises(Refusal) as caught:
        parse_sampler(text, 0)
    assert words in caught.value.text
    assert "callable" not in caught.value.text
    assert "MixtureSampler, ignore_earliest" not in caught.value.text
