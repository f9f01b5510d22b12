"""The programs of docs/ray.md run as they stand there, on the cluster of the tests."""

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "ray.md"
# Those of Ray Train and RLlib are parts of programs, which test_train.py and
# test_rllib.py have as a whole.
PROGRAMS = [
    block
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    if "ray.init()" in block
]


class Enough(Exception):
    """Ends a training loop that has no end of its own."""


def test_the_page_has_programs():
    assert len(PROGRAMS) >= 5


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_of_the_page_runs(number, cluster, tmp_path, monkeypatch):
    # It is connected.
    monkeypatch.setattr(ray, "init", lambda: None)
    batches = []

    def learn(*arguments):
        batches.append(arguments)
        if len(batches) > 3:
            raise Enough
        return np.ones(len(arguments[0]))

    block = PROGRAMS[number].replace("/tmp/replay", str(tmp_path / "replay"))
    if "runs/cartpole" in block:
        # Workers have the working folder that the test process began with.
        path = str(tmp_path / "cartpole")
        block = block.replace("runs/cartpole", path)
    names = {"__name__": "page", "learn": learn}
    if '("steps"' in block and "mr.ray.writer(" not in block:
        schema = mr.Schema(
            {"observation": mr.Field((4,), "float32"), "action": mr.Field((), "int64")}
        )
        root = str(tmp_path / "replay")
        with mr.ray.writer("steps", schema, 1000, root=root) as writer:
            writer.extend(
                observation=np.zeros((500, 4), np.float32), action=np.zeros(500, np.int64)
            )
    try:
        with contextlib.suppress(Enough):
            exec(compile(block, "ray.md", "exec"), names)
    finally:
        if isinstance(writer := names.get("writer"), mr.ray.RingWriter):
            writer.close()
        calls = r'mr\.ray\.(?:writer|thin_ring|ReplayClient)\(\s*"(\w+)"'
        for run in set(re.findall(calls, block)):
            with contextlib.suppress(mr.SchemaError):
                mr.ray.stop(run)
    assert batches or "learn(" not in block
