"""Iterations over a stream, numbered so that all workers of one agree."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import torch
from torch.utils.data import get_worker_info

KEPT = 128


class Iterations:
    """Numbers of iterations, in memory that workers see.

    torch may end a worker that is slow to start before it began an iteration which
    others did begin. So it is iterations that have numbers, not workers: who begins one
    first takes the next number for it, and the others find it. They know their
    iteration by the seed that the DataLoader gave its workers, by how often they have
    begun one, since persistent workers keep their seed, and by when they were made
    among the processes of the main one, since a user may seed each iteration alike.

    There is no lock, which a worker that is ended might hold. Nothing needs one while
    the first batch of an iteration is taken before another one is begun.
    """

    def __init__(self) -> None:
        """Count from 0 on."""
        # What comes next, what was begun last (-1 for nothing), what is to be gone on
        # with (likewise), and how many of its batches are done.
        self._numbers = _shared(torch.tensor([0, -1, -1, 0]))
        # Of each iteration: seed, turn, process, number.
        self._begun = _shared(torch.full((KEPT, 4), -1))
        self._turns = (os.getpid(), 0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was pickled; a copy that is no worker's has memory of its own."""
        self.__dict__.update(state)
        self._numbers, self._begun = _shared(self._numbers), _shared(self._begun)

    @property
    def last(self) -> int:
        """The iteration that was begun last, -1 if none was."""
        return int(self._numbers[1])

    def choose(self, number: int) -> None:
        """Say which comes next, at least 0."""
        self._numbers[0] = number

    def resume(self, number: int, done: int) -> None:
        """Begin the next one after so many of its batches, taken in another run."""
        self._numbers.copy_(torch.tensor([number, -1, number, done]))

    def done(self, number: int) -> int:
        """Batches of an iteration that were taken in another run."""
        resumed, done = self._numbers[2:].tolist()
        return int(done) if resumed == number else 0

    def begin(self) -> int:
        """Begin an iteration, in this worker; return its number."""
        # Read before the table is: who moves it on has written there by then.
        number = int(self._numbers[0])
        info = get_worker_info()
        if info is not None:
            seed, turn = info.seed - info.id, self._turn()
            # The same of all workers of a DataLoader, or nearly so where another
            # thread starts processes, too; the next DataLoader's is larger by a whole
            # set of workers at least.
            made = sum(multiprocessing.current_process()._identity[-1:]) - info.id
            row = self._begun[(seed + turn) % KEPT]
            *known, others, found = row.tolist()
            if known == [seed, turn] and abs(made - others) < info.num_workers:
                return int(found)
            # Last what the others know it by: who finds that finds the rest.
            row[2:] = torch.tensor([made, number])
            row[:2] = torch.tensor([seed, turn])
        self._numbers[1] = number
        # Unless another one was chosen meanwhile.
        if int(self._numbers[0]) == number:
            self._numbers[0] = number + 1
        return number

    def _turn(self) -> int:
        """How often one was begun in this process before."""
        pid, turn = self._turns
        turn = turn if pid == os.getpid() else 0
        self._turns = (os.getpid(), turn + 1)
        return turn


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, in memory that workers see."""
    return tensor.share_memory_()  # type: ignore[no-any-return,no-untyped-call]
