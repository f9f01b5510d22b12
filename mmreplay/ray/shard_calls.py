"""Calls to the shards of a run, as its clients make them.

Clients make no call of Ray themselves: they send requests through `ShardCalls`, which
`client` implements by Ray's actors, `LocalCalls` by rings that this process opened, and
tests by shards of the same process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

from mmreplay.ray.draws import Client, RingDraws


class RingInfo(TypedDict):
    """What a client needs to know of a ring; part of a shard's ``info``.

    Attributes:
        path: Its folder on the shard's node.
        uuid: In hex digits; see `Metadata`.
        schema: See `Schema.to_json`.
        roles: Of the schema, path by role.
    """

    path: str
    uuid: str
    schema: list[dict[str, object]]
    roles: dict[str, str]


class NotYetError(Exception):
    """A call has no answer yet."""


class CallLostError(Exception):
    """A call will have no answer, since its shard is being restarted: repeat it."""


class Call(Protocol):
    """A call that is under way."""

    def result(self, timeout_s: float) -> Any:
        """Wait for the answer.

        Raises:
            NotYetError: There is none within so many seconds.
            CallLostError: There will be none.
            ReplayError: That is the answer.
        """


class ShardCalls(Protocol):
    """Calls to one shard.

    Attributes:
        key: The shard's, which is its node's.
    """

    key: str

    def send(self, method: str, *arguments: Any) -> Call:
        """Begin a call of ``info``, ``masses`` or ``exchange``; see `ShardDraws`."""

    def settle(self) -> None:
        """Look at answers that no one needs any more, before the client is closed.

        Ray prints the errors among them otherwise.
        """


class RunCalls(Protocol):
    """The shards of a run.

    Attributes:
        run: Its name.
        node_id: Of this node, as shards say theirs.
    """

    run: str
    node_id: str

    def shards(self) -> Sequence[ShardCalls]:
        """The shards that are known now."""

    def states(self) -> Mapping[str, str] | None:
        """State of each shard by key, as the registry said; nothing is waited for.

        Returns:
            None where it has not said so lately.
        """

    def epoch_name(
        self, start: str, rank: int, token: str, lasts: bool = False
    ) -> Mapping[str, Any]:
        """Name of the epochs of a group of learners; see `EpochNames.name_of`."""

    def epoch(self, client: Client, name: str, epoch: int) -> Mapping[str, Any]:
        """Freeze an epoch in all rings; see `EpochNames.freeze`."""


@dataclass(slots=True)
class CompletedCall:
    """A call that was made in this process; see `Call`."""

    reply: Any
    error: BaseException | None = None

    def result(self, timeout_s: float) -> Any:
        """Return the answer."""
        if self.error is not None:
            raise self.error
        return self.reply


class LocalCalls:
    """Draws from rings of this node without a call; see `ShardCalls`."""

    def __init__(self, key: str, draws: RingDraws) -> None:
        """Draw from opened rings."""
        self.key, self._draws = key, draws

    def send(self, method: str, *arguments: Any) -> Call:
        """Answer at once; the client is left out, as there is one alone."""
        try:
            return CompletedCall(getattr(self._draws, method)(*arguments[1:]))
        except Exception as error:
            return CompletedCall(None, error)

    def settle(self) -> None:
        """Do nothing: nothing is under way."""
