"""Samplers made of other samplers: mixtures, restrictions, and what they share.

A `Wrapper` passes priorities and its end on to its parts. A `NarrowingSampler` draws
with one other sampler from some of a view's starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import isfinite
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import is_number
from mmreplay.episodes.starts import legal_among
from mmreplay.errors import EmptyError, FormatError, SchemaError, shown
from mmreplay.ring import Span
from mmreplay.samplers.base import (
    PADDED,
    Draw,
    Sampler,
    State,
    Traits,
    View,
    Windows,
    alike,
    ask,
    call_repr,
    checked,
    common,
    keeps_priorities,
    padded,
    traits_of,
)
from mmreplay.samplers.holding import all_or_nothing, bookmark_of, return_to
from mmreplay.samplers.joint import JointWeights, Mass
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.states import check_kind, integers, parts, stored_integer

Ids = NDArray[np.int64]


def draw_joined(
    asked: Sequence[tuple[Sampler, View, int]], key: int, pad: bool = False
) -> tuple[Draw, list[int]]:
    """Draw with each of several samplers, and put the draws one after the other.

    Where one fails, or they do not fit together, all are put back: a failed draw
    does not count.

    Args:
        asked: Samplers, what each is shown and how many it is to draw; at least one.
        key: Of the whole.
        pad: They are whole episodes, padded to the longest.

    Returns:
        The draw, and how many each drew.

    Raises:
        EmptyError: One has nothing to draw.
        SchemaError: Their windows differ.
    """

    def draw_each() -> tuple[Draw, list[int]]:
        drawn = [sampler.draw(view, count) for sampler, view, count in asked]
        return joined(drawn, key, pad), [len(draw) for draw in drawn]

    return all_or_nothing([sampler for sampler, _, _ in asked], draw_each)


def joined(draws: Sequence[Draw], key: int, pad: bool = False) -> Draw:
    """Put draws one after the other.

    Args:
        draws: At least one; all of single steps, or all of windows.
        key: Of the whole.
        pad: Windows are padded to the longest; else all are equally long.

    Raises:
        SchemaError: Their windows differ in length or first_only, or some are ragged
            episodes.
    """
    windows = [draw.windows for draw in draws if draw.windows is not None]
    if len(draws) == 1:
        return replace(draws[0], key=key)
    lengths = [None if draw.windows is None else draw.windows.positions.shape[1] for draw in draws]
    if any(draw.offsets is not None for draw in draws):
        raise SchemaError(
            "samplers that share a batch must draw steps or windows, got ragged "
            "episodes. Create the EpisodeSampler with layout='padded'."
        )
    if len(set(lengths)) > 1 and not pad:
        raise SchemaError(
            "samplers that share a batch must draw windows of one length, got lengths "
            f"{lengths}. Wrap the mixture in one SequenceSampler instead."
        )
    of_first = {tuple(sorted(window.first_only)) for window in windows}
    if len(of_first) > 1:
        raise SchemaError(
            "samplers that share a batch must draw windows of one first_only, got "
            f"{sorted(map(list, of_first))}. Give all of them the same first_only."
        )
    if pad:
        windows = padded(windows)
    return Draw(
        np.concatenate([draw.env_ids for draw in draws]),
        np.concatenate([draw.positions for draw in draws]),
        np.concatenate([draw.probabilities for draw in draws]),
        np.concatenate([draw.weights for draw in draws]),
        key,
        Windows.joined(windows) if windows else None,
    )


def refuse_leasing(samplers: Sequence[Sampler], owner: str) -> None:
    """Refuse samplers of a batch's shares that lease what they draw.

    A batch has the key of the whole, by which no share's lease is found.

    Args:
        samplers: Each draws a share.
        owner: The sampler that they draw for.

    Raises:
        SchemaError: One is a `UseCounter` with a lease, or has one inside.
    """
    waiting = list(samplers)
    while waiting:
        sampler = waiting.pop()
        if getattr(sampler, "lease_s", None) is not None:
            raise SchemaError(
                f"a sampler inside a {owner} must not lease its steps, got a "
                f"{type(sampler).__name__} with lease_s={sampler.lease_s}. Put the "  # type: ignore[attr-defined]  # looked at above
                f"{owner} inside of it, or leave out lease_s."
            )
        waiting += ask(sampler, "parts")


def refuse_counts_of_one_name(samplers: Sequence[Sampler]) -> None:
    """Refuse samplers that draw together and would store counts in one file.

    Raises:
        SchemaError: Two of them, or of their parts, are a `UseCounter` of one name.
    """
    counters: dict[str, Sampler] = {}
    waiting = list(samplers)
    while waiting:
        sampler = waiting.pop()
        name: str | None = getattr(sampler, "counts_name", None)
        if name is not None and counters.setdefault(name, sampler) is not sampler:
            raise SchemaError(
                "name must be another one for each UseCounter of a sampler, got "
                f"{name!r} twice. Give each a name of its own, or None."
            )
        waiting += ask(sampler, "parts")


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
            f"update_priorities needs a sampler with priorities, got {names}. Put a "
            "PrioritizedSampler inside."
        )
    if len(keeping) > 1:
        # A single one looks at everything itself before it takes anything.
        check_each(view, keeping, env_ids, positions, values, mask)
    dropped = 0
    for sampler in keeping:
        update = ask(sampler, "update_priorities")
        dropped = max(dropped, update(view, env_ids, positions, values, mask))
    return dropped


def check_each(
    view: View,
    samplers: Sequence[Sampler],
    env_ids: Ids,
    positions: Ids,
    values: NDArray[np.generic],
    mask: NDArray[np.bool_] | None,
) -> None:
    """Refuse priorities that one of the samplers would refuse.

    Raises:
        SchemaError: A value, or a shape, is not one that it takes.
        StaleError: A position was never written.
    """
    for sampler in samplers:
        if keeps_priorities(sampler):
            check = ask(sampler, "check_priorities")
            check(view, env_ids, positions, values, mask)


def close_each(samplers: Sequence[Sampler]) -> None:
    """Close the samplers that can be closed, all of them even if one fails."""
    with ExitStack() as stack:
        for sampler in samplers:
            stack.callback(ask(sampler, "close"))


def state_of(sampler: Sampler, priorities: bool) -> State:
    """State of a sampler, with the priorities that it keeps if asked for."""
    if priorities and keeps_priorities(sampler):
        state: State = ask(sampler, "state_dict")(priorities=True)
        return state
    return sampler.state_dict()


class Wrapper(Sampler):
    """A sampler that draws with one or several others, its parts.

    Attributes:
        parts: The samplers that priorities are passed on to.
    """

    parts: Sequence[Sampler]

    def __init__(self, parts: Sequence[Sampler]) -> None:
        """Make one.

        Args:
            parts: The samplers that it draws with.
        """
        refuse_counts_of_one_name(parts)
        self.parts = parts
        self.form = common(parts)
        traits = [traits_of(part) for part in parts]
        self.keeps_priorities = any(part.priorities for part in traits)
        self.draws_once = any(part.once for part in traits)

    def shown(self, view: View) -> View:
        """Return what the parts are shown of a view; all of it by default."""
        return view

    def can_draw(self, view: View, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Which legal starts a part may draw; see `Sampler.can_draw`."""
        view = self.shown(view)
        drawn = legal_among(view, env_ids, positions)
        inside = np.flatnonzero(drawn)
        if len(inside):
            some = env_ids[inside], positions[inside]
            answers = [ask(part, "can_draw")(view, *some) for part in self.parts]
            drawn[inside] = np.logical_or.reduce(answers)
        return drawn

    def check_priorities(
        self,
        view: View,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Refuse what a part would refuse; see `Sampler.check_priorities`."""
        view = self.shown(view)
        check_each(view, self.parts, env_ids, positions, values, mask)

    def update_priorities(
        self,
        view: View,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> int:
        """Pass priorities on to each part that keeps some; see `PrioritySampler`.

        All of those get them or none does, whichever part drew the steps.
        """
        view = self.shown(view)
        return update_each(view, self.parts, env_ids, positions, values, mask)

    def close(self) -> None:
        """Release what the parts hold, such as stored priorities."""
        close_each(self.parts)


class NarrowingSampler(Wrapper):
    """Draws with one other sampler from some of a view's starts.

    Epochs and priorities are those of the starts that are left.
    """

    @property
    def epoch(self) -> int | None:  # type: ignore[override]  # set by its part alone
        """Epochs gone through; None where the part has none."""
        part = self.parts[0]
        return part.epoch if traits_of(part).ends else None

    @property
    def distinct(self) -> bool:  # type: ignore[override]  # set by its part alone
        """Whether no step comes twice in a batch, as of its part."""
        return traits_of(self.parts[0]).distinct

    @property
    def divides(self) -> str:  # type: ignore[override]  # set by its part alone
        """How a batch is divided between buffers: as of its part."""
        return traits_of(self.parts[0]).divides

    def mass(self, view: View, step: int) -> Mass:
        """That of the part, of the starts that are left; see `Sampler.mass`."""
        mass: Mass = ask(self.parts[0], "mass")(self.shown(view), step)
        return mass

    def draw_at(self, view: View, shares: NDArray[np.float64]) -> Draw:
        """Draw the steps that shares fall on; see `Sampler.draw_at`."""
        draw: Draw = ask(self.parts[0], "draw_at")(self.shown(view), shares)
        return draw

    def enter_at(self, priority: float) -> None:
        """See `Sampler.enter_at`."""
        ask(self.parts[0], "enter_at")(priority)

    def points(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Points of batches, as of the part; see `Sampler.points`."""
        points: NDArray[np.float64] = ask(self.parts[0], "points")(numbers)
        return points

    def joint_weights(self, step: int, masses: Sequence[Mass]) -> JointWeights:
        """Weights of a batch from several buffers, as of the part."""
        weights: JointWeights = ask(self.parts[0], "joint_weights")(step, masses)
        return weights

    def num_starts_of(self, view: View) -> int:
        """Legal starts that are left; see `Sampler.num_starts_of`."""
        count: int = ask(self.parts[0], "num_starts_of")(self.shown(view))
        return count

    def more(self, view: View, batch_size: int) -> bool:
        """Whether this epoch has another batch; see `Sampler.more`."""
        part = self.parts[0]
        return not traits_of(part).ends or part.more(self.shown(view), batch_size)

    def num_batches(self, view: View, batch_size: int) -> int:
        """Batches of the whole of this epoch; see `Sampler.num_batches`.

        Raises:
            TypeError: The part has no epochs.
        """
        part = self.parts[0]
        if not traits_of(part).ends:
            raise TypeError(
                "num_batches needs a sampler with epochs, got "
                f"{type(part).__name__}. Put a ShuffledSampler inside."
            )
        return part.num_batches(self.shown(view), batch_size)

    def update_priorities(
        self,
        view: View,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> int:
        """Pass priorities on to the part; see `PrioritySampler`."""
        if not self.keeps_priorities:
            return super().update_priorities(view, env_ids, positions, values, mask)
        # To go through all parts takes 0.4 of the 4.4 µs of an update of 64.
        update = ask(self.parts[0], "update_priorities")
        dropped: int = update(self.shown(view), env_ids, positions, values, mask)
        return dropped


class Shares:
    """Splits batches so that every part's total follows its share.

    Each batch is split by the largest remainder (Hamilton's method), and what a
    part got too little or too much of goes into the next batch. So after any number
    of batches no part is off its share of everything drawn by as much as one step,
    of two parts, or as there are parts, of more.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        """Take shares.

        Args:
            shares: One a part, above 0; only their ratios count.

        Raises:
            SchemaError: There is none, or one is not above 0.
        """
        if not shares or not all(
            is_number(share) and isfinite(share) and share > 0 for share in shares
        ):
            raise SchemaError(
                "shares must be numbers above 0, one for each sampler, got "
                f"{list(shares)}. Leave a sampler out to draw nothing from it."
            )
        total = float(sum(shares))
        self.fractions = np.array([share / total for share in shares])
        self._drawn = np.zeros(len(shares), np.int64)

    def split(self, batch_size: int) -> list[int]:
        """Say how many each part is to draw, their sum being batch_size."""
        due = self.fractions * (int(self._drawn.sum()) + batch_size) - self._drawn
        due = np.maximum(due, 0)
        # What was held back at 0 above is taken from the others alike.
        due *= batch_size / due.sum()
        counts = np.floor(due + 1e-9).astype(np.int64)
        rest = batch_size - int(counts.sum())
        counts[np.argsort(counts - due, kind="stable")[:rest]] += 1
        return [int(count) for count in counts]

    def count(self, drawn: Sequence[int]) -> None:
        """Note how many each part drew: fewer than asked for where it had no more."""
        self._drawn = self._drawn + np.array(drawn, np.int64)

    def state_dict(self) -> State:
        """What each part has drawn, and the shares."""
        return {"shares": self.fractions.tolist(), "drawn": self._drawn.tolist()}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state.

        Raises:
            FormatError: It is of other shares.
        """
        if state.get("shares") != self.fractions.tolist():
            raise FormatError(
                f"sampler state: shares must be {self.fractions.tolist()}, got "
                f"{state.get('shares')!r:.60}. Load it into a mixture of the same "
                "shares."
            )
        drawn = integers(state, "drawn")
        if len(drawn) != len(self._drawn) or (drawn > 1 << 52).any():
            raise FormatError(
                "sampler state: drawn must be one number below 2**52 for each of "
                f"{len(self._drawn)} samplers, got {drawn.tolist()!r:.60}. Pass what "
                "state_dict returned, unchanged."
            )
        self._drawn = drawn


class MixtureSampler(Wrapper):
    """Draws a share of each batch with each of several samplers, over one buffer.

    ``MixtureSampler([(PrioritizedSampler(), 3), (UniformSampler(), 1)])`` draws 192
    and 64 of 256, in that order; see `Shares` for batches that do not divide. A part
    that draws fewer (a `ShuffledSampler` at an epoch's end) makes the batch shorter,
    and gets what it missed later. Whole episodes are padded to the longest of all
    parts. For shares over several buffers see `concat`.

    Probabilities and weights are those of the sampler that drew the step, not of the
    mixture: a sampler does not know how likely it would draw another one's steps.
    Priorities go to every part that keeps some, whichever part drew the steps.

    Example:
        >>> newest = mr.EmphasizeRecentSampler(1000, seed=0)
        >>> sampler = mr.MixtureSampler([(mr.UniformSampler(seed=0), 3), (newest, 1)])
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
        >>> len(buffer.sample(32))
        32
    """

    _random: StepGenerator

    def __init__(
        self, samplers: Sequence[tuple[Sampler, float]], *, seed: int | None = None
    ) -> None:
        """Make a sampler.

        Args:
            samplers: Each with its share, above 0; only the shares' ratios count.
            seed: Of `Draw.key` alone; None takes one from the system.

        Raises:
            SchemaError: A share is not above 0, there is no sampler, one has a
                `UseCounter` with a lease, or what they draw does not fit one batch:
                steps and windows, windows of several lengths or `first_only`, ragged
                episodes, groups.
        """
        if not isinstance(samplers, Sequence):
            raise SchemaError(
                "samplers must be a list of pairs of a sampler and its share, got "
                f"{shown(samplers)}. Pass, for example, [(mmreplay.UniformSampler(), "
                "1)]."
            )
        pairs = [_pair(entry) for entry in samplers]
        self._shares = Shares([share for _, share in pairs])
        super().__init__(alike([sampler for sampler, _ in pairs]))
        refuse_leasing(self.parts, "MixtureSampler")
        self._random = StepGenerator(seed)
        self._step = 0

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(self)

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        return {
            "samplers": list(zip(self.parts, self._shares.fractions.tolist(), strict=True)),
            "seed": self._random.given_seed,
        }

    @property
    def traits(self) -> Traits:
        """Those of the parts; what they drew so far decides what each draws next."""
        return replace(super().traits, memory=True)

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch, part by part; see `Sampler.draw`.

        Raises:
            EmptyError: A part has nothing to draw.
            SchemaError: Some draw windows, and not all of the same length.
        """
        counts = self._shares.split(batch_size)
        asked = [
            (sampler, view, count)
            for sampler, count in zip(self.parts, counts, strict=True)
            if count
        ]
        pad = self.form == PADDED
        draw, drawn = draw_joined(asked, self._random.key(self._step), pad)
        lengths = iter(drawn)
        self._shares.count([next(lengths) if count else 0 for count in counts])
        self._step += 1
        return draw

    def bookmark(self) -> Any:
        """See `Sampler.bookmark`."""
        return self._step, self._shares._drawn, *map(bookmark_of, self.parts)

    def return_to(self, bookmark: Any) -> None:
        """See `Sampler.return_to`."""
        self._step, self._shares._drawn, *parts = bookmark
        for sampler, each in zip(self.parts, parts, strict=True):
            return_to(sampler, each)

    def state_dict(self, priorities: bool = False) -> State:
        """Seed, step, what each part has drawn, and the states of the parts.

        Args:
            priorities: With those that parts keep, as arrays.
        """
        return {
            "kind": "MixtureSampler",
            "seed": self._random.seed,
            "step": self._step,
            "parts": [state_of(sampler, priorities) for sampler in self.parts],
            **self._shares.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Sampler.load_state_dict`."""
        check_kind(state, "MixtureSampler")
        seed, step = stored_integer(state, "seed"), stored_integer(state, "step")
        others = parts(state, "parts", len(self.parts))
        before = self.state_dict(priorities=True)
        try:
            self._shares.load_state_dict(state)
            for sampler, other in zip(self.parts, others, strict=True):
                sampler.load_state_dict(other)
        except BaseException:
            # Half of another state would be a third one.
            self._shares.load_state_dict(before)
            for sampler, mine in zip(self.parts, before["parts"], strict=True):
                sampler.load_state_dict(mine)
            raise
        self._random, self._step = StepGenerator(seed), step


def _pair(entry: object) -> tuple[object, float]:
    """A sampler and its share."""
    if isinstance(entry, tuple | list) and len(entry) == 2:
        return entry[0], entry[1]
    raise SchemaError(
        f"samplers must be pairs of a sampler and its share, got {shown(entry)}. "
        "Pass, for example, [(mmreplay.UniformSampler(), 1)]."
    )


class Restriction(Protocol):
    """Says which legal starts may be drawn."""

    def of(self, view: View) -> View:
        """Return the part of a view that is left; its legal starts are the view's."""

    def state_dict(self) -> State:
        """What the restriction is, as JSON values."""

    def check(self, state: State) -> None:
        """Refuse the state of another restriction.

        Raises:
            FormatError: It is another one's.
        """


class RestrictedSampler(NarrowingSampler):
    """Draws with another sampler from the legal starts that a restriction leaves.

    Any sampler will do: epochs, priorities and sequences are those of the part. Put
    it inside of a `SequenceSampler` and windows begin in the part; outside of it and
    the sequences are drawn from the part.
    """

    def __init__(self, restriction: Restriction, sampler: Sampler) -> None:
        """Restrict a sampler; see `ignore_earliest` and `split`.

        Args:
            restriction: What may be drawn.
            sampler: Draws it.

        Raises:
            SchemaError: That is no sampler.
        """
        super().__init__([checked(sampler)])
        self._restriction = restriction
        self._last: tuple[View, Span, View] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the view, which belongs to this process's buffer."""
        return self.__dict__ | {"_last": None}

    def shown(self, view: View) -> View:
        """Restrict a view, once for each look at its starts."""
        starts = view.starts
        last = self._last
        if last is None or last[0] is not view or last[1] is not starts:
            last = self._last = (view, starts, self._restriction.of(view))
        return last[2]

    @property
    def divides(self) -> str:  # type: ignore[override]  # set by its part alone
        """As of its part: what each buffer leaves is drawn from as one."""
        return traits_of(self.parts[0]).divides

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        return {"restriction": self._restriction, "sampler": self.parts[0]}

    @property
    def joint_settings(self) -> dict[str, Any]:
        """Those of the sampler inside: each buffer may leave out what it will."""
        settings: dict[str, Any] = ask(self.parts[0], "joint_settings")
        return settings

    def __repr__(self) -> str:
        """Say what draws, and within what."""
        return f"<{self.parts[0]!r} within {self._restriction!r}>"

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch; see `Sampler.draw`.

        Raises:
            EmptyError: There is no legal start in the part.
        """
        try:
            return self.parts[0].draw(self.shown(view), batch_size)
        except EmptyError as error:
            # What the sampler advises does not help against the restriction.
            what = str(error).partition(". ")[0]
            raise EmptyError(
                f"{what} within {self._restriction!r}. Add steps first, or draw from more rows."
            ) from error

    def state_dict(self, priorities: bool = False) -> State:
        """Return the restriction and the state of the sampler.

        Args:
            priorities: With those that the sampler keeps, as arrays.
        """
        return {
            "kind": "RestrictedSampler",
            "restriction": self._restriction.state_dict(),
            "parts": [state_of(self.parts[0], priorities)],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Sampler.load_state_dict`."""
        check_kind(state, "RestrictedSampler")
        self._restriction.check(state.get("restriction", {}))
        self.parts[0].load_state_dict(parts(state, "parts", 1)[0])
