"""Several buffers drawn from as one: `concat` draws, `batches` puts together.

What was drawn from several buffers, without the data.

The buffers of a `concat`: opened where they are not, and of one schema.

Batches of several buffers as one, and rows of a batch.

Several buffers drawn from as one: offline and online, or one a writer.

Ball et al. 2023 ("Efficient Online Reinforcement Learning with Offline Data", RLPD)
draw half of each batch from each::

    both = mr.concat([offline, online], shares=[0.5, 0.5], seed=0)
    batch = both.sample(256)
    both.update_priorities(batch, td_error)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.arguments import integer
from mmreplay.batch import Batch
from mmreplay.buffer.opening import StrPath
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.episodes.starts import num_legal
from mmreplay.errors import EmptyError, SchemaError, shown
from mmreplay.samplers.base import (
    PADDED,
    Draw,
    State,
    form_of,
    keeps_priorities,
    padded,
)
from mmreplay.samplers.combine import Shares, check_each, state_of
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.states import check_kind, parts, same, stored_integer
from mmreplay.schema import Schema
from mmreplay.schema.convert import on_host

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BufferDraw:
    """What was drawn from one of several buffers.

    Attributes:
        number: Which buffer.
        draw: Its steps, probabilities being of all buffers' steps.
    """

    number: int
    draw: Draw

    def __len__(self) -> int:
        """Steps, or windows, drawn."""
        return len(self.draw)


@dataclass(frozen=True, slots=True)
class ConcatDraw:
    """What was drawn from several buffers, to be gathered in any process.

    Attributes:
        parts: One for each buffer that anything was drawn from, in their order.
    """

    parts: tuple[BufferDraw, ...]

    def __len__(self) -> int:
        """Steps, or windows, drawn."""
        return sum(len(part) for part in self.parts)

    @staticmethod
    def joined(parts: Sequence[BufferDraw], pad: bool) -> ConcatDraw:
        """Put draws of several buffers together.

        Args:
            parts: One for each buffer that anything was drawn from, in their order.
            pad: They are of padded episodes, and padded to the longest of all.
        """
        if not pad:
            return ConcatDraw(tuple(parts))
        windows = [w for part in parts if (w := part.draw.windows) is not None]
        whole = [
            BufferDraw(part.number, part.draw.around(longer))
            for part, longer in zip(parts, padded(windows), strict=True)
        ]
        return ConcatDraw(tuple(whole))

    @property
    def buffer_ids(self) -> Ids:
        """int64 ``[B]``, which buffer each step is of."""
        numbers = [np.full(len(part), part.number) for part in self.parts]
        return np.concatenate(numbers)


def opened(source: ReplayBuffer | StrPath, stack: ExitStack) -> ReplayBuffer:
    """Return an open buffer; a folder is opened for reading, for as long as a stack.

    Raises:
        FormatError: There is no buffer at the path.
    """
    if isinstance(source, ReplayBuffer):
        return source
    return stack.enter_context(ReplayBuffer.open(source))


def check_schema(number: int, buffer: ReplayBuffer, first: ReplayBuffer) -> None:
    """Refuse a buffer whose steps are not those of the first one.

    Raises:
        SchemaError: Fields differ, or their roles or order.
    """
    mine, other = buffer.schema, first.schema
    if mine == other:
        return
    paths = [*other.paths, *(path for path in mine.paths if path not in other.paths)]
    for path in paths:
        here = repr(mine[path]) if path in mine.paths else "no such field"
        there = repr(other[path]) if path in other.paths else "no such field"
        if here != there:
            raise SchemaError(
                f"concat: got {here} for field {path!r} of buffer {number} "
                f"({buffer.path}), expected {there} as in buffer 0 ({first.path}); "
                "draw from buffers of one schema"
            )
    raise SchemaError(
        f"concat: got a schema of buffer {number} ({buffer.path}) whose fields are in "
        f"other roles or another order than those of buffer 0 ({first.path}), expected "
        "the same; draw from buffers of one schema"
    )


def joined(
    batches: Sequence[Batch],
    cat: Callable[..., Any] = np.concatenate,
    *,
    pad: bool = False,
) -> Batch:
    """Put batches of several buffers one after the other.

    Args:
        batches: At least one, all numpy arrays or all tensors.
        cat: Joins arrays of their kind, along an axis.
        pad: They are of padded episodes, and padded to the longest of all.

    Raises:
        SchemaError: Their fields or windows differ.
    """
    if pad:
        longest = max(_width(batch) for batch in batches)
        batches = [_padded(batch, longest, cat) for batch in batches]
    first = batches[0]
    for batch in batches:
        for name, mine, other in (
            ("fields", _shapes(batch), _shapes(first)),
            ("episodes", batch.offsets is None, True),
        ):
            if mine != other:
                raise SchemaError(
                    f"concat: got {name} {mine} from a buffer, expected {other} as "
                    "from the first; give all buffers the same transforms and kind of "
                    "sampler, of single steps or windows equally long"
                )

    def whole(name: str) -> Any:
        arrays = [getattr(batch, name) for batch in batches]
        return None if arrays[0] is None else cat(arrays)

    fields = {
        path: cat([batch.fields[path] for batch in batches]) for path in first.fields
    }
    names = (
        *("env_ids", "positions", "probabilities", "weights", "mask"),
        *("window_positions", "buffer_ids"),
    )
    columns = {name: whole(name) for name in names}
    return replace(first, fields=fields, key=0, buffer=b"", **columns)


def _padded(batch: Batch, length: int, cat: Callable[..., Any]) -> Batch:
    """Pad windows with their last step, as no step, up to a length."""
    missing = length - _width(batch)

    def longer(array: Any, told: bool = False) -> Any:
        last = array[:, -1:]
        return cat([array, *[last & ~last if told else last] * missing], 1)

    return replace(
        batch,
        fields={
            path: longer(array, path == "is_first" and "bool" in str(array.dtype))
            for path, array in batch.fields.items()
        },
        mask=longer(batch.mask, True),
        window_positions=longer(batch.window_positions),
    )


def _width(batch: Batch) -> int:
    assert batch.mask is not None
    return int(batch.mask.shape[1])


def rows_of(batch: Batch, rows: Ids, probabilities: Any = None) -> Batch:
    """Choose rows of a batch, as numpy arrays."""

    def chosen(array: Any) -> Any:
        return None if array is None else as_numpy(array)[rows]

    return replace(
        batch,
        fields={path: chosen(array) for path, array in batch.fields.items()},
        env_ids=chosen(batch.env_ids),
        positions=chosen(batch.positions),
        probabilities=(
            chosen(batch.probabilities) if probabilities is None else probabilities
        ),
        weights=chosen(batch.weights),
        mask=chosen(batch.mask),
        window_positions=chosen(batch.window_positions),
        buffer_ids=chosen(batch.buffer_ids),
    )


def _shapes(batch: Batch) -> dict[str, Any]:
    return {
        path: f"{array.dtype}{list(array.shape[1:])}"
        for path, array in sorted(batch.fields.items())
    }


def as_numpy(values: Any) -> NDArray[Any]:
    """An array, also of a tensor that is on a device or has a gradient."""
    if hasattr(values, "detach"):
        values = on_host(values).numpy()
    return np.asarray(values)


T = TypeVar("T", bound=Sized)
U = TypeVar("U")


def concat(
    sources: Sequence[ReplayBuffer | StrPath],
    shares: Sequence[float] | None = None,
    *,
    seed: int | None = None,
) -> Concat:
    """Draw from several buffers as if they were one.

    Args:
        sources: Open buffers, each with its own sampler and transforms; or folders,
            which are opened for reading and drawn from uniformly.
        shares: Exact shares of each batch, above 0, of which only the ratios count;
            see `samplers.shares.Shares`. By default every batch is divided at
            random, each step of each buffer being as likely to be of it: with
            uniform samplers the draws of one large buffer.
        seed: Of that division; None takes one from the system.

    Raises:
        SchemaError: There is no source, schemas differ, or a share is not above 0.
        FormatError: There is no buffer at a path.

    Example:
        >>> both = mr.concat(["runs/cartpole", "runs/cartpole"], shares=[3, 1], seed=0)
        >>> np.bincount(both.sample(32).buffer_ids)
        array([24,  8])
    """
    return Concat(sources, shares, seed)


class Concat:
    """Several buffers of one schema, drawn from as one; see `concat`.

    Batches are laid out buffer by buffer, and carry ``batch.buffer_ids``. What holds
    for one buffer holds for each of them: writers may write on, in any processes.

    Attributes:
        buffers: Those it draws from.
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
    ) -> None:
        """Open what is not open; see `concat`."""
        if isinstance(sources, str | bytes) or not len(sources):
            raise SchemaError(
                f"sources: got {shown(sources)}, expected a list of buffers or "
                "folders; "
                "such as [offline, online]"
            )
        if shares is not None and len(shares) != len(sources):
            raise SchemaError(
                f"shares: got {len(shares)} for {len(sources)} buffers, expected one "
                "for each; or leave them out"
            )
        self.lock = threading.RLock()
        self._shares = None if shares is None else Shares(shares)
        self._random = StepGenerator(seed)
        self._step = 0
        with ExitStack() as stack:
            self.buffers = tuple(opened(source, stack) for source in sources)
            for number, buffer in enumerate(self.buffers):
                check_schema(number, buffer, self.buffers[0])
            self._opened = stack.pop_all()

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the buffers, if all of them may be, and the next draw."""
        return {
            "buffers": self.buffers, "_shares": self._shares, "_random": self._random,
            "_step": self._step,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on drawing; the buffers were opened for it, and are closed with it."""
        self.__dict__.update(state)
        self.lock = threading.RLock()
        self._opened = ExitStack()
        for buffer in self.buffers:
            self._opened.enter_context(buffer)

    def __repr__(self) -> str:
        """Say what it is."""
        shares = "" if self._shares is None else f", shares={self.shares}"
        return f"<Concat of {list(self.buffers)}{shares}>"

    @property
    def schema(self) -> Schema:
        """The fields of one step."""
        return self.buffers[0].schema

    @property
    def shares(self) -> list[float] | None:
        """Exact shares of each batch, their sum being 1; None where there are none."""
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
            f"concat(...)[{key!r}]: several buffers are not indexed, expected a batch "
            f"of them; use batch = both.sample(256) and {batch}, or both.buffers"
        )

    def __iter__(self) -> NoReturn:
        """Refuse to be iterated over, as a buffer does.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "iter(concat(...)): several buffers are not iterated over, expected a "
            "call; use mmreplay.ReplayLoader(both, batch_size) for batches, or "
            "both.buffers"
        )

    def sample(self, batch_size: int) -> Batch:
        """Draw a batch, from each buffer with its own sampler.

        Args:
            batch_size: Steps of all buffers together, at least 1.

        Returns:
            numpy arrays ``[batch_size, *shape]``, buffer by buffer. Probabilities
            are of a step among those of all buffers; weights are as the buffer's
            sampler gave them.

        Raises:
            EmptyError: A buffer that has a share has nothing to draw.
            SchemaError: Transforms or windows of the buffers do not fit together.
        """
        return self.each(
            batch_size, self._sample, lambda found: joined(found, pad=self.pads)
        )

    def draw(self, batch_size: int) -> ConcatDraw:
        """Draw, without the data; see `sample`."""
        return self.each(
            batch_size,
            self._draw,
            lambda found: ConcatDraw.joined(found, pad=self.pads),
        )

    @property
    def pads(self) -> bool:
        """Whether what is drawn are episodes, each batch padded to its longest."""
        return all(form_of(buffer.sampler) == PADDED for buffer in self.buffers)

    def each(
        self,
        batch_size: int,
        one: Callable[[int, int, float], T],
        join: Callable[[list[T]], U],
    ) -> U:
        """Draw from each buffer, or from none: a failed draw does not count.

        Args:
            batch_size: Steps of all buffers together.
            one: Draws from a buffer, by its number, how many of it, and the share of
                all steps; what it gives has as a length how many it is.
            join: Makes one of what was drawn; may fail as well.
        """
        with self.lock:
            return self._draw_each(batch_size, one, join)

    def _draw_each(
        self,
        batch_size: int,
        one: Callable[[int, int, float], T],
        join: Callable[[list[T]], U],
    ) -> U:
        counts, fractions = self._split(batch_size)
        drawn: list[T] = []
        states = [buffer.sampler.state_dict() for buffer in self.buffers]
        try:
            for number, count in enumerate(counts):
                if count:
                    drawn.append(one(number, count, fractions[number]))
            whole = join(drawn)
        except BaseException as error:
            if isinstance(error, EmptyError):
                error.add_note(f"buffer {number} of concat: {self.buffers[number]!r}")
            for buffer, state in zip(self.buffers, states, strict=True):
                buffer.sampler.load_state_dict(state)
            raise
        self._step += 1
        if self._shares is not None:
            given = iter(drawn)
            self._shares.count([len(next(given)) if count else 0 for count in counts])
        return whole

    def _sample(self, number: int, count: int, fraction: float) -> Batch:
        batch = self.buffers[number].sample(count, contiguous=True)
        buffer_ids = np.full(len(batch), number)
        probabilities = batch.probabilities * fraction
        return replace(batch, buffer_ids=buffer_ids, probabilities=probabilities)

    def _draw(self, number: int, count: int, fraction: float) -> BufferDraw:
        buffer = self.buffers[number]
        view = buffer.view
        with view.lock:
            draw = buffer.sampler.draw(view, count)
        probabilities = draw.probabilities * fraction
        draw = replace(draw, probabilities=probabilities, buffer=view.home.uuid)
        return BufferDraw(number, draw)

    def _split(self, batch_size: int) -> tuple[list[int], list[float]]:
        """Say how many of the next batch are of each buffer, and the shares.

        Raises:
            EmptyError: No buffer has anything to draw.
            SchemaError: The batch_size is no integer of at least 1.
        """
        integer("batch_size", batch_size, 1, "Pass a number of steps, such as 256.")
        if self._shares is not None:
            counts = self._shares.split(int(batch_size))
            return counts, self._shares.fractions.tolist()
        sizes = np.array([num_legal(buffer.view) for buffer in self.buffers])
        if sizes.sum() == 0:
            raise EmptyError(
                f"cannot draw {batch_size} steps: got {len(sizes)} buffers of which "
                "none has a legal start yet, expected at least one; add steps first"
            )
        fractions = sizes / sizes.sum()
        rng = self._random.at(self._step)
        return rng.multinomial(batch_size, fractions).tolist(), fractions.tolist()

    def take(
        self, buffer_ids: ArrayLike, env_ids: ArrayLike, positions: ArrayLike
    ) -> Batch:
        """Gather given steps; see `ReplayBuffer.take`.

        Args:
            buffer_ids: int ``[B]``, in ``[0, len(buffers))``.
            env_ids: int ``[B]``.
            positions: int ``[B]``.

        Raises:
            SchemaError: A buffer is unknown, or the shapes differ.
            StaleError: A position is not in its buffer, or cannot be drawn.
        """
        ids, envs, places = (np.asarray(a) for a in (buffer_ids, env_ids, positions))
        self._check_ids(ids)
        if not ids.shape == envs.shape == places.shape:
            raise SchemaError(
                f"take: got shapes {list(ids.shape)}, {list(envs.shape)} and "
                f"{list(places.shape)}, expected them alike; give each step a buffer"
            )
        order = np.argsort(ids, kind="stable")
        found = []
        for number in np.unique(ids).tolist():
            here = order[ids[order] == number]
            batch = self.buffers[number].take(envs[here], places[here])
            found.append(replace(batch, buffer_ids=ids[here].astype(np.int64)))
        whole, back = joined(found), np.argsort(order, kind="stable")
        return rows_of(whole, back, np.full(len(ids), 1 / max(1, len(ids))))

    def _check_ids(self, ids: NDArray[np.generic]) -> None:
        good = ids.ndim == 1 and len(ids) and ids.dtype.kind in "iu"
        if not good or ids.min() < 0 or ids.max() >= len(self.buffers):
            raise SchemaError(
                f"buffer_ids: got {ids.dtype}{list(ids.shape)}, expected integers [B] "
                f"in [0, {len(self.buffers)}); take them from a batch of concat"
            )

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Give the steps of a batch new priorities, each in its own buffer.

        Buffers whose sampler keeps no priorities are passed over; the others take
        theirs, all of them or none.

        Args:
            batch: What `sample` gave, as numpy or as tensors.
            values: As in `ReplayBuffer.update_priorities`, of the whole batch.

        Returns:
            How many were dropped, because they have been overwritten since.

        Raises:
            SchemaError: No buffer's sampler keeps priorities, the batch is not of
                concat, or values do not fit.
            StaleError: A position was never written.
        """
        keeping = [keeps_priorities(buffer.sampler) for buffer in self.buffers]
        if not any(keeping):
            names = [type(buffer.sampler).__name__ for buffer in self.buffers]
            raise SchemaError(
                f"update_priorities: got samplers {names} that keep no priorities, "
                "expected a PrioritizedSampler of at least one buffer; open that "
                "buffer with sampler=PrioritizedSampler()"
            )
        if batch.buffer_ids is None:
            raise SchemaError(
                "update_priorities: got a batch without buffer_ids, expected one that "
                "concat drew; give it to the buffer that it is of"
            )
        ids, given = as_numpy(batch.buffer_ids), as_numpy(values)
        self._check_ids(ids)
        if given.shape[:1] != ids.shape:
            raise SchemaError(
                f"priorities: got {list(given.shape)} for {len(ids)} steps, expected "
                "one for each; pass those of the whole batch"
            )
        places = {
            number: np.flatnonzero(ids == number)
            for number in np.unique(ids).tolist()
            if keeping[number]
        }
        bare = replace(batch, fields={}, buffer_ids=None)
        told = {
            number: (rows_of(bare, here), given[here])
            for number, here in places.items()
        }
        for number, (part, values) in told.items():
            buffer = self.buffers[number]
            env_ids, positions, mask = part.env_ids, part.positions, part.mask
            with buffer.view.lock:
                samplers, view = [buffer.sampler], buffer.view
                check_each(view, samplers, env_ids, positions, values, mask)
        return sum(
            self.buffers[number].update_priorities(part, values)
            for number, (part, values) in told.items()
        )

    def state_dict(self, priorities: bool = False) -> State:
        """Seed, step, what each buffer gave, and the states of the samplers.

        Args:
            priorities: With those that samplers keep, as arrays.
        """
        shares = None if self._shares is None else self._shares.state_dict()
        return {
            "kind": "Concat",
            "seed": self._random.seed,
            "step": self._step,
            "exact": shares is not None,
            "parts": [state_of(b.sampler, priorities) for b in self.buffers],
            **(shares or {}),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a state.

        Args:
            state: What `state_dict` returned.

        Raises:
            FormatError: It is of other buffers' samplers, or not a state at all.
        """
        check_kind(state, "Concat")
        seed, step = stored_integer(state, "seed"), stored_integer(state, "step")
        same(state, "exact", self._shares is not None)
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
        """Close the buffers that it opened; those given open stay open."""
        self._opened.close()

    def __enter__(self) -> Concat:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()
