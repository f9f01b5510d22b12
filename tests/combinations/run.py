"""Runs cases: builds each buffer and has its consumers look at it."""

import shutil
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.combinations.build import build
from tests.combinations.cases import Case
from tests.combinations.consumers import rows, samplers

CONSUMERS = {**rows.CONSUMERS, **samplers.CONSUMERS}
"""By name what looks at the buffer of a case."""

ALWAYS = ("gather_all", "take", "legal_starts", "episode_table")
"""Consumers that cost next to nothing, and look at every case."""


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


def consumers_of(case, count=8):
    """Names of the consumers that look at a case, by its seed."""
    rng = np.random.default_rng([case.seed, 1])
    others = [name for name in CONSUMERS if name not in ALWAYS]
    return [*ALWAYS, *(others[i] for i in rng.permutation(len(others))[:count])]


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
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".*mask.*", UserWarning)
            built = build(case, folder)
            for number, consumer in enumerate(names or consumers_of(case)):  # noqa: B007
                CONSUMERS[consumer](built, np.random.default_rng([case.seed, 2, number]))
    except Exception as error:
        words = str(error).strip().splitlines()
        kind = f"{type(error).__name__}: {words[0] if words else ''}"
        return Failure(case, consumer, kind[:160], traceback.format_exc())
    finally:
        if built is not None:
            built.close()
        shutil.rmtree(folder, ignore_errors=True)
    return None
