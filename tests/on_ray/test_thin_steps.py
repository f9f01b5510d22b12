"""Steps that a thin writer takes or refuses, and blocks that it makes of them."""

import os
import shutil
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import (
    DurabilityWarning,
    FailedError,
    ForkedError,
    FullError,
    LockedError,
    SchemaError,
    StarvedError,
)
from mmreplay.format import ray_files
from mmreplay.ray import thin as thin_module
from mmreplay.ray.cluster import UnansweredError
from mmreplay.ray.lanes import create_lanes
from mmreplay.ray.thin import ThinWriter
from tests.on_ray.thin_support import (
    SCHEMA,
    Feed,
    SimulatedShard,
    add_steps,
    check_rows,
    make_writer,
    quietly,
)

NESTED = mr.Schema(
    {
        "observation": {"image": mr.Field((4, 5), "uint8"), "state": mr.Field((2,), "bfloat16")},
        "action": mr.Field((), "int32"),
        "terminated": mr.Field((), "bool"),
    }
)


class NestedShard(SimulatedShard):
    """A shard of another ring."""

    def __init__(self, folder, schema, num_lanes=2, **create):
        super().__init__(folder.with_name("unused"))
        self.folder = folder
        create = {"autoreset": "disabled", **create}
        create_lanes(folder, schema, 400, num_lanes, commit_every=None, **create)


@pytest.fixture
def shard(tmp_path):
    return SimulatedShard(tmp_path / "ring")


def test_a_wait_for_an_answer_and_for_the_heads_end_in_time_together(shard, monkeypatch):
    writer, feed = make_writer(shard, 0, 1, timeout_s=7.0)
    now, asked = [100.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(thin_module, "time", clock)

    def receive(reference, timeout_s):
        now[0] += timeout_s
        raise UnansweredError("no answer")

    def ask(method, *arguments, timeout_s):
        asked.append(timeout_s)
        raise StarvedError("no answer")

    monkeypatch.setattr(shard, "receive", receive)
    monkeypatch.setattr(shard, "call", ask)
    add_steps(writer, feed, np.random.default_rng(0), 10)
    with pytest.raises(StarvedError):
        writer.flush()
    assert asked == [0.0]
    monkeypatch.undo()
    writer.close()


def test_a_forked_child_is_refused(shard):
    writer, _ = make_writer(shard, 0, 1)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            writer.close()
        except ForkedError as error:
            code = 0 if "Make one in the child" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    writer.close()


def lengths(shard):
    """Steps of the blocks that were sent."""
    return [len(call["arguments"][2]["seq"]) for call in shard.blocks]


@pytest.fixture
def watched(shard, monkeypatch):
    """A shard that remembers the blocks sent to it."""
    shard.blocks = []
    send = shard.send

    def watch(method, *arguments):
        call = send(method, *arguments)
        if method == "extend" and arguments[2]:
            shard.blocks.append(call)
        return call

    monkeypatch.setattr(shard, "send", watch)
    return shard


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [64, 36]),
        ({"steps": 30}, [30, 30, 30, 10]),
        # A step takes 43 bytes: 12 + 3 * 8 + 4, two ends and its flags.
        ({"nbytes": 2000}, [23] * 4 + [8]),
        ({"nbytes": 1}, [1] * 100),
    ],
)
@pytest.mark.parametrize("blocks", [False, True])
def test_blocks_are_bounded_by_steps_and_bytes(watched, options, expected, blocks):
    writer, feed = make_writer(watched, 0, 2, **options)
    rng = np.random.default_rng(0)
    assert add_steps(writer, feed, rng, 100, ends=0.0, blocks=blocks) is None
    writer.close()
    assert lengths(watched) == expected


def test_blocks_are_bounded_by_half_of_the_reserve(tmp_path):
    shard = SimulatedShard(tmp_path / "ring", capacity=40)
    writer, feed = make_writer(shard, 0, 1)
    reserve = shard.opened().ring.metadata.ring.reserve
    assert reserve == 2
    assert add_steps(writer, feed, np.random.default_rng(0), 30, ends=0.5) is None
    writer.close()
    assert shard.opened().ring.heads[0] == 30 + len(feed.ended[0])


def test_two_blocks_are_under_way_before_an_answer_is_waited_for(watched):
    writer, feed = make_writer(watched, 0, 1, steps=10)
    rng = np.random.default_rng(0)
    for blocks, waiting in ((1, 1), (2, 2), (3, 2), (4, 2)):
        add_steps(writer, feed, rng, 10 * blocks - feed.seq)
        assert lengths(watched) == [10] * blocks
        assert f"{waiting} blocks wait" in repr(writer)
    writer.flush()
    assert repr(writer).startswith("<ThinWriter of 1 environments: 0 blocks wait, 0 row")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": 1.0}, r"unknown fields \['reward'\]"),
        ({"seq": None}, "must be exactly"),
        ({"crc": -1}, "'crc'"),
        ({"observation": np.zeros(4)}, "'observation'"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_where_it_is_added(watched, change, message):
    writer, feed = make_writer(watched, 0, 1)
    step = {path: column[0] for path, column in one_step(feed).items()} | change
    step = {path: value for path, value in step.items() if value is not None}
    with pytest.raises(SchemaError, match=message):
        writer.add(step)
    with pytest.raises(SchemaError, match=message):
        writer.extend({path: np.array([value]) for path, value in step.items()})
    with pytest.raises(SchemaError, match="takes a mapping or keywords, got both"):
        writer.add(step, seq=3)
    writer.flush()
    assert watched.blocks == []


def one_step(feed):
    columns, _ = feed.steps(np.zeros((1, 1), bool), np.zeros((1, 1), bool), False)
    return {path: column[:, 0] for path, column in columns.items()}


def test_final_observations_are_given_where_an_episode_ends(watched):
    writer, feed = make_writer(watched, 0, 2)
    ends = np.array([[True, False]])
    columns, final = feed.steps(ends, ends, with_final=True)
    step = {path: column[0] for path, column in columns.items()}
    with pytest.raises(SchemaError, match=r"environment 0 must be the observation .*No"):
        writer.add(step, final_observation=[None, final[0, 1]])
    writer.add(step, final_observation=[final[0, 0], None])
    feed.advance(ends, with_final=True)
    rng = np.random.default_rng(0)
    # Ends with and without final rows are in blocks of their own.
    for with_final in (True, False, False, True):
        assert add_steps(writer, feed, rng, 10, 1.0, with_final) is None
    writer.close()
    assert lengths(watched) == [11, 20, 10]
    watched.opened().close()
    check_rows(watched.folder, {0: feed}, {0: 0}, [0])


def test_nested_observations_and_their_final_rows_are_those_of_a_plain_buffer(tmp_path):
    shard = NestedShard(tmp_path / "thin", NESTED)
    plain = mr.ReplayBuffer.create(
        tmp_path / "plain", NESTED, 400, 2, autoreset="disabled", commit_every=None
    )
    rng = np.random.default_rng(0)
    with plain, ThinWriter(shard, NESTED, 2, steps=7) as writer:
        for number in range(30):
            step = {
                "observation": observation_of(rng),
                "action": rng.integers(9, size=2),
                "terminated": rng.random(2) < 0.3,
            }
            last = observation_of(rng) if number % 3 else None
            if last is not None:
                last = {"state": last["state"], "image": last["image"]}
            plain.add(step, final_observation=last)
            writer.add(step, final_observation=last)
            # What was added may change.
            step["observation"]["image"][:] = 0
        expected = plain.gather_all()
        flags = plain.flags(expected.env_ids, expected.positions)
        writer.flush()
        ring = shard.opened().ring
        got = ring.gather_all()
        assert (got.positions == expected.positions).all()
        assert (ring.flags(got.env_ids, got.positions) == flags).all()
        for path in NESTED.paths:
            ended = got.fields["final"]
            keep = ~ended if not path.startswith("observation") else slice(None)
            assert (got[path][keep] == expected[path][keep]).all(), path
    shard.opened().close()


def observation_of(rng):
    return {
        "image": rng.integers(0, 256, (2, 4, 5)).astype(np.uint8),
        "state": rng.integers(0, 9, (2, 2)).astype(np.uint16),
    }


def test_reset_rows_of_next_step_mode_are_final_rows(tmp_path):
    shard = NestedShard(tmp_path / "ring", SCHEMA, autoreset="next_step")
    writer = ThinWriter(shard, SCHEMA, 1, steps=4)
    feed = Feed(0, 1)
    with pytest.raises(SchemaError, match="must be None in a buffer with autoreset='ne"):
        writer.add(one_step(feed), final_observation=np.zeros((1, 3), np.float32))
    ends = np.array([[False], [True], [False], [False], [True], [False]])
    columns, _ = feed.steps(ends, ends, with_final=False)
    writer.extend({path: column[:, 0] for path, column in columns.items()})
    writer.close()
    ring = shard.opened().ring
    assert ring.heads.tolist() == [6, 0]
    assert len(ring) == 4
    assert ring.gather_all().fields["final"].tolist() == [0, 0, 1, 0, 0, 1]
    ring.close()


PLAIN = mr.Schema(
    {
        "observation": mr.Field((), "int64"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)


def stored_transitions(folder):
    """Observation, next observation and end of every step that can be drawn."""
    with mr.ReplayBuffer.open(folder) as ring:
        view = ring.view
        count = int(view.starts.lengths.sum()) - view.num_illegal
        batch = ring.take(*view.start_at(np.arange(count)))
        columns = (batch[path] for path in ("observation", "next_observation"))
        ends = batch["terminated"] | batch["truncated"]
        return list(zip(*(each.tolist() for each in (*columns, ends)), strict=True))


def take_lanes(shard, num_envs):
    """Another writer gets environments of those who were silent, and writes a row."""
    shard.plan = []
    shard.opened()
    while shard.queue:
        shard._run(shard.queue.pop(0))
    shard.now += 1000.0
    with ThinWriter(shard, PLAIN, num_envs) as other:
        never = np.zeros(num_envs, bool)
        other.add(observation=np.full(num_envs, -1), terminated=never, truncated=never)


@pytest.mark.parametrize("steps", [1, 3, 64])
def test_what_an_episode_ended_with_is_no_first_step_of_the_next_lease(tmp_path, steps):
    shard = NestedShard(tmp_path / "ring", PLAIN, 4, autoreset="next_step")
    writer = ThinWriter(shard, PLAIN, 2, steps=steps)
    # The first environment ends, then the second one; the next row is a reset's.
    ends = np.array([[0, 0], [1, 0], [0, 1], [0, 0], [0, 0], [0, 0]], bool)
    observations = np.arange(6)[:, None] + [0, 10]
    for number in range(6):
        if number in (2, 3):
            writer.flush()
            take_lanes(shard, 4)
        writer.add(
            observation=observations[number], terminated=ends[number], truncated=np.zeros(2, bool)
        )
    writer.close()
    assert writer.lost_rows == 0
    shard.opened().close()
    found = [each for each in stored_transitions(shard.folder) if each[0] >= 0]
    # Of 0 and 11 the next one is in a former lease; of ends there is none.
    assert sorted(found) == [
        (0, 1, False),
        (1, 1, True),
        (3, 4, False),
        (4, 5, False),
        (10, 11, False),
        (12, 12, True),
        (14, 15, False),
    ]


@pytest.mark.parametrize("seed", range(6))
def test_no_transition_of_next_step_mode_joins_two_episodes(tmp_path, seed):
    shard = NestedShard(tmp_path / "ring", PLAIN, 5, autoreset="next_step")
    rng = np.random.default_rng(seed)
    num_envs = int(rng.integers(1, 4))
    keep = ("published", "committed")[seed % 2]
    writer = ThinWriter(shard, PLAIN, num_envs, steps=4, keep=keep)
    legal, before = set(), np.zeros(num_envs, np.int64)
    ended = is_reset = np.zeros(num_envs, bool)
    for number in range(100):
        fault = rng.choice(["", "", "", "idle", "power", "kill", "flush", "plan"])
        if fault == "idle":
            take_lanes(shard, 5)
        elif fault == "power":
            shard.lose_power()
        elif fault == "kill":
            shard.kill()
        elif fault == "flush":
            assert quietly(writer.flush) is None
        elif fault == "plan":
            shard.plan = list(rng.choice(["lost", "late", "before", "after"], 2))
        observation = 1000 * np.arange(num_envs) + number
        for env in np.flatnonzero(~is_reset & (number > 0)).tolist():
            legal.add((before[env], observation[env], ended[env]))
            if ended[env]:
                # Where the next row is in another lease.
                legal.add((before[env], before[env], True))
        before, is_reset = observation, ended
        ended = (rng.random(num_envs) < 0.3) & ~is_reset
        truncated = rng.random(num_envs) < 0.5
        error = quietly(
            writer.add,
            observation=observation,
            terminated=ended & ~truncated,
            truncated=ended & truncated,
        )
        assert error is None
    assert quietly(writer.close) is None
    shard.opened().close()
    found = {each for each in stored_transitions(shard.folder) if each[0] >= 0}
    assert len(found) > 20
    assert found <= legal


def forget_leases(shard, calls_wait):
    """Others get all environments, until the leases of before are forgotten.

    Args:
        shard: The shard.
        calls_wait: Whether calls under way run after that, and not before.
    """
    shard.plan = []
    shard.opened()
    waiting, shard.queue = shard.queue, []
    while waiting and not calls_wait:
        shard._run(waiting.pop(0))
    shard.now += 1000.0
    for _ in range(ray_files.MAX_ENDED + 2):
        ThinWriter(shard, SCHEMA, 5).close()
    shard.queue = waiting


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_leases_that_are_forgotten_at_any_time_double_no_row_and_lose_none_uncounted(
    shard, monkeypatch, seed, answered
):
    monkeypatch.setattr(ray_files, "MAX_ENDED", 1)
    monkeypatch.setattr(thin_module.time, "sleep", lambda seconds: None)
    rng = np.random.default_rng(seed)
    writer, feed = make_writer(
        shard,
        0,
        int(rng.integers(1, 4)),
        steps=4,
        ahead=int(rng.integers(1, 5)),
        keep=("published", "committed")[seed % 2],
        on_full=("raise", "wait")[seed // 2 % 2],
    )
    faults = ["full", "swapped"]
    if not answered:
        faults += ["lost", "late", "deliver", "before", "after"]
    for _ in range(30):
        fault = rng.choice(["", "before calls", "after calls", "plan", "flush"])
        if fault.endswith("calls"):
            forget_leases(shard, fault == "before calls")
        elif fault == "plan":
            shard.plan = list(rng.choice(faults, 3))
        elif fault == "flush":
            quietly(writer.flush)
        add_steps(writer, feed, rng, int(rng.integers(1, 12)), blocks=True)
    shard.plan = []
    assert quietly(writer.close) is None
    shard.opened().close()
    with mr.ReplayBuffer.open(shard.folder) as ring:
        rows = ring.gather_all()
    steps = ~rows.fields["final"]
    present = list(zip(rows["env"][steps], rows["seq"][steps], strict=True))
    assert len(present) == len(set(present)) > 50
    missing = 0
    for env in range(feed.num_envs):
        gone = set(range(feed.seq)) - {seq for own, seq in present if own == env}
        missing += feed.num_rows(env, gone)
    assert missing <= writer.lost_rows
    if answered:
        # And each answer tells whether the block is there.
        assert writer.lost_rows == 0


def test_ends_of_several_agents_end_an_episode_together(tmp_path):
    schema = mr.Schema(
        {
            "observation": mr.Field((2,), "float32"),
            "terminated": mr.Field((2,), "bool"),
            "truncated": mr.Field((2,), "bool"),
        }
    )
    shard = NestedShard(tmp_path / "ring", schema)
    with ThinWriter(shard, schema, 1, steps=3) as writer:
        for number in range(10):
            first = number % 2 == 1
            writer.add(
                observation=[number, 0],
                terminated=[first, False],
                truncated=[False, number % 4 == 3],
                final_observation=np.array([number, 1], np.float32),
            )
    # Two ends, each with a final row.
    assert shard.opened().ring.heads.tolist() == [12, 0]
    shard.opened().close()


AGENTS = ("blue", "red")


def by_agent(values):
    """Arrays ``[..., 2]`` as dicts, which name the agents in either order."""
    return {name: values[..., AGENTS.index(name)] for name in reversed(AGENTS)}


@pytest.mark.parametrize("call", ["add", "extend"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_dicts_of_agents_are_added_as_to_a_buffer(tmp_path, call, num_envs):
    of_agents = {"terminated": "bool", "truncated": "bool", "reward": "float32"}
    schema = mr.Schema(
        {name: mr.Field((2,), dtype) for name, dtype in of_agents.items()}
        | {"observation": {name: mr.Field((), "float32") for name in AGENTS}}
    )
    rng, shape = np.random.default_rng(1), (20, num_envs)
    steps = {
        "terminated": rng.random((*shape, 2)) < 0.3,
        "truncated": rng.random((*shape, 2)) < 0.1,
        "reward": rng.random((*shape, 2), np.float32),
        **{f"observation/{name}": rng.random(shape, np.float32) for name in AGENTS},
    }
    if num_envs == 1:
        steps = {path: values[:, 0] for path, values in steps.items()}
    dicts = {
        path: by_agent(values) if path in of_agents else values for path, values in steps.items()
    }
    shard = NestedShard(tmp_path / "ring", schema, autoreset="disabled")
    expected = mr.ReplayBuffer.create(
        None, schema, 100, num_envs, engine="memory", autoreset="disabled"
    )
    with ThinWriter(shard, schema, num_envs, steps=3) as writer, expected:
        # Of extend all steps, of add one at a time.
        rows = [slice(None)] if call == "extend" else range(20)
        for row in rows:
            getattr(expected, call)({p: values[row] for p, values in steps.items()})
            step = {
                path: {name: each[row] for name, each in values.items()}
                if isinstance(values, dict)
                else values[row]
                for path, values in dicts.items()
            }
            getattr(writer, call)(step)
        told = "field 'terminated' must have a value for each of 2 agents"
        with pytest.raises(SchemaError, match=told):
            getattr(writer, call)({**step, "terminated": {"green": True}})
        told = f"{call} takes the fields by name, got 2 positional arguments"
        with pytest.raises(SchemaError, match=told):
            getattr(writer, call)(0.0, 1)
        wanted = expected.gather_all()
        writer.flush()
        ring = shard.opened().ring
        found = ring.gather_all()
        for path in schema.paths:
            np.testing.assert_array_equal(found[path], wanted[path], path)
        ends = [
            each.flags(rows.env_ids, rows.positions)
            for each, rows in ((expected, wanted), (ring, found))
        ]
        np.testing.assert_array_equal(*ends)
    shard.opened().close()


def test_a_full_disk_is_raised_by_the_next_call_which_takes_nothing(shard):
    writer, feed = make_writer(shard, 0, 1, steps=5)
    rng = np.random.default_rng(0)
    shard.plan = ["full"] * 5
    error, taken = None, 0
    while error is None:
        error = add_steps(writer, feed, rng, 1)
        taken = feed.seq
    assert isinstance(error, FullError)
    # The first block, and two ahead of its answer.
    assert taken == 15
    with pytest.raises(FullError, match="cannot"):
        writer.flush()
    writer.close()
    shard.opened().close()
    check_rows(shard.folder, {0: feed}, {0: 0}, [0])


def test_a_writer_may_wait_for_a_disk_that_is_full(shard, monkeypatch):
    waits = []
    monkeypatch.setattr(thin_module.time, "sleep", waits.append)
    writer, feed = make_writer(shard, 0, 1, steps=5, on_full="wait")
    shard.plan = [None, "full", "full", None, "full"]
    assert add_steps(writer, feed, np.random.default_rng(0), 40) is None
    writer.close()
    assert waits == [1.0] * 2
    shard.opened().close()
    check_rows(shard.folder, {0: feed}, {0: 0}, [0])


@pytest.mark.parametrize("on_full", ["wait", "raise"])
@pytest.mark.parametrize("what", ["lease", "commit", "give_back"])
def test_a_writer_may_wait_for_a_full_disk_in_every_call(shard, monkeypatch, what, on_full):
    now, waits = [100.0], []

    def sleep(seconds):
        waits.append(seconds)
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(thin_module, "time", clock)
    options = {"keep": "committed"} if what == "commit" else {}
    writer, feed = make_writer(shard, 0, 1, steps=5, on_full=on_full, timeout_s=3.0, **options)
    rng = np.random.default_rng(0)
    assert add_steps(writer, feed, rng, 5, ends=0.0) is None
    if what == "lease":
        writer.flush()
        shard.now += 1000.0
        # It takes the environments.
        make_writer(shard, 1, 5)[0].close()
        assert add_steps(writer, feed, rng, 5, ends=0.0) is None
    call = shard.call

    def filled(method, *arguments, timeout_s):
        is_commit = method == "extend" and arguments[4]
        if method == what or (what == "commit" and is_commit):
            # For longer than an answer may take.
            shard.plan = ["full"] if len(waits) < 5 else []
        return call(method, *arguments, timeout_s=timeout_s)

    monkeypatch.setattr(shard, "call", filled)
    if on_full == "raise":
        with pytest.raises(FullError):
            writer.close()
        monkeypatch.setattr(shard, "call", call)
    writer.close()
    assert waits == [1.0] * 5 * (on_full == "wait")
    shard.opened().close()
    check_rows(shard.folder, {0: feed, 1: Feed(1, 5)}, {0: 0, 1: 0}, [0])


def test_a_shard_that_does_not_answer_is_asked_again_by_the_next_call(shard):
    writer, feed = make_writer(shard, 0, 1, steps=5)
    rng = np.random.default_rng(0)
    shard.plan = ["lost"] * 60
    assert add_steps(writer, feed, rng, 15) is None
    with pytest.raises(StarvedError):
        writer.add(one_step(feed))
    assert add_steps(writer, feed, rng, 15) is None
    writer.close()
    shard.opened().close()
    check_rows(shard.folder, {0: feed}, {0: 0}, [0])


def test_a_folder_that_another_process_still_serves_is_waited_for(shard, monkeypatch):
    writer, feed = make_writer(shard, 0, 1, steps=5)
    opened, tries = shard.opened, []

    def locked():
        tries.append(len(tries))
        if len(tries) < 4:
            raise LockedError("the ring is open elsewhere")
        return opened()

    monkeypatch.setattr(shard, "opened", locked)
    assert add_steps(writer, feed, np.random.default_rng(0), 20) is None
    writer.close()
    assert len(tries) > 4
    opened().close()
    check_rows(shard.folder, {0: feed}, {0: 0}, [0])


def test_a_ring_that_was_removed_is_begun_again_and_what_is_unknown_is_counted(shard, tmp_path):
    writer, feed = make_writer(shard, 0, 2, steps=5)
    rng = np.random.default_rng(0)
    assert add_steps(writer, feed, rng, 10, ends=0.0) is None
    writer.flush()
    assert add_steps(writer, feed, rng, 5, ends=0.0) is None
    shard.kill()
    shard.late.clear()
    shutil.rmtree(shard.folder)
    create_lanes(shard.folder, SCHEMA, 400, 3, commit_every=None, autoreset="disabled")
    with pytest.warns(DurabilityWarning, match="does not know this writer any more, so"):
        writer.flush()
    # All that had arrived; the block that waited is there.
    assert writer.lost_rows == 20
    assert shard.opened().ring.heads.tolist() == [5, 5, 0]
    assert add_steps(writer, feed, rng, 5, ends=0.0) is None
    writer.close()
    assert shard.opened().ring.heads.tolist() == [10, 10, 0]
    shard.opened().close()
    check_rows(shard.folder, {0: feed}, {0: 20}, [0])


def test_a_warning_that_is_an_error_loses_no_step(shard):
    writer, feed = make_writer(shard, 0, 1, steps=5)
    rng = np.random.default_rng(0)
    assert add_steps(writer, feed, rng, 10) is None
    writer.flush()
    lost = int(shard.opened().ring.heads[0])
    shard.lose_power()
    shard.plan = ["lost"]
    ends = rng.random((20, 1)) < 0.2
    columns, final = feed.steps(ends, ends, with_final=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DurabilityWarning, match="lost power"):
            writer.extend(columns, final_observation=final)
    feed.advance(ends, with_final=True)
    writer.close()
    assert writer.lost_rows == lost
    shard.opened().close()
    check_rows(shard.folder, {0: feed}, {0: lost}, [0])


def test_a_commit_is_asked_for_where_many_blocks_wait_for_one(shard, monkeypatch):
    monkeypatch.setattr(thin_module, "UNCOMMITTED_NBYTES", 2000)
    writer, feed = make_writer(shard, 0, 1, steps=5, keep="committed")
    rng = np.random.default_rng(0)
    most = 0
    for _ in range(100):
        assert add_steps(writer, feed, rng, 5) is None
        most = max(most, sum(block.nbytes for block in writer._blocks))
    assert 2000 < most < 4000
    assert shard.opened().ring.committed[0] > 400
    writer.close()
    shard.opened().close()


def test_a_closed_writer_takes_nothing(shard):
    writer, feed = make_writer(shard, 0, 1)
    writer.close()
    writer.close()
    for call in (lambda: writer.add(one_step(feed)), writer.flush):
        with pytest.raises(FailedError, match="this writer is closed"):
            call()
    shard.opened().close()


def test_an_error_in_the_block_is_raised_rather_than_one_of_closing(shard):
    def fail():
        with ThinWriter(shard, SCHEMA) as writer:
            writer.add(one_step(Feed(0, 1)))
            shard.plan = ["full"]
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    shard.opened().close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "num_envs must be an integer of at least 1, got 0"),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"nbytes": 0.5}, "nbytes must be an integer of at least 1, got 0.5"),
        ({"ahead": 0}, "ahead must be an integer of at least 1, got 0"),
        ({"keep": "forever"}, "keep must be one of"),
        ({"on_full": "drop"}, "on_full must be one of"),
        ({"timeout_s": 0}, "timeout_s must be a finite number above 0, got 0"),
        ({"num_envs": 6}, "num_envs must be at most 5, the environments of"),
    ],
)
def test_arguments_are_checked(shard, options, message):
    with pytest.raises(SchemaError, match=message):
        ThinWriter(shard, SCHEMA, **options)
