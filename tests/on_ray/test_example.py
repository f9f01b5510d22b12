"""docs/examples/ray_dqn.py runs as it stands, and learns."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gymnasium", reason="Gymnasium is not installed: see make ray")

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ray_dqn.py"
# A policy at random balances the pole for 22 steps on average. The means of the last
# rounds were 110 to 500 with five seeds.
LEARNED = 60


@pytest.mark.slow
def test_the_example_learns_on_two_nodes_that_it_starts(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    means = [int(mean) for mean in re.findall(r"mean return (\d+)", done.stdout)]
    assert len(means) == 40
    assert max(means) > LEARNED > means[0]
    assert done.stdout.splitlines()[-1] == "2 nodes had rings"
