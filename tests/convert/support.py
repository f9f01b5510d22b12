"""Pasts of buffers drawn by hypothesis, and what it means that two are the same."""

import json
import struct

import numpy as np
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.schema.dtypes import DTYPES
from mmreplay.testing.buffers import (
    ENDS,
    NAMES,
    OBSERVATION,
    OPERATIONS,
    difference_of_metadata,
    difference_of_rows,
    every,
)
from mmreplay.testing.buffers import bits as bits
from mmreplay.testing.buffers import every_kind as every_kind
from mmreplay.testing.buffers import nested as nested
from mmreplay.testing.buffers import play as play
from mmreplay.testing.buffers import steps as steps

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def fields(dtypes):
    return st.builds(
        mr.Field, shapes, st.sampled_from(dtypes), mutable=st.booleans(), exact=st.just(True)
    )


names = st.sampled_from(NAMES)


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


@st.composite
def histories(draw, dtypes=DTYPES):
    """A schema, a ring, and what was done to it."""
    ops = st.sampled_from(OPERATIONS)
    return {
        "schema": draw(schemas(dtypes)),
        "capacity": draw(st.integers(1, 20)),
        "num_envs": draw(st.integers(1, 3)),
        "layout": draw(st.sampled_from(["env_major", "time_major"])),
        "autoreset": draw(st.sampled_from(["disabled", "same_step", "next_step"])),
        "ops": draw(st.lists(st.tuples(ops, st.integers(1, 9)), max_size=12)),
        "seed": draw(st.integers(0, 2**16)),
    }


def same(one, other):
    """Everything that the format promises to carry is equal, to the bit."""
    same_but_rows(one, other)
    same_rows(one, other)


def same_but_rows(one, other):
    """Schema, sizes, statistics and user metadata are equal."""
    assert difference_of_metadata(one, other) is None


def same_rows(one, other, convert=np.ascontiguousarray):
    """Spans, rows and flags are equal, to the bit, as convert makes them."""
    assert difference_of_rows(one, other, convert) is None


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


EVERY = every(DTYPES)
