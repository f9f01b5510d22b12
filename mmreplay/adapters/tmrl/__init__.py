"""tmrl's memories on disk; see docs/migrating/tmrl.md.

tmrl does not have to be installed.
"""

from typing import TYPE_CHECKING

from mmreplay.adapters.common.lazy import names_on_use

if TYPE_CHECKING:
    from mmreplay.adapters.tmrl.memory import GenericTorchMemory as GenericTorchMemory
    from mmreplay.adapters.tmrl.memory import Memory as Memory
    from mmreplay.adapters.tmrl.memory import TorchMemory as TorchMemory

__all__ = ["GenericTorchMemory", "Memory", "TorchMemory"]

__getattr__ = names_on_use(__name__, dict.fromkeys(__all__, "tmrl.memory"))
