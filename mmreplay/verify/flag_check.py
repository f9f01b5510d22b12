"""The flags of rows alive: known bits, in an order that an episode can have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mmreplay.disk.files import File
from mmreplay.episodes import ALL_FLAGS, START
from mmreplay.episodes.boundaries import alone_problem, names, pair_problem
from mmreplay.ring import Ring
from mmreplay.verify.report import MAX_FINDINGS, Notebook
from mmreplay.verify.slots import Claim, CommitFile

CHUNK_ROWS = 1 << 20
Array = NDArray[np.int64]
Flags = NDArray[np.uint8]


class FlagCheck:
    """Checks flags.bin of one generation, by tables of what may follow what."""

    def __init__(
        self, file: File, name: str, ring: Ring, final_follows: bool, commit_file: CommitFile
    ) -> None:
        self._file = file
        self._name = name
        self._ring = ring
        self._final_follows = final_follows
        self._commit = commit_file
        known = range(ALL_FLAGS + 1)
        self._alone = np.array([not alone_problem(f) for f in range(256)])
        pairs = [[not pair_problem(b, a, final_follows) for a in known] for b in known]
        self._pairs = np.array(pairs)

    def nbytes(self, claim: Claim) -> int:
        """Bytes that `run` will read, about."""
        return int((claim.published - claim.firsts).sum())

    def run(self, claim: Claim, notes: Notebook) -> None:
        """Check all rows alive, those too that are published and not yet committed."""
        ring = self._ring
        notes.rows = int((claim.heads - claim.firsts).sum())
        notes.uncommitted_rows = int((claim.published - claim.heads).sum())
        if ring.layout == "time_major":
            self._run(0, np.arange(ring.num_envs), claim, notes)
            return
        for env_id in range(ring.num_envs):
            self._run(env_id * ring.slots, np.array([env_id]), claim, notes)

    def _run(self, base: int, ids: Array, claim: Claim, notes: Notebook) -> None:
        """Check environments whose rows lie side by side.

        Args:
            base: Row of their slot 0.
            ids: int64 ``[W]``, the environments of a slot's W rows.
            claim: What is committed, and what is published.
            notes: Where findings go.
        """
        firsts, heads = claim.firsts[ids], claim.published[ids]
        width = len(ids)
        for slot, count in self._chunks(int(firsts.min()), int(heads.max()), width):
            here = self._read(base, slot, count, width)
            after = np.concatenate(
                [here[1:], self._read(base, (slot + count) % self._ring.slots, 1, width)]
            )
            notes.read(here.size)
            slots = np.arange(slot, slot + count)[:, None]
            positions = firsts + (slots - firsts) % self._ring.slots
            alive = positions < heads
            paired = positions + 1 < heads
            good = self._alone[here]
            good &= (positions != 0) | ((here & START) != 0)
            self._note_problems(here, None, positions, ids, alive & ~good, base, notes)
            # Pairs are looked up only where both rows make sense by themselves.
            known = self._alone[here] & self._alone[after]
            follows = self._pairs[here & ALL_FLAGS, after & ALL_FLAGS]
            bad = paired & known & ~follows
            self._note_problems(after, here, positions + 1, ids, bad, base, notes)

    def _chunks(self, first: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
        """Slots of the positions, each once, in pieces of bounded size."""
        slots = self._ring.slots
        step = max(1, CHUNK_ROWS // width)
        if stop - first >= slots:
            first, stop = 0, slots
        while first < stop:
            slot = first % slots
            count = min(stop - first, slots - slot, step)
            yield slot, count
            first += count

    def _read(self, base: int, slot: int, count: int, width: int) -> Flags:
        data = self._file.pread(count * width, base + slot * width)
        return np.frombuffer(data, np.uint8).reshape(count, width)

    def _note_problems(
        self,
        flags: Flags,
        before: Flags | None,
        positions: Array,
        ids: Array,
        bad: NDArray[np.bool_],
        base: int,
        notes: Notebook,
    ) -> None:
        """Report bad rows, except rows that a live writer has overwritten since."""
        if not bad.any():
            return
        ring = self._ring
        oldest = positions - (before is not None)
        bad = bad & (oldest >= self._commit.limits()[ids] - ring.slots)
        steps, columns = np.nonzero(bad)
        notes.omitted += max(0, len(steps) - MAX_FINDINGS)
        for step, column in zip(
            steps[:MAX_FINDINGS].tolist(), columns[:MAX_FINDINGS].tolist(), strict=True
        ):
            position, got = int(positions[step, column]), int(flags[step, column])
            rule, after = alone_problem(got), ""
            if before is None:
                rule = rule or "the first row of an environment must have START"
            else:
                earlier = int(before[step, column])
                after = f" after {names(earlier)}"
                rule = pair_problem(earlier, got, self._final_follows)
            offset = base + position % ring.slots * len(ids) + column
            notes.note(
                "flags",
                self._name,
                offset,
                f"environment {ids[column]}, position {position}: {rule}, got {names(got)}{after}",
            )
