"""What would be faster, as far as the figures tell."""

from __future__ import annotations

from collections.abc import Iterator

from mmreplay.mounts import NETWORK
from mmreplay.sizes import size
from mmreplay.speed.report import Rate, SpeedReport

WHOLE = 0.95
"""Share of the files in memory from which on they are all there."""
WORTH_IT = 1.3
"""Times as fast from which on something is worth a word."""


def advice(report: SpeedReport) -> Iterator[str]:
    """Sentences, those of the disk first; the report's own are not looked at."""
    if report.not_cold:
        yield report.not_cold
    elif report.cold is not None and report.unasked is not None:
        yield from _of_asking(report.cold, report.unasked)
        yield from _of_memory(report, report.cold)
        if report.disk_mb_per_s is None:
            yield "pages stayed in memory, so the disk was not read from end to end"
    gain = report.larger.rows_per_s / report.warm.rows_per_s
    if gain > WORTH_IT:
        yield (
            f"batches of {report.larger_size:,} steps come at {gain:.1f} times "
            "as many steps a second: draw larger ones and split them"
        )
    if report.file_system in NETWORK:
        yield (
            f"the files are on {report.file_system}: a copy on a local disk spares "
            "every draw the network"
        )


def _of_asking(cold: Rate, unasked: Rate) -> Iterator[str]:
    """Whether to ask the disk for all rows of a batch at once."""
    gain = cold.rows_per_s / unasked.rows_per_s
    if gain > WORTH_IT:
        yield (
            f"a batch's rows asked for at once come {gain:.1f} times as fast as "
            "one after another: leave advise='auto'"
        )
    elif gain < 1 / WORTH_IT:
        yield (
            f"waiting for each row by itself is {1 / gain:.1f} times as fast here: "
            "try advise='never'"
        )


def _of_memory(report: SpeedReport, cold: Rate) -> Iterator[str]:
    """What brings more of the files into memory, where that is known and of use."""
    lag = report.warm.rows_per_s / cold.rows_per_s
    cached, whole = report.memory.page_cache, report.machine_nbytes
    if cached is None or lag <= WORTH_IT:
        return
    inside = min(1.0, cached / max(1, report.nbytes))
    if inside >= WHOLE:
        return
    told = f"rows in memory come {lag:.1f} times as fast, and {inside:.0%} of the files"
    if 0 < report.nbytes <= whole:
        yield (
            f"{told} were there: all of them fit this machine's {size(whole)}, and "
            "draws bring them in as they go; a ReplayLoader reads ahead meanwhile"
        )
    else:
        yield (
            f"{told} were there: more RAM or less capacity moves draws that way; a "
            "ReplayLoader reads ahead while the learner works"
        )
