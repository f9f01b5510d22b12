"""The measure that other ways to keep steps are held to, and that ours passes it."""

import numpy as np
import pytest

from tools.torture import peers
from tools.torture.outages import Unavailable


def rows(steps):
    return np.repeat(np.asarray(steps, np.int64)[:, None], 1 + peers.WIDTH, 1)


@pytest.mark.parametrize(
    ("steps", "acked", "verdict"),
    [
        ([], 0, "right"),
        ([], 50, "lost rows"),
        (range(50), 50, "right"),
        (range(60), 50, "right"),
        (range(49), 50, "lost rows"),
        (range(400, 1400), 1400, "right"),
        (range(1200, 1400), 1400, "lost rows"),
        ([1, 2, 4, 5], 4, "wrong order"),
        ([5, 1, 2], 4, "wrong order"),
    ],
)
def test_rows_are_judged(steps, acked, verdict):
    assert peers.judged(rows(steps), acked) == verdict


def test_a_row_of_two_steps_is_wrong():
    torn = rows(range(50))
    torn[7, 300] = 1
    assert peers.judged(torn, 50) == "wrong rows"


@pytest.mark.crash
@pytest.mark.slow
def test_a_kill_costs_ours_nothing_and_is_noticed_in_a_careless_one():
    report = peers.attack("mmreplay", "kills", 4, 3)
    assert report.seen == {"right": 4}
    report = peers.attack("naive", "kills", 8, 3)
    assert report.seen["right"] < 8


@pytest.mark.crash
@pytest.mark.slow
def test_a_full_disk_is_an_error_to_ours_and_the_death_of_a_mapped_one():
    try:
        ours = peers.attack("mmreplay", "full", 3, 1).seen
        naive = peers.attack("naive", "full", 3, 1).seen
    except Unavailable as error:
        pytest.skip(str(error))
    assert set(ours) <= {"an error, then nothing acked", "an error, then right", "fits"}
    assert any(told.startswith("dies of SIGBUS") for told in naive)
