"""Values of fields that vary as the cells of a csv file.

Text stands as it is, bytes as base64, and arrays as JSON: ``[1,2]``, or
``[[1,2],[3,4]]`` where an item has axes. NaN and infinities, which JSON lacks, are
``"nan"``, ``"inf"`` and ``"-inf"``. All are made and read by columns; only bytes are
looked at one by one.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
from numpy.typing import NDArray

from mmreplay.errors import SchemaError
from mmreplay.ragged import Ragged, ragged_of_bytes
from mmreplay.schema import Field

MAX_TEXT_NBYTES = 48 << 20
"""Of the cells of one row: quotes may double them, and a line is parsed at once."""
NO_BYTES = np.zeros(0, np.uint8)


def refuse_long(columns: dict[str, Ragged], fields: dict[str, Field]) -> None:
    """Refuse rows whose values no line could hold, before they are made text.

    Raises:
        SchemaError: A row's values take more than 48 MiB, or are more numbers.
    """
    for path, values in columns.items():
        field = fields[path]
        each = math.prod(field.inner) if field.rules.form == "array" else 1
        longest = int(values.lengths.max(initial=0)) * each
        if longest > MAX_TEXT_NBYTES:
            raise _too_long(path, longest)


def encode(values: Ragged, field: Field) -> Any:
    """Values as an Arrow array of cells."""
    if field.kind == "text":
        data = np.ascontiguousarray(values.values)
        return _strings(data, values.offsets)
    if field.rules.form == "bytes":
        return pa.array([base64.b64encode(each.tobytes()) for each in values], pa.binary()).cast(
            pa.string()
        )
    flat = np.ascontiguousarray(values.values).reshape(-1)
    if field.dtype == "float16":
        flat = flat.astype(np.float32)
    cells = pa.array(flat).cast(pa.string())
    if flat.dtype.kind == "f":
        finite = np.isfinite(flat)
        if not finite.all():
            quoted = compute.binary_join_element_wise('"', cells, '"', "")
            cells = compute.if_else(pa.array(finite), cells, quoted)
    count = len(flat)
    for axis in reversed(field.inner):
        count //= axis
        cells = _bracketed(np.arange(count + 1) * axis, cells)
    return _bracketed(values.offsets, cells)


def _bracketed(offsets: NDArray[np.int64], cells: Any) -> Any:
    """Lists of cells as JSON."""
    lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), cells)
    joined = compute.binary_join(lists, ",")
    return compute.binary_join_element_wise("[", joined, "]", "")


def _strings(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Any:
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), len(offsets) - 1, buffers)


def refuse_wide(cells: dict[str, Any]) -> None:
    """Refuse rows whose cells make a line too long to be read again.

    Args:
        cells: Of the fields that vary, by path.

    Raises:
        SchemaError: One takes more than 48 MiB.
    """
    nbytes = np.sum([compute.binary_length(each).to_numpy() for each in cells.values()], axis=0)
    if np.max(nbytes, initial=0) > MAX_TEXT_NBYTES:
        raise _too_long(next(iter(cells)), int(nbytes.max()))


def _too_long(path: str, nbytes: int) -> SchemaError:
    return SchemaError(
        f"field {path!r}: cells of a csv row must take at most {MAX_TEXT_NBYTES} bytes "
        f"together, got {nbytes}. Leave the field out with fields=, or choose parquet "
        "or npz."
    )


def legal_cell(field: Field) -> str:
    """A description of the cells of a field, for errors."""
    if field.kind == "text":
        return "text"
    return "base64" if field.rules.form == "bytes" else f"JSON of {field.description}"


def fits(cell: str, field: Field) -> bool:
    """Return whether a cell is one of a field."""
    try:
        decode(pa.array([cell]), field)
    except (ValueError, pa.ArrowException):
        return False
    return True


def decode(cells: Any, field: Field) -> Ragged:
    """Cells, an Arrow array of strings without nulls, as values.

    Raises:
        ValueError: One is no value of the field.
    """
    if field.kind == "text":
        return _text(cells)
    if field.rules.form == "bytes":
        several = [base64.b64decode(each, validate=True) for each in cells.to_pylist()]
        return ragged_of_bytes(several)
    if field.inner:
        bare = compute.replace_substring_regex(cells, r"[\[\]]", "")
    else:
        # Without a regular expression, in a third of the time.
        bare = compute.utf8_trim(cells, "[]")
    filled = np.asarray(compute.binary_length(bare)) > 0
    commas = np.asarray(compute.count_substring(bare, ","))
    counts = np.where(filled, commas + 1, 0).astype(np.int64)
    each = math.prod(field.inner)
    lengths = counts // each
    if (lengths * each != counts).any() or not _same_brackets(cells, field, lengths):
        raise ValueError(f"a cell that is not {legal_cell(field)}")
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    tokens = compute.split_pattern(bare.filter(pa.array(filled)), ",").flatten()
    return Ragged(_numbers(tokens, field).reshape(-1, *field.inner), offsets)


def _text(cells: Any) -> Ragged:
    buffers = cells.buffers()
    begin = cells.offset * 4
    if buffers[1] is None or not len(cells):
        return Ragged(NO_BYTES, np.zeros(len(cells) + 1, np.int64))
    offsets = np.frombuffer(buffers[1], np.int32, len(cells) + 1, begin)
    offsets = offsets.astype(np.int64)
    first, stop = int(offsets[0]), int(offsets[-1])
    data = NO_BYTES if buffers[2] is None else np.frombuffer(buffers[2], np.uint8)
    return Ragged(data[first:stop], offsets - first)


def _same_brackets(cells: Any, field: Field, lengths: NDArray[np.int64]) -> bool:
    """Return whether cells have the brackets and commas of values of such lengths."""
    if not field.inner:
        ends = compute.and_(compute.starts_with(cells, "["), compute.ends_with(cells, "]"))
        single = [compute.equal(compute.count_substring(cells, c), 1) for c in "[]"]
        legal = compute.and_(ends, compute.and_(*single))
        return bool(compute.all(legal).as_py() is not False)
    item = ""
    for number, axis in enumerate(reversed(field.inner)):
        item = f"[{','.join([item if number else ''] * axis)}]"
    found = compute.replace_substring_regex(cells, r"[^\[\],]", "")
    items = compute.binary_repeat(pa.array([f"{item},"] * len(lengths)), lengths)
    inner = compute.utf8_slice_codeunits(items, 0, -1)
    expected = compute.binary_join_element_wise("[", inner, "]", "")
    return bool(compute.all(compute.equal(found, expected)).as_py() is not False)


def _numbers(tokens: Any, field: Field) -> NDArray[np.generic]:
    if field.dtype == "bool":
        if not np.isin(tokens.to_numpy(zero_copy_only=False), ("true", "false")).all():
            raise ValueError("a value that is neither true nor false")
        found: NDArray[np.generic] = np.asarray(tokens.cast(pa.bool_()))
        return found.astype(bool)
    if field.numpy.kind == "f":
        tokens = compute.replace_substring_regex(tokens, '^"(nan|inf|-inf)"$', r"\1")
    kind = pa.from_numpy_dtype(np.dtype(np.float32) if field.dtype == "float16" else field.numpy)
    numbers: NDArray[np.generic] = tokens.cast(kind).to_numpy(zero_copy_only=False)
    return numbers.astype(field.numpy)
