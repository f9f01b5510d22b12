"""Files that were kept from earlier code open, and say what they said."""

import json
import shutil

import numpy as np
import pytest

import mmreplay as mr
from tests.frozen.bytes_cases import LIMITER
from tests.frozen.frozen_files import load
from tests.frozen.old_files import CASES, OLD

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
RECORDED = load("old.json")


@pytest.fixture
def copy(tmp_path):
    return lambda name: shutil.copytree(OLD / name, tmp_path / name)


def test_the_files_are_there():
    kept = [
        "priorities/samplers/kept/STATE",
        "priorities/samplers/kept/priorities.bin",
        "priorities/samplers/ranked/STATE",
        "limited/limiter/law.json",
        "limited/limiter/learner-000",
        "limited/limiter/writer",
        "shards/data-000001/places.bin",
    ]
    assert [name for name in kept if not (OLD / name).is_file()] == []
    assert set(RECORDED) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_old_files_say_what_they_said(copy, name):
    found = CASES[name](copy(name))
    assert json.loads(json.dumps(found)) == RECORDED[name]


def test_old_priorities_are_read_and_not_reset(copy):
    path = copy("priorities")
    values = np.fromfile(path / "samplers" / "kept" / "priorities.bin", np.float32)
    assert len(np.unique(values)) > 5
    (path / "samplers" / "kept" / "priorities.bin").write_bytes(bytes(len(values) * 4))
    found = CASES["priorities"](path)
    assert json.loads(json.dumps(found["kept"])) != RECORDED["priorities"]["kept"]


def test_an_old_limiter_refuses_other_numbers(copy):
    other = mr.RateLimiter(LIMITER[0] + 1, *LIMITER[1:])
    with pytest.raises(mr.SchemaError):
        mr.ReplayBuffer.open(copy("limited"), "r", limiter=other)
