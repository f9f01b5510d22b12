"""rofunc's memories on disk; see docs/migrating/skrl.md for what differs."""

from __future__ import annotations

from collections.abc import Mapping

from mmreplay.adapters import memories


class Memory(memories.Memory):
    """`rofunc.learning.RofuncRL.utils.memory.Memory` in files."""

    system = "rofunc"
    strict = shaped = True

    @property
    def tensors_keep_dimensions(self) -> Mapping[str, bool]:
        """Which tensors were declared with ``keep_dimensions=True``, by name."""
        return dict(self._kept)


class RandomMemory(memories.RandomMemory, Memory):
    """`rofunc.learning.RofuncRL.utils.memory.RandomMemory` in files."""
