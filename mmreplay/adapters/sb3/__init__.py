"""Stable-Baselines3's replay buffers on disk; give one as ``replay_buffer_class=``.

``replay_buffer_kwargs=dict(path="runs/pong")`` sets the folder. docs/migrating/sb3.md
lists the differences from the buffers of Stable-Baselines3, which has to be installed.
"""

from typing import TYPE_CHECKING

from mmreplay.adapters.common.lazy import names_on_use

if TYPE_CHECKING:
    from mmreplay.adapters.sb3.replay_buffer import DictReplayBuffer as DictReplayBuffer
    from mmreplay.adapters.sb3.replay_buffer import DictSamples as DictSamples
    from mmreplay.adapters.sb3.replay_buffer import HerReplayBuffer as HerReplayBuffer
    from mmreplay.adapters.sb3.replay_buffer import HerSamples as HerSamples
    from mmreplay.adapters.sb3.replay_buffer import ReplayBuffer as ReplayBuffer
    from mmreplay.adapters.sb3.replay_buffer import Samples as Samples

__all__ = [
    "DictReplayBuffer",
    "DictSamples",
    "HerReplayBuffer",
    "HerSamples",
    "ReplayBuffer",
    "Samples",
]

__getattr__ = names_on_use(__name__, dict.fromkeys(__all__, "sb3.replay_buffer"))
