"""Iterations over a stream, numbered so that all workers of an iteration agree."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import torch
from torch.utils.data import get_worker_info

MAX_BEGUN = 128
"""Iterations that workers recognise: those of others that began since."""


class Iterations:
    """Numbers of iterations, in memory that workers share.

    torch may end a worker that is slow to start before it began an iteration that
    others did begin. So workers do not count for themselves: the first worker that
    begins an iteration takes the next number for it, and the others look it up. They
    recognise their iteration by three values: the seed that the DataLoader gave its
    workers; how often they have begun an iteration, because persistent workers keep
    their seed; and their number among the processes of the main one, because a user may
    seed each iteration alike.

    There is no lock, which a worker that torch ends might hold. None is needed while
    the first batch of an iteration is taken before another iteration begins.
    """

    def __init__(self) -> None:
        """Count from 0."""
        # The next number, the last begun (-1 for none), the one to resume (-1 for
        # none), and how many of its batches are done.
        self._numbers = _shared(torch.tensor([0, -1, -1, 0]))
        # For each iteration: seed, turn, process, number.
        self._begun = _shared(torch.full((MAX_BEGUN, 4), -1))
        self._turns = (os.getpid(), 0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore; a copy that is not a worker's gets memory of its own."""
        self.__dict__.update(state)
        self._numbers, self._begun = _shared(self._numbers), _shared(self._begun)

    @property
    def last(self) -> int:
        """The iteration that was begun last; -1 if none was."""
        return int(self._numbers[1])

    @property
    def to_resume(self) -> int:
        """The iteration that is to be resumed, and was not begun yet; -1 for none."""
        return int(self._numbers[2]) if self.last == -1 else -1

    def choose(self, number: int) -> None:
        """Set the next number, at least 0."""
        self._numbers[0] = number

    def resume(self, number: int, done: int) -> None:
        """Resume an iteration next, after so many of its batches in another run."""
        self._numbers.copy_(torch.tensor([number, -1, number, done]))

    def done(self, number: int) -> int:
        """Batches of an iteration that were done in another run."""
        resumed, done = self._numbers[2:].tolist()
        return int(done) if resumed == number else 0

    def begin(self) -> int:
        """Begin an iteration, in this worker; return its number."""
        # Read before the table: a worker that increments it has written its row there
        # by then.
        number = int(self._numbers[0])
        info = get_worker_info()
        if info is not None:
            seed, turn = info.seed - info.id, self._turn()
            # The same for all workers of a DataLoader, or nearly so where another
            # thread starts processes, too. For the next DataLoader it is larger by its
            # number of workers at least.
            made = sum(multiprocessing.current_process()._identity[-1:]) - info.id
            row = self._begun[(seed + turn) % MAX_BEGUN]
            *known, others, begun = row.tolist()
            if known == [seed, turn] and abs(made - others) < info.num_workers:
                return int(begun)
            # The key last: a worker that reads it finds the rest written.
            row[2:] = torch.tensor([made, number])
            row[:2] = torch.tensor([seed, turn])
        self._numbers[1] = number
        # Unless `choose` set another one meanwhile.
        if int(self._numbers[0]) == number:
            self._numbers[0] = number + 1
        return number

    def _turn(self) -> int:
        """Number of iterations that this process has begun before."""
        pid, turn = self._turns
        turn = turn if pid == os.getpid() else 0
        self._turns = (os.getpid(), turn + 1)
        return turn


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """Move a tensor to memory that workers share."""
    return tensor.share_memory_()  # type: ignore[no-any-return,no-untyped-call]
