"""Ends of episodes that no role tells, for targets that need them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mmreplay.convert.base import Block, Notes
from mmreplay.convert.description import Description
from mmreplay.convert.ends import Marks
from mmreplay.episodes import ALL_FLAGS, BREAK, CUT, FINAL, START, TRUNCATED
from mmreplay.schema import Schema
from mmreplay.schema.naming import ROLE_NAMES, UNSURE, refuse_nan


class NamedEnds:
    """Takes terminations from a field named as one where the schema has no role.

    Attributes:
        path: Of that field, or ``""``.
    """

    def __init__(self, description: Description) -> None:
        self.path = _path(description.schema)
        self._truncates = bool(description.schema.role("truncated"))
        self._marks = Marks(description.num_envs)
        self._ended = np.zeros(description.num_envs, bool)
        self._rows = 0

    def tell(self, notes: Notes, *, both: bool) -> None:
        """Say what was taken.

        Args:
            notes: Of the target.
            both: It does not tell terminations from truncations itself.
        """
        if not self.path:
            return
        notes.note(
            f"no role tells terminations: they were taken from field {self.path!r}, "
            "any value but 0 being an end"
        )
        if self.path in UNSURE and not both:
            notes.doubt(
                f"field {self.path!r} may mix time limits with terminations: all were "
                "taken as terminations, but for those that the flags call truncations"
            )

    def marked(self, block: Block) -> Block:
        """A block with the flags that those ends make.

        Raises:
            SourceError: An end is NaN.
        """
        if not self.path:
            return block
        flags = block.flags.copy()
        final, truncated = (flags & FINAL) != 0, (flags & TRUNCATED) != 0
        told = block.columns[self.path].reshape(len(block))
        # Of a final row the other fields mean nothing.
        told = np.where(final, told.dtype.type(0), told)
        refuse_nan(f"field {self.path!r}", told, self._rows)
        self._rows += len(block)
        terminated = told.astype(bool)
        if not self._truncates:
            # A cut says so, by a row behind it that was not chosen; see below.
            flags[terminated] &= ~np.uint8(TRUNCATED)
            truncated &= ~terminated
        elif self.path in UNSURE:
            terminated &= ~truncated
        for env_id in np.unique(block.env_ids).tolist():
            mine = block.env_ids == env_id
            ended = np.concatenate([self._ended[env_id : env_id + 1], terminated[mine]])
            self._ended[env_id] = ended[-1]
            # A cut truncates an episode that runs; this one had ended by itself.
            flags[mine] &= np.where(
                ended[:-1], ~np.uint8(CUT | BREAK), np.uint8(ALL_FLAGS)
            )
            flags[mine] |= self._marks.mark(
                env_id, terminated[mine], truncated[mine], final[mine],
                (flags[mine] & START) != 0,
            )  # fmt: skip
        return replace(block, flags=flags)


def _path(schema: Schema) -> str:
    if schema.role("terminated"):
        return ""
    for name in ROLE_NAMES["terminated"]:
        found = schema.fields.get(name)
        if found and found.shape in ((), (1,)) and found.dtype != "bfloat16":
            return name
    return ""
