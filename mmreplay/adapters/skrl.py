"""skrl's memories on disk, for its torch agents; see docs/migrating/skrl.md.

Agents ask nothing of a memory but its methods, so that skrl need not be installed.
"""

from __future__ import annotations

from typing import Any

from mmreplay.adapters import memories


class Memory(memories.Memory):
    """`skrl.memories.torch.Memory` in files."""

    system = "skrl"


class RandomMemory(memories.RandomMemory, Memory):
    """`skrl.memories.torch.RandomMemory` in files."""

    def __init__(self, *args: Any, replacement: bool = False, **options: Any) -> None:
        """Declare a memory; see `memories.RandomMemory`, but for the default."""
        super().__init__(*args, replacement=replacement, **options)
