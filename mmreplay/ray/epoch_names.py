"""The epochs of learners that share a run: what they are called, and what they hold."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Any

from mmreplay.errors import FailedError
from mmreplay.ray.cluster import Remote, UnansweredError
from mmreplay.ray.epochs import Frozen, freeze_rings
from mmreplay.ray.known_run import KnownRun
from mmreplay.ray.members import INFO_S

GROUP_S = 600.0
"""Learners of a group begin within so long of each other."""


class EpochNames:
    """Names the epochs of each group of learners, and has the rings freeze them.

    Threads: one at a time.
    """

    def __init__(self, known: KnownRun) -> None:
        """Begin with what is known of the run."""
        self._known = known
        self._groups: dict[str, tuple[str, set[int]]] = {}
        self._names: dict[str, str] = {}

    def name_of(self, start: str, rank: int, token: str, lasts: bool = False) -> dict[str, Any]:
        """Return the name of the epochs of a group of learners; may be repeated.

        The first learner of a group makes it. Another learner of a rank that it has
        belongs to another group, as after a restart without a state.

        Args:
            start: Equal for the learners of a group.
            rank: Of the learner in its group.
            token: Of the learner alone: asked again by it, the name is the same.
            lasts: Learners join it whenever they begin, as it was given a name.

        Returns:
            ``name``, and ``away``, the shards that have to answer before there is one:
            none where there is.
        """
        if token in self._names:
            return {"name": self._names[token], "away": []}
        name, ranks = self._groups.get(start, ("", set()))
        since_s = 0.0 if lasts else time.time() - GROUP_S
        if name and _began_s(name) <= since_s:
            name, ranks = "", set()
        if not name:
            # A registry that was restarted finds a group that began a moment ago.
            names, away = self._stored(f"{start}/")
            if away:
                return {"name": "", "away": away}
            name = max((each for each in names if _began_s(each) > since_s), default="")
        if not name or rank in ranks:
            name = f"{start}/{int(time.time())}-{uuid.uuid4().hex[:8]}"
            ranks = set()
        self._groups[start] = name, {*ranks, rank}
        self._names[token] = name
        return {"name": name, "away": []}

    def _stored(self, start: str) -> tuple[list[str], list[str]]:
        """Ask all shards for epochs whose names begin so; return who gave no answer."""
        names: list[str] = []
        asked, away = [], []
        for key in self._known.node_keys():
            remote = self._known.shard(key)
            try:
                asked.append((key, remote, remote.send("epoch_names", start)))
            except FailedError:
                # It ended with its node.
                away.append(key)
        stop = time.monotonic() + INFO_S
        for key, remote, reference in asked:
            try:
                left = max(0.0, stop - time.monotonic())
                names += remote.receive(reference, left)
            except UnansweredError:
                away.append(key)
        return names, sorted(away)

    def freeze(self, client: Any, name: str, epoch: int) -> dict[str, Any]:
        """Have every ring of the run freeze an epoch, or say what was frozen for it.

        Args:
            client: What its learners draw by.
            name: Of the learners.
            epoch: Its number.

        Returns:
            See `freeze_rings`.
        """
        shards = {key: self._known.shard(key) for key in self._known.node_keys()}
        return freeze_rings(partial(self._frozen, shards, client, name, epoch))

    def _frozen(
        self,
        shards: dict[str, Remote],
        client: Any,
        name: str,
        epoch: int,
        buffers: list[str] | None,
    ) -> tuple[Frozen, list[str]]:
        """Ask all shards for an epoch; return answers by ring, and who gave none."""
        found: Frozen = {}
        away = []
        for key, remote in shards.items():
            try:
                sent = remote.send("freeze", client, name, epoch, buffers)
            except FailedError:
                # It ended with its node.
                away.append(key)
                continue
            try:
                found.update(remote.receive(sent, INFO_S))
            except UnansweredError:
                away.append(key)
        return found, away


def _began_s(name: str) -> float:
    """When a group of learners began, by its name."""
    return float(name.rpartition("/")[2].partition("-")[0])
