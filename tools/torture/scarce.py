"""Memory so short that pages are missing when rows are written, and so small pages.

Few rows fill a page of 32 bytes, so that small rings clear pages as large ones do
(`mmreplay.storage.write_path`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from mmreplay.storage import write_path
from mmreplay.storage.read_ahead import Pages
from mmreplay.storage.write_path import MappedWriter

PAGE_NBYTES = 32

_in_memory = MappedWriter._in_memory


def _lacks(self: Pages, offset: int) -> bool:
    """In one stretch of four all pages are there."""
    return offset // write_path.LOOK_NBYTES % 4 > 0


def _in_memory_second(self: MappedWriter, first: int, nbytes: int) -> bool:
    """Whether pages are there: not at the first look, as if each were missing once."""
    seen: set[int] = self.__dict__.setdefault("seen", set())
    if first in seen:
        return _in_memory(self, first, nbytes)
    seen.add(first)
    return False


SCARCE = (
    (write_path, "PAGE", PAGE_NBYTES),
    (write_path, "LOOK_NBYTES", 4 * PAGE_NBYTES),
    (Pages, "lacks", _lacks),
    (MappedWriter, "_in_memory", _in_memory_second),
)


@contextmanager
def scarce() -> Iterator[None]:
    """Have it so for a while."""
    with ExitStack() as stack:
        for owner, name, new in SCARCE:
            stack.enter_context(mock.patch.object(owner, name, new))
        yield
