"""Values that vary, as the page shows them: lengths as numbers, beginnings as text.

Curves, histograms and findings take one number a row of each component: of a field that
varies that is the length of the value. Lengths are read without the values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.arguments import printable
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import CorruptError, FailedError, StaleError
from mmreplay.schema import Field

if TYPE_CHECKING:
    from mmreplay.page.sample import Sample

LENGTH = Field((), "int64")
MEASURED_FILES = 1000
MAX_VALUE_NBYTES, MAX_READ_NBYTES = 64 << 10, 4 << 20
"""Of a value that is shown; of the values of one answer, whose other rows show their
lengths alone."""


def numbers_of(field: Field) -> Field:
    """The field of the numbers that are drawn of a field: lengths where it varies."""
    return LENGTH if field.rules.by_length else field


def read_numbers(
    buffer: ReplayBuffer, path: str, env_ids: ArrayLike, positions: ArrayLike
) -> NDArray[Any]:
    """Read a field, or the lengths of its values where it varies.

    Args:
        buffer: Open in any mode.
        path: The field.
        env_ids: As `ReplayBuffer.get_field` takes them.
        positions: Likewise.

    Raises:
        StaleError: A position is not in the buffer.
    """
    if buffer.schema.drawn[path].rules.by_length:
        return buffer.view.get_lengths((path,), env_ids, positions, damaged=True)[path]
    return buffer.get_field(path, env_ids, positions)


def mean_nbytes(buffer: ReplayBuffer, path: str, sample: Sample) -> int:
    """Bytes of the average file of a field of images, by some rows of a sample.

    Zero where none can be read: the writer has overwritten them, or they are damaged.

    Args:
        buffer: Open in any mode.
        path: The field.
        sample: At least one row; those that were overwritten since are left out.
    """
    some, span = sample.at_most(MEASURED_FILES), buffer.span
    there = some.positions >= span.first[some.env_ids]
    where = some.env_ids[there], some.positions[there]
    try:
        lengths = buffer.view.get_lengths((path,), *where, damaged=True)[path]
        # A damaged reference may say any length.
        lengths = lengths[lengths <= (buffer.schema[path].max_length or 0)]
    except (StaleError, FailedError, CorruptError):
        # The writer was faster, or shards are damaged: what reads the values says so.
        return 0
    return round(float(lengths.mean())) if len(lengths) else 0


def name_of(path: str, field: Field) -> str:
    """The name of what is drawn of a field."""
    return f"length of {path}" if field.rules.by_length else path


def read_texts(
    buffer: ReplayBuffer, path: str, env_id: int, positions: NDArray[np.int64]
) -> list[str]:
    """Read the values of neighbouring rows, each as a text of what it begins with.

    Nothing of it is a control character: those are spelled out. Of a damaged value it
    says what is wrong.

    Args:
        buffer: Open in any mode.
        path: A field that varies.
        env_id: The environment.
        positions: int64 ``[N]``.

    Raises:
        StaleError: A position is not in the buffer.
    """
    field = buffer.schema.drawn[path]
    view = buffer.view
    lengths = view.get_lengths((path,), env_id, positions, damaged=True)[path]
    nbytes = lengths * field.inner_nbytes
    short = np.flatnonzero(nbytes <= MAX_VALUE_NBYTES)
    short = short[np.cumsum(nbytes[short]) <= MAX_READ_NBYTES]
    texts = [f"{field.rules.length(field, length)}, not shown" for length in lengths.tolist()]
    try:
        values = buffer.get_field(path, env_id, positions[short])
    except CorruptError:
        # One by one: the others are shown all the same.
        for at in short.tolist():
            texts[at] = _text_or_damage(buffer, path, env_id, int(positions[at]))
        return texts
    for at, value in zip(short.tolist(), values, strict=True):
        texts[at] = field.rules.show(field, value)
    return texts


def _text_or_damage(buffer: ReplayBuffer, path: str, env_id: int, position: int) -> str:
    """One value as a text, or what is wrong with it."""
    try:
        [value] = buffer.get_field(path, env_id, [position])
    except CorruptError as error:
        return printable(str(error))
    field = buffer.schema.drawn[path]
    return field.rules.show(field, value)
