"""An offline agent learns from a converted dataset what it learns from Minari's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.peer, pytest.mark.slow]
pytest.importorskip("minari", reason="minari is not installed")
pytest.importorskip("jax", reason="jax, which Minari records with, is not installed")
SCRIPT = Path(__file__).parents[3] / "docs" / "examples" / "offline.py"


def test_an_agent_scores_alike_from_a_buffer_and_from_minari():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, "--updates", "1500"],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    # The same draws of equal values: the same agent, move by move.
    assert found["buffer"] == found["minari"]
    # One that plays at random gets some 22 of 500.
    assert found["buffer"] > 300
