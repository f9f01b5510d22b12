"""What a DataLoader hands over: whole batches as they are, single steps stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from mmreplay.batch import Batch
from mmreplay.errors import SchemaError


def collate(items: Batch | list[dict[str, Any]]) -> Any:
    """Put together what `ReplayDataset` gave for one batch.

    A `Batch`, which is what a whole draw gives, passes as it is. Give it as
    ``collate_fn`` along with ``batch_sampler=dataset.draws(...)``.

    Args:
        items: A batch, or single steps as nested dicts of tensors.

    Returns:
        The batch, or the nested dict with every tensor ``[B, *shape]``.

    Raises:
        SchemaError: It is a list of batches.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> dataset = mr.ReplayDataset("runs/cartpole")
        >>> draws = dataset.draws(mr.UniformSampler(seed=0), batch_size=32)
        >>> loader = DataLoader(dataset, batch_sampler=draws, collate_fn=mr.collate)
        >>> next(iter(loader))["observation"].shape
        torch.Size([32, 4])
    """
    return items if isinstance(items, Batch) else default_collate(items)


def _refuse(batches: Sequence[Batch], **_: object) -> NoReturn:
    raise SchemaError(
        f"collate: got a list of Batch, {len(batches)} of them, expected single steps, "
        "for these are whole batches already; give the DataLoader batch_size=None"
    )


# torch would say which types it can stack, and not what to do.
default_collate_fn_map[Batch] = _refuse
