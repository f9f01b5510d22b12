"""Runs cases: builds each buffer and has its consumers look at it."""

import shutil
import tempfile
import traceback
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmreplay.testing.disks import QuickDisk, using
from tests.combinations.build import build
from tests.combinations.cases import Case, pairs_of, possible_pairs, simpler, written
from tests.combinations.consumers import (
    delivery,
    files,
    on_ray,
    rows,
    samplers,
    seams,
    shown,
    transforms,
)

CONSUMERS = {
    **rows.CONSUMERS,
    **samplers.CONSUMERS,
    **transforms.CONSUMERS,
    **delivery.CONSUMERS,
    **files.CONSUMERS,
    **shown.CONSUMERS,
    **on_ray.CONSUMERS,
    **seams.CONSUMERS,
}
"""By name what looks at the buffer of a case."""

ALWAYS = ("gather_all", "take", "legal_starts", "episode_table")
"""Consumers that cost next to nothing, and look at every case."""

OF_HISTORY = delivery.OF_HISTORY
"""Consumers that look at every case of a history, as it is about them."""

RARE = {**delivery.RARE, **on_ray.RARE, **seams.RARE}
"""By name of a slow consumer, one of how many cases it looks at."""

TRIES = 60
"""Cases that are run, at most, to find a simpler one that fails alike."""


@dataclass(frozen=True)
class Failure:
    """What a case failed by.

    Attributes:
        case: The case.
        consumer: Name of the consumer, or ``"build"``.
        error: Type and first words of the error: failures of the same are alike.
        text: The traceback.
    """

    case: Case
    consumer: str
    error: str
    text: str

    @property
    def kind(self):
        """What failures of one cause have in common: consumer, type and first word."""
        return self.consumer, *self.error.split()[:2]

    def script(self):
        """A script that shows it again."""
        names = "" if self.consumer == "build" else f", [{self.consumer!r}]"
        return (
            "from tests.combinations.cases import Case\n"
            "from tests.combinations.run import run_case\n\n"
            f"failure = run_case({written(self.case)}{names})\n"
            "print(failure and failure.text)\n"
        )


def consumers_of(case, count=8):
    """Names of the consumers that look at a case, by its seed."""
    rng = np.random.default_rng([case.seed, 1])
    first = [*ALWAYS, *OF_HISTORY.get(case.history, ())]
    others = [
        name
        for name in CONSUMERS
        if name not in first and (name not in RARE or rng.integers(RARE[name]) == 0)
    ]
    rare = [name for name in others if name in RARE]
    common = [name for name in others if name not in RARE]
    return [*first, *rare, *(common[i] for i in rng.permutation(len(common))[:count])]


def run_case(case, names=None):
    """Run a case; return its failure, or None.

    Args:
        case: Which.
        names: Consumers, in order; those of its seed by default.
    """
    folder = Path(tempfile.mkdtemp(prefix="mmreplay-case-"))
    consumer = "build"
    built = None
    try:
        with warnings.catch_warnings(), using(QuickDisk()):
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".*mask.*")
            built = build(case, folder)
            for consumer in names or consumers_of(case):
                # The same whichever consumers come before.
                number = zlib.crc32(consumer.encode())
                CONSUMERS[consumer](built, np.random.default_rng([case.seed, number]))
    except Exception as error:
        words = str(error).strip().splitlines()
        kind = f"{type(error).__name__}: {words[0] if words else ''}"
        return Failure(case, consumer, kind[:160], traceback.format_exc())
    finally:
        if built is not None:
            built.close()
        shutil.rmtree(folder, ignore_errors=True)
    return None


def shrunk(failure):
    """The simplest failure found of the same consumer and type of error."""
    names = None if failure.consumer == "build" else [failure.consumer]
    # Consumers before it may have been needed.
    found, tries = failure, 0
    while True:
        for case in simpler(found.case):
            tries += 1
            if tries > TRIES:
                return found
            other = run_case(case, names)
            if other is not None and other.kind[:2] == failure.kind[:2]:
                found = other
                break
        else:
            return found


def uncovered(cases, times=3):
    """Possible pairs that less than so many of the cases have."""
    counts = Counter(pair for case in cases for pair in pairs_of(case))
    return [pair for pair in possible_pairs() if counts[pair] < times]
