"""DQN Replay's checkpoints: one gzipped npy array a field, single frames each.

Dopamine writes ``$store$_observation_ckpt.<n>.gz`` and the like, rings whose next slot
``add_count_ckpt.<n>.gz`` tells. Episodes end at terminal rows, and begin with rows of
zeros, which stand for the frames before the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from mmreplay.convert.arrays import refuse_wide
from mmreplay.convert.base import BLOCK_NBYTES, Notes
from mmreplay.convert.ends import Bools
from mmreplay.convert.foreign.columns import Later, Rows, nbytes_of, single
from mmreplay.convert.foreign.fields import Flags, ends_of, make_schema, scalar
from mmreplay.convert.foreign.gzipped import Gzip
from mmreplay.convert.foreign.rings import Turned
from mmreplay.convert.foreign.stretches import Stretch, StretchReader
from mmreplay.errors import FormatError, SchemaError

STORED = re.compile(r"\$store\$_([\w-]+)_ckpt\.(\d+)\.gz")
COUNT = "add_count_ckpt.{}.gz"
NEEDED = ("observation", "action", "reward", "terminal")
PADDING = 3


class Checkpoints:
    """The files of a folder, those of one checkpoint open at a time.

    Attributes:
        folder: It.
        notes: What is doubted of them.
    """

    def __init__(self, folder: Path, allow_expansion: bool) -> None:
        self.folder, self.notes = folder, Notes()
        self._allow_expansion = allow_expansion
        self._open: list[Gzip] = []

    def columns(self, number: int) -> dict[str, Rows]:
        """Columns of a checkpoint, oldest row first; those of others are closed."""
        self.close()
        found: dict[str, Gzip] = {}
        for path in sorted(self.folder.iterdir()):
            match = STORED.fullmatch(path.name)
            if match and int(match[2]) == number:
                found[match[1]] = self._gzip(path)
        missing = [name for name in NEEDED if name not in found]
        if missing:
            raise FormatError(
                f"{self.folder} lacks $store$_{missing[0]}_ckpt.{number}.gz, expected "
                "an array of every field; download it again"
            )
        slots = found["terminal"].count
        for rows in found.values():
            if rows.count != slots:
                raise FormatError(
                    f"{rows.file.path} has {rows.count} rows, expected {slots} as the "
                    "terminals; the checkpoint mixes files of several runs"
                )
            refuse_wide(nbytes_of(rows), rows.file.path)
        if not single(found["terminal"].shape):
            raise FormatError(
                f"{found['terminal'].file.path} has rows of shape "
                f"{list(found['terminal'].shape)}, expected one flag each"
            )
        first, count = self._place(number, slots)
        turned: dict[str, Rows] = {
            name: Turned(rows, first, count) for name, rows in found.items()
        }
        turned["reward"] = scalar(turned["reward"])
        return turned

    def _gzip(self, path: Path) -> Gzip:
        self._open.append(Gzip(path, self._allow_expansion))
        return self._open[-1]

    def _place(self, number: int, slots: int) -> tuple[int, int]:
        """Slot of the oldest row, and rows."""
        path = self.folder / COUNT.format(number)
        if not path.exists():
            self.notes.doubt(
                f"{path.name} is not there to tell which row is the oldest: all were "
                "taken, in the file's order"
            )
            return 0, slots
        added = self._gzip(path).number()
        return (0, added) if added <= slots else (added % slots, slots)

    def close(self) -> None:
        """Give the open files back."""
        for each in self._open:
            each.close()
        self._open = []


class DqnReplayReader(StretchReader):
    """Reads checkpoints one after another as one environment."""

    def __init__(
        self, checkpoints: Checkpoints, numbers: list[int], padding: int
    ) -> None:
        self._checkpoints, self._padding = checkpoints, padding
        self._dropped = 0
        self._bounds = {n: self._find(checkpoints.columns(n)) for n in numbers}
        columns = checkpoints.columns(numbers[0])
        columns.pop("terminal")
        notes = checkpoints.notes
        schema = make_schema(columns, notes, checkpoints.folder)
        notes.note(
            f"{len(numbers)} checkpoints were read; episodes end at terminal rows, and "
            "time limits are not told from them; frames are single: stack them when "
            "they are drawn"
        )
        if self._dropped:
            notes.note(
                f"{self._dropped:,} rows were left out: frames of zeros that stand "
                "before an episode's first"
            )
        super().__init__(self._stretches_of, schema, notes, checkpoints.close)

    def _find(self, columns: Mapping[str, Rows]) -> list[tuple[int, int]]:
        """First row and stop of each episode, rows of zeros before it left out."""
        count = columns["terminal"].count
        rows = max(1, BLOCK_NBYTES // nbytes_of(columns["observation"]))
        found: list[tuple[int, int]] = []
        begin, leading = 0, 0
        for first in range(0, count, rows):
            stop = min(first + rows, count)
            over = columns["terminal"].read(first, stop).reshape(-1) != 0
            for row in _events(_zeros(columns, first, stop), over):
                place = first + row
                # A row of zeros counts where only such rows stand before it.
                if not over[row]:
                    if place == begin + leading and leading < self._padding:
                        leading += 1
                    continue
                found.append((begin + leading, place + 1))
                self._dropped += leading
                begin, leading = place + 1, 0
        if begin + leading < count:
            found.append((begin + leading, count))
        self._dropped += leading
        return found

    def _stretches_of(self) -> Iterator[Stretch]:
        for number, bounds in self._bounds.items():
            columns = self._checkpoints.columns(number)
            terminal = columns.pop("terminal")
            name = f"{self._checkpoints.folder}, checkpoint {number}"
            for first, stop in bounds:
                steps = stop - first
                kept = {p: Later(rows, first, steps) for p, rows in columns.items()}
                here = f"{name}, row {first}"
                over = Flags(
                    f"{here}: 'terminal'", Later(terminal, first, steps), steps
                )
                yield Stretch(here, steps, kept, {}, ends_of(over, None))


def _zeros(columns: Mapping[str, Rows], first: int, stop: int) -> Bools:
    """Which rows are what Dopamine puts before an episode, bool ``[N]``."""
    zero = np.ones(stop - first, bool)
    for name in ("observation", "action", "reward"):
        values = columns[name].read(first, stop)
        zero &= ~values.reshape(stop - first, -1).any(axis=1)
    return zero


def _events(zeros: Bools, over: Bools) -> list[int]:
    """Rows that are looked at one by one."""
    rows: list[int] = np.flatnonzero(zeros | over).tolist()
    return rows


def _numbers(folder: Path) -> list[int]:
    found = {
        int(match[2])
        for match in map(STORED.fullmatch, (each.name for each in folder.iterdir()))
        if match
    }
    return sorted(found)


def recognizes(path: Path) -> bool:
    """Whether a folder holds such files."""
    return path.is_dir() and bool(_numbers(path))


def open_reader(
    path: Path,
    *,
    checkpoint: int | None = None,
    padding: int = PADDING,
    allow_expansion: bool = False,
) -> DqnReplayReader:
    """Open a folder of checkpoints as a source.

    Args:
        path: The folder of ``$store$_*`` files.
        checkpoint: Read that of this number; all in order by default.
        padding: Most rows of zeros that are left out before each episode: the frame
            stack of the agent less one.
        allow_expansion: Read arrays that hold more than 1,000 times what they take.
    """
    if type(padding) is not int or padding < 0:
        raise SchemaError(
            f"padding: got {padding!r}, expected an integer of at least 0; leave it "
            f"out for {PADDING}"
        )
    numbers = _numbers(path) if path.is_dir() else []
    if checkpoint is not None and checkpoint in numbers:
        numbers = [checkpoint]
    elif checkpoint is not None or not numbers:
        raise SchemaError(
            f"checkpoint: got {checkpoint!r}, expected one of {numbers} in {path}; "
            "leave it out for all"
        )
    checkpoints = Checkpoints(path, allow_expansion)
    try:
        return DqnReplayReader(checkpoints, numbers, padding)
    except BaseException:
        checkpoints.close()
        raise
