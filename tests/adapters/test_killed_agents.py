"""The originals' agents, killed five times in training, go on over whole rows.

The training script (`killed_agents.py`) logs each row before it is added, and each call
that added one. Every row of which that was said is in the memory, in this order, none
twice and none torn; of the call that the kill struck, the first rows may be.
"""

import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest

from tests.adapters.killed_agents import TASKS, TRAININGS, records, rows_in

pytestmark = [pytest.mark.peer, pytest.mark.slow]
MODULES = {"sb3": "stable_baselines3", "HER": "stable_baselines3"}
KILLS, STEPS, PATIENCE_S = 5, 60, 240


def library_of(name):
    kind = TRAININGS[name][0]
    return TASKS.get(kind, {"library": kind})["library"]


def started(name, folder, steps):
    with (folder / "said").open("a") as said:
        return subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "tests.adapters.killed_agents",
                name,
                folder,
                str(steps),
            ],
            stdout=subprocess.DEVNULL,
            stderr=said,
            cwd=Path(__file__).parents[2],
        )


def added(log):
    """Rows of calls that returned, in the order of the log; of any life."""
    given, count = 0, 0
    for what, rows in records(log) if log.exists() else ():
        if what == "add":
            given = len(rows)
        elif what == "added":
            count += given
    return count


def killed_in_training(name, folder, rng):
    """Kill a life anywhere after some rows more: in an add, an update or a save."""
    before = added(folder / "log")
    process, waited = started(name, folder, 1 << 40), monotonic()
    while added(folder / "log") < before + STEPS:
        assert process.poll() is None, (folder / "said").read_text()[-3000:]
        assert monotonic() - waited < PATIENCE_S, "no rows were added"
        sleep(0.002)
    sleep(rng.uniform(0, 0.05))
    process.kill()
    assert process.wait() == -signal.SIGKILL


def expected_rows(log):
    """Rows that a memory holds in the end, and how many each life began with."""
    rows, pending, found = [], [], []
    for what, said in records(log):
        if what == "add":
            assert not pending
            pending = said
        elif what == "added":
            rows, pending = rows + pending, []
        elif what == "resumed":
            # All that were acknowledged, and of the last call none, some or all.
            assert len(rows) <= said <= len(rows) + len(pending)
            rows, pending = rows + pending[: said - len(rows)], []
            found.append(said)
    assert not pending
    return rows, found


@pytest.mark.parametrize("name", TRAININGS)
def test_an_agent_that_was_killed_goes_on_over_every_row(tmp_path, name):
    library = library_of(name)
    module = MODULES.get(library, library)
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    rng = np.random.default_rng(46)
    for _ in range(KILLS):
        killed_in_training(name, tmp_path, rng)
    process = started(name, tmp_path, rows_in(tmp_path / "ring")[1] + STEPS)
    assert process.wait(PATIENCE_S) == 0, (tmp_path / "said").read_text()[-3000:]
    assert records(tmp_path / "log")[-1][0] == "finished"
    expected, resumed = expected_rows(tmp_path / "log")
    found, count = rows_in(tmp_path / "ring")
    assert len(resumed) == KILLS + 1
    assert count == len(expected) >= (KILLS + 1) * STEPS
    for number, row in enumerate(expected):
        assert row.keys() <= found.keys()
        for path, value in row.items():
            stored = found[path][number].reshape(-1)
            given = np.asarray(value).reshape(-1).astype(stored.dtype)
            if path == "ended" and number + 1 in resumed:
                # An episode that was cut off is truncated there.
                assert stored.all()
                continue
            np.testing.assert_array_equal(stored, given, f"{path} of row {number}")
    print(f"{name}: rows at each start {resumed}, at the end {count}")
