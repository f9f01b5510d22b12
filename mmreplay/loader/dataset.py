"""What a DataLoader hands over: whole batches as they are, single steps stacked.

A buffer as a map-style torch Dataset: whole draws, or single steps by rank.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from mmreplay import process
from mmreplay.batch import Batch
from mmreplay.buffer.draw import left_of
from mmreplay.buffer.opening import StrPath
from mmreplay.buffer.reader import Reader
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.concatenation import Concat
from mmreplay.disk.lock import locked
from mmreplay.errors import EmptyError, SchemaError, StaleError, StarvedError
from mmreplay.loader.draws import Draws
from mmreplay.nesting import unflatten
from mmreplay.samplers.base import Draw, Sampler
from mmreplay.transforms.base import Transform


def collate(items: Batch | list[dict[str, Any]]) -> Any:
    """Put together what `ReplayDataset` gave for one batch.

    A `Batch`, which is what a whole draw gives, passes as it is. Give it as
    ``collate_fn`` along with ``batch_sampler=dataset.draws(...)``.

    Args:
        items: A batch, or single steps as nested dicts of tensors.

    Returns:
        The batch, or the nested dict with every tensor ``[B, *shape]``.

    Raises:
        SchemaError: It is a list of batches.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> dataset = mr.ReplayDataset("runs/cartpole")
        >>> draws = dataset.draws(mr.UniformSampler(seed=0), batch_size=32)
        >>> loader = DataLoader(dataset, batch_sampler=draws, collate_fn=mr.collate)
        >>> next(iter(loader))["observation"].shape
        torch.Size([32, 4])
    """
    return items if isinstance(items, Batch) else default_collate(items)


def _refuse(batches: Sequence[Batch], **_: object) -> NoReturn:
    raise SchemaError(
        f"collate: got a list of Batch, {len(batches)} of them, expected single steps, "
        "for these are whole batches already; give the DataLoader batch_size=None"
    )


# torch would say which types it can stack, and not what to do.
default_collate_fn_map[Batch] = _refuse


MAX_TRIES = 10

Ids = NDArray[np.int64]


class ReplayDataset(Dataset[Any]):
    """Steps of a buffer for torch's DataLoader, in three ways.

    Whole draws, the fast way, by any sampler::

        draws = dataset.draws(mr.UniformSampler(seed=0), batch_size=256)
        DataLoader(dataset, sampler=draws, batch_size=None, num_workers=2)
        DataLoader(dataset, batch_sampler=draws, collate_fn=mr.collate)

    Single steps by rank, each epoch every legal start once, at the cost of
    stacking them::

        DataLoader(dataset, batch_size=256, shuffle=True)

    Draws give a `Batch` of tensors, single steps nested dicts of tensors, both made
    by the buffer's transforms. Workers get the path and open the buffer themselves,
    read-only, by fork or spawn. A buffer that is being written is followed. What its
    writer overwrites between a draw and its gathering is left out, and the batch is
    shorter by it: the rest is what the sampler draws of the steps that are alive, by
    their probabilities and weights, and of epochs each step once. Whoever gathers has
    not the sampler, so that none could be put in their place which were so.

    Attributes:
        left_out: Steps, or windows, left out so, in this process.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> dataset = mr.ReplayDataset("runs/cartpole")
        >>> draws = dataset.draws(mr.UniformSampler(seed=0), batch_size=32)
        >>> loader = DataLoader(dataset, sampler=draws, batch_size=None)
        >>> next(iter(loader))["observation"].shape
        torch.Size([32, 4])
    """

    def __init__(
        self, source: ReplayBuffer | StrPath, transforms: Sequence[Transform] = ()
    ) -> None:
        """Make a dataset of a buffer.

        Args:
            source: A folder, or an open buffer; one in RAM takes num_workers=0.
            transforms: What is made of stored steps, in order; an open buffer has its
                own. Workers get copies, by pickle where they are spawned.

        Raises:
            FormatError: There is no buffer at the path.
            SchemaError: A transform cannot stand where it does, or it is several
                buffers.
        """
        if isinstance(source, Concat):
            raise SchemaError(
                "source: got several buffers, expected one; pass what concat gave to "
                "ConcatDataset or ConcatStream"
            )
        if not isinstance(source, ReplayBuffer):
            source = ReplayBuffer.open(source, transforms=transforms)
        elif transforms:
            raise SchemaError(
                "ReplayDataset: got an open buffer and transforms, expected the "
                "transforms with the buffer; pass them to ReplayBuffer.open or create"
            )
        self._adopt(source)

    def _adopt(self, buffer: ReplayBuffer) -> None:
        self._buffer: ReplayBuffer | None = buffer
        self._path: StrPath | None = buffer.source or buffer.path
        self._transforms = buffer.transforms
        self._policy = buffer.read_policy
        self._pid = os.getpid()
        self.left_out = 0

    @property
    def buffer(self) -> ReplayBuffer:
        """The buffer, as this process has it open.

        Raises:
            SchemaError: It is in the RAM of the process that forked this one.
            ForkedError: A `ReplayLoader` ran its threads there.
        """
        if self._buffer is None or self._pid != os.getpid():
            # A mapping and its bookkeeping survive a fork; sharing them does not
            # survive a thread that held them at that moment.
            process.refuse_fork_with_threads("ReplayDataset")
            if self._path is None:
                raise _in_ram()
            policy = self._policy
            self._adopt(
                ReplayBuffer.open(
                    self._path, transforms=self._transforms,
                    read_mode=policy.read_mode, advise=policy.advise,
                )
            )  # fmt: skip
        assert self._buffer is not None
        return self._buffer

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        if self._path is None:
            return "<ReplayDataset of a buffer in RAM>"
        path = self._path
        where = os.fspath(path) if isinstance(path, os.PathLike) else path
        made = f", transforms={list(self._transforms)}" if self._transforms else ""
        return f"ReplayDataset({where!r}{made})"

    def __getstate__(self) -> dict[str, Any]:
        """What goes to a spawned worker: the path, transforms, and how to read."""
        if self._path is None:
            raise _in_ram()
        return {
            "path": self._path,
            "transforms": self._transforms,
            "policy": self._policy,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the path; the buffer is opened when it is first used."""
        self._path = state["path"]
        self._transforms = state["transforms"]
        self._policy = state["policy"]
        self._buffer = None
        self._pid = os.getpid()
        self.left_out = 0

    def __len__(self) -> int:
        """Legal starts now."""
        view = self.buffer.view
        return int(view.starts.lengths.sum()) - view.num_illegal

    def __getitem__(self, index: int | Draw) -> Any:
        """Gather a whole draw, or one step.

        Args:
            index: A draw; or a rank in ``[-len, len)`` among the legal starts,
                environment by environment, oldest first.

        Returns:
            A `Batch` of tensors ``[B, *shape]``; or for an integer a nested dict of
            tensors ``[*shape]``, ``next_observation`` included.

        Raises:
            IndexError: There is no legal start of that rank.
            SchemaError: The index is neither.
        """
        if isinstance(index, Draw):
            return self._gather(index)
        ranks = _ranks([index])
        return _rows(self._take(lambda: self._at(ranks, strict=True)))[0]

    def __getitems__(self, indices: Draw | Sequence[int]) -> Any:
        """Gather what a DataLoader asks for at once.

        Args:
            indices: A draw, or ranks; where a living writer has meanwhile taken
                legal starts away, ranks beyond their number count from 0 again.

        Returns:
            A `Batch` of a draw, otherwise a list of nested dicts.
        """
        if isinstance(indices, Draw):
            return self._gather(indices)
        ranks = _ranks(indices)
        if len(ranks) == 0:
            return []
        return _rows(self._take(lambda: self._at(ranks, strict=False)))

    def draws(
        self, sampler: Sampler, batch_size: int, num_batches: int | None = None
    ) -> Draws:
        """Bind a sampler, for a DataLoader's ``sampler`` or ``batch_sampler``.

        Args:
            sampler: Draws in the main process; its state is there.
            batch_size: Steps a draw, at least 1.
            num_batches: Draws an iteration; without end by default.
        """
        return Draws(self, sampler, batch_size, num_batches)

    def _at(self, ranks: Ids, strict: bool) -> Draw:
        """Legal starts by rank."""
        view = self.buffer.view
        starts = view.starts
        count = int(starts.lengths.sum()) - view.num_illegal
        ranks = np.where(ranks < 0, ranks + count, ranks)
        if (ranks < 0).any() or (ranks >= count).any():
            beyond = int(ranks[(ranks < 0) | (ranks >= count)][0])
            if strict or not self.written:
                raise IndexError(
                    f"rank {beyond}: got a buffer with {count} legal starts, expected "
                    f"a rank in [0, {count}); ask len(dataset) anew"
                )
            if count == 0:
                raise EmptyError(
                    f"rank {beyond}: got a buffer without a legal start, expected at "
                    "least one; its writer cleared it, add steps first"
                )
            ranks = ranks % count
        env_ids, positions = view.start_at(ranks)
        # The ranks are shuffled by torch; what transforms draw follows from them.
        key = zlib.crc32(ranks.tobytes())
        share, one = np.full(len(ranks), 1 / count), np.ones(len(ranks), np.float32)
        return Draw(env_ids, positions, share, one, key)

    @property
    def written(self) -> bool:
        """Whether a writer lives that may take rows away."""
        buffer = self.buffer
        return buffer.writable or (buffer.path is not None and locked(buffer.path))

    def _gather(self, draw: Draw) -> Batch:
        """The data of a draw, without what is gone of it.

        Raises:
            SchemaError: Another buffer's dataset made it.
        """
        if draw.buffer not in (b"", self.buffer.metadata.uuid):
            raise SchemaError(
                f"index: got a draw of buffer {draw.buffer.hex()}, expected one of "
                f"{self.buffer.metadata.uuid.hex()} ({self._path or 'in RAM'}); give "
                "the DataLoader what draws of this same dataset returned"
            )
        left = [draw]

        def alive() -> Draw:
            left[0] = self._left(left[0])
            return left[0]

        batch = self._take(alive).torch()
        self.left_out += len(draw) - len(batch)
        return batch

    def _left(self, draw: Draw) -> Draw:
        """What was not given up of a draw."""
        gone = _gone(self.buffer.view, draw)
        if not gone.any():
            return draw
        places, left = left_of(draw, ~gone)
        if len(places) == 0:
            raise StaleError(
                f"a draw of {len(draw)} steps or windows: got every one given up "
                "since, expected one to be left; draw fewer batches ahead, or enlarge "
                f"the capacity ({self.buffer.capacity})"
            )
        return left

    def _take(self, draws: Callable[[], Draw]) -> Batch:
        """Gather a draw, which is asked for anew when the writer was faster.

        Returns:
            A batch whose arrays own their memory, each apart: views of one packed
            array would each carry all of it to the main process.
        """
        for _ in range(MAX_TRIES):
            with self.buffer.view.lock:
                draw = draws()
            try:
                batch = self.buffer.gather(draw)
            except StaleError:
                # Only a row that was given up since is a reason to try again.
                if not _gone(self.buffer.view, draw).any():
                    raise
                continue
            fields = {p: np.ascontiguousarray(a) for p, a in batch.fields.items()}
            return replace(batch, fields=fields)
        raise StarvedError(
            f"a batch of {len(draw)} steps was overwritten before it could be "
            f"read, {MAX_TRIES} times over, expected a writer slower than that; "
            f"enlarge the capacity ({self.buffer.capacity}) or draw smaller batches"
        )


def _gone(view: Reader, draw: Draw) -> NDArray[np.bool_]:
    """Which steps, or windows, cannot be drawn any more, bool ``[B]``."""
    oldest = draw.positions if draw.windows is None else draw.windows.positions[:, 0]
    # Clipped: that an environment is unknown is for `gather` to say. What transforms
    # need before a step may be gone while the step is not.
    gone: NDArray[np.bool_] = oldest < view.starts.first.take(draw.env_ids, mode="clip")
    return gone


def _ranks(indices: Sequence[int]) -> Ids:
    drawn = any(isinstance(index, Draw) for index in indices)
    ranks = None if drawn else np.asarray(indices)
    if (
        ranks is None
        or ranks.ndim != 1
        or (ranks.size and ranks.dtype.kind not in "iu")
    ):
        kind = "a list of Draws" if drawn else type(indices[0]).__name__
        raise SchemaError(
            f"index: got {kind}, expected an integer or a Draw; give draws as sampler "
            "with batch_size=None, or as batch_sampler with collate_fn=mr.collate"
        )
    return ranks.astype(np.int64)


def _rows(batch: Batch) -> list[dict[str, Any]]:
    """Nested dicts of single steps."""
    columns = {path: array.unbind(0) for path, array in batch.torch().fields.items()}
    return [
        unflatten({path: column[row] for path, column in columns.items()})
        for row in range(len(batch))
    ]


def _in_ram() -> SchemaError:
    return SchemaError(
        "ReplayDataset: got a buffer in RAM in a worker process, expected one with a "
        "folder that workers can open; use num_workers=0, or create it with a path"
    )
