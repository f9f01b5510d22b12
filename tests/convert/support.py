"""Buffers with a past, drawn at random, and what it means that two are the same."""

import json
import struct

import numpy as np
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.schema.dtypes import DTYPES

OBSERVATION = mr.Field((2,), "float32")
ENDS = {"terminated": mr.Field((), "bool"), "truncated": mr.Field((), "bool")}

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def fields(dtypes):
    return st.builds(
        mr.Field,
        shapes,
        st.sampled_from(dtypes),
        mutable=st.booleans(),
        exact=st.just(True),
    )


names = st.sampled_from(["a", "b/c", "b/d e", "x.npy", "ä/ö", "..", "__metadata", "0"])


@st.composite
def schemas(draw, dtypes=DTYPES):
    """Fields of any dtype and shape, with ends, observations of both kinds, or not."""
    flat = dict(draw(st.dictionaries(names, fields(dtypes), max_size=4)))
    if draw(st.booleans()):
        flat["observation/o"] = OBSERVATION
        if draw(st.booleans()):
            flat["next_observation/o"] = OBSERVATION
    ends = draw(st.sampled_from([(), ("terminated",), ("terminated", "truncated")]))
    flat |= {name: ENDS[name] for name in ends}
    if draw(st.booleans()):
        flat["large"] = mr.Field((5000,), "uint8")
    if not flat:
        flat["only"] = mr.Field((), "int8")
    return mr.Schema.from_flat(flat)


def bits(field, lead, rng):
    """Any bits at all: NaNs with payloads, infinities and -0 among them."""
    count = int(np.prod((*lead, *field.shape)))
    if field.dtype == "bool":
        return rng.integers(0, 2, (*lead, *field.shape)).astype(bool)
    raw = rng.bytes(count * field.numpy.itemsize)
    return np.frombuffer(raw, field.numpy).reshape(*lead, *field.shape)


def steps(schema, lead, rng):
    """Values of steps, of which few end."""
    found = {path: bits(each, lead, rng) for path, each in schema.fields.items()}
    for role in ("terminated", "truncated"):
        if schema.role(role):
            found[schema.role(role)] = rng.random(lead) < 0.2
    return found


def nested(flat):
    found = {}
    for path, value in flat.items():
        *tops, last = path.split("/")
        branch = found
        for top in tops:
            branch = branch.setdefault(top, {})
        branch[last] = value
    return found


@st.composite
def histories(draw, dtypes=DTYPES):
    """A schema, a ring, and what was done to it."""
    ops = st.sampled_from(["add", "extend", "final", "clear", "reopen", "truncate"])
    return {
        "schema": draw(schemas(dtypes)),
        "capacity": draw(st.integers(1, 20)),
        "num_envs": draw(st.integers(1, 3)),
        "layout": draw(st.sampled_from(["env_major", "time_major"])),
        "autoreset": draw(st.sampled_from(["disabled", "same_step", "next_step"])),
        "ops": draw(st.lists(st.tuples(ops, st.integers(1, 9)), max_size=12)),
        "seed": draw(st.integers(0, 2**16)),
    }


def play(path, past):
    """Make the buffer of a history and return it open for writing."""
    schema, num_envs = past["schema"], past["num_envs"]
    rng = np.random.default_rng(past["seed"])
    buffer = mr.ReplayBuffer.create(
        path, schema, past["capacity"], num_envs, layout=past["layout"],
        autoreset=past["autoreset"], commit_every=None,
        user_metadata={"seed": past["seed"]},
    )  # fmt: skip
    finals = schema.role("observation") and not schema.role("next_observation")
    finals = finals and past["autoreset"] != "next_step"
    for op, count in past["ops"]:
        if op in ("reopen", "truncate"):
            buffer.close()
            how = "break" if op == "reopen" else "truncate"
            buffer = mr.ReplayBuffer.open(path, "r+", on_resume=how, commit_every=None)
        elif op == "clear":
            buffer.clear([count % num_envs])
        else:
            given = steps(schema, (count, num_envs), rng)
            options = {}
            if op == "final" and finals:
                seen = bits(OBSERVATION, (count, num_envs), rng)
                options["final_observation"] = {"o": seen}
            buffer.extend(nested(given), **options)
    buffer.set_statistics({"mean": [0.5, count_of(past)]})
    return buffer


def count_of(past):
    return sum(count for _, count in past["ops"])


def same(one, other):
    """Everything that the format promises to carry is equal, to the bit."""
    same_but_rows(one, other)
    same_rows(one, other)


def same_but_rows(one, other):
    """Schema, sizes, statistics and user metadata are equal."""
    assert one.schema == other.schema
    assert (one.num_envs, one.capacity) == (other.num_envs, other.capacity)
    assert one.autoreset == other.autoreset
    assert one.metadata.ring.layout == other.metadata.ring.layout
    assert one.statistics == other.statistics
    assert one.metadata.user == other.metadata.user


def same_rows(one, other, convert=np.ascontiguousarray):
    """Spans, rows and flags are equal, to the bit, as held makes them."""
    np.testing.assert_array_equal(one.span.first, other.span.first)
    np.testing.assert_array_equal(one.span.stop, other.span.stop)
    left, right = one.gather_all(), other.gather_all()
    np.testing.assert_array_equal(left.env_ids, right.env_ids)
    np.testing.assert_array_equal(left.positions, right.positions)
    assert set(left) == set(right)
    for path in left:
        a, b = (convert(each[path]) for each in (left, right))
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes(), path
    flags = [each.view.flags(left.env_ids, left.positions) for each in (one, other)]
    np.testing.assert_array_equal(*flags)


def seven_and_eight(path):
    """A buffer of two rows, of one int32 each."""
    schema = mr.Schema({"x": mr.Field((), "int32")})
    buffer = mr.ReplayBuffer.create(path, schema, 8)
    buffer.extend(x=np.array([[7], [8]], np.int32))
    return buffer


def retold(path, change):
    """Change what the metadata of a safetensors file says, and nothing else."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def every(dtypes):
    return mr.Schema.from_flat(
        {f"all/{name}": mr.Field((3, 2), name) for name in dtypes}
        | {f"single/{name}": mr.Field((), name) for name in dtypes}
        | {"observation/o": OBSERVATION, **ENDS}
    )


EVERY = every(DTYPES)


def every_kind(path, num_envs=2, count=40, capacity=24, dtypes=DTYPES):
    """A ring of every dtype that has wrapped, with both ends and final rows."""
    past = {
        "schema": every(dtypes), "capacity": capacity, "num_envs": num_envs,
        "layout": "env_major", "autoreset": "disabled", "seed": 7,
        "ops": [("final", count), ("truncate", 1), ("add", 3)],
    }  # fmt: skip
    return play(path, past)
