"""What a process and a folder use, as the system says."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GROWTH_NBYTES = 2 << 20
"""Memory that a process may take more of in a long run and still be called constant."""
OWN = ("RssAnon:", "RssShmem:", "VmSwap:")


@dataclass(frozen=True, slots=True)
class Usage:
    """What is used at one moment.

    Attributes:
        nbytes: Memory of its own, that of mapped files left out; or of a folder's disk.
        descriptors: Open descriptors.
        threads: Threads.
    """

    nbytes: int
    descriptors: int
    threads: int


def usage(pid: int) -> Usage:
    """What a process uses now."""
    kib = threads = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(OWN):
            kib += int(line.split()[1])
        if line.startswith("Threads:"):
            threads = int(line.split()[1])
    return Usage(1024 * kib, len(os.listdir(f"/proc/{pid}/fd")), threads)


def disk_nbytes(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk."""
    total = 0
    for path in folder.rglob("*"):
        # A writer replaces files while we look.
        with suppress(FileNotFoundError):
            total += 512 * path.stat().st_blocks
    return total
