"""pytorchrl's storages on disk; see docs/migrating/pytorchrl.md.

pytorchrl does not have to be installed.
"""

from typing import TYPE_CHECKING

from mmreplay.adapters.common.lazy import names_on_use

if TYPE_CHECKING:
    from mmreplay.adapters.pytorchrl.storages import EREBuffer as EREBuffer
    from mmreplay.adapters.pytorchrl.storages import HERBuffer as HERBuffer
    from mmreplay.adapters.pytorchrl.storages import MBReplayBuffer as MBReplayBuffer
    from mmreplay.adapters.pytorchrl.storages import NStepReplayBuffer as NStepReplayBuffer
    from mmreplay.adapters.pytorchrl.storages import PERBuffer as PERBuffer
    from mmreplay.adapters.pytorchrl.storages import ReplayBuffer as ReplayBuffer
    from mmreplay.adapters.pytorchrl.storages import unchanged as unchanged

__all__ = [
    "EREBuffer",
    "HERBuffer",
    "MBReplayBuffer",
    "NStepReplayBuffer",
    "PERBuffer",
    "ReplayBuffer",
    "unchanged",
]

__getattr__ = names_on_use(__name__, dict.fromkeys(__all__, "pytorchrl.storages"))
