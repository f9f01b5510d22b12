"""rofunc's memories on disk; see docs/migrating/skrl.md for the differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmreplay.adapters.skrl import memory
from mmreplay.adapters.skrl.save import Format


class Memory(memory.Memory):
    """`rofunc.learning.RofuncRL.utils.memory.Memory` in files.

    Example:
        >>> memory = Memory(memory_size=100, num_envs=2, device="cpu")
        >>> memory.create_tensor("states", size=3, dtype=torch.float32)
        True
        >>> memory.tensors_keep_dimensions
        {'states': False}
    """

    system = "rofunc"
    strict = shaped = True

    @property
    def tensors_keep_dimensions(self) -> Mapping[str, bool]:
        """Which tensors were declared with ``keep_dimensions=True``, by name."""
        return dict(self._keep_dimensions)


class RandomMemory(memory.RandomMemory, Memory):
    """`rofunc.learning.RofuncRL.utils.memory.RandomMemory` in files.

    Example:
        >>> memory = RandomMemory(memory_size=100, num_envs=2, device="cpu")
        >>> memory.create_tensor("states", size=3, dtype=torch.float32)
        True
        >>> memory.add_samples(states=torch.zeros(2, 3))
        >>> memory.sample(["states"], batch_size=4)[0][0].shape
        torch.Size([4, 3])
    """

    def __init__(
        self,
        memory_size: int,
        num_envs: int = 1,
        device: str | torch.device | None = None,
        export: bool = False,
        export_format: Format = "pt",
        export_directory: str = "",
        replacement: bool = True,
        **options: Any,
    ) -> None:
        """Declare a memory; see skrl's, except for the default of `replacement`."""
        super().__init__(
            memory_size, num_envs, device, export, export_format, export_directory,
            replacement, **options,
        )  # fmt: skip
