"""Memory of the machine, or of the group of processes that this one is in."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""Files with what a group may take and what it has taken, of both kinds of groups."""


def whole_nbytes() -> int:
    """Memory that there is for this process and all beside it; 0 if unknown."""
    return min([_told("MemTotal"), *(limit for limit, _ in _groups())])


def available_nbytes() -> int:
    """Memory that this process may still take, page cache included; 0 if unknown."""
    left = [max(0, limit - used) for limit, used in _groups()]
    return min([_told("MemAvailable"), *left])


def _told(name: str) -> int:
    """Bytes that the machine tells under a name; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0


def _groups() -> list[tuple[int, int]]:
    """Limit and bytes taken of each group that has a limit."""
    found = []
    for limit, used in LIMITS:
        # What a group may take is "max" without a limit.
        with suppress(OSError, ValueError):
            most = int(Path(limit).read_text("ascii"))
            found.append((most, int(Path(used).read_text("ascii"))))
    return found
