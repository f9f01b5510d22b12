"""A buffer as a map-style torch Dataset: whole draws, or single steps by rank.

Whole draws are made by a sampler in the main process, and gathered in any. `collate`
passes their batches on as they are, and stacks single steps.
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

from mmreplay.batch import Batch
from mmreplay.buffer.draw import left_of
from mmreplay.buffer.opening import StrPath
from mmreplay.buffer.reader import GenerationReader
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.concatenation import Concat
from mmreplay.disk.lock import Owner
from mmreplay.errors import EmptyError, SchemaError, StaleError, StarvedError
from mmreplay.loader.draws import Draws
from mmreplay.nesting import unflatten
from mmreplay.process import ProcessGuard, refuse_fork_with_threads
from mmreplay.ragged import Ragged
from mmreplay.samplers.base import Draw, Sampler
from mmreplay.transforms.base import Transform

OPENED = ("its buffers were opened", "Open the paths again in the child")
"""What a dataset's `ProcessGuard` remembers; a forked child opens its own buffers."""


def collate(items: Batch | list[dict[str, Any]]) -> Any:
    """Collate items of a `ReplayDataset` into one batch.

    The `Batch` of a whole draw passes as it is. Pass this function as ``collate_fn``
    along with ``batch_sampler=dataset.draws(...)``.

    Args:
        items: A batch, or single steps as nested dicts of tensors.

    Returns:
        The batch, or the nested dict with every tensor ``[B, *shape]``, and `Ragged`
        of shape ``(B,)`` for fields that vary.

    Raises:
        SchemaError: The items are a list of batches.

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
        f"collate needs single steps, got a list of {len(batches)} batches. Pass "
        "batch_size=None to the DataLoader, because each item is already a batch."
    )


# Otherwise torch lists the types that it can stack, and not what to do.
default_collate_fn_map[Batch] = _refuse


def _ragged(items: Sequence[Ragged], **_: object) -> Ragged:
    return Ragged.concatenate([item.reshape(1) for item in items])


default_collate_fn_map[Ragged] = _ragged


MAX_TRIES = 10
"""Draws that may be overwritten one after the other before their copies are done."""

Ids = NDArray[np.int64]


class ReplayDataset(Dataset[Any]):
    """Steps of a buffer for torch's DataLoader, in three ways.

    Whole draws, the fast way, by any sampler::

        draws = dataset.draws(mr.UniformSampler(seed=0), batch_size=256)
        DataLoader(
            dataset, batch_sampler=draws, collate_fn=mr.collate, num_workers=2
        )
        DataLoader(dataset, sampler=draws, batch_size=None, num_workers=2)

    The first form also passes through Accelerate and Lightning, which replace the
    ``sampler`` of the second one by their own.

    Single steps by rank, each epoch every legal start once, at the cost of
    stacking them::

        DataLoader(dataset, batch_size=256, shuffle=True)

    The item of a draw is a `Batch` of tensors, that of a single step a nested dict of
    tensors, both after the buffer's transforms. Workers get the path and open the
    buffer themselves, read-only, by fork or spawn. The dataset follows a writer. Steps
    that it overwrites between draw and gather are dropped, and the batch is shorter:
    workers do not hold the sampler and cannot draw replacements. The rest keeps the
    sampler's probabilities and weights; of an epoch it still has each step once.

    Attributes:
        left_out: Steps, or windows, dropped because they were overwritten, in this
            process.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> dataset = mr.ReplayDataset("runs/cartpole")
        >>> draws = dataset.draws(mr.UniformSampler(seed=0), batch_size=32)
        >>> loader = DataLoader(dataset, batch_sampler=draws, collate_fn=mr.collate)
        >>> next(iter(loader))["observation"].shape
        torch.Size([32, 4])
    """

    def __init__(
        self, source: ReplayBuffer | StrPath, transforms: Sequence[Transform] = ()
    ) -> None:
        """Make a dataset of a buffer.

        Args:
            source: A folder, or an open buffer; one in RAM takes num_workers=0.
            transforms: Applied to stored steps, in order; an open buffer has its own.
                Workers get copies, by pickle where they are spawned.

        Raises:
            FormatError: There is no buffer at the path.
            SchemaError: A transform does not fit where it stands, or the source is
                several buffers.
        """
        if isinstance(source, Concat):
            raise SchemaError(
                "source must be one buffer, got several. Pass the result of concat to "
                "ConcatDataset or ConcatStream."
            )
        if not isinstance(source, ReplayBuffer):
            source = ReplayBuffer.open(source, transforms=transforms)
        elif transforms:
            raise SchemaError(
                "ReplayDataset: an open buffer has its own transforms. Pass "
                "transforms to ReplayBuffer.open or create."
            )
        self._use(source)

    def _use(self, buffer: ReplayBuffer) -> None:
        self._buffer: ReplayBuffer | None = buffer
        self._path: StrPath | None = buffer.source or buffer.path
        self._transforms = buffer.transforms
        self._policy = buffer.read_policy
        self._owner = ProcessGuard(*OPENED)
        self.left_out = 0

    @property
    def buffer(self) -> ReplayBuffer:
        """The buffer, as this process has it open.

        Raises:
            SchemaError: It is in the RAM of the process that this one was forked from.
            ForkedError: A `ReplayLoader` ran its threads there.
        """
        if self._buffer is None or self._owner.forked:
            # A fork holds copies of the parent's buffer, but also of locks that the
            # parent's threads held at that time. So it opens the buffer again.
            refuse_fork_with_threads("ReplayDataset")
            if self._path is None:
                raise _in_ram()
            policy = self._policy
            self._use(
                ReplayBuffer.open(
                    self._path,
                    transforms=self._transforms,
                    read_mode=policy.read_mode,
                    advise=policy.advise,
                )
            )
        assert self._buffer is not None
        return self._buffer

    def __repr__(self) -> str:
        """Show the call that makes an equal one."""
        if self._path is None:
            return "<ReplayDataset of a buffer in RAM>"
        path = self._path
        where = os.fspath(path) if isinstance(path, os.PathLike) else path
        transforms = ""
        if self._transforms:
            transforms = f", transforms={list(self._transforms)}"
        return f"ReplayDataset({where!r}{transforms})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a spawned worker needs: path, transforms and read policy."""
        if self._path is None:
            raise _in_ram()
        return {"path": self._path, "transforms": self._transforms, "policy": self._policy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the path; the buffer is opened when it is first used."""
        self._path = state["path"]
        self._transforms = state["transforms"]
        self._policy = state["policy"]
        self._buffer = None
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
            tensors ``[*shape]``, ``next_observation`` included. Of a field that varies
            it has a `Ragged` of shape ``()``, whose `values` are the tensor.

        Raises:
            IndexError: There is no legal start of that rank.
            SchemaError: The index is neither.
        """
        if isinstance(index, Draw):
            return self._gather(index)
        ranks = _ranks([index])
        return _rows(self._take(lambda: self._at(ranks, strict=True)))[0]

    def __getitems__(self, indices: Draw | Sequence[int]) -> Any:
        """Gather the items of one batch of a DataLoader.

        Args:
            indices: A draw, or ranks. Where a writer has meanwhile overwritten legal
                starts, ranks beyond their number count from 0 again.

        Returns:
            A `Batch` of a draw, otherwise a list of nested dicts.
        """
        if isinstance(indices, Draw):
            return self._gather(indices)
        ranks = _ranks(indices)
        if len(ranks) == 0:
            return []
        return _rows(self._take(lambda: self._at(ranks, strict=False)))

    def draws(self, sampler: Sampler, batch_size: int, num_batches: int | None = None) -> Draws:
        """Return draws for a DataLoader's ``sampler`` or ``batch_sampler``.

        Args:
            sampler: Draws in the main process, where its state is.
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
                    f"rank {beyond} must be in [0, {count}), as the buffer has {count} "
                    "legal starts. Read len(dataset) again."
                )
            if count == 0:
                raise EmptyError(
                    f"rank {beyond}: the buffer has no legal start, as its writer "
                    "cleared it. Add steps first."
                )
            ranks = ranks % count
        env_ids, positions = view.start_at(ranks)
        # torch shuffles the ranks; the seed of random transforms follows from them.
        key = zlib.crc32(ranks.tobytes())
        share, one = np.full(len(ranks), 1 / count), np.ones(len(ranks), np.float32)
        return Draw(env_ids, positions, share, one, key)

    @property
    def written(self) -> bool:
        """Whether there is a writer, which may overwrite rows."""
        buffer = self.buffer
        return buffer.writable or (buffer.path is not None and Owner(buffer.path).alive)

    def _gather(self, draw: Draw) -> Batch:
        """Gather a draw without the steps that were overwritten since.

        Raises:
            SchemaError: The draw is of another buffer.
        """
        if draw.buffer not in (b"", self.buffer.metadata.uuid):
            raise SchemaError(
                f"index must be a draw of {self.buffer.metadata.uuid.hex()} "
                f"({self._path or 'in RAM'}), got one of buffer {draw.buffer.hex()}. "
                "Pass the DataLoader the draws of this dataset."
            )
        left = draw

        def not_overwritten() -> Draw:
            nonlocal left
            overwritten = _overwritten(self.buffer.view, left)
            if overwritten.any():
                rows, rest = left_of(left, ~overwritten)
                if len(rows) == 0:
                    raise StaleError(
                        f"all {len(left)} steps or windows of a draw were overwritten "
                        "before they were read. Draw fewer batches ahead, or enlarge "
                        f"the capacity ({self.buffer.capacity})."
                    )
                left = rest
            return left

        batch = self._take(not_overwritten).torch()
        self.left_out += len(draw) - len(batch)
        return batch

    def _take(self, draws: Callable[[], Draw]) -> Batch:
        """Gather a draw; make it again when the writer overwrote steps of it.

        Args:
            draws: Makes the draw, under the view's lock.

        Returns:
            A batch whose arrays are copies of their own: each view of one packed
            array would send all of it from the worker to the main process.
        """
        for _ in range(MAX_TRIES):
            with self.buffer.view.lock:
                draw = draws()
            try:
                batch = self.buffer.gather(draw)
            except StaleError:
                # Only overwritten rows are a reason to try again.
                if not _overwritten(self.buffer.view, draw).any():
                    raise
                continue
            fields = {
                path: array.copy() if isinstance(array, Ragged) else np.ascontiguousarray(array)
                for path, array in batch.fields.items()
            }
            return replace(batch, fields=fields)
        raise StarvedError(
            f"gave up after {MAX_TRIES} attempts: the writer overwrote steps of a "
            f"batch of {len(draw)} before they were read. Enlarge the capacity "
            f"({self.buffer.capacity}) or draw smaller batches."
        )


def _overwritten(view: GenerationReader, draw: Draw) -> NDArray[np.bool_]:
    """Which steps, or windows, cannot be drawn any more, bool ``[B]``."""
    oldest = draw.positions if draw.windows is None else draw.windows.positions[:, 0]
    # Clipped: `gather` refuses an unknown environment. By `starts`: rows before a step
    # that transforms need may be overwritten while the step is not.
    first = view.starts.first.take(draw.env_ids, mode="clip")
    result: NDArray[np.bool_] = oldest < first
    return result


def _ranks(indices: Sequence[int]) -> Ids:
    drawn = any(isinstance(index, Draw) for index in indices)
    ranks = None if drawn else np.asarray(indices)
    if ranks is None or ranks.ndim != 1 or (ranks.size and ranks.dtype.kind not in "iu"):
        kind = "a list of Draws" if drawn else type(indices[0]).__name__
        raise SchemaError(
            f"index must be an integer or a Draw, got {kind}. Pass draws as sampler "
            "with batch_size=None, or as batch_sampler with collate_fn=mr.collate."
        )
    return ranks.astype(np.int64)


def _rows(batch: Batch) -> list[dict[str, Any]]:
    """Split a batch into nested dicts of single steps."""
    count = range(len(batch))
    columns = {
        # Values of steps that come together by chance must not be stacked: `_ragged`.
        path: [array[row : row + 1].reshape() for row in count]
        if isinstance(array, Ragged)
        else array.unbind(0)
        for path, array in batch.torch().fields.items()
    }
    return [unflatten({path: column[row] for path, column in columns.items()}) for row in count]


def _in_ram() -> SchemaError:
    return SchemaError(
        "ReplayDataset: the buffer is in the RAM of another process. Use "
        "num_workers=0, or create the buffer with a path, which workers can open."
    )
