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
from mmreplay.samplers.base import (
    Sampler,
    State,
    checked,
    epochs_of,
    keeps_priorities,
    unseeded,
)
from mmreplay.samplers.states import check_kind, stored_integer
from mmreplay.transforms.base import Transform

T = TypeVar("T")


class InterleavedStream(IterableDataset[Batch]):
    """Draws of one sequence, dealt out to ranks and their workers; see `ReplayStream`.

    Whoever builds on it draws and gathers.
    """

    # The `kind` of states, written out: renaming a class changes no state.
    _kind: ClassVar[str]

    def __init__(self, state: State, rank: int, num_ranks: int) -> None:
        """Deal out what follows from a state of what draws."""
        self._state = state
        self._rank, self._num_ranks = rank, num_ranks
        self._iterations = Iterations()

    def _begin(self, state: State) -> None:
        """Draw from a state on, in this worker."""
        raise NotImplementedError

    def _gathered(self) -> Iterator[Callable[[], Batch]]:
        """Draw, and give for each draw what gathers it, if it is to be gathered."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next iteration, in this worker.

        Raises:
            SchemaError: With the first batch: it is an epoch of a buffer that is being
                written.
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

    def _dealt(self, steps: int) -> int:
        """Of so many draws of all ranks, those of this one."""
        return (steps - self._rank + self._num_ranks - 1) // self._num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Say which iteration comes next, of all ranks alike.

        Args:
            epoch: At least 0; iterations are counted from there on.

        Raises:
            SchemaError: It is no integer of at least 0.
        """
        self._iterations.choose(
            integer("epoch", epoch, 0, "Iterations are counted from 0.")
        )

    def state_after(self, num_batches: int) -> State:
        """State after so many batches that the DataLoader gave in this iteration.

        Args:
            num_batches: At least 1; workers may have gathered more.

        Raises:
            SchemaError: It is no integer of at least 1, or nothing was iterated over
                yet.
        """
        way_out = (
            "Call it after a batch; before the first batch, save the iteration's "
            "number for set_epoch."
        )
        num_batches = integer("num_batches", num_batches, 1, way_out)
        epoch = self._iterations.last
        if epoch < 0:
            raise SchemaError(
                f"num_batches: got {num_batches} before an iteration began. {way_out}"
            )
        done = num_batches + self._iterations.done(epoch)
        return {"kind": self._kind, "epoch": epoch, "batches": done}

    def load_state_dict(self, state: State) -> None:
        """Go on from `state_after` with the next iteration, whatever the workers.

        The sampler, batch_size and ranks are to be as they were.

        Args:
            state: What `state_after` returned.

        Raises:
            FormatError: It is no stream's state.
        """
        check_kind(state, self._kind, "stream")
        epoch, done = stored_integer(state, "epoch"), stored_integer(state, "batches")
        self._iterations.resume(epoch, done)


class ReplayStream(InterleavedStream):
    """Batches of a buffer for torch's DataLoader, drawn in its workers.

    Draws are steps of one sequence, which the sampler's seed decides. Rank r of R
    takes steps r, r + R, ...; of those, worker w of W takes every W-th. Each makes all
    draws, which are cheap, and gathers its own. So over a buffer that nobody writes
    the batches of a rank are the same, in the same order, whatever the number of
    workers, and those of all ranks are those of one process.

    **Iterations.** A sampler that goes by epochs ends an iteration with its epoch;
    others go on for num_batches, or without end. The first iteration draws as the
    sampler does by itself, each later one by seeds that follow from the sampler's and
    the iteration's number. It is counted in shared memory, an iteration being begun
    when the first of its workers begins it, whatever DataLoader that is of. Two of
    them at once need a batch from one before the other is begun.

    **Writers.** A buffer that is being written is followed by each worker at its own
    pace: the law of the sampler holds, not the same draws. Epochs over it are refused.

    Prioritized samplers are refused: their priorities are in one process. Make their
    draws there, by `ReplayDataset.draws` or a `ReplayLoader`.

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
            sampler: As it was made, and the stream's from now on. Spawned workers get
                it by pickle.
            batch_size: Steps, or windows, a batch, at least 1.
            num_batches: Batches of this rank an iteration; by default those of the
                epoch, or without end.
            transforms: As of `ReplayDataset`.
            rank: This process's, in ``[0, num_ranks)``. Ranks may get numbers of
                batches that differ by one; where all need as many, let a
                ``ShuffledSampler(rank=..., num_ranks=..., drop_last=True)`` share the
                epoch out, and leave rank and num_ranks here.
            num_ranks: Processes that share the draws, at least 1. Several need one
                seed.

        Raises:
            SchemaError: The sampler is none or keeps priorities, a number is not
                legal, or there are several ranks and no seed.
            FormatError: There is no buffer at the path.
        """
        check_counts(batch_size, num_batches)
        check_dealt(type(self).__name__, sampler, rank, num_ranks)
        self._dataset = ReplayDataset(source, transforms)
        steps = None if num_batches is None else num_batches * num_ranks
        self._draws = self._dataset.draws(sampler, batch_size, steps)
        self._sampler = sampler
        self._batch_size, self._num_batches = batch_size, num_batches
        super().__init__(sampler.state_dict(), rank, num_ranks)

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        source = repr(self._dataset).removeprefix("ReplayDataset(").removesuffix(")")
        path, comma, transforms = source.partition(", transforms=")
        told = f"{path}, {self._sampler!r}, batch_size={self._batch_size}"
        if self._num_batches is not None:
            told += f", num_batches={self._num_batches}"
        told += comma + transforms
        if self._num_ranks > 1:
            told += f", rank={self._rank}, num_ranks={self._num_ranks}"
        return f"ReplayStream({told})"

    def _begin(self, state: State) -> None:
        self._sampler.load_state_dict(state)

    def _gathered(self) -> Iterator[Callable[[], Batch]]:
        self._refuse_writers()
        gather = self._dataset.__getitem__
        for draw in self._draws:
            yield partial(gathered, gather, draw, self._draws.another)

    def _refuse_writers(self) -> None:
        by_epochs = self._num_batches is None and epochs_of(self._sampler) is not None
        if by_epochs and self._dataset.written:
            raise SchemaError(
                f"ReplayStream: got {type(self._sampler).__name__} over a buffer that "
                "is being written, of which each worker would begin an epoch of its "
                "own, expected one that nobody writes; draw in the main process, by "
                "ReplayDataset.draws, or give num_batches"
            )

    def __len__(self) -> int:
        """Batches of this rank an iteration.

        Raises:
            TypeError: There is no end.
        """
        return self._dealt(len(self._draws))


def gathered(gather: Callable[[T], Batch], draw: T, another: Callable[[], T]) -> Batch:
    """The data of a draw, or of another one where nothing is left of it.

    A worker that had to wait for its processor may find it lapped. What it draws by
    itself has the same law whenever it does.
    """
    for _ in range(MAX_TRIES - 1):
        with suppress(StaleError):
            return gather(draw)
        draw = another()
    return gather(draw)


def check_dealt(who: str, sampler: Sampler, rank: int, num_ranks: int) -> None:
    """Refuse what cannot be dealt out to ranks and workers.

    Raises:
        SchemaError: The sampler is none or keeps priorities, the ranks are no numbers
            of ranks, shares are shared out twice, or each rank would have a seed of
            its own.
    """
    if keeps_priorities(checked(sampler)):
        raise SchemaError(
            f"{who}: got {type(sampler).__name__}, which keeps priorities, and "
            "workers would each have their own, expected a sampler without; use "
            "ReplayDataset.draws, of several buffers ConcatDataset.draws, which draw "
            "in the main process, or a ReplayLoader"
        )
    way_out = "Pass torch.distributed's rank and world size."
    integer("num_ranks", num_ranks, 1, way_out)
    integer("rank", rank, 0, way_out, maximum=num_ranks - 1)
    if num_ranks > 1 and getattr(sampler, "num_ranks", 1) > 1:
        raise SchemaError(
            f"num_ranks: got {num_ranks} and a {type(sampler).__name__} that is one of "
            "several ranks itself, expected one of both; leave rank and num_ranks of "
            "the stream out"
        )
    check_seeded(sampler, max(num_ranks, getattr(sampler, "num_ranks", 1)))


def check_seeded(drawing: object, num_ranks: int) -> None:
    """Refuse what draws by a seed from the system, which each rank takes for itself.

    Raises:
        SchemaError: It does, and there are several ranks.
    """
    name = unseeded(drawing) if num_ranks > 1 else None
    if name is not None:
        raise SchemaError(
            f"num_ranks: got {num_ranks} and a {name} without a seed, so that each "
            "rank would draw by another one, expected one seed for all; pass the same "
            "seed=... in each rank, or load the state of one into the others and itself"
        )


def _of_epoch(state: Any, epoch: int) -> Any:
    """A sampler's state with the seeds of one iteration, those of its parts too."""
    if epoch == 0:
        return state
    if isinstance(state, list):
        return [_of_epoch(part, epoch) for part in state]
    if not isinstance(state, dict):
        return state
    found = {name: _of_epoch(part, epoch) for name, part in state.items()}
    if type(state.get("seed")) is int:
        text = f"{state['seed']}/{epoch}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        found["seed"] = int.from_bytes(digest, "little") >> 1
    return found
