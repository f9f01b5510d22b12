"""Whether stored rows look like resets of next-step autoreset mode.

In next-step mode (Gymnasium's vector default) the call of ``step`` after an episode's
end ignores the action, resets the environment and returns reward 0. Its row is no step
of the environment. In a buffer created with another ``autoreset``, samplers draw it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes.flags import BREAK, END, FINAL, START

MIN_ENDS = 32
"""Episode ends that rewards alone are judged by, at least."""
MIN_KNOWN_ENDS = 3
"""Episode ends with a known final observation, at least: one may be a coincidence."""


def after_ends(
    flags: NDArray[np.uint8], env_ids: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Indices of the first rows after episode ends, final rows left out.

    Args:
        flags: uint8 ``[N]``, the rows' flags; oldest first, environment by environment.
        env_ids: int64 ``[N]``, the environment of each row.

    Returns:
        int64 ``[K]``. The end lies one row before, or two where its final row lies
        between. Rows after an interruption (BREAK) are left out.
    """
    begins = (flags & (START | BREAK | FINAL)) == START
    follows = (env_ids[1:] == env_ids[:-1]) & ((flags[:-1] & (END | FINAL)) != 0)
    return np.flatnonzero(begins[1:] & follows) + 1


def next_step_signature(
    rewards: NDArray[np.generic],
    other_rewards: NDArray[np.generic],
    known: NDArray[np.bool_] | None = None,
    last: Sequence[NDArray[np.generic]] = (),
    final: Sequence[NDArray[np.generic]] = (),
    following: Sequence[NDArray[np.generic]] = (),
) -> str | None:
    """Tell whether rows after episode ends look like next-step resets.

    Where final observations are known, each of at least 3 ends must be followed by a
    row with reward 0 and that observation. Ends that did not change the observation
    are not counted. Elsewhere the reward must be exactly 0 after each of at least 32
    ends, while less than half of all other rewards are 0.

    Args:
        rewards: ``[K, ...]``, reward of the row after each end.
        other_rewards: ``[M, ...]``, all other rewards, or a sample of them.
        known: bool ``[K]``, whether the end's final observation is known.
        last: Per leaf ``[K, *shape]``, observation of the step that ended.
        final: Per leaf ``[K, *shape]``, final observation, valid where known.
        following: Per leaf ``[K, *shape]``, observation of the row after the end.

    Returns:
        What was found, as a clause for a message; None if the rows look right.

    Example:
        >>> import numpy as np
        >>> from mmreplay.episodes.autoreset import next_step_signature
        >>> next_step_signature(np.zeros(40), np.ones(500))
        'the reward is 0 after each of 40 episode ends, and 0% of all other rewards are'
    """
    zero = _zero(rewards)
    if known is not None and len(final):
        informative = known & ~_equal(last, final)
        equal = (_equal(final, following) & zero)[informative]
        if len(equal) >= MIN_KNOWN_ENDS or not equal.all():
            if not equal.all():
                return None
            return (
                f"the row after each of {len(equal)} episode ends has reward 0 and "
                "repeats the final observation"
            )
    if len(zero) < MIN_ENDS or not zero.all() or not len(other_rewards):
        return None
    share = float(_zero(other_rewards).mean())
    if share >= 0.5:
        return None
    return (
        f"the reward is 0 after each of {len(zero)} episode ends, and {share:.0%} of "
        "all other rewards are"
    )


def _zero(rewards: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Whether a reward is 0 in all of its parts, bool ``[N]``."""
    zero: NDArray[np.bool_] = (rewards == 0).all(axis=tuple(range(1, rewards.ndim)))
    return zero


def _equal(
    some: Sequence[NDArray[np.generic]], others: Sequence[NDArray[np.generic]]
) -> NDArray[np.bool_]:
    """Whether observations are equal in all leaves, NaN included, bool ``[N]``."""
    equal = np.ones(len(some[0]), bool)
    for one, other in zip(some, others, strict=True):
        same = (one == other) | ((one != one) & (other != other))  # NaN
        equal &= same.all(axis=tuple(range(1, one.ndim)))
    return equal
