"""Spaces of a schema, and batches in the forms of vector environments."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError

spaces = pytest.importorskip("gymnasium.spaces")
from gymnasium.spaces import GraphInstance  # noqa: E402
from gymnasium.vector.utils import batch_space  # noqa: E402

# Gymnasium says so of numbers that are Python's or numpy's scalars.
pytestmark = pytest.mark.filterwarnings("ignore:.*Casting input x to numpy")
BOX = spaces.Box(-9, 9, (2,), np.float32)
OBSERVATIONS = {
    "text": spaces.Text(30, min_length=0, charset="abc d"),
    "sequence": spaces.Sequence(spaces.Box(0, 255, (3,), np.uint8), stack=True),
    "numbers": spaces.Sequence(spaces.Discrete(9), stack=True),
    "graph": spaces.Graph(BOX, spaces.Box(-1, 1, (), np.float32)),
    "nodes alone": spaces.Graph(BOX, None),
    "box": BOX,
    "tuple": spaces.Tuple([spaces.Text(9, min_length=0, charset="xy"), BOX]),
    "dict": spaces.Dict(
        {
            "mission": spaces.Text(30, min_length=0, charset="abc d"),
            "scene": spaces.Graph(BOX, BOX),
            "more": spaces.Dict({"boxes": spaces.Sequence(BOX, stack=True)}),
            "image": spaces.Box(0, 255, (4, 4), np.uint8),
        }
    ),
}
STEPS = 12


def flat(value):
    """Values in an order, with what they are, to be compared."""
    if isinstance(value, dict):
        return [("dict", sorted(value)), *(flat(value[k]) for k in sorted(value))]
    if isinstance(value, GraphInstance):
        return [("graph",), *map(flat, value)]
    if isinstance(value, tuple):
        return [("tuple", len(value)), *map(flat, value)]
    if value is None or isinstance(value, str):
        return [value]
    return [np.asarray(value).shape, np.asarray(value).tolist()]


def one(space, batch, number):
    """The value of one environment, of what a vector environment gave."""
    if isinstance(space, spaces.Dict):
        return {k: one(space[k], batch[k], number) for k in space.spaces}
    if isinstance(space, spaces.Tuple):
        return tuple(one(s, b, number) for s, b in zip(space, batch, strict=True))
    return batch[number]


def stored(space):
    """Steps of sampled observations in a ring, as environments gave them."""
    space.seed(3)
    schema = mr.Schema.from_spaces(space, spaces.Discrete(3))
    buffer = mr.ReplayBuffer.create(
        None,
        schema,
        STEPS,
        engine="memory",
        autoreset="disabled",
        heap_bytes="16 MiB" if schema.varying else None,
    )
    given = [space.sample() for _ in range(STEPS)]
    for value in given:
        buffer.add(observation=value, action=1, reward=0.0, terminated=False, truncated=False)
    return buffer, given


@pytest.mark.parametrize("kind", OBSERVATIONS)
@pytest.mark.parametrize("tensors", [False, True])
def test_a_batch_comes_back_as_environments_gave_it(kind, tensors):
    space = OBSERVATIONS[kind]
    buffer, given = stored(space)
    with buffer:
        batch = buffer.gather_all()
        found = buffer.schema.to_env(batch.torch() if tensors else batch)
        wide, action = buffer.schema.to_spaces()
    assert batch_space(wide, STEPS).contains(found)
    for number, value in enumerate(given):
        assert flat(one(wide, found, number)) == flat(value)
        assert wide.contains(value)
    assert action.contains(np.array(2))
    assert isinstance(wide, type(space))


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_spaces_make_the_fields_again(kind):
    schema = mr.Schema.from_spaces(OBSERVATIONS[kind], BOX)
    again = mr.Schema.from_spaces(*schema.to_spaces())
    assert again.paths == schema.paths
    for path, field in schema.fields.items():
        other = again[path]
        # A character may take four bytes, and a space says no bound of a Sequence.
        assert (other.kind, other.dtype, other.shape) == (field.kind, field.dtype, field.shape)


def test_what_gymnasium_has_no_space_for_becomes_the_nearest():
    fields = {
        "observation": {
            "packed": mr.Field.bytes(max_bytes=9),
            "brain": mr.Field((2,), "bfloat16"),
            "brains": mr.Field((None, 2), "bfloat16", max_length=3),
            "flag": mr.Field((), "bool"),
            "nodes": mr.Field((None,), "int32", max_length=4),
        },
        "action": mr.Field((), "int16"),
    }
    schema = mr.Schema(fields)
    observation, action = schema.to_spaces()
    assert isinstance(observation, spaces.Dict)
    assert isinstance(observation["packed"], spaces.Sequence)
    assert observation["brain"].dtype == np.float32
    assert (action.low, action.high) == (-(1 << 15), (1 << 15) - 1)
    columns = {
        "observation/packed": mr.Ragged(np.array([7], np.uint8), np.array([0, 1])),
        "observation/brain": np.array([[0x3F80, 0x4000]], np.uint16),
        "observation/brains": mr.Ragged(np.array([[0x3F80, 0x4000]], np.uint16), np.array([0, 1])),
        "observation/flag": np.array([True]),
        "observation/nodes": mr.Ragged(np.array([5], np.int32), np.array([0, 1])),
    }
    found = schema.to_env(columns)
    assert found["brain"].tolist() == [[1.0, 2.0]]
    assert found["brains"][0].tolist() == [[1.0, 2.0]]
    assert batch_space(observation, 1)["flag"].contains(found["flag"].astype(np.int8))


@pytest.mark.parametrize(
    ("space", "kind", "first"),
    [
        (spaces.Dict({"nodes": spaces.Sequence(BOX, stack=True)}), "Graph", "nodes"),
        (spaces.Dict({"0": BOX, "1": spaces.Discrete(3)}), "Tuple", "0"),
    ],
)
def test_a_dict_with_the_names_of_another_space_comes_back_as_that(space, kind, first):
    buffer, given = stored(space)
    with buffer:
        batch = buffer.gather_all()
        found = buffer.schema.to_env(batch)
        wide, _ = buffer.schema.to_spaces()
    assert isinstance(wide, getattr(spaces, kind))
    for number, value in enumerate(given):
        # The values are the same.
        one_ = found[number].nodes if kind == "Graph" else found[0][number]
        assert np.array_equal(one_, value[first])
    # Other names keep the Dict.
    other = spaces.Dict({f"own_{name}": part for name, part in space.items()})
    schema = mr.Schema.from_spaces(other, spaces.Discrete(3))
    assert list(schema.to_spaces()[0]) == list(other)


def test_observations_after_the_step_come_back_too():
    buffer, given = stored(OBSERVATIONS["dict"])
    with buffer:
        batch = buffer.sample(5)
        found = buffer.schema.to_env(batch, "next_observation")
    texts = [given[int(position) + 1]["mission"] for position in batch.positions]
    assert list(found["mission"]) == texts


def test_what_is_not_there_is_refused():
    schema = mr.Schema({"observation": BOX_FIELD, "more": mr.Field.text(max_bytes=3)})
    with pytest.raises(SchemaError, match="schema must have the role 'action', got"):
        schema.to_spaces()
    with pytest.raises(SchemaError, match="role must be one of"):
        schema.to_env({}, "mood")
    with pytest.raises(SchemaError, match="batch must have field 'observation', got "):
        schema.to_env({"more": 3})


BOX_FIELD = mr.Field((2,), "float32")
