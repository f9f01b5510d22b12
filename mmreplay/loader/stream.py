"""A buffer as an iterable torch Dataset: every worker draws for itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from mmreplay.arguments import integer
from mmreplay.batch import Batch
from mmreplay.buffer.opening import StrPath
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import SchemaError, StaleError
from mmreplay.loader.dataset import MAX_TRIES, ReplayDataset
from mmreplay.loader.draws import check_counts
from mmreplay.loader.iterations import Iterations
from mmreplay.samplers.base import Sampler, State, checked, traits_of, unseeded
from mmreplay.samplers.states import check_kind, stored_integer
from mmreplay.samplers.uses import called_counter, counters_in
from mmreplay.transforms.base import Transform

T = TypeVar("T")


class InterleavedStream(IterableDataset[Batch]):
    """Draws of one sequence, interleaved over ranks and workers; see `ReplayStream`.

    Each worker makes all draws, and gathers those that are its own. Subclasses draw and
    gather.
    """

    # The `kind` of states, written out: renaming a class changes no state.
    _kind: ClassVar[str]

    def __init__(self, state: State, rank: int, num_ranks: int) -> None:
        """Interleave the draws that follow from a sampler's state."""
        self._state = state
        self._rank, self._num_ranks = rank, num_ranks
        self._iterations = Iterations()

    def _begin(self, state: State) -> None:
        """Have this worker draw from a state on."""
        raise NotImplementedError

    def _gathered(self) -> Iterator[Callable[[], Batch]]:
        """Draw, and yield for each draw a function that gathers it."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next iteration, in this worker.

        Raises:
            SchemaError: With the first batch, where it is an epoch of a buffer that a
                writer has opened since.
        """
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch = self._iterations.begin()
        self._begin(_of_epoch(self._state, epoch))
        return self._batches(worker, num_workers, self._iterations.done(epoch))

    def _batches(self, worker: int, num_workers: int, done: int) -> Iterator[Batch]:
        for step, gather in enumerate(self._gathered()):
            number, rank = divmod(step, self._num_ranks)
            if rank != self._rank or number < done:
                continue
            if (number - done) % num_workers == worker:
                yield gather()

    def _num_own(self, steps: int) -> int:
        """Number of this rank's draws among so many of all ranks."""
        return (steps - self._rank + self._num_ranks - 1) // self._num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next iteration, the same in all ranks.

        Args:
            epoch: At least 0; later iterations are counted from it.

        Raises:
            SchemaError: The epoch is no integer of at least 0, or a loaded state is of
                another one and would be lost.
        """
        epoch = integer("epoch", epoch, 0, "Iterations are counted from 0.")
        resumed = self._iterations.to_resume
        if resumed not in (-1, epoch):
            raise SchemaError(
                f"epoch must be {resumed}, in which the loaded state goes on, got "
                f"{epoch}. Count epochs from {resumed}; under Accelerate, call the "
                f"prepared loader's set_epoch({resumed})."
            )
        self._iterations.choose(epoch)

    def state_after(self, num_batches: int) -> State:
        """Return the state after so many batches of this iteration.

        Args:
            num_batches: Batches from the DataLoader, at least 1; workers may have
                gathered more.

        Raises:
            SchemaError: It is no integer of at least 1, or no iteration was begun yet.
        """
        way_out = (
            "Call it after a batch. Before the first batch, save the iteration's "
            "number for set_epoch."
        )
        num_batches = integer("num_batches", num_batches, 1, way_out)
        epoch = self._iterations.last
        if epoch < 0:
            raise SchemaError(
                "num_batches must count batches of an iteration, but none has begun, "
                f"got {num_batches}. {way_out}"
            )
        done = num_batches + self._iterations.done(epoch)
        return {"kind": self._kind, "epoch": epoch, "batches": done}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_after` with the next iteration, with any workers.

        The sampler, batch_size and ranks have to be as they were.

        Args:
            state: From `state_after`.

        Raises:
            FormatError: It is not the state of such a stream.
        """
        check_kind(state, self._kind, "stream")
        epoch, done = stored_integer(state, "epoch"), stored_integer(state, "batches")
        self._iterations.resume(epoch, done)


class ReplayStream(InterleavedStream):
    """Batches of a buffer for torch's DataLoader, drawn in its workers.

    All draws form one sequence, which follows from the sampler's seed. Rank r of R
    takes draws r, r + R, ... of it; of those, worker w of W takes every W-th. Each
    worker makes all draws, which is cheap, and gathers its own. So on a buffer without
    a writer the batches of a rank are the same, in the same order, with any number of
    workers, and the batches of all ranks are those of one process.

    **Iterations.** Where the sampler has epochs, an iteration ends with the epoch;
    otherwise after num_batches, or never. The first iteration draws as the sampler does
    by itself, each later one with seeds that follow from the sampler's seed and the
    number of the iteration. That number is counted in shared memory: an iteration
    begins when the first of its workers begins it, in any DataLoader. To run two
    iterations at once, take a batch of one before the other begins.

    **Writers.** Each worker follows a writer at its own pace: the sampler's
    probabilities hold, but workers do not make the same draws. Epochs over such a
    buffer are refused.

    Prioritized samplers and a `UseCounter` are refused: priorities and counts are in
    one process. Draw there, by `ReplayDataset.draws` or a `ReplayLoader`.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> stream = mr.ReplayStream("runs/cartpole", mr.ShuffledSampler(seed=0), 1024)
        >>> batches = DataLoader(stream, batch_size=None)  # one epoch
        >>> steps = sum(len(batch) for batch in batches)
        >>> 3000 < steps <= 4000  # all that can be drawn
        True
    """

    _kind = "ReplayStream"

    def __init__(
        self,
        source: ReplayBuffer | StrPath,
        sampler: Sampler,
        batch_size: int,
        num_batches: int | None = None,
        *,
        transforms: Sequence[Transform] = (),
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Make a stream.

        Args:
            source: A folder, or an open buffer; one in RAM takes num_workers=0.
            sampler: A new sampler, which the stream alone uses from now on. Spawned
                workers get it by pickle.
            batch_size: Steps, or windows, a batch, at least 1.
            num_batches: Batches of this rank an iteration; by default those of the
                epoch, or without end.
            transforms: As in `ReplayDataset`.
            rank: Rank of this process, in ``[0, num_ranks)``. Ranks may get numbers of
                batches that differ by one; where all need the same number, let a
                ``ShuffledSampler(rank=..., num_ranks=..., drop_last=True)`` divide the
                epoch, and leave out rank and num_ranks here.
            num_ranks: Processes that share the draws, at least 1. Several need the
                same seed.

        Raises:
            SchemaError: The sampler is not a sampler, has priorities or counts uses, a
                number is not legal, there are several ranks and no seed, or the sampler
                goes through epochs and the buffer is being written.
            FormatError: There is no buffer at the path.
        """
        check_counts(batch_size, num_batches)
        check_interleaved(type(self).__name__, sampler, rank, num_ranks)
        self._dataset = ReplayDataset(source, transforms)
        steps = None if num_batches is None else num_batches * num_ranks
        self._draws = self._dataset.draws(sampler, batch_size, steps)
        self._sampler = sampler
        self._batch_size, self._num_batches = batch_size, num_batches
        self._refuse_written()
        super().__init__(sampler.state_dict(), rank, num_ranks)

    def __repr__(self) -> str:
        """Show the call that makes an equal one."""
        source = repr(self._dataset).removeprefix("ReplayDataset(").removesuffix(")")
        path, comma, transforms = source.partition(", transforms=")
        call = f"{path}, {self._sampler!r}, batch_size={self._batch_size}"
        if self._num_batches is not None:
            call += f", num_batches={self._num_batches}"
        call += comma + transforms
        if self._num_ranks > 1:
            call += f", rank={self._rank}, num_ranks={self._num_ranks}"
        return f"ReplayStream({call})"

    def _begin(self, state: State) -> None:
        self._sampler.load_state_dict(state)

    def _refuse_written(self) -> None:
        """Refuse epochs, at any depth, of a buffer that is being written.

        Raises:
            SchemaError: There is a writer.
        """
        by_epochs = self._num_batches is None and traits_of(self._sampler).epochs
        if by_epochs and self._dataset.written:
            raise SchemaError(
                "ReplayStream: over a buffer that is being written, each worker's "
                f"epoch of a {type(self._sampler).__name__} would have other steps. "
                "Draw in the main process, by ReplayDataset.draws, or pass "
                "num_batches."
            )

    def _gathered(self) -> Iterator[Callable[[], Batch]]:
        # A writer may have opened it since the stream was made.
        self._refuse_written()
        gather = self._dataset.__getitem__
        for draw in self._draws:
            yield partial(gather_or_redraw, gather, draw, self._draws.another)

    def __len__(self) -> int:
        """Batches of this rank an iteration.

        Raises:
            TypeError: Iterations have no end.
        """
        return self._num_own(len(self._draws))


def gather_or_redraw(gather: Callable[[T], Batch], draw: T, another: Callable[[], T]) -> Batch:
    """Gather a draw, or another one where every step of it was overwritten.

    A worker that waited long for a processor may find its draw overwritten. It holds
    the sampler, and a later draw has the same probabilities.

    Args:
        gather: Copies the data of a draw.
        draw: The first draw to try.
        another: Draws once more.
    """
    for _ in range(MAX_TRIES - 1):
        with suppress(StaleError):
            return gather(draw)
        draw = another()
    return gather(draw)


def check_interleaved(who: str, sampler: Sampler, rank: int, num_ranks: int) -> None:
    """Refuse draws that cannot be interleaved over ranks and workers.

    Args:
        who: Name of the stream's class.
        sampler: What draws.
        rank: Rank of this process.
        num_ranks: Number of ranks.

    Raises:
        SchemaError: The sampler is not a sampler, has priorities or counts uses, a rank
            is not legal, the sampler divides epochs between ranks as well, or each rank
            would have a seed of its own.
    """
    if traits_of(checked(sampler)).priorities:
        raise SchemaError(
            f"{who}: each worker would have its own priorities of the "
            f"{type(sampler).__name__}. Draw in the main process, by "
            "ReplayDataset.draws, ConcatDataset.draws or a ReplayLoader."
        )
    if counters_in(sampler):
        raise SchemaError(
            f"{who}: each worker would have its own counts of the "
            f"{called_counter(sampler)}. Draw in the main process, by "
            "ReplayDataset.draws, ConcatDataset.draws or a ReplayLoader."
        )
    way_out = "Pass torch.distributed's rank and world size."
    integer("num_ranks", num_ranks, 1, way_out)
    integer("rank", rank, 0, way_out, maximum=num_ranks - 1)
    if num_ranks > 1 and getattr(sampler, "num_ranks", 1) > 1:
        raise SchemaError(
            f"num_ranks must be 1 with a {type(sampler).__name__} that divides its "
            f"epochs between ranks as well, got {num_ranks}. Leave out rank and "
            "num_ranks of the stream."
        )
    check_seeded(sampler, max(num_ranks, getattr(sampler, "num_ranks", 1)))


def check_seeded(drawing: object, num_ranks: int) -> None:
    """Refuse several ranks without a seed, of which each would draw by another one.

    Args:
        drawing: A sampler, or `Concat`.
        num_ranks: Number of ranks.

    Raises:
        SchemaError: There is no seed, and there are several ranks.
    """
    name = unseeded(drawing) if num_ranks > 1 else None
    if name is not None:
        raise SchemaError(
            f"num_ranks: the {name} has no seed, so each of {num_ranks} ranks would "
            "draw by another one. Pass the same seed=... in each rank, or load the "
            "state of one rank into all."
        )


def _of_epoch(state: Any, epoch: int) -> Any:
    """Return a state with the seeds of one iteration, in the samplers below it too."""
    if epoch == 0:
        return state
    if isinstance(state, list):
        return [_of_epoch(item, epoch) for item in state]
    if not isinstance(state, dict):
        return state
    result = {name: _of_epoch(value, epoch) for name, value in state.items()}
    if type(state.get("seed")) is int:
        text = f"{state['seed']}/{epoch}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        result["seed"] = int.from_bytes(digest, "little") >> 1
    return result
