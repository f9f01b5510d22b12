"""Rules of episode boundaries: which flags make a step a legal start.

The two tables hold the verdict for each combination of the flags of a row and those of
the row after it, so that kernels look a row up with one access.

The module also finds out whether stored rows look like resets of next-step autoreset
mode. There (Gymnasium's vector default) the call of ``step`` after an episode's end
ignores the action, resets the environment and returns reward 0. Its row is no step of
the environment. In a buffer created with another ``autoreset``, samplers draw it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes.flags import ALL_FLAGS, BREAK, CUT, END, FINAL, START, TERMINATED

MIN_ENDS = 32
"""Episode ends that rewards alone are judged by, at least."""
MIN_KNOWN_ENDS = 3
"""Episode ends with a known final observation, at least: one may be a coincidence."""
CHECKED_ENDS = 64
CHECKED_REWARDS = 4096

FieldReader = Callable[[NDArray[np.int64], tuple[str, ...]], Mapping[str, NDArray[np.generic]]]
"""(indices ``[N]``, paths) to ``[N, *shape]`` by path; of fields that vary ``[N]``, a
number for each value, which is the same for equal ones."""


@cache
def legal_start_table(*, derived: bool) -> NDArray[np.bool_]:
    """Return which rows are legal starts where no transform reads other rows.

    Args:
        derived: The next observation is read from the following row.

    Returns:
        bool ``[64 * 64]``, read-only, by ``flags << 6 | flags of the next row``. Valid
        for rows that have a next row, and for those that need none.
    """
    here, after = np.divmod(np.arange((ALL_FLAGS + 1) ** 2), ALL_FLAGS + 1)
    legal: NDArray[np.bool_] = (here & FINAL) == 0
    if derived:
        # An end without a final row: a terminated step needs no next observation. A
        # truncated step cannot be bootstrapped, so it is no legal start.
        usable = ((after & FINAL) != 0) | ((here & TERMINATED) != 0)
        legal &= np.where((here & END) != 0, usable, (after & START) == 0)
    legal.flags.writeable = False
    return legal


@cache
def fold_table(*, derived: bool) -> NDArray[np.bool_]:
    """Return whether transforms can read a step's rows up to a row and its next one.

    Where the next row begins an episode, the row is the last one that can be read for
    a step. That is enough if the next observation is known or not needed.

    Args:
        derived: The next observation is read from the following row.

    Returns:
        bool ``[64 * 64]``, read-only, by ``flags << 6 | flags of the next row``.
    """
    here, after = np.divmod(np.arange((ALL_FLAGS + 1) ** 2), ALL_FLAGS + 1)
    if derived:
        usable = (here & (TERMINATED | FINAL)) != 0
    else:
        usable = ((here & (END | FINAL)) != 0) | ((after & CUT) != 0)
    legal: NDArray[np.bool_] = ((after & START) == 0) | usable
    legal.flags.writeable = False
    return legal


def find_reset_rows(
    flags: NDArray[np.uint8],
    env_ids: NDArray[np.int64],
    read: FieldReader,
    *,
    reward: str,
    numbers: Callable[[NDArray[np.generic]], NDArray[np.generic] | None] = np.asarray,
    observation: tuple[str, ...] = (),
    next_observation: tuple[str, ...] = (),
) -> tuple[str | None, int]:
    """Read rows after episode ends and say whether they look like next-step resets.

    At most 64 ends and 4,096 other rewards are read, evenly over the rows.

    Args:
        flags: uint8 ``[N]``, the rows' flags; oldest first, environment by environment.
        env_ids: int64 ``[N]``, the environment of each row.
        read: Reads fields of rows by their index in flags.
        reward: Path of the reward.
        numbers: Returns the numbers of stored rewards.
        observation: Paths of the observation.
        next_observation: Paths of stored next observations; empty where they are read
            from the following row.

    Returns:
        What `next_step_signature` found, and the number of ends that it judged.
    """
    after = after_ends(flags, env_ids)
    if not len(after):
        return None, 0
    others = (flags & FINAL) == 0
    others[after] = False
    if len(after) > CHECKED_ENDS:
        after = after[np.arange(CHECKED_ENDS) * len(after) // CHECKED_ENDS]
    # The row before is the end, or its final row with the end before it.
    has_final = (flags[after - 1] & FINAL) != 0
    ends = after - 1 - has_final
    known = (env_ids[ends] == env_ids[after]) & (ends >= 0)
    known &= has_final | bool(next_observation)
    observed: list[tuple[NDArray[np.generic], ...]] = [(), (), ()]
    if known.any():
        # Sorted, fields of the two observations stand side by side.
        paths = tuple(sorted(observation)) if next_observation else observation
        following = tuple(sorted(next_observation)) or paths
        observed = []
        for rows, names in (
            (ends, paths),
            (ends if next_observation else after - 1, following),
            (after, paths),
        ):
            columns = read(rows, names)
            observed.append(tuple(columns[name] for name in names))
    sample = np.flatnonzero(others)
    if len(sample) > CHECKED_REWARDS:
        sample = sample[np.arange(CHECKED_REWARDS) * len(sample) // CHECKED_REWARDS]
    rewards, others_rewards = (numbers(read(rows, (reward,))[reward]) for rows in (after, sample))
    assert rewards is not None
    assert others_rewards is not None
    signature = next_step_signature(rewards, others_rewards, known, *observed)
    return signature, len(after)


def after_ends(flags: NDArray[np.uint8], env_ids: NDArray[np.int64]) -> NDArray[np.int64]:
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
        >>> from mmreplay.episodes.rules import next_step_signature
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
