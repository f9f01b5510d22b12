"""Memory so short that pages are missing when rows are written, and so small pages.

Few rows fill a page of 32 bytes, so that small rings clear pages as large ones do
(`mmreplay.storage.edges`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from mmreplay.storage import edges
from mmreplay.storage.inlet import Inlet
from mmreplay.storage.pages import Pages

PAGE_NBYTES = 32

_there = Inlet._there


def _lacks(self: Pages, offset: int) -> bool:
    """In one stretch of four all pages are there."""
    return offset // edges.STRETCH_NBYTES % 4 > 0


def _there_second(self: Inlet, first: int, nbytes: int) -> bool:
    """Whether pages are there: not at the first look, as if each were missing once."""
    seen: set[int] = self.__dict__.setdefault("seen", set())
    if first in seen:
        return _there(self, first, nbytes)
    seen.add(first)
    return False


SCARCE = (
    (edges, "PAGE", PAGE_NBYTES),
    (edges, "STRETCH_NBYTES", 4 * PAGE_NBYTES),
    (Pages, "lacks", _lacks),
    (Inlet, "_there", _there_second),
)


@contextmanager
def scarce() -> Iterator[None]:
    """Have it so for a while."""
    with ExitStack() as stack:
        for owner, name, new in SCARCE:
            stack.enter_context(mock.patch.object(owner, name, new))
        yield
