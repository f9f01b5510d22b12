"""Ragged values against lists of arrays."""

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.batch import Batch
from mmreplay.errors import SchemaError
from mmreplay.loader.dataset import _rows
from mmreplay.loader.devices import ToCpu, arrays_of, pack, slab_offsets, unpack, with_tensors
from mmreplay.nesting import flatten

KINDS = pytest.mark.parametrize("kind", ["arrays", "tensors"])


def ragged_of(values, shape=None, inner=(), dtype=np.int32):
    """The ragged values of a list of arrays."""
    items = [np.asarray(value, dtype).reshape(-1, *inner) for value in values]
    joined = np.concatenate([np.empty((0, *inner), dtype), *items])
    offsets = np.cumsum([0, *map(len, items)], dtype=np.int64)
    return mr.Ragged(joined, offsets, shape)


def as_kind(ragged, kind):
    return ragged.tensors() if kind == "tensors" else ragged


def nested(array):
    """An object array of the values, as lists, of a shape."""
    ragged = array.numpy()
    cells = np.empty(len(ragged.offsets) - 1, object)
    for number in range(len(cells)):
        first, stop = ragged.offsets[number], ragged.offsets[number + 1]
        cells[number] = ragged.values[first:stop].tolist()
    return cells.reshape(ragged.shape)


def grid(values, shape):
    cells = np.empty(len(values), object)
    for number, value in enumerate(values):
        cells[number] = np.asarray(value).tolist()
    return cells.reshape(shape)


@st.composite
def cases(draw, axes=None):
    """Values, the shape they stand in, and the shape of an item."""
    shape = tuple(draw(st.integers(0, 4)) for _ in range(axes or draw(st.integers(1, 2))))
    inner = draw(st.sampled_from([(), (2,), (1, 3)]))
    lengths = st.lists(st.integers(0, 5), min_size=math.prod(shape), max_size=math.prod(shape))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    values = [rng.integers(1, 99, (n, *inner), np.int32) for n in draw(lengths)]
    return values, shape, inner


@KINDS
@given(case=cases(), data=st.data())
def test_every_index_gives_what_it_gives_of_an_array_of_lists(kind, case, data):
    values, shape, inner = case
    ragged = as_kind(ragged_of(values, shape, inner), kind)
    cells = grid(values, shape)
    assert ragged.shape == shape
    assert ragged.inner == inner
    assert len(ragged) == shape[0]
    assert np.asarray(ragged.lengths).tolist() == [
        [len(v) for v in row] if len(shape) == 2 else len(row) for row in cells
    ]
    slices = st.slices(shape[0])
    if shape[0]:
        numbers = st.integers(-shape[0], shape[0] - 1)
        index = data.draw(slices | numbers | st.lists(numbers, max_size=6).map(np.array))
    else:
        index = data.draw(slices)
    if isinstance(index, np.ndarray):
        index = index.astype(np.int64)
    if isinstance(index, slice) and kind == "tensors" and (index.step or 1) < 0:
        return  # torch has no such slices
    found, expected = ragged[index], cells[index]
    if isinstance(found, mr.Ragged):
        assert nested(found).tolist() == expected.tolist()
        assert found.shape == expected.shape
        assert found.inner == inner
    else:
        assert np.asarray(found).tolist() == expected


@KINDS
@given(case=cases(2), data=st.data())
def test_windows_are_indexed_along_both_axes(kind, case, data):
    values, shape, inner = case
    ragged = as_kind(ragged_of(values, shape, inner), kind)
    cells = grid(values, shape)
    index = tuple(data.draw(st.slices(n).filter(lambda s: (s.step or 1) > 0)) for n in shape)
    assert nested(ragged[index]).tolist() == cells[index].tolist()
    mask = np.random.default_rng(0).random(shape) < 0.5
    assert nested(ragged[mask]).tolist() == cells[mask].tolist()
    if shape[1]:
        assert nested(ragged[:, -1]).tolist() == cells[:, -1].tolist()
    if math.prod(shape):
        assert np.asarray(ragged[-1, 0]).tolist() == cells[-1, 0]
    rows = [nested(row).tolist() for row in ragged]
    assert rows == [row.tolist() for row in cells]


def test_a_slice_of_steps_is_a_view():
    ragged = ragged_of([[1, 2], [], [3], [4, 5]])
    part = ragged[1:3]
    assert np.shares_memory(part.values, ragged.values)
    assert part.offsets.tolist() == [0, 0, 1]
    assert np.shares_memory(ragged[3], ragged.values)
    with pytest.raises(IndexError, match="out of bounds"):
        ragged[4]


@KINDS
@given(case=cases(), side=st.sampled_from(["right", "left"]), more=st.integers(-1, 2))
def test_padding_puts_each_value_next_to_its_padding(kind, case, side, more):
    values, shape, inner = case
    ragged = as_kind(ragged_of(values, shape, inner), kind)
    longest = max(map(len, values), default=0)
    length = None if more < 0 else longest + more
    array, mask = ragged.padded(length, value=-7, side=side)
    length = longest if length is None else length
    assert tuple(array.shape) == (*shape, length, *inner)
    assert tuple(mask.shape) == (*shape, length)
    assert str(array.dtype).endswith("int32")
    assert str(mask.dtype).endswith("bool")
    rows = np.asarray(array).reshape(len(values), length, *inner)
    masks = np.asarray(mask).reshape(len(values), length)
    for value, row, real in zip(values, rows, masks, strict=True):
        missing = length - len(value)
        ours = slice(missing, None) if side == "left" else slice(0, len(value))
        assert row[ours].tolist() == value.tolist()
        assert real[ours].all()
        assert (row[~real] == -7).all()
        assert real.sum() == len(value)


@KINDS
def test_padding_that_would_lose_items_is_refused(kind):
    ragged = as_kind(ragged_of([[1, 2, 3], []]), kind)
    for length in (2, 2.0, "3"):
        with pytest.raises(SchemaError, match=r"length must be .* at least 3, .*got"):
            ragged.padded(length)
    with pytest.raises(SchemaError, match="side must be 'right' or 'left', got 'up'"):
        ragged.padded(side="up")


def test_padding_that_the_dtype_cannot_hold_is_refused():
    with pytest.raises(SchemaError, match="a number that uint8 holds, got -1"):
        ragged_of([[1], []], dtype=np.uint8).padded(value=-1)


@KINDS
@given(several=st.lists(cases(1), min_size=1, max_size=3))
def test_values_are_joined_along_the_steps(kind, several):
    inner = several[0][2]
    lists = [[v.reshape(-1)[:3] for v in values] for values, _, _ in several]
    if inner:
        lists = [[v[:0] for v in values] for values in lists]
    ragged = [as_kind(ragged_of(values, None, inner), kind) for values in lists]
    joined = mr.Ragged.concatenate(ragged)
    assert nested(joined).tolist() == [v.tolist() for each in lists for v in each]


@KINDS
@given(data=st.data(), steps=st.integers(0, 3))
def test_values_are_joined_along_windows(kind, data, steps):
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    widths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    blocks = []
    for width in widths:
        values = [rng.integers(9, size=rng.integers(4)) for _ in range(steps * width)]
        blocks.append((values, (steps, width)))
    ragged = [as_kind(ragged_of(*block), kind) for block in blocks]
    joined = mr.Ragged.concatenate(ragged, 1)
    expected = np.concatenate([grid(*block) for block in blocks], 1)
    assert nested(joined).tolist() == expected.tolist()
    assert joined.shape == expected.shape


def test_a_jagged_tensor_shares_the_memory():
    ragged = ragged_of([[[1, 2]], [], [[3, 4], [5, 6]]], inner=(2,))
    jagged = ragged.torch()
    assert jagged.layout == torch.jagged
    assert [each.tolist() for each in jagged.unbind()] == [[[1, 2]], [], [[3, 4], [5, 6]]]
    ragged.values[0, 0] = 9
    assert jagged.values()[0, 0] == 9
    assert ragged.torch("cpu").shape[0] == 3
    assert ragged_of([], inner=(2,)).torch().shape[0] == 0
    windows = ragged_of([[1], [2, 3], [], [4]], (2, 2)).torch()
    assert [each.tolist() for each in windows.unbind()] == [[1], [2, 3], [], [4]]


TEXTS = ["pick up the key", "", "öffne die Tür", "\0", "🗝"]


@KINDS
def test_text_is_decoded(kind):
    ragged = ragged_of([list(t.encode()) for t in TEXTS], dtype=np.uint8)
    assert as_kind(ragged, kind).text() == TEXTS
    assert ragged[1:3].text() == TEXTS[1:3]
    assert ragged[1:2].reshape().text() == ""
    four = as_kind(ragged[:4].reshape(2, 2), kind)
    assert four.text() == [TEXTS[:2], TEXTS[2:4]]
    cube = ragged[:4].reshape(2, 1, 2)
    assert cube.text() == [[TEXTS[:2]], [TEXTS[2:4]]]
    assert ragged[:0].reshape(2, 0).text() == [[], []]
    assert ragged[:0].reshape(0, 2).text() == []


def test_what_is_no_text_is_refused():
    broken = ragged_of([[0x41], [0x41, 0xFF]], dtype=np.uint8)
    with pytest.raises(SchemaError, match=r"value 1 is no UTF-8: invalid .* byte 1"):
        broken.text()
    assert broken.text(errors="replace") == ["A", "A\ufffd"]
    with pytest.raises(SchemaError, match=r"text must be of uint8\[\*\], got int32"):
        ragged_of([[1]]).text()
    with pytest.raises(SchemaError, match=r"got uint8\[1, \*, 2\]"):
        ragged_of([[[1, 2]]], inner=(2,), dtype=np.uint8).text()


def test_offsets_that_do_not_fit_are_refused():
    with pytest.raises(SchemaError, match=r"shape \[4\] for values of shape \[3\], go"):
        mr.Ragged(np.arange(3), np.array([0, 1, 3]), (3,))
    with pytest.raises(SchemaError, match=r"offsets of Ragged must have shape"):
        mr.Ragged(np.arange(3), np.array([[0, 1, 3]]))


def test_offsets_may_be_a_list_and_what_is_none_is_refused_by_name():
    ragged = mr.Ragged(np.arange(5), [0, 2, 5])
    assert [each.tolist() for each in ragged] == [[0, 1], [2, 3, 4]]
    assert ragged.offsets.dtype == np.int64
    assert mr.Ragged(np.arange(0), (0,)).lengths.tolist() == []
    torch = pytest.importorskip("torch")
    tensors = mr.Ragged(torch.arange(5), [0, 2, 5])
    assert tensors.offsets.dtype == torch.int64
    assert tensors[1].tolist() == [2, 3, 4]
    for values, offsets, message in (
        (np.arange(3), [0, 1.5], r"offsets of Ragged must be integers, got \[0, 1\.5"),
        (np.arange(3), [[0, 3]], "offsets of Ragged must be integers"),
        (np.arange(3), 3, "offsets of Ragged must be an array or tensor .* got 3"),
        ([1, 2, 3], [0, 3], "values of Ragged must be an array or tensor"),
        (np.arange(3), [], r"offsets of Ragged must have shape \[N \+ 1\]"),
        (np.arange(3), [0, 5], r"offsets of Ragged must rise from 0 to 3.* got \[0, 5"),
        (np.arange(3), [1, 3], "offsets of Ragged must rise from 0 to 3"),
        (np.arange(3), [0, 2, 1, 3], "offsets of Ragged must rise from 0 to 3"),
    ):
        with pytest.raises(SchemaError, match=message):
            mr.Ragged(values, offsets)


def test_nothing_to_join_another_shape_and_a_fraction_are_refused_by_name():
    with pytest.raises(SchemaError, match="several must hold at least one Ragged"):
        mr.Ragged.concatenate([])
    ragged = ragged_of([[1, 2], [3]])
    for other in (
        ragged_of([[1]], dtype=np.uint8),
        ragged_of([[[1, 2]]], inner=(2,)),
        ragged.tensors(),
        ragged.reshape(1, 2),
    ):
        with pytest.raises(SchemaError, match="several must be alike but for axis 0"):
            mr.Ragged.concatenate([ragged, other])
    with pytest.raises(SchemaError, match=r"several must hold Ragged, got ndarray"):
        mr.Ragged.concatenate([ragged, np.zeros(9)])
    windows = ragged.reshape(1, 2)
    assert mr.Ragged.concatenate([windows, windows], axis=-1).shape == (1, 4)
    with pytest.raises(SchemaError, match=r"axis must be in \[0, 1\), got 1. Pass 0"):
        mr.Ragged.concatenate([ragged, ragged], axis=1)
    for shape in ((-1,), (3,), (-1, -2), (2, 1.0)):
        with pytest.raises(SchemaError, match=r"shape must be axes of 2 values .* got"):
            ragged.reshape(*shape)
    assert ragged.reshape(1, 2).shape == (1, 2)
    for value in (1.5, 1 << 40, float("nan")):
        with pytest.raises(SchemaError, match="value must be a number that int32 hold"):
            ragged.padded(value=value)
    assert ragged.padded(value=-1.0)[0].tolist() == [[1, 2], [3, -1]]


def test_numpy_makes_no_array_of_it_even_where_lengths_agree():
    with pytest.raises(TypeError, match=r"make no array\. Use \.values and \.offsets"):
        np.asarray(ragged_of([[1, 2], [3, 4]]))
    with pytest.raises(TypeError, match=r"numpy's functions take no values of diff"):
        np.array_equal(ragged_of([[1, 2]]), ragged_of([[1, 2]]))
    with pytest.raises(TypeError, match="a single value"):
        len(ragged_of([[1, 2]]).reshape())


@KINDS
def test_comparisons_that_would_be_false_by_identity_are_refused(kind):
    ragged = as_kind(ragged_of([[1, 2], [3]]), kind)
    assert ragged == ragged
    assert ragged in [ragged]
    assert len({ragged, ragged}) == 1
    for other in (1, None, ragged[:], [[1, 2], [3]], "text"):
        with pytest.raises(TypeError, match=r"not compared by ==. Compare .values"):
            _ = ragged == other
        with pytest.raises(TypeError, match=r"not compared by ==. Compare .values"):
            _ = ragged != other
        with pytest.raises(TypeError, match=r"is not looked for .* Use .text\(\)"):
            _ = other in ragged


@KINDS
def test_copies_and_pickles_are_the_same_in_memory_of_their_own(kind):
    ragged = as_kind(ragged_of([[1, 2], [], [3]]), kind)
    for again in (pickle.loads(pickle.dumps(ragged)), copy.deepcopy(ragged), ragged.copy()):
        assert nested(again).tolist() == [[1, 2], [], [3]]
        again.values[0] = 7
        assert nested(ragged).tolist() == [[1, 2], [], [3]]
        assert type(again.values) is type(ragged.values)


def test_only_tensors_are_moved():
    ragged = ragged_of([[1, 2], []])
    for move in (lambda r: r.to("cpu"), lambda r: r.pin_memory()):
        with pytest.raises(SchemaError, match=r"only tensors can be moved. Call tensor"):
            move(ragged)
    assert nested(ragged.tensors().to("cpu")).tolist() == [[1, 2], []]
    assert ragged.tensors().tensors() is not ragged
    assert ragged.nbytes == 2 * 4 + 3 * 8
    assert repr(ragged) == "<Ragged int32[2, *] of 2 items>"
    assert repr(ragged.tensors()) == repr(ragged)


# Batches.


def batch_of(fields, shape=(3,), **more):
    columns = [np.arange(shape[0]) for _ in range(4)]
    return Batch(fields, *columns, **more)


@pytest.fixture
def batch():
    return batch_of(
        {
            "observation/mission": ragged_of([list(t.encode()) for t in TEXTS[:3]], dtype=np.uint8),
            "observation/logp": ragged_of([[1.0], [], [2.0, 3.0]], dtype=np.float32),
            "brain": ragged_of([[0x3F80], [0x4000, 0xC000], []], dtype=np.uint16),
            "reward": np.ones(3, np.float32),
        },
        bfloat16=frozenset({"brain"}),
    )


def test_a_batch_says_what_varies(batch):
    assert repr(batch) == (
        "<Batch of 3 steps: observation/mission uint8[3, *], observation/logp "
        "float32[3, *], brain uint16[3, *], reward float32[3]>"
    )
    assert "<td>[3, *]</td>" in batch._repr_html_()
    assert "brain bfloat16[3, *]" in repr(batch.torch())
    assert batch.data["observation"]["mission"].text() == TEXTS[:3]


def test_ragged_is_one_leaf_of_nested_data(batch):
    assert flatten(batch.data) == dict(batch.items())


def test_the_tensors_of_a_batch_are_ragged(batch):
    tensors = batch.torch()
    logp = tensors["observation/logp"]
    assert isinstance(logp, mr.Ragged)
    assert torch.is_tensor(logp.values)
    assert torch.is_tensor(logp.offsets)
    assert logp.values.numpy().base is not None
    assert np.shares_memory(logp.values.numpy(), batch["observation/logp"].values)
    assert tensors["brain"].dtype == torch.bfloat16
    assert tensors["brain"][1].tolist() == [2.0, -2.0]
    assert tensors["observation/mission"].text() == TEXTS[:3]
    array, mask = logp.padded(side="left")
    assert array.tolist() == [[0, 1], [0, 0], [2, 3]]
    assert mask.sum() == 3
    moved = batch.torch("cpu")
    assert nested(moved["observation/logp"]).tolist() == [[1.0], [], [2.0, 3.0]]


def test_a_batch_with_ragged_fields_survives_pickles(batch):
    for each in (batch, batch.torch()):
        again = pickle.loads(pickle.dumps(each))
        assert list(again) == list(each)
        for path in ("observation/mission", "observation/logp"):
            assert nested(again[path]).tolist() == nested(each[path]).tolist()


def test_every_tensor_of_a_batch_is_pinned(batch):
    pinned = []

    class Counted:
        def __init__(self, tensor):
            self.tensor = tensor
            self.shape, self.ndim = tensor.shape, tensor.ndim

        def __len__(self):
            return len(self.tensor)

        def pin_memory(self):
            pinned.append(self.tensor)
            return self

    one = mr.Ragged(Counted(torch.arange(3)), Counted(torch.tensor([0, 1, 3])))
    found = one.pin_memory()
    assert len(pinned) == 2
    assert found.shape == (2,)


def test_a_device_is_sent_values_and_offsets(batch):
    arrays = arrays_of(batch)
    assert arrays["/observation/logp"] is batch["observation/logp"].values
    assert arrays["#observation/logp"] is batch["observation/logp"].offsets
    offsets, nbytes = slab_offsets(arrays)
    slab = np.empty(nbytes, np.uint8)
    pack(arrays, offsets, slab)
    sent = with_tensors(batch, unpack(torch.from_numpy(slab), arrays, offsets))
    expected = batch.torch()
    assert list(sent) == list(batch)
    for path in ("observation/mission", "observation/logp", "brain"):
        assert isinstance(sent[path], mr.Ragged)
        assert sent[path].dtype == expected[path].dtype
        for one, two in zip(sent[path], expected[path], strict=True):
            assert torch.equal(one, two)
    cpu = ToCpu(2)
    again = cpu.receive(cpu.send(batch))
    assert again["observation/mission"].text() == TEXTS[:3]


@KINDS
def test_batches_of_several_buffers_are_joined(batch, kind):
    part = batch.torch() if kind == "tensors" else batch
    joined = mr.Batch.join([part, part])
    assert joined["observation/mission"].text() == TEXTS[:3] * 2
    assert joined["reward"].shape == (6,)
    some = joined.select(np.array([4, 0]))
    assert some["observation/mission"].text() == [TEXTS[1], TEXTS[0]]
    assert isinstance(some["observation/mission"].values, np.ndarray)


@KINDS
def test_batches_are_joined_in_any_order_of_their_rows(batch, kind):
    part = batch.torch() if kind == "tensors" else batch
    joined = mr.Batch.join([part, part], [(1, 2, 3), (0, 0, 2), (1, 0, 2), (0, 2, 3)])
    assert joined["observation/mission"].text() == [TEXTS[n] for n in (2, 0, 1, 0, 1, 2)]
    assert joined.positions.tolist() == [2, 0, 1, 0, 1, 2]


def test_a_batch_that_is_read_only_is_copied_and_another_is_not(batch):
    fields = dict(batch.fields)
    text, reward = fields["observation/mission"], fields["reward"].view()
    text.values.setflags(write=False)
    reward.setflags(write=False)
    joined = mr.Batch.join([batch_of({**fields, "locked": reward})])
    assert joined["reward"] is fields["reward"]
    assert joined["brain"] is fields["brain"]
    assert joined["locked"].flags.writeable
    assert joined["locked"].tolist() == [1, 1, 1]
    assert joined["observation/mission"].values.flags.writeable
    assert joined["observation/mission"].text() == TEXTS[:3]


def refused_join(batches, match, **options):
    with pytest.raises(SchemaError, match=match):
        mr.Batch.join(batches, **options)


def test_batches_that_are_no_steps_or_windows_of_one_kind_are_not_joined(batch):
    refused_join([], r"batches must hold at least one batch, got none\. Add one")
    episodes = dataclasses.replace(batch, offsets=np.array([0, 1, 3]))
    refused_join([episodes], r"got ragged episodes\. Draw episodes with layout='padded'")
    refused_join([batch], r"pad=True needs padded episodes, got a batch without a mask", pad=True)
    numbered = dataclasses.replace(batch, buffer_ids=np.zeros(len(batch), np.int64))
    for pair in ([batch, numbered], [numbered, batch]):
        refused_join(pair, r"fields are .*'batch.buffer_ids': '\[\]'")
    bits = {"bits": np.zeros(3, np.uint16)}
    half, whole = batch_of(bits), dataclasses.replace(batch_of(bits), bfloat16=frozenset({"bits"}))
    for pair in ([half, whole], [whole, half]):
        refused_join(pair, r"fields are .*'bits': '(bfloat16|uint16)\[\]'")
    with pytest.raises(SchemaError, match=r"and select takes single steps\. Index the fields"):
        episodes.select(np.array([0]))


def test_batches_whose_ragged_fields_differ_are_refused(batch):
    other = dict(batch.fields) | {
        "observation/logp": ragged_of([[[1, 2]], [], []], inner=(2,), dtype=np.float32)
    }
    with pytest.raises(SchemaError, match=r"/logp': 'float32\[\*, 2\]'.*/logp': 'float32\[\*\]'"):
        mr.Batch.join([batch, batch_of(other, bfloat16=frozenset({"brain"}))])


def test_windows_of_several_buffers_are_padded_with_their_last_step():
    def windows(values, length):
        marks = np.ones((len(values) // length, length), bool)
        shape = marks.shape
        return batch_of(
            {"text": ragged_of(values, shape)},
            shape,
            mask=marks,
            window_positions=np.arange(len(values)).reshape(shape),
        )

    parts = [windows([[1], [2, 3]], 1), windows([[4], [], [5], [6, 7]], 2)]
    joined = mr.Batch.join(parts, pad=True)
    assert nested(joined["text"]).tolist() == [
        [[1], [1]],
        [[2, 3], [2, 3]],
        [[4], []],
        [[5], [6, 7]],
    ]
    assert joined.mask.tolist() == [[True, False]] * 2 + [[True, True]] * 2


def test_single_steps_are_collated_to_ragged_values(batch):
    steps = _rows(batch)
    assert steps[2]["observation"]["logp"].values.tolist() == [2.0, 3.0]
    assert steps[2]["observation"]["logp"].shape == ()
    again = mr.collate(steps)
    assert again["observation"]["mission"].text() == TEXTS[:3]
    assert again["observation"]["logp"].shape == (3,)
    assert again["brain"].dtype == torch.bfloat16
    assert again["reward"].shape == (3,)
    # Where lengths agree by chance, it is ragged all the same.
    same = mr.collate([steps[0], steps[0]])
    assert nested(same["observation"]["logp"]).tolist() == [[1.0], [1.0]]
