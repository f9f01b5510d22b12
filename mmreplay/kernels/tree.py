"""Trees of 16 children: the numpy twin of ``_tree.c``, which defines its results.

A tree over ``capacity`` leaves is one float64 array of levels, the root first and the
leaves last, each padded to whole nodes of 16 values; a value of one level reduces a
node of the next. Beside the root, ``nodes[1]`` counts the leaves that are not zero
(sums only). Both twins order their additions alike, so that they agree to the last
bit: within a node of four blocks of four, a block is ``(a + b) + (c + d)``, and the
blocks are added from left to right.

Functions return the index of the first argument that is refused, or -1; the tree is
then as it was. Not thread-safe: no thread may read while another one writes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

WIDTH = 16
SUM, MIN, MAX = range(3)
NONZERO = 1
"""Where a tree of sums counts its leaves that are not zero."""
DROPPED_BITS = 29
"""Bits of a float64 beyond the 24 that `shorten` leaves."""

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


class TreeKernel(Protocol):
    """What both twins offer; arrays are contiguous and of the types given."""

    def set_leaves(
        self,
        nodes: Floats,
        capacity: int,
        op: int,
        low: float,
        high: float,
        indices: Indices,
        values: Floats,
        /,
    ) -> int:
        """Write leaves ``[B]``, the last of equals, and what is above them."""

    def get_leaves(self, nodes: Floats, capacity: int, indices: Indices, out: Floats, /) -> int:
        """Read leaves, of any shape, into out."""

    def find_leaves(
        self, nodes: Floats, capacity: int, sums: Floats, indices: Indices, values: Floats, /
    ) -> int:
        """Find where prefix sums ``[B]`` fall; write leaf numbers and values."""

    def draw_leaves(
        self,
        nodes: Floats,
        capacity: int,
        shares: Floats,
        stratified: bool,
        scale: float,
        indices: Indices,
        ratios: Floats,
        /,
    ) -> int:
        """Draw leaves ``[B]``; write their numbers, probabilities and ratios."""

    def add_to_open(
        self,
        nodes: Floats,
        capacity: int,
        indices: Indices,
        numbers: NDArray[np.float32],
        more: float,
        out: Floats,
        /,
    ) -> bool:
        """Look up numbers of leaves ``[B]``, if all of the leaves are above 0."""

    def shorten(self, values: Floats, /) -> None:
        """Round values of any shape to 24 significant bits, in place."""

    def rebuild(self, nodes: Floats, capacity: int, op: int, /) -> None:
        """Compute every inner node from the leaves."""


def levels(capacity: int) -> list[tuple[int, int]]:
    """Offset and number of values of each level, the root first.

    Args:
        capacity: Leaves, at least 1.
    """
    counts = [capacity]
    while len(counts) < 2 or counts[-1] > 1:
        counts.append(-(-counts[-1] // WIDTH))
    offsets, offset = [], 0
    for count in reversed(counts):
        offsets.append((offset, count))
        offset += -(-count // WIDTH) * WIDTH
    return offsets


def num_nodes(capacity: int) -> int:
    """Values that a tree's array holds, padding and all."""
    offset, count = levels(capacity)[-1]
    return offset + -(-count // WIDTH) * WIDTH


def set_leaves(
    nodes: Floats,
    capacity: int,
    op: int,
    low: float,
    high: float,
    indices: Indices,
    values: Floats,
    /,
) -> int:
    """Write leaves, and afresh every node above them.

    Args:
        nodes: The tree.
        capacity: Its leaves.
        op: `SUM`, `MIN` or `MAX`.
        low: Least value that is taken.
        high: Greatest value that is taken; NaN never is.
        indices: int64 ``[B]``, in ``[0, capacity)``; of equal ones the last wins.
        values: float64 ``[B]``.

    Returns:
        Index of the first pair refused, or -1.
    """
    legal = (indices >= 0) & (indices < capacity) & (values >= low) & (values <= high)
    if not legal.all():
        return int(np.argmin(legal))
    if len(indices) == 0:
        return -1
    *above, (leaves, _) = levels(capacity)
    backwards, last = np.unique(indices[::-1], return_index=True)
    here = leaves + backwards
    before = np.count_nonzero(nodes[here])
    # The zero added turns -0.0 into 0.0, which compares alike and differs in bits.
    nodes[here] = values[::-1][last] + 0.0
    if op == SUM:
        nodes[NONZERO] += np.count_nonzero(nodes[here]) - before
    below, parents = leaves, backwards
    for offset, _ in reversed(above):
        parents = _distinct(parents // WIDTH)
        children = below + parents[:, None] * WIDTH + np.arange(WIDTH)
        nodes[offset + parents] = _reduce(nodes[children], op)
        below = offset
    return -1


def get_leaves(nodes: Floats, capacity: int, indices: Indices, out: Floats, /) -> int:
    """Read leaves.

    Args:
        nodes: The tree.
        capacity: Its leaves.
        indices: int64 of any shape, in ``[0, capacity)``.
        out: float64 of that shape, written to.

    Returns:
        Index of the first index refused, counted in C order, or -1.
    """
    legal = (indices >= 0) & (indices < capacity)
    if not legal.all():
        return int(np.argmin(legal))
    offset, _ = levels(capacity)[-1]
    np.take(nodes[offset:], indices, out=out, mode="clip")
    return -1


def find_leaves(
    nodes: Floats, capacity: int, sums: Floats, indices: Indices, values: Floats, /
) -> int:
    """Find the leaf in which each prefix sum falls; never one of value zero.

    Args:
        nodes: A tree of sums.
        capacity: Its leaves.
        sums: float64 ``[B]``, from 0 to the total, which counts as the number below
            it. All are refused where the total is 0.
        indices: int64 ``[B]``, written to: the least leaf whose prefix sum, itself
            included, is greater.
        values: float64 ``[B]``, written to: the leaf's value.

    Returns:
        Index of the first sum refused, or -1.
    """
    total = nodes[0]
    legal = (sums >= 0) & (sums <= total) & (total > 0)
    if not legal.all():
        return int(np.argmin(legal))
    rest = np.minimum(sums, np.nextafter(total, 0.0))
    leaf = np.zeros(len(sums), np.int64)
    value = rest
    for offset, count in levels(capacity)[1:]:
        chosen, before, value = _choose(nodes, offset + leaf * WIDTH, rest)
        leaf = np.minimum(leaf * WIDTH + chosen, count - 1)
        # The difference may be rounded up to the child's whole sum.
        rest = np.minimum(rest - before, np.nextafter(value, 0.0))
    indices[:] = leaf
    values[:] = value
    return -1


def draw_leaves(
    nodes: Floats,
    capacity: int,
    shares: Floats,
    stratified: bool,
    scale: float,
    indices: Indices,
    ratios: Floats,
    /,
) -> int:
    """Find the leaves that shares of the total fall on.

    Args:
        nodes: A tree of sums.
        capacity: Its leaves.
        shares: float64 ``[B]``, in ``[0, 1]``; each leaf's part of the total instead
            is written to it.
        stratified: Share i is one of the i-th of B equal segments.
        scale: What leaves are compared with; where it is not above 0, the least leaf
            found.
        indices: int64 ``[B]``, written to: as `find_leaves` finds them.
        ratios: float64 ``[B]``, written to: the scale over each leaf's value.

    Returns:
        Index of the first share refused, or -1; all are where the total is 0.
    """
    total = nodes[0]
    legal = (shares >= 0) & (shares <= 1) & (total > 0)
    if not legal.all():
        return int(np.argmin(legal))
    if len(shares) == 0:
        return -1
    if stratified:
        shares += np.arange(float(len(shares)))
        shares /= len(shares)
    shares *= total
    find_leaves(nodes, capacity, shares, indices, ratios)
    np.divide(ratios, total, out=shares)
    np.divide(scale if scale > 0 else ratios.min(), ratios, out=ratios)
    return -1


def add_to_open(
    nodes: Floats,
    capacity: int,
    indices: Indices,
    numbers: NDArray[np.float32],
    more: float,
    out: Floats,
    /,
) -> bool:
    """Look up a number for each of some leaves, if all of them are above 0.

    Args:
        nodes: The tree.
        capacity: Its leaves.
        indices: int64 ``[B]``.
        numbers: float32 ``[capacity]``.
        more: Added to each.
        out: float64 ``[B]``, written to.

    Returns:
        Whether all leaves are in the tree and above 0; else out means nothing.
    """
    if not ((indices >= 0) & (indices < capacity)).all():
        return False
    offset, count = levels(capacity)[-1]
    if not (nodes[offset : offset + count][indices] > 0).all():
        return False
    np.add(numbers[indices], more, out=out, dtype=np.float64)
    return True


def shorten(values: Floats, /) -> None:
    """Round values to 24 significant bits, halves away from zero, in place.

    Zeros, infinities and NaN stay what they are. A value below 2**-1022 has fewer bits
    to begin with: half of 2**-1045 and more becomes the next multiple of that, less
    becomes 0. The greatest values become infinity.

    Args:
        values: float64 of any shape, written over.
    """
    bits = values.view(np.int64)
    bits += 1 << (DROPPED_BITS - 1)
    bits &= -1 << DROPPED_BITS


def rebuild(nodes: Floats, capacity: int, op: int, /) -> None:
    """Compute every inner node, and the count beside the root, from the leaves.

    Args:
        nodes: The tree.
        capacity: Its leaves.
        op: `SUM`, `MIN` or `MAX`.
    """
    *above, (below, size) = levels(capacity)
    if op == SUM:
        nodes[NONZERO] = np.count_nonzero(nodes[below : below + size])
    for offset, count in reversed(above):
        children = nodes[below : below + count * WIDTH].reshape(count, WIDTH)
        nodes[offset : offset + count] = _reduce(children, op)
        below = offset


def _choose(nodes: Floats, first: Indices, rest: Floats) -> tuple[Indices, Floats, Floats]:
    """Descend one level.

    Args:
        nodes: The tree.
        first: int64 ``[B]``, where each node begins.
        rest: float64 ``[B]``, the prefix sum within it.

    Returns:
        Which child ``[B]``, the sum before it and its own value.
    """
    rows = np.arange(len(first))
    children = nodes[first[:, None] + np.arange(WIDTH)].reshape(-1, 4, 4)
    blocks = np.zeros((len(first), 4))
    np.cumsum(_blocks(children)[:, :3], axis=1, out=blocks[:, 1:])
    block = np.count_nonzero(blocks[:, 1:] <= rest[:, None], axis=1)
    within = children[rows, block]
    prefix = np.zeros((len(first), 4))
    prefix[:, 1] = within[:, 0]
    prefix[:, 2] = within[:, 0] + within[:, 1]
    prefix[:, 3] = prefix[:, 2] + within[:, 2]
    prefix += blocks[rows, block][:, None]
    child = np.count_nonzero(prefix[:, 1:] <= rest[:, None], axis=1)
    return 4 * block + child, prefix[rows, child], within[rows, child]


def _reduce(children: Floats, op: int) -> Floats:
    """float64 ``[N]`` of the nodes' children ``[N, 16]``."""
    if op == MIN:
        return np.asarray(children.min(axis=1))
    if op == MAX:
        return np.asarray(children.max(axis=1))
    blocks = _blocks(children.reshape(-1, 4, 4))
    return np.asarray(((blocks[:, 0] + blocks[:, 1]) + blocks[:, 2]) + blocks[:, 3])


def _blocks(children: Floats) -> Floats:
    """Sums ``[N, 4]`` of blocks of four ``[N, 4, 4]``."""
    c = children
    return np.asarray((c[..., 0] + c[..., 1]) + (c[..., 2] + c[..., 3]))


def _distinct(growing: Indices) -> Indices:
    keep = np.ones(len(growing), bool)
    np.not_equal(growing[1:], growing[:-1], out=keep[1:])
    return growing[keep]
