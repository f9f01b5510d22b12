"""Training and validation parts of one buffer, without a copy.

``train, valid = split(buffer, [0.9, 0.1], seed=0)`` and then
``dataset.draws(train.sampler(mr.ShuffledSampler(seed=0)), batch_size=256)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import is_number
from mmreplay.buffer.replay_buffer import ReplayBuffer, check_buffer
from mmreplay.episodes.starts import StartView, SubsetStarts
from mmreplay.errors import EmptyError, FormatError, SchemaError, shown
from mmreplay.samplers.base import Sampler, State
from mmreplay.samplers.combine import RestrictedSampler
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.states import check_kind, integers
from mmreplay.samplers.uniform import UniformSampler

Ids = NDArray[np.int64]
By = Literal["episode", "step"]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Part:
    """A set of steps of one buffer: ranges ``[begin, end)`` of positions.

    Steps that the ring overwrites leave the part; steps added later are in no part. If
    a writer overwrites drawn steps before they are gathered, a `ReplayDataset` replaces
    them by steps of the whole buffer. So split buffers without a writer, or whose ring
    is not full. Takes 24 bytes a range.

    Attributes:
        buffer: The buffer's uuid, in hexadecimal.
        env_ids: int64 ``[N]``, never falling.
        begins: int64 ``[N]``, growing within an environment.
        ends: int64 ``[N]``, at most the next begin.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> train, test = mr.split(buffer, [0.9, 0.1], seed=0)
        >>> buffer.sampler = train.sampler(mr.UniformSampler(seed=0))
        >>> batch = buffer.sample(32)  # of the episodes in train
    """

    buffer: str
    env_ids: Ids
    begins: Ids
    ends: Ids

    def __len__(self) -> int:
        """Rows of the part when it was made; without final rows if split by episode."""
        return int((self.ends - self.begins).sum())

    def __repr__(self) -> str:
        """Show its size."""
        return f"<Part of {len(self):,} steps in {len(self.ends):,} stretches>"

    def sampler(self, sampler: Sampler | None = None) -> RestrictedSampler:
        """Return a sampler that draws from this part only.

        Args:
            sampler: Each part needs its own; `UniformSampler` by default.
        """
        return RestrictedSampler(self, sampler or UniformSampler())

    def of(self, view: StartView) -> StartView:
        """Return a view of this part's steps only.

        Costs O(fragments), once for each change of the buffer.

        Args:
            view: Of the buffer that was split.

        Raises:
            FormatError: The view is of another buffer.
        """
        if view.home.uuid.hex() != self.buffer:
            raise FormatError(
                f"the view must be of buffer {self.buffer}, which was split, got "
                f"{view.home.uuid.hex()}. Split each buffer by itself."
            )
        return SubsetStarts(view, self)

    def state_dict(self) -> State:
        """Return the part as JSON values and arrays, for another run."""
        return {
            "kind": "Part",
            "buffer": self.buffer,
            "env_ids": self.env_ids,
            "begins": self.begins,
            "ends": self.ends,
        }

    @classmethod
    def from_state(cls, state: State) -> Part:
        """Read a state.

        Args:
            state: What `state_dict` returned.

        Raises:
            FormatError: It is no state of a part.
        """
        check_kind(state, "Part")
        env_ids, begins, ends = (integers(state, name) for name in ("env_ids", "begins", "ends"))
        buffer = state.get("buffer")
        if (
            not isinstance(buffer, str)
            or not len(env_ids) == len(begins) == len(ends)
            or not _ordered(env_ids, begins, ends)
        ):
            raise FormatError(
                "part state: ranges overlap or are out of order. Pass what state_dict "
                "returned, or split the buffer again."
            )
        return cls(buffer, env_ids, begins, ends)

    def check(self, state: State) -> None:
        """Refuse the state of another part.

        Args:
            state: What `state_dict` returned.

        Raises:
            FormatError: It is the state of another part.
        """
        other = Part.from_state(state)
        if (
            other.buffer != self.buffer
            or not np.array_equal(other.env_ids, self.env_ids)
            or not np.array_equal(other.begins, self.begins)
            or not np.array_equal(other.ends, self.ends)
        ):
            raise FormatError(
                f"sampler state: it must be of {self}, got one of {other} with other "
                "steps. Save parts by state_dict and load them by Part.from_state."
            )


def split(
    buffer: ReplayBuffer, fractions: Sequence[float], *, by: By = "episode", seed: int = 0
) -> list[Part]:
    """Divide the steps that a buffer holds into parts that share none.

    Parts are sets of positions and no copies: each gives samplers that draw from it
    alone, over the same folder, in any process. The same buffer, fractions and seed
    give the same parts. Of N episodes, or steps, a part of fraction f gets
    ``round(N * f)``, to within one; what fractions below 1 leave is in no part.

    Memory: 24 bytes an episode, or a stretch of steps that one part holds (of which
    there are at most as many as there are steps).

    Args:
        buffer: Open; episodes that still run count as they are now.
        fractions: One a part, above 0, at most 1 together.
        by: ``"episode"`` keeps all steps of an episode in one part (windows with
            ``boundary="any"`` may still run into its neighbour); ``"step"`` deals
            out rows, neighbours into different parts, which are to be drawn step by
            step: windows and episodes are refused where a part begins within one.
        seed: In ``[0, 2**63)``.

    Raises:
        SchemaError: An argument is not legal.
        EmptyError: There are fewer episodes, or steps, than parts.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> train, test = mr.split(buffer, [0.9, 0.1], seed=0)
        >>> len(train) > len(test)
        True
    """
    check_buffer(buffer)
    listed = isinstance(fractions, Sequence | np.ndarray) and len(fractions) > 0
    positive = listed and all(is_number(f) and isfinite(f) and f > 0 for f in fractions)
    if not positive or sum(fractions) > 1 + 1e-9:
        raise SchemaError(
            "fractions must be numbers above 0 whose sum is at most 1, got "
            f"{shown(fractions)}. Pass such as [0.9, 0.1]."
        )
    if by not in ("episode", "step"):
        raise SchemaError(
            f"by must be 'episode' or 'step', got {shown(by)}. Leave it out for 'episode'."
        )
    env_ids, begins, ends = _units(buffer, by)
    dealt = deal(len(begins), fractions, seed)
    if not all(map(len, dealt)):
        raise EmptyError(
            f"cannot split {len(begins)} {by}s by {list(fractions)}: the parts would "
            f"have {[*map(len, dealt)]}. Add steps, or use larger fractions, for one {by} in each."
        )
    uuid = buffer.view.home.uuid.hex()
    return [Part(uuid, *_merged(env_ids[which], begins[which], ends[which])) for which in dealt]


def deal(count: int, fractions: Sequence[float], seed: int) -> list[Ids]:
    """Deal out numbers at random.

    Args:
        count: Of the numbers, which are those from 0 on.
        fractions: Of each hand; their sum is at most 1.
        seed: Equal seeds deal alike.

    Returns:
        int64 ``[N]`` for each fraction f, rising, ``round(count * f)`` to within one.
    """
    edges = np.floor(np.cumsum([0.0, *fractions]) * count + 0.5 + 1e-9)
    edges = np.minimum(edges, count).astype(np.int64)
    order = StepGenerator(seed).at(0).permutation(count)
    return [np.sort(order[first:stop]) for first, stop in pairwise(edges.tolist())]


def _units(buffer: ReplayBuffer, by: By) -> tuple[Ids, Ids, Ids]:
    """Return the ranges to divide: env_ids, begins and ends, int64 ``[N]`` each."""
    view = buffer.view
    with view.lock:
        index = view.index
        every = [index.episodes(env_id) for env_id in range(buffer.num_envs)]
    env_ids = np.repeat(np.arange(len(every)), [len(e.begin) for e in every])
    begins = np.concatenate([episodes.begin for episodes in every])
    ends = np.concatenate([episodes.end for episodes in every])
    if by == "step":
        lengths = ends - begins
        env_ids = np.repeat(env_ids, lengths)
        shifts = np.cumsum(lengths) - lengths - begins
        begins = np.arange(lengths.sum()) - np.repeat(shifts, lengths)
        ends = begins + 1
    return env_ids, begins, ends


def _merged(env_ids: Ids, begins: Ids, ends: Ids) -> tuple[Ids, Ids, Ids]:
    """Join ranges that follow each other."""
    apart = (env_ids[1:] != env_ids[:-1]) | (begins[1:] != ends[:-1])
    first = np.append(True, apart)
    last = np.append(apart, True)
    return env_ids[first], begins[first], ends[last]


def _ordered(env_ids: Ids, begins: Ids, ends: Ids) -> bool:
    later = (env_ids[1:] > env_ids[:-1]) | (
        (env_ids[1:] == env_ids[:-1]) & (begins[1:] >= ends[:-1])
    )
    return bool((begins < ends).all() and later.all())
