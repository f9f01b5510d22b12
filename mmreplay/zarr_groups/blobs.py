"""Named bytes below one root, to read: files of a folder, or members of a zip."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from mmreplay.disk.files import File
from mmreplay.disk.seekable import SeekableFile
from mmreplay.errors import CorruptError, FormatError, ReplayError, undone_by

MAX_CHILDREN = 100_000
MAX_MEMBERS = 4_000_000
LOCAL_HEADER = struct.Struct("<4s22xHH")


class Extent(NamedTuple):
    """Bytes of one blob.

    Attributes:
        name: Its path below the root.
        first: Of the bytes; below 0, the last so many are meant.
        nbytes: How many from there; None for all.
    """

    name: str
    first: int = 0
    nbytes: int | None = None


class Blobs(Protocol):
    """What lies below one root.

    Names are checked by the caller: segments with slashes between them, none of them
    empty, ``.`` or ``..``. Threads: any may fetch.

    Attributes:
        where: The root, as messages name it.
    """

    where: str

    def children(self, name: str) -> list[str]:
        """Names one level below a name (``""`` for the root), sorted; maybe none.

        Raises:
            FormatError: There are more than 100,000.
        """

    def fetch(self, wanted: Sequence[Extent], max_nbytes: int) -> list[bytes | None]:
        """Read extents, None for blobs that are not there.

        Args:
            wanted: What to read.
            max_nbytes: Bytes of each, at most.

        Raises:
            FormatError: One is longer.
            CorruptError: A blob ends before its extent does.
        """

    def look(self, names: Sequence[str], max_nbytes: int) -> list[bytes | None]:
        """Read complete blobs; None for those that do not exist.

        Args:
            names: At least one of them is expected.
            max_nbytes: Bytes of each, at most.

        Raises:
            FormatError: One is longer.
            FailedError: None may be read.
        """
        return self.fetch([Extent(name) for name in names], max_nbytes)

    def close(self) -> None:
        """Give everything back; a second call does nothing."""


def span_of(extent: Extent, size: int, max_nbytes: int, what: str) -> tuple[int, int]:
    """First byte and number of bytes of an extent in a blob of a known size.

    Raises:
        FormatError: They are more than asked for.
        CorruptError: The blob is shorter.
    """
    first = extent.first if extent.first >= 0 else size + extent.first
    nbytes = size - first if extent.nbytes is None else extent.nbytes
    if first < 0 or first + nbytes > size:
        raise CorruptError(
            f"{what} has {size} bytes, but needs at least "
            f"{max(-extent.first, first + nbytes)}: it was truncated. Restore it from "
            "a copy."
        )
    if nbytes > max_nbytes:
        raise FormatError(
            f"{what} has {nbytes} bytes, but its array allows at most {max_nbytes}. It "
            "is damaged or malicious: restore it from a copy."
        )
    return first, nbytes


def refuse_many(what: str, count: int) -> None:
    """Refuse a level with too many names."""
    if count > MAX_CHILDREN:
        raise FormatError(
            f"{what} has more than {MAX_CHILDREN} names. Pass the group that has the arrays."
        )


class FolderBlobs(Blobs):
    """Files of a folder; see `Blobs`. Links as files are refused."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder

    def children(self, name: str) -> list[str]:
        """See `Blobs.children`."""
        folder = self._folder / name
        listed: list[str] = []
        for path in folder.iterdir() if folder.is_dir() else ():
            listed.append(path.name)
            refuse_many(str(folder), len(listed))
        return sorted(listed)

    def fetch(self, wanted: Sequence[Extent], max_nbytes: int) -> list[bytes | None]:
        """See `Blobs.fetch`."""
        return [self._read(extent, max_nbytes) for extent in wanted]

    def _read(self, extent: Extent, max_nbytes: int) -> bytes | None:
        path = self._folder / extent.name
        if not path.exists():
            return None
        file = File.open(path, None)
        try:
            first, nbytes = span_of(extent, file.nbytes, max_nbytes, str(path))
            return file.pread(nbytes, first)
        finally:
            file.close()

    def close(self) -> None:
        """See `Blobs.close`."""


class ZipBlobs(Blobs):
    """Members of a zip file, stored or deflated; see `Blobs`."""

    def __init__(self, path: Path) -> None:
        """Read the directory.

        Raises:
            CorruptError: It is damaged.
        """
        self.where = str(path)
        self._file = File.open(path, None)
        with undone_by(self._file.close), self._directory(path) as archive:
            listed = archive.infolist()
        self._members = {member.filename: member for member in listed}
        self._below: dict[str, set[str]] = {}
        for name in self._members:
            segments = name.strip("/").split("/")
            for depth, segment in enumerate(segments):
                self._below.setdefault("/".join(segments[:depth]), set()).add(segment)

    def _directory(self, path: Path) -> zipfile.ZipFile:
        try:
            archive = zipfile.ZipFile(SeekableFile(self._file))
        except ReplayError:
            raise
        except Exception as error:
            # The library raises whatever it stumbles over.
            raise CorruptError(
                f"{path} is not a valid zip file ({error}). Restore it from a copy."
            ) from error
        if len(archive.infolist()) > MAX_MEMBERS:
            raise FormatError(
                f"{path} must have at most {MAX_MEMBERS} members. Unpack it, or store "
                "larger chunks."
            )
        return archive

    def children(self, name: str) -> list[str]:
        """See `Blobs.children`."""
        names = sorted(self._below.get(name, ()))
        refuse_many(f"{self.where}: {name!r}", len(names))
        return names

    def fetch(self, wanted: Sequence[Extent], max_nbytes: int) -> list[bytes | None]:
        """See `Blobs.fetch`."""
        return [self._read(extent, max_nbytes) for extent in wanted]

    def _read(self, extent: Extent, max_nbytes: int) -> bytes | None:
        member = self._members.get(extent.name)
        if member is None:
            return None
        what = f"{self.where}: {extent.name!r}"
        first, nbytes = span_of(extent, member.file_size, max_nbytes, what)
        offset = self._offset(member, what)
        if member.compress_type == zipfile.ZIP_STORED:
            return self._file.pread(nbytes, offset + first)
        if member.compress_type != zipfile.ZIP_DEFLATED or nbytes != member.file_size:
            raise FormatError(
                f"{what} is compressed by method {member.compress_type}, but must be "
                "stored, or deflated and read as a whole. Unpack the zip file."
            )
        return self._inflate(member, offset, max_nbytes, what)

    def _offset(self, member: zipfile.ZipInfo, what: str) -> int:
        """Where a member's bytes begin, all of them within the file."""
        start = member.header_offset
        if 0 <= start <= self._file.nbytes - LOCAL_HEADER.size:
            header = self._file.pread(LOCAL_HEADER.size, start)
            magic, name, extra = LOCAL_HEADER.unpack(header)
            offset = start + LOCAL_HEADER.size + name + extra
            if magic == b"PK\3\4" and (offset + member.compress_size <= self._file.nbytes):
                return int(offset)
        raise CorruptError(
            f"{what}: the zip file has no complete member at byte {start}. It is "
            "damaged: restore it from a copy."
        )

    def _inflate(self, member: zipfile.ZipInfo, offset: int, max_nbytes: int, what: str) -> bytes:
        size = min(member.compress_size, 2 * max_nbytes + (64 << 10))
        unpacker = zlib.decompressobj(-15)
        try:
            data = unpacker.decompress(self._file.pread(size, offset), max_nbytes + 1)
        except zlib.error as error:
            raise CorruptError(
                f"{what} cannot be inflated ({error}). Restore it from a copy."
            ) from error
        if len(data) != member.file_size:
            raise CorruptError(
                f"{what} unpacks to {len(data)} bytes, but says {member.file_size}. It "
                "is damaged: restore it from a copy."
            )
        return data

    def close(self) -> None:
        """See `Blobs.close`."""
        self._file.close()
