"""ReplayLoader: batches of a buffer, drawn and gathered ahead of the learner."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING, Self

from numpy.typing import ArrayLike

from mmreplay import process
from mmreplay.arguments import flag, integer
from mmreplay.batch import Batch
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.concatenation import Concat
from mmreplay.errors import FailedError, FormatError, no_thread
from mmreplay.loader.devices import Sender, sender_of
from mmreplay.loader.draws import as_arrays, as_tensors
from mmreplay.loader.prefetch import Drawable, Prefetcher
from mmreplay.loader.sources import PowerOfTwoPool, drawable_of
from mmreplay.process import ProcessGuard, Worker
from mmreplay.samplers.base import State
from mmreplay.samplers.states import check_kind
from mmreplay.schema import Schema
from mmreplay.storage.gather import BufferPool

if TYPE_CHECKING:
    from torch import device as Device

READ_AHEAD_NBYTES = 64 << 20
CLOSE_S = 60.0
"""Seconds that `close` waits for the threads, at most."""
DROP_S = 5.0
"""The same where the loader was dropped: the garbage collector may have interrupted a
call that holds a lock the threads wait for."""
OWNED_S = 0.5
"""The same where this thread holds such a lock for certain: in a signal's handler, in
the middle of a draw."""


class ReplayLoader:
    """Batches of a buffer as tensors, made by threads while the learner works.

    **Order.** Batches come in the order in which the buffer's sampler draws them,
    through the buffer's transforms. At most `prefetch` of them are drawn and not yet
    taken. Updated priorities count for every draw after the update: for all but the
    next `prefetch` batches at most. Where the sampler has epochs, each iteration ends
    with the epoch; the steps of the next epoch are those in the buffer when it begins.
    Iterating again continues with the next batch.

    **Memory.** A batch is the learner's for as long as anything refers to it or to one
    of its arrays. Only then is its memory used again; on a GPU only when the stream
    that was current at `next` has done the work that was queued until then.

    **Writers.** The loader follows a writer. If steps were overwritten between draw and
    gather, the batch is drawn again; where the sampler draws each step once, the batch
    comes without them.

    **Threads.** One thread at a time takes batches. Other draws from the open buffer
    use the same sampler, and the loader does not see those steps.

    **End.** Close it, or use ``with``; dropping it and the end of the program close it,
    too. That leaves the buffer's sampler where the learner is. An error in a thread is
    raised by the `next` that would have returned that batch; the call after it
    continues with the next batch, or with the same one where the sampler has epochs:
    an error takes no step out of an epoch. Do not fork the process while the loader is
    open.

    Attributes:
        prefetch: Batches drawn ahead, at most.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> with mr.ReplayLoader(buffer, batch_size=32, device="cpu") as loader:
        ...     for _, batch in zip(range(2), loader):
        ...         print(batch["observation"].shape)
        torch.Size([32, 4])
        torch.Size([32, 4])
    """

    # The `kind` of states, written out: renaming a class changes no state.
    _kind = "ReplayLoader"
    # Batches drawn ahead, at most: more are a typing error, and would fill the memory.
    _max_prefetch = 4096
    # A state of an epoch's end leaves nothing of the iteration; see `Prefetcher`.
    _says_end = False

    def __init__(
        self,
        buffer: ReplayBuffer | Concat,
        batch_size: int,
        *,
        prefetch: int = 2,
        device: str | Device = "cpu",
        num_threads: int | None = None,
        read_ahead_nbytes: int = READ_AHEAD_NBYTES,
    ) -> None:
        """Make a loader; its threads start when it is iterated over.

        Args:
            buffer: An open buffer, with its sampler and transforms; or several, each
                with its own, as `concat` puts them together.
            batch_size: Steps, or windows, a batch, at least 1.
            prefetch: Batches drawn ahead, in [1, 4096].
            device: Where tensors are handed over, such as ``"cuda"``.
            num_threads: Threads that gather, at least 1; several help on a fast disk
                or with costly transforms. None is one thread, and a second one while
                the learner waits after asking again at once, unless a transform calls
                a function of yours.
            read_ahead_nbytes: Bytes requested from the disk ahead of gathers, at least
                1; one batch is requested whatever its size.

        Raises:
            SchemaError: An argument is not legal, or there is no such device.
        """
        self._set_up(
            drawable_of(buffer),
            batch_size,
            prefetch=prefetch,
            device=device,
            num_threads=num_threads,
            read_ahead_nbytes=read_ahead_nbytes,
        )

    def _set_up(
        self,
        source: Drawable,
        batch_size: int,
        *,
        prefetch: int,
        device: str | Device,
        num_threads: int | None = None,
        read_ahead_nbytes: int = READ_AHEAD_NBYTES,
        quick_s: float = 0.0,
    ) -> None:
        """Make what a loader of any source has, in place of the constructor.

        Args:
            source: What it draws from.
            batch_size: As in the constructor, as the next four.
            prefetch: See there.
            device: See there.
            num_threads: See there.
            read_ahead_nbytes: See there.
            quick_s: A learner that asks again sooner gathers small batches itself;
                less than `prefetch.QUICK_S` counts as that.
        """
        self._batch_size = integer("batch_size", batch_size, 1, "Pass a number of steps.")
        self.prefetch = integer(
            "prefetch", prefetch, 1, "Pass a number of batches.", maximum=self._max_prefetch
        )
        if num_threads is not None:
            self._num_threads = integer("num_threads", num_threads, 1)
            max_gathering = self._num_threads, self._num_threads
        else:
            # A second thread takes the learner's core while the learner waits; where
            # there is one core, or a function that may not bear threads, none does.
            cores = len(os.sched_getaffinity(0))
            second = cores > 1 and not source.calls_user_functions
            self._num_threads = 2 if second else 1
            max_gathering = 1, self._num_threads
        read_ahead_nbytes = integer(
            "read_ahead_nbytes", read_ahead_nbytes, 1, "Pass a number of bytes."
        )
        # Batches that are being filled, those that wait, the learner's, and the one
        # that it had before.
        num_batches = self.prefetch + self._num_threads + 2
        max_arrays = num_batches * _max_equal_arrays(source.schema)
        pool_type = PowerOfTwoPool if source.in_shares else BufferPool
        self._sender: Sender = sender_of(device, max_arrays, pool_type)
        source.use_pool(self._sender.pool)
        self._source = source
        self._work = Prefetcher(
            self._source,
            self._batch_size,
            self.prefetch,
            read_ahead_nbytes,
            self._sender.pool,
            self._sender.send,
            max_gathering,
            quick_s,
            self._says_end,
        )
        self._workers: list[Worker[None]] = []
        self._owner = ProcessGuard(
            "this ReplayLoader was made", "Create a loader in the child, over a buffer opened there"
        )
        self._begun = self._closed = False
        # Threads refer to the work and not to the loader, so that a dropped one ends.
        self._finalizer = weakref.finalize(
            self, _end, self._work, self._workers, self._sender, self._owner
        )

    def __repr__(self) -> str:
        """Show the buffer and the sizes."""
        closed = ", closed" if self._closed else ""
        return (
            f"<ReplayLoader of {self._source!r}, batch_size={self._batch_size}, "
            f"prefetch={self.prefetch}{closed}>"
        )

    def __iter__(self) -> Iterator[Batch]:
        """Return this loader; start the threads if they do not run.

        Under a limiter they start with the first batch that it allows.
        """
        if self._source.limits:
            self._begun = False
        else:
            self._start()
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            StopIteration: The epoch is over.
            FailedError: The loader is closed, or the system has no thread for it.
            ForkedError: This process was forked from the one that made it.
        """
        limits = self._source.limits
        work = self._work
        if limits and (work.more() if self._begun else not work.nothing_left):
            for limit in limits:
                limit.await_sample()
        if not self._begun:
            self._start()
        elif os.getpid() != self._owner.pid:
            self._check()
        taken = self._work.next()
        if taken is None:
            self._check()
            raise StopIteration
        sent, claims = taken
        try:
            batch = self._sender.receive(sent)
            if claims:
                claims.store()
        except BaseException:
            claims.take_back()
            raise
        if limits:
            self._source.count(batch, self._batch_size)
        return batch

    def _start(self) -> None:
        self._check()
        self._work.begin()
        # A start that Ctrl-C interrupted may have left a worker that never begins.
        workers = [worker for worker in self._workers if not worker.join(0)]
        while len(workers) < self._num_threads:
            worker: Worker[None] = Worker("mmreplay-load", self._work.run)
            # Listed before it runs: the end of an interrupted loader waits for it, too.
            self._workers[:] = [*workers, worker]
            try:
                worker.start()
            except RuntimeError as error:
                self._workers[:] = workers
                if workers:
                    # One thread makes all batches, if not as soon.
                    break
                raise no_thread("that gathers batches", error) from error
            workers.append(worker)
            process.threads_started(self._work)
        self._begun = True
        if self._closed:
            # Another thread closed it meanwhile, maybe before these were listed.
            self._workers[:] = workers
            self._stop()
            self._check()

    def _stop(self) -> bool:
        self._begun = False
        return _end(self._work, self._workers, self._sender, self._owner, CLOSE_S)

    def _check(self) -> None:
        self._owner.check()
        if self._closed:
            raise FailedError("ReplayLoader: this loader is closed. Create another one.")

    def __len__(self) -> int:
        """Batches of a whole epoch.

        Raises:
            TypeError: The sampler has no epochs, so that there is no end.
        """
        return self._source.num_batches(self._batch_size)

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Set the priorities of a batch's steps; see `ReplayBuffer.update_priorities`.

        Later draws use them; batches that are drawn already come first.
        """
        return self._source.update_priorities(batch, values)

    def state_dict(self, priorities: bool = False) -> State:
        """Return the state to continue with the next batch.

        It is the sampler's state before that batch was drawn. If the buffer was not
        written since, the batches after a load are the same. With priorities they are
        the same if none was updated since the next batch was drawn.

        After the last batch of an epoch the next batch is the first of the next epoch.

        Args:
            priorities: Include the sampler's priorities, as tensors.

        Returns:
            Numbers, strings, lists, dicts and tensors: what ``torch.save`` writes and
            ``torch.load(path, weights_only=True)`` reads.
        """
        at_end = self._work.at_end()
        state = self._work.state()
        if priorities:
            state = _with_values(self._source.state_dict(priorities=True), state)
        state = {"kind": self._kind, "sampler": as_tensors(state)}
        return {**state, "at_end": True} if at_end else state

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; batches that were drawn ahead are dropped.

        Args:
            state: From `state_dict`.

        Raises:
            FormatError: It is no loader's, or its sampler's does not fit.
            FailedError: A draw of this loader is under way in this thread.
        """
        check_kind(state, self._kind, "loader")
        if not isinstance(state.get("sampler"), dict):
            raise FormatError(
                "loader state has no state of the sampler. Pass what state_dict "
                "returned, unchanged."
            )
        at_end = flag(
            "loader state: at_end",
            state.get("at_end", False),
            "Pass what state_dict returned, unchanged.",
            error=FormatError,
        )
        self._check()
        if self._work.owned_by_thread() or not self._stop():
            raise FailedError(
                "ReplayLoader: load_state_dict was called while a batch is being "
                "made, for example in a signal handler, a sampler or a transform. "
                "Load the state between two batches."
            )
        self._source.load_state_dict(as_arrays(state["sampler"]))
        self._work.resume(at_end)

    @property
    def closed(self) -> bool:
        """Whether the loader was closed."""
        return self._closed

    def close(self) -> None:
        """End the threads and release memory; a second call does nothing.

        Batches that were taken stay as they are, and the buffer stays open.
        """
        self._closed = True
        # Also where it is closed already: Ctrl-C may have interrupted that call.
        self._stop()
        self._finalizer.detach()

    def __enter__(self) -> Self:
        """Return the loader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the loader."""
        self.close()


def _max_equal_arrays(schema: Schema) -> int:
    """Largest number of arrays of one shape and dtype in a batch.

    Next observations are counted: as many again.
    """
    # Values that vary are bytes, of which several fields may need as many.
    equal = Counter(
        ((None,), "uint8") if field.varies else (field.shape, field.dtype)
        for field in schema.fields.values()
    )
    return 2 * max(equal.values())


def _end(
    work: Prefetcher,
    workers: list[Worker[None]],
    sender: Sender,
    owner: ProcessGuard,
    timeout_s: float = DROP_S,
) -> bool:
    """End the threads, and leave the sampler where the learner is.

    A forked child has none of the threads, and the sampler is the parent's to put back.

    Returns:
        Whether they have ended; if not, the last of them resets the work as it ends.
    """
    if owner.forked:
        return True
    work.stop(len(workers))
    until = monotonic() + (OWNED_S if work.owned_by_thread() else timeout_s)
    ended = [worker.join(max(0.0, until - monotonic())) for worker in workers]
    if not all(ended):
        work.abandon()
        return False
    workers.clear()
    work.reset()
    sender.settle()
    process.threads_stopped(work)
    return True


def _with_values(state: State, values: State) -> State:
    """Return a state with values in place of its own, where both have them."""
    result = dict(state)
    for name, value in values.items():
        own = result.get(name)
        if isinstance(own, dict) and isinstance(value, dict):
            result[name] = _with_values(own, value)
        elif isinstance(own, list) and isinstance(value, list):
            result[name] = [
                _with_values(a, b) if isinstance(a, dict) and isinstance(b, dict) else b
                for a, b in zip(own, value, strict=True)
            ]
        else:
            result[name] = value
    return result
