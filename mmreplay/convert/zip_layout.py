"""Zip files, laid out as soon as the sizes of their members are known.

Local headers are whole without data descriptors; only checksums wait for the data.
Stored members begin at multiples of 64 bytes, so that arrays in them can be mapped and
handed to anything.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

ALIGNMENT = 64
STORED, DEFLATED = 0, 8

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF

_UTF8 = 1 << 11
# 1980-01-01, the first day that zip files know: equal data gives equal files.
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


class Layout:
    """Where the members of a zip lie, in the order they were added."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._end = 0

    def add(self, name: str, nbytes: int, packed: int | None = None) -> Member:
        """Place one more member behind the others; deflated where packed is given."""
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
        """Bytes of the whole file."""
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
                b"PK\6\6", END64.size - 12, 45, 45, 0, 0, count, count,
                len(entries), start,
            )  # fmt: skip
            tail += LOCATOR.pack(b"PK\6\7", 0, start + len(entries), 1)
        tail += END.pack(
            b"PK\5\6", 0, 0, min(count, FULL16), min(count, FULL16),
            min(len(entries), FULL32), min(start, FULL32), 0,
        )  # fmt: skip
        return entries + tail


def _local(member: Member, crc: int) -> bytes:
    name, size, packed = member.name.encode(), member.nbytes, member.packed
    large = max(size, packed) >= FULL32
    extra = struct.pack("<2H2Q", 1, 16, size, packed) if large else b""
    pad = member.offset - member.header - LOCAL.size - len(name) - len(extra)
    if pad:
        extra += struct.pack("<2H", _PADDING_ID, pad - 4) + bytes(pad - 4)
    told = (FULL32, FULL32) if large else (packed, size)
    return (
        LOCAL.pack(
            b"PK\3\4", 45 if large else 20, _UTF8, member.method, 0, _DATE, crc,
            *told, len(name), len(extra),
        )
        + name
        + extra
    )  # fmt: skip


def _central(member: Member, crc: int) -> bytes:
    name, size, packed = member.name.encode(), member.nbytes, member.packed
    large, far = max(size, packed) >= FULL32, member.header >= FULL32
    wide = ([size, packed] if large else []) + ([member.header] if far else [])
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    told = (FULL32, FULL32) if large else (packed, size)
    version = 45 if wide else 20
    return (
        CENTRAL.pack(
            b"PK\1\2", version, version, _UTF8, member.method, 0, _DATE, crc, *told,
            len(name), len(extra), 0, 0, 0, 0, FULL32 if far else member.header,
        )
        + name
        + extra
    )  # fmt: skip
