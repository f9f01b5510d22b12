"""Which boot of the machine this is."""

from __future__ import annotations

from pathlib import Path

from mmreplay.errors import system_error


def boot_id() -> bytes:
    """Return 16 bytes that change at each boot; live slots of another are void.

    Where the system has none (not Linux), 16 zero bytes: never trusted. To take a
    passing lack of descriptors for that would cut what was published.
    """
    path = Path("/proc/sys/kernel/random/boot_id")
    try:
        text = path.read_text("ascii")
    except (FileNotFoundError, PermissionError):
        return bytes(16)
    except OSError as error:
        raise system_error("read", path, error) from error
    return bytes.fromhex(text.strip().replace("-", ""))
