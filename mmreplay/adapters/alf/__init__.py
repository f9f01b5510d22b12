"""alf's buffers, over a ring on disk: change the import and give a path.

See docs/migrating/alf.md. Needs torch and nothing of alf: specs are whatever has a
shape and a dtype.
"""

from mmreplay.adapters.alf.replay import BatchInfo, ReplayBuffer
from mmreplay.adapters.alf.ring import DataBuffer, RingBuffer
from mmreplay.adapters.alf.trees import (
    MaxSegmentTree,
    MinSegmentTree,
    SegmentTree,
    SumSegmentTree,
)

__all__ = [
    "BatchInfo", "DataBuffer", "MaxSegmentTree", "MinSegmentTree", "ReplayBuffer",
    "RingBuffer", "SegmentTree", "SumSegmentTree",
]  # fmt: skip
