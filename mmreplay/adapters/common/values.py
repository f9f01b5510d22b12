"""Values of other libraries' code as arrays."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # public

from mmreplay.errors import SchemaError, refuse_masked
from mmreplay.ragged import Ragged

Look = Callable[[torch.Tensor], object]

_seeded: Counter[int] = Counter()
PAD = "Pad it to one shape, or store it in an mmreplay.ReplayBuffer, which has fields that vary."
"""What to do with text and values of several lengths, which no original takes."""


def seed_of_draws() -> int:
    """Return a seed for the draws of one memory, in ``[0, 2**62)``.

    The first memory of a process under torch's seed takes that seed; each later one
    mixes it with its number. So two agents' memories draw different rows, and a second
    run of the program draws the same rows.
    """
    seed = torch.initial_seed() % (1 << 62)
    number = _seeded[seed]
    _seeded[seed] += 1
    if not number:
        return seed
    mixed = np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)
    return int(mixed[0]) % (1 << 62)


def device_of(device: object) -> torch.device:
    """The device that a memory is asked for, or the default where it cannot be used.

    It is what skrl's `parse_device` returns: the first GPU or else the CPU for None,
    and, with a warning, for a device that is unknown or that this machine lacks.

    Args:
        device: A `torch.device`, its name, or None.

    Example:
        >>> device_of("cpu")
        device(type='cpu')
    """
    default = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, str | torch.device):
        return default
    why = unusable(device)
    if why:
        warnings.warn(
            f"device: cannot use {str(device)!r} ({why}). Results go to "
            f"{str(default)!r}; pass a device of this machine",
            RuntimeWarning,
            stacklevel=3,
        )
        return default
    return torch.device(device)


def unusable(device: str | torch.device) -> str:
    """Why a device cannot be used, or an empty string where it can."""
    try:
        torch.zeros(1, device=torch.device(device))
    except Exception as error:  # torch raises RuntimeError, AssertionError and others
        return (str(error) or type(error).__name__).strip().splitlines()[0]
    return ""


def refuse_varying(value: object, name: str) -> None:
    """Refuse what has no one shape: `Ragged`, nested tensors, text and bytes.

    Args:
        value: Anything.
        name: What messages call it.

    Raises:
        SchemaError: It is such a value.
    """
    nested = isinstance(value, torch.Tensor) and value.is_nested
    if nested or isinstance(value, Ragged | str | bytes):
        got = "nested tensor" if nested else type(value).__name__
        raise SchemaError(f"{name} must be numbers of one shape, got {got}. {PAD}")


def varying_space(space: object) -> bool:
    """Whether a space of gym or gymnasium has values of several lengths."""
    # By name, so that neither library is needed, and both are known.
    kinds = {kind.__name__ for kind in type(space).__mro__}
    # A Tuple is a Sequence of Python.
    return bool(kinds & {"Text", "Sequence", "Graph"}) and "Tuple" not in kinds


def array_of(value: object, name: str = "value") -> NDArray[Any]:
    """The value of a tensor on any device, an array or a number; no copy if it can.

    Of bfloat16 it is float32.

    Args:
        value: Anything.
        name: What messages call it.

    Raises:
        SchemaError: It is text, or has no one shape.
    """
    refuse_varying(value, name)
    if not isinstance(value, torch.Tensor):
        refuse_masked(value, name)
        try:
            array = np.asarray(value)
        except ValueError:
            # numpy's own says "inhomogeneous", and not of what.
            raise SchemaError(
                f"{name} must be numbers of one shape, got {type(value).__name__} of several. {PAD}"
            ) from None
        if array.dtype.kind in "SU":
            raise SchemaError(f"{name} must be numbers of one shape, got {array.dtype}. {PAD}")
        return array
    if str(value.dtype).startswith(("torch.bfloat16", "torch.float8")):
        value = value.float()  # numpy has none; each of its values is one of these
    return value.numpy(force=True)


def capsule_of(value: torch.Tensor) -> object:
    """What a ring takes a tensor's values from, where it takes them as they are.

    A DLPack capsule: an array costs four times as much, and a step has many.

    Raises:
        TypeError: It is no tensor, or what it holds is not its values.
        RuntimeError: It does not lie in memory as an array does, or in none of its own.
        BufferError: Likewise; or DLPack has no such dtype.
    """
    if type(value) is not torch.Tensor or value.is_neg():
        raise TypeError(f"value must be a plain tensor, got {type(value).__name__}.")
    return to_dlpack(value)


def rows_of(name: str, value: object, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Values as float32 of a shape.

    Args:
        name: What messages call it.
        value: Tensor, array or number of that shape, but for axes of length 1.
        shape: What is wanted.

    Raises:
        SchemaError: It is no numbers, or the shape is another one: values are not
            repeated.
    """
    array = array_of(value, name)
    if array.dtype.kind not in "biuf":
        raise SchemaError(
            f"{name} must be numbers, got {array.dtype}, such as {value!r:.60}. None "
            "and text are not stored."
        )
    if array.shape == shape:
        return array.astype(np.float32, copy=False)
    if [n for n in array.shape if n != 1] != [n for n in shape if n != 1]:
        raise SchemaError(
            f"{name} must have the shape {list(shape)}, got {list(array.shape)}. "
            "Values are not repeated to fit."
        )
    return array.reshape(shape).astype(np.float32, copy=False)


def array_as_is(value: torch.Tensor) -> object:
    """The same as an array, of whatever torch makes one of without a copy.

    Raises:
        TypeError: It is on a device.
        RuntimeError: It has a gradient.
    """
    return value.numpy()


LOOKS: tuple[Look, ...] = (capsule_of, array_as_is)
"""Ways to hand a tensor to a ring as it is, the shortest first, which does not take all
that the other does."""
LOOK_ERRORS = (KeyError, AttributeError, TypeError, RuntimeError, BufferError)
"""What says that there is none: it is on a device, has a gradient or no dtype of
numpy's; or it is no tensor."""


def plain_rows(
    shapes: Mapping[str, tuple[int, ...]], values: tuple[object, ...]
) -> dict[str, object] | None:
    """One row of float32 fields as it mostly comes, in few calls.

    Args:
        shapes: Of the fields, by name.
        values: A value of each: tensors; a float or bool where there is one number.

    Returns:
        What a ring is asked to take as it is, by name, or None where a value is
        something else: see `rows_of`.
    """
    row: dict[str, object] = {}
    for (name, shape), value in zip(shapes.items(), values, strict=True):
        if type(value) in (float, bool) and shape == (1,):
            row[name] = np.array((value,), np.float32)
            continue
        try:
            row[name] = capsule_of(value)  # type: ignore[arg-type]  # or it says so
        except LOOK_ERRORS:
            return None
    return row


def check_counts(minimum: int = 1, **counts: object) -> None:
    """Refuse arguments that are no whole numbers, or too small, by name.

    Raises:
        SchemaError: One is.
    """
    for name, value in counts.items():
        whole = isinstance(value, int | float | np.integer) and value == value // 1
        if not whole or isinstance(value, bool) or value < minimum:  # type: ignore[operator]  # a number
            raise SchemaError(f"{name} must be an integer of at least {minimum}, got {value!r}.")
