"""Batches of a client over random rings are what plain-Python twins say."""

import pytest

pytest.importorskip("ray", reason="Ray is not installed: see make ray")
pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")

from tests.combinations.cases import draw_cases
from tests.combinations.run import run_case


@pytest.mark.parametrize("case", list(draw_cases(8, 46)), ids=lambda case: case.kind)
def test_batches_of_a_client_are_what_the_twins_of_its_rings_say(case):
    failure = run_case(case, ["ReplayClient"])
    assert failure is None, f"{failure.text}\n{failure.script()}"
