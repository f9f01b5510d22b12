"""Some fields, or some environments, of what a reader gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from mmreplay.convert.base import Block, Reader
from mmreplay.convert.description import Description
from mmreplay.errors import SchemaError
from mmreplay.nesting import under


def paths_of(paths: tuple[str, ...], fields: Sequence[str]) -> tuple[str, ...]:
    """Paths of fields, or of subtrees, that a user names, in schema order.

    Raises:
        SchemaError: A name is no field, or there is none.
    """
    if isinstance(fields, str) or not fields:
        raise SchemaError(
            f"fields: got {fields!r}, expected a list of at least one path; leave it "
            "out for all"
        )
    kept: set[str] = set()
    for name in fields:
        found = under(paths, name) if isinstance(name, str) else ()
        if not found:
            raise SchemaError(
                f"fields: got {name!r}, expected fields or subtrees of "
                f"{', '.join(paths[:20])}; check the spelling"
            )
        kept.update(found)
    return tuple(path for path in paths if path in kept)


def mask_of(num_envs: int, env_ids: ArrayLike) -> np.typing.NDArray[np.bool_]:
    """Which environments a user names, bool ``[E]``.

    Raises:
        SchemaError: They are no environments.
    """
    ids = np.asarray(env_ids)
    whole = ids.dtype.kind in "iu" and ids.ndim <= 1 and ids.size > 0
    if not whole or ids.min() < 0 or ids.max() >= num_envs:
        raise SchemaError(
            f"env_ids: got {env_ids!r}, expected integers in [0, {num_envs}), at "
            "least one; environments are counted from 0"
        )
    kept = np.zeros(num_envs, bool)
    kept[ids] = True
    return kept


class Selected(Reader):
    """A reader's rows of some environments, with some of their fields.

    Environments keep their numbers; those left out are empty.
    """

    def __init__(
        self,
        reader: Reader,
        fields: Sequence[str] | None = None,
        env_ids: ArrayLike | None = None,
    ) -> None:
        """Wrap a reader, which is closed with this one."""
        self.report = reader.report
        self._reader = reader
        description = reader.describe()
        if fields is not None:
            description = description.select(paths_of(description.schema.paths, fields))
        self._kept = None
        if env_ids is not None:
            self._kept = kept = mask_of(description.num_envs, env_ids)
            first = np.where(kept, description.first, description.stop)
            description = replace(description, first=first)
        self._description = description

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        paths = self._description.schema.paths
        for block in self._reader.blocks(rows_per_block):
            columns = {path: block.columns[path] for path in paths}
            if self._kept is None:
                yield Block(columns, block.env_ids, block.positions, block.flags)
                continue
            rows = self._kept[block.env_ids]
            if rows.any():
                yield Block(
                    {path: column[rows] for path, column in columns.items()},
                    block.env_ids[rows],
                    block.positions[rows],
                    block.flags[rows],
                )

    def close(self) -> None:
        """See `Reader.close`."""
        self._reader.close()
