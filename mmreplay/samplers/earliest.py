"""Leaving out the oldest rows of each environment, as alf's ReplayBuffer can."""

from __future__ import annotations

import numpy as np

from mmreplay.errors import SchemaError
from mmreplay.samplers.base import Sampler, State, View
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
        SchemaError: The count is below 1.
    """
    if count < 1:
        raise SchemaError(
            f"count: got {count}, expected at least 1; leave ignore_earliest out to "
            "draw from every row"
        )
    return RestrictedSampler(_Earliest(count), sampler or UniformSampler())


class _Earliest:
    """The restriction to all but the oldest rows."""

    def __init__(self, count: int) -> None:
        self._count = count

    def of(self, view: View) -> View:
        edges = rank_edges(view)
        every = np.arange(len(edges) - 1)
        low = legal_before(view, every, view.span.first + self._count)
        return NarrowedView(view, low, edges)

    def state_dict(self) -> State:
        return {"kind": "ignore_earliest", "count": self._count}

    def check(self, state: State) -> None:
        check_kind(state, "ignore_earliest")
        same(state, "count", self._count)
