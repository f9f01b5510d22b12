"""Whole episodes, padded to the longest of the batch or one after another.

An episode is drawn by one of its steps, with any sampler of steps: by its first one,
so that a uniform sampler draws every episode as often and a `ShuffledSampler` each
once an epoch; or by all of them, so that episodes come as often as they are long
(and by the sum of their steps' priorities, of a `PrioritizedSampler`).

By default only whole episodes are drawn: not *headless* ones, whose first steps have
left the ring, nor *running* ones, which have not ended. An episode that was truncated
by a restart of the program counts as ended. An ended episode has all its steps: one
whose next observation is not known, such as a truncated last one, is no transition, and
the mask is false there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import integer, one_of
from mmreplay.episodes import START, EpisodeIndex
from mmreplay.episodes.starts import WindowShape, WindowStarts
from mmreplay.errors import SchemaError, called, refuse_masked, shown
from mmreplay.samplers.base import (
    PADDED,
    RAGGED,
    Draw,
    Sampler,
    State,
    Traits,
    View,
    Windows,
    call_repr,
    single,
    traits_of,
)
from mmreplay.samplers.holding import all_or_nothing
from mmreplay.samplers.sequence import WindowSampler, with_transitions

LAYOUTS = ("padded", "ragged")
WEIGHTINGS = ("episode", "length")
# No position is as large: only first steps are starts.
FIRST_ONLY = 1 << 62

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EpisodeRows:
    """Some episodes, for a filter to look at.

    Attributes:
        env_ids: int64 ``[N]``.
        begin: int64 ``[N]``, position of the first step alive.
        end: int64 ``[N]``, one past the last step.
        running: bool ``[N]``, no end was seen yet.
        stop: int64 ``[N]``, one past the last step that batches hold: less than `end`
            of an episode that is running, whose newest step waits for the next row.
    """

    env_ids: Ids
    begin: Ids
    end: Ids
    running: NDArray[np.bool_]
    stop: Ids

    @property
    def lengths(self) -> Ids:
        """int64 ``[N]``, steps that batches hold."""
        return self.stop - self.begin


Where = Callable[[EpisodeRows], NDArray[np.bool_]]
"""Returns which episodes may be drawn, bool ``[N]``."""


class Returns(Protocol):
    """Episodes and their returns, such as `mmreplay.episode_table` gives."""

    @property
    def env_ids(self) -> Ids:
        """int64 ``[N]``."""

    @property
    def end(self) -> Ids:
        """int64 ``[N]``, one past the last step."""

    @property
    def returns(self) -> NDArray[np.float64]:
        """float64 ``[N]``."""


def return_within(table: Returns, least: float = -np.inf, most: float = np.inf) -> Where:
    """Make a filter of episodes by their returns, as far as they are known.

    Args:
        table: Episodes with their returns, as ``mmreplay.episode_table(buffer)``
            reads them; an episode that is not in it, or has no return, is not drawn,
            nor a running one of which batches hold fewer steps than were summed.
        least: The smallest return.
        most: The largest one.

    Raises:
        SchemaError: The table is something else.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> good = mr.return_within(mr.episode_table(buffer), least=20.0)
        >>> buffer.sampler = mr.EpisodeSampler(mr.UniformSampler(seed=0), where=good)
        >>> bool((buffer.sample(8).mask.sum(1) >= 20).all())
        True
    """
    if not hasattr(table, "returns"):
        raise SchemaError(
            f"table must be an episode table, got {shown(table)}. Pass "
            "mmreplay.episode_table(buffer)."
        )
    good = (table.returns >= least) & (table.returns <= most)
    known = {
        env_id: np.sort(table.end[good & (table.env_ids == env_id)])
        for env_id in np.unique(table.env_ids).tolist()
    }
    return partial(_ends_in, known)


def _ends_in(known: dict[int, Ids], rows: EpisodeRows) -> NDArray[np.bool_]:
    """Tell which episodes end where one of those known does."""
    matches, none = np.zeros(len(rows.end), bool), np.empty(0, np.int64)
    for env_id in np.unique(rows.env_ids).tolist():
        here = rows.env_ids == env_id
        matches[here] = np.isin(rows.end[here], known.get(env_id, none))
    matches &= rows.stop == rows.end
    return matches


@dataclass(frozen=True, slots=True)
class Filter:
    """Which episodes may be drawn.

    Attributes:
        missing_start: Whether episodes whose first steps have left the ring may.
        unfinished: Whether episodes that have not ended may.
        min_length: In steps.
        max_length: In steps.
        where: Asked of the others; None for all.
    """

    missing_start: bool
    unfinished: bool
    min_length: int
    max_length: int
    where: Where | None

    def keep(
        self,
        index: EpisodeIndex,
        env_ids: Ids,
        begins: Ids,
        stops: Ids,
        unfinished: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Choose among episodes; see `EpisodeFilter.keep`."""
        good: NDArray[np.bool_] = stops - begins >= self.min_length
        good &= stops - begins <= self.max_length
        if self.where is not None and good.any():
            some = np.flatnonzero(good)
            _, ends = index.locate(env_ids, begins)
            asked = EpisodeRows(
                env_ids[some], begins[some], ends[some], unfinished[some], stops[some]
            )
            good[some] = _checked_answer(
                called("EpisodeSampler where", self.where, asked), len(some)
            )
        return good


class EpisodeSampler(WindowSampler):
    """Draws whole episodes.

    ``"padded"`` batches hold ``[B, T, *shape]`` with a mask and ``is_first``, T the
    length of the longest episode drawn; ``"ragged"`` ones hold the steps one after
    another, ``[N, *shape]``, and `Batch.offsets`, int64 ``[B + 1]``, where each
    episode begins. Costs O(steps drawn + B log episodes).

    Example:
        >>> sampler = mr.EpisodeSampler(mr.UniformSampler(seed=0), max_length=100)
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
        >>> batch = buffer.sample(8)  # padded to the longest
        >>> batch["reward"].shape == batch.mask.shape
        True
    """

    _kind = "EpisodeSampler"

    def __init__(
        self,
        sampler: Sampler | None = None,
        *,
        by: str = "episode",
        layout: str = "padded",
        min_length: int = 1,
        max_length: int | None = None,
        where: Where | None = None,
        headless: bool = False,
        running: bool = False,
    ) -> None:
        """Make a sampler of episodes.

        Args:
            sampler: What draws them by a step, of single steps; uniform by default.
            by: ``"episode"``: by their first steps; ``"length"``: by any step.
            layout: ``"padded"`` or ``"ragged"``.
            min_length: Shorter ones are not drawn.
            max_length: Longer ones are not drawn; windows of them are for
                `SequenceSampler`. None for any length.
            where: Returns which of the others are, bool ``[N]``; see `return_within`.
                Its answer for an episode that has ended is kept.
            headless: Draw what is left of episodes that the ring is overwriting, too;
                by length only, since their first steps are gone, and unfiltered.
            running: Draw what there is of episodes that have not ended, too.

        Raises:
            SchemaError: An argument is unknown or out of range, or two do not go
                together.
        """
        one_of("by", by, WEIGHTINGS)
        one_of("layout", layout, LAYOUTS)
        if where is not None and not callable(where):
            raise SchemaError(
                f"where must be a callable that selects episodes, got {shown(where)}. "
                "Pass, for example, return_within(table, least=0.0)."
            )
        way_out = "Give a number of steps."
        min_length = integer("min_length", min_length, 1, way_out)
        longest = FIRST_ONLY
        if max_length is not None:
            longest = integer("max_length", max_length, 1, way_out)
        if min_length > longest:
            raise SchemaError(
                "min_length and max_length must satisfy 1 <= min_length <= "
                f"max_length, got {min_length} and {max_length}. Count steps."
            )
        chosen = Filter(headless, running, min_length, longest, where)
        _check_pairs(sampler, by, layout, chosen)
        self._arguments: State = {
            "by": by,
            "layout": layout,
            "min_length": min_length,
            "max_length": longest,
            "headless": bool(headless),
            "running": bool(running),
        }
        stride = FIRST_ONLY if by == "episode" else 1
        inside = None if sampler is None else single(sampler, "EpisodeSampler")
        super().__init__(inside, WindowShape(0, 1, stride, False), chosen)
        self._where = where
        self.form = self._form()

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(self)

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        arguments = dict(self._arguments)
        if arguments["max_length"] == FIRST_ONLY:
            arguments["max_length"] = None
        return {"sampler": self.parts[0], **arguments, "where": self._where}

    def _form(self) -> str:
        return PADDED if self._arguments["layout"] == "padded" else RAGGED

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw episodes; see `Sampler.draw`.

        Raises:
            EmptyError: There is no such episode.
        """
        return all_or_nothing(self.parts, self._draw, view, batch_size)

    def _draw(self, view: View, batch_size: int) -> Draw:
        way_out = "let shorter, longer or running ones in"
        if isinstance(self._episodes, Filter) and self._episodes.where is not None:
            way_out = f"have `where` choose others, or {way_out}"
        drawn = self._draw_starts(view, batch_size, "episodes", way_out)
        starts = self.shown(view)
        begin, stop = starts.episode_bounds(drawn.env_ids, drawn.positions)
        if self._arguments["layout"] == "ragged":
            return _ragged(starts, drawn, begin, stop)
        return _padded(starts, drawn, begin, stop)


def _padded(view: WindowStarts, drawn: Draw, begin: Ids, stop: Ids) -> Draw:
    columns = np.arange(int((stop - begin).max()))
    steps = begin[:, None] + columns
    inside = np.minimum(steps, stop[:, None] - 1)
    mask = steps < stop[:, None]
    first = np.zeros(steps.shape, bool)
    first[:, 0] = view.flags(drawn.env_ids, begin) & START
    mask = with_transitions(view, drawn.env_ids, inside, mask)
    return drawn.around(Windows(inside, mask, first))


def _ragged(view: WindowStarts, drawn: Draw, begin: Ids, stop: Ids) -> Draw:
    lengths = stop - begin
    offsets = np.append(0, np.cumsum(lengths))
    steps = np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], lengths)
    env_ids, mask = np.repeat(drawn.env_ids, lengths), None
    if view.derives_next:
        mask = view.transitions(env_ids, steps)
        mask = np.ones(len(steps), bool) if mask is None else mask
    return Draw(
        env_ids,
        steps,
        np.repeat(drawn.probabilities, lengths),
        np.repeat(drawn.weights, lengths),
        drawn.key,
        None,
        offsets,
        mask=mask,
    )


def _checked_answer(answer: object, count: int) -> NDArray[np.bool_]:
    refuse_masked(answer, "EpisodeSampler where")
    good = np.asarray(answer)
    if good.shape != (count,) or good.dtype != np.bool_:
        raise SchemaError(
            f"where must return bool[{count}], got {good.dtype}{list(good.shape)}. "
            "Return True for each episode that may be drawn."
        )
    return good


def _check_pairs(sampler: Sampler | None, by: str, layout: str, chosen: Filter) -> None:
    """Refuse arguments that do not go together."""
    traits = Traits() if sampler is None else traits_of(sampler)
    fickle = chosen.max_length < FIRST_ONLY or chosen.where is not None
    if chosen.missing_start and by == "episode":
        raise SchemaError(
            "headless must be False with by='episode', got True: the first step of "
            "such an episode was overwritten. Pass by='length' to draw its other "
            "steps."
        )
    if chosen.missing_start and (fickle or chosen.min_length > 1):
        raise SchemaError(
            "headless must be False with min_length, max_length or where, got True. "
            "Leave one of them out: an episode without its first steps gets shorter "
            "with every overwritten step."
        )
    if chosen.unfinished and fickle and traits.epochs:
        raise SchemaError(
            "running must be False with max_length or where and a sampler with "
            "epochs, got True. Leave it out: an unfinished episode could leave the "
            "epoch as it grows."
        )
    if layout == "ragged" and traits.priorities:
        raise SchemaError(
            "layout must be 'padded' with a sampler with priorities, got 'ragged'. "
            "Priorities are of episodes, and ragged batches are of steps."
        )
