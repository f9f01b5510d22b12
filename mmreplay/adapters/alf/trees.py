"""alf's segment trees, over the trees that mmreplay draws with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.adapters.alf.errors import RefusedError
from mmreplay.adapters.alf.nests import array
from mmreplay.samplers import sum_tree
from mmreplay.samplers.sum_tree import Op, SumTree

OPS: dict[Any, Op] = {
    torch.add: "sum",
    torch.max: "max",
    torch.maximum: "max",
    torch.min: "min",
    torch.minimum: "min",
}


class SegmentTree:
    """Numbered leaves and their sum, maximum or minimum.

    Unset leaves are 0, as in alf, so the minimum is 0 until every leaf is set. Sums are
    computed in float64, whatever the dtype of the results.

    Example:
        >>> tree = SegmentTree(4, torch.max)
        >>> tree[torch.tensor([0, 2])] = torch.tensor([1.0, 3.0])
        >>> tree.summary()
        tensor(3.)
    """

    def __init__(
        self,
        capacity: int,
        op: Callable[..., Any],
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
        name: str = "SegmentTree",
    ) -> None:
        """Make a tree.

        Args:
            capacity: Leaves.
            op: ``torch.add``, ``torch.max`` or ``torch.min``, or its name.
            dtype: Of what is given back.
            device: Of what is given back.
            name: Kept.

        Raises:
            RefusedError: The op is another one.
        """
        kind = op if isinstance(op, str) else OPS.get(op)
        if kind not in ("sum", "max", "min"):
            raise RefusedError(f"op must be torch.add, torch.max or torch.min, got {op!r}.")
        self._capacity, self._dtype, self._device = int(capacity), dtype, device
        self.name = name
        if kind == "sum":
            self._tree: SumTree | sum_tree.SegmentTree = SumTree(self._capacity)
        else:
            self._tree = sum_tree.SegmentTree(self._capacity, kind)
            self._tree.fill(np.zeros(self._capacity))

    @property
    def capacity(self) -> int:
        """Leaves."""
        return self._capacity

    def __setitem__(self, indices: Any, values: Any) -> None:
        """Write leaves; the last of equal indices wins.

        Args:
            indices: int64 ``[B]``, in ``[0, capacity)``.
            values: ``[B]``; of sums at least 0.

        Raises:
            RefusedError: Shapes differ, an index is outside, a value negative or NaN.
        """
        where, what = array(indices), np.asarray(array(values), np.float64)
        if where.ndim != 1 or where.shape != what.shape:
            raise RefusedError(
                "tree: indices and values must have one axis and the same length, got "
                f"{list(where.shape)} and {list(what.shape)}. Flatten them."
            )
        if len(where):
            self._said(self._tree.set, where, what)

    def __getitem__(self, indices: Any) -> torch.Tensor:
        """Read leaves of any shape of indices.

        Raises:
            RefusedError: An index is outside.
        """
        return self._tensor(self._said(self._tree.get, array(indices)))

    def summary(self) -> torch.Tensor:
        """Return the sum, maximum or minimum of all leaves, without axes."""
        tree = self._tree
        total = tree.total if isinstance(tree, SumTree) else tree.summary
        return self._tensor(np.asarray(total))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the leaves under the names and in the layout of alf's tree.

        Returns:
            ``_values``, ``[2 * capacity]``: the root at 1, parents at half of their
            children's places, the first leaf at the least power of two that is no
            less than the capacity.
        """
        size, whole = self._capacity, np.zeros(2 * self._capacity)
        whole[self._leaf_slots()] = self._tree.leaves
        join: Any = {"sum": np.add, "max": np.maximum, "min": np.minimum}[self._op]
        for node in range(size - 1, 0, -1):
            whole[node] = join(whole[2 * node], whole[2 * node + 1])
        return {"_values": self._tensor(whole)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load the leaves of a state, also of a state that alf wrote.

        Raises:
            RefusedError: It is of another capacity, or a leaf cannot be.
        """
        values = np.asarray(array(state["_values"]), np.float64)
        if values.shape != (2 * self._capacity,):
            raise RefusedError(
                f"tree state must have {[2 * self._capacity]} values, got "
                f"{list(values.shape)}. Load it into a tree of the same capacity."
            )
        self._said(self._tree.fill, values[self._leaf_slots()])

    def _leaf_slots(self) -> NDArray[np.int64]:
        """Return the indices of the leaves in alf's array."""
        leftmost = 1 << (self._capacity - 1).bit_length()
        places: NDArray[np.int64] = leftmost + np.arange(self._capacity)
        return np.where(places < 2 * self._capacity, places, places - self._capacity)

    @property
    def _op(self) -> str:
        return "sum" if isinstance(self._tree, SumTree) else self._tree.op

    def _tensor(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.as_tensor(values, dtype=self._dtype, device=self._device)

    def _said(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except (IndexError, ValueError, TypeError) as error:
            raise RefusedError(str(error)) from error


class SumSegmentTree(SegmentTree):
    """A tree of sums, which finds the leaf of a prefix sum.

    Example:
        >>> tree = SumSegmentTree(4)
        >>> tree[torch.tensor([0, 2])] = torch.tensor([1.0, 3.0])
        >>> tree.summary()
        tensor(4.)
    """

    _tree: SumTree

    def __init__(
        self,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
        name: str = "SumSegmentTree",
    ) -> None:
        """Make a tree; see `SegmentTree`."""
        super().__init__(capacity, torch.add, dtype, device, name)

    @property
    def nnz(self) -> int:
        """Leaves that are not 0."""
        return self._tree.nnz

    def find_sum_bound(self, thresholds: Any) -> torch.Tensor:
        """Find the first leaves whose prefix sums are above thresholds.

        The sum of all falls on the last leaf that is not 0; no leaf of 0 is found.

        Args:
            thresholds: Any shape, in ``[0, summary]``.

        Returns:
            int64 of the same shape.

        Raises:
            ValueError: A threshold is negative, NaN or above the sum.
        """
        wanted = np.asarray(array(thresholds), np.float64)
        total = self._tree.total
        # The sum as it was given back has been rounded, perhaps up.
        given = float(self.summary())
        wanted = np.where(wanted == given, total, wanted)
        found = self._tree.find_sum_bound(wanted)
        return torch.as_tensor(found, device=self._device)


class MaxSegmentTree(SegmentTree):
    """A tree with the maximum of its leaves.

    Example:
        >>> tree = MaxSegmentTree(4)
        >>> tree[torch.tensor([0, 2])] = torch.tensor([1.0, 3.0])
        >>> tree.summary()
        tensor(3.)
    """

    def __init__(
        self,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
        name: str = "MaxSegmentTree",
    ) -> None:
        """Make a tree; see `SegmentTree`."""
        super().__init__(capacity, torch.max, dtype, device, name)


class MinSegmentTree(SegmentTree):
    """A tree with the minimum of its leaves.

    Example:
        >>> tree = MinSegmentTree(4)
        >>> tree[torch.tensor([0, 2])] = torch.tensor([1.0, 3.0])
        >>> tree.summary()
        tensor(0.)
    """

    def __init__(
        self,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
        name: str = "MinSegmentTree",
    ) -> None:
        """Make a tree; see `SegmentTree`."""
        super().__init__(capacity, torch.min, dtype, device, name)
