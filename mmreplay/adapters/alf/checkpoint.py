"""States of alf's own buffers: rows by slot, with heads and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from mmreplay.adapters.alf.nests import STEM, Columns, array
from mmreplay.adapters.alf.trees import SumSegmentTree
from mmreplay.errors import FormatError
from mmreplay.schema import Field

Ids = NDArray[np.int64]
HEADS, SIZES, MASSES = "_current_pos", "_current_size", "_sum_tree._values"


@dataclass(frozen=True, slots=True)
class Foreign:
    """The content of such a state.

    Attributes:
        columns: Leaves ``[E, L, *shape]``, a position's slot being its rest by L.
        heads: int64 ``[E]``, the next position of each environment.
        sizes: int64 ``[E]``, rows of each that are there.
        masses: Priorities ``[E, L]``, 0 where a row started no window; or None.
    """

    columns: Columns
    heads: Ids
    sizes: Ids
    masses: NDArray[Any] | None

    def steps(self) -> Iterator[tuple[Columns, Ids]]:
        """Yield rows of environments, oldest first, and the environments."""
        length = next(iter(self.columns.values())).shape[1]
        oldest = self.heads - self.sizes
        for age in range(int(self.sizes.max(initial=0))):
            ids = np.flatnonzero(age < self.sizes)
            slots = (oldest + age)[ids] % length
            yield ({path: column[ids, slots] for path, column in self.columns.items()}, ids)

    def priorities(self) -> tuple[Ids, Ids, NDArray[Any]]:
        """Return environments, positions from the oldest row, and priorities."""
        if self.masses is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
        ids = np.repeat(np.arange(len(self.sizes)), self.sizes)
        ages = np.arange(len(ids)) - np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)
        slots = ((self.heads - self.sizes)[ids] + ages) % self.masses.shape[1]
        values = self.masses[ids, slots]
        some = values > 0
        return ids[some], ages[some], values[some]


def read(fields: Mapping[str, Field], num_envs: int, state: Mapping[str, Any]) -> Foreign:
    """Read a state.

    Args:
        fields: Of the leaves, by path.
        num_envs: Environments.
        state: Tensors by name: a leaf's is its path, joined by ``|``.

    Raises:
        FormatError: A leaf or a counter is not there, or of another shape.
    """
    counters = [array(_entry(state, name)).astype(np.int64) for name in (HEADS, SIZES)]
    heads, sizes = (_shaped(c, (num_envs,), HEADS) for c in counters)
    columns: Columns = {}
    length = 0
    for path, field in fields.items():
        name = "|".join(map(unquote, path.removeprefix(f"{STEM}/").split("/")))
        column = array(_entry(state, name), bits=field.dtype == "bfloat16")
        length = length or (column.shape[1] if column.ndim > 1 else 0)
        columns[path] = _shaped(column, (num_envs, length, *field.shape), name)
    if (sizes < 0).any() or (sizes > np.minimum(heads, length)).any():
        raise FormatError(
            f"state of alf: sizes must be in [0, {length}] and at most the positions "
            f"{heads.tolist()}, got {sizes.tolist()}. The state is damaged."
        )
    masses = None
    if MASSES in state:
        tree = SumSegmentTree(num_envs * length)
        tree.load_state_dict({"_values": state[MASSES]})
        masses = array(tree[np.arange(tree.capacity)]).reshape(num_envs, length)
    return Foreign(columns, heads, sizes, masses)


def _entry(state: Mapping[str, Any], name: str) -> Any:
    if name not in state:
        raise FormatError(
            f"state of alf has no {name!r}, only {sorted(state)[:8]}. Load it into a "
            "buffer of the data_spec that it was saved with."
        )
    return state[name]


def _shaped(values: NDArray[Any], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    if values.shape != shape:
        raise FormatError(
            f"state of alf: {name!r} must have shape {list(shape)}, got "
            f"{list(values.shape)}. Load it into a buffer of the data_spec and "
            "environments that it was saved with."
        )
    return values
