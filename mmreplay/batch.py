"""A draw and its data: numpy from a buffer, torch on request."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Sequence, ValuesView
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from mmreplay.errors import SchemaError, refuse_masked, shown
from mmreplay.nesting import SEPARATOR, meant, under, unflatten
from mmreplay.notebook import html_table
from mmreplay.ragged import Memory, Ragged, join_columns
from mmreplay.schema.convert import on_host

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import device as Device

Array = Any
"""``numpy.ndarray`` in a batch from a buffer, ``torch.Tensor`` after `Batch.torch`.

`Ragged` of either where a field varies from step to step."""

DRAWN = frozenset(("env_ids", "positions", "probabilities", "weights"))
"""Columns of every draw."""

OWN = DRAWN | {"mask", "key", "window_positions", "offsets", "buffer_ids"}
"""Attributes of a batch that hold numbers, as fields do."""

Fragment: TypeAlias = tuple[int, int, int]
"""Rows of a part that follow each other in a joined batch: which part, the first row,
and one past the last."""


class SharedRows(Protocol):
    """Memory that batches to be joined were gathered into, each its own rows."""

    def joined(
        self, columns: Sequence[Array], name: str, order: Sequence[Fragment] | None = None
    ) -> Array | None:
        """Return one array of the rows of a field; None where they are not there."""


@dataclass(slots=True, repr=False)  # frozen, each costs a microsecond more
class Batch:
    """Steps of a buffer, B of them, or windows of T steps each.

    A batch is a mapping from field paths to arrays: `keys`, `values`, `items`, `get`,
    iteration, ``in``, ``dict(batch)`` and ``**batch``. The path of a nested field leads
    to its array, and the name of a branch to a nested dict of the arrays below it, as
    in `data`. Keys are the paths of arrays alone, so that each value is one array.
    `len` is the number of steps, or windows, and not of fields. It is no
    `collections.abc.Mapping`: torch's DataLoader would take it apart to pin its memory.

    For example::

        batch = buffer.sample(256)
        batch["observation/pixels"]  # an array [256, 84, 84]
        batch["observation"]  # {"pixels": ..., "joints": ...}
        shapes = {path: array.shape for path, array in batch.items()}
        learn(**batch.data)  # nested observations as one argument

    A field of the schema that is named like an attribute, such as ``weights``, is
    ``batch["weights"]``; ``batch.weights`` stays what the sampler gave.

    Small fields are views of one packed array, so their rows are strided;
    ``sample(..., contiguous=True)`` copies them apart.

    Attributes:
        fields: Array ``[B, *shape]`` by path, ``next_observation/...`` included; of
            windows ``[B, T, *shape]``. A field that varies is `Ragged`, of shape
            ``(B,)`` or ``(B, T)``.
        env_ids: int64 ``[B]``.
        positions: int64 ``[B]``, the step drawn of each window.
        probabilities: float64 ``[B]``.
        weights: float32 ``[B]``.
        mask: bool ``[B, T]`` of windows: true where a step belongs to its window and
            can be learned from. Where next observations are derived it is false also at
            the last step of an episode that ended without a known one, unless the
            transform `WithoutNext` leaves them out, and of the steps of ragged episodes
            there is a mask, too, ``[B]``. Else None.
        bfloat16: Paths whose arrays hold the bits of bfloat16 numbers.
        key: Seed of this batch's random transforms; `take(..., key=batch.key)`
            reproduces them.
        window_positions: int64 ``[B, T]`` of windows, else None.
        offsets: int64 ``[N + 1]`` where the steps are those of N episodes one after
            another: where each begins, and B; else None.
        buffer_ids: int64 ``[B]``, which buffer each step is of, where `concat` drew
            from several; else None.
        buffer: uuid of the buffer it is of, or b"" where that is not one buffer.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> batch = buffer.sample(32)
        >>> batch["observation"].shape, batch.weights.dtype
        ((32, 4), dtype('float32'))
        >>> batch.torch()["reward"].shape
        torch.Size([32])
    """

    fields: dict[str, Array]
    env_ids: Array
    positions: Array
    probabilities: Array
    weights: Array
    mask: Array | None = None
    bfloat16: frozenset[str] = frozenset()
    key: int = 0
    window_positions: Array | None = None
    offsets: Array | None = None
    buffer_ids: Array | None = None
    buffer: bytes = b""
    _drawn: dict[str, Array] | None = field(default=None, init=False, compare=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Array:
            """Make a tensor of a column of the draw, when first asked for.

            Most learners never look at them, and a tensor costs as much as gathering
            ten rows.
            """
            drawn = self._drawn if name in DRAWN else None
            if drawn is None:
                raise AttributeError(f"Batch has no attribute {name!r}; a field is batch[{name!r}]")
            import torch

            column = torch.from_numpy(drawn[name])
            setattr(self, name, column)
            return column

    def drawn(self, name: str) -> Array:
        """Return a column of the draw, as the array that no tensor was made of yet.

        Args:
            name: One of `DRAWN`.
        """
        try:
            # What it is set to, without `__getattr__`, which would make a tensor.
            return _SLOTS[name].__get__(self)
        except AttributeError:
            assert self._drawn is not None
            return self._drawn[name]

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Return the state to copy or pickle: each column once, as it is used."""
        state = {name: getattr(self, name) for name in self.__slots__}
        return None, state | {"_drawn": None}

    @property
    def data(self) -> dict[str, Any]:
        """The fields as nested plain dicts."""
        return unflatten(self.fields)

    def __len__(self) -> int:
        """Steps, or windows, in the batch."""
        return len(self.positions)

    def __repr__(self) -> str:
        """Say what the fields are, not what is in them."""
        fields = [f"{path} {''.join(_form(a))}" for path, a in self.fields.items()]
        kind = "steps" if self.window_positions is None else "windows"
        return f"<Batch of {len(self)} {kind}: {', '.join(fields)}>"

    def _repr_html_(self) -> str:
        """Return what the fields are as a table, for notebooks."""
        kind = "steps" if self.window_positions is None else "windows"
        rows = [(path, *_form(array)) for path, array in self.fields.items()]
        title = f"Batch of {len(self)} {kind}"
        return html_table(title, ("field", "dtype", "shape"), rows)

    def __getitem__(self, path: str) -> Array:
        """One field by path, such as ``"observation/pixels"``, or a branch of fields.

        Returns:
            The field's array; for a branch, such as ``"observation"``, a nested dict of
            the arrays below it.

        Raises:
            SchemaError: There is no such field.
        """
        try:
            return self.fields[path]
        except KeyError:
            if isinstance(path, str) and (below := self._below(path)):
                cut = len(path) + len(SEPARATOR)
                return unflatten({each[cut:]: self.fields[each] for each in below})
            if not isinstance(path, str):
                raise SchemaError(
                    f"batch has no step {shown(path)}. Pass the path of a field; a "
                    "DataLoader with batch_sampler= needs collate_fn=mmreplay.collate."
                ) from None
            way_out = meant(path, self.fields)
            if path.startswith("next_"):
                way_out = (
                    "Batches hold next observations of the field that plays the "
                    "observation, unless a transform is WithoutNext."
                )
            raise SchemaError(
                f"batch has no field {shown(path)}, only {list(self.fields)}. {way_out}"
            ) from None

    def _below(self, path: str) -> tuple[str, ...]:
        return tuple(each for each in under(self.fields, path) if each != path)

    def __contains__(self, path: object) -> bool:
        """Whether there is a field, or a branch of fields, of that path."""
        return path in self.fields or (isinstance(path, str) and bool(self._below(path)))

    def __iter__(self) -> Iterator[str]:
        """Paths of the fields."""
        return iter(self.fields)

    def keys(self) -> KeysView[str]:
        """Paths of the fields."""
        return self.fields.keys()

    def values(self) -> ValuesView[Array]:
        """Arrays of the fields."""
        return self.fields.values()

    def items(self) -> ItemsView[str, Array]:
        """Pairs of path and array."""
        return self.fields.items()

    def get(self, path: str, default: Any = None) -> Any:
        """Return ``batch[path]``, or the default where there is no such field.

        Args:
            path: A field or a branch of fields, such as ``"observation"``.
            default: Returned in its place.
        """
        try:
            return self[path]
        except SchemaError:
            return default

    def _ipython_key_completions_(self) -> list[str]:
        """What IPython offers after ``batch["``: fields, and branches of fields."""
        found: dict[str, None] = {}
        for path in self.fields:
            names = path.split(SEPARATOR)
            for depth in range(1, len(names) + 1):
                found[SEPARATOR.join(names[:depth])] = None
        return list(found)

    @classmethod
    def join(
        cls,
        batches: Sequence[Batch],
        order: Sequence[Fragment] | None = None,
        *,
        pad: bool = False,
        memory: Memory | None = None,
        shared: SharedRows | None = None,
    ) -> Batch:
        """Join batches to one, whose key is 0.

        Args:
            batches: At least one, all of arrays or all of tensors, with the same
                fields. One alone keeps its arrays, but those that are read-only: these
                are copied.
            order: Rows of the batches in the order that is wanted; by default those of
                one batch after another.
            pad: They are padded episodes; pad all to the longest.
            memory: Where arrays of fields come from.
            shared: What the batches were gathered into, if they were: such rows are not
                copied.

        Raises:
            SchemaError: Their fields or windows differ, there is none, or they are
                ragged episodes.

        Example:
            >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
            >>> len(mr.Batch.join([buffer.sample(32), buffer.sample(8)]))
            40
        """
        if not batches:
            raise SchemaError("batches must hold at least one batch, got none. Add one.")
        for batch in batches:
            if batch.offsets is not None:
                raise SchemaError(
                    "batches must be of steps or windows, got ragged episodes. Draw "
                    "episodes with layout='padded'."
                )
            if pad and batch.mask is None:
                raise SchemaError(
                    "pad=True needs padded episodes, got a batch without a mask. Leave pad out."
                )
        if pad:
            longest = max(_window_length(batch) for batch in batches)
            batches = [_padded(batch, longest) for batch in batches]
        first, *others = batches
        if others:
            forms = _forms(first)
            for batch in others:
                if _forms(batch) != forms:
                    # As text only now: to write it takes as long as to join.
                    raise SchemaError(
                        f"concat: fields are {_shapes(batch)} in one batch and "
                        f"{_shapes(first)} in the first. Give all buffers the same "
                        "transforms and the same kind of sampler, of single steps or of "
                        "windows of one length."
                    )

        def joined(columns: list[Array], memory: Memory | None = None) -> Array:
            if order is not None:
                columns = [columns[number][first:stop] for number, first, stop in order]
            return join_columns(columns, memory=memory)

        def column(name: str) -> Array:
            columns = [getattr(batch, name) for batch in batches]
            return None if columns[0] is None else joined(columns)

        fields = {}
        for path, array in first.fields.items():
            columns = [batch.fields[path] for batch in batches]
            whole = None
            if shared is not None and not isinstance(array, Ragged):
                whole = shared.joined(columns, path, order)
            fields[path] = joined(columns, memory) if whole is None else whole
        return replace(
            first,
            fields=fields,
            env_ids=column("env_ids"),
            positions=column("positions"),
            probabilities=column("probabilities"),
            weights=column("weights"),
            mask=column("mask"),
            window_positions=column("window_positions"),
            buffer_ids=column("buffer_ids"),
            key=0,
            buffer=b"",
        )

    def select(self, rows: NDArray[np.int64]) -> Batch:
        """Return some steps, or windows, as numpy arrays.

        Args:
            rows: int64 ``[N]``, which of them.

        Raises:
            SchemaError: These are ragged episodes.

        Example:
            >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
            >>> buffer.sample(32).select(np.array([3, 0]))["observation"].shape
            (2, 4)
        """
        if self.offsets is not None:
            raise SchemaError(
                "batch holds ragged episodes, and select takes single steps. Index the "
                "fields by batch.offsets, or draw with layout='padded'."
            )

        def some(array: Array) -> Array:
            if array is None:
                return None
            return (array.numpy() if isinstance(array, Ragged) else as_numpy(array))[rows]

        return replace(
            self,
            fields={path: some(array) for path, array in self.fields.items()},
            env_ids=some(self.env_ids),
            positions=some(self.positions),
            probabilities=some(self.probabilities),
            weights=some(self.weights),
            mask=some(self.mask),
            window_positions=some(self.window_positions),
            buffer_ids=some(self.buffer_ids),
        )

    def torch(self, device: str | Device | None = None) -> Batch:
        """Return the batch as tensors, on the CPU without a copy.

        Args:
            device: Where to; None leaves them on the CPU.
        """
        import torch

        if self._drawn is not None or isinstance(self.positions, torch.Tensor):
            return self if device is None else self.to(device)
        from_numpy = torch.from_numpy
        fields = {
            path: array.tensors() if type(array) is Ragged else from_numpy(array)
            for path, array in self.fields.items()
        }
        for path in self.bfloat16:
            if path in fields:
                fields[path] = fields[path].view(torch.bfloat16)
        batch = Batch.__new__(Batch)
        batch.fields, batch.bfloat16, batch.key = fields, self.bfloat16, self.key
        batch.buffer = self.buffer
        batch._drawn = {
            "env_ids": self.env_ids,
            "positions": self.positions,
            "probabilities": self.probabilities,
            "weights": self.weights,
        }
        batch.mask = None if (m := self.mask) is None else from_numpy(m)
        batch.window_positions = None if (w := self.window_positions) is None else from_numpy(w)
        batch.offsets = None if (o := self.offsets) is None else from_numpy(o)
        batch.buffer_ids = None if (b := self.buffer_ids) is None else from_numpy(b)
        return batch if device is None else batch.to(device)

    def to(self, device: str | Device, non_blocking: bool = False) -> Batch:
        """Return a batch of tensors on another device.

        Args:
            device: Such as ``"cuda"``.
            non_blocking: Let the copy go on while the program does; from pinned
                memory only.
        """
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return a batch of tensors in pinned memory; torch's DataLoader calls it."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Any) -> Batch:
        if not hasattr(self.positions, "pin_memory"):
            raise SchemaError(
                "batch holds numpy arrays, and only tensors can be moved or pinned. "
                "Call batch.torch(device)."
            )
        return replace(
            self,
            fields={path: change(tensor) for path, tensor in self.fields.items()},
            env_ids=change(self.env_ids),
            positions=change(self.positions),
            probabilities=change(self.probabilities),
            weights=change(self.weights),
            mask=None if self.mask is None else change(self.mask),
            window_positions=None if (w := self.window_positions) is None else change(w),
            offsets=None if self.offsets is None else change(self.offsets),
            buffer_ids=None if self.buffer_ids is None else change(self.buffer_ids),
        )


def as_numpy(values: Any) -> NDArray[Any]:
    """Return an array, also of a tensor that is on a device or has a gradient."""
    if hasattr(values, "detach"):
        values = on_host(values).numpy()
    refuse_masked(values, "values")
    return np.asarray(values)


def _padded(batch: Batch, length: int) -> Batch:
    """Pad windows to a length with their last step, which the mask then leaves out."""
    missing = length - _window_length(batch)

    def repeat_last(array: Array) -> Array:
        return join_columns([array, *[array[:, -1:]] * missing], 1)

    def append_false(array: Array) -> Array:
        last = array[:, -1:]
        return join_columns([array, *[last & ~last] * missing], 1)

    return replace(
        batch,
        fields={
            path: (
                append_false(array)
                if path == "is_first" and "bool" in str(array.dtype)
                else repeat_last(array)
            )
            for path, array in batch.fields.items()
        },
        mask=append_false(batch.mask),
        window_positions=repeat_last(batch.window_positions),
    )


def _window_length(batch: Batch) -> int:
    assert batch.mask is not None
    return int(batch.mask.shape[1])


def _forms(batch: Batch) -> tuple[Any, ...]:
    """Dtype and shape of a step of each field, and what the draw says of the steps."""
    fields = {
        path: (a.dtype, a.shape[1:], a.inner) if isinstance(a, Ragged) else (a.dtype, a.shape[1:])
        for path, a in batch.fields.items()
    }
    drawn = batch.mask is None, batch.window_positions is None, batch.buffer_ids is None
    return fields, batch.bfloat16, drawn


def _shapes(batch: Batch) -> dict[str, str]:
    """Dtype and shape of a step of each field and of what the draw says, as text."""
    found = {
        path: array.form.replace(f"[{array.shape[0]}, ", "[", 1)
        if isinstance(array, Ragged)
        else f"{'bfloat16' if path in batch.bfloat16 else array.dtype}{list(array.shape[1:])}"
        for path, array in sorted(batch.fields.items())
    }
    for name in ("mask", "window_positions", "buffer_ids"):
        if getattr(batch, name) is not None:
            found[f"batch.{name}"] = str(list(getattr(batch, name).shape[1:]))
    return found


def _form(array: Array) -> tuple[str, str]:
    """Dtype and shape of a field, as text."""
    dtype = str(array.dtype).removeprefix("torch.")
    if isinstance(array, Ragged):
        return dtype, array.form.removeprefix(dtype)
    return dtype, str(list(array.shape))


_SLOTS: dict[str, Any] = {name: vars(Batch)[name] for name in DRAWN}
"""What reads and sets these attributes of a batch."""
