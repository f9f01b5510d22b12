"""Ends that each of several agents has of its own."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError, SourceError, VersionError
from mmreplay.format import metadata as metadata_file
from mmreplay.verify import verify_buffer

AGENTS = 3
ENDS = ("terminated", "truncated")


def schema_of(ends=ENDS, agents=AGENTS):
    flag = mr.Field((agents,) if agents else (), "bool")
    fields = {"observation": mr.Field((2,), "float32"), "reward": mr.Field((AGENTS,), "float32")}
    return mr.Schema(fields | dict.fromkeys(ends, flag))


def steps(rng, count, num_envs, ends=ENDS):
    """Steps in which agents end at random, often all at once."""
    flags = {
        name: rng.random((count, num_envs, AGENTS)) < rng.choice([0.2, 0.9], (count, num_envs, 1))
        for name in ends
    }
    shape = (count, num_envs)
    return {
        "observation": rng.random((*shape, 2), np.float32),
        "reward": rng.random((*shape, AGENTS), np.float32),
        **flags,
    }


def joined(made):
    """The same steps with one value of each end, by the definition, in a loop."""
    count, num_envs = made["observation"].shape[:2]
    ends = [name for name in ENDS if name in made]
    one = {name: np.zeros((count, num_envs), bool) for name in ends}
    for t in range(count):
        for env in range(num_envs):
            each = {name: made[name][t, env] for name in ends}
            if all(any(each[name][a] for name in ends) for a in range(AGENTS)):
                if "terminated" in ends:
                    one["terminated"][t, env] = all(each["terminated"])
                if "truncated" in ends:
                    one["truncated"][t, env] = any(each["truncated"])
    return {**made, **one}


def fill(buffer, made, num_envs, way):
    """Add steps in one of the ways that there are; final observations, where legal."""
    count = len(made["observation"])
    final = made["observation"] + 10
    options = {} if buffer.autoreset == "next_step" else {"final_observation": final}
    if way == "extend":
        for first in range(0, count, 7):
            part = slice(first, first + 7)
            given = {name: value[part] for name, value in made.items()}
            some = {name: value[part] for name, value in options.items()}
            buffer.extend(given, **some)
        return
    for t in range(count):
        step = {name: value[t] for name, value in made.items()}
        if way == "alone":
            step = {name: value[0] for name, value in step.items()}
            buffer.add(step)
        elif way == "subset":
            for env in range(num_envs):
                alone = {name: value[env : env + 1] for name, value in step.items()}
                buffer.add(alone, env_ids=[env])
        else:
            some = {name: value[t] for name, value in options.items()}
            buffer.add(step, **some)


@pytest.mark.parametrize("ends", [ENDS, ENDS[:1], ENDS[1:]], ids="-".join)
@pytest.mark.parametrize("autoreset", ["disabled", "next_step"])
@pytest.mark.parametrize(
    ("num_envs", "way"),
    [(1, "add"), (1, "alone"), (1, "extend"), (4, "add"), (4, "extend"), (4, "subset")],
)
@pytest.mark.parametrize("engine", ["memory", "memmap", "zarr"])
def test_an_episode_ends_when_every_agent_has_ended(
    tmp_path, rng, engine, num_envs, way, autoreset, ends
):
    """Flags are those of a buffer that is given the joined ends, and values stay."""
    made = steps(rng, 60, num_envs, ends)
    both = {}
    for name, agents in (("each", AGENTS), ("one", 0)):
        path = None if engine == "memory" else tmp_path / name
        with mr.ReplayBuffer.create(
            path,
            schema_of(ends, agents),
            200,
            num_envs,
            engine=engine,
            autoreset=autoreset,
            commit_every=None,
        ) as buffer:
            assert buffer.schema.num_agents == (agents or None)
            fill(buffer, made if agents else joined(made), num_envs, way)
            rows = buffer.gather_all()
            flags = buffer.flags(rows.env_ids, rows.positions)
            drawn = buffer.view.legal(rows.env_ids, rows.positions)
        both[name] = flags, drawn, rows
    (flags, drawn, each), (expected, as_one, _) = both["each"], both["one"]
    assert flags.tolist() == expected.tolist()
    assert (flags & 6).any()
    assert (drawn == as_one).all()
    real = ~each.fields["final"] if way != "subset" else (flags & 8) == 0
    given = {
        name: value.swapaxes(0, 1).reshape(-1, *value.shape[2:]) for name, value in made.items()
    }
    if autoreset == "next_step":
        return
    for name in ("reward", *ends):
        assert (each[name][real] == given[name]).all()


@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_writer_that_truncates_truncates_the_agents_that_go_on(tmp_path, num_envs):
    terminated = np.zeros((4, num_envs, AGENTS), bool)
    terminated[2:, :, 0] = True
    truncated = np.zeros_like(terminated)
    truncated[3:, :, 1] = True
    made = {
        "observation": np.zeros((4, num_envs, 2), np.float32),
        "reward": np.zeros((4, num_envs, AGENTS), np.float32),
        "terminated": terminated,
        "truncated": truncated,
    }
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(path, schema_of(), 20, num_envs, autoreset="disabled") as buffer:
        buffer.extend(made)
    with mr.ReplayBuffer.open(path, "r+", on_resume="truncate") as buffer:
        buffer.extend({name: value[:1] for name, value in made.items()})
        rows = buffer.gather_all()
        ids, positions = np.zeros(5, np.int64), np.arange(5)
        read = buffer.get_field("truncated", ids, positions)
    expected = np.zeros((5, AGENTS), bool)
    expected[3] = [False, True, True]
    assert (read == expected).all()
    assert (rows["truncated"].reshape(num_envs, 5, AGENTS) == expected).all()
    assert (rows["terminated"].reshape(num_envs, 5, AGENTS)[0, :4] == terminated[:, 0]).all()


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_n_steps_end_where_a_writer_truncates_the_agents_that_go_on(
    tmp_path, rng, num_envs, engine
):
    """A draw, a take and windows report the cut at the last step folded."""
    made = steps(rng, 5, num_envs)
    made["terminated"][:], made["truncated"][:] = False, False
    made["terminated"][2:4, :, 0] = True
    made["truncated"][3, :, 1] = True
    made["next_observation"] = made["observation"] + 1
    fields = {**schema_of().fields, "next_observation": mr.Field((2,), "float32")}
    path, n, gamma = tmp_path / "b", 2, 0.9
    with mr.ReplayBuffer.create(
        path, mr.Schema(fields), 20, num_envs, autoreset="disabled", engine=engine
    ) as buffer:
        buffer.extend({name: value[:4] for name, value in made.items()})
    with mr.ReplayBuffer.open(
        path, "r+", on_resume="truncate", transforms=[mr.NStep(n, gamma=gamma)]
    ) as buffer:
        buffer.extend({name: value[4:] for name, value in made.items()})
        ids = np.repeat(np.arange(num_envs), 4)
        taken = buffer.take(ids, np.tile(np.arange(4), num_envs))
        buffer.sampler = mr.UniformSampler(0)
        drawn = buffer.sample(64)
        buffer.sampler = mr.SequenceSampler(2, sampler=mr.UniformSampler(0))
        windows = buffer.sample(32)
    cut = made["truncated"].copy()
    cut[3] = [False, True, True]
    batches = [
        (taken, taken.env_ids, taken.positions),
        (drawn, drawn.env_ids, drawn.positions),
        (windows, windows.env_ids[:, None], windows.window_positions),
    ]
    for batch, env_ids, positions in batches:
        last = np.where(positions < 4, np.minimum(positions + n - 1, 3), positions)
        assert (batch["truncated"] == cut[last, env_ids]).all()
        assert (batch["terminated"] == made["terminated"][last, env_ids]).all()
        steps_ = (last - positions + 1)[..., None]
        ends = made["terminated"][last, env_ids]
        assert np.allclose(batch["discount"], np.where(ends, 0, gamma**steps_))
        later = gamma * made["reward"][last, env_ids] * (steps_ > 1)
        assert np.allclose(batch["reward"], made["reward"][positions, env_ids] + later)
    assert (taken["truncated"][2:4] == cut[3, 0]).all()
    assert {3} <= set(drawn.positions.tolist()) <= {0, 1, 2, 3, 4}


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_ends_of_agents_go_through_copies_and_files(tmp_path, rng, engine):
    made = steps(rng, 50, 2)
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(
        path, schema_of(), 64, 2, engine=engine, autoreset="same_step"
    ) as buffer:
        buffer.extend(made)
        buffer.snapshot(tmp_path / "snapshot")
        buffer.resize(40)
        rows = buffer.gather_all()
    mr.ReplayBuffer.open(path, "r+").close()
    assert verify_buffer(path).findings == ()
    others = [tmp_path / "snapshot"]
    for name in ("a.npz", "a.csv", "a.safetensors"):
        mr.export(path, tmp_path / name)
        mr.load(tmp_path / name, tmp_path / f"from {name}")
        others.append(tmp_path / f"from {name}")
    for other in others:
        with mr.ReplayBuffer.open(other) as read:
            again = read.gather_all()
            last = np.flatnonzero(again.positions >= 10)
            for name in ("reward", *ENDS):
                assert (again[name][last] == rows[name]).all()
            found = read.flags(rows.env_ids, rows.positions)
        with mr.ReplayBuffer.open(path) as kept:
            assert (found == kept.flags(rows.env_ids, rows.positions)).all()


def test_an_older_version_refuses_ends_of_agents_by_name(tmp_path, monkeypatch):
    mr.ReplayBuffer.create(tmp_path / "b", schema_of(), 9).close()
    mr.ReplayBuffer.open(tmp_path / "b").close()
    monkeypatch.setattr(metadata_file, "INCOMPAT", frozenset())
    with pytest.raises(VersionError, match=r"needs the features \['agent_ends'\]"):
        mr.ReplayBuffer.open(tmp_path / "b")


def test_the_final_observation_is_read_where_every_agent_has_ended():
    step = {"observation": np.zeros((2, 2)), "reward": np.zeros((2, AGENTS))}
    step["terminated"] = np.array([[True] * 3, [True, True, False]])
    step["truncated"] = np.zeros((2, AGENTS), bool)
    with mr.ReplayBuffer.create(
        None, schema_of(), 9, 2, engine="memory", autoreset="same_step"
    ) as buffer:
        buffer.add(step, final_observation=[[1.0, 2.0], None])
        assert buffer.heads.tolist() == [2, 1]
        with pytest.raises(SchemaError, match=r"final_observation of.*ended with, got None"):
            buffer.add(step, final_observation=[None, [1.0, 2.0]])


@pytest.mark.parametrize("ends", [ENDS, ENDS[:1], ENDS[1:]], ids="-".join)
def test_n_step_discounts_each_agent_by_its_own_termination(rng, ends):
    made = steps(rng, 80, 1, ends)
    transform = mr.NStep(3, gamma=0.5)
    with mr.ReplayBuffer.create(
        None,
        schema_of(ends),
        200,
        engine="memory",
        transforms=[transform],
        sampler=mr.UniformSampler(seed=0),
    ) as buffer:
        fill(buffer, made, 1, "extend")
        plain = buffer.gather_all()
        position = {int(p): i for i, p in enumerate(plain.positions)}
        flags = buffer.flags(plain.env_ids, plain.positions)
        batch = buffer.sample(300)
    assert batch["discount"].shape == (300, AGENTS)
    assert len(np.unique(batch.positions)) > 20
    for row, at in enumerate(batch.positions.tolist()):
        last = at
        while last < at + 2 and not flags[position[last]] & 6 and last + 1 in position:
            last += 1
        i = position[last]
        dead = plain["terminated"][i] if "terminated" in ends else np.zeros(AGENTS, bool)
        expected = np.where(dead, 0, 0.5 ** (last - at + 1))
        assert batch["discount"][row] == pytest.approx(expected), (at, last)


def test_a_return_is_not_bootstrapped_for_agents_some_of_which_are_dead():
    transform = mr.DiscountedReturn(0.9, time_limit="bootstrap", value_fn=lambda o: 0)
    with pytest.raises(SchemaError, match=r"DiscountedReturn:.*got values per agent"):
        mr.ReplayBuffer.create(None, schema_of(), 9, engine="memory", transforms=[transform])


@pytest.mark.parametrize(
    ("terminated", "truncated", "message"),
    [
        (
            mr.Field((2,), "bool"),
            mr.Field((), "bool"),
            r"fields 'terminated' and.*got \[2\] and \[\]",
        ),
        (
            mr.Field((2,), "bool"),
            mr.Field((3,), "bool"),
            r"fields 'terminated' and.*got \[2\] and \[3\]",
        ),
        (mr.Field((2, 2), "bool"), mr.Field((2, 2), "bool"), "or Field..num_agents,., "),
        (
            mr.Field((2,), "uint8"),
            mr.Field((2,), "bool"),
            r"field 'terminated' plays.*mutable=False\)",
        ),
    ],
)
def test_ends_that_do_not_fit_each_other_are_refused(terminated, truncated, message):
    with pytest.raises(SchemaError, match=message):
        mr.Schema({"terminated": terminated, "truncated": truncated})


def test_nobody_knows_where_rows_end_whose_agents_were_not_described(tmp_path):
    np.savez(tmp_path / "a.npz", obs=np.zeros((5, 2)), terminated=np.zeros((5, 2), bool))
    with pytest.raises(SourceError, match=r"each row must have one.*got ends of 2 agents"):
        mr.load(tmp_path / "a.npz", tmp_path / "b")


NAMES = ("walker_2", "walker_10", "adversary")


def by_agent(values, axis=-1):
    """Values of agents as a dict, in an order that is not that of the axes."""
    parts = np.moveaxis(np.asarray(values), axis, 0)
    return {name: parts[NAMES.index(name)] for name in sorted(NAMES)}


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("way", ["add", "extend"])
def test_ends_by_the_names_of_agents_are_stored_as_their_arrays_are(rng, num_envs, way):
    made = steps(rng, 20, num_envs)
    options = {"engine": "memory", "autoreset": "disabled"}
    one = mr.ReplayBuffer.create(None, schema_of(), 30, num_envs, **options)
    other = mr.ReplayBuffer.create(None, schema_of(), 30, num_envs, **options)
    named = ("reward", *ENDS)
    if way == "extend":
        one.extend(made)
        # The first dict says the order.
        first = {name: dict(by_agent(made[name])) for name in named}
        first["reward"] = {name: first["reward"][name] for name in NAMES}
        other.extend(made | first)
    else:
        for t in range(20):
            step = {name: column[t] for name, column in made.items()}
            if num_envs == 1:
                step = {name: column[0] for name, column in step.items()}
            one.add(step)
            dicts = {name: by_agent(step[name]) for name in named}
            if not t:
                dicts["reward"] = {name: dicts["reward"][name] for name in NAMES}
            other.add({**step, **dicts})
    found, expected = other.gather_all().fields, one.gather_all().fields
    for name in made:
        assert np.array_equal(found[name], expected[name]), name


def test_agents_have_the_order_of_the_fields_that_bear_their_names(rng):
    observations = {name: mr.Field((), "float32") for name in NAMES}
    schema = mr.Schema({"observation": observations, **dict.fromkeys(ENDS, mr.Field((3,), "bool"))})
    buffer = mr.ReplayBuffer.create(None, schema, 10, engine="memory")
    ends = {name: name == "walker_10" for name in sorted(NAMES)}
    no = dict.fromkeys(sorted(NAMES), False)
    buffer.add(observation=dict.fromkeys(NAMES, 1.0), terminated=ends, truncated=no)
    assert buffer.get_field("terminated", 0, 0).tolist() == [False, True, False]


def test_all_of_rllibs_agents_end_by_one_name():
    buffer = mr.ReplayBuffer.create(None, schema_of(), 10, engine="memory")
    no = dict.fromkeys(NAMES, False)
    step = {"observation": [0, 0], "reward": [0, 0, 0], "truncated": no}
    buffer.add(**step, terminated={**no, "__all__": False})
    buffer.add(**step, terminated={**no, "__all__": True})
    assert buffer.get_field("terminated", 0, [0, 1]).tolist() == [[False] * 3, [True] * 3]


@pytest.mark.parametrize(
    ("ends", "reported"),
    [
        (dict.fromkeys(NAMES[:2], False), r"each of 3 agents, \['adversary', .*got \["),
        ({"a": 1, "b": 0, "c": 1}, r"'walker_2'\], got \['a', 'b', 'c'\]\. Pass a value"),
        ({NAMES[0]: [0, 1], NAMES[1]: 0, NAMES[2]: 0}, r"one shape for all agents, got"),
    ],
)
def test_dicts_of_other_agents_are_refused_and_nothing_is_stored(ends, reported):
    buffer = mr.ReplayBuffer.create(None, schema_of(), 10, engine="memory")
    no = dict.fromkeys(NAMES, False)
    step = {"observation": [0, 0], "reward": [0, 0, 0], "truncated": no}
    buffer.add(**step, terminated=no)
    with pytest.raises(SchemaError, match=f"field 'terminated' must have .*{reported}"):
        buffer.add(**step, terminated=ends)
    assert len(buffer.sizes) == 1
    assert int(buffer.heads[0]) == 1


def test_a_first_dict_of_too_few_agents_names_nobody():
    buffer = mr.ReplayBuffer.create(None, schema_of(), 10, engine="memory")
    step = {"observation": [0, 0], "reward": [0, 0, 0], "truncated": [False] * 3}
    with pytest.raises(SchemaError, match=r"for each of 3 agents, got \['a'\]\. Pass"):
        buffer.add(**step, terminated={"a": True})
    buffer.add(**step, terminated=dict.fromkeys(NAMES, False))


def test_a_dict_for_an_end_of_one_bool_is_refused_with_what_stores_it():
    buffer = mr.ReplayBuffer.create(None, schema_of(agents=0), 10, engine="memory")
    step = {"observation": [0, 0], "reward": [0, 0, 0], "truncated": False}
    reported = r"'terminated' must be one bool a step, got a dict .*Field\(\(num_agents,\)"
    with pytest.raises(SchemaError, match=reported):
        buffer.add(**step, terminated=dict.fromkeys(NAMES, False))
    assert len(buffer) == 0
