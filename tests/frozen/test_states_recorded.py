"""States in mid-epoch are as they were recorded, and recorded states draw the same."""

import pytest

from tests.frozen import states_cases
from tests.frozen.frozen_files import load
from tests.frozen.states_cases import OTHERS, SAMPLERS, STREAMS, cases, entry_of, sampler_case

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:windows with boundary='any' hold steps whose next observation is"
    ),
]
RECORDED = load("states.json")


def test_every_recorded_case_is_tested():
    made = {entry_of(*each) for each in cases()}
    assert set(RECORDED) == made | set(OTHERS)


@pytest.mark.parametrize(("name", "engine", "layout"), cases())
@pytest.mark.sliced(67)
def test_a_sampler_draws_what_was_recorded(tmp_path, name, engine, layout):
    expected = RECORDED[entry_of(name, engine, layout)]
    state, draws = sampler_case(name, tmp_path, None, engine, layout)
    assert draws == expected["draws"]
    assert state == expected["state"]


@pytest.mark.parametrize(("name", "engine", "layout"), cases())
@pytest.mark.sliced(67)
def test_a_sampler_goes_on_from_a_recorded_state(tmp_path, name, engine, layout):
    expected = RECORDED[entry_of(name, engine, layout)]
    _, draws = sampler_case(name, tmp_path, expected["state"], engine, layout)
    assert draws == expected["draws"]


@pytest.mark.parametrize("name", OTHERS)
def test_what_loads_draws_what_was_recorded(tmp_path, name):
    state, draws = OTHERS[name](tmp_path)
    assert draws == RECORDED[name]["draws"]
    assert state == RECORDED[name]["state"]


@pytest.mark.parametrize("name", OTHERS)
def test_what_loads_goes_on_from_a_recorded_state(tmp_path, name):
    _, draws = OTHERS[name](tmp_path, RECORDED[name]["state"])
    assert draws == RECORDED[name]["draws"]


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.sliced(1)
def test_workers_of_a_stream_give_what_was_recorded(tmp_path, name):
    state, draws = STREAMS[name](tmp_path, None, 2)
    assert draws == RECORDED[name]["draws"]
    assert state == RECORDED[name]["state"]


def test_a_state_says_its_kind_as_it_did():
    kinds = {name: RECORDED[name]["state"]["map"].get("kind") for name in RECORDED}
    assert kinds["sequence/env_major"] == "SequenceSampler"
    assert kinds["episode/env_major"] == "EpisodeSampler"
    assert kinds["stream"] == "ReplayStream"
    assert kinds["concat_stream"] == "ConcatStream"
    assert None not in kinds.values()


def test_states_differ_from_those_of_other_seeds(tmp_path, monkeypatch):
    """A case whose draws did not follow from its seed would freeze nothing."""
    make = SAMPLERS["uniform"]
    monkeypatch.setitem(states_cases.SAMPLERS, "uniform", lambda b, s: make(b, s + 1))
    state, draws = sampler_case("uniform", tmp_path)
    assert draws != RECORDED["uniform/env_major"]["draws"]
    assert state != RECORDED["uniform/env_major"]["state"]
