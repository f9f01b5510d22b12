"""The description of a csv file, in a JSON file beside it.

The two are renamed into place one after the other, and a run may be killed in between.
The sidecar therefore comes first, says which bytes it is of by their number and CRC32C,
and keeps what stood there before it until the csv file has followed.
"""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from mmreplay import files
from mmreplay.convert.description import MAGIC, MAX_NBYTES, Description
from mmreplay.errors import CorruptError, FormatError, ReplayError
from mmreplay.files import File
from mmreplay.format import strict_json
from mmreplay.sums import crc32c

ENDING = ".mmreplay.json"
MAX_SIDECAR_NBYTES = 5 * MAX_NBYTES
OF, BEFORE = "csv", "before"
NONE = ""
"""What stands for no sidecar before this one."""
READ_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What a sidecar says.

    Attributes:
        description: Of the rows.
        nbytes: Of the csv file.
        crc: CRC32C of its bytes.
    """

    description: Description
    nbytes: int
    crc: int

    def to_json(self, before: str | None = None) -> bytes:
        """As text, with the sidecar that it replaces, if any."""
        described = self.description.to_bytes()
        value = json.loads(described)
        value[OF] = {
            "nbytes": self.nbytes,
            "crc32c": f"{self.crc:08x}",
            "description_crc32c": f"{crc32c(memoryview(described)):08x}",
        }
        if before is not None:
            value[BEFORE] = before
        return json.dumps(value, separators=(",", ":")).encode()

    def fits(self, file: File) -> bool:
        """Whether a csv file has its bytes; all of them are read."""
        return file.nbytes == self.nbytes and checksum(file) == self.crc


def beside(path: Path) -> Path:
    """Where the sidecar of a csv file lies."""
    return path.with_name(path.name + ENDING)


def checksum(file: File) -> int:
    """CRC32C of a whole file."""
    crc = 0
    for first in range(0, file.nbytes, READ_NBYTES):
        data = file.pread(min(READ_NBYTES, file.nbytes - first), first)
        crc = crc32c(memoryview(data), crc)
    return crc


def find(file: File) -> Sidecar | None:
    """The sidecar of a csv file, or None where it has none.

    Raises:
        FormatError: There is one that mmreplay did not write.
        CorruptError: It is of other bytes.
    """
    path = beside(file.path)
    if not os.path.lexists(path):
        return None
    value = strict_json.parse(files.read_bytes(path, MAX_SIDECAR_NBYTES), str(path))
    before = value.pop(BEFORE, None)
    found = _parse(value, path)
    if before is None:
        if found.nbytes != file.nbytes:
            raise differs(file, f"{file.nbytes} bytes", f"{found.nbytes}")
        return found
    # A run was killed between two renames: whichever the csv file fits is its own.
    if found.fits(file):
        return found
    if before == NONE:
        return None
    older = strict_json.parse(str(before).encode("utf-8", "replace"), str(path))
    older.pop(BEFORE, None)
    found = _parse(older, path)
    if not found.fits(file):
        raise differs(file, f"{file.nbytes} bytes", "those of one of its two entries")
    return found


def refuse_foreign(target: Path, overwrite: bool) -> None:
    """Refuse to write over what stands in the sidecar's place, and is none of ours.

    Args:
        target: The csv file that is to be written.
        overwrite: The user lets go of what is there.

    Raises:
        FormatError: Something does.
    """
    if not overwrite and os.path.lexists(beside(target)) and not _ours(target):
        raise FormatError(
            f"{beside(target)} is no sidecar that mmreplay wrote, expected one, or "
            f"nothing, beside {target.name}; move it away, or pass overwrite=True "
            "(--overwrite) to replace it"
        )


def remove_stale(target: Path) -> None:
    """Remove a sidecar of ours from beside a csv file that has none any more."""
    if os.path.lexists(beside(target)) and _ours(target):
        files.remove_tree(beside(target))


def _ours(target: Path) -> bool:
    """Whether what stands in a sidecar's place is one, be it damaged."""
    path = beside(target)
    try:
        value = strict_json.parse(files.read_bytes(path, MAX_SIDECAR_NBYTES), str(path))
    except ReplayError:
        return False
    return value.get("format") == MAGIC and OF in value


def differs(file: File, got: str, expected: str) -> CorruptError:
    """The error of a csv file that is not the one its sidecar is of."""
    return CorruptError(
        f"{file.path} has {got}, expected {expected} as {beside(file.path).name} says; "
        "it was changed, cut or damaged since: restore it, or read it without its "
        "description by sidecar=False"
    )


def _parse(value: strict_json.Json, path: Path) -> Sidecar:
    told = value.pop(OF, None)
    described = json.dumps(value, separators=(",", ":")).encode()
    try:
        nbytes, crc = told["nbytes"], int(told["crc32c"], 16)
        expected = int(told["description_crc32c"], 16)
    except (TypeError, KeyError, ValueError):
        nbytes, crc, expected = None, 0, 0
    if type(nbytes) is not int:
        raise FormatError(
            f"{path} does not say which csv file it is of, expected its size and "
            "checksums; move it away to read the file without its description"
        )
    found = Sidecar(Description.from_bytes(described, str(path)), nbytes, crc)
    got = crc32c(memoryview(found.description.to_bytes()))
    if got != expected:
        raise CorruptError(
            f"{path} describes with checksum {got:08x}, expected {expected:08x}; it "
            "was edited or damaged: restore it, or pass sidecar=False"
        )
    return found


class Publication:
    """Puts a sidecar in place before its csv file, and tidies up after it."""

    def __init__(self, target: Path) -> None:
        self._path = beside(target)
        self._target = target
        self._older: bytes | None = None
        self._open = False

    def announce(self, sidecar: Sidecar) -> None:
        """Write the sidecar of the file that is about to appear."""
        self._older = self._read()
        before = self._before()
        self._open = True
        files.replace_bytes(self._path, sidecar.to_json(before))
        self._sidecar = sidecar if before is not None else None

    def _before(self) -> str | None:
        """What describes the csv file that is about to be replaced, if one is."""
        if not os.path.lexists(self._target):
            return None
        try:
            with closing(File.open(self._target, None)) as file:
                found = find(file)
        except FormatError:
            # The two disagree already, and go on doing so until the new file is there.
            return None
        return NONE if found is None else found.to_json().decode()

    def _read(self) -> bytes | None:
        if not os.path.lexists(self._path):
            return None
        return files.read_bytes(self._path, MAX_SIDECAR_NBYTES // 2)

    def settle(self) -> None:
        """The file has appeared: forget what stood there before."""
        self._open = False
        if self._sidecar is not None:
            files.replace_bytes(self._path, self._sidecar.to_json())

    def take_back(self) -> None:
        """The file will not appear: put back what stood there before."""
        if not self._open:
            return
        self._open = False
        files.remove_tree(self._path.with_name(f"tmp-{self._path.name}"))
        if self._older is None:
            files.remove_tree(self._path)
        else:
            files.replace_bytes(self._path, self._older)
