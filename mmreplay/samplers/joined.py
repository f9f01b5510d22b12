"""Several samplers' draws as one, and what is passed on to each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import SchemaError
from mmreplay.samplers.base import (
    Draw,
    PrioritySampler,
    Sampler,
    State,
    View,
    Windows,
)

Ids = NDArray[np.int64]


def draw_each(
    view: View, samplers: Sequence[Sampler], counts: Sequence[int]
) -> list[Draw]:
    """Draw so many with each sampler, none where the count is 0.

    Where one fails those before it are put back: a failed draw does not count.
    """
    drawn: list[Draw] = []
    states = []
    try:
        for sampler, count in zip(samplers, counts, strict=True):
            if count:
                before = sampler.state_dict() if len(samplers) > 1 else {}
                drawn.append(sampler.draw(view, count))
                states.append((sampler, before))
    except BaseException:
        for sampler, state in states:
            sampler.load_state_dict(state)
        raise
    return drawn


def joined(draws: Sequence[Draw], key: int) -> Draw:
    """Put draws one after the other.

    Args:
        draws: At least one; all of single steps, or all of windows equally long.
        key: Of the whole.

    Raises:
        SchemaError: Their windows differ.
    """
    windows = [draw.windows for draw in draws]
    found = [w for w in windows if w is not None]
    lengths = [None if w is None else w.positions.shape[1] for w in windows]
    if len(set(lengths)) > 1:
        raise SchemaError(
            f"samplers: got windows of lengths {lengths} to put into one batch, "
            "expected them all alike; wrap the mixture in one SequenceSampler instead"
        )
    return Draw(
        np.concatenate([draw.env_ids for draw in draws]),
        np.concatenate([draw.positions for draw in draws]),
        np.concatenate([draw.probabilities for draw in draws]),
        np.concatenate([draw.weights for draw in draws]),
        key,
        Windows.joined(found) if found else None,
    )


def update_each(
    view: View,
    samplers: Sequence[Sampler],
    env_ids: Ids,
    positions: Ids,
    values: NDArray[np.generic],
    mask: NDArray[np.bool_] | None,
) -> int:
    """Give priorities to every sampler that keeps some, or to none of them.

    Returns:
        The most that any of them dropped.

    Raises:
        SchemaError: None of them keeps priorities, or one refuses these.
        StaleError: A position was never written.
    """
    keeping = [sampler for sampler in samplers if keeps_priorities(sampler)]
    if not keeping:
        names = [type(sampler).__name__ for sampler in samplers]
        raise SchemaError(
            f"update_priorities: got samplers {names} that keep no priorities, "
            "expected a PrioritizedSampler among them; make it a part"
        )
    if len(keeping) > 1:
        # A single one looks at everything itself before it takes anything.
        check_each(view, keeping, env_ids, positions, values, mask)
    return max(
        sampler.update_priorities(view, env_ids, positions, values, mask)
        for sampler in keeping
    )


def check_each(
    view: View,
    samplers: Sequence[Sampler],
    env_ids: Ids,
    positions: Ids,
    values: NDArray[np.generic],
    mask: NDArray[np.bool_] | None,
) -> None:
    """Refuse priorities that one of the samplers would refuse.

    A sampler that takes priorities looks at them, and takes none, as
    ``sampler.check_priorities``; one that does not have it is not asked.

    Raises:
        SchemaError: A value, or a shape, is not one that it takes.
        StaleError: A position was never written.
    """
    for sampler in samplers:
        check: Callable[..., None] | None = getattr(sampler, "check_priorities", None)
        if check is not None and keeps_priorities(sampler):
            check(view, env_ids, positions, values, mask)


def close_each(samplers: Sequence[Sampler]) -> None:
    """Close the samplers that can be closed, all of them even if one fails."""
    with ExitStack() as stack:
        for sampler in samplers:
            close: Callable[[], None] | None = getattr(sampler, "close", None)
            if close is not None:
                stack.callback(close)


def state_of(sampler: Sampler, priorities: bool) -> State:
    """State of a sampler, with the priorities that it keeps if asked for."""
    if priorities and keeps_priorities(sampler):
        save: Callable[..., State] = sampler.state_dict
        return save(priorities=True)
    return sampler.state_dict()


def keeps_priorities(sampler: Sampler) -> TypeGuard[PrioritySampler]:
    """Whether a sampler draws by priorities, or wraps one that does."""
    # To ask isinstance for the protocol takes 9 us, a tenth of a draw with its update.
    if not hasattr(sampler, "update_priorities"):
        return False
    return bool(getattr(sampler, "keeps_priorities", True))
