"""Draws by seed, parts of splits and results of transforms are as recorded."""

import json

import pytest

from tests.frozen import draws_cases
from tests.frozen.draws_cases import SAMPLERS, TRANSFORMS, draws_by_seed, splits, transformed
from tests.frozen.frozen_files import load

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:windows with boundary='any' hold steps whose next observation is"
    ),
]
RECORDED = load("draws.json")


def test_every_recorded_case_is_tested():
    named = {f"seeds/{name}" for name in SAMPLERS}
    named |= {f"transforms/{name}" for name in TRANSFORMS}
    assert set(RECORDED) == named | {"splits"}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_seed_draws_what_it_drew(tmp_path, name):
    found = draws_by_seed(name, tmp_path)
    assert found == RECORDED[f"seeds/{name}"]
    # In order, none is drawn by chance; else seeds draw differently.
    firsts = {json.dumps(found[seed][2]["digests"]) for seed in found}
    assert len(firsts) == (1 if name.startswith("in_order") else len(found))


def test_splits_are_the_parts_that_they_were(tmp_path):
    assert splits(tmp_path) == RECORDED["splits"]


@pytest.mark.parametrize("engine", ["memmap", "memory"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_make_what_they_made(tmp_path, name, engine):
    found = transformed(name, tmp_path, engine)
    assert json.loads(json.dumps(found)) == RECORDED[f"transforms/{name}"]


@pytest.mark.parametrize("name", ["gae", "her_future", "frame_stack"])
def test_transforms_make_the_same_over_compressed_shards(tmp_path, name):
    found = transformed(name, tmp_path, "zarr")
    assert json.loads(json.dumps(found)) == RECORDED[f"transforms/{name}"]


@pytest.mark.parametrize("name", ["apply_random", "her_future", "her_episode"])
def test_keys_decide_what_chance_makes(name):
    takes = [RECORDED[f"transforms/{name}"][f"take {key}"] for key in draws_cases.KEYS]
    assert len({json.dumps(take) for take in takes}) == len(takes)
