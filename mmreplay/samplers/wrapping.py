"""What samplers that are made of others leave to those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.samplers.base import Sampler, View
from mmreplay.samplers.epochs import draws_once
from mmreplay.samplers.forms import common
from mmreplay.samplers.joined import (
    check_each,
    close_each,
    keeps_priorities,
    update_each,
)

Ids = NDArray[np.int64]


class Wrapping(Protocol):
    """A sampler of one or several others, its parts.

    Attributes:
        _parts: Those that priorities are passed on to.
    """

    _parts: Sequence[Sampler]

    def _shown(self, view: View) -> View:
        """Return what the parts are shown of a view; all of it unless it is said."""
        return view

    @property
    def form(self) -> str | None:
        """What the parts draw, where all say the same; see `forms`."""
        return common(self._parts)

    @property
    def keeps_priorities(self) -> bool:
        """Whether a part takes priorities."""
        return any(keeps_priorities(sampler) for sampler in self._parts)

    @property
    def draws_once(self) -> bool:
        """Whether a part draws its steps once an epoch; see `epochs.draws_once`."""
        return any(draws_once(sampler) for sampler in self._parts)

    def check_priorities(
        self,
        view: View,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Refuse what a part would refuse; see `joined.check_each`."""
        view = self._shown(view)
        check_each(view, self._parts, env_ids, positions, values, mask)

    def update_priorities(
        self,
        view: View,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> int:
        """Pass priorities on to each part that keeps some; see `PrioritySampler`.

        They go to all of those or to none, whoever drew the steps.
        """
        view = self._shown(view)
        return update_each(view, self._parts, env_ids, positions, values, mask)

    def close(self) -> None:
        """Let go of what the parts hold, such as stored priorities."""
        close_each(self._parts)
