"""rofunc's memories on disk; see docs/migrating/skrl.md for the differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from mmreplay.adapters.common.values import device_of
from mmreplay.adapters.skrl import memory
from mmreplay.adapters.skrl.save import FORMATS, Format


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
    # "np" is what rofunc's own documentation says; its `save` says "npz".
    formats: ClassVar = {**FORMATS, "np": "npz"}

    def _device(self, device: str | torch.device | None) -> torch.device:
        return device_of(None) if device is None else torch.device(device)

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
        """Declare a memory; see skrl's.

        `replacement` has another default, ``"np"`` is a format as well, and a device
        that this machine lacks stays; `create_tensor` refuses it.
        """
        super().__init__(
            memory_size,
            num_envs,
            device,
            export,
            export_format,
            export_directory,
            replacement,
            **options,
        )
