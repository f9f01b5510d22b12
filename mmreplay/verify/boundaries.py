"""The flags of rows alive: known bits, in an order that an episode can have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mmreplay.disk.files import File
from mmreplay.episodes import (
    ALL_FLAGS,
    BREAK,
    CUT,
    END,
    FINAL,
    START,
    TERMINATED,
    TRUNCATED,
)
from mmreplay.ring import Ring
from mmreplay.verify.report import MAX_FINDINGS, Notebook
from mmreplay.verify.slots import Claim, CommitFile

CHUNK_ROWS = 1 << 20
NAMES = {
    START: "START", TERMINATED: "TERMINATED", TRUNCATED: "TRUNCATED",
    FINAL: "FINAL", BREAK: "BREAK", CUT: "CUT",
}  # fmt: skip

Array = NDArray[np.int64]
Flags = NDArray[np.uint8]


def names(flags: int) -> str:
    """Flags in words, such as ``"START|BREAK"``."""
    known = [name for bit, name in NAMES.items() if flags & bit]
    unknown = flags & ~ALL_FLAGS
    return "|".join(known + ([f"unknown {unknown:#04x}"] if unknown else [])) or "none"


def alone_problem(flags: int) -> str:
    """What is wrong with a row's flags in themselves, or nothing."""
    if flags & ~ALL_FLAGS:
        return f"bits within {ALL_FLAGS:#04x}"
    if flags & FINAL and flags != FINAL:
        return "FINAL alone: a final row neither starts nor ends an episode"
    if flags & BREAK and not flags & START:
        return "START beside BREAK"
    if flags & CUT and not flags & BREAK:
        return "BREAK beside CUT"
    return ""


def pair_problem(before: int, after: int, final_follows: bool) -> str:
    """What is wrong with a row's flags after those of the row before, or nothing."""
    if after & FINAL:
        return "" if before & END else "FINAL only after an end"
    if before & FINAL:
        return "" if after & START else "START after a final row"
    if before & END:
        if final_follows:
            # A resumed writer cannot know the final observation any more.
            return "" if after & BREAK else "FINAL, or START|BREAK, after an end"
        return "" if after & START else "FINAL or START after an end"
    if after & START and not after & BREAK:
        return "START only after an end, or with BREAK"
    return ""


class FlagCheck:
    """Checks flags.bin of one generation, by tables of what may follow what."""

    def __init__(
        self,
        file: File,
        name: str,
        ring: Ring,
        final_follows: bool,
        commit_file: CommitFile,
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
                [
                    here[1:],
                    self._read(base, (slot + count) % self._ring.slots, 1, width),
                ]
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
        """Report bad rows, less those that a writer gave up meanwhile."""
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
            problem, expected = f"got flags {names(got)}", alone_problem(got)
            if before is None:
                expected = expected or "START at the first row of the environment"
            else:
                earlier = int(before[step, column])
                problem += f" after {names(earlier)}"
                expected = pair_problem(earlier, got, self._final_follows)
            offset = base + position % ring.slots * len(ids) + column
            notes.note(
                "flags", self._name, offset,
                f"environment {ids[column]}, position {position}: {problem}, expected "
                f"{expected}",
            )  # fmt: skip
