"""Numbers by step."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError
from mmreplay.samplers.priority_distribution import Scheduled


@pytest.mark.parametrize(("start", "stop", "steps"), [(0.4, 1.0, 10), (1.0, 0.0, 3), (0.5, 0.5, 1)])
def test_a_linear_schedule_is_numpys_line_and_then_stays(start, stop, steps):
    schedule = mr.LinearSchedule(start, stop, steps)
    line = np.linspace(start, stop, steps + 1)
    found = [schedule(step) for step in range(steps + 1)]
    np.testing.assert_allclose(found, line)
    assert schedule(steps) == schedule(steps + 1) == schedule(10**12) == stop


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((float("nan"), 1, 5), "LinearSchedule start must be a finite number, got nan"),
        ((0, "x", 5), "LinearSchedule stop must be a finite number, got 'x'"),
        ((0, 1, 0), "LinearSchedule steps must be an integer of at least 1, got 0"),
        ((0, 1, 2.0), r"LinearSchedule steps must be an integer of at least.*got 2\.0"),
        ((0, True, 2), "LinearSchedule stop must be a finite number, got True"),
    ],
)
def test_a_schedule_that_is_none_is_refused(arguments, message):
    with pytest.raises(SchemaError, match=message):
        mr.LinearSchedule(*arguments)


def test_constants_and_callables_are_one_thing():
    assert Scheduled("beta", 0.5, 1).at(99) == 0.5
    assert Scheduled("beta", np.float32(0.5), 1).constant
    assert Scheduled("beta", lambda step: step / 10, 1).at(3) == 0.3
    assert not Scheduled("beta", mr.LinearSchedule(0, 1, 2), 1).constant


def test_a_callable_that_leaves_the_range_is_named():
    with pytest.raises(SchemaError, match=r"beta must be a number in \[0, 1\] or.*got 3"):
        Scheduled("beta", lambda step: step, 1).at(3)
