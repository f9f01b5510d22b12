"""What a DataLoader hands over: whole batches as they are, single steps stacked."""

from __future__ import annotations

from typing import Any

from torch.utils.data import default_collate

from mmreplay.batch import Batch


def collate(items: Batch | list[dict[str, Any]]) -> Any:
    """Put together what `ReplayDataset` gave for one batch.

    A `Batch`, which is what a whole draw gives, passes as it is. Give it as
    ``collate_fn`` along with ``batch_sampler=dataset.draws(...)``.

    Args:
        items: A batch, or single steps as nested dicts of tensors.

    Returns:
        The batch, or the nested dict with every tensor ``[B, *shape]``.
    """
    return items if isinstance(items, Batch) else default_collate(items)
