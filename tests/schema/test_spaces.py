"""Schemas of Gymnasium spaces, environments and example steps."""

import copy
import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer.validation import StepValidator
from mmreplay.errors import SchemaError
from mmreplay.schema import Field, Schema

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces


TWO = spaces.Discrete(2)


def schema_of(observation, action=TWO) -> Schema:
    return Schema.from_spaces(observation, action)


LEAVES = [
    (spaces.Box(0, 255, (84, 84, 3), np.uint8), Field((84, 84, 3), "uint8")),
    (spaces.Box(-1, 1, (3,), np.float64), Field((3,), "float64")),
    (spaces.Box(-1, 1, (), np.float16), Field((), "float16")),
    (spaces.Box(-1, 1, (0,)), Field((0,), "float32")),
    (spaces.Box(0, 9, (3, 0, 2), np.uint8), Field((3, 0, 2), "uint8")),
    (spaces.Discrete(5), Field((), "int64")),
    (spaces.Discrete(5, dtype=np.int32), Field((), "int32")),
    (spaces.MultiDiscrete([2, 3]), Field((2,), "int64")),
    (spaces.MultiDiscrete([[2], [3]], dtype=np.uint8), Field((2, 1), "uint8")),
    (spaces.MultiBinary(3), Field((3,), "int8")),
    (spaces.MultiBinary([2, 3]), Field((2, 3), "int8")),
]


@pytest.mark.parametrize(("space", "field"), LEAVES, ids=lambda value: str(value)[:40])
def test_a_space_keeps_its_dtype_and_shape_and_its_samples_fit(space, field):
    schema = schema_of(space, space)
    for role in ("observation", "action"):
        assert schema[role] == field
        sample = np.asarray(space.sample())
        assert field.convert(sample, role, ()).tobytes() == sample.tobytes()


def test_the_rest_of_a_transition_is_added():
    schema = Schema.from_spaces(spaces.Box(0, 1, (2,)), spaces.Discrete(2), reward_dtype=np.float64)
    assert dict(schema.fields) == {
        "observation": Field((2,), "float32"),
        "action": Field((), "int64"),
        "reward": Field((), "float64"),
        "terminated": Field((), "bool"),
        "truncated": Field((), "bool"),
    }
    assert schema_of(spaces.Discrete(2))["reward"] == Field((), "float32")


def test_dicts_and_tuples_become_paths():
    space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (8, 8), np.uint8),
            "arms": spaces.Tuple((spaces.Discrete(2), spaces.Dict(grip=spaces.MultiBinary(2)))),
        }
    )
    schema = schema_of(space, spaces.Tuple((spaces.Discrete(3),)))
    # Gymnasium's Dict gives its own order.
    assert set(schema.role_paths("observation")) == {
        "observation/camera",
        "observation/arms/0",
        "observation/arms/1/grip",
    }
    assert schema.role_paths("action") == ("action/0",)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            spaces.OneOf((spaces.Discrete(2),)),
            r"the space must be Box, .*, Text, Sequence, Graph, .*, got OneOf\. Use a "
            "Dict of every choice, with the choice as a Discrete, or leave it out with",
        ),
        (
            spaces.Sequence(spaces.Text(5)),
            "the items of Sequence must be Box, .*, got Text. Leave it out with",
        ),
        (
            spaces.Graph(spaces.Tuple((TWO,)), None),
            "the items of Graph must be Box, .*, got Tuple. Leave it out with exclude=",
        ),
        (
            spaces.Graph(spaces.Box(0, 1), spaces.Dict(a=TWO)),
            "the items of Graph must be Box, .*, got Dict. Leave it out with exclude=",
        ),
        (
            spaces.Sequence(spaces.Box(0, 1, (0,))),
            "field shape must have axes of at least 1 behind one that varies",
        ),
        (3, r"the space must be Box, .*, got int\. Wrap the environment so that"),
        (spaces.Dict(), r"the space is empty, so it has no field\. Leave it out"),
        (spaces.Tuple(()), "the space is empty, so it has no field"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_spaces_are_refused_with_their_path(space, message):
    with pytest.raises(SchemaError, match=f"field 'action': {message}"):
        Schema.from_spaces(spaces.Discrete(2), space)
    if isinstance(space, spaces.Space):
        nested = spaces.Dict({"a": spaces.Tuple((space,))})
        with pytest.raises(SchemaError, match=f"field 'observation/a/0': {message}"):
            schema_of(nested)


SEEN = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (8, 8), np.uint8),
        "words": spaces.Text(9),
        "arm": spaces.Dict(pose=spaces.Box(0, 1, (3,)), plan=spaces.Sequence(TWO)),
    }
)


class Talking(gymnasium.Env):
    """An environment that also says something, of any length."""

    observation_space = SEEN
    action_space = spaces.Tuple((TWO, spaces.Text(4)))

    def __init__(self, words=True):
        self.words = words


def test_spaces_that_vary_are_excluded_and_extra_fields_added():
    unstored = ["observation/words", "observation/arm/plan", "action/1"]
    schema = Schema.from_env(
        Talking(),
        exclude=[*unstored, "reward"],
        extra={"logp": Field((), "float32"), "info/lives": Field((), "uint8")}
        | {"reward": Field((), "float64")},
    )
    assert set(schema.fields) == {
        "observation/camera",
        "observation/arm/pose",
        "action/0",
        "terminated",
        "truncated",
        "logp",
        "info/lives",
        "reward",
    }
    assert schema["reward"] == Field((), "float64")
    step = {name: SEEN[name].sample() for name in ("camera", "words", "arm")}
    seen = {"camera": step["camera"], "arm": {"pose": step["arm"]["pose"]}}
    given = {"observation": seen, "action": (1,), "reward": 1, "logp": -1.5}
    given |= {"info": {"lives": 3}, "terminated": False, "truncated": False}
    with mr.ReplayBuffer.create(None, schema, 9, engine="memory") as buffer:
        buffer.add(given)
        row = buffer.gather_all()
    assert (row["observation/camera"][0] == step["camera"]).all()
    assert (row["info/lives"], row["reward"]) == (3, 1)
    # A whole branch, and of it also a part.
    paths = Schema.from_env(Talking(), exclude=["observation", "observation/arm", "action"])
    assert paths.paths == ("reward", "terminated", "truncated")


class Missions(spaces.Space):
    """A space of text that states no length, as MiniGrid's missions are."""

    def __init__(self):
        super().__init__(dtype=str)


TOKENS = Field((None,), "int64", max_length=4096)
GRAPH = spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(3))
FIELDS = [
    (spaces.Text(9), {"": Field.text(36)}),
    (Missions(), {"": Field.text(4096)}),
    (spaces.Sequence(spaces.Discrete(9)), {"": TOKENS}),
    (spaces.Sequence(spaces.Discrete(9), stack=True), {"": TOKENS}),
    (
        spaces.Sequence(spaces.Box(0, 1, (2, 3), np.float64)),
        {"": Field((None, 2, 3), "float64", max_length=4096)},
    ),
    (
        GRAPH,
        {
            "/nodes": Field((None, 2), "float32", max_length=4096),
            "/edges": TOKENS,
            "/edge_links": Field((None, 2), "int32", max_length=4096),
        },
    ),
    (spaces.Graph(spaces.Discrete(4), None), {"/nodes": TOKENS}),
]


@pytest.mark.parametrize(("space", "fields"), FIELDS, ids=lambda v: str(v)[:40])
def test_spaces_of_values_that_vary_become_fields_that_vary(space, fields):
    schema = schema_of(spaces.Dict({"x": space}), TWO)
    expected = {f"observation/x{name}": field for name, field in fields.items()}
    assert {path: schema[path] for path in schema.varying} == expected
    alone = schema_of(space, space)
    assert alone.role_paths("action") == tuple(f"action{name}" for name in fields)


def test_members_of_a_graph_are_excluded_by_name():
    path = "observation/edge_links"
    schema = Schema.from_spaces(GRAPH, TWO, exclude=[path])
    assert schema.varying == ("observation/nodes", "observation/edges")
    longer = Field((None, 2), "int32", max_length=9)
    assert Schema.from_spaces(GRAPH, TWO, exclude=[path], extra={path: longer})[path] == longer


def checked(space, values, envs=1):
    """What the validator makes of a step whose observation is of a space."""
    schema = Schema.from_spaces(space, TWO, exclude=["reward", "truncated"])
    validator = StepValidator(schema, envs)
    ends, actions = np.zeros(envs, bool), np.zeros(envs, np.int64)
    step = {"observation": values, "action": actions, "terminated": ends}
    return validator.step(validator.flat(step), envs)


def listed(column):
    return [value.tolist() for value in column]


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("items", [TWO, spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1)])
def test_samples_of_sequences_are_accepted_also_of_vectors(items, stack):
    space = spaces.Sequence(items, stack=stack, seed=3)
    samples = [space.sample() for _ in range(40)] + [()]
    for sample in samples:
        (value,) = listed(checked(space, sample)["observation"])
        assert value == np.asarray(sample).tolist()
    # As a vector environment gives them.
    column = checked(space, tuple(samples), len(samples))["observation"]
    assert listed(column) == [np.asarray(sample).tolist() for sample in samples]


def test_samples_of_text_are_accepted_also_of_vectors():
    space = spaces.Text(9, seed=3)
    samples = [space.sample() for _ in range(9)] + ["two words"]
    assert [checked(space, text)["observation"].text() for text in samples] == [
        [text] for text in samples
    ]
    seen = spaces.Dict(words=space)
    column = checked(seen, {"words": tuple(samples)}, len(samples))
    assert column["observation/words"].text() == samples


def graph_lists(graph):
    return [[] if member is None else member.tolist() for member in graph]


@pytest.mark.parametrize("nested", [False, True])
def test_samples_of_graphs_are_accepted_also_of_vectors(nested):
    space = spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (3,)), seed=3)
    seen = spaces.Dict(inner=spaces.Dict(graph=space)) if nested else space
    below = "observation/inner/graph" if nested else "observation"
    samples = [space.sample(num_nodes=n, num_edges=n - 1) for n in range(1, 9)]
    assert samples[0].edges is None

    def members_of(values, envs):
        columns = checked(seen, {"inner": {"graph": values}} if nested else values, envs)
        members = ("nodes", "edges", "edge_links")
        each = [listed(columns[f"{below}/{member}"]) for member in members]
        return [list(members) for members in zip(*each, strict=True)]

    for sample in samples:
        assert members_of(sample, 1) == [graph_lists(sample)]
    for values in (tuple(samples), list(samples)):
        assert members_of(values, len(samples)) == list(map(graph_lists, samples))
    # A mapping of members is no graph, and needs none.
    plain = dict(zip(("nodes", "edges", "edge_links"), samples[3], strict=True))
    assert members_of(plain, 1) == [graph_lists(samples[3])]


def test_extra_fields_preserve_the_environments_autoreset():
    """As `with_field` does; a mapping of the fields states nothing."""
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    logp = {"logp": Field((), "float32")}
    schema = Schema.from_env(vector, extra=logp, exclude=["truncated"])
    again = Schema({**Schema.from_env(vector, exclude=["truncated"]).fields, **logp})
    vector.close()
    assert (schema.autoreset, again.autoreset) == ("next_step", None)
    assert schema == again
    with mr.ReplayBuffer.create(None, schema, 9, 2, engine="memory") as buffer:
        assert buffer.autoreset == "next_step"
    with pytest.raises(SchemaError, match=r"autoreset must say what.*do after an episode ends"):
        mr.ReplayBuffer.create(None, again, 9, 2, engine="memory")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"exclude": "action"},
            r"exclude must be a.*got the string 'action'\. Pass exclude=\['action'\]\.",
        ),
        (
            {"exclude": ["observation/camra"]},
            r"got 'observation/camra'\. Did you mean 'observation/camera'\?",
        ),
        (
            {"extra": {"reward": Field((), "float64")}},
            r"extra must name new.*which the environment has\. Rename it",
        ),
        ({"extra": {"reward": {"a": Field((), "bool")}}}, "both a leaf and a branch"),
        ({"extra": {"logp": "float32"}}, "field 'logp' must be a Field, got str"),
        ({"extra": [1]}, r"extra must be a mapping by name, got list\. Pass a dict"),
    ],
)
def test_extra_and_excluded_fields_that_do_not_fit_are_refused(options, message):
    camera = spaces.Dict(camera=spaces.Box(0, 255, (8, 8), np.uint8))
    with pytest.raises(SchemaError, match=message):
        Schema.from_spaces(camera, TWO, **options)


def test_keys_that_are_no_names_are_refused():
    with pytest.raises(
        SchemaError, match=r"field name under 'observation' must not contain.*got 'a/b'"
    ):
        schema_of(spaces.Dict({"a/b": spaces.Discrete(2)}))


def test_a_reward_dtype_is_refused_by_name():
    with pytest.raises(SchemaError, match=r"field 'reward': .*got complex64"):
        Schema.from_spaces(spaces.Discrete(2), spaces.Discrete(2), reward_dtype="complex64")


def test_an_environment_and_its_vector_have_the_same_schema():
    single = gymnasium.make("CartPole-v1")
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    try:
        schema = Schema.from_env(single)
        assert Schema.from_env(vector) == schema
        assert schema["observation"] == Field((4,), "float32")
        assert schema["action"] == Field((), "int64")
    finally:
        single.close()
        vector.close()


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_the_autoreset_mode_comes_from_the_environment(mode):
    vector = gymnasium.make_vec(
        "CartPole-v1",
        num_envs=2,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode[mode]},
    )
    schema, said = Schema.from_env(vector), mode.lower()
    vector.close()
    for made in (schema, schema.with_field("lives", Field((), "uint8"))):
        with mr.ReplayBuffer.create(None, made, 9, 2, engine="memory") as buffer:
            assert buffer.autoreset == made.autoreset == said
    other = "disabled" if said == "next_step" else "next_step"
    with pytest.raises(
        SchemaError, match=f"autoreset must be '{said}' as in the schema's .*, got '{other}'"
    ):
        mr.ReplayBuffer.create(None, schema, 9, 2, engine="memory", autoreset=other)


def pickle_again(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [pickle_again, copy.copy, copy.deepcopy])
def test_what_an_environment_does_goes_with_copies_of_its_schema(copied):
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    schema = copied(Schema.from_env(vector))
    vector.close()
    assert schema.autoreset == "next_step"
    # It is no part of what the fields are.
    plain = Schema.from_spaces(vector.single_observation_space, vector.single_action_space)
    assert (schema, hash(schema), plain.autoreset) == (plain, hash(plain), None)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"autoreset_mode": "same_step"}, "same_step"),
        ({"autoreset_mode": "sometimes"}, None),
        ({"autoreset_mode": 3}, None),
        ({}, None),
        (None, None),
        (["autoreset_mode"], None),
    ],
)
def test_an_autoreset_mode_that_no_environment_states_stays_unknown(metadata, said):
    space = spaces.Discrete(2)
    vector = SimpleNamespace(
        single_observation_space=space, single_action_space=space, metadata=metadata
    )
    assert Schema.from_env(vector).autoreset == said


@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_single_environment_says_nothing_of_a_vector(num_envs):
    """It is reset by who steps it, or by a wrapper, or was made to look at."""
    single = gymnasium.make("CartPole-v1")
    schema = Schema.from_env(single)
    single.close()
    for answer in (None, "next_step"):
        given = {"engine": "memory", "autoreset": answer}
        if num_envs == 2 and answer is None:
            with pytest.raises(
                SchemaError, match=r"autoreset must say what.*do after an episode ends"
            ):
                mr.ReplayBuffer.create(None, schema, 9, num_envs, **given)
            continue
        with mr.ReplayBuffer.create(None, schema, 9, num_envs, **given) as buffer:
            assert buffer.autoreset == (answer or "disabled")


@pytest.mark.parametrize(("env", "got"), [({}, "{}"), ("CartPole-v1", "'CartPole-v1'")])
def test_what_has_no_spaces_is_no_environment(env, got):
    message = f"Schema.from_env: env must be .*, got {got}. Pass what gymnasium.make"
    with pytest.raises(SchemaError, match=message):
        Schema.from_env(env)


def test_importing_schema_loads_no_gymnasium_and_examples_need_none():
    code = (
        "import sys, mmreplay.schema as s; s.Schema.from_example({'a': [1.0]}); "
        "sys.exit(any(m in sys.modules for m in ('gymnasium', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_gymnasium_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'mmreplay\[rl\]'"):
        schema_of(spaces.Discrete(2))


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (1.0, Field((), "float32")),
        (1, Field((), "int64")),
        (True, Field((), "bool")),
        ([1.0, 2], Field((2,), "float32")),
        ([[1], [2]], Field((2, 1), "int64")),
        ([True], Field((1,), "bool")),
        (np.float64(1), Field((), "float64")),
        (np.bool_(True), Field((), "bool")),
        (np.zeros((2, 3), ">f8"), Field((2, 3), "float64")),
        (np.zeros((84, 84), "u1"), Field((84, 84), "uint8")),
        (np.array(1.0), Field((), "float64")),
    ],
)
def test_an_example_tells_dtype_and_shape_and_fits(value, field):
    schema = Schema.from_example({"a": {"b": value}})
    assert dict(schema.fields) == {"a/b": field}
    assert (field.convert(value, "a/b", ()) == np.asarray(value)).all()


def test_an_example_keeps_torch_dtypes():
    torch = pytest.importorskip("torch")
    schema = Schema.from_example(
        {"a": torch.zeros(2, dtype=torch.bfloat16), "b": (torch.zeros(()), 1)}
    )
    assert dict(schema.fields) == {
        "a": Field((2,), "bfloat16"),
        "b/0": Field((), "float32"),
        "b/1": Field((), "int64"),
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x", "field 'a/b': field dtype must .*, got <U1. Store text"),
        (None, "field 'a/b': field dtype must .*, got object. Store numbers"),
        ([[1], [1, 2]], "field 'a/b' must be an.*got list that makes none"),
    ],
)
def test_an_example_that_is_no_data_is_refused_with_its_path(value, message):
    with pytest.raises(SchemaError, match=message):
        Schema.from_example({"a": {"b": value}})
    with pytest.raises(SchemaError, match="step must be a mapping by name, got list"):
        Schema.from_example([value])


@pytest.mark.parametrize(
    "space",
    [spaces.Text(5), spaces.Graph(TWO, None), spaces.Sequence(TWO), spaces.OneOf((TWO,))],
    ids=lambda space: type(space).__name__,
)
def test_any_space_is_left_out_by_its_path_and_choices_must_be(space):
    observation = spaces.Dict(seen=spaces.Box(0, 1, (2,)), odd=spaces.Tuple((TWO, space)))
    if isinstance(space, spaces.OneOf):
        with pytest.raises(
            SchemaError,
            match=r"field 'observation/odd/1': the space must be .*, got OneOf.*, or "
            r"leave it out with exclude=\['observation/odd/1'\]\.$",
        ):
            schema_of(observation)
    made = Schema.from_spaces(observation, TWO, exclude=["observation/odd/1"])
    assert set(made.role_paths("observation")) == {"observation/seen", "observation/odd/0"}
