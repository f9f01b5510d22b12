"""Leaving out the oldest rows of each environment, as alf's ReplayBuffer can."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmreplay.ring import Span
from mmreplay.samplers.base import Sampler, State, View
from mmreplay.samplers.checks import whole
from mmreplay.samplers.ranks import NarrowedView, legal_before, rank_edges
from mmreplay.samplers.restricted import RestrictedSampler
from mmreplay.samplers.states import check_kind, same
from mmreplay.samplers.uniform import UniformSampler


def ignore_earliest(count: int, sampler: Sampler | None = None) -> RestrictedSampler:
    """Draw no step among the oldest rows of an environment.

    So that whatever reads some rows back (a history, a recurrent state's burn-in)
    finds them alive.

    Args:
        count: Rows alive, final rows among them, at least 1; what is drawn lies at
            ``span.first + count`` or after.
        sampler: Draws; `UniformSampler` by default.

    Raises:
        SchemaError: The count is no integer of at least 1, or the sampler is none.

    Example:
        >>> sampler = mr.ignore_earliest(10, mr.UniformSampler(seed=0))
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
        >>> bool((buffer.sample(32).positions >= 10).all())
        True
    """
    way_out = "leave ignore_earliest out to draw from every row"
    count = whole("count", count, 1, way_out)
    inside = UniformSampler() if sampler is None else sampler
    return RestrictedSampler(_Earliest(count), inside)


class _Earliest:
    """The restriction to all but the oldest rows."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._last: tuple[View, View] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}

    def __repr__(self) -> str:
        return f"ignore_earliest({self._count})"

    def of(self, view: View) -> View:
        if self._last is None or self._last[0] is not view:
            self._last = view, _LaterView(view, self._count)
        return self._last[1]

    def state_dict(self) -> State:
        return {"kind": "ignore_earliest", "count": self._count}

    def check(self, state: State) -> None:
        check_kind(state, "ignore_earliest")
        same(state, "count", self._count)


class _LaterView(NarrowedView):
    """All but the oldest rows, of the moment of the last look at `starts`.

    One for all moments of a buffer, so that samplers of windows need not take in
    every episode again whenever a step was added.
    """

    def __init__(self, view: View, count: int) -> None:
        self._view = view
        self._count = count
        self._base: Span | None = None

    @property
    def starts(self) -> Span:
        base = self._view.starts
        if base is not self._base:
            edges = rank_edges(self._view)
            every = np.arange(len(edges) - 1)
            low = legal_before(self._view, every, self._view.span.first + self._count)
            self._narrow(low, edges)
            self._base = base
        return self._starts
