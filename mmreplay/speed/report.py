"""What was measured of a buffer."""

from __future__ import annotations

from dataclasses import dataclass

from mmreplay.storage.residency import Memory

LARGER = 16
"""Times as many steps in the batches that are tried beside those asked for."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast batches were gathered.

    Attributes:
        rows_per_s: Steps a second.
        mb_per_s: Megabytes (10**6) of stored rows a second.
    """

    rows_per_s: float
    mb_per_s: float


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """What was measured.

    Attributes:
        batch_size: Steps a batch.
        warm: Batches whose rows are in memory.
        larger: The same, of 16 times as many steps.
        cold: Batches of which nothing is in memory, the disk being asked for all rows
            at once; None where `not_cold` says why.
        unasked: The same, each missing row being waited for by itself.
        not_cold: Why no batch was measured cold; empty where some were.
        disk_mb_per_s: The disk, files of which nothing is in memory being read from
            beginning to end; None for small buffers and where pages stay.
        memory: What of the files was in memory before anything was dropped or drawn,
            shards included.
        nbytes: Bytes of the files that were written; reserved space is none.
        machine_nbytes: Memory of the machine, or of the group that this process is in;
            0 if unknown.
        file_system: What the files are on.
        advice: What would be faster, a sentence each.
    """

    batch_size: int
    warm: Rate
    larger: Rate
    cold: Rate | None
    unasked: Rate | None
    not_cold: str
    disk_mb_per_s: float | None
    memory: Memory
    nbytes: int
    machine_nbytes: int
    file_system: str
    advice: tuple[str, ...]

    @property
    def larger_size(self) -> int:
        """Steps of a larger batch."""
        return LARGER * self.batch_size
