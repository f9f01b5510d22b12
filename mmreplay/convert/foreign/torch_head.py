"""What a torch file names, without torch and without running anything."""

from __future__ import annotations

from pathlib import Path

from mmreplay.convert import zips
from mmreplay.convert.description import KEY
from mmreplay.convert.zip_layout import STORED
from mmreplay.errors import FormatError
from mmreplay.files import File

MAX_NBYTES = 16 << 20


def names(path: Path, *needed: bytes) -> bool:
    """Whether a torch file that mmreplay did not write names all of these strings."""
    try:
        file = File.open(path, None)
    except FormatError:
        return False
    try:
        entries = zips.parse(file)
        for name, entry in entries.items():
            small = entry.method == STORED and entry.nbytes <= MAX_NBYTES
            if name.endswith("/data.pkl") and small:
                data = file.pread(entry.nbytes, entry.offset)
                return KEY.encode() not in data and all(each in data for each in needed)
    except FormatError:
        return False
    finally:
        file.close()
    return False
