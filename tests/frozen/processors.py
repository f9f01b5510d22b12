"""What one processor draws; `test_processors` runs it as several.

``python -m tests.frozen.processors masses`` prints digests of masses, and of the powers
that they are cut from, ``draws`` the cases of draws.json that differ from it.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

from mmreplay.samplers.priority_distribution import Proportional, RankBased, Scheduled
from tests.frozen.frozen_files import digest, load

COUNT = 100_000


def masses():
    """Digests of the masses of priorities and of ranks, and of their powers."""
    rows = np.arange(COUNT)
    priorities = np.random.default_rng(5).random(COUNT, np.float32) * np.float32(8)
    proportional = Proportional(COUNT, Scheduled("alpha", 0.6, 4.0), 1e-6, 1000)
    proportional.put(rows, priorities)
    put = proportional._tree.leaves.copy()
    proportional.put(rows, np.ones(COUNT, np.float32))
    assert proportional.renew(rows, priorities)
    ranks = RankBased(COUNT, Scheduled("alpha", 0.7, 4.0), None)
    ranks.put(rows, priorities)
    ranks.ready(0, priorities)
    return {
        "priorities": digest(put),
        "updated priorities": digest(proportional._tree.leaves),
        "ranks": digest(ranks._tree.leaves),
        "powers": digest(np.power(priorities.astype(np.float64) + 1e-6, 0.6)),
    }


def draws():
    """Names of the recorded cases with priorities, or with sums, that differ."""
    # These import all of the package.
    from tests.frozen.draws_cases import SAMPLERS, TRANSFORMS, draws_by_seed, transformed

    recorded, found = load("draws.json"), {}
    with tempfile.TemporaryDirectory() as folder:
        for name in SAMPLERS:
            if re.search("prioritized|shrinking|^mixture$", name):
                found[f"seeds/{name}"] = draws_by_seed(name, Path(folder))
        for name in TRANSFORMS:
            if re.search("nstep|return|gae", name):
                made = transformed(name, Path(folder), "memory")
                found[f"transforms/{name}"] = json.loads(json.dumps(made))
    assert len(found) > 15
    return [name for name in found if found[name] != recorded[name]]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({"masses": masses, "draws": draws}[sys.argv[1]]()))
