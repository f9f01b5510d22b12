"""Several buffers drawn from as one: offline and online data, or a buffer a writer.

Ball et al. 2023 ("Efficient Online Reinforcement Learning with Offline Data", RLPD)
draw half of each batch from each buffer::

    both = mr.concat([offline, online], shares=[0.5, 0.5], seed=0)
    batch = both.sample(256)
    both.update_priorities(batch, td_error)

`Concat` divides each batch between the buffers and has each buffer's sampler draw its
steps. What it returns is laid out buffer by buffer: a `Batch`, or a `ConcatDraw`, which
has no data and is gathered in any process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.arguments import integer, one_of
from mmreplay.batch import Batch, as_numpy
from mmreplay.buffer.opening import StrPath
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import EmptyError, SchemaError, shown
from mmreplay.samplers.base import (
    GROUPS,
    PADDED,
    RAGGED,
    Draw,
    Sampler,
    State,
    ask,
    keeps_priorities,
    padded,
    traits_of,
)
from mmreplay.samplers.combine import Shares, check_each, state_of
from mmreplay.samplers.divided import DrawAtShares, not_alike, refuse_alone
from mmreplay.samplers.holding import all_or_nothing, bookmark_of, put_back, threads
from mmreplay.samplers.joint import DrawPlan, JointWeights
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.states import check_kind, parts, same, stored_integer
from mmreplay.samplers.uses import counters_in
from mmreplay.schema import Schema

Ids = NDArray[np.int64]
T = TypeVar("T", bound=Sized)
U = TypeVar("U")


def concat(
    sources: Sequence[ReplayBuffer | StrPath],
    shares: Sequence[float] | None = None,
    *,
    by: Literal["rows", "priority"] = "rows",
    seed: int | None = None,
) -> Concat:
    """Draw from several buffers as if they were one.

    Args:
        sources: Open buffers, each with its own sampler and transforms; or folders,
            which are opened for reading and drawn from uniformly.
        shares: Exact shares of each batch, above 0; only their ratios count. By default
            every batch is divided at random, in proportion to the steps, windows or
            episodes that each buffer has: with uniform samplers, the draws of one large
            buffer.
        by: ``"priority"`` divides in proportion to the masses of all steps instead: the
            draws and importance weights of one large buffer with the buffers' sampler,
            such as a `PrioritizedSampler` or a `SequenceSampler` around one. All need
            the same arguments but name, eta and seed; see docs/samplers.md for which
            samplers can. New rows enter at the highest priority of all.
        seed: Seed of that division; None takes one from the system.

    Raises:
        SchemaError: There is no source, schemas differ, a share is not above 0, or
            samplers cannot draw by priority as one, or no batches that can be divided:
            groups, ragged episodes, steps in one buffer and windows in another, or
            leased ones.
        FormatError: There is no buffer at a path.

    Example:
        >>> both = mr.concat(["runs/cartpole", "runs/cartpole"], shares=[3, 1], seed=0)
        >>> np.bincount(both.sample(32).buffer_ids)
        array([24,  8])
    """
    return Concat(sources, shares, seed, by)


class Concat:
    """Several buffers of one schema, drawn from as one; see `concat`.

    Batches are laid out buffer by buffer, and have ``batch.buffer_ids``. Writers of
    the buffers may write on meanwhile, in any processes.

    Attributes:
        buffers: The buffers.
        lock: Held from the beginning of a draw to its end.

    Example:
        >>> mr.record("CartPole-v1", "runs/more", steps=500).steps
        500
        >>> both = mr.concat(["runs/cartpole", "runs/more"], shares=[1, 1])
        >>> batch = both.sample(32)
        >>> np.bincount(batch.buffer_ids)
        array([16, 16])
    """

    def __init__(
        self,
        sources: Sequence[ReplayBuffer | StrPath],
        shares: Sequence[float] | None,
        seed: int | None,
        by: str = "rows",
    ) -> None:
        """Open the folders among the sources; see `concat`."""
        one_of("by", by, ("rows", "priority"), "Leave it out to divide by steps.")
        if by == "priority" and shares is not None:
            raise SchemaError(
                f"by must be 'rows' where shares are given, got {by!r}. Leave one of both out."
            )
        single = isinstance(sources, ReplayBuffer | PathLike | str | bytes)
        if single or not len(sources):
            raise SchemaError(
                f"sources must be a list of buffers or folders, got {shown(sources)}. "
                "Pass a list such as [offline, online]."
            )
        if shares is not None and len(shares) != len(sources):
            raise SchemaError(
                f"shares must have one number for each of {len(sources)} buffers, got "
                f"{len(shares)}. Give each buffer a share, or leave shares out."
            )
        self.lock = threading.RLock()
        self._shares = None if shares is None else Shares(shares)
        self._random = StepGenerator(seed)
        self._step = 0
        self._by = by
        self._weights: JointWeights | None = None
        self._highest = 0.0
        self._divided: Sequence[Sampler] = ()
        with ExitStack() as stack:
            self.buffers = tuple(
                source
                if isinstance(source, ReplayBuffer)
                else stack.enter_context(ReplayBuffer.open(source))
                for source in sources
            )
            for number, buffer in enumerate(self.buffers):
                check_schema(number, buffer, self.buffers[0])
                _check_batches(number, buffer, self.buffers[0])
            self._own_samplers()
            self._opened = stack.pop_all()

    def __getstate__(self) -> dict[str, Any]:
        """Return the buffers, which are pickled themselves, and the next draw."""
        return {
            "buffers": self.buffers,
            "_shares": self._shares,
            "_random": self._random,
            "_step": self._step,
            "_by": self._by,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the buffers, which unpickling opened, and close them with this."""
        self.__dict__.update(
            {"_by": "rows", "_weights": None, "_highest": 0.0, "_divided": (), **state}
        )
        self.lock = threading.RLock()
        self._opened = ExitStack()
        for buffer in self.buffers:
            self._opened.enter_context(buffer)

    def __repr__(self) -> str:
        """Show the buffers and their shares."""
        shares = "" if self._shares is None else f", shares={self.shares}"
        by = "" if self._by == "rows" else f", by={self._by!r}"
        return f"<Concat of {list(self.buffers)}{shares}{by}>"

    @property
    def schema(self) -> Schema:
        """The fields of one step."""
        return self.buffers[0].schema

    @property
    def shares(self) -> list[float] | None:
        """Exact shares of each batch, whose sum is 1; None where none were given."""
        return None if self._shares is None else self._shares.fractions.tolist()

    def __len__(self) -> int:
        """Steps alive in all of them."""
        return sum(len(buffer) for buffer in self.buffers)

    def __getitem__(self, key: object) -> NoReturn:
        """Refuse to be indexed, as a buffer does.

        Raises:
            TypeError: Always.
        """
        batch = f"batch[{key!r}]" if isinstance(key, str) else "batch['reward']"
        raise TypeError(
            f"concat(...)[{key!r}]: several buffers cannot be indexed. Use batch = "
            f"both.sample(256) and {batch}, or both.buffers."
        )

    def __iter__(self) -> NoReturn:
        """Refuse to be iterated over, as a buffer does.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "iter(concat(...)): several buffers cannot be iterated over. Use "
            "mmreplay.ReplayLoader(both, batch_size) for batches, or both.buffers."
        )

    def sample(self, batch_size: int) -> Batch:
        """Draw a batch, from each buffer with its own sampler.

        Args:
            batch_size: Steps of all buffers together, at least 1.

        Returns:
            numpy arrays ``[batch_size, *shape]``, buffer by buffer. Probabilities
            are of a step among those of all buffers; weights are those of the buffer's
            sampler, or with ``by="priority"`` of the whole.

        Raises:
            EmptyError: A buffer that has a share has nothing to draw.
            SchemaError: Transforms or windows of the buffers do not fit together.
        """

        def join(batches: list[Batch]) -> Batch:
            return self.weighed(Batch.join(batches, pad=self.pads))

        batch = self.each(batch_size, self._sample, join)
        # Not before: of a batch that fails no buffer has handed out a step.
        for number, buffer in enumerate(self.buffers):
            if buffer.limit is not None:
                buffer.limit.count(int(np.count_nonzero(batch.buffer_ids == number)))
        return batch

    def draw(self, batch_size: int) -> ConcatDraw:
        """Draw, without the data; see `sample`."""

        def join(draws: list[BufferDraw]) -> ConcatDraw:
            if self._weights is not None:
                probabilities = [one.draw.probabilities for one in draws]
                weights = self._weights.of(np.concatenate(probabilities))
                stops = np.cumsum([len(each) for each in probabilities])[:-1]
                for one, own in zip(draws, np.split(weights, stops), strict=True):
                    one.draw.weights = own
            return join_draws(draws, pad=self.pads)

        return self.each(batch_size, self._draw, join)

    def weighed(self, batch: Batch, weights: JointWeights | None = None) -> Batch:
        """Return a joined batch with its weights, which depend on all of its steps.

        Args:
            batch: Its probabilities are of a step among those of all buffers.
            weights: Of the draw; by default of the last one.
        """
        weights = weights or self._weights
        if weights is None:
            return batch
        return replace(batch, weights=weights.of(batch.probabilities))

    @property
    def pads(self) -> bool:
        """Whether all samplers draw episodes, padded to the longest of each batch."""
        return all(traits_of(buffer.sampler).form == PADDED for buffer in self.buffers)

    def each(
        self,
        batch_size: int,
        one: Callable[[int, int, float, Sampler], T],
        join: Callable[[list[T]], U],
    ) -> U:
        """Draw from each buffer, or from none: a failed draw counts for no buffer.

        Args:
            batch_size: Steps of all buffers together.
            one: Draws from one buffer; gets its number, the steps to draw, its share
                in all steps and what draws them. The length of its result is the steps
                drawn.
            join: Joins the results; may fail as well.
        """
        with self.lock:
            counts, fractions, samplers = self._split(batch_size)
            drawn: list[T] = []

            def draw_each() -> U:
                for number, count in enumerate(counts):
                    if count:
                        share = fractions[number], samplers[number]
                        try:
                            drawn.append(one(number, count, *share))
                        except EmptyError as error:
                            buffer = self.buffers[number]
                            error.add_note(f"buffer {number} of concat: {buffer!r}")
                            raise
                return join(drawn)

            before = []
            for buffer in self.buffers:
                reader = buffer.view
                with reader.lock:
                    total, sampler = reader.draws.total, buffer.sampler
                    before.append((reader, total, sampler, bookmark_of(sampler)))
            drawing, own = threads.drawing, list[object]()
            outer = drawing.drawn
            try:
                drawing.drawn = own
                result = all_or_nothing((), draw_each)
            except BaseException as error:
                for reader, total, sampler, bookmark in before:
                    with reader.lock:
                        # What other threads drew since would be drawn again.
                        if reader.draws.total == total + own.count(reader.draws):
                            put_back(sampler, bookmark, error)
                raise
            finally:
                drawing.drawn = outer
            self._step += 1
            if self._shares is not None:
                lengths = iter([len(some) for some in drawn])
                self._shares.count([next(lengths) if count else 0 for count in counts])
            return result

    def _sample(self, number: int, count: int, fraction: float, sampler: Sampler) -> Batch:
        buffer = self.buffers[number]
        if buffer.limit is not None:
            buffer.limit.await_sample()
        batch = buffer.sample_uncounted(sampler, count, contiguous=True)
        buffer_ids = np.full(len(batch), number)
        probabilities = batch.probabilities * fraction
        return replace(batch, buffer_ids=buffer_ids, probabilities=probabilities)

    def _draw(self, number: int, count: int, fraction: float, sampler: Sampler) -> BufferDraw:
        view = self.buffers[number].view
        with view.lock:
            self.buffers[number].view.draws.count()
            draw = sampler.draw(view, count)
        probabilities = draw.probabilities * fraction
        draw = replace(draw, probabilities=probabilities, buffer=view.home.uuid)
        return BufferDraw(number, draw)

    def _split(self, batch_size: int) -> tuple[list[int], list[float], Sequence[Sampler]]:
        """Divide the next batch.

        Returns:
            The steps of each buffer, its share in all steps, and what draws them.

        Raises:
            EmptyError: No buffer has a step to draw.
            SchemaError: The batch_size is no integer of at least 1.
        """
        integer("batch_size", batch_size, 1, "Pass a number of steps, such as 256.")
        samplers = self._own_samplers()
        if self._by == "priority":
            return self._split_by_priority(samplers, int(batch_size))
        if self._shares is not None:
            counts = self._shares.split(int(batch_size))
            return counts, self._shares.fractions.tolist(), samplers
        sizes = np.array([_num_shown(buffer) for buffer in self.buffers])
        if sizes.sum() == 0:
            raise EmptyError(
                f"cannot draw {batch_size} steps: none of the {len(sizes)} buffers has "
                "a legal start yet. Add steps first."
            )
        fractions = sizes / sizes.sum()
        rng = self._random.at(self._step)
        counts = rng.multinomial(batch_size, fractions).tolist()
        return counts, fractions.tolist(), samplers

    def _split_by_priority(
        self, samplers: Sequence[Sampler], batch_size: int
    ) -> tuple[list[int], list[float], Sequence[Sampler]]:
        """Divide the next batch by a `DrawPlan`; see its module for the proof."""
        step = self._step
        masses = []
        for buffer, sampler in zip(self.buffers, samplers, strict=True):
            ask(sampler, "enter_at")(self._highest)
            view = buffer.view
            with view.lock:
                masses.append(ask(sampler, "mass")(view, step))
        # The highest priority of all buffers is where the next new row enters.
        self._highest = max(mass.highest for mass in masses)
        totals = np.array([mass.total for mass in masses])
        if not totals.sum() > 0:
            legal = sum(mass.num_legal for mass in masses)
            raise EmptyError(
                f"cannot draw {batch_size} steps: the {len(masses)} buffers have "
                f"{legal} legal starts, and all of them priority 0. Add steps, or "
                "update the priorities."
            )
        points = ask(samplers[0], "points")(self._random.shares(step, batch_size))
        plan = DrawPlan.of(totals, points)
        self._weights = weights = ask(samplers[0], "joint_weights")(step, masses)
        key = self._random.key(step)
        parts = [
            DrawAtShares(sampler, own, key, weights)
            for sampler, own in zip(samplers, plan.shares, strict=True)
        ]
        return [len(own) for own in plan.shares], plan.fractions.tolist(), parts

    def _own_samplers(self) -> Sequence[Sampler]:
        """The samplers of the buffers, which a user may have replaced.

        Raises:
            SchemaError: A batch cannot be divided between them.
        """
        samplers = tuple(buffer.sampler for buffer in self.buffers)
        if samplers != self._divided:
            if self._by == "priority":
                _refuse_unlike(samplers)
            refuse_undivided(samplers)
            self._divided = samplers
        return samplers

    def take(self, buffer_ids: ArrayLike, env_ids: ArrayLike, positions: ArrayLike) -> Batch:
        """Gather chosen steps, in their order; see `ReplayBuffer.take`.

        Args:
            buffer_ids: int ``[B]``, in ``[0, len(buffers))``.
            env_ids: int ``[B]``.
            positions: int ``[B]``.

        Raises:
            SchemaError: A buffer is unknown, or the shapes differ.
            StaleError: A position is not in its buffer, or cannot be drawn.
        """
        ids, envs, steps = (np.asarray(a) for a in (buffer_ids, env_ids, positions))
        self._check_buffer_ids(ids)
        if not ids.shape == envs.shape == steps.shape:
            raise SchemaError(
                "buffer_ids, env_ids and positions must have one shape, got "
                f"{list(ids.shape)}, {list(envs.shape)} and {list(steps.shape)}. Give "
                "each step a buffer, an environment and a position."
            )
        order = np.argsort(ids, kind="stable")
        batches = []
        for number in np.unique(ids).tolist():
            rows = order[ids[order] == number]
            batch = self.buffers[number].take(envs[rows], steps[rows])
            batches.append(replace(batch, buffer_ids=ids[rows].astype(np.int64)))
        # From buffer by buffer back to the order of the arguments.
        back = np.argsort(order, kind="stable")
        probabilities = np.full(len(ids), 1 / max(1, len(ids)))
        return replace(Batch.join(batches).select(back), probabilities=probabilities)

    def _check_buffer_ids(self, ids: NDArray[np.generic]) -> None:
        integers = ids.ndim == 1 and len(ids) and ids.dtype.kind in "iu"
        if not integers or ids.min() < 0 or ids.max() >= len(self.buffers):
            raise SchemaError(
                f"buffer_ids must be integers [B] in [0, {len(self.buffers)}), got "
                f"{ids.dtype}{list(ids.shape)}. Take them from a batch of concat."
            )

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Give the steps of a batch new priorities, each in its own buffer.

        Buffers whose sampler has no priorities are passed over. The others accept
        theirs, all of them or none.

        Args:
            batch: From `sample`, as numpy or as tensors.
            values: As in `ReplayBuffer.update_priorities`, of the whole batch.

        Returns:
            Number of values dropped, because their steps have been overwritten since.

        Raises:
            SchemaError: No buffer's sampler has priorities, the batch is not of
                concat, or values do not fit.
            StaleError: A position was never written.
        """
        prioritized = [keeps_priorities(buffer.sampler) for buffer in self.buffers]
        if not any(prioritized):
            names = [type(buffer.sampler).__name__ for buffer in self.buffers]
            raise SchemaError(
                f"update_priorities: the samplers {names} have no priorities. Open at "
                "least one of the buffers with sampler=PrioritizedSampler()."
            )
        if batch.buffer_ids is None:
            raise SchemaError(
                "update_priorities: the batch has no buffer_ids, so concat did not "
                "draw it. Pass it to the buffer that drew it."
            )
        ids, numbers = as_numpy(batch.buffer_ids), as_numpy(values)
        self._check_buffer_ids(ids)
        if numbers.shape[:1] != ids.shape:
            raise SchemaError(
                f"priorities must have one value for each of {len(ids)} steps, got "
                f"{list(numbers.shape)}. Pass the priorities of the whole batch."
            )
        bare = replace(batch, fields={}, buffer_ids=None)
        updates: dict[int, tuple[Batch, NDArray[Any]]] = {}
        for number in np.unique(ids).tolist():
            if prioritized[number]:
                rows = np.flatnonzero(ids == number)
                updates[number] = bare.select(rows), numbers[rows]
        # Every value is checked before the first buffer accepts any.
        for number, (some, priorities) in updates.items():
            buffer = self.buffers[number]
            with buffer.view.lock:
                check_each(
                    buffer.view,
                    [buffer.sampler],
                    some.env_ids,
                    some.positions,
                    priorities,
                    some.mask,
                )
        return sum(
            self.buffers[number].update_priorities(some, priorities)
            for number, (some, priorities) in updates.items()
        )

    def state_dict(self, priorities: bool = False) -> State:
        """Return the seed, the step, the steps of each buffer, and the samplers' state.

        Args:
            priorities: With the priorities of the samplers, as arrays.
        """
        shares = None if self._shares is None else self._shares.state_dict()
        return {
            "kind": "Concat",
            "seed": self._random.seed,
            "step": self._step,
            "exact": shares is not None,
            **({"by": self._by} if self._by != "rows" else {}),
            "parts": [state_of(b.sampler, priorities) for b in self.buffers],
            **(shares or {}),
        }

    def load_state_dict(self, state: State) -> None:
        """Draw from a state on.

        Args:
            state: From `state_dict`.

        Raises:
            FormatError: It is of other buffers' samplers, or not a state at all.
        """
        check_kind(state, "Concat")
        seed, step = stored_integer(state, "seed"), stored_integer(state, "step")
        same(state, "exact", self._shares is not None)
        same({"by": "rows", **state}, "by", self._by)
        others = parts(state, "parts", len(self.buffers))
        before = self.state_dict(priorities=True)
        try:
            if self._shares is not None:
                self._shares.load_state_dict(state)
            for buffer, other in zip(self.buffers, others, strict=True):
                buffer.sampler.load_state_dict(other)
        except BaseException:
            if self._shares is not None:
                self._shares.load_state_dict(before)
            for buffer, mine in zip(self.buffers, before["parts"], strict=True):
                buffer.sampler.load_state_dict(mine)
            raise
        self._random, self._step = StepGenerator(seed), step

    def close(self) -> None:
        """Close the buffers that `concat` opened; those passed open stay open."""
        self._opened.close()

    def __enter__(self) -> Concat:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the buffers that `concat` opened."""
        self.close()


@dataclass(frozen=True, slots=True)
class BufferDraw:
    """The draw from one of several buffers.

    Attributes:
        buffer_id: Number of the buffer.
        draw: Its steps; probabilities are of a step among those of all buffers.
    """

    buffer_id: int
    draw: Draw

    def __len__(self) -> int:
        """Steps, or windows, drawn."""
        return len(self.draw)


@dataclass(frozen=True, slots=True)
class ConcatDraw:
    """The draws from several buffers, to be gathered in any process.

    Attributes:
        draws: One of each buffer that has steps in the batch, in their order.
    """

    draws: tuple[BufferDraw, ...]

    def __len__(self) -> int:
        """Steps, or windows, drawn."""
        return sum(len(one) for one in self.draws)

    @property
    def buffer_ids(self) -> Ids:
        """int64 ``[B]``, the buffer of each step."""
        return np.concatenate([np.full(len(one), one.buffer_id) for one in self.draws])


def _num_shown(buffer: ReplayBuffer) -> int:
    """Legal starts that the sampler of a buffer draws from: of windows theirs."""
    view = buffer.view
    with view.lock:
        count: int = ask(buffer.sampler, "num_starts_of")(view)
        return count


def _refuse_unlike(samplers: Sequence[Sampler]) -> None:
    """Refuse samplers that cannot draw from their buffers as from one.

    Raises:
        SchemaError: One cannot draw in parts, or they differ.
    """
    refuse_alone(samplers, "concat by priority")
    why = not_alike(samplers)
    if why is not None:
        raise SchemaError(
            "by='priority' needs samplers of one class with equal arguments in all "
            f"buffers, but {why}. Open the buffers with such samplers, or leave `by` "
            "out."
        )


def refuse_undivided(samplers: Sequence[Sampler]) -> None:
    """Refuse samplers between which no batch can be divided.

    Args:
        samplers: Of each buffer.

    Raises:
        SchemaError: One draws groups or ragged episodes, they draw steps and windows,
            or some of several lengths or `first_only`, or a `UseCounter` is that of two
            buffers, or leases.
    """
    traits = [traits_of(sampler) for sampler in samplers]
    for number, form in enumerate(each.form for each in traits):
        if form in (GROUPS, RAGGED):
            way_out = "Draw from each buffer by itself."
            if form == RAGGED:
                way_out = "Create the EpisodeSampler with layout='padded'."
            raise SchemaError(
                f"concat cannot divide batches of {form}, which the "
                f"{type(samplers[number]).__name__} of buffer {number} draws. {way_out}"
            )
    shapes = [each.shape for each in traits]
    if len({*shapes} - {None}) > 1:
        raise SchemaError(
            f"concat: samplers must all draw the same, got {shapes}. Give all buffers "
            "samplers of single steps, or of windows of one length and first_only."
        )
    counters = [counter for each in samplers for counter in set(counters_in(each))]
    leasing = [each.lease_s for each in counters if each.lease_s is not None]
    if leasing:
        raise SchemaError(
            "concat: samplers must not lease their steps, got a UseCounter with "
            f"lease_s={leasing[0]}: a batch of several buffers cannot be "
            "acknowledged. Leave out lease_s, or draw from each buffer by itself."
        )
    if len(set(counters)) < len(counters):
        raise SchemaError(
            "concat: a UseCounter must count in one buffer alone, got one that is in "
            "the samplers of two. Give each buffer a sampler of its own."
        )


def join_draws(draws: Sequence[BufferDraw], pad: bool) -> ConcatDraw:
    """Join draws of several buffers.

    Args:
        draws: One of each buffer that has steps in the batch, in their order.
        pad: They are padded episodes; pad all to the longest.
    """
    if pad:
        windows = [w for one in draws if (w := one.draw.windows) is not None]
        draws = [
            BufferDraw(one.buffer_id, one.draw.around(longer))
            for one, longer in zip(draws, padded(windows), strict=True)
        ]
    return ConcatDraw(tuple(draws))


def check_schema(number: int, buffer: ReplayBuffer, first: ReplayBuffer) -> None:
    """Refuse a buffer whose schema is not that of the first one.

    Raises:
        SchemaError: Fields differ, or their roles or order.
    """
    mine, other = buffer.schema, first.schema
    if mine == other:
        return
    if differ := first_difference(mine, other):
        path, here, there = differ
        way_out = "Draw from buffers of one schema."
        if mine.drawn == other.drawn:
            # They differ in how images are stored.
            way_out = f"Convert one of them with --cast {path}=uint8, or as the other stores it."
        raise SchemaError(
            f"concat: field {path!r} of buffer {number} ({buffer.path}) is "
            f"{here}, but in buffer 0 ({first.path}) it is {there}. {way_out}"
        )
    raise SchemaError(
        f"concat: the fields of buffer {number} ({buffer.path}) have other roles or "
        f"another order than those of buffer 0 ({first.path}). Draw from buffers of "
        "one schema."
    )


def _check_batches(number: int, buffer: ReplayBuffer, first: ReplayBuffer) -> None:
    """Refuse a buffer whose batches have other fields than those of the first one.

    Raises:
        SchemaError: They have.
    """
    mine, other = buffer.view.batch_names, first.view.batch_names
    if mine is None or other is None or set(mine) == set(other):
        return
    odd = sorted(set(mine) ^ set(other))[0]
    raise SchemaError(
        f"concat: batches of buffer {number if odd in mine else 0} have a field "
        f"{odd!r}, and those of buffer {0 if odd in mine else number} have none. Give "
        "all buffers the same transforms."
    )


def first_difference(mine: Schema, other: Schema) -> tuple[str, str, str] | None:
    """The first field of two schemas that differs, and what it is in each.

    Returns:
        None where only roles or the order differ.
    """
    paths = [*other.paths, *(path for path in mine.paths if path not in other.paths)]
    for path in paths:
        here = repr(mine[path]) if path in mine.paths else "missing"
        there = repr(other[path]) if path in other.paths else "missing"
        if here != there:
            return path, here, there
    return None
