"""Files and folders as a power cut sees them: what is durable, and what is owed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
# Devices tear at sectors; some caches and buses at less; file systems at pages.
SECTORS = (16, 512, 512, 4096)
PAGE = 4096


@dataclass(slots=True, eq=False)
class FileNode:
    """One file: what is durable, and what was done to it since.

    Attributes:
        durable: uint8 ``[N]``, the content at the last datasync.
        ops: ``(offset, data)`` of each write, ``(nbytes, None)`` of each new size.
    """

    durable: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))
    ops: list[tuple[int, bytes | None]] = field(default_factory=list)

    def settle(self) -> None:
        """Make everything durable."""
        size, content = self._unrolled()
        for offset, data in self.ops:
            if data is None:
                # A file that shrinks and grows again reads as zeros there.
                content[offset:] = 0
            else:
                stop = offset + len(data)
                content[offset:stop] = np.frombuffer(data, np.uint8)
        self.durable = content[:size]
        self.ops.clear()

    def _unrolled(self) -> tuple[int, Bytes]:
        """The final size, and the durable bytes in room for the largest size."""
        size = largest = len(self.durable)
        for offset, data in self.ops:
            size = offset if data is None else max(size, offset + len(data))
            largest = max(largest, size)
        room = np.zeros(-(-largest // PAGE) * PAGE, np.uint8)
        room[: len(self.durable)] = self.durable
        return size, room

    def after_power_cut(self, rng: np.random.Generator) -> Bytes:
        """One content that a power cut could leave: uint8 ``[N]``.

        Each sector holds its durable bytes, or those after any of the writes that
        touched it, whatever the other sectors hold.
        """
        style = str(rng.choice(["none", "all", "any", "any", "any", "last", "page"]))
        if style == "none" or not self.ops:
            return self.durable.copy()
        size, image = self._unrolled()
        sector = PAGE if style == "page" else int(rng.choice(SECTORS))
        chance = {"all": 1.0, "any": float(rng.choice([0.1, 0.5, 0.9]))}.get(style, 0.5)
        # A sector's newest bytes left the cache or never did, or each had its luck.
        fate = None
        if style in ("last", "page"):
            fate = rng.random(len(image) // sector) < chance
        self._tear(image, sector, lambda at: _luck(at, fate, chance, rng))
        return image[: self._size_after_power_cut(size, style, rng)]

    def _tear(self, image: Bytes, sector: int, luck: Callable[[slice], NDArray[np.bool_]]) -> None:
        now = image.copy()
        old, new = image.reshape(-1, sector), now.reshape(-1, sector)
        for offset, data in self.ops:
            if data is None:
                image[offset:] = 0
                now[offset:] = 0
                continue
            stop = offset + len(data)
            now[offset:stop] = np.frombuffer(data, np.uint8)
            touched = slice(offset // sector, -(-stop // sector))
            kept = luck(touched)
            old[touched][kept] = new[touched][kept]

    def _size_after_power_cut(self, size: int, style: str, rng: np.random.Generator) -> int:
        """The size is metadata of its own: any that the file had since its sync."""
        sizes = [len(self.durable), size]
        sizes += [offset for offset, data in self.ops if data is None]
        return size if style == "all" else int(rng.choice(sizes))


@dataclass(slots=True, eq=False)
class FolderNode:
    """One folder: its entries now, the durable ones, and the changes since."""

    live: dict[str, FileNode | FolderNode] = field(default_factory=dict)
    durable: dict[str, FileNode | FolderNode] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)


Node = FileNode | FolderNode


@dataclass(slots=True, eq=False)
class Change:
    """Entries that change in one step; a rename is two of them, together."""

    entries: list[tuple[FolderNode, str, Node | None]]

    def apply(self, folder: FolderNode, entries: dict[str, Node]) -> None:
        """Change the entries of one folder."""
        for at, name, node in self.entries:
            if at is not folder:
                continue
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node

    def settle(self) -> None:
        """Make it durable, and first what was done to its entries before it.

        It may be of two folders, of which one is synced: what is older in the other
        would come after it, and undo it.
        """
        for at, name, _ in self.entries:
            for other in at.changes[: at.changes.index(self)]:
                if other in at.changes and other.is_of(at, name):
                    other.settle()
        for folder in {id(at): at for at, _, _ in self.entries}.values():
            self.apply(folder, folder.durable)
            folder.changes.remove(self)

    def is_of(self, folder: FolderNode, name: str) -> bool:
        """Whether it changes an entry."""
        return any(at is folder and own == name for at, own, _ in self.entries)


def _luck(
    at: slice, fate: NDArray[np.bool_] | None, chance: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Which of a write's sectors reached the device: bool ``[sectors]``."""
    return rng.random(at.stop - at.start) < chance if fate is None else fate[at]


def scanned(path: Path) -> FolderNode:
    """The folder as it is on the disk, all of it durable."""
    folder = FolderNode()
    for child in sorted(path.iterdir()):
        node: Node
        if child.is_dir():
            node = scanned(child)
        else:
            node = FileNode(np.frombuffer(child.read_bytes(), np.uint8))
        folder.live[child.name] = folder.durable[child.name] = node
    return folder
