"""A rate limiter between the writer and the learners of one buffer, across processes.

Reverb's law (Cassirer et al. 2021, "Reverb: A Framework For Experience Replay", section
3.3): with I rows inserted, S items sampled and the ratio r = samples_per_insert, keep

    r * min_size - error_buffer  <=  r * I - S  <=  r * min_size + error_buffer

Rows are counted by the heads in COMMIT; each learner counts what it draws in a file of
its own, under a lock that dies with it. Nobody holds anything that another waits for
but the law itself, so that a dead process can stop nobody for ever.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmreplay import files
from mmreplay.buffer.limiting import Count
from mmreplay.errors import (
    FailedError,
    ForkedError,
    ReplayError,
    SchemaError,
    StarvedError,
)
from mmreplay.files import File
from mmreplay.format import strict_json
from mmreplay.mounts import refuse_link
from mmreplay.storage.pause import taken

FOLDER = "limiter"
LAW = "law.json"
WRITER = "writer"
LEARNERS = 256
COUNTED = struct.Struct("<QQ")
SHORTEST_S, LONGEST_S = 0.0005, 0.02
MASK = (1 << 64) - 1

_bound: weakref.WeakSet[BoundLimit] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """Samples per insert, a least size and an error buffer, as in Reverb.

    Give equal ones to the writer's and the learners' `ReplayBuffer.create` or `open`.
    A call of `add` or `sample` goes through when one more row or item may; it may then
    pass the bounds by what it has more of than one. Rows are those of all
    environments, final rows included; items are steps, or windows, of batches.

    Attributes:
        samples_per_insert: Items drawn per row written, in the long run.
        min_size: Rows alive before the first item is drawn; writing is free until then.
        error_buffer: How far r * inserts - samples may be from r * min_size, at least
            ``max(1, samples_per_insert)``, or both sides could wait for each other.
        timeout: Seconds that a call waits at most; None for as long as another process
            lives that could end the wait.
        patience: Seconds that a call waits where none lives, or it is this very
            process, and nothing is counted.
        then: ``"raise"`` StarvedError when the wait is over, or ``"go_on"``.
    """

    samples_per_insert: float
    min_size: int
    error_buffer: float
    timeout: float | None = None
    patience: float = 10.0
    then: Literal["raise", "go_on"] = "raise"

    def __post_init__(self) -> None:
        """Refuse what would block both sides."""
        ratio = self.samples_per_insert
        if not (math.isfinite(ratio) and ratio > 0):
            raise SchemaError(
                f"samples_per_insert: got {ratio!r}, expected a number above 0; give "
                "the items drawn for each row written"
            )
        if self.min_size < 1:
            raise SchemaError(
                f"min_size: got {self.min_size!r}, expected at least 1; give the rows "
                "to be there before the first draw"
            )
        least = max(1.0, ratio)
        if not self.error_buffer >= least:
            raise SchemaError(
                f"error_buffer: got {self.error_buffer!r}, expected at least {least:g} "
                "(the larger of 1 and samples_per_insert), or writer and learner "
                "could wait for each other; give a larger one"
            )
        if self.then not in ("raise", "go_on"):
            raise SchemaError(
                f"then: got {self.then!r}, expected 'raise' or 'go_on'; name what "
                "happens when a wait is over"
            )

    @property
    def law(self) -> tuple[float, int, float]:
        """What must be equal on both sides."""
        return (
            float(self.samples_per_insert), int(self.min_size),
            float(self.error_buffer),
        )  # fmt: skip

    def allows_insert(self, inserts: int, samples: int, size: int) -> bool:
        """Whether one more row may be written.

        Args:
            inserts: Rows written, all in all.
            samples: Items drawn, all in all.
            size: Steps alive.
        """
        if size < self.min_size:
            return True
        ratio, least, error = self.law
        return ratio * (inserts + 1) - samples <= ratio * least + error

    def allows_sample(self, inserts: int, samples: int, size: int) -> bool:
        """Whether one more item may be drawn.

        Args:
            inserts: Rows written, all in all.
            samples: Items drawn, all in all.
            size: Steps alive.
        """
        if size < self.min_size:
            return False
        ratio, least, error = self.law
        return ratio * inserts - (samples + 1) >= ratio * least - error

    def bind(self, folder: Path | None, capacity: int, count: Count) -> BoundLimit:
        """Apply it to a buffer; see `Limiter.bind`.

        Raises:
            SchemaError: The buffer is in RAM or too small, or others use another law.
        """
        if folder is None:
            raise SchemaError(
                "limiter: got one for a buffer in RAM, expected a folder, where "
                "processes meet; create the buffer with a path"
            )
        if self.min_size > capacity:
            raise SchemaError(
                f"min_size: got {self.min_size} rows, expected at most {capacity}, "
                "which the buffer can hold; give fewer, or a larger capacity"
            )
        return BoundLimit(self, folder / FOLDER, count)


class BoundLimit:
    """See `Limit`."""

    def __init__(self, limiter: RateLimiter, folder: Path, count: Count) -> None:
        self._limiter = limiter
        self._folder = folder
        self._rows = count
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._writer: File | None = None
        self._learner: File | None = None
        self._drawn = 0
        # Counts stay where they are for good: each is opened once.
        self._known: dict[str, File] = {}
        self._base = self._agree()
        _bound.add(self)

    def _agree(self) -> int:
        """Rows that were written and gone before the law was; checks the law."""
        path = self._folder / LAW
        refuse_link(self._folder)
        if not path.exists():
            files.make_folder(self._folder, exist_ok=True)
            written, alive = self._rows()
            value = {"law": list(self._limiter.law), "base": written - alive}
            files.replace_bytes(path, json.dumps(value).encode())
        value = strict_json.parse(files.read_bytes(path, 4096), str(path))
        law, base = value.get("law"), value.get("base")
        if law != list(self._limiter.law) or not isinstance(base, int):
            raise SchemaError(
                f"limiter: got (samples_per_insert, min_size, error_buffer) "
                f"{list(self._limiter.law)}, expected {law}, which {path} says; give "
                f"equal ones everywhere, or remove {self._folder} while nobody uses it"
            )
        return base

    def await_insert(self) -> None:
        """Return once a row may be written; see `Limit.await_insert`."""
        with self._lock:
            self._check_owner()
            if self._writer is None:
                self._writer = self._place(WRITER, 0)
            self._wait(self._limiter.allows_insert, "a learner to draw")

    def await_sample(self) -> None:
        """Return once an item may be drawn; see `Limit.await_sample`."""
        with self._lock:
            self._check_owner()
            if self._learner is None:
                self._learner = self._seat()
            self._wait(self._limiter.allows_sample, "the writer to add")

    def count(self, count: int) -> None:
        """Count items drawn; see `Limit.count`."""
        with self._lock:
            if self._learner is None:
                self._learner = self._seat()
            self._drawn += count
            data = COUNTED.pack(self._drawn, self._drawn ^ MASK)
            self._learner.pwrite(data, 0)

    def _check_owner(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                f"this limiter was bound by pid {self._pid}, this is a forked child "
                f"(pid {os.getpid()}), expected the parent; open the buffer here"
            )

    def _place(self, name: str, nbytes: int) -> File | None:
        """Take the lock of a file, or nothing where somebody has it."""
        path = self._folder / name
        if not path.exists():
            with suppress(FailedError):
                File.create(path, nbytes).close()
        file = File.open(path, None, writable=True)
        if taken(file):
            return file
        file.close()
        return None

    def _seat(self) -> File:
        """Take the first free count, and go on from what it says."""
        for number in range(LEARNERS):
            file = self._place(f"learner-{number:03d}", COUNTED.size)
            if file is not None:
                self._drawn = _read(file)
                return file
        raise FailedError(
            f"{self._folder} has {LEARNERS} learners already, expected fewer; close one"
        )

    def _samples(self, look: bool) -> int:
        """Items drawn by all learners; those that came since if one is to look."""
        if look or not self._known:
            for path in self._folder.glob("learner-*"):
                if path.name not in self._known:
                    with suppress(ReplayError):
                        self._known[path.name] = File.open(path, COUNTED.size)
        return sum(_read(file) for file in self._known.values())

    def _wait(self, allows: Callable[[int, int, int], bool], what: str) -> None:
        limiter, began = self._limiter, time.monotonic()
        draws = allows == limiter.allows_sample
        seen, since, pause = None, began, SHORTEST_S
        while True:
            written, alive = self._rows()
            # What a learner that is not known yet drew lets more rows in, not fewer;
            # before items are drawn everybody is looked for.
            now = (
                written - self._base,
                self._samples(draws or seen is not None),
                alive,
            )
            if allows(*now):
                return
            moment = time.monotonic()
            if now != seen:
                seen, since = now, moment
            over = limiter.timeout is not None and moment - began >= limiter.timeout
            alone = moment - since >= limiter.patience and not self._others()
            if over or alone:
                break
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
        if limiter.then == "raise":
            why = "it is alone" if alone else f"{limiter.timeout:g} s are over"
            raise StarvedError(
                f"{self._folder.parent}: waited for {what}, but {why}: got {now[0]} "
                f"rows written and {now[1]} items drawn, expected {limiter.law[0]:g} "
                f"items a row within {limiter.law[2]:g}; start the other side, or "
                "give another timeout, patience or then='go_on'"
            )

    def _others(self) -> bool:
        """Whether another process writes or draws under the law."""
        for path in [self._folder / WRITER, *self._folder.glob("learner-*")]:
            if any(path in other.places for other in _bound):
                continue
            with suppress(ReplayError):
                file = File.open(path, None)
                try:
                    if not taken(file):
                        return True
                finally:
                    file.close()
        return False

    @property
    def places(self) -> list[Path]:
        """Files whose locks it holds."""
        return [file.path for file in (self._writer, self._learner) if file]

    def close(self) -> None:
        """Give the places up; a second call does nothing."""
        for file in (self._writer, self._learner, *self._known.values()):
            if file is not None:
                file.close()
        self._known = {}
        self._writer = self._learner = None


def _read(file: File) -> int:
    """A count that its owner may be writing."""
    for _ in range(1000):
        count, check = COUNTED.unpack(file.pread(COUNTED.size, 0))
        if count ^ check == MASK:
            return int(count)
        if not count and not check:
            break
    return 0


def _forget_in_child() -> None:
    for limit in list(_bound):
        limit.close()


os.register_at_fork(after_in_child=_forget_in_child)
