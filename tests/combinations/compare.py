"""Compares what a buffer gives with what its twin says."""

from contextlib import contextmanager

import numpy as np

import mmreplay as mr


def assert_column(name, actual, expected):
    """A column holds the expected values, one by one.

    Args:
        name: For the message.
        actual: An array ``[N, ...]``, or `Ragged`.
        expected: A list of N values.
    """
    assert len(actual) == len(expected), (name, len(actual), len(expected))
    if not expected:
        return
    if isinstance(actual, mr.Ragged):
        flat = flattened(expected) if len(actual.shape) > 1 else expected
        assert_ragged(name, actual, flat)
        return
    want = np.array(expected)
    assert actual.shape == want.shape, (name, actual.shape, want.shape)
    np.testing.assert_array_equal(actual, want, err_msg=name)


def assert_ragged(name, actual, expected):
    lengths, offsets = [], np.asarray(actual.offsets)
    for number, value in enumerate(expected):
        items = np.asarray(actual.values)[offsets[number] : offsets[number + 1]]
        if isinstance(value, str):
            assert bytes(items.tolist()).decode() == value, (name, number)
        elif isinstance(value, bytes):
            assert bytes(items.tolist()) == value, (name, number)
        else:
            assert items.dtype == value.dtype, (name, items.dtype)
            np.testing.assert_array_equal(items, value, err_msg=f"{name}[{number}]")
        lengths.append(len(items))
    assert len(offsets) == len(expected) + 1, name


def flattened(rows):
    """Values of windows, one after another."""
    return [value for row in rows for value in row]


def expected_step(twin, index, *, with_next=True):
    """By path what a batch holds of one step."""
    values = dict(twin.stored(index))
    if with_next and twin.next_observation == "derived":
        values |= {f"next_{p}": v for p, v in twin.next_of(index).items()}
    if not with_next:
        values = {p: v for p, v in values.items() if not p.startswith("next_")}
    return values


def assert_steps(fields, expected, *, but=()):
    """A batch's fields hold the expected steps.

    Args:
        fields: By path, as `Batch.fields`.
        expected: Dicts by path, one a step.
        but: Paths that are compared elsewhere.
    """
    assert expected
    names = set(expected[0]) - set(but)
    assert set(fields) - set(but) == names, set(fields) ^ names
    for path in sorted(names):
        assert_column(path, fields[path], [values[path] for values in expected])


def same_batch(one, other):
    """Two batches are equal in all that they hold."""
    assert set(one.fields) == set(other.fields)
    assert one.key == other.key
    for name in ("env_ids", "positions", "probabilities", "weights"):
        np.testing.assert_array_equal(
            np.asarray(getattr(one, name)), np.asarray(getattr(other, name)), name
        )
    for path, column in one.fields.items():
        assert_same(path, column, other.fields[path])
    for name in ("mask", "offsets"):
        a, b = getattr(one, name), getattr(other, name)
        if a is not None or b is not None:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), name)


def assert_same(path, one, other):
    """Two columns are equal, arrays or tensors."""
    if isinstance(one, mr.Ragged):
        assert tuple(one.shape) == tuple(other.shape), path
        one_parts, other_parts = ((one.values, one.offsets), (other.values, other.offsets))
    else:
        one_parts, other_parts = (one,), (other,)
    for a, b in zip(one_parts, other_parts, strict=True):
        a, b = np.asarray(plain(a)), np.asarray(plain(b))
        assert a.shape == b.shape, (path, a.shape, b.shape)
        np.testing.assert_array_equal(a, b, err_msg=path)


def plain(column):
    """A tensor of bfloat16 as the bits that arrays hold; others as they are."""
    if type(column).__module__.startswith("torch") and "bfloat16" in str(column.dtype):
        import torch

        return column.view(torch.int16).numpy().view(np.uint16)
    return column


def assert_rows(twin, rows):
    """All rows, oldest first, with every value that means something."""
    alive = twin.alive()
    assert list(zip(rows.env_ids.tolist(), rows.positions.tolist(), strict=True)) == alive
    assert rows.fields["final"].tolist() == [twin.row(index).final for index in alive]
    stored = [twin.stored(index) for index in alive]
    for path in set().union(*stored):
        # A final observation alone has no other fields.
        known = [number for number, values in enumerate(stored) if path in values]
        column = rows.fields[path][np.array(known, np.int64)]
        assert_column(path, column, [stored[number][path] for number in known])


@contextmanager
def refused(*errors):
    """What is inside raises one of these errors, all of them documented and clear."""
    try:
        yield
    except errors as error:
        if isinstance(error, mr.ReplayError):
            assert_refusal(error)
        return
    raise AssertionError(f"nothing was raised, expected {[e.__name__ for e in errors]}")


def assert_refusal(error):
    """An error says in short sentences what is wrong, and then what to do."""
    text = str(error)
    assert text.endswith((".", "?")), text
    assert ". " in text or "? " in text, text
    assert len(text) <= 420, text
