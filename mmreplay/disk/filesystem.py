"""What kind of place a path is: what locks and stores are worth there, and a link."""

from __future__ import annotations

import os
from pathlib import Path

from mmreplay.errors import FormatError

# Several hosts may write these: locks and mappings do not meet.
NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "lustre", "ceph", "glusterfs",
    "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "afs", "beegfs", "gpfs",
}  # fmt: skip
# A store goes to new blocks, for which no space can be reserved.
COPY_ON_WRITE = {"btrfs", "zfs", "bcachefs"}

# A page that can be stored into stays so, and has its space, until it is synced.
KEEPS_PAGES = {"ext4", "xfs", "tmpfs"}

# And for good: what was written once is nobody else's, and is written over in place.
KEEPS_SPACE = {"ext4", "tmpfs"}


def file_system(path: Path) -> str:
    """Return the type of the file system that holds path, ``"?"`` where unknown."""
    try:
        table = Path("/proc/self/mountinfo").read_text()
        device = os.stat(path).st_dev
    except OSError:
        return "?"
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = [
        line.split(" - ")[1].split()[0]
        for line in table.splitlines()
        if line.split()[2] == number and " - " in line
    ]
    return kinds[-1] if kinds else "?"


def refuse_link(folder: Path) -> None:
    """Refuse a folder of a buffer's own that leads out of the buffer.

    Raises:
        FormatError: It is a link, as somebody else may have made it.
    """
    if folder.is_symlink():
        raise FormatError(
            f"{folder} is a link, expected a folder: through a link, files outside "
            "the buffer would be read and written; put the folder itself there, or "
            "link to the whole buffer"
        )
