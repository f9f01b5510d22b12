"""Two buffers side by side: differences of schemas, histograms on the same axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.page.episodes import EpisodeColumns
from mmreplay.page.overview import roles_of
from mmreplay.page.sample import (
    FEW_ROWS,
    FEW_VALUES,
    HISTOGRAM_COMPONENTS,
    bin_values,
    component_name,
    sample_values,
    take_sample,
)
from mmreplay.page.varying import name_of, numbers_of
from mmreplay.schema import Field, Schema

Values = NDArray[Any]


def compare_buffers(
    buffers: tuple[ReplayBuffer, ReplayBuffer], episodes: tuple[EpisodeColumns, EpisodeColumns]
) -> dict[str, Any]:
    """Return the differences of two buffers, as JSON values.

    Args:
        buffers: Both, open.
        episodes: Of each.

    Returns:
        ``schema``, a list of differences in words; ``histograms``, each with a name
        and the counts of both buffers between the same edges (or of the same values).
    """
    first, second = buffers
    histograms = []
    for name, attribute in (("return", "returns"), ("length", "lengths")):
        # Of whole ones: others are as long as they are by chance.
        pair = [getattr(columns, attribute)[columns.complete] for columns in episodes]
        field = Field((), "float32" if name == "return" else "int64")
        shared = shared_histogram(pair[0], pair[1], field)
        if shared is not None:
            histograms.append({"name": name, "role": "episode", **shared})
    roles = [roles_of(buffer.schema.drawn) for buffer in buffers]
    samples = [take_sample(buffer) for buffer in buffers]
    for path, field in first.schema.drawn.fields.items():
        other = second.schema.drawn.fields.get(path)
        role = roles[0][path]
        if other is None or other.shape != field.shape or not all(map(len, samples)):
            continue
        if role not in ("reward", "action") or roles[1][path] != role:
            continue
        values = [
            sample_values(buffer, path, sample, HISTOGRAM_COMPONENTS)
            for buffer, sample in zip(buffers, samples, strict=True)
        ]
        for name, shared in _of_components(path, field, values[0], values[1]):
            histograms.append({"name": name, "role": role, **shared})
    return {"schema": schema_differences(first.schema, second.schema), "histograms": histograms}


def _of_components(
    path: str, field: Field, first: Values, second: Values
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of the components of a field, ``[N, C]`` and ``[M, C]``, and histograms."""
    numbers = numbers_of(field)
    for number in range(first.shape[1]):
        shared = shared_histogram(first[:, number], second[:, number], numbers)
        if shared is not None:
            yield component_name(name_of(path, field), number, numbers.shape), shared


def schema_differences(first: Schema, second: Schema) -> list[str]:
    """Say how two schemas differ, a sentence for each difference."""
    found = []
    for path, field in first.fields.items():
        other = second.fields.get(path)
        if other is None:
            found.append(f"{path} is in the first buffer only.")
        elif other.shape != field.shape:
            shapes = f"{list(field.shape)} and {list(other.shape)}"
            found.append(f"{path} has the shapes {shapes}.")
        elif other.dtype != field.dtype:
            found.append(f"{path} has the dtypes {field.dtype} and {other.dtype}.")
        elif (other.kind, other.max_length) != (field.kind, field.max_length):
            kinds = f"{field.description} and {other.description}"
            found.append(f"{path} is {kinds}.")
    found += [
        f"{path} is in the second buffer only."
        for path in second.fields
        if path not in first.fields
    ]
    for role in sorted({*first.roles, *second.roles}):
        one, two = first.roles.get(role), second.roles.get(role)
        if one != two:
            found.append(
                f"The {role} is {one or 'not there'} in the first buffer and "
                f"{two or 'not there'} in the second."
            )
    return found


def shared_histogram(first: Values, second: Values, field: Field) -> dict[str, Any] | None:
    """Count the finite values of two arrays on the same axis.

    Args:
        first: ``[N]``.
        second: ``[M]``.
        field: Of the values of the first.

    Returns:
        ``counts`` of both, and ``edges`` or ``values``; None where neither has any.
    """
    pair = [values[np.isfinite(values)] for values in (first, second)]
    if not any(map(len, pair)):
        return None
    distinct = [np.unique(values[:FEW_ROWS]) for values in pair]
    if max(map(len, distinct)) <= FEW_VALUES:
        all_values = np.unique(np.concatenate([np.unique(values) for values in pair]))
        if len(all_values) <= 2 * FEW_VALUES:
            counts = [
                (values[:, None] == all_values).sum(axis=0)
                if len(values)
                else np.zeros(len(all_values), np.int64)
                for values in pair
            ]
            return {"values": all_values.astype(np.float64), "counts": counts}
    first_bins, second_bins = bin_values(pair, field)
    return {"edges": first_bins.edges, "counts": [first_bins.counts, second_bins.counts]}
