"""Hindsight draws of Stable-Baselines3's `HerReplayBuffer`, and infos as bytes.

`mmreplay.HER` is not used: it relabels each step independently with some probability
and also draws from unfinished episodes. The original relabels a fixed number of steps
of each batch and draws from ended episodes only.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.batch import Batch
from mmreplay.buffer.reader import ReplacedError
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.episodes import FINAL
from mmreplay.episodes.starts import NarrowedStarts, StartTable, StartView
from mmreplay.errors import CorruptError, EmptyError, SchemaError
from mmreplay.ring import Span
from mmreplay.samplers.base import Sampler
from mmreplay.samplers.random import shares

STRATEGIES = ("future", "final", "episode")
GOALS = 1
"""Stream of a draw's random generator that chooses goals."""
WIDE = 4096
"""Bytes of a step above which goals are read without the rest of their steps."""
NUMBERS = "biufcSU"
"""Kinds of the dtypes of arrays in infos."""
TAG = "\0"
"""Key that marks values which JSON cannot express."""

Ids = NDArray[np.int64]


class EndedStarts(NarrowedStarts):
    """A view whose legal starts are limited to whole episodes that have ended.

    Attributes:
        view_starts: `starts` of the whole view at the same moment.
        closed: See `EndedStarts.__init__`.
        num_legal: How many of `starts` are legal.
    """

    def __init__(self, view: StartView, closed: Ids) -> None:
        """Narrow a view as it is now.

        Args:
            view: The buffer now.
            closed: int64 ``[E]``. Where it is the environment's head, the newest
                episode counts as ended.
        """
        super().__init__(view)
        self.closed = closed
        self.view_starts = starts = view.starts
        heads, ended = view.span.stop, view.index.ended
        first = np.maximum(ended.first, starts.first)
        stop = np.where(closed == heads, heads, ended.stop)
        self._starts = Span(first, np.maximum(np.minimum(stop, starts.stop), first))
        if view.num_illegal:
            every = np.arange(len(first))
            low = view.legal_before(every, self._starts.first)
            self._high: Ids = view.legal_before(every, self._starts.stop)
            self._ends: Ids = np.cumsum(self._high - low)
            self.num_illegal = int(self._starts.lengths.sum() - self._ends[-1])
        self.num_legal = int(self._starts.lengths.sum()) - self.num_illegal

    def still(self, view: StartView, closed: Ids) -> bool:
        """Whether it was made of this moment of the view, and of the same array."""
        return self.closed is closed and self.view_starts is view.starts

    @property
    def starts(self) -> Span:
        """Positions that may be legal starts, per environment."""
        return self._starts

    @property
    def table(self) -> StartTable | None:
        """The kernel's table of legal starts."""
        return self.base.table

    def legal(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Bool ``[B]``: the positions, within `starts`, that are legal starts."""
        return self.base.legal(env_ids, positions)

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """Legal starts by rank; asked only where some rows are illegal."""
        which = np.searchsorted(self._ends, ranks, side="right")
        within: Ids = self._high[which] - (self._ends[which] - ranks)
        return self.base.start_at(within)


class Hindsight:
    """Draws steps of ended episodes, and new goals for some of them."""

    def __init__(self, achieved: str) -> None:
        """Make one.

        Args:
            achieved: Leaf of the observation that holds the goal achieved.
        """
        self._achieved = achieved
        self._ended: EndedStarts | None = None
        self._wide: bool | None = None

    def draw(
        self,
        ring: ReplayBuffer,
        sampler: Sampler,
        closed: Ids,
        batch_size: int,
        num_virtual: int,
        strategy: str,
    ) -> tuple[Batch, Ids, Ids, NDArray[Any]]:
        """Draw steps of ended episodes, and new goals for the last of them.

        A goal is what a step of the same episode achieved, drawn uniformly:
        ``"future"`` from the drawn step and later ones, ``"episode"`` from all steps;
        ``"final"`` is always the last step. Where next observations are derived, steps
        whose next observation is not known are neither drawn nor give goals.

        Args:
            ring: The buffer, without transforms.
            sampler: Draws the steps.
            closed: See `EndedStarts`; an array that does not change.
            batch_size: Steps, B, at least 1.
            num_virtual: How many of them get goals, V.
            strategy: One of `STRATEGIES`.

        Returns:
            The steps as they are stored; int64 ``[B]``, one past the last step of
            each one's episode; int64 ``[V]``, the steps that give the goals; the
            goals, ``[V, *goal]``, for the last V steps.

        Raises:
            EmptyError: No whole episode has ended.
        """
        real = batch_size - num_virtual
        while True:
            view = ring.view
            try:
                with view.lock:
                    view.check_current()
                    moment, ended = view.limits_before, self._ended
                    if ended is None or not ended.still(view, closed):
                        ended = self._ended = EndedStarts(view, closed)
                    if ended.num_legal < 1:
                        raise EmptyError(
                            f"cannot draw {batch_size} transitions: the "
                            f"{int(view.span.lengths.sum())} rows hold no complete "
                            "episode. Choose learning_starts, and buffer_size, greater "
                            "than the steps of an episode."
                        )
                    drawn = sampler.draw(ended, batch_size)
                    env_ids, positions = drawn.env_ids, drawn.positions
                    begin, end = view.index.locate(env_ids, positions)
                    ids, first, stop = env_ids[real:], positions[real:], end[real:]
                    if view.next_paths:
                        # An episode that was cut has no final row.
                        there = np.minimum(stop, view.heads[ids] - 1)
                        final = (view.flags(ids, there) & FINAL) != 0
                        stop = stop - ((there < stop) | ~final)
                if strategy == "episode":
                    first = begin[real:]
                if strategy == "final":
                    first = stop - 1
                lengths = stop - first
                numbers = shares(drawn.key, GOALS, num_virtual) * lengths
                # A share just below 1 may be rounded up to the length.
                goals = np.minimum(numbers.astype(np.int64), lengths - 1)
                goals += first
                every = np.concatenate([env_ids, ids])
                rows = np.concatenate([positions, goals])
                if self._wide is None:
                    nbytes = sum(field.nbytes for field in ring.schema.fields.values())
                    self._wide = nbytes > WIDE
                if self._wide:
                    found = view.copy_steps(env_ids, positions, contiguous=True)
                    path, shift = f"next_observation/{self._achieved}", 0
                    if view.next_paths:
                        path, shift = f"observation/{self._achieved}", 1
                    given = view.read((path,), ids, goals + shift)[path]
                else:
                    # Steps that give goals behind those drawn: one call costs less.
                    found = view.copy_steps(every, rows, contiguous=True)
                    given = found[f"next_observation/{self._achieved}"][batch_size:]
                if view.stale(every, rows, moment) is not None:
                    continue
            except ReplacedError:
                continue
            batch = Batch(
                {path: array[:batch_size] for path, array in found.items()},
                env_ids,
                positions,
                drawn.probabilities,
                drawn.weights,
                key=drawn.key,
                buffer=view.home.uuid,
            )
            return batch, end, goals, given


def encoded(
    infos: Sequence[dict[str, Any]], keys: Sequence[str] | None, nbytes: int
) -> NDArray[np.uint8]:
    """Infos as JSON text, each in a row of bytes padded with zeros.

    Args:
        infos: One of each environment.
        keys: Which keys to keep; None for all but ``"terminal_observation"``, which is
            the step's next observation.
        nbytes: Length of a row, or 0 for as long as the first step's need, half as
            much again, and what `Monitor` adds at an episode's end.

    Returns:
        uint8 ``[E, nbytes]``.

    Raises:
        SchemaError: A value is no number, text, array, or list or dict of them, or an
            info is too long.
    """
    kept = [
        {key: info[key] for key in info if key != "terminal_observation"}
        if keys is None
        else {key: info[key] for key in keys if key in info}
        for info in infos
    ]
    texts = [_text(info) for info in kept]
    if not nbytes:
        monitored: dict[str, Any] = {}
        if keys is None or "episode" in keys:
            monitored = {"episode": dict.fromkeys("rlt", -123456789.123456)}
        longest = max(len(_text(monitored | info)) for info in kept)
        nbytes = -(-longest * 3 // 2 // 64) * 64
    rows = np.zeros((len(texts), nbytes), np.uint8)
    for env_id, text in enumerate(texts):
        if len(text) > nbytes:
            raise SchemaError(
                f"infos[{env_id}] takes {len(text)} bytes as text, more than the "
                f"{nbytes} stored for a step. Name the keys that compute_reward reads, "
                f"info_keys=[...], or make a buffer with info_bytes={len(text)} or "
                "more."
            )
        rows[env_id, : len(text)] = np.frombuffer(text, np.uint8)
    return rows


def decoded(rows: NDArray[np.uint8]) -> list[dict[str, Any]]:
    """Infos of rows that `encoded` made.

    Args:
        rows: uint8 ``[N, nbytes]``.

    Raises:
        CorruptError: A row is damaged.
    """
    found = []
    for row in rows:
        try:
            info = json.loads(row.tobytes().rstrip(b"\0"), object_hook=_value)
            if not isinstance(info, dict):
                raise TypeError(f"got {type(info).__name__}")
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptError(
                f"info: the stored bytes are not JSON ({error}). Run mmreplay verify "
                "on the buffer's folder."
            ) from error
        found.append(info)
    return found


def _text(info: dict[str, Any]) -> bytes:
    return json.dumps(_plain(info, "infos[i]"), separators=(",", ":")).encode()


def _plain(value: Any, name: str) -> Any:
    """A value that JSON can express; others are tagged."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_plain(each, f"{name}[{i}]") for i, each in enumerate(value)]
    if kind is tuple:
        return {TAG: ["tuple", _plain(list(value), name)]}
    if isinstance(value, dict) and all(type(k) is str and k != TAG for k in value):
        return {key: _plain(each, f"{name}[{key!r}]") for key, each in value.items()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in NUMBERS:
        data = base64.b64encode(value.tobytes()).decode()
        shape = None if isinstance(value, np.generic) else value.shape
        return {TAG: ["array", value.dtype.str, shape, data]}
    raise SchemaError(
        f"{name} must be numbers, text, arrays, lists or dicts by name, which "
        f"copy_info_dict can store, got {kind.__name__}. Name the keys that "
        "compute_reward reads, info_keys=[...]."
    )


def _value(tagged: dict[str, Any]) -> Any:
    """Undo the tags of `_plain`."""
    if TAG not in tagged:
        return tagged
    kind, *rest = tagged[TAG]
    if kind == "tuple":
        return tuple(rest[0])
    name, shape, data = rest
    dtype = np.dtype(name)
    if dtype.kind not in NUMBERS:
        raise ValueError(f"an array of {dtype}")
    array = np.frombuffer(base64.b64decode(data), dtype)
    return array[0] if shape is None else array.reshape(shape).copy()
