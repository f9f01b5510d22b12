"""The law between writer and learner holds, and nobody waits for the dead."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FailedError, ForkedError, FormatError, SchemaError, StarvedError
from tests.limiter.support import SCHEMA, add, child, create, rate_limiter, reader, until_starved


@pytest.mark.parametrize("ratio", [0.25, 1.0, 4.0, 32.0])
@pytest.mark.parametrize("min_size", [1, 7, 50])
@pytest.mark.parametrize("slack", [1, 3.5])
def test_bounds_are_reverbs_and_one_side_may_always_go_on(rng, ratio, min_size, slack):
    """Against the formula, step by step, each side at random or as far as it can."""
    error = slack * max(1.0, ratio)
    limiter = mr.RateLimiter(ratio, min_size, error)
    inserts = samples = 0
    for _ in range(400):
        may_insert = limiter.allows_insert(inserts, samples, inserts)
        may_sample = limiter.allows_sample(inserts, samples, inserts)
        assert may_insert or may_sample
        low, high = ratio * min_size - error, ratio * min_size + error
        assert may_insert == (inserts + 1 <= min_size or (inserts + 1) * ratio - samples <= high)
        assert may_sample == (inserts >= min_size and inserts * ratio - samples - 1 >= low)
        if may_insert and (not may_sample or rng.random() < 0.5):
            inserts += 1
        else:
            samples += 1
        if inserts > min_size:
            assert low <= inserts * ratio - samples <= max(high, ratio * min_size)


def test_a_writer_alone_stops_at_the_upper_bound(tmp_path):
    with create(tmp_path / "b", rate_limiter()) as buffer:
        # 4 * inserts <= 4 * 10 + 20.
        assert until_starved(lambda: add(buffer)) == 15
        assert len(buffer) == 15


def test_a_learner_alone_stops_at_the_lower_bound(tmp_path):
    with (
        create(tmp_path / "b", rate_limiter()) as buffer,
        reader(tmp_path / "b", rate_limiter()) as r,
    ):
        assert until_starved(lambda: r.sample(1)) == 0
        add(buffer, 12)
        # 4 * 12 - samples >= 4 * 10 - 20.
        assert until_starved(lambda: r.sample(1)) == 28
        add(buffer)
        assert until_starved(lambda: r.sample(1)) == 4


def test_a_call_passes_the_bound_by_less_than_itself(tmp_path):
    with create(tmp_path / "b", rate_limiter(), num_envs=3) as buffer:
        numbers = np.arange(3)
        # Inserts 3, 6, ... go through while 4 * (inserts + 1) <= 60.
        assert until_starved(lambda: buffer.add(number=numbers)) == 5
        assert until_starved(lambda: buffer.sample(16)) == 3


def test_a_refused_draw_is_not_counted(tmp_path):
    with create(tmp_path / "b", rate_limiter(min_size=1, error_buffer=4)) as buffer:
        add(buffer, 2)
        with pytest.raises(SchemaError):
            buffer.sample(0)
        assert until_starved(lambda: buffer.sample(1)) == 8


def test_counts_outlive_the_processes(tmp_path):
    with create(tmp_path / "b", rate_limiter()) as buffer:
        add(buffer, 12)
        for _ in range(20):
            buffer.sample(1)
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", limiter=rate_limiter()) as buffer:
        assert until_starved(lambda: buffer.sample(1)) == 8


def test_learners_share_the_bounds(tmp_path):
    with create(tmp_path / "b", rate_limiter()) as buffer:
        add(buffer, 12)
        with (
            reader(tmp_path / "b", rate_limiter()) as one,
            reader(tmp_path / "b", rate_limiter()) as two,
        ):
            for _ in range(10):
                one.sample(1)
                two.sample(1)
            assert until_starved(lambda: two.sample(1)) == 8
            assert until_starved(lambda: one.sample(1)) == 0
        # Who comes later takes the places and the counts over.
        with reader(tmp_path / "b", rate_limiter()) as one:
            assert until_starved(lambda: one.sample(1)) == 0
        assert len(list((tmp_path / "b" / "limiter").glob("learner-*"))) == 2


def test_a_buffer_that_was_there_before_counts_what_it_holds(tmp_path):
    with create(tmp_path / "b", None) as buffer:
        add(buffer, 150)
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", limiter=rate_limiter()) as buffer:
        # 4 * 100 - samples >= 20.
        assert until_starved(lambda: buffer.sample(1)) == 380


def test_a_cleared_buffer_is_filled_again_first(tmp_path):
    with create(tmp_path / "b", rate_limiter()) as buffer:
        add(buffer, 15)
        buffer.clear()
        assert until_starved(lambda: buffer.sample(1)) == 0
        assert until_starved(lambda: add(buffer)) == 10


@pytest.mark.crash
def test_a_writer_goes_at_the_pace_of_a_learner_in_another_process(tmp_path):
    with create(tmp_path / "b", rate_limiter()) as buffer:
        add(buffer, 10)

    def draw():
        with reader(tmp_path / "b", rate_limiter(patience=20)) as r:
            for _ in range(50):
                r.sample(4)
        os._exit(0)

    pid = child(draw)
    with mr.ReplayBuffer.open(
        tmp_path / "b", "r+", limiter=rate_limiter(patience=20), commit_every=None
    ) as buffer:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if buffer.heads[0] < 61:
                add(buffer)
        heads = int(buffer.heads[0])
        # 200 drawn: within the bounds, to a batch of four.
        assert 20 - 3 <= 4 * heads - 200 <= 60


@pytest.mark.crash
@pytest.mark.parametrize("side", ["insert", "sample"])
@pytest.mark.sliced(1)
def test_a_peer_that_is_killed_ends_the_wait(tmp_path, side):
    create(tmp_path / "b", rate_limiter()).close()
    told, tell = os.pipe()

    def live():
        limiter = rate_limiter()
        mode = "r" if side == "insert" else "r+"
        peer = mr.ReplayBuffer.open(tmp_path / "b", mode, limiter=limiter)
        if side == "insert":
            peer.limit.count(0)
        else:
            add(peer)
        os.write(tell, b".")
        time.sleep(60)

    pid = child(live)
    assert os.read(told, 1) == b"."
    mode = "r+" if side == "insert" else "r"
    with mr.ReplayBuffer.open(tmp_path / "b", mode, limiter=rate_limiter(timeout=0.3)) as buffer:
        step = (lambda: add(buffer)) if side == "insert" else lambda: buffer.sample(1)
        # Patience is over long before: it lives, so that the timeout decides.
        began = time.monotonic()
        until_starved(step, r"0\.3 s have passed")
        assert time.monotonic() - began >= 0.3
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    with mr.ReplayBuffer.open(tmp_path / "b", mode, limiter=rate_limiter()) as buffer:
        step = (lambda: add(buffer)) if side == "insert" else lambda: buffer.sample(1)
        until_starved(step, "none is running")
    os.waitpid(pid, 0)


def test_then_go_on_returns(tmp_path):
    with create(tmp_path / "b", rate_limiter(patience=0, on_timeout="proceed")) as buffer:
        add(buffer, 30)
        assert len(buffer) == 30


def test_other_parameters_are_refused_with_both(tmp_path):
    create(tmp_path / "b", rate_limiter()).close()
    with pytest.raises(
        SchemaError, match=r"must be \[4.0, 10, 20.0\] as in .*, got \[5.0, 10, 20.0\]"
    ):
        reader(tmp_path / "b", rate_limiter(samples_per_insert=5))
    # What does not bind both sides may differ.
    reader(tmp_path / "b", rate_limiter(patience=1, timeout=3)).close()


def test_a_refused_limiter_leaves_nothing_open(tmp_path):
    create(tmp_path / "b", None).close()
    with pytest.raises(SchemaError, match=r"min_size must be at most 100.*got 101"):
        mr.ReplayBuffer.open(tmp_path / "b", "r+", limiter=rate_limiter(min_size=101))
    mr.ReplayBuffer.open(tmp_path / "b", "r+").close()


def test_a_buffer_in_ram_is_refused():
    with pytest.raises(SchemaError, match="limiter needs a buffer with a folder"):
        mr.ReplayBuffer.create(None, SCHEMA, 100, engine="memory", limiter=rate_limiter())


def test_a_damaged_count_counts_as_none(tmp_path):
    with create(tmp_path / "b", rate_limiter()) as buffer:
        add(buffer, 12)
        for _ in range(20):
            buffer.sample(1)
    (tmp_path / "b" / "limiter" / "learner-000").write_bytes(b"\7" * 16)
    with reader(tmp_path / "b", rate_limiter()) as buffer:
        assert until_starved(lambda: buffer.sample(1)) == 28


def test_a_forked_child_is_refused(tmp_path):
    with create(tmp_path / "b", rate_limiter()) as buffer:
        add(buffer)

        def use():
            try:
                buffer.sample(1)
            except ForkedError:
                os._exit(0)

        assert os.waitstatus_to_exitcode(os.waitpid(child(use), 0)[1]) == 0


def test_too_many_learners_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("mmreplay.limiter.bound.LEARNERS", ("learner-000",))
    with (
        create(tmp_path / "b", rate_limiter()) as buffer,
        reader(tmp_path / "b", rate_limiter()) as r,
    ):
        add(buffer, 12)
        r.sample(1)
        with pytest.raises(FailedError, match="already has 1 learners"):
            buffer.sample(1)


def test_a_loader_waits_for_the_first_rows_and_counts_its_batches(tmp_path):
    pytest.importorskip("torch")
    with (
        create(tmp_path / "b", rate_limiter(patience=60)) as buffer,
        reader(tmp_path / "b", rate_limiter(patience=60)) as r,
        mr.ReplayLoader(r, batch_size=4, prefetch=2) as loader,
    ):
        timer = threading.Timer(0.1, add, (buffer, 12))
        timer.start()
        batches = iter(loader)
        for _ in range(7):
            assert len(next(batches)["number"]) == 4
        timer.join()
        path = tmp_path / "b" / "limiter" / "learner-000"
        assert int.from_bytes(path.read_bytes()[:8], "little") == 28


@pytest.mark.parametrize("name", ["limiter", "samplers"])
def test_a_link_instead_of_a_folder_is_not_followed(tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "law.json").write_text("{}")
    create(tmp_path / "b", None).close()
    (tmp_path / "b" / name).symlink_to(outside)
    report = mr.verify_buffer(tmp_path / "b")
    assert [(f.kind, f.file) for f in report.findings] == [("unknown", name)]
    if name == "limiter":
        with pytest.raises(FormatError, match="limiter must be a folder, got a link"):
            reader(tmp_path / "b", rate_limiter())
    assert [each.name for each in outside.iterdir()] == ["law.json"]


def test_a_batch_of_several_buffers_that_fails_counts_in_none(tmp_path):
    wrong = False

    def check(fields):
        if wrong:
            raise SchemaError("not now")
        return fields

    limiters = [rate_limiter(), rate_limiter()]
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, limiter in zip(paths, limiters, strict=True):
        with create(path, limiter) as buffer:
            add(buffer, 12)
    transforms = [[], [mr.Apply(check)]]
    buffers = [
        mr.ReplayBuffer.open(path, limiter=limiter, transforms=after, sampler=mr.UniformSampler(0))
        for path, limiter, after in zip(paths, limiters, transforms, strict=True)
    ]
    both = mr.concat(buffers, shares=[3, 1], seed=0)
    wrong = True
    for _ in range(3):
        with pytest.raises(SchemaError, match="not now"):
            both.sample(8)
    assert [buffer.limit.counts().samples for buffer in buffers] == [0, 0]
    wrong = False
    both.sample(8)
    assert [buffer.limit.counts().samples for buffer in buffers] == [6, 2]
    for buffer in buffers:
        buffer.close()


@pytest.mark.parametrize(
    ("sampler", "left_out"),
    [
        (mr.UniformSampler, 0),
        (lambda: mr.SequenceSampler(4), 3),
        (lambda: mr.ignore_earliest(2), 2),
    ],
)
def test_a_starved_learner_says_what_its_sampler_leaves_out(tmp_path, sampler, left_out):
    with create(tmp_path / "b", rate_limiter(patience=0)) as buffer:
        buffer.sampler = sampler()
        add(buffer, 8)
        says = rf"8 of them alive \(the sampler leaves out {left_out}\), and 0 items"
        with pytest.raises(StarvedError, match=says):
            buffer.sample(1)


def test_a_starved_writer_says_how_many_rows_were_used_up(tmp_path):
    with create(tmp_path / "b", rate_limiter(patience=0)) as buffer:
        buffer.sampler = mr.UseCounter(1, mr.UniformSampler(seed=0), seed=0)
        add(buffer, 15)
        assert len(buffer.sample(12)) == 12
        says = r"alive \(the sampler leaves out 12\), and 12 items drawn"
        with pytest.raises(StarvedError, match=says):
            add(buffer, 1_000)


def test_a_starved_writer_that_never_drew_takes_no_counts_from_a_learner(tmp_path):
    uses = [mr.UseCounter(1, mr.UniformSampler(seed=0)) for _ in range(2)]
    with create(tmp_path / "b", rate_limiter(patience=0)) as buffer:
        buffer.sampler = uses[0]
        says = r"alive \(the sampler leaves out 0\), and 0 items"
        with pytest.raises(StarvedError, match=says):
            add(buffer, 1_000)
        with mr.ReplayBuffer.open(tmp_path / "b", sampler=uses[1]) as learner:
            assert len(learner.sample(5)) == 5


def test_a_starved_learner_whose_counts_are_elsewhere_hears_of_the_wait(tmp_path):
    with create(tmp_path / "b", rate_limiter(patience=0)) as buffer:
        add(buffer, 5)
        uses = [mr.UseCounter(1, mr.UniformSampler(seed=0)) for _ in range(2)]
        limiter = rate_limiter(timeout=0.05)
        with (
            mr.ReplayBuffer.open(tmp_path / "b", sampler=uses[0]) as other,
            mr.ReplayBuffer.open(tmp_path / "b", sampler=uses[1], limiter=limiter) as learner,
        ):
            other.sample(1)
            with pytest.raises(StarvedError, match=r"5 of them alive, and 0 items"):
                learner.sample(1)
