"""Zip files: `ZipLayout` writes them, `parse` reads them strictly.

A layout needs only the sizes of all members: local headers are complete without data
descriptors, and only checksums wait for the data. Stored members begin at multiples of
64 bytes, so that arrays in them can be mapped and passed to any library.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from mmreplay.checksums import crc32
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError

ALIGNMENT = 64
COPY_NBYTES = 1 << 20
STORED, DEFLATED = 0, 8

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF

_UTF8 = 1 << 11
# 1980-01-01, the first day that zip files can express: equal data, equal files.
_DATE = (1 << 5) | 1
_PADDING_ID = 0x4246


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a zip that is being written.

    Attributes:
        name: Its name.
        nbytes: Bytes it holds.
        header: Offset of its local header.
        offset: Offset of its data.
        packed: Bytes it takes.
        method: `STORED` or `DEFLATED`.
    """

    name: str
    nbytes: int
    header: int
    offset: int
    packed: int
    method: int = STORED


def move_bytes(file: File, source: int, target: int, nbytes: int, checksum: int = 0) -> int:
    """Move bytes towards the beginning of a file.

    Args:
        file: The file.
        source: Where they begin.
        target: Where they go, at most source.
        nbytes: How many they are.
        checksum: CRC-32 of the bytes before them in their member.

    Returns:
        The CRC-32 with them.
    """
    for first in range(0, nbytes, COPY_NBYTES):
        data = file.pread(min(COPY_NBYTES, nbytes - first), source + first)
        checksum = crc32(data, checksum)
        file.pwrite(data, target + first)
    return checksum


class ZipLayout:
    """The layout of a zip that is written, with its members in order."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._end = 0

    def add(self, name: str, nbytes: int, packed: int | None = None) -> Member:
        """Add a member after the others; deflated if packed is not None."""
        header = self._end
        bare = header + LOCAL.size + len(name.encode())
        bare += 20 if max(nbytes, packed or 0) >= FULL32 else 0
        if packed is not None:
            member = Member(name, nbytes, header, bare, packed, DEFLATED)
        else:
            pad = -bare % ALIGNMENT
            # A padding field takes four bytes itself.
            pad += ALIGNMENT if 0 < pad < 4 else 0
            member = Member(name, nbytes, header, bare + pad, nbytes)
        self.members.append(member)
        self._end = member.offset + member.packed
        return member

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._end + len(self._directory({m.name: 0 for m in self.members}))

    def around(self, sums: dict[str, int]) -> Iterator[tuple[int, bytes]]:
        """Local headers and directory, as (offset, bytes), for members' checksums."""
        for member in self.members:
            yield member.header, _local(member, sums[member.name])
        yield self._end, self._directory(sums)

    def _directory(self, sums: dict[str, int]) -> bytes:
        entries = b"".join(_central(m, sums[m.name]) for m in self.members)
        count, start = len(self.members), self._end
        tail = b""
        if count >= FULL16 or start >= FULL32 or len(entries) >= FULL32:
            tail = END64.pack(
                b"PK\6\6", END64.size - 12, 45, 45, 0, 0, count, count, len(entries), start
            )
            tail += LOCATOR.pack(b"PK\6\7", 0, start + len(entries), 1)
        tail += END.pack(
            b"PK\5\6",
            0,
            0,
            min(count, FULL16),
            min(count, FULL16),
            min(len(entries), FULL32),
            min(start, FULL32),
            0,
        )
        return entries + tail


def _local(member: Member, crc: int) -> bytes:
    name, size, packed = member.name.encode(), member.nbytes, member.packed
    large = max(size, packed) >= FULL32
    extra = struct.pack("<2H2Q", 1, 16, size, packed) if large else b""
    pad = member.offset - member.header - LOCAL.size - len(name) - len(extra)
    if pad:
        extra += struct.pack("<2H", _PADDING_ID, pad - 4) + bytes(pad - 4)
    sizes = (FULL32, FULL32) if large else (packed, size)
    return (
        LOCAL.pack(
            b"PK\3\4",
            45 if large else 20,
            _UTF8,
            member.method,
            0,
            _DATE,
            crc,
            *sizes,
            len(name),
            len(extra),
        )
        + name
        + extra
    )


def _central(member: Member, crc: int) -> bytes:
    name, size, packed = member.name.encode(), member.nbytes, member.packed
    large, far = max(size, packed) >= FULL32, member.header >= FULL32
    wide = ([size, packed] if large else []) + ([member.header] if far else [])
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    sizes = (FULL32, FULL32) if large else (packed, size)
    version = 45 if wide else 20
    return (
        CENTRAL.pack(
            b"PK\1\2",
            version,
            version,
            _UTF8,
            member.method,
            0,
            _DATE,
            crc,
            *sizes,
            len(name),
            len(extra),
            0,
            0,
            0,
            0,
            FULL32 if far else member.header,
        )
        + name
        + extra
    )


MAX_MEMBERS = 10_000
MAX_DIRECTORY_NBYTES = 16 << 20
MAX_EXPANSION = 1000

_ENCRYPTED = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One member of a zip that is read.

    Attributes:
        name: Its name.
        method: `STORED` or `DEFLATED`.
        crc: CRC-32 of its bytes.
        packed: Bytes it takes in the file.
        nbytes: Bytes it holds.
        offset: Where they begin.
    """

    name: str
    method: int
    crc: int
    packed: int
    nbytes: int
    offset: int


def parse(file: File) -> dict[str, Entry]:
    """The members of a zip by name, in file order, none outside or overlapping.

    Raises:
        FormatError: It is no zip, or one of another kind.
        CorruptError: Its parts contradict each other.
    """
    count, size, start = _find_end(file)
    if count > MAX_MEMBERS or size > MAX_DIRECTORY_NBYTES:
        raise FormatError(
            f"{file.path} must have at most {MAX_MEMBERS} members in a directory of "
            f"{MAX_DIRECTORY_NBYTES} bytes, got {count} in {size}. Join small arrays."
        )
    data = file.pread(size, start)
    found: dict[str, Entry] = {}
    at = 0
    for _ in range(count):
        entry, header, at = _entry(file, data, at, start)
        placed = _placed(file, entry, header, start)
        if placed.name in found:
            raise _corrupt(file, header, f"a second member {placed.name!r}")
        found[placed.name] = placed
    _check_apart(file, found)
    return found


def _corrupt(file: File, offset: int, problem: str) -> CorruptError:
    return CorruptError(
        f"{file.path} has {problem} at byte {offset}. The file is truncated or "
        "damaged: restore it from a copy."
    )


def _find_end(file: File) -> tuple[int, int, int]:
    """Members, bytes and offset of the central directory."""
    length = min(file.nbytes, END.size + FULL16)
    tail = file.pread(length, file.nbytes - length)
    at = tail.rfind(b"PK\5\6")
    offset = file.nbytes - length + at
    if at < 0 or at + END.size > length:
        raise _no_zip(file)
    _, disk, other, here, count, size, start, comment = END.unpack_from(tail, at)
    if offset + END.size + comment != file.nbytes:
        raise _corrupt(
            file, offset, f"a comment of {comment} bytes that does not end with the file"
        )
    split = disk or other or here != count
    if split and (disk, other) != (FULL16, FULL16):
        raise FormatError(
            f"{file.path} is one of several files of a split zip (disk {disk}). Join them."
        )
    stop = offset
    needs = count == FULL16 or FULL32 in (size, start)
    at = offset - LOCATOR.size
    # torch writes the wide directory's end whether it is needed or not.
    if needs or (at >= 0 and file.pread(4, at) == b"PK\6\7"):
        count, size, start, stop = _wide_end(file, at)
    if start + size != stop:
        raise _corrupt(
            file, offset, f"a directory of {size} bytes from byte {start} instead of up to {stop}"
        )
    return count, size, start


def _no_zip(file: File) -> CorruptError | FormatError:
    begins = file.pread(min(4, file.nbytes), 0)
    if begins in (b"PK\3\4", b"PK\5\6"):
        return CorruptError(
            f"{file.path} begins as a zip, but has no directory at its end (byte "
            f"{file.nbytes}). The file is truncated: restore it from a copy."
        )
    return FormatError(
        f"{file.path} is not a zip file (it begins with {begins!r}). Name its format "
        "with format= (--from)."
    )


def _wide_end(file: File, at: int) -> tuple[int, int, int, int]:
    """Members, bytes, offset and stop of a zip64 directory, by its locator."""
    if at < 0:
        raise _corrupt(file, 0, "no locator of a zip64 directory")
    magic, _, where, _ = LOCATOR.unpack(file.pread(LOCATOR.size, at))
    if magic != b"PK\6\7" or where + END64.size != at:
        raise _corrupt(file, at, f"{magic!r} instead of the locator of a zip64 directory")
    end = END64.unpack(file.pread(END64.size, where))
    if end[0] != b"PK\6\6" or end[6] != end[7]:
        raise _corrupt(file, where, f"{end[0]!r} instead of the end of a zip64 directory")
    return end[7], end[8], end[9], where


def _entry(file: File, data: bytes, at: int, start: int) -> tuple[Entry, int, int]:
    """Return an entry of the directory, the offset of its header, and where it ends."""
    if at + CENTRAL.size > len(data):
        raise _corrupt(file, start + at, "a directory that ends before its last member")
    (
        magic,
        _,
        _,
        flags,
        method,
        _,
        _,
        crc,
        packed,
        nbytes,
        name_size,
        extra_size,
        comment_size,
        _,
        _,
        _,
        header,
    ) = CENTRAL.unpack_from(data, at)
    name_at = at + CENTRAL.size
    extra_at = name_at + name_size
    stop = extra_at + extra_size + comment_size
    if magic != b"PK\1\2" or stop > len(data):
        raise _corrupt(file, start + at, f"{magic!r} instead of an entry of the directory")
    name = _name(file, data[name_at:extra_at], start + at)
    if flags & _ENCRYPTED or method not in (STORED, DEFLATED):
        raise FormatError(
            f"{file.path}: member {name!r} at byte {start + at} must be stored or "
            f"deflated, but is encrypted or compressed by method {method}. Compress it "
            "again with deflate."
        )
    extra = data[extra_at : extra_at + extra_size]
    sizes = _widened(file, start + at, extra, [nbytes, packed, header])
    nbytes, packed, header = sizes
    if method == STORED and nbytes != packed:
        raise _corrupt(file, start + at, f"a stored member of {nbytes} bytes in {packed} bytes")
    return Entry(name, method, crc, packed, nbytes, 0), header, stop


def _name(file: File, raw: bytes, at: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _corrupt(file, at, f"a member name {raw[:40]!r} that is not UTF-8") from None


def _widened(file: File, at: int, extra: bytes, values: list[int]) -> list[int]:
    """Sizes and offset, replaced by those of a zip64 field."""
    wide = [index for index, value in enumerate(values) if value == FULL32]
    place = 0
    while wide and place + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, place)
        body = extra[place + 4 : place + 4 + size]
        place += 4 + size
        if kind != 1:
            continue
        if len(body) < 8 * len(wide):
            raise _corrupt(file, at, f"a zip64 field of fewer than {len(wide)} numbers")
        for order, index in enumerate(wide):
            (values[index],) = struct.unpack_from("<Q", body, 8 * order)
        wide = []
    return values


def _placed(file: File, entry: Entry, header: int, start: int) -> Entry:
    """The entry with the offset of its data, by its local header."""
    if header + LOCAL.size > start:
        raise _corrupt(file, header, f"the header of member {entry.name!r} after the directory")
    magic, *_, name_size, extra_size = LOCAL.unpack(file.pread(LOCAL.size, header))
    offset = header + LOCAL.size + name_size + extra_size
    if magic != b"PK\3\4" or offset + entry.packed > start:
        raise _corrupt(
            file,
            header,
            f"{magic!r} instead of the header of member {entry.name!r} and its "
            f"{entry.packed} bytes before byte {start}",
        )
    raw = file.pread(name_size, header + LOCAL.size)
    if raw != entry.name.encode():
        raise _corrupt(file, header, f"the name {raw[:40]!r} instead of {entry.name!r}")
    return Entry(entry.name, entry.method, entry.crc, entry.packed, entry.nbytes, offset)


def _check_apart(file: File, entries: dict[str, Entry]) -> None:
    """Refuse members that share bytes: a small file could claim any size by them."""
    stop = 0
    for entry in sorted(entries.values(), key=lambda entry: entry.offset):
        if entry.offset < stop:
            raise _corrupt(file, entry.offset, f"member {entry.name!r} within another member")
        stop = entry.offset + entry.packed


def check(file: File, entry: Entry) -> None:
    """Compare a stored member with its checksum, a buffer at a time.

    Raises:
        CorruptError: It differs.
    """
    crc, done = 0, 0
    while done < entry.packed:
        size = min(1 << 20, entry.packed - done)
        crc = crc32(file.pread(size, entry.offset + done), crc)
        done += size
    if crc != entry.crc:
        raise CorruptError(
            f"{file.path}: member {entry.name!r} at byte {entry.offset} must have "
            f"checksum {entry.crc:08x}, got {crc:08x}. The file is damaged: restore it "
            "from a copy."
        )


def refuse_bomb(file: File, entry: Entry, allow_expansion: bool) -> None:
    """Refuse a member that claims to be far larger unpacked.

    Raises:
        FormatError: It does, and the user did not allow it.
    """
    if entry.nbytes > MAX_EXPANSION * max(entry.packed, 1 << 10) and (not allow_expansion):
        raise FormatError(
            f"{file.path}: member {entry.name!r} at byte {entry.offset} says that "
            f"{entry.packed} bytes hold {entry.nbytes}, more than {MAX_EXPANSION} "
            "times as many. Pass allow_expansion=True if you trust the file."
        )


class Deflated:
    """The bytes of a deflated member, unpacked as they are read."""

    def __init__(self, file: File, entry: Entry) -> None:
        self._file, self._entry = file, entry
        self._read, self._got, self._crc = 0, 0, 0
        self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        self._rest = b""

    def read_into(self, view: memoryview) -> None:
        """Fill view with the next bytes, and add them to the checksum."""
        done = 0
        while done < len(view):
            done += self._some(view[done:])
        self._crc = crc32(view, self._crc)
        self._got += len(view)

    def _some(self, view: memoryview) -> int:
        entry = self._entry
        if not self._rest and self._read < entry.packed:
            size = min(1 << 18, entry.packed - self._read)
            self._rest = self._file.pread(size, entry.offset + self._read)
            self._read += size
        try:
            data = self._inflate.decompress(self._rest, len(view))
        except zlib.error as error:
            raise self._damaged(f"data that does not unpack ({error})") from error
        spent = not self._inflate.unconsumed_tail and self._read == entry.packed
        # What follows the end of the stream is never consumed.
        if not data and (self._inflate.eof or spent):
            raise self._damaged(f"{self._got} instead of {self._entry.nbytes} bytes")
        self._rest = self._inflate.unconsumed_tail
        view[: len(data)] = data
        return len(data)

    def _damaged(self, problem: str) -> CorruptError:
        entry = self._entry
        at = entry.offset + self._read
        return _corrupt(self._file, at, f"member {entry.name!r} with {problem}")

    def finish(self) -> None:
        """Compare the checksum, if all bytes were read."""
        if self._got == self._entry.nbytes and self._crc != self._entry.crc:
            raise self._damaged(f"checksum {self._crc:08x} instead of {self._entry.crc:08x}")
