"""What trees are given: capacities, indices, arrays that change meanwhile."""

import subprocess
import sys

import numpy as np
import pytest

from mmreplay.samplers.sum_tree import SumTree

RACE = """
import sys, threading
import numpy as np
from mmreplay import SumTree

tree, count = SumTree(1000), 100_000
good = np.arange(count) % 1000
indices, values, stop = good.copy(), np.ones(count), threading.Event()

def change():
    while not stop.is_set():
        indices[:] = 1 << 40
        indices[:] = good

thread = threading.Thread(target=change, daemon=True)
thread.start()
for _ in range(300):
    for use in (lambda: tree.set(indices, values), lambda: tree.get(indices)):
        try:
            use()
        except (IndexError, ValueError):
            pass  # whatever stood there when it was looked at
stop.set()
thread.join()
tree.set(good, values)
assert tree.total == 1000.0
"""


def test_indices_that_a_thread_changes_meanwhile_never_lead_out_of_the_tree():
    """Of the kernel that runs; numpy looks at every index where it uses it."""
    ran = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("capacity", [0, 2.5, "a", True])
def test_a_capacity_that_is_no_number_of_leaves_is_refused(capacity):
    with pytest.raises(ValueError, match=f"tree capacity must be .*, got {capacity!r}"):
        SumTree(capacity)


def test_an_index_beyond_every_integer_is_quoted_unchanged():
    tree, index = SumTree(5), np.array([3, 2**63], np.uint64)
    for use in (lambda: tree.set(index, np.ones(2)), lambda: tree.get(index)):
        with pytest.raises(IndexError, match=rf"tree index must be in \[0, 4\], got {2**63}"):
            use()
    assert tree.total == 0
