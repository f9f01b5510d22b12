"""Batches of several buffers as one, and rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.batch import Batch
from mmreplay.errors import SchemaError
from mmreplay.schema.convert import on_host

Ids = NDArray[np.int64]


def joined(
    batches: Sequence[Batch],
    cat: Callable[..., Any] = np.concatenate,
    *,
    pad: bool = False,
) -> Batch:
    """Put batches of several buffers one after the other.

    Args:
        batches: At least one, all numpy arrays or all tensors.
        cat: Joins arrays of their kind, along an axis.
        pad: They are of padded episodes, and padded to the longest of all.

    Raises:
        SchemaError: Their fields or windows differ.
    """
    if pad:
        longest = max(_width(batch) for batch in batches)
        batches = [_padded(batch, longest, cat) for batch in batches]
    first = batches[0]
    for batch in batches:
        for name, mine, other in (
            ("fields", _shapes(batch), _shapes(first)),
            ("episodes", batch.offsets is None, True),
        ):
            if mine != other:
                raise SchemaError(
                    f"concat: got {name} {mine} from a buffer, expected {other} as "
                    "from the first; give all buffers the same transforms and kind of "
                    "sampler, of single steps or windows equally long"
                )

    def whole(name: str) -> Any:
        arrays = [getattr(batch, name) for batch in batches]
        return None if arrays[0] is None else cat(arrays)

    fields = {
        path: cat([batch.fields[path] for batch in batches]) for path in first.fields
    }
    names = (
        *("env_ids", "positions", "probabilities", "weights", "mask"),
        *("window_positions", "buffer_ids"),
    )
    columns = {name: whole(name) for name in names}
    return replace(first, fields=fields, key=0, buffer=b"", **columns)


def _padded(batch: Batch, length: int, cat: Callable[..., Any]) -> Batch:
    """Pad windows with their last step, as no step, up to a length."""
    missing = length - _width(batch)

    def longer(array: Any, told: bool = False) -> Any:
        last = array[:, -1:]
        return cat([array, *[last & ~last if told else last] * missing], 1)

    return replace(
        batch,
        fields={
            path: longer(array, path == "is_first" and "bool" in str(array.dtype))
            for path, array in batch.fields.items()
        },
        mask=longer(batch.mask, True),
        window_positions=longer(batch.window_positions),
    )


def _width(batch: Batch) -> int:
    assert batch.mask is not None
    return int(batch.mask.shape[1])


def rows_of(batch: Batch, rows: Ids, probabilities: Any = None) -> Batch:
    """Choose rows of a batch, as numpy arrays."""

    def chosen(array: Any) -> Any:
        return None if array is None else as_numpy(array)[rows]

    return replace(
        batch,
        fields={path: chosen(array) for path, array in batch.fields.items()},
        env_ids=chosen(batch.env_ids),
        positions=chosen(batch.positions),
        probabilities=(
            chosen(batch.probabilities) if probabilities is None else probabilities
        ),
        weights=chosen(batch.weights),
        mask=chosen(batch.mask),
        window_positions=chosen(batch.window_positions),
        buffer_ids=chosen(batch.buffer_ids),
    )


def _shapes(batch: Batch) -> dict[str, Any]:
    return {
        path: f"{array.dtype}{list(array.shape[1:])}"
        for path, array in sorted(batch.fields.items())
    }


def as_numpy(values: Any) -> NDArray[Any]:
    """An array, also of a tensor that is on a device or has a gradient."""
    if hasattr(values, "detach"):
        values = on_host(values).numpy()
    return np.asarray(values)
