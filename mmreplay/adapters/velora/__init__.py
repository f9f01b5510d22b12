"""velora's replay memory on disk; see docs/migrating/velora.md.

velora does not have to be installed.
"""

from typing import TYPE_CHECKING

from mmreplay.adapters.common.lazy import names_on_use

if TYPE_CHECKING:
    from mmreplay.adapters.velora.replay_buffer import BatchExperience as BatchExperience
    from mmreplay.adapters.velora.replay_buffer import BufferBase as BufferBase
    from mmreplay.adapters.velora.replay_buffer import ReplayBuffer as ReplayBuffer

__all__ = ["BatchExperience", "BufferBase", "ReplayBuffer"]

__getattr__ = names_on_use(__name__, dict.fromkeys(__all__, "velora.replay_buffer"))
