"""Slices of ``python -m tools.torture``: nothing found, and every mutant found."""

import pytest

from mmreplay.storage.write_path import PartialPageFiller
from tests.slices import count
from tools.torture import kills, powerloss
from tools.torture.mutants import MUTANTS
from tools.torture.rows import GEOMETRIES, HEAPED, SHARDED, SHARDED_HEAPS
from tools.torture.scarce import scarce

ATTACKED = [GEOMETRIES, HEAPED, SHARDED_HEAPS]
"""Rows, values that vary, and values that shards take from their heap."""


def attack_until(enough, states, seed, geometries):
    """Cut the power with seed after seed, five at most, until enough was seen.

    A thread seals shards, so that equal seeds are no equal attacks on these.
    """
    whole = powerloss.Report()
    for more in range(5):
        whole.join(powerloss.attack(states, seed + more, geometries))
        assert whole.findings == {}, whole.examples
        if enough(whole):
            return
    raise AssertionError(f"too little was seen: {whole.seen}")


@pytest.mark.crash
@pytest.mark.parametrize(
    "geometry", GEOMETRIES + HEAPED + SHARDED_HEAPS, ids=lambda geometry: geometry.name
)
@pytest.mark.sliced(4)
def test_no_power_cut_loses_or_invents_a_committed_row(geometry):
    def enough(report):
        return report.seen["how power_cut"] > count(10, 5) and report.seen["how killed"] > count(
            2, 1
        )

    attack_until(enough, count(40, 20), 11, (geometry,))


@pytest.mark.crash
@pytest.mark.parametrize("geometries", [GEOMETRIES, SHARDED], ids=["files", "shards"])
@pytest.mark.sliced(1)
@pytest.mark.slow
def test_no_row_is_lost_where_pages_of_rows_to_come_are_cleared(monkeypatch, geometries):
    cleared, clear = [], PartialPageFiller.clear

    def noted(self, row, first, stop):
        until = clear(self, row, first, stop)
        cleared.extend([first] * (until > first))
        return until

    monkeypatch.setattr(PartialPageFiller, "clear", noted)
    with scarce():
        attack_until(lambda _: len(cleared) > 10, 80, 14, geometries)


@pytest.mark.crash
@pytest.mark.parametrize("geometries", ATTACKED, ids=["rows", "heaps", "shards"])
@pytest.mark.sliced(1)
def test_no_kill_loses_a_published_row(geometries):
    states = count(16, 3)
    report = kills.attack(states, 12, geometries=geometries)
    assert report.findings == {}, report.examples
    assert report.states == states


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("geometries", ATTACKED, ids=["rows", "heaps", "shards"])
@pytest.mark.parametrize("seed", [101, 102])
def test_nothing_is_found_in_many_power_cuts(seed, geometries):
    report = powerloss.attack(1000, seed, geometries)
    assert report.findings == {}, report.examples


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("geometries", ATTACKED, ids=["rows", "heaps", "shards"])
def test_nothing_is_found_in_many_kills(geometries):
    report = kills.attack(150, 13, geometries=geometries)
    assert report.findings == {}, report.examples


def takes_long(mutant):
    """It needs thousands of states, or those that are made longest."""
    return mutant.early_crashes or mutant.name in ("CommitEarlyTails", "NoRecheck")


@pytest.mark.crash
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, marks=[pytest.mark.slow] if takes_long(mutant) else [])
        for mutant in MUTANTS
    ],
    ids=lambda mutant: mutant.name,
)
@pytest.mark.sliced(6)
def test_a_protocol_without_one_of_its_rules_is_caught(mutant):
    most = 9000 if mutant.early_crashes else 3000
    report = mutant.attack(most, 1)
    assert report.findings
    assert report.states < most
    if mutant.geometries is SHARDED:
        # mmreplay itself does not look at what its group tells others.
        assert all(kind.startswith("group") for kind in report.findings)
