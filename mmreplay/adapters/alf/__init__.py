"""alf's buffers, over a ring on disk: change the import and give a path.

See docs/migrating/alf.md. Needs torch, but not alf: a spec is any object with a shape
and a dtype.
"""

from typing import TYPE_CHECKING

from mmreplay.adapters.common.lazy import names_on_use

if TYPE_CHECKING:
    from mmreplay.adapters.alf.installing import install as install
    from mmreplay.adapters.alf.replay_buffer import BatchInfo as BatchInfo
    from mmreplay.adapters.alf.replay_buffer import ReplayBuffer as ReplayBuffer
    from mmreplay.adapters.alf.ring import DataBuffer as DataBuffer
    from mmreplay.adapters.alf.ring import RingBuffer as RingBuffer
    from mmreplay.adapters.alf.trees import MaxSegmentTree as MaxSegmentTree
    from mmreplay.adapters.alf.trees import MinSegmentTree as MinSegmentTree
    from mmreplay.adapters.alf.trees import SegmentTree as SegmentTree
    from mmreplay.adapters.alf.trees import SumSegmentTree as SumSegmentTree

__all__ = [
    "BatchInfo",
    "DataBuffer",
    "MaxSegmentTree",
    "MinSegmentTree",
    "ReplayBuffer",
    "RingBuffer",
    "SegmentTree",
    "SumSegmentTree",
    "install",
]

__getattr__ = names_on_use(
    __name__,
    {
        "BatchInfo": "alf.replay_buffer",
        "DataBuffer": "alf.ring",
        "MaxSegmentTree": "alf.trees",
        "MinSegmentTree": "alf.trees",
        "ReplayBuffer": "alf.replay_buffer",
        "RingBuffer": "alf.ring",
        "SegmentTree": "alf.trees",
        "SumSegmentTree": "alf.trees",
        "install": "alf.installing",
    },
)
