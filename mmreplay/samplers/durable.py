"""Up to which position a buffer's rows outlive a power cut."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import ReplayError
from mmreplay.files import File
from mmreplay.format import commit
from mmreplay.samplers.base import Home


def durable_heads(home: Home) -> NDArray[np.int64]:
    """Heads that no power cut takes back, int64 ``[E]``; 0 where they are not known.

    They never fall, so that whoever keeps something of the rows below may count on
    it in every copy of the buffer.

    Args:
        home: The buffer; its COMMIT is read anew, whoever writes it.
    """
    num_envs = home.ring.num_envs
    unknown = np.zeros(num_envs, np.int64)
    if home.folder is None:
        return unknown
    path = home.folder / f"data-{home.generation:06d}" / "COMMIT"
    nbytes = commit.NUM_SLOTS * commit.slot_nbytes(num_envs)
    try:
        file = File.open(path, nbytes)
        try:
            data = file.pread(nbytes, 0)
            # A record that was just written counts once it is on the device.
            file.sync()
        finally:
            file.close()
    except ReplayError:
        # Gone with its generation, or not readable: nothing is lost by knowing less.
        return unknown
    slots = commit.split(data, home.uuid, home.generation, num_envs)
    record = commit.newest_durable(slots)
    return unknown if record is None else record.heads
