"""What values a field accepts, and how they are cast.

The values decide, not their container: integers and bools go into any field that holds
each of them exactly, as arrays, tensors, scalars or lists. Floats go into floats,
also narrower ones, since Gymnasium gives float64 rewards, and never into integers or
bools. Python and numpy scalars and lists of integers are rounded in a float field. A
field with ``exact=True`` takes only dtypes whose every value fits. Any other value is
refused, and the error names the cast to write.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from mmreplay.errors import SchemaError, unmasked
from mmreplay.schema.dtypes import WAYS_OUT, bfloat16_bits, describe, from_bfloat16_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmreplay.schema.field import Field

# Their integers are rounded in a float field; those of arrays must fit exactly.
_LOOSE = (bool, int, float, complex, np.generic, list, tuple)
_NUMPY = (np.ndarray, *_LOOSE)

PRECISIONS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Significant bits of a float: it holds each integer of at most so many."""
LARGEST = {
    "bfloat16": 255 << 120,
    "float16": 65504,
    "float32": (2**24 - 1) << 104,
    "float64": (2**53 - 1) << 971,
}
"""The largest finite number."""


class _Tensor(Protocol):
    """The members of a torch tensor that are used; torch is never imported here."""

    dtype: object

    def detach(self) -> _Tensor: ...
    def cpu(self) -> _Tensor: ...
    def view(self, dtype: object) -> _Tensor: ...
    def numpy(self) -> NDArray[np.generic]: ...


def convert(field: Field, value: object, path: str, lead: tuple[int, ...]) -> NDArray[np.generic]:
    """Cast one incoming value to a field; see `Field.convert`."""
    got, brain = as_numpy(value, path)
    shape = lead + field.shape
    way_out, misfit = _refusal(got.dtype, brain, field.dtype, field.exact), ""
    rounds = field.numpy.kind == "f" or field.dtype == "bfloat16"
    if way_out is None or got.dtype.kind not in "biuf":
        pass
    elif not got.size:
        way_out = None  # an empty list has the dtype float64, and no value to lose
    elif got.dtype.kind != "f" and not brain and not (rounds and field.exact):
        loose = rounds and isinstance(value, _LOOSE)
        value_lost = None if loose else _first_misfit(got, field.dtype)
        if value_lost is None:
            way_out = None
        elif field.numpy.kind in "iu" and not rounds:
            info = np.iinfo(field.dtype)
            raise SchemaError(
                f"field {path!r}: {field.dtype} must be {info.min} to {info.max}, got "
                f"{value_lost}. Declare a wider dtype."
            )
        else:
            misfit = f" with the value {value_lost}"
    if way_out is None and got.shape != shape:
        way_out = _shape_way_out(field, got.shape, lead)
    if way_out is not None:
        raise SchemaError(
            f"field {path!r} must be {describe(field.dtype, shape)}, got "
            f"{_describe(value, got, brain)}{misfit}. {way_out}."
        )
    if field.dtype == "bfloat16":
        return _cast_bfloat16(got, brain, path)
    if brain:
        got = from_bfloat16_bits(got)
    return _cast(field, got, path)


def widen(values: NDArray[np.generic], field: Field) -> NDArray[np.generic]:
    """Return stored values as numbers that numpy knows, of a field that has numbers."""
    numbers = field.rules.numbers(field, values)
    assert numbers is not None
    return numbers


def as_numpy(value: object, path: str) -> tuple[NDArray[np.generic], bool]:
    """The value as a numpy array, and whether it holds the bits of bfloat16.

    Args:
        value: Array, scalar, list, torch tensor, or what gives an array.
        path: Field it is for, as messages name it.

    Returns:
        The array, and True with uint16 bits where the value was bfloat16.

    Raises:
        SchemaError: It cannot be an array.
    """
    try:
        if not isinstance(value, _NUMPY) and hasattr(value, "detach"):
            return _from_tensor(cast("_Tensor", value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_array(value, f"field {path!r}") from error
    array = array_of(value, f"field {path!r}")
    # What jax gives are ml_dtypes' floats: dtypes that a package registers are 2 here.
    if array.dtype.isbuiltin == 2:
        if array.dtype.name == "bfloat16":
            return array.view(np.uint16), True
        if array.dtype.name.startswith("float8"):
            return array.astype(np.float32), False
    return array, False


def array_of(value: object, name: str) -> NDArray[np.generic]:
    """What numpy makes of a value.

    Args:
        value: Any array-like.
        name: What it is, as messages name it.

    Raises:
        SchemaError: It cannot be an array, as a ragged list cannot, or has masked
            items.
    """
    try:
        return unmasked(name, value)
    except SchemaError:
        raise
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _no_array(value, name) from error


def on_host(tensor: Any) -> Any:
    """A tensor on the CPU, without its gradient; floats that numpy lacks as float32."""
    # Each call that torch makes lets other threads run: none is made for nothing.
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    narrow = str(tensor.dtype).startswith(("torch.bfloat16", "torch.float8"))
    return tensor.float() if narrow else tensor


def shape_of(value: object, name: str) -> tuple[int, ...]:
    """Shape of what need not be an array yet; see `array_of`."""
    shape = getattr(value, "shape", None)
    return array_of(value, name).shape if shape is None else tuple(shape)


def _no_array(value: object, name: str) -> SchemaError:
    other = ", or let the field's first axis vary" if name.startswith("field ") else ""
    got, way_out = type(value).__name__, f"Pad ragged values{other}."
    if hasattr(value, "detach") and not getattr(value, "is_nested", False):
        # Sparse, quantized, or of a dtype that numpy lacks.
        got = f"{got} of {getattr(value, 'dtype', None)}"
        way_out = "Pass a dense tensor of another dtype, for example of float32."
    return SchemaError(f"{name} must be an array of numbers, got {got} that makes none. {way_out}")


# Cached: every step brings the same few dtypes, such as float64 rewards.
@lru_cache(maxsize=1024)
def _refusal(got: np.dtype[np.generic], brain: bool, expected: str, exact: bool) -> str | None:
    """Return the way out if a dtype has values that do not fit, else None."""
    got_name = "bfloat16" if brain else got.name
    if got_name == expected:
        return None
    if brain:
        got = np.dtype(np.float32)
    if got.kind not in "biuf":
        return WAYS_OUT.get(got.kind, "Pass an array of numbers")
    if expected == "bfloat16":
        return _bfloat16_refusal(got, exact)
    target = np.dtype(expected)
    if _lossless(got, target):
        return None
    if target.kind == "b":
        return "Pass .astype('bool') if it means true and false"
    if target.kind in "iu":
        if got.kind == "f":
            return f"Round it and pass .astype({expected!r}), or declare {got_name}"
        return "Declare a wider dtype"
    if exact:
        return f"{_pass_cast(got_name, expected)}, or leave out exact=True"
    if got.kind == "f":
        return None
    return f"Pass .astype({expected!r}) to round it, or declare {got_name}"


def _bfloat16_refusal(got: np.dtype[np.generic], exact: bool) -> str | None:
    # uint16 is taken as bits. bfloat16 has 8 bits of precision: bytes fit.
    if got.name == "uint16" or got.itemsize == 1:
        return None
    if exact:
        return "Pass torch.bfloat16 or its bits as uint16, or leave out exact=True"
    return None if got.kind == "f" else "Pass .astype('float32') to round it"


def _lossless(got: np.dtype[np.generic], target: np.dtype[np.generic]) -> bool:
    # numpy calls int64 to float64 safe, which it is up to 2**53.
    if got.kind in "iu" and target.kind == "f" and got.itemsize >= target.itemsize:
        return False
    return np.can_cast(got, target, "safe")


def _first_misfit(got: NDArray[np.generic], expected: str) -> int | None:
    """The first integer that a dtype does not hold exactly, or None."""
    # Python's integers and Fractions have no limits: only the values that may not fit
    # are looked at one by one, and of those nearly always the first one does not.
    integers = cast("NDArray[np.signedinteger]", got)
    if got.dtype.kind == "b" or not got.size:
        return None
    least, most = int(integers.min()), int(integers.max())
    if expected == "bool":
        bounds = 0, 1
    elif expected[:1] in "iu":
        info = np.iinfo(expected)
        bounds = int(info.min), int(info.max)
    else:
        limit = 1 << PRECISIONS[expected]
        bounds = -limit, limit
    if bounds[0] <= least and most <= bounds[1]:
        return None
    beyond = integers[(integers < bounds[0]) | (integers > bounds[1])]
    if expected[:1] in "iu" or expected == "bool":
        return int(beyond[0])
    for value in beyond.tolist():
        # A float holds what has no more significant bits than its mantissa.
        significant = abs(value) >> ((value & -value).bit_length() - 1)
        if significant >= limit or abs(value) > LARGEST[expected]:
            return int(value)
    return None


def _pass_cast(got: str, expected: str) -> str:
    return f"Pass .astype({expected!r}) if its values fit, or declare {got}"


def _shape_way_out(field: Field, got: tuple[int, ...], lead: tuple[int, ...]) -> str:
    if not lead and len(got) and got[1:] == field.shape and got[0] > 1:
        return (
            f"Pass the value of one step; or, for the steps of {got[0]} environments, "
            f"create the buffer with num_envs={got[0]}, after removing this one"
        )
    if not lead:
        return "Pass the value of one step"
    return (
        f"Pass an array of shape {[*lead, *field.shape]}: its first axes, "
        f"{list(lead)}, count the rows of the call"
    )


def _from_tensor(tensor: _Tensor) -> tuple[NDArray[np.generic], bool]:
    tensor = tensor.detach().cpu()
    if str(tensor.dtype).startswith("torch.float8"):
        # numpy has none; float32 holds each of their values.
        tensor = cast("_Tensor", cast("Any", tensor).float())
    if str(tensor.dtype) != "torch.bfloat16":
        return tensor.numpy(), False
    # numpy has no bfloat16; where there is a tensor, torch is loaded already.
    bits = tensor.view(sys.modules["torch"].int16).numpy()
    return bits.view(np.uint16), True


def _cast(field: Field, got: NDArray[np.generic], path: str) -> NDArray[np.generic]:
    target = field.numpy
    if target.kind != "f":
        return got.astype(target, copy=False)
    try:
        # A finite number must not become infinity without an error.
        with np.errstate(over="raise", under="ignore", invalid="ignore"):
            return got.astype(target, copy=False)
    except FloatingPointError:
        raise _overflow(got, field.dtype, path) from None


def _cast_bfloat16(got: NDArray[np.generic], brain: bool, path: str) -> NDArray[np.generic]:
    if brain or got.dtype.name == "uint16":
        return got.astype("<u2", copy=False)
    values = got if got.dtype.kind == "f" else got.astype(np.float64)
    values = cast("NDArray[np.floating]", values)
    bits = bfloat16_bits(values)
    if (((bits & 0x7FFF) == 0x7F80) & np.isfinite(values)).any():
        raise _overflow(got, "bfloat16", path)
    return bits.astype("<u2", copy=False)


def _overflow(got: NDArray[np.generic], expected: str, path: str) -> SchemaError:
    return SchemaError(
        f"field {path!r}: {expected} cannot hold some of the {got.dtype.name} values, "
        "which are too large. Clip them, or declare a wider dtype."
    )


def _describe(value: object, got: NDArray[np.generic], brain: bool) -> str:
    if got.dtype.kind in "OUS" and got.ndim == 0:
        text = repr(value)
        return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '…'}"
    return describe("bfloat16" if brain else got.dtype.name, got.shape)
