"""skrl's memories on disk, for its torch agents; see docs/migrating/skrl.md.

Agents ask nothing of a memory but its methods, so that skrl need not be installed.
"""

from __future__ import annotations

from typing import Any

import torch

from mmreplay.adapters import memories
from mmreplay.adapters.memory_files import Format


class Memory(memories.Memory):
    """`skrl.memories.torch.Memory` in files."""

    system = "skrl"


class RandomMemory(memories.RandomMemory, Memory):
    """`skrl.memories.torch.RandomMemory` in files."""

    def __init__(
        self,
        memory_size: int,
        num_envs: int = 1,
        device: str | torch.device | None = None,
        export: bool = False,
        export_format: Format = "pt",
        export_directory: str = "",
        replacement: bool = False,
        **options: Any,
    ) -> None:
        """Declare a memory; see `memories.RandomMemory`, but for the default."""
        super().__init__(
            memory_size, num_envs, device, export, export_format, export_directory,
            replacement, **options,
        )  # fmt: skip
