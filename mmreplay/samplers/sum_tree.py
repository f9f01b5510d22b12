"""Sums, minima and maxima over many leaves, kept while leaves change.

A tree has 16 children a node, in float64. Setting leaves computes every node above
them afresh from its children: shifting it by a difference would let rounding errors
pile up until an empty leaf can be drawn. Finding a prefix sum descends, 16 ways at a
time, to the leaf in which it falls, and never reaches a leaf of value zero.

A tree takes 8.54 bytes a leaf. Setting or finding a batch of B costs
O(B log16 capacity), `fill` O(capacity). Trees are not thread-safe: one may be set
only while no other thread reads it (long batches release the GIL).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay import kernels
from mmreplay.arguments import integer, one_of
from mmreplay.errors import unmasked
from mmreplay.kernels import tree as twin
from mmreplay.kernels.arrays import ALIGNMENT, aligned, limits, real

Op = Literal["sum", "min", "max"]

_CODES = MappingProxyType({"sum": twin.SUM, "min": twin.MIN, "max": twin.MAX})
_IDENTITIES = MappingProxyType({"sum": 0.0, "min": np.inf, "max": -np.inf})
_shorten = cast(twin.TreeKernel, kernels.load("tree")).shorten


def to_masses(numbers: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    """Raise numbers to a power of 24 significant bits, in place.

    The last bit of a power depends on the processor, on its instructions that numpy
    and the C library use, and on their versions. Powers that differ by a unit in the
    last of their 53 bits give different masses with a chance of 2**-29, and a mass
    differs from its power by 2**-24 of itself at most.

    Args:
        numbers: float64 ``[N]``, at least 0, contiguous; written over.
        exponent: What they are raised to.

    Returns:
        The same array: masses, in proportion to which rows are drawn.

    Example:
        >>> from mmreplay.samplers.sum_tree import to_masses
        >>> to_masses(np.array([0.0, 1.0, 4.0]), 0.5)
        array([0., 1., 2.])
    """
    np.power(numbers, exponent, out=numbers)
    _shorten(numbers)
    return numbers


class SegmentTree:
    """Leaves by number, and their sum, minimum or maximum.

    Attributes:
        capacity: Leaves.
        op: ``"sum"``, ``"min"`` or ``"max"``.
        identity: Value of a leaf that was never set.

    Example:
        >>> tree = mr.SegmentTree(4, "min")
        >>> tree.set([0, 2], [3.0, 1.5])
        >>> tree.summary
        1.5
    """

    __slots__ = ("_code", "_kernel", "_nodes", "capacity", "high", "identity", "low", "op")

    def __init__(self, capacity: int, op: Op, identity: float | None = None) -> None:
        """Make a tree of leaves that are not set.

        Args:
            capacity: Leaves, any number from 1.
            op: What is kept of them.
            identity: Value of a leaf that was never set; None for 0 in sums,
                infinity in minima, minus infinity in maxima. A maximum over numbers
                that are not negative may say 0 and is then 0 when empty; no leaf of
                it goes below.

        Raises:
            ValueError: The capacity is below 1, the op unknown, or the identity not
                one that the op may have.
        """
        leaves = "Give the number of leaves."
        integer("tree capacity", capacity, 1, leaves, error=ValueError)
        one_of("tree op", op, _CODES, "'sum' is for drawing.", error=ValueError)
        identity = _IDENTITIES[op] if identity is None else identity
        if identity != _IDENTITIES[op] and (op, identity) != ("max", 0):
            raise ValueError(
                "tree identity must be "
                f"{_IDENTITIES[op]}{', or 0' if op == 'max' else ''} for {op!r}, got "
                f"{identity}."
            )
        self.capacity, self.op, self.identity = int(capacity), op, float(identity)
        self.low, self.high = limits(op, self.identity, self.capacity)
        self._code = _CODES[op]
        self._kernel = cast(twin.TreeKernel, kernels.load("tree"))
        self._nodes = aligned(twin.num_nodes(self.capacity), self.identity)

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        usual = self.identity == _IDENTITIES[self.op]
        identity = "" if usual else f", identity={self.identity!r}"
        return f"SegmentTree({self.capacity}, {self.op!r}{identity})"

    @property
    def leaves(self) -> NDArray[np.float64]:
        """float64 ``[capacity]``, read-only, and a view: it changes with the tree."""
        offset, count = twin.levels(self.capacity)[-1]
        leaves = self._nodes[offset : offset + count]
        leaves.flags.writeable = False
        return leaves

    @property
    def summary(self) -> float:
        """Sum, minimum or maximum of all leaves."""
        return self._nodes.item(0)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tree takes."""
        return self._nodes.nbytes + ALIGNMENT

    def set(self, indices: ArrayLike, values: ArrayLike) -> None:
        """Write leaves; either all are written or, where one is refused, none.

        Args:
            indices: Whole numbers ``[B]``, in ``[0, capacity)``; of equal ones the
                last wins.
            values: Real numbers ``[B]``: in sums at least 0 and finite, else not NaN.

        Raises:
            IndexError: An index is outside the tree.
            TypeError: Indices are not whole, or values not real.
            ValueError: A value cannot be, or the lengths differ.
        """
        where = self._as_indices(indices)
        what = real("tree values", values)
        if where.shape != what.shape:
            raise ValueError(
                f"tree values must have shape {list(where.shape)}, one for each "
                f"index, got {list(what.shape)}."
            )
        bad = self._kernel.set_leaves(
            self._nodes, self.capacity, self._code, self.low, self.high, where, what
        )
        if bad >= 0:
            self._check_index(int(where[bad]))
            raise self._improper(f"leaf {where[bad]}", float(what[bad]))

    def fill(self, values: ArrayLike) -> None:
        """Write every leaf at once.

        Args:
            values: Real numbers ``[capacity]``, as `set` takes them.

        Raises:
            TypeError: Values are not real.
            ValueError: A value cannot be, or there are more or fewer than leaves.
        """
        what = real("tree values", values)
        if what.shape != (self.capacity,):
            raise ValueError(
                f"tree values must have shape [{self.capacity}], one for each leaf, "
                f"got {list(what.shape)}. Use set for some of the leaves."
            )
        # One pass each, and no array as long as the tree.
        if not (what.min() >= self.low and what.max() <= self.high):
            bad = int(np.argmin((what >= self.low) & (what <= self.high)))
            raise self._improper(f"leaf {bad}", float(what[bad]))
        offset, count = twin.levels(self.capacity)[-1]
        np.add(what, 0.0, out=self._nodes[offset : offset + count])  # no -0.0
        self._kernel.rebuild(self._nodes, self.capacity, self._code)

    def get(self, indices: ArrayLike) -> NDArray[np.float64]:
        """Read leaves.

        Args:
            indices: Whole numbers of any shape, in ``[0, capacity)``.

        Returns:
            float64 of the same shape.

        Raises:
            IndexError: An index is outside the tree.
            TypeError: Indices are not whole.
        """
        where = self._as_indices(indices)
        out = np.empty(where.shape)
        bad = self._kernel.get_leaves(self._nodes, self.capacity, where, out)
        if bad >= 0:
            self._check_index(int(where.reshape(-1)[bad]))
        # An array without axes is made one of one axis on its way in.
        return out if np.ndim(indices) else out.reshape(())

    def __reduce__(self) -> tuple[object, ...]:
        # Another process may run the other kernel; nodes follow from the leaves.
        made = (self.capacity, self.op, self.identity, self.leaves.copy())
        return _restored, made

    def _as_indices(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Indices as int64, contiguous, at least 1-D.

        Raises:
            IndexError: One is beyond every int64.
            TypeError: They are not whole numbers.
        """
        array = unmasked("tree indices", indices)
        if array.dtype.kind not in "iu" and array.size:
            raise TypeError(
                f"tree indices must be integers, got {array.dtype}. Cast them if "
                "their values are integers."
            )
        if array.dtype == np.uint64 and array.size:
            greatest = int(array.max())
            if greatest >= 1 << 63:
                self._check_index(greatest)
        return np.ascontiguousarray(array, np.int64)

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.capacity:
            raise IndexError(
                f"tree index must be in [0, {self.capacity - 1}], got {index}. "
                "Negative indices do not count from the end."
            )

    def _improper(self, name: str, value: float) -> ValueError:
        wanted = f"at least {self.low:g}" if self.low == 0 else "a number"
        if np.isfinite(self.high):
            wanted += f" and at most {self.high:g}, so that the sum is finite"
        return ValueError(f"tree {name} must be {wanted}, got {value}. The tree is unchanged.")


class SumTree:
    """A tree of sums, in which to find what a prefix sum falls on.

    Attributes:
        capacity: Leaves.

    Example:
        >>> tree = mr.SumTree(4)
        >>> tree.set([0, 1, 3], [1.0, 2.0, 5.0])
        >>> tree.total
        8.0
        >>> tree.find([0.5, 2.5, 7.0])
        array([0, 1, 3])
    """

    __slots__ = ("_tree", "capacity")

    def __init__(self, capacity: int) -> None:
        """Make a tree of leaves that are all 0.

        Args:
            capacity: Leaves, any number from 1.

        Raises:
            ValueError: The capacity is below 1.
        """
        self._tree = SegmentTree(capacity, "sum")
        self.capacity = self._tree.capacity

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return f"SumTree({self.capacity})"

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return self._tree.summary

    @property
    def nnz(self) -> int:
        """Leaves that are not zero; counted as they change."""
        return int(self._tree._nodes.item(twin.NONZERO))

    @property
    def leaves(self) -> NDArray[np.float64]:
        """See `SegmentTree.leaves`."""
        return self._tree.leaves

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tree takes."""
        return self._tree.nbytes

    def set(self, indices: ArrayLike, values: ArrayLike) -> None:
        """Write leaves; see `SegmentTree.set`."""
        self._tree.set(indices, values)

    def fill(self, values: ArrayLike) -> None:
        """Write every leaf at once; see `SegmentTree.fill`."""
        self._tree.fill(values)

    def get(self, indices: ArrayLike) -> NDArray[np.float64]:
        """Read leaves; see `SegmentTree.get`."""
        return self._tree.get(indices)

    def find(self, sums: ArrayLike) -> NDArray[np.int64]:
        """Find the leaves that prefix sums fall on; see `draw`."""
        return self.draw(sums)[0]

    def draw(self, sums: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Find the leaves that prefix sums fall on, and their values.

        A sum falls on the least leaf for which the sum of all leaves up to it,
        itself included, is greater, rounding aside. A leaf of value 0 is never
        found. The total itself counts as the greatest number below it, so that
        ``u * total`` is legal for any u in ``[0, 1]``.

        Args:
            sums: Real numbers ``[B]``, from 0 to the total.

        Returns:
            Leaves, int64 ``[B]``, and their values, float64 ``[B]``.

        Raises:
            TypeError: Sums are not real.
            ValueError: A sum is negative, above the total or NaN, or all leaves are
                0 and there is something to find.
        """
        wanted = real("prefix sums", sums)
        found, values = np.empty(wanted.shape, np.int64), np.empty(wanted.shape)
        tree = self._tree
        bad = tree._kernel.find_leaves(tree._nodes, self.capacity, wanted, found, values)
        if bad >= 0:
            raise self._cannot_fall(float(wanted[bad]))
        return found, values

    def draw_shares(
        self, shares: NDArray[np.float64], stratified: bool, scale: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Find the leaves that shares of the total fall on, as `draw` does.

        Args:
            shares: float64 ``[B]``, in ``[0, 1]``; written over by each leaf's share.
            stratified: Share i is one of the i-th of B equal segments.
            scale: What leaves are compared with; 0 for the least of those found.

        Returns:
            Leaves, int64 ``[B]``, and the scale over their values, float64 ``[B]``.

        Raises:
            ValueError: All leaves are 0.
        """
        leaves, ratios = np.empty(len(shares), np.int64), np.empty(len(shares))
        tree = self._tree
        bad = tree._kernel.draw_leaves(
            tree._nodes, self.capacity, shares, stratified, scale, leaves, ratios
        )
        if bad >= 0:
            raise self._cannot_fall(float(shares[0]))
        return leaves, ratios

    def set_powers(
        self, indices: NDArray[np.int64], numbers: NDArray[np.float32], more: float, exponent: float
    ) -> bool:
        """Write masses ``(number + more) ** exponent``, if all are above 0 until then.

        Unlike the values of `set` and `fill` they are cut to 24 significant bits.

        Args:
            indices: int64 ``[B]``.
            numbers: float32 ``[capacity]``, one for every leaf.
            more: Added to each.
            exponent: What the sums are raised to.

        Returns:
            Whether they were written; else the tree is as it was.
        """
        tree, values = self._tree, np.empty(len(indices))
        kernel, nodes = tree._kernel, tree._nodes
        if not kernel.add_to_open(nodes, self.capacity, indices, numbers, more, values):
            return False
        to_masses(values, exponent)
        bad = kernel.set_leaves(
            nodes, self.capacity, twin.SUM, tree.low, tree.high, indices, values
        )
        assert bad < 0, "a power that no sum can hold"
        return True

    def find_sum_bound(self, thresholds: ArrayLike) -> NDArray[np.int64]:
        """Find leaves as alf's tree does.

        As `find`, but of any shape, and the total itself falls on the last leaf that
        is not 0, even one that is lost in the rounding of the total.

        Args:
            thresholds: Real numbers of any shape, from 0 to the total.

        Returns:
            int64 of the same shape.

        Raises:
            TypeError: Thresholds are not real.
            ValueError: As in `draw`.
        """
        wanted = unmasked("prefix sums", thresholds)
        found = self.find(wanted.reshape(-1)).reshape(wanted.shape)
        whole = wanted == self.total
        if whole.any():
            found[whole] = self._last()
        return found

    def _last(self) -> int:
        """Return the last leaf that is not 0, where one is."""
        node = 0
        for offset, _ in twin.levels(self.capacity)[1:]:
            first = offset + node * twin.WIDTH
            children = self._tree._nodes[first : first + twin.WIDTH]
            node = node * twin.WIDTH + int(np.flatnonzero(children)[-1])
        return node

    def _cannot_fall(self, value: float) -> ValueError:
        if self.total == 0:
            return ValueError(
                "prefix sums need a leaf above 0, and all leaves are 0. Set a leaf first."
            )
        return ValueError(
            f"prefix sum must be in [0, {self.total}], got {value}. Draw it as u * "
            "total with u from 0 to 1."
        )


def _restored(capacity: int, op: Op, identity: float, leaves: NDArray[np.float64]) -> SegmentTree:
    """A tree of these leaves, to the last bit what it was."""
    tree = SegmentTree(capacity, op, identity)
    tree.fill(leaves)
    return tree
