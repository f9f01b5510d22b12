"""What a client has met so far: counts, and a warning of a node that is silent."""

from __future__ import annotations

from dataclasses import dataclass


class LostWarning(UserWarning):
    """A node does not answer; its rings are not drawn from until it does."""


@dataclass(slots=True)
class ClientStats:
    """What a client has met; counts are since it was made.

    Attributes:
        rings: Rings known, as ``"shard/ring"``; their index is that of ``buffer_ids``.
        lost: Those of them that are not drawn from now, since their node is silent.
        times_lost: How often a node was lost.
        late: Batches that went without a late ring, by straggler_s.
        redrawn: Steps drawn from other rings, in place of silent or empty ones.
        overwritten: Draws repeated, since rows were overwritten before the gather.
        repeated: Calls repeated, since a shard was restarted.
        dropped: Priorities whose rows had been overwritten, or which were not stored.
        skipped: Starts of the newest epoch that were overwritten before they were
            drawn.
    """

    rings: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    times_lost: int = 0
    late: int = 0
    redrawn: int = 0
    overwritten: int = 0
    repeated: int = 0
    dropped: int = 0
    skipped: int = 0
