"""Transitions of pytorchrl as rows of a ring, and rows as what it is given back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from mmreplay.adapters.common.location import PickledByPath
from mmreplay.adapters.common.values import LOOK_ERRORS, Look, array_of
from mmreplay.adapters.pytorchrl.data import (
    DONE2,
    ENDED,
    KEY,
    NARROW,
    PRIORITY,
    UNSTORED,
    Columns,
    Hooks,
    Slice,
    described,
    put,
    shapes_of,
    zeros_like,
)
from mmreplay.buffer.replay_buffer import ReplayBuffer as Ring
from mmreplay.errors import SchemaError
from mmreplay.nesting import unflatten
from mmreplay.samplers.base import Sampler
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.transforms.base import Transform


class RowStorage(Hooks, PickledByPath):
    """The rows of `RingStorage` by pytorchrl's keys; the first row declares them."""

    storage_tensors: ClassVar[tuple[str, ...]] = ()
    _unstored: tuple[str, ...] = ()
    _max_size: int
    _seed: int
    _ring: Ring | None
    _empty: dict[str, Any]
    _nested: bool
    _plan: tuple[str, ...] | None = None
    _keys_of_none: ClassVar[bool] = False
    """Whether slices have keys of None, where nothing was inserted."""

    def _sampler(self) -> Sampler:
        return UniformSampler(self._seed)

    def _transforms(self) -> tuple[Transform, ...]:
        return ()

    @property
    def _made(self) -> Ring:
        """The ring, where a row has declared it."""
        assert self._ring is not None
        return self._ring

    def init_tensors(self, sample: Mapping[str, Any]) -> None:
        """Make the ring for transitions like a sample, ``[num_proc, *shape]`` each.

        Raises:
            SchemaError: The environments of two values differ in number.
        """
        if self._ring is not None:
            return
        columns = {path: value[None] for path, value in self._columns(sample).items()}
        self._make(columns)

    def _make(self, columns: Columns) -> None:
        """Make the ring for rows ``[T, num_proc, *shape]``."""
        schema, num_envs = described(columns)
        self._plan = None
        self._nested = any("/" in path for path in schema.paths)
        self._ring = self.home.ring(
            schema,
            self._max_size,
            num_envs,
            sampler=self._sampler(),
            transforms=self._transforms(),
            user_metadata={KEY: {UNSTORED: shapes_of(self._empty)}},
        )

    def _recall(self) -> None:
        """Restore the state that an existing ring does not store."""
        unstored = self._made.metadata.user.get(KEY, {}).get(UNSTORED, {})
        for path, shape in unstored.items():
            put(self._empty, path, np.zeros(shape, np.float32))
        self._nested = any("/" in path for path in self._made.schema.paths)

    def _columns(self, sample: Mapping[str, Any], lead: int = 0) -> Columns:
        """Values of a transition, or of a slice (lead 1), by path, as they are kept."""
        found: Columns = {}
        for key in self.storage_tensors:
            value = sample.get(key)
            if value is None or key in self._empty:
                continue
            if key in self._unstored:
                self._empty[key] = zeros_like(value, lead)
            elif isinstance(value, Mapping):
                for name, part in value.items():
                    self.insert_single_tensor_slice(found, f"{key}/{name}", part)
            else:
                self.insert_single_tensor_slice(found, key, value)
        axes = 1 + lead
        flat = {p: list(array.shape) for p, array in found.items() if array.ndim < axes}
        if flat:
            raise SchemaError(
                f"transition must have at least {axes} axes, the last of them of the "
                f"environments, got shapes {flat}. Values are not repeated over "
                "environments."
            )
        if DONE2 in found:
            ends = found[DONE2]
            if ends.shape[-1:] != (1,):
                raise SchemaError(
                    f"{DONE2} must have one number per environment and a last axis of "
                    f"1, got shape {list(ends.shape)}. Unsqueeze it."
                )
            found[ENDED] = ends[..., 0] != 0
        return found

    def _plain(self, sample: Mapping[str, Any], look: Look) -> dict[str, object] | None:
        """A transition as it mostly comes, which the ring is asked to take as it is.

        Args:
            sample: The transition.
            look: See `LOOKS`.

        Returns:
            What it takes by path; None where a value is not a plain tensor.
        """
        if self._plan is None:
            self._plan = self._planned()
        found: dict[str, object] = {}
        try:
            for path in self._plan:
                found[path] = look(sample[path])
            if DONE2 in found:
                ends = sample[DONE2].numpy()
                found[ENDED] = ends.reshape(ends.shape[:-1]) != 0
        except (*LOOK_ERRORS, ValueError):
            return None
        return found or None

    def _planned(self) -> tuple[str, ...]:
        """Keys to be stored of every transition, if that is all there is to do."""
        paths = self._made.schema.fields.keys() - {ENDED}
        plain = paths <= set(self.storage_tensors)
        plain &= all(key in self._empty for key in self._unstored)
        # A subclass may make other values of what it is given.
        made = type(self).insert_single_tensor_slice
        plain &= made is RowStorage.insert_single_tensor_slice
        return tuple(paths) if plain else ()

    def insert_single_tensor_slice(
        self, tensor_storage: Columns | Slice, tensor_key: str, tensor_values: Any
    ) -> int:
        """Put values among the rows that are about to be inserted.

        Args:
            tensor_storage: Those rows by path. Or `data`, which stays as it is: rows
                come with `insert_data_slice` and `insert_transition`.
            tensor_key: The path.
            tensor_values: ``[T, num_proc, *shape]``.

        Returns:
            T.

        Raises:
            SchemaError: The values are no numbers of one shape, or are not like the
                rows of `data`.
        """
        array = array_of(tensor_values, tensor_key)
        if isinstance(tensor_storage, Slice):
            stored = tensor_storage.get(tensor_key)
            rows = None if stored is None else stored.shape[1:]
            if array.ndim < 2 or rows not in (None, array.shape[1:]):
                expected = "num_proc, ..." if rows is None else f"{list(rows)}"[1:-1]
                raise SchemaError(
                    f"{tensor_key} must have the shape [steps, {expected}], got "
                    f"{list(array.shape)}."
                )
            return len(array)
        if array.dtype not in NARROW:
            array = array.astype(np.float32, copy=False)
        tensor_storage[tensor_key] = array
        return len(array) if array.ndim else 0

    def _known(self, columns: Columns) -> dict[str, Any]:
        """Values under the ring's paths, nested; keys of later samples are let go."""
        paths = self._made.schema.fields.keys()
        known = {path: columns[path] for path in paths if path in columns}
        return known if not self._nested else unflatten(known)

    def _narrowed(self, columns: Columns) -> Columns:
        """Values that are float32, as in slices, as bytes where the ring keeps those.

        What is no whole number is left as it is, for the ring to refuse.
        """
        found = dict(columns)
        for path, field in self._made.schema.fields.items():
            if path in found and found[path].dtype != field.numpy in NARROW:
                with np.errstate(invalid="ignore"):
                    cast = found[path].astype(field.numpy)
                if (cast == found[path]).all():
                    found[path] = cast
        return found

    def read(self, first: int, stop: int) -> dict[str, Any]:
        """Rows of positions ``[first, stop)``; see `get_data_slice`."""
        found: dict[str, Any] = dict.fromkeys(self.storage_tensors)
        found |= self._empty
        if self._ring is None:
            return found
        sequences = np.arange(first, stop)[:, None]
        envs = np.arange(self._ring.num_envs)
        for path in self._paths:
            array = self._ring.get_field(path, envs, sequences).astype(np.float32)
            put(found, path, array)
        return found

    def sliced_rows(self, first: int, stop: int) -> dict[str, Any]:
        """Rows of positions ``[first, stop)``, as `data` has them."""
        found = self.read(first, stop) | self._next_to(first, stop)
        if self._keys_of_none:
            return found
        return {key: value for key, value in found.items() if value is not None}

    def _next_to(self, first: int, stop: int) -> dict[str, Any]:
        """Return what slices have beside the storage's keys."""
        return {}

    @property
    def _paths(self) -> tuple[str, ...]:
        ours = (ENDED, PRIORITY)
        return tuple(path for path in self._made.schema.paths if path not in ours)
