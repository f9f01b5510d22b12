"""skrl's memories on disk, for its torch agents; see docs/migrating/skrl.md.

skrl does not have to be installed.
"""

from typing import TYPE_CHECKING

from mmreplay.adapters.common.lazy import names_on_use

if TYPE_CHECKING:
    from mmreplay.adapters.skrl.memory import Memory as Memory
    from mmreplay.adapters.skrl.memory import RandomMemory as RandomMemory

__all__ = ["Memory", "RandomMemory"]

__getattr__ = names_on_use(__name__, {"Memory": "skrl.memory", "RandomMemory": "skrl.memory"})
