"""Memory of the machine or control group, and the memory that a buffer's files take."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from mmreplay.arguments import format_size
from mmreplay.disk.files import File, file_system
from mmreplay.errors import CorruptError, system_failure

GROUPS = Path("/sys/fs/cgroup")
MEMBER = Path("/proc/self/cgroup")


def whole_nbytes() -> int:
    """Memory that there is for this process and all beside it; 0 if unknown."""
    return min([_meminfo("MemTotal"), *(limit for limit, _ in _groups())])


def available_nbytes() -> int:
    """Memory that this process may still take, page cache included; 0 if unknown."""
    left = [max(0, limit - used) for limit, used in _groups()]
    return min([_meminfo("MemAvailable"), *left])


def _meminfo(name: str) -> int:
    """Bytes that /proc/meminfo has under a name; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0


def _groups() -> list[tuple[int, int]]:
    """Limit and bytes taken of each group above this process that has a limit."""
    groups = []
    for folder, limit, used in _group_files():
        # What a group may take is "max" without a limit.
        with suppress(OSError, ValueError):
            limit_nbytes = int((folder / limit).read_text("ascii"))
            groups.append((limit_nbytes, int((folder / used).read_text("ascii"))))
    return groups


def _group_files() -> Iterator[tuple[Path, str, str]]:
    """Folders of the groups that this process is in, with the names of their files."""
    first = (GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
    second = (GROUPS, "memory.max", "memory.current")
    paths = {first[0]: PurePosixPath("/"), second[0]: PurePosixPath("/")}
    with suppress(OSError, ValueError):
        for line in MEMBER.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if not path.startswith("/") or ".." in path:
                continue  # of a group that is not seen from here
            if "memory" in controllers.split(","):
                paths[first[0]] = PurePosixPath(path)
            elif number == "0":
                paths[second[0]] = PurePosixPath(path)
    for root, limit, used in (first, second):
        # A container sees its own group as the root, and no folder of that path.
        for group in (paths[root], *paths[root].parents):
            yield root / group.relative_to("/"), limit, used


CACHESTAT = 451
"""The system call of Linux 6.5, the same number on every machine."""
STACKED = {"overlay"}
"""File systems without it: the pages are those of the file below."""
MINCORE_NBYTES = 1 << 30
MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ .{4} [0-9a-f]+ \S+ \d+ +(\S.*)")
VALUE = re.compile(r"(\w+): +(\d+) kB")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Memory that a buffer and its process take, in bytes.

    Attributes:
        mapped: Address space of the buffer's files; costs nothing.
        shared: Of it, pages that this process has looked at and that are in memory:
            counted in its RSS, and the kernel's to take back at any time.
        private: What the process has of its own, all of it, buffers or not.
        page_cache: Pages of the buffer's files in memory, of all processes;
            None where this user may not know.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> buffer.memory().mapped > 0
        True
    """

    mapped: int
    shared: int
    private: int
    page_cache: int | None

    def __str__(self) -> str:
        """Say it in one line."""
        cache = self.page_cache
        cached = "unknown" if cache is None else format_size(cache)
        return (
            f"{format_size(self.private)} private to the process, "
            f"{format_size(self.shared)} shared of {format_size(self.mapped)} mapped, "
            f"page cache {cached}"
        )


def measure(paths: Sequence[Path]) -> MemoryUsage:
    """Look up what files, and this process, have in memory.

    Costs a look at every mapping of the process, an opening of every file and, before
    Linux 6.5, a look at every page of them: some 10 ns each.

    Args:
        paths: The files; those that are gone count for nothing.
    """
    mapped, shared = _mapped({os.path.realpath(path) for path in paths})
    cached = [cached_nbytes(file, 0, file.nbytes) for file in opened(paths)]
    known = [nbytes for nbytes in cached if nbytes is not None]
    total = sum(known) if len(known) == len(cached) else None
    return MemoryUsage(mapped, shared, _private(), total)


def opened(paths: Iterable[Path]) -> Iterator[File]:
    """Open files one after the other; those that a writer removed are left out."""
    for path in paths:
        try:
            file = File.open(path, None)
        except CorruptError:
            continue
        try:
            yield file
        finally:
            file.close()


def _mapped(paths: set[str]) -> tuple[int, int]:
    """Bytes mapped of files, and those of them that are in memory."""
    sizes = {"Size": 0, "Rss": 0}
    ours = False
    for line in _proc_self("smaps").splitlines():
        value = VALUE.match(line)
        if value is None:
            mapping = MAPPING.match(line)
            ours = mapping is not None and mapping[1] in paths
        elif ours and value[1] in sizes:
            sizes[value[1]] += int(value[2]) * 1024
    return sizes["Size"], sizes["Rss"]


def _private() -> int:
    """Bytes that no file backs."""
    match = re.search(r"RssAnon:\s+(\d+) kB", _proc_self("status"))
    return 0 if match is None else int(match[1]) * 1024


def _proc_self(name: str) -> str:
    """What the system says of this process."""
    path = Path("/proc/self") / name
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise system_failure("read", path, error) from error


def cached_nbytes(file: File, first: int, stop: int) -> int | None:
    """Bytes ``[first, stop)`` of a file that are in the page cache.

    Args:
        file: Whose.
        first: A multiple of the page's size.
        stop: At most the file's size.

    Returns:
        None where this user may not know.
    """
    answer = (ctypes.c_uint64 * 5)()
    asked = (ctypes.c_uint64 * 2)(first, stop - first)
    if (
        stop > first
        and file_system(file.path) not in STACKED
        and _libc.syscall(CACHESTAT, file.fd, asked, answer, 0) == 0
    ):
        return min(int(answer[0]) * mmap.PAGESIZE, stop - first)
    status = os.fstat(file.fd)
    if status.st_uid != os.geteuid() and not os.access(file.path, os.W_OK):
        # mincore would say that all of it is there.
        return None
    return _looked_at(file, first, stop)


def _looked_at(file: File, first: int, stop: int) -> int:
    """The same, by a look at every page."""
    if stop == first:
        return 0
    mapping = file.map_readonly()
    every = np.frombuffer(mapping, np.uint8)
    count = 0
    for start in range(first, stop, MINCORE_NBYTES):
        nbytes = min(MINCORE_NBYTES, stop - start)
        pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
        where = ctypes.c_void_p(every.ctypes.data + start)
        into = ctypes.c_void_p(pages.ctypes.data)
        if _libc.mincore(where, ctypes.c_size_t(nbytes), into) == 0:
            count += int((pages & 1).sum())
    del every
    mapping.close()
    return min(count * mmap.PAGESIZE, stop - first)
