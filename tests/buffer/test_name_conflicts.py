"""Fields named like what a batch has of its own: both are there, and that is said."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError


def made(**fields):
    schema = {"reward": mr.Field((), "float32"), "terminated": mr.Field((), "bool")}
    return mr.ReplayBuffer.create(
        None,
        mr.Schema(schema | fields),
        50,
        engine="memory",
        sampler=mr.SequenceSampler(4, mr.UniformSampler(0)),
    )


@pytest.mark.parametrize(
    "name", ["weights", "mask", "positions", "env_ids", "probabilities", "key"]
)
def test_a_field_named_like_an_attribute_warns_at_once(name):
    told = rf"field '{name}' has .*The field is batch\['{name}'\], and batch\.{name}"
    with pytest.warns(RuntimeWarning, match=told) as raised:
        buffer = made(**{name: mr.Field((), "int64")})
    assert [each.filename for each in raised] == [__file__]
    for number in range(20):
        buffer.add({"reward": 0.0, "terminated": False, name: -number})
    batch = buffer.sample(3)
    np.testing.assert_array_equal(batch[name], -batch.window_positions)
    assert getattr(batch, name) is not batch[name]


@pytest.mark.parametrize("name", ["env_ids", "final_observation"])
@pytest.mark.filterwarnings("ignore:field 'env_ids'")
def test_a_field_named_like_a_keyword_of_add_is_given_in_a_dict(name):
    buffer = made(**{name: mr.Field((), "int64")})
    for call in (buffer.add, buffer.extend):
        told = rf"missing fields \['{name}'\]\. {name} is a keyword of the call"
        with pytest.raises(SchemaError, match=told):
            call(reward=0.0, terminated=False, **{name: [0]})
    buffer.add({"reward": 0.0, "terminated": False, name: 7})
    assert buffer.gather_all()[name].tolist() == [7]


def test_a_branch_named_like_an_attribute_warns_too():
    with pytest.warns(RuntimeWarning, match=r"The field is batch\['mask'\]"):
        made(mask={"action": mr.Field((), "bool")})


def test_a_field_of_the_name_of_a_samplers_marks_is_said_once():
    buffer = made(is_first=mr.Field((), "int64"))
    for number in range(20):
        buffer.add(reward=0.0, terminated=number % 5 == 4, is_first=number)
    told = "field 'is_first' has the name of the marks .*Batches hold the field"
    with pytest.warns(RuntimeWarning, match=told) as raised:
        batch = buffer.sample(3)
    assert len(raised) == 1
    np.testing.assert_array_equal(batch["is_first"], batch.window_positions)
    buffer.sample(3)
    marks = made()
    for number in range(20):
        marks.add(reward=0.0, terminated=number % 5 == 4)
    assert marks.sample(3)["is_first"].dtype == bool
