"""Several samplers' draws as one, and what is passed on to each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
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
from mmreplay.samplers.forms import PADDED, form_of, padded

Ids = NDArray[np.int64]


def draw_joined(
    asked: Sequence[tuple[Sampler, View, int]], key: int
) -> tuple[Draw, list[int]]:
    """Draw with each of several samplers, and put the draws one after the other.

    Where one fails, or they do not fit together, all are put back: a failed draw
    does not count.

    Args:
        asked: Samplers, what each is shown and how many it is to draw; at least one.
        key: Of the whole.

    Returns:
        The draw, and how many each drew.

    Raises:
        EmptyError: One has nothing to draw.
        SchemaError: Their windows differ.
    """
    drawn: list[Draw] = []
    states: list[tuple[Sampler, State]] = []
    try:
        for sampler, view, count in asked:
            if len(asked) > 1:
                states.append((sampler, sampler.state_dict()))
            drawn.append(sampler.draw(view, count))
        return joined(drawn, key, _padded(asked)), [len(draw) for draw in drawn]
    except BaseException:
        for sampler, state in states:
            sampler.load_state_dict(state)
        raise


def _padded(asked: Sequence[tuple[Sampler, View, int]]) -> bool:
    return all(form_of(sampler) == PADDED for sampler, _, _ in asked)


def joined(draws: Sequence[Draw], key: int, pad: bool = False) -> Draw:
    """Put draws one after the other.

    Args:
        draws: At least one; all of single steps, or all of windows.
        key: Of the whole.
        pad: Windows are padded to the longest; else all are equally long.

    Raises:
        SchemaError: Their windows differ, or some are ragged episodes.
    """
    found = [draw.windows for draw in draws if draw.windows is not None]
    if len(draws) == 1:
        return replace(draws[0], key=key)
    lengths = [
        None if draw.windows is None else draw.windows.positions.shape[1]
        for draw in draws
    ]
    if any(draw.offsets is not None for draw in draws):
        raise SchemaError(
            "samplers: got ragged episodes to put into one batch with others, expected "
            "steps or windows; make the EpisodeSampler with layout='padded'"
        )
    if len(set(lengths)) > 1 and not pad:
        raise SchemaError(
            f"samplers: got windows of lengths {lengths} to put into one batch, "
            "expected them all alike; wrap the mixture in one SequenceSampler instead"
        )
    if pad:
        found = padded(found)
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
