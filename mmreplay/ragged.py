"""Values whose first axis differs from row to row, one after another in one array.

A *value* is what a step holds of a field that varies, such as the tokens of a prompt;
its *items* are the rows of its first axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import numpy as np

from mmreplay.errors import SchemaError, refuse_masked, shown

if TYPE_CHECKING:
    import torch
    from torch import device as Device

Array = Any
"""``numpy.ndarray``, or ``torch.Tensor`` after `Ragged.tensors`."""


class Memory(Protocol):
    """Hands out arrays, such as a `BufferPool`."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array whose content means nothing."""


def join_columns(columns: Sequence[Array], axis: int = 0, memory: Memory | None = None) -> Array:
    """Join columns of a batch: arrays, tensors or `Ragged`, all of one kind.

    Args:
        columns: At least one. One alone is returned as it is, or copied where it is
            read-only.
        axis: 0 for more steps, 1 for longer windows.
        memory: Where arrays come from.

    Example:
        >>> from mmreplay.ragged import join_columns
        >>> join_columns([np.arange(2), np.arange(3)]).tolist()
        [0, 1, 0, 1, 2]
        >>> texts = mr.Ragged(np.arange(3, dtype=np.uint8), [0, 1, 3])
        >>> join_columns([texts, texts]).lengths.tolist()
        [1, 2, 1, 2]
    """
    first = columns[0]
    ragged = isinstance(first, Ragged)
    items = first.values if ragged else first
    arrays = isinstance(items, np.ndarray)
    if len(columns) == 1 and not (arrays and not items.flags.writeable):
        return first
    if ragged:
        return Ragged.concatenate(columns, axis)
    if not arrays:
        import torch

        return torch.cat(tuple(columns), axis)
    out = None
    if memory is not None:
        shape = list(first.shape)
        shape[axis] = sum([column.shape[axis] for column in columns])
        out = memory.empty(tuple(shape), np.result_type(*columns))
    return np.concatenate(columns, axis, out=out)


def ragged_of_bytes(values: Sequence[bytes], shape: Sequence[int] | None = None) -> Ragged:
    """Put bytes together as values of uint8.

    Args:
        values: N of them.
        shape: Of the values; by default ``(N,)``.

    Example:
        >>> from mmreplay.ragged import ragged_of_bytes
        >>> ragged_of_bytes([b"ab", b""]).lengths.tolist()
        [2, 0]
    """
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    # One alone is not copied.
    joined = values[0] if len(values) == 1 else b"".join(values)
    return Ragged(np.frombuffer(joined, np.uint8), offsets, shape)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ragged:
    """Values of a field that varies: one for each step of a batch, or each of a window.

    It is indexed as an array of values, of `shape`: ``ragged[3]`` is the value of the
    fourth step, ``ragged[2:9]`` and ``ragged[mask]`` are ragged again. `len` and
    iteration go along the first axis. What has values of one shape alone, such as
    ``numpy.asarray``, is refused: use `values`, or `padded`.

    Attributes:
        values: The items of all values ``[total, *inner]``, one value after another.
        offsets: int64 ``[N + 1]``, where each of the N values begins in `values`, and
            ``total``; N is the product of `shape`.
        shape: Of the values: ``(B,)`` of steps, ``(B, T)`` of windows and stacks, and
            ``()`` of a single value.

    Example:
        >>> import numpy as np
        >>> tokens = mr.Ragged(np.arange(5), np.array([0, 2, 2, 5]))
        >>> [value.tolist() for value in tokens]
        [[0, 1], [], [2, 3, 4]]
        >>> array, mask = tokens.padded()
        >>> array.tolist()
        [[0, 1, 0], [0, 0, 0], [2, 3, 4]]
    """

    values: Array
    offsets: Array
    shape: tuple[int, ...]

    def __init__(self, values: Array, offsets: Array, shape: Sequence[int] | None = None) -> None:
        """Put values together.

        Args:
            values: Array or tensor ``[total, *inner]``.
            offsets: int64 ``[N + 1]`` of the same kind, or a list or tuple of integers,
                rising from 0 to ``total``.
            shape: Of the values; by default ``(N,)``.

        Raises:
            SchemaError: The offsets are not of this shape, or in a list not for these
                values; or either is no array or tensor.
        """
        numbers = offsets if isinstance(offsets, list | tuple) else None
        if numbers is not None:
            offsets = _offsets_of(numbers, values)
        for name, given in (("values", values), ("offsets", offsets)):
            refuse_masked(given, f"{name} of Ragged")
            if not getattr(given, "ndim", 0):
                raise SchemaError(
                    f"{name} of Ragged must be an array or tensor with an axis, got "
                    f"{shown(given)}. Put its numbers into an array."
                )
        count = len(offsets) - 1
        axes = (count,) if shape is None else tuple(shape)
        if offsets.ndim != 1 or count < 0 or math.prod(axes) != count:
            least = math.prod(axes) + 1 if shape is not None else "N + 1"
            raise SchemaError(
                f"offsets of Ragged must have shape [{least}] for values "
                f"of shape {list(axes) if shape is not None else '[N]'}, got "
                f"{list(offsets.shape)}. Pass where each value begins, and the end of "
                "the last."
            )
        if numbers is not None and (
            [*numbers] != sorted(numbers) or numbers[0] != 0 or numbers[-1] != len(values)
        ):
            raise SchemaError(
                f"offsets of Ragged must rise from 0 to {len(values)}, the number of "
                f"items, got {shown(numbers)}. Pass where each value begins, and the "
                "end of the last."
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "shape", axes)

    @classmethod
    def concatenate(cls, several: Sequence[Ragged], axis: int = 0) -> Ragged:
        """Join ragged values along an axis of their shape.

        Args:
            several: At least one, all of arrays or all of tensors, of one dtype.
            axis: 0 for more steps, 1 for longer windows.

        Raises:
            SchemaError: There is none, or they do not fit together.
        """
        if not len(several):
            raise SchemaError(
                "several must hold at least one Ragged, got none. Pass those to join."
            )
        first = several[0]
        for each in several:
            if not isinstance(each, Ragged):
                raise SchemaError(
                    f"several must hold Ragged, got {shown(each)}. Join arrays with numpy or torch."
                )
        if not -len(first.shape) <= axis < len(first.shape):
            raise SchemaError(
                f"axis must be in [0, {len(first.shape)}), got {axis}. Pass 0 for more steps."
            )
        axis %= len(first.shape)
        kinds = {
            (
                type(each.values),
                each.values.dtype,
                each.values.shape[1:],
                each.shape[:axis],
                each.shape[axis + 1 :],
            ): each
            for each in several
        }
        if len(kinds) > 1:
            one, other, *_ = kinds.values()
            raise SchemaError(
                f"several must be alike but for axis {axis}, got {one!r} and "
                f"{other!r}. Join those of one field."
            )
        totals = [len(each.values) for each in several]
        begins = [0, *np.cumsum(totals).tolist()]
        shifted = [
            each.offsets[:-1] + begin for each, begin in zip(several, begins[:-1], strict=True)
        ]
        values: Array
        offsets: Array
        if isinstance(first.values, np.ndarray):
            values = np.concatenate([each.values for each in several])
            offsets = np.concatenate([*shifted, np.array(begins[-1:])])
        else:
            import torch

            values = torch.cat([_indexable(each.values) for each in several])
            values = values.view(first.dtype)
            end = first.offsets.new_tensor(begins[-1:])
            offsets = torch.cat([*shifted, end])
        if axis == 0:
            steps = sum(each.shape[0] for each in several)
            return cls(values, offsets, (steps, *first.shape[1:]))
        every = cls(values, offsets)
        numbers, begin = [], 0
        for each in several:
            count = len(each.offsets) - 1
            numbers.append(np.arange(begin, begin + count).reshape(each.shape))
            begin += count
        joined: Ragged = every[np.concatenate(numbers, axis)]
        return joined

    @property
    def dtype(self) -> Any:
        """Dtype of the items."""
        return self.values.dtype

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of one item."""
        return tuple(self.values.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of values and offsets."""
        return int(self.values.nbytes + self.offsets.nbytes)

    @property
    def lengths(self) -> Array:
        """Items of each value, int64 of `shape`."""
        lengths = self.offsets[1:] - self.offsets[:-1]
        return lengths if len(self.shape) == 1 else lengths.reshape(self.shape)

    def __len__(self) -> int:
        """Length of the first axis of `shape`."""
        if not self.shape:
            raise TypeError("len() of a single value; its items are .values")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        """Values along the first axis; those of windows are ragged themselves."""
        if len(self.shape) == 1:
            for first, stop in pairwise(self.offsets.tolist()):
                yield self.values[first:stop]
            return
        for number in range(len(self)):
            yield self[number]

    def __getitem__(self, index: Any) -> Any:
        """Return a value, or some of them.

        Args:
            index: Anything that indexes an array of `shape`.

        Returns:
            The value ``[length, *inner]``, a view, where the index leads to one;
            otherwise `Ragged`, for slices of steps with views of these arrays.
        """
        if isinstance(index, slice) and self.shape:
            first, stop, step = index.indices(self.shape[0])
            if step == 1:
                return self._steps(first, max(first, stop))
        elif type(index) is int and len(self.shape) == 1:
            # Without the numbers of all values, as in a loop.
            number = index + self.shape[0] if index < 0 else index
            if not 0 <= number < self.shape[0]:
                raise IndexError(
                    f"index {index} is out of bounds for axis 0 with size {self.shape[0]}"
                )
            first, stop = int(self.offsets[number]), int(self.offsets[number + 1])
            return self.values[first:stop]
        numbers = self._numbers()[index]
        if numbers.ndim == 0:
            number = int(numbers)
            return self.values[int(self.offsets[number]) : int(self.offsets[number + 1])]
        shape, numbers = tuple(numbers.shape), numbers.reshape(-1)
        firsts = self.offsets[:-1][numbers]
        lengths = self.offsets[1:][numbers] - firsts
        offsets: Array
        items: Array
        if isinstance(self.values, np.ndarray):
            offsets = np.zeros(len(numbers) + 1, np.int64)
            np.cumsum(lengths, out=offsets[1:])
            items = np.arange(int(offsets[-1]))
            items += np.repeat(firsts - offsets[:-1], lengths)
            return Ragged(self.values[items], offsets, shape)
        import torch

        offsets = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
        items = torch.arange(int(offsets[-1]), device=offsets.device)
        items += torch.repeat_interleave(firsts - offsets[:-1], lengths)
        values = _indexable(self.values)[items].view(self.dtype)
        return Ragged(values, offsets, shape)

    def _steps(self, first: int, stop: int) -> Ragged:
        """Return steps ``[first, stop)``."""
        each = math.prod(self.shape[1:])
        offsets = self.offsets[first * each : stop * each + 1]
        begin, end = int(offsets[0]), int(offsets[-1])
        return Ragged(self.values[begin:end], offsets - begin, (stop - first, *self.shape[1:]))

    def _numbers(self) -> Array:
        """Return the number of each value, int64 of `shape`."""
        count = len(self.offsets) - 1
        if isinstance(self.offsets, np.ndarray):
            return np.arange(count).reshape(self.shape)
        import torch

        return torch.arange(count, device=self.offsets.device).reshape(self.shape)

    def __eq__(self, other: object) -> bool:
        # By identity a comparison with an array or number would be False, and no error.
        if self is other:
            return True
        raise TypeError(
            "Ragged is not compared by ==. Compare .values and .offsets, or the arrays "
            "of .padded()."
        )

    __hash__ = object.__hash__

    def __contains__(self, item: object) -> NoReturn:
        # Python would compare each value, and find no text among bytes.
        raise TypeError(
            "a value is not looked for among others of any length. Use .text(), or "
            "compare .values and .offsets."
        )

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        # By their lengths numpy would make an array of one batch and none of the next.
        raise TypeError(
            "values of different lengths make no array. Use .values and .offsets, or .padded()."
        )

    def __array_function__(self, *_: object) -> NoReturn:
        # numpy.array_equal would take the refusal above for a difference.
        raise TypeError(
            "numpy's functions take no values of different lengths. Use .values and "
            ".offsets, or .padded()."
        )

    def __repr__(self) -> str:
        return f"<Ragged {self.form} of {len(self.values)} items>"

    @property
    def form(self) -> str:
        """Dtype and axes as text, such as ``int32[256, *]``; ``*`` varies."""
        axes = ", ".join(map(str, (*self.shape, "*", *self.inner)))
        return f"{str(self.dtype).removeprefix('torch.')}[{axes}]"

    def reshape(self, *shape: int) -> Ragged:
        """Return the same values in another `shape`, such as windows of steps.

        Args:
            shape: With as many values.

        Raises:
            SchemaError: It has another number of values.
        """
        count = len(self.offsets) - 1
        sizes = [isinstance(axis, int | np.integer) and axis >= 0 for axis in shape]
        if not all(sizes) or math.prod(shape) != count:
            raise SchemaError(
                f"shape must be axes of {count} values together, got {shown(shape)}. "
                "Pass the length of each."
            )
        return Ragged(self.values, self.offsets, shape)

    def padded(
        self, length: int | None = None, value: float = 0, side: Literal["right", "left"] = "right"
    ) -> tuple[Array, Array]:
        """Pad all values to one length.

        Args:
            length: Items of each; None for those of the longest value here.
            value: What stands where a value has no item.
            side: Where it stands: behind the items, or before them.

        Returns:
            Array ``[*shape, length, *inner]``, and bool ``[*shape, length]``, true
            where there is an item.

        Raises:
            SchemaError: A value is longer than `length`, or an argument is not legal.
        """
        if side not in ("right", "left"):
            raise SchemaError(
                f"side must be 'right' or 'left', got {shown(side)}. It is where the "
                "padding stands."
            )
        lengths = self.lengths.reshape(-1)
        longest = int(lengths.max()) if len(lengths) else 0
        if length is None:
            length = longest
        elif not isinstance(length, int | np.integer) or length < longest:
            raise SchemaError(
                f"length must be an integer of at least {longest}, the items of the "
                f"longest value, got {shown(length)}. Leave it out for that."
            )
        full = (len(lengths), int(length), *self.inner)
        name = str(self.dtype).removeprefix("torch.")
        try:
            # torch would store another number in its place.
            with np.errstate(invalid="ignore"):
                filled = np.full(1, value, "float32" if name == "bfloat16" else name)
            if filled.dtype.kind in "biu" and filled[0] != value:
                raise ValueError
        except (OverflowError, TypeError, ValueError):
            raise SchemaError(
                f"value must be a number that {name} holds, got {shown(value)}. Choose another."
            ) from None
        items: Array
        if isinstance(self.values, np.ndarray):
            array = np.full(full, value, self.dtype)
            items = np.arange(length)
        else:
            import torch

            array = self.values.new_full(full, value)
            items = torch.arange(length, device=self.values.device)
        if side == "right":
            mask = items < lengths[:, None]
        else:
            mask = items >= length - lengths[:, None]
        _indexable(array)[mask] = _indexable(self.values)
        shape = (*self.shape, int(length))
        return array.reshape(*shape, *self.inner), mask.reshape(shape)

    def text(self, errors: str = "strict") -> Any:
        """Decode the values as UTF-8.

        Args:
            errors: What to do with bytes that are no UTF-8; see `bytes.decode`.

        Returns:
            A list of `str` for each axis of `shape`; of a single value the `str`.

        Raises:
            SchemaError: They are not bytes, or some are no UTF-8.
        """
        if self.inner or str(self.dtype).removeprefix("torch.") != "uint8":
            raise SchemaError(
                f"text must be of uint8[*], got {self.form}. Declare the field by Field.text."
            )
        host = self.numpy()
        data, bounds = host.values.tobytes(), host.offsets.tolist()
        texts: list[Any] = []
        for first, stop in pairwise(bounds):
            try:
                texts.append(data[first:stop].decode("utf-8", errors))
            except UnicodeDecodeError as error:
                raise SchemaError(
                    f"value {len(texts)} is no UTF-8: {error.reason} at byte "
                    f"{error.start}. Pass errors='replace', or read its bytes."
                ) from error
        for axis in reversed(self.shape[1:]):
            count = len(texts) // axis if axis else math.prod(self.shape[:-1])
            texts = [texts[n * axis : (n + 1) * axis] for n in range(count)]
        return texts if self.shape else texts[0]

    def tensors(self) -> Ragged:
        """Return the same with tensors in place of arrays, without a copy."""
        if not isinstance(self.values, np.ndarray):
            return self
        from torch import from_numpy

        return Ragged(from_numpy(self.values), from_numpy(self.offsets), self.shape)

    def numpy(self) -> Ragged:
        """Return the same with arrays in place of tensors; bfloat16 as float32."""
        if isinstance(self.values, np.ndarray):
            return self
        values, offsets = self.values.detach().cpu(), self.offsets.cpu()
        if str(values.dtype) == "torch.bfloat16":
            values = values.float()
        return Ragged(values.numpy(), offsets.numpy(), self.shape)

    def torch(self, device: str | Device | None = None) -> torch.Tensor:
        """Return a jagged nested tensor ``[N, *, *inner]``, on the CPU without a copy.

        Args:
            device: Where to; None leaves it where the values are.

        Returns:
            Of windows the values of all steps, window by window: N is B times T.
        """
        import torch

        here = self.tensors()
        if device is not None:
            here = here.to(device)
        make = torch.nested.nested_tensor_from_jagged
        jagged: torch.Tensor = make(here.values, here.offsets)
        return jagged

    def to(self, device: str | Device, non_blocking: bool = False) -> Ragged:
        """Return the same on another device; of tensors.

        Args:
            device: Such as ``"cuda"``.
            non_blocking: Let the copy go on while the program does; from pinned
                memory only.
        """
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Ragged:
        """Return the same in pinned memory; of tensors."""
        return self._map(lambda tensor: tensor.pin_memory())

    def view(self, dtype: Any) -> Ragged:
        """Return the same with the items' bytes read as another dtype of their size.

        Args:
            dtype: Such as ``torch.bfloat16`` for uint16.
        """
        return Ragged(self.values.view(dtype), self.offsets, self.shape)

    def copy(self) -> Ragged:
        """Return the same in memory of its own, without what surrounds a view."""
        if isinstance(self.values, np.ndarray):
            return Ragged(self.values.copy(), self.offsets.copy(), self.shape)
        return self._map(lambda tensor: tensor.clone())

    def _map(self, change: Any) -> Ragged:
        if isinstance(self.values, np.ndarray):
            raise SchemaError(
                "ragged holds numpy arrays, and only tensors can be moved. Call "
                "tensors() first, or torch(device)."
            )
        return Ragged(change(self.values), change(self.offsets), self.shape)


def _offsets_of(numbers: Sequence[int], values: Array) -> Array:
    """Integers as the offsets of an array or tensor of values."""
    if not all(isinstance(number, int | np.integer) for number in numbers):
        raise SchemaError(
            f"offsets of Ragged must be integers, got {shown(numbers)}. Pass where "
            "each value begins, and the end of the last."
        )
    if not hasattr(values, "device") or isinstance(values, np.ndarray):
        return np.array(numbers, np.int64)
    import torch

    return torch.tensor(numbers, dtype=torch.int64, device=values.device)


def _indexable(values: Array) -> Array:
    """Return an array, or a tensor as a dtype of its size that torch can index."""
    name = str(values.dtype)
    if name not in ("torch.uint16", "torch.uint32", "torch.uint64"):
        return values
    import torch

    # Of the wide unsigned dtypes torch can index none on every device.
    return values.view(getattr(torch, name.removeprefix("torch.u")))
