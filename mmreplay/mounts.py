"""What kind of file system a path is on: what its locks and stores are worth."""

from __future__ import annotations

import os
from pathlib import Path

# Several hosts may write these: locks and mappings do not meet.
NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "lustre", "ceph", "glusterfs",
    "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "afs", "beegfs", "gpfs",
}  # fmt: skip
# A store goes to new blocks, for which no space can be reserved.
COPY_ON_WRITE = {"btrfs", "zfs", "bcachefs"}


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
