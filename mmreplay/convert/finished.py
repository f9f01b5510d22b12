"""Which episodes of a ring are finished and not appended to a target yet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import Appended, Reader
from mmreplay.convert.condition import Condition
from mmreplay.convert.episode_facts import EpisodeFacts
from mmreplay.convert.ranges import RangesReader, RowRanges
from mmreplay.ring import Span

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Finished:
    """Episodes that can be appended.

    Attributes:
        ranges: Their rows.
        appended: What the target has once they are.
        episodes: How many they are.
        truncated: Of them those that only the row after them truncates, or a cut.
        broken: Episodes that were broken off, which are never appended.
        unknown: Episodes whose condition is unknown.
        refused: Episodes that do not meet the condition.
        lost: int64 ``[E]``, rows that the ring dropped before they were appended.
        waiting: int64 ``[E]``, rows of the unfinished episode.
    """

    ranges: RowRanges
    appended: Appended
    episodes: int
    truncated: int
    broken: int
    unknown: int
    refused: int
    lost: Ids
    waiting: Ids


def finished(
    reader: Reader,
    appended: Appended,
    upto: Ids,
    condition: Condition | None = None,
    truncate: NDArray[np.bool_] | None = None,
    discard: NDArray[np.bool_] | None = None,
) -> Finished:
    """Look for finished episodes.

    Args:
        reader: Of the ring; it reads these rows only from here on.
        appended: What the target has.
        upto: int64 ``[E]``, rows from here on are not looked at.
        condition: What episodes meet that are appended.
        truncate: bool ``[E]``, where the unfinished episode ends as it is, truncated.
        discard: bool ``[E]``, where the unfinished episode is broken off.
    """
    description = reader.describe()
    first = np.clip(appended.next, description.first, upto)
    span = Span(first, np.maximum(upto, first))
    # One row more: of the last one a reader may say that the row after it truncates it,
    # and that row is not to be looked at either.
    reader.narrow(Span(first, np.minimum(span.stop + 1, description.stop)))
    facts = EpisodeFacts(reader, condition, span=span)
    env_ids = facts.env_ids
    newest = np.diff(env_ids, append=-1) != 0
    # The rest of an episode whose first steps the target has.
    rest = appended.continued[env_ids] & (facts.first == appended.next[env_ids])
    begun = facts.begun | rest
    over = facts.terminated | facts.truncated
    now = newest & ~over & begun & (False if truncate is None else truncate[env_ids])
    done = begun & (over | now)
    chosen, unknown = done, 0
    if condition is not None:
        truth = facts.selected()
        chosen = done & truth.true
        if truth.unknown is not None:
            unknown = int((done & truth.unknown).sum())
    following = span.stop.copy()
    open_ = newest & ~over & ~now
    if discard is not None:
        open_ &= ~discard[env_ids]
    following[env_ids[open_]] = facts.first[open_]
    goes_on = np.zeros(len(following), bool)
    goes_on[env_ids[now]] = True
    goes_on[env_ids[open_ & rest]] = True
    facts.truncated |= now
    ranges = facts.ranges(chosen)
    return Finished(
        ranges=ranges,
        appended=Appended(np.maximum(following, appended.next), goes_on),
        episodes=int(chosen.sum()),
        truncated=int((chosen & facts.ended_by_next).sum() + now.sum()),
        broken=int((~done & ~open_).sum()),
        unknown=unknown,
        refused=int(done.sum() - chosen.sum()) - unknown,
        lost=np.maximum(first - appended.next, 0),
        waiting=span.stop - following,
    )


def reader_of(reader: Reader, episodes: Finished) -> RangesReader:
    """A reader of finished episodes alone, closed with the other one."""
    description = reader.describe()
    reader.narrow(episodes.ranges.span(description.stop))
    return RangesReader(reader, episodes.ranges, description.stop)
