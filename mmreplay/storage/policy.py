"""How rows are read: through a mapping or not, and what the system is told ahead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mmreplay.errors import SchemaError, shown
from mmreplay.mounts import NETWORK, file_system

ReadMode = Literal["auto", "mmap", "pread"]
Advise = Literal["auto", "always", "never", "kernel"]


@dataclass(frozen=True, slots=True)
class ReadPolicy:
    """What a user says of reading.

    Attributes:
        read_mode: ``"mmap"`` copies rows out of a mapping; ``"pread"`` reads them,
            which a network file system answers with what is there now and with an
            error where a mapping would kill the process; ``"auto"`` is pread on those
            and mmap elsewhere.
        advise: ``"auto"`` asks the disk for a batch's rows at once where a sample of
            their pages is missing; ``"always"`` without looking; ``"never"`` not at
            all; ``"kernel"`` neither, and leaves the kernel its own read-ahead of 128
            KiB around each row, which scans like and random rows do not.
    """

    read_mode: ReadMode = "auto"
    advise: Advise = "auto"

    def __post_init__(self) -> None:
        """Check the arguments."""
        for name, kinds in (("read_mode", ReadMode), ("advise", Advise)):
            value = getattr(self, name)
            if value not in get_args(kinds):
                raise SchemaError(
                    f"{name}: got {shown(value)}, expected one of "
                    f"{list(get_args(kinds))}; "
                    "leave it out unless you measured"
                )

    def maps(self, folder: Path) -> bool:
        """Whether files of a folder are mapped."""
        if self.read_mode == "auto":
            return file_system(folder) not in NETWORK
        return self.read_mode == "mmap"
