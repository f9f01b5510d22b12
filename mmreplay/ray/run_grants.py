"""A run's rate limiter at its registry: grants, by what all rings count."""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError

from mmreplay.buffer.limiting import Counts
from mmreplay.errors import FailedError, ReplayError
from mmreplay.limiter import RateLimiter
from mmreplay.ray import cluster
from mmreplay.ray.cluster import PAUSE_S
from mmreplay.ray.grants import Grants, Side, limiter_from
from mmreplay.ray.known_run import Counted, KnownRun

COUNTS_S = 1.0
"""Within which a shard says what its rings count for a rate limiter."""
SILENT_S = 5.0
"""After which a silent shard counts as it did last, as clients draw without it."""
LIST_S = 1.0
"""Shards that are new are looked for so often."""
STORE_S = 1.0
"""What the rings count is stored so often, and when a shard gives no answer."""


class RunGrants:
    """Grants rows and items of a run's rate limiter."""

    def __init__(self, known: KnownRun) -> None:
        """Begin with what is known of the run."""
        self._known = known
        self._grants: Grants | None = None
        self._lock = threading.RLock()
        self._looking = threading.Lock()
        self._listed_at = -LIST_S
        self._stored_at = -STORE_S
        self._silent: set[str] = set()

    def bound(self) -> list[float] | None:
        """Return the settings of the run's rate limiter; None without one.

        They are found in the rings where the run was stopped and begun again. A shard
        that is slow is asked again, for as long as clients wait for it.
        """
        self._known.load()
        stop = time.monotonic() + SILENT_S
        while self._known.bound is None:
            with self._looking:
                all_answered = self._look(Grants(RateLimiter(1.0, 1, math.inf)))
            if all_answered or time.monotonic() >= stop:
                break
            time.sleep(PAUSE_S)
        return self._known.bound

    def known_bound(self) -> list[float] | None:
        """Return the same where it is known; no shard is asked."""
        self._known.load()
        return self._known.bound

    def check_limit(self, side: Side, count: int, settings: list[float]) -> None:
        """Refuse what `limit` would refuse; nothing is stored.

        Raises:
            SchemaError: See `limit`.
        """
        bound = self.bound() or settings
        with self._lock:
            grants = self._grants or Grants(limiter_from(bound))
            grants.agree(settings)
            grants.check(side, count)

    def limit(self, who: str, side: Side, count: int, settings: list[float]) -> None:
        """Take in a writer or client that will ask for grants.

        Args:
            who: Of one asker, in all of the run.
            side: Its side.
            count: Rows or items that it will ask for at a time.
            settings: Of its limiter.

        Raises:
            SchemaError: The run has other settings, or both sides could wait for each
                other.
        """
        with self._lock:
            self._agreed(side, count, settings).ask(who, side, count, 0, 0)

    def grant(
        self,
        who: str,
        side: Side,
        count: int,
        unused: int,
        number: int,
        settings: list[float],
        ahead: int = 0,
    ) -> dict[str, Any]:
        """Grant rows or items of a rate limiter; see `Grants`.

        Returns:
            ``granted``, ``counts`` and ``others``; see `Answer`.

        Raises:
            SchemaError: See `limit`.
        """
        with self._lock:
            grants = self._agreed(side, count, settings)
            if not grants.ask(who, side, count, unused, number, ahead):
                count = 0
            answer = grants.decide(who, count)
            is_old = grants.is_old(refused=bool(count) and not answer.granted)
        # Another request may be looking; this one is sent again by its asker.
        if is_old and self._looking.acquire(blocking=False):
            try:
                self._look(grants)
            finally:
                self._looking.release()
            with self._lock:
                if not answer.granted:
                    answer = grants.decide(who, count)
        counts = answer.counts
        return {
            "granted": answer.granted,
            "counts": [counts.inserts, counts.samples, counts.size],
            "others": answer.others,
        }

    def _agreed(self, side: Side, count: int, settings: list[float]) -> Grants:
        """Check an asker; the settings of the first one are the run's from then on."""
        self._known.load()
        grants = self._grants or Grants(limiter_from(self._known.bound or settings))
        grants.agree(settings)
        if count:
            grants.check(side, count)
        # Only now: what is refused leaves no settings to the run.
        self._grants = grants
        if self._known.bound is None:
            self._known.bound = list(grants.limiter.settings)
            self._known.save()
        return grants

    def _look(self, grants: Grants) -> bool:
        """Ask all shards what their rings count.

        A shard that was silent for `SILENT_S` counts as it did last, also where this
        actor was restarted since. Until then nothing new is known, and what is under
        way stays held.

        Returns:
            Whether all shards answered.
        """
        self._known.load()
        now = time.monotonic()
        if now - self._listed_at >= LIST_S:
            with suppress(RayError, ConnectionError):
                for key in cluster.shard_keys(self._known.run):
                    self._known.counted.setdefault(key, Counted(now))
            self._listed_at = now
        began_s = grants.begin_look()
        asked = []
        for key in list(self._known.counted):
            remote = self._known.shard(key)
            with suppress(FailedError):
                asked.append((key, remote, remote.send("counts")))
        stop = time.monotonic() + COUNTS_S
        for key, remote, reference in asked:
            with suppress(ReplayError):
                left = max(0.0, stop - time.monotonic())
                found = remote.receive(reference, left)
                self._known.counted[key] = Counted(time.monotonic(), *found["counts"])
                self._known.bound = self._known.bound or found["bound"]
        now = time.monotonic()
        # Another thread may add one.
        counted = dict(self._known.counted)
        every = counted.values()
        silent = {key for key, each in counted.items() if each.at_s < began_s}
        if silent - self._silent or now - self._stored_at >= STORE_S:
            # Before the first grant by what is known of those that are away.
            self._known.save()
            self._stored_at = now
        self._silent = silent
        if all(each.at_s >= began_s or now - each.at_s > SILENT_S for each in every):
            sums = Counts(
                sum(each.inserts for each in every),
                sum(each.samples for each in every),
                sum(each.size for each in every),
            )
            with self._lock:
                grants.looked(began_s, sums)
        return not silent
