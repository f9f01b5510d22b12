"""ReplayLoader: batches of a buffer, drawn and gathered ahead of the learner."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from mmreplay import process
from mmreplay.arguments import integer
from mmreplay.batch import Batch
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.concatenation import Concat
from mmreplay.errors import (
    FailedError,
    FormatError,
    no_thread,
)
from mmreplay.loader.devices import Sender, sender_of
from mmreplay.loader.draws import as_arrays, as_tensors
from mmreplay.loader.prefetch import Prefetcher
from mmreplay.loader.sources import (
    calls_functions,
    most_alike,
    recycler_of,
    source_of,
)
from mmreplay.process import ProcessGuard, Worker
from mmreplay.samplers.base import State
from mmreplay.samplers.states import check_kind

if TYPE_CHECKING:
    from torch import device as Device

READ_AHEAD_NBYTES = 64 << 20
CLOSED_S = 60.0
"""What the threads of a loader that is closed are waited for, at most."""
DROPPED_S = 5.0
"""The same of one that was dropped: a collector of garbage may hold what they want."""
ENTANGLED_S = 0.5
"""The same by who certainly does: a signal's handler in the middle of a draw."""


class ReplayLoader:
    """Batches of a buffer as tensors, made by threads while the learner works.

    **Order.** Batches come in the order in which the buffer's sampler draws them,
    through the buffer's transforms. At most `prefetch` of them are drawn and not yet
    handed over. An update of priorities counts for every draw that is made after it:
    for all but the next `prefetch` batches at most. A sampler that goes by epochs ends
    each iteration with its epoch; the next epoch's steps are those that there are when
    it is iterated over. Iterating again goes on where it was left.

    **Memory.** A batch is the learner's for as long as anything refers to it or to a
    part of it. Its memory is used again only when nothing does; on a GPU only when
    the streams that it was handed to, the current one at that time, have done what
    was queued until it was dropped.

    **Writers.** A buffer that is being written is followed. A batch of which steps
    were overwritten between draw and copy is drawn anew, or comes without them where
    the sampler draws each step once.

    **Threads.** One at a time takes batches. Whoever else draws from the open buffer
    meanwhile draws from the same sampler, and takes part of what it draws.

    **End.** Close it, or use ``with``; dropping it and the end of the program close
    it, too. That leaves the buffer's sampler where the learner is. What fails in a
    thread is raised by the `next` that would have returned that batch; the one after
    it goes on. A process must not be forked meanwhile.

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
            prefetch: Batches drawn ahead, at least 1.
            device: Where tensors are handed over, such as ``"cuda"``.
            num_threads: Threads that gather, at least 1; on a fast disk or with
                costly transforms more than one help. None is one, and one more while
                the learner waits that came back at once, unless a transform calls a
                function of yours.
            read_ahead_nbytes: Bytes that the disk is asked for ahead of gathers, at
                least 1; one batch is asked for whatever its size.

        Raises:
            SchemaError: An argument is not legal, or there is no such device.
        """
        kind = recycler_of(buffer)
        self._batch_size = integer(
            "batch_size", batch_size, 1, "Pass a number of steps."
        )
        self.prefetch = integer("prefetch", prefetch, 1, "Pass a number of batches.")
        at_once = _at_once(buffer, num_threads)
        self._num_threads = at_once[True]
        read_ahead_nbytes = integer(
            "read_ahead_nbytes", read_ahead_nbytes, 1, "Pass a number of bytes."
        )
        # What is filled, what waits, what the learner has and what it had before.
        batches = self.prefetch + self._num_threads + 2
        room = batches * most_alike(buffer.schema)
        self._sender: Sender = sender_of(device, room, kind)
        self._source = source_of(buffer, self._sender.recycler)
        self._work = Prefetcher(
            self._source, self._batch_size, self.prefetch, read_ahead_nbytes,
            self._sender.recycler, self._sender.send, at_once,
        )  # fmt: skip
        self._workers: list[Worker[None]] = []
        self._owner = ProcessGuard(
            "this ReplayLoader was made",
            "make a loader in the child, over a buffer opened there",
        )
        self._begun = self._closed = False
        # Threads hold the work and not the loader: one that was dropped ends.
        self._finalizer = weakref.finalize(
            self, _end, self._work, self._workers, self._sender, self._owner
        )

    def __repr__(self) -> str:
        """Say what it is."""
        closed = ", closed" if self._closed else ""
        return (
            f"<ReplayLoader of {self._source!r}, batch_size={self._batch_size}, "
            f"prefetch={self.prefetch}{closed}>"
        )

    def __iter__(self) -> Iterator[Batch]:
        """Go on with the batches; start the threads if they do not run.

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
        if limits and (not self._begun or self._work.more()):
            for limit in limits:
                limit.await_sample()
        if not self._begun:
            self._start()
        elif self._owner.forked:
            self._check()
        found = self._work.take()
        if found is None:
            self._check()
            raise StopIteration
        batch = self._sender.receive(found)
        if limits:
            self._source.count(batch, self._batch_size)
        return batch

    def _start(self) -> None:
        self._check()
        self._work.begin()
        # A start that Ctrl-C interrupted may have left a worker that never began.
        workers = [worker for worker in self._workers if worker.running]
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
            # By another thread, which may have looked for these before they were there.
            self._workers[:] = workers
            self._stop()
            self._check()

    def _stop(self) -> bool:
        self._begun = False
        return _end(self._work, self._workers, self._sender, self._owner, CLOSED_S)

    def _check(self) -> None:
        self._owner.check()
        if self._closed:
            raise FailedError(
                "ReplayLoader: got one that is closed, expected it open; make another"
            )

    def __len__(self) -> int:
        """Batches of a whole epoch.

        Raises:
            TypeError: The sampler knows no epochs, so there is no end.
        """
        return self._source.num_batches(self._batch_size)

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Give the steps of a batch new priorities; see `ReplayBuffer`.

        Draws made after it heed it: the batches that are drawn already come first.
        """
        return self._source.update_priorities(batch, values)

    def state_dict(self, priorities: bool = False) -> State:
        """What it takes to go on with the batch that would be next.

        That is the sampler's state from before that batch was drawn. Loaded over a
        buffer that nobody wrote meanwhile, the batches are the same; with priorities
        they are if none was updated since the next batch was drawn.

        Args:
            priorities: Also those that the sampler keeps, as tensors.

        Returns:
            Numbers, strings, lists, dicts and tensors: what ``torch.save`` writes and
            ``torch.load(path, weights_only=True)`` reads.
        """
        state = self._work.state()
        if priorities:
            state = _over(self._source.state_dict(priorities=True), state)
        return {"kind": "ReplayLoader", "sampler": as_tensors(state)}

    def load_state_dict(self, state: State) -> None:
        """Go on from a state; what was drawn ahead is dropped.

        Args:
            state: What `state_dict` returned.

        Raises:
            FormatError: It is no loader's, or its sampler's does not fit.
            FailedError: A draw of this loader is under way in this thread.
        """
        check_kind(state, "ReplayLoader", "loader")
        if not isinstance(state.get("sampler"), dict):
            raise FormatError(
                "loader state: got no sampler's state in it, expected one; pass what "
                "state_dict returned, unchanged"
            )
        self._check()
        if self._work.entangled() or not self._stop():
            raise FailedError(
                "ReplayLoader: got a state to load while a batch is being made, "
                "expected none under way; in a signal's handler, a sampler or a "
                "transform note what is to be loaded, and load it between two batches"
            )
        self._source.load_state_dict(as_arrays(state["sampler"]))

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def close(self) -> None:
        """End the threads and give memory back; a second call does nothing.

        Batches that were handed over stay as they are, and the buffer open.
        """
        self._closed = True
        # Ctrl-C may have cut a call before this one short.
        self._stop()
        self._finalizer.detach()

    def __enter__(self) -> ReplayLoader:
        """Return the loader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def _end(
    work: Prefetcher,
    workers: list[Worker[None]],
    sender: Sender,
    owner: ProcessGuard,
    timeout_s: float = DROPPED_S,
) -> bool:
    """End the threads, and leave the sampler where the learner is.

    Returns:
        Whether they have ended; if not, the last of them does the rest.
    """
    if owner.forked:
        return True
    work.stop(len(workers))
    until = monotonic() + (ENTANGLED_S if work.entangled() else timeout_s)
    ended = [worker.join(max(0.0, until - monotonic())) for worker in workers]
    if not all(ended):
        work.abandon()
        return False
    workers.clear()
    work.forget()
    sender.settle()
    process.threads_stopped(work)
    return True


def _over(whole: State, part: State) -> State:
    """A state with another's values in place of its own, those it has."""
    found = dict(whole)
    for name, value in part.items():
        own = found.get(name)
        if isinstance(own, dict) and isinstance(value, dict):
            found[name] = _over(own, value)
        elif isinstance(own, list) and isinstance(value, list):
            found[name] = [
                _over(a, b) if isinstance(a, dict) and isinstance(b, dict) else b
                for a, b in zip(own, value, strict=True)
            ]
        else:
            found[name] = value
    return found


def _at_once(buffer: ReplayBuffer | Concat, num_threads: int | None) -> tuple[int, int]:
    """Threads that gather at a time, and while the learner waits that hurries."""
    if num_threads is not None:
        number = integer("num_threads", num_threads, 1)
        return number, number
    cores = len(os.sched_getaffinity(0))
    return 1, 1 if cores == 1 or calls_functions(buffer) else 2
